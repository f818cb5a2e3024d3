"""compare.py --plan: the roofline of a layout worked by hand, its memory, what it prints and refuses."""

import re
from types import SimpleNamespace

import pytest
from launch import REPO, run_script

import compare
import pipeline_manual
from knobs import read_knobs
from planning import report, roofline, sizes, traffic

KEYS = {'arch': 'llama', 'n_layer': 8, 'n_head': 8, 'n_kv_head': 4, 'n_embd': 256, 'vocab_size': 1024}
KEYS |= {'block_size': 128, 'batch_size': 2, 'global_batch_size': 32}
FLOPS = 0.4 * 989e12  # per second of an H100
WITHIN, BETWEEN = 0.8 * 450e9, 0.8 * 50e9


def step_of(strategy, script, gpus, node_gpus, speed=1.0, **keys):
    """(roofline.step() of a layout on H100s, whose computation is `speed` times as fast; {kind: bytes sent})."""
    config = roofline.keys_of(script, KEYS | keys)
    model, cluster = sizes.empty_model(config), roofline.cluster_of('h100', gpus, node_gpus)
    found = roofline.step(config, model, strategy, cluster._replace(peak=989e12 * speed), model.flops_per_token())
    return found, traffic.communication_bytes(config, model, gpus, strategy)


# --- a layout ---------------------------------------------------------------------------------------------------------


def test_links_are_those_of_the_data_sheets_or_measured():
    two_nodes = roofline.cluster_of('h100', 16, 8)
    assert roofline.bandwidth(two_nodes, 8, stride=1) == WITHIN
    assert roofline.bandwidth(two_nodes, 16, stride=1) == min(WITHIN, 8 * BETWEEN)  # with the cards of all 8
    assert roofline.bandwidth(two_nodes, 2, stride=8) == BETWEEN  # the i-th GPU of each: its own card
    assert roofline.bandwidth(two_nodes, 16, stride=1, is_all_to_all=True) == BETWEEN
    measured = roofline.cluster_of('h100', 16, 8, links=(3e11, 1e10), gb=64)
    assert roofline.bandwidth(measured, 8, stride=1) == 3e11 and measured.gb == 64
    assert roofline.bandwidth(measured, 16, stride=1) == 8e10


@pytest.mark.parametrize(('mode', 'factor'), [('none', 1), ('selective', 1), ('full', 4 / 3)])
def test_one_gpu_computes_and_waits_for_nothing(mode, factor):
    found, _ = step_of('ddp', 'train_ddp.py', 1, 1, activation_checkpointing=mode)
    # By hand: a block has (8 + 2 x 4) heads of 32 columns x 256, 8 x 32 x 256, and 3 matrices of 256 x 704; a token
    # meets 6 FLOPs of each number, also of the head, and 12 per layer, column of all heads and position.
    matrices = 8 * (16 * 32 * 256 + 256 * 256 + 3 * 256 * 704) + 1024 * 256
    norms = 17 * 256  # of two in each block, and the last
    flops = 32 * 128 * (6 * (matrices + norms) + 12 * 8 * 256 * 128)
    assert found['step'] == pytest.approx(factor * flops / FLOPS, rel=1e-3)
    assert found['exposed'] == found['bubble'] == found['sent'] == 0


@pytest.mark.parametrize(('strategy', 'script'), [('ddp', 'train_ddp.py'), ('fsdp', 'train_fsdp.py')])
def test_what_ddp_and_fsdp_send_is_waited_for_as_far_as_it_takes_longer_than_computing(strategy, script):
    slow, sent = step_of(strategy, script, 8, 8, speed=1e-3)
    assert slow['exposed'] == 0 and slow['sent'] == sent['sent'] > 0
    fast, _ = step_of(strategy, script, 8, 8, speed=1e9)
    assert fast['compute'] + fast['exposed'] == pytest.approx(sent['sent'] / WITHIN)


def test_copies_of_hsdp_send_between_nodes_and_their_shards_within():
    fast, sent = step_of('fsdp', 'train_fsdp.py', 16, 8, speed=1e9, replicate_size=2)
    between = sent['all-reduce'] / BETWEEN
    assert fast['step'] == pytest.approx(between + (sent['sent'] - sent['all-reduce']) / WITHIN)


@pytest.mark.parametrize(
    ('keys', 'kind', 'per_s'),
    [
        ({'tensor_parallel': 4}, 'activations', WITHIN),
        ({'arch': 'qwen3', 'n_experts': 8, 'expert_parallel': 4}, 'tokens of experts', WITHIN),
        ({'arch': 'qwen3', 'n_experts': 8, 'expert_parallel': 8}, 'tokens of experts', BETWEEN),
    ],
)
def test_nothing_hides_what_tensor_and_expert_parallelism_send(keys, kind, per_s):
    slow, sent = step_of('fsdp', 'train_parallel.py', 8, 4, speed=1e-3, **keys)
    assert slow['exposed'] == pytest.approx(sent[kind] / per_s, rel=0.02)  # beside it: sums of a few norms


def test_keys_and_values_travel_during_attention():
    slow, sent = step_of('fsdp', 'train_parallel.py', 8, 8, speed=1e-3, context_parallel=4)
    assert slow['exposed'] == 0 and slow['sent'] == sent['sent'] and sent['keys and values'] > 0


def test_diloco_waits_for_its_exchange_unless_steps_overlap_it():
    keys = {'num_replicas': 2, 'inner_steps': 1}
    waits, _ = step_of('diloco', 'train_diloco.py', 16, 8, speed=1e-3, **keys)
    assert waits['exposed'] > 0
    assert step_of('diloco', 'train_diloco.py', 16, 8, 1e-3, **keys | {'overlap_steps': 1})[0]['exposed'] == 0


def time_of_schedule(stages, chunks, micro_steps, seconds):
    """When the last action of pipeline_manual's schedule ends. seconds: (forward, backward) of each stage."""
    queues = [pipeline_manual.order_of_stage(stage, stages, chunks, micro_steps) for stage in range(stages)]
    ready = {pipeline_manual.Action('forward', 0, micro_step): 0.0 for micro_step in range(micro_steps)}
    free = [0.0] * stages
    while any(queues):
        for stage, queue in enumerate(queues):
            if queue and queue[0] in ready:
                action = queue.pop(0)
                begin = max(free[stage], ready[action])
                free[stage] = begin + seconds[stage][action.kind == 'backward'] / chunks
                ready[pipeline_manual.used_by(action, stages * chunks - 1)] = free[stage]
    return max(free)


@pytest.mark.parametrize(('stages', 'chunks', 'micro_steps'), [(2, 1, 4), (4, 1, 8), (4, 2, 8), (2, 4, 6), (8, 1, 16)])
def test_the_bubble_is_that_of_the_schedule(stages, chunks, micro_steps):
    keys = {'batch_size': 1, 'global_batch_size': micro_steps, 'pipeline_stages': stages, 'pipeline_chunks': chunks}
    found, _ = step_of('pipeline', 'train_pipeline.py', stages, stages, **keys)
    each = found['compute'] / micro_steps
    expected = time_of_schedule(stages, chunks, micro_steps, [(each / 3, 2 * each / 3)] * stages)
    assert found['compute'] + found['bubble'] == pytest.approx(expected, rel=1e-9)


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def rows():
    return roofline.rank({**KEYS, 'global_batch_size': 4}, roofline.cluster_of('h100', 4, 2), most=99)


def test_every_row_has_the_memory_and_the_bytes_that_dry_run_prints(rows):
    assert {row['strategy'] for row in rows} == {'ddp', 'fsdp', 'pipeline', 'diloco'}
    for row in rows:
        config = roofline.keys_of(row['script'], {**KEYS, 'global_batch_size': 4}) | row['keys']
        said = report.dry_run(config, {'lr_schedule': 'constant'}, 4, row['strategy'])
        sent, unit = re.search(r'([\d.]+) (GB|MB) sent per rank per step', said).groups()
        assert row['sent'] / {'GB': 1e9, 'MB': 1e6}[unit] == pytest.approx(float(sent), abs=6e-4), row['name']
        totals = re.search(r'total on the device +(.*)', said)[1].split()
        assert row['gb'] == pytest.approx(max(map(float, totals)), abs=6e-4), row['name']


def test_a_further_dimension_has_to_save_three_percent(rows):
    assert len({row['name'] for row in rows}) == len(rows)
    dimensions = [len(row['name'].split()) + (row['strategy'] == 'diloco') for row in rows]
    scores = [row['step'] * (1 + 0.03 * number) for row, number in zip(rows, dimensions, strict=True)]
    assert scores == sorted(scores)


def test_no_layout_is_proposed_that_its_script_refuses():
    keys = {**KEYS, 'global_batch_size': 4}

    def names(**changes):
        return ' '.join(row['name'] for row in roofline.rank(keys | changes, roofline.cluster_of('h100', 4, 4), 99))

    assert 'tp2' in names() and 'cp2' in names()
    assert 'tp' not in names(optimizer_dtype='int8')  # whose blocks are not cut
    assert 'cp' not in names(n_head=64, n_kv_head=64)  # of 4 numbers each


@pytest.mark.slow
def test_compare_prints_the_table_and_the_command():
    keys = [f'--{key}={value}' for key, value in {**KEYS, 'global_batch_size': 4}.items()]
    said = run_script('compare.py', '--plan', '--gpus=4', '--node_gpus=2', '--gpu=A100', *keys).stdout
    title, table, roof, command = said.strip().split('\n\n')
    assert title == '4 x a100, 2 on each node, assumed MFU 40%; per step:'
    assert 'predicts no speed' in roof and len(table.splitlines()) == 14
    launch = r'torchrun --nnodes=2 (--rdzv-.*:29500) --nproc_per_node=2 (train_\w+\.py) (.*)'
    script = re.fullmatch(launch, command)
    assert script and '--batch_size=' in script[3] and '--n_layer=8' in script[3]
    assert script[1] == '--rdzv-backend=c10d --rdzv-id=1 --rdzv-endpoint=HEAD:29500'


@pytest.mark.parametrize(
    ('changes', 'keys', 'said'),
    [
        ({'gpu': 'cpu'}, {}, "gpu='cpu': .*h100, h200, a100"),
        ({'gpus': 12, 'node_gpus': 8}, {}, 'gpus=12 .*node_gpus=8: .*--gpus=8 or 16'),
        ({'links': [300.0]}, {}, r'links=\[300.0\]: .*--links=300,40'),
        ({'gpu_gb': 0.001}, {}, r'0.001 GB .* \d+\.\d GB.* --gpus'),
        ({}, {'dtype': 'float32'}, 'dtype=float32: .*bfloat16'),
        ({}, {'global_batch_size': None}, 'global_batch_size .*not known'),
        ({}, {'vocab_size': None, 'dataset': 'nowhere'}, 'vocab_size .*not known'),
        ({}, {'init_from': 'models/x'}, 'init_from=models/x: '),
    ],
)
def test_what_cannot_be_planned_is_one_line(changes, keys, said):
    knobs = {key: knob.default for key, knob in read_knobs(REPO / 'compare.py').items()}
    config = SimpleNamespace(**{**knobs, 'gpus': 4, 'node_gpus': 4, **changes})
    given = {**KEYS, 'n_layer': 1, 'global_batch_size': 1, **keys}
    with pytest.raises(ValueError, match=said) as raised:
        compare.plan_layouts(config, given, dict.fromkeys(changes, 'command line'))
    assert '\n' not in str(raised.value)
