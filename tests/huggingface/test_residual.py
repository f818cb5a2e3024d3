"""FedEx-LoRA's residual under train_diloco.py: against float64, against a plain loop, resumed, exported, misused."""

import copy
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import TINY_RUN, run_function, run_many, run_ranks, run_script
from outputs import assert_same_rows, assert_same_weights, column, weights_of
from precision import apart, assert_same_run, error
from prepared import only
from pretrained import VOCABULARY, save_model

import data
import diloco
import fsdp_manual
from huggingface import finetune, residual

RANK, ALPHA, SCALE = 4, 6, 1.5


# --- one outer step, in float64 ---------------------------------------------------------------------------------------


def average(theta, pseudo_gradient, momentum):
    theta.sub_(pseudo_gradient)


def sharded_model(folder, implementation, mesh):
    from torch.distributed.fsdp import fully_shard

    pretrained = finetune.Pretrained(folder, lora_rank=RANK, lora_alpha=ALPHA)
    with torch.device('meta'):
        model = finetune.for_training(pretrained)
    if implementation == 'manual':
        fsdp_manual.shard(model, model.blocks, mesh)
    else:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    model.to_empty(device='cpu')
    finetune.load(model, pretrained)
    return model


def outer_steps(folder, implementation, replicas, fragments):
    """
    Outer steps of replicas that hold random numbers, of each fragment twice; for each layer then {'error': of W + s B A
    from the mean over the replicas, in float64, 'without': the residual, 'moved': W, 'equal': W on all replicas}.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh('cpu', (replicas, dist.get_world_size() // replicas), mesh_dim_names=('replica', 'shard'))
    model = sharded_model(folder, implementation, mesh['shard'])
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    group = mesh.get_group('replica')
    outer = diloco.Outer(trained, average, group, inner_steps=fragments, num_fragments=fragments)
    results = []
    for step in range(1, 2 * fragments + 1):
        generator = torch.Generator().manual_seed(step)
        drawn = [
            {name: torch.randn(parameter.shape, generator=generator) / 4 for name, parameter in trained.items()}
            for _ in range(replicas)
        ]
        with torch.no_grad():
            for name, parameter in trained.items():
                mine = drawn[mesh.get_local_rank('replica')][name]
                parameter.copy_(distribute_tensor(mine, mesh['shard'], [Shard(0)], src_data_rank=None))
        for fragment in outer.to_send(step):
            layers = {name.removesuffix('.lora_A') for name in fragment.parameters if name.endswith('.lora_A')}
            assert 2 * len(layers) == len(fragment.parameters)
            weights = {layer: model.get_submodule(layer).weight for layer in layers}
            before = {layer: weight.full_tensor().double() for layer, weight in weights.items()}
            outer.reset_health()
            residual.add_residual(model, outer, fragment)
            assert outer.bytes_sent == 4 * (replicas - 1) * len(fragment.anchor)
            outer.send(fragment, step)
            for layer, weight in weights.items():

                def product(tensors, layer=layer):
                    B, A = tensors[f'{layer}.lora_B'].double(), tensors[f'{layer}.lora_A'].double()
                    return SCALE * (
                        A.T @ B.T if 'transformer.' in layer else B @ A
                    )  # GPT-2's weights lie the other way

                after = {name: trained[name].full_tensor() for name in trained if name.startswith(layer)}
                expected = sum(map(product, drawn)) / replicas
                computed = weight.full_tensor().double() - before[layer] + product(after)
                of_replicas = [None] * replicas
                dist.all_gather_object(of_replicas, diloco.digest([diloco.local(weight)]), group=group)
                results.append(
                    {
                        'error': (computed - expected).abs().max().item(),
                        'without': (product(after) - expected).abs().max().item(),
                        'moved': not torch.equal(weight.full_tensor().double(), before[layer]),
                        'equal': len({*of_replicas}) == 1,
                    }
                )
    return results


@pytest.fixture(scope='module')
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp('models')
    for kind in ('llama', 'gpt2'):
        save_model(folder / kind, kind)
    return folder


@pytest.mark.parametrize(
    'kind, implementation, replicas, shards, fragments',
    [
        ('llama', 'torch', 1, 1, 1),
        ('llama', 'torch', 1, 2, 1),
        ('llama', 'torch', 2, 1, 1),
        ('gpt2', 'torch', 2, 2, 1),
        ('llama', 'manual', 2, 2, 3),
        ('gpt2', 'manual', 2, 3, 1),
        ('llama', 'torch', 3, 1, 3),
        ('gpt2', 'manual', 3, 2, 1),
    ],
)
def test_after_an_outer_step_layers_compute_the_mean_of_the_replicas(
    models, kind, implementation, replicas, shards, fragments
):
    of_ranks = run_function(replicas * shards, outer_steps, models / kind, implementation, replicas, fragments)
    for results in of_ranks:
        assert len(results) == 2 * 3 * {'llama': 7, 'gpt2': 4}[kind]
        for layer in results:
            assert layer['error'] <= apart() and layer['equal'], layer
            assert layer['moved'] == (replicas > 1) and (layer['without'] > 0.1) == (replicas > 1), layer


# --- runs -------------------------------------------------------------------------------------------------------------

LENGTH, SEQUENCES, STEPS, H = 32, 12, 8, 3  # rounds end after the steps 3, 6 and 8
KEYS = [*TINY_RUN, f'--block_size={LENGTH}', f'--global_batch_size={SEQUENCES}', '--batch_size=3', '--dtype=float32']
KEYS += [
    '--lr_schedule=constant',
    '--warmup_iters=0',
    '--dataset=synthetic',
    '--eval_interval=0',
    f'--lora_rank={RANK}',
]
KEYS += [f'--lora_alpha={ALPHA}', f'--max_iters={STEPS}', f'--inner_steps={H}', '--num_replicas=2']
KEYS += ['--learning_rate=2e-2', '--checkpoint_interval=1', '--keep_checkpoints=9']
MANUAL = ['--fsdp_impl=manual']
PLAIN = ['--outer_lr=1', '--outer_momentum=0']


def keys_of(models, out_dir, *more):
    return [*KEYS, *PLAIN, '--lora_residual', f'--init_from={models / "llama"}', f'--out_dir={out_dir}', *more]


@pytest.fixture(scope='module')
def runs(models, tmp_path_factory):
    """A folder of runs: sharded and not, and one that went on from step 4, in the middle of a round."""
    folder = tmp_path_factory.mktemp('runs')

    def cases(**more):
        return [
            {'name': name, 'script': 'train_diloco.py', 'arguments': keys_of(models, folder / name, *keys)}
            for name, keys in more.items()
        ]

    run_many(cases(torch=[], manual=MANUAL, without=['--lora_residual=False']), 2, folder)
    run_many(cases(torch_2=['--zero_stage=2'], manual_1=[*MANUAL, '--zero_stage=1'], manual_4=MANUAL), 4, folder)
    for name in ('torch', 'manual_4'):
        again = folder / f'{name}_again'
        shutil.copytree(folder / name, again)
        for path in (again / 'checkpoints').iterdir():
            if int(path.name[-8:]) > 4:
                shutil.rmtree(path)
        (again / 'DONE').unlink()
    run_many(cases(torch_again=[]), 2, folder)
    run_many(cases(manual_4_again=MANUAL), 4, folder)
    return folder


def losses_of_a_plain_loop(folder):
    """{name: losses} of two replicas in one process, of which after each round A, B and, in float64, W + s B A are
    averaged; and of A and B alone."""
    pretrained = finetune.Pretrained(folder, block_size=LENGTH, lora_rank=RANK, lora_alpha=ALPHA)
    of_names = {}
    for name in ('torch', 'without'):
        model = finetune.for_training(pretrained)
        finetune.load(model, pretrained, seed=1337)
        replicas = [model, copy.deepcopy(model)]
        opts, feeds = [], []
        for replica, of_replica in enumerate(replicas):
            lora = [parameter for parameter in of_replica.parameters() if parameter.requires_grad]
            opts.append(torch.optim.AdamW(lora, lr=2e-2, betas=(0.9, 0.95), weight_decay=0.1))
            mixture = only(data.open_dataset('data', 'synthetic', 'train', LENGTH, VOCABULARY))
            feeds.append(data.batches(mixture, 1337, 0, SEQUENCES, SEQUENCES // 2, replica, 2, 'cpu'))
        losses = of_names[name] = []
        for step in range(1, STEPS + 1):
            loss = 0.0
            for of_replica, opt, feed in zip(replicas, opts, feeds, strict=True):
                x, y = next(feed)
                ce = F.cross_entropy(of_replica(x).flatten(0, 1), y.flatten())
                ce.backward()
                torch.nn.utils.clip_grad_norm_(of_replica.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
                loss += ce.item() / 2
            losses.append(loss)
            if step % H == 0:
                meet(replicas, with_residual=name == 'torch')
        for feed in feeds:
            feed.close()
    return of_names


@torch.no_grad()
def meet(replicas, with_residual):
    layers = [[module for module in replica.modules() if hasattr(module, 'lora_A')] for replica in replicas]
    for modules in zip(*layers, strict=True):
        wanted = sum(m.weight.double() + SCALE * m.lora_B.double() @ m.lora_A.double() for m in modules) / len(modules)
        A, B = (sum(getattr(module, name) for module in modules) / len(modules) for name in ('lora_A', 'lora_B'))
        for module in modules:
            module.lora_A.copy_(A)
            module.lora_B.copy_(B)
            if with_residual:
                module.weight.copy_(wanted - SCALE * B.double() @ A.double())


def test_losses_are_those_of_a_plain_loop(models, runs):
    for name, expected in losses_of_a_plain_loop(models / 'llama').items():
        ours = column(runs / name, 'loss')
        assert len(ours) == STEPS
        assert_same_run(ours, expected, name)
    with_it, without = column(runs / 'torch', 'loss'), column(runs / 'without', 'loss')
    assert with_it[:H] == without[:H] and all(abs(a - b) > 1e-5 for a, b in zip(with_it[H:], without[H:], strict=True))


@pytest.mark.parametrize('name', ['manual', 'torch_2', 'manual_1', 'manual_4'])
def test_losses_do_not_depend_on_how_a_replica_is_sharded(runs, name):
    assert_same_run(column(runs / name, 'loss'), column(runs / 'torch', 'loss'), name)


@pytest.mark.parametrize('name', ['torch', 'manual_4'])
def test_a_run_that_goes_on_in_the_middle_of_a_round_is_equal_to_the_bit(runs, name):
    assert_same_weights(runs / f'{name}_again', runs / name, STEPS)
    assert_same_rows(runs / f'{name}_again', runs / name)


def test_weights_change_when_the_replicas_meet_and_at_no_other_time(models, runs):
    from safetensors.torch import load_file

    stored = load_file(models / 'llama' / 'model.safetensors')
    adapted = {f'{name.rpartition(".")[0]}.weight' for name in weights_of(runs / 'torch', 1) if '.lora_A' in name}
    for step in range(1, STEPS + 1):
        before = weights_of(runs / 'torch', step - 1) if step > 1 else stored
        now = weights_of(runs / 'torch', step)
        changed = {name for name in stored if not torch.equal(now[name], before[name])}
        assert changed == (adapted if step in (3, 6, 8) else set())
    before = weights_of(runs / 'without', STEPS)
    assert all(torch.equal(before[name], stored[name]) for name in stored)


def test_an_export_holds_the_weights_with_residual_and_adapter(runs, tmp_path):
    from safetensors.torch import load_file

    run_script('export_model.py', f'--out_dir={runs / "torch"}', f'--to={tmp_path / "whole"}')
    exported, weights = load_file(tmp_path / 'whole' / 'model.safetensors'), weights_of(runs / 'torch', STEPS)
    names = [name.removesuffix('.lora_A') for name in weights if name.endswith('.lora_A')]
    for name in names:
        product = weights[f'{name}.lora_B'].double() @ weights[f'{name}.lora_A'].double()
        merged = weights[f'{name}.weight'].double() + SCALE * product
        assert error(exported[f'{name}.weight'], merged) <= apart(), name
    assert len(names) == 21
    ended = run_script(
        'export_model.py', f'--out_dir={runs / "torch"}', f'--to={tmp_path / "lora"}', '--adapter', check=False
    )
    assert ended.returncode == 1 and 'has other weights, too (lora_residual); leave --adapter out' in ended.stderr
    assert not (tmp_path / 'lora').exists()


@pytest.mark.parametrize(
    'more, words',
    [
        (['--outer_momentum=0.9'], ['outer_momentum=0.9', 'use --outer_momentum=0.0']),
        (
            ['--outer_lr=0.7', '--exchange_dtype=int8'],
            ['outer_lr=0.7, exchange_dtype', 'use --outer_lr=1.0 --exchange_dtype=float32'],
        ),
        (['--overlap_steps=1'], ['use --overlap_steps=0']),
        (['--exchange={tmp}/pool'], ['/pool', 'use --exchange=']),
        (['--lora_rank=0'], ['lora_rank=0', 'use --lora_rank=16']),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_mistakes_are_one_line_on_every_rank(models, tmp_path, more, words):
    keys = keys_of(models, tmp_path / 'out', *[key.format(tmp=tmp_path) for key in more])
    for rank, ended in enumerate(run_ranks([['train_diloco.py', *keys]] * 2)):
        output = ended.stdout + ended.stderr
        assert ended.returncode == 1 and 'Traceback' not in output, output
        (line,) = [line for line in output.splitlines() if line.startswith(f'[{rank}] error: lora_residual with ')]
        assert all(word in line for word in words), line
    assert not (tmp_path / 'pool').exists()
