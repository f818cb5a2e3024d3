"""Plans with expert_parallel: bytes and memory of a step beside those of real ranks; reports, layouts."""

import json
import re
import statistics
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from launch import REPO, run_function, run_many, run_ranks
from outputs import column

import expert_manual
from layout import Ranks
from model import GPT, ModelConfig
from planning import memory, report, roofline, sizes, traffic

# Each token goes to all experts, so as many rows travel as the formula says, whatever the routers have learned.
SHAPE = {'arch': 'qwen3', 'n_layer': 3, 'n_head': 4, 'n_embd': 128, 'vocab_size': 512, 'block_size': 16}
SHAPE |= {'n_experts': 4, 'experts_per_token': 4, 'expert_hidden_dim': 96}
RUN = [f'--{key}={value}' for key, value in SHAPE.items()]
RUN += ['--device=cpu', '--dataset=synthetic', '--batch_size=2', '--log_interval=1', '--max_iters=2', '--compile=False']
RUN += ['--warmup_iters=1', '--eval_sequences=0', '--keep_checkpoints=0']
MANUAL, FULL = '--fsdp_impl=manual', '--activation_checkpointing=full'
SHARDED, BF16 = '--accumulate=sharded', '--dtype=bfloat16'
DENSE = '--dense_layers=1'
SELECTIVE = '--activation_checkpointing=selective'
CASES = {  # name: (ranks, micro-steps, keys)
    'torch': (2, 2, []),
    'torch, full': (2, 2, [FULL]),
    'manual, selective': (2, 2, [MANUAL, SELECTIVE, SHARDED]),
    'manual 1, full': (2, 2, [MANUAL, FULL, '--zero_stage=1']),
    'torch on 4, full': (4, 2, [FULL]),
    'torch 2 on 4': (4, 2, [FULL, BF16, SHARDED, '--zero_stage=2']),
    'manual on 4, full': (4, 1, [MANUAL, FULL, BF16]),
    'manual 2 on 4': (4, 2, [MANUAL, SHARDED, '--zero_stage=2']),
    'units of 2': (4, 2, [MANUAL, '--blocks_per_unit=2']),
    'all 4 share': (4, 2, ['--expert_parallel=4']),
    'HSDP': (4, 2, ['--replicate_size=2']),
    'HSDP, manual': (4, 2, [MANUAL, '--replicate_size=2']),
    'Muon': (4, 2, ['--optimizer=muon']),
    'context': (4, 2, ['--context_parallel=2']),
    'dense layers': (2, 2, [FULL, DENSE]),
    'dense layers, manual': (4, 2, [MANUAL, DENSE, SHARDED]),
    'dense layers, units of 2': (2, 3, [MANUAL, DENSE, '--blocks_per_unit=2', '--prefetch=2']),
    'dense layers, manual 1': (2, 2, [MANUAL, DENSE, '--zero_stage=1']),
    'DiLoCo': (4, 2, ['--num_replicas=2', '--inner_steps=2']),
    'DiLoCo, manual': (4, 2, [MANUAL, '--num_replicas=2', '--inner_steps=2']),
}


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """{name: (config, strategy, ranks, out_dir)} of two steps of every case."""
    folder, cases = tmp_path_factory.mktemp('experts'), {2: [], 4: []}
    for name, (ranks, micro_steps, keys) in CASES.items():
        script = 'train_diloco.py' if 'DiLoCo' in name else 'train_parallel.py'
        arguments = [*RUN, '--expert_parallel=2', '--dtype=float32', *keys]
        sequences = 2 * ranks * micro_steps // (2 if 'context' in name else 1)
        arguments += [f'--global_batch_size={sequences}', f'--out_dir={folder / name}']
        cases[ranks].append({'name': name, 'script': script, 'arguments': arguments})
    for ranks in cases:
        run_many(cases[ranks], ranks, folder)
    found = {}
    for name, (ranks, *_) in CASES.items():
        about = json.loads((folder / name / 'config.json').read_text())
        found[name] = about['config'], 'diloco' if 'DiLoCo' in name else 'fsdp', ranks, folder / name
    return found


@pytest.mark.slow
@pytest.mark.parametrize('name', CASES)
def test_predicted_bytes_are_those_that_ranks_send(runs, name):
    config, strategy, ranks, out_dir = runs[name]
    predicted = traffic.communication_bytes(config, sizes.empty_model(config), ranks, strategy)
    sent = column(out_dir, 'comm/sent_gb')
    sent = 1e9 * (statistics.mean(sent) if strategy == 'diloco' else sent[-1])
    assert predicted['sent'] == sum(size for kind, size in predicted.items() if kind != 'sent')
    assert predicted['tokens of experts'] > 0.02 * sent  # which is more than the tolerance
    assert predicted['sent'] == pytest.approx(sent, rel=0.01)  # beside norms, losses, counts


@pytest.mark.slow
@pytest.mark.parametrize('name', CASES)
def test_predicted_states_are_those_that_ranks_hold(runs, name):
    config, strategy, ranks, out_dir = runs[name]
    predicted = memory.memory_bytes(config, sizes.empty_model(config), ranks, strategy)
    for part in ('weights', 'gradients', 'optimizer'):
        (held,) = column(out_dir, f'mem/{part}_gb')
        assert predicted[part] == pytest.approx(1e9 * held, rel=1e-3), part


def config_of(**changes):
    """The keys of train_fsdp.py with this model."""
    return roofline.keys_of('train_fsdp.py', {**SHAPE, 'dtype': 'float32'}, on_cpu=True) | changes


def exchanged_bytes(mode):
    """Bytes of the rows that this rank sends to others in a micro-step of the model."""
    torch.manual_seed(0)
    model = GPT(ModelConfig(**SHAPE))
    expert_manual.split(model, Ranks(dist.get_rank(), 2, dist.group.WORLD.group_name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    model.checkpoint_activations(mode)
    exchange, sent = dist.all_to_all_single, []

    def count(arrived, rows, received=None, leaving=None, **options):
        if rows.is_floating_point():
            others = sum(leaving) - leaving[dist.get_rank()]
            sent.append(others * rows.shape[1] * rows.itemsize)
        return exchange(arrived, rows, received, leaving, **options)

    tokens = torch.randint(SHAPE['vocab_size'], (2, SHAPE['block_size']))
    with mock.patch.object(dist, 'all_to_all_single', count):
        model(tokens, tokens)[0].backward()
    return sum(sent)


@pytest.mark.parametrize('mode', ['none', 'full'])
def test_the_bytes_of_the_exchange_are_those_of_the_formula(mode):
    config = config_of(expert_parallel=2, batch_size=2, global_batch_size=4, activation_checkpointing=mode)
    formula = traffic.communication_bytes(config, sizes.empty_model(config), 2, 'fsdp')['tokens of experts']
    layers, N, k, C, bytes_per_number = 3, 2 * 16, 4, 128, 4
    assert formula == {'none': 4, 'full': 6}[mode] * 1 / 2 * layers * N * k * C * bytes_per_number
    assert run_function(2, exchanged_bytes, mode) == [formula] * 2


# --- memory -----------------------------------------------------------------------------------------------------------


def test_what_is_whole_on_a_rank_is_its_part_of_the_experts():
    config = config_of(batch_size=1, global_batch_size=8, n_layer=4)
    model = sizes.empty_model(config)
    experts = sum(p.numel() for name, p in model.named_parameters() if '.experts.' in name)
    dense = model.parameter_counts()['total'] - experts
    whole, parts = (memory.memory_bytes(config | {'expert_parallel': t}, model, 4, 'fsdp') for t in (1, 2))
    for part in ('weights', 'gradients', 'optimizer'):
        assert parts[part] == whole[part]  # 1/4 of everything, however experts are shared
    assert whole['gradients'] + whole['accumulated'] == 4 * (dense + experts)
    assert parts['gradients'] + parts['accumulated'] == 4 * (dense + experts / 2)
    assert whole['gathered'] - parts['gathered'] == 3 * 4 * (experts / 4) / 2  # half of the experts of three blocks
    alone = memory.memory_bytes(config | {'expert_parallel': 4}, model, 4, 'fsdp')
    assert whole['gathered'] - alone['gathered'] == 4 * (experts / 4) * (3 - 1 / 4)  # these do not travel: one block's
    diloco = dict(num_replicas=2, exchange_dtype='float32', error_feedback=False, num_fragments=1, outer_on_host=False)
    held = memory.memory_bytes(config | diloco | {'expert_parallel': 2}, model, 4, 'diloco')
    assert held['weights'] == 4 * (dense + experts) / 2 and held['outer'] == 2 * held['weights']


def test_each_mode_of_checkpointing_keeps_less_of_the_rows():
    config = config_of(expert_parallel=2, batch_size=2, global_batch_size=8, device='cuda', dtype='bfloat16')
    model = sizes.empty_model(config)
    kept = [
        memory.memory_bytes(config | {'activation_checkpointing': mode}, model, 4, 'fsdp')['activations']
        for mode in ('none', 'selective', 'full')
    ]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 3


# --- layouts ----------------------------------------------------------------------------------------------------------


MIXTURE = {'arch': 'qwen3', 'n_layer': 8, 'n_head': 8, 'n_embd': 256, 'vocab_size': 1024, 'block_size': 128}
MIXTURE |= {'n_experts': 8, 'batch_size': 2, 'global_batch_size': 16}


def test_layouts_of_a_mixture_share_experts_and_cut_nothing():
    rows = roofline.rank(MIXTURE, roofline.cluster_of('h100', 4, 2), most=99)
    names = [row['name'] for row in rows]
    assert any('ep2' in name for name in names) and any('ep4' in name for name in names)
    assert any('diloco2 ep2' in name for name in names)
    assert not any(word in name for name in names for word in ('tp', 'pp'))
    given = roofline.rank(MIXTURE | {'expert_parallel': 4}, roofline.cluster_of('h100', 4, 2), most=99)
    assert [row['name'] for row in given] == names  # the layouts' own keys count
    for row, other in zip(rows, given, strict=True):  # a file that sets this key is one for train_parallel.py
        shares = any(word in row['name'] for word in ('ep', 'cp'))
        assert row['strategy'] != 'fsdp' or (row['script'] == 'train_parallel.py') == shares
        assert other['script'] != 'train_fsdp.py' and other['keys'].get('expert_parallel') or row['strategy'] == 'ddp'
    for row in rows:  # what a script would refuse
        selective = row['keys']['activation_checkpointing'] == 'selective' and row['keys'].get('expert_parallel', 1) > 1
        assert not selective or row['keys']['fsdp_impl'] == 'manual'
    dense = roofline.rank(MIXTURE | {'n_experts': 0}, roofline.cluster_of('h100', 2, 2), most=99)
    assert 'ep' not in ' '.join(row['name'] for row in dense)


# --- what the user reads ----------------------------------------------------------------------------------------------


def test_out_of_memory_advice_proposes_to_share_experts():
    wide = {'n_embd': 1024, 'n_experts': 32, 'experts_per_token': 2, 'expert_hidden_dim': 1024}
    config = config_of(batch_size=1, global_batch_size=16) | wide | {'head_dim': 64, 'n_kv_head': 4}
    advice = report.out_of_memory_advice(config, 4, 'fsdp')
    assert re.search('gathered: use train_parallel.py --expert_parallel=4, or .*--accumulate=sharded', advice), advice
    advice = report.out_of_memory_advice(config | {'expert_parallel': 1}, 4, 'fsdp')
    assert 'gathered: set --expert_parallel=4, or ' in advice, advice
    shared = report.out_of_memory_advice(config | {'expert_parallel': 4}, 4, 'fsdp')
    assert 'expert_parallel' not in shared and 'share of the tokens' in shared
    for refused in ({'activation_checkpointing': 'selective'}, {'n_experts': 0}):
        assert 'expert_parallel' not in report.out_of_memory_advice(config | refused, 4, 'fsdp'), refused


def test_qwen3_30b_fits_32_gpus_of_80_gb_as_its_file_says(tmp_path):
    path = 'config/qwen3_30b_a3b.py'
    keys = [path, '--dataset=synthetic', '--device=cuda', '--dtype=bfloat16', '--dry_run', f'--out_dir={tmp_path}']
    place = {'RANK': 0, 'LOCAL_RANK': 0, 'WORLD_SIZE': 32, 'LOCAL_WORLD_SIZE': 4}
    (rank,) = run_ranks([['train_parallel.py', *keys]], [place])
    assert rank.returncode == 0, rank.stdout + rank.stderr
    words, text = ' '.join(rank.stdout.split()), (REPO / path).read_text()
    assert 'total 30,532,122,624' in words and 'active 3,353,032,704' in words
    assert 'of a layer on a rank 32' in words
    total = float(re.search(r'total on the device ([\d.]+)', words)[1])
    sent = float(re.search(r'([\d.]+) GB sent per rank per step', words)[1])
    assert total < 78
    for number in (total, sent):  # the comment says the same
        assert f'{number:.1f} GB' in text or f'{number:.0f} GB' in text, number
