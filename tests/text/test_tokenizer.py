"""tokenizer.py: every kind of tokenizer encodes and decodes, and a missing name or file ends in one clear line."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import requests
import tiktoken
import transformers
from fuzzing.cases import small_tokenizer
from prepared import CACHE, error_of, needs_gpt2
from tokenizers import Tokenizer, processors

from text import encoding
from text.documents import Piece
from text.language import OwnLanguage, TransformersLanguage
from text.tokenizer import (
    END_OF_TEXT,
    FileTokenizer,
    TiktokenTokenizer,
    check_same_tokenizer,
    describe,
    difference,
    fetch_tokenizer,
    load_tokenizer,
    load_transformers_tokenizer,
    same_tokenizer,
    tokenizer_of,
    tokenizer_of_run,
    train_bpe,
)

TEXTS = [
    'def f(x):\n    return x + 1\n',
    "it's 12345 o'clock   \n\n\n  \tindented",
    'Größe, 中文字, 🙂👩‍👩‍👧, e\u0301',
    f'a literal {END_OF_TEXT} in a text',
    ' ' * 5000 + 'x' * 5000 + '\r\n' * 500,
]


@pytest.fixture(scope='module')
def bpe_folder(tmp_path_factory):
    """A dataset folder with a BPE of 600 tokens, trained on some modules of the standard library."""
    folder = tmp_path_factory.mktemp('data') / 'stdlib-bpe600'
    folder.mkdir()
    texts = [path.read_bytes() for path in sorted(Path(os.__file__).parent.glob('[a-c]*.py'))]
    train_bpe(texts, 600, folder / 'tokenizer.json')
    return folder


@pytest.fixture(scope='module')
def hugging_face_folder(bpe_folder):
    """The same tokenizer as transformers would save it."""
    folder = bpe_folder.parent / 'hugging_face'
    folder.mkdir()
    shutil.copy(bpe_folder / 'tokenizer.json', folder)
    (folder / 'tokenizer_config.json').write_text(json.dumps({'eos_token': {'content': END_OF_TEXT}}))
    return folder


@pytest.fixture
def tokenizers(bpe_folder, hugging_face_folder):
    return [load_tokenizer('bytes'), load_tokenizer('bpe', bpe_folder), load_tokenizer(str(hugging_face_folder))]


def test_texts_come_back_and_no_text_gives_the_end_of_text_token(tokenizers):
    for tokenizer in tokenizers:
        assert 0 <= tokenizer.eot < tokenizer.vocab_size and tokenizer.decode([tokenizer.eot]) == END_OF_TEXT
        for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
            assert isinstance(ids, np.ndarray) and ids.tolist() == tokenizer.encode(text), tokenizer.name
            assert tokenizer.decode(ids) == text and ids.max() < tokenizer.vocab_size and tokenizer.eot not in ids


def test_a_trained_bpe_has_the_size_asked_for_and_depends_on_the_texts_alone(bpe_folder, tmp_path, monkeypatch):
    tokenizer = load_tokenizer('bpe', bpe_folder)
    assert tokenizer.vocab_size == 600
    assert [tokenizer.decode([token]) for token in tokenizer.encode('x 3758')] == ['x', ' ', *'3758']
    texts = [path.read_bytes() for path in sorted(Path(os.__file__).parent.glob('[a-c]*.py'))]
    monkeypatch.setenv('TOKENIZERS_PARALLELISM', 'false')  # with threads, words are counted in another order
    train_bpe(texts, 600, tmp_path / 'tokenizer.json')
    assert (tmp_path / 'tokenizer.json').read_bytes() == (bpe_folder / 'tokenizer.json').read_bytes()


def test_a_text_too_small_for_the_vocabulary_gives_a_smaller_one(tmp_path):
    train_bpe([b'abab abab'], 2048, tmp_path / 'tokenizer.json')
    tokenizer = load_tokenizer('bpe', tmp_path)
    assert 257 < tokenizer.vocab_size < 270
    assert tokenizer.decode(tokenizer.encode('Größe')) == 'Größe'  # all bytes are there


def test_tiktoken_runs_a_trained_bpe_with_the_ids_of_the_tokenizers_library(bpe_folder):
    ours = load_tokenizer('bpe', bpe_folder)
    theirs = FileTokenizer(bpe_folder / 'tokenizer.json', END_OF_TEXT)
    assert (ours.vocab_size, ours.eot) == (theirs.vocab_size, theirs.eot)
    other_texts = [path.read_text(encoding='utf-8') for path in sorted(Path(os.__file__).parent.glob('[d-s]*.py'))]
    for text in TEXTS + other_texts:
        assert ours.encode(text) == theirs.encode(text)


def test_a_dataset_names_its_tokenizer(bpe_folder, hugging_face_folder, tmp_path):
    named = {('bytes', 0): None, ('bpe', 600): bpe_folder, (str(hugging_face_folder), 0): hugging_face_folder}
    for (name, size), model in named.items():
        facts = describe(name, size)
        tokenizer = tokenizer_of(folder_of(tmp_path / facts['name'], model, facts))
        assert tokenizer.name == facts['name']
        assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]


@pytest.mark.parametrize('meta', [None, {}, {'tokenizer': None}, {'tokenizer': 'gpt2'}])
def test_a_dataset_that_does_not_name_its_tokenizer_is_an_error(meta, tmp_path):
    if meta is not None:
        (tmp_path / 'meta.json').write_text(json.dumps(meta))
    with pytest.raises(ValueError, match='is missing' if meta is None else 'does not name a tokenizer'):
        tokenizer_of(tmp_path)
    for size, name in ((50257, 'gpt2'), (2048, 'NAME')):  # no other has 2,048 tokens than the one that is looked for
        with pytest.raises(ValueError, match=f'of {size} tokens, with --tokenizer={name}$'):
            tokenizer_of_run(tmp_path, size)


@pytest.mark.parametrize(
    'call, says',
    [
        (lambda: load_tokenizer('gpt-2'), 'did you mean gpt2'),
        (lambda: describe('byte', 0), 'did you mean .*bytes'),
        (lambda: load_tokenizer('models/not_there'), 'no such folder'),
        (lambda: describe('bpe', 256), 'at least 259'),
        (lambda: fetch_tokenizer('bytes', 'unused'), 'needs no files'),
    ],
)
def test_a_name_that_cannot_be_is_answered_with_what_can(call, says):
    with pytest.raises((ValueError, FileNotFoundError), match=says):
        call()


def test_a_file_in_place_of_its_folder_is_answered_with_the_folder(hugging_face_folder):
    file = hugging_face_folder / 'tokenizer.json'
    with pytest.raises(ValueError, match=f'tokenizer={file} is a file: give its folder, --tokenizer={file.parent}$'):
        load_tokenizer(str(file))


LFS = 'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n'
BROKEN = [  # file, its content, what the line says
    *(('tokenizer.json', content, 'tokenizer.json.*copy it again') for content in ('{', '5', '{"a": 1}')),
    ('tokenizer.json', LFS, 'tokenizer.json.*pointer of Git LFS.*lfs pull'),
    ('tokenizer.json', None, 'no tokenizer.json'),
    *(('tokenizer_config.json', content, 'tokenizer_config.json(:| is damaged).*copy it again')
      for content in ('{', '[]', 'null', '\ufeff{}')),
    ('tokenizer_config.json', '{"eos_token": null}', 'names no eos_token'),
    ('tokenizer_config.json', '{"eos_token": "</s>"}', "no token '</s>'"),
]  # fmt: skip


@pytest.mark.parametrize('name, content, says', BROKEN)
def test_a_folder_that_holds_no_whole_tokenizer_is_one_line_with_the_mend(
    hugging_face_folder, tmp_path, name, content, says
):
    folder = shutil.copytree(hugging_face_folder, tmp_path / 'model')
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content, encoding='utf-8')
    for load in (load_tokenizer, *[lambda folder: describe(folder, 0)] * (name == 'tokenizer.json')):
        with pytest.raises((ValueError, FileNotFoundError), match=says) as refused:
            load(str(folder))
        assert '\n' not in str(refused.value)


def llama3_files(folder, hugging_face_folder, **files):
    """A folder with tokenizer.json and an <|eot_id|>, and JSON files of these names beside it."""
    folder.mkdir()
    content = json.loads((hugging_face_folder / 'tokenizer.json').read_text())
    token = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False, 'special': True}
    content['added_tokens'].append({'id': 600, 'content': '<|eot_id|>', **token})
    (folder / 'tokenizer.json').write_text(json.dumps(content))
    for name, fields in files.items():
        (folder / f'{name}.json').write_text(json.dumps(fields))
    return str(folder)


@pytest.mark.parametrize(
    'files',
    [
        {'tokenizer_config': {'eos_token': '<|eot_id|>'}},
        {'tokenizer_config': {'eos_token': {'content': '<|eot_id|>', '__type': 'AddedToken'}}},
        {'tokenizer_config': {'eos_token': ['<|eot_id|>', END_OF_TEXT]}},
        {'tokenizer_config': {}, 'special_tokens_map': {'eos_token': {'content': '<|eot_id|>'}}},
        {'tokenizer_config': {'eos_token': None}, 'generation_config': {'eos_token_id': [600, 0]}},
        {'tokenizer_config': {}, 'generation_config': {}, 'config': {'eos_token_id': 600}},
    ],
)
def test_the_end_of_text_is_found_where_models_of_the_hub_name_it(files, hugging_face_folder, tmp_path):
    folder = llama3_files(tmp_path / 'llama', hugging_face_folder, **files)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eot, tokenizer.vocab_size) == (600, 601)
    assert describe(folder, 0)['eot_text'] == '<|eot_id|>'


def test_a_file_that_asks_for_truncation_cuts_no_text_and_ids_with_gaps_lie_below_vocab_size(
    hugging_face_folder, tmp_path
):
    content = json.loads((hugging_face_folder / 'tokenizer.json').read_text())
    content['truncation'] = {'direction': 'Right', 'max_length': 8, 'strategy': 'LongestFirst', 'stride': 0}
    content['model']['vocab']['a token behind a gap'] = 4999
    (tmp_path / 'tokenizer.json').write_text(json.dumps(content))
    tokenizer = FileTokenizer(tmp_path / 'tokenizer.json', END_OF_TEXT)
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0] and tokenizer.vocab_size == 5000


# --- a dataset for a model --------------------------------------------------------------------------------------------


def folder_of(folder, model, facts, content=None, **more):
    """A dataset's folder, as far as prepare_data.py writes the tokenizer of `model` into it. content: of the file, if
    it is another one."""
    folder.mkdir(exist_ok=True)
    if content or model:
        text = json.dumps(content) if content else (Path(model) / 'tokenizer.json').read_text(encoding='utf-8')
        (folder / 'tokenizer.json').write_text(text, encoding='utf-8')
    (folder / 'meta.json').write_text(json.dumps({'tokenizer': facts, **more}))
    return folder


@pytest.fixture
def dataset(hugging_face_folder, tmp_path):
    return folder_of(tmp_path / 'dataset', hugging_face_folder, describe(str(hugging_face_folder), 0))


def test_a_dataset_fits_the_model_whose_tokenizer_made_it(dataset, bpe_folder, hugging_face_folder, tmp_path):
    check_same_tokenizer(dataset, hugging_face_folder)
    other = tmp_path / 'written_anew'  # the same tokenizer in other bytes
    shutil.copytree(hugging_face_folder, other)
    content = json.loads((other / 'tokenizer.json').read_text())
    (other / 'tokenizer.json').write_text(json.dumps(content, indent=7))
    check_same_tokenizer(dataset, other)
    check_same_tokenizer(folder_of(tmp_path / 'bpe', bpe_folder, describe('bpe', 600)), hugging_face_folder)


def written_anew(folder, change, to, name='bpe'):
    """A dataset's folder, with the tokenizer.json of another after change(its content)."""
    facts = {'name': name} if name == 'bpe' else {'name': name, 'eot_text': END_OF_TEXT}
    content = json.loads((folder / 'tokenizer.json').read_text())
    change(content)
    return folder_of(to, folder, facts, content)


def swap(content, a=300, b=301):
    """Two words of a vocabulary take each other's place."""
    of = {number: word for word, number in content['model']['vocab'].items()}
    content['model']['vocab'] |= {of[a]: b, of[b]: a}


def in_another_form(content):
    """As an export of ours writes a tokenizer, and another version of `tokenizers`."""
    content['post_processor'] = {'type': 'ByteLevel', 'add_prefix_space': True, 'trim_offsets': False}
    content['model']['merges'] = [
        ' '.join(pair) if isinstance(pair, list) else pair for pair in content['model']['merges']
    ]
    content['model'] |= {'byte_fallback': False, 'continuing_subword_prefix': None}
    content |= {'truncation': {'max_length': 9, 'strategy': 'LongestFirst', 'stride': 0, 'direction': 'Right'}}


def test_tokenizers_are_compared_by_what_decides_ids(bpe_folder, tmp_path):
    bpe = written_anew(bpe_folder, lambda content: None, tmp_path / 'bpe')
    for number, name in enumerate(('bpe', 'models/exported')):
        assert same_tokenizer(bpe, written_anew(bpe, in_another_form, tmp_path / f'form{number}', name))
        other = written_anew(bpe, swap, tmp_path / f'swapped{number}', name)
        assert not same_tokenizer(bpe, other)
        assert re.search('has other tokens than that of .*swapped., the first of them 300', difference(bpe, other))
    more = written_anew(bpe, lambda content: content['model']['vocab'].update(new=600), tmp_path / 'more')
    assert re.search('has 600 tokens, that of .*more 601', difference(bpe, more)) and not same_tokenizer(bpe, more)


def test_a_dataset_for_another_tokenizer_is_refused_with_the_command(dataset, hugging_face_folder, tmp_path):
    other = tmp_path / 'other_model'
    other.mkdir()
    train_bpe([b'quite another text, of which other merges come. ' * 9], 400, other / 'tokenizer.json')
    with pytest.raises(ValueError, match='hugging_face .*other tokens .*other_model') as error:
        check_same_tokenizer(dataset, other)
    assert f'`python prepare_data.py --dataset=... --tokenizer={other}`' in str(error.value)
    assert str(dataset) in str(error.value) and '\n' not in str(error.value)

    ends = llama3_files(tmp_path / 'ends', hugging_face_folder, tokenizer_config={'eos_token': '<|eot_id|>'})
    with pytest.raises(ValueError, match=r'ends .*\b0, .*ends .* 600 \(<\|eot_id\|>\)'):
        check_same_tokenizer(dataset, ends)
    with pytest.raises(ValueError, match='bytes .*other tokens'):
        check_same_tokenizer(folder_of(tmp_path / 'bytes', None, {'name': 'bytes'}), hugging_face_folder)


def test_conversations_need_the_same_special_tokens(dataset, hugging_face_folder, tmp_path):
    with_turns = llama3_files(tmp_path / 'turns', hugging_face_folder, tokenizer_config={'eos_token': END_OF_TEXT})
    check_same_tokenizer(folder_of(dataset, with_turns, describe(with_turns, 0)), hugging_face_folder)
    folder_of(dataset, with_turns, describe(with_turns, 0), masked=True)
    with pytest.raises(ValueError, match=r'special token <\|eot_id\|>'):
        check_same_tokenizer(dataset, hugging_face_folder)


def test_what_cannot_be_compared_is_not(dataset, hugging_face_folder, tmp_path):
    check_same_tokenizer(tmp_path / 'data' / 'synthetic', hugging_face_folder)
    for meta in ({}, {'tokenizer': None}, {'tokenizer': 'gpt2'}):
        (dataset / 'meta.json').write_text(json.dumps(meta))
        check_same_tokenizer(dataset, tmp_path / 'no_model')


def test_a_model_without_tokenizer_is_named_with_the_command_that_checks_it(dataset, tmp_path):
    command = '`python download_model.py --model=.*no_model`'
    with pytest.raises(FileNotFoundError, match=f'no_model .*tokenizer.json.*{command}'):
        check_same_tokenizer(dataset, tmp_path / 'no_model')


# --- tiktoken's files -------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A writable copy of tiktoken's cache, and tiktoken as in a new process without network."""

    def no_network(*args, **kwargs):
        raise requests.exceptions.ConnectionError('no network in this test')

    monkeypatch.setattr(requests, 'get', no_network)
    monkeypatch.setattr(tiktoken.registry, 'ENCODINGS', {})
    folder = tmp_path / 'cache'
    folder.mkdir()
    if CACHE.exists():
        for file in CACHE.iterdir():
            shutil.copyfile(file, folder / file.name)
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(folder))
    return folder


@needs_gpt2
def test_gpt2_encodes_as_openai_published(cache):
    tokenizer = load_tokenizer('gpt2')
    assert (tokenizer.vocab_size, tokenizer.eot) == (50257, 50256)
    assert tokenizer.encode('hello world') == [31373, 995]
    assert tokenizer.encode_batch([END_OF_TEXT])[0].tolist() == [27, 91, 437, 1659, 5239, 91, 29]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    folder, fetched = fetch_tokenizer('gpt2', 'unused')  # which verifies the files that are there
    assert folder == str(cache) and fetched.vocab_size == 50257


@needs_gpt2
def test_a_damaged_file_of_the_cache_is_named_and_said_to_be_deleted(cache):
    damaged = cache / '6d1cbeee0f20b3d9449abfede4726ed8212e3aee'
    damaged.write_bytes(damaged.read_bytes()[:-1] + b'?')
    with pytest.raises(ValueError, match='6d1cbeee.*damaged.*deleted') as error:
        load_tokenizer('gpt2')
    assert '--cache_tokenizer=gpt2' in str(error.value)
    assert not damaged.exists()


def test_without_files_and_network_the_command_to_fetch_them_is_given(cache, monkeypatch, tmp_path):
    monkeypatch.delenv('TIKTOKEN_CACHE_DIR')
    with pytest.raises(ValueError, match='python prepare_data.py --cache_tokenizer=gpt2') as error:
        load_tokenizer('gpt2', tmp_path / 'data' / 'some-gpt2')
    assert str(tmp_path / 'data' / 'tiktoken') in str(error.value)  # where they are looked for by default


# --- folders whose files disagree, or are damaged ---------------------------------------------------------------------


def test_special_tokens_map_names_the_end_of_text_as_for_transformers(hugging_face_folder, tmp_path):
    folder = shutil.copytree(hugging_face_folder, tmp_path / 'model')
    path = folder / 'tokenizer_config.json'
    tokens = sorted(Tokenizer.from_file(f'{folder}/tokenizer.json').get_vocab())[:2]
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': tokens[0]}
    (folder / 'special_tokens_map.json').write_text(json.dumps({'eos_token': tokens[1]}))
    for changes, expected in (({}, tokens[1]), ({'added_tokens_decoder': {}}, tokens[0])):
        path.write_text(json.dumps(config | changes))
        assert transformers.AutoTokenizer.from_pretrained(folder).eos_token == expected
        assert load_tokenizer(str(folder)).eot == load_tokenizer(str(folder)).tokenizer.token_to_id(expected)


# --- transformers -----------------------------------------------------------------------------------------------------


def edited(path, **changes):
    """Change keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text(encoding='utf-8')), **changes}), encoding='utf-8')


@pytest.fixture
def digits_apart(bpe_folder, tmp_path):
    """A folder like that of SmolLM: tokenizer.json cuts numbers into digits, but the class that it names does not."""
    content = json.loads((bpe_folder / 'tokenizer.json').read_text(encoding='utf-8'))
    vocabulary, merges = content['model']['vocab'], content['model']['merges']
    if '12' not in vocabulary:
        vocabulary['12'] = len(vocabulary)
        merges.append(['1', '2'])
    steps = [{'type': 'Digits', 'individual_digits': True}, content['pre_tokenizer']]
    content['pre_tokenizer'] = {'type': 'Sequence', 'pretokenizers': steps}
    (tmp_path / 'tokenizer.json').write_text(json.dumps(content))
    special = {key: END_OF_TEXT for key in ('eos_token', 'unk_token', 'bos_token')}
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps({'tokenizer_class': 'GPT2Tokenizer', **special}))
    return tmp_path


def test_a_class_of_transformers_that_replaces_parts_of_the_file_is_named_with_the_mend(digits_apart):
    set_it = '"tokenizer_class": "PreTrainedTokenizerFast"'
    with pytest.raises(ValueError, match=f'GPT2Tokenizer .*{set_it}.*tokenizer_config'):
        load_transformers_tokenizer(digits_apart)
    (digits_apart / 'text.txt').write_text('some text\n')
    line = error_of(digits_apart, f'--dataset={digits_apart}/text.txt', f'--tokenizer={digits_apart}', '--num_proc=1')
    assert set_it in line and not list(digits_apart.glob('data/*'))
    edited(digits_apart / 'tokenizer_config.json', tokenizer_class='PreTrainedTokenizerFast')
    theirs = load_transformers_tokenizer(digits_apart)
    assert theirs.encode('12345') == load_tokenizer(str(digits_apart)).encode('12345')


def test_a_token_that_only_transformers_has_is_named_with_the_command_that_makes_files_alike(
    hugging_face_folder, tmp_path
):
    shutil.copytree(hugging_face_folder, tmp_path, dirs_exist_ok=True)
    token = {'content': '<extra>', 'special': True, 'lstrip': False, 'rstrip': False, 'normalized': False}
    settings = {'eos_token': END_OF_TEXT, 'added_tokens_decoder': {'9999': {**token, 'single_word': False}}}
    edited(tmp_path / 'tokenizer_config.json', **settings)
    with pytest.raises(ValueError, match='<extra> .* 600.*save_pretrained') as refused:
        load_transformers_tokenizer(tmp_path)
    command = str(refused.value).split('`')[1].replace('python', sys.executable, 1)
    subprocess.run(command, shell=True, check=True, env={**os.environ, 'HF_HUB_OFFLINE': '1'})
    theirs = load_transformers_tokenizer(tmp_path)
    assert load_tokenizer(str(tmp_path)).tokenizer.token_to_id('<extra>') == 600 == theirs('<extra>').input_ids[0]


def test_a_model_of_sentencepiece_alone_is_one_line_with_the_mend(hugging_face_folder, tmp_path):
    shutil.copytree(hugging_face_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / 'tokenizer.json').unlink()
    (tmp_path / 'tokenizer.model').write_text('x')
    for load in (load_transformers_tokenizer, lambda folder: describe(str(folder), 0)):
        with pytest.raises((ValueError, OSError), match='tokenizer.model.*save_pretrained.*pip install sentencep'):
            load(tmp_path)


@pytest.mark.parametrize('kind', ['gpt2', 'llama2', 'unigram'])
def test_a_text_that_spells_a_special_token_is_ordinary_also_where_that_is_a_word_of_the_vocabulary(kind, tmp_path):
    tokenizer = Tokenizer.from_str(small_tokenizer(kind))
    tokenizer.add_special_tokens(['<s>', '</s>'])
    tokenizer.save(str(tmp_path / 'tokenizer.json'))
    ours = FileTokenizer(tmp_path / 'tokenizer.json', '</s>')
    for text in ('time</s>and', '</s>', ' <s> </s>\n'):
        ids = [*ours.encode(text), *ours.encode_batch([text])[0]]
        assert ours.eot not in ids and tokenizer.token_to_id('<s>') not in ids
    assert ours.decode(ours.encode('time</s>and')).strip() == 'time</s>and'


@pytest.fixture
def with_bos(hugging_face_folder, tmp_path):
    """A folder whose tokenizer puts <s> before a text, as those of Llama and Gemma do."""
    folder = tmp_path / 'with_bos'
    shutil.copytree(hugging_face_folder, folder)
    edited(folder / 'tokenizer_config.json', eos_token=END_OF_TEXT)
    tokenizer = Tokenizer.from_file(str(folder / 'tokenizer.json'))
    tokenizer.add_special_tokens(['<s>'])
    pieces = [('<s>', tokenizer.token_to_id('<s>'))]
    tokenizer.post_processor = processors.TemplateProcessing('<s> $A', '<s> $A $B', pieces)
    tokenizer.save(str(folder / 'tokenizer.json'))
    return folder


def test_bos_stands_before_each_document_where_the_tokenizer_puts_it(with_bos, tmp_path):
    assert describe(str(with_bos), 0)['bos_text'] == ['<s>']
    tokenizer = load_tokenizer(str(with_bos))
    assert tokenizer.bos == [600] and tokenizer.encode('<s>')[0] != 600
    texts = ['one', 'a b ' * 30_000, 'two\nlines']  # the second is longer than a stretch
    pieces = [Piece('rows', len(text), text.encode()) for text in texts]
    for engine, dedup in (('auto', False), ('reference', True)):
        rules = encoding.Rules(str(with_bos), tmp_path, None, False, False, 1, (0, 0), engine, dedup)
        part = encoding.encode_unit(pieces, rules)[0]['train']
        expected = [tokenizer.encode(text) for text in texts]
        assert part.tokens.tolist() == [id for ids in expected for id in [600, *ids, tokenizer.eot]]
        assert not dedup or part.sizes[:, 0].tolist() == [len(ids) + 2 for ids in expected]
    theirs = load_transformers_tokenizer(with_bos)
    assert theirs(texts[0]).input_ids == [600, *expected[0]]


def test_a_dataset_without_the_bos_of_the_model_is_noted(with_bos, tmp_path):
    facts = describe(str(with_bos), 0)
    dataset = folder_of(tmp_path / 'data', with_bos, facts)
    assert check_same_tokenizer(dataset, with_bos) == [] and tokenizer_of(dataset).bos == [600]
    del facts['bos_text']  # as earlier versions made it
    folder_of(dataset, with_bos, facts)
    (note,) = check_same_tokenizer(dataset, with_bos)
    assert '<s> before ' in note and f'--tokenizer={with_bos}' in note and tokenizer_of(dataset).bos == []
    folder_of(dataset, with_bos, facts, masked=True)
    assert check_same_tokenizer(dataset, with_bos) == []  # the chat template writes it


def test_tasks_of_a_run_begin_as_its_documents_do(with_bos, hugging_face_folder):
    for folder, bos, prefix in ((with_bos, [600], 600), (hugging_face_folder, [], 0)):
        tokenizer = load_tokenizer(str(folder))
        encoder, plain = OwnLanguage(tokenizer), tokenizer.encode('a b')
        assert encoder.prefix == prefix
        assert encoder.encode(['a b']) == [bos + plain] and encoder.encode(['a b'], special=False) == [plain]


def test_an_end_that_the_tokenizer_puts_behind_a_text_is_not_part_of_a_task(with_bos):
    tokenizer = Tokenizer.from_file(str(with_bos / 'tokenizer.json'))
    pieces = [('<s>', 600), (END_OF_TEXT, 0)]
    tokenizer.post_processor = processors.TemplateProcessing(f'<s> $A {END_OF_TEXT}', '$A $B', pieces)
    tokenizer.save(str(with_bos / 'tokenizer.json'))
    theirs = load_transformers_tokenizer(with_bos)
    assert theirs('a b').input_ids[-1] == 0
    assert TransformersLanguage(theirs, with_bos).encode(['a b']) == [theirs('a b').input_ids[:-1]]


def test_ids_in_the_gaps_of_an_encoding_are_decoded_as_unknown():
    ranks = {bytes([byte]): byte for byte in range(256)}
    with_gap = tiktoken.Encoding('gap', pat_str='.', mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 300})
    assert TiktokenTokenizer(with_gap).decode([97, 280, 98]) == 'a\ufffdb'


def test_a_model_of_whole_documents_reads_a_text_behind_the_end_of_another():
    tokenizer = load_tokenizer('bytes')
    for windows, begin in (('documents', [tokenizer.eot]), ('stream', []), (None, [])):
        language = OwnLanguage(tokenizer, windows)
        assert language.encode(['ab']) == [language.prompt_of('ab').ids] == [[*begin, *b'ab']]
