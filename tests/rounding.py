"""
The rounding of other CPUs, on any CPU: of what products of matrices, attention and sums return, half of the numbers are
moved by one unit in the last place (one in 16 of those that have 16 bits). Which ones depends on the operation, on the
bits of its inputs, and on a seed, TEST_ROUNDING. So the same computation still gives the same bits, in a repeat, on
another rank and in another process. Two that this CPU happens to round alike no longer do: sums in another order, the
same row in another batch, a loss with a term whose gradient is zero and one without.

rounding.sh has every process that imports torch call start(). Left as they are:

- what is exact on every CPU: sums of at most two terms, and numbers such as 0, 1 or a count, whose last bits are zero;
- what process groups add up, and sums that torch.compile makes kernels of, for neither is dispatched (the products
  between such kernels are);
- other devices, such as `meta`. A DTensor comes here as its shards do.
"""

import ctypes
import functools
import os
import warnings
import zlib

import torch

# What has a kernel of its own on CPUs. What is composed of these, such as linear(), moves with them.
PRODUCTS = (
    'mm bmm addmm addmm_ baddbmm baddbmm_ addbmm addmv addmv_ dot vdot mm.out bmm.out addmm.out baddbmm.out addmv.out '
    '_grouped_mm _scaled_mm convolution convolution_backward _scaled_dot_product_flash_attention_for_cpu '
    '_scaled_dot_product_flash_attention_for_cpu_backward'
).split()
SUMS = 'sum.dim_IntList sum.IntList_out mean.dim mean.out nansum'.split()
SCATTERED = 'index_add index_add_ scatter_add scatter_add_ _index_put_impl_ embedding_dense_backward'.split()
OTHERS = (
    'linalg_vector_norm linalg_vector_norm.out norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype var.correction '
    'var_mean.correction std.correction std_mean.correction native_layer_norm native_layer_norm_backward '
    'native_group_norm native_group_norm_backward native_batch_norm native_batch_norm_backward _softmax _softmax.out '
    '_softmax_backward_data _log_softmax _log_softmax.out _log_softmax_backward_data logsumexp logcumsumexp '
    'nll_loss_forward nll_loss2d_forward cumsum cumsum_ cumsum.out cumprod'
).split()

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# One in so many numbers is moved, unless these last bits of it are all zero. Of those with 16 bits other CPUs move few,
# since they add up in 32. If half of them were moved, errors would be more than twice what rounding makes them.
ONE_IN = {2: (16, 15), 4: (2, 255), 8: (2, 255)}
LIBRARY = torch.library.Library('aten', 'IMPL')
GENERATOR = torch.Generator()


def hash_of(values, found):
    """crc32 of the tensors among arguments, bit for bit."""
    for value in values:
        if isinstance(value, (list, tuple)):
            found = hash_of(value, found)
        elif isinstance(value, torch.Tensor):
            found = zlib.crc32(f'{value.dtype} {value.shape}'.encode(), found)
            tensor = value.detach().contiguous()
            # Not by numpy(), after which FSDP could not free the storage.
            found = zlib.crc32(ctypes.string_at(tensor.data_ptr(), tensor.nbytes), found)
    return found


def is_not_zero(value):
    """Ones in place of numbers that are not zero, of which the kernel of a sum counts the terms."""
    is_term = isinstance(value, torch.Tensor) and value.is_floating_point()
    return (value != 0).to(value.dtype) if is_term else value


def few_terms(name, arguments, result):
    """Whether what is returned are products alone, or sums of two terms."""
    first = arguments[0]
    return first.shape[-1] == 1 if name in ('mm', 'bmm') else name in SUMS and first.numel() <= 2 * result.numel()


def moved(name, kernel, keys, *arguments, **options):
    """What the kernel of an operation returns, moved."""
    inputs = [value for key, value in options.items() if key != 'out']
    called = f'{os.environ["TEST_ROUNDING"]} {name.removesuffix("_").removesuffix(".out")}'
    seed = hash_of([*arguments, *inputs], zlib.crc32(called.encode()))
    stays = name in SCATTERED and kernel.call_boxed(keys, *map(is_not_zero, arguments), **options) <= 2
    result = kernel.call_boxed(keys, *arguments, **options)
    if few_terms(name, arguments, result):
        return result
    GENERATOR.manual_seed(seed)
    for tensor in result if isinstance(result, (list, tuple)) else [result]:
        if tensor is not None and tensor.is_floating_point():
            bits = tensor.detach().view(BITS[tensor.itemsize])
            one_in, last_bits = ONE_IN[tensor.itemsize]
            flips = torch.empty(bits.shape, dtype=bits.dtype, device='cpu').random_(one_in, generator=GENERATOR)
            flips.eq_(0).mul_(bits & last_bits != 0)
            bits ^= flips if stays is False else flips.masked_fill_(stays, 0)
    return result


@functools.cache
def start():
    warnings.filterwarnings('ignore', 'Warning only once for all operators')  # it is meant that these are overridden
    for name in (*PRODUCTS, *SUMS, *SCATTERED, *OTHERS):
        kernel = torch.library.get_kernel(f'aten::{name}', 'CPU')
        LIBRARY.impl(name, functools.partial(moved, name, kernel), 'CPU', with_keyset=True)
