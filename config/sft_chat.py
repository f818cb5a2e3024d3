# Teach a model to answer: supervised fine-tuning on conversations, with the loss on the assistant's words alone.
#
#   python prepare_data.py --dataset=chats.jsonl --tokenizer=models/Llama-3.2-3B-Instruct --name=chats
#   torchrun --nproc_per_node=4 train_fsdp.py config/sft_chat.py
#   python sample.py --out_dir=out/sft_chat --prompt="What did I ask you to remember?"

out_dir = 'out/sft_chat'
init_from = 'models/Llama-3.2-3B-Instruct'
dataset = 'chats'

block_size = 2048  # whole conversations are packed into each sequence; longer ones lose their end, and you are told
batch_size = 4
global_batch_size = 32  # sequences, each of several conversations
activation_checkpointing = 'full'

num_epochs = 3
learning_rate = 1e-5
min_lr = 1e-6
warmup_iters = 10
weight_decay = 0.0
beta2 = 0.95
grad_clip = 1.0

eval_interval = 20
eval_sequences = 128
checkpoint_interval = 50
