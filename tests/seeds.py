"""
Other random numbers for every test, as tests/seeds.sh asks for them:

    TEST_SEED=3     every seed of torch gives other numbers, and the key `seed` of the train scripts has another default
    TEST_ULP=1      every number that torch.randn or torch.rand draws has its last bit flipped, and so moves by one unit
                    in the last place

launch.py imports this file, and so do the tests and the ranks that they fork. Scripts that a test starts by python or
torchrun know nothing of it.
"""

import os

import torch

from keys import Keys

SEED = int(os.environ.get('TEST_SEED', 0))
OFFSET = 1_000_003 * SEED  # far from the seeds that tests count up from 0


class Generator(torch.Generator):
    def manual_seed(self, seed):
        return super().manual_seed(seed + OFFSET)


def with_offset(manual_seed):
    return lambda seed: manual_seed(seed + OFFSET)


def with_last_bits_flipped(draw):
    def flipped(*size, **options):
        tensor = draw(*size, **options)
        tensor.detach().view(getattr(torch, f'int{8 * tensor.itemsize}')).bitwise_xor_(1)
        return tensor

    return flipped


if SEED:
    torch.Generator, torch.manual_seed, Keys.seed = Generator, with_offset(torch.manual_seed), Keys.seed + SEED
if os.environ.get('TEST_ULP'):
    torch.randn, torch.rand = map(with_last_bits_flipped, (torch.randn, torch.rand))
