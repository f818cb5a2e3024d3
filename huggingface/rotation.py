"""
The rotary embedding in a configuration of transformers, and how it changes when the context is extended.

    yarn = extend(config, folder, block_size=131072, theta=None, yarn=[4])  # changes config; [4, 32768]
    keys |= with_yarn(keys['rope_parameters'], factor=4, before=32768)
    if block_size > turning_point(config):
        by_document(model, turning_point(config))
"""

import math

import torch
import torch.nn.functional as F

from model import check_yarn


def of(config):
    """rope_parameters if all layers rotate alike; {} for models where they do not, or without a rotary embedding."""
    rotation = getattr(config, 'rope_parameters', None) or {}
    return rotation if 'rope_type' in rotation and 'rope_theta' in rotation else {}


def with_yarn(rotation, factor, before):
    """Keys of a configuration whose context is extended by YaRN to `factor` times the tokens that it had `before`.
    rotation: its rope_parameters."""
    rotation = {key: value for key, value in rotation.items() if key != 'attention_factor'}  # belongs to another factor
    rotation |= {'rope_type': 'yarn', 'factor': float(factor), 'original_max_position_embeddings': before}
    return {'rope_parameters': rotation, 'max_position_embeddings': int(factor * before)}


def extend(config, folder, block_size, theta, yarn):
    """
    Extend the context of a configuration: by another theta (None = its own) with block_size positions, or by YaRN.

    yarn: [] = none; two numbers as in model.ModelConfig; or the factor alone, which refers to the original context even
    if that has been extended before. Returns yarn with both numbers. Raises ValueError for a model that cannot be
    extended in this way.
    """
    if not (theta or yarn):
        return []
    rotation = of(config)
    if not rotation or rotation['rope_type'] not in (('default', 'yarn') if yarn else ('default', 'yarn', 'llama3')):
        has = f'rope_type={rotation["rope_type"]}' if rotation else 'no rotary embedding that all layers share'
        given = f'yarn={",".join(map(str, yarn))}' if yarn else f'rope_theta={theta:g}'
        raise ValueError(f'{given}: {folder} ({config.model_type}) has {has}: leave it out')
    config.rope_parameters = {**rotation, 'rope_theta': theta or rotation['rope_theta']}
    if not yarn:
        config.max_position_embeddings = max(config.max_position_embeddings, block_size)
        return []
    before = rotation.get('original_max_position_embeddings') or config.max_position_embeddings
    yarn = [*yarn, before][:2]
    check_yarn(yarn, block_size)
    for name, value in with_yarn(config.rope_parameters, *yarn).items():
        setattr(config, name, value)
    return yarn


def turning_point(config):
    """How many tokens a text may have before all of it, from the first token on, is rotated in another way: LongRoPE
    (arXiv 2402.13753) has other factors for longer texts. math.inf if that never happens. (With rope_type=dynamic it
    happens beyond max_position_embeddings, where no text of these scripts goes.)"""
    rotation = of(config)
    return rotation['original_max_position_embeddings'] if rotation.get('rope_type') == 'longrope' else math.inf


def by_document(model, turning_point):
    """Let a model of transformers with LongRoPE choose the factors of each document by its own length. By itself it
    chooses them for a batch, by the largest position in it: a text would depend on what is packed or batched with it.
    """
    for module in model.modules():
        if getattr(module, 'rope_type', None) == 'longrope':
            module.forward = with_both_factors(module.forward, turning_point)


def with_both_factors(forward, turning_point):
    """A rotary module's forward (x, position_ids (B, T)) -> (cos, sin), each (B, T, D)."""

    def of_each_document(x, position_ids):
        document = (position_ids == 0).cumsum(-1)  # behind a cache there is none that begins, and all are 0
        last = torch.zeros_like(F.pad(position_ids, (0, 1))).scatter_reduce(-1, document, position_ids, 'amax')
        is_long = (last.gather(-1, document) >= turning_point)[..., None]
        short = forward(x, position_ids.clamp(max=turning_point - 1))
        long = forward(x, F.pad(position_ids, (0, 1), value=turning_point))  # a token more, by which it is long
        return tuple(torch.where(is_long, b[:, :-1], a) for a, b in zip(short, long, strict=True))

    return of_each_document
