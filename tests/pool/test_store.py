"""The store of a pool over a network that fails now and then."""

import pytest

from pool import store

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
