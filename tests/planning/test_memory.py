"""Predicted memory and traffic beside those of real runs, exact counts, and what --dry_run prints."""

import dataclasses
import importlib.util
import itertools
import json
import re
import statistics
import weakref

import pytest
import torch
import torch.distributed as dist
from launch import run_function, run_many
from outputs import column
from short import slow_but
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import deepspeed_engine
import diloco
import float8
import optim
from layout import accumulation_steps
from model import GPT, ModelConfig
from planning import activations, memory, report, sizes, traffic

SIZES = {'n_layer': 4, 'n_head': 4, 'n_embd': 128, 'vocab_size': 1000, 'block_size': 128}
ARCHITECTURES = {
    'gpt2': {'arch': 'gpt2'},
    'gpt2 with dropout, untied': {'arch': 'gpt2', 'dropout': 0.1, 'tie_embeddings': False, 'bias': False},
    'enoki': {'arch': 'enoki'},
    'enoki with biases': {'arch': 'enoki', 'bias': True},
    'llama with grouped queries': {'arch': 'llama', 'n_kv_head': 2},
    'llama with biases, tied': {'arch': 'llama', 'bias': True, 'tie_embeddings': True, 'mlp_hidden_dim': 200},
    'qwen3': {'arch': 'qwen3', 'n_kv_head': 1, 'head_dim': 48},
    'qwen3 gated': {'arch': 'qwen3', 'attention_gate': True},
    'mixture': {'arch': 'qwen3', 'n_experts': 8, 'expert_hidden_dim': 64},
    'mixture after dense layers': {'arch': 'qwen3', 'n_experts': 8, 'expert_hidden_dim': 64, 'dense_layers': 2},
    'llama with windows': {'arch': 'llama', 'window_pattern': 'SL', 'window_size': 16, 'logit_softcap': 30.0},
}


def shape_of(name, **changes):
    return ModelConfig(**{**SIZES, **ARCHITECTURES[name], **changes})


def config_of(shape, **changes):
    """The resolved config that a train script passes."""
    config = dict(batch_size=4, global_batch_size=32, block_size=shape.block_size, dtype='float32', device='cpu')
    config |= dict(activation_checkpointing='none', optimizer='adamw', learning_rate=6e-4, max_iters=1000)
    config |= dict(warmup_iters=100, lr_schedule='cosine', lr_decay_iters=1000, min_lr=6e-5, keep_checkpoints=2)
    config |= dict(eval_sequences=160, eval_only=False, trace_step=0, trace_memory=False)
    return {**config, **changes}


def predicted_memory(config, shape, *arguments, **options):
    config = {**config, **shape}
    return memory.memory_bytes(config, sizes.empty_model(config), *arguments, **options)


def predicted_traffic(config, shape, *arguments):
    config = {**config, **shape}
    return traffic.communication_bytes(config, sizes.empty_model(config), *arguments)


def counts_of(shape):
    return sizes.empty_model(shape.to_dict()).parameter_counts()


FSDP = {'zero_stage': 3, 'replicate_size': 1, 'cpu_offload': 'none', 'accumulate': 'unsharded'}
FSDP |= {'fsdp_impl': 'torch', 'blocks_per_unit': 1, 'prefetch': 1}


# --- memory -----------------------------------------------------------------------------------------------------------


class PeakMemory(TorchDispatchMode):
    """Sums the bytes of all storages that are alive after each operation, and keeps the largest sum."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self.storages = {}  # id -> weak reference; sizes are read each time, since fully_shard resizes storages

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.watch(tree_iter((args, kwargs, result)))
        alive = {key: reference() for key, reference in self.storages.items()}
        self.storages = {key: self.storages[key] for key, storage in alive.items() if storage is not None}
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive.values() if storage is not None))
        return result

    def watch(self, tensors):
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):  # a DTensor's storage is a dummy
                storage = tensor.untyped_storage()
                self.storages[id(storage)] = weakref.ref(storage)


def bytes_of(tensors):
    """Bytes of the tensors, or of the local shards of DTensors, padding included."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.untyped_storage().nbytes() for tensor in local)


def moments(optimizer):
    return [value for state in optimizer.state.values() for value in state.values() if value.dim() > 0]


def measure(shape, config):
    """{part: bytes} of a micro-step on one process that does not shard."""
    torch.manual_seed(0)
    model = GPT(shape, getattr(torch, config['dtype']))
    if config.get('matmul_dtype'):
        float8.convert(model)
    model.checkpoint_activations(config['activation_checkpointing'])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    return measure_step(model, config)


def measure_step(model, config):
    """Like measure(), for a given model."""
    optimizer = optim.make_optimizer(model, config['optimizer'], config['learning_rate'], 0.9, 0.95, 0.1)
    tokens = torch.randint(model.config.vocab_size, (config['batch_size'], config['block_size']))
    model(tokens, tokens)[0].backward()
    optimizer.step()
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.requires_grad]
    with PeakMemory() as memory:  # gradients are there already, as in every micro-step but the first
        memory.watch([*parameters, *gradients, *model.buffers(), tokens])
        model(tokens, tokens)[0].backward()
    measured = {
        'weights': bytes_of(parameters),
        'gradients': bytes_of(gradients),
        'optimizer': bytes_of(moments(optimizer)),
    }
    others = measured['weights'] + measured['gradients'] + bytes_of([*model.buffers(), tokens])
    return measured | {'activations with logits': memory.peak - others}


@pytest.mark.parametrize(
    ('name', 'dtype', 'checkpointing', 'vocab_size'),
    [
        ('gpt2', 'bfloat16', 'none', 1000),
        ('gpt2', 'float32', 'full', 1000),
        pytest.param('gpt2 with dropout, untied', 'bfloat16', 'selective', 1000, marks=pytest.mark.slow),
        ('enoki', 'bfloat16', 'full', 1000),
        ('enoki', 'float32', 'selective', 1000),
        pytest.param('enoki', 'bfloat16', 'none', 40000, marks=pytest.mark.slow),  # two chunks of the loss
        pytest.param('gpt2', 'float32', 'none', 100000, marks=pytest.mark.slow),  # four chunks
        ('llama with grouped queries', 'float32', 'none', 1000),
        ('llama with grouped queries', 'bfloat16', 'full', 1000),
        ('llama with biases, tied', 'float32', 'selective', 1000),
        ('qwen3', 'bfloat16', 'selective', 1000),
        ('qwen3 gated', 'float32', 'none', 1000),
        ('llama with windows', 'float32', 'none', 1000),
        ('mixture after dense layers', 'float32', 'none', 1000),
        ('mixture after dense layers', 'float32', 'full', 1000),
        ('gpt2', 'bfloat16 float8', 'none', 1000),
        pytest.param('qwen3', 'bfloat16 float8', 'selective', 1000, marks=pytest.mark.slow),
    ],
)
def test_predicted_memory_is_what_a_step_holds(name, dtype, checkpointing, vocab_size):
    shape = shape_of(name, vocab_size=vocab_size)
    dtype, _, matmul_dtype = dtype.partition(' ')
    config = config_of(shape, dtype=dtype, activation_checkpointing=checkpointing, matmul_dtype=matmul_dtype or None)
    predicted = predicted_memory(config, shape.to_dict(), world_size=1)
    predicted['activations with logits'] = predicted['activations'] + predicted['logits']
    measured = measure(shape, config)
    for part, size in measured.items():
        tolerance = 0.15 if part == 'activations with logits' else 0.05
        assert predicted[part] == pytest.approx(size, rel=tolerance), (part, predicted[part] / size)


@pytest.mark.parametrize('name', ['llama with grouped queries', 'mixture', 'mixture after dense layers'])
@pytest.mark.parametrize('batch_size', [1, 8])  # the peak is at the end of backward, and at its beginning
def test_gradients_of_one_rank_are_made_while_activations_are_freed(batch_size, name):
    together, apart, peak = predicted_and_held_by_one_rank(shape_of(name, block_size=64), batch_size)
    assert together == pytest.approx(peak, rel=0.1)
    assert apart > 1.1 * peak


def test_the_peak_of_one_rank_may_be_between_mixtures_and_dense_blocks():
    """Here a mixture makes more gradients than it frees activations, and a dense block fewer."""
    sizes = {'n_layer': 6, 'dense_layers': 3, 'n_experts': 16, 'expert_hidden_dim': 128}
    shape = shape_of('mixture after dense layers', block_size=64, **sizes)
    together, _, peak = predicted_and_held_by_one_rank(shape, batch_size=2)
    assert together == pytest.approx(peak, rel=0.03)


def predicted_and_held_by_one_rank(shape, batch_size):
    """Bytes of a first step: predicted, the same if all parts had their peak at once, and held."""
    config = config_of(shape, batch_size=batch_size, global_batch_size=batch_size)
    predicted = predicted_memory(config, shape.to_dict(), world_size=1)
    model, tokens = GPT(shape), torch.zeros(batch_size, shape.block_size, dtype=torch.int64)
    with PeakMemory() as memory:
        memory.watch(model.parameters())
        model(tokens, tokens)[0].backward()
    together = sum(predicted.values()) - predicted['optimizer']  # which is made after the first step
    return together, together - predicted['peaks at different moments'], memory.peak


@pytest.mark.slow
def test_checkpointing_and_a_smaller_batch_are_predicted_to_help():
    shape = shape_of('llama with grouped queries')

    def need(**changes):
        parts = predicted_memory(config_of(shape, **changes), shape.to_dict(), 1)
        return sum(parts.values()) - parts.get('workspace', 0)  # of the matmuls, which only a GPU has

    modes = [need(activation_checkpointing=mode) for mode in ('full', 'selective', 'none')]
    assert modes == sorted(modes) and len(set(modes)) == 3
    assert need(activation_checkpointing='offload') == modes[0]  # on a CPU nothing moves
    assert need(batch_size=2) < need(batch_size=4)
    assert need(dtype='bfloat16', device='cuda:0') < need(dtype='bfloat16', device='cpu')  # attention in fp32


def test_offloaded_inputs_of_blocks_are_counted_on_the_host():
    shape = shape_of('llama with grouped queries', n_layer=6)
    config = config_of(shape, dtype='bfloat16', device='cuda:0')
    full, offload = (
        predicted_memory(config | {'activation_checkpointing': mode}, shape.to_dict(), 1)
        for mode in ('full', 'offload')
    )
    size = 4 * shape.block_size * shape.n_embd * 2  # of one, in bfloat16
    assert offload['host activations'] == 5 * size and full['activations'] - offload['activations'] == 4 * size


@pytest.mark.parametrize('matmul_dtype', [None, 'float8'])
def test_on_cuda_a_block_keeps_what_its_kernels_save(matmul_dtype):
    def kept_of(n_layer):
        shape = shape_of('llama with grouped queries', n_layer=n_layer)
        config = config_of(shape, dtype='bfloat16', device='cuda:0', matmul_dtype=matmul_dtype) | shape.to_dict()
        return activations.micro_step(config, 'fsdp').kept

    C, H, Q, K, hidden = 128, 4, 128, 64, 384  # Q = n_head x head_dim, K = n_kv_head x head_dim
    norms = 2 * (2 * C + 2 * C + 8)  # input and result; per token two fp32 numbers at most
    attention = 2 * (Q + 2 * K) + 2 * (Q + K) + 2 * Q + 4 * H  # qkv, rotated, output, logsumexp
    mlp = 4 * 2 * hidden  # gate, silu(gate), up and product
    if matmul_dtype:  # one byte in place of two for the inputs of qkv and down; gate and up, and proj, have copies
        norms, attention, mlp = norms - C, attention + Q, mlp - hidden
    tokens = 4 * 128
    assert kept_of(5) - kept_of(4) == pytest.approx(tokens * (norms + attention + mlp), rel=0.01)


@pytest.fixture(scope='module')
def four_ranks():
    """A process group in which this process is rank 0 of 4, and collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group('fake', rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def measure_sharded(shape, config):
    """{part: bytes} and the peak of the first step under fully_shard, on rank 0 of 4."""
    mesh = init_device_mesh('cpu', (config['replicate_size'], 4 // config['replicate_size']), mesh_dim_names=('r', 's'))
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, config['dtype']), reduce_dtype=torch.float32)
    options = {'mesh': mesh, 'mp_policy': policy, 'reshard_after_forward': config['zero_stage'] == 3}
    with torch.device('meta'):
        model = GPT(shape, getattr(torch, config['dtype']))
    model.checkpoint_activations(config['activation_checkpointing'])
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    tokens = torch.randint(shape.vocab_size, (config['batch_size'], shape.block_size))
    micro_steps = accumulation_steps(config['global_batch_size'], config['batch_size'], 4)
    with PeakMemory() as memory:
        model.to_empty(device='cpu')
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter.to_local(), 0.01)
        for micro_step in range(micro_steps):
            model.set_requires_gradient_sync(config['accumulate'] == 'sharded' or micro_step == micro_steps - 1)
            model(tokens, tokens)[0].backward()
    optimizer = optim.make_optimizer(model, config['optimizer'], config['learning_rate'], 0.9, 0.95, 0.1)
    optimizer.step()
    return {
        'weights': bytes_of(model.parameters()),
        'gradients': sum(parameter.grad.to_local().nbytes for parameter in model.parameters()),  # views of one buffer
        'optimizer': bytes_of(moments(optimizer)),
    }, memory.peak


@pytest.mark.parametrize(
    ('name', 'changes'),
    [
        ('gpt2', {'dtype': 'bfloat16', 'accumulate': 'sharded'}),
        ('llama with grouped queries', {'dtype': 'float32', 'accumulate': 'unsharded'}),
        ('llama with grouped queries', {'dtype': 'bfloat16', 'accumulate': 'unsharded', 'zero_stage': 2}),
        ('enoki', {'dtype': 'bfloat16', 'accumulate': 'sharded', 'activation_checkpointing': 'full'}),
        ('qwen3', {'dtype': 'float32', 'accumulate': 'sharded', 'replicate_size': 2}),
        ('mixture after dense layers', {'dtype': 'float32', 'accumulate': 'unsharded'}),
        ('mixture after dense layers', {'dtype': 'float32', 'accumulate': 'unsharded', 'zero_stage': 2}),
    ],
)
def test_predicted_memory_under_sharding_is_exact_for_states_and_covers_the_peak(four_ranks, name, changes):
    shape = shape_of(name, n_embd=132, head_dim=34, mlp_hidden_dim=301)  # odd sizes: shards are padded
    config = config_of(shape, **{**FSDP, **changes})
    predicted = predicted_memory(config, shape.to_dict(), world_size=4, strategy='fsdp')
    measured, peak = measure_sharded(shape, config)
    if config['accumulate'] == 'unsharded':  # they are whole before the last micro-step, and a shard at the end
        whole = predicted['gradients'] + predicted['accumulated']
        assert whole == 4 * counts_of(shape)['total']
    for part, size in measured.items():
        assert predicted[part] == pytest.approx(size, rel=0.05), part
    without_optimizer = sum(predicted.values()) - predicted['optimizer']  # which is made after the first step
    print(f'predicted / measured {without_optimizer / peak:.3f}')
    assert 0.95 * peak < without_optimizer < 1.2 * peak


def test_diloco_adds_two_copies_of_a_replicas_shard_and_what_is_in_flight():
    shape = shape_of('llama with grouped queries')
    diloco = FSDP | {'num_replicas': 2, 'outer_on_host': False, 'overlap_steps': 0, 'num_fragments': 2}
    diloco |= {'error_feedback': False, 'exchange_dtype': 'int8'}

    def parts(**changes):
        return predicted_memory(config_of(shape, **diloco, **changes), shape.to_dict(), 8, 'diloco')

    plain = parts()
    assert plain['outer'] == 2 * plain['weights']
    fsdp = predicted_memory(config_of(shape, **FSDP | {'replicate_size': 2}), shape.to_dict(), 8, 'fsdp')
    assert {part: size for part, size in plain.items() if part != 'outer'} == fsdp
    diloco.update(overlap_steps=1, inner_steps=4)
    in_flight = parts()['outer'] - plain['outer']  # the larger of two fragments
    assert plain['weights'] / 2 < in_flight < plain['weights']
    diloco.update(error_feedback=True, outer_on_host=True)
    assert parts()['outer'] == in_flight and parts()['host outer'] == 3 * plain['weights']
    diloco.update(exchange_dtype='float32', cpu_offload='params')  # which rounds nothing; with which all is on the host
    assert 'outer' not in parts() and parts()['host outer'] == plain['outer'] + in_flight


def most_in_flight(keys):
    """Bytes of the fragments of a model that are in flight at once, at most, in 40 steps of one replica."""
    model = GPT(ModelConfig(**keys['shape']))
    parameters = dict(model.named_parameters())
    outer = diloco.Outer(
        parameters, lambda *_: None, dist.group.WORLD, keys['inner_steps'], keys['num_fragments'], keys['overlap_steps']
    )
    most = 0
    for step in range(1, 41):
        for fragment in outer.to_land(step):
            outer.land(fragment, step)
        for fragment in outer.to_send(step):
            outer.send(fragment, step)
        most = max(most, sum(f.delta.nbytes for f in outer.fragments if f.delta is not None))
    return most


@pytest.mark.parametrize(('inner_steps', 'fragments', 'overlap'), [(7, 3, 2), (7, 3, 3), (4, 4, 3), (6, 1, 5)])
def test_what_diloco_has_in_flight_is_what_the_plan_says(inner_steps, fragments, overlap):
    shape = dict(arch='llama', n_layer=4, n_head=2, n_embd=24, vocab_size=301, block_size=16)
    keys = {'inner_steps': inner_steps, 'num_fragments': fragments, 'overlap_steps': overlap}
    config = config_of(ModelConfig(**shape), **FSDP, **keys, num_replicas=1, outer_on_host=False, error_feedback=False)
    config |= {'exchange_dtype': 'float32'}
    parts = predicted_memory(config, ModelConfig(**shape).to_dict(), 1, 'diloco')
    (most,) = run_function(1, most_in_flight, {'shape': shape, **keys})
    assert parts['outer'] == 2 * parts['weights'] + most


@pytest.mark.parametrize('strategy', ['fsdp', 'pipeline'])
def test_offloaded_inputs_are_in_no_total_of_the_device(strategy):
    keys = dict(device='cuda', dtype='bfloat16', batch_size=2, global_batch_size=16, activation_checkpointing='offload')
    keys |= dict(lr_schedule='constant', optimizer='adamw', learning_rate=1e-3, keep_checkpoints=1, max_iters=1)
    keys |= FSDP | dict(warmup_iters=0, fsdp_impl='torch', blocks_per_unit=1, context_parallel=1, context_impl='ring')
    keys |= dict(pipeline_stages=2, pipeline_chunks=1) if strategy == 'pipeline' else dict(tensor_parallel=2)
    shape = ModelConfig(arch='llama', n_layer=8, n_head=4, n_embd=64, vocab_size=256).to_dict()
    table = report.dry_run(keys, shape, 4, strategy).partition('memory per rank')[2].partition('\n\n')[0]
    parts = {line[2:32].strip(): [*map(float, line[32:].split())] for line in table.splitlines()[1:]}
    totals = {place: parts.pop(f'total on the {place}') for place in ('device', 'host')}
    for place, total in totals.items():
        of_place = [sizes for part, sizes in parts.items() if part.startswith('host') == (place == 'host')]
        assert [sum(of_stage) for of_stage in zip(*of_place, strict=True)] == pytest.approx(total, abs=6e-3), place
    assert 'host activations' in parts


def test_offloaded_states_are_counted_on_the_host():
    shape = shape_of('gpt2')
    parts = predicted_memory(config_of(shape, **{**FSDP, 'cpu_offload': 'params'}), shape.to_dict(), 4, 'fsdp')
    plain = predicted_memory(config_of(shape, **FSDP), shape.to_dict(), 4, 'fsdp')
    assert (parts['host weights'], parts['host optimizer']) == (plain['weights'], plain['optimizer'])
    assert 'weights' not in parts and parts['gathered'] == plain['gathered']


# --- models of transformers -------------------------------------------------------------------------------------------

TINY_HF = {'hidden_size': 128, 'num_attention_heads': 4, 'num_hidden_layers': 3, 'vocab_size': 1000}
TINY_HF |= {'max_position_embeddings': 128, 'bos_token_id': None, 'eos_token_id': None}
WITH_GROUPS = {'num_key_value_heads': 2, 'intermediate_size': 352, 'tie_word_embeddings': False}
HF_MODELS = {  # name: (model_type, options)
    'llama': ('llama', WITH_GROUPS),
    'llama, tied': ('llama', WITH_GROUPS | {'tie_word_embeddings': True}),
    'qwen2': ('qwen2', WITH_GROUPS),
    'qwen3': ('qwen3', WITH_GROUPS | {'head_dim': 48}),
    'gpt2': ('gpt2', {}),
}
OF_OTHER_KINDS = {'gemma2': ('gemma2', WITH_GROUPS | {'head_dim': 32}), 'mixtral': ('mixtral', WITH_GROUPS)}


@pytest.fixture(scope='module')
def pretrained_of(tmp_path_factory):
    """A function (name, options) that returns the Pretrained of a folder with a tiny model's configuration and no
    weights."""
    import transformers

    from huggingface.pretrained import Pretrained

    def make(name, vocab_size=1000, **options):
        kind, changes = (HF_MODELS | OF_OTHER_KINDS)[name]
        folder = tmp_path_factory.mktemp('model')
        transformers.AutoConfig.for_model(kind, **{**TINY_HF, **changes, 'vocab_size': vocab_size}).save_pretrained(
            folder
        )
        return Pretrained(folder, block_size=128, **options)

    return make


def model_of(pretrained, dtype='float32', sharded=False, is_whole=False):
    """The model as a train script makes it on a CPU. sharded: its weights are in dtype, as FSDP gives them to forward.
    is_whole: as in train_ddp.py."""
    from huggingface import finetune, lora

    torch.manual_seed(0)
    model = finetune.for_training(pretrained, getattr(torch, dtype), 'cpu')
    if is_whole:
        lora.compute_from_stored(model)
    model.to_empty(device='cpu')
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():  # not the bytes of nf4
                parameter.normal_(std=0.02)
                parameter.data = parameter.data.to(getattr(torch, dtype)) if sharded else parameter.data
    return model


def keys_of(pretrained):
    """The keys of a Pretrained that a train script has in its config."""
    keys = {'init_from': pretrained.folder, 'out_dir': 'none', 'dry_run': True, 'trust_remote_code': False}
    return {**pretrained.to_dict(), **keys}


def test_a_model_of_transformers_is_counted_by_its_names_without_padding(pretrained_of):
    model = model_of(pretrained_of('llama', vocab_size=1001))
    expected = {
        'embedding': 1001 * 128,
        'attention': 3 * (128 + 64 + 64 + 128) * 128,
        'mlp': 3 * 3 * 352 * 128,
        'norms': 7 * 128,
        'head': 1001 * 128,
        'total': model.num_parameters(),
        'trainable': model.num_parameters(),
    }
    assert model.parameter_counts() == expected
    model.gain = torch.nn.Parameter(torch.ones(5, 2))
    counts = model.parameter_counts()
    assert counts['other'] == 10 and counts['total'] == expected['total'] + 10


@pytest.mark.parametrize('name', HF_MODELS)
@pytest.mark.parametrize('lora_rank', [0, 4])
def test_counts_and_flops_are_those_of_the_transformers_model(pretrained_of, name, lora_rank):
    pretrained = pretrained_of(name, lora_rank=lora_rank)
    shape, model = pretrained.to_dict(), model_of(pretrained)
    counts = sizes.empty_model(keys_of(pretrained)).parameter_counts()
    assert counts['total'] == model.num_parameters()
    assert 'other' not in counts and (counts['head'] == 0) == shape['tie_embeddings']
    assert counts['trainable'] == model.num_parameters(only_trainable=True)
    assert (counts['trainable'] < counts['total'] / 10) == (lora_rank > 0)
    in_matmuls = counts['total'] - counts['embedding'] + shape['tie_embeddings'] * 1000 * 128
    frozen = in_matmuls - counts['trainable'] if lora_rank else 0
    attention = 12 * 3 * 4 * shape['head_dim'] * 128
    assert model.flops_per_token() == 6 * in_matmuls - 2 * frozen + attention


@pytest.mark.parametrize('name', ['llama', 'qwen2', 'qwen3', 'gpt2'])
@pytest.mark.parametrize(('dtype', 'sharded'), [('float32', False), ('bfloat16', True), ('bfloat16', False)])
@pytest.mark.parametrize('dropout', slow_but([0.0], [0.0, 0.1]))
def test_activations_of_a_transformers_model_are_predicted(pretrained_of, name, dtype, sharded, dropout):
    pretrained = pretrained_of(name, dropout=dropout)
    config = config_of(ModelConfig(**SIZES), dtype=dtype) | keys_of(pretrained)
    predicted = activations.micro_step(config, 'fsdp' if sharded else 'ddp').parts()
    measured = measure_step(model_of(pretrained, dtype, sharded), config)
    assert predicted['activations'] + predicted['logits'] == pytest.approx(
        measured['activations with logits'], rel=0.05
    )
    if dtype == 'bfloat16':  # flash attention, and on CPUs fp32 within attention
        on_gpu = activations.micro_step(config | {'device': 'cuda:0'}, 'fsdp' if sharded else 'ddp').parts()
        assert on_gpu['activations'] <= predicted['activations']


@pytest.mark.parametrize('kind', ['gemma2', 'mixtral'])
def test_what_cannot_run_without_data_on_a_gpu_is_predicted_as_on_a_cpu_or_said_to_be_unknown(pretrained_of, kind):
    config = config_of(ModelConfig(**SIZES), dtype='bfloat16', device='cuda:0', compile=kind == 'gemma2')
    config |= keys_of(pretrained_of(kind))
    printed = ' '.join(report.dry_run(config, {}, 1).split())
    assert 'device=cuda, uncompiled)' in printed
    on_gpu = activations.micro_step(config, 'ddp')
    if kind == 'gemma2':
        on_cpu = activations.micro_step(config | {'device': 'cpu'}, 'ddp')
        assert on_cpu == dataclasses.replace(on_gpu, workspace=0)
    else:
        assert activations.micro_step(config, 'fsdp') != activations.NOT_KNOWN == on_gpu
        assert 'activations not known' in printed
        assert activations.micro_step(config | {'compile': True}, 'ddp').is_compiled


@pytest.mark.parametrize(
    ('name', 'checkpointing', 'frozen_dtype'), [('gpt2', 'full', 'nf4'), ('llama', 'none', 'bfloat16')]
)
def test_lora_is_counted_as_compiled_and_keeps_no_more(pretrained_of, name, checkpointing, frozen_dtype):
    config = config_of(ModelConfig(**SIZES), dtype='bfloat16', device='cuda', activation_checkpointing=checkpointing)
    config |= keys_of(pretrained_of(name, lora_rank=4, frozen_dtype=frozen_dtype))
    compiled, eager = (activations.micro_step(config | {'compile': compile}, 'ddp') for compile in (True, False))
    assert compiled.is_compiled and not eager.is_compiled
    assert compiled.kept <= eager.kept and (compiled.kept < eager.kept) == (checkpointing == 'none')


NF4, IN_16_BITS = {'lora_rank': 4, 'frozen_dtype': 'nf4'}, {'lora_rank': 4, 'frozen_dtype': 'bfloat16'}


@pytest.mark.parametrize(
    ('name', 'dtype', 'checkpointing', 'lora'),
    [
        ('llama', 'float32', 'none', {}),
        ('llama', 'float32', 'none', {'lora_rank': 4}),
        ('llama, tied', 'bfloat16', 'full', {}),
        ('qwen2', 'bfloat16', 'none', {}),
        ('qwen3', 'float32', 'full', {}),
        ('qwen3', 'float32', 'selective', {}),
        ('gpt2', 'bfloat16', 'none', {}),
        ('gpt2', 'float32', 'full', {}),
        ('gpt2', 'bfloat16', 'full', NF4),
        ('gpt2', 'float32', 'none', NF4),
        ('llama', 'float32', 'full', IN_16_BITS),
        ('llama', 'bfloat16', 'none', IN_16_BITS),
        ('mixtral', 'float32', 'none', IN_16_BITS | {'lora_targets': 'all,experts'}),
        ('mixtral', 'bfloat16', 'full', IN_16_BITS | {'lora_targets': 'all,experts'}),
    ],
)
def test_predicted_memory_of_a_transformers_model_is_what_a_step_holds(pretrained_of, name, dtype, checkpointing, lora):
    """A base of fewer bytes: a whole matrix exists only while its layer computes, so forward does not keep it."""
    pretrained = pretrained_of(name, **lora)
    config = config_of(ModelConfig(**SIZES), dtype=dtype, activation_checkpointing=checkpointing)
    predicted = predicted_memory(config, keys_of(pretrained), world_size=1)
    predicted['activations with logits'] = predicted['activations'] + predicted['logits']
    model = model_of(pretrained, dtype, is_whole='frozen_dtype' in lora)
    model.checkpoint_activations(checkpointing)
    measured = measure_step(model, config)
    assert measured['weights'] == predicted['weights'] or 'frozen_dtype' not in lora
    for part, size in measured.items():
        tolerance = (0.2 if lora else 0.15) if part == 'activations with logits' else 0.05
        assert predicted[part] == pytest.approx(size, rel=tolerance), (part, predicted[part] / size)


def trainable(keys):
    return sizes.empty_model(keys).parameter_counts()['trainable']


def test_frozen_weights_have_no_gradients_and_no_moments(pretrained_of):
    full, frozen, lora = (
        keys_of(pretrained_of('llama', **options))
        for options in ({}, {'freeze': 'mlp|embed_tokens|lm_head'}, {'lora_rank': 4})
    )
    share = trainable(frozen) / trainable(full)
    assert 0.1 < share < 0.5
    config = config_of(ModelConfig(**SIZES), dtype='bfloat16', **FSDP)
    for accumulate in ('sharded', 'unsharded'):
        config['accumulate'] = accumulate
        all_parts, parts = (predicted_memory(config, model, 4, 'fsdp') for model in (full, frozen))
        for part in ('gradients', 'optimizer'):
            assert parts[part] == pytest.approx(all_parts[part] * share, rel=0.01), part
        in_block = [p for p in sizes.empty_model(frozen).blocks[0].parameters() if p.requires_grad]
        assert parts['reduction'] == (2 + 4) * sum(p.numel() for p in in_block)  # all of the root but a norm is frozen
        assert all(parts[part] == all_parts[part] for part in ('weights', 'gathered'))
        assert parts['activations'] + parts['logits'] < all_parts['activations'] + all_parts['logits']
    of_lora = predicted_memory(config, lora, 1, 'ddp')
    assert of_lora['gradients'] == 4 * trainable(lora) and of_lora['optimizer'] == 8 * trainable(lora)
    diloco = config | {'num_replicas': 2, 'outer_on_host': False, 'overlap_steps': 0, 'error_feedback': False}
    diloco |= {'exchange_dtype': 'int8', 'num_fragments': 1}
    outer, of_all = (predicted_memory(diloco, model, 4, 'diloco')['outer'] for model in (frozen, full))
    assert outer == pytest.approx(of_all * share, rel=0.01)


def test_the_report_on_a_transformers_model_names_folder_and_trainable_parameters(pretrained_of):
    model = keys_of(pretrained_of('qwen3', lora_rank=4))
    config = config_of(ModelConfig(**SIZES), **FSDP) | model
    for strategy in ('ddp', 'fsdp'):
        words = ' '.join(report.dry_run(config, model, 2, strategy).split())
        total = sizes.empty_model(model).parameter_counts()['total']
        checkpoint = 4 * 3 * trainable(model) / 1e9  # of LoRA: what is trained, and two moments
        for said in (
            f'model: qwen3 of {model["init_from"]}',
            f'total {total:,} trainable {trainable(model):,}',
            f'per checkpoint {checkpoint:.3f}',
        ):
            assert said in words, said
        assert 'padded' not in words
    full = keys_of(pretrained_of('qwen3'))
    assert 'trainable' not in report.dry_run(config | full, full, 2)


def test_out_of_memory_advice_for_fine_tuning_is_lora_when_the_optimizer_takes_most(pretrained_of):
    def advice(strategy_keys, strategy='ddp', batch_size=1, **options):
        model = keys_of(pretrained_of('llama', **options))
        config = config_of(ModelConfig(**SIZES), batch_size=batch_size, dtype='bfloat16')
        config |= {'activation_checkpointing': 'full', 'block_size': 8, **strategy_keys}
        return report.out_of_memory_advice(config | model | {'block_size': 8}, 1, strategy)

    assert re.search('optimizer: .*--lora_rank=16.* train_fsdp.py .*lower', advice({}))
    assert re.search('--lora_rank=16.*--accumulate=sharded', advice(FSDP, 'fsdp'))
    assert 'lora_rank' not in advice({}, lora_rank=4)
    native = shape_of('gpt2', n_embd=1024, block_size=8).to_dict()
    config = config_of(
        shape_of('gpt2'), batch_size=1, init_from='scratch', lora_rank=0, activation_checkpointing='full'
    )
    assert 'lora_rank' not in report.out_of_memory_advice(config | native, 1, 'ddp')


# --- predicted and measured -------------------------------------------------------------------------------------------

MEASURED = ['--device=cpu', '--dataset=synthetic', '--vocab_size=512', '--n_layer=3', '--n_head=4', '--n_embd=128']
MEASURED += ['--mlp_hidden_dim=500', '--block_size=16', '--batch_size=2', '--log_interval=1', '--max_iters=2']
MEASURED += ['--warmup_iters=1', '--eval_sequences=0', '--keep_checkpoints=0', '--compile=False']
ENGINES = {
    'ddp': ('train_ddp.py',),
    'torch': ('train_fsdp.py',),
    'manual 1': ('train_fsdp.py', '--fsdp_impl=manual', '--zero_stage=1'),
    'manual 2': ('train_fsdp.py', '--fsdp_impl=manual', '--zero_stage=2'),
    'manual 3': ('train_fsdp.py', '--fsdp_impl=manual'),
}
FURTHER = {  # on 2 ranks, with 2 micro-steps in fp32
    'ZeRO 2, sharded sums': ('train_fsdp.py', '--zero_stage=2', '--accumulate=sharded'),
    'units of 2, sharded sums': ('train_fsdp.py', '--fsdp_impl=manual', '--accumulate=sharded', '--blocks_per_unit=2'),
    'HSDP': ('train_fsdp.py', '--replicate_size=2'),
    'HSDP, sharded sums': ('train_fsdp.py', '--replicate_size=2', '--accumulate=sharded'),
    'HSDP, manual': ('train_fsdp.py', '--fsdp_impl=manual', '--replicate_size=2'),
    'Muon': ('train_fsdp.py', '--optimizer=muon'),
    'Muon, tensor': ('train_parallel.py', '--optimizer=muon', '--tensor_parallel=2'),
    'Muon, DDP': ('train_ddp.py', '--optimizer=muon'),
    'SGD': ('train_ddp.py', '--optimizer=sgd'),
    'DiLoCo': ('train_diloco.py', '--num_replicas=2', '--inner_steps=2', '--exchange_dtype=int8'),
}


ZERO = {f'DeepSpeed {stage}': ('train_deepspeed.py', f'--zero_stage={stage}') for stage in (1, 2, 3)}
ZERO['DeepSpeed, offload'] = ('train_deepspeed.py', '--zero_stage=2', '--cpu_offload=optimizer')


@pytest.fixture(scope='module')
def measured_runs(tmp_path_factory):
    """{(ranks, name): out_dir} of two steps with every engine; not all combinations on 3 ranks."""
    runs, cases = {}, {2: [], 3: []}
    folder = tmp_path_factory.mktemp('measured')

    def add(ranks, name, dtype, micro_steps, script, *more):
        runs[ranks, name] = folder / f'{ranks} {name}'
        arguments = [*MEASURED, f'--dtype={dtype}', f'--global_batch_size={2 * ranks * micro_steps}', *more]
        arguments.append(f'--out_dir={runs[ranks, name]}')
        cases[ranks].append({'name': name, 'script': script, 'arguments': arguments})

    for name, engine in ENGINES.items():
        for dtype, micro_steps in itertools.product(('float32', 'bfloat16'), (1, 2)):
            add(2, f'{name}, {dtype}, {micro_steps}', dtype, micro_steps, *engine)
        add(3, f'{name}, float32, 2', 'float32', 2, *engine)
        add(3, f'{name}, bfloat16, 1', 'bfloat16', 1, *engine)
    for name, engine in FURTHER.items():
        add(2, name, 'float32', 2, *engine)
    for name, engine in ZERO.items() if importlib.util.find_spec('deepspeed') else ():
        add(2, name, 'float32', 2, *engine)
        add(3, name, 'bfloat16', 1, *engine)
    for name in ('DeepSpeed 1', 'DeepSpeed 2') if importlib.util.find_spec('deepspeed') else ():
        add(3, f'{name}, float32', 'float32', 1, *ZERO[name])
    for ranks in cases:
        run_many(cases[ranks], ranks, folder)
    return runs


@pytest.mark.slow
def test_predicted_bytes_are_those_that_the_engines_send(measured_runs):
    for (ranks, name), out_dir in measured_runs.items():
        about = json.loads((out_dir / 'config.json').read_text())
        strategy = about['script'].removeprefix('train_').removesuffix('.py')
        predicted = predicted_traffic(about['config'], about['config'], ranks, strategy)
        sent = column(out_dir, 'comm/sent_gb')
        # A round of DiLoCo is both steps. With others the second step counts; in the first DeepSpeed gathers more.
        sent = 1e9 * (statistics.mean(sent) if strategy == 'diloco' else sent[-1])
        assert predicted['sent'] == pytest.approx(sent, rel=0.02), f'{name} on {ranks} ranks'
        assert predicted['sent'] == sum(size for kind, size in predicted.items() if kind != 'sent')


@pytest.mark.slow
def test_predicted_states_are_those_that_the_engines_hold(measured_runs):
    for (ranks, name), out_dir in measured_runs.items():
        about = json.loads((out_dir / 'config.json').read_text())
        strategy = about['script'].removeprefix('train_').removesuffix('.py')
        predicted = predicted_memory(about['config'], about['config'], ranks, strategy)
        for part in ('weights', 'gradients', 'optimizer'):
            (held,) = column(out_dir, f'mem/{part}_gb')
            somewhere = predicted.get(part, 0) + predicted.get(f'host {part}', 0)
            assert somewhere == pytest.approx(1e9 * held, rel=0.02), f'{part} of {name} on {ranks} ranks'


def assert_reaching_into_slices(model):
    """Assert that it follows from ZeRO's layout: the groups of the optimizer, one after the other."""
    groups = [[p.numel() for p in group['params']] for group in optim.parameter_groups(model, 0.1)]
    for world_size in (1, 2, 3, 5):
        expected = 0
        for lengths in groups:
            slice_size = 2 * -(-sum(lengths) // (2 * world_size))  # DeepSpeed pads the whole to an even number per rank
            starts = itertools.accumulate(lengths, initial=0)
            expected += sum(size for start, size in zip(starts, lengths, strict=False) if start < slice_size)
        assert deepspeed_engine.reaching_into_slices(model, world_size) == expected, world_size


@pytest.mark.parametrize('name', ARCHITECTURES)
def test_deepspeeds_gradients_of_what_lies_in_two_slices_are_whole(name):
    shape = shape_of(name, n_embd=132, head_dim=34, mlp_hidden_dim=301)  # odd sizes
    with torch.device('meta'):
        model = GPT(shape)
    assert_reaching_into_slices(model)


@pytest.mark.parametrize('name', HF_MODELS)
def test_and_of_a_transformers_model(pretrained_of, name):
    assert_reaching_into_slices(model_of(pretrained_of(name)))


def test_on_gpus_the_bytes_are_those_of_rings():
    shape = shape_of('llama with grouped queries')
    model = sizes.empty_model(shape.to_dict())
    whole = 4 * model.parameter_counts()['total']

    def sent(strategy, **changes):
        config = config_of(shape, device='cuda:0', global_batch_size=16, **FSDP | changes)
        return predicted_traffic(config, shape.to_dict(), 4, strategy)

    assert sent('ddp')['sent'] == 2 * 3 / 4 * whole
    root = whole - 4 * sum(parameter.numel() for parameter in model.blocks.parameters())
    parts = sent('fsdp', dtype='bfloat16')  # blocks are gathered twice, in half the bytes; one fp32 reduction
    assert parts['all-gather'] == 3 / 4 * (2 * (whole - root) + root) / 2
    assert parts['reduce-scatter'] == 3 / 4 * whole and parts['all-reduce'] == 0
    assert sent('fsdp', fsdp_impl='manual', zero_stage=1)['sent'] == 2 * 3 / 4 * whole
    assert sent('fsdp', replicate_size=2)['all-reduce'] == 2 * 1 / 2 * whole / 2


# --- what the user reads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('strategy', ['ddp', 'fsdp', 'deepspeed'])
def test_the_report_names_every_part_with_its_numbers(strategy):
    shape = ModelConfig(arch='enoki', n_layer=6, n_head=8, n_embd=512, vocab_size=50304, block_size=2048)
    config = config_of(shape, dtype='bfloat16', device='cuda:0', batch_size=8, global_batch_size=512, max_iters=1342)
    config['lr_decay_iters'] = 1342
    text = report.dry_run(config | FSDP, shape.to_dict(), world_size=4, strategy=strategy)
    words = ' '.join(text.split())
    parts = predicted_memory(config | FSDP, shape.to_dict(), 4, strategy)
    for part, size in parts.items():
        assert f'{part} {size / 1e9:.3f}' in words
    assert f'total on the device {sum(parts.values()) / 1e9:.3f}' in words
    sent = predicted_traffic(config | FSDP, shape.to_dict(), 4, strategy)['sent']
    for said in (
        'n_layer 6',
        'mlp_hidden_dim 2,048',
        'total 70,393,088',
        'attention and mlp 18,874,368',
        '8 sequences x 16 micro-steps x 4 ranks = 512 sequences x 2,048 tokens = 1,048,576 tokens per step',
        '1,342 steps x 1,048,576 = 1,407,188,992 tokens',
        'warm-up over 100 steps to learning rate 0.0006',
        'cosine: down to 6e-05 at step 1,342',
        f'per token {sizes.empty_model(shape.to_dict()).flops_per_token():.3e}',
        'per checkpoint 0.845',  # 70,393,088 x (4 + 4 + 4) bytes
        'at most (3, one being written) 2.534',
        f'{sent / 1e9:.3f} GB sent per rank per step',
    ):
        assert said in words, said
    none = report.dry_run(config | FSDP | {'keep_checkpoints': 0}, shape.to_dict(), 4, strategy)
    assert 'at most (0 of them) 0.000' in ' '.join(none.split())


def test_the_line_about_parts_that_do_not_peak_together_is_absent_where_all_do():
    def printed(strategy, ranks, **changes):
        config = config_of(shape_of('gpt2'), **FSDP) | {'global_batch_size': 4 * ranks} | changes
        return report.dry_run(config, shape_of('gpt2').to_dict(), ranks, strategy)

    assert re.search(r'peaks at different moments +-\d', printed('fsdp', 4))
    assert re.search(r'peaks at different moments +-\d', printed('ddp', 1))
    assert 'minus' not in printed('ddp', 4), 'the buckets of the all-reduce stay'
    assert 'minus' not in printed('ddp', 1, global_batch_size=16), 'micro-steps add up'


def test_the_report_names_the_layout_of_copies_that_are_sharded():
    def layout(copies):
        keys = FSDP | {'replicate_size': copies}
        return re.findall(r'layout: (.*)', report.dry_run(config_of(shape, **keys), shape.to_dict(), 8, 'fsdp'))

    shape = shape_of('gpt2')
    assert layout(1) == [], 'without copies the batch names the ranks'
    assert layout(2) == ['2 copies of the model, each sharded over 4 ranks']
    assert layout(8) == ['8 copies of the model, each sharded over 1 rank']


def test_a_checkpoint_of_diloco_has_the_outer_parameters_and_momentum_and_all_of_each_replica():
    shape = ModelConfig(arch='enoki', n_layer=6, n_head=8, n_embd=512, vocab_size=50304, block_size=2048)
    diloco = FSDP | {'num_replicas': 2, 'outer_on_host': False, 'overlap_steps': 0, 'num_fragments': 1}
    diloco |= {'inner_steps': 10, 'exchange_dtype': 'float32', 'error_feedback': False}
    config = config_of(shape, batch_size=1, global_batch_size=4, **diloco)
    words = ' '.join(report.dry_run(config, shape.to_dict(), 4, 'diloco').split())
    assert 'per checkpoint 2.253' in words  # 70,393,088 x (4 + 4 + 2 x (4 + 4 + 4)) bytes


def test_ranks_that_do_not_divide_are_refused_in_one_line():
    shape = shape_of('gpt2')
    with pytest.raises(ValueError, match='replicate_size=3 .* 4 ranks'):
        report.dry_run(config_of(shape, **{**FSDP, 'replicate_size': 3}), shape.to_dict(), 4, 'fsdp')


def test_out_of_memory_advice_names_the_need_and_first_the_keys_that_help_most():
    shape = shape_of('gpt2')
    config = config_of(shape, batch_size=16, global_batch_size=64)
    need = sum(predicted_memory(config, shape.to_dict(), 4).values())
    advice = report.out_of_memory_advice(config | shape.to_dict(), 4, 'ddp')
    assert re.search(f' {need / 1e9:.2f} GB per rank, .*activations: .*batch_size=16', advice)
    assert '--activation_checkpointing=full' in advice and '\n' not in advice

    wide = shape_of('gpt2', n_embd=2048, block_size=16)
    config = config_of(wide, batch_size=1, dtype='bfloat16', activation_checkpointing='full', **FSDP)
    advice = report.out_of_memory_advice(config | wide.to_dict(), 4, 'fsdp')
    assert re.search('accumulated: .*--accumulate=sharded.*--cpu_offload=params.*block_size', advice)

    config = config_of(wide, batch_size=1, dtype='bfloat16', activation_checkpointing='full')
    assert re.search(
        'optimizer: .*--optimizer_dtype=int8', report.out_of_memory_advice(config | wide.to_dict(), 1, 'ddp')
    )
    for keys in ({'optimizer': 'muon'}, {'optimizer_dtype': 'int8'}):
        assert 'optimizer_dtype' not in report.out_of_memory_advice(config | wide.to_dict() | keys, 1, 'ddp'), keys
    # In a script that has both, what FSDP can do comes after the key that chooses it.
    advice = report.out_of_memory_advice(config | wide.to_dict() | FSDP | {'strategy': 'ddp'}, 4, 'ddp')
    assert '--strategy=fsdp on several GPUs' in advice and not re.search('train_fsdp|accumulate|cpu_offload', advice)

    advice = report.out_of_memory_advice(config | wide.to_dict(), 1, 'ddp', {'teacher': 200e9})
    assert re.search(
        r'need 2\d\d\.\d\d GB per rank, most of it teacher: set --teacher_dtype=nf4, or name a smaller', advice
    )


@torch.no_grad()
def test_what_it_takes_to_write_answers_is_states_whole_weights_and_a_cache():
    shape = shape_of('llama with grouped queries')
    config = config_of(shape, dtype='bfloat16', num_generations=8, generation_batch_size=3, **FSDP) | shape.to_dict()
    model = sizes.empty_model(config)
    cache, tokens = model.new_cache(shape.block_size), torch.zeros(3, shape.block_size, dtype=torch.long, device='meta')
    model.compute_dtype = torch.bfloat16
    model(tokens, cache=cache)
    parameters = sum(p.numel() for p in model.parameters())
    states = 4 * 4 * parameters / 4  # fp32 weights, gradients and two moments, over 4 ranks
    needs = states + 2 * parameters + sum(of_block.keys.nbytes + of_block.values.nbytes for of_block in cache)

    def of(**keys):
        plan, *_ = memory.plans(config | keys, sizes.empty_model(config), memory.Layout.of(config | keys, 'fsdp', 4))
        return memory.while_writing(plan)

    assert of() == needs
    assert of(generation_batch_size=None) == of(generation_batch_size=8)  # all that a rank writes in a step
    said = report.dry_run(config, {}, 4, 'fsdp')
    assert (
        'while it writes, at most' in said and 'batch\n  at most ' in said
    )  # answers are packed when they are written
    assert 'block_size=128' in report.out_of_memory_advice(config, 4, 'fsdp')
    much = config | {'global_batch_size': 40_000, 'generation_batch_size': None}
    assert '--generation_batch_size' in report.out_of_memory_advice(much, 4, 'fsdp')


def test_out_of_memory_advice_for_deepspeed_names_its_own_keys():
    shape = shape_of('gpt2', n_embd=2048, block_size=16)
    config = config_of(shape, dtype='bfloat16', activation_checkpointing='full', **FSDP) | {'zero_stage': 1}
    del config['accumulate'], config['fsdp_impl']
    advice = report.out_of_memory_advice(config | shape.to_dict(), 4, 'deepspeed')
    assert re.search('gradients: .*--zero_stage=3.*--cpu_offload=', advice) and 'accumulate' not in advice


def test_out_of_memory_advice_works_before_the_model_is_known():
    shape = shape_of('gpt2')
    advice = report.out_of_memory_advice(config_of(shape), 4, 'ddp')
    assert 'batch_size' in advice and 'block_size' in advice
