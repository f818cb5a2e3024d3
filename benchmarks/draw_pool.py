"""
Draws a pool of DiLoCo replicas over time: when each job trained, waited or was away, and how much the pool has trained.

    python tests/pool_storm.py --kills=6 --seeds=1 --step_s=0.3 --pause=7 --folder=out/storm
    python benchmarks/draw_pool.py out/storm/storm_1/* --output=assets/pool.png

There is one row for each out_dir. The journal of any job, rounds.jsonl in its out_dir, describes the whole pool, so
only the longest of those given is read. The times in it come from the jobs' own clocks.
"""

import argparse
import json
from pathlib import Path

COLORS = {'trained': '#0072B2', 'waited': '#E69F00', 'lost': '#D55E00', 'away': '#DDDDDD'}  # Okabe and Ito
MARKS = {'joined': ('^', '#009E73'), 'left': ('v', '#000000'), 'killed': ('x', '#D55E00')}


def read_journal(out_dirs):
    """The rounds of the longest rounds.jsonl."""
    journals = [Path(out_dir, 'rounds.jsonl') for out_dir in out_dirs]
    journals = [path.read_text().splitlines() for path in journals if path.exists()]
    if not journals:
        raise SystemExit(f'no rounds.jsonl in {", ".join(map(str, out_dirs))}')
    return [json.loads(line) for line in max(journals, key=len)]


def lanes_of(rounds):
    """({out_dir: {kind: [(from, to), ...], mark: [when, ...]}}, time of the pool's first claim); times in the
    dictionary are seconds since that claim.

    A job waits from giving its delta until its next claim. If it held a claim in a round and gave nothing in time,
    nobody knows since when it was gone, so it is drawn as lost from the outer step before to the one of that round, and
    as killed if no later round mentions it. From then until the next job in the same out_dir makes a claim, the row is
    drawn as away.
    """
    zero = min(delta['began'] for commit in rounds for delta in commit['deltas'])
    place_of = {delta['job']: delta['out_dir'] for commit in rounds for delta in commit['deltas']}
    lanes = {place: {kind: [] for kind in (*COLORS, *MARKS)} for place in sorted({*place_of.values()})}
    lasts = {entry['job']: commit['round'] for commit in rounds for entry in (*commit['deltas'], *commit['lost'])}
    seen, busy_until, before = set(), {}, 0.0  # jobs; {out_dir: until when its row is drawn}; the outer step before
    for commit in rounds:
        closed = commit['time'] - zero
        for delta in commit['deltas']:
            began, gave = delta['began'] - zero, delta['gave'] - zero
            place, lane = delta['out_dir'], lanes[delta['out_dir']]
            if delta['job'] not in seen:
                lane['joined'].append(began)
            lane['waited' if delta['job'] in seen else 'away'].append((busy_until.get(place, began), began))
            seen.add(delta['job'])
            lane['trained'].append((began, gave))
            busy_until[place] = gave
            if delta['leaves']:
                lane['left'].append(gave)
        for lost in commit['lost']:
            place = place_of.get(lost['job'])
            if place is None:
                continue  # it never gave anything
            lane, began = lanes[place], max(before, busy_until.get(place, before))
            if lost['job'] not in seen:
                lane['joined'].append(began)
            lane['waited' if lost['job'] in seen else 'away'].append((busy_until.get(place, began), began))
            seen.add(lost['job'])
            lane['lost'].append((began, closed))
            if (
                lasts[lost['job']] == commit['round'] < len(rounds) - 2
            ):  # in the last rounds there is not work for every job
                lane['killed'].append(closed)
            busy_until[place] = closed
        before = closed
    return lanes, zero


def draw(figure, rounds):
    lanes, zero = lanes_of(rounds)
    ratio = 0.55 * len(lanes)
    (above, below) = figure.subplots(2, 1, sharex=True, height_ratios=[ratio, 1.0])
    closes = [commit['time'] - zero for commit in rounds]
    above.vlines(closes, -0.6, len(lanes) - 0.4, color='#999999', linewidth=0.6, zorder=0, label='outer step')
    for number, lane in enumerate(lanes.values()):
        for kind, color in COLORS.items():
            bars = [(first, last - first) for first, last in lane[kind] if last > first]
            height = 0.12 if kind == 'away' else 0.5
            above.broken_barh(bars, (number - height / 2, height), color=color)
        for kind, (marker, color) in MARKS.items():
            above.scatter(lane[kind], [number - 0.38] * len(lane[kind]), marker=marker, color=color, s=28, zorder=3)
    for kind, color in COLORS.items():
        above.plot([], [], color=color, linewidth=2 if kind == 'away' else 7, label=kind)
    for kind, (marker, color) in MARKS.items():
        above.scatter([], [], marker=marker, color=color, s=28, label=kind)
    above.set_yticks(range(len(lanes)), [Path(place).name for place in lanes])
    above.set_ylim(len(lanes) - 0.4, -0.6)
    tokens = [0]
    for commit in rounds:
        tokens.append(tokens[-1] + sum(delta['tokens'] for delta in commit['deltas']))
    below.step([0, *closes], tokens, where='post', color=COLORS['trained'])
    below.set_ylabel('tokens trained')
    below.set_ylim(0)
    below.set_xlabel('seconds')
    for axes in (above, below):
        axes.spines[['top', 'right']].set_visible(False)
    figure.legend(*above.get_legend_handles_labels(), loc='outside upper right', ncols=8, frameon=False)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('runs', nargs='+', metavar='OUT_DIR')
    parser.add_argument('--output', default='pool.png', help='the PNG to write (default: %(default)s)')
    arguments = parser.parse_args()
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot as plt

    rounds = read_journal(arguments.runs)
    rows = len({delta['out_dir'] for commit in rounds for delta in commit['deltas']})
    figure = plt.figure(figsize=(10, 2.0 + 0.55 * rows), layout='constrained')
    draw(figure, rounds)
    figure.savefig(arguments.output, dpi=120)
