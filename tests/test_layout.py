"""layout.py: the ranks are the product of the axes, who reads what, and what does not divide says what would."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from layouts import layout_of
from torch.testing._internal.distributed.fake_pg import FakeStore

from layout import accumulation_steps, choose_sizes, without


@pytest.mark.parametrize('ranks', [1, 2, 4, 8, 16])
def test_every_rank_has_one_place_along_every_axis(ranks):
    sizes = [size for size in (1, 2, 4) if size <= ranks]
    for replicate, context, tensor in itertools.product(sizes, repeat=3):
        if ranks % (replicate * tensor) or ranks % (context * tensor):
            continue
        found = layout_of('fsdp', ranks, replicate=replicate, context=context, tensor=tensor)
        axes = found.axes()
        assert [*axes] == [name for name in ('replicate', 'shard', 'tensor') if name in axes]
        assert axes.get('replicate', 1) * axes['shard'] * axes.get('tensor', 1) == ranks
        assert found.reading * found.sharing == ranks and found.sharing == context * tensor
        assert found.micro_steps * found.reading == ranks


def test_what_is_left_of_the_ranks_is_copies_or_shards_as_the_script_has_it():
    assert (layout_of('ddp', 8).replicate, layout_of('ddp', 8).shard) == (8, 1)
    assert (layout_of('fsdp', 8, replicate=2).replicate, layout_of('fsdp', 8, replicate=2).shard) == (2, 4)
    assert layout_of('diloco', 8, replica=2).axes() == {'replica': 2, 'shard': 4}
    assert layout_of('pipeline', 8, stage=2, tensor=2).axes() == {'stage': 2, 'replicate': 2, 'tensor': 2}
    assert layout_of('deepspeed', 8).axes() == {'shard': 8}


@pytest.mark.filterwarnings('ignore:Set timeout is now only supported')  # a fake group has none
def test_neighbors_divide_the_experts_and_ranks_with_the_same_ones_shard_them():
    dist.init_process_group('fake', rank=5, world_size=8, store=FakeStore())
    try:
        mesh = layout_of('fsdp', 8, expert=4).expert_mesh(torch.device('cpu'), 60)
        assert mesh.mesh_dim_names == ('shard', 'expert') and mesh.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert without(mesh, 'expert').mesh.tolist() == [1, 5]
        mesh = layout_of('fsdp', 8, replicate=2, tensor=2).mesh(torch.device('cpu'), 60)
        assert without(mesh, 'tensor').mesh_dim_names == ('replicate', 'shard')
        assert without(mesh, 'tensor').mesh.tolist() == [[1, 3], [5, 7]]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ('strategy', 'axes', 'message'),
    [
        ('fsdp', {'replicate': 3}, 'replicate_size=3 does not divide 8 ranks: use one of 1, 2, 4, 8'),
        (
            'fsdp',
            {'tensor': 4, 'replicate': 4},
            'replicate_size=4 .* 2 ranks .* of 8 by tensor_parallel=4: use one of 1, 2,',
        ),
        ('fsdp', {'context': 3}, 'context_parallel=3 does not divide 8 ranks'),
        ('fsdp', {'context': 4, 'tensor': 4}, 'tensor_parallel=4 .* 2 ranks that are left of 8 by context_parallel=4'),
        ('diloco', {'replica': 3}, 'num_replicas=3 does not divide 8 ranks'),
        ('pipeline', {'stage': 3}, 'pipeline_stages=3 does not divide 8 ranks'),
        ('pipeline', {'stage': 2, 'tensor': 3}, 'tensor_parallel=3 .* 4 ranks that are left of 8 by pipeline_stages=2'),
    ],
)
def test_what_does_not_divide_is_refused_with_what_would(strategy, axes, message):
    with pytest.raises(ValueError, match=message):
        layout_of(strategy, 8, **axes)


def test_open_keys_become_a_stage_for_each_matrix_a_replica_for_each_node_and_one_micro_step():
    keys = {'batch_size': 2, 'global_batch_size': None, 'pipeline_stages': None, 'tensor_parallel': 2}
    config = SimpleNamespace(**keys)
    choose_sizes(config, 'pipeline', ranks=8, ranks_per_node=4)
    assert config.pipeline_stages == 4 and config.global_batch_size == 2 * 4  # a micro-step for each stage
    config = SimpleNamespace(batch_size=2, global_batch_size=None, num_replicas=None)
    choose_sizes(config, 'diloco', ranks=8, ranks_per_node=4)
    assert config.num_replicas == 2 and config.global_batch_size == 16
    with pytest.raises(ValueError, match='6 ranks on nodes of 4'):
        choose_sizes(SimpleNamespace(num_replicas=None), 'diloco', ranks=6, ranks_per_node=4)


KEPT = [(1, 8, None), (2, 8, None), (4, 8, '--batch_size=2'), (4, 12, '--batch_size=3')]
KEPT.append((3, 8, 'a number of ranks that divides 8'))


@pytest.mark.parametrize(('ranks', 'kept', 'advice'), KEPT)
def test_a_global_batch_that_nobody_set_stays_that_of_the_run(ranks, kept, advice):
    config = SimpleNamespace(batch_size=4, global_batch_size=None, out_dir='out/a')
    if advice is None:
        choose_sizes(config, 'ddp', ranks, ranks_per_node=ranks, kept=kept)
        assert config.global_batch_size == 8
        return
    with pytest.raises(ValueError, match=f'out_dir=out/a has a run of global_batch_size={kept}, .* use {advice}$'):
        choose_sizes(config, 'ddp', ranks, ranks_per_node=ranks, kept=kept)


def test_accumulation_steps_complete_the_global_batch():
    assert accumulation_steps(512, 8, 4) == 16
    assert accumulation_steps(8, 8, 1) == 1


def test_a_global_batch_that_does_not_divide_is_refused_with_the_numbers_and_the_nearest_that_do():
    with pytest.raises(ValueError, match='global_batch_size=100 .*batch_size=8 x 4 ranks.*global_batch_size=96 or 128'):
        accumulation_steps(100, 8, 4)
    with pytest.raises(ValueError, match='use --batch_size=2, or --global_batch_size=32$'):
        accumulation_steps(8, 8, 4)
    with pytest.raises(ValueError, match='use --global_batch_size=24$'):  # no batch size of 3 ranks makes 8
        accumulation_steps(8, 8, 3)
