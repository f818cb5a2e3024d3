"""The faults of corruptions.py: prove.py finds each, and names its cause."""

import pytest
from corruptions import CORRUPTIONS, corrupt, prove

SHORT = ['ddp: all ranks read the data of the first', 'tensor: norm counts uncut parameters twice']


@pytest.mark.parametrize(
    'corruption',
    [pytest.param(one, marks=() if one.name in SHORT else pytest.mark.slow, id=one.name) for one in CORRUPTIONS],
)
def test_a_fault_is_found_and_its_cause_named(tmp_path, corruption):
    corrupt(corruption, tmp_path / 'code')
    code, found, said = prove(tmp_path / 'code', corruption)
    assert code == 1, said
    assert any(corruption.says in line for line in found['layouts'][-1]['lines']), said
