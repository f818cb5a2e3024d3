"""
The model of a Hugging Face folder, computed by model.py instead of `transformers`: --native=True.

    model_config = model_config_of(pretrained)      # a ModelConfig; ValueError names a property that model.py lacks
    share.first_value = Weights(pretrained, model_config).initial_value    # from here on as from scratch
    line = self_test(pretrained, model_config)      # checks that logits equal those of transformers' class
    weights = weights_for_transformers(weights, state)   # a checkpoint's, under transformers' names

model.py computes the same as transformers for GPT-2, Llama, Qwen2, Qwen2-MoE, Qwen3, Qwen3-MoE, dots.llm1, GLM-4.5
and models of their architecture (SmolLM2, Mistral, ...). Everything that works on models of model.py then works on
these: tensor parallelism, pipelines, the compiled loss. out_dir/model keeps their configuration and tokenizer, as for
every fine-tuned model, and checkpoints have model.py's names.
"""

import itertools
import math
from pathlib import Path

import torch

from huggingface import convert, files, finetune, rotation
from huggingface.self_test import reference_logits
from model import GPT, ModelConfig, is_load
from system.files import read_json

# transformers' architectures -> the architecture of model.py that computes the same, under the conditions below.
SAME_AS = {'gpt2': 'gpt2', 'llama': 'llama', 'mistral': 'llama', 'granite': 'llama', 'qwen2': 'llama', 'qwen3': 'qwen3'}
SAME_AS |= {'qwen2_moe': 'llama', 'qwen3_moe': 'qwen3', 'dots1': 'qwen3', 'glm4_moe': 'llama'}
# What other architectures have and model.py lacks.
HAVE = {
    'cohere': 'logits that are scaled, and attention and MLP side by side',
    'falcon': 'attention and MLP side by side',
    'gemma': 'embeddings that are scaled, and norms that multiply by 1 + weight',
    'gemma2': 'norms behind attention and MLP, too, and scores of attention that are capped',
    'gemma3_text': 'norms behind attention and MLP, too, and layers that rotate in two ways',
    'gpt_neox': 'attention and MLP side by side, and heads that rotate in part',
    'mamba': 'a state space in place of attention',
    'olmo2': 'norms behind attention and MLP, and none before them',
    'phi3': 'one matrix for queries, keys and values, and one for gate and up',
    'smollm3': 'layers without positions',
    'stablelm': 'LayerNorm beside a gated MLP, and heads that rotate in part',
    'starcoder2': 'rotary positions beside an MLP without a gate',
}
EXPERTS = ('num_experts', 'num_local_experts', 'n_routed_experts', 'moe_num_experts')
INSTEAD = "leave native out, and transformers' class computes it, under train_ddp.py, train_fsdp.py and others"
# What model.py takes for granted: {a key of the configuration: the values that agree with model.py}.
GPT2_TAKES = {
    'activation_function': ('gelu_new', 'gelu_pytorch_tanh'),
    'scale_attn_weights': (True,),
    'scale_attn_by_inverse_layer_idx': (False,),
    'add_cross_attention': (False,),
}
LLAMA_TAKES = {'hidden_act': ('silu',), 'rope_type': ('default', 'llama3', 'yarn')}
LLAMA_TAKES |= dict.fromkeys(('embedding_multiplier', 'residual_multiplier', 'logits_scaling'), (1,))  # Granite's
YARN_TAKES = {'attention_factor': (None,), 'beta_fast': (None, 32), 'beta_slow': (None, 1), 'truncate': (None, True)}
YARN_TAKES |= {'mscale': (None,), 'mscale_all_dim': (None,)}
EXPERTS_TAKE = {'decoder_sparse_step': (1,)}
LLAMA3_ROPE = ('factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings')


def refuse_other_families(folder):
    """Raise ValueError if the folder's config.json alone shows that model.py cannot compute the model, with the
    reason."""
    try:
        config = read_json(Path(folder, 'config.json'), {'model_type': str})
        kind = config['model_type']
    except (OSError, ValueError):  # a name in the hub's cache, or damaged: found out later
        return
    if kind in SAME_AS:
        return
    experts = next((f'a mixture of experts ({key}={config[key]})' for key in EXPERTS if config.get(key)), None)
    have = experts or HAVE.get(kind, 'an architecture of its own')
    raise ValueError(
        f'native=True: {folder} (model_type={kind}) has {have}; model.py computes {", ".join(SAME_AS)} alone: {INSTEAD}'
    )


def model_config_of(pretrained):
    """The ModelConfig of a Pretrained. Raises ValueError that names a property which model.py lacks."""
    refuse_other_families(pretrained.folder)
    config, given = pretrained.config, f'native=True: {pretrained.folder} (model_type={pretrained.arch})'

    def take(found, taken):
        for key, values in taken.items():
            if key in found and found[key] not in values:
                wanted = ' or '.join(repr(value) for value in values if value is not None) or 'none'
                raise ValueError(f'{given} has {key}={found[key]!r}, model.py computes with {wanted}: {INSTEAD}')

    found, arch = config.to_dict() | rotation.of(config), SAME_AS[pretrained.arch]
    names = convert.GPT2_KEYS if arch == 'gpt2' else convert.LLAMA_KEYS
    keys = {ours: getattr(config, theirs, None) for ours, theirs in names.items()}
    keys |= {'arch': arch, 'block_size': pretrained.block_size, 'z_loss': pretrained.z_loss}
    keys['dropout'] = pretrained.dropout
    if arch == 'gpt2':
        take(found, GPT2_TAKES)
        return ModelConfig(**keys, bias=True, positions=config.max_position_embeddings)

    take(found, LLAMA_TAKES)
    if pretrained.arch == 'granite':
        take(found, {'attention_multiplier': (finetune.heads_of(config)[1] ** -0.5,)})
    if not rotation.of(config):
        raise ValueError(f'{given} has layers that rotate in several ways: {INSTEAD}')
    if found['rope_type'] == 'yarn':
        take(found, YARN_TAKES)
        keys['yarn'] = [found['factor'], found['original_max_position_embeddings']]
    if found['rope_type'] == 'llama3':
        keys['llama3_rope'] = [found[key] for key in LLAMA3_ROPE]
    keys['rope_theta'] = found['rope_theta']
    keys['bias'] = bool(found.get('attention_bias', False))
    keys['qkv_bias'] = pretrained.arch == 'qwen2' or bool(found.get('qkv_bias', False))
    if pretrained.arch == 'glm4_moe':
        keys |= {'arch': 'qwen3' if config.use_qk_norm else 'llama', 'bias': False}  # qkv_bias is its attention_bias
        keys['rotary_share'] = found.pop('partial_rotary_factor', 1.0)
    take(found, {'mlp_bias': (keys['bias'],), 'partial_rotary_factor': (1.0,)})
    if arch == 'qwen3':
        take(found, {'attention_bias': (False,)})
    if names := convert.KEYS_OF_MIXTURES.get(pretrained.arch):
        dense = getattr(config, 'mlp_only_layers', None) or []
        take(found | {'mlp_only_layers': dense}, EXPERTS_TAKE | {'mlp_only_layers': ([*range(len(dense))],)})
        keys |= {'dense_layers': len(dense), 'shared_expert_gate': pretrained.arch == 'qwen2_moe'}
        keys |= {ours: getattr(config, theirs) for ours, theirs in names.items()}
        if pretrained.arch in ('dots1', 'glm4_moe'):
            keys['router_scores'] = 'sigmoid'
            if not config.n_shared_experts:
                raise ValueError(
                    f'{given} has n_shared_experts={config.n_shared_experts}, expected 1 or more: {INSTEAD}'
                )
            keys['shared_expert_dim'] = config.n_shared_experts * config.moe_intermediate_size
    window = getattr(config, 'sliding_window', None) or math.inf  # Qwen3's is None if it is not used
    if window < pretrained.block_size:
        kinds = getattr(config, 'layer_types', None) or ['sliding_attention'] * config.num_hidden_layers
        pattern = ''.join('S' if kind == 'sliding_attention' else 'L' for kind in kinds)
        keys |= {'window_pattern': pattern, 'window_size': window} if 'S' in pattern else {}
    return ModelConfig(**keys)


class Weights:
    """The weights of a folder under model.py's names, one at a time."""

    def __init__(self, pretrained, model_config):
        """Raises ValueError if the files lack a weight."""
        self.model_config, self.files = model_config, files.Weights(pretrained.weights_folder)
        with torch.device('meta'):
            theirs = pretrained.empty_model()
        self.file_name, lacking = self.files.find(theirs)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
        if model_config.n_experts:
            lacking = [name for name in lacking if '.mlp.experts.' not in name] + self.find_experts(theirs)
        if lacking:
            folder = pretrained.weights_folder
            raise ValueError(
                f'{folder} lacks {lacking[0]}, and {len(lacking) - 1} more weights: '
                f'`python download_model.py --model={folder}` lists them; copy or download it again'
            )

    def find_experts(self, theirs):
        """Note where each expert's matrices are in the files; in memory, transformers has those of all experts in one
        tensor. Returns the names that the files lack."""
        C, M, lacking = self.model_config.n_embd, self.model_config.expert_hidden_dim, []
        mixtures = range(self.model_config.dense_layers, self.model_config.n_layer)
        for number, kind in itertools.product(mixtures, ('gate', 'up', 'down')):
            ours = f'blocks.{number}.mlp.experts.{kind}.weight'
            for name in convert.names_in_transformers(ours, self.model_config):
                self.shapes[name] = (C, M) if kind == 'down' else (M, C)
                stored = self.files.stored_as(theirs, [name])
                if stored:
                    self.file_name[name] = stored[0]
                else:
                    lacking.append(name)
        return lacking

    def read(self, their_name):
        stored = self.file_name[their_name]
        self.files.check_shape(stored, self.shapes[their_name])
        return self.files.read(stored).float()

    def initial_value(self, name, parameter=None, seed=None, device='cpu'):
        """As GPT.initial_value(): the whole parameter with this name, fp32."""
        return convert.from_transformers(name, self.model_config, self.read).to(device)


def weights_for_transformers(weights, state):
    """The weights of a checkpoint with this state under transformers' names, {name: tensor}. With these, a model that
    was trained with native=True is sampled from, exported and evaluated like any fine-tuned model."""
    return convert.to_transformers(
        weights, ModelConfig.from_json(state['identity']['model'], 'state.json: identity.model')
    )


@torch.no_grad()
def self_test(pretrained, model_config):
    """Check on a few tokens, with one block in memory at a time, that model.py computes what transformers' class does.
    Returns a line for the log. Raises ValueError if it does not, since the run would train another model than the
    folder's. For rank 0.
    """
    tokens = torch.randint(
        pretrained.vocab_size, (1, min(32, pretrained.block_size)), generator=torch.Generator().manual_seed(1)
    )
    weights = Weights(pretrained, model_config)
    with torch.device('meta'):
        model = GPT(model_config).eval()

    def fill(module, prefix):
        names = [name for name in module.state_dict() if not is_load(name)]  # a router's load is not needed here
        values = {name: weights.initial_value(f'{prefix}.{name}') for name in names}
        module.load_state_dict(values, assign=True, strict=False)

    def empty(module, args, output):
        module.to('meta')

    for name, module in [*model.named_children()]:
        if name != 'blocks':
            is_tied = name == 'head' and model_config.tie_embeddings
            fill(module, 'embed' if is_tied else name)
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda module, args, number=number: fill(module, f'blocks.{number}'))
        block.register_forward_hook(empty)
    logits, expected = model(tokens), reference_logits(pretrained, tokens)
    difference = ((logits - expected).norm() / expected.norm()).item()
    if not difference <= 1e-4:  # a wrong frequency gives about 1
        raise ValueError(
            f"self-test: model.py's logits differ from those of {pretrained.folder} by {difference:.2g} of their norm: "
            'leave native out'
        )
    return f"self-test: model.py's logits are those of {pretrained.weights_folder} (difference {difference:.1g})"
