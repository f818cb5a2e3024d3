"""
Finds races between the streams of a GPU, on a machine without one.

A GPU runs the work of one stream in order, and different streams side by side. If work in stream B uses what stream A
has made, B must wait for an event that was recorded in A after it was made. A missing wait gives no error, only wrong
numbers now and then. But whether every wait is there does not depend on time, since it follows from the order in which
the host issues operations, events and waits. So the checker runs the real code on CPU tensors, notes that order, and
looks for what is not ordered.

    with Checker() as checker:
        ...  # code that uses torch.cuda.Stream, Event, stream(), current_stream(), synchronize()
        checker.host_reads(tensor)  # the host looks at memory that a copy has been filling
    checker.faults  # [] or lines

*Happens before.* Every stream, and the host, has a vector clock: {stream: how many of its operations are over by now}
(Fidge and Mattern, 1988). An event is a copy of a clock. Whoever waits for it takes, for each stream, the larger of the
two numbers. Two accesses are a race if at least one of them writes, their bytes overlap, and the clock of the later one
does not cover the earlier one.

*Memory.* PyTorch's caching allocator gives freed memory to the next allocation in the stream in which it had been
allocated, without waiting for anybody. If another stream may still use it then, that is a race, too. The checker takes
any later allocation in that stream for one that gets the memory, whatever its size. Page-locked memory is left out,
because its allocator waits for copies.

*The host.* Memory is the host's if hold_on_host() names it, or if it was computed from such memory alone; the host
computes there by itself. A copy between the host's and other memory runs in the current stream, and without
non_blocking the host waits for it.

*What it does not see*: kernels that do not go through PyTorch's dispatcher, and memory that another thread touches.
"""

import contextlib
import functools
import os
import sys
import types
import weakref
from pathlib import Path
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

REPO = Path(__file__).resolve().parent.parent


def load(name, *substitutions):
    """A module of this project, made from its source after substitutions (old, new); each `old` must occur once."""
    source = (REPO / name).read_text()
    for old, new in substitutions:
        assert source.count(old) == 1, f'{source.count(old)} x in {name}: {old}'
        source = source.replace(old, new)
    module = types.ModuleType(Path(name).stem)
    exec(compile(source, str(REPO / name), 'exec'), module.__dict__)
    return module


STREAMS = weakref.WeakSet()


class Stream:
    """In place of torch.cuda.Stream."""

    def __init__(self, *args, **kwargs):
        STREAMS.add(self)
        self.done = 0  # operations issued in this stream
        self.clock = {}  # stream -> how many of its operations are over before the next one here

    def record_event(self, event=None):
        return (event or Event()).record(self)

    def wait_event(self, event):
        for stream, done in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), done)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def synchronize(self):
        self.record_event().synchronize()

    def knows(self, stream, number):
        """Whether operation `number` of a stream is over before the next one here. Those of the host always are."""
        return stream in (self, HOST) or self.clock.get(stream, 0) >= number


HOST = Stream()


class Event:
    """In place of torch.cuda.Event."""

    def __init__(self, **options):
        self.clock = {}

    def record(self, stream=None):
        stream = stream or torch.cuda.current_stream()
        self.clock = {**stream.clock, stream: stream.done}
        return self

    def wait(self, stream=None):
        (stream or torch.cuda.current_stream()).wait_event(self)

    def synchronize(self):
        HOST.wait_event(self)

    def query(self):
        return all(HOST.knows(stream, done) for stream, done in self.clock.items())

    def elapsed_time(self, end):
        if not (self.query() and end.query()):
            torch.cuda.checker.faults.append(f'the host reads a time that may not be there yet in {caller()}')
        return 1.0


class Memory:
    """What is known of one storage: who allocated it, and the accesses after which later ones must be ordered."""

    def __init__(self, storage, stream):
        self.alive, self.allocated_in, self.on_host = StorageWeakRef(storage), stream, stream is HOST
        self.accesses = []  # (first byte, end, stream, number, writes, where)
        self.last_use = {}  # stream -> (number, where)


class Checker(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.streams = [Stream()]  # the last one is current
        self.memories, self.freed, self.faults, self.operations = {}, {}, [], 0
        self.patches = contextlib.ExitStack()

    def __enter__(self):
        for name, value in {
            'Stream': Stream, 'Event': Event, 'stream': self.stream, 'current_stream': lambda *_: self.streams[-1],
            'synchronize': self.synchronize, 'is_available': lambda: True,
        }.items():  # fmt: skip
            self.patches.enter_context(mock.patch.object(torch.cuda, name, value))
        self.patches.enter_context(mock.patch.object(torch.cuda, 'checker', self, create=True))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.patches.close()

    @contextlib.contextmanager
    def stream(self, stream):
        self.streams.append(stream)
        yield
        self.streams.pop()

    def synchronize(self, device=None):
        for stream in {*STREAMS} - {HOST}:
            stream.synchronize()

    def host_reads(self, tensor):
        with self.stream(HOST):
            self.access(tensor, False, 'a read of the host')

    def hold_on_host(self, *tensors):
        """These tensors are in host memory, and what has been done to them so far was done by the host."""
        for tensor in tensors_in(tensors):
            memory = self.memory_of(tensor)
            if not memory.on_host:
                memory.on_host, memory.accesses, memory.last_use = True, [], {}

    def copy(self, tensor, to_host=False, non_blocking=True):
        """In place of tensor.to(): here the memory of the host and that of the GPU are both on the CPU."""
        with _disable_current_modes():
            copied = tensor.clone()
        self.memory_of(copied).on_host = to_host
        self.access(tensor, False, 'a copy')
        self.access(copied, True, 'a copy')
        if not non_blocking:
            self.streams[-1].synchronize()
        return copied

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.forget_what_was_freed()
        result = function(*args, **kwargs)
        schema, name = function._schema, str(function)
        makes_view = any(returned.alias_info and not returned.alias_info.is_write for returned in schema.returns)
        if makes_view or function.namespace == 'prim' or name.startswith(('aten.set_', 'aten.detach')):
            return result
        self.operations += 1
        reads, writes = [], []
        is_empty = 'empty' in name  # only allocates: nothing is read or written
        for index, argument in enumerate(() if is_empty else schema.arguments):
            value = kwargs.get(argument.name, args[index] if index < len(args) else None)
            is_written = (argument.alias_info and argument.alias_info.is_write) or function.namespace == 'c10d'
            (writes if is_written else reads).extend(tensors_in(value))
        given = {tensor.untyped_storage()._cdata for tensor in reads + writes}
        on_host = {self.memory_of(tensor).on_host for tensor in reads + writes}
        with self.stream(HOST if on_host == {True} else self.streams[-1]):
            for tensor in reads:
                self.access(tensor, False, name)
            for tensor in writes:
                self.access(tensor, True, name)
            for tensor in tensors_in(result):
                if tensor.untyped_storage()._cdata not in given:
                    self.memory_of(tensor)
                    if not is_empty:
                        self.access(tensor, True, name)
        if len(on_host) == 2 and name.startswith('aten.copy_') and True not in args[2:]:  # its non_blocking
            self.streams[-1].synchronize()
        return result

    def memory_of(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.memories:
            stream = self.streams[-1]
            self.memories[storage._cdata] = Memory(storage, stream)
            for memory in self.freed.pop(stream, []):
                for other, (number, where) in memory.last_use.items():
                    if not stream.knows(other, number):
                        self.faults.append(
                            f'memory is handed out again, while another stream may still use it: {where}'
                        )
        return self.memories[storage._cdata]

    def forget_what_was_freed(self):
        for key in [key for key, memory in self.memories.items() if memory.alive.expired()]:
            self.free(key)

    def free(self, key):
        memory = self.memories.pop(key)
        if memory.on_host:
            return
        self.freed.setdefault(memory.allocated_in, []).append(memory)

    def access(self, tensor, writes, name):
        if tensor.numel() == 0 or tensor.is_meta:
            return
        memory, stream = self.memory_of(tensor), self.streams[-1]
        stream.done += 1
        first = tensor.storage_offset() * tensor.element_size()
        span = sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        end = first + span * tensor.element_size()
        where = f'{name} {"writes" if writes else "reads"} in {caller()}'
        for begin, until, other, number, wrote, before in memory.accesses:
            if begin < end and first < until and (writes or wrote) and not stream.knows(other, number):
                self.faults.append(f'{where}, not ordered after: {before}')
        # A write hides earlier accesses to the same bytes, since what is ordered after the write is ordered after them.
        hidden = [
            access for access in memory.accesses
            if first <= access[0] and access[1] <= end and (writes or (access[2] is stream and not access[4]))
        ]  # fmt: skip
        memory.accesses = [access for access in memory.accesses if access not in hidden]
        memory.accesses.append((first, end, stream, stream.done, writes, where))
        memory.last_use[stream] = stream.done, where


def tensors_in(tree):
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return [leaf._local_tensor if isinstance(leaf, DTensor) else leaf for leaf in leaves]


@functools.cache
def is_ours(filename):
    return filename.startswith(f'{REPO}/') and not filename.startswith((f'{REPO}/tests/', f'{REPO}/.venv/'))


def caller():
    """The line of this project that has issued the current operation. (traceback.extract_stack() would read the source
    of every frame, at each operation.)"""
    frame = sys._getframe(1)
    while frame and not is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    if not frame:
        return 'the test'
    return f'{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}'
