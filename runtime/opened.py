"""
A model, whatever names it: a run of any train script, a Hugging Face folder or OWNER/NAME in the hub's cache, or what
export_model.py has written. Opened without weights, so that what does not fit is refused before they are read.

    opened = open_model('out/pre')                    # or 'models/Qwen3-0.6B'; step=, data_dir=, tokenizer=
    opened.model_config or opened.pretrained          # its shape: computed by model.py, or by transformers' class
    language = opened.language()                      # tokenizer, template, what begins a text, what ends one
    model = opened.to_generate('auto', device, say)   # whole, in one process, cast
    opened.fill(model)                                # the weights of a model that is sharded, or not; collective

What there is, and where its parts are:

                                 computed by        weights                        language
    run from scratch             model.py           checkpoint                     out_dir/model
    run, fine-tuned              transformers       checkpoint                     out_dir/model
    run with LoRA                transformers       checkpoint beside init_from    out_dir/model
    run, native                  either             checkpoint                     out_dir/model
    Hugging Face folder          transformers       folder                         folder
    export with model.py in it   model.py           folder                         folder

A run of an earlier version, from scratch, has kept no language: its dataset's folder has it, if that is still the one.
"""

import os
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from layout import WHOLE
from model import GPT, tensors_with_values
from runtime import checkpoint
from runtime.kept import folder_of_language
from system import devices
from system.files import is_run, read_json

LEARNED_CHATS = 'has_learned_chats'  # in the config.json of an export


@dataclass
class Opened:
    name: str  # as it was given
    folder: str  # with the files of its language
    path: str | None = None  # of the checkpoint; None of a folder
    state: dict = field(default_factory=dict)  # of the checkpoint
    model_config: object = None  # model.ModelConfig, if model.py alone computes it
    pretrained: object = None  # Pretrained: transformers' class computes it, and with native model.py may
    tokenizer: str | None = None  # --tokenizer, for a run of an earlier version whose dataset is gone
    trust_remote_code: bool = False

    @property
    def keys(self):
        """Those of the run; {} of a folder."""
        return self.state.get('config', {})

    @property
    def is_native(self):
        return self.keys.get('native', False)

    @property
    def arch(self):
        return (self.pretrained or self.model_config).arch

    @property
    def vocab_size(self):
        return (self.pretrained or self.model_config).vocab_size

    @property
    def positions(self):
        """How many tokens it can see at once; None if a folder does not say."""
        return self.pretrained.positions if self.pretrained else self.model_config.block_size

    @property
    def has_learned_chats(self):
        if not self.keys:  # export_model.py writes it
            return read_json(os.path.join(self.folder, 'config.json'), dict, 'copy it again').get(LEARNED_CHATS) is True
        before = self.keys.get('packed') if self.pretrained else False  # of earlier versions
        return bool(self.keys.get('chats', before) or self.keys.get('prompts_chat'))

    @property
    def is_tuned(self):
        """Whether all weights are a fine-tuning's. (LoRA's are apart from the base's.)"""
        return bool(self.path and self.pretrained and not self.pretrained.lora_rank)

    def language(self, chat_template_kwargs=None, templates=None):
        """The Language; of a model that has learned conversations it stops behind an answer. Raises ValueError if there
        is no tokenizer, or one with more tokens than the model."""
        options = {'fold_system': self.keys.get('fold_system', False), 'has_learned_chats': self.has_learned_chats}
        options['chat_template_kwargs'] = chat_template_kwargs
        if self.keys and self.model_config:
            from text.language import OwnLanguage
            from text.tokenizer import tokenizer_of_run

            tokenizer = tokenizer_of_run(self.folder, self.vocab_size, self.tokenizer)
            language = OwnLanguage(tokenizer, self.keys.get('windows', 'stream'), self.folder, **options)
        else:
            from huggingface.finetune import transformers_offline
            from text.language import TransformersLanguage
            from text.tokenizer import load_transformers_tokenizer

            transformers_offline().logging.set_verbosity_error()
            tokenizer = load_transformers_tokenizer(self.folder, self.trust_remote_code)
            tokenizer.chat_template = templates or tokenizer.chat_template
            named_ends = self.pretrained and getattr(self.pretrained.config.get_text_config(), 'eos_token_id', None)
            language = TransformersLanguage(tokenizer, self.folder, named_ends, **options)
        if self.has_learned_chats:
            language.stop_after_answers()
        return language

    def weights(self):
        """{name: tensor} under the names of what computes it for one process: model.py if model_config says so, else
        transformers. None of a Hugging Face folder, whose files are read where they are needed."""
        if self.path:
            weights = checkpoint.load_weights(self.path)[0]
            if self.is_native:
                from huggingface import native

                weights = native.weights_for_transformers(weights, self.state)
        elif self.model_config:
            from huggingface import convert

            weights = convert.weights_of_export(self.folder, self.model_config)
        else:
            return None
        if self.model_config:
            weights.setdefault('head.weight', weights['embed.weight'])  # a checkpoint has tied weights once only
        return weights

    def dtype_to_compute(self, dtype, device, is_tuned):
        if not self.pretrained:
            return devices.choose_dtype(dtype, device)
        from huggingface import rounding

        return rounding.dtype_to_compute(dtype, device, self.pretrained, is_tuned)

    def to_generate(self, dtype, device, say):
        """The whole model, cast to the dtype it computes in, to write answers with."""
        compute_dtype, weights = self.dtype_to_compute(dtype, device, self.path is not None), self.weights()
        if not self.pretrained:
            model = self.empty(compute_dtype, device)
            model.to_empty(device=device)
            model.load_state_dict(weights)
            devices.cast_parameters(model, compute_dtype)  # every token uses every weight, so cast once
            return model.eval()
        from huggingface import loading, rounding

        model = loading.for_generation(self.pretrained, weights, compute_dtype, device)
        lines = [rounding.line_before_casting(model, self.state, compute_dtype)] if self.path else []
        loading.cast_weights(model, compute_dtype, device)
        for line in [*lines, loading.line_of_base(self.pretrained) if self.path else None]:
            if line:
                say(line)
        return model

    def empty(self, compute_dtype, device, block_size=None):
        """The model on the meta device, as training and evaluate.py shard it: model.py's if that can compute it. With
        native it has as many positions as block_size says, which may be more than the run has used."""
        with torch.device('meta'):
            if self.model_config:
                return GPT(self.model_config, compute_dtype)
            from huggingface import finetune, native

            if self.is_native:
                config = native.model_config_of(self.pretrained)
                return GPT(replace(config, block_size=block_size or config.block_size), compute_dtype)
            return finetune.for_training(self.pretrained, compute_dtype, device)

    def fill(self, model, share=WHOLE, seed=0):
        """Give the weights to a model, sharded or not, that is allocated. Each rank reads the rows that it keeps.
        Collective. share: what this rank has of it, where the script cuts it by hand."""
        if self.pretrained and (not self.path or self.state.get('base')):  # a LoRA checkpoint lacks what is not trained
            from huggingface import loading

            loading.load(model, self.pretrained, seed)
        if self.path and self.state.get('base'):
            from huggingface import lora

            share = replace(share, of_base=lora.names_of_base(model))
        if self.path:
            checkpoint.load(self.path, model, share=share)
        elif self.model_config:
            weights = self.weights()
            with torch.no_grad():
                for name, parameter in tensors_with_values(model):
                    value = weights[name].to(parameter.device)
                    if isinstance(parameter, DTensor):
                        mesh = parameter.device_mesh, parameter.placements
                        value = distribute_tensor(value, *mesh, src_data_rank=None)
                    parameter.copy_(value)


def language_of_run(run):
    """The Language of what a train script trains. Raises ValueError if there is no tokenizer."""
    keys, pretrained = vars(run.config), run.pretrained
    if pretrained:
        options = {'state': {'config': keys}, 'pretrained': pretrained, 'trust_remote_code': keys['trust_remote_code']}
        return Opened(keys['init_from'], pretrained.folder, **options).language(templates=pretrained.chat_templates)
    from dataset.mixture import folder_of
    from text.language import OwnLanguage
    from text.tokenizer import tokenizer_of

    folder = run.language_folder or folder_of(keys)
    try:
        options = {'fold_system': keys.get('fold_system', False), 'has_learned_chats': keys.get('chats', False)}
        language = OwnLanguage(tokenizer_of(folder), keys.get('windows'), folder, **options)
    except (ValueError, OSError) as error:
        given = 'prompts' if run.learns_from == 'prompts' else 'eval_tasks'
        raise ValueError(f'{given} needs the tokenizer of dataset={keys["dataset"]}: {error}') from error
    if language.has_learned_chats:
        language.stop_after_answers()
    return language


def is_fine_tuned(state):
    """Whether the checkpoint with this state is of a run that fine-tunes a model of a Hugging Face folder, computed by
    transformers' class or, with native=True, by model.py."""
    return 'transformers' in state['identity']['model'] or state['config'].get('native', False)


def open_model(name, step=None, data_dir=None, tokenizer=None, trust_remote_code=False, key='out_dir', find=None):
    """The Opened of what `name` names. step, data_dir, tokenizer: of a run. find: function of (out_dir, step) that
    chooses a checkpoint; evaluate.py's asks all ranks. Raises ValueError, with advice, if there is no model."""
    if not is_run(name) and is_hugging_face(name):
        return open_folder(name, trust_remote_code, tokenizer, key)
    path = (find or checkpoint.choose_to_read)(name, step)  # which says what to do if there is none
    state = checkpoint.read_state(path)
    if not is_fine_tuned(state):
        shape, folder = checkpoint.read_model_config(path, state), folder_of_language(name, state, data_dir, tokenizer)
        return Opened(name, folder, path, state, shape, tokenizer=tokenizer)
    refuse_tokenizer(tokenizer)
    from huggingface.pretrained import Pretrained

    pretrained = Pretrained.from_run(name, state, trust_remote_code)
    return Opened(name, pretrained.folder, path, state, None, pretrained, trust_remote_code=trust_remote_code)


def open_folder(name, trust_remote_code=False, tokenizer=None, key='out_dir'):
    """The Opened of a Hugging Face folder, or of an export."""
    from huggingface import convert, files
    from huggingface.pretrained import Pretrained, refuse_adapter

    refuse_tokenizer(tokenizer)
    folder = files.find_folder(name, key=key)
    refuse_adapter(folder)
    files.Weights(folder, key=key)  # raises if there are no weights
    if model_config := convert.config_of_export(folder):
        return Opened(name, folder, model_config=model_config, trust_remote_code=trust_remote_code)
    pretrained = Pretrained(folder, trust_remote_code=trust_remote_code)
    return Opened(name, folder, pretrained=pretrained, trust_remote_code=trust_remote_code)


def is_hugging_face(name):
    """Whether there is a model's folder with this name, or one in the hub's local cache. An adapter is one, too, which
    open_folder() refuses with advice."""
    if os.path.isdir(name):
        return any(os.path.exists(os.path.join(name, file)) for file in ('config.json', 'adapter_config.json'))
    from huggingface import files

    try:
        return bool(files.find_folder(name))
    except ValueError:
        return False


def refuse_tokenizer(tokenizer):
    if tokenizer is not None:
        raise ValueError(f'tokenizer={tokenizer}: a model of transformers has its own; leave it out')
