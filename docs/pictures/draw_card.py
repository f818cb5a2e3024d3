"""
Where do the milliseconds of a training step go on a GPU? Draws steps of several models as bars of their kernels.

    python docs/pictures/draw_card.py      # assets/h100_light.svg and assets/h100_dark.svg from h100.json beside it

h100.json has what benchmarks/gpu.py found on one H100 on 2026-11-27: {name of the check: what it found}. A bar is as
long as its step, the mean of ten steps without a trace. Its kernels are those of a step with one, so the rest at the
end holds the gaps between kernels and whatever the two steps differ by.
"""

import json
from pathlib import Path

from svg import Drawing, save, scale

RESULTS = Path(__file__).parent / 'h100.json'
STEPS = [  # the check, and what it trains
    ('124M-gpt2-ddp', 'GPT-2 124M, 32 × 1024 tokens'),
    ('Llama-1B-ddp', 'Llama 1B, 8 × 2048 tokens'),
    ('Llama-1B-float8', 'Llama 1B, float8, under FSDP'),
    ('Enoki-8-heads-ddp', 'Enoki 8 heads, 16 × 2048 tokens'),
]
LEFT, RIGHT, TOP, ROW, BAR = 0, 598, 112, 98, 26


def draw(found, theme):
    """found: the results of the checks."""
    kinds = {  # what benchmarks/gpu.py calls them: what the legend does
        'matmuls': ('matmuls', theme.blue), 'attention': ('attention', theme.sky),
        'softmax and loss': ('loss', theme.orange), 'norms': ('norms', theme.pink),
        'optimizer': ('optimizer', theme.green), 'copies': ('copies', theme.red),
        'elementwise and others': ('elementwise', theme.quiet),
    }  # fmt: skip
    models = ', '.join(f'{words} {found[name]["tokens_per_sec"]:,.0f} tokens/s' for name, words in STEPS)
    drawing = Drawing(TOP + ROW * len(STEPS) + 26, f'Where the time of a step goes on one H100: {models}')
    drawing.text(0, 26, 'A training step on one H100', theme.text, bold=True, size=25)
    across, down = 0, 44
    for words, color in [*kinds.values(), ('no kernel', theme.line)]:
        width = 25 + 11 * len(words) + 18
        if across + width > 620:
            across, down = 0, down + 30
        drawing.box(across, down, 18, 18, color)
        drawing.text(across + 25, down + 16, words, theme.text)
        across += width
    for number, (name, words) in enumerate(STEPS):
        step, top = found[name], TOP + ROW * number
        x = scale(0, step['total'], LEFT, RIGHT)
        drawing.text(0, top + 16, words, theme.text, bold=True)
        drawing.text(RIGHT, top + 16, f'{step["total"]:.0f} ms', theme.quiet, anchor='end')
        drawing.box(LEFT, top + 26, RIGHT - LEFT, BAR, theme.line)
        begin = 0.0
        for kind, (_, color) in kinds.items():
            end = begin + step['kernels_ms'][kind]
            drawing.box(x(begin), top + 26, x(end) - x(begin), BAR, color)
            begin = end
        speed = f'{step["tokens_per_sec"]:,.0f} tokens/s, {step["mfu"]:.1%} MFU'
        if name == '124M-gpt2-ddp':
            speed += f"; nanoGPT's train.py {found['nanogpt']['nanoGPT tokens/s']:,}"
        drawing.text(0, top + 26 + BAR + 20, speed, theme.quiet)
    return drawing


if __name__ == '__main__':
    save('h100', lambda theme: draw(json.loads(RESULTS.read_text()), theme))
