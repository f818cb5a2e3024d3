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
    apart,
    error,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.utils._python_dispatch import TorchDispatchMode

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


# --- what ranks keep and send -----------------------------------------------------------------------------------------

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


def mesh_of(stages, tensor=1):
    copies = dist.get_world_size() // stages // tensor
    return init_device_mesh('cpu', (stages, copies, tensor), mesh_dim_names=('stage', 'replicate', 'tensor'))


def one_step(stage, pipeline, timetable, batches):
    """Do what train_pipeline.py does in a step. Returns how many micro-steps were at most on their way."""
    kept = 0
    with pipeline.weights_cast():
        for actions in timetable:
            action = actions[stage]
            if action and action.kind == 'forward':
                pipeline.forward(action, *batches[action.micro_step])
            elif action:
                pipeline.backward(action, torch.tensor(1e-3))
            kept = max(kept, len(pipeline.kept))
            pipeline.send_and_receive(actions)
    pipeline.sum_gradients()
    return kept


def run_case(stages, micro_steps, model, chunks=1, dtype='float32', documents=False, checkpointing='none', tensor=1):
    """One step of a pipeline on these ranks: micro-steps that were on their way, and bytes that were sent."""
    dtype, copies = getattr(torch, dtype), dist.get_world_size() // stages // tensor
    config = ModelConfig(**{**SMALL, **model})
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
        kept = one_step(stage, pipeline, timetable, batches_of(copy, micro_steps, documents))
        if split:
            split.sum_partial_gradients()
    keys = {**config.to_dict(), 'batch_size': 2, 'global_batch_size': 2 * micro_steps * copies, 'dtype': str(dtype)[6:]}
    keys |= {'pipeline_stages': stages, 'pipeline_chunks': chunks, 'tensor_parallel': tensor}
    keys |= {'activation_checkpointing': checkpointing}
    keys |= {'device': 'cpu', 'optimizer': 'adamw'}
    layout = Layout.of(keys, 'pipeline', dist.get_world_size())
    predicted = traffic.sent(memory.Plan.of(keys, sizes.empty_model(keys), layout, stage))
    of_ring = max(copies, tensor)  # of 2, or there is none
    return {
        'stage': stage,
        'kept': kept,
        'sent': {
            'point-to-point': sent.point_to_point,
            'all-reduce': sent.all_reduce * 2 * (of_ring - 1) / of_ring,
            **({'activations': sent.activations} if tensor > 1 else {}),
        },
        'predicted': predicted,
    }


def order_of_library(stages, chunks, micro_steps):
    """The order of this rank's actions in torch's own schedule."""
    mesh, device = mesh_of(stages), torch.device('cpu')
    stage, group = mesh.get_local_rank('stage'), mesh.get_group('stage')
    parts = [
        PipelineStage(nn.Identity(), part, stages * chunks, device, group=group)
        for part in range(stage, stages * chunks, stages)
    ]
    schedule = ScheduleInterleaved1F1B(parts, n_microbatches=micro_steps)
    order = [action for action in schedule.pipeline_order[stage] if action is not None]
    kinds = {'FORWARD': 'forward', 'FULL_BACKWARD': 'backward'}
    return stage, [Action(kinds[of.computation_type.name], of.stage_index, of.microbatch_index) for of in order]


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
        one_step(stage, pipeline, timetable, batches)
    keys = {**config.to_dict(), 'batch_size': 4, 'global_batch_size': 32, 'dtype': 'float32', 'optimizer': 'adamw'}
    keys |= {'pipeline_stages': stages, 'pipeline_chunks': 1, 'device': 'cpu', 'activation_checkpointing': 'none'}
    parts = memory.held(memory.Plan.of(keys, sizes.empty_model(keys), Layout.of(keys, 'pipeline', stages), stage))
    return live.peak, parts['activations'] + parts['logits']


def run_cases():
    results = {name: run_case(**case) for name, case in CASES.items()}
    return results, order_of_library(2, 2, 4), run_memory()


@pytest.fixture(scope='module')
def on_4_ranks():
    return run_function(4, run_cases)


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


def test_the_order_with_chunks_is_that_of_torchs_own_schedule(on_4_ranks):
    for _, (stage, order), _ in on_4_ranks:
        assert order == pipeline_manual.order_of_stage(stage, 2, 2, 4)


def test_memory_of_activations_is_as_predicted(on_4_ranks):
    for _, _, (measured, predicted) in on_4_ranks:
        assert abs(predicted / measured - 1) <= 0.1, (measured, predicted)


# --- runs of the script -----------------------------------------------------------------------------------------------

RUN = [*TINY_SYNTHETIC, '--n_layer=4', '--max_iters=20', '--global_batch_size=12', '--keep_checkpoints=1']
RUN += ['--eval_interval=10', '--grad_clip=0.5', '--eval_sequences=12', '--lr_decay_iters=20']


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """The folder with 20 steps without noise, with it, and with it in two parts."""
    folder, noise = tmp_path_factory.mktemp('runs'), ['--dropout=0.1']
    ways = [('plain', []), ('noisy', noise), ('noisy again', [*noise, '--max_iters=10']), ('noisy again', noise)]
    cases = [
        {
            'name': f'{out} {keys}',
            'script': 'train_pipeline.py',
            'arguments': [*RUN, *keys, f'--out_dir={folder / out}'],
        }
        for out, keys in ways
    ]
    run_many(cases, 2, folder)
    return folder


def test_with_dropout_a_resumed_run_is_bit_equal(runs):
    assert_same_rows(runs / 'noisy again', runs / 'noisy')
    assert_same_weights(runs / 'noisy again', runs / 'noisy', 20)
    assert error(*(column(runs / name, 'loss') for name in ('noisy', 'plain'))) > apart(20)


# --- faults: 4 ranks, 2 stages of 2 that hold each matrix together ----------------------------------------------------

FAULTS = [*RUN, '--tensor_parallel=2']


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
