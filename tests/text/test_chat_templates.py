"""The chat template that a model is asked with is the one with which its data were made."""

import contextlib
import json
import shutil

import pytest
import transformers
from chats import CHATML, QWEN3, encoder_of, make_tokenizer, messages_of

from text.chat_rows import conversation_of
from text.conversations import digest_of, fold_system_messages, template_of, templates_of, templates_of_data
from text.templates import write_templates


def put(folder, default, **others):
    """Give a folder these templates as .jinja files."""
    (folder / 'chat_template.jinja').write_text(default)
    for name, text in others.items():
        (folder / 'additional_chat_templates').mkdir(exist_ok=True)
        (folder / 'additional_chat_templates' / f'{name}.jinja').write_text(text)


def put_into_settings(folder, template):
    """Give a folder this template, or list of them, in tokenizer_config.json, in place of its own."""
    (folder / 'chat_template.jinja').unlink(missing_ok=True)
    shutil.rmtree(folder / 'additional_chat_templates', ignore_errors=True)
    settings = json.loads((folder / 'tokenizer_config.json').read_text())
    (folder / 'tokenizer_config.json').write_text(json.dumps({**settings, 'chat_template': template}))


def put_list(folder, **templates):
    put_into_settings(folder, [{'name': name, 'template': text} for name, text in templates.items()])


ONE, TWO = {'default': CHATML}, {'default': CHATML, 'tool_use': QWEN3}
PLACES = {
    'none': (lambda folder: put_into_settings(folder, None), {}),
    'file': (lambda folder: put(folder, CHATML), ONE),
    'settings': (lambda folder: put_into_settings(folder, CHATML), ONE),
    'list of one': (lambda folder: put_list(folder, default=CHATML), ONE),
    'files': (lambda folder: put(folder, CHATML, tool_use=QWEN3), TWO),
    'list': (lambda folder: put_list(folder, tool_use=QWEN3, default=CHATML), TWO),
    'file before list': (lambda folder: [put_list(folder, default=QWEN3), put(folder, CHATML)], ONE),
}


@pytest.mark.parametrize('place', PLACES)
def test_templates_are_found_wherever_transformers_finds_them(place, tmp_path):
    write, expected = PLACES[place]
    folder = tmp_path / 'model'
    make_tokenizer(folder)
    write(folder)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder).chat_template
    theirs = theirs if isinstance(theirs, dict) else {'default': theirs} if theirs else {}
    assert templates_of(folder) == theirs == expected
    assert expected != ONE or template_of(folder) == CHATML
    assert (digest_of(template_of(folder)) is None) == (place == 'none')


@pytest.mark.parametrize('name', ['../../../PWNED', '/PWNED', 'a/PWNED', '', 3, None])
def test_the_name_of_a_template_is_no_path(name, tmp_path):
    make_tokenizer(tmp_path / 'model')
    put_into_settings(tmp_path / 'model', [{'name': 'default', 'template': 'a'}, {'name': name, 'template': 'b'}])
    with pytest.raises(ValueError, match=r'tokenizer_config.json: chat_template\[1\].name: found '):
        templates_of(tmp_path / 'model')
    (tmp_path / 'run' / 'model').mkdir(parents=True)
    with pytest.raises(ValueError, match='the name of a chat template: found '):
        write_templates(tmp_path / 'run' / 'model', {'default': 'a', name: 'b'})
    assert not [*(tmp_path / 'run').rglob('*PWNED*')] and not [*tmp_path.glob('PWNED*')]


def test_a_template_that_is_a_link_out_of_the_folder_is_not_read(tmp_path):
    (tmp_path / 'secret').write_text('PRIVATE')
    make_tokenizer(tmp_path / 'model')
    put(tmp_path / 'model', CHATML, tool_use=QWEN3)
    link = tmp_path / 'model' / 'additional_chat_templates' / 'tool_use.jinja'
    link.unlink()
    link.symlink_to('../../secret')
    with pytest.raises(ValueError, match='tool_use.jinja: found a link to .*secret'):
        templates_of(tmp_path / 'model')


def dataset_made_with(folder, template, **more):
    folder.mkdir()
    (folder / 'meta.json').write_text(json.dumps({'masked': True, 'settings': {'chat_template': template}, **more}))
    return str(folder)


def test_a_run_says_if_its_model_would_be_asked_in_another_form_than_its_data_have(tmp_path):
    folder = tmp_path / 'model'
    make_tokenizer(folder)
    put(folder, CHATML, tool_use=QWEN3)
    both, one = digest_of(template_of(folder)), digest_of(CHATML)
    two_known = dataset_made_with(tmp_path / 'two', both, chat_templates=TWO)
    one_known = dataset_made_with(tmp_path / 'one', one, chat_templates=ONE)
    one_old = dataset_made_with(tmp_path / 'old', one)  # by a version that did not write the text
    text = dataset_made_with(tmp_path / 'text', None, masked=False)

    put_list(folder, tool_use=QWEN3, default=CHATML)  # the same in another place
    assert templates_of_data([text, two_known], folder) == (None, [])
    templates, (line,) = templates_of_data([text, one_known], folder)
    assert templates == ONE and line.startswith(f'{one_known} was made with another chat template than {folder} has: ')
    assert line.endswith(f'`python prepare_data.py --dataset=... --name=... --tokenizer={folder}`')
    templates, (line,) = templates_of_data([one_old], folder)
    assert templates is None and line.startswith('WARNING: ') and 'python prepare_data.py' in line
    templates, lines = templates_of_data([one_known, one_old, two_known], folder)
    assert templates == ONE and len(lines) == 2
    assert lines[0].startswith(f'WARNING: {two_known} was made with another chat template than {one_known}: prepare')

    put_into_settings(folder, None)
    templates, (line,) = templates_of_data([one_known], folder)
    assert templates == ONE and line.startswith(f'{folder} has no chat template, {one_known} was made with one: ')
    templates, (line,) = templates_of_data([one_old], folder)
    assert templates is None and line.startswith('WARNING: ') and 'put that into its folder' in line
    assert templates_of_data([text], folder) == (None, [])


def test_all_system_messages_before_a_users_are_folded_into_it_and_advised_only_if_there_are_any(tmp_path):
    refusal = "{%- if messages[0].role == 'system' %}{{- raise_exception('no system') }}{%- endif %}"
    encoder, _ = encoder_of(make_tokenizer(tmp_path, refusal + CHATML))
    before = [('system', 'S1'), ('developer', 'S2')]
    rows = [
        messages_of([*before, *between, ('user', 'u'), ('assistant', 'a')]) for between in ([], [('assistant', 'b')])
    ]
    row, never = (conversation_of({'messages': messages}) for messages in rows)
    ((_, _, text),) = encoder.examples(row, fold_system=True)
    assert text.startswith('<|im_start|>user\nS1\n\nS2\n\nu<|im_end|>')
    with pytest.raises(ValueError, match=r'no system; --fold_system gives system messages to the user\)'):
        list(encoder.examples(row))
    with pytest.raises(ValueError, match=r'no system\)'):
        list(encoder.examples(never, fold_system=True))


def test_an_end_of_answers_that_is_no_token_is_warned_of(tmp_path):
    ends = {
        'token': CHATML,
        'letters': CHATML.replace('<|im_end|>', '<|eot|>'),
        'none': CHATML.replace('<|im_end|>', ''),
    }
    lines = {name: encoder_of(make_tokenizer(tmp_path / name, end))[0].line_of_end() for name, end in ends.items()}
    assert lines['token'] is lines['none'] is None and "WARNING: '<|eot|>', by which the chat" in lines['letters']


def test_no_system_message_is_folded_into_one_that_is_learned_otherwise():
    system, user = ({'role': role, 'content': role} for role in ('system', 'user'))
    for weights, fits in (((1, 0), False), ((None, 1), False), ((1, 1), True), ((0, None), True)):
        messages = [{**message, 'weight': weight} for message, weight in zip((system, user), weights, strict=True)]
        with contextlib.nullcontext() if fits else pytest.raises(ValueError, match='would join what is learned'):
            assert fold_system_messages(messages)[0]['content'] == 'system\n\nuser'
