"""What a training run would read of a dataset, for people to look at: prepare_data.py --peek=NAME"""

import itertools
from pathlib import Path

import numpy as np

import data
from dataset.mixture import folder_of, names_in, parse_stages
from dataset.shards import LEARNED, read_meta
from layout import counted
from text.conversations import marked_text
from text.tokenizer import tokenizer_of


def peek(dataset, data_dir, n_windows=8, n_tokens=256, n_chats=2):
    """Print the beginnings of a run's first windows, with their source and the borders of documents. If windows hold
    conversations, print the first ones whole, with what is learned in brackets."""
    keys = {'dataset': dataset, 'data_dir': data_dir, 'dataset_stages': (), 'windows': 'stream'}
    metas = [read_meta(Path(data_dir, name)) for name in names_in(parse_stages(keys))]
    longest = max((meta['splits']['train']['longest'] for meta in metas if meta.get('masked')), default=None)
    if longest:  # cut no conversation; text goes together with conversations only as documents
        keys['windows'] = 'documents'
    length = longest or n_tokens
    mixture = data.open_mixture({**keys, 'block_size': length, 'vocab_size': None}, 'train')
    mixture.plan(1, n_windows)
    decode = tokenizer_of(folder_of(keys)).decode
    as_long = f', as long as the longest {"pair" if metas[0].get("pairs") else "conversation"}' if longest else ''
    print(f'windows of {counted(length, "token")}{as_long}; those of a run have its --block_size')
    for number, window in zip(*mixture.locate(np.arange(n_windows), seed=1337), strict=True):
        source = mixture.sources[number]
        where = f'{mixture.names[number]}, window {window:,} of {source.n_windows:,}'
        if source.is_chat:
            chats = conversations_in(*(row[0] for row in source.read([window])))
            print(f'--- {where}, {counted(len(chats), "conversation")} in it, what is learned in 【 】:')
            for chat in chats[:n_chats]:
                print(marked_text(*chat, decode, '【', '】'), end='\n\n')
            continue
        tokens = np.array(source.read([window])[0]).ravel()[:n_tokens]
        parts = np.split(tokens, np.flatnonzero(tokens == source.eot) + 1)
        text = '【end of document】\n'.join(decode(part[part != source.eot]) for part in parts)
        n_ends = len(parts) - 1
        print(f'--- {where}, {counted(n_ends, "document")} {"ends" if n_ends == 1 else "end"} in it:\n{text}')


def conversations_in(x, y, starts):
    """[(tokens, flags)] of the conversations in one window. x, y, starts: one row each of Conversations.read()."""
    borders = [*starts[starts < len(x)].tolist(), len(x)]
    chats = []
    for begin, end in itertools.pairwise(borders):
        learned = y[begin:end] >= 0
        if learned.any():  # otherwise it is padding
            last = begin + int(np.flatnonzero(learned)[-1]) + 1  # a conversation ends with an answer
            tokens = np.append(x[begin:last], y[last - 1])
            chats.append((tokens, np.append(False, learned[: last - begin]) * np.uint8(LEARNED)))
    return chats
