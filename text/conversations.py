"""
Conversations as training examples: written by the tokenizer's own chat template, with the assistant's tokens marked.

    template = ChatTemplate(tokenizer)                  # writes them, for training and for whoever asks the model
    encoder = ChatEncoder('models/some_model', eot)     # a Hugging Face folder with a chat template
    for ids, flags, text in encoder.examples(conversation): ...       # from chat_rows.conversation_of(row)
    marked_text(ids, flags, decode, '[', ']')           # for people to read

The learned part of an assistant's message is what the template adds to the prompt that it writes for generation,
because exactly that prompt is in front of the model when it has to answer: the ids before each answer are those of its
prompt. The end-of-turn token is learned as well, or the model would never stop. So is an empty <think> block, if the
template begins an answer with one that is not in its prompt.

A template may silently drop what it does not know: a role, a tool call, a thought. Therefore each message is searched
for in the text that the template has written, and each answer in the learned part of it. But a thought `4` is also
found in the answer `It is 4.` Therefore the template also writes a twin of the conversation, in which each part is a
word that occurs nowhere else, and each has to be found there, too. A conversation of which something is missing is
refused.

Only the template writes control tokens, see control_tokens.py. A message that spells one, such as <|im_end|>, gets the
tokens of its letters, so that it cannot end its turn.
"""

import functools
import hashlib
import itertools
import json
import math
import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dataset.shards import AS_END, FIRST, LEARNED, read_meta
from system.errors import one_line
from system.files import bare_name, check_form, read_json, refuse_link_out
from text.chat_rows import INSTRUCTIONS, SAID, THINK_TAG, THOUGHTS, is_learned
from text.control_tokens import MARK, ControlTokens, ControlTokensOfPython, plain

TWIN_WORD = re.compile(r'part\d+part')  # of twin_of(): without spaces or signs, so that no form of writing changes it

# Templates that write today's date, such as Llama 3.2's, would give other tokens tomorrow. So they get the date that is
# written in Llama 3.1's template, both as a variable and from the function that transformers offers to templates.
DATE = '26 Jul 2024'
DATE_FUNCTION = (
    "{%- macro strftime_now(format) -%}{{ format | replace('%d', '26') | replace('%b', 'Jul') | replace('%B', 'July') "
    "| replace('%m', '07') | replace('%Y', '2024') | replace('%y', '24') | replace('%A', 'Friday') "
    "| replace('%H', '12') | replace('%M', '00') | replace('%S', '00') }}{%- endmacro -%}"
)


def fold_system_messages(messages):
    """The messages, with the texts of the system messages before a user's message moved to the front of that."""
    folded = []
    for message in messages:
        while message['role'] == 'user' and folded and folded[-1]['role'] in INSTRUCTIONS:
            texts = [folded[-1].get('content'), message.get('content')]
            if not all(isinstance(text, str) for text in texts):
                break
            if bool(folded.pop().get('weight')) != bool(message.get('weight')):
                raise ValueError('rows of which --fold_system would join what is learned to what is not (weight 1)')
            message = {**message, 'content': '\n\n'.join(texts)}
        folded.append(message)
    return folded


def twin_of(messages):
    """Messages of the same form, in which each text, name of a function and argument is a TWIN_WORD. They are the same
    for all conversations of that form."""
    numbers = itertools.count()

    def word(_=None):
        return f'part{next(numbers)}part'

    def text(value, word=word):  # the spaces around it stay, as does an empty text
        return re.sub(r'\S(.*\S)?', lambda found: word(found[0]), value, flags=re.DOTALL)

    def arguments(value):
        if isinstance(value, dict):
            return {key: arguments(part) for key, part in value.items()}
        return [arguments(part) for part in value] if isinstance(value, list) else word()

    def twin(message):
        thought = functools.partial(text, word=functools.cache(word))  # in two places of a message: may be written once
        said = {name: thought(message[name]) for name in THOUGHTS if isinstance(message.get(name), str)}
        if content := message.get('content'):
            *before, last = re.split(f'({THINK_TAG.pattern})', content) if message['role'] == 'assistant' else [content]
            said['content'] = ''.join(part if THINK_TAG.fullmatch(part) else thought(part) for part in before)
            said['content'] += text(last)
        if 'tool_calls' in message:
            said['tool_calls'] = [
                {**call, 'function': {'name': word(), 'arguments': arguments(call['function']['arguments'])}}
                for call in message['tool_calls']
            ]
        return {**message, **said}

    return [twin(message) for message in messages]


def twin_of_tools(tools):
    """The tools, if there are any, with names that no message has, not even in a call."""
    names = (f'tool{number}tool' for number in itertools.count())
    return tools and [{**tool, 'function': {**tool['function'], 'name': next(names)}} for tool in tools]


def templates_of(folder):
    """{name: text} of the chat templates of a Hugging Face folder, or of those that wrote a dataset's conversations. As
    for transformers, they are in .jinja files or, if there are none, in tokenizer_config.json, which has one or a list.
    The name of a single one is 'default'."""
    folder = Path(folder)
    if found := read_meta(folder).get('chat_templates'):
        return found
    files = {path.stem: path for path in sorted(folder.glob('additional_chat_templates/*.jinja'))}
    if (path := folder / 'chat_template.jinja').exists():
        files['default'] = path
    if files:
        for path in files.values():
            refuse_link_out(path, folder)
        return {bare_name(name, path): path.read_text(encoding='utf-8') for name, path in files.items()}
    path = folder / 'tokenizer_config.json'
    found = read_json(path, dict, 'copy it again').get('chat_template') if path.exists() else None
    if isinstance(found, list) and all(isinstance(one, dict) and {'name', 'template'} <= {*one} for one in found):
        check_form(found, [{'name': bare_name, 'template': str}], path, 'chat_template')
        return {one['name']: one['template'] for one in found}
    return {'default': found if isinstance(found, str) else json.dumps(found)} if found else {}


def template_of(folder):
    """The chat template of a Hugging Face folder as text, several as JSON; None if it has none."""
    return as_one(templates_of(folder))


def as_one(templates):
    """template_of() of {name: text}."""
    if len(templates) < 2:
        return next(iter(templates.values()), None)
    return json.dumps([{'name': name, 'template': templates[name]} for name in sorted(templates)])


def digest_of(template):
    """What settings in a meta.json say of template_of(). None = no template, as for text."""
    return template and hashlib.sha256(template.encode()).hexdigest()


def templates_of_data(data_folders, model_folder):
    """({name: text} of the chat templates with which datasets were made, lines for the log).

    The templates are None if those of the model's Hugging Face folder are the same, or if no dataset knows its own. The
    lines say what differs: a model has to be asked in the form in which it has learned to answer."""
    metas = {folder: meta for folder in data_folders if (meta := read_meta(Path(folder))).get('masked')}
    made_with = {folder: meta.get('settings', {}).get('chat_template') for folder, meta in metas.items()}
    made_with = {folder: digest for folder, digest in made_with.items() if digest}
    if not made_with:
        return None, []
    first, own = next(iter(made_with)), template_of(model_folder)
    anew = f'`python prepare_data.py --dataset=... --name=... --tokenizer={model_folder}`'
    others = [folder for folder, digest in made_with.items() if digest != made_with[first]]
    lines = [
        f'WARNING: {other} was made with another chat template than {first}: prepare it anew with the same --tokenizer'
        for other in others
    ]
    if made_with[first] == digest_of(own):
        return None, lines
    differs = f'{first} was made with another chat template than {model_folder} has'
    if own is None:
        differs, anew = f'{model_folder} has no chat template, {first} was made with one', 'put that into its folder'
    templates = metas[first].get('chat_templates')
    if templates:
        kept = 'this run keeps that of the data, with which sample.py, evaluate.py and an export ask'
        return templates, [*lines, f'{differs}: {kept}' + (f"; for the model's own, {anew}" if own else '')]
    return None, [*lines, f'WARNING: {differs}, so it will be asked in another form than it learns: {anew}']


class ChatTemplate:
    """The chat template of a tokenizer of transformers, which writes conversations of chat_rows.conversation_of() and
    question_of(), and the tokens of what it writes: the same for training, for sample.py, evaluate.py and
    train_grpo.py."""

    def __init__(self, tokenizer, eot=None):
        """eot: the id of the end-of-text token; None = as the tokenizer says. Raises any error for a template that
        cannot be read, and ValueError as ControlTokens does."""
        from transformers.utils.chat_template_utils import render_jinja_template

        # Not the method apply_chat_template() around this function, which drops the nulls that some templates ask for.
        self.tokenizer, self.jinja = tokenizer, render_jinja_template
        template = tokenizer.chat_template
        template = template if isinstance(template, str) else json.dumps(template)  # several, with names
        self.knows_developers = re.search(r"""['"]developer\\?['"]""", template) is not None
        self.thoughts = [name for name in THOUGHTS if re.search(rf'\b{name}\b', template)]
        # No other key of a message makes a difference.
        self.words = {*SAID, *re.findall(r'\w+', template)} - {'weight'}
        # Some templates want null as the content of a message that is only a tool call. Others would write 'None'.
        asks_for_null = re.search(r'\bcontent\W*(is|==|!=)\s+(not\s+)?none\b', template, re.IGNORECASE)
        self.no_content = None if asks_for_null else ''
        eot, around_words = tokenizer.eos_token_id if eot is None else eot, self._around_words()

        def is_control(token):
            # Turns may also begin and end with tokens that were added without the flag `special`.
            delimits = re.search(r'[^\w\s]', token['content']) and token['content'] in around_words
            return token['special'] or token['id'] == eot or (delimits and not THINK_TAG.fullmatch(token['content']))

        if backend := getattr(tokenizer, 'backend_tokenizer', None):
            self.controls = ControlTokens(json.loads(backend.to_str()), is_control)
        else:
            self.controls = ControlTokensOfPython(tokenizer)
        # DeepSeek's template joins the arguments to other text with +, so there they must be text.
        self.arguments_as_text = not self._writes_a_call({}) and self._writes_a_call('{}')

    def form_of(self, message):
        """A message with the role, keys and form of tool calls that the template knows."""
        message = {key: value for key, value in message.items() if key != 'weight'}
        if message['role'] == 'developer' and not self.knows_developers:
            message['role'] = 'system'
        message.setdefault('content', self.no_content)
        for name in THOUGHTS:
            if name in message and self.thoughts and name not in self.thoughts:
                message[self.thoughts[0]] = message.pop(name)
        if 'tool_calls' in message and self.arguments_as_text:
            message['tool_calls'] = [
                {**call, 'function': {**call['function'], 'arguments': _as_json(call['function']['arguments'])}}
                for call in message['tool_calls']
            ]
        return message

    def write(self, messages, options, add_generation_prompt=False):
        """The text of messages in the form of form_of(), with MARK before each control token that the template writes.
        options: the variables of the template, and `tools`. A template may raise any error."""
        # Think tags of an assistant's message stay what they are, since templates look for them.
        kept = {'assistant': THINK_TAG}
        messages = [self.controls.spelled_out(message, kept.get(message['role'])) for message in messages]
        return self.controls.written(self._render(messages, self.controls.spelled_out(options), add_generation_prompt))

    def _render(self, messages, options, add_generation_prompt):
        options = {'date_string': DATE, **options, 'add_generation_prompt': add_generation_prompt}
        template = self.tokenizer.get_chat_template(None, options.get('tools'))
        options['chat_template'] = DATE_FUNCTION + template if 'strftime_now' in template else template
        return self.jinja([messages], **{**self.tokenizer.special_tokens_map, **options})[0][0]

    def _around_words(self):
        """What the template writes around two plain messages; '' if it refuses them."""
        messages = [{'role': 'user', 'content': 'Question'}, {'role': 'assistant', 'content': 'Answer'}]
        try:
            return self._render(messages, {}, True)
        except Exception:  # a template may raise any error
            return ''

    def ask(self, messages, options):
        """write() of messages for the model to answer. Raises ValueError unless the template writes each of the tools,
        which a message may name as well; or if it makes a control token of a text."""
        forms, tools = [self.form_of(message) for message in messages], twin_of_tools(options.get('tools'))
        text = self.write(forms, options, add_generation_prompt=True)
        if tools:
            _check_tools(self.write(forms, {**options, 'tools': tools}, add_generation_prompt=True), tools)
        twin = [self.form_of(message) for message in twin_of(messages)]
        try:
            words = self.write(twin, {**options, 'tools': tools}, add_generation_prompt=True)
        except Exception:  # it may refuse such words
            return text
        _refuse_more_controls(text, words.count(MARK))
        return text

    def end_of_answer(self, options):
        """(what the template writes behind an answer; the id with which that begins, if it is a control token's, else
        None). The text is '' if it refuses a plain question and answer."""
        messages = [{'role': 'user', 'content': 'Question'}, {'role': 'assistant', 'content': 'Answer'}]
        try:
            end = self.write(messages, options).rpartition('Answer')[2].strip()
        except Exception:  # it may take others
            return '', None
        ids = self.controls.encode(end)
        return plain(end), ids[0] if ids and ids[0] in self.controls.ids else None

    def _writes_a_call(self, arguments):
        """Whether the template accepts a tool call with these arguments."""
        call = {'id': 'call_0001', 'type': 'function', 'function': {'name': 'f', 'arguments': arguments}}
        turns = [{'role': 'user', 'content': 'x'}]
        turns.append({'role': 'assistant', 'content': self.no_content, 'tool_calls': [call]})
        try:
            self.write(turns, {})
        except Exception:
            return False
        return True


class Answer(NamedTuple):
    """A message that is learned, in a conversation up to its end."""

    text: str
    start: int  # of the message in the text
    ids: list
    n_asked: int  # ids before those of the message
    ends: bool  # with a control token


class ChatEncoder:
    """The tokenizer of a Hugging Face folder, and a chat template. eot: the id of its end-of-text token. templates:
    {name: text}; None = the folder's own."""

    def __init__(self, folder, eot, templates=None):
        import transformers

        self.eot = eot
        self._lost_in = functools.lru_cache(maxsize=200)(self._lost_in)  # conversations have few forms
        transformers.logging.set_verbosity_error()  # else it warns that the folder names another class
        try:
            # Not AutoTokenizer, which imports torch: 190 MB per worker.
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
            if templates:
                tokenizer.chat_template = dict(templates) if len(templates) > 1 else next(iter(templates.values()))
            self.template = ChatTemplate(tokenizer, eot)
            self.template.write([{'role': 'user', 'content': 'x'}], {})
        except Exception as error:  # a template that refuses this message may take others
            is_broken = isinstance(error, ImportError) or type(error).__name__ == 'TemplateSyntaxError'  # no jinja2
            if is_broken or not hasattr(self, 'template'):
                raise ValueError(f'tokenizer={folder}: its chat template cannot be used: {one_line(error)}') from error
        self.controls = self.template.controls

    def examples(self, conversation, fold_system=False, train_on_input=False):
        """Yield the training examples, (ids, flags, text), of a conversation that conversation_of() returned.

        fold_system: make system messages part of the user's, for templates that refuse them.
        train_on_input: learn all that the template writes, also between and around messages. Of several examples each
        learns what the one before has not: from the words that follow its answer.

        ids: uint32 array. flags: uint8, one per token: FIRST at the beginning, LEARNED for the tokens of an answer.
        The ids before an answer are those of the prompt with which the model is asked for it. A conversation is one
        example if it begins with the ids of each answer as if that came last. It may end the last one with end-of-text,
        as OLMo 3's does, and those before with another token: there the flag AS_END says that end-of-text is the
        target. Otherwise there is one example per answer: Qwen3's template, for instance, leaves out the thoughts of
        earlier answers. If the template writes no end-of-turn token, there is also one example per answer, each with
        end-of-text after it.
        Raises ValueError with the reason if the template cannot write the conversation.
        """
        if MARK in conversation:  # written() would remove it
            raise ValueError('rows with the noncharacter U+FDD0, which marks other text here')
        conversation = json.loads(conversation)
        messages, tools = conversation['messages'], conversation.get('tools')
        if fold_system:
            messages = fold_system_messages(messages)
        learned = [number for number, message in enumerate(messages) if is_learned(message, number)]
        twin = [{key: message[key] for key in message if key in self.template.words} for message in twin_of(messages)]
        messages = [self.template.form_of(message) for message in messages]
        options = {**conversation.get('chat_template_kwargs', {}), 'tools': tools}
        known, answers = {}, {}
        for number in learned:
            is_asked = number and messages[number]['role'] == 'assistant'
            text, start = (self._answer if is_asked else self._words)(messages[: number + 1], options)
            answers[number] = self._encode(text, start, is_asked, known)
        if train_on_input and learned[-1] < len(messages) - 1:  # the last message is no answer
            text = self._render(messages, options).rstrip()
            answers[len(messages) - 1] = self._encode(text, self._start_of(text, messages, -1, options), False, known)
        for number, answer in answers.items():
            forms = json.dumps([twin[: number + 1], {**options, 'tools': twin_of_tools(tools)}])
            lost, n_controls = self._lost_in(forms)
            if lost:
                raise ValueError(lost)
            _refuse_more_controls(answer.text, n_controls)

        other_ends = self._other_ends_in_one(list(answers.values()))
        if other_ends is not None:
            text, _, ids, *_ = answers[max(answers)]
            spans = {number: (answer.start, len(answer.text)) for number, answer in answers.items()}
            _check_written(text, spans, messages, tools)
            flags = np.zeros(len(ids), dtype=np.uint8)
            for answer in answers.values():
                flags[0 if train_on_input else answer.n_asked : len(answer.ids)] = LEARNED
            flags[other_ends] |= AS_END
            yield _example(ids, flags, text)
            return
        before = -1  # the number of the answer before
        for number, (text, start, ids, begin, ends) in answers.items():
            shown = messages[: number + 1]
            _check_written(text, {number: (start, len(text))}, shown, tools)
            if train_on_input and number > before + 1:
                # A template that writes the system message before the user's last one does so in the prompt alone.
                forms = (shown, shown[:-1]) if before >= 0 else ()
                first = max((self._start_of(text, form, before + 1, options) for form in forms), default=0)
                begin = min(begin, self._n_before(text[:first], ids, known))
            ids = ids if ends else [*ids, self.eot]
            flags = np.zeros(len(ids), dtype=np.uint8)
            flags[begin:] = LEARNED
            yield _example(ids, flags, text)
            before = number

    def pair(self, pair, fold_system=False):
        """The two training examples, (ids, flags, text), of a pair that pair_of() returned. Raises ValueError with the
        reason if the template cannot write them, or not behind the same prompt."""
        found = [[*self.examples(json.dumps(part), fold_system)] for part in json.loads(pair).values()]
        if any(len(examples) != 1 for examples in found):
            raise ValueError('rows of which the chat template writes an answer in another way once others follow')
        return with_one_prompt([example for (example,) in found])

    def _other_ends_in_one(self, answers):
        """If a whole conversation, which is the last of the answers, can be an example for all of them, the places of
        tokens in place of which end-of-text is the target: those that end an answer before the last one, where the
        template writes end-of-text only behind that. Else None.

        Then the model has read the same before each of their tokens, so that its losses are those of an example for
        each answer."""
        whole, places = answers[-1].ids, []
        for _, _, ids, n_asked, ends in answers:
            last = len(ids) - 1
            if not ends or whole[:last] != ids[:last]:
                return None
            if whole[last] != ids[last]:
                if ids[last] != self.eot or whole[last] not in self.controls.ids or last == n_asked:
                    return None
                places.append(last)
        return places

    def _lost_in(self, twin):
        """(why the template does not write all of a twin, JSON of [messages, options]; how many control tokens it
        writes). The first is None if it does, or if it refuses such words, since it did not refuse those of the
        conversation; then the second is infinite."""
        messages, options = json.loads(twin)
        messages = [self.template.form_of(message) for message in messages]
        last = len(messages) - 1
        try:
            if last and messages[last]['role'] == 'assistant':
                text, start = self._answer(messages, options)
            else:
                text, start = self._render(messages, options), 0
        except ValueError:
            return None, math.inf
        try:
            _check_written(text, {last: (start, len(text))}, messages, options['tools'])
        except ValueError as reason:
            return str(reason), 0
        return None, text.count(MARK)

    def _answer(self, messages, options):
        """(text up to the end of the last message, which begins with the prompt for it; how long that is)."""
        prompt, shown = self._render(messages[:-1], options, True), self._render(messages, options)
        if not shown.startswith(prompt):
            before = self._render(messages[:-1], options)
            if prompt.startswith(before) and shown.startswith(before):
                # The prompt begins the answer, for example with <think> and a line feed, where this answer has only
                # <think>. Then the model is asked behind the line feed, so that it has to learn the rest from there.
                same = len(os.path.commonprefix([prompt, shown]))
                if prompt[same:].strip():
                    begin = prompt[len(before) :].rpartition(MARK)[2][-40:]
                    raise ValueError(
                        f'rows whose answer the chat template does not begin as its prompt, which ends with {begin!r}: '
                        'it would not be learned where it is asked for; begin both alike in the template, or give rows '
                        'the chat_template_kwargs with which it does'
                    )
                shown = prompt + shown[same:]
            else:
                # The template writes the system message only before the user's last message, as Mistral 7B v0.3's does.
                others = [message for message in messages if message['role'] not in INSTRUCTIONS]
                short_prompt = self._render(others[:-1], options, True)
                shown = self._render(others, options)
                if len(others) == len(messages) or not shown.startswith(short_prompt):
                    raise ValueError('rows whose answer the chat template does not write behind its prompt')
                shown = prompt + shown[len(short_prompt) :]
        return prompt + shown[len(prompt) :].rstrip(), len(prompt)

    def line_of_end(self):
        """A line that says that the template ends answers with letters, where they should be a token; else None."""
        end, token = self.template.end_of_answer({})
        if not end or token is not None:
            return None
        return (
            f'WARNING: {end[:30]!r}, by which the chat template ends an answer, is no token of the tokenizer: learned '
            "are its letters, and end-of-text behind them; the tokenizer's add_special_tokens() mends it"
        )

    def _start_of(self, text, messages, number, options):
        """Where the words of a message begin in the text that the template has written for these messages: where it
        would differ if the message said something else."""
        words = (messages[number]['content'] or '').strip()
        changed = [*messages]
        changed[number] = {**messages[number], 'content': 'y' if words.startswith('x') else 'x'}
        return len(os.path.commonprefix([text, self._render(changed, options)]))

    def _words(self, messages, options):
        """The same, where the last message is learned although the template has no prompt for it, such as a user's:
        from its words on, which have to stand at the end. If the template does not end them, end-of-text does: a model
        that is to write a user's message has to stop behind it, and one that is not is never asked what comes there."""
        text = self._render(messages, options).rstrip()
        head, _, end = text.rpartition(MARK)
        before_end, words = (head if end in self.controls.texts else text).rstrip(), messages[-1]['content'] or ''
        words = words.strip()
        if not words or not before_end.endswith(words):
            raise ValueError(
                f"rows whose {messages[-1]['role']}'s message has the weight 1, and the template ends otherwise"
            )
        return text, len(before_end) - len(words)

    def _render(self, messages, options, add_generation_prompt=False):
        """The text that the template writes for these messages."""
        try:
            return self.template.write(messages, options, add_generation_prompt)
        except Exception as error:  # a template may raise any error
            is_folded = fold_system_messages(messages) == messages
            mend = '' if is_folded else '; --fold_system gives system messages to the user'
            raise ValueError(f'rows that the chat template refuses ({one_line(error, 100)}{mend})') from error

    def _encode(self, text, start, is_asked, known):
        """The Answer that begins at `start` in a text. is_asked: the model is asked for it behind what stands before;
        else a token may cross the border, which is learned. known: as for ControlTokens.encode()."""
        if is_asked:
            ids, n_asked = self.controls.answered(text[:start], text, known)
        else:
            ids = self.controls.encode(text, known)
            n_asked = self._n_before(text[:start], ids, known)
        return Answer(text, start, ids, n_asked, len(ids) > n_asked and ids[-1] in self.controls.ids)

    def _n_before(self, text, ids, known):
        """How many ids of a longer text are those of this one, with which it begins."""
        return len(os.path.commonprefix([self.controls.encode(text, known), ids]))


def _example(ids, flags, text):
    """(ids, flags, text) as arrays. flags: without FIRST."""
    if not flags[1:].any():
        raise ValueError('rows of which no token is learned')
    flags[0] = FIRST  # what nothing stands before cannot be learned
    return np.array(ids, dtype=np.uint32), flags, plain(text)


class TextEncoder:
    """The pairs of a tokenizer without a chat template: a prompt and its answers as plain texts."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def pair(self, pair, fold_system=False):
        """As ChatEncoder.pair(), of pair_of(row, as_text=True): the prompt as sample.py asks with it, the answer, and
        end-of-text, which is learned."""
        examples = []
        for part in json.loads(pair).values():
            prompt, answer = (message['content'] for message in part['messages'])
            asked, whole = self.tokenizer.encode(prompt), self.tokenizer.encode(prompt + answer)
            if whole[: len(asked)] != asked:  # a token of the whole text crosses the border
                whole = [*asked, *self.tokenizer.encode_behind(answer)]
            begin = [*self.tokenizer.bos] or [self.tokenizer.eot] * (not asked)
            ids = [*begin, *whole, self.tokenizer.eot]
            flags = np.full(len(ids), LEARNED, dtype=np.uint8)
            flags[: len(begin) + len(asked)] = 0
            examples.append(_example(ids, flags, prompt + answer))
        return with_one_prompt(examples)


def with_one_prompt(examples):
    """The two examples of a pair. Raises ValueError unless all ids before the first learned one are the same in both:
    then the two answers are continuations of the same text; and unless these differ, as a template may not write all
    of a message."""
    if np.array_equal(*(ids for ids, _, _ in examples)):
        raise ValueError('rows whose chosen and rejected answers are the same')
    prompts = [ids[: np.flatnonzero(flags & LEARNED)[0]] for ids, flags, _ in examples]
    if not np.array_equal(*prompts):
        raise ValueError('rows whose prompt has other tokens before the chosen than before the rejected answer')
    return examples


def _check_written(text, spans, messages, tools):
    """Raise ValueError with a reason if a template has not written all contents of these messages, in their order.

    text: what the template wrote. spans: {number of a message: (start, end) of its learned part in the text}. Thoughts
    are required only in learned parts, because a template may drop those of earlier turns. It may also drop spaces at
    both ends of a content.
    """
    position = 0
    for number, message in enumerate(messages):
        role, content = message['role'], message['content'] or ''
        start, end = spans.get(number, (position, len(text)))
        if role in INSTRUCTIONS:
            start = 0  # some templates write the system message just before the last question
        parts = [content]
        if role == 'assistant':
            parts = THINK_TAG.split(content)
            thoughts = [message[name] for name in THOUGHTS if isinstance(message.get(name), str)]
            parts = thoughts + parts if number in spans else parts[-1:]
        for part in map(str.strip, parts):
            found = _find(text, part, start, end)
            if found < 0:
                reason = f"rows whose {role}'s message the chat template does not write as it is"
                if part != content.strip():
                    reason = 'rows with a thought that the chat template does not write'
                raise ValueError(reason)
            position = position if role in INSTRUCTIONS else max(position, found + len(part))
        for call in message.get('tool_calls', []):
            # Other arguments than a twin's may be written in any form: as JSON, YAML or XML.
            arguments = TWIN_WORD.findall(json.dumps(call['function']['arguments']))
            places = [text.find(part, start, end) for part in [call['function']['name'], *arguments]]
            if min(places) < 0:
                raise ValueError('rows with a tool call that the chat template does not write')
            position = max(position, *places)
    _check_tools(text, tools)


def _refuse_more_controls(text, expected):
    """Raise ValueError if a template has written more control tokens than with other words: it may have joined parts of
    a message, or written them in small letters. There may be fewer, since some templates put them around texts, but not
    around numbers."""
    if text.count(MARK) > expected:
        raise ValueError('rows with a text of which the chat template makes a control token')


def _check_tools(text, tools):
    """Raise ValueError with a reason if one of the tools is not in what a template wrote."""
    for tool in tools or []:
        if str(tool['function'].get('name', '')) not in text:
            raise ValueError('rows with tools that the chat template does not write')


def _find(text, part, start, end):
    """Where a part of a message is in a text; -1 = nowhere. Some templates write a tool's result as JSON."""
    found = text.find(part, start, end)
    return found if found >= 0 else text.find(_as_json(part)[1:-1], start, end)


def _as_json(value):
    return json.dumps(value, ensure_ascii=False)


def marked_text(tokens, flags, decode, left, right):
    """The first conversation of tokens with flags as text, with `left` and `right` around what is learned. Long parts
    are shortened. decode: a function from ids to text."""
    next_ones = np.flatnonzero(flags[1:] & FIRST) + 1
    end = next_ones[0] if len(next_ones) else len(tokens)
    changes = np.flatnonzero(np.diff(flags[:end] & LEARNED)) + 1
    parts = []
    for start, stop in itertools.pairwise([0, *changes, end]):
        # As the difference of two decoded beginnings, since some tokenizers drop the space at the start of a part.
        text = decode(tokens[:stop])[len(decode(tokens[:start])) :]
        text = text if len(text) <= 600 else f'{text[:400]} [...] {text[-200:]}'
        parts.append(f'{left}{text}{right}' if flags[start] & LEARNED else text)
    return ''.join(parts[:12]) + ' [...]' * (len(parts) > 12)
