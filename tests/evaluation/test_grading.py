"""Which answers rule=number and rule=math find right, of 200 in the forms of GSM8K and of MATH, as a person judges."""

import pytest

from evaluation.grading import Rule

# {answer of the row: (five texts that are right, five that are wrong)}
GSM8K = {
    '18': (
        [
            'She makes 9 * 2 = $18 every day.\n#### 18',
            'The answer is 18.',
            'So she earns **$18** per day.',
            'She has 16 - 3 - 4 = 9 eggs left and sells them for 9 * $2 = \\boxed{18} dollars.',
            'Answer: $18.00',
        ],
        [
            '#### 16',
            'The answer is 1.8.',
            'She makes $18 on Monday and $20 on Tuesday. The answer is 20.',
            'The answer is -18.',
            'She makes 18/2 dollars.',
        ],
    ),
    '3': (
        [
            'It takes 2/2=<<2/2=1>>1 bolt of white fiber\nSo the total is 2+1=<<2+1=3>>3 bolts\n#### 3',
            'It takes 3 bolts in total.',
            'The total is three, that is 3.',
            '2 + 1 = 3',
            '$2 + 1 = 3$ bolts',
        ],
        ['1.5 bolts', 'The answer is 2.', '3/2', 'It takes 1/3 of a bolt.', 'The ratio is 2:3'],
    ),
    '70000': (
        [
            'The profit was $70,000.',
            '#### 70,000',
            'He made a profit of 70000 dollars.',
            'Profit: $70,000.00',
            'The profit is \\$70{,}000.',
        ],
        ['He made $70.', 'The profit was $7,000.', '70 million', '#### 700,00', 'The profit is $130,000'],
    ),
    '540': (
        ['He runs 9 * 60 = 540 meters a week', 'The answer is 540 meters.', '540m', 'Total: 540', '\\boxed{540}'],
        ['540 km is 540,000', 'The answer is 54.', '3 * 60 = 180', '5400', '\\boxed{450}'],
    ),
    '0.5': (
        ['The share is 0.5.', 'That is 1/2.', 'Each gets \\frac{1}{2} of it.', '.5', 'a half, which is 0.50'],
        ['It is 5', '0.05', '1/5', '50', '2'],
    ),
    '-5': (
        ['The temperature is −5 degrees.', 'It is -5.', 'So x = -5', '\\boxed{-5}', '#### −5'],
        ['It is 5.', '#### 5', '0 - (-5) = 5', '−50', '-0.5'],
    ),
    '1200': (
        ['There are 1,200 apples.', '1.2 × 10^3', '1200.', 'In total 1 200 apples', '#### 1200'],
        ['12 hundred: 12', '1.2', '120', '1,200,000', '2 * 1200'],
    ),
    '25': (
        ['25%', 'It is 25 percent.', 'The discount is 25%.', '\\boxed{25\\%}', '#### 25'],
        ['75%', '2.5%', '25/100', '#### 52', '100 - 25 = 75'],
    ),
    '7': (
        ['7 hours', 'It takes him 7 hours (from step 3).', '**7**', 'The final answer is: 7', 'x=7'],
        ['7.5', '3 + 4 = 8', '70', '-7', '7:30'],
    ),
    '3/4': (
        ['He ate 3/4 of it.', '0.75', '\\frac{3}{4}', '75/100', '6/8'],
        ['3', '4', '4/3', '0.7', '34'],
    ),
}
MATH = {
    '\\frac{3}{4}': (
        [
            '\\boxed{\\frac{3}{4}}',
            '\\boxed{\\dfrac34}',
            'The answer is $0.75$.',
            '$\\frac{6}{8}$',
            'The answer is 3/4.',
        ],
        ['\\boxed{\\frac{1}{4}}', '\\boxed{4}', '\\boxed{\\frac{4}{3}}', '$-\\frac{3}{4}$', '\\boxed{\\frac{3}{5}}'],
    ),
    '2\\sqrt{3}': (
        [
            '\\boxed{2\\sqrt{3}}',
            '$\\sqrt{12}$',
            '\\boxed{\\sqrt{3} \\cdot 2}',
            'The answer is $2 \\sqrt 3$.',
            '$\\frac{6}{\\sqrt{3}}$',
        ],
        ['\\boxed{3}', '\\boxed{3\\sqrt{2}}', '\\boxed{\\sqrt{3}}', '$2\\sqrt{2}$', '$\\sqrt{6}$'],
    ),
    'x^2+2x+1': (
        ['\\boxed{x^2+2x+1}', '$(x+1)^2$', '\\boxed{1+2x+x^2}', '$x^2 + 2x + 1$', '$x(x+2)+1$'],
        ['\\boxed{x^2+2x-1}', '$(x-1)^2$', '\\boxed{x^2+1}', '1', '$x^2+2x$'],
    ),
    '\\frac{\\pi}{2}': (
        ['\\boxed{\\frac{\\pi}{2}}', '$\\pi/2$', '\\boxed{\\dfrac{\\pi}{2}}', '$\\frac12\\pi$', '$0.5\\pi$'],
        ['\\boxed{2}', '\\boxed{\\pi}', '$\\frac{\\pi}{4}$', '$\\frac{2}{\\pi}$', '90'],
    ),
    '(2,3)': (
        ['\\boxed{(2,3)}', '$(2, 3)$', '\\boxed{\\left(2,3\\right)}', 'The point is $(2,3)$.', '$(x,y)=(2,3)$'],
        ['\\boxed{(3,2)}', '$(2,4)$', '\\boxed{3}', '$(2,3,4)$', '$(-2,3)$'],
    ),
    '[1,4)': (
        ['\\boxed{[1,4)}', '$[1, 4)$', '\\boxed{\\left[1,4\\right)}', '$x \\in [1,4)$', '\\boxed{1 \\le x < 4}'],
        ['\\boxed{(1,4)}', '$[1,4]$', '\\boxed{(1,4]}', '$[1,5)$', '4'],
    ),
    '11,\\! 111': (
        ['\\boxed{11111}', '\\boxed{11{,}111}', '$11,111$', '\\boxed{11,\\!111}', 'The answer is 11111.'],
        ['\\boxed{1111}', '\\boxed{111}', '$11.111$', '\\boxed{11}', '\\boxed{-11111}'],
    ),
    '120^\\circ': (
        ['\\boxed{120^\\circ}', '\\boxed{120}', '$120^{\\circ}$', '120 degrees', '\\boxed{120^{\\circ}}'],
        ['\\boxed{60^\\circ}', '\\boxed{12}', '$240^\\circ$', '\\boxed{-120}', '$\\frac{1}{3}$'],
    ),
    '\\text{(B)}': (
        ['\\boxed{\\text{(B)}}', '\\boxed{B}', 'The answer is (B).', '\\boxed{\\textbf{(B)}}', '\\boxed{(B)}'],
        ['\\boxed{\\text{(C)}}', '\\boxed{A}', 'The answer is (D).', '\\boxed{(A)}', '2'],
    ),
    '1,-2': (
        [
            '\\boxed{1,-2}',
            '\\boxed{-2, 1}',
            '$x = 1$ or $x = -2$',
            '\\boxed{1 \\text{ and } -2}',
            '\\boxed{\\{1,-2\\}}',
        ],
        ['\\boxed{1}', '\\boxed{-2}', '\\boxed{1,2}', '\\boxed{-1,2}', '\\boxed{1,-2,3}'],
    ),
}


def judged_as_by_a_person(rule, table):
    """(how many of the texts, how many whose row is refused)."""
    right = refused = 0
    for answer, groups in table.items():
        for texts, expected in zip(groups, (True, False), strict=True):
            assert len(texts) == 5
            try:
                given = Rule.of({'answer': answer, 'rule': rule}, 'row 1')
            except ValueError:
                refused += len(texts)
            else:
                right += sum(given.judge(text)['acc'] == expected for text in texts)
    return right, refused


@pytest.mark.parametrize(('rule', 'of_gsm8k', 'of_math'), [('number', (98, 0), (20, 80)), ('math', (94, 0), (98, 0))])
def test_each_rule_is_for_its_own_kind_of_answers(rule, of_gsm8k, of_math):
    """docs/reference/tasks.md has these figures. Another math-verify may read more."""
    for table, (right, refused) in ((GSM8K, of_gsm8k), (MATH, of_math)):
        found, left = judged_as_by_a_person(rule, table)
        assert found >= right and left == refused, (found, left)
