"""Forked ranks: what they return, and what is said of one that ends."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from launch import in_own_process
from torch._subclasses import FakeTensorMode

from proving.ranks import RankFailed, run_ranks


def product(rank):
    return float((torch.ones(700, 700) @ torch.ones(700, 700)).sum()) + rank


@in_own_process
def test_ranks_compute_after_a_parent_that_has_computed_with_threads():
    torch.set_num_threads(2)
    alone = product(0)
    assert run_ranks(2, product, timeout_s=120) == [alone, alone + 1]


def on_rank_1(what):
    def function(rank):
        dist.init_process_group('gloo')
        if rank == 1:
            what()
        dist.barrier()

    return function


def refuse():
    raise ValueError('no such key')


@in_own_process
def test_the_error_of_the_rank_that_failed_first_is_raised():
    with pytest.raises(RankFailed, match='no such key'):
        run_ranks(2, on_rank_1(refuse), timeout_s=120)
    with pytest.raises(RankFailed, match=r'rank 1 was killed by SIGKILL \(out of memory\?\)$'):
        run_ranks(2, on_rank_1(lambda: os.kill(os.getpid(), signal.SIGKILL)), timeout_s=120)
    with pytest.raises(RankFailed, match='rank 0 took longer than 1 s'):
        run_ranks(2, lambda rank: time.sleep(120), timeout_s=1)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason='needs a build of torch with CUDA')
@in_own_process
def test_a_process_that_has_computed_gradients_is_told_to_call_earlier():
    with FakeTensorMode():  # makes autograd see a GPU where there is none
        pass
    torch.ones(1, requires_grad=True).backward()
    with pytest.raises(RankFailed, match='before this process computes a gradient'):
        run_ranks(1, lambda rank: torch.ones(1, requires_grad=True).backward(), timeout_s=120)
