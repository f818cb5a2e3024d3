"""The store of a pool over a network that fails now and then."""

import json
import os

import pytest

from pool import store
from pool.ledger import Ledger
from pool.objects import COMMIT, SNAPSHOT, read_object, refuse_commit, refuse_ledger
from pool.round_watch import RoundWatch

METHODS = ('_create', '_replace', '_read', '_list', '_remove', '_time_of')


class SSLError(Exception):
    """As botocore's: it says nothing by which one could tell whether to try again."""


class Faltering(store.Folder):
    """Every call fails, and works when it is repeated."""

    def __init__(self, path):
        super().__init__(path)
        self.calls = dict.fromkeys(METHODS, 0)


def falter(method):
    def call(self, *arguments):
        self.calls[method] += 1
        if self.calls[method] % 2:
            raise SSLError('SSL validation failed for https://bucket: bad record mac')
        return getattr(store.Folder, method)(self, *arguments)

    return call


for method in METHODS:
    setattr(Faltering, method, falter(method))


def test_whatever_a_network_raises_is_tried_again_in_every_call(tmp_path, monkeypatch):
    monkeypatch.setattr(store, 'PAUSES_S', (0, 0))
    # One after the other, so that it is known which call fails.
    monkeypatch.setattr(store.concurrent.futures.ThreadPoolExecutor, 'map', lambda self, f, items: map(f, items))
    there = Faltering(str(tmp_path / 'pool'))
    there.probe()
    assert there.create('deltas/1', b'mine') and not there.create('deltas/1', b'theirs')
    assert there.read('deltas/1') == b'mine' and there.list('deltas') == ['1']
    there.replace('deltas/2', b'alive')
    there.remove('deltas', ['1'])
    assert there.list('deltas') == ['2'] and all(calls >= 2 for calls in there.calls.values())


def test_a_network_that_does_not_come_back_ends_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(store, 'PAUSES_S', (0, 0))

    def fail(name):
        raise SSLError('SSL validation failed\n for https://bucket')

    there = store.Folder(str(tmp_path))
    monkeypatch.setattr(there, '_time_of', fail)
    with pytest.raises(OSError, match='^cannot read .*/its clock: SSL validation failed for https://bucket$'):
        there.probe()


# --- what a faulty or hostile job may write ---------------------------------------------------------------------------

DEEP = b'[' * 200_000 + b']' * 200_000
HOSTILE = {
    'claim_00': [b'\xff\xfe', b'../../../../dev/zero', b'', b'a/b', b'x' * 10**6, b'a\nb'],
    'delta_00.json': [b'{"job": [1]}', b'{"job": "../../x"}', b'{"job": "x", "steps": "1"}', b'3', b'[]', DEEP, b'\xff']
    + [b'{"job": "x", "xxh128": {"a": 1}}', b'{"job": "x", "leaves": 1}', b'{"job": ' + b'1' * 2**21 + b'}'],
}


@pytest.mark.parametrize('name, data', [(name, data) for name, found in HOSTILE.items() for data in found])
def test_a_claim_or_marker_that_is_none_counts_as_not_there(tmp_path, name, data):
    there = store.open_store(str(tmp_path))
    there.create(f'rounds/000000/{name}', data)
    there.create('rounds/000000/claim_01', b'good')
    there.create('alive/good', b'1')
    watch = RoundWatch(there, 'me', grace_s=30, quorum=1)
    watch.begin(Ledger(10, 5, 2), set())
    watch.look()
    assert watch.owners == {1: 'good'} and watch.late == {'good'}
    assert not any(value is not None for marker in watch.markers.values() for value in marker.values())


def test_links_pipes_and_devices_in_a_pool_are_neither_read_nor_listed_nor_deleted(tmp_path):
    (tmp_path / 'home').mkdir()
    (tmp_path / 'home' / 'precious').write_text('mine')
    there = store.open_store(str(tmp_path / 'pool'))
    there.create('rounds/000001/claim_00', b'job')
    os.symlink(tmp_path / 'home', tmp_path / 'pool' / 'rounds' / '000000')
    assert there.list('rounds/000000') == []
    there.remove_folder('rounds/000000')
    assert (tmp_path / 'home' / 'precious').read_text() == 'mine'
    os.symlink('/dev/zero', tmp_path / 'pool' / 'zero')
    os.mkfifo(tmp_path / 'pool' / 'pipe')
    for name in ('zero', 'pipe'):
        with pytest.raises(FileNotFoundError):
            there.read(name)
    assert there.read('rounds/000001/claim_00', most=2) == b'jo' and not there.create('rounds/000001/claim_00', b'j')


LEDGER = {'round': 1, 'begun': 0, 'trained': 10, 'issued': 2, 'returned': [[0, 0, 5]], 'pace': 1.0}
DELTA = {'number': 0, 'pool': 'a', 'job': 'a', 'steps': 5, 'state': 'a-a', 'dtype': 'int4', 'xxh128': ['a']}
GOOD = {
    'snapshot': {'files': 'a', 'xxh128': {'model': ['a'], 'momentum': ['a']}, 'state': 'a-a', 'members': ['a']},
    'commit': {'state': 'a-a', 'closer': 'a', 'claims': 2, 'deltas': [DELTA]},
}
GOOD['snapshot']['ledger'] = LEDGER
SPOILT = [
    ('snapshot', {'files': '../../x'}, 'files: found'),
    ('snapshot', {'members': ['../x']}, r'members\[0\]: found'),
    ('snapshot', {'xxh128': []}, 'xxh128: found a list'),
    ('snapshot', {'ledger': {**LEDGER, 'steps': 10**9, 'trained': 10**9}}, 'ledger: found'),
    ('snapshot', {'ledger': {**LEDGER, 'returned': [[0, 0, 10**18]]}}, 'ledger: found'),
    ('snapshot', {'ledger': {**LEDGER, 'returned': [[0]]}}, 'ledger: found'),
    ('snapshot', {'ledger': {**LEDGER, 'pace': float('inf')}}, 'ledger: found'),
    ('commit', {'claims': 10**18}, 'found 1000000000000000000 claims .*expected pieces below 4'),
    ('commit', {'deltas': [{**DELTA, 'number': 3}]}, 'found 2 claims and the deltas .3.,'),
    ('commit', {'deltas': [{**DELTA, 'steps': -1}]}, r'deltas\[0\].steps: found -1'),
    ('commit', {'closer': ['a']}, r'closer: found \[.a.\], expected the name'),
]


@pytest.mark.parametrize('kind, change, said', [('snapshot', {}, None), ('commit', {}, None), *SPOILT])
def test_a_snapshot_or_commit_that_is_none_is_refused_in_one_line(tmp_path, kind, change, said):
    there, ledger = store.open_store(str(tmp_path)), Ledger(10, 5, 2)
    there.create('x.json', json.dumps({**GOOD[kind], **change}).encode())

    def read():
        found = read_object(there, 'x.json', SNAPSHOT if kind == 'snapshot' else COMMIT)
        if kind == 'snapshot':
            refuse_ledger(found['ledger'], ledger, 'x.json')
        else:
            refuse_commit(found, ledger, 'x.json')

    if said is None:
        read()
    else:
        with pytest.raises(ValueError, match=f'x.json: .*{said}'):
            read()
