"""optim.py: the schedules' values, who decays, and AdamW's update, plain and sharded."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import guard
from optim import SCHEDULES, learning_rate_at, make_optimizer, parameter_groups

ADAMW = dict(optimizer='adamw', learning_rate=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1)
SCHEDULE = dict(learning_rate=1.0, lr_schedule='cosine', warmup_iters=10, lr_decay_iters=110, min_lr=0.1)


class TinyModel(nn.Module):
    """An embedding, a matrix with a bias, a norm and a head: every kind of parameter that a group rule can meet."""

    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.norm(self.linear(self.embed(x))))


def names_of_groups(model):
    """Two lists of parameter names: decayed, not decayed."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[name_of[id(parameter)] for parameter in group['params']] for group in parameter_groups(model, 0.1)]


def train(model, steps):
    """A few steps on fixed data; returns the full parameters by name."""
    optimizer = make_optimizer(model, **ADAMW)
    x = torch.arange(20).reshape(2, 10) % 11
    for _ in range(steps):
        nn.functional.cross_entropy(model(x).flatten(0, 1), (x.flatten() + 1) % 11).backward()
        optimizer.step()
        optimizer.zero_grad()
    full = {}
    for name, parameter in model.named_parameters():
        parameter = parameter.detach()
        full[name] = (parameter.full_tensor() if hasattr(parameter, 'full_tensor') else parameter).clone()
    return full


# --- groups -----------------------------------------------------------------------------------------------------------


def test_matrices_decay_and_embeddings_norms_and_biases_do_not():
    decayed, not_decayed = names_of_groups(TinyModel())
    assert decayed == ['linear.weight', 'head.weight']
    assert not_decayed == ['embed.weight', 'linear.bias', 'norm.weight', 'norm.bias']


def test_a_tied_embedding_stands_in_one_group_and_decays():
    decayed, not_decayed = names_of_groups(TinyModel(tied=True))
    assert sorted(decayed) == ['embed.weight', 'linear.weight']
    assert 'embed.weight' not in not_decayed


def test_frozen_parameters_are_in_no_group():
    model = TinyModel()
    model.linear.requires_grad_(False)
    assert sum(names_of_groups(model), []) == ['head.weight', 'embed.weight', 'norm.weight', 'norm.bias']


# --- update -----------------------------------------------------------------------------------------------------------


def test_adamw_follows_its_equation():
    torch.manual_seed(0)
    model = TinyModel()
    optimizer = make_optimizer(model, **ADAMW)
    assert optimizer.defaults['fused']
    gradients = {name: torch.randn(5, *p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
    decays = {'linear.weight': 0.1, 'head.weight': 0.1}

    expected = {}
    for name, parameter in model.named_parameters():
        theta, m, v = parameter.detach().double(), 0.0, 0.0
        for t, gradient in enumerate(gradients[name], start=1):
            m = 0.9 * m + 0.1 * gradient
            v = 0.95 * v + 0.05 * gradient**2
            adam = (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
            theta = theta - 1e-2 * (decays.get(name, 0.0) * theta + adam)
        expected[name] = theta

    for step in range(5):
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name][step].float()
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-6, atol=1e-6)


def sharded_training(rank, folder):
    """One of two ranks. The 11 rows of embedding and head do not divide evenly."""
    dist.init_process_group('gloo', init_method=f'file://{folder}/rendezvous', rank=rank, world_size=2)
    torch.manual_seed(0)
    model = TinyModel()
    for unit in (model.linear, model):
        fully_shard(unit)
    full = train(model, steps=5)
    torch.save(full, f'{folder}/sharded_{rank}.pt')

    # fp16: the gradient of rank 1 overflows, that of rank 0 does not.
    optimizer = make_optimizer(model, **ADAMW)
    scaler = torch.amp.GradScaler('cpu', init_scale=4.0)
    scaler.scale(model(torch.arange(10)).square().mean()).backward()
    if rank == 1:
        model.linear.weight.grad.to_local().fill_(math.inf)
    before = model.norm.weight.to_local().clone()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    after = {'moved': not torch.equal(model.norm.weight.to_local(), before), 'scale': scaler.get_scale()}
    torch.save(after, f'{folder}/overflow_{rank}.pt')
    dist.destroy_process_group()
    guard.leave()  # finalizing Python after gloo aborts now and then, see there


@pytest.fixture(scope='module')
def sharded(tmp_path_factory):
    """The folder with what the two ranks of sharded_training saved."""
    folder = tmp_path_factory.mktemp('sharded')
    torch.multiprocessing.spawn(sharded_training, (str(folder),), nprocs=2)
    return folder


def test_sharded_training_equals_plain_training(sharded):
    torch.manual_seed(0)
    plain = train(TinyModel(), steps=5)
    for rank in (0, 1):
        full = torch.load(sharded / f'sharded_{rank}.pt')
        assert full.keys() == plain.keys()
        for name in plain:
            torch.testing.assert_close(full[name], plain[name], rtol=1e-5, atol=1e-6)


def test_an_overflow_on_one_rank_skips_the_step_on_all(sharded):
    for rank in (0, 1):
        assert torch.load(sharded / f'overflow_{rank}.pt') == {'moved': False, 'scale': 2.0}


# --- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('lr_schedule', SCHEDULES)
def test_schedules_rise_to_the_peak_and_end_at_min_lr(lr_schedule):
    rates = [learning_rate_at(step, **SCHEDULE | {'lr_schedule': lr_schedule}) for step in range(150)]
    assert rates[:11] == sorted(rates[:11]) and rates[0] > 0
    assert rates[10] == max(rates) == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert set(rates[110:]) == ({1.0} if lr_schedule == 'constant' else {0.1})


@pytest.mark.parametrize(
    'lr_schedule, step, expected',
    [
        ('cosine', 0, 1 / 11),
        ('cosine', 60, 0.55),  # half-way down
        ('cosine', 35, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2),
        ('cos_inf', 0, 0.01),  # 1% of the peak
        ('cos_inf', 5, 0.505),
        ('cos_inf', 60, 0.55),
        ('linear', 60, 0.55),
        ('linear', 35, 0.775),
        ('wsd', 88, 1.0),  # the last 20% of 110 steps begin here
        ('wsd', 99, 0.55),
    ],
)
def test_schedule_values(lr_schedule, step, expected):
    assert learning_rate_at(step, **SCHEDULE | {'lr_schedule': lr_schedule}) == pytest.approx(expected)


def test_a_run_shorter_than_its_warm_up_just_warms_up():
    rates = [learning_rate_at(step, **SCHEDULE | {'lr_decay_iters': 4}) for step in range(12)]
    assert rates[:10] == sorted(rates[:10]) and rates[11] == 0.1


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('lr_schedule', SCHEDULES)
def test_no_schedule_divides_by_zero(lr_schedule):
    for warmup_iters, lr_decay_iters in ((0, 0), (0, 1), (1, 1)):
        knobs = SCHEDULE | dict(lr_schedule=lr_schedule, warmup_iters=warmup_iters, lr_decay_iters=lr_decay_iters)
        assert all(0 < learning_rate_at(step, **knobs) <= 1 for step in range(3))


@pytest.mark.parametrize(
    'changed',
    [{'optimizer': 'adam'}, {'learning_rate': 0.0}, {'beta1': 1.0}, {'beta2': -0.1}, {'weight_decay': -1.0}],
)
def test_optimizer_values_out_of_range_get_one_line(changed):
    with pytest.raises(ValueError, match=rf'^{next(iter(changed))}=.*expected .*$'):
        make_optimizer(TinyModel(), **ADAMW | changed)


@pytest.mark.parametrize('changed', [{'lr_schedule': 'cos'}, {'min_lr': 2.0}, {'min_lr': -1.0}, {'warmup_iters': -1}])
def test_schedule_values_out_of_range_get_one_line(changed):
    with pytest.raises(ValueError, match=rf'^{next(iter(changed))}=.*expected .*$'):
        learning_rate_at(0, **SCHEDULE | changed)
