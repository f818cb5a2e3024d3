"""
While a GPU computes, the host should queue what comes next. If the host asks the GPU for a number, it has to wait, and
then the GPU has nothing to do. So between two lines of the log the code may only read what is on the host anyway, or
what was computed a step ago.
"""

import pytest
import torch
from launch import run_many

import data
import optim
from model import GPT, ModelConfig

STEPS, LOGGED = 10, 3  # steps 1, 5 and 10
TINY = '--n_layer=2 --n_head=2 --n_embd=32 --block_size=16 --batch_size=2 --global_batch_size=8 --vocab_size=64'.split()
TINY += ['--device=cpu', '--dataset=synthetic', '--eval_sequences=0', '--keep_checkpoints=0', '--log_interval=5']
ON_THE_HOST = {
    'health.py: total, *flags = numbers.tolist()': STEPS,  # of the step before, copied while this one was queued
    'optim.py: for index, (gradient, t) in enumerate(zip(gradients, self.steps.tolist(), strict=True)):': 2 * STEPS,
    'stopping.py: rank, cause = divmod(int(flag.item()), 128)': STEPS,  # gloo's, of the step before
}


def reads_of(folder, script, *more):
    """[{line of this project: how often it has read a tensor}] of two ranks."""
    arguments = [*TINY, f'--max_iters={STEPS}', f'--out_dir={folder}', *more]
    case = {'name': 'run', 'script': script, 'arguments': arguments, 'reads': True}
    return run_many([case], 2, folder)['run']['reads']


COUNTS = {'optim.py: if skip.item():': STEPS - 1}  # whether the step before was skipped; copied like the loss above
# Without torch.compile the kernels of ADANA cannot take the flag, so the optimizer reads it before it starts.
WAITS = {'optim.py: if not on_device and bool(skip):': STEPS}


@pytest.mark.parametrize(
    'run, reads',
    [
        pytest.param(('train_ddp.py',), COUNTS, marks=pytest.mark.slow),
        pytest.param(('train_fsdp.py',), COUNTS, marks=pytest.mark.slow),
        (('train_fsdp.py', '--fsdp_impl=manual', '--optimizer=adana'), WAITS),
    ],
)
def test_between_two_lines_of_the_log_the_host_reads_nothing_of_the_step(run, reads, tmp_path):
    for places in reads_of(tmp_path, *run):
        at_logging = [
            'watch.py: row[name] = value.item() if isinstance(value, torch.Tensor) else value',
            'meter.py: peaks, costs, seconds = ranks.T.tolist()',
        ]
        assert places == ON_THE_HOST | reads | dict.fromkeys(at_logging, LOGGED)


def test_within_a_round_of_diloco_it_does_not_either(tmp_path):
    for places in reads_of(tmp_path, 'train_diloco.py', '--num_replicas=2', '--inner_steps=5'):
        in_each_step = {place: times for place, times in places.items() if times >= STEPS}
        assert {*in_each_step} <= {*ON_THE_HOST} and len(in_each_step) < len(places), places


SUMS = 'meter.py: peaks, costs, seconds = ranks.T.tolist()'


def test_nor_does_it_in_a_pipeline(tmp_path):
    for places in reads_of(tmp_path, 'train_pipeline.py'):
        in_each_step = {
            place: times for place, times in places.items() if times >= STEPS - 1
        }  # the first may not count
        assert {*in_each_step} <= {*ON_THE_HOST, *COUNTS} and SUMS in places, places


@pytest.mark.slow
def test_nor_where_ranks_share_sequences_of_several_documents(data_dir, tmp_path):
    """The host knows where documents begin, so it need not ask the device for what it has sent there."""
    keys = ['--dataset=tiny', f'--data_dir={data_dir}', '--windows=documents', '--context_parallel=2', '--arch=llama']
    for places in reads_of(tmp_path, 'train_parallel.py', *keys, '--vocab_size=257'):
        in_each_step = {place: times for place, times in places.items() if times >= STEPS}
        assert {*in_each_step} <= {*ON_THE_HOST, *COUNTS} and SUMS in places, places


def test_the_beginnings_of_documents_stay_on_the_host_for_who_wants_them_there():
    batches = [tuple(torch.arange(12).view(3, 4) for _ in range(3)) for _ in range(2)]
    for on_host, expected in ((True, ['meta', 'meta', 'cpu']), (False, ['meta'] * 3)):
        for batch in data.run_ahead(iter(batches), 'meta', on_host):
            assert [part.device.type for part in batch] == expected


@pytest.mark.parametrize('name', optim.OPTIMIZERS)
def test_an_update_needs_no_number_from_the_device(name, monkeypatch):
    """On the device 'meta' there are no numbers, so reading one raises an error."""
    monkeypatch.setattr(torch, 'compile', lambda function, **_: function)
    optim.compiled.cache_clear()
    with torch.device('meta'):
        model = GPT(ModelConfig(arch='llama', n_layer=2, n_head=2, n_embd=32, vocab_size=64, block_size=16))
        tokens = torch.zeros(2, 16, dtype=torch.int64)
    for compiles in (True, False):
        opt = optim.make_optimizer(model, name, 1e-3, 0.9, 0.95, 0.1, wd_ts=10, max_iters=100, compile=compiles)
        for is_last in (False, True):
            model(tokens, tokens)[0].backward()
            grad_norm = optim.clip_grad_norm_(model.parameters(), 1.0)
            # Only the last step gets the flag: a step after it would read the flag, which on a GPU has arrived by then.
            # Optimizers without skips_on_device wait for it.
            takes_flag = is_last and getattr(opt, 'skips_on_device', False)
            opt.step(skip=(~grad_norm.isfinite()).float() if takes_flag else False)
            opt.zero_grad()
    optim.compiled.cache_clear()
    with pytest.raises(RuntimeError):
        grad_norm.item()
