"""
Train a language model to prefer the better of two answers: direct preference optimisation (DPO, arXiv 2305.18290).

    python prepare_data.py --pairs --dataset=pairs.jsonl --tokenizer=models/NAME --name=pairs
    torchrun --nproc_per_node=4 train_dpo.py config/dpo_chat.py --init_from=models/NAME --dataset=pairs
    python train_dpo.py --help                                        # every key with its default and meaning

A row of the data is a prompt with a chosen and a rejected answer. The model learns to make the chosen one more likely,
relative to the rejected one, than it was at the beginning. It is trained as in train_ddp.py or train_fsdp.py, by the
key `strategy`, and `diff train_fsdp.py train_dpo.py` shows what is new: the reference, and the loss of a pair.
docs/dpo.md says what one sees in a run, and what goes wrong.
"""

import math
from typing import Literal

from configurator import configure
from keys import BestKeys, Keys, ShardingKeys, TaskKeys


# --- KNOBS ------------------------------------------------------------------------------------------------------------
class Config(Keys, TaskKeys, BestKeys, ShardingKeys):
    # optimizer [result]
    learning_rate = 1e-6  # peak: for all weights of a large model; LoRA bears ten times as much [> 0]
    num_epochs: float | None = 1.0  # passes over the pairs: sets max_iters, unless that is given [result, per job, > 0]
    # schedule [result]
    warmup_iters = 10  # linear warm-up: longer if the loss jumps early [>= 0]
    # dpo [result, may change]
    loss_type: Literal['sigmoid', 'sigmoid_norm', 'ipo', 'simpo'] = 'sigmoid'  # of a pair; docs/dpo.md compares them
    beta = 0.1  # how far from the reference is far: lower = further; sigmoid_norm 5, simpo 2.5 [> 0]
    label_smoothing = 0.0  # share of pairs believed to be in the wrong order (cDPO) [>= 0, < 0.5, if loss_type != ipo]
    simpo_gamma = 1.375  # simpo: the chosen answer has to be ahead by gamma / beta per token [>= 0, if loss_type=simpo]
    sft_weight = 0.0  # also learn the chosen answers as they are, with this weight: against displacement [>= 0]
    # strategy
    strategy: Literal['ddp', 'fsdp'] = 'ddp'  # each rank holds the whole model, or a slice of each weight [per job]
    # fsdp [per job]
    replicate_size = 1  # HSDP: copies of the sharded model, e.g. one per node; their gradients are averaged [>= 1]


# ----------------------------------------------------------------------------------------------------------------------
config, explicit = configure(Config)  # config files and --key=value; before `import torch`, so --help is quick

import torch
import torch.distributed as dist
import torch.nn.functional as F

import data
import optim
import strategy
from logprobs import document_logps
from runtime.begin import begin, make_model, order_buckets
from runtime.reference import check_keys, self_test, set_reference
from runtime.watch import Watch

run = begin(config, explicit, config.strategy, learns_from='pairs')  # every key that the run needs now has a value
check_keys(run)
run.join()  # --dry_run ends here; else init_process_group, and find the checkpoint to resume from
rank, world_size, device = run.rank, run.world_size, run.device
batch_size, global_batch_size = config.batch_size, config.global_batch_size

# --- MODEL AND WEIGHTS ------------------------------------------------------------------------------------------------
raw_model = make_model(run)  # on the meta device; activation checkpointing and compilation come before sharding
model = strategy.parallelize(raw_model, run)  # with fp32 master weights; under FSDP each rank keeps its slice

# --- OPTIMIZER --------------------------------------------------------------------------------------------------------
opt = strategy.optimizer(raw_model, run)
scaler = torch.amp.GradScaler(device.type, enabled=run.compute_dtype == torch.float16)
step, state = run.resume(raw_model, opt, scaler)


# --- THE LOSS ---------------------------------------------------------------------------------------------------------
def losses_of_pairs(logps, reference, n):
    """
    The loss of each pair, (P). In column 0 of logps, reference and n, (P, 2), is the chosen answer, in column 1 the
    rejected one: its log-probability now and under the first weights, summed over its tokens, and how many these are.

    How much more likely an answer has become, logps - reference, is what DPO takes for its reward, times beta. All
    losses push the chosen answer's above the rejected one's. They differ in whether they count it per answer or per
    token, and in what they compare: simpo has no reference, and for ipo a certain distance is enough.
    """
    reward = logps if config.loss_type == 'simpo' else logps - reference
    if config.loss_type != 'sigmoid':
        reward = reward / n
    ahead = reward[:, 0] - reward[:, 1]
    if config.loss_type == 'ipo':  # arXiv 2310.12036, eq. 17
        losses = (ahead - 1 / (2 * config.beta)) ** 2
    else:  # eq. 7 of DPO; sigmoid_norm: arXiv 2411.15124; simpo: arXiv 2405.14734
        ahead = config.beta * ahead - (config.simpo_gamma if config.loss_type == 'simpo' else 0)
        losses = -F.logsigmoid(ahead)
        if config.label_smoothing:  # cDPO: with this probability the other answer is the better one
            losses = (1 - config.label_smoothing) * losses - config.label_smoothing * F.logsigmoid(-ahead)
    return losses - config.sft_weight * logps[:, 0] / n[:, 0] if config.sft_weight else losses


def losses_of_batch(model, x, y, starts, reference=None):
    """(the loss, the rewards, the log-probabilities now) of each pair in a batch: (P), and twice (P, 2) without a
    gradient, of its chosen and its rejected answer. reference: (B, M), what set_reference() adds to batches."""
    sums, counts = document_logps(model, x, y, starts)  # (B, M): documents 2k and 2k + 1 of a row are a pair
    reference = torch.zeros_like(sums) if reference is None else reference  # simpo
    # The last place is for padding. Of the others those are empty that this row has no pairs for.
    logps, reference, n = (torch.stack((of[:, :-1:2], of[:, 1::2]), 2) for of in (sums, reference, counts))
    is_pair = n[:, :, 0] > 0  # (B, M // 2)
    logps, reference, n = logps[is_pair], reference[is_pair], n[is_pair]  # (P, 2)
    losses, now = losses_of_pairs(logps, reference, n), logps.detach()
    return losses, config.beta * (now / n if config.loss_type == 'simpo' else now - reference), now


FACTS = 'rewards/chosen', 'rewards/rejected', 'rewards/accuracies', 'rewards/margins', 'logps/chosen', 'logps/rejected'


def sums_of_facts(rewards, logps):
    """{each of FACTS: its sum over pairs}. rewards, logps: of losses_of_batch()."""
    margins = rewards[:, :1] - rewards[:, 1:]
    facts = torch.cat((rewards, margins > 0, margins, logps), 1).double()  # (P, 6)
    return dict(zip(FACTS, facts.sum(0), strict=True))


def val_losses(model, batches, beat):
    """As evaluation.validation.of_each_batch(): also how many pairs are in the right order, and by how much."""
    for batch, source in batches:
        beat()
        losses, rewards, logps = losses_of_batch(model, *batch)
        facts = sums_of_facts(rewards, logps)
        sums = losses.double().sum(), facts['rewards/accuracies'], facts['rewards/margins']
        yield torch.stack(sums), losses.new_tensor(len(losses)), source


watch = Watch(run, step, state, losses=val_losses, metrics=('val_accuracy', 'val_margin'))  # whatever only observes
watch.self_test(model, raw_model)

# --- REFERENCE --------------------------------------------------------------------------------------------------------
# The log-probability of every answer under the weights that the run begins with: with LoRA those of the base. A resumed
# run reads them from its out_dir, because its weights have moved. From here on they are the fourth part of each batch,
# beside x, y and starts.
digest = None
if config.loss_type != 'simpo':
    digest = set_reference(model, run, state.get('reference'), lambda: watch.at('reference', step), watch.say)
if config.eval_only:
    watch.evaluate_only(model, step)


# --- LOOP -------------------------------------------------------------------------------------------------------------
def save(step):
    watch.save(step, raw_model, opt, scaler.state_dict(), more={'reference': digest})


watch.begin_training(model, save, also_log=getattr(model, 'communication', None))  # fsdp_manual.py counts bytes
numbers = watch.numbers  # all else in watch only observes; this decides whether a step is skipped (health.py)
train_batches = data.batches(
    run.train_data, config.seed, first_sample=step * global_batch_size, global_batch_size=global_batch_size,
    batch_size=batch_size, rank=rank, world_size=world_size, device=device,
)  # fmt: skip
order_buckets(model, opt, run)  # so that a resumed run adds up gradients in the order of an uninterrupted one
while step < config.max_iters and not watch.must_stop:
    lr = optim.learning_rate_at(step, config)
    for group in opt.param_groups:
        group['lr'] = lr * group['lr_factor']  # lr_factor is 1 unless parametrization is mup or completep
    # A window holds several pairs, or one. This factor turns the sum over this rank's pairs, of gradients that are
    # averaged over the ranks, into the mean over all pairs of the global batch, however they lie in windows.
    pairs = run.train_data.count_targets(config.seed, step * global_batch_size, global_batch_size)
    loss_scale = world_size / pairs

    # forward and backward, micro-step by micro-step; the gradients add up
    watch.begin_step(step)
    step_loss, of_pairs = torch.zeros((), device=device), []
    for micro_step in range(run.layout.micro_steps):
        watch.mark('data')
        batch = next(train_batches)  # x, y: (batch_size, block_size) each; starts and the reference: (batch_size, M)
        # Gradients add up locally until the last micro-step's backward averages them; see strategy.py.
        strategy.sync_gradients(model, run, last_micro_step=micro_step == run.layout.micro_steps - 1)
        watch.mark('forward')
        losses, *of_batch = losses_of_batch(model, *batch)
        watch.mark('backward')
        scaler.scale(losses.sum() * loss_scale).backward()
        step_loss += losses.detach().sum()
        of_pairs.append(of_batch)
    rewards, logps = map(torch.cat, zip(*of_pairs, strict=True))  # of this rank's pairs
    if step == 0 and digest:  # nothing is learned yet: each answer has to be as likely as its reference says
        watch.say(self_test(rewards, logps, run))

    watch.mark('update')
    # gradients: undo the loss scale, clip the global norm
    scaler.unscale_(opt)
    grad_norm = optim.clip_grad_norm_(raw_model.parameters(), config.grad_clip or math.inf, optimizer=opt)
    # Whether the step is skipped: as in train_ddp.py.
    may_overflow = scaler.is_enabled() and scaler.get_scale() >= 1
    skip = numbers.must_skip(step + 1, step_loss, pairs, grad_norm, may_overflow)
    scaler.step(opt, skip=skip)  # GradScaler hands skip on to opt.step()
    watch.measure_state(raw_model, opt)
    scaler.update()
    opt.zero_grad(set_to_none=True)
    step += 1
    values = {'lr': lr, 'grad_norm': grad_norm, 'pairs': pairs}
    if watch.due(step).log:
        sums = sums_of_facts(rewards, logps)
        means = torch.stack([*sums.values()]) / pairs
        dist.all_reduce(means)
        values |= zip(sums, means, strict=True)
    watch.after_step(step, values)  # logs, evaluates and saves if they are due

watch.end(step)
