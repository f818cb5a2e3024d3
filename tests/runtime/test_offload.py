"""Moments and inputs of blocks that rest on the host: numbers are the same to the bit. Waits: test_streams.py."""

import pytest
import torch
from pretrained import save_model
from torch import nn

import optim
from huggingface.finetune import Pretrained, for_training
from model import GPT, ModelConfig
from optim import in_parts
from runtime.offload import StateOnHost, bytes_of_moments, checkpoint_activations

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


@pytest.mark.parametrize('kind', ['native', 'llama'])
@pytest.mark.parametrize('compiled', [False, True])
def test_inputs_of_blocks_that_are_offloaded_change_no_number(kind, compiled, tmp_path):
    if kind == 'native':
        shape = {'n_layer': 3, 'n_head': 2, 'n_embd': 32, 'vocab_size': 67, 'block_size': 16, 'dropout': 0.1}
        make = lambda: GPT(ModelConfig(arch='qwen3', **shape))  # noqa: E731
    else:
        pretrained = Pretrained(save_model(tmp_path / kind, kind), block_size=16)
        make = lambda: for_training(pretrained)  # noqa: E731
    results = []
    for mode in ('none', 'offload'):
        model = make()
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        checkpoint_activations(model, mode)
        if compiled:
            torch.compiler.reset()
            for block in model.blocks:
                block.forward = torch.compile(block.forward, backend='aot_eager')
        x = torch.randint(67, (2, 16))
        loss = model(x, x.roll(-1, 1))[0]
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
