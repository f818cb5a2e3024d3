"""
How likely a model finds answers: log-probabilities of targets, token by token or summed over documents. Losses on whole
answers are made of these, as DPO's (train_dpo.py). And how far its distribution over all tokens is from a teacher's
(train_distill.py).

    logps = token_logps(model, x, y, starts)             # (n): of each target y >= 0, in the order of y[y >= 0]
    sums, counts = document_logps(model, x, y, starts)   # (B, M) both: of the targets of each document
    loss_sum, entropies = divergence(model, teacher, x, y, starts, losses_of)   # from what a teacher finds likely

x, y, starts are a batch of data.batches(): rows of packed documents, y -1 where no target counts. Everything here is
fp32: in bfloat16, log-probabilities near -20 are 0.125 apart, as much as what an answer gains in a step.
"""

import torch

from attention import place_in_documents
from loss import LOGITS_BYTES, add_product, cross_entropy, softcapped


def token_logps(model, x, y, starts, temperature=1.0):
    """Log-probability of each target y >= 0, fp32 (n), in the order of y[y >= 0]; of a model that samples at this
    temperature. Only positions with a target get logits."""

    def then(hidden, logits_of):
        return ChunkedLogProbs.apply(hidden[y >= 0], logits_of.weight, y[y >= 0], logits_of, temperature)

    return model(x, starts=starts, then=then)


class ChunkedLogProbs(torch.autograd.Function):
    """Output head and log-probabilities together, a chunk of tokens at a time. So the logits of an answer never exist
    as a whole: for 2,048 tokens of a vocabulary of 128,000 they would be 1 GB.

    In loss.ChunkedCrossEntropy all tokens have the same gradient, up to a factor, so that forward can compute it. Here
    each token's depends on what the loss makes of the whole answer: backward has to compute the logits again.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, logits_of, temperature):
        """hidden (n, C), targets (n); weight: that of logits_of, a loss.LogitsOf. Returns fp32 (n)."""
        ctx.save_for_backward(hidden, logits_of.matrix, targets)
        # On a GPU the smaller chunks: backward has their log-probabilities and gradients in fp32 at the same time.
        most = LOGITS_BYTES['cpu' if hidden.is_cpu else 'cuda, no gradient']
        ctx.most = max(1, most // (4 * logits_of(hidden[:0]).shape[1]))
        ctx.cap, ctx.temperature = logits_of.cap, temperature
        found = []
        for rows, y in zip(hidden.split(ctx.most), targets.split(ctx.most), strict=True):
            found.append(log_probs_of(logits_of(rows), temperature).gather(1, y[:, None])[:, 0])
        return torch.cat(found)

    @staticmethod
    def backward(ctx, grad):
        hidden, matrix, targets = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden, grad_weight = torch.empty_like(hidden) if needs_hidden else None, None
        factors = (-grad / ctx.temperature)[:, None]  # (n, 1), from the cross-entropy at this temperature to the loss
        cap = ctx.cap / ctx.temperature if ctx.cap else None  # cap * tanh(z / cap) / t = cap/t * tanh((z/t) / (cap/t))
        for start in range(0, max(1, len(hidden)), ctx.most):  # DDP waits for a gradient, also where no token counts
            chunk = slice(start, start + ctx.most)
            logits = hidden[chunk] if matrix is None else hidden[chunk] @ matrix.T  # (n, V), before the cap
            logits = at_temperature(logits, ctx.temperature)
            grad_logits = cross_entropy(logits, targets[chunk], logits.shape[1], 0.0, with_gradient=True, cap=cap)[2]
            grad_logits = grad_logits.to(hidden.dtype)
            if needs_hidden:
                product = grad_logits if matrix is None else grad_logits @ matrix
                torch.mul(product, factors[chunk], out=grad_hidden[chunk])
            if needs_weight:
                rows = (hidden[chunk] * factors[chunk]).to(hidden.dtype)
                grad_weight = add_product(grad_weight, grad_logits.T, rows)
            del logits, grad_logits  # so that the next chunk gets their memory
        return grad_hidden, grad_weight, None, None, None


def at_temperature(logits, temperature):
    return logits if temperature == 1 else logits.float() / temperature


def log_probs_of(logits, temperature):
    return torch.log_softmax(at_temperature(logits, temperature), -1, dtype=torch.float32)


def document_logps(model, x, y, starts):
    """(the sum of the log-probabilities of each document's targets, their number): fp32 (B, M) both, with a column for
    each column of starts (B, M)."""
    logps = token_logps(model, x, y, starts)
    document = place_in_documents(starts, x.shape[1])[0]  # (B, T), within the row
    document = (document + torch.arange(len(x), device=x.device)[:, None] * starts.shape[1])[y >= 0]
    nothing = logps.new_zeros(starts.numel())
    sums, counts = (nothing.index_add(0, document, values) for values in (logps, torch.ones_like(logps)))
    return sums.view(starts.shape), counts.view(starts.shape)


def divergence(model, teacher, x, y, starts, losses_of, temperature=1.0):
    """
    (the sum of the losses of all targets y >= 0, the entropies of student and teacher there, fp32 (2, n), in nats).

    teacher: another model of the same tokens, which gets no gradient. Where one of the two has more logits, for rows
    that only pad its embedding, these are left out. losses_of: a function of what student and
    teacher say, the log-probabilities of all tokens, fp32 (n, V) both; its result is the loss of each of the n targets.
    temperature: of both distributions.
    """
    is_target = y >= 0
    with torch.no_grad():  # of the teacher's logits no more than a chunk exists, either
        taught = teacher(x, starts=starts, then=lambda hidden, logits_of: (hidden[is_target], logits_of))

    def then(hidden, logits_of):
        options = logits_of, taught, losses_of, temperature, torch.is_grad_enabled()
        return ChunkedDivergence.apply(hidden[is_target], logits_of.weight, *options)

    return model(x, starts=starts, then=then)


class ChunkedDivergence(torch.autograd.Function):
    """Both output heads and the loss between the two distributions together, a chunk of tokens at a time. As in
    loss.ChunkedCrossEntropy, all tokens have the same gradient, up to a factor, so forward computes it at once. That of
    a chunk's logits is left to autograd, so that losses_of may be any formula."""

    @staticmethod
    def forward(ctx, hidden, weight, logits_of, taught, losses_of, temperature, with_gradients):
        """hidden (n, C); weight: that of logits_of, a loss.LogitsOf. taught: (hidden states (n, C'), LogitsOf) of the
        teacher. with_gradients: the caller's torch.is_grad_enabled(), because in here that is always False."""
        needs_hidden, needs_weight = (with_gradients and needed for needed in ctx.needs_input_grad[:2])
        grad_hidden, grad_weight = torch.empty_like(hidden) if needs_hidden else None, None
        (taught_hidden, taught_logits_of), matrix = taught, logits_of.matrix
        V = min(logits_of(hidden[:0]).shape[1], taught_logits_of(taught_hidden[:0]).shape[1])
        # Each chunk has about ten tensors in fp32 at the same time: hence chunks of a quarter.
        most = LOGITS_BYTES['cpu' if hidden.is_cpu else 'cuda, no gradient'] // 4
        most = max(1, most // (4 * V))
        loss_sum, entropies = hidden.new_zeros((), dtype=torch.float32), []
        for start in range(0, max(1, len(hidden)), most):  # DDP waits for a gradient, also where no token counts
            chunk = slice(start, start + most)
            teacher = log_probs_of(taught_logits_of(taught_hidden[chunk])[:, :V], temperature)  # (n, V)
            logits = (hidden[chunk] if matrix is None else hidden[chunk] @ matrix.T).detach()  # before the cap
            with torch.set_grad_enabled(needs_hidden or needs_weight):
                logits.requires_grad_(torch.is_grad_enabled())
                student = log_probs_of(softcapped(logits[:, :V].float(), logits_of.cap), temperature)
                loss = losses_of(student, teacher).sum()
            loss_sum += loss.detach()
            entropies.append(torch.stack([-(of.exp() * of).sum(-1) for of in (student.detach(), teacher)]))
            if logits.requires_grad:
                (grad_logits,) = torch.autograd.grad(loss, logits)
                if needs_hidden:
                    grad_hidden[chunk] = grad_logits if matrix is None else grad_logits @ matrix
                if needs_weight:
                    grad_weight = add_product(grad_weight, grad_logits.T, hidden[chunk])
                del grad_logits
            del logits, student, teacher, loss  # so that the next chunk gets their memory
        ctx.save_for_backward(grad_hidden, grad_weight)
        entropies = torch.cat(entropies, 1)
        ctx.mark_non_differentiable(entropies)
        return loss_sum, entropies

    @staticmethod
    def backward(ctx, grad_loss_sum, _):
        # In place, as in loss.ChunkedCrossEntropy.
        gradients = [None if saved is None else saved.mul_(grad_loss_sum) for saved in ctx.saved_tensors]
        return *gradients, None, None, None, None, None
