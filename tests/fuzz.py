"""
Is data as people have it learned right, or else refused in one line? Draws rows, files, tokenizers, configurations and
keys at random, spoils them, and looks at what becomes of each.

    python tests/fuzz.py --cases=20000 --seed=1              # failures, counts, frequent refusals: 2 to 3 minutes
    python tests/fuzz.py --seconds=120 --only=rows,files     # as many as two minutes allow
    python tests/fuzz.py --only=rows --seed=1234 --cases=1   # one case again: a failure prints its seed

Case number n of a run has the seed SEED + n, which decides all of it. A case is one of

    rows          a row of instruction data under a chat template, through text/chat_rows.py and text/conversations.py
    files         texts or rows in a file or folder, through text/sources.py and text/documents.py
    tokenizers    a folder with tokenizer.json and the files beside it, through text/tokenizer.py
    configs       a tiny model with its config.json and its weights, through huggingface/
    checkpoints   a checkpoint in which somebody has changed an index, a manifest, a state or a pickle, through runtime/
    foreign       meta.json, index, templates, links and a pool's objects that name files outside of their folder
    keys          keys of a script in and out of their range, with and without effect, through configurator.py

What is learned is compared with a plain reference: a loop over apply_chat_template, whole files read by json, csv, yaml
and pyarrow, AutoTokenizer, from_pretrained, steps with another value of a key. Every other case has to end as a user's
mistake does (system/errors.py), with one line: that of a ValueError or OSError from this project, or a note of
prepare_data.py. Anything else counts as a failure. All cases run in this process and call the project's functions, so
most of them take milliseconds.
"""

import argparse
import collections
import contextlib
import functools
import io
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')

from fuzzing.cases import STAYS, Refused, Wrong, is_clear
from fuzzing.checkpoints import check_checkpoint
from fuzzing.configs import check_config
from fuzzing.files import check_files
from fuzzing.foreign import check_foreign
from fuzzing.keys import check_keys
from fuzzing.rows import check_row
from fuzzing.tokenizers import check_tokenizer

from system.errors import is_users_mistake

MOST_BYTES = 16 << 30  # of address space; torch alone takes 4 GB
# {kind: (the function that checks a case, how often the kind is drawn in relation to the others)}
KINDS = {
    'rows': (check_row, 10),
    'files': (check_files, 6),
    'tokenizers': (check_tokenizer, 2),
    'configs': (check_config, 2),
    'checkpoints': (check_checkpoint, 4),
    'keys': (check_keys, 4),
    'foreign': (check_foreign, 2),
}


def outcome_of(kind, seed):
    """(what became of a case: 'learned', 'refused' or 'failed'; the line that says why). A case depends on nothing but
    its seed."""
    draw = random.Random(f'{kind} {seed}')
    folder = tempfile.mkdtemp(prefix='case-', dir=STAYS.name)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter('ignore')
            KINDS[kind][0](draw, Path(folder))
        return 'learned', ''
    except Refused as refused:
        line = str(refused)
    except Exception as error:
        line = str(error)
        if not is_users_mistake(error):
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = '' if isinstance(error, Wrong) else f' ({os.path.basename(where.filename)}:{where.lineno})'
            return 'failed', f'{type(error).__name__}: {line}{place}'
    finally:
        shutil.rmtree(folder)
    line = line.replace(folder, 'FOLDER')
    return ('refused', line) if is_clear(line) else ('failed', f'an unclear line: {line!r}')


def kind_of(seed, kinds):
    """The kind of the case with a seed."""
    return random.Random(f'kind {seed}').choices(kinds, [KINDS[kind][1] for kind in kinds])[0]


def reason_in(line):
    """The line of a refusal without the names and numbers of the case, so that equal reasons can be counted."""
    line = re.sub(r'w\d+x', 'W', line)
    return re.sub(r'\d+', 'N', re.sub(r"'[^']{1,200}'", "'...'", line))[:110]


def run(kinds, seed, n_cases=None, seconds=None, say=print):
    """Run cases; returns {kind: Counter of outcomes}, {kind: Counter of reasons}, [(seed, kind, line)] of failures."""
    outcomes = {kind: collections.Counter() for kind in kinds}
    reasons = {kind: collections.Counter() for kind in kinds}
    failures, number, end = [], 0, seconds and time.monotonic() + seconds
    while (n_cases is None or number < n_cases) and (end is None or time.monotonic() < end):
        kind = kind_of(seed + number, kinds)
        outcome, line = outcome_of(kind, seed + number)
        outcomes[kind][outcome] += 1
        if outcome == 'refused':
            reasons[kind][reason_in(line)] += 1
        if outcome == 'failed':
            failures.append((seed + number, kind, line))
            say(f'FAILED {kind}, seed {seed + number}: {line}')
            say(f'    again: python tests/fuzz.py --only={kind} --seed={seed + number} --cases=1')
        number += 1
    return outcomes, reasons, failures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--cases', type=int, help='how many; without --seconds 1000')
    parser.add_argument('--seconds', type=float, help='how long')
    parser.add_argument('--seed', type=int, help='of the first case; without it a new one each time')
    parser.add_argument('--only', default=','.join(KINDS), metavar='KIND,KIND', help='default: %(default)s')
    arguments = parser.parse_args()
    kinds = arguments.only.split(',')
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f'only={unknown[0]}: expected {", ".join(KINDS)}')
    seed = random.randrange(10**9) if arguments.seed is None else arguments.seed
    n_cases = arguments.cases if arguments.cases or arguments.seconds else 1000
    print(f'seed {seed}', flush=True)
    # A case takes megabytes. The limit lets one fail that would take all memory, such as a config.json of a huge model.
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    start = time.monotonic()
    say = functools.partial(print, flush=True)
    outcomes, reasons, failures = run(kinds, seed, n_cases, arguments.seconds, say)
    for kind in kinds:
        print(f'{kind}:', ', '.join(f'{outcomes[kind][name]:,} {name}' for name in ('learned', 'refused', 'failed')))
        for reason, count in reasons[kind].most_common(8):
            print(f'    {count:6,} {reason}')
    n_run = sum(counts.total() for counts in outcomes.values())
    print(f'{n_run:,} cases in {time.monotonic() - start:.0f} s, {len(failures)} failures')
    return 1 if failures else 0


if __name__ == '__main__':
    sys.exit(main())
