"""model.py and huggingface/convert.py: the numbers of transformers and of plain references; memory, generation,
counts."""

import collections
import contextlib
import itertools
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch._inductor.metrics
import torch.nn.functional as F
from on_cuda import called, on_cuda
from precision import MARGIN, apart, assert_as_close_to_float64, error, gap_of_text, likeliest
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import loss as loss_module
import model as model_module
from attention import MaskedAttention, PackedAttention, attention_of_documents
from evaluation import sampling
from huggingface import convert
from loss import LOGITS_BYTES, ChunkedCrossEntropy, cross_entropy, pointwise_cross_entropy
from model import ARCHITECTURES, GPT, ModelConfig

VOCAB_SIZE = 67  # padded to 128
NEAR = {'window_pattern': 'SL', 'window_size': 5, 'logit_softcap': 2.0}  # windows and caps that matter in small models
SMALL = {'n_layer': 2, 'n_head': 4, 'n_embd': 40, 'mlp_hidden_dim': 56, 'vocab_size': VOCAB_SIZE, 'block_size': 24}


class MetaOps(TorchDispatchMode):
    """with MetaOps() as ops: ...; ops.names counts operations, ops.sizes_of_masks are the sizes of boolean tensors."""

    def __init__(self):
        super().__init__()
        self.names, self.sizes_of_masks = collections.Counter(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.names[str(function)] += 1
        masks = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool]
        self.sizes_of_masks.update(mask.numel() for mask in masks)
        return result


def make_model(arch, compute_dtype=torch.float32, seed=0, **changes):
    """A small model, initialized as the train scripts do it."""
    with torch.device('meta'):
        model = GPT(ModelConfig(arch=arch, **{**SMALL, **changes}), compute_dtype)
    model.to_empty(device='cpu')
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.initial_value(name, parameter, seed, 'cpu'))
    return model


def make_tokens(rows, length, seed=0):
    return torch.randint(VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(seed))


def randomise(module, seed=0):
    """Give all parameters random values, so large that every weight, norm and bias matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            mean = 1.0 if parameter.dim() == 1 and name.endswith('weight') else 0.0  # 1 for norms
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + mean)


def randomise_for(prompts, max_new_tokens, model):
    """Random values with which no token of what the model writes is near a tie."""
    for seed in itertools.count():
        randomise(model, seed)
        if gap_of_text(model, prompts, max_new_tokens) > MARGIN:
            return


class PeakBytes(TorchDispatchMode):
    """with PeakBytes() as memory: ...; memory.peak is the most bytes that tensors made inside held at one time."""

    def __init__(self):
        super().__init__()
        self.held, self.peak, self.seen = 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.seen:
                storage = tensor.untyped_storage()
                self.seen.add(storage._cdata)
                self.held += storage.nbytes()
                self.peak = max(self.peak, self.held)
                weakref.finalize(storage, self.release, storage._cdata, storage.nbytes())
        return result

    def release(self, key, nbytes):
        self.seen.discard(key)
        self.held -= nbytes


# --- transformers -----------------------------------------------------------------------------------------------------


def in_transformers(model, **changes):
    """The transformers model with the configuration and the weights of a model of model.py."""
    transformers = pytest.importorskip('transformers')
    config = convert.config_to_transformers(model.config)
    config.update(changes)
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    theirs.load_state_dict(convert.to_transformers(model.state_dict(), model.config))
    return theirs.eval()


TRANSFORMERS_MODELS = [
    {'arch': 'gpt2', 'norm_eps': 1e-4},
    {'arch': 'gpt2', 'tie_embeddings': False},
    {'arch': 'llama', 'n_kv_head': 2, 'head_dim': 14},
    {'arch': 'llama', 'tie_embeddings': True, 'norm_eps': 1e-4, 'rope_theta': 5e5},
    {'arch': 'llama', 'bias': True, 'n_kv_head': 1},
    {'arch': 'qwen3', 'n_kv_head': 2, 'head_dim': 14},
    {'arch': 'qwen3', 'tie_embeddings': True, 'rope_theta': 5e5},
]


@pytest.mark.parametrize('keys', TRANSFORMERS_MODELS)
def test_logits_and_loss_equal_transformers(keys):
    ours = make_model(**keys)
    randomise(ours)
    theirs, x = in_transformers(ours), make_tokens(3, 24)
    with torch.no_grad():
        expected = theirs(input_ids=x, labels=x)
        assert error(ours(x), expected.logits) <= apart()
        _, ce_sum = ours(x[:, :-1], x[:, 1:])
    assert error(ce_sum / (3 * 23), expected.loss) <= apart()


def test_what_transformers_and_we_do_differently_is_known():
    for keys in TRANSFORMERS_MODELS:
        assert convert.is_in_transformers(ModelConfig(**{**SMALL, **keys}))
    others = [{'arch': 'enoki'}, {'bias': False}, {'head_dim': 8}, {'n_kv_head': 2}]
    for keys in [*others, {'arch': 'qwen3', 'bias': True}, {'arch': 'qwen3', 'attention_gate': True}]:
        assert not convert.is_in_transformers(ModelConfig(**{**SMALL, **keys}))


def test_gpt2_without_biases_is_nanogpt():
    """nanoGPT's model is GPT-2 without biases and with the exact GELU."""
    nanogpt, gpt2 = make_model('gpt2', bias=False), make_model('gpt2')
    randomise(nanogpt)
    with torch.no_grad():
        for parameter in gpt2.parameters():
            parameter.zero_()
    gpt2.load_state_dict(nanogpt.state_dict(), strict=False)
    theirs, x = in_transformers(gpt2, activation_function='gelu'), make_tokens(3, 24)
    with torch.no_grad():
        assert error(nanogpt(x), theirs(input_ids=x).logits) <= apart()


# --- architectures that transformers lacks ----------------------------------------------------------------------------


def reference_logits(model, x):
    """enoki and the gated qwen3 written out plainly, with explicit attention matrices, loops and complex numbers."""
    config = model.config
    H, D, enoki = config.n_head, config.head_dim, config.arch == 'enoki'
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    T = x.shape[1]

    def norm(x, name):
        if enoki:
            return F.layer_norm(x, x.shape[-1:], weights[name], eps=1e-5)
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5) ** -0.5 * weights[name]

    def rope(x):  # (B, T, D) of one head
        frequencies = config.rope_theta ** (-torch.arange(0, D, 2).double() / D)
        turn = torch.polar(torch.ones(T, D // 2).double(), torch.arange(T).double()[:, None] * frequencies)
        if enoki:
            pairs = torch.complex(x[..., 0::2], x[..., 1::2]) * turn
            return torch.stack((pairs.real, pairs.imag), -1).flatten(-2)
        pairs = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * turn
        return torch.cat((pairs.real, pairs.imag), -1)

    h = weights['embed.weight'][x]
    for i in range(config.n_layer):
        block = f'blocks.{i}.'
        qkv = norm(h, block + 'attn_norm.weight') @ weights[block + 'attn.qkv.weight'].T
        q_width = (1 if enoki else 2) * D  # with gates: per head its query, then its gate
        q, k, v = qkv.split((H * q_width, H * D, H * D), dim=-1)
        heads = []
        for head in range(H):
            query = q[..., head * q_width : head * q_width + D]
            key, value = k[..., head * D : (head + 1) * D], v[..., head * D : (head + 1) * D]
            query = rope(norm(query, block + 'attn.q_norm.weight'))
            key = rope(norm(key, block + 'attn.k_norm.weight'))
            scores = query @ key.transpose(-1, -2) / D**0.5
            places = torch.arange(T)
            back = places[:, None] - places
            near = config.window_pattern and config.window_pattern[i] == 'S'  # it has a letter for each layer
            scores = scores.masked_fill((back < 0) | (back >= (config.window_size if near else T)), float('-inf'))
            y = scores.softmax(-1) @ value
            if not enoki:
                y = y * torch.sigmoid(q[..., head * q_width + D : (head + 1) * q_width])
            heads.append(y)
        h = h + torch.cat(heads, -1) @ weights[block + 'attn.proj.weight'].T
        x_mlp = norm(h, block + 'mlp_norm.weight')
        up = x_mlp @ weights[block + 'mlp.up.weight'].T
        inner = F.gelu(up) if enoki else F.silu(x_mlp @ weights[block + 'mlp.gate.weight'].T) * up
        h = h + inner @ weights[block + 'mlp.down.weight'].T
    logits = (norm(h, 'final_norm.weight') @ weights['head.weight'].T)[..., :VOCAB_SIZE]
    cap = config.logit_softcap
    return cap * (logits / cap).tanh() if cap else logits


GATED = {'arch': 'qwen3', 'attention_gate': True, 'head_dim': 14}


@pytest.mark.parametrize('keys', [{'arch': 'enoki'}, GATED, {'arch': 'enoki', **NEAR}, {**GATED, **NEAR}])
def test_enoki_and_the_gated_qwen3_equal_a_plain_reference(keys):
    model = make_model(**keys)
    randomise(model)
    x = make_tokens(2, 24)
    with torch.no_grad():
        assert error(model(x), reference_logits(model, x)) <= apart()


# --- loss -------------------------------------------------------------------------------------------------------------


def reference_loss(hidden, weight, targets, z_loss, cap=None):
    logits = (hidden @ weight.T)[:, :VOCAB_SIZE]
    if cap:
        logits = cap * (logits / cap).tanh()
    ce = F.cross_entropy(logits, targets, ignore_index=-1, reduction='sum')
    return ce + z_loss * (logits.logsumexp(-1) ** 2 * (targets >= 0)).sum(), ce


@pytest.mark.parametrize('tokens_per_chunk', [1, 7, 1000])
@pytest.mark.parametrize('z_loss, cap', [(0.0, None), (0.01, None), (0.01, 4.0)])
@pytest.mark.parametrize('kernel', [cross_entropy, pointwise_cross_entropy])
def test_chunked_loss_and_gradients_equal_a_float64_reference(monkeypatch, tokens_per_chunk, z_loss, cap, kernel):
    check_chunked_loss(monkeypatch, tokens_per_chunk, z_loss, kernel, cap)


@pytest.mark.slow
def test_the_compiled_loss_equals_a_float64_reference(monkeypatch):
    check_chunked_loss(monkeypatch, 7, 0.01, torch.compile(pointwise_cross_entropy, dynamic=False), cap=4.0)


def check_chunked_loss(monkeypatch, tokens_per_chunk, z_loss, kernel, cap):
    kernel = partial(kernel, cap=cap)
    monkeypatch.setitem(LOGITS_BYTES, 'cpu', tokens_per_chunk * 4 * 128)
    generator = torch.Generator().manual_seed(tokens_per_chunk)
    hidden = torch.randn(37, 13, generator=generator, requires_grad=True)
    weight = torch.randn(128, 13, generator=generator, requires_grad=True)
    targets = torch.randint(-1, VOCAB_SIZE, (37,), generator=generator)
    targets[:5] = -1

    loss_sum, ce_sum = ChunkedCrossEntropy.apply(hidden, weight, targets, VOCAB_SIZE, z_loss, True, kernel)
    (loss_sum * 0.25).backward()
    exact_hidden, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    exact_loss, exact_ce = reference_loss(exact_hidden, exact_weight, targets, z_loss, cap)
    (exact_loss * 0.25).backward()
    plain_hidden, plain_weight = (tensor.detach().clone().requires_grad_() for tensor in (hidden, weight))
    plain_loss, plain_ce = reference_loss(plain_hidden, plain_weight, targets, z_loss, cap)
    (plain_loss * 0.25).backward()

    assert loss_sum.dtype == ce_sum.dtype == torch.float32 and not ce_sum.requires_grad
    assert_as_close_to_float64(loss_sum, plain_loss, exact_loss)
    assert_as_close_to_float64(ce_sum, plain_ce, exact_ce)
    assert_as_close_to_float64(hidden.grad, plain_hidden.grad, exact_hidden.grad)
    assert_as_close_to_float64(weight.grad, plain_weight.grad, exact_weight.grad)
    assert weight.grad[VOCAB_SIZE:].abs().max() == 0  # padding learns nothing

    no_gradients = ChunkedCrossEntropy.apply(hidden, weight, targets, VOCAB_SIZE, z_loss, False, kernel)
    assert no_gradients[0] == loss_sum and no_gradients[1] == ce_sum  # to the bit


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('kernel', [cross_entropy, pointwise_cross_entropy])
def test_loss_of_half_precision_hidden_states_reaches_fp32_weights(monkeypatch, dtype, kernel):
    monkeypatch.setitem(LOGITS_BYTES, 'cpu', 8 * 4 * 128)
    hidden = torch.randn(37, 16).to(dtype).requires_grad_()
    weight = torch.randn(128, 16, requires_grad=True)
    targets = torch.randint(VOCAB_SIZE, (37,))
    loss_sum, _ = ChunkedCrossEntropy.apply(hidden, weight, targets, VOCAB_SIZE, 0.0, True, kernel)
    loss_sum.backward()
    assert hidden.grad.dtype == dtype and weight.grad.dtype == torch.float32
    exact = weight.detach().clone().requires_grad_()
    exact_loss, _ = reference_loss(hidden.detach().float(), exact, targets, 0.0)
    exact_loss.backward()
    eps = torch.finfo(dtype).eps  # each logit is rounded by up to half of it
    assert error(loss_sum, exact_loss) <= eps and error(weight.grad, exact.grad) <= 2 * eps


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_on_a_gpu_nothing_is_rounded_while_the_gradient_of_the_head_adds_up_over_chunks(monkeypatch, dtype):
    for device in ('cpu', 'cuda'):
        monkeypatch.setitem(LOGITS_BYTES, device, 8 * 4 * 128)  # 5 chunks
    hidden, targets = torch.randn(37, 16).to(dtype), torch.randint(VOCAB_SIZE, (37,))
    weight = torch.randn(128, 16).to(dtype).float()

    def gradient_of_head(kernel):
        leaf = weight.clone().requires_grad_()
        ChunkedCrossEntropy.apply(hidden, leaf, targets, VOCAB_SIZE, 0.0, True, kernel)[0].backward()
        return leaf.grad

    of_logits = []  # with which the matmuls are exact

    def noting(*args, **kwargs):
        *sums, gradient = pointwise_cross_entropy(*args, **kwargs)
        of_logits.append(gradient.double())
        return *sums, gradient

    on_cpu = gradient_of_head(pointwise_cross_entropy)
    with on_cuda():
        on_gpu = gradient_of_head(noting)
    assert len(of_logits) == 5 and {'mm.dtype', 'addmm.dtype_out'} <= called
    exact = torch.cat(of_logits).T @ hidden.double()
    assert error(on_gpu, exact) <= apart() < torch.finfo(dtype).eps / 8 < error(on_cpu, exact)


@pytest.mark.parametrize('bias', [False, True])
def test_on_a_gpu_the_gradient_of_an_fp32_weight_is_not_rounded_to_half_precision(bias):
    layer, start = model_module.Linear(48, 32, bias=bias), torch.randn(3, 40, 48).bfloat16()
    gradient, found = torch.randn(3, 40, 32).bfloat16(), []
    for context in (contextlib.nullcontext(), on_cuda()):
        x = start.clone().requires_grad_()
        layer.zero_grad()
        with context:
            y = layer(x)
            y.backward(gradient)
        found.append((y, x.grad, layer.weight.grad, layer.bias.grad if bias else y))
    (y, of_x, *of_layer), (other_y, other_of_x, *other_of_layer) = found
    assert torch.equal(y, other_y) and torch.equal(of_x, other_of_x)
    rows = gradient.flatten(0, 1).double()
    exact = [rows.T @ start.flatten(0, 1).double(), rows.sum(0)]
    for on_cpu, on_gpu, wanted in zip(of_layer[: 1 + bias], other_of_layer, exact, strict=False):
        assert on_gpu.dtype == torch.float32 and error(on_gpu, wanted) <= apart() < error(on_cpu, wanted)
    with on_cuda():  # a frozen layer passes the gradient on
        layer.requires_grad_(False)
        x.grad = None
        layer(x).backward(gradient)
    assert torch.equal(x.grad, of_x)


def test_the_gradient_of_the_logits_takes_their_room_in_the_form_that_is_compiled():
    logits, targets = torch.randn(9, 128).bfloat16(), torch.randint(VOCAB_SIZE, (9,))
    (*sums, gradient), other = pointwise_cross_entropy(logits.clone(), targets, VOCAB_SIZE, 0.0, True), logits.clone()
    assert pointwise_cross_entropy(other, targets, VOCAB_SIZE, 0.0, False) == (*sums, None)
    assert torch.equal(other, logits), 'without a gradient they stay'
    assert pointwise_cross_entropy(other, targets, VOCAB_SIZE, 0.0, True)[2] is other and torch.equal(other, gradient)


@pytest.mark.parametrize('arch', ARCHITECTURES)
def test_loss_is_a_sum_over_the_targets_that_are_not_ignored(arch):
    model = make_model(arch, z_loss=1e-3)
    x, y = make_tokens(3, 24), make_tokens(3, 24, seed=1)
    y[0, 3:] = -1
    y[1] = -1
    loss_sum, ce_sum = model(x, y)
    logits = model(x)[y >= 0]
    ce = F.cross_entropy(logits, y[y >= 0], reduction='sum')
    assert error(ce_sum, ce) <= apart()
    assert error(loss_sum, ce + 1e-3 * logits.logsumexp(-1).pow(2).sum()) <= apart()


def test_a_batch_without_targets_has_loss_0_and_gradients_0():
    model = make_model('gpt2')
    loss_sum, ce_sum = model(make_tokens(2, 24), torch.full((2, 24), -1))
    loss_sum.backward()
    assert loss_sum.item() == ce_sum.item() == 0
    assert all(parameter.grad.abs().max() == 0 for parameter in model.parameters())


def test_a_frozen_head_gets_no_gradient_and_the_blocks_the_same():
    x = make_tokens(2, 24)
    free, frozen = make_model('llama'), make_model('llama')
    frozen.head.weight.requires_grad_(False)
    for model in (free, frozen):
        model(x, x)[0].backward()
    assert frozen.head.weight.grad is None
    assert torch.equal(free.blocks[0].mlp.up.weight.grad, frozen.blocks[0].mlp.up.weight.grad)


def test_a_second_backward_is_an_error_and_not_a_wrong_gradient():
    model = make_model('gpt2')
    loss_sum, _ = model(make_tokens(2, 8), make_tokens(2, 8))
    loss_sum.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        (2 * loss_sum).backward()


@pytest.mark.parametrize(
    'tokens, most, expected',
    [
        (16384, 2668, 2048),
        (8192, 8192, 8192),
        (768, 300, 256),
        (1000, 300, 300),
        (37, 7, 7),
        (5, 9, 9),
    ],
)
def test_chunks_are_equal_multiples_of_128_where_the_tokens_allow_it(tokens, most, expected):
    assert loss_module.tokens_per_chunk(tokens, most) == expected


class BytesMoved(TorchDispatchMode):
    """Bytes of all that each operation takes and returns. Views move nothing."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        aliases = [returned.alias_info for returned in function._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if not is_view and function.namespace == 'aten' and 'empty' not in str(function):
            self.bytes += sum(x.nbytes for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor))
        return result


@pytest.mark.slow
def test_compiled_the_loss_moves_at_most_a_fifth_of_the_bytes_per_logit():
    """In bf16, without the matmuls. The compiler counts what its kernels read and write."""
    n, vocab_size = 64, 50304
    logits = torch.randn(n, vocab_size).bfloat16()
    targets = torch.randint(50257, (n,))
    with torch.no_grad():
        with BytesMoved() as eager:
            cross_entropy(logits.clone(), targets, 50257, 1e-4, True)
        before = (eager.bytes - 2 * logits.nbytes) / logits.numel()  # without that clone
        torch._dynamo.reset()
        torch._inductor.metrics.reset()
        torch._logging.set_logs(inductor_metrics=True)  # else nothing is counted
        try:
            with torch._inductor.config.patch(force_disable_caches=True):
                torch.compile(pointwise_cross_entropy, dynamic=False)(logits, targets, 50257, 1e-4, True)
        finally:
            torch._logging.set_logs()
        after = torch._inductor.metrics.num_bytes_accessed / logits.numel()
    print(f'{before:.1f} bytes per logit before, {after:.1f} after')
    assert 6 <= after <= before / 5


@pytest.mark.slow
def test_on_a_gpu_the_compiled_loss_reads_each_logit_twice_and_not_three_times():
    """Inductor's own pass finds the largest of a row and the sum in one loop. (It makes such a loop for Triton alone,
    which the test above cannot count.)"""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes import post_grad
    from torch.fx.experimental.proxy_tensor import make_fx

    post_grad.lazy_init()
    with FakeTensorMode():
        inputs = torch.empty(64, 50304, dtype=torch.bfloat16), torch.empty(64, dtype=torch.int64)
        loss = partial(pointwise_cross_entropy, vocab_size=50257, z_loss=1e-4, with_gradient=True)
        graph = make_fx(loss, decomposition_table=select_decomp_table())(*inputs)
    for node in graph.graph.nodes:
        if isinstance(value := node.meta.get('val'), torch.Tensor):
            value.fake_device = torch.device('cuda', 0)
    assert sum(patterns.apply(graph) for patterns in post_grad.pass_patterns) == 1
    assert any('prepare_softmax_online' in str(node.target) for node in graph.graph.nodes)


def test_full_logits_of_a_large_vocabulary_never_exist():
    n_tokens, vocab_size, n_embd = 2048, 131_072, 16
    hidden = torch.randn(n_tokens, n_embd, requires_grad=True)
    weight = torch.randn(vocab_size, n_embd, requires_grad=True)
    targets = torch.randint(vocab_size, (n_tokens,))
    with PeakBytes() as memory:
        ChunkedCrossEntropy.apply(hidden, weight, targets, vocab_size, 1e-4, True, cross_entropy)[0].backward()
    assert 2**26 < memory.peak < n_tokens * vocab_size * 4 / 4  # more than a chunk, less than a quarter of the logits


# --- dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('arch', ARCHITECTURES)
def test_dropout_acts_on_embeddings_on_attention_and_on_what_each_layer_adds(arch):
    model = make_model(arch, n_embd=64, dropout=0.5)
    randomise(model)
    block, x, seen = model.blocks[0], make_tokens(4, 24), {}
    block.register_forward_pre_hook(lambda module, args: seen.update(embedded=args[0]))
    block.attn.register_forward_hook(lambda module, args, output: seen.update(attended=output))
    block.mlp.register_forward_pre_hook(lambda module, args: seen.update(normed=args[0]))
    block.mlp.register_forward_hook(lambda module, args, output: seen.update(of_mlp=output))
    block.register_forward_hook(lambda module, args, output: seen.update(result=output))

    def zeros(tensor):
        return (tensor.abs() < 1e-5).float().mean().item()

    model(x)
    assert 0.4 < zeros(seen['embedded']) < 0.6
    attended = seen['attended']
    assert not torch.equal(attended, block.attn(block.attn_norm(seen['embedded']))), 'the weights of attention'
    with torch.no_grad():
        block.mlp.down.weight.zero_()  # so that the block adds nothing but attention
        if block.mlp.down.bias is not None:
            block.mlp.down.bias.zero_()
    model(x)
    assert 0.4 < zeros(seen['result'] - seen['embedded']) < 0.6
    randomise(model)
    with torch.no_grad():
        block.attn.proj.weight.zero_()
        if block.attn.proj.bias is not None:
            block.attn.proj.bias.zero_()
    model(x)
    assert 0.4 < zeros(seen['result'] - seen['embedded']) < 0.6
    model.eval()
    assert torch.equal(model(x), model(x)) and zeros(seen['embedded']) < 0.01


# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('arch', ARCHITECTURES)
def test_fp32_masters_and_gathered_bf16_weights_compute_the_same(arch):
    """Under DDP the code gets fp32 weights, under fully_shard the same code gets them in bf16."""
    masters = make_model(arch, torch.bfloat16)
    gathered = make_model(arch, torch.bfloat16).bfloat16()
    x = make_tokens(2, 24)
    losses = [model(x, x)[0] for model in (masters, gathered)]
    assert torch.equal(*losses)
    losses[0].backward()
    assert {parameter.grad.dtype for parameter in masters.parameters()} == {torch.float32}
    assert masters(x).dtype == torch.bfloat16


@pytest.mark.parametrize('arch', ARCHITECTURES)
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision_stays_close_to_fp32(arch, dtype):
    x = make_tokens(2, 24)
    exact, close = make_model(arch), make_model(arch, dtype)
    losses = [model(x, x)[0] for model in (exact, close)]
    for loss in losses:
        loss.backward()
    eps = torch.finfo(dtype).eps  # a loss is a mean over tokens, and a gradient has gone through some ten roundings
    assert error(losses[1], losses[0]) <= eps / 4
    for (name, a), b in zip(exact.named_parameters(), close.parameters(), strict=True):
        assert error(b.grad, a.grad) <= 10 * eps, name


# --- meta device, tying, sharding -------------------------------------------------------------------------------------


def test_models_have_no_buffers_and_stay_tied_after_to_empty():
    assert all(not list(make_model(arch).buffers()) for arch in ARCHITECTURES)
    model = make_model('gpt2')
    assert model.head.weight is model.embed.weight
    assert 'head.weight' not in dict(model.named_parameters())
    assert make_model('gpt2', tie_embeddings=False).head.weight is not model.embed.weight


def test_initial_values_are_a_function_of_seed_and_name():
    model = make_model('enoki')
    weight = model.blocks[1].mlp.up.weight
    name = 'blocks.1.mlp.up.weight'
    assert torch.equal(model.initial_value(name, weight, 0, 'cpu'), weight)
    with torch.device('meta'):
        assert torch.equal(GPT(model.config).initial_value(name, weight, 0, 'cpu'), weight)
    assert not torch.equal(model.initial_value(name, weight, 1, 'cpu'), weight)
    assert not torch.equal(model.initial_value('blocks.0.mlp.up.weight', weight, 0, 'cpu'), weight)


@pytest.mark.parametrize('arch', ARCHITECTURES)
def test_initial_values_have_the_published_sizes(arch):
    model = make_model(arch, n_embd=128, mlp_hidden_dim=512, n_layer=8, bias=True)
    depth = (2 * 8) ** -0.5
    std = {'embed': 0.02, 'head': 0.02, 'qkv': 0.02, 'proj': 0.02 * depth, 'up': 0.02, 'down': 0.02 * depth}
    std.update(gate=0.02, pos_embed=0.02)
    if arch == 'enoki':
        wide, narrow = 128**-0.5, 512**-0.5
        std = {'embed': wide, 'head': wide, 'qkv': wide, 'proj': wide * depth, 'up': wide, 'down': narrow * depth}
    for name, parameter in model.named_parameters():
        module, kind = name.split('.')[-2:]
        if kind == 'bias':
            assert parameter.abs().max() == 0, name
        elif parameter.dim() == 1:
            assert (parameter == 1).all(), name
        else:
            assert parameter.std().item() == pytest.approx(std[module], rel=0.05), name


@pytest.mark.parametrize('arch', ARCHITECTURES)
@pytest.mark.parametrize('parametrization', ['mup', 'completep'])
def test_under_mup_and_completep_hidden_variances_fall_with_the_width_and_others_keep_those_of_the_base(
    arch, parametrization
):
    base = {'parametrization': parametrization, 'base_width': 32}
    base |= {'base_depth': 2} if parametrization == 'completep' else {}
    model = make_model(arch, n_embd=128, mlp_hidden_dim=512, n_layer=8, tie_embeddings=False, **base)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            std = 0.02 if arch != 'enoki' else 512**-0.5 * 2 if 'down' in name else 32**-0.5  # of width 32
            std *= 4**-0.5 if name.startswith('blocks.') else 1
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name


@pytest.mark.parametrize('arch', ARCHITECTURES)
@torch.no_grad()
def test_without_its_multipliers_in_the_weights_instead_a_model_computes_the_same(arch):
    keys = {'n_layer': 3, 'parametrization': 'completep', 'base_width': 16, 'base_depth': 2}
    wide, x = make_model(arch, torch.float64, tie_embeddings=False, **keys).double(), make_tokens(2, 12)
    prompts = x[:, :4].tolist()
    randomise_for(prompts, 6, wide)
    weights, config = convert.without_multipliers(wide.state_dict(), wide.config)
    plain = GPT(config, torch.float64).double()
    plain.load_state_dict(weights)
    assert (config.parametrization, config.ratios) == ('standard', (1, 1))
    for name in ('final_norm.weight', 'blocks.1.attn.proj.weight', 'blocks.2.mlp.down.weight'):
        factor = 40 / 16 if 'norm' in name else 3 / 2
        torch.testing.assert_close(weights[name] * factor, wide.state_dict()[name])
    assert error(plain(x), wide(x)) <= apart()  # RoPE turns in fp32
    assert error(plain(x, x)[1], wide(x, x)[1]) <= apart()
    standard = make_model(arch, torch.float64, tie_embeddings=False, n_layer=3).double()
    standard.load_state_dict(wide.state_dict())
    assert error(standard(x), wide(x)) > 1e-3
    plain_tokens, wide_tokens = (sampling.generate_batch(model, prompts, 6) for model in (plain, wide))
    assert plain_tokens == wide_tokens


# --- activation checkpointing -----------------------------------------------------------------------------------------


def checkpointed_gradients(arch, mode, compiled=False, **changes):
    """Gradients of one step under an activation checkpointing mode, and the peak of its memory."""
    model = make_model(arch, block_size=64, **changes)
    model.checkpoint_activations(mode)
    if compiled:
        torch.compiler.reset()  # else it gives up on code that it has compiled too often
        for block in model.blocks:
            block.forward = torch.compile(block.forward, backend='aot_eager', fullgraph=True)
    torch.manual_seed(0)  # of dropout: what is computed again must draw the same
    with PeakBytes() if not compiled else contextlib.nullcontext() as memory:
        model(make_tokens(4, 64), make_tokens(4, 64, seed=1))[0].backward()
    return [parameter.grad for parameter in model.parameters()], memory and memory.peak


@pytest.mark.parametrize('arch', ARCHITECTURES)
def test_activation_checkpointing_changes_memory_and_no_number(arch):
    expected, peak_of_none = checkpointed_gradients(arch, 'none', n_layer=4, dropout=0.1)
    selective, peak_of_selective = checkpointed_gradients(arch, 'selective', n_layer=4, dropout=0.1)
    full, peak_of_full = checkpointed_gradients(arch, 'full', n_layer=4, dropout=0.1)
    assert peak_of_full < peak_of_selective < peak_of_none
    for gradient, *others in zip(expected, selective, full, strict=True):
        assert all(torch.equal(gradient, other) for other in others)


@pytest.mark.parametrize('mode', ['none', 'selective', 'full'])
@pytest.mark.parametrize('arch', ['gpt2', 'qwen3'])
def test_blocks_compile_without_a_graph_break_under_activation_checkpointing(arch, mode):
    expected, _ = checkpointed_gradients(arch, 'none')
    compiled, _ = checkpointed_gradients(arch, mode, compiled=True)
    assert all(error(ours, theirs) <= apart() for ours, theirs in zip(compiled, expected, strict=True))


@pytest.mark.parametrize('arch', ARCHITECTURES)
def test_selective_checkpointing_computes_neither_matmuls_nor_attention_again(arch):
    """Without dropout, for which a CPU has no fused attention."""
    calls = {}
    for mode in ('none', 'selective', 'full'):
        model = make_model(arch)
        model.checkpoint_activations(mode)
        with MetaOps() as count:
            model(make_tokens(2, 24), make_tokens(2, 24, seed=1))[0].backward()
        calls[mode] = [count.names[operation] for operation in model_module.SAVED_OPS]
    attention = model_module.SAVED_OPS.index('aten._scaled_dot_product_flash_attention_for_cpu.default')
    assert calls['selective'] == calls['none'] and calls['none'][attention] == SMALL['n_layer']
    assert calls['full'][attention] == 2 * SMALL['n_layer']


def test_unknown_activation_checkpointing_is_refused():
    with pytest.raises(ValueError, match='none, full or selective'):
        make_model('gpt2').checkpoint_activations('some')


# --- generation -------------------------------------------------------------------------------------------------------


def continue_without_cache(model, prompt, max_new_tokens):
    tokens = torch.tensor([prompt])
    for _ in range(max_new_tokens):
        tokens = torch.cat((tokens, likeliest(model(tokens)[:, -1:])), dim=1)
    return tokens[0, len(prompt) :].tolist()


GENERATING_MODELS = [{'arch': arch, 'tie_embeddings': False} for arch in ARCHITECTURES] + [
    {'arch': 'qwen3', 'attention_gate': True, 'n_kv_head': 2, 'head_dim': 6},
    {'arch': 'llama', 'n_kv_head': 2, **NEAR},
    {'arch': 'gpt2', **NEAR},
    {'arch': 'llama', 'rotary_share': 0.4},
]
PROMPTS = [[1, 2, 3, 4, 5], [17], [6, 5, 4, 3, 2, 1, 0, 9]]  # 24 is the block_size


@pytest.mark.parametrize('keys', GENERATING_MODELS)
@torch.no_grad()
def test_prompts_of_different_lengths_go_on_as_each_alone_without_a_cache(keys):
    model = make_model(**keys)
    randomise_for(PROMPTS, 16, model)
    expected = [continue_without_cache(model, prompt, 16) for prompt in PROMPTS]
    assert sampling.generate_batch(model, PROMPTS, 16) == expected
    assert [sampling.generate_batch(model, [prompt], 16)[0] for prompt in PROMPTS] == expected  # without a mask
    assert sampling.generate_batch(model, PROMPTS, 16, temperature=0.5, top_k=1) == expected
    assert len(set(sum(expected, []))) > 3  # it says something


@torch.no_grad()
def test_generation_goes_on_from_half_the_context_when_the_cache_is_full():
    model = make_model('gpt2')
    prompts = [make_tokens(1, 30)[0].tolist(), *PROMPTS]  # more than block_size
    randomise_for(prompts, 30, model)
    found = sampling.generate_batch(model, prompts, 30)
    long = prompts[0] + found[0]
    assert found[0][:1] == continue_without_cache(model, long[6:30], 1)
    assert found[0][1:13] == continue_without_cache(model, long[19:31], 12)
    for prompt, new in zip(prompts[1:], found[1:], strict=True):  # each prompt has a context of its own
        full = 25 - len(prompt)
        assert new[:full] == continue_without_cache(model, prompt, full)
        tokens = prompt + new
        assert new[full:] == continue_without_cache(model, tokens[13:25], 13)[: 30 - full]


def test_random_draws_of_a_row_do_not_depend_on_its_neighbors_and_the_mode_is_left_alone():
    model = make_model('llama', dropout=0.5).train()
    randomise(model)

    def drawn(prompts, seeds):
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        return sampling.generate_batch(model, prompts, 20, temperature=1.0, generators=generators)

    together = drawn(PROMPTS, (1, 2, 3))
    assert together == [*drawn(PROMPTS[:1], (1,)), *drawn(PROMPTS[1:2], (2,)), *drawn(PROMPTS[2:], (3,))]
    assert together != drawn(PROMPTS, (4, 5, 6)) and model.training
    sampling.generate_batch(model.eval(), PROMPTS, 1)
    assert not model.training


def test_padding_of_the_vocabulary_is_never_generated():
    model = make_model('enoki')
    with torch.no_grad():
        model.head.weight[VOCAB_SIZE:] = 1000 * model.head.weight[0]
    assert model(make_tokens(2, 8)).shape == (2, 8, VOCAB_SIZE)
    found = sampling.generate_batch(model, make_tokens(8, 1).tolist(), 100, temperature=5.0)
    assert max(map(max, found)) < VOCAB_SIZE


def test_rows_end_each_for_itself_and_leave_the_batch():
    model, sizes = make_model('gpt2'), []
    randomise_for(PROMPTS, 15, model)
    model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    free = sampling.generate_batch(model, PROMPTS, 15)
    token = free[0][4]
    at = [new.index(token) if token in new else 15 for new in free]
    sizes.clear()
    assert sampling.generate_batch(model, PROMPTS, 15, [token]) == [new[:n] for new, n in zip(free, at, strict=True)]
    assert sizes == [sum(n >= step for n in at) for step in range(min(15, max(at) + 1))]
    halved = sampling.generate_batch(model, PROMPTS, 15, stop=lambda new: new[-1] == token)
    assert halved == [new[: n + 1] for new, n in zip(free, at, strict=True)]  # with what made it stop
    first = sampling.generate_batch(model, PROMPTS, 1, first=[None, [7], [8, 9]])
    assert first[0] == free[0][:1] and first[1] == [7] and first[2][0] in (8, 9)
    assert sampling.generate_batch(model, PROMPTS, 0) == [[], [], []]
    with pytest.raises(ValueError, match='an empty prompt'):
        sampling.generate_batch(model, [[1], []], 5)


def test_top_k_and_top_p_cut_the_distribution_where_they_say():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().repeat(4000, 1)
    uniform = (torch.arange(4000) + 0.5) / 4000

    def frequencies(**options):
        drawn = sampling.sample_token(logits, uniform=uniform, **options)
        return torch.bincount(drawn[:, 0], minlength=4) / 4000

    close = {'atol': 1 / 4000, 'rtol': 0}  # where a border falls between two draws
    torch.testing.assert_close(frequencies(), torch.tensor([0.1, 0.4, 0.2, 0.3]), **close)
    torch.testing.assert_close(frequencies(temperature=0.5), torch.tensor([1, 16, 4, 9]) / 30, **close)
    torch.testing.assert_close(frequencies(top_k=2), torch.tensor([0, 4 / 7, 0, 3 / 7]), **close)
    torch.testing.assert_close(frequencies(top_p=0.75), torch.tensor([0, 4 / 9, 2 / 9, 3 / 9]), **close)
    torch.testing.assert_close(frequencies(top_p=1e-6), torch.tensor([0.0, 1, 0, 0]))
    # The two likeliest have 4/7 and 3/7, so the first alone has more than top_p = 0.5; among all four it has only 0.4.
    torch.testing.assert_close(frequencies(top_k=2, top_p=0.5), torch.tensor([0.0, 1, 0, 0]))
    torch.testing.assert_close(frequencies(top_k=99, top_p=1.0), torch.tensor([0.1, 0.4, 0.2, 0.3]), **close)


# --- several documents in a row ---------------------------------------------------------------------------------------

LENGTHS = [[5, 12, 1, 6], [24], [1, 20, 3]]  # of the documents of three rows
STARTS = torch.tensor([[0, 5, 17, 18], [0, 24, 24, 24], [0, 1, 21, 24]])


SHAPES = {arch: {'arch': arch} for arch in ARCHITECTURES}
SHAPES |= {'gated': {'arch': 'qwen3', 'attention_gate': True}, 'windows': {'arch': 'llama', **NEAR, 'window_size': 9}}
SHAPES |= {'rotated in part': {'arch': 'qwen3', 'rotary_share': 0.4}}


@pytest.mark.parametrize('shape', SHAPES)
def test_a_document_in_a_row_of_several_computes_what_it_does_alone(shape):
    model = make_model(**SHAPES[shape], n_kv_head=2)
    randomise(model)
    x = make_tokens(3, 24)
    alone = [torch.cat([model(part[None])[0] for part in row.split(of)]) for row, of in zip(x, LENGTHS, strict=True)]
    packed = model(x, starts=STARTS)
    assert error(packed, torch.stack(alone)) <= apart()
    x[0, 7] = (x[0, 7] + 1) % VOCAB_SIZE  # in the second document
    moved = (model(x, starts=STARTS) != packed).any(-1)  # (B, T)
    assert moved[0, 7:17].all() and moved.sum() == 10
    model.checkpoint_activations('full')
    losses = []
    for _ in range(2):
        losses.append(model(x, x, STARTS)[0])
        losses[-1].backward()
        model.checkpoint_activations('none')
    assert losses[0] == losses[1]


@pytest.mark.parametrize('heads, window', [(4, None), (2, None), (2, 3)])
def test_the_borders_for_a_gpu_say_what_the_mask_says(heads, window):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, n, 24, 8, generator=generator).bfloat16() for n in (4, heads, heads))
    by_mask = attention_of_documents(STARTS, 24, torch.bfloat16, dropout=0.0, head_dim=8)
    positions, mask = by_mask.positions, by_mask.mask
    with on_cuda():
        attention = attention_of_documents(STARTS, 24, torch.bfloat16, dropout=0.0, head_dim=8)
        found = attention.attend(q, k, v, window=window)
    assert isinstance(attention, PackedAttention) and torch.equal(attention.positions, positions)
    assert positions[0].tolist() == [*range(5), *range(12), 0, *range(6)] and positions[1].tolist() == [*range(24)]
    mask = mask if window is None else mask.triu(1 - window)
    options = {'attn_mask': mask, 'enable_gqa': heads < 4}
    one = F.scaled_dot_product_attention(q, k, v, **options)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), **options)
    assert_as_close_to_float64(found, one, exact)


@pytest.mark.parametrize(
    'dtype, dropout, head_dim',
    [(torch.float32, 0.0, 8), (torch.bfloat16, 0.1, 8), (torch.bfloat16, 0.0, 10), (torch.float16, 0.0, 264)],
)
def test_what_the_kernel_for_documents_does_not_take_gets_a_mask(dtype, dropout, head_dim):
    with on_cuda():
        attention = attention_of_documents(STARTS, 24, dtype, dropout, head_dim)
    assert isinstance(attention, MaskedAttention)


def test_a_card_before_ampere_gets_a_mask(monkeypatch):
    with on_cuda():
        monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: (7, 5))
        attention = attention_of_documents(STARTS, 24, torch.float16, 0.0, 8)
    assert isinstance(attention, MaskedAttention)


def test_on_a_gpu_documents_in_half_precision_need_no_mask():
    """On the device 'meta', where the code does the same as on a GPU. With dropout, and in fp32, there is a mask."""
    for dtype, dropout, kernel in (
        (torch.bfloat16, 0.0, True),
        (torch.float32, 0.0, False),
        (torch.bfloat16, 0.1, False),
    ):
        config = ModelConfig(arch='llama', **SMALL, n_kv_head=2, head_dim=8, dropout=dropout)
        with torch.device('meta'):
            model = GPT(config, dtype)
            model.checkpoint_activations('selective')
            tokens, starts = torch.zeros(3, 24, dtype=torch.long), torch.zeros(3, 4, dtype=torch.long)
        with MetaOps() as ops:
            model(tokens, tokens, starts)[0].backward()
        assert ('torch_attn._varlen_attn.default' in ops.names) == kernel
        assert ops.names['torch_attn._varlen_attn.default'] in (0, config.n_layer)  # kept, not computed again
        assert (3 * 24 * 24 in ops.sizes_of_masks) != kernel
        with torch.device('meta'):
            near = GPT(replace(config, window_pattern='SL', window_size=5), dtype)
        with MetaOps() as ops:
            near(tokens, tokens)[0].backward()
        assert ops.names['torch_attn._varlen_attn.default'] == (config.n_layer if kernel else 0)
        assert (24 * 24 in ops.sizes_of_masks) != kernel


# --- counts and configuration -----------------------------------------------------------------------------------------


@pytest.mark.parametrize('arch', ARCHITECTURES)
@pytest.mark.parametrize('tied', [False, True])
def test_counts_of_parameters_and_flops_are_exact(arch, tied):
    model = make_model(arch, n_head=6, n_kv_head=2, head_dim=8, tie_embeddings=tied, bias=False)
    gelu, rows, C = arch in ('gpt2', 'enoki'), 128, 40
    qk_norms = 2 * 8 if arch in ('enoki', 'qwen3') else 0
    block = (6 + 2 + 2) * 8 * C + 6 * 8 * C + (2 if gelu else 3) * C * 56 + 2 * C + qk_norms
    embedding = rows * C + (24 * C if arch == 'gpt2' else 0)
    non_embedding = 2 * block + C + (0 if tied else rows * C)
    counts = model.parameter_counts()
    assert (counts['embedding'], counts['total']) == (embedding, embedding + non_embedding)
    assert counts['trainable'] == counts['total'] and counts['head'] == (0 if tied else rows * C)
    assert counts['norms'] == 2 * (2 * C + qk_norms) + C and 'other' not in counts
    with_head = 2 * block + C + rows * C
    assert model.flops_per_token() == 6 * with_head + 12 * 2 * (6 * 8) * 24
    near = GPT(replace(model.config, window_pattern='SSL', window_size=5))  # both of the layers
    assert near.flops_per_token() == 6 * with_head + 12 * 2 * (6 * 8) * 5


@pytest.mark.parametrize('shape', [*ARCHITECTURES, 'gated'])
@pytest.mark.parametrize('kv_heads', [4, 2])
def test_flops_are_those_that_pytorch_counts(shape, kv_heads):
    """PyTorch counts op by op, with all of attention. The formula counts norms and biases like matrices, which is 0.1%
    for GPT-2."""
    gated = {'arch': 'qwen3', 'attention_gate': True} if shape == 'gated' else {'arch': shape}
    with torch.device('meta'):
        model = GPT(ModelConfig(**{**SMALL, 'n_layer': 3, 'n_kv_head': kv_heads, **gated}))
        tokens = torch.zeros(2, model.config.block_size, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens)[0].backward()
    in_vectors = 6 * sum(parameter.numel() for parameter in model.parameters() if parameter.dim() < 2)
    assert counter.get_total_flops() == tokens.numel() * (model.flops_per_token() - in_vectors)


def test_configuration_is_filled_in_from_the_architecture():
    gpt2 = ModelConfig.from_keys({'arch': 'gpt2', 'vocab_size': 50257, 'bias': None, 'learning_rate': 1.0})
    assert (gpt2.bias, gpt2.tie_embeddings, gpt2.head_dim, gpt2.mlp_hidden_dim) == (True, True, 64, 3072)
    assert gpt2.padded_vocab_size == 50304 and gpt2.n_kv_head == 12
    qwen3 = ModelConfig(arch='qwen3', n_embd=1000, n_head=8, head_dim=128, vocab_size=64)
    assert (qwen3.bias, qwen3.tie_embeddings, qwen3.rope_theta, qwen3.norm_eps) == (False, False, 1e6, 1e-6)
    assert qwen3.mlp_hidden_dim == 2688 and qwen3.padded_vocab_size == 64
    assert ModelConfig(**qwen3.to_dict()) == qwen3


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'arch': 'bert'}, "arch='bert': .*gpt2, enoki, llama, qwen3"),
        ({'n_head': 3}, 'n_embd=40 .*n_head=3'),
        ({'n_kv_head': 3}, 'n_head=4 .*n_kv_head=3'),
        ({'n_layer': 0}, 'n_layer=0: .*1'),
        ({'vocab_size': None}, 'vocab_size=None'),
        ({'arch': 'llama', 'head_dim': 7}, 'head_dim=7: .*even'),
        ({'arch': 'qwen3', 'rotary_share': 0.5}, 'head_dim=10 with rotary_share=0.5, so 5 of them: .*even'),
        ({'arch': 'qwen3', 'rotary_share': 1.2}, 'head_dim=10 with rotary_share=1.2, so 12 of them: .*even'),
        ({'attention_gate': True}, 'only qwen3'),
        ({'window_pattern': 'SGL', 'window_size': 8}, 'window_pattern=SGL: .*S .*L .*SSSL'),
        ({'window_pattern': ''}, 'window_pattern=: .*SSSL'),
        ({'window_pattern': 'SL'}, 'window_pattern=SL: .*--window_size=12'),
        ({'window_size': 8}, 'window_size=8 with window_pattern=None.*leave window_size out'),
        ({'window_pattern': 'L', 'window_size': 8}, 'window_size=8 with window_pattern=L'),
        ({'window_pattern': 'SL', 'window_size': 24}, 'window_size=24 with block_size=24: expected 1 to 23, '),
        ({'parametrization': 'mup'}, "base_width=None with parametrization='mup': .*n_embd"),
        ({'base_width': 20}, "base_width=20 with parametrization='standard': .*--parametrization=mup"),
        ({'parametrization': 'mup', 'base_width': 20, 'base_depth': 1}, 'base_depth=1 .*n_layer'),
        ({'parametrization': 'completep', 'base_width': 20, 'base_depth': 0}, 'base_depth=0: .*1'),
    ],
)
def test_impossible_configurations_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        ModelConfig(**{**SMALL, **changes})
    assert '\n' not in str(error.value)


def test_more_tokens_than_block_size_are_refused():
    model = make_model('gpt2')
    with pytest.raises(ValueError, match='25 tokens .*block_size=24'):
        model(make_tokens(1, 25))


class RefuseAddmmOnMeta(TorchDispatchMode):
    """torch 2.11, whose decomposition of addmm takes out_dtype for beta (pytorch/pytorch#179634)."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.addmm.dtype_out and args[0].is_meta:
            raise TypeError('unsupported operand type(s) for *')
        return function(*args, **(kwargs or {}))


def test_a_plan_of_a_loss_in_several_chunks_needs_no_addmm_that_torch_2_11_has_only_on_a_gpu(monkeypatch):
    monkeypatch.setitem(LOGITS_BYTES, 'cuda', 4 * 64 * 128)  # 128 tokens of 64 logits
    hidden, weight = (torch.randn(rows, 16, device='meta', requires_grad=True) for rows in (256, 64))
    targets = torch.zeros(256, dtype=torch.int64, device='meta')
    with RefuseAddmmOnMeta():
        loss, _ = ChunkedCrossEntropy.apply(hidden.bfloat16(), weight, targets, 64, 0.0, True, cross_entropy)
        loss.backward()
    assert weight.grad.dtype == torch.float32 and weight.grad.shape == weight.shape


@pytest.mark.parametrize('is_frozen', [False, True])
def test_on_a_gpu_chunks_of_the_loss_are_large_only_where_the_head_has_a_gradient(is_frozen):
    tokens, vocab_size, sizes = 8192, 128256, []
    hidden = torch.empty(tokens, 16, device='meta', dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(vocab_size, 16, device='meta', requires_grad=not is_frozen)

    def noted(logits, *others, **options):
        sizes.append(logits.shape[0])
        return cross_entropy(logits, *others, **options)

    ChunkedCrossEntropy.apply(
        hidden, weight, torch.zeros(tokens, dtype=torch.int64, device='meta'), vocab_size, 0.0, True, noted
    )
    assert sizes == ([1024] * 8 if is_frozen else [4096] * 2)  # at most 2**29 or 2**31 bytes of fp32 logits
