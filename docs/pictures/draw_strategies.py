"""
Draws pictures of the strategies from what the code itself computes: who holds what, what fits.

    python docs/pictures/draw_strategies.py                # all; each as assets/NAME_light.svg and assets/NAME_dark.svg
    python docs/pictures/draw_strategies.py placements     # who holds which part of the model (placements.py)
    python docs/pictures/draw_strategies.py memory         # memory of a GPU by strategy and model (planning/memory.py)
    python docs/pictures/draw_strategies.py bytes          # loss against bytes sent (loss_by_bytes.json)
"""

import argparse
import json
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(REPO))

import svg
from svg import Drawing

RANKS = 4
NAMES = ['placements', 'memory', 'bytes']

# --- WHO HOLDS WHAT ---------------------------------------------------------------------------------------------------


def rectangles(masks):
    """
    [(x, y, width, height)] that cover what is True in the matrices of a model. The matrices stand side by side in a
    square of side 1, and the width of each is its share of the elements, so that areas are shares of the model.

    masks: {name: boolean array of rows and columns}, in the model's order.
    """
    total, left, found = sum(mask.size for mask in masks.values()), 0.0, []
    for mask in masks.values():
        width, (rows, columns) = mask.size / total, mask.shape
        first = 0
        for row in range(1, rows + 1):  # rows first to row - 1 are alike
            if row < rows and (mask[row] == mask[first]).all():
                continue
            edges = [
                0,
                *(index for index in range(1, columns) if mask[first, index] != mask[first, index - 1]),
                columns,
            ]
            for begin, end in zip(edges, edges[1:], strict=False):
                if mask[first, begin]:
                    across = left + begin / columns * width
                    found.append((first / rows, (row - first) / rows, across, (end - begin) / columns * width))
            first = row
        left += width
    merged = []  # a rectangle that touches its left neighbor and is as high becomes one with it
    for y, height, x, width in sorted(found):
        if merged and merged[-1][:2] == (y, height) and abs(merged[-1][2] + merged[-1][3] - x) < 1e-9:
            x, width = merged[-1][2], merged.pop()[3] + width
        merged.append((y, height, x, width))
    return [(x, y, width, height) for y, height, x, width in merged]


def draw_placements(found, theme):
    """found: {strategy: [Held of each rank]}."""
    panel, high, across, down = 66, 26, 7, 6  # width and height of a box, and the distances between two
    column, row, top = 310, 150, 92
    colors = {'weights': (theme.blue, theme.blue2), 'gradients': (theme.orange, theme.orange2)}
    colors['moments'] = (theme.green, theme.green2)
    about = 'Which part of the weights, gradients and optimizer moments each of 4 ranks holds: ' + ', '.join(found)
    drawing = Drawing(top + 5 * row + 24, about)
    drawing.text(0, 26, 'Which rank holds what', theme.text, bold=True, size=25)
    drawing.text(0, 54, f'each box is the model on one of {RANKS} ranks', theme.quiet)
    for number, (name, ranks) in enumerate(found.items()):
        left, above = column * (number % 2), top + row * (number // 2)
        drawing.text(left, above, name, theme.text, bold=True)
        for rank, held in enumerate(ranks):
            for line, kind in enumerate(held.own):
                x, y = left + rank * (panel + across), above + 10 + line * (high + down)
                drawing.box(x, y, panel, high, theme.empty)
                color = colors[kind][held.copy]
                for part, opacity in ((held.whole, 0.35), (held.own, 1)):
                    places = rectangles(part[kind])
                    places = [(x + a * panel, y + b * high, c * panel, d * high) for a, b, c, d in places]
                    drawing.boxes(places, color, opacity)
    # what the colors are
    left, above = column, top + row * (len(found) // 2)
    for line, (kind, (color, _)) in enumerate(colors.items()):
        y = above + 10 + line * (high + down)
        drawing.box(left, y, panel, high, color)
        drawing.text(left + panel + 14, y + 20, kind, theme.text)
    y = above + row - 6
    drawing.box(0, y, panel, high, theme.blue, opacity=0.35)
    drawing.text(panel + 14, y + 20, 'here for a while', theme.text)
    drawing.box(left, y, panel, high, theme.blue2)
    drawing.text(left + panel + 14, y + 20, 'trains on its own', theme.text)
    return drawing


# --- WHAT FITS --------------------------------------------------------------------------------------------------------

GPUS, CARD_GB = 8, 80
LLAMA = dict(arch='llama', vocab_size=128256, block_size=4096)
MODELS = {
    '124M': dict(arch='gpt2', n_layer=12, n_head=12, n_embd=768, bias=False, vocab_size=50257, block_size=1024),
    '1.3B': dict(arch='gpt2', n_layer=24, n_head=16, n_embd=2048, bias=False, vocab_size=50257, block_size=2048),
    '8B': dict(LLAMA, n_layer=32, n_head=32, n_kv_head=8, n_embd=4096, mlp_hidden_dim=14336),
    '70B': dict(LLAMA, n_layer=80, n_head=64, n_kv_head=8, n_embd=8192, mlp_hidden_dim=28672),
}
LAYOUTS = {  # name -> strategy, script, keys
    'DDP': ('ddp', 'train_ddp.py', {}),
    'ZeRO 1': ('fsdp', 'train_fsdp.py', dict(fsdp_impl='manual', zero_stage=1)),
    'ZeRO 2': ('fsdp', 'train_fsdp.py', dict(zero_stage=2, accumulate='sharded')),
    'ZeRO 3': ('fsdp', 'train_fsdp.py', dict(accumulate='sharded')),
    'tensor 8': ('fsdp', 'train_parallel.py', dict(tensor_parallel=8, accumulate='sharded')),
    'pipeline 8': ('pipeline', 'train_pipeline.py', dict(pipeline_stages=8)),
}
PARTS = ('weights', 'gradients', 'moments', 'for a while')


def held_gb():
    """{model: {layout: {part of PARTS: GB of one of GPUS ranks}}}; None where the layout cannot cut the model."""
    from layout import Layout
    from model import ModelConfig
    from planning import checks, memory, roofline
    from planning.sizes import empty_model

    found = {}
    batch = dict(batch_size=1, global_batch_size=32, activation_checkpointing='full')
    for model, shape in MODELS.items():
        found[model] = {}
        for layout, (strategy, script, own) in LAYOUTS.items():
            keys = roofline.keys_of(script, {**shape, **batch, **own})
            try:
                checks.check(keys, Layout.of(keys, strategy, GPUS), ModelConfig.from_keys(keys))
                parts = memory.memory_bytes(keys, empty_model(keys), GPUS, strategy)
            except ValueError:
                found[model][layout] = None
                continue
            gb = {'weights': parts['weights'], 'gradients': parts['gradients'], 'moments': parts['optimizer']}
            gb['for a while'] = sum(parts.values()) - sum(gb.values())
            found[model][layout] = {part: size / 1e9 for part, size in gb.items()}
    return found


def draw_memory(found, theme):
    """found: held_gb()."""
    left, right, top, row = 128, 486, 96, 25  # bars are cut off at the right, and their numbers stand behind them
    colors = dict(zip(PARTS, (theme.blue, theme.orange, theme.green, theme.quiet), strict=True))
    most = 120  # GB at the right end
    x = svg.scale(0, most, left, right)
    drawing = Drawing(top + len(found) * (46 + row * len(LAYOUTS)), 'Memory of a GPU by model and strategy')
    drawing.text(0, 26, f'Memory of each of {GPUS} GPUs', theme.text, bold=True, size=25)
    across = 0
    for part, color in colors.items():
        drawing.box(across, 42, 18, 18, color)
        drawing.text(across + 25, 58, part, theme.text)
        across += 25 + 12.4 * len(part) + 22
    card_begins = top - 10
    above = top
    for model, layouts_of_model in found.items():
        drawing.text(0, above + 20, f'{model} parameters', theme.text, bold=True)
        above += 34
        for layout, parts in layouts_of_model.items():
            drawing.text(left - 10, above + 17, layout, theme.quiet, anchor='end')
            if parts is None:
                drawing.text(left + 6, above + 17, 'does not divide', theme.quiet)
            else:
                begin, total = 0.0, sum(parts.values())
                for part, gb in parts.items():
                    end = min(begin + gb, most)
                    if end > begin:
                        drawing.box(x(begin), above + 2, x(end) - x(begin), row - 6, colors[part])
                    begin = end
                words = f'{total:,.0f} GB' if total >= 10 else f'{total:.1f} GB'
                color = theme.text if total <= CARD_GB else theme.red
                place = x(min(total, most)) + 8
                if place < x(CARD_GB) < place + 70:  # not across that line
                    place = x(CARD_GB) + 10
                drawing.text(place, above + 17, words, color)
            above += row
        above += 12
    drawing.line([(x(CARD_GB), card_begins), (x(CARD_GB), above - 12)], theme.red, width=2.5, dashes='6 5')
    drawing.text(x(CARD_GB) + 8, card_begins + 14, f'{CARD_GB} GB', theme.red, bold=True)
    return drawing


# --- WHAT TRAVELS, FOR WHICH LOSS -------------------------------------------------------------------------------------

DATA = Path(__file__).parent / 'loss_by_bytes.json'
# Where a name stands: x and y from its point, in units of the page, and which end of the name is there.
PLACES = {
    'DDP': (-4, 36, 'middle'), 'DDP, Muon': (-4, 30, 'middle'), 'DiLoCo': (12, -12, 'start'), 'MuLoCo': (-14, 7, 'end'),
    'DiLoCo, int4': (6, -20, 'middle'), 'SparseLoCo, a quarter': (-8, 44, 'middle'), 'SparseLoCo, 3%': (16, 7, 'start'),
}  # fmt: skip


def draw_bytes(found, theme):
    left, right, top, bottom = 56, 584, 92, 470
    runs = found['runs']
    drawing = Drawing(552, 'Loss against bytes sent: ' + ', '.join(run['name'] for run in runs))
    drawing.text(0, 26, 'Loss against bytes sent', theme.text, bold=True, size=25)
    drawing.text(0, 62, 'loss', theme.quiet)
    x, y = svg.scale(10, 50000, left, right, logarithmic=True), svg.scale(3.8, 4.6, bottom, top)
    for tenths in range(38, 47, 2):
        drawing.line([(left, y(tenths / 10)), (right, y(tenths / 10))], theme.line, width=1)
        drawing.text(left - 10, y(tenths / 10) + 7, f'{tenths / 10:.1f}', theme.quiet, anchor='end')
    for kb, words in ((10, '10 kB'), (100, '100 kB'), (1000, '1 MB'), (10000, '10 MB')):
        drawing.line([(x(kb), bottom), (x(kb), bottom + 8)], theme.quiet)
        drawing.text(x(kb), bottom + 32, words, theme.quiet, anchor='start' if kb == 10 else 'middle')
    drawing.text((left + right) / 2, bottom + 62, 'sent between two nodes, per step', theme.quiet, anchor='middle')
    runs, (alone,) = [run for run in runs if run['kB']], [run for run in runs if not run['kB']]
    level = y(alone['loss'][0])  # it sends nothing, so it has no place on a logarithmic axis
    drawing.line([(left, level), (right, level)], theme.red, width=2.5, dashes='6 5')
    drawing.text(right, level - 12, f'{alone["name"]}, which sends nothing', theme.red, anchor='end')
    point = {run['name']: (x(run['kB']), y(run['loss'][0])) for run in runs}
    drawing.line([point[name] for name in ('DDP', 'DiLoCo', 'DiLoCo, int4')], theme.blue, width=1.5, dashes='2 6')
    drawing.line([point[name] for name in ('DDP, Muon', 'MuLoCo')], theme.orange, width=1.5, dashes='2 6')
    drawing.line([point[name] for name in ('SparseLoCo, a quarter', 'SparseLoCo, 3%')], theme.green, 1.5, dashes='2 6')
    for run in runs:
        color = theme.orange if 'Mu' in run['name'] else theme.green if 'Sparse' in run['name'] else theme.blue
        (mean, low, high), across = run['loss'], x(run['kB'])
        drawing.line([(across, y(low)), (across, y(high))], color, width=3)
        drawing.dot(across, y(mean), 8, color)
        right_by, down_by, anchor = PLACES[run['name']]
        drawing.text(across + right_by, y(mean) + down_by, run['name'], theme.text, anchor=anchor)
    return drawing


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('names', nargs='*', default=NAMES, help='of pictures, as above')
    arguments = parser.parse_args()
    for name in arguments.names:
        if name == 'placements':
            import placements

            found = placements.held_by_all()
            svg.save('placements', lambda theme, found=found: draw_placements(found, theme))
        elif name == 'memory':
            found = held_gb()
            svg.save('memory', lambda theme, found=found: draw_memory(found, theme))
        elif name == 'bytes':
            found = json.loads(DATA.read_text())
            svg.save('loss_by_bytes', lambda theme, found=found: draw_bytes(found, theme))
        else:
            parser.error(f'{name}: expected {", ".join(NAMES)}')
