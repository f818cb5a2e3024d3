"""What others wrote is checked before it decides anything."""

import pytest

from system.files import bare_name, check_form, no_link, parse_json, read_json, write_file

HOSTILE = ['../x', '..', '.', '', '/etc/passwd', 'a/b', 'a\\b', '-rf', '..x', 'a\0', 'a\n', ' x', 'x' * 201, '\udcff']


@pytest.mark.parametrize('name', [*HOSTILE, None, 1, True, ['x'], {'x': 1}, b'x'])
def test_what_is_no_bare_name_is_refused_in_one_line(name):
    with pytest.raises(ValueError) as refused:
        bare_name(name, 'meta.json: file')
    assert str(refused.value).startswith('meta.json: file: found ') and str(refused.value).isprintable()
    assert len(str(refused.value)) < 250


def test_names_that_files_have_are_taken():
    for name in ('train_000000.bin', '__0_0.distcp', '.metadata', 'model-00001-of-00002.safetensors', 'tool_use', 'é'):
        assert bare_name(name, 'meta.json: file') == name


FORM = {'name': bare_name, 'n?': (int, None), 'parts?': [{'file': bare_name, 'share?': float}], 'of?': {bare_name: str}}
FORM |= {'is?': bool, 'any?': {str: dict}}


@pytest.mark.parametrize(
    'text, said',
    [
        ('{"name": "x", "n": -1}', 'x.json: n: found -1, expected a whole number from 0 on'),
        ('{"name": "x", "n": true}', 'x.json: n: found True, expected a whole number'),
        ('{"name": "x", "n": 1.0}', 'x.json: n: found 1.0, expected'),
        ('{"name": "x", "n": 99999999999999999999}', 'x.json: n: found 99999999999999999999, expected'),
        ('{"name": "x", "is": 0}', 'x.json: is: found 0, expected true or false'),
        ('{"name": "x", "parts": {"0": 1}}', 'x.json: parts: found an object, expected a list'),
        ('{"name": "x", "parts": [{"file": "a"}, {}]}', r'x.json: parts\[1\]: found no file, expected'),
        ('{"name": "x", "parts": [{"file": "../a"}]}', r"x.json: parts\[0\].file: found '../a', expected the name"),
        (
            '{"name": "x", "parts": [{"file": "a", "share": "1"}]}',
            r"x.json: parts\[0\].share: found '1', expected a number",
        ),
        ('{"name": "x", "of": {"../a": "b"}}', r"x.json: of: found '../a', expected the name of a file"),
        ('{"name": "x", "any": {"\\u001b[2J": []}}', r'x.json: any.\\x1b\[2J: found a list, expected an object'),
        ('{"name": "x", "is": null}', 'x.json: is: found None, expected true or false'),
        ('{}', 'x.json: found no name, expected'),
        ('[]', 'x.json: found a list, expected an object'),
        ('[' * 10**5, 'x.json is damaged: not JSON .nested too deeply'),
        ('{"name": "x", "any": {"a":' + '[' * 10**5 + ']' * 10**5 + '}}', 'x.json is damaged: not JSON .nested'),
        ('{"name": 1' + '0' * 10**4 + '}', 'x.json(: name: found 1000| is damaged)'),
        ('\udcff', 'x.json is damaged: not JSON'),
        ('{"name": "x", "a": ["\\uD800"]}', 'x.json is damaged: not JSON'),
        ('', 'x.json is damaged: not JSON'),
    ],
)
def test_json_of_another_form_is_refused_with_its_field(tmp_path, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'x.json').write_bytes(text.encode('utf-8', 'surrogateescape'))
    with pytest.raises(ValueError, match=f'^{said}.*; copy it again$') as refused:
        read_json('x.json', FORM, 'copy it again')
    assert str(refused.value).isprintable() and len(str(refused.value)) < 250


def test_json_of_the_form_is_read_as_it_is():
    content = {'name': 'x', 'n': None, 'parts': [{'file': 'a', 'share': 1, 'more': -1}], 'of': {'b': 'c'}, 'is': True}
    check_form(content, FORM, 'x.json')
    assert parse_json(b'{"n": -1, "a": "\\ud83d\\ude42"}', None, 'x.json') == {'n': -1, 'a': '\U0001f642'}


def test_json_without_an_end_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr('system.files.LARGEST_JSON', 1000)
    with pytest.raises(ValueError, match='/dev/zero is damaged: not JSON .more than 1,000 bytes'):
        read_json('/dev/zero')


def test_no_file_is_written_through_a_link(tmp_path):
    (tmp_path / 'mine').write_text('precious')
    for name in ('results.jsonl', 'DONE.tmp', 'nowhere'):
        (tmp_path / name).symlink_to('mine' if name != 'nowhere' else 'new')
    for name in ('results.jsonl', 'nowhere'):
        with pytest.raises(OSError, match=f'found a link to .*, expected a file.*{name}'):
            open(tmp_path / name, 'a', opener=no_link)
    with pytest.raises(OSError, match='found a link to .*mine.*DONE.tmp'):
        write_file(tmp_path / 'DONE', 'text')
    assert (tmp_path / 'mine').read_text() == 'precious' and not (tmp_path / 'new').exists()
    write_file(tmp_path / 'results.jsonl', 'text')  # takes the place of the link
    assert (tmp_path / 'mine').read_text() == 'precious'
    with open(tmp_path / 'file', 'a', opener=no_link) as file:
        file.write('text')
    assert (tmp_path / 'file').read_text() == 'text'
