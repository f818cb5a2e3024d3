"""
How often a run reads its data and how long it takes: the end of what --dry_run prints.

    card = hours.card_of(vars(config))  # 'h100'
    print(*hours.lines(vars(config), ranks, train_data, card), sep='\n')

The time of a step is its FLOPs over a speed: that of the run in --measured=OUT_DIR, or an assumed share of the card's
peak.
"""

import re
import statistics
from collections import namedtuple
from pathlib import Path

import torch

from knobs import read_knobs
from layout import counted
from planning import sizes
from planning.roofline import GPUS, MFU
from system.devices import PEAK_FLOPS
from system.files import ROOT, parse_json, read_json

ABOUT = {  # what is read of a config.json
    'script': str,
    'world_size': int,
    'device_name': str,
    'flops_per_token': float,
    'config': {'device': str, 'dtype': str, 'global_batch_size': int, 'block_size': int},
}
# A run: its keys with those of the model, and the FLOPs of a step, padding included.
Plan = namedtuple('Plan', 'config ranks flops')


def card_of(config):
    """The kind of GPU, one of GPUS, that a run is planned for: the key `gpu`, or the one here; None if it is
    a CPU, or another GPU. Raises ValueError for another `gpu`."""
    given = config['gpu']
    if given and given.lower() not in GPUS:
        known = ', '.join(name.upper() for name in GPUS)
        raise ValueError(
            f'gpu={given}: expected {known}; leave it out, and --measured=OUT_DIR takes the speed of a run'
        )
    if given:
        return given.lower()
    is_here = config['device'].startswith('cuda') and torch.cuda.is_available()
    return card_named(torch.cuda.get_device_name()) if is_here else None


def card_named(device_name):
    """The one of GPUS that a driver calls by this name, or None."""
    is_whole = any(re.search(pattern, device_name) for pattern in PEAK_FLOPS)
    return next((card for card in GPUS if is_whole and card.upper() in device_name), None)


def lines(config, ranks, train_data, card):
    """Lines of text, the first one empty. config: a run's keys, with those of the model. card: of card_of(). Raises
    ValueError if `measured` names no run whose speed can be taken."""
    positions = config['global_batch_size'] * config['block_size']
    plan = Plan(config, ranks, sizes.empty_model(config).flops_per_token() * positions)
    tokens = config['max_iters'] * positions * train_data.filled
    rows = [in_epochs(config, tokens, train_data)]
    seconds, reason = seconds_of_step(plan, card)
    if seconds:
        on = f'{counted(ranks, "rank")} on a {config["device"].partition(":")[0].upper()}'
        if card:
            mfu = plan.flops / seconds / ranks / GPUS[card].peak
            on = f'{ranks} x {card.upper()} at {mfu:.0%} MFU'
        left_out = ['evaluations', 'checkpoints']
        left_out += ['what crosses PCIe'] if config.get('cpu_offload', 'none') != 'none' else []
        rate = f'{positions * train_data.filled / seconds:,.0f} tokens/s'
        rows.append(f'{in_words(config["max_iters"] * seconds)}: {on}, {rate}, without {" and ".join(left_out)}')
    return ['', 'data and time', *(f'  {row}' for row in [*rows, reason])]


def in_epochs(config, tokens, train_data):
    """How much the run reads, and how often."""
    if 'num_generations' in config:
        passes = config['max_iters'] * config['global_batch_size'] / train_data.n_windows
        return f'{passes:.2f} epochs of {counted(len(train_data.items), "prompt")}'
    passes, read = train_data.passes(), f'{short(tokens)} tokens'
    if len(passes) < len(train_data.names):  # random tokens without an end, or of a size that is not known
        return f'{read} of {" + ".join(train_data.names)}' + ' (not on this machine)' * train_data.is_absent
    of = [
        f'{epochs:.2f} epochs of {name}, {short(source.n_tokens)}'
        + (' by its name (not on this machine)' if source.is_absent else '')
        for (name, epochs), source in zip(passes.items(), train_data.sources, strict=True)
    ]
    return f'{read}: {" + ".join(of)}'


def seconds_of_step(plan, card):
    """(seconds, why these), or (None, why they are not known)."""
    measured, on_cuda = plan.config['measured'], plan.config['device'].startswith('cuda')
    if 'num_generations' in plan.config:
        return None, 'how long it takes depends on how long answers are, so it is not predicted'
    if measured:
        other, seconds, where = run_in(measured, 'cuda' if on_cuda else 'cpu', card)
        at = f'at the speed of {measured} ({counted(other.ranks, "rank")}, {where})'
        # Ranks on a CPU share its cores, so that it is as fast as a whole, however many there are.
        share, each = (plan.ranks / other.ranks, ' on each GPU') if on_cuda else (1, '')
        flops_per_s = other.flops / seconds / (other.ranks if on_cuda else 1)
        return plan.flops / (share * other.flops) * seconds, f'{at}: {flops_per_s / 1e12:.3g} TFLOP/s{each}'
    ask = '--measured=OUT_DIR takes the speed of an earlier run'
    if not card:
        here = 'this GPU' if on_cuda else 'a CPU'
        cards = ', '.join(name.upper() for name in GPUS)
        return None, f'how long it takes on {here} is not known: {ask} there, --gpu=H100 that of a card ({cards})'
    if plan.config['dtype'] == 'float32':
        return None, f'how long it takes in float32 is not known: {ask}'
    seconds = plan.flops / (plan.ranks * MFU * GPUS[card].peak)
    return seconds, f'assumed: {MFU:.0%} of the peak, whatever the model and the links, so no speed to rely on; {ask}'


def run_in(out_dir, device, card):
    """(Plan, seconds of a step, name of its device) of an earlier run. device: 'cuda' or 'cpu'. Raises ValueError if
    the run was on another one than that and `card`, or has no times."""
    given = f'measured={out_dir}'
    if not (path := Path(out_dir, 'config.json')).exists():
        raise FileNotFoundError(f'{given}: there is no {path}: expected the out_dir of an earlier run')
    about = read_json(path, ABOUT, 'give the out_dir of another run')
    # A run of an earlier version lacks the keys that are new.
    config = {key: knob.default for key, knob in read_knobs(Path(ROOT, 'train_parallel.py')).items()} | about['config']
    name = about['device_name']
    if config['device'].partition(':')[0] != device or (card and card_named(name) != card):
        here = (card or device).upper()
        raise ValueError(f'{given} ran on {name}, and the plan is for {here}: give a run there, or another --gpu')
    if 'num_generations' in config:
        raise ValueError(f'{given} has written answers, which takes most of its time: give a run of another script')
    ms = step_ms(path.with_name('metrics.jsonl'), has_rounds=about['script'] in ('train_diloco.py', 'train_pool.py'))
    if not ms:
        raise ValueError(
            f'{given}: no row of its metrics.jsonl has a time/total: give a run that has logged some steps'
        )
    flops = about['flops_per_token'] * config['global_batch_size'] * config['block_size']
    return Plan(config, about['world_size'], flops), ms / 1000, name


def step_ms(path, has_rounds):
    """Milliseconds of a step by a metrics.jsonl, whose last line may be half written; None if it has no times. The
    median, or the mean where one step in many is longer by the exchange of a round. The first ones do not count."""
    rows = path.read_bytes().split(b'\n')[:-1] if path.exists() else []
    rows = [parse_json(row, {'step': int, 'time/total?': float}, path) for row in rows]
    warm = min(10, rows[-1]['step'] / 4) if rows else 0
    found = [row['time/total'] for row in rows if 'time/total' in row and row['step'] > warm]
    average = statistics.fmean if has_rounds else statistics.median
    return average(found) if found else None


def in_words(seconds):
    """A length of time as one says it."""
    units = {'seconds': 1, 'minutes': 60, 'hours': 3600, 'days': 86400}
    name = next((unit for unit, most in zip(units, (100, 5400, 48 * 3600), strict=False) if seconds < most), 'days')
    number = seconds / units[name]
    return f'{number:,.0f} {name}' if number >= 10 or name == 'seconds' else f'{number:.1f} {name}'


def short(number):
    """2,837,446,656 is 2.8B."""
    for size, letter in ((1e12, 'T'), (1e9, 'B'), (1e6, 'M'), (1e3, 'k')):
        if number >= size:
            return f'{number / size:.1f}{letter}'.replace('.0', '')
    return f'{number:,.0f}'
