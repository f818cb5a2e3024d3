"""
One job's part in a pool: DiLoCo among jobs that share a folder or a bucket, and nothing else.

    replica = Replica(config, outer, identity, say)           # joins: the newest outer state, within one round
    while part := replica.claim():                             # whose data: as replica k, steps first to end - 1
        ...                                                    # inner steps; after each, if replica.round_is_over():
        replica.meet()                                         # gives the delta, waits for the others, outer step

What lies in a pool. All but alive/ is made by create-if-absent (store.py) and never changes:

    pool.json                   the pool's name and keys, of which no job may have others
    alive/ID                    content that changes while job ID lives
    rounds/000007/claim_02      ID: the job that trains on piece 2 of this round (ledger.py)
    rounds/000007/delta_02_0000 anchor - theta, the rows of rank 0 of that job, as exchange_dtype encodes them
    rounds/000007/delta_02.json last: which job, how many steps, xxh128 of the files, digest of the state it began from
    commits/000007.json         which deltas count, in which order: this one decides, and is all of the pool's history
    outer/000010.json           last: a snapshot of the outer parameters and momentum before round 10,
    outer/000010_ID_0000        as the ranks of job ID wrote them

    claim -> train -> write delta -> write its marker -> [close the round] -> read the others' deltas -> outer step
       ^ the lowest free piece        |                   who first finds it complete creates its commit; whoever    |
       |                              +-> dead here: the  comes second takes the first one's, and drops its own       |
       +--------------------------------- piece is returned, and had by somebody in the next round -------------------+

A round is complete when every job that is expected has delivered: the jobs that hold a claim, and those whose deltas
were in the last round. It is also complete when `quorum` deltas have been there for grace_s, by the clock of the job
that looks. A job that is still training sees the first deltas as well: it gives what it has when half of that time has
passed, or at once if it has joined in this round. A job whose alive/ID has not changed for grace_s is not waited for.
What counts is decided in one place, so no window of data counts twice: a delta counts only if a commit lists it. Else
it is ignored, and the next ledger returns its piece.

All jobs sum the listed deltas in the listed order, weighted by their steps, on the host in fp32, and take the same
outer step: so all hold the same bits, however many ranks each has. A delta names the digest of the state that it began
from, and so does a commit: a job that differs notices, and begins again from a snapshot.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import time
import uuid
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from configurator import read_knobs
from exchange.codec import decode_flat, decode_top2bit, encode_flat, encode_top2bit
from pool.ledger import Ledger
from pool.round_watch import RoundWatch
from pool.rows import checksum, copies, shapes_of
from pool.store import digest_of, open_store
from runtime.checkpoint import is_finite
from runtime.files import ROOT, write_file
from runtime.processes import on_rank_0

# Keys that jobs of one pool may each have their own value of: files, logs, hardware, speed.
OWN_KEYS = {key for key, knob in read_knobs(Path(ROOT, 'train_pool.py')).items() if 'per job' in knob.tags}


def number_of_replicas(config):
    """Replicas that share a global batch: num_replicas, or the pool's. Raises ValueError for keys that do not fit."""
    if not config.exchange:
        raise ValueError('where do the jobs meet? Give --exchange=FOLDER, or an address such as s3://bucket/name')
    if importlib.util.find_spec('xxhash') is None:
        raise ValueError('exchange needs a package that is missing: pip install xxhash')
    if config.quorum < 1 or config.grace_s <= 0:
        raise ValueError(f'quorum={config.quorum}, grace_s={config.grace_s}: expected 1 or more deltas, and seconds')
    if config.num_replicas is None:
        with contextlib.suppress(FileNotFoundError):
            return json.loads(open_store(config.exchange).read('pool.json'))['keys']['num_replicas']
    if (config.num_replicas or 0) < 1:
        raise ValueError(f'exchange={config.exchange}: say how many replicas share a batch, as --num_replicas=8')
    return config.num_replicas


class Damaged(Exception):
    """What a pool holds cannot be used, or is no longer there; the message says why."""


class Replica:
    """One job in a pool. All ranks of the job make the same calls; each is collective.

    config: the keys of train_pool.py. outer: a diloco.Outer of this job alone, in one fragment. identity: of
    begin.identity_of(), what data and model are. say: function called on rank 0 with a line. waiting: function called
    on every rank now and then while the job waits for others; if it is true there, it waits no longer.
    Raises ValueError in one line, on every rank, where the pool is of another run, or the store not fit for one.
    """

    def __init__(self, config, outer, identity, say, waiting=lambda: None):
        self.config, self.outer, self.say, self.waiting = config, outer, say, waiting
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        (self.fragment,) = outer.fragments
        self.shapes = [parameter.shape for parameter in self.fragment.parameters.values()]
        self.name = on_rank_0(lambda: f'{os.uname().nodename.partition(".")[0]}-{uuid.uuid4().hex[:12]}')
        self.ledger = Ledger(config.max_iters, config.inner_steps, config.num_replicas)
        self.ledger.begin_at(outer.step_of_anchors())  # of a run that this one goes on with, if it founds the pool
        feeds_back = {'top2bit': True, 'float32': False}.get(config.exchange_dtype, config.error_feedback)
        self.error = torch.zeros_like(self.fragment.anchor, device='cpu') if feeds_back else None
        self.number, self.k, self.own, self.average, self.members = None, None, None, None, set()
        self.parts, self.steps, self.began = [], 0, None  # of the piece: what is left to begin, inner steps done, since
        # Used again in each round: that is three times as fast as memory that the system has to find.
        self.sum, self.theirs = torch.empty(2, self.fragment.anchor.numel())
        self.parent, self.is_odd, self.watch, self.noted = None, False, None, None
        self.bytes_read = self.bytes_written = 0
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
        """Found the pool, or check that it is this run's; returns its name. On rank 0, which raises for all."""
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
        pool = json.loads(self.store.read('pool.json'))
        for key in {**keys, **pool['keys']}:
            theirs, ours = pool['keys'].get(key), keys.get(key)
            if theirs != ours:
                raise ValueError(
                    f'exchange={self.config.exchange}: the pool has {key}={theirs!r}, this job has {ours!r}: start all '
                    'jobs with the same keys on the same data, or use another --exchange'
                )
        if not self.config.replay:
            self.store.probe()
        return pool['name']

    # --- the outer state ---------------------------------------------------------------------------------------------

    def digest(self):
        """Of the outer parameters and momentum: the same for jobs that hold the same bits, on any number of ranks."""
        parts = self.fragment.anchor, self.fragment.momentum
        return '-'.join(checksum(flat.cpu(), self.shapes, self.ranks, self.rank) for flat in parts)

    def _load(self):
        """Take the newest snapshot, or make the first one of what the parameters are, and all rounds since."""
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
            except Damaged as reason:  # or what is needed has been deleted meanwhile: then there is a newer one
                if self._snapshots()[-1:] == newest:
                    raise ValueError(f'exchange={self.config.exchange}: {reason}; wait for the next snapshot') from None

    def _snapshots(self):
        return on_rank_0(lambda: [name for name in self.store.list('outer') if name.endswith('.json')])

    def _read_snapshot(self, name):
        marker = on_rank_0(lambda: self._read_json(f'outer/{name}'))
        if marker is None:
            raise Damaged(f'outer/{name} is gone')
        for kind, flat in (('model', self.fragment.anchor), ('momentum', self.fragment.momentum)):
            files = [f'outer/{marker["files"]}_{kind}_{rank:04}' for rank in range(marker['ranks'])]
            numbers, problem = self._read_rows(files, marker['xxh128'][kind], 'float32')
            if problems := [problem for problem in self._all_gather(problem) if problem]:
                raise Damaged(problems[0])
            flat.copy_(numbers)
        if self.digest() != marker['state']:
            raise Damaged(f'outer/{name} does not have the digest that it should have')
        self.ledger.load(marker['ledger'])
        self.parent, self.members = marker['parent'], {*marker['members']}
        self.number = self.own = self.average = None
        self._restart()

    def _restart(self):
        self.outer.restart_from_anchors()
        self.fragment.begin_at(self.ledger.step)

    def _all_gather(self, value):  # [that of rank 0, of rank 1, ...]
        values = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values

    def _save(self):
        """Write a snapshot, and delete what nobody needs who begins from it or from the one before."""
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
        """Write this rank's file name_RANK; [digest of rank 0's, ...]. Raises on all ranks what went wrong on one.
        meanwhile: called with the digests while the disk, or the network, is busy."""
        with ThreadPoolExecutor(1) as thread:
            written = thread.submit(self.store.create, f'{name}_{self.rank:04}', data)
            digests = self._all_gather(digest_of(data))
            meanwhile(digests)
        if problems := [problem for problem in self._all_gather(str(written.exception() or '')) if problem]:
            raise OSError(problems[0])
        self.bytes_written += len(data)
        return digests

    def _read_rows(self, files, digests, dtype):
        """(this rank's numbers, None) out of the files of the ranks of some job, or (None, what is wrong with them)."""
        mine, is_like_here = self.theirs, len(files) == self.ranks
        for rank, name in enumerate(files):
            pieces = copies(self.shapes, (self.ranks, self.rank), (len(files), rank))
            if not pieces:
                continue
            try:
                data = self.store.read(name, mine.view(torch.uint8).numpy().data if is_like_here else None)
            except FileNotFoundError:
                return None, f'{name} is missing'
            if digest_of(data) != digests[rank]:
                return None, f'{name} is damaged ({len(data)} bytes)'
            self.bytes_read += len(data)
            with warnings.catch_warnings():
                warnings.filterwarnings('ignore', message='The given buffer is not writable')  # nobody writes there
                numbers = self._decode(torch.frombuffer(data, dtype=torch.uint8), dtype, len(files), rank)
            if is_like_here:  # the same rows
                return numbers[: len(mine)], None
            for first, end, target in pieces:
                mine[target : target + end - first] = numbers[first:end]
        return mine, None

    def _encode(self, delta):
        """This rank's rows, flat fp32, as exchange_dtype: uint8 (bytes)."""
        dtype = self.config.exchange_dtype
        if dtype == 'top2bit' and len(delta):
            shapes = shapes_of(self.shapes, self.ranks, self.rank)
            parts = zip(delta.split([shape.numel() for shape in shapes]), shapes, strict=True)
            return encode_top2bit([part.view(shape) for part, shape in parts], self.config.exchange_k)
        return encode_flat(delta, dtype)

    def _decode(self, payload, dtype, ranks, rank):
        """The rows of a rank of a job of so many, flat fp32; padding may follow them."""
        if dtype != 'top2bit' or not len(payload):  # or of a rank without rows
            return decode_flat(payload, dtype)
        shapes = shapes_of(self.shapes, ranks, rank)
        places, numbers = decode_top2bit(payload, shapes, self.config.exchange_k)
        return torch.zeros(sum(shape.numel() for shape in shapes)).index_put_((places,), numbers)

    def _read_json(self, name):
        with contextlib.suppress(FileNotFoundError):
            return json.loads(self.store.read(name))

    # --- a round -----------------------------------------------------------------------------------------------------

    def claim(self):
        """(k, first, end): read what replica k does, in steps first to end - 1. Of the piece that this job has, or else
        it claims one, and waits for it. None: all is trained."""
        while not self.parts and not self.ledger.is_complete:
            number = on_rank_0(self._claim)
            if number is not None:
                self.number = number
                self.asked[1].wait()
                self._ask()  # what was asked before is of the last round
                self.parts, self.began = self.ledger.piece(number), time.time()
                self.k = self.parts[0][0]
            elif commit := self._wait():
                self._apply(commit)
            else:
                break
        return self.parts.pop(0) if self.parts else None

    def _claim(self):
        """The number of a piece that is now this job's, or None: none is left in this round, or it is nearly over."""
        self.watch.look()
        if self.watch.is_committed or self.watch.enough_at is not None:  # the others are done: not to keep them waiting
            return None
        # As replica k once more, if nobody has to stand back for that: its optimizer has seen that data's like.
        again = [n for n in range(min(len(self.members), self.ledger.pieces)) if self.ledger.piece(n)[0][0] == self.k]
        for number in [*again, *range(self.ledger.pieces)]:
            claim = f'rounds/{self.ledger.round:06}/claim_{number:02}'
            if number not in self.watch.owners and self.store.create(claim, self.name.encode()):
                return number
        return None

    def _ask(self):
        """Start to ask rank 0 whether the round is over, which round_is_over() answers a step later."""
        is_over = False
        if self.rank == 0:
            patience = self.config.grace_s / 2 if self.name in self.members or not self.members else 0.0
            if self.steps:  # the answer comes after one more step, and what began before that has to end: two steps
                patience -= 2 * (time.time() - self.began) / self.steps
            is_over = self.watch.is_committed or self.watch.waited_s > max(0.0, patience)
        flag = torch.tensor([float(is_over)])
        self.asked = flag, dist.broadcast(flag, 0, async_op=True)

    def round_is_over(self):
        """After each inner step: whether to end this round's now, because the piece is done, or the others are, as
        rank 0 saw it a step ago."""
        self.steps += 1
        flag, work = self.asked
        work.wait()
        self._ask()
        return bool(flag.item()) or self.steps == sum(end - first for _, first, end in self.ledger.piece(self.number))

    @property
    def step(self):
        """The step of the run after the inner steps of this round so far, if it goes at the pace of the last one."""
        return min(self.ledger.step + int(self.steps * self.ledger.pace), self.config.max_iters)

    def meet(self, leaves=False, facts=None):
        """Give what the inner steps have changed, wait until the round is closed, and take its outer step.

        leaves: give it and wait for nobody. facts: JSON-able, for the journal. Returns metrics of the round.
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
        """Write this rank's rows of the pseudo-gradient, and when all ranks have, the marker."""
        dtype, name = self.config.exchange_dtype, f'rounds/{self.ledger.round:06}/delta_{self.number:02}'
        delta = self.outer.pseudo_gradient(self.fragment).cpu()
        if not all(self._all_gather(is_finite(delta.sum()) or is_finite(delta))):  # a sum may overflow
            raise ValueError(
                f'round {self.ledger.round}: this job has learned numbers that are not finite: nothing is given to the '
                'pool; look at its data and log, then start it again'
            )
        if self.error is not None:
            delta.add_(self.error, alpha=self.outer.error_decay)
        encoded = self._encode(delta)
        decoded = self._decode(encoded, dtype, self.ranks, self.rank)[: len(delta)]
        self.own = name, decoded, None if self.error is None else delta.sub_(decoded)
        marker = {
            'pool': self.pool, 'job': self.name, 'steps': self.steps, 'piece': self.ledger.piece(self.number),
            'leaves': leaves, 'state': self.state, 'dtype': dtype, **(facts or {}),
            'out_dir': self.config.out_dir, 'began': self.began, 'gave': time.time(),
        }  # fmt: skip

        def all_deltas():  # on rank 0; None if there are more to come
            self.watch.look()
            markers = {**self.watch.markers, self.number: marker}
            return markers if not self.watch.late and self.watch.are_enough(markers) else None

        def add_up(digests):
            """While this delta is on its way: if it is the round's last one, add them all up already."""
            marker['xxh128'] = digests
            if markers := on_rank_0(all_deltas):
                self._sum(markers)

        self._write(name, encoded.numpy().data, meanwhile=add_up)
        on_rank_0(self.store.create, f'{name}.json', json.dumps(marker).encode())

    def _wait(self):
        """The commit of this round, which somebody makes as soon as it is complete; None if waiting() ends it."""
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
            time.sleep(pause)  # short at first: a round is not to last longer for it
            pause = min(1.5 * pause, self.watch.pause)

    def _lacks(self):  # on rank 0
        if (watch := self.watch).enough_at is None:
            has = f'has {len(watch.markers)} of quorum={watch.quorum} deltas'
            return f'{has}, and waits for more: start jobs, or this one again with a smaller --quorum'
        return f'waits for {", ".join(sorted(watch.late))}'

    def _look(self):
        """(the commit, None), (None, {number: marker} of what can be closed), or (None, None): to be waited for."""
        (watch := self.watch).look()
        if watch.is_committed:
            return self._read_json(f'commits/{self.ledger.round:06}.json'), None
        if watch.enough_at is not None and (not watch.late or watch.waited_s > self.config.grace_s):
            return None, dict(watch.markers)
        if not watch.markers and watch.owners and not watch.late and self.name not in watch.owners.values():
            return None, {}  # all that had a claim are dead: their pieces are to be had again
        return None, None

    def _sum(self, markers):
        """Keep the mean of deltas by steps as self.average; ({number: marker} that count, {number: why not})."""
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
            is_careful = not all(are_good)  # some number is not finite: once more, to see whose

    def _numbers_of(self, number, marker):
        """(this rank's numbers of a delta, None), or (None, why it cannot be used)."""
        name = f'rounds/{self.ledger.round:06}/delta_{number:02}'
        if self.own and self.own[0] == name and marker['job'] == self.name:
            return self.own[1], None
        files = [f'{name}_{rank:04}' for rank in range(len(marker['xxh128']))]
        return self._read_rows(files, marker['xxh128'], marker['dtype'])

    def _commit(self, counted, rejected):
        """Create this round's commit, or read the one of whoever was quicker."""
        owners = self.watch.owners
        commit = {
            'pool': self.pool, 'round': self.ledger.round, 'parent': self.parent, 'state': self.state,
            'closer': self.name, 'claims': 1 + max([*owners, *counted], default=-1),
            'deltas': [{'number': number, **marker} for number, marker in counted.items()],
            'rejected': [{'number': number, 'why': why} for number, why in rejected.items()],
            'lost': [{'number': n, 'job': job} for n, job in owners.items() if n not in counted],
            'time': time.time(),
        }  # fmt: skip
        name = f'commits/{self.ledger.round:06}.json'
        self.store.create(name, json.dumps(commit).encode())
        return self._read_json(name)

    def _apply(self, commit):
        """Take the outer step of a commit, and note it; or begin again from a snapshot, where bits are missing."""
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
        if markers:  # without any, the momentum alone would move the parameters
            self.outer.step_with(self.fragment, self.average[1], self.ledger.step)
        else:
            self._restart()
        if self.own and self.own[2] is not None and self.name in {marker['job'] for marker in markers.values()}:
            self.error = self.own[2]
        self.members = {marker['job'] for marker in markers.values() if not marker['leaves']}
        self.parent = hashlib.sha256(json.dumps(commit).encode()).hexdigest()
        self.number = self.own = self.average = None
        self.state = self.digest()
        if self.rank == 0 and not self.config.replay:
            self._note_rounds({**commit, 'digest': self.state, 'applied': time.time()})
            if self.watch:
                self.watch.begin(self.ledger, self.members)

    def _catch_up(self, until=None):
        """Take the outer steps of all commits that there are, or of those before round `until`."""
        while self.ledger.round != until:
            commit = on_rank_0(lambda: self._read_json(f'commits/{self.ledger.round:06}.json'))
            if commit is None:
                return
            if commit['state'] != self.state:
                raise Damaged(f'round {self.ledger.round} began from {commit["state"]}, and here it is {self.state}')
            self._step(commit)

    def replay(self):
        """Compute the outer parameters again, from the oldest snapshot and the deltas of all rounds since then.

        Returns what was compared, in words: the digest that each commit names as its beginning, and that of each
        snapshot. Raises ValueError where one differs, or where a delta is damaged.
        """
        (oldest, *others), first = self._snapshots(), 0
        try:
            self._read_snapshot(oldest)
            first, self.state = self.ledger.round, self.digest()
            for snapshot in on_rank_0(lambda: [self._read_json(f'outer/{name}') for name in others]):
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
        """Nobody waits for this job from here on."""
        self.asked[1].wait()
        if self.rank == 0:
            self.watch.close()

    # --- the journal -------------------------------------------------------------------------------------------------

    def _note_rounds(self, last=None):
        """Append the rounds up to now to out_dir/rounds.jsonl, where each stands once, in order, also those before this
        job joined. last: what to write of the last one."""
        path = os.path.join(self.config.out_dir, 'rounds.jsonl')
        if self.noted is None:
            lines = open(path, encoding='utf-8').read().split('\n')[:-1] if os.path.exists(path) else []
            lines = [line for line in lines if json.loads(line)['pool'] == self.pool]  # a torn line has no end
            write_file(path, ''.join(line + '\n' for line in lines))
            self.noted = len(lines)
        with open(path, 'a', encoding='utf-8') as file:
            for round in range(self.noted, self.ledger.round):
                row = last if last and last['round'] == round else self._read_json(f'commits/{round:06}.json')
                file.write(json.dumps(row) + '\n')
                self.noted = round + 1
