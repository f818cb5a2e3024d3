"""
What a key is: its line in the class Config of a script as a Knob, and the values that it takes.

read_knobs() reads that class without running the script. keys.py explains the words in brackets.
"""

import ast
import contextlib
import functools
import json
import numbers
import operator
import os
import re
import sys
import tokenize
from dataclasses import dataclass

from keys import GONE

WORDS = {'True': True, 'true': True, 'False': False, 'false': False, 'None': None}
COMPARISONS = {'>=': operator.ge, '>': operator.gt, '<=': operator.le, '<': operator.lt}


@dataclass(frozen=True)
class Knob:
    """One key, as its line in the script describes it."""

    section: str  # the comment on its own line above the group of keys
    comment: str
    types: tuple[str, ...]  # names of the accepted types, which may include 'None'; () = any
    choices: tuple  # the only values of a Literal; () = any
    default: object
    tags: tuple[str, ...]  # the words in brackets, see keys.py: 'result', 'per job', 'path'
    bounds: tuple[str, ...]  # of a number, or of each number in a list: ('>= 0', '< 1')
    conditions: tuple[str, ...]  # under which a run reads the key, its section's first: ('if lora_rank',)

    @property
    def meaning(self):
        return self.types, self.choices, self.tags, self.bounds, self.conditions


class Mistake(Exception):
    """Something the user gave is wrong; the message is the one line to print."""


# --- FROM A SCRIPT ----------------------------------------------------------------------------------------------------


def read_knobs(script):
    """
    {key: Knob} of a script's class Config, in the order of --help; {} for a script without that class.

    The bases of Config are read from keys.py beside the script. Sections of the same name are joined, and a key that
    Config defines again, with another default or comment, stays in its place. Another type, range or tag would give
    the name a second meaning, and raises TypeError.
    """
    config = class_named('Config', script)
    if config is None:
        return {}
    knobs = knobs_of_class('Config', script.read_text(encoding='utf-8'))
    for base in reversed(config.bases):
        shared = knobs_of_class(base.id, script.with_name('keys.py').read_text(encoding='utf-8'))
        for key in shared.keys() & knobs.keys():
            if shared[key].meaning != knobs[key].meaning:
                raise TypeError(
                    f'{script.name} gives {key} of {base.id} another type, range or tag, {knobs[key].meaning} in place '
                    f'of {shared[key].meaning} in keys.py: use another name'
                )
        knobs = shared | knobs
    sections = list(dict.fromkeys(knob.section for knob in knobs.values()))
    return dict(sorted(knobs.items(), key=lambda item: sections.index(item[1].section)))


def class_named(name, path):
    """The node of a class in the syntax tree of a file, or None."""
    return classes_in(path.read_text(encoding='utf-8')).get(name)


@functools.cache
def classes_in(source):
    """{name: node} of the classes in a source text."""
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


@functools.cache
def knobs_of_class(name, source):
    """{key: Knob} of the assignments in one class of a source text. Do not change it: the next caller gets the same."""
    node = classes_in(source)[name]
    comments = {}  # {line: text}; alone: the lines that hold nothing but a comment
    alone = set()
    lines = source.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno]
    for token in tokenize.generate_tokens(iter(lines).__next__):
        if token.type == tokenize.COMMENT:
            line = node.lineno - 1 + token.start[0]
            comments[line] = token.string.lstrip('# ')
            if token.line.lstrip().startswith('#'):
                alone.add(line)

    knobs = {}
    section, of_section, last_line = '', ((), (), ()), node.lineno
    for statement in node.body:
        heading = next((comments[line] for line in range(last_line, statement.lineno) if line in alone), None)
        if heading is not None:
            section, *of_section = without_tags(heading)
        last_line = statement.end_lineno
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
            continue
        target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
        default = literal(statement.value)
        types, choices = accepted(getattr(statement, 'annotation', None), default)
        lines = range(statement.lineno, last_line + 1)  # a formatter may have put it behind any of them
        comment = ' '.join(comments[line] for line in lines if line in comments)
        comment, tags, bounds, conditions = without_tags(comment)
        tags, conditions = tags if {*tags} - {'may change'} else of_section[0] + tags, of_section[2] + conditions
        knobs[target.id] = Knob(section, comment, types, choices, default, tags, bounds, conditions)
    return knobs


def without_tags(comment):
    """('how many', ('result',), ('>= 0', '< 1'), ('if plan',)) of 'how many [result, >= 0, < 1, if plan]'."""
    word = r'(?:if (?:not )?\w+(?:(?:=| != | > )[\w.]+)?|[a-z ]+|[<>]=? [\d.]+)'
    text, words = re.fullmatch(rf'(.*?) *(?:\[({word}(?:, {word})*)\])?', comment).groups()
    kinds = {'tag': [], 'bound': [], 'condition': []}
    for word in words.split(', ') if words else []:
        kinds['bound' if word[0] in '<>' else 'condition' if word.startswith('if ') else 'tag'].append(word)
    return text, *map(tuple, kinds.values())


def accepted(annotation, default):
    """(names of types, choices) of an annotation like `int | None` or `Literal['a', 'b']`, or else of the default."""
    if annotation is None:
        return () if default is None else (type(default).__name__,), ()
    if isinstance(annotation, ast.BinOp):
        sides = [accepted(side, default) for side in (annotation.left, annotation.right)]
        return sum((types for types, _ in sides), ()), sum((choices for _, choices in sides), ())
    name = ast.unparse(annotation).partition('[')[0]
    if name == 'Literal':
        choices = ast.literal_eval(annotation.slice)
        choices = choices if isinstance(choices, tuple) else (choices,)
        return (type(choices[0]).__name__,), choices
    return (name,), ()


def literal(expression):
    """The value of a constant expression, parsed or not; None for any other."""
    with contextlib.suppress(ValueError, SyntaxError):
        return ast.literal_eval(expression)


# --- VALUES -----------------------------------------------------------------------------------------------------------


def parse(text, knob, given):
    """The value of the text after `--key=`. None, a bare flag, means True; of a list, text may be the words."""
    if text is None or text == []:
        if 'bool' not in knob.types:
            raise Mistake(f'{given} needs a value: {given}=..., expected {expected(knob)}')
        text = 'True'
    if isinstance(text, list):
        words = [element for word in text for element in elements(word)]
        return at_home(words) if 'path' in knob.tags else words
    readings = [WORDS[text]] if text in WORDS else []
    if set(knob.types) - {'str', 'None'} or not knob.types:  # a string is taken as typed, quotes and all
        for read in (ast.literal_eval, json.loads, float):  # JSON has false; inf and nan are no literals of Python's
            try:
                readings.append(read(text))
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # as literal_eval documents
                pass
    if text != 'None':  # where None is not allowed, it is a mistake rather than a word
        readings.append(text)
    # The first reading that has one of the key's types. What is a number, where numbers have a range, is not a word.
    fits = (reading for reading in readings if fitting(reading, knob) or (knob.bounds and numbers_in(reading)))
    return checked(next(fits, readings[-1]), knob, given)


def checked(value, knob, given):
    """The value in one of the key's types. Raises Mistake, which says what was given and what is expected."""
    found = fitting(value, knob)
    is_wrong = not found or any(is_outside(number, knob.bounds) for number in numbers_in(found[0]))
    if is_wrong or (knob.bounds and isinstance(found[0], list) and len(numbers_in(found[0])) < len(found[0])):
        gone = f'; it is gone, {GONE[value][1]}' if isinstance(value, str) and value in GONE else ''
        raise Mistake(f'{given} expects {expected(knob)}, given {value!r}{gone}')
    return at_home(found[0]) if 'path' in knob.tags else found[0]


def fitting(value, knob):
    """[the value in each of the key's types that it has]; [] if it has none, or is not one of the key's choices."""
    possible = forms(value)
    if 'list' in knob.types and value is not None and not possible.keys() & set(knob.types):
        possible = {'list': elements(value)}
    if knob.choices and value is not None and value not in knob.choices:
        return []
    return [possible[kind] for kind in knob.types if kind in possible] if knob.types else [value]


def is_outside(number, bounds):
    """Whether a number is outside of its key's range. No key takes nan or inf."""
    if not -sys.float_info.max <= number <= sys.float_info.max:  # not for nan, either; an int may be larger than floats
        return True
    return not all(COMPARISONS[sign](number, float(bound)) for sign, bound in map(str.split, bounds))


def numbers_in(value):
    """The numbers in a value: itself, or those in a list or tuple of any depth."""
    if isinstance(value, (list, tuple)):
        return [number for element in value for number in numbers_in(element)]
    return [value] if isinstance(value, numbers.Real) and not isinstance(value, bool) else []


def at_home(value):
    """A path or a list of paths, with the home folder in place of a leading ~, which shells leave in --key=~/x."""
    if isinstance(value, list):
        return [at_home(str(path)) for path in value]  # a file may be called 2
    return os.path.expanduser(value) if isinstance(value, str) else value


def elements(value):
    """A value as a list, split at commas: 2 becomes [2], 'ddp,fsdp' ['ddp', 'fsdp'] and '1,None' [1, None]."""
    if not isinstance(value, str):
        return [value]
    words = [word.strip() for word in value.split(',') if word.strip()]
    return [WORDS[word] if word in WORDS else word if literal(word) is None else literal(word) for word in words]


def expected(knob):
    """What the key accepts, in the words of an error message."""
    types = [kind for kind in types_of(knob) if kind == 'None' or not knob.choices]
    return ' or '.join([repr(choice) for choice in knob.choices] + types) or 'a value'


def types_of(knob):
    """The names of the key's types, numbers with their range: ['int >= 1', 'None']."""
    names = {'int': 'int', 'float': 'float', 'list': 'list of numbers', 'tuple': 'tuple with numbers'}
    bounds = ' and '.join(knob.bounds)
    return [f'{names[kind]} {bounds}' if bounds and kind in names else kind for kind in knob.types]


def forms(value):
    """{type name: the value in that type}, without loss: 1 is also a float, 1e3 also an int, but neither is a bool."""
    if value is None or isinstance(value, bool):  # before the numbers: Python counts True as 1
        return {'None' if value is None else 'bool': value}
    if isinstance(value, numbers.Integral):  # NumPy's, too
        return {'int': int(value), 'float': float(value)}
    if isinstance(value, numbers.Real):
        return {'float': float(value)} | ({'int': int(value)} if float(value).is_integer() else {})
    if isinstance(value, (list, tuple)):
        return {'list': list(value), 'tuple': tuple(value)}
    return {type(value).__name__: value}


def shown(value):
    """A value as on the command line."""
    return ','.join(map(str, value)) if isinstance(value, list) else value
