"""
Checkpoints: finding, verifying and reading them. All strategies and any number of ranks share one format, so a run may
resume with another strategy or on other ranks.

    out_dir/checkpoints/step_00001000/
        __0_0.distcp, __1_0.distcp, ...: tensors, one file per rank, by torch.distributed.checkpoint (DCP)
        index.json      where in these files each piece of model.NAME, optim.NAME.exp_avg, ... is (checkpoint_index.py)
        .metadata       the same for DCP's own tools; only checkpoints without index.json are read by it
        state.json      step, tokens, config, ...: what the script passes to save()
        manifest.json   size and sha256 of every other file

checkpoint_saver.py writes them. It writes the manifest last and then gives the directory its final name, so one with
that name was once complete, no matter when the job was killed. Damage that the disk has done since then shows in the
hashes; DCP alone would load a flipped bit or a zeroed block without noticing. Reading executes nothing that is in it.
"""

import contextlib
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

from configurator import check_saved
from layout import WHOLE
from model import GPT, ModelConfig, is_load
from runtime.best import step_of_best
from runtime.checkpoint_index import read_index, read_into, read_manifest
from runtime.checkpoint_parts import in_whole, local_piece
from system import collectives
from system.files import meant, read_json, sha256_of

# --- find and verify --------------------------------------------------------------------------------------------------


def choose(out_dir, resume='auto', say=print, compare=None):
    """Path of the newest intact checkpoint of a run, or None for a start from scratch. For one rank: no collectives.

    resume: 'auto' takes a checkpoint if there is one, 'must' insists on one, 'never' refuses an out_dir that holds a
    run. A damaged checkpoint that is newer than an intact one is reported and renamed to step_X.damaged.
    compare: see find_damage(); with_all_ranks() uses it to let every rank help.
    Raises ValueError if 'must' finds no checkpoint, if 'never' finds a run, or if there are checkpoints but none is
    intact; in the last case nothing is renamed.
    """
    folder = os.path.join(out_dir, 'checkpoints')
    candidates, damaged = checkpoints_in(folder), checkpoints_in(folder, r'step_\d{8}\.damaged\+*')
    if resume == 'never':
        if candidates or damaged or os.path.exists(os.path.join(out_dir, 'metrics.jsonl')):
            raise ValueError(f"resume='never' but out_dir={out_dir} holds a run: use another, or --resume=auto")
        return None
    for number, path in enumerate(candidates):
        damage = find_damage(path, say, compare)
        if damage is None:
            for unusable in candidates[:number]:
                say(f'WARNING: {unusable} is now {move_aside(unusable)}; going on from {path}')
            return path
        say(f'WARNING: checkpoint {path} is damaged: {damage}')
    if candidates or damaged:
        names = ', '.join(os.path.basename(path) for path in candidates + damaged)
        raise ValueError(f'all checkpoints in {folder} are damaged ({names}): restore a copy or use another --out_dir')
    if resume == 'must':
        raise ValueError(f"resume='must' but there is no checkpoint in {folder}: check --out_dir, or use --resume=auto")
    return None


def choose_to_read(out_dir, step=None, say=print, compare=None):
    """Path of one of a run's checkpoints. step: a number, 'best', or None for the newest intact one. Raises ValueError
    if there is no such checkpoint, or if it is damaged."""
    if step == 'best':
        newest = choose_to_read(out_dir, say=lambda line: None, compare=compare)
        step = step_of_best(out_dir, read_state(newest))
    if step is None:
        path = choose(out_dir, say=say, compare=compare)  # skips a damaged one for the one before it, and says so
        if path is None:
            train = f'train one with `python train_ddp.py CONFIG --out_dir={out_dir}`'
            raise ValueError(f'no checkpoint in {out_dir}: {meant(out_dir) or train}')
        return path
    folder = os.path.join(out_dir, 'checkpoints')
    path = os.path.join(folder, f'step_{step:08d}')
    damage = find_damage(path, say, compare) if os.path.isdir(path) else 'it is not there'
    if damage:
        there = [str(int(found.rpartition('_')[2])) for found in checkpoints_in(folder)]
        raise ValueError(f'checkpoint {path}: {damage}; take another --step, there are {", ".join(there) or "none"}')
    return path


def find_damage(path, say=print, compare=None):
    """What is wrong with the files of a checkpoint, in words; None if all have the size and sha256 of manifest.json.

    compare: a function to use instead of compare_files.
    """
    began = time.perf_counter()
    try:
        expected = {name: (entry['size'], entry['sha256']) for name, entry in read_manifest(path).items()}
    except (OSError, ValueError) as error:
        return f'manifest.json is missing or not one ({error})'
    damage = (compare or compare_files)(path, dict.fromkeys(('.metadata', 'state.json'), (None, None)) | expected)
    if not damage:
        gigabytes = sum(size for size, _ in expected.values()) / 1e9
        say(f'verified {path}: {gigabytes:.2f} GB in {time.perf_counter() - began:.2f} s')
    return '; '.join(damage) or None


def compare_files(path, expected):
    """A line for each file in a folder that differs from what is expected. expected: {name: (size, sha256)}."""

    def damage_of(name):
        size, sha256 = expected[name]
        try:
            found = os.path.getsize(os.path.join(path, name))
            if found != size:
                return f'{name} has {found} bytes instead of {size}'
            return None if sha256_of(os.path.join(path, name)) == sha256 else f'{name} has changed (sha256 differs)'
        except OSError as error:
            return f'{name} cannot be read ({error.strerror})'

    with ThreadPoolExecutor() as threads:  # hashlib releases the GIL: about 1.2 GB/s on every core
        return [found for found in threads.map(damage_of, expected) if found]


def with_all_ranks(choose, *arguments):
    """
    Call choose(*arguments) on rank 0 and return its result, or raise its error, on every rank. Each rank hashes a share
    of the files.

    choose: a function of this module that takes `compare`. Only rank 0 lists, decides, renames and speaks, so the ranks
    cannot disagree; the others compare the files that it tells them to. The work is shared because a network file
    system limits the bytes per second of each node: at 0.15 GB/s one node hashes the 96 GB of an 8B model in 11
    minutes, eight nodes in 80 seconds.
    """
    group = dist.new_group(backend='gloo', timeout=timedelta(seconds=collectives.PATIENCE_S))
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def compare_together(path, expected):
        """compare_files() on all ranks together, with rank 0's arguments; None if those are path=None, the end."""
        given = [(path, expected)]
        dist.broadcast_object_list(given, group=group, device=torch.device('cpu'))
        path, expected = given[0]
        if path is None:
            return None
        share = {name: expected[name] for name in sorted(expected)[rank::world_size]}  # any rank may read any file
        damage = [None] * world_size
        dist.all_gather_object(damage, compare_files(path, share), group=group)
        return [line for lines in damage for line in lines]

    def decide():
        try:
            return choose(*arguments, compare=compare_together)
        finally:
            compare_together(None, None)

    if rank != 0:
        while compare_together(None, None) is not None:
            pass
    chosen = collectives.on_rank_0(decide)
    dist.destroy_process_group(group)
    return chosen


def checkpoints_in(folder, pattern=r'step_\d{8}'):
    """Paths of the checkpoints in a folder, newest first."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [os.path.join(folder, name) for name in sorted(names, reverse=True) if re.fullmatch(pattern, name)]


def is_complete(path):
    """Whether a checkpoint was once complete. find_damage() checks whether its files still are."""
    return os.path.exists(os.path.join(path, 'manifest.json'))


def discard(path):
    """Mark a checkpoint that others have replaced; the next save deletes it."""
    if os.path.exists(path):
        os.rename(path, f'{path}.tmp')


def move_aside(path):
    """Rename a checkpoint so that it is no longer found, and return its new path."""
    aside = f'{path}.damaged'
    while os.path.exists(aside):
        aside += '+'
    try:
        os.rename(path, aside)
        return aside
    except OSError:  # without permission, as when sample.py reads another user's run, an older one can still be used
        return path


# --- read -------------------------------------------------------------------------------------------------------------

COUNTS = {'skipped': int, 'in_a_row': int, 'losses': [float]}
# What state.json may say, see check_form(): as much of it as is read when the weights are.
STATE = {
    'step': int,
    'step_of_weights?': int,
    'config': {'dataset': str, 'data_dir': str, 'init_from': str, 'dataset_stages?': list, 'prompts?': [str]},
    'identity': {'model': {'modules_to_save?': [str], 'lora_targets?': str, 'yarn?': ([float], None)}},
    'scaler': dict,
    'scalers?': [dict],
    'numbers?': COUNTS,
    'numbers_of_replicas?': [COUNTS],
    'best?': {'step': (int, None), 'val_loss': (float, None), 'worse': int, 'evaluated': list, 'stage?': (int, None)},
    'begun?': str,
    'base?': ({'init_from': str, 'fingerprint': str}, None),
    'reference?': (str, None),
    'averaged?': [int],
    'diloco?': {'num_replicas': int, 'fragments': [[str]], 'mid_round': bool},
}


def read_state(path):
    """The dict that was passed to Saver.save() by a train script, each field of which is checked."""
    where = f'{path}/state.json'
    state = read_json(where, STATE, 'copy the checkpoint again')
    for keys in (state['config'], state['identity']['model']):
        check_saved(keys, where)
    return state


def read_model_config(path, state):
    """The ModelConfig of a checkpoint whose model is a GPT of model.py. Raises ValueError if it is none, or if the
    checkpoint has other weights than such a model: a size from a file decides how much memory is taken."""
    where = f'{path}/state.json: identity.model'
    config, index = ModelConfig.from_json(state['identity']['model'], where), read_index(path)
    blocks = {key.split('.')[2] for key in index if key.startswith('model.blocks.')}
    if len(blocks) != config.n_layer:
        raise ValueError(
            f'{where} has n_layer={config.n_layer}, and the checkpoint has weights of {len(blocks)} blocks'
        )
    with torch.device('meta'):
        names = names_of_tensors(GPT(config))
    saved = {key: entry for key, entry in index.items() if key.startswith('model.')}
    check_fits(path, saved, {f'model.{name}': tensor for tensor, name in names.items()})
    return config


def load(path, model, optimizer=None, optimizer_key='optim', share=WHOLE):
    """Load a checkpoint in place, whatever strategy and number of ranks wrote it, and return its state. Collective.

    model: the module itself, of plain tensors or DTensors. optimizer: gets state for exactly those parameters that had
    some when the checkpoint was written, and keeps its own param_groups. optimizer_key, share: see checkpoint_saver.
    The returned state's 'step' is that of the weights; DiLoCo's replicas may have trained beyond it.
    Raises ValueError on all ranks if names, shapes or dtypes differ from the model's on one of them, or if it cannot
    read a file.
    """
    names = names_of_tensors(model)
    with agreeing(path):
        index = read_index(path)
        saved = saved_for(share, index, ['model'] if optimizer is None else ['model', optimizer_key])
        weights = weights_to_fill(names, saved, share)
        slots = []
        if optimizer is not None:
            from runtime.checkpoint_optimizer import fill_optimizer, slots_to_fill  # most readers have no optimizer

            slots = slots_to_fill(names, saved, optimizer, optimizer_key, share)
        check_fits(path, saved, weights | {slot.key: slot.target for slot in slots})
        read_into(path, index, weights | {slot.key: slot.target for slot in slots if not slot.form})
        put_back_bfloat16(path, names, weights)
        if optimizer is not None:
            fill_optimizer(path, index, optimizer, slots, share)
        state = read_json(f'{path}/state.json', {'step': int, 'step_of_weights?': int})
    return {**state, 'step': state.get('step_of_weights', state['step'])}


@contextlib.contextmanager
def agreeing(path):
    """A context for reading a checkpoint. Collective: what one rank cannot read or finds wrong, all ranks raise."""
    problem = None
    try:
        yield
    except OSError as error:
        problem = f'cannot read checkpoint {path}: rank {dist.get_rank()}: {error}'
    except ValueError as error:
        problem = str(error)
    collectives.raise_together(problem)


def saved_for(share, index, kinds):
    """Those entries of an index that this rank's model and optimizer have to take up. kinds: 'model', 'optim'."""
    elsewhere = {f'{kind}.{name}' for name in share.elsewhere for kind in kinds}  # other stages of a pipeline load them
    saved = {key: tensor for key, tensor in index.items() if key.startswith(tuple(f'{kind}.' for kind in kinds))}
    return {key: tensor for key, tensor in saved.items() if not elsewhere & {key, key.rpartition('.')[0]}}


def weights_to_fill(names, saved, share):
    """{key: the model's tensor, or a copy in fp32 of one in bfloat16}. names: see names_of_tensors()."""
    base = {f'model.{name}' for name in share.of_base}  # already loaded from init_from
    left_out = base if base.isdisjoint(saved) else set()
    # A fine-tuning run may begin to balance its experts when it resumes; at first the load is uniform.
    left_out |= {key for name in names.values() if is_load(key := f'model.{name}') and key not in saved}
    return {
        key: in_whole(share, name, as_saved(tensor.detach()))
        for tensor, name in names.items()
        if (key := f'model.{name}') not in left_out
    }


def check_fits(path, saved, targets):
    """Raise ValueError unless the checkpoint has what is to be filled and nothing else, in the same shapes and
    dtypes."""

    def kind(tensors, key):
        return f'{tuple(tensors[key].shape)} {tensors[key].dtype}' if key in tensors else 'missing'

    different = [key for key in sorted(saved.keys() | targets.keys()) if kind(saved, key) != kind(targets, key)]
    # A fine-tuning run may also end to balance its experts when it resumes.
    different = [key for key in different if key in targets or not is_load(key)]
    if different:
        key = different[0]
        first = f'{key} is {kind(saved, key)} in the checkpoint and {kind(targets, key)} here'
        raise ValueError(f'checkpoint {path} does not fit this model: {first} ({len(different)} differences in all)')


@torch.no_grad()
def put_back_bfloat16(path, names, weights):
    """Copy frozen weights from their copies in fp32, which are what a checkpoint holds, into the model's bfloat16.

    Raises ValueError if that would round them, because the run would then go on from other weights."""
    for tensor, name in names.items():
        if tensor.dtype == torch.bfloat16 and f'model.{name}' in weights:
            frozen, saved = local_piece(tensor.detach()), local_piece(weights[f'model.{name}'])
            frozen.copy_(saved)
            if not torch.equal(frozen.float(), saved):
                more = f'checkpoint {path} has {name} in more digits than bfloat16'
                raise ValueError(f'{more}: use --frozen_dtype=float32')


def load_weights(path):
    """({name: full tensor on the CPU}, state) of a checkpoint, in one process and without a process group."""
    index = read_index(path)
    saved = [key.removeprefix('model.') for key in index if key.startswith('model.')]
    weights = {name: index[f'model.{name}'].empty() for name in saved}
    read_into(path, index, {f'model.{name}': tensor for name, tensor in weights.items()})
    return weights, read_json(f'{path}/state.json', {'step': int})


def read_tensors(path, targets, missing_ok=False):
    """
    Fill the targets, {key: tensor}, from a checkpoint. Collective.

    missing_ok: leave targets alone that the checkpoint lacks. Raises ValueError on all ranks if one cannot read them.
    """
    with agreeing(path):
        index = read_index(path)
        targets = {key: tensor for key, tensor in targets.items() if key in index or not missing_ok}
        check_fits(path, {key: entry for key, entry in index.items() if key in targets}, targets)
        read_into(path, index, targets)


def names_of_tensors(model):
    """{tensor: name} of a module's parameters and persistent buffers; a tied one has the first of its names.

    Uses state_dict() because fully_shard hooks into it and first restores its sharded parameters: after a forward
    without gradients, named_parameters() would give gathered ones.
    """
    names = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(tensor, name)
    return names


def as_saved(tensor):
    """The tensor as a checkpoint holds it, which any run can read: frozen weights kept in bfloat16 become fp32."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
