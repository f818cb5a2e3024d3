"""
Sweeps and ladders: which runs they consist of, which runs come next, and what the results say.

A *group* is a size, a recipe, and values of the swept keys other than the learning rate. Each group has its own best
rate. First all rates of the grid run with the first seed; as long as the best of them is at an edge, one more is tried
beyond that edge; then the other seeds run at the best rate.

    groups = groups_of(config, train_keys, explicit)
    while todo := next_runs_of_all(folder, groups, config): ...
    rows = [summarize(group, runs_of(folder, group), config.seeds) for group in groups]
    print(cells(rows), facts(rows), ladder(rows))
"""

import contextlib
import itertools
import math
import re
import statistics
from pathlib import Path

from comparison import laws, results, run_matrix
from knobs import Mistake

GRID = 'rate: loss, first seed'  # the widest column of the table
BEYOND = 3  # at most this many rates beyond the grid, on each side
DIVERGED, BAD_STEPS = 'diverged', 'bad steps in a row'  # why a run was stopped by watch() or by itself


def groups_of(config, train_keys, explicit):
    """
    [{'label', 'size', 'recipe', 'strategy', 'script', 'world_size', 'overrides'}], the last four as in run_matrix.py.
    Raises ValueError for keys that no run could have.
    """
    run_matrix.check(config)
    if len(config.strategies) != 1 or len(config.nproc) != 1 or config.variants:
        raise ValueError('a sweep has one of --strategies and of --nproc, and recipes in place of variants')
    if config.bench or config.write_only or config.resume_check:
        raise ValueError('a sweep decides by losses what runs next: leave out --bench, --write_only and --resume_check')
    if not config.seeds:
        raise ValueError('seeds=[]: expected one seed or more')
    for key, values in config.sweep.items():
        if not isinstance(values, list | tuple) or not values or len({*map(str, values)}) < len(values):
            raise ValueError(f'sweep: {key}={values!r}: expected several different values, as in [1e-3, 2e-3, 4e-3]')
    rates = config.sweep.get('learning_rate', [])
    if not all(isinstance(rate, float | int) and rate > 0 for rate in rates):
        raise ValueError(f'sweep: learning_rate={rates}: expected numbers above 0, as in [1e-3, 2e-3, 4e-3]')
    (strategy,), (nproc,) = config.strategies, config.nproc
    ranks = run_matrix.ranks_of(strategy, nproc)
    axes = [[(key, value) for value in values] for key, values in config.sweep.items() if key != 'learning_rate']
    found = []
    for size, recipe, *chosen in itertools.product(config.sizes or {'': {}}, config.recipes or {'': {}}, *axes):
        values = [f'{key}={value}' for key, value in chosen]
        label = '-'.join(filter(None, (size, recipe, *values))) or 'run'
        given = {**config.sizes.get(size, {}), **config.recipes.get(recipe, {}), **dict(chosen)}
        try:
            keys = run_matrix.keys_of_run(strategy, ranks, given, config, train_keys, explicit, ranks)
        except (Mistake, ValueError) as error:
            raise ValueError(f'{label}: {error}') from None
        if not re.fullmatch(r'[\w.+=-]+', label):
            raise ValueError(f'{label}: it cannot name a folder: use recipes, which have labels, in place of sweep')
        if 0 in (keys.get('eval_sequences'), keys.get('eval_iters')):
            raise ValueError(f'{label}: eval_sequences=0: a sweep compares validation losses, use 1 or more')
        keys.pop('seed', None)
        if rates:
            keys.pop('learning_rate', None)
        group = {'label': label, 'size': size, 'recipe': recipe, 'strategy': strategy}
        found.append({**group, 'script': run_matrix.SCRIPTS[strategy], 'world_size': ranks, 'overrides': keys})
    return found


def entry_of(group, rate, seed):
    """The run of a group with one rate and seed, as an entry of a plan. Each seed has its own folder in the entry's."""
    keys = ({} if rate is None else {'learning_rate': rate}) | {'seed': seed}
    label = group['label'] + ('' if rate is None else f'-lr{float(rate)!r}')
    return {**group, 'label': label, 'overrides': {**group['overrides'], **keys}}


def diverged(rows, max_iters):
    """Why a run should be stopped early, because its loss diverged; '' if not."""
    first = next((row['loss'] for row in rows if 'loss' in row), math.inf)  # the row of step 0 has no loss
    last = rows[-1].get('loss', 0.0)
    if rows[-1]['step'] >= max_iters / 5 and not last <= first + 1:  # 1 nat; less may be noise
        return f'{DIVERGED}: loss {last:.4g} at step {rows[-1]["step"]}, {first:.4g} at the beginning'
    return ''


def next_runs(losses, rates, seeds):
    """[(rate, seed)] that a group needs next; [] if it is complete. losses: {(rate, seed): loss, or inf if it diverged}
    of the runs that ended. rates: the grid; empty if learning rates are not swept, and then the rate is None."""
    if missing := [(rate, seeds[0]) for rate in rates or [None] if (rate, seeds[0]) not in losses]:
        return missing
    first_seed_losses = {rate: loss for (rate, seed), loss in losses.items() if seed == seeds[0]}
    best = min(first_seed_losses, key=first_seed_losses.get)
    if rates and math.isfinite(first_seed_losses[best]):
        tried, grid = sorted(first_seed_losses), sorted(rates)
        step = (grid[-1] / grid[0]) ** (1 / max(1, len(grid) - 1)) if len(grid) > 1 else 2.0
        beyond = {tried[0]: best / step, tried[-1]: best * step}.get(best)
        steps_out = sum(rate < grid[0] if best == tried[0] else rate > grid[-1] for rate in tried)
        if beyond and steps_out < BEYOND:
            return [(float(f'{beyond:.3g}'), seeds[0])]
    return [(best, seed) for seed in seeds if (best, seed) not in losses and math.isfinite(first_seed_losses[best])]


# --- WHAT THEY SAY ----------------------------------------------------------------------------------------------------


def has_diverged(failure):
    """Whether a run's failure is that its loss diverged, which is a result of the sweep, not a mistake."""
    return DIVERGED in failure or BAD_STEPS in failure


def how_it_ended(folder, repeat, entry, failure):
    """The line to print about a run that has ended."""
    last = {} if failure else results.read_rows(results.folder_of(folder, entry, repeat))[-1]
    return f'{entry["label"]}, {repeat}: ' + (failure or f'val loss {last["val_loss"]:.4f}')


def runs_of(folder, group):
    """{(rate, seed): {'loss', 'tokens', 'flops', 'config'}} of the runs that ended well, and {'loss': inf} of those
    that diverged."""
    found = {}
    for path in Path(folder, 'runs').glob(f'{group["label"]}*/seed*'):
        rate = path.parent.name.removeprefix(group['label'])
        if not re.fullmatch(r'(-lr[\d.e+-]+)?', rate):  # a run of another group whose label begins with this one
            continue
        key = float(rate[3:]) if rate else None, int(path.name[4:])
        run = results.read_run(path, group['world_size'])
        if run and not run.failure:
            last = run.rows[-1]
            loss = last['val_loss'] if math.isfinite(last['val_loss']) else math.inf
            flops = run.about['flops_per_token'] * last['tokens']
            found[key] = {'loss': loss, 'tokens': last['tokens'], 'flops': flops, 'config': run.config}
        elif run and has_diverged(run.failure):
            found[key] = {'loss': math.inf}
    return found


def next_runs_of_all(folder, groups, config):
    """[(name of the run's folder, such as 'seed1337', entry)] of all groups, in the form of run_matrix.queue_of()."""
    found = []
    for group in groups:
        losses = {key: run['loss'] for key, run in runs_of(folder, group).items()}
        runs = next_runs(losses, config.sweep.get('learning_rate'), config.seeds)
        found += [(f'seed{seed}', entry_of(group, rate, seed)) for rate, seed in runs]
    return found


def summarize(group, runs, seeds):
    """
    The row of a group; None if no run of it has ended. runs: from runs_of().

    'rate': the laws.Rate of the first seed, as a dict. 'interval': of the best rate, or None. 'losses': {seed: loss} at
    the best rate that was tried.
    """
    from planning import sizes  # here, as it imports torch

    row = {key: group[key] for key in ('label', 'size', 'recipe')}
    first = {rate: run['loss'] for (rate, seed), run in runs.items() if seed == seeds[0]}
    if not first:
        return None
    if not any(map(math.isfinite, first.values())):
        return row | {'losses': {}, 'grid': first}
    best = min(first, key=first.get)
    row |= {'grid': dict(sorted(first.items(), key=lambda item: item[0] or 0)), 'tried': best}
    row['losses'] = {seed: run['loss'] for (rate, seed), run in runs.items() if rate == best}
    best_run = runs[best, seeds[0]]
    row |= {key: best_run[key] for key in ('tokens', 'flops')}
    row['params'] = sizes.empty_model(best_run['config']).parameter_counts()['total']
    if best is not None:
        row['rate'] = vars(laws.fit_rate([*first], [*first.values()]))
        every = [(rate, run['loss']) for (rate, _), run in runs.items()]
        try:
            row['interval'] = laws.resampled(lambda some: laws.fit_rate(*zip(*some, strict=True)).best, every)
        except ValueError:
            row['interval'] = None
    return row


def cells(rows):
    """[{column: text}] of a sweep, a row for each group: its rates, the best one, and the loss over the seeds."""
    found = []
    for row in rows:
        losses, rate = [*row['losses'].values()], row.get('rate')
        where = {'lower': ' (at the lower edge)', 'upper': ' (at the upper edge)'}
        best = f'{rate["best"]:.3g}{where.get(rate["edge"], "")}' if rate else ''
        if rate and row['interval']:
            best += f' [{row["interval"][0]:.3g}, {row["interval"][1]:.3g}]'
        grid_losses = [f'{key:g}: {loss:.4f}' for key, loss in row['grid'].items() if key is not None]
        found.append({
            'run': row['label'],
            'parameters': f'{row["params"]:,}' if losses else '',
            'tokens': f'{row["tokens"]:,}' if losses else '',
            GRID: ', '.join(grid_losses),
            'best rate [95%]': best,
            'loss at the best tried': mean_and_error(losses) if losses else 'diverged',
            'seeds': str(len(losses)),
        })  # fmt: skip
    return found


def facts(rows):
    """Lines that say what a sweep found: each group's best rate and loss, which group is best, and what to doubt."""
    lines, doubts = [], []
    for row in rows:
        losses, rate, label = [*row['losses'].values()], row.get('rate'), row['label']
        if not losses:
            doubts.append(f'WARNING: {label}: every run diverged, try smaller learning rates')
            continue
        seeds = f'over {len(losses)} seeds' if len(losses) > 1 else 'of one seed, whose noise is not known'
        said = f'validation loss {mean_and_error(losses)} {seeds}'
        if rate:
            low, high = row['interval'] or (None, None)
            within = f'with 95% between {low:.3g} and {high:.3g}' if low else 'too few runs for an interval'
            said = f'take learning_rate={rate["best"]:.3g} ({within}); {rate["tried"]:g}, the best tried, has {said}'
            end = {'lower': 'smallest', 'upper': 'largest', '': ''}[rate['edge']]
            doubts += (
                [f'WARNING: {label}: the best rate is the {end} tried, a better one may lie beyond'] if end else []
            )
        lines.append(f'{label}: {said}')
    for size in dict.fromkeys(row['size'] for row in rows):
        found = [
            (statistics.fmean(row['losses'].values()), row) for row in rows if row['size'] == size and row['losses']
        ]
        (low, best), *others = sorted(found, key=lambda one: one[0]) or [(0, None)]
        for loss, row in others:
            pair = [[*one['losses'].values()] for one in (best, row)]
            said = f'{best["label"]} against {row["label"]}: {loss - low:.4f} lower'
            if min(map(len, pair)) > 1:
                error = math.sqrt(sum(statistics.variance(some) / len(some) for some in pair))
                said += f' +- {error:.4f}, {"a clear difference" if loss - low > 2 * error else "no clear difference"}'
            lines.append(said)
    return lines + doubts


def mean_and_error(values):
    error = f' +- {statistics.stdev(values) / math.sqrt(len(values)):.4f}' if len(values) > 1 else ''
    return f'{statistics.fmean(values):.4f}{error}'


def ladder(rows):
    """
    Lines that say what several sizes show: how much compute each recipe saves against the first one at equal loss, its
    law, and the loss that the next size should have.

    The compute of a run is its FLOPs, forward and backward. The saving is the compute that the first recipe would need
    by its law to reach the other recipe's loss, divided by the compute that the other recipe took. So 1.2x means that
    this one needs a sixth less.
    """
    points = [
        (row['recipe'], row['size'], row['flops'], loss) for row in rows for loss in row['losses'].values()
        if math.isfinite(loss)
    ]  # fmt: skip
    recipes = [*dict.fromkeys(recipe for recipe, *_ in points)]
    lines, fits = [], {}
    for recipe in recipes:
        own = [point for point in points if point[0] == recipe]
        try:
            law = fits[recipe] = law_of(own)
        except ValueError as error:
            lines.append(f'{recipe or "law"}: {error}')
            continue
        ((scale, exponent, unit),) = law.terms.values()
        text = f'{recipe or "law"}: loss = {law.floor:.3f} + {scale:.3f} (C / {unit:.3g} FLOPs)^-{exponent:.3f}'
        lines.append(f'{text}, exponent {interval(lambda some: law_of(some).terms["compute"][1], own)}')
        lines += predictions(recipe, own, law)
    return [line for recipe in recipes[1:] if recipes[0] in fits for line in saved(points, recipes[0], recipe)] + lines


def law_of(points):
    return laws.fit_law({'compute': [flops for *_, flops, _ in points]}, [loss for *_, loss in points])


def interval(statistic, points, form='{:.3f}'):
    try:
        low, high = laws.resampled(statistic, points, numbers=3)
        return f'[{form.format(low)}, {form.format(high)}]'
    except ValueError:
        return '[too few runs for an interval]'


def predictions(recipe, points, law):
    """Lines with the loss of the next size by the law of all sizes and, as a check, the loss of the largest size by the
    law of the smaller ones, beside the loss that was measured."""
    compute = sorted({flops for *_, flops, _ in points})
    factor = compute[-1] / compute[-2]
    ahead = compute[-1] * factor
    said = interval(lambda some: law_of(some).at(compute=ahead), points, '{:.4f}')
    lines = [f'PREDICTION, {recipe or "next"}: {law.at(compute=ahead):.4f} {said} at {factor:.1f} times the compute']
    before = [point for point in points if point[2] < compute[-1]]
    last = [loss for *_, flops, loss in points if flops == compute[-1]]
    try:
        foretold = law_of(before).at(compute=compute[-1])
    except ValueError:  # too few smaller sizes
        return lines
    said = interval(lambda some: law_of(some).at(compute=compute[-1]), before, '{:.4f}')
    return [
        *lines,
        f'checked, {recipe or "last"}: {foretold:.4f} {said} from the smaller sizes, {mean_and_error(last)} measured',
    ]


def saved(points, base, recipe):
    """Lines on how many times the compute the recipe `base` needs for the same loss, at each size, and how that grows
    with compute."""
    compute = {size: flops for name, size, flops, _ in points if name == recipe}

    def ratio(some, size):
        reached = [loss for name, of, _, loss in some if name == recipe and of == size]
        if not reached:
            raise ValueError(f'no run of {size}')
        law = law_of([point for point in some if point[0] == base])
        return law.inverse(statistics.fmean(reached)) / compute[size]

    def growth(some):  # factor by which the ratio grows when compute grows tenfold
        logs = [math.log(ratio(some, size)) for size in compute]
        if math.inf in logs:
            raise ValueError(f'{base} never reaches the loss of {recipe}')
        return 10 ** statistics.linear_regression([*map(math.log, compute.values())], logs).slope

    both, lines = [point for point in points if point[0] in (base, recipe)], []
    most = max(flops for name, _, flops, _ in points if name == base)
    for size, flops in compute.items():
        times = ratio(both, size)
        said = interval(lambda some, size=size: ratio(some, size), both, '{:.2f}')
        beyond = '' if times * flops <= most else ', EXTRAPOLATED beyond its runs'
        lines.append(f'{recipe}, {size}: {base} needs {times:.2f}x {said} the compute for the same loss{beyond}')
    if len(compute) > 2:
        with contextlib.suppress(ValueError):
            lines.append(f'and {growth(both):.2f}x {interval(growth, both, "{:.2f}")} that at ten times the compute')
    return lines
