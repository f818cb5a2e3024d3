"""The protocol of a pool with processes that are slow, killed, deaf or broken, on a folder and on an S3 server."""

import contextlib
import itertools
import json
import os
import random
import re
import time
import uuid
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from faults import mount, mount_small_disk, undo
from pool_jobs import MOMENTUM, RATE, Jobs, inner_step, journal, s3_server, shares_of, whole_matrices

from exchange import codec
from pool.ledger import Ledger
from pool.replica import Replica
from pool.round_watch import RoundWatch
from pool.store import open_store


@pytest.fixture(scope='module')
def server(tmp_path_factory):
    pytest.importorskip('s3fs', reason='pip install s3fs "moto[server]"')
    pytest.importorskip('moto', reason='pip install s3fs "moto[server]"')
    with s3_server(tmp_path_factory.mktemp('moto')) as env:
        yield env


# Tests that depend on the promises of a store run on both stores in CI, too; the others only with --full.
BOTH = pytest.mark.parametrize('pool_of', ['folder', pytest.param('s3', marks=pytest.mark.slow)], indirect=True)


@pytest.fixture(params=['folder', pytest.param('s3', marks=pytest.mark.slow)])
def pool_of(request, tmp_path, monkeypatch):
    """A function of keys that returns the Jobs of a new pool."""
    env = request.getfixturevalue('server') if request.param == 's3' else {}
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    address = f's3://bucket/{uuid.uuid4().hex}' if env else str(tmp_path / 'pool')
    return lambda **keys: Jobs(address, tmp_path, env, **keys)


def commits_of(jobs):
    store = open_store(jobs.address)
    return [json.loads(store.read(f'commits/{name}')) for name in store.list('commits')]


def check(jobs, results):
    """Check that everything is trained, each share once, and that all jobs hold the same bits, which also follow from
    the journal by hand and by a replay. Returns the commits."""
    keys, commits = jobs.keys, commits_of(jobs)
    ledger, shares = Ledger(keys['max_iters'], keys['inner_steps'], keys['num_replicas']), []
    weights = whole_matrices()
    momentum = {name: torch.zeros_like(value) for name, value in weights.items()}
    for commit in commits:
        assert commit['round'] == ledger.round
        deltas, average = commit['deltas'], {name: torch.zeros_like(value) for name, value in weights.items()}
        for delta in deltas:
            piece = shares_of(ledger.piece(delta['number']))
            assert piece == shares_of(delta['piece'])
            theirs = {name: value.clone() for name, value in weights.items()}
            for k, step in piece[: delta['steps']]:
                inner_step(theirs, k, step)
            shares += piece[: delta['steps']]
            for name in average:
                weight = delta['steps'] / sum(other['steps'] for other in deltas)
                average[name] += weight * (weights[name] - theirs[name])
        for name in weights if deltas else ():
            momentum[name] = MOMENTUM * momentum[name] + average[name]
            weights[name] = weights[name] - RATE * (average[name] + MOMENTUM * momentum[name])
        ledger.advance(commit)
    assert ledger.is_complete and ledger.step == keys['max_iters']
    assert sorted(shares) == sorted(itertools.product(range(keys['num_replicas']), range(keys['max_iters'])))
    finished = {
        name: result for name, result in results.items() if isinstance(result, dict) and result['step'] == ledger.step
    }
    assert finished and len({result['state'] for result in finished.values()}) == 1
    for name, result in finished.items():
        for key, value in weights.items():
            assert torch.allclose(result['weights'][key], value, atol=1e-5), (name, key)
        rows = journal(jobs.folder / name)
        assert [row['round'] for row in rows] == list(range(len(commits)))
        assert rows[-1].get('digest', result['state']) == result['state']
        for row, following in itertools.pairwise(rows):  # bit-equal after every round
            assert row.get('digest', following['state']) == following['state']
    return commits


def replay(jobs, name='replay'):
    again = Jobs(jobs.address, jobs.folder, jobs.env, **{**jobs.keys, 'replay': True})
    return again.start(name, ranks=2).wait(name)[name]


# --- no faults --------------------------------------------------------------------------------------------------------


@BOTH
def test_jobs_of_other_numbers_of_ranks_hold_the_same_bits_and_read_the_others_deltas_once(pool_of):
    jobs = pool_of(num_replicas=3, quorum=3).start('one').start('two', ranks=2).start('three', ranks=3)
    results = jobs.wait()
    commits = check(jobs, results)
    assert [len(commit['deltas']) for commit in commits] == [3] * 6
    for result in results.values():  # each keeps to its replica's data
        assert len({k for _, k, _, _ in result['trained']}) == 1
    rows = results['one']['rows'][:-1]  # the job that closes the last round also writes a snapshot
    assert {row['diloco/bytes'] for row in rows} == {3 * 47 * 4}  # 47 numbers, its own and of two
    assert replay(jobs).startswith('rounds 0 to 5 and 1 snapshots: equal ')


def deltas_are_there(n, store):
    return sum(name.endswith('.json') for name in store.list('rounds/000000')) == n


def test_a_job_that_begins_late_makes_nobody_read_a_delta_twice(pool_of):
    """When two of three have delivered and the third has not claimed anything yet, it is too early to add them up."""
    jobs = pool_of(num_replicas=3, quorum=3, max_iters=8).start('one')
    jobs.start('two', wait=('write', 'rounds/000000/claim_*', partial(deltas_are_there, 1)))
    jobs.start('three', wait=('write', 'rounds/000000/claim_*', partial(deltas_are_there, 2)))
    results = jobs.wait()
    assert [len(commit['deltas']) for commit in check(jobs, results)] == [3, 3]
    assert results['two']['rows'][0]['diloco/bytes'] == 3 * 47 * 4


ROUNDED = {'bfloat16': 0.01, 'int8': 0.02, 'int4': 0.2}


@pytest.mark.parametrize('dtype', ROUNDED)
def test_what_travels_may_be_rounded_and_all_round_alike(tmp_path, dtype):
    feedback = dtype != 'bfloat16'
    jobs = Jobs(str(tmp_path / 'pool'), tmp_path, exchange_dtype=dtype, error_feedback=feedback, quorum=2)
    results = jobs.start('one').start('two', ranks=2).wait()
    assert results['one']['state'] == results['two']['state']
    exact = Jobs(str(tmp_path / 'exact'), tmp_path, quorum=2).start('a').start('b').wait()
    moved = {name: value - exact['a']['weights'][name] for name, value in whole_matrices().items()}
    for name, value in exact['a']['weights'].items():
        difference = (results['one']['weights'][name] - value).norm() / moved[name].norm()
        assert 0 < difference < ROUNDED[dtype], (name, difference)
    assert re.search('rounds .*: equal ', replay(jobs))


def test_what_rounding_cost_is_sent_the_next_time(tmp_path):
    """a = e + delta;   D = Q(a);   e = a - D;   the outer step is taken with D."""
    keys = {'num_replicas': 1, 'exchange_dtype': 'int4', 'error_feedback': True}
    result = Jobs(str(tmp_path / 'pool'), tmp_path, **keys).start('one').wait()['one']
    anchor = flattened(whole_matrices())
    error, momentum = torch.zeros_like(anchor), torch.zeros_like(anchor)
    for first in range(0, 24, 4):
        theirs = {name: value.clone() for name, value in matrices_of(anchor).items()}
        for step in range(first, first + 4):
            inner_step(theirs, 0, step)
        a = error + anchor - flattened(theirs)
        padded = torch.nn.functional.pad(a, (0, -len(a) % codec.BLOCKS['int4']))
        sent = codec.decode(codec.encode(padded[None], 'int4'), 'int4')[0, : len(a)]
        error, momentum = a - sent, MOMENTUM * momentum + sent
        anchor = anchor - RATE * (sent + MOMENTUM * momentum)
    assert error.norm() > 0 and torch.allclose(flattened(result['weights']), anchor, atol=1e-5)


@pytest.mark.parametrize('dtype', ['float32', 'int4'])
def test_a_rank_without_rows_gives_none(tmp_path, dtype):
    """There are eight ranks for matrices of 5 to 7 rows."""
    jobs = Jobs(str(tmp_path / 'pool'), tmp_path, exchange_dtype=dtype, quorum=2, max_iters=12)
    results = jobs.start('one').start('eight', ranks=8).wait()
    assert isinstance(results['eight'], dict), results['eight']
    assert [len(commit['deltas']) for commit in commits_of(jobs)] == [2] * 3
    assert results['one']['state'] == results['eight']['state']


def test_a_pool_of_an_earlier_version_is_joined_unless_it_used_what_is_gone(tmp_path):
    def enter():
        replica = Replica.__new__(Replica)
        replica.config = SimpleNamespace(exchange=str(tmp_path), exchange_dtype='int4', replay=False)
        replica.store, replica.name = open_store(str(tmp_path)), 'job'
        replica.fragment = SimpleNamespace(parameters={})
        return replica._enter({'model': {'n_layer': 2, 'window_size': None}})

    enter()
    pool = json.loads((tmp_path / 'pool.json').read_text())
    del pool['keys']['model']['window_size']  # which earlier versions did not have
    for keys, gone in (({'exchange_k': 64, 'error_decay': None}, None), ({'exchange_dtype': 'top2bit'}, 'top2bit')):
        (tmp_path / 'pool.json').write_text(json.dumps({**pool, 'keys': {**pool['keys'], **keys}}))
        with pytest.raises(ValueError, match=f'with {gone}, which is gone') if gone else contextlib.nullcontext():
            assert enter() == 'job'


def flattened(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def matrices_of(flat):
    whole = whole_matrices()
    parts = flat.split([value.numel() for value in whole.values()])
    return {name: part.view(whole[name].shape) for name, part in zip(whole, parts, strict=True)}


@pytest.mark.slow
def test_more_jobs_than_replicas_and_fewer(pool_of):
    jobs = pool_of(num_replicas=2, quorum=4, max_iters=26)  # the last pieces have 2 steps
    results = jobs.start('a').start('b').start('c').start('d').wait()
    commits = check(jobs, results)
    assert [len(commit['deltas']) for commit in commits] == [4, 4, 4, 2]


# --- kills ------------------------------------------------------------------------------------------------------------

PLACES = ['*/claim_*', '*/delta_??_0000', '*/delta_??.json', 'commits/*', 'outer/*_model_0000', 'outer/*.json']


def test_killed_at_every_write_one_after_another(pool_of):
    """Each job is alone, so only the next one can find what it had begun."""
    jobs = pool_of(grace_s=0.5, max_iters=80, checkpoint_interval=4)
    results = {}
    for number, (place, when) in enumerate(itertools.product(PLACES, ('before', 'after'))):
        name = f'{number}'
        results |= jobs.start(name, die=(place, when, 2 if number else 1)).wait(name)
        assert results[name] == -9, (place, when, results[name])
    results |= jobs.start('last').wait('last')
    commits = check(jobs, results)
    assert sum(commit['claims'] - len(commit['deltas']) for commit in commits) == 4  # claimed, and never delivered
    assert sum(len(commit['lost']) for commit in commits) == 4
    assert re.search('rounds .*: equal ', replay(jobs))


def test_killed_between_writing_a_file_and_giving_it_its_name(tmp_path):
    jobs = Jobs(str(tmp_path / 'pool'), tmp_path, grace_s=0.5)
    results = jobs.start('dead', die=('*/delta_00.json', 'within', 1)).wait()
    assert results['dead'] == -9 and [*tmp_path.glob('pool/rounds/000000/delta_00.json.*.tmp')]
    check(jobs, jobs.start('a').wait())


@BOTH
def test_two_jobs_close_the_same_round(pool_of):
    """Both are about to create commit 0 before either does."""
    jobs = pool_of(quorum=2)
    for name in 'ab':
        jobs.start(name, wait=('write', 'commits/000000.json', Arrival(jobs.folder, name, 2)))
    results = jobs.wait()
    commits = check(jobs, results)
    assert len(commits) == 6 and {path.name for path in jobs.folder.glob('arrived_*')} == {'arrived_a', 'arrived_b'}


class Arrival:
    """A condition that becomes true when so many jobs have asked for it."""

    def __init__(self, folder, name, count):
        self.folder, self.name, self.count = folder, name, count

    def __call__(self, store):
        (self.folder / f'arrived_{self.name}').touch()
        return len([*self.folder.glob('arrived_*')]) == self.count


@pytest.mark.slow
def test_a_storm_of_kills_and_returns(tmp_path):
    """Four jobs, one of them slow, are killed at random and started again until the pool has trained everything."""
    jobs = Jobs(str(tmp_path / 'pool'), tmp_path, num_replicas=4, max_iters=160, grace_s=1.0, checkpoint_interval=8)
    chance, kills, names = random.Random(1), 0, ['a', 'b', 'c', 'slow']
    for name in names:
        jobs.start(name, ranks=1 + (name == 'b'), pause=0.06 if name == 'slow' else 0.02)
    while kills < 24:
        time.sleep(chance.uniform(0.2, 1.0))
        name = chance.choice(names)
        if not all(process.is_alive() for process in jobs.running[name]):
            break  # everything is trained
        jobs.kill(name)
        kills += 1
        jobs.start(name, ranks=chance.choice((1, 2)), pause=0.06 if name == 'slow' else 0.02)
    check(jobs, jobs.wait())
    assert re.search('rounds .*: equal ', replay(jobs))


# --- what cannot be used ----------------------------------------------------------------------------------------------


class Changed:
    """Makes what is written in place of a marker: the same marker with other values."""

    def __init__(self, **values):
        self.values = values

    def __call__(self, data):
        return json.dumps({**json.loads(data), **self.values}).encode()


def nothing(data):
    return None


def half(data):
    return data[: len(data) // 2]


def flipped(data):
    return data[:9] + bytes([data[9] ^ 1]) + data[10:]


FIRST = 'rounds/000000/delta_*'
HARM = {
    'no payload': ({'harm': (f'{FIRST}_0000', nothing)}, 'missing'),
    'truncated': ({'harm': (f'{FIRST}_0000', half)}, 'damaged (94 bytes)'),
    'one bit': ({'harm': (f'{FIRST}_0000', flipped)}, 'damaged (188 bytes)'),
    'not finite': ({'nan': True, 'notices': False}, 'not finite'),
    'another pool': ({'harm': (f'{FIRST}.json', Changed(pool='x'))}, 'of another pool (x)'),
    'another state': ({'harm': (f'{FIRST}.json', Changed(state='y'))}, 'another outer state, y'),
    'no JSON': ({'harm': (f'{FIRST}.json', half)}, 'of another pool (None)'),
    'no files': ({'harm': (f'{FIRST}.json', Changed(xxh128=[]))}, 'names no files'),
    'too many steps': ({'harm': (f'{FIRST}.json', Changed(steps=5))}, '5 steps of 4'),
}


@pytest.mark.parametrize('harm', HARM)
def test_a_delta_that_cannot_be_used_does_not_count_and_its_data_is_read_again(pool_of, harm):
    """The bad job waits until the good one has closed the round, since it would take its own file for good."""
    job, why = HARM[harm]
    jobs = pool_of(quorum=2, grace_s=1.0).start('good')  # without its marker, 'bad' is waited for
    jobs.start('bad', wait=('write', 'commits/000000.json', is_closed), **job)
    results = jobs.wait()
    commits = check(jobs, results)
    (rejected,) = commits[0]['rejected']
    assert why in rejected['why'] and len(commits[0]['deltas']) == 1
    assert not any(commit['rejected'] for commit in commits[1:])


def test_a_marker_does_not_decide_for_which_piece_it_counts(pool_of):
    jobs = pool_of().start('a', harm=(f'{FIRST}.json', Changed(number=7)))
    assert not any(commit['rejected'] for commit in check(jobs, jobs.wait()))


@pytest.mark.parametrize('others', [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_job_whose_parameters_differ_closes_no_round_of_the_others(pool_of, others):
    """Also if it is the first to find the round complete: the others wait until it has closed the round, or has not."""
    jobs = pool_of(num_replicas=others + 1, quorum=others + 1)
    has_decided = partial(is_decided, str(jobs.folder / 'odd' / 'log'))
    jobs.start('odd', odd=1)
    for name in 'abc'[:others]:
        jobs.start(name, wait=('write', 'commits/000001.json', has_decided))
    commits = check(jobs, jobs.wait())
    (rejected,) = commits[1]['rejected']
    assert 'began from another outer state' in rejected['why'] and len(commits[1]['deltas']) == others
    assert not any(commit['rejected'] for commit in (*commits[:1], *commits[2:]))


def is_decided(log, store):
    return '000001.json' in store.list('commits') or 'are not those of round 1' in Path(log).read_text()


def is_closed(store):
    return '000000.json' in store.list('commits')


@pytest.mark.slow
@BOTH
def test_answers_that_are_lost_after_the_store_has_done_what_was_asked(pool_of):
    jobs = pool_of(quorum=2)
    results = jobs.start('a', deaf=12).start('b', deaf=7).wait()
    commits = check(jobs, results)
    assert len(commits) == 6 and all(commit['claims'] == len(commit['deltas']) == 2 for commit in commits)


# --- come and go ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_leave_in_mid_round_and_one_returns(pool_of):
    jobs = pool_of(quorum=2)
    results = jobs.start('a', leave_after=6).start('b', leave_after=7).wait()
    assert [results[name]['step'] for name in 'ab'] == [4, 4]
    jobs.keys['quorum'] = 1
    results |= jobs.start('c').wait()
    commits = check(jobs, results)
    # What they gave when they left counts, by its number of steps. c joins after that and closes the round. The rest,
    # 2 + 1 steps, is less than a piece and comes last.
    assert sorted(delta['steps'] for delta in commits[1]['deltas']) == [2, 3]
    assert all(delta['leaves'] for delta in commits[1]['deltas']) and commits[1]['closer'] == results['c']['name']
    rest = [
        (part[0], step)
        for delta in commits[1]['deltas']
        for part in delta['piece']
        for step in range(part[1] + delta['steps'], part[2])
    ]
    of_c = [(k, first + step) for _, k, first, steps in results['c']['trained'] for step in range(steps)]
    assert of_c[-3:] == rest


@pytest.mark.slow
def test_from_four_jobs_to_one_to_three(pool_of):
    jobs = pool_of(num_replicas=4, quorum=4, max_iters=40, grace_s=2.0)
    for name in 'abc':
        jobs.start(name, leave_after=12)
    results = jobs.start('d', leave_after=14).wait()
    jobs.keys['quorum'] = 1
    results |= jobs.start('alone', leave_after=10).wait()
    jobs.keys['quorum'] = 3
    results |= jobs.start('x').start('y', ranks=2).start('z').wait()
    commits = check(jobs, results)
    assert [len(commit['deltas']) for commit in commits[:3]] == [4, 4, 4]
    assert max(len(commit['deltas']) for commit in commits[-4:-1]) == 3
    assert re.search('rounds .*: equal ', replay(jobs))


@pytest.mark.slow
def test_a_slow_job_gives_what_it_has(pool_of):
    """It is asked for it when the others have been done for half of grace_s. How often that happens, and whether the
    round still waits for it, depends on the clock; in any case everything counts once."""
    jobs = pool_of(grace_s=1.0, max_iters=40)
    check(jobs, jobs.start('fast').start('slow', pause=0.4).wait())
    assert re.search('rounds .*: equal ', replay(jobs))


@pytest.mark.slow
def test_a_job_joins_while_a_round_is_being_closed(pool_of):
    """Its claim comes after the last look of the job that closes the round and before the commit. So the commit does
    not have it, and its piece is claimed again."""
    jobs = pool_of(max_iters=16)
    jobs.start('closer', wait=('write', 'commits/000000.json', has_another_claim))
    jobs.keys['quorum'] = 2  # else it would see that the round is over, and not claim
    store = open_store(jobs.address)
    while 'claim_00' not in store.list('rounds/000000'):
        time.sleep(0.05)
    results = jobs.start('joins').wait()
    commits = check(jobs, results)
    assert commits[0]['claims'] == 1 or len(commits[0]['deltas']) == 2


@pytest.mark.slow
def test_a_job_that_joins_when_all_is_trained_has_the_whole_journal(pool_of):
    jobs = pool_of()
    results = jobs.start('trains').wait()
    check(jobs, results | jobs.start('late').wait())


def has_another_claim(store):
    return len([name for name in store.list('rounds/000000') if name.startswith('claim')]) == 2


@pytest.mark.slow
def test_files_are_deleted_while_somebody_reads_them(pool_of):
    """A job that joins has chosen the first snapshot. Before it reads it, that snapshot and its deltas are deleted."""
    jobs = pool_of(keep_deltas=False, checkpoint_interval=4, max_iters=48, grace_s=2.0)
    jobs.start('old', leave_after=9).wait()
    store = open_store(jobs.address)
    assert '000000.json' in store.list('outer')
    jobs.start('reads', wait=('read', 'outer/*_model_0000', is_deleted))
    results = jobs.start('trains', leave_after=80).wait('trains')
    results |= jobs.wait('reads')
    assert store.list('rounds')[0] > '000000' and len([n for n in store.list('outer') if n.endswith('.json')]) == 2
    check(jobs, {name: result for name, result in results.items() if name == 'reads'})


def is_deleted(store):
    return '000000.json' not in store.list('outer')


@pytest.mark.slow
def test_a_replay_says_what_is_missing_and_where_it_could_begin(pool_of):
    jobs = pool_of(num_replicas=1, checkpoint_interval=8)
    jobs.start('a').wait()
    store = open_store(jobs.address)
    assert [name for name in store.list('outer') if name.endswith('.json')] == [
        f'{round:06}.json' for round in (0, 2, 4, 6)
    ]
    store.remove('rounds/000002', store.list('rounds/000002'))
    said = replay(jobs)
    assert 'round 2 ' in said and 'rounds/000002/delta_00_0000 ' in said
    assert 'from round 4 on' in said and 'outer/' in said
    store.remove('outer', [name for name in store.list('outer') if name < '000004'])
    said = replay(jobs, 'again')
    assert re.match('rounds 4 to 5 and 1 snapshots: equal .*round 4 .*--keep_deltas', said), said


# --- what is refused --------------------------------------------------------------------------------------------------


def everything(store):
    return {folder: store.list(folder) for folder in ('', 'rounds', 'commits', 'outer', 'rounds/000000')}


def test_what_a_job_finds_that_is_not_its_own_is_refused_in_one_line_on_every_rank(pool_of, tmp_path):
    jobs = pool_of()
    jobs.start('first').wait()
    store = open_store(jobs.address)
    before = everything(store)

    def refused(job=None, ranks=1, address=jobs.address, **keys):
        other = Jobs(address, tmp_path, jobs.env, **{**jobs.keys, **keys})
        (said,) = other.start('other', ranks=ranks, **(job or {})).wait().values()
        assert isinstance(said, str) and '\n' not in said, said
        return said

    assert re.match(f'.*exchange={jobs.address}: .*max_iters=24, .* 30: ', refused(max_iters=30, ranks=2))
    assert re.search('seed=1, .* 2: .*the same keys', refused(seed=2))
    assert '3.0 h ahead' in refused({'skew': 3 * 3600.0})
    assert '2.5 h behind' in refused({'skew': -2.5 * 3600})
    assert everything(store) == before
    store.create('elsewhere/file', b'')
    assert 'pool.json' in refused(address=f'{jobs.address}/elsewhere')
    if '://' in jobs.address:
        assert 's3://nowhere' in refused(address='s3://nowhere/pool')
    else:
        (tmp_path / 'a_file').touch()
        assert 'a_file' in refused(address=str(tmp_path / 'a_file' / 'pool'))
        (tmp_path / 'run' / 'checkpoints').mkdir(parents=True)
        (tmp_path / 'run' / 'train.log').touch()
        assert 'inside of' in refused(address=str(tmp_path / 'run' / 'pool'))
        assert not (tmp_path / 'run' / 'pool').exists()


def test_a_thread_that_looks_again_does_not_disturb_who_goes_through_what_it_has_seen(tmp_path):
    store = open_store(str(tmp_path))
    watch = RoundWatch(store, 'me', grace_s=60, quorum=1)
    watch.begin(SimpleNamespace(round=0, pieces=3), set())
    for number in range(2):
        store.create(f'rounds/000000/claim_{number:02}', b'job')
    store.create('rounds/000000/delta_00.json', b'{"job": "job"}')
    watch.look()
    seen = []
    for number, (claim, _) in enumerate(zip(watch.owners, itertools.cycle(watch.markers), strict=False)):
        seen.append(claim)
        store.create('rounds/000000/claim_02', b'late')
        store.create(f'rounds/000000/delta_{number + 1:02}.json', b'{"job": "job"}')
        watch.look()
    assert seen == [0, 1] and [*watch.owners] == [*watch.markers] == [0, 1, 2]


def test_a_job_that_has_learned_no_numbers_gives_nothing(pool_of):
    jobs = pool_of()
    results = jobs.start('a', ranks=2, nan=True).wait()
    assert 'not finite' in results['a']
    assert open_store(jobs.address).list('rounds/000000') == ['claim_00']


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason='only root may mount a small disk')
def test_a_full_disk_ends_jobs_in_one_line_and_those_that_come_later_go_on(tmp_path):
    folder = tmp_path / 'disk'
    mount_small_disk(folder, megabytes=1)
    try:
        jobs = Jobs(str(folder / 'pool'), tmp_path, max_iters=160, inner_steps=2, grace_s=1.0)
        results = jobs.start('a').start('b', ranks=2).wait()
        assert any('No space left on device' in str(result) for result in results.values()), results
        for path in folder.glob('pool/**/*.json'):
            json.loads(path.read_text())
        assert not [*folder.glob('pool/**/*.tmp')]
        mount('-o', 'remount,size=64m', str(folder))
        results = jobs.start('c').wait()
        check(jobs, results)
    finally:
        undo(folder)
