"""log.py: what is written where, and what a log keeps when a run is killed and resumed."""

import json
import math
import os
import platform
import re
import shutil
import sys

import pytest
import torch
from launch import run_function
from outputs import metrics

from comparison.results import read_rows
from runtime.log import Journal, Log, wandb_id
from runtime.meter import device_name

CPU = torch.device('cpu')
CONFIG = {
    'device': 'cpu',
    'batch_size': 8,
    'learning_rate': 3e-4,
    'wandb_log': False,
    'wandb_project': 'tests',
    'wandb_group': None,
    'wandb_run_name': None,
    'tensorboard_log': False,
}


def test_log_begins_with_what_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv('WANDB_API_KEY', 'secret')
    log = Log(tmp_path, 0, 0, 100, CONFIG, {'batch_size'})
    log.say('two\nlines')
    log.close()
    text = (tmp_path / 'train.log').read_text()
    said = {re.sub(r'^\d{4}-\d\d-\d\d ', '', line) for line in text.splitlines()}
    assert said > set(capsys.readouterr().out.splitlines())
    assert all(re.match(r'\d\d:\d\d:\d\d ', line) for line in said)
    assert 'command: ' in text.splitlines()[0]
    assert '*batch_size=8' in text and ' learning_rate=0.0003' in text
    assert f'torch {torch.__version__}' in text and f'{os.cpu_count()} cores' in text
    assert re.search(r'code: \S+.*, sha256 of \*\.py [0-9a-f]{12}', text)
    assert 'secret' not in text


def test_what_runs_is_a_file_for_programs_of_the_last_start(tmp_path, monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '2')
    monkeypatch.setattr(sys, 'argv', ['/somewhere/train_ddp.py', '--batch_size=8'])
    for batch_size in (4, 8):
        Log(tmp_path, 0, 0, 100, {**CONFIG, 'batch_size': batch_size}, set(), flops_per_token=6e9).close()
    about = json.loads((tmp_path / 'config.json').read_text())
    assert about.pop('config') == CONFIG
    assert about.pop('versions') == {'python': platform.python_version(), 'torch': torch.__version__}
    name = device_name(CPU)
    assert about == {'script': 'train_ddp.py', 'world_size': 2, 'device_name': name, 'flops_per_token': 6e9}


def test_each_logged_step_is_a_row_and_a_line(tmp_path, capsys):
    val = {'val_loss': 2.25, 'val_loss/web': 2.125, 'val_loss/code': 2.75}
    log = Log(tmp_path, 0, 0, 100, CONFIG, set())
    log.row(10, {'tokens': 5, 'loss': 2.5, 'time/total': 1000.0, 'time/data': 1.0, 'other': 1})
    log.row(20, {'loss': float('nan'), 'grad_norm': float('inf'), 'time/total': 500.0, **val})
    log.close()
    assert metrics(tmp_path) == [
        {'step': 10, 'tokens': 5, 'loss': 2.5, 'time/total': 1000.0, 'time/data': 1.0, 'other': 1},
        {'step': 20, 'loss': 'nan', 'grad_norm': 'inf', 'time/total': 500.0, **val},
    ]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].endswith(' step  10/100 | loss 2.5000')  # its time may include compilation, so there is no eta yet
    assert lines[-2].endswith(' step  20/100 | loss nan | norm inf | eta 0:00:40')
    assert lines[-1].endswith(' step  20/100 | val loss 2.2500, web 2.1250, code 2.7500')
    assert not any('batch_size=' in line for line in lines) and 'batch_size=' in (tmp_path / 'train.log').read_text()


@pytest.mark.parametrize('start_step', [0, 40])
def test_one_slow_interval_moves_the_eta_by_a_fifth_of_its_excess(tmp_path, capsys, start_step):
    log = Log(tmp_path, 0, start_step, 100 + start_step, CONFIG, set())  # a run that goes on compiles anew
    for step, step_ms in ((10, 9000.0), (20, 1000.0), (30, 6000.0)):
        log.row(start_step + step, {'loss': 2.5, 'time/total': step_ms})
        log.row(start_step + step + 5, {'val_loss': 3.0})
    log.close()
    etas = re.findall(r'loss 2.5000(?: \| eta (.*))?\n', capsys.readouterr().out)
    assert etas == ['', '0:01:20', '0:02:20']  # 80 steps of 1000 ms; 70 of 1000 + 5000 / 5 ms


def test_the_eta_of_a_pool_knows_that_its_jobs_are_fewer_or_more(tmp_path, capsys):
    for pace in (0.5, 2.0):  # one job of two, four jobs of two
        log = Log(tmp_path, 0, 0, 100, CONFIG, set())
        for step in (39, 40):
            log.line(step, {'loss': 2.5, 'time/total': 1000.0, 'pool/pace': pace})
        log.close()
    said = capsys.readouterr().out.splitlines()
    slow, fast = (line for line in said if ' step  40/100 ' in line)
    assert slow.endswith(' | eta 0:02:00') and fast.endswith(' | eta 0:00:30')


def test_a_step_fits_on_a_line_of_120_columns(tmp_path, capsys):
    log = Log(tmp_path, 0, 0, 10000, CONFIG, set())
    row = {
        'loss': 10.5,
        'lr': 6e-4,
        'grad_norm': 1.25,
        'tokens_per_sec': 490123.0,
        'mfu': 0.5,
        'mem/rank_max_gb': 72.25,
    }
    outer = {f'diloco/{key}': 123.4e-5 for key in ('cosine', 'delta_norm', 'momentum_norm', 'drift', 'wait_s')}
    for step in (10, 20):
        log.row(step, {**row, **outer, 'time/total': 3600.0, 'val_loss': 3.5, 'val_ppl': 33.1, 'val_bpb': 1.125})
    log.close()
    step, evaluation, outer = capsys.readouterr().out.splitlines()[-3:]
    assert 'eta 9:58:48' in step and 'bits/byte' in evaluation and 'outer step' in outer
    assert max(map(len, (step, evaluation, outer))) <= 120, step


def test_an_outer_step_in_a_pool_is_named_though_its_cosine_is_not_known(tmp_path, capsys):
    log = Log(tmp_path, 0, 0, 125, CONFIG, set())
    log.row(16, {'diloco/momentum_norm': 2.02, 'diloco/wait_s': 1.18})
    log.close()
    assert capsys.readouterr().out.endswith(' step  16/125 | outer step: momentum 2.02, waited 1.18 s\n')


def test_resume_cuts_rows_beyond_the_checkpoint_and_repairs_a_torn_line(tmp_path):
    first = Log(tmp_path, 0, 0, 100, CONFIG, set())
    for step in (10, 20, 30):
        first.row(step, {'loss': float(step)})
    with open(tmp_path / 'metrics.jsonl', 'a') as file:  # the process was killed: nobody closed the log
        file.write('{"step": 40, "lo')
    resumed = Log(tmp_path, 0, 20, 100, CONFIG, set())
    resumed.row(20, {'val_loss': 1.0})  # step 20 stands already
    resumed.row(30, {'loss': -30.0})
    assert metrics(tmp_path) == [{'step': 10, 'loss': 10.0}, {'step': 20, 'loss': 20.0}, {'step': 30, 'loss': -30.0}]
    assert (tmp_path / 'train.log').read_text().count('command: ') == 2


def test_a_list_of_numbers_is_read_as_it_was_written(tmp_path):
    log = Log(tmp_path, 0, 0, 100, CONFIG, set())
    log.row(1, {'loss': 3.0, 'of_layers': [0.5, math.nan, -math.inf]})
    log.close()
    (row,) = metrics(tmp_path)
    assert row == {'step': 1, 'loss': 3.0, 'of_layers': [0.5, 'nan', '-inf']}, 'JSON'
    (row,) = read_rows(tmp_path)
    assert row['of_layers'] == pytest.approx([0.5, math.nan, -math.inf], nan_ok=True)


def test_a_log_of_another_rank_does_nothing(tmp_path, capsys):
    log = Log(tmp_path / 'out', 1, 0, 100, CONFIG, set())
    log.say('hello')
    log.row(1, {'loss': 1.0})
    log.close()
    assert not (tmp_path / 'out').exists() and capsys.readouterr().out == ''


def test_tensorboard_has_the_same_names(tmp_path):
    event_accumulator = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator')
    for start_step in (0, 1):
        log = Log(tmp_path, 0, start_step, 100, {**CONFIG, 'tensorboard_log': True}, set())
        log.row(start_step + 1, {'loss': 3.0, 'time/total': 5.0, 'of_layers': [0.5, math.nan]})
        log.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / 'tensorboard')).Reload()
    assert set(events.Tags()['scalars']) == {'loss', 'time/total'}
    assert [event.step for event in events.Scalars('loss')] == [1, 2]


@pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')  # of tensorboard's thread
def test_a_full_disk_under_tensorboard_ends_no_run(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    log, step = Log(tmp_path, 0, 0, 100, CONFIG, set()), 0
    log._tensorboard = SummaryWriter(tmp_path / 'tensorboard', flush_secs=0)  # by itself it writes every 2 minutes
    (events,) = (tmp_path / 'tensorboard').iterdir()
    log._tensorboard.flush()
    events.unlink()
    events.symlink_to('/dev/full')
    while log._tensorboard:  # until its thread has met the error
        step += 1
        log.row(step, {'loss': 1.0})
    log.row(step + 1, {'loss': 1.0})
    log.close()
    assert [row['step'] for row in metrics(tmp_path)] == [*range(1, step + 2)]
    said = (tmp_path / 'train.log').read_text()
    assert said.count('WARNING: tensorboard gets nothing from here on, metrics.jsonl has all rows: [Errno 28]') == 1


def test_a_dead_service_of_wandb_ends_no_run(tmp_path, capsys):
    class Dead:
        def log(self, row):
            raise ConnectionResetError('service is gone')

    log = Log(tmp_path, 0, 0, 100, CONFIG, set())
    log._wandb = Dead()
    for step in (1, 2):
        log.row(step, {'loss': 1.0})
    log.close()
    said = capsys.readouterr().out
    assert said.count('WARNING: wandb gets nothing from here on, metrics.jsonl has all rows: service is gone') == 1
    assert [row['step'] for row in metrics(tmp_path)] == [1, 2]


def test_wandb_offline_continues_its_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip('wandb')
    monkeypatch.setenv('WANDB_MODE', 'offline')
    for start_step in (0, 1):
        log = Log(tmp_path, 0, start_step, 100, {**CONFIG, 'wandb_log': True}, set())
        log.row(start_step + 1, {'loss': 3.0, 'of_layers': [0.5, math.nan]})
        log.close()
    said = capsys.readouterr().out
    assert '`wandb sync ' in said
    run_id = (tmp_path / 'wandb' / 'run_id').read_text().splitlines()[0]
    runs = list((tmp_path / 'wandb').glob(f'offline-run-*-{run_id}/run-{run_id}.wandb'))
    assert runs and all(b'loss' in run.read_bytes() for run in runs)  # after close() everything is written


def test_a_copy_of_a_run_gets_a_wandb_run_of_its_own_and_a_folder_that_was_moved_keeps_its_own(tmp_path):
    first, copy, moved, said = tmp_path / 'first', tmp_path / 'copy', tmp_path / 'moved', []
    first.mkdir()
    run_id = wandb_id(first, said.append)
    assert wandb_id(first, said.append) == run_id and not said
    (tmp_path / 'link').symlink_to(first)
    assert wandb_id(tmp_path / 'link', said.append) == run_id and not said
    shutil.copytree(first, copy)
    of_copy = wandb_id(copy, said.append)
    assert of_copy != run_id and said == [
        f'wandb: {copy} is a copy of {first}, which goes on with run {run_id}: this one gets a run of its own'
    ]
    assert wandb_id(copy, said.append) == of_copy and wandb_id(first, said.append) == run_id and len(said) == 1
    first.rename(moved)
    assert wandb_id(moved, said.append) == run_id and len(said) == 1
    (moved / 'wandb/run_id').write_text('of_an_earlier_version')
    assert wandb_id(moved, said.append) == 'of_an_earlier_version'


@pytest.mark.parametrize('package, key', [('wandb', 'wandb_log'), ('torch.utils.tensorboard', 'tensorboard_log')])
def test_missing_package_is_one_line(tmp_path, monkeypatch, package, key):
    monkeypatch.setitem(sys.modules, package, None)  # what importing a missing package does
    with pytest.raises(ValueError, match=f'{key}=True .*pip install') as error:
        Log(tmp_path, 0, 0, 100, {**CONFIG, key: True}, set())
    assert '\n' not in str(error.value)


def log_rounds(out_dir):
    log = Log(out_dir, 0, 0, 10, CONFIG, set())
    journal = Journal(log)
    for step, row in ((3, {'loss': 3.0}), (6, {'loss': 2.0}), (5, {'val_loss': 4.0}), (7, {'loss': 1.0})):
        journal.keep(step, row)
        if 'val_loss' in row:  # the end of a round
            journal.write()
    journal.write()


def show_twice(out_dir):
    log = Log(out_dir, 0, 0, 10, CONFIG, set())
    journal = Journal(log)
    for step, seconds in ((1, 90), (2, 1), (3, 6)):
        row = {'loss': 3.0, 'time/total': 1000.0 * seconds}
        journal.show(step, row)
        journal.keep(step, row)
        journal.write()  # as after an evaluation between two logged steps
    log.close()


def test_a_row_that_is_shown_twice_counts_once_in_the_eta(tmp_path):
    run_function(1, show_twice, tmp_path)
    etas = re.findall(r' step +(\d+)/10 .*?(?: \| eta (.*))?\n', (tmp_path / 'train.log').read_text())
    assert etas == [('1', '')] * 2 + [('2', '0:00:08')] * 2 + [('3', '0:00:14')] * 2  # 7 steps of 1 + 5 / 5 s


def test_an_estimate_that_a_round_has_not_reached_gives_way_to_the_rounds_end(tmp_path):
    run_function(1, log_rounds, tmp_path)
    assert [(row['step'], row.get('loss'), row.get('val_loss')) for row in metrics(tmp_path)] == [
        (3, 3.0, None),
        (5, None, 4.0),
        (7, 1.0, None),
    ]
