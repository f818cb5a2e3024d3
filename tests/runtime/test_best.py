"""runtime/best.py: which evaluation is the best, and after how many others a run ends. tests/test_validation.py tests
this in runs."""

import json
import math
from types import SimpleNamespace

from runtime.best import Best

KEYS = {'keep_best': False, 'patience': 2, 'keep_checkpoints': 1, 'eval_sequences': 12}
KEYS |= {'block_size': 32}


def best_of(losses=(), saved=None, text='a text', changes=(), learns_otherwise=False, **keys):
    val_data = SimpleNamespace(sources=[SimpleNamespace(fingerprint=text)])
    best = Best(KEYS | keys, val_data, saved, changes, learns_otherwise)
    for step, loss in enumerate(losses):
        best.note(step, loss)
    return best


def test_a_run_ends_after_evaluations_in_a_row_that_are_not_better():
    assert not best_of([3.0, 2.0, 2.5]).why_end() and not best_of([3.0, 3.0, 2.9, 3.1]).why_end()
    assert best_of([3.0, 3.0, 3.0]).why_end() == (
        'val_loss has not been below 3.0000, that of step 0, in 2 evaluations (patience=2)'
    )
    assert not best_of([3.0, 3.0, 3.0], patience=0).why_end() and not best_of([3.0, 3.0, 3.0], patience=3).why_end()


def test_what_is_not_finite_is_never_better_and_anything_is_better_than_that():
    assert best_of([3.0, math.nan]).step == 0 and best_of([math.nan, 3.0, math.nan]).step == 1
    assert best_of([3.0, math.nan, math.nan]).why_end()


def test_a_run_that_goes_on_counts_on_unless_another_text_is_evaluated():
    saved = json.loads(json.dumps(best_of([3.0, 3.5]).state()))  # as state.json has it
    assert best_of([3.2], saved).why_end()
    for other in ({'text': 'another text'}, {'eval_sequences': 16}, {'block_size': 16}, {'beta': 0.5}):
        again = best_of([3.2], saved, **other)
        assert again.step == 0 and again.val_loss == 3.2 and not again.why_end()


def test_patience_begins_anew_with_other_data_and_at_another_rate():
    losses = [3.0, 3.1, 3.2]  # of the steps 0, 1 and 2
    assert best_of(losses).why_end() and best_of(losses, changes=(2,)).why_end()
    anew = best_of(losses, changes=(1,))
    assert not anew.why_end() and (anew.step, anew.val_loss, anew.worse) == (0, 3.0, 1)
    saved = json.loads(json.dumps(anew.state()))
    assert best_of([], saved, changes=(1,)).worse == 1 and not best_of([], saved, learns_otherwise=True).worse
    again = best_of([], json.loads(json.dumps(best_of(losses).state())), learns_otherwise=True)
    assert not again.why_end() and again.val_loss == 3.0


def test_a_best_step_counts_only_with_its_checkpoint_where_those_are_kept():
    best = best_of([3.0, 3.5])
    best.forget_unless(lambda step: step == 0)
    assert best.step == 0 and best.worse == 1
    best.forget_unless(lambda step: False)
    assert best.step is None and best.worse == 0
    without = best_of([3.0, 3.5], keep_checkpoints=0)
    without.forget_unless(lambda step: False)
    assert without.step == 0 and not without.is_now(0)
