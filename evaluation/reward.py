"""
A reward of one's own: a Python function of the user's that says what an answer of the model is worth.

    reward = open_reward('my_reward.py:digits')  # --reward of train_grpo.py and evaluate.py
    number = reward(text, item)                  # its digits(text, row) for a tasks.Item

The file is code, and is run. `text` is what the model wrote, `row` the whole row of the task file, as a dict. A
function of TRL's form, digits(completions, prompts, **columns), gets lists of one.
"""

import functools
import hashlib
import inspect
import json
import math
import os
import sys
import traceback
import types
from pathlib import Path
from typing import NamedTuple

from system.errors import one_line
from system.limits import OverLimit, at_most

LIMIT_S = 10  # for a call, by the clock on the wall: the function may wait for another process
LARGEST = 1e18  # whose square fp32 can hold
SCORE = 'reward'  # beside those of the rules
warned = set()  # functions of which a line has said that they are too slow


class RewardError(ValueError):
    """The function has raised an error, or returned what is no reward."""


class Reward(NamedTuple):
    name: str  # FILE.py:FUNCTION
    function: object
    sha256: str  # of the file

    @property
    def identity(self):
        """What has to be the same when a run goes on. The file may lie elsewhere."""
        return f'{self.name.partition(":")[2]}, sha256 {self.sha256}'

    def __call__(self, text, item):
        """The reward of a text that the model has written to an item, as a float; 0 after LIMIT_S, and a line says so.
        Raises RewardError if the function does, and for what is no finite number."""
        where = f'reward={self.name}: for the answer {text[-40:]!r} to {item.place} it'
        try:
            with at_most(LIMIT_S, wall=True):
                value = self.function(text, json.loads(item.row))  # a row of its own, which it may change
        except OverLimit:
            if self.name not in warned:  # once is enough
                line = f'WARNING: {where} took more than {LIMIT_S} s. Such answers have the reward 0'
                print(line, file=sys.stderr, flush=True)
            warned.add(self.name)
            return 0.0
        except (Exception, SystemExit) as error:
            raise RewardError(f'{where} raised {in_words(error, self.name)}') from error
        if (number := number_of(value)) is None:
            raise RewardError(f'{where} returned {one_line(repr(value), 60)}; expected a finite number')
        return number


def number_of(value):
    """What a function has returned as a float; None if it is no number or none that fp32 can reckon with. Tensors and
    NumPy's numbers are numbers, too, a text is none."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return number if abs(number) <= LARGEST else None


def is_function(given):
    """Whether the key reward names a function and not a score of a rule."""
    return given is not None and (':' in given or given.endswith('.py'))


@functools.cache  # prompts and eval_tasks have the same one
def open_reward(given):
    """The Reward that FILE.py:FUNCTION names. Runs the file. Raises ValueError if there is no such function."""
    path, _, name = given.partition(':')
    if not os.path.isfile(path):
        raise ValueError(f'reward={given}: there is no file {path}; expected FILE.py:FUNCTION, as docs/grpo.md shows')
    source = Path(path).read_bytes()
    module = types.ModuleType('own_reward')
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses and pickle look there
    try:
        exec(compile(source, path, 'exec'), vars(module))
    except (Exception, SystemExit) as error:
        raise ValueError(f'reward={given}: the file raised {in_words(error, given)}') from error
    function = vars(module).get(name)
    if not callable(function):
        named = [key for key, value in vars(module).items() if isinstance(value, types.FunctionType)]
        has = f'expected FILE.py:FUNCTION, and it has {", ".join(named) or "none"}'
        raise ValueError(f'reward={given}: {path} has no function {name!r}; {has}')
    return Reward(given, in_our_form(given, name, function), hashlib.sha256(source).hexdigest())


def in_our_form(given, name, function):
    """The function as one of a text and its row. One of TRL's form takes lists, and gets lists of one. Raises
    ValueError for a function that takes other things."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # one written in C may not say
        return function
    takes = signature.parameters
    if 'completion_ids' in takes:
        raise ValueError(f'reward={given}: {name} takes completion_ids, and rewards get texts: let it read completions')
    if 'completions' in takes:
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())

        def of_one(text, row):
            prompt = row.pop('prompt', None)
            completion = [{'role': 'assistant', 'content': text}] if isinstance(prompt, list) else text
            lists = {key: [value] for key, value in row.items()} | {'prompts': [prompt], 'completions': [completion]}
            return function(**{key: value for key, value in lists.items() if takes_all or key in takes})[0]

        return of_one
    try:
        signature.bind('', {})
    except TypeError:
        raise ValueError(
            f'reward={given}: {name}{signature} is called as {name}(text, row), with one answer and its row'
        ) from None
    return function


def in_words(error, given):
    """The error of a user's code, with the last of the file's lines that led to it."""
    path = given.partition(':')[0]
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    place = f' (line {lines[-1]} of {path})' if lines else ''
    return f'{type(error).__name__}: {one_line(error)}{place}'
