"""pipeline_manual.py and train_pipeline.py against one process and against torch's schedules.

The ranks run all cases once and return what each of them saw, and the tests look at that.
"""

import itertools
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from faults import REPO, send
from launch import (
    TINY_SYNTHETIC,
    Job,
    join_all,
    refusals,
    run_forked,
    run_function,
    run_many,
    start_function,
    write_output_to,
)
from outputs import assert_same_rows, assert_same_weights, column, complete, last_step, metrics, tensors_of
from precision import (
    FLOOR,
    FLOOR_IN_HALF,
    TIMES,
    all_times_further,
    apart,
    assert_same_run,
    error,
    in_float64,
    times_further,
)
from short import slow_but
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import optim
import pipeline_manual
import tensor_manual
from layout import WHOLE, Layout, Ranks, Share
from model import GPT, ModelConfig
from pipeline_manual import Action
from planning import activations, memory, sizes, traffic
from runtime import health

NEAR = dict(window_pattern='SLS', window_size=5, logit_softcap=0.3)
LAYOUTS = [(p, v, m) for p in range(1, 7) for v in (1, 2, 3) for m in range(p, 3 * p + 1)]
LAYOUTS = [(p, v, m) for p, v, m in LAYOUTS if v == 1 or (p > 1 and m % p == 0)]


# --- the timetable ----------------------------------------------------------------------------------------------------


def picture(stages, chunks, micro_steps):
    """A timetable as pipeline_manual.py and docs/pipeline.md show it. If there are chunks, letters tell them apart."""
    lines = []
    for stage in range(stages):
        cells = []
        for actions in pipeline_manual.timetable(stages, chunks, micro_steps):
            kind, part, micro_step = actions[stage] or ('.', 0, '')
            letter = 'ab'[part // stages] if chunks > 1 and actions[stage] else ''
            cells.append(f'{kind[0].upper()}{micro_step}{letter}'.ljust(2 + (chunks > 1)))
        lines.append(f'stage {stage}  {" ".join(cells)}'.rstrip())
    return lines


@pytest.mark.parametrize('stages, chunks, micro_steps', LAYOUTS)
def test_each_stage_does_all_of_its_work_once_and_after_what_it_needs(stages, chunks, micro_steps):
    last, seen, per_stage = stages * chunks - 1, set(), [[] for _ in range(stages)]
    times = pipeline_manual.timetable(stages, chunks, micro_steps)
    for actions in times:
        for stage, action in enumerate(actions):
            if action:
                kind, part, micro_step = action
                assert part % stages == stage
                if kind == 'forward':
                    needed = {('forward', part - 1, micro_step)} if part else set()
                else:
                    needed = {('forward', part, micro_step)}
                    needed |= {('backward', part + 1, micro_step)} if part < last else set()
                assert needed <= seen, f'{action} comes before {needed - seen}'
                per_stage[stage].append(action)
        seen |= {tuple(action) for action in actions if action}
    for actions in per_stage:
        assert len(actions) == len(set(actions)) == 2 * chunks * micro_steps
    # The work takes 2 v m units of time, and the bubble adds 2 (p - 1), which is (p - 1) / (v m) of the work.
    assert len(times) == 2 * chunks * micro_steps + 2 * (stages - 1)


@pytest.mark.parametrize('stages, micro_steps', [(p, m) for p, v, m in LAYOUTS if v == 1])
def test_one_forward_one_backward_is_warm_up_then_pairs_then_drain(stages, micro_steps):
    times = pipeline_manual.timetable(stages, 1, micro_steps)
    for stage in range(stages):
        kinds = ''.join(actions[stage].kind[0] for actions in times if actions[stage])
        warm_up = stages - 1 - stage
        assert kinds == 'f' * warm_up + 'fb' * (micro_steps - warm_up) + 'b' * warm_up
        for kind in ('forward', 'backward'):
            order = [actions[stage].micro_step for actions in times if actions[stage] and actions[stage].kind == kind]
            assert order == list(range(micro_steps))


def test_chunks_with_half_a_group_of_micro_steps_wait_for_each_other_which_is_why_they_are_refused():
    with pytest.raises(AssertionError, match='all wait for each other'):
        pipeline_manual.timetable(4, 3, 5)
    pipeline_manual.timetable(4, 3, 5, backward=False)  # an evaluation may have any number of batches


def test_the_pictures_are_the_timetable():
    assert '\n'.join(f'    {line}' for line in picture(4, 1, 4)) in pipeline_manual.__doc__
    chapter = (REPO / 'docs' / 'pipeline.md').read_text()
    for layout in ((4, 1, 6), (2, 2, 4)):
        assert '\n'.join(picture(*layout)) in chapter, layout


# --- gradients: what the ranks run ------------------------------------------------------------------------------------

# 5 blocks do not divide by any number of stages, so parts have 1, 2 or 3. A vocabulary of 97 is padded to 128.
SMALL = dict(n_layer=5, n_head=2, n_embd=24, mlp_hidden_dim=40, vocab_size=97, block_size=16)
CASES = {  # on 4 ranks; m micro-steps of 2 sequences per pipeline
    'gpt2 tied, 4 stages, m=p': dict(stages=4, micro_steps=4, model=dict(arch='gpt2')),
    'gpt2 untied, 4 stages, m=6': dict(stages=4, micro_steps=6, model=dict(arch='gpt2', tie_embeddings=False)),
    'llama, 2 stages x 2': dict(stages=2, micro_steps=3, model=dict(arch='llama', n_kv_head=1, **NEAR)),
    'enoki, 2 x 2 chunks x 2': dict(stages=2, chunks=2, micro_steps=4, model=dict(arch='enoki', z_loss=1e-3)),
    'qwen3 tied, 2 stages x 2': dict(stages=2, micro_steps=2, model=dict(arch='qwen3', tie_embeddings=True)),
    'gpt2 tied, 2 x 2 chunks x 2': dict(stages=2, chunks=2, micro_steps=2, model=dict(arch='gpt2')),
    'llama, documents': dict(stages=4, micro_steps=5, model=dict(arch='llama', **NEAR), documents=True),
    'llama, full checkpointing': dict(stages=2, micro_steps=2, model=dict(arch='llama'), checkpointing='full'),
    'llama, bf16': dict(stages=4, micro_steps=4, model=dict(arch='llama'), dtype='bfloat16'),
    'gpt2, bf16, checkpointing': dict(
        stages=2, micro_steps=2, model=dict(arch='gpt2'), dtype='bfloat16', checkpointing='selective'
    ),
    'gpt2 tied, 2 stages x tp 2': dict(stages=2, micro_steps=3, model=dict(arch='gpt2'), tensor=2),
    'qwen3 tied, 2 x 2 chunks x tp 2': dict(
        stages=2, chunks=2, micro_steps=4, model=dict(arch='qwen3', tie_embeddings=True), tensor=2, documents=True
    ),
    'untied, 2 stages x tp 2, full': dict(
        stages=2, micro_steps=2, model=dict(arch='llama', z_loss=1e-3), tensor=2, checkpointing='full'
    ),
    'llama, 1 stage x 2 x tp 2': dict(stages=1, micro_steps=2, model=dict(arch='llama', n_kv_head=2), tensor=2),
    # Wider, and with 8 micro-steps: with a width of 24 and 2 micro-steps the size of rounding errors is a matter of
    # luck.
    'llama, bf16, 2 stages x tp 2': dict(
        stages=2, micro_steps=8, model=dict(arch='llama', n_embd=96), dtype='bfloat16', tensor=2
    ),
}


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends, as torch sees them: messages of activations, and all-reduces in a ring of
    2."""

    def __init__(self):
        super().__init__()
        self.point_to_point = self.all_reduce = self.activations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function) == 'c10d.send.default':
            self.point_to_point += sum(tensor.nbytes for tensor in args[0])
        elif str(function) == 'c10d.allreduce_.default':
            self.all_reduce += sum(tensor.nbytes for tensor in args[0])
        elif str(function) == 'tensor_manual.all_gather.default':
            self.activations += args[0].nbytes * (args[1] - 1)
        elif str(function) == 'tensor_manual.reduce_scatter.default':
            self.activations += args[0].nbytes * (args[1] - 1) // args[1]
        return function(*args, **(kwargs or {}))


def filled(model, share=WHOLE):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(share.initial_value(model, name, parameter, 7, 'cpu'))
    return model


def batches_of(copy, micro_steps, documents, vocab_size=97, B=2, T=16):
    """[(x, y) or (x, y, starts)] for one pipeline. The numbers of targets differ, and one row has none."""
    batches = []
    for micro_step in range(micro_steps):
        generator = torch.Generator().manual_seed(100 * copy + micro_step)
        x, y = torch.randint(vocab_size, (2, B, T), generator=generator)
        y[0, : 3 * micro_step + copy] = -1
        starts = torch.tensor([[0, 5, 16], [0, 9 - copy, 13]])
        batches.append((x, y, starts) if documents else (x, y))
    batches[-1][1][1] = -1
    return batches


def targets_in(batches):
    return sum((batch[1] >= 0).sum().item() for batch in batches)


def mesh_of(stages, tensor=1):
    copies = dist.get_world_size() // stages // tensor
    return init_device_mesh('cpu', (stages, copies, tensor), mesh_dim_names=('stage', 'replicate', 'tensor'))


def one_step(stage, pipeline, timetable, batches, loss_factor):
    """Do what train_pipeline.py does in a step. Returns the sum of the losses, and how many micro-steps were at most on
    their way."""
    loss, kept = 0.0, 0
    with pipeline.weights_cast():
        for actions in timetable:
            action = actions[stage]
            if action and action.kind == 'forward':
                loss += float(pipeline.forward(action, *batches[action.micro_step]))
            elif action:
                pipeline.backward(action, loss_factor)
            kept = max(kept, len(pipeline.kept))
            pipeline.send_and_receive(actions)
    pipeline.sum_gradients()
    return loss, kept


def run_case(stages, micro_steps, model, chunks=1, dtype='float32', documents=False, checkpointing='none', tensor=1):
    """
    One step of a pipeline on these ranks, beside one of the whole model on this rank alone.

    'loss', 'norm', 'gradients' and 'clipped': how many times as far from float64 as this rank alone, for the worst
    tensor.
    """
    dtype, copies = getattr(torch, dtype), dist.get_world_size() // stages // tensor
    config = ModelConfig(**{**SMALL, **model})
    batches = [batches_of(copy, micro_steps, documents) for copy in range(copies)]
    factor = torch.tensor(1 / targets_in(sum(batches, [])))

    def reference(alone):
        losses = 0.0
        for batch in sum(batches, []):
            loss_sum, ce_sum = alone(*batch)
            (loss_sum * factor).backward()
            losses += ce_sum.item()
        gradients = {name: parameter.grad.clone() for name, parameter in alone.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        return losses, norm, gradients, {name: parameter.grad for name, parameter in alone.named_parameters()}

    alone = filled(GPT(config, dtype))
    with in_float64():
        double = GPT(config, torch.float64)
        double.load_state_dict(alone.state_dict())
        exact = reference(double)
    of_one_process = reference(alone)

    floor = FLOOR if dtype == torch.float32 else FLOOR_IN_HALF

    def worst(found, of_one_process, exact):
        """The worst factor for a number, or for this rank's tensors, which may be slices of whole ones."""
        if not isinstance(found, dict):
            return times_further(found, of_one_process, exact, floor)
        parts = {name: share.slices[name].of if tensor > 1 else torch.as_tensor for name in found}
        others = [{name: of(tensors[name]) for name, of in parts.items()} for tensors in (of_one_process, exact)]
        return max(all_times_further(found, *others).values())

    mesh = mesh_of(stages, tensor)
    stage, copy, _ = mesh.get_coordinate()
    with torch.device('meta'):
        whole = GPT(config, dtype)
    whole.checkpoint_activations(checkpointing)
    share = Share()
    module = pipeline_manual.Stage(whole, stage, stages, chunks, share)
    split = tensor_manual.Split(module, Ranks.of(mesh['tensor']), share) if tensor > 1 else None
    module.to_empty(device='cpu')
    pipeline = pipeline_manual.Pipeline(filled(module, share), mesh, batch_size=2)
    timetable = pipeline_manual.timetable(stages, chunks, micro_steps)
    with Sent() as sent:
        loss, kept = one_step(stage, pipeline, timetable, batches[copy], factor)
        if split:
            split.sum_partial_gradients()
    total = torch.tensor(loss / tensor, dtype=torch.float64)
    dist.all_reduce(total)
    gradients = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    norm_groups = [*pipeline.norm_groups(), *(split.norm_groups() if split else ())]
    norm = optim.clip_grad_norm_(module.parameters(), 0.1, *norm_groups)
    keys = {**config.to_dict(), 'batch_size': 2, 'global_batch_size': 2 * micro_steps * copies, 'dtype': str(dtype)[6:]}
    keys |= {'pipeline_stages': stages, 'pipeline_chunks': chunks, 'tensor_parallel': tensor}
    keys |= {'activation_checkpointing': checkpointing}
    keys |= {'device': 'cpu', 'optimizer': 'adamw'}
    layout = Layout.of(keys, 'pipeline', dist.get_world_size())
    predicted = traffic.sent(memory.Plan.of(keys, sizes.empty_model(keys), layout, stage))
    of_ring = max(copies, tensor)  # of 2, or there is none
    clipped = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {
        'stage': stage,
        'names': set(gradients),
        **{
            key: worst(found, theirs, truth)
            for key, found, theirs, truth in zip(
                ('loss', 'norm', 'gradients', 'clipped'),
                (total, norm, gradients, clipped),
                of_one_process,
                exact,
                strict=True,
            )
        },
        'kept': kept,
        'order': [actions[stage] for actions in timetable if actions[stage]],
        'sent': {
            'point-to-point': sent.point_to_point,
            'all-reduce': sent.all_reduce * 2 * (of_ring - 1) / of_ring,
            **({'activations': sent.activations} if tensor > 1 else {}),
        },
        'predicted': predicted,
    }


class OfLibrary(nn.Module):
    """A part of the model as torch.distributed.pipelining wants it. The last one ends before the head and the loss."""

    def __init__(self, stage, part):
        super().__init__()
        self.stage, self.part = stage, part

    def forward(self, x):
        if self.part < self.stage.last:
            return self.stage(self.part, x)
        if self.part == 0 or not self.stage.rotary:
            raise AssertionError('a model with RoPE, and more than one part')
        self.stage.rotary.prepare(x.device)
        for number in self.stage.of(self.part):
            x = self.stage.blocks[str(number)](x)
        return self.stage.final_norm(x)


def run_library(stages, chunks, micro_steps):
    """(the largest error of a gradient beside torch's schedule, that schedule's order of actions, and the order
    here)."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    config = ModelConfig(**{**SMALL, 'arch': 'llama'})
    mesh = mesh_of(stages)
    stage = mesh.get_local_rank('stage')
    batches = batches_of(0, micro_steps, documents=False)
    factor = torch.tensor(1 / targets_in(batches))
    found = []
    for is_ours in (True, False):
        with torch.device('meta'):
            whole = GPT(config)
        module = filled(pipeline_manual.Stage(whole, stage, stages, chunks).to_empty(device='cpu'))
        if is_ours:
            pipeline = pipeline_manual.Pipeline(module, mesh, batch_size=2)
            timetable = pipeline_manual.timetable(stages, chunks, micro_steps)
            one_step(stage, pipeline, timetable, batches, factor * dist.get_world_size(pipeline.copies) ** -1)
        else:
            group = mesh.get_group('stage')
            parts = [
                PipelineStage(OfLibrary(module, part), part, stages * chunks, torch.device('cpu'), group=group)
                for part in range(stage, stages * chunks, stages)
            ]

            def loss_of(hidden, y):
                logits = hidden.flatten(0, 1) @ module.head.weight[:97].T  # noqa: B023
                return nn.functional.cross_entropy(logits, y.flatten(), ignore_index=-1, reduction='sum') * factor

            options = {'n_microbatches': micro_steps, 'loss_fn': loss_of, 'scale_grads': False}
            schedule = (ScheduleInterleaved1F1B if chunks > 1 else Schedule1F1B)(
                parts if chunks > 1 else parts[0], **options
            )
            x, y = (torch.cat([batch[n] for batch in batches]) for n in (0, 1))
            schedule.step(*([x] if stage == 0 else []), **({'target': y} if stage == stages - 1 else {}))
        found.append({name: parameter.grad for name, parameter in module.named_parameters()})
    ours, theirs = found
    order = []
    if chunks > 1:
        for action in schedule.pipeline_order[stage]:
            if action is not None:
                kind = {'FORWARD': 'forward', 'FULL_BACKWARD': 'backward'}[action.computation_type.name]
                order.append(Action(kind, action.stage_index, action.microbatch_index))
    ours_order = pipeline_manual.order_of_stage(stage, stages, chunks, micro_steps)
    return max(error(ours[n], theirs[n]) for n in ours), order, ours_order


def run_memory():
    """(measured, predicted) bytes of activations and logits on this rank, in a pipeline over all ranks."""
    config = ModelConfig(arch='llama', n_layer=8, n_head=4, n_embd=64, vocab_size=512, block_size=128)
    mesh = mesh_of(dist.get_world_size())
    stage, stages = mesh.get_local_rank('stage'), mesh.size(0)
    with torch.device('meta'):
        whole = GPT(config)
    module = filled(pipeline_manual.Stage(whole, stage, stages, 1).to_empty(device='cpu'))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    pipeline = pipeline_manual.Pipeline(module, mesh, batch_size=4)
    batches = batches_of(0, 8, documents=False, vocab_size=512, B=4, T=128)
    module.rotary.prepare(torch.device('cpu'))
    others = [*module.parameters(), *(parameter.grad for parameter in module.parameters())]
    timetable = pipeline_manual.timetable(stages, 1, 8)
    with activations.LiveBytes([*others, *sum(batches, ()), module.rotary.cos_sin]) as live:
        one_step(stage, pipeline, timetable, batches, torch.tensor(1e-3))
    keys = {**config.to_dict(), 'batch_size': 4, 'global_batch_size': 32, 'dtype': 'float32', 'optimizer': 'adamw'}
    keys |= {'pipeline_stages': stages, 'pipeline_chunks': 1, 'device': 'cpu', 'activation_checkpointing': 'none'}
    parts = memory.held(memory.Plan.of(keys, sizes.empty_model(keys), Layout.of(keys, 'pipeline', stages), stage))
    return live.peak, parts['activations'] + parts['logits']


def run_cases():
    results = {name: run_case(**case) for name, case in CASES.items()}
    library = {layout: run_library(*layout) for layout in ((4, 1, 6), (2, 2, 4))}
    return results, library, run_memory()


@pytest.fixture(scope='module')
def on_4_ranks():
    return run_function(4, run_cases)


@pytest.mark.parametrize('name', CASES)
def test_a_step_has_the_loss_the_gradients_and_the_norm_of_one_process(on_4_ranks, name):
    ranks = [results[name] for results, _, _ in on_4_ranks]
    for of_rank in ranks:
        for key in ('loss', 'norm', 'gradients', 'clipped'):
            assert of_rank[key] <= TIMES, key
    config = ModelConfig(**{**SMALL, **CASES[name]['model']})
    with torch.device('meta'):
        whole = {parameter for parameter, _ in GPT(config).named_parameters()}
    assert set().union(*(of_rank['names'] for of_rank in ranks)) == whole


@pytest.mark.parametrize('name', CASES)
def test_a_stage_keeps_no_more_micro_steps_than_its_schedule_says(on_4_ranks, name):
    case = CASES[name]
    p, v, m = case['stages'], case.get('chunks', 1), case['micro_steps']
    for results, _, _ in on_4_ranks:
        of_rank = results[name]
        behind = p - 1 - of_rank['stage']
        most = p - of_rank['stage'] if v == 1 else 2 * behind + (v - 1) * p + 1
        assert of_rank['kept'] == min(most, v * m)


@pytest.mark.parametrize('name', CASES)
def test_as_many_bytes_are_sent_as_the_formula_says(on_4_ranks, name):
    for results, _, _ in on_4_ranks:
        of_rank = results[name]
        for kind, size in of_rank['sent'].items():
            assert size == of_rank['predicted'][kind], kind


@pytest.mark.parametrize('layout', [(4, 1, 6), (2, 2, 4)])
def test_gradients_and_order_are_those_of_torchs_own_schedules(on_4_ranks, layout):
    for _, library, _ in on_4_ranks:
        difference, theirs, ours = library[layout]
        assert difference <= apart()
        if layout[1] > 1:
            assert ours == theirs


def test_memory_of_activations_is_as_predicted(on_4_ranks):
    for _, _, (measured, predicted) in on_4_ranks:
        assert abs(predicted / measured - 1) <= 0.1, (measured, predicted)


# --- runs of the script -----------------------------------------------------------------------------------------------

RUN = [*TINY_SYNTHETIC, '--n_layer=4', '--max_iters=20', '--global_batch_size=12', '--keep_checkpoints=1']
RUN += ['--eval_interval=10', '--grad_clip=0.5', '--eval_sequences=12', '--lr_decay_iters=20']
LAYOUT = {  # name: (ranks, script, keys); 6 micro-steps on one pipeline, 3 on each of two
    'one': (1, 'train_ddp.py', []),
    '2 stages': (2, 'train_pipeline.py', []),
    '2 stages x 2 chunks': (2, 'train_pipeline.py', ['--pipeline_chunks=2']),
    '4 stages': (4, 'train_pipeline.py', []),
    '2 stages x 2 copies': (4, 'train_pipeline.py', ['--pipeline_stages=2']),
    '2 stages x tp 2': (4, 'train_pipeline.py', ['--tensor_parallel=2']),
}

SHORT = ['2 stages', '2 stages x 2 copies']  # those that the short suite runs


def case(folder, layout, *more, out=None, **options):
    """A case of run_many: a run of this layout in folder/out."""
    _, script, keys = LAYOUT[layout]
    arguments = [*RUN, *keys, *more, f'--out_dir={folder / (out or layout)}']
    return {'name': f'{layout} {out} {more}', 'script': script, 'arguments': arguments, **options}


@pytest.fixture(scope='module')
def runs(tmp_path_factory, has_slow_tests):
    """The folder with 20 steps of each layout, and with variants."""
    folder = tmp_path_factory.mktemp('runs')
    bf16 = '--dtype=bfloat16'
    run_many([case(folder, 'one')], 1, folder)
    if has_slow_tests:
        run_many([case(folder, 'one', bf16, out='one bf16')], 1, folder)
        halves = [case(folder, '2 stages', bf16, out='bf16'), case(folder, '2 stages', '--dtype=float16', out='fp16')]
        run_many(halves, 2, folder)
    layouts = [layout for layout in LAYOUT if has_slow_tests or layout in SHORT]
    run_many([case(folder, layout) for layout in layouts if LAYOUT[layout][0] == 4], 4, folder)
    noisy = '--dropout=0.1'
    run_many(
        [
            *(case(folder, layout) for layout in layouts if LAYOUT[layout][0] == 2),
            case(folder, '2 stages', noisy, out='noisy'),
            case(folder, '2 stages', noisy, '--max_iters=10', out='noisy again'),
            case(folder, '2 stages', noisy, out='noisy again'),
        ],
        2,
        folder,
    )
    return folder


@pytest.mark.parametrize('layout', slow_but(SHORT, [name for name in LAYOUT if name != 'one']))
def test_20_steps_have_the_losses_and_norms_of_one_process(runs, layout):
    ours, alone = metrics(runs / layout), metrics(runs / 'one')
    assert len(ours) == len(alone) == 20
    for row, expected in zip(ours, alone, strict=True):
        assert row['step'] == expected['step'] and row['tokens'] == expected['tokens'] and row['lr'] == expected['lr']
        assert ('val_loss' in row) == ('val_loss' in expected)
    for key, every in (('loss', 1), ('grad_norm', 1), ('val_loss', 10)):
        assert_same_run(column(runs / layout, key), column(runs / 'one', key), key, every)


@pytest.mark.slow
def test_20_steps_in_bf16_are_near_those_of_one_process_and_fp16_trains(runs):
    for ours, expected in zip(column(runs / 'bf16', 'loss'), column(runs / 'one bf16', 'loss'), strict=True):
        assert abs(ours - expected) <= 2e-3 * expected
    for ours, expected in zip(column(runs / 'fp16', 'loss'), column(runs / 'one', 'loss'), strict=True):
        assert abs(ours - expected) <= 5e-3 * expected  # the loss scale may have skipped a step


def test_with_dropout_a_resumed_run_is_bit_equal(runs):
    assert_same_rows(runs / 'noisy again', runs / 'noisy')
    assert_same_weights(runs / 'noisy again', runs / 'noisy', 20)
    assert error(*(column(runs / name, 'loss') for name in ('noisy', '2 stages'))) > apart(20)


# --- faults: 4 ranks, 2 stages of 2 that hold each matrix together ----------------------------------------------------

FAULTS = [*RUN, *LAYOUT['2 stages x tp 2'][2]]


def test_one_nan_in_one_gradient_of_one_stage_costs_one_step_on_all(tmp_path):
    fault = {'kind': 'nan', 'rank': 3, 'step': 3}
    run = tmp_path / 'run'
    keys = [*FAULTS, '--max_iters=4', '--checkpoint_interval=1', '--keep_checkpoints=9', f'--out_dir={run}']
    job = Job('train_pipeline.py', keys, 4, tmp_path / 'log', fault)
    assert job.wait() == [0] * 4, job.text()
    assert re.search('WARNING: gradient .*ranks 0, 1, 2, 3 .*step 3: .*skipped', job.text())
    before, after, later = (tensors_of(str(tmp_path / f'run/checkpoints/step_0000000{n}')) for n in (2, 3, 4))
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert not all(torch.equal(after[key], later[key]) for key in before)
    assert [row.get('skipped', 0) for row in metrics(tmp_path / 'run')] == [0, 0, 1, 1]


def test_a_killed_rank_ends_the_run_and_the_same_command_resumes_it_and_a_file_stop_ends_it(tmp_path):
    out_dir = tmp_path / 'run'
    keys = [*FAULTS, '--checkpoint_interval=2', '--eval_interval=0', '--eval_sequences=0', f'--out_dir={out_dir}']
    keys += ['--max_iters=100000']
    job = Job('train_pipeline.py', keys, 4, tmp_path / 'log')
    job.wait_for(lambda: complete(out_dir))
    send(job.ranks()[1])
    codes = job.wait()
    assert codes[1] == -signal.SIGKILL and not {0, None} & set(codes), job.text()
    newest = complete(out_dir)[-1]
    job = Job('train_pipeline.py', keys, 4, tmp_path / 'log')
    job.wait_for(lambda: last_step(out_dir) > newest + 2)
    send(job.ranks()[2], signal.SIGTERM)
    assert job.wait() == [143, 0, 0, 0], job.text()
    stopped = int((out_dir / 'PREEMPTED').read_text())
    assert f'at step {newest}\n' in job.text() and complete(out_dir)[-1] == stopped == last_step(out_dir)
    job = Job('train_pipeline.py', keys, 4, tmp_path / 'log')
    job.wait_for(lambda: last_step(out_dir) > stopped)
    (out_dir / 'STOP').touch()
    assert job.wait() == [0] * 4, job.text()
    assert complete(out_dir)[-1] == int((out_dir / 'PREEMPTED').read_text()) == last_step(out_dir) > stopped


def sleep_in_the_middle(out_dir):
    """Rank 1 of 3 sleeps in its second forward, at which rank 0 has done more of its work already and rank 2 less."""
    rank = dist.get_rank()
    write_output_to(f'{out_dir}/said_{rank}', f'{out_dir}/said_{rank}')
    mesh = mesh_of(3)
    with torch.device('meta'):
        whole = GPT(ModelConfig(**{**SMALL, 'arch': 'gpt2', 'n_layer': 3}))
    module = filled(pipeline_manual.Stage(whole, rank, 3, 1).to_empty(device='cpu'))
    pipeline = pipeline_manual.Pipeline(module, mesh, batch_size=2)
    batches, watchdog = batches_of(0, 5, documents=False), health.Watchdog(out_dir, timeout_s=2)
    for step in (1, 2):  # there is more patience in the first
        for actions in pipeline_manual.timetable(3, 1, 5):
            action = actions[rank]
            watchdog.at('backward' if action and action.kind == 'backward' else 'forward', step)
            if (step, rank, action) == (2, 1, Action('forward', 1, 1)):
                time.sleep(120)
            if action and action.kind == 'forward':
                pipeline.forward(action, *batches[action.micro_step])
            elif action:
                pipeline.backward(action, torch.tensor(1.0))
            pipeline.send_and_receive(actions)


@pytest.mark.slow
def test_a_sleeping_rank_in_the_middle_of_a_pipeline_is_named(tmp_path):
    processes = start_function(3, tmp_path, sleep_in_the_middle, str(tmp_path))
    assert join_all(processes, 100) == []
    said = ''.join((tmp_path / f'said_{rank}').read_text() for rank in range(3))
    lines = re.findall(r'error: (.*)', said)
    assert lines, said  # from the first rank that sees it; the others may only find its connections closed
    for line in lines:
        assert re.match(r"rank 1 .* \d+ s .*'forward' .*step 2\b", line), said


# --- a user's mistakes, and the plan ----------------------------------------------------------------------------------


@pytest.mark.parametrize('parts', [1, 2, 3, 4, 6])
def test_no_other_numbers_of_blocks_make_the_slowest_part_faster(parts):
    for n_layer, vocab_size, mlp in itertools.product((6, 7, 11), (97, 700, 5000), (40, 200)):
        keys = ModelConfig(**{**SMALL, 'n_layer': n_layer, 'vocab_size': vocab_size, 'mlp_hidden_dim': mlp}).to_dict()
        head = pipeline_manual.head_in_blocks(keys)

        def slowest(blocks, head=head):
            return max([*blocks[:-1], blocks[-1] + head])

        borders = itertools.combinations(range(1, n_layer), parts - 1)
        all_there_are = [[b - a for a, b in itertools.pairwise((0, *cut, n_layer))] for cut in borders]
        found = pipeline_manual.blocks_of_parts(keys, parts)
        assert found in all_there_are
        assert slowest(found) == min(map(slowest, all_there_are))


def test_the_head_counts_as_much_as_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    config = ModelConfig(**{**SMALL, 'arch': 'llama', 'n_kv_head': 1, 'block_size': 64})
    model = GPT(config)
    model.rotary.prepare('cpu')
    with FlopCounterMode(display=False) as block:
        model.blocks[0](torch.randn(1, 64, 24))
    with FlopCounterMode(display=False) as head:
        model.head(torch.randn(1, 64, 24))
    of_padding = config.vocab_size / config.padded_vocab_size
    # For attention PyTorch counts either nothing (on a CPU) or all keys, and not only the half that is not masked.
    in_matmuls = sum(count for op, count in block.get_flop_counts()['Global'].items() if 'mm' in str(op))
    attention = 2 * 2 * 64 * 64 * config.n_head * config.head_dim / 2
    share = head.get_total_flops() * of_padding / (in_matmuls + attention)
    assert pipeline_manual.head_in_blocks(config.to_dict()) == pytest.approx(share)


@pytest.mark.parametrize(
    'keys, says',
    [
        (['--pipeline_stages=3'], 'pipeline_stages=3 .* 4 ranks: .* 1, 2, 4'),
        (['--n_layer=3'], 'n_layer=3 .* 4 .*pipeline_stages=4'),
        (['--n_layer=4', '--pipeline_chunks=2'], 'n_layer=4 .* 8 .*pipeline_stages=4 x pipeline_chunks=2'),
        (['--global_batch_size=6'], '=6 .* 3 micro-steps .*one per stage, 4, .*--'),
        (['--pipeline_chunks=2', '--n_layer=8'], 'multiple of pipeline_stages=4; .*--global_batch_size='),
        (
            ['--pipeline_stages=1', '--pipeline_chunks=2', '--global_batch_size=24'],
            'pipeline_chunks=2 .*pipeline_stages=1',
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_what_would(tmp_path, keys, says):
    """By the checks that the script makes before there is a process group."""
    values = {'pipeline_stages': 4, 'pipeline_chunks': 1, 'n_layer': 4, 'batch_size': 2, 'global_batch_size': 12}
    values |= {**ModelConfig(**SMALL).to_dict(), 'n_layer': 4}
    values |= {key[2:]: int(value) for key, value in (text.split('=') for text in keys)}
    with pytest.raises(ValueError, match=says) as error:
        pipeline_manual.check(values, Layout.of(values, 'pipeline', ranks=4), ModelConfig(**SMALL))
    assert '\n' not in str(error.value)


def test_a_mistake_is_one_line_on_every_rank_and_leaves_nothing(tmp_path):
    out_dir = tmp_path / 'run'
    for more, says in (
        (['--n_layer=1'], 'error: n_layer=1 .* 2'),
        (['--tensor_parallel=0'], 'error: --tensor_parallel expects int >= 1, given 0'),
        (['--tensor_parallel=2', '--n_head=5'], 'error: tensor_parallel=2 .*n_head=5'),
        (['--init_from=Qwen/Qwen3-0.6B'], 'error: init_from=Qwen/Qwen3-0.6B: '),
    ):
        for line in refusals([['train_pipeline.py', *RUN, *more, f'--out_dir={out_dir}']] * 2):
            assert re.search(says, line)
    assert not out_dir.exists()


@pytest.mark.slow
def test_dry_run_shows_memory_and_traffic_of_each_stage(tmp_path):
    said = run_forked(
        'train_pipeline.py', *RUN, '--dry_run', f'--out_dir={tmp_path / "run"}', nproc=4, log=tmp_path / 'log'
    )
    rows = {line[:22].strip(): line[22:].split() for line in said.splitlines() if line.startswith('  ')}
    assert all(len(rows[part]) == 4 for part in ('weights', 'activations', 'total on the device', 'point-to-point'))
    assert 'pipeline: 4 stages x 1 chunk of 1 block; 1 pipeline; bubble 3/6 of the work' in said
    assert '2 sequences x 6 micro-steps x 1 rank group = 12 sequences' in said and not (tmp_path / 'run').exists()
