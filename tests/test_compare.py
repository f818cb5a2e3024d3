"""compare.py and comparison/: what is run, in which order, and what is concluded; then each strategy for real."""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch import REPO, environment, run_script

import compare
from comparison import results, run_matrix, verdict
from knobs import read_knobs
from planning import memory, sizes

# Stands in for a train script: `python fake.py train_ddp.py --key=value ...` leaves what a run would leave, at once.
FAKE = """
import json, os, pathlib, sys, time
keys = dict(argument[2:].split('=', 1) for argument in sys.argv[2:])
out = pathlib.Path(keys['out_dir'])
out.mkdir(parents=True, exist_ok=True)
with open(os.environ['CALLS'], 'a') as calls:
    calls.write(f'{out.parent.name} {out.name}\\n')
if out.parent.name == os.environ.get('FAILS'):
    print('[0] starting'), sys.exit('[1] error: no such thing; use another')
if out.parent.name == os.environ.get('SLEEPS'):
    time.sleep(3600)
step_ms = {'ddp': 20.0, 'fsdp': 40.0, 'fsdp_manual': 25.0}[out.parent.name]
rows = [{'step': step, 'tokens': 100 * step, 'loss': 5 - step / 10, 'tokens_per_sec': 100_000 / step_ms,
         'time/total': step_ms} for step in range(1, 5)]
(out / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\\n' for row in rows))
about = {'world_size': int(os.environ.get('STARTS', 2)), 'config': {'dtype': 'float32'}}
(out / 'config.json').write_text(json.dumps(about))
code = os.environ.get('CODE', '0123456789ab') if out.parent.name == 'fsdp' else '0123456789ab'
(out / 'train.log').write_text(f'2026-11-26 21:58:48 code: 1.0, no git commit, sha256 of *.py {code}\\n')
(out / 'threads').write_text(os.environ['OMP_NUM_THREADS'])
if out.parent.name != os.environ.get('STOPS'):
    (out / 'DONE').write_text('4')
"""


def config(**changes):
    defaults = {knob: getattr(compare.Config, knob) for knob in read_knobs(REPO / 'compare.py')}
    return SimpleNamespace(**defaults | changes)


def entries(train_keys=None, explicit=(), **changes):
    """{label: entry} of the plan."""
    plan, _ = run_matrix.expand(config(**changes), train_keys or {}, explicit)
    return {entry['label']: entry for entry in plan['runs']}


# --- what is run ------------------------------------------------------------------------------------------------------


def test_an_axis_that_a_strategy_does_not_have_is_left_out_of_it():
    strategies = ['single', 'ddp', 'fsdp', 'fsdp_manual', 'parallel', 'diloco']
    runs = entries({'tensor_parallel': 2}, strategies=strategies, zero_stages=[1, 3])
    zeros = ['fsdp-zero3', 'fsdp_manual-zero1', 'fsdp_manual-zero3', 'parallel-zero3']
    assert list(runs) == ['single', 'ddp', *zeros, 'diloco']
    assert {label: entry['world_size'] for label, entry in runs.items() if entry['world_size'] != 2} == {'single': 1}
    keys = {label: entry['overrides'] for label, entry in runs.items()}
    assert keys['fsdp-zero3']['fsdp_impl'] == 'torch' and keys['fsdp_manual-zero1']['fsdp_impl'] == 'manual'
    assert keys['fsdp_manual-zero1']['zero_stage'] == 1 and 'zero_stage' not in keys['ddp']
    assert keys['diloco']['num_replicas'] == 2 and keys['diloco']['inner_steps'] == 10
    assert runs['diloco']['script'] == 'train_diloco.py' and runs['parallel-zero3']['script'] == 'train_parallel.py'
    assert [label for label in keys if 'tensor_parallel' in keys[label]] == ['parallel-zero3']


def test_a_strategy_without_any_of_the_stages_is_left_out_with_a_line():
    plan, notes = run_matrix.expand(config(strategies=['ddp', 'fsdp'], zero_stages=[1]), {})
    assert [entry['label'] for entry in plan['runs']] == ['ddp']
    assert len(notes) == 1 and re.match(r'fsdp .*zero_stages=\(2, 3\)', notes[0])


def test_axes_are_multiplied_and_named_where_they_have_several_values():
    runs = entries(strategies=['ddp'], dtypes=['float32', 'bfloat16'], checkpointing=['none', 'full'])
    assert list(runs) == [
        'ddp-checkpoint-none-float32', 'ddp-checkpoint-none-bfloat16',
        'ddp-checkpoint-full-float32', 'ddp-checkpoint-full-bfloat16',
    ]  # fmt: skip
    last = runs['ddp-checkpoint-full-bfloat16']['overrides']
    assert (last['activation_checkpointing'], last['dtype']) == ('full', 'bfloat16')
    assert list(entries(strategies=['diloco'], inner_steps=[1, 10])) == ['diloco-H1', 'diloco-H10']


def test_every_run_has_the_same_global_batch():
    runs = entries({'batch_size': 4}, strategies=['single', 'ddp'], nproc=[1, 2, 4])
    batches = {
        label: (entry['world_size'], entry['overrides']['batch_size'], entry['overrides']['global_batch_size'])
        for label, entry in runs.items()
    }
    assert batches['ddp-4ranks'] == (4, 4, 16)
    assert batches['single'] == (1, 4, 16), 'one process runs 4 micro-steps'
    assert {batch[2] for batch in batches.values()} == {16}


def test_keys_of_runs_come_from_variants_then_the_command_line_then_defaults():
    variants = {'wide': {'strategy': 'ddp', 'n_embd': 256}, 'sgd': {'strategy': 'fsdp', 'optimizer': 'sgd', 'nproc': 1}}
    runs = entries({'n_embd': 192, 'learning_rate': 1e-4}, strategies=['ddp'], variants=variants)
    assert runs['ddp']['overrides']['n_embd'] == 192 and runs['wide']['overrides']['n_embd'] == 256
    assert runs['sgd']['overrides']['optimizer'] == 'sgd' and runs['sgd']['world_size'] == 1
    assert runs['wide']['overrides']['learning_rate'] == 1e-4
    assert 'n_layer' not in runs['ddp']['overrides'], 'not the small model: a model was given'
    assert entries(strategies=['ddp'])['ddp']['overrides']['n_layer'] == run_matrix.SMALL['n_layer']
    assert runs['ddp']['overrides']['keep_checkpoints'] == 0


def test_bench_times_random_tokens_and_leaves_evaluation_and_checkpoints_out():
    given = {'n_layer': 2, 'max_iters': 19000, 'global_batch_size': 512, 'dataset': 'fineweb', 'batch_size': 16}
    keys = entries(given, bench=True, trace=True, strategies=['ddp'])['ddp']['overrides']
    assert keys['dataset'] == 'synthetic' and keys['eval_sequences'] == keys['keep_checkpoints'] == 0
    assert (keys['max_iters'], keys['global_batch_size'], keys['trace_step']) == (30, 32, 10)
    assert entries(given, {'max_iters'}, bench=True, strategies=['ddp'])['ddp']['overrides']['max_iters'] == 19000


def test_random_tokens_have_the_vocabulary_of_the_dataset_that_they_stand_for(tmp_path):
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine' / 'meta.json').write_text('{"vocab_size": 777}')
    given = {'data_dir': str(tmp_path), 'n_layer': 2}
    keys = entries({**given, 'dataset': 'mine'}, bench=True, strategies=['ddp'])['ddp']['overrides']
    assert (keys['dataset'], keys['vocab_size']) == ('synthetic', 777)
    mixed = {'dataset': 'mine:0.7,other:0.3', 'dataset_stages': ((0.9, 'other'),), 'windows': 'documents'}
    keys = entries({**given, **mixed}, bench=True, strategies=['ddp'])['ddp']['overrides']
    assert (keys['dataset'], keys['vocab_size']) == ('synthetic', 777)
    assert (keys['dataset_stages'], keys['windows']) == ((), 'stream')
    keys = entries(given, strategies=['ddp'])['ddp']['overrides']
    assert (keys['dataset'], keys['vocab_size']) == ('synthetic', 2048)
    assert 'vocab_size' not in entries({'dataset': 'mine'}, strategies=['ddp'])['ddp']['overrides']


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        ({'strategies': ['dpp']}, ['dpp', 'fsdp_manual']),
        ({'strategies': []}, ['nothing to compare']),
        ({'nproc': [0]}, ['nproc=[0]', '--nproc=2']),
        ({'nproc': ['two']}, ['nproc']),
        ({'nproc': [2, 3]}, ['ddp-2ranks', 'not a multiple of 16']),
        ({'baseline': 'fsdp'}, ["'fsdp'", ' ddp']),
        ({'variants': {'ddp': {}}}, ['two runs', "'ddp'"]),
        ({'variants': {'a/b': {}}}, ["'a/b'", 'label']),
        ({'variants': {'x': 3}}, ["'x'", 'given 3']),
        ({'variants': {'x': {'nproc': 'two'}}}, ['nproc=', "'two'", 'whole numbers']),
        ({'variants': {'x': {'nproc': 0}}}, ['nproc=[2, 0]', 'whole numbers']),
        ({'launcher': "srun 'x"}, ["launcher=srun 'x", 'quotation']),
        ({'resume_check': True, 'nproc': [2]}, ['half-way', '--max_iters=2']),
        ({'variants': {'odd': {'zero_stag': 2, 'strategy': 'fsdp'}}}, ['odd: zero_stag', 'did you mean zero_stage?']),
        ({'variants': {'odd': {'n_layer': 'two'}}}, ['odd: n_layer', 'expects int']),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused_before_anything_runs(changes, said):
    with pytest.raises(ValueError) as refused:
        run_matrix.expand(config(**{'strategies': ['ddp'], **changes}), {'batch_size': 8, 'n_layer': 2})
    assert all(words in str(refused.value) for words in said) and '\n' not in str(refused.value)


def test_each_repeat_begins_with_another_run():
    entries = [{'label': label, 'strategy': strategy} for label, strategy in ('ax', 'bx', 'cy')]
    queue = [f'{entry["label"]}{repeat}' for repeat, entry in run_matrix.queue_of(entries, config(resume_check=True))]
    assert queue == ['a0', 'b0', 'c0', 'b1', 'c1', 'a1', 'c2', 'a2', 'b2', 'aresumed', 'cresumed']


def test_a_config_file_of_a_train_script_and_its_keys_are_handed_on(tmp_path):
    out = tmp_path / 'out'
    arguments = ['config/gpt2_124m.py', '--strategies=ddp,fsdp', '--max_iters=50', '--write_only', f'--out_dir={out}']
    said = run_script('compare.py', *arguments, '--repeats=2', '--launcher=srun -n {nproc} python', '--nproc=4').stdout
    plan = json.loads((out / 'plan.json').read_text())
    assert [entry['label'] for entry in plan['runs']] == ['ddp', 'fsdp']
    keys = plan['runs'][1]['overrides']
    assert (keys['n_layer'], keys['max_iters'], keys['global_batch_size'], keys['batch_size']) == (12, 50, 512, 16)
    lines = (out / 'runs.sh').read_text().splitlines()[3:]
    assert len(lines) == 4 and f'bash {out / "runs.sh"}' in said
    threads = max(1, len(os.sched_getaffinity(0)) // 4)
    ddp = out / 'runs/ddp/rep0'
    assert lines[0].startswith(f'[ -e {ddp}/DONE -a ! -e {ddp}/FAILED ] || {{ mkdir -p {ddp}; ')
    assert f' OMP_NUM_THREADS={threads} PYTHONUNBUFFERED=1 srun -n 4 python {REPO}/train_ddp.py --' in lines[0]
    assert '/fsdp/rep1' in lines[2] and '/ddp/rep1' in lines[3], 'the second repeat begins with the other one'
    refused = run_script('compare.py', '--out_dir=x', '--stratgies=ddp', check=False).stderr
    assert 'did you mean strategies?' in refused and refused.count('\n') == 1


def test_without_any_key_it_names_commands_and_runs_nothing():
    result = run_script('compare.py', check=False)
    first, *commands, last = result.stderr.splitlines()
    assert (result.returncode, first, last) == (2, 'error: name what to compare:', '--help lists the keys')
    assert len(commands) > 5 and all(re.match(r'    python compare\.py (--|config/)', line) for line in commands)


def test_the_half_of_an_odd_run_is_rounded_up_so_that_its_checkpoint_is_kept():
    keys = entries({'max_iters': 21}, strategies=['ddp'], resume_check=True)['ddp']['overrides']
    assert (keys['checkpoint_interval'], keys['keep_checkpoints']) == (11, 2), 'steps 11 and 21'
    assert keys['permanent_interval'] == 11, 'an interruption saves one more, which must not push it out'


def test_each_strategy_has_the_whole_machine_whatever_is_exported(monkeypatch):
    monkeypatch.setenv('OMP_NUM_THREADS', '77')
    monkeypatch.setattr(compare.os, 'sched_getaffinity', lambda process: range(8))
    threads = {ranks: compare.environment(ranks)['OMP_NUM_THREADS'] for ranks in (1, 2, 8, 16)}
    assert threads == {1: '8', 2: '4', 8: '1', 16: '1'}


def test_one_rank_has_no_link(monkeypatch):
    monkeypatch.delenv('RANK', raising=False)
    monkeypatch.setattr(compare.subprocess, 'call', lambda *_, **__: pytest.fail('something was started'))
    with pytest.raises(ValueError, match='1 rank .*--nproc=2 '):
        compare.measure_links(config(nproc=[1]), {})
    monkeypatch.setattr(compare.subprocess, 'call', lambda command, env: command)
    command = compare.measure_links(config(nproc=[2], launcher='srun -n {nproc} python'), {'device': 'cpu'})
    assert command == ['srun', '-n', '2', 'python', f'{REPO}/benchmarks/links.py', '--device=cpu']
    monkeypatch.setenv('RANK', '0')
    with pytest.raises(ValueError, match='start benchmarks/links.py'):
        compare.measure_links(config(), {})


def test_a_missing_deepspeed_is_left_out_with_one_line(monkeypatch):
    monkeypatch.setattr(run_matrix.importlib.util, 'find_spec', lambda name: None)
    variants = {'zero1': {'strategy': 'deepspeed'}, 'other': {'strategy': 'ddp'}}
    plan, notes = run_matrix.expand(config(strategies=['ddp', 'deepspeed'], variants=variants), {})
    assert [entry['label'] for entry in plan['runs']] == ['ddp', 'other']
    assert len(notes) == 1 and re.match(r'deepspeed .*pip install -r requirements-deepspeed.txt\b', notes[0])
    plan, _ = run_matrix.expand(config(strategies=['deepspeed'], write_only=True), {})
    assert len(plan['runs']) == 1, 'it may be installed where runs.sh runs'


# --- running ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path):
    """start(*arguments, FAILS=label, ...) -> Popen of compare.py, which runs FAKE; start.calls() lists these runs."""
    fake = tmp_path / 'fake.py'
    fake.write_text(FAKE)
    calls = tmp_path / 'calls'

    def start(*arguments, strategies='ddp,fsdp,fsdp_manual', **env):
        command = [sys.executable, str(REPO / 'compare.py'), f'--strategies={strategies}', '--repeats=2',
                   f'--launcher={sys.executable} {fake}', f'--out_dir={tmp_path / "out"}', *arguments]  # fmt: skip
        env = environment(CALLS=str(calls), **env)
        return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    start.calls = lambda: calls.read_text().splitlines()
    start.out = tmp_path / 'out'
    return start


@pytest.mark.slow
def test_runs_alternate_and_what_is_finished_is_not_run_again(start):
    process = start()
    said, errors = process.communicate()
    assert process.returncode == 0, errors
    order = ['ddp rep0', 'fsdp rep0', 'fsdp_manual rep0', 'fsdp rep1', 'fsdp_manual rep1', 'ddp rep1']
    assert start.calls() == order
    assert -0.5 < float((start.out / 'runs/ddp/rep0/others').read_text()) < 1.5
    assert ', repeat 2: ' in said and ' min left\n' in said
    assert (start.out / 'runs/ddp/rep0/threads').read_text() == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert '[1/6] ddp, repeat 1: loss 4.6000, 5,000 tokens/s' in said
    assert {path.name for path in start.out.glob('*.*')} == {
        'plan.json', 'table.md', 'results.json', 'loss.png', 'phases.png', 'memory.png', 'communication.png',
        'report.html',
    }  # fmt: skip
    speedups = {row['label']: row['speedup'] for row in json.loads((start.out / 'results.json').read_text())}
    assert speedups == {'ddp': 1.0, 'fsdp': 0.5, 'fsdp_manual': 0.8}

    (start.out / 'runs/fsdp/rep1/DONE').unlink()
    said, _ = start().communicate()
    assert start.calls() == [*order, 'fsdp rep1'] and re.search('5 of 6 runs .*1 ', said)
    process = start('--n_layer=3')
    _, errors = process.communicate()
    assert process.returncode == 1 and errors.count('\n') == 1 and start.calls() == [*order, 'fsdp rep1']
    assert re.search('ddp .*--out_dir', errors)
    process = start('--analyze', '--baseline=fsdp')
    said, _ = process.communicate()
    assert process.returncode == 0 and 'fastest: ddp, 2.00x fsdp (2.00 to 2.00 in 2 repeats)' in said


def test_a_run_that_fails_says_why_the_others_go_on_and_it_is_tried_again(start):
    process = start(FAILS='fsdp')
    said, _ = process.communicate()
    assert process.returncode == 1 and len(start.calls()) == 6
    assert 'fsdp, repeat 1: failed: [1] error: no such thing; use another\n' in said
    assert 'failed: [1] error: no such thing; use another |' in (start.out / 'table.md').read_text()
    process = start()
    said, _ = process.communicate()
    assert process.returncode == 0 and start.calls()[6:] == ['fsdp rep0', 'fsdp rep1'] and 'failed' not in said


def wait_for(condition, seconds=900):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not condition():
        time.sleep(0.05)
    assert condition()


def running(out):
    return [path for path in Path('/proc').glob('[0-9]*/cmdline') if str(out).encode() in command_line(path)]


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGHUP])
def test_an_interruption_ends_the_run_under_way_and_says_how_to_go_on(start, number):
    process = start(SLEEPS='fsdp')
    wait_for(lambda: (start.out / 'runs/fsdp/rep0').exists() and 'fsdp rep0' in start.calls())
    process.send_signal(number)
    _, errors = process.communicate(timeout=900)
    assert process.returncode == 130 and errors.count('\n') == 2 and 'the same command ' in errors
    assert not running(start.out)
    if number == signal.SIGINT:
        process = start()
        process.communicate()
        assert process.returncode == 0 and start.calls().count('ddp rep0') == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='needs PR_SET_PDEATHSIG')
def test_a_killed_comparison_leaves_nothing_running(start):
    process = start(SLEEPS='ddp')
    wait_for(lambda: start.out.parent.joinpath('calls').exists())
    process.kill()
    process.communicate()
    wait_for(lambda: not running(start.out))


def command_line(path):
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b''


def test_what_cannot_be_started_is_a_failed_run(start):
    process = start('--launcher=no-such-launcher', strategies='ddp')
    said, _ = process.communicate()
    assert process.returncode == 1 and "No such file or directory: 'no-such-launcher'" in said


@pytest.mark.slow
def test_another_number_of_ranks_and_a_run_that_did_not_finish_have_failed(start):
    process = start('--repeats=1', strategies='ddp,fsdp', STARTS='3', STOPS='fsdp')
    said, errors = process.communicate()
    assert process.returncode == 1 and not errors and not (start.out / 'loss.png').exists()
    assert re.search('ddp, repeat 1: failed: .* 3 rank.* 2: .*--launcher\n', said)
    assert re.search('fsdp, repeat 1: failed: .*nothing', said)
    assert (start.out / 'runs/ddp/rep0/DONE').exists() and (start.out / 'runs/ddp/rep0/FAILED').exists()
    process = start('--repeats=1', strategies='ddp,fsdp')
    said, errors = process.communicate()
    assert process.returncode == 0 and start.calls().count('ddp rep0') == 2, 'FAILED beside DONE is run again'


@pytest.mark.slow
def test_the_lines_of_runs_sh_do_what_compare_does(start):
    said, errors = start('--write_only', '--repeats=1').communicate()
    script = start.out / 'runs.sh'
    env = environment(CALLS=str(start.out.parent / 'calls'), FAILS='fsdp')
    subprocess.run(['bash', script], env=env, check=True)
    assert start.calls() == ['ddp rep0', 'fsdp rep0', 'fsdp_manual rep0'], errors
    said, _ = start('--analyze').communicate()
    assert 'failed: fsdp: [1] error: no such thing; use another\n' in said
    subprocess.run(['bash', script], env={**env, 'FAILS': ''}, check=True)
    assert start.calls()[3:] == ['fsdp rep0'] and not (start.out / 'runs/fsdp/rep0/FAILED').exists()


def test_runs_sh_resumes_the_half(tmp_path, capsys):
    plan, _ = run_matrix.expand(config(strategies=['ddp', 'fsdp'], resume_check=True, launcher='true'), {})
    for entry in plan['runs']:
        compare.halves(tmp_path, entry)[0].mkdir(parents=True)
    compare.write_runs(tmp_path, plan, config(repeats=1, launcher='true', resume_check=True))
    lines = (tmp_path / 'runs.sh').read_text().splitlines()
    assert len(lines) == 3 + 4 and all(shlex.split(line) for line in lines[3:])
    assert lines[5].count(' --resume=must; }') == 1 and f'--out_dir={tmp_path}/runs/ddp/resumed' in lines[5]
    subprocess.run(['bash', '-c', lines[5]], check=True)
    assert (tmp_path / 'runs/ddp/resumed/checkpoints/step_00000025').is_dir()


@pytest.mark.slow
def test_a_run_without_a_checkpoint_half_way_cannot_be_resumed(start):
    process = start('--resume_check', '--repeats=1', strategies='ddp,fsdp')
    said, _ = process.communicate()
    assert process.returncode == 1 and said.count('resumed: failed: [Errno 2] No such file') == 2
    assert 'NOT resumed: ddp: [Errno 2] No such file' in said


@pytest.mark.parametrize(('arguments', 'said'), [(['--analyze'], 'no plan.json'), (['--plot', 'nowhere'], 'nowhere')])
def test_a_folder_without_what_is_asked_for_is_one_line(arguments, said, tmp_path):
    result = run_script('compare.py', *arguments, f'--out_dir={tmp_path}', check=False)
    assert result.returncode == 1 and said in result.stderr and result.stderr.count('\n') == 1


def test_a_comparison_without_a_finished_run_cannot_be_analyzed(tmp_path):
    plan, _ = run_matrix.expand(config(strategies=['ddp']), {})
    results.keep_plan(tmp_path, plan)
    with pytest.raises(ValueError, match='no run '):
        compare.analyze(tmp_path, plan, 0)


def test_a_disk_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(OSError, match='cannot be written.*--out_dir'):
        results.write(tmp_path / 'file' / 'table.md', 'text')


# --- what is made of it -----------------------------------------------------------------------------------------------

CONFIG = {'dtype': 'float32', 'optimizer': 'adamw', 'grad_clip': 1.0}
DILOCO = {'num_replicas': 2, 'inner_steps': 4, 'outer_lr': 1.0, 'outer_momentum': 0.0, 'exchange_dtype': 'float32'}


def run(loss=3.0, tokens_per_sec=1000.0, config=None, **values):
    """A Run of 8 steps: the first two, twice as slow, are warm-up."""
    rows = [
        {
            'step': step,
            'tokens': 100 * step,
            'loss': loss,
            'tokens_per_sec': tokens_per_sec / (1 + (step <= 2)),
            **values,
        }
        for step in range(1, 9)
    ]
    return results.Run(rows, {'config': {**CONFIG, **(config or {})}})


def summary(runs, baseline='a', **entries):
    """{label: row}; runs: {label: its repeats, in order or by number}."""
    entry = {'strategy': 'ddp', 'script': '', 'overrides': {}, 'world_size': 2}
    plan = {'runs': [{'label': label, **entry, **entries.get(label, {})} for label in runs]}
    runs = {label: every if isinstance(every, dict) else dict(enumerate(every)) for label, every in runs.items()}
    return {row['label']: row for row in results.summarize(plan, runs, baseline)}


def test_speed_is_the_median_of_medians_after_warm_up_and_speed_ups_are_within_a_repeat():
    rows = summary({
        'a': [run(tokens_per_sec=speed) for speed in (1000, 500, 1200)],
        'b': [run(tokens_per_sec=speed) for speed in (1100, 600, 1200)],
    })  # fmt: skip
    b = rows['b']
    assert (b['tokens_per_sec'], b['tokens_per_sec_min'], b['tokens_per_sec_max']) == (1100, 600, 1200)
    assert (b['speedup'], b['speedup_min'], b['speedup_max']) == (1.1, 1.0, 1.2), '1.1, 1.2 and 1.0'
    assert rows['a']['speedup'] == 1 and b['rows'] == 3


def test_one_failed_repeat_and_one_that_is_not_finished_leave_the_others_paired_by_number():
    failure = results.Run(failure='error: lost')
    rows = summary({
        'a': [run(tokens_per_sec=speed) for speed in (1000, 500, 2000)],
        'b': {0: run(tokens_per_sec=1100), 2: run(tokens_per_sec=2400)},
        'c': [run(tokens_per_sec=1000), failure, run(tokens_per_sec=2000)],
        'd': {1: failure},
        'e': {1: run(tokens_per_sec=250)},
    })  # fmt: skip
    assert (rows['b']['speedup_min'], rows['b']['speedup_max']) == (1.1, 1.2) and rows['b']['rows'] == 2
    assert (rows['c']['speedup'], rows['c']['rows'], rows['c']['failed']) == (1.0, 2, 'error: lost')
    assert rows['d']['rows'] == 0 and rows['e']['speedup'] == 0.5 and rows['e']['loss_diff'] == 0
    text = verdict.facts(list(rows.values()))
    assert 'failed: c (1 of 3 repeats): error: lost' in text and 'failed: d: error: lost' in text
    assert summary({'a': {0: run()}, 'b': {1: run()}})['b'].get('speedup') is None, 'never side by side'


def test_warm_up_is_a_quarter_of_a_short_run_and_ten_steps_of_a_longer_one():
    def median(steps):
        rows = [{'step': step, 'tokens_per_sec': 1.0, 'time/total': float(step)} for step in range(1, steps + 1)]
        return results.median_of_run(rows, 'time/total')

    assert median(8) == 5.5, 'of steps 3 to 8'
    assert median(60) == 35.5, 'of steps 11 to 60'


def test_a_round_has_the_means_of_its_numbers_and_no_lists():
    rows = [{'begin': step, 'step': step + 2, 'mfu': 0.5, 'loss': 4.0 - step, 'of_layers': [1, 2]} for step in (0, 2)]
    assert results.mean_row(rows) == {'begin': 0, 'step': 4, 'mfu': 0.5, 'loss': 3.0}


def test_the_phases_of_a_row_add_up_to_its_total():
    times = {'tokens_per_sec': 1.0, 'time/total': 20.0, 'time/forward': 8.0, 'time/backward': 12.0}
    rows = [{'step': step, **times} for step in range(1, 9)]
    for slow, phase in ((3, 'forward'), (4, 'forward'), (5, 'backward'), (6, 'backward'), (7, 'backward')):
        for key in ('time/total', f'time/{phase}'):
            rows[slow][key] += 10
    row = summary({'a': [results.Run(rows, {'config': CONFIG})]})['a']
    assert row['time/total'] == 30, 'the medians of its parts are 8 and 17'
    assert (row['time/forward'], row['time/backward']) == pytest.approx((30 * 8 / 25, 30 * 17 / 25))


def test_the_verdict_warns_of_speeds_that_a_busy_machine_may_have_made():
    def text(*repeats, others=0.0, ranks=2):
        runs = {'a': [run() for _ in repeats], 'b': [run(tokens_per_sec=speed) for speed in repeats]}
        runs['b'][0].others = others
        rows = summary(runs, a={'world_size': 1}, b={'world_size': ranks})
        return '\n'.join(
            line for line in verdict.facts(list(rows.values())).splitlines() if 'WARNING' in line or 'trust' in line
        )

    assert text(1000, 1400) == text(1900, 1900) == text(1000, others=0.09) == text(3000, 3100, ranks=4) == ''
    end = r'\n- .*trust.* --repeats$'
    assert re.match(r'- WARNING: .*\bb\b.* 1\.6 .*1,000 to 1,600 tokens/s.*' + end, text(1000, 1600))
    assert re.match(r'- WARNING: b .*14\.61x .*\ba on 2 ranks against 1' + end, text(14610))
    assert text(5000, ranks=1) == '', 'on the same ranks another strategy may be as much faster as it likes'
    assert re.match(r'- WARNING: other programs .*43% .*\bb' + end, text(1000, others=0.43))


def test_what_other_programs_take_of_the_machine_is_its_work_without_ours(monkeypatch):
    ticks = iter((1000, 4000))
    monkeypatch.setattr(compare.Path, 'read_text', lambda self: f'cpu {next(ticks)} 0 0 50 50 0 0 0 7 7\n')
    monkeypatch.setattr(compare.os, 'sysconf', lambda name: 100)
    monkeypatch.setattr(compare.os, 'times', lambda: (1, 1, 2, 2, 99))
    assert compare.work_of_others() == 1000 / 100 - 6 and compare.work_of_others() == 4000 / 100 - 6


def test_peak_memory_is_the_largest_of_all_rows_of_all_repeats():
    repeats = [run(**{'mem/rank_max_gb': peak}) for peak in (1.0, 2.0)]
    repeats[1].rows[3]['mem/rank_max_gb'] = 3.0
    assert summary({'a': repeats})['a']['mem/rank_max_gb'] == 3.0


def test_memory_on_a_gpu_is_predicted_for_a_gpu_in_bfloat16_without_what_is_on_the_host():
    resolved = {'arch': 'llama', 'n_kv_head': 12, 'head_dim': 64, 'mlp_hidden_dim': 2048, 'vocab_size': 50304}
    resolved |= {'bias': False, 'tie_embeddings': False, 'packed': False, 'global_batch_size': 16, 'device': 'cpu'}
    config = {**defaults_of('train_fsdp.py'), **resolved, 'dtype': 'float32', 'cpu_offload': 'params'}
    on_gpu = {**config, 'device': 'cuda', 'dtype': 'bfloat16'}
    parts = memory.memory_bytes(on_gpu, sizes.empty_model(on_gpu), 2, 'fsdp')
    predicted = results.predict(config, {'world_size': 2, 'strategy': 'fsdp_manual'}, 80)
    host = sum(size for part, size in parts.items() if part.startswith('host'))
    assert host > 0 and predicted['gpu_gb'] == pytest.approx((sum(parts.values()) - host) / 1e9)
    assert predicted['predicted']['weights_gb'] == pytest.approx(parts['host weights'] / 1e9)
    assert 'gpu_gb' not in results.predict(config, {'world_size': 2, 'strategy': 'fsdp'}, 0)
    assert results.predict({}, {'world_size': 2, 'strategy': 'fsdp'}, 80) == {}, 'a run without config.json'


def defaults_of(script):
    """The defaults of a script's knobs."""
    return {key: knob.default for key, knob in read_knobs(REPO / script).items()}


def test_what_failed_counts_in_what_fits_a_gpu(tmp_path):
    rows = [{'label': 'a', 'rows': 1, 'gpu_gb': 1.0}, {'label': 'big', 'rows': 0, 'gpu_gb': 90.0, 'failed': 'memory'}]
    fit, too_large = verdict.fitting(rows, 80)
    assert fit == 'fit a GPU of 80 GB (GB predicted in bfloat16): a 1'
    assert too_large == 'do NOT fit a GPU of 80 GB (GB predicted in bfloat16): big 90'
    rows[1].pop('gpu_gb')
    assert verdict.fitting(rows, 80) == [fit]
    text = verdict.facts([{'label': 'a', 'rows': 0, 'gpu_gb': 100.0}], 120)
    assert 'fit a GPU of 120 GB (GB predicted in bfloat16): a 100' in text and 'NOT' not in text
    (tmp_path / 'FAILED').write_text('out of memory')
    (tmp_path / 'config.json').write_text('{"config": {"n_layer": 2}}')
    failed = results.read_run(tmp_path, 2)
    assert (failed.failure, failed.config) == ('out of memory', {'n_layer': 2})


def test_damaged_files_are_a_failed_run(tmp_path):
    for name, text in (('DONE', '1'), ('config.json', '{}'), ('metrics.jsonl', '{"step": 1}\n{"st')):
        (tmp_path / name).write_text(text)
    assert re.search('metrics.jsonl .*damaged.* line 2', results.read_run(tmp_path, 2).failure)
    (tmp_path / 'metrics.jsonl').write_text('')
    assert 'metrics.jsonl has no row' in results.read_run(tmp_path, 2).failure
    (tmp_path / 'metrics.jsonl').unlink()
    assert 'metrics.jsonl does not exist' in results.read_run(tmp_path, 2).failure
    (tmp_path / 'config.json').write_text('{')
    assert 'config.json is damaged' in results.read_run(tmp_path, 2).failure


def test_results_json_is_json_also_of_what_diverged(tmp_path):
    results.write_json(tmp_path / 'results.json', [{'loss': math.nan, 'curve': {'loss': (1.0, -math.inf)}}])
    text = (tmp_path / 'results.json').read_text()
    assert json.loads(text, parse_constant=pytest.fail) == [{'loss': 'nan', 'curve': {'loss': [1.0, '-inf']}}]


def test_difference_is_the_largest_of_any_logged_step():
    other = run(3.0)
    other.rows[4]['loss'] = 3.003
    row = summary({'a': [run(3.0)], 'b': [other]})['b']
    assert row['loss_diff'] == pytest.approx(1e-3) and row['loss'] == 3.0 and 'apart' not in row
    worst = run(3.0)
    worst.rows[7]['loss'] = 3.03
    row = summary({'a': [run(3.0)] * 3, 'b': [other, worst, run(3.0)]})['b']
    assert row['loss_diff'] == pytest.approx(1e-2), 'of any repeat'
    other.rows[5]['loss'] = math.nan
    assert summary({'a': [run(3.0)], 'b': [other]})['b']['loss_diff'] == math.inf


def test_what_has_other_mathematics_is_compared_with_its_own_kind():
    sgd = {'optimizer': 'sgd', 'grad_clip': 0.0}
    rows = summary({
        'a': [run(3.0)],
        'H4': [run(3.3, config=DILOCO)],
        'sgd': [run(5.0, config=sgd)],
        'other sgd': [run(5.0, config=sgd)],
        'half': [run(3.0, config={'dtype': 'bfloat16'})],
    })  # fmt: skip
    assert {label: row['reference'] for label, row in rows.items()} == {
        'a': 'a', 'H4': 'a', 'sgd': 'sgd', 'other sgd': 'sgd', 'half': 'a',
    }  # fmt: skip
    assert 'every 4 steps' in rows['H4']['apart'] and rows['half']['apart'] == 'bfloat16 against float32'
    assert 'apart' not in rows['other sgd'] and rows['other sgd']['loss_diff'] == 0
    text = verdict.facts(list(rows.values()))
    assert 'may differ: H4 and a (DiLoCo, 2 replica(s), outer step every 4 steps)' in text
    assert 'may differ: half and a (bfloat16 against float32)' in text


@pytest.mark.parametrize('key', ['rope_theta', 'lr_decay_iters', 'kappa', 'wd_ts', 'lora_alpha', 'freeze', 'heads'])
def test_keys_that_decide_on_losses_make_another_kind(key):
    assert summary({'a': [run()], 'b': [run(config={key: 5})]})['b']['reference'] == 'b'


def test_dropout_draws_by_rank():
    def on(world_size, dropout=0.1, batch_size=4):
        one = run(config={'dropout': dropout, 'batch_size': batch_size})
        one.about['world_size'] = world_size
        return one

    runs = {'a': [on(1)], 'b': [on(2)], 'same': [on(1)], 'other': [on(1, batch_size=2)]}
    assert {label for label, row in summary(runs).items() if 'apart' in row} == {'b', 'other'}
    assert 'apart' not in summary({'a': [on(1, 0.0)], 'b': [on(2, 0.0)]})['b']


@pytest.mark.parametrize(
    ('changes', 'apart'),
    [
        ({'num_replicas': 1}, ''),
        ({'num_replicas': 1, 'outer_lr': 0.7}, '1 replica(s), outer step every 4 steps'),
        ({'num_replicas': 1, 'outer_momentum': 0.9}, '1 replica(s), outer step every 4 steps'),
        ({'num_replicas': 1, 'overlap_steps': 1}, '1 replica(s)'),
        ({}, '2 replica(s), outer step every 4 steps'),
    ],
)
def test_an_outer_step_is_exact_only_where_it_changes_nothing(changes, apart):
    config = {**DILOCO, **changes}
    rows = summary({'a': [run()], 'b': [run(config=config)], 'c': [run(config=config)]})
    assert apart in rows['b'].get('apart', '') and bool(apart) == ('apart' in rows['b'])
    rows = summary({'b': [run(config=config)], 'a': [run()], 'c': [run(config=config)]}, baseline='b')
    assert bool(apart) == ('apart' in rows['a']) and 'apart' not in rows['c'], 'also where it is the baseline'


def exchanging(steps, log_interval, inner_steps):
    """Rows of a DiLoCo run. A step takes 10 ms. After every inner_steps, and after the last step, an exchange takes 10
    ms more and sends 4 GB."""
    rows, begin = [], 0
    for step in [step for step in range(1, steps + 1) if step % log_interval == 0 or step in (1, steps)]:
        passed = range(begin + 1, step + 1)
        exchanges = sum(one % inner_steps == 0 or one == steps for one in passed) / len(passed)
        total = 10 + 10 * exchanges
        row = {
            'step': step,
            'time/total': total,
            'time/forward': 10,
            'tokens_per_sec': 1000 / total,
            'comm/sent_gb': 4 * exchanges,
            'mfu': 1 / total,
        }
        rows.append(row | ({'time/outer': 10 * exchanges} if exchanges else {}))
        begin = step
    return rows


@pytest.mark.parametrize(
    ('steps', 'log_interval', 'inner_steps'),
    [
        (12, 1, 4),
        (40, 2, 5),  # rows straddle rounds
        (45, 2, 5),  # the exchange at the end comes after less than a round
        (47, 1, 10),
        (50, 5, 10),
        (40, 2, 30),  # no whole round after warm-up
        (40, 1, 40),
        (40, 10, 5),  # several rounds in a row
        (40, 7, 100),  # the run is shorter than a round, and ends with its only exchange
    ],
)
def test_diloco_pays_for_its_exchange_once_a_round_however_rows_and_rounds_lie(steps, log_interval, inner_steps):
    rows = exchanging(steps, log_interval, inner_steps)
    share = 1 / min(inner_steps, steps)
    for key, mean in (('time/total', 10 + 10 * share), ('time/outer', 10 * share), ('comm/sent_gb', 4 * share),
                      ('tokens_per_sec', 1000 / (10 + 10 * share)), ('mfu', 1 / (10 + 10 * share))):  # fmt: skip
        assert results.median_of_run(rows, key, inner_steps) == pytest.approx(mean), key


def test_a_row_of_an_evaluation_has_no_steps_of_its_own():
    rows = exchanging(20, 10, 10)
    rows.insert(2, {'step': 15, 'val_loss': 3.0})
    assert (results.median_of_run(rows, 'time/total', 10), results.median_of_run(rows, 'time/outer', 10)) == (11, 1)


def test_communication_of_diloco_is_its_outer_step_and_said_so():
    rows = exchanging(8, 1, 2)
    row = summary({'a': [results.Run(rows, {'config': {**CONFIG, **DILOCO, 'inner_steps': 2}})]})['a']
    assert row['time/comm_exposed'] == row['time/comm'] == row['time/outer'] == 5
    assert verdict.table([row]).splitlines()[-1].startswith('a: communication is the outer step')
    for one in rows:
        one |= {'time/comm': 3.0, 'time/comm_exposed': 1.0}
    row = summary({'a': [results.Run(rows, {'config': {**CONFIG, **DILOCO, 'inner_steps': 2}})]})['a']
    assert (row['time/comm'], row['time/comm_exposed']) == (8, 6), 'of replicas of several ranks'


def test_the_verdict_says_which_runs_were_resumed_to_the_bit():
    def said(**differences):
        rows = summary({label: [run()] for label in differences})
        for label, value in differences.items():
            rows[label]['resume_diff'] = value
        return [line for line in verdict.facts(list(rows.values())).splitlines() if 'resumed' in line]

    line = '- resumed as without the stop: '
    assert said(a=0.0, b=0.0) == [f'{line}a, b (every loss equal to the bit)']
    close = 'largest relative difference of a loss 2.9e-05, limit 0.0001'
    assert said(a=0.0, b=2.9e-5, c=3e-8) == [f'{line}a (every loss equal to the bit), b, c ({close})']
    assert said(a=2.9e-5) == [f'{line}a ({close})']
    good, bad = said(a=math.inf, b=0.0)
    assert good == f'{line}b (every loss equal to the bit)' and bad.startswith('- NOT resumed as without the stop: a ')


def test_a_comparison_says_if_the_code_changed_between_its_runs(start):
    process = start(CODE='ba9876543210')
    said, _ = process.communicate()
    warning = 'WARNING: the code changed between runs, and they may differ for that reason: sha256 of *.py '
    assert process.returncode == 0
    assert f'- {warning}ba9876543210 in fsdp/rep0, fsdp/rep1, 0123456789ab in all others\n' in said
    assert warning in (start.out / 'table.md').read_text()
    assert '<li class=warn><b>WARNING:</b> the code changed between runs' in (start.out / 'report.html').read_text()

    for log in start.out.glob('runs/fsdp/*/train.log'):  # one was interrupted and went on with other code
        log.write_text(log.read_text().replace('ba9876543210', '0123456789ab'))
    assert list(results.codes_of(start.out)) == ['0123456789ab'] and not verdict.other_code(results.codes_of(start.out))
    with open(start.out / 'runs/ddp/rep1/train.log', 'a') as log:
        log.write('step 1 | loss 3\n2026-11-26 22:58:48 code: 1.0, no git commit, sha256 of *.py ba9876543210\n')
    assert 'ba9876543210 in ddp/rep1, ' in verdict.other_code(results.codes_of(start.out))[0]


def test_the_verdict_is_honest_about_noise():
    speeds = {'a': (500, 510), 'b': (1000, 1020), 'c': (990, 1030)}
    rows = summary({label: [run(tokens_per_sec=speed) for speed in pair] for label, pair in speeds.items()})
    text = verdict.facts(list(rows.values()))
    assert 'fastest: b, c (no clear difference between them), 2.00x a (2.00 to 2.00 in 2 repeats)' in text
    rows = summary({label: [run(tokens_per_sec=pair[0])] for label, pair in speeds.items()})
    assert 'fastest: b, 2.00x a (one repeat cannot show noise)' in verdict.facts(list(rows.values()))


def test_the_verdict_pairs_repeats_and_finds_no_winner_where_there_is_none():
    speeds = {'a': (1000, 1000, 1000), 'b': (1100, 1300, 1500), 'c': (1050, 1240, 1430)}  # b is 1.05x c each time
    rows = summary({label: [run(tokens_per_sec=speed) for speed in every] for label, every in speeds.items()})
    assert 'fastest: b, 1.30x a (1.10 to 1.50 in 3 repeats)' in verdict.facts(list(rows.values()))
    speeds = {'a': 2000, 'b': 1000, 'c': 1600}  # the baseline is the fastest, so it is compared with the next one
    rows = summary({label: [run(tokens_per_sec=speed)] for label, speed in speeds.items()})
    assert 'fastest: a, 1.25x c (one repeat cannot show noise)' in verdict.facts(list(rows.values()))
    rows = summary({'a': [run(tokens_per_sec=1000)], 'b': [run(tokens_per_sec=1001)], 'c': []})
    text = verdict.facts(list(rows.values()))
    assert 'fastest: b, a (no clear difference between them)\n' in text and 'not finished: c' in text


def test_tables_have_a_row_per_label_and_only_columns_that_are_known():
    state = {'mem/weights_gb': 0.002, 'mem/gradients_gb': 0.002, 'mem/optimizer_gb': 0.0, 'comm/sent_gb': 0.003}
    rows = summary({'a': [run(3.0, **state)], 'b': [run(3.0003), run(3.0003)], 'c': [results.Run(failure='error: no')]})
    rows['a'] |= {
        'predicted_sent_gb': 0.0015,
        'predicted': {'weights_gb': 0.002, 'gradients_gb': 0.001, 'optimizer_gb': 0},
    }
    lines = [
        [cell.strip() for cell in line.split('|')[1:-1]] for line in verdict.table(list(rows.values())).splitlines()
    ]
    head, _, *cells = lines
    assert head == ['run', 'ranks', 'loss', 'largest difference', 'tokens/s', 'speed-up', 'MB sent (predicted)']
    assert cells == [
        ['a', '2', '3.0000', '', '1,000', '1.00', '3 (1.5, 2.00x)'],
        ['b', '2', '3.0003', '0.0001', '1,000 (1,000 to 1,000)', '1.00', ''],
        ['c', '2', 'failed: error: no', '', '', '', ''],
    ]
    assert '| a   | 2 (2, 1.00x)           | 2 (1, 2.00x)             | 0 (0)' in verdict.memory_table(
        list(rows.values())
    )
    assert verdict.memory_table([rows['b']]) == ''


@pytest.mark.parametrize(
    ('console', 'line'),
    [
        ('step 1\n[1] error: no memory\n[0] stopped because another\nE torch: exit', '[1] error: no memory'),
        ('Traceback\n  File "x"\nKeyError: 7\nW1 closing', 'KeyError: 7'),
        ('Killed\n', 'Killed'),
        ('', 'it said nothing'),
    ],
)  # fmt: skip
def test_the_line_that_says_why_a_run_failed(console, line):
    assert results.last_error(console) == line
