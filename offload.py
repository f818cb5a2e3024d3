"""What can be kept in host memory to save the GPU's: the optimizer's state (cpu_offload=optimizer), and activations
between the forward and the backward pass (activation_checkpointing=offload)."""

import contextlib
import weakref
from functools import partial

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from pieces import in_parts, local


class StateOnHost:
    """An optimizer whose moments are kept in host memory. Use it in place of the optimizer that it wraps, and make it
    before a checkpoint is loaded: the moments then go to host memory, since the GPU may not have room for all of them.

    step() brings a part of the moments to the GPU at a time: part_bytes of them, or those of one parameter. That is
    enough for full PCIe speed and little compared to the model. The moments cross PCIe twice, 16 bytes per parameter
    for Adam, but a part travels to the host while the next but one comes from it, so 1B parameters take 0.15 s at
    55 GB/s. In this picture time runs to the right, and each line is a stream of the GPU:

        to the GPU     part 0 | part 1 | part 2 | part 3 |
        compute               | step 0 | step 1 | step 2 | step 3 |
        to the host                    | part 0 | part 1 | part 2 | part 3 |

    Parameters may be sharded (DTensor) or plain. The state keeps its form, and scalars (`step`) stay where they are.
    """

    def __init__(self, optimizer, part_bytes=2**28):
        self.optimizer, self.part_bytes = optimizer, part_bytes
        self.param_groups, self.zero_grad, self.state_dict = (
            optimizer.param_groups, optimizer.zero_grad, optimizer.state_dict
        )  # fmt: skip
        on_cuda = torch.cuda.is_available()
        self.to_gpu, self.to_host = (torch.cuda.Stream(), torch.cuda.Stream()) if on_cuda else (None, None)
        self.host = {}  # tensor of the state -> page-locked memory, reused in every step
        assert not optimizer.state, 'this optimizer has moments on the GPU already'

    @property
    def state(self):
        """The optimizer's state, all of it in host memory. Waits for the device."""
        if self.to_host:
            self.to_host.synchronize()
        return self.optimizer.state

    def zeros_like(self, parameter, dtype):
        """A moment in host memory, to be filled from a checkpoint and passed to load_state_dict()."""
        part = local(parameter)
        host = torch.zeros_like(part, dtype=dtype, device='cpu', pin_memory=part.is_cuda)
        moment = DTensor(host, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else host
        self.host[local(moment)] = host.detach()
        return moment

    def at_rest(self, tensor):
        """A copy in host memory of a moment in fewer bits, which has been read from a checkpoint."""
        host = self.zeros_like(tensor, tensor.dtype)
        local(host).copy_(local(tensor))
        return host

    def load_state_dict(self, saved):
        """As an optimizer's load_state_dict() before its first step, except that the moments stay in host memory."""
        parameters = [parameter for group in self.param_groups for parameter in group['params']]
        self.optimizer.state.update({parameters[index]: slots for index, slots in saved['state'].items()})

    def step(self, skip=False):
        """One step of the optimizer for each part of the parameters; parameters of other parts have no gradient then,
        so that the optimizer leaves them alone.

        If `skip` is true, nothing is done. If it is a flag on the device, the host waits for it here: otherwise all
        moments would cross PCIe for a step that may be skipped.
        """
        if skip:
            return
        gradients = {p: p.grad for group in self.param_groups for p in group['params'] if p.grad is not None}
        self.zero_grad()
        parts = [*in_parts(gradients, bytes_of_moments, self.part_bytes)]
        arrived, left = self.fetch(parts[0]) if parts else None, None
        for part, following in zip(parts, [*parts[1:], []], strict=True):
            wait_for(left)  # its memory on the GPU is free from here on, for the part that is fetched next
            arriving = self.fetch(following)
            wait_for(arrived)
            for parameter in part:
                parameter.grad = gradients[parameter]
            self.optimizer.step()
            for parameter in part:
                parameter.grad = None
            arrived, left = arriving, self.leave(part)
        wait_for(left)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient

    def fetch(self, part):
        """Start to copy the moments of these parameters to their device. Returns an event for wait_for()."""
        tensors = [tensor for parameter in part for tensor in self.moments(parameter)]
        devices = [local(parameter).device for parameter in part for _ in self.moments(parameter)]
        copies = [torch.empty_like(tensor, device=device) for tensor, device in zip(tensors, devices, strict=True)]
        return self.copy(self.to_gpu, tensors, copies)

    def leave(self, part):
        """Start to copy the moments of these parameters to the host. Returns an event for wait_for()."""
        tensors = [tensor for parameter in part for tensor in self.moments(parameter)]
        for tensor in tensors:
            if tensor not in self.host:
                self.host[tensor] = torch.empty_like(tensor, device='cpu', pin_memory=tensor.is_cuda)
        return self.copy(self.to_host, tensors, [self.host[tensor] for tensor in tensors])

    def copy(self, stream, tensors, copies):
        """Fill the copies in this stream and put them in place of the tensors. Returns an event; nothing may be
        allocated before wait_for(event)."""
        if stream:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
            for tensor, target in zip(tensors, copies, strict=True):
                target.copy_(tensor, non_blocking=True)
                tensor.data = target
        return stream and stream.record_event()

    def moments(self, parameter):
        state = self.optimizer.state.get(parameter, {})
        return [local(value) for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]


def checkpoint_activations(model, mode):
    """As model.GPT.checkpoint_activations(), with one more mode: 'offload' is 'full' with the kept inputs of blocks in
    host memory."""
    model.checkpoint_activations('full' if mode == 'offload' else mode)
    if mode == 'offload':
        # forward itself is compiled. Here and not as a decorator, since it imports the compiler.
        run = torch.compiler.disable(InputsOnHost().run, recursive=False)
        for block in model.blocks:
            block.forward = partial(run, block.forward)


class InputsOnHost:
    """Moves the inputs of blocks, which are all that 'full' checkpointing keeps, to page-locked host memory until the
    backward pass. On a CPU they stay where they are.

    An input is 2 T C bytes in bf16, and a block takes 24 T C^2 FLOPs or more in forward. With C = 4096, the copy takes
    T C times 0.08 ns at 25 GB/s and the computation T C times 0.25 ns at 400 TFLOP/s, so the copy is hidden. At most
    three inputs are on the GPU, whatever the depth. (torch's save_on_cpu copies in the stream that computes, which has
    to wait for the copies: 0.33 of forward here.)

        compute        block 0 | block 1 | block 2 | block 2 again, backward | block 1 again, backward | block 0 ...
        to the host            | input 0 | input 1 |  (that of the last block stays: it is needed at once)
        to the GPU                                 | input 1                 | input 0
    """

    def __init__(self):
        on_cuda = torch.cuda.is_available()
        self.to_gpu, self.to_host = (torch.cuda.Stream(), torch.cuda.Stream()) if on_cuda else (None, None)
        self.latest = None  # weak reference to the Input that was saved last
        self.leaving = None  # (a tensor, the event after its copy): until then its memory must not be reused

    def run(self, forward, x, *args, **kwargs):
        """Call a block's forward(x, ...); x (B, T, C) is moved if autograd saves it."""
        # A weak reference to x, because what autograd saves keeps these functions alive, and they would keep x.
        with saved_tensors_hooks(partial(self.save, weakref.ref(x)), self.restore):
            return forward(x, *args, **kwargs)

    def save(self, x, tensor):
        """Returns what autograd keeps in place of a tensor: for x(), the block's input, an Input that leaves the GPU
        when the next block saves its own; any other tensor as it is."""
        if not (tensor.is_cuda and tensor.is_set_to(x())):
            return tensor
        before = self.latest and self.latest()
        self.let_go()
        if before is not None:
            self.leaving = before.tensor, before.leave(self.to_host)
        saved = Input(tensor, self.latest)
        self.latest = weakref.ref(saved)
        return saved

    def restore(self, saved):
        """Returns the saved tensor. Backward will ask next for the one saved before it, so that one is fetched now."""
        if not isinstance(saved, Input):
            return saved
        self.let_go()
        saved.fetch(self.to_gpu)
        wait_for(saved.arrived)
        before = saved.before and saved.before()
        if before is not None:
            before.fetch(self.to_gpu)
        return saved.tensor

    def let_go(self):
        if self.leaving:
            wait_for(self.leaving[1])
            self.leaving = None


class Input:
    """The input of one block: on the GPU (tensor), or in host memory (host)."""

    def __init__(self, tensor, before):
        self.tensor, self.before = tensor, before  # before: a weak reference to the Input of the block before
        self.host = self.arrived = None

    def leave(self, stream):
        """Start to copy it to the host. Returns an event that is reached when the copy is done."""
        self.host = torch.empty_like(self.tensor, device='cpu', pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.host.copy_(self.tensor, non_blocking=True)
        self.tensor = None
        return stream.record_event()

    def fetch(self, stream):
        """Start to copy it to the GPU, unless it is there or under way."""
        if self.tensor is None:
            self.tensor = torch.empty_like(self.host, device='cuda', pin_memory=False)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.tensor.copy_(self.host, non_blocking=True)
            self.arrived = stream.record_event()


def wait_for(event):
    """Have the GPU's current stream wait for a copy that was started here."""
    if event:
        torch.cuda.current_stream().wait_event(event)


def bytes_of_moments(parameter):
    """The size of a parameter's moments on one rank with Adam, 8 bytes per number. It is the same on every rank,
    whatever its shard holds, so that all form the same parts: the step() of a part may communicate."""
    mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
    return 8 * parameter.numel() // (mesh.size(mesh.ndim - 1) if mesh else 1)
