"""
What stands between train_deepspeed.py and DeepSpeed: its JSON configuration, and the run's weights and optimizer state,
which are moved by parameter name into and out of the flat slices in which ZeRO keeps them.

    engine_config = configuration(config, ...)  # the keys as DeepSpeed's JSON, or the user's file checked against them
    engine = start(deepspeed, model, opt, raw_model, engine_config, device, timeout)  # from rows on the host
    holder = take_back(engine, opt, raw_model)  # and there again, for a checkpoint

ZeRO (arXiv 1910.02054) flattens the parameters of a group, one after the other, and gives each rank an equal part of
the fp32 weights and moments; under stage 3 each parameter is cut by itself. Checkpoints do not depend on any of this:
they hold whole tensors by name, of which each rank writes rows, so every strategy and any number of ranks can resume
from them.

Written for deepspeed 0.19: places_in_zero(), gradients(), refresh() and forget_order() use its optimizers' attributes.
"""

import contextlib
import difflib
import io
import itertools
import json
import logging
import math
import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import optim
from layout import FP32, numbers
from model import ModelConfig

INSTALL = 'pip install -r requirements-deepspeed.txt'
BUCKET = 2**25  # numbers that are reduced together: 134 MB in fp32, five times DDP's buckets
# Defaults of DeepSpeed 0.19 for stage 3, in numbers. Parameters up to the first size always stay whole. Larger ones
# stay whole only if they are needed again before more than the second number of others has been used.
PERSISTENT, REUSE = 10**5, 10**9
LEFT_OUT = (None, 'auto')  # values in a user's file that are replaced by ours
SECTIONS_OF_KEYS = {  # sections of a user's file that keys of the script decide, so they may hold nothing but "auto"
    'optimizer': '--optimizer, --learning_rate, --weight_decay, ...',
    'scheduler': '--lr_schedule, --warmup_iters, ...',
    'amp': '--dtype',
    'torch_autocast': '--dtype',
}
# In these sections "type" may be given, too: (the key it has to agree with, {DeepSpeed's name: the key's value})
TYPES = {
    'optimizer': ('optimizer', {'Adam': 'adamw', 'AdamW': 'adamw'}),
    'scheduler': ('lr_schedule', {'WarmupLR': 'constant', 'WarmupDecayLR': 'linear', 'WarmupCosineLR': 'cosine'}),
}
SETTINGS_OF_KEYS = {  # settings of a user's file, and the key with which each has to agree
    'train_batch_size': 'global_batch_size',
    'train_micro_batch_size_per_gpu': 'batch_size',
    'gradient_accumulation_steps': 'global_batch_size',
    'gradient_clipping': 'grad_clip',
    'zero_optimization.stage': 'zero_stage',
    'zero_optimization.offload_optimizer.device': 'cpu_offload',
    'zero_optimization.offload_param.device': 'cpu_offload',
    'bf16.enabled': 'dtype',
    'fp16.enabled': 'dtype',
}
FIXED = {  # settings that keep their defaults, since with others places_in_zero() would not find the weights
    'zero_optimization.round_robin_gradients': False,
    'zero_optimization.zero_hpz_partition_size': 1,
    'zero_optimization.mics_shard_size': -1,
    'zero_optimization.zero_quantized_weights': False,
    'zero_optimization.zero_quantized_nontrainable_weights': False,
    'zero_optimization.zero_quantized_gradients': False,
    'zero_optimization.cpu_offload': False,  # old names, which the check against the key cpu_offload would miss
    'zero_optimization.cpu_offload_params': False,
}


def package(device):
    """Import the package deepspeed for this device. Raises ValueError if it is missing or has another version."""
    os.environ['DS_ACCELERATOR'] = device.type  # read once, by the import
    # It needs LOCAL_RANK even without torchrun, and takes it for the GPU's number.
    os.environ['LOCAL_RANK'] = os.environ.get('LOCAL_RANK', '0') if device.type == 'cpu' else str(device.index)
    try:
        import deepspeed
    except Exception as error:  # if it finds CUDA but no nvcc, it raises MissingCUDAException, which is no ImportError
        raise ValueError(f'train_deepspeed.py needs the package deepspeed ({error}): {INSTALL}') from error
    if not deepspeed.__version__.startswith('0.19.'):
        raise ValueError(f'deepspeed {deepspeed.__version__} is installed, 0.19 is expected: {INSTALL}')
    return deepspeed


def check(keys, layout, shape):
    """Raise ValueError for what DeepSpeed's engine, or train_deepspeed.py with it, cannot do."""
    if isinstance(shape, ModelConfig) and shape.n_experts:
        raise ValueError(
            f'n_experts={shape.n_experts}: train_deepspeed.py has no mixtures of experts: use train_fsdp.py'
        )
    stage, fp16 = keys['zero_stage'], keys['dtype'] == 'float16'
    for is_asked, what in (
        (keys['optimizer'] == 'muon', 'optimizer=muon: it needs whole matrices, ZeRO updates flat slices; use adamw'),
        (
            keys['optimizer_dtype'] != 'float32',
            f'optimizer_dtype={keys["optimizer_dtype"]}: its flat slices know no rows; leave it out',
        ),
        (keys['matmul_dtype'], f'matmul_dtype={keys["matmul_dtype"]}: it has weights of its own; leave it out'),
        (keys['compile'] and stage == 3, 'compile=True with zero_stage=3: use --compile=False or --zero_stage=2'),
        (keys['cpu_offload'] == 'params' and stage != 3, f'cpu_offload=params with zero_stage={stage}: it needs 3'),
        (fp16 and keys['device'] == 'cpu', 'dtype=float16 on a CPU: use --dtype=bfloat16'),
    ):
        if is_asked:
            raise ValueError(f'DeepSpeed cannot train with {what}, or train with train_fsdp.py')


# --- what a rank holds and sends --------------------------------------------------------------------------------------


def holds(plan):
    """
    States of ZeRO as in DeepSpeed 0.19 with its defaults, and activations.

    Unlike our FSDP, ZeRO holds a second copy of the weights in the compute dtype, even if that is fp32: whole, or in
    stage 3 a slice, with small parameters whole. Stage 1 holds a whole fp32 gradient: in bf16 always, otherwise while
    several micro-steps add up. In fp32, stages 1 and 2 hold the gradients of whole parameters, see
    reaching_into_slices().
    """
    keys, ranks, compute = plan.keys, plan.layout.ranks, plan.compute_bytes
    stage, whole, trainable = keys['zero_stage'], numbers(plan.weights.all), numbers(plan.weights.trained)
    small = numbers(small_parameters(plan)) if ranks > 1 else 0  # on one rank the slice is everything
    part = math.ceil(trainable / ranks)
    host = 'host ' if keys['cpu_offload'] != 'none' else ''
    host_of_slices = 'host ' if keys['cpu_offload'] == 'params' else ''
    sums_whole = stage == 1 and keys['dtype'] == 'bfloat16' and not host
    gradient_numbers = trainable if sums_whole else part
    if stage < 3 and keys['dtype'] == 'float32' and not host and trainable == whole:
        gradient_numbers = reaching_into_slices(plan.model, ranks)

    weights = {'weights': compute * (small if stage == 3 else whole)}
    for place, size in ((host_of_slices, compute * math.ceil(whole / ranks) * (stage == 3)), (host, FP32 * part)):
        weights[f'{place}weights'] = weights.get(f'{place}weights', 0) + size
    parts = weights | {
        f'{host}gradients': FP32 * gradient_numbers,
        f'{host}optimizer': FP32 * optim.MOMENTS[keys['optimizer']] * part,
    }
    if stage == 1 and plan.layout.micro_steps > 1 and not sums_whole:
        parts['accumulated'] = FP32 * (trainable - (0 if host else gradient_numbers))
    if stage == 3 and ranks > 1:
        parts['gathered'] = compute * min(whole - small, REUSE)
    used = min(BUCKET, trainable)
    bucket = 2 * BUCKET if plan.on_cuda else used  # 2: one fills, one is reduced; hosts touch only what is used
    bytes_per_number = compute if stage == 2 else FP32
    parts['reduction'] = bytes_per_number * bucket + (FP32 * used if bytes_per_number < FP32 else 0)
    return parts | plan.activations.parts()


def small_parameters(plan):
    """Those that stage 3 keeps whole on every rank."""
    return [parameter for parameter in plan.weights.all if parameter.numel() <= PERSISTENT]


def reaching_into_slices(model, ranks):
    """
    Numbers in all parameters that rank 0's slices have a part of, if every parameter is trained. ZeRO lays out the
    parameters of each optimizer group in order, and cuts them into equal slices of an even number of elements.
    """
    found = 0
    for group in optim.parameter_groups(model, weight_decay=0.0):
        ends = [*itertools.accumulate((parameter.numel() for parameter in group['params']), initial=0)]
        end_of_slice = 2 * math.ceil(ends[-1] / 2 / ranks)
        found += next((end for end in ends if end >= end_of_slice), ends[-1])
    return found


def sends(plan):
    """
    Gradients are reduced in fp32: in stage 1 after the last micro-step, in the others after each; in stages 1 and 2 by
    all-reduce. Updated weights are gathered, in stage 3 in each micro-step, and there twice those that are used too far
    apart to be kept (this follows from DeepSpeed's source; no test has such a model). A run's first step gathers more.
    """
    stage, micro_steps, ranks = plan.keys['zero_stage'], plan.layout.micro_steps, plan.layout.ranks
    whole, trainable, compute = numbers(plan.weights.all), numbers(plan.weights.trained), plan.compute_bytes
    of_others = (ranks - 1) / ranks
    if stage < 3:
        reductions = micro_steps if stage == 2 else 1
        return {
            'all-gather': of_others * compute * trainable,
            'all-reduce': 2 * of_others * FP32 * trainable * reductions,
        }
    large = whole - numbers(small_parameters(plan))
    again = max(0, large - REUSE // 2)  # forward and backward pass what lies behind it: twice
    return {
        'all-gather': of_others * compute * (whole - large + micro_steps * (large + again)),
        'reduce-scatter': of_others * FP32 * trainable * micro_steps * (1 if plan.on_cuda else 2),  # as planning.fsdp
    }


# --- its configuration ------------------------------------------------------------------------------------------------


def configuration(config, accumulation_steps, file=None):
    """DeepSpeed's configuration (a dict, as in its JSON) of a run with these keys.

    file: a JSON file of the user's. Its settings hold, but those that are 'auto' or left out are filled in, and those
    that a key of the script decides have to agree with the key. Raises ValueError with the setting, the value and the
    key of every conflict.
    """
    zero = {
        'stage': config['zero_stage'],
        'reduce_bucket_size': BUCKET,
        'overlap_comm': config['device'] != 'cpu',
    }
    if config['cpu_offload'] != 'none':
        zero['offload_optimizer'] = {'device': 'cpu', 'pin_memory': config['device'] != 'cpu'}
    if config['cpu_offload'] == 'params':
        zero['offload_param'] = {'device': 'cpu', 'pin_memory': config['device'] != 'cpu'}
    ours = {
        'train_batch_size': config['global_batch_size'],
        'train_micro_batch_size_per_gpu': config['batch_size'],
        'gradient_accumulation_steps': accumulation_steps,
        'gradient_clipping': config['grad_clip'],
        'zero_optimization': zero,
        'bf16': {'enabled': config['dtype'] == 'bfloat16', 'check_grad_overflow': config['dtype'] == 'bfloat16'},
        'fp16': {'enabled': config['dtype'] == 'float16', 'hysteresis': 1},
        'data_types': {'grad_accum_dtype': 'fp32'},  # as in the other scripts; DeepSpeed's default is the compute dtype
        'communication_data_type': 'fp32',  # of gradients; weights are gathered in the compute dtype
        'zero_allow_untested_optimizer': True,  # all of optim.py but muon are elementwise: a flat slice will do
        'zero_force_ds_cpu_optimizer': False,  # PyTorch's fused Adam, where DeepSpeed would compile its own
    }
    if file is None:
        return ours
    theirs = read_settings(file)
    if found := contradictions(theirs, ours, config):
        raise ValueError(f'deepspeed_config={file}: {"; ".join(found)}')
    return merged(ours, {name: value for name, value in theirs.items() if name not in SECTIONS_OF_KEYS})


def read_settings(file):
    """The dict in a user's JSON file."""
    try:
        with open(file, encoding='utf-8') as opened:
            theirs = json.load(opened)
    except (OSError, ValueError) as error:
        raise ValueError(f'deepspeed_config={file} cannot be read as JSON: {error}') from error
    if not isinstance(theirs, dict):
        raise ValueError(f'deepspeed_config={file}: expected a JSON object, as in {{"zero_optimization": {{...}}}}')
    return theirs


def contradictions(theirs, ours, config):
    """What is wrong with the user's settings: a text for each one that is unknown or in conflict with a key."""
    found = []
    for section, keys in SECTIONS_OF_KEYS.items():
        key, values = TYPES.get(section, ('', {}))
        given = theirs.get(section)
        kind = given.get('type') if isinstance(given, dict) else None
        if not is_auto({**given, 'type': 'auto'} if kind in values else given):
            found.append(f'"{section}" is decided by {keys}: delete it, or write "auto" for its values')
        elif kind in values and values[kind] != config[key]:
            found.append(f'"{section}.type" is "{kind}": train with --{key}={values[kind]}, or delete "{section}"')
    for section, value in theirs.items():
        near = () if section in ours else difflib.get_close_matches(section, ours, 1, 0.8)
        if near:
            found.append(f'"{section}" is unknown: did you mean "{near[0]}"?')
        if isinstance(ours.get(section), dict) and not isinstance(value, dict) and value not in LEFT_OUT:
            found.append(f'"{section}" is {json.dumps(value)}, expected an object: {{...}}, or "auto"')
    key_settings = {path: setting(ours, path) for path in SETTINGS_OF_KEYS}
    for path, expected in (key_settings | FIXED).items():
        given, key = setting(theirs, path), SETTINGS_OF_KEYS.get(path)
        expected = 'none' if expected is None else expected  # for offload_..., whose section we leave out
        if given not in (*LEFT_OUT, expected):
            where = f'with {key}={config[key]}' if key else 'here'
            wrong = f'"{path}" is {json.dumps(given)}, {where} it has to be {json.dumps(expected)}'
            found.append(f'{wrong}: change it, or write "auto"')
    return found


def is_auto(value):
    """Whether a value, and every value inside of it, is 'auto' or None."""
    return all(map(is_auto, value.values())) if isinstance(value, dict) else value in LEFT_OUT


def setting(settings, path):
    """The value at a path like 'zero_optimization.stage', or None."""
    for name in path.split('.'):
        settings = settings.get(name) if isinstance(settings, dict) else None
    return settings


def merged(ours, theirs):
    """Their settings, and ours where they leave one out or set it to 'auto'. An 'auto' unknown to ours is dropped."""
    result = dict(ours)
    for name, value in theirs.items():
        if isinstance(value, dict):
            result[name] = merged(ours[name] if isinstance(ours.get(name), dict) else {}, value)
        elif value not in LEFT_OUT:
            result[name] = value
    return result


# --- the engine -------------------------------------------------------------------------------------------------------


def start(deepspeed, model, optimizer, raw_model, settings, device, timeout):
    """DeepSpeed's engine over the process group that exists already. Collective.

    model: the model to train, on meta. raw_model: has its weights as rows (see shard_rows), which are freed. optimizer:
    over raw_model's parameters, perhaps with state; it is made to step the engine's flat slices instead. timeout: of
    the engine's collectives, a timedelta.
    Raises ValueError for settings that DeepSpeed refuses.
    """
    from torch.distributed.distributed_c10d import _set_pg_timeout

    for parameter in model.parameters():  # not the buffers: RoPE's frequencies stay fp32
        parameter.data = parameter.data.to(model.compute_dtype)
    # Under stage 3 parameters pass through the device one by one when they are cut, so the whole need not fit there.
    model.to_empty(device='cpu' if settings['zero_optimization']['stage'] == 3 else device)
    states = retarget(optimizer, raw_model, model)
    # Its comm module would compile a shared-memory all-reduce for CPUs, which it uses only for inference.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.comm.comm.cdb = deepspeed.utils.groups._WORLD_GROUP = None  # of an earlier run in this process
    warnings.filterwarnings('ignore', category=FutureWarning, module='torch.distributed')  # new names of collectives
    logging.getLogger('DeepSpeed').setLevel(logging.WARNING)
    logging.getLogger('DeepSpeed').addFilter(lambda record: 'untested optimizer' not in record.getMessage())
    chatter = io.StringIO()  # memory reports that no setting turns off
    with contextlib.redirect_stdout(chatter):
        deepspeed.init_distributed(verbose=False)
        try:
            deepspeed.DeepSpeedConfig(settings)
            if settings['zero_optimization']['stage'] == 3:
                deepspeed.zero.Init(module=model, config_dict_or_path=settings)
            options = {'config': settings, 'dist_init_required': False}
            engine = deepspeed.initialize(model=model, optimizer=optimizer, **options)[0]
        except RuntimeError:  # out of memory, or a collective: not the settings
            raise
        except Exception as error:  # pydantic's, assertions, ...
            line = f'{type(error).__name__}: {" ".join(str(error).split())}'.partition(' For further')[0][:300]
            raise ValueError(f'DeepSpeed refuses the configuration: {line}; correct deepspeed_config') from error
    _set_pg_timeout(timeout, engine.data_parallel_group)
    hand_over(engine, optimizer, raw_model, states)
    if loss_scaler := adapting_loss_scaler(engine):
        loss_scaler.min_scale = 0  # with the default, 1, it would raise there; here health.Numbers decides when to stop
    if settings['zero_optimization']['stage'] == 3:
        engine.module.register_forward_hook(lambda *_: forget_order(engine))
    return engine


def forget_order(engine):
    """After a forward pass without gradients, let stage 3 learn anew in which order the modules run.

    Stage 3 gathers weights ahead in the order of the pass before. If another module than expected takes a weight that
    is on its way, it does not wait for that weight. And the order does change: a pass that returns logits, as in
    self_test.run(), calls the head as a module, while a pass for the loss only takes its weight. The price is that
    nothing is gathered ahead in one step after each evaluation.
    """
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    if not torch.is_grad_enabled() and not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()


def adapting_loss_scaler(engine):
    """DeepSpeed's loss scaler under fp16; None without fp16, or if the user's file fixes the scale."""
    loss_scaler = getattr(engine.optimizer, 'loss_scaler', None)
    return loss_scaler if engine.fp16_enabled() and loss_scaler.dynamic else None


def gradients(engine):
    """This rank's part of the gradient, a list of tensors. Call it after the last backward() and before step()."""
    zero = engine.optimizer
    if hasattr(zero, 'fp32_groups_gradient_flat_partition'):  # stage 1 in bf16 has an optimizer of its own
        return zero.fp32_groups_gradient_flat_partition
    if getattr(zero, 'cpu_offload', False) or getattr(zero, 'offload_optimizer', False):
        if engine.device.type == 'cuda':
            torch.cuda.synchronize()  # they are copied into pinned memory, and nobody has waited for that yet
        is_stage_3 = engine.zero_optimization_stage() == 3
        flats = zero.fp32_partitioned_groups_flat if is_stage_3 else zero.single_partition_of_fp32_groups
        return [flat.grad for flat in flats]
    return [tensor for group in zero.averaged_gradients.values() for tensor in group]


def step(engine, optimizer, skip):
    """Clip, update this rank's slices, gather the weights and free the gradients. skip: bool, to leave out the update.

    The engine cannot be told to skip an update. But it updates by calling our optimizer's step() without arguments,
    perhaps several times, and a hook of torch's can add the argument.
    """
    hook = optimizer.register_step_pre_hook(lambda _, args, kwargs: (args, {**kwargs, 'skip': skip}))
    engine.step()
    hook.remove()


def dtypes(engine, compute):
    """A line for the log with the dtypes, which a user's deepspeed_config may have changed. compute: the key dtype."""
    flats = [flat for flat, _, _, _ in places_in_zero(engine).values()]
    masters, reduction = flats[0].dtype if flats else torch.float32, engine.communication_data_type
    line = f'dtypes: weights {masters}, compute {compute}, gradient reduction {reduction}, optimizer state {masters}'
    return line.replace('torch.', '')


def held(engine, optimizer, gradients):
    """(weights, gradients, optimizer state) of this rank, as lists of tensors. Weights: for compute, and in fp32."""
    weights = {flat for flat, _, _, _ in places_in_zero(engine).values()}
    for parameter in engine.module.parameters():
        weights |= {parameter.data, getattr(parameter, 'ds_tensor', None)}
    return list(weights), gradients, [tensor for state in optimizer.state.values() for tensor in state.values()]


def places_in_zero(engine):
    """Where this rank's fp32 weights are: {parameter: (flat, start, first, length)}, if it has any of the parameter's.

    flat[start : start + length] holds the numbers first to first + length of the flattened parameter.
    """
    zero, places = engine.optimizer, {}
    if engine.zero_optimization_stage() == 3:
        for flat, group in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
            start = 0
            for parameter in group:
                size = parameter.partition_numel()  # the same on every rank; the last one's may end in padding
                first = dist.get_rank() * size
                if first < parameter.ds_numel:
                    places[parameter] = flat, start, first, min(size, parameter.ds_numel - first)
                start += size
        return places
    in_bf16 = hasattr(zero, 'bf16_groups')
    flats = zero.fp32_groups_flat_partition if in_bf16 else zero.single_partition_of_fp32_groups
    for flat, group in zip(flats, zero.bf16_groups if in_bf16 else zero.bit16_groups, strict=True):
        for parameter in group:
            if mapping := parameter._hp_mapping:
                here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
                places[parameter] = flat, here.start, there.start, here.numel
    return places


def refresh(engine):
    """Copy the fp32 weights into the weights for compute again, on all ranks."""
    zero = engine.optimizer
    if engine.zero_optimization_stage() < 3:
        zero.update_lp_params()
        return
    for group in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(group)
    if zero.persistent_parameters:  # small ones are kept whole on every rank
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


# --- rows on the host -------------------------------------------------------------------------------------------------


def shard_rows(model, mesh):
    """Make every parameter of a model on the meta device a DTensor, sharded by rows (Shard(0)) as in fully_shard."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                rows = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
                module._parameters[name] = nn.Parameter(rows, requires_grad=parameter.requires_grad)


def retarget(optimizer, raw_model, model):
    """Give the optimizer the parameters of `model` instead of raw_model's; returns the state of these, by name."""
    names = {parameter: name for name, parameter in raw_model.named_parameters()}
    parameters = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group['params'] = [parameters[names[parameter]] for parameter in group['params']]
    states = {names[parameter]: dict(state) for parameter, state in optimizer.state.items()}
    optimizer.state.clear()
    return states


@torch.no_grad()
def hand_over(engine, optimizer, raw_model, states):
    """Give the engine the weights of raw_model (rows, see shard_rows) and the optimizer's state by name; free the rows.

    Collective. Each parameter is whole for a moment, in host memory.
    """
    places = places_in_zero(engine)
    for (name, image), parameter in zip(raw_model.named_parameters(), engine.module.parameters(), strict=True):
        for slot, value in {None: image, **states.pop(name, {})}.items():
            whole = value.full_tensor().flatten() if isinstance(value, DTensor) else value
            if not parameter.requires_grad:  # ZeRO has no fp32 weights of it; its rows stay, for checkpoints
                copy_frozen(parameter, whole)
            if parameter not in places:
                continue
            flat, start, first, length = places[parameter]
            if whole.dim() == 0:  # `step`
                optimizer.state[flat][slot] = whole.cpu()
                continue
            if slot is None:
                target = flat
            elif slot not in optimizer.state[flat]:
                target = optimizer.state[flat][slot] = torch.zeros_like(flat)
            else:
                target = optimizer.state[flat][slot]
            target[start : start + length] = whole[first : first + length]
    for image, buffer in zip(raw_model.buffers(), engine.module.buffers(), strict=True):
        buffer.copy_(image)
    refresh(engine)
    check_placed(engine, raw_model)
    drop(raw_model)


def check_placed(engine, raw_model):
    """Raise ValueError unless the weights for compute are those of raw_model. Under stage 3 nothing is checked, because
    there a rank does not see whole weights.

    Each rank compares its own rows, because numbers in a wrong place would train without any other sign.
    """
    if engine.zero_optimization_stage() == 3:
        return
    for (name, image), parameter in zip(raw_model.named_parameters(), engine.module.parameters(), strict=True):
        rows = image.to_local() if isinstance(image, DTensor) else image
        chunks = parameter.chunk(dist.get_world_size())
        mine = chunks[dist.get_rank()] if dist.get_rank() < len(chunks) else parameter[:0]
        if not torch.equal(mine, rows.to(mine)):
            raise ValueError(
                f'DeepSpeed computes with other numbers in {name} than it was given: a setting in deepspeed_config '
                'must keep its weights in another order; delete settings until they agree'
            )


def copy_frozen(parameter, whole):
    """Fill a frozen parameter of the engine (under stage 3 this rank's slice) from its whole value, flattened."""
    if not hasattr(parameter, 'ds_tensor'):
        parameter.copy_(whole.view(parameter.shape))
        return
    size = parameter.partition_numel()
    slice_of_rank = whole[dist.get_rank() * size :][:size]  # the last ranks' are shorter, or empty
    parameter.ds_tensor[: slice_of_rank.numel()] = slice_of_rank


@torch.no_grad()
def take_back(engine, optimizer, raw_model):
    """Fill the rows of raw_model with the engine's fp32 weights; returns an optimizer that holds the state in rows.

    Collective. Each parameter is whole for a moment, on the device. drop(raw_model) frees the rows again.
    """
    places, rank, world_size = places_in_zero(engine), dist.get_rank(), dist.get_world_size()
    holder = torch.optim.Optimizer(raw_model.parameters(), {})
    some = next((state for state in optimizer.state.values() if state), {})  # empty before the first step
    for image, parameter in zip(raw_model.parameters(), engine.module.parameters(), strict=True):
        for slot in (None, *some) if image.requires_grad else ():
            if slot is not None and some[slot].dim() == 0:
                holder.state[image][slot] = some[slot].cpu()
                continue
            whole = torch.zeros(image.numel(), device=engine.device)
            if parameter in places:
                flat, start, first, length = places[parameter]
                source = flat if slot is None else optimizer.state[flat][slot]
                whole[first : first + length] = source[start : start + length]
            dist.all_reduce(whole)  # exact: each number is on one rank, and 0 on the others
            chunks = whole.view(image.shape).chunk(world_size)
            rows = (chunks[rank] if rank < len(chunks) else chunks[0][:0]).clone().cpu()
            if slot is None:
                image._local_tensor = rows
            else:
                like = {'run_check': False, 'shape': image.shape, 'stride': image.stride()}
                holder.state[image][slot] = DTensor.from_local(rows, image.device_mesh, image.placements, **like)
    return holder


def drop(raw_model):
    """Free the rows of the parameters that are trained; names and shapes stay."""
    for image in raw_model.parameters():
        if image.requires_grad:
            image._local_tensor = image._local_tensor.to('meta')
