"""
The best checkpoint of a run, by its loss on the validation text, and when a run ends because it gets no better.

    best = Best(config, run.val_data, saved)     # saved: what state.json holds of it, or None
    best.note(step, row['val_loss'])             # after each evaluation, on every rank
    if best.is_now(step): ...                    # it is the lowest so far: save a checkpoint
    if best.why_end(): ...                       # patience evaluations in a row have not been better

It is kept in the state.json of every checkpoint, so that a run goes on with it however it ended. All ranks have the
same loss, since evaluate() adds up over all of them, and decide alike.
"""

import math


def check_keys(keys):
    """Raise ValueError where the keys of a script leave nothing to go by."""
    if keys.get('patience', 0) < 0:
        raise ValueError(f'patience={keys["patience"]}: expected 1 evaluation or more, or 0 = train to the end')
    for key in ('keep_best', 'patience'):
        if keys.get(key) and not keys['eval_iters']:
            raise ValueError(f'{key}={keys[key]} with eval_iters=0: there is no val_loss to go by')
    if keys.get('patience') and not keys['eval_interval']:
        raise ValueError(
            f'patience={keys["patience"]} with eval_interval=0: val_loss is known after the last step alone'
        )
    if keys.get('keep_best') and not keys['keep_checkpoints']:
        raise ValueError('keep_best=True with keep_checkpoints=0: no checkpoint is written; use 1 or more')


class Best:
    """step, val_loss: of the lowest loss so far, None before the first evaluation. worse: evaluations since then."""

    def __init__(self, keys, val_data, saved=None):
        """keys: of a script, which may have no keep_best. saved: state() of the checkpoint that a run goes on from; it
        does not count where another text, or more or less of it, is evaluated from here on."""
        self.patience, self.step, self.val_loss, self.worse = keys.get('patience', 0), None, None, 0
        self.is_kept = bool(keys['keep_checkpoints'] and (keys.get('keep_best') or self.patience))
        windows = keys['eval_iters'] * keys['global_batch_size']
        self.evaluated = [[source.fingerprint for source in val_data.sources], windows, keys['block_size']]
        if saved and saved['evaluated'] == self.evaluated:
            self.step, self.val_loss, self.worse = saved['step'], saved['val_loss'], saved['worse']

    def state(self):
        """For state.json."""
        return {'step': self.step, 'val_loss': self.val_loss, 'worse': self.worse, 'evaluated': self.evaluated}

    def forget_unless(self, is_there):
        """What counts is a checkpoint that is there: is_there(step) says so."""
        if self.is_kept and self.step is not None and not is_there(self.step):
            self.step, self.val_loss, self.worse = None, None, 0

    def note(self, step, val_loss):
        """An evaluation after `step` steps. Returns what is to be logged of it."""
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
    """The step of the best checkpoint, by the state.json of the newest one. Raises ValueError where there is none."""
    best, keys = state.get('best') or {}, state['config']
    if best.get('step') is None or not (keys.get('keep_best') or keys.get('patience')):
        raise ValueError(f'step=best: {out_dir} has kept none, as a run with --keep_best does; leave --step out')
    return best['step']
