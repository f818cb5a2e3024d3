"""
Tiny models whose config.json and weights are as people and other programs leave them, read through huggingface/.

The reference is from_pretrained().
"""

import functools
import json
import shutil
from pathlib import Path

from fuzzing.cases import LFS, NOT_JSON, STAYS, Wrong, check, some
from system.errors import one_line

SHARED = {'vocab_size': 64, 'bos_token_id': None, 'eos_token_id': 1, 'initializer_range': 0.2}
SIZES = {'hidden_size': 16, 'intermediate_size': 24, 'num_hidden_layers': 1, 'num_attention_heads': 2}
SIZES |= {'num_key_value_heads': 1, 'max_position_embeddings': 32, **SHARED}
GPT2_SIZES = {**SHARED, 'n_embd': 16, 'n_layer': 1, 'n_head': 2, 'n_positions': 32}
MODELS = {
    'llama': ('LlamaConfig', SIZES),
    'llama tied': ('LlamaConfig', {**SIZES, 'tie_word_embeddings': True}),
    'qwen3': ('Qwen3Config', {**SIZES, 'head_dim': 8}),
    'qwen3 tied': ('Qwen3Config', {**SIZES, 'head_dim': 8, 'tie_word_embeddings': True}),
    'gpt2': ('GPT2Config', GPT2_SIZES),
    'gpt2 untied': ('GPT2Config', {**GPT2_SIZES, 'tie_word_embeddings': False}),
}


@functools.cache
def saved_model(name, in_shards):
    """The folder of a tiny model with random weights."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind, sizes = MODELS[name]
    folder = Path(STAYS.name, f'{name}-{in_shards}'.replace(' ', '_'))
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes))
    model.save_pretrained(folder, **({'max_shard_size': '4KB'} if in_shards else {}))
    return folder


# A configuration that lacks one of these asks for billions of parameters.
LARGE_BY_DEFAULT = ('hidden_size', 'intermediate_size', 'num_hidden_layers', 'vocab_size', 'n_embd', 'n_layer')
ANYTHING = [None, -1, 0, 1, 2, 3.0, 2.5, 'x', '', [], {}, [1], True, False, '2', 'none', 1e-5]
# What a configuration may also have.
MORE = {'quantization_config': {'quant_method': 'fp8'}, 'auto_map': {'AutoConfig': 'x.y'}, 'architectures': ['X']}
MORE |= {'is_decoder': False, 'sliding_window': 4, 'use_sliding_window': True, 'layer_types': ['x']}
MORE |= {'attn_implementation': 'none of them', 'attention_dropout': '0.1', 'rms_norm_eps': '1e-6'}
MORE |= {'layer_norm_epsilon': '1e-5', 'attention_bias': True, '_attn_implementation': 'eager', 'use_cache': 'no'}
MORE |= {'pretraining_tp': 2, 'torchscript': True, 'head_dim': 9}


def spoil_config(draw, config):
    """Change a config.json as people do by hand, or as other programs write it."""
    harm = draw.randrange(13)
    numbers = [key for key, value in config.items() if isinstance(value, int) and not isinstance(value, bool)]
    key = draw.choice(numbers) if numbers else 'vocab_size'
    if harm == 0:
        config[key] = float(config.get(key, 1))
    elif harm == 1:
        config[key] = str(config.get(key, 1))
    elif harm == 2:
        name = draw.choice(['dtype', 'torch_dtype'])
        config[name] = draw.choice(['torch.bfloat16', 'bf16', 'float16', 'float99', 'auto', None, 5, 'torch.x'])
    elif harm == 3:
        name = 'activation_function' if 'activation_function' in config else 'hidden_act'
        config[name] = draw.choice(['gelu', 'relu', 'swish', 'none of them', None, 'SiLU', 5])
    elif harm == 4:
        theta = draw.choice([10000.0, 500000, '10000', None, -1])
        kind = draw.choice(['default', 'linear', 'dynamic', 'yarn', 'llama3', 'longrope', 'none of them', None, 5])
        rotation = {'rope_type': kind, 'factor': draw.choice([2.0, 2, '2', None, 0])}
        if some(draw, 0.5):
            config['rope_parameters'] = draw.choice([{**rotation, 'rope_theta': theta}, rotation, None, {}, 5])
        else:
            config.pop('rope_parameters', None)
            scaling = draw.choice([rotation, None, {'type': kind, 'factor': 2.0}, 5])
            config |= {'rope_theta': theta, 'rope_scaling': scaling}
    elif harm == 5:
        token = draw.choice([64, 70000, -1, [1, 2], '3', 3.0, None])
        config[draw.choice(['pad_token_id', 'eos_token_id', 'bos_token_id'])] = token
    elif harm == 6:
        config['tie_word_embeddings'] = draw.choice([True, False, None, 'true', 1, 0])
    elif harm == 7:
        config.pop(draw.choice([key for key in config if key not in LARGE_BY_DEFAULT]))
    elif harm == 8:
        config[key] += draw.choice([-1, 1, 2, 16]) if isinstance(config.get(key), int) else 0
    elif harm == 9:
        alike = ['llama', 'qwen3', 'mistral', 'bert'] if 'hidden_size' in config else []
        config['model_type'] = draw.choice([*alike, 'unheard_of', None, 5])
    elif harm == 10:
        config[draw.choice(list(config))] = draw.choice(ANYTHING)
    elif harm == 11:
        name = draw.choice(list(MORE))
        config[name] = MORE[name]
    elif harm == 12:
        heads = ['head_dim', 'num_key_value_heads', 'num_attention_heads', 'n_head']
        name = draw.choice([*heads, 'vocab_size', 'n_inner', 'n_ctx'])
        config[name] = draw.choice([None, 0, 1, 3, 4, 7, 32, -2])


def spoil_weights(draw, folder):
    """Change the weights of a folder, their names, or which file holds them."""
    from safetensors.torch import load_file, save_file

    index = folder / 'model.safetensors.index.json'
    files = sorted(folder.glob('*.safetensors'))
    path = draw.choice(files)
    harm = draw.randrange(9)
    if harm == 0 and index.exists():
        content = json.loads(index.read_text())
        names = content['weight_map']
        name = draw.choice(list(names))
        form = draw.randrange(5)
        if form == 0:
            names[name] = draw.choice([file.name for file in files])
        elif form == 1:
            names[name] = draw.choice(['model-00099-of-00099.safetensors', 5, None, ''])
        elif form == 2:
            del names[name]
        elif form == 3:
            names['not.there.weight'] = files[0].name
        else:
            content = draw.choice([{}, [], {'weight_map': None}, {'weight_map': []}, None])
        index.write_text(json.dumps(content))
    elif harm == 0:
        index.write_text('{')
    elif harm == 1:
        path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])
    elif harm == 2:
        path.write_bytes(draw.choice([LFS, b'', b'\0' * 64, b'PK\3\4', b'{}']))
    elif harm == 3:
        names = ['pytorch_model.bin', 'adapter_model.safetensors', 'model.gguf', 'x.safetensors']
        path.rename(folder / draw.choice(names))
    else:
        tensors = load_file(path)
        name = draw.choice(list(tensors))
        if harm == 4:
            del tensors[name]
        elif harm == 5:
            tensors[name] = draw.choice([tensors[name][:-1], tensors[name][None], tensors[name].flatten()]).contiguous()
        elif harm == 6:
            import torch

            tensors[name] = tensors[name].to(draw.choice([torch.bfloat16, torch.float16, torch.float64, torch.int8]))
        elif harm == 7:
            import torch

            head = 'lm_head.weight'
            tensors[head] = torch.randn(64, 16) if head not in tensors or some(draw, 0.5) else tensors[head] + 1
        else:
            prefix = draw.choice(['model.', 'transformer.', 'module.', '_orig_mod.', 'base_model.model.'])
            names = [key.removeprefix(prefix) if key.startswith(prefix) else prefix + key for key in tensors]
            tensors = dict(zip(names, tensors.values(), strict=True))
        save_file(tensors, path, metadata={'format': 'pt'})


def check_config(draw, folder):
    """Check a case: a tiny model whose config.json and weights were changed."""
    import torch
    import transformers

    folder /= 'model'
    shutil.copytree(saved_model(draw.choice(list(MODELS)), some(draw, 0.3)), folder)
    if some(draw, 0.75):
        config = json.loads((folder / 'config.json').read_text())
        for _ in range(draw.choice([1, 1, 1, 2])):
            spoil_config(draw, config)
        (folder / 'config.json').write_text(json.dumps(config))
    if some(draw, 0.35):
        spoil_weights(draw, folder)
    if some(draw, 0.03):
        (folder / 'config.json').write_text(draw.choice(NOT_JSON))
    if some(draw, 0.02):
        (folder / 'config.json').rename(folder / 'adapter_config.json')
    tokens = torch.randint(32, (1, 12), generator=torch.Generator().manual_seed(3))
    found = logits_of_ours(folder, tokens)
    try:
        theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, output_loading_info=True
        )
        with torch.no_grad():
            expected = theirs.eval()(tokens, use_cache=False).logits
    except Exception as problem:
        if 'dropout' in str(problem):  # a run has its own
            return
        raise Wrong(f'trained what from_pretrained refuses: {one_line(problem)}') from problem
    check(not info['missing_keys'] and not info.get('mismatched_keys'), 'from_pretrained makes up weights', info)
    check(found.shape == expected.shape, 'logits of another shape', found.shape, expected.shape)
    difference = ((found - expected).norm() / expected.norm()).item()
    check(difference < 1e-4, 'other logits', difference)


def logits_of_ours(folder, tokens):
    """The logits of a model as a train script loads it."""
    import torch
    import torch.distributed as dist

    from huggingface import finetune, loading, self_test
    from huggingface.pretrained import Pretrained

    keys = {'init_from': str(folder), 'out_dir': f'{folder}-out', 'dry_run': False, 'block_size': 12, 'freeze': None}
    keys |= {'lora_rank': 0, 'lora_alpha': 16.0, 'lora_targets': 'all', 'dropout': 0.0, 'z_loss': 0.0}
    keys |= {'lora_dropout': 0.0, 'lora_rslora': False, 'modules_to_save': [], 'frozen_dtype': None}
    keys |= {'rope_theta': None, 'yarn': [], 'trust_remote_code': False}
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    try:
        pretrained = Pretrained.from_keys(keys, {})
        pretrained.to_dict()
        with torch.device('meta'):
            model = finetune.for_training(pretrained)
        model.to_empty(device='cpu')
        loading.load(model, pretrained)
        self_test.run(model, model, pretrained, loaded=True, packed=True, device='cpu')
        with torch.no_grad():
            return model.eval()(tokens).float()
    finally:
        dist.destroy_process_group()
