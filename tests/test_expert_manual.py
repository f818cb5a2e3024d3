"""expert_manual.py against one process: experts that share rows, replicas of several ranks, and the bytes that its text
promises. proving/test_lessons.py has losses and gradients of all layouts.

Replicas are run by train_diloco.py as it is, all from the same weights. Their logged numbers and the whole gradients of
each step are measured by how far they are from a run in float64.
"""

import itertools
import re
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from launch import TINY_MODEL, TINY_RUN, refusals, run_function, run_many
from layouts import layout_of
from outputs import as_of_step, checkpoint_of, column, tensors_of
from precision import MARGIN, TIMES, all_times_further, error, times_further
from router_weights import first_weights, model_of
from short import slow_but

import expert_manual
import offload
from experts import Experts
from layout import Ranks, Share
from runtime import meter

BATCH, T, VOCABULARY = 16, 32, 257
MODEL = ['--arch=qwen3', '--n_layer=2', '--n_kv_head=1', '--n_experts=8', '--router_aux=1', '--router_z=0.01']
RUN = [*TINY_MODEL, *TINY_RUN, *MODEL, f'--global_batch_size={BATCH}', '--dtype=float32']
RUN += ['--eval_interval=0', '--learning_rate=1e-3', '--keep_checkpoints=0']  # so slow that no choice comes near a tie

MANUAL, SELECTIVE = '--fsdp_impl=manual', '--activation_checkpointing=selective'


def make_model(**changes):
    """The model of these runs, on the meta device."""
    return model_of(RUN, **changes)


# --- replicas ---------------------------------------------------------------------------------------------------------

MIDDLE, END = 8, 20  # in the second round, and in the fourth
REPLICAS = [
    *RUN[:-1],
    f'--max_iters={END}',
    '--learning_rate=3e-4',
    '--num_replicas=2',
    '--inner_steps=6',
    '--checkpoint_interval=4',
    '--keep_checkpoints=9',
]
INSIDE = {  # the ranks of a replica: (ranks in all, keys)
    'one': (2, ['--batch_size=8']),
    'float64': (2, ['--batch_size=8']),
    'torch': (4, ['--expert_parallel=2', '--batch_size=4']),
    'manual': (4, ['--expert_parallel=2', '--batch_size=2', MANUAL, SELECTIVE]),
}
# Runs that go on in another layout from the middle of a round: (whose checkpoint, layout).
MOVED = {'torch, then one': ('torch', 'one'), 'one, then manual': ('one', 'manual')}
SHORT_INSIDE = ['one, then manual']


@pytest.fixture(scope='module')
def replicas(data_dir, tmp_path_factory, has_slow_tests):
    """A folder with the runs of INSIDE and of MOVED, and how close a choice came to a tie in float64."""
    folder = tmp_path_factory.mktemp('replicas')
    start = folder / 'start'
    torch.save(first_weights(RUN), start)

    def case(name, layout):
        keys = [*REPLICAS, *INSIDE[layout][1], '--dataset=tiny', f'--data_dir={data_dir}', f'--out_dir={folder / name}']
        files = {'start': str(start), 'gradients': str(folder / f'{name}.gradients'), 'float64': layout == 'float64'}
        return {'name': name, 'script': 'train_diloco.py', 'arguments': keys, **files}

    def run(names, ranks):
        return run_many(
            [case(name, layout) for name, layout in names.items() if INSIDE[layout][0] == ranks], ranks, folder
        )

    wanted = ['one', 'float64', *(name for name in ('torch', 'manual') if has_slow_tests or name in SHORT_INSIDE)]
    held = run({name: name for name in wanted}, 2)
    moved = {name: pair for name, pair in MOVED.items() if has_slow_tests or name in SHORT_INSIDE}
    for name, (before, _) in moved.items():
        if before == 'one':
            as_of_step(MIDDLE, folder / before, folder / name)
    layouts = {name: layout for name, (before, layout) in moved.items() if before == 'one'}
    run({name: name for name in wanted} | layouts, 4)
    for name, (before, layout) in moved.items():
        if before != 'one':
            as_of_step(MIDDLE, folder / before, folder / name)
            run({name: layout}, 2)
    return folder, held['float64']['gap']


KINDS = {  # what a checkpoint holds, by patterns of its keys
    'outer parameters': r'model\..*weight',
    'outer momentum': r'outer\..*\.momentum',
    'moments': r'(replica1\.)?optim\..*\.exp_avg(_sq)?',
    'load': r'replica\d\.model\..*load',
    "replicas' own parameters": r'replica\d\.model\..*weight',
}


def by_kind(out_dir, step):
    """{kind: all its numbers in one vector}."""
    tensors = tensors_of(checkpoint_of(out_dir, step))
    keys = {kind: sorted(key for key in tensors if re.fullmatch(form, key)) for kind, form in KINDS.items()}
    others = tensors.keys() - {*itertools.chain(*keys.values())}
    assert all(re.fullmatch(r'(replica1\.)?optim\..*step|model\..*load', key) for key in others)
    return {kind: torch.cat([tensors[key].flatten().double() for key in of]) for kind, of in keys.items() if of}


def factors_of(folder, *names, first=0):
    """{what: how many times as far from the third run, in float64, the first one is as the second one}.

    names: the three runs. Compared are losses and norms of the steps behind `first`, the gradients of each of these
    steps as one vector, and for the first step of a run also every gradient by itself.
    """
    factors, steps = {}, END - first
    for key in ('loss', 'grad_norm'):
        columns = [torch.tensor(column(folder / name, key)[-steps:], dtype=torch.float64) for name in names]
        assert len(columns[0]) == steps
        factors[key] = times_further(*columns)
    gradients = [torch.load(folder / f'{name}.gradients')[-steps:] for name in names]
    for step, found in enumerate(zip(*gradients, strict=True), first):
        if step == 0:
            factors |= all_times_further(*found)
        flat = [torch.cat([of_run[name].flatten() for name in found[0]]) for of_run in found]
        factors[f'gradients of step {step + 1}'] = times_further(*flat)
    return factors


@pytest.mark.parametrize('name', slow_but(SHORT_INSIDE, ['torch', 'manual', *MOVED]))
def test_replicas_of_shared_experts_are_those_of_one_rank_each(replicas, name):
    """Losses, norms and gradients; in checkpoints what is exchanged, moments, and in mid-round what each replica has
    learned."""
    replicas, gap = replicas
    assert gap > MARGIN
    runs = name, 'one', 'float64'
    factors = factors_of(replicas, *runs, first=MIDDLE if name in MOVED else 0)
    for step in (12, 16, 20):  # two rounds; in the middle of the third one; the end
        ours, one, exact = (by_kind(replicas / run, step) for run in runs)
        assert ours.keys() == one.keys() == exact.keys() and len(ours) == (5 if step == 16 else 4)
        factors |= {f'{kind} {step}': times_further(ours[kind], one[kind], exact[kind]) for kind in exact}
    for what, factor in factors.items():
        assert factor <= TIMES, (what, factor)
    moved = by_kind(replicas / 'one', 8)['outer parameters'] - by_kind(replicas / 'one', 20)['outer parameters']
    assert moved.norm() > 0.1


# --- what ranks exchange: without FSDP -------------------------------------------------------------------------------


def divided(weights, mode):
    """A GPT whose experts are divided among all ranks."""
    model, world, share = make_model(), dist.group.WORLD.group_name, Share()
    expert_manual.split(model, Ranks(dist.get_rank(), dist.get_world_size(), world), share)
    model.to_empty(device='cpu').checkpoint_activations(mode)
    load(model, weights, share.slices)
    return model


@torch.no_grad()
def load(model, weights, slices):
    for name, parameter in model.named_parameters():
        parameter.copy_(slices[name].of(weights[name]) if name in slices else weights[name])


def errors_of_experts(weights):
    """{how many rows go where: the largest float64 error of the output of SharedExperts and of its gradients}."""
    t, rank, found = dist.get_world_size(), dist.get_rank(), {}
    E, C = 8, 40
    generator = torch.Generator().manual_seed(5)
    some = torch.randint(0, 6, (t, E), generator=generator)  # rows that each rank has for each expert
    ways = {'some to each': some, 'none': 0 * some, 'all to one rank': some.clone(), 'all from one rank': some.clone()}
    ways['all to one rank'][:, E // t :] = 0
    ways['all from one rank'][1:] = 0
    ways['all to one expert'] = torch.tensor([0, 7, 0, 0, 0, 0, 0, 0]).repeat(t, 1)
    for name, counts in ways.items():
        alone, shared = make_model().to_empty(device='cpu'), divided(weights, 'none')
        load(alone, weights, {})
        alone, shared = (model.double().blocks[0].mlp.experts for model in (alone, shared))
        # Two tensors of rows: the input, and the factor of each number of the output in the loss.
        of_ranks = [torch.randn(2, n, C, dtype=torch.float64, generator=generator) for n in counts.sum(1).tolist()]

        def outputs_and_gradient(experts, rows, counts):
            rows, weight = rows[0].clone().requires_grad_(), rows[1]
            output = experts(rows, counts.cumsum(0, dtype=torch.int32))
            (output * weight).sum().backward()
            return torch.stack((output.detach(), rows.grad))

        # One process has the rows of all ranks, in the order of experts, and for each expert in that of ranks.
        pieces = [rows.split(n.tolist(), dim=1) for rows, n in zip(of_ranks, counts, strict=True)]
        together = torch.cat([of_rank[expert] for expert in range(E) for of_rank in pieces], dim=1)
        result = outputs_and_gradient(alone, together, counts.sum(0)).split(counts.T.flatten().tolist(), dim=1)
        exact = torch.cat(result[rank::t], dim=1)
        arrived, compute = [], Experts.forward

        def note(experts, rows, ends, arrived=arrived, compute=compute):
            arrived.append(rows.detach())
            return compute(experts, rows, ends)

        with mock.patch.object(Experts, 'forward', note):
            errors = [error(outputs_and_gradient(shared, of_ranks[rank], counts[rank]), exact)]
        # The same rows in the same order as in one process, since an expert's gradient is a sum in that order.
        mine = counts.sum(0).view(t, -1).sum(1).tolist()
        assert torch.equal(arrived[0], together[0].split(mine)[rank]), name
        for ours, whole in zip(shared.parameters(), alone.parameters(), strict=True):
            errors.append(error(ours.grad, whole.grad.chunk(t)[rank]))
        found[name] = max(errors)
    return found


class Sent:
    """Counts the bytes that this rank sends to others, in exchanges of rows and in exchanges of counts."""

    def __init__(self):
        self.rows = self.counts = 0
        self.exchange = dist.all_to_all_single

    def __call__(self, output, tensor, received=None, sent=None, group=None):
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        if sent is None:
            self.counts += tensor.nbytes * (ranks - 1) // ranks
        else:
            self.rows += (sum(sent) - sent[rank]) * tensor.shape[1:].numel() * tensor.itemsize
        return self.exchange(output, tensor, received, sent, group=group)


def sent_bytes(weights, mode):
    """Bytes that this rank sends in a forward and a backward pass: counted here, by Linux, and as expected."""
    t, rank, model, choices = dist.get_world_size(), dist.get_rank(), divided(weights, mode), []
    for router in model.routers:
        router.register_forward_hook(lambda module, args, output: choices.append(output[1]))
    with mock.patch.object(dist, 'all_to_all_single', Sent()) as sent:
        tokens = torch.randint(VOCABULARY, (4, T + 1), generator=torch.Generator().manual_seed(rank))
        dist.barrier()
        before = meter.written(Path('/proc/self/io'))
        model(tokens[:, :-1], tokens[:, 1:])[0].backward()
        by_linux = meter.written(Path('/proc/self/io')) - before
    layers = len(model.routers)
    rows = torch.stack([chosen.flatten().bincount(minlength=8).view(t, -1).sum(1) for chosen in choices[:layers]])
    everybodys = [torch.empty_like(rows) for _ in range(t)]
    dist.all_gather(everybodys, rows)  # [rank][layer, rank]: how many rows travel
    travel = torch.stack(everybodys).sum(1).fill_diagonal_(0)
    times, forwards = (3, 2) if mode == 'full' else (2, 1)  # each way
    return {
        'counted': (sent.rows, sent.counts),
        'expected': (
            times * int(travel[rank].sum() + travel[:, rank].sum()) * 40 * 4,
            forwards * layers * (t - 1) * 8 // t * 4,
        ),
        'by_linux': by_linux,
    }


def sent_if_balanced(weights):
    """(bytes of rows that a layer sends if all experts get equally many, the same by expert_manual.py)."""
    t, layer = dist.get_world_size(), divided(weights, 'none').blocks[0].mlp
    x = torch.randn(2, T, 40, requires_grad=True)
    N, k, C = 2 * T, 2, 40
    chosen = (torch.arange(N * k) % 8).view(N, k)
    with mock.patch.object(dist, 'all_to_all_single', Sent()) as sent:
        layer(x, [chosen])[0].sum().backward()
    return sent.rows, 4 * (t - 1) * N * k * C * 4 // t


def run_cases(weights):
    """{name: what this rank saw}."""
    return {
        'experts': errors_of_experts(weights),
        'sent': {mode: sent_bytes(weights, mode) for mode in ('none', 'selective', 'full')},
        'balanced': sent_if_balanced(weights),
    }


@pytest.fixture(scope='module', params=[pytest.param(2, marks=pytest.mark.slow), 4])
def world_size(request):
    return request.param


RESULTS = {}


@pytest.fixture
def seen(world_size):
    """What each rank saw, [{name: ...}, ...]; the ranks run once."""
    if world_size not in RESULTS:
        RESULTS[world_size] = []  # stays empty if the ranks fail, so that they are not started again
        RESULTS[world_size] = run_function(world_size, run_cases, first_weights(RUN))
    return RESULTS[world_size]


def test_in_float64_outputs_and_gradients_are_exact(seen):
    """Also where a rank computes or sends nothing."""
    for of_rank in seen:
        assert len(of_rank['experts']) == 5
        for name, largest in of_rank['experts'].items():
            assert largest <= 1e-12, (name, largest)


def test_bytes_sent_are_those_of_the_rows_that_travel(seen):
    """Rows travel 4 times in all, and 6 times where forward is computed again, but not for what selective checkpointing
    keeps."""
    for of_rank in seen:
        for mode, result in of_rank['sent'].items():
            assert result['counted'] == result['expected'], (mode, result)
            assert sum(result['expected']) <= result['by_linux'] <= 1.1 * sum(result['expected']), (mode, result)
        none, selective, full = (result['counted'][0] for result in of_rank['sent'].values())
        assert none == selective == full * 4 / 6 > 0
        counted, formula = of_rank['balanced']
        assert counted == formula


def test_each_rank_begins_with_its_rows_of_the_one_model():
    whole, found = make_model(), {}
    for rank in range(4):
        model, share = make_model(), Share()
        experts = expert_manual.split(model, Ranks(rank, 4, 'of four'), share)
        assert [experts[0].here, experts[0].gate.n_matrices] == [2, 2] and len(experts) == 2
        for name, parameter in model.named_parameters():
            value = share.initial_value(model, name, parameter, 7, 'cpu')
            assert value.shape == parameter.shape
            found.setdefault(name, []).append(value)
    for name, parameter in whole.named_parameters():
        value = whole.initial_value(name, parameter, 7, 'cpu')
        expected = value.chunk(4) if '.experts.' in name else [value] * 4
        assert all(torch.equal(*pair) for pair in zip(found[name], expected, strict=True)), name


@pytest.mark.parametrize('mode', ['full', 'selective', 'offload'])
def test_backward_computes_what_forward_has_chosen(mode):
    """Even if the router would choose otherwise when forward is computed again, as it may on a GPU near a tie."""
    weights, gradients = first_weights(RUN), []
    tokens = torch.randint(VOCABULARY, (2, T + 1), generator=torch.Generator().manual_seed(1))
    for changes in (False, True):
        model = make_model(router_bias=0.1).to_empty(device='cpu')
        load(model, weights, {})
        offload.checkpoint_activations(model, mode)
        loss, _ = model(tokens[:, :-1], tokens[:, 1:])
        for router in model.routers:
            router.bias[3] = 10.0 * changes
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for ours, expected in zip(*gradients, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.slow
def test_fully_shard_gathers_experts_twice_also_where_forward_is_computed_again(data_dir, tmp_path):
    """Once in forward and once in backward. What a checkpoint computes again there uses what is already gathered."""

    def case(mode, steps):
        keys = [*RUN, f'--activation_checkpointing={mode}', '--expert_parallel=2', '--batch_size=4', '--dataset=tiny']
        keys += [f'--data_dir={data_dir}', f'--out_dir={tmp_path}/{mode}{steps}', f'--max_iters={steps}']
        return {'name': f'{mode} {steps}', 'script': 'train_parallel.py', 'arguments': keys, 'watch': True}

    held = run_many([case(mode, steps) for mode in ('none', 'full') for steps in (1, 3)], 4, tmp_path)
    gathers = {name: found['collectives']['_allgather_base_'] for name, found in held.items()}
    for mode in ('none', 'full'):
        of_step = (gathers[f'{mode} 3'] - gathers[f'{mode} 1']) / 2
        assert of_step == 1 + 2 * 2 + 2 * 2  # the root once, each of 2 blocks and its experts twice


# --- bad input --------------------------------------------------------------------------------------------------------

REFUSED = [
    ('train_parallel.py', 2, ['--n_experts=0'], '=2 with n_experts=0: .* leave it at 1, or take a mixture$'),
    (
        'train_parallel.py',
        2,
        ['--expert_parallel=4'],
        'expert_parallel=4 .* n_experts=8 and the 2 ranks .* one of 1, 2,',
    ),
    ('train_parallel.py', 2, ['--n_experts=9'], 'expert_parallel=2 .* n_experts=9 .* use one of 1,'),
    (
        'train_parallel.py',
        4,
        ['--expert_parallel=4', '--replicate_size=2'],
        r'2 ranks .*\(replicate_size=2\): .* 1, 2,',
    ),
    ('train_diloco.py', 4, ['--expert_parallel=4', '--num_replicas=2'], r'the 2 ranks of a replica .*=2\): .* 1, 2,'),
    ('train_parallel.py', 2, [SELECTIVE], 'expert_parallel=2 with .*selective: .*--fsdp_impl=manual, or .*=full$'),
    ('train_diloco.py', 2, ['--num_replicas=1', SELECTIVE], 'selective: .*--fsdp_impl=manual, or .*=full$'),
    ('train_parallel.py', 2, ['--dtype=float16'], 'dtype=float16: use --dtype=bfloat16, or float32'),
    ('train_ddp.py', 2, [], 'expert_parallel'),
    ('train_pipeline.py', 2, [], 'expert_parallel'),
]


def name_of_refusal(script, ranks, keys, says):
    return ' '.join([script, str(ranks), *keys])


SHORT_REFUSALS = {'train_parallel.py 2 --expert_parallel=4', 'train_diloco.py 2 --num_replicas=1 ' + SELECTIVE}


@pytest.mark.parametrize(
    ('script', 'ranks', 'keys', 'says'), slow_but(SHORT_REFUSALS, REFUSED, name_of_refusal), ids=range(len(REFUSED))
)
def test_what_cannot_be_divided_says_on_each_rank_in_one_line_what_to_use(tmp_path, script, ranks, keys, says):
    command = [script, *RUN, '--expert_parallel=2', '--dataset=synthetic', f'--vocab_size={VOCABULARY}', *keys]
    command += [f'--out_dir={tmp_path / "out"}']
    lines = refusals([command] * ranks)
    assert len(lines) == ranks
    for line in lines:
        assert re.search(says, line), line
    assert not (tmp_path / 'out').exists()


def test_a_mixture_of_transformers_says_how_to_have_it_here():
    with pytest.raises(ValueError, match='expert_parallel=2 with init_from=models/mixture: .*--native=True'):
        expert_manual.check(
            {'init_from': 'models/mixture'}, layout_of('diloco', 2, expert=2), types.SimpleNamespace(arch='qwen3_moe')
        )
