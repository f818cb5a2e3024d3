"""
What can be tested on one GPU, in some minutes: `pytest -m gpu`. On a machine without a GPU these tests are skipped, but
`GPU_TESTS_ON=cpu pytest -m gpu` runs them there, to try the tests themselves.
"""

import functools
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from launch import run_script
from outputs import column, metrics, weights_of

import float8
from benchmarks.gpu import write_text
from evaluation import sampling
from model import GPT, ModelConfig

DEVICE = os.environ.get('GPU_TESTS_ON', 'cuda')
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == 'cuda' and not torch.cuda.is_available(), reason='needs a GPU'),
]
KEYS = dict(
    dataset='synthetic', vocab_size=256, arch='llama', n_layer=3, n_head=4, n_kv_head=2, n_embd=128, block_size=128,
    batch_size=4, global_batch_size=8, max_iters=20, log_interval=1, eval_interval=0, eval_sequences=0,
    lr_decay_iters=20, learning_rate=1e-3, warmup_iters=2, device=DEVICE, dtype='float32', compile=False,
    deterministic=True,
)  # fmt: skip
RUNS = {
    'cpu': ('train_ddp.py', {'device': 'cpu'}),
    'ddp': ('train_ddp.py', {}),
    'fsdp': ('train_fsdp.py', {}),
    'manual1': ('train_fsdp.py', {'fsdp_impl': 'manual', 'zero_stage': 1}),
    'manual2': ('train_fsdp.py', {'fsdp_impl': 'manual', 'zero_stage': 2}),
    'manual3': ('train_fsdp.py', {'fsdp_impl': 'manual'}),
    'offload_optimizer': ('train_fsdp.py', {'fsdp_impl': 'manual', 'cpu_offload': 'optimizer'}),
    'offload_params': ('train_fsdp.py', {'fsdp_impl': 'manual', 'cpu_offload': 'params'}),
    'torch_params': ('train_fsdp.py', {'cpu_offload': 'params'}),
    'async': ('train_fsdp.py', {'fsdp_impl': 'manual', 'async_checkpoint': True, 'checkpoint_interval': 5}),
}


def run(out_dir, script, keys, **env):
    arguments = [f'--{key}={value}' for key, value in (KEYS | keys).items()]
    return run_script(script, *arguments, f'--out_dir={out_dir}', **env)


def largest_difference(out_dir, reference):
    """The largest relative difference of two runs' losses."""
    pairs = zip(column(out_dir, 'loss'), column(reference, 'loss'), strict=True)
    return max(abs(ours - theirs) / theirs for ours, theirs in pairs)


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """runs(name) is the folder of that run, which is made when it is first asked for; runs.keys are what all have in
    common: a text from which they learn, and first weights drawn by a CPU, since a GPU draws other random numbers."""
    folder = tmp_path_factory.mktemp('runs')
    keys = write_text(folder / 'data')
    run(folder / 'start', 'train_ddp.py', keys | {'device': 'cpu', 'max_iters': 1})
    keys['init_from'] = folder / 'start'

    @functools.cache
    def made(name):
        script, more = RUNS[name]
        run(folder / name, script, keys | more)
        return folder / name

    made.keys = keys
    return made


@pytest.fixture(scope='module')
def all_runs(runs):
    with ThreadPoolExecutor(min(4, os.cpu_count())) as pool:
        return dict(zip(RUNS, pool.map(runs, RUNS), strict=True))


@pytest.mark.parametrize('name', [name for name in RUNS if name != 'ddp'])
def test_losses_are_those_of_a_cpu_and_of_every_other_strategy(all_runs, name):
    losses = column(all_runs[name], 'loss')
    assert len(losses) == 20 and losses[-1] < 0.9 * losses[0], 'else wrong updates would not show'
    tolerance = 1e-5 if name == 'cpu' or 'offload' in name or 'params' in name else 1e-6  # if a CPU updates the weights
    assert largest_difference(all_runs[name], all_runs['ddp']) <= tolerance


def test_a_run_resumed_under_another_strategy_goes_on_as_if_it_had_not_stopped(runs, tmp_path):
    stops = {'fsdp_impl': 'manual', 'async_checkpoint': True, 'checkpoint_interval': 5, 'max_iters': 10}
    run(tmp_path, 'train_fsdp.py', runs.keys | stops)
    run(tmp_path, 'train_ddp.py', runs.keys)
    assert [row['step'] for row in metrics(tmp_path)] == list(range(1, 21))
    assert largest_difference(tmp_path, runs('ddp')) <= 1e-6


def test_a_bad_step_is_left_out_by_the_device(tmp_path):
    """With learning rate 1e30 neither the second nor any later loss is finite, and the weights stay those of step 1."""
    keys = dict(learning_rate=1e30, min_lr=1e30, warmup_iters=0, max_iters=4, grad_clip=0, keep_checkpoints=0)
    result = run(tmp_path, 'train_fsdp.py', keys | {'fsdp_impl': 'manual'})
    assert result.stdout.count('the step is skipped') >= 2
    assert metrics(tmp_path)[-1]['skipped'] >= 2


@pytest.mark.parametrize('name', ['ddp', 'manual3'])
def test_compiled_in_half_precision_the_loss_is_near_and_nothing_is_compiled_twice(runs, tmp_path, name):
    """Except for evaluation, which keeps nothing for backward: one more graph of a block, and on a GPU of the loss."""
    keys = {'compile': True, 'dtype': 'bfloat16', 'eval_interval': 5, 'eval_sequences': 8, 'deterministic': False}
    script, strategy = RUNS[name]
    result = run(tmp_path, script, runs.keys | strategy | keys, TORCH_LOGS='recompiles')
    why = r'Recompiling function (\w+).*\n.*guard failure.*\n.* - \d+/\d+: (?:GLOBAL_STATE changed: )?(\S+)'
    of_loss = [('pointwise_cross_entropy', 'with_gradient')] if DEVICE != 'cpu' else []
    assert re.findall(why, result.stdout + result.stderr) == [('forward', 'grad_mode'), *of_loss]
    assert largest_difference(tmp_path, runs('ddp')) <= 1e-2


def test_matmuls_in_8_bits_are_those_of_a_cpu_also_compiled():
    if DEVICE == 'cuda' and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip('this GPU has no matmuls of 8 bits')
    torch.manual_seed(0)
    x, weight, dy = torch.randn(4, 48, 80), torch.randn(112, 80), torch.randn(4, 48, 112)
    found = {}
    for name, device in (('cpu', 'cpu'), ('gpu', DEVICE), ('compiled', DEVICE), ('inf', DEVICE)):
        multiply = torch.compile(float8.linear_in_8_bits) if name in ('compiled', 'inf') else float8.linear_in_8_bits
        inputs = [tensor.bfloat16().to(device, copy=True) for tensor in (x, weight)]
        if name == 'inf':  # compiled casts clamp finite numbers
            inputs[0][0, 0, 0] = torch.inf
        inputs = [tensor.requires_grad_() for tensor in inputs]
        y = multiply(*inputs, dtype=torch.bfloat16)
        y.backward(dy.bfloat16().to(device))
        found[name] = [tensor.float().cpu() for tensor in (y, *(tensor.grad for tensor in inputs))]
    for name in ('gpu', 'compiled'):
        for ours, of_cpu in zip(found[name], found['cpu'], strict=True):
            assert (ours - of_cpu).norm() <= 0.01 * of_cpu.norm()  # two roundings to bf16, and 14 bits of a sum
    assert not found['inf'][0].isfinite().any() and not found['inf'][2].isfinite().any()


def test_documents_in_one_row_compute_what_they_do_alone():
    """In half precision, by the kernel for documents and with gradients, beside fp32 with a mask."""
    torch.manual_seed(0)
    config = ModelConfig(arch='llama', n_layer=3, n_head=4, n_kv_head=2, n_embd=128, vocab_size=500, block_size=256)
    x, starts = torch.randint(500, (2, 256), device=DEVICE), torch.tensor([[0, 50, 51, 200], [0, 256, 256, 256]])
    gradients, logits = {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        with torch.device(DEVICE):
            model = GPT(config, dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(model.initial_value(name, parameter, 0, 'cpu'))
            logits[dtype] = model(x, starts=starts.to(DEVICE)).float()
            alone = torch.cat([model(part)[0] for part in x[:1].split((50, 1, 149, 56), 1)]).float()
        tolerance = 1e-5 if dtype == torch.float32 else 0.03
        assert (logits[dtype][0] - alone).norm() <= tolerance * alone.norm()
        model(x, x.roll(-1, 1), starts.to(DEVICE))[0].backward()
        gradients[dtype] = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    for fp32, bf16 in (gradients.values(), logits.values()):
        assert 0 < (fp32 - bf16).norm() <= 0.05 * fp32.norm()


def test_what_was_trained_goes_on_with_the_tokens_that_a_cpu_finds(runs):
    keys = KEYS | {'tie_embeddings': None}
    model = GPT(ModelConfig.from_keys(keys))
    model.load_state_dict(weights_of(runs('async'), 20), strict=False)
    prompts = [list(range(10)), [3, 1, 4]]
    expected = sampling.generate_batch(model, prompts, 40)
    assert sampling.generate_batch(model.to(DEVICE), prompts, 40) == expected
    assert list(map(len, expected)) == [40, 40]
