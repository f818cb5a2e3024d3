"""
What comes before the lesson, the same for every strategy: this rank and its device, the configuration filled in, the
process group, the checkpoint to resume from.
"""

import json
import math
import os
from datetime import timedelta

import torch
import torch.distributed as dist

import data
from huggingface import finetune
from model import ModelConfig
from runtime import checkpoint, health, processes, scaling, stopping
from text.tokenizer import as_argument, same_tokenizer


def start_process(config):
    """
    Find out which rank this is and choose its device. Fills in device, dtype and compile.

    Returns (rank, world_size, device, compute_dtype), (0, 1, ...) without torchrun. Raises ValueError if the launcher's
    variables are incomplete, or for a GPU that is not there.
    """
    processes.end_with_parent()
    if not config.eval_only:
        stopping.catch_signals()  # SIGTERM, SIGUSR1 and SIGUSR2 ask for a checkpoint, as soon as there is one to save
    rank, local_rank, world_size = processes.ranks_from_environment()
    # A login node may plan for GPUs that it does not have.
    device = processes.choose_device(config.device, local_rank, must_exist=not config.dry_run)
    compute_dtype = processes.choose_dtype(config.dtype, device)
    if device.type == 'cuda':
        processes.configure_allocator()
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    if config.deterministic:
        processes.make_deterministic()
    config.device, config.dtype = str(device), str(compute_dtype).removeprefix('torch.')
    if config.compile is None:
        config.compile = device.type == 'cuda'
    return rank, world_size, device, compute_dtype


def run_to_start_from(config, explicit):
    """
    Path of the newest checkpoint of init_from, if that is the out_dir of a run, whose weights a new run begins with;
    else None. Takes the model's keys from there. Raises ValueError for a run that fine-tunes, which is to be exported.
    """
    if not os.path.isdir(os.path.join(config.init_from, 'checkpoints')):
        return None
    path = checkpoint.choose_to_read(config.init_from)
    state = checkpoint.read_state(path)
    shape, before = state['identity']['model'], state['config']
    if not shape.keys() <= ModelConfig.__dataclass_fields__.keys():
        raise ValueError(
            f'init_from={config.init_from} has fine-tuned a model of transformers: export that with '
            f'`python export_model.py --out_dir={config.init_from}`, and give the exported folder'
        )
    folder = data.folder_of(before)
    if not same_tokenizer(folder, data.folder_of(vars(config))):
        raise ValueError(
            f'init_from={config.init_from} knows the tokens of {folder}, dataset={config.dataset} has those of another '
            'tokenizer: prepare it with `python prepare_data.py --dataset=... --name=... '
            f'--tokenizer={as_argument(folder)}`'
        )
    if 'yarn' in explicit and len(config.yarn) == 1:  # of a context that was extended before, it counts from the first
        config.yarn = [*config.yarn, shape['yarn'][1] if shape.get('yarn') else shape['block_size']]
    vars(config).update({key: value for key, value in shape.items() if key not in explicit})
    return path


def fill_in(config, explicit, world_size, train_data, val_data, pretrained=None):
    """
    Fill in every key that is None or follows from others: batch, epochs, published rules, model; check that all fits.

    explicit: {key: where it was set}, of configure(). pretrained: the finetune.Pretrained of init_from, or None.
    Returns (model_config, notes): `pretrained` or a ModelConfig, and lines for the log. The model's keys are in config,
    too. Raises ValueError where keys contradict each other or the data.
    """
    ranks = scaling.ranks_for_batches(vars(config), world_size)
    config.global_batch_size = config.global_batch_size or config.batch_size * ranks
    micro_steps = scaling.accumulation_steps(config.global_batch_size, config.batch_size, ranks)
    notes = [
        f'{" + ".join(train_data.names)}: {train_data.n_tokens:,} training tokens, {val_data.n_tokens:,} validation '
        'tokens',
        scaling.batch_line(config.batch_size, micro_steps, world_size, config.block_size, world_size // ranks),
    ]
    if config.compile and not processes.has_compiler(config.device):
        config.compile = False
        notes.append('compile: no C compiler is found (CXX or g++ on a CPU, CC or gcc): the run goes on uncompiled')
    if config.compile:
        notes.append('compile: the first step takes a minute or more, and so does the first evaluation')
    config.vocab_size = config.vocab_size or train_data.vocab_size
    config.packed = train_data.is_packed
    if train_data.is_chat and not pretrained:
        raise ValueError(
            f'dataset={config.dataset} holds conversations, for a model that knows language: give its --init_from'
        )
    longest = max(getattr(source, 'longest', 0) for source in train_data.sources)
    if longest > config.block_size + 1:
        whole = longest - 1  # the last token is only ever a target
        most = min(whole, pretrained.positions or whole)
        keeps = 'keeps every conversation whole' if most == whole else 'is the most that this model has positions for'
        notes.append(f'--block_size={most} {keeps}')
    if config.num_epochs is not None and explicit.get('max_iters') == 'command line':
        notes.append(
            f'num_epochs={config.num_epochs} does not count: max_iters={config.max_iters} is on the command line'
        )
    elif config.num_epochs is not None and len(train_data.sources) > 1:
        raise ValueError(
            f'num_epochs={config.num_epochs}: sources of a mixture have epochs of their own; use --max_iters'
        )
    elif config.num_epochs is not None:
        config.max_iters = scaling.iterations_of_epochs(
            config.num_epochs, train_data.n_windows, config.global_batch_size
        )
    if config.arch == 'gpt2' and config.rope_theta and 'rope_theta' in explicit and not pretrained:
        raise ValueError(f'rope_theta={config.rope_theta:g} with arch=gpt2, whose positions are learned: leave it out')
    filled, of_rules = scaling.fill_from_heads(vars(config), explicit)  # wd_ts ..., and with heads sizes and rates
    vars(config).update(filled)
    notes += of_rules + scaling.cautions(vars(config), train_data.n_windows)
    for of_split in (train_data, val_data):
        of_split.plan(config.max_iters, config.global_batch_size)
    notes += train_data.lines(config.max_epochs)
    config.lr_decay_iters = config.lr_decay_iters or config.max_iters
    if config.min_lr is None:
        config.min_lr = config.learning_rate / 10
    model_config = pretrained or ModelConfig.from_keys(vars(config))  # fills from the architecture what is None
    vars(config).update(model_config.to_dict())
    if vars(config).get('context_parallel', 1) > 1:
        check_context_parallel(config, pretrained)
    if 'replicate_size' in vars(config):
        scaling.ranks_per_shard_group(vars(config), world_size)
    if vars(config).get('tensor_parallel', 1) > 1:
        check_tensor_parallel(config, model_config)
    return model_config, notes


def check_context_parallel(config, pretrained):
    """Raise ValueError for a model whose attention cannot be spread over ranks (context_manual.py)."""
    given = f'context_parallel={config.context_parallel}'
    if config.device.startswith('cuda') and config.head_dim % 8:
        raise ValueError(f'{given} with head_dim={config.head_dim}: flash attention takes multiples of 8')
    if not pretrained:
        return
    text, reason = pretrained.config.get_text_config(), None
    rope = getattr(text, 'rope_parameters', None) or getattr(text, 'rope_scaling', None) or {}
    if pretrained.arch not in finetune.OWN_ATTENTION:
        reason = f'its attention is not one that runs here (those of {", ".join(finetune.OWN_ATTENTION)})'
    elif (getattr(text, 'sliding_window', None) or config.block_size) < config.block_size:
        reason = f'it sees {text.sliding_window} tokens back, and block_size={config.block_size} is more'
    elif rope.get('rope_type') in ('dynamic', 'longrope'):
        reason = f'its rotation depends on the length of what a rank has (rope_type={rope["rope_type"]})'
    if reason:
        raise ValueError(f'{given}: {pretrained.arch} cannot share sequences: {reason}; leave it at 1')


def check_tensor_parallel(config, model_config):
    """Raise ValueError for a model that cannot be cut over ranks, or a run that needs whole matrices."""
    ranks, given = config.tensor_parallel, f'tensor_parallel={config.tensor_parallel}'
    if not isinstance(model_config, ModelConfig):
        raise ValueError(f'{given}: models of transformers are not cut; leave it at 1, FSDP shards them')
    if config.optimizer == 'muon':
        raise ValueError(
            f'{given} with optimizer=muon, which orthogonalises whole matrices: use adamw, or leave it at 1'
        )
    sizes = {name: getattr(config, name) for name in ('n_head', 'n_kv_head', 'mlp_hidden_dim')}
    sizes[f'the padded vocabulary of vocab_size={config.vocab_size}, '] = model_config.padded_vocab_size
    sizes['block_size'] = config.block_size
    if (sharing := vars(config).get('context_parallel', 1)) > 1:
        sizes[f'the tokens of a rank, block_size / context_parallel={sharing}, '] = config.block_size // sharing
    for name, size in sizes.items():
        if size % ranks:
            good = math.gcd(*sizes.values())
            raise ValueError(
                f'{given} does not divide {name}={size}: all sizes of this model divide by '
                f'{" or ".join(str(n) for n in range(1, good + 1) if good % n == 0)}'
            )


def make_process_group(config, device):
    """Join the other ranks, or be alone without torchrun: NCCL between GPUs, gloo for what ranks exchange on hosts."""
    checkpoint.prepare(config.out_dir)  # an out_dir that cannot be written is found here, on every rank
    if device.type == 'cuda':
        health.record_flights(config.out_dir)
    join_ranks(config.timeout_s, device)


def join_ranks(timeout_s, device):
    """The same for a script that writes no checkpoints."""
    backend = 'gloo'
    if device.type == 'cuda':
        torch.cuda.set_device(device)
        backend = 'cpu:gloo,cuda:nccl'
    if 'RANK' in os.environ:
        if os.environ['WORLD_SIZE'] != os.environ['LOCAL_WORLD_SIZE']:  # several machines
            # gloo would take the interface that this machine's own name stands for: 127.0.1.1 on many images.
            interface = processes.interface_to(os.environ['MASTER_ADDR'])
            if interface not in (None, 'lo'):
                os.environ.setdefault('GLOO_SOCKET_IFNAME', interface)
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def find_checkpoint(config, pretrained=None):
    """
    The newest good checkpoint of out_dir, the same on every rank, or None. From here on out_dir is this job's alone.

    A run that fine-tunes `pretrained` keeps its configuration and tokenizer in out_dir, so that it can go on without
    init_from. Raises ValueError on every rank if out_dir is in use, or if resume does not allow what is there.
    """
    processes.on_rank_0(checkpoint.claim, config.out_dir)
    if config.eval_only:
        return processes.on_rank_0(checkpoint.choose_to_read, config.out_dir)
    found = processes.on_rank_0(checkpoint.choose, config.out_dir, config.resume)
    if pretrained and found is None:
        processes.on_rank_0(pretrained.keep_files, config.out_dir)
    return found


def identity_of(config, model_config, train_data):
    """What a checkpoint must have in common with the run that resumes from it."""
    shape = {key: value for key, value in model_config.to_dict().items() if key not in ('dropout', 'z_loss')}
    return {
        'model': shape,
        'data': train_data.plan(config.max_iters, config.global_batch_size),
        'optimizer': config.optimizer,
        'global_batch_size': config.global_batch_size,
        'seed': config.seed,
    }


def in_words(keys):
    """What a run reads, in its keys' words."""
    shown = ['dataset', *(('dataset_stages', 'max_iters') if keys.get('dataset_stages') else ())]
    shown += ['windows'] if keys.get('windows') == 'documents' else []
    return ', '.join(f'{key}={keys[key]}' for key in shown)


def check_resume(saved, config, identity, learning_rate_at):
    """
    Refuse to go on as another run. Returns lines for the log: what changes from here on, the learning rate first.

    saved: the state of the checkpoint. learning_rate_at: optim's. Raises ValueError.
    """
    step, before, now = saved['step'], saved['config'], json.loads(json.dumps(vars(config)))  # as state.json has them
    was, now_is = saved['identity'].get('data'), identity.get('data')
    if isinstance(was, str):  # of versions that knew no mixtures
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
    then = {**saved['identity'], 'data': now_is}
    then['model'] = {'parametrization': 'standard', 'yarn': [], **then.get('model', {})}  # versions before had no other
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
