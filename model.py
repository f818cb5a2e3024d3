"""
The transformer: four architectures, and exact counts of parameters and FLOPs.

    model = GPT(ModelConfig.from_keys(config), compute_dtype=torch.bfloat16)
    loss_sum, ce_sum = model(x, y)  # sums over the tokens whose target is not -1
    logits = model(x)  # (B, T, vocab_size)
    loss_sum, ce_sum = model(x, y, starts)  # several documents in each row, none of which sees another

              norm        positions                  q/k norm    MLP                 defaults
    gpt2      LayerNorm   learned                    -           GELU (tanh)         biases, tied embeddings
    enoki     LayerNorm   RoPE, interleaved pairs    LayerNorm   GELU (erf)          (arXiv 2602.05298)
    llama     RMSNorm     RoPE, half rotation        -           SwiGLU
    qwen3     RMSNorm     RoPE, half rotation        RMSNorm     SwiGLU

gpt2, llama and qwen3 compute the same as the models of that name in `transformers`: huggingface/convert.py converts
weights, and huggingface/native.py starts a run from those of a Hugging Face folder. gpt2 with bias=False is nanoGPT's
model instead, with GELU (erf), which takes a CPU half the time of tanh.

Dtypes: weights keep the dtype in which they are stored (fp32 masters) and are cast to compute_dtype where they are
used. So the same operations run under DDP, where weights are fp32, and under fully_shard, which gathers them in bf16
and so makes the cast free. Nothing here knows how the model is sharded. Only the routers of a mixture of experts
(n_experts, in llama and qwen3) have buffers. to_empty() would leave garbage in these, so GPT._apply() resets them.

Letters for shapes: B sequences, T tokens, C = n_embd, H = n_head, K = n_kv_head, D = head_dim, N = B*T, V = vocabulary.
"""

import hashlib
import math
from dataclasses import asdict, dataclass, fields, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from attention import KVCache, MaskedAttention, attention_of_documents, attention_of_rows
from loss import ChunkedCrossEntropy, LogitsOf, add_product, cross_entropy, loss_of_routers, softcapped

ARCHITECTURES = ('gpt2', 'enoki', 'llama', 'qwen3')
LLAMA_STYLE = ('llama', 'qwen3')  # RMSNorm and SwiGLU

# A parameter counts for the first of these parts that has a word which its name contains, here or in transformers.
PARTS = {'norms': ('norm', 'ln_'), 'embedding': ('embed', 'wte', 'wpe'), 'attention': ('attn', 'attention')}
PARTS |= {'mlp': ('mlp',), 'head': ('head',)}

# Selective activation checkpointing keeps the results of these operations, which are expensive to compute again. Who
# divides the work over ranks adds collectives of its own.
ATTENTIONS = ('flash_attention', 'flash_attention_for_cpu', 'efficient_attention', 'cudnn_attention')
SAVED_OPS = ['aten.mm.default', 'aten.addmm.default', 'aten._scaled_mm.default', 'aten._grouped_mm.default']
SAVED_OPS += ['torch_attn._varlen_attn.default']
SAVED_OPS += [f'aten._scaled_dot_product_{attention}.default' for attention in ATTENTIONS]


# --- configuration ----------------------------------------------------------------------------------------------------


@dataclass
class ModelConfig:
    """The shape of a model. What is None gets the architecture's value. Raises ValueError if the sizes do not fit."""

    arch: str = 'gpt2'
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int | None = None  # grouped-query attention if less than n_head
    head_dim: int | None = None
    n_embd: int = 768
    mlp_hidden_dim: int | None = None
    n_experts: int = 0  # 0: one MLP in each block, which computes all tokens
    dense_layers: int = 0  # the first blocks of a mixture, which keep the MLP
    experts_per_token: int = 2
    expert_hidden_dim: int | None = None
    expert_groups: int = 1  # a token first chooses groups of neighboring experts, see experts.Router.ranked()
    groups_per_token: int = 1
    shared_expert_dim: int = 0  # width of an MLP for all tokens beside the experts; 0: none
    shared_expert_gate: bool = False
    router_scores: str = 'softmax'  # or 'sigmoid', see experts.Router
    router_normalize: bool = True
    router_scale: float = 1.0
    router_aux: float = 0.001  # see experts.Balance.loss_sum()
    router_z: float = 0.0
    router_bias: float = 0.0  # see optim.balance_experts()
    vocab_size: int | None = None
    block_size: int = 1024
    dropout: float = 0.0
    bias: bool | None = None
    qkv_bias: bool = False  # biases for queries, keys and values although `bias` is False: Qwen2
    tie_embeddings: bool | None = None
    rope_theta: float | None = None
    rotary_share: float = 1.0  # of each head's dimensions: the first ones rotate, the others stay (GLM-4.5: 0.5)
    yarn: list | None = None  # [factor, block_size before]: the context is extended by this factor, see check_yarn()
    llama3_rope: list | None = None  # Llama 3.1 and later: [factor, low, high, tokens before], see llama3_frequencies()
    positions: int | None = None  # gpt2: rows of the learned positions, block_size of them or more; None = block_size
    attention_gate: bool = False
    window_pattern: str | None = None  # the layers in turn: S sees window_size tokens, L all before it; None = all L
    window_size: int | None = None  # tokens that a layer S sees, the last of them is the one that looks
    norm_eps: float | None = None
    z_loss: float = 0.0
    logit_softcap: float | None = None  # see softcapped()
    parametrization: str = 'standard'  # or 'mup', 'completep': the table is in optim.py
    base_width: int | None = None
    base_depth: int | None = None

    @classmethod
    def from_keys(cls, config):
        """From a script's config (a dict with further keys in it, which are ignored)."""
        return cls(**{field.name: config[field.name] for field in fields(cls) if field.name in config})

    @classmethod
    def from_json(cls, facts, where):
        """From a dict in a file that somebody else may have written. where: what an error calls it."""
        if unknown := sorted(facts.keys() - {field.name for field in fields(cls)}):
            raise ValueError(f'{where} has {unknown[0][:40]!r}, which no model of this version has: use a newer one')
        try:
            return cls(**facts)
        except ValueError as error:
            raise ValueError(f'{where}: {error}') from None

    def to_dict(self):
        return asdict(self)

    @property
    def ratios(self):
        """(m_N, m_L): how many times as wide and as deep this model is as the one on which the rates were tuned."""
        return self.n_embd / (self.base_width or self.n_embd), self.n_layer / (self.base_depth or self.n_layer)

    @property
    def windows(self):
        """[how many tokens it sees, None = all before it] of each layer."""
        pattern = self.window_pattern or 'L'
        return [{'S': self.window_size, 'L': None}[pattern[n % len(pattern)]] for n in range(self.n_layer)]

    @property
    def padded_vocab_size(self):
        """Rows of the embedding and of the head: a multiple of 64, since matmuls of odd sizes miss the tensor cores."""
        return -(-self.vocab_size // 64) * 64

    @property
    def rotary_dim(self):
        """How many of a head's dimensions rotate."""
        return int(self.head_dim * self.rotary_share)

    @property
    def llama_style(self):
        """RMSNorm and SwiGLU, rather than LayerNorm and GELU."""
        return self.arch in LLAMA_STYLE

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if not is_of_type(value, field.type):
                expected = getattr(field.type, '__name__', field.type)
                raise ValueError(f'{field.name}={str(value)[:40]}: expected {expected}, and no number beyond 2**40')
        if self.arch not in ARCHITECTURES:
            raise ValueError(f'arch={self.arch!r}: expected one of {", ".join(ARCHITECTURES)}')
        sizes = ('n_layer', 'n_head', 'n_kv_head', 'head_dim', 'n_embd', 'mlp_hidden_dim', 'block_size')
        for name in (*sizes, 'base_width', 'base_depth'):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f'{name}={value}: expected 1 or more')
        if self.vocab_size is None or self.vocab_size < 1:
            raise ValueError(f'vocab_size={self.vocab_size}: expected the number of tokens of the tokenizer')

        self.n_kv_head = self.n_kv_head or self.n_head
        if self.n_head % self.n_kv_head:
            raise ValueError(f'n_head={self.n_head} is not a multiple of n_kv_head={self.n_kv_head}')
        if self.head_dim is None and self.n_embd % self.n_head:
            raise ValueError(f'n_embd={self.n_embd} is not a multiple of n_head={self.n_head}: set head_dim')
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        if self.mlp_hidden_dim is None:
            # Three matrices of 8/3 n_embd (to a multiple of 64) have as many weights as two of 4 n_embd.
            self.mlp_hidden_dim = -(-8 * self.n_embd // (3 * 64)) * 64 if self.llama_style else 4 * self.n_embd
        if self.n_experts:
            check_experts(self)
            if self.expert_hidden_dim is None:  # k experts have as many weights as one MLP; multiples of 8 are fast
                self.expert_hidden_dim = max(8, self.mlp_hidden_dim // self.experts_per_token // 8 * 8)
        self.bias = self.arch == 'gpt2' if self.bias is None else self.bias
        self.tie_embeddings = self.arch == 'gpt2' if self.tie_embeddings is None else self.tie_embeddings
        self.yarn, self.llama3_rope = [*(self.yarn or ())], [*(self.llama3_rope or ())]
        self.rope_theta = self.rope_theta or (1e6 if self.arch == 'qwen3' else 1e4)
        self.norm_eps = self.norm_eps or (1e-6 if self.arch == 'qwen3' and not self.attention_gate else 1e-5)

        if self.arch != 'gpt2' and (self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim):
            share = f' with rotary_share={self.rotary_share}, so {self.rotary_dim} of them'
            share = '' if self.rotary_share == 1 else share
            raise ValueError(f'head_dim={self.head_dim}{share}: expected an even number, since RoPE rotates pairs')
        if self.arch == 'gpt2' and self.yarn:
            raise ValueError(f'yarn={self.yarn}: the positions of gpt2 are learned, and those beyond are not')
        check_yarn(self.yarn, self.block_size)
        check_windows(self.window_pattern, self.window_size, self.block_size)
        if self.attention_gate and self.arch != 'qwen3':
            raise ValueError(f'attention_gate=True with arch={self.arch!r}: only qwen3 has it')
        for name, users in (('base_width', ('mup', 'completep')), ('base_depth', ('completep',))):
            if (self.parametrization in users) != (getattr(self, name) is not None):
                given = f'{name}={getattr(self, name)} with parametrization={self.parametrization!r}'
                where = f'where the learning rate was tuned (--parametrization={" or ".join(users)}), else None'
                raise ValueError(f'{given}: expected the {"n_embd" if name == "base_width" else "n_layer"} {where}')


def is_of_type(value, kind):
    """Whether a value has one of the types of a field of ModelConfig, such as int | None, and is no absurd number."""
    if isinstance(value, bool):
        return kind in (bool, bool | None)
    if isinstance(value, list | tuple):
        return kind == list | None and all(is_of_type(element, float) for element in value)
    if isinstance(value, int | float) and not abs(value) <= 2**40:  # nan is not, either
        return False
    return isinstance(value, kind) or (isinstance(value, int) and isinstance(1.0, kind))


def check_experts(config):
    """Raise ValueError if the settings of a mixture of experts do not fit together."""
    n, k = config.n_experts, config.experts_per_token
    given, or_dense = f'n_experts={n}', 'or --n_experts=0'
    if not config.llama_style:
        raise ValueError(f'{given} with arch={config.arch}: llama and qwen3 have experts: use --arch=qwen3, {or_dense}')
    if not 1 <= k <= n:
        raise ValueError(f'{given} with experts_per_token={k}: expected 1 to {n} of them for each token')
    groups, few = config.expert_groups, config.groups_per_token
    if groups != 1 and not (0 < groups <= n // 2 and n % groups == 0):  # the best two of a group count
        fits = [1, *(number for number in range(2, min(n // 2, 256) + 1) if n % number == 0)]
        raise ValueError(f'{given} with expert_groups={groups}: use one of {", ".join(map(str, fits))}')
    if not (fewest := math.ceil(k * groups / n)) <= few <= groups:
        of = f'expert_groups={groups}, of {n // groups} experts each, and experts_per_token={k}'
        raise ValueError(f'groups_per_token={few} with {of}: expected {fewest} to {groups}')
    if not 0 <= config.dense_layers < config.n_layer:
        fits = f'expected 0 to {config.n_layer - 1}, since the blocks after them have the experts'
        raise ValueError(f'dense_layers={config.dense_layers} with n_layer={config.n_layer}: {fits}')
    if config.parametrization != 'standard':
        raise ValueError(
            f'{given} with parametrization={config.parametrization!r}, whose table has no experts: '
            f'use --parametrization=standard, {or_dense}'
        )
    if config.bias:
        raise ValueError(f'{given} with bias=True: experts have none: leave bias out')
    if config.shared_expert_dim < 0:
        raise ValueError(f'shared_expert_dim={config.shared_expert_dim}: expected 0 or more')
    if config.router_scores not in ('softmax', 'sigmoid'):
        raise ValueError(f'router_scores={config.router_scores!r}: expected softmax or sigmoid')


def check_yarn(yarn, block_size):
    """Raise ValueError unless yarn, [factor, block_size at which the model was trained before], reaches block_size.

    [] is off. The factor is block_size / the one before, or more if the model is to read longer texts later, since the
    rotation depends on the factor.
    """
    are_numbers = all(isinstance(number, int | float) for number in yarn)
    if yarn and not (len(yarn) == 2 and are_numbers and yarn[0] >= 1 and yarn[1] >= 1):
        given = f'yarn={",".join(map(str, yarn))}'
        raise ValueError(f'{given}: expected a factor of 1 or more and the block_size before, as --yarn=4,1024')
    if yarn and block_size > yarn[0] * yarn[1]:
        reach, needed = int(yarn[0] * yarn[1]), math.ceil(block_size / yarn[1])
        given = f'block_size={block_size} with yarn={yarn[0]:g},{yarn[1]}'
        raise ValueError(f'{given}, which reaches {reach}: use --yarn={needed},{yarn[1]} or --block_size={reach}')


def check_windows(pattern, size, block_size):
    """Raise ValueError unless window_pattern and window_size say how many tokens each layer sees."""
    given, half = f'window_pattern={pattern}', max(1, block_size // 2)
    if pattern is not None and not (pattern and {*pattern} <= {*'SL'}):
        raise ValueError(
            f'{given}: expected S (sees window_size tokens) and L (all before it) for the layers in turn: SSSL'
        )
    has_window = 'S' in (pattern or '')
    if has_window and size is None:
        raise ValueError(f'{given}: how many tokens do its layers S see? Give a window_size, as --window_size={half}')
    if size is not None and not has_window:
        raise ValueError(
            f'window_size={size} with {given}, in which no layer has it: use SSSL, or leave window_size out'
        )
    if has_window and not 1 <= size < block_size:
        wanted = f'1 to {block_size - 1}, as --window_size={half}; or leave window_pattern and window_size out'
        raise ValueError(f'window_size={size} with block_size={block_size}: expected {wanted}')


# --- layers -----------------------------------------------------------------------------------------------------------


class LinearOfMaster(torch.autograd.Function):
    """F.linear() in half precision for a weight in fp32, whose gradient leaves its matmul in fp32. Autograd's own is
    rounded to the dtype of x, and cast back in one more pass. Only for GPUs, see add_product()."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        weight = weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)  # (N, out)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            gradient @ weight if needs_x else None,
            add_product(None, rows.T, x.flatten(0, -2)) if needs_weight else None,
            rows.sum(0, dtype=torch.float32) if needs_bias else None,
        )


def linear(x, weight, bias=None):
    """F.linear in the dtype of x."""
    if x.device.type in ('cuda', 'meta') and x.dtype != weight.dtype == torch.float32:
        return LinearOfMaster.apply(x, weight, bias)
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class Linear(nn.Linear):
    """nn.Linear that computes in the dtype of its input, or in 8 bits, see float8.py."""

    matmul = staticmethod(linear)

    def forward(self, x):
        return self.matmul(x, self.weight, self.bias)


class Norm(nn.Module):
    """LayerNorm or RMSNorm. It returns the dtype of its input; the kernels compute in fp32."""

    def __init__(self, config, dim):
        super().__init__()
        self.rms, self.eps = config.llama_style, config.norm_eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if config.bias and not self.rms else None

    def forward(self, x):
        weight = self.weight.to(x.dtype)
        if self.rms:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


class RotaryEmbedding:
    """Rotary position embedding (RoPE; Su et al., arXiv 2104.09864), in fp32.

    Pair i of a head's D dimensions turns by the angle position * theta^(-2i/D). The pairs are (x[2i], x[2i+1]) in enoki
    (interleaved, as in the paper) and (x[i], x[i + D/2]) in the others (half rotation, as in transformers).
    To extend the context, a larger theta makes all pairs turn more slowly, and YaRN some, see yarn_frequencies().
    This is not a module, because its table is not a buffer: it is computed at the first use on a device.
    """

    def __init__(self, config):
        self.dim = config.rotary_dim  # D in here: a head's other dimensions stay as they are
        self.theta, self.block_size = config.rope_theta, config.block_size
        self.yarn, self.llama3_rope = config.yarn, config.llama3_rope
        self.pairs, self.pair_dim = ((-1, 2), -1) if config.arch == 'enoki' else ((2, -1), -2)  # D -> D/2 pairs
        self.cos_sin = None  # (2, block_size, D/2)

    def prepare(self, device):
        """Compute the table on `device`, once. It is called outside of the blocks, because these may be compiled."""
        if self.cos_sin is None or self.cos_sin.device != device:
            period = self.theta ** (torch.arange(0, self.dim, 2, device=device).float() / self.dim)
            frequency = 1.0 / period  # (D/2)
            if self.yarn:
                frequency = yarn_frequencies(period, self.theta, *self.yarn)
            elif self.llama3_rope:
                frequency = llama3_frequencies(frequency, *self.llama3_rope)
            angle = torch.outer(torch.arange(self.block_size, device=device).float(), frequency)  # (block_size, D/2)
            self.cos_sin = torch.stack((angle.cos(), angle.sin()))
            if self.yarn:  # queries and keys both grow, scores by the square: more tokens share the softmax
                self.cos_sin *= 0.1 * math.log(self.yarn[0]) + 1

    def rotate(self, x, cos_sin):
        """x: queries or keys (B, T, heads, D). cos_sin: rows of the table for T positions, (2, T, 1, D/2), or those of
        each row of x, (2, B, T, 1, D/2). Returns the shape of x.

        On a GPU tokens lie before heads in memory, too: attention's result then lies as the next layer wants it, and is
        not copied. A CPU attends faster with heads before tokens.
        """
        if x.shape[-1] > self.dim:
            x, rest = x[..., : self.dim], x[..., self.dim :]
            return torch.cat((self.rotate(x, cos_sin), rest), -1)
        if x.is_cpu:
            x, cos_sin = x.transpose(1, 2), cos_sin.transpose(-3, -2)
        cos, sin = cos_sin.unbind()
        a, b = x.float().unflatten(-1, self.pairs).unbind(self.pair_dim)  # (B, T, heads, D/2) each
        rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), self.pair_dim).flatten(-2).to(x.dtype)
        return rotated.transpose(1, 2) if x.is_cpu else rotated


def yarn_frequencies(period, theta, factor, before):
    """Frequencies (D/2) of RoPE for a context of factor * before tokens (YaRN: Peng et al., arXiv 2309.00071).

    period (D/2): 1 / the frequencies without YaRN. before: tokens of the context in which the model was trained.
    A pair that turns 32 times or more within `before` tokens tells near tokens apart, and stays as it is. One that
    turns once or less tells all positions apart: it is slowed to 1/factor, so that the positions beyond look like
    those that the model knows. Between the two the change is gradual.
    """
    pairs = len(period)
    first, last = (pairs * math.log(before / (turns * 2 * math.pi)) / math.log(theta) for turns in (32, 1))
    first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * pairs - 1)
    slowed = (torch.arange(pairs, device=period.device) - first) / max(last - first, 0.001)  # 0 to 1 between the two
    kept = 1 - slowed.clamp(0, 1)
    return 1.0 / (factor * period) * (1 - kept) + 1.0 / period * kept


def llama3_frequencies(frequency, factor, low, high, before):
    """Frequencies (D/2) of RoPE as Llama 3.1 changes them to read more than the `before` tokens of its pretraining.

    As in YaRN above, with other borders: a pair that turns `high` times or more within `before` tokens stays as it is,
    one that turns `low` times or less turns 1/factor as fast, and between the two the change is gradual.
    The source is the model's own code: github.com/meta-llama/llama-models, apply_scaling().
    """
    length = 2 * math.pi / frequency  # tokens of a whole turn
    kept = (before / length - low) / (high - low)  # 0 to 1 between the two
    between = (1 - kept) * frequency / factor + kept * frequency
    far = torch.where(length > before / low, frequency / factor, frequency)
    return torch.where((length < before / high) | (length > before / low), far, between)


class Attention(nn.Module):
    """Causal self-attention with grouped queries, optional norms of q and k, RoPE and output gate."""

    def __init__(self, config, rotary, window=None):
        super().__init__()
        self.window = window  # how many tokens it sees; None: all before
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        self.dropout, self.rotary, self.gated = config.dropout, rotary, config.attention_gate
        # One matrix for queries, keys and values: one matmul forward and two backward instead of three and six.
        q_heads = 2 * self.n_head if self.gated else self.n_head  # per head its D queries, then its D gates
        self.heads_of_qkv = (q_heads, self.n_kv_head, self.n_kv_head)
        self.qkv = Linear(config.n_embd, sum(self.heads_of_qkv) * self.head_dim, bias=config.bias or config.qkv_bias)
        self.proj = Linear(self.n_head * self.head_dim, config.n_embd, bias=config.bias)
        qk_norm = config.arch in ('enoki', 'qwen3')  # one weight (D), shared by the heads
        self.q_norm = Norm(config, self.head_dim) if qk_norm else None
        self.k_norm = Norm(config, self.head_dim) if qk_norm else None

    def forward(self, x, cache=None, attention=None):
        """x (B, T, C) -> (B, T, C); with a cache, x are the tokens that follow those in it."""
        qkv = self.qkv(x)
        if x.device.type == 'cpu':
            qkv = qkv.float()  # bf16 attention is slow on CPUs: fp32 inside bf16 gives 1.4-1.8x
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split(self.heads_of_qkv, dim=2)  # (B, T, heads, D) each
        if self.gated:
            q, gate = q.unflatten(2, (self.n_head, 2)).unbind(3)  # (B, T, H, D) each
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            first = 0 if cache is None else cache.length
            cos_sin = attention.cos_sin if attention else self.rotary.cos_sin[:, first : first + x.shape[1], None]
            q, k = self.rotary.rotate(q, cos_sin), self.rotary.rotate(k, cos_sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, T, D)
        if cache is not None:
            is_masked = attention is not None or cache.length == 0 or x.shape[1] == 1  # none sees a later one
            assert is_masked, f'{x.shape[1]} tokens after {cache.length}: expected 1, or a mask'
            k, v = cache.append(k, v)
        dropout = self.dropout if self.training else 0.0
        if attention is not None:
            y = attention.attend(q, k, v, dropout, window=self.window)
        else:
            options = {'dropout_p': dropout, 'enable_gqa': self.n_kv_head < self.n_head}
            if self.window is not None:  # a single token: several come with an attention, see GPT.places()
                assert x.shape[1] == 1, f'{x.shape[1]} tokens with window={self.window}: expected 1, or an attention'
                k, v = k[:, :, -self.window :], v[:, :, -self.window :]
            elif x.shape[1] > 1:  # a single token looks at all before it
                options['is_causal'] = True  # the comparison itself is no bool for the compiler where T varies
            y = F.scaled_dot_product_attention(q, k, v, **options)
        y = y.transpose(1, 2)  # (B, T, H, D)
        if self.gated:
            y = y * torch.sigmoid(gate)
        return self.proj(y.flatten(2).to(x.dtype))


class MLP(nn.Module):
    """Two matrices with GELU between them, or three with a SiLU gate (SwiGLU; Shazeer, arXiv 2002.05202)."""

    def __init__(self, config, hidden_dim=None):
        super().__init__()
        hidden_dim = hidden_dim or config.mlp_hidden_dim
        self.up = Linear(config.n_embd, hidden_dim, bias=config.bias)
        self.gate = Linear(config.n_embd, hidden_dim, bias=config.bias) if config.llama_style else None
        self.down = Linear(hidden_dim, config.n_embd, bias=config.bias)
        self.approximate = 'tanh' if config.arch == 'gpt2' and config.bias else 'none'

    def forward(self, x):
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class SharedExpert(MLP):
    """The expert of a mixture that computes every token. With a gate, each token says how much of it counts."""

    def __init__(self, config):
        super().__init__(config, config.shared_expert_dim)
        self.score = Score(config.n_embd, 1, bias=False) if config.shared_expert_gate else None

    def forward(self, x):
        y = super().forward(x)
        return y if self.score is None else y * torch.sigmoid(self.score(x))


class Score(nn.Linear):
    """A number for each token, (..., C) -> (..., 1). Unlike a Linear it never multiplies in 8 bits."""

    def forward(self, x):
        return linear(x, self.weight)


class Block(nn.Module):
    """Pre-norm transformer block: the unit that is compiled, checkpointed and sharded."""

    def __init__(self, config, rotary, number=0):
        super().__init__()
        self.attn_norm = Norm(config, config.n_embd)
        self.attn = Attention(config, rotary, config.windows[number])
        self.mlp_norm = Norm(config, config.n_embd)
        self.is_mixture = config.n_experts > 0 and number >= config.dense_layers
        if self.is_mixture:
            from experts import MoE  # here, since other models need nothing of it

            self.mlp = MoE(config, SharedExpert(config) if config.shared_expert_dim else None)
        else:
            self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)
        self.branch_scale = 1 / config.ratios[1]
        self.activation_checkpointing = 'none'

    def forward(self, x, cache=None, attention=None):
        """x (B, T, C) -> (B, T, C); in a mixture also (chosen, logits) of the router."""
        if self.activation_checkpointing == 'none' or cache is not None:
            return self.add_attention_and_mlp(x, cache, attention)
        options = {'mode': self.activation_checkpointing, 'noise': self.drop.p > 0}
        choice = None if torch.compiler.is_compiling() else []  # from the first forward to the second
        return recomputed(self.add_attention_and_mlp, x, None, attention, choice, **options)

    def add_attention_and_mlp(self, x, cache, attention, choice=None):
        x = x.add(self.drop(self.attn(self.attn_norm(x), cache, attention)), alpha=self.branch_scale)
        if not self.is_mixture:
            return x.add(self.drop(self.mlp(self.mlp_norm(x))), alpha=self.branch_scale)
        y, routing = self.mlp(self.mlp_norm(x), choice)
        return x.add(self.drop(y), alpha=self.branch_scale), routing


def recomputed(forward, *args, mode, noise, **kwargs):
    """A block's forward(*args, **kwargs), of which little is kept; backward computes the rest again.

    mode: 'full' keeps only the inputs, 'selective' also the results of SAVED_OPS. noise: whether forward draws random
    numbers, which the second forward then has to repeat.
    """
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    options = {'use_reentrant': False, 'preserve_rng_state': noise}
    if mode == 'selective':
        options['context_fn'] = partial(create_selective_checkpoint_contexts, keep_saved_ops)
    return checkpoint(forward, *args, **options, **kwargs)


def keep_saved_ops(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if str(op) in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE


class Head(Linear):
    """From hidden states to logits, or to the loss. The rows of its weight are the tokens of the vocabulary."""

    def __init__(self, config):
        super().__init__(config.n_embd, config.padded_vocab_size, bias=False)
        self.vocab_size, self.z_loss, self.cap = config.vocab_size, config.z_loss, config.logit_softcap

    def whole(self):
        """The weight (V, C), also where this rank has only a part of it."""
        return self.weight

    def forward(self, h):
        """Logits (..., vocab_size) of hidden states (..., C)."""
        return softcapped(linear(h, self.whole())[..., : self.vocab_size], self.cap)

    def by_rows(self, dtype):
        """LogitsOf hidden states in this dtype; the weight is gathered once."""
        return LogitsOf(self.whole()[: self.vocab_size], dtype, self.cap)

    def loss(self, h, y, loss_kernel):
        """(loss_sum, ce_sum) of hidden states (B, T, C) for targets (B, T)."""
        options = self.vocab_size, self.z_loss, torch.is_grad_enabled(), partial(loss_kernel, cap=self.cap)
        return ChunkedCrossEntropy.apply(h.flatten(0, 1), self.weight, y.flatten(), *options)


# --- model ------------------------------------------------------------------------------------------------------------


class GPT(nn.Module):
    """A decoder-only transformer. Its weights come from initial_value() or a state dict, not from the constructor."""

    takes_padding = True  # if a mask hides it; not so in all models of transformers, see finetune.ForTraining
    turning_point = math.inf  # no text is rotated otherwise because it grows
    reads_on = False  # it cannot append several tokens to a cache, which has room for one text only

    def __init__(self, config, compute_dtype=torch.float32):
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        self.loss_kernel = cross_entropy  # or another, see loss.py
        seen = sum(window or config.block_size for window in config.windows)  # tokens, summed over the layers
        self.flops_of_attention = 12 * seen * config.n_head * config.head_dim  # per token
        self.rotary = None if config.arch == 'gpt2' else RotaryEmbedding(config)
        self.embed = nn.Embedding(config.padded_vocab_size, config.n_embd)
        positions = config.positions or config.block_size
        self.pos_embed = nn.Embedding(positions, config.n_embd) if config.arch == 'gpt2' else None
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, self.rotary, number) for number in range(config.n_layer))
        self.routers = [block.mlp.router for block in self.blocks if block.is_mixture]
        self.final_norm = Norm(config, config.n_embd)
        self.head = Head(config)
        self.tie()

    def tie(self):
        """Make head and embedding one parameter, where they are tied. (In a pipeline a rank may have neither.)"""
        if self.config.tie_embeddings and self.embed is not None:
            self.head.weight = self.embed.weight

    def _apply(self, *args, **kwargs):
        """to_empty(), to() and the like replace parameters module by module, so tied ones have to be tied again."""
        empty = [router for router in self.routers if router.load.is_meta]
        super()._apply(*args, **kwargs)
        for router in empty:
            router.begin()
        self.tie()
        return self

    def forward(self, x, y=None, starts=None, attention=None, cache=None, then=None):
        """x: tokens (B, T). y: targets (B, T), -1 = ignored. starts (B, M): where each document of a row begins.
        attention: a class of attention.py, in place of `starts`. cache: one KVCache per block, with the tokens
        before x. then: a function of (hidden (B, T, C), logits_of), whose result is returned; logits_of, a
        LogitsOf, is a function from rows of hidden to their logits.

        With targets it returns (loss_sum, ce_sum), fp32 scalars that are sums over the positions with y != -1. loss_sum
        is the cross-entropy plus z_loss * logsumexp(logits)^2, and when a mixture trains plus what its routers add; it
        has the gradient. ce_sum is the cross-entropy alone.
        Without targets it returns the logits (B, T, vocab_size), with a cache only those of the last token
        (B, 1, vocab_size). Raises ValueError for more than block_size tokens.
        """
        h, routings = self.hidden(x, starts, attention, cache)
        if then is not None:
            return then(h, self.head.by_rows(h.dtype))
        return self.head(h) if y is None else self.loss(h, y, routings)

    def hidden(self, x, starts=None, attention=None, cache=None):
        """What the head sees, (B, T, C), with a cache (B, 1, C); and for the loss what the routers of a mixture say."""
        first = cache[0].length if cache else 0
        positions, attention = self.places(x, first, x.shape[1], starts, attention)
        h, routings = self.embedded(x, positions), []
        for block, block_cache in zip(self.blocks, cache or [None] * len(self.blocks), strict=True):
            h = block(h, block_cache, attention)
            if block.is_mixture:
                h, routing = h
                routings.append(routing)
        return self.finished(h[:, -1:] if cache else h), routings

    def places(self, x, first, T, starts=None, attention=None):
        """The positions of T tokens in each row of x, after `first` others, and the attention, which knows their
        rotation; None where a token sees all before it, and a single one with a window the last of the cache."""
        if first + T > self.config.block_size:
            raise ValueError(f'{first + T} tokens are more than block_size={self.config.block_size}')
        positions = torch.arange(first, first + T, device=x.device)
        if self.rotary is not None:
            self.rotary.prepare(x.device)
        sizes = self.compute_dtype, self.config.dropout, self.config.head_dim
        if starts is not None:
            attention = attention_of_documents(starts, T, *sizes)
        elif self.config.window_size and attention is None and T > 1 and not first:  # a cache takes a mask
            attention = attention_of_rows(x, T, *sizes)
        if attention is not None:
            positions = attention.positions
            if self.config.window_size and isinstance(attention, MaskedAttention):
                attention = attention.with_window(self.config.window_size)
            attention = replace(attention, cos_sin=self.rotary and self.rotary.cos_sin[:, positions][:, :, :, None])
        return positions, attention

    def embedded(self, x, positions):
        """What the first block sees of tokens (B, T): (B, T, C)."""
        h = self.embed(x).to(self.compute_dtype)
        if self.pos_embed is not None:
            h = h + self.pos_embed(positions).to(self.compute_dtype)
        return self.drop(h)

    def finished(self, h):
        """What the head sees of the last block's result."""
        h = self.final_norm(h)
        if self.config.base_width is not None:  # the logits get smaller by m_N
            h = h / self.config.ratios[0]
        return h

    def loss(self, h, y, routings=()):
        """(loss_sum, ce_sum) of what the head sees, see forward()."""
        loss_sum, ce_sum = self.head.loss(h, y, self.loss_kernel)
        if self.routers and self.training and torch.is_grad_enabled():
            # Not in the blocks, because with activation checkpointing these would count their tokens twice.
            loss_sum = loss_sum + loss_of_routers(self.routers, routings, y)
        return loss_sum, ce_sum

    def new_cache(self, capacity):
        """A cache for forward(), with room for `capacity` tokens in each row."""
        return [KVCache(capacity) for _ in self.blocks]

    def keep_rows(self, cache, rows):
        """Keep these rows of a batch in its cache, a tensor of their numbers."""
        for block_cache in cache:
            block_cache.keep(rows)

    def checkpoint_activations(self, mode):
        """'none': keep all activations for backward. 'full': keep each block's input and compute the rest again.
        'selective': keep the results of matmuls and attention, too (SAVED_OPS)."""
        if mode not in ('none', 'full', 'selective'):
            raise ValueError(f'activation_checkpointing={mode!r}: expected none, full or selective')
        for block in self.blocks:
            block.activation_checkpointing = mode

    def initial_value(self, name, parameter, seed, device):
        """The initial value of the parameter called `name`: fp32, of the shape of the whole parameter.

        It depends on (seed, name) alone, not on ranks or shards. (The random numbers of a CPU and of a GPU differ.)
        Norms are 1 and biases 0. Matrices are normal with std 0.02 (GPT-2) or 1 / sqrt(fan_in) (enoki: "ScaledGPT",
        arXiv 2602.05298), and residual projections with 1 / sqrt(2 n_layer) times that. Under mup and completep the std
        is that of base_width, without the 1 / sqrt(2 n_layer), and in matrices of blocks 1 / sqrt(m_N) times that.
        """
        if parameter.dim() == 1:
            return torch.full(parameter.shape, 0.0 if name.endswith('bias') else 1.0, device=device)
        fan_in, m_N = parameter.shape[1], self.config.ratios[0]  # of an embedding: n_embd
        std = (fan_in / m_N) ** -0.5 if self.config.arch == 'enoki' else 0.02
        if self.config.base_width is not None:
            std *= m_N**-0.5 if name.startswith('blocks.') else 1
        elif name.endswith(('attn.proj.weight', 'mlp.down.weight', 'experts.down.weight', 'shared.down.weight')):
            # 2 n_layer of them add to the residual stream (the weights of a token's experts sum to 1)
            std *= (2 * self.config.n_layer) ** -0.5
        return torch.randn(parameter.shape, generator=generator_of(seed, name, device), device=device) * std

    def parameter_counts(self):
        """{part: exact number of parameters}, including the padding of the vocabulary, and each tied weight once.

        A norm within the attention counts as a norm, a tied head as embedding, experts as mlp. The dict also has
        'total', 'trainable', and in a mixture 'active', the parameters that compute a token.
        """
        counts = dict.fromkeys(PARTS, 0)
        for name, parameter in self.named_parameters():
            part = next((part for part, words in PARTS.items() if any(word in name for word in words)), 'other')
            counts[part] = counts.get(part, 0) + parameter.numel()
        trainable = sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
        total, inactive = sum(counts.values()), sum(inactive_parameters(self).values())
        return counts | {'total': total, 'trainable': trainable} | ({'active': total - inactive} if inactive else {})

    def flops_per_token(self):
        """FLOPs of forward and backward per token: 6 (N - N_embedding) + 12 n_layer (n_head head_dim) block_size.

        Chowdhery et al. (PaLM, arXiv 2204.02311, appendix B), without a discount for causal attention or recomputation.
        In layers with a window, window_size takes the place of block_size. The head counts as a matmul, tied or not. A
        frozen weight takes 4 and not 6, since it gets no gradient. Only the experts that compute a token count.
        """
        tables = {module.weight for module in self.modules() if isinstance(module, nn.Embedding)}
        matrices = {module.weight for module in self.modules() if isinstance(module, nn.Linear)}
        in_matmuls = [parameter for parameter in self.parameters() if parameter not in tables - matrices]
        inactive = inactive_parameters(self)
        flops = sum(
            (6 if parameter.requires_grad else 4) * (parameter.numel() - inactive.get(parameter, 0))
            for parameter in in_matmuls
        )
        return flops + self.flops_of_attention


def generator_of(seed, name, device='cpu'):
    """The generator of a parameter's initial values. It depends on (seed, name) alone, and on the kind of device."""
    digest = hashlib.sha256(f'{seed} {name}'.encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], 'little'))


def inactive_parameters(module):
    """{parameter of experts: how many of its elements do not compute a given token}. Experts are the modules with
    `active`, the share of them that a token meets: ExpertLinear, and those of transformers (finetune.mark_experts)."""
    return {
        parameter: round((1 - inner.active) * parameter.numel())
        for inner in module.modules()
        if isinstance(getattr(inner, 'active', None), float)
        for parameter in inner.parameters()
    }


def tensors_with_values(model):
    """[(name, tensor)] of what a trained model has to be given: its parameters, and the biases of its routers, which
    are buffers."""
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith('router.bias')]
    return [*model.named_parameters(), *biases]


def is_load(name):
    """Whether a tensor of this name is the `load` of a Balance, which belongs to the training and not to the model."""
    return name.endswith('router.load')
