"""
Attention for rows that are not one plain causal sequence: several documents in each row, layers with a window, texts
that are generated token by token.

The argument `attention` of the models says where each token stands in its document, and computes attention within
documents. It has

    positions                           int64 (B, T), or (1, T) if they are the same in all rows
    cos_sin                             (2, B, T, 1, D/2), the rotation of each token; GPT.places() fills it in
    attend(q, k, v, dropout=, scale=, window=) q (B, H, T, D), k and v (B, K, T, D) -> (B, H, T, D); with a window a
                                        token sees itself and the window - 1 tokens before it (MaskedAttention
                                        takes no scale)

MaskedAttention and PackedAttention are here; context_manual.py has one for sequences spread over ranks. They are
classes because blocks take them as inputs, and in a tuple fully_shard would cast cos_sin to the compute dtype.
Letters for shapes are those of model.py.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

# For varlen_attn(), which from torch 2.12 on has to be told that there are fewer key heads than query heads.
GROUPED_QUERIES = {'enable_gqa': True} if torch.__version__ >= '2.12' else {}


@dataclass
class MaskedAttention:
    """Attention defined by a mask that says which token sees which."""

    positions: torch.Tensor
    mask: torch.Tensor | None  # (B, 1, T, T) bool; with a cache (B, 1, T, its tokens + T); None: all before
    cos_sin: torch.Tensor | None = None
    near: torch.Tensor | None = None  # the mask of layers with a window; made once for all by with_window()

    def attend(self, q, k, v, dropout=0.0, window=None):
        mask = self.mask if window is None else self.near
        options = {'attn_mask': mask, 'is_causal': mask is None, 'dropout_p': dropout}
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] < q.shape[1], **options)

    def with_window(self, window):
        """The same, for a model that has layers with this window."""
        T, seen = (self.positions.shape[1],) * 2 if self.mask is None else self.mask.shape[2:]
        columns = torch.arange(seen, device=self.positions.device)[None]
        # Distances are those of positions: rows may have branches. (With a cache there are none, so columns will do.)
        keys, queries = (self.positions,) * 2 if T == seen else (columns, columns[:, -T:])
        near = (queries[:, None, :, None] - keys[:, None, None, :]) < window  # (B or 1, 1, T, seen)
        return replace(self, near=near.tril() if self.mask is None else near & self.mask)


@dataclass
class PackedAttention:
    """Several documents in each row, for a kernel that needs no mask; see has_flash_attention()."""

    positions: torch.Tensor
    borders: torch.Tensor  # int32 (B*M + 1): where documents begin and end in all B*T tokens
    cos_sin: torch.Tensor | None = None

    def attend(self, q, k, v, dropout=0.0, scale=None, window=None):
        from torch.nn.attention.varlen import varlen_attn  # imports the compiler: 1.7 s, which other runs are spared

        assert not dropout, f'dropout={dropout} in a kernel that has none'
        B, _, T, _ = q.shape
        q, k, v = (heads.transpose(1, 2).flatten(0, 1) for heads in (q, k, v))  # (B*T, heads, D) each
        options = GROUPED_QUERIES | {'scale': scale, 'window_size': (-1 if window is None else window - 1, 0)}
        y = varlen_attn(q, k, v, self.borders, self.borders, T, T, **options)
        return y.unflatten(0, (B, T)).transpose(1, 2)


def attention_of_documents(starts, T, dtype, dropout, head_dim):
    """For rows that hold several documents each, and for heads of this size, in this dtype, with this dropout.

    starts: int64 (B, M), where the documents of a row begin, at most M. The first begins at 0; unused places hold T.
    """
    document, positions = place_in_documents(starts, T)
    if dropout or not has_flash_attention(starts.device, dtype, head_dim):
        return MaskedAttention(positions, (document[:, None, :, None] == document[:, None, None, :]).tril())
    return PackedAttention(positions, borders_of_documents(starts, T))


def attention_of_rows(x, T, dtype, dropout, head_dim):
    """As attention_of_documents() for rows of x that are one document each: where some layers have a window."""
    if dropout or not has_flash_attention(x.device, dtype, head_dim):
        return MaskedAttention(torch.arange(T, device=x.device)[None], mask=None)
    return attention_of_documents(x.new_zeros(x.shape[0], 1, dtype=torch.int64), T, dtype, dropout, head_dim)


def has_flash_attention(device, dtype, head_dim):
    """Whether FlashAttention 2 runs there: on NVIDIA's cards since Ampere, in half precision, for heads of up to 256
    dimensions, a multiple of 8. (scaled_dot_product_attention() chooses another kernel by itself where it does not.)"""
    if device.type in ('cpu', 'mps') or dtype.itemsize > 2 or head_dim % 8 or head_dim > 256:
        return False
    return device.type != 'cuda' or torch.cuda.get_device_capability(device) >= (8, 0)


def place_in_documents(starts, T):
    """For each token the number of its document in the row, and its position in that document: int64 (B, T) both."""
    count = torch.arange(T, device=starts.device).repeat(starts.shape[0], 1)
    document = torch.searchsorted(starts, count, right=True) - 1
    return document, count - starts.gather(1, document)


def borders_of_documents(starts, T):
    """PackedAttention.borders. Unused places count as empty documents, so that every batch has equally many and nothing
    is compiled again for another number."""
    B = starts.shape[0]
    rows = torch.arange(B, device=starts.device)[:, None] * T
    return F.pad((starts + rows).flatten().int(), (0, 1), value=B * T)


class KVCache:
    """Keys and values of the tokens that one block has seen, with room for `capacity` tokens."""

    def __init__(self, capacity):
        self.capacity, self.length = capacity, 0

    def append(self, k, v):
        """Add k and v (B, K, T, D); returns all keys and all values so far, (B, K, length, D) each."""
        if self.length == 0:
            B, K, _, D = k.shape
            self.keys, self.values = k.new_empty(2, B, K, self.capacity, D).unbind()
        start, self.length = self.length, self.length + k.shape[2]
        self.keys[:, :, start : self.length] = k
        self.values[:, :, start : self.length] = v
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def keep(self, rows):
        """Keep these rows of the batch, a tensor of their numbers, and forget the others."""
        self.keys, self.values = self.keys[rows], self.values[rows]
