"""
The teacher of train_distill.py: another model with the student's tokenizer, frozen.

    opened = open_teacher(run)                            # shapes only; refuses what the student cannot learn from
    teacher = load_teacher(opened, run)                   # whole on each rank, or sharded as the student is
    digest = check_teacher(opened, run, state.get('teacher'))    # for checkpoints: is it the one that the run had?
"""

import copy
from dataclasses import replace

import torch

import fsdp
from huggingface import lora
from runtime.first_weights import fingerprint_of_folder, fingerprint_of_run, initialize
from runtime.opened import open_model
from system import collectives


def open_teacher(run):
    """The Opened of the model that the key `teacher` names. Notes what it adds to the memory of a rank. Raises
    ValueError for a model whose distribution is over other tokens than the student's."""
    from text.tokenizer import difference

    config, given = run.config, f'teacher={run.config.teacher}'
    if not config.teacher:
        raise ValueError(
            'no teacher: name the model to learn from, a run or a Hugging Face folder with the tokenizer of '
            f'init_from={config.init_from}, as --teacher=models/NAME'
        )
    opened = open_model(config.teacher, trust_remote_code=config.trust_remote_code, key='teacher')
    student = run.pretrained.folder if run.pretrained else run.language_folder
    if found := difference(opened.folder, student):
        raise ValueError(
            f'{given}: its tokenizer {found}, and each of its tokens has to mean the same to the student: use a '
            'teacher of the same family'
        )
    if opened.vocab_size > config.vocab_size and config.on_policy < 1:  # it might write one of those that only pad
        raise ValueError(
            f'{given} has logits for {opened.vocab_size:,} tokens, init_from={config.init_from} for '
            f'{config.vocab_size:,}: let the student write, with --on_policy=1'
        )
    if (opened.positions or config.block_size) < config.block_size:
        raise ValueError(
            f'{given} has {opened.positions:,} positions: use --block_size={opened.positions} or less, as this run has '
            f'block_size={config.block_size}'
        )
    if config.packing and opened.pretrained and not opened.pretrained.keeps_documents_apart:
        raise ValueError(f'{given}: {opened.arch} would let the answers in a row see each other: use --packing=False')
    if config.teacher_dtype and (opened.path or not opened.pretrained):
        packs = f"teacher_dtype={config.teacher_dtype} packs only a Hugging Face folder of transformers' classes"
        raise ValueError(f'{given}: {packs}: name an export of it, or leave teacher_dtype out')
    model = empty_teacher(opened, run)
    parameters, shards = model.parameter_counts()['total'], run.layout.shard if config.strategy == 'fsdp' else 1
    size = parameters * (run.compute_dtype if config.strategy == 'ddp' else stored_dtype(run)).itemsize
    if config.teacher_dtype:
        size = sum(parameter.nbytes for parameter in model.parameters())
    run.also_held['teacher'] = size = size // shards
    where = f'a rank holds 1/{shards} of it' if shards > 1 else 'whole on each rank'
    run.notes.append(f'{given}: {opened.arch}, {parameters:,} parameters, {where}, {size / 1e9:.3f} GB')
    return opened


def stored_dtype(run):
    """What the teacher's weights are kept in under FSDP, which gathers them in the compute dtype. Under DDP they are
    cast to that once."""
    return torch.bfloat16 if run.compute_dtype == torch.bfloat16 else torch.float32


def empty_teacher(opened, run):
    """The model of an Opened, frozen, on the meta device, with the dtypes in which its weights are kept."""
    model = opened.empty(run.compute_dtype, run.device, run.config.block_size).requires_grad_(False)
    if run.config.teacher_dtype:
        pretrained = copy.copy(opened.pretrained)
        pretrained.frozen_dtype = run.config.teacher_dtype
        lora.store_frozen(model, pretrained)
    for parameter in model.parameters():
        if parameter.dtype == torch.float32:  # of LoRA's base, others may be in fewer bits
            parameter.data = parameter.data.to(stored_dtype(run))
    return model


def load_teacher(opened, run):
    """The model of an Opened, frozen, to be called as the student is. Collective."""
    if run.config.strategy == 'ddp' and not run.config.teacher_dtype:
        return opened.to_generate(run.config.dtype, run.device, run.notes.append).requires_grad_(False)
    model = called = empty_teacher(opened, run)
    if run.config.strategy == 'fsdp':
        called = fsdp.shard(model, run.layout.mesh(run.device, run.config.timeout_s), run)
    initialize(model, replace(run, start=opened, found=None))  # each rank reads the rows that it keeps
    return called.eval()


def check_teacher(opened, run, saved):
    """A fingerprint of the teacher's weights, for checkpoints. saved: that of the checkpoint that the run resumes from.
    Raises ValueError on every rank if they differ: what is learned would turn around within a run. Collective."""
    of_weights = fingerprint_of_run if opened.path else fingerprint_of_folder
    found = collectives.on_rank_0(of_weights, opened.path or opened.folder, patience_s=collectives.PATIENCE_S)
    if run.found and saved != found:
        raise ValueError(
            f'teacher={run.config.teacher} holds other weights than the teacher that the run in '
            f'{run.config.out_dir} has had: go on with that one, or use another --out_dir, perhaps with '
            f'--init_from={run.config.out_dir}, which begins with its weights'
        )
    return found
