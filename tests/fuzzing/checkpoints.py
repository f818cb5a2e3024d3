"""
A checkpoint of somebody else: one value of its index, manifest, state.json or pickles is another, and the hashes are
right again. Whatever reads checkpoints may take it or refuse it; it runs nothing, and opens no file outside of it.
"""

import copy
import functools
import hashlib
import io
import json
import os
import pickle
import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path
from types import SimpleNamespace

import torch

import keys
from fuzzing.cases import STAYS, Refused, check, some
from model import GPT, ModelConfig
from runtime import checkpoint, checkpoint_saver, first_weights, health, identity
from runtime.best import Best, step_of_best
from runtime.opened import open_model
from system import devices

SIZES = {'arch': 'llama', 'n_layer': 2, 'n_head': 2, 'n_embd': 8, 'mlp_hidden_dim': 24}
SIZES |= {'vocab_size': 64, 'block_size': 8}
CONFIG = {key: value for key, value in vars(keys.Keys).items() if not key.startswith('_')}
CONFIG |= {**SIZES, 'dataset': 'synthetic', 'global_batch_size': 2, 'max_iters': 100}
CONFIG |= {'learning_rate': 1e-3, 'min_lr': 0.0, 'warmup_iters': 10, 'lr_decay_iters': 100}
IDENTITY = {'data': [[0, {'0123456789abcdef': '1'}]], 'optimizer': 'adamw', 'global_batch_size': 2, 'seed': 1337}
DILOCO = {'num_replicas': 2, 'fragments': [['embed.weight']], 'mid_round': False}
DILOCO |= {'sent_at': [None], 'anchored_at': [3], 'equal_at': [3], 'lands_at': [None]}
# Paths, numbers of all sizes, and everything that a field is not.
OTHERS = ['../../../etc/passwd', '/etc/passwd', '..', '', 'x' * 300, '\0', '__0_0.distcp', 'float64', 'llama', 'cosine']
OTHERS += [None, True, False, -1, 0, 1, 7, 255, 2**31, 2**53, 2**63, 10**30, 1.5, -0.5, 1e308]
OTHERS += [float('nan'), float('inf'), float('-inf')]
OTHERS += [[], {}, [[]], [0], [-1, 3], [2**62] * 4, ['a'], {'a': 1}, [None], [1.5, 'b'], [1] * 50, {'step': -1}]


class Calls:
    """What a pickle would call; each leaves a trace that noted() sees."""

    def __reduce__(self):
        return os.system, ('true',)


# --- the checkpoint ---------------------------------------------------------------------------------------------------


@functools.cache
def honest():
    """The out_dir of a run with one checkpoint. One process, as a training script makes it."""
    out_dir = Path(STAYS.name) / 'run'
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    state = {'tokens': 48, 'scaler': {}, 'numbers': {'skipped': 0, 'in_a_row': 0, 'losses': [4.5, 4.25]}}
    state |= {'identity': {'model': ModelConfig(**SIZES).to_dict(), **IDENTITY}, 'config': CONFIG, 'diloco': DILOCO}
    state |= {'best': {'step': 3, 'val_loss': 4.5, 'worse': 0, 'evaluated': [[], 40, 8]}, 'step_of_weights': 3}
    checkpoint_saver.prepare(out_dir)
    checkpoint_saver.Saver(out_dir, keep=1, say=lambda line: None).save(3, model, optimizer, state)
    return out_dir


def model_and_optimizer():
    torch.manual_seed(0)
    model = GPT(ModelConfig(**SIZES))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model, optimizer):
    tokens = torch.arange(16).view(2, 8)
    model(tokens, tokens)[0].backward()
    optimizer.step()


@functools.cache
def model_after_a_step():
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    return model


def place_in(draw, content):
    """(a list or dict somewhere in the content of a JSON file, one of its places); all levels are equally likely."""
    while True:
        if not content:
            return content, None
        place = draw.choice(list(content) if isinstance(content, dict) else range(len(content)))
        inner = content[place]
        if not isinstance(inner, (list, dict)) or not inner or some(draw, 0.15):
            return content, place
        content = inner


def spoil_json(draw, path):
    content = json.loads(path.read_text())
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        holder, place = place_in(draw, content)
        if place is None:
            continue
        kind = draw.randrange(8)
        if kind == 0:
            del holder[place]
        elif kind == 1 and isinstance(holder, dict):
            holder[draw.choice(['', 'model.x', '../x', 'a' * 400, *CONFIG])] = holder.pop(place)
        elif kind == 2 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[place]))
        elif kind == 3 and isinstance(holder[place], (int, float)):
            holder[place] += draw.choice([-1, 1, 64, -64, 10**9, 0.5])
        elif kind == 4:
            other, there = place_in(draw, content)
            holder[place] = copy.deepcopy(other[there]) if there is not None else None
        else:
            holder[place] = copy.deepcopy(draw.choice(OTHERS))
    text = json.dumps(content)
    if some(draw, 0.02):
        text = draw.choice(['[' * 100_000, text[:-5], '{"a": 1' + '0' * 9000 + '}', text.replace('"', '\\', 1), 'null'])
    path.write_text(text)


def spoil_metadata(draw, path):
    """An index of DCP's with a field of another type, another class in it, or a bit that is another."""
    content = path.read_bytes()
    if some(draw, 0.4):
        at = draw.randrange(len(content))
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :])
        return
    index = pickle.loads(content)
    key = draw.choice(sorted(index.state_dict_metadata))
    tensor, place = index.state_dict_metadata[key], draw.choice([p for p in index.storage_data if p.fqn == key])
    holder = draw.choice([index, tensor, tensor.chunks[0], place, index.storage_data[place], tensor.properties])
    evil = torch.distributed.checkpoint.metadata.BytesStorageMetadata()
    evil.size, evil.properties = tensor.size, tensor.properties
    kind = draw.randrange(4)
    if kind == 0:
        index.state_dict_metadata[key] = evil
    else:
        others = [*OTHERS, evil, torch.Size([2**40, 2]), torch.int8, torch.Size([])]
        value = Calls() if kind == 1 else draw.choice(others)
        vars(holder)[draw.choice(sorted(vars(holder)))] = value
    try:
        path.write_bytes(pickle.dumps(index))
    except Exception:  # what pickles itself may not know what to do with such a field
        path.write_bytes(content[: len(content) // 2])


def spoil_tensors(draw, path):
    """A file of tensors with another byte around its numbers, or with a pickle that calls something."""
    content = path.read_bytes()
    if some(draw, 0.5):
        begin = content.index(b'PK')
        evil = io.BytesIO()
        with zipfile.ZipFile(evil, 'w') as archive:
            archive.writestr('archive/data.pkl', pickle.dumps(Calls()))
            archive.writestr('archive/data/0', bytes(2048))
        content = content[:begin] + evil.getvalue() + content[begin + len(evil.getvalue()) :]
    else:
        at = draw.choice([content.find(b'PK', draw.randrange(len(content) - 400)), draw.randrange(len(content))])
        at += draw.randrange(60)
        content = content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :]
    path.write_bytes(content)


# --- what reads it ----------------------------------------------------------------------------------------------------

noted = None  # while a checkpoint is read: (its folder, what was done)
OWN = [sysconfig.get_path('stdlib'), sys.prefix, sys.base_prefix, Path(__file__).parents[2]]
OWN = [*map(os.path.realpath, OWN), '/proc', '/sys', '/dev']


def note(event, arguments):
    """An audit hook, which Python calls for each file that is opened and each class that a pickle names."""
    if noted is None:
        return
    folder, done = noted
    if event in ('pickle.find_class', 'os.system', 'subprocess.Popen', 'os.exec', 'os.remove', 'os.mkdir'):
        done.append(f'{event}{arguments}')
    if event == 'open' and isinstance(arguments[0], (str, bytes)):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if not path.startswith((str(folder), *OWN)):
            done.append(f'open {path}')


@functools.cache
def listen():
    sys.addaudithook(note)


def check_checkpoint(draw, folder):
    devices.join_ranks(60, torch.device('cpu'))
    try:
        read_one(draw, folder)
    finally:
        torch.distributed.destroy_process_group()


def read_one(draw, folder):
    global noted
    honest_run = honest()
    listen()
    shutil.copytree(honest_run, folder / 'run')
    path = folder / 'run/checkpoints/step_00000003'
    is_old = some(draw, 0.4)
    names = ['.metadata', '__0_0.distcp', 'state.json', 'manifest.json'] if is_old else ['index.json', 'state.json']
    name = draw.choice([*names, 'manifest.json'] if some(draw, 0.2) else names)
    if is_old:
        (path / 'index.json').unlink()
    is_honest = some(draw, 0.3)
    if name != 'manifest.json' and not is_honest:
        spoil = {'.metadata': spoil_metadata, '__0_0.distcp': spoil_tensors}.get(name, spoil_json)
        spoil(draw, path / name)
    files = [file for file in path.iterdir() if file.name != 'manifest.json']
    facts = {file.name: (file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files}
    manifest = {'format_version': 1, 'files': {key: {'size': n, 'sha256': sha} for key, (n, sha) in facts.items()}}
    (path / 'manifest.json').write_text(json.dumps(manifest))
    if name == 'manifest.json' and not is_honest:
        spoil_json(draw, path / name)
    done = []
    noted = (os.path.realpath(folder), done)
    try:
        weights = read_as_the_scripts_do(draw, str(folder / 'run'))
        if is_honest:
            expected = model_after_a_step().state_dict()
            check(all(torch.equal(weights[key], expected[key]) for key in expected), 'other weights')
    except ValueError as error:
        check(not is_honest, 'an honest checkpoint is refused', str(error))
        raise
    finally:
        noted = None
        check(not done, 'a checkpoint decided what is called or opened', name, done[:3])


def read_as_the_scripts_do(draw, out_dir):
    said = []
    path = checkpoint.choose_to_read(out_dir, say=said.append)
    if some(draw, 0.5):  # sample.py, evaluate.py, export_model.py, --init_from
        state = checkpoint.read_state(path)
        if state['config'].get('keep_best'):
            step_of_best(out_dir, state)
        config = checkpoint.read_model_config(path, state)
        weights, _ = checkpoint.load_weights(path)
        model = GPT(config)
        model.load_state_dict(weights)
        ours = SimpleNamespace(**{**CONFIG, 'init_from': out_dir})
        first_weights.take_from(open_model(out_dir), ours, {})
        check(ours.out_dir == CONFIG['out_dir'], 'the run goes elsewhere', ours.out_dir)
    else:  # resume
        state = checkpoint.read_state(path)
        identity.check_resume(state, CONFIG, {'model': ModelConfig(**SIZES).to_dict(), **IDENTITY}, {})
        model, optimizer = model_and_optimizer()
        checkpoint.load(path, model, optimizer)
        health.resume_loss_scale(torch.amp.GradScaler('cpu'), state['scaler'])
        numbers = health.Numbers(10, True, said.append, str, state=state.get('numbers'))
        numbers.must_skip(4, torch.tensor(4.0), torch.tensor(1), torch.tensor(1.0), False)
        numbers.state()
        best = Best({**CONFIG, 'patience': 3}, None, state.get('best'))
        best.note(4, 4.0)
        best.why_end()
    if any('WARNING' in line for line in said):
        raise Refused(said[0])
    return model.state_dict()
