"""
Draws one round of DiLoCo as it was measured: when a replica computes, when the link is busy, when the replica waits.

    python benchmarks/slow_link.py --cases=diloco-20,streaming-20 --links=100 --out_dir=out/links ...
    python benchmarks/draw_round.py out/links/diloco-20-100.0 out/links/streaming-20-100.0 --output=assets/round.png

The first command needs Linux and root. An inner step, an exchange and the waiting are drawn as long as they were on
average in metrics.jsonl, over all rounds but the first.
"""

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.runs import metrics
from runtime import checkpoint
from system import errors

COLOURS = {'inner step': '#0072B2', 'exchange': '#E69F00', 'waiting': '#D55E00'}  # Okabe and Ito


def measured(out_dir):
    """(keys of the run; seconds of an inner step, of a round's exchanges, and of the waiting in a round)."""
    keys = checkpoint.read_state(checkpoint.choose_to_read(out_dir))['config']
    rows = [row for row in metrics(out_dir) if 'diloco/wait_s' in row and row['step'] > keys['inner_steps']]
    step = statistics.fmean(row['time/total'] - row.get('time/outer', 0) for row in rows if 'time/total' in row) / 1000
    exchange, waited = (statistics.fmean(row[f'diloco/{kind}_s'] for row in rows) for kind in ('transfer', 'wait'))
    return keys, step, exchange, waited


def draw(axes, out_dir):
    """One round and what follows it, time in seconds to the right."""
    keys, step, exchange, waited = measured(out_dir)
    H, P, tau = keys['inner_steps'], keys['num_fragments'], keys['overlap_steps']
    now, each = 0.0, {'exchange': exchange / P, 'waiting': waited / P}
    sent_after = {(index + 1) * H // P for index in range(P)}
    bars = {kind: [] for kind in COLOURS}  # kind -> [(lane, start, length)]
    lands = {sent + tau for sent in sent_after} | {(sent + tau) % H for sent in sent_after if sent + tau > H}
    for number in range(1, H + 1 + H // 4):
        bars['inner step'].append((1, now, 0.94 * step))
        now += step
        if number in sent_after:
            bars['exchange'].append((0, now, each['exchange']))
        if number in lands and each['waiting'] > 0:
            bars['waiting'].append((1, now, each['waiting']))
            now += each['waiting']
    for kind, segments in bars.items():
        for lane in (0, 1):
            lane_bars = [(start, length) for where, start, length in segments if where == lane]
            axes.broken_barh(lane_bars, (lane - 0.35, 0.7), color=COLOURS[kind], label=kind if lane_bars else None)
    axes.set_yticks([0, 1], ['link', 'replica'])
    streams = f', {P} fragments, overlap of {tau} steps' if P > 1 else ''
    axes.set_title(f'{H} inner steps, {keys["exchange_dtype"]}{streams}', loc='left', fontsize=10)
    axes.spines[['top', 'right', 'left']].set_visible(False)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('runs', nargs='+', metavar='OUT_DIR')
    parser.add_argument('--output', default='round.png', help='the PNG to write (default: %(default)s)')
    arguments = parser.parse_args()
    errors.report_errors()
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot as plt

    height = 0.6 + 1.5 * len(arguments.runs)
    figure, rows = plt.subplots(
        len(arguments.runs), 1, figsize=(10, height), sharex=True, squeeze=False, layout='constrained'
    )
    for axes, out_dir in zip(rows[:, 0], arguments.runs, strict=True):
        draw(axes, out_dir)
    rows[-1, 0].set_xlabel('seconds')
    handles = {
        label: handle for axes in rows[:, 0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc='outside upper right', ncols=3, frameon=False)
    figure.savefig(arguments.output, dpi=120)
