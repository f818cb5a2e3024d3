"""
A console that goes away does not take a run with it: a closed terminal or pipe, a full disk behind `> log`, a console
that another program has set to non-blocking. What it does not take is dropped, for train.log has it, too.
"""

import io
import sys

lost = []  # the first error of each console that took no more


class Console(io.FileIO):
    """Standard output or standard error, written to as far as possible."""

    def write(self, data):
        try:
            return super().write(data) or len(data)  # None: it would have to wait
        except OSError as error:
            if not getattr(self, 'has_failed', False):
                lost.append(error)
            self.has_failed = True
            return len(data)


def outlive():
    """From here on, what is printed raises no OSError. Streams that are not this process's own, as in tests, stay."""
    for name in ('stdout', 'stderr'):
        file = getattr(sys, name)
        if file is None or file is not getattr(sys, f'__{name}__'):
            continue
        if isinstance(getattr(file.buffer, 'raw', file.buffer), Console):  # it does so already
            continue
        raw = Console(file.fileno(), 'w', closefd=False)
        binary = raw if file.write_through else io.BufferedWriter(raw)  # write_through: python -u
        kept = {key: getattr(file, key) for key in ('encoding', 'errors', 'line_buffering', 'write_through')}
        outliving = io.TextIOWrapper(binary, **kept)
        setattr(sys, name, outliving)
        setattr(sys, f'__{name}__', outliving)
