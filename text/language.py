"""
What a model knows of language: which ids a text becomes, what stands before it, at which ids the model stops, and how a
chat template writes a conversation. sample.py, evaluate.py, eval_tasks, the prompts of train_grpo.py and exports all
ask here.

    language = OwnLanguage(tokenizer, windows, folder)              # a run from scratch: a tokenizer of text.tokenizer
    language = TransformersLanguage(tokenizer, folder, named_ends)  # a folder: a tokenizer of transformers
    language.stop_after_answers()                                   # at the template's end of a turn, too
    prompt = language.prompt_of('def ')                             # a Prompt, for sample.py
    prompt = language.prompt_of_chat({'messages': [{'role': 'user', 'content': 'What is a shard?'}]})
    text = language.text_of(prompt, new_ids)
    ids = language.encode(['a text', 'another'])                    # for tasks

runtime/opened.py makes the one of a model. A chat template always writes for a tokenizer of transformers, whichever
tokenizer reads plain text.
"""

import contextlib
import functools
from typing import NamedTuple

from system.errors import one_line


class Prompt(NamedTuple):
    ids: list
    begin: str = ''  # the end of the prompt if it is not in ids; the first new token has to begin with it
    first: list | None = None  # the tokens that begin with it
    is_chat: bool = False


class Language:
    """
    What both kinds have:

    tokenizer: reads and writes plain text. folder: where it is. prefix: the id before what is scored from its first
    token on. stop_tokens: the ids that end what the model writes. kwargs: variables for the chat template, unless a
    conversation has its own. fold_system: the model has learned system messages as part of the user's.
    has_learned_chats: the model has been trained on conversations.
    """

    def __init__(self, tokenizer, folder, chat_template_kwargs=None, fold_system=False, has_learned_chats=False):
        self.tokenizer, self.folder, self.has_learned_chats = tokenizer, folder, has_learned_chats
        self.kwargs, self.fold_system = chat_template_kwargs or {}, fold_system

    @property
    def has_template(self):
        return bool(self.chat_tokenizer and self.chat_tokenizer.chat_template)

    @functools.cached_property
    def template(self):
        from text.conversations import ChatTemplate

        return ChatTemplate(self.chat_tokenizer)

    def ask(self, conversation, other_messages):
        """What the template writes for a conversation that the model is to answer. other_messages: function from its
        messages to those that are tried if the template refuses them. Raises ValueError if it refuses those, too."""
        from text.conversations import fold_system_messages

        options = self.kwargs | conversation.get('chat_template_kwargs', {}) | {'tools': conversation.get('tools')}
        given = conversation['messages']
        messages = fold_system_messages(given) if self.fold_system else given
        try:
            return self.template.ask(messages, options)
        except Exception as error:  # a template may raise anything
            if (other := other_messages(messages)) != messages:
                return self.ask({**conversation, 'messages': other}, other_messages)
            raise ValueError(f'the chat template in {self.folder} refuses: {one_line(error)}') from error

    def prompt_of_chat(self, conversation):
        """The Prompt of a conversation. If the template refuses system messages, or if the model has learned them so,
        they become part of the user's, as prepare_data.py --fold_system does it."""
        from text.conversations import fold_system_messages

        return Prompt(self.template.controls.encode(self.ask(conversation, fold_system_messages)), is_chat=True)

    def chat(self, messages, of_chat):
        """What a task asks, as the template writes it. of_chat: of a tasks.Item. If the template refuses a system
        message, that is left out, as in lm-evaluation-harness."""
        return self.ask({**of_chat, 'messages': messages}, lambda messages: messages[messages[0]['role'] == 'system' :])

    def chat_for(self, key, wanted):
        """(chat(), or None where texts are continued; lines for the log). wanted: the value of `key`; None = chat() if
        the model has learned conversations. Raises ValueError if there is no template for what is wanted."""
        if wanted and not self.has_template:
            raise ValueError(f'{key}=True: the tokenizer in {self.folder} has no chat template: leave {key} out')
        if wanted or (wanted is None and self.has_learned_chats and self.has_template):
            self.stop_after_answers()
            return self.chat, []
        if wanted is None and self.has_learned_chats:
            return None, [f'WARNING: the model has learned conversations, and {self.folder} lacks their chat template']
        if wanted is None and self.has_template:
            hint = f'{self.folder} has a chat template, and here a text is continued: --{key} makes a message of it'
            return None, [hint]
        return None, []

    def encode_chats(self, texts):
        """[ids of each text that chat() has written, perhaps with an answer behind it]. The template has written all
        special tokens, as in training."""
        return [self.template.controls.encode(text) for text in texts]

    def end_of_answer(self):
        """[the token that the template writes behind an answer], if it is a control token. It has to be found in this
        way for models that were given a template later: their folder names only the token that ends a text."""
        _, token = self.template.end_of_answer(self.kwargs) if self.has_template else ('', None)
        return [] if token is None else [token]

    def stop_after_answers(self):
        self.stop_tokens += [end for end in self.end_of_answer() if end not in self.stop_tokens]


class OwnLanguage(Language):
    """For models trained from scratch. tokenizer: of text.tokenizer. windows: how the model has seen text; with
    'documents' it has never seen one that did not begin behind an end. folder: may hold a chat template."""

    begins_texts = False  # the harness puts BOS even before documents that begin with it; runs here have not learned so

    def __init__(self, tokenizer, windows='stream', folder=None, **options):
        super().__init__(tokenizer, folder, **options)
        self.stop_tokens = [tokenizer.eot]
        # The ids before a text: BOS, or where the tokenizer has none and the model has learned whole documents alone,
        # the end of the one before. Without either, what is scored from its first token on follows an end all the same.
        self.begin = [*tokenizer.bos] or ([tokenizer.eot] if windows == 'documents' else [])
        self.prefix = self.begin[-1] if self.begin else tokenizer.eot

    @functools.cached_property
    def chat_tokenizer(self):
        """transformers' tokenizer of the folder, if that holds a chat template."""
        from text.conversations import templates_of
        from text.tokenizer import load_transformers_tokenizer

        templates = templates_of(self.folder) if self.folder else None
        if not templates:
            return None
        tokenizer = load_transformers_tokenizer(self.folder)
        tokenizer.chat_template = templates if len(templates) > 1 else next(iter(templates.values()))
        return tokenizer

    def encode(self, texts, special=True):
        """[ids of each text]. special=False: without what begins a text."""
        begin = self.begin if special else []
        return [begin + array.tolist() for array in self.tokenizer.encode_batch(texts)]

    def decode(self, ids):
        return self.tokenizer.decode([token for token in ids if token < self.tokenizer.vocab_size])  # models have more

    def tokens_spelled(self, texts):
        """Special tokens that these texts spell: none, since these tokenizers never read text as special tokens."""
        return []

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

    def text_of(self, prompt, new):
        """The text that follows the prompt; of a chat, the answer. (Ids beyond the tokenizer's vocabulary mean nothing,
        and are left out.)"""
        text = self.decode(new).removeprefix(prompt.begin)
        return text.strip() if prompt.is_chat else text


class TransformersLanguage(Language):
    """For folders and what is fine-tuned from them. tokenizer: of transformers. named_ends: what the model's
    configuration names as the end of a text: an id, a list of ids or None."""

    begins_texts = True

    def __init__(self, tokenizer, folder, named_ends=None, **options):
        super().__init__(tokenizer, folder, **options)
        self.chat_tokenizer, self.stop_tokens = tokenizer, ends_of_texts(tokenizer, folder, named_ends)
        self.starts = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None]
        self.ends_texts = tokenizer('a').input_ids[-1:] == [tokenizer.eos_token_id]

    @functools.cached_property
    def prefix(self):
        if not self.starts:
            raise ValueError(f'{self.folder}: the tokenizer has neither BOS nor EOS, to begin a text with')
        return self.starts[0]

    def encode(self, texts, special=True):
        """[ids of each text]. special=False: without added tokens. A text that spells BOS gets none, either. An EOS
        that some tokenizers add after a text is removed, because the text continues."""
        tokens, spelled = [None] * len(texts), self.tokenizer.decode([self.prefix])
        for adds in (True, False):
            numbers = [n for n, text in enumerate(texts) if (special and not text.startswith(spelled)) == adds]
            some = self.tokenizer([texts[n] for n in numbers], add_special_tokens=adds).input_ids if numbers else []
            for number, ids in zip(numbers, some, strict=True):
                tokens[number] = ids[:-1] if adds and self.ends_texts else ids
        return tokens

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def tokens_spelled(self, texts):
        """Special tokens that these texts spell. decode() does not show them."""
        added = self.tokenizer.get_added_vocab()
        return [added[text] for text in texts if text in added]

    def prompt_of(self, text):
        tokens = self.tokenizer(text).input_ids
        if tokens and tokens[-1] == self.tokenizer.eos_token_id:
            tokens.pop()  # some tokenizers add EOS to every text
        tokens = tokens or self.starts[-1:]  # EOS rather than BOS: the end of a document starts the next one
        if not tokens:
            raise ValueError('an empty prompt, and the tokenizer has no token that starts a text: give a --prompt')
        return Prompt(tokens)

    def text_of(self, prompt, new):
        """The text that follows the prompt; of a chat, the answer."""
        if prompt.is_chat:
            return self.decode(new).strip()
        # Decode them together with the prompt, because some tokenizers drop a space at the beginning of a text.
        return self.decode(prompt.ids + new).removeprefix(self.decode(prompt.ids))


def ends_of_texts(tokenizer, folder, named_ends=None):
    """The ids of the tokens that end a text, according to the tokenizer, to the model's configuration (named_ends: an
    id, a list or None) and to the folder's generation_config.json."""
    import transformers

    named = [tokenizer.eos_token_id, named_ends]
    with contextlib.suppress(OSError):  # there is no generation_config.json
        named.append(transformers.GenerationConfig.from_pretrained(folder).eos_token_id)
    ids = {token for some in named for token in (some if isinstance(some, list) else [some])}
    return sorted(token for token in ids if token is not None)
