"""
What a model in a Hugging Face folder is, which of its weights are trained, and which of its files a run keeps. Its
weights are read by loading.py.
"""

import contextlib
import copy
import functools
import json
import math
import os
import re
import shutil
from dataclasses import dataclass, fields

import torch
from torch import nn

from configurator import tagged
from huggingface import finetune, lora, rotation
from huggingface.files import Weights, find_folder, names_of_tokens, rows_in_folder, tensors_to_load
from system.errors import one_line
from system.files import merge_command, read_json, refuse_lfs_pointer, refuse_link_out
from text.templates import MORE_TEMPLATES, write_templates
from text.tokenizer import KEPT

LARGEST_KEPT = 2**26  # bytes of a file that is kept; a large vocabulary's tokenizer.json has 20 MB
LORA_KEYS = 'lora_rank lora_alpha lora_targets lora_dropout lora_rslora modules_to_save'.split()
# Keys of config.json on which no result depends.
VOLATILE = re.compile(rf'transformers_version|_name_or_path|dtype|use_cache|jitter_noise|{finetune.NOISE.pattern}')
# Classes whose attention sees other documents of a row, though nothing in them looks like it: most make a mask without
# looking at positions (transformers 5.24), and MiniMax's is linear. The self-test finds those that are missing here.
MIXED_ROWS = 'afmoe biogpt gpt_oss minimax openai-gpt opt xglm'.split()


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
        transformers = finetune.transformers_offline()
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
            model = finetune.for_training(self)
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
        names = [name for name in vars(self.config.get_text_config()) if finetune.DROPOUT.search(name)]
        return any(not re.search('classifier|summary', name) for name in names)

    @property
    def has_routers(self):
        """Whether the class is a mixture whose experts router_aux and router_z can balance."""
        with torch.device('meta'):
            return bool(finetune.find_routers(self.empty_model()))

    @property
    def has_lora_of_experts(self):
        if not self.lora_rank:
            return False
        with torch.device('meta'):
            model = finetune.for_training(self)
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
        """Copy configuration, tokenizer and license into out_dir when a run begins, so that it no longer needs those of
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
        transformers, config = finetune.transformers_offline(), copy.deepcopy(config or self.config)
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
        if finetune.has_uneven_experts(model):
            model.set_experts_implementation('eager')  # computes one after the other
        return model

    @property
    def keeps_documents_apart(self):
        """Whether documents that are packed into a row do not see each other, as far as the class tells: not if it has
        a state or a convolution that runs on over their borders, or takes no positions. self_test() measures it."""
        if self.arch in finetune.OWN_ATTENTION:
            return True
        with torch.device('meta'):
            model = self.empty_model()
        mixes = model._is_stateful or any(isinstance(module, nn.Conv1d) for module in model.modules())
        mixes |= finetune.counts_columns(model.config.get_text_config(), self.block_size)
        return not mixes and self.arch not in MIXED_ROWS and finetune.Arguments.of(type(model)).position_ids

    def to_dict(self):
        """All settings that decide shapes and results, for the log, planning/ and the identity of a checkpoint."""
        return self.facts

    @functools.cached_property
    def facts(self):
        with torch.device('meta'):
            model = finetune.for_training(self)
        text = self.config.get_text_config()
        heads, head_dim = finetune.heads_of(text)
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
    """Copy configuration, tokenizer, templates and license of a model's folder, all but its weights, into another one.
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
