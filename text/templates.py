"""
Chat templates and the files that transformers needs beside a tokenizer.json: for a run from scratch or a base model,
whose tokenizer comes without.

    templates = {'default': default_template(folder, eot)}
    write_settings(folder, facts, like)                # tokenizer_config.json; facts: what a meta.json says
    write_templates(folder, templates)                 # chat_template.jinja, and others by name

A BPE that prepare_data.py trains reserves the tokens of ChatML, which Qwen, SmolLM and many others write, and which
servers know by that name. Any other tokenizer gets turns in letters, whose answers end with its end-of-text token: that
takes no new rows in an embedding, and the model knows this token already.
"""

import json
import os
import shutil
from pathlib import Path

from system.files import bare_name, read_json, write_file
from text.tokenizer import END_OF_TEXT, TURNS

MORE_TEMPLATES = 'additional_chat_templates'  # the folder in a model's folder that has those with names

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)
# The space behind a colon belongs to the answer's first word, as in any text.
LETTERS = (
    "{% for message in messages %}{% if message['role'] in ('user', 'assistant') %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] }}{{ 'EOT' if message['role'] == 'assistant' }}\n\n"
    "{% else %}{{ message['content'] }}\n\n{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def default_template(folder, eot):
    """(a chat template for the tokenizer.json in a folder that has none, its name in words). eot: the text of the token
    that ends a document."""
    content = read_json(Path(folder, 'tokenizer.json'), {'added_tokens': [{'content': str}]}, 'copy it again')
    if {*TURNS} <= {token['content'] for token in content['added_tokens']}:
        return CHATML, 'ChatML'
    return LETTERS.replace('EOT', eot), 'turns in letters, as in "User: ..."'


def write_settings(folder, facts, like):
    """Write the tokenizer_config.json with which transformers reads a tokenizer.json as it is. like: the folder whose
    special tokens it names, since templates ask for them; if that names none, they are those of the facts."""
    path = Path(like, 'tokenizer_config.json')
    given = read_json(path, dict, 'copy it again') if path.exists() else {}
    named = {key: value for key, value in given.items() if key.endswith('_token') and not key.startswith('add_')}
    if not named:
        named = {'eos_token': facts.get('eot_text', END_OF_TEXT)}
        named |= {'bos_token': facts['bos_text'][-1]} if facts.get('bos_text') else {}
    settings = {'tokenizer_class': 'PreTrainedTokenizerFast', **named}
    write_file(Path(folder, 'tokenizer_config.json'), json.dumps(settings, indent=1))


def write_templates(folder, templates):
    """Put chat templates, {name: text}, into a Hugging Face folder, in place of its own."""
    for name in templates:
        bare_name(name, 'the name of a chat template')
    shutil.rmtree(os.path.join(folder, MORE_TEMPLATES), ignore_errors=True)
    settings = Path(folder, 'tokenizer_config.json')
    if settings.exists():
        content = read_json(settings, dict, 'copy it again')
        if content.pop('chat_template', None) is not None:
            write_file(settings, json.dumps(content, indent=2, ensure_ascii=False))
    for name, text in templates.items():
        path = Path(folder, 'chat_template.jinja' if name == 'default' else f'{MORE_TEMPLATES}/{name}.jinja')
        path.parent.mkdir(exist_ok=True)
        write_file(path, text)
