"""
How fast is prepare_data.py with the gpt2 tokenizer, beside tiktoken alone and beside datasets.map with a memmap writer?

    python benchmarks/prepare_data_rate.py                  # 40 MB, 5 rounds: about 2 minutes on 2 cores
    python benchmarks/prepare_data_rate.py 10 2             # 10 MB, 2 rounds
    python benchmarks/prepare_data_rate.py --texts=/ 1000   # formats, engines, memory (docs/measurements.md)

Without --texts, the text is Python's sources, each file a document. All three run in each round, one after the other,
so that a slow moment of the machine meets all of them, and the medians of the ratios within a round are what counts.

    prepare_data    the script itself: reading files, writing shards and their sha256; its own clock, without imports
    tiktoken        alone, texts in memory, tokens thrown away: with its own threads, and with a process per core
    datasets.map    num_proc=2 from a dataset in memory, then nanoGPT's loop that writes a memmap

--texts takes as many MB as are given (1000) of the text files below a folder. Each text is taken once, because
gigatoken remembers words, so repeated texts would flatter it. They are shuffled and tokenized as files of 2 MB, as
.jsonl and as .parquet, with and without gigatoken. Timed are whole commands, and their peak memory is printed.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tiktoken

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.runs import REPO, SHARED, run_script

CORES = len(os.sched_getaffinity(0))
TEXTS = {'.py', '.md', '.txt', '.h', '.json', '.rst', '.html', '.js', '.c', '.cpp'}


def make_corpus(folder, megabytes):
    """Copy Python sources into `folder`, again and again, until they have that many MB. Returns the texts."""
    sources = [path for path in sorted(Path(os.__file__).parent.rglob('*.py')) if 'site-packages' not in path.parts]
    texts, size = [], 0
    while size < megabytes * 1e6:
        for path in sources:
            try:
                text = path.read_text(encoding='utf-8')
            except UnicodeDecodeError:  # a test file of Python's own
                continue
            (folder / f'{len(texts):06}.txt').write_text(text, encoding='utf-8', newline='')
            texts.append(text)
            size += len(text.encode())
            if size >= megabytes * 1e6:
                break
    return [text for text in texts if text]


def prepare_data(folder, out):
    """MB/s of the script, as it prints them."""
    result = run_script('prepare_data.py', f'--dataset={folder}', '--tokenizer=gpt2', f'--data_dir={out}')
    return float(re.search(r'([\d.]+) MB/s', result.stdout)[1])


def encode_all(encoding, texts):
    for text in texts:
        encoding.encode_to_numpy(text, disallowed_special=())


def tiktoken_threads(encoding, texts):
    """Seconds that tiktoken takes with its own threads, one per core."""
    start = time.perf_counter()
    encoding.encode_ordinary_batch(texts, num_threads=CORES)
    return time.perf_counter() - start


def tiktoken_processes(encoding, texts):
    """Seconds that one process per core takes, each with its share of the texts."""
    start = time.perf_counter()
    context = multiprocessing.get_context('fork')
    workers = [context.Process(target=encode_all, args=(encoding, texts[core::CORES])) for core in range(CORES)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start


def datasets_map(encoding, dataset, path):
    """Seconds of what nanoGPT's data/openwebtext/prepare.py does."""

    def process(example):
        ids = encoding.encode_ordinary(example['text'])
        ids.append(encoding.eot_token)
        return {'ids': ids, 'len': len(ids)}

    start = time.perf_counter()
    tokenized = dataset.map(process, remove_columns=['text'], num_proc=2, load_from_cache_file=False)
    length = np.sum(tokenized['len'], dtype=np.uint64)
    tokens = np.memmap(path, dtype=np.uint16, mode='w+', shape=(int(length),))
    position = 0
    for index in range(64):
        shard = tokenized.shard(num_shards=64, index=index, contiguous=True).with_format('numpy')
        batch = np.concatenate(shard['ids'])
        tokens[position : position + len(batch)] = batch
        position += len(batch)
    tokens.flush()
    return time.perf_counter() - start


def measure(megabytes, rounds):
    """Compare in rounds; returns {name of another way: median ratio of prepare_data's speed to its speed}."""
    with tempfile.TemporaryDirectory() as temporary:
        temporary = Path(temporary)
        os.environ['HF_HOME'] = str(temporary / 'hf_home')  # datasets reads it when it is imported
        import datasets

        datasets.disable_progress_bars()
        (temporary / 'text').mkdir()
        texts = make_corpus(temporary / 'text', megabytes)
        size = sum(len(text.encode()) for text in texts) / 1e6
        encoding = tiktoken.get_encoding('gpt2')
        dataset = datasets.Dataset.from_dict({'text': texts})
        print(f'{len(texts)} documents, {size:.1f} MB, {CORES} cores; MB/s:')
        rows = []
        for number in range(rounds):
            row = {
                'prepare_data': prepare_data(temporary / 'text', temporary / f'data_{number}'),
                'tiktoken, threads': size / tiktoken_threads(encoding, texts),
                'tiktoken, processes': size / tiktoken_processes(encoding, texts),
                'datasets.map': size / datasets_map(encoding, dataset, temporary / 'memmap.bin'),
            }
            print(f'round {number + 1}: ' + ', '.join(f'{name} {speed:.1f}' for name, speed in row.items()), flush=True)
            rows.append(row)
    ratios = {}
    for name in list(rows[0])[1:]:
        ratios[name] = statistics.median(row['prepare_data'] / row[name] for row in rows)
    print('prepare_data against ' + ', '.join(f'{name}: {ratio:.2f}x' for name, ratio in ratios.items()) + ' (medians)')
    return ratios


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


def table(root, megabytes):
    """Print rate and memory of every format with and without gigatoken: whole commands, from start to end."""
    import pyarrow
    import pyarrow.parquet

    with tempfile.TemporaryDirectory() as temporary:
        temporary = Path(temporary)
        texts = find_texts(root, megabytes)
        for folder in ('text', 'cjk'):
            (temporary / folder).mkdir()
        for number in range(0, len(texts), 150):
            (temporary / 'text' / f'{number}.txt').write_text('\n\n'.join(texts[number : number + 150]), newline='')
        with open(temporary / 'rows.jsonl', 'w') as file:
            file.writelines(json.dumps({'text': text}, ensure_ascii=False) + '\n' for text in texts)
        pyarrow.parquet.write_table(pyarrow.table({'text': texts}), temporary / 'rows.parquet', row_group_size=1000)
        for number in range(megabytes // 12 + 2):  # no spaces and no word twice: gigatoken's cache grows
            characters = np.random.default_rng(number).integers(0x4E00, 0x9FA5, 10**6, dtype=np.int32)
            (temporary / 'cjk' / f'{number}.txt').write_text(characters.tobytes().decode('utf-32-le'))
        print(f'{len(texts):,} texts, {sum(map(len, texts)) / 1e6:.0f}M characters, {CORES} cores', flush=True)
        encoding = tiktoken.get_encoding('gpt2')
        some = texts[: len(texts) // 10]
        size = sum(len(text.encode()) for text in some) / 1e6
        alone = [size / measure(encoding, some) for measure in (tiktoken_threads, tiktoken_processes)]
        print(f'tiktoken alone, texts in memory: {alone[0]:.1f} MB/s with threads, {alone[1]:.1f} with processes')
        del texts, some
        cases = [('text', 'gpt2'), ('rows.jsonl', 'gpt2'), ('rows.parquet', 'gpt2'), ('cjk', 'gpt2'), ('text', 'bpe')]
        for (source, tokenizer), engine in itertools.product(cases, ('reference', 'auto')):
            options = [f'--dataset={temporary / source}', f'--tokenizer={tokenizer}', f'--engine={engine}']
            options += ['--text_field=text', '--val_fraction=0.1', f'--data_dir={temporary / "data"}', '--name=x']
            if engine == 'reference':
                options.append('--max_tokens=60_000_000')  # a quarter, since it is slow
            start, peak = time.perf_counter(), 0
            run = subprocess.Popen([sys.executable, 'prepare_data.py', *options], cwd=REPO, stdout=subprocess.DEVNULL)
            while run.poll() is None:
                peak = max(peak, memory_of(run.pid))
                time.sleep(0.5)  # looking takes time itself
            seconds = time.perf_counter() - start
            splits = json.loads((temporary / 'data' / 'x' / 'meta.json').read_text())['splits'].values()
            rate = sum(split['bytes'] for split in splits) / seconds / 1e6
            print(f'{source:12} {tokenizer:4} {engine:9} {rate:6.1f} MB/s, peak {peak / 1e6:.0f} MB', flush=True)
            shutil.rmtree(temporary / 'data')


if __name__ == '__main__':
    os.environ.setdefault('TIKTOKEN_CACHE_DIR', str(SHARED / 'tiktoken_cache'))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('megabytes', type=int, nargs='?', default=40)
    parser.add_argument('rounds', type=int, nargs='?', default=5)
    parser.add_argument('--texts')
    given = parser.parse_args()
    if given.texts:
        table(given.texts, given.megabytes)
    else:
        measure(given.megabytes, given.rounds)
