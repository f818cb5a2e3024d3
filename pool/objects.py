"""
The small objects that the jobs of a pool write for each other, and the forms in which they are taken.

A job may be faulty, or somebody else's. What it writes must not end the other jobs, hang them, or name a file of
theirs: each object is read up to a size and checked before anything is done with it, see system.files.check_form().
That a job may give deltas that spoil the model is another matter: they are averaged as they are.
"""

import contextlib
import math

from system.files import LARGEST_JSON, bare_name, parse_json

LARGEST = 2**20  # bytes of a claim, a sign of life or a marker; one of a job with 1,000 ranks has 40 kB
MARKER = dict.fromkeys(('pool?', 'job?', 'state?', 'dtype?'), bare_name)
MARKER |= {'steps?': int, 'leaves?': bool, 'xxh128?': [bare_name]}
OF_DELTA = {'number': int, 'pool': bare_name, 'job': bare_name, 'steps': int, 'state': bare_name, 'dtype': bare_name}
COMMIT = {
    'state': bare_name,
    'closer': bare_name,
    'claims': int,
    'deltas': [{**OF_DELTA, 'xxh128': [bare_name], 'leaves?': (bool, None)}],
}
LEDGER = {'round': int, 'begun': int, 'trained': int, 'issued': int, 'returned': [[int]], 'pace': float}
SNAPSHOT = {
    'files': bare_name,
    'xxh128': {'model': [bare_name], 'momentum': [bare_name]},
    'state': bare_name,
    'ledger': LEDGER,
    'parent?': (bare_name, None),
    'members': [bare_name],
}
POOL = {'name': bare_name, 'keys': dict}


def read_object(store, name, form):
    """The content of an object of JSON. Raises ValueError if it does not have the form, FileNotFoundError."""
    return parse_json(store.read(name, most=LARGEST_JSON + 1), form, f'{store.address}/{name}')


def job_in(claim):
    """The name of the job in a claim; None if it holds no such name, and so counts as not there."""
    with contextlib.suppress(ValueError):  # as UnicodeDecodeError is
        return bare_name(claim.decode(), 'a claim')


def marker_in(data):
    """The contents of a delta's marker, with None for what it lacks; without any contents if it is not a marker, and so
    counts for nothing."""
    marker = dict.fromkeys(name.removesuffix('?') for name in MARKER)
    with contextlib.suppress(ValueError):
        return marker | parse_json(data, MARKER, 'a marker')
    return marker


def refuse_ledger(state, ledger, where):
    """Raise ValueError if the state of a ledger in a snapshot cannot be that of this run. ledger: the job's own."""
    end = ledger.steps * ledger.replicas
    parts = all(len(part) == 3 and part[0] < ledger.replicas and part[2] <= ledger.steps for part in state['returned'])
    if not parts or max(state['trained'], state['issued']) > end or not 0 < state['pace'] < math.inf:
        raise ValueError(f'{where}: ledger: found {ascii(state)[:100]}, expected one of a run of {ledger.steps} steps')


def refuse_commit(commit, ledger, where):
    """Raise ValueError if a commit names pieces that this round does not have."""
    numbers = [delta['number'] for delta in commit['deltas']]
    if commit['claims'] > ledger.pieces or max(numbers, default=-1) >= commit['claims']:
        found = f'{commit["claims"]} claims and the deltas {ascii(numbers)[:60]}'
        raise ValueError(f'{where}: found {found}, expected pieces below {ledger.pieces}')
