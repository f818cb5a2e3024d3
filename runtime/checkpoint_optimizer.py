"""
Reads an optimizer's state, which checkpoints hold in fp32, into what this optimizer keeps of it: in bfloat16 or int8
(moments.py), in host memory (offload.py). For checkpoint.load().
"""

from typing import NamedTuple

import torch

import moments
from offload import StateOnHost
from optim import Elementwise
from pieces import in_parts, local
from runtime.checkpoint_index import read_into
from runtime.checkpoint_parts import CutTensor, in_whole


class Slot(NamedTuple):
    """One tensor of an optimizer's state, such as the exp_avg of a parameter."""

    key: str  # in the checkpoint
    index: int  # of the parameter in the optimizer
    name: str  # of the slot
    parameter: torch.Tensor
    name_of_parameter: str
    form: moments.Form | None  # of a moment that this optimizer does not keep in fp32
    value: torch.Tensor | None  # to be filled, in fp32
    target: torch.Tensor | CutTensor  # the same as a part of the whole; with a form only its shape and dtype are used


def slots_to_fill(names, saved, optimizer, optimizer_key, share):
    """A Slot for everything that the checkpoint has of this optimizer's parameters."""
    forms, zeros_like, _ = kept_by(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group['params']]
    index_of = {f'{optimizer_key}.{names[parameter]}': index for index, parameter in enumerate(parameters)}
    slots = []
    for key, tensor in saved.items():
        of_parameter, _, slot = key.rpartition('.')
        if of_parameter not in index_of:
            continue
        index = index_of[of_parameter]
        parameter, form, value = parameters[index], None, None
        if not tensor.shape:
            value = torch.zeros((), dtype=tensor.dtype)  # `step`
        elif parameter in forms:
            form = forms[parameter]
        else:
            value = zeros_like(parameter, dtype=tensor.dtype)  # a moment is sharded like its parameter
        target = in_whole(share, names[parameter], parameter.detach() if value is None else value)
        slots.append(Slot(key, index, slot, parameter, names[parameter], form, value, target))
    names_of = {parameter: [] for parameter in parameters}
    for slot in slots:
        names_of[slot.parameter].append(slot.name)
    for group in optimizer.param_groups:  # a parameter that was never trained has none
        kinds = {frozenset(names_of[parameter]) for parameter in group['params'] if names_of[parameter]}
        if len(kinds) > 1:
            found = ' and '.join(','.join(sorted(kind)) for kind in sorted(kinds, key=sorted)[:2])
            raise ValueError(f'the checkpoint has for some weights {found} of the optimizer: copy it again')
    return slots


def fill_optimizer(path, index, optimizer, slots, share):
    """Give the optimizer the state that was read into the slots, after reading those in fewer bits."""
    state = {}  # index of a parameter -> {slot: tensor}, the form of optimizer.state_dict()
    for slot in slots:
        if not slot.form:
            state.setdefault(slot.index, {})[slot.name] = slot.value
    forms, _, at_rest = kept_by(optimizer)
    if forms:
        for slot, found in read_in_fewer_bits(path, index, [slot for slot in slots if slot.form], share):
            state.setdefault(slot.index, {}).update({name: at_rest(tensor) for name, tensor in found.items()})
    # load_state_dict also moves each tensor to where this optimizer wants it: fused AdamW has `step` on the GPU.
    optimizer.load_state_dict({'state': state, 'param_groups': optimizer.state_dict()['param_groups']})


def read_in_fewer_bits(path, index, slots, share, part_bytes=2**28):
    """Iterate over (slot, {name: tensor} as the optimizer keeps it) of slots with a form.

    A checkpoint holds them in fp32, and there may be no memory for all of those at once. So each rank reads part_bytes
    of them, rounds these, and goes on with the next.
    """

    for part in in_parts(slots, lambda slot: 4 * local(slot.parameter).numel(), part_bytes):
        values = [torch.zeros_like(slot.parameter, requires_grad=False) for slot in part]
        pairs = [*zip(part, values, strict=True)]
        read_into(path, index, {slot.key: in_whole(share, slot.name_of_parameter, value) for slot, value in pairs})
        for slot, value in pairs:
            yield slot, moments.from_fp32(slot.form, slot.parameter, slot.name, local(value))


def kept_by(optimizer):
    """How an optimizer keeps its moments: ({parameter: moments.Form} of those that are not fp32, a function that makes
    one to be filled, and one that puts one in fewer bits where it belongs)."""
    on_host = isinstance(optimizer, StateOnHost)
    itself = optimizer.optimizer if on_host else optimizer
    forms = itself.forms if isinstance(itself, Elementwise) else {}  # PyTorch's own optimizers have none
    return (forms, optimizer.zeros_like, optimizer.at_rest) if on_host else (forms, torch.zeros_like, lambda x: x)
