"""
The loss on validation text, of every script.

    val_loss(model, run, beat)    # {'val_loss': 3.21, 'val_ppl': 24.8, 'val_bpb': 1.02}
"""

import torch
import torch.distributed as dist

import data
from system import processes


def of_each_batch(model, batches, beat):
    """Yields (sum of the cross-entropy, number of targets, number of the source) of each batch of
    data.eval_batches()."""
    for batch, source in batches:
        beat()
        _, ce_sum = model(*batch)
        yield ce_sum, (batch[1] >= 0).sum(), source


@torch.no_grad()
def val_loss(model, run, beat, part=None, losses=of_each_batch, metrics=()):
    """
    Metrics of the cross-entropy over the first eval_sequences windows of the validation text, which the ranks divide
    among them; the same on every rank. Collective.

    run: from begin(). beat: called before each forward pass. part(batch): this rank's part of a batch of whole
    sequences. losses: in place of of_each_batch(), for a model that is more than its forward, or another loss. metrics:
    names of what it measures beside the loss; then its first is a tensor of sums, of the loss and of each of these.
    """
    config, ranks = run.config, run.world_size // run.layout.stage  # every stage of a pipeline goes through all windows
    batches = data.eval_batches(
        run.val_data, config.eval_sequences, config.batch_size, run.rank % ranks, ranks, run.device,
        starts_on_host=part is not None,
    )  # fmt: skip
    if part:
        batches = ((part(batch), source) for batch, source in batches)
    sums = torch.zeros(len(run.val_data.sources), 2 + len(metrics), dtype=torch.float64, device=run.device)
    model.eval()
    for found, number, source in losses(model, batches, beat):
        sums[source] += torch.stack((*found.double().view(-1), number))
    dist.all_reduce(sums)  # ranks that read the same count it as often in both
    model.train()
    processes.reshard(model)  # free the gathered weights, as a backward pass would
    return run.val_data.losses(sums.tolist(), config.eval_sequences, metrics)
