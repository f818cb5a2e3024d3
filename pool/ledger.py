"""
Which data a pool of replicas has trained on and which remains, as a pure function of the pool's commits: every job that
reads the same commits arrives at the same ledger.

A *share* is what replica k reads in step s, so a run of `steps` steps with `replicas` replicas has steps x replicas
shares. A *part* (k, first, end) is replica k's shares of the steps first to end - 1. A *piece* is what a job claims for
a round: a list of parts with at most inner_steps shares in all. A new piece is a single part:

    steps   0 ... H-1    H ... 2H-1
    k = 0   piece 0      piece 2             2 replicas; a job that claims piece 2 reads what replica 0
    k = 1   piece 1      piece 3             of train_diloco.py with two replicas reads in those steps

Claim number j of a round is for the j-th available piece. First come pieces that earlier rounds have returned, because
the job that held them delivered nothing or too few steps; then come new ones. A job trains one piece per round, so with
a short piece it would idle for the rest of the round. Therefore returned parts are joined to pieces of inner_steps
steps, and a remainder that is too short waits until more is returned, or until nothing else is left. With as many jobs
as replicas and no losses, each round is thus the one that train_diloco.py would do. With more or fewer jobs, a round
has correspondingly more or fewer pieces.
"""


class Ledger:
    """The state between two rounds. trained: number of shares. pace: by how many steps the run advanced in the last
    round, per inner step of a job. returned: parts that must be trained again."""

    def __init__(self, steps, inner_steps, replicas):
        self.steps, self.inner_steps, self.replicas = steps, inner_steps, replicas
        self.round, self.begun, self.trained, self.issued, self.returned, self.pace = 0, 0, 0, 0, [], 1.0

    def begin_at(self, step):
        """Begin at this step: the steps before it are done, by the run whose weights the pool begins with."""
        self.begun, self.trained = step, step * self.replicas
        self.issued = step // self.inner_steps * self.replicas

    def _pieces(self):
        """(returned parts joined to pieces, of which the last may be short; how many are whole; how many are new)."""
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
        """The piece of claim `number` of this round, as [(k, first, end), ...]; [] if there are fewer pieces."""
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
        """Steps of the run that are done, counting as one step as many trained shares as there are replicas."""
        return self.trained // self.replicas

    @property
    def is_complete(self):
        return self.trained == self.steps * self.replicas

    def advance(self, commit):
        """Count the deltas of a commit as trained, and return what they lack of the claimed pieces."""
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
