"""
Where text comes from: the standard library, files and folders, datasets saved to disk, or the Hugging Face hub.

    source = find_source('my_texts/')                                 # its parts, their sizes, a fingerprint
    source = stream_source(*open_stream('fineweb-10BT', None, 'train', 'data/hub'))
    download('fineweb-10BT', None, 'data/hub')                        # from here on, open_stream reads these files

documents.py reads what is found here. A source of conversations (source.chat) has rows for conversations.py.
"""

import hashlib
import importlib.util
import io
import json
import os
import re
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from runtime.errors import one_line
from runtime.files import sha256_of, write_file
from text.conversations import CHAT_FIELDS, NO_CONVERSATIONS, has_chat_fields, holds_conversations

FIRST_BYTES = 1 << 19  # of a file with rows, in which the first is looked for
SAMPLES, SAMPLE_BYTES = 16, 1 << 16  # of a file's content for the fingerprint; files up to 1 MB are covered entirely

FILE_KINDS = {  # how a file is read, by the ending of its name; any other is text
    '.jsonl': 'jsonl',
    '.ndjson': 'jsonl',
    '.json': 'json',
    '.yaml': 'yaml',
    '.yml': 'yaml',
    '.parquet': 'parquet',
    '.arrow': 'arrow',
}

COMPRESSED = {'.gz': 'gzip', '.zst': 'zstd'}  # around text and lines of JSON, which .json.gz holds as a rule

# Left out of the standard library: tests, demonstrations, other people's packages, tables that scripts wrote, and what
# not every Python from 3.10 to 3.13 has.
STDLIB_SKIPPED_FOLDERS = {'test', 'tests', 'idlelib', 'turtledemo', 'site-packages', 'dist-packages', '__pycache__'}
STDLIB_SKIPPED_FOLDERS |= {'encodings', 'pydoc_data', 'lib2to3', 'distutils', 'ensurepip'}
STDLIB_SKIPPED_FILES = re.compile(r'_sysconfigdata.*|(site|user)customize\.py')  # written for one machine

HUB_NAMES = {  # short name -> (repository, configuration)
    'fineweb-10BT': ('HuggingFaceFW/fineweb', 'sample-10BT'),
    'fineweb-100BT': ('HuggingFaceFW/fineweb', 'sample-100BT'),
    'fineweb-edu-10BT': ('HuggingFaceFW/fineweb-edu', 'sample-10BT'),
}


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
    skipped: list = field(default_factory=list)  # 'file: reason', and first how many are hidden or empty
    stream: object = None  # datasets.IterableDataset

    def columns(self, names):
        """Those of a columnar file's or stream's columns that are read."""
        return [name for name in CHAT_FIELDS if name in names] if self.chat else fields_of(self.text_field or 'text')


# --- finding a source -------------------------------------------------------------------------------------------------


def find_source(dataset, text_field=None, split='train', tail_fraction=None, chat=None, dedup=False):
    """The Source that `dataset` names: 'stdlib', or the path of a file, a folder, or a folder written by save_to_disk.

    text_field: of rows, or a template of fields_of(); None = 'text', and all strings of a row of .jsonl without one.
    split: which one of the saved folder. tail_fraction: cut a text file in two, so that its end is the split 'val'.
    chat: whether rows are read as conversations; None = if the first row is one, and neither text_field nor a field
    'text' says otherwise. dedup: leave out text files that are the same as one before.
    Raises FileNotFoundError, and ValueError when there is nothing to read in it, or when rows lack the field.
    """
    name, path = dataset, Path(dataset)
    n_hidden = 0
    if dataset == 'stdlib':
        root = Path(sysconfig.get_path('stdlib'))
        files = stdlib_files(root)
        name = f"Python {'.'.join(map(str, sys.version_info[:3]))}'s standard library"
    elif (path / 'dataset_dict.json').exists() or (path / 'state.json').exists():
        root, files = path, _saved_files(path, split)
    elif path.is_dir():
        root = path
        files, n_hidden = _files_below(path)
    elif path.exists():
        root, files = path.parent, [path]
    else:
        raise FileNotFoundError(
            f'dataset={dataset}: there is no such file or folder; expected stdlib, synthetic, a file, a folder, '
            f'{", ".join(HUB_NAMES)}, or OWNER/NAME on the Hugging Face hub'
        )
    source = _files_source(name, root, files, text_field, tail_fraction, chat, dedup)
    n_empty = len(files) - source.description['files'] - len(source.skipped)
    if path.is_dir() and (n_hidden or n_empty):
        source.skipped.insert(0, f'{n_hidden:,} hidden and {n_empty:,} empty files')
    return source


def stdlib_files(root):
    """Python's own modules under the folder `root`, sorted, without tests and generated tables."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in STDLIB_SKIPPED_FOLDERS]
        files += [Path(folder, name) for name in names if name.endswith('.py') and not STDLIB_SKIPPED_FILES.match(name)]
    if not files:
        raise FileNotFoundError(f'dataset=stdlib: this Python has no sources in {root}; take another --dataset')
    return sorted(files)


def _files_below(folder):
    """(the files in a folder and below, sorted, without hidden ones; how many of those there are)."""
    found = sorted(file for file in folder.rglob('*') if not file.is_dir())
    files = [file for file in found if not any(name.startswith('.') for name in file.relative_to(folder).parts)]
    if not files:
        raise FileNotFoundError(f'dataset={folder}: this folder holds no files, or hidden ones alone')
    return files, len(found) - len(files)


def kind_of(path):
    """How a file is read: a kind of Part, by the file's name."""
    path = Path(path)
    if path.suffix.lower() in COMPRESSED:
        return 'jsonl' if kind_of(path.with_suffix('')) in ('json', 'jsonl') else 'text'
    return FILE_KINDS.get(path.suffix.lower(), 'text')


def open_file(path):
    """A file to be read as bytes, uncompressed. Reading a damaged one raises OSError."""
    codec = COMPRESSED.get(Path(path).suffix.lower())
    if codec is None:
        return open(path, 'rb')
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), codec))


def fields_of(text_field):
    """The fields of a row that text_field names: one, or those in the {braces} of a template."""
    return re.findall(r'\{(\w+)\}', text_field) or [text_field]


def _saved_files(folder, split):
    """The .arrow files of a folder written by datasets' save_to_disk, in order."""
    if (folder / 'dataset_dict.json').exists():
        splits = json.loads((folder / 'dataset_dict.json').read_text(encoding='utf-8'))['splits']
        if split not in splits:
            raise ValueError(f'dataset={folder}: has no --source_split={split}; it has: {", ".join(splits)}')
        folder = folder / split
    return sorted(folder.glob('data-*.arrow'))


def _files_source(name, root, paths, text_field, tail_fraction, chat, dedup):
    """A Source of local files; those that cannot be read are left out, and named."""
    found, skipped = [], []
    for path in paths:
        try:
            part, sha256, row = _inspect(path)
        except (OSError, ValueError) as error:
            skipped.append(f'{path}: {getattr(error, "strerror", error)}')
        else:
            found += [(part, sha256, row)] if part.end else []
    if chat is None:
        first_row = next((row for _, _, row in found if row is not None), {})
        chat = _takes_conversations(first_row, text_field)

    parts, first_of = [], {}
    digest = hashlib.sha256()
    for part, sha256, row in found:
        if dedup and part.kind == 'text':
            like = first_of.setdefault((part.end, sha256), part.path)  # of equal size and samples
            if like != part.path and sha256_of(like) == sha256_of(part.path):
                skipped.append(f'{part.path}: the same as {like}')
                continue
        has_no_rows = part.kind in ('text', 'yaml')
        if chat and (has_no_rows or (row is not None and not has_chat_fields(row))):
            fields = f'; it has: {", ".join(row)}' if row else ''
            skipped.append(f'{part.path}: {NO_CONVERSATIONS}{fields}')
            continue
        # Rows of .jsonl may lack the field 'text': all their strings are read then.
        if not chat and (part.kind in ('parquet', 'arrow') or (part.kind == 'jsonl' and text_field)):
            check_text_field(part.path, row, text_field or 'text')
        line = f'{Path(part.path).relative_to(root).as_posix()} {part.end} {sha256}\n'
        digest.update(line.encode('utf-8', 'surrogateescape'))
        parts.append(part)
    if not parts:
        raise ValueError(f'dataset={name}: nothing to read in it: {"; ".join(skipped[:3]) or "all files are empty"}')
    n_bytes = sum(part.end for part in parts)
    description = {'name': name, 'files': len(parts), 'bytes': n_bytes, 'sha256': digest.hexdigest()}
    if tail_fraction is not None:
        parts = _cut_tail(parts[0], tail_fraction)
    return Source(description, parts, n_bytes, text_field, chat, skipped)


def _inspect(path):
    """(Part, sha256, {field: value} of the first row or None where it has no rows) of a file, before its text is read.
    Raises OSError or ValueError with the reason for what cannot be read."""
    kind = kind_of(path)
    size, start, end, sha256 = _fingerprint(path)
    if size:
        if Path(path).suffix.lower() in COMPRESSED:
            with open_file(path) as file:
                start = file.read(SAMPLE_BYTES)
        _check_content(kind, start, end)
    return Part(str(path), kind, 0, size), sha256, _first_row(path, kind) if size else None


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


def _check_content(kind, start, end):
    """Raise ValueError with the reason why a file of this kind cannot be read, from its first and last bytes."""
    if kind == 'yaml' and importlib.util.find_spec('yaml') is None:
        raise ValueError('needs PyYAML: pip install pyyaml')
    if kind == 'parquet' and not (start[:4] == b'PAR1' == end[-4:]):
        raise ValueError('damaged: parquet begins and ends with PAR1')
    if kind == 'arrow' and start[:4] != b'\xff\xff\xff\xff':
        raise ValueError('not a stream of Arrow record batches')
    if start[:2] in (b'\xff\xfe', b'\xfe\xff'):
        raise ValueError('UTF-16: convert it with `iconv -f utf-16 -t utf-8`')
    if kind not in ('parquet', 'arrow') and b'\0' in start[:8192]:
        raise ValueError('binary, it holds zero bytes')


def _first_row(path, kind):
    """{field: value} of a file's first row; None where it has no rows. Those of a .json file are its elements, if they
    are conversations. Raises ValueError for a damaged file."""
    if kind in ('parquet', 'arrow'):
        return _fields_of_columns(path, kind)
    if kind == 'jsonl':
        with open_file(path) as file:
            rows = (_object_at_start_of(line) for line in file.readlines(FIRST_BYTES))
        row = next((row for row in rows if row is not None), None)
        if row is None:
            raise ValueError(f'expected a JSON object on each line, found none in the first {FIRST_BYTES:,} bytes')
        return row
    if kind == 'json':
        with open(path, 'rb') as file:
            row = _object_at_start_of(file.read(FIRST_BYTES), in_list=True)
        return row if row is not None and holds_conversations(row) else None
    return None


def _object_at_start_of(data, in_list=False):
    """The JSON object with which some bytes begin, or which is the first of a list; None where there is none."""
    text = data.decode('utf-8-sig', 'replace').lstrip()
    if in_list:
        text = text.removeprefix('[').lstrip()
    try:
        value, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


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
        raise ValueError(f'damaged: {one_line(error)}') from error
    values = {'list': [], 'large_list': [], 'string': '', 'large_string': ''}  # what holds_conversations() asks for
    return {field.name: values.get(str(field.type).partition('<')[0]) for field in schema}


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
        raise ValueError(f'{part.path}: the last {fraction:%} of its {part.end} bytes cannot be the split val')
    return [part._replace(end=cut, split='train'), part._replace(start=cut, split='val')]


def check_text_field(path, fields, text_field):
    """Raise ValueError when there is no such field, with those that there are."""
    for name in fields_of(text_field):
        if name not in fields:
            raise ValueError(f'{path}: has no field {name!r}, choose with --text_field; it has: {", ".join(fields)}')


# --- datasets of the Hugging Face hub ---------------------------------------------------------------------------------


def is_hub_name(dataset):
    """Whether that is a short name, or the OWNER/NAME, of a dataset on the hub rather than a path."""
    folder, _, file = dataset.partition('/')
    is_path = (
        os.path.exists(dataset) or os.path.isdir(folder) or file.endswith(('.txt', '.md', *FILE_KINDS, *COMPRESSED))
    )
    return dataset in HUB_NAMES or (not is_path and re.fullmatch(r'\w[\w.-]*/[\w.-]+', dataset) is not None)


def open_stream(dataset, config, split, hub_folder):
    """(datasets.IterableDataset, description for meta.json) of what is_hub_name accepts. config: None = the only one.
    hub_folder: where download() puts files; they are preferred. Raises ValueError for what the hub cannot give."""
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
    """Fetch the files of a hub dataset, or the rest of them. Returns their folder. Raises as open_stream."""
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


def stream_source(stream, description, text_field=None, chat=None):
    """The Source of a datasets.IterableDataset, which is read shard by shard; the rest is as in find_source."""
    names = stream.column_names
    if names is None or (chat is None and text_field is None and has_chat_fields(names)):
        row = next(iter(stream))
        names = list(row)
        chat = _takes_conversations(row, text_field) if chat is None else chat
    if not chat:
        check_text_field(description['name'], names, text_field or 'text')
    elif not has_chat_fields(names):
        raise ValueError(f'{description["name"]}: {NO_CONVERSATIONS}; it has: {", ".join(names)}')
    parts = [Part(str(shard), 'stream') for shard in range(stream.num_shards)]
    splits = stream.info.splits or {}
    n_rows = splits[description['split']].num_examples if description['split'] in splits else None
    source = Source(description, parts, n_rows, text_field, bool(chat))
    source.stream = stream.select_columns(source.columns(names)).with_format('arrow')
    return source


def _downloaded(repository, hub_folder):
    """(folder of a repository, file that says what has been downloaded of it, {configuration: revision} from that)."""
    folder = Path(hub_folder) / repository.replace('/', '--')
    marker = folder.with_name(f'{folder.name}.json')  # beside the folder: in it, it would be read as data
    return folder, marker, json.loads(marker.read_text(encoding='utf-8')) if marker.exists() else {}


def _advice(dataset, error):
    """One line for an error of the hub's libraries."""
    if 'NotFound' in type(error).__name__ or 'Gated' in type(error).__name__ or isinstance(error, ValueError):
        return f'dataset={dataset}: not on the Hugging Face hub (--source_config, --source_split): {one_line(error)}'
    command = f'`python prepare_data.py --dataset={dataset} --download_only`'
    return f'the Hugging Face hub cannot be reached ({one_line(error)}): first {command} where there is a network'
