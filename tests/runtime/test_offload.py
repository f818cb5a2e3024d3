"""Moments that rest on the host: the update is the same to the bit, a part of the parameters at a time."""

import pytest
import torch
from torch import nn

import optim
from optim import in_parts
from runtime.offload import StateOnHost, bytes_of_moments

KEYS = dict(learning_rate=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1, wd_ts=10)


def train(optimizer, part_bytes):
    """Final parameters, the sizes of the parts of the last step, and the optimizer; part_bytes None: not offloaded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = optim.make_optimizer(model, optimizer, **KEYS)
    parts = []
    optimizer.register_step_pre_hook(lambda *_: parts.append(sum(p.grad is not None for p in model.parameters())))
    for number in range(6):
        if number == 3 and part_bytes is not None:  # as after a resume: there is state already
            optimizer = StateOnHost(optimizer, part_bytes)
        parts.clear()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()], parts, optimizer


@pytest.mark.parametrize('name', ['adamw', 'adana', 'muon'])
def test_the_update_is_the_same_in_parts(name):
    expected, whole, _ = train(name, None)
    found, parts, optimizer = train(name, 8 * 64)  # the moments of the largest matrix
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert whole == [6] and len(parts) > 1 and sum(parts) == 6
    kinds = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    assert kinds and all(value.device.type == 'cpu' for value in kinds)


def test_the_gradients_are_there_after_the_step_as_without_offload():
    parameters = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = StateOnHost(torch.optim.AdamW(parameters), part_bytes=1)
    gradients = [torch.randn_like(parameters[0]), None, torch.randn_like(parameters[2])]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    assert all(parameter.grad is gradient for parameter, gradient in zip(parameters, gradients, strict=True))


def test_parts_hold_what_fits_or_one_parameter():
    parameters = [torch.empty(size) for size in (10, 20, 100, 5, 5)]
    sizes = [[parameter.numel() for parameter in part] for part in in_parts(parameters, bytes_of_moments, 8 * 30)]
    assert sizes == [[10, 20], [100], [5, 5]]
    assert list(in_parts([], bytes_of_moments, 8)) == []
