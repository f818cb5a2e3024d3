"""The judge of prove.py on made-up gradients: what is right, what is wrong, and whether the cause has its name."""

import pytest
import torch

from proving.judge import Record, judge

PARTS = [(rank, micro_step) for rank in range(2) for micro_step in range(2)]
WHOLE = {'embed.weight': (30, 7), 'blocks.0.up.weight': (12, 10), 'blocks.1.up.weight': (12, 10), 'norm.weight': (10,)}


def drawn(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in WHOLE.items()}


def norm_of(gradients):
    return sum(of.double().square().sum().item() for of in gradients.values()) ** 0.5


@pytest.fixture(params=[0, 1, 2])
def exact(request):
    """One process in float64, with two data ranks' parts in two micro-steps."""
    parts = {label: drawn(100 * request.param + number) for number, label in enumerate(PARTS)}
    gradients = {name: sum(part[name] for part in parts.values()) for name in WHOLE}
    updates = {name: -0.1 * of for name, of in gradients.items()}
    places = dict.fromkeys(WHOLE)
    return Record(places, gradients, updates, [norm_of(gradients)], [3.0, 2.9], parts=parts)


def rounded(exact, gradients=None, places=None):
    """What a rank in fp32 would record, with other gradients or only a part of them."""
    gradients = {name: of.float() for name, of in {**exact.gradients, **(gradients or {})}.items()}
    updates = {name: of.float() for name, of in exact.updates.items()}
    return Record(places or exact.places, gradients, updates, exact.norms, exact.losses)


def lines_of(exact, *ranks):
    verdict = judge(ranks, rounded(exact), exact)
    assert verdict.is_right == (not verdict.findings)
    return verdict.lines()


def test_rounding_alone_is_right(exact):
    assert lines_of(exact, rounded(exact), rounded(exact)) == []


def times(exact, factor, names=WHOLE):
    return {name: factor * exact.gradients[name] for name in names}


def summed(exact, counts):
    """{name: the parts of the step, each so many times}"""
    return {name: sum(count * exact.parts[label][name] for label, count in counts.items()) for name in WHOLE}


def test_the_cause_has_its_name(exact):
    """Of faults that are the same on both ranks."""
    nan, zero = times(exact, float('nan')), times(exact, 0)
    faults = {
        '2 times too large': times(exact, 2.0),
        '1/2 of the right one: averaged over 2 ranks where a sum belongs': times(exact, 0.5),
        'its sign is wrong': times(exact, -1.0),
        '0.83 times the right one: divided by another number of tokens?': times(exact, 0.83),
        'no gradient at all': zero,
        'not finite': nan,
        'its micro-steps count 2, 1 times': summed(exact, {(0, 0): 2, (1, 0): 2, (0, 1): 1, (1, 1): 1}),
        'its data ranks count 2, 0 times': summed(exact, {(0, 0): 2, (0, 1): 2}),
        'a mean of means': summed(exact, {(0, 0): 0.8, (0, 1): 0.8, (1, 0): 1.3, (1, 1): 1.3}),
        'some are never added': summed(exact, {(0, 0): 1, (0, 1): 1, (1, 0): 1}),
        'bfloat16': {name: of.bfloat16() for name, of in exact.gradients.items()},
        'another direction': drawn(7),
    }
    for cause, gradients in faults.items():
        rank = rounded(exact, gradients)
        lines = lines_of(exact, rank, rank)
        assert any(cause in line for line in lines), (cause, lines)


def test_only_what_is_wrong_is_named_and_layers_are_put_together(exact):
    rank = rounded(exact, times(exact, 3.0, ['blocks.0.up.weight', 'blocks.1.up.weight']))
    (line,) = lines_of(exact, rank, rank)
    assert line.startswith('gradient of blocks.*.up.weight (2): off by 2.0e+00: 3 times too large')


def test_ranks_that_hold_parts_of_a_sum(exact):
    """As tensor-parallel ranks hold them of a norm, and data-parallel ranks of their own sequences."""
    halves = [
        {'norm.weight': sum(exact.parts[label]['norm.weight'] for label in PARTS if label[0] == rank)}
        for rank in (0, 1)
    ]
    (line,) = lines_of(exact, *(rounded(exact, half) for half in halves))
    assert 'an all-reduce (sum) is missing over 2 ranks' in line and line.startswith('gradient of norm.weight')
    own = [{name: 2 * of for name, of in half.items()} for half in halves]
    (line,) = lines_of(exact, *(rounded(exact, of) for of in own))
    assert 'an all-reduce (mean) is missing over 2 ranks' in line


def test_a_rank_is_judged_by_the_part_that_it_holds(exact):
    rows = torch.tensor([3, 0, 8])
    places = {**exact.places, 'embed.weight': (0, rows)}
    part = rounded(exact, {'embed.weight': exact.gradients['embed.weight'][rows]}, places)
    part.updates['embed.weight'] = part.updates['embed.weight'][rows]
    assert lines_of(exact, part, rounded(exact)) == []
    part.gradients['embed.weight'][1] *= 2
    (line,) = lines_of(exact, part, rounded(exact))
    assert 'right on rank 1, wrong on rank 0' in line


def test_a_parameter_that_no_rank_has(exact):
    names = [name for name in WHOLE if name != 'norm.weight']
    rank = rounded(exact)
    rank.places = dict.fromkeys(names)
    (line,) = lines_of(exact, rank, rank)
    assert line == 'gradient of norm.weight: off by inf: no rank has this parameter'


def test_a_norm_that_counts_what_is_not_cut_twice(exact):
    square = exact.gradients['norm.weight'].square().sum().item()
    rank = rounded(exact)
    rank.norms = [(exact.norms[0] ** 2 + square) ** 0.5]
    halves = []
    for rows in (torch.arange(0, 6), torch.arange(6, 12)):
        places = {name: None if name == 'norm.weight' else (0, rows) for name in WHOLE}
        gradients = {name: of if places[name] is None else of[rows] for name, of in exact.gradients.items()}
        halves.append(Record(places, {name: of.float() for name, of in gradients.items()}, {}, rank.norms, []))
    (line,) = [line for line in judge(halves, rounded(exact), exact).lines() if line.startswith('norm')]
    assert 'counts what several ranks hold whole 2 times' in line


def test_an_update_that_does_not_follow_from_the_gradient(exact):
    rank = rounded(exact)
    rank.updates['norm.weight'] *= 0
    (line,) = lines_of(exact, rank)
    assert line.startswith('update of norm.weight') and 'though the gradient is right' in line
