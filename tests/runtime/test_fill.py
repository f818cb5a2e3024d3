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


def test_a_model_too_large_for_a_cpu_is_warned_of_before_its_first_step():
    assert begin.line_of_slow_steps(9) == []
    (line,) = begin.line_of_slow_steps(61.2)
    assert line.startswith('WARNING: a step takes about 61 s on this CPU: `python train_ddp.py config/quickstart.py`')


def test_numbers_that_mean_nothing_are_refused_and_what_never_comes_is_said():
    config = {'max_iters': 1000, 'warmup_iters': 100, 'global_batch_size': 32}
    config |= {'eval_sequences': 160, 'eval_only': False, 'trace_step': 0, 'trace_memory': False, 'device': 'cpu'}
    config |= {'eval_interval': 500}
    assert fill.cautions(config, n_windows=1000) == []
    with pytest.raises(ValueError, match='eval_sequences=0 with eval_only=True: .*1'):
        fill.cautions({**config, 'eval_sequences': 0, 'eval_only': True}, n_windows=1000)
    assert fill.cautions({**config, 'eval_sequences': 0}, n_windows=1000) == []
    (line,) = fill.cautions({**config, 'trace_step': 1001}, n_windows=1000)
    assert re.search('trace_step=1001 .*max_iters=1000 ', line)
    (line,) = fill.cautions({**config, 'trace_memory': True}, n_windows=1000)
    assert re.search('trace_memory=True with device=cpu: only CUDA', line)
    assert fill.cautions({**config, 'trace_memory': True, 'device': 'cuda:1'}, n_windows=1000) == []
    single = {**config, 'n_experts': 4, 'experts_per_token': 1, 'router_normalize': True}
    (line,) = fill.cautions(single, n_windows=1000)
    assert re.search('experts_per_token=1 with router_normalize=True.* --router_normalize=False', line)
    assert fill.cautions({**single, 'router_normalize': False}, n_windows=1000) == []
    (line,) = fill.cautions({**config, 'patience': 2}, n_windows=1000)
    assert re.search('patience=2 .*eval_interval=500 .*max_iters=1000 .*never ends early', line)
    assert fill.cautions({**config, 'patience': 2, 'eval_interval': 499}, n_windows=1000) == []


SCHEDULE = {'max_iters': 1000, 'warmup_iters': 100, 'lr_decay_iters': 1000, 'min_lr': 0.1, 'learning_rate': 1.0}
SCHEDULE |= {'lr_schedule': 'cosine', 'optimizer': 'adamw', 'wd_ts': None}


@pytest.mark.parametrize(
    ('changes', 'line'),
    [
        ({'warmup_iters': 999}, None),
        ({'warmup_iters': 1000}, 'warmup_iters=1000 of max_iters=1000 steps: the learning rate never reaches its peak'),
        ({'lr_decay_iters': 101}, 'lr_decay_iters=101 of max_iters=1000 steps: the others train at min_lr=1.00e-01'),
        ({'lr_decay_iters': 600, 'min_lr': 0.0}, 'min_lr=0 from lr_decay_iters=600 to max_iters=1000: nothing is'),
        ({'lr_decay_iters': 600, 'min_lr': 0.0, 'lr_schedule': 'constant'}, None),
        ({'lr_decay_iters': 2000}, 'lr_decay_iters=2000 is beyond max_iters=1000: the run ends at a learning rate of'),
        ({'lr_schedule': 'wsd', 'warmup_iters': 800}, None),
        ({'lr_schedule': 'wsd', 'warmup_iters': 850}, 'warmup_iters=850 of lr_decay_iters=1000 .* wsd .*150 .*200'),
        ({'optimizer': 'adana', 'wd_ts': 1000}, None),
        ({'optimizer': 'adamw-decay', 'wd_ts': 1001}, 'wd_ts=1001 of max_iters=1000 steps: the weight decay does not'),
        ({'wd_ts': 1001}, None),  # which adamw does not read
    ],
)
def test_keys_of_the_schedule_that_contradict_each_other_are_said_with_the_key_that_mends_it(changes, line):
    said = fill.check_schedule(SCHEDULE | changes)
    assert re.match(f'WARNING: {line}', *said) if line else said == []
    if line:
        key, value = re.search(r'--(\w+)=(\w+)', *said).groups()
        mended = {key: SCHEDULE['max_iters'] if value == 'None' else int(value)}
        assert fill.check_schedule(SCHEDULE | changes | mended) == []


@pytest.mark.parametrize('schedule', ['cosine', 'cos_inf', 'wsd', 'linear'])
def test_a_rate_that_would_drop_before_its_peak_is_refused(schedule):
    keys = SCHEDULE | {'lr_schedule': schedule, 'lr_decay_iters': 100}
    reached = max(learning_rate_at(step, SimpleNamespace(**keys)) for step in range(1000))
    drop = f'from {reached:.2e} to min_lr=1.00e-01 at step 100'
    with pytest.raises(ValueError, match=f'lr_decay_iters=100 is not beyond warmup_iters=100: .*{drop}'):
        fill.check_schedule(keys)
    assert (
        reached
        < 1.0
        == max(learning_rate_at(step, SimpleNamespace(**keys | {'lr_decay_iters': 101})) for step in [100])
    )
    with pytest.raises(ValueError, match='min_lr=2'):
        fill.check_schedule(SCHEDULE | {'lr_schedule': schedule, 'min_lr': 2})


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
