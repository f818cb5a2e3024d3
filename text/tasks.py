"""
Tasks that a language model is evaluated on: JSON lines, one item each, of one of four forms.

    {"context": "Question: ...\\nAnswer:", "choices": ["red", "blue"], "gold": 1}     which choice is the likeliest?
    {"contexts": ["The cup", "The bag"], "continuation": "is too big.", "gold": 0}   behind which is it the likeliest?
    {"context": "She opened the", "continuation": "door"}                            would the model say that?
    {"text": "A whole document."}                                                    how likely is it?

Any item but a text may have a "delimiter" (between context and choice, " " without one), a "description" (before all
else) and a "group" (its few-shot examples are of the same one). These lie beside TASK.jsonl in TASK.fewshot.jsonl.

The rules are those of EleutherAI's lm-evaluation-harness 0.4.13: api/task.py, api/model.py, api/samplers.py and
models/huggingface.py there.
"""

import json
import math
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

FORMS = {
    'choices': {'context', 'choices', 'gold'},
    'contexts': {'contexts', 'continuation', 'gold'},
    'continuation': {'context', 'continuation'},
    'text': {'text'},
}
OPTIONAL = {'delimiter', 'description', 'group'}
FEWSHOT_SEED = 1234  # the harness's


@dataclass
class Item:
    """One row. pairs: [(context, continuation), ...] of which the log-likelihoods are wanted, or [('', text)]."""

    form: str
    pairs: list
    lengths: list  # of what acc_norm compares, in characters, without the delimiter
    byte_lengths: list
    gold: int | None
    group: str | None
    description: str
    place: str  # file and row, for messages


class Task(NamedTuple):
    name: str
    form: str
    items: list  # of Item


class Request(NamedTuple):
    """The log-likelihood of the last n_targets of these tokens, each behind all tokens before it, is wanted."""

    tokens: list
    n_targets: int


# --- files ------------------------------------------------------------------------------------------------------------


def read_task(path, num_fewshot=0, limit=None):
    """The Task in a file. num_fewshot: so many examples with their answers stand before each item. limit: only the
    first so many items. Raises ValueError with the number of a row that is none, or where examples are too few."""
    path = Path(path)
    all_items = read_items(path)
    items = all_items[:limit]
    if num_fewshot and items[0].form == 'text':
        raise ValueError(f'num_fewshot={num_fewshot}: {path} holds texts, which have no answers: use --num_fewshot=0')
    if num_fewshot:
        add_examples(items, all_items, path, num_fewshot)
    for item in items:
        item.pairs = [(item.description + context, continuation) for context, continuation in item.pairs]
    return Task(path.stem, items[0].form, items)


def read_items(path):
    items = []
    with open(path, encoding='utf-8') as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                items.append(item_of(line, f'{path}, row {number}'))
                if items[-1].form != items[0].form:
                    forms = f'has {items[-1].form!r}, those before it have {items[0].form!r}'
                    raise ValueError(f'{path}, row {number}: {forms}: one file holds items of one form')
    if not items:
        raise ValueError(f'{path} has no rows: expected JSON lines as in docs/evaluate.md')
    return items


def item_of(line, place):
    """An Item. Raises ValueError that says what is wrong with the row."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f'{place}: not JSON ({error}): {line.strip()[:60]}') from None
    keys = set(row) if isinstance(row, dict) else set()
    form = next((form for form, needed in FORMS.items() if keys - OPTIONAL == needed), None)
    if form is None:
        forms = ', '.join('+'.join(sorted(needed)) for needed in FORMS.values())
        raise ValueError(f'{place}: has the keys {", ".join(sorted(keys)) or "of no object"}; expected one of {forms}')
    several = [row[key] for key in ('choices', 'contexts') if key in row]
    for texts in several:
        if not isinstance(texts, list) or len(texts) < 2 or not all(isinstance(text, str) for text in texts):
            raise ValueError(f'{place}: {form} is {json.dumps(texts)[:60]}; expected two texts or more')
        gold = row['gold']
        if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < len(texts):
            raise ValueError(f'{place}: gold={json.dumps(gold)}; expected a number from 0 to {len(texts) - 1}')
    for key in keys & {'context', 'continuation', 'text', *OPTIONAL}:
        if not isinstance(row[key], str):
            raise ValueError(f'{place}: {key} is {json.dumps(row[key])[:60]}; expected a text')
    answers = row['choices'] if form == 'choices' else [row.get('continuation', row.get('text'))]
    if '' in answers:
        raise ValueError(f'{place}: an empty {"choice" if form == "choices" else form}, which has no probability')
    delimiter = row.get('delimiter', ' ')
    if form == 'text':
        pairs, normalised = [('', row['text'])], [row['text']]
    elif form == 'contexts':
        pairs, normalised = [(context, delimiter + row['continuation']) for context in row['contexts']], row['contexts']
    else:
        pairs, normalised = [(row['context'], delimiter + answer) for answer in answers], answers
    lengths = [[len(text) for text in normalised], [len(text.encode('utf-8', 'replace')) for text in normalised]]
    return Item(form, pairs, *lengths, row.get('gold'), row.get('group'), row.get('description', ''), place)


def add_examples(items, all_items, path, num_fewshot):
    """Write examples with their answers before the contexts, as the harness does: an item with a group has the first
    ones of its group (so does MMLU), others have some that are drawn anew for each item. Without a file of examples
    they are drawn from the task's other items."""
    beside = path.with_name(f'{path.stem}.fewshot.jsonl')
    is_own = not beside.exists()
    examples = all_items if is_own else read_items(beside)
    draws, before = random.Random(FEWSHOT_SEED), []
    for item in items:
        pool = [example for example in examples if example.group == item.group]
        if len(pool) < num_fewshot + is_own:
            where = f'{path if is_own else beside}{f", group {item.group}" if item.group else ""}'
            raise ValueError(f'num_fewshot={num_fewshot}: {where} has {len(pool)} examples, too few for {item.place}')
        chosen = pool if item.group else draws.sample(pool, num_fewshot + is_own)
        chosen = [example for example in chosen if example is not item][:num_fewshot]
        before.append(''.join(''.join(example.pairs[example.gold or 0]) + '\n\n' for example in chosen))
    for item, text in zip(items, before, strict=True):
        item.pairs = [(text + context, continuation) for context, continuation in item.pairs]


# --- tokens -----------------------------------------------------------------------------------------------------------


class NativeEncoder:
    """A tokenizer of text.tokenizer. Before an empty context comes the end of a document, which starts the next one."""

    def __init__(self, tokenizer):
        self.tokenizer, self.prefix = tokenizer, tokenizer.eot

    def encode(self, texts, special=True):
        return [array.tolist() for array in self.tokenizer.encode_batch(texts)]


class TransformersEncoder:
    """A tokenizer of transformers, with the special tokens that it adds by itself: BOS, for some."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        starts = [tokenizer.bos_token_id, tokenizer.eos_token_id]
        self.prefix = next((token for token in starts if token is not None), None)
        if self.prefix is None:
            raise ValueError(f'{tokenizer.name_or_path}: the tokenizer has neither BOS nor EOS, to begin a text with')
        self.spelled = tokenizer.decode([self.prefix])

    def encode(self, texts, special=True):
        """special=False: without the tokens that it adds. A text that spells the prefix gets none, either."""
        tokens = [None] * len(texts)
        for adds in (True, False):
            numbers = [n for n, text in enumerate(texts) if (special and not text.startswith(self.spelled)) == adds]
            some = self.tokenizer([texts[n] for n in numbers], add_special_tokens=adds).input_ids if numbers else []
            for number, ids in zip(numbers, some, strict=True):
                tokens[number] = ids
        return tokens


def requests_of(task, encoder, window):
    """[[Request, ...] of each item] by the harness's rules, for a model that sees `window` tokens. Raises ValueError
    for a continuation that is longer than that."""
    if task.form == 'text':
        documents = encoder.encode([item.pairs[0][1] for item in task.items])
        return [rolling(document, encoder.prefix, window) for document in documents]
    pairs = [with_spaces_behind(*pair) for item in task.items for pair in item.pairs]
    plain = list(dict.fromkeys(text for context, answer in pairs if context for text in (context, context + answer)))
    tokens = dict(zip(plain, encoder.encode(plain), strict=True))
    alone = list(dict.fromkeys(answer for context, answer in pairs if not context))
    tokens_alone = dict(zip(alone, encoder.encode(alone, special=False), strict=True))
    requests, left = [], iter(pairs)
    for item in task.items:
        requests.append([])
        for context, answer in (next(left) for _ in item.pairs):
            if context:  # encoded together, since tokens may reach over the border
                before, whole = tokens[context], tokens[context + answer]
                targets = whole[len(before) :]
            else:
                before, targets = [encoder.prefix], tokens_alone[answer]
                if targets[:1] == before:
                    targets = targets[1:]
            if not 0 < len(targets) <= window:
                why = f'is longer than the {window} tokens that the model sees' if targets else 'adds no token'
                raise ValueError(f'{item.place}: {answer[:40]!r} has {len(targets)} tokens: it {why}')
            requests[-1].append(Request([*before, *targets][-(window + 1) :], len(targets)))
    return requests


def with_spaces_behind(context, continuation):
    """White space that ends the context belongs to the continuation: words are learned with the space before them."""
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation


def rolling(tokens, prefix, window):
    """Requests for all tokens of a document, each once: windows side by side, the last one with more context."""
    whole, requests = [prefix, *tokens], []
    for first in range(0, len(tokens), window):
        end = min(first + window, len(tokens))
        requests.append(Request(whole[max(0, end - window) : end + 1], end - first))
    return requests


# --- scores -----------------------------------------------------------------------------------------------------------


def scores_of(task, log_likelihoods, greedy):
    """{name of the score: (value, standard error)}.

    log_likelihoods: [[nats of each request] of each item]; greedy: [[whether all its targets are the likeliest ones]].
    acc_norm divides by characters, acc_bytes by bytes of UTF-8. Perplexities of texts are per word and per byte; their
    errors are those of a ratio of sums over documents, carried through exp() (delta method).
    """
    items = task.items
    if task.form in ('choices', 'contexts'):
        scores = {}
        for name in ('acc', 'acc_norm', 'acc_bytes') if task.form == 'choices' else ('acc',):
            hits = []
            for item, nats in zip(items, log_likelihoods, strict=True):
                sizes = {'acc': 1, 'acc_norm': item.lengths, 'acc_bytes': item.byte_lengths}[name]
                hits.append(np.argmax(np.array(nats) / sizes) == item.gold)
            scores[name] = mean_of(hits)
        return scores
    totals = [sum(nats) for nats in log_likelihoods]
    if task.form == 'continuation':
        mean, error = mean_of(totals)
        return {
            'acc': mean_of([int(all(flags)) for flags in greedy]),
            'perplexity': perplexity_of(mean, error),
        }
    words = [len(re.split(r'\s+', item.pairs[0][1])) for item in items]
    per_word, per_byte = ratio_of(totals, words), ratio_of(totals, [item.byte_lengths[0] for item in items])
    scores = {'bits_per_byte': (-per_byte[0] / math.log(2), per_byte[1] / math.log(2))}
    for name, (mean, error) in (('word_perplexity', per_word), ('byte_perplexity', per_byte)):
        scores[name] = perplexity_of(mean, error)
    return scores


def perplexity_of(mean, error):
    """(exp(-mean), its standard error); inf where a float does not hold it: a model that knows nothing, a long text."""
    perplexity = math.exp(-mean) if -mean < 709 else math.inf
    return perplexity, perplexity * error


def mean_of(values):
    """(mean, its standard error: nan of a single value)."""
    values = np.array(values, dtype=float)
    return values.mean().item(), (values.std(ddof=1) / math.sqrt(len(values))).item() if len(values) > 1 else math.nan


def ratio_of(sums, sizes):
    """(sum of sums / sum of sizes, its standard error, of the deviations of single documents from that ratio)."""
    sums, sizes = np.array(sums, dtype=float), np.array(sizes, dtype=float)
    ratio = sums.sum() / sizes.sum()
    return ratio.item(), mean_of((sums - ratio * sizes) / sizes.mean())[1]
