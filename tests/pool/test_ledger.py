"""Which data is still to be trained: whatever jobs claim, give and lose, each share is trained exactly once."""

import itertools
import random

import pytest

from pool.ledger import Ledger


def shares_of(piece):
    return [(k, step) for k, first, end in piece for step in range(first, end)]


@pytest.mark.parametrize('seed', range(8))
def test_pieces_that_come_back_are_put_together_and_each_share_is_trained_once(seed):
    chance = random.Random(seed)
    steps, inner_steps, replicas = chance.choice([(30, 4, 3), (17, 5, 2), (40, 10, 4), (9, 20, 3)])
    ledger, trained = Ledger(steps, inner_steps, replicas), []
    ledger.begin_at(begun := chance.choice([0, 0, 7]))
    while not ledger.is_complete:
        ledger_of_another_job = Ledger(steps, inner_steps, replicas)
        ledger_of_another_job.load(ledger.state())
        pieces = [shares_of(ledger.piece(number)) for number in range(ledger.pieces)]
        assert all(pieces) and ledger.piece(ledger.pieces) == []
        left = {*itertools.product(range(replicas), range(begun, steps))} - {*trained}
        assert sorted(share for piece in pieces for share in piece) == sorted(left)
        of_returned = sum(end - first for _, first, end in ledger.returned)
        first = pieces[: of_returned // inner_steps]  # returned steps that fill a piece come first
        assert all(len(piece) == inner_steps for piece in first)
        claims = chance.randint(0, min(5, len(pieces)))
        given = [number for number in range(claims) if chance.random() < 0.7]
        deltas = [{'number': number, 'steps': chance.randint(1, len(pieces[number]))} for number in given]
        for delta in deltas:
            trained += pieces[delta['number']][: delta['steps']]
        for one in (ledger, ledger_of_another_job):
            one.advance({'claims': claims, 'deltas': deltas})
        assert ledger.state() == ledger_of_another_job.state()
    assert len(trained) == len({*trained}) and not ledger.returned


def test_a_slow_job_costs_the_others_no_steps():
    """It gives 3 of 10 steps per round. The steps that it leaves fill pieces of other jobs, until nothing else is
    left."""
    ledger, sizes = Ledger(200, 10, 4), []
    while not ledger.is_complete:
        pieces = [shares_of(ledger.piece(number)) for number in range(min(4, ledger.pieces))]
        sizes += [len(piece) for piece in pieces]
        ledger.advance(
            {
                'claims': len(pieces),
                'deltas': [
                    {'number': number, 'steps': 3 if number == 3 else len(piece)} for number, piece in enumerate(pieces)
                ],
            }
        )
    assert set(sizes[:-8]) == {10}
