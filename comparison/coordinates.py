"""
The coordinate check: do activations keep their size as the model gets wider or deeper (arXiv 2203.03466, 2505.01618)?

    rows = measure_all(config, train_keys, explicit)
    print(table(rows))

If they do, after a few steps at the same learning rate, that rate suits all sizes. For each recipe, each axis and size
in `coordinates` and each seed, a model is trained in this process with model.py and optim.py, as in train_ddp.py.
"""

import itertools
import math
import statistics
from pathlib import Path
from types import SimpleNamespace

from comparison import run_matrix
from comparison.verdict import markdown
from configurator import Mistake, read_knobs
from system.files import ROOT

PARTS = ('embedding', 'attention', 'mlp', 'residual', 'logits')


def measure_all(config, train_keys, explicit):
    """
    [{'recipe', 'axis', 'size', 'seed', part: mean |activation|, ...}], a row for each model. Prints a line for each.
    Raises ValueError for keys that no run could have.
    """
    run_matrix.check(config)
    if not config.recipes or not config.seeds:
        raise ValueError('coordinates: expected recipes to compare, and seeds')
    for axis, sizes in config.coordinates.items():
        good = isinstance(sizes, dict) and len(sizes) > 1 and all(isinstance(keys, dict) for keys in sizes.values())
        if not good or not all(isinstance(size, int | float) and size > 0 for size in sizes):
            raise ValueError(
                f'coordinates: {axis}={sizes!r}: expected several sizes, as in {{64: {{"n_embd": 64}}, ...}}'
            )
    defaults = {key: knob.default for key, knob in read_knobs(Path(ROOT) / run_matrix.SCRIPTS['single']).items()}
    models = []
    for (recipe, recipe_keys), (axis, sizes) in itertools.product(config.recipes.items(), config.coordinates.items()):
        for (size, size_keys), seed in itertools.product(sizes.items(), config.seeds):
            given = {**recipe_keys, **size_keys, 'seed': seed}
            try:
                keys = run_matrix.keys_of_run('single', 1, given, config, train_keys, explicit, 1)
            except (Mistake, ValueError) as error:
                raise ValueError(f'{recipe}, {axis} {size}: {error}') from None
            models.append(({'recipe': recipe, 'axis': axis, 'size': size, 'seed': seed}, keys))
    rows = []
    for row, keys in models:
        rows.append(row | measure({**defaults, **keys}, explicit=dict.fromkeys(keys, 'command line')))
        found = ', '.join(f'{part} {rows[-1][part]:.4g}' for part in PARTS)
        print(f'{row["recipe"]}, {row["axis"]} {row["size"]}, seed {row["seed"]}: {found}', flush=True)
    return rows


def measure(keys, explicit):
    """{part: mean |activation| after max_iters steps} of one model. keys: all keys of train_ddp.py. explicit: those
    that a run would be given, as configure() returns them."""
    import torch  # here, so that --help is quick

    import data
    import optim
    from model import GPT
    from runtime.begin import Run
    from runtime.fill import fill_in
    from system import devices

    config = SimpleNamespace(**keys)
    device = devices.choose_device(config.device, 0)
    train_data, val_data = (data.open_mixture(keys, split) for split in ('train', 'val'))
    dtype = devices.choose_dtype(config.dtype, device)
    run = Run(config, explicit, 'ddp', 0, 1, device, dtype, train_data=train_data, val_data=val_data)
    fill_in(run, ranks=1)
    model = GPT(run.model_config, dtype).to(device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.initial_value(name, parameter, config.seed, device))
    opt = optim.from_config(model, config, device)
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
    modules = [('embedding', model.embed), ('residual', model.blocks[-1])]
    modules += [pair for block in model.blocks for pair in (('attention', block.attn), ('mlp', block.mlp))]
    for part, module in modules:
        module.register_forward_hook(lambda _, __, output, part=part: found[part].append(output.abs().mean().item()))
    with torch.no_grad():
        found['logits'].append(model(x, None, *starts).abs().mean().item())
    return {part: statistics.fmean(sizes) for part, sizes in found.items()}


def slopes(rows):
    """{(recipe, axis): {part: d log |activation| / d log size}}, by least squares over sizes and seeds. 0 is ideal."""
    found = {}
    for key in dict.fromkeys((row['recipe'], row['axis']) for row in rows):
        own = [row for row in rows if (row['recipe'], row['axis']) == key]
        sizes = [math.log(row['size']) for row in own]
        logs = {part: [math.log(row[part]) for row in own] for part in PARTS}
        found[key] = {part: statistics.linear_regression(sizes, logs[part]).slope for part in PARTS}
    return found


def table(rows):
    """The Markdown table of the slopes."""
    cells = []
    for (recipe, axis), part_slopes in slopes(rows).items():
        sizes = [row['size'] for row in rows if row['axis'] == axis]
        cells.append({'recipe': recipe, 'slope over': f'{axis} {min(sizes)} to {max(sizes)}'})
        cells[-1] |= {part: f'{slope:+.3f}' for part, slope in part_slopes.items()}
    return markdown(cells)
