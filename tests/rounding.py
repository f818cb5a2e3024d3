"""
The rounding of other CPUs, on any CPU: of what products of matrices, attention and sums return, one number in 8 is
moved by one unit in the last place (one in 16 of those that have 16 bits). Which ones follows from the operation, the
shapes of its inputs, each number and the terms that it is the sum of, and from a seed, TEST_ROUNDING. So the same
computation still gives the same bits, in a repeat, on another rank and in another process, and a row does not depend on
what other rows hold. Two that this CPU happens to round alike no longer do: sums in another order, the same row in a
batch of another size, a loss with a term whose gradient is zero and one without.

rounding.sh has every process that imports torch call start(). Left as they are:

- what is exact on every CPU: one product, a sum of two terms, and numbers such as 0, 1 or a count, whose last bits are
  zero;
- what process groups add up, and sums that torch.compile makes kernels of, for neither is dispatched (the products
  between such kernels are);
- other devices, such as `meta`. A DTensor comes here as its shards do.
"""

import functools
import os
import warnings
import zlib

import torch

# What has a kernel of its own on CPUs. What is composed of these, such as linear(), moves with them. Of the first three
# the terms are found: the kernel itself says where each goes. Of the others the result alone counts.
PRODUCTS = (
    'mm bmm addmm addmm_ baddbmm baddbmm_ addbmm addmv addmv_ dot vdot mm.out bmm.out addmm.out baddbmm.out'.split()
)
SUMS = 'sum.dim_IntList sum.IntList_out mean.dim mean.out nansum'.split()
SCATTERED = 'index_add index_add_ scatter_add scatter_add_ _index_put_impl_ embedding_dense_backward'.split()
OTHERS = (
    '_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward _grouped_mm '
    '_scaled_mm convolution convolution_backward linalg_vector_norm linalg_vector_norm.out norm.ScalarOpt_dim '
    'norm.ScalarOpt_dim_dtype var.correction var_mean.correction std.correction std_mean.correction native_layer_norm '
    'native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm '
    'native_batch_norm_backward _softmax _softmax.out _softmax_backward_data _log_softmax _log_softmax.out '
    '_log_softmax_backward_data logsumexp logcumsumexp nll_loss_forward nll_loss2d_forward cumsum cumsum_ cumsum.out '
    'cumprod'
).split()
FUNCTIONAL = {'sum.IntList_out': 'sum.dim_IntList', 'mean.out': 'mean.dim'}

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# One in so many numbers is moved, unless these last bits of it are all zero. One in 8 by a unit is a rms of 0.35, about
# as much as rounding to the nearest number itself (0.29). If half of them were moved, what a test measures in multiples
# of one process's rounding would be this noise. Of those with 16 bits other CPUs move few, since they add up in 32.
ONE_IN = {2: (16, 15), 4: (8, 255), 8: (8, 255)}
LIBRARY = torch.library.Library('aten', 'IMPL')


def hash_of(tensor, seed):
    """For each number of a tensor one of 44 random bits, which follow from its mantissa, its place and the seed: twice
    the number and its negative are rounded as it is."""
    place = torch.arange(tensor.numel(), device='cpu').view(tensor.shape)
    mantissa = tensor.detach().view(BITS[tensor.itemsize]).long() & (int(1 / torch.finfo(tensor.dtype).eps) - 1)
    found = mantissa.mul_(place.add_(seed).mul_(2).add_(1)).add_(place).mul_(-0x61C8864680B583EB)
    found.bitwise_xor_(found >> 32).mul_(-0x40A7B892E31B1A47)
    return found.bitwise_right_shift_(20)


def is_term(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def not_zero(value):
    """Ones in place of numbers that are not zero: of these a kernel counts the terms of each sum."""
    return (value != 0).to(value.dtype) if is_term(value) else value


def hashed(value):
    """A hash in place of each number that is not zero, so small that sums of products are exact in float64."""
    return (hash_of(value, 0).bitwise_and_(0xFFFF).add_(1) * (value != 0)).double() if is_term(value) else value


def few_terms(name, first, result):
    """Whether what is returned are products alone, or sums of two terms."""
    return first.shape[-1] == 1 if name in ('mm', 'bmm') else name in SUMS and first.numel() <= 2 * result.numel()


def moved(name, kernel, functional, keys, *arguments, **options):
    """What the kernel of an operation returns, moved. functional: the kernel without `out`."""
    inputs = [*arguments, *(value for key, value in options.items() if key != 'out')]
    shapes = [(value.shape, value.dtype) for value in inputs if isinstance(value, torch.Tensor)]
    called = f'{os.environ["TEST_ROUNDING"]} {name.removesuffix("_").partition(".")[0]} {shapes}'
    seed, stays = zlib.crc32(called.encode()), False
    if name not in OTHERS and is_term(arguments[0]):
        # With beta=0 what is added to is no term: it may be memory that nobody has written yet.
        scale = {'beta': int(options['beta'] != 0)} if 'beta' in options else {}
        seed = functional.call_boxed(keys, *map(hashed, arguments), **scale).long() * 0x9E3779B1 + seed
    if name in SCATTERED:
        stays = functional.call_boxed(keys, *map(not_zero, arguments)) <= 2
    result = kernel.call_boxed(keys, *arguments, **options)
    if few_terms(name, arguments[0], result):
        return result
    for number in result if isinstance(result, (list, tuple)) else [result]:
        if is_term(number):
            one_in, last_bits = ONE_IN[number.itemsize]
            bits = number.detach().view(BITS[number.itemsize])
            flips = (hash_of(number, seed) % one_in == 0) & (bits & last_bits != 0)
            bits ^= flips if stays is False else flips & ~stays
    return result


@functools.cache
def start():
    warnings.filterwarnings('ignore', 'Warning only once for all operators')  # it is meant that these are overridden
    names = [*PRODUCTS, *SUMS, *SCATTERED, *OTHERS]
    kernels = {name: torch.library.get_kernel(f'aten::{name}', 'CPU') for name in names}
    for name, kernel in kernels.items():
        functional = kernels[FUNCTIONAL.get(name, name.removesuffix('.out'))] if name not in OTHERS else None
        LIBRARY.impl(name, functools.partial(moved, name, kernel, functional), 'CPU', with_keyset=True)
