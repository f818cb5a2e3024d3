"""
A bound on work of which nobody can say beforehand how long it takes, such as a search for a user's regular expression,
which may backtrack for years.

    with at_most(seconds=1):  # raises OverLimit
        re.search(pattern, text)

What counts is the CPU time of this thread, so that a machine that is busy or was suspended changes nothing. With
wall=True it is the clock on the wall, for work that may wait for something.
"""

import contextlib
import signal
import time


class OverLimit(BaseException):
    """The time is up. No Exception, since libraries catch these."""


@contextlib.contextmanager
def at_most(seconds, wall=False):
    """Raise OverLimit in the block when it has computed for so long. Only in the main thread, since no other handles
    signals in Python. `re` and loops in Python look for signals; other C code may not."""
    clock = time.monotonic if wall else time.thread_time
    until = clock() + seconds

    def look(number, frame):
        if clock() >= until:
            raise OverLimit
        signal.setitimer(signal.ITIMER_REAL, 0.1)

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
