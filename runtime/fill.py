"""
Gives a value to every key that is None or follows from others, one topic after the other, and checks that all keys fit
together. What the ranks divide among them (layout.py) is found here.

    fill_in(run, ranks)    # run.config is final, run.layout and run.model_config are known
"""

import contextlib
import math
import os
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import optim
from conditions import DANA, without_effect
from layout import Layout, choose_sizes
from model import ModelConfig
from planning import checks
from runtime import best, checkpoint
from system import devices, processes, stopping


def fill_in(run, ranks):
    """
    Fill in every key that is None or follows from others, one topic after the other, and check that they fit together.

    ranks: how many share a global batch. Each step adds what it derived to run.notes. Raises ValueError if keys
    contradict each other or the data.
    """
    fill_layout(run, ranks)
    fill_data(run)
    fill_length(run)
    fill_rates(run)
    plan_data(run)
    fill_model(run)
    fill_compile(run)
    run.notes += checks.check(vars(run.config), run.layout, run.shape)
    best.check_keys(vars(run.config))
    check_effects(run)


def check_effects(run):
    """Note which keys were set and are not read. The conditions are in keys.py."""
    config, pretrained = run.config, None if run.config.native else run.pretrained
    facts = {'transformers': pretrained is not None, 'has_dropout': pretrained and pretrained.has_dropout}
    facts |= {'is_chat': run.train_data.is_chat, 'ends_at_s': None}
    if {'router_aux', 'router_z'} & {*run.explicit}:
        facts['has_routers'] = pretrained and run.strategy != 'deepspeed' and pretrained.has_routers
    if 'stop_before_end_s' in run.explicit:
        facts['ends_at_s'] = stopping.end_of_slurm_job()
    run.notes += without_effect(Path(sys.argv[0]).resolve().name, config, run.explicit, run.typed, **facts)


def fill_layout(run, ranks):
    """How the ranks divide the work. The global batch is fixed; the number of ranks decides only how many micro-steps
    each of them needs for its share."""
    config = run.config
    kept = None if config.global_batch_size else batch_of_run(config.out_dir)
    choose_sizes(config, run.strategy, ranks, processes.local_world_size(), kept)
    if kept:
        run.notes.append(f'global_batch_size={kept}, which nobody set, is that of the run in {config.out_dir}')
    run.layout = Layout.of(vars(config), run.strategy, ranks)
    if run.learns_from != 'prompts':  # of which each step has another number
        line = run.layout.batch_line(config.batch_size, config.block_size)
        run.notes.append(line + (', padding included' if run.train_data.is_packed else ''))
    if config.eval_iters is not None:
        config.eval_sequences = config.eval_iters * config.global_batch_size
        run.notes.append(
            f'eval_iters={config.eval_iters} counts global batches: --eval_sequences={config.eval_sequences} is as '
            'much, and the same text at any batch size'
        )


def batch_of_run(out_dir):
    """The global batch of the run that out_dir holds, or None. Where it followed from the ranks, it is no wish of the
    user's that it change with them."""
    for path in checkpoint.checkpoints_in(os.path.join(out_dir, 'checkpoints')):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # damaged, which is said later
            return max(0, int(checkpoint.read_state(path)['identity']['global_batch_size']))
    return None


def fill_compile(run):
    config = run.config
    model = run.model_config
    if config.compile and (model.n_experts if model else run.pretrained.has_lora_of_experts):
        exchanges = run.layout.expert > 1  # sizes depend on the routing, so torch.compile cannot know them
        is_grouped = config.device.startswith('cuda') and config.dtype == 'bfloat16'  # one kernel for all experts
        if exchanges or not is_grouped:
            config.compile = False
            where = 'without expert_parallel' if exchanges else 'in bfloat16 on a GPU'
            run.notes.append(f'compile: experts are compiled {where} alone: the run goes on uncompiled')
    compiled_for = {config.device}
    offload = vars(config).get('cpu_offload', 'none')
    updates_on_host = offload == 'params' or (offload == 'optimizer' and run.strategy == 'deepspeed')
    is_fused = config.optimizer in ('adamw', 'sgd') and config.optimizer_dtype == 'float32'  # torch's own: not compiled
    if updates_on_host and not is_fused:
        compiled_for.add('cpu')
    is_elsewhere = vars(config).get('gpu') and config.dry_run
    if config.compile and not is_elsewhere and not all(map(devices.has_compiler, compiled_for)):
        config.compile = False
        run.notes.append(
            'compile: no C compiler is found (CXX or g++ for what a CPU computes, CC or gcc for a GPU): '
            'the run goes on uncompiled'
        )
    if config.compile:
        run.notes.append(
            'compile: the first step takes a minute or more, and so does the first evaluation; if this machine has '
            'compiled the same before, some seconds'
        )


def fill_data(run):
    """Keys that follow from the datasets: the vocabulary, and whether a sequence holds several documents."""
    config, train_data, pretrained = run.config, run.train_data, run.pretrained
    config.vocab_size = config.vocab_size or train_data.vocab_size
    config.packed = train_data.has_starts
    config.chats = vars(config).get('chats', False) or bool(vars(config).get('prompts_chat'))
    if train_data.is_chat:
        from text.conversations import templates_of

        config.chats |= bool(pretrained or any(map(templates_of, run.language_folders)))
    if run.learns_from == 'pairs':
        config.windows = 'documents'  # each is one, and begins behind the end of another
    one = 'pair' if run.learns_from == 'pairs' else 'conversation'
    if train_data.is_chat and not (pretrained or run.start):
        raise ValueError(
            f'dataset={config.dataset} holds {one}s, for a model that knows language: give its --init_from'
        )
    longest = max(source.longest for source in train_data.sources)
    if longest > config.block_size + 1:
        whole = longest - 1  # the last token is only ever a target
        most = min(whole, (pretrained and pretrained.positions) or whole)
        wider = f'; the model has positions for --block_size={most}' if most > config.block_size else ''
        if most < whole:
            wider = wider or ', all positions that the model has'
            run.notes.append(f'the longest {one} needs {whole:,} tokens, block_size is {config.block_size:,}{wider}')
        else:
            run.notes.append(
                f'--block_size={most} {"holds every pair" if one == "pair" else "keeps every conversation whole"}'
            )
    refuse_padding_that_counts(run)
    if train_data.is_packed and not config.packing:
        run.notes.append(line_of_padding(run, longest))


def refuse_padding_that_counts(run):
    """Raise ValueError if each document would have a row of its own, and its padding would rotate it in another way."""
    config, turning_point = run.config, run.pretrained.turning_point if run.pretrained else math.inf
    has_padding = run.train_data.is_packed or run.learns_from == 'prompts'
    if has_padding and not config.packing and config.block_size > turning_point:
        raise ValueError(
            f'packing=False with block_size={config.block_size}: {run.pretrained.arch} (LongRoPE) takes padding for '
            f'text, and has other frequencies for more than {turning_point:,} tokens: leave packing out, or use '
            f'--block_size={turning_point}'
        )


def line_of_padding(run, longest):
    """Why each document has a row of its own, and what that costs. longest: tokens of the longest conversation."""
    sources, block_size = run.train_data.sources, run.config.block_size
    rows = sum(source.n_windows for source in sources)
    tokens = sum((1 - source.padding) * source.n_windows for source in sources) * block_size
    packed = sum(source.count_packed() for source in sources)  # two conversations of 0.6 block_size share no row
    reason = f' ({run.pretrained.arch} would let them see each other)' if 'packing' not in run.explicit else ''
    line = (
        f'packing=False: one conversation or document a sequence{reason}, {rows:,} sequences, of which '
        f'{1 - tokens / (rows * block_size):.0%} is padding without loss: '
        f'{rows / packed:.1f} times the work of packed ones'
    )
    if 0 < longest - 1 < block_size:
        times = rows * (longest - 1) / (packed * block_size)
        line += f', and {times:.1f} times with --block_size={longest - 1}, the longest'
    return line


def fill_length(run):
    """Derive max_iters from num_epochs. A max_iters on the command line wins, and any over the script's default."""
    config, train_data = run.config, run.train_data
    is_default = 'num_epochs' not in run.explicit
    if config.num_epochs is None or (is_default and ('max_iters' in run.explicit or config.eval_only)):
        return
    if run.explicit.get('max_iters') == 'command line':
        run.notes.append(
            f'num_epochs={config.num_epochs} is overridden by max_iters={config.max_iters} on the command line'
        )
    elif len(train_data.sources) > 1:
        raise ValueError(
            f'num_epochs={config.num_epochs}: sources of a mixture have epochs of their own; use --max_iters'
        )
    elif math.isinf(train_data.n_windows):
        raise ValueError(
            f'num_epochs={config.num_epochs}: dataset={config.dataset} is not on this machine, and its name does not '
            'say how many tokens it has: give --max_iters'
        )
    else:
        config.max_iters = iterations_of_epochs(config.num_epochs, train_data.n_windows, config.global_batch_size)
        if config.dataset == 'synthetic':
            run.notes.append(
                f'num_epochs={config.num_epochs} counts passes over the {train_data.n_tokens:,} random tokens of '
                'dataset=synthetic; the schedule of your own data needs --dataset=NAME, or --max_iters'
            )


def iterations_of_epochs(num_epochs, n_windows, global_batch_size):
    """Optimizer steps for num_epochs passes over n_windows sequences."""
    return math.ceil(Fraction(str(num_epochs)) * n_windows / global_batch_size)  # in floats 0.07 * 100 is above 7


def fill_rates(run):
    """Fill in wd_ts and the weight decay that follows from it, and with `heads` the sizes and rates of the published
    rules; then the end of the learning rate's schedule and its lowest value."""
    config, explicit = run.config, run.explicit
    if config.arch == 'gpt2' and config.rope_theta and 'rope_theta' in explicit and not run.pretrained:
        raise ValueError(f'rope_theta={config.rope_theta:g} with arch=gpt2, whose positions are learned: leave it out')
    kept = explicit if config.num_epochs is None else {**explicit, 'max_iters': explicit.get('num_epochs')}
    if config.heads is not None or config.optimizer in (*DANA, 'adamw-decay'):
        from planning import rules  # here, since they fill in nothing for other runs

        filled, notes = rules.fill_from_heads(vars(config), kept)
        vars(config).update(filled)
        run.notes += notes
    run.notes += cautions(vars(config), run.train_data.n_windows)
    if run.pretrained and 'learning_rate' not in explicit and not config.eval_only:
        rate = config.learning_rate
        if run.learns_from == 'text':
            usual = '0.0002, as is usual for LoRA' if config.lora_rank else '1e-05, as is usual for all weights'
            run.notes.append(
                f'WARNING: learning_rate={rate:g} is meant for training from scratch, and makes a model forget what it '
                f'knows: try --learning_rate={usual}'
            )
        elif config.lora_rank:  # the scripts' own default
            run.notes.append(
                f'WARNING: learning_rate={rate:g} is meant for all weights: try --learning_rate={10 * rate:g}, as is '
                'usual for LoRA'
            )
    config.lr_decay_iters = config.lr_decay_iters or config.max_iters
    if config.min_lr is None:
        config.min_lr = config.learning_rate / 10
    if not config.eval_only:
        run.notes += check_schedule(vars(config))


def check_schedule(keys):
    """
    Warnings for the log about keys of the schedule that are legal one by one and contradict each other.

    Raises ValueError if the rate would never reach its peak although there are steps enough.
    """
    warmup, end, max_iters = keys['warmup_iters'], keys['lr_decay_iters'], keys['max_iters']
    schedule, min_lr, lines = keys['lr_schedule'], keys['min_lr'], []
    rates, to_the_end = SimpleNamespace(**keys), '; --lr_decay_iters=None decays to the end'
    optim.learning_rate_at(0, rates)  # raises if min_lr is above the peak
    if warmup >= max_iters:
        lines.append(
            f'warmup_iters={warmup} of max_iters={max_iters} steps: the learning rate never reaches its peak; try '
            f'--warmup_iters={max_iters // 10}'
        )
    elif schedule == 'constant':
        pass
    elif end <= warmup:
        last = optim.learning_rate_at(warmup - 1, rates)
        raise ValueError(
            f'lr_decay_iters={end} is not beyond warmup_iters={warmup}: the learning rate would fall from {last:.2e} '
            f'to min_lr={min_lr:.2e} at step {warmup}, and never reach its peak: use --lr_decay_iters={max_iters}, or '
            f'--warmup_iters below {end}'
        )
    elif min_lr == 0 and end < max_iters:
        lines.append(f'min_lr=0 from lr_decay_iters={end} to max_iters={max_iters}: nothing is learned{to_the_end}')
    elif end < max_iters:
        lines.append(
            f'lr_decay_iters={end} of max_iters={max_iters} steps: the others train at min_lr={min_lr:.2e}{to_the_end}'
        )
    elif end > max_iters:
        last = optim.learning_rate_at(max_iters - 1, rates)
        lines.append(
            f'lr_decay_iters={end} is beyond max_iters={max_iters}: the run ends at a learning rate of {last:.2e}, '
            f'above min_lr={min_lr:.2e}{to_the_end}'
        )
    decay_start = int((1 - optim.WSD_DECAY_FRACTION) * end)
    if schedule == 'wsd' and decay_start < warmup < end:
        lines.append(
            f'warmup_iters={warmup} of lr_decay_iters={end} steps leaves the schedule wsd no stable phase, and '
            f'{end - warmup} steps of decay in place of {end - decay_start}; try --warmup_iters={end // 10}'
        )
    if keys['optimizer'] in (*DANA, 'adamw-decay') and keys['wd_ts'] > max_iters:
        lines.append(
            f'wd_ts={keys["wd_ts"]} of max_iters={max_iters} steps: the weight decay does not even halve; try '
            f'--wd_ts={max(1, max_iters // 10)}'
        )
    return [f'WARNING: {line}' for line in lines]


def cautions(keys, n_windows):
    """
    Warnings for the log about settings that are legal but probably a mistake. n_windows: sequences in the training
    data. Raises ValueError for settings that are not legal.
    """
    if keys['eval_only'] and keys['eval_sequences'] == 0:
        raise ValueError('eval_sequences=0 with eval_only=True: expected 1 or more')
    trace_step, max_iters = keys['trace_step'], keys['max_iters']
    lines = []
    if trace_step > max_iters:
        lines.append(f'WARNING: trace_step={trace_step} of max_iters={max_iters} steps: nothing is recorded')
    if keys.get('patience') and keys['patience'] * keys['eval_interval'] >= max_iters:
        lines.append(
            f'WARNING: patience={keys["patience"]} evaluations, one every eval_interval={keys["eval_interval"]} steps, '
            f'are more than max_iters={max_iters} steps have: the run never ends early'
        )
    if keys.get('n_experts') and keys['experts_per_token'] == 1 and keys.get('router_normalize'):
        lines.append(
            "WARNING: experts_per_token=1 with router_normalize=True: the weight of a token's expert is always 1, so "
            'the loss teaches the router nothing: use --router_normalize=False'
        )
    if keys['trace_memory'] and not keys['device'].startswith('cuda'):
        lines.append(f'WARNING: trace_memory=True with device={keys["device"]}: only CUDA records who holds memory')
    if keys['global_batch_size'] > n_windows:
        given = (
            f'global_batch_size={keys["global_batch_size"]} is more than the {n_windows} sequences of the training data'
        )
        if 'prompts' in keys:
            prompts = n_windows // keys['num_generations']
            given = f'prompts_per_step={keys["prompts_per_step"]} is more than the {prompts} prompts'
        lines.append(f'WARNING: {given}: each step repeats them')
    return lines


def plan_data(run):
    """Compute at which sequence each stage of a mixture begins, which depends on the run's length."""
    config = run.config
    for split in run.splits.values():
        split.plan(config.max_iters, config.global_batch_size)
    run.notes += run.train_data.lines()


def fill_model(run):
    """Replace sizes that are None by the architecture's defaults, and copy all of the model's keys into config."""
    config = run.config
    if config.native:
        from huggingface import native

        factors = {'router_aux': run.pretrained.router_aux, 'router_z': run.pretrained.router_z}  # 0 unless given
        run.model_config = replace(native.model_config_of(run.pretrained), **factors)
    elif not run.pretrained:
        run.model_config = ModelConfig.from_keys(vars(config))
    vars(config).update(run.shape.to_dict())
    if config.native:  # keep what the user asked for: Pretrained.from_run() derives the rest from it again
        config.rope_theta, config.yarn = run.pretrained.rope_theta, run.pretrained.yarn
