"""
Score a checkpoint of any train script, or a Hugging Face model, on tasks that are files on disk. Works offline.

    python evaluate.py --out_dir=out/quickstart --tasks=tasks/hellaswag.jsonl,tasks/arc_easy.jsonl
    python evaluate.py --out_dir=models/Qwen3-0.6B --tasks=tasks/mmlu.jsonl --num_fewshot=5
    torchrun --nproc_per_node=8 evaluate.py --out_dir=out/large --tasks=tasks/piqa.jsonl --shard=torch
    python evaluate.py --help                                    # every key with its default and meaning

A task is a file of JSON lines. Each line is an item, and all items of a file have the same one of these forms:
    {"context": "Question: ...\\nAnswer:", "choices": ["red", "blue"], "gold": 1}     likeliest choice: acc, acc_norm
    {"contexts": ["The cup", "The bag"], "continuation": "is too big.", "gold": 0}   likeliest context: acc
    {"context": "She opened the", "continuation": "door"}                            acc (greedy), perplexity
    {"text": "A whole document."}                                                    perplexity, bits per byte
    {"prompt": "2 + 3 =", "answer": "5", "stop": ["\\n"], "rule": "number"}           acc: is the answer written?
`python prepare_data.py --tasks=hellaswag,gsm8k` makes the files of well-known tasks. The scores are computed by the
rules of lm-evaluation-harness.

For each task the script prints a line of scores with their standard errors, and appends it to results.jsonl in out_dir.
"""

import json
import os
from typing import Literal

from conditions import say_without_effect
from configurator import configure


# --- KNOBS ------------------------------------------------------------------------------------------------------------
class Config:
    # model and tasks
    out_dir = 'out/quickstart'  # a run of any train script, or a Hugging Face folder [path]
    step: int | str | None = None  # the checkpoint of this step, or 'best' (of keep_best); None = the newest [>= 0]
    tasks = []  # files to score: --tasks=tasks/hellaswag.jsonl,tasks/arc_easy.jsonl [path]
    protocol: Literal['harness', 'core'] = 'harness'  # score by lm-evaluation-harness, or by CORE (DCLM)
    num_fewshot: int | None = None  # solved examples before each item; None = as many as the task says, often 0 [>= 0]
    limit: int | None = None  # use only this many items of each task, the first ones [>= 1]
    reward: str | None = None  # FILE.py:FUNCTION of yours judges answers to prompts, too: docs/grpo.md [path]
    apply_chat_template: bool | None = None  # write items as messages; None = if the run has learned conversations
    chat_template_kwargs = {}  # variables for the chat template: '{"enable_thinking": false}'; a row's own come first
    results: str | None = None  # file to which the scores are appended; None = results.jsonl in out_dir [path]
    samples: str | None = None  # folder for TASK.jsonl with each item's log-likelihoods or answer [path]
    # text to tokens
    data_dir: str | None = None  # data_dir with the run's dataset and its tokenizer; None = the run's own [path]
    tokenizer: str | None = None  # 'bytes', a tiktoken name or a Hugging Face folder; None = the dataset's own [path]
    block_size: int | None = None  # tokens that the model sees at once; None = as many as it has positions [>= 1]
    trust_remote_code = False  # run a Hugging Face model's own Python files if transformers has no class for it
    # system
    batch_size = 32  # choices, windows of a text, or prompts per rank and forward pass [>= 1]
    shard: Literal['none', 'torch', 'manual'] = 'none'  # shard weights over ranks, for large models
    device = 'auto'  # 'auto', 'cpu', 'cuda', 'cuda:1'
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # auto: fp32 if fine-tuned, else bf16 if fast
    timeout_s = 600  # a collective that takes longer is an error [>= 1]


# ----------------------------------------------------------------------------------------------------------------------
config, explicit = configure(Config)  # before `import torch`, so --help is quick


from evaluation import in_run
from evaluation.reward import open_reward
from layout import make_mesh
from runtime import checkpoint
from runtime import opened as models
from system import collectives, devices, errors, processes
from system.files import no_link, sha256_of
from text.control_tokens import plain

# --- PROCESSES --------------------------------------------------------------------------------------------------------
errors.report_errors(lambda: 'lower batch_size or block_size, or use --shard=torch on several ranks')
processes.end_with_parent()
devices.make_compile_caches()  # torch imports its compiler to read a checkpoint
rank, local_rank, world_size = processes.ranks_from_environment()
device = devices.choose_device(config.device, local_rank)
if not config.tasks:
    raise ValueError('no tasks: name files of them, --tasks=tasks/piqa.jsonl; docs/evaluate.md says how to get some')
devices.join_ranks(config.timeout_s, device)


def append_result(row):
    """Append a row to the results. With None, only check that the file can be written."""
    results = config.results or os.path.join(config.out_dir, 'results.jsonl')
    try:
        with open(results, 'a', encoding='utf-8', opener=None if config.results else no_link) as file:
            file.write('' if row is None else json.dumps(row) + '\n')
    except OSError as error:
        raise OSError(f'{results}: cannot be written ({error.strerror}): name another file, --results=FILE') from error


# --- MODEL AND TOKENIZER: shapes only, no weights yet -----------------------------------------------------------------
opened = models.open_model(
    config.out_dir, config.step, config.data_dir, config.tokenizer, config.trust_remote_code,
    find=lambda *name: checkpoint.with_all_ranks(checkpoint.choose_to_read, *name),
)  # fmt: skip
path, step, pretrained = opened.path, opened.state.get('step'), opened.pretrained
language = opened.language(chat_template_kwargs=config.chat_template_kwargs)
# If the configuration names no limit, the tokenizer may; 2048 is the harness's default for models without any.
longest = getattr(language.tokenizer, 'model_max_length', 1e9)
positions = opened.positions or (longest if longest < 1e9 else 2048)
compute_dtype = opened.dtype_to_compute(config.dtype, device, opened.is_tuned)
say_without_effect('evaluate.py', config, explicit, is_run=path is not None, transformers=pretrained is not None)
window = config.block_size or positions
if window > positions:
    raise ValueError(f'block_size={window}: the model has {positions} positions: use --block_size={positions} or less')

collectives.on_rank_0(append_result, None)  # fail now, not after all the work

# --- REQUESTS: read all tasks now, so that a mistake in the last one is found early -----------------------------------
options = {key: getattr(config, key) for key in ('num_fewshot', 'limit', 'protocol')}
options['as_chat'] = config.apply_chat_template
own_reward = options['reward'] = open_reward(config.reward) if config.reward else None
evaluated = in_run.Evaluation(config.tasks, language, window, pretrained, config.batch_size, device, **options)
if config.chat_template_kwargs and not any(task.is_chat for task in evaluated.tasks):
    given = f'chat_template_kwargs={config.chat_template_kwargs}'
    raise ValueError(f'{given}: no chat template is used: add --apply_chat_template, or leave them out')
if own_reward and not any(task.form == 'prompt' for task in evaluated.tasks):
    raise ValueError(f'reward={config.reward}: it judges what is written to prompts, and the tasks have none')

# --- MODEL ------------------------------------------------------------------------------------------------------------
raw_model = opened.empty(compute_dtype, device, window)
if config.shard != 'none':  # as in train_fsdp.py
    import fsdp
    import fsdp_manual

    fsdp.refuse_scalars(raw_model)
    mesh = make_mesh({'shard': world_size}, device, config.timeout_s)
if config.shard == 'manual':
    model = fsdp_manual.shard(raw_model, raw_model.blocks, mesh, compute_dtype)
elif config.shard == 'torch':
    model = fsdp.by_torch(raw_model, raw_model.blocks, mesh, compute_dtype)
else:
    model = raw_model
raw_model.to_empty(device=device)
opened.fill(raw_model)
rounded_away = None
# With native, names differ from the folder's.
if opened.is_tuned and not opened.is_native and (rank == 0 or config.shard != 'none'):
    from huggingface import rounding

    rounded_away = rounding.line_before_casting(
        raw_model, opened.state, compute_dtype, is_sharded=config.shard != 'none'
    )
if config.shard == 'none':
    devices.cast_parameters(raw_model, compute_dtype)  # once, not at every use
parameters = raw_model.parameter_counts()['total']


def say(line):
    if rank == 0:
        print(line, flush=True)


where = f'{window} tokens; {world_size} x {device.type}'
say(f'{path or config.out_dir}: {opened.arch}, {parameters:,} parameters, {where}')
for note in evaluated.notes:
    say(note)
if rounded_away:
    say(rounded_away)
if pretrained and pretrained.frozen_rounding != 'float32':
    say(f'LoRA is beside what it was trained beside: {pretrained.weights_folder} in {pretrained.frozen_rounding}')


# --- EVALUATE ---------------------------------------------------------------------------------------------------------
def write_samples(task, found):
    """Write each item's log-likelihoods, or the model's answer with its scores, in the order of the task's file."""
    os.makedirs(config.samples, exist_ok=True)
    with open(os.path.join(config.samples, f'{task.name}.jsonl'), 'w', encoding='utf-8') as file:
        for item, item_results in zip(task.items, found, strict=True):
            if task.form == 'prompt':
                answers = {'answer': item.rule.answers} if item.rule else {}
                row = {'prompt': plain(item.pairs[0][0]), **answers, **item_results}
            else:
                nats, greedy = zip(*item_results, strict=True)
                pairs = [(plain(context), answer) for context, answer in item.pairs]
                row = {'pairs': pairs, 'gold': item.gold, 'nats': nats, 'greedy': greedy}
            file.write(json.dumps(row) + '\n')


centered = []  # one score per task, with protocol=core
for file, (task, numbers, line, found) in zip(config.tasks, evaluated.run(model, bars=True), strict=True):
    say(line)
    centered += [numbers['centered']] if config.protocol == 'core' else []
    if rank == 0:
        row = {'task': task.name, 'model': config.out_dir, 'step': step, 'num_fewshot': task.num_fewshot}
        row |= {'protocol': task.protocol, 'items': len(task.items), 'dtype': str(compute_dtype).removeprefix('torch.')}
        row |= {'chat_template': True} if task.is_chat else {}
        row |= {'reward_function': config.reward, 'reward_sha256': own_reward.sha256} if own_reward else {}
        append_result({**row, 'sha256': sha256_of(file), **numbers})
        if config.samples:
            write_samples(task, found)
if centered:
    say(f'CORE: {sum(centered) / len(centered):.4f}, the mean of centered over {len(centered)} tasks')
processes.leave()
