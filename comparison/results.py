"""
Read the files that the runs of a comparison wrote, and compute medians, differences of losses, and speed-ups.

    runs = results.read_runs('out/compare', plan)    # {label: {repeat: Run}}
    rows = results.summarize(plan, runs, baseline)   # the rows of results.json, which verdict.py puts in words

A run is compared with the baseline if both have the same MATHEMATICS keys. Otherwise, as with another model or
optimizer, it is compared with the first run that has the same ones. Speed-ups are ratios within a repeat. The runs of a
repeat are started one after the other, so if the machine is slow for a while, it is slow for all of them.
"""

import contextlib
import json
import math
import re
import shutil
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from knobs import read_knobs
from runtime import PHASES
from system.files import ROOT, read_json, write_file

WARM_UP = 10  # first steps, not timed: allocations, compilation, new buckets; at most a quarter of the run
# Runs are comparable if these keys agree: those tagged [result], without three that only set max_iters and
# learning_rate, which are in here themselves. norm_eps and packed are no keys of a script; they follow from init_from
# and the dataset.
MATHEMATICS = {key for key, knob in read_knobs(Path(ROOT, 'train_ddp.py')).items() if 'result' in knob.tags}
MATHEMATICS = MATHEMATICS - {'num_epochs', 'tokens_per_parameter', 'lr_rule'} | {'norm_eps', 'packed'}
# With another value of one of these keys than here, DiLoCo's losses are not those of the other strategies.
EXACT = {'outer_lr': 1, 'outer_momentum': 0, 'num_fragments': 1, 'overlap_steps': 0, 'exchange_dtype': 'float32'}


@dataclass
class Run:
    """
    One run, read from its files. rows: metrics.jsonl. about: config.json. failure: the line that says why it failed, or
    ''. others: the share of the machine's time that went to other programs during the run.
    """

    rows: list = field(default_factory=list)
    about: dict = field(default_factory=dict)
    failure: str = ''
    others: float = 0.0

    @property
    def config(self):
        return self.about.get('config', {})

    @property
    def round_steps(self):
        return self.config.get('inner_steps', 1)


# --- FILES ------------------------------------------------------------------------------------------------------------


def folder_of(folder, entry, repeat):
    """The out_dir of a run. repeat: a number, or a name such as 'resumed'."""
    return folder / 'runs' / entry['label'] / (f'rep{repeat}' if isinstance(repeat, int) else repeat)


def clear(out):
    """Remove the files in an out_dir that say how a run ended, so that it can run again."""
    if (out / 'DONE').exists():  # done on other ranks, or damaged, so start from the beginning
        shutil.rmtree(out / 'checkpoints', ignore_errors=True)
    for marker in ('FAILED', 'DONE'):
        (out / marker).unlink(missing_ok=True)


def keep_plan(folder, plan, may_grow=False):
    """Write plan.json. Raises ValueError if the folder holds another comparison, with which this one would mix.
    may_grow: runs with new labels may be added."""
    path = folder / 'plan.json'
    if path.exists():
        old = {entry['label']: entry for entry in read_json(path)['runs']}
        new = {entry['label']: entry for entry in json.loads(json.dumps(plan))['runs']}
        compared = old.keys() & new.keys() if may_grow else {**old, **new}
        if changed := [label for label in compared if old.get(label) != new.get(label)]:
            raise ValueError(
                f'{folder} holds another comparison: {changed[0]} has other keys or ranks in {path}; give this one '
                f'another --out_dir, or delete {folder}'
            )
    write_json(path, plan)


def read_runs(folder, plan):
    """{label: {repeat: Run}} of the plan's runs that have ended, well or not. Runs under way are left out."""
    runs = {}
    for entry in plan['runs']:
        paths = (Path(folder) / 'runs' / entry['label']).glob('rep*')
        found = {int(path.name.removeprefix('rep')): read_run(path, entry['world_size']) for path in paths}
        runs[entry['label']] = {repeat: found[repeat] for repeat in sorted(found) if found[repeat]}
    return runs


def codes_of(folder):
    """{hash of *.py: ['LABEL/REPEAT', ...]}: the code that the runs in a folder had whenever they were started, by
    their logs."""
    found = {}
    for path in sorted(Path(folder).glob('runs/*/*/train.log')):
        text = path.read_text(encoding='utf-8', errors='replace')
        for code in dict.fromkeys(re.findall(r'^\S+ \S+ code: .*sha256 of \*\.py (\w+)$', text, re.M)):
            found.setdefault(code, []).append(f'{path.parent.parent.name}/{path.parent.name}')
    return found


def finished(runs):
    """The part of {repeat: Run} that ended well."""
    return {repeat: run for repeat, run in runs.items() if not run.failure}


def read_run(folder, world_size=None):
    """The Run in an out_dir; None if none has ended. A run with damaged files, or one that ran on another number of
    ranks than world_size, counts as failed."""
    about = {}
    try:
        about = read_json(folder / 'config.json') if (folder / 'config.json').exists() else {}
        if (folder / 'FAILED').exists():
            said = (folder / 'FAILED').read_text(encoding='utf-8').strip()  # runs.sh leaves it empty
            return Run([], about, said or last_error((folder / 'console.txt').read_text('utf-8', errors='replace')))
        if not (folder / 'DONE').exists():
            return None
        others = float((folder / 'others').read_text()) if (folder / 'others').exists() else 0.0  # runs.sh writes none
        run = Run(read_rows(folder), about, others=others)
    except (OSError, ValueError) as error:
        return Run([], about, str(error))
    if world_size and about.get('world_size', world_size) != world_size:
        run = Run([], about, f'it ran on {about["world_size"]} rank(s), expected {world_size}: use another --launcher')
    return run


def read_rows(folder, is_running=False):
    """
    The rows of metrics.jsonl, with 'nan' and 'inf' as floats. is_running: leave out a last line that is half-written.

    Raises FileNotFoundError if there is no such file, ValueError if it is damaged or has no row.
    """
    path = Path(folder) / 'metrics.jsonl'
    if not path.exists():
        raise FileNotFoundError(f'{path} does not exist: expected the out_dir of a run, such as out/quickstart')
    text, rows = path.read_text(encoding='utf-8', errors='replace'), []
    for number, line in enumerate(text.split('\n')[:-1] if is_running else text.splitlines(), start=1):
        try:
            row = json.loads(line)
            rows.append({key: numbers_of(value) for key, value in row.items()})
            row['step'] + 0
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            said = f'{path} is damaged: expected a JSON object with its step in line {number}'
            raise ValueError(f'{said}, given {line[:40]!r}') from None
    if not rows:
        raise ValueError(f'{path} has no row yet: expected one for each logged step')
    return rows


def numbers_of(value):
    """A value of metrics.jsonl, a number or a list of numbers, with the texts 'nan' and 'inf' turned into floats."""
    if isinstance(value, list):
        return [numbers_of(number) for number in value]
    return float(value) if isinstance(value, str) else value


def write_json(path, value):
    """Write JSON. Numbers that are not finite, which JSON does not have, become 'nan', 'inf' or '-inf', as in
    metrics.jsonl."""
    valid = json.loads(json.dumps(value), parse_constant=lambda name: str(float(name)))
    write(path, json.dumps(valid, indent=1) + '\n')


def write(path, text):
    """Write a file completely or not at all, and make its folder. Raises OSError with the path and the reason."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text)
    except OSError as error:
        raise OSError(f'{path} cannot be written: {error.strerror}; give another --out_dir') from None


def last_error(console):
    """The line of a failed run's output that says why: the first error line, or else an exception, or the last line."""
    lines = [line.strip() for line in console.splitlines() if line.strip()]
    for pattern in (r'(\[\d+\] )?error: ', r'\S*(Error|Exception|Interrupt)\b'):
        if found := [line for line in lines if re.match(pattern, line)]:
            return found[0]
    return lines[-1] if lines else 'it said nothing'


# --- STATISTICS -------------------------------------------------------------------------------------------------------


def summarize(plan, runs, baseline):
    """
    A row for each label, as in results.json. Keys whose value is not known are left out.

    runs: {label: {repeat: Run}}. From runs that failed, only the line that says why is used.
    """
    rows = {}
    measured = {label: good for label, every in runs.items() if (good := finished(every))}
    for entry in plan['runs']:
        label, good = entry['label'], measured.get(entry['label'], {})
        row = {key: entry[key] for key in ('label', 'strategy', 'script', 'overrides', 'world_size')}
        row['rows'] = len(good)
        if good:
            row |= medians_of_repeats(good) | against(label, reference_of(label, baseline, measured), measured)
        if failures := [run.failure for run in runs[label].values() if run.failure]:
            row |= {'failed': failures[0], 'failures': len(failures)}
        rows[label] = row
    for row in rows.values():
        row |= with_range('speedup', ratios(row, rows[row['reference']])) if 'reference' in row else {}
    return list(rows.values())


def medians_of_repeats(runs):
    """Keys of a row from {repeat: Run}: the median over repeats of each repeat's median after warm-up. Losses are those
    of the first repeat."""
    first = next(iter(runs.values()))
    row = {key: first.config.get(key) for key in ('dtype', 'compile')}
    row |= {key: first.rows[-1].get(key) for key in ('loss', 'val_loss')}
    keys = ('mfu', *(f'time/{phase}' for phase in PHASES), 'time/total', 'time/comm', 'time/comm_exposed')
    keys += ('tokens_per_sec', 'comm/sent_gb', 'mem/weights_gb', 'mem/gradients_gb', 'mem/optimizer_gb')
    for key in keys:
        medians = {repeat: median_of_run(run.rows, key, run.round_steps) for repeat, run in runs.items()}
        known = {repeat: value for repeat, value in medians.items() if value is not None}
        row[key] = statistics.median(known.values()) if known else None
        if key == 'tokens_per_sec':
            row |= {**with_range(key, known.values()), f'{key}_repeats': known}
    # Medians of the phases do not add up to the median of the step, so they are scaled until they do.
    parts = [f'time/{phase}' for phase in PHASES if row[f'time/{phase}']]
    scale = row['time/total'] / sum(row[part] for part in parts) if parts else 1
    row |= {part: row[part] * scale for part in parts}
    row['others'] = max(run.others for run in runs.values())
    peaks = [value['mem/rank_max_gb'] for run in runs.values() for value in run.rows if 'mem/rank_max_gb' in value]
    row['mem/rank_max_gb'] = max(peaks, default=None)
    if first.config.get('num_replicas', 1) > 1 and row['time/outer'] is not None:
        # The profiler covers only the inner steps, which communicate only if a replica has several ranks.
        for key in ('time/comm', 'time/comm_exposed'):
            row[key] = (row[key] or 0) + row['time/outer']
        row['outer_is_comm'] = True
    return {key: value for key, value in row.items() if value is not None}


def with_range(key, values):
    """Keys of a row: the median of the values, and if there are several, the smallest and the largest."""
    if not values:
        return {}
    several = {f'{key}_min': min(values), f'{key}_max': max(values)} if len(values) > 1 else {}
    return {key: statistics.median(values), **several}


def ratios(row, other):
    """[tokens per second of one run / those of the other, for each repeat that both have]."""
    mine, theirs = (one.get('tokens_per_sec_repeats', {}) for one in (row, other))
    return [mine[repeat] / theirs[repeat] for repeat in mine if repeat in theirs]


def median_of_run(rows, key, round_steps=1):
    """
    Median of a key over the rows after warm-up, or for DiLoCo over its rounds after warm-up, since only one step of a
    round pays for the exchange and a median over steps would not show it. If none of these rows has the key, the median
    over all rounds, or else over whatever rows there are. None if no row has the key.
    """
    warm = min(WARM_UP, rows[-1]['step'] / 4)
    rounds, timed = rounds_of(rows, round_steps)
    for chosen in ([row for row in rounds if row['begin'] >= warm], rounds, [mean_row(timed)] if timed else rows):
        if values := [row[key] for row in chosen if key in row]:
            return statistics.median(values)
    return None


def rounds_of(rows, round_steps):
    """
    (rows averaged over whole rounds, rows that have times). Each has 'begin', the number of steps done before it.

    A row stands for log_interval steps. If log_interval and the length of a round do not divide each other, several
    rounds are averaged together.
    """
    rounds, timed, begin = [], [], 0
    round_rows = []
    for row in rows:
        if 'tokens_per_sec' in row:  # a row without it is an evaluation's, within the steps of the next row
            timed.append({**row, 'begin': begin})
            round_rows.append(timed[-1])
            begin = row['step']
            if begin % round_steps == 0:
                rounds.append(mean_row(round_rows))
                round_rows = []
    return rounds, timed


def mean_row(rows):
    """One row with the mean per step of consecutive rows. A missing time/outer counts as 0: there was no exchange."""
    if len(rows) == 1:
        return rows[0]
    mean = {'begin': rows[0]['begin'], 'step': rows[-1]['step']}
    numbers = {key for row in rows for key, value in row.items() if not isinstance(value, list)}
    for key in numbers - mean.keys():
        known = [row for row in rows if key in row or key == 'time/outer']  # other keys were not measured there
        average = statistics.harmonic_mean if key in ('tokens_per_sec', 'mfu') else statistics.fmean
        steps = [row['step'] - row['begin'] for row in known]
        mean[key] = average([row.get(key, 0) for row in known], weights=steps)
    return mean


def reference_of(label, baseline, measured):
    """The label of the run to compare with: the baseline if its MATHEMATICS keys are the same, else the first run with
    the same ones."""

    def mathematics(other):
        config = next(iter(measured[other].values())).config
        return [config.get(key) for key in MATHEMATICS]

    alike = [other for other in measured if mathematics(other) == mathematics(label)]
    return baseline if baseline in alike else alike[0]


def against(label, reference, measured):
    """The keys of a row that compare its losses with those of its reference, repeat by repeat."""
    if label == reference:
        return {'reference': reference}
    mine, theirs = measured[label], measured[reference]
    pairs = [(mine[repeat], theirs[repeat]) for repeat in mine if repeat in theirs]
    pairs = pairs or [(next(iter(mine.values())), next(iter(theirs.values())))]  # losses do not depend on repeats
    compared = {'reference': reference, 'apart': why_apart(*pairs[0]) or None}
    differences = [difference(a.rows, b.rows) for a, b in pairs]
    compared['loss_diff'] = max((one for one in differences if one is not None), default=None)
    return {key: value for key, value in compared.items() if value is not None}


def why_apart(run, reference):
    """Why a run may have other losses than its reference, or '' if it should not."""
    mine, theirs = run.config, reference.config
    if mine.get('dtype') != theirs.get('dtype'):
        return f'{mine.get("dtype")} against {theirs.get("dtype")}'
    drawn = [(one.about.get('world_size'), one.config.get('batch_size')) for one in (run, reference)]
    if mine.get('dropout') and drawn[0] != drawn[1]:
        return 'dropout draws by rank'
    keys = (*EXACT, 'num_replicas', 'inner_steps')
    same = [mine.get(key) for key in keys] == [theirs.get(key) for key in keys]
    return '' if same else outer_steps(mine) or outer_steps(theirs)


def outer_steps(config):
    """Why DiLoCo changes the losses, in words; '' if it only averages the parameters of one replica."""
    if 'outer_lr' not in config:
        return ''
    replicas, inner_steps = config['num_replicas'], config['inner_steps']
    if replicas == 1 and all(config.get(key, value) == value for key, value in EXACT.items()):
        return ''
    return f'DiLoCo, {replicas} replica(s), outer step every {inner_steps} steps'


def difference(rows, reference):
    """The largest relative difference of the loss over the steps that both logged; None if there is no such step."""
    theirs = {row['step']: row['loss'] for row in reference if 'loss' in row}
    pairs = [(row['loss'], theirs[row['step']]) for row in rows if 'loss' in row and row['step'] in theirs]
    if not pairs:
        return None
    relative = [abs(mine - other) / max(abs(other), 1e-30) for mine, other in pairs]
    return math.inf if any(map(math.isnan, relative)) else max(relative)


# --- PREDICTION -------------------------------------------------------------------------------------------------------


def predict(config, row, gpu_gb):
    """Keys of a row with planning's predictions, as far as they are possible: memory and traffic on this device, and
    memory on a GPU in bfloat16."""
    from planning import memory, sizes, traffic  # here, as it imports torch

    world_size = row['world_size']
    strategy = {'single': 'ddp', 'fsdp_manual': 'fsdp', 'parallel': 'fsdp'}.get(row['strategy'], row['strategy'])
    predicted = {}
    with contextlib.suppress(KeyError, TypeError, ValueError):  # the run has no config.json
        model = sizes.empty_model(config)
        gb = Counter()  # with offload, deepspeed has weights in both places
        for part, size in memory.memory_bytes(config, model, world_size, strategy).items():
            gb[part.removeprefix('host ')] += size / 1e9
        predicted['predicted'] = {f'{part}_gb': gb[part] for part in ('weights', 'gradients', 'optimizer')}
        predicted['predicted']['total_gb'] = sum(gb.values())
        if world_size > 1:
            every = min(config.get('inner_steps', 1), config['max_iters'])  # DiLoCo's last step also ends a round
            sent = traffic.communication_bytes({**config, 'inner_steps': every}, model, world_size, strategy)
            predicted['predicted_sent_gb'] = sent['sent'] / 1e9
        if gpu_gb:
            on_gpu = {**config, 'device': 'cuda', 'dtype': 'bfloat16'}
            parts = memory.memory_bytes(on_gpu, model, world_size, strategy)
            predicted['gpu_gb'] = sum(size for part, size in parts.items() if not part.startswith('host')) / 1e9
    return predicted
