"""runtime/watch.py: which step is logged, evaluated, scored and saved."""

from types import SimpleNamespace

import pytest

from runtime.watch import Watch

EVERY = {'max_iters': 20, 'log_interval': 0, 'eval_interval': 0, 'eval_tasks_interval': 0, 'eval_sequences': 8}
EVERY |= {'checkpoint_interval': 0, 'permanent_interval': 0}


def steps_due(what, tasks='some tasks', every=1, **keys):
    """The steps of a run of 20 after which `what`, a field of Due, is due; asked only after each `every` steps."""
    watch = object.__new__(Watch)
    watch.config = SimpleNamespace(**EVERY | keys)
    watch.run = SimpleNamespace(tasks=tasks)
    looks = range(every, 21, every)
    if every == 1:
        return [step for step in looks if getattr(watch.due(step), what)]
    return [step for step in looks if getattr(watch.due(step, since=step - every), what)]


@pytest.mark.parametrize(
    ('what', 'keys', 'expected'),
    [
        ('last', {}, [20]),
        ('log', {}, [1, 20]),
        ('log', {'log_interval': 8}, [1, 8, 16, 20]),
        ('evaluate', {'eval_interval': 7}, [7, 14, 20]),
        ('evaluate', {'eval_interval': 7, 'eval_sequences': 0}, []),
        ('score', {'eval_tasks_interval': 9}, [9, 18, 20]),
        ('score', {'eval_tasks_interval': 9, 'tasks': None}, []),
        ('save', {}, [20]),
        ('save', {'checkpoint_interval': 6}, [6, 12, 18, 20]),
        ('save', {'checkpoint_interval': 6, 'permanent_interval': 8}, [6, 8, 12, 16, 18, 20]),
    ],
)
def test_what_is_due_follows_from_the_intervals(what, keys, expected):
    assert steps_due(what, **keys) == expected


def test_a_script_that_looks_less_often_does_what_has_become_due_since():
    assert steps_due('save', every=4, checkpoint_interval=6, permanent_interval=11) == [8, 12, 20]
    assert steps_due('evaluate', every=5, eval_interval=7) == [10, 15, 20]
