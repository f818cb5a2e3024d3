"""
Turns rows of instruction data into conversations, whatever their fields are called.

    conversation = conversation_of(row)                                # a row of any known shape, checked: JSON text
    conversation = conversation_of(row, ('problem', 'solution'))       # if the fields have other names
    conversation = question_of(row)                                    # a row to be answered, for sample.py
    pair = pair_of(row)                                                # a row with a better and a worse answer
    holds_conversation(row)                                            # would it be read as a conversation?
    reason_against_text(row)                                           # why it should not be learned as plain text

A row is either read as it is meant or refused with a ValueError that says why. The reasons do not name the row, so that
prepare_data.py can count how many rows were left out for each reason.
"""

import contextlib
import json
import re

# Fields that hold a list of messages. `conversations` is ShareGPT's, with `from` and `value`, or LIMA's, plain strings.
LISTS = ('messages', 'conversations', 'conversation', 'dialog', 'dialogue')
# Fields of a question and its answer in Alpaca, Dolly, GSM8K, OpenOrca, SQuAD, MetaMath, xLAM, MATH, FLAN and others.
# (source, target) and (input, output) are left out because they may be anything; --chat_fields reads them.
PAIRS = (
    ('prompt', 'completion'),
    ('prompt', 'response'),
    ('instruction', 'output'),
    ('instruction', 'response'),
    ('question', 'answer'),
    ('question', 'response'),
    ('question', 'answers'),
    ('query', 'response'),
    ('query', 'answer'),
    ('query', 'answers'),
    ('problem', 'solution'),
    ('inputs', 'targets'),
)
TURNS = (('input', 'output'), ('human', 'assistant'), ('user', 'assistant'))  # one element for two messages: Capybara
CONTEXTS = ('input', 'context')  # beside a question: the text that it is about
SYSTEMS = ('system', 'system_prompt')  # beside a pair or a list: the system message
CHOICES = ('choices', 'options')  # beside a question that cannot be answered without them
PREFERENCES = ('chosen', 'rejected')  # as the fields of a source they say that its rows are pairs
MARKS = dict.fromkeys(('true', '1', '1.0'), True)  # labels of good answers, as JSON, numbers and tables spell them
MARKS |= dict.fromkeys(('false', '0', '0.0'), False)  # and of bad ones
LABELLED = ('prompt', 'completion', 'label')  # an answer, and whether it is a good one (KTO): two make a pair
BEGUN = 'initial_reason_steps'  # beside a pair: how both of its answers begin (xinlai/Math-Step-DPO-10K)
ASKED = ('prompt', 'question', 'instruction', 'query', 'input')  # beside a pair: what both of its answers answer
# A conversation as one text, as in Anthropic's HH.
TRANSCRIPT = re.compile(r'(?:^|\n\n)(Human|Assistant):')
TREE = ('parent_id', 'role')  # in rows that are single messages (OpenAssistant)
MEDIA = ('image', 'images', 'audio', 'audios', 'video', 'videos')  # beside a text that cannot be answered without them
BESIDE_MESSAGES = (*SYSTEMS, 'tools', 'functions', 'chat_template_kwargs')  # what the template gets with them
BESIDE = (*CONTEXTS, *CHOICES, *PREFERENCES, BEGUN, *MEDIA, 'history', 'label', *BESIDE_MESSAGES)
CHAT_FIELDS = tuple(dict.fromkeys([*LISTS, *(name for pair in PAIRS for name in pair), *BESIDE]))  # all that are known

OTHER_FIELDS = '--chat_fields=QUESTION,ANSWER or --chat_fields=LIST_OF_MESSAGES'
FORMATS_IN_WORDS = (
    'messages, conversations, prompt and completion, instruction and output, question and answer, or any others by '
    f'{OTHER_FIELDS}'
)
KEYS_OF_MESSAGES = 'rename its keys to role and content, or from and value'
RENAME_ROLE = 'rename it to user, or to assistant, whose words are learned'
AS_TEXT = '--text_field=FIELD learns one field as text'
NO_CONVERSATIONS = f'no conversations ({FORMATS_IN_WORDS})'
PREFERENCE_PAIRS = (
    'rows that are preference pairs (chosen and rejected): --pairs reads them for train_dpo.py, '
    '--chat_fields=prompt,chosen learns the chosen answers (--chat_fields=chosen, where these are lists of messages), '
    '--text_field=FIELD one field as text'
)
ONE_ANSWER = (
    'rows with a label are single answers: join a good and a bad one to the same prompt to a row of prompt, chosen and '
    'rejected'
)
NO_TEMPLATE = (
    'rows that are conversations, which only a chat template can write: give the --tokenizer of a chat model; without '
    'one, a pair is a text with two texts that go on from it'
)
PARTS_OF_TREES = (
    'rows that are single messages of trees (parent_id, role, text): join each path of a tree to one row of messages, '
    'or --chat=False learns each message as a text'
)

INSTRUCTIONS = ('system', 'developer')
QA_ROLES = ('user', 'assistant')  # of alternating messages
ROLES = {name: name for name in (*INSTRUCTIONS, 'user', 'assistant', 'tool')}
ROLES |= dict.fromkeys(('human', 'prompter'), 'user')
ROLES |= dict.fromkeys(('gpt', 'chatgpt', 'bing', 'bard', 'bot', 'model'), 'assistant')
ROLES |= dict.fromkeys(('function', 'ipython', 'observation', 'tool_response', 'function_response'), 'tool')
CALLS = ('function_call', 'tool_call')  # roles that mark an assistant's message whose text is a tool call in JSON
ROLES |= dict.fromkeys(CALLS, 'assistant')
# Who they are is clear where both speak and nobody else does. An agent beside a user may be a tool, and a customer
# beside an assistant the one whose words are to be learned.
SUPPORT = {'customer': 'user', 'agent': 'assistant'}
# Who speaks in lists of messages with other keys, and on which side: only to see what they are, not to read them.
SIDES = ROLES | SUPPORT | dict.fromkeys(('client', 'caller', 'visitor'), 'user')
SIDES |= dict.fromkeys(('operator', 'support', 'representative'), 'assistant')
# Keys under which a message may hold what the assistant thought before its answer. A template knows one of them.
THOUGHTS = ('reasoning_content', 'thinking', 'reasoning')
SAID = ('role', 'content', 'tool_calls', 'tool_call_id', 'name', *THOUGHTS)  # by which the messages of a pair differ
NUMBER = re.compile(r'[-+]?[\d.]+(e[-+]?\d+)?')
THINK_TAG = re.compile('</?think>')
TEXT_PARTS = ('text', 'input_text', 'output_text')  # types of a content's parts that are text


class Row(dict):
    """A row without its nulls. `read` has the fields that were taken as row[name], and not those only looked for; a Row
    that is made of another notes them there, too."""

    def __init__(self, row):
        if not isinstance(row, dict):
            raise ValueError('rows that are no JSON objects')
        super().__init__({name: value for name, value in row.items() if value is not None})
        self.read = row.read if isinstance(row, Row) else set()

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)


def conversation_of(row, fields=(), train_on_input=False):
    """
    A row of instruction data as the JSON text of {'messages': [...]}, with 'tools' and 'chat_template_kwargs' if it has
    them. Messages after the last answer that is learned are left out.

    Each message has 'role', one of ROLES' values; 'content', a text that only messages with tool calls may lack; and
    whatever else the row's message has, except nulls. 'weight' 0 marks an answer that is not learned: either the row's
    message says so, as in OpenAI's format, or it is part of the prompt of a row with prompt and completion. 'weight' 1
    marks any other message that is learned, too. A tool call's arguments are an object.

    fields: the fields to read instead of the known ones: either one with a list of messages, or the parts of the
    question, which are joined by an empty line, and as the last one the answer. train_on_input: all messages are
    learned, so none is left out and none has a weight. Raises ValueError with the reason if the row cannot be learned.
    """
    row = Row(row)
    if not fields:
        _refuse_media(row)
    conversation = _in_one_form(_messages_of(row, fields), row)
    messages = conversation['messages']
    if train_on_input:
        lists = [objects for name, objects in _lists_of_objects(row).items() if name in row.read]
        if any(message.get('weight') == 0 for objects in lists for message in objects):
            raise ValueError(
                'rows with a weight of 0, beside --train_on_input, which learns every message: leave out one'
            )
        for message in messages:
            message.pop('weight', None)  # also the one by which the answers in a prompt are not learned
    answers = [number for number, message in enumerate(messages) if number and message['role'] == 'assistant']
    learned = [number for number, message in enumerate(messages) if is_learned(message, number)]
    if not learned:
        raise ValueError(
            'rows whose answers all have the weight 0' if answers else "rows without an assistant's answer"
        )
    if any(_says_nothing(messages[number]) for number in learned):  # would be learned as ending the turn at once
        raise ValueError('rows with an empty answer')
    end = len(messages) if train_on_input else learned[-1] + 1
    return json.dumps({**conversation, 'messages': messages[:end]}, ensure_ascii=False)


def is_learned(message, number):
    """Whether the message with this number in a conversation is learned: an answer, unless its weight is 0, or any
    message whose weight is 1."""
    return bool(message.get('weight', number and message['role'] == 'assistant'))


def question_of(row):
    """A row that asks for an answer, in the form of conversation_of() but not as JSON: its messages up to the one to
    answer, which stand in one of LISTS or else in `prompt`, perhaps with a system message, tools and
    chat_template_kwargs.
    Raises ValueError with the reason if it is none."""
    row = Row(row)
    given = next((name for name in (*LISTS, 'prompt') if name in row), None)  # the first, as in conversation_of()
    if given is None:
        raise ValueError('rows without messages or a prompt')
    _refuse_media(row)
    is_text = given == 'prompt' and isinstance(row['prompt'], str) and _as_messages(row['prompt']) is None
    messages = [{'role': 'user', 'content': row['prompt']}] if is_text else _list_in(row, given)
    conversation = _in_one_form(messages, row)
    if not messages or conversation['messages'][-1]['role'] == 'assistant':
        raise ValueError('rows that end with an answer in place of a question')
    return conversation


def _refuse_media(row):
    if found := next((name for name in MEDIA if _parsed(row.get(name))), None):
        raise ValueError(
            f'rows with the field {found!r}, and only text is learned: leave the field out if that suffices'
        )


def _in_one_form(messages, row):
    """{'messages', 'tools', 'chat_template_kwargs'} of a row with these messages, as conversation_of() has them."""
    roles = _known_roles(messages)
    messages = [_message_of(message, number, roles) for number, message in enumerate(messages)]
    if messages and messages[0]['role'] not in INSTRUCTIONS:
        name = next((name for name in SYSTEMS if name in row and row[name]), None)
        if name and not isinstance(row[name], str):
            raise ValueError(f'rows whose {name} is no text')
        messages = [{'role': 'system', 'content': row[name]}, *messages] if name else messages
    conversation = {'messages': messages}
    if tools := tools_of(row):
        conversation['tools'] = tools
    options = _parsed(row['chat_template_kwargs']) if 'chat_template_kwargs' in row else None
    if options and not isinstance(options, dict):
        raise ValueError('rows whose chat_template_kwargs are no dict')
    if options:
        conversation['chat_template_kwargs'] = options
    return conversation


def pair_of(row, as_text=False):
    """
    A row with a chosen and a rejected answer to the same prompt, as the JSON text of {'chosen': conversation,
    'rejected': conversation}. Both are as from conversation_of(); in each only the messages in which they differ are
    learned.

    Either chosen and rejected are whole conversations, lists or transcripts ("\n\nHuman: ...\n\nAssistant: ..."), and
    what both begin with is the prompt, whatever the row's other fields are; or they are answers, texts or messages, to
    what stands in ASKED or in one of LISTS. Raises ValueError with the reason if the row is no such pair.

    as_text: there is no chat template that could write messages, so that the row has to hold three texts: a question
    and two answers that go on from it, as a message of the user and two of the assistant.
    """
    row = Row(row)
    if missing := [name for name in PREFERENCES if name not in row]:
        raise ValueError(ONE_ANSWER if 'label' in row else f'rows without the field {missing[0]!r}')
    _refuse_media(row)
    if isinstance(row.get(BEGUN), str):
        begun, texts = row[BEGUN], [name for name in PREFERENCES if isinstance(row[name], str) and row[name].strip()]
        row.update({name: begun + row[name] for name in texts})
    asked = [row.get(name) for name in ASKED]
    asked = [text.strip() for text in asked if isinstance(text, str) and _as_messages(text) is None]
    answers = [_answer_in(row[name], asked) for name in PREFERENCES]
    prompt = []
    if all(_role_of(messages[0], ROLES | SUPPORT) == 'assistant' for messages in answers if messages):
        prompt = _prompt_beside(row)
    if as_text:
        said = [[{'role': 'assistant', 'content': row[name]}] for name in PREFERENCES]
        question = next((row[name] for name in (*ASKED, *LISTS) if name in row), None)
        is_text = isinstance(question, str) and not (_as_messages(question) or _in_transcript(question))
        if answers != said or not is_text or len(prompt) != 1 or any(row.get(name) for name in BESIDE_MESSAGES[:-1]):
            raise ValueError(NO_TEMPLATE)
    chosen, rejected = (_in_one_form([*prompt, *messages], row) for messages in answers)
    both = list(zip(chosen['messages'], rejected['messages'], strict=False))
    common = next((number for number, pair in enumerate(both) if _differ(*pair)), len(both))
    if common == len(chosen['messages']) == len(rejected['messages']):
        raise ValueError('rows whose chosen and rejected answers are the same')
    for conversation in (chosen, rejected):
        messages = conversation['messages']
        for number, message in enumerate(messages):
            message.pop('weight', None)
            if number < common and message['role'] == 'assistant':
                message['weight'] = 0
        learned = [number for number in range(common, len(messages)) if messages[number]['role'] == 'assistant']
        if common == len(messages) or any(_says_nothing(messages[number]) for number in learned):
            raise ValueError('rows with an empty answer')
        if not common or messages[common]['role'] != 'assistant':
            raise ValueError('rows whose chosen and rejected answers are to different prompts, or to none')
        del messages[learned[-1] + 1 :]
    return json.dumps({'chosen': chosen, 'rejected': rejected}, ensure_ascii=False)


def labeled_of(row):
    """A row with LABELLED as JSON text: [what is asked, as JSON; the answer; whether it is a good one]. Raises
    ValueError with the reason if it is none."""
    row = Row(row)
    if not are_labeled(row):
        raise ValueError(f'rows that lack one of the fields {", ".join(LABELLED)}')
    if (is_good := _mark_of(row['label'])) is None:
        raise ValueError('rows whose label is neither true nor false')
    asked = {name: row[name] for name in ('prompt', *BESIDE_MESSAGES) if name in row}
    return json.dumps([json.dumps(asked), row['completion'], is_good])


def _mark_of(label):
    """Whether a label says that an answer is a good one (True) or a bad one (False); None if it says neither."""
    return MARKS.get(str(label).strip().lower())


def prompt_of(pair):
    """The messages before the answers of a pair that pair_of() returned, as JSON. pair: bytes."""
    messages = json.loads(pair)['chosen']['messages']
    first = next(number for number, message in enumerate(messages) if is_learned(message, number))
    return json.dumps(messages[:first]).encode()


def _differ(one, other):
    """Whether two messages say different things; a number of their own in a row, or a weight, is nothing said."""
    return any(one.get(key) != other.get(key) for key in SAID)


def _answer_in(value, asked):
    """The messages of a row's chosen or rejected field. asked: the texts of what it answers. JSON beside these is what
    the answer says, unless it holds one of them, as a whole conversation does."""
    if isinstance(value, str):
        messages = _as_messages(f'[{value}]' if value.lstrip()[:1] == '{' else value)
        said = [message.get('content', message.get('value')) for message in messages or []]
        if messages and asked and not any(isinstance(text, str) and text.strip() in asked for text in said):
            messages = None
        return messages or _in_transcript(value) or [{'role': 'assistant', 'content': value}]
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list):
        raise ValueError('rows whose chosen or rejected is no text and no list of messages')
    return _list_of(messages)


def _in_transcript(text):
    """The messages of a conversation that is written as one text; None if it does not begin as one."""
    begin, *parts = TRANSCRIPT.split(text.lstrip('\n'))
    if begin or len(parts) < 4:
        return None
    return [{'role': role.lower(), 'content': said.strip()} for role, said in zip(parts[::2], parts[1::2], strict=True)]


def _prompt_beside(row):
    """The messages of what the answers of a pair are to."""
    given = next((name for name in (*ASKED, *LISTS) if name in row), None)
    if given is None:
        raise ValueError(f'rows of two answers without what they answer ({", ".join(ASKED)}, or a list of messages)')
    if isinstance(row[given], str) and (messages := _in_transcript(row[given])):
        return messages[:-1] if messages[-1]['role'] == 'assistant' and not messages[-1]['content'] else messages
    if given in LISTS:
        return _list_in(row, given)
    return _asked_in(row, [given, *(name for name in CONTEXTS if name in row and name != given)])


def row_of(value):
    """A row that is itself a list of messages, as {'messages': that list}; any other value unchanged."""
    return {'messages': value} if _are_messages(value) else value


def _are_messages(value):
    """Whether a value is a list of messages, by their keys."""
    is_list = isinstance(value, list) and value and all(_role_of(message) is not None for message in value)
    says = {'content', 'value', 'tool_calls', 'function_call'}
    return bool(is_list) and all(says & set(message) for message in value)


def fields_known(names, fields=()):
    """The field names of a row that may belong to a conversation, in the row's order."""
    wanted = {*fields, 'history', *BESIDE_MESSAGES} if fields and fields != PREFERENCES else {*CHAT_FIELDS}
    return [name for name in names if name in wanted]


def fields_read(rows, fields=()):
    """The names of those fields that are read in some of these rows."""
    read = set()
    for row in map(Row, rows):
        with contextlib.suppress(ValueError, TypeError, RecursionError):  # rows of YAML may hold what JSON cannot
            if fields == PREFERENCES:
                labeled_of(row) if are_labeled(row) else pair_of(row)
            else:
                conversation_of(row, fields)
        read |= row.read
    return read


def has_chat_fields(names, fields=()):
    """Whether these field names include those of a conversation."""
    if fields == PREFERENCES and are_labeled(names):
        return True
    if fields:
        return {*fields} <= {*names}
    return any(name in names for name in LISTS) or any(all(name in names for name in pair) for pair in PAIRS)


def are_labeled(names):
    """Whether rows with these fields are single answers with a label, and no pairs."""
    return {*LABELLED} <= {*names} and not {*PREFERENCES} & {*names}


def holds_conversation(row):
    """Whether a row would be read as a conversation if the user has not said how to read it."""
    return any(isinstance(_parsed(row.get(name)), list) for name in LISTS) or _pair_in(row) is not None


def reason_against_text(row):
    """Why a row should not be learned as plain text unless the user asks for it; None if there is no reason."""
    if not isinstance(row, dict):
        return None
    if holds_conversation(row):
        return 'rows that are conversations, among texts: --chat=True reads those'
    if all(row.get(name) for name in PREFERENCES):
        return PREFERENCE_PAIRS
    if isinstance(row.get('text'), str):
        return PARTS_OF_TREES if all(name in row for name in TREE) else None
    for name, messages in _lists_of_objects(row).items():
        roles = _known_roles(messages)
        if _are_messages(messages) and all(_role_of(message, roles) in ROLES for message in messages):
            return f'rows whose {name} is a list of messages: --chat_fields={name} reads it, {AS_TEXT}'
        if any(_are_both_sides(messages, key) for key in messages[0]):
            reason = f'rows whose {name} is a list of messages with the keys {_keys_of(messages)}'
            return f'{reason}: {KEYS_OF_MESSAGES}, and say --chat_fields={name}; {AS_TEXT}'
    return None


def _lists_of_objects(row):
    """{name: value} of the fields of a row that hold lists of objects."""
    lists = {name: _parsed(value) for name, value in row.items()}
    return {name: value for name, value in lists.items() if _are_objects(value)}


def _are_objects(value):
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _are_both_sides(objects, key):
    """Whether a key of these objects says who speaks, and both sides of a chat do."""
    names = [one.get(key) for one in objects]
    sides = {SIDES.get(name.lower()) if isinstance(name, str) else None for name in names}
    return {*QA_ROLES} <= sides and None not in sides


def _keys_of(objects):
    return ', '.join(map(str, objects[0]))[:60]


def _has_choices(row):
    return any(_parsed(row.get(name)) for name in CHOICES)


def _pair_in(row):
    """The names of the fields of a row's question and answer; None if it has none, or if it also has choices."""
    if _has_choices(row):
        return None
    for question, answer in PAIRS:
        if isinstance(row.get(question), (str, list)) and isinstance(row.get(answer), (str, list, dict)):
            return question, answer
    return None


def _messages_of(row, fields):
    """The messages of a row, unchanged, whatever its fields are called. Raises ValueError if there are none."""
    if fields:
        missing = [name for name in fields if name not in row]
        if missing:
            raise ValueError(f'rows without the field {missing[0]!r}')
        return _list_of(row[fields[0]]) if len(fields) == 1 else _turns_of(row, fields[:-1], fields[-1])
    name = next((name for name in LISTS if name in row), None)
    if name:
        _refuse_bad(row, name)
        return _list_in(row, name)
    if all(row.get(name) for name in PREFERENCES):
        raise ValueError(PREFERENCE_PAIRS)
    pair = next((pair for pair in PAIRS if all(name in row for name in pair)), None)
    if pair is None:
        raise ValueError(f'rows that are {NO_CONVERSATIONS}')
    if _has_choices(row):
        raise ValueError('rows with choices, which are for evaluate.py: --chat_fields names what is read of them')
    _refuse_bad(row, f'{pair[0]},{pair[1]}')
    return _turns_of(row, [pair[0], *(name for name in CONTEXTS if name in row)], pair[1])


def _refuse_bad(row, fields):
    """Raise ValueError if a row's label says, or may say, that its answer is a bad one. fields: what is read of it."""
    label = str(row.get('label')).strip()
    if (is_good := _mark_of(label)) is not None:
        row.read.add('label')
    other = f'--chat_fields={fields} reads them whatever it is'
    if is_good is False:
        raise ValueError(f'rows whose answer is marked as a bad one (label: false or 0); {other}')
    if is_good is None and NUMBER.fullmatch(label):  # a class, of which 0 and 1 are two, or a score; words are no mark
        raise ValueError(f'rows whose label is a number, but neither 0 nor 1; {other}')


def _list_in(row, name):
    """The messages of this field of a row, which has to hold all of them."""
    if _parsed(row.get('history')):
        raise ValueError(f'rows with a history beside {name}: put it into {name}, or leave it out')
    return _list_of(row[name])


def _list_of(value):
    """The messages of a field that holds a list of them."""
    elements = _parsed(value)
    if not isinstance(elements, list):
        raise ValueError('rows whose messages are no list')
    messages = []
    for element in elements:
        turn = next((turn for turn in TURNS if isinstance(element, dict) and set(turn) <= set(element)), None)
        if turn:  # which may have a system message of its own (XTuner); all else, as its weight, belongs to the answer
            others = {key: value for key, value in element.items() if key not in (*turn, *SYSTEMS)}
            messages += [{'role': 'system', 'content': element[name]} for name in SYSTEMS if element.get(name)]
            messages.append({'role': 'user', 'content': element[turn[0]]})
            messages.append({**others, 'role': 'assistant', 'content': element[turn[1]]})
        else:
            messages.append(element)
    return messages


def _asked_in(row, questions):
    """The messages in these fields of a row, which hold texts or lists of messages; none of them is learned."""
    history = (_parsed(row['history']) or []) if 'history' in row else []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise ValueError('rows whose history is no list of questions and answers')
    # As in Alpaca's format: earlier questions and answers.
    messages = [{'role': role, 'content': text} for turn in history for role, text in zip(QA_ROLES, turn, strict=True)]
    prompt = _as_messages(row[questions[0]])
    if prompt is not None:
        if beside := next((name for name in questions[1:] if row[name]), None):
            raise ValueError(
                f'rows with {beside} beside a {questions[0]} that is a list of messages: put it into one of these, or '
                'leave it out'
            )
        for message in prompt:
            is_answer = _role_of(message, ROLES | SUPPORT) == 'assistant'
            messages.append({**message, 'weight': 0} if is_answer else message)
    else:
        for name in questions:
            if not isinstance(row[name], str):
                raise ValueError(f'rows whose {name} is no text')
        messages.append({'role': 'user', 'content': '\n\n'.join(row[name] for name in questions if row[name])})
    return messages


def _turns_of(row, questions, answer):
    """The messages of a row with these fields, which hold texts or lists of messages; the last field is learned."""
    messages = _asked_in(row, questions)
    # JSON as the answer to a text is what is to be learned; beside messages it is how tables write them.
    is_text = isinstance(row[answer], str) and _as_messages(row[questions[0]]) is None
    completion = None if is_text else _as_messages(row[answer])
    if completion is not None:
        return messages + completion
    calls = _parsed(row[answer])
    if 'tools' in row and _are_objects(calls) and all({'name', 'function'} & set(call) for call in calls):
        return [*messages, {'role': 'assistant', 'tool_calls': calls}]  # as in xLAM
    right = _parsed(row[answer]) if answer == 'answers' else row[answer]
    right = right.get('text') if isinstance(right, dict) else right  # as in SQuAD
    if isinstance(right, list) and all(isinstance(one, str) for one in right):  # several right answers: take the first
        if not right:
            raise ValueError("rows without an assistant's answer")
        right = right[0]
    text = next((one for one in (right, row[answer]) if isinstance(one, str)), None)
    if text is None:
        raise ValueError(f'rows whose {answer} is no text')
    return [*messages, {'role': 'assistant', 'content': text}]


def _as_messages(value):
    """The value if it is a list of messages, else None. Of a text, the list that it writes as JSON, if that can hardly
    be anything else: each element says who speaks and what, and some role is known."""
    if isinstance(value, str):
        messages = _parsed(value)
        is_chat = _are_messages(messages) and any(_role_of(message, ROLES | SUPPORT) in ROLES for message in messages)
        return messages if is_chat else None
    is_list = isinstance(value, list) and value and all(_role_of(message) is not None for message in value)
    return value if is_list else None


def _role_of(message, roles=ROLES):
    """The role of a row's message, translated by `roles`; an unknown role as it is; None if the message has none."""
    role = message.get('role', message.get('from')) if isinstance(message, dict) else None
    return roles.get(role.lower(), role) if isinstance(role, str) else None


def _known_roles(messages):
    """The roles that are known in a row with these messages: ROLES, and where they are clear, those of SUPPORT."""
    speakers = {str(_role_of(message)).lower() for message in messages} - {*INSTRUCTIONS}
    return ROLES | SUPPORT if speakers == {*SUPPORT} else ROLES


def _message_of(message, number, roles):
    """A message as conversation_of() describes it. number: its place, from which a plain string gets its role. roles:
    those that are known."""
    if isinstance(message, str):
        return {'role': QA_ROLES[number % 2], 'content': message}
    if not isinstance(message, dict):
        raise ValueError('rows with a message that is no object')
    message = {key: value for key, value in message.items() if value is not None}
    fields = ', '.join(key for key in message if message[key])[:60] or 'no fields'
    if 'role' not in message and isinstance(message.get('from'), str):
        message = {'role': message.pop('from'), 'content': message.pop('value', None), **message}
    elif 'content' not in message and isinstance(message.get('value'), str):
        message['content'] = message.pop('value')
    name, role = message.get('role'), _role_of(message, roles)
    if role is None and name is not None:
        raise ValueError('rows with a message whose role is no text')
    if role is None:
        raise ValueError(f'rows with a message that has no role (it has: {fields}): {KEYS_OF_MESSAGES}')
    if role not in ROLES:
        raise ValueError(f'rows with the unknown role {role[:30]!r}: {RENAME_ROLE}')
    message['role'] = role
    content, calls = message.pop('content', None), _parsed(message.pop('tool_calls', None)) or []
    if isinstance(content, list):
        content = _joined(content)
    others = []
    if 'function_call' in message:  # OpenAI's format before there were tool_calls
        others = [message.pop('function_call')]
    elif name.lower() in CALLS and isinstance(_parsed(content), (dict, list)):
        others, content = _parsed(content), None
        others = others if isinstance(others, list) else [others]
    if calls and others:
        raise ValueError('rows with a message that has tool calls in two places')
    if not isinstance(calls, list):
        raise ValueError('rows whose tool_calls are no list')
    calls = [_call_of(call) for call in calls or others]
    if not isinstance(content, (str, type(None))):
        kind = {dict: 'an object', bool: 'true or false'}.get(type(content), 'a number')
        raise ValueError(f'rows with a message whose content is {kind}: write it as a text')
    if content is None and not calls:
        if 'refusal' in message:
            raise ValueError('rows with a message that has a refusal and no content: make it the content')
        may_be_content = any(isinstance(text, str) and key not in (*SAID, 'id') for key, text in message.items())
        advice = f': {KEYS_OF_MESSAGES}' if may_be_content else ''
        raise ValueError(f'rows with a message that has no content (it has: {fields}){advice}')
    if message.get('weight', 1) not in (0, 1):
        raise ValueError('rows with a weight that is neither 0 nor 1')
    # Keys in the order of OpenAI's format, always, because the hash of a conversation chooses its split.
    others = {key: value for key, value in message.items() if key != 'role'}
    message = {'role': role} | ({} if content is None else {'content': content})
    return message | ({'tool_calls': calls} if calls else {}) | others


def _says_nothing(message):
    """Whether a message of _message_of() has neither text nor tool calls nor thoughts."""
    texts = [THINK_TAG.sub('', message.get('content', '')), *(message.get(name) for name in THOUGHTS)]
    return not message.get('tool_calls') and not any(str(text or '').strip() for text in texts)


def _joined(parts):
    """The text of a content that consists of parts."""
    texts = []
    for part in parts:
        part = {'type': 'text', 'text': part} if isinstance(part, str) else part
        kind = part.get('type') if isinstance(part, dict) else None
        if kind not in TEXT_PARTS or not isinstance(part.get('text'), str):
            raise ValueError(f'rows with content of the type {str(kind)[:30]!r}, and only text is learned')
        texts.append(part['text'])
    return ''.join(texts)


def _call_of(call):
    """A tool call in OpenAI's format, but with its arguments as an object, since templates write them as JSON."""
    call = _parsed(call)
    function = _parsed(call.get('function', call)) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get('name'), str):
        raise ValueError('rows with a tool call that has no name')
    arguments = _parsed(function.get('arguments', function.get('parameters'))) or {}
    if not isinstance(arguments, dict):
        raise ValueError('rows with a tool call whose arguments are no JSON object')
    inner = ('name', 'arguments', 'parameters', 'function')
    others = {key: value for key, value in call.items() if key not in inner and value is not None}
    return {'type': 'function', **others, 'function': {'name': function['name'], 'arguments': arguments}}


def tools_of(row):
    """The tools of a row in OpenAI's format."""
    name = next((name for name in ('tools', 'functions') if name in row), None)
    tools = (_parsed(row[name]) if name else None) or []
    if not isinstance(tools, list):
        raise ValueError('rows whose tools are no list')
    tools = [_parsed(tool) for tool in tools]
    if not all(isinstance(tool, dict) and isinstance(tool.get('function', {}), dict) for tool in tools if tool):
        raise ValueError('rows whose tools are no objects')
    return [tool if 'function' in tool else {'type': 'function', 'function': tool} for tool in tools if tool]


def _parsed(value):
    """The list, object or null that a string of JSON holds; columnar files store in this way what differs from row to
    row. Any other value unchanged."""
    if isinstance(value, str) and (value.lstrip()[:1] in ('[', '{') or value.strip() == 'null'):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            pass
    return value
