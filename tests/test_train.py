"""The train scripts as users run them: every strategy and option gives the same numbers, and does what it should."""

import importlib.util
import json
import shutil

import pytest
from launch import TINY_MODEL, TINY_RUN, run_many, run_ranks
from outputs import column, metrics
from precision import apart, assert_same_run
from short import slow_but

MANUAL = ('--fsdp_impl=manual',)
BARE = ('--max_iters=3', '--keep_checkpoints=0', '--eval_sequences=0', '--trace_step=2', '--checkpoint_interval=1')
GLOBAL_BATCH = 12


def arguments(data_dir, out_dir, *more):
    """The arguments of a tiny fp32 run of 10 steps; `more` replace earlier ones."""
    run = [*TINY_MODEL, *TINY_RUN, f'--global_batch_size={GLOBAL_BATCH}', '--max_iters=10', '--dtype=float32']
    run += ['--lr_decay_iters=50', '--eval_interval=10']
    return [*run, '--dataset=tiny', f'--data_dir={data_dir}', f'--out_dir={out_dir}', *more]


def largest_difference(out_dir, reference, key='loss'):
    """Largest relative difference of a column of metrics.jsonl from that of a run that is as long, or longer."""
    ours, theirs = column(out_dir, key), column(reference, key)
    assert 0 < len(ours) <= len(theirs)
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=False))


def assert_agree(out_dir, reference, key='loss'):
    """Assert that a run equals another one, or the beginning of a longer one, whatever their layouts."""
    ours, theirs = column(out_dir, key), column(reference, key)
    assert_same_run(ours, theirs[: len(ours)], f'{key} of {out_dir.name}', 10 if key == 'val_loss' else 1)


# A train script that leaves the seeds with which it has drawn noise in out_dir/seeds_RANK.json.
WITH_SEEDS = """
import json, runpy, torch

seeds, manual_seed = [], torch.manual_seed
torch.manual_seed = lambda seed: seeds.append(seed) or manual_seed(seed)
try:
    globals().update(runpy.run_path({script!r}, run_name='__main__'))
finally:
    torch.manual_seed = manual_seed
with open(f'{{config.out_dir}}/seeds_{{rank}}.json', 'w') as file:
    json.dump(seeds, file)
"""
COMPLETEP = ('--arch=enoki', '--parametrization=completep', '--base_width=8', '--base_depth=2', '--eval_sequences=8')
SCALED = ('adamw', 'adana', 'muon')
OUTER_IS_INNER = ('--num_replicas=1', '--inner_steps=5', '--outer_lr=1', '--outer_momentum=0')
STILL = ('--max_iters=3', '--learning_rate=1e-50', '--eval_interval=1')  # Adam runs, but its updates are 0 in fp32


# The runs that the short suite starts: each strategy, and each mechanism under one of them.
SHORT = {'plain', 'enoki', 'fsdp1', 'still', 'scaled_muon', 'ddp2', 'fsdp2', 'manual'}
SHORT |= {f'scaled_muon_{name}' for name in ('ddp', 'fsdp', 'manual', 'diloco')}
SHORT |= {'ddp_micro1', 'sharded_accumulation', 'zero2', 'hsdp', 'offload', 'manual_stage1', 'selective', 'no_clip'}
SHORT |= {'fp16_manual', 'bare_fsdp', 'noise_fsdp'}
SHORT |= {'count_ddp', 'count_fsdp', 'count_sharded', 'count_zero2', 'count_hsdp', 'own_manual'}


def start(cases, nproc, runs, has_slow_tests):
    return run_many([one for one in cases if has_slow_tests or one['name'] in SHORT], nproc, runs)


def case(name, script, data_dir, runs, *more, **options):
    return {'name': name, 'script': script, 'arguments': arguments(data_dir, runs / name, *more), **options}


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """Folder of all runs of this module, one folder each."""
    return tmp_path_factory.mktemp('runs')


def with_seeds(folder, script):
    (folder / f'seeds_of_{script}').write_text(WITH_SEEDS.format(script=script))
    return f'{folder}/seeds_of_{script}'


NOISE = {'ddp': ['--dropout=0.5'], 'fsdp': ['--dropout=0.5'], 'diloco': ['--dropout=0.5', '--inner_steps=3']}
NOISE |= {'deepspeed': ['--dropout=0.5', '--zero_stage=2']} if importlib.util.find_spec('deepspeed') else {}


@pytest.fixture(scope='module')
def one_process(data_dir, runs, has_slow_tests):
    """The runs in one process with which the others are compared, 50 steps of the first; returns what they held."""
    cases = [case('plain', 'train_ddp.py', data_dir, runs, '--max_iters=50')]
    cases.append(case('enoki', 'train_ddp.py', data_dir, runs, '--arch=enoki'))
    for optimizer in SCALED:
        cases.append(
            case(f'scaled_{optimizer}', 'train_ddp.py', data_dir, runs, *COMPLETEP, f'--optimizer={optimizer}')
        )
    cases.append(case('fsdp1', 'train_fsdp.py', data_dir, runs, '--max_iters=20'))
    cases.append(case('still', 'train_ddp.py', data_dir, runs, *STILL))
    return start(cases, 1, runs, has_slow_tests)


@pytest.fixture(scope='module')
def two_ranks(data_dir, runs, one_process, has_slow_tests):
    """Every option on two ranks, in processes started once."""
    longer = ('--max_iters=20',)
    few = ('--max_iters=2',)  # counting collectives costs time: two steps show it
    cases = [
        case('ddp2', 'train_ddp.py', data_dir, runs, *longer, profiles=True),
        case('fsdp2', 'train_fsdp.py', data_dir, runs, *longer, profiles=True),
        *(
            case(f'scaled_{optimizer}_{name}', script, data_dir, runs, *COMPLETEP, f'--optimizer={optimizer}', *more)
            for optimizer in SCALED
            for name, script, more in (
                ('ddp', 'train_ddp.py', ()),
                ('fsdp', 'train_fsdp.py', ()),
                ('manual', 'train_fsdp.py', MANUAL),
                ('diloco', 'train_diloco.py', OUTER_IS_INNER),
            )
        ),
        case('ddp_micro1', 'train_ddp.py', data_dir, runs, '--batch_size=1'),
        case('ddp_micro6', 'train_ddp.py', data_dir, runs, '--batch_size=6'),
        case('sharded_accumulation', 'train_fsdp.py', data_dir, runs, '--accumulate=sharded'),
        case('zero2', 'train_fsdp.py', data_dir, runs, '--zero_stage=2'),
        case('hsdp', 'train_fsdp.py', data_dir, runs, '--replicate_size=2'),
        case('offload', 'train_fsdp.py', data_dir, runs, '--cpu_offload=params'),
        case('offload_optimizer', 'train_fsdp.py', data_dir, runs, '--cpu_offload=optimizer'),
        case('units_of_2', 'train_fsdp.py', data_dir, runs, '--blocks_per_unit=2'),
        case('manual', 'train_fsdp.py', data_dir, runs, *MANUAL, *longer, profiles=True),
        case('manual_stage1', 'train_fsdp.py', data_dir, runs, *MANUAL, '--zero_stage=1', '--blocks_per_unit=2'),
        case('manual_offload', 'train_fsdp.py', data_dir, runs, *MANUAL, '--cpu_offload=params', '--prefetch=2'),
        case('manual_offload_optimizer', 'train_fsdp.py', data_dir, runs, *MANUAL, '--cpu_offload=optimizer'),
        case('bf16_manual', 'train_fsdp.py', data_dir, runs, *MANUAL, '--dtype=bfloat16'),
        case('fp16_manual', 'train_fsdp.py', data_dir, runs, *MANUAL, '--dtype=float16'),
        case('full', 'train_fsdp.py', data_dir, runs, '--activation_checkpointing=full'),
        case('selective', 'train_fsdp.py', data_dir, runs, '--activation_checkpointing=selective'),
        case('offload_inputs', 'train_fsdp.py', data_dir, runs, '--activation_checkpointing=offload'),
        case('selective_ddp', 'train_ddp.py', data_dir, runs, '--activation_checkpointing=selective'),
        case('deterministic', 'train_fsdp.py', data_dir, runs, '--deterministic'),
        case('no_clip', 'train_ddp.py', data_dir, runs, '--grad_clip=0', '--optimizer=adamw'),
        case('async', 'train_fsdp.py', data_dir, runs, '--async_checkpoint', '--checkpoint_interval=5'),
        case('bf16_ddp', 'train_ddp.py', data_dir, runs, '--dtype=bfloat16'),
        case('bf16_fsdp', 'train_fsdp.py', data_dir, runs, '--dtype=bfloat16'),
        case('fp16_ddp', 'train_ddp.py', data_dir, runs, '--dtype=float16'),
        case('fp16_fsdp', 'train_fsdp.py', data_dir, runs, '--dtype=float16'),
        case('bare_ddp', 'train_ddp.py', data_dir, runs, *BARE),
        case('bare_fsdp', 'train_fsdp.py', data_dir, runs, *BARE),
        case('bare_diloco', 'train_diloco.py', data_dir, runs, *BARE, '--inner_steps=3'),
        *(
            case(f'noise_{strategy}', with_seeds(runs, f'train_{strategy}.py'), data_dir, runs, *STILL, *more)
            for strategy, more in NOISE.items()
        ),
        case('count_ddp', 'train_ddp.py', data_dir, runs, *few, watch=True),
        case('count_fsdp', 'train_fsdp.py', data_dir, runs, *few, watch=True),
        case('count_sharded', 'train_fsdp.py', data_dir, runs, *few, '--accumulate=sharded', watch=True),
        case('count_zero2', 'train_fsdp.py', data_dir, runs, *few, '--zero_stage=2', watch=True),
        case('count_hsdp', 'train_fsdp.py', data_dir, runs, *few, '--replicate_size=2', watch=True),
    ]
    own = (f'--init_from={runs / "plain"}', '--max_iters=1', '--learning_rate=1e-9', '--optimizer=ademamix')
    cases.append(case('own_manual', 'train_fsdp.py', data_dir, runs, *MANUAL, *own))
    cases.append(case('own_diloco', 'train_diloco.py', data_dir, runs, *own, '--inner_steps=1'))
    if shutil.which('c++') or shutil.which('g++'):  # last: once the compiler is in the processes, it stays
        cases.append(
            case('compile', 'train_fsdp.py', data_dir, runs, '--compile', '--activation_checkpointing=selective')
        )
        cases.append(case('compile_manual', 'train_fsdp.py', data_dir, runs, '--compile', *MANUAL))
    return start(cases, 2, runs, has_slow_tests)


def test_ddp_and_fsdp_on_two_ranks_give_the_loss_curve_of_one_process(runs, two_ranks):
    for name in ('ddp2', 'fsdp2', 'fsdp1', 'manual'):
        assert_agree(runs / name, runs / 'plain')
        assert_agree(runs / name, runs / 'plain', 'val_loss')
        assert largest_difference(runs / name, runs / 'plain', 'grad_norm') <= 1e-4, (
            name
        )  # queries near 0 are normalized


@pytest.mark.parametrize('optimizer', slow_but(SHORT, SCALED, 'scaled_{}'.format))
def test_completep_is_the_same_under_every_strategy_and_another_run_than_standard(runs, two_ranks, optimizer):
    reference = runs / f'scaled_{optimizer}'
    for name in ('ddp', 'fsdp', 'manual', 'diloco'):
        assert_agree(runs / f'scaled_{optimizer}_{name}', reference)
    assert largest_difference(runs / 'enoki', reference) > 1e-3


@pytest.mark.parametrize('strategy', slow_but(SHORT, NOISE, 'noise_{}'.format))
def test_dropout_is_for_training_alone_and_draws_anew_on_each_rank_in_each_step(runs, two_ranks, strategy):
    out_dir = runs / f'noise_{strategy}'
    assert len(column(out_dir, 'val_loss')) == 3 and largest_difference(out_dir, runs / 'still', 'val_loss') <= apart()
    for ours, without in zip(column(out_dir, 'loss'), column(runs / 'still', 'loss'), strict=True):
        assert abs(ours / without - 1) > 1e-3
    seeds = [json.loads((out_dir / f'seeds_{rank}.json').read_text()) for rank in range(2)]
    drawn = [seed for of_rank in seeds for seed in of_rank]
    assert [len(of_rank) for of_rank in seeds] == [3, 3] and len(set(drawn)) == 6


def test_a_step_of_a_run_is_profiled_under_every_strategy(runs, two_ranks):
    for name in ('ddp2', 'fsdp2', 'manual'):
        profiled = [row for row in metrics(runs / name) if 'time/comm' in row]
        assert profiled and all(row['time/comm'] > 0 for row in profiled), name


def test_the_loss_falls(runs, one_process):
    losses = column(runs / 'plain', 'loss')
    assert losses[0] > 5.0 and losses[-1] < 3.5  # ln 257 = 5.55; bytes of source code fall quickly


@pytest.mark.parametrize(
    'option',
    slow_but(
        SHORT,
        [
            'ddp_micro1',
            'ddp_micro6',
            'sharded_accumulation',
            'zero2',
            'hsdp',
            'offload',
            'offload_optimizer',
            'units_of_2',
            'manual_stage1',
            'manual_offload',
            'manual_offload_optimizer',
            'full',
            'selective',
            'offload_inputs',
            'selective_ddp',
            'async',
            'deterministic',
        ],
    ),
)
def test_an_option_changes_no_number(runs, two_ranks, option):
    assert_agree(runs / option, runs / 'plain')
    assert_agree(runs / option, runs / 'plain', 'val_loss')


@pytest.mark.parametrize('script', slow_but(SHORT, ['own_manual', 'own_diloco']))
def test_a_new_run_begins_with_the_weights_of_another(runs, two_ranks, script):
    """It has a new optimizer, and its only step is too small to be seen."""
    (before, after), (*_, theirs) = column(runs / script, 'val_loss'), column(runs / 'plain', 'val_loss')
    assert before == pytest.approx(theirs, rel=apart()) and after == pytest.approx(theirs, rel=apart())
    assert len(column(runs / script, 'loss')) == 1


def test_a_new_run_refuses_weights_that_know_the_tokens_of_another_tokenizer(runs, one_process, data_dir, tmp_path):
    shutil.copytree(data_dir / 'tiny', tmp_path / 'other')
    meta = (tmp_path / 'other' / 'meta.json').read_text()
    assert '"name": "bytes"' in meta
    (tmp_path / 'other' / 'meta.json').write_text(meta.replace('"name": "bytes"', '"name": "letters"'))
    keys = [
        f'--init_from={runs / "plain"}',
        f'--data_dir={tmp_path}',
        '--dataset=other',
        f'--out_dir={tmp_path / "run"}',
    ]
    (rank,) = run_ranks([['train_ddp.py', *keys]])
    assert rank.returncode == 1 and rank.stderr.count('\n') == 1, rank.stderr
    assert f'--tokenizer={runs / "plain"}`' in rank.stderr and not (tmp_path / 'run').exists()


@pytest.mark.parametrize('script', slow_but(SHORT, ['ddp', 'fsdp', 'diloco'], 'bare_{}'.format))
def test_a_run_without_checkpoints_and_evaluations_leaves_none_and_traces_the_step_asked_for(runs, two_ranks, script):
    out_dir = runs / f'bare_{script}'
    assert not list((out_dir / 'checkpoints').iterdir()) and (out_dir / 'DONE').exists()
    assert len(column(out_dir, 'loss')) == 3 and column(out_dir, 'val_loss') == []
    assert ['time/comm' in row for row in metrics(out_dir)] == [False, True, False]  # the traced step is a profiled one
    for rank in range(2):
        events = json.loads((out_dir / f'trace_rank{rank}.json').read_text())['traceEvents']
        names = {event.get('name', '') for event in events}
        assert {'aten::mm', 'aten::addmm'} & names and any('backward' in name.lower() for name in names)
        assert any(name.startswith('gloo:') for name in names)
    assert not (runs / 'ddp2' / 'trace_rank0.json').exists()


def test_without_replicas_the_shards_need_no_process_group_of_their_own(two_ranks):
    for name in ('fsdp2', 'manual'):
        assert two_ranks[name]['process_groups'] == two_ranks['ddp2']['process_groups']
    assert two_ranks['hsdp']['process_groups'] > two_ranks['ddp2']['process_groups']


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which('c++') or shutil.which('g++')), reason='torch.compile needs a C++ compiler')
def test_compiled_blocks_change_no_number_and_are_compiled(runs, two_ranks):
    for name in ('compile', 'compile_manual'):
        assert_agree(runs / name, runs / 'plain')
    assert two_ranks['compile']['compiled_graphs'] > 0 == two_ranks['count_hsdp']['compiled_graphs']


@pytest.mark.parametrize(
    'dtype', slow_but(SHORT, ['bf16_ddp', 'bf16_fsdp', 'bf16_manual', 'fp16_ddp', 'fp16_fsdp', 'fp16_manual'])
)
def test_half_precision_follows_fp32(runs, two_ranks, dtype):
    assert 0 < largest_difference(runs / dtype, runs / 'plain') <= 2e-3


@pytest.mark.slow
def test_fp16_scales_the_loss_alike_on_all_ranks(two_ranks):
    assert two_ranks['fp16_fsdp']['scale'] == two_ranks['fp16_ddp']['scale'] > 1
    assert two_ranks['fsdp2']['scale'] is None


def test_clipping_uses_the_norm_over_all_shards(runs, two_ranks):
    norms = column(runs / 'fsdp2', 'grad_norm')
    assert max(norms) > 1.0  # it does clip in these runs
    assert largest_difference(runs / 'fsdp2', runs / 'ddp2', 'grad_norm') <= 1e-4
    assert largest_difference(runs / 'no_clip', runs / 'plain') > 1e-4  # and clipping matters


def test_sharding_divides_what_a_rank_holds(one_process, two_ranks):
    whole = one_process['plain']
    for name in ('fsdp2', 'zero2', 'sharded_accumulation', 'offload', 'manual', 'manual_stage1'):
        for key in ('parameter_bytes', 'optimizer_bytes'):
            assert two_ranks[name][key] == pytest.approx(whole[key] / 2, rel=0.02), (name, key)
    for name in ('ddp2', 'hsdp'):  # two replicas of one shard each: whole on both ranks
        assert two_ranks[name]['parameter_bytes'] == whole['parameter_bytes']


def collectives(results, name, kind):
    return results[name]['collectives'].get(kind, 0)


def test_collectives_are_those_that_the_option_is_for(two_ranks):
    """3 blocks and the root are 4 units, 12 sequences / (2 x 2 ranks) are 3 micro-steps; there are 2 steps and 6 eval
    batches."""
    blocks, micro_steps, steps, eval_batches = 3, 3, 2, 6
    units = blocks + 1
    reduces = {name: collectives(two_ranks, name, '_reduce_scatter_base_') for name in two_ranks}
    gathers = {name: collectives(two_ranks, name, '_allgather_base_') for name in two_ranks}
    assert reduces['count_fsdp'] == units * steps  # only the last micro-step of each step reduces
    assert reduces['count_sharded'] == units * steps * micro_steps
    assert reduces['count_ddp'] == gathers['count_ddp'] == 0
    # Stage 3 gathers the blocks for forward and again for backward, and in each batch of an evaluation. The root stays
    # whole for a step, and for an evaluation.
    assert gathers['count_fsdp'] == (2 * blocks * micro_steps + 1) * steps + blocks * eval_batches + 1
    # Stage 2 keeps the blocks until backward, or the evaluation, ends.
    assert gathers['count_zero2'] == (blocks * micro_steps + 1) * steps + units
    # HSDP averages each unit's gradient over the replicas. Two shards need a sum for the norm, one shard does not.
    extra = collectives(two_ranks, 'count_hsdp', 'allreduce_') - collectives(two_ranks, 'count_fsdp', 'allreduce_')
    assert extra >= units * steps - steps
