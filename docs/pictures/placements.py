"""
Which part of a model does each rank hold under each strategy? Found by cutting a real model, for
draw_strategies.py.

    held = placements.held_by_all()['ZeRO 3 (FSDP)'][1]     # of rank 1
    held.own['moments']['blocks.0.attn.qkv.weight']     # True where this rank holds the moments of that element

For each of 4 ranks a small model is made and cut by the same modules that the train scripts use. The value of each
weight is its number in the whole model, so the tensors of a rank tell which part of the model they are. Collectives do
nothing (torch's fake process group), because where a weight lies is decided before anything is sent.
"""

import contextlib
import itertools
import multiprocessing
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import expert_manual
import fsdp_manual
import optim
import pipeline_manual
import tensor_manual
from layout import Layout, Ranks, Share, without
from model import GPT, ModelConfig
from planning import roofline
from runtime.first_weights import initialize

RANKS = 4
KINDS = ('weights', 'gradients', 'moments')
MODEL = dict(arch='llama', n_layer=4, n_head=4, n_embd=64, mlp_hidden_dim=192, vocab_size=64, block_size=32)
EXPERTS = dict(arch='qwen3', head_dim=16, n_experts=4, experts_per_token=2, expert_hidden_dim=48)
BY_HAND = dict(fsdp_impl='manual', accumulate='sharded')
STRATEGIES = {  # name in the picture -> strategy, script, keys
    'DDP': ('ddp', 'train_ddp.py', {}),
    'ZeRO 1': ('fsdp', 'train_fsdp.py', {'fsdp_impl': 'manual', 'zero_stage': 1}),
    'ZeRO 2': ('fsdp', 'train_fsdp.py', {**BY_HAND, 'zero_stage': 2}),
    'ZeRO 3 (FSDP)': ('fsdp', 'train_fsdp.py', BY_HAND),
    'HSDP, 2 × 2': ('fsdp', 'train_fsdp.py', {**BY_HAND, 'replicate_size': 2}),
    'DiLoCo, 2 × 2': ('diloco', 'train_diloco.py', {**BY_HAND, 'num_replicas': 2}),
    'tensor 2 × FSDP 2': ('fsdp', 'train_parallel.py', {**BY_HAND, 'tensor_parallel': 2}),
    'experts 2 × 2': ('fsdp', 'train_parallel.py', {**BY_HAND, 'expert_parallel': 2, **EXPERTS}),
    'pipeline, 4 stages': ('pipeline', 'train_pipeline.py', {'pipeline_stages': 4}),
}


def keys_of(name):
    """All keys of a run of two micro-steps, with those of the model."""
    _, script, keys = STRATEGIES[name]
    copies = RANKS // keys.get('tensor_parallel', 1)  # ranks that work on different tokens
    batch = {'batch_size': 1, 'global_batch_size': 4 if 'pipeline_stages' in keys else 2 * copies}
    schedule = {'learning_rate': 1e-3, 'weight_decay': 0.0, 'beta1': 0.0, 'compile': False, 'dtype': 'float32'}
    return roofline.keys_of(script, {**MODEL, **batch, **schedule, **keys}, on_cpu=True)


def numbers_of(model):
    """{name of a parameter: its elements' numbers in the whole model, as a tensor of its shape}."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    ends = itertools.accumulate(sizes, initial=0)
    return {
        name: torch.arange(first, first + parameter.numel(), dtype=torch.float32).view(parameter.shape)
        for (name, parameter), first in zip(model.named_parameters(), ends, strict=False)
    }


def local(tensor):
    return tensor.to_local() if hasattr(tensor, 'to_local') else tensor


class Held:
    """What one rank holds in the middle of a step: in `own` what rests here, in `whole` what is here for a while.

    Both are {kind: {name of a parameter: boolean array of its rows and columns}}. The point in time is between forward
    and backward of the second micro-step, when the gradients of the first are there, and the moments of the last step.
    """

    def __init__(self, shapes):
        self.own, self.whole = (
            {
                kind: {name: np.zeros((shape[0], shape[1:].numel()), bool) for name, shape in shapes.items()}
                for kind in KINDS
            }
            for _ in range(2)
        )
        self.copy = 0  # the number of the replica, where replicas train on their own

    def mark(self, kind, name, numbers, first, where=None):
        """Note that the elements with these numbers in the whole model are here. where: self.own unless given."""
        where = self.own if where is None else where
        where[kind][name].reshape(-1)[numbers.flatten().long().numpy() - first] = True


@contextlib.contextmanager
def as_rank(rank):
    """A process group that sends nothing, and in which this process has that rank."""
    dist.init_process_group('fake', store=FakeStore(), rank=rank, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def held_by_all():
    """{name: [Held of each rank]} of all STRATEGIES. Each rank has a process, as torch caches what a mesh answers."""
    with multiprocessing.get_context('spawn').Pool(RANKS) as pool:
        by_rank = pool.map(held_by_rank, range(RANKS))
    return {name: [held[name] for held in by_rank] for name in STRATEGIES}


def held_by_rank(rank):
    """{name: Held} of that rank."""
    held = {}
    for name, (strategy, _, _) in STRATEGIES.items():
        keys = keys_of(name)
        with as_rank(rank), mock.patch.object(expert_manual, 'send_counts', lambda counts, group: counts):
            held[name] = _held(strategy, keys, SimpleNamespace(**keys), rank)
    return held


def _held(strategy, keys, config, rank):
    device = torch.device('cpu')
    with torch.device('meta'):
        raw_model = GPT(ModelConfig.from_keys(keys))
    numbers = numbers_of(GPT(ModelConfig.from_keys(keys)))
    first_of = {name: int(value.flatten()[0]) for name, value in numbers.items()}
    held = Held({name: value.shape for name, value in numbers.items()})
    share = Share(first_value=lambda name, parameter, seed, device: numbers[name].clone())

    # As the train scripts do it.
    model, layout = raw_model, Layout.of(keys, strategy, RANKS)
    if layout.stage > 1:
        mesh = layout.mesh(device, config.timeout_s)
        model = raw_model = pipeline_manual.Stage(
            raw_model, mesh.get_local_rank('stage'), config.pipeline_stages, 1, share
        )
    if layout.shard > 1:
        mesh = layout.mesh(device, config.timeout_s)
        expert_mesh, experts = None, []
        if layout.replica > 1:
            held.copy, mesh = mesh.get_local_rank('replica'), mesh['shard']
        elif layout.tensor > 1:
            tensor_manual.Split(raw_model, Ranks.of(mesh['tensor']), share)
            mesh = without(mesh, 'tensor')
        if layout.expert > 1:
            expert_mesh = layout.expert_mesh(device, config.timeout_s)
            experts = expert_manual.split(raw_model, Ranks.of(expert_mesh['expert']), share)
            expert_mesh = expert_mesh['shard']
        model = fsdp_manual.shard(
            raw_model, raw_model.blocks, mesh, torch.float32, config.zero_stage, 1, False, experts, expert_mesh
        )
    run = SimpleNamespace(
        found=None, start=None, pretrained=None, config=config, device=device, home=device, share=share
    )
    initialize(raw_model, run)

    # First the weights at rest. Then a step whose gradients are the same numbers; with beta1 = 0 Adam's first moments
    # are the gradients, so they are these numbers, too.
    optimizer = optim.from_config(raw_model, config, device)
    named = dict(raw_model.named_parameters())
    for name, parameter in named.items():
        held.mark('weights', name, local(parameter.detach()), first_of[name])
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    for name, parameter in named.items():
        moments = [value for key, value in optimizer.state[parameter].items() if key != 'step']
        assert all(local(moment).shape == local(parameter).shape for moment in moments)
        held.mark('moments', name, local(moments[0]), first_of[name])
    optimizer.zero_grad(set_to_none=True)

    if layout.shard == 1:  # gradients are where weights are, and nothing is gathered
        held.own['gradients'] = held.own['weights']
        return held
    tokens = torch.zeros(1, config.block_size, dtype=torch.long)
    model.set_requires_gradient_sync(config.accumulate == 'sharded')
    model.set_reshard_after_backward(False)
    model(tokens, tokens)[0].backward()
    weight_of = {weight: unit for unit in model.units for weight in unit.weights}
    name_of, modules = {}, {module: module_name for module_name, module in raw_model.named_modules()}
    slices = share.slices  # this rank's part of matrices or experts: no more is gathered

    def mark_whole(kind, name):
        part = slices[name].of(numbers[name]) if name in slices else numbers[name]
        held.mark(kind, name, part, first_of[name], held.whole)

    for weight in weight_of:
        name_of[weight] = '.'.join(filter(None, (modules[weight.places[0][0]], weight.places[0][1])))
        if weight.gradient_sum is not None:
            mark_whole('gradients', name_of[weight])
        if weight.sharded.grad is not None:
            assert weight.sharded.grad.to_local().shape == weight.sharded.to_local().shape
            held.own['gradients'][name_of[weight]] = held.own['weights'][name_of[weight]]
    model(tokens, tokens)
    for weight, unit in weight_of.items():
        if unit.room.occupant is unit:
            mark_whole('weights', name_of[weight])
    return held
