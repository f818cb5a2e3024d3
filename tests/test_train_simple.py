"""train_simple.py, the page to try an idea in: the numbers of train_ddp.py, and a checkpoint that all scripts open."""

import runpy

import pytest
from launch import REPO, refusals, run_forked
from outputs import column, complete

from keys import Keys
from knobs import read_knobs

# config/quickstart.py's run, smaller; quickstart's schedule falls to 0, as train_simple.py's does
KEYS = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--block_size=16', '--global_batch_size=4', '--max_iters=5']
KEYS += ['--warmup_iters=2', '--log_interval=1', '--eval_interval=2', '--eval_sequences=10', '--dataset=tiny']
KEYS += [f'--seed={Keys.seed}']  # another one under tests/seeds.sh, where train_simple.py's own stays


@pytest.fixture(scope='module')
def trained(data_dir, tmp_path_factory):
    """function: (script, ranks, further keys) -> out_dir of its run."""

    def train(script, nproc, *keys):
        out_dir = tmp_path_factory.mktemp('simple') / 'run'
        keys = [*keys, *KEYS, f'--data_dir={data_dir}', f'--out_dir={out_dir}']
        run_forked(script, *keys, nproc=nproc, log=f'{out_dir}.log')
        return out_dir

    return train


@pytest.mark.parametrize('nproc, batch_size', [(1, 4), (1, 2), (2, 2), (2, 1)])  # with accumulation and without
def test_its_numbers_are_those_of_train_ddp_to_the_bit(trained, nproc, batch_size):
    keys = [f'--batch_size={batch_size}']
    simple = trained('train_simple.py', nproc, *keys)
    ddp = trained('train_ddp.py', nproc, 'config/quickstart.py', '--dtype=float32', *keys)
    for key in ('tokens', 'loss', 'lr', 'grad_norm', 'val_loss', 'val_bpb'):
        assert column(simple, key) == column(ddp, key), key
    assert (
        len(column(simple, 'loss')) == len(column(simple, 'time/total')) == 5 and len(column(simple, 'val_loss')) == 3
    )


def test_its_defaults_are_those_of_the_quickstart():
    own = {key: knob.default for key, knob in read_knobs(REPO / 'train_simple.py').items()}
    quickstart = runpy.run_path(str(REPO / 'config/quickstart.py'))
    of_all = {key: knob.default for key, knob in read_knobs(REPO / 'train_ddp.py').items()} | quickstart
    assert own == {key: of_all[key] for key in own} | {'out_dir': 'out/simple', 'warmup_iters': None}
    assert of_all['warmup_iters'] == of_all['max_iters'] // 10  # what None stands for


def test_other_scripts_open_its_checkpoint_and_go_on_with_it(trained, data_dir, tmp_path):
    out_dir = trained('train_simple.py', 1)
    of_run, log = f'--out_dir={out_dir}', tmp_path / 'log'
    keys = ['config/quickstart.py', '--dtype=float32', *KEYS, f'--data_dir={data_dir}', '--batch_size=2']

    said = run_forked('sample.py', of_run, '--prompt=def ', '--max_new_tokens=4', '--num_samples=1', log=log)
    assert 'def ' in said
    # Its logits are compared with those of transformers' class, which another CPU may round differently.
    assert 'exported to' in run_forked('export_model.py', of_run, f'--to={tmp_path / "model"}', log=log)
    begun = tmp_path / 'begun'
    run_forked('train_fsdp.py', *keys, f'--init_from={out_dir}', f'--out_dir={begun}', nproc=2, log=log)
    assert column(begun, 'val_loss')[0] < column(out_dir, 'val_loss')[0]
    said = run_forked('train_fsdp.py', *keys, of_run, '--max_iters=7', nproc=2, log=log)
    assert 'at step 5' in said and complete(out_dir) == [7] and column(out_dir, 'step') == [1, 2, 3, 4, 5, 6, 7]


UNUSED = f"""
import runpy, sys

sys.path.insert(0, {str(REPO)!r})
import model
import torch

class GPT(model.GPT):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.idea = torch.nn.Parameter(torch.ones(3))

model.GPT = GPT
runpy.run_path({str(REPO / 'train_simple.py')!r}, run_name='__main__')
"""


@pytest.mark.parametrize('nproc', [1, 2])
def test_a_parameter_that_is_not_used_is_named(data_dir, tmp_path, nproc):
    script = tmp_path / 'idea.py'
    script.write_text(UNUSED)
    keys = [*KEYS, f'--data_dir={data_dir}', f'--out_dir={tmp_path}/run']
    lines = refusals([[script, *keys]] * nproc)
    assert all(line.startswith('error: idea gets no gradient: use it in the loss') for line in lines)


def test_a_frozen_parameter_needs_no_gradient(data_dir, tmp_path):
    script = tmp_path / 'idea.py'
    script.write_text(UNUSED.replace('torch.ones(3)', 'torch.ones(3), requires_grad=False'))
    run_forked(script, *KEYS, f'--data_dir={data_dir}', f'--out_dir={tmp_path}/run', log=tmp_path / 'log')
    assert complete(tmp_path / 'run') == [5]


def test_a_mistake_ends_in_one_line(trained, data_dir):
    out_dir = trained('train_simple.py', 1)
    command = ['train_simple.py', *KEYS, f'--data_dir={data_dir}', f'--out_dir={out_dir}']
    lines = refusals([command, command])
    assert len(lines) == 2 and all(f'out_dir={out_dir} holds a run: use another --out_dir' in line for line in lines)
