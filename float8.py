"""
Matmuls in 8 bits: the three of every Linear in the blocks, at twice the rate of bf16 on the tensor cores of Hopper.

    float8.convert(model)  # on the meta device, before it is compiled or sharded, which need not know of it

                            exponent   mantissa   largest   smallest   rounding moves a number by at most
    e4m3 (float8_e4m3fn)       4 bits     3 bits       448       2^-9   1/16 of it
    e5m2 (float8_e5m2)         5          2          57344      2^-16   1/8
    bfloat16                   8          7           3e38      1e-40   1/256

Which format for what?  x and W are e4m3, because they need digits more than range. Gradients are e5m2, because those of
                        one tensor spread over more powers of two, and whatever is too small for a format becomes 0.
Why are there scales?   Few numbers of a model lie between 2^-9 and 448. So each tensor is divided by its own scale, its
                        amax (the largest |value|) / 448, after which it just fills the format. The scale is found anew
                        in every pass, and stays on the device: the matmul multiplies its fp32 sums by it.
Which matmuls?          y  = x W^T     e4m3 x e4m3     x (N, in), W (out, in) and y (N, out), for N tokens
                        dx = dy W      e5m2 x e4m3
                        dW = dy^T x    e5m2 x e4m3     sums over tokens: N is a multiple of 16, as in and out are
In which layout?        The tensor cores read 8-bit operands only along the dimension that is summed over, so the first
                        operand has to lie in memory by rows, the second by columns. x and W^T lie like that already. In
                        backward W, x and dy^T do not, so they are copied, at one byte for each number.
What is kept?           x in 8 bits, half of what bf16 would keep. Of W only the scale is kept, because backward needs W
                        in another layout and makes that from the weight itself. FSDP frees whole weights after forward
                        and gathers them again; 8-bit copies of all blocks' weights would take back what that saves.
What stays as it was?   Parameters and their gradients, with names, shapes and dtypes. So checkpoints, optimizers, FSDP
                        (which gathers weights in bf16, as before) and export need not know about float8. A matmul
                        returns the compute dtype, in which everything between matmuls is computed.
What is left out?       The head, whose logits differ by little. Embedding, norms and softmax, which are not matmuls.
                        LoRA, whose matrices are so thin that finding their scales takes longer than multiplying.

Finding a scale and then casting reads the tensor twice. So matmuls in 8 bits pay off where torch.compile merges these
reads into what comes before them (without it everything is slower than bf16), and where the matmuls are large: N, in
and out of some thousands each.

Formats: Micikevicius et al., arXiv 2209.05433. torchao's float8 and nanochat have the same scales, one for each tensor.
"""

import contextlib
import math
from functools import partial

import torch
from torch import nn

from model import Linear, linear

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # bytes of a row or column that the tensor cores read at once


def scale_of(tensor, dtype):
    """The scale (fp32, 0-d) of a tensor: divided by it, its largest |value| becomes the largest of an 8-bit dtype.

    The clamp keeps a tensor of zeros from being divided by 0. It is at the smallest normal fp32 number, and so matters
    only to tensors below 5e-36 (e4m3) or 7e-34 (e5m2). An inf or nan in the tensor gets into the scale: see quantize().
    """
    # Row by row: of the whole at once torch.compile may make uneven pieces, 528 for SwiGLU's 134M numbers on an H100.
    amax = tensor.abs().amax(-1).amax().float()
    return (amax / torch.finfo(dtype).max).clamp(min=torch.finfo(torch.float32).tiny)


def quantize(tensor, scale, dtype):
    """The 8-bit numbers nearest to tensor / scale, with the same shape and strides.

    Nothing has to be clamped, since |tensor| <= amax. If the tensor has a nan, the scale is nan. If it has an inf, the
    scale is inf: inf / inf = nan, and all other numbers become 0, which the matmul multiplies by the scale: 0 * inf =
    nan. Either way the loss or the gradient of this step is nan, as in other dtypes, and the step is skipped.
    """
    return (tensor.float() / scale).to(dtype)


def multiply(a, b, scale_a, scale_b, dtype, fast=False):
    """(a * scale_a) @ (b * scale_b) in `dtype`. a (M, K) and b (K, N) are in 8 bits; a lies by rows, b by columns.

    fast: the tensor cores add up in about 14 bits (arXiv 2412.19437, section 3.5.2) and do not hand their sums on to
    fp32 from time to time. This is enough for y, whose operands are rounded more coarsely. Gradients are summed in
    fp32.
    """
    with without_onednn() if a.is_cpu and not torch.compiler.is_compiling() else contextlib.nullcontext():
        return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast)


@contextlib.contextmanager
def without_onednn():
    """For tests on a CPU, where oneDNN's kernel for two e4m3 takes 500 times as long as torch's own (2.13)."""
    was_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)


def by_columns(matrix):
    """The same matrix with each column contiguous in memory; a copy, unless it lies like that already."""
    return matrix.T.contiguous().T


class Float8Matmul(torch.autograd.Function):
    """x W^T of x (N, in) and W (out, in). W is cast to x's dtype first, so that an fp32 master (DDP) and a weight that
    was gathered in bf16 (FSDP) give the same numbers."""

    @staticmethod
    def forward(ctx, x, weight):
        scale_x, scale_w = scale_of(x, E4M3), scale_of(weight.to(x.dtype), E4M3)
        x8, w8 = quantize(x, scale_x, E4M3).contiguous(), quantize(weight.to(x.dtype), scale_w, E4M3)
        ctx.save_for_backward(x8, scale_x, weight, scale_w)
        return multiply(x8, w8.T, scale_x, scale_w, x.dtype, fast=True)

    @staticmethod
    def backward(ctx, dy):
        x8, scale_x, weight, scale_w = ctx.saved_tensors
        scale_dy = scale_of(dy, E5M2)
        dy8 = quantize(dy, scale_dy, E5M2).contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            w8 = by_columns(quantize(weight.to(dy.dtype), scale_w, E4M3))
            dx = multiply(dy8, w8, scale_dy, scale_w, dy.dtype)
        if ctx.needs_input_grad[1]:  # frozen weights have none; that of an fp32 master (DDP) is not rounded
            dw = multiply(dy8.T.contiguous(), by_columns(x8), scale_dy, scale_x, weight.dtype)
        return dx, dw


def linear_in_8_bits(x, weight, bias=None, *, dtype):
    """F.linear(x, weight, bias) by three matmuls in 8 bits: x (..., in), weight (out, in) -> (..., out) in `dtype`."""
    y = Float8Matmul.apply(x.to(dtype).flatten(0, -2), weight).unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias.to(dtype)


# --- in a model -------------------------------------------------------------------------------------------------------


def convert(model):
    """Make the Linears of a model's blocks multiply in 8 bits, in place. model: a GPT, or finetune.ForTraining.

    Each keeps its parameters. Where transformers has an nn.Linear, model.Linear takes its place.
    """
    # The dtype is given because layers of transformers are handed fp32 under DDP, and rely on autocast to cast it.
    matmul = partial(linear_in_8_bits, dtype=model.compute_dtype)
    for parent in [parent for block in model.blocks for parent in block.modules()]:
        for name, layer in [*parent.named_children()]:
            if type(layer) is nn.Linear:
                theirs, shape = layer, (layer.in_features, layer.out_features)
                layer = Linear(*shape, bias=theirs.bias is not None, device='meta')
                layer.weight, layer.bias = theirs.weight, theirs.bias
                setattr(parent, name, layer)
            if isinstance(layer, Linear):
                layer.matmul = matmul


@contextlib.contextmanager
def paused(model):
    """A context in which these layers multiply in the compute dtype, for the self-test against transformers."""
    layers = [layer for block in model.blocks for layer in block.modules() if isinstance(layer, Linear)]
    matmuls = [layer.matmul for layer in layers]
    try:
        for layer in layers:
            layer.matmul = linear
        yield
    finally:
        for layer, matmul in zip(layers, matmuls, strict=True):
            layer.matmul = matmul


# The keys that decide how many inputs and outputs a layer has.
KEYS = {'qkv': ('n_embd', 'head_dim'), 'proj': ('head_dim', 'n_embd'), 'down': ('mlp_hidden_dim', 'n_embd')}
KEYS |= dict.fromkeys(('up', 'gate'), ('n_embd', 'mlp_hidden_dim'))


def check(config, layout, model):
    """Returns [a line for the log]. Raises ValueError for a run that cannot multiply in 8 bits.

    config: all keys, resolved. model: of planning.sizes.part_of_rank(config), with a rank's part of each matrix.
    """
    given, or_without = 'matmul_dtype=float8', 'or leave matmul_dtype out'
    on_cuda = config['device'].startswith('cuda')
    if config['dtype'] == 'float16':
        raise ValueError(f'{given} with dtype=float16: use --dtype=bfloat16, {or_without}')
    if config.get('lora_rank'):
        raise ValueError(
            f'{given} with lora_rank={config["lora_rank"]}: its matrices are too thin to gain from it: '
            'leave matmul_dtype out, or train all weights with --lora_rank=0'
        )
    if on_cuda and torch.cuda.is_available():  # a login node may plan for a GPU that it does not have
        major, minor = torch.cuda.get_device_capability(config['device'])
        if (major, minor) < (8, 9):
            raise ValueError(
                f'{given}: {torch.cuda.get_device_name(config["device"])} (compute capability {major}.{minor}) has no '
                'matmuls of 8 bits, which came with 8.9 (Ada, Hopper): leave matmul_dtype out'
            )

    layers = [
        (f'block {number}, {name}', layer)
        for number, block in enumerate(model.blocks)
        for name, layer in block.named_modules()
        if isinstance(layer, Linear)
    ]
    if not layers:
        raise ValueError(
            f'{given}: the blocks of this {config["arch"]} have no nn.Linear (GPT-2 of transformers has Conv1D): '
            f'use --native=True, {or_without}'
        )
    ranks = layout.tensor
    for name, layer in layers:
        for size, what, number in zip(reversed(layer.weight.shape), ('inputs', 'outputs'), (0, 1), strict=True):
            if size % MULTIPLE:
                key = KEYS.get(name.rpartition('.')[2], (None, None))[number] if 'transformers' not in config else None
                if '.shared.' in name and key == 'mlp_hidden_dim':
                    key = 'shared_expert_dim'
                raise ValueError(
                    f'{given}: {name} has {size} {what}{" on each rank" if ranks > 1 else ""}, and matmuls of 8 bits '
                    f'take multiples of {MULTIPLE}: {advice(config, key, ranks)}leave matmul_dtype out'
                )
    tokens = config['block_size'] // layout.context
    if config['batch_size'] * tokens % MULTIPLE:
        unit = MULTIPLE // math.gcd(MULTIPLE, tokens)
        larger = -(-config['batch_size'] // unit) * unit
        raise ValueError(
            f'{given}: batch_size={config["batch_size"]} x {tokens} tokens are {config["batch_size"] * tokens} in a '
            f'micro-batch, and matmuls of 8 bits take multiples of {MULTIPLE}: use --batch_size={larger}, '
            f'a --block_size that is such a multiple, {or_without}'
        )
    slow = '; WARNING: slower than without it unless compiled' if on_cuda and not config['compile'] else ''
    return [
        f'float8: {len(layers)} layers of the blocks multiply in 8 bits, e4m3 and for gradients e5m2; all else is '
        f'{config["dtype"]}, what they return, too{slow}'
    ]


def advice(config, key, ranks):
    """What to change a key to, with 'or ' at its end; '' if the sizes are those of a pretrained model's folder."""
    if key is None:
        return ''
    if key == 'head_dim':
        return 'choose n_head, n_kv_head and head_dim so that heads x head_dim is one, or '
    unit = math.lcm(MULTIPLE, config['n_head']) if key == 'n_embd' else MULTIPLE * ranks
    below = config[key] // unit * unit
    return f'use --{key}={" or ".join(str(n) for n in (below, below + unit) if n)}, or '
