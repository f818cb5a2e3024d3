"""
Opens a dataset: finds the files of a split and reads what meta.json says of them.

    dataset = open_dataset('data', 'stdlib-bpe2048', 'train', block_size=1024)
    rows = dataset.read([0, 17])  # windows by their numbers

Files are shards with a header (this project's, llm.c's, modded-nanogpt's), nanoGPT's headerless train.bin and val.bin,
or .npy files; prepare_data.py's meta.json describes them. To read another format of token files, add their ending to
ENDINGS below and their layout to read_shard() in dataset/shards.py, which returns the tokens of a file as a numpy array
or memmap of one dimension, of integers. To read another format of texts, see CONTRIBUTING.md.
"""

import difflib
import math
import os
import re
from pathlib import Path

import numpy as np

from dataset.shards import read_meta, read_shard
from dataset.windows import RandomTokens, TokenDataset, fingerprint_of, say_once

ENDINGS = ('.bin', '.npy')  # of the files in a dataset's folder that hold tokens
PREPARED_FILES = ('meta.json', 'unfinished.json')  # prepare_data.py keeps the second until it writes the first
# In a file's name, the split must be a word of its own: fineweb_train_000001.bin yes, constrained.bin no.
SPLIT_WORDS = {'train': 'train|training', 'val': 'val|valid|validation'}
TOKEN_BYTES = 'token_bytes.npy'  # beside the shards: bytes of text that each token stands for
GPT2_VOCAB_SIZE = 50257  # assumed for files without meta.json
SYNTHETIC_VOCAB_SIZE = 50304  # GPT-2's padded to a multiple of 64


def open_dataset(data_dir, dataset, split, block_size, vocab_size=None, windows='stream', packing=True):
    """Open a split ('train' or 'val') of the folder data_dir/dataset; Conversations if its meta.json says "masked", and
    Pairs if it also says "pairs".

    windows: 'stream' joins documents, 'documents' keeps them apart. vocab_size: None = the dataset's. packing: whether
    windows of conversations, or of documents that are kept apart, hold several of them.
    dataset='synthetic': random tokens, a pure function of their position.
    No tokens are read except a few for the fingerprint, or all of them where the documents' borders are looked for.
    Raises FileNotFoundError for a dataset, split or file that does not exist; ValueError for a damaged one, for an id
    known to be outside the vocabulary, and for data that are too short for block_size.
    """
    if dataset == 'synthetic':
        tokens = RandomTokens(vocab_size or SYNTHETIC_VOCAB_SIZE, split)
        return class_of(windows, {})(
            dataset, split, block_size, int(tokens.vocab_size), {}, [dataset], lambda name: tokens, packing
        )
    folder, command = Path(data_dir) / dataset, _prepare_command(data_dir, dataset)
    raw = folder if folder.exists() else Path(dataset)  # as the user sees it, outside of data_dir
    if raw.exists() and not any(path.suffix in ENDINGS or path.name in PREPARED_FILES for path in raw.glob('*')):
        raise ValueError(
            f'dataset={dataset}: {raw} holds no tokens; if it is text, first `python prepare_data.py --dataset={raw}`, '
            'to fine-tune with --tokenizer=MODEL_FOLDER: its last lines say how to train on that'
        )
    if not folder.is_dir():
        found = sorted({path.parent.name for path in Path(data_dir).glob('*/*') if path.suffix in ENDINGS})
        holds = f'{os.path.abspath(data_dir)} holds: {", ".join(found) or "no dataset"}'
        close = difflib.get_close_matches(dataset, found, n=1)
        hint = f'did you mean {close[0]}? If not, ' if close else ''
        raise FileNotFoundError(f'dataset={dataset}: there is no {folder}; {hint}make it with {command}; {holds}')
    meta = read_meta(folder)
    if meta.get('masked') and 'splits' not in meta:
        raise ValueError(f'{folder}/meta.json: found masked without splits, expected the names of the masks')
    if not meta and (folder / 'unfinished.json').exists():
        raise ValueError(f'{folder}: half prepared; finish it with the same {command}')
    facts = meta.get('splits', {}).get(split, {})
    allowed = vocab_size or meta.get('vocab_size', math.inf)
    if facts.get('max_token', -1) >= allowed:
        given = f'{folder}: split {split!r} has token id {facts["max_token"]}, not below vocab_size={allowed}'
        n = meta.get('vocab_size', facts['max_token'] + 1)
        raise ValueError(
            f"{given}: leave out --vocab_size, or give its tokenizer's {n}; where --init_from decides it, prepare the "
            f"data with that model's tokenizer, or save the model after transformers' resize_token_embeddings({n})"
        )
    if 'vocab_size' not in meta:
        assumed = f'vocab_size={vocab_size} of the run' if vocab_size else f"GPT-2's vocab_size={GPT2_VOCAB_SIZE}"
        aside = 'for other tokens give --vocab_size; a meta.pkl is never opened, for it can run code'
        if vocab_size is None:
            meta['eot_token'] = GPT2_VOCAB_SIZE - 1
        say_once(f'{folder}: no vocab_size in a meta.json; assuming {assumed}, and uint16 without a header ({aside})')
    vocab_size = vocab_size or meta.get('vocab_size', GPT2_VOCAB_SIZE)
    lengths = {str(folder / shard['file']): shard['tokens'] for shard in facts.get('shards', [])}

    def open_shard(path):
        tokens = read_shard(path, meta.get('dtype'))
        if (n := lengths.get(path, len(tokens))) != len(tokens):
            raise ValueError(f'{path}: its size is {len(tokens):,} tokens, meta.json says {n:,}; prepare both again')
        return tokens.view(np.ndarray)  # a plain array: slicing an np.memmap takes four times as long

    shards = _find_shards(folder, split, meta)
    return class_of(windows, meta)(str(folder), split, block_size, vocab_size, meta, shards, open_shard, packing)


def class_of(windows, meta):
    """The class that cuts a dataset into windows."""
    if windows == 'stream' and not meta.get('masked'):
        return TokenDataset
    from dataset import packed  # here, since plain text needs none of it

    if not meta.get('masked'):
        return packed.Documents
    return packed.Pairs if meta.get('pairs') else packed.Conversations


def has_split(data_dir, dataset, split):
    """Whether the folder data_dir/dataset has files of a split."""
    folder = Path(data_dir) / dataset
    if not folder.is_dir():
        return dataset == 'synthetic'
    return bool(_names_of_shards(folder, split, read_meta(folder)))


def _names_of_shards(folder, split, meta):
    """Names of a split's files in order: those that meta.json lists, else those that have the split in their names.
    Raises ValueError if these differ in more than numbers, since some may be masks or lengths."""
    if 'splits' in meta:
        return [shard['file'] for shard in meta['splits'].get(split, {}).get('shards', [])]
    word = re.compile(rf'(?<![a-z])({SPLIT_WORDS[split]})(?![a-z])')
    names = sorted(name for name in os.listdir(folder) if name.endswith(ENDINGS) and word.search(name.lower()))
    stems = [name.rpartition('.')[0] for name in names]
    if len({re.sub(r'\d+', '', stem) for stem in stems}) > 1 or len({*stems}) < len(stems):
        kinds = {re.sub(r'\d+', '', name): name for name in names}
        found = f'{len(names)} files may be the tokens of split {split!r}, among them {", ".join(kinds.values())}'
        raise ValueError(
            f'{folder}: {found}: leave only the files of tokens, whose names may differ in numbers; tokens of another '
            'source go into a folder of their own, for --dataset=ONE:0.5,OTHER:0.5'
        )
    # Digits are compared as numbers, so that train_10 comes after train_9.
    return sorted(names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r'(\d+)', name)])


class Absent(TokenDataset):
    """A split that is not on this machine, for a plan of a run elsewhere: nobody knows more of it than its name says,
    as fineweb-10BT-gpt2 does. It counts as text in full windows; n_tokens and n_windows may be inf."""

    is_absent = True

    def __init__(self, name, split, block_size, vocab_size):
        self.name, self.split, self.block_size, self.packing, self.eot = name, split, block_size, True, None
        self.fingerprint = name
        size = re.search(r'-(\d+)BT\b', name)  # of the hub's samples: tokens of GPT-2, in billions
        self.n_tokens = int(size[1]) * 10**9 if size else math.inf
        self.n_windows = self.n_tokens // block_size if size else math.inf
        tokenizer = re.search(r'-(?:(gpt2)|(bytes)|bpe(\d+))$', name)
        if not vocab_size and not tokenizer:
            raise ValueError(
                f'{name} is not on this machine, and its name does not say how many tokens its vocabulary has: give '
                'that, as in --vocab_size=50304'
            )
        self.vocab_size = vocab_size or int(tokenizer[3] or (GPT2_VOCAB_SIZE if tokenizer[1] else 257))
        known = f'some {size[1]}B tokens, by its name' if size else 'how many tokens it has is not known'
        self.line = f'{name} is not on this machine: {known}'


def is_absent(data_dir, dataset):
    """Whether there is nothing of that name, neither prepared nor as text."""
    return dataset != 'synthetic' and not (Path(data_dir, dataset).exists() or Path(dataset).exists())


def fingerprints_of(meta):
    """fingerprint_of() each split of a meta.json, as far as it has one."""
    splits = meta.get('splits', {}).values()
    return {fingerprint_of(facts, facts.get('tokens'), bool(meta.get('masked'))) for facts in splits} - {None}


def _find_shards(folder, split, meta):
    """Paths of a split's shards in order."""
    names = _names_of_shards(folder, split, meta)
    if 'splits' in meta:
        shards = meta['splits'].get(split, {}).get('shards', [])
        files = names + [shard['mask_file'] for shard in shards if meta.get('masked')]
        absent = [name for name in files if not (folder / name).exists()]
        if absent:
            raise FileNotFoundError(
                f'{folder}: meta.json lists {len(names)} shards of split {split!r}, {len(absent)} files are missing, '
                f'first {absent[0]}; copy or prepare the dataset again'
            )
    if not names:
        here = f'it holds {", ".join(sorted(os.listdir(folder))[:10]) or "nothing"}'
        other = ', or validate on another dataset, --val_dataset=NAME, or on none, --eval_sequences=0'
        other = other if split == 'val' else ''
        raise FileNotFoundError(f'{folder}: no split {split!r}, {here}; prepare it again, with a --val_fraction{other}')
    return [str(folder / name) for name in names]


def _prepare_command(data_dir, dataset):
    """The command that makes a dataset of this name, as far as the name reveals it."""
    arguments = f'--dataset=FILE_FOLDER_OR_HUB_NAME --name={dataset}'
    if known := re.fullmatch(r'(stdlib|fineweb-10BT|fineweb-100BT|fineweb-edu-10BT)-(.+)', dataset):
        tokenizer = re.sub(r'^bpe(\d+)$', r'bpe --vocab_size=\1', known[2])
        if not re.match(r'(bpe|bytes|gpt2|\w+_(base|edit|harmony))\b', tokenizer):  # of a model, whose folder it was
            tokenizer = f'models/{tokenizer}'
        arguments = f'--dataset={known[1]} --tokenizer={tokenizer}'
    return f'`python prepare_data.py {arguments} --data_dir={data_dir}`'
