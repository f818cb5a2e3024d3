"""
Optimizers and learning-rate schedules, the norm of the gradients, and the balance of a mixture's experts.

    optimizer = make_optimizer(model, 'adamw', learning_rate=6e-4, beta1=0.9, beta2=0.95, weight_decay=0.1)
    learning_rate = learning_rate_at(step, config)

    adamw            Adam with decoupled weight decay, PyTorch's fused kernel          2 moments
    adamw-decay      AdamW with the weight decay weight_decay / (1 + t/wd_ts)          2
    adana            long momentum for large models and long runs (arXiv 2602.05298)   2
    adana-released   ADANA as its authors' code computes it                            2
    dana-mk4         ADANA with the long momentum's signal-to-noise ratio clipped      2
    dana-star-mk4    DANA-MK4 for parameters that rarely get a gradient                3
    ademamix         a fast and a slow momentum (arXiv 2409.03137)                     3
    muon             orthogonalized momentum for hidden matrices, AdamW for the rest   1 (rest: 2)
    sgd              the plain gradient, a baseline for memory and arithmetic          0

Everything here runs on plain and on sharded tensors (DTensor) alike, so a parameter keeps its name, its group and its
update whatever strategy trains it. All but muon are elementwise, so a rank updates its shards without communication.
Moments are fp32, or are kept in fewer bits between the steps (moments.py).
"""

import collections
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from keys import DANA, OPTIMIZERS, SCHEDULES
from layout import WHOLE
from model import GPT
from pieces import CHUNK, FOREACH, in_parts, local

WSD_DECAY_FRACTION = 0.2  # of lr_decay_iters; arXiv 2405.18392 finds 10-20% enough to match cosine
ADEMAMIX_BETA3, ADEMAMIX_ALPHA = 0.9999, 8.0  # of arXiv 2409.03137's language models

# --- optimizers -------------------------------------------------------------------------------------------------------


def make_optimizer(
    model, optimizer, learning_rate, beta1, beta2, weight_decay,
    kappa=0.85, delta=8.0, wd_ts=None, max_iters=None, compile=False, dtype='float32', seed=0,
    share=WHOLE, copies=None,
):  # fmt: skip
    """The optimizer named by the key `optimizer` (see the top of this file), over the trainable parameters of `model`.

    learning_rate: the peak. Before each step the loop sets group['lr'] to the schedule's rate times group['lr_factor'],
        which a parametrization sets (scaled_groups below). gamma = the schedule's rate / peak scales the DANA decay.
    weight_decay: AdamW, AdEMAMix and Muon decay by lr * weight_decay per step, the DANA family by gamma * weight_decay,
        which leaves the peak out: 4 / wd_ts is the paper's value, and AdamW's 0.1 would be far too much.
    kappa, delta: of the DANA family. wd_ts: steps after which a decaying weight decay has halved (the paper: a tenth of
        the run); needed by the DANA family and adamw-decay unless weight_decay is 0.
    max_iters: AdEMAMix warms alpha and beta3 up over this many steps, the whole run in the paper; None = not at all.
    compile: torch.compile the elementwise update (adamw is fused already); compiling_repays() says when that pays.
    dtype: of the moments between the steps, 'float32', 'bfloat16' or 'int8' (moments.py). seed: of bfloat16's rounding.
    share: what this rank has of the model. copies: process group of the ranks that have the same whole parameters and
        gradients, if there are several: they divide what is expensive and not elementwise (Muon).

    'sgd' is theta -= lr * (weight_decay*theta + g); the other equations stand with the updates below. Call this after
    the model is sharded, because sharding replaces the parameters. Raises ValueError for values that do not fit.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f'optimizer={optimizer!r}: expected one of {", ".join(OPTIMIZERS)}')
    decaying = optimizer in ('adamw-decay', *DANA)  # whose weight decay falls
    for name, value, is_good, expected in (
        ('beta1', beta1, beta1 > 0 or optimizer != 'ademamix', 'above 0, since beta3 of ademamix starts there'),
        ('wd_ts', wd_ts, wd_ts or not (decaying and weight_decay), 'a number of steps'),
        ('optimizer_dtype', dtype, dtype == 'float32' or optimizer in UPDATES, f'float32 with optimizer={optimizer}'),
    ):
        if not is_good:
            raise ValueError(f'{name}={value}: expected {expected}')

    groups = [{'lr_factor': 1.0, 'eps': 1e-8, **group} for group in parameter_groups(model, weight_decay)]
    if optimizer == 'muon':
        import muon

        hidden, cut = muon.hidden_matrices(model), muon.cut_of(model, share)
        for group in groups:  # adamw-decay with an infinite wd_ts is plain AdamW
            group.update(params=[p for p in group['params'] if p not in hidden], update='adamw-decay')
        groups.insert(0, groups[0] | {'params': list(hidden), 'update': 'muon'})
    groups = scaled_groups(groups, model, optimizer)
    assert_each_in_one_group(model, groups)
    if optimizer == 'sgd':
        return SGD(groups, lr=learning_rate)
    constants = {'lr': learning_rate, 'peak_lr': learning_rate, 'betas': (beta1, beta2), 'kappa': kappa, 'delta': delta}
    constants |= {'wd_ts': wd_ts if decaying and wd_ts else math.inf, 'warmup': max_iters or 0, 'update': optimizer}
    if optimizer == 'muon':
        return Muon(groups, hidden, constants, compile, copies, cut)
    forms = None
    if dtype != 'float32':
        from moments import forms_of

        forms = forms_of(model, dtype, seed, share.slices)
    return (AdamW if optimizer == 'adamw' else Elementwise)(groups, constants, compile, forms)


def parameter_groups(model, weight_decay):
    """Two groups for the optimizer: parameters with weight decay, and those without.

    Matrices that multiply activations decay. Norms and biases do not, nor do embedding tables, whose rows are looked up
    and get no gradient in most steps. A table that is also the output head (tied) is such a matrix, too, and decays.
    """
    trained, matrices = {}, {}  # used as ordered sets: a tied parameter is found in two modules and kept once
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                trained[parameter] = True
                if parameter.dim() >= 2 and not isinstance(module, nn.Embedding):
                    matrices[parameter] = True
    others = [parameter for parameter in trained if parameter not in matrices]
    return [{'params': list(matrices), 'weight_decay': weight_decay}, {'params': others, 'weight_decay': 0.0}]


def moments_of(model, optimizer):
    """{parameter: how many numbers the optimizer keeps for each of its own}, of those that are trained."""
    hidden = ()
    if optimizer == 'muon':
        from muon import hidden_matrices

        hidden = hidden_matrices(model)
    return {p: MOMENTS[optimizer] - (p in hidden) for p in model.parameters() if p.requires_grad}


def assert_each_in_one_group(model, groups):
    found = sorted(id(parameter) for group in groups for parameter in group['params'])
    trainable = sorted(id(parameter) for parameter in model.parameters() if parameter.requires_grad)
    assert found == trainable, f'{len(found)} parameters in groups, the model has {len(trainable)}'


def from_config(model, config, device, share=WHOLE, copies=None):
    """make_optimizer() with the keys of a script's config. device: where the update computes."""
    dtype = config.optimizer_dtype
    return make_optimizer(
        model, config.optimizer, config.learning_rate, config.beta1, config.beta2, config.weight_decay,
        config.kappa, config.delta, config.wd_ts, config.max_iters,
        compile=config.compile and compiling_repays(config.max_iters, model.parameters(), device, dtype),
        dtype=dtype, seed=config.seed, share=share, copies=copies,
    )  # fmt: skip


def compiling_repays(steps, parameters, device, dtype='float32'):
    """Whether make_optimizer(compile=True) saves time in a run of `steps` with this rank's part of the parameters."""
    # torch.compile takes up to 20 s. With ADANA on 19M parameters and 2 CPU threads it saves 18 - 7 = 11 ms a step
    # (measured), which is 0.6 ns a number; on a GPU (26 - 7) * 4 bytes at 2.5e12 bytes/s, 0.03 ns (estimated).
    held = sum(local(parameter).numel() for parameter in parameters)
    # Moments in fewer bits take some 40 operations to read and write, each moving 8 bytes a number or more (estimated).
    if dtype == 'float32':
        return steps * held * (0.6e-9 if device.type == 'cpu' else 0.03e-9) > 20
    return steps * held * (60e-9 if device.type == 'cpu' else 0.15e-9) > 20


# --- elementwise updates ----------------------------------------------------------------------------------------------
# Each optimizer is a kernel, which updates tensors in place, and a function that computes the kernel's scalars for step
# t = 1, 2, ... from the hyperparameters of a group. A kernel's tensors all have the same shape: theta, the gradient g,
# and the moments, as UPDATES below lists them. Its scalars are keyword arguments. To add an optimizer, write its kernel
# (and its scalars, unless another optimizer has the same ones), and add a line to UPDATES.
#
# A kernel calls methods of tensors and nothing else, so that the same function runs on chunks of a tensor (CPU), on
# lists of tensors (GPU, see Each) and under torch.compile. As torch.compile would make new code for each new value of a
# float, scalars are 0-d tensors, except with lists. x += y * scalar is written x.addcmul_(y, scalar), in one pass.
# Decay is theta += -decay * theta because 1 - decay, rounded to fp32, would be wrong by the same 3e-8 in every step.


def adamw(theta, g, m, v, *, one_minus_beta1, one_minus_beta2, unbias1, unbias2, eps, minus_lr, minus_decay):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with a weight decay that decays (arXiv 2602.05298). The value
    4/(learning_rate*wd_ts) decays like ADANA's 4/wd_ts:

    m = beta1*m + (1-beta1)*g;   v = beta2*v + (1-beta2)*g*g
    theta -= lr * (weight_decay/(1 + t/wd_ts)*theta + m/(1-beta1^t) / (sqrt(v/(1-beta2^t)) + eps))
    """
    m.lerp_(g, one_minus_beta1)
    v.lerp_(g.mul(g), one_minus_beta2)
    update = m.mul(unbias1).div_(v.mul(unbias2).sqrt_().add_(eps))
    theta.addcmul_(theta, minus_decay).addcmul_(update, minus_lr)


def adamw_scalars(group, t):
    (beta1, beta2), lr = group['betas'], group['lr']
    decay = lr * group['weight_decay'] / (1 + t / group['wd_ts'])
    return {
        'one_minus_beta1': 1 - beta1,
        'one_minus_beta2': 1 - beta2,
        'unbias1': 1 / (1 - beta1**t),
        'unbias2': 1 / (1 - beta2**t),
        'eps': group['eps'],
        'minus_lr': -lr,
        'minus_decay': -decay,
    }


def adana(theta, g, m, v, *, a, growth, eps, minus_lr, minus_decay):
    """ADANA (arXiv 2602.05298), t = 1, 2, ... and gamma = lr / peak lr, without bias correction:

    a = delta / (delta + t)
    m += a*(g - m);   v = (1-a)*v + a*g*g
    theta *= 1 - gamma * weight_decay / (1 + t/wd_ts)
    theta -= lr * (g + (1+t)^(1-kappa) * m) / (sqrt(v) + eps)

    'adana-released' is the form in the code that the authors released (github.com/mlexpos/adana): the factor of m is
    (1+t)^(1-kappa) + 1, and the decay comes after the update. With d = gamma * weight_decay / (1 + t/wd_ts) that is
    (1-d)*(theta - lr*u) = theta - d*theta - (1-d)*lr*u, so it is the same kernel with another rate.
    """
    m.lerp_(g, a)
    v.lerp_(g.mul(g), a)
    root = v.rsqrt().reciprocal_().add_(eps)  # 1/inf = 0; v.sqrt() takes a CPU 48 us for a chunk, this 40
    update = g.addcmul(m, growth).div_(root)
    theta.addcmul_(theta, minus_decay).addcmul_(update, minus_lr)


def adana_scalars(group, t):
    gamma = group['lr'] / (group['peak_lr'] * group['lr_factor'])
    return {
        'a': group['delta'] / (group['delta'] + t),
        'growth': (1 + t) ** (1 - group['kappa']),
        'eps': group['eps'],
        'minus_lr': -group['lr'],
        'minus_decay': -gamma * group['weight_decay'] / (1 + t / group['wd_ts']),
    }


def adana_released_scalars(group, t):
    scalars = adana_scalars(group, t)
    scalars['growth'] += 1
    scalars['minus_lr'] *= 1 + scalars['minus_decay']
    return scalars


def dana_mk4(theta, g, m, v, *, a, growth, eps, minus_lr, minus_decay):
    """DANA-MK4 (arXiv 2602.05298); a, m, v and the decay are ADANA's, clipsnr = 2:

    A = min((1+t)^(1-kappa) * |m|/(sqrt(v)+eps), clipsnr)
    theta -= lr * (g/(sqrt(v)+eps) + sign(m)*A + m/(sqrt(v)+eps))
    """
    m.lerp_(g, a)
    v.lerp_(g.mul(g), a)
    root = v.sqrt().add_(eps)
    snr = m.div(root)
    # sign(m) * A is the same without |.|, clamped from both sides.
    update = snr.mul(growth).clamp_max_(2.0).clamp_min_(-2.0).add_(snr).add_(g.div(root))
    theta.addcmul_(theta, minus_decay).addcmul_(update, minus_lr)


def dana_star_mk4(theta, g, m, v, tau, *, a, t, exponent, least_p, eps, minus_lr, minus_decay):
    """DANA-STAR-MK4 (arXiv 2602.05298); a, m, v and the decay are ADANA's, clipsnr = 2. tau estimates how often a
    parameter gets a gradient at all, and T how many it has had:

    tau += a*(|g|/(|g|+sqrt(v)+eps) - tau);   tau_c = min(tau, 1/2)
    p = max(tau_c/(1-tau_c), 1/(1+t));   n = sqrt(p)/(sqrt(v)+eps);   T = max(tau*t, 1)
    A = min(T^(1-kappa) * |m|*n/p, clipsnr)
    theta -= lr * (g*n + sign(m)*(p*A + |m|*n))
    """
    m.lerp_(g, a)
    v.lerp_(g.mul(g), a)
    root = v.sqrt().add_(eps)
    size = g.abs()
    tau.lerp_(size.div(root.add(size)), a)
    tau_c = tau.clamp_max(0.5)
    p = tau_c.div(tau_c.neg().add_(1.0)).clamp_min_(least_p)
    n = p.sqrt().div_(root)
    mn = m.mul(n)
    signed_a = tau.mul(t).clamp_min_(1.0).pow_(exponent).mul_(mn).div_(p).clamp_max_(2.0).clamp_min_(-2.0)
    update = signed_a.mul_(p).add_(mn).add_(n.mul_(g))
    theta.addcmul_(theta, minus_decay).addcmul_(update, minus_lr)


def dana_star_scalars(group, t):
    scalars = adana_scalars(group, t)
    del scalars['growth']  # it depends on tau here
    return scalars | {'t': t, 'exponent': 1 - group['kappa'], 'least_p': 1 / (1 + t)}


def ademamix(
    theta, g, fast, slow, v,
    *, one_minus_beta3, alpha, one_minus_beta1, one_minus_beta2, unbias1, unbias2, eps, minus_lr, minus_decay,
):  # fmt: skip
    """AdEMAMix (Pagliardini, Ablin and Grangier, arXiv 2409.03137), beta3 = 0.9999, alpha = 8, W = warm-up steps:

    alpha_t = alpha * min(t/W, 1);   beta3_t = exp(ln(beta1)*ln(beta3) / ((1-t/W)*ln(beta3) + t/W*ln(beta1))) until W
    fast = beta1*fast + (1-beta1)*g;   slow = beta3_t*slow + (1-beta3_t)*g;   v = beta2*v + (1-beta2)*g*g
    theta -= lr * ((fast/(1-beta1^t) + alpha_t*slow) / (sqrt(v/(1-beta2^t)) + eps) + weight_decay*theta)
    """
    fast.lerp_(g, one_minus_beta1)
    slow.lerp_(g, one_minus_beta3)
    v.lerp_(g.mul(g), one_minus_beta2)
    update = slow.mul(alpha).addcmul_(fast, unbias1).div_(v.mul(unbias2).sqrt_().add_(eps))
    theta.addcmul_(theta, minus_decay).addcmul_(update, minus_lr)


def ademamix_scalars(group, t):
    progress = min(t / group['warmup'], 1.0) if group['warmup'] else 1.0
    # 1/ln(beta3) goes linearly from 1/ln(beta1) to its final value, which is the formula of the docstring.
    beta3 = math.exp(1 / ((1 - progress) / math.log(group['betas'][0]) + progress / math.log(ADEMAMIX_BETA3)))
    return {'one_minus_beta3': 1 - beta3, 'alpha': ADEMAMIX_ALPHA * progress, **adamw_scalars(group, t)}


class Update(NamedTuple):
    moments: tuple  # the names that a parameter's moments have in checkpoints, in the kernel's order
    scalars: Callable  # (group, t) -> {name: number}
    kernel: Callable  # (theta, g, *moments, **scalars), which changes theta and the moments in place


UPDATES = {
    'adamw': Update(('exp_avg', 'exp_avg_sq'), adamw_scalars, adamw),
    'adamw-decay': Update(('exp_avg', 'exp_avg_sq'), adamw_scalars, adamw),
    'adana': Update(('exp_avg', 'exp_avg_sq'), adana_scalars, adana),
    'adana-released': Update(('exp_avg', 'exp_avg_sq'), adana_released_scalars, adana),
    'dana-mk4': Update(('exp_avg', 'exp_avg_sq'), adana_scalars, dana_mk4),
    'dana-star-mk4': Update(('exp_avg', 'exp_avg_sq', 'tau'), dana_star_scalars, dana_star_mk4),
    'ademamix': Update(('exp_avg', 'exp_avg_slow', 'exp_avg_sq'), ademamix_scalars, ademamix),
}
# How many numbers each optimizer keeps for one of a parameter; Muon one less for the matrices that it trains itself.
MOMENTS = {name: len(update.moments) for name, update in UPDATES.items()} | {'muon': 2, 'sgd': 0}


class Elementwise(torch.optim.Optimizer):
    """An optimizer of UPDATES. A parameter's state is `step`, a scalar on the CPU, and moments of its own shape."""

    def __init__(self, groups, constants, compile, forms=None):
        self.unsettled = None  # a step that the device may have skipped: (its flag on the way to the host, an event)
        super().__init__(groups, constants)
        self.forms = forms or {}  # {parameter: moments.Form}, for moments that are not fp32
        self.compile = compile
        # Whether a step can be skipped although only the device knows of it. That needs a kernel with the flag as an
        # argument. Without torch.compile a GPU updates lists of tensors, which take none, so step() waits for the flag.
        self.skips_on_device = compile
        self.held = {}  # {number of a group: Held}
        self.divisor = None  # of the gradients in the next step, from clip_grad_norm_(), if the kernel divides by it

    def __setstate__(self, state):  # load_state_dict() calls it, with other tensors
        super().__setstate__({key: value for key, value in state.items() if key != 'state'})
        self.state, self.unsettled, self.held = state['state'], None, {}

    def load_state_dict(self, saved):
        """torch's own, except for moments in fewer bits: torch would cast their codes to the parameter's dtype."""
        if not self.forms:
            return super().load_state_dict(saved)
        parameters = [parameter for group in self.param_groups for parameter in group['params']]
        state = {parameters[index]: dict(slots) for index, slots in saved['state'].items()}
        groups = [
            {**given, 'params': group['params']}
            for group, given in zip(self.param_groups, saved['param_groups'], strict=True)
        ]
        self.__setstate__({'state': collections.defaultdict(dict, state), 'param_groups': groups})

    @property
    def state(self):
        """The state of every torch optimizer. Its step counters are settled before anyone reads it."""
        self.settle()
        return self.settled_state

    @state.setter
    def state(self, state):
        self.settled_state = state

    @torch.no_grad()
    def step(self, skip=False):
        """Take one step; if `skip` is true, change nothing.

        skip: a bool, or a 0-d float tensor (1: skip), whose value perhaps only the device knows so far. If the kernels
        can skip on the device (skips_on_device), the host does not wait: it counts the step, and settles that later.
        """
        self.settle()
        on_device = isinstance(skip, torch.Tensor) and self.skips_on_device
        if not on_device and bool(skip):
            return
        for number, group in enumerate(self.param_groups):
            self.update(number, group, skip if on_device else None)
        self.divisor = None
        if on_device:
            arrived = None
            if skip.is_cuda:
                skip = skip.to('cpu', non_blocking=True)  # into page-locked memory, behind what computes it
                arrived = torch.cuda.current_stream().record_event()
            self.unsettled = skip, arrived

    def settle(self):
        """Take the count of the last step back if the device skipped it. As a rule the flag arrived long ago."""
        if self.unsettled is None:
            return
        (skip, arrived), self.unsettled = self.unsettled, None
        if arrived:
            arrived.synchronize()
        if skip.item():
            for held in self.held.values():
                held.steps -= held.counted

    def update(self, number, group, skip):
        """One step of those parameters of a group that have a gradient. skip: None, or a flag on the device."""
        held = self.held.get(number)
        if held is None or not held.is_of(group['params']):  # as under DeepSpeed, which steps a part of them at a time
            held = self.held[number] = Held(group['params'], self.state, UPDATES[group['update']].moments, self.forms)
        for t, (rows, parts) in held.begin_step().items():
            if rows:
                self.run(group, t, rows, skip)
            if parts:
                self.run_in_fewer_bits(group, t, parts, skip)

    def run(self, group, t, rows, skip):
        """Step t of [(theta, g, *moments), ...], this rank's part of each."""
        _, scalars_at, kernel = UPDATES[group['update']]
        if self.compile:
            run_compiled(kernel, scalars_at(group, t), rows, skip)
        elif rows[0][0].is_cpu:
            run_in_chunks(kernel, scalars_at(group, t), rows)
        else:
            run_on_lists(kernel, scalars_at(group, t), rows)

    def run_in_fewer_bits(self, group, t, parts, skip):
        """The same for moments that are not fp32: step t of [(moments.Part, g), ...]."""
        import moments

        _, scalars_at, kernel = UPDATES[group['update']]
        if self.compile:
            moments.run_parts_compiled(kernel, scalars_at(group, t), t, parts, skip)
            return
        if not parts[0][1].is_cpu:  # kernels of a GPU take no scalars that are tensors on the host
            kernel = functools.partial(on_lists, kernel)
        moments.run_parts_in_pieces(kernel, scalars_at(group, t), t, parts, skip)


class AdamW(Elementwise):
    """AdamW by PyTorch's fused kernel, which takes a few launches for all parameters, sharded or not.

    torch.optim.AdamW(fused=True) computes the same, but sends each DTensor through its dispatcher, on the host.
    """

    def __init__(self, groups, constants, compile, forms):
        super().__init__(groups, constants, compile, forms)
        self.skips_on_device = compile or not forms  # the kernel takes a flag, GradScaler's found_inf

    def run(self, group, t, rows, skip):
        tensors = [list(column) for column in zip(*rows, strict=True)]  # theta, g, m, v
        steps = [torch.full((), t, device=rows[0][0].device)] * len(rows)
        (beta1, beta2), lr, weight_decay = group['betas'], group['lr'], group['weight_decay']
        torch._fused_adamw_(
            *tensors, [], steps, lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=group['eps'],
            amsgrad=False, maximize=False, grad_scale=self.divisor, found_inf=skip,
        )  # fmt: skip


class Held:
    """What this rank holds of a group's parameters and their moments.

    It is looked up once and kept, because to look at 290 sharded parameters and their moments in every step would take
    much of the host's time for that step. For the same reason the counters `step` of all parameters are elements of one
    tensor: adding 1 to each of 290 by itself takes 0.2 ms.
    """

    def __init__(self, parameters, state, moments, forms):
        """state: the optimizer's, {parameter: {'step': ..., moment: ...}}. moments: names of the moments."""
        self.parameters, self.state, self.moments, self.forms = list(parameters), state, moments, forms
        self.ids = list(map(id, parameters))
        self.steps = torch.zeros(len(parameters))
        for parameter, step in zip(parameters, self.steps, strict=True):
            if parameter_state := state.get(parameter):
                parameter_state['step'] = step.copy_(parameter_state['step'])
        self.in_fewer_bits = {index for index, parameter in enumerate(self.parameters) if parameter in forms}
        self.counted = None  # what the last step added to `steps`: 1 where there was a gradient, otherwise 0
        # {index of a parameter that had a gradient: (theta, *moments) or a moments.Part of this rank, None if empty}
        self.local = {}

    def is_of(self, parameters):
        return self.ids == list(map(id, parameters))

    def begin_step(self):
        """Count the step of all parameters that have a gradient.

        Returns {t: ([(theta, g, *moments), ...], [(moments.Part, g), ...])}, the latter for moments in fewer bits.
        There are several t if some parameters were not used from the beginning.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        self.counted = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.float32)
        self.steps += self.counted
        rows = {}
        for index, (gradient, t) in enumerate(zip(gradients, self.steps.tolist(), strict=True)):
            if gradient is None:
                continue
            if index not in self.local:
                self.local[index] = self.look_up(index)
            if part := self.local[index]:
                of_t, g = rows.setdefault(t, ([], [])), local(gradient).contiguous()
                if index in self.in_fewer_bits:
                    of_t[1].append((part, g))
                else:
                    of_t[0].append((part[0], g, *part[1:]))
        return rows

    def look_up(self, index):
        """This rank's (theta, *moments), or a moments.Part. Makes the state if this is the parameter's first step."""
        parameter = self.parameters[index]
        state, form = self.state[parameter], self.forms.get(parameter)
        if form:
            import moments
        if not state:
            state['step'] = self.steps[index]
            for name in self.moments:
                state.update(moments.zeros(form, parameter, name) if form else {name: torch.zeros_like(parameter)})
        if not local(parameter).numel():  # some ranks hold nothing of a small parameter
            return None
        if form:
            return moments.Part(form, parameter, state, self.moments)
        return local(parameter), *(local(state[name]) for name in self.moments)


# The ways to run a kernel. scalars: {name: number}; rows: [(theta, g, *moments), ...], plain tensors.


def run_in_chunks(kernel, scalars, rows):
    scalars = dict(zip(scalars, torch.tensor([*scalars.values()]).unbind(), strict=True))
    for tensors in rows:
        for chunks in zip(*(tensor.view(-1).split(CHUNK) for tensor in tensors), strict=True):
            kernel(*chunks, **scalars)


def run_on_lists(kernel, scalars, rows):
    for batch in in_parts(rows, lambda tensors: tensors[0].numel(), FOREACH):
        kernel(*map(Each, zip(*batch, strict=True)), **scalars)


def on_lists(kernel, *tensors, **scalars):
    kernel(*(Each([tensor]) for tensor in tensors), **scalars)


def run_compiled(kernel, scalars, rows, skip):
    device = rows[0][0].device
    values = torch.tensor([*scalars.values()], pin_memory=device.type == 'cuda').to(device, non_blocking=True)
    # The largest first, because the loop is compiled for the size of the first, and then gets threads. `.data` is not a
    # view: views of one- and two-dimensional tensors would be compiled separately.
    for tensors in sorted(rows, key=lambda tensors: -tensors[0].numel()):
        compiled(kernel, tuple(scalars))(skip, values, *(tensor.view(-1).data for tensor in tensors))


@functools.cache
def compiled(kernel, names):
    """The kernel as one pass over its tensors, which leaves them as they are if skip is 1. names: of its scalars."""

    def update(skip, values, theta, g, *moments):
        scalars = dict(zip(names, values.unbind(), strict=True))
        if skip is None:
            return kernel(theta, g, *moments, **scalars)
        before = [tensor.clone() for tensor in (theta, *moments)]  # never in memory, as the compiler fuses all of this
        kernel(theta, g, *moments, **scalars)
        for tensor, old in zip((theta, *moments), before, strict=True):
            tensor.copy_(torch.where(skip == 1, old, tensor))

    return torch.compile(update, dynamic=True)


class SGD(torch.optim.SGD):
    """torch's, with a step() that can be skipped. Its kernel takes no flag, so the host waits for it."""

    def step(self, skip=False):
        if not skip:
            super().step()


class Each:
    """A list of tensors that stands for one tensor in a kernel, so that a GPU updates all of them in a few launches.

    Where the kernel says m.lerp_(g, a), this calls torch._foreach_lerp_(tensors of m, tensors of g, a).
    """

    def __init__(self, tensors):
        self.tensors = list(tensors)

    def addcmul(self, y, scalar):  # x + y * scalar: for lists it is an add with a factor
        return Each(torch._foreach_add(self.tensors, y.tensors, alpha=scalar))

    def addcmul_(self, y, scalar):
        torch._foreach_add_(self.tensors, y.tensors, alpha=scalar)
        return self

    def __getattr__(self, name):  # every other method: sqrt, mul_, ...
        def method(*arguments):
            arguments = [argument.tensors if isinstance(argument, Each) else argument for argument in arguments]
            result = getattr(torch, f'_foreach_{name}')(self.tensors, *arguments)
            return self if name.endswith('_') else Each(result)

        return method


# --- Muon -------------------------------------------------------------------------------------------------------------


class Muon(Elementwise):
    """Muon (Jordan et al., kellerjordan.github.io/posts/muon) with the scale of Moonlight (arXiv 2502.16982) and
    Nesterov momentum mu = 0.95, for matrices theta (rows, columns); the other groups have AdamW:

    m = mu*m + (1-mu)*g;   u = (1-mu)*g + mu*m
    theta -= lr * (weight_decay*theta + 0.2*sqrt(max(rows, columns)) * orthogonalize(u))

    The factor 0.2*sqrt(...) makes updates as large as AdamW's, so that its learning rate and weight decay carry over.

    Newton-Schulz needs whole matrices and is most of the work, so the ranks divide it: muon.py.
    """

    def __init__(self, groups, split_rows, constants, compile, copies, cut):
        """split_rows: muon.hidden_matrices(). copies: see make_optimizer(). cut: muon.cut_of()."""
        super().__init__(groups, constants, compile)
        self.skips_on_device = False  # nothing could stop halfway what travels and is multiplied many times
        self.split_rows = split_rows
        self.copies = copies if copies and dist.get_world_size(copies) > 1 else None
        self.cut = cut

    def update(self, number, group, skip):
        if group['update'] != 'muon':
            return super().update(number, group, skip)
        parameters = [parameter for parameter in group['params'] if parameter.grad is not None]
        if not parameters:
            return
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]['momentum_buffer'] = torch.zeros_like(parameter)
        import muon

        theta, g = [local(p) for p in parameters], [local(p.grad) for p in parameters]
        m = [local(self.state[p]['momentum_buffer']) for p in parameters]
        torch._foreach_lerp_(m, g, 1 - muon.MOMENTUM)
        u = torch._foreach_lerp(g, m, muon.MOMENTUM)
        if u[0].is_cuda:
            u = [matrix.bfloat16() for matrix in u]  # precise enough for the iterations, and half to send

        by_ranks = {}  # experts may be sharded over fewer ranks than other weights
        for parameter, matrix in zip(parameters, u, strict=True):
            by_ranks.setdefault(shard_group(parameter), {})[parameter] = matrix
        updates = {}
        for ranks, u in by_ranks.items():
            split_rows, cut = [self.split_rows[p] for p in u], self.cut and self.cut.of(u)
            if ranks:
                found = muon.sharded_muon_updates([*u.values()], [*u], split_rows, ranks, cut)
            else:
                found = muon.muon_updates([*u.values()], split_rows, self.copies, cut)
            updates |= zip(u, found, strict=True)
        torch._foreach_add_(theta, theta, alpha=-group['lr'] * group['weight_decay'])
        torch._foreach_add_(theta, [updates[p] for p in parameters], alpha=-group['lr'])


def shard_group(parameter):
    """The process group over which a parameter is sharded, or None if each rank has it whole."""
    mesh, placements = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else (None, ())
    sharded = [dim for dim, placement in enumerate(placements) if placement.is_shard() and mesh.size(dim) > 1]
    assert len(sharded) <= 1 and all(placements[dim].dim == 0 for dim in sharded), f'expected Shard(0): {placements}'
    return mesh.get_group(sharded[0]) if sharded else None


# --- parametrizations -------------------------------------------------------------------------------------------------
# Learning rates found on a small model hold for a wider one under muP (arXiv 2203.03466), and for a wider and deeper
# one under CompleteP (arXiv 2505.01618, table 1 with alpha = 1). m_N = n_embd / base_width, m_L = n_layer / base_depth
# (1 in muP). Wider models have more heads, not larger ones: attention scores are divided by sqrt(head_dim) as always.
#
#                                  initial variance   learning rate   weight decay   eps            forward
#   matrices of blocks             / m_N              / m_N           x m_N          / (m_N m_L)
#   norms and biases of blocks                                                       / (m_N m_L)
#   embedding, final norm, head                                                                     logits / m_N
#   what a block adds                                                                               / m_L
#
# The first and the last column are in model.py. The table is Adam's, and holds for every optimizer whose update of a
# number does not depend on the scale of its gradients. Weight decay is equally strong at all sizes: AdamW's is
# multiplied by the learning rate, the DANA family's is not. Muon's learning rate of a matrix is divided by sqrt(m_N)
# and not m_N: its update is 0.2 sqrt(max(rows, columns)) times one of norm 1, and the norm must not grow with m_N.


def scaled_groups(groups, model, optimizer):
    """
    An optimizer's groups, split if `model` is a GPT with a parametrization: parameters in blocks get 'lr_factor',
    'weight_decay' and 'eps' by the table. Raises ValueError for an optimizer for which the table is wrong.
    """
    if not isinstance(model, GPT) or model.config.parametrization == 'standard':
        return groups
    if optimizer == 'sgd':
        advice = 'its steps grow with the gradients; use --optimizer=adamw'
        raise ValueError(f'optimizer=sgd with parametrization={model.config.parametrization!r}: {advice}')
    (m_N, m_L), in_blocks, found = model.config.ratios, set(model.blocks.parameters()), []
    for group in groups:
        found.append(group | {'params': [parameter for parameter in group['params'] if parameter not in in_blocks]})
        inside = [parameter for parameter in group['params'] if parameter in in_blocks]
        rate = 1.0
        if inside and inside[0].dim() == 2:
            rate = 1 / m_N**0.5 if group.get('update', optimizer) == 'muon' else 1 / m_N
        decay = group['weight_decay'] / (1 if optimizer in DANA else rate)
        factors = {'lr_factor': rate, 'weight_decay': decay, 'eps': group['eps'] / (m_N * m_L)}
        found.append(group | {'params': inside} | factors)
    return [group for group in found if group['params']]


# --- schedules --------------------------------------------------------------------------------------------------------


def learning_rate_at(step, config):
    """Learning rate of the optimizer step that is about to run (`step` counts from 0). config: a script's.

    All schedules rise linearly to `learning_rate` over `warmup_iters` steps. From there to step `lr_decay_iters`:
        'cosine'    half a cosine down to min_lr (arXiv 1608.03983, one cycle)
        'cos_inf'   the same, and the warm-up begins at 1% of the peak (Enoki, arXiv 2602.05298)
        'wsd'       warm-up, stable, decay: the peak, and over the last 20% a line down to min_lr (arXiv 2404.06395)
        'linear'    a line down to min_lr
        'constant'  the peak, for ever
    From lr_decay_iters on all but 'constant' stay at min_lr. Raises ValueError for a schedule that is unknown.
    """
    schedule, peak, min_lr = config.lr_schedule, config.learning_rate, config.min_lr
    warmup, end = config.warmup_iters, config.lr_decay_iters
    if schedule not in SCHEDULES:
        raise ValueError(f'lr_schedule={schedule!r}: expected one of {", ".join(SCHEDULES)}')
    if min_lr > peak:
        raise ValueError(f'min_lr={min_lr}: expected at most learning_rate={peak}')

    if step < warmup:
        if schedule == 'cos_inf':
            return peak * (0.01 + 0.99 * step / warmup)
        return peak * (step + 1) / (warmup + 1)  # so the first step's rate is above 0
    if schedule == 'constant':
        return peak
    if step >= end:
        return min_lr
    decay_start = max(warmup, int((1 - WSD_DECAY_FRACTION) * end)) if schedule == 'wsd' else warmup
    progress = max(0.0, (step - decay_start) / (end - decay_start))  # 0 at the peak, 1 at min_lr
    line, cosine = 1 - progress, (1 + math.cos(math.pi * progress)) / 2
    height = {'cosine': cosine, 'cos_inf': cosine, 'wsd': line, 'linear': line}[schedule]
    return min_lr + height * (peak - min_lr)


# --- gradients --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def clip_grad_norm_(parameters, max_norm, *norm_groups, optimizer=None):
    """Scale all gradients in place, so that their global L2 norm is at most max_norm. Returns the norm before that, 0-d
    on the device. Collective if the parameters are sharded, or if there are norm_groups.

    norm_groups: pairs (process group, copies), for ranks that hold different parameters, so that their squared norms
        add up. copies is {parameter: how many of these ranks hold it}, so that none counts several times.
    optimizer: the one whose step comes next. On a GPU AdamW's kernel scales the gradients on its way through them.

    torch's own function sends each DTensor through its dispatcher, which is three times the work.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [local(parameter.grad) for parameter in parameters]
    norms = zip(torch._foreach_norm(gradients), parameters, strict=True)
    held_by = {p: n for _, copies in norm_groups for p, n in copies.items()}
    norms = [norm * held_by[p] ** -0.5 if p in held_by else norm for norm, p in norms]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    groups = [
        group for group in (shard_group(parameters[0]), *(group for group, _ in norm_groups)) if group is not None
    ]
    if groups:
        square = norm.double().square()
        for group in groups:
            dist.all_reduce(square, group=group)
        norm = square.sqrt().float()
    if max_norm < math.inf and isinstance(optimizer, AdamW) and not optimizer.forms and gradients[0].is_cuda:
        optimizer.divisor = ((norm + 1e-6) / max_norm).clamp(min=1.0)
    elif max_norm < math.inf:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


# --- experts ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def balance_experts(model, skip=False, group=None):
    """
    After a step, sum over the ranks how many tokens each expert had, for all layers at once. The sums become the
    routers' load and move their biases. Collective; does nothing in a model without experts.

    skip: whether the optimizer skips this step, a bool or a 0-d float tensor (1: yes); load and bias then stay, too.
    group: the ranks that train together, if these are not all ranks.

    bias += router_bias * sign(k/E - load), minus the mean over experts, so that an expert with few tokens is chosen
    more easily. There is no loss that would pull the router away from what the model is trained for (DeepSeek: arXiv
    2408.15664).
    """
    routers = model.routers
    if not routers:
        return
    seen = torch.stack([router.seen for router in routers])  # (L, E+1)
    dist.all_reduce(seen, group=group)
    for router, counts in zip(routers, seen, strict=True):
        router.seen_by_all = counts  # for meter.router_metrics()
    torch._foreach_zero_([router.seen for router in routers])
    if skip is True:
        return
    before, uniform = torch.stack([router.load for router in routers]), routers[0].k / routers[0].n_experts
    load = uniform * (seen[:, :-1] / seen[:, :-1].mean(1, keepdim=True)).float()  # (L, E)
    counts = load.isfinite()  # false in a step without any token
    if isinstance(skip, torch.Tensor):
        counts = counts & (skip == 0)
    load = torch.where(counts, load, before)
    torch._foreach_copy_([router.load for router in routers], load.unbind())
    if routers[0].bias_rate:
        bias = torch.stack([router.bias for router in routers])
        bias += routers[0].bias_rate * (uniform - load).sign() * counts
        bias -= bias.mean(1, keepdim=True)  # only differences matter
        torch._foreach_copy_([router.bias for router in routers], bias.unbind())
