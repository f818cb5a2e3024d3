"""--reward=FILE.py:FUNCTION: what the function is given, what it may return, and what its mistakes look like."""

import json
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from launch import REPO

from evaluation import reward as rewards
from evaluation.reward import RewardError, open_reward
from evaluation.tasks import item_of, read_task
from system.limits import OverLimit, at_most

ROW = '{"prompt": "28+66=", "right": ["94"], "rows own": {"a": 1}}'


def reward_of(folder, body, name='own'):
    path = folder / f'{name}.py'
    path.write_text(f'def {name}(text, row):\n{body}\n')
    return open_reward(f'{path}:{name}')


@pytest.fixture
def item():
    return item_of(ROW, 'sums.jsonl, row 7', is_own=True)


def test_a_function_is_given_the_text_and_the_row_as_the_file_has_it(tmp_path, item):
    body = '    assert row.pop("prompt") == "28+66=" and row["rows own"] == {"a": 1}\n    return text in row["right"]'
    reward = reward_of(tmp_path, body)
    assert [reward(text, item) for text in ('94', '95', '94')] == [1.0, 0.0, 1.0]  # whatever it has done to the row
    assert item.judge('94', reward) == {'reward': 1.0}
    with_a_rule = item_of(ROW[:-1] + ', "answer": "94", "rule": "exact"}', 'sums.jsonl, row 8', is_own=True)
    assert with_a_rule.judge(' 94', reward) == {'reward': 0.0, 'acc': True}


def test_any_number_that_is_finite_is_a_reward():
    ours = [1, 0.5, -2, True, np.float32(0.5), np.bool_(True), torch.tensor(2.0)]
    assert [rewards.number_of(value) for value in ours] == [1.0, 0.5, -2.0, 1.0, 0.5, 1.0, 2.0]
    others = ['1', b'1', None, [1.0], {}, float('nan'), float('-inf'), 10**400, 1e30, 1j, torch.ones(2)]
    assert [value for value in others if rewards.number_of(value) is not None] == []


OF_TRL = """\
def lengths(completions, **kwargs):
    return [float(len(completion)) for completion in completions]
def right(prompts, completions, answer):
    return [float(c == a) + (p == 'Q') for p, c, a in zip(prompts, completions, answer, strict=True)]
def said(completions, **kwargs):
    return [float(c[0]['content'] == a) for c, a in zip(completions, kwargs['answer'], strict=True)]
def none(completions, **kwargs):
    return [None]
def ids(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]
"""


def test_a_function_of_trl_gets_lists_of_one_answer(tmp_path):
    path = tmp_path / 'theirs.py'
    path.write_text(OF_TRL)
    row = {'prompt': 'Q', 'answer': 'ab', 'more': 1}
    item = item_of(json.dumps(row), 'a.jsonl, row 1', is_own=True)
    chat = SimpleNamespace(row=json.dumps({**row, 'prompt': [{'role': 'user', 'content': 'Q'}]}), place='row 2')
    for name, asked, value in (('lengths', item, 2.0), ('right', item, 2.0), ('said', chat, 1.0)):
        assert open_reward(f'{path}:{name}')('ab', asked) == value
    with pytest.raises(RewardError, match='returned None; expected a finite number'):
        open_reward(f'{path}:none')('ab', item)
    with pytest.raises(ValueError, match='ids takes completion_ids, and rewards get texts: let it read completions$'):
        open_reward(f'{path}:ids')


def test_a_function_of_another_form_is_refused(tmp_path):
    path = tmp_path / 'other.py'
    path.write_text('def short(text):\n    return 1\ndef named(text, **row):\n    return 1\nof_c = max\n')
    for name in ('short', 'named'):
        with pytest.raises(ValueError, match=rf'{name}\(text.*\) is called as {name}\(text, row\), .* its row$'):
            open_reward.__wrapped__(f'{path}:{name}')
    open_reward.__wrapped__(f'{path}:of_c')  # nobody knows what it takes


@pytest.mark.parametrize(
    ('body', 'why'),
    [
        ('    return 1 / len(text)', r'raised ZeroDivisionError: division by zero \(line 2 of .*own.py\)'),
        ('    return of(row)\ndef of(row):\n    return row["answer"]', r"raised KeyError: 'answer' \(line 4 of "),
        ('    raise SystemExit(3)', r'raised SystemExit: 3 \(line 2'),
        ('    pass', 'returned None; expected a finite number'),
        ('    return float("nan")', 'returned nan; expected'),
        ('    return "1.0"', "returned '1.0'; expected"),
        ('    return [0.5]', r'returned \[0.5\]; expected'),
    ],
)
def test_a_mistake_of_the_function_names_it_and_the_row(tmp_path, item, body, why):
    reward = reward_of(tmp_path, body)
    with pytest.raises(RewardError, match=f"^reward=.*own.py:own: for the answer '' to sums.jsonl, row 7 it {why}"):
        reward('', item)
    path = tmp_path / 'rows.jsonl'
    path.write_text(ROW + '\n')
    with pytest.raises(ValueError, match=f'rows.jsonl, row 1 it {why}'):
        read_task(path, reward=reward)  # before any model is loaded


def test_what_is_too_slow_earns_nothing_and_is_named_once(tmp_path, item, monkeypatch, capfd):
    monkeypatch.setattr(rewards, 'LIMIT_S', 0.1)
    body = '    import time\n    time.sleep(len(text))\n    return 1'  # which takes no CPU time
    reward = reward_of(tmp_path, body, 'slow')
    began = time.monotonic()
    assert [reward(text, item) for text in ('', 'a' * 60, 'a' * 60)] == [1.0, 0.0, 0.0]
    assert time.monotonic() - began < 10
    (line,) = capfd.readouterr().err.splitlines()
    assert re.search(r'^WARNING: reward=.*slow.py:slow: for the answer .* to sums.jsonl, row 7 it took more than', line)
    with pytest.raises(OverLimit), at_most(0.05, wall=True):
        time.sleep(60)


def test_what_names_no_function_says_what_was_expected(tmp_path):
    path = tmp_path / 'two.py'
    path.write_text('import math\nfrom os import path\nNUMBER = 1\ndef a(text, row): ...\ndef b(text, row): ...\n')
    for given in (str(path), f'{path}:c', f'{path}:NUMBER'):
        with pytest.raises(ValueError, match=r'two.py has no function .*; expected FILE.py:FUNCTION, and it has a, b'):
            open_reward(given)
    with pytest.raises(ValueError, match='there is no file .*none.py; expected FILE.py:FUNCTION'):
        open_reward(f'{tmp_path}/none.py:a')
    for name, text, why in (('syntax', 'def a(:', 'SyntaxError: '), ('error', '\n1/0', r'ZeroDivisionError: .*line 2')):
        (tmp_path / f'{name}.py').write_text(text)
        with pytest.raises(ValueError, match=f'reward=.*{name}.py:a: the file raised {why}'):
            open_reward(f'{tmp_path}/{name}.py:a')
    classes = (
        'from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    b: int = 1\n'
    )
    (tmp_path / 'classes.py').write_text(f'{classes}def a(text, row):\n    return A().b')
    assert open_reward(f'{tmp_path}/classes.py:a').function('', {}) == 1
    assert [rewards.is_function(given) for given in (None, 'acc', 'a.py:b', 'a.py')] == [False, False, True, True]


def test_the_example_of_the_page_runs(tmp_path):
    page = (REPO / 'docs' / 'grpo.md').read_text()
    (example,) = re.findall(r'```python\n(def digits.*?)```', page, re.DOTALL)
    (tmp_path / 'my_reward.py').write_text(example)
    assert '--reward=my_reward.py:digits' in page
    reward = open_reward(f'{tmp_path}/my_reward.py:digits')
    item = item_of('{"prompt": "28+66=", "answer": "94"}', 'row 1', is_own=True)
    assert [reward(text, item) for text in ('94', '95', '940', '4', '')] == [1.0, 0.5, 2 / 3, 0.0, 0.0]


# --- rows of other programs -------------------------------------------------------------------------------------------

ASK, SYSTEM = [{'role': 'user', 'content': 'Q'}], {'role': 'system', 'content': 'S'}
TALK = [SYSTEM, *ASK, {'role': 'assistant', 'content': 'A'}, {'role': 'user', 'content': 'Q2'}]
OF_VERL = {'data_source': 'openai/gsm8k', 'prompt': ASK, 'ability': 'math', 'extra_info': {'index': 0}}
OF_VERL |= {'reward_model': {'style': 'rule', 'ground_truth': '18'}}
LAST = '; judges by the last number (rule=number)'


def read(folder, rows, **options):
    path = folder / 'rows.jsonl'
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return read_task(path, **options)


def as_text(messages, of_chat):
    return ' '.join(f'{message["role"]}: {message["content"]}' for message in messages)


@pytest.mark.parametrize(
    ('row', 'prompt', 'words'),
    [
        ({'question': 'Q', 'answer': '9 + 9 = 18\n#### 18'}, 'user: Q', f'question as the prompt{LAST}'),
        ({'question': 'Q', 'answer': 18}, 'user: Q', f'question as the prompt{LAST}'),
        ({'prompt': 'Q', 'ground_truth': '18'}, 'user: Q', f'ground_truth as the answer{LAST}'),
        ({'prompt': ASK, 'answer': '18'}, 'user: Q', f'the messages of prompt as a chat{LAST}'),
        (
            {'prompt': TALK, 'ground_truth': '18', 'rule': 'exact'},
            'system: S user: Q assistant: A user: Q2',
            'the messages of prompt as a chat, ground_truth as the answer',
        ),
        (
            OF_VERL,
            'user: Q',
            f'the messages of prompt as a chat, reward_model.ground_truth as the answer{LAST}; leaves out ability, '
            'data_source, extra_info',
        ),
    ],
)
def test_rows_of_other_programs_are_read_and_a_line_says_how(tmp_path, row, prompt, words):
    task = read(tmp_path, [row] * 2, chat=as_text)
    (item, _) = task.items
    assert item.pairs[0][0] == prompt and item.judge('18') == {'acc': True} and item.judge('17') == {'acc': False}
    assert task.note == f'{tmp_path / "rows.jsonl"}: reads {words}'
    assert item.judge('It is 18.') == {'acc': row.get('rule') != 'exact'}


def test_rows_of_this_project_are_read_as_they_are(tmp_path):
    task = read(tmp_path, [{'prompt': 'Q', 'answer': '18', 'rule': 'number'}])
    assert task.note == '' and task.items[0].row == ''


def test_examples_are_shown_with_what_stands_before_them(tmp_path):
    rows = [{'prompt': TALK, 'ground_truth': '18'}, {'prompt': [SYSTEM, *ASK], 'ground_truth': '3'}]
    (item, other) = read(tmp_path, rows, chat=as_text, num_fewshot=1).items
    assert item.pairs[0][0] == 'system: S user: Q assistant: 3 user: Q assistant: A user: Q2'
    assert other.pairs[0][0] == 'system: S user: Q assistant: A user: Q2 assistant: 18 user: Q'


@pytest.mark.parametrize(
    ('row', 'why'),
    [
        ({'question': 'Q', 'answer': 'B'}, 'the answer \'B\' is no number, .*, or name another "rule"'),
        ({'question': 'Q', 'answer': '18', 'ground_truth': '19'}, 'answer and ground_truth differ'),
        ({**OF_VERL, 'ground_truth': '17'}, 'ground_truth and reward_model.ground_truth differ'),
        ({'prompt': 'P', 'question': 'Q', 'answer': '18'}, 'has the keys answer, prompt, question; expected one of'),
        ({'question': 'Q', 'answer': '18', 'context': 'C'}, 'has the keys answer, context, question; expected one of'),
        ({'question': 'Q'}, 'a row without an answer, or with keys of its own, needs a --reward=FILE.py:FUNCTION'),
        ({'prompt': [*ASK, SYSTEM], 'answer': '18'}, 'the last message is not a text of the user'),
        ({'prompt': [{'role': 'boss', 'content': 'Q'}], 'answer': '18'}, "rows with the unknown role 'boss'"),
        ({'prompt': [SYSTEM, *ASK], 'answer': '18', 'description': 'D'}, 'a description beside a system message'),
    ],
)
def test_rows_that_may_be_read_in_two_ways_are_refused(tmp_path, row, why):
    with pytest.raises(ValueError, match=f'rows.jsonl, row 1: .*{why}') as caught:
        read(tmp_path, [row], chat=as_text)
    assert '\n' not in str(caught.value)


def test_messages_need_a_chat_template(tmp_path):
    with pytest.raises(ValueError, match='row 1: messages are for a chat template: --apply_chat_template writes them$'):
        read(tmp_path, [OF_VERL])


def test_beside_a_function_a_row_needs_a_prompt_alone(tmp_path):
    reward = reward_of(tmp_path, '    return len(row)')
    keys = {'tests': ['assert f(1)'], 'answer': {'any': 'thing'}}
    for row, words in ((keys | {'prompt': 'Q'}, ''), (keys | {'question': 'Q'}, 'question as the prompt')):
        task = read(tmp_path, [row] * 2, reward=reward)
        assert task.items[0].pairs == [('Q', '')] and task.items[0].judge('', reward) == {'reward': 3.0}
        assert task.note == (words and f'{tmp_path / "rows.jsonl"}: reads {words}')
    with pytest.raises(ValueError, match='num_fewshot=1: .*rows.jsonl, row 1 has no answer to show'):
        read(tmp_path, [row] * 3, reward=reward, num_fewshot=1)
    (item,) = read(tmp_path, [OF_VERL], reward=reward, chat=as_text).items
    assert json.loads(item.row) == OF_VERL and item.judge('', reward) == {'reward': 5.0}
    for more, why in (
        ({'options': ['a', 'b']}, 'question stands beside options'),
        ({'images': ['a']}, 'beside images'),
        ({'system': 'Be brief.'}, 'beside system: write all that the model is to see into "prompt"'),
        ({'functions': [{'name': 'f'}]}, 'beside functions'),
    ):
        with pytest.raises(ValueError, match=why):
            read(tmp_path, [{'question': 'Q', **more}], reward=reward)
