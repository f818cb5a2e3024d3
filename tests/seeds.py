"""
Other random numbers for every test, as tests/seeds.sh asks for them: with TEST_SEED=3 every seed of torch gives other
numbers, and the key `seed` of the train scripts has another default.

launch.py imports this file, and so do the tests and the ranks that they fork. Scripts that a test starts by python or
torchrun know nothing of it.
"""

import os

import torch

from keys import Keys

SEED = int(os.environ['TEST_SEED'])
OFFSET = 1_000_003 * SEED  # far from the seeds that tests count up from 0


class Generator(torch.Generator):
    def manual_seed(self, seed):
        return super().manual_seed(seed + OFFSET)


def with_offset(manual_seed):
    return lambda seed: manual_seed(seed + OFFSET)


torch.Generator, torch.manual_seed, Keys.seed = Generator, with_offset(torch.manual_seed), Keys.seed + SEED
