"""plots.py: pictures of runs. They show everything that they were given, at its length, and nothing is cut off."""

import json
import math
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from launch import run_script

from comparison import plots


def write_run(folder, rows, torn=''):
    folder.mkdir(parents=True)
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows) + torn)
    return folder


def row(step, **values):
    return {'step': step, 'tokens': 100 * step, 'loss': 4 - step / 100, **values}


# --- loss of any runs -------------------------------------------------------------------------------------------------


def test_plot_of_a_finished_and_a_running_run(tmp_path):
    steps = range(10, 210, 10)
    finished = write_run(tmp_path / 'a', [row(step, **{'time/total': 50.0, 'val_loss': 3.0}) for step in steps])
    running = write_run(
        tmp_path / 'b', [row(step, loss='nan' if step == 30 else 3.0) for step in steps], torn='{"step": 2'
    )
    said = run_script('compare.py', '--plot', finished, running, cwd=tmp_path).stdout
    lines = [f'{finished}: step 200, loss 2, val_loss 3', f'{running}: step 200, loss 3', 'loss plot: loss.png']
    assert said.splitlines() == lines
    nothing = write_run(tmp_path / 'c', [{'step': 1, 'loss': 3.0}])
    said = run_script('compare.py', '--plot', finished, nothing, cwd=tmp_path, check=False).stderr
    assert said.splitlines() == [f'[0] error: {nothing}: no row of metrics.jsonl has both loss and tokens']
    png = (tmp_path / 'loss.png').read_bytes()
    assert png.startswith(b'\x89PNG') and len(png) > 10_000

    figure = plots.plot_losses([finished, running], finished / 'loss.png')
    assert (finished / 'loss.png').read_bytes().startswith(b'\x89PNG')
    by_tokens, by_time = figure.axes
    lines = {line.get_label(): line for line in by_tokens.lines}
    assert list(lines[str(finished)].get_xdata()) == [100 * step for step in steps]
    assert by_time.lines[0].get_xdata()[-1] == pytest.approx(200 * 0.05)
    assert {str(finished), str(running), 'validation'} == {text.get_text() for text in figure.legends[0].get_texts()}


@pytest.mark.parametrize('last, milliseconds', [(0.002, 4), (0.8, 5e5), (9.99, 5)])
def test_no_ticks_overlap_however_far_the_loss_falls_and_however_short_the_run_is(tmp_path, last, milliseconds):
    losses = [10 * (last / 10) ** (step / 99) for step in range(100)]
    rows = [{**row(step), 'loss': loss, 'time/total': milliseconds} for step, loss in enumerate(losses, start=1)]
    figure = plots.plot_losses([write_run(tmp_path / 'a', rows)], tmp_path / 'loss.png')
    by_tokens, by_time = figure.axes
    for axis, side in ((by_tokens.xaxis, 'x'), (by_time.xaxis, 'x'), (by_tokens.yaxis, 'y')):
        low, high = axis.get_view_interval()
        ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
        boxes = [tick.label1.get_window_extent() for tick in ticks]
        assert len(boxes) >= 4
        assert all(getattr(one, f'{side}1') < getattr(next_one, f'{side}0') for one, next_one in pairwise(boxes))


def test_any_keys_of_any_runs_are_drawn_a_panel_each_and_an_unknown_one_names_those_that_are_there(tmp_path):
    runs = [write_run(tmp_path / name, [row(step, grad_norm=1.0) for step in (1, 2)]) for name in ('a', 'b')]
    runs[1].joinpath('metrics.jsonl').write_text(json.dumps(row(2, val_bpb=2.5, grad_norm=0.5)) + '\n')
    said = run_script('compare.py', '--plot', *runs, '--keys=grad_norm,val_bpb', cwd=tmp_path).stdout
    assert said.splitlines()[-1] == 'grad_norm, val_bpb plot: grad_norm-val_bpb.png'
    assert (tmp_path / 'grad_norm-val_bpb.png').read_bytes().startswith(b'\x89PNG')
    figure = plots.plot_keys(runs, ['grad_norm', 'val_bpb'], tmp_path / 'x.png')
    norms, bits = figure.axes
    assert [list(line.get_ydata()) for line in norms.lines] == [[1, 1], [0.5]] and norms.get_ylabel() == 'grad_norm'
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in bits.lines] == [([], []), ([200], [2.5])]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [str(run) for run in runs]
    with pytest.raises(ValueError, match='keys=norm: .*grad_norm, loss, step, tokens, val_bpb'):
        plots.plot_keys(runs, ['norm'], tmp_path / 'x.png')


def with_experts(step, violation, dead=(0.0, 0.0), load=(1.5, 0.5)):
    lists = {'violation_of_layers': violation, 'dead_of_layers': dead, 'load_of_worst_layer': load}
    return row(step, **{f'router/{name}': [*values] for name, values in lists.items()})


def test_a_key_of_lists_is_a_map_for_each_run_that_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    steps = (1, 10, 20)
    runs = [write_run(Path(name), [with_experts(step, (0.1, step)) for step in steps]) for name in ('a', 'b')]
    runs.append(write_run(Path('dense'), [row(step) for step in steps]))
    figure = plots.plot_keys(runs, ['loss', 'router/violation_of_layers'], tmp_path / 'x.png')
    check_page(figure, tmp_path / 'x.png')
    losses, first, second, *_ = figure.axes
    assert len(losses.lines) == 3 and [axes.get_title(loc='left') for axes in (first, second)] == [*map(str, runs[:2])]
    (cells,) = first.collections
    assert cells.get_array().tolist() == [[0.1, 0.1, 0.1], [1, 10, 20]]
    assert cells.get_coordinates()[0, :, 0].tolist() == [0, 100, 1000, 2000], 'tokens, as for the loss'


def test_experts_are_drawn_by_step_and_layer_and_the_least_balanced_runs_of_many(tmp_path):
    runs = {f'run{number}': [with_experts(step, (0.2, number + step)) for step in (1, 50)] for number in range(12)}
    runs['dead'] = [row(0), with_experts(7, (99, math.nan, 1), (0.5, math.nan, 0), (0.0, 31, 0.0, 1))]
    figure = plots.plot_experts({'dense': [row(1)], **runs}, tmp_path / 'experts.png')
    check_page(figure, tmp_path / 'experts.png')
    titles = [axes.get_title(loc='left') for axes in figure.axes]
    assert titles[:24:3] == [*[f'run{number}' for number in range(5, 12)], 'dead']
    assert titles[2] == 'layer 1 at step 50' and titles[23] == 'layer 0 at step 7'
    assert '8 of 13 runs' in figure.get_suptitle()
    violation, dead, experts = figure.axes[21:24]
    cells = violation.collections[0]
    assert cells.get_array().mask.tolist() == [[False], [True], [False]] and violation.yaxis_inverted()
    assert cells.norm.vmax == 99 == figure.axes[0].collections[0].norm.vmax, 'one scale'
    assert [patch.get_height() for patch in experts.patches] == [31, 1, 0, 0]
    assert not dead.texts and written(figure.axes[1]) == ['no dead experts']
    assert plots.plot_experts({'dense': [row(1)]}, tmp_path / 'none.png') is None


@pytest.mark.parametrize(
    'text, message',
    [
        (None, 'does not exist'),
        ('', 'has no row'),
        ('{"step": 1}\n{"step"\n', 'line 2'),
        ('3\n', 'damaged'),
    ],
)
def test_nothing_to_plot_is_one_line(tmp_path, text, message):
    if text is not None:
        write_run(tmp_path / 'a', [], torn=text)
    done = run_script('compare.py', '--plot', tmp_path / 'a', check=False)
    assert done.returncode != 0 and message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(('output', 'said'), [('x.foo', "'foo' is not supported"), ('none/x.png', 'No such file')])
def test_a_picture_that_cannot_be_written_is_one_line(tmp_path, output, said):
    run = write_run(tmp_path / 'a', [row(10)])
    with pytest.raises(OSError, match=said) as raised:
        plots.plot_losses([run], tmp_path / output)
    assert 'cannot be written' in str(raised.value) and '\n' not in str(raised.value)


def test_without_matplotlib_is_one_line(tmp_path, monkeypatch):
    run = write_run(tmp_path / 'a', [row(10)])
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    with pytest.raises(ValueError, match='pip install matplotlib'):
        plots.plot_losses([run], tmp_path / 'loss.png')


def test_time_of_a_curve_is_training_time():
    rows = [
        row(10, **{'time/total': 100.0}),
        {'step': 15, 'tokens': 1500, 'val_loss': 3.5},  # an evaluation between two logged steps
        row(20, **{'time/total': 100.0, 'val_loss': 3.0}),
        row(40, **{'time/total': 200.0, 'loss': math.nan}),
    ]
    curves = plots.loss_curves(rows)
    assert curves['loss']['seconds'] == pytest.approx([1, 2, 6])
    assert curves['loss']['tokens'] == [1000, 2000, 4000]
    assert math.isnan(curves['loss']['loss'][-1])
    assert curves['val_loss']['seconds'] == pytest.approx([1.5, 2])
    assert curves['val_loss']['loss'] == [3.5, 3.0]
    of_pool = [{**one, 'pool/pace': 0.5} for one in rows]  # a step of the run takes two of a job that is alone of two
    assert plots.loss_curves(of_pool)['loss']['seconds'] == pytest.approx([2, 4, 12])


def test_running_mean_forgets_what_left_its_window():
    assert plots.running_mean([1.0, 3.0, 5.0], window=1) == [1, 3, 5]
    assert plots.running_mean([1.0, 3.0, 5.0], window=2) == [1, 2, 4]
    assert plots.running_mean([math.inf, 3.0, 5.0], window=2)[-1] == 4


# --- a comparison -----------------------------------------------------------------------------------------------------

TIMES = {'data': 1, 'forward': 30, 'backward': 60, 'update': 13, 'total': 104, 'comm': 26, 'comm_exposed': 13}


def result(label, **changes):
    """A row of results.json in which everything is known."""
    held = {'weights_gb': 0.02, 'gradients_gb': 0.02, 'optimizer_gb': 0.04}
    values = {f'time/{name}': ms for name, ms in TIMES.items()} | {f'mem/{name}': size for name, size in held.items()}
    values |= {'label': label, 'world_size': 2, 'mem/rank_max_gb': 0.5, 'comm/sent_gb': 0.021}
    values |= {'predicted': {**held, 'gradients_gb': 0.01, 'total_gb': 0.4}, 'predicted_sent_gb': 0.02}
    values['curve'] = {'tokens': [100, 200, 300], 'seconds': [1, 2, 3], 'loss': [4.0, 3.0, 2.0]}
    return {**values, **changes}


def without_numbers(label):
    """A row of a run that failed."""
    return {'label': label, 'world_size': 2}


def widths(axes, label):
    """The lengths of the bars that have this name in the legend, one for each row."""
    return [bar.get_width() for bars in axes.containers if bars.get_label() == label for bar in bars]


def written(axes):
    return [text.get_text() for text in axes.texts]


def markers(axes, label):
    return [at for line in axes.lines if line.get_label() == label for at in line.get_xdata()]


def check_page(figure, path):
    """Check a PNG for a page of 800 to 1000 pixels: all text is inside it, and the names of rows do not overlap."""
    assert path.read_bytes().startswith(b'\x89PNG')
    width, height = figure.get_size_inches()
    box = figure.get_tightbbox()
    assert width == 10 and box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height
    for axes in figure.axes:
        for text in axes.texts if axes.containers else []:
            assert text.get_window_extent().x1 <= axes.bbox.x1 + 1, f'{text.get_text()} leaves its panel'
        named = axes.containers and axes.yaxis_inverted()
        names = [text.get_window_extent() for text in axes.get_yticklabels() if named and text.get_text()]
        assert all(upper.y0 > lower.y1 for upper, lower in zip(names, names[1:], strict=False))


def test_phases_add_up_to_the_step_and_the_wait_is_beside_them(tmp_path):
    rows = [result('ddp'), result('diloco', **{'time/outer': 5, 'time/comm_exposed': 7}), without_numbers('deepspeed')]
    figure = plots.plot_phases(rows, tmp_path / 'phases.png')
    check_page(figure, tmp_path / 'phases.png')
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ['ddp', 'diloco', 'deepspeed']
    assert axes.yaxis_inverted() and 'milliseconds' in axes.get_xlabel()
    assert widths(axes, 'forward') == [30, 30, 0] and widths(axes, 'outer') == [0, 5, 0]
    assert widths(axes, 'waiting for communication') == [13, 7, 0]
    assert written(axes) == ['104.0 ms', '109.0 ms', 'not measured']


def test_memory_as_predicted_and_as_measured(tmp_path):
    figure = plots.plot_memory([result('ddp'), without_numbers('deepspeed')], tmp_path / 'memory.png')
    check_page(figure, tmp_path / 'memory.png')
    state, peak = figure.axes
    assert widths(state, 'gradients, predicted') == [10, 0] and widths(state, 'gradients, measured') == [20, 0]
    assert widths(state, 'weights, measured') == [20, 0] and widths(state, 'optimizer, measured') == [40, 0]
    assert '(MB)' in state.get_xlabel() and '(MB)' in peak.get_xlabel()
    assert written(state) == ['70', 'not predicted', '80', 'not measured'] and written(peak) == ['500', 'not measured']
    assert markers(peak, 'measured peak') == [500] and markers(peak, 'predicted, tensors alone') == [400]

    large = plots.plot_memory([result('ddp', **{'mem/rank_max_gb': 5, 'mem/weights_gb': 2})], tmp_path / 'memory.png')
    assert '(GB)' in large.axes[0].get_xlabel() and widths(large.axes[0], 'weights, measured') == [2]


def test_communication_waited_for_and_hidden_and_what_it_sent(tmp_path):
    alone = {'label': 'single', 'world_size': 1, 'time/total': 100}
    rows = [result('ddp'), alone, result('diloco', **{'comm/sent_gb': 0.001, 'predicted_sent_gb': 0.0})]
    figure = plots.plot_communication(rows, tmp_path / 'communication.png')
    check_page(figure, tmp_path / 'communication.png')
    share, sent = figure.axes
    assert widths(share, 'compute waits') == [12.5, 0, 12.5] and widths(share, 'beside compute') == [12.5, 0, 12.5]
    assert written(share) == ['12.5 of 25.0 %', 'none: one process', '12.5 of 25.0 %']
    assert widths(sent, 'measured') == [21, 0, 1] and markers(sent, 'predicted') == [20, 0]
    assert written(sent) == ['21', 'none: one process', '1'] and '(MB)' in sent.get_xlabel()
    rows[2]['outer_is_comm'] = True
    figure = plots.plot_communication(rows, tmp_path / 'communication.png')
    check_page(figure, tmp_path / 'communication.png')
    assert written(figure.axes[0])[2] == '12.5 of 25.0 % (outer step)'


def test_losses_that_agree_and_one_that_does_not(tmp_path):
    apart = {'tokens': [100, 300], 'seconds': [1, 3], 'loss': [4.0, 2.02]}  # logged less often
    rows = [result('single'), result('ddp'), result('diloco', curve=apart)]
    figure = plots.plot_comparison(rows, tmp_path / 'loss.png')
    check_page(figure, tmp_path / 'loss.png')
    by_tokens, by_time, difference, _ = figure.axes
    assert [line.get_label() for line in by_tokens.lines if len(line.get_xdata())] == ['single', 'ddp', 'diloco']
    assert 'log' in by_tokens.get_ylabel() and 'seconds' in by_time.get_xlabel()
    ddp, diloco, limit = difference.lines
    assert list(ddp.get_ydata()) == [plots.EQUAL] * 3
    assert list(diloco.get_xdata()) == [100, 300] and list(diloco.get_ydata()) == pytest.approx([plots.EQUAL, 0.01])
    assert limit.get_ydata()[0] == 1e-4 and difference.get_title() == 'difference from single'
    below = {'tokens': [100, 200, 300], 'seconds': [1, 2, 3], 'loss': [4.0, math.nan, 1.98]}
    figure = plots.plot_comparison([result('single'), result('diverged', curve=below)], tmp_path / 'loss.png')
    away = list(figure.axes[2].lines[0].get_ydata())
    assert away[0] == plots.EQUAL and math.isnan(away[1]) and away[2] == pytest.approx(0.01)


def test_twelve_rows_with_long_names_fit(tmp_path):
    rows = [result(f'fsdp_manual zero_stage={number} activation_checkpointing=full') for number in range(12)]
    for name in ('phases', 'memory', 'communication', 'comparison'):
        path = tmp_path / f'{name}.png'
        check_page(getattr(plots, f'plot_{name}')(rows, path), path)
    styles = {(line['color'], line['linestyle']) for line in (plots._line(number, 12) for number in range(12))}
    assert len(styles) == 12
