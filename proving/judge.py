"""
Do ranks that share the work compute what one process computes? And if not, what is wrong with which parameter?

    verdict = judge(records, one, exact)      # of the ranks; of one process in fp32; of one process in float64
    verdict.worst                             # {'gradient': times as far from float64 as one process, ...}
    print(*verdict.lines(), sep='\n')         # what is wrong, one line per kind of parameter; none if all is right

A gradient that is wrong is usually right up to something simple: a factor, a sum that was left out over some of the
ranks, a micro-step that counts twice. cause_of() tries these one after another, and names the first that explains
all numbers of the parameter.
"""

import math
import re
import statistics
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from proving.precision import FLOOR, TIMES, error

KINDS = ('gradient', 'norm', 'update', 'loss')


@dataclass
class Record:
    """What one rank has seen of a few steps."""

    places: dict = field(default_factory=dict)  # {name: None, or (dim, indices) of the part that this rank holds}
    gradients: dict = field(default_factory=dict)  # {name: of the first step, before clipping; zeros if there is none}
    updates: dict = field(default_factory=dict)  # {name: what the first step has added to the weight}
    norms: list = field(default_factory=list)  # the gradient's, in each step, before clipping
    losses: list = field(default_factory=list)  # of each step
    targets: list = field(default_factory=list)  # how many each sequence of the first step has
    gap: float = math.inf  # of the closest choice of a router, in probability
    # {(data rank, micro-step): {name: gradient}} of each part of the step's data, from one process in float64
    parts: dict = field(default_factory=dict)


class Finding(NamedTuple):
    kind: str  # one of KINDS
    name: str  # of the parameter, or 'step 1'
    error: float  # relative distance from float64
    cause: str


@dataclass
class Verdict:
    worst: dict = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))  # TIMES and less is right
    findings: list = field(default_factory=list)

    @property
    def is_right(self):
        return not self.findings

    def add(self, other):
        """Join the verdict on other ranks to this one."""
        self.worst = {kind: max(times, other.worst[kind]) for kind, times in self.worst.items()}
        self.findings += other.findings

    def lines(self, limit=8):
        """A line for each kind of parameter and cause: blocks.*.attn.q_norm.weight (4): off by 0.5: 2 times too ..."""
        of_cause = {}
        for finding in sorted(self.findings, key=lambda finding: -finding.error):  # what follows from it is less wrong
            without_numbers = re.sub(r'[\d.]+', '', finding.cause)
            of_cause.setdefault((finding.kind, without_numbers), []).append(finding)
        lines = [
            f'{worst.kind} of {in_short([worst.name, *(finding.name for finding in others)])}: off by '
            f'{worst.error:.1e}: {worst.cause}'
            for worst, *others in of_cause.values()
        ]
        return lines[:limit] + ([f'and {len(lines) - limit} more kinds'] if len(lines) > limit else [])


def in_short(names):
    """'blocks.*.attn.q_norm.weight (4), head.weight': names that differ only in numbers are one kind."""
    kinds = {}
    for name in names:
        kinds.setdefault(re.sub(r'\d+', '*', name), []).append(name)
    return ', '.join(of[0] if len(of) == 1 else f'{kind} ({len(of)})' for kind, of in kinds.items())


def part_at(place, whole):
    """A rank's part of a whole tensor."""
    return whole if place is None else whole.index_select(place[0], place[1])


# --- RIGHT OR WRONG ---------------------------------------------------------------------------------------------------


def judge(ranks, one, exact):
    """The Verdict on the Records of all ranks. one, exact: the Records of one process, in fp32 and in float64."""
    verdict = Verdict()
    judge_tensors(verdict, 'gradient', ranks, one, exact)
    judge_numbers(verdict, 'norm', ranks, one, exact)
    if not any(finding.kind == 'gradient' or finding.name == 'step 1' for finding in verdict.findings):
        judge_tensors(verdict, 'update', ranks, one, exact)
    judge_numbers(verdict, 'loss', ranks, one, exact)
    return verdict


def judge_tensors(verdict, kind, ranks, one, exact):
    """Add what is wrong with the gradients or updates."""
    ones, exacts = getattr(one, f'{kind}s'), getattr(exact, f'{kind}s')
    # A tensor of few numbers may be close to float64 by luck, so one process is taken to be as far as for half of them.
    distances = {name: error(ones[name], whole) for name, whole in exacts.items()}
    typical = statistics.median(distances.values() or [0.0])
    for name, whole in exacts.items():
        tolerance = max(distances[name], typical, FLOOR)
        held = {rank: record for rank, record in enumerate(ranks) if name in record.places}
        distance, cause = math.inf, 'no rank has this parameter'
        if held:
            got = {rank: getattr(record, f'{kind}s')[name].double() for rank, record in held.items()}
            want = {rank: part_at(record.places[name], whole) for rank, record in held.items()}
            distance = error(flat(got), flat(want))
        times = distance / tolerance
        verdict.worst[kind] = max(verdict.worst[kind], times)
        if times <= TIMES:
            continue
        if held and kind == 'update':
            cause = 'though the gradient is right: clipping, optimizer, or weights that were not refreshed'
        elif held:
            places = {rank: record.places[name] for rank, record in held.items()}
            parts = {label: of[name] for label, of in exact.parts.items()}
            cause = cause_of(got, want, places, parts, len(ranks), max(30 * tolerance, 1e-4))
        verdict.findings.append(Finding(kind, name, distance, cause))


def judge_numbers(verdict, kind, ranks, one, exact):
    """Add what is wrong with the norms or losses."""
    # A number of one process may be close by luck, but its gradients are not. A loss is a mean over many tokens, whose
    # roundings average out.
    key, share, found_one = ('norms', 1, False) if kind == 'norm' else ('losses', 0.01, False)
    least = max(FLOOR, share * error(flat(one.gradients), flat(exact.gradients)))
    for step, (of_one, of_exact) in enumerate(zip(getattr(one, key), getattr(exact, key), strict=True)):
        # Every step adds roundings of its own, so their sum grows like the root of their number.
        tolerance = max(error(of_one, of_exact), least * math.sqrt(step + 1))
        for rank, record in enumerate(ranks):
            if step >= len(getattr(record, key)):
                continue
            found = getattr(record, key)[step]
            distance = error(found, of_exact)
            verdict.worst[kind] = max(verdict.worst[kind], distance / tolerance)
            if distance / tolerance > TIMES and not found_one:
                found_one = True
                cause = f'{found:.6g} on rank {rank}, {of_exact:.6g} in one process'
                if kind == 'norm' and step == 0 and not verdict.findings:
                    cause += cause_of_norm(found / of_exact, ranks, exact)
                verdict.findings.append(Finding(kind, f'step {step + 1}', distance, cause))


def flat(tensors):
    """One vector of all tensors of a dict, in float64."""
    return torch.cat([tensor.double().flatten() for tensor in tensors.values()])


# --- WHY --------------------------------------------------------------------------------------------------------------


def cause_of(got, want, places, parts, ranks, enough):
    """
    What explains a parameter's wrong gradient, in words.

    got, want: {rank: tensor} of the ranks that hold (a part of) it, float64. places: {rank: where that part lies}.
    parts: {(data rank, micro-step): whole gradient} of which the right one is the sum. ranks: of the run. enough: the
    relative error of an explanation that is accepted.
    """
    found, right = flat(got), flat(want)
    if not found.isfinite().all():
        return 'not finite'
    if not right.any():
        return 'has a gradient, where one process has none'
    if not found.any():
        return 'no gradient at all: detached (a collective that autograd does not know?), or its buffer is never sent'
    ratio = (found @ right / (right @ right)).item()
    if error(found, ratio * right) < enough * abs(ratio):
        return cause_of_factor(ratio, ranks)
    if said := cause_in_parts(found, right, places, parts, enough):
        return said
    factors = {
        rank: (of.flatten() @ want[rank].flatten() / want[rank].square().sum()).item() for rank, of in got.items()
    }
    right_ones = [rank for rank, of in got.items() if error(of, want[rank]) < enough]
    if right_ones:
        wrong_ones = [rank for rank in got if rank not in right_ones]
        return f'right on {in_words("rank", right_ones)}, wrong on {in_words("rank", wrong_ones)}'
    if said := cause_in_sums(got, want, places, ranks, enough):
        return said
    if all(factors[rank] and error(of, factors[rank] * want[rank]) < enough for rank, of in got.items()):
        each = ', '.join(f'{factor:.3g} on rank {rank}' for rank, factor in [*factors.items()][:4])
        return f'each rank has another factor: {each}'
    rows = [share_of_rows(of, want[rank], enough) for rank, of in got.items() if of.dim() and len(of) > 1]
    if rows and 0 < statistics.mean(rows) < 0.75:
        return f'{statistics.mean(rows):.0%} of its rows are wrong, the others are right'
    if 2**-11 < error(found, right) < 2**-8:
        return 'as far off as what is rounded to bfloat16 on its way, or a small part is missing'
    cosine = (found @ right / found.norm() / right.norm()).item()
    return f'another direction (cosine {cosine:.3f}): parts are missing, stale, or of other data'


def cause_of_factor(ratio, ranks):
    """What a gradient means that is `ratio` times the right one."""
    simple = as_simple(ratio, ranks)
    if simple is None:
        return f'{ratio:.4g} times the right one: divided by another number of tokens?'
    if ratio < 0:
        return f'{simple} times the right one: its sign is wrong'
    if simple.isdigit():
        return (
            f'{simple} times too large: summed over {simple} ranks where an average belongs, reduced twice, or a loss '
            f'that {simple} ranks report was counted {simple} times'
        )
    if simple.startswith('1/'):
        return f'{simple} of the right one: averaged over {simple[2:]} ranks where a sum belongs, or divided twice'
    return f'{simple} times the right one'


def as_simple(ratio, ranks):
    """'2', '1/4', '-1', 'sqrt(2)' or '1/sqrt(2)' for what is close to it; None for other numbers."""
    names = {f'{n}': n for n in range(1, max(16, ranks * ranks) + 1)}
    names |= {f'1/{n}': 1 / n for n in names.values()} | {f'-{n}': -n for n in names.values()}
    names |= {f'sqrt({n})': n**0.5 for n in range(2, ranks + 1)} | {
        f'1/sqrt({n})': n**-0.5 for n in range(2, ranks + 1)
    }
    return next((name for name, value in names.items() if abs(ratio / value - 1) < 2e-3), None)


def cause_in_parts(found, right, places, parts, enough):
    """Whether a gradient is a sum of the step's parts in which these count wrongly: of its micro-steps, its data ranks,
    or both. None if not."""
    for number, noun in ((1, 'micro-steps'), (0, 'data ranks'), (None, "data ranks' micro-steps")):
        groups = {}
        for label, whole in parts.items():
            key = label if number is None else label[number]
            groups[key] = groups.get(key, 0) + torch.cat(
                [part_at(of, whole).double().flatten() for of in places.values()]
            )
        if not 1 < len(groups) < len(found):
            continue
        columns = torch.stack([*groups.values()], 1)
        counts, shares = (torch.linalg.lstsq(columns, of[:, None]).solution[:, 0] for of in (found, right))
        fits = [error(columns @ of, whole) < enough for of, whole in ((counts, found), (shares, right))]
        if not all(fits):
            continue
        counts = [round(count, 3) + 0.0 for count in (counts / shares).tolist()]
        said = f'its {noun} count ' + ', '.join(f'{count:.3g}' for count in counts) + ' times'
        if noun == 'micro-steps':
            return f'{said}: what was accumulated before is reduced again, overwritten, or scaled in each backward'
        if all(counts):
            return f'{said}: a mean of means, where the mean over all targets belongs?'
        return f'{said}: some are never added, or others in their place'
    return None


def cause_in_sums(got, want, places, ranks, enough):
    """Whether the ranks hold parts of a sum that was not taken. None if not."""
    for size, how, groups in groups_of(ranks):
        for divisor, what, operation in ((1, 'parts of the sum', 'sum'), (size, 'gradients of their own data', 'mean')):
            explains = True
            for group in groups:
                here = [rank for rank in group if rank in got]
                same_part = len({str(places[rank]) for rank in here}) == 1
                explains &= len(here) in (0, size) and (not here or same_part)
                explains = explains and (not here or error(sum(got[r] for r in here) / divisor, want[here[0]]) < enough)
            if explains:
                return f'the ranks hold {what}: an all-reduce ({operation}) is missing over {size} ranks{how}'
    return None


def groups_of(ranks):
    """[(size, '' or which, [[rank, ...], ...])]: all ways to lay an axis over the ranks."""
    found = []
    for size in range(2, ranks + 1):
        if ranks % size == 0:
            found.append(
                (size, ' (neighbors)' if size < ranks else '', [[*range(i, i + size)] for i in range(0, ranks, size)])
            )
            if size < ranks:
                apart = ranks // size
                found.append(
                    (
                        size,
                        f' (every {apart}nd)' if apart == 2 else f' (every {apart}th)',
                        [[*range(i, ranks, apart)] for i in range(apart)],
                    )
                )
    return found


def share_of_rows(got, want, enough):
    """Which share of a tensor's rows is wrong."""
    distance, size = ((of.flatten(1) if of.dim() > 1 else of[:, None]).norm(dim=1) for of in (got - want, want))
    return (distance > enough * size.max()).double().mean().item()


def in_words(noun, numbers):
    """'rank 0', or 'ranks 0, 2'."""
    return f'{noun}{"s" if len(numbers) > 1 else ""} {", ".join(map(str, numbers))}'


def cause_of_norm(ratio, ranks, exact):
    """': ' and what a norm has counted that is `ratio` times the right one while all gradients are right; or ''."""

    def explains(other):
        return abs(other - ratio) < 0.05 * abs(ratio - 1)

    squares = {name: of.double().square().sum().item() for name, of in exact.gradients.items()}
    total = sum(squares.values())
    cut = {name for record in ranks for name, place in record.places.items() if place is not None}
    holders = {name: sum(name in record.places for record in ranks) for name in squares}
    whole = {name for name, number in holders.items() if number > 1 and name not in cut}
    for what, names in (('what several ranks hold whole', whole), ('what is cut', cut)):
        share = sum(squares.get(name, 0) for name in names) / total
        for n in range(2, len(ranks) + 1):
            for factor, text in ((n, f'{n} times'), (1 / n, f'1/{n} times')):
                if share and explains(math.sqrt(1 - share + factor * share)):
                    return f': counts {what} {text}'
    for rank, record in enumerate(ranks):
        own = sum(
            part_at(record.places[name], exact.gradients[name]).double().square().sum().item() for name in record.places
        )
        if explains(math.sqrt(own / total)):
            return f': counts only what rank {rank} holds; an all-reduce of the squares is missing'
    together = math.sqrt(sum(record.norms[0] ** 2 for record in ranks))
    if len(ranks) > 1 and abs(together / exact.norms[0] - 1) < 1e-4:
        return ': each rank has the norm of its own shards; an all-reduce of the squares is missing'
    simple = as_simple(ratio, len(ranks))
    return f': {simple} times the right one' if simple else ''
