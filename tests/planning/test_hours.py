"""How often a run reads its data, how long it takes, and plans for a card and for data of another machine."""

import json
import re
import statistics

import pytest
from launch import TINY_SYNTHETIC, fork_script, refusals, run_forked, run_script

from planning import hours, roofline, sizes

H100 = 'NVIDIA H100 80GB HBM3'
LLAMA_1B = dict(n_layer=16, n_head=32, n_kv_head=8, n_embd=2048, mlp_hidden_dim=8192, block_size=2048, batch_size=8)
LLAMA_124M = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=32)


def plan_of(script, *keys, nproc=1):
    """What --dry_run prints."""
    return fork_script(script, *keys, '--dry_run', nproc=nproc)[0].stdout


def test_a_plan_for_cards_needs_neither_them_nor_the_data(tmp_path):
    keys = ['config/enoki_8h.py', f'--data_dir={tmp_path}', '--dry_run', '--gpu=H100', '--gpus=16']
    said = run_script('train_fsdp.py', *keys).stdout  # without torchrun
    assert '8 sequences x 4 micro-steps x 16 ranks = 512 sequences' in said
    assert '(fsdp, 16 ranks, bfloat16, device=cuda, compiled)' in said and re.search(r'of an H100 +80\.000\n', said)
    assert 'fineweb-10BT-gpt2 is not on this machine: some 10B tokens, by its name\n' in said
    assert '\n  1.4B tokens: 0.14 epochs of fineweb-10BT-gpt2, 10B by its name (not on this machine)\n' in said
    found = re.search(r'\n  (\d+) seconds: 16 x H100 at (\d+)% MFU, ([\d,]+) tokens/s, without eval', said)
    seconds, mfu, rate = (int(number.replace(',', '')) for number in found.groups())
    flops = float(re.search(r'per run +(\S+)\n', said)[1])
    assert seconds == pytest.approx(1342 * 2**20 / rate, abs=1)
    assert mfu == pytest.approx(100 * flops / seconds / 16 / 989e12, abs=1)
    assert '\n  assumed: 40% of the peak, ' in said
    assert not [*tmp_path.iterdir()]


def test_the_flops_and_an_assumed_share_of_the_peak_are_the_hours():
    config = {'device': 'cuda', 'dtype': 'bfloat16', 'measured': None}
    plan = hours.Plan(config, 8, flops=1e15)
    seconds, reason = hours.seconds_of_step(plan, 'h100')
    assert seconds == 1e15 / (8 * 0.4 * 989e12) and reason.startswith('assumed: 40% of the peak')
    assert hours.seconds_of_step(plan._replace(config=config | {'dtype': 'float32'}), 'h100')[0] is None
    seconds, reason = hours.seconds_of_step(plan, None)
    assert seconds is None and '--gpu=H100' in reason and '--measured=OUT_DIR' in reason


def write_run(folder, keys, ms, device=H100, script='train_ddp.py', **about):
    """The files of an earlier run of one process, as far as they are read."""
    defaults = dict(arch='llama', vocab_size=50304, dataset='x', global_batch_size=keys['batch_size'], **keys)
    config = roofline.keys_of(script, defaults) | {'device': 'cuda:0'}
    model = sizes.empty_model(config)
    about = {'script': script, 'world_size': 1, 'device_name': device, 'config': config, **about}
    (folder / 'config.json').write_text(json.dumps({'flops_per_token': model.flops_per_token(), **about}))
    rows = [{'step': step, 'time/total': ms} for step in (10, 20, 30)]
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return config


def test_a_measured_run_gives_its_speed_to_another_on_the_same_card(tmp_path):
    config = write_run(tmp_path, LLAMA_124M, 69.97) | {'measured': str(tmp_path)}  # at 40.5% of the peak
    seconds, reason = hours.seconds_of_step(hours.Plan(config, 4, flops=1e15), 'h100')
    assert 1e15 / seconds / 4 / 989e12 == pytest.approx(0.405, abs=0.001)
    assert reason == f'at the speed of {tmp_path} (1 rank, {H100}): 400 TFLOP/s on each GPU'


def test_a_run_on_this_machine_says_how_long_another_takes(tmp_path):
    keys = [*TINY_SYNTHETIC, '--batch_size=1', '--global_batch_size=2', '--eval_sequences=0', '--keep_checkpoints=0']
    run_forked('train_ddp.py', *keys, '--max_iters=20', f'--out_dir={tmp_path / "one"}', log=tmp_path / 'log')
    rows = [json.loads(line) for line in (tmp_path / 'one' / 'metrics.jsonl').read_text().splitlines()]
    ms = statistics.median(row['time/total'] for row in rows if row['step'] > 5)
    keys += ['--max_iters=1000000', f'--out_dir={tmp_path / "two"}']
    assert 'how long it takes on a CPU is not known: --measured=OUT_DIR takes the' in plan_of('train_ddp.py', *keys)
    said = plan_of('train_fsdp.py', *keys, f'--measured={tmp_path / "one"}', nproc=2)  # which share its cores
    assert f'\n  {hours.in_words(1e6 * ms / 1000)}: 2 ranks on a CPU, ' in said
    assert f'at the speed of {tmp_path / "one"} (1 rank, ' in said and 'TFLOP/s\n' in said
    assert re.search(r'\n  [\d.]+M tokens of synthetic\n', said)


def test_config_files_see_the_ranks_of_the_plan(tmp_path):
    keys = ['config/quickstart.py', f'--data_dir={tmp_path}', f'--out_dir={tmp_path / "out"}', '--gpu=A100']
    said = run_script('train_ddp.py', *keys, '--gpus=4', '--dry_run').stdout
    assert '2 sequences x 1 micro-step x 4 ranks = 8 sequences' in said  # the file divides by WORLD_SIZE
    assert '1.6M tokens of stdlib-bpe2048 (not on this machine)\n' in said
    assert '8 sequences x 1 micro-step x 1 rank = 8 sequences' in plan_of('train_ddp.py', *keys)


def test_a_run_that_is_no_plan_has_its_own_device_ranks_and_data(tmp_path):
    keys = ['--gpu=H100', '--gpus=8', '--measured=nowhere', f'--out_dir={tmp_path / "out"}', '--device=auto']
    said = run_forked('train_ddp.py', *TINY_SYNTHETIC, '--max_iters=1', *keys, log=tmp_path / 'log')
    assert ' x 1 rank = ' in said and '1 x cpu' in said
    for given in ('gpu=H100', 'gpus=8', 'measured=nowhere'):
        assert f'WARNING: {given} has no effect here, only with --dry_run' in said
    (line,) = refusals([['train_ddp.py', '--dataset=absent', f'--data_dir={tmp_path}', *keys]])
    assert 'there is no' in line and 'needs no data' not in line


@pytest.mark.parametrize(
    ('keys', 'said'),
    [
        (['--gpu=H1000'], 'gpu=H1000: expected H100, H200, A100; leave it out, and --measured'),
        (['--gpu=H100', '--device=cpu'], 'gpu=H100 with device=cpu: leave one of them out'),
        (['--gpu=H100', '--dataset=web'], 'web is not on this machine, and its name does not .* --vocab_size=50304'),
        (['--gpu=H100', '--dataset=web-gpt2', '--num_epochs=1'], 'num_epochs=1.0: dataset=web-gpt2 is not on this .*'),
        (['--dataset=web-gpt2'], 'there is no .*web-gpt2; .*; the plan for a card, as --gpu=H100, needs no data'),
        (['config/{tmp}.py'], 'gpus=4, and the plan is for 1: give --gpus on the command line, without torchrun'),
        (['--measured={tmp}/none'], 'measured=.*none: there is no .*config.json: expected the out_dir of an earlier'),
        (['--measured={tmp}', '--gpu=A100'], f'measured=.* ran on {H100}, and the plan is for A100: give a run there'),
        (['--measured={tmp}', '--device=cpu'], f'measured=.* ran on {H100}, and the plan is for CPU: give a run there'),
    ],
)
def test_what_cannot_be_planned_is_one_line(tmp_path, keys, said):
    write_run(tmp_path, LLAMA_124M, 69.97)
    (tmp_path / 'four.py').write_text('gpus = 4\n')
    keys = [key.replace('config/{tmp}', f'{tmp_path}/four').replace('{tmp}', str(tmp_path)) for key in keys]
    base = [key for key in TINY_SYNTHETIC if key not in ('--device=cpu', '--vocab_size=257')]
    (line,) = refusals([['train_ddp.py', *base, f'--data_dir={tmp_path}', '--dry_run', *keys]])
    assert re.search(said, line), line


def test_what_writes_answers_is_not_predicted_and_predicts_nothing(tmp_path):
    config = write_run(tmp_path, LLAMA_124M, 69.97)
    of_answers = config | {'num_generations': 8, 'measured': None}
    assert 'depends on how long answers are' in hours.seconds_of_step(hours.Plan(of_answers, 1, 1e12), 'h100')[1]
    write_run(tmp_path, LLAMA_124M, 69.97, script='train_grpo.py')
    with pytest.raises(ValueError, match='has written answers, .*: give a run of another script'):
        hours.run_in(str(tmp_path), 'cuda', 'h100')


def test_a_run_says_how_often_it_reads_a_dataset(data_dir):
    keys = [*TINY_SYNTHETIC, '--dataset=tiny', f'--data_dir={data_dir}', '--vocab_size=512']
    said = plan_of('train_ddp.py', *keys, '--max_iters=100000')
    often = (
        r'\ntiny: [\d,]+ samples of [\d,]+ windows, ([\d.]+) epochs; after 4 text that is read again teaches little\n'
    )
    passes = re.search(often, said)[1]
    assert float(passes) > 4 and re.search(rf'\n  [\d.]+M tokens: {passes} epochs of tiny, [\d.]+k\n', said)
    assert re.search(r'\ntiny: .*, 0\.\d\d epochs\n', plan_of('train_ddp.py', *keys, '--max_iters=100'))


def test_half_a_line_at_the_end_of_a_run_is_no_damage(tmp_path):
    write_run(tmp_path, LLAMA_124M, 70.0)
    path = tmp_path / 'metrics.jsonl'
    path.write_text(json.dumps({'step': 5, 'time/total': 900.0}) + '\n' + path.read_text() + '{"step": 40, "time')
    assert hours.step_ms(path, has_rounds=False) == 70.0
    path.write_text(path.read_text() + '/total": 100.0}\n')
    assert hours.step_ms(path, has_rounds=True) == 80.0  # steps 20 and 30, which take 70, 40, and 10, after the warm-up
    path.write_text('{"step": 1}\n')
    assert hours.step_ms(path, has_rounds=False) is None


def test_a_card_that_is_too_small_is_named_with_what_helps():
    keys = [f'--{key}={value}' for key, value in LLAMA_1B.items() if key != 'batch_size']
    keys += ['--arch=llama', '--vocab_size=50304', '--dataset=synthetic', '--gpu=H100']
    said = plan_of('train_ddp.py', *keys, '--batch_size=64', '--compile=False')
    assert 'WARNING: it does not fit: predicted need ' in said and 'lower batch_size=64' in said
    assert 'does not fit' not in plan_of('train_ddp.py', *keys, '--batch_size=1', '--compile=False')


def test_lengths_and_sizes_read_as_one_says_them():
    said = {40: '40 seconds', 99: '99 seconds', 120: '2.0 minutes', 660: '11 minutes', 5399: '90 minutes'}
    said |= {5400: '1.5 hours', 47 * 3600: '47 hours', 3 * 86400: '3.0 days', 2000 * 86400: '2,000 days'}
    assert {seconds: hours.in_words(seconds) for seconds in said} == said
    sizes = {999: '999', 64_000: '64k', 2_306_593: '2.3M', 9_900_000_000: '9.9B', 10**10: '10B', 15 * 10**12: '15T'}
    assert {number: hours.short(number) for number in sizes} == sizes


def test_cards_are_known_by_the_names_of_whole_ones():
    names = {H100: 'h100', 'NVIDIA H200': 'h200', 'NVIDIA A100-SXM4-80GB': 'a100', 'NVIDIA H100 PCIe': None}
    names |= {'NVIDIA H100 80GB HBM3 MIG 1g.10gb': None, 'NVIDIA L40S': None}
    assert {name: hours.card_named(name) for name in names} == names
