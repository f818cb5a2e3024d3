"""
Tasks to evaluate a language model on. A task is a file of JSON lines, one item per line, in one of five forms:

    {"context": "Question: ...\\nAnswer:", "choices": ["red", "blue"], "gold": 1}     which choice is the likeliest?
    {"contexts": ["The cup", "The bag"], "continuation": "is too big.", "gold": 0}   after which is it the likeliest?
    {"context": "She opened the", "continuation": "door"}                            would the model say that?
    {"text": "A whole document."}                                                    how likely is it?
    {"prompt": "2 + 3 =", "answer": "5", "stop": ["\\n"], "rule": "number"}            does it write the answer?

What the model writes after a prompt ends with one of the texts "stop", or after "max_new_tokens" (if not given, 256, or
what the file's longest prompt leaves of the model's positions).
grading.py explains "rule" and "pattern", which decide whether it is right. Beside a reward of one's own (reward.py) a
row with a prompt needs neither answer nor rule. in_our_form() says which rows of other programs are read, too.
In every form but "text" a row may have a "delimiter" between context and choice (" " if not given), a "description",
which comes before everything else, and a "group", from which its few-shot examples are taken. Few-shot examples are in
TASK.fewshot.jsonl beside TASK.jsonl. The first row may have "num_fewshot", the default number of examples, and any row
"chance", the score of a guess.

Items are written and scored by the rules of EleutherAI's lm-evaluation-harness 0.4.13 (api/task.py, api/model.py,
api/samplers.py and models/huggingface.py there), or with protocol='core' by those of CORE (DCLM, arXiv 2406.11794) as
nanochat implements it.
"""

import collections
import json
import math
import os
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evaluation.grading import Rule
from evaluation.reward import SCORE
from text.chat_rows import CHOICES, CONTEXTS, MEDIA, SYSTEMS, question_of, tools_of

FORMS = {
    'choices': {'context', 'choices', 'gold'},
    'contexts': {'contexts', 'continuation', 'gold'},
    'continuation': {'context', 'continuation'},
    'text': {'text'},
    'prompt': {'prompt', 'answer'},
}
OF_CHATS = {'tools': list, 'chat_template_kwargs': dict}  # for --apply_chat_template
OPTIONAL = {'delimiter': str, 'description': str, 'group': str, 'num_fewshot': int, 'chance': float, **OF_CHATS}
OF_PROMPTS = {'stop': list, 'rule': str, 'pattern': str, 'max_new_tokens': int}  # also optional
OTHER_NAMES = dict.fromkeys(('question', 'problem', 'query', 'instruction', 'input'), 'prompt')  # in data for rewards
OTHER_NAMES |= dict.fromkeys(('ground_truth', 'solution', 'target', 'response', 'output'), 'answer')
BESIDE_TRUTHS = {'reward_model', 'data_source', 'ability', 'extra_info'}  # of verl: not read, but for a ground_truth
MAX_NEW_TOKENS = 256  # as in the harness
FEWSHOT_SEED = 1234  # as in the harness


@dataclass
class Item:
    """One row. pairs: [(context, continuation), ...] whose log-likelihoods are compared, or [('', text)], or
    [(prompt, answer)]."""

    form: str
    pairs: list
    lengths: list  # of each choice in characters, without the delimiter, for acc_norm
    byte_lengths: list  # the same in bytes, for acc_bytes
    gold: int | None
    group: str | None
    description: str
    delimiter: str
    num_fewshot: int
    chance: float  # score of a guess
    place: str  # file and row, for messages
    of_chat: dict  # tools, chat_template_kwargs and messages before the prompt, which only a chat template can write
    rule: Rule | None = None  # this and the rest are for prompts only
    stop: tuple = ()
    max_new_tokens: int | None = None  # None = what the prompts leave, at most MAX_NEW_TOKENS
    row: str = ''  # all of it as JSON, for a reward of one's own
    read_as: str = ''  # in words, how a row of another program was read

    def judge(self, text, reward=None):
        """{name of a score: value} of what the model has written, by the row's rule and by a reward of one's own."""
        own = {SCORE: reward(text, self)} if reward else {}
        return own | (self.rule.judge(text) if self.rule else {})


class Task(NamedTuple):
    name: str
    form: str
    items: list  # of Item
    num_fewshot: int
    protocol: str  # 'harness' or 'core'
    is_chat: bool = False  # the contexts are what a chat template has written
    note: str = ''  # in words, how its rows were read if they are of another program


class Request(NamedTuple):
    """Asks for the log-likelihood of the last n_targets of these tokens, each given all tokens before it."""

    tokens: list
    n_targets: int


class Prompt(NamedTuple):
    """Asks for what the model writes after these tokens, up to one of the texts `stop`."""

    tokens: list
    stop: tuple
    max_new_tokens: int


# --- files ------------------------------------------------------------------------------------------------------------


def read_task(
    path, num_fewshot=None, limit=None, protocol='harness', chat=None, reward=None, chat_key='apply_chat_template'
):
    """The Task in a file.

    num_fewshot: how many examples with their answers come before each item; None = as the first row says, or none.
    limit: take only this many items, the first ones. chat: function that writes messages as the text that the model is
    to answer; None = write plain text, as texts always are. reward: one of one's own, by which prompts are judged.
    chat_key: the script's key that asks for messages. Raises ValueError with the number of a bad row, or if there are
    too few examples."""
    path, is_own = Path(path), reward is not None
    all_items = read_items(path, is_own)
    items = all_items[:limit]
    num_fewshot = items[0].num_fewshot if num_fewshot is None else num_fewshot
    for item in all_items if protocol == 'core' and items[0].form == 'continuation' else ():
        ((context, answer),) = item.pairs  # in CORE the delimiter, which may be a word, is part of the context
        item.pairs = [(context.strip() + item.delimiter, answer[len(item.delimiter) :])]
    if items[0].form == 'text':
        chat = None
    if items[0].form == 'text' and (num_fewshot or protocol == 'core'):
        keys = (('num_fewshot', num_fewshot, 0), ('protocol', protocol, 'harness'))
        given = ', '.join(f'{key}={value}' for key, value, right in keys if value != right)
        other = ' '.join(f'--{key}={right}' for key, value, right in keys if value != right)
        raise ValueError(f'{given}: {path} holds texts, which have no answers: use {other}')
    if not chat and (odd := next((item for item in items if item.of_chat), None)):
        given = f'{odd.place}: {" and ".join(odd.of_chat)} are for a chat template'
        raise ValueError(f'{given}: --{chat_key} writes them')
    if protocol == 'core' and (chat or items[0].form == 'prompt'):
        given = f'protocol=core: {path}'
        why = 'has prompts, which its rules do not know' if items[0].form == 'prompt' else 'knows no chat template'
        raise ValueError(f'{given} {why}: use --protocol=harness')
    if reward and items[0].form == 'prompt':
        reward('', items[0])  # so that its mistakes show before any work
    examples = [[]] * len(items)
    if num_fewshot:
        examples = examples_of(items, all_items, path, num_fewshot, protocol, is_own)
    written = [with_examples(item, shown, chat) for item, shown in zip(items, examples, strict=True)]
    for item, pairs in zip(items, written, strict=True):  # only now, since items may be examples of others
        item.pairs = pairs
    ways = '; '.join(dict.fromkeys(item.read_as for item in items if item.read_as))
    return Task(path.stem, items[0].form, items, num_fewshot, protocol, bool(chat), ways and f'{path}: {ways}')


def read_items(path, is_own=False):
    items, name = [], str(path).partition('=')[0]
    if '=' in str(path) and not path.exists():  # NAME=PATH is how prepare_data.py takes it
        raise ValueError(f'{path}: `python prepare_data.py --tasks={path}` first; then --tasks=tasks/{name}.jsonl')
    if path.is_dir() or path.suffix in ('.arrow', '.parquet'):
        raise ValueError(f'{path}: a dataset: `python prepare_data.py --tasks=NAME={path}` makes a file of tasks of it')
    if not path.exists():
        raise ValueError(f'{path}: there is no such file of tasks; docs/evaluate.md shows how to write or fetch one')
    with open(path, encoding='utf-8-sig') as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                items.append(item_of(line, f'{path}, row {number}', is_own))
                if items[-1].form != items[0].form:
                    forms = f'has {items[-1].form!r}, those before it have {items[0].form!r}'
                    raise ValueError(f'{path}, row {number}: {forms}: one file holds items of one form')
    if not items:
        raise ValueError(f'{path} has no rows: expected JSON lines as in docs/evaluate.md')
    return items


def item_of(line, place, is_own=False):
    """The Item of a line. place: file and row, for messages. is_own: a reward of one's own judges what is written, so
    that a prompt needs no answer, and its row may hold whatever that reads. Raises ValueError that says what is wrong
    with the row."""
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{place}: not JSON ({error}): {line.strip()[:60]}') from None
    row, before, read_as = in_our_form(given, place, is_own)
    keys = set(row) if isinstance(row, dict) else set()
    optional = OPTIONAL | OF_PROMPTS if 'prompt' in keys else OPTIONAL
    optional = optional | {'answer': object} if 'prompt' in keys and is_own else optional
    form = next((form for form, needed in FORMS.items() if keys - optional.keys() == needed - optional.keys()), None)
    if form is None:
        forms = ', '.join('+'.join(sorted(needed)) for needed in FORMS.values())
        given = f'has the keys {", ".join(sorted(keys)) or "of no object"}; expected one of {forms}'
        of_prompt = {key: OTHER_NAMES.get(key, key) for key in sorted(keys - OPTIONAL.keys() - OF_PROMPTS.keys())}
        if sorted(of_prompt.values()) == sorted(FORMS['prompt']):
            given += '; ' + ', '.join(f'rename {key} to {name}' for key, name in of_prompt.items() if key != name)
        elif keys & {'prompt', 'question'}:
            given += '; a row without an answer, or with keys of its own, needs a --reward=FILE.py:FUNCTION to read it'
        advice = (
            f'; of a known task, `python prepare_data.py --tasks=NAME={place.partition(", row")[0]}` makes such rows'
        )
        raise ValueError(f'{place}: {given}{advice if keys else ""}')
    several = [row[key] for key in ('choices', 'contexts') if key in row]
    for texts in several:
        if not isinstance(texts, list) or len(texts) < 2 or not all(isinstance(text, str) for text in texts):
            raise ValueError(f'{place}: {form} is {json.dumps(texts)[:60]}; expected two texts or more')
        gold = row['gold']
        if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < len(texts):
            raise ValueError(f'{place}: gold={json.dumps(gold)}; expected a number from 0 to {len(texts) - 1}')
    for key in keys & {'context', 'continuation', 'text', 'prompt', *optional}:
        if not isinstance(row[key], kind := optional.get(key, str)):
            names = {str: 'a text', int: 'a whole number', float: 'a number such as 0.25', dict: 'an object'}
            expected = names.get(kind, 'a list of objects' if key == 'tools' else 'a list of texts')
            raise ValueError(f'{place}: {key} is {json.dumps(row[key])[:60]}; expected {expected}')
    if form == 'prompt':
        item = item_of_prompt(row, place, is_own)
        if before is not None:
            item.of_chat['messages'] = before
        return replace(item, row=json.dumps(given) if is_own else '', read_as=read_as)
    answers = row['choices'] if form == 'choices' else [row.get('continuation', row.get('text'))]
    if '' in answers:
        raise ValueError(f'{place}: an empty {"choice" if form == "choices" else form}, which has no probability')
    delimiter = row.get('delimiter', ' ')
    if form == 'text':
        pairs, normalized = [('', row['text'])], [row['text']]
    elif form == 'contexts':
        pairs, normalized = [(context, delimiter + row['continuation']) for context in row['contexts']], row['contexts']
    else:
        pairs, normalized = [(row['context'], delimiter + answer) for answer in answers], answers
    lengths = [[len(text) for text in normalized], [len(text.encode('utf-8', 'replace')) for text in normalized]]
    chance = row.get('chance', 1 / len(pairs) if several else 0.0)
    texts = (row.get('group'), row.get('description', ''), delimiter)
    return Item(
        form, pairs, *lengths, row.get('gold'), *texts, row.get('num_fewshot', 0), chance, place, of_chat_in(row, place)
    )


def of_chat_in(row, place):
    """{'tools', 'chat_template_kwargs'} of a row, as far as it has them, in the form that prepare_data.py reads."""
    try:
        found = {'tools': tools_of(row), 'chat_template_kwargs': row.get('chat_template_kwargs')}
    except ValueError as error:
        raise ValueError(f'{place}: {error}') from error
    return {name: value for name, value in found.items() if value}


def in_our_form(row, place, is_own=False):
    """
    (row, messages before its prompt or None, in words how it was read) of a row with a question and an answer as other
    programs have them: {"question", "answer"} is GSM8K's, {"prompt": [messages], "ground_truth"} verl's, where the
    last may also stand in "reward_model". A row that names no rule is judged by its last number. Of any other row it
    is (the row itself, None, '').

    is_own: a reward of one's own reads the row. Then all keys are allowed, and only those that we know are kept. Raises
    ValueError for a row that can be read in two ways.
    """
    asked = next((key for key in ('prompt', 'question') if isinstance(row, dict) and key in row), None)
    if asked is None:
        return row, None, ''
    truths = {key: row[key] for key in ('answer', 'ground_truth') if key in row}
    if isinstance(row.get('reward_model'), dict) and 'ground_truth' in row['reward_model']:
        truths['reward_model.ground_truth'] = row['reward_model']['ground_truth']
    known = {key: row[key] for key in row if key in OPTIONAL | OF_PROMPTS}
    is_foreign = asked == 'question' or isinstance(row['prompt'], list) or (truths and 'answer' not in truths)
    unread = row.keys() - known.keys() - {asked, *(name.partition('.')[0] for name in truths)}
    if not is_own and (not is_foreign or not truths or unread - BESIDE_TRUTHS):
        return row, None, ''  # which is ours, or is refused
    seen = (*MEDIA, *SYSTEMS, 'functions', 'history', *(asked == 'question') * (*CONTEXTS, *CHOICES))
    if parts := [key for key in seen if row.get(key)]:
        raise ValueError(f'{place}: {asked} stands beside {parts[0]}: write all that the model is to see into "prompt"')
    if len({json.dumps(truth) for truth in truths.values()}) > 1 and not is_own:
        raise ValueError(f'{place}: {" and ".join(truths)} differ: leave out what is not the answer')
    words, before, known['prompt'] = [], None, row[asked]
    if isinstance(row[asked], list):
        system, before, known['prompt'] = parts_of_messages(row[asked], place)
        if system and 'description' in row:
            raise ValueError(f'{place}: a description beside a system message: leave out one')
        known |= {'description': system} if system else {}
        words.append(f'the messages of {asked} as a chat')
    elif asked == 'question':
        words.append('question as the prompt')
    if truths:
        name, truth = next(iter(truths.items()))
        is_number = isinstance(truth, int | float) and not isinstance(truth, bool)
        known['answer'] = str(truth) if is_number and is_foreign else truth
        words += [f'{name} as the answer'] if name != 'answer' and not is_own else []
    read_as = f'reads {", ".join(words)}' if words else ''
    if is_foreign and not is_own:
        read_as += '' if 'rule' in row else '; judges by the last number (rule=number)'
        read_as += f'; leaves out {", ".join(sorted(unread))}' if unread else ''
        known.setdefault('rule', 'number')
    return known, before, read_as


def parts_of_messages(messages, place):
    """(text of the system message or None, messages before the last one, text of the last one) of a prompt that is a
    list of messages."""
    try:
        messages = question_of({'prompt': messages})['messages']
    except ValueError as error:
        raise ValueError(f'{place}: {error}') from error
    *before, last = messages
    if last['role'] != 'user' or not isinstance(last.get('content'), str):
        raise ValueError(f'{place}: the last message is not a text of the user, who is to be answered')
    system = before.pop(0)['content'] if before and before[0]['role'] == 'system' else None
    return system, before, last['content']


def item_of_prompt(row, place, is_own=False):
    """The Item of a row with a prompt."""
    rule = Rule.of(row, place) if not is_own or {'answer', 'rule'} <= row.keys() else None
    answer, stop = rule.answers[0] if rule else row.get('answer'), tuple(row.get('stop', ()))
    if not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f'{place}: stop is {json.dumps(row["stop"])[:60]}; expected a list of texts')
    if (longest := row.get('max_new_tokens')) is not None and longest < 1:
        raise ValueError(f'{place}: max_new_tokens={longest}; expected 1 or more')
    delimiter = row.get('delimiter', ' ')
    # with the answer, in case it becomes an example
    pairs = [(row['prompt'], delimiter + answer if isinstance(answer, str) else '')]
    texts = (row.get('group'), row.get('description', ''), delimiter)
    rest = (row.get('num_fewshot', 0), 0.0, place, of_chat_in(row, place), rule, stop, longest)
    return Item('prompt', pairs, [], [], None, *texts, *rest)


def examples_of(items, all_items, path, num_fewshot, protocol, has_reward=False):
    """[[Item, ...] shown before each item], chosen as in the harness: for an item with a group, the first examples of
    that group (as in MMLU); for others, examples that are drawn anew for each item. Without a file of examples they are
    drawn from the task's other items, none of which may be the same row once more, with its answer. CORE always does
    that, with a generator that is seeded for each item. Raises ValueError if there are too few."""
    beside = path.with_name(f'{path.stem}.fewshot.jsonl')
    is_own = protocol == 'core' or not beside.exists()
    examples = all_items if is_own else read_items(beside, has_reward)
    if silent := next((example.place for example in examples if not example.pairs[0][1]), None):
        raise ValueError(f'num_fewshot={num_fewshot}: {silent} has no answer to show: use --num_fewshot=0')
    row_of = {id(item): repr(replace(item, place='')) for item in [*examples, *items]}
    pools, copies = collections.defaultdict(list), collections.Counter(row_of[id(example)] for example in examples)
    for example in examples:
        pools[example.group].append(example)
    draws, found = random.Random(FEWSHOT_SEED), []

    def others(item, some):
        if protocol == 'core':
            return [example for example in some if example is not item]
        return [example for example in some if not is_own or row_of[id(example)] != row_of[id(item)]]

    for number, item in enumerate(items):
        pool, own = pools[item.group], 1 if protocol == 'core' else is_own * copies[row_of[id(item)]]
        if len(pool) - own < num_fewshot:
            where = f'{path if is_own else beside}{f", group {item.group}" if item.group else ""}'
            raise ValueError(f'num_fewshot={num_fewshot}: {where} has {len(pool)} examples, too few for {item.place}')
        if protocol == 'core':
            pool, draws = others(item, pool), random.Random(FEWSHOT_SEED + number)
        extra = is_own and protocol != 'core'  # one more, in case the item itself is drawn
        shown = others(item, pool if item.group else draws.sample(pool, num_fewshot + extra))[:num_fewshot]
        if len(shown) < num_fewshot:  # it was drawn several times
            shown = draws.sample(others(item, pool), num_fewshot)
        found.append(shown)
    return found


def with_examples(item, shown, chat):
    """The pairs of an item with its description and its examples before the context. With chat they are messages: the
    description is the system message, and each example a question of the user and an answer of the assistant."""
    if not chat:
        texts = [''.join(example.pairs[example.gold or 0]) + '\n\n' for example in shown]
        return [(item.description + ''.join(texts) + context, answer) for context, answer in item.pairs]

    def without_delimiter(answer, item):
        """In a chat the template separates question and answer. (For continuations the harness keeps the space.)"""
        return answer if item.form == 'continuation' else answer[len(item.delimiter) :]

    messages = [{'role': 'system', 'content': item.description}] if item.description else []
    for example in shown:
        context, answer = example.pairs[example.gold or 0]
        messages += example.of_chat.get('messages', ())
        messages.append({'role': 'user', 'content': context})
        messages.append({'role': 'assistant', 'content': without_delimiter(answer, example)})
    messages += item.of_chat.get('messages', ())
    asked = list(dict.fromkeys(context for context, _ in item.pairs))  # all choices have the same context
    written = {context: chat([*messages, {'role': 'user', 'content': context}], item.of_chat) for context in asked}
    return [(written[context], without_delimiter(answer, item)) for context, answer in item.pairs]


# --- tokens -----------------------------------------------------------------------------------------------------------


def requests_of(task, encoder, window):
    """[[Request, ...] of each item] by the rules of the task's protocol, for a model that sees `window` tokens; of
    prompts, see prompts_of(). Raises ValueError for a continuation that is longer than the window."""
    if task.protocol == 'core':
        return requests_of_core(task, encoder, window)
    if task.form == 'text':
        # The harness puts BOS even before documents that begin with BOS. Runs from scratch here have not learned that.
        documents = encoder.encode([item.pairs[0][1] for item in task.items], encoder.begins_texts)
        return [rolling(document, encoder.prefix, window) for document in documents]
    if task.form == 'prompt':
        return prompts_of(task, encoder, window)
    encode = encoder.encode_chats if task.is_chat else encoder.encode
    pairs = [with_spaces_behind(*pair) for item in task.items for pair in item.pairs]
    plain = list(dict.fromkeys(text for context, answer in pairs if context for text in (context, context + answer)))
    tokens = dict(zip(plain, encode(plain), strict=True))
    alone = list(dict.fromkeys(answer for context, answer in pairs if not context))
    tokens_alone = dict(zip(alone, encoder.encode(alone, special=False), strict=True))
    requests, left = [], iter(pairs)
    for item in task.items:
        requests.append([])
        for context, answer in (next(left) for _ in item.pairs):
            if context:  # encoded together, since a token may cross the border
                before, whole = tokens[context], tokens[context + answer]
                targets = whole[len(before) :]
            else:
                before, targets = [encoder.prefix], tokens_alone[answer]
                if targets[:1] == before:
                    targets = targets[1:]
            requests[-1].append(request_of([*before, *targets], len(targets), window, item, answer))
    return requests


def prompts_of(task, encoder, window):
    """[[Prompt] of each item]. Raises ValueError for a prompt that leaves no room for its answer. (The harness cuts off
    its beginning, which makes it another prompt.)"""
    encode = encoder.encode_chats if task.is_chat else encoder.encode
    asked = [tokens or [encoder.prefix] for tokens in encode([item.pairs[0][0] for item in task.items])]
    rooms = [window - len(tokens) for tokens in asked]
    of_others = [room for item, room in zip(task.items, rooms, strict=True) if item.max_new_tokens is None]
    default = max(1, min([MAX_NEW_TOKENS, *of_others]))  # the same for all of them, so that no answer has less room
    prompts = []
    for item, tokens, room in zip(task.items, asked, rooms, strict=True):
        longest = item.max_new_tokens or default
        if longest > room:
            given = f'{item.place}: the prompt has {len(tokens):,} tokens and its answer up to {longest:,}'
            advice = 'shorten it, or raise --block_size as far as the model has positions'
            if task.num_fewshot:
                advice = f'lower num_fewshot, which is {task.num_fewshot}'
            elif room > 0:
                advice = f'lower max_new_tokens to {room}'
            raise ValueError(f'{given}, more than the {window:,} that the model sees: {advice}')
        prompts.append([Prompt(tokens, item.stop, longest)])
    return prompts


def line_of_room(task, requests):
    """[a line], if the longest prompt leaves the answers less than MAX_NEW_TOKENS. requests: of prompts_of()."""
    asked = zip(task.items, requests, strict=True) if task.form == 'prompt' else ()
    most = min((prompt.max_new_tokens for item, (prompt,) in asked if item.max_new_tokens is None), default=math.inf)
    if most >= MAX_NEW_TOKENS:
        return []
    return [f'{task.name}: answers may have {most} tokens, which is what the longest prompt leaves of the positions']


def requests_of_core(task, encoder, window):
    """The same by CORE's rules, which put BOS first and compare tokens, not characters. The scored part is what follows
    the common beginning of the choices, the common end after the contexts, or what follows the context's tokens."""
    requests, pairs = [], [with_spaces_behind(*pair) for item in task.items for pair in item.pairs]
    encoded = iter(encoder.encode([context + answer for context, answer in pairs], special=False))
    contexts = [context for context, _ in pairs] if task.form == 'continuation' else []
    before = iter(encoder.encode(contexts, special=False))
    for item in task.items:
        whole = [next(encoded) for _ in item.pairs]
        if item.form == 'choices':  # a choice with which another begins would have no token left: it keeps its last one
            shared = min(len(os.path.commonprefix(whole)), min(map(len, whole)) - 1)  # works for lists, too
            counts = [len(tokens) - shared for tokens in whole]
        elif item.form == 'contexts':
            counts = [len(os.path.commonprefix([tokens[::-1] for tokens in whole]))] * len(whole)
        else:
            counts = [len(whole[0]) - len(next(before))]
        per_pair = zip(whole, counts, item.pairs, strict=True)
        requests.append([request_of([encoder.prefix, *t], n, window, item, pair[1]) for t, n, pair in per_pair])
    return requests


def request_of(tokens, n_targets, window, item, answer):
    """The Request for the last n_targets tokens, cut to what the model sees. Raises ValueError for too many or none."""
    if not 0 < n_targets <= window:
        why = f'is longer than the {window} tokens that the model sees' if n_targets > 0 else 'adds no token'
        raise ValueError(f'{item.place}: {answer[:40]!r} has {n_targets} tokens: it {why}')
    return Request(tokens[-(window + 1) :], n_targets)


def with_spaces_behind(context, continuation):
    """Move white space from the end of the context to the continuation: a word's token begins with the space before."""
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation


def rolling(tokens, prefix, window):
    """Requests that score each token of a document once: windows side by side, the last one with more context."""
    whole, requests = [prefix, *tokens], []
    for first in range(0, len(tokens), window):
        end = min(first + window, len(tokens))
        requests.append(Request(whole[max(0, end - window) : end + 1], end - first))
    return requests


# --- scores -----------------------------------------------------------------------------------------------------------


def scores_of_core(task, requests, log_likelihoods, greedy):
    """acc, by the mean log-likelihood per token, and centered, which is 0 for a guess and 1 if all items are right."""
    hits = [int(all(flags)) for flags in greedy]
    if task.form != 'continuation':
        sizes = [[request.n_targets for request in item_requests] for item_requests in requests]
        per_item = zip(task.items, log_likelihoods, sizes, strict=True)
        hits = [np.argmax(np.array(nats) / item_sizes) == item.gold for item, nats, item_sizes in per_item]
    (acc, error), chance = mean_of(hits), mean_of([item.chance for item in task.items])[0]
    return {'acc': (acc, error), 'centered': ((acc - chance) / (1 - chance), error / (1 - chance))}


def scores_of_answers(judged):
    """{name of the score: (value, standard error)} of what the rules say about the text of each item."""
    names = dict.fromkeys(name for found in judged for name in found)  # each row may have its own rule
    return {name: mean_of([found[name] for found in judged if name in found]) for name in names}


def scores_of(task, requests, log_likelihoods, greedy):
    """{name of the score: (value, standard error)}.

    log_likelihoods: [[nats of each request] of each item]; greedy: [[whether all its targets are the likeliest ones]].
    acc_norm divides the log-likelihood by the choice's characters, acc_bytes by its bytes in UTF-8. Perplexities of
    texts are per word and per byte. Their errors are those of a ratio of sums over documents, carried through exp() by
    the delta method.
    """
    items = task.items
    if task.protocol == 'core':
        return scores_of_core(task, requests, log_likelihoods, greedy)
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
    """(exp(-mean), its standard error); inf if it overflows a float: a bad model, a long text."""
    perplexity = math.inf if -mean >= 709 else math.exp(-mean)  # nan stays nan
    return perplexity, perplexity * error


def mean_of(values):
    """(mean, its standard error, which is nan for a single value)."""
    values = np.array(values, dtype=float)
    return values.mean().item(), (values.std(ddof=1) / math.sqrt(len(values))).item() if len(values) > 1 else math.nan


def ratio_of(sums, sizes):
    """(sum of sums / sum of sizes, its standard error from the deviations of each document from that ratio)."""
    sums, sizes = np.array(sums, dtype=float), np.array(sizes, dtype=float)
    ratio = sums.sum() / sizes.sum()
    return ratio.item(), mean_of((sums - ratio * sizes) / sizes.mean())[1]
