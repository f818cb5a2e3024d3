"""
What a run reads to find other files: the meta.json of a dataset, the index and settings of a model's folder, the record
of a download, and the objects of a pool, with values that nobody honest would write.

Each is read, or refused in one line. Whatever it says, no file outside of its own folder is opened, and none is made.
"""

import contextlib
import copy
import hashlib
import io
import json
import os
import sys
from pathlib import Path

import data
from dataset import shards
from fuzzing.cases import check, some
from huggingface.files import Weights
from huggingface.pretrained import copy_files, refuse_adapter
from pool.ledger import Ledger
from pool.objects import COMMIT, SNAPSHOT, read_object, refuse_commit, refuse_ledger
from pool.round_watch import RoundWatch
from pool.store import Folder
from text.conversations import templates_of, templates_of_data
from text.templates import write_templates
from text.tokenizer import check_same_tokenizer, tokenizer_of

watched = []  # the folder whose files the case must not open, and what it has opened of them


def watch(event, arguments):
    if not watched or event not in ('open', 'os.remove', 'os.rename', 'os.link'):
        return
    if isinstance(arguments[0], (str, bytes, Path)):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if path.startswith(watched[0] + os.sep):
            watched.append(path)


sys.addaudithook(watch)


def deep(levels=100_000):
    return '[' * levels + ']' * levels


def draw_value(draw, outside):
    """A value that nobody expects: a path to what lies outside, another type, a number out of range."""
    paths = [f'{up}outside/{name}' for up in ('../../', '../../../') for name in ('secret', 'train_000000.bin')]
    paths += [f'{outside}/secret', 'a/../../../outside/secret', '..', '/', '']
    odd = [None, True, 0, -1, 1.5, 2**40, 2**64, 10**30, float('nan'), float('inf'), [], {}, [[]], {'a': 1}]
    texts = ['x', 'train_000000.bin', 'meta.json', 'a\0b', 'a\nb', '\x1b[2J', '$(touch x)', '-rf', 'é' * 300, '\ud800']
    return copy.deepcopy(draw.choice(draw.choice([paths, paths, odd, texts])))


def spoil(draw, value, outside):
    """The value with something in it that is replaced, left out, or given another name."""
    places = []

    def walk(part):
        for key in [*part] if isinstance(part, dict) else range(len(part)):
            places.append((part, key))
            if isinstance(part[key], (dict, list)):
                walk(part[key])

    value = copy.deepcopy(value)
    walk(value)
    names = [place for place in places if isinstance(place[0][place[1]], str)]
    part, key = draw.choice(names if names and some(draw, 0.5) else places)
    if isinstance(part, dict) and some(draw, 0.2):
        part[str(draw_value(draw, outside))] = part.pop(key)
    elif some(draw, 0.1):
        del part[key]
    else:
        part[key] = draw_value(draw, outside)
    return value


def write_json(draw, path, content, outside):
    """Write the content, most often spoilt, and now and then as no JSON."""
    for _ in range(draw.choice([0, 0, 0, 0, 1, 1, 3])):
        content = spoil(draw, content, outside) if content else content
    text = json.dumps(content)
    if some(draw, 0.03):
        text = draw.choice([deep(), text[: len(text) // 2], '', '[1]', '"a"', text.replace(':', ':' + deep(5000), 1)])
    path.write_text(text, encoding='utf-8', errors='surrogatepass')


def check_dataset(draw, folder, outside):
    here = folder / 'set'
    here.mkdir()
    listed = []
    for number in range(2):
        shards.write_shard(here / f'train_{number:06}.bin', [*range(90)], 'uint16')
        (here / f'train_{number:06}.mask').write_bytes(b'\x03' + b'\x01' * 89)
        sha256 = hashlib.sha256((here / f'train_{number:06}.bin').read_bytes()).hexdigest()
        mask = hashlib.sha256((here / f'train_{number:06}.mask').read_bytes()).hexdigest()
        listed.append({'file': f'train_{number:06}.bin', 'tokens': 90, 'sha256': sha256})
        listed[-1] |= {'mask_file': f'train_{number:06}.mask', 'mask_sha256': mask}
    split = {'tokens': 180, 'bytes': 180, 'documents': 2, 'max_token': 89, 'shards': listed}
    meta = {'format_version': 1, 'vocab_size': 257, 'eot_token': 256, 'dtype': 'uint16', 'tokenizer': {'name': 'bytes'}}
    meta |= {'masked': True} if some(draw, 0.7) else {}
    meta |= {'splits': {'train': {**split, 'learned_tokens': 180, 'longest': 90}}, 'settings': {'chat_template': 'a'}}
    meta |= {'chat_templates': {'default': 'a', 'tool_use': 'b'}}
    write_json(draw, here / 'meta.json', meta, outside)
    dataset = data.open_dataset(str(folder), 'set', 'train', 40)
    dataset.read([0])
    shards.verify(here)
    tokenizer_of(here)
    templates = templates_of_data([str(here)], str(folder))[0]
    (folder / 'model').mkdir()
    write_templates(str(folder / 'model'), templates or {})


def check_folder(draw, folder, outside):
    import torch
    from safetensors.torch import save_file

    here = folder / 'model'
    here.mkdir()
    names = [f'model-{number:05}-of-00002.safetensors' for number in (1, 2)]
    for name in names:
        save_file({f'{name}.weight': torch.zeros(2, 2)}, here / name)
    index = {'metadata': {'total_size': 8}, 'weight_map': {f'{name}.weight': name for name in names}}
    write_json(draw, here / 'model.safetensors.index.json', index, outside)
    templates = [{'name': 'default', 'template': 'a'}, {'name': 'tool_use', 'template': 'b'}]
    write_json(draw, here / 'tokenizer_config.json', {'chat_template': templates, 'eos_token': '</s>'}, outside)
    if some(draw, 0.2):
        os.symlink(draw.choice(['../../outside/secret', 'tokenizer_config.json', '.', outside]), here / 'NOTICE')
    if some(draw, 0.1):
        write_json(draw, here / 'adapter_config.json', {'base_model_name_or_path': 'a/b', 'r': 8}, outside)
    found = templates_of(here)
    refuse_adapter(str(here))
    weights = Weights(str(here))
    weights.fingerprint()
    copy_files(str(here), str(folder / 'kept'))
    write_templates(str(folder / 'kept'), found)
    check_same_tokenizer(str(here), str(here))


def check_pool(draw, folder, outside):
    store, ledger = Folder(str(folder / 'pool')), Ledger(20, 5, 2)
    delta = {'number': 0, 'pool': 'a', 'job': 'a', 'steps': 5, 'state': 'a-a', 'dtype': 'int4', 'xxh128': ['a']}
    files = {
        'outer/000001.json': {
            'files': 'a', 'xxh128': {'model': ['a'], 'momentum': ['a']}, 'state': 'a-a',
            'members': ['a'], 'parent': 'a',
            'ledger': {'round': 1, 'begun': 0, 'trained': 10, 'issued': 2, 'returned': [[0, 0, 5]], 'pace': 1.0},
        },
        'commits/000000.json': {'state': 'a-a', 'closer': 'a', 'claims': 2, 'deltas': [delta]},
        'rounds/000000/delta_01.json': {**delta, 'leaves': False, 'out_dir': 'out/a'},
    }  # fmt: skip
    for name, content in files.items():
        (folder / 'pool' / name).parent.mkdir(parents=True, exist_ok=True)
        write_json(draw, folder / 'pool' / name, content, outside)
    claim = str(draw_value(draw, outside)) if some(draw, 0.8) else 'a'
    store.create('rounds/000000/claim_00', claim.encode('utf-8', 'surrogatepass'))
    watch = RoundWatch(store, 'me', 30, 1)
    watch.begin(ledger, set())
    watch.look()
    watch.look()
    json.dumps([watch.owners, watch.markers])
    commit = read_object(store, 'commits/000000.json', COMMIT)
    refuse_commit(commit, ledger, 'commit')
    snapshot = read_object(store, 'outer/000001.json', SNAPSHOT)
    refuse_ledger(snapshot['ledger'], ledger, 'snapshot')
    check(ledger.pieces < 100, 'a ledger of so many pieces', ledger.pieces)
    ledger.load(snapshot['ledger'])
    check(ledger.pieces < 10**4 and ledger.step <= 20, 'a ledger of so many pieces', ledger.pieces)


def check_foreign(draw, folder):
    """One case."""
    outside = folder / 'outside'
    (folder / 'inside').mkdir()
    outside.mkdir()
    for name in ('secret', 'secret_0000', 'train_000000.bin'):
        (outside / name).write_text('secret')
    before = sorted(folder.rglob('*'))
    watched[:] = [os.path.realpath(outside)]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            draw.choice([check_dataset, check_folder, check_pool])(draw, folder / 'inside', str(outside))
    finally:
        opened, watched[:] = watched[1:], []
        after = [path for path in folder.rglob('*') if path not in before and folder / 'inside' not in path.parents]
        check(not opened and not after, 'files outside of the folder', opened, after)
