"""Checkpoints of LoRA, which hold only what is trained; dropout, rsLoRA and modules_to_save beside peft."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launch import TINY_RUN, run_function, run_many, start_and_stop_behind
from outputs import as_of_step, checkpoint_of, column, tensors_of
from precision import assert_same_run
from pretrained import STRATEGIES, refusal, save_model, start
from short import slow_but

import optim
from huggingface import finetune, loading, lora
from huggingface.pretrained import Pretrained
from layout import Share
from runtime import checkpoint, checkpoint_saver

STEPS = 6
RUN = [*TINY_RUN, '--block_size=32', '--batch_size=1', '--global_batch_size=6', '--dtype=float32', '--warmup_iters=0']
RUN += [
    '--lr_schedule=constant',
    '--eval_interval=0',
    '--dataset=synthetic',
    '--learning_rate=1e-2',
]
RUN += ['--lora_rank=4', '--keep_checkpoints=9', '--checkpoint_interval=2']
WITH_ALL = ['--lora_rslora', '--lora_dropout=0.1', '--modules_to_save=lm_head,norm', '--lora_targets=q_proj,down_proj']


@pytest.fixture(scope='module')
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp('models')
    for kind in ('llama', 'llama_tied', 'gpt2', 'qwen3_moe'):
        save_model(folder / kind, kind)
    return folder


def keys_of(model, out_dir, *more):
    return [*RUN, f'--init_from={model}', f'--out_dir={out_dir}', *more]


@pytest.fixture(scope='module')
def whole(models, tmp_path_factory):
    """A run of STEPS steps without a break, on 2 ranks."""
    out_dir = tmp_path_factory.mktemp('whole')
    start('torch', *keys_of(models / 'llama', out_dir, f'--max_iters={STEPS}'), nproc=2)
    return out_dir


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('name', 'nproc'), slow_but(['manual'], [('ddp', 1), ('ddp', 3), ('torch', 3), ('manual', 1), ('diloco', 2)])
)
def test_a_run_goes_on_under_every_strategy_and_number_of_ranks(models, whole, tmp_path, name, nproc):
    out_dir = as_of_step(2, whole, tmp_path / 'out')
    start(name, *keys_of(models / 'llama', out_dir, f'--max_iters={STEPS}'), nproc=nproc)
    assert_same_run(column(out_dir, 'loss'), column(whole, 'loss'))
    saved = tensors_of(checkpoint_of(out_dir, STEPS))
    weights = {key for key in saved if key.startswith('model.')}
    assert weights and all('.lora_' in key for key in saved if not key.startswith('diloco'))


def test_a_checkpoint_has_the_size_of_what_is_trained(models, whole):
    pretrained = Pretrained(str(models / 'llama'), lora_rank=4)
    with torch.device('meta'):
        trained = finetune.for_training(pretrained).parameter_counts()['trainable']
    tensors = tensors_of(checkpoint_of(whole, STEPS))
    assert sum(tensor.numel() for tensor in tensors.values() if tensor.dim()) == 3 * trained, 'weights and two moments'


def test_all_linear_layers_may_be_named_as_peft_does(models, whole, tmp_path):
    """Also where a run goes on that was not told so, and where one begins with it."""
    on, new = as_of_step(2, whole, tmp_path / 'on'), tmp_path / 'new'
    start('ddp', *keys_of(models / 'llama', on, f'--max_iters={STEPS}', '--lora_targets=all-linear'))
    assert_same_run(column(on, 'loss'), column(whole, 'loss'))
    start('ddp', *keys_of(whole, new, '--max_iters=1', '--lora_targets=all-linear'))


def test_other_weights_of_the_same_shapes_are_refused_and_a_copy_elsewhere_is_not(models, whole, tmp_path):
    """By everything that reads the run, and before anything is trained."""
    other = tmp_path / 'other'
    shutil.copytree(models / 'llama', other)
    change_a_layer(other)
    out_dir = as_of_step(2, whole, tmp_path / 'out')
    line = refusal('manual', *keys_of(other, out_dir, f'--max_iters={STEPS}'), nproc=2)
    assert f'a run that began with {models / "llama"}, and init_from={other} holds other weights' in line
    copy = tmp_path / 'copy'
    shutil.copytree(models / 'llama', copy)
    start('ddp', *keys_of(copy, out_dir, '--max_iters=4'))
    assert_same_run(column(out_dir, 'loss'), column(whole, 'loss')[:4])

    change_a_layer(copy)  # what reads the run looks where it was last trained
    for script, *more in (
        ('sample.py', '--device=cpu'),
        ('export_model.py', f'--to={tmp_path / "exported"}'),
    ):
        assert f'init_from={copy}: the LoRA in {out_dir} was trained on other' in refusal(
            script, f'--out_dir={out_dir}', *more
        )
    shutil.rmtree(copy)
    assert f'init_from={copy}: no such folder' in refusal('sample.py', f'--out_dir={out_dir}', '--device=cpu')
    assert f'init_from={copy}: its weights are needed' in refusal('ddp', *keys_of(copy, out_dir, '--max_iters=6'))


def change_a_layer(folder):
    """Change one matrix of one block and keep its shape, as a merged adapter would."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / 'model.safetensors')
    weights['model.layers.1.mlp.down_proj.weight'] += 0.01
    save_file(weights, folder / 'model.safetensors', {'format': 'pt'})


def save_as_earlier_versions_did(model, source, out_dir):
    """Save a checkpoint of a run with LoRA once more, with the base in it and without a fingerprint."""
    pretrained = Pretrained(model, block_size=32, lora_rank=4)
    with torch.device('meta'):
        raw = finetune.for_training(pretrained)
    raw.to_empty(device='cpu')
    loading.load(raw, pretrained)
    state = checkpoint.read_state(source)
    opt = optim.from_config(raw, SimpleNamespace(**state['config']), torch.device('cpu'))
    checkpoint.load(source, raw, opt, share=Share(of_base=lora.names_of_base(raw)))
    for key in ('base', 'best', 'begun'):
        del state[key]
    state['config']['init_from'] = model
    for key in ('lora_dropout', 'lora_rslora', 'modules_to_save'):
        state['identity']['model'].pop(key, None)
        del state['config'][key]
    checkpoint_saver.prepare(out_dir)
    checkpoint_saver.Saver(out_dir, 2).save(state['step'], raw, opt, state)


@pytest.mark.parametrize(('name', 'nproc'), slow_but(['manual'], [('ddp', 1), ('manual', 2)]))
def test_a_run_of_an_earlier_version_goes_on_and_keeps_the_base_in_its_checkpoints(
    models, whole, tmp_path, name, nproc
):
    base, out_dir = tmp_path / 'base', tmp_path / 'out'
    shutil.copytree(models / 'llama', base)
    run_function(1, save_as_earlier_versions_did, str(base), checkpoint_of(whole, 2), str(out_dir))
    shutil.copytree(whole / 'model', out_dir / 'model')
    (base / 'model.safetensors').unlink()  # it was not needed any more
    start(name, *keys_of(base, out_dir, f'--max_iters={STEPS}'), nproc=nproc)
    assert_same_run(column(out_dir, 'loss'), column(whole, 'loss')[2:])
    held = {key for key in tensors_of(checkpoint_of(out_dir, STEPS)) if key.startswith('model.')}
    assert 'model.model.embed_tokens.weight' in held and any('.lora_A' in key for key in held)
    read = [
        '--device=cpu',
        '--num_samples=1',
        '--max_new_tokens=3',
        '--prompt=ab',
        '--temperature=0',
        '--dtype=float32',
    ]
    texts = {start('sample.py', f'--out_dir={path}', *read)[0].stdout for path in (out_dir, whole)}
    assert len(texts) == 1


def test_a_run_that_is_killed_before_a_checkpoint_has_its_name_goes_on(models, whole, tmp_path):
    keys = ['train_ddp.py', *keys_of(models / 'llama', tmp_path, f'--max_iters={STEPS}')]
    process = start_and_stop_behind(Path(checkpoint_of(tmp_path, 2), 'manifest.json'), *keys, before='step_00000004')
    process.kill()
    process.join()
    start('manual', *keys[1:], nproc=3)
    assert_same_run(column(tmp_path, 'loss'), column(whole, 'loss'))


# --- dropout, rsLoRA, modules that are trained in full ----------------------------------------------------------------


@pytest.mark.parametrize('kind', slow_but(['llama_tied'], ['llama', 'llama_tied']))
@pytest.mark.filterwarnings('ignore')
@torch.no_grad()
def test_peft_reads_the_adapter_with_equal_logits(models, tmp_path, kind):
    peft = pytest.importorskip('peft')
    import transformers

    out_dir, adapter, merged = tmp_path / 'out', tmp_path / 'adapter', tmp_path / 'merged'
    start('manual', *keys_of(models / kind, out_dir, *WITH_ALL, '--max_iters=4'), nproc=2)
    said = start('export_model.py', f'--out_dir={out_dir}', f'--to={adapter}', '--adapter')[0].stdout
    assert 'loaded again as PeftModelForCausalLM: weights equal, logits equal ' in said
    start('export_model.py', f'--out_dir={out_dir}', f'--to={merged}')
    keys = json.loads((adapter / 'adapter_config.json').read_text())
    assert keys['use_rslora'] and keys['lora_dropout'] == 0.1
    names = ['lm_head', 'model.norm'] + (['model.embed_tokens'] if kind == 'llama_tied' else [])
    assert sorted(keys['modules_to_save']) == sorted(names)
    with_adapter = peft.AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32).eval()
    whole = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
    plain = transformers.AutoModelForCausalLM.from_pretrained(models / kind, dtype=torch.float32).eval()
    x = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(1))
    ours, theirs, before = (model(x).logits for model in (whole, with_adapter, plain))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert (ours - before).abs().max() > 0.1
    assert not torch.equal(whole.model.norm.weight, plain.model.norm.weight)
    assert torch.equal(whole.model.layers[1].mlp.up_proj.weight, plain.model.layers[1].mlp.up_proj.weight)


def test_dropout_is_the_same_under_every_strategy_and_when_a_run_goes_on(models, tmp_path):
    def case(name, strategy, steps, *more):
        script, *options = STRATEGIES[strategy]
        keys = keys_of(models / 'llama', tmp_path / name, *WITH_ALL, *options, *more, f'--max_iters={steps}')
        return {'name': f'{name} {steps}', 'script': script, 'arguments': keys}

    cases = [case('ddp', 'ddp', STEPS), case('torch', 'torch', STEPS)]
    cases += [case('manual', 'manual', 3), case('manual', 'manual', STEPS)]
    run_many([*cases, case('none', 'ddp', STEPS, '--lora_dropout=0')], 2, tmp_path)
    losses = {name: column(tmp_path / name, 'loss') for name in ('ddp', 'torch', 'manual')}
    without = column(tmp_path / 'none', 'loss')
    assert_same_run(losses['torch'], losses['ddp'])
    assert_same_run(losses['manual'], losses['ddp'])
    assert without[0] == pytest.approx(losses['ddp'][0], rel=1e-6), 'B is 0 yet'
    assert max(abs(ours - theirs) for ours, theirs in zip(without, losses['ddp'], strict=True)) > 1e-4


@pytest.mark.parametrize(
    ('keys', 'problem'),
    [
        (
            ['--lora_rank=0', '--lora_dropout=0.1'],
            'lora_dropout=0.1 has no effect here, only with LoRA: give a --lora_rank',
        ),
        (
            ['--modules_to_save=heads'],
            "modules_to_save=heads: no module is called 'heads'; outside of the blocks: model",
        ),
        (['--modules_to_save=mlp'], 'modules_to_save=mlp: model.layers.0.mlp has LoRA, too'),
    ],
)
def test_what_fits_nothing_is_refused(models, tmp_path, keys, problem):
    assert problem in refusal('ddp', *keys_of(models / 'llama', tmp_path, *keys))


def test_rslora_cannot_be_turned_on_on_the_way(models, whole, tmp_path):
    out_dir = as_of_step(2, whole, tmp_path / 'out')
    line = refusal('ddp', *keys_of(models / 'llama', out_dir, f'--max_iters={STEPS}', '--lora_rslora'))
    assert 'the checkpoint has model.lora_rslora=False, this run has True (command line)' in line


def test_a_mixtures_experts_without_lora_are_named_in_the_log(models, tmp_path):
    folder = models / 'qwen3_moe'
    start('ddp', *keys_of(folder, tmp_path / 'out', '--max_iters=1'))
    (line,) = [line for line in (tmp_path / 'out' / 'train.log').read_text().splitlines() if 'WARNING: LoRA' in line]
    assert 'mlp.experts.gate_up_proj, mlp.experts.down_proj, mlp.gate.weight are none: ' in line
    attention, others = 40 * 16 * (4 + 2 + 2 + 4), 4 * 40 + 4 * 3 * 16 * 40
    assert f"{others / (attention + others):.0%} of the blocks' weights" in line
    for number, advice in enumerate(re.findall(r'--([^ ;]+)', line)):  # what it advises is possible
        more = tmp_path / str(number)
        start('ddp', *keys_of(folder, more, '--max_iters=1', f'--{advice}'))
        assert 'WARNING: LoRA' not in (more / 'train.log').read_text()
    assert number == 1, 'LoRA beside the experts, and all of them'
