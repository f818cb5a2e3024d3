"""Conversations for tests: chat templates, a tokenizer with one, and what a prepared dataset holds."""

import hashlib
import json

import numpy as np
import transformers
from prepared import meta_of, tokens_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from text import chat_rows, conversations
from text.tokenizer import FileTokenizer, tokenizer_of

LEARNED, FIRST = 1, 2
SPECIAL_TOKENS = ['<|end|>', '<|im_start|>', '<|im_end|>', '<s>', '</s>', '[INST]', '[/INST]', '<|begin_of_text|>']
SPECIAL_TOKENS += ['<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>']

CHATML = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\
{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
QWEN3 = """\
{%- set last = namespace(user=0) %}{%- for message in messages %}{%- if message.role == 'user' %}\
{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}{%- for message in messages %}\
{%- set content = message.content %}{%- set thought = '' %}{%- if '</think>' in content %}\
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}\
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}\
{%- if message.role == 'assistant' and loop.index0 > last.user %}\
{{- '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + content + '<|im_end|>\\n' }}{%- else %}\
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def messages_of(turns):
    return [{'role': role, 'content': content} for role, content in turns]


# Tests rely on what a tokenizer learns of it: ' the' is one token, ' d' and '\n  ' are not.
PLAIN_TEXT = 'the user asks the assistant, and the system is there\n'


def make_tokenizer(folder, template=None, eos='<|im_end|>', bos='<s>', trim_offsets=True, text=PLAIN_TEXT):
    """Save a byte-level BPE with special tokens and a chat template, as transformers does. Returns the folder. text:
    what its words are learned from; of another text they may also cross spaces and line ends."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=text == PLAIN_TEXT)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)  # as GPT-2's and Llama 3's do
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text] * 20, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token=bos)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return str(folder)


def write_rows(path, rows):
    path.write_text(''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows), encoding='utf-8')
    return path


def encoder_of(folder):
    files = FileTokenizer(f'{folder}/tokenizer.json', '<|im_end|>')
    return conversations.ChatEncoder(folder, files.eot), files


def learned_in(ids, flags, decode):
    """The text of each stretch of tokens that is learned."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags & LEARNED, [0]])))
    return [decode(ids[start:end]) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def examples_of(encoder, files, row):
    """For each training example of a row: (its text, [the texts in it that are learned])."""
    found = []
    for ids, flags, text in encoder.examples(chat_rows.conversation_of(row)):
        assert len(ids) == len(flags) and flags[0] & FIRST and not (flags[1:] & FIRST).any()
        found.append((text, learned_in(ids, flags, files.decode)))
    return found


def flags_of(dataset, split):
    """All flags of a split; checks every mask against meta.json."""
    shards = meta_of(dataset)['splits'][split]['shards']
    for shard in shards:
        content = (dataset / shard['mask_file']).read_bytes()
        assert len(content) == shard['tokens'] and hashlib.sha256(content).hexdigest() == shard['mask_sha256']
    return np.concatenate([np.fromfile(dataset / shard['mask_file'], dtype=np.uint8) for shard in shards])


def conversations_of(dataset, split):
    """[(decoded text, [decoded learned parts])] of the conversations of a split; checks the totals in meta.json."""
    tokenizer, tokens, flags = tokenizer_of(dataset), tokens_of(dataset, split), flags_of(dataset, split)
    starts = [*np.flatnonzero(flags & FIRST), len(tokens)]
    assert starts[0] == 0
    found = []
    for start, end in zip(starts[:-1], starts[1:], strict=True):
        parts = learned_in(tokens[start:end], flags[start:end], tokenizer.decode)
        found.append((tokenizer.decode(tokens[start:end]), parts))
    totals = meta_of(dataset)['splits'][split]
    assert totals['documents'] == len(found) and totals['longest'] == max(np.diff(starts))
    assert totals['learned_tokens'] == (flags & LEARNED).sum() and not (flags > 7).any()
    assert totals['bytes'] == sum(len(text.encode()) for text, _ in found)
    return found
