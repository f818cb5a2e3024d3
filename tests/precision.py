"""
How far may two computations of the same thing be apart, on any CPU?

A sum that is taken in another order is rounded differently, and the order depends on the instructions that a CPU has.
So a test asks for one of three things:

    equal bits                   if the same operations run on the same tensors in the same order: torch.equal, ==.
                                 rounding.sh tells whether they do; it lets all others be rounded differently
    assert_as_close_to_float64   if there is also a run of the same thing in float64
    assert_same_run              if there are only two fp32 runs, such as the losses that two scripts log

That holds as long as both compute the same thing. Where they choose (the experts of a token, the likeliest token) a
near tie falls to either side, and all that follows is another computation. So a test of choices takes weights with
which none is near a tie (let_tokens_choose() of router_weights.py), and asserts that gap_of_choice() is above MARGIN.
"""

import math
import statistics
from unittest import mock

import torch

from evaluation import sampling
from proving.precision import (  # noqa: F401 - tests import them from here
    EPS,
    FLOAT32,
    FLOOR,
    TIMES,
    error,
    gap_of_choice,
    in_float64,
    times_further,
)

# How far two runs may be apart after one step, relatively: each may be as far from float64 as TIMES and FLOOR allow.
APART = 2 * TIMES * FLOOR

# How many batches of_draws() takes.
DRAWS = 4

# Of probabilities and logits. Two layouts have been seen to be 5e-7 apart in them after 20 steps of training.
MARGIN = 1e-4


def all_times_further(found, one_process, float64):
    """times_further() of each tensor of a model: {name: factor} of three dicts with the same names.

    Tensors of one model are about equally far from float64, but that of a tensor of four numbers, such as a router's
    bias, is now and then a fifth of it by luck. So for tensors one process is taken to be as far as it is for half of
    them. A single number, such as a loss, has no part in that: it is a sum over many tokens, for which FLOOR is made.
    """
    assert found.keys() == one_process.keys() == float64.keys()
    tensors = {name for name, exact in float64.items() if torch.as_tensor(exact).dim()}
    typical = statistics.median(error(one_process[name], float64[name]) for name in tensors) if tensors else 0.0
    return {
        name: times_further(found[name], one_process[name], exact, max(FLOOR, typical) if name in tensors else FLOOR)
        for name, exact in float64.items()
    }


def assert_as_close_to_float64(found, one_process, float64, about=None):
    """
    Assert that `found` is about as close to float64 as what one process computes in the same precision.

    All three are numbers, lists, tensors, or dicts of these with the same keys.
    """
    if not isinstance(float64, dict):
        found, one_process, float64 = ({'': value} for value in (found, one_process, float64))
    for name, factor in all_times_further(found, one_process, float64).items():
        assert factor <= TIMES, (
            f'{about or ""} {name}: {error(found[name], float64[name]):.2e} from float64, {factor:.1f} times as far '
            f'as one process, {error(one_process[name], float64[name]):.2e}'
        )


def of_draws(gradients_of):
    """{name: (DRAWS, ...)} of a function that takes the number of a batch and returns {name: tensor}.

    A gradient whose terms nearly cancel, or that has four numbers, is close to float64 or not by luck: for one batch,
    of two runs of equal worth one has been 7 times as far from it as the other. Over several that evens out.
    """
    found = [gradients_of(draw) for draw in range(DRAWS)]
    return {name: torch.stack([of_draw[name] for of_draw in found]) for name in found[0]}


def apart(steps=1):
    """How far two fp32 runs of the same thing may be apart after so many steps, relative to the value.

    Every step adds roundings that do not depend on those before, so their sum grows like the root of their number.
    """
    return APART * math.sqrt(steps)


def assert_same_run(found, expected, about=None, every=1):
    """Assert that two lists of numbers, which two fp32 runs have logged every so many steps, are of the same run."""
    assert len(found) == len(expected) > 0, (about, len(found), len(expected))
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True), 1):
        difference, most = abs(ours - theirs) / abs(theirs), apart(number * every)
        assert difference <= most, f'{about or ""}, row {number}: {ours} and {theirs} are {difference:.2e} apart'


def likeliest(logits):
    """The likeliest token of each row, which must not be near a tie."""
    assert gap_of_choice(logits) > MARGIN, 'a near tie: take other weights'
    return logits.argmax(-1)


def gap_of_text(model, prompts, max_new_tokens):
    """gap_of_choice() of the tokens with which a model continues prompts, each the likeliest one."""
    gaps, choose = [], sampling.sample_token

    def note_gap(logits, *options):
        gaps.append(gap_of_choice(logits))
        return choose(logits, *options)

    with mock.patch.object(sampling, 'sample_token', note_gap):
        sampling.generate_batch(model, prompts, max_new_tokens)
    return min(gaps)
