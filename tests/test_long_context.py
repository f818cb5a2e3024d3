"""Longer contexts by YaRN and another theta: the models of this project and of transformers, from runs and through
exports."""

import json
import re

import pytest
import torch
import transformers
from launch import TINY_MODEL, TINY_RUN, Job, fork_script, run_forked
from outputs import column
from precision import apart, assert_as_close_to_float64, error
from pretrained import POSITIONS, save_model
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from huggingface import convert
from huggingface.finetune import for_training
from huggingface.loading import load
from huggingface.pretrained import Pretrained
from model import GPT, ModelConfig, yarn_frequencies
from runtime import checkpoint

RUN = [*TINY_MODEL, *TINY_RUN, '--dataset=tiny', '--dtype=float32', '--eval_sequences=8', '--checkpoint_interval=2']
SHORT = 32  # block_size of TINY_MODEL


def model_of(config, scale=3.0):
    """A model whose weights are so large that positions matter."""
    model = GPT(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(scale * model.initial_value(name, parameter, 1, 'cpu'))
    return model


def failed(log, *keys):
    """The one line with which a run ends that cannot begin."""
    job = Job('train_ddp.py', keys, 1, log)
    codes = job.wait()
    (line,) = [line for line in job.text().splitlines() if 'error:' in line]
    assert codes == [2 if ' expects ' in line else 1], job.text()  # 2: the command line alone shows it
    return line


# --- the rotation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('arch', ['llama', 'qwen3'])
@pytest.mark.parametrize(
    ('factor', 'before', 'theta', 'D'),
    [(4, 32, 1e4, 16), (8, 1024, 1e6, 64), (1.5, 64, 1e4, 32), (40, 4096, 5e5, 128), (1, 64, 1e4, 16)],
)
@torch.no_grad()
def test_yarn_is_that_of_transformers(arch, factor, before, theta, D):
    shape = {'n_layer': 2, 'n_head': 2, 'n_embd': 32, 'head_dim': D, 'vocab_size': 67, 'rope_theta': theta}
    config = ModelConfig(arch=arch, block_size=min(int(factor * before), 512), yarn=[factor, before], **shape)
    theirs_config = convert.config_to_transformers(config)
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS['yarn'](theirs_config, 'cpu')
    period = theta ** (torch.arange(0, D, 2).float() / D)
    assert torch.equal(yarn_frequencies(period, theta, factor, before), frequencies)
    ours, theirs = model_of(config), transformers.AutoModelForCausalLM.from_config(theirs_config).eval()
    theirs.load_state_dict(convert.to_transformers(ours.state_dict(), config))
    x = torch.randint(67, (2, config.block_size), generator=torch.Generator().manual_seed(1))
    logits = ours(x)
    assert ours.rotary.cos_sin[0, 0].tolist() == pytest.approx([attention_factor] * (D // 2), rel=apart())
    assert_as_close_to_float64(logits, theirs(x).logits, theirs.double()(x).logits)


def test_yarn_leaves_fast_pairs_as_they_are_and_slows_slow_ones_by_its_factor():
    period = 1e4 ** (torch.arange(0, 64, 2) / 64)
    ratio = yarn_frequencies(period, 1e4, 8, 1024) * period
    turns = 1024 / (2 * torch.pi * period)
    assert torch.equal(ratio[turns > 40], torch.ones_like(ratio[turns > 40])) and (turns > 40).sum() >= 4
    assert torch.allclose(ratio[turns < 0.7], torch.full_like(ratio[turns < 0.7], 1 / 8)) and (turns < 0.7).sum() >= 4
    assert (ratio.diff() <= apart()).all()


def test_enoki_has_the_same_frequencies_and_another_order_of_pairs():
    shape = {'n_layer': 1, 'n_head': 2, 'n_embd': 32, 'vocab_size': 67, 'block_size': 64, 'yarn': [2, 32]}
    tables = []
    for arch in ('enoki', 'llama'):
        rotary = GPT(ModelConfig(arch=arch, **shape)).rotary
        rotary.prepare(torch.device('cpu'))
        tables.append(rotary.cos_sin)
    assert torch.equal(*tables)


# --- of a run ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def runs(tmp_path_factory, data_dir):
    """A llama with a short context, and runs that begin with its weights: at four times the length by YaRN, and with
    another theta."""
    folder = tmp_path_factory.mktemp('runs')
    run = [*RUN, f'--data_dir={data_dir}', '--arch=llama', '--max_iters=2', '--batch_size=2']
    longer = [*run, f'--init_from={folder}/short', f'--block_size={4 * SHORT}']
    for name, keys in {
        'short': run, 'yarn': [*longer, '--yarn=4'], 'theta': [*longer, '--rope_theta=80000'], 'as_it_is': longer
    }.items():  # fmt: skip
        run_forked('train_ddp.py', *keys, f'--out_dir={folder}/{name}', log=folder / f'{name}.log')
    return folder


def shape_of(run):
    state = next((run / 'checkpoints').glob('step_*2')) / 'state.json'
    return json.loads(state.read_text())['identity']['model']


def test_a_run_extends_the_context_of_another_and_resumes(runs, data_dir):
    keys = ('block_size', 'rope_theta', 'yarn')
    assert [shape_of(runs / 'short')[key] for key in keys] == [SHORT, 1e4, []]
    assert [shape_of(runs / 'yarn')[key] for key in keys] == [4 * SHORT, 1e4, [4, SHORT]]
    assert [shape_of(runs / 'theta')[key] for key in keys] == [4 * SHORT, 8e4, []]
    losses = [column(runs / name, 'loss')[0] for name in ('yarn', 'theta', 'as_it_is')]
    assert len(set(losses)) == 3  # the same weights on the same batch, by the same operations: angles alone differ
    run = [*RUN, f'--data_dir={data_dir}', '--arch=llama', '--batch_size=2', f'--block_size={4 * SHORT}']
    run += [f'--init_from={runs}/short', f'--out_dir={runs}/yarn']
    run_forked('train_ddp.py', *run, '--yarn=4', '--max_iters=3', '--resume=must', log=runs / 'resumed.log')
    assert len(column(runs / 'yarn', 'loss')) == 3
    other = failed(runs / 'other.log', *run, '--yarn=8', '--max_iters=4')
    assert f'model.yarn=[4, {SHORT}], this run has [8, {SHORT}]' in other


@pytest.mark.slow
def test_a_context_that_was_extended_is_extended_again_from_the_first(runs, data_dir):
    run = [*RUN, f'--data_dir={data_dir}', '--arch=llama', '--batch_size=2', '--max_iters=2']
    run += [f'--init_from={runs}/yarn', '--yarn=8', f'--block_size={8 * SHORT}', f'--out_dir={runs}/again']
    run_forked('train_ddp.py', *run, log=runs / 'again.log')
    assert shape_of(runs / 'again')['yarn'] == [8, SHORT]


@pytest.mark.slow
def test_its_config_extends_a_run_on_two_ranks_that_share_each_sequence(runs, data_dir):
    keys = [*TINY_RUN[:1], '--dataset=tiny', f'--data_dir={data_dir}', '--dtype=float32', '--eval_sequences=8']
    keys += ['--max_iters=2', '--log_interval=1', f'--init_from={runs}/short', f'--block_size={4 * SHORT}']
    losses = []
    for ranks in (1, 2):
        out, shared = runs / f'long_{ranks}', f'--context_parallel={ranks}'
        script = 'train_parallel.py', 'config/long_context.py', shared, f'--out_dir={out}'
        run_forked(*script, *keys, nproc=ranks, log=runs / f'long_{ranks}.log')
        assert shape_of(out)['yarn'] == [4, SHORT]
        losses.append(column(out, 'loss'))
    assert losses[0] == pytest.approx(losses[1], rel=apart())


@pytest.mark.slow
def test_samples_and_scores_of_an_extended_run(runs, data_dir, tmp_path):
    options = [f'--out_dir={runs}/yarn', '--device=cpu', '--dtype=float32']
    writing = ['--prompt=def ', '--num_samples=1', f'--max_new_tokens={3 * SHORT}']
    said = fork_script('sample.py', *options, *writing)[0].stdout
    assert len(said) > SHORT
    (tmp_path / 'text.jsonl').write_text(json.dumps({'text': 'import os\n' * 20}) + '\n')
    said = fork_script('evaluate.py', *options, f'--tasks={tmp_path}/text.jsonl', f'--results={tmp_path}/r')[0].stdout
    assert f'{4 * SHORT} tokens' in said and 'bits_per_byte' in said


@pytest.mark.slow
@torch.no_grad()
def test_an_export_keeps_yarn_and_is_trained_on_with_it(runs, data_dir, tmp_path):
    fork_script('export_model.py', f'--out_dir={runs}/yarn', f'--to={tmp_path}/exported')
    keys = json.loads((tmp_path / 'exported/config.json').read_text())
    assert keys['max_position_embeddings'] == 4 * SHORT
    expected = {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': SHORT, 'rope_theta': 1e4}
    assert {key: keys['rope_parameters'][key] for key in expected} == expected
    pretrained = Pretrained(f'{tmp_path}/exported', block_size=4 * SHORT)
    ours = for_training(pretrained)
    load(ours, pretrained)
    config = ModelConfig(**shape_of(runs / 'yarn'))
    native = GPT(config)
    native.load_state_dict(checkpoint.load_weights(checkpoint.choose_to_read(str(runs / 'yarn')))[0])
    x = torch.randint(250, (1, 4 * SHORT), generator=torch.Generator().manual_seed(1))
    assert error(ours(x), native(x)) <= apart()


# --- models of transformers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', ['llama', 'qwen3'])
@torch.no_grad()
def test_a_model_of_transformers_is_extended_as_transformers_does_it(kind, tmp_path):
    folder = save_model(tmp_path / kind, kind)
    pretrained = Pretrained(folder, block_size=4 * POSITIONS, yarn=[4])
    assert pretrained.yarn == [4, POSITIONS] and pretrained.positions == 4 * POSITIONS
    ours = for_training(pretrained)
    load(ours, pretrained)
    rope = {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': POSITIONS}
    config = transformers.AutoConfig.from_pretrained(folder)
    config.rope_parameters = {**config.rope_parameters, **rope}
    config.max_position_embeddings = 4 * POSITIONS
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    x = torch.randint(250, (1, 4 * POSITIONS), generator=torch.Generator().manual_seed(1))
    assert error(ours(x), theirs(x).logits) <= apart()


@pytest.mark.slow
def test_a_fine_tuned_model_keeps_its_longer_context(tmp_path):
    folder = save_model(tmp_path / 'llama', 'llama')
    keys = [*TINY_RUN, '--dataset=synthetic', '--dtype=float32', '--max_iters=2']
    keys += ['--eval_sequences=8', f'--init_from={folder}', f'--block_size={2 * POSITIONS}', '--batch_size=1']
    for name, key in {'yarn': '--yarn=2', 'theta': '--rope_theta=50000'}.items():
        out = tmp_path / name
        run_forked('train_fsdp.py', *keys, key, f'--out_dir={out}', log=tmp_path / f'{name}.log')
        fork_script('export_model.py', f'--out_dir={out}', f'--to={tmp_path}/{name}_exported')
        saved = json.loads((tmp_path / f'{name}_exported/config.json').read_text())
        assert saved['max_position_embeddings'] == 2 * POSITIONS
        assert saved['rope_parameters']['rope_type'] == ('yarn' if name == 'yarn' else 'default')
        assert saved['rope_parameters']['rope_theta'] == (1e4 if name == 'yarn' else 5e4)


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('keys', 'words'),
    [
        (['--arch=llama', '--yarn=0.5,32'], '--yarn expects list of numbers >= 1'),
        (['--arch=llama', '--yarn=4'], 'yarn=4: .*block_size'),
        (['--arch=llama', '--yarn=two,32'], '--yarn expects list of numbers >= 1'),
        (['--arch=llama', '--yarn=2,8', '--block_size=32'], '--yarn=4,8 or --block_size=16'),
        (['--arch=gpt2', '--yarn=4,32'], 'positions of gpt2'),
        (['--arch=gpt2', '--rope_theta=5e4'], 'rope_theta=50000 with arch=gpt2'),
    ],
)
def test_a_mistake_is_one_line(keys, words, data_dir, tmp_path):
    run = [*RUN, f'--data_dir={data_dir}', '--max_iters=2', f'--out_dir={tmp_path}/out', *keys]
    assert re.search(words, failed(tmp_path / 'log', *run))
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
    ('kind', 'options', 'words'),
    [
        ('llama', {'block_size': 3 * POSITIONS, 'yarn': [2]}, f' {2 * POSITIONS}: .*--yarn=3,{POSITIONS}'),
        ('llama', {'block_size': 3 * POSITIONS}, f'--block_size={POSITIONS} .*--yarn=3'),
        ('gpt2', {'yarn': [2]}, 'no rotary embedding'),
        ('gpt2', {'rope_theta': 5e4}, 'rope_theta=50000'),
        ('gemma3_text', {'yarn': [2]}, 'no rotary embedding'),
    ],
)
def test_a_mistake_with_a_model_of_transformers(kind, options, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        Pretrained(save_model(tmp_path / kind, kind), **options)


def test_a_scaled_context_is_not_scaled_again(tmp_path):
    rope = {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
    rope |= {'original_max_position_embeddings': POSITIONS, 'rope_theta': 1e4}
    folder = save_model(tmp_path / 'llama', 'llama', rope_parameters=rope)
    with pytest.raises(ValueError, match='rope_type=llama3: '):
        Pretrained(folder, yarn=[2])
    assert Pretrained(folder, rope_theta=5e5).config.rope_parameters == {**rope, 'rope_theta': 5e5}
