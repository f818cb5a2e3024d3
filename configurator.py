"""
Configuration of a script: the attributes of the class Config at its top, then config files, then --key=value.

    class Config:
        # data
        batch_size = 8  # what --help says of this key
        block_size: int | None = None  # an annotation, if the default does not show the type
        dtype: Literal['float32', 'bfloat16'] = 'float32'  # a Literal, if there are only these values

    config, explicit = configure(Config)  # from here on config.batch_size is the final value

Keys that several scripts share are in classes of keys.py, from which Config inherits: class Config(Keys). Words in
brackets at the end of a comment are tags and the range of a number. keys.py explains them; --help leaves the tags out.

    python train_ddp.py config/quickstart.py --batch_size=4

A config file is Python that assigns keys: `batch_size = 4`. Imports, functions and names that begin with `_` do not
count as keys. Files run in order, and each sees the values so far. The idea is that of nanoGPT's configurator.py, with
checks added: a key that does not exist, a value of the wrong type and a number out of range end the program with one
line. This file imports the standard library only, so that `--help` and `--version` answer at once.
"""

import contextlib
import difflib
import functools
import json
import os
import re
import signal
import sys
import time
import traceback
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType

from keys import GONE, MOVED
from knobs import Mistake, checked, numbers_in, parse, read_knobs, types_of

VERSION = '0.10.0'  # CHANGELOG.md says what each version has brought


def configure(Config, pass_on=None):
    """
    Read the configuration of the script that defines the class Config, from sys.argv.

    pass_on: for a script that starts train scripts, a dict that receives the keys of those, checked. If a config file
    has no key of this script alone, it was written for a train script, so keys that both have (out_dir) are passed on.
    Returns (config, explicit): a Config with every key's final value, in the script's order in vars(config), and {key:
    the file that set it, or 'command line'}, even if it was set to its default. Of the keys that are passed on,
    explicit has only those of the command line.
    `--help` prints every key and `--version` the version, and both exit with 0. A mistake prints one line on stderr and
    exits with 2.
    """
    complete_console()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for Ctrl-C during imports
    module = sys.modules[Config.__module__]
    script = Path(module.__file__).resolve()  # it may be called through a symbolic link
    knobs = read_knobs(script)
    known = knobs if pass_on is None else {key: knob for key, (_, knob) in others(script).items()} | knobs
    values = {key: getattr(Config, key) for key in knobs}
    if '--help' in sys.argv[1:] or '-h' in sys.argv[1:]:
        try:
            print(help_text(knobs, values, module.__doc__), flush=True)
        except BrokenPipeError:  # `| head` has seen enough
            os._exit(0)  # sys.exit() would try to write the rest, and complain
        except OSError as error:
            print(f'error: stdout: {error}', file=sys.stderr, flush=True)
            os._exit(1)
        sys.exit(0)
    if '--version' in sys.argv[1:]:
        print(f'{script.name} {VERSION}')
        sys.exit(0)
    name_missing_packages(script)
    explicit, skipped = {}, {}
    try:
        check_torch(script.parent / 'requirements.txt')
        files, options = split_arguments(sys.argv[1:], knobs, known, script)
        plan_ranks(options, knobs)
        for path in files:
            assigned = run_config_file(path, values)
            is_ours = pass_on is None or any(key in knobs and not owner_of(key, script) for key in assigned)
            for key, value in assigned.items():
                owner = None if key in knobs and is_ours else owner_of(key, script)
                if owner and pass_on is not None:
                    pass_on[key] = checked(value, others(script)[key][1], f'{path}: {key}')
                elif owner:
                    if value != others(script)[key][1].default:
                        refuse_moved(key, script, f'{path}: ')
                    skipped[key] = owner  # one file serves several scripts
                elif key not in knobs and (callable(value) or isinstance(value, ModuleType)):
                    pass  # an import or a function of the file's own
                else:
                    knob = find(key, known, script, f'{path}: {key}', "; names of a file's helpers begin with _")
                    values[key] = checked(value, knob, f'{path}: {key}')
                    explicit[key] = path
        for key, text in options:
            if pass_on is None:
                refuse_moved(key, script)
            value = parse(text, find(key, known, script, f'--{key}'), f'--{key}')
            (values if key in knobs else pass_on)[key] = value
            explicit[key] = 'command line'
    except Mistake as mistake:
        wait_for_first_rank()
        rank = f'[{os.environ["RANK"]}] ' if 'RANK' in os.environ else ''
        print(f'{rank}error: {mistake}', file=sys.stderr)
        leave_for_torchrun(f'error: {mistake}')
        sys.exit(2)
    if skipped and os.environ.get('RANK', '0') == '0':
        keys = ', '.join(f'{key} (of {owner})' for key, owner in skipped.items())
        print(f'config: skipped keys that {script.name} does not have: {keys}', file=sys.stderr)
    config = Config()
    for key, value in values.items():
        setattr(config, key, value)
    return config, explicit


def plan_ranks(options, knobs):
    """With --dry_run, let this process be the first of --gpus ranks, on full nodes of at most 8, as plan() in
    slurm/common.sh does: before config files are read, which may ask for WORLD_SIZE."""
    given = {key: parse(text, knobs[key], f'--{key}') for key, text in options if key in {'dry_run', 'gpus'} & {*knobs}}
    ranks = given.get('gpus')
    if given.get('dry_run') and ranks and 'WORLD_SIZE' not in os.environ:
        node = max(size for size in range(1, 9) if ranks % size == 0)
        os.environ |= {'RANK': '0', 'LOCAL_RANK': '0', 'WORLD_SIZE': str(ranks), 'LOCAL_WORLD_SIZE': str(node)}
        os.environ |= {'MASTER_ADDR': 'none', 'MASTER_PORT': '0'}


def complete_console():
    """Let a standard stream that is closed, as by `>&-`, lead to /dev/null. Otherwise the next file to be opened, be it
    a checkpoint, gets its number, and with it what libraries print there."""
    for number, name in enumerate(('stdin', 'stdout', 'stderr')):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # opened under the lowest number that is free
            stream = open(number, 'w' if number else 'r', closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f'__{name}__', stream)


def name_missing_packages(script):
    """Until errors.py reports errors, let a script without torch, or without another package of requirements.txt, end
    with the command that brings it."""
    here = script.parent

    def hook(kind, error, trace):
        name = error.name if kind is ModuleNotFoundError else None
        with contextlib.suppress(OSError):
            if name and name.lower() in (here / 'requirements.txt').read_text(encoding='utf-8').lower():
                venv = here / '.venv'
                is_other = (venv / 'bin/activate').exists() and os.path.realpath(sys.prefix) != os.path.realpath(venv)
                mend = f'source {venv}/bin/activate' if is_other else f'bash {here}/setup_env.sh'
                print(f'error: {sys.executable} has no package {name}: `{mend}`', file=sys.stderr)
                return
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook


def check_torch(requirements):
    """Raise Mistake if requirements.txt does not allow the installed torch. Without that file any version is fine."""
    with contextlib.suppress(OSError, metadata.PackageNotFoundError):
        installed, text = metadata.version('torch'), requirements.read_text(encoding='utf-8')
        for wanted, *versions in re.findall(r'^(torch>=([\d.]+),<([\d.]+))$', text, re.M):
            least, above, found = ([int(n) for n in version.split('.')[:2]] for version in (*versions, installed))
            if not least <= found < above:
                raise Mistake(f"torch {installed} is installed, not {wanted}: `pip install '{wanted}'`")


def wait_for_first_rank():
    """All ranks of a node read the same command line, so the first one says what is wrong with it, and torchrun ends
    the others, which wait here for that. If it does not, because their files differ, they speak for themselves."""
    if 'TORCHELASTIC_ERROR_FILE' in os.environ and os.environ.get('LOCAL_RANK') != '0':
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # in torchrun's summary this is no failure of its own
        time.sleep(10)


def leave_for_torchrun(text):
    """Put what ended this rank into the summary that torchrun prints last."""
    if path := os.environ.get('TORCHELASTIC_ERROR_FILE'):
        message = {'message': text, 'extraInfo': {'timestamp': int(time.time())}}  # as torch's own record() has it
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({'message': message}))


# --- NAMES OF KEYS ----------------------------------------------------------------------------------------------------


@functools.cache
def others(script):
    """{key: (name, Knob)} of the other train scripts in this folder; name: of the first one that has the key."""
    found = {}
    for other in sorted(script.parent.glob('train_*.py')):
        if other.name != script.name:
            found = {key: (other.name, knob) for key, knob in read_knobs(other).items()} | found
    return found


@functools.cache
def tagged(tag):
    """The keys of train scripts that have this tag, such as 'model'."""
    return {key for key, (_, knob) in others(Path(__file__)).items() if tag in knob.tags}


def owner_of(key, script):
    """The name of another train script in this folder that has the key, or None."""
    return MOVED.get(script.name, {}).get(key) or others(script).get(key, (None,))[0]


def refuse_moved(key, script, given=''):
    """Raise Mistake for a key that this script had in earlier versions: without it the run would be another one."""
    if now := MOVED.get(script.name, {}).get(key):
        raise Mistake(
            f'{given}{key} is a key of {now}: type that in place of {script.name}, and the run goes on from its '
            'checkpoint'
        )


def find(key, knobs, script, given, advice=''):
    """The key's Knob. If there is none, raises Mistake with the script that has the key, or the closest name."""
    if key in knobs:
        return knobs[key]
    key = key.replace('-', '_')
    owner = None if key in knobs else owner_of(key, script)  # in knobs except for a hyphen: then it is the closest name
    if key in GONE:
        hint = f'it is gone, {GONE[key][1]}'
    elif theirs := translated(key, knobs, script):
        hint, advice = theirs, ''
    elif owner:
        hint = f'{owner} has it'
    else:
        meant = closest(key, knobs)
        hint = f'did you mean {meant}?' if meant else '--help lists them'
    raise Mistake(f'{given} is not a key of {script.name}: {hint}{advice}')


def translated(key, knobs, script):
    """What a flag of another trainer is here, in the words of an error; None for a key of knobs, or if nobody knows.
    Of a.b.c are tried a.b.c, b.c and c, and then the sections a.b and a. An answer names the owner of each key that
    this script lacks."""
    from other_names import OTHER_NAMES  # here, since few command lines need them

    if 'to' in knobs and key in ('output_dir', 'local_dir'):  # of hf and torchtune; here out_dir is the folder of a run
        return f'here it is to: {knobs["to"].comment}'
    parts = key.split('.')
    ends, sections = range(len(parts)), range(len(parts) - 1, 0, -1)
    tries = ['.'.join(parts[end:]) for end in ends] + ['.'.join(parts[:section]) for section in sections]
    found = next((name for name in tries if name in OTHER_NAMES or (name in knobs and key.endswith(name))), None)
    if found is None or key in knobs:
        return None

    def with_owner(match):
        code, key, owner, is_more = match.groups()
        if key in knobs and (not owner or owner.startswith('train_')):  # `dataset` of prepare_data.py is another key
            return code
        owner = owner or (None if is_more else owner_of(key, script))
        return f'{code} of {owner}' if owner else code

    answer = f'`{found}`' if found in knobs else OTHER_NAMES[found]
    if 'init_from' not in knobs and 'out_dir' in knobs and answer.startswith('`init_from`'):
        return f'here it is out_dir: {knobs["out_dir"].comment}'
    text = re.sub(r'(`(\w+)(?:=[\w,]+)?`)(?: of (\w+\.py))?(?=(, `)?)', with_owner, answer)
    return ('here it is ' if answer[0] == '`' else '') + text.replace('`', '')


def closest(key, knobs):
    """The key that somebody mistyped; None if it may be a word for something else, such as `loss`, which is not z_loss,
    or eval_batch_size. What was meant has words like these, and perhaps others between them, or differs in little but
    underscores."""

    def likeness(one, other):
        return difflib.SequenceMatcher(None, one, other).ratio()

    for found in difflib.get_close_matches(key, knobs, n=1, cutoff=0.8):
        words, theirs = key.split('_'), found.split('_')
        if len(words) == len(theirs) and min(map(likeness, words, theirs)) >= 0.5:
            return found
        if len(words) > 1 and {*words} < {*theirs}:
            return found
        if likeness(''.join(words), ''.join(theirs)) > 0.9:
            return found
    return None


def help_text(knobs, values, docstring):
    """The script's docstring, then one line per key: default, type and comment, under the section's name."""
    rows = {key: (f'--{key}={values[key]}', ' | '.join(types_of(knob)) or 'any') for key, knob in knobs.items()}
    # A list of many words does not push the comments of all other keys off the screen.
    key_width = max((len(default) for default, _ in rows.values() if len(default) <= 40), default=0)
    type_width = max((len(types) for _, types in rows.values()), default=0)
    lines = [(docstring or '').strip(), '', 'Config files (*.py), then --key=value; the last one wins. The defaults:']
    section = None
    for key, (default, types) in rows.items():
        if knobs[key].section != section:
            section = knobs[key].section
            lines += ['', section]
        choices = ' | '.join(map(repr, knobs[key].choices))
        comment = ': '.join(filter(None, (choices, knobs[key].comment)))
        lines.append(f'  {default:{key_width}}  {types:{type_width}}  {comment}'.rstrip())
    return '\n'.join(lines)


# --- FILES AND COMMAND LINE -------------------------------------------------------------------------------------------


def split_arguments(arguments, knobs, known, script):
    """
    (config files, [(key, text), ...]) of a command line. The text of a bare flag is None.

    A bare flag whose key is a list takes the words that follow it, as in `--plot out/a out/b`: its text is their list.
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
            flag, has_value, _ = previous.partition('=')
            name = flag if flag.startswith('--') and not has_value else key  # --lr 1e-4, or optimizer.lr=1e-4
            if translated(name.lstrip('-').replace('-', '_'), known, script):
                find(name.lstrip('-'), known, script, name)  # says so
            if equals and key in knobs:  # also behind a bare flag, as in --dry_run batch_size=8
                meant = f'--{key}={text}'
            elif flag.startswith('--') and not has_value:
                meant = f'{previous}={argument}'
            elif flag[2:] in knobs and 'list' in knobs[flag[2:]].types:  # --tasks=a.jsonl b.jsonl
                meant = f'{previous.rstrip(",")},{argument}'
            else:
                meant = '' if equals else meant_by_word(argument, knobs, script)
            hint = f'; did you mean {meant}?' if meant else ''
            if not equals and not meant:  # a recipe's name, or a .yaml file
                hint = (
                    '; docs/configuration.md has what a config file is, docs/reference/names.md the recipes of others'
                )
            raise Mistake(f'{argument!r} is neither a config file (*.py) nor --key=value{hint}')
        previous = argument
    return files, options


def meant_by_word(word, knobs, script):
    """What somebody meant who gave a word without a key: a config file, as in `train_ddp.py config/sft_chat`, or the
    first key that takes a path, as in `download_model.py OWNER/NAME`. '' if nobody knows."""
    for path in (f'{word}.py', f'config/{Path(word).stem}.py'):
        if os.path.isfile(path):
            return path
    if script.name == 'compare.py' and os.path.isdir(word):
        return f'--plot {word}'
    place = next((key for key, knob in knobs.items() if 'path' in knob.tags), None)
    takes_configs = script.name.startswith('train_') or script.name == 'compare.py'
    return f'--{place}={word}' if place and not takes_configs and ('/' in word or os.path.exists(word)) else ''


class Namespace(dict):
    """The globals of a config file. It records which names were assigned, even if they kept their value."""

    def __init__(self, values):
        super().__init__(values)
        self.assigned = {}  # {name: None}, used as a set that keeps its order

    def __setitem__(self, name, value):
        self.assigned[name] = None
        super().__setitem__(name, value)


def run_config_file(path, values):
    """{name: value} of what a config file assigns, without names that begin with _. values: of all keys so far."""
    namespace = Namespace({**values, '__file__': path, '__name__': Path(path).stem})
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        there = {file.stem: file for folder in (Path(path).parent, Path('config')) for file in folder.glob('*.py')}
        close = difflib.get_close_matches(Path(path).stem, there, n=1)
        hint = f'; did you mean {there[close[0]]}?' if close else ''
        raise Mistake(f'config file {path} cannot be read: {error.strerror}{hint}') from None
    try:
        exec(compile(source, path, 'exec'), namespace)
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        line = f', line {lines[-1]}' if lines else ''
        message = ' '.join(str(error).split())  # some exceptions have several lines
        raise Mistake(f'{path}{line}: {type(error).__name__}: {message}') from None
    for name in namespace.get('__annotations__', {}):
        if name not in namespace.assigned:
            raise Mistake(f'{path}: `{name}: ...` is YAML, and sets nothing in Python: write {name} = ...')
    return {name: namespace[name] for name in namespace.assigned if name[0] != '_' and name in namespace}


def refuse_gone(keys, what, advice):
    """Raises ValueError if the keys are those of a run that used something of GONE. what: "the checkpoint was trained".
    advice: what else the user can do."""
    for word, (is_used, instead) in GONE.items():
        if is_used(keys):
            used = f'{word}={keys[word]}' if word in keys else word
            raise ValueError(
                f'{what} with {used}, which is gone, {instead}: {advice}, or use the code of commit 83d2e81'
            )


def check_saved(keys, where):
    """Raise ValueError for a value of another type, or out of its key's range, in what a checkpoint says of keys of
    train scripts. where: what the error calls it. What an earlier version had as a choice may be gone by now."""
    knobs = {key: knob for key, (_, knob) in others(Path(__file__)).items()}
    for key in keys.keys() & knobs.keys():
        try:
            if any(not -(2**63) <= number < 2**63 for number in numbers_in(keys[key])):
                raise Mistake(f'{where}: {key} is beyond all numbers of a computer')
            checked(keys[key], replace(knobs[key], choices=()), f'{where}: {key}')
        except Mistake as mistake:
            raise ValueError(f'{str(mistake)[:300]}; copy the checkpoint again') from None
