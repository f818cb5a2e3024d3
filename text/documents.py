"""
Reads the documents of a source that sources.py has found, one unit at a time.

    for unit in units_of(source): ...                      # about a MB each, in order, every unit for one worker
    for unit in units_of(source, start=unit.next): ...     # continue after a unit
    for document in documents_of(piece, ...): ...       # in a worker, for each of a unit's pieces: bytes

A text file is one document. So is each row of a .jsonl, .csv, .parquet or .arrow file, and each .json or .yaml file or,
if the file is a list, each of its elements. A unit is a stretch of a file or a few rows; documents_of() parses it.
"""

import collections
import io
import itertools
import json
import re
from pathlib import Path
from typing import NamedTuple

from system.errors import one_line
from text.chat_rows import labeled_of, reason_against_text, row_of
from text.sources import (
    COMPRESSED,
    IN_BRACES,
    LARGEST_YAML,
    arrow_batches,
    check_holds_text,
    fields_of,
    is_template,
    json_of,
    line_of,
    open_file,
    reason_of,
    rows_of_content,
    table_rows,
    yaml_contents,
)

UNIT_BYTES = 1 << 20  # the work that a worker gets at a time; tokenizing it takes 10 ms
PIECE_BYTES = 1 << 19  # read at a time; long texts are cut after about so much, so it decides where stretches begin
HEAD_BYTES = 1 << 16  # the start of a document, whose hash chooses the split; a text's pieces are never shorter
ROWS_AT_ONCE = 128  # of columnar files: half a MB if documents have 4 kB
WITHOUT_OTHER = 'rows with a label whose prompt has no more answers with the opposite one, to be a pair'
JSON_BYTES = 1 << 24  # .json files up to this size are parsed as a whole, longer lists element by element


class Piece(NamedTuple):
    """A document, a stretch of a long document, or rows to be parsed: its bytes, or where they are in a file."""

    origin: str  # the file, also for messages
    length: int
    data: bytes | None = None  # None = to be read from the file
    start: int = 0
    document_start: int = 0
    ends_document: bool = True
    split: str | None = None
    kind: str = 'text'  # 'text', 'jsonl', 'json', 'yaml', 'csv', 'row' (of a columnar file, as JSON)

    def head_of(self, document=None):
        """The first bytes of the whole document to which this piece belongs. document: one of the piece's documents;
        None = the piece is a stretch of a text file."""
        if document is None or (self.kind == 'text' and self.start != self.document_start):
            end = self.start + self.length - self.document_start
            # 3 bytes more, because a character that is cut off would be replaced by another.
            document = _mended(_read_stretch(self.origin, self.document_start, min(HEAD_BYTES + 3, end)))
        return document[:HEAD_BYTES]


class TextUnit(NamedTuple):
    pieces: list
    work: int  # bytes read, or rows of a stream; the progress bar sums them up to source.total
    next: tuple  # (part, offset) where the next unit starts


# --- reading ----------------------------------------------------------------------------------------------------------


def units_of(source, start=(0, 0)):
    """Yield the TextUnits of a source in order. start: a TextUnit's `next`, to continue after it. Takes a few MB."""
    pieces, size, work = [], 0, 0
    for number in range(start[0], len(source.parts)):
        part = source.parts[number]
        first_offset = start[1] if number == start[0] else 0
        is_packed = Path(part.path).suffix.lower() in COMPRESSED and part.kind != 'csv'
        reader = _read_compressed if is_packed else READERS[part.kind]
        for new_pieces, next_offset, new_work in reader(source, part, first_offset):
            pieces += new_pieces
            size += sum(piece.length for piece in new_pieces)
            work += new_work
            if size >= UNIT_BYTES:
                yield TextUnit(pieces, work, (number, next_offset))
                pieces, size, work = [], 0, 0
    if pieces:
        yield TextUnit(pieces, work, (len(source.parts), 0))


# A reader yields (pieces, the offset after them, work done). It starts at 0 or at an offset that it once yielded.


def _read_stretch(path, start, length):
    with open_file(path) as file:
        if start and Path(path).suffix.lower() not in COMPRESSED:
            file.seek(start)
        elif start:  # from compressed files only beginnings are read, so this only skips a BOM
            file.read(start)
        return file.read(length)


def _read_text(source, part, offset):
    """A text file, in pieces that end at the ends of words. Offset: bytes from part.start."""
    position = part.start + offset
    while position < part.end:
        length = part.end - position
        if length > PIECE_BYTES:
            window = position + PIECE_BYTES - CUT_WINDOW
            length = window + cut_point(_read_stretch(part.path, window, CUT_WINDOW)) - position
        is_last = position + length == part.end
        piece = Piece(part.path, length, None, position, part.start, is_last, part.split)
        position += length
        yield [piece], position - part.start, length


def _read_jsonl(source, part, offset):
    """Whole lines, about PIECE_BYTES of them at a time. Offset: bytes."""
    with open(part.path, 'rb') as file:
        while offset < part.end:
            file.seek(offset + PIECE_BYTES)
            try:
                line_of(file)
            except ValueError as error:
                raise ValueError(f'{part.path}: {error}, behind byte {offset + PIECE_BYTES:,}') from None
            length = min(file.tell(), part.end) - offset
            yield [Piece(part.path, length, None, offset, kind='jsonl')], offset + length, length
            offset += length


def _read_compressed(source, part, offset):
    """As _read_text and _read_jsonl, for a compressed file. Offset: bytes, uncompressed."""
    import pyarrow

    raw = pyarrow.OSFile(part.path)
    codec, position, work, data = COMPRESSED[Path(part.path).suffix.lower()], 0, 0, b''
    offset = max(offset, part.start)
    with raw, io.BufferedReader(pyarrow.CompressedInputStream(raw, codec), PIECE_BYTES) as file:
        try:
            while position < offset:
                position += len(file.read(min(PIECE_BYTES, offset - position)))
            while data := data + file.read(PIECE_BYTES + 1 - len(data)):
                length = len(data)
                if part.kind == 'jsonl':
                    data += b'' if data.endswith(b'\n') else line_of(file)
                    length = len(data)
                elif length > PIECE_BYTES:
                    window = PIECE_BYTES - CUT_WINDOW
                    length = window + cut_point(data[window:PIECE_BYTES])
                is_last = part.kind == 'jsonl' or (length == len(data) and not file.peek(1))
                piece = Piece(part.path, length, data[:length], position, part.start, is_last, part.split, part.kind)
                position, data = position + length, data[length:]
                yield [piece], position, raw.tell() - work
                work = raw.tell()
        except (OSError, ValueError) as error:
            raise OSError(f'{part.path}: damaged behind byte {position:,} of its text: {reason_of(error)}') from error


def _read_whole(source, part, offset):
    """A file in one piece. Offset: 0 or the whole size."""
    if not offset:
        yield [Piece(part.path, part.end, kind=part.kind)], part.end, part.end


def _read_json(source, part, offset):
    """A file in one piece, or a long list element by element. Offset: 0 or the whole size, or number of elements."""
    with open(part.path, encoding='utf-8-sig', errors='replace') as file:
        if part.end <= JSON_BYTES or file.read(HEAD_BYTES).lstrip()[:1] != '[':
            yield from _read_whole(source, part, offset)
            return
        file.seek(0)
        for number, element in enumerate(_elements(file), 1):
            if number > offset:
                data = f'[{element}]'.encode('utf-8', 'replace')
                yield [Piece(part.path, len(data), data, kind='json')], number, len(data)


def _elements(file):
    """The text of each element of the list in a JSON file. A broken rest comes last, as an element that is not JSON."""
    text, at_end, decoder = file.read(PIECE_BYTES).lstrip().removeprefix('['), False, json.JSONDecoder()
    while True:
        text = text.lstrip(' \t\r\n,')
        if text.startswith(']'):
            return
        try:
            end = decoder.raw_decode(text)[1]
        except (ValueError, RecursionError):  # incomplete, or not JSON
            end = len(text)
        if end < len(text):  # not at the very end of what was read, where a number might continue
            yield text[:end]
            text = text[end:]
        elif not at_end:
            more = file.read(max(PIECE_BYTES, len(text)))  # doubling bounds what is parsed repeatedly
            text += more
            at_end = not more
        else:
            yield text[:HEAD_BYTES] + '?'
            return


def _read_csv(source, part, offset):
    """Rows of a table, about PIECE_BYTES of them at a time. Offset: rows."""
    is_packed = Path(part.path).suffix.lower() in COMPRESSED
    with open_file(part.path) if is_packed else open(part.path, 'rb', buffering=0) as file:
        rows = table_rows(file if is_packed else io.BufferedReader(file), part.path)
        names = next(rows)
        wanted = [number for number, name in enumerate(names) if name in source.columns(names)]
        pieces, size, row, position = [], 0, 0, 0
        try:
            for row, values in enumerate(rows, 1):
                if row <= offset:
                    continue
                if len(values) == len(names):
                    values = {names[number]: values[number] for number in wanted}
                data = json.dumps(values, ensure_ascii=False).encode('utf-8', 'surrogateescape')
                pieces.append(Piece(part.path, len(data), data, kind='csv'))
                size += len(data)
                if size > PIECE_BYTES:
                    work = 0 if is_packed else file.tell() - position
                    yield pieces, row, work
                    pieces, size, position = [], 0, position + work
        except (ValueError, OSError) as error:
            raise OSError(f'{part.path}: damaged behind row {row}: {reason_of(error)}') from error
        yield pieces, row, part.end - position


def _read_parquet(source, part, offset):
    """Rows, streamed, since one row group may be the whole file. Offset: rows."""
    import pyarrow.parquet

    # Without pre_buffer=False, a column of a whole row group is read at once, whatever buffer_size says.
    with pyarrow.parquet.ParquetFile(part.path, buffer_size=PIECE_BYTES, pre_buffer=False) as file:
        n_rows = file.metadata.num_rows
        n_bytes = sum(file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups))
        columns = source.columns(file.schema_arrow.names)
        batches = file.iter_batches(_rows_per_piece(n_rows, n_bytes), columns=columns, use_threads=False)
        yield from _rows(source, batches, offset, part.path, part.end / max(1, n_rows))


def _read_arrow(source, part, offset):
    """Rows of Arrow record batches. The file is read and not mapped, as mapped pages count as memory. Offset: rows."""
    import pyarrow

    with pyarrow.OSFile(part.path) as file:
        schema, batches = arrow_batches(file)
        columns = source.columns(schema.names)
        slices = itertools.chain.from_iterable(_slices(batch.select(columns)) for batch in batches)
        position = 0
        for pieces, row, _ in _rows(source, slices, offset, part.path, 0):
            yield pieces, row, file.tell() - position
            position = file.tell()


def _read_stream(source, part, offset):
    """Rows of one shard of a dataset of the hub. Offset: rows."""
    shard = source.stream.shard(num_shards=len(source.parts), index=int(part.path))
    batches = itertools.chain.from_iterable(table.to_batches() for table in shard.iter(batch_size=ROWS_AT_ONCE))
    yield from _rows(source, batches, offset, f'{source.description["name"]}, shard {part.path}', 1)


READERS = {
    'text': _read_text,
    'jsonl': _read_jsonl,
    'json': _read_json,
    'yaml': _read_whole,
    'csv': _read_csv,
    'parquet': _read_parquet,
    'arrow': _read_arrow,
    'stream': _read_stream,
}


def _rows_per_piece(n_rows, n_bytes):
    """How many rows have about PIECE_BYTES; at most ROWS_AT_ONCE, since equal texts take no bytes in a parquet file."""
    return max(1, min(ROWS_AT_ONCE, PIECE_BYTES * n_rows // max(1, n_bytes)))


def _slices(batch):
    """A record batch in slices of about PIECE_BYTES."""
    step = _rows_per_piece(len(batch), batch.nbytes)
    return (batch.slice(row, step) for row in range(0, len(batch), step))


def _rows(source, batches, offset, origin, work_per_row):
    """What a reader yields for record batches, from row `offset` on."""
    batches, row = iter(batches), 0
    while True:
        try:
            batch = next(batches, None)
            if batch is not None:
                batch.validate(full=True)  # else damage shows only in the values that are read, or not at all
        except (ValueError, OSError, MemoryError) as error:
            # These include errors of pyarrow and the network; a damaged file may ask for absurd amounts of memory.
            raise OSError(f'{origin}: cannot be read behind row {row}: {one_line(error, 300)}') from error
        if batch is None:
            return
        wanted = batch.slice(max(0, offset - row))
        row += len(batch)
        if len(wanted):
            as_rows = source.chat or is_template(source.text_field)
            kind, rows = ('row', _as_json_lines(wanted)) if as_rows else ('text', _as_texts(wanted, origin))
            yield [Piece(origin, len(data), data, kind=kind) for data in rows], row, len(rows) * work_per_row


def _as_json_lines(batch):
    """Each row of a record batch as JSON, encoded as bytes."""
    return [json_of(row).encode('utf-8', 'surrogateescape') for row in batch.to_pylist()]


def _as_texts(batch, origin):
    """The text in each row of a record batch with one column, as bytes. Raises ValueError if the column is not text."""
    import pyarrow

    column = batch.column(0)
    check_holds_text(origin, batch.schema.names[0], column.type)
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pyarrow.types.is_null(column.type):  # no row of this file has a value
        return [b''] * len(column)
    rows = column.cast(pyarrow.large_binary()).to_pylist()  # bytes, since the workers decode them
    return [data or b'' for data in rows]


# --- documents --------------------------------------------------------------------------------------------------------

CUT_WINDOW = 4096
LAST_WORD_END = re.compile(rb'.*[A-Za-z0-9](?=[ \n])', re.DOTALL)


def cut_point(data):
    """Where to cut `data`, the beginning of a longer text, so that both sides together give the same tokens as the
    whole. That is after the last letter or digit that is followed by a space or line break, where all of tiktoken's
    patterns begin a new word. If the last 4 kB have no such place, after their last line break, or else before the last
    character."""
    window = max(0, len(data) - CUT_WINDOW)
    word = LAST_WORD_END.match(data, window)
    if word:
        return word.end()
    line_end = data.rfind(b'\n', window + 1) + 1
    if line_end:
        return line_end
    cut = len(data) - 1
    while cut > max(1, len(data) - 4) and data[cut] & 0xC0 == 0x80:  # inside of a character
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


def documents_of(piece, text_field, notes, conversation_of=None, any_row=False):
    """Yield the documents in a Piece, or the stretch of a document that it is: bytes, not empty, valid UTF-8.

    notes: a Counter, in which anything mended or left out is counted under 'file: what'. conversation_of: for a source
    of conversations, a function from a row to the document; it raises ValueError with the reason for rows that are to
    be left out. any_row: learn YAML as text even if it looks like something else.
    Raises OSError if the file has become shorter.
    """
    bytes_read = _read_stretch(piece.origin, piece.start, piece.length) if piece.data is None else piece.data
    if len(bytes_read) != piece.length:
        raise OSError(f'{piece.origin}: became shorter while it was read')
    if piece.kind == 'text':
        mended = _mended(bytes_read)
        if mended is not bytes_read:
            lost = mended.count(UNKNOWN) - bytes_read.count(UNKNOWN)
            notes[f'{piece.origin}: not UTF-8 (is it latin-1?), characters that became U+FFFD'] += lost
        documents = [mended]
    else:
        documents = _texts(piece, bytes_read, text_field, notes, conversation_of, any_row)
    for document in documents:
        if document:
            yield document
        else:
            notes[f'{piece.origin}: rows without text, left out'] += 1


UNKNOWN = '\ufffd'.encode()


def _mended(data):
    """The data as valid UTF-8, with U+FFFD for bytes that are not; `data` itself if it is valid."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return data.decode('utf-8', 'replace').encode()
    return data


def _texts(piece, data, text_field, notes, conversation_of, any_row):
    """The text of each row of a piece, in UTF-8; b'' for a row without text."""
    for row in PARSERS[piece.kind](data, notes, piece.origin):
        try:
            if conversation_of:
                text = conversation_of(_as_json_has_it(row) if piece.kind == 'yaml' else row)
            else:
                text = _text_of(row, text_field, piece.kind, any_row)
        except ValueError as reason:
            notes[f'{piece.origin}: {reason}, left out'] += 1
            continue
        try:
            yield text.encode()
        except UnicodeEncodeError:
            yield text.encode('utf-8', 'replace')
            notes[f'{piece.origin}: bytes that are not UTF-8, or half characters (surrogates), which became "?"'] += 1


def _rows_of_jsonl(data, notes, origin):
    for line in data.splitlines():
        if not line.strip():
            continue
        try:
            yield row_of(json.loads(line))
        except (ValueError, RecursionError):
            notes[f'{origin}: lines that are not JSON, left out'] += 1


def _rows_of_csv(data, notes, origin):
    """The row of a table in a piece: an object, or a list if it has more or fewer values than the header."""
    try:
        row = json.loads(data.decode())  # given bytes, json.loads() would accept surrogates as UTF-8
    except UnicodeDecodeError:
        notes[f'{origin}: rows that are not UTF-8, left out'] += 1
        return
    if isinstance(row, dict):
        yield row
    else:
        notes[f'{origin}: rows with more or fewer values than the header, left out'] += 1


def _row_of_columns(data, notes, origin):
    """The row of a columnar file in a piece, without nulls, since in such files each row has the keys of all rows."""
    yield _without_nulls(json.loads(data.decode('utf-8', 'surrogateescape')))


def _without_nulls(value):
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _rows_of_json(data, notes, origin):
    """The elements of the list in a file, or if it is no list, its object or objects, one after another."""
    contents, position, decoder = [], 0, json.JSONDecoder()
    try:
        text = data.decode('utf-8-sig').strip()
        while position < len(text):
            content, end = decoder.raw_decode(text, position)
            contents.append(content)
            position = re.compile(r'\s*').match(text, end).end()
    except (ValueError, RecursionError) as error:
        notes[f'{origin}: not JSON, left out: {str(error)[:100]}'] += 1
        return
    for content in contents:
        yield from rows_of_content(content)


def _rows_of_yaml(data, notes, origin):
    """For each of the file's YAML documents, the elements of its list, or if it is no list, the document itself."""
    try:
        contents = yaml_contents(data)
    except Exception as error:  # besides YAMLError, also what int(), datetime() and deep nesting raise
        notes[f'{origin}: not YAML, left out: {one_line(error, 100)}'] += 1
        return
    for content in contents:
        yield from rows_of_content(content)


def _as_json_has_it(row):
    """A row of YAML with only JSON's types; others, such as dates, become text."""
    try:
        if _written_out(row, {}) > LARGEST_YAML:
            raise ValueError('aliases that would be larger than any file')
        return json.loads(json_of(row))
    except (TypeError, ValueError, RecursionError) as error:  # keys that are lists, or an alias within its own anchor
        raise ValueError('rows that JSON could not hold') from error


def _written_out(value, known):
    """How many values and letters a row has once its aliases are written out: nine of nine of nine are a lot. known:
    those of lists and dicts, by id; None while they are counted. Raises TypeError for one within itself."""
    if not isinstance(value, (list, dict)):
        return 1 + (len(value) if isinstance(value, (str, bytes)) else 0)
    if id(value) not in known:
        known[id(value)] = None
        parts = [*value.values(), *value] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_written_out(part, known) for part in parts)
    return known[id(value)]


PARSERS = {
    'jsonl': _rows_of_jsonl,
    'json': _rows_of_json,
    'yaml': _rows_of_yaml,
    'csv': _rows_of_csv,
    'row': _row_of_columns,
}


def _text_of(row, text_field, kind, any_row):
    """The text of a row: one of its fields, what a template makes of the row, or all strings of YAML; '' if it has no
    text. Raises ValueError for a row that looks like something other than text, unless any_row."""
    if isinstance(row, str) and kind == 'json' and not text_field:
        return row
    if not isinstance(row, dict) and (text_field or kind != 'yaml'):
        return ''
    if is_template(text_field):
        values = [row.get(name) for name in fields_of(text_field)]
        return '' if None in values else IN_BRACES.sub(lambda name: str(row[name[1]]), text_field)
    if text_field or (kind != 'yaml' and 'text' in row):
        text = row.get(text_field or 'text')
        return text if isinstance(text, str) else ''
    if not any_row and isinstance(row, dict) and (reason := reason_against_text(row)):
        raise ValueError(reason)
    return all_strings(row) if kind == 'yaml' else ''


def all_strings(value):
    """All strings in nested lists and dicts, in order, joined by line breaks; dicts' keys are not included."""
    strings, left, seen = [], [value], set()
    while left:
        value = left.pop()
        if isinstance(value, str) and value:
            strings.append(value)
        elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))  # YAML's aliases are read once each, so that loops and towers of them end
            left += reversed([*value.values()] if isinstance(value, dict) else value)
    return '\n'.join(strings)


def write_pairs(source, path, notes):
    """Join the answers with a label in a source to pairs of a good and a bad one to the same prompt, and write these as
    lines of JSON. Reads the whole source, and keeps in memory what waits for its other half. Returns how many pairs."""
    waiting, n_pairs = collections.defaultdict(collections.deque), 0  # {(what is asked, label): [answer, ...]}
    with open(path, 'w', encoding='utf-8') as file:
        for piece in itertools.chain.from_iterable(unit.pieces for unit in units_of(source)):
            for document in documents_of(piece, None, notes, labeled_of):
                asked, answer, label = json.loads(document)
                if others := waiting[asked, not label]:
                    good, bad = (answer, others.popleft()) if label else (others.popleft(), answer)
                    file.write(json.dumps({**json.loads(asked), 'chosen': good, 'rejected': bad}) + '\n')
                    n_pairs += 1
                else:
                    waiting[asked, label].append(answer)
    if n_left := sum(map(len, waiting.values())):
        notes[f'{source.description["name"]}: {WITHOUT_OTHER}, left out'] += n_left
    return n_pairs


def left_out_of(notes):
    """{reason: number of rows} that were left out according to the notes, over all files."""
    reasons = collections.Counter()
    for note, count in notes.items():
        if ', left out' in note:
            reasons[note.partition(': ')[2].removesuffix(', left out')] += count
    return reasons


def in_words(reasons):
    """The most frequent reasons, with their counts."""
    return '; '.join(f'{reason} ({count:,})' for reason, count in collections.Counter(reasons).most_common(5))
