"""
Rows of instruction data under chat templates, read through text/chat_rows.py and text/conversations.py.

What a row says is drawn first, in OpenAI's format. Then it is written in one of the forms that datasets have, and
perhaps spoilt. The reference is a plain loop over apply_chat_template().
"""

import copy
import functools
import json
import re
from pathlib import Path

import numpy as np

from dataset.shards import AS_END, FIRST, LEARNED
from fuzzing.cases import LIMIT, SPECIALS, STAYS, Words, Wrong, check, draw_text, small_tokenizer, some
from fuzzing.templates import ASK_FOR_NULL, DATES, TEMPLATES
from system.errors import one_line
from text import chat_rows, conversations
from text.language import TransformersLanguage

CHAT_TOKENIZERS = ('gpt2', 'llama3', 'nfc', 'llama2', 'lines')


class Template:
    """A chat template with a tokenizer: the folder, its ChatEncoder, and the plain reference."""

    def __init__(self, name, kind, normalized):
        import transformers
        from tokenizers import AddedToken, Tokenizer

        transformers.logging.set_verbosity_error()
        self.name, self.kind = name, kind
        source, end = TEMPLATES[name]
        tokenizer = Tokenizer.from_str(small_tokenizer(kind))
        strips = name == 'takes in spaces'
        tokens = [AddedToken(token, special=True, normalized=normalized, rstrip=strips) for token in SPECIALS]
        tokenizer.add_special_tokens(tokens)
        tags = [AddedToken(tag, special=kind == 'nfc', normalized=False) for tag in ('<think>', '</think>')]
        tokenizer.add_tokens(tags) if kind in ('llama3', 'nfc') else None
        folder = Path(STAYS.name, f'{name}-{kind}-{normalized}'.replace(' ', '_'))
        bos = '<|begin_of_text|>' if end == '<|eot_id|>' else '<bos>' if end == '<end_of_turn>' else '<s>'
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, bos_token=bos)
        fast.chat_template = source
        fast.save_pretrained(folder)
        self.raw = Tokenizer.from_file(f'{folder}/tokenizer.json')
        self.encoder = conversations.ChatEncoder(str(folder), self.raw.token_to_id(end))
        self.eot = self.raw.token_to_id(end)
        added = self.raw.get_added_tokens_decoder().values()
        self.added = sorted(token.content for token in added)
        self.specials = tuple(token.content for token in added if token.special)
        for format, date in DATES.items():
            source = source.replace(f"strftime_now('{format}')", f"'{date}'")
        self.reference, self.source = fast, source
        self.languages = [TransformersLanguage(fast, folder, fold_system=folds) for folds in (False, True)]

    def render(self, messages, options, add_generation_prompt=False):
        """What apply_chat_template makes of messages."""
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {'date_string': DATES['%d %b %Y'], **options, 'add_generation_prompt': add_generation_prompt}
        options['chat_template'] = self.source
        if self.name in ASK_FOR_NULL:  # these templates ask for nulls, which apply_chat_template() drops
            options = {**self.reference.special_tokens_map, **options}
            return render_jinja_template([messages], **options)[0][0]
        return self.reference.apply_chat_template(messages, tokenize=False, **options)


@functools.cache
def template_of(name, kind, normalized):
    return Template(name, kind, normalized)


# --- rows: drawing ----------------------------------------------------------------------------------------------------


def draw_messages(draw, word, turns, with_tools):
    """(messages in OpenAI's format, tools): what a row says. Thoughts are in the field 'thought'."""
    messages, tools = [], []

    def text():
        return draw_text(draw, word(), SPECIALS)

    if some(draw, 0.3):
        role = 'developer' if some(draw, 0.2) else 'system'
        messages.append({'role': role, 'content': text()})
    for _ in range(turns):
        messages.append({'role': 'user', 'content': text()})
        if with_tools and some(draw, 0.7):
            name = f'get_{word()}'
            arguments = {} if some(draw, 0.1) else {'city': text(), 'days': draw.choice([3, 2.5, None, [1, 'a'], {}])}
            call = {'id': 'call_0001', 'type': 'function', 'function': {'name': name, 'arguments': arguments}}
            content = text() if some(draw, 0.3) else None
            messages.append({'role': 'assistant', 'content': content, 'tool_calls': [call]})
            messages.append({'role': 'tool', 'content': text()})
            parameters = {'type': 'object', 'properties': {'city': {'type': 'string'}}}
            tools.append({'type': 'function', 'function': {'name': name, 'description': 'x', 'parameters': parameters}})
        answer = {'role': 'assistant', 'content': text()}
        if some(draw, 0.15):
            answer['thought'] = f'so {word()}'
        messages.append(answer)
    if some(draw, 0.1):
        messages.append({'role': 'user', 'content': text()})
    return messages, tools if with_tools and some(draw, 0.8) else []


def spelled_call(draw, call):
    """A tool call in one of the forms that datasets have."""
    name, arguments = call['function']['name'], call['function']['arguments']
    form = draw.randrange(4)
    if form == 0:
        return call
    if form == 1:
        return {**call, 'function': {'name': name, 'arguments': json.dumps(arguments, ensure_ascii=some(draw, 0.5))}}
    return {'name': name, 'arguments': arguments if form == 2 else json.dumps(arguments)}


def spelled_tools(draw, tools):
    form = draw.randrange(5)
    if form == 0:
        return {'tools': json.dumps(tools)}
    if form == 1:
        return {'tools': [json.dumps(tool) for tool in tools]}
    if form == 2:
        return {draw.choice(['tools', 'functions']): [tool['function'] for tool in tools]}
    return {'tools': tools}


def think_aloud(message):
    """Write the thought of a message into its content."""
    if 'thought' in message:
        message['content'] = f'<think>\n{message.pop("thought")}\n</think>\n\n{message["content"]}'


def spelled_message(draw, message):
    """A message in OpenAI's format, with parts, nulls and thoughts in the forms that datasets have."""
    if some(draw, 0.4):
        think_aloud(message)
    message = {**message}
    if 'thought' in message:
        message[draw.choice(['reasoning_content', 'thinking', 'reasoning'])] = message.pop('thought')
    if 'tool_calls' in message:
        calls = message.pop('tool_calls')
        if some(draw, 0.2):
            function = calls[0]['function']
            message['function_call'] = {**function, 'arguments': json.dumps(function['arguments'])}
        else:
            message['tool_calls'] = [spelled_call(draw, call) for call in calls]
    if isinstance(message['content'], str) and some(draw, 0.15):
        text, cut = message['content'], draw.randint(0, len(message['content']))
        parts = [text] if some(draw, 0.6) else [text[:cut], text[cut:]]
        message['content'] = [{'type': 'text', 'text': part} for part in parts]
        if some(draw, 0.3):
            message['content'] = [{**part, 'image_url': None} for part in message['content']]
    if some(draw, 0.2):
        message = {'tool_calls': None, 'name': None, **message}
    if some(draw, 0.1) and message['role'] == 'assistant':  # any other message would be learned, too
        message['weight'] = 1
    if some(draw, 0.1):
        message = dict(sorted(message.items()))
    return message


def in_openai_form(draw, messages, tools):
    rows = [spelled_message(draw, message) for message in messages]
    if some(draw, 0.1) and {message['role'] for message in messages} <= {'system', 'developer', 'user', 'assistant'}:
        for row in rows:
            row['role'] = {'user': 'customer', 'assistant': 'agent'}.get(row['role'], row['role'])
    name = draw.choice(['messages', 'messages', 'messages', 'conversations', 'conversation', 'dialog'])
    return {name: json.dumps(rows) if some(draw, 0.1) else rows, **(spelled_tools(draw, tools) if tools else {})}


def in_sharegpt_form(draw, messages, tools):
    names = {'user': ['human', 'Human', 'user'], 'assistant': ['gpt', 'chatgpt', 'assistant', 'GPT']}
    names |= {'tool': ['observation', 'tool'], 'system': ['system'], 'developer': ['system']}
    rows = []
    for message in messages:
        think_aloud(message)
        value = message['content']
        role = draw.choice(names[message['role']])
        if 'tool_calls' in message:
            call = message['tool_calls'][0]['function']
            role, value = 'function_call', json.dumps(call if some(draw, 0.5) else [call])
            message.update(content=None)
        if message['role'] == 'developer':
            message.update(role='system')
        rows.append({'from': role, 'value': value} | ({'weight': None} if some(draw, 0.1) else {}))
    row = {'conversations': json.dumps(rows) if some(draw, 0.1) else rows}
    if messages[0]['role'] == 'system' and some(draw, 0.5):
        row |= {'system': rows.pop(0)['value']}
        row['conversations'] = rows
        if not row['system']:  # an empty one counts as none
            messages.pop(0)
    return row | (spelled_tools(draw, tools) if tools else {})


def in_prompt_form(draw, messages, tools):
    """The row as a prompt and an answer; answers inside the prompt are not learned."""
    last = max(number for number, message in enumerate(messages) if message['role'] == 'assistant')
    del messages[last + 1 :]
    for message in messages[:last]:
        if message['role'] == 'assistant':
            message['weight'] = 0
    prompt = [spelled_message(draw, message) for message in messages[:last]]
    completion = [spelled_message(draw, message) for message in messages[last:]]
    for message in (*prompt, *completion):
        message.pop('weight', None)
    if len(messages) == 2 and some(draw, 0.3):
        prompt = messages[0]['content']
    if 'thought' not in messages[last] and some(draw, 0.5):
        completion = messages[last]['content']
    prompt = json.dumps(prompt) if some(draw, 0.1) and not isinstance(prompt, str) else prompt
    row = {'prompt': prompt, 'completion': completion}
    return row | (spelled_tools(draw, tools) if tools else {})


def in_pair_form(draw, messages, tools):
    """The row as two fields, the first question and its answer."""
    system = messages.pop(0) if messages[0]['role'] != 'user' else None
    del messages[2:]
    question, answer = messages
    answer.pop('thought', None)
    names = [('instruction', 'output'), ('question', 'answer'), ('query', 'response'), ('problem', 'solution')]
    names += [('prompt', 'completion'), ('instruction', 'response'), ('question', 'answers'), ('inputs', 'targets')]
    names = draw.choice(names)
    row = {names[0]: question['content'], names[1]: answer['content']}
    if names[1] == 'answers' or (names[0] == 'question' and some(draw, 0.2)):
        row[names[1]] = draw.choice([[answer['content'], 'or so'], {'text': [answer['content']], 'answer_start': [3]}])
    if names[0] in ('instruction', 'question') and some(draw, 0.5):
        row['input' if names[0] == 'instruction' else 'context'] = context = draw.choice(['', 'of c1x\n', None])
        question['content'] = '\n\n'.join(text for text in (question['content'], context) if text)
    if system:
        row[draw.choice(['system', 'system_prompt'])] = system['content']
        if system['content']:
            messages.insert(0, {**system, 'role': 'system'})
    return row


def in_strings_form(draw, messages, tools):
    if messages[0]['role'] != 'user':
        messages.pop(0)
    for message in messages:
        message.pop('thought', None)
    return {'conversations': [message['content'] for message in messages]}


FORMS = {in_openai_form: 6, in_sharegpt_form: 3, in_prompt_form: 2, in_pair_form: 3, in_strings_form: 1}
NO_TOOLS = (in_pair_form, in_strings_form)


def spoil_row(draw, row, messages):
    """Change a row so that nothing can be learned from it. Returns whether that was possible."""
    name = next((name for name in row if name in chat_rows.LISTS and isinstance(row[name], list)), None)
    if name is None:
        return False
    last = max(number for number, message in enumerate(messages) if message['role'] == 'assistant')
    rows, number = row[name], draw.randint(0, min(last, len(row[name]) - 1))
    message = rows[number]
    harm = draw.randrange(7)
    if harm == 0:
        row[name] = draw.choice([5, {}, 'no list', True, [], json.dumps(rows)[:-3], [[]], [[], {}]])
    elif harm == 1:
        rows[number] = draw.choice([None, 5, [], True, {}, ['a']])
    elif not isinstance(message, dict):
        return False
    elif harm == 2:
        role = 'role' if 'role' in message else 'from'
        message[role] = draw.choice(['narrator', 7, None, ['user'], '', {}])
        if some(draw, 0.3):
            del message[role]
    elif harm == 3:
        text = 'content' if 'content' in message else 'value'
        image = {'type': 'image_url', 'image_url': {'url': 'x'}}
        message[text] = draw.choice([7, True, {'a': 1}, 0.5, [7], [image], [{'type': 'text'}], [{'text': 'a'}, image]])
        if not (message.get('tool_calls') or message.get('function_call')) and some(draw, 0.4):
            message[text] = None
            if some(draw, 0.5):
                del message[text]
    elif harm == 4:
        row['tools'] = draw.choice([5, [5], {'a': 1}, 'none', True, [{'function': 5}]])
    elif harm == 5:
        row['chat_template_kwargs'] = draw.choice([5, [1], 'x', True])
    else:
        message['tool_calls'] = draw.choice([5, 'x', [5], [{}], [{'function': {'name': None}}], [{'function': 'f'}]])
    return True


def mutate(draw, value):
    """Change one place of a row to anything. What the row means then is not defined."""
    while isinstance(value, (dict, list)) and value:
        key = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
        if isinstance(value[key], (dict, list)) and value[key] and some(draw, 0.8):
            value = value[key]
            continue
        form = draw.randrange(6)
        if form == 0:
            del value[key]
        elif form == 1 and isinstance(value, dict):
            value[draw.choice(['role', 'content', 'name', 'text', 'tools', f'{key}s', key.title()])] = value.pop(key)
        elif form == 2:
            value[key] = [value[key]]
        elif form == 3:
            value[key] = json.dumps(value[key])
        elif form == 4:
            value[key] = {draw.choice(['content', 'text', 'a', 'role']): value[key]}
        else:
            anything = [None, 0, 1, -1, 1e300, float('nan'), True, '', 'x', [], {}, [None], {'a': None}, 'user', '[']
            anything += ['\ufdd0', 'assistant', 'system', 'tool', '\ud800', [[]], '{"a": 1}', 'null']
            value[key] = draw.choice(anything)
        return


# --- rows: comparing --------------------------------------------------------------------------------------------------


def conversations_up_to_answers(messages):
    """The messages, without their weights, up to each answer that is learned."""
    plain = [{key: value for key, value in one.items() if key != 'weight'} for one in messages]
    is_learned = [number and one['role'] == 'assistant' and one.get('weight', 1) for number, one in enumerate(messages)]
    return [plain[: number + 1] for number, learned in enumerate(is_learned) if learned]


def ids_of_prompts(template, messages, options):
    """[the ids of the prompt that apply_chat_template() writes for each answer that is learned]."""
    texts = [template.render(so_far[:-1], options, True) for so_far in conversations_up_to_answers(messages)]
    if template.name == 'takes in spaces':
        return [template.reference.encode(text, add_special_tokens=False) for text in texts]
    return [encoded(template, text, [], False)[0] for text in texts]


def check_prompts(template, examples, prompts, row):
    """Check that before each answer stand the ids with which a model is asked for it."""
    found = []
    for ids, flags, _ in examples:
        begins = np.flatnonzero(np.diff(flags & LEARNED, prepend=0) == 1)
        found += [ids[:begin].tolist() for begin in begins]
    check(found == prompts, 'other ids before an answer than those of its prompt', row, found, prompts)


def check_asked(template, conversation, fold, prompts, row):
    """Check that sample.py asks for the last answer with the ids of its prompt."""
    conversation = json.loads(conversation)
    messages = [{key: part for key, part in one.items() if key != 'weight'} for one in conversation['messages']]
    asked = template.languages[fold].prompt_of_chat({**conversation, 'messages': messages[:-1]}).ids
    check(asked == prompts[-1], 'other ids of a prompt', row, asked, prompts[-1])


def n_controls(template, ids):
    specials = {template.raw.token_to_id(token) for token in template.specials}
    return sum(number in specials for number in ids)


def expected_examples(template, messages, options):
    """[(text, [(start, end) of what is learned], whether end-of-text follows)] by a plain loop over what
    apply_chat_template() gives. None if that, or its ids, do not begin with the prompt, when a plain loop cannot
    tell."""
    answers = []
    for so_far in conversations_up_to_answers(messages):
        prompt, shown = template.render(so_far[:-1], options, True), template.render(so_far, options)
        if not shown.startswith(prompt):
            return None
        text = prompt + shown[len(prompt) :].rstrip()
        asked, whole = encoded(template, prompt, [], False)[0], encoded(template, text, [], False)[0]
        if whole[: len(asked)] != asked:
            return None
        answers.append((text, len(prompt), text.endswith(template.specials) and len(text) > len(prompt)))
    whole = answers[-1][0]
    if all(ends and whole.startswith(text) for text, _, ends in answers):
        return [(whole, [(start, len(text)) for text, start, _ in answers], False)]
    return [(text, [(start, len(text))], not ends) for text, start, ends in answers]


def in_the_templates_words(template, message):
    """A message of what the row says, as this template expects it."""
    message = copy.deepcopy(message)
    thought = message.pop('thought', None)
    if thought is not None:
        message |= dict.fromkeys(('reasoning_content', 'thinking', 'reasoning'), thought)
    if message['role'] == 'developer' and template.name != 'developer':
        message['role'] = 'system'
    if message['content'] is None and template.name not in ASK_FOR_NULL:
        message['content'] = ''
    for call in message.get('tool_calls', []):
        call['function']['arguments'] = call['function']['arguments'] or {}
        if template.name == 'asks for null':
            call['function']['arguments'] = json.dumps(call['function']['arguments'], ensure_ascii=False)
    return message


def words_in(value):
    """The words of the case that occur in a message or text."""
    return re.findall(r'w\d+x', value if isinstance(value, str) else json.dumps(value, default=str))


def is_silent(number, message):
    """Whether a message is an answer that would be learned although it says nothing."""
    is_learned = number > 0 and message['role'] == 'assistant' and message.get('weight', 1)
    says = 'thought' in message or 'tool_calls' in message or (message['content'] or '').strip()
    return bool(is_learned and not says)


def learned_text(template, ids, flags):
    """The text that is learned, one stretch after the other."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags & LEARNED, [0]])))
    stretches = [ids[a:b].tolist() for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return [template.raw.decode(stretch, skip_special_tokens=False) for stretch in stretches]


def check_row(draw, folder):
    """Check a case: a row of instruction data under a chat template."""
    kind = draw.choice(CHAT_TOKENIZERS)
    normalized = some(draw, 0.3) and kind not in ('nfc', 'llama2')  # whose normalizers make other tokens of these
    template = template_of(draw.choice(list(TEMPLATES)), kind, normalized)
    form = draw.choices(list(FORMS), list(FORMS.values()))[0]
    messages, tools = draw_messages(draw, Words(), draw.choice([1, 1, 2, 3]), form not in NO_TOOLS and some(draw, 0.2))
    row = form(draw, messages, tools)
    options = {}
    if some(draw, 0.1):
        options = {'enable_thinking': some(draw, 0.5)}
        row['chat_template_kwargs'] = options if some(draw, 0.7) else json.dumps(options)
    row |= {'id': 7, 'source': 'web', 'score': None} if some(draw, 0.3) else {}
    row |= {'tools': None, 'system': None} if some(draw, 0.1) and not tools and 'system' not in row else {}
    is_spoilt = some(draw, 0.15) and spoil_row(draw, row, messages)
    is_mutated = not is_spoilt and some(draw, 0.15)
    if is_mutated:
        mutate(draw, row)
    row = json.loads(json.dumps(row))
    messages = json.loads(json.dumps(messages, ensure_ascii=False).encode('utf-8', 'replace'))
    fold = some(draw, 0.1)
    conversation = chat_rows.conversation_of(row).encode('utf-8', 'replace').decode()  # as documents.py passes it on
    examples = list(template.encoder.examples(conversation, fold))

    check(not is_spoilt, 'a row that says nothing was learned', row, [text for _, _, text in examples])
    for ids, flags, text in examples:
        check(len(ids) == len(flags) and flags[0] & FIRST and not (flags[1:] & FIRST).any(), 'flags', ids, flags)
        check((flags & LEARNED).any(), 'nothing is learned', row, text)
    learned = [part for ids, flags, _ in examples for part in learned_text(template, ids, flags)]
    texts = '\n'.join(text for _, _, text in examples)
    if is_mutated:
        check_words_of_mutated(row, learned, texts)
        return
    if fold:
        fold_plainly(messages)
    last = max(number for number, message in enumerate(messages) if message['role'] == 'assistant')
    messages = messages[: last + 1]
    check(not any(is_silent(*numbered) for numbered in enumerate(messages)), 'an empty answer was learned', row)
    check_words(messages, tools, learned, examples, row)
    words = [disguise(in_the_templates_words(template, message)) for message in messages]
    try:
        prompts = ids_of_prompts(template, words, {**options, 'tools': tools or None})
        expected = expected_examples(template, words, {**options, 'tools': tools or None})
    except Exception as error:
        raise Wrong(f'learned what apply_chat_template refuses: {one_line(error)} | {row!r}'[:LIMIT]) from error
    if template.name == 'cuts off' and words != messages:
        return
    spells_tokens = any(letter in json.dumps(words, ensure_ascii=False) for letter in PRIVATE)
    if template.name != 'takes in spaces' or not spells_tokens:
        check_prompts(template, examples, prompts, row)
        check_asked(template, conversation, fold, prompts, row)
    for ids, _, text in examples:
        if template.kind in ('gpt2', 'llama3', 'lines') and template.name != 'takes in spaces':
            decoded = template.raw.decode(ids.tolist(), skip_special_tokens=False)
            expected_text = (text, text + template.raw.id_to_token(template.eot))
            check(decoded in expected_text, 'other text of the ids', row, decoded, text)
    if expected is None:
        return
    if any((flags & AS_END).any() for _, flags, _ in examples):
        check_one_for_all(template, *examples[0][:2], expected, row)
        return
    for (ids, _, _), (text, _, adds_end) in zip(examples, expected, strict=False):
        own = n_controls(template, encoded(template, text, [], adds_end)[0])
        check(n_controls(template, ids.tolist()) == own, 'a text became a control token', row, ids.tolist())
    found, theirs = [text for _, _, text in examples], [undisguise(text) for text, _, _ in expected]
    check(found == theirs, 'other text', row, found, theirs)
    for (ids, flags, _), example in zip(examples, expected, strict=True):
        check_tokens(template, ids, flags, *example)


PRIVATE = {chr(0xE000 + number): token for number, token in enumerate(SPECIALS)}


def disguise(value):
    """The same value with a character of its own in place of each special token that a message spells out, since such
    tokens are not the template's."""
    if isinstance(value, str):
        for letter, token in PRIVATE.items():
            value = value.replace(token, letter)
        return value
    if isinstance(value, dict):
        return {key: disguise(part) for key, part in value.items()}
    return [disguise(part) for part in value] if isinstance(value, list) else value


def undisguise(text):
    for letter, token in PRIVATE.items():
        text = text.replace(letter, token)
    return text


def encoded(template, text, spans, add_end):
    """(ids of the text, where a message spells out a special token those of its letters; whether each has a letter in a
    span, and so is learned, or None where tokens do not tell their letters)."""
    tokens, ids = [], []
    for stretch in re.split(f'({"|".join(map(re.escape, template.added))})', text):
        template.raw.encode_special_tokens = any(letter in stretch for letter in PRIVATE)
        encoding = template.raw.encode(undisguise(stretch), add_special_tokens=False)
        tokens, ids = tokens + encoding.tokens, ids + encoding.ids
    template.raw.encode_special_tokens = False
    ids += [template.eot] * add_end
    if template.kind in ('nfc', 'llama2'):
        return ids, None
    position, learned = 0, []  # in bytes, as the letters of a byte-level token count them
    spans = [[len(undisguise(text[:place]).encode()) for place in span] for span in spans]
    for token in tokens:
        end = position + len(token.encode() if token in template.added else token)
        learned.append(any(position < stop and end > start for start, stop in spans))
        position = end
    check(position == len(undisguise(text).encode()), 'the reference has lost its place', text)
    return ids, learned + [True] * add_end


def check_tokens(template, ids, flags, text, spans, add_end):
    """Check the ids of a text, and which of them are learned."""
    if template.name == 'takes in spaces':
        return
    expected, learned = encoded(template, text, spans, add_end)
    check(ids.tolist() == expected, 'other ids', text, ids.tolist(), expected)
    if learned is not None:
        check(((flags & LEARNED) > 0).tolist() == learned, 'another mask', text, spans, flags.tolist())


def check_one_for_all(template, ids, flags, expected, row):
    """Check that an example with AS_END teaches the same tokens, each after the same ones, as an example for each
    answer."""
    if template.name == 'takes in spaces':
        return
    places = np.flatnonzero(flags & LEARNED)
    ours = {(*ids[:place].tolist(), template.eot if flags[place] & AS_END else int(ids[place])) for place in places}
    theirs = set()
    for example in expected:
        tokens, learned = encoded(template, *example)
        if learned is None:
            return
        theirs |= {tuple(tokens[: place + 1]) for place in np.flatnonzero(learned)}
    check(ours == theirs, 'other tokens are learned', row, sorted(ours ^ theirs))


def check_words(messages, tools, learned, examples, row):
    """Check that every message is in the text, and that answers and nothing else are in what is learned."""
    texts = [text for _, _, text in examples]
    learned_words = [word for part in learned for word in words_in(part)]
    for message in messages:
        is_answer = message['role'] == 'assistant'
        is_learned = is_answer and message.get('weight', 1)
        parts = re.split('</?think>', message['content'] or '') if is_answer else [message['content']]
        if not is_learned:  # the thoughts of answers before the learned one may be left out
            parts = parts[-1:]
        calls = [call['function'] for call in message.get('tool_calls', [])]
        for word in words_in([*parts, *calls, message.get('thought', '') if is_learned else '']):
            count = learned_words.count(word)
            check(count == bool(is_learned), f'{word} is learned {count} times', row, texts, learned)
            check(any(word in text for text in texts), f'{word} is lost', row, texts)
        for part in map(str.strip, parts):
            forms = [part, json.dumps(part, ensure_ascii=False)[1:-1]]
            check(any(form in text for text in texts for form in forms), 'a text is lost', message, texts)
    for tool in tools:
        check(all(tool['function']['name'] in text for text in texts), 'a tool is lost', row, texts)


def check_words_of_mutated(row, learned, texts):
    """It is not defined what the row means, but what comes before something learned must be there, too."""
    messages = next((row[name] for name in chat_rows.LISTS if isinstance(row.get(name), list)), None)
    if messages is None or not all(isinstance(message, dict) for message in messages):
        return
    behind = True
    for message in reversed(messages):
        spoken = {key: message[key] for key in ('content', 'value') if key in message}
        words = [word for word in words_in(spoken)]
        behind = behind and not any(word in part for word in words for part in learned)
        for word in words:
            check(behind or word in texts, f'{word} is lost', row, texts)


def fold_plainly(messages):
    """Move a first system message into the user's message, as --fold_system does."""
    for number in range(len(messages) - 2, -1, -1):
        system, user = messages[number : number + 2]
        if system['role'] in ('system', 'developer') and user['role'] == 'user':
            user['content'] = f'{system["content"]}\n\n{user["content"]}'
            del messages[number]
