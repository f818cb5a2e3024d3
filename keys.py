"""
The keys that train scripts share. Each is written once, with its default, its line of `--help`, and tags.

    class Config(Keys):  # in a script: the shared keys, and its own
        # fsdp
        replicate_size = 1  # what --help says of this key

A key is a class attribute and its comment is the help. An annotation is needed where a key accepts more than the type
of its default. A comment on a line of its own begins a section of `--help`, and a section of the same name in a script
continues it. Words in brackets at the end of a comment are tags. A section's tags apply to each of its keys that has
no tags of its own:

    [result]    the loss and the weights depend on this key, so runs that are compared should agree on it. Keys that
                only decide how the same numbers are computed do not have this tag, even if the rounding differs.
    [per job]   jobs that train together in a pool may each have their own value.
    [model]     the key belongs to what a model is: model.py's ModelConfig has it, or Pretrained of huggingface/. A run
                resumes only with the same value; a Hugging Face folder has its own, except of what Pretrained takes.
    [may change] a key of the loss, with which a run may resume at another value, even if it is one of the model. At 0
                it adds nothing.
    [path]      a file or folder, or a list of them; a ~ at the beginning stands for the home folder. In any script.
    [>= 0, < 1] the range of a number, or of each number in a list, and the only place where it is checked. In any
                script. No key takes nan or inf.
    [if lora_rank], [if not plan], [if optimizer=sgd], [if loss_type != ipo], [if context_parallel > 1]
                when the key is read, by the value of another one, in any script. Whoever sets it in vain is told so.
                A script that lacks the other key reads it always. What no tag can say is in READ_IF of conditions.py.
    [may change], ranges and conditions do not take a section's tags from a key. A section's conditions hold for each of
    its keys.

This file imports the standard library only, and little of it, because configurator.py reads it before `--help` answers.
"""

from typing import Literal, get_args


class Keys:
    # I/O [per job]
    out_dir = 'out/train'  # where checkpoints, metrics.jsonl and train.log go: one folder per run [per job, path]
    # I/O [per job, if not eval_only]
    resume: Literal['auto', 'never', 'must'] = 'auto'  # 'never': fail if out_dir holds a run; 'must': fail if not
    # I/O [per job]
    eval_interval = 500  # steps between evaluations; 0 = only after the last step [>= 0, if eval_sequences]
    eval_sequences = 160  # validation sequences, the first ones: more = less noise; 0 = none [>= 0, if eval_iters=None]
    eval_iters: int | None = None  # eval_sequences in global batches, as earlier versions counted [>= 0]
    eval_only = False  # evaluate the newest checkpoint (init_from if there is none), and stop
    log_interval = 10  # steps between log lines; 0 = only of the first and the last step [>= 0]
    trace_step = 0  # trace this step and the one before for chrome://tracing: out_dir/trace_rank*.json; 0 = off [>= 0]
    trace_memory = False  # GPU: what holds memory at trace_step, or when it runs out: out_dir/memory_rank0.pickle, ...
    keep_checkpoints = 2  # older ones are deleted; 0 = no checkpoint is written at all [>= 0]
    # I/O [per job, if keep_checkpoints]
    checkpoint_interval = 1000  # steps between checkpoints, all a crash can lose; 0 = only after the last step [>= 0]
    permanent_interval = 0  # steps between checkpoints that are never deleted, to study later; 0 = none [>= 0]
    save_errors: Literal['stop', 'continue'] = 'stop'  # if a checkpoint cannot be written: stop, or train on without it
    async_checkpoint = False  # keep training while a checkpoint is written: for large models; needs host memory
    # I/O [per job]
    dry_run = False  # print dimensions, memory per rank, batch arithmetic, FLOPs, disk, epochs and time, then stop
    gpu: str | None = None  # dry_run: plan for an H100, H200 or A100; the data may be on another machine [if dry_run]
    gpus: int | None = None  # dry_run: plan for this many ranks; None = those that are started [>= 1, if dry_run]
    measured: str | None = None  # dry_run: take the speed of an earlier run: its out_dir [per job, path, if dry_run]
    # logging [per job]
    wandb_log = False  # needs `pip install wandb`; WANDB_MODE=offline on nodes without internet
    wandb_project = 'distributed-training'  # wandb project; its team is WANDB_ENTITY [if wandb_log]
    wandb_group: str | None = None  # wandb group, to compare runs [if wandb_log]
    wandb_run_name: str | None = None  # None = the name of out_dir [if wandb_log]
    tensorboard_log = False  # write event files to out_dir/tensorboard
    # data [result]
    dataset = 'stdlib-bpe2048'  # folder in data_dir (prepare_data.py), or mixture: 'web:0.7,code:0.3' [result, per job]
    dataset_stages = ()  # shares from a step or part of a run on: ((0.9, 'web:0.3,books:0.7'),) [result, per job, >= 0]
    val_dataset: str | None = None  # validate on: 'one,two'; None = dataset's own [result, per job, if eval_sequences]
    windows: Literal['stream', 'documents'] = 'stream'  # documents: packed whole, each attends only to itself
    packing: bool | None = None  # several conversations or documents a sequence; None = if the model keeps them apart
    data_dir = 'data'  # where datasets live [result, per job, path]
    batch_size = 8  # sequences per rank and micro-step: these must fit into memory [per job, >= 1]
    global_batch_size: int | None = None  # sequences per optimizer step, of all ranks; None = batch_size * ranks [>= 1]
    block_size = 1024  # tokens per sequence [result, model, >= 1]
    # model [result, model]
    init_from = 'scratch'  # or an out_dir, a Hugging Face folder, OWNER/NAME in HF_HOME [result, per job, path]
    native = False  # run init_from in model.py, as tensor_parallel needs: GPT-2, Llama, Mistral, Qwen, GLM-4.5 [result]
    trust_remote_code = False  # run the Python that came with init_from [per job]
    arch: Literal['gpt2', 'enoki', 'llama', 'qwen3'] = 'gpt2'  # the top of model.py compares them
    heads: int | None = None  # enoki, qwen3: size, learning rate, steps and weight decay by the published rules [>= 1]
    tokens_per_parameter = 20.0  # with heads: sets max_iters; 20 = Chinchilla, more = better small model [result, > 0]
    n_layer = 12  # transformer blocks [>= 1]
    n_head = 12  # query heads [>= 1]
    n_kv_head: int | None = None  # key/value heads (grouped-query attention); None = n_head [>= 1]
    head_dim: int | None = None  # None = n_embd / n_head [>= 1]
    n_embd = 768  # width of the residual stream [>= 1]
    mlp_hidden_dim: int | None = None  # None = 4 * n_embd (gpt2, enoki), or 8/3 * n_embd to a multiple of 64 [>= 1]
    n_experts = 0  # mixture of experts (llama, qwen3): experts per block; 0 = a dense model [>= 0]
    dense_layers = 0  # first blocks without experts, mlp_hidden_dim wide; DeepSeek-V3: 3 [>= 0, if n_experts]
    experts_per_token = 2  # experts per token, chosen by the router [>= 1, if n_experts]
    expert_hidden_dim: int | None = None  # their width; None = mlp_hidden_dim / experts_per_token [>= 1, if n_experts]
    expert_groups = 1  # of consecutive experts, chosen before these; 1 = none; DeepSeek-V3: 8 [>= 1, if n_experts]
    groups_per_token = 1  # groups that a token chooses; DeepSeek-V3: 4 [>= 1, if expert_groups > 1]
    shared_expert_dim = 0  # width of one more expert, which computes every token; 0 = none [>= 0, if n_experts]
    shared_expert_gate = False  # multiply its output by a sigmoid gate per token (Qwen2-MoE) [if shared_expert_dim]
    router_scores: Literal['softmax', 'sigmoid'] = 'softmax'  # sigmoid: as DeepSeek-V3, with router_bias [if n_experts]
    router_normalize = True  # scale the weights of a token's experts so that they sum to 1 [if n_experts]
    router_scale = 1.0  # then multiply these weights by this factor; DeepSeek-V3: 2.5 [> 0, if n_experts]
    router_aux = 0.001  # weight of the routers' balancing loss; 0 = off (init_from: unless given) [may change, >= 0]
    router_z = 0.0  # weight of mean(logsumexp(router logits)^2), keeps them small (OLMoE: 0.001) [may change, >= 0]
    router_bias = 0.0  # step of a bias per expert that balances them; 0 = off (DeepSeek-V3: 0.001) [>= 0, if n_experts]
    vocab_size: int | None = None  # None = the dataset's; the embedding is padded to a multiple of 64 [>= 1]
    dropout = 0.0  # 0 for pretraining; 0.1 or more if the data is seen many times [may change, >= 0, < 1]
    bias: bool | None = None  # None = True for gpt2 (False: nanoGPT's model, exact GELU), False for the others
    tie_embeddings: bool | None = None  # the output head is the embedding; None = True for gpt2, False for the others
    rope_theta: float | None = None  # base of the rotary embedding; None = 10000 (qwen3: 1000000), or init_from's [> 0]
    yarn = []  # init_from: extend its block_size by this factor (YaRN); 4,1024 also states the block_size before [>= 1]
    attention_gate = False  # qwen3: sigmoid gate on the attention output
    window_pattern: str | None = None  # repeated over layers: S sees window_size tokens, L all, as SSSL; None = all L
    window_size: int | None = None  # tokens that an S layer of window_pattern sees, the current one included [>= 1]
    logit_softcap: float | None = None  # logits become cap * tanh(logits / cap): Gemma 2's is 30; None = off [> 0]
    parametrization: Literal['standard', 'mup', 'completep'] = 'standard'  # rates hold for wider (mup), deeper models
    base_width: int | None = None  # mup, completep: n_embd of the model on which the learning rate was tuned [>= 1]
    base_depth: int | None = None  # completep: its n_layer [>= 1]
    freeze: str | None = None  # init_from: do not train parameters whose names match this regular expression
    # lora [result, model]
    lora_rank = 0  # init_from: freeze it and train an update of this rank to each weight (LoRA); 0 = off [>= 0]
    # lora [result, model, if lora_rank]
    lora_alpha = 16.0  # the update is scaled by lora_alpha / lora_rank [> 0]
    lora_targets = 'all'  # 'all' linear layers of the blocks, ends of their names ('q_proj,v_proj'), 'all,experts'
    lora_dropout = 0.0  # on the input of its matrices; 0.05 or 0.1 if data is seen many times [may change, >= 0, < 1]
    lora_rslora = False  # scale by lora_alpha / sqrt(lora_rank) instead, for ranks of 64 or more
    modules_to_save = []  # modules that a LoRA run trains in full, by the ends of their names: 'embed_tokens,norm'
    # lora [result, model]
    frozen_dtype: Literal['float32', 'bfloat16', 'nf4'] | None = None  # of frozen weights; None = as init_from
    # optimizer [result]
    optimizer: Literal[
        'adamw',
        'adamw-decay',
        'adana',
        'adana-released',
        'dana-mk4',
        'dana-star-mk4',
        'ademamix',
        'muon',
        'sgd',
    ] = 'adamw'  # docs/optimizers.md compares them
    optimizer_dtype: Literal['float32', 'bfloat16', 'int8'] = 'float32'  # of its moments: 4, 2 or 1 bytes per number
    learning_rate = 6e-4  # peak: the first thing to tune; larger models need less [> 0]
    max_iters = 10000  # optimizer steps [>= 1]
    num_epochs: float | None = None  # passes over the training data: sets max_iters [result, per job, > 0]
    weight_decay = 0.1  # on matrices; never on embeddings, norms and biases; DANA family and heads: see omega [>= 0]
    beta1 = 0.9  # Adam: decay of the first moment [>= 0, < 1]
    beta2 = 0.95  # Adam: decay of the second moment; 0.999 for small batches [>= 0, < 1]
    grad_clip = 1.0  # global gradient norm; 0 = off [>= 0]
    lr_rule: Literal[32, 512] = 32  # with heads: use the learning-rate rule fitted at this many sequences per step
    kappa = 0.85  # DANA family: the long momentum has the weight (1 + step)^(1 - kappa) [>= 0, <= 1]
    delta = 8.0  # DANA family: moments average over the last 1/delta of the run so far [> 0]
    omega = 4.0  # weight_decay = omega / wd_ts (DANA family), with heads also omega / learning_rate / max_iters [>= 0]
    wd_ts: int | None = None  # DANA family, adamw-decay: steps until weight decay halves; None = max_iters / 10 [>= 1]
    z_loss = 0.0  # weight of mean(logsumexp(logits)^2), keeps them small; Enoki: 1e-4 [result, model, may change, >= 0]
    # schedule [result]
    lr_schedule: Literal['cosine', 'cos_inf', 'wsd', 'linear', 'constant'] = 'cosine'  # optim.py, learning_rate_at()
    warmup_iters = 100  # linear warm-up: longer if the loss jumps early [>= 0]
    lr_decay_iters: int | None = None  # None = max_iters [>= 1, if lr_schedule != constant]
    min_lr: float | None = None  # None = learning_rate / 10 [>= 0, if lr_schedule != constant]
    # system [per job]
    device = 'auto'  # 'auto', 'cpu', 'cuda', 'cuda:1'
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # of compute; auto = bfloat16 where it is fast
    matmul_dtype: Literal['float8'] | None = None  # of the blocks' matmuls; None = dtype [result, per job]
    tf32 = False  # float32 on a GPU: faster matmuls with inputs rounded to 10 bits (TensorFloat-32)
    compile: bool | None = None  # torch.compile each block; None = on CUDA
    seed = 1337  # of the initial weights, the order of the data and dropout [result, >= 0, < 4294967296]
    deterministic = False  # repeated runs are bit-equal, at a cost in speed
    activation_checkpointing: Literal['none', 'full', 'selective', 'offload'] = 'none'  # recompute: see docs/memory.md
    timeout_s = 600  # a collective that takes longer is an error, and the log names the rank that is stuck [>= 1]
    stop_before_end_s = 300  # in a Slurm job: save and exit this many seconds before its time limit; 0 = never [>= 0]
    max_failures = 5  # failed starts from the same step before a run refuses to start again; 0 = no limit [>= 0]
    max_bad_steps = 10  # steps in a row that may be skipped because loss or gradient is not finite [>= 0]
    loss_spike_guard = False  # also skip steps whose loss is 6 sigma above the mean of the last 128 [result, per job]


class TaskKeys:
    """Keys of scripts that can score a model on tasks while it trains. A model that is cut into stages cannot be."""

    # I/O [per job]
    eval_tasks = []  # task files to score the model on, as evaluate.py does: tasks/a.jsonl,b.jsonl [per job, path]
    # I/O [per job, if eval_tasks]
    eval_tasks_interval = 1000  # steps between scores; 0 = only after the last step [>= 0]
    eval_tasks_limit: int | None = None  # only this many items of each file: generating answers takes time [>= 1]
    eval_tasks_chat: bool | None = None  # write items as messages; None = if the run or its init_from learns chats


class BestKeys:
    """Keys of scripts in which all ranks agree on one val_loss. In a pool each job has its own."""

    # I/O [per job]
    keep_best = False  # also keep the checkpoint with the lowest val_loss so far, for --step=best
    patience = 0  # evaluations without a lower val_loss after which the run ends; implies keep_best; 0 = off [>= 0]


class ShardingKeys:
    """Keys of scripts that shard the model with FSDP."""

    # fsdp [per job, if strategy=fsdp]
    fsdp_impl: Literal['torch', 'manual'] = 'torch'  # PyTorch's fully_shard, or our own, fsdp_manual.py
    zero_stage = 3  # 1 (manual only) shards moments, 2 +gradients, 3 +weights; lower = gathered for longer [>= 1, <= 3]
    accumulate: Literal['unsharded', 'sharded'] = 'unsharded'  # whole gradients send less, shards need less memory
    blocks_per_unit = 1  # blocks gathered together: more = fewer, larger messages [>= 1]
    prefetch = 1  # manual: units gathered ahead of the current one; 0 = no overlap [>= 0, if fsdp_impl=manual]
    # fsdp [per job]
    cpu_offload: Literal['none', 'optimizer', 'params'] = 'none'  # keep moments or all state in host memory


class OuterKeys:
    """Keys of scripts whose replicas train alone and exchange what they have learned (DiLoCo)."""

    # diloco [result]
    num_replicas: int | None = None  # copies of the model that train alone; None = one per node [>= 1]
    inner_steps = 100  # H, steps between exchanges: more for slow links, fewer for a lower loss [>= 1]
    outer_lr = 0.7  # of the outer Nesterov step; 1 with outer_momentum=0 averages the parameters [> 0]
    outer_momentum = 0.9  # of the outer Nesterov step; 0 = plain SGD; lower it for runs of few rounds [>= 0, < 1]
    exchange_dtype: Literal['float32', 'bfloat16', 'int8', 'int4'] = 'float32'  # of what replicas send
    error_feedback = False  # send rounding errors next time (4 bytes per parameter) [if exchange_dtype != float32]
    # diloco [per job]
    outer_on_host = False  # outer parameters and momentum in host memory; with cpu_offload=params the exchange, too
    plan = False  # measure steps and link, print the cost of other inner_steps and exchange_dtypes, and train


# The choices of two keys, which optim.py implements.
OPTIMIZERS, SCHEDULES = (get_args(Keys.__annotations__[key]) for key in ('optimizer', 'lr_schedule'))

# Optimizers whose weight decay is not multiplied by the learning rate.
DANA = ('adana', 'adana-released', 'dana-mk4', 'dana-star-mk4')

# What earlier versions had: {a key, or a value of one: (whether a run with these keys used it, what to do instead)}. It
# is said to who types it, and to who goes on with a run that used it. The code of commit 83d2e81 has all of it. Like
# MOVED it is for those who come from version 0.9, and ends with 1.0.
INT4 = 'exchange_dtype=int4 with error_feedback=True reaches the same loss for about as few bytes'
GONE = {
    'top2bit': (lambda keys: keys.get('exchange_dtype') == 'top2bit', INT4),
    'exchange_k': (lambda keys: False, INT4),  # no other exchange_dtype has read it
    'error_decay': (
        lambda keys: keys.get('error_feedback') and keys.get('error_decay') not in (None, 1),
        'errors are sent whole',
    ),
    'fragment_mix': (
        lambda keys: 'fragment_mix' in keys and keys['fragment_mix'] != (0.5 if keys.get('overlap_steps') else 0),
        'it is 0.5 with overlap_steps, and 0 without',
    ),
    'coordinates': (lambda keys: False, '`python benchmarks/coordinates.py` does that'),
    'cores': (lambda keys: False, '--plan is for GPUs alone: compare layouts on CPUs with --bench'),
}

# {script: {a key that it had in earlier versions: the script that has it now, and goes on with its runs}}
MOVED = {
    'train_fsdp.py': dict.fromkeys(('context_parallel', 'tensor_parallel', 'expert_parallel'), 'train_parallel.py')
}
