"""
Write text with a trained model, from the newest checkpoint in out_dir, whichever script saved it.

    python sample.py --out_dir=out/quickstart --prompt="def "
    python sample.py --out_dir=out/quickstart --prompt=FILE:notes.txt --num_samples=1 --temperature=0
    python sample.py --help                                   # every key with its default and meaning
"""

import contextlib
import math
import os
import sys

from configurator import configure

# --- KNOBS ------------------------------------------------------------------------------------------------------------
out_dir = 'out/quickstart'  # the run whose model writes
step: int | None = None  # take the checkpoint of this step; None = the newest
data_dir: str | None = None  # where the run's dataset, and with it the tokenizer, lies; None = where the run had it
tokenizer: str | None = None  # 'bytes', a tiktoken name or a Hugging Face folder; None = the dataset's own
prompt = ''  # the text to go on from; 'FILE:path' reads it from a file; '' = the start of a document
num_samples = 3  # texts, drawn independently
max_new_tokens = 200  # length of each; an end-of-text token ends it earlier
temperature = 0.8  # below 1 prefers what is likely, above 1 flattens; 0 = always the likeliest token
top_k = 0  # draw from the k likeliest tokens only; 0 = all
top_p = 0.95  # draw from the likeliest tokens that together have this probability; 0 = all
seed = 1337  # the same seed draws the same text
device = 'auto'  # 'auto', 'cpu', 'cuda', 'cuda:1'
dtype = 'auto'  # 'auto' | 'float32' | 'bfloat16' | 'float16': of compute; auto = bfloat16 where the hardware has it
# ----------------------------------------------------------------------------------------------------------------------
config, _ = configure(globals())  # before `import torch`, so --help is quick

import torch

import checkpoint
import guard
from model import GPT, ModelConfig, sample_token
from tokenizer import load_tokenizer, tokenizer_of

guard.report_errors()
device = guard.choose_device(device, local_rank=0)
compute_dtype = guard.choose_dtype(dtype, device)


def say(line):
    """Notes go to stderr: stdout holds the text alone."""
    print(line, file=sys.stderr)


# --- CHECKPOINT -------------------------------------------------------------------------------------------------------
if step is None:
    path = checkpoint.choose(out_dir, say=say)  # a damaged one leads to the one before it, and says so
    if path is None:
        raise ValueError(f'no checkpoint in {out_dir}: train one with `python train_ddp.py CONFIG --out_dir={out_dir}`')
else:
    path = os.path.join(out_dir, 'checkpoints', f'step_{step:08d}')
    if not os.path.isdir(path):
        there = [str(int(found.rpartition('_')[2])) for found in checkpoint.checkpoints_in(os.path.dirname(path))]
        raise ValueError(f'no checkpoint of step={step} in {out_dir}, which has those of steps: {", ".join(there)}')
    damage = checkpoint.find_damage(path, say)
    if damage:
        raise ValueError(f'checkpoint {path} is damaged: {damage}; take another --step')
weights, state = checkpoint.load_weights(path)
model_config = ModelConfig(**state['identity']['model'])
with torch.device('meta'):
    model = GPT(model_config, compute_dtype)
model.to_empty(device=device)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])
model.to(compute_dtype).eval()  # each token uses every weight: cast once, not at every use
say(f'{path}: {model_config.arch}, {model.parameter_counts()["total"]:,} parameters, on {device}')

# --- PROMPT -----------------------------------------------------------------------------------------------------------
run = state['config']
if tokenizer is not None:
    text_tokenizer = load_tokenizer(tokenizer)
elif run['dataset'] == 'synthetic':
    raise ValueError(f'{out_dir} was trained on random tokens (dataset=synthetic), there is no text in them')
else:
    dataset_folder = os.path.join(data_dir or run['data_dir'], run['dataset'])
    if not os.path.exists(os.path.join(dataset_folder, 'meta.json')):
        raise ValueError(
            f'{dataset_folder}/meta.json, which names the tokenizer of {out_dir}, is missing: '
            'say where the dataset lies with --data_dir=FOLDER, or name the tokenizer with --tokenizer=NAME'
        )
    text_tokenizer = tokenizer_of(dataset_folder)
if text_tokenizer.vocab_size > model_config.vocab_size:
    raise ValueError(
        f'tokenizer {text_tokenizer.name} has {text_tokenizer.vocab_size} tokens, the model {model_config.vocab_size}: '
        'give the one it was trained with, --tokenizer=NAME'
    )
if prompt.startswith('FILE:'):
    with open(prompt.removeprefix('FILE:'), encoding='utf-8') as file:
        prompt = file.read()
if num_samples < 1:
    raise ValueError(f'num_samples={num_samples}: expected 1 or more')
prompt_tokens = text_tokenizer.encode(prompt)

# --- SAMPLE -----------------------------------------------------------------------------------------------------------


def tokens_that_begin_with(text):
    """Ids of all tokens whose text begins so. Some tokenizers have gaps in their ids (KeyError)."""
    found = []
    for token in range(text_tokenizer.vocab_size):
        with contextlib.suppress(KeyError):
            if text_tokenizer.decode([token]).startswith(text):
                found.append(token)
    return found


# "def " ends in a token of its own for the space, but in the text that was learned the space begins the next word's
# token, and after a lone one the model is lost. So take the last token back and let the first new one begin with it.
begin = text_tokenizer.decode([prompt_tokens.pop()]) if prompt.endswith(' ') else ''
prompt_tokens = prompt_tokens or [text_tokenizer.eot]  # eot stands between documents: it starts one
batch = torch.tensor([prompt_tokens] * num_samples, device=device)  # (num_samples, T)
draw = {'temperature': temperature, 'top_k': top_k, 'top_p': top_p}
draw['generator'] = torch.Generator(device).manual_seed(seed)
if begin:
    with torch.no_grad():
        logits = model(batch[:, -model_config.block_size :])[:, -1]  # (num_samples, vocab_size)
    others = torch.ones(logits.shape[-1], dtype=torch.bool, device=device)
    others[tokens_that_begin_with(begin)] = False
    batch = torch.cat((batch, sample_token(logits.masked_fill(others, -math.inf), **draw)), dim=1)
tokens = model.generate(batch, max_new_tokens, stop_token=text_tokenizer.eot, **draw)

for number, row in enumerate(tokens[:, len(prompt_tokens) :].tolist(), start=1):
    if text_tokenizer.eot in row:
        row = row[: row.index(text_tokenizer.eot)]
    row = [token for token in row if token < text_tokenizer.vocab_size]  # a vocab_size set above it leaves unused ids
    if num_samples > 1:
        print(f'--- sample {number} of {num_samples} ' + '-' * 60)
    print(prompt.removesuffix(begin) + text_tokenizer.decode(row))
