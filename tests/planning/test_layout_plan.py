"""compare.py --plan: the step of a layout by formulas worked by hand, its memory, what it prints and refuses."""

import json
import math
import re
import statistics
from types import SimpleNamespace

import pytest
from launch import REPO, TINY_SYNTHETIC, fork_script, run_script

import pipeline_manual
from benchmarks import planner
from comparison import layout_table
from configurator import read_knobs
from layout import Layout
from model import GPT, ModelConfig
from planning import checks, layouts, memory, report, sizes, step_time, traffic

KEYS = {'arch': 'llama', 'n_layer': 8, 'n_head': 8, 'n_kv_head': 4, 'n_embd': 256, 'vocab_size': 1024}
KEYS |= {'block_size': 128, 'batch_size': 2, 'global_batch_size': 32}
KNOBS = {key: knob.default for key, knob in read_knobs(REPO / 'compare.py').items()}


def cluster(gpus, node_gpus=8, compute=1.0, links=1.0):
    """A cluster of H100s. compute, links: how many times as fast as theirs they are."""
    cluster = step_time.assumed('h100', gpus, node_gpus)
    scale = (1 / compute, 1 / compute)
    faster = [
        step_time.Link(link.bandwidth * links, link.gather * links, link.step / links, link.start / links)
        for link in (cluster.within, cluster.between)
    ]
    device = cluster.device._replace(scale=scale, update=cluster.device.update / compute)
    return cluster._replace(device=device, within=faster[0], between=faster[1])


def config_of(script='train_fsdp.py', **keys):
    return layouts.keys_of(script, {**KEYS, **keys}, on_cpu=False)


# --- formulas ---------------------------------------------------------------------------------------------------------


def test_a_ring_over_nodes_has_their_network_cards():
    two_nodes = step_time.assumed('h100', 16, 8)
    assert step_time.ring(two_nodes, 8, stride=1).bandwidth == 0.8 * 450e9  # one node: NVLink
    assert step_time.ring(two_nodes, 16, stride=1).bandwidth == 8 * 0.8 * 50e9  # 8 cards are slower than NVLink
    assert step_time.ring(two_nodes, 2, stride=8).bandwidth == 0.8 * 50e9  # the i-th GPU of each: its own card
    # 15 steps, one of which goes from node to node
    assert step_time.ring(two_nodes, 16, stride=1).latency == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 9.6e-6)


@pytest.mark.parametrize(
    ('windows', 'keys'),
    [  # of a query, on average
        ({}, 64),
        ({'window_pattern': 'SL', 'window_size': 2}, (64 + 2 - 2 / 128) / 2),
        ({'window_pattern': 'SL', 'window_size': 2, 'dropout': 0.1}, (64 + 128) / 2),  # by a mask, which skips nothing
        ({'windows': 'documents', 'dropout': 0.1}, 128),
        ({'windows': 'documents'}, 64),
    ],
)
def test_a_step_without_communication_is_the_computation(windows, keys):
    found = step_time.step(config_of('train_ddp.py', **windows), 'ddp', cluster(1))
    # By hand: a block has (8 + 2 x 4) heads of 32 columns x 256, 8 x 32 x 256, and 3 matrices of 256 x 704.
    matrices = 16 * 32 * 256 + 256 * 256 + 3 * 256 * 704
    peak, memory = 989e12, 0.9 * 3.35e12
    attention = 4 * keys * 8 * 32 / (0.35 * peak)
    forward = 2 * matrices / (0.7 * peak) + attention
    moved = 2 * (8 * 256 + 2 * (8 + 4) * 32 + 3 * 704) / memory
    backward = 4 * matrices / (0.7 * peak) + 2.5 * attention + 2 * moved
    head = 6 * 1024 * 256 / (0.7 * peak) + 8 * 1024 / memory
    assert found['compute'] == pytest.approx(32 * 128 * (8 * (forward + moved + backward) + head))
    assert found['exposed'] == found['bubble'] == 0
    assert found['step'] == pytest.approx(found['compute'] + found['update'])


def test_ddp_waits_for_its_all_reduce_where_nothing_hides_it():
    config = config_of('train_ddp.py')
    numbers = sizes.empty_model(config).parameter_counts()['total']
    found = step_time.step(config, 'ddp', cluster(8, compute=1e9))
    buckets = math.ceil(4 * numbers / 25 / 2**20)
    latency = 2 * buckets * (8.4e-6 + 7 * 3.4e-6)
    assert found['step'] == pytest.approx(latency + 2 * 7 / 8 * 4 * numbers / (0.8 * 450e9), rel=1e-4)


@pytest.mark.parametrize('stage', [2, 3])
def test_fsdp_waits_for_all_its_bytes_or_hides_them_behind_a_slow_gpu(stage):
    config = config_of(zero_stage=stage)
    found = step_time.step(config, 'fsdp', cluster(8, compute=1e9))
    sent = traffic.communication_bytes(config, sizes.empty_model(config), 8, 'fsdp')['sent']
    collectives = 2 * 9 + (8 if stage == 3 else 0) * 2 + 9  # 2 micro-steps gather 8 blocks and the rest, one reduces
    latency = 8.4e-6 + 7 * 3.4e-6
    assert found['exposed'] == pytest.approx(collectives * latency + sent / (0.8 * 450e9), rel=1e-4)
    slow = step_time.step(config, 'fsdp', cluster(8, compute=1e-4))
    assert slow['exposed'] < found['exposed']  # exposed is what comes first and last, with nothing beside it


@pytest.mark.parametrize(('script', 'strategy'), [('train_ddp.py', 'ddp'), ('train_fsdp.py', 'fsdp')])
def test_the_hosts_part_in_what_is_waited_for_counts_once(script, strategy):
    keys = {**KEYS, 'fsdp_impl': 'manual', 'global_batch_size': 8}
    config = layouts.keys_of(script, keys, on_cpu=True)
    cpus = step_time.cpu_cluster(4, 4, cores=4, gb=8)  # so slow that everything is hidden that can be
    cpus = cpus._replace(within=step_time.Link(1e9, 1e9, 0.0, 0.0))
    without, with_host = (step_time.step(config, strategy, cpus._replace(host=host)) for host in (0.0, 1e-9))
    sent = traffic.communication_bytes(config, sizes.empty_model(config), 4, strategy)['sent']
    assert with_host['exposed'] == pytest.approx(sent / 1e9)  # a second per GB, on the wire or of the host
    assert (with_host['exposed'] == without['exposed']) == (strategy == 'ddp')  # its bucket is full at the end


def test_the_ring_of_context_parallelism_sends_what_traffic_counts():
    config = config_of('train_parallel.py', context_parallel=4)
    model = sizes.empty_model(config)
    fast = cluster(8, compute=1e12)
    fast = fast._replace(within=step_time.Link(1e9, 1e9, 0.0, 0.0))
    plan = memory.Plan.of(config, model, Layout.of(config, 'fsdp', 8))
    waits = step_time.waits_in_a_layer(plan, model, fast, 1, 0.0, 0.0)
    micro_steps = 8  # 32 sequences, 2 at a time, on 2 groups of 4 ranks
    sent = traffic.communication_bytes(config, model, 8, 'fsdp')['keys and values']
    assert micro_steps * 8 * sum(waits) * 1e9 == pytest.approx(sent)


def test_tensor_parallelism_cuts_the_work_and_waits_for_what_it_sends():
    whole = step_time.step(config_of(global_batch_size=64), 'fsdp', cluster(1, links=1e9))
    config = config_of(global_batch_size=64) | {'tensor_parallel': 4}
    cut = step_time.step(config, 'fsdp', cluster(4, links=1e9))
    assert whole['compute'] / 4 < cut['compute'] < whole['compute'] / 2  # norms and residuals are whole
    slow = step_time.step(config, 'fsdp', cluster(4))
    sent = traffic.communication_bytes(config, sizes.empty_model(config), 4, 'fsdp')['activations']
    latency = 32 * (8 * 8 + 5) * (8.4e-6 + 3 * 3.4e-6)  # micro-steps, collectives of 8 layers, of both ends
    assert slow['exposed'] == pytest.approx(sent / (0.8 * 450e9) + latency, rel=1e-9)


def test_over_gloo_tensor_parallelism_sends_slices_straight_to_their_rank():
    cpus = step_time.cpu_cluster(4, 2, cores=1, gb=8)
    cpus = cpus._replace(within=step_time.Link(1e9, 5e8, 0.0, 0.0), between=step_time.Link(1e7, 8e6, 0.0, 0.0))
    assert step_time.slices_per_s(cpus, 2, stride=1) == 5e8  # its ranks are on one node
    config = layouts.keys_of('train_parallel.py', {**KEYS, 'tensor_parallel': 4}, on_cpu=True)
    sent = traffic.communication_bytes(config, sizes.empty_model(config), 4, 'fsdp')['activations']
    found = step_time.step(config, 'fsdp', cpus)
    assert found['exposed'] == pytest.approx(sent * 2 / 3 / 8e6)  # 2 of 3 slices go to the other node


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
    config = config_of('train_pipeline.py', vocab_size=1, **keys)  # a head without work: stages alike
    fast_links = cluster(stages, links=1e9)
    found = step_time.step(config, 'pipeline', fast_links)
    model = sizes.empty_model({**config, 'n_layer': 1})
    (forward, backward), root = step_time.work(config, model, fast_links.device)
    layers = 8 // stages
    seconds = [(layers * forward, layers * backward)] * (stages - 1) + [(layers * forward + root[0], layers * backward)]
    expected = time_of_schedule(stages, chunks, micro_steps, seconds)
    assert found['step'] - found['update'] == pytest.approx(expected, rel=0.01)
    ideal = statistics.mean(sum(both) for both in seconds) * micro_steps
    assert found['bubble'] / ideal == pytest.approx((stages - 1) / chunks / micro_steps, rel=0.1)


def test_stages_that_share_a_core_lose_nothing_to_the_bubble():
    keys = {'batch_size': 1, 'global_batch_size': 8, 'pipeline_stages': 4}
    config = config_of('train_pipeline.py', vocab_size=1, **keys)
    alone = step_time.step(config, 'pipeline', cluster(4, links=1e9))
    shared = step_time.step(config, 'pipeline', cluster(4, links=1e9)._replace(crowd=4.0))
    assert alone['bubble'] / alone['compute'] == pytest.approx(3 / 8, rel=0.02)
    # While only half of the stages work, each has twice as much of the core, so 6 units of F + B take half as long.
    assert shared['bubble'] == pytest.approx(alone['bubble'] - 3 / 8 * alone['compute'], abs=0.02 * alone['compute'])


# --- measured ---------------------------------------------------------------------------------------------------------


def test_measured_links_are_taken_as_they_are():
    def rows(link, n, step, bandwidth):
        sizes = [2**power for power in range(10, 24, 2)]
        return [
            {'link': link, 'ranks': n, 'bytes': size, 'cpu_ms': size * 2 * (n - 1) / n * 1e-6,
             'ms': 1000 * (2 * (n - 1) * step + 2 * (n - 1) / n * size / bandwidth),
             'gather_ms': 1000 * ((n - 1) * step + (n - 1) / n * size / bandwidth * 2)}
            for size in sizes
        ]  # fmt: skip

    measured = rows('all ranks', 4, 9e-3, 5e6) + rows('within a node', 2, 1e-4, 1e9)
    measured += rows('between nodes, all ranks of each', 2, 2e-3, 1e7)
    cpus = step_time.with_measured_links(step_time.cpu_cluster(4, 2, cores=1, gb=8), measured)
    assert cpus.within.bandwidth == pytest.approx(1e9, rel=0.01) and cpus.between.bandwidth == pytest.approx(
        1e7, rel=0.01
    )
    assert cpus.within.step == pytest.approx(1e-4, rel=0.05) and cpus.between.step == pytest.approx(2e-3, rel=0.05)
    assert cpus.within.gather == pytest.approx(5e8, rel=0.01) and cpus.host == pytest.approx(1e-9) and cpus.crowd == 2
    one_node = step_time.with_measured_links(
        step_time.cpu_cluster(4, 4, cores=2, gb=8), rows('all ranks', 4, 1e-4, 1e9)
    )
    assert one_node.within.bandwidth == pytest.approx(1e9, rel=0.01)
    with pytest.raises(ValueError, match='links: .* nodes of 4 ranks'):
        step_time.with_measured_links(step_time.cpu_cluster(8, 4, cores=1, gb=8), measured[:2])


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
    """The out_dir of a run of one process."""
    out_dir = tmp_path_factory.mktemp('alone')
    keys = ['--max_iters=16', '--batch_size=4', '--global_batch_size=8', '--eval_sequences=0', '--keep_checkpoints=0']
    fork_script('train_ddp.py', *TINY_SYNTHETIC, *keys, f'--out_dir={out_dir}')
    return out_dir


def test_with_a_measured_step_one_process_is_predicted_to_take_it(alone):
    cpu = step_time.with_measured_step(step_time.cpu_cluster(1, 1, cores=1, gb=8), [layout_table.run_alone(alone)])
    config = json.loads((alone / 'config.json').read_text())['config']
    found = step_time.step(config, 'ddp', cpu)
    rows = [json.loads(line) for line in (alone / 'metrics.jsonl').read_text().splitlines()]
    measured = sum(
        statistics.median(row[f'time/{phase}'] for row in rows if row['step'] > 10 and 'time/backward' in row)
        for phase in ('forward', 'backward', 'update')
    )
    assert found['step'] == pytest.approx(measured / 1000)


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def rows():
    return layouts.rank({**KEYS, 'global_batch_size': 4}, cluster(4, 2))


def test_every_row_has_the_memory_and_the_bytes_that_dry_run_prints(rows):
    assert len({row['strategy'] for row in rows}) >= 3
    for row in rows:
        config = layouts.keys_of(row['script'], {**KEYS, 'global_batch_size': 4}, on_cpu=False) | row['keys']
        said = report.dry_run(config, {'lr_schedule': 'constant'}, 4, row['strategy'])
        sent, unit = re.search(r'([\d.]+) (GB|MB) sent per rank per step', said).groups()
        assert row['sent'] / {'GB': 1e9, 'MB': 1e6}[unit] == pytest.approx(float(sent), abs=6e-4), row['name']
        totals = re.search(r'total on the device +(.*)', said)[1].split()
        assert row['gb'] == pytest.approx(max(map(float, totals)), abs=6e-4), row['name']


def test_rows_are_ranked_and_the_simplest_of_the_nearly_equal_is_first(rows):
    first, *others = rows
    assert [row['step'] for row in others] == sorted(row['step'] for row in others)
    assert first['step'] <= 1.03 * min(row['step'] for row in rows) and first['strategy'] != 'diloco'
    assert len({row['name'] for row in rows}) == len(rows)


def test_in_order_the_simplest_of_the_nearly_equal_is_first_but_for_diloco():
    steps = {'fsdp1 manual cp2': 1.0, 'diloco2': 1.005, 'fsdp1 manual': 1.02, 'pp2': 1.029, 'ddp': 1.031}
    rows = [{'name': name, 'step': step, 'strategy': name.rstrip('2')} for name, step in reversed(steps.items())]
    names = [row['name'] for row in layouts.in_order(rows)]
    assert names == ['pp2', 'fsdp1 manual cp2', 'diloco2', 'fsdp1 manual', 'ddp']


def test_a_model_is_counted_once(monkeypatch):
    made, counted, named = [], [], GPT.named_parameters
    make = sizes.make_part
    monkeypatch.setattr(sizes, 'make_part', lambda config: made.append(config) or make(config))
    monkeypatch.setattr(
        GPT,
        'named_parameters',
        lambda model, *given, **options: counted.append(model) or named(model, *given, **options),
    )
    keys = {**KEYS, 'n_layer': 4, 'global_batch_size': 8, 'dtype': 'bfloat16', 'matmul_dtype': 'float8'}
    layouts.rank(keys, cluster(4, 2), most=1)
    assert 0 < len(made) < 10 and 0 < len(counted) < 100  # of hundreds of layouts


@pytest.mark.parametrize('ranks', [2, 4])
def test_every_layout_that_the_benchmark_measures_has_a_prediction(ranks):
    cpus = step_time.cpu_cluster(ranks, ranks // 2, cores=1, gb=8)
    for name, (strategy, script, keys) in planner.cases(ranks).items():
        config = layouts.keys_of(script, {**planner.MODEL, **keys}, on_cpu=True)
        checks.check(config, Layout.of(config, strategy, ranks), ModelConfig.from_keys(config))
        assert step_time.step(config, strategy, cpus)['step'] > 0, name
    assert {'ddp', 'fsdp', 'cp2', 'tp2', 'pp2'} <= planner.cases(ranks).keys()


def test_no_layout_is_proposed_that_its_script_refuses():
    keys = {**KEYS, 'global_batch_size': 4}

    def names(**changes):
        return ' '.join(row['name'] for row in layouts.rank(keys | changes, cluster(4, 4), most=99))

    assert 'tp2' in names() and 'cp2' in names()
    assert 'tp' not in names(optimizer='muon')  # it needs whole matrices
    assert 'cp' not in names(n_head=64, n_kv_head=64)  # of 4 numbers each


def test_each_mode_of_checkpointing_has_its_time():
    seconds = {}
    for mode in ('none', 'selective', 'full', 'offload'):
        config = layouts.keys_of('train_fsdp.py', {**KEYS, 'activation_checkpointing': mode}, on_cpu=False)
        seconds[mode] = step_time.step(config | {'tensor_parallel': 2}, 'fsdp', cluster(4, 4))['step']
    assert seconds['none'] < seconds['selective'] < seconds['full'] == seconds['offload']


def knobs(**changes):
    return SimpleNamespace(**{**KNOBS, 'gpus': 4, 'node_gpus': 2, **changes})


@pytest.mark.slow
def test_compare_prints_the_table_the_reason_and_the_command():
    keys = [f'--{key}={value}' for key, value in {**KEYS, 'global_batch_size': 4, 'matmul_dtype': 'float8'}.items()]
    said = run_script('compare.py', '--plan', '--gpus=4', '--node_gpus=2', '--gpu=A100', *keys).stdout
    title, table, reason, command = said.strip().split('\n\n')
    assert title.startswith('4 ranks of a100, 2 on each node; ') and title.count('assumed') == 2
    assert 'speed assumed (that of bfloat16), ' in title
    first = table.splitlines()[2].split('|')[1].strip()
    assert reason.startswith(f'{first} is first: of ') and reason.count('. ') == 0
    script = re.fullmatch(r'torchrun --nnodes=2 --nproc_per_node=2 (--rdzv-.*:29500) (train_\w+\.py) (.*)', command)
    assert script and '--batch_size=' in script[3] and '--n_layer=8' in script[3]
    assert script[1] == '--rdzv-backend=c10d --rdzv-id=1 --rdzv-endpoint=HEAD:29500'


@pytest.mark.parametrize(
    ('changes', 'keys', 'said'),
    [
        ({'gpu': 'tpu'}, {}, "gpu='tpu': .*h100, h200, a100"),
        ({'gpus': 12, 'node_gpus': 8}, {}, 'gpus=12 .*node_gpus=8: .*--gpus=8 or 16'),
        pytest.param(
            {'gpu_gb': 0.001},
            {},
            r'0.001 GB .* \d+\.\d GB.* --gpus',
            marks=pytest.mark.slow,
        ),
        ({'gpu': 'cpu'}, {}, 'gpu=cpu .*--measured'),
        ({'gpu': 'H100'}, {'dtype': 'float32'}, 'dtype=float32: .* h100 .*--measured'),
        ({'measured': ['nowhere']}, {}, 'measured=nowhere: .*out_dir'),
        ({}, {'global_batch_size': None}, 'global_batch_size .*not known'),
        ({}, {'vocab_size': None, 'dataset': 'nowhere'}, 'vocab_size .*not known'),
        ({}, {'init_from': 'models/x'}, 'init_from=models/x: '),
    ],
)
def test_what_cannot_be_planned_is_one_line(changes, keys, said):
    with pytest.raises(ValueError, match=said) as raised:
        layout_table.report(
            knobs(**changes), {**KEYS, 'global_batch_size': 4, **keys}, dict.fromkeys(changes, 'command line')
        )
    assert '\n' not in str(raised.value)


def test_the_table_of_published_runs_in_the_docs_is_what_the_planner_says(capsys):
    planner.show_published()
    said = capsys.readouterr().out.splitlines()
    documented = (REPO / 'docs/log.md').read_text()
    for line in said:
        assert re.sub(' +', ' ', line) in re.sub(' +', ' ', documented), line
