"""
Train a language model by the rewards of what it writes: group relative policy optimisation (GRPO, arXiv 2402.03300).

    python prepare_data.py --tasks=gsm8k                              # word problems with their answers
    torchrun --nproc_per_node=4 train_grpo.py config/grpo_chat.py --init_from=models/NAME
    python train_grpo.py --help                                       # every key with its default and meaning

In each step the model writes several answers to each of some prompts, and a rule says which of them are right. Answers
that are better than the others to the same prompt become more likely. The model is trained as in train_ddp.py or
train_fsdp.py, by the key `strategy`, and `diff train_dpo.py train_grpo.py` shows what is new: the model writes its own
data. docs/grpo.md says what one sees in a run, and what goes wrong.
"""

import functools
import math
from typing import Literal

from configurator import configure
from keys import Keys, ShardingKeys, TaskKeys


# --- KNOBS ------------------------------------------------------------------------------------------------------------
class Config(Keys, TaskKeys, ShardingKeys):
    # optimizer [result]
    learning_rate = 1e-6  # peak: for all weights of a large model; LoRA bears ten times as much [> 0]
    max_iters = 10000  # steps; in each the model writes once and is updated num_iterations times [>= 1]
    num_epochs: float | None = 1.0  # passes over prompts: sets max_iters, unless that is given [result, per job, > 0]
    # schedule [result]
    warmup_iters = 10  # linear warm-up: longer if the loss jumps early [>= 0]
    # grpo [result]
    prompts = []  # task files with prompts, as evaluate.py reads them: tasks/a.jsonl,b.jsonl [result, per job, path]
    prompts_chat: bool | None = None  # write prompts as messages; None = if init_from has learned conversations
    num_fewshot: int | None = None  # solved examples before prompts and eval_tasks; None = as the file says [>= 0]
    reward: str | None = None  # a score of the rule, None = its only one; or FILE.py:FUNCTION of yours [result, path]
    prompts_per_step = 32  # of all ranks: more = less noise [>= 1]
    num_generations = 8  # answers to each prompt, which are compared with each other [>= 2]
    max_new_tokens: int | None = None  # of an answer; None = as the rows say, or what prompts leave, up to 256 [>= 1]
    temperature = 1.0  # of the answers; lower = they differ less, and there is less to learn [> 0]
    generation_batch_size: int | None = None  # answers that a rank writes at once; None = all [per job, >= 1]
    mask_truncated = False  # learn nothing from answers that max_new_tokens has cut
    scale_rewards: Literal['none', 'group'] = 'none'  # group: advantages in standard deviations of the prompt's rewards
    loss_type: Literal['dapo', 'dr_grpo', 'grpo'] = 'dapo'  # what a token of a long answer weighs; docs/grpo.md
    num_iterations = 1  # updates from the same answers: more = cheaper, and further from what has written them [>= 1]
    sampled_logps: Literal['none', 'old', 'tis'] = 'none'  # always logged; old: the ratio's denominator; tis: weights
    epsilon = 0.2  # of ratios: a token's probability may fall by this share, then it is left alone [> 0, < 1]
    epsilon_high = 0.28  # of ratios: it may rise by this share [> 0]
    # strategy
    strategy: Literal['ddp', 'fsdp'] = 'ddp'  # each rank holds the whole model, or a slice of each weight [per job]
    # fsdp [per job]
    replicate_size = 1  # HSDP: copies of the sharded model, e.g. one per node; their gradients are averaged [>= 1]


# ----------------------------------------------------------------------------------------------------------------------
config, explicit = configure(Config)  # config files and --key=value; before `import torch`, so --help is quick

import torch
import torch.distributed as dist

import optim
import strategy
from logprobs import token_logps
from runtime.begin import begin, make_model, order_buckets
from runtime.reference import refuse_other_losses
from runtime.rollouts import Record, micro_batches, write_groups
from runtime.watch import Watch

run = begin(config, explicit, config.strategy, learns_from='prompts')  # every key that the run needs now has a value
refuse_other_losses(run)
run.join()  # --dry_run ends here; else init_process_group, and find the checkpoint to resume from
rank, world_size, device = run.rank, run.world_size, run.device

# --- MODEL AND WEIGHTS ------------------------------------------------------------------------------------------------
raw_model = make_model(run)  # on the meta device; activation checkpointing and compilation come before sharding
model = strategy.parallelize(raw_model, run)  # with fp32 master weights; under FSDP each rank keeps its slice

# --- OPTIMIZER --------------------------------------------------------------------------------------------------------
opt = strategy.optimizer(raw_model, run)
scaler = torch.amp.GradScaler(device.type, enabled=run.compute_dtype == torch.float16)
step, state = run.resume(raw_model, opt, scaler)


# --- THE LOSS ---------------------------------------------------------------------------------------------------------
TIS_CAP = 2.0  # truncated importance sampling: how much more a token may count (fengyao.notion.site/off-policy-rl)
MISMATCH = 'sampling/sampling_logp_difference'  # TRL's name


def advantages_of(rewards):
    """By how much each answer is better than the mean of those to the same prompt: (P, G) -> (P, G). This is the whole
    estimate of its value: where PPO trains a second model for it, GRPO writes several answers."""
    ahead = rewards - rewards.mean(1, keepdim=True)
    if config.scale_rewards == 'group':  # as in the paper; it favors prompts that are nearly always right or wrong
        ahead = ahead / (rewards.std(1, keepdim=True) + 1e-4)  # as in TRL; without it equal rewards would be 0 / 0
    return ahead


def weight_of(n, n_tokens, longest):
    """What a token counts in an answer of n tokens. n_tokens: of all answers of the step to learn from, on all ranks.
    longest: how many tokens an answer can have.

    dapo (arXiv 2503.14476): all tokens alike. grpo: all answers alike, so that a token of a long wrong answer costs
    little, and wrong answers grow. dr_grpo (arXiv 2503.20783): as dapo, but the sum does not depend on the lengths.
    """
    answers = config.prompts_per_step * config.num_generations
    if config.loss_type == 'dapo':
        return 1 / n_tokens
    return 1 / (answers * (n if config.loss_type == 'grpo' else longest))


def losses_of_tokens(logps, old, sampled, advantages):
    """The loss of each token, and whether it was clipped: (n) both. logps: its log-probability now; old: in the first
    iteration, under the weights that wrote it; sampled: as the sampler computed it, which differs by rounding only.

    The gradient of the ratio is that of logps while both are equal, as in the first update: then this is the policy
    gradient, REINFORCE with a baseline. In later ones the ratio says how far the model has moved, and beyond epsilon a
    token that would move on is left alone (PPO, arXiv 1707.06347; with two epsilons as in DAPO).
    """
    ratio = (logps - (sampled if config.sampled_logps == 'old' else old)).exp()
    kept = ratio.clamp(1 - config.epsilon, 1 + config.epsilon_high)
    losses = -torch.min(ratio * advantages, kept * advantages)
    if config.sampled_logps == 'tis':  # so that the expected gradient is that of the distribution that is trained
        losses = losses * (old - sampled).exp().clamp(max=TIS_CAP)
    return losses, kept * advantages < ratio * advantages


watch = Watch(run, step, state)  # whatever only observes: log, clock, watchdog
watch.self_test(model, raw_model)


# --- LOOP -------------------------------------------------------------------------------------------------------------
def save(step):
    watch.save(step, raw_model, opt, scaler.state_dict())


watch.begin_training(model, save, also_log=getattr(model, 'communication', None))  # fsdp_manual.py counts bytes
record = Record(run, step, watch.say)  # only counts: numbers of the answers, and some to read in rollouts.jsonl
prompts = run.train_data.prompts
longest = max(prompt.max_new_tokens for prompt in prompts)  # of answers to all prompts: the same in each step
if step == 0 and run.tasks:
    watch.log.row(0, watch.scores(0))  # to compare with
numbers = watch.numbers  # all else in watch only observes; this decides whether a step is skipped (health.py)
order_buckets(model, opt, run)  # so that a resumed run adds up gradients in the order of an uninterrupted one
while step < config.max_iters and not watch.must_stop:
    lr = optim.learning_rate_at(step, config)
    for group in opt.param_groups:
        group['lr'] = lr * group['lr_factor']  # lr_factor is 1 unless parametrization is mup or completep

    # The model writes: all answers to a prompt on one rank. Answers have different lengths, so ranks make different
    # numbers of forward passes; under FSDP the weights are gathered once before, and stay whole meanwhile.
    watch.begin_step(step)
    watch.mark('rollout')
    with strategy.whole_weights(model, run) as writer:
        beat = functools.partial(watch.at, 'rollout', step + 1)  # a rank that still writes does not hang
        groups = write_groups(writer, run, step, beat)  # [[Answer] of each of its prompts]
    record.begin_step(groups)
    advantages = advantages_of(torch.tensor([[answer.reward for answer in group] for group in groups]))
    to_learn = [
        (answer, advantage)
        for answer, advantage in zip(sum(groups, []), advantages.flatten().tolist(), strict=True)
        if not (config.mask_truncated and answer.is_cut)
    ]
    n_tokens = torch.tensor(sum(len(answer.ids) for answer, _ in to_learn))
    dist.all_reduce(n_tokens)
    n_tokens = n_tokens.item()
    documents = [
        (
            prompts[answer.prompt].tokens,
            answer.ids,
            answer.logps,
            advantage,
            weight_of(len(answer.ids), n_tokens, longest),
        )
        for answer, advantage in to_learn
        if advantage  # without it there is no gradient; but in n_tokens such answers count
    ]
    batches = micro_batches(documents, run)  # packed into rows; equally many batches on each rank

    old = [None] * len(batches)  # log-probabilities of the first iteration: under the weights that wrote the answers
    for iteration in range(config.num_iterations):
        step_loss = torch.zeros((), device=device)
        for micro_step, (x, y, starts, sampled, advantage, weight) in enumerate(batches):
            # Gradients add up locally until the last micro-step's backward averages them; see strategy.py.
            strategy.sync_gradients(model, run, last_micro_step=micro_step == len(batches) - 1)
            watch.mark('forward')
            logps = token_logps(model, x, y, starts, config.temperature)
            if iteration == 0:
                old[micro_step] = logps.detach()
            losses, clipped = losses_of_tokens(logps, old[micro_step], sampled, advantage)
            loss = (losses * weight).sum()
            watch.mark('backward')
            # The weights sum up over all ranks, and gradients are averaged over them: hence world_size.
            scaler.scale(loss * world_size).backward()
            step_loss += loss.detach()
            mismatch = (old[micro_step] - sampled).abs()  # rounding: a cache and one token at a time, or all at once
            facts = {'entropy': -logps, 'clip_ratio/region_mean': clipped, f'{MISMATCH}/mean': mismatch}
            record.add(facts, largest={f'{MISMATCH}/max': mismatch})

        watch.mark('update')
        # gradients: undo the loss scale, clip the global norm
        scaler.unscale_(opt)
        grad_norm = optim.clip_grad_norm_(raw_model.parameters(), config.grad_clip or math.inf, optimizer=opt)
        # Whether the update is skipped: as in train_ddp.py.
        may_overflow = scaler.is_enabled() and scaler.get_scale() >= 1
        skip = numbers.must_skip(step + 1, step_loss, 1, grad_norm, may_overflow)
        scaler.step(opt, skip=skip)  # GradScaler hands skip on to opt.step()
        watch.measure_state(raw_model, opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)
    step += 1
    values = {'lr': lr, 'grad_norm': grad_norm}
    if watch.due(step).log:
        values |= record.row(step, groups)
    watch.after_step(step, values)  # logs, scores and saves if they are due

watch.end(step)
