"""
Trains the same with two versions of this code, and compares every digit: losses, norms, weights, moments, and what the
logs say. For changes that move code and must not change a number.

    python tests/golden.py --against=HEAD~1            # 34 commands, 20 minutes on two cores
    python tests/golden.py --against=HEAD~1 -k tensor  # those whose names contain it
    python tests/golden.py --against=HEAD~1 --logs     # lines of the logs must be equal, too

Nothing is stored, since another CPU rounds otherwise: both versions run here, on the same text and folder of a model.
Each command saves half-way and at the end. Then each version goes on with what the other one has saved half-way, and
has to end with the same bits as the other did.
"""

import argparse
import concurrent.futures
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch
from chats import messages_of, write_rows
from launch import REPO, TINY_MODEL, TINY_RUN, environment, prepare_tiny, run_script
from outputs import metrics, tensors_of
from pretrained import save_model

HALF, STEPS = 3, 6
LLAMA = ['--arch=llama', '--n_layer=4', '--n_head=4', '--n_kv_head=2']
EXPERTS = ['--arch=qwen3', '--n_experts=4', '--expert_hidden_dim=24', '--router_aux=0.1', '--router_z=0.01']
MANUAL, BF16, CHATS = '--fsdp_impl=manual', '--dtype=bfloat16', ['--dataset=chats', '--block_size=64']
PAIRS = ['--dataset=pairs', '--block_size=128', '--yarn=2', '--init_from=MODEL']
PROMPTS = ['--prompts=MATERIAL/prompts.jsonl', '--block_size=64', '--init_from=MODEL', '--prompts_per_step=4']
PROMPTS += ['--num_generations=4', '--batch_size=2']
LORA = [*CHATS, '--init_from=MODEL', '--lora_rank=4']
COMMANDS = {  # name: (ranks, script, keys); a key that is given twice counts as it is given last
    'one process, dropout': (1, 'train_ddp.py', ['--dropout=0.1', '--optimizer=adana']),
    'one process, fp16, loss of z': (1, 'train_ddp.py', ['--dtype=float16', '--z_loss=1e-3', *LLAMA]),
    'one process, experts': (1, 'train_ddp.py', [*EXPERTS, '--router_bias=0.01']),
    'ddp, bf16': (2, 'train_ddp.py', [*LLAMA, BF16, '--tie_embeddings']),
    'ddp, documents, muon': (3, 'train_ddp.py', ['--windows=documents', '--optimizer=muon', '--batch_size=4']),
    'fsdp, selective checkpointing': (2, 'train_fsdp.py', ['--activation_checkpointing=selective']),
    'fsdp, params on the host': (2, 'train_fsdp.py', ['--cpu_offload=params', *LLAMA]),
    'hsdp, bf16': (4, 'train_fsdp.py', ['--replicate_size=2', BF16, *LLAMA]),
    'manual, offload': (2, 'train_fsdp.py', [MANUAL, '--activation_checkpointing=offload', *LLAMA]),
    'manual, stage 1, muon': (3, 'train_fsdp.py', [MANUAL, '--zero_stage=1', '--optimizer=muon', '--batch_size=4']),
    'manual, stage 2, 8-bit moments': (
        2,
        'train_fsdp.py',
        [MANUAL, '--zero_stage=2', '--accumulate=unsharded', '--optimizer_dtype=int8', '--n_embd=80'],
    ),
    'manual hsdp, prefetch 2': (4, 'train_fsdp.py', [MANUAL, '--replicate_size=2', '--prefetch=2', '--n_layer=5']),
    'context, ring': (4, 'train_parallel.py', ['--context_parallel=4', *LLAMA]),
    'context, gather, bf16': (4, 'train_parallel.py', ['--context_parallel=2', '--context_impl=gather', MANUAL, BF16]),
    'tensor, bf16': (2, 'train_parallel.py', ['--tensor_parallel=2', BF16, *LLAMA, '--z_loss=1e-3']),
    'tensor, manual': (4, 'train_parallel.py', ['--tensor_parallel=2', MANUAL, *LLAMA, '--tie_embeddings']),
    'experts divided': (2, 'train_parallel.py', [*EXPERTS, '--expert_parallel=2']),
    'experts divided, hsdp': (
        4,
        'train_parallel.py',
        [*EXPERTS, '--expert_parallel=2', '--replicate_size=2', MANUAL, BF16],
    ),
    'pipeline': (2, 'train_pipeline.py', ['--pipeline_chunks=2', *LLAMA, '--tie_embeddings', BF16]),
    'pipeline, tensor': (4, 'train_pipeline.py', ['--pipeline_stages=2', '--tensor_parallel=2', *LLAMA]),
    'pipeline, ddp, muon': (
        4,
        'train_pipeline.py',
        ['--pipeline_stages=2', '--n_layer=4', '--dropout=0.1', '--optimizer=muon'],
    ),
    'diloco, int4': (
        2,
        'train_diloco.py',
        ['--num_replicas=2', '--inner_steps=2', '--exchange_dtype=int4', '--error_feedback=True'],
    ),
    'diloco, fragments': (
        4,
        'train_diloco.py',
        ['--num_replicas=2', '--inner_steps=4', '--num_fragments=2', '--overlap_steps=1', MANUAL, '--n_layer=4'],
    ),
    'pool': (2, 'train_pool.py', ['--num_replicas=1', '--inner_steps=3', '--exchange=OUT/pool']),
    'deepspeed': (2, 'train_deepspeed.py', ['--zero_stage=2', *LLAMA]),
    'transformers': (2, 'train_fsdp.py', [*CHATS, '--init_from=MODEL', BF16]),
    'transformers, LoRA': (2, 'train_ddp.py', LORA),
    'LoRA on nf4, manual': (2, 'train_fsdp.py', [*LORA, MANUAL, '--frozen_dtype=nf4']),
    'native': (2, 'train_fsdp.py', [*CHATS, '--init_from=MODEL', MANUAL, '--native=True']),
    'dpo': (2, 'train_dpo.py', [*PAIRS, '--sft_weight=0.2', '--batch_size=2']),
    'dpo, simpo, fsdp': (3, 'train_dpo.py', [*PAIRS, '--loss_type=simpo', '--strategy=fsdp', BF16]),
    'grpo, masked': (2, 'train_grpo.py', [*PROMPTS, '--mask_truncated=True', '--scale_rewards=group']),
    'grpo, twice, fsdp': (
        2,
        'train_grpo.py',
        [*PROMPTS, '--num_iterations=2', '--loss_type=dr_grpo', '--strategy=fsdp'],
    ),
    'distill, by turns, fsdp': (
        2,
        'train_distill.py',
        [
            *PROMPTS,
            '--teacher=MATERIAL/teacher',
            '--on_policy=0.5',
            '--beta=0.5',
            '--temperature=0.8',
            '--strategy=fsdp',
        ],
    ),
}
RUN = [*TINY_MODEL, *TINY_RUN, '--dtype=float32', '--dataset=tiny', '--batch_size=1', '--global_batch_size=12']
RUN += [f'--max_iters={STEPS}', '--warmup_iters=2', f'--checkpoint_interval={HALF}', '--eval_interval=2']
MEASURED = ('time/', 'tokens_per_sec', 'mfu', 'mem/', 'fsdp/', 'comm/', 'diloco/wait', 'diloco/transfer', 'diloco/comp')


def keys_of(name, material, out_dir, folder_of_model):
    """The arguments of one of COMMANDS."""
    given = {}
    for key in [*RUN, *COMMANDS[name][2], f'--data_dir={material / "data"}', f'--out_dir={out_dir}']:
        flag, _, value = key.partition('=')
        value = value.replace('MODEL', str(folder_of_model)).replace('OUT', str(out_dir))
        given[flag] = value.replace('MATERIAL', str(material)) or 'True'
    if any(key.startswith('--init_from') for key in given):  # then the folder has the sizes
        given = {key: value for key, value in given.items() if key not in ('--n_layer', '--n_head', '--n_embd')}
        given.pop('--mlp_hidden_dim')
    return [f'{key}={value}' for key, value in given.items()]


def train(tree, name, material, out_dir):
    """Run a command of COMMANDS with the code in `tree`, as torchrun would. Returns None, or what went wrong."""
    ranks, script, _ = COMMANDS[name]
    script = script if (tree / script).exists() else 'train_fsdp.py'  # once it had the keys of train_parallel.py, too
    arguments = keys_of(name, material, out_dir, material / 'model')
    if 'fragment_mix = 0.0' in (tree / 'train_diloco.py').read_text() and '--overlap_steps=1' in arguments:
        arguments.append('--fragment_mix=0.5')  # a key of earlier versions
    if 'eval_sequences' not in (tree / 'keys.py').read_text():  # which counted global batches
        arguments = ['--eval_iters=2' if key == '--eval_sequences=24' else key for key in arguments]
    command = [sys.executable, tree / 'tests' / 'launch.py', ranks, script, *arguments]
    ended = subprocess.run([*map(str, command)], cwd=tree, env=environment(), capture_output=True, text=True)
    return (ended.stdout + ended.stderr)[-3000:] if ended.returncode else None


def rows_of(out_dir, after=0):
    """What metrics.jsonl has, without what a clock or an allocator has measured."""
    # What one part of a run saw of an exchange, the part that goes on does not.
    left_out = (*MEASURED, 'diloco/') if after else MEASURED
    rows = [row for row in metrics(out_dir) if row['step'] > after]
    return [{key: value for key, value in row.items() if not key.startswith(left_out)} for row in rows]


def lines_of(out_dir, tree):
    """Lines of train.log without numbers that a clock has measured."""
    text = (out_dir / 'train.log').read_text().replace(str(out_dir), 'OUT').replace(str(tree), 'TREE')
    lines = [line[20:] for line in text.splitlines()]
    lines = [line for line in lines if not line.startswith(('command:', 'code:', 'host:'))]
    measured = r'[\d,.]+ tok/s|mem [\d.]+ GB|eta [\d:]+|[\d.]+ (s|ms|MB/s|GB/s)\b|[\d.]+%? MFU|job \S+ of pool \S+'
    return [re.sub(measured, '...', line) for line in lines]


def differences(ours, theirs, after=0):
    """Lines that say in what two runs differ."""
    found = []
    for row, other in zip(rows_of(ours, after), rows_of(theirs, after), strict=False):
        keys = [key for key in {**row, **other} if row.get(key) != other.get(key)]
        found += [f'step {row["step"]}, {key}: {row.get(key)} and {other.get(key)}' for key in keys]
    if len(rows_of(ours, after)) != len(rows_of(theirs, after)):
        found.append(f'{len(rows_of(ours, after))} and {len(rows_of(theirs, after))} rows')
    tensors = [tensors_of(str(path / 'checkpoints' / f'step_{STEPS:08}')) for path in (ours, theirs)]
    for name in {**tensors[0], **tensors[1]}:
        one, other = (of.get(name) for of in tensors)
        if one is None or other is None or one.dtype != other.dtype or not torch.equal(one, other):
            found.append(f'{name} of the last checkpoint')
    return found


def go_on(source, out_dir):
    """Make out_dir what `source` was when it had saved half-way."""
    shutil.copytree(source, out_dir)
    shutil.rmtree(out_dir / 'checkpoints' / f'step_{STEPS:08}')
    (out_dir / 'DONE').unlink()


def compare(name, trees, material, with_logs):
    """[what differs] between the trees in a command, and in going on with what the other has saved."""
    folder = Path(tempfile.mkdtemp(dir=material))
    try:
        for side, tree in trees.items():
            if said := train(tree, name, material, folder / side):
                return [f'{side} ended with an error: {said}']
        found = differences(folder / 'new', folder / 'old')
        if with_logs:
            logs = [lines_of(folder / side, tree) for side, tree in trees.items()]
            found += [f'log: {line}' for line in {*logs[0]} ^ {*logs[1]}]
        if name == 'pool':  # what it has published stands in the pool, too
            return found
        for side, source in (('new', 'old'), ('old', 'new')):
            out_dir = folder / f'{side}_after_{source}'
            go_on(folder / source, out_dir)
            if said := train(trees[side], name, material, out_dir):
                return [*found, f'{side} does not go on with what {source} has saved: {said}']
            more = differences(out_dir, folder / source, after=HALF)
            found += [f'{side} after {source}, {line}' for line in more]
        return found
    finally:
        shutil.rmtree(folder)


def checkout(revision, folder):
    """Unpack a revision into a folder."""
    archive = folder.with_suffix('.tar')
    subprocess.run(['git', 'archive', f'--output={archive}', revision], cwd=REPO, check=True)
    with tarfile.open(archive) as file:
        file.extractall(folder, filter='data')


def make_material(folder):
    """Text, chats, pairs, prompts, and the folders of a model and its teacher, for both versions."""
    prepare_tiny(folder)
    save_model(folder / 'model', 'llama_64')
    save_model(folder / 'teacher', 'llama_64', draw=1)
    turns = [('user', 'What is {0} and {0}?'), ('assistant', 'It is {1}, as you can count.')]
    rows = [{'messages': messages_of((role, said.format(n, 2 * n)) for role, said in turns)} for n in range(80)]
    source = write_rows(folder / 'chats.jsonl', rows)
    keys = [f'--dataset={source}', f'--tokenizer={folder / "model"}', f'--data_dir={folder / "data"}', '--name=chats']
    run_script('prepare_data.py', *keys, '--val_fraction=0.2')
    rows = [{'prompt': f'{n} + 1 =', 'chosen': f'{n + 1}' * (1 + n % 3), 'rejected': f'{n + 2}'} for n in range(80)]
    keys[0], keys[-1] = f'--dataset={write_rows(folder / "pairs.jsonl", rows)}', '--name=pairs'
    run_script('prepare_data.py', '--pairs', *keys, '--val_fraction=0.2')
    letters = {'answer': [*'abcdefghijklm'], 'rule': 'contains', 'stop': [*'ABCDEFGHIJ'], 'max_new_tokens': 8}
    write_rows(folder / 'prompts.jsonl', [{'prompt': f'{n}:', **letters} for n in range(20)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--against', required=True, help='a revision of this repository')
    parser.add_argument('-k', default='', help='only commands whose names contain this')
    parser.add_argument('--jobs', type=int, default=2, help='commands at a time')
    parser.add_argument('--logs', action='store_true', help='compare the lines of train.log, too')
    options = parser.parse_args()
    names = [name for name in COMMANDS if options.k in name]
    if importlib.util.find_spec('deepspeed') is None:
        names = [name for name in names if name != 'deepspeed']
    with tempfile.TemporaryDirectory() as folder:
        material = Path(folder)
        checkout(options.against, material / 'tree')
        make_material(material)
        trees = {'new': REPO, 'old': material / 'tree'}
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as threads:
            runs = threads.map(lambda name: compare(name, trees, material, options.logs), names)
            failed = 0
            for name, found in zip(names, runs, strict=True):
                failed += bool(found)
                print(f'{name}: {"equal" if not found else f"{len(found)} differences"}', flush=True)
                for line in found[:10]:
                    print(f'    {line}', flush=True)
    print(f'{len(names) - failed} of {len(names)} commands are equal to those of {options.against}')
    sys.exit(failed > 0)


if __name__ == '__main__':
    main()
