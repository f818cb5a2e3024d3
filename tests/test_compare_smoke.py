"""compare.py for real: config/compare_smoke.py under every strategy. It takes minutes, so it has a file of its own."""

import importlib.util
import json
import sys

import pytest
from launch import REPO, run_script
from precision import apart


@pytest.mark.slow
def test_all_strategies_train_save_and_resume(tmp_path):
    """Ranks are forked, since torchrun would import torch three times for each run."""
    launcher = f'{sys.executable} {REPO / "tests" / "launch.py"} {{nproc}}'
    result = run_script(
        'compare.py', 'config/compare_smoke.py', f'--out_dir={tmp_path}', f'--launcher={launcher}', timeout=3600
    )
    rows = {row['label']: row for row in json.loads((tmp_path / 'results.json').read_text())}
    expected = {'single', 'ddp', 'fsdp', 'fsdp_manual', 'diloco', 'fsdp_manual-zero1'}
    has_deepspeed = importlib.util.find_spec('deepspeed') is not None
    assert set(rows) == expected | ({'deepspeed', 'deepspeed-zero1'} if has_deepspeed else set())
    assert ('deepspeed is left out' in result.stdout) != has_deepspeed

    assert {label for label, row in rows.items() if 'apart' in row} == {'diloco'}
    assert 0 < rows['diloco']['loss_diff'] < 0.1 and 'every 5 steps' in rows['diloco']['apart']
    resumed = {label: row['resume_diff'] for label, row in rows.items() if 'resume_diff' in row}
    assert set(resumed) == set(rows) & {'single', 'ddp', 'fsdp', 'fsdp_manual', 'deepspeed', 'diloco'}
    assert all(value <= apart(20) for value in resumed.values()), resumed

    for label, row in rows.items():
        assert row['tokens_per_sec'] > 0 and len(row['curve']['loss']) == 20, label
        assert 0.9 < row['mem/weights_gb'] / row['predicted']['weights_gb'] < 1.1, label
        if row['world_size'] > 1 and 'comm/sent_gb' in row:
            assert 0.9 < row['comm/sent_gb'] / row['predicted_sent_gb'] < 1.1, label
    assert rows['fsdp']['mem/weights_gb'] == pytest.approx(rows['ddp']['mem/weights_gb'] / 2, rel=0.05)
    table = (tmp_path / 'table.md').read_text()
    assert '- may differ: diloco and single ' in table and table.strip() in result.stdout
    for picture in ('loss', 'phases', 'memory', 'communication'):
        assert (tmp_path / f'{picture}.png').read_bytes().startswith(b'\x89PNG')
