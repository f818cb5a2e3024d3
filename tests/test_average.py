"""average.py: the mean of checkpoints in float64, as a run that every script opens and none goes on with."""

import shutil
from pathlib import Path

import pytest
import torch
from launch import TINY_MODEL, TINY_RUN, refusals, run_forked
from outputs import complete
from pretrained import save_model

from runtime.checkpoint import load_weights

KINDS = {
    'ddp': (1, 'train_ddp.py', TINY_MODEL),
    'sharded': (2, 'train_fsdp.py', [*TINY_MODEL, '--fsdp_impl=manual']),
    'tensor': (2, 'train_parallel.py', [*TINY_MODEL, '--tensor_parallel=2']),
    'experts': (1, 'train_ddp.py', [*TINY_MODEL, '--arch=qwen3', '--n_experts=4', '--router_bias=0.01']),
    'lora': (1, 'train_ddp.py', ['--lora_rank=2', '--block_size=32']),
}


@pytest.fixture(scope='module')
def run_of(data_dir, tmp_path_factory):
    """function: kind -> out_dir of a run with checkpoints of steps 2, 4 and 6."""
    found = {}

    def run(kind):
        if kind not in found:
            folder = tmp_path_factory.mktemp(kind)
            nproc, script, keys = KINDS[kind]
            data = data_dir
            if kind == 'lora':
                data, llama = folder / 'data', save_model(folder / 'llama', 'llama')
                (folder / 'text.txt').write_text(Path(__file__).read_text() * 3)
                prepared = [f'--dataset={folder}/text.txt', f'--tokenizer={llama}', f'--data_dir={data}', '--name=tiny']
                run_forked('prepare_data.py', *prepared, '--val_fraction=0.3', log=folder / 'log')
                keys = [*keys, f'--init_from={llama}']
            keys = [*keys, *TINY_RUN, f'--data_dir={data}', '--dataset=tiny', '--max_iters=6']
            keys += ['--checkpoint_interval=2', '--keep_checkpoints=3', f'--out_dir={folder}/run']
            run_forked(script, *keys, nproc=nproc, log=folder / 'log')
            found[kind] = folder / 'run', keys
        return found[kind]

    return run


@pytest.mark.parametrize('kind', KINDS)
def test_each_weight_is_the_mean_in_float64(run_of, tmp_path, kind):
    out_dir, _ = run_of(kind)
    run_forked('average.py', f'--out_dir={out_dir}', '--last=3', f'--to={tmp_path}/mean', log=tmp_path / 'log')
    weights = [load_weights(f'{out_dir}/checkpoints/step_{step:08}')[0] for step in (2, 4, 6)]
    mean, state = load_weights(f'{tmp_path}/mean/checkpoints/step_00000006')
    assert mean.keys() == weights[0].keys() and state['averaged'] == [2, 4, 6]
    for name, tensor in mean.items():
        expected = sum(of[name].double() for of in weights) / 3
        assert torch.equal(tensor, expected.to(tensor.dtype)), name
    assert any(not torch.equal(tensor, weights[-1][name]) for name, tensor in mean.items())


@pytest.mark.parametrize('kind', ['sharded', 'lora'])
def test_every_script_opens_it_and_none_goes_on_with_it(run_of, tmp_path, kind):
    out_dir, keys = run_of(kind)
    log, mean = tmp_path / 'log', tmp_path / 'mean'
    run_forked('average.py', f'--out_dir={out_dir}', '--steps=4,6', f'--to={mean}', log=log)
    run_forked('sample.py', f'--out_dir={mean}', '--prompt=def ', '--max_new_tokens=4', '--num_samples=1', log=log)
    run_forked('export_model.py', f'--out_dir={mean}', f'--to={tmp_path}/model', log=log)
    nproc, script, own = KINDS[kind]
    where = [key for key in keys if key.startswith(('--data_dir=', '--block_size='))]
    run = [*TINY_RUN, *where, '--dataset=tiny', '--max_iters=1', f'--init_from={mean}', f'--out_dir={tmp_path}/new']
    run_forked('train_ddp.py', *run, log=log)
    assert complete(tmp_path / 'new') == [1]
    keys = [*keys[:-1], f'--out_dir={mean}', '--max_iters=8']
    (said,) = {*refusals([[script, *keys]] * nproc)}
    assert 'an average of checkpoints' in said and f'--init_from={mean}' in said


@pytest.mark.parametrize(
    'keys, words',
    [
        (['--last=5'], '5 checkpoints of {run}: there are 2, 4, 6; train_ddp.py --keep_checkpoints=N'),
        (['--steps=2'], 'name at least two'),
        (['--steps=2,2'], 'name at least two'),
        (['--steps=2,3'], 'take another --step, there are 6, 4, 2'),
        (['--to={run}'], 'exists: delete it, or name another folder with --to=FOLDER'),
    ],
)
def test_what_cannot_be_averaged(run_of, tmp_path, keys, words):
    run, _ = run_of('ddp')
    keys = [key.format(run=run) for key in keys]
    (said,) = refusals([['average.py', f'--out_dir={run}', f'--to={tmp_path}/mean', *keys]])
    assert words.format(run=run) in said
    assert not (tmp_path / 'mean').exists()


def test_a_link_out_of_the_run_is_refused_and_no_folder_has_the_final_name(run_of, tmp_path):
    out_dir, _ = run_of('ddp')
    run = shutil.copytree(out_dir, tmp_path / 'run')
    (tmp_path / 'secret').write_text('of this machine')
    (run / 'model/additional_chat_templates').mkdir()
    (run / 'model/additional_chat_templates/tool.jinja').symlink_to(tmp_path / 'secret')
    (said,) = refusals([['average.py', f'--out_dir={run}', '--last=2', f'--to={tmp_path}/mean']])
    assert 'found a link to' in said and not (tmp_path / 'mean').exists()
