"""The pictures of the strategies are true: who holds how much."""

import json
import re
import sys

import numpy as np
import pytest
from launch import REPO

sys.path.append(str(REPO / 'docs' / 'pictures'))

import draw_card
import draw_prove
import draw_strategies
import placements
import svg

from layout import Layout
from planning import memory
from planning.sizes import empty_model

FP32 = 4


@pytest.fixture(scope='module')
def held_by_all():
    return placements.held_by_all()


def elements(masks):
    return sum(int(mask.sum()) for mask in masks.values())


@pytest.mark.parametrize('name', placements.STRATEGIES)
def test_ranks_hold_as_many_bytes_as_planned(held_by_all, name):
    strategy, keys = placements.STRATEGIES[name][0], placements.keys_of(name)
    model = empty_model(keys)
    for rank, held in enumerate(held_by_all[name]):
        plans = memory.plans(keys, model, Layout.of(keys, strategy, placements.RANKS))
        planned = memory.held(plans[rank if strategy == 'pipeline' else 0])  # stages differ
        assert FP32 * elements(held.own['weights']) == planned['weights']
        assert 2 * FP32 * elements(held.own['moments']) == planned['optimizer']
        gradients = [held.own['gradients'][key] | held.whole['gradients'][key] for key in held.own['gradients']]
        assert FP32 * sum(int(mask.sum()) for mask in gradients) == planned['gradients'] + planned.get('accumulated', 0)


def test_together_the_ranks_hold_each_element_as_often_as_there_are_copies(held_by_all):
    copies = {'DDP': 4, 'ZeRO 3 (FSDP)': 1, 'HSDP, 2 × 2': 2, 'DiLoCo, 2 × 2': 2, 'pipeline, 4 stages': 1}
    for name, expected in copies.items():
        ranks = held_by_all[name]
        for kind in placements.KINDS:
            for parameter in ranks[0].own[kind]:
                assert (sum(held.own[kind][parameter].astype(int) for held in ranks) == expected).all(), (name, kind)


def test_rectangles_cover_what_is_held():
    rng = np.random.default_rng(0)
    masks = {'a': rng.random((8, 12)) < 0.5, 'b': np.ones((4, 1), bool), 'c': np.zeros((6, 2), bool)}
    area = sum(width * height for _, _, width, height in draw_strategies.rectangles(masks))
    assert area == pytest.approx(elements(masks) / sum(mask.size for mask in masks.values()))
    whole = {name: np.ones_like(mask) for name, mask in masks.items()}
    assert draw_strategies.rectangles(whole) == [pytest.approx((0, 0, 1, 1))]


@pytest.mark.parametrize('theme', [svg.LIGHT, svg.DARK], ids=['light', 'dark'])
def test_the_picture_of_the_h100_is_drawn_from_its_results_and_kernels_fit_into_their_step(theme):
    found = json.loads(draw_card.RESULTS.read_text())
    assert (svg.ASSETS / f'h100_{theme.name}.svg').read_text() == draw_card.draw(found, theme).svg()
    for name, _ in draw_card.STEPS:
        assert 0.9 * found[name]['total'] < sum(found[name]['kernels_ms'].values()) < found[name]['total'], name


@pytest.mark.parametrize('theme', [svg.LIGHT, svg.DARK], ids=['light', 'dark'])
def test_the_picture_of_wrong_updates_is_drawn_from_its_results(theme):
    found = json.loads(draw_prove.RESULTS.read_text())
    assert (svg.ASSETS / f'prove_{theme.name}.svg').read_text() == draw_prove.draw(found, theme).svg()
    assert max(abs(a / b - 1) for a, b in zip(found['two'], found['one'], strict=True)) < 0.007
    assert min(map(min, (found['ratios'][of] for of in ('q_norm', 'k_norm')))) > 1.6 > max(found['ratios']['q_proj'])


def test_drawings_are_small_and_plain():
    for path in svg.ASSETS.glob('*.svg'):
        text = path.read_text()
        assert len(text) < 100_000 and text.count('<title>') == 1, path
        assert not re.search(r'<(script|foreignObject|image|style)', text), path
