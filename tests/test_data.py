"""data.py: shards on disk, the order of samples, batches that do not depend on the number of ranks, and the thread that
makes them."""

import gc
import hashlib
import itertools
import json
import math
import os
import pickle
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch
from launch import REPO, environment
from prepared import eval_batches, only

import data
from dataset import packed, shards
from dataset import windows as on_disk
from dataset.shuffle import permuted
from runtime.fill import line_of_padding
from text import tokenizer as tokenizers

VOCAB_SIZE = 1000


def tokens_of(length, seed=0, vocab_size=VOCAB_SIZE):
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, vocab_size, length)


def make_dataset(folder, train=(700, 450), val=(300,), dtype=np.uint16, with_meta=True, changed=None):
    """Write a dataset as prepare_data.py leaves it, in shards of these lengths. Returns {split: all its tokens}.

    changed: {split: position of a token that gets another value}.
    """
    folder.mkdir(parents=True, exist_ok=True)
    meta = {'name': folder.name, 'vocab_size': VOCAB_SIZE, 'dtype': np.dtype(dtype).name, 'splits': {}}
    splits = {}
    for split, lengths in (('train', train), ('val', val)):
        tokens, listed = tokens_of(sum(lengths), seed=len(split)), []
        if split in (changed or {}):
            tokens[changed[split]] = (tokens[changed[split]] + 1) % VOCAB_SIZE
        for number, piece in enumerate(np.split(tokens, np.cumsum(lengths)[:-1])):
            path = folder / f'{split}_{number:06}.bin'
            shards.write_shard(path, piece, dtype)
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
            listed.append({'file': path.name, 'tokens': len(piece), 'sha256': sha256})
        meta['splits'][split] = {
            'tokens': len(tokens), 'bytes': 3 * len(tokens), 'max_token': int(tokens.max()), 'shards': listed
        }  # fmt: skip
        splits[split] = tokens
    if with_meta:
        (folder / 'meta.json').write_text(json.dumps(meta))
    return splits


class CreatesAFile:
    """Unpickling it creates a file, by which a test sees that somebody else's pickle was opened."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, 'w')


def whole(dataset):
    """All tokens that a dataset's windows cover, in order."""
    inputs = [dataset.read([index])[0, :-1] for index in range(dataset.n_windows)]
    return np.concatenate([*inputs, dataset.read([dataset.n_windows - 1])[0, -1:]])


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith('prefetch')]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    if prefetch_threads():
        gc.collect()
    assert not prefetch_threads()


# --- shards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('dtype, magic, version', [(np.uint16, 20240520, 1), (np.uint32, 20240801, 7)])
def test_a_shard_is_a_1024_byte_header_and_the_tokens(tmp_path, dtype, magic, version):
    tokens = tokens_of(777, vocab_size=2**16 if dtype == np.uint16 else 2**31)
    path = tmp_path / 'train_000000.bin'
    shards.write_shard(path, tokens, dtype)
    header = np.fromfile(path, dtype='<i4', count=256)
    assert header[:3].tolist() == [magic, version, 777] and not header[3:].any()
    assert np.array_equal(np.fromfile(path, dtype=dtype, offset=1024), tokens)
    assert np.array_equal(shards.read_shard(path), tokens)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_an_id_that_the_dtype_cannot_hold_is_refused_and_nothing_is_written(tmp_path):
    for wrong in (65536, 128000, -1):
        with pytest.raises(ValueError, match=f'{wrong}.*uint16.*uint32'):
            shards.write_shard(tmp_path / 'train_000000.bin', np.array([5, wrong, 7]), np.uint16)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_leaves_the_old_shard(tmp_path, monkeypatch):
    path = tmp_path / 'train_000000.bin'
    shards.write_shard(path, np.arange(10), np.uint16)

    def killed(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, 'fsync', killed)
    with pytest.raises(KeyboardInterrupt):
        shards.write_shard(path, np.arange(20), np.uint16)
    assert np.array_equal(shards.read_shard(path), np.arange(10))


def test_what_a_writer_has_synced_is_on_the_disk_and_a_shard_is_before_it_gets_its_name(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def noted_fsync(descriptor):
        synced.append((os.path.basename(os.readlink(f'/proc/self/fd/{descriptor}')), os.fstat(descriptor).st_size))
        fsync(descriptor)

    monkeypatch.setattr(os, 'fsync', noted_fsync)
    writer = shards.ShardWriter(tmp_path, 'train', np.uint16, shard_tokens=1000)
    writer.add(np.arange(300, dtype=np.uint16), 1, 900)
    writer.sync()
    assert synced == [('train_000000.bin.partial', 1024 + 600)]
    writer.add(np.arange(900, dtype=np.uint16), 1, 2700)
    assert synced[1] == ('train_000000.bin.partial', 1024 + 2000)
    writer.sync()
    assert synced[-1] == ('train_000001.bin.partial', 1024 + 400)


NO_SHARDS = [  # file, what is made of its bytes, what the line says
    *(('bin', lambda content, n=n: content[:n], '(size|magic)') for n in (-1, -500, 1024, 1000, 11, 0)),
    ('bin', lambda content: content + b'\0\0', '3,026 bytes.*1,000 tokens.*3,024'),
    ('bin', lambda content: b'abcd' + content[4:], 'magic.*20240520, 1'),
    ('bin', lambda content: content[:4] + b'\7' + content[5:], 'magic .*20240520, 7'),
    *(('npy', lambda content, n=n: content[:n], 'size') for n in (-100, 20, 0)),
    ('npy', lambda content: pickle.dumps(CreatesAFile('opened')), 'size'),
]


@pytest.mark.parametrize('kind, change, says', NO_SHARDS)
def test_a_damaged_shard_is_refused_by_name_before_it_is_mapped(tmp_path, monkeypatch, kind, change, says):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f'train_000003.{kind}'
    shards.write_shard(path, np.arange(1000), np.uint16) if kind == 'bin' else np.save(path, np.arange(1000))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=f'train_000003.{kind}.*{says}'):
        shards.read_shard(path)
    assert not (tmp_path / 'opened').exists()


@pytest.mark.parametrize('wrong', [np.zeros(10), np.zeros((2, 5), dtype=np.int64), np.array([{}], dtype=object)])
def test_npy_files_that_hold_no_row_of_integers_are_refused_by_name(tmp_path, wrong):
    np.save(tmp_path / 'train_000000.npy', wrong)
    with pytest.raises(ValueError, match='train_000000.npy'):
        shards.read_shard(tmp_path / 'train_000000.npy')


def test_raw_tokens_that_are_called_npy_are_told_so_and_nobody_is_advised_to_unpickle(tmp_path):
    tokens_of(500).astype(np.uint16).tofile(tmp_path / 'train.npy')
    with pytest.raises(ValueError, match='raw uint16 are read from files called train.bin') as caught:
        shards.read_shard(tmp_path / 'train.npy')
    assert 'pickle' not in str(caught.value) and 'unsafe' not in str(caught.value)


def index_of(tokens, code, lengths):
    """A file .idx as Megatron-LM writes it: of one document for each sequence."""
    head = struct.pack('<9sQBQQ', b'MMIDIDX\0\0', 1, code, len(lengths), len(lengths) + 1)
    pointers = np.cumsum([0, *lengths[:-1]]) * tokens.itemsize
    documents = np.arange(len(lengths) + 1)
    return (
        head + np.array(lengths, '<i4').tobytes() + pointers.astype('<i8').tobytes() + documents.astype('<i8').tobytes()
    )


@pytest.mark.parametrize('dtype, code', [('uint8', 1), ('int32', 4), ('int64', 5), ('uint16', 8)])
def test_a_file_of_megatron_is_read_as_the_index_beside_it_says(tmp_path, dtype, code):
    tokens = tokens_of(600, vocab_size=200).astype(dtype)
    for name in ('train.bin', 'train_text_document.bin'):
        path = tmp_path / name
        tokens.tofile(path)
        path.with_suffix('.idx').write_bytes(index_of(tokens, code, [100, 1, 499]))
        assert np.array_equal(shards.read_shard(path), tokens)
    path.with_suffix('.idx').write_bytes(index_of(tokens, code, [100, 1, 498]))
    with pytest.raises(ValueError, match='train_text_document.bin: its size is .* copy both again$'):
        shards.read_shard(path)
    path.with_suffix('.idx').write_bytes(b'TNTIDX\0\0' + bytes(40))
    with pytest.raises(ValueError, match='no index of token ids by Megatron-LM'):
        shards.read_shard(path)


@pytest.mark.parametrize('dtype', ['uint32', 'int64'])
@pytest.mark.parametrize('vocab_size', [65, 50257, 200_000])
def test_larger_integers_without_a_header_are_not_read_as_uint16(tmp_path, dtype, vocab_size):
    folder = tmp_path / 'set'
    folder.mkdir()
    tokens = tokens_of(5000, vocab_size=vocab_size)
    tokens.astype(dtype).tofile(folder / 'train.bin')
    with pytest.raises(ValueError, match=f'these are {dtype}, not uint16') as caught:
        data.open_dataset(tmp_path, 'set', 'train', 10)
    command = str(caught.value).split('`')[1].replace('N}', f'{vocab_size}}}')
    subprocess.run(command, shell=True, check=True)
    assert np.array_equal(whole(data.open_dataset(tmp_path, 'set', 'train', 1)), tokens)


@pytest.mark.parametrize('vocab_size', [65, 50257])
@pytest.mark.parametrize('written', ['uint16', 'uint32', 'int64', 'float16', 'float32', 'float64'])
def test_a_meta_json_that_the_values_contradict_is_refused(tmp_path, written, vocab_size):
    path = tmp_path / 'train.bin'
    tokens = tokens_of(5000, vocab_size=min(vocab_size, 2048) if written == 'float16' else vocab_size)  # exact to 2048
    tokens.astype(written).tofile(path)
    for said in (None, 'uint16', 'uint32', 'int64'):
        if said == written or (said is None and written == 'uint16'):
            assert np.array_equal(shards.read_shard(path, said), tokens)
            continue
        kind = 'floating-point numbers, and no' if written.startswith('f') else f'these are {written}, not'
        with pytest.raises(ValueError, match=f'train.bin: .*{kind} {said or "uint16"}[:;]'):
            shards.read_shard(path, said)
    with pytest.raises(ValueError, match='"dtype": "float32" in its meta.json: token ids are integers'):
        shards.read_shard(path, 'float32')


@pytest.mark.parametrize(
    'text', ['version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n', '<html>\r\n' * 99]
)
def test_text_is_no_shard_without_a_header(tmp_path, text):
    (tmp_path / 'train.bin').write_text(text + ' ' * (len(text) % 2))
    with pytest.raises(ValueError, match='train.bin: is text, and no token ids'):
        shards.read_shard(tmp_path / 'train.bin')


# --- datasets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('dtype', [np.uint16, np.uint32])
def test_windows_run_across_shards_and_cover_every_token_once(tmp_path, dtype):
    """Also where shards are shorter than a window, so that one window lies in four of them."""
    tokens = make_dataset(tmp_path / 'set', train=(100, 3, 1, 30, 64, 219), dtype=dtype)['train']
    for block_size in (1, 7, 32, 50, 416):
        dataset = data.open_dataset(tmp_path, 'set', 'train', block_size)
        assert (dataset.n_tokens, dataset.n_windows) == (417, 416 // block_size)
        assert np.array_equal(whole(dataset), tokens[: dataset.n_windows * block_size + 1])
        assert dataset.read([0]).dtype == np.int64


def test_meta_json_gives_the_vocabulary_and_the_shards(tmp_path):
    make_dataset(tmp_path / 'set')
    np.arange(100, dtype=np.uint16).tofile(tmp_path / 'set' / 'train_leftover.bin')  # not listed, so not read
    dataset = data.open_dataset(tmp_path, 'set', 'train', 32)
    assert (dataset.vocab_size, dataset.n_tokens) == (VOCAB_SIZE, 1150)
    assert data.open_dataset(tmp_path, 'set', 'val', 32, vocab_size=2000).vocab_size == 2000


def test_metrics_of_an_evaluation_are_per_token_also_of_a_run_that_has_diverged(tmp_path):
    make_dataset(tmp_path / 'set')  # without a tokenizer, so that nothing is known of bytes
    dataset = data.open_dataset(tmp_path, 'set', 'val', 32)
    row = only(dataset).losses([(10 * math.log(8), 10)], 1)
    assert row == pytest.approx({'val_loss': math.log(8), 'val_ppl': 8})
    diverged = only(dataset).losses([(10_000.0, 10)], 1)
    assert diverged['val_loss'] == 1000 and math.isfinite(diverged['val_ppl'])
    assert math.isnan(only(dataset).losses([(math.nan, 10)], 1)['val_ppl'])


@pytest.mark.parametrize('windows', ['stream', 'documents'])
@pytest.mark.parametrize('sequences', [1, 7, 10**6])
def test_bits_per_byte_are_of_the_text_that_is_evaluated(tmp_path, windows, sequences):
    """One source begins with words and goes on in Chinese, the other has words alone, in other windows of a file."""
    words, chinese = 'the time and the tide wait for none ' * 9, '时间和潮汐不等人' * 12
    tokenizers.train_bpe([words.encode()] * 3, 400, tmp_path / 'tokenizer.json')
    tokenizer = tokenizers.load_tokenizer('bpe', tmp_path)
    assert len(tokenizer.encode(chinese)) > len(chinese)  # parts of letters, and a window may end within one
    for name, texts in (('two', [words] * 40 + [chinese] * 40), ('one', [words[n:] for n in range(60)])):
        (tmp_path / name).mkdir()
        shutil.copy(tmp_path / 'tokenizer.json', tmp_path / name)
        tokens = np.concatenate([[*tokenizer.encode(text), tokenizer.eot] for text in texts])
        meta = {
            'vocab_size': tokenizer.vocab_size,
            'eot_token': tokenizer.eot,
            'tokenizer': {'name': 'bpe'},
            'splits': {},
        }
        for split in ('train', 'val'):
            shards.write_shard(tmp_path / name / f'{split}.bin', tokens, np.uint16)
            shard = {'file': f'{split}.bin', 'tokens': len(tokens)}
            meta['splits'][split] = {'tokens': len(tokens), 'bytes': len(''.join(texts).encode()), 'shards': [shard]}
        (tmp_path / name / 'meta.json').write_text(json.dumps(meta))
    keys = {'data_dir': str(tmp_path), 'dataset_stages': (), 'block_size': 32, 'vocab_size': None, 'windows': windows}
    for mixed, weights in (('two', [1]), ('two:0.7,one:0.3', [0.7, 0.3])):
        mixture = data.open_mixture({**keys, 'dataset': mixed}, 'val')
        mixture.plan(100, 10)
        text, targets = [b''] * len(weights), [0] * len(weights)
        for (_, y, *_), source in data.eval_batches(mixture, sequences, 2, 0, 1, 'cpu'):
            read = y[y >= 0].tolist()
            text[source] += tokenizer.encoding.decode_bytes([token for token in read if token != tokenizer.eot])
            targets[source] += len(read)
        nats = [[3.5 * n, n] for n in targets]
        per_token = sum(weight * len(part) / n for weight, part, n in zip(weights, text, targets, strict=True))
        row = mixture.losses(nats, sequences)
        assert row['val_bpb'] == pytest.approx(3.5 / math.log(2) / per_token, rel=1e-12)


def test_a_tokenizer_that_is_not_here_costs_the_bits_per_byte_and_no_wait(tmp_path, monkeypatch, capsys):
    make_dataset(tmp_path / 'set')
    meta = json.loads((tmp_path / 'set' / 'meta.json').read_text())
    (tmp_path / 'set' / 'meta.json').write_text(json.dumps({**meta, 'tokenizer': {'name': 'gpt2'}}))
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path / 'empty'))
    monkeypatch.delitem(tiktoken.registry.ENCODINGS, 'gpt2', raising=False)
    asked = []
    monkeypatch.setattr(socket, 'getaddrinfo', lambda *where, **how: asked.append(where))  # the network's first step
    mixture = only(data.open_dataset(tmp_path, 'set', 'val', 32))
    rows = [mixture.losses([(20.0, 10)], 1) for _ in range(2)]
    assert not asked and rows == [{'val_loss': 2.0, 'val_ppl': pytest.approx(math.e**2)}] * 2
    line = f'no bits per byte: tokenizer=gpt2: its files are not in {tmp_path}/empty; where there is a network, run '
    assert capsys.readouterr().out.count(line) == 1


@pytest.mark.parametrize('with_meta', [True, False])
def test_fingerprint_changes_when_and_only_when_the_tokens_do(tmp_path, with_meta):
    make_dataset(tmp_path / 'one', with_meta=with_meta)
    make_dataset(tmp_path / 'other', with_meta=with_meta)
    fingerprint = data.open_dataset(tmp_path, 'one', 'train', 32).fingerprint
    assert fingerprint == data.open_dataset(tmp_path, 'other', 'train', 16).fingerprint
    assert fingerprint != data.open_dataset(tmp_path, 'one', 'val', 32).fingerprint
    make_dataset(tmp_path / 'other', train=(700, 449), with_meta=with_meta)
    assert fingerprint != data.open_dataset(tmp_path, 'other', 'train', 32).fingerprint
    for position in (0, 350, 700, 1149):  # a single token, from the first to the last
        make_dataset(tmp_path / 'other', with_meta=with_meta, changed={'train': position})
        assert fingerprint != data.open_dataset(tmp_path, 'other', 'train', 32).fingerprint, position


def test_nanogpt_files_without_header_are_read_and_the_assumptions_said_once(tmp_path, capsys):
    folder = tmp_path / 'openwebtext'
    folder.mkdir()
    tokens = tokens_of(500, vocab_size=50257).astype(np.uint16)
    tokens.tofile(folder / 'train.bin')
    tokens[:200].tofile(folder / 'val.bin')
    (folder / 'meta.pkl').write_bytes(pickle.dumps(CreatesAFile(str(tmp_path / 'opened'))))
    train = data.open_dataset(tmp_path, 'openwebtext', 'train', 10)
    val = data.open_dataset(tmp_path, 'openwebtext', 'val', 10)
    assert np.array_equal(whole(train), tokens[:491]) and np.array_equal(whole(val), tokens[:191])
    assert train.vocab_size == 50257
    said = capsys.readouterr().out
    assert said.count('\n') == 1
    assert all(word in said for word in ('openwebtext', '50257', 'uint16', '--vocab_size', 'meta.pkl'))
    assert not (tmp_path / 'opened').exists()
    data.open_dataset(tmp_path, 'openwebtext', 'train', 10, vocab_size=60000)
    said = capsys.readouterr().out
    assert 'uint16' in said and 'vocab_size=60000 of the run' in said and '50257' not in said
    (folder / 'meta.json').write_text('{"vocab_size": 50300, "itos": {}}')
    assert data.open_dataset(tmp_path, 'openwebtext', 'train', 10).vocab_size == 50300
    assert capsys.readouterr().out == ''
    (folder / 'meta.json').write_text('{"vocab_size": 50300, "dtype": "uint32"}')
    tokens.astype(np.uint32).tofile(folder / 'train.bin')
    assert np.array_equal(whole(data.open_dataset(tmp_path, 'openwebtext', 'train', 10)), tokens[:491])
    (folder / 'val.bin').write_bytes(b'odd')
    with pytest.raises(ValueError, match='val.bin.*size.*3 bytes'):
        data.open_dataset(tmp_path, 'openwebtext', 'val', 10)


def test_files_of_other_projects_are_found_by_the_split_in_their_names_in_numerical_order(tmp_path):
    """The names of llm.c and modded-nanogpt, .npy files of build-nanogpt, and a word that merely contains 'train'."""
    tokens = tokens_of(60)
    layouts = {
        'modded': ['fineweb_train_000001.bin', 'fineweb_train_000002.bin', 'fineweb_train_000010.bin'],
        'llmc': ['edu_fineweb_train_9.bin', 'edu_fineweb_train_10.bin', 'edu_fineweb_train_11.bin'],
        'npy': ['edufineweb_train_000001.npy', 'edufineweb_train_000002.npy', 'edufineweb_train_000003.npy'],
    }
    for name, files in layouts.items():
        (tmp_path / name).mkdir()
        for file, piece in zip(files, np.split(tokens, 3), strict=True):
            if file.endswith('.npy'):
                np.save(tmp_path / name / file, piece.astype(np.uint16))
            else:
                shards.write_shard(tmp_path / name / file, piece, np.uint16)
        shards.write_shard(tmp_path / name / 'constrained_val_000000.bin', tokens[:30], np.uint16)
        assert np.array_equal(whole(data.open_dataset(tmp_path, name, 'train', 1)), tokens), name
        assert data.open_dataset(tmp_path, name, 'val', 1).n_tokens == 30


@pytest.mark.parametrize('others', [['train_mask.npy', 'train_doc_lengths.npy'], ['train.bin'], ['code_train_3.npy']])
def test_files_whose_names_differ_in_more_than_numbers_are_not_all_taken_for_tokens(tmp_path, others):
    folder = tmp_path / 'set'
    folder.mkdir()
    for name in ('train.npy', 'val.npy', *others):
        with open(folder / name, 'wb') as file:
            np.save(file, np.ones(100, np.uint16))
    for name in others:
        with pytest.raises(ValueError, match=f'{name}.*leave only the files of tokens') as caught:
            data.open_dataset(tmp_path, 'set', 'train', 1)
        assert 'train.npy' in str(caught.value)
    assert data.open_dataset(tmp_path, 'set', 'val', 1).n_tokens == 100
    for name in others:
        (folder / name).unlink()
    assert data.open_dataset(tmp_path, 'set', 'train', 1).n_tokens == 100


def test_more_shards_than_may_be_open_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(on_disk, 'MAX_MAPPED_SHARDS', 4)
    tokens = make_dataset(tmp_path / 'set', train=(10,) * 50)['train']
    dataset = data.open_dataset(tmp_path, 'set', 'train', 3)
    assert np.array_equal(whole(dataset), tokens[: dataset.n_windows * 3 + 1])
    with open('/proc/self/maps') as maps:
        assert sum(str(tmp_path / 'set') in line for line in maps) <= 4


# --- bad input --------------------------------------------------------------------------------------------------------


def test_a_missing_dataset_is_answered_with_the_command_and_the_datasets_that_are_there(tmp_path, monkeypatch):
    make_dataset(tmp_path / 'set')
    (tmp_path / 'hub').mkdir()  # holds no tokens
    commands = {
        'stdlib-bpe2048': '`python prepare_data.py --dataset=stdlib --tokenizer=bpe --vocab_size=2048 --data_dir=',
        'fineweb-edu-10BT-gpt2': '`python prepare_data.py --dataset=fineweb-edu-10BT --tokenizer=gpt2 --data_dir=',
        'fineweb-100BT-o200k_base': ' --dataset=fineweb-100BT --tokenizer=o200k_base --data_dir=',
        'fineweb-100BT-Llama-3.1-8B': ' --tokenizer=models/Llama-3.1-8B --data_dir=',
        'novels': '`python prepare_data.py --dataset=FILE_FOLDER_OR_HUB_NAME --name=novels --data_dir=',
    }
    for name, command in commands.items():
        with pytest.raises(FileNotFoundError) as error:
            data.open_dataset(tmp_path, name, 'train', 32)
        message = str(error.value)
        assert name in message and command in message and message.endswith('holds: set') and '\n' not in message
    with pytest.raises(FileNotFoundError, match=r'did you mean set\?.*`python prepare_data.py'):
        data.open_dataset(tmp_path, 'sets', 'train', 32)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f'{tmp_path}/nowhere .*no dataset'):
        data.open_dataset('nowhere', 'novels', 'train', 32)


@pytest.mark.parametrize('place', ['texts/', 'texts/input.txt', 'data/raw', 'empty'])
def test_raw_text_is_answered_with_the_command_that_makes_tokens_of_it(place, tmp_path, monkeypatch):
    for folder in ('texts', 'data/raw', 'empty'):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ('texts', 'data/raw'):
        (tmp_path / folder / 'input.txt').write_text('text')
    monkeypatch.chdir(tmp_path)
    path = place.rstrip('/')
    for dataset in (place, f'{tmp_path}/{place}'):
        with pytest.raises(ValueError) as error:
            data.open_dataset('data', dataset, 'train', 32)
        command = f'`python prepare_data.py --dataset={path if dataset == place else tmp_path / path}`'
        assert f'dataset={dataset}: ' in str(error.value) and command in str(error.value)
    (tmp_path / 'raw').mkdir()
    with pytest.raises(ValueError, match='data/raw .*no tokens'):  # a folder in data_dir comes first
        data.open_dataset('data', 'raw', 'train', 32)


def test_a_dataset_that_is_half_prepared_is_refused(tmp_path):
    """If prepare_data.py was killed, there are good shards without a meta.json. They would be read as if they came from
    another tokenizer."""
    folder = tmp_path / 'stdlib-bytes'
    make_dataset(folder, with_meta=False)
    (folder / 'unfinished.json').write_text('{}')
    with pytest.raises(ValueError, match='stdlib-bytes: .*`python prepare_data.py .*--tokenizer=bytes'):
        data.open_dataset(tmp_path, 'stdlib-bytes', 'train', 32)


@pytest.mark.parametrize(
    'files, split, says',
    [  # what is done to files of the folder: None, deleted; a number, a shard of so many tokens; a text
        ({'train_000001.bin': None}, 'train', 'set: meta.json .*2 shards.*train_000001.bin'),
        ({'meta.json': None, 'val_000000.bin': None}, 'val', "set: .*'val'.*train_000000.bin"),
        ({'train_000001.bin': 449}, 'train', 'train_000001.bin.*449 tokens.*450'),
        ({'meta.json': '{"vocab_size": 1'}, 'train', 'meta.json(: | is damaged).*prepare the dataset again'),
        ({'meta.json': '[1, 2]'}, 'train', 'meta.json(: | is damaged).*prepare the dataset again'),
    ],
)
def test_what_is_missing_or_of_another_preparation_is_named(tmp_path, files, split, says):
    make_dataset(tmp_path / 'set')
    for name, content in files.items():
        path = tmp_path / 'set' / name
        path.unlink()
        if isinstance(content, int):
            shards.write_shard(path, tokens_of(content), np.uint16)
        elif content:
            path.write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=says):
        data.open_dataset(tmp_path, 'set', split, 32)


@pytest.mark.parametrize(
    'change, said',
    [
        (lambda meta: meta['splits']['train']['shards'][0].update(file='../out/train_000000.bin'), r'shards\[0\].file'),
        (lambda meta: meta['splits']['train']['shards'][0].update(mask_file='/etc/passwd'), r'shards\[0\].mask_file'),
        (lambda meta: meta['splits']['train']['shards'][0].update(tokens=-700), r'shards\[0\].tokens: found -700'),
        (lambda meta: meta['splits']['train']['shards'][0].pop('file'), r'shards\[0\]: found no file'),
        (lambda meta: meta['splits']['train'].update(shards={}), 'splits.train.shards: found an object'),
        (lambda meta: meta['splits']['train'].update(max_token=1e99), 'splits.train.max_token: found 1e[+]99'),
        (lambda meta: meta['splits'].update(val=[]), 'splits.val: found a list'),
        (lambda meta: meta.update(splits=[]), 'splits: found a list'),
        (lambda meta: meta.update(vocab_size='100'), "vocab_size: found '100', expected a whole number"),
        (lambda meta: meta.update(eot_token=True), 'eot_token: found True'),
        (lambda meta: meta.update(dtype=16), 'dtype: found 16, expected a text'),
        (lambda meta: meta.update(masked=True), r'shards\[0\]: found no mask_file'),
        (lambda meta: meta.update(chat_templates={'../../x': 'text'}), "chat_templates: found '../../x'"),
        (lambda meta: meta.update(tokenizer={'name': '/etc'}), "tokenizer.name: found '/etc'"),
        (lambda meta: meta.update(tokenizer={'name': 'x', 'eot_text': 3}), 'tokenizer.eot_text: found 3'),
        (lambda meta: meta.update(settings={'chat_template': []}), 'settings.chat_template: found a list'),
        (lambda meta: meta.update(format_version=2), 'format_version 2, expected 1'),
    ],
)
def test_a_meta_json_of_somebody_else_decides_no_path_and_ends_in_one_line(tmp_path, change, said):
    make_dataset(tmp_path / 'out')
    make_dataset(tmp_path / 'set')
    meta = json.loads((tmp_path / 'set' / 'meta.json').read_text())
    change(meta)
    (tmp_path / 'set' / 'meta.json').write_text(json.dumps(meta))
    for read in (lambda: data.open_dataset(tmp_path, 'set', 'train', 32), lambda: shards.verify(tmp_path / 'set')):
        with pytest.raises(ValueError, match=f'set/meta.json: .*{said}') as refused:
            read()
        assert str(refused.value).isprintable()


def test_a_block_size_longer_than_the_data_gives_the_numbers(tmp_path):
    make_dataset(tmp_path / 'set')
    assert data.open_dataset(tmp_path, 'set', 'val', 299).n_windows == 1
    with pytest.raises(ValueError, match=r"block_size=300.*301 tokens.*'val'.*300.*--block_size=299"):
        data.open_dataset(tmp_path, 'set', 'val', 300)


def test_a_token_above_the_vocabulary_is_found_at_start_when_meta_json_tells(tmp_path):
    make_dataset(tmp_path / 'set')
    with pytest.raises(ValueError, match='token id 99[0-9].*vocab_size=100'):
        data.open_dataset(tmp_path, 'set', 'train', 32, vocab_size=100)
    highest = json.loads((tmp_path / 'set' / 'meta.json').read_text())['splits']['train']['max_token']
    data.open_dataset(tmp_path, 'set', 'train', 32, vocab_size=highest + 1)
    with pytest.raises(ValueError, match=f'token id {highest}, .*vocab_size={highest}'):
        data.open_dataset(tmp_path, 'set', 'train', 32, vocab_size=highest)


@pytest.mark.parametrize('wrong', [VOCAB_SIZE, -1])
def test_a_token_outside_the_vocabulary_is_found_when_it_is_read_and_named(tmp_path, wrong):
    """In every column, also the last one, whose token is only a target."""
    folder = tmp_path / 'set'
    make_dataset(folder, train=(320, 1), with_meta=False)
    tokens = tokens_of(100)
    tokens[64] = wrong
    np.save(folder / 'train_000002.npy', tokens)
    dataset = data.open_dataset(tmp_path, 'set', 'train', 32, vocab_size=VOCAB_SIZE)
    assert dataset.read(np.arange(12)).shape == (12, 33)
    for window, column in ((12, 1), (11, 33)):
        if column == 33:  # the last target is also the first token of the next window
            tokens[63], tokens[64] = wrong, 0
            np.save(folder / 'train_000002.npy', tokens)
            dataset = data.open_dataset(tmp_path, 'set', 'train', 32, vocab_size=VOCAB_SIZE)
        with pytest.raises(ValueError, match=rf'train_000002.npy: token id {wrong} .*vocab_size={VOCAB_SIZE}'):
            dataset.read([window])


def test_the_first_token_of_a_shard_is_named_with_that_shard(tmp_path):
    make_dataset(tmp_path / 'set', train=(320,), with_meta=False)
    np.save(tmp_path / 'set' / 'train_000001.npy', np.full(100, VOCAB_SIZE))
    dataset = data.open_dataset(tmp_path, 'set', 'train', 32, vocab_size=VOCAB_SIZE)
    with pytest.raises(ValueError, match=r'train_000001.npy: token id .*token 320 of'):
        dataset.read([9])


# --- the order of samples ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize('n_windows', [1, 2, 3, 4, 5, 7, 10, 97, 1000, 1021, 4096, 12345])
def test_every_epoch_reads_every_window_once(n_windows):
    for seed in (0, 1337, -1, 2**70):
        for epoch in (0, 1, 2, 10**9):
            windows = permuted(epoch * n_windows + np.arange(n_windows), n_windows, seed)
            assert np.array_equal(np.sort(windows), np.arange(n_windows)), (seed, epoch)


def test_a_sample_does_not_depend_on_what_it_is_computed_with():
    together = permuted(np.arange(3000), 1000, seed=1)
    assert together.shape == (3000,) and together.dtype == np.int64
    alone = [permuted(np.array([index]), 1000, seed=1)[0] for index in range(0, 3000, 97)]
    assert np.array_equal(together[::97], alone)
    assert np.array_equal(permuted(np.arange(3000).reshape(3, -1), 1000, seed=1), together.reshape(3, -1))


def test_the_order_is_pinned():
    """Another order would replay data in every run that is resumed from an older checkpoint."""
    assert permuted(np.arange(8), 1000, seed=1337).tolist() == [286, 119, 560, 140, 794, 40, 290, 790]
    of_100b_tokens = permuted(10**12 + np.arange(4), 48_828_125, seed=0)
    assert of_100b_tokens.tolist() == [37058496, 13533178, 16921285, 12920995]


def test_epochs_and_seeds_are_shuffled_differently():
    orders = {}
    for seed, epoch in itertools.product(range(5), range(5)):
        orders[seed, epoch] = permuted(epoch * 1000 + np.arange(1000), 1000, seed)
    for one, other in itertools.combinations(orders.values(), 2):
        # Two random permutations agree in 1 place on average; 8 or more have a probability of 1e-5 per pair.
        assert np.count_nonzero(one == other) < 8


@pytest.mark.parametrize('n_windows', [3, 5, 20, 101])
def test_every_window_comes_in_every_place_equally_often(n_windows):
    epochs = 2000
    order = permuted(np.arange(epochs * n_windows).reshape(epochs, n_windows), n_windows, seed=5)
    counts = np.zeros((n_windows, n_windows))
    np.add.at(counts, (np.broadcast_to(np.arange(n_windows), order.shape), order), 1)
    expected = epochs / n_windows
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    freedom = (n_windows - 1) ** 2
    assert abs(chi_squared - freedom) < 5 * (2 * freedom) ** 0.5, (chi_squared, freedom)


def test_neighbors_in_the_order_are_no_neighbors_in_the_data():
    """Over 10 million windows there is no correlation, and steps have every size, as in a random permutation."""
    n_windows = 10**7
    windows = permuted(np.arange(50_000), n_windows, seed=3).astype(float)
    assert abs(np.corrcoef(np.arange(50_000), windows)[0, 1]) < 0.02  # standard deviation 1 / sqrt(50,000) = 0.0045
    assert abs(np.corrcoef(windows[:-1], windows[1:])[0, 1]) < 0.02
    in_tenths = np.histogram(windows, bins=10, range=(0, n_windows))[0]
    assert np.abs(in_tenths - 5000).max() < 350  # 5 x sqrt(5000 x 0.9) = 335
    gaps = np.histogram(np.diff(windows) % n_windows, bins=10, range=(0, n_windows))[0]
    assert np.abs(gaps - 5000).max() < 350


def test_the_order_of_100_billion_tokens_takes_no_memory():
    n_windows = 10**11 // 2048  # a permutation of them would take 390 MB
    tracemalloc.start()
    windows = permuted(10**12 + np.arange(512), n_windows, seed=1)
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()
    assert len(set(windows.tolist())) == 512 and windows.min() >= 0 and windows.max() < n_windows


# --- batches ----------------------------------------------------------------------------------------------------------


def hashes(*parts):
    """One hash per row of a batch."""
    return [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in torch.cat(parts, dim=1)]


def samples_of_steps(dataset, steps, world_size, batch_size, first_step=0, global_batch_size=8):
    """Hashes of the samples of each step, ranks and micro-steps in order."""
    first_sample, mixture = first_step * global_batch_size, only(dataset)
    iterators = [
        data.batches(mixture, 7, first_sample, global_batch_size, batch_size, rank, world_size, 'cpu')
        for rank in range(world_size)
    ]
    result = []
    for _ in range(steps):
        result.append([])
        for iterator in iterators:
            for _ in range(global_batch_size // batch_size // world_size):
                result[-1] += hashes(*next(iterator))
    for iterator in iterators:
        iterator.close()
    return result


def test_one_two_and_four_ranks_see_the_same_samples_in_every_step(tmp_path):
    """There are 35 windows, so 20 steps of 8 go through four epochs, and some steps lie across their borders."""
    make_dataset(tmp_path / 'set')
    dataset = data.open_dataset(tmp_path, 'set', 'train', 32)
    assert dataset.n_windows == 35
    reference = samples_of_steps(dataset, 20, world_size=1, batch_size=8)
    everything = [sample for step in reference for sample in step]
    assert len(set(everything[:35])) == 35 and sorted(everything[:35]) == sorted(everything[35:70])
    assert everything[:35] != everything[35:70]
    for world_size, batch_size in ((1, 2), (2, 4), (2, 1), (4, 2), (4, 1)):
        assert samples_of_steps(dataset, 20, world_size, batch_size) == reference, (world_size, batch_size)


def test_a_resumed_run_goes_on_with_the_same_samples(tmp_path, monkeypatch):
    make_dataset(tmp_path / 'set')
    dataset = data.open_dataset(tmp_path, 'set', 'train', 32)
    reference = samples_of_steps(dataset, 20, world_size=1, batch_size=8)
    assert samples_of_steps(dataset, 7, world_size=2, batch_size=2, first_step=13) == reference[13:]
    monkeypatch.setattr(data, 'SAMPLES_AT_ONCE', 24)  # three steps at a time instead of 128
    assert samples_of_steps(dataset, 20, world_size=1, batch_size=8) == reference


def test_a_batch_is_int64_contiguous_and_its_targets_are_one_token_later(tmp_path):
    tokens = make_dataset(tmp_path / 'set')['train']
    dataset = data.open_dataset(tmp_path, 'set', 'train', 32)
    iterator = data.batches(only(dataset), 7, 0, 4, 4, 0, 1, 'cpu')
    kept = [next(iterator) for _ in range(20)]  # a batch stays what it was while later ones are made
    windows = permuted(np.arange(80), 35, 7).reshape(20, 4)
    for (x, y), rows in zip(kept, windows, strict=True):
        assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (4, 32)
        assert x.is_contiguous() and y.is_contiguous()
        for row, window in enumerate(rows):
            assert np.array_equal(x[row], tokens[window * 32 : window * 32 + 32])
            assert np.array_equal(y[row], tokens[window * 32 + 1 : window * 32 + 33])
    iterator.close()


@pytest.mark.parametrize('world_size', [1, 2, 3, 4])
@pytest.mark.parametrize('n_sequences', [1, 5, 24, 10**6])
def test_evaluation_sees_the_first_windows_once_on_any_number_of_ranks(tmp_path, world_size, n_sequences):
    tokens = make_dataset(tmp_path / 'set')['train']
    dataset = data.open_dataset(tmp_path, 'set', 'train', 32)
    of_ranks = [list(eval_batches(dataset, n_sequences, 4, rank, world_size, 'cpu')) for rank in range(world_size)]
    assert len({len(of_rank) for of_rank in of_ranks}) == 1  # else the collectives of the ranks would not match
    rows = [row for of_rank in of_ranks for batch in of_rank for row in zip(*batch, strict=True)]
    assert all(len(x) == 4 for of_rank in of_ranks for x, _ in of_rank)
    seen = sorted((x.tolist(), y.tolist()) for x, y in rows if (y >= 0).all())
    n = min(n_sequences, 35)
    windows = [tokens[w * 32 : w * 32 + 33].tolist() for w in range(n)]
    assert seen == sorted((window[:-1], window[1:]) for window in windows)
    filler = [(x, y) for x, y in rows if not (y >= 0).all()]
    assert len(filler) < 4 * world_size and all((y == -1).all() and (x == 0).all() for x, y in filler)


def test_synthetic_tokens_are_uniform_fixed_and_differ_between_splits(tmp_path):
    train = data.open_dataset(tmp_path, 'synthetic', 'train', 64)
    assert train.vocab_size == 50304 and train.n_windows > 10**9
    small = data.open_dataset(tmp_path, 'synthetic', 'train', 1000, vocab_size=10)
    counts = np.bincount(small.read(range(100)).ravel(), minlength=10)
    assert len(counts) == 10 and np.abs(counts - 10_010).max() < 500  # 5 x sqrt(100,100 x 0.1 x 0.9) = 475
    assert np.array_equal(train.read([5]), data.open_dataset(tmp_path, 'synthetic', 'train', 64).read([5]))
    assert train.read([5])[0, -1] == train.read([6])[0, 0]
    assert not np.array_equal(train.read([5]), data.open_dataset(tmp_path, 'synthetic', 'val', 64).read([5]))
    assert list(tmp_path.iterdir()) == []


# --- chats: masks and packing -----------------------------------------------------------------------------------------


def chats_of(lengths, seed=0):
    """[(tokens, learned), ...]: conversations of these lengths. 0.4 of the tokens are learned, and always the last."""
    rng = np.random.default_rng(seed)
    chats = [(rng.integers(0, VOCAB_SIZE, n), rng.random(n) < 0.4) for n in lengths]
    for _, learned in chats:
        learned[-1] = True
    return chats


def make_chats(folder, chats, shard_lengths=None):
    """Write a masked dataset with the conversations as its split train, in shards of these lengths; returns its
    meta.json as a dict."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.concatenate([tokens for tokens, _ in chats])
    mask = np.concatenate([learned + 2 * (np.arange(len(learned)) == 0) for _, learned in chats]).astype(np.uint8)
    borders = np.cumsum(shard_lengths or [len(tokens)])
    assert borders[-1] == len(tokens)
    listed = []
    pieces = zip(np.split(tokens, borders)[:-1], np.split(mask, borders)[:-1], strict=True)
    for number, (piece, bits) in enumerate(pieces):
        path = folder / f'train_{number:06}.bin'
        shards.write_shard(path, piece, np.uint16)
        bits.tofile(path.with_suffix('.mask'))
        digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (path, path.with_suffix('.mask'))]
        shard = {'file': path.name, 'tokens': len(piece), 'sha256': digests[0]}
        listed.append(shard | {'mask_file': path.with_suffix('.mask').name, 'mask_sha256': digests[1]})
    split = {'tokens': len(tokens), 'bytes': 3 * len(tokens), 'documents': len(chats), 'shards': listed}
    split |= {'learned_tokens': int((mask & 1).sum()), 'longest': max(len(tokens) for tokens, _ in chats)}
    meta = {
        'name': folder.name,
        'vocab_size': VOCAB_SIZE,
        'dtype': 'uint16',
        'masked': True,
        'splits': {'train': split},
    }
    (folder / 'meta.json').write_text(json.dumps(meta))
    return meta


def as_learned(tokens, learned):
    """The (inputs, targets) that a conversation should become."""
    return tuple(tokens[:-1].tolist()), tuple(np.where(learned[1:], tokens[1:], -1).tolist())


def conversations_in(batches):
    """All (inputs, targets) of batches, cut where documents begin; padding, without a target, is left out."""
    found = []
    for x, y, starts in zip(*(torch.cat(part).numpy() for part in zip(*batches, strict=True)), strict=True):
        assert starts[0] == 0 and all((starts[1:] > starts[:-1]) | (starts[1:] == len(x)))
        starts = starts[starts < len(x)]
        for begin, end in zip(starts, [*starts[1:], len(x)], strict=True):
            if (y[begin:end] >= 0).any():
                found.append((tuple(x[begin:end].tolist()), tuple(y[begin:end].tolist())))
            else:
                assert not x[begin:end].any() and end == len(x)  # padding, at the end of a window only
    return sorted(found)


LENGTHS = [2, 3, 65, 64, 40, 41, 17, 5, 2, 30, 12, 50, 9, 22, 23, 65, 33, 7, 7, 7, 18, 61]


def test_an_epoch_of_chats_holds_every_conversation_once_and_whole_with_its_own_positions(tmp_path):
    """Also where shards begin in the middle of a conversation, and one is shorter than a conversation."""
    chats = chats_of(LENGTHS)
    total = sum(LENGTHS)
    make_chats(tmp_path / 'chats', chats, [70, 3, 20, 200, total - 293])
    expected = sorted(as_learned(*chat) for chat in chats)
    dataset = data.open_dataset(tmp_path, 'chats', 'train', 64)
    assert (dataset.is_packed, dataset.n_tokens) == (True, total)
    assert (dataset.vocab_size, dataset.is_packed) == (VOCAB_SIZE, True)
    assert dataset.n_windows == -(-(total - len(LENGTHS)) // 64)  # here the fewest that can hold them
    n = dataset.n_windows
    for first in (0, 5 * n):
        batches = data.batches(only(dataset), 7, first, n, n, 0, 1, 'cpu')
        epoch = [next(batches)]
        batches.close()
        assert all(part.dtype == torch.int64 and part.is_contiguous() for part in epoch[0])
        assert [tuple(part.shape) for part in epoch[0]] == [(n, 64), (n, 64), (n, dataset.n_starts)]
        assert conversations_in(epoch) == expected


@pytest.mark.parametrize('world_size', [1, 2, 3, 4])
def test_evaluation_on_chats_sees_the_first_windows_once_and_filler_learns_nothing(tmp_path, world_size):
    chats = chats_of(LENGTHS)
    make_chats(tmp_path / 'chats', chats)
    dataset = data.open_dataset(tmp_path, 'chats', 'train', 64)
    of_ranks = [list(eval_batches(dataset, 10**6, 2, rank, world_size, 'cpu')) for rank in range(world_size)]
    assert len({len(of_rank) for of_rank in of_ranks}) == 1
    assert conversations_in([batch for of_rank in of_ranks for batch in of_rank]) == sorted(
        as_learned(*chat) for chat in chats
    )
    for x, y, starts in eval_batches(dataset, 1, 2, 0, 1, 'cpu'):  # one window and a row of filler
        assert (y[0] >= 0).sum() == dataset.n_targets[0] and {*starts[1, 1:].tolist()} == {64} and not starts[1, 0]
        assert not x[1].any() and (y[1] == -1).all()


def test_chats_are_the_same_samples_on_any_number_of_ranks_and_when_resumed(tmp_path):
    make_chats(tmp_path / 'chats', chats_of(LENGTHS * 3))
    dataset = data.open_dataset(tmp_path, 'chats', 'train', 64)
    reference = samples_of_steps(dataset, 10, world_size=1, batch_size=8)
    assert len({sample for step in reference for sample in step}) == dataset.n_windows
    for world_size, batch_size in ((2, 4), (2, 1), (4, 2)):
        assert samples_of_steps(dataset, 10, world_size, batch_size) == reference, (world_size, batch_size)
    assert samples_of_steps(dataset, 4, world_size=2, batch_size=2, first_step=6) == reference[6:]


def test_targets_are_counted_exactly_ahead_of_the_steps(tmp_path):
    make_chats(tmp_path / 'chats', chats_of(LENGTHS * 3))
    dataset = data.open_dataset(tmp_path, 'chats', 'train', 64)
    batches = data.batches(only(dataset), 7, 0, 8, 4, 0, 1, 'cpu')
    for step in range(12):
        learned = sum(int((next(batches)[1] >= 0).sum()) for _ in range(2))
        assert only(dataset).count_targets(7, 8 * step, 8) == learned
    batches.close()
    synthetic = data.open_dataset(tmp_path, 'synthetic', 'train', 16)
    assert only(synthetic).count_targets(7, 123, 10) == 160 and not synthetic.is_packed


def test_to_count_the_targets_of_a_step_no_token_is_read(tmp_path, monkeypatch):
    make_chats(tmp_path / 'chats', chats_of([20] * 500))
    dataset = data.open_dataset(tmp_path, 'chats', 'train', 64)
    monkeypatch.delattr(packed.PackedDataset, 'read')
    assert only(dataset).count_targets(7, 0, 512) > 0


def test_long_chats_are_cut_and_dropped_when_nothing_learned_is_left_which_is_said_once(tmp_path, capsys):
    chats = chats_of([20, 34, 35, 80, 120])
    chats[3][1][:] = False
    chats[3][1][33] = True  # the first token beyond block_size + 1
    chats[4][1][:33] = True
    make_chats(tmp_path / 'chats', chats)
    dataset = data.open_dataset(tmp_path, 'chats', 'train', 32)
    data.open_dataset(tmp_path, 'chats', 'train', 32)
    said = capsys.readouterr().out
    assert said.count('\n') == 1 and all(
        words in said for words in ('WARNING: ', '4 of 5 chats (train) ', ' 33 tokens', '1 dropped', ' 120\n')
    )
    assert dataset.longest == 120
    kept = [chat for chat in chats if chat is not chats[3]]
    expected = sorted(as_learned(tokens[:33], learned[:33]) for tokens, learned in kept)
    assert conversations_in(list(eval_batches(dataset, 10**6, 2, 0, 1, 'cpu'))) == expected

    dataset = data.open_dataset(tmp_path, 'chats', 'train', 119)
    assert capsys.readouterr().out == ''
    whole_chats = sorted(as_learned(*chat) for chat in chats)
    assert conversations_in(list(eval_batches(dataset, 10**6, 2, 0, 1, 'cpu'))) == whole_chats

    make_chats(tmp_path / 'long', chats[3:4])
    with pytest.raises(ValueError, match='1 of 1 chats .*1 dropped.* 80: .*block_size') as error:
        data.open_dataset(tmp_path, 'long', 'train', 32)
    assert '\n' not in str(error.value) and error.traceback[-1].path.name == 'packed.py'


def test_the_first_token_of_a_chat_is_no_target_even_if_its_mask_says_learned(tmp_path):
    chats = [(np.array([5, 6, 7]), np.array([True, False, True])), (np.array([8, 9]), np.array([True, True]))]
    chats.insert(1, (np.array([3]), np.array([True])))  # one token: nothing to predict
    make_chats(tmp_path / 'chats', chats)
    dataset = data.open_dataset(tmp_path, 'chats', 'train', 4)
    (x, y, starts), *_ = eval_batches(dataset, 1, 1, 0, 1, 'cpu')
    assert (x[0].tolist(), y[0].tolist()) == ([5, 6, 8, 0], [-1, 7, 9, -1])
    assert starts[0].tolist() == [0, 2, 3] and dataset.n_targets.tolist() == [2]


def test_evaluation_on_a_few_windows_of_chats_does_not_see_the_longest_alone(tmp_path):
    """Packing begins with the longest chats, so there are first 100 windows of one chat each, and then some of many."""
    make_chats(tmp_path / 'chats', chats_of([60] * 100 + [8] * 900))
    dataset = data.open_dataset(tmp_path, 'chats', 'train', 64)
    assert dataset.n_windows == 200
    of_many = sum(int((starts < 64).sum() > 2) for *_, starts in eval_batches(dataset, 40, 1, 0, 1, 'cpu'))
    assert 8 < of_many < 32  # 20 are expected


def test_a_million_chats_are_packed_with_little_padding_in_time_that_grows_no_faster_than_their_number():
    rng = np.random.default_rng(1)
    shapes = {  # of conversations, in tokens
        'lognormal': rng.lognormal(6, 0.9, 10**6),
        'exponential': rng.exponential(500, 10**5),
        'around a third': rng.normal(700, 150, 10**5),
        'of one size': np.full(10**5, 500),
    }
    for name, sizes in shapes.items():
        sizes = np.clip(sizes.astype(np.int64), 1, 2048)
        began = time.process_time()
        packed.pack(sizes[: len(sizes) // 10], 2048)
        of_a_tenth = time.process_time() - began
        items, bins = packed.pack(sizes, 2048)
        assert time.process_time() - began < 50 * of_a_tenth + 1  # 100 times if it compared each with each
        assert np.array_equal(np.sort(items), np.arange(len(sizes)))
        filled = np.bincount(bins, weights=sizes[items])
        assert filled.max() <= 2048 and filled.mean() > 0.95 * 2048, (name, filled.mean() / 2048)


def test_packing_follows_from_lengths_and_order_alone(tmp_path):
    """Conversations of the same lengths lie in the same windows, whatever their tokens, masks and shards."""
    total = sum(LENGTHS)
    make_chats(tmp_path / 'one', chats_of(LENGTHS, seed=1))
    make_chats(tmp_path / 'other', chats_of(LENGTHS, seed=2), [100, total - 100])
    one, other = (data.open_dataset(tmp_path, name, 'train', 64).read(range(9)) for name in ('one', 'other'))
    assert np.array_equal(one[2], other[2]) and not np.array_equal(one[0], other[0])


def test_without_packing_each_conversation_has_a_window_of_its_own_and_an_epoch_holds_all_of_them(tmp_path):
    chats = chats_of(LENGTHS)
    make_chats(tmp_path / 'chats', chats)
    packed, alone = (data.open_dataset(tmp_path, 'chats', 'train', 64, packing=packing) for packing in (True, False))
    assert alone.n_windows == len(LENGTHS) > packed.n_windows and alone.fingerprint != packed.fingerprint
    assert alone.padding == pytest.approx(1 - sum(min(n, 65) - 1 for n in LENGTHS) / 64 / len(LENGTHS))
    mixture = only(alone)
    mixture.plan(11, 2)
    orders = []
    for world_size in (1, 2):  # two samples a step: for one rank, or one for each of two
        ranks = [data.batches(mixture, 1, 0, 2, 1, rank, world_size, 'cpu') for rank in range(world_size)]
        taken = [[next(batches) for _ in range(22 // world_size)] for batches in ranks]
        orders.append([(x, y) for of_step in zip(*taken, strict=True) for x, y in of_step])
        for batches in ranks:
            batches.close()
    assert all(torch.equal(a, b) for one, two in zip(*orders, strict=True) for a, b in zip(one, two, strict=True))
    ends = [int((y >= 0).nonzero()[-1, 1]) + 1 for _, y in orders[0]]
    cut = [[part[0].split((end, 64 - end)) for part in batch] for batch, end in zip(orders[0], ends, strict=True)]
    found = [(tuple(x.tolist()), tuple(y.tolist())) for (x, _), (y, _) in cut]
    assert sorted(found) == sorted(as_learned(*chat) for chat in chats)
    assert not any(padding.any() or (ignored >= 0).any() for (_, padding), (_, ignored) in cut)
    learned = sum(int((y >= 0).sum()) for _, y in orders[0])
    assert mixture.count_targets(1, 0, 22) == learned == sum(int(learned[1:].sum()) for _, learned in chats)


@pytest.mark.parametrize('lengths', [LENGTHS, [40] * 10 + [26, 21]])
def test_what_a_window_for_each_conversation_costs_is_said_beside_what_packing_would(tmp_path, lengths):
    """Of 39 positions each, no two conversations share a window of 64."""
    make_chats(tmp_path / 'chats', chats_of(lengths))
    packed, alone = (data.open_dataset(tmp_path, 'chats', 'train', 64, packing=packing) for packing in (True, False))
    explicit = SimpleNamespace(train_data=only(alone), config=SimpleNamespace(block_size=64), explicit={'packing': ''})
    line, rows = line_of_padding(explicit, longest=alone.longest), len(lengths)
    x, y, _ = alone.read(range(rows))
    empty = [64 - min(n - 1, 64) for n in lengths]
    assert sorted(64 - np.argmax(ys[::-1] >= 0) for ys in y) == sorted(64 - n for n in empty)  # the last is learned
    assert f'{rows:,} sequences, of which {sum(empty) / (64 * rows):.0%} is padding' in line
    assert f': {rows / packed.n_windows:.1f} times the work of packed ones' in line
    if alone.longest <= 64:
        at_longest = rows * (alone.longest - 1) / (packed.n_windows * 64)
        assert f', and {at_longest:.1f} times with --block_size={alone.longest - 1}, the longest' in line


def test_the_fingerprint_of_chats_changes_with_a_mask(tmp_path):
    chats = chats_of(LENGTHS)
    make_chats(tmp_path / 'one', chats)
    make_chats(tmp_path / 'same', chats)
    chats[3][1][5] = not chats[3][1][5]
    make_chats(tmp_path / 'other', chats)
    one, same, other = (data.open_dataset(tmp_path, name, 'train', 64) for name in ('one', 'same', 'other'))
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_a_damaged_or_missing_mask_is_refused_by_name(tmp_path):
    total = sum(LENGTHS)
    make_chats(tmp_path / 'chats', chats_of(LENGTHS), [100, total - 100])
    path = tmp_path / 'chats' / 'train_000001.mask'
    content = path.read_bytes()
    for wrong in (content[:-1], content + b'\0', b'', content[:-1] + b'\x08'):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=rf'train_000001.mask: .* {len(wrong)} bytes.* {total - 100} ') as e:
            data.open_dataset(tmp_path, 'chats', 'train', 64)
        assert '\n' not in str(e.value) and e.traceback[-1].path.name == 'packed.py'
    for shard in (0, 1):
        path = path.with_name(f'train_{shard:06}.mask')
        path.write_bytes(bytes(path.stat().st_size if shard == 0 else total - 100))
    with pytest.raises(ValueError, match='chats: 0 of 0 chats'):  # none begins
        data.open_dataset(tmp_path, 'chats', 'train', 64)
    path.unlink()
    with pytest.raises(FileNotFoundError, match='chats: meta.json .*2 shards.*train_000001.mask; '):
        data.open_dataset(tmp_path, 'chats', 'train', 64)


def test_a_token_of_a_chat_outside_the_vocabulary_is_named(tmp_path):
    chats = chats_of([10, 20, 30])
    chats[1][0][7] = VOCAB_SIZE
    make_chats(tmp_path / 'chats', chats)
    dataset = data.open_dataset(tmp_path, 'chats', 'train', 64)
    with pytest.raises(ValueError, match=rf'train_000000.bin: token id {VOCAB_SIZE} .*token 17 '):
        dataset.read([0])


# --- the background thread --------------------------------------------------------------------------------------------


def synthetic_batches():
    dataset = data.open_dataset('nowhere', 'synthetic', 'train', 16, VOCAB_SIZE)
    return data.batches(only(dataset), 0, 0, 4, 4, 0, 1, 'cpu')


def wait_until(condition, seconds=600):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_as_many_batches_as_asked_for_are_made_ahead(monkeypatch):
    made = []
    make = data._host_batch
    monkeypatch.setattr(data, '_host_batch', lambda *arguments: made.append(1) or make(*arguments))
    monkeypatch.setattr(data, 'BATCHES_AHEAD', 4)
    iterator = synthetic_batches()
    for taken, expected in ((1, 4), (2, 4), (3, 6), (4, 6), (5, 8)):  # two more are made whenever two have been taken
        next(iterator)
        assert wait_until(lambda n=expected: len(made) == n), (taken, made)
        time.sleep(0.02)
        assert len(made) == expected
    iterator.close()


def test_the_thread_ends_when_the_iterator_is_closed_dropped_or_exhausted():
    iterator = synthetic_batches()
    next(iterator)
    assert len(prefetch_threads()) == 1
    iterator.close()
    assert not prefetch_threads()
    iterator.close()  # again does nothing
    with pytest.raises(StopIteration):
        next(iterator)

    iterator = synthetic_batches()  # never read
    del iterator
    gc.collect()
    assert not prefetch_threads()

    dataset = data.open_dataset('nowhere', 'synthetic', 'val', 16, VOCAB_SIZE)
    assert len(list(eval_batches(dataset, 10, 4, 0, 1, 'cpu'))) == 3
    assert not prefetch_threads()
    for _ in eval_batches(dataset, 100, 4, 0, 1, 'cpu'):
        break
    gc.collect()
    assert not prefetch_threads()


def test_an_error_in_the_thread_is_raised_where_its_batch_was_due(tmp_path):
    folder = tmp_path / 'set'
    tokens = make_dataset(folder, with_meta=False)['train']
    windows = permuted(np.arange(35), 35, 7)
    tokens[windows[9] * 32 + 1] = VOCAB_SIZE  # sample 9: the third batch of four
    shards.write_shard(folder / 'train_000000.bin', tokens[:700], np.uint16)
    shards.write_shard(folder / 'train_000001.bin', tokens[700:], np.uint16)
    iterator = data.batches(only(data.open_dataset(tmp_path, 'set', 'train', 32, VOCAB_SIZE)), 7, 0, 4, 4, 0, 1, 'cpu')
    next(iterator), next(iterator)
    with pytest.raises(ValueError, match=f'token id {VOCAB_SIZE} ') as error:
        next(iterator)
    assert error.traceback[-1].path.name == 'windows.py'  # by which errors.report_errors() recognizes a user's mistake
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_script_that_forgets_to_close_ends_at_once_and_quietly():
    script = (
        'import data\n'
        'dataset = data.open_dataset("nowhere", "synthetic", "train", 1024)\n'
        'mixture = data.Mixture({"": dataset}, [(0, {"": 1})])\n'
        'mixture.plan(1, 64)\n'
        'iterator = data.batches(mixture, 0, 0, 64, 64, 0, 1, "cpu")\n'
        'next(iterator)\n'
        'raise SystemExit(3)\n'
    )
    result = subprocess.run(
        [sys.executable, '-c', script], cwd=REPO, env=environment(), capture_output=True, text=True, timeout=600
    )
    assert (result.returncode, result.stderr) == (3, '')


def test_a_batch_costs_no_more_than_a_few_of_nanogpts(tmp_path):
    """Batches of nanoGPT's laptop config, 12 x 64 tokens, in CPU time of both threads. A step takes 25 ms, 100 times as
    long as a batch."""
    make_dataset(tmp_path / 'set', train=(100_000,))
    iterator = data.batches(only(data.open_dataset(tmp_path, 'set', 'train', 64)), 0, 0, 12, 12, 0, 1, 'cpu')
    tokens = np.zeros(100_000, np.uint16)

    def batch_of_nanogpt():
        starts = torch.randint(len(tokens) - 64, (12,))
        for shift in (0, 1):
            windows = [tokens[start + shift : start + shift + 64].astype(np.int64) for start in starts]
            torch.stack([torch.from_numpy(window) for window in windows])

    def seconds(make):
        began = time.process_time()
        for _ in range(200):
            make()
        return time.process_time() - began

    next(iterator)
    assert min(seconds(lambda: next(iterator)) / seconds(batch_of_nanogpt) for _ in range(5)) < 5
    iterator.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_on_a_gpu_batches_are_those_of_the_cpu_also_when_copies_wait_behind_a_long_kernel(tmp_path):
    """The copies are queued behind 100 ms of work, so a pinned buffer that is rewritten meanwhile would show."""
    make_dataset(tmp_path / 'set')
    dataset = data.open_dataset(tmp_path, 'set', 'train', 32)
    on_cpu = data.batches(only(dataset), 7, 0, 4, 4, 0, 1, 'cpu')
    on_gpu = data.batches(only(dataset), 7, 0, 4, 4, 0, 1, torch.device('cuda', 0))
    torch.cuda._sleep(200_000_000)  # clock cycles
    kept = [next(on_gpu) for _ in range(50)]
    for x, y in kept:
        expected_x, expected_y = next(on_cpu)
        assert x.is_cuda and torch.equal(x.cpu(), expected_x) and torch.equal(y.cpu(), expected_y)
    on_cpu.close()
    on_gpu.close()
