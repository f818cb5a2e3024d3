"""
What do AdamW's moments in fewer bits save, and what do they cost? Bytes, losses and time of a step, also beside the
8-bit AdamW of torchao and bitsandbytes.

    python prepare_data.py
    python benchmarks/moments.py                                  # ours: float32, bfloat16, int8
    python benchmarks/moments.py torchao bitsandbytes             # and theirs, in a venv that has them
    python benchmarks/moments.py --compile --steps=200            # ours compiled; torchao always compiles its step

All train quickstart's model from the same weights on the same batches, in one process and a step of each in turns, so
that a busy machine slows down all of them. Bytes are those of the optimizer's state, in total and per parameter; ours
keeps the moments of embedding and head in fp32, the libraries do not. The loss is the mean over the last tenth of the
steps.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import data
import optim
from model import GPT, ModelConfig

OURS, THEIRS = ('float32', 'bfloat16', 'int8'), ('torchao', 'bitsandbytes')
KEYS = {'learning_rate': 3e-3, 'beta1': 0.9, 'beta2': 0.95, 'weight_decay': 0.1}
BLOCK, SEQUENCES, SEED = 256, 8, 1337


def model_of(vocab_size):
    config = ModelConfig(arch='llama', n_layer=4, n_head=6, n_embd=192, block_size=BLOCK, vocab_size=vocab_size)
    model = GPT(config, torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.initial_value(name, parameter, SEED, torch.device('cpu')))
    return model


def optimizer_of(name, model, compile):
    if name in OURS:
        return optim.make_optimizer(model, 'adamw', **KEYS, dtype=name, seed=SEED, compile=compile)
    groups = optim.parameter_groups(model, KEYS['weight_decay'])
    keys = {'lr': KEYS['learning_rate'], 'betas': (KEYS['beta1'], KEYS['beta2'])}
    if name == 'torchao':
        from torchao.optim import AdamW8bit
    else:
        from bitsandbytes.optim import AdamW8bit
    return AdamW8bit(groups, **keys)


def bytes_of_state(optimizer):
    """Bytes of all tensors in an optimizer's state; those of torchao hold tensors of codes, scales and a map."""
    total, seen = 0, set()
    for state in optimizer.state.values():
        for value in state.values():
            inner = getattr(value, '__tensor_flatten__', None)
            parts = [getattr(value, part) for part in inner()[0]] if inner else [value]
            for part in parts:
                if isinstance(part, torch.Tensor) and part.data_ptr() not in seen:  # the map is shared
                    seen.add(part.data_ptr())
                    total += part.nbytes
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('libraries', nargs='*', metavar='library', help=', '.join(THEIRS))
    parser.add_argument('--steps', type=int, default=100)
    parser.add_argument('--compile', action='store_true', help='torch.compile our updates')
    parser.add_argument('--dataset', default='stdlib-bpe2048')
    parser.add_argument('--data_dir', default='data')
    given = parser.parse_args()
    if unknown := [name for name in given.libraries if name not in THEIRS]:
        parser.error(f'{unknown[0]}: expected {" or ".join(THEIRS)}')
    keys = {'dataset': given.dataset, 'data_dir': given.data_dir, 'block_size': BLOCK, 'vocab_size': None}
    mixture = data.open_mixture({**keys, 'dataset_stages': (), 'windows': 'stream'}, 'train')
    mixture.plan(given.steps, SEQUENCES)
    names = [*OURS, *given.libraries]
    models = {name: model_of(mixture.vocab_size) for name in names}
    optimizers = {name: optimizer_of(name, model, given.compile) for name, model in models.items()}
    losses, times = {name: [] for name in names}, {name: [] for name in names}
    batches = data.batches(mixture, SEED, 0, SEQUENCES, SEQUENCES, 0, 1, torch.device('cpu'))
    for number in range(given.steps):
        batch = next(batches)
        for name in names[:: -1 if number % 2 else 1]:
            loss_sum, ce_sum = models[name](*batch)
            (loss_sum / batch[1].numel()).backward()
            optim.clip_grad_norm_(models[name].parameters(), 1.0)
            began = time.perf_counter()
            optimizers[name].step()
            times[name].append(1e3 * (time.perf_counter() - began))
            optimizers[name].zero_grad(set_to_none=True)
            losses[name].append(ce_sum.item() / batch[1].numel())
    batches.close()
    numbers, last = sum(p.numel() for p in models['float32'].parameters()), max(1, given.steps // 10)
    print(f'{numbers:,} parameters, {given.steps} steps, {torch.get_num_threads()} threads')
    for name in names:
        held, median = bytes_of_state(optimizers[name]), statistics.median(times[name][1:] or times[name])
        loss = statistics.fmean(losses[name][-last:])
        print(
            f'{name:13} {held:12,} bytes, {held / numbers:5.2f} a parameter; loss {loss:.4f}; '
            f'step {median:7.1f} ms ({min(times[name]):.1f} to {max(times[name]):.1f}), the first {times[name][0]:.0f}'
        )


if __name__ == '__main__':
    main()
