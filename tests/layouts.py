"""Layouts for tests, by the names of their axes."""

from layout import KEYS, Layout


def layout_of(strategy, ranks, **axes):
    """The Layout of a run whose global batch has one sequence for each rank."""
    keys = {'batch_size': 1, 'global_batch_size': ranks}
    return Layout.of({**keys, **{KEYS[axis]: size for axis, size in axes.items()}}, strategy, ranks)
