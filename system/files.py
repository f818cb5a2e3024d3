"""
Writing files so that they are complete or absent, even if the process is killed or the power fails; reading what
somebody else may have written; and the folders of this project's own code.
"""

import contextlib
import hashlib
import json
import os
import re
import subprocess
from pathlib import Path

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
ROOMS = (
    'runtime', 'system', 'dataset', 'text', 'evaluation', 'planning', 'comparison', 'huggingface', 'exchange', 'pool',
)  # fmt: skip
LFS_POINTER = b'version https://git-lfs.github.com/spec/'  # a clone without git-lfs has this instead of the file
FOLDERS = {
    ROOT,
    *(os.path.join(ROOT, room) for room in (*ROOMS, 'benchmarks')),
}  # of our code alone: .venv is below ROOT as well


@contextlib.contextmanager
def replacing(path, mode='w'):
    """Open a new file that replaces `path` once all of it is on disk. After an error, `path` is as it was."""
    unfinished = f'{path}.tmp'
    with open(unfinished, mode, encoding=None if 'b' in mode else 'utf-8') as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    rename_durably(unfinished, path)


def write_file(path, text):
    """Write a text file completely or not at all."""
    with replacing(path) as file:
        file.write(text)


def read_json(path):
    """The content of a JSON file. path: a Path. Raises ValueError if the file is damaged."""
    try:
        return json.loads(path.read_text(encoding='utf-8'))
    except ValueError:
        raise ValueError(f'{path} is damaged: delete it, and start again') from None


def bare_name(name, where):
    """A name that a file says, to be joined to the path of that file's own folder. where: the file and its field.

    Raises ValueError for anything else, such as ../../.bashrc: whoever wrote that file would otherwise decide which
    files of this machine are read and written."""
    # Not `-` first, which commands take for an option. 200 leaves room for an ending: file systems allow 255 bytes.
    if isinstance(name, str) and re.fullmatch(r'\.?\w[\w.-]*', name) and len(os.fsencode(name)) <= 200:
        return name
    rule = 'expected the name of a file in its own folder, of letters, digits, and the signs . _ -'
    raise ValueError(f'{where}: found {ascii(name)[:100]}, {rule}')


def merge_command(folder):
    """The command that merges an adapter of peft into its model: in float32, since in the model's bfloat16 much of what
    was learned would be rounded away."""
    load = f'AutoPeftModelForCausalLM.from_pretrained("{folder}", dtype="float32")'
    merge = f'{load}.merge_and_unload().save_pretrained("MERGED")'
    return f"`python -c 'from peft import AutoPeftModelForCausalLM; {merge}'`"


def refuse_lfs_pointer(path):
    """Raise ValueError if a file is only the pointer that a clone without git-lfs leaves in its place."""
    with open(path, 'rb') as file:
        is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
    if is_pointer:
        folder = os.path.dirname(path) or '.'
        raise ValueError(f'{path} is a pointer of Git LFS, not the file: fetch it with `git -C {folder} lfs pull`')


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
