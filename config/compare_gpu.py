# Tokens/s, MFU and memory of three models on GPUs: GPT-2 124M, Enoki with 8 heads (70M), a Llama of 1B parameters.
#
#   python compare.py config/compare_gpu.py --nproc=8
#
# Random tokens, no evaluation, no checkpoints, one micro-step. The files of the first two are config/gpt2_124m.py and
# config/enoki_8h.py.

bench = True
strategies = []
nproc = [8]
_gpt2 = {'arch': 'gpt2', 'n_layer': 12, 'n_head': 12, 'n_embd': 768, 'block_size': 1024, 'bias': False}
_enoki = {'arch': 'enoki', 'heads': 8, 'block_size': 2048, 'z_loss': 1e-4}
_llama = {'arch': 'llama', 'n_layer': 16, 'n_head': 32, 'n_kv_head': 8, 'n_embd': 2048, 'mlp_hidden_dim': 8192}
_llama |= {'block_size': 2048, 'tie_embeddings': True}  # 16 x 60.8M + 50,304 x 2048 = 1.08B parameters
_models = {'gpt2-124m': {**_gpt2, 'batch_size': 16}, 'enoki-8h': {**_enoki, 'batch_size': 8}}
_models |= {'llama-1b': {**_llama, 'batch_size': 4, 'activation_checkpointing': 'selective'}}
variants = {
    f'{name}-{strategy}': {'strategy': strategy, **keys}
    for name, keys in _models.items()
    for strategy in ('ddp', 'fsdp', 'fsdp_manual')
}
repeats = 3
out_dir = 'out/compare_gpu'

learning_rate = 3e-4
