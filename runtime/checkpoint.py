"""
Checkpoints: saving, verifying, finding, loading and deleting them. All strategies and any number of ranks share one
format, so a run may resume with another strategy or on other ranks.

    out_dir/checkpoints/step_00001000/
        __0_0.distcp, __1_0.distcp, ...: tensors, one file per rank, by torch.distributed.checkpoint (DCP)
        index.json      where in these files each piece of model.NAME, optim.NAME.exp_avg, ... is (checkpoint_index.py)
        .metadata       the same for DCP's own tools; only checkpoints without index.json are read by it
        state.json      step, tokens, config, ...: what the script passes to save()
        manifest.json   size and sha256 of every other file

A checkpoint is written as step_00001000.tmp, its manifest last, and then renamed. So a directory with the final name
was once complete, no matter when the job was killed. Damage that the disk has done since then shows in the hashes; DCP
alone would load a flipped bit or a zeroed block without noticing. Reading a checkpoint executes nothing that is in it.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

import moments
from configurator import check_saved
from layout import WHOLE
from model import GPT, ModelConfig, is_load
from offload import StateOnHost
from optim import Elementwise
from runtime import dcp_files
from runtime.best import step_of_best
from runtime.checkpoint_index import Entry, Piece, as_json, read_index, read_into, read_manifest
from runtime.checkpoint_parts import CutTensor, MadeLater, SavePlanner, layout_of, local_piece, value_of_piece
from system import collectives
from system.files import meant, no_link, read_json, rename_durably, sha256_of, write_file

NFS_LEASE_S = 120  # by then an NFS server has dropped the locks of a client that is gone; Linux's server does at 90
SLOWEST_SAVE_S = 7200  # a rank that takes longer to write its files is considered dead by the others

# --- the run's directory ----------------------------------------------------------------------------------------------


def prepare(out_dir):
    """Create out_dir and out_dir/checkpoints, and test that this rank can write there. For every rank, before step 0.

    Raises OSError (PermissionError, NotADirectoryError, ...) with one line that names out_dir.
    """
    try:
        for folder in (out_dir, os.path.join(out_dir, 'checkpoints')):
            os.makedirs(folder, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, prefix='.write_test_') as file:
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())  # a full disk or quota may show only here
    except OSError as error:
        raise type(error)(f'cannot write in out_dir={out_dir} ({error.strerror}): use another --out_dir') from error


def claim(out_dir, patience_s=5, lease_s=NFS_LEASE_S, say=print):
    """Lock out_dir for the life of this process, so that two jobs never write into one directory. For rank 0.

    If it is locked, waits for patience_s, because the last processes of a killed job may still be ending when the job
    is restarted. If the lock belongs to another machine, waits for lease_s: a file server keeps the locks of a machine
    that died for that long.
    Raises ValueError that names the process and host that hold the directory.
    """
    path = os.path.join(out_dir, '.lock')
    # Never closed: the system releases the lock when the process ends, however it ends. A POSIX lock rather than
    # flock()'s, because NFS has it, forked children do not inherit it, and this process may claim the directory twice.
    descriptor = no_link(path, os.O_RDWR | os.O_CREAT)
    began, waits_for = time.monotonic(), None
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):  # another process has it; which error depends on the system
            holder = os.pread(descriptor, 200, 0).decode(errors='replace') or 'another process'
            is_elsewhere = not holder.endswith(f' on {os.uname().nodename}')
            if is_elsewhere and holder != waits_for:
                waits_for = holder
                say(f'out_dir={out_dir} is in use by {holder}: waiting up to {lease_s} s, in case that has died')
            if time.monotonic() - began > (max(patience_s, lease_s) if is_elsewhere else patience_s):
                raise ValueError(f'out_dir={out_dir} is in use by {holder}: stop it or use another --out_dir') from None
            time.sleep(0.1)
        except OSError as error:
            say(f'WARNING: {path} cannot be locked here ({error.strerror}): start no second job in {out_dir}')
            break
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f'process {os.getpid()} on {os.uname().nodename}'.encode(), 0)


# --- find and verify --------------------------------------------------------------------------------------------------


def choose(out_dir, resume='auto', say=print, compare=None):
    """Path of the newest intact checkpoint of a run, or None for a start from scratch. For one rank: no collectives.

    resume: 'auto' takes a checkpoint if there is one, 'must' insists on one, 'never' refuses an out_dir that holds a
    run. A damaged checkpoint that is newer than an intact one is reported and renamed to step_X.damaged.
    compare: see find_damage(); with_all_ranks() uses it to let every rank help.
    Raises ValueError if 'must' finds no checkpoint, if 'never' finds a run, or if there are checkpoints but none is
    intact; in the last case nothing is renamed.
    """
    folder = os.path.join(out_dir, 'checkpoints')
    candidates, damaged = checkpoints_in(folder), checkpoints_in(folder, r'step_\d{8}\.damaged\+*')
    if resume == 'never':
        if candidates or damaged or os.path.exists(os.path.join(out_dir, 'metrics.jsonl')):
            raise ValueError(f"resume='never' but out_dir={out_dir} holds a run: use another, or --resume=auto")
        return None
    for number, path in enumerate(candidates):
        damage = find_damage(path, say, compare)
        if damage is None:
            for unusable in candidates[:number]:
                say(f'WARNING: {unusable} is now {move_aside(unusable)}; going on from {path}')
            return path
        say(f'WARNING: checkpoint {path} is damaged: {damage}')
    if candidates or damaged:
        names = ', '.join(os.path.basename(path) for path in candidates + damaged)
        raise ValueError(f'all checkpoints in {folder} are damaged ({names}): restore a copy or use another --out_dir')
    if resume == 'must':
        raise ValueError(f"resume='must' but there is no checkpoint in {folder}: check --out_dir, or use --resume=auto")
    return None


def choose_to_read(out_dir, step=None, say=print, compare=None):
    """Path of one of a run's checkpoints. step: a number, 'best', or None for the newest intact one. Raises ValueError
    if there is no such checkpoint, or if it is damaged."""
    if step == 'best':
        newest = choose_to_read(out_dir, say=lambda line: None, compare=compare)
        step = step_of_best(out_dir, read_state(newest))
    if step is None:
        path = choose(out_dir, say=say, compare=compare)  # skips a damaged one for the one before it, and says so
        if path is None:
            train = f'train one with `python train_ddp.py CONFIG --out_dir={out_dir}`'
            raise ValueError(f'no checkpoint in {out_dir}: {meant(out_dir) or train}')
        return path
    folder = os.path.join(out_dir, 'checkpoints')
    path = os.path.join(folder, f'step_{step:08d}')
    damage = find_damage(path, say, compare) if os.path.isdir(path) else 'it is not there'
    if damage:
        there = [str(int(found.rpartition('_')[2])) for found in checkpoints_in(folder)]
        raise ValueError(f'checkpoint {path}: {damage}; take another --step, there are {", ".join(there) or "none"}')
    return path


def find_damage(path, say=print, compare=None):
    """What is wrong with the files of a checkpoint, in words; None if all have the size and sha256 of manifest.json.

    compare: a function to use instead of compare_files.
    """
    began = time.perf_counter()
    try:
        expected = {name: (entry['size'], entry['sha256']) for name, entry in read_manifest(path).items()}
    except (OSError, ValueError) as error:
        return f'manifest.json is missing or not one ({error})'
    damage = (compare or compare_files)(path, dict.fromkeys(('.metadata', 'state.json'), (None, None)) | expected)
    if not damage:
        gigabytes = sum(size for size, _ in expected.values()) / 1e9
        say(f'verified {path}: {gigabytes:.2f} GB in {time.perf_counter() - began:.2f} s')
    return '; '.join(damage) or None


def compare_files(path, expected):
    """A line for each file in a folder that differs from what is expected. expected: {name: (size, sha256)}."""

    def damage_of(name):
        size, sha256 = expected[name]
        try:
            found = os.path.getsize(os.path.join(path, name))
            if found != size:
                return f'{name} has {found} bytes instead of {size}'
            return None if sha256_of(os.path.join(path, name)) == sha256 else f'{name} has changed (sha256 differs)'
        except OSError as error:
            return f'{name} cannot be read ({error.strerror})'

    with ThreadPoolExecutor() as threads:  # hashlib releases the GIL: about 1.2 GB/s on every core
        return [found for found in threads.map(damage_of, expected) if found]


def with_all_ranks(choose, *arguments):
    """
    Call choose(*arguments) on rank 0 and return its result, or raise its error, on every rank. Each rank hashes a share
    of the files.

    choose: a function of this module that takes `compare`. Only rank 0 lists, decides, renames and speaks, so the ranks
    cannot disagree; the others compare the files that it tells them to. The work is shared because a network file
    system limits the bytes per second of each node: at 0.15 GB/s one node hashes the 96 GB of an 8B model in 11
    minutes, eight nodes in 80 seconds.
    """
    group = dist.new_group(backend='gloo', timeout=timedelta(seconds=collectives.PATIENCE_S))
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def compare_together(path, expected):
        """compare_files() on all ranks together, with rank 0's arguments; None if those are path=None, the end."""
        given = [(path, expected)]
        dist.broadcast_object_list(given, group=group, device=torch.device('cpu'))
        path, expected = given[0]
        if path is None:
            return None
        share = {name: expected[name] for name in sorted(expected)[rank::world_size]}  # any rank may read any file
        damage = [None] * world_size
        dist.all_gather_object(damage, compare_files(path, share), group=group)
        return [line for lines in damage for line in lines]

    def decide():
        try:
            return choose(*arguments, compare=compare_together)
        finally:
            compare_together(None, None)

    if rank != 0:
        while compare_together(None, None) is not None:
            pass
    chosen = collectives.on_rank_0(decide)
    dist.destroy_process_group(group)
    return chosen


def checkpoints_in(folder, pattern=r'step_\d{8}'):
    """Paths of the checkpoints in a folder, newest first."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [os.path.join(folder, name) for name in sorted(names, reverse=True) if re.fullmatch(pattern, name)]


def is_complete(path):
    """Whether a checkpoint was once complete. find_damage() checks whether its files still are."""
    return os.path.exists(os.path.join(path, 'manifest.json'))


def discard(path):
    """Mark a checkpoint that others have replaced; the next save deletes it."""
    if os.path.exists(path):
        os.rename(path, f'{path}.tmp')


def move_aside(path):
    """Rename a checkpoint so that it is no longer found, and return its new path."""
    aside = f'{path}.damaged'
    while os.path.exists(aside):
        aside += '+'
    try:
        os.rename(path, aside)
        return aside
    except OSError:  # without permission, as when sample.py reads another user's run, an older one can still be used
        return path


# --- save -------------------------------------------------------------------------------------------------------------


class Saver:
    """Writes the checkpoints of one run. Every rank makes one; all ranks call each method, in the same order.

    keep: how many complete checkpoints to retain; older ones are deleted after each save. 0 = save() writes nothing.
    async_save: save() returns as soon as this rank's tensors have been copied into host memory; a thread writes the
        copies while training continues. The memory, as large as this rank's share of a checkpoint, is kept for the next
        save.
    say: function called on rank 0 with one line per checkpoint.
    permanent_interval: checkpoints whose step is a multiple of it are never deleted; 0 = none.
    save_errors: 'continue' = a failed save only logs a warning, and the next one comes at its usual time; wait(), at
        the end of a run, still raises. 'stop' = a failed save raises.
    """

    def __init__(self, out_dir, keep, async_save=False, say=print, permanent_interval=0, save_errors='stop'):
        self.folder, self.keep = os.path.join(out_dir, 'checkpoints'), keep
        self.permanent_interval, self.save_errors, self.failure = permanent_interval, save_errors, None
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.say = say if self.rank == 0 else lambda line: None
        # A group of its own: the thread's collectives run beside those of training. If both threads used one group,
        # ranks could issue their collectives in different orders, which deadlocks.
        self.group = dist.new_group(backend='gloo', timeout=timedelta(seconds=SLOWEST_SAVE_S))
        self.thread = ThreadPoolExecutor(max_workers=1) if async_save else None
        self.pending = None  # Future of the save that the thread is writing
        self.copies = {}  # key -> host memory, reused: the first touch of fresh memory costs ten times the copy

    def save(self, step, model, optimizer, state, more=None, optimizer_key='optim', best=None, share=WHOLE):
        """Save as step_XXXXXXXX; with async_save, first wait for the previous save. Collective.

        model: the module itself, not its DistributedDataParallel wrapper, whose names begin with 'module.'.
        optimizer: its state is saved under its parameters' names; before the first step it has none.
        state: JSON-able dict; 'step' is added.
        more: {key: tensor} to save in addition to model.NAME and optim.NAME.SLOT, or instead of those that have the
            same key. Ranks may have different keys.
        optimizer_key: replaces 'optim' where optimizer states differ between ranks, as between the replicas of DiLoCo.
        best: the step of a checkpoint to keep beside the newest ones; it may be this one.
        share: what this rank has of the model.
        If a rank fails, all ranks raise: OSError for a full or broken disk, RuntimeError for anything else. With
        async_save, the next save() or wait() raises it. Raises ValueError for weights that are not finite. Older
        checkpoints survive a failed save.
        """
        if self.keep == 0:
            return
        self._go_on_after(self._finish_pending)
        tensors = self._checked_share(step, tensors_to_save(model, optimizer, optimizer_key, share) | (more or {}))
        state = json.dumps({**state, 'step': step}, indent=1)  # now, since the caller may change it during the writing
        if self.thread is None:
            self._go_on_after(lambda: self._write(step, tensors, state, best))
        else:
            began = time.perf_counter()
            self._stage(tensors)
            self.pending = self.thread.submit(self._write, step, tensors, state, best, time.perf_counter() - began)

    def wait(self):
        """Wait until the last save has been written. Raises its error, with save_errors='continue' as well: the run
        ends here, so no later save will make up for it."""
        self._finish_pending()
        if self.failure is not None:
            raise self.failure

    def last_good(self):
        """Path of the newest complete checkpoint, or 'none'."""
        return next((path for path in checkpoints_in(self.folder) if is_complete(path)), 'none')

    def has(self, step):
        """Whether there is a complete checkpoint of this step."""
        return is_complete(os.path.join(self.folder, f'step_{step:08d}'))

    def _finish_pending(self):
        if self.pending is not None:
            pending, self.pending, self.failure = self.pending, None, None  # self.failure was that of an earlier save
            pending.result()

    def _go_on_after(self, action):
        """Run action(). With save_errors='continue', an OSError becomes a warning and the run goes on."""
        try:
            action()
            self.failure = None
        except OSError as error:
            if self.save_errors == 'stop':
                raise
            self.failure = error
            self.say(f'WARNING: {error}; training goes on (save_errors=continue), the last one is {self.last_good()}')

    def _checked_share(self, step, tensors):
        """The tensors that this rank writes. Pieces that several ranks hold, as under DDP and HSDP, are divided among
        these ranks.

        Raises ValueError on all ranks if a weight is not finite on any of them: such a checkpoint would be useless.
        """
        bad = next(
            (
                key
                for key, value in tensors.items()
                if key.startswith('model.') and not moments.is_finite(local_piece(value))
            ),
            None,
        )
        names = {key: name_of_copies(key, tensor) for key, tensor in tensors.items()}
        copies = {name: local_piece(tensors[key]).nbytes for key, name in names.items() if name}
        everybodys = [None] * self.world_size
        dist.all_gather_object(everybodys, (bad, copies), group=self.group)
        for rank, (name, _) in enumerate(everybodys):
            if name:
                raise ValueError(
                    f'{name} is not finite on rank {rank} at step {step}: nothing is saved; the last good '
                    f'checkpoint is {self.last_good()}: go on from it with a lower --learning_rate'
                )
        sizes = {name: size for _, rank_copies in everybodys for name, size in rank_copies.items()}
        written, writer_of = [0] * self.world_size, {}  # bytes of each rank; the largest pieces are assigned first
        for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
            holders = [rank for rank, (_, rank_copies) in enumerate(everybodys) if name in rank_copies]
            writer_of[name] = min(holders, key=written.__getitem__)
            written[writer_of[name]] += size
        return {key: tensor for key, tensor in tensors.items() if writer_of.get(names[key], self.rank) == self.rank}

    def _stage(self, tensors):
        """Copy this rank's pieces into host memory. When it returns, training may change the tensors again."""
        for key, tensor in tensors.items():
            piece = local_piece(tensor)
            if key not in self.copies:  # pinned memory for a GPU's: copies into it are faster and asynchronous
                self.copies[key] = torch.empty_like(piece, device='cpu', pin_memory=piece.is_cuda)
            self.copies[key].copy_(value_of_piece(tensor), non_blocking=True)
        if any(local_piece(tensor).is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()

    def _write(self, step, tensors, state, best, staging_s=None):
        """Write all files and give the checkpoint its final name; runs in the thread if the tensors were staged."""
        began = time.perf_counter()
        path = os.path.join(self.folder, f'step_{step:08d}')
        try:
            if self._together(path, lambda: self.rank == 0 and self._make_room(path))[0]:
                self.say(f'checkpoint {path} is already there')  # a resumed run that stops before its first step
                return
            of_ranks = self._together(path, lambda: self._write_files(f'{path}.tmp', tensors, state))
            files = {name: facts for files_of_rank, _ in of_ranks for name, facts in files_of_rank.items()}
            written = [entry for _, entries in of_ranks for entry in entries]
            self._together(path, lambda: self.rank == 0 and self._publish(path, files, written, best))
        except (OSError, RuntimeError):
            if self.rank == 0:
                shutil.rmtree(f'{path}.tmp', ignore_errors=True)  # the disk may be full
            raise
        gigabytes = sum(facts['size'] for facts in files.values()) / 1e9
        waited = '' if staging_s is None else f', training waited {staging_s:.2f} s'
        self.say(f'checkpoint {path}: {gigabytes:.2f} GB in {time.perf_counter() - began:.2f} s{waited}')

    def _together(self, path, action):
        """[result of action() on rank 0, on rank 1, ...]. An error on one rank is raised on all, so that none waits for
        a rank that has given up."""
        try:
            outcome, cause = (action(), None), None
        except (Exception, CheckpointException) as error:  # CheckpointException derives from BaseException
            outcome, cause = (None, describe_failure(error, self.rank)), error
        outcomes = [None] * self.world_size
        dist.all_gather_object(outcomes, outcome, group=self.group)
        for _, failure in outcomes:
            if failure is not None:
                kind, reason = failure
                raise kind(f'cannot write checkpoint {path}: {reason}') from cause
        return [result for result, _ in outcomes]

    def _make_room(self, path):
        """Remove what a killed job left at this path. Returns True if there is a complete checkpoint already."""
        if os.path.exists(path) and not is_complete(path):
            move_aside(path)
        if os.path.exists(f'{path}.tmp'):  # DCP would mix its files with the new ones
            shutil.rmtree(f'{path}.tmp')
        return is_complete(path)

    def _write_files(self, folder, tensors, state):
        """Write this rank's files. Returns their {name: {'size', 'sha256'}}, and what is where in them: [(key, Entry)],
        each with one piece."""
        staged = self.thread is not None
        planner = SavePlanner(self.copies if staged else None)
        # One writing thread, because DCP loses the errors of additional ones. No copying ahead from the GPU if staged:
        # in this thread, which has not chosen a GPU, it would open a context on GPU 0.
        writer = FileWriter(folder, thread_count=1, per_thread_copy_ahead=0 if staged else 10_000_000)
        dcp.save(tensors, storage_writer=writer, planner=planner, process_group=self.group)
        own = [name for name in os.listdir(folder) if name.startswith(f'__{self.rank}_')]
        if self.rank == 0:
            write_file(os.path.join(folder, 'state.json'), state)
            own += ['.metadata', 'state.json']
        return {name: facts_of(os.path.join(folder, name)) for name in own}, writer.entries()

    def _publish(self, path, files, written, best):
        """Write the index of what all ranks have written and the manifest, give the checkpoint its final name, and
        delete checkpoints that are no longer needed."""
        index = {}
        for key, entry in written:
            index.setdefault(key, entry._replace(pieces=[])).pieces.extend(entry.pieces)
        write_file(os.path.join(f'{path}.tmp', 'index.json'), as_json(index))
        files['index.json'] = facts_of(os.path.join(f'{path}.tmp', 'index.json'))
        manifest = json.dumps({'format_version': 1, 'files': files}, indent=1, sort_keys=True)
        write_file(os.path.join(f'{path}.tmp', 'manifest.json'), manifest)
        rename_durably(f'{path}.tmp', path)
        self._retain(path, best)

    def _retain(self, new, best):
        """Delete complete checkpoints except the `new` one, that of step `best`, permanent ones and the newest others;
        also delete what killed jobs have left.

        If a run has gone back to an older checkpoint, the new one need not have the highest step. A failure to delete
        is only logged.
        """
        try:
            others = [path for path in checkpoints_in(self.folder) if is_complete(path) and path != new]
            others = [path for path in others if int(path[-8:]) != best]
            if self.permanent_interval:
                others = [path for path in others if int(path[-8:]) % self.permanent_interval]
            for path in others[self.keep - 1 :]:
                os.rename(path, f'{path}.tmp')  # half deleted, it must not look like a checkpoint
            for name in os.listdir(self.folder):
                if name.endswith('.tmp'):
                    shutil.rmtree(os.path.join(self.folder, name))
        except OSError as error:
            self.say(f'WARNING: an old checkpoint cannot be deleted, trying again after the next save: {error}')


class FileWriter(dcp.FileSystemWriter):
    """Knows where it has written what, and raises the cause of a failed write: torch.save itself reports a full disk as
    'unexpected pos 704 vs 598'."""

    def write_data(self, plan, planner):
        try:
            written = super().write_data(plan, planner)
        except RuntimeError as error:
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        data_of = {item.index: item.tensor_data for item in plan.items}
        self.written = [(result.index, data_of[result.index], result.storage_data) for result in written.wait()]
        return written

    def entries(self):
        """[(key, Entry with one piece)] of all that this rank has written."""
        found = []
        with contextlib.ExitStack() as files:
            opened = {}
            for place, data, info in self.written:
                name, dtype = info.relative_path, data.properties.dtype
                if name not in opened:
                    opened[name] = files.enter_context(open(os.path.join(self.path, name), 'rb'))
                piece = Piece(tuple(data.chunk.offsets), tuple(data.chunk.sizes), name, info.offset)
                piece = piece._replace(offset=dcp_files.position_of(opened[name], piece, info.length, dtype))
                found.append((place.fqn, Entry(dtype, tuple(data.size), [piece])))
        return found


def facts_of(path):
    """What the manifest says of a file."""
    return {'size': os.path.getsize(path), 'sha256': sha256_of(path)}


def name_of_copies(key, tensor):
    """A name for this rank's piece that is the same on all ranks that hold the same piece; None if no other can."""
    tensor = layout_of(tensor)
    if isinstance(tensor, CutTensor):
        return f'{key} {[tuple(begin) for begin in tensor.rows]}'
    if not isinstance(tensor, DTensor):
        return key
    mesh = tensor.device_mesh  # HSDP: (replicate, shard)
    is_replicated = mesh.ndim == 2 and tensor.placements[0].is_replicate()
    return f'{key} {mesh.get_local_rank(1)}' if is_replicated else None


def describe_failure(error, rank):
    """(class to raise on all ranks, reason in one line): OSError for a problem of the disk, RuntimeError for a bug."""
    if isinstance(error, CheckpointException):  # DCP has gathered the errors of all ranks
        rank, (error, _) = next(iter(error.failures.items()))
    return OSError if isinstance(error, OSError) else RuntimeError, f'rank {rank}: {type(error).__name__}: {error}'


def names_of_tensors(model):
    """{tensor: name} of a module's parameters and persistent buffers; a tied one has the first of its names.

    Uses state_dict() because fully_shard hooks into it and first restores its sharded parameters: after a forward
    without gradients, named_parameters() would give gathered ones.
    """
    names = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(tensor, name)
    return names


def in_whole(share, name, tensor):
    """A parameter of this name, or one of its moments; if it is cut over ranks, as the part of the whole that it is."""
    return CutTensor(tensor, share.slices[name]) if name in share.slices and tensor.dim() else tensor


def as_saved(tensor):
    """The tensor as a checkpoint holds it, which any run can read: frozen weights kept in bfloat16 become fp32."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def tensors_to_save(model, optimizer, optimizer_key='optim', share=WHOLE):
    """{'model.NAME': tensor, 'optim.NAME.SLOT': tensor}, where a slot is exp_avg, for example. Leaves out the weights
    that init_from has (share.of_base). Moments kept in fewer bits are converted to fp32 as they are written."""
    names = names_of_tensors(model)
    tensors = {
        f'model.{name}': in_whole(share, name, as_saved(tensor.detach()))
        for tensor, name in names.items()
        if name not in share.of_base
    }
    for parameter, slots in optimizer.state.items():
        name = names[parameter]
        for slot, value in slots.items():
            if slot.endswith(moments.SCALES):
                continue
            if value.dtype in (torch.uint8, torch.bfloat16):
                like, make = in_whole(share, name, parameter.detach()), partial(moments.in_fp32, slots, slot)
                tensors[f'{optimizer_key}.{name}.{slot}'] = MadeLater(like, make)
            else:
                tensors[f'{optimizer_key}.{name}.{slot}'] = in_whole(share, name, value)
    others = [key for key, value in tensors.items() if not isinstance(value, torch.Tensor | CutTensor | MadeLater)]
    assert not others, f'only tensors can be saved (anything else would be pickled), not {others[:3]}'
    return tensors


# --- load -------------------------------------------------------------------------------------------------------------

COUNTS = {'skipped': int, 'in_a_row': int, 'losses': [float]}
# What state.json may say, see check_form(): as much of it as is read when the weights are.
STATE = {
    'step': int,
    'step_of_weights?': int,
    'config': {'dataset': str, 'data_dir': str, 'init_from': str, 'dataset_stages?': list, 'prompts?': [str]},
    'identity': {'model': {'modules_to_save?': [str], 'lora_targets?': str, 'yarn?': ([float], None)}},
    'scaler': dict,
    'scalers?': [dict],
    'numbers?': COUNTS,
    'numbers_of_replicas?': [COUNTS],
    'best?': {'step': (int, None), 'val_loss': (float, None), 'worse': int, 'evaluated': list, 'stage?': (int, None)},
    'begun?': str,
    'base?': ({'init_from': str, 'fingerprint': str}, None),
    'reference?': (str, None),
    'diloco?': {'num_replicas': int, 'fragments': [[str]], 'mid_round': bool},
}


def read_state(path):
    """The dict that was passed to Saver.save() by a train script, each field of which is checked."""
    where = f'{path}/state.json'
    state = read_json(where, STATE, 'copy the checkpoint again')
    for keys in (state['config'], state['identity']['model']):
        check_saved(keys, where)
    return state


def read_model_config(path, state):
    """The ModelConfig of a checkpoint whose model is a GPT of model.py. Raises ValueError if it is none, or if the
    checkpoint has other weights than such a model: a size from a file decides how much memory is taken."""
    where = f'{path}/state.json: identity.model'
    config, index = ModelConfig.from_json(state['identity']['model'], where), read_index(path)
    blocks = {key.split('.')[2] for key in index if key.startswith('model.blocks.')}
    if len(blocks) != config.n_layer:
        raise ValueError(
            f'{where} has n_layer={config.n_layer}, and the checkpoint has weights of {len(blocks)} blocks'
        )
    with torch.device('meta'):
        names = names_of_tensors(GPT(config))
    saved = {key: entry for key, entry in index.items() if key.startswith('model.')}
    check_fits(path, saved, {f'model.{name}': tensor for tensor, name in names.items()})
    return config


def load(path, model, optimizer=None, optimizer_key='optim', share=WHOLE):
    """Load a checkpoint in place, whatever strategy and number of ranks wrote it, and return its state. Collective.

    model: the module itself, of plain tensors or DTensors. optimizer: gets state for exactly those parameters that had
    some when the checkpoint was written, and keeps its own param_groups. optimizer_key, share: see Saver.save().
    The returned state's 'step' is that of the weights; DiLoCo's replicas may have trained beyond it.
    Raises ValueError on all ranks if names, shapes or dtypes differ from the model's on one of them, or if it cannot
    read a file.
    """
    names = names_of_tensors(model)
    with agreeing(path):
        index = read_index(path)
        saved = saved_for(share, index, ['model'] if optimizer is None else ['model', optimizer_key])
        weights = weights_to_fill(names, saved, share)
        slots = [] if optimizer is None else slots_to_fill(names, saved, optimizer, optimizer_key, share)
        check_fits(path, saved, weights | {slot.key: slot.target for slot in slots})
        read_into(path, index, weights | {slot.key: slot.target for slot in slots if not slot.form})
        put_back_bfloat16(path, names, weights)
        if optimizer is not None:
            fill_optimizer(path, index, optimizer, slots, share)
        state = read_json(f'{path}/state.json', {'step': int, 'step_of_weights?': int})
    return {**state, 'step': state.get('step_of_weights', state['step'])}


@contextlib.contextmanager
def agreeing(path):
    """A context for reading a checkpoint. Collective: what one rank cannot read or finds wrong, all ranks raise."""
    problem = None
    try:
        yield
    except OSError as error:
        problem = f'cannot read checkpoint {path}: rank {dist.get_rank()}: {error}'
    except ValueError as error:
        problem = str(error)
    collectives.raise_together(problem)


def saved_for(share, index, kinds):
    """Those entries of an index that this rank's model and optimizer have to take up. kinds: 'model', 'optim'."""
    elsewhere = {f'{kind}.{name}' for name in share.elsewhere for kind in kinds}  # other stages of a pipeline load them
    saved = {key: tensor for key, tensor in index.items() if key.startswith(tuple(f'{kind}.' for kind in kinds))}
    return {key: tensor for key, tensor in saved.items() if not elsewhere & {key, key.rpartition('.')[0]}}


def weights_to_fill(names, saved, share):
    """{key: the model's tensor, or a copy in fp32 of one in bfloat16}. names: see names_of_tensors()."""
    base = {f'model.{name}' for name in share.of_base}  # already loaded from init_from
    left_out = base if base.isdisjoint(saved) else set()
    # A fine-tuning run may begin to balance its experts when it resumes; at first the load is uniform.
    left_out |= {key for name in names.values() if is_load(key := f'model.{name}') and key not in saved}
    return {
        key: in_whole(share, name, as_saved(tensor.detach()))
        for tensor, name in names.items()
        if (key := f'model.{name}') not in left_out
    }


class Slot(NamedTuple):
    """One tensor of an optimizer's state, such as the exp_avg of a parameter."""

    key: str  # in the checkpoint
    index: int  # of the parameter in the optimizer
    name: str  # of the slot
    parameter: torch.Tensor
    name_of_parameter: str
    form: moments.Form | None  # of a moment that this optimizer does not keep in fp32
    value: torch.Tensor | None  # to be filled, in fp32
    target: torch.Tensor | CutTensor  # the same as a part of the whole; with a form only its shape and dtype are used


def slots_to_fill(names, saved, optimizer, optimizer_key, share):
    """A Slot for everything that the checkpoint has of this optimizer's parameters."""
    forms, zeros_like, _ = kept_by(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group['params']]
    index_of = {f'{optimizer_key}.{names[parameter]}': index for index, parameter in enumerate(parameters)}
    slots = []
    for key, tensor in saved.items():
        of_parameter, _, slot = key.rpartition('.')
        if of_parameter not in index_of:
            continue
        index = index_of[of_parameter]
        parameter, form, value = parameters[index], None, None
        if not tensor.shape:
            value = torch.zeros((), dtype=tensor.dtype)  # `step`
        elif parameter in forms:
            form = forms[parameter]
        else:
            value = zeros_like(parameter, dtype=tensor.dtype)  # a moment is sharded like its parameter
        target = in_whole(share, names[parameter], parameter.detach() if value is None else value)
        slots.append(Slot(key, index, slot, parameter, names[parameter], form, value, target))
    names_of = {parameter: [] for parameter in parameters}
    for slot in slots:
        names_of[slot.parameter].append(slot.name)
    for group in optimizer.param_groups:  # a parameter that was never trained has none
        kinds = {frozenset(names_of[parameter]) for parameter in group['params'] if names_of[parameter]}
        if len(kinds) > 1:
            found = ' and '.join(','.join(sorted(kind)) for kind in sorted(kinds, key=sorted)[:2])
            raise ValueError(f'the checkpoint has for some weights {found} of the optimizer: copy it again')
    return slots


def kept_by(optimizer):
    """How an optimizer keeps its moments: ({parameter: moments.Form} of those that are not fp32, a function that makes
    one to be filled, and one that puts one in fewer bits where it belongs)."""
    on_host = isinstance(optimizer, StateOnHost)
    itself = optimizer.optimizer if on_host else optimizer
    forms = itself.forms if isinstance(itself, Elementwise) else {}  # PyTorch's own optimizers have none
    return (forms, optimizer.zeros_like, optimizer.at_rest) if on_host else (forms, torch.zeros_like, lambda x: x)


def check_fits(path, saved, targets):
    """Raise ValueError unless the checkpoint has what is to be filled and nothing else, in the same shapes and
    dtypes."""

    def kind(tensors, key):
        return f'{tuple(tensors[key].shape)} {tensors[key].dtype}' if key in tensors else 'missing'

    different = [key for key in sorted(saved.keys() | targets.keys()) if kind(saved, key) != kind(targets, key)]
    # A fine-tuning run may also end to balance its experts when it resumes.
    different = [key for key in different if key in targets or not is_load(key)]
    if different:
        key = different[0]
        first = f'{key} is {kind(saved, key)} in the checkpoint and {kind(targets, key)} here'
        raise ValueError(f'checkpoint {path} does not fit this model: {first} ({len(different)} differences in all)')


@torch.no_grad()
def put_back_bfloat16(path, names, weights):
    """Copy frozen weights from their copies in fp32, which are what a checkpoint holds, into the model's bfloat16.

    Raises ValueError if that would round them, because the run would then go on from other weights."""
    for tensor, name in names.items():
        if tensor.dtype == torch.bfloat16 and f'model.{name}' in weights:
            frozen, saved = local_piece(tensor.detach()), local_piece(weights[f'model.{name}'])
            frozen.copy_(saved)
            if not torch.equal(frozen.float(), saved):
                more = f'checkpoint {path} has {name} in more digits than bfloat16'
                raise ValueError(f'{more}: use --frozen_dtype=float32')


def fill_optimizer(path, index, optimizer, slots, share):
    """Give the optimizer the state that was read into the slots, after reading those in fewer bits."""
    state = {}  # index of a parameter -> {slot: tensor}, the form of optimizer.state_dict()
    for slot in slots:
        if not slot.form:
            state.setdefault(slot.index, {})[slot.name] = slot.value
    forms, _, at_rest = kept_by(optimizer)
    if forms:
        for slot, found in read_in_fewer_bits(path, index, [slot for slot in slots if slot.form], share):
            state.setdefault(slot.index, {}).update({name: at_rest(tensor) for name, tensor in found.items()})
    # load_state_dict also moves each tensor to where this optimizer wants it: fused AdamW has `step` on the GPU.
    optimizer.load_state_dict({'state': state, 'param_groups': optimizer.state_dict()['param_groups']})


def read_in_fewer_bits(path, index, slots, share, part_bytes=2**28):
    """Iterate over (slot, {name: tensor} as the optimizer keeps it) of slots with a form.

    A checkpoint holds them in fp32, and there may be no memory for all of those at once. So each rank reads part_bytes
    of them, rounds these, and goes on with the next.
    """

    for part in moments.in_parts(slots, lambda slot: 4 * moments.local(slot.parameter).numel(), part_bytes):
        values = [torch.zeros_like(slot.parameter, requires_grad=False) for slot in part]
        pairs = [*zip(part, values, strict=True)]
        read_into(path, index, {slot.key: in_whole(share, slot.name_of_parameter, value) for slot, value in pairs})
        for slot, value in pairs:
            yield slot, moments.from_fp32(slot.form, slot.parameter, slot.name, moments.local(value))


def load_weights(path, names=None):
    """({name: full tensor on the CPU}, state) of a checkpoint, in one process and without a process group.

    names: read only these; None = all. Raises ValueError for a name that the checkpoint lacks.
    """
    index = read_index(path)
    saved = [key.removeprefix('model.') for key in index if key.startswith('model.')]
    for name in names or ():
        if name not in saved:
            raise ValueError(f'checkpoint {path} has no weight {name}; it has {", ".join(saved[:3])}, ...')
    weights = {name: index[f'model.{name}'].empty() for name in names or saved}
    read_into(path, index, {f'model.{name}': tensor for name, tensor in weights.items()})
    return weights, read_json(f'{path}/state.json', {'step': int})


def read_tensors(path, targets, missing_ok=False):
    """
    Fill the targets, {key: tensor}, from a checkpoint. Collective.

    missing_ok: leave targets alone that the checkpoint lacks. Raises ValueError on all ranks if one cannot read them.
    """
    with agreeing(path):
        index = read_index(path)
        targets = {key: tensor for key, tensor in targets.items() if key in index or not missing_ok}
        check_fits(path, {key: entry for key, entry in index.items() if key in targets}, targets)
        read_into(path, index, targets)
