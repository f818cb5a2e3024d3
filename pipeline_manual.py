"""
Pipeline parallelism by hand: every rank holds some of the blocks, and activations travel from rank to rank (1F1B, arXiv
2006.09503; interleaved, arXiv 2104.04473).

    stage = pipeline_manual.Stage(model, rank, stages, chunks)  # its blocks; embedding or head at the ends
    pipeline = pipeline_manual.Pipeline(stage, mesh, batch_size)  # mesh: (stages, copies, ranks of each matrix)
    with pipeline.weights_cast():
        for actions in pipeline_manual.timetable(stages, chunks, micro_steps):  # what each stage does at one time
            ...  # pipeline.forward(action, x, y) or pipeline.backward(action, 1 / targets), or nothing
            pipeline.send_and_receive(actions)
    pipeline.sum_gradients()

The blocks are divided into *parts*, each of which a micro-step runs through in one go. All parts have equally many
blocks, unless the output head is so much work that the last part gets fewer (blocks_of_parts()). Part k is on
stage k % stages: with one chunk stage i holds part i, with two chunks it holds parts i and i + stages.

What 4 stages do with 4 micro-steps. Time runs to the right; F and B are forward and backward of a micro-step:

    stage 0  F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3
    stage 1  .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .
    stage 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .
    stage 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .
             warm-up             steady          drain

Who waits for whom?     All ranks know the whole timetable. The result of an action leaves as soon as the action is
                        done, and each rank posts all its messages of one column together, so no send waits for a
                        receive that is posted behind it.
What crosses the wire?  Between two parts, for every micro-step, (batch_size, block_size, n_embd) numbers in
                        compute_dtype: activations forward, and their gradients back. With tensor parallelism inside a
                        stage (tensor_manual.py) each rank sends its own part of the block_size. Once per step the
                        copies of a stage sum their fp32 gradients, and the first and the last stage those of a tied
                        embedding. With Muon each copy computes some of the updates and the others receive them.
What is kept?           What autograd needs of a micro-step, from its forward to its backward. With one chunk, stage i
                        of p keeps this for at most p - i micro-steps, however many there are, because each backward
                        runs as early as it can.
What is lost?           The dots, called the bubble: (stages - 1) / (chunks * micro_steps) of the time of the work.
"""

from collections import namedtuple
from contextlib import contextmanager
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn

import muon
from layout import FP32, counted, numbers
from model import GPT, LLAMA_STYLE

Action = namedtuple('Action', 'kind part micro_step')  # kind: 'forward' or 'backward'


# --- how the blocks are divided ---------------------------------------------------------------------------------------


def check(keys, layout, shape):
    """
    Lines for the log. Raises ValueError unless every part has a block and there are enough micro-steps. With several
    chunks their number must be a multiple of the stages, which otherwise would wait for each other in the order of
    arXiv 2104.04473.
    """
    if shape.n_experts:
        raise ValueError(
            f'n_experts={shape.n_experts}: train_pipeline.py has no mixtures of experts: use train_fsdp.py'
        )
    stages, chunks, n_layer, micro_steps = layout.stage, layout.chunks, keys['n_layer'], layout.micro_steps
    parts, pipelines = stages * chunks, layout.replicate
    if chunks > 1 and stages == 1:
        raise ValueError(f'pipeline_chunks={chunks} with pipeline_stages=1: expected 1, or more on 2 or more stages')
    if n_layer < parts:
        raise ValueError(
            f'n_layer={n_layer} is less than {parts} = pipeline_stages={stages} x pipeline_chunks={chunks}: '
            f'each part needs a block, so use {n_layer} parts or fewer'
        )
    if micro_steps < stages or (chunks > 1 and micro_steps % stages):
        several = f'a multiple of pipeline_stages={stages}' if chunks > 1 else f'one per stage, {stages}, or more'
        enough = -(-micro_steps // stages) * stages * keys['batch_size'] * pipelines
        raise ValueError(
            f'global_batch_size={keys["global_batch_size"]} is {counted(micro_steps, "micro-step")} of batch_size='
            f'{keys["batch_size"]} on {counted(pipelines, "pipeline")}: expected {several}; use '
            f'--global_batch_size={enough}, or another batch_size'
        )
    blocks = blocks_of_parts(keys, parts)
    blocks = counted(blocks[0], 'block') if len({*blocks}) == 1 else f'{", ".join(map(str, blocks))} blocks'
    return [
        f'pipeline: {counted(stages, "stage")} x {counted(chunks, "chunk")} of {blocks}; '
        f'{counted(pipelines, "pipeline")}; bubble {stages - 1}/{chunks * micro_steps} of the work'
    ]


def blocks_of_parts(config, parts):
    """
    [number of blocks] of each part of a pipeline. All parts work at the same time and wait for the slowest, so the
    blocks are divided such that the largest amount of work of any part is smallest. The last part also has the head.

    config: a run's keys, with those of the model; n_layer is `parts` or more.
    """
    if parts == 1:
        return [config['n_layer']]
    choices = []
    for last in range(1, config['n_layer'] // parts + 1):
        each, more = divmod(config['n_layer'] - last, parts - 1)
        # Later parts get the one block more, because earlier stages keep the activations of more micro-steps.
        choices.append([each + (part >= parts - 1 - more) for part in range(parts - 1)] + [last])
    head = head_in_blocks(config)
    return min(choices, key=lambda blocks: (max(*blocks[:-1], blocks[-1] + head), -blocks[-1]))


def head_in_blocks(config):
    """The work of the output head in units of a block's, counted in multiplications per token. A token multiplies each
    weight once, and in causal attention on average half of block_size keys and as many values."""
    C, H, K, D, M = (config[key] for key in ('n_embd', 'n_head', 'n_kv_head', 'head_dim', 'mlp_hidden_dim'))
    matrices = 3 if config['arch'] in LLAMA_STYLE else 2
    block = C * (H + 2 * K) * D + H * D * C + matrices * C * M + config['block_size'] * H * D
    return config['vocab_size'] * C / block


# --- what a stage does when -------------------------------------------------------------------------------------------


def timetable(stages, chunks, micro_steps, backward=True):
    """[[Action or None of stage 0, of stage 1, ...], ...], one list for each time. backward=False: only forwards.

    Each stage does its actions in a fixed order, see order_of_stage(), and begins the next one as soon as it has come
    by what it needs from another stage. A forward and a backward count as one unit of time each.
    """
    queues = [order_of_stage(stage, stages, chunks, micro_steps, backward) for stage in range(stages)]
    ready, times = {Action('forward', 0, micro_step) for micro_step in range(micro_steps)}, []
    while any(queues):
        actions = [queue[0] if queue and queue[0] in ready else None for queue in queues]
        assert any(actions), f'{stages=} {chunks=} {micro_steps=}: all wait for each other at {[q[:1] for q in queues]}'
        times.append(actions)
        for queue, action in zip(queues, actions, strict=True):
            if action:
                queue.pop(0)
                ready.add(used_by(action, last=stages * chunks - 1))
    return times


def order_of_stage(stage, stages, chunks, micro_steps, backward=True):
    """The Actions of a stage: warm-up (forwards), steady (one forward, one backward), drain (backwards).

    With several chunks the micro-steps go in groups of `stages`: a group goes through the first chunk, then the same
    group through the second one. The warm-up is the shortest after which no later stage has to wait in between.
    """
    order = [
        (chunk, micro_step)
        for first in range(0, micro_steps, stages)
        for chunk in range(chunks)
        for micro_step in range(first, min(first + stages, micro_steps))
    ]
    forwards = [Action('forward', chunk * stages + stage, micro_step) for chunk, micro_step in order]
    if not backward:
        return forwards
    backwards = [Action('backward', (chunks - 1 - chunk) * stages + stage, micro_step) for chunk, micro_step in order]
    to_the_end = stages - 1 - stage  # stages after this one
    warm_up = to_the_end if chunks == 1 else 2 * to_the_end + (chunks - 1) * stages
    steady = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
    return [*forwards[:warm_up], *steady, *backwards[max(0, len(order) - warm_up) :]]


def used_by(action, last):
    """The Action that needs the result of this one, or None. last: the number of the last part."""
    kind, part, micro_step = action
    if kind == 'forward':
        return Action(kind, part + 1, micro_step) if part < last else Action('backward', part, micro_step)
    return Action(kind, part - 1, micro_step) if part > 0 else None


# --- what a stage holds -----------------------------------------------------------------------------------------------


class Stage(GPT):
    """The parts of a GPT that are on one stage. Parameters keep their names: `blocks.7.attn.qkv.weight`.

    The embedding is with part 0, the final norm and the head with the last part. A tied embedding is on both of these
    stages, and under both of its names, so that optimizer and checkpoint treat it as they do in the whole model."""

    def __init__(self, model, stage, stages, chunks, share=None):
        """model: on the meta device, so that what other stages hold costs nothing. share: the Share that is told what
        other stages hold."""
        nn.Module.__init__(self)
        self.config, self.compute_dtype, self.loss_kernel = model.config, model.compute_dtype, model.loss_kernel
        self.last = stages * chunks - 1
        self.borders = [0, *accumulate(blocks_of_parts(model.config.to_dict(), stages * chunks))]
        is_first, is_last = stage == 0, stage == stages - 1
        self.holds_tied = model.config.tie_embeddings and (is_first or is_last)
        self.rotary, self.routers = model.rotary, []
        self.embed = model.embed if is_first or self.holds_tied else None
        self.pos_embed = model.pos_embed if is_first else None
        self.drop = model.drop
        parts = range(stage, stages * chunks, stages)
        # Not a ModuleList, which would count from 0 and so change the names.
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for part in parts for number in self.of(part)})
        self.final_norm = model.final_norm if is_last else None
        self.head = model.head if is_last or self.holds_tied else None
        if share is not None:  # what else is in a checkpoint: checkpoint.load() leaves it to the other stages
            here = {name for name, _ in self.named_parameters()}
            share.elsewhere = frozenset(name for name, _ in model.named_parameters() if name not in here)

    def of(self, part):
        """Numbers of the blocks of a part."""
        return range(*self.borders[part : part + 2])

    def forward(self, part, x, y=None, starts=None):
        """One part of GPT.forward. x: for part 0 tokens (B, T), for others activations (B, T, C). y, starts: as in GPT.

        Returns activations (B, T, C), but from the last part (loss_sum, ce_sum). T is block_size. After
        tensor_manual.Split the activations are those of this rank's tokens, (B, T/t, C).
        """
        positions, attention = self.places(x, 0, self.config.block_size, starts)
        h = self.embedded(x, positions) if part == 0 else x
        for number in self.of(part):
            h = self.blocks[str(number)](h, None, attention)
            if not isinstance(h, torch.Tensor):
                kind = type(h).__name__
                raise ValueError(f'block {number} returns a {kind}, and a stage hands on a tensor: use train_fsdp.py')
        return h if part < self.last else self.loss(self.finished(h), y)


def message_bytes(plan):
    """Bytes of the activations that one micro-step sends from one part to the next. With tensor parallelism a rank
    sends only some of the tokens."""
    return plan.tokens // plan.layout.tensor * plan.keys['n_embd'] * plan.compute_bytes


def holds(plan):
    """
    Whole weights, gradients and moments of the stage, its weights cast to half precision, and activations of all
    micro-steps on their way. 'reduction' is what the exchange of gradients needs beyond the room that activations
    leave.
    """
    keys, layout, stage, step = plan.keys, plan.layout, plan.stage, plan.activations
    stages, chunks = layout.stage, layout.chunks
    held, at_ends = numbers(plan.weights.all), numbers(plan.weights.root)
    largest_part = max(blocks_of_parts(keys, stages * chunks)[stage::stages])
    warm_up = stages - 1 - stage if chunks == 1 else 2 * (stages - 1 - stage) + (chunks - 1) * stages
    in_flight = min(warm_up + 1, chunks * layout.micro_steps)
    activations = in_flight * (largest_part * step.block + message_bytes(plan)) + step.outside_of_blocks()
    logits = step.loss if plan.ends[1] else 0
    exchanged = at_ends * (stages > 1)  # a tied embedding
    if layout.replicate > 1:
        exchanged = max(at_ends, numbers(plan.weights.block))
    parts = {
        'weights': FP32 * held,
        'gradients': FP32 * held,
        'optimizer': plan.moment_bytes(),
        'gathered': (held - at_ends) * plan.compute_bytes * (keys['dtype'] != 'float32'),
        'activations': activations,
        'logits': logits,
        'reduction': max(0, FP32 * exchanged - activations - logits),
    }
    on_host = in_flight * largest_part * step.block_on_host
    parts |= {'workspace': step.workspace} if step.workspace else {}
    return parts | ({'host activations': on_host} if on_host else {})


def sends(plan):
    """See "What crosses the wire?" above. Nothing comes before the first part, or behind the last."""
    layout, copies = plan.layout, plan.layout.replicate
    is_first, is_last = plan.ends
    messages = layout.micro_steps * (2 * layout.chunks - is_first - is_last)
    tied = [plan.model.embed.weight] if plan.model.holds_tied and layout.stage > 1 else []
    return {
        'point-to-point': messages * message_bytes(plan) + FP32 * numbers(tied),
        'all-reduce': 2 * (copies - 1) * FP32 * numbers(plan.weights.all) / copies,
    } | muon.sends(plan, copies)


# --- how it works with the others -------------------------------------------------------------------------------------


class Pipeline:
    """One stage at work: the forwards and backwards of its parts, and the messages between them."""

    def __init__(self, module, mesh, batch_size):
        """module: a Stage. mesh: DeviceMesh (stage, replicate, tensor). Each copy is one pipeline with its own
        data, and those along `tensor` hold each matrix together. batch_size: sequences of a micro-step."""
        self.module, self.group, self.copies = module, mesh.get_group('stage'), mesh.get_group('replicate')
        self.stages, self.stage = mesh.size(0), mesh.get_local_rank('stage')
        self.device = torch.device('cuda', torch.cuda.current_device()) if mesh.device_type == 'cuda' else 'cpu'
        self.shape = (batch_size, module.config.block_size // mesh.size(2), module.config.n_embd)
        self.kept = {}  # (part, micro-step) -> its input and output, from forward to backward
        self.result = None  # of the last action: activations, or their gradient
        self.arriving = {}  # Action that needs it -> (tensor, work to wait for)
        self.leaving = []  # [(tensor, work to wait for)] of the last exchange, kept alive until it has left
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)  # NCCL: the first call needs all ranks

    @contextmanager
    def weights_cast(self):
        """A context in which the blocks' weights are in compute_dtype, cast once for all micro-steps. The blocks would
        cast them, too, but autograd keeps what they cast until backward: one copy for each micro-step on its way."""
        dtype, masters = self.module.compute_dtype, [(m, m._parameters) for m in self.module.blocks.modules()]
        for module, parameters in masters:
            module._parameters = {name: p if p is None else p.to(dtype) for name, p in parameters.items()}
        yield
        for module, parameters in masters:
            module._parameters = parameters

    def forward(self, action, x, y, starts=None):
        """The forward of one part and micro-step. Returns the cross-entropy, a sum over tokens, or 0 before the last
        part. x, y, starts: the micro-step's batch, the same on all stages. Under no_grad() nothing is kept."""
        h, ce_sum = x, 0.0
        if action.part > 0:
            h = self.receive(action).requires_grad_(torch.is_grad_enabled())
        output = self.module(action.part, h, y, starts)
        if action.part == self.module.last:
            output, ce_sum = output
        if torch.is_grad_enabled():
            self.kept[action.part, action.micro_step] = h, output
        self.result = output.detach()
        return ce_sum

    def backward(self, action, loss_factor):
        """The backward of one part and micro-step. Gradients add up in .grad. loss_factor: 0-d tensor that multiplies
        the loss, a sum over the micro-step's tokens."""
        h, output = self.kept.pop((action.part, action.micro_step))
        gradient = loss_factor if action.part == self.module.last else self.receive(action)
        torch.autograd.backward(output, gradient)
        self.result = h.grad  # None for tokens, of part 0

    def receive(self, action):
        """The tensor that an action needs from another stage. Waits for it; on a GPU the host does not."""
        tensor, work = self.arriving.pop(action)
        work.wait()
        return tensor

    def send_and_receive(self, actions):
        """Send the result of this stage's action to the stage that needs it, and begin to receive what other stages'
        actions have for this one. actions: one list of the timetable. All stages call this once for each list."""
        operations, users = [], []
        for source, action in enumerate(actions):
            user = used_by(action, self.module.last) if action else None
            target = user.part % self.stages if user else source
            if source == self.stage != target:
                operation, tensor, peer = dist.isend, self.result.contiguous(), target
            elif target == self.stage != source:
                tensor = torch.empty(self.shape, dtype=self.module.compute_dtype, device=self.device)
                operation, peer = dist.irecv, source
            else:  # nothing to send, or a message between other stages
                continue
            operations.append(dist.P2POp(operation, tensor, group=self.group, group_peer=peer))
            users.append(user)
        # One batch: under NCCL it is one kernel, in which no message waits for another; gloo returns a work for each.
        works = dist.batch_isend_irecv(operations) if operations else []
        works = works * len(operations) if len(works) == 1 else works
        before, self.leaving = self.leaving, []
        for operation, user, work in zip(operations, users, works, strict=True):
            if operation.op is dist.irecv:
                self.arriving[user] = operation.tensor, work
            else:
                self.leaving.append((operation.tensor, work))
        # Sends of the time before: their receivers are posted by now, or will be without waiting for this rank.
        for _, work in before:
            work.wait()

    def losses(self, _, batches, beat):
        """As evaluation.validation.of_each_batch(): the last stage yields what it has computed."""
        batches, chunks = list(batches), (self.module.last + 1) // self.stages
        with self.weights_cast():
            for actions in timetable(self.stages, chunks, len(batches), backward=False):
                beat()
                if action := actions[self.stage]:
                    batch, source = batches[action.micro_step]
                    ce_sum = self.forward(action, *batch)
                    if action.part == self.module.last:
                        yield ce_sum, (batch[1] >= 0).sum(), source
                self.send_and_receive(actions)

    def sum_gradients(self):
        """Sum the gradients over the copies of this stage, a block at a time, and those of a tied embedding over the
        first and the last stage. Call it after the last backward of a step."""
        blocks = [[*block.parameters()] for block in self.module.blocks.values()]
        in_blocks = {parameter for block in blocks for parameter in block}
        rest = [parameter for parameter in self.module.parameters() if parameter not in in_blocks]
        for parameters in filter(None, [*blocks, rest] if dist.get_world_size(self.copies) > 1 else []):
            gradients = [parameter.grad.view(-1) for parameter in parameters]
            flat = torch.cat(gradients)  # one message, not twelve
            dist.all_reduce(flat, group=self.copies)
            torch._foreach_copy_(gradients, flat.split([gradient.numel() for gradient in gradients]))
        if self.module.holds_tied and self.stages > 1:
            mine = self.module.embed.weight.grad
            theirs = torch.empty_like(mine)
            peer = {'group': self.group, 'group_peer': self.stages - 1 - self.stage}
            both = [dist.P2POp(dist.isend, mine, **peer), dist.P2POp(dist.irecv, theirs, **peer)]
            for work in dist.batch_isend_irecv(both):
                work.wait()
            mine.add_(theirs)  # a + b on one, b + a on the other: the same bits

    def norm_groups(self):
        """As tensor_manual.Split.norm_groups(): the group of the stages, two of which hold a tied embedding."""
        return [(self.group, {self.module.embed.weight: 2} if self.module.holds_tied and self.stages > 1 else {})]
