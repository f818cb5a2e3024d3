# The first stage of docs/whole_way.md, larger: 142M parameters on 2.8B tokens of web text with heads=6, 285M on 5.7B
# with heads=8. Planned for H100s, and not run on any.
#
#   python prepare_data.py --dataset=fineweb-10BT --tokenizer=bpe --vocab_size=32768 --name=way_web
#   python train_ddp.py config/way_large.py                                                       # one GPU
#   torchrun --nproc_per_node=8 train_fsdp.py config/way_large.py --heads=8 --out_dir=out/way_8h

out_dir = 'out/way_6h'
dataset = 'way_web'
vocab_size = 32768

arch = 'qwen3'
heads = 6  # width 768 and 12 layers; sets the learning rate and 20 tokens per parameter, too (planning/rules.py)
attention_gate = False  # as Qwen3 itself, so that an export is a class of transformers
block_size = 2048
z_loss = 1e-4

batch_size = 16
global_batch_size = 512
grad_clip = 0.5

log_interval = 10
eval_interval = 250
eval_sequences = 2048
checkpoint_interval = 500
