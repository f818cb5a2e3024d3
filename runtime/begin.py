"""
Everything that a training script does before the part it teaches, which is the same for every strategy: find out the
rank and its device, fill in the configuration (fill.py), join the process group, find the checkpoint to resume from
(identity.py), and make the model. What only some runs need is imported where it is used, so that a plain run reads
less: planning's reports, huggingface/, and the tasks of evaluation/.

    run = begin(config, explicit, 'fsdp')   # ranks, device, data; from here on every key that was None has a value
    found = run.join()                      # the process group, and this run's checkpoint; --dry_run ends here
    raw_model = make_model(run)             # on the meta device
    ...                                     # shard it
    initialize(raw_model, run)              # first_weights.py, unless a checkpoint will be loaded
    step, state = run.resume(raw_model, opt, scaler)
"""

import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn.parallel import DistributedDataParallel

import data
from dataset.mixture import names_in, parse_stages
from dataset.shards import read_meta
from layout import Layout, Share
from loss import pointwise_cross_entropy
from model import GPT, ModelConfig
from runtime import checkpoint, checkpoint_saver, health, meter
from runtime.fill import fill_in
from runtime.first_weights import find_beginning, open_init_from
from runtime.identity import check_resume, identity_of
from system import collectives, devices, errors, processes, stopping

FLOPS_OF_CORE = 5e10  # per second, in float32, roughly


@dataclass
class Run:
    """All that a script knows about its run before it shards the model."""

    config: SimpleNamespace  # every key with its final value
    explicit: dict  # {key: the file that set it, or 'command line'}
    typed: dict  # the value of every key before any was filled in
    strategy: str  # 'ddp', 'fsdp', ...
    rank: int
    world_size: int
    device: torch.device
    compute_dtype: torch.dtype
    learns_from: str = 'text'  # 'text', conversations included, 'pairs' of answers, or 'prompts' that it answers itself
    notes: list = field(default_factory=list)  # lines for the log: which values were filled in, and warnings
    also_held: dict = field(default_factory=dict)  # {part: bytes} of a rank for --dry_run, beyond the model: a teacher
    pretrained: object = None  # Pretrained if init_from is a Hugging Face folder, with native=True as well
    start: object = None  # opened.Opened, which gives the first weights, if init_from is a run of this project
    train_data: object = None  # data.Mixture
    val_data: object = None  # the same of its validation text; None if eval_sequences is 0
    model_config: ModelConfig | None = None  # None if a class of transformers computes the model
    tasks: object = None  # in_run.Evaluation, if the run has eval_tasks
    layout: Layout | None = None  # how the ranks divide the work
    share: Share = field(default_factory=Share)  # what this rank has of the model; the script says so where it cuts it
    identity: dict | None = None  # what a checkpoint must have in common with this run to be resumed
    found: str | None = None  # the checkpoint in out_dir that the run resumes from
    begun: str | None = None  # a fingerprint of the weights of init_from that the run began with
    base: dict | None = None  # LoRA: the weights that checkpoints leave out; None = checkpoints hold all weights
    flops_per_token: float = 0.0
    parameter_counts: dict | None = None

    @property
    def on_cuda(self):
        return self.device.type == 'cuda'

    @property
    def traces_memory(self):
        return self.config.trace_memory and self.on_cuda

    @property
    def splits(self):
        """{'train': train_data, 'val': val_data}, or without the second."""
        return {'train': self.train_data} | ({'val': self.val_data} if self.val_data else {})

    @property
    def language_folder(self):
        """Where the tokenizer of a run from scratch is, if possible with a chat template: with its data, else with what
        it begins with, which has the same tokenizer."""
        from text.conversations import templates_of
        from text.tokenizer import has_tokenizer

        folders = [*filter(has_tokenizer, self.language_folders)]
        return next(filter(templates_of, folders), folders[0] if folders else None)

    @property
    def language_folders(self):
        """The folders in which the language of a run from scratch may be, the first one before others."""
        sources = [] if self.learns_from == 'prompts' or not self.train_data else self.train_data.sources
        return [source.name for source in sources] + ([self.start.folder] if self.start else [])

    @property
    def shape(self):
        """What the model is: a ModelConfig, or the Pretrained of a class of transformers."""
        return self.model_config or self.pretrained

    @property
    def tokens_per_step(self):
        """Those of an average step: padding does not count."""
        if self.learns_from == 'prompts':  # in each step another number
            return 0
        return self.config.global_batch_size * self.config.block_size * self.train_data.filled

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
                from planning import hours, report

                print(*self.notes, sep='\n')
                card, ranks = hours.card_of(vars(config)), self.layout.ranks
                facts = self.shape.to_dict(), ranks, self.strategy, self.train_data.filled
                print(report.dry_run(vars(config), *facts, card, self.also_held))
                print(*hours.lines(vars(config), ranks, self.train_data, card), sep='\n')
            sys.exit()
        is_other = config.frozen_dtype not in (None, 'float32')
        frozen = f' ({config.frozen_dtype} where they are not trained)' if is_other else ''
        if self.strategy != 'deepspeed':  # there a JSON may say otherwise, and the engine is asked
            self.notes.append(
                f'dtypes: weights float32{frozen}, compute {config.dtype}, gradient reduction float32, '
                f'optimizer state {config.optimizer_dtype}'
            )
        if self.on_cuda and not self.shape.dropout:  # that kernel has none
            self.notes += devices.use_flash_attention_3(self.device)
        make_process_group(config, self.device)  # NCCL between GPUs, gloo on the host
        if self.traces_memory:
            meter.record_allocations()
        self.found = find_checkpoint(config, self.pretrained, self.language_folders)
        self.begun, lines = collectives.on_rank_0(find_beginning, self, patience_s=collectives.PATIENCE_S)
        self.notes[:0] = lines
        self.base = find_base(config, self.pretrained, self.found, self.start)
        self.identity = identity_of(vars(config), self.shape, self.train_data)
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
        self.notes += check_resume(state, vars(self.config), self.identity, self.explicit)


def begin(config, explicit, strategy, ranks=None, learns_from='text'):
    """
    Everything that needs no communication: find out which rank this is, open the model and the data that the keys name,
    and give a value to each key that is None or follows from others.

    config, explicit: from configure(); config is changed in place, and its values are final when this returns.
    strategy: 'ddp', 'fsdp', ...: which script this is. ranks: how many share a global batch, where that is not the
    world size: in a pool it is jobs x ranks per job. learns_from: see Run.
    From here on a user's mistake ends the run with one line on every rank, and running out of memory with advice.
    """

    def advice():
        from planning import report

        line = report.out_of_memory_advice(vars(config), ranks or run.world_size, strategy, run.also_held)
        return f'{line}; {meter.write_allocations(config.out_dir, run.rank)}' if run.traces_memory else line

    errors.report_errors(advice)
    run = Run(config, explicit, {**vars(config)}, strategy, *start_process(config), learns_from)
    lines = devices.make_compile_caches()
    run.notes += lines if config.compile else []
    if learns_from != 'prompts':
        refuse_other_data(config, learns_from == 'pairs')
    open_init_from(run)
    if config.packing is None:
        config.packing = not run.pretrained or config.native or run.pretrained.keeps_documents_apart
    if learns_from == 'prompts':
        from runtime import rollouts

        rollouts.open_prompts(run)
    else:
        open_data(run)
    fill_in(run, ranks or run.world_size)
    if vars(config).get('eval_tasks'):  # read now, so that a mistake in their files shows here
        from evaluation import in_run
        from runtime.opened import language_of_run

        run.tasks = in_run.tasks_of(vars(config), run.layout, language_of_run(run), run.pretrained, run.device)
        run.notes += run.tasks.notes
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
    is_elsewhere = config.dry_run and config.gpu is not None
    if config.dry_run and config.gpus not in (None, world_size):
        raise ValueError(
            f'gpus={config.gpus}, and the plan is for {world_size}: give --gpus on the command line, without torchrun'
        )
    if is_elsewhere and config.device == 'cpu':
        raise ValueError(f'gpu={config.gpu} with device=cpu: leave one of them out')
    if is_elsewhere and config.device == 'auto':
        config.device = 'cuda'
    # With dry_run a login node without GPUs may plan for a node that has them.
    device = devices.choose_device(config.device, local_rank, must_exist=not config.dry_run)
    compute_dtype = devices.choose_dtype(config.dtype, device, is_elsewhere)
    if device.type == 'cuda':
        devices.configure_allocator()
    else:
        devices.configure_heap()
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    if config.deterministic:
        devices.make_deterministic()
    config.device, config.dtype = str(device), str(compute_dtype).removeprefix('torch.')
    if config.compile is None:
        config.compile = device.type == 'cuda'
    return rank, world_size, device, compute_dtype


def open_data(run):
    """Open the data that dataset and, if anything is evaluated, val_dataset name."""
    config = run.config
    run.train_data = data.open_mixture(vars(config), 'train')  # a mixture of one or several datasets
    if config.eval_sequences and config.eval_iters != 0:
        run.val_data = data.open_validation(vars(config), run.train_data)
    sources = [source for split in run.splits.values() for source in split.sources]
    folders = [source.name for source in sources]
    if run.pretrained:
        from text.conversations import templates_of_data

        run.pretrained.chat_templates, lines = templates_of_data(dict.fromkeys(folders), run.pretrained.folder)
        run.notes += lines
    if run.train_data.is_chat:  # else the run goes on as what it begins with has learned to be asked
        config.fold_system = any(read_meta(Path(name)).get('settings', {}).get('fold_system') for name in folders)
    train, val = run.train_data, run.val_data
    if train.is_absent or (val and val.is_absent):  # its own line says so
        return
    line = f'{" + ".join(train.names)}: {train.n_tokens:,} training tokens'
    if val:
        line += f', {val.n_tokens:,} validation tokens'
        if config.val_dataset:
            line += f' of {" + ".join(f"{source.name} ({source.split})" for source in val.sources)}'
    run.notes.append(line)


def refuse_other_data(config, pairs):
    """Raise ValueError if the data hold pairs of answers, and the script learns from something else, or the other way
    round. By their meta.json alone, before anything is opened: what else a script refuses would send a user with pairs
    to a script that refuses them, too."""
    for key in ('dataset', 'val_dataset'):
        stages = {} if key == 'dataset' else {'dataset': config.val_dataset, 'dataset_stages': ()}
        names = names_in(parse_stages(vars(config) | stages)) if vars(config)[key] else []
        folders = [Path(config.data_dir, name) for name in names]  # which may be missing: that is refused later
        found = [
            read_meta(folder).get('pairs', False) for folder in folders if folder.is_dir() or names == ['synthetic']
        ]
        given = f'{key}={vars(config)[key]}'
        if any(found) and not pairs:
            raise ValueError(
                f'{given} holds pairs of a better and a worse answer: train_dpo.py learns from these; to learn the '
                'better ones as conversations, prepare it without --pairs, with --chat_fields'
            )
        if found and pairs and not any(found):
            raise ValueError(
                f'{given} holds no pairs of answers: prepare them with `python prepare_data.py --pairs --dataset=...`, '
                'and learn text or conversations with train_ddp.py or train_fsdp.py'
            )


def make_process_group(config, device):
    """Check that out_dir can be written, then join the other ranks; without torchrun, a group of one rank."""
    checkpoint_saver.prepare(config.out_dir)  # raises on every rank whose machine cannot write there
    if device.type == 'cuda':
        health.record_flights(config.out_dir)
    devices.join_ranks(config.timeout_s, device)


def find_checkpoint(config, pretrained=None, language_folders=()):
    """
    The newest intact checkpoint of out_dir, or None; the same on every rank. Locks out_dir for this job.

    A run that fine-tunes `pretrained` copies its configuration and tokenizer into out_dir, so that it needs those of
    init_from no longer. Raises ValueError on every rank if out_dir is in use, or if `resume` forbids what is there.
    """
    collectives.on_rank_0(checkpoint_saver.claim, config.out_dir, patience_s=collectives.PATIENCE_S)
    if config.eval_only:
        # Without a checkpoint, the weights of init_from can be evaluated, as those of step 0.
        find = checkpoint.choose_to_read if config.init_from == 'scratch' else checkpoint.choose
        return checkpoint.with_all_ranks(find, config.out_dir)
    found = checkpoint.with_all_ranks(checkpoint.choose, config.out_dir, config.resume)
    if pretrained and found is None:
        collectives.on_rank_0(pretrained.keep_files, config.out_dir)
    elif found is None:
        from runtime.kept import keep_language

        collectives.on_rank_0(keep_language, config.out_dir, language_folders)
    return found


def find_base(config, pretrained, found, start=None):
    """
    Which weights this run's checkpoints leave out, because LoRA does not train them and init_from has them; see
    Pretrained.base(). None means that checkpoints hold all weights, as in runs that an earlier version began.

    Raises ValueError on every rank if the run resumes and init_from no longer holds the weights that it began with.
    """
    saved = checkpoint.read_state(found).get('base') if found else None
    if not config.lora_rank or (found and saved is None):
        return None
    name = start.state['base']['init_from'] if start else config.init_from  # of the folder with what is not trained
    return collectives.on_rank_0(pretrained.base, name, saved, found, patience_s=collectives.PATIENCE_S)


def make_model(run):
    """The run's model on the meta device: shapes only, so that no rank ever allocates weights that it will not keep.

    Activation checkpointing and torch.compile are applied here, block by block, since both implementations of FSDP want
    them before sharding.
    """
    config = run.config
    with torch.device('meta'):
        model = GPT(run.model_config, run.compute_dtype) if run.model_config else transformers_model(run)
    if config.native and run.found is None and not run.start:
        from huggingface import native

        run.share.first_value = native.Weights(run.pretrained, run.model_config).initial_value
    if config.matmul_dtype:
        import float8

        float8.convert(model)
    if config.activation_checkpointing == 'offload':
        import offload

        offload.checkpoint_activations(model, 'offload')
    else:
        model.checkpoint_activations(config.activation_checkpointing)
    if config.compile:
        if not isinstance(model, GPT) and model.routers:  # their hooks need not run again in backward
            torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        for block in model.blocks:
            block.forward = torch.compile(block.forward)  # one small graph, compiled once and shared by equal blocks
    if config.compile and run.on_cuda:  # on a CPU the loss is faster uncompiled
        model.loss_kernel = torch.compile(pointwise_cross_entropy, dynamic=False)
    run.flops_per_token, run.parameter_counts = model.flops_per_token(), model.parameter_counts()
    if config.init_from == 'scratch' and not (run.on_cuda or config.eval_only):
        flops = run.flops_per_token * run.tokens_per_step / run.world_size / torch.get_num_threads()
        run.notes += line_of_slow_steps(flops / FLOPS_OF_CORE)
    return model


def line_of_slow_steps(seconds):
    """A warning for whoever has started the default model on a CPU; none if a step takes at most ten seconds."""
    quick = '`python train_ddp.py config/quickstart.py` trains a model that is small enough for one, in minutes'
    return [f'WARNING: a step takes about {seconds:.0f} s on this CPU: {quick}'] if seconds > 10 else []


def transformers_model(run):
    """make_model() of a Hugging Face folder whose class of transformers computes the model."""
    from huggingface import finetune, lora

    model = finetune.for_training(run.pretrained, run.compute_dtype, run.device)
    run.notes += finetune.cautions(model, run.pretrained)
    if run.strategy == 'ddp':
        lora.compute_from_stored(model)
    if run.base is not None:
        run.share.of_base = lora.names_of_base(model)
    return model


def order_buckets(model, optimizer, run):
    """
    Have DistributedDataParallel decide in which order it puts gradients into its buckets, and so in which order the
    ranks' gradients are added up.

    DDP takes the order from its first backward pass. A resumed run must add like an uninterrupted one, so both begin
    with this pass, which changes nothing: all its targets are -1 (ignored), and its gradients are dropped. A model that
    is not DDP's has no buckets.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    sizes = 16, min(8, run.config.block_size)  # float8 needs a multiple of 16 tokens
    tokens = torch.zeros(sizes, dtype=torch.int64, device=run.device)
    with torch.compiler.set_stance('force_eager') if run.config.compile else contextlib.nullcontext():
        (model(tokens, tokens - 1)[0] * 0).backward()
    optimizer.zero_grad(set_to_none=True)
