"""
How far may two computations of the same thing be apart? A sum that is taken in another order is rounded differently,
so a layout is judged by how far one process is from float64 in the same precision.

    error(found, exact)                              # relative distance of two tensors, lists or numbers
    times_further(found, one_process, float64)       # at most TIMES, if both compute the same
    with in_float64(): ...                           # model.py, and what computes beside it, in float64
"""

import contextlib
import math
from unittest import mock

import torch

FLOAT32 = torch.float32
EPS = torch.finfo(torch.float32).eps  # 1.2e-7, the distance from 1 to the next fp32 number

# A layout on many ranks may be this many times as far from float64 as one process is in the same precision. Both errors
# are sums of equally many roundings, so they have the same size, but each is random. Up to 2.5 times have been seen in
# fp32 for gradients that cancel, and 1.2 times for all others.
TIMES = 4

# The smallest error that one process is taken to have. The error of a single number, such as a loss, may happen to be
# 0, and other layouts need not be that lucky. 2 eps is the error of adding up a handful of numbers.
FLOOR = 2 * EPS


def error(found, exact):
    """Norm of the difference / norm of `exact`, in float64. Takes numbers, lists of numbers, and tensors."""
    found, exact = (torch.as_tensor(value, dtype=torch.float64).detach() for value in (found, exact))
    assert found.shape == exact.shape, (found.shape, exact.shape)
    difference, size = torch.linalg.vector_norm(found - exact).item(), torch.linalg.vector_norm(exact).item()
    if difference == 0:  # also where the norm is 0: for an empty slice, or moments of what had no gradient
        return 0.0
    # A NaN counts as infinitely far. As it is, max() would keep or drop it, depending on the order of its arguments.
    return difference / size if size and not math.isnan(difference) else math.inf


def times_further(found, one_process, float64, floor=FLOOR):
    """How many times as far as one process `found` is from float64: at most TIMES, if it computes the same."""
    return error(found, float64) / max(error(one_process, float64), floor)


def gap_of_choice(scores, k=1):
    """How far the last of the k chosen is before the first one that is not, where the two are closest: (..., n) -> a
    number, infinite if all are chosen."""
    first_ones = scores.detach().topk(min(k + 1, scores.shape[-1])).values
    return (first_ones[..., k - 1] - first_ones[..., k]).min().item() if k < scores.shape[-1] else math.inf


@contextlib.contextmanager
def in_float64():
    """A context in which model.py computes in float64 what it computes in fp32 whatever its dtype: losses and norms."""
    torch.set_default_dtype(torch.float64)
    try:
        with (
            mock.patch.multiple(torch, float32=torch.float64, float=torch.float64),
            mock.patch.object(torch.Tensor, 'float', torch.Tensor.double),
        ):
            yield
    finally:
        torch.set_default_dtype(FLOAT32)
