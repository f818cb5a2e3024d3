"""rules.py: the number of heads decides sizes, rates and steps, and what the user sets goes first."""

import math
import re
import subprocess
import sys

import pytest
import torch
from launch import REPO, run_forked

import configurator
import data
from layout import accumulation_steps
from model import GPT, ModelConfig
from optim import OPTIMIZERS
from planning import report, rules

CONFIG = {  # the script's defaults, and what config/enoki_8h.py sets
    'heads': 8,
    'tokens_per_parameter': 20.0,
    'arch': 'enoki',
    'n_layer': 12,
    'n_head': 12,
    'n_kv_head': None,
    'head_dim': None,
    'n_embd': 768,
    'mlp_hidden_dim': None,
    'vocab_size': None,
    'dropout': 0.0,
    'bias': None,
    'tie_embeddings': None,
    'rope_theta': None,
    'attention_gate': False,
    'z_loss': 1e-4,
    'batch_size': 8,
    'global_batch_size': 512,
    'block_size': 2048,
    'optimizer': 'adana',
    'learning_rate': 6e-4,
    'max_iters': 10000,
    'warmup_iters': 100,
    'weight_decay': 0.1,
    'wd_ts': None,
    'lr_rule': 32,
    'kappa': 0.85,
    'omega': 4.0,
    'min_lr': None,
    'lr_schedule': 'cos_inf',
    'lr_decay_iters': None,
}


def fill(explicit=(), **changes):
    """The config with the keys that rules.py fills. The user has set what is in `changes` and in `explicit`."""
    filled, notes = rules.fill_from_heads(CONFIG | changes, set(explicit))
    return CONFIG | changes | filled, notes


def model_of(run):
    """The model a train script would build."""
    return ModelConfig.from_keys({**run, 'vocab_size': run['vocab_size'] or 50304})


def counts_of(run):
    with torch.device('meta'):
        return GPT(model_of(run)).parameter_counts()


def learning_rate(optimizer, **changes):
    return fill(optimizer=optimizer, **changes)[0]['learning_rate']


def refused(explicit=(), **changes):
    """The one line with which these keys are refused."""
    with pytest.raises(ValueError) as refusal:
        fill(explicit, **changes)
    assert '\n' not in str(refusal.value)
    return str(refusal.value)


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('heads', 'n_layer', 'n_embd', 'non_embedding', 'total'),
    [
        (6, 4, 384, 7_077_888, 45_711_360),  # 4.5 layers are 4
        (8, 6, 512, 18_874_368, 70_385_664),
        (12, 9, 768, 63_700_992, 140_967_936),
        (16, 12, 1024, 150_994_944, 254_017_536),
        (24, 18, 1536, 509_607_936, 664_141_824),
    ],
)
def test_enoki_has_the_published_sizes(heads, n_layer, n_embd, non_embedding, total):
    run, _ = fill(heads=heads)
    assert [run[key] for key in ('n_layer', 'n_head', 'head_dim', 'n_embd')] == [n_layer, heads, 64, n_embd]
    assert run['mlp_hidden_dim'] == 4 * n_embd
    assert rules.rule_counts(run) == (non_embedding, total)
    counts = counts_of(run)
    assert counts['total'] - counts['norms'] == total  # what is trained is what the rules have counted
    assert not model_of(run).attention_gate


def test_qwen3_is_counted_with_all_its_weights_and_says_so():
    run, notes = fill(arch='qwen3', heads=6)
    keys = ('n_layer', 'n_head', 'head_dim', 'n_embd', 'mlp_hidden_dim', 'attention_gate')
    assert [run[key] for key in keys] == [12, 6, 128, 768, 2304, True]
    non_embedding, total = rules.rule_counts(run)
    assert non_embedding == 14 * 768**2 * 12
    assert total == non_embedding + 2 * 768 * 50304
    model = model_of(run).to_dict()
    assert (model['n_kv_head'], model['norm_eps']) == (6, 1e-5)
    counts = counts_of(run)
    assert counts['total'] - counts['norms'] == total
    assert run['learning_rate'] == pytest.approx(3.17 * (3.99e4 + non_embedding) ** -0.553)
    (note,) = [note for note in notes if '12 n_embd^2 n_layer' in note]
    assert '99,090,432' in note


# --- learning rate ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('optimizer', 'published'),
    [
        ('adana', 7.144e-4),
        ('adana-released', 7.144e-4),
        ('adamw', 2.291e-3),
        ('dana-mk4', 6.303e-4),
        ('dana-star-mk4', 1.104e-3),
        ('ademamix', 9.870e-4),
        ('muon', 2.022e-3),
    ],
)
def test_8_heads_have_the_published_learning_rates(optimizer, published):
    assert learning_rate(optimizer) == pytest.approx(published, rel=1e-3)


@pytest.mark.parametrize(
    ('optimizer', 'changes', 'a', 'b', 'd'),
    [
        ('adamw-decay', {}, 65.7, 9.83e3, -0.608),
        ('adana', {'kappa': 0.75}, 12.7, 9.55e3, -0.624),
        ('adana', {'kappa': 0.8}, 17.6, 3.66e4, -0.624),
        ('adana', {'kappa': 0.9}, 68.9, 2.95e4, -0.667),
        ('dana-mk4', {'kappa': 0.75}, 56.0, 5.71e3, -0.708),
        ('dana-star-mk4', {'kappa': 0.75}, 41.0, 3.03e4, -0.661),
        ('adamw', {'kappa': 0.5}, 12.8, 1.67e4, -0.515),  # has no kappa
        ('adamw', {'lr_rule': 512}, 16.7, 1.58e7, -0.464),
        ('adana', {'lr_rule': 512}, 85.3, 3.04e4, -0.654),
        ('dana-mk4', {'lr_rule': 512}, 2470, 2.24e7, -0.826),
        ('dana-star-mk4', {'lr_rule': 512}, 310, 1.40e4, -0.701),
        ('adamw', {'arch': 'qwen3'}, 2.16e4, 7.20e4, -0.873),
        ('dana-mk4', {'arch': 'qwen3'}, 1.20, 3.44e4, -0.501),
        ('dana-star-mk4', {'arch': 'qwen3'}, 93.9, 1.71e4, -0.701),
    ],
)
def test_each_fit_is_used_for_its_keys(optimizer, changes, a, b, d):
    weights = 14 * 1024**2 * 16 if 'arch' in changes else 12 * 512**2 * 6
    assert learning_rate(optimizer, **changes) == pytest.approx(a * (b + weights) ** d)


def test_one_warning_when_the_batch_is_not_the_fitted_one():
    def warnings(explicit=(), **changes):
        return [note for note in fill(explicit, **changes)[1] if note.startswith('WARNING')]

    (warning,) = warnings()
    assert '32 sequences x 2048 tokens' in warning and '512 x 2048' in warning and '\n' not in warning
    assert not warnings(lr_rule=512)
    assert not warnings(global_batch_size=32)
    assert warnings(global_batch_size=32, lr_rule=512)
    assert warnings(global_batch_size=32, block_size=1024)
    assert not warnings({'learning_rate'})  # the user's own


# --- run length and weight decay --------------------------------------------------------------------------------------


def test_the_8_head_run():
    run, notes = fill()
    assert (run['max_iters'], run['warmup_iters'], run['wd_ts']) == (1342, 26, 134)
    assert run['max_iters'] == int(20 * 70_385_664 / 1_048_576)
    assert run['weight_decay'] == 4.0 / 134
    assert f'{run["weight_decay"]:.4f}' == '0.0299' and f'{run["learning_rate"]:.2e}' == '7.14e-04'
    assert 'max_iters=1342' in notes[0] and 'learning_rate=0.0007144' in notes[0]


WITHOUT_A_FIT = ('sgd',)


@pytest.mark.parametrize('optimizer', [name for name in OPTIMIZERS if name not in WITHOUT_A_FIT])
def test_weight_decay_follows_the_form_of_the_optimizer(optimizer):
    run, _ = fill(optimizer=optimizer, omega=3.0)
    constant = optimizer in ('adamw', 'ademamix', 'muon')  # weight decay; the others' falls over wd_ts
    assert run['wd_ts'] == (None if constant else 134)
    # In a step the DANA family decays weights by weight_decay x lr / peak, the others by weight_decay x lr (optim.py).
    rate = run['learning_rate'] if constant or optimizer == 'adamw-decay' else 1
    assert run['weight_decay'] * rate * (1342 if constant else 134) == pytest.approx(3.0)


def test_a_note_says_how_weight_decay_follows_from_a_learning_rate_of_ones_own():
    def said(explicit, optimizer):
        _, notes = fill(explicit, optimizer=optimizer, learning_rate=1e-4)
        return [note for note in notes if 'omega' in note]

    (note,) = said({'learning_rate'}, 'adamw')
    assert note.startswith('weight_decay=29.81 is omega / (learning_rate * max_iters) = 4 / (0.0001 * 1342)')
    (note,) = said({'learning_rate'}, 'adamw-decay')
    assert note.startswith('weight_decay=298.5 is omega / (learning_rate * wd_ts) = 4 / (0.0001 * 134)')
    assert not said((), 'adamw') and not said({'learning_rate'}, 'adana')
    assert not said({'learning_rate', 'weight_decay'}, 'adamw')


def test_a_short_run_still_has_a_step_and_a_time_scale():
    run, _ = fill(heads=2, global_batch_size=100_000, block_size=4096)
    assert (run['max_iters'], run['warmup_iters'], run['wd_ts'], run['n_layer']) == (1, 0, 1, 1)


# --- what the user sets wins ------------------------------------------------------------------------------------------


def test_explicit_keys_are_kept_and_all_others_are_filled():
    everything = set(rules.fill_from_heads(CONFIG, set())[0])
    assert {'n_layer', 'n_head', 'head_dim', 'n_embd', 'mlp_hidden_dim', 'learning_rate'} < everything
    assert {'max_iters', 'warmup_iters', 'weight_decay', 'wd_ts'} < everything
    assert everything <= set(CONFIG)
    given = {'head_dim': 32, 'mlp_hidden_dim': 1000, 'wd_ts': 7, 'attention_gate': False}
    for key in everything:
        changed = CONFIG | {key: given.get(key, CONFIG[key])}  # mostly the script's default, set on purpose
        filled, _ = rules.fill_from_heads(changed, {key, 'heads'})
        assert set(filled) == everything - {key}


def test_tokens_per_parameter_sets_the_length_and_what_follows_from_it():
    run, _ = fill(tokens_per_parameter=8.0)
    assert run['max_iters'] == 8 * 70_385_664 // 2**20 == 537
    assert (run['warmup_iters'], run['wd_ts'], run['weight_decay']) == (10, 53, 4 / 53)
    assert fill(tokens_per_parameter=0.5)[0]['max_iters'] == 33
    assert fill({'max_iters'}, tokens_per_parameter=8.0)[0]['max_iters'] == 10000


def test_what_depends_on_a_given_size_follows_it():
    run, _ = fill({'n_layer'}, n_layer=7)
    assert run['n_layer'] == 7
    weights = 12 * 512**2 * 7
    assert run['learning_rate'] == pytest.approx(22.5 * (1.22e5 + weights) ** -0.618)
    assert run['max_iters'] == 20 * (weights + 2 * 512 * 50304) // 2**20
    assert run['warmup_iters'] == run['max_iters'] // 50

    run, _ = fill({'n_embd'}, n_embd=256)
    assert run['mlp_hidden_dim'] == 1024
    run, _ = fill({'vocab_size', 'tie_embeddings'}, vocab_size=2048, tie_embeddings=True)
    assert rules.rule_counts(run) == (18_874_368, 18_874_368 + 512 * 2048)
    assert run['max_iters'] == 20 * (18_874_368 + 512 * 2048) // 2**20


def test_the_width_follows_given_heads():
    run, _ = fill({'head_dim'}, head_dim=32)
    assert (run['n_embd'], run['mlp_hidden_dim']) == (256, 1024)  # 8 heads, enoki
    run, _ = fill({'head_dim', 'n_head'}, head_dim=32, n_head=4)
    assert (run['n_embd'], run['n_layer']) == (128, 6)


def test_what_depends_on_a_given_length_or_rate_follows_it():
    run, _ = fill({'max_iters'}, max_iters=500)
    assert (run['warmup_iters'], run['wd_ts'], run['weight_decay']) == (10, 50, 4.0 / 50)
    run, _ = fill({'wd_ts'}, wd_ts=200)
    assert (run['wd_ts'], run['weight_decay']) == (200, 4.0 / 200)
    run, _ = fill({'learning_rate'}, learning_rate=1e-3, optimizer='adamw')
    assert run['learning_rate'] == 1e-3
    assert run['weight_decay'] == pytest.approx(4.0 / (1e-3 * 1342))


def test_a_key_set_to_none_is_filled():
    run, _ = fill({'head_dim', 'wd_ts', 'mlp_hidden_dim'})
    assert (run['head_dim'], run['wd_ts'], run['mlp_hidden_dim']) == (64, 134, 2048)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('heads', [-8, 0, 1])
def test_heads_that_make_no_layer_are_refused(heads):
    assert re.match(f"heads={heads}: .*2 .*arch='enoki'", refused(heads=heads))
    assert fill(arch='qwen3', heads=1)[0]['n_layer'] == 2
    assert fill({'n_layer'}, heads=1, n_layer=1)[0]['n_embd'] == 64


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        ({'arch': 'gpt2'}, "arch='gpt2': .*enoki or qwen3 .*heads=8"),
        ({'optimizer': 'sgd'}, "optimizer='sgd', .*: .*adamw, adamw-decay, adana 0.75,.* muon, "),
        ({'optimizer': 'muon', 'lr_rule': 512}, 'lr_rule=512: .*adamw, adana 0.85, dana-mk4 0.85, dana-s'),
        ({'kappa': 0.7}, 'kappa=0.7, .*adana 0.75, adana 0.8, adana 0.85, adana 0.9, .*or a --learning_rate'),
        ({'kappa': 0.8, 'optimizer': 'dana-mk4'}, 'kappa=0.8, .*dana-mk4 0.75, dana-mk4 0.85'),
        ({'lr_rule': 64}, 'lr_rule=64: .*lr_rule=32'),
        ({'lr_rule': 512, 'arch': 'qwen3'}, 'lr_rule=512: .*lr_rule=32'),
    ],
)
def test_keys_without_a_rule_are_refused_with_those_that_have_one(changes, said):
    assert re.search(said, refused(**changes))


def test_a_learning_rate_makes_up_for_a_missing_fit():
    run, _ = fill({'learning_rate'}, learning_rate=1e-3, kappa=0.7, lr_rule=99)
    assert (run['learning_rate'], run['max_iters']) == (1e-3, 1342)


# --- what the user reads ----------------------------------------------------------------------------------------------


def test_dry_run_shows_what_heads_decided():
    run, _ = fill()
    model = model_of(run).to_dict()
    system = {'dtype': 'bfloat16', 'device': 'cuda:0', 'activation_checkpointing': 'none', 'keep_checkpoints': 2}
    system |= {'min_lr': 3e-5, 'lr_decay_iters': run['max_iters']}  # as runtime/fill.py makes them of None
    printed = ' '.join(report.dry_run(run | system | model, model, world_size=4).split())
    for said in (
        'rules of heads=8',
        'n_head 8 n_layer 6 n_embd 512 mlp 2048 non-embedding 18,874,368 total 70,385,664',
        'tokens per step 1,048,576 iterations 1342 warm-up 26 wd_ts 134 weight decay 0.0299 learning rate 7.14e-4',
        '8 sequences x 16 micro-steps x 4 ranks',
    ):
        assert said in printed, said
    assert 'rules' not in report.dry_run(run | system | model | {'heads': None}, model, world_size=4)


def command_line(*arguments):
    return subprocess.run(
        [sys.executable, '-m', 'planning.rules', *arguments], cwd=REPO, capture_output=True, text=True
    )


def test_the_command_line_prints_the_table_and_the_ladder():
    lines = [' '.join(line.split()) for line in command_line('--heads=8').stdout.splitlines()]
    assert {'n_layer 6', 'non-embedding 18,874,368', 'total 70,385,664', 'iterations 1342'} < set(lines)
    assert {'lr adana 0.85 7.144e-4', 'lr adamw 2.291e-3', 'lr dana-star-mk4 0.85 1.104e-3'} < set(lines)
    lines = [' '.join(line.split()) for line in command_line('--ladder', '--lr_rule=512').stdout.splitlines()]
    assert 'n_layer 4 6 9 12 18' in lines
    assert 'total 45,711,360 70,385,664 140,967,936 254,017,536 664,141,824' in lines
    assert any(line.startswith('lr adana 0.85 2.818e-3 1.486e-3') for line in lines)


def test_the_command_line_refuses_in_one_line():
    refusal = command_line('--heads=0')
    assert refusal.returncode != 0
    assert re.fullmatch(r"error: heads=0: .*arch='enoki'\n", refusal.stderr)


# --- config files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('name', 'sizes', 'steps'),
    [
        ('enoki_8h', (6, 8, 512, 2048), 1342),
        ('enoki_ladder', (4, 6, 384, 1536), 871),
        ('qwen3_6h', (12, 6, 768, 2304), 3363),
        ('gpt2_124m', (12, 12, 768, None), 19000),
    ],
)
def test_config_files_make_the_run_they_describe(name, sizes, steps):
    values = configurator.run_config_file(str(REPO / 'config' / f'{name}.py'), {})
    config = CONFIG | {'heads': None} | values
    config |= rules.fill_from_heads(config, set(values))[0]
    assert tuple(config[key] for key in ('n_layer', 'n_head', 'n_embd', 'mlp_hidden_dim')) == sizes
    assert config['max_iters'] == steps
    assert config['dataset'] == 'fineweb-10BT-gpt2' and config['global_batch_size'] == 512
    for ranks in (1, 4, 8):
        assert accumulation_steps(512, config['batch_size'], ranks) >= 4


def test_the_8_head_config_is_the_published_recipe():
    values = configurator.run_config_file(str(REPO / 'config' / 'enoki_8h.py'), {})
    recipe = {'optimizer': 'adana', 'z_loss': 1e-4, 'grad_clip': 0.5, 'lr_schedule': 'cos_inf', 'block_size': 2048}
    recipe |= {'batch_size': 8, 'eval_interval': 200, 'checkpoint_interval': 1000, 'wandb_group': 'fsdp-experiment'}
    assert {key: values.get(key) for key in recipe} == recipe
    assert 'learning_rate' not in values and 'min_lr' not in values  # min_lr: a tenth of the peak, as everywhere


def test_without_heads_decay_follows_the_length_of_the_run():
    config = {'heads': None, 'arch': 'gpt2', 'lr_rule': 32, 'max_iters': 1500, 'omega': 4.0, 'wd_ts': None}
    assert rules.fill_from_heads({**config, 'optimizer': 'adamw'}, ()) == ({}, [])
    filled, (note,) = rules.fill_from_heads({**config, 'optimizer': 'adana'}, ())
    assert filled == {'wd_ts': 150, 'weight_decay': 4.0 / 150} and 'wd_ts=150' in note
    assert rules.fill_from_heads({**config, 'optimizer': 'dana-mk4', 'wd_ts': 8}, {'weight_decay'})[0] == {'wd_ts': 8}
    assert rules.fill_from_heads({**config, 'optimizer': 'adamw-decay'}, ())[0] == {'wd_ts': 150}


def test_max_iters_of_the_command_line_beats_num_epochs_of_a_file(data_dir, tmp_path):
    (tmp_path / 'run.py').write_text('num_epochs = 0.5\nglobal_batch_size = 8\nblock_size = 32\n')
    keys = [tmp_path / 'run.py', '--dataset=tiny', f'--data_dir={data_dir}', '--device=cpu', '--dry_run']
    windows = data.open_dataset(data_dir, 'tiny', 'train', 32).n_windows
    log = tmp_path / 'log'
    assert f' {math.ceil(windows / 16):,} steps x' in run_forked('train_ddp.py', *keys, log=log)
    assert ' 7 steps x' in run_forked('train_ddp.py', *keys, '--max_iters=7', log=log)
    endless = 'num_epochs=0.5 counts passes over the 100,000,000,000 random tokens of dataset=synthetic'
    assert endless in run_forked('train_ddp.py', *keys, '--dataset=synthetic', log=log)


def test_num_epochs_sets_the_length_of_a_run_with_heads_too(data_dir, tmp_path):
    keys = ['--arch=enoki', '--heads=2', '--dataset=tiny', f'--data_dir={data_dir}', '--block_size=32', '--device=cpu']
    keys += ['--global_batch_size=8', '--dry_run', f'--out_dir={tmp_path / "out"}', '--learning_rate=1e-3']
    windows, log = data.open_dataset(data_dir, 'tiny', 'train', 32).n_windows, tmp_path / 'log'
    said = run_forked('train_ddp.py', *keys, '--num_epochs=2', '--tokens_per_parameter=4', log=log)
    assert f' {math.ceil(windows / 4):,} steps x' in said
    assert 'WARNING: tokens_per_parameter=4.0 has no effect here, only from scratch with --heads, if no' in said
    parameters = 12 * 128**2 + 2 * 128 * 512
    said = run_forked('train_ddp.py', *keys, '--vocab_size=512', '--tokens_per_parameter=4', log=log)
    assert f' {4 * parameters // 256:,} steps x' in said and 'no effect' not in said
