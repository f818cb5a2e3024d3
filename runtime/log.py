"""
What a run says: on the console, in train.log and metrics.jsonl, to wandb and tensorboard.

A number that is not finite is written as 'nan', 'inf' or '-inf', a string, which is valid JSON and which float() reads.
"""

import contextlib
import json
import logging
import math
import os
import platform
import shlex
import sys
import textwrap
import time
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from configurator import VERSION
from runtime.meter import device_name
from system.console import lost as console_lost
from system.errors import one_line
from system.files import ROOT, code_version, no_link, write_file

# Rows on the console: a line each for a step, an evaluation and an outer step of DiLoCo, within 120 columns. What a row
# lacks is skipped; a key that is not here is in the files alone.
CONSOLE = (
    {
        'loss': ' | loss {:.4f}',
        'diloco/replica_loss': ' | replica 0 {:.4f}',
        'lr': ' | lr {:.2e}',
        'grad_norm': ' | norm {:.2f}',
        'reward': ' | reward {:.3f}',
        'completions/mean_length': ' | {:.1f} tokens/answer',
        'tokens_per_sec': ' | {:,.0f} tok/s',
        'mfu': ' | mfu {:.0%}',
        'mem/rank_max_gb': ' | mem {:.1f} GB',
    },
    {
        'val_loss': ' | val loss {:.4f}',
        'val_ppl': ', perplexity {:.4g}',
        'val_bpb': ', {:.3f} bits/byte',
        'val_accuracy': ', accuracy {:.3f}',
        'val_margin': ', margin {:.3f}',
        'diloco/inner_val_loss': ' (replicas {:.4f})',
        'best_step': ' (best: step {})',
    },
    {
        'diloco/cosine': ' | outer step: cosine {:.2f}',
        'diloco/delta_norm': ', delta {:.3g}',
        'diloco/momentum_norm': ', momentum {:.3g}',
        'diloco/drift': ', drift {:.3g}',
        'diloco/wait_s': ', waited {:.2f} s',
    },
)


class Log:
    """
    Console, out_dir/train.log (the same lines), out_dir/metrics.jsonl, and wandb and tensorboard on request; and
    out_dir/config.json, what ran here last, for programs. On other ranks than 0 every method does nothing.

    start_step: steps done when this process starts; rows of metrics.jsonl beyond it are cut, so each step stands once.
    config: the final values of all keys; explicit: those that were set on purpose, marked in the log.
    flops_per_token: forward and backward, for config.json.
    Every line is flushed: a killed run loses at most the line being written, which the next start repairs.
    Nothing of the environment is written but WORLD_SIZE, hence no key.
    Raises ValueError when wandb or tensorboard is asked for and not installed, or wandb refuses to start.
    """

    def __init__(self, out_dir, rank, start_step, max_iters, config, explicit, flops_per_token=None):
        self._rank = rank
        if rank != 0:
            return
        out_dir = Path(out_dir)
        out_dir.mkdir(parents=True, exist_ok=True)
        self._max_iters = max_iters
        self._has_failed = False  # to write a line
        self._console_is_lost = False
        self._timed = None  # (step, milliseconds) of the row that was timed last
        self._step_ms = None  # smoothed milliseconds per step, for the ETA
        self._text = open(
            out_dir / 'train.log', 'a', encoding='utf-8', buffering=1, opener=no_link
        )  # 1: flushed after each line
        self.say(header(config))
        self.say(config_lines(config, explicit), console=False)
        self.say(f'configuration, and all that follows: {out_dir / "train.log"}')
        write_config(out_dir / 'config.json', config, flops_per_token)
        self._wandb = start_wandb(out_dir, config, self.say) if config['wandb_log'] else None
        self._tensorboard = start_tensorboard(out_dir, start_step) if config['tensorboard_log'] else None
        self._looks_only = config.get('eval_only')  # and cuts nothing
        self._last_step = cut_rows(out_dir / 'metrics.jsonl', math.inf if self._looks_only else start_step)
        self._path, self._rows = out_dir / 'metrics.jsonl', None  # opened by the first row

    def say(self, text, console=True):
        """Print text, and write it to train.log; each line begins with the time, in train.log with the day, too."""
        if self._rank != 0:
            return
        day, now = time.strftime('%Y-%m-%d %H:%M:%S').split()
        for line in text.splitlines():
            if console:
                print(f'{now} {line}', flush=True)
            self._write(self._text, f'{day} {now} {line}')
        if console_lost and not self._console_is_lost:
            self._console_is_lost = True
            error = console_lost[0].strerror
            self._write(
                self._text, f'{day} {now} WARNING: the console takes no more lines ({error}): they are here alone'
            )

    def line(self, step, values):
        """Show a step on the console and in train.log alone."""
        if self._rank == 0:
            self.say(self._lines(step, values))

    def row(self, step, values, console=True):
        """
        Log one step: `values` under the keys of metrics.jsonl; `step` = optimizer steps done. A value is a number, or a
        list of numbers, which goes to the file alone.

        A step that metrics.jsonl holds already (a checkpoint evaluated once more) is only said, not written again.
        """
        if self._rank != 0:
            return
        if console:
            self.line(step, values)
        if step <= self._last_step:
            return
        self._last_step = step
        row = {'step': step, **values}
        valid = {key: as_json(value) for key, value in row.items()}
        self._rows = self._rows or open(self._path, 'a', encoding='utf-8', buffering=1, opener=no_link)
        self._write(self._rows, json.dumps(valid))
        drawn = {key: value for key, value in values.items() if not isinstance(value, list)}
        if self._wandb:
            self._beside('wandb', lambda: self._wandb.log({'step': step, **drawn}))
        if self._tensorboard:
            self._beside('tensorboard', lambda: [self._tensorboard.add_scalar(*item, step) for item in drawn.items()])

    def _beside(self, name, action):
        """What wandb or tensorboard cannot take, because the disk is full or a service has died, ends no run either."""
        try:
            action()
        except Exception as error:  # of classes of their own
            setattr(self, f'_{name}', None)
            self.say(f'WARNING: {name} gets nothing from here on, metrics.jsonl has all rows: {one_line(error)}')

    def _write(self, file, line):
        """A full disk ends no run here: whether it goes on is for its checkpoints to decide."""
        try:
            file.write(line + '\n')
        except OSError as error:
            if not self._has_failed:
                print(f'WARNING: lines are missing in {file.name} from here on: {error}', flush=True)
            self._has_failed = True

    def close(self):
        """End wandb's and tensorboard's records and close the files."""
        if self._rank != 0:
            return
        if self._wandb:
            import wandb

            self._beside('wandb', self._wandb.finish)
            # finish() may return before wandb's service has written the last rows: this ends it.
            self._beside('wandb', wandb.teardown)
        if self._tensorboard:
            self._beside('tensorboard', self._tensorboard.close)
        for file in (self._rows, self._text):
            with contextlib.suppress(OSError, AttributeError):  # what a full disk has left unwritten; no rows yet
                file.close()

    def _lines(self, step, values):
        """`step 20/100 | loss 3.2 | ... | eta 0:01:20`, `step 20/100 | val loss 3.3`; the ETA is of training alone."""
        at = f'step {step}' if self._looks_only else f'step {step:{len(str(self._max_iters))}}/{self._max_iters}'
        texts = [''.join(form.format(values[key]) for key, form in part.items() if key in values) for part in CONSOLE]
        if texts[2].startswith(','):  # in a pool nothing is known of the other jobs' directions
            texts[2] = f' | outer step:{texts[2][1:]}'
        texts[1] += ''.join(f', {key[9:]} {loss:.4f}' for key, loss in values.items() if key.startswith('val_loss/'))
        if 'time/total' in values:
            step_ms = values['time/total'] / values.get('pool/pace', 1)
            # The first row has what happens once in it, such as compilation; and DiLoCo shows a row a second time when
            # it has the replicas' mean loss.
            if self._timed not in (None, (step, step_ms)):
                # One slow interval (a busy file system) moves the estimate by a fifth of its excess.
                self._step_ms = 0.8 * (self._step_ms or step_ms) + 0.2 * step_ms
            self._timed = step, step_ms
            if self._step_ms is not None:
                texts[0] += f' | eta {timedelta(seconds=round((self._max_iters - step) * self._step_ms / 1000))}'
        return '\n'.join(at + text for text in texts if text)


class Journal:
    """Rows of replicas that train apart: shown with replica 0's loss as they come, logged when the replicas meet."""

    def __init__(self, log):
        self._log, self._rows = log, {}

    def show(self, step, row):
        """Show a row whose 'loss' is this replica's, until write() has that of all."""
        if 'loss' in row:
            self._log.line(step, {'diloco/replica_loss': row['loss'], **{k: v for k, v in row.items() if k != 'loss'}})

    def keep(self, step, row):
        # In a pool the step between two rounds is an estimate. Rows whose estimate lies beyond the step at which the
        # round really ended are dropped.
        self._rows = {earlier: kept for earlier, kept in self._rows.items() if earlier < step} | {step: row}

    def write(self):
        """Log the rows, with the replicas' mean of 'loss' and 'grad_norm'. Collective."""
        kept = [(row, key) for row in self._rows.values() for key in ('loss', 'grad_norm') if key in row]
        sums = torch.tensor([row[key] for row, key in kept], dtype=torch.float64)
        if kept:  # or not, on every rank
            dist.all_reduce(sums)
        for (row, key), total in zip(kept, sums.tolist(), strict=True):
            row[key] = total / dist.get_world_size()
        for step, row in self._rows.items():
            self._log.row(step, row, console=step == max(self._rows))
        self._rows = {}


def as_json(value):
    """A number, or a list of them, as JSON has it: it knows none that is not finite."""
    if isinstance(value, list):
        return [as_json(number) for number in value]
    return value if math.isfinite(value) else str(value)


def cut_rows(path, start_step):
    """Drop the rows of metrics.jsonl beyond start_step, and a torn last line; returns the last step left, or -1."""
    if not path.exists():
        return -1
    kept, last_step = [], -1
    text = path.read_text(encoding='utf-8', errors='replace')
    for line in text.splitlines(keepends=True):
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):  # a line that a kill cut short
            step = json.loads(line)['step']
            if line.endswith('\n') and step <= start_step:
                kept.append(line)
                last_step = step
    if ''.join(kept) != text:
        write_file(path, ''.join(kept))
    return last_step


def write_config(path, config, flops_per_token):
    """What runs, as JSON: script, ranks, device, versions, and every key under 'config'."""
    about = {'script': Path(sys.argv[0]).name, 'world_size': int(os.environ.get('WORLD_SIZE', '1'))}
    about['device_name'] = device_name(torch.device(config['device']))
    about |= {} if flops_per_token is None else {'flops_per_token': flops_per_token}
    about['versions'] = {'python': platform.python_version(), 'torch': torch.__version__}
    write_file(path, json.dumps({**about, 'config': config}, indent=1) + '\n')


def say_when_compiling_ends(say):
    """Let torch.compile's warning of a function that has been compiled too often be one line of the log."""

    def in_our_words(record):
        if 'hit config.' not in str(record.msg):
            return True
        limit, times, function, *_ = record.args
        say(
            f'WARNING: compile: {function} was compiled {times} times, each time for other inputs, and is computed '
            f'uncompiled from here on where they differ again, more slowly ({limit}): TORCH_LOGS=recompiles says what '
            'differs, --compile=False is without it'
        )
        return False

    logging.getLogger('torch._dynamo.convert_frame').addFilter(in_our_words)


def header(config):
    """What runs: command, code, versions, machine; lines of text."""
    command = shlex.join([Path(sys.executable).name, *sys.argv])
    lines = [
        f'command: {command} (WORLD_SIZE={os.environ.get("WORLD_SIZE", "1")})',
        f'code: {VERSION}, {code_version(Path(ROOT))}',
        f'versions: python {platform.python_version()}, torch {torch.__version__}, numpy {metadata.version("numpy")}',
        f'host: {platform.node()}, {config["device"]}: {device_name(torch.device(config["device"]))}',
    ]
    return '\n'.join(lines)


def config_lines(config, explicit):
    """Every key, with * where it was set on purpose."""
    keys = {key: value for key, value in config.items() if not isinstance(value, dict)}  # a checkpoint has those, too
    keys = ' '.join(f'{"*" if key in explicit else ""}{key}={value!r}' for key, value in keys.items())
    wrapped = textwrap.wrap(keys, 116, initial_indent='  ', subsequent_indent='  ', break_on_hyphens=False)
    return '\n'.join(['config (* = set by a file or the command line):', *wrapped])


def start_wandb(out_dir, config, say):
    """A wandb run that a resumed process continues: its id lies in out_dir/wandb, and in a copy of that folder becomes
    another one. WANDB_MODE=offline is obeyed."""
    try:
        import wandb
    except ImportError:
        raise ValueError('wandb_log=True needs a package that is missing: pip install wandb') from None
    try:
        run = wandb.init(
            **{key: config[f'wandb_{key}'] for key in ('project', 'group')},
            **{'name': config['wandb_run_name'] or out_dir.name, 'config': config},
            **{'dir': out_dir, 'id': wandb_id(out_dir, say), 'resume': 'allow'},
            settings=wandb.Settings(silent=True, console='off'),  # the console is ours, and train.log has it
        )
    except wandb.Error as error:
        reason = ' '.join(str(error).split())
        raise ValueError(f'wandb_log=True: {reason} Or go without internet: export WANDB_MODE=offline') from None
    run.define_metric('*', step_metric='step')  # wandb's own step cannot go back to a checkpoint's
    say(f'wandb: offline, send it with `wandb sync {Path(run.dir).parent}`' if run.offline else f'wandb: {run.url}')
    return run


def wandb_id(out_dir, say):
    """The id of the wandb run of this folder. A folder that was moved, or that another machine calls by another name,
    keeps its id; a copy, whose original is still there, gets one of its own."""
    id_file, here = out_dir / 'wandb' / 'run_id', str(out_dir.resolve())
    run_id, made_in = [*(id_file.read_text().split('\n') if id_file.exists() else ()), '', ''][:2]
    original = Path(made_in, 'wandb', 'run_id')
    if run_id and made_in and original.exists() and not original.samefile(id_file):  # earlier versions wrote no folder
        say(f'wandb: {out_dir} is a copy of {made_in}, which goes on with run {run_id}: this one gets a run of its own')
        run_id = ''
    if not run_id or made_in != here:
        run_id = run_id or os.urandom(4).hex()
        id_file.parent.mkdir(exist_ok=True)
        write_file(id_file, f'{run_id}\n{here}\n')
    return run_id


def start_tensorboard(out_dir, start_step):
    """A tensorboard writer on out_dir/tensorboard; what an earlier process wrote beyond start_step is hidden."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError('tensorboard_log=True needs a package that is missing: pip install tensorboard') from None
    return SummaryWriter(str(out_dir / 'tensorboard'), purge_step=start_step + 1)
