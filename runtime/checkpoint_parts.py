"""
How a rank's part of a tensor that is cut over ranks (layout.Share) is written by torch.distributed.checkpoint (DCP),
and where it is read from.

Tensor parallelism gives a rank several ranges of rows of a fused matrix, which no DTensor can express. With the planner
below, DCP writes each range at its place in the whole tensor, and parts_of() says where a rank's ranges are when they
are read, so that the checkpoint does not depend on the layout.
"""

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


class CutTensor:
    """This rank's part of a tensor that is cut over ranks, with the methods that DCP calls on a tensor."""

    def __init__(self, tensor, part):
        """tensor: this rank's part, which may be sharded by rows (DTensor). part: the layout.Slice."""
        self.shape, self.dtype, self.local = part.shape, tensor.dtype, local_piece(tensor)
        self.rows = {}  # where a range begins in the whole tensor -> its rows in `local`
        rows, begin = self.local.shape[0], 0  # and where `local` begins in the part
        if isinstance(tensor, DTensor):
            begin = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1][0]
        ranges = part.ranges if part.dim == 0 else [(0, part.shape[0])]
        before = [part.ranges[0][0]] if part.dim == 1 else [0] * (len(part.shape) - 1)  # offsets in other dimensions
        for first, length in ranges:
            some = slice(max(0, -begin), max(0, min(rows, length - begin)))
            if some.start < some.stop and self.local.numel():
                self.rows[torch.Size((first + begin + some.start, *before))] = some
            begin -= length

    def __create_write_items__(self, key, _):
        properties = TensorProperties.create_from_tensor(self.local)
        chunks = [ChunkStorageMetadata(begin, self.local[rows].shape) for begin, rows in self.rows.items()]
        data = [TensorWriteData(chunk, properties, self.shape) for chunk in chunks]
        return [WriteItem(MetadataIndex(key, x.chunk.offsets), WriteItemType.SHARD, tensor_data=x) for x in data]


def in_whole(share, name, tensor):
    """A parameter of this name, or one of its moments; if it is cut over ranks, as the part of the whole that it is."""
    return CutTensor(tensor, share.slices[name]) if name in share.slices and tensor.dim() else tensor


class MadeLater:
    """A tensor that is made only when it is copied or written, one at a time, as there is no room for all of them."""

    def __init__(self, like, make):
        """like: a tensor, DTensor or CutTensor of the same shape, dtype and layout. make(): returns this rank's
        part."""
        self.like, self.make = like, make

    def __create_write_items__(self, key, _):
        return _create_write_items(key, self.like)


class SavePlanner(dcp.DefaultSavePlanner):
    """Plans with the shapes and placements of the live tensors, but writes their `copies` in host memory, if given."""

    def __init__(self, copies=None):
        super().__init__()
        self.copies = copies

    def lookup_object(self, index):
        tensor = self.state_dict[index.fqn]
        piece = value_of_piece(tensor) if self.copies is None else self.copies[index.fqn]
        like = layout_of(tensor)
        piece = piece[like.rows[index.offset]] if isinstance(like, CutTensor) else piece
        return piece.contiguous()  # as it is read


def layout_of(tensor):
    return tensor.like if isinstance(tensor, MadeLater) else tensor


def local_piece(tensor):
    """This rank's part of a tensor; for a MadeLater, a tensor of the same shape and dtype."""
    tensor = layout_of(tensor)
    if isinstance(tensor, CutTensor):
        return tensor.local
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def value_of_piece(tensor):
    """The value of this rank's part; a MadeLater is made now."""
    return tensor.make() if isinstance(tensor, MadeLater) else local_piece(tensor)


def parts_of(tensor):
    """[(where it begins in the whole tensor, its numbers)] of what this rank has of a tensor, DTensor or CutTensor."""
    if isinstance(tensor, CutTensor):
        return [(begin, tensor.local[rows]) for begin, rows in tensor.rows.items()]
    if isinstance(tensor, DTensor):
        begin = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1]
        return [(begin, tensor.to_local())]
    return [((0,) * tensor.dim(), tensor)]
