"""The coordinate check, in small; and its figures in docs/log.md, which take minutes (-m '')."""

import json

import pytest
from launch import run_script

from benchmarks import coordinates

SMALL = '--widths 32 64 128 --depths 2 4 8 --seeds 1 2'.split()


def checked(folder, *more):
    """{(recipe, axis): {part: slope}} from the files that the check leaves."""
    run_script('benchmarks/coordinates.py', *more, f'--out_dir={folder}', '--device=cpu', timeout=3000)
    rows = json.loads((folder / 'coordinates.json').read_text())
    found = coordinates.slopes(rows)
    table = (folder / 'table.md').read_text()
    assert all(f'{slope:+.3f}' in table for slopes in found.values() for slope in slopes.values())
    assert (folder / 'coordinates.png').read_bytes()[:4] == b'\x89PNG'
    assert {axis for _, axis in found} == {'width', 'depth'}
    return found


@pytest.mark.slow
def test_activations_keep_their_size_under_completep_and_not_under_standard(data_dir, tmp_path):
    found = checked(tmp_path / 'out', *SMALL, f'--data_dir={data_dir}', '--dataset=tiny')
    for axis in ('width', 'depth'):
        assert all(abs(slope) < 0.1 for slope in found['completep', axis].values()), found
    assert found['standard', 'width']['residual'] > 0.3 and found['standard', 'depth']['residual'] > 0.3


@pytest.mark.slow
def test_the_slopes_in_the_docs(tmp_path):
    run_script('prepare_data.py', '--tokenizer=bytes', '--name=stdlib-bytes', f'--data_dir={tmp_path}')
    found = checked(tmp_path / 'out', f'--data_dir={tmp_path}')
    for axis in ('width', 'depth'):
        assert all(abs(slope) < 0.05 for slope in found['completep', axis].values()), found
    assert found['standard', 'width']['residual'] > 1 and found['standard', 'depth']['residual'] > 0.5
    assert abs(found['mup', 'width']['residual']) < 0.05 and found['mup', 'depth']['residual'] > 0.5


@pytest.mark.parametrize(
    'arguments, message',
    [
        (['--widths', '64'], 'a slope needs two sizes or more'),
        (['--n_layers=4'], 'did you mean n_layer'),
        (['--base_width=half'], "--base_width expects int >= 1 or None, given 'half'"),
    ],
)
def test_a_check_that_cannot_be_is_one_line(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr('sys.argv', ['coordinates.py', *arguments])
    with pytest.raises(SystemExit):
        coordinates.main()
    assert message in capsys.readouterr().err.splitlines()[-1]
