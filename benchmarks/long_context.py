"""
What is a longer context worth to a small model that is extended to it? Bits per byte by position, and needles found.

    python benchmarks/long_context.py --out=out/long          # bits per byte; if killed, the same command continues
    python benchmarks/long_context.py --seeds 1 2 3           # needles found by small models: 8 minutes
    python benchmarks/long_context.py --needles=tasks/needles --lengths 8000 32000   # writes needles for any model
    python evaluate.py --out_dir=models/NAME --tasks=tasks/needles/32000_at_0.5.jsonl

The first command trains the model of config/quickstart.py on 256 tokens, for half as many steps as usual. Then
config/long_context.py extends it to 1024 tokens in three ways, and each way is measured at once and after 40 steps of
training. Bits per byte are those of the validation text, in each quarter of the 1024 tokens.

That model cannot answer questions, so --seeds trains smaller ones that can. In their texts only looking back lowers the
loss: half of them are pairs of a letter and a digit, such as `k4b7x0k4`, where a letter keeps its digit to the end of
the text; the others repeat a row of random symbols again and again. The models are extended from 64 tokens to 256. A
needle is a pair that occurs once in its text, at some depth (0 = at the beginning), and its letter comes again at the
end as the question. The answer is right if the needle's digit is the likeliest of the ten, so chance is 0.1.

--needles writes tasks for any model: lines of the standard library, with five among them like `# The number of kite is
4821.` The question is one of the names, and the answer is right if its number is the likeliest of the five, so chance
is 0.2. Lengths are in bytes.
"""

import argparse
import json
import math
import os
import random
import statistics
import string
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from benchmarks.runs import command_of, environment

SHORT, LONG = 256, 1024  # tokens
DEPTHS, ITEMS = (0.0, 0.25, 0.5, 0.75, 1.0), 40
WAYS = {  # name: (its folder, keys, fields of ModelConfig)
    'as it is': ('as_it_is', '--yarn=', {}),
    'theta x 8': ('theta', '--yarn= --rope_theta=80000', {'rope_theta': 80000.0}),
    'YaRN x 4': ('yarn', '--yarn=4', {'yarn': [4, SHORT]}),
}
NAMES = 'kite lamp rose bell coin drum fern gate hawk iris jade lion moon nest opal pear quill reed sail tree'.split()


# --- the needle test --------------------------------------------------------------------------------------------------


def library_lines():
    paths = sorted(Path(os.__file__).parent.glob('*.py'))
    lines = [line for path in paths for line in path.read_text(encoding='utf-8', errors='ignore').splitlines()]
    return [line for line in lines if line.isascii() and 20 < len(line) < 80]


def question(draw, lines, length, depth):
    """A row for evaluate.py: about `length` bytes of consecutive lines among which stand five needles, the one that is
    asked for at `depth`."""
    names, numbers = draw.sample(NAMES, 5), [f'{number}' for number in draw.sample(range(1000, 10000), 5)]
    needles = [f'# The number of {name} is {number}.' for name, number in zip(names, numbers, strict=True)]
    asked = f'# The number of {names[0]} is'
    room, first, text = length - sum(map(len, [*needles, asked])), draw.randrange(len(lines) // 2), []
    while (room := room - len(lines[first + len(text)]) - 1) > 0:
        text.append(lines[first + len(text)])
    for needle in needles[1:]:
        text.insert(draw.randint(0, len(text)), needle)
    text.insert(round(depth * len(text)), needles[0])
    return {'context': '\n'.join([*text, asked]), 'choices': numbers, 'gold': 0}


def write_needles(folder, lengths):
    folder.mkdir(parents=True, exist_ok=True)
    lines = library_lines()
    for length in lengths:
        for depth in DEPTHS:
            draw = random.Random(f'{length} {depth}')
            rows = [json.dumps(question(draw, lines, length, depth)) for _ in range(ITEMS)]
            (folder / f'{length}_at_{depth}.jsonl').write_text('\n'.join(rows) + '\n')


# --- the model --------------------------------------------------------------------------------------------------------


def run(script, keys):
    command = command_of(script, *keys.split())
    print('$', *command[1:], flush=True)
    subprocess.run(command, cwd=REPO, env=environment(), check=True)


def bits_by_position(out_dir, data_dir, windows=80, **changes):
    """Bits per byte of a run's model in each quarter of LONG validation tokens. changes: to its ModelConfig."""
    import torch

    from data import bytes_per_target
    from dataset.opening import open_dataset
    from evaluation.scoring import score_tokens
    from model import GPT, ModelConfig
    from runtime import checkpoint

    weights, state = checkpoint.load_weights(checkpoint.choose_to_read(str(out_dir)))
    model = GPT(ModelConfig(**{**state['identity']['model'], 'block_size': LONG, **changes})).eval()
    model.load_state_dict(weights)
    text = open_dataset(str(data_dir), 'stdlib-bpe2048', 'val', LONG, None)
    nats = torch.zeros(LONG, dtype=torch.float64)
    with torch.no_grad():
        for tokens in torch.from_numpy(text.read(range(windows))):
            hidden, logits_of = model(tokens[None, :-1], then=lambda *parts: parts)
            nats -= score_tokens(hidden[0], logits_of, tokens[1:])[0].double()
    return (nats.view(4, -1).mean(1) / windows / math.log(2) / bytes_per_target(text, windows)).tolist()


def table(head, rows):
    lines = [head, ['---'] * len(head), *rows]
    print(*(f'| {" | ".join(map(str, line))} |' for line in lines), '', sep='\n', flush=True)


# --- a small model that finds needles ---------------------------------------------------------------------------------

TRAINED, EXTENDED = 64, 256  # tokens, which are bytes
LETTERS, DIGITS = string.ascii_lowercase, string.digits  # a text of pairs has 13 of the 26 letters
START = '>'  # begins each text: a place for attention while there is nothing to find
RECIPE = (  # it takes two layers to look back for the same letter and for what came behind it
    f'--arch=llama --n_layer=2 --n_head=2 --head_dim=64 --n_embd=64 --block_size={TRAINED} --batch_size=16 '
    '--optimizer=muon --max_iters=2000 --learning_rate=1e-2 --lr_schedule=wsd --min_lr=0 --weight_decay=0'
)
EXTENSION = f'--optimizer=muon --block_size={EXTENDED} --batch_size=4 --min_lr=0 --weight_decay=0'
STEPS = {  # one step at 1e-30 changes no weight, so it shows what a rotation is worth at once
    0: '--max_iters=1 --learning_rate=1e-30',
    40: '--max_iters=40 --learning_rate=1e-3 --warmup_iters=4',
}


def pairs(draw, letters, count):
    """`count` pairs of a letter and its digit. Some letters are rare, so that their last place may be far back."""
    digits = draw.choices(DIGITS, k=len(letters))
    weights = [draw.random() for _ in letters]
    return draw.choices([letter + digit for letter, digit in zip(letters, digits, strict=True)], weights, k=count)


def pairs_or_copies(draw, length):
    """START and `length` symbols: pairs, or a row of 8 to 36 different symbols again and again, which is learned
    sooner."""
    if draw.random() < 0.5:
        return START + ''.join(pairs(draw, draw.sample(LETTERS, 13), length // 2))
    symbols = ''.join(draw.sample(LETTERS + DIGITS, draw.randint(8, 36)))
    return START + (symbols * length)[:length]


def prepare_pairs(folder, tokens, documents):
    """Prepare a dataset in which each window of so many tokens is one document, from START to the token that ends
    it."""
    draw, texts = random.Random(tokens), folder / f'pairs{tokens}.jsonl'
    folder.mkdir(parents=True, exist_ok=True)
    rows = (json.dumps({'text': pairs_or_copies(draw, tokens - 2)}) for _ in range(documents))
    texts.write_text('\n'.join(rows) + '\n')
    run('prepare_data.py', f'--dataset={texts} --tokenizer=bytes --name=pairs{tokens} --data_dir={folder}')


def write_pair_needles(folder, items=200):
    """Write tasks of pairs in which the pair that is asked for occurs once; returns {(length, depth): path}."""
    folder.mkdir(parents=True, exist_ok=True)
    tasks = {}
    for length in (TRAINED, 2 * TRAINED, EXTENDED):
        for depth in (0.0, 0.25, 0.5, 0.75):
            draw, rows = random.Random(f'{length} {depth}'), []
            for _ in range(items):
                (letter, *others), digit = draw.sample(LETTERS, 13), draw.choice(DIGITS)
                text = pairs(draw, others, length // 2 - 3)
                text.insert(round(depth * len(text)), letter + digit)
                choices = {'choices': [*DIGITS], 'gold': int(digit), 'delimiter': ''}
                rows.append(json.dumps({'context': START + ''.join(text) + letter, **choices}))
            tasks[length, depth] = folder / f'{length}_at_{depth}.jsonl'
            tasks[length, depth].write_text('\n'.join(rows) + '\n')
    return tasks


def found_by(out_dir, tasks):
    """{(length, depth): share of right answers} of a run, by evaluate.py."""
    results = out_dir / 'needles.jsonl'
    results.unlink(missing_ok=True)
    files = ','.join(map(str, tasks.values()))
    run('evaluate.py', f'--out_dir={out_dir} --results={results} --device=cpu --dtype=float32 --tasks={files}')
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    return {key: row['acc'] for key, row in zip(tasks, rows, strict=True)}


def mean_and_error(numbers):
    """Mean and standard error of a number that each seed has, as text."""
    error = f' ± {statistics.stdev(numbers) / len(numbers) ** 0.5:.2f}' if len(numbers) > 1 else ''
    return f'{statistics.mean(numbers):.2f}{error}'


def compare_on_needles(out, seeds):
    """Print the share of needles found: the mean over seeds, and its standard error."""
    prepare_pairs(out / 'data', TRAINED, 34_000)
    prepare_pairs(out / 'data', EXTENDED, 2000)
    tasks = write_pair_needles(out / 'needles')
    quiet = '--eval_interval=0 --eval_sequences=64 --log_interval=200 --checkpoint_interval=0 --keep_checkpoints=1'
    common = f'--data_dir={out}/data --device=cpu --dtype=float32 {quiet}'
    found = {(way, steps): [] for steps in STEPS for way in WAYS}
    for seed in seeds:
        short = out / f'short_{seed}'
        run('train_ddp.py', f'--dataset=pairs{TRAINED} {RECIPE} {common} --seed={seed} --out_dir={short}')
        for way, steps in found:
            name, keys, _ = WAYS[way]
            run(
                'train_ddp.py',
                f'--dataset=pairs{EXTENDED} {EXTENSION} {STEPS[steps]} {common} --seed={seed} --init_from={short} '
                f'--out_dir={out}/{name}_{steps}_{seed} {keys}',
            )
            found[way, steps].append(found_by(out / f'{name}_{steps}_{seed}', tasks))
    lengths, depths = (list(dict.fromkeys(numbers)) for numbers in zip(*tasks, strict=True))
    by_length, by_depth = [], []
    for key, seed_results in found.items():
        means = ([statistics.mean(one[length, d] for d in depths) for one in seed_results] for length in lengths)
        by_length.append([*key, *map(mean_and_error, means)])
        by_depth.append([*key, *(mean_and_error([one[EXTENDED, depth] for one in seed_results]) for depth in depths)])
    table(['rotation', f'steps at {EXTENDED}', *(f'{length} tokens' for length in lengths)], by_length)
    table(['rotation', f'steps at {EXTENDED}', *(f'{EXTENDED}, depth {depth}' for depth in depths)], by_depth)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=Path('out/long'), help='folder of data, runs and tasks')
    parser.add_argument('--needles', type=Path, help='write needles for any model into this folder, and stop')
    parser.add_argument('--lengths', type=int, nargs='+', default=[8000, 32000], help='their lengths in bytes')
    parser.add_argument('--seeds', type=int, nargs='+', help='needles found by small models of these seeds, and stop')
    arguments = parser.parse_args()
    if arguments.needles:
        write_needles(arguments.needles, arguments.lengths)
        return

    out = arguments.out.resolve()
    if arguments.seeds:
        compare_on_needles(out / 'pairs', arguments.seeds)
        return
    on_cpu = f'--data_dir={out}/data --device=cpu --dtype=float32'
    if not (out / 'data/stdlib-bpe2048/meta.json').exists():
        run('prepare_data.py', f'--data_dir={out}/data')
    run(
        'train_ddp.py',
        f'config/quickstart.py {on_cpu} --max_iters=400 --eval_interval=0 --eval_sequences=8 --out_dir={out}/short',
    )
    for name, keys, _ in WAYS.values():
        run('train_fsdp.py', f'config/long_context.py {on_cpu} --init_from={out}/short --out_dir={out}/{name} {keys}')

    rows = []
    for way, (name, _, changes) in WAYS.items():
        at_once = bits_by_position(out / 'short', out / 'data', **changes)
        for steps, bits in ((0, at_once), (40, bits_by_position(out / name, out / 'data'))):
            rows.append([way, steps, *(f'{number:.3f}' for number in bits)])
    table(['rotation', 'steps', *(f'{q * LONG // 4} to {(q + 1) * LONG // 4}' for q in range(4))], rows)


if __name__ == '__main__':
    main()
