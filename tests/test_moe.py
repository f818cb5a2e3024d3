"""Mixtures of experts: the numbers of transformers; balancing that is the same in every layout; checkpoints, counts,
refusals."""

import itertools
import math
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import TINY_MODEL, TINY_RUN, refusals, run_function, run_many, run_ranks, run_script
from outputs import assert_same_rows, assert_same_weights, column, tensors_of
from precision import (
    FLOAT32,
    MARGIN,
    apart,
    assert_as_close_to_float64,
    assert_same_run,
    error,
    gap_of_choice,
    in_float64,
    of_draws,
)
from router_weights import first_weights, let_tokens_choose
from short import slow_but
from torch.utils.flop_counter import FlopCounterMode

import expert_manual
import experts as experts_module
import muon
from experts import Balance, Experts
from huggingface import convert
from model import GPT, ModelConfig
from optim import balance_experts
from runtime.meter import router_metrics
from runtime.opened import open_model

VOCAB_SIZE = 67  # padded to 128
SMALL = {'arch': 'qwen3', 'n_layer': 2, 'n_head': 4, 'n_embd': 40, 'vocab_size': VOCAB_SIZE, 'block_size': 24}
SMALL |= {'mlp_hidden_dim': 64, 'n_experts': 8, 'experts_per_token': 2}


def make_model(**changes):
    """A small model, initialized as in the train scripts, but with tokens that prefer some experts."""
    with torch.device('meta'):
        model = GPT(ModelConfig(**{**SMALL, **changes}))
    model.to_empty(device='cpu')
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.initial_value(name, parameter, 0, 'cpu'))
        let_tokens_choose(dict(model.named_parameters()), model.config.experts_per_token)
    return model


def make_tokens(rows, length=24, seed=0):
    return torch.randint(VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(seed))


def uneven_load(model):
    """Set the load of the step before, in which some experts were chosen more often."""
    for router in model.routers:
        router.load.copy_(torch.arange(1.0, router.n_experts + 1))
        router.load.mul_(router.k / router.load.sum())


# --- transformers -----------------------------------------------------------------------------------------------------

SHAPES = [
    {},
    {'n_experts': 4, 'experts_per_token': 1, 'n_kv_head': 2},
    {'n_experts': 16, 'experts_per_token': 4, 'expert_hidden_dim': 24, 'head_dim': 16},
    {'n_experts': 3, 'experts_per_token': 3, 'expert_hidden_dim': 17, 'tie_embeddings': True},
    {'n_experts': 64, 'experts_per_token': 8, 'expert_hidden_dim': 8, 'n_layer': 3, 'n_embd': 80},
    {'router_normalize': False},
    {'dense_layers': 2, 'n_layer': 3, 'mlp_hidden_dim': 57},
]
SHARED = {'shared_expert_dim': 48, 'expert_hidden_dim': 24}
QWEN2 = SHARED | {'arch': 'llama', 'shared_expert_gate': True, 'qkv_bias': True, 'n_kv_head': 2}
DEEPSEEK = SHARED | {'router_scores': 'sigmoid', 'router_scale': 2.5, 'router_bias': 0.001}
OTHERS = {
    'Qwen2MoeForCausalLM': [QWEN2, QWEN2 | {'router_normalize': False, 'shared_expert_dim': 17, 'qkv_bias': False}],
    'Dots1ForCausalLM': [DEEPSEEK, DEEPSEEK | {'router_normalize': False, 'router_bias': 0.0, 'head_dim': 16}],
}
DENSE = {'dense_layers': 1, 'n_layer': 3, 'mlp_hidden_dim': 57}
OTHERS['Qwen2MoeForCausalLM'].append(QWEN2 | DENSE)
OTHERS['Dots1ForCausalLM'] += [DEEPSEEK | DENSE, DEEPSEEK | DENSE | {'dense_layers': 2, 'experts_per_token': 3}]
GROUPS = {'expert_groups': 4, 'groups_per_token': 2, 'experts_per_token': 3}
OTHERS['Dots1ForCausalLM'] += [DEEPSEEK | GROUPS, DEEPSEEK | GROUPS | {'n_experts': 12, 'experts_per_token': 5}]
GLM = DEEPSEEK | {'rotary_share': 0.5, 'head_dim': 16, 'qkv_bias': True}
OTHERS['Glm4MoeForCausalLM'] = [
    GLM,
    GLM | DENSE | {'arch': 'llama', 'rotary_share': 0.25},
    DEEPSEEK | {'arch': 'llama'},
]
OF_CLASS = [('Qwen3MoeForCausalLM', shape) for shape in SHAPES]
OF_CLASS += [(name, shape) for name, shapes in OTHERS.items() for shape in shapes]


def pooled_balance(chosen, logits, n_experts):
    """The balancing loss of transformers: E * sum of f * P, both means over the tokens of all layers."""
    shares = torch.stack([F.one_hot(of_layer, n_experts).double().sum(1).mean(0) for of_layer in chosen]).mean(0)
    return n_experts * (shares * torch.stack([of_layer.softmax(-1).mean(0) for of_layer in logits]).mean(0)).sum()


@pytest.mark.parametrize('name, shape', OF_CLASS)
def test_logits_gradients_and_balancing_loss_equal_transformers(name, shape):
    transformers = pytest.importorskip('transformers')
    ours = make_model(**shape).eval()
    for router in ours.routers:
        if router.bias is not None:  # it changes choices, and comes near no tie
            router.bias.copy_(0.02 * torch.arange(router.n_experts).roll(3))
    theirs = transformers.AutoModelForCausalLM.from_config(convert.config_to_transformers(ours.config)).eval()
    assert type(theirs).__name__ == name
    theirs.set_experts_implementation('eager')  # grouped_mm takes no odd sizes
    theirs.load_state_dict(convert.to_transformers(ours.state_dict(), ours.config))
    has_loss = name not in ('Dots1ForCausalLM', 'Glm4MoeForCausalLM')  # whose classes have no balancing loss
    said = []
    for block in ours.blocks[ours.config.dense_layers :]:
        block.mlp.register_forward_hook(lambda module, args, output: said.append(output[1]))

    def of_ours(draw):
        said.clear()
        ours.zero_grad()
        x, factor = make_tokens(3, seed=draw), randn_of_logits(draw)
        logits = ours(x)
        expected = theirs(input_ids=x, labels=x, **({'output_router_logits': True} if has_loss else {}))
        chosen, router_logits = zip(*said, strict=True)
        assert gap_of_choice(torch.stack(router_logits), ours.config.experts_per_token) > MARGIN
        assert error(logits, expected.logits) <= apart()
        if has_loss:
            assert error(pooled_balance(chosen, router_logits, ours.config.n_experts), expected.aux_loss) <= apart()
        (logits * factor).sum().backward()
        gradients = {key: parameter.grad.clone() for key, parameter in ours.named_parameters()}
        return convert.to_transformers(gradients, ours.config)

    found, in_fp32 = of_draws(of_ours), of_draws(lambda draw: gradients_of_class(theirs, draw))
    theirs.double()
    with in_float64():
        exact = of_draws(lambda draw: gradients_of_class(theirs, draw))
    largest = max(gradient.norm() for gradient in exact.values())
    kept = [key for key, gradient in exact.items() if gradient.norm() > 1e-6 * largest]
    # Of a router it is 0 if its one expert has the weight 1 in any case, and nearly so if its sigmoids are near 0 or 1;
    # of a bias of keys it is small.
    assert all(key.endswith(('k_proj.bias', 'mlp.gate.weight')) for key in exact.keys() - {*kept})
    assert_as_close_to_float64(*({key: of[key] for key in kept} for of in (found, in_fp32, exact)))


def randn_of_logits(draw):
    """What logits of make_tokens(3) are multiplied with: the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(100 + draw)
    return torch.randn((3, 24, VOCAB_SIZE), generator=generator, dtype=FLOAT32)


def gradients_of_class(model, draw):
    model.zero_grad()
    (model(input_ids=make_tokens(3, seed=draw)).logits * randn_of_logits(draw)).sum().backward()
    return {key: parameter.grad.clone() for key, parameter in model.named_parameters()}


def test_the_balancing_loss_of_sigmoid_scores_takes_their_shares():
    torch.manual_seed(0)
    balance, logits = Balance(5, 2, aux=0.3, z=0.0, scores='sigmoid'), 3 * torch.randn(7, 5)
    balance.load.copy_(torch.tensor([0.1, 0.9, 0.3, 0.5, 0.2]))
    found = balance.loss_sum(logits.topk(2).indices, logits, torch.ones(7, dtype=torch.bool))
    scores = logits.double().sigmoid()
    p = scores / scores.sum(-1, keepdim=True)
    assert error(found, 0.3 * 5 * (p @ balance.load.double()).sum()) <= apart()
    assert error(balance.seen[-1], -(p * p.log()).sum()) <= apart()  # the entropy that the log has


# --- what is computed -------------------------------------------------------------------------------------------------


def by_definition(moe, x):
    """The sum over the chosen experts of weight * down(silu(gate x) * up x), with one expert after the other."""
    tokens = x.flatten(0, 1)
    weights, chosen, _ = moe.router(tokens)
    E, y = moe.router.n_experts, 0.0
    gate, up, down = (
        layer.weight.unflatten(0, (E, -1)) for layer in (moe.experts.gate, moe.experts.up, moe.experts.down)
    )
    for expert in range(E):
        weight = (weights * (chosen == expert)).sum(1, keepdim=True)  # (N, 1), 0 where it is not chosen
        y = y + weight * ((F.silu(tokens @ gate[expert].T) * (tokens @ up[expert].T)) @ down[expert].T)
    return y.view_as(x)


@pytest.mark.parametrize('idle', [False, True])
def test_experts_compute_their_tokens_and_no_others(idle):
    """As exactly as float64 is, also where an expert gets no token and its gradient must be 0."""
    moe = make_model().blocks[0].mlp.double()
    x = torch.randn(3, 5, 40, dtype=torch.float64, requires_grad=True)
    if idle:
        with torch.no_grad():
            x[..., 0] = 5.0
            moe.router.weight[2:] = 0
            moe.router.weight[:2, 0] = 10.0  # all tokens to the first two
    with in_float64():
        found, (chosen, _) = moe(x)
        expected = by_definition(moe, x)
        assert error(found, expected) < 1e-14
        gradients = [
            torch.autograd.grad(y.square().sum(), [x, *moe.parameters()], allow_unused=True) for y in (found, expected)
        ]
    assert (chosen.unique().numel() == 2) == idle
    for ours, theirs in zip(*gradients, strict=True):
        assert error(ours, theirs) < 1e-12
    if idle:
        assert not moe.experts.up.weight.grad and (gradients[0][3].unflatten(0, (8, -1))[2:] == 0).all()


@pytest.mark.parametrize('rows', [[3, 0, 5, 1], [0, 0, 9, 0]])
def test_one_kernel_for_all_experts_computes_what_one_matmul_after_the_other_does(rows, monkeypatch):
    """grouped_mm is for GPUs, but a CPU has it, too."""
    config = ModelConfig(**{**SMALL, 'n_experts': 4, 'expert_hidden_dim': 16})
    experts, x = Experts(config), torch.randn(9, 40)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.2)
    ends = torch.tensor([*itertools.accumulate(rows)], dtype=torch.int32)
    found = []
    for way in (experts_module.rows_of_each, lambda ends, rows: ends):
        monkeypatch.setattr(experts_module, 'rows_of_each', way)
        rows_in = x.clone().requires_grad_()
        y = experts(rows_in, ends)
        found.append([y, *torch.autograd.grad(y.square().sum(), [rows_in, *experts.parameters()])])
    for one, other in zip(*found, strict=True):
        assert error(one, other) <= apart()


def test_a_gpu_in_bf16_computes_them_without_the_host_reading_a_number():
    """On the device 'meta' there are no numbers, so reading one raises an error."""
    with torch.device('meta'):
        model = GPT(ModelConfig(**SMALL), torch.bfloat16)
        x = torch.zeros(2, 24, dtype=torch.int64)
    model(x, x)[0].backward()
    assert model.blocks[0].mlp.experts.down.weight.grad.shape == (8 * 40, 32)
    model.compute_dtype = torch.float32
    with pytest.raises(NotImplementedError):
        model(x, x)


def test_the_router_computes_in_fp32_and_from_the_weights_that_a_sharded_model_gathers():
    router, x = make_model().routers[0], torch.randn(50, 40).bfloat16()
    weights, _, logits = router(x)
    rounded = router.weight.bfloat16().float()
    assert logits.dtype == weights.dtype == torch.float32 and torch.equal(logits, F.linear(x.float(), rounded))
    assert error(weights.sum(-1), torch.ones(50)) <= apart()


def test_initial_values_are_those_of_any_matrix():
    model = make_model(n_experts=16, n_embd=64, expert_hidden_dim=32)
    for name, std in (('gate', 0.02), ('up', 0.02), ('down', 0.02 / math.sqrt(2 * 2))):
        weight = model.get_parameter(f'blocks.1.mlp.experts.{name}.weight')
        assert weight.shape == (16 * (64 if name == 'down' else 32), 32 if name == 'down' else 64)
        assert weight.std().item() == pytest.approx(std, rel=0.02)
    with torch.device('meta'):
        model = GPT(ModelConfig(**SMALL))
    for router in model.to_empty(device='cpu').routers:
        assert (router.load == 2 / 8).all() and (router.seen == 0).all()


def test_muon_orthogonalizes_each_expert():
    model = make_model()
    rows = muon.hidden_matrices(model)
    block = model.blocks[0].mlp
    assert rows[block.experts.gate.weight] == [32] * 8 and rows[block.experts.down.weight] == [40] * 8
    assert rows[block.router.weight] == [8]


# --- balance ----------------------------------------------------------------------------------------------------------


def gradients_of(model, batches, mode='none'):
    """({name: gradient}, counts) of one step with these micro-batches (x, y)."""
    model.checkpoint_activations(mode)
    model.zero_grad()
    for router in model.routers:
        router.seen.zero_()
    for x, y in batches:
        model(x, y)[0].backward()
    seen = torch.stack([router.seen for router in model.routers])
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}, seen


def test_the_balancing_loss_is_a_sum_over_tokens():
    """So micro-batches, on one rank or several, add up to the gradient and the counts of the whole step."""
    x, y = make_tokens(8), make_tokens(8, seed=1)
    y[:2, :17] = -1  # no targets: of another number in each micro-batch
    keys = {'router_aux': 10.0, 'router_z': 1.0}  # so that they are most of the router's gradient
    model, exact = make_model(**keys), make_model(**keys).double()
    uneven_load(model)
    uneven_load(exact)
    whole, seen = gradients_of(model, [(x, y)])
    with in_float64():
        exact.compute_dtype = torch.float64
        reference, _ = gradients_of(exact, [(x, y)])
    without, _ = gradients_of(make_model(router_aux=0.0), [(x, y)])
    router = 'blocks.0.mlp.router.weight'
    assert error(without[router], whole[router]) > 0.5
    for parts in (2, 8):
        found, also_seen = gradients_of(model, zip(x.chunk(parts), y.chunk(parts), strict=True))
        assert_as_close_to_float64(found, whole, reference, f'{parts} parts')
        assert torch.equal(also_seen[:, :-1], seen[:, :-1]) and error(also_seen, seen) <= apart()
    assert (seen[:, :-1].sum(1) == 2 * (y >= 0).sum()).all()  # k choices of each token that has a target


@pytest.mark.parametrize('mode', ['full', 'selective'])
def test_what_is_computed_again_counts_once(mode):
    model, batches = make_model(), [(make_tokens(4), make_tokens(4, seed=1))]
    uneven_load(model)
    (expected, seen), (found, also_seen) = gradients_of(model, batches), gradients_of(model, batches, mode)
    assert torch.equal(seen, also_seen)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_evaluation_neither_counts_nor_adds_to_the_loss():
    model, x = make_model(router_aux=1.0, router_z=1.0), make_tokens(4)
    uneven_load(model)
    assert model(x, x)[0] > 1.1 * model(x, x)[1]
    seen = model.routers[0].seen.clone()
    with torch.no_grad():
        loss_sum, ce_sum = model(x, x)
    model.eval()
    assert loss_sum == ce_sum == model(x, x)[0] and torch.equal(model.routers[0].seen, seen)


def balance_on_ranks(world_size):
    """What two steps of balancing leave on each rank, and what they do if a step is skipped."""
    model, rank = make_model(router_bias=0.25), dist.get_rank()
    x = make_tokens(4, seed=1).chunk(world_size)[rank]
    y = x.clone()
    y[0, : 3 * rank] = -1
    found = []
    for skip in (False, True, torch.tensor(1.0), torch.tensor(0.0)):
        model(x, y)
        balance_experts(model, skip)
        router = model.routers[1]
        found.append((router.load.tolist(), router.bias.tolist(), router_metrics(model)))
        assert (router.seen == 0).all()
    return found


def test_load_and_bias_follow_the_counts_of_all_ranks_and_stay_where_a_step_is_skipped():
    model = make_model(router_bias=0.25)
    x = make_tokens(4, seed=1)
    y = x.clone()
    y[2, :3] = -1  # the first row of the second of two ranks
    model(x, y)
    counts = torch.stack([router.seen[:-1] for router in model.routers])
    load = counts[1] / (y >= 0).sum()
    ranks = run_function(2, balance_on_ranks, 2)
    assert ranks[0] == ranks[1]
    first, skipped, skipped_on_device, last = ranks[0]
    assert first[:2] == skipped[:2] == skipped_on_device[:2] != last[:2]
    assert sum(first[0]) == pytest.approx(2, rel=apart()) and error(torch.tensor(first[0]), load) <= apart()
    sign = (load.mean() - load).sign()
    assert 0 < (sign > 0).sum() < 8 and torch.allclose(torch.tensor(first[1]), 0.25 * (sign - sign.mean()).float())
    row, mean = first[2], counts.mean(1)
    violation = counts.amax(1) / mean - 1
    assert row['router/violation'] == pytest.approx(violation.mean().item())
    assert row['router/worst_violation'] == pytest.approx(violation.max().item())
    dead = (counts < mean[:, None] / 100).double().mean(1)
    assert (row['router/dead'], row['router/worst_dead']) == pytest.approx((dead.mean().item(), dead.max().item()))
    assert 0 < row['router/worst_entropy'] <= row['router/entropy'] < 1
    assert row['router/violation_of_layers'] == pytest.approx(violation.tolist(), abs=1e-4)
    assert row['router/dead_of_layers'] == pytest.approx(dead.tolist(), abs=1e-4)
    worst = violation.argmax()
    assert row['router/load_of_worst_layer'] == pytest.approx((counts[worst] / mean[worst]).tolist(), abs=1e-4)
    assert 'router/fullest_rank' not in row, 'no rank has other experts than another one'


def set_seen_by_all(model):
    counts = torch.tensor([[4.0, 4, 4, 4, 4, 4, 4, 4, 0], [9, 0, 9, 0, 5, 5, 0, 4, 0]], dtype=torch.float64)
    for router, seen in zip(model.routers, counts, strict=True):
        router.seen_by_all = seen


def test_the_fullest_rank_is_that_of_consecutive_experts():
    model = make_model()
    set_seen_by_all(model)
    whole = router_metrics(model)
    for ranks, of_second in ((2, 18 / 16 - 1), (4, 10 / 8 - 1), (8, 9 / 4 - 1)):
        model = make_model()
        set_seen_by_all(model)
        expert_manual.split(model, SimpleNamespace(rank=1, size=ranks, group=None))
        row = router_metrics(model)
        assert row.pop('router/worst_fullest_rank') == pytest.approx(of_second)
        assert row.pop('router/fullest_rank') == pytest.approx(of_second / 2) and row == whole


def test_the_bias_chooses_and_no_more():
    router, x = make_model(router_bias=0.1).routers[0], torch.randn(50, 40)
    _, chosen, logits = router(x)
    router.bias[3] = 10.0
    weights, biased, same_logits = router(x)
    assert (biased == 3).any(1).all() and not (chosen == 3).any(1).all() and torch.equal(logits, same_logits)
    p = logits.softmax(-1).gather(1, biased)
    assert torch.equal(weights, p / p.sum(-1, keepdim=True))


# --- counts -----------------------------------------------------------------------------------------------------------


def test_counts_and_flops_are_those_of_the_experts_that_compute_a_token():
    with torch.device('meta'):
        model = GPT(ModelConfig(**SMALL))
        dense = GPT(ModelConfig(**{**SMALL, 'n_experts': 0}))
    ours, theirs = model.parameter_counts(), dense.parameter_counts()
    router = 2 * 8 * 40
    assert model.config.expert_hidden_dim == 32 and ours['active'] == theirs['total'] + router
    assert ours['total'] == theirs['total'] + router + 2 * 3 * (8 - 2) * 32 * 40
    assert model.flops_per_token() == dense.flops_per_token() + 6 * router


def test_flops_are_those_that_pytorch_counts():
    model, x = make_model(), make_tokens(2)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(x, x)[0].backward()
    in_vectors = 6 * sum(parameter.numel() for parameter in model.parameters() if parameter.dim() < 2)
    assert counter.get_total_flops() == pytest.approx(x.numel() * (model.flops_per_token() - in_vectors), rel=0.01)


@pytest.mark.parametrize('place', [['--device=cpu', '--dtype=float32'], ['--device=cuda', '--dtype=bfloat16']])
def test_a_dry_run_knows_experts(data_dir, tmp_path, place):
    keys = [*TINY_MODEL, '--arch=qwen3', '--n_experts=8', '--dataset=tiny', f'--data_dir={data_dir}', *place]
    (rank,) = run_ranks([['train_fsdp.py', *keys, '--dry_run', f'--out_dir={tmp_path / "out"}']])
    assert rank.returncode == 0, rank.stdout + rank.stderr
    rows = dict(re.findall(r'^  (\w[\w ]*?) {2,}(\S+)$', rank.stdout, re.MULTILINE))
    idle = 3 * 3 * 6 * 24 * 40  # layers x matrices x experts that a token does not meet
    total, active = (int(rows[key].replace(',', '')) for key in ('total', 'active'))
    assert rows['n_experts'] == '8' and rows['expert_hidden_dim'] == '24' and total - active == idle
    assert {'activations', 'logits'} <= rows.keys(), rank.stdout


# --- runs -------------------------------------------------------------------------------------------------------------

RUN = [*TINY_MODEL, *TINY_RUN, '--dataset=tiny', '--dtype=float32', '--global_batch_size=12', '--max_iters=8']
RUN += ['--arch=qwen3', '--n_experts=8', '--dense_layers=1', '--router_aux=1', '--router_z=0.01', '--lr_decay_iters=50']
RUN += ['--eval_interval=8', '--checkpoint_interval=4']
SLOWLY = '--learning_rate=1e-3'  # so that no choice comes near a tie
BIASED = ['--router_aux=0', '--router_bias=1']
LAYOUTS = {  # name: (ranks, script, keys)
    'one': (1, 'train_ddp.py', []),
    'accumulating': (1, 'train_ddp.py', ['--batch_size=3']),
    'biased': (1, 'train_ddp.py', BIASED),
    'ddp': (2, 'train_ddp.py', []),
    'ddp, one micro-step': (2, 'train_ddp.py', ['--batch_size=6']),
    'ddp, biased': (2, 'train_ddp.py', BIASED),
    'fsdp by hand': (2, 'train_fsdp.py', ['--fsdp_impl=manual', '--activation_checkpointing=full']),
    'diloco': (2, 'train_diloco.py', ['--num_replicas=1', '--inner_steps=4', '--outer_lr=1', '--outer_momentum=0']),
}
SHORT = ['one', 'ddp', 'fsdp by hand', 'ddp, biased', 'biased']


@pytest.fixture(scope='module')
def start(tmp_path_factory):
    """The weights with which runs begin whose layouts are compared."""
    path = tmp_path_factory.mktemp('start') / 'weights'
    torch.save(first_weights(RUN), path)
    return str(path)


@pytest.fixture(scope='module')
def runs(data_dir, start, tmp_path_factory, has_slow_tests):
    """A folder with the run of each layout."""
    folder, cases = tmp_path_factory.mktemp('moe'), {}
    for name, (ranks, script, keys) in LAYOUTS.items():
        if has_slow_tests or name in SHORT:
            arguments = [*RUN, SLOWLY, *keys, f'--data_dir={data_dir}', f'--out_dir={folder / name}']
            case = {'name': name, 'script': script, 'arguments': arguments, 'start': start}
            cases.setdefault(ranks, []).append(case)
    for ranks, some in cases.items():
        for name, held in run_many(some, ranks, folder).items():
            assert held['gap'] > MARGIN, name
    return folder


@pytest.mark.parametrize('name', slow_but(SHORT, [name for name in LAYOUTS if name not in ('one', 'biased')]))
def test_no_layout_changes_a_number(runs, name):
    """Because the load in a loss is that of the step before, over all ranks and micro-steps."""
    alone = 'biased' if 'biased' in name else 'one'
    assert column(runs / name, 'router/violation') == column(runs / alone, 'router/violation')
    for key in ('loss', 'grad_norm', 'val_loss', 'router/worst_entropy'):
        found, expected = column(runs / name, key), column(runs / alone, key)
        assert len(found) == (1 if key == 'val_loss' else 8)
        assert_same_run(found, expected, f'{key} of {name}')


def test_balance_matters(data_dir, tmp_path):
    # Much of it, so that 16 steps show it whatever the weights are. Of the bias 16 steps show only that it counts.
    ways = {
        'aux': ['--router_aux=30'],
        'without': ['--router_aux=0'],
        'biased': ['--router_aux=0', '--router_bias=0.01'],
    }
    keys = [*RUN, f'--data_dir={data_dir}', '--max_iters=16']
    cases = [
        {'name': name, 'script': 'train_ddp.py', 'arguments': [*keys, *way, f'--out_dir={tmp_path / name}']}
        for name, way in ways.items()
    ]
    run_many(cases, 1, tmp_path)
    losses = {name: column(tmp_path / name, 'loss') for name in ways}
    violations = {name: column(tmp_path / name, 'router/violation') for name in ways}
    for name in ('aux', 'biased'):
        assert_same_run(losses[name][:1], losses['without'][:1])
        assert error(losses[name][-1], losses['without'][-1]) > apart(16)
    assert sum(violations['aux'][8:]) < sum(violations['without'][8:])


def test_a_run_that_begins_with_an_export_has_its_biases(runs, data_dir, tmp_path):
    """Of softmax with biases transformers has no class, so model.py reads the export."""
    run_script('export_model.py', f'--out_dir={runs / "biased"}', f'--to={tmp_path}/model', f'--data_dir={data_dir}')
    export = open_model(f'{tmp_path}/model')
    model = GPT(export.model_config)
    export.fill(model)
    tensors = tensors_of(runs / 'biased' / 'checkpoints' / 'step_00000008')
    for number, router in enumerate(model.routers, start=1):
        bias = tensors[f'model.blocks.{number}.mlp.router.bias']
        assert bias.any() and torch.equal(router.bias, bias)


def test_checkpoints_have_the_load_and_experts_as_rows(runs):
    tensors = tensors_of(runs / 'fsdp by hand' / 'checkpoints' / 'step_00000008')
    names = [name for name in tensors if name.startswith('model.blocks.1.mlp.')]
    shapes = {name.removeprefix('model.blocks.1.mlp.'): tuple(tensors[name].shape) for name in names}
    assert shapes == {
        'router.weight': (8, 40),
        'router.load': (8,),
        'experts.gate.weight': (8 * 24, 40),
        'experts.up.weight': (8 * 24, 40),
        'experts.down.weight': (8 * 40, 24),
    }
    load = tensors['model.blocks.1.mlp.router.load']
    assert error(load.sum(), 2) <= apart() and not torch.equal(load, torch.full((8,), 0.25))
    of_ddp = tensors_of(runs / 'ddp' / 'checkpoints' / 'step_00000008')['model.blocks.1.mlp.router.load']
    assert torch.equal(load, of_ddp)


def test_a_run_goes_on_as_if_it_had_not_stopped(runs, start, data_dir, tmp_path):
    """It goes on with the load and the bias of the step before. `moved` goes on in another layout."""

    def case(name, steps, layout):
        _, script, keys = LAYOUTS[layout]
        keys = [*RUN, SLOWLY, *keys, f'--max_iters={steps}', f'--data_dir={data_dir}', f'--out_dir={tmp_path / name}']
        return {'name': f'{name} {steps}', 'script': script, 'arguments': keys, 'start': start}

    begun = [case(name, 4, layout) for name, layout in (('one', 'one'), ('biased', 'biased'), ('moved', 'one'))]
    run_many([*begun, case('one', 8, 'one'), case('biased', 8, 'biased')], 1, tmp_path)
    run_many([case('moved', 8, 'fsdp by hand')], 2, tmp_path)
    for name in ('one', 'biased'):
        assert_same_rows(tmp_path / name, runs / name, ('step', 'loss', 'router/violation'))
        assert_same_weights(tmp_path / name, runs / name, 8)
    assert_same_run(column(tmp_path / 'moved', 'loss'), column(runs / 'one', 'loss'))


@pytest.mark.slow
def test_each_replica_goes_on_with_its_own_load(data_dir, tmp_path):
    keys = [*RUN, '--checkpoint_interval=2', '--keep_checkpoints=4', '--num_replicas=2', '--inner_steps=4']
    whole, resumed = tmp_path / 'whole', tmp_path / 'resumed'

    def run(out_dir):
        arguments = [*keys, f'--data_dir={data_dir}', f'--out_dir={out_dir}']
        run_many([{'name': 'run', 'script': 'train_diloco.py', 'arguments': arguments}], 2, tmp_path)

    run(whole)
    loads = [
        tensors_of(whole / 'checkpoints' / 'step_00000006')[f'replica{replica}.model.blocks.1.mlp.router.load']
        for replica in range(2)
    ]
    assert not torch.equal(*loads)
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / 'checkpoints' / 'step_00000008')
    (resumed / 'DONE').unlink()
    run(resumed)  # from the middle of a round
    assert_same_rows(resumed, whole, ('step', 'loss', 'val_loss'))
    assert_same_weights(resumed, whole, 8)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'arch': 'gpt2'}, 'n_experts=8 with arch=gpt2: .*--arch=qwen3'),
        ({'arch': 'enoki'}, 'n_experts=8 with arch=enoki: .*--arch=qwen3'),
        ({'experts_per_token': 9}, 'experts_per_token=9: expected 1 to 8'),
        ({'experts_per_token': 0}, 'experts_per_token=0: expected 1 to 8'),
        ({'expert_groups': 3}, 'expert_groups=3: use one of 1, 2, 4'),
        ({'expert_groups': 8}, 'expert_groups=8: use one of 1, 2, 4'),
        ({'n_experts': 2**40, 'expert_groups': 3}, 'expert_groups=3: use one of 1, 2, 4, '),  # in no time
        (GROUPS | {'groups_per_token': 1}, 'groups_per_token=1 with .*: expected 2 to 4'),
        ({'groups_per_token': 2}, 'groups_per_token=2 with .*: expected 1 to 1'),
        ({'dense_layers': 2}, 'dense_layers=2 with n_layer=2: expected 0 to 1'),
        ({'dense_layers': -1}, 'dense_layers=-1 with n_layer=2: expected 0 to 1'),
        ({'parametrization': 'mup', 'base_width': 20}, "parametrization='mup'.*--parametrization=standard"),
        ({'bias': True}, 'bias=True'),
    ],
)
def test_impossible_mixtures_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        ModelConfig(**{**SMALL, **changes})
    assert '\n' not in str(caught.value)


def name_of(script, keys, says):
    return ' '.join([script, *keys])


REFUSED = [
    ('train_parallel.py', ['--tensor_parallel=2'], 'tensor_parallel=2: experts are not cut'),
    ('train_pipeline.py', [], 'use train_fsdp.py'),
    ('train_deepspeed.py', [], 'use train_fsdp.py'),
    ('train_ddp.py', ['--dtype=float16'], '--dtype=bfloat16'),
    ('train_fsdp.py', ['--heads=8'], 'heads=8'),
    ('train_diloco.py', ['--inner_steps=4', '--router_bias=0.1'], '--router_bias=0'),
    ('train_ddp.py', ['--device=cuda', '--dry_run', '--dtype=bfloat16', '--expert_hidden_dim=12'], 'multiples of 8'),
]


@pytest.mark.parametrize(
    ('script', 'keys', 'says'),
    slow_but({'train_parallel.py --tensor_parallel=2', 'train_pipeline.py'}, REFUSED, name_of),
)
def test_what_has_no_experts_says_what_to_use_instead(data_dir, tmp_path, script, keys, says):
    command = [script, *RUN, f'--data_dir={data_dir}', f'--out_dir={tmp_path / "out"}', *keys]
    for line in refusals([command, command]):
        assert says in line, line
    assert not (tmp_path / 'out').exists()
