"""
Conversations as training examples: written by the tokenizer's own chat template, with the assistant's tokens marked.

    conversation = conversation_of(row)                 # a row of any of the FORMATS, checked: JSON text
    encoder = ChatEncoder('models/some_model', eot)     # a Hugging Face folder with a chat template
    for ids, flags, text in encoder.examples(conversation): ...
    marked_text(ids, flags, decode, '[', ']')           # for people to read

What is learned of an assistant's message is what the template adds to the prompt that it writes for generation: that
very prompt stands before the model when it is to answer. The end-of-turn token is learned, too, or it would never stop.
Control tokens are those that the template writes. A message that spells one, as <|im_end|>, gets the tokens of its
letters: it cannot end its turn.
"""

import itertools
import json
import os
import re
from pathlib import Path

import numpy as np

from dataset.shards import FIRST, LEARNED
from runtime.errors import one_line

# What a row is known by. conversations: ShareGPT, each message with from and value; instruction and output: Alpaca.
FORMATS = ({'messages'}, {'conversations'}, {'prompt', 'completion'}, {'instruction', 'output'})
FORMATS_IN_WORDS = 'messages, conversations, prompt and completion, or instruction and output'
NO_CONVERSATIONS = f'no conversations ({FORMATS_IN_WORDS})'
CHAT_FIELDS = ('messages', 'conversations', 'prompt', 'completion', 'instruction', 'input', 'output', 'system')
CHAT_FIELDS += ('tools', 'chat_template_kwargs')  # all that is read of conversations
ROLES = ('system', 'developer', 'user', 'assistant', 'tool', 'function', 'ipython')
INSTRUCTIONS = ('system', 'developer')
ROLES_OF_SHAREGPT = {'human': 'user', 'gpt': 'assistant', 'chatgpt': 'assistant'}

# Stands between the letters of a control token that a message spells, so that the tokenizer does not take it for one;
# its normalizer removes it. Unicode's noncharacters are for such uses: no text has them.
MARK = '\ufdd0'

# Templates that write today's date, as Llama 3.2's, would give other tokens tomorrow. They get the date that stands in
# Llama 3.1's template: as a variable, and from the function that transformers offers them.
DATE = '26 Jul 2024'
DATE_FUNCTION = (
    "{%- macro strftime_now(format) -%}{{ format | replace('%d', '26') | replace('%b', 'Jul') | replace('%B', 'July') "
    "| replace('%m', '07') | replace('%Y', '2024') | replace('%y', '24') | replace('%A', 'Friday') "
    "| replace('%H', '12') | replace('%M', '00') | replace('%S', '00') }}{%- endmacro -%}"
)


def conversation_of(row):
    """A row of instruction data as JSON text of {'messages': [...]}, and 'tools', 'chat_template_kwargs' where it has
    them; without nulls, so that it does not depend on the file format, and without what follows the last answer.

    A row has `messages`, a list of {'role', 'content', ...}; `conversations`, such a list or one of {'from', 'value'};
    `prompt` and `completion`, strings or lists of messages; or `instruction`, `output` and perhaps `input`, strings.
    `system` beside them is the system message. Raises ValueError with the reason why the row cannot be learned, without
    naming it.
    """
    if not isinstance(row, dict):
        raise ValueError('rows that are no JSON objects')
    row = _without_nulls(row)
    messages = _messages_of(row)
    for message in messages:
        fields = ', '.join(key for key in message if message[key])[:60] if isinstance(message, dict) else 'no fields'
        if not isinstance(message, dict) or not isinstance(message.get('role'), str):
            raise ValueError(f'rows with a message that has no role (it has: {fields})')
        if message['role'] not in ROLES:
            raise ValueError(f'rows with the unknown role {message["role"][:30]!r}')
        if not isinstance(message.get('content'), (str, list)) and 'tool_calls' not in message:
            raise ValueError(f'rows with a message that has no content (it has: {fields})')
    if row.get('system') and isinstance(row['system'], str) and messages and messages[0]['role'] not in INSTRUCTIONS:
        messages = [{'role': 'system', 'content': row['system']}, *messages]
    answers = [index for index, message in enumerate(messages) if index and message['role'] == 'assistant']
    if not answers:
        raise ValueError("rows without an assistant's answer")
    conversation = {'messages': messages[: answers[-1] + 1]}
    for key, kind in (('tools', list), ('chat_template_kwargs', dict)):
        value = row.get(key)
        if isinstance(value, str):  # how columnar files hold what differs from row to row
            try:
                value = json.loads(value)
            except ValueError:
                pass
        if value and not isinstance(value, kind):
            raise ValueError(f'rows whose {key} are no {kind.__name__}')
        if value:
            conversation[key] = value
    return json.dumps(conversation, ensure_ascii=False)


def _messages_of(row):
    """The messages of a row, whatever its fields are called. Raises ValueError where there are none."""
    if 'messages' in row:
        messages = row['messages']
    elif 'conversations' in row:
        messages = row['conversations']
        if isinstance(messages, list):
            messages = [_message_of_sharegpt(message) for message in messages]
    elif 'prompt' in row and 'completion' in row:
        prompt, completion = row['prompt'], row['completion']
        prompt = [{'role': 'user', 'content': prompt}] if isinstance(prompt, str) else prompt
        completion = [{'role': 'assistant', 'content': completion}] if isinstance(completion, str) else completion
        messages = prompt + completion if type(prompt) is type(completion) is list else None
    elif 'instruction' in row and 'output' in row:
        texts = [row['instruction'], row.get('input', ''), row['output']]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError('rows whose instruction, input or output is no text')
        question = '\n\n'.join(text for text in texts[:2] if text)
        messages = [{'role': 'user', 'content': question}, {'role': 'assistant', 'content': texts[2]}]
    else:
        raise ValueError(f'rows that are {NO_CONVERSATIONS}')
    if not isinstance(messages, list):
        raise ValueError('rows whose messages are no list')
    return messages


def _message_of_sharegpt(message):
    """A message with from and value as one with role and content; any other as it is."""
    if not isinstance(message, dict) or not isinstance(message.get('from'), str):
        return message
    others = {key: value for key, value in message.items() if key not in ('from', 'value')}
    role = ROLES_OF_SHAREGPT.get(message['from'], message['from'])
    return {'role': role, 'content': message.get('value'), **others}


def has_chat_fields(row):
    """Whether these are the names of a conversation's fields."""
    return any(fields <= set(row) for fields in FORMATS)


def holds_conversations(row):
    """Whether a row is a conversation: it has the fields of one, which hold lists, or strings where there are two."""
    for fields in FORMATS:
        kinds = list if len(fields) == 1 else (str, list)
        if all(isinstance(row.get(key), kinds) for key in fields):
            return True
    return False


def fold_system_messages(messages):
    """The same without system messages: each begins the message of the user that follows it."""
    folded = []
    for message in messages:
        before = folded[-1] if folded else {}
        texts = [before.get('content'), message.get('content')]
        are_texts = all(isinstance(text, str) for text in texts)
        if before.get('role') in INSTRUCTIONS and message['role'] == 'user' and are_texts:
            folded[-1] = {**message, 'content': '\n\n'.join(texts)}
        else:
            folded.append(message)
    return folded


def _without_nulls(value):
    """The same without the keys that hold null: columnar files give each row the keys of all."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def template_of(folder):
    """The chat template of a Hugging Face folder as text; None where it has none."""
    path = Path(folder) / 'chat_template.jinja'
    if path.exists():
        return path.read_text(encoding='utf-8')
    path = Path(folder) / 'tokenizer_config.json'
    template = json.loads(path.read_text(encoding='utf-8')).get('chat_template') if path.exists() else None
    return template if isinstance(template, str) or not template else json.dumps(template)  # several, with names


class ChatEncoder:
    """The chat template and the tokenizer of a Hugging Face folder. eot: the id of its end-of-text token."""

    def __init__(self, folder, eot):
        import transformers
        from tokenizers import Tokenizer, normalizers, processors

        self.tokenizer = Tokenizer.from_file(str(Path(folder) / 'tokenizer.json'))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        # In place of the one of the file: it adds special tokens, which the template writes, and may trim spaces off
        # the offsets.
        self.tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        # Runs behind the search for special tokens, so that those with marks are not found.
        steps = [normalizers.Replace(MARK, ''), self.tokenizer.normalizer]
        self.tokenizer.normalizer = normalizers.Sequence([step for step in steps if step is not None])
        added = self.tokenizer.get_added_tokens_decoder().items()
        special = {number: token.content for number, token in added if token.special or number == eot}
        self.special_ids, self.special_tokens = list(special), tuple(special.values())
        self.spelled = re.compile('|'.join(map(re.escape, self.special_tokens)) or '(?!)')
        self.eot = eot
        # Not AutoTokenizer: it imports torch, 190 MB per worker. The method that renders is the same.
        transformers.logging.set_verbosity_error()  # it warns that the folder names another class
        try:
            self.renderer = transformers.PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
            self.renderer.apply_chat_template([{'role': 'user', 'content': 'x'}], tokenize=False)
        except Exception as error:  # that this message is refused says nothing of other messages
            is_broken = isinstance(error, ImportError) or type(error).__name__ == 'TemplateSyntaxError'  # no jinja2
            if is_broken or not hasattr(self, 'renderer'):
                raise ValueError(f'tokenizer={folder}: its chat template cannot be used: {one_line(error)}') from error

    def examples(self, conversation, fold_system=False):
        """Yield (ids, flags, text) of what there is to learn in a conversation, which conversation_of() returned.

        fold_system: system messages become part of the user's, for templates that refuse them.

        ids: uint32 array; flags: uint8, as many, FIRST at the beginning and LEARNED where a token belongs to an answer.
        It is one example, if the template writes every answer in the whole conversation as when it came last. If not,
        as Qwen3's, which leaves out the thoughts of earlier answers, it is one per answer. So it is, with end-of-text
        behind each answer, if the template writes no end-of-turn token.
        Raises ValueError with the reason for what the template cannot write.
        """
        conversation = self._with_marks(json.loads(conversation))
        messages = conversation['messages']
        if fold_system:
            messages = fold_system_messages(messages)
        options = {**conversation.get('chat_template_kwargs', {}), 'tools': conversation.get('tools')}
        answers = [
            self._answer(messages[: index + 1], options)
            for index in range(1, len(messages))
            if messages[index]['role'] == 'assistant'
        ]
        whole = answers[-1][0]
        if all(ends and whole.startswith(text) for text, _, ends in answers):
            yield self._encode(whole, [(start, len(text)) for text, start, _ in answers], False)
        else:
            for text, start, ends in answers:
                yield self._encode(text, [(start, len(text))], not ends)

    def _with_marks(self, value):
        """The same with MARK between the letters of each special token that its texts spell."""
        if isinstance(value, str):
            return self.spelled.sub(lambda found: MARK.join(found[0]), value)
        if isinstance(value, dict):
            return {key: self._with_marks(part) for key, part in value.items()}
        return [self._with_marks(part) for part in value] if isinstance(value, list) else value

    def _answer(self, messages, options):
        """(text up to the end of the last message, where that begins, whether an end-of-turn token ends it)."""
        prompt, shown = self._render(messages[:-1], options, True), self._render(messages, options)
        if not shown.startswith(prompt):
            before = self._render(messages[:-1], options)
            if prompt.startswith(before) and shown.startswith(before):
                # A prompt that opens the answer, as with <think>, where the answer was given without it.
                prompt = os.path.commonprefix([prompt, shown])
            else:
                # A system message that is written only before the last message of the user, as by Mistral 7B v0.3.
                others = [message for message in messages if message['role'] not in INSTRUCTIONS]
                short_prompt = self._render(others[:-1], options, True)
                shown = self._render(others, options)
                if len(others) == len(messages) or not shown.startswith(short_prompt):
                    raise ValueError('rows whose answer the chat template does not write behind its prompt')
                shown = prompt + shown[len(short_prompt) :]
        text = prompt + shown[len(prompt) :].rstrip()
        return text, len(prompt), text.endswith(self.special_tokens) and len(text) > len(prompt)

    def _render(self, messages, options, add_generation_prompt=False):
        """The text that the template writes."""
        options = {'date_string': DATE, **options, 'add_generation_prompt': add_generation_prompt}
        try:
            template = self.renderer.get_chat_template(None, options.get('tools'))
            options['chat_template'] = DATE_FUNCTION + template if 'strftime_now' in template else template
            return self.renderer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # a template may raise anything
            has_system = any(message['role'] in INSTRUCTIONS for message in messages)
            mend = '; --fold_system gives system messages to the user' if has_system else ''
            raise ValueError(f'rows that the chat template refuses ({one_line(error, 100)}{mend})') from error

    def _encode(self, text, spans, add_end):
        """(ids, flags, text): learned are the tokens that lie in the spans, also in part. But not the prompt's last
        special token, which may take in the spaces behind it (rstrip, as Phi-3's <|assistant|>)."""
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.uint32)
        starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        flags = np.zeros(len(ids), dtype=np.uint8)
        special = np.isin(ids, self.special_ids)
        for start, end in spans:
            flags[(ends > start) & (starts < end) & ~(special & (starts < start))] = LEARNED
        if add_end:
            ids, flags = np.append(ids, np.uint32(self.eot)), np.append(flags, np.uint8(LEARNED))
        if not flags.any():
            raise ValueError('rows of which no token is learned')
        flags[0] |= FIRST
        return ids, flags, text.replace(MARK, '')


def marked_text(tokens, flags, decode, left, right):
    """The first conversation of tokens with flags as text, what is learned between `left` and `right`. Long parts of it
    are shortened. decode: from ids to text."""
    next_ones = np.flatnonzero(flags[1:] & FIRST) + 1
    end = next_ones[0] if len(next_ones) else len(tokens)
    changes = np.flatnonzero(np.diff(flags[:end] & LEARNED)) + 1
    parts = []
    for start, stop in itertools.pairwise([0, *changes, end]):
        # From two texts of the whole: some tokenizers drop the space with which a part begins.
        text = decode(tokens[:stop])[len(decode(tokens[:start])) :]
        text = text if len(text) <= 600 else f'{text[:400]} [...] {text[-200:]}'
        parts.append(f'{left}{text}{right}' if flags[start] & LEARNED else text)
    return ''.join(parts[:12]) + ' [...]' * (len(parts) > 12)
