"""
The runs of a comparison: strategies times the axes that each of them has, and the keys of each run.

    plan, notes = run_matrix.expand(config, train_keys, explicit)
    for repeat, entry in run_matrix.queue_of(plan['runs'], config): ...
"""

import importlib.util
import itertools
import re
import shlex
from pathlib import Path

from comparison import results
from configurator import find
from knobs import Mistake, checked, read_knobs
from layout import accumulation_steps
from system.files import ROOT, read_json

SCRIPTS = {'single': 'train_ddp.py', 'ddp': 'train_ddp.py', 'fsdp': 'train_fsdp.py', 'fsdp_manual': 'train_fsdp.py'}
SCRIPTS |= {
    'parallel': 'train_parallel.py',
    'deepspeed': 'train_deepspeed.py',
    'diloco': 'train_diloco.py',
    'pipeline': 'train_pipeline.py',
}
STAGES = {'fsdp': (2, 3), 'fsdp_manual': (1, 2, 3), 'parallel': (2, 3), 'deepspeed': (1, 2, 3)}
IMPLEMENTATIONS = {'fsdp': {'fsdp_impl': 'torch'}, 'fsdp_manual': {'fsdp_impl': 'manual'}}

# The model if neither a file nor the command line names one. A run of it takes some 10 seconds on 2 cores: 4 layers of
# width 128 = 0.8M parameters, and 2 x 2048 x 128 for the vocabulary. In fp32, so that agreement can be seen.
SMALL = {'arch': 'llama', 'n_layer': 4, 'n_head': 4, 'n_embd': 128, 'block_size': 128, 'batch_size': 4}
SMALL |= {'dtype': 'float32', 'max_iters': 50, 'learning_rate': 3e-3, 'warmup_iters': 5}
# If any of these is given, the small model is not used.
MODEL_KEYS = ('arch', 'heads', 'n_layer', 'n_head', 'n_embd', 'block_size', 'init_from')
QUIET = {'log_interval': 2, 'eval_interval': 0, 'eval_sequences': 80, 'checkpoint_interval': 0, 'keep_checkpoints': 0}
BENCH = {'dataset': 'synthetic', 'eval_sequences': 0, 'keep_checkpoints': 0, 'max_iters': 30, 'warmup_iters': 5}
BENCH |= {'log_interval': 2, 'global_batch_size': None, 'wandb_log': False, 'checkpoint_interval': 0}


def expand(config, train_keys, explicit=()):
    """
    (plan, notes): every run of a comparison, and lines that say what was left out.

    config: compare.py's keys. train_keys: keys of the train scripts, for all runs. explicit: keys from the command
    line, which also win over those that --bench sets. plan: {'baseline': label, 'runs': [{label, strategy, script,
    world_size, overrides}]}, where the overrides are the keys that the script is given. Raises ValueError for a
    comparison that cannot be run.
    """
    check(config)
    notes, runs = [], []
    for strategy in dict.fromkeys(config.strategies):
        combinations = axes(strategy, config)
        if not combinations:
            notes.append(f'{strategy} is left out: it has zero_stages={STAGES[strategy]} alone')
        runs += [(label, strategy, ranks, given) for ranks, given, label in combinations]
    for label, variant in config.variants.items():
        given = {key: value for key, value in variant.items() if key not in ('strategy', 'nproc')}
        strategy = variant.get('strategy', (config.strategies or ['ddp'])[0])
        runs.append((label, strategy, ranks_of(strategy, variant.get('nproc', config.nproc[0])), given))
    others = [run for run in runs if run[1] != 'deepspeed']
    if len(others) < len(runs) and not config.write_only and importlib.util.find_spec('deepspeed') is None:
        notes.append('deepspeed is left out: not installed (pip install -r requirements-deepspeed.txt)')
        runs = others
    if not runs:
        raise ValueError('; '.join([*notes, f'nothing to compare: expected some of --strategies={",".join(SCRIPTS)}']))
    labels = [label for label, *_ in runs]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ValueError(f'two runs have the label {twice[0]!r}: rename the one in variants')

    most_ranks = max([*config.nproc, *(variant.get('nproc', 1) for variant in config.variants.values())])
    entries = []
    for label, strategy, ranks, given in runs:
        try:
            keys = keys_of_run(strategy, ranks, given, config, train_keys, explicit, most_ranks)
        except (Mistake, ValueError) as error:
            raise ValueError(f'{label}: {error}') from None
        entry = {'label': label, 'strategy': strategy, 'script': SCRIPTS[strategy], 'world_size': ranks}
        entries.append({**entry, 'overrides': keys})
    used = {key for entry in entries for key in entry['overrides']} | {'out_dir'}
    if unused := sorted(set(train_keys) - used):
        notes.append(f'not a key of any of these runs: {", ".join(unused)}')
    return {'baseline': choose_baseline(config, labels, labels[0]), 'runs': entries}, notes


def ranks_of(strategy, nproc):
    return 1 if strategy == 'single' else nproc


def choose_baseline(config, labels, default):
    if config.baseline not in (None, *labels):
        raise ValueError(f'baseline={config.baseline!r} is no run of this comparison: use one of {", ".join(labels)}')
    return config.baseline or default


def check(config):
    """Raise ValueError for values of compare.py's keys that no run could have."""
    for key in ('variants', 'recipes', 'sizes'):
        for label, variant in getattr(config, key).items():
            if not re.fullmatch(r'[\w.+=-]+', str(label)) or not isinstance(variant, dict):
                raise ValueError(
                    f'{key}: {label!r}: expected a label of letters, digits and _ . + = - (it names a folder), and a '
                    f'dict of keys, given {variant!r}'
                )
    for strategy in (*config.strategies, *(variant.get('strategy', 'ddp') for variant in config.variants.values())):
        if strategy not in [*SCRIPTS]:
            raise ValueError(f'strategies={strategy}: expected some of {", ".join(SCRIPTS)}')
    ranks = [*config.nproc, *(variant['nproc'] for variant in config.variants.values() if 'nproc' in variant)]
    numbers = {'nproc': config.nproc and ranks, 'inner_steps': config.inner_steps, 'zero_stages': config.zero_stages}
    for key, values in numbers.items():  # the elements of lists may be of any type, and variants are of the user's
        if not values or any(type(value) is not int or value < 1 for value in values):
            raise ValueError(f'{key}={values}: expected whole numbers from 1 on, as in --{key}=2')
    try:
        shlex.split(config.launcher or '')
    except ValueError as error:
        raise ValueError(f'launcher={config.launcher}: {error}') from None


def axes(strategy, config):
    """[(ranks, keys, label)] of a strategy for all combinations of its axes; labels name axes with several values."""
    points = {  # key: (its name in a label, values)
        'nproc': ('{}ranks', [ranks_of(strategy, nproc) for nproc in config.nproc]),
        'zero_stage': ('zero{}', config.zero_stages if strategy in STAGES else []),
        'inner_steps': ('H{}', config.inner_steps if strategy == 'diloco' else []),
        'activation_checkpointing': ('checkpoint-{}', config.checkpointing),
        'dtype': ('{}', config.dtypes),
    }
    points = {key: (name, list(dict.fromkeys(values))) for key, (name, values) in points.items() if values}
    found = []
    for chosen in itertools.product(*(values for _, values in points.values())):
        keys = dict(zip(points, chosen, strict=True))
        if keys.get('zero_stage') in (None, *STAGES.get(strategy, ())):
            names = [name.format(keys[key]) for key, (name, values) in points.items() if len(values) > 1]
            found.append((keys.pop('nproc'), keys, '-'.join([strategy, *names])))
    return found


def keys_of_run(strategy, ranks, given, config, train_keys, explicit, most_ranks):
    """The keys that a run's script is given. Raises Mistake for a key that it does not have, ValueError for a batch
    that cannot be divided."""
    script = Path(ROOT) / SCRIPTS[strategy]
    knobs = read_knobs(script)
    given = {key: checked(value, find(key, knobs, script, key), key) for key, value in given.items()}

    is_small = not any(key in {**train_keys, **given} for key in MODEL_KEYS)
    data_dir = Path(train_keys.get('data_dir', 'data'))
    dataset = 'stdlib-bpe2048' if (data_dir / 'stdlib-bpe2048').is_dir() else 'synthetic'
    keys = {**QUIET, **(SMALL if is_small else {}), 'dataset': dataset, **train_keys}
    if config.bench:
        keys |= {key: value for key, value in BENCH.items() if key not in explicit}
    # Random tokens that replace a dataset have its vocabulary if that is known, or else GPT-2's, 50,304.
    name = re.split('[:,]', train_keys.get('dataset', 'stdlib-bpe2048'))[0]  # the first of a mixture
    replaced = data_dir / name / 'meta.json'
    if keys['dataset'] == 'synthetic' and replaced.exists():
        keys.setdefault('vocab_size', read_json(replaced, {'vocab_size': int})['vocab_size'])
    elif keys['dataset'] == 'synthetic' and 'dataset' not in train_keys and (is_small or not config.bench):
        keys.setdefault('vocab_size', 2048)  # of stdlib-bpe2048
    if keys['dataset'] == 'synthetic':  # random tokens are one source, without documents
        keys |= {key: value for key, value in (('dataset_stages', ()), ('windows', 'stream')) if key in keys}
    keys |= given | IMPLEMENTATIONS.get(strategy, {})
    keys.setdefault('num_replicas', ranks)  # DiLoCo: one per rank; the default, one per node, would be one here
    if config.resume_check and keys.get('max_iters', 0) < 2:
        raise ValueError('resume_check stops half-way: expected --max_iters=2 or more')
    if config.resume_check:  # rounded up: 2 of them; permanent, so that one saved at an interruption pushes none out
        keys |= dict.fromkeys(('checkpoint_interval', 'permanent_interval'), -(-keys['max_iters'] // 2))
        keys['keep_checkpoints'] = 2
    if config.trace:
        keys['trace_step'] = min(results.WARM_UP, keys.get('max_iters', results.WARM_UP))
    keys.setdefault('batch_size', 8)
    keys['global_batch_size'] = keys.get('global_batch_size') or keys['batch_size'] * most_ranks
    accumulation_steps(keys['global_batch_size'], keys['batch_size'], ranks)  # raises if it does not divide
    return {key: value for key, value in keys.items() if key in knobs and key != 'out_dir' and value is not None}


def queue_of(entries, config):
    """
    [(repeat, entry)] in the order in which they run. Each repeat begins with a different run, so that none is always
    first or last. With resume_check the first run of each strategy is repeated at the end, as the repeat 'resumed'.
    """
    queue, first_entries = [], {}
    for repeat in range(config.repeats):
        start = repeat % len(entries)
        queue += [(repeat, entry) for entry in entries[start:] + entries[:start]]
    for entry in entries:
        first_entries.setdefault(entry['strategy'], entry)
    return queue + [('resumed', entry) for entry in first_entries.values() if config.resume_check]
