"""
How fast is train_dpo.py beside TRL's DPOTrainer? Both start from the same weights and see the same pairs.

    python -m venv peer && peer/bin/pip install torch==2.13.0 trl==1.16.0
    python benchmarks/dpo_beside_trl.py --init_from=real/smollm2 --trl_python=peer/bin/python

The pairs are made of random words: prompts of 20 to 60, answers of 20 to 120. TRL knows the log-probabilities of the
reference before the first step, as ours does (precompute_ref_log_probs), so neither has a second model in its steps.
Both have fp32 weights, autocast for bfloat16, AdamW and no recomputation. A step of TRL is 4 pairs, with a row for each
answer that is padded to the longest of the 8. Ours is a sequence of 1,024 tokens that holds 4 pairs or so (`packed`),
or 4 sequences of 512 tokens with a pair each.
Every other round goes through them in reverse order; a ratio is taken within a round. Tokens are those of both answers
with their prompts, without padding; a run's tokens/s are those of its mean step in the median of the seconds that its
steps took, without the first two. With --cpu_time these are seconds of the CPU, which other work on the machine does
not use up; they add up over threads, so take --threads=1.
"""

import argparse
import json
import os
import random
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = 'time year people way day man thing woman life child world school state family student group country problem'
SEED, RATE, PAIRS = 1337, 1e-6, 4  # of a step
WAYS = {
    'packed': ['--batch_size=1', '--block_size=1024'],
    'padded': ['--packing=False', f'--batch_size={PAIRS}', '--block_size=512'],
}


def rows_of_words(n):
    draw, words = random.Random(SEED), WORDS.split()

    def text(least, most):
        return ' '.join(draw.choices(words, k=draw.randint(least, most)))

    return [{'prompt': text(20, 60), 'chosen': text(20, 120), 'rejected': text(20, 120)} for _ in range(n)]


def count_cpu_time():
    """From here on perf_counter() of this process counts seconds of the CPU; those of the data's thread are few."""
    time.perf_counter = time.process_time


def train_with_trl(folder, rows, steps, dtype, out):
    """In TRL's environment: writes the seconds of each step to the file `out`."""
    import datasets
    import transformers
    from trl import DPOConfig, DPOTrainer

    chats = [
        {
            'prompt': [{'role': 'user', 'content': row['prompt']}],
            'chosen': [{'role': 'assistant', 'content': row['chosen']}],
            'rejected': [{'role': 'assistant', 'content': row['rejected']}],
        }
        for row in map(json.loads, Path(rows).read_text().splitlines())
    ]
    seconds, began = [], [0.0]

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            began[0] = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            seconds.append(time.perf_counter() - began[0])

    config = DPOConfig(
        output_dir=f'{out}.files', max_steps=int(steps), per_device_train_batch_size=PAIRS, learning_rate=RATE,
        lr_scheduler_type='constant', weight_decay=0.0, logging_steps=1, report_to=[], use_cpu=True,
        bf16=dtype == 'bfloat16', save_strategy='no', disable_tqdm=True, gradient_checkpointing=False,
        precompute_ref_log_probs=True, optim='adamw_torch_fused', dataloader_pin_memory=False, max_length=None,
    )  # fmt: skip
    DPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder, dtype='float32'), args=config,
        train_dataset=datasets.Dataset.from_list(chats), callbacks=[Clock()],
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    ).train()  # fmt: skip
    Path(out).write_text(json.dumps(seconds))


def run(command, threads):
    from benchmarks.runs import environment

    result = subprocess.run(command, env=environment(threads, HF_HUB_OFFLINE='1'), capture_output=True, text=True)
    if result.returncode:
        sys.exit(result.stdout[-2000:] + result.stderr[-2000:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--init_from', required=True, help='a Hugging Face folder')
    parser.add_argument('--trl_python', required=True, help='the python of an environment with trl')
    parser.add_argument('--steps', type=int, default=10, help='of TRL; ours has about as many, over the same pairs')
    parser.add_argument('--rounds', type=int, default=2)
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--cpu_time', action='store_true', help='count seconds of the CPU')
    parser.add_argument('--dtypes', nargs='+', choices=('float32', 'bfloat16'), default=['float32', 'bfloat16'])
    parser.add_argument('--ways', nargs='+', choices=WAYS, default=['packed'])
    arguments = parser.parse_args()
    repo = Path(__file__).resolve().parent.parent
    sys.path.insert(0, str(repo))
    from benchmarks.runs import command_of, metrics

    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, 'pairs.jsonl')
        rows.write_text(''.join(json.dumps(row) + '\n' for row in rows_of_words(PAIRS * arguments.steps)))
        data = [f'--dataset={rows}', '--name=pairs', f'--data_dir={folder}/data', '--val_fraction=0', '--num_proc=1']
        run([sys.executable, str(repo / 'prepare_data.py'), '--pairs', *data, f'--tokenizer={arguments.init_from}'], 1)
        meta = json.loads(Path(folder, 'data/pairs/meta.json').read_text())
        tokens = meta['splits']['train']['tokens']
        cpu_time = ['--cpu_time'] if arguments.cpu_time else []
        ours = command_of(
            __file__, *cpu_time, '--ours', f'--init_from={arguments.init_from}', '--dataset=pairs',
            f'--data_dir={folder}/data',
            '--num_epochs=1', f'--learning_rate={RATE}', '--lr_schedule=constant', '--warmup_iters=0',
            '--weight_decay=0', '--eval_sequences=0', '--log_interval=1', '--keep_checkpoints=0',
            '--device=cpu', f'--out_dir={folder}/ours', '--resume=never',
        )  # fmt: skip
        for dtype in arguments.dtypes:
            rates = {name: [] for name in (*arguments.ways, 'TRL')}
            for number in range(arguments.rounds):
                for name in [*rates][:: -1 if number % 2 else 1]:
                    if name == 'TRL':
                        worker = [arguments.trl_python, __file__, *cpu_time, '--trl', arguments.init_from, str(rows)]
                        run([*worker, str(arguments.steps), dtype, f'{folder}/theirs.json'], arguments.threads)
                        seconds = json.loads(Path(folder, 'theirs.json').read_text())
                    else:
                        run(['rm', '-rf', f'{folder}/ours'], 1)
                        run([*ours, *WAYS[name], f'--dtype={dtype}'], arguments.threads)
                        seconds = [row['time/total'] / 1000 for row in metrics(f'{folder}/ours') if 'loss' in row]
                    rates[name].append(tokens / len(seconds) / statistics.median(seconds[2:]))
            theirs = rates.pop('TRL')
            print(f'{dtype}, {arguments.threads} threads: TRL {statistics.median(theirs):.0f} tokens/s', flush=True)
            for name, found in rates.items():
                ratios = sorted(a / b for a, b in zip(found, theirs, strict=True))
                print(
                    f'    ours {name}: {statistics.median(found):.0f} tokens/s, {statistics.median(ratios):.2f}x '
                    f'({ratios[0]:.2f} to {ratios[-1]:.2f})',
                    flush=True,
                )


if __name__ == '__main__':
    if sys.argv[1:3] in (['--cpu_time', '--trl'], ['--cpu_time', '--ours']):
        count_cpu_time()
        del sys.argv[1]
    if sys.argv[1:2] == ['--trl']:
        train_with_trl(*sys.argv[2:])
    elif sys.argv[1:2] == ['--ours']:
        script = str(Path(__file__).resolve().parent.parent / 'train_dpo.py')
        sys.argv[:2], sys.path[0] = [script], os.path.dirname(script)
        runpy.run_path(script, run_name='__main__')
    else:
        sys.exit(main())
