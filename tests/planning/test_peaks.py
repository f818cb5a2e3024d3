"""The plan beside the peaks of torch.cuda.max_memory_allocated() that runs on one GPU have reached.

They are those of `python benchmarks/gpu.py` on an NVIDIA H100 80GB HBM3, one rank, 2026-11-27: torch 2.11.0+cu130,
cuDNN 9.19, driver 580.159.04, code of 4ca1387. If a change of model.py saves memory, the plan will fall below them.
"""

import json

import pytest

from benchmarks.gpu import SIZES, TINY
from huggingface import finetune
from model import ModelConfig
from planning import activations, memory, report, sizes

KEYS = dict(device='cuda', dtype='bfloat16', compile=True, vocab_size=50304, activation_checkpointing='none')
KEYS |= dict(optimizer='adamw', zero_stage=3, replicate_size=1, cpu_offload='none', accumulate='unsharded')
KEYS |= dict(fsdp_impl='torch', blocks_per_unit=1, prefetch=1)
SHAPES = SIZES | {'Enoki 8 heads': SIZES['Enoki 8 heads'] | dict(n_layer=6, n_head=8, n_embd=512)}  # as heads=8 fills in
MANUAL, FLOAT8 = {'fsdp_impl': 'manual'}, {'matmul_dtype': 'float8'}
PEAKS = [  # GB
    ('124M', 'ddp', {}, 14.774),
    ('124M', 'fsdp', {}, 14.679),
    ('124M', 'fsdp', MANUAL, 14.699),
    ('124M gpt2', 'ddp', {}, 12.527),
    ('Enoki 8 heads', 'ddp', {}, 5.740),
    ('Llama 1B', 'ddp', {}, 38.893),
    ('Llama 1B', 'fsdp', {}, 36.947),
    ('Llama 1B', 'fsdp', MANUAL, 37.068),
    ('Llama 1B', 'fsdp', FLOAT8, 29.432),
]


def planned_gb(strategy, keys):
    keys = KEYS | {'global_batch_size': keys['batch_size']} | keys
    keys |= ModelConfig.from_keys(keys).to_dict() if 'transformers' not in keys else {}
    parts = memory.memory_bytes(keys, sizes.empty_model(keys), 1, strategy)
    assert activations.micro_step(keys, strategy).is_compiled == keys['compile']
    return sum(parts.values()) / 1e9


@pytest.mark.parametrize(('name', 'strategy', 'keys', 'peak'), PEAKS)
def test_the_plan_is_within_3_percent_of_a_measured_peak(name, strategy, keys, peak):
    planned = planned_gb(strategy, SHAPES[name] | keys)
    print(f'{name} {strategy} {keys}: planned {planned:.3f} GB, measured {peak}: {planned / peak - 1:+.1%}')
    assert planned == pytest.approx(peak, rel=0.03)
