"""
Where text comes from: the standard library, files and folders, datasets saved to disk, streams of the datasets library.

    source = find_source('stdlib')                      # what it is: its parts, their sizes, a fingerprint
    source = find_source('my_texts/')                   # any tree of files
    source = stream_source(stream, description)         # a dataset of the hub

documents.py reads what is found here. A source of conversations (source.chat) has rows with `messages`, or with
`prompt` and `completion`.
"""

import hashlib
import importlib.util
import json
import os
import re
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

FIRST_BYTES = 1 << 19  # of a file with rows, in which the first is looked for
SAMPLES, SAMPLE_BYTES = 16, 1 << 16  # of a file's content for the fingerprint; files up to 1 MB are covered entirely

CHAT_FIELDS = ('messages', 'prompt', 'completion', 'tools', 'chat_template_kwargs')  # what is read of conversations

# Left out of the standard library: tests, demonstrations, other people's packages, tables that scripts wrote, and what
# not every Python from 3.10 to 3.13 has.
STDLIB_SKIPPED_FOLDERS = {'test', 'tests', 'idlelib', 'turtledemo', 'site-packages', 'dist-packages', '__pycache__'}
STDLIB_SKIPPED_FOLDERS |= {'encodings', 'pydoc_data', 'lib2to3', 'distutils', 'ensurepip'}
STDLIB_SKIPPED_FILES = re.compile(r'_sysconfigdata.*|(site|user)customize\.py')  # written for one machine


class Part(NamedTuple):
    """A stretch of a source that is read in one go."""

    path: str  # of a stream: the number of its shard
    kind: str  # 'text', 'jsonl', 'json', 'yaml', 'parquet', 'arrow', 'stream'
    start: int = 0  # of a text file: first byte, and the one behind the last
    end: int = 0
    split: str | None = None  # where it is settled beforehand


@dataclass
class Source:
    """What find_source found. `description` goes into meta.json; its 'sha256' changes when the source does."""

    description: dict
    parts: list
    total: int | None  # bytes, rows for a stream; None = not known
    text_field: str | None = None
    chat: bool = False  # its rows are conversations
    skipped: list = field(default_factory=list)  # 'file: reason'
    stream: object = None  # datasets.IterableDataset

    def columns(self, names):
        """Those of a columnar file's or stream's columns that are read."""
        return [name for name in CHAT_FIELDS if name in names] if self.chat else [self.text_field or 'text']


# --- finding a source -------------------------------------------------------------------------------------------------


def find_source(dataset, text_field=None, split='train', tail_fraction=None, chat=None):
    """The Source that `dataset` names: 'stdlib', or the path of a file, a folder, or a folder written by save_to_disk.

    text_field: of rows; None = 'text', and all strings of a row of .jsonl without one. split: which one of the saved
    folder. tail_fraction: cut a text file in two, so that its end is the split 'val'. chat: whether rows are read as
    conversations; None = when the first row is one, and neither text_field nor a field 'text' says otherwise.
    Raises FileNotFoundError when there is no such thing, and ValueError when there is nothing to read in it, or when
    rows lack the field.
    """
    if dataset == 'stdlib':
        root = Path(sysconfig.get_path('stdlib'))
        version = '.'.join(map(str, sys.version_info[:3]))
        return _files_source(f"Python {version}'s standard library", root, stdlib_files(root), text_field, None, chat)
    path = Path(dataset)
    if path.is_dir() and ((path / 'dataset_dict.json').exists() or (path / 'state.json').exists()):
        return _files_source(dataset, path, _saved_files(path, split), text_field, None, chat)
    if path.is_dir():
        files = sorted(file for file in path.rglob('*') if not file.is_dir())
        files = [file for file in files if not any(name.startswith('.') for name in file.relative_to(path).parts)]
        if not files:
            raise FileNotFoundError(f'dataset={dataset}: this folder holds no files')
        return _files_source(dataset, path, files, text_field, None, chat)
    if path.exists():
        return _files_source(dataset, path.parent, [path], text_field, tail_fraction, chat)
    raise FileNotFoundError(
        f'dataset={dataset}: there is no such file or folder; expected stdlib, synthetic, a file, a folder, or of the '
        f'Hugging Face hub fineweb-10BT, fineweb-100BT, fineweb-edu-10BT or OWNER/NAME'
    )


def stdlib_files(root):
    """Python's own modules under the folder `root`, sorted, without tests and generated tables."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in STDLIB_SKIPPED_FOLDERS]
        files += [Path(folder, name) for name in names if name.endswith('.py') and not STDLIB_SKIPPED_FILES.match(name)]
    if not files:
        raise FileNotFoundError(f'dataset=stdlib: this Python has no sources in {root}; take another --dataset')
    return sorted(files)


def kind_of(path):
    """How a file is read: by its name; what is not known is text."""
    kinds = {'.jsonl': 'jsonl', '.ndjson': 'jsonl', '.json': 'json', '.yaml': 'yaml', '.yml': 'yaml'}
    kinds |= {'.parquet': 'parquet', '.arrow': 'arrow'}
    return kinds.get(Path(path).suffix.lower(), 'text')


def _saved_files(folder, split):
    """The .arrow files of a folder written by datasets' save_to_disk, in order: state.json lists them."""
    if (folder / 'dataset_dict.json').exists():
        splits = json.loads((folder / 'dataset_dict.json').read_text(encoding='utf-8'))['splits']
        if split not in splits:
            raise ValueError(
                f'dataset={folder}: has no split {split!r}, choose with --source_split; it has: {", ".join(splits)}'
            )
        folder = folder / split
    state = json.loads((folder / 'state.json').read_text(encoding='utf-8'))
    return [folder / file['filename'] for file in state['_data_files']]


def _files_source(name, root, files, text_field, tail_fraction, chat):
    """A Source of local files; those that cannot be read are left out, and named."""
    found, skipped = [], []
    for file in files:
        kind = kind_of(file)
        try:
            size, start, end, content = _fingerprint(file)
        except OSError as error:
            skipped.append(f'{file}: {error.strerror}')
            continue
        problem, row = _problem_with(kind, start, end), None
        if size and not problem:
            problem, row = _first_row(file, kind)
        if problem and size:
            skipped.append(f'{file}: {problem}')
        elif size:
            found.append((file, kind, size, content, row))
            if chat is None and row is not None and (kind != 'json' or holds_conversations(row)):
                chat = _takes_conversations(row, text_field)
    parts = []
    digest = hashlib.sha256()
    for file, kind, size, content, row in found:
        if chat and (kind in ('text', 'yaml') or (row is not None and not _has_chat_fields(row))):
            fields = f'; it has: {", ".join(row)}' if row else ''
            skipped.append(f'{file}: no conversations (messages, or prompt and completion){fields}')
            continue
        if not chat and row is not None and kind != 'json' and (text_field or kind != 'jsonl'):
            check_text_field(file, row, text_field or 'text')
        digest.update(f'{file.relative_to(root).as_posix()} {size} {content}\n'.encode('utf-8', 'surrogateescape'))
        parts.append(Part(str(file), kind, 0, size))
    if not parts:
        raise ValueError(f'dataset={name}: nothing to read in it: {"; ".join(skipped[:3]) or "all files are empty"}')
    description = {
        'name': name,
        'files': len(parts),
        'bytes': sum(part.end for part in parts),
        'sha256': digest.hexdigest(),
    }
    if tail_fraction is not None:
        parts = _cut_tail(parts[0], tail_fraction)
    return Source(description, parts, description['bytes'], text_field, bool(chat), skipped)


def _fingerprint(path):
    """(size, first bytes, last bytes, sha256) of a file: of all of it up to 1 MB, else of samples spread over it."""
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        size = file.seek(0, os.SEEK_END)
        positions = range(0, size, SAMPLE_BYTES)
        if size > SAMPLES * SAMPLE_BYTES:
            positions = [(size - SAMPLE_BYTES) * index // (SAMPLES - 1) for index in range(SAMPLES)]
        start = end = b''
        for position in positions:
            file.seek(position)
            end = file.read(SAMPLE_BYTES)
            start = start or end
            digest.update(end)
    return size, start, end, digest.hexdigest()


def _problem_with(kind, start, end):
    """Why a file of this kind cannot be read, from its first and last bytes; None when it can."""
    if kind in ('text', 'jsonl', 'json', 'yaml'):
        if kind == 'yaml' and importlib.util.find_spec('yaml') is None:
            return 'needs PyYAML: pip install pyyaml'
        return 'binary, it holds zero bytes' if b'\0' in start[:8192] else None
    if kind == 'parquet':
        return None if start[:4] == b'PAR1' == end[-4:] else 'damaged: parquet begins and ends with PAR1'
    return None if start[:4] == b'\xff\xff\xff\xff' else 'not a stream of Arrow record batches'


def _first_row(path, kind):
    """(why the file cannot be read or None, {field: value} of its first row or None where it has no rows).

    Of columnar files, and of the first element of a .json file, which has rows only if those are conversations.
    """
    if kind in ('parquet', 'arrow'):
        return _fields_of_columns(path, kind)
    if kind == 'jsonl':
        with open(path, 'rb') as file:
            for line in file.readlines(FIRST_BYTES):
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):  # left out when it is read, too
                    continue
                if isinstance(row, dict):
                    return None, row
        return f'expected a JSON object on each line, found none in the first {FIRST_BYTES:,} bytes', None
    if kind == 'json':
        with open(path, 'rb') as file:
            head = file.read(FIRST_BYTES).decode('utf-8-sig', 'replace').lstrip()
        if '"messages"' in head or '"prompt"' in head:
            try:
                row, _ = json.JSONDecoder().raw_decode(head[head[0] == '[' :].lstrip())
            except (ValueError, RecursionError):
                return None, None
            if isinstance(row, dict):
                return None, row
    return None, None


def _fields_of_columns(path, kind):
    """What _first_row returns for a columnar file, with values of the right kind in place of those of the row."""
    import pyarrow
    import pyarrow.parquet

    try:
        if kind == 'parquet':
            schema = pyarrow.parquet.read_schema(path)
        else:
            with pyarrow.OSFile(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
                schema = stream.schema
    except (ValueError, OSError) as error:  # pyarrow's errors are among them
        return f'damaged: {" ".join(str(error).split())[:200]}', None
    return None, {field.name: _example_of(field.type) for field in schema}


def _example_of(kind):
    """A value of the Python type that an Arrow type gives, as far as holds_conversations() looks at it."""
    import pyarrow

    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return []
    return '' if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) else None


def _has_chat_fields(row):
    """Whether these are the names of a conversation's fields."""
    return 'messages' in row or ('prompt' in row and 'completion' in row)


def holds_conversations(row):
    """Whether a row is a conversation: `messages` is a list, or `prompt` and `completion` are lists or strings."""
    if isinstance(row.get('messages'), list):
        return True
    return all(isinstance(row.get(key), (str, list)) for key in ('prompt', 'completion'))


def _takes_conversations(row, text_field):
    """Whether rows like this one are read as conversations where the user has not said it."""
    if text_field is not None or not holds_conversations(row):
        return False
    if isinstance(row.get('text'), str):
        print("rows have a field 'text' beside a conversation, and it is read: --chat=True takes the conversation")
        return False
    return True


def _cut_tail(part, fraction):
    """A text file as two documents, train and val: val is the last `fraction` of its bytes, as nanoGPT cuts."""
    cut = int(part.end * (1 - fraction))
    with open(part.path, 'rb') as file:
        file.seek(cut)
        for byte in file.read(3):
            if byte & 0xC0 != 0x80:  # the first byte of a character
                break
            cut += 1
    if not 0 < cut < part.end:
        raise ValueError(
            f'{part.path}: its {part.end} bytes cannot be cut so that the last {fraction:%} are the split val'
        )
    return [part._replace(end=cut, split='train'), part._replace(start=cut, split='val')]


def check_text_field(path, fields, text_field):
    """Raise ValueError when there is no such field, with those that there are."""
    if text_field not in fields:
        raise ValueError(f'{path}: has no field {text_field!r}, choose with --text_field; it has: {", ".join(fields)}')


def stream_source(stream, description, text_field=None, chat=None):
    """The Source of a datasets.IterableDataset; it reads one shard, usually one file of the hub, after the other.

    description: as Source has it. text_field, chat: as find_source has them. Raises ValueError when a field is missing.
    """
    names = stream.column_names
    if names is None or (chat is None and text_field is None and _has_chat_fields(names)):
        row = next(iter(stream))
        names = list(row)
        chat = _takes_conversations(row, text_field) if chat is None else chat
    if not chat:
        check_text_field(description['name'], names, text_field or 'text')
    elif not _has_chat_fields(names):
        raise ValueError(
            f'{description["name"]}: no conversations (messages, or prompt and completion); it has: {", ".join(names)}'
        )
    parts = [Part(str(shard), 'stream') for shard in range(stream.num_shards)]
    splits = stream.info.splits or {}
    n_rows = splits[description['split']].num_examples if description['split'] in splits else None
    source = Source(description, parts, n_rows, text_field, bool(chat))
    source.stream = stream.select_columns(source.columns(names)).with_format('arrow')
    return source
