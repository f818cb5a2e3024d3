"""
Optimizer state in host memory, brought to the GPU a part at a time for the update. (ZeRO-Offload, arXiv 2101.06840,
keeps it there as well, but updates on the host.)

    keep_state_on_host(optimizer)  # any torch.optim.Optimizer, once its state is loaded; then use it as before
"""

import torch
from torch.distributed.tensor import DTensor

PART_BYTES = 2**28  # of state on the GPU at a time: large enough for full PCIe speed, small beside the model


def keep_state_on_host(optimizer, part_bytes=PART_BYTES):
    """From now on the moments of `optimizer` are on the GPU in step() alone, at most part_bytes of them at a time, or
    those of one parameter. They cross PCIe twice: 16 bytes per parameter for Adam, 0.3 s per 1B at 55 GB/s.

    Sharded (DTensor) and plain parameters alike; the state dict stays as it is. Scalars (`step`) stay where they are.
    """
    step, host = optimizer.step, {}  # host: (parameter, key) -> page-locked memory, used again in every step

    def move(parameter, to_host):
        for key, value in optimizer.state[parameter].items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                continue
            local = value._local_tensor if isinstance(value, DTensor) else value
            device = parameter._local_tensor.device if isinstance(parameter, DTensor) else parameter.device
            if to_host:
                if (parameter, key) not in host:
                    host[parameter, key] = torch.empty_like(local, device='cpu', pin_memory=local.is_cuda)
                moved = host[parameter, key].copy_(local, non_blocking=True)
            else:
                moved = local.to(device, non_blocking=True)
            if isinstance(value, DTensor):
                value._local_tensor = moved
            else:
                optimizer.state[parameter][key] = moved

    def step_in_parts():
        gradients = {p: p.grad for group in optimizer.param_groups for p in group['params'] if p.grad is not None}
        for parameter in gradients:
            parameter.grad = None  # step() leaves alone what has no gradient
        for part in in_parts(gradients, part_bytes):
            for parameter in part:
                parameter.grad = gradients[parameter]
                move(parameter, to_host=False)
            step()
            for parameter in part:
                parameter.grad = None
                move(parameter, to_host=True)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # a checkpoint may read the host's copies next

    for parameter in optimizer.state:
        move(parameter, to_host=True)
    optimizer.step = step_in_parts


def in_parts(parameters, part_bytes):
    """Lists of parameters whose Adam moments, 8 bytes per number on a rank, have at most part_bytes, or of one.

    The same lists on every rank, whatever its shards hold: an optimizer may communicate in each step().
    """
    part, size = [], 0
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        needed = 8 * parameter.numel() // (mesh.size(mesh.ndim - 1) if mesh else 1)
        if part and size + needed > part_bytes:
            yield part
            part, size = [], 0
        part.append(parameter)
        size += needed
    if part:
        yield part
