"""
What a comparison of runs says, from the rows of results.json: two Markdown tables and a list of facts.

    print(verdict.table(rows), verdict.memory_table(rows), verdict.facts(rows), sep='\n\n')

A key that a row lacks is unknown: its cell stays empty, and no fact is made of it.
"""

import itertools
import statistics

from comparison.results import ratios
from runtime import PHASES

# Largest relative difference of a logged loss that counts as agreement; half precision keeps 8 or 11 bits of a number.
AGREEMENT = {'float32': 1e-4, 'bfloat16': 1e-2, 'float16': 2e-3}

# --- TABLES -----------------------------------------------------------------------------------------------------------


def table(rows):
    """The Markdown table of the comparison."""
    phases = [phase for phase in PHASES if any(f'time/{phase}' in row for row in rows)]
    has_references = len({row.get('reference') for row in rows if 'loss_diff' in row}) > 1
    cells = []
    for row in rows:
        exposed = row.get('time/comm_exposed', 0) / row.get('time/total', 1)
        share = f' ({exposed:.0%})' if 0 < exposed <= 1 else ''  # above 1: the profiled step was slower than the others
        failed = f'failed: {row["failed"]}' if 'failed' in row else ''
        times = [number(row, f'time/{phase}', '{:.1f}') for phase in phases if f'time/{phase}' in row]
        cells.append({
            'run': row['label'],
            'ranks': str(row['world_size']),
            'loss': number(row, 'loss', '{:.4f}') or failed,
            'val loss': number(row, 'val_loss', '{:.4f}'),
            'compared with': row.get('reference', '') if has_references else '',
            'largest difference': number(row, 'loss_diff', '{:.2g}'),
            'resumed': number(row, 'resume_diff', '{:.2g}'),
            'tokens/s': with_range(row, 'tokens_per_sec', '{:,.0f}'),
            'speed-up': '1.00' if row.get('reference') == row['label'] else with_range(row, 'speedup', '{:.2f}'),
            'ms per step': number(row, 'time/total', '{:.1f}'),
            f'= {" + ".join(phases)}': ' + '.join(times),
            'comm ms': number(row, 'time/comm', '{:.1f}'),
            'exposed': number(row, 'time/comm_exposed', '{:.1f}') + share,
            'MB sent (predicted)': megabytes(row.get('comm/sent_gb'), row.get('predicted_sent_gb')),
            'peak GB': number(row, 'mem/rank_max_gb', '{:.2f}'),
            'MFU': number(row, 'mfu', '{:.1%}'),
        })  # fmt: skip
    lines = [markdown(cells)]
    if outer := names([row for row in rows if 'outer_is_comm' in row]):
        also = 'and that of the inner steps where a replica has several ranks'
        lines += ['', f'{outer}: communication is the outer step, exchange and update, {also}.']
    return '\n'.join(lines)


def memory_table(rows):
    """What a rank holds in MB, measured and, in brackets, predicted and their ratio; '' if nothing was measured."""
    cells = []
    for row in rows:
        cells.append({'run': row['label']})
        for part in ('weights', 'gradients', 'optimizer'):
            predicted = row.get('predicted', {}).get(f'{part}_gb')
            cells[-1][f'{part} MB (predicted)'] = megabytes(row.get(f'mem/{part}_gb'), predicted)
    return markdown(cells) if any(cell for row in cells for cell in list(row.values())[1:]) else ''


def number(row, key, form):
    return form.format(row[key]) if key in row else ''


def with_range(row, key, form):
    """'1,234 (1,200 to 1,300)', the range of the repeats, if there are several."""
    several = f' ({form.format(row[f"{key}_min"])} to {form.format(row[f"{key}_max"])})' if f'{key}_min' in row else ''
    return number(row, key, form) + several


def megabytes(measured, predicted):
    """'12.3 (12.1, 1.02x)' of GB: measured, predicted, and the first divided by the second."""
    if measured is None or predicted is None:
        return '' if measured is None else f'{measured * 1e3:.4g}'
    ratio = f', {measured / predicted:.2f}x' if predicted else ''
    return f'{measured * 1e3:.4g} ({predicted * 1e3:.4g}{ratio})'


def markdown(rows):
    """A Markdown table of rows {title: cell}, without empty columns, padded so that it can be read as text, too."""
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    widths = [max(len(title), *(len(row[title]) for row in rows)) for title in titles]
    lines = [titles, ['-' * width for width in widths], *([row[title] for title in titles] for row in rows)]
    lines = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


# --- FACTS ------------------------------------------------------------------------------------------------------------


def facts(rows, gpu_gb=0):
    """What the tables say, a line each; row['gpu_gb']: predicted GB on a GPU that has gpu_gb (0 = do not ask)."""
    good = [row for row in rows if row['rows']]
    lines = []
    for reference in dict.fromkeys(row['reference'] for row in good):
        compared = [row for row in good if row['reference'] == reference]
        lines += agreement(compared, reference) + fastest(compared, reference)
    lines += resumption(good) + one_key_apart(good)
    if len(good) > 1 and any(row['rows'] == 1 and 'tokens_per_sec' in row for row in good):
        lines.append('noise: one repeat cannot show it; --repeats=3 can')
    lines += fitting(rows, gpu_gb) if gpu_gb else []
    for row in rows:
        if 'failed' in row:
            share = f' ({row["failures"]} of {row["failures"] + row["rows"]} repeats)' if row['rows'] else ''
            lines.append(f'failed: {row["label"]}{share}: {row["failed"]}')
        elif not row['rows']:
            lines.append(f'not finished: {row["label"]}')
    return '\n'.join(f'- {line}' for line in lines)


def agreement(rows, reference):
    """Which of the runs with one reference have its losses, and what those that may differ end with."""
    same = [row for row in rows if 'loss_diff' in row and 'apart' not in row]
    good = [row for row in same if row['loss_diff'] <= limit(row)]
    lines = [f'agree: {reference}, {names(good)} ({worst(good, "loss_diff")})'] if good else []
    for row in rows:
        if row in same and row not in good:
            first = number(row, 'loss_diff_first', ', of the first loss {:.2g}')
            lines.append(f'do NOT agree: {row["label"]} and {reference} ({worst([row], "loss_diff")}{first})')
        if 'apart' in row:
            key = 'val_loss' if 'val_loss_diff' in row else 'loss'
            theirs = next(one for one in rows if one['label'] == reference)
            ends = f', {key} {row[key]:.4f} and {theirs[key]:.4f}' if key in row and key in theirs else ''
            lines.append(f'may differ: {row["label"]} and {reference} ({row["apart"]}){ends}')
    return lines


def resumption(rows):
    """How the resumed runs went on."""
    resumed = [row for row in rows if 'resume_diff' in row]
    good = [row for row in resumed if row['resume_diff'] <= limit(row)]
    lines = [f'resumed as without the stop: {names(good)} ({worst(good, "resume_diff")})'] if good else []
    bad = [row for row in resumed if row not in good]
    lines += [f'NOT resumed as without the stop: {names(bad)} ({worst(bad, "resume_diff")})'] if bad else []
    return lines + [f'NOT resumed: {row["label"]}: {row["resume_failed"]}' for row in rows if 'resume_failed' in row]


def fastest(rows, reference):
    """Which of the runs with one reference is fastest, by how much, and what that comes from."""
    by_label = {row['label']: row for row in rows if 'speedup' in row}
    alike = sorted((row for row in by_label.values() if 'apart' not in row), key=lambda row: -row['speedup'])
    lines = []
    if len(alike) > 1:
        best = alike[0]
        equal = [row for row in alike if row is best or not is_clear(best, row)]
        slower = {row['label']: row for row in alike if row not in equal}
        other = slower.get(reference) or next(iter(slower.values()), None)
        unclear = ' (no clear difference between them)' if len(equal) > 1 else ''
        ahead = f', {speed(best, other)}' if other else ''
        lines.append(f'fastest: {names(equal)}{unclear}{ahead}')
        lines += milliseconds(best, other) if other else []
    for row in by_label.values():
        if 'apart' in row and reference in by_label:
            lines.append(f'speed: {row["label"]}, {speed(row, by_label[reference])}')
            lines += milliseconds(row, by_label[reference])
    return lines


def milliseconds(row, other):
    """Where the time between two runs lies: the phase that differs most, and the communication waited for."""
    gain = {phase: other.get(f'time/{phase}', 0) - row.get(f'time/{phase}', 0) for phase in ('total', *PHASES)}
    phase = max(PHASES, key=lambda phase: gain[phase] * gain['total'])
    waiting = 'exposed communication' + (' and outer step' if 'outer_is_comm' in row else '')
    said = []
    for name, key in (('step', 'total'), (phase, phase), (waiting, 'comm_exposed')):
        known = [f'time/{key}' in one for one in (row, other)]
        if all(known) or (any(known) and key == 'outer'):  # a run without that phase spends nothing on it
            said.append(f'{name} {row.get(f"time/{key}", 0):.1f} and {other.get(f"time/{key}", 0):.1f}')
    return [f'ms of {row["label"]} and {other["label"]}: {", ".join(said)}'] if said else []


def one_key_apart(rows):
    """Runs beside DeepSpeed's same stage with the same keys, and what activation checkpointing saves and costs."""
    lines = []
    for row, other in itertools.permutations(rows, 2):
        keys = [{key: value for key, value in one['overrides'].items() if value != 'none'} for one in (row, other)]
        different = {key for key in {**keys[0], **keys[1]} if keys[0].get(key) != keys[1].get(key)}
        faster = f', {speed(row, other)}' if ratios(row, other) else ''
        if row['world_size'] != other['world_size']:
            continue
        if different == {'fsdp_impl'} and other['strategy'] == 'deepspeed' and faster:
            compiled = ', compiled, DeepSpeed is not' if row.get('compile') and not other.get('compile') else ''
            lines.append(f'same stage of DeepSpeed: {row["label"]}{faster}{compiled}')
        is_with = different == {'activation_checkpointing'} and 'activation_checkpointing' not in keys[1]
        if is_with and row['strategy'] == other['strategy']:
            peaks = [number(one, 'mem/rank_max_gb', '{:.2f}') for one in (row, other)]
            predicted = [number(one.get('predicted', {}), 'total_gb', '{:.2f}') for one in (row, other)]
            said = f', peak GB {" and ".join(peaks)}' if all(peaks) else ''
            said += f' (predicted without the process itself: {" and ".join(predicted)})' if all(predicted) else ''
            lines.append(f'activation checkpointing: {row["label"]} and {other["label"]}{said}{faster}')
    return lines


def fitting(rows, gpu_gb):
    """Which runs a GPU with gpu_gb of memory would hold, by prediction; also of those that failed, if that is known."""
    known = sorted((row for row in rows if 'gpu_gb' in row), key=lambda row: row['gpu_gb'])
    lines = []
    for word, fits in (('fit', True), ('do NOT fit', False)):
        if sizes := [f'{row["label"]} {row["gpu_gb"]:.3g}' for row in known if (row['gpu_gb'] <= gpu_gb) == fits]:
            lines.append(f'{word} a GPU of {gpu_gb:g} GB (GB predicted in bfloat16): {", ".join(sizes)}')
    unknown = [row for row in rows if 'gpu_gb' not in row]
    return lines + ([f'memory on a GPU unknown: {names(unknown)}'] if known and unknown else [])


def limit(row):
    return AGREEMENT.get(row.get('dtype'), 1e-4)


def names(rows):
    return ', '.join(row['label'] for row in rows)


def worst(rows, key):
    largest = max(rows, key=lambda row: row[key])
    return f'largest relative difference of a loss {largest[key]:.2g}, limit {limit(largest):g}'


def speed(row, other):
    """'1.20x ddp (1.15 to 1.25 in 3 repeats)': the median over the repeats that both have, of which there must be."""
    found = ratios(row, other)
    across = f' ({min(found):.2f} to {max(found):.2f} in {len(found)} repeats)' if len(found) > 1 else ''
    unclear = '' if is_clear(row, other) else ', no clear difference'
    return f'{statistics.median(found):.2f}x {other["label"]}{across}{unclear}'


def is_clear(row, other):
    """Whether one of two runs is faster in all repeats that both have; a single one decides from half a percent on."""
    found = ratios(row, other)
    margin = 0.005 if len(found) == 1 else 0
    return bool(found) and (min(found) > 1 + margin or max(found) < 1 - margin)
