"""
Two steps of every kind of run by the branches and the kernels that a GPU takes (on_cuda.py). Losses and gradients are
about as close to float64 as those of the same run by a CPU's branches.

The table of COMBINATIONS has 1,860 cells. The short suite runs some that have every pair of values, --full some that
have every three. LAYOUTS are runs beside the table, with several ranks or with layers that have kernels of their own.
"""

import itertools
import random

import pytest
import torch
from chats import write_rows
from launch import TINY_RUN, fork_script, run_many
from outputs import column
from precision import FLOOR, TIMES, error, times_further
from pretrained import save_model, write_chats
from router_weights import let_tokens_choose
from safetensors.torch import load_file, save_file
from short import covering, slow_but

AXES = {
    # model.py's own, a class, one with a sliding window, one that keeps its own attention (and caps its scores)
    'model': ['gpt', 'llama_64', 'mistral_64', 'gemma2_64'],
    'way': ['ddp', 'fsdp', 'manual', 'diloco', 'native'],
    'dtype': ['float32', 'bfloat16', 'float16'],
    'trained': ['all', 'lora', 'lora on bfloat16', 'lora on nf4'],
    'checkpointing': ['none', 'selective', 'full', 'offload'],
    'data': ['stream', 'documents', 'chats'],
}
WAYS = {
    'ddp': ('train_ddp.py', []),
    'fsdp': ('train_fsdp.py', []),
    'manual': ('train_fsdp.py', ['--fsdp_impl=manual']),
    'diloco': ('train_diloco.py', ['--inner_steps=2', '--num_replicas=1']),
    'native': ('train_ddp.py', ['--native=True']),
}
TRAINED = {
    'all': [],
    'lora': ['--lora_rank=4', '--frozen_dtype=float32'],
    'lora on bfloat16': ['--lora_rank=4', '--frozen_dtype=bfloat16'],
    'lora on nf4': ['--lora_rank=4', '--frozen_dtype=nf4'],
}
DATA = {
    'stream': ['--dataset=text'],
    'documents': ['--dataset=text', '--windows=documents'],
    'chats': ['--dataset=chats'],
}
EXPERTS = ['--arch=qwen3', '--n_experts=4', '--experts_per_token=2', '--expert_hidden_dim=32']
ODD_HEADS = ['--n_head=3', '--n_kv_head=1', '--head_dim=10', '--global_batch_size=6']
RING, MANUAL, PACKED = '--context_parallel=2', '--fsdp_impl=manual', '--windows=documents'
FSDP = '--strategy=fsdp'
PAIRS = ['--dataset=pairs', '--block_size=64']
REWARDS = ['--prompts=PROMPTS', '--prompts_per_step=4', '--num_generations=4']
TAUGHT = [*REWARDS, '--teacher=TEACHER', '--beta=0.5']
NF4 = ['--lora_rank=4', '--frozen_dtype=nf4']
LAYOUTS = {  # (model and keys of what is computed, ranks, script and keys of the layout)
    'ring': (['gpt'], 2, ['train_parallel.py', RING]),
    'ring, packed': (['llama_64', PACKED], 2, ['train_parallel.py', RING, MANUAL]),
    'scaled scores, packed': (['granite_64', PACKED], 1, ['train_ddp.py']),
    'scaled scores, ring, packed': (['granite_64', PACKED], 2, ['train_parallel.py', RING]),
    'ring, full': (['llama_64'], 2, ['train_parallel.py', RING, '--activation_checkpointing=full']),
    'gather, packed': (['gpt', PACKED], 2, ['train_parallel.py', RING, '--context_impl=gather']),
    'ddp on 2': (['llama_64', PACKED], 2, ['train_ddp.py']),
    'pipeline': (['gpt', PACKED], 2, ['train_pipeline.py', '--pipeline_stages=2', '--batch_size=1']),
    'experts': (['gpt', *EXPERTS], 1, ['train_ddp.py']),
    'experts, packed': (
        ['gpt', *EXPERTS, PACKED],
        2,
        ['train_fsdp.py', MANUAL, '--activation_checkpointing=selective'],
    ),
    'experts, parallel': (['gpt', *EXPERTS], 2, ['train_parallel.py', '--expert_parallel=2']),
    # slices of 3 ranks that end at no multiple of 16 bytes
    'experts, odd heads': (['gpt', *EXPERTS, *ODD_HEADS], 3, ['train_fsdp.py', MANUAL]),
    'mixtral': (['mixtral_64', PACKED], 1, ['train_ddp.py']),
    'mixtral, fsdp': (['mixtral_64'], 2, ['train_fsdp.py']),
    'float8': (['gpt', '--matmul_dtype=float8'], 1, ['train_ddp.py']),
    'preferences': (['llama_64', *PAIRS], 1, ['train_dpo.py']),
    'preferences, nf4': (['llama_64', *PAIRS, *NF4], 1, ['train_dpo.py', '--activation_checkpointing=full']),
    'preferences, native, manual': (['llama_64', *PAIRS, '--native=True'], 2, ['train_dpo.py', FSDP, MANUAL]),
    'rewards': (['llama_64', *REWARDS], 1, ['train_grpo.py']),
    'rewards, nf4': (['mistral_64', *REWARDS, *NF4], 2, ['train_grpo.py', FSDP]),
    'distillation': (['llama_64', *TAUGHT], 1, ['train_distill.py']),
    'distillation, nf4': (['mistral_64', *TAUGHT, '--teacher_dtype=nf4'], 2, ['train_distill.py', FSDP]),
    'rewards, native': (['llama_64', *REWARDS, '--native=True'], 2, ['train_grpo.py', FSDP, MANUAL, '--zero_stage=2']),
}
# Half precision has all kernels but one, which is the ring's: the short suite runs float32 there alone.
IN_DTYPES = [(name, dtype) for name in LAYOUTS for dtype in ('float32', 'bfloat16')]
SHORT_IN_DTYPES = [(name, dtype) for name, dtype in IN_DTYPES if dtype == 'bfloat16' or name == 'ring']
SCRATCH = '--arch=llama --n_layer=3 --n_head=4 --n_kv_head=2 --n_embd=64 --mlp_hidden_dim=128'.split()
STEPS = 2
RUN = [*TINY_RUN, '--block_size=48', '--batch_size=2', '--global_batch_size=4', f'--max_iters={STEPS}']
RUN += ['--num_epochs=None', '--eval_interval=0', '--eval_sequences=8', '--keep_checkpoints=0', '--warmup_iters=0']


def exists(model, way, dtype, trained, checkpointing, data):
    """Whether the scripts have this combination."""
    if model == 'gpt':
        return trained == 'all' and way != 'native' and data != 'chats'
    return not (way == 'native' and (trained != 'all' or model != 'llama_64'))


COMBINATIONS = [case for case in itertools.product(*AXES.values()) if exists(*case)]


def name_of(*case):
    return ', '.join(case)


SHORT = [name_of(*case) for case in covering(COMBINATIONS, 2)]
CASES = [*covering(COMBINATIONS, 2), *covering(COMBINATIONS, 3)]
CASES = [*dict.fromkeys(CASES)]


@pytest.fixture(scope='module')
def start_of(tmp_path_factory):
    """A function of a model's name and of keys: these, with those for its weights, and for a data_dir with text, chats
    and pairs."""
    folder = tmp_path_factory.mktemp('on_cuda')
    models = {model: save_model(folder / model, model) for model in [*AXES['model'][1:], 'granite_64', 'mixtral_64']}
    teacher = save_model(folder / 'teacher', 'llama_64', draw=1)
    weights = load_file(folder / 'mixtral_64' / 'model.safetensors')
    let_tokens_choose(weights, 2, embedding='model.embed_tokens.weight', router='gate.weight')
    save_file(weights, folder / 'mixtral_64' / 'model.safetensors', {'format': 'pt'})
    write_chats(folder / 'chats.jsonl')
    (folder / 'text').mkdir()
    letters = random.Random(0)
    for number in range(300):  # documents of 1 to 120 tokens: some are longer than a window
        words = bytes(letters.choices(b'abcd ', k=letters.randint(1, 120)))
        (folder / 'text' / f'{number:03}.txt').write_bytes(words)
    pairs = [(f'q{number}', 'g' * (1 + number % 7), 'b' * (1 + number % 5)) for number in range(60)]
    write_rows(
        folder / 'pairs.jsonl', [dict(zip(('prompt', 'chosen', 'rejected'), pair, strict=True)) for pair in pairs]
    )
    for dataset, *more in (['text'], ['chats.jsonl'], ['pairs.jsonl', '--pairs']):
        keys = [f'--dataset={folder / dataset}', f'--name={dataset.split(".")[0]}', f'--data_dir={folder}/data', *more]
        fork_script('prepare_data.py', *keys, f'--tokenizer={models["llama_64"]}', '--val_fraction=0.1')
    right = {'answer': [*'abcdefghijklmnop'], 'rule': 'contains', 'stop': [*'ABCDEFGH'], 'max_new_tokens': 8}
    write_rows(folder / 'prompts.jsonl', [{'prompt': f'{number}:', **right} for number in range(20)])

    def start_of(model, *keys):
        begin = SCRATCH if model == 'gpt' else [f'--init_from={models[model]}']
        keys = [key.replace('PROMPTS', f'{folder}/prompts.jsonl').replace('TEACHER', teacher) for key in keys]
        return [*RUN, *begin, f'--data_dir={folder}/data', *keys]

    return start_of


@pytest.fixture(scope='module')
def runs(start_of, tmp_path_factory, has_slow_tests):
    """A folder with the runs of the table, and what they held or how they failed."""
    folder, cases = tmp_path_factory.mktemp('runs'), {}

    def add(place, case):
        model, way, dtype, trained, checkpointing, data = case
        name, (script, keys) = f'{place}, {name_of(*case)}', WAYS[way]
        keys = [
            *start_of(model),
            *keys,
            *TRAINED[trained],
            *DATA[data],
            f'--dtype={dtype}',
            f'--out_dir={folder / name}',
        ]
        keys += [f'--activation_checkpointing={checkpointing}']
        options = {'on_cuda': place == 'on cuda', 'float64': place == 'float64', 'may_fail': True}
        options['gradients'] = f'{folder / name}.gradients'
        cases[name] = {'name': name, 'script': script, 'arguments': keys, **options}

    for case in CASES:
        if has_slow_tests or name_of(*case) in SHORT:
            for place, of_place in beside(*case).items():
                add(place, of_place)
    return folder, run_many([*cases.values()], 1, folder)


def beside(model, way, dtype, trained, checkpointing, data):
    """The three runs that are compared: checkpointing changes nothing, and in float64 no strategy does."""
    return {
        'on cuda': (model, way, dtype, trained, checkpointing, data),
        'on cpu': (model, way, dtype, trained, 'none', data),
        # native parameters have other names
        'float64': (model, way if way == 'native' else 'ddp', 'float32', trained, 'none', data),
    }


def floor_of(dtype):
    """The smallest error that a loss is taken to have: where one run is lucky, the other need not be (precision.py).

    In 16 bits it leaves the other one a single spacing of the numbers that both compute with: TIMES * eps / TIMES.
    """
    return FLOOR if dtype == 'float32' else torch.finfo(getattr(torch, dtype)).eps / TIMES


def assert_same_numbers(folder, names, dtype, fact='loss'):
    """Losses and gradients of three runs: by a GPU's branches, by a CPU's, in float64."""
    losses = [[float(loss) for loss in column(folder / name, fact)] for name in names]
    gradients = [torch.load(folder / f'{name}.gradients') for name in names]
    assert all(len(of_run) == STEPS for of_run in (*losses, *gradients))
    for step in range(STEPS):
        ours, cpus, exact = (of_run[step] for of_run in losses)
        factor = times_further(ours, cpus, exact, floor_of(dtype))
        assert factor <= TIMES, ('loss', step, factor, ours, cpus, exact)
        if step == 0:  # both may be wrong in the same way
            assert error(cpus, exact) <= TIMES * floor_of(dtype), ('loss of a CPU', cpus, exact)
        ours, cpus, exact = (of_run[step] for of_run in gradients)
        assert ours.keys() == cpus.keys() and (ours.keys() == exact.keys() or 'pipeline' in names[0])
        ours, cpus, exact = (torch.cat([of[name].flatten().double() for name in ours]) for of in (ours, cpus, exact))
        if dtype == 'float16' and not ours.isfinite().all():  # the first loss scale was too large for this step
            assert not cpus.isfinite().all()
            return  # it was skipped, in float64 it was not
        factor = times_further(ours, cpus, exact)
        assert factor <= TIMES, ('gradients', step, factor, error(ours, exact), error(cpus, exact))


@pytest.mark.parametrize(tuple(AXES), slow_but(SHORT, CASES, name_of))
def test_the_numbers_of_a_gpus_kernels_are_those_of_a_cpu(runs, model, way, dtype, trained, checkpointing, data):
    folder, held = runs
    compared = beside(model, way, dtype, trained, checkpointing, data)
    names = [f'{place}, {name_of(*case)}' for place, case in compared.items()]
    for name in names:
        assert 'error' not in held[name], held[name]['error']
    assert_same_numbers(folder, names, dtype)


@pytest.fixture(scope='module')
def layouts(start_of, tmp_path_factory, has_slow_tests):
    """A folder with the runs of LAYOUTS."""
    folder, of_ranks = tmp_path_factory.mktemp('layouts'), {}

    def add(name, ranks, script, model, *keys, **options):
        data = [] if script in ('train_grpo.py', 'train_distill.py') else DATA['stream']
        keys = [*start_of(model, *data, *keys), f'--out_dir={folder / name}']
        options['gradients'] = f'{folder / name}.gradients'
        of_ranks.setdefault(ranks, []).append({'name': name, 'script': script, 'arguments': keys, **options})

    for name, dtype in IN_DTYPES if has_slow_tests else SHORT_IN_DTYPES:
        computed, ranks, (script, *layout) = LAYOUTS[name]
        for place in ('on cuda', 'on cpu'):
            keys = [*computed, *layout, f'--dtype={dtype}']
            # In bfloat16 a near tie would end differently in each run: so all learn from the answers of the first.
            writes = script in ('train_grpo.py', 'train_distill.py')
            options = {'answers': f'{folder / name}.{dtype}.answers'} if writes else {}
            add(f'{place}, {name}, {dtype}', ranks, script, *keys, on_cuda=place == 'on cuda', **options)
        if name != 'float8':
            options |= {'float64': True}
            script = script if options.get('answers') or 'preferences' in name else 'train_ddp.py'
            add(f'float64, {name}, {dtype}', 1, script, *computed, '--dtype=float32', **options)
    for ranks, cases in of_ranks.items():
        run_many(cases, ranks, folder)
    return folder


@pytest.mark.parametrize(('name', 'dtype'), slow_but(SHORT_IN_DTYPES, IN_DTYPES, lambda *case: case))
def test_so_are_those_of_other_layouts_and_layers(layouts, name, dtype):
    ours, cpus = (f'{place}, {name}, {dtype}' for place in ('on cuda', 'on cpu'))
    if name == 'float8':  # no run in float64 has its roundings; each of the two may be TIMES as far from it
        found, expected = ([*column(layouts / run, 'loss')] for run in (ours, cpus))
        assert error(found, expected) <= 2 * TIMES * floor_of(dtype)
    else:
        # GRPO's loss is a small rest of large terms.
        fact = 'entropy' if 'rewards' in name else 'loss'
        assert_same_numbers(layouts, (ours, cpus, f'float64, {name}, {dtype}'), dtype, fact)
