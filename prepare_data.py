"""
Turn text into token shards: data/NAME/train_000000.bin, ..., val_000000.bin, meta.json.

    python prepare_data.py                                           # the standard library, with a BPE trained on it
    python prepare_data.py --dataset=input.txt --tokenizer=bytes     # one file: its end is the validation split
    python prepare_data.py --dataset=my_texts/ --tokenizer=gpt2      # any tree of .txt, .json(l), .csv, .yaml, .parquet
    python prepare_data.py --dataset=my_texts/ --tokenizer=models/Llama-3.2-3B    # to fine-tune that model
    python prepare_data.py --dataset=chats.jsonl --tokenizer=models/Qwen3-0.6B    # instruction data: rows of messages
    python prepare_data.py --pairs --dataset=pairs.jsonl --tokenizer=models/Qwen3-0.6B   # preferences: chosen, rejected
    python prepare_data.py --dataset=fineweb-10BT --tokenizer=gpt2   # streamed from the Hugging Face hub
    python prepare_data.py --dataset=fineweb-10BT --download_only    # on a login node, for a later run without network
    python prepare_data.py --cache_tokenizer=gpt2                    # the same for a tokenizer's files
    python prepare_data.py --verify=NAME                             # are the files still as they were written?

A row is a conversation if it has `messages` or `conversations` (ShareGPT), or a question and its answer in `prompt` and
`completion`, in `instruction` and `output` (Alpaca), or in `question` and `answer`. --chat_fields names other fields.
The tokenizer's chat template turns a conversation into text. Only the assistant's tokens count in the loss, and files
such as train_000000.mask mark them. At the end the script prints the first document or conversation as it was written,
and marks the part that counts in the loss.

One process reads and writes, and num_proc others tokenize. If the script is killed half-way, the same command continues
from there, and the files come out the same to the byte.
"""

from typing import Literal

from conditions import say_without_effect
from configurator import configure


# --- KNOBS ------------------------------------------------------------------------------------------------------------
class Config:
    # text
    dataset = 'stdlib'  # or a file, a folder, OWNER/NAME on the hub; fineweb-10BT, -100BT, fineweb-edu-10BT [path]
    text_field: str | None = None  # field, or '{title}\n{text}', of a row's text; None = text
    chat: bool | None = None  # rows are conversations, and their answers are learned; None = the first rows decide
    chat_fields = []  # fields of other conversations than those above: the list of messages, or QUESTION,ANSWER
    pairs = False  # rows are pairs of answers to a prompt, `chosen` and `rejected` (or KTO's), for train_dpo.py
    train_on_input = False  # learn every message of a conversation, not the answers alone
    fold_system = False  # put system messages into the user's message, for chat templates that refuse them
    source_config: str | None = None  # configuration of a hub dataset; None = its only one
    source_split = 'train'  # the split to read, of a hub dataset or of a folder written by save_to_disk
    dedup = False  # drop a document that equals an earlier one to the byte
    max_left_out = 0.5  # share of the rows that may be left out, for printed reasons; more is an error [>= 0, <= 1]
    max_tokens: int | None = None  # stop when the train split has this many; None = read everything [>= 1]
    # tokens
    tokenizer = 'bpe'  # bpe (trained on the text), bytes, a tiktoken name (gpt2), a run or a Hugging Face folder [path]
    chat_template: str | None = None  # a .jinja file for conversations; None = the tokenizer's, or a default [path]
    vocab_size = 2048  # of the BPE that is trained [>= 1]
    val_fraction: float | None = None  # of the val split; None = 0.1 of stdlib or a text file, else 0.01 [>= 0, < 1]
    val_rule: Literal['hash', 'tail'] | None = None  # documents by hash, or a file's end; None = tail for text files
    seed = 1337  # of the hash that chooses validation documents [>= 0, < 4294967296, if val_rule=hash, if val_fraction]
    # files
    name: str | None = None  # of the new dataset; None = made of dataset and tokenizer, such as stdlib-bpe2048
    data_dir = 'data'  # where datasets live [path]
    shard_tokens = 100_000_000  # per shard: 200 MB for vocabularies up to 65,536 [>= 1, < 2147483648]
    # system
    num_proc: int | None = None  # processes that tokenize; None = one per core [>= 1]
    engine: Literal['auto', 'reference'] = 'auto'  # auto: gigatoken, which is faster, where it gives the same tokens
    download_only = False  # download a hub dataset into data_dir/hub, and stop
    tasks = []  # write tasks for evaluate.py to tasks/, and stop: hellaswag,mmlu, or gsm8k=FILE_OR_FOLDER
    cache_tokenizer: str | None = None  # download this tokenizer to TIKTOKEN_CACHE_DIR or data_dir/tiktoken, and stop
    verify: str | None = None  # check this dataset's files against the sha256 in its meta.json, and stop [path]
    peek: str | None = None  # print some windows of a dataset or mixture as a training run would read them, and stop


# ----------------------------------------------------------------------------------------------------------------------
config, explicit = configure(Config)

import atexit
import collections
import fcntl
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dataset.opening import TOKEN_BYTES
from dataset.shards import ShardWriter, read_meta, verify
from evaluation.known_tasks import make_tasks
from layout import counted
from system import errors
from system.files import check_form, read_json, write_file
from text import encoding, sources
from text.chat_rows import AS_TEXT, FORMATS_IN_WORDS, PREFERENCES
from text.conversations import as_one, digest_of, templates_of
from text.documents import HEAD_BYTES, cut_up, documents_of, in_words, left_out_of, units_of, write_pairs
from text.engine import Mismatch
from text.summary import print_example, print_summary
from text.templates import default_template, write_settings
from text.tokenizer import (
    describe,
    fetch_tokenizer,
    folder_of_tokenizer,
    load_tokenizer,
    train_bpe,
    write_as_folder,
)

errors.report_errors(lambda: 'lower num_proc')

STATE_FILE = 'unfinished.json'  # where to resume; replaced by meta.json when the dataset is complete
# What is read of both when the command is typed again; see system.files.check_form().
BEGUN = {'settings': dict, 'source': {'name': str, 'sha256': str}, 'splits': {str: {'tokens': int, 'shards': list}}}
LEFTOVERS = (STATE_FILE, '*.partial', '*.tmp')  # deleted when a dataset is complete
SAVE_SECONDS = 10  # between two saved states, so a kill costs about this much work
UNITS_AHEAD = 64  # 1 MB each: they keep the workers busy for a third of a second while a shard goes to disk
# With up to this many documents, sizes help to choose those for validation; with more, chance comes near val_fraction.
FEW_DOCUMENTS = 10_000
REPEATED = 'documents dropped that are the same as one before'  # the note under which dedup counts them
BPE_SAMPLE_BYTES = 1 << 26  # a BPE is trained on the first 64 MB of the train split, which bounds its memory

# --- ERRANDS ----------------------------------------------------------------------------------------------------------
hub_folder = Path(config.data_dir) / 'hub'
if config.cache_tokenizer:
    cache, fetched = fetch_tokenizer(config.cache_tokenizer, Path(config.data_dir) / 'tiktoken')
    print(f'{config.cache_tokenizer}: {fetched.vocab_size:,} tokens; its files are in {cache}, sha256 verified')
    print(f'where there is no network: export TIKTOKEN_CACHE_DIR={os.path.abspath(cache)}')
    sys.exit()
if config.tasks:
    make_tasks(config.tasks, hub_folder)
    sys.exit()
if config.download_only:
    where = sources.download(config.dataset, config.source_config, hub_folder)
    print(f'{config.dataset}: downloaded to {where}; now prepare it, with or without network')
    sys.exit()
if config.verify:
    named = Path(config.data_dir) / config.verify
    folder = named if named.exists() else Path(config.verify)  # either NAME or the folder, as the script prints it
    print(f'{folder}: {counted(verify(folder), "file")}, sha256 as in meta.json')
    sys.exit()
if config.peek:
    from text.peek import peek  # only here, because it imports torch

    peek(config.peek, config.data_dir)
    sys.exit()
if config.dataset == 'synthetic':
    print('synthetic: random tokens, made while training\nnext: python train_ddp.py --dataset=synthetic')
    sys.exit()

# --- WORKERS ----------------------------------------------------------------------------------------------------------
config.num_proc = len(os.sched_getaffinity(0)) if config.num_proc is None else config.num_proc
# Fork now, while this process is small and has no threads. It imports torch and pyarrow later; workers need neither.
workers = ProcessPoolExecutor(config.num_proc, multiprocessing.get_context('fork'), encoding.start_worker)
atexit.register(workers.shutdown)
workers.submit(os.getpid).result()


def encoded_units(units, rules, encode=encoding.encode_unit):
    """Yield (unit, what `encode` returns) for every unit, in order. Enough units are in flight that no worker has to
    wait while a shard is written."""
    under_way = collections.deque()
    try:
        for unit in units:
            under_way.append((unit._replace(pieces=None), workers.submit(encode, unit.pieces, rules)))
            if len(under_way) > max(UNITS_AHEAD, 2 * config.num_proc):
                unit, future = under_way.popleft()
                yield unit, future.result()
        for unit, future in under_way:
            yield unit, future.result()
    except OSError as error:  # a file that was deleted or cut while it was read
        raise OSError(str(error)) from error
    except Mismatch as mismatch:
        print(f'{mismatch}: starting over without it', flush=True)
        workers.shutdown(cancel_futures=True)
        delete('*.bin', '*.partial', STATE_FILE)
        os.execv(sys.executable, [sys.executable, *sys.argv, '--engine=reference'])
    except BrokenProcessPool as error:
        raise OSError('a worker was killed: the same command goes on, --num_proc=N takes less memory') from error
    finally:
        for _, future in under_way:
            future.cancel()


# --- SOURCE -----------------------------------------------------------------------------------------------------------
file = sources.only_file(config.dataset) or config.dataset  # a folder of one file is that file
is_text_file = os.path.isfile(file) and sources.kind_of(file) == 'text'
is_text_file &= not file.endswith(tuple(sources.COMPRESSED))
config.val_rule = config.val_rule or ('tail' if is_text_file else 'hash')
if config.val_rule == 'tail' and not is_text_file:
    raise ValueError(f'val_rule=tail cuts a single text file, and dataset={config.dataset} is none: leave it out')
if config.val_fraction is None:
    config.val_fraction = 0.1 if is_text_file or config.dataset == 'stdlib' else 0.01
if 'vocab_size' in explicit and config.tokenizer != 'bpe':
    raise ValueError(f'vocab_size={config.vocab_size} is for --tokenizer=bpe, {config.tokenizer} has its own')
tokenizer = folder_of_tokenizer(config.tokenizer)  # a name or a folder

if config.text_field and '{' in config.text_field:  # a template; a shell passes \n as two characters
    config.text_field = config.text_field.replace('\\n', '\n')
    if '{}' in config.text_field or config.text_field.count('{') != config.text_field.count('}'):
        raise ValueError(f'text_field={config.text_field!r}: expected the name of a field in each pair of {{braces}}')
if config.pairs:
    for key in ('chat', 'chat_fields', 'text_field'):
        if getattr(config, key):
            raise ValueError(
                f'pairs=True with {key}: pairs are read by their fields prompt, chosen and rejected: leave {key} out'
            )
    if config.train_on_input:
        raise ValueError('pairs=True with train_on_input: of a pair the two answers are learned: leave out one of them')
    if config.chat is False or config.tokenizer == 'bpe':
        given = 'chat=False' if config.chat is False else 'tokenizer=bpe'
        raise ValueError(
            f'{given} with pairs=True, which teach a model that knows language: give its --tokenizer, and no --chat'
        )
    config.chat_fields = list(PREFERENCES)
elif config.chat_fields == list(PREFERENCES):
    raise ValueError('chat_fields=chosen,rejected are two answers, and neither is a question: use --pairs')
if config.chat_fields and config.chat is False:
    raise ValueError(f'chat=False reads text, and chat_fields={",".join(config.chat_fields)} conversations: choose one')
config.chat = True if config.chat_fields else config.chat
if config.chat and config.text_field is not None:
    raise ValueError(f'chat=True reads {FORMATS_IN_WORDS}: leave out --text_field={config.text_field}')
if sources.is_hub_name(config.dataset):
    stream, about = sources.open_stream(config.dataset, config.source_config, config.source_split, hub_folder)
    source = sources.stream_source(stream, about, config.text_field, config.chat, config.chat_fields)
else:
    tail_fraction = config.val_fraction if config.val_rule == 'tail' and config.val_fraction else None
    options = (config.text_field, config.source_split, tail_fraction, config.chat, config.dedup, config.chat_fields)
    source = sources.find_source(config.dataset, *options)
if source.chat and tokenizer == 'bpe':
    raise ValueError(
        'tokenizer=bpe with conversations, which teach a model that knows language: give its --tokenizer, as '
        '--tokenizer=out/RUN or --tokenizer=models/Qwen3-0.6B, or --text_field=FIELD to learn one field as text'
    )
if source.chat and not config.pairs and not os.path.isdir(tokenizer):
    tokenizer = write_as_folder(tokenizer, Path(config.data_dir) / 'tokenizers' / tokenizer)
tokenizer_facts = describe(tokenizer, config.vocab_size)
if tokenizer != config.tokenizer and os.path.isdir(config.tokenizer) and os.path.isdir(tokenizer):
    tokenizer_facts['name'] = Path(config.tokenizer).resolve().name
templates = {}  # {name: text} of those that write the conversations
if source.chat and config.chat_template:
    if not os.path.isfile(config.chat_template):
        raise ValueError(f'chat_template={config.chat_template}: there is no such file')
    templates = {'default': Path(config.chat_template).read_text(encoding='utf-8')}
elif source.chat and os.path.isdir(tokenizer):
    templates = templates_of(tokenizer)
    if not templates and not config.pairs:
        templates['default'], kind = default_template(tokenizer, tokenizer_facts['eot_text'])
        print(f'{config.tokenizer} has no chat template: conversations are written as {kind}')
chat_template = as_one(templates)
if source.chat and (config.dedup or config.max_tokens):
    raise ValueError('dedup and max_tokens are for text, and these are conversations: leave them out')
for key in ('fold_system', 'train_on_input'):
    if getattr(config, key) and not source.chat:
        raise ValueError(f'{key}=True is for conversations, dataset={config.dataset} holds none: leave it out')
is_hub = sources.is_hub_name(config.dataset)
say_without_effect('prepare_data.py', config, explicit, is_chat=bool(source.chat), is_hub=is_hub)
if chat_template:
    tokenizer_facts.pop('bos_text', None)  # whether there is a BOS is up to the chat template
facts = source.description
of_files = 'files' in facts and f'{counted(facts["files"], "file")}, {facts["bytes"]:,} bytes'
size = of_files or f'revision {facts["revision"]}'
print(f'{facts["name"]}: {size}, sha256 {facts["sha256"]}')
if source.line:
    print(source.line)
for line in source.skipped[:10]:
    print(f'left out: {line}')
if len(source.skipped) > 10:
    print(f'left out: {len(source.skipped) - 10} more files')

# --- FOLDER -----------------------------------------------------------------------------------------------------------
if config.name is None:
    is_path = os.path.exists(config.dataset)
    source_name = Path(config.dataset).resolve().stem if is_path else config.dataset.rpartition('/')[2]
    config_suffix = f'-{config.source_config}' if config.source_config else ''
    tokenizer_name = f'bpe{config.vocab_size}' if config.tokenizer == 'bpe' else tokenizer_facts['name']
    config.name = re.sub(r'[^\w.-]+', '_', f'{source_name}{config_suffix}-{tokenizer_name}')
if not re.fullmatch(r'\w[\w.-]*', config.name):
    raise ValueError(f'name={config.name!r}: expected letters, digits, and . _ - behind the first; it names a folder')
folder = Path(config.data_dir) / config.name
settings = {  # everything that decides which tokens are written
    'source': facts['sha256'],
    'tokenizer': tokenizer_facts,
    'chat_template': digest_of(chat_template),  # None: text
    'fold_system': config.fold_system or None,  # not False: older datasets lack this setting
    'train_on_input': config.train_on_input or None,
}
settings |= {key: vars(config)[key] for key in ('text_field', 'val_rule', 'val_fraction', 'seed', 'shard_tokens')}
settings |= {key: vars(config)[key] for key in ('dedup', 'max_tokens', 'chat_fields') if vars(config)[key]}


def refuse(state_of_folder):
    raise ValueError(f'{folder} {state_of_folder}; it was left as it is: give another --name, or delete it')


def refuse_other_settings(found, how_far):
    """Raise ValueError if a meta.json or a saved state has another source or other settings than this command."""
    differences = [key for key in {**found['settings'], **settings} if found['settings'].get(key) != settings.get(key)]
    if found['settings'].get('tokenizer') == {key: value for key, value in tokenizer_facts.items() if key != 'turns'}:
        differences = [key for key in differences if key != 'tokenizer']  # of a version that reserved no turns
    if 'source' in differences:
        theirs, ours = (f'{about["name"]} (sha256 {about["sha256"][:12]})' for about in (found['source'], facts))
        refuse(f'was {how_far} from {theirs}, this command reads {ours}')
    if differences:
        both = (f'{key}={found["settings"].get(key)!r}, this command has {settings.get(key)!r}' for key in differences)
        refuse(f'was {how_far} with {"; ".join(both)}')


def write_json(path, content):
    write_file(path, json.dumps(content, indent=1))


def refuse_left_out(notes, kept):
    """Raise ValueError if none of the source's rows can be used, or if more than max_left_out of them cannot, with the
    reasons. kept: how many can."""
    reasons = left_out_of(notes)
    n_rows = kept + reasons.total()
    if reasons.total() <= config.max_left_out * n_rows and (kept or not reasons):
        return
    of_all = f'{reasons.total():,} of {n_rows:,}' if kept else f'all {n_rows:,}'
    mends = [AS_TEXT] if source.chat and not config.pairs else []
    if kept:
        mends.append(f'--max_left_out={math.ceil(100 * reasons.total() / n_rows) / 100} takes the rest')
    raise ValueError('; '.join([f'{facts["name"]}: {of_all} rows are left out: {in_words(reasons)}', *mends]))


def lock_folder():
    """Keep other processes out of the folder until this one ends, however it ends."""
    try:
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        refuse('is being prepared by another process')
    except OSError:
        pass  # not every network file system has locks


def delete(*patterns):
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        path.unlink()


state = {'settings': settings, 'source': facts, 'position': [0, 0], 'work': 0, 'notes': {}, 'splits': {}}
is_resumed, was_there = False, folder.exists()
if was_there:
    lock_folder()
    if (folder / 'meta.json').exists():
        meta = read_meta(folder)
        if not {'settings', 'splits', 'source'} <= {*meta}:
            refuse('holds a meta.json that this script has not written')
        check_form(meta, BEGUN, folder / 'meta.json')
        refuse_other_settings(meta, 'made')
        delete(*LEFTOVERS)
        print('nothing to do, it is complete:')
        print_summary(meta, folder, config)
        sys.exit()
    if (folder / STATE_FILE).exists():
        found = read_json(
            folder / STATE_FILE, BEGUN | {'position': list, 'notes': dict}, f'delete {folder}, and start again'
        )
        tokens_written = sum(totals['tokens'] for totals in found['splits'].values())
        if tokens_written:
            refuse_other_settings(found, 'half made')
            state, is_resumed = found, True
            print(f'{folder}: going on behind the first {tokens_written:,} tokens')
        else:  # killed before any tokens were saved: start over
            delete('*.bin', '*.mask', '*.partial')
    elif any(path.suffix in ('.bin', '.npy') for path in folder.iterdir()):
        refuse('holds token files that this script has not written')


def warm_up_workers():
    """Have all workers load the tokenizer. Returns their futures; the result is a line for the user, or None."""
    arguments = (tokenizer, folder, source.chat, config.engine, tuple(templates.items()))
    return [workers.submit(encoding.warm_up, *arguments) for _ in range(config.num_proc)]


comparison = None
if 'sha256' in tokenizer_facts:  # first: importing torch makes a worker larger, and gigatoken watches its size
    comparison = workers.submit(encoding.compare_with_transformers, tokenizer)
warm_ups = None if config.tokenizer == 'bpe' else warm_up_workers()  # meanwhile this process reads
if source.chat:  # what the template cannot write is found by the workers, so here they come first
    try:
        line = warm_ups[0].result()
    except ValueError as error:
        raise ValueError(str(error)) from error
    if line:
        print(line)

if source.labeled:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / 'pairs.partial'
    joined = collections.Counter()
    n_pairs = write_pairs(source, path, joined)
    print(f'{counted(n_pairs, "pair")} of a good and a bad answer to the same prompt')
    try:
        refuse_left_out(joined, n_pairs)
    except ValueError:
        path.unlink()
        raise
    state['notes'] = state['notes'] if is_resumed else dict(joined)
    source.total, source.stream = path.stat().st_size, None
    source.parts = [sources.Part(str(path), 'jsonl', end=source.total)]

# --- VALIDATION SPLIT -------------------------------------------------------------------------------------------------


def rules_with(val_hashes):
    options = (config.text_field, source.chat or config.chat, config.fold_system, config.seed, val_hashes)
    more = (config.dedup, source.chat_fields, config.train_on_input, tuple(templates.items()))
    return encoding.Rules(tokenizer, folder, *options, config.engine, *more)


def hashes_and_sizes(notes):
    """Yield (hash, bytes) of each document that is kept, or of each stretch of a long one. Text files are read at the
    start only."""
    if source.chat:
        for _, (found, new_notes) in encoded_units(units_of(source), rules_with((0, 0)), encoding.conversations_in):
            notes.update(new_notes)
            yield from found
        return
    for unit in units_of(source):
        for piece in unit.pieces:
            if piece.kind == 'text' and piece.data is None:
                yield encoding.hash_of(piece, None, config.seed), piece.length
                continue
            for document in documents_of(piece, config.text_field, notes, any_row=config.chat is False):
                yield encoding.hash_of(piece, document, config.seed), len(document)


def choose_val_hashes():
    """(first, end): documents whose hash is at least `first` and below `end` are for validation.

    For a small corpus encoding.choose_by_size() chooses the range; otherwise it is (0, val_fraction * 2^64)."""
    end = int(config.val_fraction * 2**64)
    lowest, highest = 2**64, -1
    sizes, notes = collections.Counter(), collections.Counter()  # sizes: {hash: bytes}
    n_kept = 0
    for number, size in hashes_and_sizes(notes):
        n_kept += 1
        sizes[number] += size
        lowest, highest = min(lowest, number), max(highest, number)
        if len(sizes) > FEW_DOCUMENTS and lowest < end <= highest:
            return 0, end
    refuse_left_out(notes, n_kept)
    if len(sizes) < 2:
        why = f' (left out: {in_words(left_out_of(notes))})' if left_out_of(notes) else ''
        advice = 'use --val_fraction=0'
        if not source.chat:
            advice = f'give a text file by itself, as --dataset=FILE, of which the end is held out, or {advice}'
        raise ValueError(
            f'dataset={config.dataset} is not two different {"prompts" if config.pairs else "documents"}{why}, to be '
            f'split by a hash: {advice}'
        )
    return encoding.choose_by_size(sizes, config.val_fraction)


if not is_resumed:
    use_hashes = config.val_rule == 'hash' and config.val_fraction
    state['val_from'], state['val_below'] = choose_val_hashes() if use_hashes else (0, 0)
val_hashes = (state.get('val_from', 0), state['val_below'])
if config.val_rule == 'tail':
    rule_in_words = short_rule = f'the last {config.val_fraction:%} of the bytes of the text'
else:
    what = 'documents'
    if source.chat:
        what = f'{"pairs with a prompt" if config.pairs else "conversations"}, as JSON,'
    short_rule = f'{config.val_fraction:.2%} of the text, chosen by a hash (val_rule in meta.json)'
    first, end = (number / 2**64 for number in val_hashes)
    rule_in_words = (
        f'{what} whose hash is from {first:.6f} to below {end:.6f} * 2^64: blake2b of their first {HEAD_BYTES:,} '
        f'bytes, digest_size=8, salt={config.seed} as 16 bytes, little-endian'
    )

# --- TOKENIZER --------------------------------------------------------------------------------------------------------


def bpe_sample():
    """Yield the first BPE_SAMPLE_BYTES of the train split, text by text."""
    left = BPE_SAMPLE_BYTES
    for piece in itertools.chain.from_iterable(unit.pieces for unit in units_of(source)):
        # The notes are thrown away here, since the workers count them.
        for document in documents_of(piece, config.text_field, collections.Counter(), any_row=config.chat is False):
            if encoding.split_of(piece, document, config.seed, val_hashes) == 'train':
                yield from cut_up(document, encoding.STRETCH_BYTES)
                left -= len(document)
                if left <= 0:
                    return


if config.tokenizer != 'bpe':
    encoder = load_tokenizer(tokenizer, folder)  # if this fails, nothing has been written yet
if comparison:
    try:
        line = comparison.result()
    except ValueError as error:
        raise ValueError(str(error)) from error
    if line:
        print(line)
if not is_resumed:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / STATE_FILE, state)
    except OSError as error:
        raise OSError(f'{folder}: cannot be written: {error.strerror}; choose another --data_dir') from error
    if not was_there:
        lock_folder()
    if config.tokenizer == 'bpe':
        print(f'training a BPE of {config.vocab_size:,} tokens on the first {BPE_SAMPLE_BYTES >> 20} MB to train on')
        train_bpe(bpe_sample(), config.vocab_size, folder / 'tokenizer.json', config.engine)
    elif 'sha256' in tokenizer_facts:
        # a copy, so that the dataset can be moved
        shutil.copyfile(Path(tokenizer) / 'tokenizer.json', folder / 'tokenizer.json')
        if templates:  # which may ask for special tokens
            write_settings(folder, tokenizer_facts, tokenizer)
if config.tokenizer == 'bpe':
    encoder = load_tokenizer(config.tokenizer, folder)
dtype = encoding.dtype_for(encoder.vocab_size)
size = f'{encoder.vocab_size:,} tokens'
if config.tokenizer == 'bpe' and encoder.vocab_size < config.vocab_size:
    size += ' (the text has no more pairs to merge)'
size += f', {dtype.name}'
print(f'tokenizer {config.tokenizer}: {size}; validation split: {short_rule}')

# --- SHARDS -----------------------------------------------------------------------------------------------------------
warm_ups = warm_ups or warm_up_workers()
if not source.chat:
    print(warm_ups[0].result())


def save_state():
    """Save the position from which the same command would continue."""
    for split, writer in writers.items():
        writer.sync()
        state['splits'][split] = writer.totals
    if seen:
        state['seen'] = seen.sync()
    write_json(folder / STATE_FILE, state)


writers = {}
for split in ['train', 'val'] if config.val_fraction else ['train']:
    totals = state['splits'].get(split)
    writers[split] = ShardWriter(folder, split, dtype, config.shard_tokens, totals, source.chat)
seen = encoding.Seen(folder / 'seen.partial', state.get('seen', 0)) if config.dedup else None
notes = collections.Counter(state['notes'])
start = saved_at = time.perf_counter()
saved_shards = tokens_made = bytes_made = 0
unit_of_work = {'unit': 'B' if 'bytes' in facts else ' rows', 'unit_scale': True}
with tqdm(total=source.total, initial=state['work'], disable=None, leave=False, **unit_of_work) as bar:  # on a terminal
    for unit, (encoded, new_notes) in encoded_units(units_of(source, state['position']), rules_with(val_hashes)):
        for split, part in encoded.items():
            if seen:
                part, n_repeats = seen.without_repeats(part)
                if n_repeats:
                    new_notes[REPEATED] += n_repeats
            if len(part.tokens):
                writers[split].add(*part[:5])
            tokens_made += len(part.tokens)
            bytes_made += part.text_bytes
        notes.update(new_notes)
        state.update(position=unit.next, work=state['work'] + unit.work, notes=notes)
        shards = sum(len(writer.totals['shards']) for writer in writers.values())
        if shards > saved_shards or time.perf_counter() - saved_at > SAVE_SECONDS:
            save_state()
            saved_at, saved_shards = time.perf_counter(), shards
        rate = tokens_made / (time.perf_counter() - start) / 1e6
        bar.set_postfix_str(f'{tokens_made:,} tokens, {rate:.2f}M tokens/s', refresh=False)
        bar.update(unit.work)
        if config.max_tokens and writers['train'].totals['tokens'] >= config.max_tokens:
            break

# --- META.JSON --------------------------------------------------------------------------------------------------------
save_state()
reasons = left_out_of(notes)
n_documents = sum(writer.totals['documents'] for writer in writers.values())
rows_kept = notes.get(encoding.CONVERSATIONS, n_documents)
try:
    refuse_left_out(notes, rows_kept + notes[REPEATED])
except ValueError:
    if n_documents <= FEW_DOCUMENTS:  # soon made again, with other settings; much work is kept for --max_left_out
        delete('*.bin', '*.mask', '*.partial', STATE_FILE)
    raise
for split, writer in writers.items():
    if writer.totals['tokens'] == 0:
        delete('*.bin', '*.mask', '*.partial', STATE_FILE)  # to be made again with other settings
        why = f' (left out: {in_words(reasons)})' if reasons else ''
        raise ValueError(
            f'{facts["name"]} left no text for split {split!r}{why}: more text, or another --val_fraction (0: none)'
        )
    writer.finish()
seconds = time.perf_counter() - start
read_again = notes.pop(encoding.READ_AGAIN, 0)
notes.pop(encoding.CONVERSATIONS, None)
meta = {
    'format_version': 1,
    'name': config.name,
    'tokenizer': {**tokenizer_facts, 'vocab_size': encoder.vocab_size, 'eot_token': encoder.eot},
    'vocab_size': encoder.vocab_size,
    'eot_token': encoder.eot,
    'dtype': dtype.name,
    **({'masked': True} if source.chat else {}),
    **({'chat_templates': templates} if templates else {}),
    **({'pairs': True} if config.pairs else {}),
    'splits': {split: writer.totals for split, writer in writers.items()},
    'val_fraction': config.val_fraction,
    'val_rule': rule_in_words,
    'val_hashes': val_hashes,
    'rows_kept': rows_kept,
    'left_out': dict(reasons.most_common(20)),
    'source': {**facts, 'left_out': source.skipped[:100], 'notes': dict(sorted(notes.items())[:100])},
    'settings': settings,
}
np.save(folder / TOKEN_BYTES, np.array(encoder.count_bytes(range(encoder.vocab_size)), dtype=np.uint16))
write_json(folder / 'meta.json', meta)  # written last: a dataset is complete if it has one
delete(*LEFTOVERS)
for note, count in sorted(notes.items())[:10]:
    print(f'{note} ({count:,})')
if len(notes) > 10:
    print(f'{len(notes) - 10:,} more such lines: the first hundred are in {folder}/meta.json')
if read_again:
    n_tokens = sum(writer.totals['tokens'] for writer in writers.values())
    factor = n_tokens / (n_tokens - read_again)
    print(
        f'{"WARNING: " * (factor > 2)}the chat template writes an answer in another way once others follow, so each '
        f'needs an example of its own, with all before it: {n_documents:,} examples of {rows_kept:,} conversations, '
        f'{factor:.1f} times the tokens; "weight": 0 on all answers of a row but the last would leave one'
    )
rates = f'{bytes_made / seconds / 1e6:.1f} MB/s, {tokens_made / seconds / 1e6:.2f}M tokens/s'
print_example(meta, folder)
print(f'{rates} with {counted(config.num_proc, "process")}, reading and writing included')
print_summary(meta, folder, config)
