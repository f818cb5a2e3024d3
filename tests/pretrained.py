"""Tiny transformers models with random weights, saved as download_model.py leaves them, chats for them, and the
strategies that train them."""

import json

import pytest
import torch
from chats import CHATML, messages_of, write_rows
from launch import fork_script, refusals

from text.conversations import ChatEncoder
from text.tokenizer import byte_level_bpe

VOCABULARY, POSITIONS = 259, 64  # 256 bytes, end-of-text and two that end turns; odd, so that shards are uneven
SIZES = {'hidden_size': 40, 'intermediate_size': 72, 'num_hidden_layers': 3, 'num_attention_heads': 4}
SIZES |= {'num_key_value_heads': 2, 'max_position_embeddings': POSITIONS}
GPT2 = {'n_embd': 40, 'n_layer': 3, 'n_head': 4, 'n_positions': POSITIONS}
MODELS = {
    'llama': ('LlamaConfig', SIZES),
    'llama_tied': ('LlamaConfig', SIZES | {'tie_word_embeddings': True}),
    'qwen2': ('Qwen2Config', SIZES),
    'qwen3': ('Qwen3Config', SIZES | {'head_dim': 16, 'tie_word_embeddings': True}),
    'mistral': ('MistralConfig', SIZES | {'sliding_window': 8}),
    'gpt2': ('GPT2Config', GPT2),
}
EXPERTS = {'num_experts': 4, 'num_local_experts': 4, 'num_experts_per_tok': 2, 'moe_intermediate_size': 16}
DOTS1 = {'n_routed_experts': 4, 'num_experts_per_tok': 2, 'moe_intermediate_size': 16, 'n_shared_experts': 2}
DOTS1 |= {'first_k_dense_replace': 1, 'norm_topk_prob': True, 'routed_scaling_factor': 2.5, 'head_dim': 16}
SOFT_CAPS = {'head_dim': 8, 'final_logit_softcapping': 2.0, 'attn_logit_softcapping': 2.0, 'sliding_window': 8}
MORE_MODELS = {  # only on 2 ranks: classes that get this project's attention, and some that keep their own
    'gemma': ('GemmaConfig', SIZES | {'head_dim': 8}),
    'granite': ('GraniteConfig', SIZES | {'logits_scaling': 4.0}),
    'mixtral': ('MixtralConfig', SIZES | EXPERTS | {'sliding_window': 8}),
    'olmo2': ('Olmo2Config', SIZES),
    'phi3': ('Phi3Config', SIZES | {'sliding_window': 8, 'pad_token_id': 0}),
    'qwen3_moe': ('Qwen3MoeConfig', SIZES | EXPERTS | {'head_dim': 16}),
    'dots1': ('Dots1Config', SIZES | DOTS1),
    'glm4_moe': ('Glm4MoeConfig', SIZES | DOTS1 | {'use_qk_norm': True, 'attention_bias': True}),
    'qwen2_moe': ('Qwen2MoeConfig', SIZES | EXPERTS | {'shared_expert_intermediate_size': 24}),
    'smollm3': ('SmolLM3Config', SIZES | {'pad_token_id': 0}),
    'starcoder2': ('Starcoder2Config', SIZES | {'sliding_window': 8}),
    'gemma2': ('Gemma2Config', SIZES | SOFT_CAPS),
    'gemma3_text': ('Gemma3TextConfig', SIZES | {'head_dim': 8, 'sliding_window': 8}),
    'cohere': ('CohereConfig', SIZES | {'logit_scale': 0.5}),
    'gpt_neox': ('GPTNeoXConfig', SIZES),
}
# Classes that let packed documents see each other: by a state, by a convolution, or by a mask that ignores positions.
STATE = {'hidden_size': 32, 'num_hidden_layers': 2, 'state_size': 4, 'pad_token_id': 0}
LINEAR = {'linear_num_value_heads': 4, 'linear_num_key_heads': 2, 'linear_key_head_dim': 8, 'linear_value_head_dim': 8}
LINEAR |= {'num_hidden_layers': 2, 'layer_types': ['linear_attention', 'full_attention'], 'head_dim': 16}
GRANITE = {'mamba_n_heads': 8, 'mamba_d_head': 10, 'mamba_d_state': 8, 'mamba_n_groups': 1, 'mamba_expand': 2}
GRANITE |= {'num_hidden_layers': 2, 'layer_types': ['mamba', 'attention'], 'shared_intermediate_size': 16}
HYBRID = {
    'mamba': ('MambaConfig', STATE),
    'mamba2': ('Mamba2Config', STATE | {'num_heads': 8, 'head_dim': 8, 'n_groups': 1, 'chunk_size': 8}),
    'lfm2': ('Lfm2Config', SIZES | {'num_hidden_layers': 2, 'layer_types': ['conv', 'full_attention']}),
    'qwen3_next': ('Qwen3NextConfig', SIZES | EXPERTS | LINEAR | {'shared_expert_intermediate_size': 16}),
    'qwen3_5_text': ('Qwen3_5TextConfig', SIZES | LINEAR),
    'granitemoehybrid': ('GraniteMoeHybridConfig', SIZES | EXPERTS | GRANITE),
    'gpt_oss': ('GptOssConfig', SIZES | EXPERTS | {'head_dim': 8, 'sliding_window': 8, 'pad_token_id': 0}),
}
# Classes that compute a text in another way if it is long, or if it begins later in its row.
TURN = 32  # tokens of a text, after which all of it is rotated in another way
SIZES_OF_32 = SIZES | {'hidden_size': 32, 'pad_token_id': 0}
LONG_ROPE = {'rope_type': 'longrope', 'rope_theta': 10000.0, 'original_max_position_embeddings': TURN, 'factor': 2.0}
LONG_ROPE |= {'short_factor': [1.0, 1.1, 1.2, 1.3], 'long_factor': [1.0, 3.0, 9.0, 27.0]}
M_SCALE = {'short_mscale': 1.0, 'long_mscale': 1.3}
COLUMNS = {'no_rope_layers': [1, 1, 0], 'attention_chunk_size': 16, 'floor_scale': 4, 'attn_scale': 0.5, 'head_dim': 8}
GEMMA3N = {'head_dim': 8, 'sliding_window': 8, 'vocab_size_per_layer_input': VOCABULARY, 'laurel_rank': 4}
GEMMA3N |= {'hidden_size_per_layer_input': 8, 'num_kv_shared_layers': 1, 'activation_sparsity_pattern': [0.0] * 3}
OF_LENGTH = {
    'phi3_longrope': (
        'Phi3Config',
        SIZES_OF_32 | {'rope_parameters': LONG_ROPE, 'original_max_position_embeddings': TURN},
    ),
    'phimoe': ('PhimoeConfig', SIZES_OF_32 | EXPERTS | {'rope_parameters': LONG_ROPE | M_SCALE}),
    'llama4_text': ('Llama4TextConfig', SIZES_OF_32 | EXPERTS | COLUMNS | {'intermediate_size_mlp': 48}),
    'gemma3n_text': ('Gemma3nTextConfig', SIZES_OF_32 | GEMMA3N),
}
# With a tower for images that text does not reach; it has more blocks than the text model.
TEXT = SIZES | {'head_dim': 8, 'sliding_window': 8, 'max_position_embeddings': 192, 'vocab_size': VOCABULARY}
IMAGES = {'hidden_size': 16, 'intermediate_size': 32, 'num_hidden_layers': 4, 'num_attention_heads': 2}
IMAGES |= {'image_size': 28, 'patch_size': 14}
GEMMA3 = {'text_config': TEXT | {'initializer_range': 0.1}, 'vision_config': IMAGES, 'mm_tokens_per_image': 4}
GEMMA3 |= {'image_token_index': 5, 'boi_token_index': 6, 'eoi_token_index': 7}
MULTIMODAL = {'gemma3': ('Gemma3Config', GEMMA3)}
# Their rows can be cut into blocks of 64 weights, as nf4 needs, and shards are still uneven on 3 ranks.
SIZES_OF_64 = SIZES | {'hidden_size': 64, 'intermediate_size': 128}
OF_64 = {
    'llama_64': ('LlamaConfig', SIZES_OF_64),
    'qwen2_64': ('Qwen2Config', SIZES_OF_64 | {'tie_word_embeddings': True}),
    'gemma_64': ('GemmaConfig', SIZES_OF_64 | {'head_dim': 16}),
    'gpt2_64': ('GPT2Config', GPT2 | {'n_embd': 64}),
    'mistral_64': ('MistralConfig', SIZES_OF_64 | {'sliding_window': 8}),
    'gemma2_64': ('Gemma2Config', SIZES_OF_64 | SOFT_CAPS | {'head_dim': 16}),
    'granite_64': ('GraniteConfig', SIZES_OF_64 | {'attention_multiplier': 0.5}),  # scores: not by the root of head_dim
    'mixtral_64': ('MixtralConfig', SIZES_OF_64 | EXPERTS | {'sliding_window': 8}),
}


def save_model(folder, kind, dtype=torch.float32, draw=0, **changes):
    """Save a model and a tokenizer of bytes with a chat template. Weights are random, others for another `draw`, and
    large enough that logits differ. Returns the folder."""
    import transformers

    name, sizes = (MODELS | MORE_MODELS | HYBRID | OF_64 | OF_LENGTH | MULTIMODAL)[kind]
    special = {'bos_token_id': None, 'eos_token_id': 258}
    sizes = {'vocab_size': VOCABULARY, 'initializer_range': 0.1} | special | sizes | changes
    config = getattr(transformers, name)(**sizes)
    torch.manual_seed(len(kind) + 100 * draw)
    transformers.AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)
    specials = {'<|endoftext|>': 256, '<|im_start|>': 257, '<|im_end|>': 258}
    bpe = byte_level_bpe({bytes([byte]): byte for byte in range(256)}, specials)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token='<|im_end|>')
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return str(folder)


SONG = 'la la la la la la la la la la la la la la la'
CALLS = [('user', '6x7?'), ('assistant', ' =6*7'), ('tool', '42'), ('assistant', 'It is 42.')]
SINGS = [('user', 'Sing'), ('assistant', SONG)]


def save_talker(folder):
    """save_model() of one that has learned to call a calculator, with a space before the call, and to sing without end,
    also after the call. Returns the folder."""
    import transformers

    save_model(folder, 'llama', max_position_embeddings=4096, num_hidden_layers=2)
    encoder, rows = ChatEncoder(str(folder), 258), []
    for turns in (CALLS + SINGS, SINGS):
        *_, (ids, _, _) = encoder.examples(json.dumps({'messages': messages_of(turns)}))
        rows.append(ids.tolist()[:-1])  # without the end of the song
    longest = max(map(len, rows))
    ids = torch.tensor([row + [258] * (longest - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (longest - len(row)) for row in rows])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(80):
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return str(folder)


def write_chats(path):
    """Write 300 conversations of 1 to 3 turns and different lengths, as JSON lines."""
    chats = []
    for number in range(300):
        turns = []
        for turn in range(1 + number % 3):
            turns.append(('user', 'q' * (1 + number * 7 % 5) + str(number)))
            turns.append(('assistant', str(turn) * (1 + number * 5 % 7)))
        chats.append({'messages': messages_of(turns)})
    write_rows(path, chats)


STRATEGIES = {
    'ddp': ['train_ddp.py'],
    'torch': ['train_fsdp.py'],
    'parallel': ['train_parallel.py'],
    'manual': ['train_fsdp.py', '--fsdp_impl=manual'],
    'stage 2': ['train_fsdp.py', '--fsdp_impl=manual', '--zero_stage=2', '--blocks_per_unit=2'],
    'diloco': ['train_diloco.py', '--num_replicas=1', '--inner_steps=2', '--outer_lr=1', '--outer_momentum=0'],
}


def start(name, *arguments, nproc=1):
    """fork_script() of a strategy, or of a script."""
    if name in ('torch', 'parallel') and '--frozen_dtype=nf4' in arguments and torch.__version__ < (2, 13):
        pytest.skip('fully_shard takes bytes from torch 2.13 on')
    script, *more = STRATEGIES.get(name, [name])
    return fork_script(script, *arguments, *more, nproc=nproc)


def refusal(name, *arguments, nproc=1):
    """The one line with which every rank of start() refuses."""
    script, *more = STRATEGIES.get(name, [name])
    (line,) = set(refusals([[script, *arguments, *more]] * nproc))
    return line


def sharded(model, implementation):
    """A model on meta, sharded over all ranks by the 'torch' or 'manual' implementation of FSDP; by no other name."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import fsdp
    import fsdp_manual

    mesh = init_device_mesh('cpu', (dist.get_world_size(),))
    if implementation == 'manual':
        return fsdp_manual.shard(model, model.blocks, mesh)
    if implementation == 'torch':
        fsdp.by_torch(model, model.blocks, mesh)
    return model
