"""
A train script of this project as one rank runs it, and what prove.py wants to know about it: a Record. The script runs
as it is; around some of the functions that it calls there is one that notes what goes through.

    record = note_script('train_fsdp.py', ['--zero_stage=2', ...])       # in a rank of ranks.py
    record = note_script('train_ddp.py', [...], float64=True, in_parts=True)

All weights are disturbed first, the same in every layout, so that no gradient is 0 and no two rows are equal: LoRA's
second matrix begins with zeros, a norm's weights with ones.
"""

import contextlib
import functools
import itertools
import json
import math
import os
import runpy
import sys
import zlib
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

import data
import deepspeed_engine
import optim
from experts import Router
from huggingface import finetune, loading, lora
from huggingface.files import Weights
from layout import WHOLE
from model import GPT
from proving.judge import Record
from proving.precision import FLOAT32, gap_of_choice, in_float64
from runtime import meter, rollouts
from runtime.watch import Watch
from system import processes
from system.files import ROOT

SMALL_GRADIENT = 1e-3  # if the norm of all is clipped to 1, the gradient of one of 100,000 weights is 3e-3 or so
MARGIN = 2e-6  # of a router's probabilities, which layouts have been seen to have 5e-7 apart
DISTURBED = 0.005  # standard deviation of what is added to each weight


# --- float64 ----------------------------------------------------------------------------------------------------------


def has_experts(model):
    """In place of finetune.has_uneven_experts(), in float64, which grouped_mm does not take."""
    return any('.experts.' in name for name, _ in model.named_parameters())


def as_stored(read):
    """A function that reads files, for in_float64(): the library for them looks up what torch.float32 is."""

    @functools.wraps(read)
    def call(*args):
        with mock.patch.object(torch, 'float32', FLOAT32):
            return read(*args)

    return call


def as_drawn_in_fp32(draw):
    """A function that draws initial values, for in_float64(): float64 takes other bits of the generator."""

    @functools.wraps(draw)
    def call(*args):
        torch.set_default_dtype(FLOAT32)
        try:
            return draw(*args).to(torch.float64)
        finally:
            torch.set_default_dtype(torch.float64)

    return call


@contextlib.contextmanager
def script_in_float64():
    """A context in which a script computes in float64 what would be fp32, from the same initial values."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(in_float64())
        for place, name in ((Weights, 'read'), (loading, 'whole_model')):
            stack.enter_context(mock.patch.object(place, name, as_stored(getattr(place, name))))
        for place, name in ((GPT, 'initial_value'), (lora, 'initial_lora_a')):
            stack.enter_context(mock.patch.object(place, name, as_drawn_in_fp32(getattr(place, name))))
        stack.enter_context(mock.patch.object(finetune, 'has_uneven_experts', has_experts))
        yield


# --- what goes through ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def noting_gaps(gaps):
    """A context in which `gaps` gets gap_of_choice() of each batch of a router."""
    choose = Router.forward

    def note_gap(router, x, *args):
        said = choose(router, x, *args)
        scores, of_groups = router.ranked(said[2].softmax(-1) if router.scores == 'softmax' else said[2].sigmoid())
        gaps.append(gap_of_choice(scores, router.k))
        if of_groups is not None:
            gaps.append(gap_of_choice(of_groups, router.groups_per_token))
        return said

    with mock.patch.object(Router, 'forward', note_gap):
        yield


@contextlib.contextmanager
def same_answers(path, reward=lambda answer: answer.reward):
    """A context in which train_grpo.py or train_distill.py keeps its answers in a file, or, where there is one, learns
    from those. reward: what an Answer is worth."""
    steps = torch.load(path, weights_only=False) if os.path.exists(path) else []
    known, write = len(steps), rollouts.write_groups

    def groups_of(model, run, step, beat):
        if step >= known:
            of_ranks = [None] * run.world_size
            dist.all_gather_object(of_ranks, write(model, run, step, beat))
            groups = sum(of_ranks, [])
            steps.append([[answer._replace(reward=reward(answer)) for answer in group] for group in groups])
        of_rank = len(steps[step]) // run.world_size
        return steps[step][run.rank * of_rank :][:of_rank]

    with mock.patch.object(rollouts, 'write_groups', groups_of):
        yield
    if not known and int(os.environ.get('RANK', 0)) == 0:
        torch.save(steps, path)


def whole(tensor):
    """A copy of a tensor on the host, of a DTensor all of it. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def gradient_of(parameter):
    return whole(parameter.grad) if parameter.grad is not None else torch.zeros(parameter.shape, dtype=parameter.dtype)


def noise_of(name, shape):
    """Random fp32 numbers for a parameter, which depend on its name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=FLOAT32, device='cpu')


def place_of(part):
    """Where a layout.Slice lies, as a Record says it."""
    if part is None or part.dim is None:
        return None
    return part.dim, torch.cat([torch.arange(first, first + length) for first, length in part.ranges])


class Notes:
    """Fills in the Record of a run: its methods stand in the place of functions that the script calls."""

    def __init__(self, in_parts):
        self.record, self.in_parts = Record(), in_parts
        self.model, self.slices, self.before = None, {}, {}
        self.sums = []  # in_parts: the gradients so far at each micro-step of the first step
        self.from_config, self.clip, self.batches = optim.from_config, optim.clip_grad_norm_, data.batches
        self.engine_step = deepspeed_engine.step

    def named(self):
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def note_model(self, model, config, device, share=WHOLE, **options):
        """In place of optim.from_config(), which is called when the model has its first weights."""
        self.model, self.slices = model, share.slices
        self.disturb()
        optimizer = self.from_config(model, config, device, share, **options)
        # AdamW's first update is lr * g / (|g| + eps), which is lr * sign(g): where g is nearer to 0 than its rounding,
        # the weight goes either way, and the next step is another computation. With an eps far above that it is not.
        for group in optimizer.param_groups:
            group['eps'] = SMALL_GRADIENT
        return optimizer

    @torch.no_grad()
    def disturb(self):
        for name, parameter in self.named().items():
            part = self.slices.get(name)
            noise = DISTURBED * noise_of(name, part.shape if part else parameter.shape)
            noise = (part.of(noise) if part else noise).to(parameter.device)
            if isinstance(parameter, DTensor):
                noise = distribute_tensor(noise, parameter.device_mesh, parameter.placements, src_data_rank=None)
                noise, parameter = noise.to_local(), parameter.to_local()
            parameter.copy_(parameter.to(FLOAT32) + noise)  # rounded to fp32, in float64, too

    def note_batches(self, *args, **options):
        """In place of data.batches(): each batch is asked for when the one before has added its gradients."""
        for batch in self.batches(*args, **options):
            self.note_sum()
            yield batch

    def note_sum(self):
        if self.in_parts and not self.record.norms:
            self.sums.append({name: gradient_of(p) for name, p in self.named().items()})

    def note_step(self, named, gradient_of, whole):
        """Before each update: the gradients of the first step, and in the second step what the first has updated."""
        if not self.record.norms:
            self.record.places = {name: place_of(self.slices.get(name)) for name in named}
            self.record.gradients = {name: gradient_of(p) for name, p in named.items()}
            self.before = {name: whole(p) for name, p in named.items()}
        elif not self.record.updates:
            self.record.updates = {name: whole(p) - self.before[name] for name, p in named.items()}

    def note_gradients(self, parameters, *args, **options):
        """In place of optim.clip_grad_norm_()."""
        self.note_sum()
        self.note_step(self.named(), gradient_of, whole)
        norm = self.clip(parameters, *args, **options)
        self.record.norms.append(float(norm))
        return norm

    def note_engine(self, engine, *args):
        """In place of deepspeed_engine.step(): the engine sums, clips and updates by itself."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

        named = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
        self.note_step(named, lambda p: whole(safe_get_full_grad(p)), lambda p: whole(safe_get_full_fp32_param(p)))
        self.engine_step(engine, *args)
        self.record.norms.append(float(engine.get_global_grad_norm()))

    def parts(self):
        """What each micro-step has added to the first step's gradients: {number of the micro-step: gradients}."""
        steps = itertools.pairwise(self.sums)
        return {n: {name: after[name] - before[name] for name in after} for n, (before, after) in enumerate(steps)}


def note_script(script, arguments, float64=False, in_parts=False, answers=None):
    """
    The Record of this rank's run of a script: of at least two steps, as the first update is seen in the second one.

    in_parts: also note the gradient of each micro-step of the first step, by its number. answers: the file that holds
    what train_grpo.py's runs learn from; the first of them writes it.
    """
    notes = Notes(in_parts)
    sys.argv = [script, *arguments]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(meter, 'STEPS_BEFORE_PROFILING', math.inf))
        stack.enter_context(mock.patch.object(processes, 'leave', lambda code=0: None))  # this process goes on
        # A disturbed model no longer is that of its folder.
        stack.enter_context(mock.patch.object(Watch, 'self_test', lambda *args, **options: None))
        if float64:
            stack.enter_context(script_in_float64())
        if answers:
            # A model that is right always or never would learn nothing, so the rewards are as good as random.
            stack.enter_context(
                same_answers(answers, lambda answer: zlib.crc32(bytes(str(answer.ids), 'utf-8')) / 2**32)
            )
        stack.enter_context(noting_gaps(gaps := []))
        stack.enter_context(mock.patch.object(optim, 'from_config', notes.note_model))
        stack.enter_context(mock.patch.object(optim, 'clip_grad_norm_', notes.note_gradients))
        stack.enter_context(mock.patch.object(deepspeed_engine, 'step', notes.note_engine))
        stack.enter_context(mock.patch.object(data, 'batches', notes.note_batches))
        try:
            run = runpy.run_path(os.path.join(ROOT, script), run_name='__main__')['run']
        except (ValueError, OSError) as error:
            if not notes.record.gradients:  # what the script refuses
                raise
            raise RuntimeError(f'after {len(notes.record.norms)} steps: {error}') from error
    if run.rank == 0:  # it has written the file
        with open(f'{run.config.out_dir}/metrics.jsonl') as file:
            notes.record.losses = [row['loss'] for row in map(json.loads, file) if 'loss' in row]
    if in_parts:
        notes.record.parts, count = notes.parts(), functools.partial(run.train_data.count_targets, run.config.seed)
        notes.record.targets = [count(number, 1) for number in range(run.config.global_batch_size)]
    notes.record.gap = min(gaps, default=math.inf)
    return notes.record
