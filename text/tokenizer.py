"""
Text to token ids and back.

    tokenizer = load_tokenizer('gpt2')                          # any name of tiktoken's; 'bytes' needs no download
    tokenizer = load_tokenizer('bpe', 'data/stdlib-bpe2048')    # trained by prepare_data.py, lies with the dataset
    tokenizer = load_tokenizer('models/some_model')             # a Hugging Face folder with tokenizer.json
    tokenizer = tokenizer_of('data/stdlib-bpe2048')             # the one a dataset was made with
    check_same_tokenizer('data/mine', 'models/some_model')      # whether a dataset is made for a model
    tokenizer = load_transformers_tokenizer('models/some_model')  # of transformers' class, for what transformers runs

Every tokenizer has `name`, `vocab_size` (all ids are below it), `eot` (the id that ends a document), `bos` (the ids
before its text: one for Llama 3 and Gemma, often none), and the methods encode(text) -> list of ids,
encode_batch(texts) -> list of arrays, decode(ids) -> text, count_bytes(ids) -> bytes of text that each of them stands
for, 0 of a special token. All text is ordinary: where it spells a special token, it gets the tokens of those letters,
and encoding adds neither bos nor eot.
"""

import difflib
import functools
import hashlib
import json
import os
import re
import shlex
import tempfile
from pathlib import Path

import numpy as np

from dataset.shards import read_meta
from system.errors import one_line
from system.files import check_form, is_run, read_json, refuse_lfs_pointer, sha256_of, write_file
from text.control_tokens import ControlTokens

END_OF_TEXT = '<|endoftext|>'
KEPT = 'model'  # folder in out_dir with what a run has kept of the language it learns; see runtime/kept.py
TURNS = ('<|im_start|>', '<|im_end|>')  # reserved in a BPE of ours, for the chat template of text/templates.py
FILE_AS_IT_IS = ('PreTrainedTokenizerFast', 'TokenizersBackend')  # transformers' classes that use the file unchanged
SMALLEST_BPE = 259  # 256 bytes, the end-of-text token and those of turns, before any merge
# What tokenizers treat differently: contractions, long numbers, spaces, line ends, other scripts, and plain English.
# Without special tokens, since transformers would take them for such. The docstring above is part of the sample.
SAMPLE_TEXT = (
    "It's 12345678 o'clock,\n\n\tif (x >= 0):  \r\n    \u00e9t\u00e9 \u4f60\u597d \U0001f642 <|x|> unbelievably\n"
    + Path(__file__).read_text(encoding='utf-8')[:1200]  # not __doc__: python -OO has none
)
# What only a few treat differently: a letter in two parts, letters without width, spaces before a word.
ODD_TEXTS = (' a', '\na  b ', 'e\u0301\u200b \u00a0\ufeff x1y 23\r\n', '  \n\nc \r\n d\n\n    \t tide \t\t e')

# How GPT-2 splits text into words before merging, in tiktoken's version: possessive, so faster, with the same words.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


class InBatches:
    """What tokenizers with encode_batch() have in common."""

    bos = ()

    def encode_behind(self, text):
        """The ids of a text that goes on from another one: without the space that some tokenizers put before a text."""
        return self.encode(text)

    def encode_flat(self, texts):
        """(tokens of all texts, uint32; where the tokens of each text end, int64). texts: a list of bytes in UTF-8."""
        arrays = self.encode_batch([text.decode() for text in texts])
        ends = np.cumsum([len(array) for array in arrays], dtype=np.int64)
        return np.concatenate(arrays or [[]], dtype=np.uint32, casting='unsafe'), ends


class ByteTokenizer(InBatches):
    """UTF-8 bytes are the ids 0 to 255, end-of-text is 256."""

    name, vocab_size, eot = 'bytes', 257, 256

    def encode(self, text):
        return list(text.encode('utf-8', 'replace'))

    def encode_batch(self, texts):
        """A uint8 array per text."""
        return [np.frombuffer(text.encode('utf-8', 'replace'), dtype=np.uint8) for text in texts]

    def decode(self, ids):
        """Text of the ids. Bytes that are not UTF-8, which a barely trained model may sample, become U+FFFD."""
        parts = (END_OF_TEXT.encode() if token == self.eot else bytes([token]) for token in ids)
        return b''.join(parts).decode('utf-8', 'replace')

    def count_bytes(self, ids):
        return [int(token != self.eot) for token in ids]


class TiktokenTokenizer(InBatches):
    """A tiktoken Encoding."""

    def __init__(self, encoding):
        self.encoding = encoding
        self.name = encoding.name
        self.vocab_size = encoding.n_vocab
        self.eot = encoding.eot_token

    def encode(self, text):
        return self.encoding.encode_ordinary(text)

    def encode_batch(self, texts):
        """A uint32 array per text, without Python lists, which would add a fifth to the time."""
        return [self.encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]

    def decode(self, ids):
        """Text of the ids. An id without a token becomes U+FFFD; cl100k_base, for one, has such gaps."""
        return b''.join(map(self._bytes_of, ids)).decode('utf-8', 'replace')

    def _bytes_of(self, token):
        try:
            return self.encoding.decode_single_token_bytes(int(token))
        except KeyError:
            return '\ufffd'.encode()

    def count_bytes(self, ids):
        special = {self.encoding.encode_single_token(text) for text in self.encoding.special_tokens_set}
        return [0 if token in special else len(self._bytes_of(token)) for token in ids]


class FileTokenizer(InBatches):
    """A tokenizer.json of Hugging Face's `tokenizers`. eot: the text of its end-of-text token. bos: the texts of the
    tokens that it puts before a text."""

    def __init__(self, path, eot, bos=()):
        self.tokenizer = open_file(path)
        self.tokenizer.encode_special_tokens = True  # what looks like a special token in a text is only text
        self.tokenizer.no_truncation()  # the file may ask for either
        self.tokenizer.no_padding()
        self.name = Path(path).parent.name
        self.vocab_size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1  # ids may have gaps
        self.eot = self.tokenizer.token_to_id(eot)
        if self.eot is None:
            raise ValueError(f'{path}: has no token {eot!r}, which its folder names as the end of a text')
        # A unigram model finds special tokens even so, as words of its vocabulary.
        is_unigram = type(self.tokenizer.model).__name__ == 'Unigram'
        self._encoder = self._letters.tokenizer if is_unigram else self.tokenizer
        self.bos = [self.tokenizer.token_to_id(token) for token in bos]
        if None in self.bos:
            raise ValueError(f'{path}: has no token {bos[self.bos.index(None)]!r}, which its folder puts before a text')

    def encode(self, text):
        return self._encoder.encode(text, add_special_tokens=False).ids

    def encode_behind(self, text):
        return self._letters.going_on.encode(text, add_special_tokens=False).ids

    @functools.cached_property
    def _letters(self):
        letters = ControlTokens(json.loads(self.tokenizer.to_str()), lambda token: token['special'])
        letters.tokenizer.encode_special_tokens = letters.going_on.encode_special_tokens = True
        return letters

    def encode_batch(self, texts):
        """A uint32 array per text."""
        encodings = self._encoder.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids):
        return self.tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)

    def count_bytes(self, ids):
        """A byte-level vocabulary spells each byte as one letter, and others spell single bytes as <0x0A>. What a token
        adds to a text otherwise shows behind another token, since a space at the beginning of a text may be dropped."""
        added = self.tokenizer.get_added_tokens_decoder()
        decoder = json.loads(self.tokenizer.decoder.__getstate__()) if self.tokenizer.decoder else {}
        kinds = {part.get('type') for part in (decoder, *decoder.get('decoders', ()))}

        def count(token):
            spelled = self.tokenizer.id_to_token(token)
            if spelled is None or token in added:
                return 0 if spelled is None or added[token].special else len(spelled.encode())
            if 'ByteLevel' in kinds:
                return len(spelled)
            if 'ByteFallback' in kinds and re.fullmatch('<0x[0-9A-F]{2}>', spelled):
                return 1
            twice, once = self.tokenizer.decode([token, token]), self.tokenizer.decode([token])
            return len(twice.encode()) - len(once.encode())

        return [count(int(token)) for token in ids]


def open_file(path):
    """The tokenizers.Tokenizer in a tokenizer.json. Raises ValueError if the file cannot be read."""
    import tokenizers

    refuse_lfs_pointer(path)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no class for its errors
        reason = f'tokenizers {tokenizers.__version__} cannot read it ({one_line(error)})'
        raise ValueError(f'{path}: {reason}: copy it again, or update that package') from error


# --- finding one ------------------------------------------------------------------------------------------------------


def folder_of_tokenizer(name):
    """What `name` stands for as a tokenizer: of a run what it has kept, a folder or the name of one without a file.
    Everything else is itself. Raises ValueError for a run of a version that kept none."""
    if not is_run(name):
        return name
    kept = os.path.join(name, KEPT)
    if not os.path.isdir(kept):
        raise ValueError(
            f'tokenizer={name} is a run of an earlier version, which has kept no tokenizer: give the folder of its '
            'dataset, --tokenizer=data/NAME'
        )
    has_file = os.path.exists(os.path.join(kept, 'tokenizer.json'))
    return kept if has_file else _read_meta(kept)[1]['name']


def load_tokenizer(name, folder=None, fetch=True):
    """The tokenizer with that name: 'bytes', 'bpe', a name of tiktoken's, or the path of a Hugging Face folder.

    folder: the dataset's, which for 'bpe' holds tokenizer.json. Unless TIKTOKEN_CACHE_DIR is set, tiktoken's files are
    kept in `tiktoken` beside it. Raises ValueError for a name that does not exist, with the closest ones, and for files
    that are not cached and cannot be fetched; FileNotFoundError for a folder without tokenizer.json.
    """
    if name == 'bytes':
        return ByteTokenizer()
    if name == 'bpe':
        return _load_bpe(Path(folder) / 'tokenizer.json')
    if os.path.isdir(name):
        return FileTokenizer(*_hugging_face_files(name))
    return _load_tiktoken(name, Path(folder).parent / 'tiktoken' if folder else None, fetch)


def tokenizer_of(dataset_folder, fetch=False):
    """The tokenizer that a dataset's meta.json names, or that of a Hugging Face folder. Raises ValueError if there is
    none, and as load_tokenizer().

    fetch: whether files that are not here may come from the network, for which a training run must not wait."""
    path = Path(dataset_folder) / 'meta.json'
    facts = _read_meta(dataset_folder)[1]
    if facts is None and has_tokenizer(dataset_folder):
        return load_tokenizer(str(dataset_folder))
    if facts is None:
        raise ValueError(f'{path} {"does not name a tokenizer" if path.exists() else "is missing"}')
    if 'eot_text' in facts:  # a Hugging Face tokenizer: its file was copied, the folder it came from may be elsewhere
        return FileTokenizer(path.with_name('tokenizer.json'), facts['eot_text'], facts.get('bos_text', ()))
    return load_tokenizer(facts['name'], dataset_folder, fetch)


def tokenizer_of_run(dataset_folder, vocab_size, name=None):
    """The tokenizer of a model with vocab_size tokens: that of the dataset it was trained on, or the one with this
    name. Raises ValueError if it cannot be found, or if it has more tokens than the model."""
    if name is not None:
        tokenizer = load_tokenizer(name)
    else:
        try:
            tokenizer = tokenizer_of(dataset_folder, fetch=True)
        except (ValueError, OSError) as error:
            name = {50257: 'gpt2', 257: 'bytes'}.get(vocab_size, 'NAME')  # what most likely has so many tokens
            advice = 'say where the dataset lies with --data_dir=FOLDER, or which tokenizer it was made with, of '
            raise ValueError(f'{error}; {advice}{vocab_size} tokens, with --tokenizer={name}') from error
    if tokenizer.vocab_size > vocab_size:
        sizes = f'has {tokenizer.vocab_size} tokens, the model {vocab_size}'
        raise ValueError(f'tokenizer {tokenizer.name} {sizes}: give the one it was trained with, --tokenizer=NAME')
    return tokenizer


def _read_meta(dataset_folder):
    """(a dataset's meta.json, what it says about the tokenizer); ({}, None) if it says nothing."""
    meta = read_meta(dataset_folder)
    facts = meta.get('tokenizer')
    return (meta, facts) if isinstance(facts, dict) and 'name' in facts else ({}, None)


def names_tokenizer(dataset_folder):
    """Whether a dataset's meta.json says with which tokenizer it was made."""
    return _read_meta(dataset_folder)[1] is not None


def has_tokenizer(folder):
    """Whether the folder of a dataset, a run's language or a model has a tokenizer, or names one."""
    return names_tokenizer(folder) or os.path.exists(os.path.join(folder, 'tokenizer.json'))


def same_tokenizer(*folders):
    """Whether folders have the same tokenizer. One that has none and names none is ignored."""
    named = [folder for folder in folders if has_tokenizer(folder)]
    return all(difference(named[0], other) is None for other in named[1:])


def difference(folder, other):
    """In words, how the tokenizer of one folder differs from that of another; None if both give every text the same
    ids. folder, other: of datasets, or Hugging Face folders.

    Versions of transformers write the same tokenizer with different bytes, and an export adds to it what it puts before
    a text. So if the parts of the files that decide ids differ, too, the tokens are compared one by one, and the ids of
    texts. Two names of tiktoken's are compared as names. Raises what load_tokenizer() raises.
    """
    files = [Path(name, 'tokenizer.json') for name in (folder, other)]
    if all(file.exists() for file in files):
        ends = {(_read_meta(name)[1] or {}).get('eot_text', END_OF_TEXT) for name in (folder, other)}
        if len(ends) == 1 and digest_of_file(files[0]) == digest_of_file(files[1]):
            return None
    elif not any(file.exists() for file in files):
        names = [_read_meta(name)[1]['name'] for name in (folder, other)]
        return None if names[0] == names[1] else f'is not {names[1]}, that of {other}'
    ours, theirs = tokenizer_of(folder), tokenizer_of(other)
    if ours.vocab_size != theirs.vocab_size:
        return f'has {ours.vocab_size:,} tokens, that of {other} {theirs.vocab_size:,}'
    return difference_of(ours, theirs, other)


def difference_of(ours, theirs, other):
    """difference() of two tokenizers, one of which may have more tokens than the other. other: the folder of theirs."""
    # As their files spell them: in a text, a token with a space before it may look like one without.
    are_files = isinstance(ours, FileTokenizer) and isinstance(theirs, FileTokenizer)
    spell = (
        (lambda one, token: one.tokenizer.id_to_token(token)) if are_files else (lambda one, token: one.decode([token]))
    )
    for token in range(min(ours.vocab_size, theirs.vocab_size)):
        if spell(ours, token) != spell(theirs, token):
            return f'has other tokens than that of {other}, the first of them {token}'
    if any(list(ours.encode(text)) != list(theirs.encode(text)) for text in (SAMPLE_TEXT, *ODD_TEXTS)):
        return f'gives other tokens than that of {other}'
    if ours.eot != theirs.eot:
        ends = f'{theirs.eot} ({theirs.decode([theirs.eot])})'
        return f'ends documents with the token {ours.eot}, that of {other} with {ends}'
    return None


def digest_of_file(path):
    """The sha256 of what decides the ids of a text in a tokenizer.json: vocabulary, merges, special tokens, normalizer
    and pre-tokenizer. Of how the file is written it does not depend, nor of what it puts around a text."""
    content = _read_settings(path)

    def essential(value):  # versions write a default or leave it out; offsets are nobody's concern here
        if isinstance(value, dict):
            parts = {key: essential(part) for key, part in value.items() if key != 'trim_offsets'}
            return {key: part for key, part in parts.items() if part not in (None, False, '')}
        return [*map(essential, value)] if isinstance(value, list) else value

    model = dict(content.get('model') or {})
    model['merges'] = [' '.join(pair) if isinstance(pair, list) else pair for pair in model.get('merges') or ()]
    parts = [essential(content.get(name)) for name in ('added_tokens', 'normalizer', 'pre_tokenizer')]
    vocabulary = model.pop('vocab', None)  # in which an id of 0 is no default
    return hashlib.sha256(json.dumps([vocabulary, essential(model), *parts], sort_keys=True).encode()).hexdigest()


def as_argument(*dataset_folders):
    """The value of --tokenizer for preparing other text with the tokenizer of these datasets: of the first one that
    names it."""
    for folder in dataset_folders:
        facts = _read_meta(folder)[1]
        if facts and (facts['name'] == 'bpe' or facts.get('eot_text') == END_OF_TEXT):
            return shlex.quote(str(folder))
        if facts:
            return shlex.quote(f'models/{facts["name"]}' if 'eot_text' in facts else facts['name'])
    return '...'


def check_same_tokenizer(dataset_folder, model_folder):
    """Raise ValueError if a dataset was prepared with another tokenizer than that of a model's Hugging Face folder.
    Returns warnings: a line if the dataset's documents do not begin with the BOS that the model's tokenizer puts before
    a text, or begin with another one.

    One of them may have more tokens than the other. A dataset that does not name its tokenizer is not checked. Also
    raises what load_tokenizer() raises.
    """
    meta, facts = _read_meta(dataset_folder)
    if facts is None:
        return []
    file, eot, bos = _hugging_face_files(model_folder)
    command = f'`python prepare_data.py --dataset=... --tokenizer={model_folder}`'
    notes = []
    if facts.get('bos_text', []) != bos and not meta.get('masked'):  # in conversations the template writes it
        ours, theirs = (
            f'{" ".join(texts)} before' if texts else 'nothing before' for texts in (facts.get('bos_text'), bos)
        )
        notes = [
            f'WARNING: {dataset_folder} has {ours} a document, the tokenizer of {model_folder} puts {theirs} a text, '
            f'as sample.py and evaluate.py do: prepare it anew with {command}'
        ]
    if facts.get('sha256') == sha256_of(file):
        return notes
    ours, theirs = tokenizer_of(dataset_folder), FileTokenizer(file, eot)
    found = difference_of(ours, theirs, model_folder)
    if not found and meta.get('masked'):  # chat templates write special tokens
        added = ours.tokenizer.get_added_tokens_decoder().items()
        moved = [token.content for number, token in added if theirs.tokenizer.token_to_id(token.content) != number]
        found = moved and f'has the special token {moved[0]}, which that of {model_folder} has elsewhere or not at all'
    if not found:
        return notes
    raise ValueError(f'{dataset_folder}: its tokenizer {facts["name"]} {found}; prepare it anew: {command}')


def describe(name, vocab_size=None):
    """What identifies a tokenizer before it is loaded or trained, for meta.json. vocab_size: how many tokens a 'bpe'
    should have. Raises what load_tokenizer() raises for names and folders that do not exist."""
    if name == 'bpe':
        if vocab_size < SMALLEST_BPE:
            raise ValueError(f'vocab_size={vocab_size}: a BPE has at least {SMALLEST_BPE} tokens')
        return {'name': name, 'asked_vocab_size': vocab_size, 'turns': list(TURNS)}
    if os.path.isdir(name):
        path, eot, bos = _hugging_face_files(name)
        facts = {'name': Path(name).resolve().name, 'eot_text': eot, 'sha256': sha256_of(path)}
        return {**facts, 'bos_text': bos} if bos else facts
    if name != 'bytes':
        _check_tiktoken_name(name)
    return {'name': name}


def _hugging_face_files(folder):
    """(path of tokenizer.json, text of the end-of-text token, texts of the tokens before a text) of a folder."""
    path = Path(folder) / 'tokenizer.json'
    if not path.exists():
        if other := _other_file(folder):
            raise FileNotFoundError(f'{folder} has {other}, and no tokenizer.json: {_save_command(folder)} makes it')
        advice = f'`python download_model.py --model={folder}` says what is missing'
        raise FileNotFoundError(f'{folder} has no tokenizer.json: {advice}')
    eot = _end_of_text_of(path)
    if not eot:
        raise ValueError(f'tokenizer={folder}: tokenizer_config.json names no eos_token, to end documents with')
    return path, eot, _before_text_of(open_file(path))


def _save_command(folder):
    """The command that writes the files of a folder's tokenizer again, as transformers understands it."""
    place = json.dumps(str(folder))
    code = f'from transformers import AutoTokenizer as T; T.from_pretrained({place}).save_pretrained({place})'
    command = f'`python -c {shlex.quote(code)}`'
    needs_package = (_other_file(folder) or '').endswith('.model')
    return f'{command} (after `pip install sentencepiece protobuf`)' if needs_package else command


def _other_file(folder):
    """The name of a file that holds a tokenizer in another format, if there is no tokenizer.json; else None."""
    names = ('tokenizer.json', 'tokenizer.model', 'spiece.model', 'vocab.json', 'vocab.txt')
    found = next((name for name in names if os.path.exists(os.path.join(folder, name))), None)
    return None if found == 'tokenizer.json' else found


def _read_settings(path):
    """The object in a JSON file beside a tokenizer; {} if there is no file. Raises ValueError if it is damaged."""
    if not path.exists():
        return {}
    refuse_lfs_pointer(path)
    return read_json(path, dict, 'copy it again')


def _before_text_of(tokenizer):
    """The texts of the special tokens that a tokenizers.Tokenizer puts before a text. (If there is a tokenizer.json,
    transformers ignores add_bos_token.)"""
    tokenizer.no_truncation()
    return _what_stands_before(*(tokenizer.encode('a', add_special_tokens=special).tokens for special in (False, True)))


def _what_stands_before(part, whole):
    """The elements of the list `whole` that come before `part`."""
    return whole[: next((n for n in range(len(whole)) if whole[n : n + len(part)] == part), 0)]


def _end_of_text_of(path):
    """The text of the end-of-text token, as the files beside tokenizer.json name it; None if they do not."""
    names = ('tokenizer_config.json', 'special_tokens_map.json', 'generation_config.json', 'config.json')
    contents = [_read_settings(path.with_name(name)) for name in names]
    if 'added_tokens_decoder' not in contents[0]:  # then special_tokens_map.json wins, as in transformers
        contents[:2] = reversed(contents[:2])
    for content in contents:
        token = content.get('eos_token') or content.get('eos_token_id')
        if isinstance(token, dict):  # an AddedToken, written out
            token = token.get('content')
        if isinstance(token, list) and token:  # Llama 3 has several
            token = token[0]
        if isinstance(token, int):
            token = open_file(path).id_to_token(token) if token >= 0 else None
        if isinstance(token, str) and token:
            return token
    return None if path.with_name('tokenizer_config.json').exists() else END_OF_TEXT


# --- transformers -----------------------------------------------------------------------------------------------------


def load_transformers_tokenizer(folder, trust_remote_code=False, check=True):
    """transformers' own tokenizer of a model's folder. Raises ValueError if there is none and, with check, if its ids
    differ from those of tokenizer.json, see check_against_file()."""
    os.environ.setdefault('HF_HUB_OFFLINE', '1')
    import transformers

    for name in ('tokenizer.json', 'tokenizer_config.json', 'tokenizer.model'):
        if os.path.exists(path := os.path.join(folder, name)):
            refuse_lfs_pointer(path)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        found = tokenizer.encode('a', add_special_tokens=False)
    except Exception as error:  # its classes and their libraries raise all kinds of errors
        reason = one_line(error)
        if 'trust_remote_code' in reason:
            reason = 'it comes with its own code: read that, and run it with --trust_remote_code=True'
        elif other := _other_file(folder):
            reason += f'; to read {other} and write tokenizer.json: {_save_command(folder)}'
        raise ValueError(f'{folder}: transformers finds no tokenizer: {reason}') from error
    if not found:  # for some classes transformers makes an empty tokenizer if files are missing
        raise ValueError(f'{folder}: transformers finds no tokenizer: copy tokenizer.json there')
    if check:
        check_against_file(tokenizer, folder)
    return tokenizer


def check_against_file(tokenizer, folder):
    """
    Raise ValueError unless a tokenizer of transformers has the same ids as its folder's tokenizer.json.

    Datasets are encoded with the file, which is fast. But some classes of transformers replace parts of it:
    GPT2Tokenizer uses GPT-2's rule for words, whatever rule the file has. And tokenizer_config.json may add tokens.
    Compared are the ids of texts, of the tokens before a text, of every added token, and of a conversation.
    """
    from text.engine import SAMPLES

    path = Path(folder) / 'tokenizer.json'
    if not path.exists():  # transformers' class reads other files, which nothing else here reads
        return
    file = open_file(path)
    file.no_truncation()
    file.no_padding()

    def ids_of(text):
        try:
            return tokenizer(text, add_special_tokens=False).input_ids
        except Exception:  # for example because the vocabulary has no unk token
            return None

    kind = f'{folder}: {type(tokenizer).__name__} of transformers'
    alike = f'make them alike with {_save_command(folder)}'
    settings, eot = path.with_name('tokenizer_config.json'), _end_of_text_of(path)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id != file.token_to_id(eot or ''):
        ends = f'ends texts with {tokenizer.eos_token!r}, the files here with {eot!r}'
        raise ValueError(f'{kind} {ends}: write "eos_token" into {settings}')
    # Rules that cut words at different places show in words of the vocabulary after a space, an indent and a digit.
    ids = range(0, file.get_vocab_size(), max(1, file.get_vocab_size() // 2000))
    special = set(tokenizer.all_special_ids)  # to the file they may be ordinary text
    words = [file.decode([number]) for number in ids if number not in special]
    known = [between.join(words) for between in (' ', '\n\n    ', '1')]
    for text in (SAMPLE_TEXT, *SAMPLES[:2], *ODD_TEXTS, *known):
        if ids_of(text) != file.encode(text, add_special_tokens=False).ids:
            if _read_settings(settings).get('tokenizer_class') not in FILE_AS_IT_IS:
                alike = (
                    f'set "tokenizer_class": "{FILE_AS_IT_IS[0]}" in {settings}, so that both take the file as it is'
                )
            raise ValueError(f'{kind} replaces parts of tokenizer.json, and gives other ids: {alike}')
    bos, theirs = _before_text_of(file), _what_stands_before(ids_of('a'), tokenizer('a').input_ids)
    if [file.token_to_id(token) for token in bos] != theirs:
        theirs = ' '.join(tokenizer.convert_ids_to_tokens(theirs)) or 'nothing'
        raise ValueError(f'{kind} puts {theirs} before a text, tokenizer.json {" ".join(bos) or "nothing"}: {alike}')
    for token, number in tokenizer.get_added_vocab().items():
        ours = file.token_to_id(token)
        if ours != number and token != tokenizer.pad_token:  # nothing here pads
            has = 'tokenizer.json has it not' if ours is None else f'tokenizer.json as {ours}'
            raise ValueError(f'{kind} has {token} as the token {number}, {has}: {alike}')
    conversation = [{'role': 'user', 'content': 'What is 12345678?'}]
    conversation += [{'role': 'assistant', 'content': "It's a number."}]
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False)
    except Exception:  # there is no template, or it refuses this conversation, so there are no ids to compare
        return
    if ids_of(text) != file.encode(text, add_special_tokens=False).ids:
        raise ValueError(f'{kind} gives a conversation other ids than tokenizer.json: {alike}')


# --- tiktoken ---------------------------------------------------------------------------------------------------------


def _check_tiktoken_name(name):
    import tiktoken

    known = ['bytes', 'bpe', *tiktoken.list_encoding_names()]
    if name in known:
        return
    if os.path.isfile(name):
        raise ValueError(f'tokenizer={name} is a file: give its folder, --tokenizer={os.path.dirname(name) or "."}')
    if os.sep in name:
        raise FileNotFoundError(f'tokenizer={name}: there is no such folder')
    close = difflib.get_close_matches(name, known, n=3) or known
    raise ValueError(f'tokenizer={name!r}: did you mean {" or ".join(close)}, or the path of a folder?')


def _load_tiktoken(name, default_cache, fetch=True):
    """A tiktoken Encoding from the cache, into which it is fetched if need be. tiktoken deletes a cached file whose
    sha256 is wrong."""
    import tiktoken.load

    _check_tiktoken_name(name)
    if default_cache is not None:
        os.environ.setdefault('TIKTOKEN_CACHE_DIR', str(default_cache))
    cache = os.environ.get('TIKTOKEN_CACHE_DIR', os.path.join(tempfile.gettempdir(), 'data-gym-cache'))
    before = os.listdir(cache) if os.path.isdir(cache) else []
    read_file = tiktoken.load.read_file  # its way to the network; without one it would wait, for minutes
    if not fetch:
        tiktoken.load.read_file = _refuse_to_fetch
    try:
        return TiktokenTokenizer(tiktoken.get_encoding(name))
    except OSError as error:  # the errors of `requests` are OSErrors as well
        problem = f'its files are not in {cache}'
        deleted = [file for file in before if not os.path.exists(os.path.join(cache, file))]
        if deleted:
            files = f'{", ".join(deleted)} in {cache}'
            problem = f'{files} was damaged (its sha256 was not the expected one), so tiktoken deleted it'
        advice = f'where there is a network, run `python prepare_data.py --cache_tokenizer={name}`'
        problem += ' and cannot be fetched' if fetch else ''
        raise ValueError(f'tokenizer={name}: {problem}; {advice}') from error
    finally:
        tiktoken.load.read_file = read_file


def _refuse_to_fetch(path):
    raise OSError(f'{path} is not in the cache')


def fetch_tokenizer(name, folder):
    """Fetch tiktoken's files of a tokenizer into TIKTOKEN_CACHE_DIR, or if that is not set into `folder`, and verify
    them. Returns (the folder, the tokenizer). Raises ValueError if they cannot be fetched, or do not match their
    sha256."""
    import tiktoken

    if name in ('bytes', 'bpe') or os.path.isdir(name):
        raise ValueError(f'cache_tokenizer={name}: nothing to fetch, this tokenizer needs no files from elsewhere')
    _load_tiktoken(name, folder)
    tiktoken.registry.ENCODINGS.pop(name)  # read once more, from the cache, which compares every sha256
    return os.environ['TIKTOKEN_CACHE_DIR'], _load_tiktoken(name, folder)


# --- a BPE of our own -------------------------------------------------------------------------------------------------


def train_bpe(texts, vocab_size, path, engine='auto'):
    """Train a byte-level BPE with GPT-2's word pattern on texts, bytes in UTF-8, and write it as tokenizer.json. The
    result depends only on the texts and their order; engine chooses the library that trains it, see engine.merges_of().
    A small text may not have enough pairs to merge for vocab_size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from text.engine import merges_of

    # Without digits nothing is merged with one, so each stays a token of its own: numbers are read digit by digit.
    texts = [part for text in texts for part in re.split(rb'[0-9]+', text) if part]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # all 256 bytes, so that no text is unknown

    def tokenizer_of(model):
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    specials = [END_OF_TEXT, *TURNS]
    # gigatoken goes on when nothing is left to merge. Something is, as long as there are more words than merges.
    words, split = set(), pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    for text in texts if engine == 'auto' else ():
        words |= {word for word, _ in split(text.decode()) if len(word) > 1}
        if len(words) > vocab_size - len(alphabet):
            break
    else:
        engine = 'reference'
    if merges := merges_of(texts, vocab_size - len(TURNS), END_OF_TEXT) if engine == 'auto' else None:
        letter_of = {byte: letter for letter, byte in _byte_of_letter().items()}
        pairs = [tuple(''.join(letter_of[byte] for byte in part) for part in pair) for pair in merges]
        words = dict.fromkeys([*specials, *alphabet, *map(''.join, pairs)])  # two merges may make the same word
        tokenizer = tokenizer_of(models.BPE({word: number for number, word in enumerate(words)}, pairs))
        tokenizer.add_special_tokens(specials)
    else:
        tokenizer = tokenizer_of(models.BPE())
        options = {'special_tokens': specials, 'initial_alphabet': alphabet, 'show_progress': False}
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, **options)
        tokenizer.train_from_iterator((text.decode() for text in texts), trainer)
    write_file(path, tokenizer.to_str(pretty=True))  # the bytes of tokenizer.save()


def byte_level_bpe(ranks, specials, pattern=None):
    """A tokenizers.Tokenizer that computes the same as a tiktoken Encoding with these parts.

    ranks: {bytes of a token: id}; lower ids are merged first. specials: {text: id}. pattern: the regular expression
    that splits a text into words; None = do not split.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    letters = {byte: letter for letter, byte in _byte_of_letter().items()}
    spelled = {token: ''.join(letters[byte] for byte in token) for token in ranks}
    # tiktoken merges the neighbors whose union has the lowest id. In `tokenizers` that is a list of merges with every
    # way to split each token in two, in the order of the tokens' ids.
    merges = [
        (spelled[token[:cut]], spelled[token[cut:]])
        for token in sorted(ranks, key=ranks.get)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    vocabulary = {spelled[token]: number for token, number in ranks.items()} | specials
    bpe = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    if pattern:
        # `{1,3}+` is possessive in tiktoken, which matters little, but in this library it is one or more repetitions.
        pattern = re.sub(r'(\{\d*,\d*\})\+', r'\1', pattern)
        steps.insert(0, pre_tokenizers.Split(tokenizers.Regex(pattern), 'isolated'))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(steps)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in specials])
    return bpe


def as_file(tokenizer, folder=None):
    """A tokenizers.Tokenizer that gives the ids of a tokenizer here; without what stands around a text. folder: where
    the tokenizer.json is, if there is one."""
    if isinstance(tokenizer, ByteTokenizer):
        return byte_level_bpe({bytes([byte]): byte for byte in range(256)}, {END_OF_TEXT: tokenizer.eot})
    if isinstance(tokenizer, TiktokenTokenizer) and tokenizer.name != 'bpe':  # tiktoken's own names
        encoding = tokenizer.encoding
        return byte_level_bpe(encoding._mergeable_ranks, encoding._special_tokens, encoding._pat_str)
    return open_file(os.path.join(folder, 'tokenizer.json'))


def write_as_folder(name, folder):
    """Write a tokenizer that has a name, 'bytes' or one of tiktoken's, as a folder with tokenizer.json, unless it is
    there. A chat template and transformers need that."""
    if not os.path.exists(os.path.join(folder, 'tokenizer.json')):
        content = as_file(load_tokenizer(name, folder)).to_str()  # raises for a name that does not exist
        os.makedirs(folder, exist_ok=True)
        write_file(os.path.join(folder, 'tokenizer.json'), content)
    return str(folder)


def _load_bpe(path):
    """The tokenizer that train_bpe() has written, run by tiktoken, which takes a tenth of the time. tiktoken merges the
    neighbors whose union has the lowest id, `tokenizers` the first pair in its list of merges. Both do the same, since
    ids have the order of that list."""
    import tiktoken

    if not path.exists():
        raise FileNotFoundError(f'{path} is missing: it belongs to the dataset; copy or prepare the dataset again')
    form = {'model': {'vocab': {str: int}}, 'added_tokens': [{'content': str}]}
    content = read_json(path, form, 'prepare the dataset again')
    vocabulary, names = content['model']['vocab'], [token['content'] for token in content['added_tokens']]
    check_form(vocabulary, dict.fromkeys([END_OF_TEXT, *names], int), path)
    special = {name: vocabulary.pop(name) for name in names}
    byte_of = _byte_of_letter()
    ranks = {bytes(byte_of[letter] for letter in token): number for token, number in vocabulary.items()}
    encoding = tiktoken.Encoding('bpe', pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    return TiktokenTokenizer(encoding)


def _byte_of_letter():
    """{letter: byte} of GPT-2's spelling of bytes: printable ones stand for themselves, and the letters from U+0100 on
    for the others."""
    printable = [*range(ord('!'), ord('~') + 1), *range(ord('¡'), ord('¬') + 1), *range(ord('®'), ord('ÿ') + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
