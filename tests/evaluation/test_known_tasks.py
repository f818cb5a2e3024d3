"""Rows of datasets on the hub become what lm-evaluation-harness 0.4.13 makes of them. Its own code gave these texts."""

import json

import pytest

from evaluation.known_tasks import KNOWN, make_tasks

ABCDE = list('ABCDE')
ICE = {
    'activity_label': 'Removing ice from car',
    'ctx_a': '[header] How to  do it [title] Begin. [step] Then',
    'ctx_b': 'the Man',
    'endings': [' [step] goes  on [substeps] here. ', 'stops.', "doesn't", 'is'],
    'label': '2',
}
WHO = {'question': ' Who? ', 'subject': 'us_history', 'choices': ['a', 'b', 'c', 'd'], 'answer': 2}
START = 'The following are multiple choice questions (with answers) about us history.\n\n'


@pytest.mark.parametrize(
    'name, row, expected',
    [
        (
            'hellaswag',
            ICE,
            {
                'context': 'Removing ice from car: How to do it. Begin. Then The man',
                'choices': [' goes on here.', 'stops.', "doesn't", 'is'],
                'gold': 2,
            },
        ),
        (
            'arc_easy',
            {'question': '2 + 2 =', 'choices': {'text': ['3', '4', '5'], 'label': ['1', '2', '3']}, 'answerKey': '2'},
            {'context': 'Question: 2 + 2 =\nAnswer:', 'choices': ['3', '4', '5'], 'gold': 1},
        ),
        (
            'winogrande',
            {'sentence': 'The cup did not fit as the _ was big.', 'option1': 'cup', 'option2': 'bag', 'answer': '1'},
            {
                'contexts': ['The cup did not fit as the cup', 'The cup did not fit as the bag'],
                'continuation': 'was big.',
                'gold': 0,
            },
        ),
        (
            'lambada_openai',
            {'text': 'She opened the\n big door'},
            {'context': 'She opened the\n big', 'continuation': 'door'},
        ),
        (
            'mmlu',
            WHO,
            {
                'context': 'Who?\nA. a\nB. b\nC. c\nD. d\nAnswer:',
                'choices': ABCDE[:4],
                'gold': 2,
                'group': 'us_history',
                'description': START,
            },
        ),
        (
            'mmlu_continuation',
            WHO,
            {
                'context': 'Question: Who?\nAnswer:',
                'choices': ['a', 'b', 'c', 'd'],
                'gold': 2,
                'group': 'us_history',
                'description': START.replace('multiple choice ', ''),
            },
        ),
        (
            'boolq',
            {'passage': 'Ice is cold.', 'question': 'is ice warm', 'label': 0},
            {'context': 'Ice is cold.\nQuestion: is ice warm?\nAnswer:', 'choices': ['no', 'yes'], 'gold': 0},
        ),
        (
            'boolq',
            {'passage': 'Ice is cold.', 'question': 'is ice warm', 'answer': True},  # google/boolq's
            {'context': 'Ice is cold.\nQuestion: is ice warm?\nAnswer:', 'choices': ['no', 'yes'], 'gold': 1},
        ),
        (
            'openbookqa',
            {
                'question_stem': 'The sun is',
                'choices': {'text': ['hot', 'cold'], 'label': ['A', 'B']},
                'answerKey': ' B',
            },
            {'context': 'The sun is', 'choices': ['hot', 'cold'], 'gold': 1},
        ),
        (
            'commonsense_qa',
            {'question': ' Where? ', 'choices': {'text': list('vwxyz'), 'label': ABCDE}, 'answerKey': 'E'},
            {'context': 'Question: Where?\nA. v\nB. w\nC. x\nD. y\nE. z\nAnswer:', 'choices': ABCDE, 'gold': 4},
        ),
    ],
)
def test_an_item_has_the_text_that_the_harness_makes(name, row, expected):
    assert KNOWN[name].item_of(row) == expected


@pytest.mark.parametrize(
    'key, value, said',
    [
        ('label', '../../PWNED', r"icl_tasks\[0\].label: found '../../PWNED'"),
        ('dataset_uri', '../secret.jsonl', "dataset_uri of lambada: found '..'"),
        ('dataset_uri', '/etc/passwd', "dataset_uri of lambada: found ''"),
        ('num_fewshot', 10, r'icl_tasks\[0\].num_fewshot: found 10, expected a list'),
        ('icl_task_type', None, r'icl_tasks\[0\].icl_task_type: found None'),
    ],
)
def test_a_bundle_of_core_decides_no_path(key, value, said, tmp_path):
    task = {'label': 'lambada', 'dataset_uri': 'a/b.jsonl', 'num_fewshot': [0], 'icl_task_type': 'language_modeling'}
    row = json.dumps({'context': 'a', 'continuation': 'b'})
    for path in ('bundle/eval_data/a/b.jsonl', 'bundle/secret.jsonl'):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f'{row}\n')
    (tmp_path / 'bundle' / 'eval_meta_data.csv').write_text('Eval Task,Random baseline\nlambada,0\n../../PWNED,0\n')
    core = tmp_path / 'bundle' / 'core.yaml'
    core.write_text(json.dumps({'icl_tasks': [task]}))  # which is YAML, too
    make_tasks([str(core)], None, tmp_path / 'tasks')
    before = sorted(tmp_path.rglob('*'))
    core.write_text(json.dumps({'icl_tasks': [{**task, key: value}]}))
    with pytest.raises(ValueError, match=f'core.yaml: {said}'):
        make_tasks([str(core)], None, tmp_path / 'tasks')
    assert sorted(tmp_path.rglob('*')) == before


# --- from datasets on this machine ------------------------------------------------------------------------------------

JAR = {'goal': 'open a jar', 'sol1': 'pull it', 'sol2': 'twist it', 'label': 1}
SUMS = [{'question': f'{n} + 1?', 'answer': f'{n} + 1 = {n + 1}\n#### {n + 1}'} for n in range(8)]


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('\n'.join(map(json.dumps, rows)) + '\n')
    return path


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_tasks_are_made_from_folders_of_save_to_disk_from_arrow_and_from_jsonl(tmp_path, capsys):
    import datasets

    tasks = tmp_path / 'tasks'
    both = {'validation': datasets.Dataset.from_list([JAR] * 2), 'train': datasets.Dataset.from_list([JAR] * 3)}
    datasets.DatasetDict(both).save_to_disk(tmp_path / 'dict')
    both['validation'].save_to_disk(tmp_path / 'alone' / 'validation')
    (arrow,) = (tmp_path / 'alone' / 'validation').glob('*.arrow')
    both['validation'].to_parquet(tmp_path / 'hub' / 'data' / 'validation-00000-of-00001.parquet')
    expected = {'context': 'Question: open a jar\nAnswer:', 'choices': ['pull it', 'twist it'], 'gold': 1}
    make_tasks([f'piqa={tmp_path}/dict'], None, tasks)
    assert lines_of(tasks / 'piqa.jsonl') == [expected] * 2 and lines_of(tasks / 'piqa.fewshot.jsonl') == [expected] * 3
    assert 'no split' not in capsys.readouterr().out
    for n, place in enumerate(('alone', 'alone/validation', str(arrow), 'hub')):
        make_tasks([f'piqa={tmp_path / place}'], None, tmp_path / str(n))
        assert lines_of(tmp_path / str(n) / 'piqa.jsonl') == [expected] * 2
        assert not (tmp_path / str(n) / 'piqa.fewshot.jsonl').exists()
        assert 'no split train is there' in capsys.readouterr().out
    # lines of JSON, with the examples in the file beside it
    write_lines(tmp_path / 'sums_train.jsonl', SUMS[2:])
    place = write_lines(tmp_path / 'sums_test.jsonl', SUMS[:2])
    make_tasks([f'gsm8k={place}'], None, tasks)
    rows = lines_of(tasks / 'gsm8k.jsonl')
    assert [row['prompt'] for row in rows] == ['Question: 0 + 1?\nAnswer:', 'Question: 1 + 1?\nAnswer:']
    assert rows[0]['answer'] == SUMS[0]['answer'] and len(lines_of(tasks / 'gsm8k.fewshot.jsonl')) == 6
    # a folder of subjects; in each, the splits
    for subject in ('b_law', 'a_algebra'):
        for split, count in (('test', 2), ('dev', 1), ('validation', 4)):
            write_lines(tmp_path / 'mmlu' / subject / f'{split}.jsonl', [{**WHO, 'subject': subject}] * count)
    make_tasks([f'mmlu={tmp_path}/mmlu'], None, tasks)
    assert [row['group'] for row in lines_of(tasks / 'mmlu.jsonl')] == ['a_algebra'] * 2 + ['b_law'] * 2
    assert [row['group'] for row in lines_of(tasks / 'mmlu.fewshot.jsonl')] == ['a_algebra', 'b_law']
    pins = json.loads((tasks / 'pins.json').read_text())
    assert pins['mmlu']['read_from'] == f'{tmp_path}/mmlu' and len(pins['gsm8k']['sha256']) == 2
    with pytest.raises(ValueError, match='piqa is pinned in .* to .*/dict and is another text at .*/alone: .* delete'):
        make_tasks([f'piqa={tmp_path}/alone'], None, tasks)


def test_a_dataset_that_is_not_the_tasks_own_is_refused_in_one_line(tmp_path):
    write_lines(tmp_path / 'arc' / 'validation.jsonl', [JAR])
    hidden = write_lines(tmp_path / 'hidden.jsonl', [JAR, {**JAR, 'label': -1}])
    (tmp_path / 'broken.arrow').write_bytes(b'arrow?')
    (tmp_path / 'empty').mkdir()
    cases = [
        (f'boolq={hidden}', "hidden.jsonl, row 1: no row of boolq .*: lacks 'passage'; its fields: goal, sol1"),
        (f'piqa={hidden}', 'hidden.jsonl, row 2: no row of piqa with its answer.*: gold=-1; expected'),
        (f'arc_easy={tmp_path}/arc', r'no split test is there; it has: validation \(.*jsonl\): name one'),
        (f'piqa={tmp_path}/empty', 'no split validation is there; expected validation.jsonl'),
        (f'piqa={tmp_path}/none', 'there is no such file or folder'),
        (f'piqa={tmp_path}/broken.arrow', 'broken.arrow: cannot be read: '),
        (f'pika={tmp_path}/arc', 'tasks=pika: not a task that is known here; did you mean piqa'),
    ]
    for given, expected in cases:
        with pytest.raises(ValueError, match=expected) as caught:
            make_tasks([given], None, tmp_path / 'tasks')
        assert '\n' not in str(caught.value)
