"""What the tests of train_dpo.py, train_grpo.py and train_distill.py share: how they start their runs, answers that
transformers alone writes, and a tiny Llama for TRL."""

import json
import re
from pathlib import Path

import torch
from launch import run_many

from huggingface import finetune, loading
from huggingface.pretrained import Pretrained

# --- runs -------------------------------------------------------------------------------------------------------------


def run_cases(folder, script, cases, refused, keys_of):
    """
    Start the runs of a test file, one after another in the ranks that they share.

    cases: {name: (ranks, keys)} of the script; refused: {name: (ranks, script, keys)}. keys_of(folder, out, *keys): all
    keys of a run. Returns ({name of a case: its out_dir}, {name of what is refused: what ended it}).
    """
    started = [(name, ranks, script, keys, False) for name, (ranks, keys) in cases.items()]
    started += [(name, *of_run, True) for name, of_run in refused.items()]
    errors = {}
    for nproc in sorted({ranks for _, ranks, *_ in started}):
        runs = []
        for name, ranks, of_script, keys, may_fail in started:
            out = folder / f'{"refused" if may_fail else "run"} {name}'
            arguments = keys_of(folder, out, *keys)
            if ranks == nproc:
                runs.append({'name': name, 'script': of_script, 'arguments': arguments, 'may_fail': may_fail})
        results = run_many(runs, nproc, folder)
        errors |= {name: result['error'] for name, result in results.items() if 'error' in result}
    assert not {*cases} & {*errors}, errors
    return {name: folder / f'run {name}' for name in cases}, errors


# --- answers ----------------------------------------------------------------------------------------------------------

ENDS, LONGEST = [*'ABCDEFGHIJKLMNOPQRST'], 8  # what ends an answer, and how many tokens it may have
STOP = [*ENDS, '<|im_start|>']  # the last is a special token, 257, of which a text shows nothing


def rollouts_of(out):
    return [json.loads(line) for line in Path(out, 'rollouts.jsonl').read_text().splitlines()]


def ids_of(text):
    return [*text.encode()]


def text_of(ids):
    return bytes(token for token in ids if token < 256).decode(errors='replace')


@torch.no_grad()
def written(model, prompt, generator, temperature):
    """One answer by transformers alone, without a cache: (ids, text before its end, whether it has ended)."""
    ids = []
    while len(ids) < LONGEST:
        logits = model(torch.tensor([prompt + ids])).logits[0, -1]
        probabilities, tokens = torch.softmax(logits / temperature, -1).sort(descending=True)
        ends = probabilities.cumsum(-1)
        ids.append(tokens[(ends <= torch.rand((), generator=generator) * ends[-1]).sum()].item())
        text = text_of(ids)
        if ids[-1] in (257, 258) or any(end in text for end in ENDS):
            return ids, re.split(f'[{"".join(ENDS)}]', text)[0], True
    return ids, text_of(ids), False


# --- beside TRL -------------------------------------------------------------------------------------------------------

SIZES = {'bos_token_id': None, 'eos_token_id': 63, 'pad_token_id': 0, 'vocab_size': 64, 'initializer_range': 0.1}
SIZES |= {'hidden_size': 40, 'intermediate_size': 72, 'num_hidden_layers': 3, 'num_attention_heads': 4}
SIZES |= {'num_key_value_heads': 2, 'max_position_embeddings': 64}


def llama_of_trl(seed):
    import transformers

    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).float()


def as_ours(model, folder):
    """The same model as the scripts compute it, by way of a folder."""
    model.save_pretrained(folder)
    pretrained = Pretrained(str(folder))
    with torch.device('meta'):
        ours = finetune.for_training(pretrained)
    ours.to_empty(device='cpu')
    loading.load(ours, pretrained)
    return ours


def losses_of_trl(trainer_class, config_class, folder, model, config, **more):
    """The losses of a run by one of TRL's trainers. config, more: what its configuration and the trainer itself get
    beside what all get."""
    import tokenizers
    import transformers

    losses = []

    class NotingTrainer(trainer_class):
        def log(self, logs, *args, **kwargs):
            losses.extend([logs['loss']] if 'grad_norm' in logs else [])

    words = tokenizers.models.WordLevel({str(number): number for number in range(64)}, unk_token='0')
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), eos_token='63', pad_token='0'
    )
    arguments = config_class(
        output_dir=str(folder), gradient_accumulation_steps=2, learning_rate=1e-3, lr_scheduler_type='constant',
        weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95, max_grad_norm=1.0, logging_steps=1, report_to=[],
        use_cpu=True, bf16=False, save_strategy='no', disable_tqdm=True, gradient_checkpointing=False,
        optim='adamw_torch', dataloader_pin_memory=False, **config,
    )  # fmt: skip
    NotingTrainer(model=model, args=arguments, processing_class=tokenizer, **more).train()
    return losses


def optimizer_of_trl(model):
    """That of losses_of_trl()."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)


def step_of_trl(model, opt):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()


def assert_equal_to_trl(losses, expected, close, model, theirs, weights_close):
    """Losses of each step, and the weights after the last one."""
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= close, (losses, expected)
    weights = theirs.state_dict()
    furthest = max((weights[name] - tensor).abs().max().item() for name, tensor in model.state_dict().items())
    assert furthest <= weights_close
