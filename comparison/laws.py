"""
Fits of the best learning rate of a sweep, and of how the loss falls with size, tokens or compute.

    law = fit_law({'compute': C}, losses)                  # loss = E + A * C^-alpha
    law = fit_law({'params': N, 'tokens': D}, losses)      # loss = E + A * N^-alpha + B * D^-beta (arXiv 2203.15556)
    law.at(compute=1e18)
    resampled(lambda rows: fit_law(...).at(compute=1e18), rows)         # an interval, by bootstrap over runs
    fit_rate(rates, losses)                                # loss = L + kappa * (ln rate - ln best)^2

For given exponents the law is linear in E, A and B, so least squares finds these three, which must not be negative.
Only the exponents are searched, on a grid that closes in on the best (variable projection, arXiv 2603.22339).
"""

import contextlib
import itertools
import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

EXPONENTS = 0.01, 2.0  # the range in which they are searched
GRID, ZOOMS = 9, 12  # grid points per exponent; how often the grid is halved around the best one


@dataclass
class Law:
    """loss = floor + sum over names of scale * (x / unit)^-exponent; terms: {name: (scale, exponent, unit)}."""

    floor: float
    terms: dict

    def at(self, **x):
        """The loss at given sizes: a number or an array for each name in terms."""
        return self.floor + sum(a * (x[name] / unit) ** -exponent for name, (a, exponent, unit) in self.terms.items())

    def inverse(self, loss):
        """The x at which a law of one term reaches a loss; infinite if it never does."""
        ((scale, exponent, unit),) = self.terms.values()
        if loss <= self.floor or not scale:
            return math.inf
        return unit * ((loss - self.floor) / scale) ** (-1 / exponent)


def fit_law(x, losses):
    """
    The Law with the least squared error. x: {name: sizes}, each as long as losses.

    Raises ValueError if there are too few different sizes, or fewer than 2 points more than numbers to fit.
    """
    losses = np.asarray(losses, dtype=float)
    sizes = {name: np.asarray(values, dtype=float) for name, values in x.items()}
    needed = 1 + 2 * len(sizes) + 2
    different = min(len(np.unique(values)) for values in sizes.values())
    if len(losses) < needed or different < 3:
        raise ValueError(
            f'a law of {" and ".join(sizes)} needs {needed} runs of 3 different sizes or more, '
            f'given {len(losses)} of {different}'
        )
    units = {name: math.exp(np.log(values).mean()) for name, values in sizes.items()}
    logs = np.stack([np.log(values / units[name]) for name, values in sizes.items()])
    centre, width = np.full(len(logs), np.log(EXPONENTS).mean()), math.log(EXPONENTS[1] / EXPONENTS[0]) / 2
    for _ in range(ZOOMS):
        axes = [np.clip(np.linspace(c - width, c + width, GRID), *np.log(EXPONENTS)) for c in centre]
        tried = np.array([*itertools.product(*axes)])  # (points of the grid, exponents), as logarithms
        powers = np.exp(-np.exp(tried)[:, :, None] * logs).transpose(0, 2, 1)
        columns = np.concatenate([np.ones((*powers.shape[:2], 1)), powers], axis=2)
        numbers, errors = nonnegative_least_squares(columns, losses)
        best = errors.argmin()
        centre, width = tried[best], width / 2
    terms = zip(sizes, numbers[best, 1:].tolist(), np.exp(centre).tolist(), units.values(), strict=True)
    return Law(float(numbers[best, 0]), {name: (scale, exponent, unit) for name, scale, exponent, unit in terms})


def nonnegative_least_squares(columns, y):
    """(numbers, squared errors) of the best non-negative combinations of columns. columns: (problems, points, numbers).
    y: (points,). As there are only a few numbers, every choice of which of them are zero is tried."""
    gram, projected = columns.transpose(0, 2, 1) @ columns, y @ columns  # X^T X and X^T y are all that is needed
    found, errors = np.zeros(projected.shape), np.full(len(columns), np.inf)
    for chosen in itertools.product((False, True), repeat=columns.shape[2]):
        part = gram[:, chosen][:, :, chosen] + 1e-13 * np.eye(sum(chosen))  # so that equal columns can be solved
        numbers = np.linalg.solve(part, projected[:, chosen, None])[..., 0]
        error = y @ y - (numbers * projected[:, chosen]).sum(1)
        better = (numbers >= 0).all(1) & (error < errors)
        found[better] = 0
        found[np.ix_(better, chosen)] = numbers[better]
        errors[better] = error[better]
    return found, errors


def resampled(statistic, rows, numbers=1, times=200, share=0.95, seed=0):
    """
    (low, high): the interval that contains the true value of a statistic with probability `share`, found by drawing
    samples of the runs with replacement (bootstrap).

    statistic: function from a list of rows to a number; it raises ValueError for a sample that it cannot use, which
    then does not count. numbers: how many numbers it fits. With few runs, plain percentiles give too narrow an
    interval, so they are moved outwards by a factor of sqrt(n / (n - numbers)) in quantiles of the normal distribution
    (arXiv 1411.5279, expanded percentiles). Raises ValueError for too few rows.
    """
    generator, values = np.random.default_rng(seed), []
    for _ in range(times if len(rows) > numbers else 0):
        with contextlib.suppress(ValueError):
            values.append(statistic([rows[n] for n in generator.integers(len(rows), size=len(rows))]))
    if len(values) <= times / 2:
        raise ValueError(f'{len(rows)} runs are too few for an interval')
    normal = NormalDist()
    tail = normal.cdf(normal.inv_cdf((1 - share) / 2) * math.sqrt(len(rows) / (len(rows) - numbers)))
    low, high = np.quantile(values, (tail, 1 - tail), method='inverted_cdf')
    return float(low), float(high)


@dataclass
class Rate:
    """The best learning rate of a sweep, by the fitted parabola (`best`) and among those that were run (`tried`). edge:
    'lower' or 'upper' if `tried` is the smallest or largest rate, else ''."""

    best: float
    loss: float
    curvature: float
    tried: float
    edge: str


def fit_rate(rates, losses, around=2):
    """
    The Rate from a parabola in log learning rate, fitted to the best rate tried and `around` neighbors on each side.

    Losses of several seeds at the same rate are averaged; runs that diverged (nan, inf) count as the worst of all. If
    the best rate tried is at an edge, or the parabola has no minimum between the points, `best` is the best rate tried.
    Raises ValueError if no run has a finite loss.
    """
    losses_by_rate = {}
    for rate, loss in zip(rates, losses, strict=True):
        losses_by_rate.setdefault(float(rate), []).append(float(loss))
    means = {rate: float(np.mean(losses_by_rate[rate])) for rate in sorted(losses_by_rate)}
    finite = {rate: loss for rate, loss in means.items() if math.isfinite(loss)}
    if not finite:
        raise ValueError(f'all of the rates {", ".join(f"{rate:g}" for rate in means)} diverged')
    tried = min(finite, key=finite.get)
    every = [*means]
    edge = 'lower' if tried == every[0] else 'upper' if tried == every[-1] else ''
    where = [*finite].index(tried)
    near = [*finite][max(0, where - around) : where + around + 1]
    best, loss, curvature = tried, finite[tried], math.nan
    if len(near) >= 3 and not edge:
        logs = np.log(near) - math.log(tried)
        a, b, c = np.polyfit(logs, [finite[rate] for rate in near], 2)
        if a > 0 and logs[0] <= -b / (2 * a) <= logs[-1]:
            best, loss, curvature = tried * math.exp(-b / (2 * a)), c - b * b / (4 * a), a
    return Rate(best, float(loss), float(curvature), tried, edge)
