"""
Where each tensor of a checkpoint lies in its files: index.json, which is written beside torch's own index and read in
its place.

    "model.embed.weight": {"dtype": "float32", "shape": [2048, 192], "pieces": [
        {"begin": [0, 0], "shape": [1024, 192], "file": "__0_0.distcp", "offset": 704}, ...]}

From byte `offset` of `file` on, the numbers of a piece follow each other in row-major order, little-endian. So a rank
reads the rows that it keeps, and nothing else, straight into their place, whatever layout wrote them.

Somebody else may have written the checkpoint. index.json is data, and each field of it is checked before it decides
what is read: files are those that the manifest lists, in the checkpoint's own folder, and pieces lie within them.
Checkpoints from before index.json have torch's index alone, which dcp_files.py reads without unpickling it.
"""

import json
import math
import os
from contextlib import ExitStack
from typing import NamedTuple

import torch

from runtime import dcp_files
from runtime.checkpoint_parts import parts_of
from system.files import bare_name, check_form, read_json

DTYPES = 'bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64'
DTYPES = {name: getattr(torch, name) for name in DTYPES.split()}
MOST_DIMENSIONS = 8  # of a tensor: more only make the arithmetic long
# What the two files may say: see check_form().
MANIFEST = {'format_version': int, 'files': {bare_name: {'size': int, 'sha256': str}}}
PIECE = {'begin': [int], 'shape': [int], 'file': bare_name, 'offset': int}
INDEX = {str: {'dtype': str, 'shape': [int], 'pieces': [PIECE]}}


class Piece(NamedTuple):
    """A box of a tensor, and where its numbers are."""

    begin: tuple[int, ...]  # the box's first element in the whole tensor
    shape: tuple[int, ...]
    file: str
    offset: int  # of the first number, in bytes


class Entry(NamedTuple):
    """One tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[Piece]

    def bytes_of(self, piece):
        return math.prod(piece.shape) * self.dtype.itemsize

    def empty(self):
        """A tensor of this shape and dtype on the CPU, to be filled."""
        return torch.empty(self.shape, dtype=self.dtype)


# --- read and written -------------------------------------------------------------------------------------------------


def read_manifest(path):
    """{name: {'size', 'sha256'}} of a checkpoint's files. Raises ValueError that names the field, or OSError."""
    manifest = read_json(f'{path}/manifest.json', MANIFEST, 'copy the checkpoint again')
    if manifest['format_version'] != 1:
        found = f'found format_version {manifest["format_version"]}, expected 1'
        raise ValueError(f'{path}/manifest.json: {found}: a newer version of this project has written it')
    return manifest['files']


def read_index(path):
    """{key: Entry} of everything in a checkpoint. Raises ValueError for an index that does not fit its files."""
    sizes = {name: facts['size'] for name, facts in read_manifest(path).items()}
    where = f'{path}/index.json'
    if 'index.json' in sizes:
        tensors = read_json(where, INDEX, 'copy the checkpoint again')
    else:
        where = f'{path}/.metadata'
        tensors = dcp_files.tensors_in(where)
        check_form(tensors, INDEX, where)
    index, used = {}, dict.fromkeys(sizes, 0)  # bytes of each file
    for key, tensor in tensors.items():
        entry = index[key] = checked_entry(f'{where}: {key[:100]}', tensor, sizes)
        for piece in entry.pieces:
            used[piece.file] += entry.bytes_of(piece)
    for name, size in used.items():
        check(size <= sizes[name], where, f'{size} bytes of tensors in {name}', f'at most its {sizes[name]}')
    if where.endswith('.metadata'):
        with ExitStack() as files:
            opened = {name: files.enter_context(open(f'{path}/{name}', 'rb')) for name, size in used.items() if size}
            for key, entry in index.items():
                lengths = [facts['length'] for facts in tensors[key]['pieces']]
                entry.pieces[:] = [
                    piece._replace(offset=dcp_files.position_of(opened.get(piece.file), piece, length, entry.dtype))
                    for piece, length in zip(entry.pieces, lengths, strict=True)
                ]
    return index


def checked_entry(where, tensor, sizes):
    """The Entry of a tensor, from an object of the form INDEX. sizes: {name: bytes} of the files that it may be in."""
    check(tensor['dtype'] in DTYPES, where, f'dtype {tensor["dtype"][:40]!r}', f'one of {", ".join(DTYPES)}')
    entry, n_numbers = Entry(DTYPES[tensor['dtype']], tuple(tensor['shape']), []), 0
    check(len(entry.shape) <= MOST_DIMENSIONS, where, f'{len(entry.shape)} dimensions', f'at most {MOST_DIMENSIONS}')
    for facts in tensor['pieces']:
        piece = Piece(tuple(facts['begin']), tuple(facts['shape']), facts['file'], facts['offset'])
        fits = len(piece.begin) == len(piece.shape) == len(entry.shape) and all(
            first + n <= whole for first, n, whole in zip(piece.begin, piece.shape, entry.shape, strict=True)
        )
        check(fits, where, f'a piece {str(piece)[:200]}', f'a box in {entry.shape}')
        check(piece.file in sizes, where, f'the file {piece.file}', 'one that manifest.json lists')
        end = piece.offset + entry.bytes_of(piece)
        check(
            end <= sizes[piece.file], where, f'a piece that ends at byte {end} of {piece.file}', f'{sizes[piece.file]}'
        )
        entry.pieces.append(piece)
        n_numbers += math.prod(piece.shape)
    check(n_numbers == math.prod(entry.shape), where, f'pieces of {n_numbers} numbers', f'all of {entry.shape}')
    return entry


def check(holds, where, found, expected):
    if not holds:
        raise ValueError(f'{where}: found {found}, expected {expected}')


def as_json(index):
    """The text of index.json, a line for each tensor."""

    def entry(tensor):
        pieces = [piece._asdict() for piece in tensor.pieces]
        return {'dtype': str(tensor.dtype).removeprefix('torch.'), 'shape': tensor.shape, 'pieces': pieces}

    lines = [f'{json.dumps(key)}: {json.dumps(entry(index[key]))}' for key in sorted(index)]
    return '{\n' + ',\n'.join(lines) + '\n}\n'


# --- tensors ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def read_into(path, index, targets):
    """
    Fill tensors, {key: tensor, DTensor or CutTensor}, with what a checkpoint has under their keys. No collective: each
    process reads the rows of its own parts.

    index: from read_index(path). Raises OSError if a file cannot be read.
    """
    with ExitStack() as files:
        opened = {}
        for key, target in targets.items():
            for begin, part in parts_of(target):
                for piece in index[key].pieces:
                    if piece.file not in opened:
                        opened[piece.file] = files.enter_context(
                            open(os.path.join(path, piece.file), 'rb', buffering=0)
                        )
                    read_overlap(opened[piece.file], piece, begin, part)


def read_overlap(file, piece, begin, part):
    """Copy what a piece in a file has of a part of a tensor into the part. begin: the part's place in the whole."""
    first = [max(a, b) for a, b in zip(begin, piece.begin, strict=True)]
    end = [min(a + n, b + m) for a, n, b, m in zip(begin, part.shape, piece.begin, piece.shape, strict=True)]
    if any(a >= b for a, b in zip(first, end, strict=True)):
        return
    into = part[tuple(slice(a - b, c - b) for a, b, c in zip(first, begin, end, strict=True))]
    inside = [slice(a - b, c - b) for a, b, c in zip(first, piece.begin, end, strict=True)]
    rows, row = inside[0] if inside else slice(0, 1), piece.shape[1:]  # whole rows of the piece, which lie together
    file.seek(piece.offset + rows.start * math.prod(row) * part.itemsize)
    if into.shape[1:] == row and into.is_contiguous() and into.device.type == 'cpu':
        fill_from(file, into)
    else:
        some = torch.empty((rows.stop - rows.start, *row), dtype=part.dtype)
        fill_from(file, some)
        into.copy_(some[(slice(None), *inside[1:])])


def fill_from(file, tensor):
    """Read the numbers of a contiguous tensor. Raises OSError if the file ends before that."""
    rest = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
    while rest:
        size = file.readinto(rest)  # Linux reads at most 2 GiB at once
        if not size:
            raise OSError(f'{file.name} ends {len(rest)} bytes too early')
        rest = rest[size:]
