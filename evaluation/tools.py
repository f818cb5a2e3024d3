"""
A calculator that the model may call: an answer that is `=37*58` gets a tool's turn, 2146, and the model goes on.

    result_of('=37*58')  # '2146'; None for an answer that is no call
    for row, token, call in stream_batch(model, language, conversations, prompts, ...): ...

It has learned to from conversations such as this one, in which the calculator's turn is not learned:

    {"messages": [{"role": "user", "content": "What is 37 times 58?"}, {"role": "assistant", "content": "=37*58"},
                  {"role": "tool", "content": "2146"}, {"role": "assistant", "content": "37 times 58 is 2146."}]}

What the model reads is exact to the token: its call stays in the ids that it has drawn, and the ids of the tool's turn
are appended. Were the call decoded and encoded again, the tokenizer might cut it otherwise, and the model would read
what it has not written.
"""

import math
import re
from fractions import Fraction
from typing import NamedTuple

from evaluation import sampling

MOST_CALLS = 8  # in one answer, or a model that only ever calls would never end
CALL = re.compile(r'=[0-9+*/(). -]{1,100}')
BEGINS_CALL = re.compile(r'(=[0-9+*/(). -]{0,100})?')
WORD = 'part0part'  # in place of an answer, to find what the template writes behind it


# --- the calculator ---------------------------------------------------------------------------------------------------


def result_of(answer):
    """What the calculator says to an answer, as text; None if that is no call, or one that has no value."""
    if not CALL.fullmatch(answer):
        return None
    try:
        value = value_of(answer[1:])
    except (ValueError, ZeroDivisionError):
        return None
    return str(value) if value.denominator == 1 else f'{float(value):.10g}'


def value_of(expression):
    """The value, a Fraction, of decimal numbers with + - * / and brackets. Raises ValueError for anything else, and
    ZeroDivisionError."""
    parts = [*re.findall(r'\d+\.?\d*|\.\d+|\S', expression), 'end']

    def total():
        value = product()
        while parts[0] in ('+', '-'):
            value += product() if parts.pop(0) == '+' else -product()
        return value

    def product():
        value = factor()
        while parts[0] in ('*', '/'):
            value = value * factor() if parts.pop(0) == '*' else value / factor()
        return value

    def factor():
        part = parts.pop(0)
        if part == '-':
            return -factor()
        if part != '(':
            return Fraction(part)  # ValueError for what is no number
        value = total()
        if parts.pop(0) != ')':
            raise ValueError(f'{expression}: expected )')
        return value

    value = total()
    if parts != ['end']:
        raise ValueError(f'{expression}: unexpected {parts[0]}')
    return value


# --- its turns --------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    messages: list  # the call, and what the tool says
    ids: list  # of both, up to where the model goes on

    @property
    def line(self):
        call, result = (message['content'] for message in self.messages)
        return f'calculator: {call[1:]} = {result}'


def ids_of_result(language, conversation, result):
    """The ids of what the chat template writes behind an answer to this conversation, to which a tool says `result`:
    from the end of that answer to where the next begins. Raises ValueError if it does not write what a tool says."""
    from text.conversations import fold_system_messages

    turns = [{'role': 'assistant', 'content': WORD}, {'role': 'tool', 'content': result}]
    conversation = {**conversation, 'messages': [*conversation['messages'], *turns]}
    written = language.ask(conversation, fold_system_messages)
    _, word, behind = written.rpartition(WORD)
    if not word or result not in behind:
        raise ValueError(f'the chat template in {language.folder} does not write what a tool says: no tool can be used')
    return language.template.controls.encode(behind)


def stream_batch(
    model,
    language,
    conversations,
    prompts,
    max_new_tokens,
    tools=None,
    positions=math.inf,
    generators=None,
    first=None,
    **options,
):
    """
    sampling.stream_batch() of answers in which the model may use a tool: yield (number of a prompt, its next id, None)
    and, for a call, (number of the prompt, None, Call), which takes the place of its ids.

    conversations: for each prompt the conversation that it was made of; read with tools only. tools: 'calculator' or
    None. positions: those of a model that cannot go on beyond them. max_new_tokens: of each turn of the model.
    generators, first, options: as there. An answer that may be a call is held back until it ends.
    """
    conversations, texts = [*conversations], [prompt.ids for prompt in prompts]
    rows = [*range(len(prompts))]
    for calls_left in range(MOST_CALLS if tools else 0, -1, -1):
        new, held = {row: [] for row in rows}, {*rows} if calls_left else set()
        of_rows = {'generators': generators and [generators[row] for row in rows]}
        of_rows |= {'first': first and [first[row] for row in rows]}
        ids = [texts[row] for row in rows]
        for place, token in sampling.stream_batch(
            model, ids, max_new_tokens, language.stop_tokens, **of_rows, **options
        ):
            row = rows[place]
            new[row].append(token)
            if row not in held:
                yield row, token, None
            elif not BEGINS_CALL.fullmatch(language.text_of(prompts[row], new[row])):
                held.remove(row)
                yield from ((row, token, None) for token in new[row])
        rows = []
        for row in sorted(held):
            answer = language.text_of(prompts[row], new[row])
            result = result_of(answer) if len(new[row]) < max_new_tokens else None  # else it is cut
            more = ids_of_result(language, conversations[row], result) if result else []
            if result is None or len(texts[row]) + len(new[row]) + len(more) >= positions:
                yield from ((row, token, None) for token in new[row])
                continue
            messages = [{'role': 'assistant', 'content': answer}, {'role': 'tool', 'content': result}]
            conversations[row] = {**conversations[row], 'messages': [*conversations[row]['messages'], *messages]}
            texts[row] = [*texts[row], *new[row], *more]
            rows.append(row)
            yield row, None, Call(messages, [*new[row], *more])
        if not rows:
            return
