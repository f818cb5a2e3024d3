"""
Where text comes from: the standard library, files and folders, datasets saved to disk, streams of the datasets library.

    source = find_source('stdlib')                      # what it is: its parts, their sizes, a fingerprint
    for unit in units(source): ...                      # half a MB of it at a time, in order, for one worker
    for unit in units(source, start=unit.next): ...     # go on behind a unit

A text file is one document; so is each row of a .jsonl, .parquet or .arrow file. Memory is bounded: units() hands out
stretches of files, or a few rows. Reading the stretches and parsing them is left to documents(), which runs in workers.
"""

import hashlib
import json
import os
import re
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

UNIT_BYTES = 1 << 19  # what a worker gets at a time: 50 ms to tokenize, below 1 ms to hand over
HEAD_BYTES = 1 << 16  # the start of a document, by which a hash chooses its split; no piece of a text is shorter
ROWS_AT_ONCE = 128  # of columnar files: half a MB where a document has 4 kB
SAMPLES, SAMPLE_BYTES = 16, 1 << 16  # of a file's content for the fingerprint; files up to 1 MB are covered entirely

# Left out of the standard library: tests, demonstrations, other people's packages, tables that scripts wrote, and what
# not every Python from 3.10 to 3.13 has.
STDLIB_SKIPPED_FOLDERS = {'test', 'tests', 'idlelib', 'turtledemo', 'site-packages', 'dist-packages', '__pycache__'}
STDLIB_SKIPPED_FOLDERS |= {'encodings', 'pydoc_data', 'lib2to3', 'distutils', 'ensurepip'}
STDLIB_SKIPPED_FILES = re.compile(r'_sysconfigdata.*|(site|user)customize\.py')  # written for one machine


class Part(NamedTuple):
    """A stretch of a source that is read in one go."""

    path: str  # of a stream: the number of its shard
    kind: str  # 'text', 'jsonl', 'parquet', 'arrow', 'stream'
    start: int = 0  # of a text file: first byte, and the one behind the last
    end: int = 0
    split: str | None = None  # where it is settled beforehand


class Piece(NamedTuple):
    """A document, a stretch of a long one, or lines of JSON: bytes, or where they lie in a file."""

    origin: str  # the file, also for messages
    length: int
    data: bytes | None = None  # None = to be read from the file
    start: int = 0
    document_start: int = 0
    ends_document: bool = True
    split: str | None = None
    is_jsonl: bool = False

    def read(self):
        """Its bytes."""
        return _read_stretch(self.origin, self.start, self.length) if self.data is None else self.data

    def head_of(self, document):
        """The first bytes of the document that `document` is a stretch of."""
        if self.start != self.document_start and not self.is_jsonl:
            # 3 bytes more, for a character that is cut off would be mended to another.
            document = _mended(_read_stretch(self.origin, self.document_start, HEAD_BYTES + 3))
        return document[:HEAD_BYTES]


class Unit(NamedTuple):
    pieces: list
    work: int  # bytes read, rows for a stream: the progress bar adds them up to source.total
    next: tuple  # (part, offset) at which the next unit starts


@dataclass
class Source:
    """What find_source found. `description` goes into meta.json; its 'sha256' changes when the source does."""

    description: dict
    parts: list
    total: int | None  # bytes, rows for a stream; None = not known
    text_field: str = 'text'
    skipped: list = field(default_factory=list)  # 'file: reason'
    stream: object = None  # datasets.IterableDataset


# --- finding a source -------------------------------------------------------------------------------------------------


def find_source(dataset, text_field='text', split='train', tail_fraction=None):
    """The Source that `dataset` names: 'stdlib', or the path of a file, a folder, or a folder written by save_to_disk.

    split: which one of the saved folder. tail_fraction: cut a text file in two, so that its end is the split 'val'.
    Raises FileNotFoundError when there is no such thing, and ValueError when there is nothing to read in it.
    """
    if dataset == 'stdlib':
        root = Path(sysconfig.get_path('stdlib'))
        version = '.'.join(map(str, sys.version_info[:3]))
        return _files_source(f"Python {version}'s standard library", root, stdlib_files(root), text_field)
    path = Path(dataset)
    if path.is_dir() and ((path / 'dataset_dict.json').exists() or (path / 'state.json').exists()):
        return _files_source(dataset, path, _saved_files(path, split), text_field)
    if path.is_dir():
        files = sorted(file for file in path.rglob('*') if not file.is_dir())
        files = [file for file in files if not any(name.startswith('.') for name in file.relative_to(path).parts)]
        if not files:
            raise FileNotFoundError(f'dataset={dataset}: this folder holds no files')
        return _files_source(dataset, path, files, text_field)
    if path.exists():
        return _files_source(dataset, path.parent, [path], text_field, tail_fraction)
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
    kinds = {'.jsonl': 'jsonl', '.ndjson': 'jsonl', '.parquet': 'parquet', '.arrow': 'arrow'}
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


def _files_source(name, root, files, text_field, tail_fraction=None):
    """A Source of local files; those that cannot be read are left out, and named."""
    parts, skipped = [], []
    digest = hashlib.sha256()
    for file in files:
        kind = kind_of(file)
        try:
            size, start, end, content = _fingerprint(file)
        except OSError as error:
            skipped.append(f'{file}: {error.strerror}')
            continue
        problem = _problem_with(kind, start, end)
        if problem and size:
            skipped.append(f'{file}: {problem}')
        elif size:
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
    return Source(description, parts, description['bytes'], text_field, skipped)


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
    if kind in ('text', 'jsonl'):
        return 'binary, it holds zero bytes' if b'\0' in start[:8192] else None
    if kind == 'parquet':
        return None if start[:4] == b'PAR1' == end[-4:] else 'damaged: parquet begins and ends with PAR1'
    return None if start[:4] == b'\xff\xff\xff\xff' else 'not a stream of Arrow record batches'


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


def stream_source(stream, description, text_field):
    """The Source of a datasets.IterableDataset; it reads one shard, usually one file of the hub, after the other.

    description: as Source has it. Raises ValueError when the text field is missing.
    """
    check_text_field(description['name'], stream.column_names or list(next(iter(stream))), text_field)
    parts = [Part(str(shard), 'stream') for shard in range(stream.num_shards)]
    splits = stream.info.splits or {}
    n_rows = splits[description['split']].num_examples if description['split'] in splits else None
    return Source(
        description, parts, n_rows, text_field, stream=stream.select_columns([text_field]).with_format('arrow')
    )


# --- reading ----------------------------------------------------------------------------------------------------------


def units(source, start=(0, 0)):
    """Yield the Units of a source in order, from the position `start`: a Unit's `next`. Memory: a few MB."""
    pieces, size, work = [], 0, 0
    for number in range(start[0], len(source.parts)):
        part = source.parts[number]
        first_offset = start[1] if number == start[0] else 0
        for new_pieces, next_offset, new_work in READERS[part.kind](source, part, first_offset):
            pieces += new_pieces
            size += sum(piece.length for piece in new_pieces)
            work += new_work
            if size >= UNIT_BYTES:
                yield Unit(pieces, work, (number, next_offset))
                pieces, size, work = [], 0, 0
    if pieces:
        yield Unit(pieces, work, (len(source.parts), 0))


# A reader yields (pieces, offset behind them, work done). It starts at an offset that it once yielded, or at 0.


def _read_stretch(path, start, length):
    with open(path, 'rb') as file:
        file.seek(start)
        return file.read(length)


def _read_text(source, part, offset):
    """A text file, in pieces that end where words do. Offset: bytes from part.start."""
    position = part.start + offset
    while position < part.end:
        length = part.end - position
        if length > UNIT_BYTES:
            window = position + UNIT_BYTES - CUT_WINDOW
            length = window + cut_point(_read_stretch(part.path, window, CUT_WINDOW)) - position
        is_last = position + length == part.end
        piece = Piece(part.path, length, None, position, part.start, is_last, part.split)
        position += length
        yield [piece], position - part.start, length


def _read_jsonl(source, part, offset):
    """Whole lines, about a unit of them at a time. Offset: bytes."""
    with open(part.path, 'rb') as file:
        check_text_field(part.path, _fields_of_first_row(file), source.text_field)
        while offset < part.end:
            file.seek(offset + UNIT_BYTES)
            file.readline()
            length = min(file.tell(), part.end) - offset
            yield [Piece(part.path, length, None, offset, is_jsonl=True)], offset + length, length
            offset += length


def _fields_of_first_row(file):
    """Field names of the first line of a .jsonl file that is a JSON object."""
    for line in file.readlines(UNIT_BYTES):
        try:
            row = json.loads(line)
        except ValueError:  # left out when it is read, too
            continue
        if isinstance(row, dict):
            return row
    raise ValueError(f'{file.name}: expected a JSON object on each line, found none in the first {UNIT_BYTES:,} bytes')


def _read_parquet(source, part, offset):
    """Rows, streamed: a row group can be the whole file. Offset: rows."""
    import pyarrow.parquet

    # pre_buffer=False: else the column of a whole row group is read at once, whatever buffer_size says.
    with pyarrow.parquet.ParquetFile(part.path, buffer_size=UNIT_BYTES, pre_buffer=False) as file:
        check_text_field(part.path, file.schema_arrow.names, source.text_field)
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        n_rows = sum(group.num_rows for group in groups)
        n_bytes = sum(group.total_byte_size for group in groups)
        row = first = 0  # the row group that holds row `offset`, and its first row
        while first < len(groups) and row + groups[first].num_rows <= offset:
            row += groups[first].num_rows
            first += 1
        batches = file.iter_batches(
            _rows_per_unit(n_rows, n_bytes), range(first, len(groups)), [source.text_field], use_threads=False
        )
        yield from _rows(batches, row, offset, part.path, part.end / max(1, n_rows))


def _read_arrow(source, part, offset):
    """Rows of a stream of Arrow record batches, read rather than mapped: mapped pages count as memory. Offset: rows."""
    import pyarrow

    with pyarrow.OSFile(part.path) as file, pyarrow.ipc.open_stream(file) as stream:
        check_text_field(part.path, stream.schema.names, source.text_field)
        columns = (batch.select([source.text_field]) for batch in stream)
        position = 0
        for pieces, row, _ in _rows((piece for batch in columns for piece in _slices(batch)), 0, offset, part.path, 0):
            yield pieces, row, file.tell() - position
            position = file.tell()


def _read_stream(source, part, offset):
    """Rows of one shard of a dataset of the hub. Offset: rows."""
    shard = source.stream.shard(num_shards=len(source.parts), index=int(part.path))
    tables = (shard.skip(offset) if offset else shard).iter(batch_size=ROWS_AT_ONCE)
    batches = (batch for table in tables for batch in table.to_batches())
    yield from _rows(batches, offset, offset, f'{source.description["name"]}, shard {part.path}', 1)


READERS = {
    'text': _read_text,
    'jsonl': _read_jsonl,
    'parquet': _read_parquet,
    'arrow': _read_arrow,
    'stream': _read_stream,
}


def _rows_per_unit(n_rows, n_bytes):
    """How many rows are about a unit; no more than ROWS_AT_ONCE, for equal texts take no bytes in a parquet file."""
    return max(1, min(ROWS_AT_ONCE, UNIT_BYTES * n_rows // max(1, n_bytes)))


def _slices(batch):
    """A record batch in slices of about a unit."""
    step = _rows_per_unit(len(batch), batch.nbytes)
    return (batch.slice(row, step) for row in range(0, len(batch), step))


def _rows(batches, row, offset, origin, work_per_row):
    """What a reader yields, from row `offset` on, of one-column record batches; the first batch begins at `row`."""
    import pyarrow

    batches = iter(batches)
    while True:
        try:
            batch = next(batches, None)
        except (ValueError, OSError) as error:  # pyarrow's and the network's errors are among them
            raise OSError(f'{origin}: cannot be read behind row {row}: {" ".join(str(error).split())[:300]}') from error
        if batch is None:
            return
        column = batch.column(0).slice(max(0, offset - row))
        row += len(batch)
        if not len(column):
            continue
        if pyarrow.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if not (pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)):
            raise ValueError(f'{origin}: the field {batch.schema.names[0]!r} holds {column.type}, not text')
        rows = column.cast(pyarrow.large_binary()).to_pylist()  # without decoding here what the workers decode
        yield [Piece(origin, len(data or b''), data or b'') for data in rows], row, len(rows) * work_per_row


# --- documents --------------------------------------------------------------------------------------------------------

CUT_WINDOW = 4096
LAST_WORD_END = re.compile(rb'.*[A-Za-z0-9](?=[ \n])', re.DOTALL)


def cut_point(data):
    """
    Where to cut a text that goes on behind `data`, so that both sides give the tokens of the whole: behind the last
    letter or digit that a space or line break follows. There, each of tiktoken's patterns begins a new word.

    Where the last 4 kB have no such place, behind their last line break, or else before the last character.
    """
    window = max(0, len(data) - CUT_WINDOW)
    word = LAST_WORD_END.match(data, window)
    if word:
        return word.end()
    line_end = data.rfind(b'\n', window + 1) + 1
    if line_end:
        return line_end
    cut = len(data) - 1
    while cut > max(1, len(data) - 4) and data[cut] & 0xC0 == 0x80:  # a byte inside a character
        cut -= 1
    return max(1, cut)


def cut_up(data, limit):
    """Pieces of a document, each at most `limit` bytes."""
    start = 0
    while len(data) - start > limit:
        end = start + cut_point(data[start : start + limit])
        yield data[start:end]
        start = end
    yield data[start:]


def documents(piece, text_field, notes):
    """Yield the documents that a Piece holds, or the stretch of one: bytes, not empty, valid UTF-8.

    notes: a Counter; what had to be mended or left out is counted in it, under 'file: what'. Raises OSError for a file
    that has become shorter.
    """
    bytes_read = piece.read()
    if len(bytes_read) != piece.length:
        raise OSError(f'{piece.origin}: became shorter while it was read')
    for data in _rows_of_jsonl(bytes_read, text_field, notes, piece.origin) if piece.is_jsonl else [bytes_read]:
        mended = _mended(data)
        if mended is not data:
            notes[f'{piece.origin}: not UTF-8, what is no character became U+FFFD'] += 1
        if mended:
            yield mended
        else:
            notes[f'{piece.origin}: rows without text, left out'] += 1


def _mended(data):
    """The same bytes when they are UTF-8; else with U+FFFD for what is no character."""
    try:
        data.decode()
        return data
    except UnicodeDecodeError:
        return data.decode('utf-8', 'replace').encode()


def _rows_of_jsonl(lines, text_field, notes, origin):
    """The text of each line as bytes; b'' where it has none."""
    for line in lines.splitlines():
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            notes[f'{origin}: lines that are not JSON, left out'] += 1
            continue
        text = row.get(text_field) if isinstance(row, dict) else None
        yield text.encode('utf-8', 'replace') if isinstance(text, str) else b''
