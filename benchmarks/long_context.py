"""
What a longer context is worth: bits per byte by position, and a needle test, of a small model that is extended.

    python benchmarks/long_context.py --out=out/long          # 44 minutes beside a test suite; the same command goes on
    python benchmarks/long_context.py --needles=tasks/needles --lengths 8000 32000    # the test alone, for any model
    python evaluate.py --out_dir=models/NAME --tasks=tasks/needles/32000_at_0.5.jsonl

The model of config/quickstart.py is trained on 256 tokens, for half as many steps. config/long_context.py extends it
to 1024 in three ways, each measured at once, and after its 40 steps. Bits per byte are those of the validation text, by
a token's position.

The needle test: lines of the standard library, and among them five like `# The number of kite is 4821.` The question is
one of the names, at the end; its line stands at some depth, 0 = at the beginning. Of the five numbers the likeliest has
to be the right one: chance is 0.2. A length is in bytes, 3.2 of which are a token of that model.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / 'tests')]

from launch import command_of, environment

SHORT, LONG = 256, 1024  # tokens
LENGTHS, DEPTHS, ITEMS = [700, 1400, 2800], (0.0, 0.25, 0.5, 0.75, 1.0), 40
WAYS = {  # name: (its folder, keys of config/long_context.py, fields of ModelConfig)
    'as it is': ('as_it_is', '--yarn=', {}),
    'theta x 8': ('theta', '--yarn= --rope_theta=80000', {'rope_theta': 80000.0}),
    'YaRN x 4': ('yarn', '', {'yarn': [4, SHORT]}),
}
NAMES = 'kite lamp rose bell coin drum fern gate hawk iris jade lion moon nest opal pear quill reed sail tree'.split()


# --- the needle test --------------------------------------------------------------------------------------------------


def library_lines():
    paths = sorted(Path(os.__file__).parent.glob('*.py'))
    lines = [line for path in paths for line in path.read_text(encoding='utf-8', errors='ignore').splitlines()]
    return [line for line in lines if line.isascii() and 20 < len(line) < 80]


def question(draw, lines, length, depth):
    """A row for evaluate.py: about `length` bytes of consecutive lines with five needles, one of them at depth."""
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
    """The tasks {(length, depth): path}."""
    folder.mkdir(parents=True, exist_ok=True)
    lines, tasks = library_lines(), {}
    for length in lengths:
        for depth in DEPTHS:
            draw = random.Random(f'{length} {depth}')
            tasks[length, depth] = folder / f'{length}_at_{depth}.jsonl'
            rows = [json.dumps(question(draw, lines, length, depth)) for _ in range(ITEMS)]
            tasks[length, depth].write_text('\n'.join(rows) + '\n')
    return tasks


def accuracies(out_dir, tasks):
    """{(length, depth): accuracy} of a run, by evaluate.py."""
    results = out_dir / 'needles.jsonl'
    results.unlink(missing_ok=True)
    run(
        'evaluate.py',
        f'--out_dir={out_dir} --results={results} --dtype=float32 --tasks={",".join(map(str, tasks.values()))}',
    )
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    return {key: row['acc'] for key, row in zip(tasks, rows, strict=True)}


# --- the model --------------------------------------------------------------------------------------------------------


def run(script, keys):
    command = command_of(script, *keys.split())
    print('$', *command[1:], flush=True)
    subprocess.run(command, cwd=REPO, env=environment(), check=True)


def bits_by_position(out_dir, data_dir, windows=80, **changes):
    """Bits per byte of a run's model in each quarter of LONG validation tokens; changes: of its ModelConfig."""
    import torch

    from model import GPT, ModelConfig
    from runtime import checkpoint
    from text.scoring import score_tokens
    from text.windows import open_dataset

    weights, state = checkpoint.load_weights(checkpoint.choose_to_read(str(out_dir)))
    model = GPT(ModelConfig(**{**state['identity']['model'], 'block_size': LONG, **changes})).eval()
    model.load_state_dict(weights)
    text = open_dataset(str(data_dir), 'stdlib-bpe2048', 'val', LONG, None)
    nats = torch.zeros(LONG, dtype=torch.float64)
    with torch.no_grad():
        for tokens in torch.from_numpy(text.read(range(windows))):
            hidden, weight = model(tokens[None, :-1], then=lambda *parts: parts)
            nats -= score_tokens(hidden[0], weight, tokens[1:])[0].double()
    return (nats.view(4, -1).mean(1) / windows / math.log(2) / text.bytes_per_token).tolist()


def table(head, rows):
    lines = [head, ['---'] * len(head), *rows]
    print(*(f'| {" | ".join(map(str, line))} |' for line in lines), '', sep='\n', flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=Path('out/long'), help='folder of data, runs and tasks')
    parser.add_argument('--needles', type=Path, help='write the needle test into this folder, and stop')
    parser.add_argument('--lengths', type=int, nargs='+', default=LENGTHS, help='its lengths in bytes')
    arguments = parser.parse_args()
    if arguments.needles:
        write_needles(arguments.needles, arguments.lengths)
        return

    out = arguments.out.resolve()
    tasks = write_needles(out / 'needles', arguments.lengths)
    on_cpu = f'--data_dir={out}/data --device=cpu --dtype=float32'
    if not (out / 'data/stdlib-bpe2048/meta.json').exists():
        run('prepare_data.py', f'--data_dir={out}/data')
    run(
        'train_ddp.py',
        f'config/quickstart.py {on_cpu} --max_iters=400 --eval_interval=0 --eval_iters=1 --out_dir={out}/short',
    )
    for name, keys, _ in WAYS.values():
        run('train_fsdp.py', f'config/long_context.py {on_cpu} --init_from={out}/short --out_dir={out}/{name} {keys}')

    rows = []
    for way, (name, _, changes) in WAYS.items():
        at_once = bits_by_position(out / 'short', out / 'data', **changes)
        for steps, bits in ((0, at_once), (40, bits_by_position(out / name, out / 'data'))):
            rows.append([way, steps, *(f'{number:.3f}' for number in bits)])
    table(['rotation', 'steps', *(f'{q * LONG // 4} to {(q + 1) * LONG // 4}' for q in range(4))], rows)

    found = {'short': accuracies(out / 'short', {key: tasks[key] for key in tasks if key[0] == arguments.lengths[0]})}
    found |= {way: accuracies(out / name, tasks) for way, (name, _, _) in WAYS.items()}
    rows = []
    for way, of_way in found.items():
        for length in dict.fromkeys(length for length, _ in of_way):
            rows.append([way, length, *(f'{of_way[length, depth]:.2f}' for depth in DEPTHS)])
    table(['model', 'bytes', *(f'depth {depth}' for depth in DEPTHS)], rows)


if __name__ == '__main__':
    main()
