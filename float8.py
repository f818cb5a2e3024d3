"""
Matmuls in 8 bits: the three of every Linear in the blocks, at twice the rate of bf16 on the tensor cores of Hopper.

    float8.convert(model)  # on the meta device, before it is compiled or sharded; nothing else learns of it

                            exponent   mantissa   largest   smallest   rounding moves a number by at most
    e4m3 (float8_e4m3fn)       4 bits     3 bits       448       2^-9   1/16 of it
    e5m2 (float8_e5m2)         5          2          57344      2^-16   1/8
    bfloat16                   8          7           3e38      1e-40   1/256

Which format for what?  x and W are e4m3: they need digits more than range. Gradients are e5m2: within one tensor they
                        spread over more powers of two, and what is too small for the format becomes 0.
Where do they begin?    Few numbers of a model lie between 2^-9 and 448. So each tensor has a scale of its own, its amax
                        (the largest |value|) / 448, by which it is divided and then just fills the format. The scale is
                        found in every pass anew, and stays on the device: the matmul multiplies its fp32 sums by it.
Which matmuls?          y  = x W^T     e4m3 x e4m3     x (N, in), W (out, in) and y (N, out), for N tokens
                        dx = dy W      e5m2 x e4m3
                        dW = dy^T x    e5m2 x e4m3     sums over tokens: N is a multiple of 16, as in and out are
In which layout?        The tensor cores read both 8-bit operands along the dimension that is summed over, and no other
                        way: the first one lies in memory by rows, the second by columns. That is how x and W^T lie. In
                        backward W, x and dy^T do not, and are copied, a byte for each number.
What is kept?           x in 8 bits, half of what bf16 keeps. Of W only the scale: backward needs it in another layout,
                        and makes that from the weight itself. Under FSDP the whole weight is freed after forward and
                        gathered again; 8-bit copies of all blocks would take back what that saves.
What stays as it was?   Parameters and their gradients, with names, shapes and dtypes. So checkpoints, optimizers, FSDP
                        (which gathers weights in bf16, as ever) and export know nothing of all this. What a matmul
                        returns has the compute dtype, and so has everything between matmuls.
What is left out?       The head, whose logits differ by little. Embedding, norms and softmax, which are no matmuls.
                        LoRA, whose matrices are thin: to find their scales takes longer than to multiply.

To find a scale and to cast is to read the tensor twice. It pays where torch.compile merges that into what comes before
(without it, all is slower than bf16), and where matmuls are large: N, in and out of some thousands each.

Formats: Micikevicius et al., arXiv 2209.05433. torchao's float8 and nanochat have the same scales, one for each tensor.
"""

import contextlib
import math
from functools import partial

import torch
from torch import nn

from model import Linear, linear

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # bytes: what the tensor cores read of a row, or column, at once


def scale_of(tensor, dtype):
    """What a tensor is divided by so that its largest |value| becomes the largest number of an 8-bit dtype: fp32, 0-d.

    A tensor of zeros must not be divided by 0, hence the clamp: at the smallest normal fp32 number, so that it matters
    to tensors below 5e-36 (e4m3) or 7e-34 (e5m2) alone. An inf or nan anywhere is in the scale, too: see quantize().
    """
    amax = tensor.abs().amax().float()
    return (amax / torch.finfo(dtype).max).clamp(min=torch.finfo(torch.float32).tiny)


def quantize(tensor, scale, dtype):
    """The nearest 8-bit numbers to tensor / scale; the same shape and strides.

    There is nothing to clamp, for |tensor| <= amax. With a nan in the tensor the scale is nan. With an inf it is inf,
    and inf / inf = nan; the rest becomes 0, which the matmul multiplies by the scale: 0 * inf = nan. So loss or
    gradient of such a step are nan, as in other dtypes, and the step is skipped.
    """
    return (tensor.float() / scale).to(dtype)


def multiply(a, b, scale_a, scale_b, dtype, fast=False):
    """(a * scale_a) @ (b * scale_b) of 8-bit a (M, K), by rows, and b (K, N), by columns, in `dtype`.

    fast: the tensor cores add up in about 14 bits (arXiv 2412.19437, section 3.5.2), and do not hand their sums on to
    fp32 every now and then. Enough for y, whose operands are rounded more coarsely; gradients are summed in fp32.
    """
    with without_onednn() if a.is_cpu and not torch.compiler.is_compiling() else contextlib.nullcontext():
        return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast)


@contextlib.contextmanager
def without_onednn():
    """On a CPU, which is for tests: oneDNN's kernel for two e4m3 takes 500 times as long as torch's own (2.13)."""
    was_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)


def by_columns(matrix):
    """The same matrix with each column in one piece of memory; a copy if it has its rows so."""
    return matrix.T.contiguous().T


class Float8Matmul(torch.autograd.Function):
    """x W^T of x (N, in) and W (out, in). W is cast to x's dtype first: whether it is an fp32 master (DDP) or was
    gathered in bf16 (FSDP), the numbers are the same."""

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
        if ctx.needs_input_grad[1]:  # frozen weights have none
            dw = multiply(dy8.T.contiguous(), by_columns(x8), scale_dy, scale_x, dy.dtype).to(weight.dtype)
        return dx, dw


def linear_in_8_bits(x, weight, bias=None, *, dtype):
    """F.linear(x, weight, bias) by three matmuls of 8 bits: x (..., in), weight (out, in) -> (..., out) in `dtype`."""
    y = Float8Matmul.apply(x.to(dtype).flatten(0, -2), weight).unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias.to(dtype)


# --- in a model -------------------------------------------------------------------------------------------------------


def convert(model):
    """Let the Linears of a model's blocks multiply in 8 bits, in place. model: a GPT, or finetune.ForTraining.

    Each keeps its parameters. Where transformers has an nn.Linear, model.Linear takes its place.
    """
    # Under DDP the layers of transformers are handed fp32, and it is autocast that makes them compute in another dtype.
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
    """The same layers multiply in the compute dtype meanwhile: for the self-test, which compares with transformers."""
    layers = [layer for block in model.blocks for layer in block.modules() if isinstance(layer, Linear)]
    matmuls = [layer.matmul for layer in layers]
    try:
        for layer in layers:
            layer.matmul = linear
        yield
    finally:
        for layer, matmul in zip(layers, matmuls, strict=True):
            layer.matmul = matmul


# The keys that a layer's inputs and outputs follow from.
KEYS = {'qkv': ('n_embd', 'head_dim'), 'proj': ('head_dim', 'n_embd'), 'down': ('mlp_hidden_dim', 'n_embd')}
KEYS |= dict.fromkeys(('up', 'gate'), ('n_embd', 'mlp_hidden_dim'))


def check(config, model, strategy):
    """[a line for the log]. Raises ValueError for a run that cannot multiply in 8 bits.

    config: all keys, resolved. model: planning.sizes.part_of_rank(config), what a rank has of each matrix.
    """
    given, or_without = 'matmul_dtype=float8', 'or leave matmul_dtype out'
    on_cuda = config['device'].startswith('cuda')
    if strategy == 'deepspeed':
        raise ValueError(f'{given}: DeepSpeed has weights of its own: train with train_fsdp.py, {or_without}')
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
    ranks = config.get('tensor_parallel', 1)
    for name, layer in layers:
        for size, what, number in zip(reversed(layer.weight.shape), ('inputs', 'outputs'), (0, 1), strict=True):
            if size % MULTIPLE:
                key = KEYS.get(name.rpartition('.')[2], (None, None))[number] if 'transformers' not in config else None
                raise ValueError(
                    f'{given}: {name} has {size} {what}{" on each rank" if ranks > 1 else ""}, and matmuls of 8 bits '
                    f'take multiples of {MULTIPLE}: {advice(config, key)}leave matmul_dtype out'
                )
    tokens = config['block_size'] // config.get('context_parallel', 1)
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


def advice(config, key):
    """What to change a key to, with 'or ' at its end; '' where the folder of a pretrained model says the sizes."""
    if key is None:
        return ''
    if key == 'head_dim':
        return 'choose n_head, n_kv_head and head_dim so that heads x head_dim is one, or '
    unit = math.lcm(MULTIPLE, config['n_head']) if key == 'n_embd' else MULTIPLE * config.get('tensor_parallel', 1)
    below = config[key] // unit * unit
    return f'use --{key}={" or ".join(str(n) for n in (below, below + unit) if n)}, or '
