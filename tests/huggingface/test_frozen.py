"""Runs whose frozen weights are kept in bfloat16 or nf4: losses, bytes, checkpoints, what reads them, mistakes."""

import functools
import json
import re

import pytest
import torch
from launch import TINY_RUN
from outputs import as_of_step, checkpoint_of, column, tensors_of
from precision import assert_same_run
from pretrained import refusal, save_model, start
from short import slow_but

from huggingface import finetune, loading, lora, nf4
from huggingface.pretrained import Pretrained
from planning import memory, sizes
from runtime import checkpoint
from system import devices

STEPS = 4
RUN = [*TINY_RUN, '--block_size=32', '--batch_size=1', '--global_batch_size=6', '--dtype=float32', '--warmup_iters=0']
RUN += [
    '--lr_schedule=constant',
    '--eval_interval=0',
    '--dataset=synthetic',
    '--learning_rate=1e-2',
    '--keep_best=False',
]
RUN += ['--keep_checkpoints=9', '--checkpoint_interval=2']
LORA = ['--lora_rank=4']


@pytest.fixture(scope='module')
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp('models')
    for kind in ('llama_64', 'qwen2_64', 'gpt2_64', 'gemma_64'):
        save_model(folder / kind, kind, torch.bfloat16)
    save_model(folder / 'in_float32', 'llama_64')
    return folder


@pytest.fixture(scope='module')
def run_of(models, tmp_path_factory):
    """The out_dir of a run of STEPS steps, once for each (strategy, ranks, frozen_dtype, compute dtype, model)."""

    @functools.cache
    def found(name, nproc, frozen_dtype, dtype='float32', kind='llama_64', keys=tuple(LORA)):
        out_dir = tmp_path_factory.mktemp('run')
        keys = [*RUN, *keys, f'--init_from={models / kind}', f'--out_dir={out_dir}', f'--max_iters={STEPS}']
        start(name, *keys, f'--frozen_dtype={frozen_dtype}', f'--dtype={dtype}', nproc=nproc)
        return out_dir

    return found


# --- losses and bytes -------------------------------------------------------------------------------------------------

LAYOUTS = [(name, nproc) for name in ('ddp', 'torch', 'manual') for nproc in (1, 2, 3)]
SHORT = [('ddp', 1), ('torch', 3), ('manual', 3)]
ALL = [*LAYOUTS, ('stage 2', 3), ('diloco', 2)]


def is_short(*layout):
    return layout


@pytest.mark.parametrize(('name', 'nproc'), slow_but(SHORT, ALL, is_short))
def test_a_base_in_bfloat16_trains_as_one_in_float32_to_the_bit(run_of, name, nproc):
    losses = [column(run_of(name, nproc, frozen_dtype), 'loss') for frozen_dtype in ('bfloat16', 'float32')]
    assert len(losses[0]) == STEPS and losses[0] == losses[1]


@pytest.mark.parametrize('kind', slow_but(['gemma_64'], ['llama_64', 'qwen2_64', 'gpt2_64', 'gemma_64']))
@pytest.mark.parametrize('name', slow_but(['ddp'], ['ddp', 'torch', 'manual']))
def test_so_it_does_when_it_computes_in_bfloat16(run_of, name, kind):
    """With tied weights, biases, a scaled embedding. Under DDP, autocast leaves the residual stream in float32."""
    losses = [column(run_of(name, 1, frozen, 'bfloat16', kind), 'loss') for frozen in ('bfloat16', 'float32')]
    assert len(losses[0]) == STEPS and losses[0] == losses[1]


@pytest.mark.parametrize(('name', 'nproc'), slow_but(SHORT, ALL, is_short))
def test_a_base_in_nf4_trains_as_in_one_process(run_of, name, nproc):
    losses = column(run_of(name, nproc, 'nf4'), 'loss')
    assert_same_run(losses, column(run_of('ddp', 1, 'nf4'), 'loss'))
    others = column(run_of('ddp', 1, 'bfloat16'), 'loss')
    assert abs(losses[0] - others[0]) > 1e-4 * others[0], 'the weights are others'
    saved = tensors_of(checkpoint_of(run_of(name, nproc, 'nf4'), STEPS))
    learned = [tensor for key, tensor in saved.items() if key.startswith('model.') and key.endswith('.lora_B')]
    assert len(learned) == 3 * 7 and all(tensor.any() for tensor in learned), 'they begin as 0'


@pytest.mark.parametrize('frozen_dtype', ['float32', 'bfloat16', 'nf4'])
@pytest.mark.parametrize(('name', 'nproc'), slow_but(SHORT, ALL, is_short))
def test_a_rank_holds_the_bytes_that_are_planned(run_of, name, nproc, frozen_dtype):
    out_dir = run_of(name, nproc, frozen_dtype)
    config = checkpoint.read_state(checkpoint_of(out_dir, STEPS))['config'] | {'dry_run': True}
    strategy = {'ddp': 'ddp', 'diloco': 'diloco'}.get(name, 'fsdp')
    planned = memory.memory_bytes(config, sizes.empty_model(config), nproc, strategy)
    for part in ('weights', 'gradients', 'optimizer'):
        (held,) = column(out_dir, f'mem/{part}_gb')
        scalars = 4 * len([key for key in tensors_of(checkpoint_of(out_dir, STEPS)) if key.endswith('.step')])
        found = round(held * 1e9) - (scalars if part == 'optimizer' else 0)
        assert found == planned[part], (part, found / planned[part])
    linear = {name: p for name, p in sizes.empty_model(config).named_parameters() if p.dtype == torch.uint8}
    assert bool(linear) == (frozen_dtype == 'nf4')


WAYS = [
    ('ddp', ['--activation_checkpointing=full', '--batch_size=2']),
    ('ddp', ['--activation_checkpointing=selective']),
    ('ddp', ['--compile=True']),
    ('torch', ['--compile=True', '--activation_checkpointing=full']),
    ('manual', ['--compile=True']),
    ('torch', ['--cpu_offload=params']),
    ('manual', ['--cpu_offload=params', '--accumulate=sharded']),
    ('manual', ['--replicate_size=2', '--prefetch=0']),
    ('torch', ['--replicate_size=2', '--zero_stage=2', '--blocks_per_unit=2']),
    ('parallel', ['--context_parallel=2']),
]


@pytest.mark.parametrize(('name', 'more'), slow_but(WAYS[:1], WAYS, is_short))
def test_however_a_run_computes_nf4_is_the_same(models, run_of, tmp_path, name, more):
    if '--compile=True' in more and not devices.has_compiler('cpu'):
        pytest.skip('no C compiler')
    keys = [*RUN, *LORA, f'--init_from={models / "llama_64"}', f'--out_dir={tmp_path}', f'--max_iters={STEPS}']
    start(name, *keys, '--frozen_dtype=nf4', '--global_batch_size=6', *more, nproc=1 if name == 'ddp' else 2)
    assert_same_run(column(tmp_path, 'loss'), column(run_of('ddp', 1, 'nf4'), 'loss'))


def test_nf4_takes_half_a_byte_and_two_bytes_for_each_64_weights(run_of):
    config = checkpoint.read_state(checkpoint_of(run_of('ddp', 1, 'nf4'), STEPS))['config'] | {'dry_run': True}
    packed, plain = sizes.empty_model(config), sizes.empty_model(config | {'frozen_dtype': 'float32'})
    weights = sum(m.weight.numel() for m, _ in lora.weights_with_lora(plain, 'all'))
    assert sum(p.nbytes for p in packed.parameters() if p.dtype == torch.uint8) == weights * (1 / 2 + 2 / 64)


def test_what_is_packed_is_what_the_folder_has(models, run_of):
    """Whichever rank has read it. Checkpoints of LoRA do not have it, so a run on three ranks is compared by its loss,
    and here the rows of a Linear are compared as they are read."""
    pretrained = Pretrained(str(models / 'llama_64'), lora_rank=4, frozen_dtype='nf4')
    seen = loading.seen_in_training(pretrained)
    matrix = torch.randn(64, 128)
    name = 'model.layers.0.mlp.down_proj.weight'
    assert torch.equal(seen(name, matrix), nf4.dequantize(nf4.quantize(matrix)))
    assert torch.equal(seen(name, matrix[7:9]), seen(name, matrix)[7:9])
    assert torch.equal(seen('model.embed_tokens.weight', matrix.bfloat16()), matrix.bfloat16())


# --- checkpoints ------------------------------------------------------------------------------------------------------


GOES_ON = [('ddp', 1), ('ddp', 3), ('torch', 1), ('torch', 2), ('manual', 1), ('manual', 3), ('diloco', 2)]


@pytest.mark.parametrize(('name', 'nproc'), slow_but([('manual', 1)], GOES_ON, is_short))
def test_a_run_over_nf4_goes_on_under_every_strategy_and_number_of_ranks(models, run_of, tmp_path, name, nproc):
    whole = run_of('torch', 3, 'nf4')
    out_dir = as_of_step(2, whole, tmp_path / 'out')
    keys = [*RUN, *LORA, f'--init_from={models / "llama_64"}', f'--out_dir={out_dir}', f'--max_iters={STEPS}']
    start(name, *keys, '--frozen_dtype=nf4', nproc=nproc)
    assert_same_run(column(out_dir, 'loss'), column(whole, 'loss'))
    weights = [key for key in tensors_of(checkpoint_of(out_dir, STEPS)) if key.startswith('model.')]
    assert weights and all('.lora_' in key for key in weights)


def test_a_run_goes_on_in_the_same_layout_to_the_bit(models, run_of, tmp_path):
    whole = run_of('manual', 3, 'nf4')
    out_dir = as_of_step(2, whole, tmp_path / 'out')
    keys = [*RUN, *LORA, f'--init_from={models / "llama_64"}', f'--out_dir={out_dir}', f'--max_iters={STEPS}']
    start('manual', *keys, '--frozen_dtype=nf4', nproc=3)
    assert column(out_dir, 'loss') == column(whole, 'loss')
    before, after = (tensors_of(checkpoint_of(path, STEPS)) for path in (whole, out_dir))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_what_is_as_exact_may_change_on_the_way_and_nf4_may_not(models, run_of, tmp_path):
    out_dir = as_of_step(2, run_of('ddp', 1, 'bfloat16'), tmp_path / 'out')
    keys = [*RUN, *LORA, f'--init_from={models / "llama_64"}', f'--out_dir={out_dir}', f'--max_iters={STEPS}']
    line = refusal('ddp', *keys, '--frozen_dtype=nf4')
    assert "the checkpoint has model.frozen_dtype='float32', this run has 'nf4' (command line): go on with" in line
    said = start('ddp', *keys, '--frozen_dtype=float32')[0].stdout
    assert 'frozen_dtype bfloat16 -> float32' in said
    assert column(out_dir, 'loss') == column(run_of('ddp', 1, 'float32'), 'loss')
    out_dir = as_of_step(2, run_of('ddp', 1, 'nf4'), tmp_path / 'nf4')
    assert "has model.frozen_dtype='nf4', this run has 'float32'" in refusal(
        'ddp', *keys, f'--out_dir={out_dir}'
    )  # None is bfloat16 here, which is exact, as float32 would be


@pytest.mark.parametrize('name', slow_but(['manual'], ['ddp', 'torch', 'manual']))
def test_a_frozen_part_without_lora_is_saved_in_float32_and_read_by_all(models, run_of, tmp_path, name):
    freeze = ('--freeze=layers\\.[01]|embed_tokens|norm',)
    whole, plain = (run_of(name, 2, frozen_dtype, keys=freeze) for frozen_dtype in ('bfloat16', 'float32'))
    assert column(whole, 'loss') == column(plain, 'loss')
    saved, expected = (tensors_of(checkpoint_of(path, STEPS)) for path in (whole, plain))
    assert saved.keys() == expected.keys()
    for key, tensor in saved.items():
        assert tensor.dtype == expected[key].dtype and torch.equal(tensor, expected[key]), key
    assert saved['model.model.embed_tokens.weight'].dtype == torch.float32
    begun = models / 'llama_64'
    weights = (begun / 'model.safetensors').rename(tmp_path / 'aside')  # which the run needs no longer
    try:
        for number, (other, nproc, changes) in enumerate([('ddp', 3, []), ('torch', 1, ['--frozen_dtype=float32'])]):
            out_dir = as_of_step(2, whole, tmp_path / f'out{number}')
            keys = [*RUN, *freeze, f'--init_from={begun}', f'--out_dir={out_dir}', f'--max_iters={STEPS}']
            start(other, *keys, *changes, nproc=nproc)
            assert_same_run(column(out_dir, 'loss'), column(whole, 'loss'))
            after = tensors_of(checkpoint_of(out_dir, STEPS))
            key = 'model.model.layers.0.mlp.up_proj.weight'
            assert torch.equal(after[key], saved[key])
    finally:
        weights.rename(begun / 'model.safetensors')


# --- what reads a run -------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def merged(run_of, tmp_path_factory):
    """(out_dir of a run over nf4, the folder into which it was exported, what was said)."""
    out_dir, folder = run_of('manual', 3, 'nf4'), tmp_path_factory.mktemp('exported') / 'merged'
    (rank,) = start('export_model.py', f'--out_dir={out_dir}', f'--to={folder}', '--dtype=float32')
    return out_dir, folder, rank.stdout


@torch.no_grad()
def test_lora_is_merged_into_what_it_was_trained_beside_and_that_is_said(models, run_of, merged, tmp_path):
    import transformers

    out_dir, folder, said = merged
    assert f'LoRA is merged into what it was trained beside: {models / "llama_64"} rounded to nf4' in said
    tokens = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(2))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    weights, state = checkpoint.load_weights(checkpoint_of(out_dir, STEPS))
    pretrained = Pretrained.from_run(str(out_dir), state)
    assert pretrained.frozen_dtype == 'nf4'
    with torch.device('meta'):
        model = finetune.for_training(pretrained)
        lora.compute_from_stored(model)
    model.to_empty(device='cpu')
    loading.load(model, pretrained)
    model.load_state_dict(weights, strict=False)
    trained = model.eval()(tokens)
    found = theirs(tokens).logits
    assert (found - trained).norm() <= 1e-5 * trained.norm()
    pretrained.frozen_dtype = 'float32'
    original = loading.for_inference(pretrained, weights)(tokens).logits
    assert (original - trained).norm() > 1e-2 * trained.norm(), 'another model'

    (rank,) = start('export_model.py', f'--out_dir={out_dir}', f'--to={tmp_path / "adapter"}', '--adapter')
    assert f'the adapter belongs to {models / "llama_64"} rounded to nf4' in rank.stdout
    read = [
        '--device=cpu',
        '--num_samples=1',
        '--max_new_tokens=6',
        '--prompt=ab',
        '--temperature=0',
        '--dtype=float32',
    ]
    ours, exported, plain = (
        start('sample.py', key, '--chat=False', *read)[0]
        for key in (f'--out_dir={out_dir}', f'--out_dir={folder}', f'--out_dir={run_of("ddp", 1, "bfloat16")}')
    )
    assert ours.stdout == exported.stdout
    assert 'LoRA is merged into what it was trained beside' in ours.stderr
    assert 'LoRA is merged' not in plain.stderr


def test_what_rounding_would_cost_is_counted_from_the_base_that_training_saw(run_of, tmp_path):
    """Nearly every weight is far from that in the folder. But where LoRA has moved a weight by less than the distance
    of two bfloat16 numbers, rounding loses that."""
    out_dir = run_of('ddp', 1, 'nf4', keys=(*LORA, '--learning_rate=1e-5'))
    said = start('export_model.py', f'--out_dir={out_dir}', f'--to={tmp_path / "merged"}')[0].stdout
    assert float(re.search(r'and (\d+)% of these stay moved in bfloat16: written in float32', said)[1]) < 20, said


@pytest.mark.parametrize('shard', slow_but(['manual'], ['none', 'torch', 'manual']))
def test_scores_are_of_the_base_that_it_was_trained_beside(merged, tmp_path, shard):
    task = tmp_path / 'task.jsonl'
    items = [{'context': f'What is {n}?', 'choices': [f' {n}', ' no'], 'gold': 0} for n in range(6)]
    task.write_text('\n'.join(map(json.dumps, items)))
    out_dir, folder, _ = merged
    nats = {}
    keys = [f'--tasks={task}', '--device=cpu', '--dtype=float32', f'--results={tmp_path / "results.jsonl"}']
    for name, more, nproc in ((out_dir, [f'--shard={shard}'], 3), (folder, [], 1)):
        samples = tmp_path / f'samples_{nproc}'
        said = start('evaluate.py', f'--out_dir={name}', *keys, f'--samples={samples}', *more, nproc=nproc)[0].stdout
        assert ('LoRA is beside what it was trained beside' in said) == (nproc == 3)
        rows = (samples / 'task.jsonl').read_text().splitlines()
        nats[nproc] = [nat for row in rows for nat in json.loads(row)['nats']]
    assert nats[3] == pytest.approx(nats[1], rel=1e-4)


def test_tasks_in_a_run_are_scored_on_the_same_weights(models, run_of, tmp_path):
    """Under DDP in bfloat16, where weights are cast for the scoring while those in nf4 stay bytes."""
    task = tmp_path / 'task.jsonl'
    items = [{'context': f'What is {n}?', 'choices': [f' {n}', ' no'], 'gold': 0} for n in range(6)]
    task.write_text('\n'.join(map(json.dumps, items)))
    scores = {}
    for name in ('ddp', 'torch'):
        keys = [*RUN, *LORA, f'--init_from={models / "llama_64"}', f'--out_dir={tmp_path / name}', '--max_iters=2']
        keys += ['--frozen_dtype=nf4', '--dtype=bfloat16', f'--eval_tasks={task}', '--eval_tasks_interval=1']
        start(name, *keys)
        scores[name] = column(tmp_path / name, 'task/acc')
    assert len(scores['ddp']) >= 2 and scores['ddp'] == scores['torch']


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('keys', 'problem'),
    [
        (['--frozen_dtype=nf4'], 'frozen_dtype=nf4 without LoRA, which learns beside what 4 bits have made of'),
        (['--frozen_dtype=nf4', '--freeze=embed'], 'give a --lora_rank, as 16, or use --frozen_dtype=bfloat16'),
        (['--frozen_dtype=bfloat16'], 'frozen_dtype=bfloat16 without LoRA or --freeze: all is trained, leave it out'),
        (['--frozen_dtype=int4', '--lora_rank=4'], "--frozen_dtype expects 'float32' or 'bfloat16' or 'nf4' or None"),
        (['--frozen_dtype=nf4', '--native=True'], 'frozen_dtype=nf4 with native=True'),
        (
            ['--frozen_dtype=nf4', '--lora_rank=4', '--lora_targets=q_proj', '--modules_to_save=mlp'],
            'modules_to_save=mlp trains model.layers.0.mlp.gate_proj, and frozen_dtype=nf4 packs all linear layers',
        ),
    ],
)
def test_what_cannot_be_is_one_line(models, tmp_path, keys, problem):
    line = refusal('ddp', *RUN, f'--init_from={models / "llama_64"}', f'--out_dir={tmp_path}', *keys)
    assert problem in line


def test_what_a_script_does_not_have_is_one_line_with_the_key_that_helps(models, tmp_path):
    keys = [*RUN, *LORA, f'--init_from={models / "llama_64"}', f'--out_dir={tmp_path}', '--frozen_dtype=nf4']
    line = refusal('train_parallel.py', *keys, '--tensor_parallel=2', '--fsdp_impl=manual', nproc=2)
    assert 'tensor_parallel=2: models of transformers are not cut; ' in line
    line = refusal('train_pipeline.py', *keys, nproc=2)
    assert "transformers' class is not cut into stages: use train_fsdp.py" in line
    scratch = refusal('ddp', *RUN, '--frozen_dtype=bfloat16', f'--out_dir={tmp_path}')
    assert 'frozen_dtype=bfloat16 with init_from=scratch: nothing is frozen there' in scratch
    save_model(tmp_path / 'narrow', 'llama')
    line = refusal('manual', *keys, f'--init_from={tmp_path / "narrow"}', nproc=2)
    assert 'nf4: rows of model.layers.0.self_attn.q_proj have 40 weights' in line
    assert 'use --frozen_dtype=bfloat16' in line


def test_deepspeed_keeps_all_weights_in_one_dtype(models, tmp_path):
    pytest.importorskip('deepspeed')
    keys = [*RUN, *LORA, f'--init_from={models / "llama_64"}', f'--out_dir={tmp_path}', '--frozen_dtype=nf4']
    line = refusal('train_deepspeed.py', *keys)
    assert 'frozen_dtype=nf4: DeepSpeed keeps all weights in one dtype: use train_fsdp.py' in line


def test_an_older_torch_is_told_which_implementation_takes_bytes(models, tmp_path, monkeypatch):
    from types import SimpleNamespace

    from runtime import first_weights

    keys = {'frozen_dtype': 'nf4', 'lora_rank': 4, 'freeze': None, 'init_from': 'x', 'native': False}
    run = SimpleNamespace(config=SimpleNamespace(**keys, fsdp_impl='torch'), strategy='fsdp', start=None)
    monkeypatch.setattr(torch, '__version__', torch.torch_version.TorchVersion('2.13.0'))
    first_weights.check_frozen_dtype(run)
    monkeypatch.setattr(torch, '__version__', torch.torch_version.TorchVersion('2.12.1'))
    with pytest.raises(ValueError, match=r'from torch 2.13 on, this is 2.12.1: use --fsdp_impl=manual'):
        first_weights.check_frozen_dtype(run)
    run.config.fsdp_impl = 'manual'
    first_weights.check_frozen_dtype(run)
