"""
A wrong gradient behind right losses: Qwen3 in transformers' tensor parallelism, with three micro-steps per step.

    python docs/pictures/draw_prove.py --run        # half a minute on 2 cores; writes prove.json, then draws
    python docs/pictures/draw_prove.py              # draws assets/prove_light.svg and assets/prove_dark.svg from it

The same tiny model is trained by SGD in one process and on two ranks, on the same batches. After each micro-step
transformers 5.24.0 sums the gradients of q_norm and k_norm over the ranks, those of earlier micro-steps once more.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(REPO), str(REPO / 'benchmarks')]

from svg import Drawing, save, scale

RESULTS = Path(__file__).parent / 'prove.json'
STEPS, RATE = 60, 0.05
SHOWN = 'q_norm', 'k_norm', 'q_proj'  # of the first layer; the last one, like all others, is right


def train(ranks, folder):
    """(losses, {SHOWN: norm of its update in each step}) on so many ranks; the weights lie in `folder`."""
    import torch
    import torch.distributed as dist
    from published_faults import micro_steps, model_of, sum_of, targets_of
    from transformers.distributed import DistributedConfig

    from proving.scripts import whole

    cls, _ = model_of('qwen3')
    how = {}
    if ranks > 1:
        dist.init_process_group('gloo')
        how['distributed_config'] = DistributedConfig(tp_size=ranks)
    model = cls.from_pretrained(folder, dtype=torch.float32, attn_implementation='eager', **how)
    named = {
        name: p for name, p in model.named_parameters() if any(f'layers.0.self_attn.{of}.' in name for of in SHOWN)
    }
    opt, batches = torch.optim.SGD(model.parameters(), lr=RATE, foreach=False), micro_steps(3)
    losses, updates = [], {of: [] for of in SHOWN}
    for _ in range(STEPS):
        before = {name: whole(p) for name, p in named.items()}
        losses.append(0.0)
        for batch in batches:
            loss = sum_of(model(input_ids=batch['x'], use_cache=False).logits, batch['y']) / targets_of(batches)
            loss.backward()
            losses[-1] += loss.item()
        opt.step()
        opt.zero_grad()
        for name, p in named.items():
            updates[name.split('.')[-2]].append((whole(p) - before[name]).norm().item())
    return losses, updates


def run():
    import torch
    import transformers
    from published_faults import model_of

    from proving.check import disturbed
    from proving.ranks import run_ranks

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        cls, config = model_of('qwen3')
        disturbed(cls(config)).save_pretrained(folder)
        (one,) = run_ranks(1, lambda rank: train(1, folder))
        two = run_ranks(2, lambda rank: train(2, folder))[0]
    ratios = {of: [a / b for a, b in zip(two[1][of], one[1][of], strict=True)] for of in SHOWN}
    return {'transformers': transformers.__version__, 'one': one[0], 'two': two[0], 'ratios': ratios}


# --- the picture ------------------------------------------------------------------------------------------------------

LEFT, RIGHT, LOSSES, RATIOS = 70, 578, (76, 262), (350, 536)  # y of the two: top and bottom


def draw(found, theme):
    apart = max(abs(a - b) / b for a, b in zip(found['two'], found['one'], strict=True))
    drawing = Drawing(600, 'The losses of two ranks equal those of one process, but two weights are updated too far.')
    x = scale(1, len(found['one']), LEFT, RIGHT)
    drawing.text(0, 26, 'Right losses, wrong updates', theme.text, bold=True, size=25)

    low, high = int(min(found['one'])), int(max(found['one'])) + 1
    y = scale(low, high, LOSSES[1], LOSSES[0])
    drawing.text(0, LOSSES[0] - 18, f'loss: at most {100 * apart:.2g}% apart', theme.quiet)
    for value in range(low, high + 1):
        drawing.line([(LEFT, y(value)), (RIGHT, y(value))], theme.line, width=1)
        drawing.text(LEFT - 12, y(value) + 7, str(value), theme.quiet, anchor='end')
    for losses, color, width in ((found['one'], theme.line, 11), (found['two'], theme.blue, 3)):
        drawing.line([(x(step), y(loss)) for step, loss in enumerate(losses, 1)], color, width=width)
    for number, (words, width, color) in enumerate(
        (('one process', 11, theme.line), ('2 ranks, tensor parallel', 3, theme.blue))
    ):
        down = LOSSES[0] + 22 + 30 * number
        drawing.line([(300, down), (344, down)], color, width=width)
        drawing.text(356, down + 7, words, theme.text)

    y = scale(0, 4, RATIOS[1], RATIOS[0])
    drawing.text(0, RATIOS[0] - 18, 'update on 2 ranks / update in one process', theme.quiet)
    for value in range(5):
        drawing.line([(LEFT, y(value)), (RIGHT, y(value))], theme.line, width=1)
        drawing.text(LEFT - 12, y(value) + 7, str(value), theme.quiet, anchor='end')
    for of, color in zip(SHOWN, (theme.red, theme.orange, theme.green), strict=True):
        drawing.line([(x(step), y(min(ratio, 4))) for step, ratio in enumerate(found['ratios'][of], 1)], color, width=3)
    for number, (of, color) in enumerate(zip(SHOWN, (theme.red, theme.orange, theme.green), strict=True)):
        across = LEFT + 10 + 150 * number
        drawing.line([(across, RATIOS[0] + 12), (across + 30, RATIOS[0] + 12)], color, width=3)
        drawing.text(across + 40, RATIOS[0] + 19, of, theme.text)
    for value in range(0, len(found['one']) + 1, 20):
        drawing.text(x(max(1, value)), RATIOS[1] + 28, str(max(1, value)), theme.quiet, anchor='middle')
    drawing.text((LEFT + RIGHT) / 2, RATIOS[1] + 54, 'step', theme.quiet, anchor='middle')
    return drawing


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--run', action='store_true', help='train first')
    if parser.parse_args().run:
        RESULTS.write_text(json.dumps(run()) + '\n')
    save('prove', lambda theme: draw(json.loads(RESULTS.read_text()), theme))
