"""
The rotary embedding in a configuration of transformers, and how it changes when the context is extended.

    yarn = extend(config, folder, block_size=131072, theta=None, yarn=[4])  # changes config; [4, 32768]
    keys |= with_yarn(keys['rope_parameters'], factor=4, before=32768)
"""

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
