"""
Converts models of model.py to and from those of `transformers`: configuration, weights, and tiktoken's tokenizer.

    assert is_in_transformers(model_config)
    hf_model = AutoModelForCausalLM.from_config(config_to_transformers(model_config))
    hf_model.load_state_dict(to_transformers(model.state_dict(), model_config))

gpt2, llama and qwen3 become GPT2LMHeadModel, LlamaForCausalLM and Qwen3ForCausalLM; with experts class_of_experts()
says which class has their rule. Only the layout differs. transformers has three matrices for queries, keys and values
(except in GPT-2), stores the matrices of GPT-2's blocks as (in, out), and does not pad the vocabulary. Its files have a
matrix for each expert, but in memory it has one tensor (E, 2M, C) for gate and up, and one (E, C, M) for down.
"""

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from huggingface import rotation
from huggingface.files import Weights
from model import GPT, ModelConfig, is_load
from system.files import read_json

# Modules of model.py -> modules of transformers, first those of the whole model, then those of a block.
GPT2_MODULES = {
    'embed': 'transformer.wte',
    'pos_embed': 'transformer.wpe',
    'final_norm': 'transformer.ln_f',
    'head': 'lm_head',
    'blocks': 'transformer.h',
    'attn_norm': 'ln_1',
    'attn.qkv': 'attn.c_attn',
    'attn.proj': 'attn.c_proj',
    'mlp_norm': 'ln_2',
    'mlp.up': 'mlp.c_fc',
    'mlp.down': 'mlp.c_proj',
}
LLAMA_MODULES = {  # also for qwen3
    'embed': 'model.embed_tokens',
    'final_norm': 'model.norm',
    'head': 'lm_head',
    'blocks': 'model.layers',
    'attn_norm': 'input_layernorm',
    'attn.qkv': 'self_attn.{}_proj',  # q, k, v
    'attn.q_norm': 'self_attn.q_norm',
    'attn.k_norm': 'self_attn.k_norm',
    'attn.proj': 'self_attn.o_proj',
    'mlp_norm': 'post_attention_layernorm',
    'mlp.gate': 'mlp.gate_proj',
    'mlp.up': 'mlp.up_proj',
    'mlp.down': 'mlp.down_proj',
    'mlp.router': 'mlp.gate',
    'mlp.experts.gate': 'mlp.experts.{}.gate_proj',  # 0, 1, ...
    'mlp.experts.up': 'mlp.experts.{}.up_proj',
    'mlp.experts.down': 'mlp.experts.{}.down_proj',
    'mlp.shared.gate': 'mlp.shared_expert.gate_proj',
    'mlp.shared.up': 'mlp.shared_expert.up_proj',
    'mlp.shared.down': 'mlp.shared_expert.down_proj',
    'mlp.shared.score': 'mlp.shared_expert_gate',
}
DOTS1_MODULES = {ours: theirs.replace('shared_expert.', 'shared_experts.') for ours, theirs in LLAMA_MODULES.items()}

# Fields of ModelConfig -> keys of transformers' configurations. (GPT2Config accepts the shared ones as well.)
SHARED_KEYS = {'vocab_size': 'vocab_size', 'tie_embeddings': 'tie_word_embeddings', 'n_layer': 'num_hidden_layers'}
SHARED_KEYS |= {'n_head': 'num_attention_heads', 'n_embd': 'hidden_size', 'block_size': 'max_position_embeddings'}
GPT2_KEYS = SHARED_KEYS | {'mlp_hidden_dim': 'n_inner', 'norm_eps': 'layer_norm_epsilon'}
LLAMA_KEYS = SHARED_KEYS | {'n_kv_head': 'num_key_value_heads', 'head_dim': 'head_dim'}
LLAMA_KEYS |= {'mlp_hidden_dim': 'intermediate_size', 'norm_eps': 'rms_norm_eps'}
EXPERT_KEYS = {'n_experts': 'num_experts', 'experts_per_token': 'num_experts_per_tok'}
EXPERT_KEYS |= {'expert_hidden_dim': 'moe_intermediate_size', 'router_normalize': 'norm_topk_prob'}
QWEN2_MOE_KEYS = EXPERT_KEYS | {'shared_expert_dim': 'shared_expert_intermediate_size', 'qkv_bias': 'qkv_bias'}
DOTS1_KEYS = EXPERT_KEYS | {'n_experts': 'n_routed_experts', 'router_scale': 'routed_scaling_factor'}
DOTS1_KEYS |= {'dense_layers': 'first_k_dense_replace', 'expert_groups': 'n_group', 'groups_per_token': 'topk_group'}
GLM4_MOE_KEYS = DOTS1_KEYS | {'qkv_bias': 'attention_bias'}
KEYS_OF_MIXTURES = {'qwen3_moe': EXPERT_KEYS, 'qwen2_moe': QWEN2_MOE_KEYS}
KEYS_OF_MIXTURES |= {'dots1': DOTS1_KEYS, 'glm4_moe': GLM4_MOE_KEYS}


def is_in_transformers(model_config):
    """Whether transformers has a class that computes the same. It has none for enoki, or gpt2 with bias=False (as in
    nanoGPT), for example."""
    if model_config.logit_softcap or model_config.window_pattern:
        return False
    if model_config.arch == 'gpt2':
        usual_heads = model_config.n_head * model_config.head_dim == model_config.n_embd
        return model_config.bias and usual_heads and model_config.n_kv_head == model_config.n_head
    if model_config.n_experts:
        return class_of_experts(model_config) is not None
    if model_config.rotary_share != 1:
        return False
    if model_config.arch == 'qwen3':
        return not model_config.bias and not model_config.attention_gate
    return model_config.arch == 'llama'


def class_of_experts(model_config):
    """The model_type of transformers' class that computes a mixture, or None. DeepSeek-V3's experts stand beside an
    attention that model.py lacks; dots.llm1 has them beside that of Qwen3, GLM-4.5 beside either of model.py's."""
    has_softmax = model_config.router_scores == 'softmax' and model_config.router_scale == 1
    has_softmax = has_softmax and not model_config.router_bias and model_config.expert_groups == 1
    has_softmax = has_softmax and model_config.rotary_share == 1
    shared, has_gate = model_config.shared_expert_dim, model_config.shared_expert_gate
    if model_config.attention_gate:
        return None
    if model_config.router_scores == 'sigmoid':
        if not shared or shared % model_config.expert_hidden_dim or has_gate:
            return None
        is_dots = model_config.arch == 'qwen3' and model_config.rotary_share == 1 and not model_config.qkv_bias
        return 'dots1' if is_dots else 'glm4_moe'
    if model_config.arch == 'llama':
        return 'qwen2_moe' if has_softmax and shared and has_gate else None
    return 'qwen3_moe' if has_softmax and not shared else None


def kept_in_fp32(model_config):
    """Words in the names of what the class of an export keeps in fp32 in a model of half precision: routers, except
    those of Qwen's classes."""
    return [] if is_in_transformers(model_config) and model_config.router_scores == 'softmax' else ['router']


def without_multipliers(state_dict, model_config):
    """(state dict, ModelConfig) of a GPT that computes the same with parametrization='standard': the divisor of the
    logits in mup and completep goes into the final norm, and completep's divisor of a branch into its last matrix.
    """
    if model_config.parametrization == 'standard':
        return state_dict, model_config
    (m_N, m_L), plain = model_config.ratios, {}
    for name, tensor in state_dict.items():
        ends_branch = name.startswith('blocks.') and name.split('.')[-2] in ('proj', 'down')
        plain[name] = tensor / (m_N if name.startswith('final_norm.') else m_L if ends_branch else 1)
    return plain, replace(model_config, parametrization='standard', base_width=None, base_depth=None)


def names_in_transformers(name, model_config):
    """The names in transformers' files of the parameter that model.py calls `name`: one, or several whose rows model.py
    stacks into one matrix (queries, keys and values, or experts)."""
    modules = GPT2_MODULES if model_config.arch == 'gpt2' else LLAMA_MODULES
    if model_config.router_scores == 'sigmoid':
        modules = DOTS1_MODULES
    module, kind = name.rsplit('.', 1)  # kind: weight or bias
    kind = 'e_score_correction_bias' if name.endswith('router.bias') else kind
    place, inner = '', module
    if module.startswith('blocks.'):
        _, number, inner = module.split('.', 2)
        place = f'{modules["blocks"]}.{number}.'
    if inner not in modules:
        raise ValueError(f'{name}: no class of transformers has this parameter; sample.py and evaluate.py read the run')
    their_name = f'{place}{modules[inner]}.{kind}'
    parts = range(model_config.n_experts) if '.experts.' in name else 'qkv'
    return [their_name.format(part) for part in parts] if '{}' in their_name else [their_name]


def is_transposed(name, tensor, model_config):
    """Whether transformers stores a tensor transposed: the matrices of GPT-2's blocks are (in, out) there."""
    return model_config.arch == 'gpt2' and name.startswith('blocks.') and tensor.ndim == 2


def to_transformers(state_dict, model_config):
    """The state dict of the transformers model, from that of GPT(model_config); dtypes are kept."""
    kv_rows = model_config.n_kv_head * model_config.head_dim
    qkv_rows = [model_config.n_head * model_config.head_dim, kv_rows, kv_rows]
    theirs = {}
    for name, tensor in state_dict.items():
        if is_load(name):
            continue
        if '.experts.' in name:
            theirs |= experts_to_transformers(name, state_dict, model_config)
            continue
        tensor = unpadded(name, tensor, model_config)
        their_names = names_in_transformers(name, model_config)
        pieces = tensor.split(qkv_rows) if len(their_names) == 3 else [tensor]
        for their_name, piece in zip(their_names, pieces, strict=True):
            theirs[their_name] = (piece.T if is_transposed(name, piece, model_config) else piece).contiguous()
    return theirs


def experts_to_transformers(name, state_dict, model_config):
    """{name: tensor} that transformers' class has in memory for the weights of a layer's experts, which model.py calls
    `name`; {} for those of `up`, which are joined to `gate`."""
    kind, E = name.split('.')[-2], model_config.n_experts
    prefix = f'{LLAMA_MODULES["blocks"]}.{name.split(".")[1]}.mlp.experts'
    if kind == 'down':
        return {f'{prefix}.down_proj': state_dict[name].unflatten(0, (E, -1))}
    if kind == 'up':
        return {}
    gate, up = (state_dict[name.replace('.gate.', f'.{kind}.')].unflatten(0, (E, -1)) for kind in ('gate', 'up'))
    return {f'{prefix}.gate_up_proj': torch.cat((gate, up), dim=1)}  # (E, 2M, C)


def from_transformers(name, model_config, read):
    """The parameter that model.py calls `name`. read(name): returns a tensor of transformers' files. The rows that pad
    the vocabulary are 0."""
    pieces = [read(their_name) for their_name in names_in_transformers(name, model_config)]
    tensor = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    if is_transposed(name, tensor, model_config):
        return tensor.T
    if name in ('embed.weight', 'head.weight'):
        return F.pad(tensor, (0, 0, 0, model_config.padded_vocab_size - model_config.vocab_size))
    return tensor


def unpadded(name, tensor, model_config):
    """A parameter without the rows that pad the vocabulary in training."""
    return tensor[: model_config.vocab_size] if name in ('embed.weight', 'head.weight') else tensor


def config_of_export(folder):
    """The ModelConfig of a folder that export_model.py has written with model.py beside the weights, as it does for
    models for which transformers has no class; None for any other folder."""
    try:
        content = read_json(Path(folder, 'config.json'), dict)
    except (OSError, ValueError):  # transformers will report it better
        return None
    return ModelConfig.from_keys(content) if content.get('model_type') == 'native_gpt' else None


def weights_of_export(folder, model_config):
    """{name: tensor} for model.GPT from a folder as in config_of_export(), with zeros for the rows that pad the
    vocabulary. Raises ValueError if its config.json, which may be somebody else's, has the sizes of another model."""
    weights = Weights(folder, key='model')
    tensors = {name.removeprefix('model.'): weights.read(name) for name in weights.file_of}
    for name in tensors.keys() & {'embed.weight', 'head.weight'}:
        tensors[name] = F.pad(tensors[name], (0, 0, 0, model_config.padded_vocab_size - model_config.vocab_size))
    if 'embed.weight' in tensors:
        tensors.setdefault('head.weight', tensors['embed.weight'])  # the files have tied weights once
    where = f'{folder}/config.json'
    n_blocks = len({name.split('.')[1] for name in tensors if name.startswith('blocks.')})
    if n_blocks != model_config.n_layer:
        raise ValueError(f'{where}: n_layer is {model_config.n_layer}, and there are weights of {n_blocks} blocks')
    with torch.device('meta'):
        expected = {name: (*tensor.shape,) for name, tensor in GPT(model_config).state_dict().items()}
    found = {name: (*tensor.shape,) for name, tensor in tensors.items()}
    if other := sorted(found.items() ^ expected.items()):
        name = other[0][0]
        raise ValueError(f'{where}: a model like this has {name} {expected.get(name)}, its weights {found.get(name)}')
    return tensors


def config_to_transformers(model_config):
    """The configuration of transformers' class for a ModelConfig, without special tokens, since the defaults of these
    classes would be wrong."""
    import transformers

    arch, dropout = model_config.arch, model_config.dropout
    names = GPT2_KEYS if arch == 'gpt2' else LLAMA_KEYS
    keys = {theirs: getattr(model_config, ours) for ours, theirs in names.items()}
    keys |= {'bos_token_id': None, 'eos_token_id': None}
    if arch == 'gpt2':
        return transformers.GPT2Config(embd_pdrop=dropout, attn_pdrop=dropout, resid_pdrop=dropout, **keys)
    keys |= {'attention_bias': model_config.bias, 'attention_dropout': dropout}
    keys['rope_parameters'] = {'rope_type': 'default', 'rope_theta': model_config.rope_theta}
    if model_config.yarn:
        keys |= rotation.with_yarn(keys['rope_parameters'], *model_config.yarn)
    if model_config.n_experts:
        kind = class_of_experts(model_config)
        keys |= {theirs: getattr(model_config, ours) for ours, theirs in KEYS_OF_MIXTURES[kind].items()}
        if model_config.router_scores == 'sigmoid':
            keys['n_shared_experts'] = model_config.shared_expert_dim // model_config.expert_hidden_dim
            if kind == 'dots1':
                return transformers.Dots1Config(sliding_window=None, **keys)
            keys['rope_parameters']['partial_rotary_factor'] = model_config.rotary_share
            keys['num_nextn_predict_layers'] = 0  # layers for further tokens ahead
            return transformers.Glm4MoeConfig(use_qk_norm=arch == 'qwen3', **keys)
        keys['router_aux_loss_coef'] = model_config.router_aux  # of their loss, which computes the load itself
        keys['mlp_only_layers'] = [*range(model_config.dense_layers)]
        return (transformers.Qwen2MoeConfig if kind == 'qwen2_moe' else transformers.Qwen3MoeConfig)(**keys)
    if arch == 'llama':
        return transformers.LlamaConfig(mlp_bias=model_config.bias, **keys)
    return transformers.Qwen3Config(**keys)


def with_older_names(config):
    """
    The content of a config.json, {key: value}, with the names that transformers 4, vLLM and llama.cpp read in addition
    to those that transformers 5 writes. Without rope_theta they would silently assume 10,000.

    transformers 5 reads both, and they say the same.
    """
    config = dict(config)
    if isinstance(config.get('text_config'), dict):
        config['text_config'] = with_older_names(config['text_config'])
    if config.get('dtype'):
        config['torch_dtype'] = config['dtype']
    rotation = config.get('rope_parameters') or {}
    near = rotation.get('sliding_attention')  # Gemma 3's layers rotate in two ways
    rotation = rotation.get('full_attention', rotation)
    if 'rope_theta' in rotation:
        config['rope_theta'] = rotation['rope_theta']
        scaling = {key: value for key, value in rotation.items() if key not in ('rope_theta', 'partial_rotary_factor')}
        config['rope_scaling'] = None if rotation.get('rope_type', 'default') == 'default' else scaling
        if 'partial_rotary_factor' in rotation:
            config['partial_rotary_factor'] = rotation['partial_rotary_factor']
        if near:
            config['rope_local_base_freq'] = near['rope_theta']
        if config.get('model_type') == 'gpt_neox':
            config['rotary_emb_base'] = rotation['rope_theta']
            config['rotary_pct'] = rotation['partial_rotary_factor']
    return config


def tokenizer_with_older_names(settings):
    """As with_older_names(), for the content of a tokenizer_config.json."""
    settings = dict(settings)
    if settings.get('tokenizer_class') == 'TokenizersBackend':
        settings['tokenizer_class'] = 'PreTrainedTokenizerFast'
    if isinstance(settings.get('extra_special_tokens'), list):
        settings['additional_special_tokens'] = settings.pop('extra_special_tokens')
    return settings
