"""Validation: on which text, from step 0 on, and what of it decides which checkpoint is kept and when a run ends."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from launch import TINY_MODEL, TINY_RUN, run_ranks, run_script
from outputs import column, metrics
from precision import APART
from pretrained import VOCABULARY, save_model, write_chats
from short import slow_but

import data

LENGTH, SEQUENCES = 48, 12
COMMON = [*TINY_RUN, '--batch_size=2', f'--global_batch_size={SEQUENCES}', '--dtype=float32', '--warmup_iters=0']
COMMON += ['--lr_schedule=constant', '--eval_interval=0', '--log_interval=0']


def start(script, *arguments, nproc=1, check=True, **env):
    """Run a script on nproc ranks; [Ended(returncode, stdout, stderr) of each]."""
    ranks = run_ranks([[script, *arguments]] * nproc, **env)
    for rank in ranks if check else ():
        assert rank.returncode == 0, f'{script} {arguments}\n{rank.stdout}\n{rank.stderr}'
    return ranks


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp('models') / 'llama', 'llama')


@pytest.fixture(scope='module')
def prepared(tmp_path_factory, model):
    """A data_dir: 'text' with a validation split; 'test', texts, and 'chats', conversations, with none."""
    folder, sources = tmp_path_factory.mktemp('data'), tmp_path_factory.mktemp('sources')
    for name, numbers in (('text', range(3000)), ('test', range(5000, 6500))):
        rows = [json.dumps({'text': f'{number} is followed by {number + 1}.'}) for number in numbers]
        (sources / f'{name}.jsonl').write_text('\n'.join(rows))
    write_chats(sources / 'chats.jsonl')
    for name, fraction in (('text', 0.2), ('test', 0), ('chats', 0)):
        keys = [f'--dataset={sources / name}.jsonl', f'--name={name}', f'--data_dir={folder}', f'--tokenizer={model}']
        run_script('prepare_data.py', *keys, f'--val_fraction={fraction}', '--num_proc=1')
    return folder


def loss_of_folder(model, prepared, dataset, split, sequences):
    """The mean loss of a folder's model over the first windows of a split, by transformers and no batches of ours."""
    import transformers

    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    source, nats, tokens = data.open_dataset(prepared, dataset, split, LENGTH, VOCABULARY), 0.0, 0
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
    start(script, *keys, *more, nproc=nproc)
    first, *_, last = metrics(tmp_path)
    assert first['step'] == first['tokens'] == 0 and 'loss' not in first
    assert first['val_loss'] == pytest.approx(
        loss_of_folder(model, prepared, dataset, 'train', 2 * size), rel=4 * APART
    )
    assert last['step'] == 2 and last['val_loss'] != first['val_loss']
    assert f'{dataset} (train)' in (tmp_path / 'train.log').read_text()


def test_a_run_that_goes_on_does_not_evaluate_its_start_again_and_one_that_starts_anew_does(model, prepared, tmp_path):
    keys = [*COMMON, f'--block_size={LENGTH}', f'--init_from={model}', f'--data_dir={prepared}', '--dataset=text']
    keys += [f'--out_dir={tmp_path}', '--checkpoint_interval=1']
    start('train_ddp.py', *keys, '--eval_only', '--val_dataset=test')
    (of_test,) = column(tmp_path, 'val_loss')
    start('train_ddp.py', *keys, '--max_iters=1')
    rows = metrics(tmp_path)
    assert [row['step'] for row in rows] == [0, 1]
    assert rows[0]['val_loss'] == pytest.approx(loss_of_folder(model, prepared, 'text', 'val', 24), rel=4 * APART)
    assert abs(rows[0]['val_loss'] - of_test) > 1e-3
    start('train_ddp.py', *keys, '--max_iters=2')
    assert [row['step'] for row in metrics(tmp_path)] == [0, 1, 2] and metrics(tmp_path)[:2] == rows
    start('train_ddp.py', *keys, '--max_iters=2', '--eval_only')
    assert [row['step'] for row in metrics(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize(
    ('script', 'nproc'), slow_but(['train_pipeline.py'], [('train_pipeline.py', 3), ('train_fsdp.py', 2)])
)
def test_weights_of_an_earlier_run_are_evaluated_at_step_0_and_those_from_scratch_are_not(
    data_dir, tmp_path, script, nproc
):
    keys = [*TINY_MODEL, *COMMON, f'--data_dir={data_dir}', '--dataset=tiny', '--max_iters=2']
    start('train_ddp.py', *keys, f'--out_dir={tmp_path / "first"}')
    assert [row['step'] for row in metrics(tmp_path / 'first')] == [1, 2]
    keys = [*keys, f'--out_dir={tmp_path / "second"}', f'--init_from={tmp_path / "first"}']
    start(script, *keys, nproc=nproc)
    losses = column(tmp_path / 'second', 'val_loss')
    assert len(losses) == 2 and losses[0] == pytest.approx(column(tmp_path / 'first', 'val_loss')[-1], rel=4 * APART)


def test_several_datasets_to_validate_on_have_a_loss_each(model, prepared, tmp_path):
    keys = [*COMMON, f'--block_size={LENGTH}', f'--init_from={model}', f'--data_dir={prepared}', '--dataset=text']
    start('train_ddp.py', *keys, f'--out_dir={tmp_path}', '--eval_only', '--val_dataset=text,test')
    (row,) = metrics(tmp_path)
    assert row['val_loss/text'] == pytest.approx(loss_of_folder(model, prepared, 'text', 'val', 12), rel=4 * APART)
    assert row['val_loss/test'] == pytest.approx(loss_of_folder(model, prepared, 'test', 'train', 12), rel=4 * APART)
    assert math.isclose(row['val_loss'], (row['val_loss/text'] + row['val_loss/test']) / 2)


def test_a_dataset_to_validate_on_needs_the_same_tokenizer(data_dir, tmp_path):
    (tmp_path / 'text.txt').write_text('some words, and more of them\n' * 100)
    keys = ['--tokenizer=bpe', '--vocab_size=300', f'--data_dir={data_dir}', '--name=other', '--val_fraction=0']
    run_script('prepare_data.py', f'--dataset={tmp_path / "text.txt"}', *keys)
    keys = [*TINY_MODEL, *COMMON, f'--data_dir={data_dir}', '--dataset=tiny', f'--out_dir={tmp_path / "out"}']
    (ended,) = start('train_ddp.py', *keys, '--val_dataset=other', check=False)
    assert ended.returncode == 1 and 'val_dataset=other has the tokens of another tokenizer than' in ended.stderr
    assert '--val_fraction=0 --tokenizer=bytes' in ended.stderr
