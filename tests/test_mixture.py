"""Mixtures of datasets: exact shares, an epoch for each source, stages, and the same batches under every strategy."""

import itertools
import json
import random
import re
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from launch import TINY_MODEL, TINY_RUN, run_forked
from outputs import metrics
from precision import apart
from prepared import only
from short import slow_but

import data
import optim
from dataset import shards
from dataset.mixture import SourceOrder, folder_of, parse_shares
from dataset.shuffle import permuted
from keys import Keys
from model import GPT, ModelConfig
from runtime import checkpoint

BATCH = 12  # divides by 1, 2, 3 and 4 ranks
KEYS = {'dataset_stages': (), 'block_size': 32, 'vocab_size': None, 'windows': 'stream'}


def make(folder, name, tokens, seed=0, val_tokens=400, **facts):
    """A dataset of random bytes."""
    (folder / name).mkdir(parents=True)
    generator, meta = np.random.default_rng([seed, *name.encode()]), {'vocab_size': 257, 'eot_token': 256, **facts}
    meta['splits'] = {}
    for split, length in (('train', tokens), ('val', val_tokens)):
        shard = {'file': f'{split}_000000.bin', 'tokens': length}
        shards.write_shard(folder / name / shard['file'], generator.integers(0, 256, length), np.uint16)
        meta['splits'][split] = {'tokens': length, 'bytes': length, 'max_token': 255, 'shards': [shard]}
    (folder / name / 'meta.json').write_text(json.dumps(meta))


@pytest.fixture(scope='module')
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp('sources')
    for name, tokens in (('web', 20_000), ('code', 9_000), ('books', 1_500)):
        make(folder, name, tokens)
    return folder


def open_planned(folder, dataset, stages=(), max_iters=100, batch=BATCH, split='train'):
    keys = {**KEYS, 'dataset': dataset, 'dataset_stages': stages, 'data_dir': str(folder)}
    mixture = data.open_mixture(keys, split)
    mixture.plan(max_iters, batch)
    return mixture


# --- shares -----------------------------------------------------------------------------------------------------------


def awkward_shares(count, seed):
    """Shares of several magnitudes, with denominators that have little in common."""
    generator = random.Random(seed)
    shares = [Fraction(generator.randint(1, 10 ** generator.randint(1, 4)), 10**4) for _ in range(count)]
    return [share / sum(shares) for share in shares]


CASES = [awkward_shares(count, seed=count) for count in range(2, 21)]
CASES += [[Fraction(1, 3), Fraction(2, 3)], [Fraction(999_999, 10**6), Fraction(1, 10**6)], [Fraction(1, 20)] * 20]


@pytest.mark.parametrize('shares', CASES, ids=lambda shares: f'{len(shares)}_sources')
def test_every_beginning_of_a_run_has_its_shares_to_less_than_one_sample(shares):
    n = 10**6
    order = SourceOrder(0, dict(enumerate(shares)), np.zeros(len(shares), dtype=np.int64))
    sources, numbers = order.locate(np.arange(n))
    for source, share in enumerate(shares):
        counts = np.cumsum(sources == source)
        # Computed exactly, in integers: the share is numerator / denominator.
        off = np.abs(counts * share.denominator - np.arange(1, n + 1) * share.numerator)
        assert off.max() < share.denominator
        assert np.array_equal(numbers[sources == source], np.arange(counts[-1]))  # none left out, none twice
        for some in (0, 1, 17, n // 3, n):
            assert order.counts(some)[source] == (counts[some - 1] if some else 0)


def test_shares_in_words():
    assert parse_shares('web', 'data') == {'web': 1}
    assert parse_shares('web:0.7, code:0.2,books:0.1', 'data') == {
        'web': Fraction(7, 10), 'code': Fraction(1, 5), 'books': Fraction(1, 10)
    }  # fmt: skip
    assert parse_shares('data/web:2,code', 'data') == {'web': Fraction(2, 3), 'code': Fraction(1, 3)}
    assert parse_shares('web:1,code:0', 'data') == {'web': 1}


@pytest.mark.parametrize(
    'text, problem',
    [
        ('web:-1,code:2', "'web' .*share of 0 or more"),
        ('web:0,code:0.0', 'sum to 0'),
        ('web:much', "'web' has no share"),
        ('web:0.5,web:0.5', "'web' .*twice"),
        ('web:0.5,', "'' has no share"),
        ('web:0.123456789,code:0.5', 'too fine'),
        ('web:0.5,bookz:0.5', 'did you mean books'),
    ],
)
def test_a_mixture_that_cannot_be_is_refused_in_one_line(sources, text, problem):
    with pytest.raises((ValueError, FileNotFoundError), match=problem) as error:
        open_planned(sources, text)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    'stages, problem',
    [
        ((0.5, 'web'), '0.5 is no stage'),
        (((1.5, 'web'),), 'is no stage'),
        (((0.9, 'web'), (0.5, 'code')), r'\[90, 50\]'),
        (((0.001, 'web'),), r'\[0\]'),
        (((0.5, 'web:0.7,code:x'),), "'code' has no share"),
    ],
)
def test_stages_that_cannot_be_are_refused_in_one_line(sources, stages, problem):
    with pytest.raises(ValueError, match=problem) as error:
        open_planned(sources, 'web', stages)
    assert '\n' not in str(error.value)


def test_sources_of_different_tokenizers_are_refused_by_name(tmp_path):
    make(tmp_path, 'one', 1000, tokenizer={'name': 'bytes'})
    make(tmp_path, 'same', 1000, tokenizer={'name': 'bytes'})
    make(tmp_path, 'other', 1000, tokenizer={'name': 'gpt2'})
    make(tmp_path, 'unknown', 1000)
    open_planned(tmp_path, 'one,same,unknown')
    with pytest.raises(ValueError, match=r'/other has .* another tokenizer than .*/one and .*/same: .*=bytes`'):
        open_planned(tmp_path, 'one,same,other')
    with pytest.raises(ValueError, match=r'/other has .* another tokenizer than .*/unknown and .*/one: .*=bytes`'):
        open_planned(tmp_path, 'unknown,one,other')


def test_the_tokenizer_of_a_run_is_that_of_the_first_source_that_tells_it_wherever_the_data_is_now(tmp_path):
    make(tmp_path / 'data', 'mine', 1000)
    (tmp_path / 'data' / 'foreign').mkdir()
    keys = {'dataset': f'foreign:0.5,{tmp_path}/data/mine:0.5', 'data_dir': f'{tmp_path}/data'}  # as a shell completes
    assert folder_of(keys) == f'{tmp_path}/data/mine'
    (tmp_path / 'data').rename(tmp_path / 'moved')
    assert folder_of(keys, f'{tmp_path}/moved') == f'{tmp_path}/moved/mine'
    assert folder_of({**keys, 'dataset': 'foreign'}) == f'{tmp_path}/data/foreign'
    staged = {**keys, 'dataset': 'foreign', 'dataset_stages': [[0.5, 'mine']]}
    assert folder_of(staged, f'{tmp_path}/moved') == f'{tmp_path}/moved/mine'


# --- order ------------------------------------------------------------------------------------------------------------

STAGES = ((40, 'web:0.2,books:0.8'), (0.9, 'code'))


def read_by(mixture, n, seed=7):
    """{name: its windows in the order of the run} for the first n slots; within a step the order may differ."""
    sources, windows = mixture.locate(np.arange(n), seed)
    return {name: windows[sources == number] for number, name in enumerate(mixture.names)}


def test_each_source_goes_through_shuffled_epochs_of_its_own_across_stages(sources):
    mixture = open_planned(sources, 'web:0.7,code:0.3', STAGES)
    read = read_by(mixture, 100 * BATCH)
    counts = dict(zip(mixture.names, mixture.counts(100 * BATCH).tolist(), strict=True))
    assert {name: len(windows) for name, windows in read.items()} == counts
    assert counts == {'web': 336 + 120, 'code': 144 + 120, 'books': 480}  # 480 + 600 + 120 samples
    for name, source in zip(mixture.names, mixture.sources, strict=True):
        expected = permuted(np.arange(counts[name]), source.n_windows, 7)
        assert sorted(read[name].tolist()) == sorted(expected.tolist())
        moved = np.abs(np.argsort(read[name], kind='stable') - np.argsort(expected, kind='stable'))
        assert moved.max() < BATCH  # only shuffled within a step
    assert mixture.epochs(100 * BATCH)['epochs/books'] == 480 / mixture.sources[2].n_windows


def test_neither_names_nor_their_order_decide_anything(sources, tmp_path):
    for new, old in (('zebra', 'web'), ('apple', 'code')):
        (tmp_path / new).symlink_to(sources / old)
    one, other = open_planned(sources, 'web:0.7,code:0.3'), open_planned(tmp_path, 'apple:0.3,zebra:0.7')
    slots = np.arange(500)
    names = {'zebra': 'web', 'apple': 'code'}
    for (source, window), (its_source, its_window) in zip(
        zip(*one.locate(slots, 7), strict=True), zip(*other.locate(slots, 7), strict=True), strict=True
    ):
        assert one.names[source] == names[other.names[its_source]] and window == its_window


def test_one_source_is_read_as_without_a_mixture_and_goes_on_with_others(sources):
    """So a run that has begun with one dataset may get stages later."""
    slots = np.arange(40 * BATCH)
    alone = open_planned(sources, 'web')
    assert np.array_equal(alone.locate(slots, 7)[1], permuted(slots, alone.n_windows, 7))
    staged = open_planned(sources, 'web', ((40, 'web:0.2,books:0.8'),))
    assert np.array_equal(staged.locate(slots, 7)[1], alone.locate(slots, 7)[1])
    assert open_planned(sources, 'ignored', ((0, 'web'),)).names == ['web']


def samples_of_steps(mixture, steps, world_size, batch_size, first_step=0):
    """The rows of each step, over ranks and micro-steps in order."""
    iterators = [
        data.batches(mixture, 7, first_step * BATCH, BATCH, batch_size, rank, world_size, 'cpu')
        for rank in range(world_size)
    ]
    result = [[] for _ in range(steps)]
    for rows, iterator in itertools.product(result, iterators):
        for _ in range(BATCH // batch_size // world_size):
            rows += next(iterator)[0].tolist()
    for iterator in iterators:
        iterator.close()
    return result


@pytest.mark.parametrize('world_size, batch_size', [(1, 3), (2, 6), (3, 2), (4, 3)])
def test_the_batches_are_the_same_on_any_number_of_ranks_from_any_step_on(sources, world_size, batch_size):
    mixture = open_planned(sources, 'web:0.7,code:0.3', STAGES)
    expected = samples_of_steps(mixture, 100, 1, BATCH)
    assert samples_of_steps(mixture, 100, world_size, batch_size) == expected
    assert samples_of_steps(mixture, 45, world_size, batch_size, first_step=55) == expected[55:]


@pytest.mark.parametrize('dataset', ['web:0.5,code:0.5', 'web:0.7,code:0.2,books:0.1', 'web:0.25,code:0.25,books:0.5'])
@pytest.mark.parametrize('world_size', [2, 4])
def test_every_rank_reads_every_source_in_its_share(sources, dataset, world_size):
    steps, batch = 1000, 16
    mixture = open_planned(sources, dataset, max_iters=steps, batch=batch)
    of_slots, _ = mixture.locate(np.arange(steps * batch), seed=Keys.seed)
    for of_rank in np.split(of_slots.reshape(steps, batch), world_size, axis=1):
        found = np.bincount(of_rank.ravel()) / of_rank.size
        shares = [float(share) for share in parse_shares(dataset, 'data').values()]
        assert np.abs(found - shares).max() < 0.02


def test_the_plan_names_epochs_and_what_is_too_small(sources):
    lines = open_planned(sources, 'web:0.7,code:0.3', STAGES).lines()
    assert lines[:3] == ['from step 0: web 0.7, code 0.3', 'from step 40: web 0.2, books 0.8', 'from step 90: code 1']
    assert '480 samples of 46 windows, 10.43 epochs' in lines[5]
    assert re.match(r'WARNING: books .* 10.4 epochs, .*\b4 ', lines[6])
    assert not any('WARNING' in line for line in open_planned(sources, 'web:0.7,code:0.3').lines())
    web = open_planned(sources, 'web')
    assert web.lines() == [f'web: 1,200 samples of {web.n_windows:,} windows, {1200 / web.n_windows:.2f} epochs']
    late = open_planned(sources, 'web', ((200, 'code'),)).lines()
    assert re.match('WARNING: .* step 200: code 1$', late[1])


def test_validation_is_over_the_same_windows_of_every_source(sources):
    mixture = open_planned(sources, 'web:0.7,code:0.3', STAGES, split='val')
    seen = {}
    for rank in range(3):
        for (x, y), source in data.eval_batches(mixture, 14, 2, rank, 3, 'cpu'):
            rows = x[(y >= 0).all(1)].tolist()
            seen.setdefault(source, []).extend(map(tuple, rows))
    for number, source in enumerate(mixture.sources):
        expected = source.read(range(5))[:, :-1]  # a third of 14 sequences, rounded up
        assert sorted(seen[number]) == sorted(map(tuple, expected.tolist()))
    row = mixture.losses([(20.0, 10), (30.0, 10), (80.0, 20)], 14)
    assert row['val_loss/web'] == 2 and row['val_loss/code'] == 3 and row['val_loss/books'] == 4
    shares = [456 / 1200, 264 / 1200, 480 / 1200]  # of the run
    assert row['val_loss'] == pytest.approx(sum(share * loss for share, loss in zip(shares, (2, 3, 4), strict=True)))


# --- runs -------------------------------------------------------------------------------------------------------------

MIXED = ['--dataset=web:0.6,code:0.4', "--dataset_stages=((8, 'web:0.2,code:0.3,books:0.5'),)"]


def run(sources, out_dir, script, *arguments, nproc=1):
    fixed = [*TINY_MODEL, *TINY_RUN, '--dtype=float32', '--lr_schedule=constant', f'--global_batch_size={BATCH}']
    paths = ['--batch_size=3', f'--data_dir={sources}', f'--out_dir={out_dir}']
    return run_forked(script, *fixed, *paths, *arguments, nproc=nproc, log=f'{out_dir}.log')


@pytest.fixture(scope='module')
def expected(sources, tmp_path_factory):
    """Rows of one process under DDP."""
    out_dir = tmp_path_factory.mktemp('ddp') / 'out'
    run(sources, out_dir, 'train_ddp.py', *MIXED, '--max_iters=16')
    return metrics(out_dir)


def assert_same_losses(rows, expected):
    assert [row['step'] for row in rows] == [row['step'] for row in expected]
    for row, its in zip(rows, expected, strict=True):
        for key in {'loss', 'val_loss', 'val_loss/web', 'val_loss/books', 'epochs/code'} & its.keys():
            assert row[key] == pytest.approx(its[key], rel=apart(row['step'])), (key, row['step'])


@pytest.mark.parametrize(
    'script, nproc, options',
    [
        pytest.param('train_fsdp.py', 4, (), marks=pytest.mark.slow),
        ('train_fsdp.py', 2, ('--fsdp_impl=manual',)),
        ('train_diloco.py', 2, ('--num_replicas=1', '--inner_steps=4', '--outer_lr=1', '--outer_momentum=0')),
    ],
)
def test_losses_are_the_same_under_every_strategy(sources, expected, tmp_path, script, nproc, options):
    run(sources, tmp_path / 'out', script, *MIXED, *options, '--max_iters=16', nproc=nproc)
    assert_same_losses(metrics(tmp_path / 'out'), expected)


def test_a_run_goes_on_in_the_middle_of_a_stage_on_other_ranks_and_may_add_stages(sources, expected, tmp_path):
    out_dir = tmp_path / 'out'
    run(sources, out_dir, 'train_fsdp.py', '--dataset=web:0.6,code:0.4', '--max_iters=5', nproc=2)  # no stages yet
    run(sources, out_dir, 'train_fsdp.py', *MIXED, '--max_iters=11', nproc=4)
    text = run(sources, out_dir, 'train_ddp.py', *MIXED, '--max_iters=16')
    rows = [{**row, 'val_loss': its.get('val_loss')} for row, its in zip(metrics(out_dir), expected, strict=True)]
    assert_same_losses(rows, expected)
    assert 'resuming' in text
    mixture = open_planned(sources, 'web:0.6,code:0.4', ((8, 'web:0.2,code:0.3,books:0.5'),), max_iters=16)
    read, windows = mixture.locate(np.arange(16 * BATCH), Keys.seed)
    for row in rows:
        assert row['tokens'] == row['step'] * BATCH * 32
        ranks = 2 if row['step'] <= 5 else 4 if row['step'] <= 11 else 1
        speed = BATCH * 32 / row['time/total'] * 1000
        assert row['tokens_per_sec'] == pytest.approx(speed, rel=1e-3)
        assert row['tokens_per_sec_per_rank'] == pytest.approx(speed / ranks, rel=1e-3)
        for number, (name, source) in enumerate(zip(mixture.names, mixture.sources, strict=True)):
            passes = (read[: row['step'] * BATCH] == number).sum() / source.n_windows
            assert row.get(f'epochs/{name}', 0) == pytest.approx(passes), (row['step'], name)
    assert rows[-1]['epochs/books'] > 1 and len({*windows[read == 2]}) == mixture.sources[2].n_windows  # a whole one

    with pytest.raises(AssertionError) as error:  # a stage that has begun
        run(sources, out_dir, 'train_ddp.py', MIXED[0], "--dataset_stages=((9, 'web'),)", '--max_iters=18')
    both = ("dataset_stages=[[8, 'web:0.2,code:0.3,books:0.5']]", "dataset_stages=[[9, 'web']]")
    assert all(stages in str(error.value) for stages in both)
    with pytest.raises(AssertionError, match=', windows=documents: .*--out_dir'):
        run(sources, out_dir, 'train_ddp.py', *MIXED, '--max_iters=16', '--windows=documents')
    changed = ["--dataset_stages=((8, 'web:0.2,code:0.3,books:0.5'), (17, 'code'))", '--max_iters=18']
    run(sources, out_dir, 'train_ddp.py', MIXED[0], *changed)
    assert metrics(out_dir)[-1]['step'] == 18


@pytest.mark.slow
def test_replicas_share_out_the_mixture(sources, tmp_path):
    """Two replicas of DiLoCo together read in a step what one process reads."""
    mixture = open_planned(sources, 'web:0.6,code:0.4')
    whole = samples_of_steps(mixture, 8, 1, BATCH)
    of_replicas = []
    for replica in range(2):
        iterator = data.batches(mixture, 7, 0, BATCH, BATCH // 2, replica, 2, 'cpu')
        of_replicas.append([batch[0].tolist() for batch in itertools.islice(iterator, 8)])
        iterator.close()
    assert [one + other for one, other in zip(*of_replicas, strict=True)] == whole
    replicas = ['--num_replicas=2', '--inner_steps=4', '--max_iters=16']
    run(sources, tmp_path / 'out', 'train_diloco.py', *MIXED, *replicas, nproc=2)
    rows = metrics(tmp_path / 'out')
    assert rows[-1]['epochs/books'] == pytest.approx(48 / 46) and 'val_loss/books' in rows[-1]


# --- documents kept apart ---------------------------------------------------------------------------------------------

LENGTHS = [1, 2, 31, 32, 33, 64, 65, 100, 1, 3, 7, 5, 12, 20, 40, 17, 9, 2, 2, 28]  # with their end-of-text


def make_documents(folder, name, lengths=LENGTHS, first_is_eot=False):
    """A dataset of documents of these lengths; returns the tokens of its training split."""
    make(folder, name, sum(lengths), val_tokens=sum(lengths))
    for split in ('train', 'val'):
        path = folder / name / f'{split}_000000.bin'
        tokens = np.array(shards.read_shard(path))
        tokens[np.cumsum(lengths) - 1] = 256
        if first_is_eot:  # as in the files of llm.c and modded-nanogpt
            tokens = np.roll(tokens, 1)
        shards.write_shard(path, tokens, np.uint16)
    return np.array(shards.read_shard(folder / name / 'train_000000.bin')).astype(np.int64)


def split_up(folder, split, borders):
    """Divide the only shard of a split."""
    meta, tokens = json.loads((folder / 'meta.json').read_text()), shards.read_shard(folder / f'{split}_000000.bin')
    facts = meta['splits'][split]['shards'] = []
    for number, piece in enumerate(np.split(np.array(tokens), borders)):
        facts.append({'file': f'{split}_{number:06}.bin', 'tokens': len(piece)})
        shards.write_shard(folder / facts[-1]['file'], piece, np.uint16)
    (folder / 'meta.json').write_text(json.dumps(meta))


def pieces_in(starts):
    """(begin, end) of each piece in a row of 32 tokens."""
    return itertools.pairwise([*starts[starts < 32].tolist(), 32])


@pytest.mark.parametrize('first_is_eot', [False, True])
def test_each_token_is_a_target_once_behind_all_of_its_document_or_of_a_window(tmp_path, first_is_eot):
    tokens = make_documents(tmp_path, 'docs', first_is_eot=first_is_eot)
    split_up(tmp_path / 'docs', 'train', [328, 329, 400])  # the second shard is one end-of-text
    dataset = data.open_dataset(tmp_path, 'docs', 'train', 32, windows='documents')
    found = []
    for x, y, starts in zip(*dataset.read(range(dataset.n_windows)), strict=True):
        of_row = [(x[begin:end].tolist(), y[begin:end].tolist()) for begin, end in pieces_in(starts)]
        found += [(x, y) for x, y in of_row if y != [-1] * len(y)]  # the last may be padding
    borders = [0, *np.flatnonzero(tokens == 256).tolist(), len(tokens) - 1]
    documents = [(begin, end) for begin, end in itertools.pairwise(borders) if end > begin]
    expected = []
    for begin, end in documents:  # from one end-of-text to the next
        for first in range(begin, end, 32):
            last = min(first + 32, end)
            expected.append((tokens[first:last].tolist(), tokens[first + 1 : last + 1].tolist()))
    assert sorted(found) == sorted(expected)
    assert dataset.n_targets.sum() == len(tokens) - 1

    n_cut = sum(end - begin > 32 for begin, end in documents)
    n_cut_in_stream = sum(begin // 32 != (end - 1) // 32 for begin, end in documents)
    n = len(documents)
    assert f'{n} documents (train). windows=documents: {n_cut / n:.1%} ' in dataset.line
    assert f'windows=stream: {n_cut_in_stream / n:.1%} ' in dataset.line
    stream = data.open_dataset(tmp_path, 'docs', 'train', 32)
    assert stream.fingerprint != dataset.fingerprint


def test_documents_need_a_token_that_ends_them(tmp_path):
    make(tmp_path, 'docs', 500, eot_token=None)
    with pytest.raises(ValueError, match='eot_token .*--windows=stream'):
        data.open_dataset(tmp_path, 'docs', 'train', 32, windows='documents')


@pytest.mark.parametrize('script, nproc', slow_but(['train_fsdp.py'], [('train_ddp.py', 1), ('train_fsdp.py', 2)]))
def test_a_run_over_packed_documents_is_one_over_single_documents(tmp_path, script, nproc):
    """20 steps of a script beside a loop that gives the model one document at a time."""
    make_documents(tmp_path, 'docs', LENGTHS * 20)
    options = ['--dataset=docs', '--windows=documents', '--max_iters=20', '--arch=llama', '--eval_sequences=0']
    text = run(tmp_path, tmp_path / 'out', script, *options, nproc=nproc)
    assert 'windows=documents: ' in text
    rows = metrics(tmp_path / 'out')
    state = checkpoint.read_state(checkpoint.choose_to_read(tmp_path / 'out'))
    model = GPT(ModelConfig(**state['identity']['model']), torch.float32)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(model.initial_value(name, parameter, Keys.seed, torch.device('cpu')))
    optimizer = optim.make_optimizer(model, 'adamw', 3e-3, 0.9, 0.95, 0.1)
    schedule = SimpleNamespace(**state['config'])
    mixture = only(data.open_dataset(tmp_path, 'docs', 'train', 32, windows='documents'))
    batches = data.batches(mixture, Keys.seed, 0, BATCH, BATCH, 0, 1, 'cpu')
    for step, (x, y, starts) in zip(range(20), batches, strict=False):
        nats, targets = 0.0, (y >= 0).sum().item()
        for row in range(BATCH):
            for begin, end in pieces_in(starts[row]):
                loss_sum, ce_sum = model(x[row : row + 1, begin:end], y[row : row + 1, begin:end])
                (loss_sum / targets).backward()
                nats += ce_sum.item()
        assert rows[step]['loss'] == pytest.approx(nats / targets, rel=apart(step + 1)), step
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group['lr'] = optim.learning_rate_at(step, schedule)
        optimizer.step()
        optimizer.zero_grad()
    batches.close()


@pytest.mark.parametrize('packing', [True, False])
def test_padding_counts_neither_as_tokens_nor_in_their_rate(tmp_path, packing):
    make_documents(tmp_path, 'docs', LENGTHS)
    dataset = data.open_dataset(tmp_path, 'docs', 'train', 32, windows='documents', packing=packing)
    targets = dataset.n_tokens - 1  # of an epoch: the documents' own
    assert targets < 0.99 * dataset.n_windows * 32
    options = ['--dataset=docs', '--windows=documents', f'--packing={packing}', '--eval_sequences=0']
    options += ['--batch_size=1', '--global_batch_size=1', f'--max_iters={dataset.n_windows}']
    said = run(tmp_path, tmp_path / 'out', 'train_ddp.py', *options, '--dry_run')
    assert f'{dataset.n_windows * 32:,} positions, of which {1 - dataset.padding:.0%} hold tokens' in said
    run(tmp_path, tmp_path / 'out', 'train_ddp.py', *options)
    rows = metrics(tmp_path / 'out')
    assert rows[-1]['tokens'] == targets and rows[0]['tokens'] == round(targets / dataset.n_windows)
    for row in rows:
        per_step = row['tokens_per_sec'] * row['time/total'] / 1000
        assert per_step == pytest.approx(targets / dataset.n_windows, rel=1e-3)
