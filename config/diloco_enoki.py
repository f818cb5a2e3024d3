# Enoki with 8 heads (see config/enoki_8h.py), one replica per node, which meet every 100 steps.
#
#   python prepare_data.py --dataset=fineweb-10BT --tokenizer=gpt2
#   sbatch --nodes=4 slurm/diloco.sh                                    # 4 replicas x 4 GPUs
#   torchrun --nproc_per_node=4 train_diloco.py config/diloco_enoki.py --num_replicas=4 --dry_run
#
# In our small runs it helped to train the first third data parallel: run train_fsdp.py with this file, and then
# train_diloco.py in the same out_dir resumes its checkpoint. See docs/diloco.md.

out_dir = 'out/diloco_enoki'
dataset = 'fineweb-10BT-gpt2'

arch = 'enoki'
heads = 8  # 6 layers of 512: 70M parameters, of which each of 4 ranks of a replica exchanges 18M: 70 MB in fp32
block_size = 2048
z_loss = 1e-4

batch_size = 10
global_batch_size = 480  # over all replicas; 10 sequences x 4 GPUs divide it on 4, 3, 2 and 1 nodes, should one be lost

optimizer = 'adamw'
beta2 = 0.999
grad_clip = 0.5  # of each replica by itself
lr_schedule = 'cos_inf'

inner_steps = 100
outer_lr = 0.7
outer_momentum = 0.4  # for the 14 rounds of this run; 0.9 is for hundreds of them
exchange_dtype = 'bfloat16'
error_feedback = True

eval_interval = 200
eval_sequences = 4800
checkpoint_interval = 200  # a multiple of inner_steps: another number of replicas can resume such a checkpoint
