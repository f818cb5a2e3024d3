"""The balancing loss of transformers' own mixtures, beside its formula on router logits that transformers returns."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import TINY_RUN, fork_script, run_function, run_many
from outputs import column
from precision import MARGIN, apart, assert_as_close_to_float64, assert_same_run, error, gap_of_choice
from pretrained import POSITIONS, VOCABULARY, save_model, sharded, write_chats

os.environ['HF_HUB_OFFLINE'] = '1'

from huggingface import finetune, loading, native
from huggingface.pretrained import Pretrained
from model import GPT
from optim import balance_experts
from runtime import checkpoint
from runtime.meter import router_metrics

KINDS = {'mixtral': {}, 'qwen3_moe': {'norm_topk_prob': True}, 'gpt_oss': {}}
AUX, Z = 3.0, 0.1
STEPS, MICRO_STEPS, ROWS, T = 2, 2, 2, 24


def batch_of(step, micro_step):
    generator = torch.Generator().manual_seed(10 * step + micro_step)
    x = torch.randint(VOCABULARY, (ROWS, T), generator=generator)
    y = x.roll(-1, 1)
    y[0, : 3 + step] = -1
    return x, y


# --- on every rank ----------------------------------------------------------------------------------------------------


def two_steps(model, raw):
    """The loss of each step, its gradients, and the load after it. Weights stay as they are."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = {}
    for step in range(STEPS):
        loss = torch.zeros((), dtype=torch.float64)
        for micro_step in range(MICRO_STEPS):
            x, y = (part[rank::world_size] for part in batch_of(step, micro_step))
            loss_sum, ce_sum = model(x, y)
            (loss_sum * world_size).backward()
            loss += loss_sum.detach()
        dist.all_reduce(loss)
        found[f'{step} loss'] = loss
        for name, parameter in raw.named_parameters():
            if parameter.grad is not None:
                whole = getattr(parameter.grad, 'full_tensor', lambda gradient=parameter.grad: gradient)()
                found[f'{step} {name}'] = whole.clone()
                parameter.grad = None
        balance_experts(raw)
        found[f'{step} load'] = torch.stack([router.load for router in raw.routers])
    assert 'router/violation' in router_metrics(raw)
    return found


def trained(folder, implementation, recompute, **options):
    """What two_steps() finds with the model of a folder, laid out in one of these ways."""
    from torch.nn.parallel import DistributedDataParallel

    pretrained = Pretrained(folder, block_size=POSITIONS, router_aux=AUX, router_z=Z, **options)
    with torch.device('meta'):
        raw = finetune.for_training(pretrained)
    raw.checkpoint_activations(recompute)
    model = sharded(raw, implementation)
    if implementation == 'all logits':
        raw.has_plain_head = False
    elif implementation == 'compiled':
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True  # as begin.make_model()
        for block in raw.blocks:
            block.forward = torch.compile(block.forward, backend='aot_eager', fullgraph=True)
    raw.to_empty(device='cpu')
    loading.load(raw, pretrained)
    if implementation == 'ddp':
        model = DistributedDataParallel(raw, broadcast_buffers=False)
    return two_steps(model, raw)


def native_steps(folder):
    """The same by model.py."""
    pretrained = Pretrained(folder, block_size=POSITIONS)
    model_config = native.model_config_of(pretrained)
    model_config.router_aux, model_config.router_z = AUX, Z
    model, weights = GPT(model_config), native.Weights(pretrained, model_config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.initial_value(name))
    found = two_steps(model, model)
    return {key: value for key, value in found.items() if key.endswith((' loss', ' load'))}


def on_one_rank(folder):
    found = {kind: trained(f'{folder}/{kind}', 'whole', 'none') for kind in KINDS}
    found['all logits'] = trained(f'{folder}/mixtral', 'all logits', 'selective')
    found['compiled'] = trained(f'{folder}/mixtral', 'compiled', 'full')
    found['lora'] = trained(f'{folder}/mixtral', 'whole', 'full', lora_rank=2)
    found['native'] = native_steps(f'{folder}/qwen3_moe')
    return found


def on_two_ranks(folder):
    layouts = [('ddp', 'none'), ('torch', 'full'), ('manual', 'full'), ('manual', 'selective')]
    return {
        f'{kind} {layout} {recompute}': trained(f'{folder}/{kind}', layout, recompute)
        for kind in KINDS
        for layout, recompute in layouts
        if (kind, recompute)
        != ('gpt_oss', 'selective')  # it changes results of SAVED_OPS in place, which torch refuses
    }


# --- by the formula ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def closest_choice(folder):
    """gap_of_choice() over all that by_formula() reads."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
    batches = [batch_of(step, micro_step) for step in range(STEPS) for micro_step in range(MICRO_STEPS)]
    logits = [torch.stack(model(x, output_router_logits=True).router_logits)[:, y.flatten() >= 0] for x, y in batches]
    return min(gap_of_choice(of_batch, model.config.num_experts_per_tok) for of_batch in logits)


def by_formula(folder, dtype):
    """What two_steps() should find, from what transformers' own class returns."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train()
    model.set_experts_implementation('eager')  # computing all at once takes no float64
    k, load, found = model.config.num_experts_per_tok, None, {}
    for step in range(STEPS):
        total, counts = 0.0, 0.0
        for micro_step in range(MICRO_STEPS):
            x, y = batch_of(step, micro_step)
            says, targets = model(x, output_router_logits=True, use_cache=False), y.flatten()
            logits = torch.stack(says.router_logits)[:, targets >= 0]  # (L, N, E)
            assert gap_of_choice(logits, k) > MARGIN
            E = logits.shape[-1]
            load = torch.full((len(logits), E), k / E, dtype=dtype) if load is None else load
            counts = counts + F.one_hot(logits.topk(k).indices, E).sum((1, 2))
            of_tokens = AUX * E * (logits.softmax(-1) * load[:, None]).sum(-1) + Z * logits.logsumexp(-1) ** 2
            ce = F.cross_entropy(says.logits.flatten(0, 1), targets, ignore_index=-1, reduction='sum')
            total = total + ce + of_tokens.sum() / len(logits)
        total.backward()
        found[f'{step} loss'] = total.detach().double()
        for name, parameter in model.named_parameters():
            found[f'{step} {name}'], parameter.grad = parameter.grad, None
        load = (k * counts / counts.sum(-1, keepdim=True)).to(dtype)
        found[f'{step} load'] = load
    return found


@pytest.fixture(scope='module')
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp('models')
    for kind, changes in KINDS.items():
        draws = (save_model(folder / kind, kind, draw=draw, **changes) for draw in range(20))
        assert any(closest_choice(drawn) > 2 * MARGIN and unevenness(drawn) > 0.11 for drawn in draws)
    return folder


def unevenness(folder):
    """How far the load of an expert is from that of all, at most."""
    load = by_formula(folder, torch.float32)['0 load']
    return (load - load.mean()).abs().max()


@pytest.fixture(scope='module')
def expected(models):
    return {kind: [by_formula(models / kind, dtype) for dtype in (torch.float32, torch.float64)] for kind in KINDS}


def test_loss_gradient_and_load_are_those_of_the_formula_and_of_model_py(models, expected):
    (found,) = run_function(1, on_one_rank, models)
    for kind in KINDS:
        assert_as_close_to_float64(found[kind], *expected[kind], kind)
        uniform = expected[kind][1]['0 load'].mean()
        assert (expected[kind][1]['0 load'] - uniform).abs().max() > 0.1, 'a uniform load proves nothing'
    for case in ('all logits', 'compiled'):
        assert_as_close_to_float64(found[case], *expected['mixtral'], case)
    theirs = [{key: values[key] for key in found['native']} for values in expected['qwen3_moe']]
    assert_as_close_to_float64(found['native'], *theirs, 'native')
    # LoRA changes nothing at first. The routers are frozen, but what is before them learns to balance them.
    lora = found['lora']
    for key in ('0 loss', '1 loss', '1 load'):
        assert_as_close_to_float64(lora[key], *(values[key] for values in expected['mixtral']), key)
    assert all('lora_' in key for key in lora if not key.endswith((' loss', ' load')))


def test_they_depend_neither_on_ranks_nor_on_what_is_computed_twice(models, expected):
    found = run_function(2, on_two_ranks, models)[0]
    for case, values in found.items():
        assert_as_close_to_float64(values, *expected[case.split()[0]], case)


@pytest.mark.parametrize('kind', ['mixtral', 'qwen3_moe', 'gpt_oss', 'granitemoehybrid', 'llama', 'mamba'])
def test_which_classes_have_routers(tmp_path, kind):
    pretrained = Pretrained(save_model(tmp_path, kind))
    assert pretrained.has_routers == (kind not in ('llama', 'mamba'))


# --- runs -------------------------------------------------------------------------------------------------------------

RUN = [*TINY_RUN, '--block_size=48', '--global_batch_size=4', '--batch_size=1', '--dtype=float32', '--eval_interval=0']
RUN += ['--lr_schedule=constant', '--warmup_iters=0', '--dataset=chats', '--checkpoint_interval=2']
RUN += ['--keep_checkpoints=3']


def test_a_resumed_run_is_the_unbroken_one_to_the_bit_and_only_who_asks_gets_the_loss(models, tmp_path):
    write_chats(tmp_path / 'chats.jsonl')
    keys = [f'--dataset={tmp_path / "chats.jsonl"}', '--name=chats', f'--tokenizer={models / "mixtral"}']
    fork_script('prepare_data.py', *keys, f'--data_dir={tmp_path}', '--num_proc=1', '--val_fraction=0.2')

    def command(name, steps, *keys):
        folders = [f'--init_from={models / "mixtral"}', f'--data_dir={tmp_path}', f'--out_dir={tmp_path / name}']
        arguments = [*RUN, *folders, *keys, f'--max_iters={steps}']
        return {'name': f'{name} {steps}', 'script': 'train_ddp.py', 'arguments': arguments}

    aux, sgd = '--router_aux=10', ('--optimizer=sgd', '--learning_rate=0.1')  # AdamW would turn roundings into steps
    cases = [command('whole', 4, aux), command('broken', 2, aux)]
    run_many([*cases, command('asked', 4, aux, *sgd), command('without', 2, *sgd)], 2, tmp_path)
    run_many([command('broken', 4, aux), command('without', 4, aux, *sgd)], 2, tmp_path)
    assert column(tmp_path / 'broken', 'loss') == column(tmp_path / 'whole', 'loss')
    (whole, state), (broken, _) = (
        checkpoint.load_weights(checkpoint.choose_to_read(str(tmp_path / name))) for name in ('whole', 'broken')
    )
    assert whole.keys() == broken.keys() and all(torch.equal(broken[name], whole[name]) for name in whole)
    loads = [tensor for name, tensor in whole.items() if name.endswith('router.load')]
    assert len(loads) == 3 and all(tensor.std() > 0 for tensor in loads)
    # Without the key there is no loss and no load; a run may get both when it resumes. At first the load is uniform,
    # and its loss the same for all choices. So its gradient is zero, but with it others may be rounded differently.
    losses = {name: column(tmp_path / name, 'loss') for name in ('asked', 'without')}
    assert_same_run(losses['without'][:2], losses['asked'][:2])
    assert error(losses['without'][2], losses['asked'][2]) > apart(3)
    assert [len(column(tmp_path / name, 'router/violation')) for name in losses] == [4, 2]
    # What others read of such a checkpoint is the model.
    pretrained = Pretrained.from_run(str(tmp_path / 'whole'), state)
    theirs = loading.for_inference(pretrained, whole)
    assert theirs.state_dict().keys() == {name for name in whole if not name.endswith('router.load')}
