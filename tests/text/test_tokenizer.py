"""tokenizer.py: every kind encodes and decodes, names and files that are missing get one clear line."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import requests
import tiktoken
import transformers
from launch import SHARED
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from text.tokenizer import (
    END_OF_TEXT,
    FileTokenizer,
    check_same_tokenizer,
    describe,
    fetch_tokenizer,
    load_tokenizer,
    tokenizer_of,
    train_bpe,
)

TEXTS = [
    'def f(x):\n    return x + 1\n',
    "it's 12345 o'clock   \n\n\n  \tindented",
    'Größe, 中文字, 🙂👩‍👩‍👧, e\u0301',
    f'a literal {END_OF_TEXT} in a text',
    ' ' * 5000 + 'x' * 5000 + '\r\n' * 500,
]
CACHE = SHARED / 'tiktoken_cache'
needs_gpt2 = pytest.mark.skipif(not CACHE.exists(), reason=f'no {CACHE} with the files of gpt2')


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


def test_decoding_gives_the_text_back(tokenizers):
    for tokenizer in tokenizers:
        for text in TEXTS:
            assert tokenizer.decode(tokenizer.encode(text)) == text, tokenizer.name


def test_encode_batch_gives_the_ids_of_encode_as_arrays(tokenizers):
    for tokenizer in tokenizers:
        for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
            assert isinstance(ids, np.ndarray) and ids.tolist() == tokenizer.encode(text), tokenizer.name


def test_all_ids_lie_below_vocab_size_and_no_text_gives_the_end_of_text_token(tokenizers):
    for tokenizer in tokenizers:
        ids = np.concatenate(tokenizer.encode_batch(TEXTS))
        assert ids.max() < tokenizer.vocab_size and 0 <= tokenizer.eot < tokenizer.vocab_size
        assert tokenizer.eot not in ids, tokenizer.name
        assert tokenizer.decode([tokenizer.eot]) == END_OF_TEXT


def test_a_trained_bpe_has_the_size_asked_for_and_depends_on_the_texts_alone(bpe_folder, tmp_path, monkeypatch):
    assert load_tokenizer('bpe', bpe_folder).vocab_size == 600
    texts = [path.read_bytes() for path in sorted(Path(os.__file__).parent.glob('[a-c]*.py'))]
    monkeypatch.setenv('TOKENIZERS_PARALLELISM', 'false')  # other numbers of threads count words in another order
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
    for facts, file in (
        (describe('bytes', 0), None),
        (describe('bpe', 600), bpe_folder / 'tokenizer.json'),
        (describe(str(hugging_face_folder), 0), hugging_face_folder / 'tokenizer.json'),
    ):
        folder = tmp_path / facts['name']
        folder.mkdir()
        (folder / 'meta.json').write_text(json.dumps({'tokenizer': facts}))
        if file:
            shutil.copy(file, folder)
        tokenizer = tokenizer_of(folder)
        assert tokenizer.name == facts['name']
        assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]


@pytest.mark.parametrize('meta', [None, {}, {'tokenizer': None}, {'tokenizer': 'gpt2'}])
def test_a_dataset_that_does_not_name_its_tokenizer_is_an_error(meta, tmp_path):
    if meta is not None:
        (tmp_path / 'meta.json').write_text(json.dumps(meta))
    with pytest.raises(ValueError, match='does not name a tokenizer'):
        tokenizer_of(tmp_path)


def test_unknown_names_get_the_closest_ones():
    with pytest.raises(ValueError, match='did you mean gpt2'):
        load_tokenizer('gpt-2')
    with pytest.raises(ValueError, match='did you mean .*bytes'):
        describe('byte', 0)
    with pytest.raises(FileNotFoundError, match='no such folder'):
        load_tokenizer('models/not_there')


def test_a_folder_without_tokenizer_or_end_of_text_is_an_error(tmp_path, hugging_face_folder):
    with pytest.raises(FileNotFoundError, match='no tokenizer.json'):
        load_tokenizer(str(tmp_path))
    shutil.copy(hugging_face_folder / 'tokenizer.json', tmp_path)
    (tmp_path / 'tokenizer_config.json').write_text('{"eos_token": null}')
    with pytest.raises(ValueError, match='names no eos_token'):
        load_tokenizer(str(tmp_path))
    (tmp_path / 'tokenizer_config.json').write_text('{"eos_token": "</s>"}')
    with pytest.raises(ValueError, match="has no token '</s>'"):
        load_tokenizer(str(tmp_path))


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


def test_a_file_that_asks_for_truncation_cuts_no_text(hugging_face_folder, tmp_path):
    content = json.loads((hugging_face_folder / 'tokenizer.json').read_text())
    content['truncation'] = {'direction': 'Right', 'max_length': 8, 'strategy': 'LongestFirst', 'stride': 0}
    (tmp_path / 'tokenizer.json').write_text(json.dumps(content))
    assert (
        FileTokenizer(tmp_path / 'tokenizer.json', END_OF_TEXT).decode(
            FileTokenizer(tmp_path / 'tokenizer.json', END_OF_TEXT).encode(TEXTS[0])
        )
        == TEXTS[0]
    )


def test_ids_with_gaps_lie_below_vocab_size(hugging_face_folder, tmp_path):
    content = json.loads((hugging_face_folder / 'tokenizer.json').read_text())
    content['model']['vocab']['a token behind a gap'] = 4999
    (tmp_path / 'tokenizer.json').write_text(json.dumps(content))
    assert FileTokenizer(tmp_path / 'tokenizer.json', END_OF_TEXT).vocab_size == 5000


# --- a dataset for a model --------------------------------------------------------------------------------------------


@pytest.fixture
def dataset(hugging_face_folder, tmp_path):
    """A dataset folder, as far as prepare_data.py writes the tokenizer into it."""
    folder = tmp_path / 'dataset'
    folder.mkdir()
    shutil.copy(hugging_face_folder / 'tokenizer.json', folder)
    meta = {'tokenizer': describe(str(hugging_face_folder), 0), 'source': {'name': 'my_texts/'}}
    (folder / 'meta.json').write_text(json.dumps(meta))
    return folder


def test_a_dataset_fits_the_model_whose_tokenizer_made_it(dataset, bpe_folder, hugging_face_folder, tmp_path):
    check_same_tokenizer(dataset, hugging_face_folder)
    other = tmp_path / 'written_anew'  # the same tokenizer in other bytes
    shutil.copytree(hugging_face_folder, other)
    content = json.loads((other / 'tokenizer.json').read_text())
    (other / 'tokenizer.json').write_text(json.dumps(content, indent=7))
    check_same_tokenizer(dataset, other)
    (tmp_path / 'bpe').mkdir()
    (tmp_path / 'bpe' / 'meta.json').write_text(json.dumps({'tokenizer': describe('bpe', 600)}))
    shutil.copy(bpe_folder / 'tokenizer.json', tmp_path / 'bpe')
    check_same_tokenizer(tmp_path / 'bpe', hugging_face_folder)


def test_a_dataset_for_another_tokenizer_is_refused_with_the_command(dataset, hugging_face_folder, tmp_path):
    other = tmp_path / 'other_model'
    other.mkdir()
    train_bpe([b'quite another text, of which other merges come. ' * 9], 400, other / 'tokenizer.json')
    with pytest.raises(ValueError, match='hugging_face gives other tokens than that of .*other_model') as error:
        check_same_tokenizer(dataset, other)
    assert f'`python prepare_data.py --dataset=... --tokenizer={other}`' in str(error.value)
    assert str(dataset) in str(error.value) and '\n' not in str(error.value)

    ends = llama3_files(tmp_path / 'ends', hugging_face_folder, tokenizer_config={'eos_token': '<|eot_id|>'})
    with pytest.raises(ValueError, match=r'ends documents with the token 0, that of .*ends with 600 \(<\|eot_id\|>\)'):
        check_same_tokenizer(dataset, ends)
    bytes_folder = tmp_path / 'bytes'
    bytes_folder.mkdir()
    (bytes_folder / 'meta.json').write_text('{"tokenizer": {"name": "bytes"}}')
    with pytest.raises(ValueError, match='its tokenizer bytes gives other tokens'):
        check_same_tokenizer(bytes_folder, hugging_face_folder)


def test_conversations_need_the_same_special_tokens(dataset, hugging_face_folder, tmp_path):
    with_turns = llama3_files(tmp_path / 'turns', hugging_face_folder, tokenizer_config={'eos_token': END_OF_TEXT})
    shutil.copy(Path(with_turns) / 'tokenizer.json', dataset)
    meta = {'tokenizer': describe(with_turns, 0)}
    (dataset / 'meta.json').write_text(json.dumps(meta))
    check_same_tokenizer(dataset, hugging_face_folder)
    (dataset / 'meta.json').write_text(json.dumps({**meta, 'masked': True}))
    with pytest.raises(ValueError, match=r'has the special token <\|eot_id\|>, which .* elsewhere or not at all'):
        check_same_tokenizer(dataset, hugging_face_folder)


def test_what_cannot_be_compared_is_not(dataset, hugging_face_folder, tmp_path):
    check_same_tokenizer(tmp_path / 'data' / 'synthetic', hugging_face_folder)
    for meta in ({}, {'tokenizer': None}, {'tokenizer': 'gpt2'}):
        (dataset / 'meta.json').write_text(json.dumps(meta))
        check_same_tokenizer(dataset, tmp_path / 'no_model')


def test_a_model_without_tokenizer_is_named_with_the_command_that_checks_it(dataset, tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r'no_model has no tokenizer.json.*`python download_model.py --model=.*no_model`'
    ):
        check_same_tokenizer(dataset, tmp_path / 'no_model')


def test_a_vocabulary_below_all_bytes_is_an_error():
    with pytest.raises(ValueError, match='at least 257'):
        describe('bpe', 256)


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


@needs_gpt2
def test_fetching_verifies_the_files_that_are_there(cache):
    folder, tokenizer = fetch_tokenizer('gpt2', 'unused')
    assert folder == str(cache) and tokenizer.vocab_size == 50257


@needs_gpt2
def test_a_damaged_file_of_the_cache_is_named_and_said_to_be_deleted(cache):
    damaged = cache / '6d1cbeee0f20b3d9449abfede4726ed8212e3aee'
    damaged.write_bytes(damaged.read_bytes()[:-1] + b'?')
    with pytest.raises(ValueError, match='6d1cbeee.*was damaged.*deleted.*cannot be fetched') as error:
        load_tokenizer('gpt2')
    assert '--cache_tokenizer=gpt2' in str(error.value)
    assert not damaged.exists()


def test_without_files_and_network_the_command_to_fetch_them_is_given(cache, monkeypatch, tmp_path):
    monkeypatch.delenv('TIKTOKEN_CACHE_DIR')
    with pytest.raises(ValueError, match='python prepare_data.py --cache_tokenizer=gpt2') as error:
        load_tokenizer('gpt2', tmp_path / 'data' / 'some-gpt2')
    assert str(tmp_path / 'data' / 'tiktoken') in str(error.value)  # where they are looked for by default


def test_there_is_nothing_to_fetch_for_bytes():
    with pytest.raises(ValueError, match='needs no files'):
        fetch_tokenizer('bytes', 'unused')


# --- folders whose files disagree, or are damaged ---------------------------------------------------------------------


@pytest.mark.parametrize('content', ['{', '5', '{"a": 1}', 'version https://git-lfs.github.com/spec/v1\noid 1\n'])
def test_a_tokenizer_file_that_holds_none_is_one_line(content, hugging_face_folder, tmp_path):
    folder = shutil.copytree(hugging_face_folder, tmp_path / 'model')
    (folder / 'tokenizer.json').write_text(content)
    with pytest.raises(ValueError, match='git lfs pull' if 'lfs' in content else 'download it again') as refused:
        load_tokenizer(str(folder))
    assert '\n' not in str(refused.value)


@pytest.mark.parametrize('content', ['{', '[]', 'null', '\ufeff{}'])
def test_a_file_beside_the_tokenizer_that_is_no_object_is_one_line(content, hugging_face_folder, tmp_path):
    folder = shutil.copytree(hugging_face_folder, tmp_path / 'model')
    (folder / 'tokenizer_config.json').write_text(content, encoding='utf-8')
    with pytest.raises(ValueError, match='tokenizer_config.json: no JSON'):
        load_tokenizer(str(folder))


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


def test_a_class_that_puts_other_parts_in_place_of_the_file_is_refused(tmp_path):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # GPT-2 cuts words
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(['12 and 34\n'] * 30, trainer)
    tokenizer.add_special_tokens(['<|endoftext|>'])
    tokenizer.save(str(tmp_path / 'tokenizer.json'))
    path = tmp_path / 'tokenizer_config.json'
    path.write_text(json.dumps({'tokenizer_class': 'GPT2Tokenizer', 'eos_token': '<|endoftext|>'}))
    with pytest.raises(ValueError, match='makes a GPT2Tokenizer.*PreTrainedTokenizerFast'):
        describe(str(tmp_path), None)
    path.write_text(path.read_text().replace('GPT2Tokenizer', 'PreTrainedTokenizerFast'))
    describe(str(tmp_path), None)
    path.write_text(json.dumps({'eos_token': '<|endoftext|>'}))
    (tmp_path / 'config.json').write_text('{"model_type": "gpt2"}')  # which decides where no class is named
    with pytest.raises(ValueError, match='makes a GPT2Tokenizer'):
        describe(str(tmp_path), None)


def test_a_token_of_the_configuration_alone_is_refused(hugging_face_folder, tmp_path):
    folder = shutil.copytree(hugging_face_folder, tmp_path / 'model')
    size = Tokenizer.from_file(f'{folder}/tokenizer.json').get_vocab_size()
    added = {str(size): {'content': '<new>', 'special': True}}
    config = json.loads((folder / 'tokenizer_config.json').read_text())
    (folder / 'tokenizer_config.json').write_text(json.dumps(config | {'added_tokens_decoder': added}))
    with pytest.raises(ValueError, match=f"'<new>' as {size}, tokenizer.json not at all"):
        describe(str(folder), None)
