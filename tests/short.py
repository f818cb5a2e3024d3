"""
What `bash tests/run.sh` leaves to `--full`: tests marked slow, and the runs that only they look at.

Files that start many runs for many tests have a list SHORT of those that the short suite starts, too, and the fixture
has_slow_tests of conftest.py.
"""

import pytest


def slow_but(short, cases, name_of=None):
    """
    Parameters of a test: those of `cases` whose name is not in `short` are marked slow.

    cases: values, or tuples of several. name_of(*values): the name of a case, if that is not its first value.
    """
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        name = name_of(*values) if name_of else values[0]
        found.append(pytest.param(*values, marks=() if name in short else pytest.mark.slow))
    return found
