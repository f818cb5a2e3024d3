"""
One job's part in a pool: DiLoCo among jobs that share nothing but a folder or a bucket.

    replica = Replica(config, outer, identity, say)           # joins the pool and loads its newest outer state
    while part := replica.claim():                             # (k, first, end): read replica k's data of these steps
        ...                                                    # inner steps; after each, if replica.round_is_over():
        replica.meet()                                         # delivers the delta, waits for the others, outer step

The files of a pool. All of them except alive/ are created only if absent (store.py) and never change:

    pool.json                    the pool's name, and the keys that must be the same in all of its jobs
    alive/ID                     its content changes as long as job ID is alive
    rounds/000007/claim_02       ID: the job that trains on piece 2 of this round (ledger.py)
    rounds/000007/delta_02_0000  anchor - theta: the rows of rank 0 of that job, encoded as exchange_dtype says
    rounds/000007/delta_02.json  the delta's marker, written after its files: job, number of steps, xxh128 of the files,
                                 digest of the outer state that it began from
    commits/000007.json          which deltas count, in which order; the commits alone are the pool's history
    outer/000010_ID_model_0000   a snapshot before round 10, written by job ID: its rank 0's rows of the outer
    outer/000010_ID_momentum_0000     parameters, and of the outer momentum
    outer/000010.json            the snapshot's marker, written after its files

    claim -> train -> write delta -> write its marker -> [close the round] -> read the others' deltas -> outer step
      ^ a free piece     |                                the first job that finds the round complete            |
      |                  |                                creates its commit; the others use that commit         |
      |                  +-> if the job dies before its marker is written, its piece is returned,                |
      |                      and some job claims it in a later round                                             |
      +----------------------------------------------------------------------------------------------------------+

A round is complete when `quorum` deltas have arrived and every expected job has delivered. Expected are the jobs that
hold a claim and, while unclaimed pieces are left, the jobs whose deltas were in the last round. After the quorum the
round waits at most grace_s for the others, by the clock of the job that looks, and it does not wait for a job whose
alive/ID has not changed for grace_s. A job that is still training sees the first deltas as well: it delivers the steps
it has done when half of grace_s has passed, or at once if it joined in this round.

A delta counts only if a commit lists it. Otherwise it is ignored and the next ledger returns its piece, so that no
window of data counts twice.

All jobs sum the listed deltas in the listed order, weighted by their steps, on the host in fp32, and take the same
outer step. So all hold the same bits, however many ranks each has. Each delta and each commit names the digest of the
outer state that it began from, by which a job notices that its own state differs, and loads a snapshot again. The
state that most deltas of a round name is the right one: a job with another one does not close the round.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import time
import uuid
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from configurator import refuse_gone
from exchange.codec import decode_flat, encode_flat, encoded_bytes
from keys import GONE
from knobs import read_knobs
from pieces import is_finite
from pool.ledger import Ledger
from pool.objects import COMMIT, POOL, SNAPSHOT, read_object, refuse_commit, refuse_ledger
from pool.round_watch import RoundWatch
from pool.rows import checksum, copies, rows_of
from pool.store import digest_of, open_store
from system.collectives import on_rank_0
from system.files import ROOT, no_link, write_file

# Keys whose values may differ between the jobs of a pool: files, logs, hardware, speed.
OWN_KEYS = {key for key, knob in read_knobs(Path(ROOT, 'train_pool.py')).items() if 'per job' in knob.tags}


def take_from_pool(config):
    """Give num_replicas and global_batch_size, where they are None, the values of the pool that the job joins. Raises
    ValueError if the pool's keys are missing."""
    if not config.exchange:
        raise ValueError('where do the jobs meet? Give --exchange=FOLDER, or an address such as s3://bucket/name')
    if importlib.util.find_spec('xxhash') is None:
        raise ValueError('exchange needs a package that is missing: pip install xxhash')
    derived = [key for key in ('num_replicas', 'global_batch_size') if vars(config)[key] is None]
    with contextlib.suppress(FileNotFoundError):  # this job founds the pool
        form = {'keys': dict.fromkeys(derived, int)}
        pool = read_object(open_store(config.exchange), 'pool.json', form) if derived else {}
        for key in derived:
            if pool['keys'][key] < 1:
                raise ValueError(
                    f'{config.exchange}/pool.json: keys.{key}: found {pool["keys"][key]}, expected 1 or more'
                )
            setattr(config, key, pool['keys'][key])
    if config.num_replicas is None:
        raise ValueError(f'exchange={config.exchange}: say how many replicas share a batch, as --num_replicas=8')


class Damaged(Exception):
    """An object of the pool is damaged, missing or does not fit; the message says which and why."""


def without_none(value):
    """The value of a key; if that is a dict, without what is None in it."""
    return {key: one for key, one in value.items() if one is not None} if isinstance(value, dict) else value


class Replica:
    """One job in a pool. All ranks of the job make the same calls; each is collective.

    config: the keys of train_pool.py. outer: a diloco.Outer over this job alone, with one fragment. identity: from
    runtime.identity: what data and model are. say: function called on rank 0 with a line. waiting: function called
    on every rank from time to time while the job waits for others; if it returns true, the job stops waiting.
    Raises ValueError on every rank if the pool belongs to a different run, or if the store cannot hold a pool.
    """

    def __init__(self, config, outer, identity, say, waiting=lambda: None):
        self.config, self.outer, self.say, self.waiting = config, outer, say, waiting
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        (self.fragment,) = outer.fragments
        self.shapes = [parameter.shape for parameter in self.fragment.parameters.values()]
        self.name = on_rank_0(lambda: f'{os.uname().nodename.partition(".")[0]}-{uuid.uuid4().hex[:12]}')
        self.ledger = Ledger(config.max_iters, config.inner_steps, config.num_replicas)
        self.ledger.begin_at(outer.step_of_anchors())  # above 0 if this job founds the pool with a run's checkpoint
        feeds_back = config.error_feedback and config.exchange_dtype != 'float32'
        self.error = torch.zeros_like(self.fragment.anchor, device='cpu') if feeds_back else None
        self.number, self.k, self.own, self.average, self.members = None, None, None, None, set()
        self.parts, self.steps, self.began = [], 0, None  # of the piece: parts left, steps done, begun when
        # Reused in each round, which is three times as fast as memory that the system has to find first.
        self.sum, self.theirs = torch.empty(2, self.fragment.anchor.numel())
        self.parent, self.is_odd, self.watch, self.noted = None, False, None, None
        self.bytes_read = self.bytes_written = 0
        self.writer = ThreadPoolExecutor(1)  # one thread to the end, by which the meter knows what goes to no rank
        self.store = open_store(config.exchange)
        self.pool = on_rank_0(self._enter, identity)
        if config.replay:
            return
        self._load()
        self.watch = RoundWatch(self.store, self.name, config.grace_s, config.quorum)
        if self.rank == 0:
            self.watch.begin(self.ledger, self.members)
            self.watch.beat()
            self.watch.thread.start()
        self.say(f'this is job {self.name} of pool {self.pool}, which has done {self.ledger.round} rounds')
        self._ask()

    def _enter(self, identity):
        """Create the pool, or check that it belongs to this run. Returns its name. Called on rank 0 through
        on_rank_0(), so that an error is raised on all ranks."""
        keys = {key: value for key, value in vars(self.config).items() if key not in OWN_KEYS} | identity
        shapes = {name: list(parameter.shape) for name, parameter in self.fragment.parameters.items()}
        keys['trained'] = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]
        keys = json.loads(json.dumps(keys))
        names = [name for name in self.store.list('') if not name.startswith('probe_')]
        if 'pool.json' not in names:
            if names or self.config.replay:
                holds = names[0] if names else 'nothing'
                raise ValueError(
                    f'exchange={self.config.exchange} holds {holds} and no pool.json: it is no pool; look at the '
                    'address, or begin one in an empty place'
                )
            self.store.probe()
            self.store.create('pool.json', json.dumps({'name': self.name, 'keys': keys}, indent=1).encode())
        pool = read_object(self.store, 'pool.json', POOL)
        refuse_gone(pool['keys'], f'exchange={self.config.exchange}: the pool trains', 'begin another pool')
        for key in {**keys, **pool['keys']}:
            # None is what a key means that the version which began the pool did not have, in `model` as well.
            theirs, ours = (without_none(keys_of.get(key)) for keys_of in (pool['keys'], keys))
            if theirs != ours and key not in GONE:
                raise ValueError(
                    f'exchange={self.config.exchange}: the pool has {key}={theirs!r}, this job has {ours!r}: start all '
                    'jobs with the same keys on the same data, or use another --exchange'
                )
        if not self.config.replay:
            self.store.probe()
        return pool['name']

    # --- the outer state ---------------------------------------------------------------------------------------------

    def digest(self):
        """A digest of the outer parameters and momentum: equal bits give equal digests, on any number of ranks."""
        parts = self.fragment.anchor, self.fragment.momentum
        return '-'.join(checksum(flat.cpu(), self.shapes, self.ranks, self.rank) for flat in parts)

    def _load(self):
        """Load the newest snapshot and take the outer steps of all rounds since then. A new pool has none; then this
        job's own parameters become its first snapshot."""
        while True:
            newest = self._snapshots()[-1:]
            if not newest:
                self.state = self.digest()
                self._save()
                continue
            try:
                self._read_snapshot(newest[0])
                self.state = self.digest()
                self._catch_up()
                if self.rank == 0 and self.ledger.round and not self.config.replay:
                    self._note_rounds()
                if self.rank == 0 and self.watch:
                    self.watch.begin(self.ledger, self.members)
                return
            except Damaged as reason:  # if its files were deleted meanwhile, there is a newer snapshot: load that one
                if self._snapshots()[-1:] == newest:
                    raise ValueError(f'exchange={self.config.exchange}: {reason}; wait for the next snapshot') from None

    def _snapshots(self):
        return on_rank_0(lambda: [name for name in self.store.list('outer') if re.fullmatch(r'\d{6}\.json', name)])

    def _read_snapshot(self, name):
        marker = on_rank_0(self._snapshot, name)
        if marker is None:
            raise Damaged(f'outer/{name} is gone')
        for kind, flat in (('model', self.fragment.anchor), ('momentum', self.fragment.momentum)):
            files = [f'outer/{marker["files"]}_{kind}_{rank:04}' for rank in range(len(marker['xxh128'][kind]))]
            numbers, problem = self._read_rows(files, marker['xxh128'][kind], 'float32')
            if problems := [problem for problem in self._all_gather(problem) if problem]:
                raise Damaged(problems[0])
            flat.copy_(numbers)
        if self.digest() != marker['state']:
            raise Damaged(f'outer/{name} does not have the digest that it should have')
        self.ledger.load(marker['ledger'])
        self.parent, self.members = marker.get('parent'), {*marker['members']}
        self.number = self.own = self.average = None
        self._restart()

    def _snapshot(self, name):
        """What a snapshot says; None if it is gone."""
        with contextlib.suppress(FileNotFoundError):
            marker = read_object(self.store, f'outer/{name}', SNAPSHOT)
            refuse_ledger(marker['ledger'], self.ledger, f'{self.store.address}/outer/{name}')
            return marker

    def _restart(self):
        self.outer.restart_from_anchors()
        self.fragment.begin_at(self.ledger.step)

    def _all_gather(self, value):  # [value of rank 0, value of rank 1, ...]
        values = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values

    def _save(self):
        """Write a snapshot, and delete what is needed neither to begin from it nor from the snapshot before it."""
        parts = {'model': self.fragment.anchor.cpu(), 'momentum': self.fragment.momentum.cpu()}
        round, files, digests = self.ledger.round, f'{self.ledger.round:06}_{self.name}', {}
        for kind, flat in parts.items():
            digests[kind] = self._write(f'outer/{files}_{kind}', flat.view(torch.uint8).numpy().data)
        marker = {
            'files': files, 'ranks': self.ranks, 'xxh128': digests, 'state': self.state, 'ledger': self.ledger.state(),
            'parent': self.parent, 'members': sorted(self.members),
        }  # fmt: skip
        on_rank_0(lambda: self.store.create(f'outer/{round:06}.json', json.dumps(marker).encode()) and self._delete())

    def _delete(self):
        snapshots = self.store.list('outer')
        kept = sorted(name for name in snapshots if name.endswith('.json'))[-2:]
        if len(kept) < 2 or self.config.keep_deltas:
            return
        oldest = kept[0][:6]
        self.store.remove('outer', [name for name in snapshots if name[:6] < oldest])
        for round in [round for round in self.store.list('rounds') if round < oldest]:
            self.store.remove(f'rounds/{round}', self.store.list(f'rounds/{round}'))
            self.store.remove_folder(f'rounds/{round}')

    # --- files that all ranks write and read -------------------------------------------------------------------------

    def _write(self, name, data, meanwhile=lambda digests: None):
        """Write this rank's file name_RANK. Returns the digests of all ranks' files, [rank 0's, ...]. If one rank
        fails, all raise OSError. meanwhile: called with the digests while the file is being written."""
        written = self.writer.submit(self.store.create, f'{name}_{self.rank:04}', data)
        digests = self._all_gather(digest_of(data))
        meanwhile(digests)
        if problems := [problem for problem in self._all_gather(str(written.exception() or '')) if problem]:
            raise OSError(problems[0])
        self.bytes_written += len(data)
        return digests

    def _read_rows(self, files, digests, dtype):
        """Read this rank's numbers out of `files`, one for each rank of the job that wrote them. Returns (numbers,
        None), or (None, what is wrong with a file)."""
        mine, is_like_here = self.theirs, len(files) == self.ranks
        for rank, name in enumerate(files):
            pieces = copies(self.shapes, (self.ranks, self.rank), (len(files), rank))
            if not pieces:
                continue
            rows = (rows_of(shape[0], len(files), rank) for shape in self.shapes)
            n = sum((end - first) * shape[1:].numel() for (first, end), shape in zip(rows, self.shapes, strict=True))
            size, room = encoded_bytes(n, dtype), mine.view(torch.uint8).numpy().data if is_like_here else None
            try:
                data = self.store.read(name, room, most=size + 1)
            except FileNotFoundError:
                return None, f'{name} is missing'
            if len(data) != size or digest_of(data) != digests[rank]:
                return None, f'{name} is damaged ({len(data)} bytes)'
            self.bytes_read += len(data)
            with warnings.catch_warnings():
                warnings.filterwarnings('ignore', message='The given buffer is not writable')  # nobody writes there
                numbers = decode_flat(torch.frombuffer(data, dtype=torch.uint8), dtype)
            if is_like_here:  # with as many ranks, its rows are this rank's rows
                return numbers[: len(mine)], None
            for first, end, target in pieces:
                mine[target : target + end - first] = numbers[first:end]
        return mine, None

    def _commit_of(self, round):
        """The commit of a round; None if there is none."""
        name = f'commits/{round:06}.json'
        with contextlib.suppress(FileNotFoundError):
            commit = read_object(self.store, name, COMMIT)
            if round == self.ledger.round:
                refuse_commit(commit, self.ledger, f'{self.store.address}/{name}')
            return commit

    # --- a round -----------------------------------------------------------------------------------------------------

    def claim(self):
        """The next part to train, (k, first, end): read what replica k would read in the steps first to end - 1. It is
        the next one of the piece that this job holds; without one, the job claims a piece, if need be in a later round.
        None = the run is complete, or waiting() has ended the wait."""
        while not self.parts and not self.ledger.is_complete:
            number = on_rank_0(self._claim)
            if number is not None:
                self.number = number
                self.asked[1].wait()
                self._ask()  # the pending question was about the last round
                self.parts, self.began = self.ledger.piece(number), time.time()
                self.k = self.parts[0][0]
            elif commit := self._wait():
                self._apply(commit)
            else:
                break
        return self.parts.pop(0) if self.parts else None

    def _claim(self):
        """Claim a piece. Returns its number, or None if none is left in this round or the round is nearly over."""
        self.watch.look()
        if self.watch.is_committed or self.watch.enough_at is not None:  # a new claim would keep the others waiting
            return None
        # First choice: be replica k once more, since this job's optimizer state comes from that replica's data. Only
        # among the first len(members) pieces, which are claimed in any case, so that no earlier piece has to wait.
        again = [n for n in range(min(len(self.members), self.ledger.pieces)) if self.ledger.piece(n)[0][0] == self.k]
        for number in [*again, *range(self.ledger.pieces)]:
            claim = f'rounds/{self.ledger.round:06}/claim_{number:02}'
            if number not in self.watch.owners and self.store.create(claim, self.name.encode()):
                return number
        return None

    def _ask(self):
        """Start to ask rank 0 whether the round is over; round_is_over() reads the answer one step later."""
        is_over = False
        if self.rank == 0:
            patience = self.config.grace_s / 2 if self.name in self.members or not self.members else 0.0
            if self.steps:  # two steps earlier: the answer comes after one more step, and by then another one has begun
                patience -= 2 * (time.time() - self.began) / self.steps
            is_over = self.watch.is_committed or self.watch.waited_s > max(0.0, patience)
        flag = torch.tensor([float(is_over)])
        self.asked = flag, dist.broadcast(flag, 0, async_op=True)

    def round_is_over(self):
        """Call after each inner step: whether to stop training in this round, because the piece is done, or because the
        other jobs are, as rank 0 saw it one step ago."""
        self.steps += 1
        flag, work = self.asked
        work.wait()
        self._ask()
        return bool(flag.item()) or self.steps == sum(end - first for _, first, end in self.ledger.piece(self.number))

    @property
    def step(self):
        """The run's step by now: an estimate that assumes that this round advances at the pace of the last one."""
        return min(self.ledger.step + int(self.steps * self.ledger.pace), self.config.max_iters)

    def meet(self, leaves=False, facts=None):
        """Deliver what the inner steps have changed, wait until the round is closed, and take its outer step.

        leaves: this job ends, so deliver and do not wait. facts: a JSON-able dict for the journal. Returns the round's
        metrics.
        """
        began = time.perf_counter()
        self.bytes_read = self.bytes_written = 0
        if self.steps and not on_rank_0(lambda: self.watch.look() or self.watch.is_committed):
            self._deliver(leaves, facts)
        self.parts, self.steps = [], 0
        delivered = closed = time.perf_counter()
        if not leaves and (commit := self._wait()):
            closed = time.perf_counter()
            self._apply(commit)
        return {
            'pool/round': self.ledger.round,
            'pool/replicas': len(self.members),
            'diloco/momentum_norm': self._norm(self.fragment.momentum),
            'diloco/wait_s': closed - delivered,
            'diloco/transfer_s': time.perf_counter() - began - (closed - delivered),
            'diloco/bytes': self.bytes_written + self.bytes_read,
        }

    def _norm(self, flat):
        square = sum(torch.dot(part, part).double() for part in flat.split(2**20)).cpu()
        dist.all_reduce(square)
        return square.sqrt().item()

    def _deliver(self, leaves, facts):
        """Write this rank's rows of the pseudo-gradient and, when all ranks have written theirs, the marker."""
        dtype, name = self.config.exchange_dtype, f'rounds/{self.ledger.round:06}/delta_{self.number:02}'
        delta = self.outer.pseudo_gradient(self.fragment).cpu()
        if not all(self._all_gather(is_finite(delta.sum()) or is_finite(delta))):  # the sum alone may overflow
            raise ValueError(
                f'round {self.ledger.round}: this job has learned numbers that are not finite: nothing is given to the '
                'pool; look at its data and log, then start it again'
            )
        if self.error is not None:
            delta.add_(self.error)
        encoded = encode_flat(delta, dtype)
        decoded = decode_flat(encoded, dtype)[: len(delta)]
        self.own = name, decoded, None if self.error is None else delta.sub_(decoded)
        marker = {
            'pool': self.pool, 'job': self.name, 'steps': self.steps, 'piece': self.ledger.piece(self.number),
            'leaves': leaves, 'state': self.state, 'dtype': dtype, **(facts or {}),
            'out_dir': self.config.out_dir, 'began': self.began, 'gave': time.time(),
        }  # fmt: skip

        def all_deltas():  # on rank 0; None if more are to come
            self.watch.look()
            markers = {**self.watch.markers, self.number: marker}
            return markers if not self.watch.late and self.watch.are_enough(markers) else None

        def add_up(digests):
            """If this delta is the round's last one, sum all of them already while it is being written."""
            marker['xxh128'] = digests
            if markers := on_rank_0(all_deltas):
                self._sum(markers)

        self._write(name, encoded.numpy().data, meanwhile=add_up)
        on_rank_0(self.store.create, f'{name}.json', json.dumps(marker).encode())

    def _wait(self):
        """Wait for this round's commit, or create it once the round is complete. None if waiting() has ended the
        wait."""
        pause, began, patience = 0.01, time.monotonic(), self.config.grace_s
        while True:
            commit, markers = on_rank_0(self._look)
            if commit is None and markers is not None:
                commit = on_rank_0(self._commit, *self._sum(markers))
            if commit is not None:
                return commit
            if self.waiting():
                return None
            if self.rank == 0 and time.monotonic() - began > patience:
                self.say(f'round {self.ledger.round} {self._lacks()}, since {patience:.0f} s')
                patience *= 2
            time.sleep(pause)  # short at first, so that it does not lengthen the round
            pause = min(1.5 * pause, self.watch.pause)

    def _state_of_most(self, markers):
        """The digest of the outer state from which most deltas of this round began; in a tie, this job's own."""
        votes = Counter(marker['state'] for marker in markers.values() if marker['pool'] == self.pool)
        return max(votes, key=lambda state: (votes[state], state == self.state), default=self.state)

    def _lacks(self):  # on rank 0
        if (watch := self.watch).enough_at is None:
            has = f'has {len(watch.markers)} of quorum={watch.quorum} deltas'
            return f'{has}, and waits for more: start jobs, or this one again with a smaller --quorum'
        return f'waits for {", ".join(sorted(watch.late))}'

    def _look(self):
        """(the commit, None), or of a commit that others are to make only its state; or (None, {number: marker}) if the
        round can be closed with these deltas; or (None, None) if there is something to wait for."""
        (watch := self.watch).look()
        if watch.is_committed:
            return self._commit_of(self.ledger.round), None
        if watch.enough_at is not None and (not watch.late or watch.waited_s > self.config.grace_s):
            markers = dict(watch.markers)
            state = self._state_of_most(markers)
            # Outvoted, this job leaves the round to others; _apply() compares the state, and loads a snapshot.
            return (None, markers) if state == self.state else ({'state': state}, None)
        if not watch.markers and watch.owners and not watch.late and self.name not in watch.owners.values():
            return None, {}  # all jobs that held a claim are dead: an empty commit returns their pieces
        return None, None

    def _sum(self, markers):
        """Set self.average to the mean of the deltas, weighted by their steps. Returns ({number: marker} of those that
        count, {number: why not} of the others)."""
        rejected, contents = {}, {number: (marker['xxh128'], marker['steps']) for number, marker in markers.items()}
        if self.average and self.average[0] == contents:
            return markers, {}
        for number, marker in markers.items():
            shares = sum(end - first for _, first, end in self.ledger.piece(number))
            if marker['pool'] != self.pool or marker['dtype'] != self.config.exchange_dtype:
                rejected[number] = f'of another pool ({marker["pool"]})'
            elif marker['state'] != self.state:
                rejected[number] = f'began from another outer state, {marker["state"]}'
            elif marker['steps'] not in range(1, shares + 1):
                rejected[number] = f'{marker["steps"]} steps of {shares}'
            elif not marker['xxh128']:
                rejected[number] = 'names no files'
        is_careful = False
        while True:
            counted = {number: marker for number, marker in sorted(markers.items()) if number not in rejected}
            total = sum(marker['steps'] for marker in counted.values())
            average, problems = None, {}
            for number, marker in counted.items():
                numbers, problem = self._numbers_of(number, marker)
                if is_careful and not problem and not is_finite(numbers):
                    problem = 'has numbers that are not finite'
                if problem:
                    problems[number] = problem
                elif average is None:
                    average = torch.mul(numbers, marker['steps'] / total, out=self.sum)
                else:
                    average.add_(numbers, alpha=marker['steps'] / total)
            is_good = is_careful or average is None or is_finite(average.sum())
            problems_by_rank, are_good = zip(*self._all_gather((problems, is_good)), strict=True)
            problems = {
                number: problem for rank_problems in problems_by_rank for number, problem in rank_problems.items()
            }
            if not problems and all(are_good):
                self.average = {number: contents[number] for number in counted}, average
                return counted, rejected
            rejected |= problems
            is_careful = not all(are_good)  # the sum is not finite: check each delta, to see which one is to blame

    def _numbers_of(self, number, marker):
        """(this rank's numbers of a delta, None), or (None, why it cannot be used)."""
        name = f'rounds/{self.ledger.round:06}/delta_{number:02}'
        if self.own and self.own[0] == name and marker['job'] == self.name:
            return self.own[1], None
        files = [f'{name}_{rank:04}' for rank in range(len(marker['xxh128']))]
        return self._read_rows(files, marker['xxh128'], marker['dtype'])

    def _commit(self, counted, rejected):
        """Create this round's commit, unless another job was quicker. Returns the one that is there."""
        owners = self.watch.owners
        commit = {
            'pool': self.pool, 'round': self.ledger.round, 'parent': self.parent, 'state': self.state,
            'closer': self.name, 'claims': 1 + max([*owners, *counted], default=-1),
            'deltas': [{**marker, 'number': number} for number, marker in counted.items()],
            'rejected': [{'number': number, 'why': why} for number, why in rejected.items()],
            'lost': [{'number': n, 'job': job} for n, job in owners.items() if n not in counted],
            'time': time.time(),
        }  # fmt: skip
        self.store.create(f'commits/{self.ledger.round:06}.json', json.dumps(commit).encode())
        return self._commit_of(self.ledger.round)

    def _apply(self, commit):
        """Take the outer step of a commit. If this job's state or a delta's file differs from what the commit says,
        load the newest snapshot instead."""
        if commit['state'] != self.state:
            if self.is_odd:
                raise ValueError(
                    f'exchange={self.config.exchange}: round {self.ledger.round} began from outer parameters with the '
                    f'digest {commit["state"]}, here it is {self.state}: another version of torch, or faulty hardware'
                )
            self.say(f'WARNING: the outer parameters are not those of round {self.ledger.round}: loading them')
            self.is_odd = True
            return self._load()
        try:
            self._step(commit)
        except Damaged as reason:
            self.say(f'round {self.ledger.round}: {reason}; beginning again from the newest snapshot')
            return self._load()
        self.is_odd = False
        every, step = self.config.checkpoint_interval, self.ledger.step
        is_due = self.ledger.is_complete or (every and step // every > self.step_before // every)
        if is_due and commit['closer'] == self.name:
            self._save()

    def _step(self, commit):
        markers = {delta['number']: delta for delta in commit['deltas']}
        if rejected := markers and self._sum(markers)[1]:
            raise Damaged(f'a delta that counts, {next(iter(rejected))}, {next(iter(rejected.values()))}')
        self.step_before = self.ledger.step
        self.ledger.advance(commit)
        if markers:  # a step without deltas would move the parameters by the momentum alone
            self.outer.step_with(self.fragment, self.average[1], self.ledger.step)
        else:
            self._restart()
        if self.own and self.own[2] is not None and self.name in {marker['job'] for marker in markers.values()}:
            self.error = self.own[2]
        self.members = {marker['job'] for marker in markers.values() if not marker.get('leaves')}
        self.parent = hashlib.sha256(json.dumps(commit).encode()).hexdigest()
        self.number = self.own = self.average = None
        self.state = self.digest()
        if self.rank == 0 and not self.config.replay:
            self._note_rounds({**commit, 'digest': self.state, 'applied': time.time()})
            if self.watch:
                self.watch.begin(self.ledger, self.members)

    def _catch_up(self, until=None):
        """Take the outer steps of all commits so far, or only of those before round `until`."""
        while self.ledger.round != until:
            commit = on_rank_0(self._commit_of, self.ledger.round)
            if commit is None:
                return
            if commit['state'] != self.state:
                raise Damaged(f'round {self.ledger.round} began from {commit["state"]}, and here it is {self.state}')
            self._step(commit)

    def replay(self):
        """Compute the outer parameters again, from the oldest snapshot and the deltas of all rounds since then.

        This compares the digest that each commit began from, and that of each snapshot. Returns a line that says what
        was compared. Raises ValueError if a digest differs or a delta is damaged.
        """
        (oldest, *others), first = self._snapshots(), 0
        try:
            self._read_snapshot(oldest)
            first, self.state = self.ledger.round, self.digest()
            for snapshot in on_rank_0(lambda: [self._snapshot(name) for name in others]):
                self._catch_up(snapshot['ledger']['round'])
                if self.state != snapshot['state']:
                    raise Damaged(f'the snapshot of round {self.ledger.round} has another digest, {snapshot["state"]}')
            self._catch_up()
        except Damaged as reason:
            later = [int(name[:6]) for name in others if int(name[:6]) > self.ledger.round]
            begin = f'; from round {later[0]} on it could be done, if outer/ held no older snapshots' if later else ''
            raise ValueError(
                f'exchange={self.config.exchange}: round {self.ledger.round} cannot be computed again: {reason}{begin}'
            ) from None
        gone = f'; what is before round {first} was deleted, as without --keep_deltas' if first else ''
        return f'rounds {first} to {self.ledger.round - 1} and {len(others)} snapshots: equal to the bit{gone}'

    def leave(self):
        """Leave the pool: from here on the other jobs do not wait for this one."""
        self.asked[1].wait()
        if self.rank == 0:
            self.watch.close()

    # --- the journal -------------------------------------------------------------------------------------------------

    def _note_rounds(self, last=None):
        """Append to out_dir/rounds.jsonl all rounds that it lacks, each once and in order, including those before this
        job joined. last: the row of the last round; for others, their commit is the row."""
        path = os.path.join(self.config.out_dir, 'rounds.jsonl')
        if self.noted is None:
            lines = open(path, encoding='utf-8').read().split('\n')[:-1] if os.path.exists(path) else []
            lines = [line for line in lines if json.loads(line)['pool'] == self.pool]  # a torn line has no end
            write_file(path, ''.join(line + '\n' for line in lines))
            self.noted = len(lines)
        with open(path, 'a', encoding='utf-8', opener=no_link) as file:
            for round in range(self.noted, self.ledger.round):
                row = last if last and last['round'] == round else self._commit_of(round)
                file.write(json.dumps(row) + '\n')
                self.noted = round + 1
