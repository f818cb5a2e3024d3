"""
Saving checkpoints: the run's directory and its lock, writing, retention. checkpoint.py reads them, and has the format.
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

import moments
from layout import WHOLE
from pieces import is_finite
from runtime import dcp_files
from runtime.checkpoint import as_saved, checkpoints_in, is_complete, move_aside, names_of_tensors
from runtime.checkpoint_index import Entry, Piece, as_json
from runtime.checkpoint_parts import CutTensor, MadeLater, SavePlanner, in_whole, layout_of, local_piece, value_of_piece
from system.files import no_link, rename_durably, sha256_of, write_file

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


# --- save -------------------------------------------------------------------------------------------------------------


class Saver:
    """Writes the checkpoints of one run. Every rank makes one. All ranks call save() and wait(), in the
    same order; last_good() and has() are for any rank.

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
            (key for key, value in tensors.items() if key.startswith('model.') and not is_finite(local_piece(value))),
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
        """Move what a killed job left at this path aside, or delete it if it is unfinished. Returns True if there is a
        complete checkpoint already."""
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
