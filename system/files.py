"""
Writing files so that they are complete or absent, even if the process is killed or the power fails; reading what
somebody else may have written; and the folders of this project's own code.
"""

import contextlib
import difflib
import errno
import hashlib
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
ROOMS = (
    'runtime', 'system', 'dataset', 'text', 'evaluation', 'planning', 'comparison', 'huggingface', 'exchange', 'pool',
    'proving',
)  # fmt: skip
LARGEST_JSON = 2**28  # bytes; the index of an 8B model's 900 tensors, in 1024 pieces each, takes 100 MB
IN_WORDS = {str: 'a text', bool: 'true or false', int: 'a whole number from 0 on', float: 'a number'}
IN_WORDS |= {list: 'a list', dict: 'an object'}
LFS_POINTER = b'version https://git-lfs.github.com/spec/'  # a clone without git-lfs has this instead of the file
FOLDERS = {
    ROOT,
    *(os.path.join(ROOT, room) for room in (*ROOMS, 'benchmarks')),
}  # of our code alone: .venv is below ROOT as well


def no_link(path, flags):
    """An opener, for open() to write. A link in place of the file is refused: in a folder that somebody else made, as a
    run's that is resumed here, it would have a file of this user's written that lies elsewhere."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)  # less the umask
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        found = f'found a link to {os.path.realpath(path)}, expected a file: delete it, or put the file itself there'
        raise OSError(errno.ELOOP, found, str(path)) from None


@contextlib.contextmanager
def replacing(path, mode='w'):
    """Open a new file that replaces `path` once all of it is on disk. After an error, `path` is as it was."""
    unfinished = f'{path}.tmp'
    with open(unfinished, mode, encoding=None if 'b' in mode else 'utf-8', opener=no_link) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    rename_durably(unfinished, path)


def write_file(path, text):
    """Write a text file completely or not at all."""
    with replacing(path) as file:
        file.write(text)


def read_json(path, form=None, mend='delete it, and start again'):
    """The content of a JSON file, which somebody else may have written. form: what it has to be, see check_form().

    Raises ValueError in one line: the file, the field, what was found, what was expected, and at its end `mend`."""
    with open(path, 'rb') as file:
        data = file.read(LARGEST_JSON + 1)
    try:
        return parse_json(data, form, path)
    except ValueError as error:
        raise ValueError(f'{error}; {mend}') from None


def parse_json(data, form, where):
    """The content of some bytes of JSON. where: what an error calls them. Raises ValueError, see read_json()."""
    try:
        if len(data) > LARGEST_JSON:
            raise ValueError(f'more than {LARGEST_JSON:,} bytes')
        content = json.loads(data.decode())
        if b'\\ud' in data.lower():  # half a character, which no text may hold
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason = 'nested too deeply' if isinstance(error, RecursionError) else ascii(str(error))[1:101]
        raise ValueError(f'{where} is damaged: not JSON ({reason})') from None
    if form is not None:
        check_form(content, form, where)
    return content


def check_form(value, form, where, field=''):
    """Raise ValueError unless what JSON says has a form. where: what says it. field: the name of the value in that.

    form: str, bool, float, list or dict; int for a count; [form of each element]; {name: form} for an object, which may
    lack a field whose name ends in ?, and have others; {str: form} for an object whose fields have any names, and
    {bare_name: form} if these are names of files; bare_name for such a name; (form, None) for what may be null."""
    place = f'{where}: {field}' if field else where
    if isinstance(form, tuple):
        if value is None:
            return
        form = form[0]
    if form is bare_name:
        bare_name(value, place)
        return
    kind = form if isinstance(form, type) else type(form)
    is_kind = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    if not is_kind or (kind is int and not 0 <= value < 2**63):
        found = IN_WORDS[type(value)] if isinstance(value, (list, dict)) else ascii(value)[:60]
        raise ValueError(f'{place}: found {found}, expected {IN_WORDS[kind]}')
    if isinstance(form, list):
        for number, part in enumerate(value):
            check_form(part, form[0], where, f'{field}[{number}]')
    for key, inner in form.items() if isinstance(form, dict) else ():
        is_name = isinstance(key, str)
        for name in [key.removesuffix('?')] if is_name else value:
            if is_name and key.endswith('?') and name not in value:
                continue
            if name not in value:
                raise ValueError(f'{place}: found no {name}, expected an object that has it')
            if key is bare_name:
                bare_name(name, place)
            check_form(value[name], inner, where, f'{field}.{ascii(name)[1:-1][:60]}'.lstrip('.'))


def bare_name(name, where):
    """A name that a file says, to be joined to the path of that file's own folder. where: the file and its field.

    Raises ValueError for anything else, such as ../../.bashrc: whoever wrote that file would otherwise decide which
    files of this machine are read and written."""
    # Not `-` first, which commands take for an option. 200 leaves room for an ending: file systems allow 255 bytes.
    if isinstance(name, str) and re.fullmatch(r'\.?\w[\w.-]*', name) and len(os.fsencode(name)) <= 200:
        return name
    rule = 'expected the name of a file in its own folder, of letters, digits, and the signs . _ -'
    raise ValueError(f'{where}: found {ascii(name)[:100]}, {rule}')


def is_run(folder):
    """Whether a folder is the out_dir of a run, by what lies in it."""
    return os.path.isdir(os.path.join(folder, 'checkpoints'))


def meant(name, key='out_dir'):
    """In words, which name was meant where a run or a model is named: the run of a checkpoint, a run in this folder or
    beside it with nearly this name. None if the name may be right, or nothing is known. key: which names it."""
    if os.path.exists(os.path.join(name, 'config.json')) or is_run(name):
        return None
    folder, last = os.path.split(os.path.normpath(name))
    if run := next((run for run in (folder, os.path.dirname(folder)) if run and is_run(run)), None):
        step = re.fullmatch(r'step_0*(\d+)', last) if key == 'out_dir' else None
        return f'that is within the run {run}: give --{key}={run}' + (f' --step={step[1]}' if step else '')
    if os.path.exists(os.path.join(name, 'meta.json')):
        return 'that is a dataset, where a run or a model is expected'
    if runs := runs_in(name):
        return f'it holds the runs {", ".join(runs)}: give one of them, as --{key}={os.path.join(name, runs[0])}'
    if not os.path.isdir(name) and (near := difflib.get_close_matches(last, runs_in(folder or '.'), 1)):
        return f'there is no such run: did you mean --{key}={os.path.join(folder, near[0])}?'
    return None


def runs_in(folder):
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [name for name in sorted(names) if is_run(os.path.join(folder, name))]


def refuse_link_out(path, folder):
    """Raise ValueError if a file of a folder that somebody else made is a link out of that folder, as one to
    ../../.ssh/id_rsa: what is copied of the folder would hold a file of this machine, and may be published. The links
    of the hub's cache, from its snapshots/ into its blobs/, stay within a model."""
    found, home = os.path.realpath(path), os.path.realpath(folder)
    homes = [home]
    if os.path.basename(os.path.dirname(home)) == 'snapshots':
        homes.append(os.path.join(os.path.dirname(os.path.dirname(home)), 'blobs'))
    if not any(found.startswith(f'{home}{os.sep}') for home in homes):
        link = shlex.quote(str(path))
        mend = f'rm {link} && cp {shlex.quote(found)} {link}'
        raise ValueError(
            f'{path}: found a link to {found}, expected a file of {folder}: delete it, or if you made it, `{mend}`'
        )


def merge_command(folder):
    """The command that merges an adapter of peft into its model: in float32, since in the model's bfloat16 much of what
    was learned would be rounded away."""
    load = f'AutoPeftModelForCausalLM.from_pretrained({json.dumps(str(folder))}, dtype="float32")'
    merge = f'from peft import AutoPeftModelForCausalLM; {load}.merge_and_unload().save_pretrained("MERGED")'
    return f'`python -c {shlex.quote(merge)}`'


def refuse_lfs_pointer(path):
    """Raise ValueError if a file is only the pointer that a clone without git-lfs leaves in its place."""
    with open(path, 'rb') as file:
        is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
    if is_pointer:
        folder = os.path.dirname(path) or '.'
        raise ValueError(
            f'{path} is a pointer of Git LFS, not the file: fetch it with `git -C {shlex.quote(folder)} lfs pull`'
        )


def rename_durably(old, new):
    """Rename a file or directory, and sync its parent directory to the disk."""
    os.replace(old, new)
    parent = os.open(os.path.dirname(new) or '.', os.O_RDONLY)
    os.fsync(parent)
    os.close(parent)


def sha256_of(path, bar=None):
    """The sha256 of a file, in hexadecimal. bar: a tqdm over bytes, to move as they are read."""
    digest, buffer = hashlib.sha256(), bytearray(1 << 20)
    with open(path, 'rb', buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(memoryview(buffer)[:size])
            if bar is not None:
                bar.update(size)
    return digest.hexdigest()


def remove_if_there(path):
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


def code_version(folder):
    """The folder's git commit, with -dirty when a file changed since, and a hash of its *.py files, for lack of git."""
    commit = 'no git commit'
    if (folder / '.git').exists():  # else git would answer for a repository that the folder was copied into
        command = ['git', '-C', str(folder), 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # no git here, or no commit yet
            commit = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    files = sorted(path for room in FOLDERS for path in Path(room).glob('*.py'))
    sources = b''.join(path.read_bytes() for path in files)
    return f'{commit}, sha256 of *.py {hashlib.sha256(sources).hexdigest()[:12]}'
