"""
What a rank has of a model, in numbers: the model without values, its parts, and how many numbers are in each of them.

    model = empty_model(config)  # on the meta device, where nothing is allocated
    count(model.parameters(), shard_size=8)  # on each of 8 ranks that hold one copy together

`config` is a script's resolved config (dtype 'bfloat16' rather than 'auto') with the keys of the model in it, those of
ModelConfig.to_dict() or Pretrained.to_dict().
"""

import math
from functools import lru_cache

import torch

import expert_manual
import float8
import meshes
import tensor_manual
from huggingface import finetune, lora
from model import GPT, ModelConfig

BYTES = {'float32': 4, 'bfloat16': 2, 'float16': 2}  # per number
FP32 = BYTES['float32']
# Numbers of DeepSpeed 0.19, its defaults: parameters up to this size stay whole in stage 3, and so do larger ones if at
# most this many numbers are used before their turn comes again.
DEEPSPEED_PERSISTENT, DEEPSPEED_REUSE = 10**5, 10**9
PARTS_DEPEND_ON = [*ModelConfig.__dataclass_fields__, 'dtype', 'matmul_dtype', 'tensor_parallel', 'expert_parallel']
known_parts = {}  # see held_model()


def empty_model(config, device='meta'):
    """The model that a train script would make, without values. Raises ValueError for keys that make none."""
    with torch.device(device):
        if 'transformers' in config:
            return finetune.for_training(finetune.Pretrained.from_keys(config, explicit=()))
        return GPT(ModelConfig.from_keys(config))


def part_of_rank(config, device='meta'):
    """What a rank has of that model before FSDP shards it: with tensor_parallel a part of each matrix, with
    expert_parallel some of the experts. The weights of these then say how many ranks share them: `sharing`."""
    model = empty_model(config, device)
    model.compute_dtype = getattr(torch, config['dtype'])
    if config.get('matmul_dtype'):
        float8.convert(model)
    if (ranks := config.get('tensor_parallel', 1)) > 1:
        tensor_manual.Split(model, tensor_manual.Ranks(0, ranks, group=''))
    if (ranks := config.get('expert_parallel', 1)) > 1:
        for experts in expert_manual.split(model, tensor_manual.Ranks(0, ranks, group='')):
            for parameter in experts.parameters():
                parameter.sharing = ranks
    return model


def held_model(config, model):
    """`model`, or where ranks share its matrices or experts part_of_rank(config): what a rank's numbers are counted on.

    It is kept, as counts_of(), and not to be changed.
    """
    if config.get('tensor_parallel', 1) == config.get('expert_parallel', 1) == 1:
        return model
    key = repr([config.get(name) for name in PARTS_DEPEND_ON])
    if key not in known_parts:
        known_parts[key] = part_of_rank(config)
    return known_parts[key]


@lru_cache(maxsize=64)
def counts_of(model):
    """model.parameter_counts(), kept: compare.py --plan asks thousands of times for those of the same few models."""
    return model.parameter_counts()


@lru_cache(maxsize=64)
def root_parameters(model):
    """The parameters outside of the blocks; a tied head is the embedding and counts once."""
    in_blocks = {parameter for block in model.blocks for parameter in block.parameters()}
    return [parameter for parameter in model.parameters() if parameter not in in_blocks]


def hidden_matrices(model):
    """What Muon trains: matrices of blocks, but LoRA's, which are AdamW's."""
    named = [item for block in model.blocks for item in block.named_parameters()]
    return [p for name, p in named if p.dim() == 2 and p.requires_grad and not lora.is_lora(name)]


def parameters_of_stage(config, model, stage):
    """(those in its blocks; those in none)."""
    last, ends = config['pipeline_stages'] - 1, []
    if stage == 0 or (stage == last and config['tie_embeddings']):
        ends.append(model.embed)
    if stage == 0 and model.pos_embed is not None:
        ends.append(model.pos_embed)
    if stage == last:
        ends += [model.final_norm] if config['tie_embeddings'] else [model.final_norm, model.head]
    blocks = model.blocks[: meshes.blocks_of_stages(config)[stage]]  # as many as these
    return [*blocks.parameters()], [parameter for module in ends for parameter in module.parameters()]


def small_parameters(model):
    """Numbers in parameters that DeepSpeed's stage 3 keeps whole on every rank."""
    return sum(p.numel() for p in model.parameters() if p.numel() <= DEEPSPEED_PERSISTENT)


def pieces(parameter, shard_size):
    """Into how many a copy's ranks cut it. Those that share experts hold different ones, and each the whole of its own
    if they are all of the copy."""
    return max(1, shard_size // getattr(parameter, 'sharing', 1))


def count(parameters, shard_size=1):
    """Numbers on one rank; every parameter is cut along its first dimension, and the pieces are padded to one size."""
    return sum(math.ceil(p.shape[0] / pieces(p, shard_size)) * math.prod(p.shape[1:]) for p in parameters)


def stored_bytes(parameters, shard_size=1):
    """Bytes of these numbers where they rest: of what is not trained, those of frozen_dtype."""
    return sum(p.itemsize * count([p], shard_size) for p in parameters)


def gathered_bytes(parameters, compute, shard_size=1):
    """Bytes of these numbers on their way and when they are whole: `compute` for each; nf4 travels as it is."""
    return sum((compute if p.is_floating_point() else p.itemsize) * count([p], shard_size) for p in parameters)


def dense_and_experts(parameters):
    """[(False, those that FSDP shards over all ranks of a copy), (True, experts that ranks share)], if there are any of
    these: units of their own, sharded over fewer ranks."""
    kinds = {False: [], True: []}
    for parameter in parameters:
        kinds[hasattr(parameter, 'sharing')].append(parameter)
    return [(are_experts, found) for are_experts, found in kinds.items() if found]


def trained_of(parameters):
    return [parameter for parameter in parameters if parameter.requires_grad]


def tokens_of_rank(config):
    """In one micro-step, those that all ranks of tensor_parallel have together."""
    return config['batch_size'] * config['block_size'] // config.get('context_parallel', 1)


def rows_of_experts(config):
    """Rows that arrive at the experts of a rank in a micro-step, a layer: those of its tokens, if all experts have as
    many. The most is expert_parallel times that: all ranks have chosen only this one's."""
    return tokens_of_rank(config) * config['experts_per_token']


def message_bytes(config):
    """Of the activations of one micro-step, where a part of a pipeline ends; with tensor_parallel of some tokens."""
    tokens = config['batch_size'] * config['block_size'] // config.get('tensor_parallel', 1)
    return tokens * config['n_embd'] * BYTES[config['dtype']]


def keys_and_values(config):
    """(numbers in the keys and values of a layer on one rank, bytes of each): on a CPU attention computes in fp32."""
    numbers = 2 * config['batch_size'] * config['block_size'] * config['n_kv_head'] * config['head_dim']
    bytes_per_number = BYTES[config['dtype']] if config['device'].startswith('cuda') else FP32
    return numbers // config['context_parallel'] // config.get('tensor_parallel', 1), bytes_per_number


def travelling_bytes(config):
    """Of tensor_parallel: what arrives and what is sent, before it is put in order."""
    return 2 * tokens_of_rank(config) * config['n_embd'] * BYTES[config['dtype']]
