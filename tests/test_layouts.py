"""Every layout goes on with what any other layout has saved, and holds the same bits: the whole matrix of layouts.

One run goes through all layouts, one step in each, and then through all once more. In the second turn each layout loads
what every layout has saved in the first turn, and saves it again. Replicas of DiLoCo learn other weights, so they train
in runs of their own; but they too load and save again what all others have saved, and the others what they have saved.

The same is done for layouts of a mixture of experts, with moments in fp32, bfloat16 and int8. The short suite has the
matrix of fewer layouts: two for each number of ranks, which together have every kind of parallelism.
"""

import collections
import itertools

import pytest
import torch
from launch import TINY_MODEL, TINY_RUN, run_many
from outputs import checkpoint_of, column, metrics, tensors_of
from precision import MARGIN, apart, assert_same_run
from router_weights import first_weights
from short import slow_but

from runtime import checkpoint

LAYOUTS = {  # name: (ranks, script, keys), by ranks; a step is 8 sequences
    'one process': (1, 'train_ddp.py', []),
    'ddp': (2, 'train_ddp.py', []),
    'fsdp': (2, 'train_fsdp.py', []),
    'fsdp by hand': (2, 'train_fsdp.py', ['--fsdp_impl=manual']),
    'zero 1': (2, 'train_fsdp.py', ['--fsdp_impl=manual', '--zero_stage=1']),
    'cp 2': (2, 'train_parallel.py', ['--context_parallel=2']),
    'tp 2': (2, 'train_parallel.py', ['--tensor_parallel=2']),
    'pp 2': (2, 'train_pipeline.py', []),
    'pp 2, 2 chunks': (2, 'train_pipeline.py', ['--pipeline_chunks=2']),
    'hsdp': (4, 'train_fsdp.py', ['--replicate_size=2']),
    'cp 4': (4, 'train_parallel.py', ['--context_parallel=4', '--context_impl=gather', '--fsdp_impl=manual']),
    'dp 2 x cp 2': (4, 'train_parallel.py', ['--context_parallel=2', '--replicate_size=2']),
    'dp 2 x tp 2': (4, 'train_parallel.py', ['--tensor_parallel=2', '--fsdp_impl=manual']),
    'pp 4': (4, 'train_pipeline.py', []),
    'dp 2 x pp 2': (4, 'train_pipeline.py', ['--pipeline_stages=2']),
    'tp 2 x pp 2': (4, 'train_pipeline.py', ['--tensor_parallel=2', '--pipeline_chunks=2']),
}
REPLICAS = {  # replicas x ranks of each
    'diloco 2 x 1': (2, 'train_diloco.py', ['--num_replicas=2', '--inner_steps=1']),
    'diloco 2 x 2': (4, 'train_diloco.py', ['--num_replicas=2', '--inner_steps=1', '--fsdp_impl=manual']),
}
ALL = dict(sorted({**LAYOUTS, **REPLICAS}.items(), key=lambda item: item[1][0]))  # by ranks, as they are
SHORT = ['one process', 'fsdp by hand', 'pp 2, 2 chunks', 'dp 2 x cp 2', 'dp 2 x tp 2', 'diloco 2 x 2']
MIXTURES = {
    'one process': (1, 'train_ddp.py', []),
    'ep 2': (2, 'train_parallel.py', ['--expert_parallel=2']),
    'hsdp x ep 2': (4, 'train_parallel.py', ['--expert_parallel=2', '--replicate_size=2', '--fsdp_impl=manual']),
    'diloco 2 x ep 2': (4, 'train_diloco.py', ['--num_replicas=2', '--inner_steps=1', '--expert_parallel=2']),
}
STEPS = 2 * len(LAYOUTS)
RUN = [*TINY_MODEL, *TINY_RUN, '--dataset=tiny', '--batch_size=1', '--global_batch_size=8', '--dtype=float32']
RUN += ['--arch=llama', '--n_layer=4', '--n_head=4', '--n_kv_head=2', '--tie_embeddings', f'--lr_decay_iters={STEPS}']
RUN += ['--eval_interval=5', '--eval_sequences=12', '--checkpoint_interval=1', f'--keep_checkpoints={STEPS}']
RUN += ['--windows=documents']  # where documents begin is known to evaluations, too
# A matrix of experts has 8 x 24 x 40 numbers. int8 is for 4096 and more: for the whole matrix, and not for half of it.
EXPERTS = [*RUN, '--arch=qwen3', '--n_layer=2', '--n_experts=8', '--expert_hidden_dim=24', '--router_aux=1']
EXPERTS += ['--windows=stream', '--tie_embeddings=False']
EXPERTS += ['--learning_rate=1e-3']  # with first_weights() no choice comes near a tie
FAMILIES = {'dense': (ALL, RUN), 'experts': (MIXTURES, EXPERTS)}
FAMILIES |= {name: (MIXTURES, [*EXPERTS, f'--optimizer_dtype={name}']) for name in ('bfloat16', 'int8')}
WITH_TENSOR = ['one process', 'dp 2 x tp 2', 'tp 2 x pp 2']
FAMILIES |= {'muon': ({name: ALL[name] for name in WITH_TENSOR}, [*RUN, '--optimizer=muon'])}
IN_FP32 = ['dense', 'experts']


def is_of_replicas(name):
    return name.startswith('diloco')


def steps_of(layouts, name):
    """The steps after which one of the layouts saves, in the first turn and in the second."""
    if is_of_replicas(name):
        return 1, 2
    in_turn = [layout for layout in layouts if not is_of_replicas(layout)]
    step = in_turn.index(name) + 1
    return step, 2 * len(in_turn) + 1 - step


def run_of(name):
    return name if is_of_replicas(name) else 'changes'


@pytest.fixture(scope='module')
def family(request):
    return request.param


@pytest.fixture(scope='module')
def layouts(family, has_slow_tests):
    return SHORT if family == 'dense' and not has_slow_tests else list(FAMILIES[family][0])


RUNS = {}  # {family: its folder}: pytest may come back to a family, and must not start its runs again


@pytest.fixture
def runs(data_dir, tmp_path_factory, family, layouts):
    """A folder with `whole`, the run in one process; `changes`, the run that goes through all layouts; the runs of
    replicas; and `WRITER to READER`, what each has loaded and saved again."""
    if family in RUNS:
        return RUNS[family]
    folder, (found, run) = tmp_path_factory.mktemp('runs'), FAMILIES[family]
    start = {}
    if found is MIXTURES:
        start = {'start': str(folder / 'start')}
        torch.save(first_weights(run), start['start'])

    def case(name, steps, out, **options):
        keys = [*run, *found[name][2], f'--max_iters={steps}', f'--data_dir={data_dir}', f'--out_dir={folder / out}']
        return {'name': f'{out} {name} {steps}', 'script': found[name][1], 'arguments': keys, **start, **options}

    def copies(reader):
        first = {name: checkpoint_of(folder / run_of(name), steps_of(layouts, name)[0]) for name in layouts}
        return {str(path): str(folder / f'{name} to {reader}') for name, path in first.items()}

    there, back = [], []
    for name in layouts:
        first, second = steps_of(layouts, name)
        there.append((name, case(name, first, run_of(name))))
        back.append((name, case(name, second, run_of(name), save_again=copies(name))))
    _, last = steps_of(layouts, 'one process')
    cases = [('one process', case('one process', last, 'whole')), *there, *reversed(back)]
    for nproc, group in itertools.groupby(cases, lambda one: found[one[0]][0]):
        for name, held in run_many([one for _, one in group], nproc, folder).items():
            assert not start or held['gap'] > MARGIN, name
    RUNS[family] = folder
    return folder


@pytest.mark.parametrize('family', IN_FP32, indirect=True)
def test_a_run_that_changes_its_layout_at_each_step_is_the_run_of_one_process(runs, layouts):
    ours, alone = metrics(runs / 'changes'), metrics(runs / 'whole')
    _, last = steps_of(layouts, 'one process')
    assert [row['step'] for row in ours] == [row['step'] for row in alone] == list(range(1, last + 1))
    # Even in one process another batch_size changes a later norm by 1e-4, since some queries of this model are near 0.
    for key, steps in (('tokens', last), ('lr', last), ('loss', last), ('grad_norm', last // 2)):
        found, expected = (column(runs / out, key)[:steps] for out in ('changes', 'whole'))
        assert len(found) == steps
        assert_same_run(found, expected, key)
    of_whole = {row['step']: row['val_loss'] for row in alone if 'val_loss' in row}
    for row in ours:  # a run evaluates at its last step, too, which all of these are
        assert row['val_loss'] == pytest.approx(of_whole.get(row['step'], row['val_loss']), rel=apart(row['step']))


def as_read_by(reader, written):
    """What `reader` saves after it has loaded `written`. Replicas begin as equals, without momentum; other layouts keep
    only what replica 0 has."""
    common = {key: tensor for key, tensor in written.items() if key.startswith(('model.', 'optim.'))}
    if not is_of_replicas(reader):
        return common
    if written.keys() > common.keys():
        return written
    weights = {key.removeprefix('model.'): tensor for key, tensor in common.items() if key.startswith('model.')}
    loads = {name: weights.pop(name) for name in [*weights] if name.endswith('load')}  # each replica has its own
    second = {f'replica1.{key}': tensor for key, tensor in common.items() if key.startswith('optim.')}
    momentum = {f'outer.{name}.momentum': torch.zeros_like(tensor) for name, tensor in weights.items()}
    loads = {f'replica{number}.model.{name}': load for name, load in loads.items() for number in range(2)}
    return {**common, **second, **momentum, **loads}


@pytest.mark.parametrize('family', slow_but(IN_FP32, FAMILIES), indirect=True)
def test_what_one_layout_has_saved_every_other_loads_and_saves_again_bit_for_bit(runs, layouts):
    for writer in layouts:
        step = steps_of(layouts, writer)[0]
        path = checkpoint_of(runs / run_of(writer), step)
        written, state = tensors_of(path), checkpoint.read_state(path)
        slots = collections.Counter(
            'model' if key.startswith('model.') else key.rpartition('.')[2]
            for key in as_read_by('one process', written)
            if not key.endswith('router.load')
        )
        assert slots['exp_avg'] == slots['exp_avg_sq'] == slots['step'] > 0
        assert slots['exp_avg'] + slots['momentum_buffer'] == slots['model'] >= 20, slots
        assert (slots['momentum_buffer'] > 0) == (RUNS.get('muon') == runs)
        for reader in layouts:
            path = checkpoint_of(runs / f'{writer} to {reader}', step)
            again, expected = tensors_of(path), as_read_by(reader, written)
            assert again.keys() == expected.keys()
            for key, tensor in expected.items():
                assert torch.equal(again[key], tensor), f'{key} of {writer} in {reader}'
            assert checkpoint.read_state(path) == state


@pytest.mark.parametrize('family', IN_FP32, indirect=True)
def test_before_each_other_save_the_weights_were_others(runs, layouts):
    """Otherwise the test above could not fail."""
    _, last = steps_of(layouts, 'one process')
    steps = [tensors_of(checkpoint_of(runs / 'changes', step)) for step in range(1, last + 1)]
    for before, after in itertools.pairwise(steps):
        same = [key for key in before if torch.equal(before[key], after[key])]
        assert same == [], same


EXPORTED = [('dense', 'cp 2'), ('dense', 'pp 2, 2 chunks'), ('dense', 'dp 2 x pp 2'), ('experts', 'hsdp x ep 2')]


@pytest.mark.parametrize(
    ('family', 'layout'), slow_but([*SHORT, *MIXTURES], EXPORTED, lambda *case: case[1]), indirect=['family']
)
def test_exports_and_samples_are_those_of_one_process(runs, data_dir, tmp_path, run_here, layout):
    samples, files = [], []
    keys = ['--device=cpu', '--dtype=float32', '--num_samples=1', '--max_new_tokens=20', '--prompt=def ']
    for name in ('one process', layout):
        out_dir = runs / f'one process to {name}'
        run_here('export_model.py', f'--data_dir={data_dir}', f'--out_dir={out_dir}', f'--to={tmp_path / name}')
        files.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
        samples.append(run_here('sample.py', f'--data_dir={data_dir}', f'--out_dir={out_dir}', *keys)[0])
    assert files[0] == files[1] and 'model.safetensors' in files[0]
    assert samples[0] == samples[1] and len(samples[0]) > 20
