"""
The loss: from hidden states to sums over tokens, a chunk of them at a time, so that the logits never exist as a whole.

    loss_sum, ce_sum = ChunkedCrossEntropy.apply(hidden, weight, targets, vocab_size, z_loss, True, cross_entropy)

The last argument is the loss kernel, which turns the logits of a chunk into its sums and their gradient. A model has it
in `loss_kernel`: cross_entropy(), unless runtime/begin.py compiles pointwise_cross_entropy() for a GPU. With tensor
parallelism tensor_manual.SplitHead takes one that asks the other ranks instead.
"""

import math

import torch

# A chunk of the loss has at most this many bytes of fp32 logits. On a GPU 2**31 / (4 * 50304) = 10672 tokens, as each
# chunk reads and writes the whole gradient of the head; where it has none, as beside LoRA, smaller ones are as fast.
LOGITS_BYTES = {'cpu': 2**26, 'cuda': 2**31, 'cuda, no gradient': 2**29}


def softcapped(logits, cap):
    """Logits from -cap to cap, those near 0 nearly as they were (Gemma 2, arXiv 2408.00118); None: as they are."""
    return cap * torch.tanh(logits / cap) if cap else logits


class ChunkedCrossEntropy(torch.autograd.Function):
    """Output head and cross-entropy together, a chunk of tokens at a time, so that the full logits never exist.

    The gradient of the loss with respect to the logits needs nothing but the logits. So forward turns the logits of
    each chunk into gradients of hidden and weight at once, and drops them; backward only multiplies by what comes in.
    (The idea of Liger Kernel's fused linear cross entropy, arXiv 2410.10989.)
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, vocab_size, z_loss, with_gradients, loss_kernel):
        """hidden (N, C), weight (V, C), targets (N), -1 = ignored; columns of logits from vocab_size on are padding.

        Returns two fp32 scalars, sums over the tokens that are not ignored: ce + z_loss * logsumexp(logits)^2, and ce.
        with_gradients: the caller's torch.is_grad_enabled(), because in here that is always False. loss_kernel: see
        the top.
        """
        needs_hidden, needs_weight = needs = [with_gradients and needed for needed in ctx.needs_input_grad[:2]]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = None
        loss_sum = ce_sum = 0.0
        matrix = weight.to(hidden.dtype)  # (V, C)
        kind = 'cpu' if hidden.is_cpu else 'cuda' if needs_weight else 'cuda, no gradient'
        most = max(1, LOGITS_BYTES[kind] // (4 * weight.shape[0]))
        n = tokens_per_chunk(hidden.shape[0], most)
        for start in range(0, hidden.shape[0], n):
            chunk = slice(start, start + n)
            logits = hidden[chunk] @ matrix.T  # (n, V)
            loss, ce, grad_logits = loss_kernel(logits, targets[chunk], vocab_size, z_loss, with_gradient=any(needs))
            loss_sum += loss
            ce_sum += ce
            if needs_hidden:
                torch.mm(grad_logits, matrix, out=grad_hidden[chunk])
            if needs_weight:
                grad_weight = add_product(grad_weight, grad_logits.T, hidden[chunk])
            del logits, grad_logits  # so that the next chunk gets their memory
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(ce_sum)
        return loss_sum, ce_sum

    @staticmethod
    def backward(ctx, grad_loss_sum, _):
        # In place, as the second is as large as the head. (Another backward would raise, since it finds them changed.)
        gradients = [None if saved is None else saved.mul_(grad_loss_sum) for saved in ctx.saved_tensors]
        return *gradients, None, None, None, None, None


def add_product(total, a, b):
    """total + a @ b for matrices of one dtype; in place, where the total is fp32. It is None at first."""
    if a.device.type in ('cuda', 'meta') and a.dtype != torch.float32:
        # Tensor cores add up in fp32 anyway, so they can add to the total as well, and nothing is rounded on the way.
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        # For a plan, on 'meta', there is nothing to add (and torch 2.11 would raise: pytorch/pytorch#179634).
        return total if total.is_meta else torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    product = a @ b
    return product.float() if total is None else total.add_(product)


def tokens_per_chunk(tokens, most):
    """The size of the largest equal chunks that are a multiple of 128, and at most `most`; if there are none, `most`.

    16,384 tokens with most=2668 are 8 chunks of 2048, rather than 6 of 2668 and one of 376: one shape to compile, and
    whole tiles for the matmuls.
    """
    for chunks in range(-(-tokens // most), tokens // 128 + 1):
        if tokens % (128 * chunks) == 0:
            return tokens // chunks
    return most


def log_softmax(logits, index, here):
    """Of logits (n, V): log-probabilities, that of the target in column index (n, 1), and logsumexp (n), all in fp32.
    here (n): whether the target is one of these columns."""
    log_probs = torch.log_softmax(logits, -1, dtype=torch.float32)  # (n, V)
    log_prob = log_probs.gather(1, index)[:, 0]  # (n)
    return log_probs, log_prob, logits.gather(1, index)[:, 0].float() - log_prob  # since log_prob = logit - lse


def cross_entropy(logits, targets, vocab_size, z_loss, with_gradient, cap=None, first=0, normalize=log_softmax):
    """Sums over the tokens of ce + z_loss * lse^2 and of ce, and the gradient of the first for the logits (n, V).

    cap: that of softcapped(), which comes between these logits and the loss. Where ranks share the vocabulary, `first`
    is the token of the first column, and `normalize` takes the place of log_softmax(): it asks the other ranks.
    """
    dtype = logits.dtype
    if cap:
        logits = softcapped(logits.float(), cap)
        slope = 1 - (logits / cap) ** 2  # tanh' = 1 - tanh^2
    logits[:, max(0, vocab_size - first) :] = -math.inf  # padding gets probability 0
    column = targets - first
    here = (column >= 0) & (column < logits.shape[1]) & (targets >= 0)  # (n)
    # What is not here is another rank's. Without other ranks a token beyond the vocabulary is an error of gather().
    last = None if normalize is log_softmax else logits.shape[1] - 1
    index, valid = column.clamp(0, last)[:, None], (targets >= 0).float()  # (n, 1) and (n)
    log_probs, log_prob, lse = normalize(logits, index, here)
    ce_sum = -(log_prob * valid).sum()
    loss_sum = ce_sum + z_loss * (lse**2 * valid).sum()
    if not with_gradient:
        return loss_sum, ce_sum, None
    # d ce / d logits = softmax - one_hot(target), and d lse^2 / d logits = 2 * lse * softmax
    gradient = log_probs.exp_().mul_((valid * (1 + 2 * z_loss * lse))[:, None])
    gradient.scatter_add_(1, index, -here.float()[:, None])
    return loss_sum, ce_sum, (gradient.mul_(slope) if cap else gradient).to(dtype)


def pointwise_cross_entropy(logits, targets, vocab_size, z_loss, with_gradient, cap=None):
    """cross_entropy() in a form of which torch.compile makes one kernel: without a scatter, and with nothing in place
    but the gradient at the end, which takes the room of the logits.

    Compiled for a GPU, it moves 6 bytes per bf16 logit instead of 38: it reads each row twice and writes it once.
    """
    columns = torch.arange(logits.shape[1], device=logits.device)  # (V)
    capped = softcapped(logits.float(), cap)  # (n, V); it stays in registers
    logits32 = torch.where(columns < vocab_size, capped, -math.inf)
    # In this form Inductor finds the largest of a row and the sum in one pass. torch.logsumexp() would take two.
    largest = logits32.amax(-1, keepdim=True)  # (n, 1)
    lse = (largest + (logits32 - largest).exp().sum(-1, keepdim=True).log())[:, 0]  # (n)
    valid = (targets >= 0).float()  # (n)
    ce = lse - softcapped(logits.gather(1, targets.clamp(min=0)[:, None])[:, 0].float(), cap)
    ce_sum = (ce * valid).sum()
    loss_sum = ce_sum + z_loss * (lse**2 * valid).sum()
    if not with_gradient:
        return loss_sum, ce_sum, None
    softmax = (logits32 - lse[:, None]).exp()
    gradient = softmax * (valid * (1 + 2 * z_loss * lse))[:, None] - (columns == targets[:, None]).float()
    if cap:
        gradient = gradient * (1 - (capped / cap) ** 2)
    return loss_sum, ce_sum, logits.copy_(gradient)


class LogitsOf:
    """A function from rows of hidden states (n, C) in `dtype` to their logits (n, V). The weight (V, C) is cast once,
    however often it is called. weight: None = the hidden states are the logits."""

    def __init__(self, weight, dtype, cap=None):
        self.weight, self.matrix, self.cap = weight, None if weight is None else weight.to(dtype), cap

    def __call__(self, rows):
        return rows if self.matrix is None else softcapped(rows @ self.matrix.T, self.cap)


def loss_of_routers(routers, routings, y):
    """What the routers of all layers, each a Balance, add to the loss_sum of the targets y. routings: for each of them
    (chosen (N, k), logits (N, E))."""
    valid = y.flatten() >= 0  # the same tokens as in the cross-entropy
    of_layers = [router.loss_sum(*routing, valid) for router, routing in zip(routers, routings, strict=True)]
    return sum(of_layers) / len(of_layers)
