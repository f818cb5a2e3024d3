"""
Configuration of a script: its own globals, then Python config files, then `--key=value`.

    batch_size = 8  # sequences per rank        <- in the script: a key with its default, type and help
    config, explicit = configure(globals())     <- from here on the globals hold the final values

    python script.py config/a.py config/b.py --batch_size=16 --compile

The keys are the names assigned above the call; names that begin with `_`, imports and functions are none. Files run in
order and see the values so far. After nanoGPT's configurator.py, with checks: a key that does not exist or a value of
the wrong type ends the program with one line. Standard library only, so that `--help` answers at once.
"""

import ast
import contextlib
import difflib
import functools
import numbers
import os
import re
import sys
import tokenize
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

# A comment that begins with quoted words joined by `|` lists the only values there are: 'a' | 'b': what they mean
CHOICES = re.compile(r"'[^']*'(?: ?\| ?'[^']*')*(?=:|$)")
WORDS = {'True': True, 'true': True, 'False': False, 'false': False, 'None': None}


@dataclass(frozen=True)
class Knob:
    """One key, as its line in the script describes it."""

    section: str  # the comment on its own line above the group of keys
    comment: str
    types: tuple[str, ...]  # names of the accepted types, 'None' among them where it is; () = any
    choices: tuple[str, ...]  # the only strings accepted; () = any


class Mistake(Exception):
    """Something the user gave is wrong; the message is the one line to print."""


def configure(script_globals, pass_on=None):
    """
    Set the keys of the calling script from the config files and `--key=value`s in sys.argv.

    script_globals: `globals()` of the script; the names, comments and annotations are read from its `__file__`.
    pass_on: a dict that takes the keys of train scripts, checked, for a script that starts those. A config file without
    a key that only this script has was written for a train script: what both have (out_dir) is passed on, too.
    Returns (config, explicit): every key's final value in the script's order, and the set of the keys that a file or
    the command line set, be it to the default; of keys passed on, those of the command line. The values are assigned
    into script_globals, too.
    `--help` prints every key and exits with 0; a mistake prints one line on stderr and exits with 2.
    """
    script = Path(script_globals['__file__'])
    knobs = read_knobs(script, script_globals)
    known = knobs if pass_on is None else {key: knob for key, (_, knob) in others(script).items()} | knobs
    config = {key: script_globals[key] for key in knobs}
    if '--help' in sys.argv[1:] or '-h' in sys.argv[1:]:
        try:
            print(help_text(knobs, config, script_globals.get('__doc__')), flush=True)
        except BrokenPipeError:  # `--help | head`: what is still in the buffer must not be written at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    explicit, skipped = set(), {}
    try:
        files, options = split_arguments(sys.argv[1:], knobs)
        for path in files:
            assigned = run_config_file(path, config)
            is_ours = pass_on is None or any(key in knobs and not owner_of(key, script) for key in assigned)
            for key, value in assigned.items():
                owner = None if key in knobs and is_ours else owner_of(key, script)
                if owner and pass_on is not None:
                    pass_on[key] = checked(value, others(script)[key][1], f'{path}: {key}')
                elif owner:
                    skipped[key] = owner  # one file serves several scripts
                elif key not in knobs and (callable(value) or isinstance(value, ModuleType)):
                    pass  # an import or a function of the file's own
                else:
                    knob = find(key, known, script, f'{path}: {key}', "; names of a file's helpers begin with _")
                    config[key] = checked(value, knob, f'{path}: {key}')
                    explicit.add(key)
        for key, text in options:
            value = parse(text, find(key, known, script, f'--{key}'), f'--{key}')
            (config if key in knobs else pass_on)[key] = value
            explicit.add(key)
    except Mistake as mistake:
        # Every rank says it: torchrun stops the others once one has ended, so rank 0 might not come to speak.
        rank = f'[{os.environ["RANK"]}] ' if 'RANK' in os.environ else ''
        print(f'{rank}error: {mistake}', file=sys.stderr)
        sys.exit(2)
    if skipped and os.environ.get('RANK', '0') == '0':
        keys = ', '.join(f'{key} (of {owner})' for key, owner in skipped.items())
        print(f'config: skipped keys that {script.name} does not have: {keys}', file=sys.stderr)
    script_globals.update(config)
    return config, explicit


# --- THE SCRIPT -------------------------------------------------------------------------------------------------------


def read_knobs(script, values=None):
    """
    {key: Knob} of a script, in order; without a `configure(` call in it there are none.

    values: the script's globals, for the types of the keys without annotation; None = what is written there.
    """
    source = script.read_text(encoding='utf-8')
    comments = {}  # line -> (column, text)
    for token in tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = (token.start[1], token.string.lstrip('# '))

    knobs = {}
    section, last_line = '', 0
    for statement in ast.parse(source).body:
        if 'configure' in [getattr(node, 'id', None) for node in ast.walk(statement)]:
            return knobs
        for line in range(last_line + 1, statement.lineno):
            column, text = comments.get(line, (None, ''))
            if column == 0 and not text.startswith('---'):  # rulers are for the eye
                section = text
        last_line = statement.end_lineno
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
            section = ''  # what stood above an import does not head the keys below it
            continue
        target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
        if isinstance(target, ast.Name) and not target.id.startswith('_'):
            comment = comments.get(last_line, (None, ''))[1]
            choices = CHOICES.match(comment)
            default = literal(statement.value) if values is None else values.get(target.id)
            knobs[target.id] = Knob(
                section=section,
                comment=comment,
                types=accepted_types(getattr(statement, 'annotation', None), default),
                choices=tuple(re.findall(r"'([^']*)'", choices[0])) if choices else (),
            )
    return {}


def accepted_types(annotation, default):
    """Names of the types in an annotation (`int | None`: int, None), or else the default's."""
    if annotation is None:
        return () if default is None else (type(default).__name__,)
    if isinstance(annotation, ast.BinOp):
        return accepted_types(annotation.left, default) + accepted_types(annotation.right, default)
    return (ast.unparse(annotation).partition('[')[0],)


def literal(expression):
    """The value of a constant expression, parsed or not; None for any other."""
    with contextlib.suppress(ValueError, SyntaxError):
        return ast.literal_eval(expression)


@functools.cache
def others(script):
    """{key: (name of the first other train script beside this one that has it, its Knob)}."""
    found = {}
    for other in sorted(script.parent.glob('train_*.py')):
        if other.name != script.name:
            found = {key: (other.name, knob) for key, knob in read_knobs(other).items()} | found
    return found


def owner_of(key, script):
    """Name of another train script beside this one that has the key, or None."""
    return others(script).get(key, (None, None))[0]


def find(key, knobs, script, given, advice=''):
    """The key's Knob. Raises Mistake with the train script that has the key, or with the closest name."""
    if key in knobs:
        return knobs[key]
    owner = owner_of(key, script)
    close = difflib.get_close_matches(key.replace('-', '_'), knobs, n=1)
    if owner:
        hint = f'{owner} has it'
    else:
        hint = f'did you mean {close[0]}?' if close else '--help lists them'
    raise Mistake(f'{given} is not a key of {script.name}: {hint}{advice}')


def help_text(knobs, config, docstring):
    """The script's docstring, then one line per key: default, type and comment, under the section's name."""
    rows = {key: (f'--{key}={config[key]}', ' | '.join(knob.types) or 'any') for key, knob in knobs.items()}
    key_width, type_width = (max([len(row[i]) for row in rows.values()], default=0) for i in range(2))
    lines = [(docstring or '').strip(), '', 'Config files (*.py), then --key=value; the last one wins. The defaults:']
    section = None
    for key, (default, types) in rows.items():
        if knobs[key].section != section:
            section = knobs[key].section
            lines += ['', section]
        lines.append(f'  {default:{key_width}}  {types:{type_width}}  {knobs[key].comment}'.rstrip())
    return '\n'.join(lines)


# --- FILES AND COMMAND LINE -------------------------------------------------------------------------------------------


def split_arguments(arguments, knobs):
    """
    (config files, [(key, text), ...]) of a command line; the text of a bare flag is None.

    A bare flag whose key is a list takes the words that follow it: `--plot out/a out/b`. Its text is a list of them.
    """
    files, options, words = [], [], None
    previous = ''
    for argument in arguments:
        key, equals, text = argument.lstrip('-').partition('=')
        if argument.startswith('--'):
            words = [] if not equals and key in knobs and 'list' in knobs[key].types else None
            options.append((key, text if equals else words))
        elif argument.endswith('.py'):
            files.append(argument)
        elif words is not None:
            words.append(argument)
        else:
            after_flag = previous.startswith('--') and '=' not in previous
            meant = f'{previous}={argument}' if after_flag else f'--{key}={text}' if key in knobs else ''
            hint = f'; did you mean {meant} ?' if meant else ''
            raise Mistake(f'{argument!r} is neither a config file (*.py) nor --key=value{hint}')
        previous = argument
    return files, options


class Namespace(dict):
    """The globals of a config file; knows which names it assigned, also those assigned the value they had."""

    def __init__(self, values):
        super().__init__(values)
        self.assigned = {}  # name -> None: a set that keeps the order

    def __setitem__(self, name, value):
        self.assigned[name] = None
        super().__setitem__(name, value)


def run_config_file(path, config):
    """{name: value} of what a config file assigns; it starts with the values so far. Names with _ are its own."""
    namespace = Namespace({**config, '__file__': path, '__name__': Path(path).stem})
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise Mistake(f'config file {path} cannot be read: {error.strerror}') from None
    try:
        exec(compile(source, path, 'exec'), namespace)
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        line = f', line {lines[-1]}' if lines else ''
        message = ' '.join(str(error).split())  # some exceptions speak in several lines
        raise Mistake(f'{path}{line}: {type(error).__name__}: {message}') from None
    return {name: namespace[name] for name in namespace.assigned if name[0] != '_' and name in namespace}


# --- VALUES -----------------------------------------------------------------------------------------------------------


def parse(text, knob, given):
    """The value that the text after `--key=` stands for; a bare flag (None) means True, one of a list has its words."""
    if text is None or text == []:
        if 'bool' not in knob.types:
            raise Mistake(f'{given} needs a value: {given}=..., expected {expected(knob)}')
        text = 'True'
    if isinstance(text, list):
        return [element for word in text for element in elements(word)]
    readings = [WORDS[text]] if text in WORDS else []
    if set(knob.types) - {'str', 'None'} or not knob.types:  # a string is taken as typed, quotes and all
        for read in (ast.literal_eval, float):  # float: inf and nan are no literals
            try:
                readings.append(read(text))
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # as literal_eval documents
                pass
    if text != 'None':  # where None is not allowed, it is a mistake rather than a word
        readings.append(text)
    *others, last = readings
    for reading in others:
        with contextlib.suppress(Mistake):
            return checked(reading, knob, given)
    return checked(last, knob, given)


def checked(value, knob, given):
    """The value in one of the key's types. Raises Mistake with the key, what was given and what is expected."""
    possible = forms(value)
    if 'list' in knob.types and value is not None and not possible.keys() & set(knob.types):
        possible = {'list': elements(value)}
    fitting = [possible[kind] for kind in knob.types if kind in possible] if knob.types else [value]
    if not fitting or (knob.choices and value is not None and value not in knob.choices):
        raise Mistake(f'{given} expects {expected(knob)}, given {value!r}')
    return fitting[0]


def elements(value):
    """A list of what stands alone or between commas: 2 is [2], 'ddp,fsdp' is ['ddp', 'fsdp'], '1,None' is [1, None]."""
    if not isinstance(value, str):
        return [value]
    words = [word.strip() for word in value.split(',') if word.strip()]
    return [WORDS[word] if word in WORDS else word if literal(word) is None else literal(word) for word in words]


def expected(knob):
    """What the key accepts, in the words of an error message."""
    types = [kind for kind in knob.types if kind != 'str' or not knob.choices]
    return ' or '.join([repr(choice) for choice in knob.choices] + types) or 'a value'


def forms(value):
    """{type name: the value in that type}: 1 is a float and 1e3 an int without loss; neither is a bool."""
    if value is None or isinstance(value, bool):  # before the numbers: Python counts True as 1
        return {'None' if value is None else 'bool': value}
    if isinstance(value, numbers.Integral):  # NumPy's, too
        return {'int': int(value), 'float': float(value)}
    if isinstance(value, numbers.Real):
        return {'float': float(value)} | ({'int': int(value)} if float(value).is_integer() else {})
    if isinstance(value, (list, tuple)):
        return {'list': list(value), 'tuple': tuple(value)}
    return {type(value).__name__: value}
