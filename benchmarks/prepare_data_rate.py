"""
How fast is prepare_data.py with the gpt2 tokenizer, and how much memory does it take, with and without gigatoken?

    python benchmarks/prepare_data_rate.py / 1000           # 1000 MB of the text files below /
    python benchmarks/prepare_data_rate.py                  # 40 MB

Each text is taken once, because gigatoken remembers words, so repeated texts would flatter it. They are shuffled and
tokenized as files of 2 MB, as .jsonl and as .parquet. Timed are whole commands, and their peak memory is printed.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.runs import REPO, SHARED, command_of

TEXTS = {'.py', '.md', '.txt', '.h', '.json', '.rst', '.html', '.js', '.c', '.cpp'}


def find_texts(root, megabytes):
    """Different texts below a folder, in the same shuffled order every time."""
    paths = sorted(Path(folder, name) for folder, _, names in os.walk(root) for name in names)
    random.Random(0).shuffle(paths)
    seen, size = {}, 0
    for path in paths:
        if size < megabytes * 1e6 and path.suffix in TEXTS and path.is_file() and 200 < path.stat().st_size < 5e6:
            with contextlib.suppress(UnicodeDecodeError, OSError):
                text = path.read_text(encoding='utf-8')
                if text not in seen and '\0' not in text:
                    seen[text] = None
                    size += path.stat().st_size
    return list(seen)


def memory_of(pid):
    """Resident bytes of a process and all processes below it; memory that they share is counted once."""
    total = 0
    with contextlib.suppress(OSError):
        for line in Path(f'/proc/{pid}/smaps_rollup').read_text().splitlines():
            total += 1024 * int(line.split()[1]) if line.startswith('Pss:') else 0
        for thread in Path(f'/proc/{pid}/task').iterdir():
            total += sum(memory_of(child) for child in (thread / 'children').read_text().split())
    return total


def measure(folder, root, megabytes):
    """Print rate and memory of every format with and without gigatoken: whole commands, from start to end."""
    texts = find_texts(root, megabytes)
    (folder / 'text').mkdir()
    for number in range(0, len(texts), 150):
        (folder / 'text' / f'{number}.txt').write_text('\n\n'.join(texts[number : number + 150]), newline='')
    with open(folder / 'rows.jsonl', 'w') as file:
        file.writelines(json.dumps({'text': text}, ensure_ascii=False) + '\n' for text in texts)
    pyarrow.parquet.write_table(pyarrow.table({'text': texts}), folder / 'rows.parquet', row_group_size=1000)
    print(f'{len(texts):,} texts, {sum(map(len, texts)) / 1e6:.0f}M characters', flush=True)
    del texts
    for source, engine in itertools.product(('text', 'rows.jsonl', 'rows.parquet'), ('reference', 'auto')):
        options = [f'--dataset={folder / source}', '--tokenizer=gpt2', f'--engine={engine}', '--text_field=text']
        options += ['--val_fraction=0.1', f'--data_dir={folder / "data"}', '--name=x']
        if engine == 'reference':
            options.append('--max_tokens=60_000_000')  # a quarter, since it is slow
        start, peak = time.perf_counter(), 0
        run = subprocess.Popen(command_of('prepare_data.py', *options), cwd=REPO, stdout=subprocess.DEVNULL)
        while run.poll() is None:
            peak = max(peak, memory_of(run.pid))
            time.sleep(0.5)  # looking takes time itself
        seconds = time.perf_counter() - start
        if run.returncode:
            sys.exit(run.returncode)  # it has said why
        splits = json.loads((folder / 'data' / 'x' / 'meta.json').read_text())['splits'].values()
        rate = sum(split['bytes'] for split in splits) / seconds / 1e6
        print(f'{source:12} {engine:9} {rate:6.1f} MB/s, peak {peak / 1e6:.0f} MB', flush=True)
        shutil.rmtree(folder / 'data')


if __name__ == '__main__':
    os.environ.setdefault('TIKTOKEN_CACHE_DIR', str(SHARED / 'tiktoken_cache'))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('root', nargs='?', default=os.path.dirname(os.__file__), help='default: Python itself')
    parser.add_argument('megabytes', type=int, nargs='?', default=40)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        measure(Path(temporary), given.root, given.megabytes)
