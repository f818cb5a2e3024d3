"""LoRA beside the experts of transformers' mixtures: beside a loop over experts in float64, in runs, and in exports."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from chats import write_rows
from launch import TINY_RUN, run_function
from outputs import as_of_step, checkpoint_of, column, tensors_of
from precision import MARGIN, assert_as_close_to_float64, assert_same_run, gap_of_choice
from pretrained import VOCABULARY, refusal, save_model, sharded, start
from router_weights import let_tokens_choose
from safetensors.torch import load_file, save_file
from short import slow_but

from huggingface import finetune, loading, lora
from huggingface.files import local_rows
from huggingface.pretrained import Pretrained

KINDS = {'qwen3_moe': {'norm_topk_prob': True}, 'gpt_oss': {}}  # (E, out, in); (E, in, out) with biases
RANK, EXPERTS, STEPS = 4, 4, 6
ROWS, T = 6, 24
TARGETS = 'all,experts'


@pytest.fixture(scope='module')
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp('models')
    for kind, changes in KINDS.items():
        save_model(folder / kind, kind, **changes)
        path = folder / kind / 'model.safetensors'
        weights, router = load_file(path), 'gate.weight' if kind == 'qwen3_moe' else 'router.weight'
        let_tokens_choose(weights, 2, embedding='model.embed_tokens.weight', router=router)
        for number, (name, tensor) in enumerate(weights.items()):
            if name.endswith('_proj_bias'):  # of gpt_oss, whose experts' biases begin as 0
                tensor.normal_(std=0.3, generator=torch.Generator().manual_seed(number))
            if 'o_proj' in name or 'down_proj' in name:  # so that a token remains what it was, and chooses as it did
                tensor *= 0.05
        save_file(weights, path, {'format': 'pt'})
    save_model(folder / 'mixtral_64', 'mixtral_64')
    save_model(folder / 'llama', 'llama')
    return folder


def pretrained_of(folder, **options):
    return Pretrained(str(folder), block_size=32, lora_rank=RANK, **{'lora_targets': TARGETS} | options)


# --- beside a loop over experts ---------------------------------------------------------------------------------------


def value_of(name, shape):
    """What a matrix of LoRA is in these tests, in which B is not 0."""
    return 0.3 * lora.initial_lora_a(name, shape, seed=5)


def loss_and_gradients(folder, implementation='whole', recompute='none', **options):
    """Of ROWS rows over all ranks, one micro-step for each row: the loss, and the gradients of LoRA."""
    pretrained = pretrained_of(folder, **options)
    with torch.device('meta'):
        raw = finetune.for_training(pretrained)
    raw.checkpoint_activations(recompute)
    if implementation in ('whole', 'ddp'):
        lora.compute_from_stored(raw)
    model = sharded(raw, implementation)
    raw.to_empty(device='cpu')
    loading.load(raw, pretrained)
    tensors = dict(raw.named_parameters())
    for name in filter(lora.is_lora, tensors):
        local, rows = local_rows(tensors[name])
        local.copy_(value_of(name, tensors[name].shape)[rows])
    if implementation == 'ddp':
        model = torch.nn.parallel.DistributedDataParallel(raw)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    loss = torch.zeros((), dtype=torch.float64)
    for row in batch()[rank::ranks]:
        loss_sum, _ = model(row[None, :-1], row[None, 1:])
        (loss_sum * ranks).backward()
        loss += loss_sum.detach()
    dist.all_reduce(loss)
    found = {'loss': loss}
    for name, parameter in raw.named_parameters():
        if parameter.requires_grad:
            found[name] = getattr(parameter.grad, 'full_tensor', lambda gradient=parameter.grad: gradient)().clone()
    return found


def batch():
    return torch.randint(VOCABULARY, (ROWS, T + 1), generator=torch.Generator().manual_seed(1))


def by_loop(folder, names, dtype):
    """The same by transformers' own class, which computes one expert after the other. W + scale B A takes the place of
    each matrix. names: of LoRA's matrices."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.set_experts_implementation('eager')
    weights, scale = dict(model.named_parameters()), 16 / RANK
    leaves = {name: value_of(name, shape).to(dtype).requires_grad_() for name, shape in names.items()}
    merged = {}
    for name in leaves:
        place, _, own_name = name.rpartition('.')
        if own_name == 'lora_B':
            continue
        A, B = leaves[name], leaves[f'{place}.lora_B']
        if not place.endswith('_lora'):
            merged[f'{place}.weight'] = weights[f'{place}.weight'].detach() + scale * B @ A
            continue
        weight = weights[place.removesuffix('_lora')].detach()
        of_experts = []
        for expert in range(EXPERTS):
            out = B.shape[0] // EXPERTS
            update = scale * B[expert * out : (expert + 1) * out] @ A[expert * RANK : (expert + 1) * RANK]
            of_experts.append(weight[expert] + (update if update.shape == weight[expert].shape else update.T))
        merged[place.removesuffix('_lora')] = torch.stack(of_experts)
    x = batch()
    says = torch.func.functional_call(
        model, merged, (x[:, :-1],), {'output_router_logits': True, 'use_cache': False, 'labels': x[:, :-1]}
    )
    assert gap_of_choice(torch.stack(says.router_logits), 2) > MARGIN
    loss = F.cross_entropy(says.logits.flatten(0, 1), x[:, 1:].flatten(), reduction='sum')
    loss.backward()
    return {'loss': loss.detach().double()} | {name: leaf.grad for name, leaf in leaves.items()}


def found_on_ranks(folder):
    layouts = [('whole', 'none'), ('whole', 'full'), ('whole', 'selective')] if dist.get_world_size() == 1 else []
    layouts += [('torch', 'full'), ('manual', 'none')] + [('ddp', 'none')] * (dist.get_world_size() > 1)
    return {
        f'{kind} {implementation} {recompute}': loss_and_gradients(f'{folder}/{kind}', implementation, recompute)
        for kind in KINDS
        for implementation, recompute in layouts
    }


@pytest.mark.parametrize('ranks', [1, 2, 3])
def test_loss_and_gradients_are_those_of_a_loop_over_experts(models, ranks):
    found = run_function(ranks, found_on_ranks, models)[0]
    for kind in KINDS:
        names = {name: tensor.shape for name, tensor in found[f'{kind} torch full'].items() if name != 'loss'}
        assert sum('experts' in name for name in names) == 3 * 2 * 2, 'three blocks, two matrices, A and B'
        expected = [by_loop(models / kind, names, dtype) for dtype in (torch.float32, torch.float64)]
        for case in (case for case in found if case.startswith(kind)):
            assert_as_close_to_float64(found[case], *expected, case)


# --- what is trained, counted and computed ----------------------------------------------------------------------------


def model_on_meta(folder, **options):
    with torch.device('meta'):
        return finetune.for_training(pretrained_of(folder, **options))


def trained(folder, targets):
    model = model_on_meta(folder, lora_targets=targets)
    return {name.rpartition('.')[0] for name, p in model.named_parameters() if p.requires_grad and '.1.' in name}


def test_targets_name_all_experts_or_one_matrix_of_them(models):
    layer, names = 'model.layers.1.', ('q_proj', 'k_proj', 'v_proj', 'o_proj')
    attention = {f'{layer}self_attn.{name}' for name in names}
    experts = {f'{layer}mlp.experts.{name}_lora' for name in ('gate_up_proj', 'down_proj')}
    folder = models / 'qwen3_moe'
    assert trained(folder, 'all') == attention, 'as in 0.9, whose checkpoints go on'
    assert trained(folder, 'all,experts') == attention | experts
    assert trained(folder, 'mlp.experts') == experts
    assert trained(folder, 'q_proj, down_proj') == {f'{layer}self_attn.q_proj', f'{layer}mlp.experts.down_proj_lora'}
    with pytest.raises(ValueError, match="no 'experts' among mlp.down_proj"):
        trained(models / 'llama', 'experts')
    with pytest.raises(ValueError, match='mlp has LoRA, too'):
        model_on_meta(folder, modules_to_save=['mlp'])


def test_parameters_and_flops_are_those_of_the_experts_that_compute_a_token(models):
    alone, both = (model_on_meta(models / 'qwen3_moe', lora_targets=targets) for targets in ('all', 'all,experts'))
    hidden, width, layers, chosen = 40, 16, 3, 2
    of_an_expert = RANK * (hidden + 2 * width) + RANK * (width + hidden)
    counts, before = both.parameter_counts(), alone.parameter_counts()
    assert counts['trainable'] - before['trainable'] == layers * EXPERTS * of_an_expert
    assert counts['active'] - before['active'] == layers * chosen * of_an_expert
    assert both.flops_per_token() - alone.flops_per_token() == 6 * layers * chosen * of_an_expert


def logits_of_base(folder):
    """With LoRA, with LoRA turned off, and of the same class without LoRA; then for float32 and stored bfloat16."""
    found, x = [], batch()[:, :-1]
    for dtype in ('float32', 'bfloat16'):
        pretrained = pretrained_of(folder, frozen_dtype=dtype)
        model = finetune.for_training(pretrained)
        lora.compute_from_stored(model)
        loading.load(model, pretrained)
        with torch.no_grad():
            at_first = model(x)
            for name, parameter in model.named_parameters():
                if lora.is_lora(name):
                    parameter.copy_(value_of(name, parameter.shape))
            with lora.turned_off(model):
                found.append((model(x), at_first))
    return found


def test_turned_off_it_computes_what_the_base_does_to_the_bit(models):
    for off, at_first in run_function(1, logits_of_base, str(models / 'gpt_oss'))[0]:
        assert torch.equal(off, at_first)


# --- runs -------------------------------------------------------------------------------------------------------------

RUN = [*TINY_RUN, '--block_size=32', '--batch_size=1', '--global_batch_size=6', '--dtype=float32', '--warmup_iters=0']
RUN += ['--lr_schedule=constant', '--eval_interval=0', '--dataset=synthetic', '--learning_rate=1e-2']
RUN += [f'--lora_rank={RANK}', f'--lora_targets={TARGETS}', '--keep_checkpoints=9', '--checkpoint_interval=2']


def keys_of(model, out_dir, *more):
    return [*RUN, f'--init_from={model}', f'--out_dir={out_dir}', *more]


@pytest.fixture(scope='module')
def whole(models, tmp_path_factory):
    """A run of STEPS steps without a break, on 2 ranks."""
    out_dir = tmp_path_factory.mktemp('whole')
    start('torch', *keys_of(models / 'qwen3_moe', out_dir, f'--max_iters={STEPS}'), nproc=2)
    return out_dir


@pytest.mark.parametrize(
    ('name', 'nproc'), slow_but(['manual'], [('torch', 2), ('ddp', 1), ('ddp', 3), ('manual', 3), ('diloco', 2)])
)
def test_a_run_goes_on_under_every_strategy_and_number_of_ranks(models, whole, tmp_path, name, nproc):
    out_dir = as_of_step(2, whole, tmp_path / 'out')
    start(name, *keys_of(models / 'qwen3_moe', out_dir, f'--max_iters={STEPS}'), nproc=nproc)
    losses = column(out_dir, 'loss')
    if (name, nproc) == ('torch', 2):
        assert losses == column(whole, 'loss'), 'to the bit'
    assert_same_run(losses, column(whole, 'loss'))
    saved = tensors_of(checkpoint_of(out_dir, STEPS))
    counted = model_on_meta(models / 'qwen3_moe').parameter_counts()['trainable']
    assert sum(tensor.numel() for tensor in saved.values() if tensor.dim()) == (4 if name == 'diloco' else 3) * counted
    of_model = {key for key in saved if key.startswith('model.')}
    assert all('.lora_' in key for key in of_model) and any('down_proj_lora.lora_B' in key for key in of_model)
    assert all(saved[key].abs().max() > 0 for key in of_model), 'each has learned'


@pytest.mark.parametrize('kind', slow_but(['qwen3_moe'], [*KINDS]))
@pytest.mark.filterwarnings('ignore')
@torch.no_grad()
def test_an_export_has_what_was_learned_merged_and_as_peft_has_it(models, tmp_path, kind):
    peft = pytest.importorskip('peft')
    import transformers

    out_dir, adapter, merged = tmp_path / 'out', tmp_path / 'adapter', tmp_path / 'merged'
    start('manual', *keys_of(models / kind, out_dir, '--max_iters=4', '--lora_dropout=0.1'), nproc=2)
    said = start('export_model.py', f'--out_dir={out_dir}', f'--to={adapter}', '--adapter')[0].stdout
    assert 'loaded again as PeftModelForCausalLM: weights equal, logits equal ' in said
    start('export_model.py', f'--out_dir={out_dir}', f'--to={merged}')
    targets = json.loads((adapter / 'adapter_config.json').read_text())['target_parameters']
    assert len(targets) == 3 * 2 and 'model.layers.2.mlp.experts.down_proj' in targets

    saved = {name.removeprefix('model.'): t for name, t in tensors_of(checkpoint_of(out_dir, 4)).items()}
    whole, plain = (transformers.AutoModelForCausalLM.from_pretrained(path) for path in (merged, models / kind))
    whole, plain = whole.state_dict(), plain.state_dict()
    for name in targets:
        A, B = (saved[f'{name}_lora.lora_{matrix}'].double() for matrix in 'AB')
        for expert in range(EXPERTS):
            update = 16 / RANK * B.chunk(EXPERTS)[expert] @ A.chunk(EXPERTS)[expert]
            expected = plain[name][expert].double() + (update if kind == 'qwen3_moe' else update.T)
            torch.testing.assert_close(whole[name][expert].double(), expected, rtol=0, atol=1e-6)
            assert update.abs().max() > 1e-3
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32).merge_and_unload()
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(whole[name], tensor, rtol=0, atol=1e-6)

    task, nats = tmp_path / 'task.jsonl', {}
    write_rows(task, [{'context': f'What is {n}?', 'choices': [f' {n}', ' no'], 'gold': 0} for n in range(6)])
    keys = [f'--tasks={task}', '--device=cpu', '--dtype=float32', f'--results={tmp_path / "results.jsonl"}']
    for source, *more in ((out_dir, '--shard=manual'), (merged,)):
        samples = tmp_path / source.name / 'samples'
        start('evaluate.py', f'--out_dir={source}', *keys, f'--samples={samples}', *more, nproc=1 + len(more))
        rows = (samples / 'task.jsonl').read_text().splitlines()
        nats[source] = [nat for row in rows for nat in json.loads(row)['nats']]
    assert nats[out_dir] == pytest.approx(nats[merged], rel=1e-4)
    keys = ['--prompt=ab', '--temperature=0', '--num_samples=1', '--max_new_tokens=8', '--device=cpu']
    sources = f'--out_dir={out_dir}', f'--out_dir={merged}'
    assert len({start('sample.py', source, *keys, '--dtype=float32')[0].stdout for source in sources}) == 1


@pytest.mark.slow
@pytest.mark.parametrize('targets', ['all', TARGETS])
def test_peft_reads_an_adapter_of_an_expert_that_all_tokens_share(tmp_path, targets):
    """Whose layers have names that peft takes for those of experts in earlier versions of transformers."""
    pytest.importorskip('peft')
    folder, out_dir = save_model(tmp_path / 'model', 'qwen3_next'), tmp_path / 'out'
    start('ddp', *keys_of(folder, out_dir, '--max_iters=2', f'--lora_targets={targets}'))
    said = start('export_model.py', f'--out_dir={out_dir}', f'--to={tmp_path / "adapter"}', '--adapter')[0].stdout
    assert 'loaded again as PeftModelForCausalLM: weights equal, logits equal ' in said


def test_beside_nf4_the_experts_stay_in_bfloat16(models, tmp_path):
    folder = models / 'mixtral_64'
    start('ddp', *keys_of(folder, tmp_path / 'out', '--max_iters=2', '--frozen_dtype=nf4'))
    dtypes = {name: p.dtype for name, p in model_on_meta(folder, frozen_dtype='nf4').named_parameters()}
    assert dtypes['model.layers.0.self_attn.q_proj.weight'] == torch.uint8
    assert dtypes['model.layers.0.mlp.experts.gate_up_proj'] == torch.float32, 'that of the folder'


@pytest.mark.parametrize(
    ('name', 'nproc', 'keys', 'problem'),
    [
        ('ddp', 1, ['--native=True'], "lora_rank=4 with native=True: only transformers' classes have LoRA"),
        ('parallel', 2, ['--expert_parallel=2'], 'expert_parallel=2 with init_from='),
    ],
)
def test_what_fits_nothing_is_refused(models, tmp_path, name, nproc, keys, problem):
    assert problem in refusal(name, *keys_of(models / 'qwen3_moe', tmp_path, *keys), nproc=nproc)
