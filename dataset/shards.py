"""
Writing the shards of a dataset's split, so that a kill at any moment costs seconds of work and leaves no half shard;
and reading them.

    writer = ShardWriter(folder, 'train', dtype, shard_tokens)
    writer.add(tokens, documents, text_bytes)
    writer.sync(); save writer.totals                    # from time to time: a later run continues from there
    writer.finish()                                      # the tokens that are left become the last shard

    writer = ShardWriter(..., totals, masked=True)       # continues from saved totals; conversations have .mask files

Tokens are collected in train_000000.bin.partial, after space for the header. When they fill a shard, the header is
written and the file gets its name, train_000000.bin. A run that continues from totals saved before that takes the name
away again. A masked dataset has one byte of flags per token, in a .mask file beside each .bin file.
"""

import json
import os
import struct
from pathlib import Path

import numpy as np

from system.files import bare_name, check_form, no_link, read_json, rename_durably, replacing, sha256_of

# Flags of a token: it counts in the loss as a target; it is the first of a conversation; as a target it is end-of-text
# instead, with which this answer would end if it came last.
LEARNED, FIRST, AS_END = 1, 2, 4
TOKENS_AT_ONCE = 1 << 22  # written to a shard
# A shard: 256 little-endian int32 (magic, version, number of tokens, zeros), then the tokens. llm.c's layout.
HEADER_BYTES = 256 * 4
FORMATS = {np.dtype('<u2'): (20240520, 1), np.dtype('<u4'): (20240801, 7)}  # dtype -> magic, version
# nanoGPT's names, the only files that may lack a header. Read as uint16 tokens, both magics begin with an id above
# 55,000, which GPT-2's vocabulary does not have, so a file without a header is never mistaken for one that has it.
HEADERLESS_NAMES = ('train.bin', 'val.bin')
# Megatron-LM's .bin files have no header, either; the .idx file beside each says what they hold. Code -> dtype.
INDEX_MAGIC, INDEX_DTYPES = b'MMIDIDX\0\0', {1: 'uint8', 2: 'int8', 3: 'int16', 4: 'int32', 5: 'int64', 8: 'uint16'}
# What meta.json may say: see check_form(). Whoever made a dataset wrote it, prepare_data.py or somebody else.
SHARD = {'file': bare_name, 'tokens': int, 'sha256?': str, 'mask_file?': bare_name, 'mask_sha256?': str}
SPLIT = {'shards': [SHARD], **dict.fromkeys(('tokens?', 'documents?', 'bytes?', 'max_token?'), int)}
META = {
    'format_version?': int,
    'vocab_size?': int,
    'eot_token?': (int, None),
    'dtype?': str,
    'masked?': bool,
    'pairs?': bool,
    'splits?': {str: SPLIT},
    'chat_templates?': {bare_name: str},
    'settings?': {'chat_template?': (str, None), 'fold_system?': (bool, None)},
    'source?': dict,
    'left_out?': {str: int},
    'rows_kept?': int,
}
MASKED = {'splits?': {str: {'shards': [{'mask_file': bare_name}], 'learned_tokens': int, 'longest': int}}}
TOKENIZER = {'name': str, 'eot_text?': str, 'bos_text?': [str], 'sha256?': str}
LOOKED_AT = 1 << 16  # tokens of a file without a header that have to look like tokens


def write_shard(path, tokens, dtype):
    """Write a 1-D array of token ids as the shard `path`. dtype: np.uint16 or np.uint32. Raises ValueError if an id
    does not fit into it: numpy itself would store 128,000 in a uint16 as 62,464."""
    tokens, dtype = np.asarray(tokens), np.dtype(dtype).newbyteorder('<')
    assert tokens.ndim == 1 and tokens.dtype.kind in 'iu' and len(tokens) < 2**31, (path, tokens.dtype, tokens.shape)
    if len(tokens) and (tokens.min() < 0 or tokens.max() > np.iinfo(dtype).max):
        given = f'{path}: token ids {tokens.min()} to {tokens.max()}'
        raise ValueError(f'{given} do not fit into {dtype.name}; a vocabulary above 65,536 needs uint32')
    with replacing(path, 'wb') as file:
        file.write(_header(dtype, len(tokens)))
        for start in range(0, len(tokens), TOKENS_AT_ONCE):
            file.write(np.ascontiguousarray(tokens[start : start + TOKENS_AT_ONCE], dtype=dtype).data)


def _header(dtype, n_tokens):
    magic, version = FORMATS[dtype.newbyteorder('<')]
    return np.array([magic, version, n_tokens, *[0] * 253], dtype='<i4').tobytes()


def read_shard(path, headerless_dtype=None):
    """Map the tokens of a shard or .npy file: a read-only np.memmap of shape (number of tokens,).

    headerless_dtype: of the tokens in a train.bin or val.bin without a header; None = uint16. Raises ValueError that
    names the file for an unknown magic, for content that shows another type, or if its size is not what the header
    says, since reading beyond the end of a mapped file would kill the process with SIGBUS.
    """
    if str(path).endswith('.npy'):
        return _read_npy(path)
    with open(path, 'rb') as file:
        size = os.fstat(file.fileno()).st_size
        magic, version, n_tokens = struct.unpack('<3i', file.read(12).ljust(12, b'\0'))
    for dtype, magic_and_version in FORMATS.items():
        if (magic, version) == magic_and_version:
            expected = HEADER_BYTES + n_tokens * dtype.itemsize
            if size != expected:
                sizes = f'its size is {size:,} bytes, the {n_tokens:,} tokens of its header take {expected:,}'
                raise ValueError(f'{path}: {sizes}: half-copied or damaged; copy or prepare it again')
            return np.memmap(path, dtype=dtype, mode='r', offset=HEADER_BYTES, shape=(n_tokens,))
    if indexed := _dtype_of_index(path, size):
        return np.memmap(path, dtype=indexed, mode='r')
    if os.path.basename(path) not in HEADERLESS_NAMES:
        known = ' or '.join(f'{magic}, {version} ({dtype.name})' for dtype, (magic, version) in FORMATS.items())
        mend = f'copy or prepare it again (without a header only {" and ".join(HEADERLESS_NAMES)} are read)'
        raise ValueError(f'{path}: its magic and version are {magic}, {version}, those of a shard {known}: {mend}')
    is_said, dtype = headerless_dtype is not None, np.dtype(headerless_dtype or 'uint16').newbyteorder('<')
    if dtype.kind not in 'iu':
        raise ValueError(
            f'{path}: "dtype": "{dtype.name}" in its meta.json: token ids are integers, as uint16 or uint32'
        )
    if size == 0 or size % dtype.itemsize:
        raise ValueError(f'{path}: its size, {size:,} bytes, is no whole number of {dtype.name} tokens; copy it again')
    _refuse_other_content(path, dtype, is_said)
    return np.memmap(path, dtype=dtype, mode='r')


def _dtype_of_index(path, size):
    """The dtype of the tokens in a .bin file of Megatron-LM, which the .idx file beside it names; None if there is no
    such file. Its layout: magic, version, code of the dtype, how many sequences and documents there are, then the
    length of each sequence. Raises ValueError for another index, or if the lengths do not make up `size` bytes."""
    index = Path(path).with_suffix('.idx')
    if not index.exists():
        return None
    with open(index, 'rb') as file:
        magic, version, code, n_sequences, _ = struct.unpack('<9sQBQQ', file.read(34).ljust(34, b'\0'))
        if magic != INDEX_MAGIC or version != 1 or code not in INDEX_DTYPES:
            given = f'{index} beside it is no index of token ids by Megatron-LM (version 1)'
            raise ValueError(
                f'{path}: {given}: delete it if it does not belong to this file, or prepare the text again'
            )
        n_tokens = int(np.fromfile(file, dtype='<i4', count=n_sequences).sum(dtype=np.int64))
    dtype = np.dtype(INDEX_DTYPES[code]).newbyteorder('<')
    if n_tokens * dtype.itemsize != size or not size:
        sizes = (
            f'its size is {size:,} bytes, the {n_tokens:,} {dtype.name} of {index} take {n_tokens * dtype.itemsize:,}'
        )
        raise ValueError(f'{path}: {sizes}; copy both again')
    return dtype


def _refuse_other_content(path, dtype, is_said):
    """Raise ValueError if the beginning of a file without a header can be no tokens of this type. is_said: whether
    meta.json says the type, or it is a guess."""
    if dtype.itemsize == 1:
        return
    words = np.fromfile(path, dtype='<u2', count=LOOKED_AT)  # 16 bits each, whatever the file holds
    start = words[:256].tobytes()
    if start.isascii() and start.decode('ascii').translate({9: 32, 10: 32, 13: 32}).isprintable():
        what = 'is text, and no token ids: a pointer of Git LFS (`git lfs pull` fetches the file), or an error page'
        raise ValueError(f'{path}: {what}; text itself becomes tokens by `python prepare_data.py --dataset=FILE`')
    # Floating-point numbers of 2 to 8 bytes end with their exponent: no id, written so, is between 0 and 1, or above
    # 2^20. Of token ids many are below 15,360, and few others between that and 27,648.
    ends = words[3::4]
    if len(ends) >= 64 and ends.any() and np.all((ends == 0) | ((0x3C00 <= ends) & (ends < 0x6C00))):
        raise ValueError(f"{path}: floating-point numbers, and no {dtype.name}: write the ids with .astype('uint16')")
    # The upper halves of larger integers are zero, or for a vocabulary of up to a million below 16.
    low, high = words[::2], words[1::2]
    shown = None
    if len(high) and high.max() < 16 <= low.max():
        shown, found = 'uint32' if low[1::2].any() else 'int64', 'every second value is below 16'
    elif len(high) and high.max() >= 16 and dtype.itemsize > 2:
        shown, found = 'uint16', 'the ids would be larger than any vocabulary'
    if shown and np.dtype(shown).itemsize != dtype.itemsize:
        place = Path(path).parent / 'meta.json'
        said = json.dumps({'dtype': shown, 'vocab_size': 'N'}).replace('"N"', 'N')
        mend = f"`echo '{said}' > {place}` says so, with the N of their tokenizer"
        mend = f'write "dtype": "{shown}" into {place}' if is_said else mend
        raise ValueError(f'{path}: read as {dtype.name}, {found}: these are {shown}, not {dtype.name}; {mend}')


def _read_npy(path):
    """Map a .npy file of token ids."""
    try:
        with open(path, 'rb') as file:
            if file.read(6) != b'\x93NUMPY':
                raise ValueError(
                    'it has no header of NumPy; raw uint16 are read from files called train.bin and val.bin'
                )
        tokens = np.load(path, mmap_mode='r', allow_pickle=False)  # a pickle can run code
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f'{path}: size or content is not that of a .npy file: {error}') from error
    if tokens.ndim != 1 or tokens.dtype.kind not in 'iu':
        raise ValueError(f'{path}: expected one row of integers, found {tokens.dtype} of shape {tokens.shape}')
    return tokens


def read_meta(folder):
    """The dict in a dataset's meta.json, whose fields have the types of META; {} if there is no such file. Raises
    ValueError for another one."""
    path, mend = Path(folder) / 'meta.json', 'prepare the dataset again'
    if not path.exists():
        return {}
    meta = read_json(path, META, mend)
    if (version := meta.get('format_version') or 1) != 1:
        raise ValueError(f'{path}: found format_version {version}, expected 1: a newer version of this project made it')
    if meta.get('masked'):
        check_form(meta, MASKED, path)
    if isinstance(facts := meta.get('tokenizer'), dict) and 'name' in facts:
        check_form(facts, TOKENIZER, path, 'tokenizer')
        if 'eot_text' not in facts:  # otherwise the dataset has a tokenizer.json, and the name is but a name
            bare_name(facts['name'], f'{path}: tokenizer.name')
    return meta


def verify(folder):
    """Compare the files of a dataset with the sha256 in its meta.json. Returns how many files there are. Raises
    ValueError that names those that differ or are missing, and FileNotFoundError without a meta.json."""
    path, expected = Path(folder) / 'meta.json', {}
    if not path.exists():
        raise FileNotFoundError(f'{path} is missing: it has the sha256 to compare the files with')
    meta = read_meta(folder)
    hashes = {'sha256': str, 'mask_sha256': str} if meta.get('masked') else {'sha256': str}
    check_form(meta, {'splits': {str: {'shards': [hashes]}}, 'tokenizer': dict}, path)
    for split in meta['splits'].values():
        for shard in split['shards']:
            expected[shard['file']] = shard['sha256']
            if meta.get('masked'):
                expected[shard['mask_file']] = shard['mask_sha256']
    if 'sha256' in meta['tokenizer']:
        expected['tokenizer.json'] = meta['tokenizer']['sha256']
    damaged = []
    for name, sha256 in expected.items():
        file = path.with_name(name)
        if not file.exists():
            damaged.append(f'{name} is missing')
        elif sha256_of(file) != sha256:
            damaged.append(f'{name} has changed')
    if damaged:
        raise ValueError(
            f'{folder}: {len(damaged)} of {len(expected)} files: {", ".join(damaged[:10])} (sha256, meta.json); copy '
            'them again, or delete the folder and prepare it again'
        )
    return len(expected)


class ShardWriter:
    """
    Writes the shards of one split. See the module's docstring.

    totals      what meta.json says about the split: tokens, bytes, documents, max_token, shards (file, tokens, sha256);
                if masked also learned_tokens, longest (tokens of the longest conversation or pair), and for each shard
                mask_file, mask_sha256; and in_partial, the number of tokens that are in no shard yet
    """

    def __init__(self, folder, split, dtype, shard_tokens, totals=None, masked=False):
        self.folder, self.split = Path(folder), split
        self.dtype, self.shard_tokens, self.masked = np.dtype(dtype), shard_tokens, masked
        nothing = {'tokens': 0, 'bytes': 0, 'documents': 0, 'max_token': 0, 'shards': [], 'in_partial': 0}
        self.totals = totals or nothing | ({'learned_tokens': 0, 'longest': 0} if masked else {})
        self._open_partials()

    def add(self, tokens, documents, text_bytes, flags=None, longest=0):
        """Append tokens: an array of self.dtype, not empty. documents, text_bytes: what they add to the totals.
        If masked, the tokens are whole conversations; flags: uint8, one per token; longest: the tokens of the longest
        conversation among them."""
        assert tokens.dtype == self.dtype, f'{tokens.dtype} tokens for a {self.dtype} shard'
        assert (flags is not None) == self.masked and (flags is None or len(flags) == len(tokens))
        totals = self.totals
        totals['tokens'] += len(tokens)
        totals['documents'] += documents
        totals['bytes'] += text_bytes
        totals['max_token'] = max(totals['max_token'], int(tokens.max()))
        if self.masked:
            totals['learned_tokens'] += int((flags & LEARNED).sum())
            totals['longest'] = max(totals['longest'], longest)
        while len(tokens):
            n = min(len(tokens), self.shard_tokens - totals['in_partial'])
            self.files['.bin'].write(tokens[:n].data)
            if self.masked:
                self.files['.mask'].write(flags[:n].data)
                flags = flags[n:]
            totals['in_partial'] += n
            tokens = tokens[n:]
            if totals['in_partial'] == self.shard_tokens:
                self._finish_shard()
                self._open_partials()

    def sync(self):
        """Bring all that was added to disk. Afterwards the totals of this moment may be saved."""
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())

    def finish(self):
        """Make the tokens that are left the last shard."""
        if self.totals['in_partial']:
            self._finish_shard()
        del self.totals['in_partial']

    def _open_partials(self):
        self.path = self.folder / f'{self.split}_{len(self.totals["shards"]):06}.bin'
        self.files, saved = {}, self.totals['in_partial']
        ends = {'.mask': saved} if self.masked else {}
        ends['.bin'] = HEADER_BYTES + saved * self.dtype.itemsize
        for suffix, end in ends.items():  # the mask first, so that no shard ever lacks its mask
            path, partial = self.path.with_suffix(suffix), self.path.with_suffix(f'{suffix}.partial')
            if path.exists() and not partial.exists():  # this shard was finished after the totals were saved
                os.replace(path, partial)
            file = self.files[suffix] = open(partial, 'r+b' if partial.exists() else 'w+b', opener=no_link)
            size = file.seek(0, os.SEEK_END)
            if saved and size < end:
                raise OSError(f'{partial} has only {size:,} bytes: delete {self.folder} and start over')
            file.truncate(end)  # what comes after that was written after the totals were saved
            file.seek(end)

    def _finish_shard(self):
        n_tokens = self.totals['in_partial']
        self.files['.bin'].seek(0)
        self.files['.bin'].write(_header(self.dtype, n_tokens))
        self.sync()
        for suffix, file in self.files.items():
            file.close()
            rename_durably(file.name, self.path.with_suffix(suffix))
        facts = {'file': self.path.name, 'tokens': n_tokens, 'sha256': sha256_of(self.path)}
        if self.masked:
            mask = self.path.with_suffix('.mask')
            facts |= {'mask_file': mask.name, 'mask_sha256': sha256_of(mask)}
        self.totals['shards'].append(facts)
        self.totals['in_partial'] = 0
