"""
Makes models of model.py loadable by `transformers` where it has no class for them. export_model.py copies this file,
model.py and what that imports into the folder with the weights, and from there they are loaded with

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

This file only wraps model.py, which computes exactly as in training. It has no mask for padding, so pad on the right.
generate() has no cache, so every new token costs a pass over all tokens before it.
"""

from dataclasses import fields

from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .model import GPT, ModelConfig


class GPTConfig(PretrainedConfig):
    """config.json: the fields of ModelConfig under their own names, and those that every transformers model has."""

    model_type = 'native_gpt'
    attribute_map = {  # the name that tools ask for -> the name here
        'hidden_size': 'n_embd',
        'num_hidden_layers': 'n_layer',
        'num_attention_heads': 'n_head',
        'max_position_embeddings': 'block_size',
    }

    def __init__(self, **keys):
        for field in fields(ModelConfig):
            setattr(self, field.name, keys.pop(field.name, field.default))
        keys['tie_word_embeddings'] = bool(self.tie_embeddings)
        super().__init__(**keys)


class UnpaddedConfig(ModelConfig):
    """A ModelConfig without the rows that pad the vocabulary in training: they are not exported."""

    @property
    def padded_vocab_size(self):
        return self.vocab_size


class GPTForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = GPTConfig
    base_model_prefix = 'model'
    _no_split_modules = ['Block']  # device_map keeps a block on one device
    _keep_in_fp32_modules_strict = ['router']  # by which the experts of a token are chosen
    _tied_weights_keys = {'model.head.weight': 'model.embed.weight'}  # where the config ties them

    def __init__(self, config):
        super().__init__(config)
        self.model = GPT(UnpaddedConfig.from_keys(config.to_dict()))
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed

    def get_output_embeddings(self):
        return self.model.head

    def forward(self, input_ids, attention_mask=None, labels=None, **options):
        """input_ids (B, T). labels (B, T): input_ids again, -100 = ignored. Returns logits (B, T, V) and the mean loss.

        Raises ValueError if attention_mask (B, T) hides a token that comes before a visible one.
        """
        if attention_mask is not None and (attention_mask[:, 1:] > attention_mask[:, :-1]).any():
            raise ValueError("this model has no mask for padding: pad on the right (tokenizer.padding_side = 'right')")
        self.model.compute_dtype = self.model.embed.weight.dtype
        logits = self.model(input_ids)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **options)
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **options):
        """There is no cache, so each step gets all tokens again, or the last ones that fit the context."""
        inputs = {'input_ids': input_ids, 'attention_mask': attention_mask}
        return {name: None if value is None else value[:, -self.config.block_size :] for name, value in inputs.items()}
