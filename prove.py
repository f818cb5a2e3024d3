"""
Is my parallel training correct? Trains a few steps in one process, in float64 and in fp32, and then under every layout
of some ranks, and compares the gradient of each parameter, the clipping norm, the losses and the update.

    python prove.py config/quickstart.py --nproc=2,4        # its model, made small, under every layout of 2 and 4 ranks
    python prove.py config/moe_quickstart.py --nproc=4 --layouts=experts,context  # some of them
    python prove.py config/sft_chat.py --init_from=models/tiny --lora_rank=8          # and keys of the train scripts
    python prove.py config/quickstart.py --as_is            # the model as large as it is; on GPUs where there are any

A layout is right if nothing is further from float64 than 4 times what one process in fp32 is. Where something is wrong,
a line per kind of parameter says by how much and, if the numbers show it, why. Losses would not show most of this:
docs/prove.md. Exit code: 0 all right, 1 something is wrong, 2 something could not be run.

For training code of your own, FSDP2, DTensor or a library's: `from proving.check import check`.
"""

import sys
from typing import Literal

from configurator import configure


# --- KNOBS ------------------------------------------------------------------------------------------------------------
class Config:
    nproc = [2]  # ranks: one number, or several, such as 2,4; more than there are cores only take longer [>= 2]
    layouts = []  # only these; what is no layout's name stands for all that begin so: ddp,context; [] = all
    as_is = False  # the model as the config has it; False = as narrow and as shallow as layouts allow
    steps = 3  # optimizer steps [>= 2]
    learns_from: Literal['text', 'pairs', 'prompts'] | None = None  # None = by the config's keys; pairs: train_dpo.py
    output = 'out/prove.json'  # the verdicts as a file [path]


# ----------------------------------------------------------------------------------------------------------------------
_train_keys = {}  # keys of the train scripts, from config files and the command line
if __name__ == '__main__':
    config, explicit = configure(Config, pass_on=_train_keys)

import dataclasses
import importlib.util
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # noqa: F401  as what follows, so that not each rank of each layout has to

import expert_manual  # noqa: F401
import fsdp  # noqa: F401
import pipeline_manual  # noqa: F401
import tensor_manual  # noqa: F401
from dataset.shards import FIRST, LEARNED, write_shard
from knobs import read_knobs
from proving.judge import KINDS, Verdict, judge
from proving.precision import error
from proving.ranks import RankFailed, run_ranks
from proving.scripts import MARGIN, note_script
from runtime import begin  # noqa: F401
from system import errors
from system.files import ROOT, write_file

# --- THE RUN ----------------------------------------------------------------------------------------------------------
# A model in which every layout has something to do on 4 ranks.
SMALL = {'heads': None, 'n_layer': 4, 'n_head': 8, 'head_dim': None, 'n_embd': 64, 'mlp_hidden_dim': 88}
SMALL |= {'block_size': 32, 'vocab_size': 257}
SMALL_EXPERTS = {'expert_hidden_dim': 24}
SMALL_PROMPTS = {'prompts_per_step': 8, 'num_generations': 4, 'max_new_tokens': 8}
# fp32, because rounding to 8 bits would hide what is to be seen; no noise; clipping that takes effect.
RUN = {'dtype': 'float32', 'compile': False, 'dropout': 0.0, 'lora_dropout': 0.0, 'grad_clip': 0.1}
RUN |= {'learning_rate': 1e-3, 'lr_schedule': 'constant', 'warmup_iters': 0, 'num_epochs': None, 'windows': 'documents'}
RUN |= {'eval_interval': 0, 'eval_sequences': 0, 'eval_iters': None, 'eval_tasks': (), 'log_interval': 1}
RUN |= {'checkpoint_interval': 0, 'permanent_interval': 0, 'keep_checkpoints': 0, 'keep_best': False, 'patience': 0}
RUN |= {'wandb_log': False, 'resume': 'never', 'packing': None, 'dataset_stages': (), 'val_dataset': None}
SCRIPTS = {'text': 'train_ddp.py', 'pairs': 'train_dpo.py', 'prompts': 'train_grpo.py'}
LEARNS_FROM = {'prompts': 'prompts', 'beta': 'pairs', 'loss_type': 'pairs', 'sft_weight': 'pairs'}  # keys of its config
# One process in fp32 is 1e-6 from float64, in bfloat16 0.005: one this far away does not compute the same.
UNSTABLE = {'float32': 1e-3, 'bfloat16': 0.03, 'float16': 0.03}


def layouts(ranks, learns_from):
    """{name: (script, keys)}: all layouts that the scripts have on so many ranks. What a model does not allow, they
    refuse themselves."""
    script = {'text': 'train_fsdp.py'}.get(learns_from, SCRIPTS[learns_from])
    by_strategy = {} if learns_from == 'text' else {'strategy': 'fsdp'}
    manual = {'fsdp_impl': 'manual'} | ({'zero_stage': 2} if learns_from == 'prompts' else {})
    sharded = {'fsdp': {}, 'fsdp zero 2': {'zero_stage': 2}, 'fsdp sharded sums': {'accumulate': 'sharded'}}
    sharded |= {'fsdp offload': {'cpu_offload': 'params'}}
    sharded |= {f'manual zero {stage}': manual | {'zero_stage': stage} for stage in (3, 2, 1)}
    sharded |= {'manual sharded sums': manual | {'accumulate': 'sharded'}}
    sharded |= {'manual offload': manual | {'cpu_offload': 'params'}}
    if ranks > 2 and ranks % 2 == 0:
        sharded |= {'fsdp hsdp': {'replicate_size': 2}, 'manual hsdp': manual | {'replicate_size': 2}}
    found = {'ddp': (SCRIPTS[learns_from], {})}
    found |= {name: (script, keys | by_strategy) for name, keys in sharded.items()}
    if learns_from != 'text':
        return found
    parallel, pipeline = 'train_parallel.py', 'train_pipeline.py'
    for size in (size for size in range(2, ranks + 1) if ranks % size == 0):
        found[f'context {size} ring'] = parallel, {'context_parallel': size}
        found[f'context {size} gather'] = parallel, manual | {'context_parallel': size, 'context_impl': 'gather'}
        for axis, key in (('tensor', 'tensor_parallel'), ('experts', 'expert_parallel')):
            found[f'{axis} {size}'] = parallel, {key: size}
            found[f'{axis} {size} manual'] = parallel, manual | {key: size}
        found[f'pipeline {size}'] = pipeline, {'pipeline_stages': size}
    found['pipeline 2 chunks'] = pipeline, {'pipeline_stages': 2, 'pipeline_chunks': 2}
    if ranks % 4 == 0:
        found['tensor 2 x context 2'] = parallel, manual | {'tensor_parallel': 2, 'context_parallel': 2}
        found['tensor 2 x hsdp'] = parallel, {'tensor_parallel': 2, 'replicate_size': 2}
        found['pipeline 2 x tensor 2'] = pipeline, {'pipeline_stages': 2, 'tensor_parallel': 2}
        found['experts 2 x context 2'] = parallel, {'expert_parallel': 2, 'context_parallel': 2}
        found['experts 2 x hsdp'] = parallel, manual | {'expert_parallel': 2, 'replicate_size': 2}
    found['diloco'] = 'train_diloco.py', {'num_replicas': ranks}  # the inner steps of each replica
    if importlib.util.find_spec('deepspeed'):
        found |= {f'deepspeed {stage}': ('train_deepspeed.py', {'zero_stage': stage}) for stage in (1, 2, 3)}
    return found


def keys_of_runs(train_keys, explicit, config, learns_from):
    """The keys that all runs have. A key of the command line wins over what this script sets."""
    keys = dict(train_keys)
    if not config.as_is:
        keys |= SMALL_PROMPTS if learns_from == 'prompts' else {}
        if keys.get('init_from', 'scratch') == 'scratch':
            keys |= SMALL | ({'n_kv_head': 4} if keys.get('arch') in ('llama', 'qwen3') else {})
            keys |= SMALL_EXPERTS if keys.get('n_experts') else {}
            keys |= {'dense_layers': 1} if keys.get('dense_layers') else {}
            keys |= {'shared_expert_dim': 40} if keys.get('shared_expert_dim') else {}
            keys |= {'window_size': 9} if keys.get('window_pattern') else {}
        else:
            keys |= {'block_size': SMALL['block_size']} if learns_from != 'prompts' else {}
    keys |= RUN | {'max_iters': config.steps, 'inner_steps': config.steps}
    return keys | {key: train_keys[key] for key in explicit if key in train_keys}


def make_data(folder, pairs, block_size):
    """Write a dataset as prepare_data.py does: documents of random tokens, or pairs of answers. Documents do not fill
    their windows, so that each sequence has another number of targets: if all had the same, a mean over the ranks'
    means would be right, too."""
    draw, tokens, mask = np.random.default_rng(0), [], []
    shortest, longest = (4, block_size // 2) if pairs else (block_size // 3, block_size)
    for _ in range(200):
        length = int(draw.integers(shortest, longest + 1))
        asked = int(draw.integers(1, length))
        tokens += [*draw.integers(1, 90, length - 1), 0]
        mask += [FIRST, *[0] * (asked - 1), *[LEARNED] * (length - asked)]
    write_shard(folder / 'train_000000.bin', tokens, np.uint16)
    shard, split = {'file': 'train_000000.bin', 'tokens': len(tokens)}, {'tokens': len(tokens)}
    if pairs:
        Path(folder, 'train_000000.mask').write_bytes(bytes(mask))
        shard['mask_file'] = 'train_000000.mask'
        split |= {'learned_tokens': mask.count(LEARNED), 'longest': longest}
    meta = {'vocab_size': 90, 'eot_token': 0, 'masked': pairs, 'pairs': pairs}
    write_file(folder / 'meta.json', json.dumps(meta | {'splits': {'train': split | {'shards': [shard]}}}))


# --- ONE PROCESS, AND RANKS -------------------------------------------------------------------------------------------


def in_groups(record, sequences, ranks, micro_steps):
    """
    The Record of one process with its parts put together for a layout: {(data rank, micro-step): gradients}.

    Each sequence of the global batch is a part of its own. Rank r has the r-th of `ranks` slices, in `micro_steps`.
    """
    parts = {}
    for number, gradients in record.parts.items():
        rank, place = divmod(number, sequences // ranks)
        label = rank, place // (sequences // ranks // micro_steps)
        parts[label] = {name: of + parts.get(label, {}).get(name, 0) for name, of in gradients.items()}
    return dataclasses.replace(record, parts=parts)


def of_replica(record, replica, replicas, targets):
    """What one process would record if it trained alone on a DiLoCo replica's share of the first step."""
    share = len(targets) // replicas
    mine = range(replica * share, (replica + 1) * share)
    scale = sum(targets) / sum(targets[number] for number in mine)
    gradients = {name: scale * sum(record.parts[number][name] for number in mine) for name in record.gradients}
    norm = math.sqrt(sum(of.double().square().sum().item() for of in gradients.values()))
    return dataclasses.replace(record, gradients=gradients, norms=[norm], updates={}, losses=[], parts={})


def records_of(script, keys, ranks, folder, **options):
    """The Records of the ranks of a run."""
    knobs = read_knobs(Path(ROOT, script))
    out = tempfile.mkdtemp(dir=folder)
    keys = {key: value for key, value in keys.items() if key in knobs and value is not None} | {'out_dir': out}
    arguments = [f'--{key}={value}' for key, value in keys.items()]
    try:
        return run_ranks(ranks, lambda rank: note_script(script, arguments, **options), log=f'{out}/console.txt')
    except RankFailed as failed:
        said = Path(out, 'console.txt').read_text(errors='replace')
        if failed.is_refusal and 'error: ' in said:  # by configure(), which prints it
            failed.args = (said.rpartition('error: ')[2].strip().splitlines()[0],)
        raise
    finally:
        shutil.rmtree(out)


class OneProcess:
    """The same run in one process, in fp32 and in float64, each sequence of its first step by itself."""

    def __init__(self, learns_from, keys, folder):
        self.sequences = keys['global_batch_size']
        script, alone = SCRIPTS[learns_from], keys | {'batch_size': 1}
        options = {'in_parts': learns_from != 'prompts', 'answers': keys.get('answers')}
        for seed in range(keys['seed'], keys['seed'] + 20):
            (self.exact,) = records_of(
                script, alone | {'seed': seed, 'dtype': 'float32'}, 1, folder, float64=True, **options
            )
            if self.exact.gap > MARGIN:  # else a router is so near a tie that rounding decides
                break
        self.keys = keys | {'seed': seed}
        (self.one,) = records_of(script, self.keys | {'batch_size': 1}, 1, folder, **options)
        distances = [error(self.one.gradients[name], of) for name, of in self.exact.gradients.items()]
        self.distance = statistics.median(distances)

    def judge(self, records, script, readers, micro_steps):
        """The Verdict on the Records of a layout's ranks, of which so many read different sequences."""
        if script == 'train_diloco.py':
            verdict = Verdict()
            for rank, record in enumerate(records):
                one, exact = (of_replica(of, rank, len(records), self.exact.targets) for of in (self.one, self.exact))
                record = dataclasses.replace(record, norms=record.norms[:1], updates={}, losses=[])
                verdict.add(judge([record], one, exact))
            return verdict
        return judge(records, self.one, in_groups(self.exact, self.sequences, readers, micro_steps))


# --- THE TABLE --------------------------------------------------------------------------------------------------------


def main(config, train_keys, explicit):
    """Judge all layouts, printing a row for each; returns the exit code."""
    began = time.monotonic()
    learns_from = config.learns_from or next((LEARNS_FROM[key] for key in LEARNS_FROM if key in train_keys), 'text')
    if 'teacher' in train_keys:
        raise ValueError(
            'teacher: train_distill.py is not run here, and divides its work as train_grpo.py does: prove '
            'config/grpo_chat.py with its --init_from'
        )
    keys = keys_of_runs(train_keys, explicit, config, learns_from)
    if noise := [key for key in ('dropout', 'lora_dropout') if keys[key]]:
        raise ValueError(f'{noise[0]}={keys[noise[0]]}: each layout draws noise of its own: leave it at 0 here')
    wanted = {ranks: chosen(layouts(ranks, learns_from), config.layouts) for ranks in config.nproc}
    table, codes = [], {0}
    with tempfile.TemporaryDirectory(prefix='prove-') as folder:
        if 'dataset' not in explicit and learns_from != 'prompts' and not config.as_is:
            keys |= {'data_dir': folder, 'dataset': 'random'}
            Path(folder, 'random').mkdir()
            make_data(Path(folder, 'random'), learns_from == 'pairs', keys['block_size'])
        keys |= {'global_batch_size': 4 * math.lcm(*config.nproc), 'seed': keys.get('seed', 1337)}
        if learns_from == 'prompts':
            keys['answers'] = f'{folder}/answers'
        try:
            alone = OneProcess(learns_from, keys, folder)
        except RankFailed as failed:
            trace = '' if failed.is_refusal else failed.text
            print(f'{trace}error: one process: {failed}', file=sys.stderr)
            return 2
        named = f'{len(alone.exact.gradients)} parameters'
        said = f'one process: {named}, whose gradients in {keys["dtype"]} are {alone.distance:.0e} from float64'
        if not alone.exact.norms[0]:
            print('error: one process has no gradient, so there is nothing to compare', file=sys.stderr)
            return 2
        if alone.distance > UNSTABLE[keys['dtype']]:
            print(f'error: {said}: too far to judge others by; does the model draw random numbers?', file=sys.stderr)
            return 2
        print(said, flush=True)
        print(f'{"layout":26}{"ranks":>5}  {"":9}' + ''.join(f'{kind:>9}' for kind in KINDS) + '   s', flush=True)
        for ranks, of_ranks in wanted.items():
            for name, (script, of_layout) in of_ranks.items():
                row = row_of(name, script, ranks, alone, of_layout, folder)
                table.append(row)
                print(*lines_of(row), sep='\n', flush=True)
                codes.add({'ok': 0, 'skipped': 0, 'WRONG': 1, 'failed': 2}[row['verdict']])
    os.makedirs(os.path.dirname(config.output) or '.', exist_ok=True)
    about = {'command': sys.argv, 'torch': torch.__version__, 'keys': alone.keys, 'layouts': table}
    write_file(config.output, json.dumps(about, indent=1, default=str))
    counts = ', '.join(
        f'{sum(row["verdict"] == of for row in table)} {of}' for of in ('ok', 'WRONG', 'skipped', 'failed')
    )
    print(f'{counts} in {time.monotonic() - began:.0f} s; {config.output}')
    return 1 if 1 in codes else max(codes)


def chosen(found, wanted):
    """Those of the layouts that --layouts names. Raises ValueError if there is none."""
    families = tuple(name for name in wanted if name not in found)
    if unknown := [name for name in families if not any(of.startswith(name) for of in found)]:
        raise ValueError(f'layouts={unknown[0]}: expected some of {", ".join(found)}')
    return {name: of for name, of in found.items() if not wanted or name in wanted or name.startswith(families)}


def row_of(name, script, ranks, alone, of_layout, folder):
    """{layout, ranks, verdict, ...} of one layout."""
    began = time.monotonic()
    sharing = math.prod(of_layout.get(key, 1) for key in ('context_parallel', 'tensor_parallel', 'pipeline_stages'))
    readers, stages = ranks // sharing, of_layout.get('pipeline_stages', 1)
    # Each rank has two micro-steps, and a pipeline two for each stage.
    keys = alone.keys | {'batch_size': alone.sequences // readers // stages // 2} | of_layout
    row = {'layout': name, 'ranks': ranks, 'script': script, 'keys': of_layout}
    try:
        records = records_of(script, keys, ranks, folder, answers=keys.get('answers'))
        verdict = alone.judge(records, script, readers, alone.sequences // readers // keys['batch_size'])
        row |= {'verdict': 'ok' if verdict.is_right else 'WRONG', 'worst': verdict.worst, 'lines': verdict.lines()}
        row['findings'] = [finding._asdict() for finding in verdict.findings]
    except RankFailed as failed:
        row |= {'verdict': 'skipped' if failed.is_refusal else 'failed', 'lines': [str(failed)]}
        row |= {} if failed.is_refusal else {'traceback': failed.text}
    return row | {'seconds': time.monotonic() - began}


def lines_of(row):
    """A row of the table, and what is wrong beneath it."""
    first = f'{row["layout"]:26}{row["ranks"]:5}  {row["verdict"]:9}'
    if 'worst' not in row:
        return [first + row['lines'][0]]
    cells = ''.join(f'{row["worst"][kind]:9.2g}' for kind in KINDS)
    return [f'{first}{cells}{row["seconds"]:4.0f}', *(f'    {line}' for line in row['lines'])]


if __name__ == '__main__':
    errors.report_errors(prints_result=True)
    try:
        code = main(config, _train_keys, explicit)
    except Exception as error:  # 1 would say that a layout is wrong
        errors.report(error)
        code = 2
    sys.exit(code)
