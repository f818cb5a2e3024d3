"""
The coordinate check: do activations keep their size as the model gets wider or deeper (arXiv 2203.03466, 2505.01618)?

    rows = measure_all(config, train_keys, explicit)
    print(table(rows))

Where they do after a few steps at one learning rate, that rate suits all sizes. For each recipe, key of `coordinates`,
value and seed a model is made and trained here, in this process, by model.py and optim.py as train_ddp.py would do it.
"""

import itertools
import math
import statistics
from pathlib import Path
from types import SimpleNamespace

from comparison import planning
from comparison.verdict import markdown
from configurator import Mistake, read_knobs
from runtime.files import ROOT

PARTS = ('embedding', 'attention', 'mlp', 'logits')


def measure_all(config, train_keys, explicit):
    """
    [{'recipe', 'key', 'value', 'seed', and of each part the mean |activation|}]. Prints a line for each model.
    Raises ValueError for keys that no run could have.
    """
    planning.check(config)
    for key, values in config.coordinates.items():
        if not isinstance(values, list | tuple) or len({*values}) < 2 or not all(type(v) is int for v in values):
            raise ValueError(f'coordinates: {key}={values!r}: expected several sizes, as in [64, 128, 256]')
    defaults = {key: knob.default for key, knob in read_knobs(Path(ROOT) / planning.SCRIPTS['single']).items()}
    models = []
    for (recipe, keys), (key, values) in itertools.product(config.recipes.items(), config.coordinates.items()):
        for value, seed in itertools.product(values, config.seeds):
            given = {**keys, key: value, 'seed': seed}
            try:
                keys_of_run = planning.keys_of_run('single', 1, given, config, train_keys, explicit, 1)
            except (Mistake, ValueError) as error:
                raise ValueError(f'{recipe}: {error}') from None
            models.append(({'recipe': recipe, 'key': key, 'value': value, 'seed': seed}, defaults | keys_of_run))
    rows = []
    for row, keys in models:
        rows.append(row | measure(keys))
        sizes = ', '.join(f'{part} {rows[-1][part]:.4g}' for part in PARTS)
        print(f'{row["recipe"]}, {row["key"]}={row["value"]}, seed {row["seed"]}: {sizes}', flush=True)
    return rows


def measure(keys):
    """{part: mean |activation| after max_iters steps} of one model. keys: of train_ddp.py, all of them."""
    import torch  # here, since --help must be quick

    import data
    import optim
    from model import GPT
    from runtime import processes, setup

    config = SimpleNamespace(**keys)
    device = processes.choose_device(config.device, 0)
    train_data, val_data = (data.open_mixture(keys, split) for split in ('train', 'val'))
    model_config, _ = setup.fill_in(config, keys, 1, train_data, val_data)
    model = GPT(model_config, processes.choose_dtype(config.dtype, device)).to(device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.initial_value(name, parameter, config.seed, device))
    opt = optim.make_optimizer(
        model, config.optimizer, config.learning_rate, config.beta1, config.beta2, config.weight_decay,
        config.kappa, config.delta, config.wd_ts, config.max_iters,
    )  # fmt: skip
    for group in opt.param_groups:
        group['lr'] = config.learning_rate * group['lr_factor']
    size = config.global_batch_size
    batches = data.batches(train_data, config.seed, 0, size, size, 0, 1, device)
    for x, y, *starts in itertools.islice(batches, config.max_iters):
        loss_sum, _ = model(x, y, *starts)
        (loss_sum / y.numel()).backward()
        optim.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        opt.step()
        opt.zero_grad()
    x, _, *starts = next(batches)
    batches.close()

    found = {part: [] for part in PARTS}
    modules = [('embedding', model.embed)]
    modules += [pair for block in model.blocks for pair in (('attention', block.attn), ('mlp', block.mlp))]
    for part, module in modules:
        module.register_forward_hook(lambda _, __, output, part=part: found[part].append(output.abs().mean().item()))
    with torch.no_grad():
        found['logits'].append(model(x, None, *starts).abs().mean().item())
    return {part: statistics.fmean(sizes) for part, sizes in found.items()}


def slopes(rows):
    """{(recipe, key, part): d log |activation| / d log size}, by least squares over sizes and seeds; 0 is what is meant."""
    found = {}
    for recipe, key in dict.fromkeys((row['recipe'], row['key']) for row in rows):
        own = [row for row in rows if (row['recipe'], row['key']) == (recipe, key)]
        for part in PARTS:
            points = [(math.log(row['value']), math.log(row[part])) for row in own]
            found[recipe, key, part] = statistics.linear_regression(*zip(*points, strict=True)).slope
    return found


def table(rows):
    """The Markdown table of the slopes."""
    found, cells = slopes(rows), []
    for recipe, key in dict.fromkeys((recipe, key) for recipe, key, _ in found):
        values = [row['value'] for row in rows if (row['recipe'], row['key']) == (recipe, key)]
        of_parts = {part: f'{found[recipe, key, part]:+.3f}' for part in PARTS}
        cells.append({'parametrization': recipe, 'slope over': f'{key} {min(values)} to {max(values)}', **of_parts})
    return markdown(cells)
