"""Moments and inputs of blocks that are kept on the host: numbers are the same to the bit. test_streams.py tests the
waits."""

import pytest
import torch
import torch.distributed as dist
from pretrained import save_model
from torch import nn

import optim
from huggingface.finetune import for_training
from huggingface.pretrained import Pretrained
from model import GPT, ModelConfig
from offload import StateOnHost, bytes_of_moments, checkpoint_activations
from pieces import in_parts
from runtime import checkpoint, checkpoint_saver

KEYS = dict(learning_rate=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1, wd_ts=10)


def resumed(before, optimizer):
    """An optimizer with the state of an earlier one, loaded as by checkpoint.load()."""
    saved, found = before.state_dict()['state'], {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group['params']]
    for index, slots in saved.items():
        for slot, tensor in slots.items():
            value = optimizer.zeros_like(parameters[index], tensor.dtype) if tensor.dim() else torch.zeros(())
            found.setdefault(index, {})[slot] = value.copy_(tensor)
    optimizer.load_state_dict({'state': found})
    return optimizer


def train(optimizer_name, part_bytes):
    """(final parameters, sizes of the parts of the last step, the optimizer). part_bytes=None: not offloaded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    parts = []

    def make():
        found = optim.make_optimizer(model, optimizer_name, **KEYS)
        found.register_step_pre_hook(lambda *_: parts.append(sum(p.grad is not None for p in model.parameters())))
        return found

    optimizer = make()
    for number in range(6):
        if number == 3 and part_bytes is not None:
            optimizer = resumed(optimizer, StateOnHost(make(), part_bytes))
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


def test_a_checkpoint_fills_the_moments_where_they_rest(tmp_path):
    """Where the parameters are, to which torch's load_state_dict() would copy them, there may be no room for all."""
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    try:
        checkpoint_saver.prepare(str(tmp_path))
        model = nn.Linear(6, 8)
        before, after = (optim.make_optimizer(model, 'adamw', **KEYS) for _ in range(2))
        model(torch.randn(4, 6)).sum().backward()
        before.step()
        checkpoint_saver.Saver(str(tmp_path), keep=1, say=lambda line: None).save(1, model, before, {})
        after = StateOnHost(after)
        checkpoint.load(checkpoint.choose(str(tmp_path)), model, after)
    finally:
        dist.destroy_process_group()
    for parameter in model.parameters():
        for name, tensor in before.state[parameter].items():
            assert torch.equal(after.state[parameter][name], tensor)
            if tensor.dim():
                assert after.host[after.state[parameter][name]].data_ptr() == after.state[parameter][name].data_ptr()


def test_an_optimizer_with_moments_on_the_gpu_is_refused():
    model = nn.Linear(6, 8)
    optimizer = optim.make_optimizer(model, 'adamw', **KEYS)
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    with pytest.raises(AssertionError, match='moments on the GPU'):
        StateOnHost(optimizer)


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
