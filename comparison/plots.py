"""
Pictures of runs: loss from the metrics.jsonl that a run writes; phases, memory and communication from results.json.

Colours are Okabe and Ito's, told apart with every kind of colour blindness; line styles and hatches repeat the
distinction. Every function writes a PNG for a page of 800 to 1000 pixels and returns the figure.
"""

import json
import statistics
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
LINE_STYLES = ('-', '--', '-.', ':')
PHASES = {'data': '#F0E442', 'forward': '#56B4E9', 'backward': '#0072B2', 'update': '#009E73', 'outer': '#CC79A7'}
HELD = {'weights': '#0072B2', 'gradients': '#E69F00', 'optimizer': '#009E73'}
WAITED, HIDDEN = '#D55E00', '#56B4E9'  # communication that compute waited for, and that beside it
REST = '#BBBBBB'
EQUAL = 1e-9  # relative differences of the loss below it are drawn as it: a logarithmic axis has no zero


# --- loss -------------------------------------------------------------------------------------------------------------


@dataclass
class Curve:
    """Loss over a run: equally long lists of tokens seen, training time in seconds, and nats per token."""

    tokens: list = field(default_factory=list)
    seconds: list = field(default_factory=list)
    loss: list = field(default_factory=list)


def read_rows(run):
    """
    The rows of a run's metrics.jsonl; the last line of a running one may be half-written and is left out.

    Raises FileNotFoundError for a folder without that file, ValueError for a damaged one or one without a row in it.
    """
    path = Path(run) / 'metrics.jsonl'
    if not path.exists():
        raise FileNotFoundError(f'{path} does not exist: expected the out_dir of a run, such as out/quickstart')
    rows = []
    with open(path, encoding='utf-8', errors='replace') as file:
        for number, line in enumerate(file, start=1):
            if line.endswith('\n'):
                try:
                    rows.append(json.loads(line))
                    rows[-1]['step'] + 0
                except (ValueError, TypeError, KeyError):
                    said = f'{path} is damaged: expected a JSON object with its step in line {number}'
                    raise ValueError(f'{said}, given {line[:40]!r}') from None
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
    """The runs' training loss (lines, lightly smoothed) and validation loss (circles). runs: their out_dirs."""
    curves = {str(run): loss_curves(read_rows(run)) for run in runs}
    figure, (by_tokens, by_time) = _panels(1, 2, height=4.5, sharey=True)
    _draw_losses(by_tokens, by_time, curves)
    if any(curve['val_loss'].loss for curve in curves.values()):
        by_tokens.plot([], [], 'o', color='grey', label='validation')
    return _save(figure, output, by_tokens)


def plot_comparison(rows, output, limit=1e-4):
    """
    The training loss of results.json's rows against tokens and against time, and how far it is from the first row's.

    limit: relative difference up to which two strategies agree, drawn as a line.
    """
    rows = [row for row in rows if row.get('curve', {}).get('loss')]
    if not rows:
        raise ValueError('no run has logged a loss: expected at least one that has trained, see runs/*/*/console.txt')
    curves = {row['label']: {'loss': Curve(**row['curve']), 'val_loss': Curve()} for row in rows}
    figure, ((by_tokens, by_time), (apart, legend)) = _panels(2, 2, height=7.5)
    _draw_losses(by_tokens, by_time, curves)
    by_time.sharey(by_tokens)

    first = dict(zip(rows[0]['curve']['tokens'], rows[0]['curve']['loss'], strict=True))
    for number, row in enumerate(rows):
        of_both = [
            (at, loss) for at, loss in zip(row['curve']['tokens'], row['curve']['loss'], strict=True) if at in first
        ]
        away = [abs(float(loss) / float(first[at]) - 1) for at, loss in of_both]
        away = [EQUAL if relative < EQUAL else relative for relative in away]  # a loss that is NaN leaves a gap
        if number > 0:
            style = _line(number, len(rows)) | {'linewidth': 1.3}
            apart.plot([at for at, _ in of_both], away, **style, label=row['label'])
    apart.axhline(limit, color='grey', linewidth=0.8)
    apart.annotate(f' {limit:g}', (1, limit), xycoords=('axes fraction', 'data'), va='center', color='grey')
    apart.set_yscale('log')
    apart.set_ylim(bottom=EQUAL / 2)
    _tokens_axis(apart)
    apart.set_title(textwrap.fill(f'difference from {rows[0]["label"]}', 50), fontsize=10)
    apart.set_ylabel('relative difference, log\n(1e-9: that or less)')
    apart.grid(alpha=0.25)
    legend.axis('off')
    legend.legend(
        *by_tokens.get_legend_handles_labels(), loc='center', title='training loss', fontsize=9, handlelength=3
    )
    return _save(figure, output)


def _line(number, count):
    """Style of the line with this number of `count`; earlier ones are wider, and show where later ones lie on them."""
    style = {'color': COLOURS[number % len(COLOURS)], 'linestyle': LINE_STYLES[number % len(LINE_STYLES)]}
    return {**style, 'linewidth': 1.3 + min(0.5, 3.5 / count) * (count - 1 - number)}


def _tokens_axis(axes):
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel('tokens trained on')
    axes.xaxis.set_major_formatter(EngFormatter(sep=' '))


def _draw_losses(by_tokens, by_time, curves):
    """curves: {label: {'loss': Curve, 'val_loss': Curve}}."""
    from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator, ScalarFormatter

    longest = max((max(curve.seconds, default=0) for pair in curves.values() for curve in pair.values()), default=0)
    units = {'hours': 3600, 'minutes': 60, 'seconds': 1}
    unit = next(name for name, length in units.items() if longest > 3 * length or length == 1)
    for number, (label, pair) in enumerate(curves.items()):
        train, val = pair['loss'], pair['val_loss']
        smooth = running_mean(list(map(float, train.loss)), window=1 + len(train.loss) // 50)
        line = _line(number, len(curves))
        circles = {'color': line['color'], 'marker': 'o', 'markeredgecolor': 'white', 'linestyle': 'none'}
        by_tokens.plot(train.tokens, smooth, **line, label=label)
        by_tokens.plot(val.tokens, val.loss, **circles)
        by_time.plot([seconds / units[unit] for seconds in train.seconds], smooth, **line)
        by_time.plot([seconds / units[unit] for seconds in val.seconds], val.loss, **circles)
    _tokens_axis(by_tokens)
    by_time.set_xlabel(f'training time ({unit}, evaluation left out)')
    by_tokens.set_ylabel('loss (nats per token, log)')
    for axes in (by_tokens, by_time):
        axes.set_yscale('log')  # the first steps fall far, the last ones differ little: both can be read
        lowest, highest = axes.get_ylim()
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
        if highest < 10 * lowest:  # within a decade the ticks of a logarithmic axis are few
            axes.yaxis.set_major_locator(MaxNLocator(7))
            axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(which='both', alpha=0.25)


# --- bars -------------------------------------------------------------------------------------------------------------


def plot_phases(rows, output):
    """A bar per row: milliseconds per step by phase; the hatched strip is communication that the compute waited for."""
    figure, (axes,) = _panels(1, 1, height=_height(rows, 0.55))
    for place, row in enumerate(rows):
        end = 0.0
        for phase, colour in PHASES.items():
            if width := row.get(f'time/{phase}'):
                axes.barh(
                    place - 0.12, width, 0.5, left=end, color=colour, edgecolor='white', linewidth=0.5, label=phase
                )
                end += width
        rest = max(0, row.get('time/total', end) - end)
        axes.barh(place - 0.12, rest, 0.5, left=end, color=REST, edgecolor='white', linewidth=0.5, label='rest')
        waited = row.get('time/comm_exposed', 0)
        style = {'color': 'white', 'edgecolor': WAITED, 'hatch': '/////', 'label': 'waiting for communication'}
        axes.barh(place + 0.26, waited, 0.2, **style)
        _write(axes, end + rest, place - 0.12, f'{end + rest:.1f} ms' if end + rest else 'not measured')
    axes.set_xlabel('milliseconds per optimizer step')
    _finish_bars(axes, rows)
    return _save(figure, output, axes, columns=7)


def plot_memory(rows, output):
    """Two bars per row, predicted (pale) and measured, of what a rank holds; and the largest peak of any rank."""
    held = [_held(row) for row in rows]
    sizes = [sum(values.values()) for pair in held for values in pair]
    peaks = [row.get('mem/rank_max_gb', 0) for row in rows]
    totals = [row.get('predicted', {}).get('total_gb', 0) for row in rows]
    figure, (state, peak) = _panels(1, 2, height=_height(rows, 0.55), sharey=True, ratios=(3, 2))
    scale, unit = _unit(sizes)
    for place, pair in enumerate(held):
        for side, values in zip((-1, 1), pair, strict=True):
            end, word = 0.0, 'predicted' if side < 0 else 'measured'
            for name, size in values.items():
                style = {'alpha': 0.45, 'hatch': '....'} if side < 0 else {}
                said = f'{name}, {word}'
                state.barh(place + side * 0.19, size * scale, 0.35, left=end, color=HELD[name], edgecolor='white',
                           linewidth=0.5, label=said, **style)  # fmt: skip
                end += size * scale
            _write(state, end, place + side * 0.19, f'{end:.3g}' if values else f'not {word}')
    state.set_xlabel(f'weights, gradients and optimizer state of a rank ({unit})')
    scale, unit = _unit([*peaks, *totals])
    for place, (measured, predicted) in enumerate(zip(peaks, totals, strict=True)):
        if measured:
            peak.plot(measured * scale, place, 'D', color=WAITED, label='measured peak')
        if predicted:
            peak.plot(predicted * scale, place, '|', color='black', markersize=14, markeredgewidth=2,
                      label='predicted, tensors alone')  # fmt: skip
        said = f'{measured * scale:.3g}' if measured else 'not measured'
        at = ((measured or predicted) * scale, place)
        peak.annotate(said, at, (0, -13), textcoords='offset points', ha='center', va='center', fontsize=8)
    peak.set_xlabel(f'peak of the largest rank ({unit})')
    _finish_bars(state, rows)
    _finish_bars(peak, rows)
    return _save(figure, output, state, peak, columns=4)


def plot_communication(rows, output):
    """The share of a step's time in communication, waited for or beside compute; and MB that a rank sends per step."""
    figure, (share, sent) = _panels(1, 2, height=_height(rows, 0.45), sharey=True)
    for place, row in enumerate(rows):
        if row.get('time/total') and 'time/comm' in row:
            exposed = 100 * row.get('time/comm_exposed', 0) / row['time/total']
            hidden = max(0, 100 * row['time/comm'] / row['time/total'] - exposed)
            share.barh(place, exposed, 0.6, color=WAITED, hatch='/////', edgecolor='white', label='compute waits')
            share.barh(place, hidden, 0.6, left=exposed, color=HIDDEN, edgecolor='white', label='beside compute')
            outer = ' (outer step)' if 'outer_is_comm' in row else ''
            _write(share, exposed + hidden, place, f'{exposed:.1f} of {exposed + hidden:.1f} %{outer}')
        else:
            _write(share, 0, place, _unknown(row))
    share.set_xlabel("share of a step's time (%)")
    measured = [row.get('comm/sent_gb') for row in rows]
    predicted = [row.get('predicted_sent_gb') for row in rows]
    scale, unit = _unit([size or 0 for size in [*measured, *predicted]])
    for place, (size, expected) in enumerate(zip(measured, predicted, strict=True)):
        if size is not None:
            sent.barh(place, size * scale, 0.6, color=HELD['weights'], label='measured')
        if expected is not None:
            sent.plot(expected * scale, place, 'D', color=HELD['gradients'], markeredgecolor='black', label='predicted')
        said = f'{size * scale:.3g}' if size is not None else _unknown(rows[place])
        _write(sent, max(size or 0, expected or 0) * scale, place, said, 8)
    sent.set_xlabel(f'sent by a rank per step ({unit})')
    _finish_bars(share, rows, room=1.5)
    _finish_bars(sent, rows, room=1.45)
    return _save(figure, output, share, sent, columns=4)


def _unknown(row):
    return 'none: one process' if row.get('world_size') == 1 else 'not measured'


def _held(row):
    """({what: predicted GB}, {what: measured GB}) of HELD, as far as known."""
    predicted = {name: row.get('predicted', {}).get(f'{name}_gb') for name in HELD}
    measured = {name: row.get(f'mem/{name}_gb') for name in HELD}
    return tuple({name: size for name, size in pair.items() if size is not None} for pair in (predicted, measured))


def _unit(sizes):
    """(factor, name) of the unit in which the largest of these GB is 1 or more."""
    units = ((1, 'GB'), (1e3, 'MB'), (1e6, 'kB'))
    return next((unit for unit in units if max(sizes, default=0) * unit[0] >= 1), (1e3, 'MB'))


def _height(rows, inches):
    return 1.6 + inches * max(1, len(rows))


def _write(axes, end, place, text, points=4):
    """A value this far from the end of its bar, outside."""
    axes.annotate(text, (end, place), (points, 0), textcoords='offset points', va='center', fontsize=8)


def _finish_bars(axes, rows, room=1.2):
    """room: how much longer than the longest bar the axis is, for the values at the ends."""
    axes.set_yticks(range(len(rows)), ['\n'.join(textwrap.wrap(row['label'], 28)) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)  # the first row on top
    axes.set_xlim(0, room * max(axes.dataLim.x1, 1e-12))  # room for the values; there is no bar below zero
    axes.grid(axis='x', alpha=0.25)
    axes.set_axisbelow(True)
    axes.tick_params(axis='y', length=0)


# --- pages ------------------------------------------------------------------------------------------------------------


def _panels(rows, columns, height, ratios=None, **shared):
    """(figure, its axes) 10 inches wide, without pyplot: no display and no state that outlives the figure."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError('pictures need a package that is missing: pip install matplotlib') from None
    figure = Figure(figsize=(10, height), dpi=120, layout='constrained')
    axes = figure.subplots(rows, columns, squeeze=False, width_ratios=ratios, **shared)
    return figure, axes if rows > 1 else axes[0]


def _save(figure, output, *legend_of, columns=4):
    """Write the PNG, with one legend below all of it: it hides nothing and has every name once."""
    known = {}
    for axes in legend_of:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            known.setdefault(label, handle)
    if known:
        figure.legend(known.values(), known.keys(), loc='outside lower center', ncols=columns, frameon=False)
    try:
        figure.savefig(output)
    except (OSError, ValueError) as error:  # no such folder, a full disk; an ending that names no kind of picture
        why = ' '.join(str(getattr(error, 'strerror', None) or error).split())
        raise OSError(
            f'{output} cannot be written: {why}; expected a file in a folder that exists, as loss.png'
        ) from None
    return figure
