"""How rank 0 of a job watches the other jobs of the pool, in a thread of its own while the job trains."""

import contextlib
import re
import threading
import time

from pool.objects import LARGEST, job_in, marker_in


class RoundWatch:
    """The claims and deltas of the current round, and which jobs are alive. A thread looks at the store from time to
    time and gives this job's own sign of life."""

    def __init__(self, store, name, grace_s, quorum):
        self.store, self.name, self.grace_s, self.quorum = store, name, grace_s, quorum
        self.pause = min(max(grace_s / 20, 0.05), 5.0)
        self.lock, self.closed, self.beats, self.count = threading.Lock(), threading.Event(), {}, 0
        self.thread = threading.Thread(target=self._run, daemon=True)

    def begin(self, ledger, members):
        """Begin a new round. members: the jobs whose deltas were in the last round and that have not left since."""
        with self.lock:
            self.round, self.pieces, self.members = ledger.round, ledger.pieces, members
            self.owners, self.markers, self.enough_at, self.is_committed = {}, {}, None, False

    def look(self):
        """Read the state of the round from the store. Sets owners {piece's number: job}, markers {piece's number:
        contents of its delta's marker}, late (the jobs to wait for) and is_committed.

        Each look makes new dicts, so that code that iterates over one needs no lock while the thread looks again.
        """
        with self.lock:
            round, store, owners, markers = f'rounds/{self.round:06}', self.store, {**self.owners}, {**self.markers}
            self.is_committed = f'{self.round:06}.json' in store.list('commits')
            for name in store.list(round):
                found = re.fullmatch(r'(claim_|delta_)(\d+)(\.json)?', name)
                number = int(found[2]) if found else self.pieces
                if number >= self.pieces:  # not a claim or delta of this round
                    continue
                if found[1] == 'claim_' and number not in owners:
                    if job := job_in(store.read(f'{round}/{name}', most=LARGEST)):
                        owners[number] = job
                elif found[3] and number not in markers:
                    markers[number] = marker_in(store.read(f'{round}/{name}', most=LARGEST))
            self.owners, self.markers = owners, markers
            now = time.monotonic()
            if self.enough_at is None and self.markers and self.are_enough(self.markers):
                self.enough_at = now
            expected = {*self.owners.values()}
            if len(self.owners) < self.pieces:  # some pieces are unclaimed, so the last round's jobs may still come
                expected |= self.members
            late = expected - {marker['job'] for marker in self.markers.values()} - {self.name}
            for job in late:
                beat = None
                with contextlib.suppress(FileNotFoundError):
                    beat = store.read(f'alive/{job}', most=LARGEST)
                before, since = self.beats.get(job, (beat, now))
                self.beats[job] = (beat, since if beat == before else now)
            fresh = {job for job, (_, since) in self.beats.items() if now - since <= self.grace_s}
            self.late = {job for job in late & fresh if self.beats[job][0] != b'left'}

    def are_enough(self, deltas):
        return len(deltas) >= min(self.quorum, self.pieces)

    @property
    def waited_s(self):  # seconds since a quorum had delivered; 0 = it has not yet
        return 0.0 if self.enough_at is None else time.monotonic() - self.enough_at

    def beat(self, content=None):
        self.count += 1
        self.store.replace(f'alive/{self.name}', content or f'{self.count}'.encode())

    def _run(self):
        while not self.closed.wait(self.pause):
            with contextlib.suppress(OSError, ValueError):  # if the store stays away, the main thread will report it
                self.beat()
                self.look()

    def close(self):
        self.closed.set()
        self.thread.join()
        with contextlib.suppress(OSError):
            self.beat(b'left')
