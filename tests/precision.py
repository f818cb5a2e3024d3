"""
How far two computations of the same thing may be apart, on any CPU.

Sums that are taken in another order round otherwise, and in which order a CPU adds up depends on its instructions. So a
test asks for one of three things:

    equal bits                   where the same operations run in the same order: torch.equal, ==
    assert_as_close_to_float64   where a run of the same thing in float64 is at hand
    assert_same_run              where two fp32 runs are at hand and nothing else, such as what two scripts log
"""

import contextlib
import math
from unittest import mock

import torch

EPS = torch.finfo(torch.float32).eps  # 1.2e-7, the distance from 1 to the next fp32 number

# A layout on many ranks may be this many times as far from float64 as one process is in the same precision. Both errors
# are sums of as many roundings, so they are of one size, but each is a draw: of the few numbers of a norm's weight, one
# draw is easily twice another: seen are up to 2.5 times in fp32, of gradients that cancel, and 1.2 times of all others.
TIMES = 4

# What one process is taken to be off by at the least: the error of a single number, such as a loss, may be 0 by luck,
# and that luck is not asked of anyone else. 2 eps is what it costs to add up a handful of numbers. In bf16 a
# loss is the mean over a few hundred tokens, whose roundings, half an eps each, average out to about this.
FLOOR = 2 * EPS
FLOOR_IN_HALF = torch.finfo(torch.bfloat16).eps / 16

# What two runs may differ by after one step: each may be as far from float64 as TIMES and FLOOR allow.
APART = 2 * TIMES * FLOOR


def error(found, exact):
    """The norm of the difference over the norm, in float64; of numbers, lists of them and tensors."""
    found, exact = (torch.as_tensor(value, dtype=torch.float64).detach() for value in (found, exact))
    assert found.shape == exact.shape, (found.shape, exact.shape)
    difference, size = torch.linalg.vector_norm(found - exact).item(), torch.linalg.vector_norm(exact).item()
    if difference == 0:  # of a slice that is empty, or of moments of what had no gradient
        return 0.0
    # A NaN is as far away as can be: left as it is, max() and <= would pass over it, or not, by where it stands.
    return difference / size if size and not math.isnan(difference) else math.inf


def times_further(found, one_process, float64, floor=FLOOR):
    """By which factor `found` is further from float64 than one process: at most TIMES, if it computes the same."""
    return error(found, float64) / max(error(one_process, float64), floor)


def assert_as_close_to_float64(found, one_process, float64, about=None):
    """
    Whether `found` is as good as what one process computes in the same precision, each measured by float64.

    All three are numbers, lists, tensors, or dicts of these with the same keys.
    """
    if not isinstance(float64, dict):
        found, one_process, float64 = ({'': value} for value in (found, one_process, float64))
    assert found.keys() == one_process.keys() == float64.keys()
    for name, exact in float64.items():
        factor = times_further(found[name], one_process[name], exact)
        assert factor <= TIMES, (
            f'{about or ""} {name}: {error(found[name], exact):.2e} from float64, {factor:.1f} times as far '
            f'as one process, {error(one_process[name], exact):.2e}'
        )


def apart(steps=1):
    """How far two fp32 runs of the same thing may be apart after so many steps, relative to the value.

    Every step adds roundings that do not depend on those before, so what they add up to grows like the root of them.
    """
    return APART * math.sqrt(steps)


def assert_same_run(found, expected, about=None, every=1):
    """Whether numbers that two fp32 runs log after every step, or every so many, are those of the same run."""
    assert len(found) == len(expected) > 0, (about, len(found), len(expected))
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True), 1):
        difference, most = abs(ours - theirs) / abs(theirs), apart(number * every)
        assert difference <= most, f'{about or ""}, row {number}: {ours} and {theirs} are {difference:.2e} apart'


@contextlib.contextmanager
def in_float64():
    """What model.py computes in fp32 whatever its dtype, losses and norms, is computed in float64 in here."""
    torch.set_default_dtype(torch.float64)
    try:
        with (
            mock.patch.multiple(torch, float32=torch.float64),
            mock.patch.object(torch.Tensor, 'float', torch.Tensor.double),
        ):
            yield
    finally:
        torch.set_default_dtype(torch.float32)
