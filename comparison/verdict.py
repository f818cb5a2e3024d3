"""
The verdict of a comparison, from the rows of results.json: two Markdown tables and a list of facts.

    print(verdict.table(rows), verdict.memory_table(rows), verdict.facts(rows), sep='\n\n')

If a row lacks a key, its value is not known: the cell stays empty, and no fact is derived from it.
"""

import math
import statistics

from comparison.results import ratios
from runtime import PHASES

# The largest relative difference of a loss of a resumed run. Half precision has 8 or 11 bits per number.
RESUMED = {'float32': 1e-4, 'bfloat16': 1e-2, 'float16': 2e-3}
APART = 1.5  # if the speeds of a run's repeats differ by a larger factor, they say little
OTHERS = 0.1  # if other programs take a larger share of the machine's time, they matter

# --- TABLES -----------------------------------------------------------------------------------------------------------


def cells(rows):
    """[{column: text}], with a row for each run."""
    phases = [phase for phase in PHASES if any(f'time/{phase}' in row for row in rows)]
    has_references = len({row.get('reference') for row in rows if 'loss_diff' in row}) > 1
    found = []
    for row in rows:
        exposed = row.get('time/comm_exposed', 0) / row.get('time/total', 1)
        share = f' ({exposed:.0%})' if 0 < exposed <= 1 else ''  # it is above 1 if the profiled step was a slow one
        failed = f'failed: {row["failed"]}' if 'failed' in row else ''
        times = [number(row, f'time/{phase}', '{:.1f}') for phase in phases if f'time/{phase}' in row]
        found.append({
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
    return found


def table(rows):
    """The Markdown table of the comparison."""
    lines = [markdown(cells(rows))]
    if outer := names([row for row in rows if 'outer_is_comm' in row]):
        also = 'and that of the inner steps where a replica has several ranks'
        lines += ['', f'{outer}: communication is the outer step, exchange and update, {also}.']
    return '\n'.join(lines)


def memory_cells(rows):
    """[{column: text}] of the MB that a rank holds: measured and, in brackets, predicted and their ratio. [] if nothing
    was measured."""
    found = []
    for row in rows:
        found.append({'run': row['label']})
        for part in ('weights', 'gradients', 'optimizer'):
            predicted = row.get('predicted', {}).get(f'{part}_gb')
            found[-1][f'{part} MB (predicted)'] = megabytes(row.get(f'mem/{part}_gb'), predicted)
    return found if any(cell for row in found for cell in list(row.values())[1:]) else []


def memory_table(rows):
    return markdown(found) if (found := memory_cells(rows)) else ''


def number(row, key, form):
    return form.format(row[key]) if key in row else ''


def with_range(row, key, form):
    """'1,234 (1,200 to 1,300)': the value, and the range of the repeats if there are several."""
    several = f' ({form.format(row[f"{key}_min"])} to {form.format(row[f"{key}_max"])})' if f'{key}_min' in row else ''
    return number(row, key, form) + several


def megabytes(measured, predicted):
    """'12.3 (12.1, 1.02x)' from values in GB: measured, predicted, and the first divided by the second."""
    if measured is None or predicted is None:
        return '' if measured is None else f'{measured * 1e3:.4g}'
    ratio = f', {measured / predicted:.2f}x' if predicted else ''
    return f'{measured * 1e3:.4g} ({predicted * 1e3:.4g}{ratio})'


def markdown(rows):
    """A Markdown table of rows {title: cell}, without empty columns, padded so that it reads well as plain text."""
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    widths = [max(len(title), *(len(row[title]) for row in rows)) for title in titles]
    lines = [titles, ['-' * width for width in widths], *([row[title] for title in titles] for row in rows)]
    lines = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


# --- FACTS ------------------------------------------------------------------------------------------------------------


def facts(rows, gpu_gb=0, codes=()):
    """
    A Markdown list that says which runs were resumed correctly, are fastest, fit a GPU, have failed.

    gpu_gb: a GPU's memory, with which the prediction row['gpu_gb'] is compared; 0 = do not. codes: as for other_code().
    """
    finished = [row for row in rows if row['rows']]
    lines = []
    for reference in dict.fromkeys(row['reference'] for row in finished):
        compared = [row for row in finished if row['reference'] == reference]
        lines += [f'may differ: {row["label"]} and {reference} ({row["apart"]})' for row in compared if 'apart' in row]
        lines += fastest(compared, reference)
    lines += resumption(finished) + (fitting(rows, gpu_gb) if gpu_gb else [])
    for row in rows:
        if 'failed' in row:
            share = f' ({row["failures"]} of {row["failures"] + row["rows"]} repeats)' if row['rows'] else ''
            lines.append(f'failed: {row["label"]}{share}: {row["failed"]}')
        elif not row['rows']:
            lines.append(f'not finished: {row["label"]}')
    lines += other_code(codes) + doubts(finished)
    return '\n'.join(f'- {line}' for line in lines)


def resumption(rows):
    """Lines on which of the runs that were resumed from the middle have the losses of the uninterrupted run, to the bit
    or nearly."""
    resumed = [row for row in rows if 'resume_diff' in row]
    exact = [row for row in resumed if row['resume_diff'] == 0]
    close = [row for row in resumed if 0 < row['resume_diff'] <= limit(row)]
    far = [row for row in resumed if row not in exact + close]
    good = [f'{names(exact)} (every loss equal to the bit)'] if exact else []
    good += [f'{names(close)} ({worst(close)})'] if close else []
    lines = [f'resumed as without the stop: {", ".join(good)}'] if good else []
    lines += [f'NOT resumed as without the stop: {names(far)} ({worst(far)})'] if far else []
    return lines + [f'NOT resumed: {row["label"]}: {row["resume_failed"]}' for row in rows if 'resume_failed' in row]


def other_code(codes):
    """A warning if the runs did not all have the same *.py files. codes: {hash: [run, ...]}, as from
    results.codes_of()."""
    if len(codes) < 2:
        return []
    most = max(codes, key=lambda code: len(codes[code]))
    others = [
        f'{code} in {", ".join(runs[:4])}' + (f' and {len(runs) - 4} more' if len(runs) > 4 else '')
        for code, runs in codes.items()
        if code != most
    ]
    said = f'{", ".join(others)}, {most} in all others'
    return [f'WARNING: the code changed between runs, and they may differ for that reason: sha256 of *.py {said}']


def fastest(rows, reference):
    """A line on which of the runs that should agree is fastest, and by how much: against the reference or, if that is
    among the fastest, the next run."""
    ranked = sorted((row for row in rows if 'speedup' in row and 'apart' not in row), key=lambda row: -row['speedup'])
    if len(ranked) < 2:
        return []
    best = ranked[0]
    equal = [row for row in ranked if row is best or not is_clear(best, row)]
    slower = [row for row in ranked if row not in equal]
    line = f'fastest: {names(equal)}' + (' (no clear difference between them)' if len(equal) > 1 else '')
    if slower:
        other = next((row for row in slower if row['label'] == reference), slower[0])
        found = ratios(best, other)
        repeats = f'({min(found):.2f} to {max(found):.2f} in {len(found)} repeats)'
        repeats = repeats if len(found) > 1 else '(one repeat cannot show noise)'
        line += f', {statistics.median(found):.2f}x {other["label"]} {repeats}'
    return [line]


def doubts(rows):
    """Warnings about times and speed-ups that may be due to a busy machine."""
    lines, ranks = [], {row['label']: row['world_size'] for row in rows}
    for row in rows:
        slowest, fastest = row.get('tokens_per_sec_min', math.inf), row.get('tokens_per_sec_max', 0)
        if fastest > APART * slowest:
            several = f'from {slowest:,.0f} to {fastest:,.0f} tokens/s'
            lines.append(
                f'WARNING: the repeats of {row["label"]} differ by a factor {fastest / slowest:.1f} ({several})'
            )
        reference_ranks = ranks.get(row['reference'], row['world_size'])
        if row['world_size'] > reference_ranks and row.get('speedup', 0) > row['world_size'] / reference_ranks:
            given = f'{row["world_size"]} ranks against {reference_ranks}'
            lines.append(f'WARNING: {row["label"]} is {row["speedup"]:.2f}x as fast as {row["reference"]} on {given}')
    if disturbed := [row for row in rows if row.get('others', 0) > OTHERS]:
        most = max(row['others'] for row in disturbed)
        lines.append(f'WARNING: other programs took up to {most:.0%} of the cores during {names(disturbed)}')
    if lines:
        lines.append('do not trust these speeds: run again on a quiet machine, with more --repeats')
    return lines


def is_clear(row, other):
    """Whether the same one of two runs is faster in all repeats that both have, and by at least half a percent if there
    is only one."""
    found = ratios(row, other)
    margin = 0.005 if len(found) == 1 else 0
    return bool(found) and (min(found) > 1 + margin or max(found) < 1 - margin)


def fitting(rows, gpu_gb):
    """Lines on which runs should fit a GPU with gpu_gb of memory, by prediction."""
    known = sorted((row for row in rows if 'gpu_gb' in row), key=lambda row: row['gpu_gb'])
    lines = []
    for word, fits in (('fit', True), ('do NOT fit', False)):
        if sizes := [f'{row["label"]} {row["gpu_gb"]:.3g}' for row in known if (row['gpu_gb'] <= gpu_gb) == fits]:
            lines.append(f'{word} a GPU of {gpu_gb:g} GB (GB predicted in bfloat16): {", ".join(sizes)}')
    return lines


def limit(row):
    return RESUMED.get(row.get('dtype'), 1e-4)


def names(rows):
    return ', '.join(row['label'] for row in rows)


def worst(rows):
    largest = max(rows, key=lambda row: row['resume_diff'])
    return f'largest relative difference of a loss {largest["resume_diff"]:.2g}, limit {limit(largest):g}'
