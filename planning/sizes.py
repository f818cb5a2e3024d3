"""
A model without values, the part of it that a rank has, and how many numbers of its parameters FSDP leaves there.

    model = empty_model(config)  # on the meta device, where nothing is allocated
    part, share = part_of_rank(config, model)  # the same, unless ranks split its matrices or divide its experts
    weights_of(part, share, shard=8, expert=1)  # on each of 8 ranks that together hold one copy

`config` is a script's config after it has been resolved (dtype is 'bfloat16', not 'auto'), together with the model's
keys, which are those of ModelConfig.to_dict() or Pretrained.to_dict().
"""

import math
from functools import lru_cache

import torch
from torch import nn

from layout import WHOLE, Ranks, Share, numbers
from model import GPT, ModelConfig

BYTES = {'float32': 4, 'bfloat16': 2, 'float16': 2}  # per number
PARTS_DEPEND_ON = [*ModelConfig.__dataclass_fields__, 'dtype', 'matmul_dtype', 'tensor_parallel', 'expert_parallel']
known_parts = {}  # see part_of_rank()


def empty_model(config, device='meta'):
    """The model that a train script would make, without values. Raises ValueError for keys that give no model."""
    with torch.device(device):
        if 'transformers' in config:
            from huggingface import finetune  # here, since a run from scratch needs none of it
            from huggingface.pretrained import Pretrained

            return finetune.for_training(Pretrained.from_keys(config, explicit=()))
        return GPT(ModelConfig.from_keys(config))


def make_part(config, device='meta'):
    """
    (model, Share): what a rank has of the model before FSDP shards it, which is a part of each matrix with
    tensor_parallel, and some of the experts with expert_parallel. It is the part of the first of these ranks.
    """
    model, share = empty_model(config, device), Share()
    model.compute_dtype = getattr(torch, config['dtype'])
    if config.get('matmul_dtype'):
        import float8

        float8.convert(model)
    if (ranks := config.get('tensor_parallel', 1)) > 1:
        import tensor_manual

        tensor_manual.Split(model, Ranks(0, ranks, group=''), share)
    if (ranks := config.get('expert_parallel', 1)) > 1:
        import expert_manual

        expert_manual.split(model, Ranks(0, ranks, group=''), share)
    return model, share


def part_of_rank(config, model=None):
    """make_part(), cached, so it must not be changed; or `model`, if it is given and ranks share neither matrices nor
    experts."""
    if model is not None and config.get('tensor_parallel', 1) == config.get('expert_parallel', 1) == 1:
        return model, WHOLE
    if 'transformers' in config:  # a model of a folder, which --plan does not ask for
        return make_part(config)
    key = repr([config.get(name) for name in PARTS_DEPEND_ON])
    if key not in known_parts:
        known_parts[key] = make_part(config)
    return known_parts[key]


class Weights:
    """The parameters that a rank has, of which FSDP leaves it a piece: lists of them, and what their pieces are."""

    def __init__(self, model, names_of_experts, shard, expert):
        self.named = dict(model.named_parameters())
        self.all = [*self.named.values()]
        self.trained = [parameter for parameter in self.all if parameter.requires_grad]
        blocks = model.blocks.values() if isinstance(model.blocks, nn.ModuleDict) else model.blocks  # of a Stage or not
        self.blocks = [[*block.parameters()] for block in blocks]  # alike, but for dense ones that begin a mixture
        in_blocks = {parameter for block in self.blocks for parameter in block}
        self.root = [parameter for parameter in self.all if parameter not in in_blocks]  # a tied head is there once
        self.experts = {self.named[name] for name in names_of_experts}  # those that ranks divide
        self.shard, self.expert = shard, expert
        self.block = [p for _, units in self.by_unit() for p in max(units, key=numbers)]  # of the largest units

    def pieces(self, parameter):
        """Into how many pieces the ranks of a copy cut a parameter. Ranks that divide experts hold different ones, so
        only those with the same ones cut them; if all ranks of the copy divide them, each holds its own whole."""
        return max(1, self.shard // (self.expert if parameter in self.experts else 1))

    def piece(self, parameter):
        """The shape of this rank's piece. Parameters are cut along the first dimension, and pieces padded alike."""
        return (math.ceil(parameter.shape[0] / self.pieces(parameter)), *parameter.shape[1:])

    def count(self, parameters):
        """Numbers in this rank's pieces."""
        return sum(math.prod(self.piece(parameter)) for parameter in parameters)

    def stored_bytes(self):
        """Bytes of this rank's pieces as they are stored; frozen parameters are in frozen_dtype."""
        return sum(parameter.itemsize * self.count([parameter]) for parameter in self.all)

    def by_unit(self):
        """[(False, of each block those that FSDP shards over all ranks of a copy)], and if ranks divide experts (True,
        of each block its experts), which are units of their own, sharded over fewer ranks."""
        kinds = (False, True)[: 2 if self.experts else 1]
        return [(kind, [[p for p in block if (p in self.experts) == kind] for block in self.blocks]) for kind in kinds]


@lru_cache(maxsize=256)
def cached_weights(model, names_of_experts, shard, expert):
    return Weights(model, names_of_experts, shard, expert)


def weights_of(model, share, shard, expert):
    """The Weights of a model, cached, since compare.py --plan needs the same ones thousands of times."""
    return cached_weights(model, frozenset(share.slices if expert > 1 else ()), shard, expert)
