"""
Answers that a model writes while it is trained, and what they are worth: the data of train_grpo.py. train_distill.py
learns from such answers, too, and has no rewards.

    open_prompts(run)                                      # run.train_data is a Prompts: the rows that --prompts names
    groups = write_groups(model, run, step, beat)          # [[Answer, ...] of each prompt of this rank in this step]
    batches = micro_batches(documents, run)                # prompts with their answers, packed into rows to learn from

An answer is a pure function of the weights, the seed, the step, the place of its prompt in the step, and its number.
So checkpoints hold no answers: a resumed run writes those again that an uninterrupted one would have written.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from dataset.packed import pack
from dataset.shuffle import permuted
from evaluation import generating, in_run, sampling
from evaluation.reward import RewardError, is_function, open_reward
from evaluation.tasks import line_of_room, prompts_of, read_task
from layout import counted
from model import generator_of
from runtime.log import cut_rows
from runtime.opened import language_of_run
from system import collectives
from system.files import no_link
from text.control_tokens import plain

FILE = 'rollouts.jsonl'  # in out_dir


# --- PROMPTS ----------------------------------------------------------------------------------------------------------


class Prompts:
    """The rows of some task files, in the place of data.Mixture. Sample i of a run is one of them, by a shuffle."""

    is_chat = is_packed = is_pairs = False  # nothing of these is read: documents are made in each step
    longest, padding, filled, changes = 0, 0.0, 1.0, ()

    def __init__(self, config, encoder, pretrained):
        self.encoder, self.names, self.sources = encoder, config.prompts, [self]
        chat, notes = encoder.chat_for('prompts_chat', config.prompts_chat)
        config.prompts_chat = chat is not None
        reward, self.is_judged = vars(config).get('reward'), 'reward' in vars(config)
        self.own_reward = open_reward(reward) if is_function(reward) else None
        judge = self.own_reward if self.is_judged else no_reward  # beside which a row needs no answer
        self.items, self.prompts, self.notes = [], [], notes  # of each row: what was read, and a tasks.Prompt
        for path in config.prompts:
            task = read_task(path, config.num_fewshot, chat=chat, reward=judge, chat_key='prompts_chat')
            if task.form != 'prompt':
                raise ValueError(f'prompts={path}: rows with {task.form}; expected {{"prompt": ..., "answer": ...}}')
            for item in task.items:
                item.max_new_tokens = config.max_new_tokens or item.max_new_tokens
            requests = prompts_of(task, encoder, config.block_size)
            if pretrained:
                in_run.refuse_tokens_beyond(pretrained.vocab_size, [task], [requests])
            self.notes += [*([task.note] if task.note else []), *line_of_room(task, requests)]
            self.items += task.items
            self.prompts += [prompt for (prompt,) in requests]
        self.reward = reward_of(self.items, reward) if self.is_judged and not self.own_reward else reward
        self.n_windows, self.vocab_size = len(self.items) * config.num_generations, None  # sequences of an epoch
        self.steps_line = (
            f'a step takes {config.prompts_per_step:,} of them and writes {counted(config.num_generations, "answer")} '
            f'to each{", by the chat template" if chat else ""}{f"; the reward is {self.reward}" * self.is_judged}'
        )
        # A row holds at most so many answers, and padding behind them.
        self.n_starts = config.block_size // min(len(prompt.tokens) for prompt in self.prompts) + 1
        self.has_starts = config.packing
        rows = [(prompt, item.row or item.rule) for prompt, item in zip(self.prompts, self.items, strict=True)]
        self.fingerprint = hashlib.sha256(repr(rows).encode()).hexdigest()[:16]

    def plan(self, max_iters, global_batch_size):
        """As of a Mixture, for a checkpoint."""
        return [[0, {self.fingerprint: '1'}]]

    def lines(self):
        return [
            *self.notes,
            f'{", ".join(self.names)}: {counted(len(self.items), "prompt")}; {self.steps_line}',
        ]

    def epochs(self, n):
        return {}


def no_reward(text, item):
    """In the place of a reward of one's own, for scripts without any."""


def reward_of(items, wanted):
    """The name of the score that is the reward. Raises ValueError if it is not one of each row's rule."""
    for item in items:
        scores = [*item.rule.judge('')]
        if wanted is None and len(scores) > 1:
            raise ValueError(f'{item.place}: rule={item.rule.name} has several scores: name one, --reward={scores[0]}')
        wanted = wanted or scores[0]
        if wanted not in scores:
            raise ValueError(
                f'reward={wanted}: {item.place} has rule={item.rule.name}, which scores {", ".join(scores)}: for '
                f'a function of yours --reward=FILE.py:FUNCTION, else use --reward={scores[0]}'
            )
    return wanted


def open_prompts(run):
    """Read what --prompts names, in the place of a dataset; fill in global_batch_size and eval_sequences. Raises
    ValueError for keys that do not fit."""
    config, answers = run.config, run.config.prompts_per_step * run.config.num_generations
    if not config.prompts:
        raise ValueError(
            'no prompts: name files of tasks, as --prompts=tasks/gsm8k.fewshot.jsonl; `python prepare_data.py '
            '--tasks=gsm8k` makes this one, and docs/evaluate.md says what their rows look like'
        )
    if config.init_from == 'scratch':
        raise ValueError(
            'init_from=scratch: it would write noise, from which nothing is learned: give the --init_from of a model '
            'that has learned to answer'
        )
    if config.eval_only:
        raise ValueError('eval_only=True: use `python evaluate.py --out_dir=... --tasks=...`, which scores any run')
    if config.strategy == 'fsdp' and config.fsdp_impl == 'manual' and config.zero_stage == 3:
        raise ValueError(
            'fsdp_impl=manual with zero_stage=3: its blocks have room for one at a time, so each token of an answer '
            'would gather all weights anew: use --zero_stage=2, or --fsdp_impl=torch'
        )
    of_rank, rest = divmod(config.prompts_per_step, run.world_size)
    if rest:
        nearest = [n * run.world_size for n in (of_rank, of_rank + 1) if n > 0]
        raise ValueError(
            f'prompts_per_step={config.prompts_per_step} is not a multiple of {counted(run.world_size, "rank")}, and '
            f'all answers to a prompt are of one rank: use --prompts_per_step={" or ".join(map(str, nearest))}'
        )
    answers_of_rank = answers // run.world_size
    if answers_of_rank % config.batch_size:
        divisors = [n for n in range(1, answers_of_rank + 1) if answers_of_rank % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - config.batch_size))
        raise ValueError(
            f'batch_size={config.batch_size} does not divide the {answers_of_rank} answers of a rank in a step, which '
            f'are prompts_per_step x num_generations / ranks: use --batch_size={nearest}'
        )
    config.global_batch_size, config.eval_sequences, config.eval_iters = answers, 0, None
    run.train_data = Prompts(config, language_of_run(run), run.pretrained)


# --- ANSWERS ----------------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    prompt: int  # its number
    ids: list  # what was drawn, with the token that ended it
    logps: list  # the log-probability of each of them, as it was drawn; [] in a script without rewards
    text: str  # without what ended it
    reward: float | None  # None in a script without rewards
    is_cut: bool  # it was still going on after max_new_tokens


def write_groups(model, run, step, beat):
    """[[Answer, ...] of each prompt] that this rank writes in a step: num_generations to each of its prompts.

    model: without DDP around it, on ranks whose passes need no others (fsdp.gathered). beat: called before each forward
    pass. Compiled models run in eager mode here, since shapes vary. Collective where it ends. Raises ValueError on all
    ranks if one of them computes what is not finite, or if a reward of one's own fails.
    """
    config, prompts, G = run.config, run.train_data, run.config.num_generations
    of_rank = config.prompts_per_step // run.world_size
    first = step * config.prompts_per_step + run.rank * of_rank
    slots = np.arange(first, first + of_rank)  # slot j of step s of the run is s * prompts_per_step + j
    numbers = permuted(slots, len(prompts.items), config.seed)
    asked = [
        (number, f'prompt {slot} of the run, answer {k}')
        for slot, number in zip(slots.tolist(), numbers.tolist(), strict=True)
        for k in range(G)
    ]
    problem, answers = None, []
    hook = model.register_forward_pre_hook(lambda *_: beat())
    try:
        with torch.compiler.set_stance('force_eager') if config.compile else contextlib.nullcontext():
            answers = answers_to(asked, model, prompts, config)
    except (sampling.NotFinite, RewardError) as error:
        problem = str(error)
    hook.remove()
    collectives.raise_together(problem)
    return [answers[n : n + G] for n in range(0, len(answers), G)]


def answers_to(asked, model, prompts, config):
    """[Answer to each of `asked`]: (the number of a prompt, what the random numbers of the answer depend on)."""
    requests, answers = [prompts.prompts[number] for number, _ in asked], [None] * len(asked)
    for places in generating.batches_of(requests, config.generation_batch_size or len(asked)):
        _, stop, longest = requests[places[0]]
        logps = [[] for _ in places]
        stop_tokens = {*prompts.encoder.stop_tokens, *prompts.encoder.tokens_spelled(stop)}
        found = sampling.generate_batch(
            model, [requests[place].tokens for place in places], longest, stop_tokens, temperature=config.temperature,
            generators=[generator_of(config.seed, asked[place][1]) for place in places],
            stop=functools.partial(generating.ends, stop=stop, encoder=prompts.encoder) if stop else None,
            keep_stop=True, logps=logps if prompts.is_judged else None,
        )  # fmt: skip
        for place, *drawn in zip(places, found, logps, strict=True):
            answers[place] = answer_of(prompts, asked[place][0], *drawn, stop, stop_tokens)
    return answers


def answer_of(prompts, number, ids, logps, stop, stop_tokens):
    """The Answer to a prompt, of the ids that were drawn: judged up to the first of the texts `stop`."""
    ended = ids[-1] in stop_tokens
    text = prompts.encoder.decode(ids[:-1] if ended else ids)
    ended = ended or any(end in text for end in stop)
    for end in stop:
        text = text.partition(end)[0]
    item, own = prompts.items[number], prompts.own_reward
    reward = None
    if prompts.is_judged:
        reward = own(text, item) if own else float(item.rule.judge(text)[prompts.reward])
    return Answer(number, ids, logps, text, reward, not ended)


# --- WHAT ONE SEES ----------------------------------------------------------------------------------------------------


class Record:
    """What is counted of the answers, for the rows of metrics.jsonl, under the names that TRL gives these numbers; and
    in out_dir/rollouts.jsonl some of the answers, to read."""

    def __init__(self, run, step, say):
        self.run, self.say, self.said = run, say, set()
        self.path = os.path.join(run.config.out_dir, FILE)
        if run.rank == 0:
            cut_rows(Path(self.path), step)  # what an interrupted run has written beyond its checkpoint

    def begin_step(self, groups):
        """Count the answers of this rank in a step. groups: of write_groups()."""
        answers = sum(groups, [])
        tokens, cut = sum(len(answer.ids) for answer in answers), sum(answer.is_cut for answer in answers)
        numbers = [tokens, cut]
        if self.run.train_data.is_judged:
            rewards = torch.tensor([[answer.reward for answer in group] for group in groups], dtype=torch.float64)
            spread = rewards.std(1)
            numbers += [rewards.sum(), spread.sum(), (spread == 0).sum()]
        self.of_answers = torch.tensor(numbers, dtype=torch.float64)
        self.facts, self.of_tokens = (), torch.zeros(1, dtype=torch.float64, device=self.run.device)
        self.largest = {}

    def add(self, facts, largest=None):
        """Count the tokens of a micro-batch. facts: {name in a row of their mean: a number of each token}. largest: the
        same for numbers from 0 on of which a row has the largest."""
        self.facts, values = [*facts], [*facts.values()]
        sums = [value.detach().double().sum() for value in values]
        self.of_tokens = self.of_tokens + torch.stack([*sums, sums[0].new_tensor(len(values[0]))])
        for name, numbers in (largest or {}).items():
            before = self.largest.get(name, numbers.new_zeros(1))
            self.largest[name] = torch.cat([before, numbers]).amax(0, keepdim=True)

    def row(self, step, groups):
        """The numbers of a step for metrics.jsonl; also writes down the first group. Collective."""
        config = self.run.config
        dist.all_reduce(self.of_answers)
        dist.all_reduce(self.of_tokens)
        for values in self.largest.values():
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        tokens, cut, *of_rewards = self.of_answers.tolist()
        *of_tokens, learned = self.of_tokens.tolist()
        n_prompts, n_answers = config.prompts_per_step, config.prompts_per_step * config.num_generations
        row = {}
        if of_rewards:
            rewards, spread, without_spread = of_rewards
            row |= {
                'reward': rewards / n_answers,
                'reward_std': spread / n_prompts,
                'frac_reward_zero_std': without_spread / n_prompts,
            }
        row |= {'completions/mean_length': tokens / n_answers, 'completions/clipped_ratio': cut / n_answers}
        if learned:
            row |= {name: value / learned for name, value in zip(self.facts, of_tokens, strict=True)}
            row |= {name: values.item() for name, values in self.largest.items()}
        if row.get('frac_reward_zero_std') == 1:
            self.warn(
                'equal',
                f'step {step}: all answers to a prompt have the same reward, {row["reward"]:.3g} on average, and '
                'nothing is learned: take easier prompts or harder ones, or more --num_generations',
            )
        if row['completions/clipped_ratio'] > 0.5:
            self.warn(
                'cut',
                f'step {step}: {row["completions/clipped_ratio"]:.0%} of the answers are cut at max_new_tokens: allow '
                'more, or see in rollouts.jsonl why they do not end',
            )
        if self.run.rank == 0:
            prompt = plain(self.run.train_data.items[groups[0][0].prompt].pairs[0][0])
            answers = [{'text': one.text} | ({'reward': one.reward} if of_rewards else {}) for one in groups[0]]
            try:
                with open(self.path, 'a', encoding='utf-8', opener=no_link) as file:
                    file.write(json.dumps({'step': step, 'prompt': prompt, 'answers': answers}) + '\n')
            except OSError as error:  # as of the log: whether the run goes on is for its checkpoints to decide
                self.warn('file', f'lines are missing in {self.path} from step {step} on: {error}')
        return row

    def warn(self, kind, line):
        if kind not in self.said:  # once is enough
            self.say(f'WARNING: {line}')
        self.said.add(kind)


# --- ROWS -------------------------------------------------------------------------------------------------------------


def as_written(prompt, answer, *values, turning_point):
    """A document as those in which each token is learned from what it was drawn from. They are two if the answer has
    grown beyond the turning point of LongRoPE (rotation.py), since all of a text is computed in another way then."""
    values = [np.broadcast_to(value, len(answer)) for value in values]
    drawn = turning_point + 1 - len(prompt)  # tokens of the answer, from texts of at most turning_point tokens
    if not 0 < drawn < len(answer):
        return [(prompt, answer, *values)]
    first, rest = ([of[part] for of in (answer, *values)] for part in (slice(drawn), slice(drawn, None)))
    return [(prompt, *first), ([*prompt, *first[0]], *rest)]


def micro_batches(documents, run, n_values=3):
    """
    Documents packed into rows, batch_size rows at a time, and equally many batches on every rank: a list of
    (x, y, starts, *values). Collective.

    documents: [(ids of the prompt, ids of the answer, *values)], with n_values values: a number, such as an advantage,
    or one for each id of the answer.
    x, y: int64 (batch_size, block_size), y -1 where nothing is learned. starts: int64 (batch_size, M), where each
    document begins; None without packing. values: fp32 of each target y >= 0, in the order of y[y >= 0].
    """
    config, T = run.config, run.config.block_size
    turning_point = run.pretrained.turning_point if run.pretrained else math.inf
    documents = [part for document in documents for part in as_written(*document, turning_point=turning_point)]
    sizes = np.array([len(prompt) + len(answer) - 1 for prompt, answer, *_ in documents], dtype=np.int64)
    order, bins = pack(sizes, T) if config.packing else (np.arange(len(sizes)), np.arange(len(sizes)))
    rows = [order[bins == bin] for bin in range(int(bins.max(initial=-1)) + 1)]
    most = torch.tensor(max(1, -(-len(rows) // config.batch_size)))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    batches = []
    for first in range(0, most.item() * config.batch_size, config.batch_size):
        x = np.zeros((config.batch_size, T), dtype=np.int64)
        y, per_target = np.full_like(x, -1), np.zeros((n_values, *x.shape), dtype=np.float32)
        starts = np.full((config.batch_size, run.train_data.n_starts), T)
        starts[:, 0] = 0
        for row, numbers in enumerate(rows[first : first + config.batch_size]):
            at = 0
            for place, number in enumerate(numbers):
                prompt, answer, *values = documents[number]
                ids, starts[row, place] = [*prompt, *answer], at
                end, learned = at + len(ids) - 1, at + len(prompt) - 1
                x[row, at:end], y[row, learned:end] = ids[:-1], answer
                per_target[:, row, learned:end] = np.reshape(values, (n_values, len(answer)))
                at = end
            if at < T and at:  # padding is a document, too
                starts[row, len(numbers)] = at
        per_target = per_target[:, y >= 0]
        parts = (x, y, starts, *per_target)
        x, y, starts, *values = (torch.from_numpy(part).to(run.device) for part in parts)
        batches.append((x, y, starts if config.packing else None, *values))
    return batches
