"""
Faults for prove.py to find: each is a change of a line or two in a lesson or script, under one layout, with words of
what prove.py has to say about it. The first 29 are those with which its prototype was tried.

    python tests/corruptions.py             # each of them: is it found, and its cause named?
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[1]


# ruff: noqa: E501 - lines of code as they stand, and in their place
class Corruption(NamedTuple):
    name: str
    file: str
    changes: dict  # {text as it stands: in its place}
    layout: str
    ranks: int
    says: str  # in a line of the verdict
    keys: tuple = ()


TIED, EXPERTS = ('--tie_embeddings=True',), ('--arch=qwen3', '--n_experts=4', '--router_aux=0.01')
SUM = '            dist.all_reduce(total, group=_resolve_process_group(self.ranks.group))\n'
GATHERED = '    return reduce_scatter(grad, *ctx.ranks), None, None'
OWN_CHUNK = 'grad.chunk(ctx.ranks[0], 1)[dist.get_rank(_resolve_process_group(ctx.ranks[1]))]'
SCATTERED = '    return all_gather(grad, *ctx.ranks), None, None'
WAY_BACK = '    return send_rows(gradient, ctx.received, ctx.sent, ctx.group), None'
SQUARES = '            dist.all_reduce(square, group=group)\n'
OF_COPIES = '            dist.all_reduce(flat, group=self.copies)'
READ = 'batch_size=batch_size, rank=rank, world_size=world_size, device=device,'
CORRUPTIONS = [
    Corruption('tensor: gradients of norms are not summed', 'tensor_manual.py', {SUM: ''},
               'tensor 2', 2, 'all-reduce (sum) is missing over 2 ranks'),
    Corruption('tensor: they are averaged', 'tensor_manual.py', {SUM: SUM[:-1] + '; total /= self.ranks.size\n'},
               'tensor 2 manual', 2, '1/2 of the right one'),
    Corruption('tensor: backward of all-gather does not sum', 'tensor_manual.py',
               {GATHERED: f'    return {OWN_CHUNK}.contiguous() * 2, None, None'},
               'tensor 2', 2, 'another direction'),
    Corruption('tensor: backward of reduce-scatter is doubled', 'tensor_manual.py',
               {SCATTERED: SCATTERED.replace('ks),', 'ks) * 2,')},
               'tensor 2', 2, '2 times too large'),
    Corruption('tensor: norm counts uncut parameters twice', 'tensor_manual.py',
               {'dict.fromkeys(self.on_all_ranks(), self.ranks.size))]': '{})]'},
               'tensor 2', 2, 'counts what several ranks hold whole 2 times'),
    Corruption('tensor: norm lacks the tensor axis', 'train_parallel.py',
               {'norm_groups = tensor.norm_groups() if tensor else ()': 'norm_groups = ()'},
               'tensor 2', 2, 'counts only what rank'),
    Corruption('tensor: targets are counted once', 'train_parallel.py', {'    targets *= config.tensor_parallel\n': ''},
               'tensor 2', 2, '2 times too large'),
    Corruption('tensor: clipped before the partial sums', 'train_parallel.py',
               {'    if tensor:\n        tensor.sum_partial_gradients()\n': '', '    # The step is skipped if loss': '    if tensor:\n        tensor.sum_partial_gradients()\n    # The step is skipped if loss'},
               'tensor 2', 2, 'all-reduce (sum) is missing over 2 ranks'),
    Corruption('context: a hop of the ring drops the sum', 'context_manual.py',
               {'grad_kv if hop is None else grad_kv.add_(hop.wait())': 'grad_kv if hop is None else (hop.wait(), grad_kv)[1]'},
               'context 2 ring', 2, 'another direction'),
    Corruption('context: gather averages the gradients of keys', 'context_manual.py',
               {'grad_k, grad_v = received.sum(0)': 'grad_k, grad_v = received.mean(0)'},
               'context 2 gather', 2, 'another direction'),
    Corruption('context: positions start anew on each rank', 'context_manual.py',
               {'x.shape[1])[1][:, mine]': 'x.shape[1])[1][:, mine - mine[0]]'},
               'context 2 ring', 2, 'another direction'),
    Corruption('context: a tile sees one key too many', 'context_manual.py',
               {'slice(begin, last), False': 'slice(begin, max(begin + 1, last - 1)), False'},
               'context 2 ring', 2, 'another direction'),
    Corruption('experts: fully_shard divides by its own ranks', 'fsdp.py',
               {'        module.set_gradient_divide_factor(mesh.size())': '        pass'},
               'experts 2', 2, '2 times too large', EXPERTS),
    Corruption('experts: by hand divided by its own ranks', 'fsdp_manual.py',
               {'            total.mul_(1 / self.world_size)': '            total.mul_(1 / group.ranks)'},
               'experts 2 manual', 2, '2 times too large', EXPERTS),
    Corruption('experts: gradients of rows are doubled', 'expert_manual.py',
               {WAY_BACK: WAY_BACK.replace('group),', 'group) * 2,')},
               'experts 2', 2, 'another direction', EXPERTS),
    Corruption('experts: gradients of rows do not travel back', 'expert_manual.py',
               {WAY_BACK: WAY_BACK.replace('return ', 'return 0 * ')},
               'experts 2', 2, 'no gradient at all', EXPERTS),
    Corruption('experts: rows come back in the wrong order', 'expert_manual.py',
               {'TakeRows.apply(rows, place, order[:, None])': 'TakeRows.apply(rows, order, place[:, None])'},
               'experts 2', 2, 'another direction', EXPERTS),
    Corruption("experts: not in the other ranks' norm", 'optim.py', {SQUARES: '            pass\n'},
               'experts 2', 2, 'each rank has the norm of its own shards', EXPERTS),
    Corruption("by hand: other ranks' gradients are not added", 'fsdp_manual.py',
               {'                average.add_(other)': '                pass'},
               'manual zero 3', 2, 'data ranks count'),
    Corruption('by hand: sum instead of average', 'fsdp_manual.py',
               {'            total.mul_(1 / self.world_size)': '            pass'},
               'manual zero 3', 2, '2 times too large'),
    Corruption('by hand: earlier micro-steps are dropped', 'fsdp_manual.py',
               {'        return gradient if total is None else total.add_(gradient)': '        return gradient'},
               'manual zero 3', 2, 'micro-steps count 0, 1 times'),
    Corruption('by hand: stale weights after the step', 'fsdp_manual.py',
               {'            unit.register_shards()\n            if unit.room.occupant is not None:\n                self.occupy(unit.room, None)': '            unit.register_shards()'},
               'manual zero 2', 2, 'loss of step 2'),
    Corruption('by hand: rounded to bf16 before the sum', 'fsdp_manual.py',
               {'[gradient.to(dtype) for gradient in gradients]': '[gradient.bfloat16().to(dtype) for gradient in gradients]'},
               'manual zero 3', 2, 'bfloat16'),
    Corruption('by hand: nothing for matrices that ranks do not divide', 'fsdp_manual.py',
               {'weight.add_to_shard(flat)': 'weight.add_to_shard(flat * (weight.shape[0] % group.ranks == 0))'},
               'manual zero 3', 3, 'no gradient at all'),
    Corruption('hsdp by hand: no all-reduce over replicas', 'fsdp_manual.py',
               {'            dist.all_reduce(total, group=group.replicate_group)\n': '            total.mul_(dist.get_world_size(group.replicate_group))\n'},
               'manual hsdp', 4, 'missing over 2 ranks'),
    Corruption('pipeline: tied embedding is not summed', 'pipeline_manual.py',
               {'            mine.add_(theirs)': '            pass'},
               'pipeline 2', 2, 'all-reduce (sum) is missing over 2 ranks', TIED),
    Corruption('pipeline: embedding and head not summed over copies', 'pipeline_manual.py',
               {'[*blocks, rest] if': '[*blocks] if'},
               'pipeline 2', 4, 'all-reduce (sum) is missing over 2 ranks'),
    Corruption('pipeline: norm lacks the stages', 'train_pipeline.py',
               {'norm_groups = [*model.norm_groups(), *(': 'norm_groups = [*('},
               'pipeline 2', 2, 'counts only what rank'),
    Corruption('pipeline: norm counts a tied embedding twice', 'pipeline_manual.py',
               {'{self.module.embed.weight: 2} if': '{} if'},
               'pipeline 2', 2, 'counts what several ranks hold whole 2 times', TIED),
    Corruption('pipeline: gradients of the copies are averaged', 'pipeline_manual.py',
               {OF_COPIES: f'{OF_COPIES}; flat /= dist.get_world_size(self.copies)'},
               'pipeline 2', 4, '1/2 of the right one'),
    Corruption('pipeline: activations are rounded to bf16 on the wire', 'pipeline_manual.py',
               {'self.result.contiguous()': 'self.result.bfloat16().to(self.result.dtype).contiguous()'},
               'pipeline 2', 2, 'bfloat16'),
    Corruption('fsdp: norm is that of the own shard', 'optim.py', {SQUARES: '            pass\n'},
               'fsdp', 2, 'each rank has the norm of its own shards'),
    Corruption('fsdp: counts padding as targets', 'train_fsdp.py',
               {'    loss_scale = world_size / targets': '    targets = global_batch_size * config.block_size\n    loss_scale = world_size / targets'},
               'fsdp', 2, 'another number of tokens'),
    Corruption('fsdp: one rank is a step ahead in the data', 'train_fsdp.py',
               {'first_sample=step * global_batch_size,': 'first_sample=(step + rank) * global_batch_size,'},
               'fsdp', 2, 'another direction'),
    Corruption('fsdp: a rank skips its update', 'train_fsdp.py',
               {'    scaler.step(opt, skip=skip)': '    scaler.step(opt, skip=torch.tensor(float(rank == 1)))'},
               'fsdp', 2, 'though the gradient is right'),
    Corruption('ddp: loss divided by the ranks twice', 'train_ddp.py',
               {'    loss_scale = world_size / targets': '    loss_scale = 1 / targets'},
               'ddp', 2, '1/2 of the right one'),
    Corruption('ddp: all ranks read the data of the first', 'train_ddp.py', {READ: READ.replace('rank=rank', 'rank=0')},
               'ddp', 2, 'data ranks count 2, 0 times'),
    Corruption('fsdp: a mean of means', 'train_fsdp.py',
               {'loss_sum * loss_scale': 'loss_sum / (batch[1] >= 0).sum() / run.layout.micro_steps'},
               'fsdp', 2, 'a mean of means'),
    Corruption("diloco: a replica counts another one's targets", 'train_diloco.py',
               {' + replica * share, share)': ', share)'},
               'diloco', 2, 'another number of tokens'),
]  # fmt: skip


def corrupt(corruption, folder):
    """A copy of the code in `folder`, with the fault in it."""
    shutil.copytree(
        REPO, folder, ignore=shutil.ignore_patterns('.*', 'docs', 'assets', 'tests', 'out', 'data', '__pycache__')
    )
    path = Path(folder, corruption.file)
    text = path.read_text()
    for old, new in corruption.changes.items():
        assert text.count(old) == 1, f'{corruption.file} has {text.count(old)} times: {old}'
        text = text.replace(old, new)
    path.write_text(text)


def prove(folder, corruption, *more):
    """What prove.py of the code in `folder` writes about the corruption's layout: (exit code, its JSON, output)."""
    keys = [f'--nproc={corruption.ranks}', f'--layouts={corruption.layout}', '--arch=llama', *corruption.keys, *more]
    command = [sys.executable, 'prove.py', *keys, '--output=prove.json']
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    path = Path(folder, 'prove.json')
    return ended.returncode, json.loads(path.read_text()) if path.exists() else {}, ended.stdout + ended.stderr


if __name__ == '__main__':
    for corruption in CORRUPTIONS:
        with tempfile.TemporaryDirectory() as folder:
            corrupt(corruption, Path(folder, 'code'))
            code, found, said = prove(Path(folder, 'code'), corruption)
            rows = found.get('layouts') or [{}]
            lines = rows[-1].get('lines', [said])
            is_named = any(corruption.says in line for line in lines)
            verdict = 'found' if code == 1 else f'exit {code}'
            print(f'{corruption.name:58} {verdict} {"named" if is_named else "NOT NAMED"}', flush=True)
            print(*(f'    {line}' for line in lines[: 9 if not is_named else 2]), sep='\n', flush=True)
