"""
What a model is asked, as ids, and what it says, as text.

    rows = read_rows('questions.jsonl')  # [{'prompt': ..., 'system': ...} or {'messages': [...]}, ...]
    language = OwnLanguage(tokenizer)                # of a run from scratch: text.tokenizer's, for text alone
    language = TransformersLanguage(tokenizer, folder, named_ends)    # of transformers' class, perhaps with a template
    prompt = language.prompt_of('def ')              # ids, and what belongs to them
    prompt = language.prompt_of_chat([{'role': 'user', 'content': 'What is a shard?'}])
    text = language.text_of(prompt, new_ids)
    stream = Stream(lambda ids: language.text_of(prompt, ids))       # the same, as the ids come
"""

import contextlib
import json
from typing import NamedTuple

from huggingface.finetune import transformers_offline
from runtime.errors import one_line
from text.chat_rows import INSTRUCTIONS
from text.conversations import DATE, fold_system_messages

UNFINISHED = '\ufffd'  # what a tokenizer writes for bytes that are no character yet


# --- rows of a file ---------------------------------------------------------------------------------------------------


def read_rows(path):
    """The rows of a .jsonl file: {"prompt"} with or without "system", or {"messages"}; other fields stay as they are.
    Raises ValueError with the number of a line that has neither."""
    rows = []
    with open(path, encoding='utf-8-sig') as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not (isinstance(row, dict) and (is_question(row) or is_dialogue(row))):
                wanted = '{"prompt": "TEXT"}, perhaps with "system": "TEXT", or {"messages": [...]} to the user\'s last'
                raise ValueError(f'{path}, line {number}: expected {wanted}; given {line.strip()[:60]}')
            rows.append(row)
    return rows


def is_question(row):
    return 'messages' not in row and isinstance(row.get('prompt'), str) and isinstance(row.get('system', ''), str)


def is_dialogue(row):
    messages = row.get('messages')
    if not isinstance(messages, list) or not messages or 'prompt' in row or 'system' in row:
        return False
    texts = [(message.get('role'), message.get('content')) for message in messages if isinstance(message, dict)]
    are_texts = all(isinstance(text, str) for pair in texts for text in pair)
    return len(texts) == len(messages) and are_texts and texts[-1][0] != 'assistant'


def messages_of(row, system, name):
    """What a row asks, as messages. system: of rows that have none of their own, or None. Raises ValueError for an
    empty question; name: 'the prompt', or which."""
    messages = row.get('messages') or [{'role': 'user', 'content': row['prompt']}]
    if not messages[-1]['content'].strip():
        raise ValueError(f'{name} is empty: give the message to answer, or --chat=False')
    system = row.get('system', system)
    has_own = system is None or messages[0]['role'] in INSTRUCTIONS
    return messages if has_own else [{'role': 'system', 'content': system}, *messages]


# --- ids and text -----------------------------------------------------------------------------------------------------


class Prompt(NamedTuple):
    ids: list
    begin: str = ''  # text behind that of the ids, with which the first new token has to begin
    first: list | None = None  # the tokens that do
    is_chat: bool = False


class OwnLanguage:
    """Of models from scratch."""

    has_template = False

    def __init__(self, tokenizer):
        self.tokenizer, self.stop_tokens = tokenizer, [tokenizer.eot]

    def prompt_of(self, text):
        tokens = self.tokenizer.encode(text)
        begin, first = '', None
        # "def " ends in a token of its own for the space, but in the text that was learned the space begins the token
        # of the next word, and after a lone one the model is lost. So the first new token is one that begins with it.
        if text.endswith(' '):
            begin = self.decode([tokens.pop()])
            first = [token for token in range(self.tokenizer.vocab_size) if self.decode([token]).startswith(begin)]
        # As in training: what the tokenizer puts before a text, or where that is nothing, eot, which ends the one
        # before.
        return Prompt([*self.tokenizer.bos, *tokens] or [self.tokenizer.eot], begin, first)

    def decode(self, ids):
        return self.tokenizer.decode([token for token in ids if token < self.tokenizer.vocab_size])

    def text_of(self, prompt, new):
        """What is behind the prompt. (A vocab_size above the tokenizer's leaves ids without a meaning.)"""
        return self.decode(new).removeprefix(prompt.begin)


class TransformersLanguage:
    """Of models of transformers. folder: of the tokenizer. named_ends: ids that end a text, as the model's
    configuration has them: an id, a list or None."""

    def __init__(self, tokenizer, folder, named_ends=None):
        self.tokenizer, self.folder, self.has_template = tokenizer, folder, bool(tokenizer.chat_template)
        named = [tokenizer.eos_token_id, named_ends]
        with contextlib.suppress(OSError):  # there is no generation_config.json
            named.append(transformers_offline().GenerationConfig.from_pretrained(folder).eos_token_id)
        ids = {token for some in named for token in (some if isinstance(some, list) else [some])}
        self.stop_tokens = sorted(token for token in ids if token is not None)

    def prompt_of(self, text):
        tokenizer = self.tokenizer
        tokens = tokenizer(text).input_ids
        if tokens and tokens[-1] == tokenizer.eos_token_id:
            tokens.pop()  # some tokenizers end every text
        starts = [tokenizer.eos_token_id, tokenizer.bos_token_id]  # the end of a document starts the next one
        tokens = tokens or [token for token in starts if token is not None][:1]
        if not tokens:
            raise ValueError('an empty prompt, and the tokenizer has no token that starts a text: give a --prompt')
        return Prompt(tokens)

    def prompt_of_chat(self, messages):
        written = self.render(messages, add_generation_prompt=True)
        # The template has written all special tokens.
        return Prompt(self.tokenizer.encode(written, add_special_tokens=False), is_chat=True)

    def render(self, messages, **options):
        """What the chat template writes. System messages that it refuses go to the user, as prepare_data.py folds
        them."""
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, date_string=DATE, **options)
        except Exception as error:  # a template may raise anything
            folded = fold_system_messages(messages)
            if folded != messages:
                return self.render(folded, **options)
            raise ValueError(f'the chat template in {self.folder} refuses: {one_line(error)}') from error

    def end_of_answer(self):
        """The token that the template writes behind an answer, in a list: where a model without a template was given
        one, its folder names the end of a text alone."""
        conversation = [{'role': 'user', 'content': 'Question'}, {'role': 'assistant', 'content': 'Answer'}]
        behind = self.render(conversation).partition('Answer')[2].strip()
        following = self.tokenizer.encode(behind, add_special_tokens=False)[:1]
        return [token for token in following if self.tokenizer.added_tokens_decoder.get(token)]

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def text_of(self, prompt, new):
        """What is behind the prompt, or the answer to it."""
        if prompt.is_chat:
            return self.decode(new).strip()
        # Decoded with the prompt: some tokenizers drop the space that a text begins with.
        return self.decode(prompt.ids + new).removeprefix(self.decode(prompt.ids))


def refuse_what_does_not_fit(prompt, name, language, positions, vocab_size):
    """Raise ValueError for a prompt that fills all positions of a model, or has a token beyond its vocabulary."""
    if len(prompt.ids) >= positions:
        raise ValueError(f'{name} has {len(prompt.ids)} tokens, the model {positions} positions: shorten it')
    if (largest := max(prompt.ids)) >= vocab_size:  # tokenizers may have more tokens than models
        spelled = language.tokenizer.decode([largest])
        raise ValueError(f'{name} spells the token {spelled!r} ({largest}), the model has {vocab_size}: leave it out')


class Stream:
    """Text of ids that come one by one, in whole characters. text_of: from all ids to all text."""

    def __init__(self, text_of):
        self.text_of, self.ids, self.shown = text_of, [], ''

    def add(self, token):
        """What can be shown now. Bytes that may still become another character wait, and so do spaces: those at the end
        are no part of an answer."""
        self.ids.append(token)
        return self.show(self.text_of(self.ids).rstrip().rstrip(UNFINISHED).rstrip())

    def end(self):
        """What is left."""
        return self.show(self.text_of(self.ids))

    def show(self, text):
        new = text[len(self.shown) :]
        self.shown += new
        return new
