"""Checkpoints that other strategies and numbers of ranks load, and what happens to them when the disk or the job fails.
Processes are real."""

import contextlib
import copyreg
import io
import itertools
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import zlib
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from faults import flip_bit, overwrite, wait_until
from launch import CONTEXT, fork, join_all, run_function, start_function
from outputs import checkpoint_of, tensors_of
from precision import apart, error
from pretrained import SIZES_OF_64
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import data
import fsdp_manual
from model import ModelConfig
from runtime import begin, checkpoint, checkpoint_saver, dcp_files, identity
from system.files import sha256_of


class Toy(nn.Module):
    """Tied weights, a parameter that is never trained, and first dimensions (17, 7, 2, 1) that do not divide by 2 or 3
    ranks, or leave some of them nothing."""

    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(17, width)
        sizes = (width, 7, 2, 1, width)
        self.layers = nn.Sequential(*(nn.Linear(n, m) for n, m in zip(sizes, sizes[1:], strict=False)))
        self.unused = nn.Linear(3, 1)
        self.head = nn.Linear(width, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens)))


def build(strategy, seed=0, width=5, **adamw):
    """(raw model, model to call, optimizer)."""
    torch.manual_seed(seed)
    raw = model = Toy(width)
    if strategy == 'ddp':
        model = DistributedDataParallel(raw, find_unused_parameters=True)
    elif strategy == 'fsdp':
        for layer in raw.layers:
            fully_shard(layer)
        fully_shard(raw)
    elif strategy == 'hsdp':
        fully_shard(raw, mesh=init_device_mesh('cpu', (2, 2), mesh_dim_names=('replicate', 'shard')))
    elif strategy == 'manual':
        fsdp_manual.shard(raw, [raw.layers], init_device_mesh('cpu', (dist.get_world_size(),)))
    return raw, model, torch.optim.AdamW(raw.parameters(), lr=0.01, **adamw)


def train(raw, optimizer, steps=2):
    """Take steps with gradients that depend only on the names, so that every strategy must reach the same numbers."""
    for step in range(steps):
        for name, parameter in raw.named_parameters():
            if not name.startswith('unused'):
                generator = torch.Generator().manual_seed(zlib.crc32(f'{name} {step}'.encode()))
                gradient = torch.randn(parameter.shape, generator=generator)
                if isinstance(parameter, DTensor):
                    gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
                parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def everything(raw, optimizer):
    """{key: whole parameter or moment}."""
    return {key: full(value) for key, value in checkpoint_saver.tensors_to_save(raw, optimizer).items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for key in expected:
        assert found[key].dtype == expected[key].dtype and torch.equal(found[key], expected[key]), key


def silent(line):
    pass


# --- between strategies and numbers of ranks --------------------------------------------------------------------------


def save_runs(out_dirs):
    """Save a run of each strategy; returns what each holds when it saves step 2, and one step later."""
    held = {}
    for strategy, out_dir in out_dirs.items():
        checkpoint_saver.prepare(out_dir)
        raw, model, optimizer = build(strategy, fused=True)
        saver = checkpoint_saver.Saver(out_dir, keep=5, say=silent)
        saver.save(0, raw, optimizer, {'tokens': 0})  # before step 1: no optimizer state
        train(raw, optimizer)
        if strategy == 'fsdp':
            with torch.no_grad():  # an evaluation leaves the root gathered
                model(torch.zeros(1, 2, dtype=torch.long))
        saver.save(2, raw, optimizer, {'tokens': 48, 'nested': {'loss': 1.5, 'name': 'é'}})
        at_save = everything(raw, optimizer)
        train(raw, optimizer, steps=1)
        held[strategy] = (at_save, everything(raw, optimizer))
    return held


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """{(strategy, ranks): (out_dir, what it held when it saved step 2, what it held one step later)}."""
    saved = {}
    for world_size, strategies in {1: ['single'], 2: ['ddp', 'fsdp'], 3: ['fsdp', 'manual'], 4: ['hsdp']}.items():
        out_dirs = {strategy: str(tmp_path_factory.mktemp(f'{strategy}{world_size}')) for strategy in strategies}
        for strategy, held in run_function(world_size, save_runs, out_dirs)[0].items():
            saved[strategy, world_size] = (out_dirs[strategy], *held)
    return saved


def test_every_strategy_writes_the_same_keys(runs):
    for strategy, (out_dir, held, _) in runs.items():
        index = dcp.FileSystemReader(checkpoint_of(out_dir, 2)).read_metadata().state_dict_metadata
        assert index.keys() == held.keys() == runs['single', 1][1].keys(), strategy
        assert {'model.embed.weight', 'optim.embed.weight.exp_avg', 'optim.layers.0.bias.step'} <= index.keys()
        assert 'model.unused.weight' in index and 'optim.unused.weight.exp_avg' not in index
        assert 'model.head.weight' not in index  # tied: saved once


def load_runs(strategies, runs):
    """Load every run with each strategy; returns what it holds after one more step."""
    continued = {}
    for strategy, (source, (out_dir, held, _)) in itertools.product(strategies, runs.items()):
        raw, _, optimizer = build(strategy, seed=7, fused=True)
        assert checkpoint.load(checkpoint_of(out_dir, 0), raw, optimizer) == {'tokens': 0, 'step': 0}
        assert not optimizer.state
        train(raw, optimizer, steps=1)
        state = checkpoint.load(checkpoint_of(out_dir, 2), raw, optimizer)
        assert state == {'step': 2, 'tokens': 48, 'nested': {'loss': 1.5, 'name': 'é'}}
        assert_equal(everything(raw, optimizer), held)
        train(raw, optimizer, steps=1)
        continued[strategy, source] = everything(raw, optimizer)
    return continued


@pytest.mark.parametrize(
    'world_size, strategies', [(1, ['single']), (2, ['ddp', 'fsdp', 'manual']), (3, ['ddp', 'fsdp'])]
)
def test_loads_what_any_strategy_wrote_bit_for_bit_and_goes_on(runs, world_size, strategies):
    for (strategy, source), found in run_function(world_size, load_runs, strategies, runs)[0].items():
        uninterrupted = runs[source][2]
        if source == (strategy, world_size):
            assert_equal(found, uninterrupted)
        for key in uninterrupted:  # the rounding of AdamW's vector instructions depends on the alignment of a piece
            assert error(found[key], uninterrupted[key]) <= apart(), key


def test_weights_are_read_in_one_process_without_a_process_group(runs, recwarn):
    out_dir, held, _ = runs['fsdp', 3]
    weights, state = checkpoint.load_weights(checkpoint_of(out_dir, 2))
    assert_equal(
        weights, {key.removeprefix('model.'): value for key, value in held.items() if key.startswith('model.')}
    )
    assert state['tokens'] == 48
    assert not [str(warning.message) for warning in recwarn if 'distributed' in str(warning.message)]


def load_into_others(out_dir):
    """The error messages of loads into models that differ from the saved one."""
    messages = []
    wider, _, wider_optimizer = build('single', width=6)
    half, _, half_optimizer = build('single')
    half.embed.half()
    more, _, more_optimizer = build('single')
    more.extra = nn.Linear(2, 2)
    fewer, _, _ = build('single')
    del fewer.unused
    fewer_optimizer = torch.optim.AdamW(fewer.parameters())
    partly, _, _ = build('single')
    partly_optimizer = torch.optim.AdamW(partly.layers.parameters())
    for raw, optimizer in (
        (wider, wider_optimizer),
        (half, half_optimizer),
        (more, more_optimizer),
        (fewer, fewer_optimizer),
        (partly, partly_optimizer),
    ):
        before = {name: value.clone() for name, value in raw.state_dict().items()}
        with pytest.raises(ValueError) as error:
            checkpoint.load(checkpoint_of(out_dir, 2), raw, optimizer)
        messages.append(str(error.value))
        assert_equal(raw.state_dict(), before)
    checkpoint.load(checkpoint_of(out_dir, 2), partly)  # without an optimizer, whose state is then not looked at
    return messages


def test_a_checkpoint_of_another_model_is_refused_in_one_line(runs):
    wider, half, more, fewer, partly = run_function(1, load_into_others, runs['ddp', 2][0])[0]
    assert re.search(r'model.embed.weight .*\(17, 5\) torch.float32 .*\(17, 6\) torch.float32 ', wider)
    assert re.search(r'model.embed.weight .*\(17, 5\) torch.float32 .*\(17, 5\) torch.float16 ', half)
    assert re.search(r'model.extra.bias .*missing in the checkpoint .*\(2,\) torch.float32 ', more)
    assert re.search(r'model.unused.bias .*\(1,\) torch.float32 .*missing here .*\b2 ', fewer)
    assert re.search(r'optim.embed.weight.exp_avg .*\(17, 5\) torch.float32 .*missing here', partly)
    assert not any('\n' in message for message in (wider, half, more, fewer, partly))


def test_another_configuration_is_refused_with_both_values():
    saved = {'model': {'n_layer': 4, 'sizes': [1, 2], 'old_key': 1}, 'data': 'abc', 'seed': 1}
    same = {'model': {'n_layer': 4, 'sizes': (1, 2), 'new_key': 1}, 'data': 'abc', 'seed': 1}
    identity.refuse_another(saved, same, {}, {})
    for explicit, who in (({}, 'nobody set it'), ({'n_layer': 'command line'}, 'command line')):
        said = rf'model.n_layer=4, this run has 6 \({who}\): go on with --n_layer=4, or use another --out_dir'
        with pytest.raises(ValueError, match=said):
            identity.refuse_another(saved, {**same, 'model': {'n_layer': 6}}, {'n_layer': 6}, explicit)
    with pytest.raises(ValueError, match=r'n_layer=4, this run has 6 \(from init_from=a\): go on'):
        keys = {'n_layer': 6, 'init_from': 'a'}
        identity.refuse_another(saved, {**same, 'model': {'n_layer': 6}}, keys, {})
    with pytest.raises(ValueError, match=r"data='abc', this run has 'xyz' \(nobody set it\): use another --out_dir"):
        identity.refuse_another(saved, {**same, 'data': 'xyz'}, {'n_layer': 6}, {})
    stub = SimpleNamespace(to_dict=dict, plan=lambda *_: [])  # for model and data
    keys = {'max_iters': 9, 'optimizer': 'adamw', 'global_batch_size': 8, 'seed': 1}
    for key, other in {'optimizer': 'muon', 'global_batch_size': 6, 'seed': 2}.items():
        then, now = (identity.identity_of(of_run, stub, stub) for of_run in (keys, {**keys, key: other}))
        with pytest.raises(ValueError, match=f'the checkpoint has {key}={keys[key]!r}, this run has {other!r}'):
            identity.refuse_another(then, now, {}, {})


def test_a_resumed_run_says_what_changes_and_refuses_to_go_back():
    keys = {'learning_rate': 1e-3, 'lr_schedule': 'linear', 'warmup_iters': 0, 'lr_decay_iters': 100, 'min_lr': 0.0}
    before = {**keys, 'max_iters': 100, 'out_dir': 'a', 'eval_only': False, 'beta1': 0.9, 'optimizer': 'adamw'}
    before |= {'weight_decay': 0.1, 'wd_ts': None}
    saved = {'identity': {}, 'step': 75, 'config': before}

    def lines(**changes):
        return identity.check_resume(saved, {**before, **changes}, {}, {})

    assert lines() == []
    (changed,) = lines(beta1=0.8)
    assert re.search(' 75: beta1 0.9 -> 0.8$', changed)
    warning, changed = lines(max_iters=300, lr_decay_iters=300)
    assert re.match('WARNING: .*learning rate .* 2.50e-04 .* 7.50e-04 .*75', warning)
    assert changed.endswith(' 75: lr_decay_iters 100 -> 300, max_iters 100 -> 300')
    assert lines(max_iters=75)[-1].endswith('max_iters 100 -> 75')
    before |= {'optimizer': 'adamw-decay', 'wd_ts': 25, 'weight_decay': 0.4}  # 0.1 at step 75
    assert 'WARNING: the weight decay jumps from 1.00e-01 to 1.60e-01 at step 75' in lines(wd_ts=50)
    before |= {'optimizer': 'ademamix', 'wd_ts': None}
    assert 'WARNING: the share of the long momentum jumps from 7.50e-01 to 3.75e-01 at step 75' in lines(max_iters=200)
    with pytest.raises(ValueError, match='out_dir=a .* 75, .*max_iters=3: .*--out_dir'):
        lines(max_iters=3)
    with pytest.raises(ValueError, match='beyond max_iters=3 of num_epochs=1: go on with a larger --num_epochs, or'):
        identity.check_resume(saved, {**before, 'max_iters': 3, 'num_epochs': 1}, {}, {'num_epochs': 'command line'})
    assert lines(max_iters=3, eval_only=True)


def test_a_run_of_an_earlier_version_goes_on_unless_it_used_what_is_gone():
    as_default = {'exchange_dtype': 'int4', 'error_feedback': True, 'exchange_k': 64, 'error_decay': None}
    as_default |= {'fragment_mix': 0.0, 'overlap_steps': 0}

    def resume(eval_only=False, script=(('inner_steps', 9),), **used):
        keys = {'max_iters': 100, 'out_dir': 'a', 'eval_only': eval_only, **dict(script)}
        before = {key: value for key, value in {**as_default, **used}.items() if value != 'absent'}
        return identity.check_resume({'identity': {}, 'step': 5, 'config': before}, keys, {}, {})

    assert resume() == resume(exchange_k=9) == resume(error_decay=0.5, error_feedback=False) == []
    assert resume(fragment_mix=0.5, overlap_steps=1) == []
    assert resume(fragment_mix='absent', overlap_steps=1) == []  # a run of this version
    for word, used in (
        ('top2bit', {'exchange_dtype': 'top2bit'}),
        ('error_decay=0.5', {'error_decay': 0.5}),
        ('fragment_mix=0.0', {'overlap_steps': 1}),
        ('fragment_mix=0.5', {'fragment_mix': 0.5}),
    ):
        with pytest.raises(ValueError, match=f'checkpoint .*{word}.* gone, .*--init_from=a, .*83d2e81'):
            resume(**used)
        assert resume(**used, eval_only=True) == resume(**used, script=()) == []


# Keys of a model that have come after the first checkpoints, each with a value that is not its default.
CAME_LATER = {
    'gpt': {
        'parametrization': 'mup',
        'yarn': [2, 8],
        'n_experts': 4,
        'logit_softcap': 30.0,
        'window_pattern': 'SL',
    },
    'transformers': {'lora_rslora': True, 'modules_to_save': ['lm_head'], 'frozen_dtype': 'nf4'},
}


@pytest.mark.parametrize(('kind', 'key'), [(kind, key) for kind, values in CAME_LATER.items() for key in values])
def test_a_checkpoint_from_before_a_key_goes_on_with_the_default_of_that_key_alone(tmp_path, kind, key):
    """A key that only one of the two has is not compared: without a value for the checkpoint, any would pass."""
    import transformers

    from huggingface.pretrained import Pretrained

    transformers.LlamaConfig(vocab_size=9, **SIZES_OF_64).save_pretrained(tmp_path)
    keys = {'max_iters': 100, 'global_batch_size': 8, 'optimizer': 'adamw', 'seed': 1}
    keys |= {'dataset': 'synthetic', 'dataset_stages': (), 'windows': 'stream', 'packing': True, 'data_dir': 'data'}
    keys |= {'block_size': 16, 'vocab_size': 9, 'out_dir': 'a', 'eval_only': False}

    def identity_with(**more):
        if kind == 'gpt':
            more |= {'window_size': 4} if 'window_pattern' in more else {}
            more |= {'base_width': 32} if 'parametrization' in more else {}
            shape = ModelConfig(arch='llama', n_embd=72, block_size=16, vocab_size=9, **more)
        else:
            shape = Pretrained(str(tmp_path), block_size=16, lora_rank=4, **more)
        return identity.identity_of(keys, shape, data.open_mixture(keys, 'train'))

    saved = json.loads(json.dumps({'identity': identity_with(), 'step': 5, 'config': keys}))
    assert identity.check_resume(saved, keys, identity_with(), {}) == []
    default = saved['identity']['model'].pop(key)
    assert identity.check_resume(saved, keys, identity_with(), {}) == []
    other = CAME_LATER[kind][key]
    said = re.escape(f'the checkpoint has model.{key}={default!r}, this run has {other!r} (nobody set it): ')
    with pytest.raises(ValueError, match=said):
        identity.check_resume(saved, keys, identity_with(**{key: other}), {})


def test_torch_reads_what_we_write_and_finds_the_same_index(runs):
    for out_dir, held, _ in runs.values():
        path = checkpoint_of(out_dir, 2)
        tensors = {key: torch.empty_like(value) for key, value in held.items()}
        dcp.load(tensors, checkpoint_id=path, no_dist=True)
        assert_equal(tensors, held)
        theirs = dcp_files.tensors_in(f'{path}/.metadata')
        ours = checkpoint.read_index(path)
        assert [*ours] == sorted(theirs) and all(ours[key].shape == tuple(theirs[key]['shape']) for key in ours)


def test_weights_in_any_order_of_memory_are_written_as_they_are_read(tmp_path):
    run_function(1, save_transposed, str(tmp_path))
    for path in (checkpoint_of(tmp_path, 1), without_index(checkpoint_of(tmp_path, 1), tmp_path / 'before')):
        weights, _ = checkpoint.load_weights(path)
        assert torch.equal(weights['weight'], torch.arange(12.0).view(3, 4))


def save_transposed(out_dir):
    checkpoint_saver.prepare(out_dir)
    linear = nn.Linear(4, 3, bias=False)
    linear.weight.data = torch.arange(12.0).view(3, 4).t().contiguous().t()
    checkpoint_saver.Saver(out_dir, keep=1, say=silent).save(1, linear, torch.optim.SGD(linear.parameters()), {})


def without_index(path, copy):
    """A copy of a checkpoint as it was written before there was an index.json."""
    shutil.copytree(path, copy)
    (copy / 'index.json').unlink()
    return with_hashes(copy)


def with_hashes(path):
    """The path of a checkpoint, after its manifest has been written anew, as somebody would who has changed a file."""
    files = {file.name: checkpoint_saver.facts_of(file) for file in path.iterdir() if file.name != 'manifest.json'}
    (path / 'manifest.json').write_text(json.dumps({'format_version': 1, 'files': files}))
    return str(path)


@pytest.mark.parametrize('run', [('single', 1), ('ddp', 2), ('manual', 3), ('hsdp', 4)])
def test_a_checkpoint_from_before_the_index_is_read_bit_for_bit(runs, tmp_path, run):
    """Also as early versions of Python 3.11 pickle the member of an Enum: getattr(class, name)."""
    out_dir, held, _ = runs[run]
    path = without_index(checkpoint_of(out_dir, 2), tmp_path / 'before')
    assert checkpoint.find_damage(path, silent) is None
    assert_equal(tensors_of(path), held)
    index = dcp.FileSystemReader(path).read_metadata()
    with open(f'{path}/.metadata', 'wb') as file:
        pickler = pickle.Pickler(file)
        of_member = {_MEM_FORMAT_ENCODING: lambda member: (getattr, (type(member), member.name))}
        pickler.dispatch_table = copyreg.dispatch_table | of_member
        pickler.dump(index)
    assert_equal(tensors_of(with_hashes(Path(path))), held)


class Exploit:
    def __reduce__(self):
        return os.mkdir, ('executed',)


def hostile_class(index, path):
    """torch.load(), which unpickles anything, is how DCP reads what is not a tensor."""
    entry, evil = index.state_dict_metadata['model.embed.weight'], BytesStorageMetadata()
    evil.size, evil.properties = entry.size, entry.properties
    index.state_dict_metadata['model.embed.weight'] = evil


def hostile_tensor(index, path):
    info = next(info for place, info in index.storage_data.items() if place.fqn == 'model.embed.weight')
    info.offset = (path / '__0_0.distcp').stat().st_size
    with open(path / '__0_0.distcp', 'ab') as file:
        torch.save(Exploit(), file)
        info.length = file.tell() - info.offset


def hostile_path(index, path):
    shutil.copy(path / '__0_0.distcp', path.parent / 'elsewhere')
    for info in index.storage_data.values():
        info.relative_path = '../elsewhere'


HOSTILE = {
    'a class that is loaded by torch.load': (hostile_class, 'metadata.BytesStorageMetadata'),
    'a pickle in place of a tensor': (hostile_tensor, '__0_0.distcp: what lies at .* is no tensor'),
    'a file elsewhere': (hostile_path, r"file: found '../elsewhere', expected the name of a file in its own folder"),
    'a field that calls': (lambda index, path: setattr(index, 'planner_data', Exploit()), None),
    'a size that calls': (
        lambda index, path: setattr(index.state_dict_metadata['model.embed.weight'], 'size', Exploit()),
        'no size',
    ),
}


@pytest.mark.parametrize('what', HOSTILE)
def test_nothing_in_a_checkpoint_is_executed_and_no_path_of_it_followed(runs, tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    out_dir, held, _ = runs['single', 1]
    path = Path(without_index(checkpoint_of(out_dir, 2), tmp_path / 'evil'))
    index = dcp.FileSystemReader(path).read_metadata()
    change, refused = HOSTILE[what]
    change(index, path)
    (path / '.metadata').write_bytes(pickle.dumps(index))
    with_hashes(path)
    if refused:
        with pytest.raises(ValueError, match=refused):
            checkpoint.load_weights(path)
    else:  # a field that nobody reads
        assert_equal(tensors_of(path), held)
    assert not Path('executed').exists()


INDEX_FAULTS = {
    'another file': ({'file': '../../secret'}, "file: found '../../secret', expected the name of a file"),
    'a file that no hash covers': ({'file': 'other.distcp'}, 'found the file other.distcp, expected one that manifest'),
    'beyond the end': ({'offset': 10**9}, r'found a piece that ends at byte \d+ of __0_0.distcp, expected'),
    'beyond the tensor': ({'begin': [9, 0]}, r'found a piece .*, expected a box in \(17, 5\)'),
    'too little': ({'shape': [3, 5]}, 'found pieces of 15 numbers, expected all of'),
    'no number': ({'offset': '0'}, r"pieces\[0\].offset: found '0', expected a whole number"),
}


@pytest.mark.parametrize('fault', INDEX_FAULTS)
def test_an_index_that_does_not_fit_its_files_is_refused(runs, tmp_path, fault):
    shutil.copytree(checkpoint_of(runs['single', 1][0], 2), tmp_path / 'evil')
    index = json.loads((tmp_path / 'evil/index.json').read_text())
    change, said = INDEX_FAULTS[fault]
    index['model.embed.weight']['pieces'][0] |= change
    (tmp_path / 'evil/index.json').write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f'index.json: .*model.embed.weight.*{said}'):
        checkpoint.load_weights(with_hashes(tmp_path / 'evil'))


# --- damage -----------------------------------------------------------------------------------------------------------


def save_steps(out_dir, steps, keep, width=5, async_save=False):
    """Save a DDP model whose weights all equal the step; returns the lines that this rank has printed."""
    checkpoint_saver.prepare(out_dir)
    raw, _, optimizer = build('ddp', width=width)
    train(raw, optimizer, steps=1)
    lines = []
    saver = checkpoint_saver.Saver(out_dir, keep, async_save, say=lines.append)
    for step in steps:
        fill(raw, step)
        saver.save(step, raw, optimizer, {})
        fill(raw, -1.0)  # what comes after save() is not in the checkpoint
        dist.all_reduce(torch.zeros(1))  # meanwhile the collectives of training go on
    saver.wait()
    return lines


@torch.no_grad()
def fill(raw, value):
    for parameter in raw.parameters():
        parameter.fill_(value)


def assert_holds(path, step):
    weights, state = checkpoint.load_weights(path)
    assert state == {'step': step}
    for name, weight in weights.items():
        assert (weight == step).all(), name


@pytest.fixture(scope='module')
def three_saved(tmp_path_factory):
    out_dir = str(tmp_path_factory.mktemp('three'))
    run_function(2, save_steps, out_dir, [1, 2, 3], 3, 1000)
    return out_dir


FAULTS = {
    'truncated': (
        lambda folder: os.truncate(folder / '__1_0.distcp', 5000),
        r'__1_0.distcp .*5000 bytes .*\d',
    ),
    'missing': (lambda folder: (folder / '__0_0.distcp').unlink(), '__0_0.distcp .*No such file'),
    'one flipped bit': (lambda folder: flip_bit(folder / '__1_0.distcp'), '__1_0.distcp .*changed'),
    'a hole': (lambda folder: overwrite(folder / '__0_0.distcp', 8192, bytes(4096)), '__0_0.distcp .*changed'),
    'empty index': (lambda folder: os.truncate(folder / '.metadata', 0), '.metadata .*0 bytes'),
    'one flipped bit of the index': (lambda folder: flip_bit(folder / '.metadata'), '.metadata .*changed'),
    'other state': (lambda folder: overwrite(folder / 'state.json', 0, b'['), 'state.json .*changed'),
    'no manifest': (
        lambda folder: (folder / 'manifest.json').unlink(),
        'manifest.json .*missing',
    ),
    'torn manifest': (
        lambda folder: os.truncate(folder / 'manifest.json', 100),
        'not JSON',
    ),
    'empty manifest': (
        lambda folder: (folder / 'manifest.json').write_text('{"format_version": 1, "files": {}}'),
        r'\.metadata has',
    ),
    'manifest of a later version': (
        lambda folder: (folder / 'manifest.json').write_text('{"format_version": 2, "files": {}}'),
        'found format_version 2, expected 1',
    ),
    'one flipped bit of our index': (lambda folder: flip_bit(folder / 'index.json'), 'index.json .*changed'),
}


@pytest.mark.parametrize('fault', FAULTS)
def test_a_damaged_newest_checkpoint_is_named_set_aside_and_the_one_before_it_used(three_saved, tmp_path, fault):
    damage, said = FAULTS[fault]
    out_dir = tmp_path / 'run'
    shutil.copytree(three_saved, out_dir)
    assert checkpoint.choose(out_dir, 'auto', silent) == checkpoint_of(out_dir, 3)
    damage(out_dir / 'checkpoints' / 'step_00000003')
    lines = []
    assert checkpoint.choose(out_dir, 'auto', lines.append) == checkpoint_of(out_dir, 2)
    assert any(re.search(f'step_00000003 .*damaged: .*{said}', line) for line in lines), lines
    assert sorted(os.listdir(out_dir / 'checkpoints')) == ['step_00000001', 'step_00000002', 'step_00000003.damaged']
    assert_holds(checkpoint_of(out_dir, 2), 2)


def find_together(out_dir, eval_only=False):
    """(the checkpoint or the error, what was printed, the files that this rank has hashed) when a run begins."""
    hashed, said = [], io.StringIO()

    def note_and_hash(path):
        hashed.append(os.path.relpath(path, f'{out_dir}/checkpoints'))
        return sha256_of(path)

    config = SimpleNamespace(out_dir=str(out_dir), resume='auto', eval_only=eval_only, init_from='scratch')
    with mock.patch.object(checkpoint, 'sha256_of', note_and_hash), contextlib.redirect_stdout(said):
        try:
            return begin.find_checkpoint(config), said.getvalue(), hashed
        except ValueError as error:
            return str(error), said.getvalue(), hashed


@pytest.mark.parametrize('ranks', [1, 2, 3])
def test_each_rank_hashes_its_share_and_all_come_to_the_same_decision(three_saved, tmp_path, ranks):
    out_dir = tmp_path / 'run'
    shutil.copytree(three_saved, out_dir)
    for eval_only in (False, True):
        found, said, hashed = zip(*run_function(ranks, find_together, out_dir, eval_only), strict=True)
        assert {*found} == {checkpoint_of(out_dir, 3)} and 'verified' in said[0] and not any(said[1:])
        names = '.metadata', '__0_0.distcp', '__1_0.distcp', 'index.json', 'state.json'
        assert sorted(sum(hashed, [])) == [f'step_00000003/{name}' for name in names] and all(hashed)
    # Whichever rank hashes the damaged file, all take the checkpoint before.
    for step, name in ((3, '__1_0.distcp'), (2, '__0_0.distcp')):
        flip_bit(Path(checkpoint_of(out_dir, step), name))
        found, said, _ = zip(*run_function(ranks, find_together, out_dir), strict=True)
        assert {*found} == {checkpoint_of(out_dir, step - 1)}
        assert f'{name} has changed' in said[0] and 'is now' in said[0] and not any(said[1:])
    Path(checkpoint_of(out_dir, 1), 'manifest.json').unlink()
    for found, _, _ in run_function(ranks, find_together, out_dir):
        assert 'all checkpoints' in found and 'restore a copy' in found


def patience_of_all(out_dir):
    """For how many seconds ranks would wait in each collective by which they find the checkpoint of a run."""
    seconds = []

    def note_timeout(collective):
        def call(*arguments, group=None, **options):
            backend = (group or dist.group.WORLD)._get_backend(torch.device('cpu'))
            seconds.append(backend.options._timeout.total_seconds())
            return collective(*arguments, group=group, **options)

        return call

    with contextlib.ExitStack() as patches:
        for name in ('broadcast_object_list', 'all_gather_object'):
            patches.enter_context(mock.patch.object(dist, name, note_timeout(getattr(dist, name))))
        begin.find_checkpoint(SimpleNamespace(out_dir=str(out_dir), resume='auto', eval_only=False))
    return seconds


def test_a_checkpoint_may_take_an_hour_to_verify(three_saved, tmp_path):
    shutil.copytree(three_saved, tmp_path / 'run')
    for seconds in run_function(2, patience_of_all, tmp_path / 'run'):
        *seconds, _ = seconds  # the lock, the files, the verdicts, the end; last the decision, which has been made
        assert len(seconds) == 4 and min(seconds) > 3600


def test_when_all_checkpoints_are_damaged_the_run_neither_starts_nor_loses_them(three_saved, tmp_path):
    out_dir = tmp_path / 'run'
    shutil.copytree(three_saved, out_dir)
    for step in (1, 2, 3):
        flip_bit(Path(checkpoint_of(out_dir, step)) / '__0_0.distcp')
    for resume in ('auto', 'must', 'auto'):
        with pytest.raises(ValueError, match='step_00000003, step_00000002, step_00000001.*restore a copy'):
            checkpoint.choose(out_dir, resume, silent)
    for step in (1, 2, 3):
        checkpoint.move_aside(checkpoint_of(out_dir, step))
    with pytest.raises(ValueError, match='step_00000003.damaged'):
        checkpoint.choose(out_dir, 'auto', silent)
    with pytest.raises(ValueError, match=f"resume='never' .*out_dir={out_dir} "):
        checkpoint.choose(out_dir, 'never', silent)


def test_resume_auto_must_and_never(three_saved, tmp_path):
    empty = str(tmp_path / 'empty')
    assert checkpoint.choose(empty, 'auto') is None
    assert checkpoint.choose(empty, 'never') is None
    with pytest.raises(ValueError, match=f"resume='must' .*{empty}/checkpoints"):
        checkpoint.choose(empty, 'must')
    assert checkpoint.choose(three_saved, 'must', silent) == checkpoint_of(three_saved, 3)
    with pytest.raises(ValueError, match=f"resume='never' .*out_dir={three_saved} .*--resume=auto"):
        checkpoint.choose(three_saved, 'never')


# --- the job or the disk fails ----------------------------------------------------------------------------------------


def save_for_ever(out_dir, first_step, async_save):
    save_steps(out_dir, range(first_step, 10**6), 2, 50_000, async_save)


@pytest.mark.parametrize('async_save', [False, True])
def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before_it(tmp_path, async_save):
    """One or both ranks are killed by SIGKILL during a save of 10 MB, and the next job goes on from what is there."""
    out_dir, random_delay = str(tmp_path), random.Random(0)
    newest = 0
    for victims in (2, 2, 1):
        with tempfile.TemporaryDirectory() as folder:
            processes = start_function(2, folder, save_for_ever, out_dir, newest + 1, async_save)
            being_written = Path(checkpoint_of(out_dir, newest + 3) + '.tmp')
            wait_until(being_written.exists, 60)
            time.sleep(random_delay.uniform(0, 0.05))
            for process in processes[-victims:]:
                process.kill()
            assert not join_all(processes, 60), 'a rank waits for one that was killed'
        path = checkpoint.choose(out_dir, 'must', silent)
        newest = int(path[-8:])
        assert_holds(path, newest)
        assert not Path(f'{path}.damaged').exists()


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 4 MB."""
    command = ['mount', '-t', 'tmpfs', '-o', 'size=4m', 'none', str(tmp_path)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip('mounting a tmpfs is not permitted here')
    yield str(tmp_path)
    subprocess.run(['umount', str(tmp_path)], check=True)


def fill_the_disk(out_dir, async_save):
    """Save 1 MB, then 6 MB, then 1 MB; returns the error on this rank."""
    small, _, small_optimizer = build('ddp', width=5_000)
    large, _, large_optimizer = build('ddp', width=30_000)
    checkpoint_saver.prepare(out_dir)
    for raw, optimizer in ((small, small_optimizer), (large, large_optimizer)):
        train(raw, optimizer, steps=1)
        fill(raw, 1)
    saver = checkpoint_saver.Saver(out_dir, keep=1, async_save=async_save, say=silent)
    saver.save(1, small, small_optimizer, {})
    saver.wait()
    saver.copies.clear()
    with pytest.raises(OSError) as error:
        saver.save(2, large, large_optimizer, {})
        saver.wait()
    dist.barrier()
    assert os.listdir(f'{out_dir}/checkpoints') == ['step_00000001']
    assert checkpoint.find_damage(checkpoint_of(out_dir, 1), silent) is None
    dist.barrier()
    saver.copies.clear()
    fill(small, 3)
    saver.save(3, small, small_optimizer, {})
    saver.wait()
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize('async_save', [False, True])
def test_a_full_disk_is_an_error_on_all_ranks_and_leaves_the_old_checkpoint(small_disk, async_save):
    messages = run_function(2, fill_the_disk, small_disk, async_save)
    for message in messages:
        assert re.search(r'step_00000002: .*rank \d: .*No space left on device', message), message
        assert '\n' not in message
    assert checkpoint.choose(small_disk, 'must', silent) == checkpoint_of(small_disk, 3)
    assert_holds(checkpoint_of(small_disk, 3), 3)


def fail_on_rank_1(out_dir):
    """Rank 1, and no other, may write no file above 1 kB; returns the error that this rank sees."""
    checkpoint_saver.prepare(out_dir)
    raw, _, optimizer = build('ddp', width=1000)
    saver = checkpoint_saver.Saver(out_dir, keep=1, say=silent)
    if dist.get_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    with pytest.raises(OSError) as error:
        saver.save(1, raw, optimizer, {})
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return str(error.value)


def test_an_error_on_one_rank_is_raised_on_all(tmp_path):
    for message in run_function(2, fail_on_rank_1, str(tmp_path)):
        assert re.search('step_00000001: .*rank 1: .*File too large', message)


def fail_once(out_dir, async_save):
    """What is printed if step 1 cannot be saved and step 2, the last one, can."""
    checkpoint_saver.prepare(out_dir)
    raw, _, optimizer = build('ddp', width=1000)
    said = []
    saver = checkpoint_saver.Saver(out_dir, keep=1, async_save=async_save, say=said.append, save_errors='continue')
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    saver.save(1, raw, optimizer, {})
    if async_save:
        wait([saver.pending])
    else:
        with pytest.raises(OSError, match='File too large'):
            saver.wait()  # as if the run ended here
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    saver.save(2, raw, optimizer, {})
    saver.wait()
    return said


@pytest.mark.parametrize('async_save', [False, True])
def test_a_failed_save_is_an_error_at_the_end_unless_a_later_one_has_made_it_good(tmp_path, async_save):
    ((failed, saved),) = run_function(1, fail_once, str(tmp_path), async_save)
    assert re.search('step_00000001: .*rank 0: .*File too large', failed)
    assert saved.startswith(f'checkpoint {checkpoint_of(tmp_path, 2)}: ')
    assert os.listdir(tmp_path / 'checkpoints') == ['step_00000002']


def save_bad_weights(out_dir):
    """{weight: the error that this rank sees}. Only on rank 1 the last weight is not finite."""
    checkpoint_saver.prepare(out_dir)
    raw, _, optimizer = build('fsdp')
    saver = checkpoint_saver.Saver(out_dir, keep=1, say=silent)
    saver.save(1, raw, optimizer, {})
    messages = {}
    for weight in ('nan', 'inf', '-inf'):
        if dist.get_rank() == 1:
            with torch.no_grad():
                raw.embed.weight.to_local()[-1, -1] = float(weight)
        with pytest.raises(ValueError) as error:
            saver.save(2, raw, optimizer, {})
        messages[weight] = str(error.value)
    return messages


def test_weights_that_are_no_numbers_are_refused_on_all_ranks(tmp_path):
    for messages in run_function(2, save_bad_weights, str(tmp_path)):
        for message in messages.values():
            assert re.search('model.embed.weight .*not finite .*rank 1 .*step 2', message)
            assert f' {checkpoint_of(tmp_path, 1)}:' in message
    assert os.listdir(tmp_path / 'checkpoints') == ['step_00000001']


def note_calls(out_dir):
    """What is written to the disk and renamed during a save, in order: ('fsync', path) and ('rename', from, to)."""
    checkpoint_saver.prepare(out_dir)
    raw, _, optimizer = build('single')
    saver = checkpoint_saver.Saver(out_dir, keep=1, say=silent)
    calls, fsync, replace = [], os.fsync, os.replace

    def noted_fsync(descriptor):
        calls.append(('fsync', os.readlink(f'/proc/self/fd/{descriptor}')))
        fsync(descriptor)

    def noted_rename(old, new):
        calls.append(('rename', str(old), str(new)))
        replace(old, new)

    os.fsync, os.replace, os.rename = noted_fsync, noted_rename, noted_rename  # the last is DCP's
    saver.save(1, raw, optimizer, {})
    return calls


def test_all_of_a_checkpoint_is_on_the_disk_before_it_gets_its_name(tmp_path):
    """Otherwise a power failure after the rename could leave a good name with nothing in it."""
    (calls,) = run_function(1, note_calls, str(tmp_path))
    final = checkpoint_of(tmp_path, 1)
    published = calls.index(('rename', f'{final}.tmp', final))
    before, after = calls[:published], calls[published + 1 :]
    renames = {call[2]: call for call in before if call[0] == 'rename'}
    for name in os.listdir(final):
        path = f'{final}.tmp/{name}'
        rename = renames.get(path)  # for a file that was written under another name
        in_time = before[: before.index(rename)] if rename else before
        assert ('fsync', rename[1] if rename else path) in in_time, f'{name} may not be on the disk'
    assert ('fsync', f'{final}.tmp') in before and ('fsync', str(tmp_path / 'checkpoints')) in after


def test_a_run_that_goes_back_keeps_the_checkpoint_it_has_just_written(tmp_path):
    run_function(1, save_steps, str(tmp_path), [10, 20, 12], 1)
    assert os.listdir(tmp_path / 'checkpoints') == ['step_00000012']
    run_function(1, save_steps, str(tmp_path), [15, 13], 2)
    assert sorted(os.listdir(tmp_path / 'checkpoints')) == ['step_00000013', 'step_00000015']


@pytest.mark.slow
def test_retention_keeps_the_newest_and_survives_a_failed_delete(tmp_path):
    folder = tmp_path / 'checkpoints'
    (folder / 'step_00000009.tmp').mkdir(parents=True)  # left by a killed job
    (folder / 'step_00000008.damaged').mkdir()
    (folder / 'step_00000002.tmp').mkdir()
    (folder / 'step_00000002.tmp' / '__7_0.distcp').write_text('of a job with more ranks')
    assert not [line for line in run_function(2, save_steps, str(tmp_path), [1, 2, 3], 2)[0] if 'WARNING' in line]
    assert sorted(os.listdir(folder)) == ['step_00000002', 'step_00000003', 'step_00000008.damaged']
    assert not (folder / 'step_00000002' / '__7_0.distcp').exists()
    busy = folder / 'step_00000002' / 'busy'
    busy.mkdir()
    if subprocess.run(['mount', '-t', 'tmpfs', 'none', str(busy)], capture_output=True).returncode != 0:
        pytest.skip('mounting a tmpfs is not permitted here')
    try:
        lines = run_function(2, save_steps, str(tmp_path), [4], 2)[0]
    finally:
        mounted = [line.split()[1] for line in Path('/proc/mounts').read_text().splitlines()]
        subprocess.run(['umount', next(path for path in mounted if path.startswith(str(folder)))], check=True)
    assert any('cannot be deleted' in line and 'busy' in line for line in lines), lines
    assert {'step_00000003', 'step_00000004'} <= set(os.listdir(folder))
    run_function(2, save_steps, str(tmp_path), [5], 2)
    assert sorted(os.listdir(folder)) == ['step_00000004', 'step_00000005', 'step_00000008.damaged']


def save_with_permanent_ones(out_dir):
    """What Saver takes for the last good checkpoint after each save. The one of step 35 loses its manifest."""
    checkpoint_saver.prepare(out_dir)
    raw, _, optimizer = build('ddp')
    saver = checkpoint_saver.Saver(out_dir, keep=2, say=silent, permanent_interval=20)
    said = [saver.last_good()]
    for step in (10, 20, 30, 35, 40, 45, 50, 55):
        saver.save(step, raw, optimizer, {})
        said.append(saver.last_good()[-8:])
        if step == 35 and dist.get_rank() == 0:
            Path(checkpoint_of(out_dir, 35), 'manifest.json').unlink()  # not complete, so it does not count
        dist.barrier()
    return said


def test_permanent_checkpoints_stay_and_do_not_count_and_neither_do_incomplete_ones(tmp_path):
    said = run_function(2, save_with_permanent_ones, str(tmp_path))
    assert said[0] == ['none', *(f'{step:08}' for step in (10, 20, 30, 35, 40, 45, 50, 55))]
    left = [path.name for path in sorted(tmp_path.glob('checkpoints/*')) if (path / 'manifest.json').exists()]
    assert left == [f'step_{step:08}' for step in (20, 40, 50, 55)]


# --- in the background ------------------------------------------------------------------------------------------------


def save_both_ways(strategy, out_dir):
    raw, _, optimizer = build(strategy)
    checkpoint_saver.prepare(out_dir)
    blocking = checkpoint_saver.Saver(out_dir, keep=9, say=silent)
    lines = []
    background = checkpoint_saver.Saver(out_dir, keep=9, async_save=True, say=lines.append)
    held = []
    background.save(0, raw, optimizer, {})
    for step in (1, 2):
        train(raw, optimizer, steps=1)
        held.append(everything(raw, optimizer))
        background.wait()
        blocking.save(10 + step, raw, optimizer, {})
        state = {'note': 'as it was'}
        background.save(step, raw, optimizer, state)
        state['note'] = 'changed'
    train(raw, optimizer, steps=1)
    background.wait()
    for step in (1, 2, 11, 12):
        other, _, other_optimizer = build(strategy, seed=3)
        checkpoint.load(checkpoint_of(out_dir, step), other, other_optimizer)
        assert_equal(everything(other, other_optimizer), held[(step - 1) % 10])
    assert json.loads(Path(checkpoint_of(out_dir, 2), 'state.json').read_text()) == {'note': 'as it was', 'step': 2}
    return lines


@pytest.mark.parametrize('strategy', ['ddp', 'fsdp'])
def test_saving_in_the_background_saves_the_same(strategy, tmp_path):
    lines = run_function(2, save_both_ways, strategy, str(tmp_path))[0]
    assert len(lines) == 3 and re.search(r'step_00000002: \S+ GB .* waited \S+ s', lines[-1])


def bytes_staged(strategy, out_dir):
    """Bytes: (of host memory that a background save takes on this rank, of the largest tensor, of all tensors)."""
    raw, _, optimizer = build(strategy)
    train(raw, optimizer, steps=1)
    checkpoint_saver.prepare(out_dir)
    saver = checkpoint_saver.Saver(out_dir, keep=1, async_save=True, say=silent)
    saver.save(1, raw, optimizer, {})
    saver.wait()
    sizes = [tensor.nbytes for tensor in checkpoint_saver.tensors_to_save(raw, optimizer).values()]
    return sum(copy.nbytes for copy in saver.copies.values()), max(sizes), sum(sizes)


@pytest.mark.slow
@pytest.mark.parametrize('ranks, strategy', [(2, 'ddp'), (3, 'ddp'), (4, 'hsdp')])
def test_in_the_background_each_rank_copies_no_more_than_its_share(ranks, strategy, tmp_path):
    """Under HSDP on four ranks, each shard is on two of them."""
    staged, largest, of_all = zip(*run_function(ranks, bytes_staged, strategy, str(tmp_path)), strict=True)
    assert sum(staged) == of_all[0]
    if strategy == 'ddp':
        assert max(staged) <= of_all[0] / ranks + largest[0] and max(staged) - min(staged) <= largest[0]


# --- the run's directory ----------------------------------------------------------------------------------------------


def hold(out_dir, claimed):
    checkpoint_saver.claim(out_dir)
    claimed.set()
    signal.pause()


def test_members_of_a_group_may_take_over_an_out_dir_where_the_umask_lets_them(tmp_path):
    before = os.umask(0o002)
    try:
        checkpoint_saver.claim(str(tmp_path))
    finally:
        os.umask(before)
    assert (tmp_path / '.lock').stat().st_mode & 0o777 == 0o664


def test_a_second_job_is_told_who_holds_the_directory_until_that_one_dies(tmp_path):
    claimed = CONTEXT.Event()
    process = fork(hold, str(tmp_path), claimed)
    assert claimed.wait(60)
    with pytest.raises(ValueError, match=f'{tmp_path} .*{process.pid} on {socket.gethostname()}: '):
        checkpoint_saver.claim(tmp_path, patience_s=0.2)
    process.kill()
    checkpoint_saver.claim(tmp_path)
    checkpoint_saver.claim(tmp_path)  # again by the same process, such as a second run in a notebook


def test_a_lock_of_another_machine_is_waited_for_as_its_server_may_outlive_it(tmp_path):
    """An NFS server keeps the lock of a dead machine until its lease ends. Here the holder dies once somebody waits."""
    claimed = CONTEXT.Event()
    process = fork(hold, str(tmp_path), claimed)
    assert claimed.wait(60)
    said = []

    def die(line):
        said.append(line)
        process.kill()

    try:
        (tmp_path / '.lock').write_text('process 12 on n9')
        with pytest.raises(ValueError, match='process 12 on n9: '):
            checkpoint_saver.claim(tmp_path, patience_s=0.1, lease_s=0.2)
        checkpoint_saver.claim(tmp_path, patience_s=0, say=die)
    finally:
        process.kill()
    (line,) = said
    assert 'process 12 on n9' in line and f'{checkpoint_saver.NFS_LEASE_S} s' in line


def test_an_out_dir_that_cannot_be_written_is_found_before_training(tmp_path):
    checkpoint_saver.prepare(tmp_path / 'new' / 'run')
    assert os.listdir(tmp_path / 'new' / 'run') == ['checkpoints'] and not os.listdir(tmp_path / 'new/run/checkpoints')
    (tmp_path / 'file').write_text('')
    with pytest.raises(OSError, match='out_dir=.*/file.*--out_dir'):
        checkpoint_saver.prepare(tmp_path / 'file')
    with pytest.raises(OSError, match='out_dir=/proc/run'):
        checkpoint_saver.prepare('/proc/run')
    (tmp_path / 'new/run/checkpoints').chmod(0o555)
    if os.geteuid() == 0:  # root may write anywhere
        tmp_path.chmod(0o755)
        os.seteuid(65534)
    try:
        with pytest.raises(PermissionError, match='out_dir=.*Permission denied'):
            checkpoint_saver.prepare(tmp_path / 'new' / 'run')
    finally:
        os.seteuid(os.getuid())
