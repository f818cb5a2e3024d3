"""check() on the parallelism of others: FSDP2, a DTensor plan, transformers' DistributedConfig, accelerate."""

from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import in_own_process
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from proving.check import check, rows_of_rank

VOCAB, LENGTH, ROWS, WIDTH = 61, 10, 4, 24


class Block(nn.Module):
    """Attention whose heads are normalized, as in Qwen3, and an MLP."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.q_norm = nn.RMSNorm(6)
        self.up, self.down = nn.Linear(WIDTH, 36), nn.Linear(36, WIDTH)

    def forward(self, x):
        q, k, v = (linear(x).unflatten(-1, (-1, 6)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build():
    torch.manual_seed(0)
    return Model()


def micro_step(seed):
    """Rows and micro-steps differ in their number of targets: else a mean of means would be right."""
    tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    y = tokens[:, 1:].clone()
    y[0, 2:] = y[1, : 3 + seed] = -100
    return {'x': tokens[:, :-1], 'y': y}


def targets_of(batches):
    return sum((batch['y'] != -100).sum() for batch in batches)


def mean_loss(logits, batch, targets):
    return F.cross_entropy(logits.flatten(0, 1), batch['y'].flatten(), reduction='sum') / targets


def in_one_process(model, batches):
    losses = [mean_loss(model(batch['x']), batch, targets_of(batches)) for batch in batches]
    sum(losses).backward()
    return sum(losses)


def mean_over_ranks(loss):
    dist.all_reduce(loss := loss.detach().clone())
    return loss / dist.get_world_size()


def clip(model, max_norm):
    """torch's own clipping does not take DTensors and tensors together."""
    grads = [p.grad for p in model.parameters()]
    square = sum((grad.full_tensor() if isinstance(grad, DTensor) else grad).double().square().sum() for grad in grads)
    for grad in grads:
        grad.mul_((max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0))
    return square.sqrt()


# --- PYTORCH ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('over', ['all', 'own'])
@in_own_process
def test_fsdp2_averages_gradients(over):
    """So a rank's loss is the sum over its targets / the targets of all * ranks. Over its own it is a mean of means."""
    batches = [micro_step(0), micro_step(1)]

    def parallelize(model):
        mesh = init_device_mesh('cpu', (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def gradients(model, own):
        targets = targets_of(batches) / dist.get_world_size() if over == 'all' else targets_of(own)
        reported = 0
        for number, batch in enumerate(own):
            model.set_requires_gradient_sync(number == len(own) - 1)
            loss = mean_loss(model(batch['x']), batch, targets)
            loss.backward()
            reported += loss.detach()
        return mean_over_ranks(reported)

    verdict = check(build, parallelize, gradients, batches, part=rows_of_rank, alone=in_one_process)
    assert verdict.is_right if over == 'all' else 'a mean of means' in said_by(verdict)


def said_by(verdict):
    return '\n'.join(verdict.lines())


@pytest.mark.parametrize('summed', [True, False])
@in_own_process
def test_dtensor_leaves_the_gradient_of_a_norm_of_heads_in_parts(summed):
    """q_norm stands between Linears that are cut, so each rank's gradient is that of its own heads."""

    def parallelize(model):
        plan = {name: ColwiseParallel() for name in ('q', 'k', 'v', 'up')}
        plan |= {name: RowwiseParallel() for name in ('o', 'down')}
        mesh = init_device_mesh('cpu', (dist.get_world_size(),))
        for block in model.blocks:
            parallelize_module(block, mesh, plan)
        return model

    def gradients(model, batches):
        loss = in_one_process(model, batches)
        for block in model.blocks if summed else []:
            dist.all_reduce(block.q_norm.weight.grad)
        return loss

    verdict = check(build, parallelize, gradients, [micro_step(0)], clip=clip, alone=in_one_process)
    assert verdict.is_right if summed else 'an all-reduce (sum) is missing over 2 ranks' in said_by(verdict)


# --- TRANSFORMERS -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'distributed',
    [
        pytest.param(
            dict(tp_size=2),
            id='tp',
            marks=pytest.mark.skipif(
                torch.__version__ < '2.13', reason="torch 2.11's DTensor gathers no fused experts"
            ),
        ),
        pytest.param(dict(ep_size=2, tp_size=2), id='ep'),
    ],
)
@in_own_process
def test_transformers_cuts_a_mixture(distributed, tmp_path):
    """from_pretrained() of the weights of one process, with a DistributedConfig."""
    import transformers
    from transformers.distributed import DistributedConfig

    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, moe_intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=6, num_experts=8, num_experts_per_tok=2, tie_word_embeddings=False,
    )  # fmt: skip
    forms = dict(attn_implementation='eager', experts_implementation='eager')

    def build():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, **forms)

    def parallelize(model):
        if dist.get_rank() == 0:
            model.save_pretrained(tmp_path)
        dist.barrier()
        cut = DistributedConfig(**distributed)
        return transformers.AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config=cut, **forms).train()

    def gradients(model, batches):
        return in_one_process(lambda x: model(input_ids=x, use_cache=False).logits, batches)

    assert check(build, parallelize, gradients, [micro_step(0)], clip=clip).is_right


# --- ACCELERATE -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not find_spec('accelerate'), reason='needs accelerate')
@pytest.mark.parametrize('over', ['all', 'own'])
@in_own_process
def test_accelerate_averages_over_ranks_and_micro_steps(over):
    """So the loss is multiplied by both. The mean of each micro-step, as in many examples, makes it a mean of means."""
    import accelerate

    batches = [micro_step(0), micro_step(1)]
    of_rank = {}

    def parallelize(model):
        of_rank['accelerator'] = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=len(batches))
        return of_rank['accelerator'].prepare(model)

    def gradients(model, own):
        accelerator, reported = of_rank['accelerator'], 0
        for batch in own:
            with accelerator.accumulate(model):
                times = len(own) * accelerator.num_processes
                targets = targets_of(batches) / times if over == 'all' else targets_of([batch])
                loss = mean_loss(model(batch['x']), batch, targets)
                accelerator.backward(loss)
                reported += loss.detach() / len(own)
        return mean_over_ranks(reported)

    def clip(model, max_norm):
        return of_rank['accelerator'].clip_grad_norm_(model.parameters(), max_norm)

    verdict = check(build, parallelize, gradients, batches, part=rows_of_rank, clip=clip, alone=in_one_process)
    assert verdict.is_right if over == 'all' else 'count' in said_by(verdict)
