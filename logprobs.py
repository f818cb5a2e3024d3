"""
How likely a model finds answers: log-probabilities of targets, token by token or summed over documents. Losses on whole
answers are made of these, as DPO's (train_dpo.py).

    logps = token_logps(model, x, y, starts)             # (n): of each target y >= 0, in the order of y[y >= 0]
    sums, counts = document_logps(model, x, y, starts)   # (B, M) both: of the targets of each document

x, y, starts are a batch of data.batches(): rows of packed documents, y -1 where no target counts. Everything here is
fp32: in bfloat16, log-probabilities near -20 are 0.125 apart, as much as what an answer gains in a step.
"""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from model import LOGITS_BYTES, place_in_documents


def token_logps(model, x, y, starts, temperature=1.0):
    """Log-probability of each target y >= 0, fp32 (n), in the order of y[y >= 0]; of a model that samples at this
    temperature.

    Only positions with a target get logits, a chunk of them at a time, and backward computes those again. So the logits
    of an answer never exist as a whole: for 2,048 tokens of a vocabulary of 128,000 they would be 1 GB.
    """

    def of_chunk(rows, targets, logits_of):
        return -F.cross_entropy(logits_of(rows).float() / temperature, targets, reduction='none')

    def then(hidden, logits_of):
        vocab_size = logits_of(hidden[:0]).shape[-1]
        rows, targets = hidden[y >= 0], y[y >= 0]
        # A quarter of the usual chunk: in backward there are also its softmax and its gradient, all in fp32.
        most = max(1, LOGITS_BYTES['cpu' if hidden.is_cpu else 'cuda'] // (16 * vocab_size))
        chunks = zip(rows.split(most), targets.split(most), strict=True)
        options = {'use_reentrant': False, 'preserve_rng_state': False}
        return torch.cat([checkpoint(of_chunk, *chunk, logits_of, **options) for chunk in chunks])

    return model(x, starts=starts, then=then)


def document_logps(model, x, y, starts):
    """(the sum of the log-probabilities of each document's targets, their number): fp32 (B, M) both, with a column for
    each column of starts (B, M)."""
    logps = token_logps(model, x, y, starts)
    document = place_in_documents(starts, x.shape[1])[0]  # (B, T), within the row
    document = (document + torch.arange(len(x), device=x.device)[:, None] * starts.shape[1])[y >= 0]
    nothing = logps.new_zeros(starts.numel())
    sums, counts = (nothing.index_add(0, document, values) for values in (logps, torch.ones_like(logps)))
    return sums.view(starts.shape), counts.view(starts.shape)
