"""The formula of the goodput beside a simulation of jobs that come and go."""

import math
import random

import pytest

from pool.goodput import goodput


def simulated(up_s, down_s, start_s, round_s, inner_s, lives=100_000):
    """The goodput of one job, life after life, with rounds of equal length. In a round it gives the steps that it has
    made since it arrived."""
    chance, now, trained = random.Random(1), 0.0, 0.0
    for _ in range(lives):
        begins, now = now + start_s, now + chance.expovariate(1 / up_s)
        for number in range(math.floor(begins / round_s), math.floor(now / round_s) + 1):
            first = max(begins, number * round_s)
            gives = number * round_s + inner_s
            if first < gives <= now:
                trained += gives - first
        now += chance.expovariate(1 / down_s)
    return trained / now


@pytest.mark.parametrize(
    'up_s, down_s, start_s, round_s, inner_s',
    [(3600, 900, 120, 300, 280), (600, 600, 60, 300, 300), (200, 20, 10, 100, 60), (50, 50, 5, 100, 90)],
)
def test_goodput_is_that_of_jobs_that_come_and_go(up_s, down_s, start_s, round_s, inner_s):
    times = up_s, down_s, start_s, round_s, inner_s
    assert goodput(*times) == pytest.approx(simulated(*times), rel=0.02)


def test_without_losses_it_is_the_share_of_a_round_that_is_inner_steps():
    assert goodput(math.inf, 60, 120, 100, 80) == 0.8
    assert goodput(1e12, 60, 120, 100, 80) == pytest.approx(0.8)
