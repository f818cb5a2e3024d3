"""
With which weights a run begins: from scratch, those of an earlier run of this project, or of a Hugging Face folder.

    open_init_from(run)           # which of them init_from names; the model's keys come from there
    initialize(raw_model, run)    # once the model is made and sharded
"""

import os
import shlex
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from dataset.mixture import folder_of, names_in, parse_stages
from dataset.shards import read_meta
from model import tensors_with_values
from runtime import checkpoint
from system import processes
from system.files import is_run, sha256_of


def open_init_from(run):
    """Find what init_from names: run.start, the Opened of an earlier run or of an export that model.py computes, or
    else run.pretrained, a Hugging Face folder, or neither. It gives the model's keys their values. No weights are read
    yet. A run that has fine-tuned a folder gives both: run.pretrained has its shape, run.start its weights."""
    config = run.config
    config.chats, config.lora_targets = False, config.lora_targets.replace('all-linear', 'all')  # peft's word
    if config.init_from == 'resume':  # nanoGPT's
        raise ValueError('init_from=resume: leave it out, since a run goes on from the checkpoints in its out_dir')
    if config.init_from != 'scratch' and (name := run_or_export(config)):
        from runtime.opened import open_model

        run.start = open_model(name, trust_remote_code=config.trust_remote_code, key='init_from')
        take_from(run.start, config, run.explicit, run.learns_from)
        config.fold_system = run.start.keys.get('fold_system', False)
    if config.native and (config.init_from == 'scratch' or (run.start and run.start.model_config)):
        given = f'native=True with init_from={config.init_from}'
        raise ValueError(f'{given}, which is no Hugging Face folder: leave native out, model.py computes it')
    check_frozen_dtype(run)
    if config.init_from != 'scratch' and not (run.start and run.start.model_config):
        run.pretrained = open_folder(run)
    if run.start or run.pretrained:
        from runtime.opened import Opened

        config.chats = (run.start or Opened(config.init_from, run.pretrained.folder)).has_learned_chats
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
            if run.start
            else 'give the folder of one as --init_from'
        )
        raise ValueError(
            f'{key}={getattr(config, key)!r} with init_from={config.init_from}: only models of transformers have LoRA '
            f'and frozen parts: {folder}, or leave {key} out'
        )


def run_or_export(config):
    """init_from, if that is a run or an export that model.py computes; out_dir, if init_from was one and is gone, since
    a run that goes on needs nothing of it; else None."""
    from text.tokenizer import KEPT

    name = config.init_from
    if is_run(name):
        return name
    if os.path.exists(os.path.join(name, 'config.json')):
        from huggingface import convert

        return name if convert.config_of_export(name) else None
    # Not by the folder of the checkpoints, which a faster rank of a new run may have made already.
    goes_on = any(checkpoint.checkpoints_in(os.path.join(config.out_dir, 'checkpoints')))
    is_gone = goes_on and not os.path.isdir(name)
    return config.out_dir if is_gone and not os.path.exists(os.path.join(config.out_dir, KEPT, 'config.json')) else None


def find_beginning(run):
    """
    (a fingerprint of the weights of init_from that a run began with, for its checkpoints, or None; lines for the log).
    They are part of what a run is: its checkpoints follow from them, and they are DPO's reference.

    Raises ValueError if run.found, the checkpoint to resume from, is of a run that began with other weights. The same
    weights may lie elsewhere now, or be gone if init_from still names where they were. For rank 0.
    """
    config, start, given = run.config, run.start, run.config.init_from
    if run.found is None:
        if start and start.path:
            return fingerprint_of_run(start.path), []
        if run.pretrained:
            return run.pretrained.fingerprint, []
        return start and fingerprint_of_folder(start.folder), []
    state = checkpoint.read_state(run.found)
    if 'averaged' in state and not config.eval_only:
        raise ValueError(
            f'out_dir={config.out_dir} holds an average of checkpoints, which has no optimizer state: begin a run with '
            f'it, --init_from={config.out_dir} --out_dir=FOLDER, or go on with the one it was made of'
        )
    saved, was = state.get('begun'), state['config']['init_from']
    is_named_so = os.path.realpath(was) == os.path.realpath(given)
    if is_named_so or (config.eval_only and given == 'scratch'):
        return saved, []
    there = fingerprints_at(given)
    if saved and saved in there:
        return saved, []
    began = 'from scratch' if was == 'scratch' else f'with {was}'
    holds = f'out_dir={config.out_dir} holds a run that began {began}'
    if there and not saved and was != 'scratch':  # an earlier version kept no fingerprint
        return None, [f'WARNING: {holds}, and goes on: if init_from={given} holds other weights, they are not used']
    what = ' holds other weights' if there else ' holds no weights' if os.path.isdir(given) else ' is not there'
    what = '' if given == 'scratch' else what
    raise ValueError(f'{holds}, and init_from={given}{what}: use another --out_dir, or --init_from={was}')


def fingerprints_at(init_from):
    """Of a folder's weights, or of all checkpoints of a run, which may have trained on; [] if nothing is there."""
    from huggingface.files import find_folder

    if is_run(init_from):
        return [*map(fingerprint_of_run, checkpoint.checkpoints_in(os.path.join(init_from, 'checkpoints')))]
    try:
        return [fingerprint_of_folder(find_folder(init_from))]
    except ValueError:
        return []


def fingerprint_of_folder(folder):
    from huggingface.files import Weights

    return Weights(folder).fingerprint()


def fingerprint_of_run(path):
    return sha256_of(os.path.join(path, 'manifest.json'))[:16]  # it has the hashes of all files of the checkpoint


def take_from(start, config, explicit, learns_from='text'):
    """Give config the model's keys of what a run begins with, except those set explicitly. Raises ValueError where what
    is asked for cannot be read out of its checkpoint, or if its tokens are others."""
    from text.tokenizer import KEPT, as_argument, same_tokenizer

    name, before = config.init_from, start.keys
    if learns_from == 'prompts' and start.model_config and before:
        config.windows = before['windows'] if 'windows' not in explicit else config.windows
    elif start.model_config and not same_tokenizer(start.folder, folder_of(vars(config))):
        is_dataset = start.path and not os.path.isdir(os.path.join(name, KEPT))  # of a run that has kept no tokenizer
        raise ValueError(
            f'init_from={name} knows the tokens of {start.folder}, dataset={config.dataset} has those of another '
            'tokenizer: prepare it with `python prepare_data.py --dataset=... --name=... '
            f'--tokenizer={as_argument(start.folder) if is_dataset else shlex.quote(name)}`'
        )
    if start.model_config:
        shape = start.model_config.to_dict()  # which has the keys of a model, whatever the checkpoint says
        if before:
            shape = {key: value for key, value in shape.items() if key in start.state['identity']['model']}
        if 'yarn' in explicit and len(config.yarn) == 1:  # relative to the original context, even if extended before
            config.yarn = [*config.yarn, shape['yarn'][1] if shape.get('yarn') else shape['block_size']]
        vars(config).update({key: value for key, value in shape.items() if key not in explicit})
        return
    # Its checkpoint has the names of what has computed it, and of LoRA nothing but LoRA.
    held = {'native': start.is_native}
    held |= {key: before[key] for key in ('lora_rank', 'lora_alpha', 'lora_targets', 'lora_rslora', 'modules_to_save')}
    for key, value in held.items():
        if key in explicit and getattr(config, key) != value:
            raise ValueError(
                f'{key}={getattr(config, key)!r} with init_from={name}, which has {key}={value!r}: leave {key} out, or '
                f'`python export_model.py --out_dir={name}` first, and begin with the folder that it writes'
            )
        setattr(config, key, value)
    # What its positions were turned by, and what its LoRA has learned beside.
    of_shape = {'block_size', 'rope_theta', 'yarn', *(['frozen_dtype'] if held['lora_rank'] else [])}
    vars(config).update({key: before[key] for key in of_shape & {*before} if key not in explicit})


def open_folder(run):
    """The Pretrained of the Hugging Face folder that init_from names."""
    from huggingface import native  # here, since a run from scratch needs none of it
    from huggingface.pretrained import Pretrained
    from text.encoding import compare_with_transformers
    from text.tokenizer import check_same_tokenizer

    config = run.config
    if run.strategy == 'pipeline' and not config.native:  # said before anything has to be downloaded
        how = '--native=True'
        if run.start:  # whose checkpoint has other names
            how = f'`python export_model.py --out_dir={config.init_from}`, and begin with that folder and {how}'
        raise ValueError(
            f"init_from={config.init_from}: transformers' class is not cut into stages: use train_fsdp.py, or {how} "
            f'for what model.py computes ({", ".join(native.SAME_AS)})'
        )
    if config.native and not run.start:
        native.refuse_other_families(config.init_from)
    pretrained = Pretrained.from_keys(vars(config), run.explicit, run.start and run.start.pretrained)
    if run.strategy == 'deepspeed':  # its checkpoints hold nothing but weights and moments, so no load
        pretrained.router_aux = pretrained.router_z = 0.0
    if config.native:
        native.model_config_of(pretrained)  # raises for a feature that model.py lacks, before data is opened
    if run.learns_from == 'prompts':  # there are no tokens yet
        config.vocab_size = pretrained.vocab_size
        return pretrained
    run.notes += check_same_tokenizer(folder_of(vars(config)), pretrained.folder)
    run.notes += add_tokens(vars(config), pretrained)
    config.vocab_size = pretrained.vocab_size
    if config.dataset != 'synthetic':
        # prepare_data.py made this comparison for the folder it was given, which may have been another one.
        not_compared = compare_with_transformers(pretrained.folder, config.trust_remote_code)
        run.notes += [f'tokenizer: {not_compared}'] if not_compared else []
    return pretrained


def add_tokens(keys, pretrained):
    """Give rows to tokens that a dataset has and the model's embedding lacks, as when special tokens have been added to
    the tokenizer of a folder. Returns lines for the log, also if the last token has a row that was never trained and
    stays so. Raises ValueError if rows that are added would not be trained."""
    datasets = names_in(parse_stages(keys))
    if keys['val_dataset']:
        datasets += names_in(parse_stages({**keys, 'dataset': keys['val_dataset'], 'dataset_stages': ()}))
    splits = {name: read_meta(Path(keys['data_dir'], name)).get('splits', {}).values() for name in datasets}
    largest = {name: max((facts.get('max_token', -1) for facts in found), default=-1) for name, found in splits.items()}
    name, rows, folder = max(largest, key=largest.get), pretrained.vocab_size, pretrained.folder
    token = largest[name]
    given = f'dataset={name} has the token {token}'
    if token < rows:
        # Embeddings often have rows to spare. Which tokens took one of them is not known, but they are the last ones.
        is_frozen = token >= 0 and (pretrained.lora_rank or pretrained.freeze)
        frozen = pretrained.never_trained(token) if is_frozen else []
        why = f'whose row in {folder} is that of the token beside it, so it was never trained'
        return [f'WARNING: {given}, {why}, and {pretrained.how_to_train(frozen)}'] if frozen else []
    given += f', the embedding of {folder} {rows:,} rows'
    from text.tokenizer import load_tokenizer

    n_tokens = max(load_tokenizer(folder).vocab_size, token + 1)
    try:
        pretrained.add_tokens(n_tokens)
    except ValueError as error:
        raise ValueError(f'{given}: new tokens need rows of their own, and {error}') from error
    return [f'{given}: {n_tokens - rows:,} new rows begin as the mean of the others']


def check_frozen_dtype(run):
    """Raise ValueError if frozen weights cannot be kept in frozen_dtype, or if no weights are frozen."""
    config, asked = run.config, run.config.frozen_dtype
    given = f'frozen_dtype={asked}'
    if run.strategy == 'deepspeed' and (config.lora_rank or config.freeze):  # DeepSpeed keeps all weights in one dtype
        config.frozen_dtype = 'float32'
        if asked not in (None, 'float32'):
            raise ValueError(f'{given}: DeepSpeed keeps all weights in one dtype: use train_fsdp.py')
    in_bytes = 'nf4' in (asked, vars(config).get('teacher_dtype')) and run.strategy != 'ddp'
    if in_bytes and vars(config).get('fsdp_impl') == 'torch' and torch.__version__ < (2, 13):
        raise ValueError(
            f'nf4: fully_shard takes bytes from torch 2.13 on, this is {torch.__version__}: use --fsdp_impl=manual'
        )
    if not asked:
        return
    if config.init_from == 'scratch' or (run.start and run.start.model_config):
        raise ValueError(f'{given} with init_from={config.init_from}: nothing is frozen there, leave frozen_dtype out')
    if config.native:
        only = "only transformers' classes have LoRA and frozen parts"
        raise ValueError(f'{given} with native=True: {only}: leave native out, or frozen_dtype')


@torch.no_grad()
def initialize(model, run, device=None):
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
    if run.start:
        run.start.fill(model, run.share, run.config.seed)
        return
    if run.pretrained and not run.config.native:
        from huggingface import loading

        loading.load(model, run.pretrained, run.config.seed)  # every rank reads the rows that it keeps
        return
    parameters = model.named_parameters()
    if run.pretrained:
        sizes = {(name, tensor): tensor.nbytes for name, tensor in tensors_with_values(model)}
        parameters = processes.progress(f'loading {run.config.init_from}', sizes)
    for name, parameter in parameters:
        value = run.share.initial_value(model, name, parameter, run.config.seed, run.device)
        if isinstance(parameter, DTensor):
            # Every rank has computed the whole value and keeps only its slice, which needs no communication.
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(value)
