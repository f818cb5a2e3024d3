"""
The coordinate check: do activations keep their size as the model gets wider or deeper (arXiv 2203.03466, 2505.01618)?
If they do, after a few steps at the same learning rate, that rate suits all sizes. Under the standard parametrization
they do not.

    python prepare_data.py --tokenizer=bytes --name=stdlib-bytes
    python benchmarks/coordinates.py                                             # 71 s on 2 cores
    python benchmarks/coordinates.py --arch=llama --out_dir=out/coordinates_llama     # or --optimizer=muon
    python benchmarks/coordinates.py --widths 32 64 128 --depths 2 4 8 --seeds 1

For each recipe, width, depth and seed a model is trained in this process with model.py and optim.py, as in
train_ddp.py, whose other keys may be given: 10 steps at a constant rate. Then the mean |activation| is taken of the
embedding, of the outputs of attention and MLP (mean over the blocks), of what leaves the last block, and of the logits.
out_dir gets coordinates.json, with a row per model, the slopes in table.md, and coordinates.png.
"""

import argparse
import importlib.util
import itertools
import math
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

import torch

import data
import optim
from comparison import plots, results
from comparison.verdict import markdown
from configurator import find
from knobs import Mistake, parse, read_knobs
from model import GPT
from runtime.begin import Run
from runtime.fill import fill_in
from system import devices, errors

PARTS = ('embedding', 'attention', 'mlp', 'residual', 'logits')
SCRIPT = REPO / 'train_ddp.py'
RUN = {
    'arch': 'gpt2', 'n_layer': 2, 'n_head': 4, 'n_embd': 64, 'mlp_hidden_dim': 256, 'block_size': 64, 'batch_size': 8,
    'dataset': 'stdlib-bytes', 'dtype': 'float32', 'max_iters': 10, 'learning_rate': 1e-3,
}  # fmt: skip
RECIPES = {
    'standard': {},
    'mup': {'parametrization': 'mup', 'base_width': 16},
    'completep': {'parametrization': 'completep', 'base_width': 16, 'base_depth': 1},
}


def keys_of(axis, size):
    """The keys of a model of this size: heads and MLP grow with the width."""
    wide = {'n_embd': size, 'n_head': size // 16, 'mlp_hidden_dim': 4 * size}
    return wide if axis == 'width' else {'n_layer': size}


def measure(keys, explicit):
    """{part: mean |activation| after max_iters steps} of one model. keys: all keys of train_ddp.py. explicit: those
    that a run would be given, as configure() returns them."""
    config = SimpleNamespace(**keys)
    device = devices.choose_device(config.device, 0)
    train_data = data.open_mixture(keys, 'train')
    dtype = devices.choose_dtype(config.dtype, device)
    run = Run(config, explicit, {**keys}, 'ddp', 0, 1, device, dtype, train_data=train_data)
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


def main():
    errors.report_errors()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--widths', type=int, nargs='+', default=[64, 128, 256, 512, 1024])
    parser.add_argument('--depths', type=int, nargs='+', default=[2, 4, 8, 16, 32])
    parser.add_argument('--seeds', type=int, nargs='+', default=[1, 2, 3])
    parser.add_argument('--out_dir', type=Path, default='out/coordinates')
    arguments, others = parser.parse_known_args()
    if len({*arguments.widths}) < 2 or len({*arguments.depths}) < 2:
        parser.error('a slope needs two sizes or more: --widths 64 128 --depths 2 4')
    knobs, given = read_knobs(SCRIPT), {}
    try:
        for argument in others:
            key, equals, text = argument.lstrip('-').partition('=')
            given[key] = parse(text if equals else None, find(key, knobs, SCRIPT, argument), f'--{key}')
    except Mistake as mistake:
        parser.error(str(mistake))
    defaults = {key: knob.default for key, knob in knobs.items()}
    sizes = {'width': arguments.widths, 'depth': arguments.depths}
    rows = []
    for (recipe, recipe_keys), axis in itertools.product(RECIPES.items(), sizes):
        for size, seed in itertools.product(sizes[axis], arguments.seeds):
            keys = {**RUN, **given, **recipe_keys, **keys_of(axis, size), 'seed': seed}
            keys.setdefault('global_batch_size', keys['batch_size'])
            measured = measure({**defaults, **keys}, explicit=dict.fromkeys(keys, 'command line'))
            rows.append({'recipe': recipe, 'axis': axis, 'size': size, 'seed': seed, **measured})
            found = ', '.join(f'{part} {measured[part]:.4g}' for part in PARTS)
            print(f'{recipe}, {axis} {size}, seed {seed}: {found}', flush=True)
    print(f'\n{table(rows)}\n', flush=True)
    arguments.out_dir.mkdir(parents=True, exist_ok=True)
    results.write(arguments.out_dir / 'table.md', table(rows) + '\n')
    results.write_json(arguments.out_dir / 'coordinates.json', rows)
    if importlib.util.find_spec('matplotlib'):
        plots.plot_coordinates(rows, PARTS, arguments.out_dir / 'coordinates.png')


if __name__ == '__main__':
    main()
