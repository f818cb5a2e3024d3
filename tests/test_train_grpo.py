"""train_grpo.py: the loss beside formulas, a plain loop of transformers and TRL; layouts, resumed runs, refusals."""

import copy
import itertools
import operator
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from chats import write_rows
from launch import function_of, run_function, run_many
from outputs import as_of_step, assert_same_rows, assert_same_weights, column, metrics
from post_training import (
    LONGEST,
    STOP,
    as_ours,
    assert_equal_to_trl,
    ids_of,
    llama_of_trl,
    losses_of_trl,
    optimizer_of_trl,
    rollouts_of,
    run_cases,
    step_of_trl,
    written,
)
from precision import assert_as_close_to_float64, assert_same_run
from pretrained import TURN, save_model
from short import slow_but
from torch._dynamo.testing import CompileCounterWithBackend

from dataset.shuffle import permuted
from evaluation import in_run, sampling
from huggingface import finetune, loading
from huggingface.pretrained import Pretrained
from logprobs import token_logps
from model import generator_of
from runtime import checkpoint, fill, rollouts
from runtime.opened import Opened

SEED, BLOCK, STEPS, PROMPTS, GROUP = 1337, 40, 4, 6, 4
RUN = [f'--seed={SEED}', f'--block_size={BLOCK}', f'--prompts_per_step={PROMPTS}', f'--num_generations={GROUP}']
RUN += [
    '--batch_size=2',
    f'--max_iters={STEPS}',
    '--warmup_iters=0',
    '--device=cpu',
    '--dtype=float32',
    '--weight_decay=0',
]
# Adam would make rounding grow until another token is drawn: it moves numbers without a gradient as far as others.
RUN += ['--optimizer=sgd', '--learning_rate=0.3', '--lr_schedule=constant', '--log_interval=1', '--compile=False']
RUN += ['--checkpoint_interval=2']
OF_ANSWERS = 'reward reward_std frac_reward_zero_std completions/mean_length completions/clipped_ratio'.split()
RIGHT = [*'abcdefghijklmnop']  # right has a letter of these before one of STOP
TASK = {'answer': RIGHT, 'rule': 'contains', 'stop': STOP, 'max_new_tokens': LONGEST}
LARGEST = 16 * np.spacing(np.float32(5)).item()  # what rounding may change of a log-probability: all are near -5
OWN_REWARD = """
def vowels(text, row):
    return sum(letter in row['likes'] for letter in text) - len(text) / 4
"""
FAILS = """
def vowels(text, row):
    return 1 / (row['prompt'] != '44:' or not text)  # for answers to one prompt, which are of one rank
"""


def rows_of_prompts(n=20):
    return [{'prompt': f'{number}' * (1 + number % 3) + ':', **TASK} for number in range(n)]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A tiny Llama, whose answers are noise, and prompts.jsonl, where about a third of such answers is right."""
    folder = tmp_path_factory.mktemp('grpo')
    save_model(folder / 'llama', 'llama_64', max_position_embeddings=64)
    save_model(folder / 'images', 'gemma3')
    write_rows(folder / 'prompts.jsonl', rows_of_prompts())
    write_rows(folder / 'choices.jsonl', [{'context': 'a', 'choices': ['b', 'c'], 'gold': 0}])
    write_rows(folder / 'long.jsonl', [{'prompt': 'a' * BLOCK, **TASK}])
    free = {'likes': 'aeiou', 'stop': STOP, 'max_new_tokens': LONGEST}
    write_rows(folder / 'free.jsonl', [{'prompt': row['prompt'], **free} for row in rows_of_prompts()])
    for name, function in (('own', OWN_REWARD), ('changed', OWN_REWARD.replace('4', '5')), ('fails', FAILS)):
        (folder / f'{name}.py').write_text(function)
    answer = {'prompt': 'a', 'answer': '#### 1', 'rule': 'gsm8k', 'max_new_tokens': LONGEST}
    write_rows(folder / 'two.jsonl', [answer])
    return folder


def keys_of(folder, out, *more):
    more = [key.replace('FOLDER', str(folder)) for key in more]
    base = [f'--init_from={folder}/llama', f'--prompts={folder}/prompts.jsonl', f'--out_dir={out}']
    return [*RUN, *base, *more]


# --- the loss ---------------------------------------------------------------------------------------------------------


def config_of(loss_type='dapo', scale_rewards='none', epsilon=0.2, epsilon_high=0.28, sampled_logps='none'):
    keys = {'loss_type': loss_type, 'scale_rewards': scale_rewards, 'epsilon': epsilon, 'epsilon_high': epsilon_high}
    keys |= {'sampled_logps': sampled_logps, 'prompts_per_step': PROMPTS, 'num_generations': GROUP}
    return SimpleNamespace(**keys)


def of_script(name, **keys):
    return function_of('train_grpo.py', name, config=config_of(**keys), TIS_CAP=2.0)


@pytest.mark.parametrize('scale', ['none', 'group'])
def test_an_advantage_is_what_is_above_the_mean(scale):
    rewards = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]]
    found = of_script('advantages_of', scale_rewards=scale)(torch.tensor(rewards, dtype=torch.float64))
    for row, advantages in zip(rewards, found.tolist(), strict=True):
        mean = sum(row) / 4
        deviation = (sum((reward - mean) ** 2 for reward in row) / 3) ** 0.5 + 1e-4 if scale == 'group' else 1
        assert advantages == pytest.approx([(reward - mean) / deviation for reward in row], rel=1e-12)
    assert not found[2].any()


def test_tokens_weigh_what_the_papers_say():
    lengths = [1, 3, 8, 8]
    weights = {
        name: [of_script('weight_of', loss_type=name)(n, sum(lengths), LONGEST) for n in lengths]
        for name in ('dapo', 'dr_grpo', 'grpo')
    }
    answers = PROMPTS * GROUP
    assert weights['dapo'] == [1 / 20] * 4
    assert weights['dr_grpo'] == [1 / (answers * LONGEST)] * 4
    assert [n * weight for n, weight in zip(lengths, weights['grpo'], strict=True)] == [1 / answers] * 4


def test_a_ratio_is_clipped_where_it_would_go_on():
    old = torch.zeros(6, dtype=torch.float64)
    logps = torch.tensor([0.0, 0.3, 0.3, -0.3, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([2.0, 1.0, -1.0, 1.0, -1.0, 3.0], dtype=torch.float64)
    losses, clipped = of_script('losses_of_tokens')(logps, old, old - 1, advantages)
    ratios = np.exp(logps.tolist())
    expected = [-2.0, -1.28, ratios[2], -ratios[3], 0.8, -3 * ratios[5]]
    assert losses.tolist() == pytest.approx(expected, rel=1e-12)
    assert clipped.tolist() == [False, True, False, False, True, False]
    losses.sum().backward()
    slopes = [-2.0, 0.0, ratios[2], -ratios[3], 0.0, -3 * ratios[5]]
    assert logps.grad.tolist() == pytest.approx(slopes, rel=1e-12)
    again = of_script('losses_of_tokens', sampled_logps='old')(logps, old + 1, old, advantages)
    assert [value.tolist() for value in again] == [losses.tolist(), clipped.tolist()]


def test_a_token_counts_as_often_as_training_would_have_drawn_it():
    """Over all tokens that the sampler may draw, with its probabilities, the gradient is that of the trained model."""
    generator = torch.Generator().manual_seed(SEED)
    logits, sampler, advantages = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    sampler = logits + 0.1 * sampler  # no token is twice as likely in training
    logps, sampled = logits.requires_grad_().log_softmax(-1), sampler.log_softmax(-1).detach()
    losses, _ = of_script('losses_of_tokens', sampled_logps='tis')(logps, logps.detach(), sampled, advantages)
    (found,) = torch.autograd.grad((losses * sampled.exp()).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad(-(logps.exp() * advantages).sum(), logits)
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-12)
    (rare,), _ = of_script('losses_of_tokens', sampled_logps='tis')(*torch.tensor([[0.0], [0.0], [-5.0], [1.0]]))
    assert rare == -2.0  # e^5 is beyond the cap


# --- beside a plain loop ----------------------------------------------------------------------------------------------


def plain_loop(folder, dtype, temperature=1.0, iterations=1, grpo=False, masked=False):
    """([[text, reward] of the first group of each step], metrics) of a run, by transformers alone."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / 'llama', dtype=dtype)
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    rows, shown = rows_of_prompts(), []
    found = []
    for step in range(STEPS):
        slots = np.arange(step * PROMPTS, (step + 1) * PROMPTS)
        answers = []
        for slot, number in zip(slots, permuted(slots, len(rows), SEED), strict=True):
            prompt, group = ids_of(rows[number]['prompt']), []
            for k in range(GROUP):
                generator = generator_of(SEED, f'prompt {slot} of the run, answer {k}')
                ids, text, ended = written(model, prompt, generator, temperature)
                group.append((prompt, ids, text, float(any(letter in text for letter in RIGHT)), ended))
            rewards = [reward for *_, reward, _ in group]
            deviation = np.std(rewards, ddof=1) + 1e-4 if masked else 1
            answers += [(*answer, (answer[3] - np.mean(rewards)) / deviation) for answer in group]
        shown.append([[text, reward] for _, _, text, reward, _, _ in answers[:GROUP]])
        tokens, old, clipped = sum(len(ids) for _, ids, *_ in answers), {}, []
        learned = sum(len(ids) for _, ids, _, _, ended, _ in answers if ended or not masked)
        for _ in range(iterations):
            loss, surprise = 0.0, []
            for number, (prompt, ids, _, _, ended, advantage) in enumerate(answers):
                if masked and not ended:
                    continue
                logits = model(torch.tensor([prompt + ids[:-1]])).logits[0, len(prompt) - 1 :]
                logps = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]
                before = old.setdefault(number, logps.detach())
                ratio = (logps - before).exp()
                kept = ratio.clamp(0.8, 1.28)
                total = len(answers) * len(ids) if grpo else learned
                loss = loss - torch.min(ratio * advantage, kept * advantage).sum() / total
                if advantage:
                    surprise += (-logps).tolist()
                    clipped += (kept * advantage < ratio * advantage).tolist()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
            opt.step()
            opt.zero_grad()
        mean = {
            'reward': np.mean([reward for *_, reward, _, _ in answers]),
            'completions/mean_length': tokens / len(answers),
            'completions/clipped_ratio': np.mean([not ended for *_, ended, _ in answers]),
            'clip_ratio/region_mean': np.mean(clipped),
        }
        found.append({'grad_norm': norm, **({'entropy': np.mean(surprise)} if iterations == 1 else {}), **mean})
    return shown, found


ADAMW = ['--optimizer=adamw', '--learning_rate=1e-4']
LORA = ['--lora_rank=4']
IMAGES = ['--init_from=FOLDER/images']
FSDP, STAGE_2 = ['--strategy=fsdp'], ['--strategy=fsdp', '--fsdp_impl=manual', '--zero_stage=2']
TWICE = ['--num_iterations=2', '--temperature=0.7', '--loss_type=grpo', '--sampled_logps=old']
OWN = ['--prompts=FOLDER/free.jsonl', '--reward=FOLDER/own.py:vowels', '--eval_tasks=FOLDER/free.jsonl']
MASKED = ['--mask_truncated=True', '--scale_rewards=group', '--sampled_logps=tis']
CASES = {  # name: (ranks, the case that it has to equal, keys)
    'one': (1, None, []),
    'accumulated by sixes': (1, 'one', ['--batch_size=6']),
    'unpacked': (1, 'one', ['--packing=False', '--eval_sequences=35', '--eval_interval=3', '--global_batch_size=7']),
    'written by fives': (1, 'one', ['--generation_batch_size=5']),
    'native': (1, 'one', ['--native=True']),
    'lora': (1, None, LORA),
    'twice': (1, None, TWICE),
    'masked': (1, None, MASKED),
    'chats': (1, None, ['--prompts_chat=True', '--max_iters=1']),
    'own reward': (1, None, OWN),
    'ddp, own reward': (2, 'own reward', OWN),
    'ddp': (2, 'one', []),
    'fsdp': (2, 'one', FSDP),
    'stage 2': (2, 'one', STAGE_2),
    'ddp, twice': (2, 'twice', TWICE),
    'ddp, lora': (2, 'lora', LORA),
    'fsdp, lora': (2, 'lora', [*FSDP, *LORA]),
    'fsdp, masked': (2, 'masked', [*FSDP, *MASKED]),
    'stage 1, recomputed': (2, 'one', [*STAGE_2, '--zero_stage=1', '--activation_checkpointing=full']),
    'adamw': (1, None, ADAMW),
    'images': (1, None, IMAGES),
    'ddp, images': (2, 'images', IMAGES),
    'stage 2, images': (2, 'images', [*STAGE_2, *IMAGES]),
    'offloaded': (2, 'adamw', [*FSDP, *ADAMW, '--cpu_offload=optimizer']),
    'params on the host': (2, 'one', [*FSDP, '--cpu_offload=params']),
    'ddp 3': (3, 'one', []),
    'fsdp 3': (3, 'one', FSDP),
    'hsdp': (4, 'even', [*FSDP, '--replicate_size=2', '--prompts_per_step=4']),
    'even': (1, None, ['--prompts_per_step=4']),
    'nf4': (1, None, [*LORA, '--frozen_dtype=nf4']),
    'stage 2, nf4': (2, 'nf4', [*STAGE_2, *LORA, '--frozen_dtype=nf4']),
}
SHORT = [
    'one',
    'unpacked',
    'written by fives',
    'lora',
    'twice',
    'masked',
    'chats',
    'own reward',
    'ddp, own reward',
    'ddp',
    'fsdp',
    'stage 2',
    'fsdp, lora',
]
OF_ONE = ['--out_dir=FOLDER/run one']  # which they would resume
REFUSED = {  # name: (ranks, keys, what the line says)
    'no prompts': (1, ['--prompts=[]'], 'no prompts: name files of tasks'),
    'choices': (1, ['--prompts=FOLDER/choices.jsonl'], 'rows with choices; expected {"prompt"'),
    'long': (1, ['--prompts=FOLDER/long.jsonl'], 'more than the 40 that the model sees'),
    'score': (1, ['--reward=f1'], 'reward=f1: .*which scores acc: .*=FILE.py:FUNCTION, else use --reward=acc$'),
    'no function': (1, ['--reward=FOLDER/own.py:f1'], "own.py has no function 'f1'; .*it has vowels"),
    'a row fails': (
        2,
        [*OWN[:1], '--reward=FOLDER/fails.py:vowels', '--max_iters=8'],
        r'fails.py:vowels: for the answer .* to .*free.jsonl, row 5 it raised ZeroDivisionError: .*line 3',
    ),
    'other function': (
        1,
        [*OWN, '--reward=FOLDER/changed.py:vowels', '--out_dir=FOLDER/run own reward'],
        'trained by another reward, vowels, sha256 [0-9a-f]+; this run has vowels, sha256 .*: go on with the file as',
    ),
    'rules again': (1, ['--out_dir=FOLDER/run own reward'], 'this run has the rules of its rows .reward=None.: go on'),
    'two scores': (1, ['--prompts=FOLDER/two.jsonl'], 'several scores: name one, --reward=strict_match'),
    'scratch': (1, ['--init_from=scratch'], 'would write noise'),
    'eval_only': (1, ['--eval_only=True'], 'use `python evaluate.py'),
    'stage 3': (1, ['--strategy=fsdp', '--fsdp_impl=manual'], 'use --zero_stage=2, or --fsdp_impl=torch'),
    'batch': (1, ['--batch_size=7'], 'batch_size=7 does not divide the 24 answers .* use --batch_size=[68]'),
    'ranks': (2, ['--prompts_per_step=5'], 'use --prompts_per_step=4 or 6'),
    'dropout': (1, ['--lora_rank=4', '--lora_dropout=0.1'], 'leave lora_dropout out'),
    'z_loss': (1, ['--z_loss=0.1'], 'use --z_loss=0'),
    'other groups': (
        1,
        [*OF_ONE, '--prompts_per_step=4', '--num_generations=6'],
        r'has prompts_per_step=6, this run has 4 \(command line\): go on with --prompts_per_step=6',
    ),
    'other lengths': (1, [*OF_ONE, '--max_new_tokens=4'], 'this run reads prompts=.*, max_new_tokens=4: use another'),
}


@pytest.fixture(scope='module')
def runs(folder, has_slow_tests):
    """{name: its out_dir} of CASES, and of REFUSED what ended it, {name: text}."""
    cases = {name: (ranks, keys) for name, (ranks, _, keys) in CASES.items() if has_slow_tests or name in SHORT}
    refused = {name: (ranks, 'train_grpo.py', keys) for name, (ranks, keys, _) in REFUSED.items()}
    return run_cases(folder, 'train_grpo.py', cases, refused, keys_of)


@pytest.mark.parametrize(
    ('name', 'options'),
    [('one', {}), ('twice', {'temperature': 0.7, 'iterations': 2, 'grpo': True}), ('masked', {'masked': True})],
)
def test_a_run_is_equal_to_a_plain_loop(folder, runs, name, options):
    """Which writes without a cache, one answer after the other, and has no rows, no packing and no chunks."""
    out = runs[0][name]
    found = metrics(out)
    shown, rows = plain_loop(folder, torch.float32, **options)
    in_float64, exact = plain_loop(folder, torch.float64, **options)
    # The loop in fp32 may draw another token than in float64 where two are about as likely, and goes its own way then.
    alike = sum(itertools.accumulate(map(operator.eq, shown, in_float64), operator.and_))
    ours = [[[one['text'], one['reward']] for one in row['answers']] for row in rollouts_of(out)]
    assert ours[:alike] == shown[:alike] and len(ours) == len(shown) and alike > 1
    for fact in rows[0]:
        ours, plain, float64 = ([row[fact] for row in some[:alike]] for some in (found, rows, exact))
        assert_as_close_to_float64(ours, plain, float64, fact)
    assert 0 < min(row['reward'] for row in found) and 0 < found[0]['completions/clipped_ratio'] < 1
    assert name != 'twice' or any(row['clip_ratio/region_mean'] for row in found)
    for row in found:
        mean, largest = (row[f'sampling/sampling_logp_difference/{which}'] for which in ('mean', 'max'))
        assert 0 < mean < largest <= LARGEST


@pytest.mark.parametrize('name', slow_but(SHORT, [name for name, case in CASES.items() if case[1]]))
def test_layouts_are_equal(runs, name):
    """What is written, to the letter, and what is learned from it. (The loss itself is a small rest of large terms.)"""
    out, expected = runs[0][name], runs[0][CASES[name][1]]
    assert rollouts_of(out) == rollouts_of(expected)
    for fact in (*OF_ANSWERS, 'clip_ratio/region_mean'):
        assert column(out, fact) == pytest.approx(column(expected, fact), rel=1e-12), fact
    assert_same_run(column(out, 'entropy'), column(expected, 'entropy'), name)
    assert_same_run(column(out, 'grad_norm')[:1], column(expected, 'grad_norm')[:1], name)


def test_a_reward_of_ones_own_judges_each_answer_and_the_tasks(runs):
    out = runs[0]['own reward']
    answers = [answer for row in rollouts_of(out) for answer in row['answers']]
    of_text = [sum(letter in 'aeiou' for letter in one['text']) - len(one['text']) / 4 for one in answers]
    assert [one['reward'] for one in answers] == of_text and len({*of_text}) > 4
    scored = [row for row in metrics(out) if 'free/reward' in row]
    assert len(scored) == 2 and not any('free/acc' in row for row in scored)


def test_a_run_on_chats_is_known_as_one_afterwards(runs):
    of_steps = {'one': STEPS, 'chats': 1}
    configs = [
        checkpoint.read_state(str(runs[0][name] / 'checkpoints' / f'step_{step:08}'))['config']
        for name, step in of_steps.items()
    ]
    assert [config['chats'] for config in configs] == [False, True]  # sample.py and export_model.py ask for it


def test_tasks_are_scored_with_as_many_examples_as_prompts_have(folder, tmp_path):
    rows = rows_of_prompts()
    rows[0]['num_fewshot'] = 5  # as in GSM8K's file: with them no question would fit
    write_rows(tmp_path / 'few.jsonl', rows)
    keys = {'eval_tasks': [tmp_path / 'few.jsonl'], 'block_size': BLOCK, 'batch_size': 2, 'num_fewshot': 0}
    keys |= {'eval_tasks_chat': False, 'eval_tasks_limit': None, 'trust_remote_code': False}
    pretrained = Pretrained(str(folder / 'llama'))
    language = Opened('llama', pretrained.folder, pretrained=pretrained).language()
    others = SimpleNamespace(tensor=1), language, pretrained, torch.device('cpu')
    (task,) = in_run.tasks_of(keys, *others).tasks
    assert task.num_fewshot == 0
    with pytest.raises(ValueError, match='lower num_fewshot, which is 5$'):
        in_run.tasks_of(keys | {'num_fewshot': None}, *others)


def test_keys_of_a_dataset_say_that_they_have_no_effect_with_the_values_that_were_typed(runs):
    log = (runs[0]['unpacked'] / 'train.log').read_text()
    lines = [line.split(' WARNING: ')[1] for line in log.splitlines() if ' has no effect here' in line]
    given = ('eval_interval=3', 'eval_sequences=35', 'global_batch_size=7')
    assert sorted(lines) == [
        f'{key} has no effect here, only in scripts that learn from a dataset: here it is --prompts' for key in given
    ]


@pytest.mark.parametrize('name', REFUSED)
def test_it_is_refused_in_one_line(runs, name):
    lines = [line for line in runs[1][name].splitlines() if re.search(REFUSED[name][2], line)]
    assert lines, runs[1][name]


def test_a_killed_run_goes_on_to_the_bit(folder, runs):
    for name in ('ddp',):
        out = runs[0][name]
        killed = as_of_step(2, out, folder / f'killed {name}', rows=3)
        arguments = keys_of(folder, killed, *CASES[name][2])
        run_many([{'name': name, 'script': 'train_grpo.py', 'arguments': arguments}], 2, folder)
        assert_same_weights(killed, out, STEPS)
        assert_same_rows(killed, out, ('step', 'loss', 'grad_norm', 'entropy', *OF_ANSWERS))
        assert rollouts_of(killed) == rollouts_of(out)


# --- in one process ---------------------------------------------------------------------------------------------------


@pytest.fixture
def alone():
    torch._dynamo.reset()
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


def tiny_run(folder, rank=0, world_size=1, **keys):
    """A run, as far as rollouts.py asks for it, with its model."""
    given = {'prompts': [f'{folder}/prompts.jsonl'], 'init_from': f'{folder}/llama', 'out_dir': str(folder)}
    given |= {'prompts_per_step': PROMPTS, 'num_generations': GROUP, 'batch_size': 2, 'block_size': BLOCK, 'seed': SEED}
    given |= {'packing': True, 'temperature': 1.0, 'strategy': 'ddp'}
    unset = 'prompts_chat num_fewshot reward max_new_tokens generation_batch_size eval_only trust_remote_code compile '
    unset += 'mask_truncated'
    config = SimpleNamespace(**{**dict.fromkeys(unset.split()), **given, **keys})
    pretrained = Pretrained(given['init_from'])
    run = SimpleNamespace(config=config, pretrained=pretrained, rank=rank, world_size=world_size)
    run.device = torch.device('cpu')
    rollouts.open_prompts(run)
    with torch.device('meta'):
        model = finetune.for_training(pretrained)
    model.to_empty(device='cpu')
    loading.load(model, pretrained)
    return run, model


def test_only_the_shape_of_training_is_compiled(folder, alone):
    """Answers grow token by token: compiled, they would use up the recompilations that dynamo allows."""
    run, model = tiny_run(folder, compile=True)
    counter, beats = CompileCounterWithBackend('eager'), []
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=counter)
    groups = rollouts.write_groups(model, run, 0, lambda: beats.append(1))
    assert counter.frame_count == 0
    assert len(beats) == max(len(answer.ids) for group in groups for answer in group)  # a pass for each token
    documents = [(run.train_data.prompts[one.prompt].tokens, one.ids, 0, 1.0, 1.0) for group in groups for one in group]
    for x, y, starts, *_ in rollouts.micro_batches(documents, run):
        token_logps(model, x, y, starts).sum().backward()
    assert counter.frame_count == 1


def test_each_token_is_learned_from_the_text_that_it_was_drawn_from(alone, tmp_path):
    """As of LongRoPE, which computes all of a text in another way when it has more than TURN tokens."""
    import transformers

    save_model(tmp_path, 'phi3_longrope', initializer_range=0.3)
    pretrained = Pretrained(str(tmp_path))
    model = loading.for_generation(pretrained, None, torch.float32, 'cpu')
    prompts = [[*range(begin, begin + n)] for begin, n in ((1, 25), (60, 12), (130, TURN + 2), (90, TURN))]
    generators = [generator_of(SEED, str(n)) for n in range(len(prompts))]
    logps = [[] for _ in prompts]
    answers = sampling.generate_batch(model, prompts, 16, temperature=1.0, generators=generators, logps=logps)
    config = SimpleNamespace(packing=True, batch_size=2, block_size=64)
    run = SimpleNamespace(config=config, pretrained=pretrained, device=torch.device('cpu'))
    run.train_data = SimpleNamespace(n_starts=9)
    documents = [(*document, n, 1.0) for n, document in enumerate(zip(prompts, answers, logps, strict=True))]
    found, drawn, n_tokens = torch.zeros(len(prompts)), torch.zeros(len(prompts)), 0
    for x, y, starts, sampled, number, _ in rollouts.micro_batches(documents, run):
        again = token_logps(model, x, y, starts)
        found.index_add_(0, number.long(), again)
        drawn.index_add_(0, number.long(), sampled)
        n_tokens += len(number)

    def without_cache(dtype):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
        sums = torch.zeros(len(prompts), dtype=torch.float64)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            for place, token in enumerate(answer):
                logits = theirs(torch.tensor([[*prompt, *answer[:place]]]), use_cache=False).logits[0, -1]
                sums[row] += logits.log_softmax(-1)[token].item()
        return sums

    with torch.no_grad():
        in_float32, in_float64 = without_cache(torch.float32), without_cache(torch.float64)
    for sums in (found, drawn):
        assert_as_close_to_float64(sums, in_float32, in_float64)
    assert n_tokens == sum(map(len, answers))


def test_an_epoch_is_of_prompts(folder):
    run, _ = tiny_run(folder)
    config, prompts = run.config, run.train_data
    assert fill.iterations_of_epochs(1, prompts.n_windows, config.global_batch_size) == 4  # 20 prompts by sixes
    keys = {
        'eval_only': False,
        'eval_sequences': 0,
        'trace_step': 0,
        'max_iters': 4,
        'trace_memory': False,
        'min_lr': 1,
    }
    keys |= {'device': 'cpu', 'warmup_iters': 0, 'lr_decay_iters': 4, **vars(config)}
    assert fill.cautions(keys, prompts.n_windows) == []
    keys |= {'prompts_per_step': 21, 'global_batch_size': 21 * GROUP}
    (line,) = fill.cautions(keys, prompts.n_windows)
    assert 'prompts_per_step=21 is more than the 20 prompts' in line


def test_a_full_disk_ends_no_run(folder, alone, tmp_path):
    run, model = tiny_run(folder, out_dir=str(tmp_path))
    said = []
    record = rollouts.Record(run, 0, said.append)
    record.path = '/dev/full'
    groups = rollouts.write_groups(model, run, 0, lambda: None)
    record.begin_step(groups)
    for step in (1, 2):
        assert record.row(step, groups)['reward'] == np.mean([answer.reward for group in groups for answer in group])
    assert len([line for line in said if '/dev/full from step 1 on: [Errno 28]' in line]) == 1


def error_of_rank(folder):
    rank = dist.get_rank()
    run, model = tiny_run(folder, rank=rank, world_size=2)
    if rank == 1:
        torch.nn.init.constant_(next(model.parameters()), float('nan'))
    try:
        rollouts.write_groups(model, run, 0, lambda: None)
    except ValueError as error:
        return str(error)


def test_all_ranks_say_what_one_of_them_cannot_compute(folder):
    lines = run_function(2, error_of_rank, str(folder))
    assert lines[0] == lines[1] and 'logits after' in lines[0] and 'not finite' in lines[0]


# --- beside TRL -------------------------------------------------------------------------------------------------------

# The first and the last of the ten losses, which TRL 1.16 gave on another machine, with old log-probabilities.
TRLS_LOSSES = {('dapo', 'group'): (0.0712757, -0.2075298), ('dr_grpo', 'none'): (0.0141095, -0.0460833)}
PROMPTS_OF_TRL, TEMPERATURE, CUT_AT = 2, 0.9, 12


def log_probabilities(model, answers):
    """Those of the tokens of all answers (prompt, ids), which stand packed in one row."""
    x, y, starts = [], [], [0]
    for prompt, ids in answers:
        x += (prompt + ids)[:-1]
        y += [-1] * (len(prompt) - 1) + ids
        starts.append(len(x))
    return token_logps(model, torch.tensor([x]), torch.tensor([y]), torch.tensor([starts]), TEMPERATURE)


def steps_of_trl(model):
    """Ten steps: [(answers, their rewards, [old log-probabilities] of each)], written by weights near the first."""
    draw, near, steps = torch.Generator().manual_seed(1), copy.deepcopy(model), []
    noise = llama_of_trl(5).state_dict()

    def ids(low, high):
        length = int(torch.randint(low, high, (), generator=draw))
        return torch.randint(1, 63, (length,), generator=draw).tolist()

    with torch.no_grad():
        for name, parameter in near.named_parameters():
            parameter += 0.02 * noise[name]
        for _ in range(10):
            answers = []
            for _ in range(PROMPTS_OF_TRL):
                prompt = ids(3, 9)
                answers += [(prompt, ids(1, CUT_AT)) for _ in range(GROUP)]
            rewards = torch.randint(0, 2, (len(answers),), generator=draw).float()
            old = log_probabilities(near, answers).split([len(ids) for _, ids in answers])
            steps.append((answers, rewards, old))
    return steps


def padded(answers, old, advantages, tokens):
    """A micro-batch as TRL's trainer has it: prompts padded on the left, answers on the right."""
    widths = {'prompt': max(len(prompt) for prompt, _ in answers), 'completion': max(len(ids) for _, ids in answers)}
    batch = {
        f'{part}_{what}': torch.zeros(len(answers), width, dtype=torch.int64)
        for part, width in widths.items()
        for what in ('ids', 'mask')
    }
    before = torch.zeros(len(answers), widths['completion'])
    for row, ((prompt, ids), values) in enumerate(zip(answers, old, strict=True)):
        batch['prompt_ids'][row, -len(prompt) :] = torch.tensor(prompt)
        batch['prompt_mask'][row, -len(prompt) :] = 1
        batch['completion_ids'][row, : len(ids)] = torch.tensor(ids)
        batch['completion_mask'][row, : len(ids)] = 1
        before[row, : len(ids)] = values
    batch |= {'advantages': advantages, 'num_items_in_batch': torch.tensor(float(tokens))}
    return batch | {'old_per_token_logps': before}


def by_trl(model, steps, advantages_of, loss_type, folder):
    """The losses of TRL's GRPOTrainer, which is given all that it would write itself; 4 answers a micro-step."""
    import datasets
    import trl

    class Trainer(trl.GRPOTrainer):
        def _prepare_inputs(self, batch):
            step, micro_step = divmod(self._step, 2)
            answers, rewards, old = steps[step]
            part = slice(micro_step * 4, micro_step * 4 + 4)
            advantages = advantages_of(rewards.view(-1, GROUP)).flatten()[part]
            return padded(answers[part], old[part], advantages, sum(len(ids) for _, ids in answers))

    config = {'max_steps': len(steps), 'per_device_train_batch_size': 4, 'num_generations': GROUP, 'beta': 0.0}
    config |= {'max_completion_length': CUT_AT, 'temperature': TEMPERATURE, 'loss_type': loss_type}
    trainer = {'reward_funcs': lambda completions, **_: [0.0] * len(completions)}
    trainer |= {'train_dataset': datasets.Dataset.from_list([{'prompt': '1 2'}] * 64)}
    return losses_of_trl(Trainer, trl.GRPOConfig, folder, model, config, **trainer)


@pytest.mark.slow
@pytest.mark.parametrize(('loss_type', 'scale'), [('dapo', 'group'), ('dr_grpo', 'none'), ('grpo', 'group')])
def test_ten_steps_are_those_of_trl(tmp_path, loss_type, scale):
    """Ours with the answers packed into rows, and with uneven micro-steps. The answers come from other weights, as in a
    later one of num_iterations."""
    pytest.importorskip('trl')
    theirs = llama_of_trl(0)
    model = as_ours(theirs, tmp_path / 'model')
    steps, losses = steps_of_trl(model), []
    config = config_of(loss_type, scale, epsilon_high=0.2)
    config.prompts_per_step = PROMPTS_OF_TRL
    advantages_of, weight_of, losses_of_tokens = (
        function_of('train_grpo.py', name, config=config) for name in ('advantages_of', 'weight_of', 'losses_of_tokens')
    )
    opt = optimizer_of_trl(model)
    for answers, rewards, old in steps:
        advantages, lengths, total = (
            advantages_of(rewards.view(-1, GROUP)).flatten(),
            [len(ids) for _, ids in answers],
            0,
        )
        for part in (slice(0, 3), slice(3, 8)):
            repeats = torch.tensor(lengths[part])
            weights = torch.tensor([weight_of(n, sum(lengths), CUT_AT) for n in lengths[part]])
            found, _ = losses_of_tokens(
                log_probabilities(model, answers[part]),
                torch.cat(old[part]),
                None,  # the sampler's, which `log` does not use
                advantages[part].repeat_interleave(repeats),
            )
            loss = (found * weights.repeat_interleave(repeats)).sum()
            loss.backward()
            total += loss.item()
        step_of_trl(model, opt)
        losses.append(total)
    expected = by_trl(theirs, steps, advantages_of, loss_type, tmp_path / 'out')
    assert_equal_to_trl(losses, expected, 1e-6, model, theirs, 2e-5)
    if (loss_type, scale) in TRLS_LOSSES:
        assert [losses[0], losses[-1]] == pytest.approx(TRLS_LOSSES[loss_type, scale], abs=5e-6)
