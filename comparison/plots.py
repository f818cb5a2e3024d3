"""
Pictures of runs: losses and the load of experts from each run's metrics.jsonl; phases, memory and communication from
results.json.

The colors are Okabe and Ito's, which can be told apart with every kind of color blindness; line styles and hatches
repeat the distinction. Every function writes a PNG for a page of 800 to 1000 pixels, and returns the figure.
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

COLORS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
LINE_STYLES = ('-', '--', '-.', ':')
PHASE_COLORS = ('#F0E442', '#56B4E9', '#0072B2', '#009E73', '#CC79A7', '#E69F00')
HELD = {'weights': '#0072B2', 'gradients': '#E69F00', 'optimizer': '#009E73'}
WAITED, HIDDEN = '#D55E00', '#56B4E9'  # communication: compute waited for it, or hid it
LIMIT = 1e-4  # relative difference up to which two losses in fp32 agree
MOST_MAPS = 8  # runs with experts in one picture, at most
EQUAL = 1e-9  # smaller relative differences of the loss are drawn as this one: a logarithmic axis has no zero


# --- loss -------------------------------------------------------------------------------------------------------------


def loss_curves(rows):
    """
    {'loss': curve, 'val_loss': curve} of a run. A curve has three equally long lists: 'tokens' (seen so far), 'seconds'
    and 'loss' (nats per token). Seconds count training only, without evaluations and checkpoints.
    """
    curves = {key: {'tokens': [], 'seconds': [], 'loss': []} for key in ('loss', 'val_loss')}
    seconds, last_step, step_ms = 0.0, 0, 0.0
    for row in rows:
        if 'time/total' in row:  # an evaluation between two logged steps has none
            step_ms = row['time/total'] / row.get('pool/pace', 1)  # of a step of the run, which all jobs share
        seconds += (row['step'] - last_step) * step_ms / 1000
        last_step = row['step']
        for key, curve in curves.items():
            if key in row and 'tokens' in row:
                curve['tokens'].append(row['tokens'])
                curve['seconds'].append(seconds)
                curve['loss'].append(row[key])
    return curves


def running_mean(values, window):
    """For each value, the mean of it and up to window - 1 values before it."""
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def plot_runs(runs, keys, output):
    """compare.py --plot: draw the loss of any runs, or given keys. output: None = in the runs' common folder."""
    runs = [Path(str(run)) for run in runs]
    common = Path(os.path.commonpath([run.absolute() for run in runs]))
    name = f'{"-".join(keys or ["loss"]).replace("/", "_")}.png'
    output = Path(output) if output else Path(os.path.relpath(common)) / name
    for run in runs:
        rows = read_rows(run, is_running=True)
        last = {key: row[key] for row in rows for key in keys or ('loss', 'val_loss') if 'tokens' in row and key in row}
        if not last and not keys:
            raise ValueError(f'{run}: no row of metrics.jsonl has both loss and tokens')
        numbers = (f'{key} {value:.4g}' for key, value in last.items() if not isinstance(value, list))
        print(f'{run}: step {rows[-1]["step"]}', *numbers, sep=', ')
    if keys:
        plot_keys(runs, keys, output)
    else:
        plot_losses(runs, output)
    print(f'{", ".join(keys) or "loss"} plot: {output}')


def plot_losses(runs, output):
    """Draw training losses (lines, lightly smoothed) and validation losses (circles). runs: their out_dirs."""
    curves = {str(run): loss_curves(read_rows(run, is_running=True)) for run in runs}
    figure, (by_tokens, by_time) = _panels(1, 2, height=4.5, sharey=True)
    _draw_losses(by_tokens, by_time, {label: pair['loss'] for label, pair in curves.items()})
    for number, pair in enumerate(curves.values()):
        val = pair['val_loss']
        circles = {'color': COLORS[number % len(COLORS)], 'marker': 'o', 'markeredgecolor': 'white', 'linestyle': ''}
        by_tokens.plot(val['tokens'], val['loss'], **circles)
        by_time.plot(val['seconds'], val['loss'], **circles)
    if any(pair['val_loss']['loss'] for pair in curves.values()):
        by_tokens.plot([], [], 'o', color='grey', label='validation')
    return _save(figure, output, columns=4)


def plot_keys(runs, keys, output):
    """
    Draw any keys of metrics.jsonl, with a panel for each. A key whose values are lists is drawn as a map for each run,
    in which colors show the numbers. runs: their out_dirs. Raises ValueError for a key that no run has.
    """
    rows_of = {str(run): [row for row in read_rows(run, is_running=True) if 'tokens' in row] for run in runs}
    panels = []  # (key, labels of the runs in it)
    for key in keys:
        having = [label for label, rows in rows_of.items() if any(key in row for row in rows)]
        if not having:
            there = sorted(set().union(*(row for rows in rows_of.values() for row in rows)))
            raise ValueError(f'keys={key}: it is in no row of metrics.jsonl: expected some of {", ".join(there)}')
        are_lists = any(isinstance(row.get(key), list) for rows in rows_of.values() for row in rows)
        panels += [(key, [label]) for label in having] if are_lists else [(key, [*rows_of])]
    figure, all_axes = _panels(len(panels), 1, height=1 + 3.5 * len(panels), sharex=True)
    named = set()  # labels that the common legend has already
    for (key, labels), axes in zip(panels, np.ravel(all_axes), strict=True):
        found = {label: [row for row in rows_of[label] if key in row] for label in labels}
        if any(isinstance(row[key], list) for rows in found.values() for row in rows):
            colors = _draw_map(axes, found[labels[0]], key, 'tokens')
            axes.set_title(labels[0], loc='left', fontsize=9)
            figure.colorbar(colors, ax=axes, label=key)
        else:
            for number, (label, rows) in enumerate(found.items()):
                style = _line(number, len(rows_of)) | ({'marker': 'o'} if len(rows) < 30 else {})
                style |= {} if label in named else {'label': label}
                axes.plot([row['tokens'] for row in rows], [row[key] for row in rows], **style)
                named.add(label)
            axes.set_ylabel(key)
            axes.grid(alpha=0.25)
        _tokens_axis(axes)
    return _save(figure, output, columns=4)


def plot_comparison(rows, output):
    """
    Draw the training losses of results.json's rows against tokens and against time, and how far each is from the first
    row's.
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
    """Draw loss against learning rate for each group of a sweep, with the minimum of the parabola if there is one."""
    figure, (axes,) = _panels(1, 1, height=4.5)
    for number, row in enumerate(rows):
        grid = {rate: loss for rate, loss in row['grid'].items() if math.isfinite(loss)}
        axes.plot([*grid], [*grid.values()], marker='o', label=row['label'], **_line(number, len(rows)))
        if 'rate' in row:
            axes.plot(row['rate']['best'], row['rate']['loss'], '*', markersize=12, color=COLORS[number % len(COLORS)])
    axes.set(xscale='log', xlabel='learning rate', ylabel='validation loss, first seed')
    axes.grid(alpha=0.25)
    return _save(figure, output, columns=4)


def plot_ladder(rows, output):
    """Draw loss against compute: each recipe's runs at its best rate, and its law up to ten times their compute."""
    figure, (axes,) = _panels(1, 1, height=5)
    recipes = [*dict.fromkeys(row['recipe'] for row in rows)]
    for number, recipe in enumerate(recipes):
        points = [(row['flops'], loss) for row in rows if row['recipe'] == recipe for loss in row['losses'].values()]
        line = _line(number, len(recipes))
        axes.plot(*zip(*points, strict=True), 'o', color=line['color'], label=recipe or 'runs')
        with contextlib.suppress(ValueError):  # too few runs for a law
            compute, losses = zip(*points, strict=True)
            law = laws.fit_law({'compute': compute}, losses)
            along = np.geomspace(min(compute), 10 * max(compute), 100)
            axes.plot(along, law.at(compute=along), **line)
    axes.set(xscale='log', xlabel='FLOPs, forward and backward', ylabel='validation loss')
    axes.grid(alpha=0.25)
    return _save(figure, output, columns=4)


def plot_coordinates(rows, parts, output):
    """Draw mean |activation| of each part (columns) against the size along each axis (rows), with a line per recipe."""
    axes_of, recipes = ([*dict.fromkeys(row[key] for row in rows)] for key in ('axis', 'recipe'))
    figure, panels = _panels(len(axes_of), len(parts), height=1 + 2.5 * len(axes_of), sharex='row')
    for (axis, part), panel in zip(itertools.product(axes_of, parts), panels.flat, strict=True):
        for number, recipe in enumerate(recipes):
            sizes = {}  # size -> values of all seeds
            for row in rows:
                if (row['axis'], row['recipe']) == (axis, recipe):
                    sizes.setdefault(row['size'], []).append(row[part])
            label = {'label': recipe} if (axis, part) == (axes_of[0], parts[0]) else {}  # one legend for all panels
            means = [statistics.geometric_mean(values) for values in sizes.values()]
            panel.plot([*sizes], means, marker='o', markersize=3, **_line(number, len(recipes)), **label)
        panel.set(xscale='log', yscale='log', xlabel=axis, title=part)
        panel.set_xticks([*sizes], [f'{size:g}' for size in sizes], fontsize=8)
        panel.minorticks_off()
        low, high = panel.get_ylim()  # at least a decade, or noise would look like a slope
        panel.set_ylim(min(low, high / 10), max(high, low * 10))
        panel.grid(alpha=0.25)
    return _save(figure, output, columns=len(recipes))


def _line(number, count):
    """The style of line `number` out of `count`. Earlier lines are wider, so they show where later ones cover them."""
    style = {'color': COLORS[number % len(COLORS)], 'linestyle': LINE_STYLES[number % len(LINE_STYLES)]}
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
        axes.set_yscale('log')  # so that both the steep first steps and the small last differences can be read
        axes.yaxis.set_major_formatter(StrMethodFormatter('{x:g}'))
        low, high = axes.get_ylim()  # a logarithmic axis has few ticks within a decade
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > 10 * low else MaxNLocator(7))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(which='both', alpha=0.25)


# --- experts ----------------------------------------------------------------------------------------------------------


def plot_experts(rows_of, output):
    """
    Draw how evenly experts are loaded. Each run has a map of violation and one of dead experts, both by step and layer,
    and bars for the experts of the layer that is worst at the end. If there are more than MOST_MAPS runs, those that
    end least balanced are drawn.

    rows_of: {label: rows of metrics.jsonl}; runs without experts are skipped. Returns None if no run has experts.
    """
    keys = ('router/violation_of_layers', 'router/dead_of_layers')
    rows_of = {label: [row for row in rows if keys[0] in row] for label, rows in rows_of.items()}
    rows_of = {label: rows for label, rows in rows_of.items() if rows}
    if not rows_of:
        return None
    shown = sorted(rows_of, key=lambda label: -_largest(rows_of[label][-1][keys[0]]))[:MOST_MAPS]
    layers = max(len(rows_of[label][-1][keys[0]]) for label in shown)
    figure, panels = _panels(
        len(shown), 3, height=1 + (1.6 + 0.03 * layers) * len(shown), ratios=(4, 4, 3), sharex='col'
    )
    panels = np.reshape(panels, (len(shown), 3))
    largest = [_largest([number for label in shown for row in rows_of[label] for number in row[key]]) for key in keys]
    for label, (violation, dead, experts) in zip([one for one in rows_of if one in shown], panels, strict=True):
        rows = rows_of[label]
        maps = [
            _draw_map(axes, rows, key, 'step', most)
            for axes, key, most in zip((violation, dead), keys, largest, strict=True)
        ]
        violation.set_title(textwrap.shorten(label, 40), loc='left', fontsize=9)
        violation.set_ylabel('layer')
        if not any(number > 0 for row in rows for number in row[keys[1]]):
            dead.text(0.5, 0.5, 'no dead experts', transform=dead.transAxes, ha='center', va='center', color='grey')
        of_layers, load = rows[-1][keys[0]], sorted(rows[-1]['router/load_of_worst_layer'], reverse=True)
        worst = of_layers.index(max(of_layers))
        experts.bar(range(1, len(load) + 1), load, width=0.9, color=HELD['weights'])
        experts.axhline(1, color='black', linewidth=0.8)
        experts.set_title(f'layer {worst} at step {rows[-1]["step"]}', loc='left', fontsize=9)
        experts.set_ylabel('tokens / mean')
    for axes in panels[-1][:2]:
        axes.set_xlabel('step')
    panels[-1][2].set_xlabel('its experts, the fullest first')
    labels = ('violation: fullest expert / mean, less 1', 'share of dead experts')
    for column, (colors, label) in enumerate(zip(maps, labels, strict=True)):
        figure.colorbar(colors, ax=panels[:, column], location='top', label=label, aspect=30)
    if len(shown) < len(rows_of):
        figure.suptitle(f'the {len(shown)} of {len(rows_of)} runs that end least balanced', fontsize=10)
    return _save(figure, output)


def _largest(values):
    """The largest finite value; 0 if there is none."""
    return max((value for value in values if math.isfinite(value)), default=0)


def _draw_map(axes, rows, key, along, most=1.0):
    """Draw a map with a column for each row, between the values of the key `along` in the row before and in this one,
    and with a cell for each number in the row's list."""
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    values = np.array([row[key] for row in rows], dtype=float).T  # (numbers in a list, rows)
    borders = [0, *(row[along] for row in rows)]
    most = max(1.0, most, _largest(values.flat))
    colors = axes.pcolormesh(
        borders, np.arange(len(values) + 1) - 0.5, np.ma.masked_invalid(values), cmap='Blues', rasterized=True,
        norm=PowerNorm(0.5, 0, most),  # the root also shows small differences between balanced layers
    )  # fmt: skip
    axes.set_facecolor('0.6')  # for cells that are not a number
    axes.invert_yaxis()  # the first layer on top
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return colors


# --- bars -------------------------------------------------------------------------------------------------------------


def plot_phases(rows, output):
    """Draw a bar per row, the milliseconds per step by phase, with a hatched strip for the communication that compute
    waited for."""
    figure, (axes,) = _panels(1, 1, height=1.6 + 0.55 * len(rows))
    bars = []
    for phase, color in zip(PHASES, PHASE_COLORS, strict=True):
        bars.append((phase, [row.get(f'time/{phase}', 0) for row in rows], {'color': color}))
    ends = _stack(axes, -0.12, 0.5, bars)
    _write(axes, ends, -0.12, [f'{end:.1f} ms' if end else 'not measured' for end in ends])
    style = {'color': 'white', 'edgecolor': WAITED, 'hatch': '/////'}
    _stack(axes, 0.26, 0.2, [('waiting for communication', [row.get('time/comm_exposed', 0) for row in rows], style)])
    axes.set_xlabel('milliseconds per optimizer step')
    _finish_bars(axes, rows)
    return _save(figure, output, columns=7)


def plot_memory(rows, output):
    """Draw two bars per row with the memory that a rank holds, predicted (pale) and measured, and beside them the
    largest peak of any rank."""
    figure, (state, peak) = _panels(1, 2, height=1.6 + 0.55 * len(rows), sharey=True, ratios=(3, 2))
    predicted = [{name: row.get('predicted', {}).get(f'{name}_gb') for name in HELD} for row in rows]
    measured = [{name: row.get(f'mem/{name}_gb') for name in HELD} for row in rows]
    totals = [sum(size or 0 for size in held.values()) for held in (*predicted, *measured)]
    scale, unit = _unit(totals)
    pale = {'alpha': 0.45, 'hatch': '....'}
    for offset, word, held, style in ((-0.19, 'predicted', predicted, pale), (0.19, 'measured', measured, {})):
        bars = []
        for name, color in HELD.items():
            lengths = [(sizes[name] or 0) * scale for sizes in held]
            bars.append((f'{name}, {word}', lengths, {'color': color, **style}))
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
    """Draw the share of a step's time that is communication, exposed or hidden by compute, and the MB that a rank sends
    per step."""
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
    """(factor, name) of the unit in which the largest of these sizes in GB is 1 or more. Sizes may be None."""
    largest = max(size or 0 for size in sizes)
    return next((unit for unit in ((1, 'GB'), (1e3, 'MB'), (1e6, 'kB')) if largest * unit[0] >= 1), (1e3, 'MB'))


def _stack(axes, offset, height, bars):
    """Draw bars, [(label, length for each row, style)], end to end in each row; returns where they end in each row."""
    ends = [0.0] * len(bars[0][1])
    for label, lengths, style in bars:
        if any(lengths):
            places = [place + offset for place in range(len(lengths))]
            style = {'edgecolor': 'white', 'linewidth': 0.5, **style}
            axes.barh(places, lengths, height, left=ends, label=label, **style)
            ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    return ends


def _mark(axes, sizes, scale, label, **style):
    """Draw a marker in each row whose size is known."""
    known = {place: size * scale for place, size in enumerate(sizes) if size is not None}
    if known:
        axes.plot(list(known.values()), list(known), linestyle='', label=label, **style)


def _write(axes, ends, offset, texts, points=4):
    """Write a text beside the end of each row's bar."""
    for place, (end, text) in enumerate(zip(ends, texts, strict=True)):
        at = (end, place + offset)
        axes.annotate(text, at, (points, 0), textcoords='offset points', va='center', fontsize=8)


def _finish_bars(axes, rows, room=1.2):
    """Label the rows and set limits. room: length of the axis / longest bar, to leave room for the texts."""
    axes.set_yticks(range(len(rows)), ['\n'.join(textwrap.wrap(row['label'], 28)) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)  # the first row on top
    axes.set_xlim(0, room * max(axes.dataLim.x1, 1e-12))  # from 0, since there are no negative bars
    axes.grid(axis='x', alpha=0.25)
    axes.set_axisbelow(True)
    axes.tick_params(axis='y', length=0)


# --- pages ------------------------------------------------------------------------------------------------------------


def _panels(rows, columns, height, ratios=None, **shared):
    """(figure, its axes), 10 inches wide. Made without pyplot, so it needs no display and leaves no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError('pictures need a package that is missing: pip install matplotlib') from None
    figure = Figure(figsize=(10, height), dpi=120, layout='constrained')
    axes = figure.subplots(rows, columns, squeeze=False, width_ratios=ratios, **shared)
    return figure, axes if rows > 1 else axes[0]


def _save(figure, output, columns=0):
    """Write the PNG. columns: of a legend below the panels, where it covers nothing; 0 = none."""
    if columns and any(axes.get_legend_handles_labels()[0] for axes in figure.axes):
        figure.legend(loc='outside lower center', ncols=columns, frameon=False)
    try:
        figure.savefig(output)
    except (OSError, ValueError) as error:  # no such folder, a full disk, or an unknown file ending
        why = ' '.join(str(error).split())
        raise OSError(f'{output} cannot be written ({why}): give a file in a folder that exists') from None
    return figure
