"""
Pictures of runs: loss from the metrics.jsonl that a run writes; phases, memory and communication from results.json.

Colours are Okabe and Ito's, told apart with every kind of colour blindness; line styles and hatches repeat the
distinction. Every function writes a PNG for a page of 800 to 1000 pixels and returns the figure.
"""

import contextlib
import itertools
import math
import os
import statistics
import textwrap
from pathlib import Path

import numpy as np

from comparison import laws
from comparison.results import read_rows
from runtime import PHASES

COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
LINE_STYLES = ('-', '--', '-.', ':')
PHASE_COLOURS = ('#F0E442', '#56B4E9', '#0072B2', '#009E73', '#CC79A7')
HELD = {'weights': '#0072B2', 'gradients': '#E69F00', 'optimizer': '#009E73'}
WAITED, HIDDEN = '#D55E00', '#56B4E9'  # communication that compute waited for, and that beside it
LIMIT = 1e-4  # relative difference up to which two losses in fp32 agree
EQUAL = 1e-9  # relative differences of the loss below it are drawn as it: a logarithmic axis has no zero


# --- loss -------------------------------------------------------------------------------------------------------------


def loss_curves(rows):
    """
    {'loss': curve, 'val_loss': curve} of a run; a curve is equally long lists 'tokens' (seen), 'seconds' and 'loss'
    (nats per token). Time is that of training, without evaluations and checkpoints.
    """
    curves = {key: {'tokens': [], 'seconds': [], 'loss': []} for key in ('loss', 'val_loss')}
    seconds, last_step, step_ms = 0.0, 0, 0.0
    for row in rows:
        step_ms = row.get('time/total', step_ms)  # an evaluation between two logged steps has no time of its own
        seconds += (row['step'] - last_step) * step_ms / 1000
        last_step = row['step']
        for key, curve in curves.items():
            if key in row and 'tokens' in row:
                curve['tokens'].append(row['tokens'])
                curve['seconds'].append(seconds)
                curve['loss'].append(row[key])
    return curves


def running_mean(values, window):
    """Mean of each value and up to window - 1 before it."""
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def plot_runs(runs, keys, output):
    """compare.py --plot: the loss of any runs, or the keys that are asked for. output: None = beside the runs."""
    runs = [Path(str(run)) for run in runs]
    common = Path(os.path.commonpath([run.absolute() for run in runs]))
    name = f'{"-".join(keys or ["loss"]).replace("/", "_")}.png'
    output = Path(output) if output else Path(os.path.relpath(common)) / name
    if keys:
        plot_keys(runs, keys, output)
    else:
        plot_losses(runs, output)
    print(f'{", ".join(keys) or "loss"} plot: {output}')


def plot_losses(runs, output):
    """The runs' training loss (lines, lightly smoothed) and validation loss (circles). runs: their out_dirs."""
    curves = {str(run): loss_curves(read_rows(run, is_running=True)) for run in runs}
    figure, (by_tokens, by_time) = _panels(1, 2, height=4.5, sharey=True)
    _draw_losses(by_tokens, by_time, {label: pair['loss'] for label, pair in curves.items()})
    for number, pair in enumerate(curves.values()):
        val = pair['val_loss']
        circles = {'color': COLOURS[number % len(COLOURS)], 'marker': 'o', 'markeredgecolor': 'white', 'linestyle': ''}
        by_tokens.plot(val['tokens'], val['loss'], **circles)
        by_time.plot(val['seconds'], val['loss'], **circles)
    if any(pair['val_loss']['loss'] for pair in curves.values()):
        by_tokens.plot([], [], 'o', color='grey', label='validation')
    return _save(figure, output, columns=4)


def plot_keys(runs, keys, output):
    """Any keys of metrics.jsonl, a panel each. runs: their out_dirs. Raises ValueError for a key that none has."""
    rows_of = {str(run): read_rows(run, is_running=True) for run in runs}
    figure, panels = _panels(len(keys), 1, height=1 + 3.5 * len(keys), sharex=True)
    for key, axes in zip(keys, panels.flat, strict=True):
        for number, (label, rows) in enumerate(rows_of.items()):
            found = [row for row in rows if key in row and 'tokens' in row]
            style = _line(number, len(rows_of)) | ({'marker': 'o'} if len(found) < 30 else {})
            style |= {'label': label} if key == keys[0] else {}  # one legend, for all panels
            axes.plot([row['tokens'] for row in found], [row[key] for row in found], **style)
        if not any(len(line.get_xdata()) for line in axes.lines):
            there = sorted(set().union(*(row for rows in rows_of.values() for row in rows)))
            raise ValueError(f'keys={key}: it is in no row of metrics.jsonl: expected some of {", ".join(there)}')
        axes.set_ylabel(key)
        axes.grid(alpha=0.25)
        _tokens_axis(axes)
    return _save(figure, output, columns=4)


def plot_comparison(rows, output):
    """
    The training loss of results.json's rows against tokens and against time, and how far it is from the first row's.
    """
    figure, ((by_tokens, by_time), (apart, legend)) = _panels(2, 2, height=7.5)
    _draw_losses(by_tokens, by_time, {row['label']: row['curve'] for row in rows})
    by_time.sharey(by_tokens)

    first = dict(zip(rows[0]['curve']['tokens'], rows[0]['curve']['loss'], strict=True))
    for number, row in enumerate(rows[1:], start=1):
        losses = dict(zip(row['curve']['tokens'], row['curve']['loss'], strict=True))
        away = {at: abs(loss / first[at] - 1) for at, loss in losses.items() if at in first}
        drawn = [EQUAL if relative < EQUAL else relative for relative in away.values()]  # a loss that is NaN: a gap
        apart.plot(list(away), drawn, **{**_line(number, len(rows)), 'linewidth': 1.3}, label=row['label'])
    apart.axhline(LIMIT, color='grey', linewidth=0.8)
    apart.annotate(f' {LIMIT:g}', (1, LIMIT), xycoords=('axes fraction', 'data'), va='center', color='grey')
    apart.set_yscale('log')
    apart.set_ylim(bottom=EQUAL / 2)
    _tokens_axis(apart)
    apart.set_title(textwrap.fill(f'difference from {rows[0]["label"]}', 50), fontsize=10)
    apart.set_ylabel('relative difference, log\n(1e-9: that or less)')
    apart.grid(alpha=0.25)
    legend.axis('off')
    named = by_tokens.get_legend_handles_labels()
    legend.legend(*named, loc='center', title='training loss', fontsize=9, handlelength=3)
    return _save(figure, output)


def plot_rates(rows, output):
    """Loss against learning rate of each group of a sweep, with the parabola's best where there is one."""
    figure, (axes,) = _panels(1, 1, height=4.5)
    for number, row in enumerate(rows):
        grid = {rate: loss for rate, loss in row['grid'].items() if math.isfinite(loss)}
        axes.plot([*grid], [*grid.values()], marker='o', label=row['label'], **_line(number, len(rows)))
        if 'rate' in row:
            axes.plot(
                row['rate']['best'], row['rate']['loss'], '*', markersize=12, color=COLOURS[number % len(COLOURS)]
            )
    axes.set(xscale='log', xlabel='learning rate', ylabel='validation loss, first seed')
    axes.grid(alpha=0.25)
    return _save(figure, output, columns=4)


def plot_ladder(rows, output):
    """Loss against compute: each recipe's runs at its best rate, and its law, to ten times the compute."""
    figure, (axes,) = _panels(1, 1, height=5)
    recipes = [*dict.fromkeys(row['recipe'] for row in rows)]
    for number, recipe in enumerate(recipes):
        points = [(row['flops'], loss) for row in rows if row['recipe'] == recipe for loss in row['losses'].values()]
        line = _line(number, len(recipes))
        axes.plot(*zip(*points, strict=True), 'o', color=line['color'], label=recipe or 'runs')
        with contextlib.suppress(ValueError):  # too few
            compute, losses = zip(*points, strict=True)
            law = laws.fit_law({'compute': compute}, losses)
            along = np.geomspace(min(compute), 10 * max(compute), 100)
            axes.plot(along, law.at(compute=along), **line)
    axes.set(xscale='log', xlabel='FLOPs, forward and backward', ylabel='validation loss')
    axes.grid(alpha=0.25)
    return _save(figure, output, columns=4)


def plot_coordinates(rows, parts, output):
    """Mean |activation| of each part (columns) against the size along each axis (rows), a line per recipe."""
    axes_of, recipes = ([*dict.fromkeys(row[key] for row in rows)] for key in ('axis', 'recipe'))
    figure, panels = _panels(len(axes_of), len(parts), height=1 + 2.5 * len(axes_of), sharex='row')
    for (axis, part), panel in zip(itertools.product(axes_of, parts), panels.flat, strict=True):
        for number, recipe in enumerate(recipes):
            sizes = {}  # size -> of all seeds
            for row in rows:
                if (row['axis'], row['recipe']) == (axis, recipe):
                    sizes.setdefault(row['size'], []).append(row[part])
            label = {'label': recipe} if (axis, part) == (axes_of[0], parts[0]) else {}  # one legend, for all panels
            means = [statistics.geometric_mean(values) for values in sizes.values()]
            panel.plot([*sizes], means, marker='o', markersize=3, **_line(number, len(recipes)), **label)
        panel.set(xscale='log', yscale='log', xlabel=axis, title=part)
        panel.set_xticks([*sizes], [f'{size:g}' for size in sizes], fontsize=8)
        panel.minorticks_off()
        low, high = panel.get_ylim()  # a decade at least, or noise would look like a slope
        panel.set_ylim(min(low, high / 10), max(high, low * 10))
        panel.grid(alpha=0.25)
    return _save(figure, output, columns=len(recipes))


def _line(number, count):
    """Style of the line with this number of `count`; earlier ones are wider, and show where later ones lie on them."""
    style = {'color': COLOURS[number % len(COLOURS)], 'linestyle': LINE_STYLES[number % len(LINE_STYLES)]}
    return {**style, 'linewidth': 1.3 + min(0.5, 3.5 / count) * (count - 1 - number)}


def _tokens_axis(axes):
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set_xlabel('tokens trained on')
    axes.xaxis.set_major_formatter(EngFormatter(sep=' '))
    axes.xaxis.set_major_locator(MaxNLocator(6))  # there is room for six labels like '1.25 M'


def _draw_losses(by_tokens, by_time, curves):
    """curves: {label: curve of loss_curves()}."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

    for number, (label, curve) in enumerate(curves.items()):
        smooth = running_mean(curve['loss'], window=1 + len(curve['loss']) // 50)
        by_tokens.plot(curve['tokens'], smooth, **_line(number, len(curves)), label=label)
        by_time.plot(curve['seconds'], smooth, **_line(number, len(curves)))
    _tokens_axis(by_tokens)
    by_time.set_xlabel('seconds of training (evaluation left out)')
    by_tokens.set_ylabel('loss (nats per token, log)')
    for axes in (by_tokens, by_time):
        axes.set_yscale('log')  # the first steps fall far, the last ones differ little: both can be read
        axes.yaxis.set_major_formatter(StrMethodFormatter('{x:g}'))
        low, high = axes.get_ylim()  # within a decade the ticks of a logarithmic axis are few
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > 10 * low else MaxNLocator(7))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(which='both', alpha=0.25)


# --- bars -------------------------------------------------------------------------------------------------------------


def plot_phases(rows, output):
    """A bar per row: milliseconds per step by phase; the hatched strip is communication that the compute waited for."""
    figure, (axes,) = _panels(1, 1, height=1.6 + 0.55 * len(rows))
    bars = []
    for phase, colour in zip(PHASES, PHASE_COLOURS, strict=True):
        bars.append((phase, [row.get(f'time/{phase}', 0) for row in rows], {'color': colour}))
    ends = _stack(axes, -0.12, 0.5, bars)
    _write(axes, ends, -0.12, [f'{end:.1f} ms' if end else 'not measured' for end in ends])
    style = {'color': 'white', 'edgecolor': WAITED, 'hatch': '/////'}
    _stack(axes, 0.26, 0.2, [('waiting for communication', [row.get('time/comm_exposed', 0) for row in rows], style)])
    axes.set_xlabel('milliseconds per optimizer step')
    _finish_bars(axes, rows)
    return _save(figure, output, columns=7)


def plot_memory(rows, output):
    """Two bars per row, predicted (pale) and measured, of what a rank holds; and the largest peak of any rank."""
    figure, (state, peak) = _panels(1, 2, height=1.6 + 0.55 * len(rows), sharey=True, ratios=(3, 2))
    predicted = [{name: row.get('predicted', {}).get(f'{name}_gb') for name in HELD} for row in rows]
    measured = [{name: row.get(f'mem/{name}_gb') for name in HELD} for row in rows]
    totals = [sum(size or 0 for size in held.values()) for held in (*predicted, *measured)]
    scale, unit = _unit(totals)
    pale = {'alpha': 0.45, 'hatch': '....'}
    for offset, word, held, style in ((-0.19, 'predicted', predicted, pale), (0.19, 'measured', measured, {})):
        bars = []
        for name, colour in HELD.items():
            lengths = [(sizes[name] or 0) * scale for sizes in held]
            bars.append((f'{name}, {word}', lengths, {'color': colour, **style}))
        ends = _stack(state, offset, 0.35, bars)
        _write(state, ends, offset, [f'{end:.3g}' if end else f'not {word}' for end in ends])
    state.set_xlabel(f'weights, gradients and optimizer state of a rank ({unit})')

    peaks = [row.get('mem/rank_max_gb') for row in rows]
    totals = [row.get('predicted', {}).get('total_gb') for row in rows]
    scale, unit = _unit([*peaks, *totals])
    _mark(peak, peaks, scale, 'measured peak', marker='D', color=WAITED)
    line = {'marker': '|', 'color': 'black', 'markersize': 14, 'markeredgewidth': 2}
    _mark(peak, totals, scale, 'predicted, tensors alone', **line)
    for place, (size, total) in enumerate(zip(peaks, totals, strict=True)):
        said, at = f'{size * scale:.3g}' if size else 'not measured', (size or total or 0) * scale
        peak.annotate(said, (at, place), (0, -13), textcoords='offset points', ha='center', va='center', fontsize=8)
    peak.set_xlabel(f'peak of the largest rank ({unit})')
    _finish_bars(state, rows)
    _finish_bars(peak, rows)
    return _save(figure, output, columns=4)


def plot_communication(rows, output):
    """The share of a step's time in communication, waited for or beside compute; and MB that a rank sends per step."""
    figure, (share, sent) = _panels(1, 2, height=1.6 + 0.45 * len(rows), sharey=True)
    unknown = ['none: one process' if row.get('world_size') == 1 else 'not measured' for row in rows]
    exposed, hidden, said = [], [], []
    for row, nothing in zip(rows, unknown, strict=True):
        percent = 100 / row['time/total'] if row.get('time/total') and 'time/comm' in row else 0
        exposed.append(percent * row.get('time/comm_exposed', 0))
        hidden.append(max(0, percent * row.get('time/comm', 0) - exposed[-1]))
        outer = ' (outer step)' if 'outer_is_comm' in row else ''
        said.append(f'{exposed[-1]:.1f} of {exposed[-1] + hidden[-1]:.1f} %{outer}' if percent else nothing)
    waits = ('compute waits', exposed, {'color': WAITED, 'hatch': '/////'})
    ends = _stack(share, 0, 0.6, [waits, ('beside compute', hidden, {'color': HIDDEN})])
    _write(share, ends, 0, said)
    share.set_xlabel("share of a step's time (%)")

    measured = [row.get('comm/sent_gb') for row in rows]
    predicted = [row.get('predicted_sent_gb') for row in rows]
    scale, unit = _unit([*measured, *predicted])
    _stack(sent, 0, 0.6, [('measured', [(size or 0) * scale for size in measured], {'color': HELD['weights']})])
    _mark(sent, predicted, scale, 'predicted', marker='D', color=HELD['gradients'], markeredgecolor='black')
    ends = [max(size or 0, total or 0) * scale for size, total in zip(measured, predicted, strict=True)]
    sizes = zip(measured, unknown, strict=True)
    _write(sent, ends, 0, [nothing if size is None else f'{size * scale:.3g}' for size, nothing in sizes], points=8)
    sent.set_xlabel(f'sent by a rank per step ({unit})')
    _finish_bars(share, rows, room=1.5)
    _finish_bars(sent, rows, room=1.45)
    return _save(figure, output, columns=4)


def _unit(sizes):
    """(factor, name) of the unit in which the largest of these GB is 1 or more; None is unknown."""
    largest = max(size or 0 for size in sizes)
    return next((unit for unit in ((1, 'GB'), (1e3, 'MB'), (1e6, 'kB')) if largest * unit[0] >= 1), (1e3, 'MB'))


def _stack(axes, offset, height, bars):
    """Draw bars (label, length for each row, style) end to end in each row; returns where the rows' bars end."""
    ends = [0.0] * len(bars[0][1])
    for label, lengths, style in bars:
        if any(lengths):
            places = [place + offset for place in range(len(lengths))]
            style = {'edgecolor': 'white', 'linewidth': 0.5, **style}
            axes.barh(places, lengths, height, left=ends, label=label, **style)
            ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    return ends


def _mark(axes, sizes, scale, label, **style):
    """A marker in each row whose size is known."""
    known = {place: size * scale for place, size in enumerate(sizes) if size is not None}
    if known:
        axes.plot(list(known.values()), list(known), linestyle='', label=label, **style)


def _write(axes, ends, offset, texts, points=4):
    """Values beside the ends of the rows' bars."""
    for place, (end, text) in enumerate(zip(ends, texts, strict=True)):
        at = (end, place + offset)
        axes.annotate(text, at, (points, 0), textcoords='offset points', va='center', fontsize=8)


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


def _save(figure, output, columns=0):
    """Write the PNG. columns: of a legend below all of it, which hides nothing."""
    if columns and any(axes.get_legend_handles_labels()[0] for axes in figure.axes):
        figure.legend(loc='outside lower center', ncols=columns, frameon=False)
    try:
        figure.savefig(output)
    except (OSError, ValueError) as error:  # no such folder, a full disk; an ending that names no kind of picture
        why = ' '.join(str(error).split())
        raise OSError(f'{output} cannot be written ({why}): give a file in a folder that exists') from None
    return figure
