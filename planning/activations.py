"""
The activations that a micro-step keeps for backward, and what backward needs beyond them, without running it.

    step = micro_step(config, 'fsdp')  # a MicroStep, or NOT_KNOWN if this model does not run without data
    step.parts()  # {'activations': bytes, 'logits': bytes, ...}, as memory.memory_bytes() has them

If the run compiles its blocks for a GPU, the counts are those of compiled blocks (compiled.py), else of PyTorch's
operations one by one.
"""

import contextlib
import logging
import weakref
from dataclasses import dataclass, replace
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import expert_manual
import experts
from huggingface import lora, nf4
from planning.compiled import compile_without_gpu
from planning.sizes import make_part

# The activations of one micro-step on one rank do not depend on these keys, so layouts that differ in no other keys
# have them computed once.
SHARDING_KEYS = {'zero_stage', 'fsdp_impl', 'replicate_size', 'accumulate', 'global_batch_size', 'num_replicas'}
SHARDING_KEYS |= {'pipeline_stages', 'pipeline_chunks'}
known_steps = {}

# On Hopper cuBLAS takes 32 MiB for each thread that multiplies: the one of forward, and autograd's of backward.
WORKSPACE = 2 * 2**25


@dataclass
class MicroStep:
    """Bytes that a micro-step on one rank needs beyond weights and gradients, at the moments that may be its peak."""

    block: int = 0  # what each block keeps for backward
    kept: int = 0  # what there is after the last block: what all of them keep, and what it returns
    loss: int = 0  # the loss of a chunk of tokens, and the gradients that it passes on, beyond `kept`
    backward: int = 0  # the peak while the blocks' gradients are computed, beyond `kept`
    end: int = 0  # the peak after that, when the embedding's gradient is computed, by itself
    host: int = 0  # inputs of blocks that activation_checkpointing=offload keeps in host memory
    block_on_host: int = 0  # of one block
    is_compiled: bool = False  # whether the blocks were counted as compiled
    workspace: int = 0  # of CUDA's matmuls
    n_layer: int = 0  # how many blocks it has, or 0 if that is not known

    def outside_of_blocks(self):
        """What embedding and head keep and need besides the loss, if there are few_blocks()."""
        return max(0, self.peak() - self.loss - self.n_layer * self.block)

    def peak(self):
        return max(self.kept + max(self.loss, self.backward), self.end)

    def parts(self):
        """A part of memory.memory_bytes(): {name: bytes}."""
        if self == NOT_KNOWN:
            return {}
        parts = {'activations': self.peak() - self.loss, 'logits': self.loss}
        parts |= {'host activations': self.host} if self.host else {}
        return parts | ({'workspace': self.workspace} if self.workspace else {})


NOT_KNOWN = MicroStep()


def few_blocks(config):
    """How many blocks tell what any number of them needs. Of activation_checkpointing=offload the inputs of two blocks
    stay on the GPU. The dense ones that a mixture begins with are all there."""
    return (3 if config['activation_checkpointing'] == 'offload' else 2) + config.get('dense_layers', 0)


def micro_step(config, strategy):
    """The MicroStep of a run, or NOT_KNOWN.

    Because all blocks are alike, that of the whole model is extrapolated from a model of a few blocks, which takes a
    tenth of the time. Results are kept, because compare.py --plan asks for the same ones again and again.
    """
    n_layer = config['n_layer'] if 'transformers' in config else min(few_blocks(config), config['n_layer'])
    one = {**config, 'n_layer': n_layer}
    if 'expert_parallel' in one:  # with balanced routers as many rows arrive as with more ranks
        one['expert_parallel'] = min(2, one['expert_parallel'])
    is_sharded = strategy != 'ddp'  # or computes with a copy of the weights in the compute dtype, as a pipeline does
    key = is_sharded, repr(sorted((name, one[name]) for name in one.keys() - SHARDING_KEYS))
    if key not in known_steps:
        known_steps[key] = step_of(lambda device: make_part(one, device)[0], one, is_sharded)
    step, more = known_steps[key], config['n_layer'] - n_layer
    if step == NOT_KNOWN:
        return step
    kept, host = step.kept + more * step.block, step.host + more * step.block_on_host
    return replace(step, kept=kept, host=host, n_layer=config['n_layer'])


def step_of(make_model, config, is_sharded):
    """
    A MicroStep, or NOT_KNOWN. The model's own forward, loss and backward run on tensors without data, and after each
    operation the bytes of all tensors that are alive are added up.

    For a CPU these are fake tensors. For CUDA they are on the meta device (see kernels_of_cuda()), because fake CUDA
    tensors have no backward on a machine without CUDA. Blocks that are compiled for CUDA are traced first; if that
    fails, for whatever reason within torch, they are counted as uncompiled. Some models of transformers look at values,
    which meta tensors refuse; then the bytes are those of a CPU. If that fails as well, the result is NOT_KNOWN: this
    is so for mixtures of experts under train_ddp.py in bfloat16.
    """
    # They would log a failure's traceback, and advice that selective checkpointing has heeded.
    for name, level in (('torch._subclasses.fake_tensor', 'CRITICAL'), ('torch._higher_order_ops.wrap', 'ERROR')):
        logging.getLogger(name).setLevel(level)
    on_cuda = config['device'].startswith('cuda')
    ways = [('meta', True)] * bool(on_cuda and config.get('compile')) + [('meta', False)] * on_cuda + [('cpu', False)]
    for device, compiles in ways:
        with contextlib.suppress(Exception if compiles else RuntimeError):
            return follow_micro_step(make_model, config, device, is_sharded, compiles)
    return NOT_KNOWN


def follow_micro_step(make_model, config, device, is_sharded, compiles):
    """step_of() for device 'cpu' or 'meta'. is_sharded: as under FSDP, with weights in the compute dtype."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    dtype = getattr(torch, config['dtype'])
    has_autocast = 'transformers' in config and not is_sharded and dtype != torch.float32
    with (
        (
            kernels_of_cuda(dtype if has_autocast else None)
            if device == 'meta'
            else FakeTensorMode(allow_non_fake_inputs=True)
        ),
        mock.patch.object(experts, 'rows_of_each', evenly),
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
        if compiles:
            compile_without_gpu(model, live)
            model(*inputs)[0].backward()
        kept, inputs_of_blocks, peaks = [], [], []

        def begin_phase(*_):  # a hook, so it returns None
            peaks.append(live.peak)
            live.peak = live.now

        def enter(block, args):
            x = args[0]
            if not inputs_of_blocks and x.requires_grad:
                x.register_hook(begin_phase)  # once the gradient of the first block's input is there
            inputs_of_blocks.append(x.nbytes)

        for block in model.blocks:
            block.register_forward_pre_hook(enter)
            block.register_forward_hook(lambda *_: kept.append(live.now))
        with live:
            loss, _ = model(*inputs)
            begin_phase()
            loss.backward()
            begin_phase()
    forward, backward, *end = peaks
    kept_by_block = kept[-1] - kept[-2] if len(kept) > 1 else kept[0]
    goes = inputs_of_blocks[0] if offloads and config['device'].startswith('cuda') else 0
    n = len(kept)  # of the inputs of the last two blocks, one stays and one goes, see offload.InputsOnHost
    return MicroStep(
        block=kept_by_block - goes,
        kept=kept[-1] - max(0, n - 2) * goes,
        loss=forward - kept[-1],
        backward=backward - kept[-1],
        end=max(end, default=0),
        host=(n - 1) * goes,
        block_on_host=goes,
        is_compiled=compiles,
        workspace=WORKSPACE if config['device'].startswith('cuda') else 0,
    )


def evenly(ends, rows):
    """Replaces experts.rows_of_each(), which would look at values: every expert gets equally many rows."""
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
        self.is_paused = False  # by compiled.Kernels

    @classmethod
    def ignore_compile_internals(cls):  # otherwise what is compiled would not run while this mode is on
        return True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in () if self.is_paused else tree_leaves(result):
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


rms_norm = F.rms_norm  # F's are replaced below


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
        mock.patch.dict(nf4.tables, {torch.device('meta'): nf4.table_of('meta')}),  # a run's self-test has made it
    ):
        yield


def fused_rms_norm(x, shape, weight=None, eps=None):
    if torch.compiler.is_compiling():  # it is fused then in any case
        return rms_norm(x, shape, weight, eps)
    return F.layer_norm(x, shape, weight)  # keeps as much for backward


def fused_dropout(x, p=0.5, training=True, inplace=False):
    return torch.native_dropout(x, p, training)[0] if p > 0 and training else x


def fused_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Flash attention, or the memory-efficient kernel if there is a mask or if q is fp32."""
    if attn_mask is None and q.dtype != torch.float32:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
    if enable_gqa:  # no fused kernel: the scores are materialised
        return scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True)
    bias = None if attn_mask is None else attn_mask.to(q.dtype).expand(*q.shape[:2], -1, -1)
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, dropout_p, is_causal)[0]


def drop_gradient(parameter):
    parameter.grad = None
