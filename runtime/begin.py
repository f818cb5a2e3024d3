"""
Everything that a training script does before the part it teaches, which is the same for every strategy: find out the
rank and its device, fill in the configuration, join the process group, find the checkpoint to resume from, and make the
model with its first weights.

    run = begin(config, explicit, 'fsdp')   # ranks, device, data; from here on every key that was None has a value
    found = run.join()                      # the process group, and this run's checkpoint; --dry_run ends here
    raw_model = make_model(run)             # on the meta device
    ...                                     # shard it
    initialise(raw_model, run)              # first weights, unless a checkpoint will be loaded
    step, state = run.resume(raw_model, opt, scaler)
"""

import contextlib
import json
import os
import sys
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

import data
import float8
import offload
import optim
from configurator import refuse_gone, without_effect
from dataset.mixture import names_in, parse_stages
from dataset.windows import read_meta
from evaluation import in_run
from huggingface import finetune, lora, native
from layout import Layout, Share, choose_sizes
from model import GPT, ModelConfig, pointwise_cross_entropy
from planning import checks, report, rules
from runtime import batches, best, checkpoint, health
from system import collectives, devices, errors, processes, stopping
from text.conversations import templates_of_data
from text.encoding import compare_with_transformers
from text.tokenizer import as_argument, check_same_tokenizer, same_tokenizer


@dataclass
class Run:
    """All that a script knows about its run before it shards the model."""

    config: SimpleNamespace  # every key with its final value
    explicit: dict  # {key: the file that set it, or 'command line'}
    strategy: str  # 'ddp', 'fsdp', ...
    rank: int
    world_size: int
    device: torch.device
    compute_dtype: torch.dtype
    ranks: int  # how many share a global batch: in a pool more than world_size, since other jobs hold replicas, too
    notes: list = field(default_factory=list)  # lines for the log: which values were filled in, and warnings
    pretrained: object = None  # finetune.Pretrained if init_from is a Hugging Face folder, with native=True as well
    start_from: str | None = None  # the checkpoint that gives the first weights, if init_from is a run of this project
    train_data: object = None  # data.Mixture
    val_data: object = None
    model_config: object = None  # a ModelConfig; without native that of a Hugging Face model is `pretrained` itself
    tasks: object = None  # in_run.Evaluation
    layout: Layout | None = None  # how the ranks divide the work
    share: Share = field(default_factory=Share)  # what this rank has of the model; the script says so where it cuts it
    tokens_per_step: int = 0
    identity: dict | None = None  # what a checkpoint must have in common with this run to be resumed
    found: str | None = None  # the checkpoint in out_dir that the run resumes from
    base: dict | None = None  # LoRA: the weights that checkpoints leave out; None = checkpoints hold all weights
    flops_per_token: float = 0.0
    parameter_counts: dict | None = None

    @property
    def on_cuda(self):
        return self.device.type == 'cuda'

    @property
    def home(self):
        """The device where weights and optimizer state live."""
        return torch.device('cpu') if vars(self.config).get('cpu_offload') == 'params' else self.device

    def join(self):
        """Join the process group and find the checkpoint to resume from. With dry_run, print the plan and exit instead.

        Returns the checkpoint's path, or None if the run starts at step 0. From here on out_dir is locked by this job.
        """
        config = self.config
        if config.dry_run:
            if self.rank == 0:
                print(*self.notes, sep='\n')
                print(report.dry_run(vars(config), self.model_config.to_dict(), self.ranks, planned_as(self.strategy)))
            sys.exit()
        frozen = f' ({config.frozen_dtype} where they are not trained)' if config.frozen_dtype else ''
        self.notes.append(
            f'dtypes: weights float32{frozen}, compute {config.dtype}, gradient reduction float32, '
            f'optimizer state {config.optimizer_dtype}'
        )
        make_process_group(config, self.device)  # NCCL between GPUs, gloo on the host
        self.found = find_checkpoint(config, self.pretrained)
        self.base = find_base(config, self.pretrained, self.found)
        self.identity = identity_of(config, self.model_config, self.train_data)
        return self.found

    def resume(self, model, optimizer, scaler):
        """Load the checkpoint that join() found. Returns (step, contents of its state.json), or (0, {}) without one.

        Raises ValueError if the checkpoint belongs to a different run: another model, other data, another optimizer.
        """
        if self.found is None:
            return 0, {}
        self.check_resume(checkpoint.read_state(self.found))
        state = checkpoint.load(self.found, model, optimizer, share=self.share)
        health.resume_loss_scale(scaler, state['scaler'])
        return state['step'], state

    def check_resume(self, state):
        """Raise ValueError if the checkpoint belongs to a different run; note which keys have changed since then."""
        self.notes += check_resume(state, self.config, self.identity, optim.learning_rate_at)


def begin(config, explicit, strategy, ranks=None):
    """
    Everything that needs no communication: find out which rank this is, open the model and the data that the keys name,
    and give a value to each key that is None or follows from others.

    config, explicit: from configure(); config is changed in place, and its values are final when this returns.
    strategy: 'ddp', 'fsdp', ...: which script this is. ranks: how many share a global batch, where that is not the
    world size: in a pool it is jobs x ranks per job.
    From here on a user's mistake ends the run with one line on every rank, and running out of memory with advice.
    """
    errors.report_errors(lambda: report.out_of_memory_advice(vars(config), run.ranks, planned_as(strategy)))
    rank, world_size, device, compute_dtype = start_process(config)
    run = Run(config, explicit, strategy, rank, world_size, device, compute_dtype, ranks or world_size)
    open_model_and_data(run)
    fill_in(run)
    # Read now, so that a mistake in their files shows here.
    run.tasks = in_run.tasks_of(config, run.layout, run.pretrained, device)
    return run


def start_process(config):
    """
    Find out which rank this is and choose its device. Fills in the keys device, dtype and compile.

    Returns (rank, world_size, device, compute_dtype); rank 0 of 1 without torchrun. Raises ValueError if the launcher's
    environment variables are incomplete, or if the GPU asked for does not exist.
    """
    processes.end_with_parent()
    if not config.eval_only:
        stopping.catch_signals()  # from here on they only ask to save and stop, as soon as that is possible
    rank, local_rank, world_size = processes.ranks_from_environment()
    # With dry_run a login node without GPUs may plan for a node that has them.
    device = devices.choose_device(config.device, local_rank, must_exist=not config.dry_run)
    compute_dtype = devices.choose_dtype(config.dtype, device)
    if device.type == 'cuda':
        devices.configure_allocator()
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    if config.deterministic:
        devices.make_deterministic()
    config.device, config.dtype = str(device), str(compute_dtype).removeprefix('torch.')
    if config.compile is None:
        config.compile = device.type == 'cuda'
    return rank, world_size, device, compute_dtype


def run_to_start_from(config, explicit):
    """
    If init_from is the out_dir of an earlier run, the path of its newest checkpoint, whose weights the new run begins
    with; otherwise None. Also copies the model's keys from that run into config, except those set explicitly.

    Raises ValueError if that run has fine-tuned a Hugging Face model, since it must be exported first, or if it used
    another tokenizer.
    """
    if not os.path.isdir(os.path.join(config.init_from, 'checkpoints')):
        return None
    path = checkpoint.choose_to_read(config.init_from)
    state = checkpoint.read_state(path)
    shape, before = state['identity']['model'], state['config']
    if finetune.is_fine_tuned(state):
        raise ValueError(
            f'init_from={config.init_from} has fine-tuned a model of a Hugging Face folder: export that with '
            f'`python export_model.py --out_dir={config.init_from}`, and give the exported folder'
        )
    folder = data.folder_of(before)
    if not same_tokenizer(folder, data.folder_of(vars(config))):
        raise ValueError(
            f'init_from={config.init_from} knows the tokens of {folder}, dataset={config.dataset} has those of another '
            'tokenizer: prepare it with `python prepare_data.py --dataset=... --name=... '
            f'--tokenizer={as_argument(folder)}`'
        )
    if 'yarn' in explicit and len(config.yarn) == 1:  # relative to the original context, even if extended before
        config.yarn = [*config.yarn, shape['yarn'][1] if shape.get('yarn') else shape['block_size']]
    vars(config).update({key: value for key, value in shape.items() if key not in explicit})
    return path


def planned_as(strategy):
    """The strategy that the planner should assume: a job in a pool holds and sends what a DiLoCo replica does."""
    return 'diloco' if strategy == 'pool' else strategy


def open_model_and_data(run):
    """Open the model that init_from names and the data that dataset names. No weights are read yet."""
    config = run.config
    run.start_from = run_to_start_from(config, run.explicit)
    if config.native and (config.init_from == 'scratch' or run.start_from):
        given = f'native=True with init_from={config.init_from}'
        raise ValueError(f'{given}, which is no Hugging Face folder: leave native out, model.py computes it')
    check_frozen_dtype(run)
    if config.init_from != 'scratch' and not run.start_from:
        if run.strategy == 'pipeline' and not config.native:
            raise ValueError(
                f"init_from={config.init_from}: transformers' class is not cut into stages: use train_fsdp.py, "
                f'or --native=True for what model.py computes ({", ".join(native.SAME_AS)})'
            )
        if config.native:
            native.refuse_other_families(config.init_from)
        run.pretrained = finetune.Pretrained.from_keys(vars(config), run.explicit)
        if run.strategy == 'deepspeed':  # its checkpoints hold nothing but weights and moments, so no load
            run.pretrained.router_aux = run.pretrained.router_z = 0.0
        if config.native:
            native.model_config_of(run.pretrained)  # raises for a feature that model.py lacks, before data is opened
        config.vocab_size = run.pretrained.vocab_size
        refuse_larger_vocabulary(config, run.pretrained)
        run.notes += check_same_tokenizer(data.folder_of(vars(config)), run.pretrained.folder)
        if config.dataset != 'synthetic':
            # prepare_data.py made this comparison for the folder it was given, which may have been another one.
            not_compared = compare_with_transformers(run.pretrained.folder, config.trust_remote_code)
            run.notes += [f'tokenizer: {not_compared}'] if not_compared else []
    if config.native and (config.lora_rank or config.freeze):
        key = 'lora_rank' if config.lora_rank else 'freeze'
        raise ValueError(
            f"{key}={getattr(config, key)!r} with native=True: only transformers' classes have LoRA and frozen parts: "
            f'leave native out, or {key}'
        )
    if not run.pretrained and (config.lora_rank or config.freeze):
        key = 'lora_rank' if config.lora_rank else 'freeze'
        folder = (
            f'export it with `python export_model.py --out_dir={config.init_from}`, and give the exported folder'
            if run.start_from
            else 'give the folder of one as --init_from'
        )
        raise ValueError(
            f'{key}={getattr(config, key)!r} with init_from={config.init_from}: only models of transformers have LoRA '
            f'and frozen parts: {folder}, or leave {key} out'
        )
    if config.packing is None:
        config.packing = not run.pretrained or config.native or run.pretrained.keeps_documents_apart
    run.train_data = data.open_mixture(vars(config), 'train')  # a mixture of one or several datasets
    run.val_data = data.open_validation(vars(config), run.train_data)
    if run.pretrained:
        folders = [source.name for source in run.train_data.sources + run.val_data.sources]
        run.pretrained.chat_templates, lines = templates_of_data(dict.fromkeys(folders), run.pretrained.folder)
        run.notes += lines
        config.fold_system = any(read_meta(Path(name)).get('settings', {}).get('fold_system') for name in folders)


def refuse_larger_vocabulary(config, pretrained):
    """Raise ValueError if a dataset has tokens for which the model has no rows in its embedding, as when special tokens
    have been added to the tokenizer alone."""
    folder, rows = pretrained.folder, pretrained.vocab_size
    datasets = names_in(parse_stages(vars(config)))
    if config.val_dataset:
        datasets += names_in(parse_stages({**vars(config), 'dataset': config.val_dataset, 'dataset_stages': ()}))
    for name in datasets:
        meta = read_meta(Path(config.data_dir, name))
        largest = max((facts.get('max_token', -1) for facts in meta.get('splits', {}).values()), default=-1)
        if largest < rows:
            continue
        needed, to = max(largest + 1, meta.get('vocab_size', 0)), f'{folder}-resized'
        steps = f'm = M.from_pretrained("{folder}"); m.resize_token_embeddings({needed}); m.save_pretrained("{to}")'
        steps = f'{steps}; T.from_pretrained("{folder}").save_pretrained("{to}")'
        names = 'AutoModelForCausalLM as M, AutoTokenizer as T'
        raise ValueError(
            f'dataset={name} has the token {largest}, the embedding of {folder} {rows:,} rows: give new tokens rows, '
            f"`python -c 'from transformers import {names}; {steps}'`, and take --init_from={to} (with LoRA also "
            '--modules_to_save=NAMES of its embedding and head, which learns the new rows)'
        )


def check_frozen_dtype(run):
    """Raise ValueError if frozen weights cannot be kept in frozen_dtype, or if no weights are frozen."""
    config, asked = run.config, run.config.frozen_dtype
    given = f'frozen_dtype={asked}'
    if run.strategy == 'deepspeed' and (config.lora_rank or config.freeze):  # DeepSpeed keeps all weights in one dtype
        config.frozen_dtype = 'float32'
        if asked not in (None, 'float32'):
            raise ValueError(f'{given}: DeepSpeed keeps all weights in one dtype: use train_fsdp.py')
    if not asked:
        return
    if config.init_from == 'scratch' or run.start_from:
        raise ValueError(f'{given} with init_from={config.init_from}: nothing is frozen there, leave frozen_dtype out')
    keys = vars(config)
    only = "only transformers' classes have LoRA and frozen parts"
    if config.native:
        raise ValueError(f'{given} with native=True: {only}: leave native out, or frozen_dtype')
    if run.strategy == 'pipeline' or keys.get('tensor_parallel', 1) > 1:
        cut = 'train_pipeline.py' if run.strategy == 'pipeline' else f'tensor_parallel={keys["tensor_parallel"]}'
        raise ValueError(f'{given} with {cut}: {only}, which are not cut: use train_fsdp.py without it')
    if asked == 'nf4' and keys.get('fsdp_impl') == 'torch' and torch.__version__ < (2, 13):
        raise ValueError(
            f'{given}: fully_shard takes bytes from torch 2.13 on, this is {torch.__version__}: use --fsdp_impl=manual'
        )


def fill_in(run):
    """
    Fill in every key that is None or follows from others, one topic after the other, and check that they fit together.

    Each step adds what it derived to run.notes. Raises ValueError if keys contradict each other or the data.
    """
    fill_layout(run)
    fill_data(run)
    fill_length(run)
    fill_rates(run)
    plan_data(run)
    fill_model(run)
    fill_compile(run)
    run.notes += checks.check(vars(run.config), run.layout, run.model_config)
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
    run.notes += without_effect(Path(sys.argv[0]).name, config, run.explicit, **facts)


def fill_layout(run):
    """How the ranks divide the work. The global batch is fixed; the number of ranks decides only how many micro-steps
    each of them needs for its share."""
    config, train, val = run.config, run.train_data, run.val_data
    choose_sizes(config, run.strategy, run.ranks, processes.local_world_size())
    run.layout = Layout.of(vars(config), run.strategy, run.ranks)
    run.tokens_per_step = config.global_batch_size * config.block_size
    others = ' + '.join(f'{source.name} ({source.split})' for source in val.sources)
    of_others = f' of {others}' if config.val_dataset else ''
    run.notes += [
        f'{" + ".join(train.names)}: {train.n_tokens:,} training tokens, {val.n_tokens:,} validation tokens{of_others}',
        batches.batch_line(config.batch_size, run.layout, config.block_size),
    ]


def fill_compile(run):
    config = run.config
    if config.compile and getattr(run.model_config, 'n_experts', 0):
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
    if config.compile and not all(map(devices.has_compiler, compiled_for)):
        config.compile = False
        run.notes.append(
            'compile: no C compiler is found (CXX or g++ for what a CPU computes, CC or gcc for a GPU): '
            'the run goes on uncompiled'
        )
    if config.compile:
        run.notes.append('compile: the first step takes a minute or more, and so does the first evaluation')


def fill_data(run):
    """Keys that follow from the datasets: the vocabulary, and whether a sequence holds several documents."""
    config, train_data, pretrained = run.config, run.train_data, run.pretrained
    config.vocab_size = config.vocab_size or train_data.vocab_size
    config.packed, config.chats = train_data.has_starts, train_data.is_chat
    if train_data.is_chat and not pretrained:
        raise ValueError(
            f'dataset={config.dataset} holds conversations, for a model that knows language: give its --init_from'
        )
    longest = max(getattr(source, 'longest', 0) for source in train_data.sources)
    if longest > config.block_size + 1:
        whole = longest - 1  # the last token is only ever a target
        most = min(whole, pretrained.positions or whole)
        wider = f'; the model has positions for --block_size={most}' if most > config.block_size else ''
        if most < whole:
            wider = wider or ', all positions that the model has'
            run.notes.append(
                f'the longest conversation needs {whole:,} tokens, block_size is {config.block_size:,}{wider}'
            )
        else:
            run.notes.append(f'--block_size={most} keeps every conversation whole')
    if train_data.is_packed and not config.packing:
        run.notes.append(line_of_padding(run, longest))


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
    """Derive max_iters from num_epochs; a max_iters on the command line wins."""
    config, train_data = run.config, run.train_data
    if config.num_epochs is None:
        return
    if run.explicit.get('max_iters') == 'command line':
        run.notes.append(
            f'num_epochs={config.num_epochs} does not count: max_iters={config.max_iters} is on the command line'
        )
    elif len(train_data.sources) > 1:
        raise ValueError(
            f'num_epochs={config.num_epochs}: sources of a mixture have epochs of their own; use --max_iters'
        )
    else:
        config.max_iters = batches.iterations_of_epochs(
            config.num_epochs, train_data.n_windows, config.global_batch_size
        )
        if config.dataset == 'synthetic':
            run.notes.append(
                f'num_epochs={config.num_epochs} counts passes over the {train_data.n_tokens:,} random tokens of '
                'dataset=synthetic; the schedule of your own data needs --dataset=NAME, or --max_iters'
            )


def fill_rates(run):
    """Fill in wd_ts and the weight decay that follows from it, and with `heads` the sizes and rates of the published
    rules; then the end of the learning rate's schedule and its lowest value."""
    config, explicit = run.config, run.explicit
    if config.arch == 'gpt2' and config.rope_theta and 'rope_theta' in explicit and not run.pretrained:
        raise ValueError(f'rope_theta={config.rope_theta:g} with arch=gpt2, whose positions are learned: leave it out')
    filled, rule_notes = rules.fill_from_heads(vars(config), explicit)
    vars(config).update(filled)
    run.notes += rule_notes + batches.cautions(vars(config), run.train_data.n_windows)
    config.lr_decay_iters = config.lr_decay_iters or config.max_iters
    if config.min_lr is None:
        config.min_lr = config.learning_rate / 10


def plan_data(run):
    """Compute at which sequence each stage of a mixture begins, which depends on the run's length."""
    config = run.config
    for split in (run.train_data, run.val_data):
        split.plan(config.max_iters, config.global_batch_size)
    run.notes += run.train_data.lines()


def fill_model(run):
    """Replace sizes that are None by the architecture's defaults, and copy all of the model's keys into config."""
    config = run.config
    run.model_config = run.pretrained or ModelConfig.from_keys(vars(config))
    if config.native:
        factors = {'router_aux': config.router_aux, 'router_z': config.router_z}
        run.model_config = replace(native.model_config_of(run.pretrained), **factors)
    vars(config).update(run.model_config.to_dict())
    if config.native:  # keep what the user asked for: Pretrained.from_run() derives the rest from it again
        config.rope_theta, config.yarn = run.pretrained.rope_theta, run.pretrained.yarn


def make_process_group(config, device):
    """Check that out_dir can be written, then join the other ranks; without torchrun, a group of one rank."""
    checkpoint.prepare(config.out_dir)  # raises on every rank whose machine cannot write there
    if device.type == 'cuda':
        health.record_flights(config.out_dir)
    join_ranks(config.timeout_s, device)


def join_ranks(timeout_s, device):
    """The process group alone, for scripts without an out_dir: NCCL for tensors on GPUs, gloo for those on hosts."""
    backend = 'gloo'
    if device.type == 'cuda':
        torch.cuda.set_device(device)
        backend = 'cpu:gloo,cuda:nccl'
    if 'RANK' in os.environ:
        if os.environ['WORLD_SIZE'] != os.environ['LOCAL_WORLD_SIZE']:  # several machines
            # By itself gloo takes the interface that the machine's own name resolves to: 127.0.1.1 on many images.
            interface = processes.interface_to(os.environ['MASTER_ADDR'])
            if interface not in (None, 'lo'):
                os.environ.setdefault('GLOO_SOCKET_IFNAME', interface)
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        if device.type == 'cuda':
            devices.refuse_shared_gpus(device)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def find_checkpoint(config, pretrained=None):
    """
    The newest intact checkpoint of out_dir, or None; the same on every rank. Locks out_dir for this job.

    A run that fine-tunes `pretrained` copies its configuration and tokenizer into out_dir, so that it needs those of
    init_from no longer. Raises ValueError on every rank if out_dir is in use, or if `resume` forbids what is there.
    """
    collectives.on_rank_0(checkpoint.claim, config.out_dir, patience_s=collectives.PATIENCE_S)
    if config.eval_only:
        # Without a checkpoint, the weights of init_from can be evaluated, as those of step 0.
        find = checkpoint.choose_to_read if config.init_from == 'scratch' else checkpoint.choose
        return checkpoint.with_all_ranks(find, config.out_dir)
    found = checkpoint.with_all_ranks(checkpoint.choose, config.out_dir, config.resume)
    if pretrained and found is None:
        collectives.on_rank_0(pretrained.keep_files, config.out_dir)
    return found


def find_base(config, pretrained, found):
    """
    Which weights this run's checkpoints leave out, because LoRA does not train them and init_from has them; see
    Pretrained.base(). None means that checkpoints hold all weights, as in runs that an earlier version began.

    Raises ValueError on every rank if the run resumes and init_from no longer holds the weights that it began with.
    """
    saved = checkpoint.read_state(found).get('base') if found else None
    if not config.lora_rank or (found and saved is None):
        return None
    return collectives.on_rank_0(pretrained.base, config.init_from, saved, found, patience_s=collectives.PATIENCE_S)


def identity_of(config, model_config, train_data):
    """The settings that must be the same in a checkpoint and in the run that resumes from it."""
    may_change = ('dropout', 'lora_dropout', 'z_loss', 'router_aux', 'router_z')
    shape = {key: value for key, value in model_config.to_dict().items() if key not in may_change}
    if 'frozen_dtype' in shape:  # the dtype may change between bfloat16 and float32 if no weight is rounded by it
        shape['frozen_dtype'] = model_config.frozen_rounding
    return {
        'model': shape,
        'data': train_data.plan(config.max_iters, config.global_batch_size),
        'optimizer': config.optimizer,
        'global_batch_size': config.global_batch_size,
        'seed': config.seed,
    }


def in_words(keys):
    """The keys that say which data a run reads, for a message."""
    shown = ['dataset', *(('dataset_stages', 'max_iters') if keys.get('dataset_stages') else ())]
    shown += ['windows'] if keys.get('windows') == 'documents' else []
    shown += ['packing'] if keys.get('packing') is False else []
    return ', '.join(f'{key}={keys[key]}' for key in shown)


def check_resume(saved, config, identity, learning_rate_at):
    """
    Check that a checkpoint belongs to this run. Returns lines for the log: which keys differ from the checkpoint's, and
    before them a warning if the learning rate jumps.

    saved: the checkpoint's state. learning_rate_at: that of optim.py. Raises ValueError if the checkpoint belongs to a
    different run, or is beyond max_iters.
    """
    step, before, now = saved['step'], saved['config'], json.loads(json.dumps(vars(config)))  # as state.json has them
    was, now_is = saved['identity'].get('data'), identity.get('data')
    if isinstance(was, str):  # written by a version without mixtures
        was = [[0, {was: '1'}]]
    was, now_is = ([stage for stage in plan or [] if stage[0] < max(step, 1)] for plan in (was, now_is))
    if was != now_is:
        other = f'you ask for {in_words(now)}'
        if in_words(before) == in_words(now):
            other = 'whose tokens are others now: it was prepared anew'
        raise ValueError(
            f'the checkpoint was trained on {in_words(before)}, {other}: use another --out_dir, perhaps with '
            f'--init_from={config.out_dir}, which begins with its weights'
        )
    if not config.eval_only:
        refuse_gone(before, 'the checkpoint was trained', f'begin anew with --init_from={config.out_dir}')
    then = {**saved['identity'], 'data': now_is}
    of_earlier_versions = {'parametrization': 'standard', 'yarn': [], 'lora_rslora': False, 'modules_to_save': []}
    of_earlier_versions |= {'frozen_dtype': 'float32', 'n_experts': 0, 'logit_softcap': None, 'window_pattern': None}
    then['model'] = {**of_earlier_versions, **then.get('model', {})}
    checkpoint.check_identity(then, {**identity, 'data': now_is})
    if step > config.max_iters and not config.eval_only:
        raise ValueError(
            f'out_dir={config.out_dir} is at step {step}, beyond max_iters={config.max_iters}: go on with a larger '
            '--max_iters, or begin another run in another --out_dir'
        )
    changed = [f'{key} {before[key]} -> {now[key]}' for key in now if key in before and before[key] != now[key]]
    if not changed:
        return []
    schedule = ('learning_rate', 'lr_schedule', 'warmup_iters', 'lr_decay_iters', 'min_lr')
    was, becomes = (learning_rate_at(step, *(keys[key] for key in schedule)) for keys in ({**now, **before}, now))
    rates = (
        [] if was == becomes else [f'WARNING: the learning rate jumps from {was:.2e} to {becomes:.2e} at step {step}']
    )
    return [*rates, f'changed since step {step}: {", ".join(changed)}']


def make_model(run):
    """The run's model on the meta device: shapes only, so that no rank ever allocates weights that it will not keep.

    Activation checkpointing and torch.compile are applied here, block by block, since both implementations of FSDP want
    them before sharding.
    """
    config = run.config
    with torch.device('meta'):
        if run.pretrained and not config.native:
            model = finetune.for_training(run.pretrained, run.compute_dtype, run.device)
            run.notes += finetune.cautions(model, run.pretrained)
            if run.strategy in ('fsdp', 'diloco', 'pool'):
                finetune.refuse_scalars(model)
            elif run.strategy == 'ddp':
                lora.compute_from_stored(model)
            if run.base is not None:
                run.share.of_base = lora.names_of_base(model)
        else:
            model = GPT(run.model_config, run.compute_dtype)
    if config.native and run.found is None:
        run.share.first_value = native.Weights(run.pretrained, run.model_config).initial_value
    if config.matmul_dtype:
        float8.convert(model)
    offload.checkpoint_activations(model, config.activation_checkpointing)
    if config.compile:
        if not isinstance(model, GPT) and model.routers:  # their hooks need not run again in backward
            torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        for block in model.blocks:
            block.forward = torch.compile(block.forward)  # one small graph, compiled once and shared by equal blocks
    if config.compile and run.on_cuda:  # on a CPU the loss is faster uncompiled
        model.cross_entropy = torch.compile(pointwise_cross_entropy, dynamic=False)
    run.flops_per_token, run.parameter_counts = model.flops_per_token(), model.parameter_counts()
    return model


def order_buckets(model, optimizer, run):
    """
    Have DistributedDataParallel decide in which order it puts gradients into its buckets, and so in which order the
    ranks' gradients are added up.

    DDP takes the order from its first backward pass. A resumed run must add like an uninterrupted one, so both begin
    with this pass, which changes nothing: all its targets are -1 (ignored), and its gradients are dropped.
    """
    sizes = 16, min(8, run.config.block_size)  # float8 needs a multiple of 16 tokens
    tokens = torch.zeros(sizes, dtype=torch.int64, device=run.device)
    with torch.compiler.set_stance('force_eager') if run.config.compile else contextlib.nullcontext():
        (model(tokens, tokens - 1)[0] * 0).backward()
    optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def initialise(model, run, device=None):
    """
    Allocate the weights and give them their first values: those of init_from, or from scratch a pure function of
    (seed, name). Weights that are trained are fp32. If resume() will load all of them, they are only allocated.

    GPT.initial_value() defines what each parameter begins with; with native=True, huggingface.native does.

    model: on the meta device, sharded or not. device: where the parameters are kept, if that is not run.home.
    """
    model.to_empty(device=device or run.home)
    for module in model.modules():  # weights may be kept on the host, but buffers are used by forward
        buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        module._buffers.update({name: buffer.to(run.device) for name, buffer in buffers.items()})
    if run.found and run.base is None:  # resume() will load all weights
        return
    if run.start_from:
        checkpoint.load(run.start_from, model, share=run.share)
        return
    if run.pretrained and not run.config.native:
        finetune.load(model, run.pretrained, run.config.seed)  # every rank reads the rows that it keeps
        return
    parameters = {(name, parameter): parameter.nbytes for name, parameter in model.named_parameters()}
    if run.pretrained:
        parameters = processes.progress(f'loading {run.config.init_from}', parameters)
    for name, parameter in parameters:
        value = run.share.initial_value(model, name, parameter, run.config.seed, run.device)
        if isinstance(parameter, DTensor):
            # Every rank has computed the whole value and keeps only its slice, which needs no communication.
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(value)
