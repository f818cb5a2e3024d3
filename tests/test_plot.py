"""compare.py --plot: a picture of the loss of finished and running runs."""

import json
import math

import pytest
from conftest import run_script

import compare


def write_run(folder, rows, torn=''):
    folder.mkdir(parents=True)
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows) + torn)
    return folder


def row(step, **values):
    return {'step': step, 'tokens': 100 * step, 'loss': 4 - step / 100, **values}


def test_plot_of_a_finished_and_a_running_run(tmp_path):
    steps = range(10, 210, 10)
    finished = write_run(tmp_path / 'a', [row(step, **{'time/total': 50.0, 'val_loss': 3.0}) for step in steps])
    running = write_run(
        tmp_path / 'b', [row(step, loss='nan' if step == 30 else 3.0) for step in steps], torn='{"step": 2'
    )
    said = run_script('compare.py', '--plot', finished, running, cwd=tmp_path).stdout
    assert said.splitlines()[-1] == 'loss plot: loss.png'
    png = (tmp_path / 'loss.png').read_bytes()
    assert png.startswith(b'\x89PNG') and len(png) > 10_000

    run_script('compare.py', '--plot', finished, cwd=tmp_path)
    assert (finished / 'loss.png').exists(), 'one run: the picture lies in its folder'


@pytest.mark.parametrize('text, message', [(None, 'does not exist'), ('', 'has no row yet')])
def test_nothing_to_plot_is_one_line(tmp_path, text, message):
    if text is not None:
        write_run(tmp_path / 'a', [], torn=text)
    done = run_script('compare.py', '--plot', tmp_path / 'a', check=False)
    assert done.returncode != 0 and message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_time_of_a_curve_is_training_time():
    rows = [
        row(10, **{'time/total': 100.0}),
        {'step': 15, 'tokens': 1500, 'val_loss': 3.5},  # an evaluation between two logged steps
        row(20, **{'time/total': 100.0, 'val_loss': 3.0}),
        row(40, **{'time/total': 200.0, 'loss': 'nan'}),
    ]
    curves = compare.loss_curves(rows)
    assert curves['loss'].seconds == pytest.approx([1, 2, 6])
    assert curves['loss'].tokens == [1000, 2000, 4000]
    assert math.isnan(curves['loss'].loss[-1])
    assert curves['val_loss'].seconds == pytest.approx([1.5, 2])
    assert curves['val_loss'].loss == [3.5, 3.0]


def test_running_mean_forgets_what_left_its_window():
    assert compare.running_mean([1.0, 3.0, 5.0], window=1) == [1, 3, 5]
    assert compare.running_mean([1.0, 3.0, 5.0], window=2) == [1, 2, 4]
    assert compare.running_mean([math.inf, 3.0, 5.0], window=2)[-1] == 4
