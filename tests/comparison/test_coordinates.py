"""The coordinate check, in small; and its figures in docs/log.md, which take minutes (-m '')."""

import json

import pytest
from launch import REPO, run_script

from comparison import coordinates

KEYS = """
coordinates = {
    'width': {n: {'n_embd': n, 'n_head': n // 16, 'mlp_hidden_dim': 4 * n} for n in (32, 64, 128)},
    'depth': {n: {'n_layer': n} for n in (2, 4, 8)},
}
recipes = {'standard': {}, 'completep': {'parametrization': 'completep', 'base_width': 16, 'base_depth': 1}}
seeds = [1, 2]
arch = 'gpt2'
n_layer, n_head, n_embd, mlp_hidden_dim, block_size, batch_size = 2, 4, 64, 256, 64, 8
dtype, max_iters, learning_rate = 'float32', 10, 1e-3
"""


def checked(folder, config, dataset):
    """{(recipe, axis): {part: slope}} from the files that compare.py leaves."""
    run_script('compare.py', config, *dataset, f'--out_dir={folder}', '--device=cpu', timeout=3000)
    rows = json.loads((folder / 'coordinates.json').read_text())
    found = coordinates.slopes(rows)
    table = (folder / 'table.md').read_text()
    assert all(f'{slope:+.3f}' in table for slopes in found.values() for slope in slopes.values())
    assert (folder / 'coordinates.png').read_bytes()[:4] == b'\x89PNG'
    assert {axis for _, axis in found} == {'width', 'depth'}
    return found


@pytest.mark.slow
def test_activations_keep_their_size_under_completep_and_not_under_standard(data_dir, tmp_path):
    (tmp_path / 'config.py').write_text(KEYS)
    dataset = f'--data_dir={data_dir}', '--dataset=tiny'
    found = checked(tmp_path / 'out', tmp_path / 'config.py', dataset)
    for axis in ('width', 'depth'):
        assert all(abs(slope) < 0.1 for slope in found['completep', axis].values()), found
    assert found['standard', 'width']['residual'] > 0.3 and found['standard', 'depth']['residual'] > 0.3


@pytest.mark.slow
def test_the_slopes_in_the_docs(tmp_path):
    run_script('prepare_data.py', '--tokenizer=bytes', '--name=stdlib-bytes', f'--data_dir={tmp_path}')
    found = checked(tmp_path / 'out', REPO / 'config/coordinate_check.py', [f'--data_dir={tmp_path}'])
    for axis in ('width', 'depth'):
        assert all(abs(slope) < 0.05 for slope in found['completep', axis].values()), found
    assert found['standard', 'width']['residual'] > 1 and found['standard', 'depth']['residual'] > 0.5
    assert abs(found['mup', 'width']['residual']) < 0.05 and found['mup', 'depth']['residual'] > 0.5


@pytest.mark.parametrize(
    'line, message',
    [
        ("coordinates = {'width': [64, 128]}", 'coordinates: width=[64, 128]: '),
        ("coordinates = {'depth': {n: {'n_layers': n} for n in (2, 4)}}", 'did you mean'),
        ('recipes = {}', 'coordinates: expected recipes'),
        ("recipes = {'mup': {'parametrization': 'mup'}}", "base_width=None with parametrization='mup': "),
    ],
)
def test_a_check_that_cannot_be_is_one_line(data_dir, tmp_path, line, message):
    (tmp_path / 'config.py').write_text(KEYS + line)
    dataset = f'--data_dir={data_dir}', '--dataset=tiny'
    said = run_script('compare.py', tmp_path / 'config.py', *dataset, f'--out_dir={tmp_path / "out"}', check=False)
    assert said.returncode == 1 and said.stderr.count('\n') == 1 and message in said.stderr, said
    assert not (tmp_path / 'out').exists()
