"""benchmarks/pool_round.py runs: it is a job of a pool, by what is inside of pool/replica.py."""

import pytest
from launch import run_script


@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['float32', 'int4'])
def test_a_round_of_a_pool_is_timed(tmp_path, dtype):
    keys = ['--numbers=20000', '--rounds=1', f'--dtype={dtype}', f'--folder={tmp_path}']
    said = run_script('benchmarks/pool_round.py', *keys).stdout
    assert f'MB of parameters, {dtype}, 1 rounds' in said and 'ratio' in said
