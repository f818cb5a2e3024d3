"""
How does fine-tuning here compare with TRL's SFTTrainer? Both start from the same weights and train on the same batches,
and this compares losses, gradient norms, tokens/s and peak memory.

    python -m venv peer && peer/bin/pip install torch==2.13.0 trl==1.16.0 peft
    python benchmarks/beside_trl.py --init_from=real/smollm2 --dataset=gsm8k --trl_python=peer/bin/python
    python benchmarks/beside_trl.py ... --steps=6 --dtypes bfloat16 --parts lora --threads 2

The first line makes an environment for TRL. docs/real_model.md shows the commands that make real/smollm2 and the
dataset gsm8k.

Our side is the command `python train_ddp.py --init_from=... --dataset=...`. TRL gets the batches of that run as
tensors, in two ways. `packed` puts all sequences of a batch into one row, in which positions start again at 0 with each
conversation; this is how TRL packs. `padded` gives each of the same conversations a row of its own, as TRL does by
default. With LoRA, TRL starts from our initial A matrices. Both sides have fp32 weights, autocast for bfloat16, fused
AdamW, and no recomputation.

In each of --rounds, every way runs once in a process of its own, and every other round goes through them in reverse
order; a ratio is taken within a round. Tokens are those of the conversations, without padding. The tokens/s of a run
are the median over its steps without the first two.
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SEED, RATES = 1337, {'full': 1e-5, 'lora': 2e-4}
RANK = 16
TARGETS = 'q_proj k_proj v_proj o_proj gate_proj up_proj down_proj'.split()


# --- in TRL's environment: this file is run there with --worker, and imports nothing of this repository ---------------


def packed_row(x, y, starts):
    """A batch of packed sequences as one row for TRL. TRL's loss shifts the labels itself, so each sequence gets its
    last target as one more token, after which nothing is predicted."""
    import torch

    rows = []
    for inputs, targets, begins in zip(x, y, starts, strict=True):
        first = torch.zeros(len(inputs) + 1, dtype=torch.int64)
        first[begins[begins < len(inputs)]] = begins[begins < len(inputs)]
        places = torch.arange(len(first))
        last = targets[-1:].clamp(min=0)
        labels = torch.cat((torch.tensor([-100]), targets.masked_fill(targets < 0, -100)))
        rows.append((torch.cat((inputs, last)), labels, places - first.cummax(0).values))
    input_ids, labels, position_ids = (torch.cat(parts)[None] for parts in zip(*rows, strict=True))
    return {'input_ids': input_ids, 'labels': labels, 'position_ids': position_ids}


def padded_rows(chats):
    """Conversations [(inputs, targets)] as a padded batch, with one conversation per row."""
    import torch

    pad = torch.nn.utils.rnn.pad_sequence
    inputs = [torch.cat((inputs, targets[-1:].clamp(min=0))) for inputs, targets in chats]
    labels = [torch.cat((torch.tensor([-100]), targets.masked_fill(targets < 0, -100))) for _, targets in chats]
    mask = pad([torch.ones_like(row) for row in inputs], batch_first=True)
    labels = pad(labels, batch_first=True, padding_value=-100)
    return {'input_ids': pad(inputs, batch_first=True), 'labels': labels, 'attention_mask': mask}


def train_with_trl(folder, work, way, part, dtype, out):
    """Train, and write {'loss', 'norm', 'seconds': a number per step each, 'peak_mb'} to the file `out`."""
    import torch
    import transformers
    from trl import SFTConfig, SFTTrainer

    saved = torch.load(work)
    batches = [packed_row(*step['batch']) if way == 'packed' else padded_rows(step['chats']) for step in saved['steps']]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    losses, norms, seconds, began = [], [], [], [0.0]

    class Trainer(SFTTrainer):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            losses.append((loss[0] if isinstance(loss, tuple) else loss).item())
            return loss

        def log(self, logs, *args, **kwargs):
            norms.extend([logs['grad_norm']] if 'grad_norm' in logs else [])

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            began[0] = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            seconds.append(time.perf_counter() - began[0])

    peft_config = None
    if part == 'lora':
        from peft import LoraConfig

        peft_config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS, task_type='CAUSAL_LM')
    config = SFTConfig(
        output_dir=f'{out}.files', max_steps=len(batches), per_device_train_batch_size=1, learning_rate=RATES[part],
        lr_scheduler_type='constant', warmup_steps=0, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95,
        max_grad_norm=1.0, logging_steps=1, report_to=[], use_cpu=True, bf16=dtype == 'bfloat16', save_strategy='no',
        disable_tqdm=True, gradient_checkpointing=False, remove_unused_columns=False,
        dataset_kwargs={'skip_prepare_dataset': True}, optim='adamw_torch_fused', dataloader_pin_memory=False,
        loss_type='nll',
    )  # fmt: skip
    import datasets

    trainer = Trainer(
        model=model, args=config, train_dataset=datasets.Dataset.from_dict({'number': list(range(len(batches)))}),
        data_collator=lambda rows: dict(batches[rows[0]['number']]), peft_config=peft_config, callbacks=[Clock()],
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip
    if part == 'lora':
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if 'lora_A' in name:
                    ours = name.removeprefix('base_model.model.').replace('.default.weight', '')
                    parameter.copy_(saved['lora_A'][ours])
    trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    Path(out).write_text(json.dumps({'loss': losses, 'norm': norms, 'seconds': seconds, 'peak_mb': peak}))


# --- in ours ----------------------------------------------------------------------------------------------------------


def chats_of(x, y, starts):
    """[(inputs, targets)] of the conversations in packed sequences, each without its padding."""
    found = []
    for inputs, targets, begins in zip(x, y, starts, strict=True):
        edges = [*begins[begins < len(inputs)].tolist(), len(inputs)]
        for begin, end in itertools.pairwise(edges):
            learned = (targets[begin:end] >= 0).nonzero()
            if len(learned):  # else this is padding
                end = begin + int(learned[-1]) + 1  # a conversation ends with an answer, which is learned
                found.append((inputs[begin:end], targets[begin:end]))
    return found


def write_work(arguments, part, path):
    """Write the batches of train_ddp.py's run and LoRA's initial A matrices to `path`; returns the tokens of each
    step."""
    import torch

    import data
    from huggingface import finetune, lora
    from huggingface.pretrained import Pretrained

    lora_keys = {'lora_rank': RANK, 'lora_alpha': float(RANK)} if part == 'lora' else {}
    pretrained = Pretrained(arguments.init_from, block_size=arguments.block_size, **lora_keys)
    with torch.device('meta'):
        model = finetune.for_training(pretrained)
    shapes = {name: p.shape for name, p in model.named_parameters() if name.endswith('.lora_A')}
    keys = {'dataset': arguments.dataset, 'data_dir': arguments.data_dir, 'block_size': arguments.block_size}
    keys |= {'dataset_stages': (), 'vocab_size': pretrained.vocab_size, 'windows': 'stream'}
    mixture = data.open_mixture(keys, 'train')
    mixture.plan(arguments.steps, arguments.sequences)
    batches = data.batches(mixture, SEED, 0, arguments.sequences, arguments.sequences, 0, 1, 'cpu')
    steps = [{'batch': batch, 'chats': chats_of(*batch)} for batch in itertools.islice(batches, arguments.steps)]
    batches.close()
    torch.save(
        {
            'steps': steps,
            'lora_A': {name: lora.initial_lora_a(name, shape, SEED) for name, shape in shapes.items()},
        },
        path,
    )
    return [sum(len(inputs) for inputs, _ in step['chats']) for step in steps]


def train_ours(arguments, part, dtype, threads, folder):
    from benchmarks.runs import command_of, environment, metrics

    command = command_of(
        'train_ddp.py', f'--init_from={arguments.init_from}', f'--dataset={arguments.dataset}',
        f'--data_dir={arguments.data_dir}', f'--block_size={arguments.block_size}',
        f'--batch_size={arguments.sequences}', '--lr_schedule=constant',
        f'--max_iters={arguments.steps}', '--warmup_iters=0', f'--learning_rate={RATES[part]}', '--weight_decay=0',
        f'--seed={SEED}', f'--dtype={dtype}', '--eval_sequences=0', '--log_interval=1', '--keep_checkpoints=0',
        '--checkpoint_interval=0', f'--out_dir={folder}/ours', '--device=cpu', '--resume=never',
        *([f'--lora_rank={RANK}', f'--lora_alpha={RANK}'] if part == 'lora' else []),
    )  # fmt: skip
    measured = f'import resource, subprocess, sys; code = subprocess.run({command!r}).returncode; '
    measured += 'print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024); sys.exit(code)'
    result = subprocess.run([sys.executable, '-c', measured], env=environment(threads), capture_output=True, text=True)
    if result.returncode:
        sys.exit(result.stderr)
    rows = [row for row in metrics(f'{folder}/ours') if 'loss' in row]
    tokens = arguments.sequences * arguments.block_size
    return {
        'loss': [row['loss'] for row in rows],
        'norm': [row['grad_norm'] for row in rows],
        'seconds': [tokens / row['tokens_per_sec'] for row in rows],
        'peak_mb': float(result.stdout.split()[-1]),
    }


def train_theirs(arguments, way, part, dtype, threads, folder):
    from benchmarks.runs import environment

    command = [arguments.trl_python, __file__, '--worker', arguments.init_from, f'{folder}/work.pt', way, part, dtype]
    result = subprocess.run(
        [*command, f'{folder}/theirs.json'],
        env=environment(threads, HF_HUB_OFFLINE='1'),
        capture_output=True,
        text=True,
    )
    if result.returncode:
        sys.exit(result.stderr)
    return json.loads(Path(folder, 'theirs.json').read_text())


def apart(ours, theirs):
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--init_from', required=True, help='a Hugging Face folder')
    parser.add_argument('--dataset', required=True, help='conversations that prepare_data.py has made, in data_dir')
    parser.add_argument('--data_dir', default='data')
    parser.add_argument('--trl_python', required=True, help='the python of an environment with trl and peft')
    parser.add_argument('--block_size', type=int, default=512)
    parser.add_argument('--sequences', type=int, default=2, help='of a batch, which is a step')
    parser.add_argument('--steps', type=int, default=20)
    parser.add_argument('--rounds', type=int, default=2)
    parser.add_argument('--threads', type=int, nargs='+', default=[1, 2])
    parser.add_argument('--parts', nargs='+', choices=('full', 'lora'), default=['full', 'lora'])
    parser.add_argument('--dtypes', nargs='+', choices=('float32', 'bfloat16'), default=['float32', 'bfloat16'])
    parser.add_argument('--ways', nargs='+', choices=('packed', 'padded'), default=['packed', 'padded'])
    arguments = parser.parse_args()
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    for part, dtype, threads in itertools.product(arguments.parts, arguments.dtypes, arguments.threads):
        found = {way: [] for way in ('ours', *arguments.ways)}
        for number in range(arguments.rounds):
            for way in [*found][:: -1 if number % 2 else 1]:
                with tempfile.TemporaryDirectory() as folder:
                    tokens = write_work(arguments, part, f'{folder}/work.pt')
                    if way == 'ours':
                        run = train_ours(arguments, part, dtype, threads, folder)
                    else:
                        run = train_theirs(arguments, way, part, dtype, threads, folder)
                rates = [n / s for n, s in zip(tokens, run['seconds'], strict=True)][2:]
                found[way].append(run | {'rate': statistics.median(rates)})
        ours = found.pop('ours')
        print(f'{part}, {dtype}, {threads} threads: ours {rate_of(ours)}', flush=True)
        for way, theirs in found.items():
            ratios = sorted(a['rate'] / b['rate'] for a, b in zip(ours, theirs, strict=True))
            print(
                f'    TRL {way}: {rate_of(theirs)}; ours is {statistics.median(ratios):.2f}x as fast '
                f'({ratios[0]:.2f} to {ratios[-1]:.2f}), '
                f'losses within {apart(ours[0]["loss"], theirs[0]["loss"]):.1e}, '
                f'gradient norms within {apart(ours[0]["norm"], theirs[0]["norm"]):.1e}',
                flush=True,
            )


def rate_of(runs):
    peak = max(run['peak_mb'] for run in runs) / 1000
    return f'{statistics.median(run["rate"] for run in runs):.0f} tokens/s, peak {peak:.1f} GB'


if __name__ == '__main__':
    if sys.argv[1:2] == ['--worker']:
        train_with_trl(*sys.argv[2:])
    else:
        main()
