"""Models of transformers in a pool, whole and with LoRA: beside collectives, with jobs that join, with another base."""

import shutil

import pytest
from launch import TINY_RUN, Job, refusals, run_forked
from outputs import column, metrics, weights_of
from pool_jobs import assert_counted_once, journal
from precision import apart, assert_same_run
from prepared import prepare
from pretrained import save_model, write_chats

H, STEPS, BATCH = 4, 14, 12  # the last round has 2 steps
RUN = [*TINY_RUN, '--dtype=float32', '--dataset=synthetic', '--block_size=32', f'--global_batch_size={BATCH}']
RUN += ['--batch_size=1', f'--max_iters={STEPS}', f'--inner_steps={H}', '--eval_interval=4', '--checkpoint_interval=8']
RUN += ['--outer_momentum=0.6', '--num_replicas=2', '--warmup_iters=0']
LORA = ['--lora_rank=4', '--learning_rate=1e-2']  # 4 rows on 3 ranks: the last one has none


@pytest.fixture(scope='module')
def models(tmp_path_factory):
    """A Llama, a GPT-2, and the same Llama with one other number."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp('models')
    for kind in ('llama', 'gpt2'):
        save_model(folder / kind, kind)
    shutil.copytree(folder / 'llama', folder / 'other')
    weights = stored(folder / 'llama')
    weights['model.layers.1.mlp.up_proj.weight'][3, 5] *= 1.5
    save_file(weights, folder / 'other' / 'model.safetensors', {'format': 'pt'})
    return folder


def arguments(model, out_dir, *more):
    return [*RUN, f'--init_from={model}', f'--out_dir={out_dir}', *more]


def start(model, folder, name, *more, nproc=1, fault=None):
    keys = arguments(model, folder / name, f'--exchange={folder / "pool"}', *more)
    return Job('train_pool.py', keys, nproc, folder / f'{name}.log', fault)


def finish(job):
    assert set(job.wait(600)) == {0}, job.text()


def stored(model):
    from safetensors.torch import load_file

    return load_file(model / 'model.safetensors')


@pytest.mark.slow
@pytest.mark.parametrize(
    'kind, ranks, more',
    [
        ('llama', [1, 1], []),
        ('llama', [2, 2], ['--fsdp_impl=manual']),
        ('llama', [1, 1], [*LORA, '--optimizer=muon']),
        ('gpt2', [2, 2], LORA),
        ('llama', [3, 2], [*LORA, '--fsdp_impl=manual']),
        ('gpt2', [1, 1], ['--native=True']),
    ],
    ids=['whole 2x1', 'whole 2x2 manual', 'lora 2x1 muon', 'lora 2x2', 'lora 3+2 manual', 'native 2x1'],
)
def test_losses_are_those_of_the_collectives(models, tmp_path, kind, ranks, more):
    model, with_lora = models / kind, LORA[0] in more
    keys = [*more, '--quorum=2', '--grace_s=120']  # nobody is left behind, however busy the machine is
    jobs = [start(model, tmp_path, f'{n}', *keys, nproc=nproc) for n, nproc in enumerate(ranks)]
    for job in jobs:
        finish(job)
    reference = tmp_path / 'collectives'
    run_forked('train_diloco.py', *arguments(model, reference, *more), nproc=2, log=tmp_path / 'collectives.log')
    of_jobs = [column(tmp_path / f'{n}', 'loss') for n in range(2)]
    expected = column(reference, 'loss')
    assert len(expected) == STEPS and expected[-1] < expected[0]
    assert_same_run([sum(of_step) / 2 for of_step in zip(*of_jobs, strict=True)], expected)
    theirs = weights_of(reference, STEPS)
    trained = {name for name in theirs if '.lora_' in name or not with_lora}
    for n in range(2):
        (before, *val_losses), (own_before, *own) = (
            column(path, 'val_loss') for path in (reference, tmp_path / f'{n}')
        )
        assert own_before == pytest.approx(before, rel=apart())
        assert_same_run(own, val_losses, every=STEPS // len(val_losses))
        rows = journal(tmp_path / f'{n}')
        assert [len(row['deltas']) for row in rows] == [2] * 4
        assert [row['digest'] for row in rows] == [row['digest'] for row in journal(tmp_path / '0')]
        ours = weights_of(tmp_path / f'{n}', STEPS)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if name not in trained:
                assert ours[name].equal(value) and value.equal(stored_as(name, stored(model))), name
        error = sum((ours[name] - theirs[name]).square().sum() for name in trained)
        assert error <= apart(STEPS) ** 2 * sum(theirs[name].square().sum() for name in trained)
    if with_lora and ranks == [1, 1]:  # only adapters travel: own ones out, the other job's in, and some to a snapshot
        size = 4 * sum(theirs[name].numel() for name in trained)
        of_rounds = [row['diloco/bytes'] for row in metrics(tmp_path / '0') if 'pool/round' in row]
        assert len(of_rounds) == 4 and {*of_rounds} <= {2 * size, 4 * size}


def test_a_job_divides_by_the_targets_of_its_own_part_of_the_batch(tmp_path):
    """With conversations, the parts of a batch have different numbers of learned tokens."""
    model = save_model(tmp_path / 'model', 'gpt2')
    write_chats(tmp_path / 'chats.jsonl')
    prepare(tmp_path, f'--dataset={tmp_path / "chats.jsonl"}', f'--tokenizer={model}', '--name=chats', '--num_proc=1')
    keys = ['--dataset=chats', f'--data_dir={tmp_path / "data"}', '--max_iters=8', '--eval_sequences=0']
    jobs = [start(model, tmp_path, name, *keys, '--quorum=2', '--grace_s=120') for name in ('first', 'second')]
    for job in jobs:
        finish(job)
    reference = tmp_path / 'collectives'
    run_forked('train_diloco.py', *arguments(model, reference, *keys), nproc=2, log=tmp_path / 'log')
    ours, theirs = weights_of(tmp_path / 'first', 8), weights_of(reference, 8)
    error = sum((ours[name] - value).square().sum() for name, value in theirs.items())
    assert error <= apart(8) ** 2 * sum(value.square().sum() for value in theirs.values())


def stored_as(name, weights):
    return weights[name if name in weights else name.removeprefix('transformer.')]


@pytest.mark.slow
def test_who_joins_goes_on_with_the_adapters_of_the_pool(models, tmp_path):
    """A job that is alone fails in its third round. A job of two ranks joins and ends the run, and then the first comes
    back."""
    model, keys = models / 'llama', [*LORA, '--grace_s=1', '--keep_deltas']
    nan = {'kind': 'nan', 'rank': 0, 'step': 2 * H + 2, 'count': 9}
    failed = start(model, tmp_path, 'failed', *keys, '--max_bad_steps=1', fault=nan)
    assert failed.wait(600) == [1], failed.text()
    assert len(journal(tmp_path / 'failed')) == 2
    for name, nproc in (('joined', 2), ('failed', 1)):
        finish(start(model, tmp_path, name, *keys, nproc=nproc))
    rows, again = (journal(tmp_path / name) for name in ('joined', 'failed'))
    assert [row['deltas'] for row in rows] == [row['deltas'] for row in again]
    assert len({delta['job'] for row in rows for delta in row['deltas']}) == 2
    assert_counted_once(rows, STEPS, replicas=2)
    ours, theirs = weights_of(tmp_path / 'joined', STEPS), weights_of(tmp_path / 'failed', STEPS)
    assert all(value.equal(theirs[name]) for name, value in ours.items())
    assert not stored(model).keys() & ours.keys(), 'checkpoints hold what is trained alone'
    assert all(value.any() for name, value in ours.items() if name.endswith('.lora_B'))
    replay = [f'--exchange={tmp_path / "pool"}', *keys, '--replay']
    said = run_forked('train_pool.py', *arguments(model, tmp_path / 'replay', *replay), log=tmp_path / 'replay.log')
    assert f'replay: rounds 0 to {len(rows) - 1} and ' in said and 'equal to the bit' in said


@pytest.mark.slow
def test_a_job_with_other_frozen_weights_is_refused(models, tmp_path):
    """Configuration and keys are the same, as for a base model and a model that was fine-tuned from it."""
    finish(start(models / 'llama', tmp_path, 'first', *LORA, '--max_iters=4'))
    pool = tmp_path / 'pool'
    before = sorted(path for path in pool.rglob('*') if 'alive' not in str(path))
    keys = arguments(models / 'other', tmp_path / 'out', f'--exchange={pool}', *LORA, '--max_iters=4')
    for line in refusals([['train_pool.py', *keys]] * 2):
        assert 'frozen weights=' in line and 'the same keys' in line
    assert sorted(path for path in pool.rglob('*') if 'alive' not in str(path)) == before
