"""benchmarks/diloco_table.py runs, goes on where it was stopped, and its table says what the runs did."""

import json
import subprocess
import sys

import pytest
from launch import REPO, environment

from benchmarks import diloco_table


@pytest.mark.slow
def test_a_finished_run_is_not_repeated(tmp_path):
    command = [
        sys.executable,
        'benchmarks/diloco_table.py',
        '--short',
        f'--folder={tmp_path}',
        '--rates=1e-3',
        '--seeds=1',
    ]
    command += ['--methods=int4,alone']
    first, second = (
        subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True) for _ in range(2)
    )
    assert first.returncode == second.returncode == 0, first.stdout + first.stderr + second.stderr
    row, alone = map(json.loads, (tmp_path / 'results.jsonl').read_text().splitlines())
    assert alone['method'] == 'alone' and alone['wire'] is None and 0 < alone['val_loss'] < 6
    assert (row['method'], row['rate'], row['seed']) == ('int4', 1e-3, 1) and 0 < row['val_loss'] < 6
    assert json.dumps(row) in first.stdout and json.dumps(row) not in second.stdout
    assert first.stdout.splitlines()[-1] == second.stdout.splitlines()[-1]
    assert f'{row["val_loss"]:.4f}' in second.stdout
    assert [path.name for path in tmp_path.iterdir()] == ['results.jsonl']


def test_the_best_rate_of_the_first_seed_is_what_the_seeds_are_counted_for():
    rows = [
        {'method': method, 'rate': rate, 'seed': seed, 'val_loss': loss, 'wire': wire}
        for method, rate, seed, loss, wire in (
            ('ddp', 1e-3, 1, 3.0, 4e6),
            ('ddp', 2e-3, 1, 2.0, 4e6),
            ('ddp', 4e-3, 1, 2.5, 4e6),
            ('ddp', 2e-3, 2, 2.4, 4e6),
            ('diloco', 1e-3, 1, 2.1, 1e6),
            ('diloco', 2e-3, 1, 2.2, 1e6),
        )
    ]
    _, ddp, diloco = diloco_table.table(rows)
    assert ddp.split()[:7] == ['ddp', '0.002', '2.2000', '2.0000', '2.4000', '2', '4000.0'] and 'edge' not in ddp
    assert diloco.split()[:8] == ['diloco', '0.001', '2.1000', '2.1000', '2.1000', '1', '1000.0', '25.00%']
    assert diloco.endswith('--rates')
