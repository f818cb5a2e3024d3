"""Validation: on which text it is done, from step 0 on, and how it decides which checkpoint is kept and when a run
ends."""

import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from launch import TINY_MODEL, TINY_RUN, fork_script, start_and_stop_behind
from outputs import column, complete, metrics
from precision import APART, assert_same_run
from pretrained import VOCABULARY, save_model, write_chats
from short import slow_but

import data
from runtime import checkpoint

LENGTH, SEQUENCES, EVALUATED = 48, 12, 24
COMMON = [*TINY_RUN, '--batch_size=2', f'--global_batch_size={SEQUENCES}', '--dtype=float32', '--warmup_iters=0']
COMMON += ['--lr_schedule=constant', '--eval_interval=0', '--log_interval=0']


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp('models') / 'llama', 'llama')


@pytest.fixture(scope='module')
def prepared(tmp_path_factory, model):
    """A data_dir with 'text', which has a validation split, and 'test' (texts) and 'chats' (conversations) without."""
    folder, sources = tmp_path_factory.mktemp('data'), tmp_path_factory.mktemp('sources')
    for name, numbers in (('text', range(3000)), ('test', range(5000, 6500))):
        rows = [json.dumps({'text': f'{number} is followed by {number + 1}.'}) for number in numbers]
        (sources / f'{name}.jsonl').write_text('\n'.join(rows))
    write_chats(sources / 'chats.jsonl')
    for name, fraction in (('text', 0.2), ('test', 0), ('chats', 0)):
        keys = [f'--dataset={sources / name}.jsonl', f'--name={name}', f'--data_dir={folder}', f'--tokenizer={model}']
        fork_script('prepare_data.py', *keys, f'--val_fraction={fraction}', '--num_proc=1')
    return folder


def loss_of_folder(model, prepared, dataset, split, sequences, windows='stream'):
    """The mean loss of a folder's model over the first windows of a split, by transformers and with batches made
    here."""
    import transformers

    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    source, nats, tokens = data.open_dataset(prepared, dataset, split, LENGTH, VOCABULARY, windows), 0.0, 0
    for window in range(min(sequences, source.n_windows)):
        read = source.read([window])
        x, y, starts = (
            (torch.from_numpy(part[0]) for part in read)
            if source.is_packed
            else (torch.from_numpy(read[0, :-1]), torch.from_numpy(read[0, 1:]), torch.zeros(1, dtype=torch.int64))
        )
        edges = [*starts[starts < LENGTH].tolist(), LENGTH]
        for begin, end in zip(edges, edges[1:], strict=False):  # each conversation by itself
            with torch.no_grad():
                logits = plain(x[None, begin:end], use_cache=False).logits[0]
            nats += F.cross_entropy(logits, y[begin:end], ignore_index=-1, reduction='sum').double().item()
            tokens += (y[begin:end] >= 0).sum().item()
    return nats / tokens


def bytes_per_token(model, prepared, dataset, split, sequences):
    """Mean bytes of text in a target of the first windows of a split, by transformers' tokenizer."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    source = data.open_dataset(prepared, dataset, split, LENGTH, VOCABULARY)
    targets = source.read(range(min(sequences, source.n_windows)))[:, 1:].ravel()
    return len(tokenizer.decode(targets, skip_special_tokens=True).encode()) / len(targets)


SCRIPTS = {
    'ddp': ['train_ddp.py'],
    'torch': ['train_fsdp.py'],
    'manual': ['train_fsdp.py', '--fsdp_impl=manual'],
    'diloco': ['train_diloco.py', '--num_replicas=1', '--inner_steps=2'],
}


@pytest.mark.parametrize('dataset', ['test', 'chats'])
@pytest.mark.parametrize(
    ('name', 'nproc'), slow_but(['ddp', 'manual'], [('ddp', 1), ('torch', 2), ('manual', 3), ('diloco', 2)])
)
def test_a_dataset_of_its_own_is_validated_on_from_step_0(model, prepared, tmp_path, name, nproc, dataset):
    script, *more = SCRIPTS[name]
    size = nproc * 4
    keys = [*COMMON, f'--block_size={LENGTH}', f'--init_from={model}', f'--data_dir={prepared}', '--dataset=text']
    keys += [f'--out_dir={tmp_path}', f'--val_dataset={dataset}', f'--global_batch_size={size}', '--max_iters=2']
    fork_script(script, *keys, *more, nproc=nproc)
    first, *_, last = metrics(tmp_path)
    assert first['step'] == first['tokens'] == 0 and 'loss' not in first
    assert first['val_loss'] == pytest.approx(
        loss_of_folder(model, prepared, dataset, 'train', EVALUATED), rel=4 * APART
    )
    bits = first['val_loss'] / math.log(2)
    if dataset == 'test':
        per_byte = bits / bytes_per_token(model, prepared, dataset, 'train', EVALUATED)
        assert first['val_bpb'] == pytest.approx(per_byte, rel=1e-12)
    assert ('val_bpb' in first) == (dataset == 'test')  # a template is no text
    assert last['step'] == 2 and last['tokens'] == 2 * size * LENGTH and last['val_loss'] != first['val_loss']
    assert f'{dataset} (train)' in (tmp_path / 'train.log').read_text()


def test_a_run_that_goes_on_does_not_evaluate_its_start_again_and_one_that_starts_anew_does(model, prepared, tmp_path):
    keys = [*COMMON, f'--block_size={LENGTH}', f'--init_from={model}', f'--data_dir={prepared}', '--dataset=text']
    keys += [f'--out_dir={tmp_path}', '--checkpoint_interval=1']
    fork_script('train_ddp.py', *keys, '--eval_only', '--val_dataset=test')
    (of_test,) = column(tmp_path, 'val_loss')
    fork_script('train_ddp.py', *keys, '--max_iters=1')
    rows = metrics(tmp_path)
    assert [row['step'] for row in rows] == [0, 1]
    assert rows[0]['val_loss'] == pytest.approx(loss_of_folder(model, prepared, 'text', 'val', 24), rel=4 * APART)
    assert abs(rows[0]['val_loss'] - of_test) > 1e-3
    fork_script('train_ddp.py', *keys, '--max_iters=2')
    assert [row['step'] for row in metrics(tmp_path)] == [0, 1, 2] and metrics(tmp_path)[:2] == rows
    (said,) = fork_script('train_ddp.py', *keys, '--max_iters=9', '--eval_only')
    assert ' step 2 | val loss ' in said.stdout and '2/9' not in said.stdout
    assert [row['step'] for row in metrics(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize(
    ('script', 'nproc'), slow_but(['train_pipeline.py'], [('train_pipeline.py', 3), ('train_fsdp.py', 2)])
)
def test_weights_of_an_earlier_run_are_evaluated_at_step_0_and_those_from_scratch_are_not(
    data_dir, tmp_path, script, nproc
):
    keys = [*TINY_MODEL, *COMMON, f'--data_dir={data_dir}', '--dataset=tiny', '--max_iters=2']
    fork_script('train_ddp.py', *keys, f'--out_dir={tmp_path / "first"}')
    assert [row['step'] for row in metrics(tmp_path / 'first')] == [1, 2]
    keys = [*keys, f'--out_dir={tmp_path / "second"}', f'--init_from={tmp_path / "first"}']
    fork_script(script, *keys, nproc=nproc)
    losses = column(tmp_path / 'second', 'val_loss')
    assert len(losses) == 2 and losses[0] == pytest.approx(column(tmp_path / 'first', 'val_loss')[-1], rel=4 * APART)


def test_runs_with_other_batches_are_validated_on_the_same_text(data_dir, tmp_path):
    """So many that two ranks of three have a row less; eval_iters, which earlier versions had, still counts batches."""
    keys = [*TINY_MODEL, *COMMON, f'--data_dir={data_dir}', '--dataset=tiny', f'--out_dir={tmp_path}', '--max_iters=1']
    fork_script('train_ddp.py', *keys)
    (after,) = column(tmp_path, 'val_loss')
    keys += ['--eval_only', '--eval_sequences=25', f'--init_from={tmp_path}', f'--out_dir={tmp_path / "other"}']
    others = {'48': ([], 1), '12': ([], 1), '6': ([], 3), '24': (['--eval_iters=1'], 1)}
    for size, (more, nproc) in others.items():
        said = fork_script('train_ddp.py', *keys, f'--global_batch_size={size}', *more, nproc=nproc)[0].stdout
        others[size] = re.search(r'val loss (\d\.\d+)', said)[1]
    assert others['48'] == others['12'] == others['6'] != others['24'] == f'{after:.4f}'
    assert 'eval_iters=1 counts global batches: --eval_sequences=24 is as much' in said


@pytest.mark.parametrize(('nproc', 'other', 'windows'), [(1, 'test', 'stream'), (3, 'chats', 'documents')])
def test_several_datasets_to_validate_on_have_a_loss_each(model, prepared, tmp_path, nproc, other, windows):
    """9 windows of each, so that on 3 ranks one has a row less than others, and one no row."""
    keys = [*COMMON, f'--block_size={LENGTH}', f'--init_from={model}', f'--data_dir={prepared}', '--dataset=text']
    keys += ['--eval_sequences=18', f'--val_dataset=text:0.75,{other}:0.25']
    fork_script('train_ddp.py', *keys, f'--windows={windows}', f'--out_dir={tmp_path}', '--eval_only', nproc=nproc)
    (row,) = metrics(tmp_path)
    splits = {'text': 'val', other: 'train'}
    for name, split in splits.items():
        expected = loss_of_folder(model, prepared, name, split, 9, windows)
        assert row[f'val_loss/{name}'] == pytest.approx(expected, rel=4 * APART)
    mean = 0.75 * row['val_loss/text'] + 0.25 * row[f'val_loss/{other}']
    assert (row['val_loss'], row['val_ppl']) == pytest.approx((mean, math.exp(mean)), rel=1e-12)
    assert ('val_bpb' in row) == (other == 'test')
    if other == 'test':
        sizes = [bytes_per_token(model, prepared, name, split, 9) for name, split in splits.items()]
        bits = row['val_loss'] / math.log(2)
        assert row['val_bpb'] == pytest.approx(bits / (0.75 * sizes[0] + 0.25 * sizes[1]), rel=1e-12)


def test_a_dataset_to_validate_on_needs_the_same_tokenizer(data_dir, tmp_path):
    (tmp_path / 'text.txt').write_text('some words, and more of them\n' * 100)
    keys = ['--tokenizer=bpe', '--vocab_size=300', f'--data_dir={data_dir}', '--name=other', '--val_fraction=0']
    fork_script('prepare_data.py', f'--dataset={tmp_path / "text.txt"}', *keys)
    keys = [*TINY_MODEL, *COMMON, f'--data_dir={data_dir}', '--dataset=tiny', f'--out_dir={tmp_path / "out"}']
    (ended,) = fork_script('train_ddp.py', *keys, '--val_dataset=other', check=False)
    assert ended.returncode == 1 and 'val_dataset=other has the tokens of another tokenizer than' in ended.stderr
    assert '--val_fraction=0 --tokenizer=bytes' in ended.stderr


UNVALIDATED = {
    'ddp': (1, ['train_ddp.py']),
    'torch': (2, ['train_fsdp.py']),
    'pipeline': (3, ['train_pipeline.py']),
    'diloco': (2, ['train_diloco.py', '--num_replicas=2', '--inner_steps=2']),
    'pool': (1, ['train_pool.py', '--num_replicas=1', '--inner_steps=2', '--exchange={}/pool']),
    'deepspeed': (2, ['train_deepspeed.py']),
}


@pytest.mark.parametrize('name', slow_but(['ddp', 'diloco'], UNVALIDATED))
def test_a_run_that_evaluates_nothing_needs_no_text_for_it(prepared, tmp_path, name):
    if name == 'deepspeed':
        pytest.importorskip('deepspeed')
    nproc, (script, *more) = UNVALIDATED[name]
    keys = [script, *TINY_MODEL, *COMMON, *(key.format(tmp_path) for key in more), '--max_iters=2', '--log_interval=1']
    keys += [f'--data_dir={prepared}', '--dataset=test', f'--out_dir={tmp_path}']
    fork_script(*keys, '--eval_sequences=0', nproc=nproc)
    assert len(column(tmp_path, 'loss')) == 2 and column(tmp_path, 'val_loss') == []
    needing = {
        '--eval_sequences=9': "no split 'val', it holds .* or on none, --eval_sequences=0",
        '--eval_only': 'eval_sequences=0 with eval_only=True: expected 1 or more',
        '--keep_best': 'keep_best=True with eval_sequences=0: there is no val_loss to go by',
    }
    for asked, problem in needing.items() if name == 'ddp' else ():
        (ended,) = fork_script(*keys, '--eval_sequences=0', asked, check=False)
        assert ended.returncode == 1 and re.search(problem, ended.stderr) and len(ended.stderr.splitlines()) == 1


# --- the best checkpoint, and stopping early --------------------------------------------------------------------------

# A model that learns text becomes worse at random tokens, so val_loss rises from the first evaluation on.
RISING = [*TINY_MODEL, *COMMON, '--dataset=tiny', '--val_dataset=synthetic', '--eval_interval=2', '--log_interval=1']
RISING += ['--keep_checkpoints=1', '--checkpoint_interval=3', '--max_iters=40']
EARLY = {
    'ddp': (1, ['train_ddp.py']),
    'torch': (2, ['train_fsdp.py']),
    'manual': (2, ['train_fsdp.py', '--fsdp_impl=manual', '--async_checkpoint']),
    'pipeline': (3, ['train_pipeline.py']),
    'diloco': (2, ['train_diloco.py', '--num_replicas=2', '--inner_steps=2']),
}


@pytest.mark.parametrize('name', slow_but(['ddp', 'manual'], EARLY))
def test_a_run_ends_early_keeps_the_best_and_goes_on_with_more_patience(data_dir, tmp_path, name):
    nproc, (script, *more) = EARLY[name]
    keys = [script, *RISING, *more, f'--data_dir={data_dir}']
    out, whole = tmp_path / 'out', tmp_path / 'whole'
    fork_script(*keys, f'--out_dir={out}', '--patience=2', nproc=nproc)
    evaluated = {row['step']: row for row in metrics(out) if 'val_loss' in row}
    assert list(evaluated) == [2, 4, 6] and [row['best_step'] for row in evaluated.values()] == [2, 2, 2]
    best = min(row['val_loss'] for row in evaluated.values())
    assert best == evaluated[2]['val_loss'] == evaluated[6]['best_val_loss'] < evaluated[6]['val_loss']
    assert (
        (out / 'DONE').read_text().startswith(f'6 of 40 steps: val_loss has not been below {best:.4f}, that of step 2')
    )
    assert complete(out) == [2, 6] and not (out / 'PREEMPTED').exists()

    fork_script(*keys, f'--out_dir={out}', '--patience=2', nproc=nproc)  # the same command finds it done
    assert (out / 'DONE').exists() and len(metrics(out)) == 6
    fork_script(*keys, f'--out_dir={out}', '--patience=3', nproc=nproc)
    assert complete(out) == [2, 8] and (out / 'DONE').read_text().startswith('8 of 40 steps')
    fork_script(*keys, f'--out_dir={whole}', '--patience=3', nproc=nproc)
    assert_same_run(column(out, 'loss'), column(whole, 'loss'))
    assert column(out, 'best_step') == column(whole, 'best_step') == [2, 2, 2, 2]

    read = ['sample.py', '--num_samples=1', '--max_new_tokens=2', '--device=cpu', f'--out_dir={out}']
    assert f'{out}/checkpoints/step_00000002:' in fork_script(*read, '--step=best')[0].stderr
    assert f'{out}/checkpoints/step_00000008:' in fork_script(*read)[0].stderr


def test_patience_begins_anew_where_a_stage_begins_and_where_a_run_goes_on_at_another_rate(data_dir, tmp_path):
    keys = ['train_ddp.py', *RISING, f'--data_dir={data_dir}', f'--out_dir={tmp_path}', '--patience=2']
    keys.append("--dataset_stages=((4, 'tiny'),)")  # otherwise it ends at step 6
    fork_script(*keys)
    assert (tmp_path / 'DONE').read_text().startswith('8 of 40 steps')
    fork_script(*keys, '--learning_rate=4')
    assert (tmp_path / 'DONE').read_text().startswith('12 of 40 steps')


# Here the loss falls from evaluation to evaluation, so each checkpoint is the best one, and the one before is deleted.
FALLING = [*TINY_MODEL, *COMMON, '--dataset=tiny', '--eval_interval=2', '--log_interval=1', '--keep_checkpoints=1']
FALLING += ['--checkpoint_interval=0', '--max_iters=8', '--keep_best', '--learning_rate=1e-2']


@pytest.mark.parametrize(
    ('behind', 'before'),
    [(2, 'step_00000004'), (4, 'step_00000002.tmp')],
    ids=['before the next best has its name', 'before the old one is deleted'],
)
def test_the_best_checkpoint_is_there_whenever_a_run_is_killed(data_dir, tmp_path, behind, before):
    keys = ['train_ddp.py', *FALLING, f'--data_dir={data_dir}', f'--out_dir={tmp_path / "out"}']
    marker = tmp_path / f'out/checkpoints/step_{behind:08}/manifest.json'
    process = start_and_stop_behind(marker, *keys, before=before)
    process.kill()
    process.join()
    path = checkpoint.choose_to_read(str(tmp_path / 'out'), 'best')
    assert path.endswith(f'step_{behind:08}')
    fork_script(*keys)
    assert column(tmp_path / 'out', 'best_step') == [2, 4, 6, 8] and complete(tmp_path / 'out') == [8]


def test_the_start_is_the_best_where_training_makes_it_worse(model, prepared, tmp_path):
    keys = [*COMMON, f'--block_size={LENGTH}', f'--init_from={model}', f'--data_dir={prepared}', '--dataset=text']
    keys += ['--val_dataset=test', '--eval_interval=1', '--learning_rate=3', '--max_iters=9', f'--out_dir={tmp_path}']
    fork_script('train_ddp.py', *keys, '--patience=2')
    assert column(tmp_path, 'best_step') == [0, 0, 0] and complete(tmp_path)[0] == 0
    assert complete(tmp_path)[-1] == 2 and (tmp_path / 'DONE').read_text().startswith('2 of 9 steps')
    fork_script('train_ddp.py', *keys, '--patience=3')
    assert column(tmp_path, 'best_step') == [0, 0, 0, 0] and complete(tmp_path)[0] == 0


def test_the_best_of_another_validation_text_does_not_count(data_dir, tmp_path):
    keys = ['train_ddp.py', *FALLING, f'--data_dir={data_dir}', f'--out_dir={tmp_path}']
    fork_script(*keys, '--max_iters=4')
    assert column(tmp_path, 'best_step') == [2, 4]
    fork_script(*keys, '--max_iters=8', '--val_dataset=synthetic')  # a loss that is far above those before
    assert column(tmp_path, 'best_step') == [2, 4, 6, 6]


@pytest.mark.parametrize(
    ('keys', 'problem'),
    [
        (['--patience=2', '--eval_sequences=0'], 'patience=2 with eval_sequences=0: there is no val_loss to go by'),
        (['--patience=2', '--eval_interval=0'], 'patience=2 with eval_interval=0'),
        (['--keep_best', '--keep_checkpoints=0'], 'keep_best=True with keep_checkpoints=0'),
    ],
)
def test_what_leaves_nothing_to_go_by_is_refused(data_dir, tmp_path, keys, problem):
    keys = ['train_ddp.py', *FALLING, f'--data_dir={data_dir}', f'--out_dir={tmp_path}', '--keep_best=False', *keys]
    (ended,) = fork_script(*keys, check=False)
    assert ended.returncode == 1 and problem in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_a_run_that_has_kept_no_best_checkpoint_says_so(data_dir, tmp_path):
    fork_script('train_ddp.py', *FALLING, f'--data_dir={data_dir}', f'--out_dir={tmp_path}', '--keep_best=False')
    (ended,) = fork_script('sample.py', f'--out_dir={tmp_path}', '--step=best', '--device=cpu', check=False)
    assert ended.returncode == 1 and f'step=best: {tmp_path} has kept none' in ended.stderr
