"""What all kinds of cases have in common: how a case ends, texts, small tokenizers."""

import functools
import json
import tempfile

from text.conversations import MARK

LIMIT = 2000  # characters; a longer line cannot be read


class Wrong(Exception):
    """What was learned is not what is there."""


class Refused(Exception):
    """Something was not learned, and a line other than that of an exception says why."""


def check(is_right, problem, *values):
    """Raise Wrong with the problem, unless is_right."""
    if not is_right:
        raise Wrong(' | '.join([problem, *(repr(value)[:600] for value in values)]))


def is_clear(line):
    """Whether a message is one line that says something."""
    return bool(line.strip()) and '\n' not in line and len(line) < LIMIT and not line.rstrip().endswith('None')


def some(draw, share):
    """True for this share of the cases."""
    return draw.random() < share


# --- texts ------------------------------------------------------------------------------------------------------------

# Pieces of text that tokenizers, templates and file formats treat in different ways.
PIECES = ['time', 'and', 'tide', 'Größe', '中文', '🙂', '12345', "it's", 'x += 1;', '\n', '\n\n   ', '\t', '\r\n']
PIECES += ['{{ x }}', '{% if %}', '"so"', '\\n', '{"a": 1}', '[1, 2]', 'a,b;c', '\u200b', 'e\u0301', '\u00a0', '\u2028']
PIECES += ['<think', '</s', '#!', '---', "'", '- a: b', '&amp;', '\x85', '\ufeff', 'null', 'https://x.yz/?q=1', '<b>']
LFS = b'version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 12345\n' % (b'ab' * 32)  # in place of a file
NOT_JSON = [LFS.decode(), '', '{', '[]', 'null', '5', '{"a": 1}', '{"model": {"type": "BPE"}}', '\ufeff{}']


class Words:
    """Words that occur only once in a case, so that a text can be recognized by its word wherever it turns up."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return f'w{self.count}x'


def draw_text(draw, word, specials=(), pieces=PIECES):
    """A text with the word in it, or now and then an empty one."""
    if some(draw, 0.03):
        return draw.choice(['', ' ', '\n'])
    parts = draw.choices(pieces, k=draw.randrange(8))
    if specials and some(draw, 0.1):
        parts.append(draw.choice(specials))
    if some(draw, 0.01):
        parts += parts * 200
    if some(draw, 0.005):
        parts.append(draw.choice([MARK, '\0', '\ud83d']))  # the last is half a character, as JSON may have it
    parts.insert(draw.randint(0, len(parts)), word)
    text = draw.choice(['', ' ', ' ', ' ']).join(parts)
    if some(draw, 0.2):
        text = draw.choice([' ', '\n', '  \n\n', '\t']) + text
    if some(draw, 0.2):
        text += draw.choice([' ', '\n', '\n\n', ' \t'])
    return text


# --- tokenizers -------------------------------------------------------------------------------------------------------

SPECIALS = ['<|end|>', '<|im_start|>', '<|im_end|>', '<s>', '</s>', '[INST]', '[/INST]', '<|begin_of_text|>']
SPECIALS += ['<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>', '<start_of_turn>', '<end_of_turn>', '<bos>']
SPECIALS += ['<|user|>', '<|assistant|>', '<|system|>', '<|start|>', '<|message|>', '<|call|>']
LETTERS = 'abcdefghijklmnopqrstuvwxyz0123456789.,:;\'"{}[]<>/?=&#!-+'
LLAMA3_WORD = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
)
STAYS = tempfile.TemporaryDirectory(prefix='fuzz-')  # files that several cases use


@functools.cache
def small_tokenizer(kind):
    """A small tokenizers.Tokenizer of one of seven kinds, without special tokens, as JSON. Words of 'lines' may cross
    spaces and line ends."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    corpus = ['the user asks the assistant, and the system is there', 'time and tide wait for no one 12345 Größe'] * 9
    options = {'show_progress': False}
    if kind in ('gpt2', 'llama3', 'nfc', 'lines'):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if kind == 'llama3':
            words = pre_tokenizers.Split(Regex(LLAMA3_WORD), 'isolated')
            whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, whole])
        if kind == 'lines':
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            corpus = ['\n\n\n', 'assistant\n\n', 'assistant: time', 'w1x and tide\n<think>\n\n</think>\n\n{"a": 1}'] * 9
        if kind == 'nfc':
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, **options))
    elif kind == 'llama2':
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token='<unk>', fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
        steps = [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
        fallback = ['<unk>', *(f'<0x{byte:02X}>' for byte in range(256))]
        tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=400, special_tokens=fallback, **options))
    elif kind == 'unigram':  # the trainers of these two kinds are random
        words = ['</s>', '▁', *LETTERS, '▁the', '▁time', '▁and', 'ide', 'er', '12']
        tokenizer = Tokenizer(models.Unigram([('<unk>', 0.0), *((word, -5.0 + len(word)) for word in words)], unk_id=0))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    else:  # wordpiece
        words = ['[UNK]', *LETTERS, *(f'##{letter}' for letter in LETTERS), 'the', 'time', '##ide', '##er']
        tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token='[UNK]'))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
    content = json.loads(tokenizer.to_str())
    if kind == 'llama2':  # the trainer takes the bytes as special tokens, the model as words
        content['added_tokens'] = [token for token in content['added_tokens'] if token['content'] == '<unk>']
    return json.dumps(content)
