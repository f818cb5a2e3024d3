"""
Makes a model of `transformers` usable by the train scripts: it gets the methods of model.GPT.

    pretrained = Pretrained.from_keys(config, explicit)  # config.json of the folder init_from; no weights yet
    with torch.device('meta'):
        model = for_training(pretrained, compute_dtype, device)
    ...  # shard it, or not; model.to_empty()
    loading.load(model, pretrained, seed)  # each rank reads the rows it keeps
    loss_sum, ce_sum = model(x, y)  # as model.GPT; model(x, y, starts) if rows hold several documents
    line = self_test.run(model, pretrained, ...)  # checks that logits equal those of the folder

Any AutoModelForCausalLM will do. Parameters keep the names that transformers gives them, also in checkpoints. The head
and the loss are computed together in chunks (loss.ChunkedCrossEntropy).

lora.py decides which weights are trained, and in which dtype the others are stored. Checkpoints of LoRA hold only what
is trained, with a fingerprint of the folder from which the other weights are read.
"""

import contextlib
import copy
import functools
import inspect
import logging
import math
import os
import re
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from attention import MaskedAttention, attention_of_documents
from experts import Balance
from huggingface import lora, nf4, rotation
from loss import ChunkedCrossEntropy, LogitsOf, cross_entropy, loss_of_routers
from model import GPT, recomputed

# What some classes do to their logits after the head's matmul; with any of these, the loss is computed from all logits.
AFTER_HEAD = ('final_logit_softcapping', 'logits_soft_cap', 'output_logit_soft_cap', 'logit_scale', 'logits_scaling')
AFTER_HEAD += ('lm_head_multiplier', 'output_multiplier')
# Keys of config.json that change nothing but training. (Not jitter: phimoe chooses experts by it in eval mode, too.)
DROPOUT = re.compile(r'dropout|_pdrop$')
NOISE = re.compile(rf'{DROPOUT.pattern}|layerdrop')
# Models in which causal_attention() replaces transformers' own attention: they need no masks other than those it makes.
OWN_ATTENTION = 'gemma gpt2 granite llama mistral mixtral olmo2 phi3 qwen2 qwen3 qwen3_moe smollm3 starcoder2'.split()
ATTENTION = 'causal_sdpa'  # the name of causal_attention() in transformers


@functools.cache
def transformers_offline():
    """Import transformers, after telling it that all files are here; otherwise it would ask the hub about them."""
    os.environ.setdefault('HF_HUB_OFFLINE', '1')
    # transformers imports DeepSpeed if it is installed.
    logging.getLogger('DeepSpeed').addFilter(lambda record: 'Setting accelerator to CPU' not in record.getMessage())
    import transformers

    return transformers


def has_uneven_experts(model):
    """Whether a mixture's experts have sizes that torch's grouped_mm does not accept, with which transformers computes
    all experts at once: rows must be multiples of 16 bytes, which are 8 numbers in half precision."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 3 and '.experts.' in name]  # (experts, out, in)
    return any(size % 8 for matrix in matrices for size in matrix.shape[1:])


def mark_experts(model):
    """Note in a mixture's modules of experts which share of them computes a token, for model.inactive_parameters().
    They are lists of modules, or hold the matrices of all experts in one tensor."""
    text = model.config.get_text_config()
    names = ('num_experts_per_tok', 'experts_per_token', 'moe_topk', 'moe_k')
    chosen = next((getattr(text, name) for name in names if getattr(text, name, None)), None)
    for name, module in model.named_modules():
        if chosen and name.endswith('.experts'):
            stacked = [parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.dim() == 3]
            if number := len(module) if isinstance(module, nn.ModuleList) else max(stacked, default=0):
                module.active = min(1.0, chosen / number)


def counts_columns(config, T):
    """Whether attention in rows of T tokens depends on where in its row a text is: Llama 4 counts columns, and not
    positions, for its temperature, and for the chunks within which tokens see each other."""
    return any(0 < (getattr(config, name, None) or 0) <= (T or 0) for name in ('floor_scale', 'attention_chunk_size'))


def heads_of(config):
    """(number of heads, dimensions of one). Some configurations raise errors of their own if layers differ in it."""
    heads = getattr(config, 'num_attention_heads', 1)
    with contextlib.suppress(Exception):
        if config.head_dim:
            return heads, config.head_dim
    return heads, config.hidden_size // heads


class ForTraining:
    """The methods that a train script calls on a model. for_training() makes a subclass of this and transformers'
    class."""

    loss_kernel = staticmethod(cross_entropy)
    ties = ()  # for each parameter with several places, its [(module, attribute), ...]; set by for_training()
    counts = flops = None  # parameter_counts() and flops_per_token() from before weights were packed into bytes
    routers = ()  # if a mixture is to be balanced: a Balance for each of its routers
    jittered = ()  # modules that stay in eval mode, see train()
    counts_columns = False  # see counts_columns()
    turning_point = math.inf  # see rotation.turning_point()
    is_whole = False  # not sharded: weights are fp32 masters or stored frozen ones, see lora.compute_from_stored()

    def forward(self, x, y=None, starts=None, attention=None, cache=None, then=None):
        """As model.GPT.forward(): (loss_sum, ce_sum) with targets y (B, T), -1 = ignored; without y logits (B, T, V).
        starts (B, M): where each document of a row begins, or instead of it `attention`, as in GPT.forward(); attention
        then stays within documents. cache: from new_cache(), with the tokens before x; the result is then the logits of
        the last token, (B, 1, V). then: as in GPT.forward(); if the class makes logits in its own way, hidden are the
        logits."""
        if cache is not None:
            return self.last_logits(x, attention, cache)
        options = {'use_cache': False}
        if starts is not None:
            attention = attention_of_documents(starts, x.shape[1], self.compute_dtype, self.has_dropout, self.head_dim)
        if attention is not None:
            options['position_ids'] = attention.positions
            if self.config._attn_implementation == ATTENTION:  # others recognize documents by their positions
                if isinstance(attention, MaskedAttention):
                    options['attention_mask'] = attention.mask
                else:
                    options['attention'] = attention  # transformers passes it on to causal_attention()
        head = self.get_output_embeddings()
        # Under FSDP weights arrive in compute_dtype. Under DDP they are fp32, and autocast casts the inputs of matmuls.
        # (Autocast does not work for meta tensors; planning/activations.py imitates it.)
        dtype = torch.float32 if self.is_whole else head.weight.dtype
        casting = self.compute_dtype != dtype and not x.is_meta
        with torch.autocast(x.device.type, self.compute_dtype) if casting else contextlib.nullcontext():
            if not self.has_plain_head or y is None and then is None:
                logits = super().forward(x, **options).logits
                if y is None:
                    return logits if then is None else then(logits, LogitsOf(None, logits.dtype))
                hidden, targets, vocab_size = None, y.flatten(), logits.shape[-1]
                sums = loss_of_logits(logits.flatten(0, 1), targets, vocab_size, self.z_loss)
            else:
                hidden = self.base_model(x, **options).last_hidden_state.to(self.compute_dtype)  # (B, T, C)
        if hidden is not None:
            if then is not None:
                return then(hidden, LogitsOf(head.weight, hidden.dtype))
            options = head.weight.shape[0], self.z_loss, torch.is_grad_enabled(), self.loss_kernel
            sums = ChunkedCrossEntropy.apply(hidden.flatten(0, 1), head.weight, y.flatten(), *options)
        if self.routers and self.training and torch.is_grad_enabled():
            loss_sum, ce_sum = sums
            routings = [router.__dict__.pop('routing') for router in self.routers]  # nothing else keeps them
            return loss_sum + loss_of_routers(self.routers, routings, y), ce_sum
        return sums

    def last_logits(self, x, attention, cache):
        """Logits (B, 1, V) after the last token of x (B, T), whose tokens follow those in the cache."""
        options = {'use_cache': True, self.arguments.cache: cache}
        if attention is not None and self.arguments.position_ids:
            options['position_ids'] = attention.positions
        if attention is not None:  # other implementations take a mask of the real tokens: those that the last one sees
            is_own = self.config._attn_implementation == ATTENTION
            options['attention_mask'] = attention.mask if is_own else attention.mask[:, 0, -1].long()
        head = self.get_output_embeddings()
        casting = self.compute_dtype != head.weight.dtype
        with torch.autocast(x.device.type, self.compute_dtype) if casting else contextlib.nullcontext():
            if self.has_plain_head:
                return head(self.base_model(x, **options).last_hidden_state[:, -1:].to(head.weight.dtype))
            options |= {'logits_to_keep': 1} if self.arguments.logits_to_keep else {}
            return super().forward(x, **options).logits[:, -1:]

    @property
    def takes_padding(self):
        """Whether last_logits() accepts a mask that hides padding. State-space models do not, since each handles its
        state in its own way, and without a cache another mask is expected."""
        return bool(self.arguments.cache and self.arguments.position_ids) and not self.counts_columns

    @property
    def reads_on(self):
        """Whether last_logits() accepts several tokens after those in a cache; certain only with causal_attention()."""
        return self.takes_padding and self.config._attn_implementation == ATTENTION

    def new_cache(self, capacity):
        """As model.GPT.new_cache(); None if the class has no cache of the usual kind."""
        if not self.arguments.cache:
            return None
        is_own = self.config._attn_implementation == ATTENTION  # it applies the window itself
        return transformers_offline().DynamicCache(config=None if is_own else self.config)

    def keep_rows(self, cache, rows):
        cache.reorder_cache(rows)

    def _apply(self, *args, **kwargs):
        """Called by to_empty(), to() and the like. These make new parameters, so they are tied again here; to_empty()
        leaves garbage in buffers, so those that no file holds are filled again."""
        had_values = not any(parameter.is_meta for parameter in self.parameters())
        super()._apply(*args, **kwargs)
        self.tie()
        if not any(parameter.is_meta for parameter in self.parameters()):
            fill_buffers(self, self.device_of_buffers)
            for router in self.routers if not had_values else ():
                router.begin()
        return self

    def train(self, mode=True):
        """As of any module, but without pretraining's noise in routers (jitter): they choose experts as they do in eval
        mode, so that a model is trained, sampled and scored as one function."""
        super().train(mode)
        for module in self.jittered:
            module.training = False
        return self

    def tie(self):
        """Put the first parameter of each tie into its other places."""
        for (first, attribute), *others in self.ties:
            for module, name in others:
                module._parameters[name] = first._parameters[attribute]

    def checkpoint_activations(self, mode):
        """As model.GPT.checkpoint_activations: 'none', 'full' or 'selective'."""
        for block in self.blocks if mode != 'none' else ():
            block.forward = functools.partial(recomputed, block.forward, mode=mode, noise=self.draws_noise)

    def parameter_counts(self):
        return self.counts or GPT.parameter_counts(self)

    def flops_per_token(self):
        return self.flops or GPT.flops_per_token(self)


def for_training(pretrained, compute_dtype=torch.float32, device='cpu'):
    """The transformers model of a Pretrained with the methods of ForTraining; on meta under torch.device('meta').
    device: where it will compute; buffers go there even if shards are kept on the host.
    Raises ValueError for LoRA targets and frozen parameters that the model does not have."""
    transformers = transformers_offline()
    transformers.AttentionInterface.register(ATTENTION, causal_attention)
    config = copy.deepcopy(pretrained.config)  # self_test.reference_logits() computes with that of the folder
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name, value in list(vars(part).items()):  # replace pretraining's noise by this run's
            if NOISE.search(name) and isinstance(value, (int, float)) and not isinstance(value, bool):
                setattr(part, name, pretrained.dropout if DROPOUT.search(name) else 0.0)
    with torch.device('meta'):
        library_class = type(pretrained.empty_model())
    # transformers looks up the class in its module's file, and its loss by the class's name.
    names = {'__module__': library_class.__module__}
    model = pretrained.empty_model(type(library_class.__name__, (ForTraining, library_class), names), config)
    model.jittered = [module for module in model.modules() if any('jitter' in name for name in vars(module))]
    if pretrained.arch in OWN_ATTENTION and model.config._attn_implementation == 'sdpa':
        model.set_attn_implementation(ATTENTION)
    places = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, name))
    model.ties = [parameter_places for parameter_places in places.values() if len(parameter_places) > 1]
    model.blocks, model.arguments = find_blocks(model), Arguments.of(library_class)
    mark_experts(model)
    text = config.get_text_config()
    model.compute_dtype, model.device_of_buffers = compute_dtype, torch.device(device)
    model.counts_columns = counts_columns(text, pretrained.block_size)
    model.turning_point = pretrained.turning_point
    if (pretrained.block_size or 0) > model.turning_point:
        rotation.by_document(model, model.turning_point)
    model.z_loss, model.has_dropout = pretrained.z_loss, pretrained.dropout > 0
    model.draws_noise = model.has_dropout or pretrained.lora_dropout > 0
    head = model.get_output_embeddings()
    heads, model.head_dim = heads_of(text)
    changed = [name for name in AFTER_HEAD if getattr(text, name, None) not in (None, 1, 1.0)]
    model.has_plain_head = type(head) is nn.Linear and head.bias is None and not changed
    model.has_plain_head &= model.base_model is not model  # they are the same if a class names no base model
    model.flops_of_attention = 12 * len(model.blocks) * heads * model.head_dim * (pretrained.block_size or 0)
    model.train()
    lora.freeze(model, pretrained)
    lora.store_frozen(model, pretrained)
    if pretrained.router_aux or pretrained.router_z:
        balance_routers(model, pretrained)
    return model


def find_routers(model):
    """[(block, router)] of a mixture for which transformers has a balancing loss of its own. Such a router returns
    (logits (N, E), weights (N, k), chosen (N, k))."""
    if not hasattr(model.config.get_text_config(), 'router_aux_loss_coef'):
        return []
    recorder = (getattr(model.base_model, '_can_record_outputs', None) or {}).get('router_logits')
    if getattr(recorder, 'target_class', None) is None or recorder.index != 0:
        return []
    found = [(block, module) for block in find_blocks(model) for module in block.modules()]
    found = [(block, module) for block, module in found if isinstance(module, recorder.target_class)]
    return found if all(hasattr(router, 'top_k') and hasattr(router, 'num_experts') for _, router in found) else []


def balance_routers(model, pretrained):
    """
    Let the routers of a mixture add to the loss what those of model.GPT add, and count their tokens for
    optim.balance_experts(). Each gets a Balance in its block, whose load is saved in checkpoints.

    What a router says leaves the block as a second output, as in model.Block. A block that is computed twice, with
    activation checkpointing, is still counted once, and it remains a single graph for torch.compile.
    """
    routers = []
    for block, router in find_routers(model):
        block.balanced_router = Balance(router.num_experts, router.top_k, pretrained.router_aux, pretrained.router_z)
        router.said = None
        router.register_forward_hook(note_routing)
        block.forward = functools.partial(with_routing, block.forward, router)
        block.register_forward_hook(keep_routing)
        routers.append(block.balanced_router)
    model.routers = routers


def note_routing(router, args, output):
    """Forward hook of a router."""
    logits, _, chosen = output
    router.said = chosen, logits


def with_routing(forward, router, *args, **kwargs):
    """A block's forward(*args, **kwargs), and (chosen (N, k), logits (N, E)) of its router."""
    output = forward(*args, **kwargs)
    said, router.said = router.said, None
    return output, said


def keep_routing(block, args, output):
    """Forward hook of a block: what its router said is kept for the loss, and transformers gets the rest."""
    output, (chosen, logits) = output
    if block.training and torch.is_grad_enabled():
        block.balanced_router.routing = chosen, logits.float()
    return output


@contextlib.contextmanager
def weights_in_compute_dtype(model):
    """A context in which the whole weights of a ForTraining model, as under DDP, are in compute_dtype, like those that
    FSDP gathers. Autocast would leave operations between matmuls in float32, and give other results. (model.py casts
    its weights itself.) For forward passes without gradients."""
    places = [(module, name) for module in model.modules() for name, p in module._parameters.items() if p is not None]
    kept = [module._parameters[name] for module, name in places]
    is_cast = not isinstance(model, ForTraining)
    is_cast = is_cast or all(p.dtype == model.compute_dtype for p in kept if p.is_floating_point())
    if is_cast or any(isinstance(parameter, DTensor) for parameter in kept):
        yield
        return
    # One copy for each, as some have several places. Not by changing parameter.data, since DDP has hooked the node that
    # accumulates the parameter's gradient.
    cast = {
        parameter: nn.Parameter(parameter.detach().to(model.compute_dtype), False)
        for parameter in set(kept)
        if parameter.is_floating_point()
    }
    was_whole, model.is_whole = model.is_whole, False
    try:
        for (module, name), parameter in zip(places, kept, strict=True):
            module._parameters[name] = cast.get(parameter, parameter)
        yield
    finally:
        model.is_whole = was_whole
        for (module, name), parameter in zip(places, kept, strict=True):
            module._parameters[name] = parameter


class Arguments(NamedTuple):
    """Which arguments the forward of one of transformers' classes takes."""

    cache: str | None  # the argument's name, which changed around transformers 5.20; None = no cache of the usual kind
    position_ids: bool
    logits_to_keep: bool

    @classmethod
    def of(cls, library_class):
        names = inspect.signature(library_class.forward).parameters
        cache = next((name for name in ('cache', 'past_key_values') if name in names), None)
        has_usual_cache = getattr(library_class, '_supports_default_dynamic_cache', lambda: False)()
        return cls(cache if has_usual_cache else None, 'position_ids' in names, 'logits_to_keep' in names)


def find_blocks(model):
    """The blocks of a transformers model, in order: the longest list of modules of the classes that _no_split_modules
    names, or if there is none, of modules of a single class. Of a multimodal model, those that text goes through."""
    text = model if model.config.get_text_config() is model.config else model.get_decoder()
    lists = [[*module] for module in text.modules() if isinstance(module, nn.ModuleList) and len(module)]
    named = set(model._no_split_modules or ())
    found = [blocks for blocks in lists if all(type(block).__name__ in named for block in blocks)]
    found = found or [blocks for blocks in lists if len({type(block) for block in blocks}) == 1]
    if not found:
        raise ValueError(f'{type(model).__name__} has no list of blocks that could be sharded: not supported')
    return max(found, key=len)


def causal_attention(module, query, key, value, attention_mask, sliding_window=None, attention=None, **options):
    """transformers' attention by scaled_dot_product_attention, except that a missing mask means causal.

    transformers' own would look for packed documents in every forward pass, and wait for the GPU to do so. On a CPU,
    computing in fp32 takes 0.6 of the time of bf16."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    T, dtype = query.shape[2], query.dtype
    if attention is not None:
        # As autocast does for torch's own attention, but not for operators that it does not know: on fp32 weights a
        # rotary embedding returns fp32, and the kernels of packed and of shared rows take one half-precision dtype.
        wanted = nf4.autocast_dtype(value) or value.dtype
        query, key, value = query.to(wanted), key.to(wanted), value.to(wanted)
        scale_and_window = {'scale': options.get('scaling'), 'window': sliding_window}
        return attention.attend(query, key, value, **scale_and_window).transpose(1, 2), None
    before = key.shape[2] - T  # tokens in a cache
    if sliding_window and sliding_window < before + T:
        near = torch.ones(T, before + T, dtype=torch.bool, device=query.device)  # (T, before + T)
        near = near.tril(before).triu(before + 1 - sliding_window)
        attention_mask = near[None, None] if attention_mask is None else attention_mask & near
    on_cpu = query.device.type == 'cpu'
    if on_cpu:
        query, key, value = query.float(), key.float(), value.float()
    with torch.autocast('cpu', enabled=False) if on_cpu else contextlib.nullcontext():  # autocast would undo that
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return output.to(dtype), None


def loss_of_logits(logits, targets, vocab_size, z_loss):
    """(loss_sum, ce_sum) as from ChunkedCrossEntropy, but from logits (N, V) that a model has made in its own way."""
    logits, valid = logits[:, :vocab_size].float(), targets >= 0
    ce_sum = F.cross_entropy(logits, targets, ignore_index=-1, reduction='sum')
    loss_sum = ce_sum + z_loss * ((torch.logsumexp(logits, -1) ** 2) * valid).sum() if z_loss else ce_sum
    return loss_sum, ce_sum.detach()


def fill_buffers(model, device):
    """Put buffers on `device`, and recompute those that no file holds, such as RoPE's frequencies, by transformers'
    rules in _init_weights(), and the counts of balance_routers(). Raises ValueError for a buffer without a rule."""
    rules = {}  # of each module: that of the innermost model around it, which may read what this alone has
    for part in model.modules():
        if hasattr(part, '_init_weights'):
            rules.update(dict.fromkeys(part.modules(), part._init_weights))
    for module in model.modules():
        unset = [name for name in module._non_persistent_buffers_set if module._buffers[name] is not None]
        for name, buffer in module._buffers.items():
            if name in unset:
                buffer = torch.empty_like(buffer, device=device)
                module._buffers[name] = buffer.fill_(torch.nan) if buffer.is_floating_point() else buffer.zero_()
            elif buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)
        if unset:
            # The rule would also initialize the module's parameters, so it gets others on meta in their place. They are
            # whole, for of shards (DTensors) torch draws numbers that all ranks agree on, and warns of that on a CPU.
            parameters = module._parameters
            whole = functools.partial(torch.empty, device='meta')
            module._parameters = {
                name: p if p is None else whole(p.shape, dtype=p.dtype) for name, p in parameters.items()
            }
            module.seen.zero_() if isinstance(module, Balance) else rules[module](module)
            module._parameters = parameters
        for name in unset:
            if module._buffers[name].isnan().any():
                raise ValueError(f'transformers has no rule to fill {name} of {type(module).__name__}: not supported')


def cautions(model, pretrained):
    """Lines for the log if a model of for_training() is computed or trained in another way than one might expect."""
    lines = []
    if has_uneven_experts(model):
        lines.append(
            'experts are computed one after the other, more slowly than all at once: the sizes of their matrices are '
            "no multiples of 8, as torch's grouped_mm wants them"
        )
    if others := lora.beside_text(model):
        parts = dict.fromkeys(re.sub(r'^((?:model\.)?\w+).*', r'\1', name) for name in others)
        numbers = sum(parameter.numel() for parameter in others.values())
        lines.append(f'text does not reach {", ".join(parts)}: {numbers:,} parameters stay as they are in the folder')
    if pretrained.lora_rank and pretrained.lora_targets == 'all':
        adapted, others = 0, {}  # numbers in weights with LoRA, and {name in the block: numbers} of weights without
        for block in model.blocks:
            weights = {name: p for name, p in block.named_parameters() if p.dim() > 1 and not p.requires_grad}
            for name, weight in weights.items():
                module = block.get_submodule(name.rpartition('.')[0])
                if hasattr(module, 'lora_A'):  # (rank, in) and (out, rank): the weight itself may be packed bytes
                    adapted += module.lora_A.shape[1] * module.lora_B.shape[0]
                else:
                    others[name] = others.get(name, 0) + weight.numel()
        if others:
            share = sum(others.values()) / (adapted + sum(others.values()))
            modules = dict.fromkeys(name.rpartition('.')[0] for name in others)
            has_experts = any(map(lora.matrices_of_experts, model.modules()))
            beside = '--lora_targets=all,experts has it beside the experts, too; ' if has_experts else ''
            lines.append(
                f'WARNING: LoRA is beside linear layers alone, and {", ".join(others)} are none: {share:.0%} of the '
                f"blocks' weights stay as they are; {beside}--modules_to_save={','.join(modules)} trains those in full"
            )
    return lines
