"""
Published faults of parallel training: does check() name each in a release that had it, and pass one that mended it?

    python benchmarks/published_faults.py --wheels=FOLDER                             # all: half an hour on two cores
    python benchmarks/published_faults.py --wheels=FOLDER olmoe_grouped zero2_offload
    python benchmarks/published_faults.py --installed                                 # what installed packages show

pip puts each release, without its dependencies, into a folder of its own in FOLDER, which then stands first on the path
of one process. That builds a tiny model and trains it on two ranks, on the CPU, with gloo. Written for Python 3.11,
torch 2.13 and the releases of requirements.txt; docs/prove.md has the results.
"""

import argparse
import inspect
import os
import subprocess
import sys
import tempfile
import warnings
from collections import namedtuple
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
os.environ.update(HF_HUB_OFFLINE='1', TOKENIZERS_PARALLELISM='false', DS_ACCELERATOR='cpu')

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from proving.check import check, rows_of_rank
from proving.ranks import RankFailed

VOCAB, LENGTH, ROWS, WIDTH = 62, 9, 4, 24  # all ranks together have ROWS sequences in a micro-step


def micro_steps(count):
    """Batches whose rows and micro-steps differ in their number of targets: a mean of means is another number."""
    batches = []
    for seed in range(count):
        tokens = torch.randint(3, VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
        y = tokens[:, 1:].clone()
        y[0, 2:] = y[1, : 3 + seed] = y[2, 1 : 3 * seed + 1] = -100
        batches.append({'x': tokens[:, :-1], 'y': y})
    return batches


def targets_of(batches):
    return sum((batch['y'] != -100).sum() for batch in batches)


def sum_of(logits, y):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction='sum')


def mean_over_ranks(loss):
    if dist.is_initialized():
        dist.all_reduce(loss := loss.detach().clone())
        loss /= dist.get_world_size()
    return loss


# --- TRANSFORMERS: TENSOR AND EXPERT PARALLELISM ----------------------------------------------------------------------


def model_of(kind):
    import transformers

    transformers.logging.set_verbosity_error()
    sizes = dict(vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=4, max_position_embeddings=32, tie_word_embeddings=False)
    if kind == 'olmoe':
        sizes |= dict(intermediate_size=20, num_experts=8, num_experts_per_tok=2, norm_topk_prob=False)
        return transformers.OlmoeForCausalLM, transformers.OlmoeConfig(**sizes)
    if kind == 'apertus':
        return transformers.ApertusForCausalLM, transformers.ApertusConfig(**sizes)
    if kind == 'qwen3':
        return transformers.Qwen3ForCausalLM, transformers.Qwen3Config(head_dim=6, **sizes)
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**sizes)


def by_transformers(title, kind, distributed, experts=None, micro=1):
    """from_pretrained(distributed_config=...) of the weights of one process."""
    from transformers.distributed import DistributedConfig

    cls, config = model_of(kind)
    total = targets_of(micro_steps(micro))
    experts = {'experts_implementation': experts} if experts else {}
    folder = tempfile.mkdtemp()

    def build():
        torch.manual_seed(0)
        config._attn_implementation = config._experts_implementation = 'eager'
        return cls(config)

    def parallelize(model):
        if dist.get_rank() == 0:
            model.save_pretrained(folder)
        dist.barrier()
        how = dict(distributed_config=DistributedConfig(**distributed), attn_implementation='eager', **experts)
        return cls.from_pretrained(folder, dtype=torch.float32, **how).train()

    def gradients(model, batches):
        losses = [sum_of(model(input_ids=b['x'], use_cache=False).logits, b['y']) / total for b in batches]
        for loss in losses:
            loss.backward()
        return sum(losses)

    return check(build, parallelize, gradients, micro_steps(micro), clip=clip_by_hand, title=title)


def clip_by_hand(model, max_norm):
    """torch's own does not take DTensors and tensors together."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = sum((g.full_tensor() if isinstance(g, DTensor) else g).double().square().sum() for g in grads).sqrt()
    for grad in grads:
        grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def expert_ranks():
    from transformers.distributed import DistributedConfig

    if 'ep_size' in inspect.signature(DistributedConfig).parameters:
        return dict(ep_size=2, tp_size=2)
    return dict(tp_size=2, enable_expert_parallel=True)


def olmoe_grouped(title):
    return by_transformers(title, 'olmoe', expert_ranks(), experts='grouped_mm')


def olmoe_batched(title):
    return by_transformers(title, 'olmoe', expert_ranks(), experts='batched_mm')


def qwen3_accumulation(title):
    return by_transformers(title, 'qwen3', dict(tp_size=2), micro=3)


def apertus_activation(title):
    return by_transformers(title, 'apertus', dict(tp_size=2))


# --- TRANSFORMERS: TRAINER --------------------------------------------------------------------------------------------


def by_trainer(title, micro, ranks):
    """Trainer.training_step() with the count of targets that Trainer takes, on ranks under DDP."""
    import transformers

    cls, config = model_of('llama')
    held = {}

    def build():
        torch.manual_seed(0)
        config._attn_implementation = 'eager'
        return cls(config)

    def parallelize(model):
        args = dict(use_cpu=True, gradient_accumulation_steps=micro, per_device_train_batch_size=1, report_to=[])
        args = transformers.TrainingArguments(tempfile.mkdtemp(), **args)
        trainer = held['trainer'] = transformers.Trainer(model=model, args=args, train_dataset=[0])
        trainer.current_gradient_accumulation_steps = micro
        if ranks > 1:
            model = trainer.model_wrapped = trainer.accelerator.prepare_model(model)
        return model.train()

    def gradients(model, batches):
        trainer, count = held['trainer'], {}
        if hasattr(trainer, 'get_batch_samples'):
            device = [torch.device('cpu')][: len(inspect.signature(trainer.get_batch_samples).parameters) - 2]
            count = {'num_items_in_batch': trainer.get_batch_samples(iter(batches), micro, *device)[1]}
        return mean_over_ranks(sum(trainer.training_step(model, dict(batch), **count) for batch in batches))

    def alone(model, batches):
        losses = [sum_of(model(input_ids=b['input_ids']).logits[:, :-1], b['labels'][:, 1:]) / total for b in batches]
        sum(losses).backward()
        return sum(losses)

    ignored = torch.full((ROWS, 1), -100)  # Trainer's labels stand at their own token, and the model shifts them
    batches = [{'input_ids': b['x'], 'labels': torch.cat([ignored, b['y'][:, :-1]], 1)} for b in micro_steps(micro)]
    total = sum((b['labels'] != -100).sum() for b in batches)
    return check(build, parallelize, gradients, batches, ranks, part=rows_of_rank, alone=alone, title=title)


def trainer_accumulation(title):
    return by_trainer(title, 3, 1)


def trainer_ddp(title):
    return by_trainer(title, 1, 2)


# --- TRL --------------------------------------------------------------------------------------------------------------


def grpo_generation(title):
    """GRPOTrainer's DAPO loss, where one generation serves two optimizer steps of two micro-steps each."""
    import datasets
    import tokenizers
    import transformers
    import trl

    cls, config = model_of('llama')
    held = {}
    batches = [
        {
            'prompt_ids': b['x'][:, :3], 'prompt_mask': torch.ones(ROWS, 3, dtype=torch.long),
            'completion_ids': b['x'][:, 3:], 'completion_mask': (b['y'][:, 3:] != -100).long(),
            'advantages': torch.tensor([1.0, -0.5, 0.7, -1.2]),
        }
        for b in micro_steps(2)
    ]  # fmt: skip
    total = sum(batch['completion_mask'].sum() for batch in batches)  # the other half of the generation has as many

    def build():
        torch.manual_seed(0)
        config._attn_implementation = 'eager'
        return cls(config)

    def parallelize(model):
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({'a': 0, '<pad>': 1}, unk_token='a'))
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token='<pad>', eos_token='<pad>')
        args = dict(per_device_train_batch_size=ROWS // 2, num_generations=2, use_cpu=True, bf16=False, report_to=[])
        args |= dict(gradient_accumulation_steps=2, steps_per_generation=4, loss_type='dapo', beta=0.0)
        trainer = held['trainer'] = trl.GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **more: [0.0] * len(completions),
            args=trl.GRPOConfig(tempfile.mkdtemp(), gradient_checkpointing=False, **args),
            train_dataset=datasets.Dataset.from_list([{'prompt': 'a'}] * 16),
            processing_class=tokenizer,
        )
        trainer.current_gradient_accumulation_steps = 2
        return trainer.accelerator.prepare_model(model).train()

    def gradients(model, batches):
        trainer, reported = held['trainer'], 0
        for number, batch in enumerate(batches):
            model.require_backward_grad_sync = number == len(batches) - 1
            loss = trainer.compute_loss(model, {**batch, 'num_items_in_batch': 2 * total})
            trainer.accelerator.backward(loss)
            reported += loss.detach()
        return mean_over_ranks(reported)

    def alone(model, batches):
        loss = 0
        for batch in batches:
            ids, mask = (torch.cat([batch[f'prompt_{key}'], batch[f'completion_{key}']], 1) for key in ('ids', 'mask'))
            logps = model(input_ids=ids, attention_mask=mask).logits[:, 2:-1].log_softmax(-1)
            logps = logps.gather(-1, batch['completion_ids'][..., None])[..., 0]
            ratio = (logps - logps.detach()).exp()
            loss = loss - (ratio * batch['advantages'][:, None] * batch['completion_mask']).sum() / total
        loss.backward()
        return loss

    return check(build, parallelize, gradients, batches, part=rows_of_rank, alone=alone, title=title)


# --- A PLAIN MODEL ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 36), nn.Linear(36, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
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


def build_net():
    torch.manual_seed(0)
    return Net()


# --- DEEPSPEED --------------------------------------------------------------------------------------------------------


class Stepped:
    """The optimizer of an engine that has stepped already."""

    def step(self):
        pass

    zero_grad = step


def by_deepspeed(title, micro, zero, counted=True):
    """The engine reduces, clips and steps. counted: it also counts the micro-steps, or it is told which is the last."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    total = targets_of(micro_steps(micro))
    held = {}

    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3, foreach=False)

    def parallelize(model):
        config = {
            'train_micro_batch_size_per_gpu': ROWS // 2,
            'gradient_accumulation_steps': micro if counted else 1,
            'gradient_clipping': 0.1,
            'zero_optimization': zero,
            'zero_force_ds_cpu_optimizer': False,
        }
        held['engine'] = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)[0]
        return held['engine']

    def gradients(engine, batches):
        reported = 0
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            if not counted:
                engine.set_gradient_accumulation_boundary(last)
            loss = sum_of(engine(batch['x']), batch['y']) * dist.get_world_size() / total
            engine.backward(loss, scale_wrt_gas=False)
            if counted and not last:
                engine.step()
            reported += loss.detach()
        for parameter in engine.parameters():
            parameter.grad = safe_get_full_grad(parameter)
        return mean_over_ranks(reported)

    def alone(model, batches):
        losses = [sum_of(model(b['x']), b['y']) / total for b in batches]
        sum(losses).backward()
        return sum(losses)

    def clip_and_step(engine, max_norm):
        for parameter in engine.parameters():
            parameter.grad = None
        with torch.no_grad():  # DeepSpeed 0.18 gathers weights into views
            engine.step()
        return torch.as_tensor(engine.get_global_grad_norm())

    return check(
        build_net, parallelize, gradients, micro_steps(micro), part=rows_of_rank, clip=clip_and_step, alone=alone,
        optimizer=lambda parameters: Stepped() if held else adamw(parameters), title=title,
    )  # fmt: skip


OFFLOAD = {'stage': 2, 'offload_optimizer': {'device': 'cpu', 'pin_memory': False}}


def zero2_offload(title):
    return by_deepspeed(title, 3, OFFLOAD)


def zero2_offload_told(title):
    return by_deepspeed(title, 3, OFFLOAD, counted=False)


# --- PYTORCH ----------------------------------------------------------------------------------------------------------


def log_softmax_in_loss_parallel(title):
    """Log-probabilities as a preference loss takes them; F.cross_entropy in the same place is right."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

    def parallelize(model):
        plan = {f'blocks.{i}.up': ColwiseParallel() for i in range(2)}
        plan |= {f'blocks.{i}.down': RowwiseParallel() for i in range(2)}
        plan['head'] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        return parallelize_module(model, init_device_mesh('cpu', (dist.get_world_size(),)), plan)

    def gradients(model, batches):
        logits, y = model(batches[0]['x']), batches[0]['y']
        chosen = F.one_hot(y.clamp(min=0), VOCAB) * (y != -100)[..., None] / logits.new_tensor(ROWS).float()
        if isinstance(logits, DTensor):
            with loss_parallel():
                chosen = distribute_tensor(chosen, logits.device_mesh, [Shard(2)])
                loss = -(logits.log_softmax(-1) * chosen).sum().full_tensor()
                loss.backward()
        else:
            loss = -(logits.log_softmax(-1) * chosen).sum()
            loss.backward()
        return loss

    return check(build_net, parallelize, gradients, micro_steps(1), clip=clip_by_hand, title=title)


def pipeline_accumulation(title):
    """Two schedule.step() before the optimizer's: scale_grads=True, the default, divides what came before again."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    held = {}

    def mean_of(logits, y):
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()) / 2

    def parallelize(model):
        rank = dist.get_rank()
        model.blocks[1 - rank] = nn.Identity()
        setattr(model, 'embed' if rank else 'head', nn.Identity())
        stage = PipelineStage(model, rank, 2, torch.device('cpu'))
        held['schedule'] = ScheduleGPipe(stage, n_microbatches=2, loss_fn=mean_of)
        return model

    def gradients(model, batches):
        losses, is_last = [], dist.get_rank() == 1
        for batch in batches:
            if is_last:
                held['schedule'].step(target=batch['y'], losses=(of_step := []))
                losses.append(torch.stack(of_step).mean())
            else:
                held['schedule'].step(batch['x'])
        loss = sum(losses).detach() if is_last else torch.zeros(())
        dist.broadcast(loss, 1)
        return loss

    def alone(model, batches):
        losses = [mean_of(model(batch['x']), batch['y']) for batch in batches]
        sum(losses).backward()
        return sum(losses)

    def clip(model, max_norm):
        square = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).square()
        dist.all_reduce(square)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, square.sqrt())
        return square.sqrt()

    batches = [{'x': b['x'], 'y': (b['x'] + 1) % VOCAB} for b in micro_steps(2)]
    return check(build_net, parallelize, gradients, batches, clip=clip, alone=alone, title=title)


# --- THE TABLE --------------------------------------------------------------------------------------------------------

Case = namedtuple('Case', 'report function releases')
HUB_1 = 'huggingface_hub==1.33.0'
OLD = 'tokenizers==0.21.4 huggingface_hub==0.36.0 datasets==3.6.0'
BEFORE_2025 = OLD.replace('0.21.4', '0.20.3')
CASES = [
    Case('transformers 48205', olmoe_grouped, [f'transformers==5.16.1 {HUB_1}', f'transformers==5.17.0 {HUB_1}', '']),
    Case('transformers 48687', olmoe_batched, [f'transformers==5.17.0 {HUB_1}', 'transformers==5.18.0', '']),
    Case('none yet', qwen3_accumulation, [f'transformers==5.16.1 {HUB_1}', 'transformers==5.18.0', '']),
    Case('none yet', apertus_activation, ['']),
    Case(
        'transformers 34191',
        trainer_accumulation,
        [f'transformers==4.45.2 {BEFORE_2025}', f'transformers==4.53.3 {OLD}', ''],
    ),
    Case('transformers 39395', trainer_ddp, [f'transformers==4.53.3 {OLD}', f'transformers==4.54.1 {OLD}', '']),
    Case('TRL 6024', grpo_generation, ['trl==1.9.0', 'trl==1.10.0']),
    Case('DeepSpeed 7967', zero2_offload, ['deepspeed==0.18.9', 'deepspeed==0.19.0', '']),
    Case('DeepSpeed 7981', zero2_offload_told, ['deepspeed==0.18.9', 'deepspeed==0.19.0', '']),
    Case('PyTorch 190746', log_softmax_in_loss_parallel, ['']),
    Case('torchtitan 1733', pipeline_accumulation, ['']),
]


def folder_of(release, wheels):
    """Where a release lies; pip puts it there."""
    folder = wheels / release.split()[0].replace('==', '-')
    if not folder.exists():
        pip = [sys.executable, '-m', 'pip', 'install', '--quiet', '--no-deps', '--no-build-isolation']
        subprocess.run(
            [*pip, f'--target={folder}', *release.split()], check=True, env={**os.environ, 'DS_BUILD_OPS': '0'}
        )
    return folder


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('names', nargs='*', metavar='CASE', help=', '.join(case.function.__name__ for case in CASES))
    parser.add_argument('--wheels', type=Path, help='folder of the old releases')
    parser.add_argument('--installed', action='store_true', help='only the installed packages')
    parser.add_argument('--title', help=argparse.SUPPRESS)  # run one case in this process
    args = parser.parse_args()
    known = [case.function.__name__ for case in CASES]
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f'no case {unknown[0]}; there are: {", ".join(known)}')
    if not (args.wheels or args.installed or args.title):
        parser.error('give --wheels=FOLDER for the old releases, or --installed')
    if args.title:
        try:
            globals()[args.names[0]](args.title)
        except RankFailed as error:
            print(f'{args.title}: could not run: {error}')
        return
    for case in CASES:
        name = case.function.__name__
        for release in case.releases:
            if args.names and name not in args.names or args.installed and release:
                continue
            path = [str(folder_of(release, args.wheels.resolve()))] if release else []
            path += [p for p in [os.environ.get('PYTHONPATH')] if p]
            title = f'{case.report}: {name}, {release.split()[0] if release else "installed"}'
            subprocess.run(
                [sys.executable, __file__, name, f'--title={title}'],
                env={**os.environ, 'PYTHONPATH': os.pathsep.join(path), 'OMP_NUM_THREADS': '1'},
            )


if __name__ == '__main__':
    warnings.simplefilter('ignore')
    main()
