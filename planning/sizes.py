"""
How much of a model is on one rank: the model without values, its parts, and how many numbers each of them has.

    model = empty_model(config)  # on the meta device, where nothing is allocated
    count(model.parameters(), shard_size=8)  # on each of 8 ranks that together hold one copy

`config` is a script's config after it has been resolved (dtype is 'bfloat16', not 'auto'), together with the model's
keys, which are those of ModelConfig.to_dict() or Pretrained.to_dict().
"""

import math
from functools import lru_cache

import torch

import expert_manual
import float8
import tensor_manual
from layout import Ranks, Share
from model import GPT, ModelConfig
from pipeline_manual import blocks_of_stages

BYTES = {'float32': 4, 'bfloat16': 2, 'float16': 2}  # per number
FP32 = BYTES['float32']
# Defaults of DeepSpeed 0.19 for stage 3, in numbers. Parameters up to the first size always stay whole. Larger ones
# stay whole only if they are needed again before more than the second number of others has been used.
DEEPSPEED_PERSISTENT, DEEPSPEED_REUSE = 10**5, 10**9
PARTS_DEPEND_ON = [*ModelConfig.__dataclass_fields__, 'dtype', 'matmul_dtype', 'tensor_parallel', 'expert_parallel']
known_parts = {}  # see held_model()


def empty_model(config, device='meta'):
    """The model that a train script would make, without values. Raises ValueError for keys that give no model."""
    with torch.device(device):
        if 'transformers' in config:
            from huggingface import finetune  # here, since a run from scratch needs none of it

            return finetune.for_training(finetune.Pretrained.from_keys(config, explicit=()))
        return GPT(ModelConfig.from_keys(config))


def part_of_rank(config, device='meta', share=None):
    """The part of that model which a rank has before FSDP shards it: with tensor_parallel a part of each matrix, with
    expert_parallel some of the experts. The parameters of these experts get an attribute `sharing`, the number of ranks
    that share the experts. share: the layout.Share that is told of the slices."""
    model = empty_model(config, device)
    model.compute_dtype = getattr(torch, config['dtype'])
    if config.get('matmul_dtype'):
        float8.convert(model)
    if (ranks := config.get('tensor_parallel', 1)) > 1:
        tensor_manual.Split(model, Ranks(0, ranks, group=''), share)
    if (ranks := config.get('expert_parallel', 1)) > 1:
        for experts in expert_manual.split(model, Ranks(0, ranks, group=''), share):
            for parameter in experts.parameters():
                parameter.sharing = ranks
    return model


def held_model(config, model):
    """The model on which a rank's numbers are counted: `model`, or part_of_rank(config) if ranks share matrices or
    experts. It is cached, so it must not be changed.
    """
    if config.get('tensor_parallel', 1) == config.get('expert_parallel', 1) == 1:
        return model
    key = repr([config.get(name) for name in PARTS_DEPEND_ON])
    if key not in known_parts:
        share = Share()
        known_parts[key] = part_of_rank(config, share=share), share
    return known_parts[key][0]


def held_slices(config):
    """Share.slices of the first rank: which part it has of the parameters of held_model()."""
    if held_model(config, None) is None:
        return {}
    return known_parts[repr([config.get(name) for name in PARTS_DEPEND_ON])][1].slices


@lru_cache(maxsize=64)
def counts_of(model):
    """model.parameter_counts(), cached, since compare.py --plan needs it thousands of times for a few models."""
    return model.parameter_counts()


@lru_cache(maxsize=64)
def root_parameters(model):
    """The parameters outside of the blocks. A tied head is the embedding, and is counted once."""
    in_blocks = {parameter for block in model.blocks for parameter in block.parameters()}
    return [parameter for parameter in model.parameters() if parameter not in in_blocks]


def hidden_matrices(model):
    """The matrices that Muon trains: those of the blocks, except LoRA's, which AdamW trains."""
    from huggingface.lora import is_lora

    named = [item for block in model.blocks for item in block.named_parameters()]
    return [p for name, p in named if p.dim() == 2 and p.requires_grad and not is_lora(name)]


def parameters_of_stage(config, model, stage):
    """(parameters of the stage in its blocks, parameters of the stage outside of blocks)."""
    last, ends = config['pipeline_stages'] - 1, []
    if stage == 0 or (stage == last and config['tie_embeddings']):
        ends.append(model.embed)
    if stage == 0 and model.pos_embed is not None:
        ends.append(model.pos_embed)
    if stage == last:
        ends += [model.final_norm] if config['tie_embeddings'] else [model.final_norm, model.head]
    blocks = model.blocks[: blocks_of_stages(config)[stage]]  # this many; all are alike
    return [*blocks.parameters()], [parameter for module in ends for parameter in module.parameters()]


def small_parameters(model):
    """How many numbers are in parameters that DeepSpeed's stage 3 keeps whole on every rank."""
    return sum(p.numel() for p in model.parameters() if p.numel() <= DEEPSPEED_PERSISTENT)


def pieces(parameter, shard_size):
    """Into how many pieces the ranks of a copy cut a parameter. Ranks that share experts hold different experts, so
    only the ranks with the same ones cut them; if all ranks of the copy share experts, each holds its own whole."""
    return max(1, shard_size // getattr(parameter, 'sharing', 1))


def count(parameters, shard_size=1):
    """Numbers on one rank. Every parameter is cut along its first dimension, and the pieces are padded alike."""
    return sum(math.ceil(p.shape[0] / pieces(p, shard_size)) * math.prod(p.shape[1:]) for p in parameters)


def stored_bytes(parameters, shard_size=1):
    """Bytes of one rank's pieces as they are stored; frozen parameters are in frozen_dtype."""
    return sum(p.itemsize * count([p], shard_size) for p in parameters)


def gathered_bytes(parameters, compute, shard_size=1):
    """Bytes of these parameters while they are gathered and when they are whole: `compute` bytes per number, but nf4
    stays as it is."""
    return sum((compute if p.is_floating_point() else p.itemsize) * count([p], shard_size) for p in parameters)


def dense_and_experts(parameters):
    """[(False, parameters that FSDP shards over all ranks of a copy), (True, parameters of experts that ranks share)],
    without an empty list. The experts are separate units, sharded over fewer ranks."""
    kinds = {False: [], True: []}
    for parameter in parameters:
        kinds[hasattr(parameter, 'sharing')].append(parameter)
    return [(are_experts, found) for are_experts, found in kinds.items() if found]


def trained_of(parameters):
    return [parameter for parameter in parameters if parameter.requires_grad]


def tokens_of_rank(config):
    """Tokens of one micro-step on a rank; with tensor_parallel, of all the ranks that share its matrices together."""
    return config['batch_size'] * config['block_size'] // config.get('context_parallel', 1)


def rows_of_experts(config):
    """Rows that arrive at a rank's experts per layer and micro-step, if all experts get equally many: as many as its
    own tokens send. At most it is expert_parallel times that, if all ranks choose only this rank's experts."""
    return tokens_of_rank(config) * config['experts_per_token']


def message_bytes(config):
    """Bytes of activations that one micro-step sends from one part of a pipeline to the next. With tensor_parallel a
    rank sends only some of the tokens."""
    tokens = config['batch_size'] * config['block_size'] // config.get('tensor_parallel', 1)
    return tokens * config['n_embd'] * BYTES[config['dtype']]


def keys_and_values(config):
    """(numbers in the keys and values of a layer on one rank, bytes per number). On a CPU attention uses fp32."""
    numbers = 2 * config['batch_size'] * config['block_size'] * config['n_kv_head'] * config['head_dim']
    bytes_per_number = BYTES[config['dtype']] if config['device'].startswith('cuda') else FP32
    return numbers // config['context_parallel'] // config.get('tensor_parallel', 1), bytes_per_number


def travelling_bytes(config):
    """Bytes that tensor_parallel needs for what arrives and what is sent, before it is put in order."""
    return 2 * tokens_of_rank(config) * config['n_embd'] * BYTES[config['dtype']]
