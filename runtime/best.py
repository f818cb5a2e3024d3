"""
The best checkpoint of a run, by validation loss, and the early end of a run whose validation loss no longer improves.

    best = Best(config, run.val_data, saved)     # saved: its entry in the checkpoint's state.json, or None
    best.note(step, row['val_loss'])             # after each evaluation, on every rank
    if best.is_now(step): ...                    # the lowest loss so far: save a checkpoint
    if best.why_end(): ...                       # no improvement in `patience` evaluations in a row

The state.json of every checkpoint holds this state, so that a resumed run continues with it. All ranks have the same
loss, since val_loss() sums over all of them, and therefore they decide alike.
"""

import bisect
import math

from configurator import tagged


def check_keys(keys):
    """Raise ValueError if keep_best or patience is set and other keys leave no loss to compare or no checkpoint."""
    for key in ('keep_best', 'patience'):
        if keys.get(key) and not keys['eval_sequences']:
            raise ValueError(f'{key}={keys[key]} with eval_sequences=0: there is no val_loss to go by')
    if keys.get('patience') and not keys['eval_interval']:
        raise ValueError(
            f'patience={keys["patience"]} with eval_interval=0: val_loss is known after the last step alone'
        )
    if keys.get('keep_best') and not keys['keep_checkpoints']:
        raise ValueError('keep_best=True with keep_checkpoints=0: no checkpoint is written; use 1 or more')


class Best:
    """step, val_loss: the lowest loss so far and its step, None before the first evaluation. worse: how many
    evaluations there have been since then."""

    def __init__(self, keys, val_data, saved=None, changes=(), learns_otherwise=False):
        """keys: a script's, which may lack keep_best. saved: state() from the checkpoint that the run resumes from; it
        is ignored if the run now evaluates another text, more or less of it, or another loss, since losses would not
        compare. changes: after so many steps other data are read, so patience begins anew. learns_otherwise: it does
        here, too, because the run goes on at another rate."""
        self.patience, self.step, self.val_loss, self.worse = keys.get('patience', 0), None, None, 0
        self.changes, self.stage = changes, 0
        self.is_kept = bool(keys['keep_checkpoints'] and (keys.get('keep_best') or self.patience))
        prints = [source.fingerprint for source in val_data.sources] if val_data else []
        self.evaluated = [
            prints,
            keys['eval_sequences'],
            keys['block_size'],
            *(keys[key] for key in keys if key in tagged('may change') - tagged('model')),
        ]
        if saved and saved['evaluated'] == self.evaluated and None not in (saved['step'], saved['val_loss']):
            self.step, self.val_loss, self.stage = saved['step'], saved['val_loss'], saved.get('stage') or 0
            self.worse = 0 if learns_otherwise else saved['worse']

    def state(self):
        """For state.json."""
        counted = {'worse': self.worse, 'stage': self.stage}
        return {'step': self.step, 'val_loss': self.val_loss, **counted, 'evaluated': self.evaluated}

    def forget_unless(self, is_there):
        """Forget the best step if its checkpoint is gone. is_there(step): whether that step has a checkpoint."""
        if self.is_kept and self.step is not None and not is_there(self.step):
            self.step, self.val_loss, self.worse = None, None, 0

    def note(self, step, val_loss):
        """Note an evaluation after `step` steps. Returns {key: value} to log."""
        stage = bisect.bisect_left(self.changes, step)
        if stage != self.stage:
            self.stage, self.worse = stage, 0
        if self.step is None or val_loss < self.val_loss or math.isnan(self.val_loss):
            self.step, self.val_loss, self.worse = step, val_loss, 0
        else:
            self.worse += 1
        return {'best_step': self.step, 'best_val_loss': self.val_loss} if self.is_kept or self.patience else {}

    def is_now(self, step):
        """Whether the checkpoint of this step is the one to keep."""
        return self.is_kept and self.step == step

    def why_end(self):
        """Why the run ends here, in words; '' = it goes on."""
        if not self.patience or self.worse < self.patience:
            return ''
        return (
            f'val_loss has not been below {self.val_loss:.4f}, that of step {self.step}, in {self.worse} evaluations '
            f'(patience={self.patience})'
        )


def step_of_best(out_dir, state):
    """The step of a run's best checkpoint. state: state.json of its newest one. Raises ValueError if none was kept."""
    best, keys = state.get('best') or {}, state['config']
    if best.get('step') is None or not (keys.get('keep_best') or keys.get('patience')):
        raise ValueError(f'step=best: {out_dir} has kept none, as a run with --keep_best does; leave --step out')
    return best['step']
