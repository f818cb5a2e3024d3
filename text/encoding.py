"""
Encodes units of text as tokens, in worker processes.

    workers = ProcessPoolExecutor(num_proc, multiprocessing.get_context('fork'), start_worker)
    rules = Rules('gpt2', folder, None, chat=False, fold_system=False, seed=1337, val_hashes=(0, 2**60), engine='auto')
    {'train': encoded, 'val': encoded}, notes = workers.submit(encode_unit, unit.pieces, rules).result()

The tokens of a document depend on nothing else: not on its unit, the worker, or what was encoded before it.
"""

import bisect
import collections
import functools
import hashlib
import itertools
import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np

from text.chat_rows import PREFERENCES, conversation_of, pair_of, prompt_of
from text.conversations import ChatEncoder, TextEncoder
from text.documents import cut_up, documents_of
from text.engine import faster
from text.tokenizer import check_against_file, load_tokenizer, load_transformers_tokenizer

# Notes under which prepare_data.py counts conversations that are kept, and tokens of examples that only read again what
# the last example of the conversation has, because each of its answers needs one of its own.
CONVERSATIONS, READ_AGAIN = 'conversations', 'tokens read again'
MANY_NEW = 1 << 20  # hashes are collected in a set, 100 bytes each, and so many of them are moved to a sorted array
STRETCH_BYTES = 1 << 16  # longer documents are encoded in stretches, because tiktoken's regex fails on a MB of spaces


class Rules(NamedTuple):
    """How documents are encoded, and which of them are for validation."""

    tokenizer: str  # a name or folder, as for load_tokenizer()
    folder: Path  # of the dataset
    text_field: str | None
    chat: bool | None  # the documents are conversations; None = they do not look like it, False = the user said no
    fold_system: bool  # system messages become part of the user's messages
    seed: int  # of the hash
    val_hashes: tuple  # (first, end): documents with first <= hash < end are for validation
    engine: str  # 'auto' = gigatoken if it gives the same tokens; 'reference'
    dedup: bool = False  # hash every document, so that repeated ones can be left out
    chat_fields: tuple = ()  # fields of a conversation, if conversation_of() does not know their names; or PREFERENCES
    train_on_input: bool = False  # every message of a conversation is learned, not the answers alone
    templates: tuple = ()  # (name, text) of the chat templates that write conversations


class Encoded(NamedTuple):
    """What a unit contributes to a split."""

    tokens: np.ndarray  # uint16 or uint32
    documents: int  # how many end in this unit; for conversations, the number of examples
    text_bytes: int
    flags: np.ndarray | None = None  # for conversations: uint8, LEARNED and FIRST
    longest: int = 0  # tokens of the longest conversation or pair
    hashes: np.ndarray | None = None  # with dedup: uint64 of each document, 0 for a stretch of a longer one
    sizes: np.ndarray | None = None  # with dedup: int64 (documents, 2), tokens and bytes of each


def start_worker():
    """Set up a worker process: leave Ctrl-C to the parent, and end when the parent ends, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ['TOKENIZERS_PARALLELISM'] = 'false'  # there is a process per core
    os.environ['HF_HUB_OFFLINE'] = '1'  # workers read only files; the parent streams from the hub

    def follow_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()


@functools.cache
def worker_tokenizer(name, folder, engine):
    """(tokenizer, a line that says which library encodes), loaded once per worker."""
    reference = load_tokenizer(name, folder)
    return faster(reference, name, folder) if engine == 'auto' else (reference, 'encoded by the reference, as asked')


@functools.cache
def worker_chat_encoder(name, folder, templates):
    """The ChatEncoder, loaded once per worker; for pairs without a chat template a TextEncoder."""
    tokenizer = worker_tokenizer(name, folder, 'reference')[0]
    return ChatEncoder(name, tokenizer.eot, dict(templates)) if templates else TextEncoder(tokenizer)


def warm_up(tokenizer, folder, chat, engine, templates=()):
    """Load the tokenizer before the first unit comes. Returns the line that says which library encodes; for
    conversations None, or a WARNING about the template. Raises what load_tokenizer() and ChatEncoder raise."""
    if not chat:
        return worker_tokenizer(tokenizer, folder, engine)[1]
    encoder = worker_chat_encoder(tokenizer, folder, templates)
    return encoder.line_of_end() if isinstance(encoder, ChatEncoder) else None


def compare_with_transformers(folder, trust_remote_code=False):
    """Raise ValueError if transformers gives other ids than the tokenizer.json of a Hugging Face folder, which datasets
    are encoded with. Returns None, or a line that says why the two could not be compared. This makes transformers
    import torch, so only one of prepare_data.py's workers does it."""
    import transformers

    transformers.logging.set_verbosity_error()  # problems are reported here
    try:
        tokenizer = load_transformers_tokenizer(folder, trust_remote_code, check=False)
    except ValueError as error:
        return f'its ids are not compared with those of transformers: {error}'
    check_against_file(tokenizer, folder)


def hash_of(piece, document, seed):
    """A hash below 2^64 of the first bytes of a document, by which its split is chosen. document: the whole document or
    a stretch of it."""
    digest = hashlib.blake2b(piece.head_of(document), digest_size=8, salt=seed.to_bytes(16, 'little', signed=True))
    return int.from_bytes(digest.digest(), 'little')


def split_of(piece, document, seed, val_hashes):
    """'train' or 'val': what the source prescribes, else by the hash of the document to which the piece belongs."""
    first, end = val_hashes
    return piece.split or ('val' if first <= hash_of(piece, document, seed) < end else 'train')


def choose_by_size(sizes, fraction):
    """(first, end): the range of hashes that makes a document one for validation. sizes: {hash: bytes} of two or more
    documents.

    This is (0, fraction * 2^64) if the documents in it have that fraction of all bytes, give or take a fifth of it.
    With few documents chance may miss it. Then it is the range of consecutive hashes whose documents come closest.
    """
    hashes = sorted(sizes)
    borders = list(itertools.accumulate((sizes[number] for number in hashes), initial=0))  # bytes before each
    wanted, end = fraction * borders[-1], int(fraction * 2**64)
    by_chance = bisect.bisect_left(hashes, end)
    if 0 < by_chance < len(hashes) and abs(borders[by_chance] - wanted) < wanted / 5:
        return 0, end
    choices = []
    for first in range(len(hashes)):
        enough = bisect.bisect_left(borders, borders[first] + wanted)
        for behind in (enough - 1, enough):
            if first < behind <= len(hashes) and behind - first < len(hashes):  # at least one document in each split
                choices.append((abs(borders[behind] - borders[first] - wanted), first, behind))
    _, first, behind = min(choices)
    return hashes[first], hashes[behind] if behind < len(hashes) else 2**64


def dtype_for(vocab_size):
    """The smallest dtype of shards that can hold every id."""
    return np.dtype('uint16' if vocab_size <= 1 << 16 else 'uint32')


def encode_unit(pieces, rules):
    """Encode a unit's pieces, with the tokenizer's bos before each document and end-of-text after it. Returns ({split:
    Encoded}, Counter of what was mended or left out)."""
    notes = collections.Counter()
    encode = _encode_conversations if rules.chat else _encode_texts
    return encode(pieces, rules, notes), notes


def _encode_texts(pieces, rules, notes):
    tokenizer = worker_tokenizer(rules.tokenizer, rules.folder, rules.engine)[0]
    stretches = collections.defaultdict(list)
    begins_document = collections.defaultdict(list)  # whether each stretch begins a document
    ends_document = collections.defaultdict(list)  # whether each stretch ends one
    text_bytes = collections.Counter()
    documents = collections.defaultdict(list)  # with dedup: (hash, bytes, number of the first stretch) of each
    for piece in pieces:
        begins = piece.kind != 'text' or piece.start == piece.document_start
        is_whole = piece.ends_document and begins
        for document in documents_of(piece, rules.text_field, notes, any_row=rules.chat is False):
            split = split_of(piece, document, rules.seed, rules.val_hashes)
            text_bytes[split] += len(document)
            if rules.dedup:
                digest = hashlib.blake2b(document, digest_size=8).digest() if is_whole else bytes(8)
                documents[split].append((int.from_bytes(digest, 'little'), len(document), len(stretches[split])))
            cut = list(cut_up(document, STRETCH_BYTES))
            stretches[split] += cut
            begins_document[split] += [begins] + [False] * (len(cut) - 1)
            ends_document[split] += [False] * (len(cut) - 1) + [piece.ends_document]

    result = {}
    for split, texts in stretches.items():
        tokens, ends = tokenizer.encode_flat(texts)
        is_begin, is_end = np.array(begins_document[split]), np.array(ends_document[split])
        first, n_bos = np.concatenate(([0], ends[:-1]))[is_begin], len(tokenizer.bos)
        # Tokens for the same place are inserted in the order of these lists: eot, then the next document's bos.
        places = np.concatenate((ends[is_end], np.repeat(first, n_bos)))
        added = np.array([tokenizer.eot] * int(is_end.sum()) + [*tokenizer.bos] * len(first))
        tokens = np.insert(_as_shards_hold_it(tokens, tokenizer), places, added)
        result[split] = Encoded(tokens, int(is_end.sum()), text_bytes[split])
        if rules.dedup:
            hashes, n_bytes, first = zip(*documents[split], strict=True)
            n_tokens = np.add.reduceat(np.diff(ends, prepend=0) + is_end + n_bos * is_begin, first)
            sizes = np.stack((n_tokens, n_bytes), axis=1)
            result[split] = result[split]._replace(hashes=np.array(hashes, dtype=np.uint64), sizes=sizes)
    return result


def conversations_in(pieces, rules):
    """([(hash, bytes)] of the conversations in a unit's pieces that the template can write, Counter of those that are
    left out): what encode_unit() would keep."""
    notes = collections.Counter()
    kept = _conversations(pieces, rules, notes)
    return [(hash_of(piece, head, rules.seed), size) for piece, head, size, _ in kept], notes


def _conversations(pieces, rules, notes):
    """Yield (piece, what the hash is of, bytes, its examples) of each conversation, and count in the notes what is left
    out. The hash is of the conversation, of a pair that of its prompt: other answers to a prompt on which a model was
    trained would be no validation."""
    chat_encoder = worker_chat_encoder(rules.tokenizer, rules.folder, rules.templates)
    are_pairs = rules.chat_fields == PREFERENCES
    more = {} if are_pairs else {'train_on_input': rules.train_on_input}
    as_conversation = functools.partial(conversation_of, fields=rules.chat_fields, **more)
    if are_pairs:
        as_conversation = functools.partial(pair_of, as_text=isinstance(chat_encoder, TextEncoder))
    for piece in pieces:
        for document in documents_of(piece, None, notes, as_conversation):
            try:
                examples_of = chat_encoder.pair if are_pairs else chat_encoder.examples
                found = list(examples_of(document.decode(), rules.fold_system, **more))
            except ValueError as reason:
                notes[f'{piece.origin}: {reason}, left out'] += 1
            else:
                yield piece, prompt_of(document) if are_pairs else document, len(document), found


def _encode_conversations(pieces, rules, notes):
    tokenizer = worker_tokenizer(rules.tokenizer, rules.folder, 'reference')[0]
    examples = collections.defaultdict(list)  # split -> (ids, flags, text)
    for piece, head, _, found in _conversations(pieces, rules, notes):
        examples[split_of(piece, head, rules.seed, rules.val_hashes)] += found
        notes[CONVERSATIONS] += 1
        if len(found) > 1 and rules.chat_fields != PREFERENCES:
            notes[READ_AGAIN] += sum(len(ids) for ids, _, _ in found[:-1])

    result = {}
    for split, found in examples.items():
        ids, flags, texts = zip(*found, strict=True)
        sizes = [len(one) for one in ids]
        if rules.chat_fields == PREFERENCES:  # both answers of a pair stand in one window
            sizes = [chosen + rejected - 1 for chosen, rejected in zip(sizes[::2], sizes[1::2], strict=True)]
        result[split] = Encoded(
            tokens=_as_shards_hold_it(np.concatenate(ids), tokenizer),
            documents=len(found),
            text_bytes=sum(len(text.encode()) for text in texts),
            flags=np.concatenate(flags),
            longest=max(sizes),
        )
    return result


class Seen:
    """The hashes of all documents seen so far, 8 bytes each, in memory and in a file from which a later run resumes."""

    def __init__(self, path, count):
        """count: how many hashes of the file are valid; later ones were written after the state had been saved."""
        self._file = open(path, 'a+b')
        self._file.truncate(8 * count)
        self._file.seek(0)
        self._sorted, self._new = np.sort(np.frombuffer(self._file.read(), dtype=np.uint64)), set()

    def without_repeats(self, part):
        """(the Encoded without documents that were seen before, how many of these it had)."""
        places = np.searchsorted(self._sorted, part.hashes)
        known = np.append(self._sorted, np.uint64(0))[places] == part.hashes
        keep = np.zeros(len(known), dtype=bool)
        for number, digest in enumerate(part.hashes.tolist()):
            keep[number] = digest == 0 or not (known[number] or digest in self._new)  # 0: part of a longer one
            if digest and keep[number]:
                self._new.add(digest)
        self._file.write(part.hashes[keep & (part.hashes != 0)].tobytes())
        if len(self._new) > MANY_NEW:
            self._sorted, self._new = np.union1d(self._sorted, np.array(list(self._new), dtype=np.uint64)), set()
        n_repeats = int((~keep).sum())
        if not n_repeats:
            return part, 0
        tokens = part.tokens[np.repeat(keep, part.sizes[:, 0])]
        text_bytes = int(part.sizes[keep, 1].sum())
        return part._replace(tokens=tokens, documents=part.documents - n_repeats, text_bytes=text_bytes), n_repeats

    def sync(self):
        """Bring the file to disk. Returns how many hashes are in it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell() // 8


def _as_shards_hold_it(tokens, tokenizer):
    """The tokens in the dtype of the shards, after a check: astype() would turn 128,000 into the uint16 62,464."""
    largest = tokens.max(initial=0)
    if largest >= tokenizer.vocab_size:
        raise ValueError(f'{tokenizer.name}: it wrote the id {largest}, and says that it has {tokenizer.vocab_size}')
    return tokens.astype(dtype_for(tokenizer.vocab_size))
