"""
Which weights of a transformers model a fine-tuning run trains, and in which dtype the others are stored.

LoRA (arXiv 2106.09685): y = W x + (alpha / rank) B A x, with A (rank, in) and B (out, rank) trained and W frozen. B
begins as 0, so that at first LoRA changes nothing.

A weight that is trained needs an fp32 master, because its steps are small compared to it. A frozen weight takes no
steps, so frozen_dtype stores its matrix in bfloat16 or in 4 bits (nf4.py): see store_frozen(). Under FSDP the gather
casts stored weights to the dtype of computation; for a model that is not sharded, compute_from_stored() does.
"""

import contextlib
import functools
import math
import re

import torch
import torch.nn.functional as F
from torch import nn

from experts import multiply_by_expert, through_experts, where_of_each
from huggingface import nf4
from model import generator_of
from system.limits import OverLimit, at_most

# --- LoRA -------------------------------------------------------------------------------------------------------------


def freeze(model, pretrained):
    """Add LoRA, and freeze what is not trained: with LoRA everything except LoRA and modules_to_save; also what
    pretrained.freeze matches, and what text does not reach."""
    if pretrained.lora_rank:
        model.requires_grad_(False)
        for module, name in weights_with_lora(model, pretrained.lora_targets):
            if name != 'weight':
                add_lora_to_experts(module, name, pretrained)
                continue
            inputs, outputs = module.weight.shape if is_conv1d(module) else reversed(module.weight.shape)
            device = module.weight.device
            module.lora_A = nn.Parameter(torch.empty(pretrained.lora_rank, inputs, device=device))
            module.lora_B = nn.Parameter(torch.empty(outputs, pretrained.lora_rank, device=device))
            module.lora_scale, module.lora_dropout = scale_of_lora(pretrained), pretrained.lora_dropout
            module.register_forward_hook(add_lora)
        for name in modules_to_save(model, pretrained.modules_to_save):
            model.get_submodule(name).requires_grad_(True)
    if pretrained.freeze:
        parameters = dict(model.named_parameters())
        try:
            with at_most(seconds=2):
                frozen = [name for name in parameters if re.search(pretrained.freeze, name)]
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f'freeze={pretrained.freeze!r} is no regular expression: {error}') from error
        except OverLimit:
            raise ValueError(
                f'freeze={pretrained.freeze!r} tries too many ways to match a name: write it without a repetition '
                'inside a repetition'
            ) from None
        if not frozen:
            raise ValueError(f'freeze={pretrained.freeze!r} matches no parameter, as {min(parameters)}')
        for name in frozen:
            parameters[name].requires_grad_(False)
    for parameter in beside_text(model).values():  # DDP would wait for their gradients, and weights would still decay
        parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f'freeze={pretrained.freeze!r} leaves nothing to train')
    trained = (block for block in model.blocks if any(parameter.requires_grad for parameter in block.parameters()))
    for block in [*trained][:1]:
        block.register_forward_pre_hook(with_gradient)


def beside_text(model):
    """{name: parameter} of what a multimodal model has for images and sound, outside of its decoder and its head."""
    if model.config.get_text_config() is model.config:
        return {}
    reached = {*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if parameter not in reached}


def names_of_base(model):
    """The frozen weights of a model with LoRA, which the folder of its base has."""
    tensors = model.state_dict(keep_vars=True).items()
    return frozenset(name for name, tensor in tensors if not tensor.requires_grad and not is_lora(name))


def with_gradient(block, args):
    """Forward pre-hook of the first block with something to train. What comes before it may be frozen, and an input
    that needs no gradient would make it another graph than its equals: torch.compile would compile both."""
    x, *others = args
    return (x if x.requires_grad or not torch.is_grad_enabled() else x.detach().requires_grad_(), *others)


def add_lora(module, args, output):
    """Forward hook that adds LoRA to a linear layer or to GPT-2's Conv1D: W x + lora_scale * B A dropout(x)."""
    x = F.dropout(args[0], module.lora_dropout, module.training) if module.lora_dropout else args[0]
    return output + F.linear(F.linear(x, module.lora_A), module.lora_B) * module.lora_scale


@contextlib.contextmanager
def turned_off(model):
    """A context in which a model computes what its base does, to the bit, as it did before its first step; except for
    modules_to_save."""
    scales = {module: module.lora_scale for module in model.modules() if hasattr(module, 'lora_scale')}
    for module in scales:
        module.lora_scale = 0.0
    try:
        yield
    finally:
        for module, scale in scales.items():
            module.lora_scale = scale


def is_lora(name):
    """Whether this is the name of one of LoRA's two matrices."""
    return name.endswith(('.lora_A', '.lora_B'))


def scale_of_lora(pretrained):
    """The factor of B A x: alpha / rank. With lora_rslora (arXiv 2312.03732) it is alpha / sqrt(rank), so that high
    ranks learn as much as low ones."""
    rank = pretrained.lora_rank
    return pretrained.lora_alpha / (math.sqrt(rank) if pretrained.lora_rslora else rank)


def initial_lora_a(name, shape, seed):
    """Uniform in +-1 / sqrt(in), as a pure function of (seed, name). shape: (rank, in)."""
    return (2 * torch.rand(shape, generator=generator_of(seed, name)) - 1) * shape[1] ** -0.5


def weights_with_lora(model, targets):
    """[(module, name of its weight)] that lora_targets selects. 'all': the linear layers of the blocks; 'experts', or
    another end of their module's name: all matrices of a mixture's experts; else the end of a layer's or of a matrix's
    name. Raises ValueError for a target that matches none."""
    linear, stacked = {}, {}
    for block in model.blocks:
        for name, module in block.named_modules():
            if isinstance(module, nn.Linear) or is_conv1d(module):
                linear.setdefault(name, []).append((module, 'weight'))
            for matrices in matrices_of_experts(module):
                stacked.setdefault(f'{name}.{matrices}', []).append((module, matrices))
    places, chosen = linear | stacked, []
    for target in map(str.strip, targets.split(',')):
        ends = {name: (name, name.rpartition('.')[0]) if name in stacked else (name,) for name in places}
        found = [name for name in places if any(f'.{end}'.endswith(f'.{target}') for end in ends[name])]
        found = [*linear] if target == 'all' else found
        if not found:
            raise ValueError(f'lora_targets={targets!r}: no {target!r} among {", ".join(sorted(places))}')
        chosen += found
    return [place for name in dict.fromkeys(chosen) for place in places[name]]


def is_conv1d(module):
    """Whether a module is GPT-2's linear layer, whose weight is (in, out)."""
    return type(module).__name__ in ('Conv1D', 'StoredConv1D')


def modules_to_save(model, ends):
    """
    Names of the modules whose names have one of these ends, and of modules that share a parameter with one of them, so
    that tied weights stay tied. Raises ValueError for an end that no name has, and for a module that has LoRA.
    """
    names, chosen = [name for name, _ in model.named_modules(remove_duplicate=False) if name], []
    for end in ends:
        found = [name for name in names if f'.{name}'.endswith(f'.{end}')]
        if not found:
            own = {name.rpartition('.')[0] for name, _ in model.named_parameters(remove_duplicate=False)}
            known = ', '.join(name for name in names if name in own and not re.search(r'\.\d+\.', name))
            raise ValueError(
                f'modules_to_save={",".join(ends)}: no module is called {end!r}; outside of the blocks: {known}'
            )
        chosen += found
    parameters = {parameter for name in chosen for parameter in model.get_submodule(name).parameters()}
    for name in chosen:
        if any(is_lora(f'.{inner}') for inner, _ in model.get_submodule(name).named_parameters()):
            raise ValueError(
                f'modules_to_save={",".join(ends)}: {name} has LoRA, too; leave it out there or in lora_targets'
            )
    for name in names:
        own = model.get_submodule(name)._parameters.values()
        if any(parameter in parameters for parameter in own if parameter is not None):
            if not any(f'{name}.'.startswith(f'{other}.') for other in chosen):
                chosen.append(name)
    return list(dict.fromkeys(chosen))


def merge_lora(model, weights, pretrained):
    """The weights with LoRA merged, W + scale B A in place of W, and without lora_A and lora_B. model: a model of the
    class, to look up its layers."""
    merged = {name: tensor for name, tensor in weights.items() if not is_lora(name)}
    for name in weights:
        if name.endswith('.lora_A'):
            place = name.removesuffix('.lora_A')
            A, B = weights[name], weights[f'{place}.lora_B']
            if place.endswith(OF_EXPERTS):
                weight = place.removesuffix(OF_EXPERTS)
                experts = model.get_submodule(weight.rpartition('.')[0])
                A, B = (matrix.unflatten(0, (len(weights[weight]), -1)) for matrix in (A, B))
                is_transposed = experts.is_transposed
            else:
                weight, is_transposed = f'{place}.weight', is_conv1d(model.get_submodule(place))
            update = B @ A * scale_of_lora(pretrained)
            merged[weight] = weights[weight] + (update.mT if is_transposed else update)
    return merged


# --- LoRA beside the experts of a mixture -----------------------------------------------------------------------------
# transformers keeps each matrix of all experts in one parameter, (E, out, in), or (E, in, out) if its class is
# transposed, and multiplies by a function that knows nothing of LoRA.

OF_EXPERTS = '_lora'  # behind the name of such a parameter: the name of its LoraOfExperts


def matrices_of_experts(module):
    """Names of the parameters that have a matrix of each expert, if this is a module of experts whose class says how
    they compute: by transformers' decorator use_experts_implementation."""
    if not hasattr(module, '_apply_gate') or getattr(module, 'has_post_expert_norm', False):
        return []
    return [name for name, parameter in module._parameters.items() if parameter is not None and parameter.dim() == 3]


def add_lora_to_experts(module, name, pretrained):
    module.add_module(f'{name}{OF_EXPERTS}', LoraOfExperts(module, name, pretrained))
    module.matrices = matrices_of_experts(module)  # of gate and up, or of up alone; then of down
    sizes = [size for name in module.matrices for size in getattr(module, name).shape[1:]]
    module.is_even = not any(size % 8 for size in [*sizes, pretrained.lora_rank])
    if not isinstance(module, ExpertsWithLora):
        module.__class__ = experts_class(type(module))  # as in compute_with_stored()


class LoraOfExperts(nn.Module):
    """What LoRA adds to one matrix of each expert: scale B A x, with a B and an A of its own. All A are stacked by rows
    in lora_A (E*rank, in), and all B in lora_B (E*out, rank): ordinary matrices for FSDP, as in ExpertLinear."""

    def __init__(self, experts, name, pretrained):
        super().__init__()
        weight = getattr(experts, name)
        outputs, inputs = weight.mT.shape[1:] if experts.is_transposed else weight.shape[1:]
        self.n_experts, rank = weight.shape[0], pretrained.lora_rank
        self.lora_A = nn.Parameter(torch.empty(self.n_experts * rank, inputs, device=weight.device))
        self.lora_B = nn.Parameter(torch.empty(self.n_experts * outputs, rank, device=weight.device))
        self.lora_scale, self.lora_dropout = scale_of_lora(pretrained), pretrained.lora_dropout

    def forward(self, rows, where):
        """rows (R, in) -> (R, out); both as in multiply_by_expert()."""
        rows = F.dropout(rows, self.lora_dropout, self.training) if self.lora_dropout else rows
        for stacked in (self.lora_A, self.lora_B):
            matrices = stacked.to(rows.dtype).unflatten(0, (self.n_experts, -1))
            rows = multiply_by_expert(rows, matrices.mT, where)
        return rows * self.lora_scale


class ExpertsWithLora:
    """The experts of a class of transformers, some of whose matrices have LoRA."""

    def forward(self, tokens, chosen, weights):
        """tokens (N, C), chosen (N, k), weights (N, k), or of all experts (N, E) -> (N, C)."""
        dtype = nf4.autocast_dtype(tokens) or tokens.dtype
        if weights.shape != chosen.shape:  # of some classes in transformers 5.0
            weights = weights.gather(1, chosen)
        n_experts = len(getattr(self, self.matrices[0]))
        return through_experts(tokens.to(dtype), chosen, weights, n_experts, self.computed).to(tokens.dtype)

    def computed(self, rows, ends):
        """As experts.Experts.forward()."""
        (first, second), where = self.matrices, where_of_each(ends, rows, self.is_even)
        hidden = self.times(first, rows, ends, where)
        hidden = self._apply_gate(hidden) if getattr(self, 'has_gate', True) else self.act_fn(hidden)
        return self.times(second, hidden, ends, where)

    def times(self, name, rows, ends, where):
        matrices = getattr(self, name).to(rows.dtype)
        y = multiply_by_expert(rows, matrices if self.is_transposed else matrices.mT, where)
        if self.has_bias:
            expert = torch.searchsorted(ends, torch.arange(len(rows), device=rows.device), right=True)  # of each row
            y = y + getattr(self, f'{name}_bias').to(rows.dtype)[expert]
        lora = getattr(self, f'{name}{OF_EXPERTS}', None)
        return y if lora is None else y + lora(rows, where)


@functools.cache
def experts_class(kind):
    return type(kind.__name__, (ExpertsWithLora, kind), {})


# --- what is not trained ----------------------------------------------------------------------------------------------


def store_frozen(model, pretrained):
    """
    Store the matrices that are not trained in frozen_dtype, instead of the 4 bytes per number of an fp32 master.

    bfloat16 applies to all of them, including embedding and head; if the folder is bfloat16, nothing is lost. nf4
    applies to the linear layers of the blocks, whose `weight` becomes packed rows (huggingface/nf4.py); the other
    matrices get the default. Vectors, one number in ten thousand, stay fp32. Raises ValueError for rows that nf4 cannot
    pack.
    """
    if pretrained.frozen_dtype == 'nf4':
        model.counts, model.flops = model.parameter_counts(), model.flops_per_token()
        for module, _ in weights_with_lora(model, 'all'):
            rows, columns = module.weight.shape
            if module.weight.requires_grad:  # in modules_to_save
                raise ValueError(
                    f'modules_to_save={",".join(pretrained.modules_to_save)} trains {name_of(model, module)}, and '
                    'frozen_dtype=nf4 packs all linear layers of the blocks: leave it out there, and LoRA trains it, '
                    'or use --frozen_dtype=bfloat16'
                )
            if columns % nf4.BLOCK:
                raise ValueError(
                    f'nf4: rows of {name_of(model, module)} have {columns} weights, which are not made of '
                    f'blocks of {nf4.BLOCK}: use --frozen_dtype=bfloat16, or no --teacher_dtype'
                )
            packed = torch.empty(rows, nf4.bytes_of(columns), dtype=torch.uint8, device=module.weight.device)
            module.weight = nn.Parameter(packed, requires_grad=False)
            compute_with_stored(module)
    if pretrained.frozen_dtype == 'bfloat16' or (pretrained.frozen_dtype == 'nf4' and pretrained.is_bfloat16):
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and not parameter.requires_grad and parameter.dim() > 1:
                    if parameter.dtype == torch.float32 and not is_lora(f'.{name}'):
                        module._parameters[name] = nn.Parameter(parameter.detach().bfloat16(), requires_grad=False)
        model.tie()


def name_of(model, module):
    return next(name for name, other in model.named_modules() if other is module)


def fill_rows(local, values):
    """Copy floats into this rank's part of a tensor. They move to its device as they are stored, often in half the
    bytes, and are cast or packed there."""
    values = values.to(local.device)
    local.copy_(nf4.quantize(values) if local.dtype == torch.uint8 else values)


def compute_from_stored(model):
    """
    For a model that is not sharded, so that no gather casts its weights: let weights stored in bfloat16 compute exactly
    as an fp32 master with the same value would.

    A linear layer casts its weight whenever it needs it, again in backward. For an embedding, the rows that were looked
    up are cast. Any other module gets an fp32 copy of its weights while it computes.
    """
    model.is_whole = True
    for module in model.modules():
        stored = [name for name, p in module._parameters.items() if p is not None and p.dtype == torch.bfloat16]
        if not stored or isinstance(module, ExpertsWithLora):  # which casts them itself
            continue
        if type(module).forward is nn.Linear.forward or is_conv1d(module):
            compute_with_stored(module)
        elif type(module).forward is nn.Embedding.forward:
            module.register_forward_hook(lambda module, args, output: output.float() if model.is_whole else output)
        else:
            module.register_forward_pre_hook(functools.partial(put_masters, model, stored))
            module.register_forward_hook(functools.partial(put_stored, stored), always_call=True)


class Stored:
    """A linear layer, or GPT-2's Conv1D, whose weight is stored in another dtype than it computes in."""

    def forward(self, x):
        return nf4.frozen_linear(x, self.weight, self.bias, self.is_transposed)


@functools.cache
def stored_class(kind):
    return type(f'Stored{kind.__name__}', (Stored, kind), {'is_transposed': kind.__name__ == 'Conv1D'})


def compute_with_stored(module):
    """Let a linear layer compute with its stored weight.

    It changes its class, because a forward of its own in each module would be another function to torch.compile, which
    would compile every block anew, and give up after eight.
    """
    module.__class__ = stored_class(type(module))


def put_masters(model, names, module, args):
    if model.is_whole:
        module.stored = [module._parameters[name] for name in names]
        for name, parameter in zip(names, module.stored, strict=True):
            module._parameters[name] = nn.Parameter(parameter.detach().float(), requires_grad=False)


def put_stored(names, module, args, output):
    for name, parameter in zip(names, module.__dict__.pop('stored', ()), strict=False):
        module._parameters[name] = parameter
