"""
What the model that a run began with thinks of the answers: their log-probabilities under its first weights, which
train_dpo.py compares with those under its present ones.

    digest = set_reference(model, run, state.get('reference'), beat, say)  # now batches have them as a fourth part

They are computed once, before the first step, and kept in out_dir/reference.npz, since a resumed run no longer has the
weights. That costs a forward pass over the data, and no memory for a second model.
"""

import contextlib
import os

import numpy as np
import torch
import torch.distributed as dist

import data
from configurator import tagged
from huggingface import lora
from keys import Keys
from logprobs import document_logps
from system import collectives, processes
from system.files import replacing, sha256_of

FILE = 'reference.npz'  # in out_dir: {"split fingerprint" of a source: float32 (windows, documents)}


def refuse_other_losses(run):
    """Raise ValueError for keys that would add noise to the log-probabilities of answers, or a loss that scripts which
    learn from these do not have; note what else of a mixture stands still."""
    config = run.config
    is_mixture = (
        run.model_config.n_experts if run.model_config else run.pretrained.router_aux or run.pretrained.router_z
    )
    for key in sorted(key for key in tagged('may change') if hasattr(Keys, key)):
        value = vars(config)[key]
        if not value or (key.startswith('router_') and not is_mixture):
            continue
        if 'dropout' in key:
            raise ValueError(
                f'{key}={value}: what an answer gains would be lost in the noise of dropout, without which it has been '
                f'judged or written before: leave {key} out'
            )
        raise ValueError(f'{key}={value}: this script has no such loss: use --{key}=0')
    if run.model_config and run.model_config.router_bias:  # moved by the tokens of each expert, which that loss counts
        run.notes.append(
            'router_bias: the biases of the experts stay as they are, since this script does not move them'
        )


def check_keys(run):
    """refuse_other_losses(); note how many pairs there are."""
    refuse_other_losses(run)
    config = run.config
    sources = run.train_data.sources
    windows, pairs = sum(source.n_windows for source in sources), sum(int(source.n_targets.sum()) for source in sources)
    per_step = config.global_batch_size * pairs / windows
    run.notes.append(
        f'{pairs:,} pairs in {windows:,} sequences: a step has {per_step:.4g} of them on average, which other trainers '
        'call the batch'
    )


def self_test(rewards, logps, run):
    """A line for the log if the answers of the first step's pairs are as likely as their reference says, since nothing
    has been learned yet. rewards, logps: of this rank's pairs, (P, 2) both. Collective. Raises ValueError on every rank
    otherwise: then something is compared with something else."""
    moved = (rewards / run.config.beta).abs()
    largest = (moved / logps.abs().clamp(min=1)).max().item()
    exact = run.compute_dtype == torch.float32
    problem = None
    if not largest <= (1e-4 if exact else 0.02):
        problem = (
            f'self-test: an answer has another log-probability in the first step than under the same weights in the '
            f'reference, by {largest:.2g} of it: the loss would not begin at ln 2; please report this'
        )
    collectives.raise_together(problem)
    return f'self-test: before the first step all answers are as likely as their reference says (within {largest:.1g})'


def set_reference(model, run, saved, beat, say):
    """
    Give the training and validation data of a run their reference, for all ranks; with eval_only the latter alone.
    Returns the sha256 of its file, which belongs into checkpoints. Collective.

    saved: what the checkpoint says that the run resumes from. beat: called before each forward pass. say: prints a line
    of the log. Raises ValueError on every rank if the run resumes and the file is gone, or another, or if its data are
    others and the first weights are gone.
    """
    config = run.config
    path = os.path.join(config.out_dir, FILE)
    mixtures = {'val': run.val_data} if config.eval_only else run.splits
    sources = [(mixture, source) for mixture in mixtures.values() for source in mixture.sources]
    # Two sources may have the same fingerprint, and with it the same windows.
    keys = [f'{split} {source.fingerprint}' for split, mixture in mixtures.items() for source in mixture.sources]
    arrays, digest, first_weights = {}, None, contextlib.nullcontext()
    if run.found:
        arrays, digest = collectives.on_rank_0(read, path, saved)
        first_weights = lora.turned_off(model)  # not those of modules_to_save
        if lacking := [key for key in keys if key not in arrays]:
            refuse_other_pairs(config, path, lacking[0].split()[0], bool(run.start and run.start.path))
    if not {*keys} <= {*arrays}:
        pairs = {
            split: sum(int(source.n_targets.sum()) for source in mixture.sources) for split, mixture in mixtures.items()
        }
        counts = ' and '.join(f'{n:,} {split}' for split, n in pairs.items())
        say(f'reference: the log-probabilities of both answers of {counts} pairs under the first weights, once')
        with first_weights:
            found = [array for mixture in mixtures.values() for array in compute(model, mixture, run, beat)]
        arrays = dict(zip(keys, found, strict=True))
        digest = None if config.eval_only else collectives.on_rank_0(write, path, arrays)
    for key, (mixture, source) in zip(keys, sources, strict=True):
        array = arrays[key][:, : mixture.n_starts]  # beside other sources, rows may have had more or fewer places
        source.reference = np.pad(array, ((0, 0), (0, mixture.n_starts - array.shape[1])))
    return digest


def refuse_other_pairs(config, path, split, begins_with_lora):
    """Raise ValueError if a run that goes on cannot know what the weights it began with think of other pairs. With LoRA
    these are there still, unless it began with a LoRA that it trains on; but a run that trains on goes on with the
    pairs it has."""
    if config.eval_only and config.lora_rank and not config.modules_to_save and not begins_with_lora:
        return
    given = f'{path} has no reference of this {split} data'
    if config.eval_only:
        raise ValueError(
            f'{given}, and the weights that the run began with are gone, unless it trains LoRA alone: give '
            '--val_dataset and --eval_sequences from the beginning, or measure both models with evaluate.py'
        )
    other = 'the same --val_dataset, or --eval_sequences=0' if split == 'val' else 'the same --dataset'
    raise ValueError(f'{given}: resume with {other}, or begin anew in another --out_dir')


@torch.no_grad()
def compute(model, mixture, run, beat):
    """For each source of a mixture float32 (n_windows, n_starts): the sums of document_logps() of all its windows. Rows
    have the shape that they have in training, where the same tokens then get the same log-probabilities."""
    arrays = [torch.zeros(source.n_windows, mixture.n_starts) for source in mixture.sources]
    places = mixture.n_windows * len(mixture.sources), run.config.batch_size, run.rank, run.world_size
    model.eval()
    rounds = data.rounds_of(mixture, *places)
    sizes = {
        place: int(mixture.sources[number].n_targets[windows].sum()) for place, (number, windows) in enumerate(rounds)
    }
    batches = data.eval_batches(mixture, *places, run.device)
    for place, (batch, _) in zip(processes.progress('reference', sizes, unit='pairs per rank'), batches, strict=True):
        number, windows = rounds[place]
        beat()
        sums, _ = document_logps(model, *batch)
        arrays[number][windows] = sums[: len(windows)].cpu()
    model.train()
    processes.reshard(model)
    for array in arrays:  # each rank has some of the rows, and zeros elsewhere
        on_device = array.to(run.device)
        dist.all_reduce(on_device)
        array.copy_(on_device)
    return [array.numpy() for array in arrays]


def write(path, arrays):
    """Returns the sha256 of the file."""
    with replacing(path, 'wb') as file:
        np.savez(file, **arrays)
    return sha256_of(path)


def read(path, digest):
    """(the arrays, the sha256) of a file that write() has written. Raises ValueError if it is not the one with this
    sha256."""
    begin = 'begin anew in another --out_dir'
    if digest is None:
        raise ValueError(
            f'the checkpoint beside {path} has no reference, since another script or loss_type=simpo wrote it: '
            f'{begin}, with this one as --init_from'
        )
    if not os.path.exists(path) or sha256_of(path) != digest:
        state = 'is another file than' if os.path.exists(path) else 'is missing,'
        raise ValueError(
            f'{path} {state} the reference that this run began with, and its weights have moved: copy it back, or '
            f'{begin}'
        )
    with np.load(path) as file:
        return {key: file[key] for key in file.files}, digest
