"""
The kernels that only CUDA has, for tensors of a CPU. Each refuses what the real one refuses, and computes its numbers.

    with on_cuda():
        loss, _ = model(x, y, starts)  # takes the branches of a GPU, and calls its kernels
        loss.backward()

A test whose stand-in accepts more than the kernel does proves nothing: chats on a Hugging Face class passed all tests
for months, and crashed on the first GPU, because a mask on a CPU takes queries in fp32 beside values in bf16. So what
stands here are the contracts: dtypes, strides, alignment, sizes, and what is kept for backward. They are those of
PyTorch's sources (aten/src/ATen/native): transformers/cuda/flash_attn/flash_api.cpp, transformers/cuda/attention.cu,
transformers/cuda/sdp_utils.cpp, GroupedMMUtils.h, cuda/ScaledBlas.cpp, cuda/Blas.cpp and FusedAdamUtils.

    packed rows, half precision    _flash_attention_forward, _backward
    the ring, half precision       _scaled_dot_product_flash_attention, _backward
    the ring, fp32                 _scaled_dot_product_efficient_attention, _backward
    experts, 8 bits, the update    _grouped_mm, _scaled_mm, _fused_adamw_
    half precision to fp32         mm.dtype, addmm.dtype_out
    page-locked memory             only for dense tensors of the host

Inside, a tensor says that it is on cuda:0. What is asked for on 'cuda' is made on the host. Streams exist and order
nothing; whether the waits between them are right is the business of streams.py.
"""

import contextlib
import functools
import itertools
from unittest import mock

import torch
from streams import Event, Stream
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import context_manual
import float8
import offload
from huggingface import nf4

HALF = (torch.float16, torch.bfloat16)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
CUDA = torch.device('cuda', 0)
called = set()  # names of the kernels that have run here
active = []  # not empty inside of on_cuda()


def refuse_unless(condition, message):
    if not condition:
        raise RuntimeError(message)


# --- attention --------------------------------------------------------------------------------------------------------


def check_flash(q, k, v, *others):
    """What FlashAttention 2 asks of (..., heads, D) tensors."""
    refuse_unless(q.dtype in HALF, 'FlashAttention only support fp16 and bf16 data type')
    refuse_unless(k.dtype == q.dtype, 'query and key must have the same dtype')
    refuse_unless(v.dtype == q.dtype, 'query and value must have the same dtype')
    for tensor in others:
        refuse_unless(tensor.dtype == q.dtype, 'query, out and dout must have the same dtype')
    for tensor in (q, k, v):
        refuse_unless(tensor.stride(-1) == 1, 'Input tensor must have contiguous last dimension')
    refuse_unless(q.shape[-1] <= 256, 'FlashAttention forward only supports head dimension at most 256')
    refuse_unless(q.shape[-1] % 8 == 0, 'head_size must be a multiple of 8, this is ensured by padding!')
    refuse_unless(k.shape == v.shape and k.shape[-1] == q.shape[-1], 'value must have the shape of key')
    refuse_unless(q.shape[-2] % k.shape[-2] == 0, 'Number of heads in key/value must divide number of heads in query')


def check_borders(borders, tokens):
    refuse_unless(borders.dtype == torch.int32, 'cu_seqlens_q must have dtype int32')
    refuse_unless(borders.is_contiguous(), 'cu_seqlens_q must be contiguous')
    numbers = borders.tolist()
    assert numbers == sorted(numbers) and numbers[0] == 0 and numbers[-1] == tokens, 'a real kernel reads anything here'


def visible(queries, keys, causal, left, right):
    """Which key a query sees: (queries, keys) bool. The last query stands at the last key."""
    distance = torch.arange(keys)[None] - torch.arange(queries)[:, None] - (keys - queries)
    left, right = (-1 if side is None else side for side in (left, right))
    right = 0 if causal else right
    seen = torch.ones(queries, keys, dtype=torch.bool)
    return seen & (distance >= -left if left >= 0 else seen) & (distance <= right if right >= 0 else seen)


def scores_of(q, k, seen, scale):
    """(H, queries, keys) in fp32, of q (queries, H, D) and k (keys, K, D)."""
    k = k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum('qhd,khd->hqk', q.float(), k) * scale
    return scores.masked_fill(~seen, -torch.inf)


def attend(q, k, v, seen, scale):
    """out (queries, H, D) in the dtype of q, lse (H, queries) in fp32."""
    scores = scores_of(q, k, seen, scale)
    lse = scores.logsumexp(-1)
    p = (scores - lse[..., None]).exp().nan_to_num()
    v = v.float().repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum('hqk,khd->qhd', p, v).to(q.dtype), lse


def attend_backward(grad, q, k, v, out, lse, seen, scale):
    """The gradients of q, k and v, from what forward has kept: out and lse."""
    groups = q.shape[1] // k.shape[1]
    p = (scores_of(q, k, seen, scale) - lse[..., None]).exp().nan_to_num()
    grad, wide_v = grad.float(), v.float().repeat_interleave(groups, 1)
    delta = (grad * out.float()).sum(-1).T[..., None]  # (H, queries, 1)
    of_scores = p * (torch.einsum('qhd,khd->hqk', grad, wide_v) - delta) * scale
    grad_q = torch.einsum('hqk,khd->qhd', of_scores, k.float().repeat_interleave(groups, 1))
    grad_k = torch.einsum('hqk,qhd->khd', of_scores, q.float()).unflatten(1, (-1, groups)).sum(2)
    grad_v = torch.einsum('hqk,qhd->khd', p, grad).unflatten(1, (-1, groups)).sum(2)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def scale_of(given, q):
    return q.shape[-1] ** -0.5 if given is None else given


def flash_forward(query, key, value, cum_seq_q, cum_seq_k, max_q, dropout_p, is_causal, scale, **more):
    check_flash(query, key, value)
    assert cum_seq_q is not None and not dropout_p, 'the only use here: packed rows'
    check_borders(cum_seq_q, query.shape[0]), check_borders(cum_seq_k, key.shape[0])
    window = more['window_size_left'], more['window_size_right']
    out, lse = torch.empty_like(query), torch.empty(query.shape[1], query.shape[0])
    for rows, columns in documents(cum_seq_q, cum_seq_k):
        assert rows.stop - rows.start <= max_q, 'a document is longer than max_q'
        seen = visible(rows.stop - rows.start, columns.stop - columns.start, is_causal, *window)
        out[rows], lse[:, rows] = attend(query[rows], key[columns], value[columns], seen, scale_of(scale, query))
    return out, lse, torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64), out.new_empty(0)


def flash_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, is_causal, scale, **more):
    check_flash(query, key, value, grad_out, out)
    refuse_unless(logsumexp.dtype == torch.float32, 'softmax_lse must have dtype float32')
    window = more['window_size_left'], more['window_size_right']
    gradients = [torch.empty_like(tensor) for tensor in (query, key, value)]
    for rows, columns in documents(cum_seq_q, cum_seq_k):
        seen = visible(rows.stop - rows.start, columns.stop - columns.start, is_causal, *window)
        parts = attend_backward(
            grad_out[rows], query[rows], key[columns], value[columns], out[rows], logsumexp[:, rows], seen,
            scale_of(scale, query),
        )  # fmt: skip
        for gradient, where, part in zip(gradients, (rows, columns, columns), parts, strict=True):
            gradient[where] = part
    return tuple(gradients)


def documents(borders_of_queries, borders_of_keys):
    """For each document the rows of its queries and those of its keys, as slices."""
    sides = [itertools.pairwise(borders.tolist()) for borders in (borders_of_queries, borders_of_keys)]
    for of_queries, of_keys in zip(*sides, strict=True):
        yield slice(*of_queries), slice(*of_keys)


def each_row(function, *tensors):
    """Call a function for each row of (B, heads, T, D) tensors, or (B, H, T), as (T, heads, D) or (H, T); stack what
    it returns in the same way."""
    rows = [
        function(*(t.transpose(0, 1) if t.dim() == 3 else t for t in of_row)) for of_row in zip(*tensors, strict=True)
    ]
    return tuple(
        torch.stack([part.transpose(0, 1) if part.dim() == 3 else part for part in parts])
        for parts in zip(*rows, strict=True)
    )


def dense_forward(check, query, key, value, is_causal, scale):
    check(*(tensor.transpose(1, 2) for tensor in (query, key, value)))
    seen = visible(query.shape[2], key.shape[2], is_causal, None, None)
    return each_row(lambda q, k, v: attend(q, k, v, seen, scale_of(scale, q)), query, key, value)


def dense_backward(check, grad_out, query, key, value, out, logsumexp, is_causal, scale):
    check(*(tensor.transpose(1, 2) for tensor in (query, key, value, grad_out, out)))
    refuse_unless(logsumexp.is_contiguous(), 'logsumexp must be contiguous')
    seen = visible(query.shape[2], key.shape[2], is_causal, None, None)

    def of_row(grad, q, k, v, out, lse):
        return attend_backward(grad, q, k, v, out, lse, seen, scale_of(scale, q))

    return each_row(of_row, grad_out, query, key, value, out, logsumexp)


def sdpa_flash_forward(query, key, value, is_causal, scale, **more):
    out, lse = dense_forward(check_flash, query, key, value, is_causal, scale)
    unused = torch.empty(0, dtype=torch.uint64)
    return out, lse, None, None, query.shape[2], key.shape[2], unused, unused, out.new_empty(0)


def sdpa_flash_backward(grad_out, query, key, value, out, logsumexp, is_causal, scale, **more):
    return dense_backward(check_flash, grad_out, query, key, value, out, logsumexp, is_causal, scale)


def check_efficient(q, k, v, *others):
    """What CUTLASS' kernels ask of (B, T, H, D) tensors on a card since 2020."""
    refuse_unless(len({tensor.dtype for tensor in (q, k, v, *others)}) == 1, 'query, key and value must agree in dtype')
    refuse_unless(k.shape == v.shape and q.shape[-2:] == k.shape[-2:], 'heads of query and key must be equally many')
    multiple = 4 if q.dtype == torch.float32 else 8
    refuse_unless(q.shape[-1] % multiple == 0, f'the head dimension must be a multiple of {multiple}')
    for tensor in (q, k, v):
        refuse_unless(tensor.stride(-1) == 1, 'query, key and value must have contiguous last dimensions')


def sdpa_efficient_forward(query, key, value, attn_bias, compute_log_sumexp, is_causal, scale, **more):
    assert attn_bias is None and compute_log_sumexp
    out, lse = dense_forward(check_efficient, query, key, value, is_causal, scale)
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf)
    return out, padded, torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64)


def sdpa_efficient_backward(grad_out_, query, key, value, out, logsumexp, is_causal, scale, **more):
    refuse_unless(logsumexp.shape[2] % 32 == 0, 'logsumexp must be padded to a multiple of 32')
    lse = logsumexp[..., : query.shape[2]].contiguous()
    return (*dense_backward(check_efficient, grad_out_, query, key, value, out, lse, is_causal, scale), None)


ATTENTIONS = {
    '_flash_attention_forward': flash_forward,
    '_flash_attention_backward': flash_backward,
    '_scaled_dot_product_flash_attention': sdpa_flash_forward,
    '_scaled_dot_product_flash_attention_backward': sdpa_flash_backward,
    '_scaled_dot_product_efficient_attention': sdpa_efficient_forward,
    '_scaled_dot_product_efficient_attention_backward': sdpa_efficient_backward,
}


# --- matmuls whose result has another dtype ---------------------------------------------------------------------------


def product_in_fp32(a, b, out_dtype):
    refuse_unless(a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0], 'mat1 and mat2 shapes cannot be multiplied')
    refuse_unless(a.dtype == b.dtype, 'mat1 and mat2 must have the same dtype')
    is_known = out_dtype == a.dtype or (out_dtype == torch.float32 and a.dtype in HALF)
    refuse_unless(is_known, 'out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs')
    return a.float() @ b.float()


def mm_dtype(self, mat2, out_dtype):
    return product_in_fp32(self, mat2, out_dtype).to(out_dtype)


def addmm_dtype_out(self, mat1, mat2, out_dtype, beta, alpha, out):
    product = product_in_fp32(mat1, mat2, out_dtype)
    refuse_unless(out.dtype == out_dtype, 'out_dtype must be the same as the dtype of the provided out tensor')
    refuse_unless(self.dtype in (out_dtype, mat1.dtype), 'self dtype must match either out_dtype or mat1 dtype')
    assert beta == alpha == 1 and out.shape == product.shape and out.is_contiguous(), 'the only use here'
    return out.copy_(self + product)


MATMULS = {'mm.dtype': mm_dtype, 'addmm.dtype_out': addmm_dtype_out}


@functools.cache
def kernels_of_cuda():
    """Register attentions and matmuls for tensors of a CPU, which has none under these names."""
    library = torch.library.Library('aten', 'IMPL')
    for name, function in (ATTENTIONS | MATMULS).items():
        packet, _, overload = name.partition('.')
        schema = getattr(getattr(torch.ops.aten, packet), overload or 'default')._schema
        arguments = [(argument.name, argument.default_value) for argument in schema.arguments]

        def kernel(*args, function=function, name=name, arguments=arguments, **kwargs):
            called.add(name)
            defaults = {argument: value for argument, value in arguments[len(args) :]}
            given = dict(zip((argument for argument, _ in arguments), args, strict=False))
            return function(**defaults | given | kwargs)

        library.impl(name, kernel, 'CPU')
    return library


# --- kernels that a CPU has, too, but with fewer conditions -----------------------------------------------------------


def check_grouped_mm(a, b, offs=None, bias=None, out_dtype=None):
    for name, matrix in (('mat_a', a), ('mat_b', b)):
        refuse_unless(matrix.dtype in (*HALF, torch.float32), f'Expected {name} to be Float32, BFloat16 or Float16')
        refuse_unless(matrix.data_ptr() % 16 == 0, 'expected data_ptr to be aligned to 16 bytes')
        (rows, columns), (down, across) = matrix.shape[-2:], matrix.stride()[-2:]
        by_columns, by_rows = down == 1 and across >= max(1, rows), across == 1 and down >= max(1, columns)
        refuse_unless(by_columns or by_rows, f'Invalid strides/sizes, got {matrix.stride()} for strides')
        long = across if by_columns else down
        refuse_unless(long * matrix.element_size() % 16 == 0, 'strides should be multiple of 16 bytes')
    refuse_unless(a.dtype == b.dtype, 'mat_a and mat_b must have the same dtype')
    refuse_unless(offs is None or (offs.dim() == 1 and offs.dtype == torch.int32), 'Offsets have to be int32')
    refuse_unless(out_dtype in (None, a.dtype), 'Grouped gemm output dtype must match `mat_a` dtype')


def check_scaled_mm(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
    refuse_unless(a.dtype in EIGHT_BITS and b.dtype in EIGHT_BITS, 'Expected both inputs to be fp8')
    refuse_unless(
        torch.float8_e4m3fn in (a.dtype, b.dtype), 'Multiplication of two Float8_e5m2 matrices is not supported'
    )
    refuse_unless(a.stride() == (a.shape[1], 1), f'self must be row_major, got stride {a.stride()}')
    refuse_unless(b.stride() == (1, b.shape[0]), f'mat2 must be col_major, got stride {b.stride()}')
    refuse_unless(
        a.shape[1] % 16 == 0 == b.shape[1] % 16, f'sizes must be multiples of 16, got {a.shape} and {b.shape}'
    )
    refuse_unless(a.data_ptr() % 16 == 0 == b.data_ptr() % 16, 'expected data_ptr to be aligned to 16 bytes')
    for scale in (scale_a, scale_b):
        refuse_unless(scale.dtype == torch.float32 and scale.numel() == 1, 'scales must be float (fp32) tensors')


def check_fused_adam(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, **more):
    for tensors in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        alike = {(tensor.dtype, tensor.layout, tensor.shape, tensor.stride()) for tensor in tensors}
        refuse_unless(
            len(alike) == 1, 'params, grads, exp_avgs, and exp_avg_sqs must have same dtype, device, and layout'
        )
    for flag in (*state_steps, more.get('found_inf'), more.get('grad_scale')):
        refuse_unless(flag is None or flag.dtype == torch.float32, 'state_steps, found_inf and grad_scale are float32')


CHECKS = {'_grouped_mm': check_grouped_mm, '_scaled_mm': check_scaled_mm, '_fused_adamw_': check_fused_adam}


class Contracts(TorchDispatchMode):
    """Holds kernels that a CPU has, too, to CUDA's conditions."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix('aten::')
        if name in CHECKS:
            called.add(name)
            CHECKS[name](*args, **(kwargs or {}))
        if name == 'histc':  # a GPU counts integers, too
            return function(args[0].float(), *args[1:], **(kwargs or {})).to(args[0].dtype)
        with float8.without_onednn() if name == '_scaled_mm' else contextlib.nullcontext():  # not on every CPU
            return function(*args, **(kwargs or {}))


# --- the device -------------------------------------------------------------------------------------------------------


def says(name, answer):
    """The property `name` of tensors, which gives this answer for all that have numbers."""
    real = getattr(torch._C.TensorBase, name)
    return property(lambda tensor: real.__get__(tensor) if tensor.is_meta else answer)


def on_host(value):
    """'cpu' in place of a CUDA device."""
    is_name = isinstance(value, str) and value.split(':')[0] == 'cuda'
    return torch.device('cpu') if is_name or isinstance(value, torch.device) and value.type == 'cuda' else value


class MakesOnHost(TorchFunctionMode):
    """Makes on the host what is asked for on 'cuda'."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get('pin_memory'):
            asked = kwargs.get('device')
            refuse_unless(asked is not None and on_host(asked) == asked, 'Only dense CPU tensors can be pinned')
            kwargs['pin_memory'] = False
        kwargs = {name: on_host(value) for name, value in kwargs.items()}
        return function(*map(on_host, args), **kwargs)


class Autocast(torch.autocast):
    def __init__(self, device_type, *args, **kwargs):
        super().__init__('cpu' if device_type == 'cuda' else device_type, *args, **kwargs)


def inside(function):
    """The function, with MakesOnHost() again where PyTorch has taken it away: within an operator."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with MakesOnHost():
            return function(*args, **kwargs)

    return call


def hooks_inside(hooks, pack, unpack, init=saved_tensors_hooks.__init__):
    init(hooks, inside(pack), inside(unpack))


STREAM = Stream()
OPERATORS = [varlen._varlen_attn, varlen._varlen_attn_backward, nf4.never]  # written in Python
OPERATORS += [context_manual.attend_over_ranks, context_manual.attend_backward]


@contextlib.contextmanager
def on_cuda():
    """A context in which code on CPU tensors does what it would do on a GPU."""
    kernels_of_cuda()
    is_on, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
    functions = {
        (torch, 'autocast'): Autocast,
        (torch, 'is_autocast_enabled'): lambda kind='cuda': is_on('cpu' if kind == 'cuda' else kind),
        (torch, 'get_autocast_dtype'): lambda kind: dtype_of('cpu' if kind == 'cuda' else kind),
        (torch.cuda, 'get_device_capability'): lambda device=None: (9, 0),
        (torch.cuda, 'Stream'): Stream,
        (torch.cuda, 'Event'): Event,
        (torch.cuda, 'stream'): lambda stream: contextlib.nullcontext(),
        (torch.cuda, 'current_stream'): lambda device=None: STREAM,
        (saved_tensors_hooks, '__init__'): hooks_inside,
    }
    answers = {'device': CUDA, 'is_cuda': True, 'is_cpu': False}
    with contextlib.ExitStack() as stack:
        for (place, name), function in functions.items():
            stack.enter_context(mock.patch.object(place, name, function))
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.Tensor, name, says(name, answer)))
        for operator in OPERATORS:
            implementation = {device: inside(body) for device, body in operator._backend_fns.items()}
            stack.enter_context(mock.patch.dict(operator._backend_fns, implementation))
        stack.enter_context(Contracts())
        stack.enter_context(MakesOnHost())
        active.append(True)
        stack.callback(active.pop)
        yield


@contextlib.contextmanager
def model_on_cuda(*classes):
    """A context in which models of these classes compute as on a GPU, forward and backward, and nothing else does: a
    script's process group, its sharding and its checkpoints remain those of a CPU."""
    backward, make_inputs_on_host = torch.autograd._engine_run_backward, offload.InputsOnHost.__init__

    def with_streams(host):
        make_inputs_on_host(host)
        host.to_gpu, host.to_host = Stream(), Stream()

    def wrapped(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            with on_cuda():
                return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for kind in classes:
            stack.enter_context(mock.patch.object(kind, 'forward', wrapped(kind.forward)))
        stack.enter_context(mock.patch.object(torch.autograd, '_engine_run_backward', wrapped(backward)))
        stack.enter_context(mock.patch.object(offload.InputsOnHost, '__init__', with_streams))
        stack.enter_context(Contracts())  # for the optimizer
        yield
