"""
The plan beside the peaks that runs on one GPU have reached, by torch.cuda.max_memory_allocated().

They are those of benchmarks/gpu.py on an NVIDIA H100 80GB HBM3 on 2026-11-27, one rank, one micro-step, synthetic data:
torch 2.11.0+cu130, cuDNN 9.19, driver 580.159.04, code of commit 4ca1387. saved_since() says what model.py
has saved since.
"""

import pytest
import torch

from loss import LOGITS_BYTES, tokens_per_chunk
from model import ModelConfig
from planning import activations, memory, report, sizes

KEYS = dict(device='cuda', dtype='bfloat16', compile=True, vocab_size=50304, activation_checkpointing='none')
KEYS |= dict(optimizer='adamw', zero_stage=3, replicate_size=1, cpu_offload='none', accumulate='unsharded')
KEYS |= dict(fsdp_impl='torch', blocks_per_unit=1, prefetch=1)
SMALL = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=32)
SIZES = {
    '124M': SMALL | dict(arch='llama'),
    '124M gpt2': SMALL | dict(arch='gpt2', bias=False),
    'Enoki 8 heads': dict(arch='enoki', n_layer=6, n_head=8, n_embd=512, block_size=2048, batch_size=16),
    'Llama 1B': dict(arch='llama', n_layer=16, n_head=32, n_kv_head=8, n_embd=2048, mlp_hidden_dim=8192,
                     block_size=2048, batch_size=8, tie_embeddings=True),
    'Shakespeare': dict(arch='gpt2', bias=False, n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=64,
                        vocab_size=65, dropout=0.2),
    'experts': dict(arch='qwen3', n_layer=4, n_head=6, n_embd=192, n_experts=8, experts_per_token=2,
                    expert_hidden_dim=256, block_size=256, batch_size=8),
    'tiny': dict(arch='llama', n_layer=3, n_head=4, n_kv_head=2, n_embd=128, block_size=128, batch_size=4),
}  # fmt: skip
MANUAL, FLOAT8, EAGER = {'fsdp_impl': 'manual'}, {'matmul_dtype': 'float8'}, {'compile': False}
TWO_SUMS = EAGER | {'dtype': 'float32', 'global_batch_size': 8}
PEAKS = [  # GB
    ('124M', 'ddp', {}, 14.774),
    ('124M', 'fsdp', {}, 14.679),
    ('124M', 'fsdp', MANUAL, 14.699),
    ('124M gpt2', 'ddp', {}, 12.527),
    ('Enoki 8 heads', 'ddp', {}, 5.740),
    ('Llama 1B', 'ddp', {}, 38.893),
    ('Llama 1B', 'fsdp', {}, 36.947),
    ('Llama 1B', 'fsdp', MANUAL, 37.068),
    ('Llama 1B', 'fsdp', FLOAT8, 29.432),  # 2 bytes per number of x less for each token and layer than is planned
]
FURTHER_PEAKS = [
    ('Shakespeare', 'ddp', {}, 1.567),
    ('experts', 'fsdp', {}, 0.953),
    ('experts', 'fsdp', EAGER, 1.523),
    ('tiny', 'ddp', TWO_SUMS, 0.1007),
    ('tiny', 'fsdp', TWO_SUMS | MANUAL | {'zero_stage': 1}, 0.1036),
    ('tiny', 'ddp', {}, 0.0863),
    ('tiny', 'ddp', {'activation_checkpointing': 'selective'}, 0.0821),
    ('tiny', 'ddp', {'activation_checkpointing': 'full'}, 0.0817),
    ('tiny', 'fsdp', {'activation_checkpointing': 'full'}, 0.0827),
]
FURTHER_PEAKS = [pytest.param(*peak, marks=pytest.mark.slow) for peak in FURTHER_PEAKS]


def config_of(name, changes):
    size = SIZES[name]
    keys = KEYS | {'global_batch_size': size['batch_size'], 'vocab_size': 500 if name == 'tiny' else 50304}
    keys |= size | changes
    return keys | ModelConfig.from_keys(keys).to_dict()


def saved_since(config):
    """GB. Models with RoPE kept attention's result of each layer once more in the layout of the next matmul, unless it
    was computed again or in 8 bits. The compiled loss took 4 bytes per logit of a chunk, and 2 of the chunk before.
    Now it takes 2, of chunks four times as large. It also had the head's gradient in half precision.
    """
    tokens, itemsize = config['batch_size'] * config['block_size'], getattr(torch, config['dtype']).itemsize
    saved = 0
    if config['arch'] != 'gpt2' and config['activation_checkpointing'] == 'none' and not config.get('matmul_dtype'):
        saved += tokens * config['n_layer'] * config['n_head'] * config['head_dim'] * itemsize
    if config['compile']:
        rows = ModelConfig.from_keys(config).padded_vocab_size
        before, now = (tokens_per_chunk(tokens, most // (4 * rows)) for most in (2**29, LOGITS_BYTES['cuda']))
        of_both = 6 if before < tokens else 4
        saved += (of_both * before - 2 * now + 2 * config['n_embd']) * rows
    return saved / 1e9


@pytest.mark.parametrize(('name', 'strategy', 'changes', 'peak'), PEAKS + FURTHER_PEAKS)
def test_the_plan_is_within_3_percent_of_a_measured_peak(name, strategy, changes, peak):
    config = config_of(name, changes)
    peak -= saved_since(config)
    planned = sum(memory.memory_bytes(config, sizes.empty_model(config), 1, strategy).values()) / 1e9
    print(f'{name} {strategy} {changes}: planned {planned:.4f} GB, measured {peak}: {planned / peak - 1:+.1%}')
    assert planned == pytest.approx(peak, rel=0.03)
    assert activations.micro_step(config, strategy).is_compiled == config['compile']


C, H, D, K, M = 128, 4, 32, 2, 256
RANDOM_STATE = 24  # of attention: three numbers


@pytest.mark.parametrize(
    ('arch', 'expected'),
    [
        # The inputs of a norm and of what it feeds, twice; q, k and v; attention's result and its logsumexp; the MLP
        ('gpt2', 8 * C + 6 * C + 2 * C + 4 * H + 4 * M + 16),
        # as well q and k rotated, and two numbers for each head's norm
        ('enoki', 8 * C + 6 * C + 4 * C + 2 * C + 4 * H + 4 * M + 16 + 16 * H),
        # fewer heads of k and v; of a norm one number; gate, up and their product, but not silu(gate)
        ('llama', 8 * C + 2 * (H + 2 * K) * D + 2 * (H + K) * D + 2 * H * D + 4 * H + 6 * M + 8),
    ],
)
def test_a_compiled_block_keeps_what_its_backward_cannot_compute_again_by_pointwise_operations(arch, expected):
    changes = dict(arch=arch, bias=False, n_embd=C, n_head=H, n_kv_head=K if arch == 'llama' else H, mlp_hidden_dim=M)
    config = config_of('tiny', changes)
    tokens = config['batch_size'] * config['block_size']
    step = activations.micro_step(config, 'fsdp')
    assert step.block == tokens * expected + RANDOM_STATE
    assert step.end < step.block, 'backward has freed what it has used'
    weights = sizes.empty_model(config).blocks[0].parameters()  # fp32 under train_ddp.py: the copies for matmuls stay
    matrices = sum(parameter.numel() for parameter in weights if parameter.dim() == 2)
    assert activations.micro_step(config, 'ddp').block == tokens * expected + RANDOM_STATE + 2 * matrices


def test_a_dry_run_says_whether_blocks_are_counted_as_compiled():
    for device, compile, said in (
        ('cuda', True, 'compiled'),
        ('cuda', False, 'uncompiled'),
        ('cpu', True, 'uncompiled'),
    ):
        config = config_of('tiny', {'device': device, 'compile': compile, 'keep_checkpoints': 0, 'max_iters': 1})
        config |= dict(learning_rate=1e-3, warmup_iters=0, lr_schedule='constant')
        assert f'(ddp, 1 rank, bfloat16, device={device}, {said})' in report.dry_run(config, {}, 1)
