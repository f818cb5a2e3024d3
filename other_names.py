"""
What keys of nanoGPT, nanochat, transformers, TRL, peft, torchtune, torchtitan and DeepSpeed are called here. With these
rows, `theirs: answer`, configurator.py answers a key that it does not know. A line that begins with spaces continues a
row. Where an answer names no script, the key is train_ddp.py's.
"""

import re

ROWS = """
model model_name_or_path base_model init_from checkpoint_dir initial_load_path hf_assets_path checkpointer: `init_from`,
    a folder from download_model.py, which defines its own architecture; for evaluate.py and sample.py it is --out_dir
config cfg: a config file is Python and has no flag: config/sft_chat.py
output_dir log_dir model_tag: `out_dir`: one folder per run; the same command resumes the run in it
datasets data_path train_file train_data dataset_name train_dataset dataset_path: `dataset`, made by prepare_data.py
data_files dataset.source: `dataset` of prepare_data.py: a file, a folder, or OWNER/NAME on the hub
eval_dataset test_datasets validation_file dataset_val: `val_dataset`, or `val_fraction` of prepare_data.py
val_size test_size val_set_size: `val_fraction` of prepare_data.py, a share
subset dataset_config: `source_config` of prepare_data.py
split dataset_train_split dataset_test_split: `source_split` of prepare_data.py, a whole split
dataset_text_field column text_column: `text_field` of prepare_data.py, a field or a template of several
train_on_inputs train_on_prompt: `train_on_input` of prepare_data.py, False by default
assistant_only_loss completion_only_loss: always on for chats, unless `train_on_input` of prepare_data.py is given
dataset_num_proc: `num_proc` of prepare_data.py, one per core by default
tokenizer: `tokenizer` of prepare_data.py, the model's folder; a train script gets it from the dataset
chat_template chat_template_path prompt_template: `chat_template` of prepare_data.py, which keeps it with the dataset
bos_token eos_token pad_token: not here: special tokens are those of the folder given as `tokenizer` of prepare_data.py
max_seq_length max_seq_len seq_len cutoff_len max_context_length seq_length model_max_length sequence_len
    context_length: `block_size`, the length of each sequence, packed or not; a longer chat loses its end, a longer text
    continues in the next one
max_length: `block_size`, of a pair both answers together; for generate() it is `max_new_tokens` of sample.py
max_prompt_length: not here: no prompt is cut; one that leaves no room in `block_size` is refused or left out
packed sample_packing: `packing`, on by default where the model keeps conversations apart; for texts windows=documents
shuffle shuffle_dataset: always on: each epoch has its own order, by `seed`
per_device_train_batch_size micro_batch_size device_batch_size local_batch_size train_micro_batch_size_per_gpu:
    `batch_size`, sequences of block_size tokens per rank and micro-step; a packed one holds several chats
per_device_eval_batch_size eval_batch_size: `batch_size`, one key for both
gradient_accumulation_steps grad_accum acc_steps accumulate_grad_batches: not here: it follows from `global_batch_size`,
    the sequences of a step over all ranks: `batch_size` x ranks x theirs (nanoGPT: without the ranks; GRPO:
    prompts_per_step)
total_batch_size train_batch_size: `global_batch_size`, in sequences: tokens / block_size
num_train_epochs epochs max_epochs: `num_epochs`, passes over the packed sequences; it sets max_iters
max_steps steps train_iters num_steps num_training_steps: `max_iters`, optimizer steps
max_steps_per_epoch: `max_iters`, for the whole run: theirs x epochs
num_iterations: `max_iters` for nanochat's, optimizer steps; for GRPOConfig's `num_iterations` of train_grpo.py
lr max_lr: `learning_rate`, the peak: 6e-4 by default, for training from scratch (1e-6 for DPO and GRPO), so always give
    one
matrix_lr embedding_lr unembedding_lr scalar_lr: `learning_rate`, one for all
min_learning_rate min_lr_factor final_lr_frac min_lr_ratio: `min_lr`, a rate, not a factor
lr_scheduler_type lr_scheduler scheduler: `lr_schedule`, cosine by default; min_lr=0 ends at 0, as theirs do
decay_lr: `lr_schedule`: decay_lr=False is constant
decay_ratio warmdown_ratio: `lr_schedule=wsd`, whose decay is the last 20% of the steps
warmup_steps warmup num_warmup_steps warmup_ratio lr_warmup_iters: `warmup_iters`, in steps; 100 by default
optim optimizer._component_ optimizer.type: `optimizer`, adamw by default; for 8-bit ones `optimizer_dtype=int8`
adam_beta1 adam_beta2 betas: `beta1`, `beta2`; 0.9 and 0.95 by default
adam_epsilon eps: not here: 1e-8
label_smoothing_factor neftune_noise_alpha: not here: the loss of a text is plain cross-entropy, without noise
first_k_dense_replace mlp_only_layers n_dense_layers: `dense_layers`, a number: the first blocks, without experts
n_shared_experts: `shared_expert_dim`: theirs x expert_hidden_dim
n_group num_expert_groups: `expert_groups`
topk_group num_limited_groups: `groups_per_token`
router_aux_loss_coef: `router_aux`; not in train_dpo.py and train_grpo.py
max_grad_norm clip_grad_norm gradient_clipping max_norm clip: `grad_clip`, 1.0 by default; 0 = off
bf16 fp16 precision torch_dtype mixed_precision mixed_precision_param amp mixed_precision_reduce: `dtype` of what is
    computed, such as bfloat16; trained weights and the reduction are always fp32
fp8 float8: `matmul_dtype=float8`
gradient_checkpointing enable_activation_checkpointing activation_checkpoint gradient_checkpointing_kwargs recompute
    ac_mode: `activation_checkpointing=full`; selective and offload are in between
torch_compile compile.enable no_compile: `compile`, on by default on a GPU
attn_implementation flash_attention flash_attn sdp_attention: always on where device and dtype support it
use_liger_kernel: always on: the loss is computed in chunks, as Liger's; the other kernels come from `compile`
full_determinism: `deterministic`
data_seed: `seed`, also for the data; 1337 by default
device_type: `device`
use_cpu no_cuda: `device=cpu`
backend ddp_backend: not here: nccl on GPUs, gloo on CPUs
ddp_timeout train_timeout_seconds init_timeout_seconds: `timeout_s`, 600 by default
num_workers dataloader_num_workers pin_memory dataloader_pin_memory: always on: one thread reads ahead from a memory
    map, and pins memory for a GPU
local_rank nproc_per_node nnodes master_port: torchrun has these, before the script's name
resume_from_checkpoint recipe_checkpoint auto_resume: `resume`: auto (default) resumes from the newest checkpoint in
    out_dir, on any number of ranks; must fails without one, never fails with one
save_steps save_every save_strategy checkpoint.interval save_interval save_every_n_steps: `checkpoint_interval`, in
    steps; export_model.py turns a checkpoint into a folder for from_pretrained
save_total_limit keep_last_n_checkpoints keep_latest_k: `keep_checkpoints`, 2 by default
always_save_checkpoint: always on: checkpoints do not wait for a lower val_loss; `keep_best` also keeps the best
async_mode enable_async_checkpointing async_save: `async_checkpoint`
overwrite_output_dir: not here: nothing is overwritten; use another `out_dir` for another run
eval_steps eval_strategy eval_every validator.freq run_val_every_n_steps: `eval_interval`, in steps; eval_sequences says
    how much
eval_tokens validator.steps: `eval_sequences`: tokens / block_size, or steps x the batch
load_best_model_at_end metric_for_best_model greater_is_better: `keep_best`, the lowest val_loss; sample.py, evaluate.py
    and export_model.py load it with --step=best
early_stopping_patience: `patience`, evaluations in a row without a lower val_loss
do_eval: `eval_only`
do_train do_predict: not here: train scripts train, sample.py --prompts predicts
logging_steps log_every_n_steps log_freq logging_strategy steps_per_print: `log_interval`, 10 by default
report_to enable_wandb enable_tensorboard wandb tensorboard metric_logger: `wandb_log`, `tensorboard_log`
run_name run wandb_name: `wandb_run_name`
project: `wandb_project`
push_to_hub hub_model_id hub_token: not here: upload the folder that export_model.py writes
profiler enable_profiling profile_freq profile profile_step: `trace_step`, one step
enable_memory_snapshot memory_snapshot profile_memory: `trace_memory`
r lora_r use_peft: `lora_rank`, 0 = off
target_modules lora_target_modules lora_attn_modules apply_lora_to_mlp lora_target: `lora_targets`: all linear layers of
    the blocks, or ends of names: q_proj,v_proj
use_rslora: `lora_rslora`
lora_modules_to_save: `modules_to_save`
use_dora: not here: DoRA needs the whole matrix again in every forward pass; use a larger `lora_rank`
load_in_4bit quantize_base quantization_bit bnb_4bit_quant_type: `frozen_dtype=nf4`, with a lora_rank
load_in_8bit: not here: the base is kept in fp32, bfloat16 or nf4 (`frozen_dtype`)
depth aspect_ratio: `n_layer`, `n_embd`; or `heads`, which sets size and rates by published scaling laws
rope_scaling: `yarn`, `rope_theta`
sliding_window: `window_pattern`, `window_size` for models from scratch; a folder defines its own
target_param_data_ratio: `tokens_per_parameter` with `heads`, per parameter of the whole model
fsdp fsdp_config: a script: train_fsdp.py. FULL_SHARD is zero_stage=3, SHARD_GRAD_OP zero_stage=2, HYBRID_SHARD
    replicate_size, NO_SHARD train_ddp.py
sharding_strategy fsdp_sharding_strategy: `zero_stage` of train_fsdp.py: FULL_SHARD is 3, SHARD_GRAD_OP 2; HYBRID_SHARD
    is `replicate_size` of train_fsdp.py
fsdp_cpu_offload enable_cpu_offload fsdp_offload_params offload_params offload_param offload_optimizer:
    `cpu_offload=params` of train_fsdp.py, or =optimizer for only the moments
fsdp_reshard_after_forward: `zero_stage=2` of train_fsdp.py keeps weights gathered after forward; 3 does not
limit_all_gathers backward_prefetch: `prefetch` of train_fsdp.py, with fsdp_impl=manual; fully_shard always prefetches
data_parallel_replicate_degree data_parallel_replicate_dim: `replicate_size` of train_fsdp.py
data_parallel_shard_degree data_parallel_shard_dim: not here: it follows from the ranks and `replicate_size` of
    train_fsdp.py
tensor_parallel_degree tensor_parallel_dim tp sequence_parallel: `tensor_parallel` of train_parallel.py and
    train_pipeline.py
context_parallel_degree cp context_parallel_dim: `context_parallel` of train_parallel.py
pipeline_parallel_degree pp: `pipeline_stages` of train_pipeline.py
pipeline_parallel_schedule: `pipeline_chunks` of train_pipeline.py
expert_parallel_degree ep: `expert_parallel` of train_parallel.py
deepspeed: train_deepspeed.py, with the JSON as --deepspeed_config
zero_optimization: `zero_stage` of train_deepspeed.py; the other settings stay in the file of --deepspeed_config
beta dpo_beta: `beta` of train_dpo.py, 0.1 by default, and of train_distill.py; in GRPO it is a KL term, which
    train_grpo.py lacks
loss_type: `loss_type` of train_dpo.py and of train_grpo.py; fine-tuning has only cross-entropy
ref_model reference_free precompute_ref_log_probs: not here: train_dpo.py computes the reference from `init_from` once
rpo_alpha loss_weights: `sft_weight` of train_dpo.py
reward_funcs reward_functions: `reward` of train_grpo.py: a function of yours (FILE.py:FUNCTION), or a rule in its rows
max_completion_length max_new_tokens max_generated_tokens: `max_new_tokens` of train_grpo.py; sample.py has it, too
mask_truncated_completions: `mask_truncated` of train_grpo.py
steps_per_generation examples_per_step: `prompts_per_step` of train_grpo.py, whose answers all belong to one update
num_samples: `num_generations` of train_grpo.py; `num_samples` of sample.py
num_return_sequences: `num_samples` of sample.py
vllm_importance_sampling_correction vllm_importance_sampling_cap tis_imp_ratio_cap: `sampled_logps=tis` of
    train_grpo.py, capped at 2
use_vllm: not here: each rank writes its own answers between updates; there is no second engine
kl_coef kl_coeff: not here: no KL term and no reference in train_grpo.py
teacher_model teacher_model_name_or_path: `teacher` of train_distill.py
lmbda: `on_policy` of train_distill.py; in the other steps the teacher writes, as with seq_kd
seq_kd: `on_policy=0` of train_distill.py
start: `prompt` of sample.py
temperature top_p top_k prompt: sample.py has them; `temperature` of train_grpo.py, which samples from all tokens
do_sample: `temperature` of sample.py; 0 is greedy
min_p repetition_penalty num_beams: not here: sample.py has --top_k and --top_p
system_prompt: `system` of sample.py
source: `out_dir` of sample.py and evaluate.py, or `init_from`, for nanochat's base, sft and rl, which are runs here
model_step: `step` of sample.py; evaluate.py and export_model.py have it, too
model_revision: `revision` of download_model.py
task_name tasks: `tasks` of evaluate.py, files; while a run trains, `eval_tasks`
max_problems limit: `limit` of evaluate.py, and `eval_tasks_limit`
sample_every: not here: sample.py reads any checkpoint during the run
core_metric_every: `eval_tasks`, `eval_tasks_interval`
port host: `web` of sample.py, as --web=8080; it serves this machine only
"""

OTHER_NAMES = {}
for row in re.sub(r'\n +', ' ', ROWS).strip().splitlines():
    names, _, answer = row.partition(': ')
    OTHER_NAMES |= dict.fromkeys(names.split(), answer)
