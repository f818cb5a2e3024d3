"""
The published rules that derive a whole run from a number of heads: model size, steps, learning rate, weight decay.

    python -m planning.rules --heads=8 --arch=enoki  # print what they give; --ladder prints all published sizes
    filled, notes = fill_from_heads(config, explicit)

Source: arXiv 2602.05298 and its code (github.com/mlexpos/adana). `config` is a script's config as a dict.
"""

import argparse
import math

import torch

from keys import DANA
from model import GPT, ModelConfig
from system import errors

RULE_VOCAB_SIZE = 50304  # GPT-2's 50257, padded, as the paper counts it
RULE_BLOCK_SIZE = 2048  # tokens per sequence in the runs that were fitted
LADDER = (6, 8, 12, 16, 24)  # heads of the published models
RULES = {  # n_layer = a * heads // b; head_dim = n_embd / heads; mlp_hidden_dim / n_embd; attention_gate
    'enoki': (3, 4, 64, 4, False),
    'qwen3': (2, 1, 128, 3, True),
}
# (arch, sequences per step, optimizer, kappa): (a, b, d) of learning rate = a * (b + non-embedding parameters)^d
LEARNING_RATE_FITS = {
    ('enoki', 32, 'adamw', None): (12.8, 1.67e4, -0.515),
    ('enoki', 32, 'adamw-decay', None): (65.7, 9.83e3, -0.608),
    ('enoki', 32, 'adana', 0.75): (12.7, 9.55e3, -0.624),
    ('enoki', 32, 'adana', 0.8): (17.6, 3.66e4, -0.624),
    ('enoki', 32, 'adana', 0.85): (22.5, 1.22e5, -0.618),
    ('enoki', 32, 'adana', 0.9): (68.9, 2.95e4, -0.667),
    ('enoki', 32, 'dana-mk4', 0.75): (56.0, 5.71e3, -0.708),
    ('enoki', 32, 'dana-mk4', 0.85): (23.0, 1.46e4, -0.627),
    ('enoki', 32, 'dana-star-mk4', 0.75): (41.0, 3.03e4, -0.661),
    ('enoki', 32, 'dana-star-mk4', 0.85): (223, 2.40e6, -0.724),
    ('enoki', 32, 'ademamix', None): (4.51, 6.71e3, -0.503),
    ('enoki', 32, 'muon', None): (2.19, 5.64e4, -0.417),
    ('enoki', 512, 'adamw', None): (16.7, 1.58e7, -0.464),
    ('enoki', 512, 'adana', 0.85): (85.3, 3.04e4, -0.654),
    ('enoki', 512, 'dana-mk4', 0.85): (2470, 2.24e7, -0.826),
    ('enoki', 512, 'dana-star-mk4', 0.85): (310, 1.40e4, -0.701),
    ('qwen3', 32, 'adamw', None): (2.16e4, 7.20e4, -0.873),
    ('qwen3', 32, 'adana', 0.85): (3.17, 3.99e4, -0.553),
    ('qwen3', 32, 'dana-mk4', 0.85): (1.20, 3.44e4, -0.501),
    ('qwen3', 32, 'dana-star-mk4', 0.85): (93.9, 1.71e4, -0.701),
}


def fill_from_heads(config, explicit):
    """
    (filled, notes): the keys that `heads` and `arch` decide, and lines for the log. Without heads, only wd_ts and
    weight_decay are filled, and only for optimizers whose decay depends on the length of the run.

    A key in `explicit`, which a file or the command line has set to a value other than None, is kept, and the rules for
    the other keys use its value. Parameters are counted with config's vocabulary, or with the paper's if that is None.
    Raises ValueError if there is no rule.
    """
    heads, arch, optimizer, lr_rule = (config[key] for key in ('heads', 'arch', 'optimizer', 'lr_rule'))
    if heads is None and optimizer in (*DANA, 'adamw-decay'):  # the rules for decay need no heads
        filled = {'wd_ts': config['wd_ts'] or max(1, config['max_iters'] // 10)}
        if optimizer in DANA and 'weight_decay' not in explicit:
            filled['weight_decay'] = config['omega'] / filled['wd_ts']
        return filled, [f'optimizer={optimizer!r} set ' + ', '.join(f'{key}={filled[key]:.4g}' for key in filled)]
    if heads is None:
        return {}, []
    if arch not in RULES:
        raise ValueError(f'arch={arch!r}: expected {" or ".join(RULES)} with heads={heads}, no other has a rule')
    layers, per_heads, head_dim, mlp_ratio, gate = RULES[arch]
    fewest = 1 if 'n_layer' in explicit else math.ceil(per_heads / layers)  # that give one layer
    if heads < fewest:
        raise ValueError(f'heads={heads}: expected {fewest} or more with arch={arch!r}')
    run, filled, notes = dict(config), {}, []

    def settle(**by_rule):
        for key, value in by_rule.items():
            if key not in explicit or config[key] is None:
                run[key] = filled[key] = value

    settle(n_layer=heads * layers // per_heads, n_head=heads, head_dim=head_dim)
    settle(n_embd=run['head_dim'] * run['n_head'])
    settle(mlp_hidden_dim=mlp_ratio * run['n_embd'], attention_gate=gate)
    non_embedding, total = rule_counts(run)
    batch = (config['global_batch_size'], config['block_size'])  # sequences x tokens
    settle(max_iters=max(1, int(config['tokens_per_parameter'] * total / max(1, math.prod(batch)))))
    settle(warmup_iters=run['max_iters'] // 50)
    if 'learning_rate' in explicit:
        settle(learning_rate=None)
    elif config.get('parametrization', 'standard') != 'standard':
        reason = f'heads={heads} gives the rate of this size, parametrization={config["parametrization"]!r}'
        raise ValueError(f'{reason} needs that of base_width={config["base_width"]}: add --learning_rate')
    else:
        settle(learning_rate=fitted_learning_rate(arch, optimizer, non_embedding, lr_rule, config['kappa']))
        if batch != (lr_rule, RULE_BLOCK_SIZE):
            notes.append(
                f'WARNING: learning rate fitted at {lr_rule} sequences x {RULE_BLOCK_SIZE} tokens per step, this run '
                f'has {batch[0]} x {batch[1]}; --lr_rule chooses the fit'
            )
        if arch == 'qwen3':
            notes.append(
                f'learning rate for the true {non_embedding:,} parameters, not for 12 n_embd^2 n_layer as published'
            )
    span = 'max_iters'
    if optimizer in (*DANA, 'adamw-decay'):
        settle(wd_ts=max(1, run['max_iters'] // 10))
        span = 'wd_ts'
    rate = 1 if optimizer in DANA else run['learning_rate']  # others decay by learning rate x weight_decay
    settle(weight_decay=config['omega'] / (rate * run[span]))
    if 'weight_decay' in filled and 'learning_rate' in explicit and optimizer not in DANA:
        formula = f'omega / (learning_rate * {span}) = {config["omega"]:g} / ({rate:g} * {run[span]})'
        notes.append(f'weight_decay={run["weight_decay"]:.4g} is {formula}; or set --weight_decay')
    values = [f'{key}={value:.4g}' if isinstance(value, float) else f'{key}={value}' for key, value in filled.items()]
    return filled, [f'heads={heads}, arch={arch!r} set {", ".join(values)}', *notes]


def rule_counts(run):
    """(non-embedding parameters, all parameters), without norms as in the paper: for 8 heads 18,874,368 and
    70,385,664."""
    with torch.device('meta'):
        model = GPT(ModelConfig.from_keys({**run, 'vocab_size': run['vocab_size'] or RULE_VOCAB_SIZE}))
    counts = model.parameter_counts()
    return counts['attention'] + counts['mlp'], counts['total'] - counts['norms']


def fitted_learning_rate(arch, optimizer, non_embedding, lr_rule=32, kappa=0.85):
    """a * (b + non_embedding)^d; adana-released has adana's fit. If there is no fit, a ValueError lists those known."""
    name = optimizer.removesuffix('-released')
    fit = LEARNING_RATE_FITS.get((arch, lr_rule, name, None)) or LEARNING_RATE_FITS.get((arch, lr_rule, name, kappa))
    if fit is None:
        fits = [f'{key[2]} {key[3] or ""}'.strip() for key in LEARNING_RATE_FITS if key[:2] == (arch, lr_rule)]
        given = f'optimizer={optimizer!r}, kappa={kappa}, lr_rule={lr_rule}'
        there = f'one of {", ".join(fits)}' if fits else 'lr_rule=32'
        raise ValueError(f'{given}: expected {there}, fitted for arch={arch!r}, or a --learning_rate')
    a, b, d = fit
    return a * (b + non_embedding) ** d


def rule_rows(run):
    """{name: text} of everything that `heads` decides. run: a config with the filled keys."""
    counts = (*rule_counts(run), run['global_batch_size'] * run['block_size'])
    rows = {'n_head': run['n_head'], 'n_layer': run['n_layer'], 'n_embd': run['n_embd'], 'mlp': run['mlp_hidden_dim']}
    rows |= dict(zip(('non-embedding', 'total', 'tokens per step'), (f'{number:,}' for number in counts), strict=True))
    rows |= {'iterations': run['max_iters'], 'warm-up': run['warmup_iters'], 'wd_ts': run['wd_ts']}
    rows |= {'weight decay': f'{run["weight_decay"]:.3g}', 'learning rate': f'{run["learning_rate"]:.2e}'}
    return {name: str(value).replace('e-0', 'e-') for name, value in rows.items()}


# --- COMMAND LINE -----------------------------------------------------------------------------------------------------

if __name__ == '__main__':
    errors.report_errors(prints_result=True)
    parser = argparse.ArgumentParser(description='What heads and arch decide, and the learning rates of all optimizers')
    keys = {'arch': 'enoki', 'optimizer': 'adana', 'kappa': 0.85, 'lr_rule': 32, 'global_batch_size': 512}
    keys['tokens_per_parameter'] = 20.0
    for key, default in {'heads': 8, **keys}.items():
        parser.add_argument(f'--{key}', type=type(default), default=default, help=f'key of train_*.py, here {default}')
    parser.add_argument('--ladder', action='store_true', help=f'all published sizes: heads {LADDER}')
    config = vars(parser.parse_args()) | {'omega': 4.0, 'block_size': RULE_BLOCK_SIZE}
    config |= dict.fromkeys(('n_kv_head', 'vocab_size', 'bias', 'tie_embeddings', 'wd_ts'))
    columns = []
    for heads in LADDER if config['ladder'] else [config['heads']]:
        try:
            run = config | fill_from_heads({**config, 'heads': heads}, explicit=())[0]
        except ValueError as error:
            raise SystemExit(f'error: {error}') from None
        columns.append(rule_rows(run))
        for arch, lr_rule, optimizer, kappa in LEARNING_RATE_FITS:
            if (arch, lr_rule) == (run['arch'], run['lr_rule']):
                lr = fitted_learning_rate(arch, optimizer, rule_counts(run)[0], lr_rule, kappa)
                columns[-1][f'lr {optimizer} {kappa or ""}'] = f'{lr:.3e}'.replace('e-0', 'e-')
    for name in columns[0]:
        print(f'{name:22}', *(f'{column[name]:>13}' for column in columns))
