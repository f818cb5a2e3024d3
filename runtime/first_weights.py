"""
With which weights a run begins: from scratch, those of an earlier run of this project, or of a Hugging Face folder.

    open_init_from(run)           # which of them init_from names; the model's keys come from there
    initialise(raw_model, run)    # once the model is made and sharded
"""

import os
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

import data
from dataset.mixture import names_in, parse_stages
from dataset.shards import read_meta
from runtime import checkpoint
from system import processes
from text.tokenizer import as_argument, check_same_tokenizer, load_tokenizer, same_tokenizer


def open_init_from(run):
    """Find what init_from names: run.start_from, the checkpoint of an earlier run, or run.pretrained, a Hugging Face
    folder, or neither of them. It gives the model's keys their values. No weights are read yet."""
    config = run.config
    if config.init_from == 'resume':  # nanoGPT's
        raise ValueError('init_from=resume: leave it out, since a run goes on from the checkpoints in its out_dir')
    run.start_from = run_to_start_from(config, run.explicit)
    if config.native and (config.init_from == 'scratch' or run.start_from):
        given = f'native=True with init_from={config.init_from}'
        raise ValueError(f'{given}, which is no Hugging Face folder: leave native out, model.py computes it')
    check_frozen_dtype(run)
    if config.init_from != 'scratch' and not run.start_from:
        run.pretrained = open_folder(run)
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


def open_folder(run):
    """The finetune.Pretrained of the Hugging Face folder that init_from names."""
    from huggingface import finetune, native  # here, since a run from scratch needs none of it
    from text.encoding import compare_with_transformers

    config = run.config
    if run.strategy == 'pipeline' and not config.native:  # said before anything has to be downloaded
        raise ValueError(
            f"init_from={config.init_from}: transformers' class is not cut into stages: use train_fsdp.py, "
            f'or --native=True for what model.py computes ({", ".join(native.SAME_AS)})'
        )
    if config.native:
        native.refuse_other_families(config.init_from)
    pretrained = finetune.Pretrained.from_keys(vars(config), run.explicit)
    if run.strategy == 'deepspeed':  # its checkpoints hold nothing but weights and moments, so no load
        pretrained.router_aux = pretrained.router_z = 0.0
    if config.native:
        native.model_config_of(pretrained)  # raises for a feature that model.py lacks, before data is opened
    if 'prompts' in vars(config):  # of which there are no tokens yet
        config.vocab_size = pretrained.vocab_size
        return pretrained
    run.notes += check_same_tokenizer(data.folder_of(vars(config)), pretrained.folder)
    run.notes += add_tokens(vars(config), pretrained)
    config.vocab_size = pretrained.vocab_size
    if config.dataset != 'synthetic':
        # prepare_data.py made this comparison for the folder it was given, which may have been another one.
        not_compared = compare_with_transformers(pretrained.folder, config.trust_remote_code)
        run.notes += [f'tokenizer: {not_compared}'] if not_compared else []
    return pretrained


def run_to_start_from(config, explicit):
    """
    If init_from is the out_dir of an earlier run, the path of its newest checkpoint, whose weights the new run begins
    with; otherwise None. Also copies the model's keys from that run into config, except those set explicitly.

    Raises ValueError if that run has fine-tuned a Hugging Face model, since it must be exported first, or if it used
    another tokenizer.
    """
    if not os.path.isdir(os.path.join(config.init_from, 'checkpoints')):
        return None
    from huggingface import finetune

    path = checkpoint.choose_to_read(config.init_from)
    state = checkpoint.read_state(path)
    before = state['config']
    if finetune.is_fine_tuned(state):
        raise ValueError(
            f'init_from={config.init_from} has fine-tuned a model of a Hugging Face folder: export that with '
            f'`python export_model.py --out_dir={config.init_from}`, and give the exported folder'
        )
    shape = checkpoint.read_model_config(path, state).to_dict()  # which has the keys of a model, whatever the file says
    shape = {key: value for key, value in shape.items() if key in state['identity']['model']}
    folder = data.folder_of(before)
    if 'prompts' in vars(config):  # the tokenizer is that of the earlier run's data
        of_data = ('data_dir', 'dataset', 'dataset_stages', 'windows')
        vars(config).update({key: before[key] for key in of_data if key not in explicit})
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
    if not asked:
        return
    if config.init_from == 'scratch' or run.start_from:
        raise ValueError(f'{given} with init_from={config.init_from}: nothing is frozen there, leave frozen_dtype out')
    if config.native:
        only = "only transformers' classes have LoRA and frozen parts"
        raise ValueError(f'{given} with native=True: {only}: leave native out, or frozen_dtype')
    if asked == 'nf4' and vars(config).get('fsdp_impl') == 'torch' and torch.__version__ < (2, 13):
        raise ValueError(
            f'{given}: fully_shard takes bytes from torch 2.13 on, this is {torch.__version__}: use --fsdp_impl=manual'
        )


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
        from huggingface import finetune

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
