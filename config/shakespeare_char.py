# Characters of Shakespeare on a laptop: nanoGPT's config/train_shakespeare_char.py in its CPU form (4 layers, 128 wide,
# context 64, batch 12; validation loss 1.88 after 2000 steps), the same size with today's parts.
#
#   python prepare_data.py --dataset=input.txt --tokenizer=bytes --name=shakespeare_char  # tiny Shakespeare
#   python train_ddp.py config/shakespeare_char.py

out_dir = 'out/shakespeare_char'
dataset = 'shakespeare_char'

arch = 'llama'
n_layer = 4
n_head = 4
n_embd = 128
mlp_hidden_dim = 320  # three matrices (SwiGLU) where GELU has two of 512: 754k weights in the blocks, nanoGPT 786k
tie_embeddings = True  # with the 257 ids of bytes, padded to 320, that makes 795,776 parameters; nanoGPT has 795,904

block_size = 64
batch_size = 12  # 12 x 64 = 768 tokens per step
max_iters = 800  # nanoGPT: 2000
learning_rate = 2.5e-3  # nanoGPT: 1e-3
min_lr = 0.0
warmup_iters = 50

log_interval = 50
eval_interval = 400
eval_sequences = 1740  # the whole validation split
checkpoint_interval = 0  # one at the end
