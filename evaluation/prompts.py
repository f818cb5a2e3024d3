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

import contextlib
import functools
import json
from typing import NamedTuple

from evaluation.tasks import begin_of_text
from huggingface.finetune import transformers_offline
from system.errors import one_line
from text.chat_rows import BESIDE_MESSAGES, INSTRUCTIONS, LISTS, question_of
from text.conversations import ChatTemplate, fold_system_messages

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


class Prompt(NamedTuple):
    ids: list
    begin: str = ''  # the end of the prompt if it is not in ids; the first new token has to begin with it
    first: list | None = None  # the tokens that begin with it
    is_chat: bool = False


class OwnLanguage:
    """For models trained from scratch: a tokenizer of text.tokenizer, without a chat template. windows: as for
    tasks.NativeEncoder."""

    has_template = False

    def __init__(self, tokenizer, windows='stream'):
        self.tokenizer, self.stop_tokens = tokenizer, [tokenizer.eot]
        self.begin = begin_of_text(tokenizer, windows)

    def prompt_of(self, text):
        tokens = self.tokenizer.encode(text)
        begin, first = '', None
        # A prompt such as "def " would end in a token for the space alone. In the training text, however, the space is
        # the beginning of the next word's token, so that after a lone space the model is lost. Therefore the space is
        # left out here, and the first new token has to begin with it.
        if text.endswith(' '):
            begin = self.decode([tokens.pop()])
            first = [token for token in range(self.tokenizer.vocab_size) if self.decode([token]).startswith(begin)]
        # What comes first is as in training. If that is nothing and the prompt is empty, it is eot, which in training
        # ended the document before.
        return Prompt([*self.begin, *tokens] or [self.tokenizer.eot], begin, first)

    def decode(self, ids):
        return self.tokenizer.decode([token for token in ids if token < self.tokenizer.vocab_size])

    def text_of(self, prompt, new):
        """The text that follows the prompt. (Ids beyond the tokenizer's vocabulary mean nothing, and are left out.)"""
        return self.decode(new).removeprefix(prompt.begin)


def ends_of_texts(tokenizer, folder, named_ends=None):
    """The ids of the tokens that end a text, according to the tokenizer, to the model's configuration (named_ends: an
    id, a list or None) and to the folder's generation_config.json."""
    named = [tokenizer.eos_token_id, named_ends]
    with contextlib.suppress(OSError):  # there is no generation_config.json
        named.append(transformers_offline().GenerationConfig.from_pretrained(folder).eos_token_id)
    ids = {token for some in named for token in (some if isinstance(some, list) else [some])}
    return sorted(token for token in ids if token is not None)


class TransformersLanguage:
    """For models of transformers. folder: where the tokenizer is. named_ends: what the model's configuration names as
    the end of a text: an id, a list of ids or None. chat_template_kwargs: variables for the template, unless a
    conversation has its own. fold_system: the model has learned system messages as part of the user's."""

    def __init__(self, tokenizer, folder, named_ends=None, chat_template_kwargs=None, fold_system=False):
        self.fold_system = fold_system
        self.tokenizer, self.folder, self.has_template = tokenizer, folder, bool(tokenizer.chat_template)
        self.kwargs = chat_template_kwargs or {}
        self.stop_tokens = ends_of_texts(tokenizer, folder, named_ends)

    @functools.cached_property
    def template(self):
        return ChatTemplate(self.tokenizer)

    def prompt_of(self, text):
        tokenizer = self.tokenizer
        tokens = tokenizer(text).input_ids
        if tokens and tokens[-1] == tokenizer.eos_token_id:
            tokens.pop()  # some tokenizers add EOS to every text
        starts = [tokenizer.eos_token_id, tokenizer.bos_token_id]  # the end of a document starts the next one
        tokens = tokens or [token for token in starts if token is not None][:1]
        if not tokens:
            raise ValueError('an empty prompt, and the tokenizer has no token that starts a text: give a --prompt')
        return Prompt(tokens)

    def prompt_of_chat(self, conversation):
        return Prompt(self.template.controls.encode(self.write(conversation)), is_chat=True)

    def write(self, conversation):
        """ChatTemplate.ask() of a conversation. If the template refuses system messages, or if the model has
        learned them so, they become part of the user's, as prepare_data.py --fold_system does it. Raises ValueError if
        the template refuses that, too."""
        options = self.kwargs | conversation.get('chat_template_kwargs', {}) | {'tools': conversation.get('tools')}
        folded = fold_system_messages(conversation['messages'])
        messages = folded if self.fold_system else conversation['messages']
        try:
            return self.template.ask(messages, options)
        except Exception as error:  # a template may raise anything
            if folded != conversation['messages'] and not self.fold_system:
                return self.write({**conversation, 'messages': folded})
            raise ValueError(f'the chat template in {self.folder} refuses: {one_line(error)}') from error

    def end_of_answer(self):
        """[the token that the template writes behind an answer], if it is a control token. It has to be found in this
        way for models that were given a template later: their folder names only the token that ends a text."""
        _, token = self.template.end_of_answer(self.kwargs)
        return [] if token is None else [token]

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def text_of(self, prompt, new):
        """The text that follows the prompt; of a chat, the answer."""
        if prompt.is_chat:
            return self.decode(new).strip()
        # Decode them together with the prompt, because some tokenizers drop a space at the beginning of a text.
        return self.decode(prompt.ids + new).removeprefix(self.decode(prompt.ids))


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
