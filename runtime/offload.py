"""Optimizer state that rests in host memory: cpu_offload=optimizer."""

import contextlib

import torch
from torch.distributed.tensor import DTensor

from optim import in_parts, local


class StateOnHost:
    """An optimizer whose moments rest in host memory. Use it in place of the optimizer from here on.

    step() takes part_bytes of them at a time, or those of one parameter: enough for full PCIe speed, little beside the
    model. They cross PCIe twice: 16 bytes per parameter for Adam, 0.15 s per 1B at 55 GB/s, since a part travels to the
    host while the next but one comes from it; time runs to the right, each line is a stream of the GPU:

        to the GPU     part 0 | part 1 | part 2 | part 3 |
        compute               | step 0 | step 1 | step 2 | step 3 |
        to the host                    | part 0 | part 1 | part 2 | part 3 |

    Sharded (DTensor) and plain parameters alike; the state keeps its form, and scalars (`step`) stay where they are.
    """

    skips_on_device = False

    def __init__(self, optimizer, part_bytes=2**28):
        self.optimizer, self.part_bytes = optimizer, part_bytes
        self.param_groups, self.zero_grad = optimizer.param_groups, optimizer.zero_grad
        on_cuda = torch.cuda.is_available()
        self.to_gpu, self.to_host = (torch.cuda.Stream(), torch.cuda.Stream()) if on_cuda else (None, None)
        self.host = {}  # tensor of the state -> page-locked memory, used again in every step
        self.leave(optimizer.state)

    @property
    def state(self):
        """The optimizer's, all of it in host memory. Waits for the device."""
        if self.to_host:
            self.to_host.synchronize()
        return self.optimizer.state

    def step(self):
        """One step of the optimizer for each part of the parameters: it leaves alone what has no gradient."""
        gradients = {p: p.grad for group in self.param_groups for p in group['params'] if p.grad is not None}
        self.zero_grad()
        parts = [*in_parts(gradients, bytes_of_moments, self.part_bytes)]
        arrived, left = self.fetch(parts[0]) if parts else None, None
        for part, following in zip(parts, [*parts[1:], []], strict=True):
            wait_for(left)  # its memory on the GPU is free, for the part that is fetched now
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
        """Start to copy the moments of these parameters to their device; wait_for() what this returns."""
        tensors = [tensor for parameter in part for tensor in self.moments(parameter)]
        devices = [local(parameter).device for parameter in part for _ in self.moments(parameter)]
        copies = [torch.empty_like(tensor, device=device) for tensor, device in zip(tensors, devices, strict=True)]
        return self.copy(self.to_gpu, tensors, copies)

    def leave(self, part):
        """Start to copy the moments of these parameters to the host; wait_for() what this returns."""
        tensors = [tensor for parameter in part for tensor in self.moments(parameter)]
        for tensor in tensors:
            if tensor not in self.host:
                self.host[tensor] = torch.empty_like(tensor, device='cpu', pin_memory=tensor.is_cuda)
        return self.copy(self.to_host, tensors, [self.host[tensor] for tensor in tensors])

    def copy(self, stream, tensors, copies):
        """Put the copies in place of the tensors. Nothing may be allocated before wait_for(what this returns)."""
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


def wait_for(event):
    """Have the GPU's current stream wait for what StateOnHost.copy() started."""
    if event:
        torch.cuda.current_stream().wait_event(event)


def bytes_of_moments(parameter):
    """Of Adam: 8 bytes per number. The same on every rank, whatever its shard holds: a step() may communicate."""
    mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
    return 8 * parameter.numel() // (mesh.size(mesh.ndim - 1) if mesh else 1)
