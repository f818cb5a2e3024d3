"""
What the runs of a comparison say: medians, differences and speed-ups, two Markdown tables, and a verdict in words.

    runs = results.read_runs('out/compare', plan)    # {label: [Run of each repeat]}
    rows = results.summarise(plan, runs, baseline)   # what results.json holds
    print(results.table(rows), results.memory_table(rows), results.verdict(rows), sep='\n\n')

Compared is what belongs together: runs whose keys of MATHEMATICS are equal, with the baseline or, where that is another
model or optimizer, with the first of their kind. Speed-ups are ratios within a repeat, whose runs were started one
after the other, so that a machine that is slow for a while is slow for all of them.
"""

import json
import math
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path

PHASES = ('data', 'forward', 'backward', 'update', 'outer')
WARM_UP = 10  # steps that are not timed, or the first quarter of a short run: allocations, compilation, new buckets
# Keys that decide on the losses. What is not here, as the sharding and the size of a micro-step, must not change them.
MATHEMATICS = ('arch', 'n_layer', 'n_head', 'n_kv_head', 'head_dim', 'n_embd', 'mlp_hidden_dim', 'vocab_size')
MATHEMATICS += ('block_size', 'bias', 'tie_embeddings', 'dropout', 'init_from', 'lora_rank', 'dataset', 'seed')
MATHEMATICS += ('global_batch_size', 'max_iters', 'optimizer', 'learning_rate', 'min_lr', 'lr_schedule', 'warmup_iters')
MATHEMATICS += ('weight_decay', 'beta1', 'beta2', 'grad_clip', 'z_loss')
# Largest relative difference of a logged loss that counts as agreement; half precision keeps 8 or 11 bits of a number.
AGREEMENT = {'float32': 1e-4, 'bfloat16': 1e-2, 'float16': 2e-3}


@dataclass
class Run:
    """One run as its files tell it: rows of metrics.jsonl, config.json; failure: the line that ended it."""

    rows: list = field(default_factory=list)
    about: dict = field(default_factory=dict)
    failure: str = ''

    @property
    def config(self):
        return self.about.get('config', {})

    @property
    def round_steps(self):
        return self.config.get('inner_steps', 1)


# --- READ -------------------------------------------------------------------------------------------------------------


def read_runs(folder, plan):
    """{label: [Run, ...]} of the plan's repeats that have ended, well or not; rows of a run under way do not count."""
    runs = {}
    for entry in plan['runs']:
        runs[entry['label']] = [run for run in map(read_run, repeats_of(folder, entry['label'])) if run]
    return runs


def repeats_of(folder, label):
    """The out_dirs of a run's repeats, in order."""
    return sorted((Path(folder) / 'runs' / label).glob('rep*'), key=lambda path: int(path.name.removeprefix('rep')))


def read_run(folder):
    """The Run in an out_dir, None where none has ended."""
    if (folder / 'FAILED').exists():
        return Run(failure=(folder / 'FAILED').read_text(encoding='utf-8').strip())
    if not (folder / 'DONE').exists():
        return None
    about = folder / 'config.json'
    return Run(read_rows(folder), json.loads(about.read_text(encoding='utf-8')) if about.exists() else {})


def read_rows(folder):
    """The rows of metrics.jsonl, with 'nan' and 'inf' as numbers."""
    lines = (folder / 'metrics.jsonl').read_text(encoding='utf-8').splitlines()
    return [{key: float(value) if isinstance(value, str) else value for key, value in json.loads(line).items()}
            for line in lines]  # fmt: skip


def last_error(console):
    """The line of a failed run's console that says why: its first error line, else the exception, else the last one."""
    lines = [line.strip() for line in console.splitlines() if line.strip()]
    for pattern in (r'(\[\d+\] )?error: ', r'\S*(Error|Exception|Interrupt)\b'):
        if found := [line for line in lines if re.match(pattern, line)]:
            return found[0]
    return lines[-1] if lines else 'it said nothing'


# --- STATISTICS -------------------------------------------------------------------------------------------------------


def summarise(plan, runs, baseline):
    """A row per label, as results.json has it; keys whose value is unknown are left out."""
    rows = []
    for entry in plan['runs']:
        good = [run for run in runs[entry['label']] if not run.failure]
        row = {key: entry[key] for key in ('label', 'strategy', 'script', 'overrides', 'world_size')}
        row['rows'] = len(good)
        if good:
            row |= of_repeats(good)
        elif runs[entry['label']]:
            row['failed'] = runs[entry['label']][0].failure
        rows.append(row)
    measured = {row['label']: runs[row['label']] for row in rows if row['rows']}
    for row in rows:
        if row['rows']:
            reference = reference_of(row['label'], baseline, measured)
            row |= against(row['label'], reference, measured)
    return rows


def of_repeats(runs):
    """Of several repeats: the median of each repeat's median after warm-up. Losses are those of the first repeat."""
    last = runs[0].rows[-1]
    row = {'dtype': runs[0].config.get('dtype'), 'loss': last.get('loss'), 'val_loss': last.get('val_loss')}
    keys = ('tokens_per_sec', 'mfu', *(f'time/{phase}' for phase in PHASES), 'time/total', 'time/comm')
    for key in (*keys, 'time/comm_exposed', 'comm/sent_gb', 'mem/weights_gb', 'mem/gradients_gb', 'mem/optimizer_gb'):
        known = [median_of_run(run.rows, key, run.round_steps) for run in runs]
        known = [value for value in known if value is not None]
        row[key] = statistics.median(known) if known else None
        if key == 'tokens_per_sec' and known:
            row |= {f'{key}_min': min(known), f'{key}_max': max(known)}
    peaks = [value['mem/rank_max_gb'] for run in runs for value in run.rows if 'mem/rank_max_gb' in value]
    row['mem/rank_max_gb'] = max(peaks, default=None)
    return {key: value for key, value in row.items() if value is not None}


def median_of_run(rows, key, round_steps=1):
    """Median of a key over the rows after warm-up, of DiLoCo over its rounds; over all where none of those has it."""
    warm = min(WARM_UP, rows[-1]['step'] / 4)
    for chosen in ([row for row in rows_of_rounds(rows, round_steps) if row['begin'] >= warm], rows):
        if values := [row[key] for row in chosen if key in row]:
            return statistics.median(values)
    return None


def rows_of_rounds(rows, round_steps):
    """
    The rows, put together to one per round of DiLoCo: only one step in a round pays for the exchange, and a median
    over steps would not see it. `begin`: steps done before it.
    """
    rounds = {}
    begin = 0
    for row in rows:
        rounds.setdefault((row['step'] - 1) // round_steps, []).append({**row, 'begin': begin})
        begin = row['step']
    return [mean_row(of_round) for of_round in rounds.values()]


def mean_row(rows):
    """Means per step of the keys of consecutive rows; a row without time/outer had no exchange."""
    if len(rows) == 1:
        return rows[0]
    steps = [row['step'] - row['begin'] for row in rows]
    mean = {'begin': rows[0]['begin'], 'step': rows[-1]['step']}
    for key in {key: None for row in rows for key in row if key not in mean}:
        known = [(row[key], n) for row, n in zip(rows, steps, strict=True) if key in row]
        if key in ('tokens_per_sec', 'mfu'):  # rates: the mean of their inverse
            mean[key] = sum(n for _, n in known) / sum(n / value for value, n in known)
        elif key in ('time/outer', 'comm/sent_gb'):
            mean[key] = sum(value * n for value, n in known) / sum(steps)
        else:  # where a row lacks it, nobody looked
            mean[key] = sum(value * n for value, n in known) / sum(n for _, n in known)
    return mean


def reference_of(label, baseline, measured):
    """Label of the run that this one is compared with: the baseline, or the first that has the same mathematics."""

    def mathematics(other):
        return [measured[other][0].config.get(key) for key in MATHEMATICS]

    alike = [other for other in measured if mathematics(other) == mathematics(label)]
    return baseline if baseline in alike else alike[0]


def against(label, reference, measured):
    """The keys of a row that compare it with its reference."""
    mine, theirs = measured[label], measured[reference]
    compared = {'reference': reference}
    if label != reference:
        why = why_apart(mine[0].config, theirs[0].config)
        compared |= {'apart': why} if why else {}
        differences = [difference(a.rows, b.rows, 'loss') for a, b in zip(mine, theirs, strict=False)]
        compared['loss_diff'] = max((one for one in differences if one is not None), default=None)
        compared['val_loss_diff'] = difference(mine[0].rows, theirs[0].rows, 'val_loss')
    ratios = []
    for a, b in zip(mine, theirs, strict=False):
        pair = [median_of_run(run.rows, 'tokens_per_sec', run.round_steps) for run in (a, b)]
        ratios += [pair[0] / pair[1]] if all(pair) else []
    if ratios:
        compared |= {'speedup': statistics.median(ratios), 'speedup_min': min(ratios), 'speedup_max': max(ratios)}
    return {key: value for key, value in compared.items() if value is not None}


def why_apart(config, reference):
    """Why other losses than the reference's are no mistake, or ''."""
    if config.get('dtype') != reference.get('dtype'):
        return f'{config.get("dtype")} against {reference.get("dtype")}'
    if config.get('num_replicas', 1) == 1:
        return ''
    # Averaging what plain SGD did to each replica after every step is averaging gradients.
    averages = config['outer_lr'] == 1 and config['outer_momentum'] == 0 and config['exchange_dtype'] == 'float32'
    if averages and config['inner_steps'] == 1 and config['optimizer'] == 'sgd' and config['grad_clip'] == 0:
        return ''
    return f'DiLoCo: {config["num_replicas"]} replicas meet every {config["inner_steps"]} steps'


def difference(rows, reference, key):
    """Largest relative difference of a key over the steps that both logged; None where there is none."""
    theirs = {row['step']: row[key] for row in reference if key in row}
    pairs = [(row[key], theirs[row['step']]) for row in rows if key in row and row['step'] in theirs]
    if not pairs:
        return None
    relative = [abs(mine - other) / max(abs(other), 1e-30) for mine, other in pairs]
    return math.inf if any(map(math.isnan, relative)) else max(relative)


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
        'speed-up': lambda row: spread(row, 'speedup', '{:.2f}') if row.get('reference') != row['label'] else '1',
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
    return markdown({title: cells for title, cells in lines.items() if any(cells)})


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
    if key not in row or row['rows'] < 2:
        return number(row, key, form)
    return f'{form.format(row[key])} ({form.format(row[f"{key}_min"])} to {form.format(row[f"{key}_max"])})'


def share_of_step(row):
    return f' ({row["time/comm_exposed"] / row["time/total"]:.0%})' if row.get('time/comm_exposed') else ''


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


def verdict(rows, gpu_gb=0):
    """What the tables say, in sentences; row['gpu_gb']: predicted GB on a GPU that has gpu_gb (0 = do not ask)."""
    good = [row for row in rows if row['rows']]
    lines = [*agreement(good), *apart(good), *resumption(good)]
    for reference in dict.fromkeys(row['reference'] for row in good):
        lines += fastest([row for row in good if row['reference'] == reference], reference)
    if any(row['rows'] < 2 and 'tokens_per_sec' in row for row in good) and len(good) > 1:
        lines.append('One repeat says nothing about noise: --repeats=3 shows what a difference in speed is worth.')
    lines += fitting(rows, gpu_gb) if gpu_gb else []
    lines += [f'{row["label"]} failed: {row["failed"]}' for row in rows if 'failed' in row]
    return '\n'.join(f'- {line}' for line in lines)


def agreement(rows):
    """Whether runs that should have the same losses do."""
    compared = [row for row in rows if 'loss_diff' in row and 'apart' not in row]
    if not compared:
        return []
    off = [row for row in compared if not row['loss_diff'] <= AGREEMENT.get(row.get('dtype'), 1e-4)]
    worst = max(compared, key=lambda row: row['loss_diff'])
    said = f'largest relative difference of a loss {worst["loss_diff"]:.1e} ({worst["label"]} from '
    said += f'{worst["reference"]})'
    limit = AGREEMENT.get(worst.get('dtype'), 1e-4)
    if off:
        names = ', '.join(row['label'] for row in off)
        return [f'They do NOT agree: {names} differ by more than {limit:g}; {said}.']
    return [f'{len(compared)} of {len(compared)} agree with what they are compared with: {said}, within {limit:g}.']


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
    resumed = [row for row in rows if 'resume_diff' in row]
    if not resumed:
        return []
    off = [row['label'] for row in resumed if not row['resume_diff'] <= AGREEMENT.get(row.get('dtype'), 1e-4)]
    if off:
        return [f'Resumed half-way, these do NOT go on as without the stop: {", ".join(off)}.']
    equal = [row['label'] for row in resumed if row['resume_diff'] == 0]
    worst = max(row['resume_diff'] for row in resumed)
    said = f'{len(equal)} with equal losses, the largest difference is {worst:.1e}' if worst else 'every loss is equal'
    return [f'Saved half-way and resumed, {len(resumed)} runs go on as without the stop: {said}.']


def fastest(rows, reference):
    """Which of the runs with one reference is fastest, by how much, and what that comes from."""
    timed = [row for row in rows if row.get('tokens_per_sec')]
    exact = sorted((row for row in timed if 'apart' not in row), key=lambda row: -row['speedup'])
    lines = []
    if len(exact) > 1:
        best = exact[0]
        other = exact[1] if best['label'] == reference else next(row for row in exact if row['label'] == reference)
        equal = [row['label'] for row in exact if row is best or is_within_noise(best, row)]
        if len(equal) > 1:
            lines.append(f'Fastest are {" and ".join(equal)}; no difference between them measured.')
        if other['label'] not in equal:
            lines.append(f'{best["label"]} is {compared_in_words(best, other)}.')
    for row in timed:
        if 'apart' in row:
            other = next(other for other in timed if other['label'] == reference)
            lines.append(f'{row["label"]} is {compared_in_words(row, other)}; but see above: its losses are others.')
    return lines


def compared_in_words(row, other):
    """'1.20x as fast as ddp (1.15 to 1.25): ...', of the row's reference or of another row with the same one."""
    ratio = row['speedup'] / other['speedup']
    if is_within_noise(row, other):
        return f'as fast as {other["label"]}, as far as can be measured ({ratio:.2f}x)'
    speeds = ', '.join(spread(one, 'tokens_per_sec', '{:,.0f}') for one in (row, other))
    return f'{ratio:.2f}x as fast as {other["label"]} (tokens/s {speeds}){reasons(row, other)}'


def is_within_noise(one, other):
    """Whether the spreads of two runs' speed-ups over the repeats overlap. One repeat has none: then they do not."""
    if min(one['rows'], other['rows']) < 2:
        return one['speedup'] == other['speedup']
    return one['speedup_min'] <= other['speedup_max'] and other['speedup_min'] <= one['speedup_max']


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
        text += f'; its {mine:.1f} ms of exposed communication are {abs(mine - theirs):.1f} {more}'
    return text


def fitting(rows, gpu_gb):
    """Which runs a GPU with gpu_gb of memory would hold, by prediction."""
    known = sorted((row for row in rows if 'gpu_gb' in row), key=lambda row: row['gpu_gb'])
    if not known:
        return []
    where = f'a GPU of {gpu_gb:g} GB, by prediction and in bfloat16'
    if known[-1]['gpu_gb'] <= gpu_gb:
        return [f'All fit {where}: {known[-1]["label"]} needs most, {known[-1]["gpu_gb"]:.3g} GB.']
    fits = ', '.join(f'{row["label"]} ({row["gpu_gb"]:.3g})' for row in known if row['gpu_gb'] <= gpu_gb)
    rest = ', '.join(f'{row["label"]} ({row["gpu_gb"]:.3g})' for row in known if row['gpu_gb'] > gpu_gb)
    return [f'On {where}: {fits or "none"} fit; {rest} do not.']
