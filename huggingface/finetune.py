"""
Makes a model of `transformers` usable by the train scripts: it gets the methods of model.GPT, and its weights are read
in slices.

    pretrained = Pretrained.from_keys(config, explicit)  # config.json of the folder init_from; no weights yet
    with torch.device('meta'):
        model = for_training(pretrained, compute_dtype, device)
    ...  # shard it, or not; model.to_empty()
    load(model, pretrained, seed)  # each rank reads the rows it keeps
    loss_sum, ce_sum = model(x, y)  # as model.GPT; model(x, y, starts) if rows hold several documents
    line = self_test(model, pretrained, ...)  # checks that logits equal those of the folder

Any AutoModelForCausalLM will do. Parameters keep the names that transformers gives them, also in checkpoints. The head
and the loss are computed together in chunks (loss.ChunkedCrossEntropy).

lora.py decides which weights are trained, and in which dtype the others are stored. Checkpoints of LoRA hold only what
is trained, with a fingerprint of the folder from which the other weights are read.
"""

import contextlib
import copy
import functools
import inspect
import json
import logging
import math
import os
import re
import shutil
import sys
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from attention import MaskedAttention, attention_of_documents
from configurator import tagged
from experts import Balance
from huggingface import lora, nf4, rotation
from huggingface.files import (
    Weights,
    find_folder,
    local_rows,
    names_of_tokens,
    refuse_not_finite,
    rows_in_folder,
    tensors_to_load,
)
from loss import ChunkedCrossEntropy, LogitsOf, cross_entropy, loss_of_routers
from model import GPT, is_load, recomputed
from system import collectives, processes
from system.errors import is_lost_peer, is_out_of_memory, one_line
from system.files import merge_command, read_json, refuse_lfs_pointer, refuse_link_out
from text.templates import MORE_TEMPLATES, write_templates
from text.tokenizer import KEPT

LARGEST_KEPT = 2**26  # bytes of a file that is kept; a large vocabulary's tokenizer.json has 20 MB
# What some classes do to their logits after the head's matmul; with any of these, the loss is computed from all logits.
AFTER_HEAD = ('final_logit_softcapping', 'logits_soft_cap', 'output_logit_soft_cap', 'logit_scale', 'logits_scaling')
AFTER_HEAD += ('lm_head_multiplier', 'output_multiplier')
LORA_KEYS = 'lora_rank lora_alpha lora_targets lora_dropout lora_rslora modules_to_save'.split()
# Keys of config.json that change nothing but training. (Not jitter: phimoe chooses experts by it in eval mode, too.)
DROPOUT = re.compile(r'dropout|_pdrop$')
NOISE = re.compile(rf'{DROPOUT.pattern}|layerdrop')
VOLATILE = re.compile(rf'transformers_version|_name_or_path|dtype|use_cache|jitter_noise|{NOISE.pattern}')
# Models in which causal_attention() replaces transformers' own attention: they need no masks other than those it makes.
OWN_ATTENTION = 'gemma gpt2 granite llama mistral mixtral olmo2 phi3 qwen2 qwen3 qwen3_moe smollm3 starcoder2'.split()
# Classes whose attention sees other documents of a row, though nothing in them looks like it: most make a mask without
# looking at positions (transformers 5.24), and MiniMax's is linear. The self-test finds those that are missing here.
MIXED_ROWS = 'afmoe biogpt gpt_oss minimax openai-gpt opt xglm'.split()
NOT_HERE = 'this model cannot be trained here'
ATTENTION = 'causal_sdpa'  # the name of causal_attention() in transformers


@functools.cache
def transformers_offline():
    """Import transformers, after telling it that all files are here; otherwise it would ask the hub about them."""
    os.environ.setdefault('HF_HUB_OFFLINE', '1')
    # transformers imports DeepSpeed if it is installed.
    logging.getLogger('DeepSpeed').addFilter(lambda record: 'Setting accelerator to CPU' not in record.getMessage())
    import transformers

    return transformers


# --- what is fine-tuned -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Pretrained:
    """The configuration of a model in a Hugging Face folder, and which of its weights are trained; the counterpart of
    model.ModelConfig. Raises ValueError if the folder has no causal language model, or one with fewer positions than
    block_size."""

    folder: str  # has config.json and the tokenizer: init_from, or the copy that an earlier start made in out_dir
    block_size: int | None = None
    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_targets: str = 'all'  # see lora.weights_with_lora()
    lora_dropout: float = 0.0
    lora_rslora: bool = False
    modules_to_save: list | tuple = ()  # ends of names of modules that are trained in full beside LoRA
    freeze: str | None = None  # regular expression for names of parameters that are not trained
    frozen_dtype: str | None = None  # of matrices that are not trained: 'float32', 'bfloat16', 'nf4'; None = exact
    dropout: float = 0.0
    z_loss: float = 0.0
    router_aux: float = 0.0  # of a mixture; with both at 0 its routers are not looked at
    router_z: float = 0.0
    rope_theta: float | None = None  # of the rotary embedding; None = the folder's
    yarn: list | None = None  # as in model.ModelConfig; if the second number is left out, it is the folder's
    trust_remote_code: bool = False
    weights_folder: str | None = None  # None = folder
    chat_templates: dict | None = None  # {name: text} of those that a run's data were made with; None = the folder's

    def __post_init__(self):
        self.weights_folder = self.weights_folder or self.folder
        folder, block_size = self.folder, self.block_size
        refuse_adapter(folder)
        transformers = transformers_offline()
        try:
            self.config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=self.trust_remote_code)
        except Exception as error:  # of any class: for 32.0 instead of 32, for an unknown rope_type, ...
            path = os.path.join(folder, 'config.json')
            if os.path.exists(path):
                refuse_lfs_pointer(path)
            reason = f'{type(error).__name__}: {one_line(error)}: mend that there, or copy the folder again; '
            reason += f'`python download_model.py --model={folder}` says what it lacks'
            if 'trust_remote_code' in str(error):
                reason = 'it comes with its own code: read that, and run it with --trust_remote_code=True'
            raise ValueError(f'{folder}: transformers cannot read its config.json: {reason}') from error
        if '/' in str(kernel := self.config._attn_implementation):  # OWNER/NAME, which transformers fetches and runs
            found = f'attn_implementation: found {ascii(kernel)[:80]}, which is code of the hub'
            raise ValueError(f'{folder}/config.json: {found}, expected none: delete it')
        mappings = transformers.models.auto.modeling_auto
        known = set(mappings.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        if not getattr(self.config, 'is_decoder', True):
            known -= set(mappings.MODEL_FOR_MASKED_LM_MAPPING_NAMES)  # BERT is in both mappings
        own_code = (getattr(self.config, 'auto_map', None) or {}).get('AutoModelForCausalLM')
        self.arch = self.config.model_type
        if not own_code and self.arch not in known:
            raise ValueError(f'{folder}: model_type={self.arch!r} is no causal language model of transformers')
        if getattr(self.config, 'quantization_config', None):
            raise ValueError(f'{folder}: quantized weights cannot be trained: take the model in bfloat16')
        text = self.config.get_text_config()
        self.vocab_size = text.vocab_size  # rows of the embedding; a tokenizer may have fewer tokens
        self.yarn = rotation.extend(text, folder, block_size or 0, self.rope_theta, self.yarn or [])
        self.positions = positions = getattr(text, 'max_position_embeddings', None)
        self.block_size = block_size or positions
        self.turning_point = rotation.turning_point(text)
        if block_size and positions and block_size > positions:
            advice = f'use --block_size={positions} or less'
            advice += f', or --yarn={math.ceil(block_size / positions)}' if rotation.of(text) else ''
            raise ValueError(f'block_size={block_size}: {folder} ({self.arch}) has {positions} positions: {advice}')
        if self.frozen_dtype == 'nf4' and not self.lora_rank:
            raise ValueError(
                'frozen_dtype=nf4 without LoRA, which learns beside what 4 bits have made of the weights: '
                'give a --lora_rank, as 16, or use --frozen_dtype=bfloat16'
            )
        if self.frozen_dtype and not (self.lora_rank or self.freeze):
            raise ValueError(f'frozen_dtype={self.frozen_dtype} without LoRA or --freeze: all is trained, leave it out')
        is_frozen = bool(self.lora_rank or self.freeze)  # a part of the model
        self.is_bfloat16 = is_frozen and self.holds_bfloat16()
        if self.frozen_dtype is None and is_frozen:
            self.frozen_dtype = 'bfloat16' if self.is_bfloat16 else 'float32'
        self.unties = bool(getattr(self.config, 'tie_word_embeddings', False)) and self.holds_another_head()
        if self.unties:
            self.config.tie_word_embeddings = text.tie_word_embeddings = False

    def holds_bfloat16(self):
        """Whether all matrices in the files are bfloat16, so that keeping them in bfloat16 changes no bit. (float16 has
        more digits.) If the files are gone, config.json says what they were."""
        try:
            weights = Weights(self.weights_folder)
        except ValueError:
            return self.config.dtype == torch.bfloat16
        return all(weights.dtype(name) == 'BF16' for name in weights.file_of if len(weights.shape(name)) > 1)

    def add_tokens(self, rows):
        """Have so many rows in embedding and head, for tokens that the folder's tokenizer has and its weights lack. A
        folder that is kept says so in its config.json. Raises ValueError if these are not trained: then the new rows
        would stay what they begin with, the mean of the others."""
        self.config.get_text_config().vocab_size = self.vocab_size = rows
        if frozen := self.frozen_of_tokens()[1]:
            raise ValueError(self.how_to_train(frozen))

    def frozen_of_tokens(self):
        """(the model on the meta device, its parameters with a row for each token that are not trained: the names)."""
        with torch.device('meta'):
            model = for_training(self)
        parameters = dict(model.named_parameters())
        return model, [name for name in names_of_tokens(model) if not parameters[name].requires_grad]

    def how_to_train(self, frozen):
        """In words, which key trains these parameters of frozen_of_tokens()."""
        modules = [*dict.fromkeys(name.rpartition('.')[0] for name in frozen)]
        names = ','.join([*self.modules_to_save, *(name.rpartition('.')[2] for name in modules)])
        mend = f'--modules_to_save={names} trains them' if self.lora_rank else 'leave freeze out'
        return f'{", ".join(modules)} would not be trained: {mend}'

    def never_trained(self, token):
        """The names of frozen_of_tokens() if no training has set the token's row of one of them apart from those beside
        it, else []. That proves nothing: spare rows may hold noise, which looks like what has been learned."""
        try:
            weights = Weights(self.weights_folder)
        except ValueError:  # no weights: a plan, or the run resumes from checkpoints
            return []
        model, frozen = self.frozen_of_tokens()
        found, _ = weights.find(model)
        return frozen if any(name in found and not weights.sets_apart(found[name], token) for name in frozen) else []

    @property
    def added_rows(self):
        """How many rows embedding and head have more than those of the folder with the weights."""
        return self.vocab_size - (rows_in_folder(self.weights_folder) or self.vocab_size)

    @property
    def frozen_rounding(self):
        """To what frozen_dtype rounds the folder's weights: 'nf4', 'bfloat16', or 'float32' if they stay as they are. A
        resumed run may change frozen_dtype, but not this."""
        is_exact = self.frozen_dtype is None or (self.frozen_dtype == 'bfloat16' and self.is_bfloat16)
        return 'float32' if is_exact else self.frozen_dtype

    @property
    def has_dropout(self):
        """Whether the class has dropout that the key `dropout` sets, by the names in its configuration."""
        names = [name for name in vars(self.config.get_text_config()) if DROPOUT.search(name)]
        return any(not re.search('classifier|summary', name) for name in names)

    @property
    def has_routers(self):
        """Whether the class is a mixture whose experts router_aux and router_z can balance."""
        with torch.device('meta'):
            return bool(find_routers(self.empty_model()))

    @property
    def has_lora_of_experts(self):
        if not self.lora_rank:
            return False
        with torch.device('meta'):
            model = for_training(self)
        return any(isinstance(module, lora.ExpertsWithLora) for module in model.modules())

    def holds_another_head(self):
        """Whether the files hold different tensors where by config.json the model has a single tied parameter. In this
        case from_pretrained() trusts the files and ties nothing."""
        try:
            weights = Weights(self.weights_folder)
        except ValueError:  # no weights: the run resumes from checkpoints, and its kept config.json is right
            return False
        with torch.device('meta'):
            model = self.empty_model()
        return any(weights.differ(model, names) for names in tensors_to_load(model).values())

    @classmethod
    def from_keys(cls, config, explicit, start=None):
        """From a script's config. Also raises ValueError for keys that only a model from scratch has, for a folder that
        does not exist, and for one without weights, unless an earlier start of this run has read them. start: the
        Pretrained of an earlier run, if init_from names that."""
        init_from, kept = config['init_from'], os.path.join(config['out_dir'], KEPT)
        is_kept = os.path.exists(os.path.join(kept, 'config.json'))
        try:
            source = start.folder if start else find_folder(init_from)
        except ValueError:
            if not is_kept:
                raise
            source = None  # the run resumes from its checkpoints, with the files that it has kept of the folder
        taken = {field.name for field in fields(cls)} & config.keys()
        set_here = [key for key in explicit if key in tagged('model') - taken]
        if set_here:
            given = f'{set_here[0]}={config[set_here[0]]!r}'
            keys = ', '.join(f'{key} ({explicit[key]})' for key in set_here)  # with the file, or 'command line'
            raise ValueError(f'{given}: init_from={config["init_from"]} has its own; leave out {keys}')
        if source:
            refuse_adapter(source)  # first, since an adapter has no weights of a model
        if source and not (start or is_kept or config['dry_run']):
            Weights(source)  # raises if there are none
        # Most people who fine-tune a mixture add no balancing loss, so its default is for training from scratch.
        options = {key: config[key] for key in taken if key in explicit or key not in ('router_aux', 'router_z')}
        return cls(source or kept, weights_folder=start.weights_folder if start else source or init_from, **options)

    @classmethod
    def from_run(cls, out_dir, state, trust_remote_code=False):
        """The model that a run of these scripts has trained, from its out_dir and the state of a checkpoint."""
        folder = os.path.join(out_dir, KEPT)
        if not os.path.isdir(folder):
            raise ValueError(f'{folder} is missing, with the configuration and tokenizer of the model: copy it back')
        saved = state['identity']['model']
        if state['config'].get('native'):  # saved: as model.py has them; the user's are in the keys
            saved = {**saved, **{key: state['config'][key] for key in ('rope_theta', 'yarn')}}
        keys = ['block_size', 'rope_theta', 'yarn', *LORA_KEYS]
        options = {key: saved[key] for key in keys if key in saved}  # earlier versions had fewer
        base = state.get('base')  # of LoRA, whose checkpoints leave out what is not trained
        rounding = saved.get('frozen_dtype', 'float32')
        if options.get('lora_rank') and (rounding != 'float32' or not base):
            options['frozen_dtype'] = rounding
        weights_folder = find_folder(base['init_from']) if base else None
        pretrained = cls(folder, trust_remote_code=trust_remote_code, weights_folder=weights_folder, **options)
        if base:
            pretrained.base(base['init_from'], base, out_dir)
        return pretrained

    @functools.cached_property
    def fingerprint(self):
        """That of the weights in its folder; see files.Weights."""
        return Weights(self.weights_folder).fingerprint()

    def base(self, init_from, saved=None, where=None):
        """What a checkpoint of LoRA says about the weights that it leaves out: their folder, and a fingerprint.

        saved: what an earlier checkpoint, in `where`, says. Raises ValueError if the folder has other weights now."""
        found = {'init_from': init_from, 'fingerprint': self.fingerprint}
        if saved and saved['fingerprint'] != found['fingerprint']:
            raise ValueError(
                f'init_from={init_from}: the LoRA in {where} was trained on other weights than there are now in this '
                'folder: it needs those that it had when the run began'
            )
        return found

    def keep_files(self, out_dir):
        """Copy configuration, tokenizer and licence into out_dir when a run begins, so that it no longer needs those of
        init_from. Replaces what an earlier start without a checkpoint has left there. For rank 0."""
        kept = os.path.join(out_dir, KEPT)
        if os.path.abspath(self.folder) == os.path.abspath(kept):
            return
        shutil.rmtree(f'{kept}.tmp', ignore_errors=True)
        os.makedirs(f'{kept}.tmp')
        copy_files(self.folder, f'{kept}.tmp')
        if self.chat_templates:
            write_templates(f'{kept}.tmp', self.chat_templates)
        if self.unties or self.added_rows:  # config.json must say what is trained, since no weights are kept
            path = os.path.join(f'{kept}.tmp', 'config.json')
            content = read_json(path, dict, 'copy it again')
            content.get('text_config', content)['vocab_size'] = self.vocab_size
            content |= {'tie_word_embeddings': False} if self.unties else {}
            with open(path, 'w', encoding='utf-8') as file:
                json.dump(content, file, indent=2)
        shutil.rmtree(kept, ignore_errors=True)
        os.rename(f'{kept}.tmp', kept)

    def empty_model(self, kind=None, config=None):
        """The transformers model without its weights; its parameters and buffers are on the context's device, best on
        meta. kind: a subclass of transformers' class to make instead of that class. config: None = the folder's."""
        transformers, config = transformers_offline(), copy.deepcopy(config or self.config)
        text = config.get_text_config()
        pad = getattr(text, 'pad_token_id', None)
        if pad is not None and pad >= text.vocab_size:
            given = f'pad_token_id={pad} in config.json, the embedding has {text.vocab_size} rows'
            raise ValueError(f'{self.folder}: {given}: write null there, nothing is padded here')
        try:
            if kind is None:
                options = {'dtype': torch.float32, 'trust_remote_code': self.trust_remote_code}
                model = transformers.AutoModelForCausalLM.from_config(config, **options)
            else:
                model = kind._from_config(config, dtype=torch.float32)
        except Exception as error:  # classes raise all kinds of errors: KeyError for an unknown activation, ...
            reason = f'{type(error).__name__}: {one_line(error)}'
            problem = f'{self.folder}: transformers cannot make a model of its config.json: {reason}'
            raise ValueError(f'{problem}: mend that value there, or update transformers') from error
        model.tie_weights()  # transformers 5.0 does not, on meta
        if has_uneven_experts(model):
            model.set_experts_implementation('eager')  # computes one after the other
        return model

    @property
    def keeps_documents_apart(self):
        """Whether documents that are packed into a row do not see each other, as far as the class tells: not if it has
        a state or a convolution that runs on over their borders, or takes no positions. self_test() measures it."""
        if self.arch in OWN_ATTENTION:
            return True
        with torch.device('meta'):
            model = self.empty_model()
        mixes = model._is_stateful or any(isinstance(module, nn.Conv1d) for module in model.modules())
        mixes |= counts_columns(model.config.get_text_config(), self.block_size)
        return not mixes and self.arch not in MIXED_ROWS and Arguments.of(type(model)).position_ids

    def to_dict(self):
        """All settings that decide shapes and results, for the log, planning/ and the identity of a checkpoint."""
        return self.facts

    @functools.cached_property
    def facts(self):
        with torch.device('meta'):
            model = for_training(self)
        text = self.config.get_text_config()
        heads, head_dim = heads_of(text)
        mlp_size = getattr(text, 'intermediate_size', None) or getattr(text, 'n_inner', None)
        own = 'arch vocab_size block_size dropout z_loss freeze frozen_dtype rope_theta yarn'
        return {key: getattr(self, key) for key in [*own.split(), *LORA_KEYS]} | {
            'n_layer': len(model.blocks),
            'n_head': heads,
            'n_kv_head': getattr(text, 'num_key_value_heads', None) or heads,
            'head_dim': head_dim,
            'n_embd': text.hidden_size,
            'mlp_hidden_dim': mlp_size or 4 * text.hidden_size,
            'bias': any(name.endswith('bias') for name, _ in model.named_parameters()),
            'tie_embeddings': bool(getattr(self.config, 'tie_word_embeddings', False)),
            'attention_gate': False,
            'transformers': {key: value for key, value in self.config.to_dict().items() if not VOLATILE.search(key)},
        }


def copy_files(folder, to, leave_out=()):
    """Copy configuration, tokenizer, templates and licence of a model's folder, all but its weights, into another one.
    Raises ValueError for a link that leads out of the folder."""
    templates = os.path.join(folder, MORE_TEMPLATES)
    names = os.listdir(folder)
    names += [os.path.join(MORE_TEMPLATES, name) for name in os.listdir(templates)] if os.path.isdir(templates) else []
    for name in names:
        path, target = os.path.join(folder, name), os.path.join(to, name)
        is_weights = name.endswith(('.safetensors', '.bin', '.pth', '.pt', '.gguf', '.index.json'))
        is_kept = not is_weights and not name.startswith(('.', 'download.', 'adapter_')) and name not in leave_out
        if is_kept and os.path.isfile(path) and os.path.getsize(path) <= LARGEST_KEPT:
            refuse_link_out(path, folder)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copyfile(path, target)


def refuse_adapter(folder):
    """Raise ValueError for a folder with an adapter of peft, alone or beside a model: from_pretrained() would apply it
    to the model that it names."""
    path = os.path.join(folder, 'adapter_config.json')
    if os.path.exists(path):
        refuse_lfs_pointer(path)
        base = '(its file does not say which)'
        with contextlib.suppress(ValueError):
            base = read_json(path, {'base_model_name_or_path?': (str, None)}).get('base_model_name_or_path') or base
        if any(file.startswith(('model', 'hf_model')) and file.endswith('.safetensors') for file in os.listdir(folder)):
            move = 'take adapter_config.json and adapter_model.* away if it is merged into that, as torchtune saves it'
            raise ValueError(f'{folder} holds an adapter of peft beside a model: {move}; else give each its own folder')
        merge = f"{merge_command(folder)}, copy the tokenizer's files there, and give that folder"
        raise ValueError(f'{folder} is an adapter of peft for the model {base}: merge the two, {merge}')


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


# --- the model --------------------------------------------------------------------------------------------------------


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
            if self.config._attn_implementation == ATTENTION:  # others recognise documents by their positions
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
    config = copy.deepcopy(pretrained.config)  # reference_logits() computes with that of the folder
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
            # The rule would also initialise the module's parameters, so it gets others on meta in their place. They are
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


# --- weights ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load(model, pretrained, seed=0):
    """Fill a model, sharded or not, with the weights of its folder: in fp32, whatever they are stored in, and weights
    that are not trained in frozen_dtype. Collective.

    Each rank reads the rows that it keeps and, with nf4, packs them. If transformers' files have other names than its
    model in memory (as for experts of some mixtures, which are stacked when they are loaded), rank 0 loads the whole
    model and broadcasts it.
    LoRA begins with A = lora.initial_lora_a() and B = 0, so that at first it changes nothing.
    Raises ValueError on every rank for a tensor of another shape than the configuration says, or one with NaN in it.
    """
    weights = Weights(pretrained.weights_folder)
    found, lacking = weights.find(model)
    whole = {}  # on rank 0 alone
    if lacking:
        collectives.on_rank_0(
            lambda: whole.update(whole_model(pretrained).state_dict()), patience_s=collectives.PATIENCE_S
        )
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    sizes = {name: weights.nbytes(found[name]) if name in found else 0 for name in tensors_to_load(model)}
    problem = None
    for name in processes.progress(f'loading {weights.folder}', sizes):
        local, rows = local_rows(tensors[name])
        is_packed = local.dtype == torch.uint8
        shape = tensors[name].shape
        shape = (shape[0], nf4.columns_of(shape[1])) if is_packed else shape
        if name.endswith('.lora_B'):
            local.zero_()
        elif name.endswith('.lora_A'):
            local.copy_(lora.initial_lora_a(name, tensors[name].shape, seed)[rows])
        elif lacking:
            values = from_rank_0(whole.get(name), shape, torch.float32 if is_packed else local.dtype)
            lora.fill_rows(local, values[rows])
        else:
            weights.check_shape(found[name], shape)
            try:
                if local.numel():
                    lora.fill_rows(local, weights.read(found[name], rows))
            except ValueError as error:  # in rows that this rank alone may have read
                problem = str(error)
                break
    collectives.raise_together(problem)


def whole_model(pretrained):
    """The model as transformers itself loads it, in fp32. Raises ValueError if the folder lacks some of its weights,
    which would otherwise be random numbers."""
    transformers = transformers_offline()
    options = {'dtype': torch.float32, 'trust_remote_code': pretrained.trust_remote_code, 'output_loading_info': True}
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(pretrained.weights_folder, **options)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        problem = f'transformers cannot load its weights: {one_line(repr(error))}'
        raise ValueError(f'{pretrained.weights_folder}: {problem}') from error
    if info['missing_keys']:
        folder, lacking = pretrained.weights_folder, min(info['missing_keys'])
        raise ValueError(
            f'{folder} lacks {lacking}, and {len(info["missing_keys"]) - 1} more weights: '
            f'`python download_model.py --model={folder}` lists them; copy or download it again'
        )
    for name, tensor in model.state_dict().items():
        refuse_not_finite(name, tensor, pretrained.weights_folder)
    if pretrained.added_rows:
        model.resize_token_embeddings(pretrained.vocab_size, mean_resizing=False)
        parameters, old = dict(model.named_parameters()), pretrained.vocab_size - pretrained.added_rows
        for name in names_of_tokens(model):
            parameters[name].data[old:] = parameters[name].data[:old].double().mean(0).float()
    if has_uneven_experts(model):
        model.set_experts_implementation('eager')
    return model.eval()


def from_rank_0(tensor, shape, dtype):
    """Rank 0's whole tensor, on every rank, in host memory. Collective."""
    whole = torch.empty(shape, dtype=dtype) if tensor is None else tensor.to(dtype).contiguous()
    dist.broadcast(whole, src=0)
    return whole


def seen_in_training(pretrained):
    """A function of (name, rows of that tensor in the folder) that returns the values which training used instead,
    rounded by frozen_dtype. LoRA was trained beside these values, so it is merged into them."""
    if pretrained.frozen_rounding == 'float32':
        return lambda name, rows: rows
    with torch.device('meta'):
        model = for_training(pretrained)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters(remove_duplicate=False)}

    def seen(name, rows):
        if dtypes.get(name) == torch.uint8:
            return nf4.dequantise(nf4.quantise(rows))
        return rows.bfloat16() if dtypes.get(name) == torch.bfloat16 else rows

    return seen


def line_of_base(pretrained):
    """A line that says so if LoRA is merged into weights that differ from the folder's by rounding; else None."""
    rounding = pretrained.frozen_rounding
    if not pretrained.lora_rank or rounding == 'float32':
        return None
    return f'LoRA is merged into what it was trained beside: {pretrained.weights_folder} rounded to {rounding}'


def base_weights(model, pretrained, weights):
    """{name: tensor} of the model's weights that a LoRA checkpoint's `weights` lack: read from the folder, rounded as
    training saw them, in fp32. model: on meta."""
    absent = [name for name in tensors_to_load(model) if name not in weights]
    if not absent:  # a checkpoint of an earlier version has all of them
        return {}
    stored = Weights(pretrained.weights_folder)
    found, lacking = stored.find(model)
    seen, kinds = seen_in_training(pretrained), model.state_dict()
    if lacking:
        whole = whole_model(pretrained).state_dict()
        return {name: seen(name, whole[name]).to(kinds[name].dtype) for name in absent}
    names = processes.progress(f'reading {stored.folder}', {name: stored.nbytes(found[name]) for name in absent})
    return {name: seen(name, stored.read(found[name])).to(kinds[name].dtype) for name in names}


def for_inference(pretrained, weights):
    """A model of transformers' own class, without ForTraining, with a checkpoint's `weights`, {name: tensor}. LoRA is
    merged; weights that the checkpoint leaves out come from pretrained's folder. Does not move or cast anything."""
    weights = {name: tensor for name, tensor in weights.items() if not is_load(name)}
    with torch.device('meta'):
        model = pretrained.empty_model()
    if pretrained.lora_rank:
        weights = {**base_weights(model, pretrained, weights), **weights}
    put_in(model, lora.merge_lora(model, weights, pretrained), model.tie_weights)
    fill_buffers(model, 'cpu')
    return model.eval()


def for_generation(pretrained, weights, compute_dtype, device):
    """The model of for_training() with LoRA merged; call cast_weights() next. weights: {name: tensor} of a checkpoint;
    None = those of the folder, as they are stored."""
    whole = copy.copy(pretrained)
    whole.lora_rank, whole.freeze, whole.frozen_dtype = 0, None, None
    with torch.device('meta'):
        model = for_training(whole, compute_dtype, device)
    if weights is None:
        weights = weights_of_folder(pretrained, model)
    elif pretrained.lora_rank:
        weights = lora.merge_lora(model, {**base_weights(model, pretrained, weights), **weights}, pretrained)
    weights = {name: tensor for name, tensor in weights.items() if not is_load(name)}
    put_in(model, weights, model.tie)
    fill_buffers(model, device)
    return model.eval()


def put_in(model, weights, tie):
    """Give a model on meta its weights, {name: tensor}. tie: function that makes those that are one tensor share it.
    Raises ValueError if some are missing, or belong to no parameter."""
    _, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    tie()
    lacking = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if lacking or unexpected:
        problem = f'lack {lacking[0]}' if lacking else f'have {unexpected[0]}, which it has not'
        raise ValueError(
            f'the weights for {type(model).__name__} {problem}: they belong to another model; copy them anew'
        )


def cast_weights(model, compute_dtype, device):
    """Cast all weights once, for generation, in which each token uses every weight. (Not by .to(compute_dtype), which
    would also round RoPE's frequencies.) Those of a folder are read from the disk here."""
    for parameter in processes.progress('weights', {parameter: parameter.nbytes for parameter in model.parameters()}):
        parameter.data = parameter.data.to(device, compute_dtype)


def weights_of_folder(pretrained, model):
    """{name: tensor} of a folder, as they are stored. Raises ValueError for a tensor of another shape than the
    configuration says."""
    weights = Weights(pretrained.weights_folder)
    found, lacking = weights.find(model)
    if lacking:
        return whole_model(pretrained).state_dict()
    tensors = model.state_dict()
    for name, stored in found.items():
        weights.check_shape(stored, tensors[name].shape)
    return {name: weights.read(stored) for name, stored in found.items()}


# --- self-test --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_tf32():
    """A context in which fp32 is computed with all its digits, whatever the key tf32 says. TensorFloat-32 has 3 of the
    7, so that no two ways to compute the same logits would agree to 1e-4."""
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = False
        yield
    finally:
        for backend, allowed in zip(backends, before, strict=True):
            backend.allow_tf32 = allowed


@torch.no_grad()
@without_tf32()
def self_test(model, raw_model, pretrained, loaded, packed, device):
    """Check on a few tokens that the model computes what its folder says. Returns a line for the log. Collective.

    model: the wrapped or sharded model, as training calls it. raw_model: the module with ForTraining's attributes.
    loaded: the weights are the folder's, so the logits must be as well; rank 0 computes them with transformers' own
    class, one block of the files at a time. packed: documents of a row must not see each other, and each has to be
    computed as it is alone.
    The row has a few tokens, or as many as it takes to get beyond the lengths from which on the class computes
    otherwise, if those of the run do; never more than block_size, so that it costs less than a step of training.
    Raises ValueError on every rank if a check fails, since training would be wasted.
    """
    length = longest_of_lengths(pretrained.config.get_text_config(), pretrained.block_size)
    T = min(2 * (length + 16), pretrained.block_size)
    tokens = torch.randint(pretrained.vocab_size, (1, T), generator=torch.Generator().manual_seed(1))
    x, places = tokens.to(device), spread(T, device)[None]  # (1, T) and (1, P)
    y = torch.full_like(x, -1).scatter(1, places, x.roll(-1, 1).take_along_dim(places, 1))
    facts, problems = [], []
    exact = raw_model.compute_dtype == torch.float32
    tolerance = 1e-4 if exact else 0.02
    model.eval()
    # Uncompiled, else training's shape would be the second after this one, and get a slower, dynamic graph. Where the
    # compiler is not imported, importing it would take seconds.
    imported = 'torch._dynamo' in sys.modules
    with torch.compiler.set_stance('force_eager') if imported else contextlib.nullcontext():
        try:
            with logits_at(raw_model, places):
                logits = of_places(model(x), places).float()  # (1, places, V)
        except Exception as error:
            if is_out_of_memory(error) or is_lost_peer(error):
                raise
            check_class_runs(pretrained, tokens)
            raise  # transformers' class runs, so the fault is in this project
        if not logits.isfinite().all():  # its weights are: they are checked where they are read
            dtype = str(raw_model.compute_dtype).removeprefix('torch.')
            advice = 'use --dtype=bfloat16' if dtype == 'float16' else 'take weights from before its training diverged'
            raise ValueError(f'self-test: logits are not finite: {pretrained.folder} overflows in {dtype}; {advice}')
        ce, expected_ce = model(x, y)[1].item(), F.cross_entropy(logits[0], y[y >= 0], reduction='sum').item()
        if not abs(ce - expected_ce) <= tolerance * expected_ce:
            problems.append(f'the loss is {ce:.6g}, that of the logits {expected_ce:.6g}; {NOT_HERE}')
        whole = '' if raw_model.has_plain_head else ', which exist whole: this class changes them behind the head'
        facts.append(f'the loss is that of the logits{whole}')
        if packed:
            advice = '--packing=False gives each a sequence of its own'
            if documents_mix(model, pretrained.vocab_size, min(32, T), device):
                problems.append(f'{pretrained.arch} lets packed documents see each other: {advice}')
            elif T >= 4 and (far := packed_is_not_alone(model, raw_model, x, length, exact)):
                problems.append(
                    f'{pretrained.arch} computes a document in the middle of a packed row otherwise than alone (logits '
                    f'differ by {far:.2g} of their norm in rows of {T} tokens): {advice}'
                )
            facts.append('packed documents do not see each other')
    processes.reshard(model)  # without a backward pass, weights that forward has gathered would stay gathered
    model.train()
    if loaded:
        expected = collectives.on_rank_0(reference_logits, pretrained, x, places, patience_s=collectives.PATIENCE_S)
        difference = logits_differ(logits.cpu(), expected, exact)
        if not difference <= (1e-4 if exact else 0.1):  # wrong frequencies give about 1
            problems.append(f'logits differ from those of the folder by {difference:.2g} of their norm; {NOT_HERE}')
        rounded = '' if pretrained.frozen_rounding == 'float32' else f' rounded to {pretrained.frozen_rounding}'
        facts.append(
            f'logits are those of {pretrained.weights_folder}{rounded} (difference {difference:.1g} of their norm)'
        )
    if problems:
        raise ValueError(f'self-test: {"; ".join(problems)}')
    return f'self-test: {"; ".join(facts)}'


def longest_of_lengths(config, T):
    """The largest number below T in a configuration that is a length beyond which its class computes otherwise: of a
    window, a chunk, a temperature or a rotary embedding. 0 if there is none."""
    kinds = re.compile('window|chunk|floor_scale|original_max_position')

    def lengths(keys):
        for name, value in keys.items():
            if isinstance(value, dict):
                yield from lengths(value)
            elif kinds.search(str(name)) and isinstance(value, (int, float)) and 0 < value < T:
                yield int(value)

    return max(lengths(config.to_dict()), default=0)


def spread(T, device):
    """Up to 32 places in a row of T tokens, with the first and the last."""
    return torch.linspace(0, T - 1, min(32, T), device=device).round().long()


@contextlib.contextmanager
def logits_at(model, places):
    """A context in which a model of transformers computes the logits at these places (B, P) alone, if its head is a
    module that gets hidden states (B, T, C); see of_places(). Those of a long row would not fit into memory."""

    def select(head, args):
        x, *others = args
        return (of_places(x, places) if x.dim() == 3 else x, *others)

    handle = model.get_output_embeddings().register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


def of_places(logits, places):
    """Logits of a model within logits_at(), or hidden states (B, T, C), at the places (B, P) alone."""
    return logits if logits.shape[1] == places.shape[1] else logits.take_along_dim(places[..., None], 1)


def logits_differ(logits, expected, exact):
    """By which part of their norm logits (1, T, V) differ from those that are expected in fp32. exact: they are fp32,
    too. In 16 bits that of three in four tokens, since a router's near tie sends some tokens to other experts."""
    if exact:
        return (logits - expected).norm() / expected.norm()
    return ((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).quantile(0.75, interpolation='lower')


def packed_is_not_alone(model, raw_model, x, length, exact):
    """By which part of their norm the logits of documents in the middle of packed rows differ from those of the same
    documents alone, if it is more than rounding; else 0. Collective.

    Two documents of x (1, T), the first of more than `length` tokens, stand in two rows of T in turn. What differs
    where they begin a row is rounding, unless it is more than 0.1; in 16 bits, models round in different ways. In a
    mixture a near tie of a router makes more of it, at other tokens in each row."""
    T = x.shape[1]
    end = max(1, min(16, T // 16))
    one, two, rest = x.split([m := min(length + 16, T - 2 * end), f := T - m - end, end], 1)
    rows = torch.cat((torch.cat((one, two, rest), 1), torch.cat((two, one, rest), 1)))
    starts = torch.tensor([[0, m, m + f], [0, f, f + m]], device=x.device)

    def logits(x, places, starts=None):
        with logits_at(raw_model, places):
            return of_places(model(x, None, starts), places).float()

    of_one, of_two = spread(m, x.device), spread(f, x.device)
    places = torch.stack((torch.cat((of_one, m + of_two)), torch.cat((f + of_one, of_two))))  # (2, P)
    alone = torch.cat((logits(one, of_one[None]), logits(two, of_two[None])), 1)  # (1, P, V)
    far = (logits(rows, places, starts) - alone).norm(dim=-1) / alone.norm(dim=-1)  # (2, P)
    if exact:
        return far.max().item() if not far.max() <= 1e-4 else 0.0
    of_documents = far.split([len(of_one), len(of_two)], 1)
    found = [part.quantile(0.75, 1, interpolation='lower').max().item() for part in of_documents]
    rounding = [of_documents[0][0], of_documents[1][1]]  # each as the first of a row
    least = 0.1 if any('experts' in name for name, _ in raw_model.named_modules()) else 0.02
    most = [min(max(least, 2 * part.quantile(0.9).item()), 0.1) for part in rounding]
    return max((by for by, limit in zip(found, most, strict=True) if not by <= limit), default=0.0)


def documents_mix(model, vocab_size, T, device):
    """Whether a document changes what the model computes in another one of the same row of T tokens. Collective.

    Rounding cannot hide it, whatever the dtype: operations of the same shapes give the same bits, so if the first of
    three documents changes, no bit of the middle one's logits may. Mixtures are the exception: their experts then get
    other tokens together, and round in another way. How much that is, a change of the last document shows, which no
    token before it can see. So documents mix if a change of the first one moves more in each of eight rows than a
    change of the last one does in any. By chance that happens once in 12,870 times (8! 8! / 16!).
    """
    third, rows = T // 3, 8
    if third == 0:
        return False
    x = torch.randint(vocab_size, (rows, T), generator=torch.Generator().manual_seed(2))
    starts, middle = torch.tensor([[0, third, 2 * third]] * rows, device=device), slice(third, 2 * third)

    def largest_change(document):
        changed = x.clone()
        changed[:, document] = (x[:, document] + 1) % vocab_size
        return (model(changed.to(device), None, starts)[:, middle].float() - logits).abs().amax((1, 2))  # of each row

    logits = model(x.to(device), None, starts)[:, middle].float()
    by_first, by_last = largest_change(slice(0, third)), largest_change(slice(2 * third, T))
    return bool(by_first.min() > by_last.max())


def check_class_runs(pretrained, tokens):
    """Raise ValueError if transformers' own class cannot run the model either: only there it shows if values in
    config.json do not fit together."""
    try:
        reference_logits(pretrained, tokens)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = one_line(repr(error))
        raise ValueError(f'{pretrained.folder}: transformers cannot run it as config.json says: {reason}') from error


def reference_logits(pretrained, tokens, places=None):
    """Logits (B, T, V), or at places (B, P) alone, on the host, by transformers' unchanged class. It computes in fp32
    on the device of the tokens, with one block in memory at a time. The weights are the folder's, rounded by
    frozen_dtype."""
    places = torch.arange(tokens.shape[1], device=tokens.device)[None] if places is None else places
    weights, seen, device = Weights(pretrained.weights_folder), seen_in_training(pretrained), tokens.device
    with torch.device('meta'):
        model = pretrained.empty_model()
    found, lacking = weights.find(model)
    if lacking:
        model = whole_model(pretrained)  # on the host, because a device may not have room for all of it
        for name, parameter in model.named_parameters():
            parameter.data = seen(name, parameter.data).float()
        with logits_at(model, places.cpu()):
            return of_places(model(tokens.cpu(), use_cache=False).logits, places.cpu())
    aliases = {alias: name for name, names in tensors_to_load(model).items() for alias in names}
    fill_buffers(model, device)
    blocks, sizes = find_blocks(model), {}
    inside = {inner for block in blocks for inner in block.modules()}
    for name, module in model.named_modules():
        if module in blocks or (module not in inside and any(True for _ in module.parameters(recurse=False))):
            empty = module.state_dict()
            sources = {inner: aliases[f'{name}.{inner}'] for inner in empty}
            sizes[name] = sum(weights.nbytes(found[source]) for source in sources.values())

            def fetch(module, args, sources=sources):
                next(shown, None)
                tensors = {
                    inner: seen(name, weights.read(found[name]).to(device)).float() for inner, name in sources.items()
                }
                module.load_state_dict(tensors, assign=True)

            def empty_again(module, args, output, empty=empty):
                module.load_state_dict(empty, assign=True)

            if module is model.get_input_embeddings():  # some classes ask for its device before they call it
                empty = {inner: torch.zeros((), device=device).expand(tensor.shape) for inner, tensor in empty.items()}
                module.load_state_dict(empty, assign=True)
            module.register_forward_pre_hook(fetch)
            module.register_forward_hook(empty_again)
    shown = processes.progress(f'self-test: {pretrained.weights_folder}', sizes)
    with logits_at(model, places):
        return of_places(model.eval()(tokens, use_cache=False).logits, places).cpu()
