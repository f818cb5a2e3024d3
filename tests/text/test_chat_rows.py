"""Rows of instruction data in every common form are read as they are meant, or refused with the reason."""

import json
import textwrap

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from chats import CHATML, conversations_of, encoder_of, examples_of, make_tokenizer, messages_of, write_rows
from prepared import error_of, meta_of, prepare, read_here, write_stream

from text import chat_rows, sources
from text import documents as reading


def qa(question, answer):
    return messages_of([('user', question), ('assistant', answer)])


QA = qa('q', 'a')
ALPACA = {'instruction': 'q', 'input': '', 'output': 'a'}
TWO_TURNS = [*QA, *qa('q2', 'a2')]
SUPPORT = [{**one, 'role': {'user': 'Customer', 'assistant': 'agent'}[one['role']]} for one in TWO_TURNS]
SILENT = {'role': 'assistant', 'content': '<think>\n\n</think>\n\n'}
JSON_TEXTS = ['[{"from": "Rome", "value": 3}]', '[{"from":"Rome","to":"Oslo"}]', '[{"role":"manager","name":"Anna"}]']
JSON_TEXTS.append(json.dumps(QA))
TOOL = {'type': 'function', 'function': {'name': 'weather_in', 'description': 'now', 'parameters': {'type': 'object'}}}
CALL = {'type': 'function', 'function': {'name': 'weather_in', 'arguments': {'city': 'Zürich', 'unit': None}}}


def read(row, fields=()):
    return json.loads(chat_rows.conversation_of(row, fields))


def refused(row, fields=()):
    with pytest.raises(ValueError) as caught:
        chat_rows.conversation_of(row, fields)
    return str(caught.value)


def learned(folder, row):
    """[(text, [what is learned])] of each example of a row."""
    return examples_of(*encoder_of(folder), row)


# --- shapes -----------------------------------------------------------------------------------------------------------

SHAREGPT = [{'from': 'human', 'value': 'q'}, {'from': 'gpt', 'value': 'a'}]
SYSTEM = {'role': 'system', 'content': 'be kind'}
ROWS = {
    'ultrachat': {'prompt': 'q', 'prompt_id': '1', 'messages': QA},
    'messages as JSON': {'messages': json.dumps(QA)},
    'sharegpt': {'conversations': [{'from': 'Human', 'value': 'q'}, {'from': 'GPT', 'value': 'a'}]},
    'sharegpt of bing': {'conversations': [{'from': 'user', 'value': 'q'}, {'from': 'bing', 'value': 'a'}]},
    'sharegpt of Gemini': {'conversations': [{'from': 'user', 'value': 'q'}, {'from': 'model', 'value': 'a'}]},
    'lima': {'conversations': ['q', 'a'], 'source': 'web'},
    'capybara': {'conversation': [{'input': 'q', 'output': 'a'}], 'source': 'web'},
    'firefly': {'conversation': [{'human': 'q', 'assistant': 'a'}], 'category': 'x'},
    'dialog': {'dialog': ['q', 'a']},
    'lmsys': {'conversation': QA, 'turn': 1},
    'prompter': {'messages': [{'role': 'prompter', 'content': 'q'}, QA[1]]},
    'support': {'messages': [{**QA[0], 'role': 'Customer'}, {**QA[1], 'role': 'agent'}]},
    'parts': {'messages': [QA[0], {'role': 'assistant', 'content': [{'type': 'text', 'text': 'a', 'x': None}]}]},
    'prompt, completion': {'prompt': 'q', 'completion': 'a', 'label': True},
    'lists, and more behind them': {'prompt': QA[:1], 'completion': [QA[1], {'role': 'user', 'content': 'cut'}]},
    'lists as JSON': {'prompt': json.dumps(QA[:1]), 'completion': json.dumps(QA[1:])},
    'conversations of messages': {'conversations': QA},
    'prompt, response': {'prompt': 'q', 'response': 'a'},
    'alpaca': ALPACA,
    'dolly': {'instruction': 'q', 'context': '', 'response': 'a', 'category': 'qa'},
    'gsm8k': {'question': 'q', 'answer': 'a'},
    'openorca': {'id': 1, 'system_prompt': '', 'question': 'q', 'response': 'a'},
    'metamath': {'type': 't', 'query': 'q', 'original_question': 'o', 'response': 'a'},
    'math': {'problem': 'q', 'solution': 'a', 'level': 5},
    'flan, aya': {'inputs': 'q', 'targets': 'a'},
    'squad': {'id': '1', 'context': '', 'question': 'q', 'answers': {'text': ['a', 'also a'], 'answer_start': [1, 2]}},
    'squad in a table': {'question': 'q', 'answers': '{"text": ["a", "also a"], "answer_start": [1, 2]}'},
    'empty fields of a table': {**dict.fromkeys(('history', 'images', 'choices'), '[]'), 'tools': 'null', **ALPACA},
    'a mark in a table': {'prompt': 'q', 'completion': 'a', 'label': 'True'},
    'a mark as a number': {'prompt': 'q', 'completion': 'a', 'label': 1.0},
    'a label that is no mark': {'question': 'q', 'answer': 'a', 'label': 'geography'},
    'role and value': {'messages': [{'role': 'user', 'value': 'q'}, {'role': 'assistant', 'value': 'a'}]},
    'magpie': {'uuid': '1', 'instruction': 'q', 'response': 'a', 'conversations': QA},
    'ultrafeedback': {'messages': QA, 'chosen': QA, 'rejected': QA},
    'no media': {'messages': QA, 'images': [], 'audio': None},
}


@pytest.mark.parametrize('name', ROWS)
def test_a_row_of_every_known_shape_is_a_question_and_its_answer(name):
    assert chat_rows.holds_conversation(ROWS[name]) and chat_rows.has_chat_fields(ROWS[name])
    assert read(ROWS[name]) == {'messages': QA}
    # In columnar files each row has the keys of all rows.
    assert read({**dict.fromkeys(chat_rows.CHAT_FIELDS), **ROWS[name]}) == {'messages': QA}


SEVERAL = [  # rows of more than a question and an answer: (row, its messages)
    ({'instruction': 'Add.', 'input': '1, 2', 'output': '3'}, qa('Add.\n\n1, 2', '3')),
    ({'instruction': 'Add.', 'input': None, 'output': '3'}, qa('Add.', '3')),
    ({**ROWS['squad'], 'context': 'where'}, qa('q\n\nwhere', 'a')),
    ({**ROWS['openorca'], 'system_prompt': 'be kind'}, [SYSTEM, *QA]),
    ({'system': 'be kind', 'conversations': SHAREGPT}, [SYSTEM, *QA]),
    ({'system': 'another', 'conversations': [{'from': 'system', 'value': 'be kind'}, *SHAREGPT]}, [SYSTEM, *QA]),
    ({'instruction': 'q2', 'output': 'a2', 'history': [['q', 'a']]}, TWO_TURNS),
    ({'instruction': 'q2', 'output': 'a2', 'history': '[["q", "a"]]'}, TWO_TURNS),
    ({'messages': [SYSTEM, *SUPPORT]}, [SYSTEM, *TWO_TURNS]),
    ({'conversations': [{'from': one['role'], 'value': one['content']} for one in SUPPORT]}, TWO_TURNS),
    ({'prompt': SUPPORT[:3], 'completion': SUPPORT[3:]}, [TWO_TURNS[0], {**TWO_TURNS[1], 'weight': 0}, *TWO_TURNS[2:]]),
    # JSON is the answer to a text, not messages or a tool call; beside messages it is messages.
    *(({'prompt': 'q', 'completion': text}, qa('q', text)) for text in JSON_TEXTS),
    *(({'instruction': 'q', 'output': text}, qa('q', text)) for text in JSON_TEXTS),
    ({'query': 'q', 'answer': JSON_TEXTS[0], 'tools': [TOOL]}, qa('q', JSON_TEXTS[0])),
    ({'prompt': JSON_TEXTS[0], 'completion': 'a'}, qa(JSON_TEXTS[0], 'a')),
    # What is silent, but not learned, or behind what is learned
    ({'messages': [QA[0], {**SILENT, 'weight': 0}, *QA]}, [QA[0], {**SILENT, 'weight': 0}, *QA]),
    ({'messages': [*QA, QA[0], {**SILENT, 'weight': 0}]}, QA),
    ({'messages': [SILENT, *QA]}, [SILENT, *QA]),
    ({'prompt': [QA[0], SILENT, QA[0]], 'completion': 'a'}, [QA[0], {**SILENT, 'weight': 0}, *QA]),
]


@pytest.mark.parametrize('row, messages', SEVERAL)
def test_contexts_systems_and_earlier_turns_are_part_of_the_question(row, messages):
    assert read(row)['messages'] == messages


def test_a_turn_keeps_its_system_message_and_what_else_belongs_to_its_answer():
    for question, answer in chat_rows.TURNS:  # as in XTuner
        first = {'system': 'be kind', question: 'q', answer: 'a', 'weight': 0, 'id': 1}
        turns = {'conversation': [first, {'system': '', question: 'q2', answer: 'a2'}], 'system': 'another'}
        messages = [SYSTEM, TWO_TURNS[0], {**TWO_TURNS[1], 'weight': 0, 'id': 1}, *TWO_TURNS[2:]]
        assert read(turns)['messages'] == messages
        with pytest.raises(ValueError, match='a weight of 0, beside --train_on_input'):
            chat_rows.conversation_of(turns, train_on_input=True)


def test_json_in_pairs_and_questions_is_messages_only_beside_messages():
    for text in JSON_TEXTS:
        pair = json.loads(chat_rows.pair_of({'prompt': 'write it', 'chosen': text, 'rejected': 'b'}))
        assert pair['chosen']['messages'][1] == {**QA[1], 'content': text}
    assert chat_rows.question_of({'prompt': JSON_TEXTS[0]})['messages'] == [{**QA[0], 'content': JSON_TEXTS[0]}]
    assert chat_rows.question_of(ROWS['lists as JSON'])['messages'] == QA[:1]
    whole = {'prompt': 'q', 'chosen': json.dumps(QA), 'rejected': json.dumps([QA[0], {**QA[1], 'content': 'b'}])}
    assert json.loads(chat_rows.pair_of(whole))['chosen']['messages'] == QA


@pytest.mark.parametrize(
    ('row', 'read_of_it'),
    [
        ({'instruction': 'i', 'question': 'q', 'answer': 'a'}, ['question', 'answer']),
        ({'context': 'c', 'messages': QA}, ['messages']),
        ({'messages': QA, 'conversations': QA}, ['messages']),
        ({'system': 's', 'messages': [{'role': 'system', 'content': 't'}, *QA]}, ['messages']),
        ({'system_prompt': '', 'question': 'q', 'response': 'a'}, ['system_prompt', 'question', 'response']),
        ({'system': 's', 'tools': [], 'messages': QA, 'images': []}, ['system', 'tools', 'messages']),
        ({'prompt': 'q', 'completion': 'a', 'label': 1}, ['prompt', 'completion', 'label']),
        ({'question': 'q', 'answer': 'a', 'label': 'x'}, ['question', 'answer']),
        ({**ALPACA, 'history': [['q', 'a']]}, ['instruction', 'input', 'output', 'history']),
    ],
)
def test_the_first_line_names_the_fields_that_are_read_and_no_others(row, read_of_it, tmp_path):
    write_rows(tmp_path / 'rows.jsonl', [row] * 3)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 3), tmp_path / 'rows.parquet')
    others = ', '.join(name for name in row if name not in read_of_it)
    by = ', '.join(read_of_it) + (f'; not read: {others}' if others else '')
    for kind in ('jsonl', 'parquet'):
        line = sources.find_source(str(tmp_path / f'rows.{kind}')).line
        assert line.startswith(f'rows are conversations, by their {by} (--text_field=')


def test_bytes_are_the_text_that_they_are_in_utf8(tmp_path):
    texts = [{'role': role, 'content': 'ä'.encode()} for role in ('user', 'assistant')]
    expected = chat_rows.conversation_of({'messages': messages_of([('user', 'ä'), ('assistant', 'ä')])})
    other = [texts[0], {'role': 'assistant', 'content': b'\xe4'}]  # latin-1
    rows = [{'messages': texts, 'hash': b'\xff'}, {'messages': other, 'hash': b'\xff'}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / 'rows.parquet')
    (tmp_path / 'rows.yaml').write_text(yaml.safe_dump(rows))
    for kind in ('parquet', 'yaml'):
        (first, second), notes, _ = read_here(tmp_path / f'rows.{kind}')
        assert first == expected and second == expected.replace('ä"}]', '?"}]')
        assert [(count, 'bytes that are not UTF-8' in note) for note, count in notes.items()] == [(1, True)]
    fields = [{'question': b'q', 'answer': b'a', 'image': image} for image in ({'bytes': b'\xff'}, None)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(fields), tmp_path / 'fields.parquet')
    documents, notes, _ = read_here(tmp_path / 'fields.parquet')
    assert documents == [chat_rows.conversation_of({'messages': QA})]
    assert [note for note in notes if "with the field 'image'" in note]


def test_a_label_is_a_mark_in_every_spelling():
    for label, is_good in ((True, True), (1, True), ('True', True), (False, False), (0.0, False), ('false', False)):
        for row, fields in (
            ({'prompt': 'q', 'completion': 'a'}, ('prompt', 'completion')),
            ({'messages': QA}, ('messages',)),
        ):
            row = {**row, 'label': label}
            assert is_good or 'marked as a bad one' in refused(row)
            assert read(row, () if is_good else fields)['messages'] == read(row, fields)['messages'] == QA
        assert json.loads(chat_rows.labeled_of({'prompt': 'q', 'completion': 'a', 'label': label}))[2] is is_good
    for label in (3, 'geography', ''):
        with pytest.raises(ValueError, match='neither true nor false'):
            chat_rows.labeled_of({'prompt': 'q', 'completion': 'a', 'label': label})


def test_fields_of_other_names_are_read_by_chat_fields():
    assert read({'source': 'q', 'target': 'a', 'id': 1}, ('source', 'target'))['messages'] == QA
    assert read({'a': 'in a book', 'b': 'q', 'c': 'a'}, ('a', 'b', 'c'))['messages'][0]['content'] == 'in a book\n\nq'
    assert read({'data': ['q', 'a', 'q2', 'a2']}, ('data',))['messages'] == TWO_TURNS
    assert read({'prompt': 'q', 'chosen': 'a', 'rejected': 'b'}, ('prompt', 'chosen'))['messages'] == QA
    assert "without the field 'target'" in refused({'source': 'q'}, ('source', 'target'))
    assert not chat_rows.holds_conversation({'source': 'q', 'target': 'a'})  # it may be anything
    assert not chat_rows.holds_conversation({'instruction': 'only', 'input': 'this'})
    assert not chat_rows.holds_conversation({'conversations': 'text', 'text': 'x'})


def test_tool_calls_of_every_shape_are_those_of_openai():
    """xLAM's here, and those of OpenAI and ShareGPT in tests/fuzzing/rows.py."""
    xlam = read({'query': 'q', 'answers': json.dumps([CALL['function']]), 'tools': json.dumps([TOOL['function']])})
    assert xlam == {'messages': [QA[0], {'role': 'assistant', 'tool_calls': [CALL]}], 'tools': [TOOL]}
    legacy = {'messages': [QA[0], {'role': 'assistant', 'content': None, 'function_call': CALL['function']}]}
    assert read({**legacy, 'functions': [TOOL['function']]}) == xlam


def said(content, **more):
    """Rows in which an assistant's message with this content is the answer."""
    return {'messages': [QA[0], {'role': 'assistant', 'content': content, **more}]}


IMAGE = {'role': 'user', 'content': [{'type': 'text', 'text': 'what?'}, {'type': 'image_url', 'image_url': 'x'}]}
BROKEN_CALL = {'function': {'name': 'f', 'arguments': '{"a": '}}
MUTE, ALIEN = 'rows with an empty answer', ': rename it to user, or to assistant'
REFUSED = [  # (row, words of the reason)
    ({'messages': [IMAGE, QA[1]]}, "content of the type 'image_url'"),
    ({'messages': QA, 'images': ['a.png']}, "with the field 'images', and only text is learned"),
    ({'question': 'q', 'answer': 'a', 'image': {'bytes': None, 'path': 'a.png'}}, "with the field 'image'"),
    ({'prompt': 'q', 'chosen': 'a', 'rejected': 'b'}, '--chat_fields=prompt,chosen'),
    ({'chosen': QA, 'rejected': QA}, 'preference pairs'),
    ({'messages': QA, 'label': False}, '(label: false or 0); --chat_fields=messages reads them whatever'),
    ({'conversations': QA, 'label': 2}, 'label is a number, but neither 0 nor 1; --chat_fields=conversations'),
    ({'question': 'q', 'answer': 'bad', 'label': 'False'}, '--chat_fields=question,answer reads them whatever'),
    ({'prompt': 'q', 'completion': 'a', 'label': '3'}, 'label is a number, but neither 0 nor 1'),
    ({'messages': QA, 'system': ['be kind']}, 'system is no text'),
    ({'messages': QA, 'history': [['q', 'a']]}, 'a history beside messages'),
    ({'prompt': QA[:1], 'completion': 'a', 'context': 'where'}, 'context beside a prompt that is a list'),
    ({**ALPACA, 'history': 5}, 'history is no list'),
    ({'messages': [QA[0], None, QA[1]]}, 'a message that is no object'),
    ({'messages': [QA[0], {'role': 7, 'content': 'a'}]}, 'role is no text'),
    ({'messages': [*QA, {'role': 'tool', 'content': {'t': 20}}, QA[1]]}, 'content is an object: write it'),
    (said(18), 'content is a number: write it as a text'),
    (said(None, refusal='no'), 'a refusal and no content'),
    (said(None, tool_calls=[BROKEN_CALL]), 'arguments are no JSON object'),
    ({'messages': [QA[0], {'from': 'gpt', 'value': None}]}, 'no content (it has: from)'),
    ({'question': 'q', 'choices': ['a', 'b'], 'answer': 'a'}, 'rows with choices'),
    ({'question': 'q', 'answer': 18}, 'answer is no text'),
    ({'question': 'q', 'context': '', 'answers': {'text': []}}, "without an assistant's answer"),
    (said('a', weight=0), 'the weight 0'),
    (said('a', weight=0.5), 'neither 0 nor 1'),
    ({'messages': '[{"role": '}, 'messages are no list'),
    ({'conversations': [{'from': 'alien', 'value': 'x'}]}, "unknown role 'alien'"),
    ({'messages': [{'speaker': 'user', 'utterance': 'q'}]}, 'it has: speaker, utterance): rename its keys to role'),
    ({'conversations': [{'from': 'human', 'text': 'x'}]}, 'no content (it has: from, text'),
    ({'instruction': 'x', 'output': 3}, 'output is no text'),
    # An empty answer teaches to say nothing, also before other turns.
    *((said(nothing), MUTE) for nothing in ('', ' \n', SILENT['content'], [], [{'type': 'text', 'text': ''}])),
    (said('', tool_calls=[], reasoning_content='', refusal=None), MUTE),
    ({'messages': [QA[0], SILENT, *QA]}, MUTE),
    ({'prompt': 'q', 'completion': [SILENT]}, MUTE),
    ({'prompt': 'q', 'completion': ''}, MUTE),
    ({**ALPACA, 'output': ' '}, MUTE),
    ({**ALPACA, 'history': [['q', '']]}, MUTE),
    ({'question': 'q', 'answers': {'text': ['']}}, MUTE),
    ({'conversations': ['q', '']}, MUTE),
    ({'conversations': [SHAREGPT[0], {'from': 'gpt', 'value': ''}]}, MUTE),
    # Beside others it is not clear whose words are to be learned, nor with one of the two alone.
    ({'messages': [QA[0], {'role': 'agent', 'content': 'x'}]}, f"the unknown role 'agent'{ALIEN}"),
    ({'messages': [{'role': 'customer', 'content': 'x'}, QA[1]]}, f"the unknown role 'customer'{ALIEN}"),
    ({'messages': [*SUPPORT, QA[0]]}, f"the unknown role 'Customer'{ALIEN}"),
    ({'messages': [SUPPORT[1], QA[1]]}, f"the unknown role 'agent'{ALIEN}"),
    ({'messages': messages_of([('client', 'x'), ('operator', 'x')])}, f"the unknown role 'client'{ALIEN}"),
]  # fmt: skip


@pytest.mark.parametrize('row, reason', REFUSED)
def test_what_is_no_conversation_is_refused_with_the_reason(row, reason):
    assert reason in refused(row)


def test_the_advice_to_rename_keys_is_not_given_where_they_are_right():
    assert not refused({'messages': [QA[0], {'from': 'gpt'}]}).endswith(chat_rows.KEYS_OF_MESSAGES)


@pytest.mark.parametrize(
    'row',
    [
        said('', tool_calls=[CALL]),
        said('', function_call=CALL['function']),
        said('', reasoning_content='hm'),
        said('<think>hm</think>'),
        said(['', {'type': 'text', 'text': 'a'}]),
        {'conversations': [SHAREGPT[0], {'from': 'function_call', 'value': json.dumps(CALL['function'])}]},
    ],
)
def test_an_answer_that_is_a_call_or_a_thought_is_not_empty(row):
    assert len(read(row)['messages']) == 2


# --- what the template does with them ---------------------------------------------------------------------------------


def with_calls(written):
    """ChatML that writes the calls of a message in this way."""
    return CHATML.replace("message.content + '<", f"message.content }}}}{written}{{{{ '<")


def calls(*several, content='Now weather_in 3.'):
    """A row of which the answer names the function and an argument beside these calls of it."""
    several = [{'function': {'name': 'weather_in', 'arguments': arguments}} for arguments in several]
    return {'messages': [QA[0], {'role': 'assistant', 'content': content, 'tool_calls': several}]}


JSON_CALLS = '{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}'
FIRST_CALL = JSON_CALLS.replace('message.tool_calls', '(message.tool_calls or [])[:1]')
NO_ARGUMENTS = JSON_CALLS.replace('call.function | tojson', 'call.function.name')
YAML_CALLS = """{% for call in message.tool_calls %}{{ call.function.name }}\
{% for key, value in call.function.arguments.items() %}{{ '\\n' + key + ': ' }}{{ value }}{% endfor %}{% endfor %}"""
ODD = ({'text': 'ü\n"', 'n': 2.50, 'list': [1, {'null': None}], 'no': False, 'empty': {}}, {})
TWO_ROLES = CHATML.replace('{{ ', "{%- if message.role in ['user', 'assistant'] %}{{ ", 1).replace(
    '{%- endfor %}', '{%- endif %}{%- endfor %}', 1
)
WITH_THOUGHTS = CHATML.replace('message.content', "(message.reasoning_content or '') + message.content")
THINKS = [QA[0], {'role': 'assistant', 'content': '<think>A</think>A is it'}]
SAME_THOUGHT = {'reasoning': 'hm', 'reasoning_content': 'hm '}


@pytest.mark.parametrize(
    'template, row, lost',
    [
        (CHATML, calls({}), 'a tool call'),
        (with_calls(FIRST_CALL), calls({'city': 'Rome'}, {'city': 'Oslo'}), 'a tool call'),
        (with_calls(NO_ARGUMENTS), calls({'days': 3}), 'a tool call'),
        (with_calls(JSON_CALLS), calls({'days': 3}) | {'tools': [TOOL]}, 'tools'),
        (CHATML, {'messages': [{'role': 'user', 'content': 'weather_in?'}, QA[1]], 'tools': [TOOL]}, 'tools'),
        (CHATML.replace('message.content', "message.content.split('</think>')[-1]"), {'messages': THINKS}, 'a thought'),
        (CHATML, {'messages': [QA[0], {**QA[1], 'thinking': 'a'}]}, 'a thought'),
        (TWO_ROLES, {'messages': [{'role': 'system', 'content': 'user'}, *QA]}, "system's message"),
        (TWO_ROLES, {'messages': [{'role': 'developer', 'content': 'user'}, *QA]}, "system's message"),
        (TWO_ROLES, {'messages': [QA[0], {'role': 'tool', 'content': 'a'}, QA[1]]}, "tool's message"),
        (with_calls(JSON_CALLS), calls(*ODD), None),
        (with_calls(YAML_CALLS), calls(*ODD, content=''), None),
        (WITH_THOUGHTS, {'messages': [QA[0], {**QA[1], **SAME_THOUGHT}]}, None),
    ],
)
def test_what_is_only_named_elsewhere_is_not_written(tmp_path, template, row, lost):
    folder = make_tokenizer(tmp_path, template)
    if lost is None:
        assert len(learned(folder, row)) == 1
        return
    with pytest.raises(ValueError, match=f'rows .*{lost}.* the chat template does not write'):
        learned(folder, row)


def test_a_text_in_another_order_or_cut_off_where_it_is_learned_is_refused(tmp_path):
    write = '{%- for message in messages %}'
    others = "{%- for message in messages | rejectattr('role', 'equalto', 'assistant') | reverse %}"
    answers = "{%- for message in messages | selectattr('role', 'equalto', 'assistant') %}"
    body, prompt = CHATML.removeprefix(write).split('{%- if add')
    backwards = make_tokenizer(tmp_path / 'backwards', f'{others}{body}{answers}{body}{{%- if add{prompt}')
    assert learned(backwards, {'messages': QA})[0][1] == ['a<|im_end|>']
    with pytest.raises(ValueError, match="user's message the chat template does not write as it is"):
        learned(backwards, {'messages': [{'role': 'user', 'content': 'first'}, *QA]})
    short = CHATML.replace(
        '+ message.content', "+ (message.content[:5] if message.role == 'assistant' else message.content)"
    )
    turns = messages_of([('user', 'Say: hello there'), ('assistant', 'hello there')])
    with pytest.raises(ValueError, match="assistant's message the chat template does not write as it is"):
        learned(make_tokenizer(tmp_path / 'short', short), {'messages': turns})


# --- which rows are conversations -------------------------------------------------------------------------------------


def test_a_first_row_of_another_shape_decides_nothing(tmp_path):
    rows = [{'messages': None}, {'other': 'x'}, *[{'messages': QA}] * 5]
    write_rows(tmp_path / 'rows.jsonl', rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / 'rows.parquet')
    for content in ({'data': rows}, rows):
        (tmp_path / 'rows.json').write_text(json.dumps(content))
        for kind in ('json', 'jsonl', 'parquet'):
            documents, notes, source = read_here(tmp_path / f'rows.{kind}')
            assert source.chat and len(documents) == 5 and notes.total() == 2


def test_a_conversation_among_texts_is_left_out_and_counted(tmp_path):
    texts = [{'text': f'text {number}'} for number in range(200)]
    path = write_rows(tmp_path / 'rows.jsonl', [*texts, {'messages': QA}, ROWS['gsm8k']])
    documents, notes, source = read_here(path)
    assert not source.chat and documents == [row['text'] for row in texts]
    assert [(count, '--chat=True' in note) for note, count in notes.items()] == [(2, True)]
    with pytest.raises(ValueError, match='--chat=True reads the first, --text_field=text the second'):
        sources.find_source(str(write_rows(tmp_path / 'both.jsonl', [*texts[:9], {'messages': QA}])))
    assert not sources.find_source(str(tmp_path / 'both.jsonl'), 'text').chat
    assert sources.find_source(str(tmp_path / 'both.jsonl'), chat=True).chat


READ_IT = 'is a list of messages: --chat_fields=turns reads it, --text_field'
RENAME = 'is a list of messages with the keys {}: rename its keys .*=turns; --text_field'
IN_TURNS = [  # (a list in the field `turns`, what the line says)
    (QA, READ_IT),
    (SHAREGPT, READ_IT),
    (SUPPORT, READ_IT),
    ([{'speaker': 'customer', 'text': 'q'}, {'speaker': 'agent', 'text': 'a'}], RENAME.format('speaker, text')),
    ([{'sender': 'Visitor', 'body': 'q'}, {'sender': 'Operator', 'body': 'a'}], RENAME.format('sender, body')),
    ([{'role': 'user', 'parts': 'q'}, {'role': 'model', 'parts': 'a'}], RENAME.format('role, parts')),
    ([{'from': 'human', 'text': 'q'}, {'from': 'gpt', 'text': 'a'}], RENAME.format('from, text')),
]
# What only resembles one
NO_TURNS = [[{'speaker': 'agent', 'text': 'a'}], [{'name': 'user'}, {'name': 'model'}, {'name': 'id'}], [{}, {}]]


@pytest.mark.parametrize('turns, says', IN_TURNS)
def test_a_list_of_messages_in_an_unknown_field_is_not_learned_as_text(tmp_path, turns, says):
    path = tmp_path / 'rows.jsonl'
    for value in (turns, json.dumps(turns)):
        write_rows(path, [{'id': 'x', 'turns': value}] * 3)
        with pytest.raises(ValueError, match=f'rows.jsonl: rows whose turns {says}'):
            sources.find_source(str(path))
        if says == READ_IT:
            assert sources.find_source(str(path), chat=True, chat_fields=['turns']).chat
        # Among other rows it is left out with the reason, and what only resembles it without.
        cast = {'cast': [{'role': 'king', 'value': 'Lear'}]}
        write_rows(path, [{'text': 't'}, {'turns': value}, cast, *({'turns': other} for other in NO_TURNS)])
        texts, notes, _ = read_here(path)
        assert texts == ['t'] and [count for note, count in notes.items() if '--chat_fields=turns' in note] == [1]


def test_columns_of_every_arrow_type_are_seen_as_conversations(tmp_path):
    table = pyarrow.Table.from_pylist([ROWS['gsm8k']] * 3)
    views = table.cast(pyarrow.schema([(name, pyarrow.string_view()) for name in table.column_names]))
    packed = pyarrow.table({name: table[name].dictionary_encode() for name in table.column_names})
    lists = pyarrow.Table.from_pylist([{'messages': QA}] * 3)
    views_of = pyarrow.list_view(lists['messages'].type.value_type)
    as_views = pyarrow.table({'messages': pyarrow.array([QA] * 3, type=views_of)})
    as_json = pyarrow.table({'messages': [json.dumps(QA)] * 3})
    for kind in (views, packed, lists, as_views, as_json):
        documents, _, source = read_here(write_stream(tmp_path / 'rows.arrow', kind))
        assert source.chat and documents == [chat_rows.conversation_of({'messages': QA})] * 3


def test_a_stream_of_the_hub_is_looked_at_in_the_same_way(tmp_path):
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{'messages': None}, {'messages': QA}]), tmp_path / 'a.parquet'
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{'source': 'q', 'target': 'a'}]), tmp_path / 'b.parquet')

    def source_of(name, **options):
        stream = datasets.load_dataset('parquet', data_files=str(tmp_path / name), split='train', streaming=True)
        return sources.stream_source(stream, {'name': name, 'split': 'train'}, **options)

    for source in (source_of('a.parquet'), source_of('b.parquet', chat=True, chat_fields=['source', 'target'])):
        assert source.chat and [json.loads(text)['messages'] for text in read_here(source)[0]] == [QA]
    with pytest.raises(ValueError, match="no field 'text'.*source, target; --chat_fields=QUESTION,ANSWER"):
        source_of('b.parquet')


def test_conversations_in_yaml_are_read_as_such(tmp_path):
    turns = '  - {role: user, content: q, when: 2024-01-01}\n  - role: assistant\n    content: |-\n      a\n'
    listed = f'- messages:\n{turns}' * 3
    once = textwrap.indent(listed, '  ')
    for name, content, count in (
        ('list', f'# chats\n{listed}- other\n', 3),
        ('documents', f'messages:\n{turns}---\nmessages:\n{turns}', 2),
        ('object', f'about: these\ndata:\n{once}', 3),
        ('long', listed * 2000, 6000),  # longer than what is looked at
    ):
        (tmp_path / f'{name}.yaml').write_text(content)
        documents, notes, source = read_here(tmp_path / f'{name}.yaml')
        assert source.chat and 'by their messages' in source.line and len(documents) == count, name
        messages = [{**QA[0], 'when': '2024-01-01'}, QA[1]]
        assert {*documents} == {chat_rows.conversation_of({'messages': messages})}
        assert notes.total() == (name == 'list')
    (tmp_path / 'pairs.yml').write_text('- {source: q, target: a}\n')
    assert sources.find_source(str(tmp_path / 'pairs.yml'), chat=True, chat_fields=['source', 'target']).chat
    assert not sources.find_source(str(tmp_path / 'list.yaml'), chat=False).chat


def test_rows_that_are_lists_of_messages_and_all_lists_of_an_object_are_read(tmp_path, monkeypatch):
    sharegpt = [{'from': 'human', 'value': 'q'}, {'from': 'gpt', 'value': 'a'}]
    splits = {'about': 'x', 'train': [{'messages': QA}], 'none': ['y'], 'test': [sharegpt]}
    lists = [[1], QA, sharegpt]  # the first one is none
    for name, content in (
        ('lists.json', json.dumps(lists)),
        ('long.json', json.dumps(lists)),
        ('splits.json', json.dumps(splits)),
        ('lists.jsonl', '\n'.join(map(json.dumps, lists))),
        ('lists.yaml', yaml.safe_dump(lists)),
        ('splits.yaml', yaml.safe_dump(splits)),
    ):
        if name == 'long.json':
            monkeypatch.setattr(sources, 'FIRST_BYTES', 100)
            monkeypatch.setattr(reading, 'JSON_BYTES', 50)
        (tmp_path / name).write_text(content)
        documents, notes, source = read_here(tmp_path / name)
        assert source.chat and documents == [chat_rows.conversation_of({'messages': QA})] * 2, name
        assert notes.total() == name.startswith('l'), name
        monkeypatch.undo()


def test_yaml_without_conversations_stays_text_and_what_is_found_late_is_left_out_and_counted(tmp_path):
    (tmp_path / 'settings.yaml').write_text('messages: {hello: Hi}\nprompt: none\n')
    documents, notes, source = read_here(tmp_path / 'settings.yaml')
    assert not source.chat and (documents, notes) == (['Hi\nnone'], {})
    late = '- some text\n' * 45_000 + '- {question: q, answer: a}\n'
    (tmp_path / 'late.yaml').write_text(late)
    documents, notes, _ = read_here(tmp_path / 'late.yaml')
    assert len(documents) == 45_000 and [(n, '--chat=True' in note) for note, n in notes.items()] == [(1, True)]
    loop = '- messages: &m\n  - *m\n- messages: [{role: user, content: q}, {2024-01-01: a}]\n'
    (tmp_path / 'loop.yaml').write_text(loop)
    documents, notes, _ = read_here(tmp_path / 'loop.yaml')
    assert not documents and notes.total() == 2


def test_what_looks_like_training_data_of_another_kind_is_refused_by_name(tmp_path):
    tree = {'message_id': '1', 'parent_id': None, 'role': 'prompter', 'text': 'q'}
    pair = {'prompt': 'q', 'chosen': 'a', 'rejected': 'b'}
    for row, words in ((tree, 'single messages of trees'), (pair, '--chat_fields=prompt,chosen')):
        write_rows(tmp_path / 'rows.jsonl', [row] * 3)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 3), tmp_path / 'rows.parquet')
        for kind in ('jsonl', 'parquet'):
            with pytest.raises(ValueError, match=words):
                sources.find_source(str(tmp_path / f'rows.{kind}'))
    assert len(read_here(tmp_path / 'rows.jsonl', chat=True, chat_fields=['prompt', 'chosen'])[0]) == 3


def test_rows_without_a_text_are_refused_with_the_keys_that_read_them(tmp_path):
    write_rows(tmp_path / 'rows.jsonl', [{'source': 'q', 'target': 'a'}] * 3)
    (tmp_path / 'list.json').write_text('[{"source": "q", "target": "a"}, {"source": "q"}]')
    (tmp_path / 'object.json').write_text('{"data": [{"text": "a", "url": "b"}]}')
    for name, fields in (('rows.jsonl', 'source, target'), ('list.json', 'source, target'), ('object.json', 'data')):
        with pytest.raises(ValueError, match=f'choose with --text_field; it has: {fields}; --chat_fields='):
            sources.find_source(str(tmp_path / name))
    assert sources.find_source(str(write_rows(tmp_path / 'texts.jsonl', [{'text': 'a'}] * 3))).line is None
    line = sources.find_source(str(write_rows(tmp_path / 'gsm.jsonl', [{**ROWS['gsm8k'], 'id': 1}] * 3))).line
    assert 'question, answer' in line and 'not read: id' in line and '--text_field=' in line


def test_nulls_in_the_arguments_of_a_line_of_json_are_kept_and_those_of_columns_are_none(tmp_path):
    rows = [{'messages': [QA[0], {'role': 'assistant', 'content': None, 'tool_calls': [CALL]}]}]
    write_rows(tmp_path / 'rows.jsonl', rows)
    rows.append({'messages': [QA[0], {'role': 'assistant', 'content': 'a', 'name': 'x'}]})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / 'rows.parquet')
    ((of_json,), _, _), ((of_columns, other), _, _) = (
        read_here(tmp_path / f'rows.{kind}') for kind in ('jsonl', 'parquet')
    )
    assert json.loads(of_json)['messages'][1]['tool_calls'] == [CALL] and 'null' not in of_columns + other


# --- commands ---------------------------------------------------------------------------------------------------------


def test_the_end_shows_an_example_with_what_is_learned_and_peek_shows_whole_ones(tmp_path):
    rows = [{'question': f'What is {n} + 1?' + ' Please.' * 90, 'answer': f'#### {n + 1}'} for n in range(40)]
    make_tokenizer(tmp_path / 'chatml', CHATML)
    path = write_rows(tmp_path / 'gsm.jsonl', [*rows, {'question': 'q', 'answer': None}])
    options = (f'--dataset={path}', f'--tokenizer={tmp_path}/chatml', '--name=gsm', '--num_proc=1')
    printed = prepare(tmp_path, *options).stdout
    assert 'rows are conversations, by their question, answer (--text_field=' in printed
    assert '<|im_start|>assistant\n【#### 1<|im_end|>】\n' in printed
    assert meta_of(tmp_path / 'data' / 'gsm')['rows_kept'] == 40
    length, *windows = prepare(tmp_path, '--peek=gsm').stdout.split('--- ')
    longest = meta_of(tmp_path / 'data' / 'gsm')['splits']['train']['longest']
    assert longest > 257 and f'windows of {longest} tokens, as long as the longest' in length and 'block_size' in length
    for window in windows:
        assert ', 1 conversation in it, ' in window  # two of them would not fit
        assert window.count('<|im_start|>assistant\n【#### ') == window.count('<|im_end|>】') >= 1
        assert '!!' not in window  # padding
    write_rows(tmp_path / 'text.jsonl', [{'text': f'text {number} ' * 9} for number in range(99)])
    prepare(tmp_path, f'--dataset={tmp_path}/text.jsonl', f'--tokenizer={tmp_path}/chatml', '--name=text')
    mixed = prepare(tmp_path, '--peek=gsm,text').stdout
    assert '--- text, window ' in mixed and '【#### ' in mixed
    error = error_of(tmp_path, *options, '--chat_fields=question,answer', '--chat=False')
    assert 'chat=False' in error and 'chat_fields=question,answer' in error
    error = error_of(tmp_path, *options, '--chat_fields=answer,question')
    assert "chat_fields=None, this command has ['answer', 'question']" in error
    found = conversations_of(tmp_path / 'data' / 'gsm', 'train')
    assert all(len(parts) == 1 for _, parts in found)


def test_the_end_shows_a_document_as_all_learned(tmp_path):
    (tmp_path / 'a.txt').write_text('some text ' * 500)
    printed = prepare(tmp_path, f'--dataset={tmp_path}/a.txt', '--tokenizer=bytes', '--num_proc=1').stdout
    assert 'first document' in printed and '【some text some text' in printed and ' [...] ' in printed
