"""
Write text with a trained model, from the newest checkpoint in out_dir, whichever script saved it.

    python sample.py --out_dir=out/quickstart --prompt="def "
    python sample.py --out_dir=out/quickstart --prompt=FILE:notes.txt --num_samples=1 --temperature=0
    python sample.py --out_dir=out/sft_chat --prompt="What is a shard?" --system="Be brief." --temperature=0
    python sample.py --out_dir=out/sft_chat --prompts=questions.jsonl > answers.jsonl
    python sample.py --help                                   # every key with its default and meaning

A model that was fine-tuned on conversations answers: the prompt is a user's message in the template of its tokenizer,
which lies in out_dir/model, and stdout has the answer alone. Any other model goes on from the prompt.
"""

import contextlib
import itertools
import json
import math
import os
import sys
from typing import Literal

from configurator import configure


# --- KNOBS ------------------------------------------------------------------------------------------------------------
class Config:
    out_dir = 'out/quickstart'  # the run whose model writes [path]
    step: int | str | None = None  # take the checkpoint of this step, or the 'best' (keep_best); None = the newest
    data_dir: str | None = None  # where the run's dataset, and its tokenizer, lies; None = where the run had it [path]
    tokenizer: str | None = None  # 'bytes', a tiktoken name or a Hugging Face folder; None = the dataset's own [path]
    trust_remote_code = False  # run the Python files of a fine-tuned model, where transformers has no class for it
    prompt = ''  # the text to go on from; 'FILE:path' reads it from a file; '' = the start of a document
    prompts: str | None = None  # a .jsonl file, {"prompt": ...} a line; stdout gets {"prompt", "answer"} lines [path]
    chat: bool | None = None  # the prompt is a message to answer; None = where the model has learned conversations
    system: str | None = None  # the system message before it; begins the prompt where the template refuses one
    num_samples: int | None = None  # texts a prompt, drawn independently; None = 3, or 1 with chat or prompts
    max_new_tokens = 200  # length of each; an end-of-text token ends it earlier
    temperature = 0.8  # below 1 prefers what is likely, above 1 flattens; 0 = always the likeliest token
    top_k = 0  # draw from the k likeliest tokens only; 0 = all
    top_p = 0.95  # draw from the likeliest tokens that together have this probability; 0 = all
    seed = 1337  # the same seed draws the same text
    device = 'auto'  # 'auto', 'cpu', 'cuda', 'cuda:1'
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # auto: float32 if fine-tuned, else bfloat16


# ----------------------------------------------------------------------------------------------------------------------
config, _ = configure(Config)  # before `import torch`, so --help is quick

import torch

import data
from evaluation import sampling
from huggingface import finetune, native, rounding
from model import GPT, ModelConfig
from runtime import checkpoint, errors, processes
from text.conversations import DATE, fold_system_messages
from text.tokenizer import load_transformers_tokenizer, tokenizer_of_run

errors.report_errors()
config.device = processes.choose_device(config.device, local_rank=0)
compute_dtype = processes.choose_dtype(config.dtype, config.device)
torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN makes a plan for every new length, that is for every token


def say(line):
    """Notes go to stderr: stdout holds the text alone."""
    print(line, file=sys.stderr)


# --- PROMPTS ----------------------------------------------------------------------------------------------------------


def read_prompts(path):
    """The prompts of a .jsonl file. Raises ValueError with the number of a line that has none."""
    found = []
    with open(path, encoding='utf-8-sig') as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                text = row['prompt']
            except (ValueError, LookupError, TypeError):
                text = None
            if text is not None and 'system' in row:
                raise ValueError(f'{path}, line {number}: a system message is not read here; --system is for all lines')
            if not isinstance(text, str):
                raise ValueError(f'{path}, line {number}: expected {{"prompt": "TEXT"}}, given {line.strip()[:60]}')
            found.append(text)
    return found


if config.prompt and config.prompts is not None:
    raise ValueError('prompt and prompts are both given: leave one out')
if config.prompt.startswith('FILE:'):
    with open(os.path.expanduser(config.prompt.removeprefix('FILE:')), encoding='utf-8-sig') as file:
        config.prompt = file.read()
texts = [config.prompt] if config.prompts is None else read_prompts(config.prompts)
if config.num_samples is not None and config.num_samples < 1:
    raise ValueError(f'num_samples={config.num_samples}: expected 1 or more')
if config.temperature < 0 or config.top_k < 0 or not 0 <= config.top_p <= 1:
    given = f'temperature={config.temperature}, top_k={config.top_k}, top_p={config.top_p}'
    raise ValueError(f'{given}: expected temperature and top_k of 0 or more, and top_p from 0 to 1')

# --- CHECKPOINT -------------------------------------------------------------------------------------------------------
path = checkpoint.choose_to_read(config.out_dir, config.step, say)
weights, state = checkpoint.load_weights(path)
run = state['config']
dataset_folder = data.folder_of(run, config.data_dir)
is_fine_tuned = finetune.is_fine_tuned(state)
if state['config'].get('native'):
    weights = native.weights_for_transformers(weights, state)

# --- MODEL AND TOKENIZER ----------------------------------------------------------------------------------------------


def find_stop_tokens():
    """Ids of the tokens that end a text, as the model's folder names them, and of the one that ends an answer."""
    named = [text_tokenizer.eos_token_id, getattr(pretrained.config.get_text_config(), 'eos_token_id', None)]
    with contextlib.suppress(OSError):  # there is no generation_config.json
        named.append(transformers.GenerationConfig.from_pretrained(pretrained.folder).eos_token_id)
    found = {token for ids in named for token in (ids if isinstance(ids, list) else [ids]) if token is not None}
    if config.chat:  # where a model without a template was given one, its folder names the end of a text alone
        conversation = [{'role': 'user', 'content': 'Question'}, {'role': 'assistant', 'content': 'Answer'}]
        behind = render(conversation).partition('Answer')[2].strip()
        following = text_tokenizer.encode(behind, add_special_tokens=False)[:1]
        found |= {token for token in following if text_tokenizer.added_tokens_decoder.get(token)}
    return sorted(found)


def render(messages, **options):
    """What the chat template writes. System messages that it refuses go to the user, as prepare_data.py folds them."""
    try:
        return text_tokenizer.apply_chat_template(messages, tokenize=False, date_string=DATE, **options)
    except Exception as error:  # a template may raise anything
        folded = fold_system_messages(messages)
        if folded != messages:
            return render(folded, **options)
        raise ValueError(f'the chat template in {pretrained.folder} refuses: {errors.one_line(error)}') from error


if is_fine_tuned:
    if config.tokenizer is not None:
        raise ValueError(f'tokenizer={config.tokenizer}: a fine-tuned model has its own; leave it out')
    transformers = finetune.transformers_offline()
    transformers.logging.set_verbosity_error()
    pretrained = finetune.Pretrained.from_run(config.out_dir, state, config.trust_remote_code)
    text_tokenizer = load_transformers_tokenizer(pretrained.folder, config.trust_remote_code)
    if config.chat and not text_tokenizer.chat_template:
        raise ValueError(f'chat=True: the tokenizer in {pretrained.folder} has no chat template; leave --chat out')
    if config.chat is None:
        config.chat = bool(run.get('packed') and text_tokenizer.chat_template)  # it has learned conversations
    stop_tokens = find_stop_tokens()
    model = finetune.for_inference(pretrained, weights)
    compute_dtype = rounding.dtype_to_compute(config.dtype, config.device, pretrained, is_tuned=True)
    if rounded_away := rounding.line_before_casting(model, state, config.dtype, compute_dtype):
        say(rounded_away)
    for parameter in model.parameters():  # not .to(compute_dtype): it would round RoPE's frequencies, too
        parameter.data = parameter.data.to(config.device, compute_dtype)
    model.to(config.device)
    model.generation_config = transformers.GenerationConfig()  # only the knobs above decide
else:
    for key, value in (('chat', config.chat), ('system', config.system)):
        if value:
            raise ValueError(f'{key}={value}: the model was trained from scratch, on text alone: leave --{key} out')
    model_config = ModelConfig(**state['identity']['model'])
    with torch.device('meta'):
        model = GPT(model_config, compute_dtype)
    model.to_empty(device=config.device)
    weights.setdefault('head.weight', weights['embed.weight'])  # a checkpoint holds tied weights once
    model.load_state_dict(weights)
    model.to(compute_dtype).eval()  # each token uses every weight: cast once, not at every use
    text_tokenizer = tokenizer_of_run(dataset_folder, model_config.vocab_size, config.tokenizer)
del weights
parameters = sum(parameter.numel() for parameter in model.parameters())
say(f'{path}: {state["identity"]["model"]["arch"]}, {parameters:,} parameters, on {config.device}')

if config.chat and not all(text.strip() for text in texts):
    raise ValueError('an empty prompt: give the message to answer with --prompt="TEXT", or --chat=False')
if config.system is not None and not config.chat:
    raise ValueError(f'system={config.system!r}: the prompt is taken as text here; --chat makes a message of it, too')
if config.num_samples is None:
    config.num_samples = 1 if config.chat or config.prompts is not None else 3

# --- SAMPLE -----------------------------------------------------------------------------------------------------------


def tokens_that_begin_with(text):
    """Ids of all tokens whose text begins so."""
    return [token for token in range(text_tokenizer.vocab_size) if text_tokenizer.decode([token]).startswith(text)]


def continue_natively(text):
    """num_samples texts that go on from this one, by model.py."""
    tokens = text_tokenizer.encode(text)
    # "def " ends in a token of its own for the space, but in the text that was learned the space begins the token of
    # the next word, and after a lone one the model is lost. So take it back and let the first new token begin with it.
    begin = text_tokenizer.decode([tokens.pop()]) if text.endswith(' ') else ''
    # As in training: what the tokenizer puts before a text, or where that is nothing, eot, which ends the one before.
    tokens = [*text_tokenizer.bos, *tokens] or [text_tokenizer.eot]
    batch = torch.tensor([tokens] * config.num_samples, device=config.device)  # (num_samples, T)
    draw = {'temperature': config.temperature, 'top_k': config.top_k, 'top_p': config.top_p}
    draw['generator'] = torch.Generator(config.device).manual_seed(config.seed)
    if begin:
        with torch.no_grad():
            logits = model(batch[:, -model_config.block_size :])[:, -1]  # (num_samples, vocab_size)
        others = torch.ones(logits.shape[-1], dtype=torch.bool, device=config.device)
        others[tokens_that_begin_with(begin)] = False
        batch = torch.cat((batch, sampling.sample_token(logits.masked_fill(others, -math.inf), **draw)), dim=1)
    batch = sampling.generate(model, batch, config.max_new_tokens, stop_token=text_tokenizer.eot, **draw)
    rows = without_end(batch[:, len(tokens) :].tolist(), [text_tokenizer.eot])
    # A vocab_size set above the tokenizer's leaves unused ids.
    rows = [[token for token in row if token < text_tokenizer.vocab_size] for row in rows]
    return [text_tokenizer.decode(row).removeprefix(begin) for row in rows]


def without_end(rows, stop_tokens):
    """Lists of tokens, each up to its first stop token."""
    return [list(itertools.takewhile(lambda token: token not in stop_tokens, row)) for row in rows]


def generate(tokens):
    """num_samples lists of tokens that go on from these, by transformers, without the token that ended them."""
    positions = getattr(pretrained.config.get_text_config(), 'max_position_embeddings', None) or math.inf
    if len(tokens) >= positions:
        raise ValueError(f'the prompt has {len(tokens)} tokens, the model {positions} positions: shorten it')
    if (largest := max(tokens)) >= pretrained.vocab_size:  # tokenizers may have more tokens than models
        spelled, rows = text_tokenizer.decode([largest]), pretrained.vocab_size
        raise ValueError(f'the prompt spells the token {spelled!r} ({largest}), the model has {rows}: leave it out')
    options = {'do_sample': config.temperature > 0, 'eos_token_id': stop_tokens or None}
    if config.temperature > 0:
        options |= {'temperature': config.temperature, 'top_k': config.top_k, 'top_p': config.top_p or 1.0}
    batch = torch.tensor([tokens] * config.num_samples, device=config.device)  # (num_samples, T)
    torch.manual_seed(config.seed)
    batch = model.generate(
        batch,
        attention_mask=torch.ones_like(batch),
        max_new_tokens=min(config.max_new_tokens, positions - len(tokens)),
        pad_token_id=stop_tokens[0] if stop_tokens else 0,  # it fills rows that have ended
        **options,
    )
    return without_end(batch[:, len(tokens) :].tolist(), stop_tokens)


def continue_text(text):
    """num_samples texts that go on from this one, by transformers."""
    tokens = text_tokenizer(text).input_ids
    if tokens and tokens[-1] == text_tokenizer.eos_token_id:
        tokens.pop()  # some tokenizers end every text
    starts = [text_tokenizer.eos_token_id, text_tokenizer.bos_token_id]  # the end of a document starts the next one
    tokens = tokens or [token for token in starts if token is not None][:1]
    if not tokens:
        raise ValueError('an empty prompt, and the tokenizer has no token that starts a text: give a --prompt')
    before = text_tokenizer.decode(tokens, skip_special_tokens=True)
    # Decoded with the prompt: some tokenizers drop the space that a text begins with.
    texts = [text_tokenizer.decode(tokens + row, skip_special_tokens=True) for row in generate(tokens)]
    return [text.removeprefix(before) for text in texts]


def answer(text):
    """num_samples answers to a user's message."""
    messages = [] if config.system is None else [{'role': 'system', 'content': config.system}]
    written = render([*messages, {'role': 'user', 'content': text}], add_generation_prompt=True)
    rows = generate(text_tokenizer.encode(written, add_special_tokens=False))  # the template has written them
    return [text_tokenizer.decode(row, skip_special_tokens=True).strip() for row in rows]


for text in texts:
    found = answer(text) if config.chat else continue_text(text) if is_fine_tuned else continue_natively(text)
    for number, new in enumerate(found, start=1):
        if config.prompts is not None:
            print(json.dumps({'prompt': text, 'answer': new}, ensure_ascii=False), flush=True)
            continue
        if config.num_samples > 1:
            print(f'--- sample {number} of {config.num_samples} ' + '-' * 60)
        print(new if config.chat else text + new)
