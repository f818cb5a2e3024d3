"""
The activations that a micro-step keeps for backward, and what backward needs beyond them, without running it.

    activation_bytes(config, 'fsdp')  # {'activations': bytes, 'logits': bytes}; on a GPU with
    # activation_checkpointing=offload also {'host activations': bytes}
"""

import contextlib
import logging
import weakref
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import expert_manual
import model as model_module
from huggingface import lora, nf4
from planning.sizes import part_of_rank

# The activations of one micro-step on one rank do not depend on these keys, so layouts that differ in no other keys
# have them computed once.
SHARDING_KEYS = {'zero_stage', 'fsdp_impl', 'replicate_size', 'accumulate', 'global_batch_size', 'num_replicas'}
SHARDING_KEYS |= {'pipeline_stages', 'pipeline_chunks'}
known_activations = {}


def activation_bytes(config, strategy):
    """{'activations', 'logits': bytes} of one micro-step, as in memory.memory_bytes(); {} if they cannot be found.

    Because all blocks are alike, the bytes of the whole model are extrapolated from models of a few blocks, which takes
    a tenth of the time. Results are kept, because compare.py --plan asks for the same ones again and again.
    """
    first = 2 if config['activation_checkpointing'] == 'offload' else 1  # the inputs of two blocks stay on the GPU
    is_long = config['n_layer'] > first + 1 and 'transformers' not in config
    sizes = [first, first + 1] if is_long else [config['n_layer']]
    found = []
    for size in sizes:
        one = {**config, 'n_layer': size}
        if 'expert_parallel' in one:  # with balanced routers as many rows arrive as with more ranks
            one['expert_parallel'] = min(2, one['expert_parallel'])
        key = strategy != 'ddp', repr(sorted((name, one[name]) for name in one.keys() - SHARDING_KEYS))
        if key not in known_activations:
            known_activations[key] = micro_step_bytes(partial(part_of_rank, one), one, strategy != 'ddp')
        found.append(known_activations[key])
    return {part: size + (config['n_layer'] - sizes[0]) * (found[-1][part] - size) for part, size in found[0].items()}


def micro_step_bytes(make_model, config, is_sharded):
    """
    {'activations', 'logits': bytes}, as in memory.memory_bytes(). The model's own forward, loss and backward run on
    tensors without data, and after each operation the bytes of all tensors that are alive are added up.

    For a CPU these are fake tensors. For CUDA they are on the meta device (see kernels_of_cuda()), because fake CUDA
    tensors have no backward on a machine without CUDA. Some models of transformers look at values, which meta tensors
    refuse; then the bytes are those of a CPU. If that fails as well, the result is {}: this is so for mixtures of
    experts under train_ddp.py in bfloat16.
    """
    logging.getLogger('torch._subclasses.fake_tensor').setLevel(logging.CRITICAL)  # a failure would log a traceback
    for device in ('meta', 'cpu') if config['device'].startswith('cuda') else ('cpu',):
        with contextlib.suppress(RuntimeError):
            return follow_micro_step(make_model, config, device, is_sharded)
    return {}


def follow_micro_step(make_model, config, device, is_sharded):
    """micro_step_bytes() for device 'cpu' or 'meta'. is_sharded: as under FSDP, with weights in the compute dtype."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    dtype = getattr(torch, config['dtype'])
    has_autocast = 'transformers' in config and not is_sharded and dtype != torch.float32
    with (
        (
            kernels_of_cuda(dtype if has_autocast else None)
            if device == 'meta'
            else FakeTensorMode(allow_non_fake_inputs=True)
        ),
        mock.patch.object(model_module, 'rows_of_each', evenly),
        mock.patch.object(expert_manual, 'rows_by_rank', evenly_by_rank),
    ):
        model = make_model(device)
        model.compute_dtype = dtype
        offloads = config['activation_checkpointing'] == 'offload'
        model.checkpoint_activations('full' if offloads else config['activation_checkpointing'])
        sharing = config.get('context_parallel', 1)
        tokens = torch.zeros(config['batch_size'], config['block_size'] // sharing, dtype=torch.long, device=device)
        has_mask = config.get('packed') and sharing == 1
        inputs = [tokens, tokens] + [tokens[:, :1]] * bool(has_mask)  # x, y, starts of documents
        if not is_sharded:
            lora.compute_from_stored(model)
        for parameter in model.parameters():
            if is_sharded and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
            if parameter.requires_grad and is_sharded:  # its gradient is counted as 'reduction'
                parameter.register_post_accumulate_grad_hook(drop_gradient)
            elif parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        live = LiveBytes([*model.parameters(), *model.buffers(), *gradients, tokens])
        kept, inputs_of_blocks = [], []
        for block in model.blocks:
            block.register_forward_pre_hook(lambda _, args: inputs_of_blocks.append(args[0].nbytes))
        model.blocks[-1].register_forward_hook(lambda *_: kept.append(live.now))
        with live:
            loss, _ = model(*inputs)
            peak_of_forward = live.peak
            loss.backward()
    sizes = {'activations': kept[0] + live.peak - peak_of_forward, 'logits': peak_of_forward - kept[0]}
    if offloads and config['device'].startswith(
        'cuda'
    ):  # see offload.InputsOnHost: of the last two, one stays and one goes
        n, size = len(inputs_of_blocks), inputs_of_blocks[0]
        sizes['activations'] -= max(0, n - 2) * size
        sizes['host activations'] = (n - 1) * size
    return sizes


def evenly(ends, rows):
    """Replaces model.rows_of_each(), which would look at values: every expert gets equally many rows."""
    each, more = divmod(rows.shape[0], ends.shape[0])
    return [each + (number < more) for number in range(ends.shape[0])]


def evenly_by_rank(counts, arriving, rows):
    """Replaces expert_manual.rows_by_rank(): as many rows arrive as leave. Unbalanced routers may send a rank up to
    expert_parallel times as many, and what its experts keep of them grows by the same factor."""
    return (evenly(counts, rows),) * 2


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations make, except those of the tensors `others`: alive `now`, and at
    the `peak`."""

    def __init__(self, others):
        super().__init__()
        self.now = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in others}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.follow(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def follow(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.now += size
            weakref.finalize(storage, self.forget, key, size)

    def forget(self, key, size):
        self.known.remove(key)
        self.now -= size


@contextlib.contextmanager
def kernels_of_cuda(autocast_to=None):
    """
    Replace operations for the meta device. Where CUDA has one fused kernel, one operation is called, which keeps less
    for backward than the several operations that other devices use.

    autocast_to: dtype to which inputs of matmuls are cast, or None; autocast itself does not work on meta tensors.
    """

    def casting(function):
        def cast(value):
            is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(autocast_to) if is_float else value

        return lambda *args, **options: function(*map(cast, args), **options)

    attention, linear, addmm = fused_attention, F.linear, torch.addmm
    if autocast_to:
        attention, linear, addmm = map(casting, (attention, linear, addmm))
    functions = {'rms_norm': fused_rms_norm, 'dropout': fused_dropout, 'scaled_dot_product_attention': attention}
    with (
        mock.patch.multiple(F, linear=linear, **functions),
        mock.patch.object(torch, 'addmm', addmm),
        mock.patch.object(nf4, 'autocast_dtype', lambda x: autocast_to),
    ):
        yield


def fused_rms_norm(x, shape, weight=None, eps=None):
    return F.layer_norm(x, shape, weight)  # keeps as much for backward


def fused_dropout(x, p=0.5, training=True, inplace=False):
    return torch.native_dropout(x, p, training)[0] if p > 0 and training else x


def fused_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Flash attention, or the memory-efficient kernel if there is a mask or if q is fp32."""
    if attn_mask is None and q.dtype != torch.float32:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
    if enable_gqa:  # no fused kernel: the scores are materialised
        return scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True)
    bias = None if attn_mask is None else attn_mask.to(q.dtype).expand(-1, q.shape[1], -1, -1)
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, dropout_p, is_causal)[0]


def drop_gradient(parameter):
    parameter.grad = None
