"""runtime/fill.py: the line of a batch, epochs, and settings that are legal but hardly intended; begin.py's Run."""

import re
from types import SimpleNamespace

import pytest
import torch

from layout import Layout
from optim import learning_rate_at
from runtime import begin, fill


def test_the_batch_line_multiplies_out():
    layout = Layout.of({'batch_size': 8, 'global_batch_size': 512}, 'ddp', 4)
    line = layout.batch_line(8, block_size=2048)
    assert '8 sequences x 16 micro-steps x 4 ranks = 512 sequences' in line and '1,048,576 tokens per step' in line


def test_numbers_that_mean_nothing_are_refused_and_what_never_comes_is_said():
    config = {'max_iters': 1000, 'warmup_iters': 100, 'global_batch_size': 32}
    config |= {'eval_sequences': 160, 'eval_only': False, 'trace_step': 0, 'trace_memory': False, 'device': 'cpu'}
    config |= {'lr_schedule': 'cosine', 'lr_decay_iters': None, 'min_lr': 0.0}
    assert fill.cautions(config, n_windows=1000) == []
    with pytest.raises(ValueError, match='eval_sequences=0 with eval_only=True: .*1'):
        fill.cautions({**config, 'eval_sequences': 0, 'eval_only': True}, n_windows=1000)
    assert fill.cautions({**config, 'eval_sequences': 0}, n_windows=1000) == []
    (line,) = fill.cautions({**config, 'trace_step': 1001}, n_windows=1000)
    assert re.search('trace_step=1001 .*max_iters=1000 ', line)
    (line,) = fill.cautions({**config, 'trace_memory': True}, n_windows=1000)
    assert re.search('trace_memory=True with device=cpu: only CUDA', line)
    assert fill.cautions({**config, 'trace_memory': True, 'device': 'cuda:1'}, n_windows=1000) == []
    (line,) = fill.cautions({**config, 'lr_decay_iters': 600}, n_windows=1000)
    assert re.search('min_lr=0 .*lr_decay_iters=600 .*max_iters=1000', line)
    for changes in ({'min_lr': None}, {'lr_schedule': 'constant'}, {'lr_decay_iters': 1000}):
        assert fill.cautions({**config, 'lr_decay_iters': 600, **changes}, n_windows=1000) == []
    assert fill.cautions({**config, 'warmup_iters': 999}, n_windows=1000) == []
    (line,) = fill.cautions({**config, 'warmup_iters': 1000}, n_windows=1000)
    assert re.search('warmup_iters=1000 .*max_iters=1000 ', line)
    run = {**config, 'warmup_iters': 1000, 'lr_schedule': 'cosine', 'learning_rate': 1.0}
    assert learning_rate_at(999, SimpleNamespace(**run)) < 1.0  # nor does it


def test_epochs_are_rounded_up_to_whole_steps():
    assert fill.iterations_of_epochs(3, n_windows=100, global_batch_size=8) == 38
    assert fill.iterations_of_epochs(2.0, 100, 8) == 25
    assert fill.iterations_of_epochs(0.07, 100, 1) == 7  # 0.07 * 100 is 7.000000000000001
    assert fill.iterations_of_epochs(0.001, 30, 64) == 1


@pytest.mark.parametrize('cpu_offload, home', [('none', 'cuda:0'), ('optimizer', 'cuda:0'), ('params', 'cpu')])
def test_weights_that_are_offloaded_live_in_host_memory(cpu_offload, home):
    device = torch.device('cuda:0')
    run = begin.Run(SimpleNamespace(cpu_offload=cpu_offload), {}, {}, 'fsdp', 0, 1, device, torch.bfloat16)
    assert run.home == torch.device(home)
