"""
Marks what `bash tests/run.sh --more` leaves to `--full`: slow tests, and the runs that only slow tests look at.

A test file that starts many runs for many tests has a list SHORT of the runs that the short suite needs, and asks the
fixture has_slow_tests of conftest.py whether to start the others.
"""

import itertools
import math
import random

import pytest


def slow_but(short, cases, name_of=None):
    """
    Parameters for a test, in which the cases whose name is not in `short` are marked slow.

    cases: values, or tuples of several. name_of(*values): the name of a case, if that is not its first value.
    """
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        name = name_of(*values) if name_of else values[0]
        found.append(pytest.param(*values, marks=() if name in short else pytest.mark.slow))
    return found


def covering(cases, n):
    """Some of the cases, among which there is every combination of n values that any of them has; always the same."""
    values = {
        case: {*itertools.combinations(enumerate(case), n)} for case in random.Random(0).sample(cases, len(cases))
    }
    missing, chosen = set().union(*values.values()), []
    for at_least in range(math.comb(len(cases[0]), n), 0, -1):
        for case, of_case in values.items():
            if len(of_case & missing) >= at_least:
                chosen.append(case)
                missing -= of_case
    return chosen
