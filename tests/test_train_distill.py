"""train_distill.py: the divergence beside formulas and TRL, a plain loop of transformers; layouts, resumed runs,
refusals."""

import itertools
import math
import operator
import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from chats import write_rows
from launch import fork_script, function_of, run_function, run_many
from outputs import as_of_step, assert_same_rows, assert_same_weights, column, metrics
from post_training import LONGEST, STOP, ids_of, rollouts_of, run_cases, written
from precision import assert_as_close_to_float64, assert_same_run
from pretrained import save_model
from short import slow_but
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import logprobs
from dataset.shuffle import permuted
from huggingface import nf4
from layout import Layout
from loss import LogitsOf, softcapped
from model import generator_of
from runtime import begin, teacher
from runtime.opened import open_model
from text.tokenizer import byte_level_bpe

SEED, BLOCK, STEPS, PROMPTS, GROUP = 1337, 40, 4, 6, 2
RUN = [f'--seed={SEED}', f'--block_size={BLOCK}', f'--prompts_per_step={PROMPTS}', f'--num_generations={GROUP}']
RUN += ['--batch_size=2', f'--max_iters={STEPS}', '--warmup_iters=0', '--device=cpu', '--dtype=float32']
# Without Adam, for the reason given in test_train_grpo.py.
RUN += ['--optimizer=sgd', '--learning_rate=0.3', '--lr_schedule=constant', '--weight_decay=0', '--log_interval=1']
RUN += ['--compile=False', '--checkpoint_interval=2']
OF_ANSWERS = 'completions/mean_length completions/clipped_ratio'.split()
OF_TOKENS = 'loss entropy teacher_entropy'.split()


def rows_of_prompts(n=20):
    return [
        {'prompt': f'{number}' * (1 + number % 3) + ':', 'stop': STOP, 'max_new_tokens': LONGEST} for number in range(n)
    ]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A tiny Llama, its teacher, prompts.jsonl, whose rows have no answers, and teachers that do not fit."""
    import transformers

    folder = tmp_path_factory.mktemp('distill')
    save_model(folder / 'llama', 'llama_64')
    save_model(folder / 'teacher', 'llama', draw=1)
    save_model(folder / 'of 64', 'qwen2_64', draw=1)
    save_model(folder / 'wider', 'llama', vocab_size=320)
    save_model(folder / 'shorter', 'llama', max_position_embeddings=BLOCK - 1)
    save_model(folder / 'mamba', 'mamba')
    save_model(folder / 'spelled', 'llama')
    of_bytes = {bytes([byte]): byte ^ 1 for byte in range(256)}
    bpe = byte_level_bpe(of_bytes, {'<|endoftext|>': 256, '<|im_start|>': 257, '<|im_end|>': 258})
    transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token='<|im_end|>').save_pretrained(
        folder / 'spelled'
    )
    write_rows(folder / 'prompts.jsonl', rows_of_prompts())
    return folder


def keys_of(folder, out, *more):
    more = [key.replace('FOLDER', str(folder)) for key in more]
    base = [f'--init_from={folder}/llama', f'--teacher={folder}/teacher', f'--prompts={folder}/prompts.jsonl']
    return [*RUN, *base, f'--out_dir={out}', *more]


# --- the loss ---------------------------------------------------------------------------------------------------------


def losses_of_script(beta):
    names = {'config': SimpleNamespace(beta=beta), 'math': math}
    names['kl'] = function_of('train_distill.py', 'kl')
    return function_of('train_distill.py', 'losses_of_tokens', **names)


def formula(student, teacher, beta):
    """The generalized JSD of each token by GKD's equations, of logits (n, V); with probabilities, not their logs."""
    q, p = student.softmax(-1), teacher.softmax(-1)

    def divergence(a, b):
        return (a * (a / b).log()).sum(-1)

    if beta in (0, 1):
        return divergence(p, q) if beta == 0 else divergence(q, p)
    mixture = beta * p + (1 - beta) * q
    return beta * divergence(p, mixture) + (1 - beta) * divergence(q, mixture)


def hidden_states(seed, n_tokens=(3, 19), V=37, taught_V=37):
    """(student's hidden states and head, teacher's, y) of a batch in which some positions have no target."""
    draw = torch.Generator().manual_seed(seed)
    sizes = (*n_tokens, 11), (V, 11), (*n_tokens, 7), (taught_V, 7)
    tensors = [torch.randn(size, generator=draw) for size in sizes]
    return tensors, torch.randint(-1, 2, n_tokens, generator=draw).clamp(max=0)


def by_divergence(tensors, y, beta, temperature=1.0, cap=None):
    """(loss_sum, gradient of the student's hidden states, of its head, both entropies) by logprobs.divergence()."""
    hidden, weight, taught, taught_weight = (tensor.clone() for tensor in tensors)
    hidden.requires_grad_(), weight.requires_grad_()

    def student(x, starts, then):
        return then(hidden, LogitsOf(weight, hidden.dtype, cap))

    def teacher(x, starts, then):
        return then(taught, LogitsOf(taught_weight, taught.dtype))

    loss, entropies = logprobs.divergence(student, teacher, y, y, None, losses_of_script(beta), temperature)
    (loss * 0.3).backward()
    return loss.detach(), hidden.grad, weight.grad, entropies


def by_formula(tensors, y, beta, temperature, cap, dtype):
    hidden, weight, taught, taught_weight = (tensor.clone().to(dtype) for tensor in tensors)
    hidden.requires_grad_(), weight.requires_grad_()
    V = min(len(weight), len(taught_weight))  # more rows only pad an embedding
    logits = softcapped(hidden @ weight.T, cap)[y >= 0] / temperature, (taught @ taught_weight.T)[y >= 0] / temperature
    logits = [of[:, :V] for of in logits]
    loss = formula(*logits, beta).sum()
    (loss * 0.3).backward()
    entropies = torch.stack([torch.distributions.Categorical(logits=of.detach()).entropy() for of in logits])
    return loss.detach(), hidden.grad, weight.grad, entropies


@pytest.mark.parametrize(
    ('beta', 'temperature', 'cap'),
    [(0, 1.0, None), (0.1, 1.0, None), (0.5, 0.7, None), (1, 1.0, None), (1, 1.3, 4.0), (0.5, 1.0, 4.0)],
)
def test_the_divergence_and_its_gradients_are_those_of_the_paper(monkeypatch, beta, temperature, cap):
    tensors, y = hidden_states(seed=3, taught_V={0.5: 37, 0: 40}.get(beta, 35))
    expected = [by_formula(tensors, y, beta, temperature, cap, dtype) for dtype in (torch.float32, torch.float64)]
    for tokens in (1, 4, 1000):  # of a chunk; the last one may have fewer
        monkeypatch.setitem(logprobs.LOGITS_BYTES, 'cpu', 4 * 4 * 37 * tokens)
        found = by_divergence(tensors, y, beta, temperature, cap)
        for name, ours, plain, exact in zip(('loss', 'hidden', 'head', 'entropies'), found, *expected, strict=True):
            assert_as_close_to_float64(ours, plain, exact, f'{name}, {tokens} tokens')
    assert not found[1][y < 0].any() and found[1][y >= 0].any()


class RowsOfLogits(TorchDispatchMode):
    """Notes how many rows the matrices have that have a column for each token."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        self.found |= {len(of) for of in tree_leaves(results) if isinstance(of, torch.Tensor) and of.shape[1:] == (37,)}
        return results


def test_no_more_logits_than_those_of_a_chunk_exist(monkeypatch):
    tensors, y = hidden_states(seed=3)
    monkeypatch.setitem(logprobs.LOGITS_BYTES, 'cpu', 4 * 4 * 37 * 5)
    with RowsOfLogits() as rows:
        by_divergence(tensors, y, 0.5)
    assert max(rows.found - {11, 7}) == 5 < (y >= 0).sum()  # both heads have a column for each token when transposed


def test_a_batch_without_targets_has_gradients_of_zero():
    """As on a rank that has fewer rows than others: DDP waits for its gradients."""
    tensors, y = hidden_states(seed=3)
    loss, of_hidden, of_head, entropies = by_divergence(tensors, torch.full_like(y, -1), 0.5)
    assert loss == 0 and entropies.shape == (2, 0)
    assert not of_hidden.any() and not of_head.any() and of_head.shape == (37, 11)


@pytest.mark.parametrize('beta', [0, 0.1, 0.5, 1])
def test_the_divergence_is_trls(beta):
    gkd = pytest.importorskip('trl.experimental.gkd')
    tensors, y = hidden_states(seed=5)
    loss, of_hidden, of_head, _ = by_divergence(tensors, y, beta, temperature=0.9)
    hidden, weight, taught, taught_weight = (tensor.clone() for tensor in tensors)
    hidden.requires_grad_(), weight.requires_grad_()
    labels = torch.where(y >= 0, y, -100)
    options = {'labels': labels, 'beta': beta, 'temperature': 0.9, 'reduction': 'sum'}
    theirs = gkd.GKDTrainer.generalized_jsd_loss(hidden @ weight.T, taught @ taught_weight.T, **options)
    (theirs * 0.3).backward()
    *exact, _ = by_formula(tensors, y, beta, 0.9, None, torch.float64)
    for ours, trls, float64 in zip((loss, of_hidden, of_head), (theirs, hidden.grad, weight.grad), exact, strict=True):
        assert_as_close_to_float64(ours, trls.detach(), float64)


def test_on_policy_steps_are_spread_evenly():
    def steps(share):
        writes = function_of('train_distill.py', 'student_writes', config=SimpleNamespace(on_policy=share), math=math)
        return [writes(step) for step in range(20)]

    assert steps(0.0) == [False] * 20 and steps(1.0) == [True] * 20
    assert steps(0.25) == [False, False, False, True] * 5
    assert sum(steps(0.7)) == 14


# --- beside a plain loop ----------------------------------------------------------------------------------------------


def plain_loop(folder, dtype, beta=1.0, temperature=1.0, by_turns=False):
    """([[text, ...] of the first group of each step], metrics) of a run, by transformers alone. by_turns: the teacher
    writes in steps 0 and 2, the student in the others."""
    import transformers

    student, teacher = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=dtype) for name in ('llama', 'teacher')
    )
    opt = torch.optim.SGD(student.parameters(), lr=0.3)
    rows, shown, found = rows_of_prompts(), [], []
    for step in range(STEPS):
        slots = np.arange(step * PROMPTS, (step + 1) * PROMPTS)
        writer, answers = teacher if by_turns and step % 2 == 0 else student, []
        for slot, number in zip(slots, permuted(slots, len(rows), SEED), strict=True):
            prompt = ids_of(rows[number]['prompt'])
            for k in range(GROUP):
                generator = generator_of(SEED, f'prompt {slot} of the run, answer {k}')
                answers.append((prompt, *written(writer, prompt, generator, temperature)))
        shown.append([text for _, _, text, _ in answers[:GROUP]])
        tokens, loss, entropies = sum(len(ids) for _, ids, *_ in answers), 0.0, np.zeros(2)
        for prompt, ids, *_ in answers:
            logits = [
                model(torch.tensor([prompt + ids[:-1]])).logits[0, len(prompt) - 1 :] / temperature
                for model in (student, teacher)
            ]
            loss = loss + formula(logits[0], logits[1].detach(), beta).sum() / tokens
            entropies += [torch.distributions.Categorical(logits=of.detach()).entropy().sum().item() for of in logits]
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0).item()
        opt.step()
        opt.zero_grad()
        row = {'loss': loss.item(), 'grad_norm': norm}
        row |= dict(zip(('entropy', 'teacher_entropy'), entropies / tokens, strict=True))
        row['completions/mean_length'] = tokens / len(answers)
        row['completions/clipped_ratio'] = np.mean([not ended for *_, ended in answers])
        found.append(row)
    return shown, found


LORA, FSDP = ['--lora_rank=4'], ['--strategy=fsdp']
STAGE_2 = [*FSDP, '--fsdp_impl=manual', '--zero_stage=2']
JSD = ['--beta=0.3', '--temperature=0.8', '--on_policy=0.5']
BY_LORA = ['--teacher=FOLDER/run lora']
NF4 = ['--teacher=FOLDER/of 64', '--teacher_dtype=nf4', '--on_policy=0.5']
BF16 = ['--dtype=bfloat16', '--max_iters=2']
TAKES_BYTES = torch.__version__ >= (2, 13)  # fully_shard
CASES = {  # name: (ranks, the case that it has to equal, keys)
    'one': (1, None, []),
    'jsd': (1, None, JSD),
    'accumulated by sixes': (1, 'one', ['--batch_size=6']),
    'unpacked': (1, 'one', ['--packing=False']),
    'native': (1, 'one', ['--native=True']),
    'lora': (1, None, LORA),
    'taught by lora': (1, None, BY_LORA),
    'ddp': (2, 'one', []),
    'fsdp': (2, 'one', FSDP),
    'stage 2': (2, 'one', STAGE_2),
    'ddp, jsd': (2, 'jsd', JSD),
    'fsdp, jsd': (2, 'jsd', [*FSDP, *JSD]),
    'stage 2, jsd': (2, 'jsd', [*STAGE_2, *JSD]),
    'fsdp, lora': (2, 'lora', [*FSDP, *LORA]),
    'fsdp, taught by lora': (2, 'taught by lora', [*FSDP, *BY_LORA]),
    'params on the host': (2, 'one', [*FSDP, '--cpu_offload=params']),
    'nf4': (1, None, NF4),
    'ddp, nf4': (2, 'nf4', NF4),
    **({'fsdp, nf4': (2, 'nf4', [*FSDP, *NF4])} if TAKES_BYTES else {}),
    'stage 2, nf4': (2, 'nf4', [*STAGE_2, *NF4]),
    'bf16': (1, None, BF16),
    'fsdp, bf16': (2, None, [*FSDP, *BF16]),
    'fsdp 3': (3, 'one', FSDP),
    'hsdp': (4, 'even', [*FSDP, '--replicate_size=2', '--prompts_per_step=4']),
    'padded': (1, None, ['--teacher=FOLDER/wider', '--max_iters=2']),
    'even': (1, None, ['--prompts_per_step=4']),
}
SHORT = [
    'one',
    'jsd',
    'padded',
    'unpacked',
    'lora',
    'taught by lora',
    'ddp',
    'fsdp',
    'stage 2',
    'fsdp, jsd',
    'stage 2, jsd',
]
SHORT += ['nf4', 'stage 2, nf4', 'fsdp, taught by lora', 'fsdp, bf16', 'bf16']
OF_ONE = ['--out_dir=FOLDER/run one']  # which they would resume
REFUSED = {  # name: (ranks, keys, what the line says)
    'no teacher': (1, ['--teacher=None'], r'no teacher: name the model to learn from, .* as --teacher=models/NAME'),
    'not there': (1, ['--teacher=FOLDER/nobody'], 'nobody'),
    'other tokenizer': (
        2,
        ['--teacher=FOLDER/spelled'],
        r'teacher=.*/spelled: its tokenizer has other tokens than that of .*/llama, the first of them 0, ',
    ),
    'more rows': (1, ['--teacher=FOLDER/wider', '--on_policy=0.5'], 'has logits for 320 tokens, .* --on_policy=1$'),
    'few positions': (1, ['--teacher=FOLDER/shorter'], 'has 39 positions: use --block_size=39 or less'),
    'mixes rows': (1, ['--teacher=FOLDER/mamba'], 'mamba would let the answers in a row see each other: .*packing=Fal'),
    'another teacher': (
        2,
        ['--teacher=FOLDER/llama', '--out_dir=FOLDER/run ddp'],
        'holds other weights than the teacher that the run in .*run ddp has had: go on with that one',
    ),
    'nf4 of a run': (
        2,
        [*BY_LORA, '--teacher_dtype=nf4', '--out_dir=FOLDER/new'],
        'name an export of it, or leave teacher_dtype out',
    ),
    'nf4 of 40': (1, ['--teacher_dtype=nf4'], 'rows of .*q_proj have 40 weights, .* no --teacher_dtype'),
    'scratch': (1, ['--init_from=scratch'], 'would write noise'),
    'stage 3': (1, ['--strategy=fsdp', '--fsdp_impl=manual'], 'use --zero_stage=2, or --fsdp_impl=torch'),
    'dropout': (1, ['--lora_rank=4', '--lora_dropout=0.1'], 'leave lora_dropout out'),
    'other groups': (1, [*OF_ONE, '--prompts_per_step=3', '--num_generations=4'], 'has prompts_per_step=6, this run'),
}


@pytest.fixture(scope='module')
def runs(folder, has_slow_tests):
    """{name: its out_dir} of CASES, and of REFUSED what ended it, {name: text}."""
    cases = {name: (ranks, keys) for name, (ranks, _, keys) in CASES.items() if has_slow_tests or name in SHORT}
    refused = {name: (ranks, 'train_distill.py', keys) for name, (ranks, keys, _) in REFUSED.items()}
    return run_cases(folder, 'train_distill.py', cases, refused, keys_of)


@pytest.mark.parametrize(
    ('name', 'options'), [('one', {}), ('jsd', {'beta': 0.3, 'temperature': 0.8, 'by_turns': True})]
)
def test_a_run_is_equal_to_a_plain_loop(folder, runs, name, options):
    """Which writes without a cache, one answer after the other, and has no rows, no packing and no chunks."""
    out = runs[0][name]
    shown, rows = plain_loop(folder, torch.float32, **options)
    in_float64, exact = plain_loop(folder, torch.float64, **options)
    # The loop in fp32 may draw another token than in float64 where two are about as likely, and goes its own way then.
    alike = sum(itertools.accumulate(map(operator.eq, shown, in_float64), operator.and_))
    ours = [[one['text'] for one in row['answers']] for row in rollouts_of(out)]
    assert ours[:alike] == shown[:alike] and len(ours) == len(shown) and alike > 1
    for fact in rows[0]:
        found, plain, float64 = ([row[fact] for row in some[:alike]] for some in (metrics(out), rows, exact))
        assert_as_close_to_float64(found, plain, float64, fact)
    assert not any('reward' in row for row in metrics(out)) and 'reward' not in rollouts_of(out)[0]['answers'][0]


@pytest.mark.parametrize('name', slow_but(SHORT, [name for name, case in CASES.items() if case[1]]))
def test_layouts_are_equal(runs, name):
    """What is written, to the letter, and what is learned from it."""
    out, expected = runs[0][name], runs[0][CASES[name][1]]
    assert rollouts_of(out) == rollouts_of(expected)
    for fact in OF_ANSWERS:
        assert column(out, fact) == pytest.approx(column(expected, fact), rel=1e-12), fact
    for fact in (*OF_TOKENS, 'grad_norm'):
        assert_same_run(column(out, fact), column(expected, fact), f'{name}, {fact}')


@pytest.mark.parametrize('name', REFUSED)
def test_it_is_refused_in_one_line(runs, name):
    lines = [line for line in runs[1][name].splitlines() if re.search(REFUSED[name][2], line)]
    assert lines, runs[1][name]


@pytest.mark.parametrize('name', ['ddp', 'stage 2, jsd'])
def test_a_killed_run_goes_on_to_the_bit(folder, runs, name):
    out = runs[0][name]
    killed = as_of_step(2, out, folder / f'killed {name}', rows=3)
    arguments = keys_of(folder, killed, *CASES[name][2])
    run_many([{'name': name, 'script': 'train_distill.py', 'arguments': arguments}], 2, folder)
    assert_same_weights(killed, out, STEPS)
    assert_same_rows(killed, out, ('step', 'grad_norm', *OF_TOKENS, *OF_ANSWERS))
    assert rollouts_of(killed) == rollouts_of(out)


def test_a_plan_counts_the_teacher(folder, tmp_path):
    large = save_model(tmp_path / 'large', 'llama', hidden_size=640, intermediate_size=1280)
    nbytes = os.path.getsize(tmp_path / 'large' / 'model.safetensors')
    for strategy, share in (('ddp', 1), ('fsdp', 2)):
        keys = keys_of(folder, tmp_path / 'out', f'--teacher={large}', '--dry_run', f'--strategy={strategy}')
        said = fork_script('train_distill.py', *keys, nproc=2)[0].stdout
        rows = dict(re.findall(r'^  (\S.*?) {2,}([\d.]+)$', said, re.MULTILINE))
        assert float(rows['teacher']) == pytest.approx(nbytes / share / 1e9, abs=6e-4), said
        assert float(rows['total on the device']) > float(rows['teacher'])
    said = fork_script('train_distill.py', *keys, '--teacher_dtype=nf4', nproc=2)[0].stdout
    in_blocks = 3 * 640 * (640 + 640 + 320 + 320 + 3 * 1280)  # numbers of 4 bits, and 16 bits for each 64
    in_nf4 = (nbytes - in_blocks * (4 - 34 / 64)) / share / 1e9
    assert float(re.search(r'^  teacher +([\d.]+)$', said, re.MULTILINE)[1]) == pytest.approx(in_nf4, abs=6e-4), said


def run_of_teacher(folder, strategy, dtype, teacher_dtype=None):
    """The Run of two ranks that load_teacher() takes."""
    config = {'strategy': strategy, 'teacher': folder, 'fsdp_impl': 'torch', 'zero_stage': 3, 'seed': SEED}
    config |= {'blocks_per_unit': 1, 'cpu_offload': 'none', 'timeout_s': 60, 'block_size': BLOCK, 'dtype': dtype}
    config |= {'teacher_dtype': teacher_dtype}
    layout = Layout.of(config | {'global_batch_size': 2, 'batch_size': 1}, strategy, 2)
    place = dist.get_rank(), 2, torch.device('cpu'), getattr(torch, dtype)
    return begin.Run(SimpleNamespace(**config), {}, {}, strategy, *place, layout=layout)


def facts_of_teacher(folder, strategy):
    """(dtypes of a teacher's weights, whether any is trained or it is in training mode, numbers that this rank has)."""
    model = teacher.load_teacher(open_model(folder), run_of_teacher(folder, strategy, 'bfloat16'))
    parameters = [*model.parameters()]
    local = [getattr(parameter, 'to_local', lambda of=parameter: of)() for parameter in parameters]
    is_trained = model.training or any(parameter.requires_grad for parameter in parameters)
    return {str(parameter.dtype) for parameter in parameters}, is_trained, sum(of.numel() for of in local)


def test_a_teacher_is_frozen_in_half_precision_whole_or_in_shards(folder):
    path = str(folder / 'teacher')
    whole, sharded = (run_function(2, facts_of_teacher, path, strategy) for strategy in ('ddp', 'fsdp'))
    for dtypes, is_trained, _ in (*whole, *sharded):
        assert dtypes == {'torch.bfloat16'} and not is_trained
    assert whole[0][2] == whole[1][2] == sum(numbers for *_, numbers in sharded)
    assert max(numbers for *_, numbers in sharded) < 0.6 * whole[0][2]


def logits_in_nf4(folder, strategy):
    """(logits of a teacher in nf4, those of transformers' own model whose weights have been rounded to nf4, how many
    matrices of its blocks are not packed)."""
    import transformers

    run, x = run_of_teacher(folder, strategy, 'float32', 'nf4'), torch.arange(2 * BLOCK).view(2, BLOCK)
    model = teacher.load_teacher(open_model(folder), run)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    linear = [module for module in plain.model.layers.modules() if isinstance(module, torch.nn.Linear)]
    for module in linear:
        module.weight.data = nf4.dequantize(nf4.quantize(module.weight.data))
    with torch.no_grad():
        found, expected = model(x), plain(x, use_cache=False).logits
    packed = sum(parameter.dtype == torch.uint8 for parameter in model.parameters())
    return found.tolist(), expected.tolist(), len(linear) - packed


@pytest.mark.parametrize('strategy', ['ddp', 'fsdp'] if TAKES_BYTES else ['ddp'])
def test_a_teacher_in_nf4_is_the_model_with_rounded_weights(folder, strategy):
    for found, expected, others in run_function(2, logits_in_nf4, str(folder / 'of 64'), strategy):
        assert found == expected and others == 0  # equal to the bit
