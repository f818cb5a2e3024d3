"""Rows and files that tests/fuzz.py has drawn, and that once were learned wrong or ended in a traceback."""

import gzip
import io
import json
import sys

import numpy as np
import pyarrow
import pytest
from chats import CHATML, encoder_of, make_tokenizer
from prepared import read_here, write_stream

from system import errors
from text import chat_rows, documents, sources

LFS = b'version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n'


def refusal(path, text_field=None):
    """The message with which a file or folder is refused."""
    with pytest.raises((ValueError, OSError)) as refused:
        read_here(path, text_field)
    assert errors.is_users_mistake(refused.value) and '\n' not in str(refused.value)
    return str(refused.value)


def test_tools_and_calls_that_are_none_are_a_reason():
    call = {'function': {'name': 'add', 'arguments': {}}}
    for message, tools, reason in (
        ({'content': 'a'}, [5], 'tools are no objects'),
        ({'content': 'a'}, [{'function': 5}], 'tools are no objects'),
        ({'content': 'a', 'tool_calls': 5}, [], 'tool_calls are no list'),
        ({'content': 'a', 'tool_calls': [call], 'function_call': {'name': 'add'}}, [], 'two places'),
    ):
        messages = [{'role': 'user', 'content': 'q'}, {'role': 'assistant', **message}]
        with pytest.raises(ValueError, match=reason):
            chat_rows.conversation_of({'messages': messages, 'tools': tools})


def test_a_text_with_the_mark_for_control_tokens_is_refused(tmp_path):
    encoder, _ = encoder_of(make_tokenizer(tmp_path / 'chatml', CHATML))
    row = {'prompt': 'q', 'completion': 'a\ufdd0b'}
    with pytest.raises(ValueError, match=r'U\+FDD0'):
        list(encoder.examples(chat_rows.conversation_of(row)))


def test_half_a_character_is_counted_or_leaves_its_row_out(tmp_path):
    (tmp_path / 'a.jsonl').write_text('{"text": "a\\ud83d"}\n{"text": "b"}\n')
    texts, notes, _ = read_here(tmp_path / 'a.jsonl')
    assert texts == ['a?', 'b'] and [(count, 'surrogates' in note) for note, count in notes.items()] == [(1, True)]
    (tmp_path / 'a.csv').write_bytes(b'text\na\xed\xa0\xbd\nb\n')
    texts, notes, _ = read_here(tmp_path / 'a.csv')
    assert texts == ['b'] and [(count, 'not UTF-8' in note) for note, count in notes.items()] == [(1, True)]


@pytest.mark.parametrize('names', [['text'], ['question', 'answer']], ids=['texts', 'conversations'])
@pytest.mark.parametrize('harm', ['utf8', 'offsets'])
def test_a_damaged_column_is_one_line(harm, names, tmp_path):
    path = write_stream(tmp_path / 'a.arrow', pyarrow.table(dict.fromkeys(names, ['good', 'text'])))
    before, after = {
        'utf8': (b'text', b't\xff\xfft'),
        'offsets': (np.array([0, 4, 8], dtype='<i4').tobytes(), np.array([0, 4, -2], dtype='<i4').tobytes()),
    }[harm]
    data = path.read_bytes()
    assert data.count(before) >= len(names)
    path.write_bytes(data[:200] + data[200:].replace(before, after))
    assert str(path) in refusal(path)


@pytest.mark.parametrize('name', ['a.txt', 'a.md', 'a.jsonl', 'a.csv.gz'])
def test_packed_data_and_pointers_are_not_learned_whatever_they_are_called(name, tmp_path):
    pack = gzip.compress if name.endswith('.gz') else bytes
    packed = {b'BZh91AY&SY': 'bzip2', b'\x28\xb5\x2f\xfdabc': 'zstd', b'PK\x03\x04abc': 'zip', LFS: 'git lfs pull'}
    for data, reason in packed.items():
        (tmp_path / name).write_bytes(pack(data))
        assert reason in refusal(tmp_path / name)
    (tmp_path / 'a.jsonl.zst').write_bytes(LFS)  # in place of a packed file
    assert 'git lfs pull' in refusal(tmp_path / 'a.jsonl.zst')


def test_a_saved_dataset_without_its_state_is_still_one(tmp_path):
    write_stream(tmp_path / 'data-00000-of-00001.arrow', pyarrow.table({'text': ['a', 'b']}))
    (tmp_path / 'dataset_info.json').write_text(json.dumps({'description': 'no text of it', 'license': 'MIT'}))
    assert read_here(tmp_path)[:2] == (['a', 'b'], {})


@pytest.mark.parametrize('name', ['../secret.arrow', '/secret.arrow', 3, None])
def test_a_saved_dataset_names_no_files_outside_of_its_folder(name, tmp_path):
    write_stream(tmp_path / 'secret.arrow', pyarrow.table({'text': ['a']}))
    (tmp_path / 'set').mkdir()
    write_stream(tmp_path / 'set' / 'data.arrow', pyarrow.table({'text': ['b']}))
    (tmp_path / 'set' / 'state.json').write_text(json.dumps({'_data_files': [{'filename': name}]}))
    assert r'state.json: _data_files[0].filename: found ' in refusal(tmp_path / 'set')
    (tmp_path / 'set' / 'dataset_dict.json').write_text(json.dumps({'splits': [name]}))
    assert r'dataset_dict.json: splits[0]: found ' in refusal(tmp_path / 'set')


def test_the_names_of_fields_are_said_in_one_line_whatever_they_are(tmp_path):
    (tmp_path / 'a.csv').write_text('"first\nsecond",' + 'x' * 5000 + '\na,b\n')
    message = refusal(tmp_path / 'a.csv')
    assert 'first second' in message and '--text_field' in message and len(message) < 600


def test_a_name_that_is_no_utf_8_can_be_printed(monkeypatch):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)
    monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(printed, 'utf-8'))
    errors.report_errors()
    print('left out: caf\udce9.txt', flush=True)
    assert printed.getvalue() == b'left out: caf\\udce9.txt\n'


# --- what takes few bytes and would take gigabytes or hours -----------------------------------------------------------


@pytest.mark.parametrize('name', ['a.jsonl', 'a.jsonl.gz', 'a.csv', 'a.csv.gz', 'a.tsv.gz'])
@pytest.mark.parametrize('rows_before', [0, 200])
def test_a_line_without_an_end_is_not_read_to_its_end(name, rows_before, tmp_path, monkeypatch):
    """Unpacked, 4 MB are a line of 3 GB. Behind the rows that are looked at, it is found when the file is read."""
    monkeypatch.setattr(sources, 'LARGEST_LINE', 10**5)
    monkeypatch.setattr(documents, 'PIECE_BYTES', 10**4)
    row = '{"text": "%s"}\n' if 'json' in name else '%s\n'
    text = ('' if 'json' in name else 'text\n') + row % 'word' * rows_before + row % ('word ' * 10**5)
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith('.gz') else text.encode())
    line = refusal(tmp_path / name)
    assert name in line and 'more than 100,000 bytes' in line


def tower(levels):
    """YAML of a list of nine lists of nine lists, ..., each written once."""
    yield 'a0: &a0 [' + ', '.join(['word'] * 9) + ']'
    for level in range(1, levels):
        yield f'a{level}: &a{level} [' + ', '.join([f'*a{level - 1}'] * 9) + ']'


def test_a_conversation_with_a_tower_of_aliases_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, 'LARGEST_YAML', 10**4)
    said = '- messages: [{role: user, content: hi}, {role: assistant, content: hello}]\n'
    for levels, left_out in ((3, 0), (5, 1)):
        (tmp_path / 'a.yaml').write_text(said + said + ''.join(f'  {line}\n' for line in tower(levels)))
        rows, notes, _ = read_here(tmp_path / 'a.yaml')
        assert len(rows) == 2 - left_out and notes.total() == left_out
    texts, notes, _ = read_here(tmp_path / 'a.yaml', 'messages')  # as text, each part is read once
    assert not any('JSON' in note for note in notes)


@pytest.mark.parametrize('text', ['a: 1' + ':1' * 200, '- ' * 10**5, '[' * 10**5, '{a: ' * 10**5])
def test_yaml_that_takes_hours_or_the_stack_is_left_out_with_a_line(text, tmp_path):
    (tmp_path / 'a.yaml').write_text(f'{text}\n')
    (tmp_path / 'b.txt').write_text('good')
    texts, notes, _ = read_here(tmp_path)
    assert texts == ['good'] and ['not YAML, left out' in note for note in notes] == [True]


def test_large_yaml_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, 'LARGEST_YAML', 100)
    (tmp_path / 'a.yaml').write_text('- text\n' * 20)
    assert 'a.yaml: YAML of more than 100 bytes: convert it to JSON lines' in refusal(tmp_path / 'a.yaml')
