"""evaluate.py: log-likelihoods are those of a plain loop on any number of ranks, sharded or not; scores; mistakes in
task files."""

import importlib.util
import json
import math
import random
import re
import signal
import statistics
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from launch import REPO, TINY_MODEL, TINY_RUN, environment, fork_script, run_forked, run_script
from precision import MARGIN, apart, error, gap_of_choice
from pretrained import POSITIONS, save_model
from short import slow_but

from evaluation import grading, scoring, tasks
from huggingface.pretrained import Pretrained
from model import GPT, ModelConfig
from runtime.opened import Opened
from system import limits
from text.control_tokens import plain
from text.language import TransformersLanguage

EVALUATE = ['--device=cpu', '--dtype=float32', '--batch_size=7']
WORDS = 'the cat sat on a mat, and ran to see that Größe of it was 17 -- or so'.split()
MODELS = ('llama', 'gpt2', 'mistral', 'cohere', 'with_bos', 'native')  # cohere: logits of its own, no tree of choices


def some_text(draws, words):
    return ' '.join(draws.choice(WORDS) for _ in range(words))


def write_rows(path, rows):
    path.write_text('\n'.join(json.dumps(row) for row in rows) + '\n', encoding='utf-8')
    return path


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    """Tasks of the four forms. Contexts are empty, end in spaces, or are longer than the models' 64 or 32 tokens."""
    folder, draws = tmp_path_factory.mktemp('tasks'), random.Random(1)
    contexts = ['', 'A', 'Two  ', 'a line\n'] + [some_text(draws, n) for n in (1, 2, 3, 4, 5, 8, 12, 20, 30)]
    short = [word for word in WORDS if len(word) < 6]
    rows = []
    for context in contexts:
        choices = [' '.join(draws.choices(short, k=draws.randint(1, 3))) for _ in range(4)]
        rows.append({'context': context, 'choices': choices, 'gold': draws.randrange(4)})
    rows.append({'context': 'letters:', 'choices': ['A', 'B', 'C'], 'gold': 1})  # their inputs are the same
    rows.append({'context': 'alike', 'choices': ['abcd', 'abce', 'ab'], 'gold': 0})
    write_rows(folder / 'choices.jsonl', rows)
    rows = [{'contexts': [c + ' cup', c + ' bag'], 'continuation': 'is too old.', 'gold': 1} for c in contexts]
    write_rows(folder / 'contexts.jsonl', rows)
    rows = [{'context': context, 'continuation': draws.choice(short)} for context in contexts]
    write_rows(folder / 'words.jsonl', rows)
    write_rows(folder / 'texts.jsonl', [{'text': some_text(draws, n)} for n in (1, 5, 15, 60, 13)])
    return [folder / f'{name}.jsonl' for name in ('choices', 'contexts', 'words', 'texts')]


@pytest.fixture(scope='module')
def models(data_dir, tmp_path_factory):
    """{name: (what evaluate.py is given, a folder for transformers)} of classes of transformers, and of a run."""
    folder = tmp_path_factory.mktemp('models')
    found = {}
    for name in MODELS[:-1]:
        path = folder / name
        save_model(path, 'llama' if name == 'with_bos' else name)
        found[name] = (path, path)
    tokenizer = json.loads((folder / 'with_bos' / 'tokenizer.json').read_text())
    parts = [{'SpecialToken': {'id': '<|im_start|>', 'type_id': 0}}, {'Sequence': {'id': 'A', 'type_id': 0}}]
    special = {'<|im_start|>': {'id': '<|im_start|>', 'ids': [257], 'tokens': ['<|im_start|>']}}
    tokenizer['post_processor'] = {'type': 'TemplateProcessing', 'single': parts, 'pair': parts[:1] * 0 + parts}
    tokenizer['post_processor']['special_tokens'] = special
    (folder / 'with_bos' / 'tokenizer.json').write_text(json.dumps(tokenizer))
    settings = json.loads((folder / 'with_bos' / 'tokenizer_config.json').read_text())
    settings = {**settings, 'bos_token': '<|im_start|>'}
    (folder / 'with_bos' / 'tokenizer_config.json').write_text(json.dumps(settings))
    run = [*TINY_MODEL, *TINY_RUN, '--arch=enoki', '--dataset=tiny', '--max_iters=3', f'--data_dir={data_dir}']
    run_forked('train_ddp.py', *run, f'--out_dir={folder / "run"}', log=folder / 'train.log')
    fork_script('export_model.py', f'--out_dir={folder / "run"}', f'--to={folder / "native"}')
    found['native'] = (folder / 'run', folder / 'native')
    return found


def evaluate(out_dir, files, folder, *arguments, nproc=1):
    """(rows of results.jsonl, {task: rows of its samples}, what was printed) of evaluate.py."""
    folder.mkdir(exist_ok=True)
    keys = [f'--out_dir={out_dir}', f'--tasks={",".join(map(str, files))}', f'--samples={folder}']
    keys += [f'--results={folder / "results.jsonl"}', *EVALUATE, *arguments]
    text = run_forked('evaluate.py', *keys, nproc=nproc, log=folder / 'evaluate.log')
    lines = (folder / 'results.jsonl').read_text().splitlines()
    samples = {file.stem: (folder / file.name).read_text().splitlines() for file in files}
    return list(map(json.loads, lines)), {name: list(map(json.loads, rows)) for name, rows in samples.items()}, text


class PlainLoop:
    """Log-likelihoods by transformers in float32, one request after the other. Tokens before a text are put there by
    hand."""

    def __init__(self, folder):
        import transformers

        options = {'trust_remote_code': True}
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
        self.window = getattr(self.model.config, 'max_position_embeddings', None) or self.tokenizer.model_max_length

    def start(self):
        ids = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        return [ids[0] if ids[0] is not None else ids[1]]

    @torch.no_grad()
    def score(self, before, targets):
        """(nats, greedy) of targets after `before`, of which the model sees as many of the last tokens as fit."""
        tokens = (before + targets)[-self.window - 1 :]
        log_probs = self.model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)[-len(targets) :]
        nats = sum(log_probs[n, token].item() for n, token in enumerate(targets))
        return nats, log_probs.argmax(-1).tolist() == targets

    def pair(self, context, continuation):
        while context and context[-1].isspace():
            context, continuation = context[:-1], context[-1] + continuation
        if not context:
            return self.score(self.start(), self.tokenizer.encode(continuation, add_special_tokens=False))
        before, whole = self.tokenizer.encode(context), self.tokenizer.encode(context + continuation)
        return self.score(before, whole[len(before) :])

    def text(self, text):
        """[(nats, greedy), ...] of a text's windows, one after another; as much as fits stands before the last."""
        tokens, found = self.start() + self.tokenizer.encode(text), []
        for first in range(1, len(tokens), self.window):
            targets = tokens[first : first + self.window]
            end = first + len(targets)
            found.append(self.score(tokens[max(0, end - self.window - 1) : first], targets))
        return found


def expected_of(loop, file):
    """[[(nats, greedy), ...] of each item], from the rows of a task's file."""
    for line in file.read_text(encoding='utf-8').splitlines():
        row = json.loads(line)
        delimiter = row.get('delimiter', ' ')
        if 'text' in row:
            yield loop.text(row['text'])
        else:
            contexts = row.get('contexts') or [row['context']]
            answers = row.get('choices') or [row['continuation']]
            yield [loop.pair(context, delimiter + answer) for context in contexts for answer in answers]


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', MODELS)
def test_log_likelihoods_are_those_of_a_plain_loop(models, files, name, tmp_path):
    out_dir, folder = models[name]
    loop = PlainLoop(folder)
    assert loop.window == (32 if name == 'native' else POSITIONS)
    results, samples, _ = evaluate(out_dir, files, tmp_path / 'found')
    compared = 0
    for file in files:
        for row, expected in zip(samples[file.stem], expected_of(loop, file), strict=True):
            assert row['nats'] == pytest.approx([nats for nats, _ in expected], abs=1e-4), row
            assert row['greedy'] == [greedy for _, greedy in expected]
            compared += len(expected)
    assert compared > 100
    # the scores, from the log-likelihoods of the loop
    nats = [[nats for nats, _ in of_item] for of_item in expected_of(loop, files[0])]
    rows = [json.loads(line) for line in files[0].read_text(encoding='utf-8').splitlines()]
    hits = [of_item.index(max(of_item)) == row['gold'] for of_item, row in zip(nats, rows, strict=True)]
    assert results[0]['acc'] == pytest.approx(statistics.mean(hits))
    assert results[0]['acc_stderr'] == pytest.approx(statistics.stdev(hits) / math.sqrt(len(hits)))
    per_character = []
    for of_item, row in zip(nats, rows, strict=True):
        normed = [n / len(choice) for n, choice in zip(of_item, row['choices'], strict=True)]
        per_character.append(normed.index(max(normed)) == row['gold'])
    assert results[0]['acc_norm'] == pytest.approx(statistics.mean(per_character))
    words = list(expected_of(loop, files[2]))
    assert results[2]['perplexity'] == pytest.approx(math.exp(-statistics.mean(item[0][0] for item in words)), rel=1e-5)
    assert results[2]['acc'] == pytest.approx(statistics.mean(item[0][1] for item in words))
    texts = [json.loads(line)['text'] for line in files[3].read_text(encoding='utf-8').splitlines()]
    total = sum(nats for of_item in expected_of(loop, files[3]) for nats, _ in of_item)
    size = len(''.join(texts).encode())
    assert results[3]['bits_per_byte'] == pytest.approx(-total / size / math.log(2), rel=1e-5)
    assert results[3]['byte_perplexity'] == pytest.approx(math.exp(-total / size), rel=1e-5)
    assert results[3]['word_perplexity'] == pytest.approx(math.exp(-total / len(' '.join(texts).split())), rel=1e-5)


@pytest.mark.parametrize('name', slow_but(['native'], ['native', 'gpt2']))
def test_the_numbers_are_the_same_on_1_2_and_3_ranks_however_the_model_is_sharded(models, files, name, tmp_path):
    out_dir, _ = models[name]
    alone = evaluate(out_dir, files, tmp_path / 'alone')
    for shard, nproc in (('none', 2), ('none', 3), ('torch', 1), ('torch', 3), ('manual', 2), ('manual', 3)):
        results, samples, text = evaluate(out_dir, files, tmp_path / f'{shard}{nproc}', f'--shard={shard}', nproc=nproc)
        assert samples == alone[1], (shard, nproc)  # to the bit, since batches do not depend on ranks
        assert results == alone[0]
        assert f'{nproc} x cpu' in text and text.count('choices: acc ') == 1


def test_choices_share_their_context_and_rows_are_no_longer_than_the_window():
    requests = [tasks.Request([7, 8, 9, *choice], len(choice)) for choice in ([1, 2], [1, 3, 4], [5])]
    (row,) = scoring.rows_of(requests, 10, 64, shares=True)
    assert row.tokens == [7, 8, 9, 1, 1, 3] and row.positions == [0, 1, 2, 3, 3, 4]
    assert row.wanted == [(2, 1, 10), (3, 2, 10), (2, 1, 11), (4, 3, 11), (5, 4, 11), (2, 5, 12)]
    _, attention, *_ = scoring.tensors_of([row], 'cpu')
    sees = attention.mask[0, 0]
    assert sees[5].tolist() == [True, True, True, False, True, True] and sees[3].tolist()[:4] == [True] * 4
    rows = scoring.rows_of(requests, 10, 5, shares=True)
    assert [len(row.tokens) for row in rows] == [4, 5] and sum(len(row.wanted) for row in rows) == 6
    assert [len(row.tokens) for row in scoring.rows_of(requests, 10, 64, shares=False)] == [4, 5, 3]


@torch.no_grad()
def test_choices_beside_each_other_are_scored_as_alone_where_layers_have_windows_and_logits_a_cap():
    sizes = {'n_layer': 2, 'n_head': 2, 'n_embd': 24, 'vocab_size': 67, 'block_size': 64}
    model = GPT(ModelConfig(arch='llama', window_pattern='SL', window_size=3, logit_softcap=2.0, **sizes)).eval()
    for parameter in model.parameters():
        parameter.normal_()
    requests = [tasks.Request([7, 8, 9, 5, *choice], len(choice)) for choice in ([1, 2], [1, 3, 4], [5, 6, 2, 2])]

    def nats(shares):
        tokens, tree, places, targets, numbers = scoring.tensors_of(scoring.rows_of(requests, 0, 64, shares), 'cpu')
        assert (tree is not None) == shares

        def score(hidden, logits_of):
            return scoring.score_tokens(hidden.flatten(0, 1)[places], logits_of, targets)

        return torch.zeros(3).index_add_(0, numbers, model(tokens, attention=tree, then=score)[0])

    alone = []
    for tokens, n in requests:
        log_probs = model(torch.tensor([tokens[:-1]]))[0, -n:].log_softmax(-1)
        alone.append(log_probs[range(n), tokens[-n:]].sum())
    assert error(nats(shares=True), alone) <= apart() and error(nats(shares=False), alone) <= apart()


def test_few_shot_examples_stand_before_each_item_with_their_answers(tmp_path):
    same = {'choices': ['yes', 'no'], 'description': 'D. ', 'delimiter': ': '}
    rows = [{'context': f'q{n}', 'gold': n % 2, **same} for n in range(6)]
    path = write_rows(tmp_path / 'own.jsonl', rows)
    draws = random.Random(1234)
    for number, item in enumerate(tasks.read_task(path, num_fewshot=2).items):
        drawn = [n for n in draws.sample(range(6), 3) if n != number][:2]
        shots = ''.join(f'q{n}: {"no" if n % 2 else "yes"}\n\n' for n in drawn)
        assert item.pairs == [(f'D. {shots}q{number}', ': yes'), (f'D. {shots}q{number}', ': no')]
    write_rows(tmp_path / 'of_groups.jsonl', [{**row, 'group': 'ab'[n % 2]} for n, row in enumerate(rows)])
    shots = [{**rows[0], 'context': f'shot{n}', 'group': 'ab'[n % 2]} for n in range(6)]
    write_rows(tmp_path / 'of_groups.fewshot.jsonl', shots)
    items = tasks.read_task(tmp_path / 'of_groups.jsonl', num_fewshot=2, limit=2).items
    assert [item.pairs[0][0] for item in items] == [
        'D. shot0: yes\n\nshot2: yes\n\nq0',
        'D. shot1: yes\n\nshot3: yes\n\nq1',
    ]
    with pytest.raises(ValueError, match=' 3 examples.*row 1$'):
        tasks.read_task(tmp_path / 'of_groups.jsonl', num_fewshot=4)


@pytest.mark.parametrize('group', [{}, {'group': 'g'}])
def test_an_item_that_is_there_several_times_is_never_its_own_example(tmp_path, group):
    """As in lm_eval 0.4.13, which compares rows: its answer would stand before it."""
    rows = [{'context': f'q{n % 4}', 'choices': ['yes', 'no'], 'gold': n % 2, **group} for n in range(12)]
    path, draws, again = write_rows(tmp_path / 'twice.jsonl', rows), random.Random(1234), 0
    for number, item in enumerate(tasks.read_task(path, num_fewshot=3).items):
        others = [n for n in range(12) if n % 4 != number % 4]
        drawn = [n for n in (range(12) if group else draws.sample(range(12), 4)) if n in others][:3]
        if len(drawn) < 3:
            drawn, again = draws.sample(others, 3), again + 1
        assert item.pairs[0][0] == ''.join(f'q{n % 4} {"no" if n % 2 else "yes"}\n\n' for n in drawn) + f'q{number % 4}'
    assert bool(again) != bool(group)
    with pytest.raises(ValueError, match='num_fewshot=10: .* 12 examples, too few for .*row 1$'):
        tasks.read_task(path, num_fewshot=10)
    if not group:  # CORE leaves the item out by its place, as nanochat does
        assert len(tasks.read_task(path, num_fewshot=11, protocol='core').items) == 12


# --- what a model writes ----------------------------------------------------------------------------------------------


def write_prompts(path):
    """Write prompts of many lengths. With the answer they fit into the 32 tokens of the smallest model."""
    draws, rows = random.Random(3), []
    for number in range(13):
        row = {'prompt': some_text(draws, number % 4)[:14], 'answer': ['a', 'e', 'n'], 'rule': 'contains'}
        rows.append({**row, 'max_new_tokens': 9 if number % 3 else 6})
    return write_rows(path, rows)


def written_by(loop, row):
    """The text of the likeliest tokens, one after the other; None if one of them is near a tie."""
    tokens = loop.tokenizer.encode(row['prompt']) or loop.start()
    new = []
    for _ in range(row['max_new_tokens']):
        with torch.no_grad():
            logits = loop.model(torch.tensor([tokens + new])).logits[0, -1]
        if gap_of_choice(logits) <= MARGIN:
            return None
        token = logits.argmax().item()
        if token == loop.tokenizer.eos_token_id:
            break
        new.append(token)
    text = loop.tokenizer.decode(new, skip_special_tokens=True)
    return text[: min([text.find(end) for end in row.get('stop', []) if end in text], default=None)]


@pytest.mark.parametrize('name', MODELS)
def test_answers_are_those_of_a_plain_loop_whatever_the_ranks_and_the_sharding(models, name, tmp_path):
    out_dir, folder = models[name]
    loop, prompts = PlainLoop(folder), write_prompts(tmp_path / 'prompts.jsonl')
    rows = [row for row in map(json.loads, prompts.read_text().splitlines()) if written_by(loop, row) is not None]
    assert len(rows) > 9
    for row in rows[1::2]:  # two characters in the middle, of two tokens, that end some answers
        text = written_by(loop, row)
        pairs = [text[first : first + 2] for first in range(1, len(text) - 2)]
        row['stop'] = ['never', *[pair for pair in pairs if '\ufffd' not in pair][:1]]
    write_rows(prompts, rows)
    results, samples, text = evaluate(out_dir, [prompts], tmp_path / 'alone', '--batch_size=3')
    expected = [written_by(loop, row) for row in rows]
    assert [sample['written'] for sample in samples['prompts']] == expected
    assert any(len(row['stop']) > 1 for row in rows if 'stop' in row)
    hits = [any(answer in text for answer in 'aen') for text in expected]
    assert results[0]['acc'] == pytest.approx(statistics.mean(hits)) and 'acc_stderr' in results[0]
    how = r'(without the chat template, )?[\d.]+ answers/s'
    line = rf'^prompts: acc \d\.\d{{4}} ± \d\.\d{{4}} \({len(rows)} items, {how}\)'
    assert re.search(line, text, re.MULTILINE)
    for shard, nproc in (('none', 2), ('torch', 3), ('manual', 2)) if name in ('native', 'gpt2') else ():
        keys = ['--batch_size=3', f'--shard={shard}']
        others = evaluate(out_dir, [prompts], tmp_path / f'{shard}{nproc}', *keys, nproc=nproc)
        assert (others[0], others[1]) == (results, samples), (shard, nproc)  # to the bit; some ranks end earlier


@pytest.mark.parametrize(
    'row, text, expected',
    [
        ({'answer': 'Paris'}, ' Paris\n', {'acc': True}),
        ({'answer': 'Paris'}, 'Paris.', {'acc': False}),
        ({'answer': ['Rome', 'Paris'], 'rule': 'contains'}, 'It is Paris.', {'acc': True}),
        ({'answer': ['Rome', 'Paris'], 'rule': 'contains'}, 'It is paris.', {'acc': False}),
        ({'answer': '1,000', 'rule': 'number'}, 'first 7, then $1000.00.', {'acc': True}),
        ({'answer': '-3', 'rule': 'number'}, '3 of them', {'acc': False}),
        ({'answer': '3', 'rule': 'number'}, 'none', {'acc': False}),
        ({'answer': ['7', '3/4'], 'rule': 'number'}, 'It is 0.75', {'acc': True}),
        ({'answer': 'x = 4 so (B)', 'rule': 'regex', 'pattern': r'\((\w)\)'}, 'I say (B) or (C)', {'acc': True}),
        ({'answer': 'B', 'rule': 'regex', 'pattern': r'\((\w)\)'}, 'I say (B)', {'acc': True}),
        ({'answer': 'B', 'rule': 'regex', 'pattern': r'\((\w)\)'}, 'I say B', {'acc': False}),
        ({'answer': 'B', 'rule': 'regex', 'pattern': r'[A-D]'}, 'I say B, C', {'acc': True}),
        ({'answer': '94', 'rule': 'regex', 'pattern': r'is (\d+)|(\d+)'}, 'or 94', {'acc': True}),
        ({'answer': '1', 'rule': 'regex', 'pattern': r'1(1)?'}, '1', {'acc': True}),
        # as lm_eval's filters and its exact_match have them
        ({'answer': 'a\n#### 1,800'}, 'so\n#### $1800. Then 5', {'strict_match': False, 'flexible_extract': False}),
        ({'answer': 'a\n#### 1,800'}, 'so\n#### 1800. Then', {'strict_match': True, 'flexible_extract': True}),
        ({'answer': 'a\n#### 18'}, 'she has $18.', {'strict_match': False, 'flexible_extract': True}),
        ({'answer': 'a\n#### 18'}, '#### 18 and #### 19', {'strict_match': True, 'flexible_extract': False}),
        ({'answer': 'a\n#### -18'}, '#### -18', {'strict_match': True, 'flexible_extract': True}),
        ({'answer': 'a\n#### 8'}, 'no number', {'strict_match': False, 'flexible_extract': False}),
    ],
)
def test_a_rule_says_what_is_right(row, text, expected):
    rule = {'rule': 'gsm8k'} if 'strict_match' in expected else {}
    assert grading.Rule.of({'prompt': '?', **row, **rule}, 'file, row 1').judge(text) == expected


def test_a_function_of_ones_own_judges_what_is_written_beside_the_rule(models, tmp_path):
    with_rule = write_prompts(tmp_path / 'with_rule.jsonl')
    rows = [json.loads(line) for line in with_rule.read_text().splitlines()]
    free = [{key: row[key] for key in ('prompt', 'max_new_tokens')} | {'likes': 'aeiou'} for row in rows]
    paths = [with_rule, write_rows(tmp_path / 'free.jsonl', free)]
    (tmp_path / 'own.py').write_text(
        'def f(text, row):\n    return sum(letter in row.get("likes", "n") for letter in text) / 4'
    )
    own = f'--reward={tmp_path}/own.py:f'
    results, samples, text = evaluate(models['native'][0], paths, tmp_path / 'alone', own)
    for result, likes in zip(results, ('n', 'aeiou'), strict=True):
        found = samples[result['task']]
        rewards = [sum(letter in likes for letter in sample['written']) / 4 for sample in found]
        assert [sample['reward'] for sample in found] == rewards and result['reward'] == statistics.mean(rewards)
        assert result['reward_function'] == own.partition('=')[2] and len(result['reward_sha256']) == 64
    assert 'acc' in results[0] and 'acc' not in results[1] and 'answer' not in samples['free'][0]
    assert re.search(r'^free: reward \d\.\d{4} ± \d\.\d{4} \(13 items, ', text, re.MULTILINE)
    assert evaluate(models['native'][0], paths, tmp_path / 'two', own, nproc=2)[:2] == (results, samples)


HALF, QUARTERS = Fraction(1, 2), Fraction(3, 4)
NUMBERS = {  # what a text says with its last number; None if its last digits are of something that is no number
    'minus': {
        '\u22125': -5,
        'is \u20135.': -5,
        '-$5': -5,
        '$-5$': -5,
        '= - 5': -5,
        '- 5 apples': 5,
        '+5': 5,
    },
    'ranges and dates': {'3-5': None, '3\u20135': None, '2024-01-05': None, '3:2': None, '3.2.1': None, '(3,5)': None},
    'groups': {
        '1,234': 1234,
        '1\u202f234': 1234,
        '1 234': 1234,
        r'1,\!234': 1234,
        '1{,}234': 1234,
        '1\u2009234': 1234,
        '1_234': None,
        "1'234": None,
        '1,23': None,
    },
    'decimals': {'1.50': 3 * HALF, '.5': HALF, 'No.5': 5, '...5': 5, '18.': 18, '1.234,5': None, '5\n6': 6},
    'signs': {
        '$1000.00': 1000,
        '\\$5': 5,
        '50%': 50,
        r'50\%': 50,
        '\\boxed{18}': 18,
        '**18**': 18,
        '_18_': 18,
        '#### 1,080': 1080,
    },
    'units': {
        '7 cm^2': 7,
        '7 cm^{2}': 7,
        '7cm2': 7,
        '7 m\u00b2': 7,
        r'45^\circ': 45,
        '18km': 18,
        'x_1 = 5': 5,
        '5 H2O': 5,
        '\u20115': -5,
    },
    'fractions': {
        '3/4': QUARTERS,
        '-3/4': -QUARTERS,
        r'\frac{3}{4}': QUARTERS,
        r'-\dfrac34': -QUARTERS,
        r'\frac{-3}{4}': -QUARTERS,
    },
    'mixed': {'1 1/2': 3 * HALF, r'1\frac{1}{2}': 3 * HALF, r'1\frac12': 3 * HALF, '1\u00bd cups': 3 * HALF},
    'no fractions': {'1/0': None, '1/2/3': None, '3/-4': None, r'\frac{\pi}{2}': None, r'\frac{1}{2}^2': None},
    'powers of ten': {'1e3': 1000, '2.5\u00d710^3': 2500, r'3 \times 10^{4}': 30000, '10^{-3}': Fraction(1, 1000)},
    'too long': {'1e999999999': None, '9' * 5000: None, '10^99999': None},
    'expressions': {
        r'2\sqrt{3}': None,
        r'\sqrt[3]{5}': None,
        '2\u03c0': None,
        r'2\pi': None,
        '2^10': None,
        '5\u00b2': None,
    },
    'more expressions': {'2+3': None, 'y = 2x+5': None, '4*13=52': 52, '1e3.5': None, '0x1F': None},
    'words': {'5 million': None, '5\u4e07': None, '\u7b54\u6848\u662f18\u3002': 18},
}


@pytest.mark.parametrize('kind', NUMBERS)
def test_a_number_is_read_as_a_whole_or_not_at_all(kind):
    assert {text: grading.number_in(text) for text in NUMBERS[kind]} == NUMBERS[kind]
    assert {text: grading.number_in(f'From 7 follows: {text}') for text in NUMBERS[kind]} == NUMBERS[kind]
    assert grading.number_in('inf, nan') is None


def test_an_answer_of_the_rule_number_is_a_number_and_nothing_else():
    alone = {
        '-5': -5,
        '3/4': QUARTERS,
        r'$\frac{3}{4}$': QUARTERS,
        '1e3': 1000,
        '$1,000.50': Fraction(2001, 2),
        '50%': 50,
    }
    alone |= {
        r'\boxed{7}': 7,
        'So 3 and 4.\n#### 7': 7,
        '18.': 18,
        r'45^\circ': 45,
        r'\(5\)': 5,
        '5 \u20ac': 5,
        '1 1/2': 3 * HALF,
    }
    assert {answer: grading.number_alone(answer) for answer in alone} == alone
    more = [
        '7 cm^2',
        '18 apples',
        'x = 5',
        '3 or 4',
        '3, 4',
        r'2\sqrt{3}',
        '5 million',
        '1,00',
        '1/0',
        '1e99999',
        '(B)',
        '7 8',
    ]
    assert [answer for answer in more if grading.number_alone(answer) is not None] == []


def test_a_formula_that_nobody_can_compute_ends_as_wrong(monkeypatch, capfd):
    rule = grading.Rule.of({'answer': '5', 'rule': 'math'}, 'a.jsonl, row 9')
    monkeypatch.setitem(grading.LIMITS_S, 'math', 0.2)
    assert rule.judge('$9^{9^{9^{9}}}$') == {'acc': False}
    assert 'WARNING: a.jsonl, row 9: the comparison of a formula was given up' in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, 'math_verify', None)
    with pytest.raises(ValueError, match='row 1: rule=math needs the package math-verify: pip install math-verify'):
        grading.Rule.of({'answer': '5', 'rule': 'math'}, 'row 1')


def test_the_same_row_elsewhere_is_the_same():
    rows = [{'prompt': '?', 'answer': '5', 'rule': 'regex', 'pattern': r'\d'}] * 2
    assert len({repr(grading.Rule.of(row, f'row {n}')) for n, row in enumerate(rows)}) == 1


def test_a_pattern_that_backtracks_for_ever_ends_as_a_wrong_answer_and_is_named(monkeypatch, capfd):
    monkeypatch.setitem(grading.LIMITS_S, 'regex', 0.05)
    row = {'prompt': '?', 'rule': 'regex', 'pattern': r'(?:\w+\s?)*</answer>'}
    rule = grading.Rule.of({**row, 'answer': '5</answer>'}, 'a.jsonl, row 7')
    assert rule.judge('5</answer>') == {'acc': True}
    for _ in range(2):
        assert rule.judge('word ' * 12 + 'a' * 20 + '!') == {'acc': False}
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("WARNING: a.jsonl, row 7: the search for pattern='(?:\\\\w+\\\\s?)*</answer>' was given up")
    assert rule.judge('5</answer>') == {'acc': True}
    with pytest.raises(ValueError, match='row 8: .* that of its own answer'):
        grading.Rule.of({**row, 'answer': 'word ' * 20}, 'a.jsonl, row 8')
    with pytest.raises(limits.OverLimit), limits.at_most(0.01):
        while True:
            pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0) and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_examples_and_descriptions_become_messages_where_a_chat_template_is_applied(models, tmp_path):
    """As lm_eval's --apply_chat_template with fewshot_as_multiturn, its default."""
    loop = PlainLoop(models['llama'][1])
    encoder = TransformersLanguage(loop.tokenizer, models['llama'][1])
    row = {'context': 'Who?\nAnswer:', 'choices': ['he', 'she'], 'gold': 1, 'description': 'Answer. '}
    path = write_rows(tmp_path / 'who.jsonl', [row])
    write_rows(tmp_path / 'who.fewshot.jsonl', [{**row, 'context': 'Is it?\nAnswer:', 'choices': ['no', 'yes']}])
    ask = '<|im_start|>user\nWho?\nAnswer:<|im_end|>\n<|im_start|>assistant\n'
    system = '<|im_start|>system\nAnswer. <|im_end|>\n'
    shown = '<|im_start|>user\nIs it?\nAnswer:<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n'
    for shots, prompt in ((0, system + ask), (1, system + shown + ask)):
        (item,) = tasks.read_task(path, num_fewshot=shots, chat=encoder.chat).items
        assert [(plain(context), choice) for context, choice in item.pairs] == [(prompt, 'he'), (prompt, 'she')]
    rows = [{'contexts': ['he cup', 'he bag'], 'continuation': 'is old', 'gold': 0}]
    (item,) = tasks.read_task(write_rows(tmp_path / 'two.jsonl', rows), chat=encoder.chat).items
    start = '<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n'
    assert [plain(context) for context, _ in item.pairs] == [start.format(f'he {what}') for what in ('cup', 'bag')]
    rows = [{'prompt': f'{n} + 1 =', 'answer': str(n + 1), 'rule': 'number'} for n in range(2)]
    for item in tasks.read_task(write_rows(tmp_path / 'sums.jsonl', rows), num_fewshot=1, chat=encoder.chat).items:
        n = int(item.rule.answers[0]) - 1
        asked = [start.format(f'{n} + 1 =') for n in (1 - n, n)]
        assert plain(item.pairs[0][0]) == f'{asked[0]}{2 - n}<|im_end|>\n{asked[1]}'
    # messages that stand in a row
    said = [('system', 'Answer. '), ('user', 'Is it?\nAnswer:'), ('assistant', 'yes'), ('user', 'Who?\nAnswer:')]
    talk = {'prompt': [{'role': role, 'content': text} for role, text in said], 'ground_truth': '1'}
    (item,) = tasks.read_task(write_rows(tmp_path / 'talk.jsonl', [talk]), chat=encoder.chat).items
    assert plain(item.pairs[0][0]) == system + shown + ask
    # tools and variables of the template stand in a row, or are given to all rows
    loop.tokenizer.chat_template = '{{ tools | map(attribute="function.name") | join }} {{ a }}{{ b }}:'
    asked = {'context': 'x', 'choices': ['he', 'she'], 'gold': 1}
    rows = [{**asked, 'tools': [{'name': 'f'}], 'chat_template_kwargs': {'a': 1}}, {**asked, 'tools': [{'name': 'g'}]}]
    given = TransformersLanguage(loop.tokenizer, models['llama'][1], chat_template_kwargs={'a': 2, 'b': 3})
    tools_path = write_rows(tmp_path / 'tools.jsonl', rows)
    assert [item.pairs[0][0] for item in tasks.read_task(tools_path, chat=given.chat).items] == ['f 13:', 'g 23:']
    with pytest.raises(ValueError, match='row 1: tools and chat_template_kwargs are for a chat template: --apply'):
        tasks.read_task(tools_path)
    # a template that refuses the system's message: lm_eval leaves it out
    loop.tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}>"
    )
    (item,) = tasks.read_task(path, chat=encoder.chat).items
    assert item.pairs[0] == ('Who?\nAnswer:>', 'he')


@pytest.mark.parametrize('name', slow_but(['llama'], ['llama', 'with_bos']))
def test_numbers_with_a_chat_template_are_those_of_a_plain_loop_over_what_it_writes(models, name, tmp_path):
    out_dir, folder = models[name]
    loop = PlainLoop(folder)

    def asked(text):
        return loop.tokenizer.apply_chat_template(
            [{'role': 'user', 'content': text}], tokenize=False, add_generation_prompt=True
        )

    choices = [{'context': f'q{n}', 'choices': ['ab', 'c', 'def'], 'gold': 0} for n in range(4)]
    written = [{'prompt': f'w{n}', 'answer': 'a', 'max_new_tokens': 8, 'stop': ['a']} for n in range(5)]
    paths = [write_rows(tmp_path / 'choices.jsonl', choices), write_rows(tmp_path / 'written.jsonl', written)]
    results, samples, _ = evaluate(out_dir, paths, tmp_path / 'found', '--apply_chat_template')
    assert all(result['chat_template'] for result in results)
    encode = loop.tokenizer.encode
    loop.tokenizer.encode = lambda text, **options: encode(text, add_special_tokens=False)  # the template has them
    for row, sample in zip(choices, samples['choices'], strict=True):
        expected = [loop.pair(asked(row['context']), choice)[0] for choice in row['choices']]
        assert sample['nats'] == pytest.approx(expected, abs=1e-4)
    for row, sample in zip(written, samples['written'], strict=True):
        assert sample['written'] == written_by(loop, {**row, 'prompt': asked(row['prompt'])})


# --- CORE -------------------------------------------------------------------------------------------------------------


def with_answer(row):
    delimiter = row.get('delimiter', ' ')
    if 'choices' in row:
        return row['context'] + delimiter + row['choices'][row['gold']]
    context = row['contexts'][row['gold']] if 'contexts' in row else row['context'].strip()
    return context + delimiter + row['continuation']


def common_length(sequences):
    n = 0
    while n < min(map(len, sequences)) and len({sequence[n] for sequence in sequences}) == 1:
        n += 1
    return n


def core_by_hand(loop, rows, num_fewshot):
    """[(mean loss of each prompt's targets, whether all are greedy, whether it is right)], one prompt after the other
    as in nanochat's core_eval.py. That has no number for a choice with which another choice begins; here its last token
    counts."""
    for number, row in enumerate(rows):
        others = [n for n in range(len(rows)) if n != number]
        shown = random.Random(1234 + number).sample(others, num_fewshot)
        before, delimiter = ''.join(with_answer(rows[n]) + '\n\n' for n in shown), row.get('delimiter', ' ')
        prompts = [
            before + with_answer({**row, 'gold': n}) for n in range(len(row.get('choices', row.get('contexts', 'x'))))
        ]
        tokens = [loop.start() + loop.tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
        if 'choices' in row:
            start = min(common_length(tokens), min(map(len, tokens)) - 1)
            starts = [start] * len(tokens)
        elif 'contexts' in row:
            same = common_length([sequence[::-1] for sequence in tokens])
            starts = [len(sequence) - same for sequence in tokens]
        else:
            without = (before + row['context'].strip() + delimiter).rstrip()  # nanochat's strip() fails on the left
            starts = [len(loop.start() + loop.tokenizer.encode(without, add_special_tokens=False))]
        scored = [loop.score(t[:start], t[start:]) for t, start in zip(tokens, starts, strict=True)]
        losses = [-nats / (len(t) - n) for (nats, _), t, n in zip(scored, tokens, starts, strict=True)]
        right = losses.index(min(losses)) == row['gold'] if 'gold' in row else scored[0][1]
        yield [nats for nats, _ in scored], [greedy for _, greedy in scored], right


def said_by(loop):
    """Rows with the continuation that the model itself finds likeliest, and one with another continuation."""
    rows = []
    for context in map(chr, range(ord('0'), ord('z'))):
        tokens = loop.start() + loop.tokenizer.encode(context, add_special_tokens=False)
        with torch.no_grad():
            logits = loop.model(torch.tensor([tokens])).logits[0, -1]
        token = logits.argmax().item()
        if ord(' ') < token < 127 and gap_of_choice(logits) > MARGIN:  # a token is a byte
            rows.append({'context': context, 'continuation': chr(token)})
    return [*rows[:3], {'context': 'a', 'continuation': 'never'}]


@pytest.mark.parametrize('name', ['native', 'gpt2', 'with_bos', 'llama'])
def test_with_cores_protocol_scores_are_those_of_a_plain_loop(models, files, name, tmp_path):
    out_dir, folder = models[name]
    loop = PlainLoop(folder)
    texts = [[json.loads(line) for line in file.read_text(encoding='utf-8').splitlines()] for file in files[:3]]
    choices, contexts, words = texts
    (tmp_path / 'rows').mkdir()
    tasks_of = {
        'choices': [{**row, 'num_fewshot': 3, 'chance': 0.4, 'delimiter': '\nA: '} for row in choices],
        'contexts': contexts,
        'words': [{**row, 'num_fewshot': 1, 'delimiter': '\nSo: '} for row in words],
        'said': [{**row, 'delimiter': ''} for row in said_by(loop)],
    }
    paths = [write_rows(tmp_path / 'rows' / f'{task}.jsonl', rows) for task, rows in tasks_of.items()]
    results, samples, text = evaluate(out_dir, paths, tmp_path / 'found', '--protocol=core')
    centered = []
    for result, (task, rows) in zip(results, tasks_of.items(), strict=True):
        shots = rows[0].get('num_fewshot', 0)
        assert (result['protocol'], result['num_fewshot']) == ('core', shots)
        nats, greedy, right = zip(*core_by_hand(loop, rows, shots), strict=True)
        assert [sample['nats'] for sample in samples[task]] == [pytest.approx(of_item, abs=1e-4) for of_item in nats]
        assert [sample['greedy'] for sample in samples[task]] == list(greedy)
        assert result['acc'] == pytest.approx(statistics.mean(right)) and (task != 'said' or 0 < result['acc'] < 1)
        chance = {'choices': 0.4, 'contexts': 0.5}.get(task, 0)
        assert result['centered'] == pytest.approx((result['acc'] - chance) / (1 - chance))
        assert result['centered_stderr'] == pytest.approx(result['acc_stderr'] / (1 - chance))
        centered.append(result['centered'])
    assert f'CORE: {statistics.mean(centered):.4f}, the mean of centered over 4 tasks' in text


def test_cores_tasks_are_made_from_its_bundle(models, tmp_path):
    bundle = tmp_path / 'eval_bundle'
    (bundle / 'eval_data' / 'some').mkdir(parents=True)
    questions = [{'query': f'q{n}', 'choices': ['a', 'b', 'c'], 'gold': n % 3, 'other': 1} for n in range(12)]
    schemas = [{'context_options': [f'he{n}', 'she'], 'continuation': 'left', 'gold': 1} for n in range(5)]
    says = [{'context': f'c{n} \u2028', 'continuation': 'Größe', 'aliases': []} for n in range(5)]
    for name, rows in (('questions', questions), ('schemas', schemas), ('says', says)):
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (bundle / 'eval_data' / 'some' / f'{name}.jsonl').write_text('\n'.join(lines) + '\n', encoding='utf-8')
    tasks_of = [('twice', 'questions', 'multiple_choice', 10, 25.0), ('none', 'questions', 'multiple_choice', 0, 25.0)]
    tasks_of += [('schemas', 'schemas', 'schema', 0, 50.0), ('says', 'says', 'language_modeling', 2, 0.0)]
    lines, table = ['icl_tasks:'], ['Eval Task,Task Category,Random baseline']
    for label, file, kind, shots, chance in tasks_of:
        lines += ['-', f'  label: {label}', f'  dataset_uri: some/{file}.jsonl', f'  num_fewshot: [{shots}]']
        lines += [f'  icl_task_type: {kind}'] + ['  continuation_delimiter: "\\nAnswer: "'] * (label == 'twice')
        table.append(f'{label},"of, some kind",{chance}')
    (bundle / 'core.yaml').write_text('\n'.join(lines))
    missing = run_script('prepare_data.py', f'--tasks={bundle / "core.yaml"}', cwd=tmp_path, check=False).stderr
    assert 'eval_meta_data.csv: unpack eval_bundle.zip there' in missing and missing.count('\n') == 1
    (bundle / 'eval_meta_data.csv').write_text('\n'.join(table))
    run_script('prepare_data.py', f'--tasks={bundle / "core.yaml"}', cwd=tmp_path)
    made = {name: tmp_path / 'tasks' / 'core' / f'{name}.jsonl' for name, *_ in tasks_of}
    rows = {name: [json.loads(line) for line in path.read_text().splitlines()] for name, path in made.items()}
    order = list(range(12))
    random.Random(1337).shuffle(order)
    same = {'choices': ['a', 'b', 'c'], 'delimiter': '\nAnswer: ', 'num_fewshot': 10, 'chance': 0.25}
    assert rows['twice'] == [{'context': f'q{n}', 'gold': n % 3, **same} for n in order]
    assert rows['says'][0].keys() == {'context', 'continuation', 'delimiter', 'num_fewshot', 'chance'}
    assert len(rows['says']) == 5 and rows['schemas'][0]['contexts'][1] == 'she' and rows['none'][0]['delimiter'] == ' '
    results, _, _ = evaluate(models['gpt2'][0], list(made.values()), tmp_path / 'found', '--protocol=core')
    assert [result['num_fewshot'] for result in results] == [10, 0, 0, 2]


# --- a task with a known answer ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_answers_what_it_has_learned_and_a_random_one_is_at_chance(tmp_path):
    draws, animals = random.Random(2), ['cat', 'dog', 'owl', 'pig']
    names = ['abcd'[n % 4] + ''.join(draws.choices('efghij', k=3)) for n in range(96)]
    has = {name: animals['abcd'.index(name[0])] for name in names}
    lines = [f'{name} has a {has[name]}.\n' for name in names * 60]
    draws.shuffle(lines)
    (tmp_path / 'facts.txt').write_text(''.join(lines))
    data = [f'--data_dir={tmp_path / "data"}', '--name=facts', '--tokenizer=bytes']
    run_script('prepare_data.py', f'--dataset={tmp_path / "facts.txt"}', *data)
    rows = [{'context': f'{name} has a', 'choices': animals, 'gold': animals.index(has[name])} for name in names]
    task = write_rows(tmp_path / 'facts.jsonl', rows)
    model = ['--arch=llama', '--n_layer=2', '--n_head=2', '--n_embd=64', '--block_size=64', '--batch_size=32']
    run = [
        *model,
        '--dataset=facts',
        data[0],
        '--device=cpu',
        '--dtype=float32',
        '--eval_sequences=0',
        '--compile=False',
    ]
    trained = ['--learning_rate=3e-3', '--max_iters=120', '--warmup_iters=10']
    scores = {}
    for name, keys in (('random', ['--max_iters=1', '--learning_rate=1e-9']), ('trained', trained)):
        run_forked('train_ddp.py', *run, *keys, f'--out_dir={tmp_path / name}', log=tmp_path / f'{name}.log')
        results, _, text = evaluate(tmp_path / name, [task], tmp_path / f'{name}_scores')
        scores[name] = results[-1]
        assert re.search(r'^facts: acc [01]\.\d{4} ± 0\.\d{4}, acc_norm .* \(96 items, ', text, re.MULTILINE)
    assert scores['trained']['acc'] > 0.9
    chance = math.sqrt(0.25 * 0.75 / len(names))
    assert abs(scores['random']['acc'] - 0.25) <= 2 * chance


# --- mistakes ---------------------------------------------------------------------------------------------------------

GOOD = {'context': 'a', 'choices': ['b', 'c'], 'gold': 0}
ASKED = {'prompt': 'a', 'answer': 'b'}


BAD = [  # a row behind GOOD, and what is said of it
    ('{"context": ', 'not JSON'),
    ('[1]', 'no object'),
    ({'context': 'a', 'choice': ['b', 'c'], 'gold': 0}, 'choice, context, gold; '),
    ({**GOOD, 'gold': 2}, 'gold=2; .*0 to 1'),
    ({**GOOD, 'gold': '0'}, 'gold="0"; .*0 to 1'),
    ({**GOOD, 'choices': ['b']}, r'choices is \["b"\]; .*two'),
    ({**GOOD, 'choices': ['b', '']}, 'empty choice'),
    ({**GOOD, 'context': 3}, 'context is 3; .*text'),
    ({'text': 'a'}, "'text', .*'choices'"),
]
BAD_WITH_PROMPT = [  # behind ASKED
    ({**ASKED, 'answer': 3}, 'answer is 3; expected a text, or a list of texts'),
    ({**ASKED, 'answer': ['b', ' ']}, 'expected a text, or a list of texts'),
    ({**ASKED, 'rule': 'equal'}, "rule='equal'; expected one of exact, contains, number, regex, math, gsm8k"),
    ({**ASKED, 'rule': 'number'}, "the answer 'b' is no number, or more than one; rule=number compares a number"),
    ({**ASKED, 'rule': 'number', 'answer': ['7', '7 cm^2']}, r"the answer '7 cm\^2' is no number, or more than one"),
    ({**ASKED, 'rule': 'math', 'answer': '18 apples'}, "the answer '18 apples' is no formula alone"),
    ({**ASKED, 'rule': 'math', 'answer': r'\frac{3'}, 'is no formula alone'),
    ({**ASKED, 'rule': 'math', 'answer': '1 1/2'}, "'1 1/2' is no formula alone"),
    ({**ASKED, 'rule': 'regex', 'pattern': 'b{99999999999}'}, 'is no regular expression: '),
    ({**ASKED, 'rule': 'gsm8k'}, 'the answer \'b\' does not end in "#### 18", as rule=gsm8k reads it'),
    ({**ASKED, 'rule': 'regex'}, 'the rule regex needs a pattern, others have none'),
    ({**ASKED, 'pattern': 'b'}, 'the rule regex needs a pattern, others have none'),
    ({**ASKED, 'rule': 'regex', 'pattern': '('}, r"pattern='\(' is no regular expression: "),
    ({**ASKED, 'rule': 'regex', 'pattern': 5}, 'pattern is 5; expected a text'),
    ({**ASKED, 'stop': 'b'}, 'stop is "b"; expected a list of texts'),
    ({**ASKED, 'stop': ['b', '']}, 'expected a list of texts'),
    ({**ASKED, 'max_new_tokens': 0}, 'max_new_tokens=0; expected 1 or more'),
    ({**ASKED, 'gold': 1}, 'has the keys answer, gold, prompt; expected one of'),
    ({'question': 'a', 'response': 'b'}, 'python prepare_data.py --tasks=NAME=.*/bad.jsonl` makes such rows'),
    ({'question': 'a', 'response': 'b'}, '; rename question to prompt, rename response to answer; of a known task'),
    ({'problem': 'a', 'ground_truth': 'b'}, 'rename .*problem to prompt'),
    (
        {**ASKED, 'prompt': [{'role': 'user', 'content': 'a'}], 'rule': 'exact'},
        'messages are for .*: --apply_chat_template writes them$',
    ),
    (GOOD, "has 'choices', those before it have 'prompt': one file holds items of one form"),
]


@pytest.mark.parametrize(
    'before, row, why', [*((GOOD, *bad) for bad in BAD), *((ASKED, *bad) for bad in BAD_WITH_PROMPT)]
)
def test_a_bad_row_is_named_by_its_number(before, row, why, tmp_path):
    row = row if isinstance(row, str) else json.dumps(row)
    (tmp_path / 'bad.jsonl').write_text(f'{json.dumps(before)}\n\n{row}\n')
    with pytest.raises(ValueError, match=f'bad.jsonl, row 3: .*{why}') as caught:
        tasks.read_task(tmp_path / 'bad.jsonl')
    assert '\n' not in str(caught.value)


def test_a_byte_order_mark_before_a_file_of_tasks_is_none_of_its_text(tmp_path):
    (tmp_path / 'windows.jsonl').write_text(f'\ufeff{json.dumps(GOOD)}\n', encoding='utf-8')
    assert len(tasks.read_task(tmp_path / 'windows.jsonl').items) == 1


def test_a_model_that_knows_nothing_has_no_perplexity_that_a_float_could_hold(tmp_path):
    path = write_rows(tmp_path / 'words.jsonl', [{'context': 'a', 'continuation': 'b' * 9}] * 2)
    scores = tasks.scores_of(tasks.read_task(path), None, [[-800.0], [-900.0]], [[False], [True]])
    assert scores['perplexity'][0] == math.inf and scores['acc'][0] == 0.5


def test_the_score_of_a_single_text_has_no_error(models, tmp_path):
    path = write_rows(tmp_path / 'text.jsonl', [{'text': 'def main():'}])
    (row,), _, text = evaluate(models['native'][0], [path], tmp_path / 'found')
    assert re.search(r'^text: bits_per_byte \d+\.\d{4}, word_perplexity', text, re.MULTILINE) and 'nan' not in text
    assert not [key for key in row if key.endswith('_stderr')]


def test_mistakes_end_in_one_line_and_earlier_results_stay(models, files, tmp_path):
    prompts = write_prompts(tmp_path / 'prompts.jsonl')
    run, _ = models['native']
    results = tmp_path / 'results.jsonl'
    results.write_text('{}\n')
    long = write_rows(tmp_path / 'long.jsonl', [GOOD, {**GOOD, 'choices': ['c', 'x' * 40]}])
    own = tmp_path / 'own.py'
    own.write_text('def f(text, row):\n    return {0: 0}[min(len(text), 1)]')
    cases = [
        ([f'--tasks={files[0]},{long}'], 'long.jsonl, row 2: .* 41 tokens.* 32 tokens'),
        ([f'--tasks={files[0]}', '--data_dir=elsewhere'], '--data_dir=FOLDER'),
        ([f'--tasks={files[0]},none.jsonl'], 'none.jsonl: there is no such file of tasks'),
        ([f'--tasks={files[0]}', '--block_size=33'], ' 32 positions'),
        ([f'--tasks={files[3]}', '--num_fewshot=1'], 'no answers: use --num_fewshot=0$'),
        ([f'--tasks={files[3]}', '--protocol=core'], 'error: protocol=core: .*no answers: use --protocol=harness$'),
        ([f'--tasks={prompts}', '--protocol=core'], 'has prompts, which its rules do not know: use --protocol=harness'),
        (
            [f'--tasks={prompts}', '--block_size=15'],
            r'prompts.jsonl, row \d+: the prompt has \d+ tokens and its answer up to \d, more than the 15 that',
        ),
        ([f'--tasks={files[0]}', f'--reward={own}:f'], 'own.py:f: it judges what is written to prompts, and the tasks'),
        (
            [f'--tasks={prompts}', f'--reward={own}:f'],
            'own.py:f: for the answer .* to .*, row .* it raised KeyError: 1',
        ),
        ([f'--tasks={files[0]}', '--apply_chat_template'], 'run/model has no chat .*: leave apply_chat_template out$'),
        ([f'--tasks={tmp_path}'], 'a dataset: `python prepare_data.py --tasks=NAME=.*` makes a file of tasks of it'),
        (
            [f'--tasks=boolq={tmp_path}'],
            '`python prepare_data.py --tasks=boolq=.*` first; then --tasks=tasks/boolq.jsonl',
        ),
        ([], 'no tasks'),
    ]
    for arguments, expected in cases:
        keys = [f'--out_dir={run}', f'--results={results}', *EVALUATE, *arguments]
        with pytest.raises(AssertionError) as caught:
            run_forked('evaluate.py', *keys, nproc=2, log=tmp_path / 'log')
        lines = [line for line in str(caught.value).splitlines() if ' error: ' in line]
        assert lines and all(re.search(expected, line) for line in lines), str(caught.value)
        assert 'Traceback' not in str(caught.value)
    assert results.read_text() == '{}\n'


@pytest.mark.slow
def test_a_model_without_a_tokenizer_says_so(tmp_path, files):
    save_model(tmp_path / 'model', 'gpt2')
    for path in (tmp_path / 'model').glob('tokenizer*'):
        path.unlink()
    with pytest.raises(AssertionError, match=r'\[0\] error: .*/model: .*no tokenizer'):
        run_forked('evaluate.py', f'--out_dir={tmp_path / "model"}', f'--tasks={files[0]}', log=tmp_path / 'log')


# --- lm_eval ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec('lm_eval') is None, reason='lm_eval is not installed')
@pytest.mark.parametrize('name', ['native', 'llama', 'gpt2', 'with_bos'])
def test_log_likelihoods_and_scores_are_those_of_lm_eval(models, files, name):
    run, folder = models[name]
    command = [sys.executable, str(REPO / 'benchmarks/evaluate_rate.py'), str(folder), '--rounds=0']
    command += [f'--tasks={",".join(map(str, files))}', *[f'--run={run}'] * (run != folder)]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(re.findall(r'log-likelihoods differ by up to \d', result.stdout)) == len(files)


def test_what_has_learned_chats_is_asked_and_stops_as_it_has_learned(tmp_path):
    """A base model that was given a template: its folder names only the token that ends a text."""
    folder = Path(save_model(tmp_path / 'base', 'llama'))
    for name, key, end in (('config', 'eos_token_id', 256), ('tokenizer_config', 'eos_token', '<|endoftext|>')):
        path = folder / f'{name}.json'
        path.write_text(json.dumps({**json.loads(path.read_text()), key: end}))
    (folder / 'generation_config.json').unlink(missing_ok=True)
    pretrained = Pretrained(str(folder))
    of_runs = ({}, {'chats': True, 'fold_system': True}, {'prompts_chat': True})
    before, after, rewarded = (
        Opened('out', str(folder), state={'config': keys}, pretrained=pretrained).language() for keys in of_runs
    )
    assert before.stop_tokens == [256] and after.stop_tokens == rewarded.stop_tokens == [256, 258]
    messages = [{'role': role, 'content': role} for role in ('system', 'user')]
    assert after.chat(messages, {}) == before.chat([{'role': 'user', 'content': 'system\n\nuser'}], {})
    for wanted, is_asked, says in ((None, False, '--the_key makes a message of it'), (False, False, None)):
        chat, lines = before.chat_for('the_key', wanted)
        assert (chat is not None) == is_asked and bool(lines) == bool(says) and (not says or lines[0].endswith(says))
    assert before.stop_tokens == [256] and after.chat_for('the_key', None) == (after.chat, [])
    assert before.chat_for('the_key', True) == (before.chat, []) and before.stop_tokens == [256, 258]
