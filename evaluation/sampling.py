"""
Text from a model of model.py: one token after the other, each drawn from what the model says of the tokens before it.

    tokens = generate(model, x, max_new_tokens=100)  # x (B, T) -> (B, T + 100)
    token = sample_token(logits, temperature=0.8, top_p=0.95)
"""

import torch

from model import KVCache


@torch.no_grad()
def generate(model, tokens, max_new_tokens, temperature=1.0, top_k=None, top_p=None, generator=None, stop_token=None):
    """Continue every row of tokens (B, T) by up to max_new_tokens; returns (B, T + new).

    temperature, top_k and top_p: see sample_token. A row that has drawn stop_token is filled up with it, and
    generation ends when all rows have. The model sees at most block_size tokens: when its cache is full, it goes on
    from the latest half of them.
    """
    if tokens.shape[1] == 0:
        raise ValueError('an empty prompt: expected at least one token')
    was_training = model.training
    model.eval()
    block_size = model.config.block_size
    capacity = min(block_size, tokens.shape[1] + max_new_tokens)
    cache, new = [KVCache(capacity) for _ in model.blocks], tokens[:, -block_size:]
    stopped = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    for _ in range(max_new_tokens):
        if cache[0].length + new.shape[1] > block_size:
            cache, new = [KVCache(capacity) for _ in model.blocks], tokens[:, -max(1, block_size // 2) :]
        logits = model(new, cache=cache)[:, -1]  # (B, vocab_size)
        new = sample_token(logits, temperature, top_k, top_p, generator)  # (B, 1)
        if stop_token is not None:
            new[stopped] = stop_token
            stopped |= new[:, 0] == stop_token
        tokens = torch.cat((tokens, new), dim=1)
        if stop_token is not None and stopped.all():
            break
    model.train(was_training)
    return tokens


def sample_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Draw one token per row of logits (B, vocab_size); returns (B, 1). temperature 0: the likeliest.

    top_k: only among the k likeliest. top_p: only among the fewest likeliest whose probabilities add up to top_p or
    more (nucleus sampling, Holtzman et al., arXiv 1904.09751), after top_k if both are given. None or 0: off.
    """
    if temperature < 0 or (top_k or 1) < 1 or not 0 < (top_p or 1) <= 1:
        given = f'temperature={temperature}, top_k={top_k}, top_p={top_p}'
        raise ValueError(f'{given}: expected temperature >= 0, top_k >= 1 and top_p above 0 and at most 1')
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    probabilities, ids = probabilities.sort(dim=-1, descending=True)
    if top_k:
        probabilities[:, top_k:] = 0
        probabilities /= probabilities.sum(-1, keepdim=True)
    if top_p:
        before = probabilities.cumsum(-1) - probabilities  # the probability of all likelier tokens
        probabilities[before >= top_p] = 0
    drawn = torch.multinomial(probabilities, 1, generator=generator)  # it normalises
    return ids.gather(-1, drawn)
