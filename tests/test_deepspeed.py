"""train_deepspeed.py: a run is the same under every stage of ZeRO, and all train scripts can read its checkpoints."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from launch import REPO, TINY_MODEL, TINY_RUN, Job, fork_script, run_many, run_script
from layouts import layout_of
from outputs import checkpoint_of, column, metrics, weights_of
from precision import apart, error
from pretrained import save_model, write_chats
from short import slow_but

import deepspeed_engine
from planning import memory, sizes
from runtime import checkpoint

try:
    import deepspeed  # noqa: F401  find_spec() would find what cannot be imported, too
except Exception as error:  # DeepSpeed has one of its own where CUDA is without nvcc
    INSTALLED, REASON = False, f'{error}: pip install -r requirements-deepspeed.txt'
else:
    INSTALLED, REASON = True, ''
needs_deepspeed = pytest.mark.skipif(not INSTALLED, reason=REASON)

STEPS = 6
RUN = [*TINY_MODEL, *TINY_RUN, '--dataset=tiny', '--global_batch_size=12', '--dtype=float32', '--lr_decay_iters=6']
# As in large models, no weight is small enough to be kept whole on every rank, and a bucket holds only one matrix.
SMALL = {'zero_optimization': {'stage3_param_persistence_threshold': 0, 'reduce_bucket_size': 5000}}
IN_HALF = {'communication_data_type': 'bf16'}
IN_HALF['bf16'] = {'bf16_master_weights_and_grads': True, 'bf16_optimizer_states': True}
UNTIED = ['--arch=llama']  # its head is used outside of its module, and nothing else gathers it
RUNS_ON_2 = {
    'stage1': ['--zero_stage=1'],
    'stage2': ['--zero_stage=2'],
    'stage3': ['--zero_stage=3'],
    'stage3_small': ['--zero_stage=3', '--deepspeed_config=small.json', '--activation_checkpointing=full', *UNTIED],
    'bf16_1': ['--zero_stage=1', '--dtype=bfloat16'],
    'bf16_2': ['--zero_stage=2', '--dtype=bfloat16'],
    'bf16_3': ['--zero_stage=3', '--dtype=bfloat16'],
    'offload_1': ['--zero_stage=1', '--cpu_offload=optimizer'],
    'offload_3': ['--zero_stage=3', '--cpu_offload=params'],
    'adana': ['--zero_stage=2', '--optimizer=adana'],
    'in_half': ['--zero_stage=2', '--dtype=bfloat16', '--deepspeed_config=half.json'],
}
# The runs that the short suite starts, with those with which they are compared.
SHORT = {
    'single',
    'single_untied',
    'ddp_to_deepspeed',
    'stage2',
    'stage3',
    'stage3_small',
}
SHORT |= {'again3_half', 'again3', 'spikes2', 'three2', 'resumed_by_deepspeed'}
LORA = [*TINY_RUN, '--dataset=synthetic', '--block_size=32', '--batch_size=2', '--global_batch_size=12']
LORA += ['--dtype=float32', '--lora_rank=4', '--learning_rate=0.01', f'--max_iters={STEPS}', '--eval_interval=2']
STAGE_3 = ['--zero_stage=3', '--deepspeed_config=small.json']
# train_deepspeed.py with a loss_spike_guard that takes every step from the third on as a spike.
SPIKES = """
import runpy

from planning import memory, sizes
from runtime import checkpoint, health

health.SPIKE_WINDOW, health.SPIKE_SIGMAS = 2, -1e9
try:
    globals().update(runpy.run_path('train_deepspeed.py', run_name='__main__'))
finally:
    health.SPIKE_WINDOW, health.SPIKE_SIGMAS = 128, 6
"""
# DeepSpeed refuses fp16 on a CPU. This lets it start, so that the loss scale is handled as on a GPU.
IN_FP16 = """
import runpy

import deepspeed_engine

package = deepspeed_engine.package


def with_fp16(device):
    found = package(device)
    found.accelerator.get_accelerator().is_fp16_supported = lambda: True
    return found


deepspeed_engine.package, deepspeed_engine.check = with_fp16, lambda keys, layout, shape: None
globals().update(runpy.run_path('train_deepspeed.py', run_name='__main__'))
"""
FIXED_SCALE = {'fp16': {'enabled': True, 'loss_scale': 128}}
HALF = ['--max_iters=3']


def arguments(out_dir, data_dir, *more):
    return [*RUN, f'--data_dir={data_dir}', f'--out_dir={out_dir}', f'--max_iters={STEPS}', *map(str, more)]


@pytest.fixture(scope='module')
def runs(tmp_path_factory, data_dir, has_slow_tests):
    """A folder with the runs of this file; their names say what trained where."""
    folder = tmp_path_factory.mktemp('deepspeed')
    (folder / 'small.json').write_text(json.dumps(SMALL))
    (folder / 'half.json').write_text(json.dumps(IN_HALF))
    (folder / 'spikes.py').write_text(SPIKES)
    (folder / 'fp16.py').write_text(IN_FP16)
    (folder / 'fixed.json').write_text(json.dumps(FIXED_SCALE))
    (folder / 'small_scale.json').write_text(json.dumps({'fp16': {'initial_scale_power': 10}}))
    model = folder / 'model'
    if has_slow_tests:
        save_model(model, 'llama')
        write_chats(folder / 'chats.jsonl')
        fork_script('prepare_data.py', f'--dataset={folder}/chats.jsonl', '--name=chats', f'--tokenizer={model}',
                   f'--data_dir={folder}', '--val_fraction=0.2', '--num_proc=1')  # fmt: skip
    chats = ['--lora_rank=0', '--learning_rate=0.001', '--dataset=chats', f'--data_dir={folder}']

    def start(cases, nproc):
        run_many([one for one in cases if has_slow_tests or one['name'] in SHORT], nproc, folder)

    def case(name, script, *more, out=None):
        more = [part.replace('deepspeed_config=', f'deepspeed_config={folder}/') for part in more]
        return {'name': name, 'script': script, 'arguments': arguments(folder / (out or name), data_dir, *more)}

    def lora(name, script, *more):
        more = [part.replace('deepspeed_config=', f'deepspeed_config={folder}/') for part in more]
        keys = [*LORA, f'--init_from={model}', f'--out_dir={folder}/{name}', *more]
        return {'name': name, 'script': script, 'arguments': keys}

    single = [case('single', 'train_ddp.py'), case('single_untied', 'train_ddp.py', *UNTIED)]
    single += [case('single_bf16', 'train_ddp.py', '--dtype=bfloat16')]
    single += [case('single_adana', 'train_ddp.py', '--optimizer=adana')]
    single += [case('ddp_to_deepspeed', 'train_ddp.py', *HALF), lora('single_lora', 'train_ddp.py')]
    tuned = ['--lora_rank=0', '--learning_rate=0.001']
    single += [lora('single_chats', 'train_ddp.py', *chats), lora('single_tuned', 'train_ddp.py', *tuned)]
    single += [case('alone3', 'train_deepspeed.py', '--zero_stage=3')]
    start(single, 1)
    on_2 = [case(name, 'train_deepspeed.py', *more) for name, more in RUNS_ON_2.items()]
    for stage in (1, 3):  # interrupted after 3 of 6 steps
        zero = f'--zero_stage={stage}'
        on_2.append(case(f'again{stage}_half', 'train_deepspeed.py', zero, *HALF, out=f'again{stage}'))
        on_2.append(case(f'again{stage}', 'train_deepspeed.py', zero))
    on_2.append(case('deepspeed_to_fsdp', 'train_deepspeed.py', '--zero_stage=2', '--async_checkpoint', *HALF))
    on_2.append(case('unsaved', 'train_deepspeed.py', '--zero_stage=2', '--keep_checkpoints=0', '--eval_sequences=0'))
    on_2 += [lora('lora2', 'train_deepspeed.py', '--zero_stage=2'), lora('lora3', 'train_deepspeed.py', *STAGE_3)]
    for stage, dtype in ((1, 'bfloat16'), (2, 'float32'), (3, 'float32')):
        more = [f'--zero_stage={stage}', f'--dtype={dtype}', '--loss_spike_guard', '--checkpoint_interval=2']
        on_2.append(case(f'spikes{stage}', f'{folder}/spikes.py', *more, '--max_iters=4'))
    on_2.append(lora('tuned', 'train_deepspeed.py', '--zero_stage=3', *tuned))
    for stage in (2, 3):  # interrupted, too
        fp16 = ['--dtype=float16', f'--zero_stage={stage}']
        half = [*fp16, *HALF, '--deepspeed_config=small_scale.json']
        on_2.append(case(f'fp16_{stage}_half', f'{folder}/fp16.py', *half, out=f'fp16_{stage}'))
        on_2.append(case(f'fp16_{stage}', f'{folder}/fp16.py', *fp16))
    fixed = ['--dtype=float16', '--zero_stage=1', '--deepspeed_config=fixed.json', '--max_iters=2']
    on_2.append(case('fixed_scale', f'{folder}/fp16.py', *fixed))
    start(on_2, 2)
    on_3 = [case(f'three{stage}', 'train_deepspeed.py', f'--zero_stage={stage}') for stage in (1, 2)]
    on_3 += [case('three3', 'train_deepspeed.py', '--zero_stage=3', '--deepspeed_config=small.json')]
    on_3 += [lora('chats', 'train_deepspeed.py', '--zero_stage=3', *chats)]
    on_3 += [case('resumed_by_deepspeed', 'train_deepspeed.py', '--zero_stage=3', out='ddp_to_deepspeed')]
    on_3 += [case('resumed_by_fsdp', 'train_fsdp.py', out='deepspeed_to_fsdp')]
    start(on_3, 3)
    return folder


def assert_equal(out_dir, expected, tolerance):
    for key in ('loss', 'grad_norm'):
        assert column(out_dir, key) == pytest.approx(column(expected, key), rel=tolerance), key
    assert column(out_dir, 'val_loss')[-1] == pytest.approx(column(expected, 'val_loss')[-1], rel=tolerance)
    assert [row['step'] for row in metrics(out_dir) if 'loss' in row] == list(range(1, STEPS + 1))


@needs_deepspeed
@pytest.mark.parametrize(
    'name', slow_but(SHORT, ['stage1', 'stage2', 'stage3', 'three1', 'three2', 'three3', 'offload_1', 'offload_3'])
)
def test_every_stage_computes_what_one_process_computes(runs, name):
    assert_equal(runs / name, runs / 'single', 1e-4)


@needs_deepspeed
def test_weights_that_are_used_outside_of_their_module_are_gathered(runs):
    assert_equal(runs / 'stage3_small', runs / 'single_untied', 1e-4)


@needs_deepspeed
@pytest.mark.parametrize('stage', slow_but(SHORT, [1, 2, 3], 'bf16_{}'.format))
def test_in_bf16_it_computes_what_the_others_do_up_to_rounding(runs, stage):
    assert_equal(runs / f'bf16_{stage}', runs / 'single_bf16', 5e-3)
    tensor, like = (weights_of(runs / name, 6)['embed.weight'] for name in (f'bf16_{stage}', 'single'))
    assert tensor.dtype == like.dtype and not tensor.bfloat16().float().equal(tensor)  # fp32 masters, not the copies


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize('stage', [2, 3])
def test_in_fp16_the_loss_scale_is_the_engines_and_goes_into_checkpoints(runs, stage):
    out_dir = runs / f'fp16_{stage}'
    assert_equal(out_dir, runs / 'single', 2e-2)
    assert error(*(column(path, 'loss') for path in (out_dir, runs / 'single'))) > apart(STEPS)
    assert 'skipped' not in metrics(out_dir)[-1]
    for step in (3, STEPS):
        assert checkpoint.read_state(checkpoint_of(out_dir, step))['scaler']['scale'] == 1024


@pytest.mark.slow
@needs_deepspeed
def test_a_loss_scale_that_the_users_file_fixes_stays(runs):
    state = checkpoint.read_state(runs / 'fixed_scale/checkpoints/step_00000002')
    assert json.loads((runs / 'fixed_scale/deepspeed.json').read_text())['fp16']['loss_scale'] == 128
    assert column(runs / 'fixed_scale', 'loss')[:2] == pytest.approx(column(runs / 'single', 'loss')[:2], rel=1e-2)
    assert state['step'] == 2


@pytest.mark.slow
@needs_deepspeed
def test_weights_in_a_wrong_place_are_noticed_before_the_first_step(data_dir, tmp_path, monkeypatch):
    (tmp_path / 'robin.json').write_text('{"zero_optimization": {"round_robin_gradients": true}}')
    script = 'import runpy, deepspeed_engine\ndeepspeed_engine.FIXED = {}\n'
    (tmp_path / 'unchecked.py').write_text(f"{script}runpy.run_path('train_deepspeed.py', run_name='__main__')\n")
    more = ['--zero_stage=2', f'--deepspeed_config={tmp_path}/robin.json']
    keys = arguments(tmp_path / 'out', data_dir, *more)
    refused = run_script('train_deepspeed.py', *keys, check=False)
    assert re.search('"zero_optimization.round_robin_gradients" is true, .*false', refused.stderr)
    result = run_script(str(tmp_path / 'unchecked.py'), *keys, nproc=2, check=False, PYTHONPATH=str(REPO))
    assert result.returncode and 'other numbers' in result.stdout + result.stderr


@pytest.mark.slow
@needs_deepspeed
def test_an_optimizer_of_ours_runs_on_flat_slices(runs):
    assert_equal(runs / 'adana', runs / 'single_adana', 1e-4)


@needs_deepspeed
@pytest.mark.parametrize('stage', slow_but(SHORT, [1, 3], 'again{}'.format))
def test_a_resumed_run_is_the_same_run(runs, stage):
    assert 'resuming' in (runs / f'again{stage}' / 'train.log').read_text()
    assert_equal(runs / f'again{stage}', runs / f'stage{stage}', apart(STEPS))


@needs_deepspeed
@pytest.mark.parametrize('name', slow_but(SHORT, ['ddp_to_deepspeed', 'deepspeed_to_fsdp']))
def test_scripts_go_on_from_each_others_checkpoints_with_the_optimizer(runs, name):
    """From 1 rank to 3, and from 2 to 3. Without the moments the loss of step 5 would differ."""
    assert 'resuming' in (runs / name / 'train.log').read_text()
    assert_equal(runs / name, runs / 'single', 1e-4)


@pytest.mark.slow
@needs_deepspeed
def test_what_it_holds_is_measured(runs):
    parameters = 4 * 30_000  # at least; fp32
    for name, gathered in (('stage1', 1), ('stage3_small', 0)):
        row = metrics(runs / name)[0]
        assert row['mem/weights_gb'] * 1e9 > parameters * (gathered + 0.5)
        assert 0 < row['mem/gradients_gb'] < row['mem/weights_gb']
    about, row = json.loads((runs / 'alone3/config.json').read_text())['config'], metrics(runs / 'alone3')[0]
    predicted = memory.memory_bytes(about, sizes.empty_model(about), 1, 'deepspeed')
    for part in ('weights', 'gradients', 'optimizer'):  # under stage 3 on one rank, whose slice is all of it
        assert row[f'mem/{part}_gb'] * 1e9 == pytest.approx(predicted[part], rel=0.01), part
    bf16, fp32 = (metrics(runs / name)[0] for name in ('bf16_2', 'stage2'))
    assert bf16['mem/optimizer_gb'] == pytest.approx(fp32['mem/optimizer_gb'], rel=1e-3)  # moments are fp32
    assert bf16['mem/weights_gb'] < 0.8 * fp32['mem/weights_gb']  # 2 + 4/2 bytes per parameter and not 4 + 4/2


@pytest.mark.slow
@needs_deepspeed
def test_it_writes_its_configuration_and_no_checkpoint_where_none_is_wanted(runs):
    settings = json.loads((runs / 'stage3_small' / 'deepspeed.json').read_text())
    assert settings['zero_optimization']['stage'] == 3 and settings['train_batch_size'] == 12
    assert settings['zero_optimization']['reduce_bucket_size'] == SMALL['zero_optimization']['reduce_bucket_size']
    assert not checkpoint.checkpoints_in(str(runs / 'unsaved' / 'checkpoints'))
    assert column(runs / 'unsaved', 'val_loss') == []


@pytest.mark.slow
@needs_deepspeed
def test_a_checkpoint_is_exported(runs, tmp_path):
    result = run_script('export_model.py', f'--out_dir={runs}/stage3', f'--to={tmp_path}/model')
    assert 'weights equal, logits equal' in result.stdout
    assert 'accelerator' not in result.stdout + result.stderr  # to save a model, transformers imports deepspeed, too


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize('name', ['tuned', 'chats'])
def test_a_transformers_model_trains_under_stage_3_as_under_ddp(runs, name):
    assert_equal(runs / name, runs / f'single_{name}', apart(STEPS))
    assert column(runs / 'chats', 'loss')[-1] < column(runs / 'chats', 'loss')[0]


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize('stage', [2, 3])
def test_lora_trains_as_under_ddp_and_saves_what_it_trains_alone(runs, stage):
    from safetensors.torch import load_file

    assert_equal(runs / f'lora{stage}', runs / 'single_lora', 1e-4)
    stored = load_file(runs / 'model' / 'model.safetensors')
    trained, like = (weights_of(runs / name, STEPS) for name in (f'lora{stage}', 'single_lora'))
    assert trained and trained.keys() == like.keys() and not trained.keys() & stored.keys()
    assert all(torch.allclose(trained[name], like[name], atol=1e-4) for name in trained)


@needs_deepspeed
@pytest.mark.parametrize('stage', slow_but(SHORT, [1, 2, 3], 'spikes{}'.format))
def test_a_bad_step_with_finite_gradients_changes_no_weight(runs, stage):
    """DeepSpeed's own check for overflows does not see such a step."""
    out_dir = runs / f'spikes{stage}'
    assert metrics(out_dir)[-1]['skipped'] == 2 and all(map(math.isfinite, column(out_dir, 'grad_norm')))
    good, after_two_bad = weights_of(out_dir, 2), weights_of(out_dir, 4)
    assert all(torch.equal(tensor, after_two_bad[name]) for name, tensor in good.items())


@needs_deepspeed
@pytest.mark.parametrize(
    ('name', 'dtype'),
    slow_but(SHORT, [('stage3', 'float32'), ('bf16_2', 'float32'), ('in_half', 'bfloat16')]),
)
def test_the_log_tells_the_dtypes_that_there_are(runs, name, dtype):
    compute = 'float32' if name == 'stage3' else 'bfloat16'
    line = f'dtypes: weights {dtype}, compute {compute}, gradient reduction {dtype}, optimizer state {dtype}'
    said = (runs / name / 'train.log').read_text()
    assert line in said and said.count('dtypes: ') == said.count('command: ')  # it is said once, by who knows


@pytest.mark.slow
@needs_deepspeed
def test_bad_steps_are_skipped_on_all_ranks_and_nothing_else_is_said(runs, data_dir, tmp_path):
    """The learning rate is so high that the weights leave the range of fp32 after the first step."""
    more = ['--zero_stage=1', '--dtype=bfloat16', '--max_bad_steps=1', '--learning_rate=1e38', '--warmup_iters=1']
    result = run_script('train_deepspeed.py', *arguments(tmp_path, data_dir, *more), nproc=2, check=False)
    assert result.returncode != 0
    said = (tmp_path / 'train.log').read_text()
    assert re.search(r'skipped .*\b1 ', said)
    assert 'max_bad_steps=1' in result.stdout + result.stderr
    others = [line for line in result.stdout.splitlines() if line and line not in said]
    assert others == []  # such as DeepSpeed's settings, its memory reports, and what it would compile


def test_without_the_package_one_line_says_what_to_install(data_dir, tmp_path):
    (tmp_path / 'deepspeed.py').write_text("raise ImportError('No module named deepspeed')\n")
    command = arguments(tmp_path / 'out', data_dir)
    result = run_script('train_deepspeed.py', *command, check=False, PYTHONPATH=str(tmp_path))
    assert result.returncode != 0 and 'Traceback' not in result.stderr
    assert 'pip install -r requirements-deepspeed.txt' in result.stderr


@pytest.mark.slow
@needs_deepspeed
def test_what_the_engine_refuses_when_it_starts_is_one_line(data_dir, tmp_path):
    (tmp_path / 'ds.json').write_text('{"prescale_gradients": true}')
    more = ['--zero_stage=2', f'--deepspeed_config={tmp_path}/ds.json']
    job = Job('train_deepspeed.py', arguments(tmp_path / 'out', data_dir, *more), 2, tmp_path / 'log')
    assert 0 not in job.wait(100)
    assert 'AssertionError: pre-scale gradients' in job.text()
    assert 'Traceback' not in job.text()


def test_gradients_on_the_host_are_waited_for(monkeypatch):
    """DeepSpeed copies them into pinned memory without waiting for the GPU."""
    waited, flat = [], torch.zeros(2)
    flat.grad = torch.ones(2)
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda: waited.append(True))
    zero = SimpleNamespace(cpu_offload=True, single_partition_of_fp32_groups=[flat])
    engine = SimpleNamespace(optimizer=zero, device=torch.device('cuda'), zero_optimization_stage=lambda: 2)
    assert deepspeed_engine.gradients(engine) == [flat.grad] and waited == [True]


KEYS = {'zero_stage': 2, 'optimizer': 'adamw', 'cpu_offload': 'none', 'compile': False, 'init_from': 'scratch'}
KEYS |= {'device': 'cpu', 'dtype': 'bfloat16', 'global_batch_size': 16, 'batch_size': 2, 'grad_clip': 1.0}
KEYS |= {'lr_schedule': 'cosine', 'optimizer_dtype': 'float32', 'matmul_dtype': None}


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        ({'optimizer': 'muon'}, 'optimizer=muon: '),
        ({'optimizer_dtype': 'int8'}, 'optimizer_dtype=int8: .* leave it out'),
        ({'matmul_dtype': 'float8'}, 'matmul_dtype=float8: .* leave it out, or train with train_fsdp.py'),
        ({'zero_stage': 3, 'compile': True}, 'use --compile=False'),
        ({'cpu_offload': 'params'}, 'cpu_offload=params with zero_stage=2'),
        ({'dtype': 'float16'}, 'use --dtype=bfloat16'),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(changes, words):
    layout = layout_of('deepspeed', 1)
    deepspeed_engine.check(KEYS, layout, None)
    with pytest.raises(ValueError) as raised:
        deepspeed_engine.check(KEYS | changes, layout, None)
    assert re.search(words, str(raised.value)) and '\n' not in str(raised.value)


@pytest.mark.slow
def test_under_stage_3_compile_is_refused_and_not_the_default_of_a_gpu():
    plan = ['--dry_run', '--device=cuda', '--zero_stage=3', '--dataset=synthetic', '--vocab_size=512']
    assert 'total on the device' in run_script('train_deepspeed.py', *plan).stdout
    refused = run_script('train_deepspeed.py', *plan, '--compile=True', check=False)
    assert refused.returncode == 1 and 'use --compile=False' in refused.stderr


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('{"train_batch_size": 32}', '"train_batch_size" is 32, .*global_batch_size=16 .*16'),
        ('{"gradient_clipping": 0.5}', '"gradient_clipping" is 0.5, with grad_clip=1.0'),
        ('{"zero_optimization": {"stage": 3}}', '"zero_optimization.stage" is 3, with zero_stage=2'),
        ('{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}', 'with cpu_offload=none'),
        ('{"fp16": {"enabled": true}}', '"fp16.enabled" is true, with dtype=bfloat16'),
        ('{"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}', '--optimizer, --learn'),
        ('{"optimizer": {"type": "Lamb"}}', '"optimizer" '),
        ('{"scheduler": {"type": "WarmupLR"}}', '--lr_schedule=constant, or delete "scheduler"'),
        ('{"torch_autocast": {"enabled": true}}', '"torch_autocast" is decided by --dtype'),
        ('{"amp": true}', '"amp" is decided by --dtype'),
        ('{"zero_optimization": true}', '"zero_optimization" is true, '),
        ('{"zero_optimization": {"cpu_offload": true}}', 'zero_optimization.cpu_offload" is true, .*false'),
        ('{"zero_optimization": {"zero_hpz_partition_size": 2}}', 'zero_hpz_partition_size" is 2, .*1'),
        ('{"zero_optimisation": {"stage": 2}}', 'did you mean "zero_optimization"'),
        ('{"bf16": [1]}', r'"bf16" is \[1], '),
        ('[1]', 'JSON object'),
        ('{', 'JSON'),
        (None, 'cannot be read'),
    ],
)
def test_a_json_file_that_contradicts_the_keys_is_refused(tmp_path, text, words):
    path = tmp_path / 'ds.json'
    if text is not None:
        path.write_text(text)
    with pytest.raises((ValueError, OSError)) as raised:
        deepspeed_engine.configuration(KEYS, 4, str(path))
    assert re.search(words, str(raised.value)) and str(path) in str(raised.value) and '\n' not in str(raised.value)


def test_all_contradictions_of_a_json_file_are_named_at_once(tmp_path):
    theirs = {'scheduler': 1, 'bf16': 2, 'gradient_clipping': 3, 'zero_optimization': {'cpu_offload': True, 'stage': 3}}
    (tmp_path / 'ds.json').write_text(json.dumps(theirs))
    with pytest.raises(ValueError) as raised:
        deepspeed_engine.configuration(KEYS, 4, str(tmp_path / 'ds.json'))
    names = ('scheduler', 'bf16', 'gradient_clipping', 'zero_optimization.stage', 'zero_optimization.cpu_offload')
    assert [part.split('"')[1] for part in str(raised.value).split('; ')] == [*names] and '\n' not in str(raised.value)


def test_sections_of_auto_are_as_if_not_given(tmp_path):
    """Written as in the documentation of transformers."""
    auto = {'type': 'AdamW', 'params': {'lr': 'auto', 'betas': 'auto', 'eps': 'auto', 'weight_decay': 'auto'}}
    theirs = {'optimizer': auto, 'amp': {'enabled': 'auto', 'opt_level': 'auto'}, 'torch_autocast': 'auto'}
    theirs['scheduler'] = {'type': 'WarmupCosineLR', 'params': {'total_num_steps': 'auto', 'warmup_num_steps': 'auto'}}
    (tmp_path / 'ds.json').write_text(json.dumps(theirs))
    settings = deepspeed_engine.configuration(KEYS, 4, str(tmp_path / 'ds.json'))
    assert settings == deepspeed_engine.configuration(KEYS, 4)


def test_a_json_file_is_filled_in(tmp_path):
    """Files for other trainers have 'auto', or leave a setting out: in both cases it gets what the keys say."""
    theirs = {'train_batch_size': 'auto', 'gradient_clipping': 1, 'bf16': {'enabled': 'auto'}, 'comms_logger': 'auto'}
    theirs |= {'fp16': None, 'communication_data_type': {}}  # the engine refuses the second
    theirs['zero_optimization'] = {'stage': 2, 'reduce_bucket_size': 'auto', 'overlap_comm': True}
    (tmp_path / 'ds.json').write_text(json.dumps(theirs))
    settings = deepspeed_engine.configuration(KEYS, 4, str(tmp_path / 'ds.json'))
    assert settings['train_batch_size'] == 16 and settings['gradient_accumulation_steps'] == 4
    assert settings['bf16']['enabled'] is True and 'comms_logger' not in settings
    assert settings['fp16']['enabled'] is False and settings['communication_data_type'] == {}
    zero = {'stage': 2, 'reduce_bucket_size': deepspeed_engine.BUCKET, 'overlap_comm': True}
    assert settings['zero_optimization'] == zero
