"""
Does a run keep its losses when its layout changes again and again? Draws such a run on the same run left alone.

    python docs/pictures/draw_layouts.py --run      # some minutes on 2 cores; writes layouts.json, then draws
    python docs/pictures/draw_layouts.py            # draws assets/layouts_light.svg and assets/layouts_dark.svg from it

Both train the model of config/quickstart.py in fp32, on stdlib-bpe2048 (python prepare_data.py). One consists of seven
legs: each leg is another script or another layout, and resumes the checkpoint that the leg before has left in out_dir.
The other is one process from the first step to the last.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(REPO))

from svg import Drawing, save, scale

from benchmarks.runs import metrics, run_script

LEGS = [  # what it is called, ranks, script and keys
    ('one process', 1, 'train_ddp.py', []),
    ('DDP, 2 ranks', 2, 'train_ddp.py', []),
    ('HSDP, 2 × 2 ranks', 4, 'train_fsdp.py', ['--replicate_size=2']),
    ('tensor parallel, 2', 2, 'train_parallel.py', ['--tensor_parallel=2']),
    ('context parallel, 2', 2, 'train_parallel.py', ['--context_parallel=2']),
    ('pipeline, 2 stages', 2, 'train_pipeline.py', []),
    ('one process again', 1, 'train_ddp.py', []),
]
RESULTS = Path(__file__).parent / 'layouts.json'


def train(folder, data_dir, steps_per_leg):
    """Both runs: {'legs': [[name, first step, last step]], 'alone': [loss of each step], 'changing': [the same]}."""
    steps = steps_per_leg * len(LEGS)
    keys = [f'--data_dir={data_dir}', '--dtype=float32', '--device=cpu', f'--lr_decay_iters={steps}']
    keys += [
        '--warmup_iters=40',
        '--log_interval=1',
        '--eval_interval=0',
        '--eval_sequences=0',
        '--checkpoint_interval=0',
    ]
    shutil.rmtree(folder, ignore_errors=True)
    alone, changing = folder / 'alone', folder / 'changing'
    legs = []
    for number, (name, ranks, script, own) in enumerate(LEGS):
        end = (number + 1) * steps_per_leg
        print(f'{name}: {script} {" ".join(own)} on {ranks}, to step {end}', flush=True)
        own = [*own, f'--max_iters={end}', f'--out_dir={changing}']
        run_script(script, 'config/quickstart.py', *keys, *own, nproc=ranks)
        legs.append([name, end - steps_per_leg + 1, end])
    run_script('train_ddp.py', 'config/quickstart.py', *keys, f'--max_iters={steps}', f'--out_dir={alone}')
    losses = {run.name: [row['loss'] for row in metrics(run) if 'loss' in row] for run in (alone, changing)}
    assert len(losses['alone']) == len(losses['changing']) == steps
    return {'legs': legs, **losses}


# --- the picture ------------------------------------------------------------------------------------------------------

LEFT, RIGHT = 70, 578
LOSSES, BARS, DIFFERENCES = (76, 312), 344, (634, 722)  # y on the page: top and bottom; of bars, 34 each, the top
DECADES = (-9, -7, -5)  # equal losses are drawn at the lowest
RAISED = str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹')


def power_of_ten(power):
    return f'10{power}'.translate(RAISED).replace('¹⁰', '10', 1)


def draw(found, theme):
    legs, alone, changing = found['legs'], found['alone'], found['changing']
    colors = [theme.blue, theme.orange, theme.green, theme.pink, theme.sky, theme.red, theme.blue]
    apart = [abs(a - b) / b for a, b in zip(changing, alone, strict=True)]
    names = ', '.join(name for name, _, _ in legs)
    drawing = Drawing(784, f'A run that changes its layout six times ({names}) has the losses of one left alone.')
    x = scale(0, len(alone), LEFT, RIGHT)
    drawing.text(0, 26, 'One run, its layout changed six times', theme.text, bold=True, size=25)

    # losses: the run left alone as a broad band, the other one on top of it
    low, high = int(min(alone)), int(max(alone)) + 1
    y = scale(low, high, LOSSES[1], LOSSES[0])
    for value in range(low, high + 1):
        drawing.line([(LEFT, y(value)), (RIGHT, y(value))], theme.line, width=1)
        drawing.text(LEFT - 12, y(value) + 7, str(value), theme.quiet, anchor='end')
    drawing.line([(x(step), y(loss)) for step, loss in enumerate(alone, 1)], theme.line, width=11)
    for color, (_, first, last) in zip(colors, legs, strict=True):
        steps = range(max(1, first - 1), last + 1)
        drawing.line([(x(step), y(changing[step - 1])) for step in steps], color, width=3)
    for number, (words, width, color) in enumerate(
        (('left alone, one process', 11, theme.line), ('changed on the way', 3, theme.blue))
    ):
        down = y(high - 0.5 - number)
        drawing.line([(300, down), (344, down)], color, width=width)
        drawing.text(356, down + 7, words, theme.text)
    drawing.text(0, LOSSES[0] - 18, 'loss', theme.quiet)

    # who trained when
    for number, (color, (name, first, last)) in enumerate(zip(colors, legs, strict=True)):
        top, begin, end = BARS + 34 * number, x(first - 1), x(last)
        if number:
            drawing.line([(begin, y(changing[first - 1]) + 9), (begin, y(low))], theme.line, width=1.5, dashes='2 5')
        drawing.box(begin, top, end - begin, 22, color, rx=5)
        is_left = end < (LEFT + RIGHT) / 2 + 60
        drawing.text(
            end + 10 if is_left else begin - 10, top + 18, name, theme.text, anchor='start' if is_left else 'end'
        )

    # how far apart the losses are
    lowest, highest = min(DECADES), max(DECADES)
    y = scale(10.0**lowest, 10.0**highest, DIFFERENCES[1], DIFFERENCES[0], logarithmic=True)
    for power in DECADES:
        words = 'equal' if power == lowest else power_of_ten(power)
        drawing.line([(LEFT, y(10.0**power)), (RIGHT, y(10.0**power))], theme.line, width=1)
        drawing.text(LEFT - 10, y(10.0**power) + 7, words, theme.quiet, anchor='end')
    factor, power = f'{max(apart):.1e}'.split('e')
    words = f'{factor} · {power_of_ten(int(power))}'
    drawing.text(0, DIFFERENCES[0] - 18, f'relative difference of the losses: at most {words}', theme.quiet)
    points = [(x(step), y(max(value, 10.0**lowest))) for step, value in enumerate(apart, 1)]
    drawing.boxes([(across - 2, down - 2, 4, 4) for across, down in points], theme.text)
    for value in range(0, len(alone) + 1, len(alone) // len(legs)):
        drawing.text(x(value), DIFFERENCES[1] + 28, str(value), theme.quiet, anchor='middle')
    drawing.text((LEFT + RIGHT) / 2, DIFFERENCES[1] + 54, 'step', theme.quiet, anchor='middle')
    return drawing


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--run', action='store_true', help='train first')
    parser.add_argument('--folder', default='out/layouts', type=Path, help='out_dirs of the runs')
    parser.add_argument('--data_dir', default='data', help='where stdlib-bpe2048 is (python prepare_data.py)')
    parser.add_argument('--steps', default=40, type=int, help='of each leg (default: %(default)s)')
    arguments = parser.parse_args()
    if arguments.run:
        found = train(arguments.folder, arguments.data_dir, arguments.steps)
        RESULTS.write_text(json.dumps(found) + '\n')
    save('layouts', lambda theme: draw(json.loads(RESULTS.read_text()), theme))
