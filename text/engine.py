"""
Encodes text with gigatoken instead of tiktoken or `tokenizers`: the same tokens, ten times as fast.

    tokenizer, line = faster(load_tokenizer('gpt2'), 'gpt2', folder)  # an Engine, or the tokenizer itself; and why
    tokens, ends = tokenizer.encode_flat([b'some text', b'more'])

The original tokenizer is called the reference. gigatoken is used only if it computes exactly the same; text for which
it is known to differ is encoded by the reference. Of the other text, one byte in a hundred is encoded by both, and a
difference raises Mismatch.
"""

import base64
import contextlib
import ctypes
import json
import os
import re
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import numpy as np

PAGE_BYTES = os.sysconf('SC_PAGE_SIZE')
TRIED = '0.10.'  # the versions of gigatoken that are known to compute the same
SCHEMES = {'gpt2': 'gpt2', 'r50k_base': 'gpt2', 'cl100k_base': 'cl100k', 'o200k_base': 'o200k'}  # tiktoken: gigatoken
CHECKED_SHARE = 0.01  # of the bytes; as the reference takes 15 times as long, this is a sixth of the time
CACHE_BYTES = 100 << 20  # gigatoken caches all words; when this process has grown so much, it is reloaded, in 40 ms
# The letters, digits and marks that are new in Unicode 17. gigatoken knows them, but tiktoken 0.14 and tokenizers 0.23
# have Unicode 16, so there words end at other places. Found by comparing every code point.
NEWER = (
    '88F C5C CDC 1ACF-1ADD 1AE0-1AEB A7CE-A7CF A7D2 A7D4 A7F1 10940-10959 10EC5-10EC7 10EFA-10EFB '
    '11B60-11B67 11DB0-11DDB 11DE0-11DE9 16EA0-16EB8 16EBB-16ED3 16FF2-16FF6 187F8-187FF 18D09-18D1E '
    '18D80-18DF2 1E6C0-1E6DE 1E6E0-1E6F5 1E6FE-1E6FF 2B73A-2B73F 2CEA2-2CEAD 323B0-33479'
)
NEWER = [[int(number, 16) for number in (part.split('-') * 2)[:2]] for part in NEWER.split()]
NEWER = {chr(number) for first, last in NEWER for number in range(first, last + 1)}
# How these begin in UTF-8, {first byte: pattern of the first two}. Searching for that takes a hundredth of the time.
BEGINNINGS = {
    first: re.compile(b'|'.join(sorted({re.escape(two[:2]) for two in map(str.encode, NEWER) if two[:1] == first})))
    for first in {character.encode()[:1] for character in NEWER}
}
# Texts that tokenizers treat differently; both encode these before any work is done.
SAMPLES = [
    "It's 12345678 o'clock,\n\n\tif (x >= 0):  \r\n    \u00e9t\u00e9 e\u0301 \u4f60\u597d \U0001f642 <|x|> we'LL\n",
    ' ' * 300 + '\n' * 7 + '\t \t\x00\x1f\x7f\u00a0\u2003\u3000x\u200b\ufeff',
    '<|endoftext|> <s></s> [INST] <|im_start|>',
    '',
]


class Mismatch(Exception):
    """gigatoken gives other tokens than the reference."""


class Engine:
    """A tokenizer with the same tokens and attributes as `reference`, only faster."""

    def __init__(self, reference, load, lacking=b''):
        """load(): returns a new gigatoken.Tokenizer. lacking: bytes for which the reference has no token. Raises
        Mismatch."""
        self._reference, self._load, self._lacking = reference, load, lacking
        self.name, self.vocab_size = reference.name, reference.vocab_size
        self.eot, self.bos = reference.eot, reference.bos
        self._tokenizer, self._size, self._unchecked = load(), resident_bytes(), 0.0
        self._random = np.random.default_rng()  # unseeded: which text is checked does not change the result
        samples = [sample for sample in map(str.encode, SAMPLES) if not self._lacks(sample)]
        self._compare(samples, *self._encode(samples))

    def encode_flat(self, texts):
        """(tokens of all texts, uint32; where the tokens of each text end, int64). texts: a list of bytes in UTF-8."""
        known = [text if knows(text) and not self._lacks(text) else b'' for text in texts]
        tokens, ends = self._encode(known)
        self._check(known, tokens, ends)
        if known != texts:
            parts = np.split(tokens, ends[:-1])
            for number, text in enumerate(texts):
                if known[number] != text:
                    parts[number] = self._reference.encode_flat([text])[0]
            tokens, ends = np.concatenate(parts), np.cumsum([len(part) for part in parts])
        return tokens, ends

    def _encode(self, texts):
        if resident_bytes() > self._size + CACHE_BYTES:
            self._tokenizer = None  # freed before the next one is loaded
            with contextlib.suppress(AttributeError):  # C libraries other than GNU's lack it
                ctypes.CDLL(None).malloc_trim(0)
            self._tokenizer = self._load()
            self._size = resident_bytes()
        # Only this process's own thread, since there is a process per core.
        layout = self._tokenizer.encode_batch(texts, parallel=False).layout
        offsets = np.asarray(layout.offsets.data)
        return np.asarray(layout.content.data)[offsets[0] : offsets[-1]], (offsets[1:] - offsets[0]).astype(np.int64)

    def _lacks(self, text):
        """Whether a text contains a byte without a token."""
        return bool(self._lacking) and len(text.translate(None, self._lacking)) < len(text)

    def _check(self, texts, tokens, ends):
        """Compare some random texts with the reference, until CHECKED_SHARE of all bytes so far has been compared."""
        self._unchecked += CHECKED_SHARE * sum(map(len, texts))
        numbers = self._random.permutation(len(texts)) if self._unchecked > 0 else []
        for number in numbers:
            if texts[number]:
                begin = ends[number - 1] if number else 0
                part = tokens[begin : ends[number]]
                self._compare([texts[number]], part, np.array([len(part)]))
                self._unchecked -= len(texts[number])
            if self._unchecked <= 0:
                return

    def _compare(self, texts, tokens, ends):
        expected, its_ends = self._reference.encode_flat(texts)
        if not (np.array_equal(tokens, expected) and np.array_equal(ends, its_ends)):
            raise Mismatch(f'gigatoken {version()} gives other tokens than {self.name} for {texts[0][:40]!r}...')


def knows(text):
    """Whether a text in UTF-8 has none of the characters in NEWER."""
    if text.isascii():
        return True
    found = any(first in text and pattern.search(text) for first, pattern in BEGINNINGS.items())
    return not found or NEWER.isdisjoint(text.decode())


def merges_of(texts, vocab_size, special_token):
    """The merges [(bytes, bytes)] of a BPE with GPT-2's word pattern, trained on a list of texts in UTF-8: the same as
    `tokenizers` finds, in a sixth of its time. None if gigatoken is not installed, or might find others."""
    if not (version() or '').startswith(TRIED) or not all(map(knows, texts)):
        return None
    import gigatoken

    with silence():
        return gigatoken.train_bpe(b'\xff'.join(texts), vocab_size, [special_token], separator=b'\xff')[1]


@contextlib.contextmanager
def silence():
    """A context in which nothing is printed, not even by libraries."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(number) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        for number, descriptor in enumerate(saved, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(nowhere)


def resident_bytes():
    with open('/proc/self/statm') as file:
        return int(file.read().split()[1]) * PAGE_BYTES


def version():
    """gigatoken's version, None if it is not installed."""
    try:
        return metadata.version('gigatoken')
    except metadata.PackageNotFoundError:
        return None


def faster(reference, name, folder):
    """(tokenizer, line): an Engine if gigatoken computes the same as `reference`, else `reference` itself; and a line
    that says which, and why.

    name, folder: the arguments that load_tokenizer() had.
    """
    by_reference = f'{type(reference).__name__.removesuffix("Tokenizer").lower()}'
    by_reference = {'file': 'tokenizers', 'byte': 'numpy'}.get(by_reference, by_reference)
    if name == 'bytes':
        return reference, f'encoded by {by_reference}'
    if version() is None:
        return reference, f'encoded by {by_reference}; `pip install gigatoken` makes it ten times as fast'
    if not version().startswith(TRIED):
        known = f'gigatoken {version()} has not been tried, {TRIED}x has: `pip install "gigatoken=={TRIED}*"`'
        return reference, f'encoded by {by_reference}: {known}'
    try:
        return Engine(reference, *_loader(name, folder)), f'encoded by gigatoken {version()}, 1% also by {by_reference}'
    except Exception as error:  # gigatoken is a beta: whatever goes wrong, the reference can do it
        why = ' '.join(str(error).split())[:120]
        return reference, f'encoded by {by_reference}, for gigatoken {version()} cannot: {why}'


def _loader(name, folder):
    """(a function that makes a gigatoken.Tokenizer, the bytes for which the tokenizer has no token). Raises ValueError
    for tokenizers that gigatoken would load but compute differently."""
    import gigatoken

    if name in SCHEMES:
        return _loader_of_ranks(name), b''
    if name != 'bpe' and not os.path.isdir(name):
        raise ValueError(f'it does not have {name}')
    content = json.loads(Path(folder if name == 'bpe' else name, 'tokenizer.json').read_text(encoding='utf-8'))
    steps = content.get('pre_tokenizer') or {}
    steps = steps.get('pretokenizers', [steps])
    byte_level = [step for step in steps if step.get('type') == 'ByteLevel']
    if not byte_level or (len(steps) == 1 and not byte_level[0].get('use_regex', True)):
        raise ValueError('words of bytes are not cut as it does that')  # loading works, but the tokens differ
    odd = ('dropout', 'byte_fallback', 'continuing_subword_prefix', 'end_of_word_suffix')
    if found := [key for key in odd if content['model'].get(key)]:
        raise ValueError(f'model.{found[0]}')
    added = [token['id'] for token in content.get('added_tokens', [])]
    # Without special tokens, because what looks like one in a text is only text.
    content['added_tokens'] = [token for token in content.get('added_tokens', []) if not token['special']]
    if any(token.get('single_word') for token in content['added_tokens']):
        raise ValueError('an added token that is a single_word')
    lacking = _add_lacking_bytes(content['model']['vocab'], reserved=added)
    if lacking and (content.get('normalizer') or b' ' in lacking):
        raise ValueError('bytes without a token, which a normalizer or a space before the text may put there')
    text = json.dumps(content)
    return lambda: gigatoken.Tokenizer.from_json(text), lacking


def _add_lacking_bytes(vocab, reserved):
    """Give each byte without a token an id above all others, since gigatoken requires all 256, and return these bytes.
    A BPE has no token for a byte that its training text lacked, such as 0x04 for SmolLM2's; `tokenizers` leaves such
    bytes out."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}  # bytes that GPT-2 writes as the letter of that number
    others = [byte for byte in range(256) if byte not in kept]  # bytes that it writes as the letters from 256 on
    letters = {byte: chr(byte) for byte in kept} | {byte: chr(256 + place) for place, byte in enumerate(others)}
    lacking = bytes(byte for byte in range(256) if letters[byte] not in vocab)
    above = max([*vocab.values(), *reserved]) + 1
    vocab |= {letters[byte]: above + place for place, byte in enumerate(lacking)}
    return lacking


def _loader_of_ranks(name):
    import gigatoken
    import tiktoken

    ranks = tiktoken.get_encoding(name)._mergeable_ranks
    lines = [base64.b64encode(token) + b' %d\n' % rank for token, rank in sorted(ranks.items(), key=lambda x: x[1])]

    def load():
        with tempfile.NamedTemporaryFile(suffix='.tiktoken') as file:
            file.writelines(lines)
            file.flush()
            return gigatoken.Tokenizer.from_tiktoken(file.name, pretokenizer=SCHEMES[name], special_tokens={})

    return load
