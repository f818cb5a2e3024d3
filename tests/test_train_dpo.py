"""train_dpo.py: the losses beside formulas, a plain loop of transformers and TRL; layouts, resumed runs, refusals."""

import copy
import json
import math
import random
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from chats import messages_of, write_rows
from fuzzing.cases import small_tokenizer
from launch import TINY_MODEL, TINY_RUN, fork_script, function_of, refusals, run_forked, run_many
from outputs import as_of_step, assert_same_rows, assert_same_weights, column, complete, metrics, weights_of
from post_training import (
    as_ours,
    assert_equal_to_trl,
    llama_of_trl,
    losses_of_trl,
    optimizer_of_trl,
    run_cases,
    step_of_trl,
)
from precision import TIMES, apart, assert_as_close_to_float64, assert_same_run, times_further
from prepared import error_of, meta_of, prepare, tokens_of
from pretrained import VOCABULARY, save_model
from short import slow_but
from tokenizers import Tokenizer

import data
import logprobs
from dataset.shards import FIRST, LEARNED
from huggingface import finetune, loading
from huggingface.pretrained import Pretrained
from logprobs import document_logps, token_logps
from loss import LogitsOf
from text.chat_rows import pair_of
from text.conversations import TextEncoder, with_one_prompt
from text.language import TransformersLanguage
from text.tokenizer import FileTokenizer, tokenizer_of

SEED, BLOCK, STEPS = 1337, 192, 4
RUN = [
    f'--seed={SEED}',
    f'--block_size={BLOCK}',
    '--global_batch_size=6',
    '--batch_size=1',
    f'--max_iters={STEPS}',
    '--warmup_iters=0',
]
RUN += ['--device=cpu', '--dtype=float32', '--learning_rate=1e-3', '--lr_schedule=constant', '--weight_decay=0']
RUN += ['--log_interval=1', '--eval_interval=2', '--eval_sequences=8', '--checkpoint_interval=2', '--compile=False']
# As FLOOR, in bf16. A loss is the mean over a few hundred tokens, each rounded by half an eps, and these average out to
# about this.
FLOOR_IN_HALF = torch.finfo(torch.bfloat16).eps / 16
FACTS = 'loss grad_norm rewards/chosen rewards/rejected rewards/margins logps/chosen logps/rejected'.split()


def losses_of_pairs(loss_type, beta=0.1, label_smoothing=0.0, simpo_gamma=1.375, sft_weight=0.0):
    keys = {'loss_type': loss_type, 'beta': beta, 'label_smoothing': label_smoothing}
    config = SimpleNamespace(**keys, simpo_gamma=simpo_gamma, sft_weight=sft_weight)
    return function_of('train_dpo.py', 'losses_of_pairs', config=config)


def rows_of_pairs(n, seed=0):
    draw = random.Random(seed)

    def answer(letter):
        return letter * draw.choice((1, 5, 60)) + str(draw.randint(0, 999))  # one pair in a window, or two

    return [{'prompt': f'q{number}', 'chosen': answer('g'), 'rejected': answer('b')} for number in range(n)]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A tiny Llama, and 'pairs', prepared with its tokenizer, whose rows are rows_of_pairs(90); 'chats' of the same."""
    folder = tmp_path_factory.mktemp('dpo')
    save_model(folder / 'llama', 'llama', max_position_embeddings=BLOCK)
    save_model(folder / 'wide', 'llama_64', max_position_embeddings=BLOCK)  # nf4 has blocks of 64 weights
    rows = rows_of_pairs(90)
    save_model(folder / 'images', 'gemma3')
    write_rows(folder / 'pairs.jsonl', [*rows, {'prompt': 'q', 'chosen': 'a', 'rejected': 'a'}])
    options = [f'--tokenizer={folder}/llama', '--val_fraction=0.2', '--num_proc=1']
    said = prepare(folder, '--pairs', f'--dataset={folder}/pairs.jsonl', '--name=pairs', *options).stdout
    assert 'rows whose chosen and rejected answers are the same, left out (1)' in said
    assert '【g' in said and '<|im_end|>】' in said and said.index('【g') < said.index('【b')
    assert f'config/dpo_chat.py --strategy=fsdp --init_from={folder}/llama ' in said
    shutil.copytree(folder / 'data' / 'pairs', folder / 'data' / 'again')
    write_rows(folder / 'chats.jsonl', [{'prompt': row['prompt'], 'completion': row['chosen']} for row in rows])
    prepare(folder, f'--dataset={folder}/chats.jsonl', '--name=chats', *options)
    return folder


def keys_of(folder, out, *more):
    more = [key.replace('FOLDER', str(folder)) for key in more]
    return [
        *RUN,
        f'--init_from={folder}/llama',
        f'--data_dir={folder}/data',
        '--dataset=pairs',
        f'--out_dir={out}',
        *more,
    ]


# --- the losses -------------------------------------------------------------------------------------------------------


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


@pytest.mark.parametrize('smoothing', [0.0, 0.2])
@pytest.mark.parametrize('loss_type', ['sigmoid', 'sigmoid_norm', 'ipo', 'simpo'])
def test_losses_are_those_of_the_papers(loss_type, smoothing):
    draw = torch.Generator().manual_seed(1)
    logps, reference = (torch.rand(5, 2, generator=draw, dtype=torch.float64) * -20 for _ in range(2))
    n = torch.randint(1, 9, (5, 2), generator=draw).double()
    beta, gamma, weight = 0.3, 0.7, 0.25
    found = losses_of_pairs(loss_type, beta, smoothing, gamma, weight)(logps, reference, n)
    for loss, now, before, tokens in zip(*(part.tolist() for part in (found, logps, reference, n)), strict=True):
        gained = [one - other for one, other in zip(now, before, strict=True)]
        per_token, of_now = ([value / m for value, m in zip(values, tokens, strict=True)] for values in (gained, now))
        ahead = {
            'sigmoid': beta * (gained[0] - gained[1]),
            'sigmoid_norm': beta * (per_token[0] - per_token[1]),
            'simpo': beta * (of_now[0] - of_now[1]) - gamma,
            'ipo': per_token[0] - per_token[1],
        }[loss_type]
        expected = -(1 - smoothing) * log_sigmoid(ahead) - smoothing * log_sigmoid(-ahead)
        if loss_type == 'ipo':
            expected = (ahead - 1 / (2 * beta)) ** 2
        assert loss == pytest.approx(expected - weight * of_now[0], rel=1e-12)


def test_what_each_loss_begins_with():
    logps, n = torch.full((3, 2), -7.0), torch.tensor([[2.0, 5.0]] * 3)
    for loss_type, beta, begin in (('sigmoid', 0.1, math.log(2)), ('sigmoid_norm', 5, math.log(2)), ('ipo', 0.1, 25)):
        assert losses_of_pairs(loss_type, beta)(logps, logps, n).tolist() == pytest.approx([begin] * 3, rel=1e-6)


# --- beside a plain loop ----------------------------------------------------------------------------------------------


def text_of(row, which):
    return [f'<|im_start|>user\n{row["prompt"]}<|im_end|>\n<|im_start|>assistant\n', f'{row[which]}<|im_end|>']


def ids_of(text):
    """By hand: the tokenizer of save_model() knows bytes and three special tokens."""
    for number, special in enumerate(('<|endoftext|>', '<|im_start|>', '<|im_end|>')):
        text = text.replace(special, chr(0xE000 + number))
    return [256 + ord(letter) - 0xE000 if ord(letter) >= 0xE000 else ord(letter) for letter in text]


def pairs_of_steps(folder):
    """For each step the rows of its pairs, found by the tokens in the windows that the run reads."""
    places = {}
    for row in rows_of_pairs(90):
        chosen, rejected = (ids_of(''.join(text_of(row, which)))[:-1] for which in ('chosen', 'rejected'))
        places[(*chosen, -1, *rejected)] = row
    keys = {'dataset': 'pairs', 'data_dir': f'{folder}/data', 'dataset_stages': (), 'block_size': BLOCK}
    mixture = data.open_mixture({**keys, 'vocab_size': VOCABULARY, 'windows': 'stream'}, 'train')
    mixture.plan(STEPS, 6)
    batches, steps = data.batches(mixture, SEED, 0, 6, 6, 0, 1, 'cpu'), []
    for step in range(STEPS):
        rows, in_windows = [], []
        for x, starts in zip(*(part.numpy() for part in next(batches)[::2]), strict=True):
            documents = [part.tolist() for part in np.split(x, starts[(starts > 0) & (starts < BLOCK)])]
            for chosen, rejected in zip(documents[::2], documents[1::2], strict=False):
                rows.append(places[(*chosen, -1, *rejected)])
            in_windows.append(len(rows) - sum(in_windows))
        assert mixture.count_targets(SEED, 6 * step, 6) == len(rows) == sum(in_windows)
        assert len({*in_windows}) > 1, 'equally many pairs in each window: a mean over micro-steps would pass'
        steps.append(rows)
    batches.close()
    return steps


def logp_of(model, row, which):
    """The log-probability of one answer, alone in a row, and how many tokens it has."""
    prompt, answer = map(ids_of, text_of(row, which))
    ids = torch.tensor([prompt + answer])
    logps = torch.log_softmax(model(ids[:, :-1]).logits[0], -1).gather(1, ids[0, 1:, None])[len(prompt) - 1 :]
    assert len(logps) == len(answer)
    return logps.sum(), len(answer)


def plain_loop(folder, beta=0.1):
    """The metrics of the run's steps, by transformers alone: each answer by itself, and a second model as reference."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / 'llama', dtype=torch.float32)
    reference, rows = copy.deepcopy(model), []
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in pairs_of_steps(folder):
        found = []
        for row in step:
            (good, _), (bad, _) = (logp_of(model, row, which) for which in ('chosen', 'rejected'))
            with torch.no_grad():
                (before, _), (bad_before, _) = (logp_of(reference, row, which) for which in ('chosen', 'rejected'))
            loss = -F.logsigmoid(beta * ((good - before) - (bad - bad_before)))
            (loss / len(step)).backward()
            gained = [beta * (good - before).item(), beta * (bad - bad_before).item()]
            found.append([loss.item(), *gained, gained[0] - gained[1], good.item(), bad.item()])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        opt.step()
        opt.zero_grad()
        loss, *others = np.mean(found, 0).tolist()
        rows.append(dict(zip(FACTS, [loss, norm, *others], strict=True)))
    return rows, model.state_dict()


LORA = ['--lora_rank=4', '--learning_rate=1e-2']
IMAGES = ['--init_from=FOLDER/images']
FSDP, MANUAL = ['--strategy=fsdp'], ['--strategy=fsdp', '--fsdp_impl=manual']
FOUR, NF4, BF16 = (
    ['--global_batch_size=4'],
    [*LORA, '--init_from=FOLDER/wide', '--frozen_dtype=nf4'],
    ['--dtype=bfloat16'],
)
CASES = {  # name: (ranks, the case that it has to equal, keys)
    'one': (1, None, []),
    'accumulated by twos': (1, 'one', ['--batch_size=2']),
    'lora': (1, None, LORA),
    'native': (1, 'one', ['--native=True']),
    'the same pairs under two names': (1, None, ['--dataset=pairs:0.5,again:0.5', '--max_iters=1']),
    'ddp': (2, 'one', []),
    'fsdp': (2, 'one', FSDP),
    'manual': (2, 'one', MANUAL),
    'manual, stage 2, sharded sums': (2, 'one', [*MANUAL, '--zero_stage=2', '--accumulate=sharded']),
    'ddp, lora': (2, 'lora', LORA),
    'fsdp, lora': (2, 'lora', [*FSDP, *LORA]),
    'ddp 3': (3, 'one', []),
    'fsdp 3': (3, 'one', FSDP),
    'manual 3': (3, 'one', MANUAL),
    'fsdp, recomputed': (2, 'one', [*FSDP, '--activation_checkpointing=full']),
    'fsdp, moments on the host': (2, 'one', [*FSDP, '--cpu_offload=optimizer']),
    'fsdp, all on the host': (2, 'one', [*FSDP, '--cpu_offload=params']),
    'manual, all on the host': (2, 'one', [*MANUAL, '--cpu_offload=params']),
    'one, of four': (1, None, FOUR),
    'two copies of two halves': (4, 'one, of four', [*FSDP, *FOUR, '--replicate_size=2']),
    'manual, two copies of two halves': (4, 'one, of four', [*MANUAL, *FOUR, '--replicate_size=2']),
    'nf4': (1, None, NF4),
    'fsdp, nf4': (2, 'nf4', [*FSDP, *NF4]),
    'images': (1, None, IMAGES),
    'ddp, images': (2, 'images', IMAGES),
    'manual, images': (2, 'images', [*MANUAL, *IMAGES]),
    'bf16': (1, None, BF16),
    'fsdp, bf16': (2, 'bf16', [*FSDP, *BF16]),
}
SHORT = ['one', 'lora', 'the same pairs under two names', 'ddp', 'fsdp', 'manual', 'fsdp, lora']
REFUSED = {  # name: (script, keys, what the line says)
    'text': ('train_dpo.py', ['--dataset=chats'], 'holds no pairs .*prepare_data.py --pairs'),
    'pairs as text': ('train_ddp.py', [], 'dataset=pairs holds pairs of .*train_dpo.py learns from these'),
    'pairs for stages': ('train_pipeline.py', [], 'dataset=pairs holds pairs of .*train_dpo.py learns from these'),
    'pairs for replicas': ('train_diloco.py', [], 'dataset=pairs holds pairs of .*train_dpo.py learns from these'),
    'pairs for DeepSpeed': ('train_deepspeed.py', [], 'dataset=pairs holds pairs of .*train_dpo.py learns from these'),
    'no text': ('train_dpo.py', ['--dataset=synthetic'], 'dataset=synthetic holds no pairs'),
    'validation': ('train_ddp.py', ['--dataset=chats', '--val_dataset=pairs'], 'val_dataset=pairs holds pairs of'),
    'mixed': ('train_dpo.py', ['--dataset=pairs:0.5,chats:0.5'], 'pairs holds pairs .*cannot be mixed'),
    'too long': ('train_dpo.py', ['--block_size=30'], r'since both answers .* use --block_size=\d+ or more'),
    'scratch': ('train_dpo.py', ['--init_from=scratch'], 'holds pairs, for .* give its --init_from'),
    'dropout': ('train_dpo.py', ['--dropout=0.1'], 'dropout=0.1: .*leave dropout out'),
    'z_loss': ('train_dpo.py', ['--z_loss=0.1'], 'z_loss=0.1: .*use --z_loss=0'),
    'offload': ('train_dpo.py', ['--cpu_offload=params'], 'cpu_offload=params with strategy=ddp, .*--strategy=fsdp'),
    'hsdp': ('train_dpo.py', ['--replicate_size=2'], 'replicate_size'),
}


@pytest.fixture(scope='module')
def runs(folder, has_slow_tests):
    """{name: its out_dir} of CASES, and of REFUSED what ended it, {name: text}."""
    cases = {name: (ranks, keys) for name, (ranks, _, keys) in CASES.items() if has_slow_tests or name in SHORT}
    refused = {name: (1, script, keys) for name, (script, keys, _) in REFUSED.items()}
    return run_cases(folder, 'train_dpo.py', cases, refused, keys_of)


def test_a_run_is_equal_to_a_plain_loop(folder, runs):
    """Which has no windows, no packing, no chunks, and writes the template by hand."""
    rows, weights = plain_loop(folder)
    out = runs[0]['one']
    assert (
        ' reference: the log-probabilities of both answers of 72 train and 18 val pairs'
        in (out / 'train.log').read_text()
    )
    before, *found = metrics(out)
    assert before['val_loss'] == pytest.approx(math.log(2), abs=1e-6) and before['val_accuracy'] == 0
    assert found[0]['loss'] == pytest.approx(math.log(2), abs=1e-6) and found[0]['rewards/accuracies'] == 0
    assert found[-1]['loss'] < 0.6 and found[-1]['rewards/accuracies'] > 0.5
    for step, (row, plain) in enumerate(zip(found, rows, strict=True), 1):
        # Both are one process, of which precision.py lets another be TIMES as far from the truth.
        of_answer = apart(step) / TIMES * max(abs(plain[name]) for name in FACTS if name.startswith('logps/'))
        # The gradient of a pair has the factor sigmoid(-margin): relatively as far off as the margin is absolutely.
        of_norm = (apart(step) + 2 * 0.1 * of_answer) * plain['grad_norm']
        for name in FACTS:  # a reward is beta = 0.1 times what an answer has gained, a margin the difference of two
            most = of_norm if name == 'grad_norm' else of_answer if name.startswith('logps/') else 0.1 * of_answer
            assert abs(row[name] - plain[name]) <= most, (step, name, row[name], plain[name])
    ours = weights_of(out, STEPS)
    assert max((ours[name] - weights[name]).abs().max().item() for name in ours) < 3e-5


@pytest.mark.parametrize('name', slow_but(SHORT, [name for name, case in CASES.items() if case[1]]))
def test_layouts_are_equal(runs, name):
    outs, expected = runs[0], CASES[name][1]
    for fact in ('loss', 'logps/chosen', 'logps/rejected', 'val_loss'):
        found, theirs = column(outs[name], fact), column(outs[expected], fact)
        if expected == 'bf16':  # next to whose roundings a run in fp32 is exact
            factor = times_further(found, theirs, column(outs['one'], fact), floor=FLOOR_IN_HALF)
            assert factor <= TIMES, f'{name}: {fact}'
        else:
            assert_same_run(found, theirs, f'{name}: {fact}')


def test_lora_begins_at_the_base(runs):
    rows = metrics(runs[0]['lora'])
    assert rows[0]['val_loss'] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[-1]['val_loss'] < math.log(2) and rows[-1]['val_margin'] > 0


@pytest.mark.parametrize('name', REFUSED)
def test_it_is_refused_in_one_line(runs, name):
    (line,) = [line for line in runs[1][name].splitlines() if line.startswith('ValueError: ')]
    assert re.search(REFUSED[name][2], line), line


# --- resumed ----------------------------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_to_the_bit_and_only_with_its_own_reference(folder, runs):
    out = runs[0]['ddp']
    killed = as_of_step(2, out, folder / 'killed', rows=4)
    run_many([{'name': 'killed', 'script': 'train_dpo.py', 'arguments': keys_of(folder, killed)}], 2, folder)
    assert_same_weights(killed, out, STEPS)
    assert_same_rows(killed, out, ('step', *FACTS, 'val_loss', 'val_accuracy', 'val_margin'))

    other = as_of_step(2, out, folder / 'other reference', rows=4)
    shutil.copy(folder / 'run fsdp' / 'metrics.jsonl', other / 'reference.npz')
    line, same = refusals([['train_dpo.py', *keys_of(folder, other)]] * 2)
    assert line == same and 'is another file than the reference that this run began with' in line


def test_a_trained_run_is_evaluated_on_other_pairs_if_its_first_weights_are_there(folder, runs):
    """LoRA leaves its base as it was; without LoRA the first weights are gone."""
    new, meta = folder / 'data' / 'new', json.loads((folder / 'data' / 'pairs' / 'meta.json').read_text())
    shutil.copytree(folder / 'data' / 'pairs', new)
    del meta['splits']['val']  # so that the training pairs are evaluated
    (new / 'meta.json').write_text(json.dumps(meta))
    given = ['--eval_only', '--val_dataset=new', '--eval_sequences=72']
    fork_script('train_dpo.py', *keys_of(folder, runs[0]['lora'], *LORA, *given))
    last = (runs[0]['lora'] / 'train.log').read_text().splitlines()[-1]
    loss, accuracy = re.search(r' step 4 \| val loss (.*), accuracy (.*), margin ', last).groups()
    assert float(loss) < 0.2 and float(accuracy) == 1  # with LoRA left on it would be ln 2 and 0
    (line,) = refusals([['train_dpo.py', *keys_of(folder, runs[0]['one'], *given)]])
    assert 'has no reference of this val data, and the weights that the run began with are gone' in line

    own = folder / 'unvalidated'
    fork_script('train_dpo.py', *keys_of(folder, own, '--dataset=new', '--eval_sequences=0'))
    assert column(own, 'loss') == column(runs[0]['one'], 'loss')
    (line,) = refusals([['train_dpo.py', *keys_of(folder, own, '--dataset=new', '--val_dataset=pairs')]])
    assert (
        'has no reference of this val data: resume with the same --val_dataset, or --eval_sequences=0, or begin' in line
    )


# --- the pieces -------------------------------------------------------------------------------------------------------


def test_log_probabilities_at_a_temperature_in_chunks_and_of_filler(folder):
    pretrained = Pretrained(str(folder / 'llama'), block_size=BLOCK)
    with torch.device('meta'):
        model = finetune.for_training(pretrained)
    model.to_empty(device='cpu')
    loading.load(model, pretrained)
    draw = torch.Generator().manual_seed(2)
    x, y = (torch.randint(VOCABULARY, (3, 20), generator=draw) for _ in range(2))
    y[torch.rand(3, 20, generator=draw) < 0.5] = -1
    y[2] = -1
    starts = torch.tensor([[0, 7, 20], [0, 12, 15], [0, 20, 20]])
    logits = model(x, starts=starts)
    expected = torch.log_softmax(logits / 0.7, -1).gather(2, y.clamp(min=0)[..., None])[..., 0][y >= 0]
    found = token_logps(model, x, y, starts, temperature=0.7)
    assert torch.allclose(found, expected, atol=1e-5, rtol=0)
    sums, counts = document_logps(model, x, y, starts)
    plain = torch.log_softmax(logits, -1).gather(2, y.clamp(min=0)[..., None])[..., 0].masked_fill(y < 0, 0)
    assert torch.allclose(sums[1], torch.stack([part.sum() for part in plain[1].split([12, 3, 5])]), atol=1e-4)
    assert counts.tolist()[0] == [(y[0, :7] >= 0).sum(), (y[0, 7:] >= 0).sum(), 0] and counts[2].tolist() == [0, 0, 0]


def plain_logps(hidden, weight, targets, cap, temperature):
    """Those of ChunkedLogProbs, by torch alone."""
    logits = hidden if weight is None else hidden @ weight.T
    logits = cap * torch.tanh(logits / cap) if cap else logits
    return torch.log_softmax(logits / temperature, -1).gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize(
    ('has_head', 'cap', 'temperature'), [(True, None, 1.0), (True, None, 0.7), (True, 3.0, 0.7), (False, None, 0.7)]
)
@pytest.mark.parametrize('n', [37, 0])
def test_gradients_of_log_probabilities_are_those_of_a_plain_loop(monkeypatch, n, has_head, cap, temperature):
    """In chunks of 10 tokens. Without any token they are 0 and not missing, since DDP would wait for them."""
    draw, V, C = torch.Generator().manual_seed(3), 50, 8
    monkeypatch.setattr(logprobs, 'LOGITS_BYTES', {'cpu': 4 * V * 10})
    hidden, weight = (torch.randn(rows, C if has_head else V, generator=draw) for rows in (n, V))
    targets, weights = torch.randint(V, (n,), generator=draw), torch.randn(n, generator=draw)
    found = []
    for dtype, is_plain in ((torch.float32, False), (torch.float32, True), (torch.float64, True)):
        leaves = [part.to(dtype, copy=True).requires_grad_() for part in ([hidden, weight] if has_head else [hidden])]
        head = leaves[1] if has_head else None
        if is_plain:
            logps = plain_logps(leaves[0], head, targets, cap, temperature)
        else:
            logits_of = LogitsOf(head, dtype, cap)
            logps = logprobs.ChunkedLogProbs.apply(leaves[0], head, targets, logits_of, temperature)
        (logps * weights.to(dtype)).sum().backward()
        found.append({'logps': logps, **{name: p.grad for name, p in zip(('hidden', 'weight'), leaves, strict=False)}})
    assert_as_close_to_float64(*found)


A, B = {'role': 'user', 'content': 'A?'}, {'role': 'assistant', 'content': 'b'}
GOOD, BAD = {'role': 'assistant', 'content': 'good'}, {'role': 'assistant', 'content': 'bad'}
SHAREGPT = [{'from': 'human', 'value': 'A?'}]
ONE = ([A], 'good', 'bad')  # the prompt without weights, and the learned answers
ROWS = {
    'texts': ({'prompt': 'A?', 'chosen': 'good', 'rejected': 'bad'}, ONE),
    'lists behind a prompt': ({'prompt': [A], 'chosen': [GOOD], 'rejected': [BAD]}, ONE),
    'whole lists (trl-lib/ultrafeedback_binarized)': (
        {'chosen': [A, GOOD], 'rejected': [A, BAD], 'score_chosen': 9},
        ONE,
    ),
    'a text and whole lists (HuggingFaceH4/ultrafeedback_binarized)': (
        {'prompt': 'A?', 'chosen': [A, GOOD], 'rejected': [A, BAD], 'messages': [A, GOOD]},
        ONE,
    ),
    'several turns': (
        {'chosen': [A, B, A, GOOD], 'rejected': [A, B, A, BAD]},
        ([A, {**B, 'weight': 0}, A], 'good', 'bad'),
    ),
    'transcripts (Anthropic/hh-rlhf)': (
        {
            'chosen': '\n\nHuman: A?\n\nAssistant: b\n\nHuman: A?\n\nAssistant: Yes, good',
            'rejected': '\n\nHuman: A?\n\nAssistant: b\n\nHuman: A?\n\nAssistant: Yes, bad',
        },
        ([A, {**B, 'weight': 0}, A], 'Yes, good', 'Yes, bad'),
    ),
    'system, question (Intel/orca_dpo_pairs)': (
        {'system': 'S', 'question': 'A?', 'chosen': 'good', 'rejected': 'bad'},
        ([{'role': 'system', 'content': 'S'}, A], 'good', 'bad'),
    ),
    'conversations (LLaMA-Factory)': (
        {
            'conversations': SHAREGPT,
            'chosen': {'from': 'gpt', 'value': 'good'},
            'rejected': {'from': 'gpt', 'value': 'bad'},
        },
        ONE,
    ),
    'a text and whole lists with ratings (argilla/ultrafeedback-binarized-preferences-cleaned)': (
        {'source': 's', 'prompt': 'A?', 'chosen': [A, GOOD], 'chosen-rating': 5, 'rejected': [A, BAD]},
        ONE,
    ),
    'whole lists and a source (Skywork/Skywork-Reward-Preference)': (
        {'chosen': [A, GOOD], 'rejected': [A, BAD], 'source': 's'},
        ONE,
    ),
    'system, input (argilla/distilabel-intel-orca-dpo-pairs)': (
        {'system': '', 'input': 'A?', 'chosen': 'good', 'rejected': 'bad', 'generations': ['bad', 'good']},
        ONE,
    ),
    'another last step (xinlai/Math-Step-DPO-10K)': (
        {
            'dataset': 'd',
            'prompt': 'A?',
            'initial_reason_steps': 'Step 1: b.\nStep 2:',
            'chosen': ' good',
            'rejected': ' bad',
            'full_chosen': ' good, so 3',
            'full_rejected': ' bad, so 4',
            'answer': '3',
        },
        ([A], 'Step 1: b.\nStep 2: good', 'Step 1: b.\nStep 2: bad'),
    ),
    'a prompt as a transcript': ({'prompt': '\n\nHuman: A?\n\nAssistant:', 'chosen': 'good', 'rejected': 'bad'}, ONE),
    'instruction and input': ({'instruction': 'A?', 'input': 'x', 'chosen': 'good', 'rejected': 'bad'}, None),
    'answers that are JSON': ({'prompt': 'A?', 'chosen': '{"a": 1}', 'rejected': '[2]'}, ([A], '{"a": 1}', '[2]')),
    'lists as JSON': ({'chosen': json.dumps([A, GOOD]), 'rejected': json.dumps([A, BAD])}, ONE),
}


OF_TEXTS = ('texts', 'instruction and input', 'answers that are JSON')  # which need no chat template
OF_TEXTS += tuple(name for name in ROWS if name.startswith(('system, input', 'another last step')))


@pytest.mark.parametrize('name', ROWS)
def test_rows_that_people_have(name):
    row, expected = ROWS[name]
    pair = json.loads(pair_of(row))
    if expected is None:
        assert pair['chosen']['messages'][0]['content'] == 'A?\n\nx'
        return
    prompt, *answers = expected
    for which, answer in zip(('chosen', 'rejected'), answers, strict=True):
        assert pair[which]['messages'] == [*prompt, {'role': 'assistant', 'content': answer}]


@pytest.mark.parametrize('name', ROWS)
def test_without_a_chat_template_pairs_of_messages_are_refused(name):
    """Also those of one message of the user, which look like texts once they are read."""
    row, _ = ROWS[name]
    if name in OF_TEXTS:
        assert pair_of(row, as_text=True) == pair_of(row)
    else:
        with pytest.raises(ValueError, match='only a chat template can write: give the --tokenizer of a chat model'):
            pair_of(row, as_text=True)


@pytest.mark.parametrize('kind', ['gpt2', 'llama2', 'unigram'])
def test_texts_are_learned_behind_the_ids_with_which_a_prompt_asks(kind, tmp_path):
    """The whole text may have one token for the space that ends the prompt and the answer, and some tokenizers put a
    space before each text."""
    tokenizer = Tokenizer.from_str(small_tokenizer(kind))
    tokenizer.add_special_tokens(['<s>', '</s>'])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token='<s>', eos_token='</s>')
    fast.save_pretrained(tmp_path)
    files, language = FileTokenizer(tmp_path / 'tokenizer.json', '</s>'), TransformersLanguage(fast, tmp_path)
    for prompt in ('the user:', 'the user: ', 'the us', 'the'):
        row = {'prompt': prompt, 'chosen': 'asks', 'rejected': ' the system'}
        examples = TextEncoder(files).pair(pair_of(row, as_text=True))
        for (ids, flags, _), answer in zip(examples, ('asks', ' the system'), strict=True):
            assert ids[: (flags & LEARNED).argmax()].tolist() == language.prompt_of(prompt).ids
            assert files.decode(ids).replace(' </s>', '</s>') == f'{prompt}{answer}</s>'.replace(' </s>', '</s>')


@pytest.mark.parametrize(
    ('row', 'reason'),
    [
        ({'prompt': 'A?', 'chosen': 'a', 'rejected': 'a'}, 'are the same'),
        (
            {'prompt': 'A?', 'chosen': 'a', 'rejected': 'b', 'images': ['a.png']},
            "with the field 'images', and only text",
        ),
        ({'chosen': [A, GOOD], 'rejected': [A, GOOD]}, 'are the same'),
        ({'chosen': [A, {**GOOD, 'id': 1}], 'rejected': [{**A, 'id': 2}, GOOD]}, 'are the same'),
        ({'prompt': 'A?', 'chosen': 'a', 'rejected': ' '}, 'an empty answer'),
        ({'chosen': [A, GOOD], 'rejected': [A]}, 'an empty answer'),
        ({'chosen': [A, GOOD], 'rejected': [{**A, 'content': 'C?'}, BAD]}, 'different prompts'),
        ({'chosen': 'a', 'rejected': 'b'}, 'without what they answer'),
        ({'trajectory': SHAREGPT, 'chosen': 'a', 'rejected': 'b'}, 'without what they answer'),  # UltraInteract_pair
        ({'prompt': 'A?', 'chosen': 'a'}, "without the field 'rejected'"),
        ({'prompt': 'A?', 'completion': 'a', 'label': True}, 'single answers: join a good and a bad one'),
    ],
)
def test_rows_that_are_no_pairs(row, reason):
    with pytest.raises(ValueError, match=reason):
        pair_of(row)


OTHER_SHAPES = {  # public data sets whose two answers have other names
    'PKU-SafeRLHF': {'prompt': 'A?', 'response_0': 'good', 'response_1': 'bad', 'better_response_id': 0},
    'HelpSteer3': {'context': [A], 'response1': 'good', 'response2': 'bad', 'overall_preference': -2},
    'SHP': {'history': 'A?', 'human_ref_A': 'good', 'human_ref_B': 'bad', 'labels': 1},
}


def test_pairs_under_other_names_are_refused_with_the_names_to_give_them(tmp_path):
    (tmp_path / 'rows').mkdir()
    for name, row in OTHER_SHAPES.items():
        write_rows(tmp_path / 'rows' / f'{name}.jsonl', [row, row])
    line = error_of(tmp_path, '--pairs', f'--dataset={tmp_path}/rows', '--tokenizer=bytes')
    for name, row in OTHER_SHAPES.items():
        assert re.search(f'{name}.jsonl: no pairs: .* chosen, .* rejected, .* prompt; it has: {", ".join(row)}', line)


def test_good_and_bad_answers_with_a_label_are_joined_to_pairs_of_one_prompt(tmp_path):
    """As in KTO's data sets. All pairs of a prompt are in the same split."""
    rows = [
        {'prompt': f'{prompt}?', 'completion': f'{"good" if label else "bad"} {n}', 'label': label}
        for prompt in range(20)
        for n, label in ((1, True), (2, True), (1, False), (2, False), (3, True))  # the third has no partner
    ]
    random.Random(0).shuffle(rows)
    write_rows(tmp_path / 'labeled.jsonl', [*rows, {'prompt': 'B?', 'completion': 'good', 'label': 'yes'}])
    options = ['--pairs', f'--dataset={tmp_path}/labeled.jsonl', '--tokenizer=bytes', '--num_proc=1', '--name=kto']
    said = prepare(tmp_path, *options, '--val_fraction=0.3').stdout
    assert '40 pairs of a good and a bad answer' in said and 'opposite one, to be a pair, left out (20)' in said
    assert 'label is neither true nor false, left out (1)' in said
    prompts, dataset = {}, tmp_path / 'data' / 'kto'
    for split in ('train', 'val'):
        text = tokenizer_of(dataset).decode(tokens_of(dataset, split))
        found = re.findall(r'(?:^|>)(\d+)\?(good|bad) (\d)(?=<)', text)
        chosen, rejected = found[::2], found[1::2]
        assert [row[0] for row in chosen] == [row[0] for row in rejected]
        assert {row[1] for row in chosen} == {'good'} and {row[1] for row in rejected} == {'bad'}
        assert len({*found}) == len(found) == meta_of(dataset)['splits'][split]['documents']
        prompts[split] = {row[0] for row in found}
    assert len(prompts['train'] | prompts['val']) == 20 and not prompts['train'] & prompts['val']
    write_rows(tmp_path / 'labeled.jsonl', [row for row in rows if row['label']])
    assert 'all 60 rows are left out: rows with a label' in error_of(tmp_path, *options[:-1], '--name=good')


def test_numbers_of_messages_and_what_no_template_writes_make_no_difference():
    row = {'chosen': [{**A, 'id': 1}, {**GOOD, 'id': 2}], 'rejected': [{**A, 'id': 3}, {**BAD, 'id': 4}]}
    assert [message['content'] for message in json.loads(pair_of(row))['rejected']['messages']] == ['A?', 'bad']
    example = np.array([1, 2, 3]), np.array([FIRST, 0, LEARNED], dtype=np.uint8), 'text'
    with pytest.raises(ValueError, match='are the same'):
        with_one_prompt([example, example])


def test_pairs_of_a_tokenizer_without_a_template(folder):
    rows = [{'prompt': f'{a}+1=', 'chosen': f'{a + 1}\n', 'rejected': f'{a + 2}\n'} for a in range(20)]
    rows.append({'chosen': messages_of([('user', 'a'), ('system', 'b'), ('assistant', 'c')]), 'rejected': [A, BAD]})
    write_rows(folder / 'sums.jsonl', rows)
    options = [f'--dataset={folder}/sums.jsonl', '--tokenizer=bytes', '--val_fraction=0', '--num_proc=1']
    assert 'use --pairs' in error_of(folder, '--chat_fields=chosen,rejected', *options, '--name=sums')
    said = prepare(folder, '--pairs', *options, '--name=sums').stdout
    assert (
        'next: python train_dpo.py config/way_dpo.py --init_from=OUT_DIR --dataset=sums' in said
    )  # with the run's own block_size
    assert '\n0+1=【1\n<|endoftext|>】' in said and 'only a chat template can write' in said and 'left out (1)' in said
    keys = {'dataset': 'sums', 'data_dir': f'{folder}/data', 'dataset_stages': (), 'block_size': 32}
    mixture = data.open_mixture({**keys, 'vocab_size': None, 'windows': 'stream'}, 'train')
    (source,) = mixture.sources
    assert source.n_targets.sum() == 20 and mixture.has_starts
    assert f'the longest pair, both answers with their prompts, has {source.longest} tokens' in said
    keys |= {'block_size': source.longest - 1}  # which that pair just fills
    assert (
        data.open_mixture({**keys, 'vocab_size': None, 'windows': 'stream'}, 'train').sources[0].n_targets.sum() == 20
    )
    unpacked = data.open_mixture({**keys, 'vocab_size': None, 'windows': 'stream', 'packing': False}, 'train')
    assert unpacked.n_windows == 20 and unpacked.sources[0].n_targets.tolist() == [1] * 20 and unpacked.has_starts


# --- beside TRL -------------------------------------------------------------------------------------------------------

# The first and the last of the ten losses, which TRL 1.16 gave on another machine.
TRLS_LOSSES = {'sigmoid': (0.693147, 0.694926), 'ipo': (25.0, 25.554735)}


def rows_of_ids(n):
    draw = torch.Generator().manual_seed(1)

    def ids(low, high):
        length = int(torch.randint(low, high, (), generator=draw))
        return torch.randint(1, 63, (length,), generator=draw).tolist()

    return [
        {'prompt_ids': ids(3, 12), 'chosen_ids': [*ids(2, 14), 63], 'rejected_ids': [*ids(2, 20), 63]} for _ in range(n)
    ]


def by_trl(model, rows, loss_type, beta, folder):
    """The losses of TRL's DPOTrainer, 4 rows a step."""
    import datasets
    import trl

    class Trainer(trl.DPOTrainer):
        def _prepare_dataset(self, dataset, *args, **kwargs):
            return dataset

        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    config = {'max_steps': len(rows) // 4, 'per_device_train_batch_size': 2, 'beta': beta, 'loss_type': loss_type}
    trainer = {'ref_model': copy.deepcopy(model), 'train_dataset': datasets.Dataset.from_list(rows)}
    return losses_of_trl(Trainer, trl.DPOConfig, folder, model, config, **trainer)


@pytest.mark.slow
def test_rows_become_trls_tokens_but_for_the_line_feed_behind_the_end(folder, tmp_path):
    """ChatML writes one behind <|im_end|>. TRL learns it, we do not; ids_of() are ours, as the plain loop shows."""
    trl = pytest.importorskip('trl')
    import datasets
    import transformers

    rows = rows_of_pairs(20)
    as_messages = [
        {
            'prompt': messages_of([('user', row['prompt'])]),
            **{which: messages_of([('assistant', row[which])]) for which in ('chosen', 'rejected')},
        }
        for row in rows
    ]
    trainer = trl.DPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder / 'llama'),
        args=trl.DPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[]),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / 'llama'),
        train_dataset=datasets.Dataset.from_list(as_messages),
    )
    for row, found in zip(rows, trainer.train_dataset, strict=True):
        for which in ('chosen', 'rejected'):
            prompt, answer = map(ids_of, text_of(row, which))
            assert (found['prompt_ids'], found[f'{which}_ids']) == (prompt, [*answer, ord('\n')])


def packed_row(rows):
    """x, y, starts of one sequence that holds the pairs of some rows, without padding."""
    x, y, starts = [], [], [0]
    for row in rows:
        for answer in (row['chosen_ids'], row['rejected_ids']):
            ids = row['prompt_ids'] + answer
            x += ids[:-1]
            y += [-1] * (len(row['prompt_ids']) - 1) + answer
            starts.append(len(x))
    return torch.tensor([x]), torch.tensor([y]), torch.tensor([starts])


@pytest.mark.slow
@pytest.mark.parametrize(
    ('loss_type', 'beta', 'close'), [('sigmoid', 0.1, 1e-6), ('sigmoid_norm', 5.0, 5e-6), ('ipo', 0.1, 1e-5)]
)
def test_ten_steps_are_those_of_trl(tmp_path, loss_type, beta, close):
    """Ours with the pairs packed into rows, and with uneven micro-steps."""
    pytest.importorskip('trl')
    theirs, rows, losses = llama_of_trl(0), rows_of_ids(40), []
    model = as_ours(theirs, tmp_path / 'model')
    first, opt, loss_of = copy.deepcopy(model), optimizer_of_trl(model), losses_of_pairs(loss_type, beta)
    for step in range(10):
        pairs, total = rows[4 * step : 4 * step + 4], 0.0
        for micro_step in (pairs[:1], pairs[1:]):
            batch = packed_row(micro_step)
            logps, n = document_logps(model, *batch)
            with torch.no_grad():
                reference, _ = document_logps(first, *batch)
            loss = loss_of(*(part[0, :-1].view(-1, 2) for part in (logps, reference, n))).sum() / len(pairs)
            loss.backward()
            total += loss.item()
        step_of_trl(model, opt)
        losses.append(total)
    expected = by_trl(theirs, rows, loss_type, beta, tmp_path / 'out')
    assert_equal_to_trl(losses, expected, close, model, theirs, 1e-5)
    if loss_type in TRLS_LOSSES:
        assert [losses[0], losses[-1]] == pytest.approx(TRLS_LOSSES[loss_type], abs=5e-5)


def test_pairs_and_text_for_a_run_whose_tokenizer_is_a_name_and_no_file(data_dir, tmp_path):
    """--tokenizer=RUN of a run that learned bytes, as of one that learned tiktoken's gpt2: the name is what it has."""
    run, log = tmp_path / 'run', tmp_path / 'log'
    keys = [*TINY_MODEL, *TINY_RUN, '--max_iters=1', '--dataset=tiny']
    run_forked('train_ddp.py', *keys, f'--data_dir={data_dir}', f'--out_dir={run}', log=log)
    write_rows(
        tmp_path / 'rows.jsonl', [{'prompt': f'{n}+1=', 'chosen': f'{n + 1}', 'rejected': '?'} for n in range(40)]
    )
    (tmp_path / 'text.txt').write_text('two and two\n' * 200)
    to_data = [f'--tokenizer={run}', f'--data_dir={tmp_path}/data', '--val_fraction=0.2']
    for script, name, source in (('train_dpo.py', 'pairs', 'rows.jsonl'), ('train_ddp.py', 'text', 'text.txt')):
        more = ['--pairs'] if name == 'pairs' else []
        run_forked('prepare_data.py', f'--dataset={tmp_path}/{source}', f'--name={name}', *to_data, *more, log=log)
        begin = [
            f'--init_from={run}',
            f'--data_dir={tmp_path}/data',
            f'--dataset={name}',
            f'--out_dir={tmp_path}/{name}',
        ]
        run_forked(script, *begin, *TINY_RUN, '--max_iters=1', log=log)
        assert complete(tmp_path / name) == [1]
