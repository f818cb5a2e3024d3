"""
Texts and rows in files and folders, read through text/sources.py and text/documents.py.

They are written in one of the formats, compressed or not, and perhaps spoilt, while they are written or afterwards. The
reference reads the whole file at once by json, csv, yaml or pyarrow.
"""

import bz2
import collections
import contextlib
import csv
import functools
import gzip
import io
import json
import lzma
import re
from pathlib import Path

from fuzzing.cases import LFS, LIMIT, PIECES, Refused, Words, Wrong, check, draw_text, is_clear, some
from system.errors import one_line
from text import chat_rows, documents, sources

# --- writing ---------------------------------------------------------------------------------------------------

FILE_PIECES = [piece for piece in PIECES if piece not in ('\r\n', '\ufeff')]


class Content:
    """What is written, rows or texts, and with which keys it is read."""

    def __init__(self, draw):
        word = Words()
        texts = [draw_text(draw, word(), pieces=FILE_PIECES) for _ in range(draw.choice([1, 2, 3, 5, 20]))]
        if some(draw, 0.02):
            texts[-1] *= 1 + 1_200_000 // max(1, len(texts[-1]))  # longer than a unit
        self.text_field = None
        self.texts, form = texts, draw.randrange(6)
        if form == 0:
            self.rows = [{'text': text} for text in texts]
        elif form == 1:
            self.rows = [{'id': number, 'text': text, 'url': 'https://x.yz'} for number, text in enumerate(texts)]
        elif form == 2:
            self.rows, self.text_field = [{'content': text, 'title': 'T'} for text in texts], 'content'
        elif form == 3:
            self.rows, self.text_field = [{'title': 'T', 'body': text} for text in texts], '{title}: {body}'
        elif form == 4:
            self.rows = [{'question': text, 'answer': f'so {text}'} for text in texts]
        else:
            turns = [[('user', text), ('assistant', f'so {text}')] * draw.choice([1, 1, 2]) for text in texts]
            turns = [[('system', 'be brief'), *turn] if some(draw, 0.3) else turn for turn in turns]
            self.rows = [{'messages': [{'role': role, 'content': text} for role, text in turn]} for turn in turns]
        if some(draw, 0.1):
            odd = draw.choice([{}, {'text': None}, {'text': 7}, {'messages': None}])
            self.rows[draw.randrange(len(self.rows))] = odd


def as_text(draw, content, path):
    path.write_bytes('\n'.join(content.texts).encode('utf-8', 'surrogatepass'))


def as_json_lines(draw, content, path):
    ascii_only, end = some(draw, 0.5), draw.choice(['\n', '\n', '\r\n', '\n\n'])
    lines = [json.dumps(row, ensure_ascii=ascii_only) for row in content.rows]
    path.write_bytes((end.join(lines) + draw.choice(['', end])).encode('utf-8', 'surrogatepass'))


def as_json(draw, content, path):
    rows = content.rows
    whole = draw.choice([rows, rows, rows, {'data': rows}, {'version': 1, 'rows': rows}, rows[0], content.texts])
    text = json.dumps(whole, indent=draw.choice([None, 1]), ensure_ascii=some(draw, 0.5))
    path.write_bytes(text.encode('utf-8', 'surrogatepass'))


def as_yaml(draw, content, path):
    import yaml

    path.write_text(yaml.safe_dump(draw.choice([content.rows, content.texts, {'a': content.texts}])), encoding='utf-8')


def as_csv(draw, content, path):
    names = list(dict.fromkeys(name for row in content.rows for name in row)) or ['text']
    file = io.StringIO(newline='')
    delimiter = '\t' if path.suffix == '.tsv' else ','
    writer = csv.writer(file, delimiter=delimiter, lineterminator=draw.choice(['\n', '\r\n']))
    writer.writerow(names)
    for row in content.rows:
        values = [row.get(name) for name in names]
        writer.writerow([json.dumps(value) if isinstance(value, list) else value for value in values])
    path.write_bytes(file.getvalue().encode('utf-8', 'surrogatepass'))


def table_of(draw, content):
    """The rows as a pyarrow Table, with one of the types for text that programs write."""
    import pyarrow

    rows = json.loads(json.dumps(content.rows, ensure_ascii=False).encode('utf-8', 'replace'))
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {}
    for name in names or ['text']:
        values = [row.get(name) for row in rows]
        if any(isinstance(value, int) for value in values):
            values = [value if isinstance(value, int) else None for value in values]
        columns[name] = pyarrow.array(values)
        if columns[name].type == pyarrow.string():
            kind = draw.choice(['string', 'string', 'large_string', 'string_view', 'dictionary', 'null'])
            if kind == 'dictionary':
                columns[name] = columns[name].dictionary_encode()
            elif kind == 'null' and some(draw, 0.1):
                columns[name] = pyarrow.nulls(len(values))
            elif kind != 'null':
                columns[name] = columns[name].cast(getattr(pyarrow, kind)())
        elif name == 'messages' and some(draw, 0.3):
            columns[name] = pyarrow.array([None if value is None else json.dumps(value) for value in values])
    return pyarrow.table(columns)


def as_parquet(draw, content, path):
    import pyarrow.parquet

    options = {'row_group_size': draw.choice([1, 2, 1000]), 'compression': draw.choice(['snappy', 'none', 'zstd'])}
    pyarrow.parquet.write_table(table_of(draw, content), path, **options)


def as_arrow(draw, content, path):
    import pyarrow

    table = table_of(draw, content)
    with pyarrow.OSFile(str(path), 'wb') as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=draw.choice([1, 2, 1000]))


def as_saved(draw, content, path):
    """Write a folder as save_to_disk() of datasets leaves it. Returns its data file."""
    path.mkdir()
    name = draw.choice(['data-00000-of-00001.arrow', 'data-00000-of-00001.arrow', 'dataset.arrow', 'cache-1.arrow'])
    as_arrow(draw, content, path / name)
    (path / 'state.json').write_text(json.dumps({'_data_files': [{'filename': name}], '_fingerprint': 'a'}))
    (path / 'dataset_info.json').write_text('{}')
    return path / name


FORMATS = {'.txt': as_text, '.md': as_text, '.py': as_text, '.jsonl': as_json_lines, '.ndjson': as_json_lines}
FORMATS |= {'.json': as_json, '.csv': as_csv, '.tsv': as_csv, '.yaml': as_yaml}
FORMATS |= {'.parquet': as_parquet, '.arrow': as_arrow}
PACKERS = {'.gz': functools.partial(gzip.compress, mtime=0), '.bz2': bz2.compress, '.xz': lzma.compress}


def zstd(data):
    import pyarrow

    return pyarrow.compress(data, 'zstd', asbytes=True)


def write_files(draw, folder):
    """Write a Content in some format, packed and spoilt or not. Returns (what prepare_data.py is given, Content)."""
    content = Content(draw)
    if some(draw, 0.08):
        path = as_saved(draw, content, folder / 'saved')
        spoil_file(draw, path, 0.3)
        if some(draw, 0.1):
            draw.choice([path, path.with_name('state.json')]).unlink()
        return folder / 'saved', content
    ending = draw.choice(list(FORMATS))
    path = folder / f'data{ending}'
    FORMATS[ending](draw, content, path)
    if some(draw, 0.2):
        packer = draw.choice(['.gz', '.zst', '.gz', '.zst', '.bz2', '.xz'])
        spoil_file(draw, path, 0.1)
        data = path.read_bytes()
        path.unlink()
        path = path.with_name(path.name + packer)
        path.write_bytes(PACKERS.get(packer, zstd)(data))
        if packer in ('.gz', '.zst') and some(draw, 0.1):  # as cat makes them
            path.write_bytes(path.read_bytes() + PACKERS.get(packer, zstd)(data))
    spoil_file(draw, path, 0.3)
    if some(draw, 0.15):
        endings = [
            '.txt',
            '.jsonl',
            '.json',
            '.csv',
            '.parquet',
            '.arrow',
            '.yaml',
            '.gz',
            '.zst',
            '.bin',
            '',
            '.JSONL',
        ]
        path = path.rename(path.with_name(f'other{draw.choice(endings)}'))
    if some(draw, 0.2):
        (folder / 'empty.txt').touch()
        (folder / '.hidden').write_text('x')
        return folder, content
    return path, content


def spoil_file(draw, path, share):
    if not some(draw, share):
        return
    data = path.read_bytes()
    harm = draw.randrange(11)
    if harm == 0:
        data = data[: draw.randint(0, len(data))]
    elif harm == 1 and data:
        data = bytearray(data)
        for _ in range(draw.choice([1, 3, 30])):
            data[draw.randrange(len(data))] = draw.randrange(256)
    elif harm == 2:
        data = b'\xef\xbb\xbf' + data
    elif harm == 3:
        data = LFS
    elif harm == 4:
        data = data.replace(b'\n', b'\r\n')
    elif harm in (5, 6, 7):
        with contextlib.suppress(UnicodeDecodeError):
            code = {5: 'latin-1', 6: 'utf-16', 7: 'utf-16-le'}[harm]
            data = data.decode().encode(code, 'replace')
    elif harm == 8:
        place = draw.randint(0, len(data))
        data = data[:place] + b'\0' * draw.choice([1, 100]) + data[place:]
    elif harm == 9:
        short = [b'', b'\n', b' ', b'[]', b'{}', b'null', b'5', b'"x"', b'\0', b'PAR1', b'\x1f\x8b']
        data = draw.choice([*short, b'{"text": "x"}\n{'])
    else:
        data = data + draw.choice([b'}', b'{"text": "more"}\n', b'\n\n', b',', b'x', b'\xff', data[:50]])
    path.write_bytes(data)


# --- comparing -------------------------------------------------------------------------------------------------

BINARY = (b'\x1f\x8b', b'\x28\xb5\x2f\xfd', b'BZh91AY&SY', b'\xfd7zXZ', b'PAR1', b'\xff\xff\xff\xff')


def read_plainly(path, columns):
    """(kind, the rows of a file or its text, how many are broken), read at once by the libraries for its format.
    columns: those to read of a .parquet or .arrow file, whose others may be damaged. Raises what libraries raise."""
    data, name = path.read_bytes(), path
    if path.suffix.lower() == '.gz':
        data, name = gzip.decompress(data), path.with_suffix('')
    elif path.suffix.lower() == '.zst':
        import pyarrow

        with pyarrow.CompressedInputStream(pyarrow.BufferReader(data), 'zstd') as stream:
            data, name = stream.read(), path.with_suffix('')
    ending = name.suffix.lower()
    if ending in ('.jsonl', '.ndjson') and begins_with_an_array(data):
        if name != path:
            raise ValueError('an array in place of lines, compressed')
        try:
            return 'json', rows_of(json.loads(data.decode('utf-8-sig'))), 0
        except ValueError:
            return 'json', [], 1
    if ending in ('.jsonl', '.ndjson') or (ending == '.json' and name != path):
        return 'jsonl', *json_lines(data)
    if ending == '.json':
        if begins_with_an_object_on_a_line(data):
            return 'jsonl', *json_lines(data)
        try:
            content, *others = json_values(data.decode('utf-8-sig'))
        except ValueError:
            return 'json', [], 1
        if others:
            values = [value if isinstance(value, list) else [value] for value in (content, *others)]
            return 'json', [row for rows in values for row in rows], 0
        return 'json', rows_of(content), 0
    if ending in ('.csv', '.tsv'):
        text = data.decode('utf-8-sig', 'surrogateescape')
        delimiter = '\t' if ending == '.tsv' else ','
        lines = [row for row in csv.reader(io.StringIO(text, newline=''), delimiter=delimiter) if row]
        rows = [dict(zip(lines[0], line, strict=True)) for line in lines[1:] if len(line) == len(lines[0])]
        return 'csv', rows, len(lines) - 1 - len(rows)
    if ending in ('.yaml', '.yml') and name == path:
        import yaml

        contents = list(yaml.load_all(data, getattr(yaml, 'CSafeLoader', yaml.SafeLoader)))
        return 'yaml', [row for content in contents for row in rows_of(content)], 0
    if ending in ('.parquet', '.arrow') and name == path:
        import pyarrow.parquet

        if ending == '.parquet':
            return 'columns', pyarrow.parquet.read_table(path, columns=columns, use_threads=False).to_pylist(), 0
        with pyarrow.OSFile(str(path)) as file:
            table = pyarrow.ipc.open_stream(file).read_all()
        table = table.select([name for name in table.column_names if columns is None or name in columns])
        return 'columns', table.to_pylist(), 0
    return 'text', data.removeprefix(b'\xef\xbb\xbf'), 0


def begins_with_an_object_on_a_line(data):
    first, second = [*data.split(b'\n', 2), b''][:2]
    try:
        return bool(second.strip()) and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def begins_with_an_array(data):
    """Whether lines of JSON are one array: on several lines, or on a single one unless it is a list of messages."""
    lines = [line for line in data.removeprefix(b'\xef\xbb\xbf').split(b'\n') if line.strip()]
    if not lines or not lines[0].strip().startswith(b'['):
        return False
    try:
        row = json.loads(lines[0])
    except ValueError:
        return True
    first = row[0] if row else None
    return len(lines) == 1 and not (isinstance(first, dict) and {'role', 'from'} & set(first))


def rows_of(content):
    """The elements of a list; or those of an object's lists, if they hold conversations; or the value itself."""
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        content = [row for rows in lists if any(is_chat(row) for row in rows) for row in rows] or [content]
    return content if isinstance(content, list) else [content]


def json_values(text):
    """The JSON values in a text, one after the other."""
    found = []
    while text := text.strip():
        value, end = json.JSONDecoder().raw_decode(text)
        found, text = [*found, value], text[end:]
    return found


def json_lines(data):
    rows, broken = [], 0
    for line in data.removeprefix(b'\xef\xbb\xbf').split(b'\n'):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError:
            broken += 1
    return rows, broken


def is_chat(row):
    return isinstance(row, dict) and (isinstance(row.get('messages'), list) or {'question', 'answer'} <= {*row})


def plain_strings(value):
    if isinstance(value, (dict, list)):
        parts = [plain_strings(part) for part in (value.values() if isinstance(value, dict) else value)]
        return '\n'.join(part for part in parts if part)
    return value if isinstance(value, str) else ''


def plain_text(row, kind, text_field):
    """The text of a row in the field that is asked for; None if it has none."""
    if text_field and '{' in text_field:
        has_both = isinstance(row, dict) and row.get('title') is not None and row.get('body') is not None
        return f'{row["title"]}: {row["body"]}' if has_both else None
    if text_field:
        text = row.get(text_field) if isinstance(row, dict) else None
    elif kind == 'yaml':
        text = plain_strings(row)
    else:
        text = row.get('text') if isinstance(row, dict) else row if kind == 'json' else None
    return text if isinstance(text, str) and text else None


def check_files(draw, folder):
    """Check a case: texts or rows in a file or folder."""
    given, content = write_files(draw, folder)
    try:
        source = sources.find_source(str(given), content.text_field)
    except (ValueError, OSError) as error:
        check('None' not in str(error).split(), 'an unclear line', str(error))
        raise
    check(all(is_clear(line) for line in source.skipped), 'unclear lines', source.skipped)
    notes, found, begun = collections.Counter(), [], b''
    as_conversation = chat_rows.conversation_of if source.chat else None
    units = list(documents.units_of(source))
    for piece in (piece for unit in units for piece in unit.pieces):
        for document in documents.documents_of(piece, content.text_field, notes, as_conversation):
            begun += document
            if piece.ends_document:
                found, begun = [*found, begun], b''
    check(all(is_clear(note) for note in notes), 'unclear notes', notes)
    check(not begun, 'a text that does not end', given)
    left_out = documents.left_out_of(notes).total()
    if not (found or notes):
        raise Refused('left no text')  # in this one file; prepare_data.py says so of all files

    (part,) = {part.path for part in source.parts}
    data = Path(part).read_bytes()
    columns = None if source.chat else sources.fields_of(content.text_field or 'text')
    try:
        kind, rows, broken = read_plainly(Path(part), columns)
    except Exception as error:  # no library reads it
        if found or not notes:
            why = f'{len(found)} texts of a file that cannot be read ({one_line(error)}): {found!r}'
            raise Wrong(why[:LIMIT]) from error
        raise Refused('; '.join(notes)) from error
    if kind == 'text':
        is_packed = data.startswith(BINARY[:4]) and Path(part).suffix not in sources.COMPRESSED
        check(not is_packed, 'packed data learned as text', part, data[:99])
        check(not rows.startswith(LFS[:30]), 'a pointer is learned', part)
        check(b'\0' not in rows[:8192], 'zero bytes are learned', part)
        expected = [rows.decode('utf-8', 'replace').encode()]
        try:
            rows.decode()
        except UnicodeDecodeError:
            check(notes, 'mended without a note', part)
        check(found == expected, 'another text', part, notes, found, expected)
        return
    expected, n_without, is_mended = [], broken, False
    for row in rows:
        try:
            text = chat_rows.conversation_of(row) if source.chat else plain_text(row, kind, content.text_field)
        except ValueError:
            text = None
        is_late = kind == 'yaml' and len(data) > sources.FIRST_BYTES
        if is_late and not (source.chat or content.text_field) and is_chat(row):
            text = None  # it is among texts
        if kind == 'csv' and text is not None and re.search('[\udc80-\udcff]', text):  # no UTF-8
            text = None
        n_without += text is None
        expected += [] if text is None else [text.encode('utf-8', 'replace')]
        is_mended |= text is not None and text.encode('utf-8', 'ignore') != text.encode('utf-8', 'surrogatepass')
    check(found == expected, 'other texts', part, notes, found, expected)
    check(notes or not is_mended, 'halves of letters are other letters now, and no word of it', part, found)
    check((left_out > 0) == (n_without > 0), 'left out without a note, or the other way', part, notes, n_without)
    if not found:
        raise Refused('; '.join(notes) or 'all files are empty')
