"""
Write text with a trained model: the newest checkpoint of a run of any train script, or a Hugging Face folder.

    python sample.py --out_dir=out/quickstart --prompt="def "
    python sample.py --out_dir=out/quickstart --prompt=FILE:notes.txt --num_samples=1 --temperature=0
    python sample.py --out_dir=models/my-llama --prompt="def "       # written by export_model.py, or from the hub
    python sample.py --out_dir=out/sft_chat                          # a conversation in the terminal
    python sample.py --out_dir=out/sft_chat --web                    # or in the browser
    python sample.py --out_dir=out/sft_chat --prompt="What is a shard?" --system="Be brief." --temperature=0
    python sample.py --out_dir=out/sft_chat --prompts=questions.jsonl --batch_size=32 > answers.jsonl
    python sample.py --help                                          # every key with its default and meaning

A run that was fine-tuned on conversations gives answers: the prompt becomes a user's message in its tokenizer's chat
template, and only the answer goes to stdout. Any other model continues the prompt, unless it has a chat template and
--chat makes the prompt a message. If the model gives answers and there is no prompt, messages come from the terminal,
from a pipe, or with --web from a page in the browser, and the model remembers the conversation. In a terminal text
appears token by token; of several samples the first does.
"""

import json
import math
import os
import sys
from typing import Literal

from conditions import say_without_effect
from configurator import configure


# --- KNOBS ------------------------------------------------------------------------------------------------------------
class Config:
    # model
    out_dir = 'out/quickstart'  # a run, or a Hugging Face folder, or OWNER/NAME in the hub's local cache [path]
    step: int | str | None = None  # the checkpoint of this step, or 'best' (of keep_best); None = the newest [>= 0]
    data_dir: str | None = None  # data_dir with the run's dataset and its tokenizer; None = the run's own [path]
    tokenizer: str | None = None  # 'bytes', a tiktoken name or a Hugging Face folder; None = the dataset's own [path]
    trust_remote_code = False  # run a model's own Python files if transformers has no class for it
    # prompt
    prompt = ''  # the text to continue; 'FILE:path' reads it from a file; '' = the start of a document
    prompts: str | None = None  # .jsonl with {"prompt", "system"} or {"messages", "tools"} a line; adds "answer" [path]
    chat: bool | None = None  # the prompt is a message to answer; None = if the run has learned conversations
    system: str | None = (
        None  # system message; part of the user's message if the template refuses one, or it was in the data
    )
    tools: Literal['calculator'] | None = None  # answers `=37*58` in a turn of the tool, and the model goes on
    web: bool | int = False  # a page in the browser, on a free port of this machine, or --web=8080 [>= 0, <= 65535]
    chat_template_kwargs = {}  # variables for the chat template: '{"enable_thinking": false}'; a row's own come first
    # sampling
    num_samples: int | None = None  # texts per prompt; None = 3, or 1 with chat, prompts or temperature=0 [>= 1]
    batch_size = 16  # texts that are generated at the same time [>= 1]
    max_new_tokens = 200  # the most tokens of a text; an end-of-text token ends it earlier [>= 1]
    temperature = 0.8  # below 1 favors likely tokens, above 1 evens them out; 0 = always the likeliest token [>= 0]
    # sampling [if temperature]
    top_k = 0  # draw from the k likeliest tokens only; 0 = all [>= 0]
    top_p = 0.95  # draw from the fewest likeliest tokens that together have this probability; 0 = all [>= 0, <= 1]
    seed = 1337  # the same seed gives the same text, since each sample of a prompt has its own random numbers [>= 0]
    # sampling
    show_ids = False  # also print token ids: on stderr, or with prompts as "prompt_ids" and "answer_ids"
    device = 'auto'  # 'auto', 'cpu', 'cuda', 'cuda:1'
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # auto: fp32 if fine-tuned, else bf16 if fast


# ----------------------------------------------------------------------------------------------------------------------
config, explicit = configure(Config)  # before `import torch`, so --help is quick

import torch

from evaluation import chat, prompts, tools
from model import generator_of
from runtime import checkpoint
from runtime import opened as models
from system import devices, errors

errors.report_errors(lambda: 'lower batch_size', prints_result=True)
devices.make_compile_caches()  # torch imports its compiler to read a checkpoint
config.device = devices.choose_device(config.device, local_rank=0)
torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN would plan anew for every length, so for every token


def say(line):
    """Print a note to stderr, so that stdout has nothing but the text."""
    print(line, file=sys.stderr, flush=True)


# --- PROMPTS ----------------------------------------------------------------------------------------------------------
if config.prompt and config.prompts is not None:
    raise ValueError('prompt and prompts are both given: leave one out')
if config.prompt.startswith('FILE:'):
    with open(os.path.expanduser(config.prompt.removeprefix('FILE:')), encoding='utf-8-sig') as file:
        config.prompt = file.read()
rows = [{'prompt': config.prompt}] if config.prompts is None else prompts.read_rows(config.prompts)

# --- MODEL AND TOKENIZER: without weights yet -------------------------------------------------------------------------
opened = models.open_model(
    config.out_dir, config.step, config.data_dir, config.tokenizer, config.trust_remote_code,
    find=lambda *name: checkpoint.choose_to_read(*name, say),
)  # fmt: skip
language = opened.language(chat_template_kwargs=config.chat_template_kwargs)
is_of_transformers = bool(opened.pretrained or not opened.path)
say_without_effect('sample.py', config, explicit, transformers=is_of_transformers, is_run=opened.path is not None)
positions = opened.pretrained and opened.pretrained.positions or math.inf  # a GPT of model.py drops the older half

# --- PROMPTS AS IDS ---------------------------------------------------------------------------------------------------
chat_of, notes = language.chat_for('chat', config.chat)
config.chat = chat_of is not None
if not config.chat:
    given = {key: getattr(config, key) for key in ('system', 'chat_template_kwargs', 'tools', 'web')}
    given = [f'{key}={value!r}' for key, value in given.items() if value]
    given += [] if all(map(prompts.is_text, rows)) else ['a row with messages, a system message or tools']
    has, none = '--chat makes a message of it', 'there is no template for messages; leave it out'
    if given:
        raise ValueError(
            f'{given[0]}: a text is continued here, not answered: {has if language.has_template else none}'
        )
    for note in notes:
        say(note)
is_conversation = config.chat and config.prompts is None and 'prompt' not in explicit
if config.web and not is_conversation:
    raise ValueError(f'web={config.web}: messages come from the page: leave prompt and prompts out')
if config.tools:
    question = {'messages': [{'role': 'user', 'content': 'What is 37 times 58?'}]}
    tools.ids_of_result(language, question, '2146')  # raises if the template cannot write it
if is_conversation and (config.num_samples or 1) > 1:
    raise ValueError(f'num_samples={config.num_samples}: in a conversation there is one answer; give a --prompt')
if not config.temperature:
    config.num_samples = 1
config.num_samples = config.num_samples or (1 if config.chat or config.prompts is not None else 3)
asked, conversations = [], []  # for each row a Prompt, and what it was made of
for number, row in enumerate(() if is_conversation else rows, start=1):
    name = 'the prompt' if config.prompts is None else f'prompt {number}'
    conversations.append(prompts.conversation_to_answer(row, config.system, name) if config.chat else None)
    if config.chat:
        asked.append(language.prompt_of_chat(conversations[-1]))
    else:
        asked.append(language.prompt_of(row['prompt']))
    prompts.refuse_what_does_not_fit(asked[-1], name, language, positions, opened.vocab_size)

# --- WEIGHTS ----------------------------------------------------------------------------------------------------------
model = opened.to_generate(config.dtype, config.device, say)
parameters = sum(parameter.numel() for parameter in model.parameters())
say(f'{opened.path or opened.folder}: {opened.arch}, {parameters:,} parameters, on {config.device}')

# --- SAMPLE -----------------------------------------------------------------------------------------------------------
how = {'temperature': config.temperature, 'top_k': config.top_k, 'top_p': config.top_p}


def random_numbers(number, sample=0):
    """The generator of one sample of one prompt, which does not depend on what else is in the batch."""
    return generator_of(config.seed, f'prompt {number}, sample {sample}')


def printed(number, sample, new):
    """What is printed of one text. new: the ids that follow the prompt."""
    head = f'--- sample {sample + 1} of {config.num_samples} ' + '-' * 60 + '\n' if config.num_samples > 1 else ''
    return head + ('' if config.chat else config.prompt) + language.text_of(asked[number], new)


def write(number, sample, new, calls, shown):
    """Print one text, or one line of JSON. calls: of tools, before these ids. shown: what is printed already."""
    prompt, ids = asked[number], [*(token for call in calls for token in call.ids), *new]
    if config.prompts is None:
        print(printed(number, sample, new)[len(shown) :])
        if config.show_ids:
            say(f'ids of the prompt: {prompt.ids}\nids of the text: {ids}')
        return
    more = {'turns': [message for call in calls for message in call.messages]} if config.tools else {}
    more |= {'answer': language.text_of(prompt, new)}
    more |= {'prompt_ids': prompt.ids, 'answer_ids': ids} if config.show_ids else {}
    print(json.dumps({**rows[number], **more}, ensure_ascii=False), flush=True)


how |= {'max_new_tokens': config.max_new_tokens, 'tools': config.tools, 'positions': positions}
if is_conversation:
    options = {'generator_of': random_numbers, 'show_ids': config.show_ids}
    if config.web:
        from evaluation import web

        about = f'{opened.path or opened.folder}: {opened.arch}, {parameters:,} parameters'
        web.serve(model, language, config.system, opened.vocab_size, config.web, about, say, **options, **how)
    else:
        chat.converse(model, language, config.system, say, **options, **how)
texts = [(number, sample) for number in range(len(asked)) for sample in range(config.num_samples)]
is_watched = config.prompts is None and sys.stdout.isatty()  # then the first text of a batch appears as it comes
for first in range(0, len(texts), config.batch_size):
    batch = texts[first : first + config.batch_size]
    options = {'generators': [random_numbers(*text) for text in batch], 'first': [asked[n].first for n, _ in batch]}
    both = [conversations[number] for number, _ in batch], [asked[number] for number, _ in batch]
    stream = prompts.Stream(lambda ids, text=batch[0]: printed(*text, ids))
    new, calls = [[] for _ in batch], [[] for _ in batch]
    for row, token, call in tools.stream_batch(model, language, *both, **options, **how):
        if call:
            calls[row].append(call)
            if config.prompts is None:
                say(call.line)
            continue
        new[row].append(token)
        if is_watched and row == 0:
            print(stream.add(token), end='', flush=True)
    for place, text in enumerate(batch):
        write(*text, new[place], calls[place], '' if place else stream.shown)
