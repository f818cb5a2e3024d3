"""The published equations of every optimizer in float64, for tests of optim.py and of its moments in fewer bits."""

import math
from types import SimpleNamespace

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from optim import learning_rate_at

STEPS = 100
KEYS = dict(learning_rate=3e-2, beta1=0.9, beta2=0.95, weight_decay=0.05, kappa=0.7, delta=6.0, wd_ts=25, max_iters=80)
SCHEDULE = dict(lr_schedule='cos_inf', warmup_iters=10, lr_decay_iters=STEPS, min_lr=1e-4)
RATES = [learning_rate_at(step, SimpleNamespace(**KEYS, **SCHEDULE)) for step in range(STEPS)]
DECAYED = ('attn.qkv.weight', 'tall.weight', 'wide.weight', 'single.weight', 'head.weight')
HIDDEN = {'attn.qkv.weight': (6, 3, 3), 'tall.weight': (17,), 'wide.weight': (5,), 'single.weight': (1,)}


def piece(full, mesh):
    """A DTensor that is sharded in its first dimension over the mesh's last dimension, and replicated over others."""
    pieces = list(full.chunk(mesh.size(mesh.ndim - 1))) + [full[:0]] * mesh.size()
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    own = pieces[mesh.get_local_rank(mesh.ndim - 1)].clone()
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def reference(optimizer, name, theta, gradients, rate=1, decays=1, eps=1e-8, at_rest=None):
    """The parameter `name` after all steps, by the published equations in float64.

    gradients: one per step. rate, decays: factors of the learning rate and of the weight decay. at_rest(t, slot,
    moment): what a moment becomes after step t, if it is stored in fewer bits.
    """
    theta, gradients = theta.double(), gradients.double()
    lr_max, b1, b2, kappa, delta, ts = (
        KEYS[key] for key in ('learning_rate', 'beta1', 'beta2', 'kappa', 'delta', 'wd_ts')
    )
    wd = KEYS['weight_decay'] * decays if name in DECAYED else 0.0
    m, v, tau, slow = (torch.zeros_like(theta) for _ in range(4))
    for t in range(1, len(gradients) + 1):
        g, lr = gradients[t - 1], RATES[t - 1] * rate
        if optimizer == 'muon' and name in HIDDEN:
            m = 0.95 * m + 0.05 * g
            nesterov = 0.05 * g + 0.95 * m
            parts = [0.2 * max(part.shape) ** 0.5 * newton_schulz(part) for part in nesterov.split(HIDDEN[name])]
            theta = theta - lr * (torch.cat(parts) + wd * theta)
        elif optimizer == 'sgd':
            theta = theta - lr * (g + wd * theta)
        elif optimizer in ('adamw', 'adamw-decay', 'muon', 'ademamix'):
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * g**2
            m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
            if optimizer == 'ademamix':
                done = min(t / KEYS['max_iters'], 1)
                ln1, ln3 = math.log(b1), math.log(0.9999)
                b3 = min(math.exp(ln1 * ln3 / ((1 - done) * ln3 + done * ln1)), 0.9999)
                slow = b3 * slow + (1 - b3) * g
                m_hat = m_hat + 8 * done * slow
            decay = wd / (1 + t / ts) if optimizer == 'adamw-decay' else wd
            theta = theta - lr * (m_hat / (v_hat.sqrt() + eps) + decay * theta)
        else:
            a = delta / (delta + t)
            m = m + a * (g - m)
            v = (1 - a) * v + a * g**2
            root = v.sqrt() + eps
            growth = (1 + t) ** (1 - kappa)
            decay = 1 - RATES[t - 1] / lr_max * wd / (1 + t / ts)
            if optimizer == 'adana':
                theta = theta * decay - lr * (g + growth * m) / root
            elif optimizer == 'adana-released':
                theta = (theta - lr * (g + (growth + 1) * m) / root) * decay
            elif optimizer == 'dana-mk4':
                A = (growth * m.abs() / root).clamp(max=2)
                theta = theta * decay - lr * (g / root + m.sign() * A + m / root)
            elif optimizer == 'dana-star-mk4':
                tau = tau + a * (g.abs() / (g.abs() + root) - tau)
                tau_c = tau.clamp(max=0.5)
                p = (tau_c / (1 - tau_c)).clamp(min=1 / (1 + t))
                n = p.sqrt() / root
                T = (tau * t).clamp(min=1)
                A = (T ** (1 - kappa) * m.abs() * n / p).clamp(max=2)
                theta = theta * decay - lr * (g * n + m.sign() * (p * A + m.abs() * n))
            else:
                raise ValueError(f'{optimizer}: write down its equations here')
        if at_rest:
            m, v, tau, slow = (
                at_rest(t, slot, moment)
                for slot, moment in (('exp_avg', m), ('exp_avg_sq', v), ('tau', tau), ('exp_avg_slow', slow))
            )
    return theta


def newton_schulz(x):
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
    return x
