"""train_pool.py as users run it: beside DiLoCo by collectives, sharded, interrupted, misused."""

import contextlib
import itertools
import re
from pathlib import Path

import pool_storm
import pytest
from launch import TINY_EXPERTS, TINY_MODEL, TINY_RUN, Job, refusals, run_forked
from outputs import column, metrics, weights_of
from pool_jobs import assert_counted_once, journal, s3_server
from precision import apart, assert_same_run

from benchmarks import draw_pool
from pool.store import open_store

H, STEPS, BATCH = 10, 34, 12  # the last round has 4 steps
RUN = [*TINY_MODEL, *TINY_RUN, '--dtype=float32', '--dataset=tiny', f'--max_iters={STEPS}', f'--inner_steps={H}']
RUN += [f'--global_batch_size={BATCH}', '--eval_interval=10', '--checkpoint_interval=20', '--outer_momentum=0.6']
TOGETHER = 120  # seconds of grace, so that no job is left behind on a busy machine


def arguments(data_dir, out_dir, *more):
    return [*RUN, f'--data_dir={data_dir}', f'--out_dir={out_dir}', *more]


def start(data_dir, folder, name, *more, nproc=1, fault=None):
    keys = [f'--exchange={folder / "pool"}', '--num_replicas=2', f'--grace_s={TOGETHER}', *more]
    return Job('train_pool.py', arguments(data_dir, folder / name, *keys), nproc, folder / f'{name}.log', fault)


def finish(job):
    assert set(job.wait(600)) == {0}, job.text()


@pytest.fixture(scope='module')
def collectives(data_dir, tmp_path_factory):
    """A function of (replicas, more keys) that returns such a run of train_diloco.py, in one job."""
    runs = {}

    def run(replicas, *more):
        if (replicas, *more) not in runs:
            out_dir = tmp_path_factory.mktemp('collectives')
            keys = arguments(data_dir, out_dir, f'--num_replicas={replicas}', *more)
            run_forked('train_diloco.py', *keys, nproc=replicas, log=out_dir / 'log')
            runs[(replicas, *more)] = out_dir
        return runs[(replicas, *more)]

    return run


@pytest.mark.parametrize(
    'replicas, ranks, more',
    [
        pytest.param(1, [1], [], marks=pytest.mark.slow),
        (2, [1, 1], []),
        pytest.param(2, [2, 2], ['--batch_size=1'], marks=pytest.mark.slow),
        pytest.param(2, [1, 2], ['--batch_size=1', '--fsdp_impl=manual'], marks=pytest.mark.slow),
        pytest.param(3, [1, 1, 1], ['--optimizer=muon'], marks=pytest.mark.slow),
    ],
    ids=['1x1', '2x1', '2x2', '1+2 manual', '3x1 muon'],
)
def test_losses_are_those_of_the_collectives(data_dir, tmp_path, collectives, replicas, ranks, more):
    keys = [f'--num_replicas={replicas}', f'--quorum={replicas}', *more]
    jobs = [start(data_dir, tmp_path, f'{n}', *keys, nproc=nproc) for n, nproc in enumerate(ranks)]
    for job in jobs:
        finish(job)
    reference = collectives(replicas, *[key for key in more if 'optimizer' in key])
    of_jobs = [column(tmp_path / f'{n}', 'loss') for n in range(replicas)]
    losses = [sum(of_step) / replicas for of_step in zip(*of_jobs, strict=True)]
    assert_same_run(losses, column(reference, 'loss'))
    for n in range(replicas):
        out_dir = tmp_path / f'{n}'
        assert column(out_dir, 'step') == list(range(1, STEPS + 1))
        val_losses = (column(path, 'val_loss') for path in (out_dir, reference))
        assert_same_run(*val_losses, every=STEPS // len(column(reference, 'val_loss')))
        assert (out_dir / 'DONE').read_text().strip() == f'{STEPS}'
        rows = journal(out_dir)
        assert [len(row['deltas']) for row in rows] == [replicas] * 4
        assert [row['digest'] for row in rows] == [row['digest'] for row in journal(tmp_path / '0')]
        assert [row['diloco/momentum_norm'] for row in metrics(out_dir) if 'pool/round' in row] == pytest.approx(
            column(reference, 'diloco/momentum_norm'), rel=1e-4
        )
        ours, theirs = weights_of(out_dir, STEPS), weights_of(reference, STEPS)
        error = sum((ours[name] - value).square().sum() for name, value in theirs.items())
        assert error <= apart(STEPS) ** 2 * sum(value.square().sum() for value in theirs.values())


def test_rows_of_a_job_that_is_alone_of_two_say_what_the_pool_and_the_job_have_done(data_dir, tmp_path):
    """A job of two ranks trains both replicas' data, which takes two of its steps for one of the run; a late one finds
    nothing to do."""
    finish(start(data_dir, tmp_path, 'alone', '--batch_size=1', '--max_iters=24', nproc=2))
    finish(start(data_dir, tmp_path, 'late', '--max_iters=24'))
    rows, (late,) = metrics(tmp_path / 'alone'), metrics(tmp_path / 'late')
    steps = {5: 10, 10: 10, 15: 10, 20: 10, 22: 4, 24: 4}  # where a round ends: the job's steps in it
    ends = {row['step']: row for row in rows if 'pool/round' in row}
    assert [*ends] == [*steps] and [row['pool/round'] for row in ends.values()] == [1, 2, 3, 4, 5, 6]
    assert {(row['pool/pace'], row['pool/replicas']) for row in ends.values()} == {(0.5, 1)}
    of_rounds = [[delta['tokens'] for delta in row['deltas']] for row in journal(tmp_path / 'alone')]
    assert of_rounds == [[n * BATCH // 2 * 32] for n in steps.values()]
    assert rows[-1]['step'] == late['step'] == 24
    assert late['val_loss'] == pytest.approx(rows[-1]['val_loss'], rel=apart())
    for row in (*rows, late):
        assert row['tokens'] == row['step'] * BATCH * 32
        if row is not late:
            of_job = BATCH // 2 * 32 / row['time/total'] * 1000
            found = row['tokens_per_sec'], 2 * row['tokens_per_sec_per_rank']
            assert found == pytest.approx((of_job, of_job), rel=1e-3)
            assert ('time/outer' in row) == (row['step'] in ends) == ('diloco/wait_s' in row)
    # What goes to the store is in diloco/bytes, and what goes to the other rank in comm/sent_gb.
    of_a_step = rows[1]['comm/sent_gb']
    assert of_a_step > 0
    for row in rows:
        more = row['diloco/bytes'] / 10 if row['step'] in ends else 200  # a round's checksums and small files are in it
        assert 0 <= 1e9 * (row['comm/sent_gb'] - of_a_step) < more
    numbers = sum(weight.numel() for weight in weights_of(tmp_path / 'alone', 24).values())
    assert {row['diloco/bytes'] for step, row in ends.items() if step < 15} == {numbers // 2 * 4}  # rank 0's rows


def test_a_job_that_is_stopped_gives_what_it_has_and_one_that_is_killed_costs_its_round(data_dir, tmp_path):
    """Then both are started again, and --replay computes again what the pool ends with. No round is closed without
    both jobs, and each begins with a pause, so neither can have trained everything before the other is there or the
    test looks."""
    keys = [
        '--batch_size=1',
        '--max_iters=60',
        '--grace_s=2',
        '--quorum=2',
        '--keep_deltas',
        '--eval_interval=30',
        '--checkpoint_interval=30',
    ]
    pause = {'kind': 'slow', 'rank': 0, 'step': 2, 'seconds': 3.0}
    jobs = [start(data_dir, tmp_path, name, *keys, fault=pause) for name in ('stopped', 'killed')]
    for job, name in zip(jobs, ('stopped', 'killed'), strict=True):
        job.wait_for(lambda name=name: (tmp_path / name / 'rounds.jsonl').exists())
    (tmp_path / 'stopped' / 'STOP').touch()
    finish(jobs[0])
    jobs[1].end()
    assert (tmp_path / 'stopped' / 'PREEMPTED').exists() and 'the same command ' in jobs[0].text()
    again = [start(data_dir, tmp_path, name, *keys, nproc=nproc) for name, nproc in (('stopped', 1), ('killed', 2))]
    for job, name in zip(again, ('stopped', 'killed'), strict=True):
        finish(job)
        assert (tmp_path / name / 'DONE').read_text().strip() == '60'
        assert column(tmp_path / name, 'step') == sorted({*column(tmp_path / name, 'step')})
    assert_counted_once(journal(tmp_path / 'stopped'), steps=60, replicas=2)
    ends = [journal(tmp_path / name)[-1]['digest'] for name in ('stopped', 'killed')]
    assert ends[0] == ends[1]
    said = run_forked('train_pool.py', *again_keys(data_dir, tmp_path, keys), '--replay', log=tmp_path / 'replay.log')
    assert re.search('replay: rounds 0 to .* snapshots: equal ', said)
    for name, value in weights_of(tmp_path / 'stopped', 60).items():
        assert value.equal(weights_of(tmp_path / 'killed', 60)[name]), name


@pytest.mark.slow
def test_a_job_that_waits_for_a_quorum_says_what_is_missing_and_can_be_stopped(data_dir, tmp_path):
    job = start(data_dir, tmp_path, 'alone', '--quorum=2', '--grace_s=0.5')
    job.wait_for(lambda: re.search(' 1 of quorum=2 .*start ', job.text()))
    (tmp_path / 'alone' / 'STOP').touch()
    finish(job)
    assert (tmp_path / 'alone' / 'PREEMPTED').exists() and 'the same command ' in job.text()
    finish(start(data_dir, tmp_path, 'alone', '--grace_s=0.5'))  # what it had given counts
    rows = journal(tmp_path / 'alone')
    assert_counted_once(rows, steps=STEPS, replicas=2)
    assert len({delta['job'] for delta in rows[0]['deltas']}) == 2 or len(rows[0]['deltas']) == 1


@pytest.mark.slow
@pytest.mark.parametrize('keys', [[], TINY_EXPERTS], ids=['dense', 'experts'])
def test_a_storm_and_its_picture(data_dir, tmp_path, keys):
    """storm() kills, stops and restarts jobs, and checks what counts and that all jobs hold the same bits."""
    figures = pool_storm.storm(tmp_path, data_dir, kills=6, compare=False, keys=keys)
    assert figures['shares counted'] == 4 * (6 * pool_storm.STEPS_PER_KILL + 10 * pool_storm.H)
    # A job does not compute rounds before the snapshot from which it begins; but each round was computed by some job.
    assert figures['starts'] >= 4 and figures['digests compared'] >= figures['rounds']
    rounds = draw_pool.read_journal(tmp_path.glob('storm_1/*'))
    lanes, _ = draw_pool.lanes_of(rounds)
    assert [Path(place).name for place in lanes] == sorted(pool_storm.NAMES)
    assert sum(len(lane['trained']) for lane in lanes.values()) == figures['deltas']
    assert sum(len(lane['left']) for lane in lanes.values()) == figures['deltas by jobs that left']
    for lane in lanes.values():  # a row shows one thing at a time
        bars = sorted(bar for kind in draw_pool.COLORS for bar in lane[kind] if bar[1] > bar[0])
        assert all(end <= first + 1e-6 for (_, end), (first, _) in itertools.pairwise(bars)), bars


def again_keys(data_dir, folder, keys):
    return arguments(data_dir, folder / 'replay', f'--exchange={folder / "pool"}', *keys)


@pytest.mark.slow
def test_a_pool_goes_on_from_what_one_job_has_begun(data_dir, tmp_path):
    """It goes on from the middle of a round, so the first pieces of the pool are shorter."""
    keys = arguments(data_dir, tmp_path / 'begun', '--lr_decay_iters=34', '--max_iters=14', '--eval_interval=7')
    run_forked(
        'train_ddp.py', *[key for key in keys if 'inner' not in key and 'outer' not in key], log=tmp_path / 'ddp'
    )
    job = start(data_dir, tmp_path, 'begun', '--num_replicas=1')
    finish(job)
    (first, *_, last) = journal(tmp_path / 'begun')
    assert [delta['piece'] for delta in first['deltas']] == [[[0, 14, 20]]]
    assert last['deltas'][0]['piece'] == [[0, 30, 34]]
    assert column(tmp_path / 'begun', 'step') == list(range(1, STEPS + 1))
    finish(start(data_dir, tmp_path, 'late', '--num_replicas=1'))  # which finds nothing to do
    for name, value in weights_of(tmp_path / 'begun', STEPS).items():
        assert value.equal(weights_of(tmp_path / 'late', STEPS)[name]), name


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['folder', pytest.param('s3', marks=pytest.mark.slow)])
def test_a_plan_measures_the_store_leaves_nothing_there_and_compares_itself_with_the_run(data_dir, tmp_path, kind):
    keys = ['--plan', '--num_replicas=2', '--batch_size=1', '--max_iters=100', '--eval_interval=0', '--log_interval=50']
    with contextlib.ExitStack() as stack:
        address, env = tmp_path / 'pool', {}
        if kind == 's3':
            pytest.importorskip('s3fs', reason='pip install s3fs "moto[server]"')
            address, env = 's3://bucket/pool', stack.enter_context(s3_server(tmp_path))
        keys = arguments(data_dir, tmp_path / 'out', f'--exchange={address}', *keys)
        said = run_forked('train_pool.py', *keys, nproc=2, log=tmp_path / 'log', **env)
        for key, value in env.items():
            stack.enter_context(pytest.MonkeyPatch.context()).setenv(key, value)
        assert set(open_store(str(address)).list('')) == {'alive', 'commits', 'outer', 'pool.json', 'rounds'}
    table = said.partition('plan: ')[2]
    assert 'the store writes ' in table
    sizes = {}
    for dtype in ('float32', 'bfloat16', 'int8', 'int4'):
        (row,) = re.findall(rf' {dtype} +([\d.]+) +([\d.]+) +(.*)', table)
        shares = [float(share) for share in re.findall(r'([\d.]+)%', row[2])]
        assert len(shares) == 7 and shares == sorted(shares) and 0 < shares[0] <= shares[-1] <= 100
        sizes[dtype] = float(row[0])
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
    lives = re.findall(r' (\d+) h up, (\d+) min down +(.*)', table)
    assert [(up, down) for up, down, _ in lives] == [(up, down) for up in ('1', '4', '24') for down in ('10', '60')]
    float32 = [float(share) for share in re.findall(r' float32 .*', table)[0].replace('%', '').split()[3:]]
    for up, down, row in lives:
        for share, undisturbed in zip(row.replace('%', '').split(), float32, strict=True):
            assert 0 < float(share) <= undisturbed * int(up) / (int(up) + int(down) / 60) + 0.1
    assert re.search(r' rounds of 10 steps: .*predicted [\d.]+ s .*exchange [\d.]+ s, .*measured ', table), table


@pytest.mark.parametrize(
    'keys, words',
    [
        (['--num_fragments=3'], ['--num_fragments', 'train_diloco.py']),
        (['--learning_rate=2e-3'], ['learning_rate=0.003, ', ' 0.002']),
        (['--n_layer=2'], ['n_layer=3, ', ' 2']),
        (['--num_replicas=3'], ['num_replicas=2, ', ' 3']),
        (['--exchange={folder}/other', '--num_replicas=None'], ['--num_replicas=8']),
        (['--exchange={folder}/first/pool'], ['/first/pool', '/first, ']),
        (['--exchange=nowhere://bucket'], ['exchange=nowhere://bucket: ']),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_mistakes_are_one_line_on_every_rank_and_leave_the_pool_as_it_was(data_dir, tmp_path, a_pool, keys, words):
    before = sorted(path for path in a_pool.rglob('*') if 'alive' not in str(path))
    keys = [key.format(folder=a_pool.parent) for key in keys]
    keys = arguments(data_dir, tmp_path / 'out', f'--exchange={a_pool}', '--num_replicas=2', '--batch_size=1', *keys)
    for line in refusals([['train_pool.py', *keys]] * 2):
        assert all(word in line for word in words), line
    assert sorted(path for path in a_pool.rglob('*') if 'alive' not in str(path)) == before


@pytest.fixture(scope='module')
def a_pool(data_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp('pool')
    finish(start(data_dir, folder, 'first', '--max_iters=34'))
    return folder / 'pool'
