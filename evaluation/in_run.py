"""
Scores on tasks (see evaluation/tasks.py), for evaluate.py and during a training run.

    tasks = tasks_of(keys, layout, language, pretrained, device)    # before the run begins: read and tokenize them
    row.update(tasks.scores(model, step, log.say, watchdog.at))  # {'piqa/acc': 0.52, 'piqa/acc_stderr': 0.01, ...}
"""

import math
import time

import torch
import torch.distributed as dist

from evaluation import generating, scoring
from evaluation.reward import RewardError, is_function, open_reward
from evaluation.sampling import NotFinite, not_finite
from evaluation.tasks import line_of_room, read_task, requests_of, scores_of, scores_of_answers
from huggingface import finetune
from layout import counted
from system import collectives
from system.processes import unwrapped


class Evaluation:
    """
    Tasks read from files, ready to be scored.

    encoder: one of evaluation.tasks. window: how many tokens the model sees. pretrained: the model's
    Pretrained, or None. batch_size: requests per rank and forward pass. tokens_at_once: of answers more are
    written at once, if they and their prompts have no more tokens than that. ranks_per_batch: how many ranks compute
    each batch together. as_chat: write the items with the tokenizer's chat template; None = if the model has learned
    conversations. chat_key: the script's key for that. reward: a Reward, by which prompts are judged, too. options: for
    tasks.read_task(). Raises ValueError for a bad row, and for a choice or a prompt that is longer than the window.
    """

    def __init__(
        self, files, encoder, window, pretrained, batch_size, device, tokens_at_once=0, ranks_per_batch=1,
        as_chat=None, chat_key='apply_chat_template', reward=None, **options,
    ):  # fmt: skip
        if as_chat is None and options.get('protocol') == 'core':  # which knows no template
            as_chat = False
        chat, notes = encoder.chat_for(chat_key, as_chat)
        self.tasks = [read_task(file, reward=reward, chat=chat, chat_key=chat_key, **options) for file in files]
        self.reward, self.notes = reward, notes + [task.note for task in self.tasks if task.note]
        names = [task.name for task in self.tasks]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f'two files of tasks are called {twice[0]}: their scores would have one name; rename one')
        self.requests = [requests_of(task, encoder, window) for task in self.tasks]
        self.notes += sum(map(line_of_room, self.tasks, self.requests), [])
        if pretrained:
            refuse_tokens_beyond(pretrained.vocab_size, self.tasks, self.requests)
        written = next((task for task in self.tasks if task.form == 'prompt'), None)
        if written and ranks_per_batch > 1:
            given = f'tensor_parallel={ranks_per_batch}: {written.name} has prompts, whose answers come token by token'
            raise ValueError(
                f'{given}, which cannot be cut over ranks: leave it to `python evaluate.py`, after the run'
            )
        self.batch_size, self.device, self.encoder = batch_size, device, encoder
        self.ranks_per_batch, self.tokens_at_once = ranks_per_batch, tokens_at_once
        # The attention that these scripts give transformers' models reaches sliding_window tokens back.
        text = pretrained.config.get_text_config() if pretrained else None
        self.longest = min(window, getattr(text, 'sliding_window', None) or window)

    def run(self, model, bars=False, beat=lambda: None):
        """Yield (task, {score: value}, line to print, [result of each item]) for each task. The result of an item is
        its log-likelihoods (see scoring.py), or what the model has written with its scores. Collective.

        The model may be wrapped or sharded, and is put into eval mode meanwhile. Scores that are not finite are left
        out. bars: draw a progress bar for each task. beat: called before each forward pass. Raises NotFinite if a
        score would be made of what is not finite, and RewardError."""
        raw_model, was_training = unwrapped(model), model.training
        for task, requests in zip(self.tasks, self.requests, strict=True):
            began, bar = time.perf_counter(), task.name if bars else None
            model.eval()
            try:
                with finetune.weights_in_compute_dtype(raw_model):
                    found, scores = self.found(model, task, requests, bar, beat)
            finally:
                model.train(was_training)
            rate = sum(map(len, requests)) / (time.perf_counter() - began)
            in_words = ', '.join(score_in_words(name, *score) for name, score in scores.items())
            rate_in_words = f'{rate:.2f} answers/s' if task.form == 'prompt' else f'{rate:,.0f} requests/s'
            how = ', by the chat template' if task.is_chat else ', without the chat template'
            how = how if self.encoder.has_template else ''
            line = f'{task.name}: {in_words} ({counted(len(task.items), "item")}{how}, {rate_in_words})'
            numbers = {name: value for name, (value, _) in scores.items()}
            numbers |= {f'{name}_stderr': error for name, (_, error) in scores.items()}
            yield task, {name: value for name, value in numbers.items() if math.isfinite(value)}, line, found

    def found(self, model, task, requests, bar, beat):
        """([result of each item, as in run()], {score: (value, standard error)})."""
        if task.form == 'prompt':
            prompts = [prompt for (prompt,) in requests]
            longest = max(len(prompt.tokens) + prompt.max_new_tokens for prompt in prompts)
            at_once = max(self.batch_size, self.tokens_at_once // longest)
            texts = generating.write_answers(model, prompts, self.encoder, at_once, self.device, bar, beat)
            judged = self.judged(task.items, texts)
            found = [{'written': text, **scores} for text, scores in zip(texts, judged, strict=True)]
            return found, scores_of_answers(judged)
        config = unwrapped(model).config
        # Rows with branches (see scoring.py) need these scripts' attention: transformers' own would mix the branches.
        shares = getattr(config, '_attn_implementation', finetune.ATTENTION) == finetune.ATTENTION
        options = (self.longest, self.batch_size, self.device, shares, bar, beat, self.ranks_per_batch)
        found = scoring.log_likelihoods(model, requests, *options)
        nats, greedy = ([[pair[n] for pair in item_results] for item_results in found] for n in (0, 1))
        bad = [item.place for item, sums in zip(task.items, nats, strict=True) if not all(map(math.isfinite, sums))]
        if bad:
            raise not_finite(f'{bad[0]}, and {len(bad) - 1:,} more of {len(nats):,} items: log-likelihoods are', model)
        return found, scores_of(task, requests, nats, greedy)

    def judged(self, items, texts):
        """[{name of a score: value} of the text to each item], each judged on one rank: a reward may take long, and a
        time limit may end the work of one rank alone."""
        rank, world_size, problem, judged = dist.get_rank(), dist.get_world_size(), None, []
        try:
            for item, text in [*zip(items, texts, strict=True)][rank::world_size]:
                judged.append(item.judge(text, self.reward))
        except RewardError as error:
            problem = str(error)
        collectives.raise_together(problem)
        of_ranks = [None] * world_size
        dist.all_gather_object(of_ranks, judged)
        return [of_ranks[number % world_size][number // world_size] for number in range(len(items))]

    def scores(self, model, step, say, at):
        """{'task/score': value} for the metrics of `step`. Calls say(line) for each task, and at('evaluation', step)
        before each forward pass. Collective. Compiled models run in eager mode here, since shapes vary. What is not
        finite is a warning: whether such a run goes on is for its losses to decide."""
        row = {}
        with torch.compiler.set_stance('force_eager'):
            try:
                for task, numbers, line, _ in self.run(model, beat=lambda: at('evaluation', step)):
                    say(f'step {step} | {line}')
                    row |= {f'{task.name}/{name}': value for name, value in numbers.items()}
            except NotFinite as error:
                say(f'step {step} | WARNING: no more scores: {error}')
        return row


def score_in_words(name, value, error):
    """'acc 0.5000 ± 0.0500'; of a single item there is no error to print."""
    return f'{name} {value:.4f}' + (f' ± {error:.4f}' if math.isfinite(error) else '')


def refuse_tokens_beyond(vocab_size, tasks, requests):
    """Raise ValueError for a token without a row in the embedding: a tokenizer can have more tokens than its model."""
    for task, task_requests in zip(tasks, requests, strict=True):
        for item, item_requests in zip(task.items, task_requests, strict=True):
            largest = max(max(request.tokens) for request in item_requests)
            if largest >= vocab_size:
                given = f'{item.place}: its text has the token {largest}, the model {vocab_size} rows in its embedding'
                raise ValueError(f'{given}: leave out what spells that token, or take the tokenizer of the model')


def tasks_of(keys, layout, language, pretrained, device):
    """The Evaluation of a train script's eval_tasks, in train_grpo.py with as many examples as its prompts have. Raises
    ValueError as Evaluation does."""
    own = keys.get('reward') if is_function(keys.get('reward')) else None
    tokens_at_once = keys['batch_size'] * keys['block_size']  # where a step has room, their cached keys and values have
    return Evaluation(
        keys['eval_tasks'], language, keys['block_size'], pretrained, keys['batch_size'], device, tokens_at_once,
        ranks_per_batch=layout.tensor, as_chat=keys['eval_tasks_chat'], chat_key='eval_tasks_chat',
        limit=keys['eval_tasks_limit'], num_fewshot=keys.get('num_fewshot'), reward=own and open_reward(own),
    )  # fmt: skip
