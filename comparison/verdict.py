"""
What a comparison of runs says, from the rows of results.json: two Markdown tables, and a verdict in words.

    print(verdict.table(rows), verdict.memory_table(rows), verdict.sentences(rows), sep='\n\n')

A key that a row lacks is unknown: its cell stays empty, and no sentence is made of it.
"""

import math
import statistics

PHASES = ('data', 'forward', 'backward', 'update', 'outer')
# Largest relative difference of a logged loss that counts as agreement; half precision keeps 8 or 11 bits of a number.
AGREEMENT = {'float32': 1e-4, 'bfloat16': 1e-2, 'float16': 2e-3}
OUTER_NOTE = 'and that of the inner steps where a replica has several ranks'


# --- TABLES -----------------------------------------------------------------------------------------------------------


def table(rows):
    """The Markdown table of the comparison; columns that no run has a value for are left out."""
    columns = {
        'run': lambda row: row['label'],
        'ranks': lambda row: str(row['world_size']),
        'loss': lambda row: number(row, 'loss', '{:.4f}') or (f'failed: {row["failed"]}' if 'failed' in row else ''),
        'val loss': lambda row: number(row, 'val_loss', '{:.4f}'),
        'largest difference': largest_difference(rows),
        'resumed': lambda row: small(row, 'resume_diff'),
        'tokens/s': lambda row: spread(row, 'tokens_per_sec', '{:,.0f}'),
        'speed-up': lambda row: spread(row, 'speedup', '{:.2f}') if row.get('reference') != row['label'] else '1.00',
        'ms per step': lambda row: number(row, 'time/total', '{:.1f}'),
        f'= {" + ".join(phases(rows))}': lambda row: ' + '.join(
            number(row, f'time/{phase}', '{:.1f}') for phase in phases(rows) if f'time/{phase}' in row
        ),
        'comm ms': lambda row: number(row, 'time/comm', '{:.1f}'),
        'exposed': lambda row: number(row, 'time/comm_exposed', '{:.1f}') + share_of_step(row),
        'MB sent (predicted)': lambda row: predicted_beside(row, 'comm/sent_gb', row.get('predicted_sent_gb'), 1e3),
        'peak GB': lambda row: number(row, 'mem/rank_max_gb', '{:.2f}'),
        'MFU': lambda row: number(row, 'mfu', '{:.1%}'),
    }
    lines = {title: [text(row) for row in rows] for title, text in columns.items()}
    text = markdown({title: cells for title, cells in lines.items() if any(cells)})
    outer = ', '.join(row['label'] for row in rows if 'outer_is_comm' in row)
    return f'{text}\n\n{outer}: communication is the outer step, exchange and update, {OUTER_NOTE}.' if outer else text


def largest_difference(rows):
    """Text of a row's loss_diff, with what it is compared with when that is not the same for all."""
    references = {row.get('reference') for row in rows if 'loss_diff' in row}

    def text(row):
        named = f' from {row["reference"]}' if len(references) > 1 and 'loss_diff' in row else ''
        return small(row, 'loss_diff') + named

    return text


def memory_table(rows):
    """What a rank holds in MB, measured and, in brackets, predicted and their ratio; '' if nothing was measured."""
    columns = {'run': [row['label'] for row in rows]}
    for part in ('weights', 'gradients', 'optimizer'):
        columns[f'{part} MB (predicted)'] = [
            predicted_beside(row, f'mem/{part}_gb', row.get('predicted', {}).get(f'{part}_gb'), 1e3) for row in rows
        ]
    measured = any(cell for cells in list(columns.values())[1:] for cell in cells)
    return markdown(columns) if measured else ''


def phases(rows):
    return [phase for phase in PHASES if any(f'time/{phase}' in row for row in rows)]


def number(row, key, form):
    return form.format(row[key]) if key in row else ''


def small(row, key):
    """A relative difference; '0' for bit-equal."""
    return number(row, key, '{:.1e}' if row.get(key) else '0')


def spread(row, key, form):
    """'1,234 (1,200 to 1,300)', the range of the repeats, if there are several."""
    if key not in row or (row['pairs'] if key == 'speedup' else row['rows']) < 2:
        return number(row, key, form)
    return f'{form.format(row[key])} ({form.format(row[f"{key}_min"])} to {form.format(row[f"{key}_max"])})'


def share_of_step(row):
    share = row.get('time/comm_exposed', 0) / row.get('time/total', math.inf)
    return f' ({share:.0%})' if 0 < share <= 1 else ''  # above 1: the profiled step was slower than the median one


def predicted_beside(row, key, predicted, scale):
    """'12.3 (12.1, 1.02x)': measured, predicted, and how often the one is in the other."""
    if key not in row:
        return ''
    text = f'{row[key] * scale:.4g}'
    if predicted is None:
        return text
    ratio = f', {row[key] / predicted:.2f}x' if predicted else ''
    return f'{text} ({predicted * scale:.4g}{ratio})'


def markdown(columns):
    """A Markdown table of {title: cells}, padded so that it can be read as text, too."""
    widths = [max(map(len, [title, *cells])) for title, cells in columns.items()]
    lines = [list(columns), ['-' * width for width in widths], *map(list, zip(*columns.values(), strict=True))]
    return '\n'.join(
        '| ' + ' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + ' |' for line in lines
    )


# --- VERDICT ----------------------------------------------------------------------------------------------------------


def sentences(rows, gpu_gb=0):
    """What the tables say, in sentences; row['gpu_gb']: predicted GB on a GPU that has gpu_gb (0 = do not ask)."""
    good = [row for row in rows if row['rows']]
    lines = [*agreement(good), *apart(good), *resumption(good)]
    for reference in dict.fromkeys(row['reference'] for row in good):
        lines += fastest([row for row in good if row['reference'] == reference], reference)
    lines += [*beside_deepspeed(good), *recomputation(good)]
    if any(row['rows'] < 2 and 'tokens_per_sec' in row for row in good) and len(good) > 1:
        lines.append('One repeat says nothing about noise: --repeats=3 shows what a difference in speed is worth.')
    lines += fitting(rows, gpu_gb) if gpu_gb else []
    for row in rows:
        if 'failed' in row:
            which = f': {row["failures"]} of {row["failures"] + row["rows"]} repeats' if row['rows'] else ''
            lines.append(f'{row["label"]}{which} failed: {row["failed"]}')
        elif not row['rows']:
            lines.append(f'{row["label"]} has not finished yet.')
    return '\n'.join(f'- {line}' for line in lines)


def agreement(rows):
    """Whether runs that should have the same losses do."""

    def limit(row):
        return AGREEMENT.get(row.get('dtype'), 1e-4)

    compared = [row for row in rows if 'loss_diff' in row and 'apart' not in row]
    if not compared:
        return []
    off = [row for row in compared if not row['loss_diff'] <= limit(row)]
    lines = []
    for allowed in dict.fromkeys(map(limit, off)):
        named = [
            (row, f' ({small(row, "loss_diff_first") or "unknown"} at first)') for row in off if limit(row) == allowed
        ]
        said = [f'{row["label"]} {row["loss_diff"]:.1e} from {row["reference"]}{at_first}' for row, at_first in named]
        lines.append(f'They do NOT agree within {allowed:g}, relatively: {", ".join(said)}.')
    if off:
        return lines
    worst = max(compared, key=lambda row: row['loss_diff'] / limit(row))
    said = f'largest relative difference of a loss {worst["loss_diff"]:.1e} ({worst["label"]} from '
    said += f'{worst["reference"]}), within {limit(worst):g}'
    return [f'{len(compared)} of {len(compared)} agree with what they are compared with: {said}.']


def apart(rows):
    """What may differ, and by how much it does."""
    lines = []
    for row in rows:
        if 'apart' in row:
            key = 'val_loss' if 'val_loss_diff' in row else 'loss'
            reference = next((other.get(key) for other in rows if other['label'] == row['reference']), None)
            numbers = f': {key} {row[key]:.4f} against {reference:.4f}' if reference and key in row else ''
            lines.append(f'{row["label"]} may differ ({row["apart"]}){numbers}.')
    return lines


def resumption(rows):
    """How the resumed runs went on."""
    lines = [f'{row["label"]} was NOT resumed: {row["resume_failed"]}' for row in rows if 'resume_failed' in row]
    resumed = [row for row in rows if 'resume_diff' in row]
    off = [row['label'] for row in resumed if not row['resume_diff'] <= AGREEMENT.get(row.get('dtype'), 1e-4)]
    if off:
        lines.append(f'Resumed half-way, these do NOT go on as without the stop: {", ".join(off)}.')
    elif resumed:
        equal = [row['label'] for row in resumed if row['resume_diff'] == 0]
        worst = max(row['resume_diff'] for row in resumed)
        said = f'{len(equal)} with equal losses, the largest difference is {worst:.1e}'
        said = said if worst else 'every loss is equal'
        lines.append(f'Saved half-way and resumed, {len(resumed)} runs go on as without the stop: {said}.')
    return lines


def fastest(rows, reference):
    """Which of the runs with one reference is fastest, by how much, and what that comes from."""
    timed = [row for row in rows if 'speedup' in row]
    exact = sorted((row for row in timed if 'apart' not in row), key=lambda row: -row['speedup'])
    lines = []
    if len(exact) > 1:
        best = exact[0]
        other = exact[1] if best['label'] == reference else next(row for row in exact if row['label'] == reference)
        equal = [row['label'] for row in exact if row is best or is_within_noise(best, row)]
        if len(equal) > 1:
            lines.append(f'Fastest are {", ".join(equal[:-1])} and {equal[-1]}; no difference between them measured.')
        if other['label'] not in equal:
            name = f'{best["label"]} is' if len(equal) > 1 else f'Fastest is {best["label"]}:'
            lines.append(f'{name} {compared_in_words(best, other)}.')
    for row in timed:
        if 'apart' in row:
            other = next((other for other in timed if other['label'] == reference), None)
            words = compared_in_words(row, other) if other else ''
            lines += [f'{row["label"]} is {words}; but see above: its losses are others.'] if other else []
    return lines


def beside_deepspeed(rows):
    """How fast fully_shard and fsdp_manual.py are beside DeepSpeed's same stage, with the same keys otherwise."""
    said = []
    for theirs in rows:
        for ours in rows if theirs['strategy'] == 'deepspeed' else []:
            if ours['strategy'] in ('fsdp', 'fsdp_manual') and differ_in(ours, theirs, 'fsdp_impl'):
                ratio, is_clear = ratio_in_words(ours, theirs)
                equal = '' if is_clear else ' (no difference measured)'
                equal += ' (compiled, DeepSpeed is not)' if ours.get('compile') and not theirs.get('compile') else ''
                said += [f'{ours["label"]} is {ratio} as fast as {theirs["label"]}{equal}'] if ratio else []
    return [f'Beside the same stage of DeepSpeed: {"; ".join(said)}.'] if said else []


def recomputation(rows):
    """What activation checkpointing saves of the peak, and costs in speed, beside the same run without it."""
    said = []
    for row in rows:
        for other in rows:
            modes = [one['overrides'].get('activation_checkpointing', 'none') for one in (row, other)]
            if modes[0] == 'none' or modes[1] != 'none' or not differ_in(row, other, 'activation_checkpointing'):
                continue
            if row['strategy'] == other['strategy'] and 'mem/rank_max_gb' in row and 'mem/rank_max_gb' in other:
                peaks = f'{row["mem/rank_max_gb"]:.2f} instead of {other["mem/rank_max_gb"]:.2f} GB per rank'
                totals = [one.get('predicted', {}).get('total_gb') for one in (row, other)]
                if None not in totals:
                    peaks += f' ({totals[0]:.2f} and {totals[1]:.2f} by prediction, without the process itself)'
                ratio, _ = ratio_in_words(row, other)
                slower = f', {ratio} as fast as {other["label"]}' if ratio else ''
                said.append(f'{row["label"]} peaks at {peaks}{slower}')
    return [f'Activation checkpointing: {"; ".join(said)}.'] if said else []


def differ_in(row, other, key):
    """Whether two runs, on equally many ranks, differ in this key and no other; 'none' is not to be set."""
    keys, others = row['overrides'], other['overrides']
    return row['world_size'] == other['world_size'] and {
        name for name in {**keys, **others} if keys.get(name, 'none') != others.get(name, 'none')
    } == {key}


def ratio_in_words(row, other):
    """('1.20x (1.15 to 1.25)', whether all repeats are on one side of 1) of two runs' speed; ('', False) if unknown."""
    ratios = ratios_of(row, other)
    if not ratios:
        return '', False
    across = f' ({min(ratios):.2f} to {max(ratios):.2f})' if len(ratios) > 1 else ''
    return f'{statistics.median(ratios):.2f}x{across}', not is_within_noise(row, other)


def ratios_of(row, other):
    """Tokens per second of one run in those of another, in each repeat that both have."""
    mine, theirs = (one.get('tokens_per_sec_repeats', {}) for one in (row, other))
    return [mine[repeat] / theirs[repeat] for repeat in mine if repeat in theirs]


def compared_in_words(row, other):
    """'1.20x as fast as ddp (1.15 to 1.25): ...', of the row's reference or of another row with the same one."""
    ratio = statistics.median(ratios_of(row, other) or [row['speedup'] / other['speedup']])
    if is_within_noise(row, other):
        return f'as fast as {other["label"]}, as far as can be measured ({ratio:.2f}x)'
    speeds = ', '.join(spread(one, 'tokens_per_sec', '{:,.0f}') for one in (row, other))
    return f'{ratio:.2f}x as fast as {other["label"]} (tokens/s {speeds}){reasons(row, other)}'


def is_within_noise(one, other):
    """Whether neither is the faster one in all repeats. Of one repeat: whether they are equal to half a percent."""
    ratios = ratios_of(one, other) or [one['speedup'] / other['speedup']]
    return min(ratios) <= 1 <= max(ratios) or (len(ratios) == 1 and abs(ratios[0] - 1) < 0.005)


def reasons(row, other):
    """Where the milliseconds between two runs lie: the phase that differs most, and the communication waited for."""
    gains = {phase: other.get(f'time/{phase}', 0) - row.get(f'time/{phase}', 0) for phase in PHASES}
    total = other.get('time/total', 0) - row.get('time/total', 0)
    phase = max(gains, key=lambda phase: gains[phase] * total)
    text = ''
    if gains[phase] * total > 0:
        text = f': {row["time/total"]:.1f} instead of {other["time/total"]:.1f} ms per step, most of it in {phase} '
        text += f'({row.get(f"time/{phase}", 0):.1f} instead of {other.get(f"time/{phase}", 0):.1f})'
    if 'time/comm_exposed' in row and 'time/comm_exposed' in other:
        mine, theirs = row['time/comm_exposed'], other['time/comm_exposed']
        more = 'less' if mine <= theirs else 'more'
        what = 'exposed communication' + (' and outer step' if 'outer_is_comm' in row else '')
        text += f'; its {mine:.1f} ms of {what} are {abs(mine - theirs):.1f} {more}'
    return text


def fitting(rows, gpu_gb):
    """Which runs a GPU with gpu_gb of memory would hold, by prediction; also of those that failed, if that is known."""
    known = sorted((row for row in rows if 'gpu_gb' in row), key=lambda row: row['gpu_gb'])
    if not known:
        return []
    where = f'a GPU of {gpu_gb:g} GB, by prediction and in bfloat16'
    unknown = ', '.join(row['label'] for row in rows if 'gpu_gb' not in row)
    unknown = f' Not known of {unknown}.' if unknown else ''
    if known[-1]['gpu_gb'] <= gpu_gb:
        all_ = f'{len(known)} of {len(rows)}' if unknown else 'All'
        return [f'{all_} fit {where}: {known[-1]["label"]} needs most, {known[-1]["gpu_gb"]:.3g} GB.{unknown}']
    fits = ', '.join(f'{row["label"]} ({row["gpu_gb"]:.3g})' for row in known if row['gpu_gb'] <= gpu_gb)
    rest = ', '.join(f'{row["label"]} ({row["gpu_gb"]:.3g})' for row in known if row['gpu_gb'] > gpu_gb)
    return [f'On {where}: {fits or "none"} fit; {rest} do not.{unknown}']
