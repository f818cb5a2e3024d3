"""The calculator that a model may call, and the ids that it reads then: those of the training example."""

import json

import pytest
import torch
from chats import CHATML, encoder_of, make_tokenizer, messages_of
from pretrained import CALLS, SONG

from evaluation import tools
from huggingface import loading
from huggingface.pretrained import Pretrained
from text.language import TransformersLanguage
from text.templates import LETTERS
from text.tokenizer import load_transformers_tokenizer

VALUES = {
    '=37*58': '2146',
    '= 37 * 58 ': '2146',
    '=2+3*4-10/5': '12',
    '=10-4-5': '1',
    '=10/4/5': '0.5',
    '=(1+2)*-3': '-9',
    '=-(-(2))': '2',
    '=2--3': '5',
    '=0.1+0.2': '0.3',
    '=.5+1.': '1.5',
    '=1/3': '0.3333333333',
    '=99999999999999999999*10': '999999999999999999990',
}


@pytest.mark.parametrize('call', VALUES)
def test_what_the_calculator_says(call):
    assert tools.result_of(call) == VALUES[call]


NO_CALLS = [
    '37*58',
    '=',
    '=()',
    '=(1',
    '=1)',
    '=1+',
    '=1 2',
    '=1.2.3',
    '=5/0',
    '=2**3',
    '=2^3',
    '=1e9',
    '=a',
    '=\u0663',
]
NO_CALLS += ['It is =1+1', '=1+1.\n', '=__import__("os")', '=' + '1' * 101, '=' + '(' * 60 + '1' + ')' * 40]


@pytest.mark.parametrize('answer', NO_CALLS)
def test_an_answer_that_is_no_expression_with_a_value_is_no_call(answer):
    assert tools.result_of(answer) is None


OTHER = CHATML.replace('message.role +', "(message.role if message.role != 'tool' else 'user') +")
NO_TOOL = CHATML.replace('in messages', "in messages if message.role != 'tool'")


@pytest.mark.parametrize('template, space', [(CHATML, ''), (OTHER, ''), (LETTERS.replace('EOT', '<|im_end|>'), ' ')])
def test_the_ids_of_a_turn_of_the_tool_are_those_of_training(template, space, tmp_path):
    encoder, _ = encoder_of(make_tokenizer(tmp_path, template))
    language = TransformersLanguage(load_transformers_tokenizer(str(tmp_path)), str(tmp_path))
    ((learned, _, _),) = encoder.examples(json.dumps({'messages': messages_of(CALLS)}))
    conversation = {'messages': messages_of(CALLS[:1])}
    asked, encode = language.prompt_of_chat(conversation).ids, language.template.controls.encode
    call, answer = encode(f'{space} =6*7'), encode(f'{space}It is 42.')
    more = tools.ids_of_result(language, conversation, '42')
    assert [*asked, *call, *more, *answer] == learned.tolist()[:-1]


def test_a_template_that_drops_what_a_tool_says_is_refused(tmp_path):
    make_tokenizer(tmp_path, NO_TOOL)
    language = TransformersLanguage(load_transformers_tokenizer(str(tmp_path)), str(tmp_path))
    with pytest.raises(ValueError, match='does not write what a tool says'):
        tools.ids_of_result(language, {'messages': messages_of(CALLS[:1])}, '42')


@pytest.fixture(scope='module')
def opened(talker):
    model = loading.for_generation(Pretrained(talker), None, torch.float32, 'cpu')
    return model, TransformersLanguage(load_transformers_tokenizer(talker), talker)


def said(opened, questions, **options):
    """For each question [the line of each call, and the text of the answer], and what the model has read in all."""
    model, language = opened
    conversations = [{'messages': messages_of([('user', text)])} for text in questions]
    asked = [language.prompt_of_chat(conversation) for conversation in conversations]
    lines, new, read = ([[] for _ in asked] for _ in range(3))
    options = {'max_new_tokens': 30, 'tools': 'calculator'} | options
    for row, token, call in tools.stream_batch(model, language, conversations, asked, **options):
        if call:
            lines[row].append(call.line)
        else:
            new[row].append(token)
        read[row] += call.ids if call else [token]
    return [[*some, language.text_of(asked[0], ids)] for some, ids in zip(lines, new, strict=True)], read


def test_a_model_that_calls_goes_on_behind_the_result_and_keeps_the_ids_that_it_has_drawn(opened):
    texts, read = said(opened, ['Sing', '6x7?', 'Sing', '6x7?'])
    assert texts == [[SONG[:29]], ['calculator: 6*7 = 42', 'It is 42.']] * 2
    turns = ' =6*7<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\nIt is 42.'
    spelled = {257: '<|im_start|>', 258: '<|im_end|>'}
    assert ''.join(spelled.get(token) or chr(token) for token in read[1]) == turns  # with the space


@pytest.mark.parametrize('options', [{'tools': None}, {'max_new_tokens': 5}, {'positions': 45}])
def test_a_call_is_an_answer_without_tools_or_where_there_is_no_room_to_go_on(opened, options):
    texts, read = said(opened, ['6x7?'], **options)
    assert texts == [['=6*7']] and read == [[*b' =6*7']]


def test_an_answer_has_no_more_calls_than_a_limit(opened, monkeypatch):
    monkeypatch.setattr(tools, 'MOST_CALLS', 0)
    assert said(opened, ['6x7?'])[0] == [['=6*7']]
