"""
Weights and configurations of `transformers` models, to and from the models of model.py.

    model_config = config_from_transformers(hf_model.config)
    model.load_state_dict(from_transformers(hf_model, model_config))
    hf_model = AutoModelForCausalLM.from_config(config_to_transformers(model_config))
    hf_model.load_state_dict(to_transformers(model.state_dict(), model_config))

GPT2LMHeadModel, LlamaForCausalLM and Qwen3ForCausalLM have a counterpart in model.py. The conversions copy numbers and
compute none, so both directions are exact. Only the layout differs:
    - queries, keys and values are one matrix here, and three there (in GPT-2 one, too)
    - GPT-2's matrices are (in, out) there, all are (out, in) here
    - the vocabulary is padded here: those rows are zeros on the way in, and are cut off on the way out
"""

import re

import torch

from model import GPT, ModelConfig

# Modules here -> modules there, first those of the root, then those of a block.
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
LLAMA_MODULES = {  # of qwen3, too
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
}


# Fields of ModelConfig -> keys of their configurations, in both directions. (GPT2Config answers to these, too.)
SHARED_KEYS = {'vocab_size': 'vocab_size', 'tie_embeddings': 'tie_word_embeddings', 'n_layer': 'num_hidden_layers'}
SHARED_KEYS |= {'n_head': 'num_attention_heads', 'n_embd': 'hidden_size', 'block_size': 'max_position_embeddings'}
GPT2_KEYS = SHARED_KEYS | {'mlp_hidden_dim': 'n_inner', 'norm_eps': 'layer_norm_epsilon'}
LLAMA_KEYS = SHARED_KEYS | {'n_kv_head': 'num_key_value_heads', 'head_dim': 'head_dim'}
LLAMA_KEYS |= {'mlp_hidden_dim': 'intermediate_size', 'norm_eps': 'rms_norm_eps'}


def from_transformers(source, model_config):
    """The state dict of GPT(model_config), from a transformers model or its state dict.

    It is fp32 whatever the source is: these become the master weights, and Adam's moments take their dtype.
    Raises ValueError if a weight is missing, left over or of another shape than model_config says.
    """
    theirs = dict(source.state_dict() if isinstance(source, torch.nn.Module) else source)
    embedding = their_names('embed.weight', model_config)[0]
    if model_config.tie_embeddings and embedding in theirs:  # not every checkpoint repeats a tied weight
        theirs.setdefault('lm_head.weight', theirs[embedding])
    with torch.device('meta'):
        expected = GPT(model_config).state_dict()  # names and shapes, without memory

    ours = {}
    for name, parameter in expected.items():
        missing = [their_name for their_name in their_names(name, model_config) if their_name not in theirs]
        if missing:
            raise ValueError(f'the transformers model has no {missing[0]}, which {model_config.arch} needs for {name}')
        pieces = [theirs.pop(their_name).detach().float() for their_name in their_names(name, model_config)]
        tensor = torch.cat([piece.T for piece in pieces] if is_transposed(name, model_config) else pieces)
        shape = torch.Size(unpadded_shape(name, parameter.shape, model_config))
        if tensor.shape != shape:
            raise ValueError(
                f'{name}: expected the shape {tuple(shape)}, the transformers model has {tuple(tensor.shape)}'
            )
        padding = parameter.shape[0] - shape[0]
        ours[name] = torch.cat((tensor, tensor.new_zeros(padding, *shape[1:]))) if padding else tensor.contiguous()
    if theirs:
        raise ValueError(f'{model_config.arch} has no place for {next(iter(theirs))} of the transformers model')
    return ours


def to_transformers(state_dict, model_config):
    """The state dict of the transformers model, from that of GPT(model_config); dtypes stay.

    Raises ValueError for what transformers lacks, see is_in_transformers.
    """
    theirs = {}
    for name, tensor in state_dict.items():
        tensor = tensor[: unpadded_shape(name, tensor.shape, model_config)[0]]
        names = their_names(name, model_config)
        rows = [tensor.shape[0]]
        if len(names) == 3:
            kv_rows = model_config.n_kv_head * model_config.head_dim
            rows = [model_config.n_head * model_config.head_dim, kv_rows, kv_rows]
        for their_name, piece in zip(names, tensor.split(rows), strict=True):
            theirs[their_name] = (piece.T if is_transposed(name, model_config) else piece).contiguous()
    return theirs


def their_names(name, model_config):
    """'blocks.0.attn.qkv.weight' -> ['transformer.h.0.attn.c_attn.weight']; with llama the names of q, k and v."""
    if not is_in_transformers(model_config):
        raise ValueError(f'transformers has no model like {model_config}')
    modules = GPT2_MODULES if model_config.arch == 'gpt2' else LLAMA_MODULES
    module, kind = name.rsplit('.', 1)  # kind: weight or bias
    if module.startswith('blocks.'):
        _, number, inner = module.split('.', 2)
        theirs = f'{modules["blocks"]}.{number}.{modules[inner]}.{kind}'
    else:
        theirs = f'{modules[module]}.{kind}'
    return [theirs.format(letter) for letter in 'qkv'] if '{}' in theirs else [theirs]


def is_in_transformers(model_config):
    """Whether transformers has a class that computes the same: not enoki, nor gpt2 with bias=False (nanoGPT's), ..."""
    if model_config.arch == 'gpt2':
        usual_heads = model_config.n_head * model_config.head_dim == model_config.n_embd
        return model_config.bias and usual_heads and model_config.n_kv_head == model_config.n_head
    if model_config.arch == 'qwen3':
        return not model_config.bias and not model_config.attention_gate
    return model_config.arch == 'llama'


def is_transposed(name, model_config):
    """GPT-2 in transformers keeps the matrices of its blocks in Conv1D modules, as (in, out)."""
    return model_config.arch == 'gpt2' and name.endswith(('qkv.weight', 'proj.weight', 'up.weight', 'down.weight'))


def unpadded_shape(name, shape, model_config):
    return (model_config.vocab_size, *shape[1:]) if name in ('embed.weight', 'head.weight') else shape


def config_from_transformers(hf_config):
    """The ModelConfig of a GPT2Config, LlamaConfig or Qwen3Config; dropout is 0.

    Raises ValueError for other models, and for the options of these that model.py does not compute.
    """
    arch = hf_config.model_type
    if arch not in ('gpt2', 'llama', 'qwen3'):
        raise ValueError(f'model_type={arch!r}: expected gpt2, llama or qwen3')
    rope = getattr(hf_config, 'rope_parameters', None) or {}
    biases = {getattr(hf_config, 'attention_bias', False), getattr(hf_config, 'mlp_bias', False)}
    refusals = {  # option: whether the model needs it
        f'rope_type={rope.get("rope_type")!r}': rope.get('rope_type', 'default') != 'default',
        'attention_bias without mlp_bias': arch != 'gpt2' and len(biases) == 2,
        'use_sliding_window': getattr(hf_config, 'use_sliding_window', False),
        'scale_attn_by_inverse_layer_idx': getattr(hf_config, 'scale_attn_by_inverse_layer_idx', False),
        'scale_attn_weights=False': not getattr(hf_config, 'scale_attn_weights', True),
        'add_cross_attention': getattr(hf_config, 'add_cross_attention', False),
    }
    activation = hf_config.activation_function if arch == 'gpt2' else hf_config.hidden_act
    refusals[f'activation {activation!r}'] = activation != ('gelu_new' if arch == 'gpt2' else 'silu')
    for option, needed in refusals.items():
        if needed:
            raise ValueError(f'this {arch} model has {option}, which model.py does not support')

    names = GPT2_KEYS if arch == 'gpt2' else LLAMA_KEYS
    keys = {ours: getattr(hf_config, theirs) for ours, theirs in names.items()}
    if arch != 'gpt2':
        keys |= {'bias': biases == {True}, 'rope_theta': rope['rope_theta']}
    return ModelConfig(arch=arch, **keys)


def config_to_transformers(model_config):
    """The GPT2Config, LlamaConfig or Qwen3Config of a ModelConfig, without special tokens: theirs would be others.

    Raises ValueError for what transformers lacks, see is_in_transformers.
    """
    import transformers

    if not is_in_transformers(model_config):
        raise ValueError(f'transformers has no model like {model_config}')
    arch, dropout = model_config.arch, model_config.dropout
    names = GPT2_KEYS if arch == 'gpt2' else LLAMA_KEYS
    keys = {theirs: getattr(model_config, ours) for ours, theirs in names.items()}
    keys |= {'bos_token_id': None, 'eos_token_id': None}
    if arch == 'gpt2':
        return transformers.GPT2Config(embd_pdrop=dropout, attn_pdrop=dropout, resid_pdrop=dropout, **keys)
    keys |= {'attention_bias': model_config.bias, 'attention_dropout': dropout}
    keys['rope_parameters'] = {'rope_type': 'default', 'rope_theta': model_config.rope_theta}
    if arch == 'llama':
        return transformers.LlamaConfig(mlp_bias=model_config.bias, **keys)
    return transformers.Qwen3Config(**keys)


def byte_level_bpe(ranks, specials, pattern=None):
    """A tokenizers.Tokenizer that does what tiktoken does with the same parts.

    ranks: {bytes of a token: id}, lower ids are merged first. specials: {text: id}. pattern: the regular expression
    that splits a text into words; None = do not split.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    spelled = {token: ''.join(letters[byte] for byte in token) for token in ranks}
    # tiktoken joins the neighbours whose union has the lowest id: every way to split a token is a merge, in that order.
    merges = [
        (spelled[token[:cut]], spelled[token[cut:]])
        for token in sorted(ranks, key=ranks.get)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    vocabulary = {spelled[token]: number for token, number in ranks.items()} | specials
    bpe = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    if pattern:
        # `{1,3}+` is possessive for tiktoken, which matters little, but one or more such repetitions for this library.
        pattern = re.sub(r'(\{\d*,\d*\})\+', r'\1', pattern)
        steps.insert(0, pre_tokenizers.Split(tokenizers.Regex(pattern), 'isolated'))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(steps)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in specials])
    return bpe
