"""
Which data a pool of replicas has trained on, and which is to be had: a pure function of its commits.

A run of `steps` steps with `replicas` replicas has steps x replicas *shares*: what replica k reads in step s. A *part*
(k, first, end) is replica k's shares of the steps first to end - 1. A *piece* is what a job claims for a round, at most
inner_steps shares; a new one is one part:

    steps   0 ... H-1    H ... 2H-1
    k = 0   piece 0      piece 2             2 replicas; a job that claims piece 2 reads what replica 0
    k = 1   piece 1      piece 3             of train_diloco.py with two replicas reads in those steps

In a round, claim number j is for the j-th piece to be had: first what earlier rounds have returned, because whoever had
it delivered nothing, or fewer steps; then new ones. A job trains one piece a round, so a piece of few steps would leave
it idle for the rest of the round. Therefore the parts that are returned are put together to pieces of inner_steps
steps. What is less than that waits until more is returned, or for the end. So with as many jobs as replicas and no
losses, each round is the one that train_diloco.py would do. With more jobs, or fewer, rounds are as many pieces larger
or smaller.
"""


class Ledger:
    """State between two rounds. trained: shares. pace: steps of the run per inner step of a job, in the last round."""

    def __init__(self, steps, inner_steps, replicas):
        self.steps, self.inner_steps, self.replicas = steps, inner_steps, replicas
        self.round, self.begun, self.trained, self.issued, self.returned, self.pace = 0, 0, 0, 0, [], 1.0

    def begin_at(self, step):
        """Nothing of the steps before this one is to be had: another run has done them."""
        self.begun, self.trained = step, step * self.replicas
        self.issued = step // self.inner_steps * self.replicas

    def _pieces(self):
        """(what has been returned, as pieces of which the last may be short, how many of them are not, of new ones)."""
        again, room = [], 0
        for k, first, end in self.returned:
            while first < end:
                if room == 0:
                    again.append([])
                    room = self.inner_steps
                stop = min(end, first + room)
                again[-1].append((k, first, stop))
                first, room = stop, room - (stop - first)
        return again, len(again) - (room > 0), -(-self.steps // self.inner_steps) * self.replicas - self.issued

    @property
    def pieces(self):  # how many can be claimed in this round
        again, _, new = self._pieces()
        return len(again) + new

    def piece(self, number):
        """[(k, first, end), ...] of claim `number` of this round, none if there are not so many."""
        again, whole, new = self._pieces()
        if number < whole:
            return again[number]
        if number >= whole + new:  # the short one comes last
            return again[number - new] if number - new < len(again) else []
        block, k = divmod(self.issued + number - whole, self.replicas)
        first = block * self.inner_steps
        return [(k, max(first, self.begun), min(first + self.inner_steps, self.steps))]

    @property
    def step(self):
        """Steps of the run done: shares trained, in steps of all replicas."""
        return self.trained // self.replicas

    @property
    def is_complete(self):
        return self.trained == self.steps * self.replicas

    def advance(self, commit):
        """Count a commit's deltas, and return to the pieces to be had what they lack of those that were claimed."""
        steps_of = {delta['number']: delta['steps'] for delta in commit['deltas']}
        again, whole, new = self._pieces()
        returned = []
        for number in range(commit['claims']):
            done = steps_of.get(number, 0)
            for k, first, end in self.piece(number):
                first, done = min(first + done, end), max(0, done - (end - first))
                returned += [[k, first, end]] if first < end else []
            assert done == 0, f'{steps_of[number]} steps of {self.piece(number)}'
        claimed = min(max(commit['claims'] - whole, 0), new)
        self.issued += claimed
        self.returned = returned + [[*part] for piece in again[commit['claims'] - claimed :] for part in piece]
        self.trained += sum(steps_of.values())
        if steps_of:
            self.pace = sum(steps_of.values()) / (self.replicas * max(steps_of.values()))
        self.round += 1

    def state(self):  # JSON-able
        return {key: getattr(self, key) for key in ('round', 'begun', 'trained', 'issued', 'returned', 'pace')}

    def load(self, state):
        self.__dict__.update(state)
