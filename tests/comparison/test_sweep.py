"""Fits of laws and learning rates to points of known laws, and sweeps with real runs."""

import json
import math
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from launch import REPO, environment

from comparison import jobs, laws, sweep


def points(generator, noise):
    """25 runs of 5 sizes x 5 numbers of tokens: (params, tokens, loss) of a law with exponents 0.35 and 0.37."""
    params, tokens = np.repeat(np.geomspace(2e5, 5e6, 5), 5), np.tile(np.geomspace(4e6, 1e8, 5), 5)
    losses = 1.5 + 0.9 * (params / 1e6) ** -0.35 + 0.6 * (tokens / 2e7) ** -0.37
    return params, tokens, losses + generator.normal(0, noise, 25)


def test_a_law_of_two_exponents_is_found_from_25_noisy_runs():
    for seed in range(10):
        params, tokens, losses = points(np.random.default_rng(seed), noise=0.003)
        law = laws.fit_law({'params': params, 'tokens': tokens}, losses)
        assert law.terms['params'][1] == pytest.approx(0.35, abs=0.02)
        assert law.terms['tokens'][1] == pytest.approx(0.37, abs=0.02)
        assert np.abs(law.at(params=params, tokens=tokens) - losses).max() < 0.01


def test_without_noise_the_law_is_the_law_also_one_without_a_floor():
    compute = np.geomspace(1e13, 1e16, 6)
    law = laws.fit_law({'compute': compute}, 1.98 + 3.0 * (compute / 1e14) ** -0.3)
    assert law.floor == pytest.approx(1.98, abs=1e-3) and law.terms['compute'][1] == pytest.approx(0.3, abs=1e-3)
    assert law.inverse(law.at(compute=7e14)) == pytest.approx(7e14, rel=1e-9) and law.inverse(1.9) == math.inf
    law = laws.fit_law({'compute': compute}, 3.0 * (compute / 1e14) ** -0.3)
    assert law.floor == pytest.approx(0, abs=2e-3) and law.terms['compute'][1] == pytest.approx(0.3, abs=1e-3)


def test_the_least_squares_are_those_of_all_choices_and_no_number_is_negative():
    generator = np.random.default_rng(2)
    columns, y = generator.normal(size=(50, 9, 3)), generator.normal(size=9)
    numbers, errors = laws.nonnegative_least_squares(columns, y)
    assert (numbers >= 0).all() and (numbers == 0).any() and (numbers > 0).all(1).any()
    for x, found, error in zip(columns, numbers, errors, strict=True):
        assert error == pytest.approx(((x @ found - y) ** 2).sum())
        gradient = x.T @ (x @ found - y)  # Kuhn and Tucker: none at a number above 0, none downwards at 0
        assert np.allclose(gradient[found > 0], 0, atol=1e-8) and (gradient[found == 0] > -1e-8).all()


def coverage(repetitions, times):
    """How often the interval of a bootstrap contains the true loss at 10 times the compute, and the true exponent."""
    compute, held = np.repeat(np.geomspace(1e13, 1e15, 5), 5), np.zeros(2)
    for seed in range(repetitions):
        losses = 1.98 + 0.9 * (compute / 1e14) ** -0.3 + np.random.default_rng(seed).normal(0, 0.004, 25)
        rows = [*zip(compute, losses, strict=True)]
        for n, (statistic, truth) in enumerate([
            (lambda law: law.at(compute=1e16), 1.98 + 0.9 * 100**-0.3),
            (lambda law: law.terms['compute'][1], 0.3),
        ]):  # fmt: skip
            low, high = laws.resampled(lambda some, of=statistic: of(law_of(some)), rows, numbers=3, times=times)
            held[n] += low <= truth <= high
    return held / repetitions


def law_of(rows):
    compute, losses = zip(*rows, strict=True)
    return laws.fit_law({'compute': compute}, losses)


@pytest.mark.slow
def test_an_interval_holds_the_truth():
    """The intervals are of 95%. That 20 or fewer of 25 contain the truth has a probability of 0.3%, and seeds are
    fixed."""
    assert (coverage(25, times=60) >= 0.84).all()


@pytest.mark.slow
def test_intervals_hold_the_truth_in_90_of_100_repetitions():
    assert (coverage(100, times=200) >= 0.9).all()


def test_the_best_rate_is_the_parabolas_and_an_edge_is_called_one():
    rates = [1e-3 * 2**n for n in range(6)]
    losses = [3 + 0.02 * math.log(rate / 5e-3) ** 2 for rate in rates]
    found = laws.fit_rate(rates, losses)
    assert found.best == pytest.approx(5e-3) and found.loss == pytest.approx(3) and found.edge == ''
    assert found.curvature == pytest.approx(0.02) and found.tried == 4e-3
    assert laws.fit_rate([*rates, 0.1], [*losses, math.inf]).best == pytest.approx(5e-3)
    edge = laws.fit_rate(rates[3:], losses[3:])
    assert (edge.best, edge.edge) == (8e-3, 'lower') and laws.fit_rate(rates[:2], losses[:2]).edge == 'upper'
    with pytest.raises(ValueError, match='diverged'):
        laws.fit_rate(rates, [math.nan] * 6)


def test_too_few_points_are_one_line():
    with pytest.raises(ValueError, match='5 runs .*3 .*6 of 2'):
        laws.fit_law({'compute': [1, 1, 1, 2, 2, 2]}, [3, 3, 3, 2, 2, 2])
    with pytest.raises(ValueError, match='too few for an interval'):
        laws.resampled(law_of, [(1.0, 2.0)] * 8, numbers=3)


# --- what runs next ---------------------------------------------------------------------------------------------------


def test_first_the_grid_then_beyond_its_edge_then_the_other_seeds():
    rates, seeds = [1e-3, 2e-3, 4e-3], [7, 8]
    losses = {}
    assert sweep.next_runs(losses, rates, seeds) == [(rate, 7) for rate in rates]
    losses = {(1e-3, 7): 3.0, (2e-3, 7): 2.0, (4e-3, 7): 1.9}
    assert sweep.next_runs(losses, rates, seeds) == [(8e-3, 7)]
    assert sweep.next_runs(losses | {(8e-3, 7): 1.8}, rates, seeds) == [(1.6e-2, 7)]
    assert sweep.next_runs(losses | {(8e-3, 7): math.inf}, rates, seeds) == [(4e-3, 8)]
    falling = losses | {(8e-3, 7): 1.8, (1.6e-2, 7): 1.7, (3.2e-2, 7): 1.6}  # three beyond are enough
    assert sweep.next_runs(falling, rates, seeds) == [(3.2e-2, 8)]
    assert sweep.next_runs(losses | {(8e-3, 7): 2.0, (4e-3, 8): 1.9}, rates, seeds) == []
    assert sweep.next_runs({(rate, 7): math.inf for rate in rates}, rates, seeds) == []
    assert sweep.next_runs({}, None, seeds) == [(None, 7)] and sweep.next_runs({(None, 7): 1.0}, None, seeds) == [
        (None, 8)
    ]


def test_the_compute_of_a_run_is_its_tokens_times_the_flops_of_each(tmp_path):
    """Of the run at the best rate with the first seed; each run has read another number of tokens."""
    group = {'label': 'a', 'size': 's', 'recipe': 'r', 'world_size': 1}
    shape = {'arch': 'gpt2', 'n_layer': 1, 'n_head': 2, 'n_embd': 8, 'block_size': 16, 'vocab_size': 64}
    for rate, seed, loss, tokens in ((1e-3, 1, 3.0, 500), (2e-3, 1, 2.0, 700), (2e-3, 2, 2.5, 900)):
        out = tmp_path / 'runs' / f'a-lr{rate:g}' / f'seed{seed}'
        out.mkdir(parents=True)
        rows = [{'step': 1, 'tokens': 10, 'loss': 4.0}, {'step': 9, 'tokens': tokens, 'val_loss': loss}]
        (out / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, rows)))
        (out / 'config.json').write_text(json.dumps({'world_size': 1, 'flops_per_token': 1e6, 'config': shape}))
        (out / 'DONE').touch()
    row = sweep.summarize(group, sweep.runs_of(tmp_path, group), [1, 2])
    assert (row['tokens'], row['flops'], row['tried']) == (700, 700e6, 2e-3)
    assert row['grid'] == {1e-3: 3.0, 2e-3: 2.0} and row['losses'] == {1: 2.0, 2: 2.5}


def test_a_run_has_diverged_that_is_worse_than_at_its_beginning():
    def rows(step, loss):
        return [{'step': 1, 'loss': 4.0}, {'step': step, 'loss': loss}]

    assert not sweep.diverged(rows(99, 4.9), 100) and not sweep.diverged(rows(19, 9.0), 100)
    assert 'diverged: loss 5.1 at step 20' in sweep.diverged(rows(20, 5.1), 100)
    of_the_start = [{'step': 0, 'val_loss': 3.9}]
    assert 'diverged: loss 5.1 at step 20' in sweep.diverged(of_the_start + rows(20, 5.1), 100)
    assert sweep.has_diverged(sweep.diverged(rows(20, math.nan), 100))


@pytest.mark.slow
def test_a_ladder_tells_the_compute_that_a_recipe_saves_and_foretells_the_next_size():
    """The points come from two known laws, by which the second recipe needs 1.25 times less compute for every loss."""
    chance, rows = random.Random(1), []
    for recipe, factor in (('adamw', 1.0), ('adana', 1.25)):
        for size in range(5):
            flops = 1e13 * 4**size
            losses = {seed: 2 + 0.9 * (factor * flops / 1e14) ** -0.3 + chance.gauss(0, 0.002) for seed in (1, 2, 3)}
            rows.append({'recipe': recipe, 'size': f's{size}', 'flops': flops, 'losses': losses})
    lines = sweep.ladder(rows)
    for size in range(4):
        (line,) = [line for line in lines if line.startswith(f'adana, s{size}: adamw needs ')]
        times, low, high = (float(text.strip('x[],')) for text in line.split()[4:7])
        assert low <= 1.25 <= high and times == pytest.approx(1.25, abs=0.1) and 'EXTRAPOLATED' not in line
    assert 'EXTRAPOLATED' in next(line for line in lines if line.startswith('adana, s4:'))
    (line,) = [line for line in lines if line.startswith('PREDICTION, adana: ')]
    assert float(line.split()[2]) == pytest.approx(2 + 0.9 * (1.25 * 1e13 * 4**5 / 1e14) ** -0.3, abs=0.01)
    assert any(line.startswith('checked, adana: ') for line in lines)
    assert any('at ten times the compute' in line for line in lines)


def row(label, losses, best, edge='', size=''):
    rate = {'best': best, 'tried': best, 'edge': edge}
    return {'label': label, 'size': size, 'losses': dict(enumerate(losses)), 'rate': rate, 'interval': (1e-3, 5e-3)}


def test_a_sweep_says_what_to_take_whether_one_is_better_and_what_to_doubt():
    said = sweep.facts([row('a', [3.0, 3.02], 2e-3), row('b', [2.5, 2.52], 4e-3, 'upper'), row('c', [], 1e-3)])
    assert re.match(r'a: .*learning_rate=0.002 .*0.001 .*0.005.* 0.002, .* 3.0100 \+- 0.0100 .*2 seeds', said[0])
    assert re.match(r'b against a: 0.5000 lower \+- 0.0141, (?!no )', said[2])
    assert len(said) == 5 and said[3].startswith('WARNING: b: ') and 'largest' in said[3]
    assert said[4].startswith('WARNING: c: ') and 'diverged' in said[4] and 'smaller' in said[4]
    noisy = sweep.facts([row('a', [3.0, 3.3], 1e-3), row('b', [3.1, 3.3], 1e-3)])
    assert noisy[-1].startswith('a against b: 0.0500 lower') and ' no clear ' in noisy[-1]
    alone = sweep.facts([row('a', [3.0], 1e-3), row('b', [3.1], 1e-3, size='2')])
    assert len(alone) == 2 and 'one seed' in alone[0]
    assert sweep.facts([row('a', [3.0], 1e-3), row('b', [3.1], 1e-3)])[-1] == 'a against b: 0.1000 lower'


# --- with real runs ---------------------------------------------------------------------------------------------------

SMALL = """
strategies = ['single']
at_once = 2
sweep = {'learning_rate': [1e-3, 1e-2, 1e5]}
seeds = [1, 2]
arch, n_layer, n_head, n_embd, block_size, batch_size = 'llama', 1, 2, 16, 16, 2
dataset, vocab_size, dtype = 'synthetic', 64, 'float32'
max_iters, log_interval, eval_sequences, warmup_iters, grad_clip = 12, 1, 16, 0, 0.0
device = 'cpu'
"""


def start(folder, *keys, text=SMALL):
    (folder / 'sweep.py').write_text(text)
    command = [sys.executable, str(REPO / 'compare.py'), str(folder / 'sweep.py'), f'--out_dir={folder / "out"}', *keys]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_a_sweep_runs_finds_its_best_rate_and_goes_on_where_it_was_stopped(tmp_path):
    process = start(tmp_path)
    while not [*tmp_path.glob('out/runs/*/seed*/console.txt')]:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said = process.communicate()[0]
    assert process.returncode == 130 and 'the same command ' in said, said
    process = start(tmp_path)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    ended = {path.parent.relative_to(tmp_path / 'out/runs').as_posix() for path in tmp_path.glob('out/runs/*/*/DONE')}
    assert {'run-lr0.001/seed1', 'run-lr0.01/seed1'} <= ended and any(path.endswith('seed2') for path in ended)
    row = json.loads((tmp_path / 'out/sweep.json').read_text())[0]
    best = min(loss for loss in row['grid'].values() if loss != 'inf')  # 1e5 diverges, or is the worst
    assert row['losses']['1'] == best and len(row['losses']) == 2
    assert 'best rate' in (tmp_path / 'out/table.md').read_text() and (tmp_path / 'out/rates.png').exists()
    said = start(tmp_path).communicate()[0]
    assert 'to go' not in said and said.count('| best rate') == 1


@pytest.mark.slow
def test_runs_whose_length_follows_from_heads(tmp_path):
    """compare.py looks at a run every 2 seconds and must know its length then, which no key of the file gives."""
    text = SMALL.replace("'llama', 1, 2, 16, 16, 2", "'enoki', 1, 1, 16, 16, 8").replace('max_iters, ', '')
    text = text.replace('= 12, 1, 16, 0, 0.0', '= 100, 16, 0, 0.0') + 'heads, head_dim = 1, 16\n'
    process = start(tmp_path, text=text.replace('[1e-3, 1e-2, 1e5]', '[1e-3]').replace('[1, 2]', '[1]'))
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0 and 'seed1: val loss' in said, said


@pytest.mark.slow
def test_a_job_that_is_cut_by_its_time_limit_goes_on_from_its_checkpoint(tmp_path):
    keys = {'arch': 'llama', 'n_layer': 1, 'n_head': 2, 'n_embd': 16, 'block_size': 16, 'batch_size': 2}
    keys |= {'dataset': 'synthetic', 'vocab_size': 64, 'device': 'cpu', 'eval_sequences': 0, 'keep_checkpoints': 0}
    keys |= {'max_iters': 100_000, 'log_interval': 1}
    entry = {'label': 'run', 'script': 'train_ddp.py', 'world_size': 1, 'overrides': keys}
    assert list(jobs.numbered(tmp_path, [('seed1', entry)])) == [0] and jobs.runs_of(tmp_path) == [['seed1', entry]]
    out = tmp_path / 'runs/run/seed1'
    for beginning in ('starting from scratch', 'resuming '):
        command = [sys.executable, str(REPO / 'compare.py'), f'--out_dir={tmp_path}', '--element=0']
        job = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
        log = out / 'train.log'
        while not (log.exists() and 'step ' in log.read_text().partition(beginning)[2].partition('\n')[2]):
            assert job.poll() is None, job.communicate()[0]
            time.sleep(0.05)
        (out / 'STOP').touch()  # as the run does itself before the end of its job
        assert 'the same command ' in job.communicate()[0] and job.returncode == 1


MISTAKES = {
    "sweep = {'learning_rat': [1, 2]}": 'learning_rat',
    "sweep = {'learning_rate': [1e-3, 1e-3]}": 'different values',
    "sweep = {'learning_rate': [-1e-3]}": 'numbers above 0',
    "sweep, nproc = {'seed': [1]}, [1, 2]": '--nproc',
    "recipes = {'a b': {}}": "recipes: 'a b'",
    "sweep, bench = {'seed': [1, 2]}, True": 'leave out --bench',
    "sweep = {'data_dir': ['a/b', 'c']}": 'use recipes',
    "sweep, eval_sequences = {'n_layer': [1]}, 0": 'compares validation losses',
    "sweep, seeds = {'n_layer': [1]}, []": 'expected one seed',
}


@pytest.mark.parametrize('text', MISTAKES)
def test_mistakes_are_one_line_before_anything_runs(tmp_path, text):
    process = start(tmp_path, text=f'{SMALL}\n{text}\n')
    said = process.communicate()[0].strip()
    assert process.returncode == 1 and '\n' not in said and MISTAKES[text] in said, said
    assert not (tmp_path / 'out').exists()
