"""
Lay runs side by side, by the metrics.jsonl that each of them wrote.

    python compare.py --plot out/a out/b              # loss against tokens and time, of finished or running runs
    python compare.py --plot out/a --output=a.png     # default: loss.png in the folder that holds what is compared
"""

import argparse
import json
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import guard

# Okabe and Ito's colours, told apart with every kind of colour blindness; line styles repeat the distinction.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
LINE_STYLES = ('-', '--', '-.', ':')


@dataclass
class Curve:
    """Loss over a run: equally long lists of tokens seen, training time in seconds, and nats per token."""

    tokens: list = field(default_factory=list)
    seconds: list = field(default_factory=list)
    loss: list = field(default_factory=list)


def read_rows(run):
    """
    The rows of a run's metrics.jsonl; the last line of a running one may be half-written and is left out.

    Raises FileNotFoundError for a folder without that file, ValueError for one without a row in it.
    """
    path = Path(run) / 'metrics.jsonl'
    if not path.exists():
        raise FileNotFoundError(f'{path} does not exist: expected the out_dir of a run, such as out/quickstart')
    with open(path, encoding='utf-8') as file:
        rows = [json.loads(line) for line in file if line.endswith('\n')]
    if not rows:
        raise ValueError(f'{path} has no row yet: wait until the run has logged its first step')
    return rows


def loss_curves(rows):
    """{'loss': Curve, 'val_loss': Curve} of a run. Time is that of training, without evaluations and checkpoints."""
    curves = {'loss': Curve(), 'val_loss': Curve()}
    seconds, last_step, step_ms = 0.0, 0, 0.0
    for row in rows:
        step_ms = row.get('time/total', step_ms)  # an evaluation between two logged steps has no time of its own
        seconds += (row['step'] - last_step) * step_ms / 1000
        last_step = row['step']
        for key, curve in curves.items():
            if key in row and 'tokens' in row:
                curve.tokens.append(row['tokens'])
                curve.seconds.append(seconds)
                curve.loss.append(float(row[key]))  # 'nan' and 'inf' are strings in JSON
    return curves


def running_mean(values, window):
    """Mean of each value and up to window - 1 before it."""
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def plot_losses(runs, output):
    """Write a PNG of the runs' training loss (lines, lightly smoothed) and validation loss (circles)."""
    import matplotlib

    matplotlib.use('Agg')  # no display needed
    from matplotlib import pyplot as plt
    from matplotlib.ticker import EngFormatter, ScalarFormatter

    curves = {run: loss_curves(read_rows(run)) for run in runs}
    longest = max(max(curve.seconds, default=0) for run in runs for curve in curves[run].values())
    units = {'hours': 3600, 'minutes': 60, 'seconds': 1}
    unit = next(name for name, length in units.items() if longest > 3 * length or length == 1)
    figure, (by_tokens, by_time) = plt.subplots(1, 2, figsize=(13, 5.5), sharey=True, layout='constrained')
    for number, run in enumerate(runs):
        train, val = curves[run]['loss'], curves[run]['val_loss']
        smooth = running_mean(train.loss, window=1 + len(train.loss) // 50)
        line = {'color': COLOURS[number % len(COLOURS)], 'linestyle': LINE_STYLES[number % len(LINE_STYLES)]}
        circles = {'color': line['color'], 'marker': 'o', 'markeredgecolor': 'white', 'linestyle': 'none'}
        by_tokens.plot(train.tokens, smooth, **line, label=str(run))
        by_tokens.plot(val.tokens, val.loss, **circles)
        by_time.plot([seconds / units[unit] for seconds in train.seconds], smooth, **line)
        by_time.plot([seconds / units[unit] for seconds in val.seconds], val.loss, **circles)
    by_tokens.plot([], [], 'o', color='grey', label='validation')
    by_tokens.set_xlabel('tokens trained on')
    by_tokens.xaxis.set_major_formatter(EngFormatter(sep=' '))
    by_tokens.set_ylabel('loss (nats per token)')
    by_time.set_xlabel(f'training time ({unit}; evaluation and checkpoints left out)')
    for axes in (by_tokens, by_time):
        axes.set_yscale('log')  # the first steps fall far, the last ones differ little: both can be read
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(ScalarFormatter())
        axes.grid(which='both', alpha=0.25)
    by_tokens.legend()
    figure.savefig(output, dpi=120)


if __name__ == '__main__':
    guard.report_errors()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--plot', nargs='+', metavar='OUT_DIR', type=Path, required=True, help='draw the loss of these runs'
    )
    parser.add_argument('--output', type=Path, help='the PNG to write')
    arguments = parser.parse_args()
    common = Path(os.path.commonpath([run.absolute() for run in arguments.plot]))
    output = arguments.output or Path(os.path.relpath(common)) / 'loss.png'
    plot_losses(arguments.plot, output)
    print(f'loss plot: {output}')
