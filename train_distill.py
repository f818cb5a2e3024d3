"""
Train a language model, the student, towards the distribution of another one, its teacher, on what the student itself
writes: on-policy distillation (GKD, arXiv 2306.13649).

    python prepare_data.py --tasks=gsm8k                              # questions; nobody needs their answers
    torchrun --nproc_per_node=4 train_distill.py config/distill_chat.py --init_from=models/SMALL --teacher=models/LARGE
    python train_distill.py --help                                    # every key with its default and meaning

In each step the student writes an answer to each of some prompts. The teacher reads them, and says for each token which
one it would have written, of all the vocabulary: that is the student's target. The student is trained as in
train_ddp.py or train_fsdp.py, by the key `strategy`, and `diff train_grpo.py train_distill.py` shows what is new: a
teacher for each token in place of a reward for each answer. docs/distill.md says what one sees in a run, and what goes
wrong.
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
    # distillation [result]
    teacher: str | None = None  # a run or a Hugging Face folder with the tokenizer of init_from [result, per job, path]
    teacher_dtype: Literal['nf4'] | None = None  # of a Hugging Face folder: nf4 = matrices in 4 bits; None = dtype
    beta = 1.0  # of the generalized JSD: 1 = reverse KL, 0 = forward KL [may change, >= 0, <= 1]
    on_policy = 1.0  # share of the steps in which the student writes; in the others the teacher does [>= 0, <= 1]
    prompts = []  # task files with prompts, as evaluate.py reads them: tasks/a.jsonl,b.jsonl [result, per job, path]
    prompts_chat: bool | None = None  # write prompts as messages; None = if init_from has learned conversations
    num_fewshot: int | None = None  # solved examples before prompts and eval_tasks; None = as the file says [>= 0]
    prompts_per_step = 32  # of all ranks: more = less noise [>= 1]
    num_generations = 1  # answers to each prompt [>= 1]
    max_new_tokens: int | None = None  # of an answer; None = as the rows say, or what prompts leave, up to 256 [>= 1]
    temperature = 1.0  # of the answers, and of both distributions; lower = less of what is unlikely [> 0]
    generation_batch_size: int | None = None  # answers that a rank writes at once; None = all [per job, >= 1]
    # strategy
    strategy: Literal['ddp', 'fsdp'] = 'ddp'  # each rank holds the whole model, or a slice of each weight [per job]
    # fsdp [per job]
    replicate_size = 1  # HSDP: copies of the sharded model, e.g. one per node; their gradients are averaged [>= 1]


# ----------------------------------------------------------------------------------------------------------------------
config, explicit = configure(Config)  # config files and --key=value; before `import torch`, so --help is quick

import torch
import torch.distributed as dist
import torch.nn.functional as F

import optim
import strategy
from logprobs import divergence
from runtime.begin import begin, make_model, order_buckets
from runtime.reference import refuse_other_losses
from runtime.rollouts import Record, micro_batches, write_groups
from runtime.teacher import check_teacher, load_teacher, open_teacher
from runtime.watch import Watch

run = begin(config, explicit, config.strategy, learns_from='prompts')  # every key that the run needs now has a value
refuse_other_losses(run)
opened = open_teacher(run)  # shapes only, no weights yet
run.join()  # --dry_run ends here; else init_process_group, and find the checkpoint to resume from
rank, world_size, device = run.rank, run.world_size, run.device

# --- MODEL AND WEIGHTS ------------------------------------------------------------------------------------------------
raw_model = make_model(run)  # on the meta device; activation checkpointing and compilation come before sharding
model = strategy.parallelize(raw_model, run)  # with fp32 master weights; under FSDP each rank keeps its slice

# --- TEACHER ----------------------------------------------------------------------------------------------------------
teacher = load_teacher(opened, run)  # frozen, in compute dtype or nf4; whole on each rank, or sharded as the student is

# --- OPTIMIZER --------------------------------------------------------------------------------------------------------
opt = strategy.optimizer(raw_model, run)
scaler = torch.amp.GradScaler(device.type, enabled=run.compute_dtype == torch.float16)
step, state = run.resume(raw_model, opt, scaler)
digest = check_teacher(opened, run, state.get('teacher'))  # a resumed run has the same one


# --- THE LOSS ---------------------------------------------------------------------------------------------------------
def kl(p, q):
    """Kullback-Leibler divergence of distributions, given as log-probabilities: (n, V) both -> (n)."""
    return (p.exp() * (p - q)).sum(-1)


def losses_of_tokens(student, teacher):
    """
    The generalized Jensen-Shannon divergence of each token, (n). student, teacher: log-probabilities of all tokens of
    the vocabulary in its place, (n, V) both.

    Forward KL, beta = 0, is large where the teacher finds likely what the student does not: the student spreads over
    all that the teacher might write. Reverse KL, beta = 1, is large where the student finds likely what the teacher
    does not: the student keeps to what the teacher is sure of. In between, both are compared with their mixture.
    """
    beta = config.beta
    if beta == 0:
        return kl(teacher, student)
    if beta == 1:
        return kl(student, teacher)
    # Of the mixture's tokens a share beta is the teacher's. It has written this one with probability sigmoid(log_odds),
    # which is beta * teacher / mixture. (The log of the mixture itself, by logaddexp, adds log(beta) to each
    # log-probability, which rounds most of them in the same direction: several times as far off in fp32.)
    log_odds = teacher - student + math.log(beta / (1 - beta))
    from_teacher = teacher.exp() * (F.logsigmoid(log_odds) - math.log(beta))  # teacher * log(teacher / mixture)
    from_student = student.exp() * (F.logsigmoid(-log_odds) - math.log(1 - beta))
    return (beta * from_teacher + (1 - beta) * from_student).sum(-1)


def student_writes(step):
    """Whether a step is on-policy; those steps are spread evenly."""
    return math.floor((step + 1) * config.on_policy) > math.floor(step * config.on_policy)


watch = Watch(run, step, state)  # whatever only observes: log, clock, watchdog
watch.self_test(model, raw_model)


# --- LOOP -------------------------------------------------------------------------------------------------------------
def save(step):
    watch.save(step, raw_model, opt, scaler.state_dict(), more={'teacher': digest})


watch.begin_training(model, save, also_log=getattr(model, 'communication', None))  # fsdp_manual.py counts bytes
record = Record(run, step, watch.say)  # only counts: numbers of the answers, and some to read in rollouts.jsonl
prompts = run.train_data.prompts
if step == 0 and run.tasks:
    watch.log.row(0, watch.scores(0))  # to compare with
numbers = watch.numbers  # all else in watch only observes; this decides whether a step is skipped (health.py)
order_buckets(model, opt, run)  # so that a resumed run adds up gradients in the order of an uninterrupted one
while step < config.max_iters and not watch.must_stop:
    lr = optim.learning_rate_at(step, config)
    for group in opt.param_groups:
        group['lr'] = lr * group['lr_factor']  # lr_factor is 1 unless parametrization is mup or completep

    # The student writes, or off-policy the teacher: all answers to a prompt on one rank. Answers differ in length, so
    # ranks make different numbers of forward passes; under FSDP the weights are gathered once before, and stay whole.
    watch.begin_step(step)
    watch.mark('rollout')
    with strategy.whole_weights(model if student_writes(step) else teacher, run) as writer:
        beat = functools.partial(watch.at, 'rollout', step + 1)  # a rank that still writes does not hang
        groups = write_groups(writer, run, step, beat)  # [[Answer] of each of its prompts]
    record.begin_step(groups)
    answers = sum(groups, [])
    n_tokens = torch.tensor(sum(len(answer.ids) for answer in answers))
    dist.all_reduce(n_tokens)
    n_tokens = n_tokens.item()
    documents = [(prompts[answer.prompt].tokens, answer.ids) for answer in answers]
    batches = micro_batches(documents, run, n_values=0)  # packed into rows; equally many batches on each rank

    step_loss = torch.zeros((), device=device)
    for micro_step, (x, y, starts) in enumerate(batches):
        # Gradients add up locally until the last micro-step's backward averages them; see strategy.py.
        strategy.sync_gradients(model, run, last_micro_step=micro_step == len(batches) - 1)
        watch.mark('forward')
        loss, entropies = divergence(model, teacher, x, y, starts, losses_of_tokens, config.temperature)
        watch.mark('backward')
        # This factor turns the sum over this rank's tokens, of gradients that are averaged over the ranks, into the
        # mean over all tokens of the step.
        scaler.scale(loss * (world_size / n_tokens)).backward()
        step_loss += loss.detach()
        record.add({'entropy': entropies[0], 'teacher_entropy': entropies[1]})

    watch.mark('update')
    # gradients: undo the loss scale, clip the global norm
    scaler.unscale_(opt)
    grad_norm = optim.clip_grad_norm_(raw_model.parameters(), config.grad_clip or math.inf, optimizer=opt)
    # Whether the update is skipped: as in train_ddp.py.
    may_overflow = scaler.is_enabled() and scaler.get_scale() >= 1
    skip = numbers.must_skip(step + 1, step_loss, n_tokens, grad_norm, may_overflow)
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
