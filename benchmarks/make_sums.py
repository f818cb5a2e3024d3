"""
Writes sums of two numbers below 100, on which a tiny model can learn within minutes what large ones learn in days: a
language of one kind of sentence, which of two answers is the better one (docs/dpo.md), and to find answers that nobody
has told it (docs/grpo.md).

    python benchmarks/make_sums.py

    sums/texts.jsonl    {"text": "37+58=95\\n"}: 700 of the 8,100 sums, to pretrain on
    sums/pairs.jsonl    {"prompt": "37+58=", "chosen": "95\\n", "rejected": "94\\n"}: 2,000 others; one digit is wrong
    sums/prompts.jsonl  {"prompt": "37+58=", "answer": "95", ...}: these 2,000 and 4,590 more, as tasks to practise on
    sums/sums.jsonl     the last 810 as tasks, which no training sees

For a small chat model there are products of two numbers below 20, as questions:

    sums/products.jsonl {"prompt": "What is 17 * 5? Answer with the number.", "answer": "85", ...}: 260 to practise on
    sums/unseen.jsonl   the other 64
"""

import argparse
import json
import random
from pathlib import Path

TEXTS, PAIRS, HELD_OUT = 700, 2000, 810
UNSEEN = 64  # of the products


def with_a_wrong_digit(answer, draw):
    place = draw.randrange(len(answer))
    others = [digit for digit in '0123456789' if digit != answer[place] and (digit != '0' or place)]
    return answer[:place] + draw.choice(others) + answer[place + 1 :]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=Path('sums'), help='folder for the files')
    parser.add_argument('--seed', type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    sums = [(f'{a}+{b}=', str(a + b)) for a in range(10, 100) for b in range(10, 100)]
    draw.shuffle(sums)
    held_out, texts, others = sums[:HELD_OUT], sums[HELD_OUT:][:TEXTS], sums[HELD_OUT + TEXTS :]
    task = {'stop': ['\n'], 'rule': 'exact', 'max_new_tokens': 5}
    files = {
        'texts': [{'text': f'{prompt}{answer}\n'} for prompt, answer in texts],
        'pairs': [
            {'prompt': prompt, 'chosen': f'{answer}\n', 'rejected': f'{with_a_wrong_digit(answer, draw)}\n'}
            for prompt, answer in others[:PAIRS]
        ],
        'prompts': [{'prompt': prompt, 'answer': answer, **task} for prompt, answer in others],
        'sums': [{'prompt': prompt, 'answer': answer, **task} for prompt, answer in held_out],
    }
    products = [(a, b) for a in range(2, 20) for b in range(2, 20)]
    random.Random(arguments.seed).shuffle(products)
    task = {'rule': 'number', 'max_new_tokens': 12}
    products = [
        {'prompt': f'What is {a} * {b}? Answer with the number.', 'answer': str(a * b), **task} for a, b in products
    ]
    files |= {'unseen': products[:UNSEEN], 'products': products[UNSEEN:]}
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        path = arguments.out / f'{name}.jsonl'
        path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
        print(f'{path}: {len(rows):,} rows')


if __name__ == '__main__':
    main()
