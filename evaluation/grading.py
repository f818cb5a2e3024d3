"""
Did the model write the answer? The rules that decide whether generated text is right, for rows with a "prompt".

    rule = Rule.of(row, place)  # for a row such as {"prompt": ..., "answer": "18", "rule": "number"}
    {name of a score: 0 or 1} = rule.judge(text)

A text is right by the rule

    exact       if it is the answer, apart from white space around it;
    contains    if it contains the answer;
    number      if its last number equals the answer, which is one number and nothing else: 1,000 and $1000.00 are
                equal, and so are 1/2, \\frac{1}{2} and 0.5. NUMBER below says what is read as one;
    regex       if the first match of "pattern" (or its first group, if it has one) is the same in text and answer; if
                the pattern does not match the answer, the text's match has to be the answer itself;
    math        if its last formula or number equals the answer, a formula in LaTeX as in the MATH data set. The package
                math-verify reads and compares them, with sympy: 2\\sqrt{3} and \\sqrt{12} are equal;
    gsm8k       by two rules of lm-evaluation-harness, each with its own score: strict_match takes the number behind
                ####, flexible_extract the last number.

A search for a pattern, or the comparison of formulas, may take years. After LIMITS_S it is given up, the text counts as
wrong, and a line says so.
"""

import contextlib
import json
import logging
import re
import sys
import unicodedata
from fractions import Fraction
from typing import NamedTuple

from system.limits import OverLimit, at_most

RULES = ('exact', 'contains', 'number', 'regex', 'math', 'gsm8k')
LIMITS_S = {'regex': 1, 'math': 5}  # CPU time for a text: sound patterns need a thousandth of it, formulas a hundredth
# From lm_eval/tasks/gsm8k/gsm8k.yaml: {score: (pattern, which of its matches counts)}, and what to ignore in a match.
GSM8K = {
    'strict_match': (re.compile(r'#### (\-?[0-9\.\,]+)'), 0),
    'flexible_extract': (re.compile(r'(-?[$0-9.,]{2,})|(-?[0-9]+)'), -1),
}
IGNORED = [re.compile(pattern) for pattern in (',', r'\$', '(?s).*#### ', r'\.$')]

# --- numbers, which are read as a whole or not at all -----------------------------------------------------------------
# Whatever has digits is a NUMBER; or an INDEX or exponent, which is passed over: cm^2, x_1, H2O; or something OTHER, of
# which they are a part: 3:2, 3.2.1, 2^10, 2\sqrt{3}, 5 million. A text that ends in such has no number: 2 or 5 would be
# the answer to another question.

PLAIN = {  # what is written in several ways, and the way that NUMBER reads
    '[\u2212\u2010-\u2013\ufe63\uff0d]': '-',  # minus signs, and hyphens and dashes that stand for one
    r'[\u00a0\u2000-\u200a\u202f]|\\[,;: ]': ' ',  # thin spaces, also LaTeX's, which group digits
    r'\\!|\\(?=[$%])': '',
    r'\{,\}': ',',
    r'\^\{?\\circ\}?': '°',
    r'\\(?:times|cdot)\b': '×',
    r'\^\{([+-]?\d+)\}': r'^\1',
    r'(?<=\d)\s*(?=\\[dtc]?frac)': ' ',  # of 1\frac{1}{2}
    r'\\[dtc]?frac\s*(?:\{\s*(-?[\d,]+)\s*\}|(\d))\s*(?:\{\s*([\d,]+)\s*\}|(\d))(?![\d^])': r'\1\2/\3\4',
}
WHOLE = r'(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?:[ ]\d{3})+|\d+)'
DECIMAL = rf'(?:{WHOLE}(?:\.\d+)?|(?<![\w.])\.\d+)'
JOINS = (
    r"""[.,:/^*×·+\-%'’_(){}\[\]]*(?:\\(?:sqrt|[dtc]?frac|div|pm)\W*)?"""  # make one expression of the digits around
)
NUMBER = rf"""
    (?P<minus>=\s*-\s*|(?<![A-Za-z0-9)\]}}%])-)?(?:(?<![A-Za-z0-9)\]}}%])\+)?(?:[$€£¥₹]\s?)?
    (?:
        (?:(?P<mixed>\d+)[ ])?(?P<top>{WHOLE})/(?P<bottom>{WHOLE})
      | (?:(?P<factor>{DECIMAL})(?:e|\s?[×x*]\s?10\^)|10\^)(?P<exponent>[+-]?\d+)
      | (?P<digits>{DECIMAL})
    )
    (?!{JOINS}\d | e[+-]?\d | x\d | [²³¹⁰-⁹^π√千万亿] | \s?\\(?:pi|sqrt)\b
      | \s(?:hundred|thousand|million|billion|trillion|dozen)\b)"""
INDEX = r'(?<=[\w)}])[\^_]\{?-?\d+ | [A-Za-z]-?\d[\d.]*'
OTHER = rf"""
    (?:[A-Za-z0-9)\]}}][+*/]|[)\]}}]-)?(?:\d|√\s?\d|\\(?:sqrt|[dtc]?frac)[^\d\s]{{0,40}}\d)(?:{JOINS}\d)*"""
TOKEN = re.compile(rf'(?P<index>{INDEX})|{NUMBER}|(?P<other>{OTHER})', re.X | re.I)
ALONE = re.compile(  # an answer: what may stand around its number does not change it
    rf'(?:.*\#\#\#\#)?(?:\\boxed\{{|\\[(\[]|\$|\s)*{NUMBER}(?:[}}$€£¥₹%°.\s]|\\[)\]])*', re.X | re.I | re.S
)
LONGEST = 1000  # characters of a number, and powers of ten: 1e999999999 would take a week


def in_plain_signs(text):
    text = re.sub('[¼-¾⅐-⅞]', lambda found: ' ' + unicodedata.normalize('NFKC', found[0]).replace('⁄', '/'), text)
    for pattern, plain in PLAIN.items():
        text = re.sub(pattern, plain, text)
    return text


def value_of(number):
    """What a match of NUMBER is as a Fraction; None for a division by zero, or if it is too long."""
    mixed, top, bottom, factor, digits = (
        re.sub('[, ]', '', number[part] or '') for part in ('mixed', 'top', 'bottom', 'factor', 'digits')
    )
    if len(number[0]) > LONGEST or abs(int(number['exponent'] or 0)) > LONGEST or (top and not int(bottom)):
        return None
    if top:
        value = int(mixed or 0) + Fraction(int(top), int(bottom))
    else:
        value = Fraction(digits or factor or 1) * Fraction(10) ** int(number['exponent'] or 0)
    return -value if number['minus'] else value


def number_in(text):
    """The last number of a text as a Fraction; None if there is none, or if its last digits are of something else."""
    *_, last = (token for token in [None, *TOKEN.finditer(in_plain_signs(text))] if not token or not token['index'])
    return value_of(last) if last and not last['other'] else None


def number_alone(answer):
    """The number that an answer is, apart from signs such as $, % and \\boxed{}, or what stands behind its ####; None
    if it is none, or more than one."""
    number = ALONE.fullmatch(in_plain_signs(answer))
    return value_of(number) if number else None


# --- rules ------------------------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    name: str
    answers: tuple  # texts, each of which is right
    golds: tuple  # what of each answer is compared
    pattern: re.Pattern | None
    place: str  # file and row, for messages

    def __repr__(self):  # what a row says, wherever it stands: fingerprints are made of it
        return f'Rule(name={self.name!r}, answers={self.answers!r}, pattern={self.pattern!r})'

    @classmethod
    def of(cls, row, place):
        """The Rule of a row. place: file and row, for messages. Raises ValueError for an answer that it cannot read."""
        name, answers, pattern = row.get('rule', 'exact'), row['answer'], row.get('pattern')
        answers = tuple(answers) if isinstance(answers, list) else (answers,)
        if not answers or not all(isinstance(answer, str) and answer.strip() for answer in answers):
            given = json.dumps(row['answer'], ensure_ascii=False)[:60]  # a number is shown without quotation marks
            raise ValueError(f'{place}: answer is {given}; expected a text, or a list of texts')
        if name not in RULES:
            raise ValueError(f'{place}: rule={name!r}; expected one of {", ".join(RULES)}')
        if (pattern is None) == (name == 'regex'):
            raise ValueError(
                f'{place}: rule={name!r}, pattern={pattern!r}: the rule regex needs a pattern, others have none'
            )
        if name == 'math':
            import_math_verify(place)
        try:
            pattern = None if pattern is None else re.compile(pattern)
            with limit_of(name):
                golds = tuple(gold_of(name, pattern, answer, place) for answer in answers)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f'{place}: pattern={pattern!r:.60} is no regular expression: {error}') from error
        except OverLimit:
            raise ValueError(f'{place}: {too_slow(name, pattern)}: that of its own answer') from None
        return cls(name, answers, golds, pattern, place)

    def judge(self, text):
        """{name of a score: whether the text is right}."""
        if self.name == 'gsm8k':
            return {
                score: without_ignored(nth_match(pattern, which, text)) in self.golds
                for score, (pattern, which) in GSM8K.items()
            }
        try:
            with limit_of(self.name):
                return {'acc': self.is_right(text)}
        except OverLimit:
            if (self.name, self.pattern) not in given_up:  # once is enough
                line = f'WARNING: {self.place}: {too_slow(self.name, self.pattern)}. Such texts count as wrong'
                print(line, file=sys.stderr, flush=True)
            given_up.add((self.name, self.pattern))
            return {'acc': False}

    def is_right(self, text):
        if self.name == 'contains':
            return any(answer in text for answer in self.golds)
        if self.name == 'number':
            return number_in(text) in self.golds
        if self.name == 'regex':
            return first_group(self.pattern, text) in self.golds
        if self.name == 'math':
            formula = formula_in(text)
            return any(is_equal(gold, formula) for gold in self.golds)
        return text.strip() in self.golds


def gold_of(name, pattern, answer, place):
    """What a rule compares of an answer. Raises ValueError for one that it cannot read."""
    if name == 'number':
        if (number := number_alone(answer)) is None:
            raise ValueError(
                f'{place}: the answer {answer[-60:]!r} is no number, or more than one; rule=number compares a number '
                'alone, such as -1,000.5, 3/4, 1e3, $7 or 50%: leave words and units out, or name another "rule"'
            )
        return number
    if name == 'gsm8k':
        if GSM8K['strict_match'][0].search(answer) is None:
            raise ValueError(f'{place}: the answer {answer[-60:]!r} does not end in "#### 18", as rule=gsm8k reads it')
        return without_ignored(answer)
    if name == 'math':
        if (formula := formula_alone(answer)) is None:
            raise ValueError(
                f'{place}: the answer {answer[-60:]!r} is no formula alone, which rule=math compares: expected one '
                r'such as \frac{3}{4}, x^2+1, (2,3) or \text{even}, without words around it, or another rule'
            )
        return formula
    if name == 'regex':
        return first_group(pattern, answer) or answer.strip()
    return answer if name == 'contains' else answer.strip()


given_up = set()  # rules and patterns of which a line has said that they are too slow


def limit_of(rule):
    return at_most(LIMITS_S[rule]) if rule in LIMITS_S else contextlib.nullcontext()


def too_slow(rule, pattern):
    if rule == 'math':
        return f'the comparison of a formula was given up after {LIMITS_S[rule]} s'
    return (
        f'the search for pattern={pattern.pattern[:60]!r} was given up after {LIMITS_S[rule]} s, as it tries too many '
        'ways to match: write it without a repetition inside a repetition'
    )


# --- patterns ---------------------------------------------------------------------------------------------------------


def first_group(pattern, text):
    """The first match of a pattern in a text, or if it has groups the first that took part; None if nothing matches."""
    match = pattern.search(text)
    groups = [group for group in match.groups() if group is not None] if match and pattern.groups else []
    return match and (groups[0] if groups else match[0]).strip()


def nth_match(pattern, which, text):
    """The harness's filter `regex`: the chosen match, or its first non-empty group if the pattern has groups."""
    found = pattern.findall(text)
    if not found:
        return '[invalid]'
    groups = found[which] if isinstance(found[which], tuple) else (found[which],)
    return next((group for group in groups if group), '[invalid]').strip()


def without_ignored(text):
    for pattern in IGNORED:
        text = pattern.sub('', text)
    return text.lower()


# --- formulas ---------------------------------------------------------------------------------------------------------

TEXT_OR_COMMAND = re.compile(r'\\(?:text\w*|mbox|mathrm)\{[^{}]*\}|\\[A-Za-z]+')
# Of answers that are no formula math-verify would read a part, as of "1 1/2" the 1, or "even" as e * v * e * n.
NO_FORMULA = re.compile(r'[A-Za-z]{4,}|\d\s+\d')


def import_math_verify(place):
    """Only where a row asks for it: few need the package, and it takes a second."""
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise ValueError(f'{place}: rule=math needs the package math-verify: pip install math-verify') from error
    # It warns that its own time limit is off, in whose place at_most() stands, and of each text that it cannot read.
    logging.getLogger('math_verify').setLevel(logging.CRITICAL)


def formula_in(text):
    """[what sympy makes of the last formula or number in a text, its text]; less of these if it cannot be read."""
    from math_verify import parse

    return parse(text, parsing_timeout=None)


def formula_alone(answer):
    """formula_in() an answer that is a formula; None if it is none."""
    if NO_FORMULA.search(TEXT_OR_COMMAND.sub('', answer)):
        return None
    formula = formula_in(answer if '$' in answer or '\\boxed' in answer else f'${answer}$')
    return formula if len(formula) == 2 else None


def is_equal(gold, formula):
    from math_verify import verify

    return verify(gold, formula, timeout_seconds=None)
