"""
Everything that watches a training run, behind one object: the log, the clock, checkpoints, signals, the watchdog. It
leaves the weights and the optimizer as they are. One of its parts influences training: `numbers` decides whether to
skip a step because its loss or gradient is not finite (health.py).

    watch = Watch(run, step, state)              # opens train.log and metrics.jsonl, starts the watchdog against hangs
    watch.begin_training(model, save)            # from here on signals, the meter and checkpoints are active
    numbers = watch.numbers
    while step < config.max_iters and not watch.must_stop:
        watch.begin_step(step)
        watch.mark('forward')                    # a phase begins; each phase of a step is timed
        skip = numbers.must_skip(...)
        ...
        watch.after_step(step, {'lr': lr})       # logs, evaluates, scores and saves whatever is due
    watch.end(step)

In train_diloco.py and train_pool.py the replicas meet only once in a while, so these scripts call the parts of
after_step() themselves.
"""

import contextlib
import functools
import gc
import math
import shlex
from pathlib import Path
from typing import NamedTuple

import torch

from evaluation import validation
from runtime import checkpoint_saver, health
from runtime.best import Best
from runtime.identity import learns_otherwise
from runtime.log import Log, say_when_compiling_ends
from runtime.meter import Meter, router_metrics
from system import collectives, processes, stopping


class Due(NamedTuple):
    """What is to be done after a step."""

    last: bool  # this was the last step
    log: bool
    evaluate: bool  # the loss on validation text
    score: bool  # tasks
    save: bool


NOTHING_DUE = Due(last=False, log=False, evaluate=False, score=False, save=False)


class Watch:
    """Every rank makes one, and all ranks call its methods at the same points, because some of them are collective."""

    def __init__(self, run, step, state, part=None, losses=validation.of_each_batch, metrics=()):
        """run: from begin(); its notes become the first lines of the log. step: that of the checkpoint from which the
        run resumes, or 0. state: the contents of that checkpoint's state.json, or {}. part, losses, metrics: how this
        rank evaluates its share of a batch, see validation.val_loss()."""
        config = run.config
        self.run, self.config, self.state = run, config, state
        flops = run.flops_per_token
        log_from = step if run.found or step else -1  # without a checkpoint, the row of step 0 is written again
        self.log = Log(config.out_dir, run.rank, log_from, config.max_iters, vars(config), run.explicit, flops)
        self.say = self.log.say
        self.say('\n'.join(run.notes))
        if config.compile:
            say_when_compiling_ends(self.say)
        counts, ranks = run.parameter_counts, f'{run.world_size} x {run.device.type}'
        active = f', {counts["active"]:,} for each token' if 'active' in counts else ''
        self.say(f'{config.arch}: {counts["total"]:,} parameters, {counts["trainable"]:,} trained{active}; {ranks}')
        self.say(f'resuming {run.found} at step {step}' if run.found else f'starting from {config.init_from}')
        self.watchdog = health.Watchdog(config.out_dir, config.timeout_s)
        self.first_step = step
        self.evaluating = {'part': part, 'losses': losses, 'metrics': metrics}

    def self_test(self, model, raw_model, as_loaded=None):
        """Compare the outputs of a Hugging Face model, sharded as it is now, with those of transformers itself.

        as_loaded: whether its weights are still those of its folder; None = yes, unless a checkpoint has been loaded.
        """
        run = self.run
        if run.config.native:
            from huggingface import native  # here, since a run from scratch needs none of it

            if run.found is None and not run.start:
                with self.watchdog.allow('start', checkpoint_saver.SLOWEST_SAVE_S):
                    test = native.self_test, run.pretrained, run.model_config
                    self.say(collectives.on_rank_0(*test, patience_s=collectives.PATIENCE_S))
        elif run.pretrained:
            import float8
            from huggingface import self_test

            as_loaded = run.found is None and not run.start if as_loaded is None else as_loaded
            with self.watchdog.allow('start', checkpoint_saver.SLOWEST_SAVE_S):
                is_packed = any(split.has_starts for split in run.splits.values())
                with float8.paused(raw_model) if run.config.matmul_dtype else contextlib.nullcontext():
                    line = self_test.run(model, raw_model, run.pretrained, as_loaded, is_packed, run.device)
                self.say(line)

    # --- before the loop ----------------------------------------------------------------------------------------------

    def evaluate_only(self, model, step):
        """With eval_only: log the checkpoint's validation loss and its scores on tasks, and end the process."""
        self.model = model
        self.log.row(step, self.val_loss(step) | self.scores(step))
        self.log.close()
        self.watchdog.close()
        processes.leave()

    def begin_training(
        self, model, save, group=None, numbers=None, tokens_per_step=None, also_log=None, checksum_interval=0
    ):
        """
        Count this start (a run that fails again and again at the same step is refused), listen for signals, and set up
        the meter and the saver of checkpoints. If the run begins with the weights of init_from, evaluate those first.

        model: the module that is evaluated. save(step): a function that writes a checkpoint with self.save(). group:
        the ranks that train together, None = all. numbers: the saved state of their health.Numbers, None = that of the
        checkpoint. tokens_per_step: of the ranks that are measured here, None = those of the global batch. also_log():
        returns more numbers for a row. checksum_interval: steps between comparisons of weights that should be equal on
        all ranks; they are compared before each checkpoint, too. 0 = never.
        """
        config, run, say = self.config, self.run, self.say
        self.model, self.raw_model = model, processes.unwrapped(model)
        self.save_run, self.also_log = save, also_log or dict
        self.checksum_interval = checksum_interval
        stopping.count_start(config.out_dir, self.first_step, config.max_failures)
        self.stop_request = stopping.StopRequest(config.out_dir, config.stop_before_end_s, say, self.when_it_stops)
        self.saver = checkpoint_saver.Saver(
            config.out_dir, config.keep_checkpoints, config.async_checkpoint, say,
            config.permanent_interval, config.save_errors,
        )  # fmt: skip
        self.meter = Meter(
            run.device, run.world_size, tokens_per_step or run.tokens_per_step, run.flops_per_token, group=group,
            beat=self.watchdog.at, trace_step=config.trace_step - self.first_step, out_dir=config.out_dir,
            trace_memory=run.traces_memory, say=say,
        )  # fmt: skip
        numbers = self.state.get('numbers') if numbers is None else numbers
        is_other = bool(self.state) and learns_otherwise(self.state, vars(config))
        if numbers and is_other:
            numbers = numbers | {'losses': [], 'in_a_row': 0}
        changes = run.train_data.changes
        guards_loss = config.loss_spike_guard and 'prompts' not in vars(config)  # of answers it says nothing
        self.numbers = health.Numbers(
            config.max_bad_steps, guards_loss, say, self.saver.last_good,
            group, numbers, changes,
        )  # fmt: skip
        gc.collect()
        gc.freeze()  # objects of the start-up stay to the end: without this, a collection that walks them takes 0.5 s
        self.must_stop = self.stop_request.agreed()  # whether any rank got a signal before the first step
        self.best = Best(vars(config), run.val_data, self.state.get('best'), changes, is_other)
        self.best.forget_unless(lambda step: step <= self.first_step and collectives.on_rank_0(self.saver.has, step))
        self.must_stop = self.must_stop or bool(self.best.why_end())  # patience had ended this run before
        # The loss before the first step, to compare with. From scratch it needs no evaluation: it is ln(vocab_size).
        if self.first_step == 0 and not run.found and config.init_from != 'scratch' and config.eval_sequences:
            self.log.row(0, self.with_totals(0, self.evaluated(0)))
            if self.best.is_now(0):
                save(0)

    def when_it_stops(self, asked):
        """In words, when a signal that comes now ends the run. asked: how often the ranks have agreed so far, which is
        once before the first step and once after each; with DiLoCo where a round ends, in a pool at an exchange."""
        config, inner_steps = self.config, vars(self.config).get('inner_steps')
        step = self.first_step + asked + 1
        if inner_steps:
            step = math.ceil(self.watchdog.step / inner_steps) * inner_steps
        at = f'step {min(step, config.max_iters)}' if self.run.strategy != 'pool' else 'the next exchange'
        return f'stopping after {at}' + (', then saving' if config.keep_checkpoints else '; no checkpoints are kept')

    # --- in a step ----------------------------------------------------------------------------------------------------

    def at(self, phase, step):
        """Tell the watchdog that this rank begins a phase; if the rank hangs in it, the watchdog names both."""
        self.watchdog.at(phase, step)

    def begin_step(self, step):
        """Start the clock of the next step; `step` optimizer steps are done. Between steps the clock stands still."""
        self.watchdog.at('data', step + 1)
        self.meter.begin_step()

    def mark(self, phase):
        """Note that a phase of the step begins: data, forward, backward or update."""
        self.meter.mark(phase)

    def measure_state(self, model, optimizer):
        """Measure, once per run, the memory of this rank's weights, gradients and moments. Call it between opt.step()
        and zero_grad(), when all three exist."""
        self.meter.measure_state(model.parameters(), optimizer)

    def end_step(self):
        """Stop the clock."""
        self.meter.end_step()

    @contextlib.contextmanager
    def part(self, phase, seconds):
        """A context for work whose time belongs to the step that has just ended, such as DiLoCo's outer step. The
        watchdog lets it take this many seconds."""
        with self.meter.part(phase), self.watchdog.allow(phase, seconds):
            yield

    # --- after a step -------------------------------------------------------------------------------------------------

    def due(self, step, since=None):
        """A Due: what is to be done after step `step`. since: the step at which the script last asked; what has become
        due since then counts, too. None = it asks after each step."""
        config, last = self.config, step == self.config.max_iters
        since = step - 1 if since is None else since

        def interval(steps):  # whether a multiple of it lies in (since, step]
            return bool(steps) and step // steps > since // steps

        return Due(
            last=last,
            log=last or step == 1 or interval(config.log_interval),
            evaluate=bool(config.eval_sequences) and (last or interval(config.eval_interval)),
            score=self.run.tasks is not None and (last or interval(config.eval_tasks_interval)),
            save=last or interval(config.checkpoint_interval) or interval(config.permanent_interval),
        )

    def after_step(self, step, values):
        """
        End a step: log, evaluate, score and save what is due, and set must_stop if the run has been asked to stop.

        step: optimizer steps done. values: {name: number or tensor of one element}, which the row of metrics.jsonl gets
        in addition to what is measured here. A tensor is read only when a row is written, so that other steps need not
        wait for the GPU.
        """
        if self.checksum_interval and step % self.checksum_interval == 0:
            self.compare_weights(step, self.raw_model)
        self.end_step()
        due = self.due(step)
        self.must_stop = self.stop_request.agreed()  # any rank saw a signal or a file STOP by the step before
        row = {}
        if due.log:
            row = self.measured(values)
        if due.last or not self.must_stop:
            row |= self.evaluated(step) if due.evaluate else {}
            self.must_stop = self.must_stop or bool(self.best.why_end())
            row |= self.scores(step) if due.score or self.best.why_end() else {}
        if row:
            self.log.row(step, self.with_totals(step, row))
        if due.save or self.must_stop or self.best.is_now(step):
            self.save_run(step)

    def measured(self, values):
        """The row of a step: its loss, `values`, and what the meter has measured since the last row."""
        row = {'loss': self.numbers.mean_loss()}
        for name, value in values.items():
            row[name] = value.item() if isinstance(value, torch.Tensor) else value
        return row | self.meter.interval() | router_metrics(self.raw_model) | self.also_log()

    def compare_weights(self, step, model):
        """Raise an error unless all ranks hold bit-equal weights. Failing memory or a failing GPU can show up here."""
        health.refuse_different_weights(model.named_parameters(), step, self.saver.last_good)

    def val_loss(self, step):
        """{'val_loss': ...} of the weights as they are after `step` steps."""
        beat = functools.partial(self.watchdog.at, 'evaluation', step)
        return validation.val_loss(self.model, self.run, beat, **self.evaluating)

    def evaluated(self, step):
        """val_loss(), with the best step and loss so far."""
        row = self.val_loss(step)
        return row | self.best.note(step, row['val_loss'])

    def scores(self, step):
        """{'task/score': value} of the run's tasks; each task also writes a line into the log."""
        return self.run.tasks.scores(self.model, step, self.say, self.watchdog.at) if self.run.tasks else {}

    def with_totals(self, step, row):
        """The row with the run's totals: tokens and epochs read so far in front, steps skipped at the end."""
        samples = step * self.config.global_batch_size
        tokens = {'tokens': round(step * self.run.tokens_per_step)} if self.run.tokens_per_step else {}
        read = {**tokens, **self.run.train_data.epochs(samples)}
        return read | row | ({'skipped': self.numbers.skipped} if self.numbers.skipped else {})

    def save(self, step, raw_model, opt, scaler, more=None, more_tensors=None, optimizer_key='optim'):
        """
        Write a checkpoint: weights, optimizer state, and in state.json everything else that a resumed run needs.

        scaler: state_dict() of the loss scaler. more: what the script adds to state.json. more_tensors, optimizer_key:
        see checkpoint_saver.Saver.save().
        """
        if self.checksum_interval:
            self.compare_weights(step, raw_model)
        state = {'tokens': round(step * self.run.tokens_per_step), 'scaler': scaler, 'numbers': self.numbers.state()}
        state |= {'identity': self.run.identity, 'config': vars(self.config), 'best': self.best.state(), **(more or {})}
        state |= {key: value for key in ('begun', 'base') if (value := getattr(self.run, key))}
        best = self.best.step if self.best.is_kept else None
        with self.watchdog.allow('checkpoint', checkpoint_saver.SLOWEST_SAVE_S):
            self.saver.save(
                step, raw_model, opt, state, more=more_tensors, optimizer_key=optimizer_key, best=best,
                share=self.run.share,
            )  # fmt: skip

    # --- the end ------------------------------------------------------------------------------------------------------

    def end(self, step):
        """Wait for the last checkpoint, write the file DONE (or PREEMPTED, after a request to stop), and end the
        process, after an interruption with the exit code that shells give it."""
        with self.watchdog.allow('checkpoint', checkpoint_saver.SLOWEST_SAVE_S):
            self.saver.wait()
        self.watchdog.close()
        config, early = self.config, self.best.why_end()
        self.say(self.stop_request.end(step, config.max_iters, early))
        # A run without a tokenizer, as of synthetic data, has nothing to say.
        if (step == config.max_iters or early) and config.keep_checkpoints and Path(config.out_dir, 'model').is_dir():
            self.say(f'next: python sample.py --out_dir={shlex.quote(config.out_dir)}')
        self.log.close()
        processes.leave(self.stop_request.exit_code)
