"""The memory that --dry_run predicts for 8B on GPUs, beside a step of fsdp_manual.py that is followed without a GPU.

The step runs on the meta device, where tensors have sizes and no data, with as many operations as CUDA has kernels.
"""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from short import slow_but
from streams import Event, Stream, load, tensors_in
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore, _create_fake_pg

import expert_manual
import optim
from layout import Ranks
from model import ModelConfig
from planning import activations, memory, sizes

LLAMA_8B = dict(arch='llama', n_layer=32, n_head=32, n_kv_head=8, n_embd=4096, mlp_hidden_dim=14336, vocab_size=128256)
MIXTURE = dict(arch='qwen3', n_layer=8, n_head=32, n_kv_head=4, head_dim=128, n_embd=2048, vocab_size=151936)
MIXTURE |= dict(n_experts=128, experts_per_token=8, expert_hidden_dim=768)  # Qwen3-30B-A3B, a sixth of its layers
KEYS = dict(optimizer='adamw', device='cuda', dtype='bfloat16', fsdp_impl='manual', zero_stage=3, replicate_size=1)
KEYS |= dict(cpu_offload='none', blocks_per_unit=1, prefetch=1)
AS_ON_CUDA = [
    ("self.on_cuda = meshes[0].device_type == 'cuda'", 'self.on_cuda = True'),
    ("torch.device('cuda', torch.cuda.current_device()) if self.on_cuda else", "torch.device('meta') or"),
    ("torch.cuda.Stream(device, priority=-1) if device.type == 'cuda' else None", 'torch.cuda.Stream()'),
]

INPUTS_AS_ON_CUDA = [  # what is in host memory does not count
    ('tensor.is_cuda and tensor.is_set_to(x())', 'tensor.untyped_storage()._cdata == x().untyped_storage()._cdata'),
    ("self.host = torch.empty_like(self.tensor, device='cpu', pin_memory=True)", 'self.host = self.tensor.shape'),
    ('self.host.copy_(self.tensor, non_blocking=True)', 'pass'),
    (
        "torch.empty_like(self.host, device='cuda', pin_memory=False)",
        "torch.empty(self.host, dtype=torch.bfloat16, device='meta')",
    ),
    ('self.tensor.copy_(self.host, non_blocking=True)', 'pass'),
]


class Traced(activations.LiveBytes):
    """LiveBytes that also counts sharded tensors, by what this rank holds of them."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self.follow(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def follow_rooms(self, room_type):
        """Also follow rooms, whose memory is given back by resize_(), which is not an operation."""
        has_memory = room_type.has_memory

        def resize(room, wanted):
            before = room.flat.untyped_storage().nbytes()
            has_memory(room, wanted)
            self.now += room.flat.untyped_storage().nbytes() - before
            self.peak = max(self.peak, self.now)

        return mock.patch.object(room_type, 'has_memory', resize)


@pytest.fixture
def mesh():
    """Four ranks whose collectives do nothing."""
    dist.Backend.register_backend('fake_meta', _create_fake_pg, extended_api=True, devices=['meta', 'cpu'])
    dist.init_process_group('fake_meta', store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh('meta', (4,))
    dist.destroy_process_group()


def traced_peak(config, mesh, micro_steps):
    """Bytes at the peak of the second step. With expert_parallel as many rows arrive at a rank as leave it."""
    live, main = Traced([]), Stream()
    fsdp_manual = load('fsdp_manual.py', *AS_ON_CUDA)
    fsdp_manual.Event = Event
    model = sizes.empty_model(config)
    model.compute_dtype = torch.bfloat16
    cuda = dict(Stream=Stream, Event=Event, stream=lambda _: contextlib.nullcontext(), current_stream=lambda *_: main)
    cuda |= dict(is_available=lambda: True)
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        live.follow_rooms(fsdp_manual.Room),
        activations.kernels_of_cuda(),
        mock.patch.object(expert_manual, 'rows_by_rank', activations.evenly_by_rank),
        live,
    ):
        offload = load('offload.py', *INPUTS_AS_ON_CUDA)
        offload.checkpoint_activations(model, config['activation_checkpointing'])
        experts, their_mesh, sharing = (), None, config.get('expert_parallel', 1)
        if sharing > 1:
            their_mesh = init_device_mesh('meta', (4 // sharing, sharing), mesh_dim_names=('shard', 'expert'))
            experts = expert_manual.split(model, Ranks.of(their_mesh['expert']))
            their_mesh = their_mesh['shard']
        sharded = fsdp_manual.shard(model, model.blocks, mesh, torch.bfloat16, experts=experts, their_mesh=their_mesh)
        model.to_empty(device='meta')
        opt = optim.make_optimizer(model, 'adamw', 1e-3, 0.9, 0.95, 0.1)
        tokens = torch.zeros(config['batch_size'], config['block_size'], dtype=torch.int64, device='meta')
        for _ in range(2):
            live.peak = live.now
            for micro_step in range(micro_steps):
                last = micro_step == micro_steps - 1
                sharded.set_requires_gradient_sync(config['accumulate'] == 'sharded' or last)
                sharded.set_reshard_after_backward(last)
                sharded(tokens, tokens)[0].backward()
            optim.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
    return live.peak


@pytest.mark.parametrize(
    ('checkpointing', 'batch_size', 'micro_steps', 'accumulate'),
    slow_but(['none'], [
     ('none', 1, 1, 'unsharded'), ('selective', 4, 1, 'unsharded'), ('full', 2, 1, 'unsharded'),
     ('full', 2, 2, 'sharded'), ('offload', 2, 1, 'unsharded'), ('offload', 4, 2, 'sharded'),
     ('selective', 1, 2, 'unsharded')]),
)  # fmt: skip
def test_the_predicted_peak_of_8b_on_four_ranks(mesh, checkpointing, batch_size, micro_steps, accumulate):
    config = KEYS | dict(activation_checkpointing=checkpointing, accumulate=accumulate, batch_size=batch_size)
    config |= dict(global_batch_size=4 * micro_steps * batch_size)
    assert_peak_is_predicted(config, LLAMA_8B, mesh, micro_steps)


def assert_peak_is_predicted(config, sizes_of_model, mesh, micro_steps):
    config |= ModelConfig(**sizes_of_model, block_size=4096, tie_embeddings=False).to_dict()
    parts = memory.memory_bytes(config, sizes.empty_model(config), 4, 'fsdp')
    predicted = sum(size for part, size in parts.items() if not part.startswith('host'))
    peak = traced_peak(config, mesh, micro_steps)
    print(f'predicted {predicted / 1e9:.2f} GB, traced {peak / 1e9:.2f} GB: {predicted / peak:.3f}')
    assert 0.97 < predicted / peak < 1.1


@pytest.mark.parametrize(
    ('checkpointing', 'sharing', 'micro_steps', 'accumulate'),
    slow_but(['full 2 1 unsharded', 'none 2 1 unsharded'], [
     ('full', 2, 1, 'unsharded'), ('full', 1, 1, 'unsharded'), ('none', 2, 1, 'unsharded'),
     ('selective', 2, 1, 'unsharded'), ('full', 4, 1, 'unsharded'), ('full', 4, 2, 'unsharded'),
     ('full', 2, 2, 'unsharded'), ('full', 2, 2, 'sharded')],
     name_of=lambda *case: ' '.join(map(str, case))),
)  # fmt: skip
def test_the_predicted_peak_of_a_mixture_on_four_ranks(mesh, checkpointing, sharing, micro_steps, accumulate):
    config = KEYS | dict(activation_checkpointing=checkpointing, accumulate=accumulate, batch_size=2)
    config |= dict(global_batch_size=8 * micro_steps, expert_parallel=sharing)
    assert_peak_is_predicted(config, MIXTURE, mesh, micro_steps)
