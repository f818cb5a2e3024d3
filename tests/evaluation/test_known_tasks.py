"""Rows of the hub's datasets become what lm-evaluation-harness 0.4.13 makes of them: its own code gave these texts."""

import pytest

from evaluation.known_tasks import KNOWN

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
