"""
Parts of a step in several forms, side by side: what the lessons compute now, what they computed before a change, and
forms that would make the code longer and wait until a card shows that they pay.

    python benchmarks/gpu.py --only='forms of'

Each function is a check of benchmarks/gpu.py, as those of benchmarks/gpu_checks.py. `without` a letter is the form
before, `with` one is a form that waits. They take turns in one process, where a clock that slows down slows all alike.
Forms return what they compute, so that a form that computes something else shows.

Gains in ms per step, expected from counts on a CPU: of GPT-2 124M (67 ms on an H100) and Llama 1B under ddp (226 ms).
In the code; A, B, C and G change the rounding:

    A   2.3         3.1         the head's gradient accumulates inside its matmul, in chunks four times as large
    B   0.2         1.8         AdamW's kernel clips as it reads the gradients: 32 bytes per element instead of 36
    C   1.1         0.6         the loss finds the largest and the sum of a row in one pass, and writes its gradient
                                into the logits: 6 bytes per bfloat16 logit instead of 8, 2 in memory instead of 6
    D   0.4 to 0.9  0.7 to 1.7  tokens come before heads in rotated queries and keys (Llama): one tensor less is kept,
                                0.6 and 1.1 GB
    G   0.1         1.3 to 1.9  under DDP weights' gradients leave their matmuls in fp32

Waiting:

    E   0.2         0.5         the loss's kernel multiplies by what backward multiplies by; gradients are equal to the
                                bit if the number of targets is a power of two
    F   0.3         0.2         the embedding and the last norm are compiled: 6 of their 14 operators only cast
    H   0.2         0.5         the embedding's gradient is added to the tied head's: 16 bytes less per element
    I   0.5         ?           Inductor tries more sizes of tiles in blocks (coordinate_descent_tuning)
    J               3.6         fsdp_manual.py on one rank, where train_ddp.py is better, gathers nothing in backward
    F5              2.2         float8 keeps transposed inputs for backward. Its bytes argue against it: 667 kB per
                                token instead of 663, and 67 to keep, not 54 (benchmarks/kernels.py --float8 --with_f5)
    F6              1.3         float8 finds weights' amax in Adam's pass: 4 bytes less per element of the blocks
"""

import contextlib
import time
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

import float8
import fsdp_manual
import optim
from benchmarks.gpu import LOSSES, SIZES, TINY
from loss import ChunkedCrossEntropy, cross_entropy, pointwise_cross_entropy
from model import (
    GPT,
    MLP,
    Attention,
    Block,
    Linear,
    ModelConfig,
    RotaryEmbedding,
)


def in_turns(device, ways, rounds=10):
    """
    {name: milliseconds of the fastest of some calls} of {name: function}. Each round calls them all, because clocks
    drift by 2.5% within a minute, and so they slow down all alike. Where functions return lists of tensors, there is
    also {f'{name}, apart': largest difference from those of the first function, of the largest |number|}.
    """
    synchronize = torch.cuda.synchronize if device.type == 'cuda' else lambda: None
    times, far, first = {name: [] for name in ways}, {}, None
    for turn in range(-2, rounds):  # two to warm up
        for name, function in ways.items():
            synchronize()
            began = time.perf_counter()
            results = function()
            synchronize()
            times[name] += [1e3 * (time.perf_counter() - began)] if turn >= 0 else []
            if turn == -2 and results is not None and first is None:
                first = [tensor.detach().clone() for tensor in results]
            elif turn == -2 and results is not None:
                pairs = zip(results, first, strict=True)
                far[f'{name.removesuffix(" ms")}, apart'] = max(apart(one, other) for one, other in pairs)
    return {name: round(min(found), 3) for name, found in times.items()} | far


def apart(one, other):
    """The largest |difference| of two tensors, of the largest |number| of the second."""
    return ((one.float() - other.float()).abs().max() / other.float().abs().max()).item()


def inputs(keys, config, device):
    """Hidden states (batch, block_size, n_embd) in bf16 that need a gradient, and the gradient that comes back."""
    shape = keys['batch_size'], config.block_size, config.n_embd
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    return x, torch.randn_like(x)


def gradients_of(forward, x, gradient, parameters):
    """What a form computes: its output, and the gradients of its input and its parameters."""
    x.grad = None
    for parameter in parameters:
        parameter.grad = None
    y = forward(x)
    y.backward(gradient)
    return [y, x.grad, *(parameter.grad for parameter in parameters)]


def shape_of(name, device, **changes):
    """(keys, ModelConfig) of one of benchmarks/gpu.py's sizes; on a CPU a tiny one."""
    keys = TINY | dict(block_size=32, batch_size=2) if device.type == 'cpu' else SIZES[name]
    return keys, ModelConfig.from_keys({'vocab_size': 50304} | keys | changes)


def forms_of_the_loss(device, arguments):
    """The head and the loss, eager and compiled, beside their matmuls; compiled also without A, without C, with E."""

    def two_passes(logits, targets, vocab_size, z_loss, with_gradient):
        """Before C: the largest of a row and the sum one after the other, and the gradient in memory of its own."""
        columns = torch.arange(logits.shape[1], device=logits.device)
        logits32 = torch.where(columns < vocab_size, logits.float(), -torch.inf)
        lse, valid = torch.logsumexp(logits32, -1), (targets >= 0).float()
        ce = ((lse - logits.gather(1, targets.clamp(min=0)[:, None])[:, 0].float()) * valid).sum()
        scale = (valid * (1 + 2 * z_loss * lse))[:, None]
        gradient = (logits32 - lse[:, None]).exp() * scale - (columns == targets[:, None]).float()
        return ce + z_loss * (lse**2 * valid).sum(), ce, gradient.to(logits.dtype)

    def rounded_first(total, a, b):
        """Before A: each product is rounded and added in a pass of its own."""
        return (a @ b).float() if total is None else total.add_(a @ b)

    before_a = {'LOGITS_BYTES': {'cpu': 2**26, 'cuda': 2**29}, 'add_product': rounded_first}
    tokens, width, vocab_size = (256, 64, 512) if device.type == 'cpu' else LOSSES[arguments.of]
    hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab_size, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(vocab_size - 47, (tokens,), device=device)

    def step(kernel, function=ChunkedCrossEntropy, **others):
        hidden.grad = weight.grad = None
        with mock.patch.multiple('loss', **others) if others else contextlib.nullcontext():
            loss_sum, _ = function.apply(hidden, weight, targets, vocab_size - 47, 1e-4, True, kernel)
            (loss_sum / tokens).backward()
        return [loss_sum, hidden.grad, weight.grad]

    def matmuls():
        logits = hidden @ weight.T
        logits.T @ hidden, logits @ weight

    class Multiplied(ChunkedCrossEntropy):
        """With E: what backward multiplies by is known in forward, and the kernel of the loss does it."""

        backward = staticmethod(lambda ctx, *_: (*ctx.saved_tensors, *[None] * 5))

    factor = torch.full((), 1 / tokens, device=device)

    def multiplied(*args, **options):
        loss_sum, ce_sum, gradient = pointwise_cross_entropy(*args, **options)
        return loss_sum, ce_sum, gradient.mul_(factor)

    forms = (pointwise_cross_entropy, two_passes, multiplied)
    kernel, before_c, with_e = (torch.compile(form, dynamic=False) for form in forms)
    ways = {
        'compiled ms': lambda: step(kernel),
        'with E ms': lambda: step(with_e, function=Multiplied),
        'without A ms': lambda: step(kernel, **before_a),
        'without C ms': lambda: step(before_c),
        'without both ms': lambda: step(before_c, **before_a),
        'eager ms': lambda: step(cross_entropy),
        'matmuls ms': matmuls,
    }
    return in_turns(device, ways)


def forms_of_attention(device, arguments):
    """One layer's attention compiled, forward and backward, and the same without D: rotated after the transposes."""
    keys, config = shape_of(arguments.of, device)
    layer = Attention(config, RotaryEmbedding(config)).to(device, torch.bfloat16)
    layer.rotary.prepare(device)
    x, gradient = inputs(keys, config, device)

    def rotated_last(x):
        parts = layer.qkv(x).unflatten(-1, (-1, layer.head_dim)).split(layer.heads_of_qkv, dim=2)
        q, k, v = (heads.transpose(1, 2) for heads in parts)
        q, k = (layer.rotary.rotate(heads, layer.rotary.cos_sin[:, None]) for heads in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] < q.shape[1])
        return layer.proj(y.transpose(1, 2).flatten(2))

    def way(form):
        forward = torch.compile(form)
        return lambda: gradients_of(forward, x, gradient, [*layer.parameters()])

    return in_turns(device, {'now ms': way(layer.forward), 'without D ms': way(rotated_last)})


def forms_of_a_layer(device, arguments):
    """One of the larger linear layers under DDP, compiled, forward and backward, and without G: by autograd."""
    tokens, width, hidden = (256, 64, 128) if device.type == 'cpu' else (16384, 2048, 8192)
    layer = Linear(width, hidden, bias=False).to(device)
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)

    def way(form):
        forward = torch.compile(form)
        return lambda: gradients_of(forward, x, gradient, [layer.weight])

    before = way(lambda x: F.linear(x, layer.weight.to(x.dtype)))
    return in_turns(device, {'now ms': way(layer.forward), 'without G ms': before})


def forms_of_a_block(device, arguments):
    """A block compiled as make_model() does, forward and backward, and with I: Inductor tries more sizes of tiles."""
    keys, config = shape_of(arguments.of, device)
    rotary = None if config.arch == 'gpt2' else RotaryEmbedding(config)
    block = Block(config, rotary).to(device)
    if rotary:
        rotary.prepare(device)
    x, gradient = inputs(keys, config, device)

    def way(**options):
        forward = torch.compile(block.forward, **options)
        return lambda: gradients_of(forward, x, gradient, [*block.parameters()])

    return in_turns(device, {'now ms': way(), 'with I ms': way(options={'coordinate_descent_tuning': True})})


def forms_of_the_ends(device, arguments):
    """
    What comes before the blocks and after them, but for the loss, forward and backward, where the head is tied: the
    embedding, the last norm, and the sum of the embedding's and the head's gradient. With F both are compiled. With H
    the embedding's backward adds its rows to the head's gradient, instead of filling a matrix that is added to it.
    """
    keys, config = shape_of('124M gpt2', device, n_layer=1)
    model = GPT(config, torch.bfloat16).to(device)
    weight, head = model.embed.weight, torch.randn_like(model.embed.weight)
    x = torch.randint(config.vocab_size, (keys['batch_size'], config.block_size), device=device)
    positions, _ = model.places(x, 0, x.shape[1])
    gradient = torch.randn(*x.shape, config.n_embd, device=device, dtype=torch.bfloat16)

    class Added(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, x):
            ctx.save_for_backward(x)
            return weight[x]

        @staticmethod
        def backward(ctx, gradient):  # index_add_() would be quicker, but adds in another order each time
            weight.grad.index_put_(ctx.saved_tensors, gradient.float(), accumulate=True)
            return None, None

    def step(embedded, finished):
        for parameter in model.parameters():
            parameter.grad = None
        weight.grad = head.clone()
        y = finished(embedded(x, positions))
        y.backward(gradient)
        return [y, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    def way(forms, embed=model.embed.forward):
        with mock.patch.object(model.embed, 'forward', embed):
            return step(*forms)

    now = model.embedded, model.finished
    with_f = [torch.compile(form) for form in now]
    ways = {'now ms': lambda: way(now), 'with F ms': lambda: way(with_f)}
    ways |= {'with H ms': lambda: way(now, lambda x: Added.apply(weight, x))}
    return in_turns(device, ways)


def updated_with_amax(theta, g, m, v, divisor, lr, correction1, correction2):
    """
    With F6: AdamW's step of one matrix, in place, and the largest |weight| of each of its rows in bf16, which float8
    needs in the next forward. The corrections are 1 - beta**t; the constants are those of forms_of_the_update().
    """
    g = g / divisor
    m.lerp_(g, 1 - 0.9)
    v.lerp_(g * g, 1 - 0.95)
    theta.mul_(1 - lr * 0.1).sub_(lr / correction1 * m / ((v / correction2).sqrt() + 1e-8))
    return theta.bfloat16().abs().amax(-1)


def forms_of_the_update(device, arguments):
    """
    Clipping, AdamW's step of half a billion numbers in matrices, and the largest number of each matrix, which float8
    needs. Without B gradients are scaled in a pass of their own. With F6 AdamW's pass finds the largest numbers.
    """
    (count, side), lr = (2, 32) if device.type == 'cpu' else (32, 4096), 0.1
    generator = torch.Generator(device).manual_seed(0)
    weights, gradients = (torch.randn(count, side, side, generator=generator, device=device) for _ in range(2))
    rows_amax = torch.compile(lambda weight: weight.bfloat16().abs().amax(-1))
    update = torch.compile(updated_with_amax, dynamic=False)

    def of_today(on_its_way):
        layer = torch.nn.ParameterList(torch.nn.Parameter(weight.clone()) for weight in weights)
        for weight, gradient in zip(layer, gradients, strict=True):
            weight.grad = gradient.clone()
        optimizer = optim.make_optimizer(layer, 'adamw', lr, 0.9, 0.95, 0.1)

        def step():
            optim.clip_grad_norm_(layer.parameters(), 1.0, optimizer=optimizer if on_its_way else None)
            optimizer.step()
            return [*layer, *(rows_amax(weight).amax() for weight in layer)]

        return step

    def in_one_pass():
        state = [(weight.clone(), *torch.zeros(2, side, side, device=device)) for weight in weights]
        rate, steps = torch.full((), lr, device=device), 0

        def step():
            nonlocal steps
            steps += 1
            norm = torch.stack(torch._foreach_norm([*gradients])).norm()
            given = (norm + 1e-6).clamp(min=1.0), rate
            given += tuple(torch.full((), 1 - beta**steps, device=device) for beta in (0.9, 0.95))
            rows = [update(theta, g, m, v, *given) for (theta, m, v), g in zip(state, gradients, strict=True)]
            return [*(theta for theta, _, _ in state), *(row.amax() for row in rows)]

        return step

    ways = {'now ms': of_today(on_its_way=True), 'without B ms': of_today(on_its_way=False)}
    return in_turns(device, ways | {'with F6 ms': in_one_pass()})


@torch.library.custom_op('forms::cast_twice', mutates_args=())
def cast_twice(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (N, in) in 8 bits and the same transposed, in one pass. torch.compile does not look into it, or it would cast
    and transpose x anew in backward."""
    return cast_both(x, scale)


@cast_twice.register_fake
def _(x, scale):
    return x.new_empty(x.shape, dtype=float8.E4M3), x.new_empty(x.shape[::-1], dtype=float8.E4M3)


@torch.compile
def cast_both(x, scale):
    x8 = float8.quantize(x, scale, float8.E4M3).contiguous()
    return x8, x8.T.contiguous()


class KeptTransposed(float8.Float8Matmul):
    """With F5: of x the transposed 8-bit copy is kept, which backward reads, and which is made while x is cast."""

    @staticmethod
    def forward(ctx, x, weight):
        scale_x, scale_w = (float8.scale_of(tensor, float8.E4M3) for tensor in (x, weight.to(x.dtype)))
        x8, transposed = cast_twice(x, scale_x)
        w8 = float8.quantize(weight.to(x.dtype), scale_w, float8.E4M3)
        ctx.save_for_backward(transposed.T, scale_x, weight, scale_w)  # by columns, as backward wants it
        return float8.multiply(x8, w8.T, scale_x, scale_w, x.dtype, fast=True)


def forms_of_float8(device, arguments):
    """
    An MLP of Llama 1B under DDP in 8 bits, compiled, forward and backward, beside bf16; without F3, where a tensor's
    amax is found at once; without G, where the gradient of a weight is rounded to bf16 first; with F5, see above.
    """
    keys, config = shape_of('Llama 1B', device)
    in_bf16 = MLP(config).to(device)
    in_8_bits = MLP(config).to(device)
    in_8_bits.load_state_dict(in_bf16.state_dict())
    float8.convert(SimpleNamespace(blocks=[in_8_bits], compute_dtype=torch.bfloat16))
    (x, gradient), multiply = inputs(keys, config, device), float8.multiply

    def at_once(tensor, dtype):
        amax = tensor.abs().amax().float()
        return (amax / torch.finfo(dtype).max).clamp(min=torch.finfo(torch.float32).tiny)

    def rounded(a, b, scale_a, scale_b, dtype, fast=False):
        return multiply(a, b, scale_a, scale_b, torch.bfloat16, fast).to(dtype)

    def way(layer, **others):
        forward = torch.compile(layer.forward)

        def step():
            with mock.patch.multiple(float8, **others) if others else contextlib.nullcontext():
                return gradients_of(forward, x, gradient, [*layer.parameters()])

        return step

    ways = {'now ms': way(in_8_bits), 'with F5 ms': way(in_8_bits, Float8Matmul=KeptTransposed)}
    ways |= {'without F3 ms': way(in_8_bits, scale_of=at_once), 'without G ms': way(in_8_bits, multiply=rounded)}
    return in_turns(device, ways | {'bf16 ms': way(in_bf16)})


def forms_of_one_rank(device, arguments):
    """
    Forward and backward of fsdp_manual on one rank, where a gather is a copy, and so is a reduction. With J weights
    stay whole for backward, as under stage 2, and gradients are copied one by one instead of being cut into chunks.
    """
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh(device.type, (1,))
    keys, config = shape_of('Llama 1B', device, n_layer=4)
    tokens = torch.randint(config.vocab_size, (keys['batch_size'], config.block_size), device=device)

    def copied(gradients, dim, num_chunks, out):
        places = out.view(-1).split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_([*places], [gradient.flatten() for gradient in gradients])

    def way(zero_stage, chunk_cat=torch._chunk_cat):
        with torch.device('meta'):
            raw_model = GPT(config, torch.bfloat16)
        for block in raw_model.blocks if device.type == 'cuda' else ():
            block.forward = torch.compile(block.forward)
        model = fsdp_manual.shard(raw_model, raw_model.blocks, mesh, torch.bfloat16, zero_stage=zero_stage)
        raw_model.to_empty(device=device)
        generator = torch.Generator(device).manual_seed(0)
        for parameter in raw_model.parameters():
            parameter.data.to_local().normal_(std=0.02, generator=generator)

        def step():
            raw_model.zero_grad()
            with mock.patch.object(torch, '_chunk_cat', chunk_cat):
                loss = model(tokens, tokens)[0]
                loss.backward()
            return [loss, *(parameter.grad.to_local() for parameter in raw_model.parameters())]

        return step

    return in_turns(device, {'now ms': way(zero_stage=3), 'with J ms': way(2, copied)})
