"""
What does it cost to balance the experts of a mixture by the load of the step before? Compares four rules.

    python prepare_data.py
    python benchmarks/router_balance.py                # 12 runs of 800 steps, 25 minutes on one CPU core
    python benchmarks/router_balance.py --experts=16 --learning_rate=6e-3

before    model.Router.loss_sum() as it is: the load of the step before, which is the same on any number of ranks
same      the load of the same tokens, as is usual; it is exact here, since one process sees the whole batch at once
bias      no balancing loss, but router_bias=0.001, which follows the load of the step before (arXiv 2408.15664)
none      no balancing at all

Each rule trains with the same seeds, so losses are compared in pairs. docs/log.md has what came out.
"""

import argparse
import os
import statistics
import sys

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, REPO)

from benchmarks.runs import column, run_script

RULES = {'before': {}, 'same': {}, 'bias': {'router_aux': 0, 'router_bias': 0.001}, 'none': {'router_aux': 0}}
SHAPE = {'arch': 'qwen3', 'n_layer': 4, 'n_head': 4, 'n_embd': 128, 'expert_hidden_dim': 192, 'block_size': 128}
RUN = {'batch_size': 8, 'max_iters': 800, 'warmup_iters': 40, 'min_lr': 0.0, 'dataset': 'stdlib-bpe2048'}
RUN |= {'dtype': 'float32', 'device': 'cpu', 'log_interval': 50, 'eval_sequences': 1600, 'eval_interval': 0}
RUN |= {'keep_checkpoints': 0, 'router_aux': 0.01, 'resume': 'never'}


def train_with_the_load_of_the_same_tokens():
    """Run train_ddp.py with the rest of the command line, where the routers' loss uses the load of its own tokens."""
    import runpy

    import torch.nn.functional as F

    from model import Router

    as_it_is = Router.loss_sum

    def loss_sum(self, chosen, logits, valid):
        counts = (F.one_hot(chosen, self.n_experts).sum(1) * valid[:, None]).sum(0)
        self.load.copy_(counts / valid.sum())
        return as_it_is(self, chosen, logits, valid)

    Router.loss_sum = loss_sum
    sys.argv = ['train_ddp.py', *sys.argv[2:]]
    runpy.run_path(os.path.join(REPO, 'train_ddp.py'), run_name='__main__')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--experts', type=int, default=8)
    parser.add_argument('--learning_rate', type=float, default=3e-3)
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--max_iters', type=int, default=800)
    parser.add_argument('--out_dir', default='out/router_balance')
    args = parser.parse_args()
    found = {rule: [] for rule in RULES}
    for seed in range(1, args.seeds + 1):
        for rule, keys in RULES.items():
            out_dir = f'{args.out_dir}/{rule}-{seed}'
            keys = {**SHAPE, **RUN, 'n_experts': args.experts, 'learning_rate': args.learning_rate, **keys}
            keys |= {'max_iters': args.max_iters, 'seed': seed, 'out_dir': out_dir}
            script = ['benchmarks/router_balance.py', 'same'] if rule == 'same' else ['train_ddp.py']
            run_script(*script, *(f'--{key}={value}' for key, value in keys.items()))
            violations = column(out_dir, 'router/violation')
            late = statistics.mean(violations[len(violations) // 2 :])
            row = column(out_dir, 'val_loss')[-1], violations[0], late, column(out_dir, 'router/worst_dead')[-1]
            found[rule].append(row)
            print(f'{rule}-{seed}: val_loss {row[0]:.4f}, violation {row[1]:.2f} -> {late:.2f}', flush=True)
    print('\n| rule | val_loss | against before, paired | violation, second half | dead experts, worst layer |')
    print('|---|---|---|---|---|')
    for rule, rows in found.items():
        losses, _, late, dead = zip(*rows, strict=True)
        apart = [row[0] - other[0] for row, other in zip(rows, found['before'], strict=True)]
        cells = [', '.join(f'{loss:.4f}' for loss in losses), f'{min(apart):+.4f} to {max(apart):+.4f}']
        cells += [f'{statistics.mean(late):.2f}', f'{max(dead):.0%}']
        print(f'| {rule} | {" | ".join(cells)} |')


if __name__ == '__main__':
    train_with_the_load_of_the_same_tokens() if sys.argv[1:2] == ['same'] else main()
