"""Runs prepare_data.py as a user does, kills it half-way, and reads what it leaves; or reads files as it reads them."""

import collections
import functools
import hashlib
import json
import random

import numpy as np
import pyarrow
import pytest
from faults import children_of
from launch import SHARED, fork_script, run_script, start_and_stop_behind

import data
from dataset.shards import read_shard
from text import chat_rows, sources
from text import documents as reading
from text import tokenizer as tokenizers

CACHE = SHARED / 'tiktoken_cache'
needs_gpt2 = pytest.mark.skipif(not CACHE.exists(), reason=f'no {CACHE} with the files of gpt2')
WORDS = [*"time and tide wait for no one Größe 中文 🙂 12345 it's".split(), 'x += 1;', '\n', '\n\n   ']


def make_texts(count, words=60, seed=0):
    """Different documents of random length, with multi-byte characters and all kinds of whitespace."""
    generator = random.Random(seed)
    return [
        f'{number} ' + ' '.join(generator.choices(WORDS, k=generator.randint(1, 2 * words))) for number in range(count)
    ]


def prepare(folder, *arguments, check=True, **env):
    """Run prepare_data.py with data_dir=folder/data; forked, unless there are variables that libraries read when they
    are imported."""
    command = ['prepare_data.py', f'--data_dir={folder}/data', *arguments]
    if env:
        return run_script(*command, check=check, **{'TIKTOKEN_CACHE_DIR': str(CACHE), **env})
    return fork_script(*command, check=check, TIKTOKEN_CACHE_DIR=str(CACHE))[0]


def error_of(folder, *arguments, **env):
    """The one line that a failing command prints."""
    result = prepare(folder, *arguments, check=False, **env)
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 1 and len(lines) == 1 and lines[0].startswith('[0] error: '), result
    return lines[0]


def read_here(path, text_field=None, **options):
    """(documents, notes, Source) of the files at `path`, or of a Source, read in this process."""
    source = path if isinstance(path, sources.Source) else sources.find_source(str(path), text_field, **options)
    as_conversation = functools.partial(chat_rows.conversation_of, fields=source.chat_fields) if source.chat else None
    pieces, notes = [piece for unit in reading.units_of(source) for piece in unit.pieces], collections.Counter()
    documents = [text for piece in pieces for text in reading.documents_of(piece, text_field, notes, as_conversation)]
    return [text.decode() for text in documents], notes, source


def write_stream(path, table):
    """Write a pyarrow Table in Arrow's stream format. Returns the path."""
    with pyarrow.OSFile(str(path), 'wb') as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return path


def meta_of(dataset):
    return json.loads((dataset / 'meta.json').read_text())


def tokens_of(dataset, split):
    """All tokens of a split; checks every shard against meta.json."""
    meta = meta_of(dataset)
    shards = meta['splits'][split]['shards']
    tokens = [np.array(read_shard(dataset / shard['file'])) for shard in shards]
    for shard, part in zip(shards, tokens, strict=True):
        assert part.dtype == meta['dtype'] and len(part) == shard['tokens']
        assert hashlib.sha256((dataset / shard['file']).read_bytes()).hexdigest() == shard['sha256']
    tokens = np.concatenate(tokens)
    assert len(tokens) == meta['splits'][split]['tokens'] and tokens.max() == meta['splits'][split]['max_token']
    return tokens


def documents_of(dataset, split):
    """The texts of a split, decoded."""
    tokenizer = tokenizers.tokenizer_of(dataset)
    tokens = tokens_of(dataset, split)
    ends = np.flatnonzero(tokens == tokenizer.eot)
    assert ends[-1] == len(tokens) - 1, 'a document without end-of-text'
    texts = [tokenizer.decode(part[part != tokenizer.eot]) for part in np.split(tokens, ends[:-1] + 1)]
    facts = meta_of(dataset)['splits'][split]
    assert facts['documents'] == len(texts) and facts['bytes'] == sum(len(text.encode()) for text in texts)
    return texts


def contents(dataset):
    """{file name: sha256} of a dataset's folder."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(dataset.iterdir())}


def start_and_kill_at(shard, folder, *arguments, before='*'):
    """Start prepare_data.py, wait until that shard is there, and kill it with SIGKILL at the next rename to a name that
    matches `before`. Returns the pids of its workers."""
    process = start_and_stop_behind(shard, 'prepare_data.py', f'--data_dir={folder}/data', *arguments, before=before)
    workers = children_of(process.pid)
    process.kill()
    process.join()
    assert shard.exists() and not (shard.parent / 'meta.json').exists(), 'killed too early or too late'
    return workers


def only(dataset):
    """The Mixture of one dataset."""
    mixture = data.Mixture({dataset.name: dataset}, [(0, {dataset.name: 1})])
    mixture.plan(max_iters=1, global_batch_size=1)
    return mixture


def eval_batches(dataset, *arguments):
    """data.eval_batches() of one dataset, without its number."""
    return (batch for batch, _ in data.eval_batches(only(dataset), *arguments))
