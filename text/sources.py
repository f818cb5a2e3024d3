"""
Finds the text to prepare: Python's standard library, files and folders, datasets saved to disk, the Hugging Face hub.

    source = find_source('my_texts/')                                 # its parts, their sizes, a fingerprint
    source = stream_source(*open_stream('fineweb-10BT', None, 'train', 'data/hub'))
    download('fineweb-10BT', None, 'data/hub')                        # from here on, open_stream reads these files

documents.py reads the sources that are found here. The rows of a source of conversations (source.chat) go to
conversations.py.
"""

import csv
import functools
import hashlib
import importlib.util
import io
import itertools
import json
import os
import re
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from layout import counted
from system.errors import one_line
from system.files import LFS_POINTER, bare_name, read_json, sha256_of, write_file
from text.chat_rows import (
    AS_TEXT,
    CHAT_FIELDS,
    NO_CONVERSATIONS,
    OTHER_FIELDS,
    PARTS_OF_TREES,
    PREFERENCE_PAIRS,
    PREFERENCES,
    TREE,
    are_labeled,
    fields_known,
    fields_read,
    has_chat_fields,
    holds_conversation,
    reason_against_text,
    row_of,
)

COPY_AGAIN = 'copy it again as save_to_disk wrote it, or fetch it with `git lfs pull`'
FIRST_BYTES = 1 << 19  # the part of a file in which its first rows are looked for
LARGEST_LINE = 1 << 27  # of JSON lines and tables, which are read as a whole
LARGEST_YAML = 1 << 24  # a file, which is parsed as a whole: of many small values into 4 GB
ROWS_LOOKED_AT = 100  # rows of each file that decide what it holds, since the very first may be an exception
SAMPLES, SAMPLE_BYTES = 16, 1 << 16  # parts of a file that its fingerprint covers; files up to 1 MB are covered whole

FILE_KINDS = {  # how a file is read, by the ending of its name; any other ending is text
    '.jsonl': 'jsonl',
    '.ndjson': 'jsonl',
    '.json': 'json',  # or lines of JSON, by their first bytes
    '.csv': 'csv',
    '.tsv': 'csv',
    '.yaml': 'yaml',
    '.yml': 'yaml',
    '.parquet': 'parquet',
    '.arrow': 'arrow',  # the file format or the stream format, by its first bytes
    '.arrows': 'arrow',
    '.feather': 'arrow',
}

IN_BRACES = re.compile(r'\{([^{}]+)\}')  # a field of a template; its name may have spaces, hyphens and dots

COMPRESSED = {'.gz': 'gzip', '.zst': 'zstd'}  # of text, tables and lines of JSON (.json.gz usually holds lines)
MAGIC = {'gzip': b'\x1f\x8b', 'zstd': b'\x28\xb5\x2f\xfd'}  # first bytes of such files
ARROW_FILE = b'ARROW1'
MAGIC |= {'bzip2': b'BZh91AY&SY', 'xz': b'\xfd7zXZ', 'zip': b'PK\x03\x04'}  # and of others, which are not read
SKIPPABLE = re.compile(rb'[\x50-\x5f]\x2a\x4d\x18')  # of zstd: a frame without content, as pzstd begins
BOM = b'\xef\xbb\xbf'  # Windows puts it before a text in UTF-8; it does not belong to the text
ROW_KINDS = ('jsonl', 'json', 'csv', 'parquet', 'arrow')

# Parts of the standard library that are left out: tests, demonstrations, installed packages, generated tables, and
# modules that not every Python from 3.10 to 3.13 has.
STDLIB_SKIPPED_FOLDERS = {'test', 'tests', 'idlelib', 'turtledemo', 'site-packages', 'dist-packages', '__pycache__'}
STDLIB_SKIPPED_FOLDERS |= {'encodings', 'pydoc_data', 'lib2to3', 'distutils', 'ensurepip'}
STDLIB_SKIPPED_FILES = re.compile(r'_sysconfigdata.*|(site|user)customize\.py')  # written for one machine

HUB_NAMES = {  # short name -> (repository, configuration)
    'fineweb-10BT': ('HuggingFaceFW/fineweb', 'sample-10BT'),
    'fineweb-100BT': ('HuggingFaceFW/fineweb', 'sample-100BT'),
    'fineweb-edu-10BT': ('HuggingFaceFW/fineweb-edu', 'sample-10BT'),
}


class Damaged(ValueError):
    """A file is not whole, or not what its name says, so part of the data would be missing without it."""


class Part(NamedTuple):
    """A stretch of a source that is read in one go."""

    path: str  # for a stream, the number of its shard
    kind: str  # 'text', 'jsonl', 'json', 'yaml', 'csv', 'parquet', 'arrow', 'stream'
    start: int = 0  # first byte of a text file, after a BOM
    end: int = 0  # the byte after the last
    split: str | None = None  # 'train' or 'val' if it is fixed beforehand; None = the hash of each document decides


@dataclass
class Source:
    """What find_source() has found. `description` goes into meta.json; its 'sha256' changes if the source changes."""

    description: dict
    parts: list
    total: int | None  # bytes, or rows of a stream; None = unknown
    text_field: str | None = None
    chat: bool = False  # its rows are conversations
    chat_fields: tuple = ()  # the fields of a conversation, if the user has named them
    labeled: bool = False  # its rows are single answers with a label, of which write_pairs() makes pairs
    line: str | None = None  # a line that says how its rows are read
    skipped: list = field(default_factory=list)  # lines 'file: reason'; before them, how many are hidden or empty
    stream: object = None  # datasets.IterableDataset

    def columns(self, names):
        """Which of a columnar file's or stream's columns are read."""
        return fields_known(names, self.chat_fields) if self.chat else fields_of(self.text_field or 'text')


# --- finding a source -------------------------------------------------------------------------------------------------


def find_source(dataset, text_field=None, split='train', tail_fraction=None, chat=None, dedup=False, chat_fields=()):
    """The Source that `dataset` names: 'stdlib', or the path of a file, a folder, or a folder written by save_to_disk.

    text_field: the field of a row that holds its text, or a template, see fields_of(). None = 'text'.
    split: which split of a folder written by save_to_disk. tail_fraction: cut a text file in two, so that its end is
    the split 'val'. chat: whether rows are read as conversations; None = yes if there are some among the first
    ROWS_LOOKED_AT rows of a file, unless text_field or a field 'text' says otherwise. chat_fields: see
    chat_rows.conversation_of(); they need chat=True. dedup: leave out text files that repeat an earlier one.
    Raises FileNotFoundError if there is no such source, and ValueError if there is nothing to read in it, or if rows
    lack the field.
    """
    name, path = dataset, Path(dataset)
    n_hidden, not_entered = 0, []
    if dataset == 'stdlib':
        root = Path(sysconfig.get_path('stdlib'))
        files = stdlib_files(root)
        name = f"Python {'.'.join(map(str, sys.version_info[:3]))}'s standard library"
    elif _is_saved(path):
        root, files = path, _saved_files(path, split)
    elif path.is_dir():
        root = path
        files, n_hidden, not_entered = _files_below(path)
    elif path.exists():
        root, files = path.parent, [path]
    else:
        raise FileNotFoundError(
            f'dataset={dataset}: there is no such file or folder; expected stdlib, synthetic, a file, a folder, '
            f'{", ".join(HUB_NAMES)}, or OWNER/NAME on the Hugging Face hub'
        )
    if split != 'train' and not (path / 'dataset_dict.json').exists():
        raise ValueError(
            f'dataset={dataset} has no splits to choose from: give the files of the split that you mean as --dataset, '
            f'and leave out --source_split={split}'
        )
    source = _files_source(name, root, files, text_field, tail_fraction, chat, dedup, tuple(chat_fields))
    n_empty = len(files) - source.description['files'] - len(source.skipped)
    source.skipped[:0] = not_entered
    if path.is_dir() and (n_hidden or n_empty):
        source.skipped.insert(0, f'{n_hidden:,} hidden and {n_empty:,} empty files')
    return source


def stdlib_files(root):
    """Python's own modules in the folder `root`, sorted, without tests and generated tables."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in STDLIB_SKIPPED_FOLDERS]
        files += [Path(folder, name) for name in names if name.endswith('.py') and not STDLIB_SKIPPED_FILES.match(name)]
    if not files:
        raise FileNotFoundError(f'dataset=stdlib: this Python has no sources in {root}; take another --dataset')
    return sorted(files)


def _files_below(folder):
    """(the files in a folder and its subfolders, sorted, without hidden ones; the number of hidden ones; lines about
    subfolders that are left out). Links to folders are followed, but no folder is read twice: what lies in the tree
    itself comes first, so that its links to its own parts lead nowhere new."""
    files, hidden, left_out = [], 0, []
    entered, folders, links = {*map(str, folder.resolve().parents)}, [folder], []
    while folders or links:
        here = folders.pop() if folders else links.pop(0)
        real = os.path.realpath(here)
        if real in entered:
            left_out.append(f'{here}: a link to {real}, which is read already, or holds this folder')
            continue
        entered.add(real)
        try:
            inside = sorted(here.iterdir())
        except OSError as error:
            left_out.append(f'{here}: {reason_of(error)}')
            continue
        for path in inside:
            if path.name.startswith('.'):
                hidden += sum(not below.is_dir() for below in path.rglob('*')) if path.is_dir() else 1
            elif path.is_dir():
                (links if path.is_symlink() else folders).append(path)
            else:
                files.append(path)
    if not files:
        why = f' ({"; ".join(left_out[:3])})' if left_out else ''
        raise FileNotFoundError(f'dataset={folder}: this folder holds no files, or hidden ones alone{why}')
    return sorted(files), hidden, left_out


def only_file(folder):
    """The path of the one file in a folder that holds nothing else but hidden files; None for any other."""
    if not os.path.isdir(folder):
        return None
    paths = [entry.path for entry in os.scandir(folder) if not entry.name.startswith('.')]
    return paths[0] if len(paths) == 1 and os.path.isfile(paths[0]) else None


def kind_of(path):
    """How a file is read, by its name: the kind of a Part."""
    path = Path(path)
    if path.suffix.lower() in COMPRESSED:
        kind = kind_of(path.with_suffix(''))
        return 'jsonl' if kind == 'json' else kind if kind in ('jsonl', 'csv') else 'text'
    return FILE_KINDS.get(path.suffix.lower(), 'text')


def open_file(path):
    """Open a file to read its bytes, uncompressed. Reading a damaged file raises OSError."""
    codec = COMPRESSED.get(Path(path).suffix.lower())
    if codec is None:
        return open(path, 'rb')
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), codec))


def reason_of(error):
    """Why a file cannot be read, in one line."""
    if 'requires too much memory' in str(error):
        return 'compressed by zstd with a long window: unpack it with `zstd -d --long=31`'
    return getattr(error, 'strerror', None) or one_line(error)  # pyarrow's OSError has no strerror


def is_template(text_field):
    """Whether text_field is a text with fields in {braces}, and not the name of one."""
    return text_field is not None and '{' in text_field


def fields_of(text_field):
    """The fields of a row that text_field names: one, or those in the {braces} of a template."""
    return IN_BRACES.findall(text_field) or [text_field]


def _is_saved(folder):
    """Whether a folder was written by datasets' save_to_disk, even if one of its files is missing now."""
    if (folder / 'dataset_info.json').exists() and any(folder.glob('*.arrow')):
        return True
    return (folder / 'dataset_dict.json').exists() or (folder / 'state.json').exists()


def _saved_files(folder, split):
    """The .arrow files of a folder written by datasets' save_to_disk, in order."""
    if (folder / 'dataset_dict.json').exists():
        splits = read_json(folder / 'dataset_dict.json', {'splits': [bare_name]}, COPY_AGAIN)['splits']
        if split not in splits:
            raise ValueError(f'dataset={folder}: has no --source_split={split}; it has: {", ".join(splits)}')
        folder = folder / split
    state = folder / 'state.json'
    form = {'_data_files?': [{'filename': bare_name}]}
    named = read_json(state, form, COPY_AGAIN).get('_data_files') if state.exists() else None
    files = [folder / file['filename'] for file in named] if named else sorted(folder.glob('*.arrow'))
    missing = [file for file in files if not file.exists()]
    if missing or not files:
        gone = missing[0] if missing else folder / 'data-00000-of-00001.arrow'
        raise ValueError(f'dataset={folder}: {gone} is missing: copy the folder again')
    return files


def _files_source(name, root, paths, text_field, tail_fraction, chat, dedup, chat_fields):
    """A Source of local files. Files that are no text, and those that may not be read, are left out, and listed in its
    `skipped`. Raises ValueError if a file is damaged: part of the data would be missing."""
    found, skipped = [], []
    for path in paths:
        try:
            part, sha256, rows = _inspect(path, chat_fields)
        except Damaged as error:
            raise ValueError(f'{path}: {error}; if it cannot be had whole, take it out of the folder') from error
        except (OSError, ValueError) as error:
            skipped.append(f'{path}: {reason_of(error)}')
        else:
            found += [(part, sha256, rows)] if part.end else []
    if chat is None:
        chat = text_field is None and _are_conversations({part.path: rows for part, _, rows in found})

    parts, first_of, names = [], {}, {}
    digest = hashlib.sha256()
    for part, sha256, rows in found:
        if dedup and part.kind == 'text':
            like = first_of.setdefault((part.end, sha256), part.path)  # of equal size and samples
            if like != part.path and sha256_of(like) == sha256_of(part.path):
                skipped.append(f'{part.path}: the same as {like}')
                continue
        fields = list(dict.fromkeys(name for row in rows for name in row))
        may_be_chat = not rows or any(has_chat_fields(row, chat_fields) for row in rows)
        if chat and (part.kind == 'text' or (part.kind == 'yaml' and not rows) or not may_be_chat):
            skipped.append(f'{part.path}: {_no_conversations(fields, chat_fields)}')
            continue
        wanted = text_field or 'text'
        lack = _lack_of(wanted, fields) if not chat and part.kind in ROW_KINDS else None
        if lack and part.kind in ('csv', 'json') and len(found) > 1:  # folders often have tables and settings
            skipped.append(f'{part.path}: {lack}')
            continue
        if lack:
            raise ValueError(f'{part.path}: {lack}')
        if not chat and part.kind in ('parquet', 'arrow') and not is_template(wanted):  # which takes any value
            check_holds_text(part.path, wanted, _schema_of(part.path, part.kind).field(wanted).type)
        names |= dict.fromkeys(fields)
        line = f'{Path(part.path).relative_to(root).as_posix()} {part.end} {sha256}\n'
        digest.update(line.encode('utf-8', 'surrogateescape'))
        parts.append(part)
    if not parts:
        raise ValueError(f'dataset={name}: nothing to read in it: {"; ".join(skipped[:3]) or "all files are empty"}')
    n_bytes = sum(part.end for part in parts)
    description = {'name': name, 'files': len(parts), 'bytes': n_bytes, 'sha256': digest.hexdigest()}
    if tail_fraction is not None:
        parts = _cut_tail(parts[0], tail_fraction)
    labeled = chat_fields == PREFERENCES and are_labeled(names)
    source = Source(description, parts, n_bytes, text_field, chat, chat_fields, labeled, skipped=skipped)
    line = _how_chats_are_read(source, names, [row for _, _, rows in found for row in rows]) if chat else None
    source.line = '\n'.join(filter(None, [line, _held_out(parts)])) or None
    return source


def _held_out(parts):
    """A warning, where files of rows are called test or validation beside others that are called train; else None."""

    def called(words):
        pattern = re.compile(rf'(?<![a-z])({words})(?![a-z])')
        return [part.path for part in parts if part.kind in ROW_KINDS and pattern.search(Path(part.path).stem.lower())]

    held_out = called('test|validation|valid|val|dev')
    if not held_out or not called('train'):
        return None
    names = one_line(', '.join(held_out[:3])) + (', ...' if len(held_out) > 3 else '')
    given = f'WARNING: {counted(len(held_out), "file")} named like a test or validation split will be learned: {names}'
    return f'{given}; to hold them out, give a folder without them'


def _no_conversations(fields, chat_fields):
    """Why rows with these fields cannot be read as conversations."""
    wanted = f'no conversations ({", ".join(chat_fields)})' if chat_fields else NO_CONVERSATIONS
    if chat_fields == PREFERENCES:
        wanted = 'no pairs: give the better answer the name chosen, the worse one rejected, what both answer prompt'
    return wanted + (f'; it has: {_listed(fields)}' if fields else '')


def _listed(fields):
    """The names of fields, in one line; in a damaged table they may be anything."""
    return one_line(', '.join(fields))


def _lack_of(text_field, fields):
    """A message about the first field that text_field names and `fields` lacks; None if there is none, or if `fields`
    is empty because no rows were found, as in a .json file that is one long text."""
    missing = next((name for name in fields_of(text_field) if fields and name not in fields), None)
    if missing is None:
        return None
    prompts = '; prompts alone are learned by `python train_grpo.py --prompts=FILE`' * ('prompt' in fields)
    return (
        f'has no field {missing!r}, choose with --text_field; it has: {_listed(fields)}; '
        f'{OTHER_FIELDS} reads conversations{prompts}'
    )


def _how_chats_are_read(source, names, rows):
    """A line that says how the rows of a source of conversations are read. names: all fields. rows: the first ones."""
    read = fields_read(rows, source.chat_fields)
    others = [name for name in names if name not in read]
    by = f', by their {", ".join(name for name in names if name in read)}' if read else ''
    by += f'; not read: {_listed(others)}' if others else ''
    if source.labeled:
        return f'rows are good and bad answers, to be joined to pairs{by}'
    if source.chat_fields == PREFERENCES:
        return f'rows are pairs of a better and a worse answer{by}'
    return f'rows are conversations{by} ({AS_TEXT})'


def _inspect(path, chat_fields=()):
    """(Part, sha256, the first rows as {field: value}) of a file, before its text is read. The rows of a .json file are
    the elements of its list; text, and yaml without conversations, has no rows. Raises OSError or ValueError with the
    reason if the file cannot be read."""
    kind = kind_of(path)
    if os.path.exists(path) and not os.path.isfile(path):  # reading a pipe would wait for ever
        raise ValueError('no regular file')
    size, start, end, sha256 = _fingerprint(path)
    codec = COMPRESSED.get(Path(path).suffix.lower())
    if not size and (codec or kind in ('parquet', 'arrow')):
        raise Damaged('damaged: it is empty')
    if not size:
        return Part(str(path), kind), sha256, []
    if codec and not start.startswith(LFS_POINTER):
        if not start.startswith(MAGIC[codec]) and not (codec == 'zstd' and SKIPPABLE.match(start)):
            raise Damaged(f'not compressed by {codec}, as its name says: give it the name of what it is')
        try:
            with open_file(path) as file:
                start = file.read(SAMPLE_BYTES)
        except OSError as error:
            raise Damaged(f'damaged: {reason_of(error)}') from error
        end = b''
    _check_content(kind, start, end)
    if kind == 'yaml' and size > LARGEST_YAML:
        raise ValueError(f'YAML of more than {LARGEST_YAML:,} bytes: convert it to JSON lines')
    if kind == 'json' and _is_lines(path):
        kind = 'jsonl'
    elif kind == 'jsonl' and _is_array(path):
        if codec:
            raise ValueError('one array of JSON, and not an object on each line: unpack it')
        kind = 'json'
    begin = len(BOM) if kind == 'text' and start.startswith(BOM) else 0
    return Part(str(path), kind, begin, size), sha256, _first_rows(path, kind, chat_fields)


def _is_lines(path):
    """Whether a .json file holds lines of JSON: a whole object on its first line, and more after it."""
    with open(path, 'rb') as file:
        line, rest = file.readline(FIRST_BYTES), file.readline(FIRST_BYTES)
    try:
        return bool(rest.strip()) and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _is_array(path):
    """Whether a .jsonl file holds one array, on one line or on several, in place of a row on each line. A row may be a
    list of messages."""
    with open_file(path) as file:
        lines = (line.removeprefix(BOM).strip() for line in iter(lambda: file.readline(FIRST_BYTES), b''))
        line = next(filter(None, lines), b'')
        if not line.startswith(b'['):
            return False
        is_alone = not next(lines, b'')
    try:
        return not isinstance(row_of(json.loads(line)), dict) and is_alone
    except (ValueError, RecursionError):  # the array goes on behind what was read, or this is a long row
        first = next(_objects_of_list(line.decode('utf-8', 'replace')), {})
        return not {'role', 'from'} & set(first)


def _fingerprint(path):
    """(size, first bytes, last bytes, sha256) of a file. The sha256 is of the whole file up to 1 MB, else of samples
    spread over it."""
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


def _check_content(kind, start, end):
    """Raise ValueError with the reason why a file of this kind cannot be read, from its first and last bytes."""
    if kind == 'yaml' and importlib.util.find_spec('yaml') is None:
        raise ValueError('needs PyYAML: pip install pyyaml')
    if start.startswith(LFS_POINTER):
        error = Damaged if kind in ROW_KINDS else ValueError
        raise error('a pointer of Git LFS in place of the file: fetch it with `git lfs pull`')
    if kind == 'parquet' and not (start[:4] == b'PAR1' == end[-4:]):
        raise Damaged('damaged: parquet begins and ends with PAR1')
    if kind == 'arrow' and start[:4] == b'FEA1':
        raise Damaged('Feather 1: write it again with pyarrow.feather.write_feather, as Feather 2 or parquet')
    if kind == 'arrow' and start[:4] != b'\xff\xff\xff\xff' and start[:6] != ARROW_FILE:
        raise Damaged('damaged: Arrow begins with ARROW1, or as a stream of record batches')
    if kind == 'json' and start.removeprefix(BOM).lstrip()[:1] == b'[' and end.rstrip()[-1:] != b']':
        raise Damaged('damaged: a list of JSON that does not end')
    if packer := next((name for name, begin in MAGIC.items() if start.startswith(begin)), None):
        raise ValueError(f'compressed by {packer}: unpack it, or name it .gz or .zst if it is')
    if start[:2] in (b'\xff\xfe', b'\xfe\xff'):
        raise ValueError('UTF-16: convert it with `iconv -f utf-16 -t utf-8`')
    if kind not in ('parquet', 'arrow') and b'\0' in start[:8192]:
        raise ValueError('binary, it holds zero bytes')


def _first_rows(path, kind, chat_fields):
    """The first rows of a file, at most ROWS_LOOKED_AT. Raises ValueError for a damaged file."""
    if kind in ('parquet', 'arrow'):
        return _rows_of_columns(path, kind, chat_fields)
    if kind == 'csv':
        with open_file(path) as file:
            names, *rows = itertools.islice(table_rows(file, path), 1 + ROWS_LOOKED_AT)
        if twice := next((name for name in names if name and names.count(name) > 1), None):
            raise ValueError(f'a table with two columns called {one_line(twice)!r}: rename one')
        return [dict(zip(names, row, strict=False)) for row in rows] or [dict.fromkeys(names)]
    if kind == 'jsonl':
        lines = []
        with open_file(path) as file:
            while len(lines) < ROWS_LOOKED_AT and sum(map(len, lines)) < FIRST_BYTES and (line := line_of(file)):
                lines.append(line)
        rows = [row for row in map(_object_at_start_of, lines) if row is not None]
        if not rows:
            raise Damaged(f'expected a JSON object on each line, found none in the first {FIRST_BYTES:,} bytes')
        return rows
    if kind == 'json':
        with open(path, 'rb') as file:
            text = file.read(FIRST_BYTES).decode('utf-8-sig', 'replace')
        return list(itertools.islice(_objects_of_list(text), ROWS_LOOKED_AT))
    return _rows_of_yaml(path, chat_fields) if kind == 'yaml' else []


def _rows_of_yaml(path, chat_fields):
    """The first rows of a .yaml file, if some of them are conversations; otherwise [], since most such files are
    settings, of which all strings are read."""
    with open(path, 'rb') as file:
        data = file.read(FIRST_BYTES)
        is_whole = not file.read(1)
    names = '|'.join(map(re.escape, chat_fields or (*CHAT_FIELDS, 'role', 'from')))
    if not re.search(rf'\b(?:{names})\b'.encode(), data):  # parsing takes long
        return []
    if not is_whole:  # up to the last list element or document that begins in these bytes
        data = data[: max(data.rfind(b'\n- '), data.rfind(b'\n---')) + 1]
    try:
        rows = [row for content in yaml_contents(data) for row in rows_of_content(content) if isinstance(row, dict)]
    except Exception:  # the error will be reported when the file is read
        return []
    is_one = functools.partial(has_chat_fields, fields=chat_fields) if chat_fields else holds_conversation
    return rows[:ROWS_LOOKED_AT] if any(is_one(row) for row in rows) else []


def yaml_contents(data):
    """The contents of the YAML documents in some bytes. Raises what YAML's classes raise, and ValueError."""
    import yaml

    if re.search(rb'(:[0-5]?\d){100}', data):  # 1:30:00 is a number to base 60, whose digits take quadratic time
        raise ValueError('a number of a hundred parts')
    loader = getattr(yaml, 'CSafeLoader', yaml.SafeLoader)  # the first, in C, is 10 times as fast but not always built
    return list(yaml.load_all(data, loader))


def line_of(file):
    """The next line of an open file; b'' or '' at its end. Raises ValueError for one without an end: unpacked, a few MB
    may be a line of gigabytes."""
    line = file.readline(LARGEST_LINE)
    if len(line) == LARGEST_LINE:
        raise ValueError(f'a line of more than {LARGEST_LINE:,} bytes')
    return line


def table_rows(file, path):
    """Yield the rows of an open .csv or .tsv file as lists of strings, the header first. Bytes that are not UTF-8
    become surrogates. Raises ValueError if the file has no header or is not a table."""
    csv.field_size_limit(LARGEST_LINE)
    name = Path(path).with_suffix('') if Path(path).suffix.lower() in COMPRESSED else Path(path)
    text = io.TextIOWrapper(file, 'utf-8-sig', 'surrogateescape', newline='')
    n_rows = 0
    try:
        lines = iter(functools.partial(line_of, text), '')
        for row in csv.reader(lines, delimiter='\t' if name.suffix.lower() == '.tsv' else ','):
            if row:  # an empty line is no row
                n_rows += 1
                yield row
    except csv.Error as error:
        raise ValueError(f'no table behind row {n_rows}: {error}') from error
    if not n_rows:
        raise ValueError('a table without a header')


def _object_at_start_of(data):
    """The JSON object at the beginning of some bytes; a list of messages becomes an object (row_of). None if there is
    none."""
    try:
        value, _ = json.JSONDecoder().raw_decode(data.decode('utf-8-sig', 'replace').lstrip())
    except (ValueError, RecursionError):
        return None
    value = row_of(value)
    return value if isinstance(value, dict) else None


def _objects_of_list(text):
    """The objects in the list at the beginning of a JSON text, as far as the text goes. The list may be inside of an
    object, as in {"data": [...]}. If the text is a single object, that one."""
    decoder = json.JSONDecoder()
    try:
        whole = decoder.raw_decode(text.lstrip())[0]
    except (ValueError, RecursionError):  # longer than what was read
        whole = None
    if whole is not None:
        yield from (row for row in rows_of_content(whole) if isinstance(row, dict))
        return
    start = re.match(r'\s*(\{[^\[{]*)?\[', text)
    position = start.end() if start else len(text)
    while found := re.compile(r'[\s,]*(?=[\[{])').match(text, position):
        try:
            value, position = decoder.raw_decode(text, found.end())
        except (ValueError, RecursionError):
            return
        value = row_of(value)
        if isinstance(value, dict) and (not start[1] or holds_conversation(value)):
            yield value


def rows_of_content(content):
    """The rows in the content of a .json or .yaml file: the elements of a list; for an object, the elements of those of
    its lists that hold conversations, as in {"train": [...], "test": [...]}, or if it has none, the object itself."""
    if isinstance(content, list):
        return [row_of(row) for row in content]
    if not isinstance(content, dict) or has_chat_fields(content):
        return [content]
    lists = [[row_of(row) for row in value] for value in content.values() if isinstance(value, list)]
    lists = [rows for rows in lists if any(isinstance(row, dict) and holds_conversation(row) for row in rows)]
    return [row for rows in lists for row in rows] or [content]


def _rows_of_columns(path, kind, chat_fields):
    """_first_rows() for a columnar file: {field: value}, where only fields that may belong to a conversation are read;
    the others are None."""
    import pyarrow
    import pyarrow.parquet

    try:
        if kind == 'parquet':
            with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
                names = file.schema_arrow.names
                read = _fields_looked_at(names, chat_fields)
                batches = file.iter_batches(ROWS_LOOKED_AT, columns=read, use_threads=False) if read else iter(())
                batch = next(batches, None)
        else:
            with pyarrow.OSFile(str(path)) as file:
                schema, batches = arrow_batches(file)
                names = schema.names
                read = _fields_looked_at(names, chat_fields)
                batch = next((batch for batch in batches if len(batch)), None) if read else None
                batch = batch and batch.select(read)
        if batch:
            batch.validate(full=True)
        rows = [json.loads(json_of(row)) for row in batch.slice(0, ROWS_LOOKED_AT).to_pylist()] if batch else []
    except (ValueError, OSError, pyarrow.ArrowException) as error:
        raise Damaged(f'damaged: {one_line(error)}') from error
    empty = {name: '' if name == 'text' else None for name in names}
    return [empty | row for row in rows or [{}]]


def json_of(row):
    """A row as JSON. Bytes become the text that they are in UTF-8, what is none of it surrogates; dates and other types
    that JSON lacks become text, too."""

    def text_of(value):
        return value.decode('utf-8', 'surrogateescape') if isinstance(value, bytes) else str(value)

    return json.dumps(row, ensure_ascii=False, default=text_of)


def _schema_of(path, kind):
    """The names and types of a columnar file's columns."""
    import pyarrow
    import pyarrow.parquet

    if kind == 'parquet':
        return pyarrow.parquet.read_schema(path)
    with pyarrow.OSFile(str(path)) as file:
        return arrow_batches(file)[0]


def arrow_batches(file):
    """(schema, record batches) of an open Arrow file: of the file format, which ends with the places of all batches,
    or of the stream format."""
    import pyarrow

    is_file = file.read(len(ARROW_FILE)) == ARROW_FILE
    file.seek(0)
    reader = pyarrow.ipc.open_file(file) if is_file else pyarrow.ipc.open_stream(file)
    return reader.schema, map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader


def check_holds_text(origin, name, kind):
    """Raise ValueError unless a column of this Arrow type holds text, or nulls alone."""
    import pyarrow

    values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    texts = (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())
    if values not in texts and not pyarrow.types.is_null(values):
        raise ValueError(f'{origin}: the field {name!r} holds {kind}, not text')


def _fields_looked_at(names, chat_fields):
    """The columns by which _are_conversations() decides; [] if there is nothing to decide."""
    read = fields_known(names, chat_fields) + [name for name in TREE if name in names]
    return read and [name for name in names if name in read or name == 'text']


def _are_conversations(rows_of):
    """Whether rows are read as conversations, if the user has not said how. rows_of: {file: its first rows}.

    Raises ValueError if they should be read neither as conversations nor as text, or if some are conversations and
    others are text."""
    chats, texts, others, both = {}, {}, {}, False
    for path, rows in rows_of.items():
        for row in rows:
            has_text = isinstance(row.get('text'), str)
            if holds_conversation(row):
                chats[path], both = row, both or has_text
            elif (reason := reason_against_text(row)) in (PREFERENCE_PAIRS, PARTS_OF_TREES):
                raise ValueError(f'{path}: {reason}')
            elif reason:
                others[path] = reason
            elif has_text:
                texts[path] = row
    if others and not chats and not texts:
        raise ValueError('{}: {}'.format(*next(iter(others.items()))))
    if both:
        print("rows have a field 'text' beside a conversation, and it is read: --chat=True takes the conversation")
    elif chats and texts:
        chat, text = next(iter(chats)), next(iter(texts))
        raise ValueError(
            f'{chat} holds conversations, and {"also" if text == chat else text} texts: --chat=True reads the first, '
            '--text_field=text the second'
        )
    return bool(chats) and not both


def _cut_tail(part, fraction):
    """A text file as two documents, train and val, where val is the last `fraction` of its bytes, as in nanoGPT."""
    cut = int(part.end * (1 - fraction))
    with open(part.path, 'rb') as file:
        file.seek(cut)
        for byte in file.read(3):
            if byte & 0xC0 != 0x80:  # a character begins here
                break
            cut += 1
    if not 0 < cut < part.end:
        raise ValueError(f'{part.path}: the last {fraction:%} of its {part.end} bytes cannot be the split val')
    return [part._replace(end=cut, split='train'), part._replace(start=cut, split='val')]


# --- datasets of the Hugging Face hub ---------------------------------------------------------------------------------


def is_hub_name(dataset):
    """Whether `dataset` is a short name or the OWNER/NAME of a dataset on the hub, and not a path."""
    folder, _, file = dataset.partition('/')
    is_path = (
        os.path.exists(dataset) or os.path.isdir(folder) or file.endswith(('.txt', '.md', *FILE_KINDS, *COMPRESSED))
    )
    return dataset in HUB_NAMES or (not is_path and re.fullmatch(r'\w[\w.-]*/[\w.-]+', dataset) is not None)


def open_stream(dataset, config, split, hub_folder):
    """(datasets.IterableDataset, description for meta.json) of a name that is_hub_name() accepts. config: None = the
    only one. hub_folder: where download() puts files, which are preferred. Raises ValueError if the hub does not have
    the dataset or cannot be reached."""
    import datasets
    import huggingface_hub

    repository, config = HUB_NAMES.get(dataset, (dataset, config))
    folder, _, downloaded = _downloaded(repository, hub_folder)
    try:
        if str(config) in downloaded:
            revision = downloaded[str(config)]
            place = {'path': str(folder)}
        else:
            revision = huggingface_hub.HfApi().dataset_info(repository).sha
            place = {'path': repository, 'revision': revision}
        stream = datasets.load_dataset(name=config, split=split, streaming=True, **place)
    except Exception as error:  # datasets, huggingface_hub, the HTTP library and pyarrow raise all kinds
        raise ValueError(_advice(dataset, error)) from error
    sha256 = hashlib.sha256(f'{repository} {config} {split} {revision}'.encode()).hexdigest()  # a revision is a hash
    return stream, {'name': repository, 'config': config, 'split': split, 'revision': revision, 'sha256': sha256}


def download(dataset, config, hub_folder):
    """Fetch those files of a hub dataset that are not there yet. Returns their folder. Raises as open_stream()."""
    if not is_hub_name(dataset):
        raise ValueError(f'dataset={dataset} is no dataset of the hub: prepare it without --download_only')
    import datasets
    import huggingface_hub

    repository, config = HUB_NAMES.get(dataset, (dataset, config))
    folder, marker, downloaded = _downloaded(repository, hub_folder)
    try:
        revision = huggingface_hub.HfApi().dataset_info(repository).sha
        builder = datasets.load_dataset_builder(repository, config, revision=revision)
        prefix = f'hf://datasets/{repository}@{revision}/'
        urls = [url for files in builder.config.data_files.values() for url in files]
        files = [url.removeprefix(prefix) for url in urls]
        options = {'repo_type': 'dataset', 'local_dir': folder, 'allow_patterns': [*files, 'README.md']}
        huggingface_hub.snapshot_download(repository, revision=revision, **options)
    except Exception as error:  # as above
        raise ValueError(_advice(dataset, error)) from error
    missing = [file for file in files if not (folder / file).exists()]
    if missing:
        raise ValueError(f'dataset={dataset}: {folder} lacks {len(missing)} files, as {missing[0]}: run it again')
    write_file(marker, json.dumps(downloaded | {str(config): revision}))
    return folder


def stream_source(stream, description, text_field=None, chat=None, chat_fields=()):
    """The Source of a datasets.IterableDataset, which is read shard by shard. Arguments and errors as in
    find_source()."""
    names, rows, chat_fields = stream.column_names, [], tuple(chat_fields)
    may_be_chat = names is not None and _fields_looked_at(names, chat_fields)
    if names is None or (may_be_chat and (chat or (chat is None and text_field is None))):
        looked_at = stream.select_columns(may_be_chat) if names else stream
        rows = [json.loads(json_of(row)) for row in itertools.islice(looked_at, ROWS_LOOKED_AT)]
        names = names or list(dict.fromkeys(name for row in rows for name in row))
    if chat is None:
        chat = text_field is None and _are_conversations({description['name']: rows})
    if not chat and (lack := _lack_of(text_field or 'text', names)):
        raise ValueError(f'{description["name"]}: {lack}')
    if chat and not has_chat_fields(names, chat_fields):
        raise ValueError(f'{description["name"]}: {_no_conversations(names, chat_fields)}')
    parts = [Part(str(shard), 'stream') for shard in range(stream.num_shards)]
    splits = stream.info.splits or {}
    n_rows = splits[description['split']].num_examples if description['split'] in splits else None
    labeled = chat_fields == PREFERENCES and are_labeled(names)
    source = Source(description, parts, n_rows, text_field, bool(chat), chat_fields, labeled)
    source.line = _how_chats_are_read(source, names, rows) if chat else None
    source.stream = stream.select_columns(source.columns(names)).with_format('arrow')
    return source


def _downloaded(repository, hub_folder):
    """(folder of a repository, file that lists what has been downloaded of it, the {configuration: revision} in that
    file)."""
    folder = Path(hub_folder) / repository.replace('/', '--')
    marker = folder.with_name(f'{folder.name}.json')  # beside the folder: in it, it would be read as data
    return folder, marker, read_json(marker, {str: str}) if marker.exists() else {}


def _advice(dataset, error):
    """An error of the hub's libraries in one line, with what to do."""
    if 'NotFound' in type(error).__name__ or 'Gated' in type(error).__name__ or isinstance(error, ValueError):
        return f'dataset={dataset}: not on the Hugging Face hub (--source_config, --source_split): {one_line(error)}'
    command = f'`python prepare_data.py --dataset={dataset} --download_only`'
    return f'the Hugging Face hub cannot be reached ({one_line(error)}): first {command} where there is a network'
