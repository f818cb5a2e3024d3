"""
From a prompt to ids, and from the ids of an answer to text.

    rows = read_rows('questions.jsonl')  # [{'prompt': ..., 'system': ...} or {'messages': [...]}, ...]
    language = OwnLanguage(tokenizer)                # for a run from scratch: a tokenizer of text.tokenizer; text only
    language = TransformersLanguage(tokenizer, folder, named_ends)    # a tokenizer of transformers; may have a template
    prompt = language.prompt_of('def ')              # a Prompt: its ids, and what text_of() needs
    prompt = language.prompt_of_chat({'messages': [{'role': 'user', 'content': 'What is a shard?'}]})
    text = language.text_of(prompt, new_ids)
    stream = Stream(lambda ids: language.text_of(prompt, ids))       # the same text, piece by piece as ids arrive
"""

import json

from system.errors import one_line
from text.chat_rows import BESIDE_MESSAGES, INSTRUCTIONS, LISTS, question_of

UNFINISHED = '\ufffd'  # what a tokenizer writes for bytes that are not yet a whole character


# --- rows of a file ---------------------------------------------------------------------------------------------------


def read_rows(path):
    """The rows of a .jsonl file that ask for an answer; other fields are kept. Raises ValueError with the number of a
    line that does not."""
    rows = []
    with open(path, encoding='utf-8-sig') as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                question_of(row)
            except (ValueError, RecursionError) as error:
                wanted = '{"prompt": "TEXT"}, perhaps with "system": "TEXT", or {"messages": [...]} to the user\'s last'
                given = f'{line.strip()[:60]} ({one_line(error, 100)})'
                raise ValueError(f'{path}, line {number}: expected {wanted}; given {given}') from error
            rows.append(row)
    return rows


def is_text(row):
    """Whether a row is a text to continue, which no chat template has to write."""
    return isinstance(row.get('prompt'), str) and not any(row.get(name) for name in (*LISTS, *BESIDE_MESSAGES))


def conversation_to_answer(row, system, name):
    """The conversation of a row, up to the message to answer. system: the system message for rows without their own, or
    None. name: what an error calls the row, such as 'the prompt'. Raises ValueError for an empty question."""
    conversation = question_of(row)
    messages = conversation['messages']
    if messages[-1]['role'] == 'user' and not messages[-1]['content'].strip():
        raise ValueError(f'{name} is empty: give the message to answer, or --chat=False')
    if system is not None and messages[0]['role'] not in INSTRUCTIONS:
        conversation['messages'] = [{'role': 'system', 'content': system}, *messages]
    return conversation


# --- ids and text -----------------------------------------------------------------------------------------------------


def refuse_what_does_not_fit(prompt, name, language, positions, vocab_size):
    """Raise ValueError for a prompt that fills all positions of the model, or has a token beyond its vocabulary."""
    if len(prompt.ids) >= positions:
        raise ValueError(f'{name} has {len(prompt.ids)} tokens, the model {positions} positions: shorten it')
    if (largest := max(prompt.ids)) >= vocab_size:  # a tokenizer can have more tokens than its model
        spelled = language.tokenizer.decode([largest])
        raise ValueError(f'{name} spells the token {spelled!r} ({largest}), the model has {vocab_size}: leave it out')


class Stream:
    """Turns ids that arrive one by one into text, in whole characters. text_of: function from all ids to all text."""

    def __init__(self, text_of):
        self.text_of, self.ids, self.shown = text_of, [], ''

    def add(self, token):
        """The text that can be shown after this token. Bytes of an incomplete character wait for the rest. Spaces wait,
        too, because those at the end do not belong to an answer."""
        self.ids.append(token)
        return self.show(self.text_of(self.ids).rstrip().rstrip(UNFINISHED).rstrip())

    def end(self):
        """The text that has not been shown yet."""
        return self.show(self.text_of(self.ids))

    def show(self, text):
        new = text[len(self.shown) :]
        self.shown += new
        return new
