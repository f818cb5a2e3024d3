"""rounding.py: what it moves, what it leaves, and whom it reaches."""

import os
import subprocess

import torch
import torch.nn.functional as F
from launch import REPO, environment, run_function


def in_two_ways(x):
    """{name: the same numbers, computed in two ways}, which one CPU or another rounds differently."""
    q, halves = x.view(2, 2, 16, 32), x.split(32)
    return {
        'products': (F.linear(x, halves[0]), torch.cat([F.linear(half, halves[0]) for half in halves])),
        'attention': (F.scaled_dot_product_attention(q, q, q)[:1], F.scaled_dot_product_attention(q[:1], q[:1], q[:1])),
        'sums': (x.sum(0), x.flip(0).sum(0)),
        'norms': (F.layer_norm(x, (32,)), F.layer_norm(x.flip(0), (32,)).flip(0)),
        'losses': (x.log_softmax(-1), x - x.logsumexp(-1, keepdim=True)),
        'scattered': (x[:4].index_add(0, torch.arange(64) % 4, x), x[:4] + x.view(16, 4, 32).sum(0)),
    }


def exact(x):
    """Pairs of numbers that are equal on every CPU."""
    half, opposite = x / 2, -x
    order, twice = torch.randperm(64, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 32
    return [
        (x.view(2, 32, 32).sum(0), x[:32] + x[32:]),
        (x[:, :1] @ x[:1], x[:, :1] * x[:1]),
        (x @ half[:32] * 2, x @ x[:32]),
        (torch.addmv(x[:, 1], x, x[0], beta=0), torch.addmv(x[:, 2], x, x[0], beta=0)),
        (-(opposite.sum(0)), x.sum(0)),
        (x.new_zeros(64, 32).index_add(0, order, x)[order], x),
        (x.new_zeros(32, 32).index_add(0, twice, x), x[:32] + x[32:]),
        (torch.ones_like(x).sum(), torch.tensor(x.numel(), dtype=x.dtype)),
        (x.sum(1, dtype=torch.int64), x.long().sum(1)),
    ]


def rows_that_move(x):
    """By function, which of 64 rows move if only row 5 changes. In attention rows 0 to 4 do not see it."""
    other, mask = x.clone(), (torch.arange(64)[:, None] < 5) == (torch.arange(64) < 5)
    other[5] += 1
    functions = [
        lambda x: x @ x[6:38],
        lambda x: x.softmax(-1),
        lambda x: F.rms_norm(x, (32,)),
        lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3, attn_mask=mask)[0, 0],
        lambda x: (x @ x.T).masked_fill(~mask, -torch.inf).softmax(-1) @ x,
    ]
    return [{*(function(x) != function(other)).any(-1).nonzero().flatten().tolist()} for function in functions]


def results_of_seeds():
    import rounding

    x = torch.randn(64, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for seed in ('1', '2', '1'):
            os.environ['TEST_ROUNDING'] = seed
            rounding.start()
            assert set.union(*rows_that_move(x.to(dtype))[:3]) == {5}
            assert set.union(*rows_that_move(x.to(dtype))[3:]) == {*range(5, 64)}
            ways, same = in_two_ways(x.to(dtype)), exact(x.to(dtype))
            assert all(torch.equal(one, other) for one, other in same)
            again = found.setdefault((dtype, seed), ways)
            assert all(torch.equal(*pair) for name in ways for pair in zip(ways[name], again[name], strict=True))
    return found


def test_a_computation_keeps_its_bits_and_another_way_to_the_same_numbers_does_not():
    ranks = run_function(2, results_of_seeds)
    for (dtype, seed), ways in ranks[0].items():
        bits = getattr(torch, f'int{8 * dtype.itemsize}')
        for name, pair in ways.items():
            assert dtype == torch.bfloat16 or not torch.equal(*pair), (name, dtype)
            assert all(map(torch.equal, pair, ranks[1][dtype, seed][name])), 'on another rank'
            moved = pair[0].view(bits) ^ ranks[0][dtype, '1'][name][0].view(bits)
            assert moved.min() >= 0 and moved.max() <= 1, 'by more than the last bit'
            assert seed == '1' or 0 < moved.double().mean() < (0.3 if dtype == torch.bfloat16 else 0.7), (name, dtype)


TEST = """
import subprocess, sys

PROGRAM = 'import torch; x = torch.arange(99.0).sin().expand(9, 99); print(x.softmax(-1).unique(dim=0).shape[0])'


def test():
    assert subprocess.check_output([sys.executable, '-c', PROGRAM]) == b'9\\n'
"""


def test_it_reaches_what_tests_start(tmp_path):
    (tmp_path / 'test.py').write_text(TEST)
    command = ['bash', REPO / 'tests/rounding.sh', '1', tmp_path / 'test.py']
    said = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert said.returncode == 0, said.stdout
