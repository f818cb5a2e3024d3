"""
What train_ddp.py and train_fsdp.py each write out, for scripts that choose between them by the key `strategy`.

    model = strategy.parallelize(raw_model, run)         # with the weights that the run begins with
    opt = strategy.optimizer(raw_model, run)
    strategy.sync_gradients(model, run, last_micro_step) # before a forward pass: will its backward average gradients?
    with strategy.whole_weights(model, run) as model:    # forward passes without gradients, as many as a rank likes
"""

import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fsdp
import optim
from huggingface.finetune import weights_in_compute_dtype
from runtime.first_weights import initialize


def parallelize(raw_model, run):
    """Shard a model on the meta device, or copy it to all ranks, with the run's first weights. Returns what to call."""
    config = run.config
    if config.strategy == 'fsdp':  # by fully_shard, or by fsdp_manual.py
        model = fsdp.shard(raw_model, run.layout.mesh(run.device, config.timeout_s), run)
        initialize(raw_model, run)  # fp32 master weights; each rank keeps its slice
        return model
    initialize(raw_model, run)  # the same on every rank
    if run.world_size == 1:
        return raw_model
    if config.compile:  # as in train_ddp.py, which also says why buffers are not broadcast
        torch._dynamo.config.optimize_ddp = False
    devices = [run.device] if run.on_cuda else None
    model = DistributedDataParallel(raw_model, device_ids=devices, gradient_as_bucket_view=True)
    model.broadcast_buffers = False
    return model


def optimizer(raw_model, run):
    if run.config.strategy == 'fsdp':
        return fsdp.optimizer(raw_model, run)  # its moments in host memory, where cpu_offload says so
    return optim.from_config(raw_model, run.config, run.device, copies=dist.group.WORLD)  # all have the same gradients


def sync_gradients(model, run, last_micro_step):
    """Gradients add up locally; only the last micro-step's backward averages them over the ranks, unless accumulate is
    'sharded'. The root stays gathered until then."""
    if run.config.strategy == 'fsdp':
        model.set_requires_gradient_sync(run.config.accumulate == 'sharded' or last_micro_step)
        model.set_reshard_after_backward(last_micro_step, recurse=False)
    else:
        model.require_backward_grad_sync = last_micro_step


@contextlib.contextmanager
def whole_weights(model, run):
    """A context in which each rank has all weights in the compute dtype, so that ranks can make different numbers of
    forward passes without gradients. Its value is the model to call. Collective where it begins."""
    if run.config.strategy == 'fsdp':
        with fsdp.gathered(model, run):
            yield model
    else:
        raw_model = model.module if isinstance(model, DistributedDataParallel) else model
        with weights_in_compute_dtype(raw_model):
            yield raw_model
