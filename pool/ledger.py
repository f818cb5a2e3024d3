"""
Which data a pool of replicas has trained on, and which is to be had: a pure function of its commits.

A run of `steps` steps with `replicas` replicas has steps x replicas *shares*: what replica k reads in step s. A *piece*
(k, first, end) is replica k's shares of the steps first to end - 1, at most inner_steps of them:

    steps   0 ... H-1    H ... 2H-1
    k = 0   piece 0      piece 2             2 replicas; a job that claims piece 2 reads what replica 0
    k = 1   piece 1      piece 3             of train_diloco.py with two replicas reads in those steps

In a round, claim number j is for the j-th piece to be had: first what earlier rounds have returned, because whoever had
it delivered nothing, or fewer steps; then new ones. So with as many jobs as replicas and no losses, each round is the
one that train_diloco.py would do. With more jobs, or fewer, rounds are as many pieces larger or smaller.
"""


class Ledger:
    """State between two rounds. trained: shares. pace: steps of the run per inner step of a job, in the last round."""

    def __init__(self, steps, inner_steps, replicas):
        self.steps, self.inner_steps, self.replicas = steps, inner_steps, replicas
        self.round, self.trained, self.issued, self.returned, self.pace = 0, 0, 0, [], 1.0

    def begin_at(self, step):
        """Nothing of the steps before this one is to be had: another run has done them."""
        block, rest = divmod(step, self.inner_steps)
        self.trained, self.issued = step * self.replicas, (block + bool(rest)) * self.replicas
        end = min((block + 1) * self.inner_steps, self.steps)
        self.returned = [[k, step, end] for k in range(self.replicas)] if rest and step < self.steps else []

    @property
    def pieces(self):  # how many can be claimed in this round
        return len(self.returned) + max(0, -(-self.steps // self.inner_steps) * self.replicas - self.issued)

    def piece(self, number):
        """(k, first, end) of claim `number` of this round, or None if there are not so many."""
        if number < len(self.returned):
            return tuple(self.returned[number])
        block, k = divmod(self.issued + number - len(self.returned), self.replicas)
        first = block * self.inner_steps
        return (k, first, min(first + self.inner_steps, self.steps)) if first < self.steps else None

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
        missing = []
        for number in range(commit['claims']):
            k, first, end = self.piece(number)
            done = steps_of.get(number, 0)
            assert 0 <= done <= end - first, f'{done} steps of {first} to {end}'
            if first + done < end:
                missing.append([k, first + done, end])
        self.issued += max(0, commit['claims'] - len(self.returned))
        self.returned = missing + self.returned[commit['claims'] :]
        self.trained += sum(steps_of.values())
        if steps_of:
            self.pace = sum(steps_of.values()) / (self.replicas * max(steps_of.values()))
        self.round += 1

    def state(self):  # JSON-able
        return {key: getattr(self, key) for key in ('round', 'trained', 'issued', 'returned', 'pace')}

    def load(self, state):
        self.__dict__.update(state)
