"""
Which model trains on which card, and with which keys? Prints both tables of docs/memory.md.

    python benchmarks/what_fits.py                        # 51 dry runs, about 10 minutes
    python benchmarks/what_fits.py --models=1B            # 17 of them

Each cell is the total that --dry_run of a train script prints for one GPU, in GB of 1e9 bytes. This needs no GPU, no
weights and no network, since a config.json with Llama's shapes is enough. A dry run does not communicate, so for four
GPUs only rank 0 is started.
"""

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.runs import run_script

# Llama 3.2 1B, Llama 3.1 8B and 70B.
SHAPES = {
    '1B': {'hidden_size': 2048, 'intermediate_size': 8192, 'num_hidden_layers': 16, 'num_attention_heads': 32,
           'head_dim': 64, 'tie_word_embeddings': True},
    '8B': {'hidden_size': 4096, 'intermediate_size': 14336, 'num_hidden_layers': 32, 'num_attention_heads': 32},
    '70B': {'hidden_size': 8192, 'intermediate_size': 28672, 'num_hidden_layers': 80, 'num_attention_heads': 64},
}  # fmt: skip
ALL_LLAMAS = {
    'architectures': ['LlamaForCausalLM'],
    'model_type': 'llama',
    'dtype': 'bfloat16',
    'vocab_size': 128256,
    'num_key_value_heads': 8,
    'max_position_embeddings': 131072,
    'rms_norm_eps': 1e-5,
    'tie_word_embeddings': False,
}

# One sequence of 4096 tokens at a time, 16 in a step. Of each block only the input is kept for backward.
COMMON = ['--dataset=synthetic', '--block_size=4096', '--batch_size=1', '--global_batch_size=16']
COMMON += ['--activation_checkpointing=full', '--dtype=bfloat16', '--device=cuda', '--dry_run']
# GPUs -> script and keys. The keys come after those of COMMON, and a later key replaces an earlier one.
WAYS = {
    1: [
        'train_ddp.py --activation_checkpointing=none',
        'train_ddp.py',
        'train_ddp.py --optimizer_dtype=bfloat16',
        'train_ddp.py --optimizer_dtype=int8',
        'train_fsdp.py --optimizer_dtype=int8 --cpu_offload=optimizer',
        'train_fsdp.py --optimizer_dtype=int8 --cpu_offload=params',
        'train_ddp.py --lora_rank=16 --frozen_dtype=float32',
        'train_ddp.py --lora_rank=16',
        'train_ddp.py --lora_rank=16 --frozen_dtype=nf4',
    ],
    4: [
        'train_fsdp.py --activation_checkpointing=none',
        'train_fsdp.py',
        'train_fsdp.py --accumulate=sharded',
        'train_fsdp.py --accumulate=sharded --optimizer_dtype=int8',
        'train_fsdp.py --accumulate=sharded --optimizer_dtype=int8 --cpu_offload=optimizer',
        'train_fsdp.py --accumulate=sharded --optimizer_dtype=int8 --cpu_offload=params',
        'train_fsdp.py --lora_rank=16',
        'train_fsdp.py --lora_rank=16 --frozen_dtype=nf4',
    ],
}
ROOM = 2  # GB for CUDA, NCCL and fragmentation


def bytes_of(way, folder, gpus):
    """(GB on the device, GB on the host) of one rank."""
    # The variables that torchrun gives to the first of its processes.
    ranks = {'RANK': 0, 'LOCAL_RANK': 0, 'WORLD_SIZE': gpus, 'LOCAL_WORLD_SIZE': gpus, 'MASTER_PORT': 29500}
    env = {'MASTER_ADDR': '127.0.0.1', **{name: str(value) for name, value in ranks.items()}} if gpus > 1 else {}
    script, *keys = way.split()
    output = run_script(script, f'--init_from={folder}', f'--out_dir={folder}/out', *COMMON, *keys, **env).stdout
    found = {place: float(gb) for place, gb in re.findall(r'total on the (device|host) +([\d.]+)', output)}
    return found['device'], found.get('host', 0)


def cell(device, host):
    """Bold if it fits on a card of 24 GB, plain if on one of 80 GB, else in brackets."""
    marks = '**{}**' if device + ROOM <= 24 else '{}' if device + ROOM <= 80 else '({})'
    return marks.format(f'{device:.1f}') + (f' + {host:.0f}' if host else '')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', default=','.join(SHAPES), help='of ' + ', '.join(SHAPES))
    parser.add_argument('--gpus', type=int, choices=WAYS, help='this table alone')
    arguments = parser.parse_args()
    models = arguments.models.split(',')
    with tempfile.TemporaryDirectory() as folder:
        for name in models:
            Path(folder, name).mkdir()
            Path(folder, name, 'config.json').write_text(json.dumps(ALL_LLAMAS | SHAPES[name]))
        for gpus in [arguments.gpus] if arguments.gpus else WAYS:
            print(f'\n| {gpus} GPU{"s" * (gpus > 1)} | {" | ".join(models)} |\n|---|{"---|" * len(models)}')
            for way in WAYS[gpus]:
                cells = [cell(*bytes_of(way, Path(folder, name), gpus)) for name in models]
                print(f'| `{way}` | {" | ".join(cells)} |', flush=True)


if __name__ == '__main__':
    main()
