"""
Did the model write the answer? The rules that decide whether generated text is right, for rows with a "prompt".

    rule = Rule.of(row, place)  # for a row such as {"prompt": ..., "answer": "18", "rule": "number"}
    {name of a score: 0 or 1} = rule.judge(text)

A text is right by the rule

    exact       if it is the answer, apart from white space around it;
    contains    if it contains the answer;
    number      if its last number equals the last number of the answer, where 1,000 and $1000.00 are equal;
    regex       if the first match of "pattern" (or its first group, if it has one) is the same in text and answer; if
                the pattern does not match the answer, the text's match has to be the answer itself;
    gsm8k       by two rules of lm-evaluation-harness, each with its own score: strict_match takes the number behind
                ####, flexible_extract the last number.
"""

import json
import re
from decimal import Decimal
from typing import NamedTuple

RULES = ('exact', 'contains', 'number', 'regex', 'gsm8k')
NUMBER = re.compile(r'-?\d[\d,]*(?:\.\d+)?|-?\.\d+')
# From lm_eval/tasks/gsm8k/gsm8k.yaml: {score: (pattern, which of its matches counts)}, and what to ignore in a match.
GSM8K = {
    'strict_match': (re.compile(r'#### (\-?[0-9\.\,]+)'), 0),
    'flexible_extract': (re.compile(r'(-?[$0-9.,]{2,})|(-?[0-9]+)'), -1),
}
IGNORED = [re.compile(pattern) for pattern in (',', r'\$', '(?s).*#### ', r'\.$')]


class Rule(NamedTuple):
    name: str
    answers: tuple  # texts, each of which is right
    pattern: re.Pattern | None

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
        try:
            rule = cls(name, answers, None if pattern is None else re.compile(pattern))
        except re.error as error:
            raise ValueError(f'{place}: pattern={pattern!r} is no regular expression: {error}') from error
        for answer in answers:
            if name == 'number' and number_in(answer) is None:
                raise ValueError(f'{place}: the answer {answer[:60]!r} has no number, which rule=number compares')
            if name == 'gsm8k' and GSM8K['strict_match'][0].search(answer) is None:
                raise ValueError(
                    f'{place}: the answer {answer[-60:]!r} does not end in "#### 18", as rule=gsm8k reads it'
                )
        return rule

    def judge(self, text):
        """{name of a score: whether the text is right}."""
        if self.name == 'gsm8k':
            golds = [without_ignored(answer) for answer in self.answers]
            return {
                score: without_ignored(nth_match(pattern, which, text)) in golds
                for score, (pattern, which) in GSM8K.items()
            }
        if self.name == 'contains':
            return {'acc': any(answer in text for answer in self.answers)}
        if self.name == 'number':
            return {'acc': number_in(text) in [number_in(answer) for answer in self.answers]}
        if self.name == 'regex':
            found = first_group(self.pattern, text)
            golds = [first_group(self.pattern, answer) or answer.strip() for answer in self.answers]
            return {'acc': found in golds}
        return {'acc': text.strip() in [answer.strip() for answer in self.answers]}


def number_in(text):
    """The last number of a text as a Decimal; None if it has none."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(',', '')) if found else None


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
