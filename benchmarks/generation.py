"""
How fast does a Hugging Face model write here, one text or several at once? sampling.generate_batch() beside the
generate() of transformers.

    python benchmarks/generation.py real/smollm2                       # 1 and 16 prompts, 64 greedy tokens of each
    python benchmarks/generation.py real/smollm2 --prompts 1 4 --dtypes float32 --rounds 9

Prompts have 20 to 95 random tokens, and no text ends early. Each round times both, in an order that changes from round
to round, and a ratio is taken within a round. transformers gets the prompts padded on the left, and uses its own cache.
The folder is any that from_pretrained() reads; python benchmarks/real_model.py makes real/smollm2.
"""

import argparse
import os
import random
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import transformers

from evaluation import sampling
from huggingface import finetune
from system import devices, errors


def transformers_generate(model, prompts, tokens):
    longest, device = max(map(len, prompts)), model.device
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    options = {'attention_mask': mask, 'max_new_tokens': tokens, 'do_sample': False, 'pad_token_id': 0}
    return model.generate(ids, **options)[:, longest:].tolist()


def main():
    options = {'description': __doc__, 'formatter_class': argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(**options)
    parser.add_argument('folder')
    parser.add_argument('--prompts', type=int, nargs='+', default=[1, 16])
    parser.add_argument('--tokens', type=int, default=64)
    parser.add_argument('--dtypes', nargs='+', default=['float32', 'bfloat16'])
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--cpu_time', action='store_true', help='of this process: for one thread on a busy machine')
    arguments = parser.parse_args()
    errors.report_errors()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = devices.choose_device(arguments.device, local_rank=0)
    for dtype in arguments.dtypes:
        pretrained = finetune.Pretrained(arguments.folder)
        ours = finetune.for_generation(pretrained, None, getattr(torch, dtype), device)
        finetune.cast_weights(ours, getattr(torch, dtype), device)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=dtype).eval().to(device)
        theirs.generation_config = transformers.GenerationConfig()  # without a token that ends a text
        generate = {
            'ours': lambda prompts, ours=ours: sampling.generate_batch(ours, prompts, arguments.tokens),
            'theirs': lambda prompts, theirs=theirs: transformers_generate(theirs, prompts, arguments.tokens),
        }
        for count in arguments.prompts:
            draw = random.Random(count)
            prompts = [draw.choices(range(1000, pretrained.vocab_size), k=draw.randint(20, 95)) for _ in range(count)]
            seconds, found = {name: [] for name in generate}, {}
            for number in range(arguments.rounds + 1):  # the first warms up
                for name in sorted(generate, reverse=number % 2 == 1):
                    began = clock()
                    found[name] = generate[name](prompts)
                    seconds[name].append(clock() - began)
            rates = {name: [count * arguments.tokens / s for s in times[1:]] for name, times in seconds.items()}
            ratios = sorted(a / b for a, b in zip(*(rates[name] for name in ('ours', 'theirs')), strict=True))
            in_words = ', '.join(f'{name} {statistics.median(rate):.1f} tokens/s' for name, rate in rates.items())
            spread = f'{statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})'
            same = sum(a == b for a, b in zip(found['ours'], found['theirs'], strict=True))
            print(f'{dtype}, {count} prompts: {in_words}: {spread}; {same} of {count} texts equal', flush=True)


if __name__ == '__main__':
    main()
