"""What others wrote is checked before it decides anything."""

import pytest

from system.files import bare_name

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
