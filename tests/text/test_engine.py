"""gigatoken in place of a tokenizer: it gives the same tokens, and where it would differ the reference is used."""

import json
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
from prepared import CACHE, contents, make_texts, needs_gpt2, prepare
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from text import encoding, engine
from text.tokenizer import load_tokenizer, train_bpe

gigatoken = pytest.importorskip('gigatoken')

BYTE_LEVEL = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True}
ADDED_WORD = {'id': 467, 'content': 'word', 'single_word': True, 'special': False}
ADDED_WORD |= dict.fromkeys(('lstrip', 'rstrip', 'normalized'), False)
GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
GPT4 += r'|\s*[\r\n]+|\s+(?!\S)|\s+'


def fuzzed(count, seed):
    """Documents with everything that tokenizers treat differently: every Unicode block, control characters, runs of
    whitespace, bytes that are not UTF-8 (as prepare_data.py mends them), new characters, special tokens as text, and
    plain words."""
    generator = random.Random(seed)
    newer = sorted(engine.NEWER)
    blanks = [' ', '  ', '\n', '\r\n', '\t', '\u00a0', '\u2003', '\u3000', '\u200b', '\ufeff', '\x00', '\x1f', '\x85']
    words = "the The it's we'LL 12345678 x+=1; ... !!! <|endoftext|> <s> [INST] e\u0301t\u00e9 \ufdfa \u00df".split()
    words += ['\u4e2d\u6587', '\ud55c\uad6d', '\U0001f642\U0001f44d\U0001f3fd']

    def any_character():
        while True:
            number = generator.choice((generator.randrange(0x110000), generator.randrange(0x3000)))
            if not 0xD800 <= number < 0xE000:
                return chr(number)

    def part():
        kind = generator.random()
        if kind < 0.35:
            return generator.choice(words) + generator.choice(('', ' '))
        if kind < 0.5:
            return generator.choice(blanks) * generator.choice((1, 1, 2, 3, 17))
        if kind < 0.55:
            return generator.choice(newer) * generator.choice((1, 2))
        if kind < 0.58:
            return bytes(generator.randrange(256) for _ in range(8)).decode('utf-8', 'replace')
        return ''.join(any_character() for _ in range(generator.choice((1, 2, 8))))

    return [''.join(part() for _ in range(generator.choice((0, 1, 3, 20, 100)))).encode() for _ in range(count)]


def byte_level(folder, pattern=None, without=b'', **changes):
    """A Hugging Face folder whose tokenizer joins 'a', '1', '!' and a space with the first byte of the next character,
    if the pattern leaves both in one word. So its tokens show whether a character counts as a letter, a number, or
    neither. without: bytes that have no token."""
    letters = {byte: letter for byte, letter in enumerate(_letters())}
    vocabulary, merges = {letters[byte]: byte for byte in range(256) if byte not in without}, []
    for one in b'a1! '.translate(None, without):
        for lead in sorted({*range(0xC2, 0xF5)} - {*without}):
            merges.append((letters[one], letters[lead]))
            vocabulary[''.join(merges[-1])] = len(without) + len(vocabulary)
    vocabulary['<|endoftext|>'] = len(without) + len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern:
        steps = [pre_tokenizers.Split(Regex(pattern), 'isolated'), pre_tokenizers.ByteLevel(False, use_regex=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(['<|endoftext|>'])
    content = json.loads(tokenizer.to_str())
    content['model'] |= changes.pop('model', {})
    folder.mkdir(parents=True)
    (folder / 'tokenizer.json').write_text(json.dumps(content | changes))
    return folder


def _letters():
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(others)) for byte in range(256)]


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    """{name: (name, folder) as load_tokenizer() takes them}."""
    root = tmp_path_factory.mktemp('tokenizers')
    (root / 'bpe').mkdir()
    train_bpe(fuzzed(600, seed=99), 1500, root / 'bpe' / 'tokenizer.json')
    nfc = json.loads(normalizers.NFC().__getstate__())
    return {
        'gpt2': ('gpt2', root / 'gpt2'),
        'bpe': ('bpe', root / 'bpe'),
        'byte_level': (str(byte_level(root / 'byte_level')), root),
        'split': (str(byte_level(root / 'split', GPT4)), root),
        'nfc': (str(byte_level(root / 'nfc', GPT4, normalizer=nfc)), root),
        'lacking': (str(byte_level(root / 'lacking', without=b'\x04\x1f\xc0\xe4\xf1')), root),
    }


def both(folders, name, monkeypatch):
    """(Engine, reference)."""
    if name == 'gpt2':
        if needs_gpt2.args[0]:
            pytest.skip(needs_gpt2.kwargs['reason'])
        monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(CACHE))
    reference = load_tokenizer(*folders[name])
    fast, line = engine.faster(reference, *folders[name])
    assert isinstance(fast, engine.Engine), line
    assert (fast.name, fast.vocab_size, fast.eot) == (reference.name, reference.vocab_size, reference.eot)
    return fast, reference


def assert_equal(fast, reference, documents):
    for begin in range(0, len(documents), 500):
        some = documents[begin : begin + 500]
        for found, expected in zip(fast.encode_flat(some), reference.encode_flat(some), strict=True):
            assert np.array_equal(found, expected)


@pytest.mark.parametrize('name', ['gpt2', 'bpe', 'byte_level', 'split', 'nfc', 'lacking'])
def test_fuzzed_documents_get_the_same_tokens(folders, name, monkeypatch):
    fast, reference = both(folders, name, monkeypatch)
    monkeypatch.setattr(engine, 'CHECKED_SHARE', 0)  # else it would notice before this test does
    assert_equal(fast, reference, fuzzed(1500, seed=1))
    assert_equal(fast, reference, [b'', b' ' * 200_000, b'a' * 100_000, '中'.encode() * 50_000])


@pytest.mark.slow
@pytest.mark.parametrize('name', ['gpt2', 'bpe', 'split'])
def test_a_hundred_thousand_fuzzed_documents_get_the_same_tokens(folders, name, monkeypatch):
    fast, reference = both(folders, name, monkeypatch)
    monkeypatch.setattr(engine, 'CHECKED_SHARE', 0)
    for seed in range(20):
        assert_equal(fast, reference, fuzzed(5000, seed=100 + seed))
    for text in fuzzed(3, seed=5):  # documents of 10 MB, as prepare_data.py cuts them
        assert_equal(fast, reference, list(encoding.cut_up(text * (10**7 // (len(text) + 1)), 1 << 16)))


@pytest.mark.parametrize('name', ['byte_level', 'split'])
def test_every_character_is_a_letter_to_both_or_goes_to_the_reference(folders, name, monkeypatch):
    """All code points are tried. Without the list of new characters gigatoken differs in these, and in no others."""
    fast, reference = both(folders, name, monkeypatch)
    monkeypatch.setattr(engine, 'CHECKED_SHARE', 0)
    characters = [chr(number) for number in range(0x80, 0x110000) if not 0xD800 <= number < 0xE000]
    characters = [character for character in characters if character in engine.NEWER or ord(character) % 29 == 0]
    texts = [f'{before}{character}'.encode() for character in characters for before in 'a1!']
    assert_equal(fast, reference, texts)
    tokens, ends = fast._encode(texts)
    expected, its_ends = reference.encode_flat(texts)
    parts = zip(np.split(tokens, ends[:-1]), np.split(expected, its_ends[:-1]), strict=True)
    pairs = zip(texts, parts, strict=True)
    different = {text.decode()[1] for text, (one, other) in pairs if not np.array_equal(one, other)}
    assert 4000 < len(different) and different <= engine.NEWER


def test_only_texts_with_a_byte_that_has_no_token_go_to_the_reference(folders, monkeypatch):
    fast, reference = both(folders, 'lacking', monkeypatch)
    given = []
    monkeypatch.setattr(
        fast, '_reference', SimpleNamespace(encode_flat=lambda texts: given.extend(texts) or original(texts))
    )
    monkeypatch.setattr(fast, '_check', lambda *of_one_in_a_hundred: None)
    original = reference.encode_flat
    odd = [b'a\x04b', 'a 一.'.encode(), 'a \U00040000!'.encode()]
    assert_equal(fast, reference, [b'plain', *odd, 'été ☃ 한'.encode(), b''])
    assert given == odd and reference.encode('a\x04b') == reference.encode('a') + reference.encode('b')


def trained(texts, vocab_size, path, engine):
    train_bpe(texts, vocab_size, path, engine)
    return path.read_bytes()


@pytest.mark.parametrize(
    'texts, vocab_size',
    [
        ([text for text in fuzzed(900, seed=5) if engine.knows(text)], 1700),
        (fuzzed(300, seed=6), 900),  # newer characters among them: `tokenizers` trains
        ([text.encode() for text in make_texts(500)], 600),  # fewer words than merges that were asked for
        ([b'abab abab'], 2048),
        ([b''], 300),
    ],
    ids=['fuzzed', 'newer', 'words', 'too_small', 'empty'],
)
def test_a_bpe_trained_by_it_is_the_reference_s_to_the_byte(tmp_path, texts, vocab_size):
    path = tmp_path / 'tokenizer.json'
    assert trained(texts, vocab_size, path, 'auto') == trained(texts, vocab_size, path, 'reference')


def test_it_trains_in_silence_and_is_what_trains(capfd):
    merges = engine.merges_of([b'some words and some more words'], 259, '<|endoftext|>')
    assert merges == [(b'o', b'r'), (b'd', b's')]
    assert engine.merges_of(['\u088f'.encode()], 259, '<|endoftext|>') is None
    assert capfd.readouterr() == ('', '')


class Faulty:
    """A gigatoken.Tokenizer that gets one token in 50,000 wrong."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def encode_batch(self, texts, parallel):
        layout = self.tokenizer.encode_batch(texts, parallel=parallel).layout
        tokens = np.array(layout.content.data)
        tokens[25_000::50_000] ^= 1
        return SimpleNamespace(layout=SimpleNamespace(content=SimpleNamespace(data=tokens), offsets=layout.offsets))


def test_a_fault_is_noticed_within_a_shard(folders):
    reference = load_tokenizer(*folders['bpe'])
    fast = engine.Engine(reference, lambda: Faulty(engine._loader(*folders['bpe'])[0]()))
    text = ' '.join(make_texts(3000)).encode()
    tokens_seen = 0
    with pytest.raises(engine.Mismatch, match='gigatoken .*other tokens'):
        while tokens_seen < 100_000_000:  # a shard
            tokens_seen += len(fast.encode_flat(list(encoding.cut_up(text, 1 << 16)))[0])


PLANTED = """
import gigatoken, numpy
from types import SimpleNamespace
encode_batch = gigatoken.Tokenizer.encode_batch
def faulty(self, texts, **options):
    layout = encode_batch(self, texts, **options).layout
    tokens = numpy.array(layout.content.data)
    tokens[1000::1001] ^= 1
    return SimpleNamespace(layout=SimpleNamespace(content=SimpleNamespace(data=tokens), offsets=layout.offsets))
gigatoken.Tokenizer.encode_batch = faulty
"""


def test_a_mismatch_costs_nothing_but_time_and_is_said(tmp_path):
    (tmp_path / 'text').mkdir()
    for number, text in enumerate(make_texts(300, words=400)):
        (tmp_path / 'text' / f'{number}.txt').write_text(text)
    arguments = (f'--dataset={tmp_path}/text', '--vocab_size=300', '--val_fraction=0.1', '--shard_tokens=50000')
    prepare(tmp_path, *arguments, '--name=expected', '--engine=reference')
    (tmp_path / 'fault').mkdir()
    (tmp_path / 'fault' / 'sitecustomize.py').write_text(PLANTED)
    text = prepare(tmp_path, *arguments, '--name=found', PYTHONPATH=str(tmp_path / 'fault')).stdout
    assert re.search('gigatoken .*other tokens .*bpe .*: starting over', text)
    assert 'by the reference' in text
    names = [name for name in contents(tmp_path / 'data' / 'expected') if name != 'meta.json']
    for name in names:
        one, other = (tmp_path / 'data' / folder / name for folder in ('expected', 'found'))
        assert one.read_bytes() == other.read_bytes()
    assert len(names) > 3


def test_the_engine_and_the_number_of_processes_change_no_byte(tmp_path):
    texts = [text.decode() for text in fuzzed(400, seed=3)]
    (tmp_path / 'rows.jsonl').write_text('\n'.join(json.dumps({'text': text}) for text in texts))
    shards = []
    for name, options in {'on': (), 'on1': ('--num_proc=1',), 'off': ('--engine=reference',)}.items():
        arguments = (f'--dataset={tmp_path}/rows.jsonl', '--val_fraction=0.1', '--shard_tokens=20000', f'--name={name}')
        line = prepare(tmp_path, *arguments, *options).stdout
        assert ('encoded by gigatoken' in line) == name.startswith('on')
        found = contents(tmp_path / 'data' / name)
        found.pop('meta.json')
        shards.append(found)
    assert shards[0] == shards[1] == shards[2] and len(shards[0]) > 3


@pytest.mark.parametrize(
    'changes, why',
    [
        ({'pre_tokenizer': None}, 'not cut'),
        ({'pre_tokenizer': {**BYTE_LEVEL, 'use_regex': False}}, 'not cut'),
        ({'model': {'dropout': 0.1}}, 'dropout'),
        ({'model': {'byte_fallback': True}}, 'byte_fallback'),
        ({'model': {'end_of_word_suffix': '!'}}, 'end_of_word_suffix'),
        ({'added_tokens': [ADDED_WORD]}, 'single_word'),
        ({'without': b'\x04', 'normalizer': {'type': 'NFC'}}, 'a normalizer'),
        ({'without': b' '}, 'a space before'),
    ],
)
def test_what_it_would_load_and_compute_otherwise_goes_to_the_reference(tmp_path, changes, why):
    folder = byte_level(tmp_path / 'folder', **changes)
    reference = load_tokenizer(str(folder))
    chosen, line = engine.faster(reference, str(folder), tmp_path)
    assert chosen is reference and re.match('encoded by tokenizers, .*gigatoken ', line) and why in line


def test_another_version_or_none_is_said_in_one_line(folders, monkeypatch):
    reference = load_tokenizer(*folders['bpe'])
    for version, said in (('0.11.0', 'gigatoken 0.11.0 has not been tried'), (None, '`pip install gigatoken`')):
        monkeypatch.setattr(engine, 'version', lambda version=version: version)
        chosen, line = engine.faster(reference, *folders['bpe'])
        assert chosen is reference and said in line and '\n' not in line
    assert engine.faster(load_tokenizer('bytes'), 'bytes', None)[1] == 'encoded by numpy'
