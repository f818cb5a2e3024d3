"""Mixtures of experts for tests: weights with which no choice of a router is near a tie (see precision.py)."""

import ast
import contextlib

import torch

from model import GPT, ModelConfig


def model_of(keys, compute_dtype=torch.float32, **changes):
    """The GPT that a train script makes of these keys on the dataset `tiny`, on the meta device."""
    config = {'vocab_size': 257}
    for key in keys:
        name, _, value = key.removeprefix('--').partition('=')
        with contextlib.suppress(ValueError, SyntaxError):  # of text, such as llama
            value = ast.literal_eval(value or 'True')
        config[name] = value
    with torch.device('meta'):
        return GPT(ModelConfig.from_keys(config | changes), compute_dtype)


def first_weights(keys, halves=False):
    """{name: tensor}: the weights for the "start" of runs with these keys (see many_runs.py)."""
    model = model_of(keys)
    weights = {name: model.initial_value(name, value, 7, 'cpu') for name, value in model.named_parameters()}
    let_tokens_choose(weights, model.config.experts_per_token, halves)
    return weights


def let_tokens_choose(weights, k, halves=False, embedding='embed.weight', router='router.weight'):
    """Change the weights {name: tensor} of a model with E experts so that each token has an order of experts of its
    own.

    The first E numbers of its embedding are that order, and these decide what a router says: 1/E apart, times 3, beside
    which the other numbers are small. The first k have 1.5 more. A router_bias of 1 decides before the order does.
    halves: tokens below 128 begin with the first half of the experts, others with the second half. embedding, router:
    the name of the embedding, and the end of the routers' names.
    """
    embedding, routers = weights[embedding], [weight for name, weight in weights.items() if name.endswith(router)]
    E = len(routers[0])
    liking = torch.rand(len(embedding), E, generator=torch.Generator().manual_seed(0))
    if halves:
        liking[:128, : E // 2] += 1
        liking[128:, E // 2 :] += 1
    place = liking.argsort(descending=True).argsort()  # of each expert in the order: 0 is the first one
    embedding[:, :E] = 3 * (1 - place / E) + 1.5 * (place < k)
    for weight in routers:
        weight[:, :E] = torch.eye(E)
