"""
Which strategy should I use, and do they agree? Runs the same model, data, seed and steps under each, and shows it.

    python compare.py                                                  # all of them on 2 ranks, a small model
    python compare.py --strategies=ddp,fsdp,fsdp_manual,deepspeed,diloco --nproc=2 --zero_stages=1,3
    python compare.py config/gpt2_124m.py --strategies=ddp,fsdp --nproc=8 --max_iters=50   # keys of any train script
    python compare.py config/compare_smoke.py                          # a comparison as a file: the minutes-long one
    python compare.py --bench config/gpt2_124m.py --strategies=fsdp_manual --nproc=1       # tokens/s, MFU, memory
    python compare.py --bench_links --nproc=4                          # bandwidth of all-reduces
    python compare.py --plot out/a out/b                               # loss curves of any runs, as a picture

Leaves in out_dir: table.md (tables and verdict), results.json, four pictures, and runs/LABEL/repN, each the out_dir of
a train script. The same command goes on after an interruption: what is finished is not run again.
"""

import sys

from configurator import Mistake, checked, configure, find, read_knobs


# --- KNOBS ------------------------------------------------------------------------------------------------------------
class Config:
    # what is compared; an axis that a strategy does not have is left out of it
    strategies = ['single', 'ddp', 'fsdp', 'fsdp_manual', 'deepspeed', 'diloco']  # single: train_ddp.py in one process
    nproc = [2]  # ranks: a number, or several
    zero_stages = [3]  # of fsdp (2, 3), fsdp_manual and deepspeed (1, 2, 3)
    checkpointing = []  # activation_checkpointing: none, full, selective
    dtypes = []  # float32, bfloat16, float16
    accumulations = [1]  # micro-steps per rank, on the largest number of ranks; the global batch stays the same
    inner_steps = [10]  # diloco: steps between two exchanges
    variants = {}  # in a file: label -> {'strategy': ..., 'nproc': ..., any key of its train script}, runs of their own
    baseline: str | None = None  # label of the run that the others are compared with; None = the first
    repeats = 3  # so often each run, in alternation: what is slow for a while, is so for all
    resume_check = False  # resume each strategy once from the middle: are the losses the same?
    # how
    out_dir: str | None = None  # None = out/compare; with --bench a new folder, out/bench-DATE-TIME
    launcher: str | None = None  # with {nproc}, as 'taskset -c 0-7 torchrun --nproc_per_node={nproc}'; None = torchrun
    bench = False  # random tokens, no evaluation, no checkpoints, 30 steps, one micro-step: how fast, how much memory
    trace = False  # record a step of each run for chrome://tracing
    gpu_gb = 80.0  # memory of a GPU: what would fit? 0 = do not ask
    # other modes
    write_only = False  # run nothing: write plan.json, and runs.sh with one line per run
    analyze = False  # run nothing: tables and pictures of what is finished in out_dir
    bench_links = False  # measure all-reduces between all ranks, within nodes and between nodes
    plot = []  # --plot OUT_DIR OUT_DIR ...: draw the loss of these runs, and nothing else
    output: str | None = None  # the picture that --plot writes; None = loss.png in the folder that holds the runs


# ----------------------------------------------------------------------------------------------------------------------
_train_keys = {}  # keys of the train scripts, from config files and the command line
if __name__ == '__main__':
    config, explicit = configure(Config, pass_on=_train_keys)

import contextlib
import ctypes
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

from comparison import plots, results, verdict
from runtime import errors, estimate, processes, scaling

HERE = Path(__file__).resolve().parent
SCRIPTS = {'single': 'train_ddp.py', 'ddp': 'train_ddp.py', 'fsdp': 'train_fsdp.py', 'fsdp_manual': 'train_fsdp.py'}
SCRIPTS |= {'deepspeed': 'train_deepspeed.py', 'diloco': 'train_diloco.py'}
STAGES = {'fsdp': (2, 3), 'fsdp_manual': (1, 2, 3), 'deepspeed': (1, 2, 3)}
IMPLEMENTATIONS = {'fsdp': 'torch', 'fsdp_manual': 'manual'}

# Where neither a file nor the command line says anything. A run of the small model takes some 10 seconds on 2 cores:
# 4 layers of 128 = 0.8M parameters and 2 x 2048 x 128 of the vocabulary; fp32, so that agreement can be seen.
SMALL = {'arch': 'llama', 'n_layer': 4, 'n_head': 4, 'n_embd': 128, 'block_size': 128, 'batch_size': 4}
SMALL |= {'dtype': 'float32', 'max_iters': 50, 'learning_rate': 3e-3, 'warmup_iters': 5}
# Any of these given: not the small one
OF_A_MODEL = ('arch', 'heads', 'n_layer', 'n_head', 'n_embd', 'block_size', 'init_from')
QUIET = {'log_interval': 2, 'eval_interval': 0, 'eval_iters': 10, 'checkpoint_interval': 0, 'keep_checkpoints': 0}
BENCH = {'dataset': 'synthetic', 'eval_iters': 0, 'keep_checkpoints': 0, 'max_iters': 30, 'warmup_iters': 5}
BENCH |= {'log_interval': 2, 'global_batch_size': None, 'wandb_log': False, 'checkpoint_interval': 0}


# --- PLAN -------------------------------------------------------------------------------------------------------------


def expand(spec, train_keys, explicit=()):
    """
    (plan, notes): every run of a comparison, and lines on what was left out.

    spec: the knobs above. train_keys: of the train scripts, for all runs; explicit: those of the command line, which
    also win over what --bench sets. plan: {'baseline': label, 'runs': [{label, strategy, script, world_size,
    overrides}]}, the overrides being the keys given to the script. Raises ValueError for what cannot be run.
    """
    check(spec)
    notes, runs = [], []
    most_ranks = max([*spec['nproc'], *(variant.get('nproc', 1) for variant in spec['variants'].values())])
    for strategy in dict.fromkeys(spec['strategies']):
        combinations = axes(strategy, spec)
        if not combinations:
            notes.append(f'{strategy} is left out: it has zero_stages={STAGES[strategy]} alone')
        for ranks, given, label in combinations:
            runs.append((label, strategy, ranks, given))
    for label, variant in spec['variants'].items():
        given = {key: value for key, value in variant.items() if key not in ('strategy', 'nproc')}
        strategy = variant.get('strategy', (spec['strategies'] or ['ddp'])[0])
        runs.append((label, strategy, 1 if strategy == 'single' else variant.get('nproc', spec['nproc'][0]), given))
    if not runs:
        raise ValueError('; '.join([*notes, f'nothing to compare: expected some of --strategies={",".join(SCRIPTS)}']))
    labels = [label for label, *_ in runs]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ValueError(f'two runs have the label {twice[0]!r}: rename the one in variants')
    if spec['baseline'] not in (None, *labels):
        raise ValueError(f'baseline={spec["baseline"]!r} is no run of this comparison: use one of {", ".join(labels)}')

    entries = []
    for label, strategy, ranks, given in runs:
        keys = keys_of_run(label, strategy, ranks, given, spec, train_keys, explicit, most_ranks)
        entry = {'label': label, 'strategy': strategy, 'script': SCRIPTS[strategy], 'world_size': ranks}
        entries.append({**entry, 'overrides': keys})
    used = {key for entry in entries for key in entry['overrides']} | {'out_dir'}
    if unused := sorted(set(train_keys) - used):
        notes.append(f'not a key of any of these runs: {", ".join(unused)}')
    return {'baseline': spec['baseline'] or labels[0], 'runs': entries}, notes


def check(spec):
    """Raises ValueError for values of knobs that no run could have."""
    for label, variant in spec['variants'].items():
        if not re.fullmatch(r'[\w.+=-]+', str(label)) or not isinstance(variant, dict):
            raise ValueError(
                f'variants: {label!r}: expected a label of letters, digits and _ . + = - (it names a folder), and a '
                f'dict of keys, given {variant!r}'
            )
    for strategy in (*spec['strategies'], *(variant.get('strategy', 'ddp') for variant in spec['variants'].values())):
        if strategy not in [*SCRIPTS]:
            raise ValueError(f'strategies={strategy}: expected some of {", ".join(SCRIPTS)}')
    ranks = [*spec['nproc'], *(variant['nproc'] for variant in spec['variants'].values() if 'nproc' in variant)]
    for key in ('nproc', 'accumulations', 'inner_steps', 'zero_stages'):
        values = ranks if key == 'nproc' and spec['nproc'] else spec[key]
        if not values or any(type(value) is not int or value < 1 for value in values):
            raise ValueError(f'{key}={values}: expected whole numbers from 1 on, as in --{key}=2')
    if spec['repeats'] < 1:
        raise ValueError(f'repeats={spec["repeats"]}: expected 1 or more')
    try:
        shlex.split(spec['launcher'] or '')
    except ValueError as error:
        raise ValueError(f'launcher={spec["launcher"]}: {error}') from None


def axes(strategy, spec):
    """[(ranks, keys, label)] of a strategy over the axes that it has; the label names axes with several values."""
    points = {'nproc': [1] if strategy == 'single' else spec['nproc'], 'accumulation': spec['accumulations']}
    if strategy in STAGES:
        points['zero_stage'] = [stage for stage in spec['zero_stages'] if stage in STAGES[strategy]]
    if strategy == 'diloco':
        points['inner_steps'] = spec['inner_steps']
    points['activation_checkpointing'] = spec['checkpointing'] or [None]
    points['dtype'] = spec['dtypes'] or [None]
    forms = {'nproc': '{}ranks', 'accumulation': '{}micro', 'zero_stage': 'zero{}', 'inner_steps': 'H{}'}
    combinations = [({}, strategy)]
    for axis, values in points.items():
        several = len(dict.fromkeys(spec['zero_stages'] if axis == 'zero_stage' else values)) > 1
        name = forms.get(axis, 'checkpoint-{}' if axis == 'activation_checkpointing' else '{}')
        combinations = [
            ({**keys, axis: value}, f'{label}-{name.format(value)}' if several else label)
            for keys, label in combinations
            for value in dict.fromkeys(values)
        ]
    known = [({key: value for key, value in keys.items() if value is not None}, label) for keys, label in combinations]
    return [(keys.pop('nproc'), keys, label) for keys, label in known]


def keys_of_run(label, strategy, ranks, given, spec, train_keys, explicit, most_ranks):
    """The keys that a run's script is given. ValueError: one that it lacks, or a batch that does not divide."""
    script = HERE / SCRIPTS[strategy]
    knobs = read_knobs(script) if script.exists() else {}
    accumulation = given.get('accumulation', 1)
    given = {key: value for key, value in given.items() if key != 'accumulation'}
    try:
        for key in given:
            given[key] = checked(given[key], find(key, knobs, script, f'{label}: {key}'), f'{label}: {key}')
    except Mistake as mistake:
        raise ValueError(str(mistake)) from None

    keys = dict(QUIET)
    is_small = not any(key in {**train_keys, **given} for key in OF_A_MODEL)
    keys |= SMALL if is_small else {}
    data_dir = train_keys.get('data_dir', 'data')
    keys['dataset'] = 'stdlib-bpe2048' if (Path(data_dir) / 'stdlib-bpe2048').is_dir() else 'synthetic'
    keys |= train_keys
    if spec['bench']:
        keys |= {key: value for key, value in BENCH.items() if key not in explicit}
    # Random tokens in place of a dataset have its vocabulary, as far as that is known; otherwise GPT-2's, 50,304.
    replaced = Path(data_dir) / train_keys.get('dataset', 'stdlib-bpe2048') / 'meta.json'
    if keys['dataset'] == 'synthetic' and replaced.exists():
        keys.setdefault('vocab_size', results.read_json(replaced)['vocab_size'])
    elif keys['dataset'] == 'synthetic' and 'dataset' not in train_keys and (is_small or not spec['bench']):
        keys.setdefault('vocab_size', 2048)  # of stdlib-bpe2048
    keys |= given
    if strategy in IMPLEMENTATIONS:
        keys['fsdp_impl'] = IMPLEMENTATIONS[strategy]
    if strategy == 'diloco':
        keys.setdefault('num_replicas', ranks)  # a rank each: one per node, the script's default, would be one here
    if spec['resume_check'] and keys.get('max_iters', 0) < 2:
        raise ValueError(f'{label}: resume_check stops half-way: expected --max_iters=2 or more')
    if spec['resume_check']:  # rounded up: two checkpoints; permanent, so that those of interruptions push none out
        keys |= dict.fromkeys(('checkpoint_interval', 'permanent_interval'), -(-keys['max_iters'] // 2))
        keys['keep_checkpoints'] = 2
    if spec['trace']:
        keys['trace_step'] = min(results.WARM_UP, keys.get('max_iters', results.WARM_UP))
    batch_size, most = keys.get('batch_size', 8), max(spec['accumulations'])
    keys['global_batch_size'] = keys.get('global_batch_size') or batch_size * most_ranks * most
    if batch_size * most % accumulation:
        raise ValueError(
            f'{label}: batch_size={batch_size} x {most} micro-steps cannot be split into {accumulation}: use another '
            '--batch_size, or other accumulations'
        )
    keys['batch_size'] = batch_size * most // accumulation
    try:
        scaling.accumulation_steps(keys['global_batch_size'], keys['batch_size'], ranks)
    except ValueError as error:
        raise ValueError(f'{label}: {error}') from None
    return {key: value for key, value in keys.items() if key in knobs and key != 'out_dir' and value is not None}


def order_of(repeat, entries):
    """The runs of a repeat: each begins with another one, so that none is always the first or the last."""
    start = repeat % len(entries)
    return entries[start:] + entries[:start]


# --- RUN --------------------------------------------------------------------------------------------------------------


def command_of(script, ranks, launcher):
    """What starts a script on so many ranks, without its keys."""
    if launcher:
        return [*shlex.split(launcher.replace('{nproc}', str(ranks))), str(HERE / script)]
    if ranks == 1:
        return [sys.executable, str(HERE / script)]
    # --standalone takes a free port; --local_addr spares it the lookup of this machine's name, which may have none.
    torchrun = ['-m', 'torch.distributed.run', '--standalone', '--local_addr=127.0.0.1', f'--nproc_per_node={ranks}']
    return [sys.executable, *torchrun, str(HERE / script)]


def environment(ranks):
    """This process's, with the cores shared out over the ranks: each strategy has the whole machine."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    return {**os.environ, 'OMP_NUM_THREADS': str(threads), 'PYTHONUNBUFFERED': '1'}


def folder_of(folder, entry, repeat):
    return folder / 'runs' / entry['label'] / (f'rep{repeat}' if isinstance(repeat, int) else repeat)


def arguments_of(folder, entry, repeat):
    """The keys of a run as its script reads them."""
    keys = {**entry['overrides'], 'out_dir': folder_of(folder, entry, repeat)}
    return [f'--{key}={value}' for key, value in keys.items()]


def end_with_us():
    """In the child: Linux sends it SIGTERM when this process dies; torchrun then ends its ranks. See guard.py."""
    if sys.platform == 'linux':
        PR_SET_PDEATHSIG = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def execute(command, console, ranks):
    """
    The exit code of a command whose output goes to the file `console`. An interruption ends its whole process group,
    which has 30 seconds to end well.
    """
    with open(console, 'a', encoding='utf-8') as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=environment(ranks), start_new_session=True, preexec_fn=end_with_us,
        )  # fmt: skip
        try:
            return process.wait()
        finally:  # an interruption; or ranks that have outlived their launcher
            try:
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, signal.SIGTERM)
                    process.wait(timeout=30)
            finally:  # also after a second Ctrl-C
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def run_one(folder, entry, repeat, launcher, more=()):
    """Run an entry of the plan; '' or the line that says why it failed, which FAILED keeps."""
    out = folder_of(folder, entry, repeat)
    results.write(out / 'console.txt', '')
    if (out / 'DONE').exists():  # but on other ranks, or damaged: from the start
        shutil.rmtree(out / 'checkpoints', ignore_errors=True)
    for marker in ('FAILED', 'DONE'):
        (out / marker).unlink(missing_ok=True)
    command = [*command_of(entry['script'], entry['world_size'], launcher), *arguments_of(folder, entry, repeat), *more]
    try:
        code = execute(command, out / 'console.txt', entry['world_size'])
    except OSError as error:
        code = f'{command[0]}: {error.strerror}'
    if code == 0 and (out / 'DONE').exists():
        failure = results.read_run(out, entry['world_size']).failure
    else:
        console = (out / 'console.txt').read_text(encoding='utf-8', errors='replace')
        failure = results.last_error(console) + ('' if code else ' (it did not finish)')
        failure = code if isinstance(code, str) else failure
    if failure:
        results.write(out / 'FAILED', failure + '\n')
    return failure


def resumed_ones(entries):
    """The first run of each strategy: what resume_check resumes."""
    return list({entry['strategy']: entry for entry in reversed(entries)}.values())[::-1]


def run_all(folder, plan, repeats, launcher, resume_check):
    """Run what is not finished yet, in alternation; the labels of what failed."""
    entries, failed = plan['runs'], []
    queue = [(repeat, entry) for repeat in range(repeats) for entry in order_of(repeat, entries)]
    if resume_check:
        queue += [('resumed', entry) for entry in resumed_ones(entries)]
    ended = [results.read_run(folder_of(folder, entry, repeat), entry['world_size']) for repeat, entry in queue]
    todo = [one for one, run in zip(queue, ended, strict=True) if not run or run.failure]
    if len(todo) < len(queue):
        print(f'{len(queue) - len(todo)} of {len(queue)} runs are finished: {len(todo)} to go', flush=True)
    for number, (repeat, entry) in enumerate(todo, start=1):
        name = f'[{number}/{len(todo)}] {entry["label"]}' + (f' {repeat}' if repeat == 'resumed' else f', {repeat + 1}')
        begin = time.perf_counter()
        failure = take_half(folder, entry) if repeat == 'resumed' else ''
        more = ['--resume=must'] if repeat == 'resumed' else []
        if failure := failure or run_one(folder, entry, repeat, launcher, more):
            failed.append(entry['label'])
            print(f'{name}: failed: {failure}', flush=True)
            continue
        rows = results.read_rows(folder_of(folder, entry, repeat))
        speed = results.median_of_run(rows, 'tokens_per_sec', entry['overrides'].get('inner_steps', 1))
        said = [f'loss {rows[-1]["loss"]:.4f}'] + ([f'{speed:,.0f} tokens/s'] if speed else [])
        print(f'{name}: {", ".join(said)}, {time.perf_counter() - begin:.1f} s', flush=True)
    return failed


def halves(folder, entry):
    """(checkpoint in the middle of the first repeat, where the run that resumes expects it)."""
    name = f'checkpoints/step_{entry["overrides"]["checkpoint_interval"]:08}'
    return folder_of(folder, entry, 0) / name, folder_of(folder, entry, 'resumed') / name


def take_half(folder, entry):
    """Give the run that resumes its checkpoint; '' or the line that says why there is none, which FAILED keeps."""
    source, target = halves(folder, entry)
    shutil.rmtree(target.parent.parent, ignore_errors=True)
    if not source.exists():
        failure = f'the run has left no {source}'
        results.write(target.parent.parent / 'FAILED', failure + '\n')
        return failure
    try:
        shutil.copytree(source, target)
    except (OSError, shutil.Error) as error:
        raise OSError(f'{target} cannot be written: {error}'[:300]) from None
    return ''


# --- RESULTS ----------------------------------------------------------------------------------------------------------


def analyse(folder, plan, gpu_gb):
    """Tables, verdict, results.json and pictures of what is finished; the rows. Raises ValueError if nothing is."""
    runs = results.read_runs(folder, plan)
    if not any(runs.values()):
        raise ValueError(f'{folder}: no run has finished yet: start the comparison without --analyze')
    rows = results.summarise(plan, runs, plan['baseline'])
    for row in rows:
        every = runs[row['label']]
        row |= predict(next((run.config for run in every.values() if run.config), {}), row, gpu_gb)
        resumed = results.read_run(folder_of(folder, row, 'resumed'), row['world_size'])
        if resumed and resumed.failure:
            row['resume_failed'] = resumed.failure
        for run in list(results.finished(every).values())[:1]:
            row['curve'] = plots.loss_curves(run.rows)['loss']
            if resumed and not resumed.failure:
                row['resume_diff'] = results.difference(resumed.rows, run.rows, 'loss')
    text = [verdict.table(rows), verdict.memory_table(rows), verdict.facts(rows, gpu_gb)]
    text = '\n\n'.join(part for part in text if part)
    print(f'\n{text}\n', flush=True)
    results.write(folder / 'table.md', text + '\n')
    results.write_json(folder / 'results.json', rows)
    if importlib.util.find_spec('matplotlib') is None:
        print('no pictures: they need a package that is missing: pip install matplotlib')
        return rows
    measured = sorted((row for row in rows if row['rows']), key=lambda row: row['label'] != plan['baseline'])
    if not measured:
        return rows
    plots.plot_comparison(measured, folder / 'loss.png')
    plots.plot_phases(measured, folder / 'phases.png')
    plots.plot_memory(measured, folder / 'memory.png')
    plots.plot_communication(measured, folder / 'communication.png')
    return rows


def predict(config, row, gpu_gb):
    """What estimate.py says of a run: memory and traffic here, and memory on a GPU in bfloat16; what it can."""
    world_size = row['world_size']
    strategy = {'single': 'ddp', 'fsdp_manual': 'fsdp'}.get(row['strategy'], row['strategy'])
    predicted = {}
    with contextlib.suppress(KeyError, TypeError, ValueError):  # a run without config.json
        parts = estimate.estimate(config, config, world_size, strategy)
        gb = Counter()  # deepspeed's offload has weights in both places
        for part, size in parts.items():
            gb[part.removeprefix('host ')] += size / 1e9
        predicted['predicted'] = {f'{part}_gb': gb[part] for part in ('weights', 'gradients', 'optimizer')}
        predicted['predicted']['total_gb'] = sum(gb.values())
        if world_size > 1:
            every = min(config.get('inner_steps', 1), config['max_iters'])  # DiLoCo's last step ends a round, too
            sent = estimate.communication_bytes({**config, 'inner_steps': every}, config, world_size, strategy)
            predicted['predicted_sent_gb'] = sent['sent'] / 1e9
        if gpu_gb:
            on_gpu = {**config, 'device': 'cuda', 'dtype': 'bfloat16'}
            parts = estimate.estimate(on_gpu, on_gpu, world_size, strategy)
            predicted['gpu_gb'] = sum(size for part, size in parts.items() if not part.startswith('host')) / 1e9
    return predicted


# --- MODES ------------------------------------------------------------------------------------------------------------


def plot_runs(runs, output):
    """--plot: the loss of any runs."""
    runs = [Path(str(run)) for run in runs]
    common = Path(os.path.commonpath([run.absolute() for run in runs]))
    output = Path(output) if output else Path(os.path.relpath(common)) / 'loss.png'
    plots.plot_losses(runs, output)
    print(f'loss plot: {output}')


def measure_links(spec, train_keys):
    """--bench_links: under torchrun (or another launcher) measure; otherwise start that on the most ranks of nproc."""
    if 'RANK' in os.environ:
        from benchmarks import links

        _, local_rank, _ = processes.ranks_from_environment()
        links.main(processes.choose_device(train_keys.get('device', 'auto'), local_rank))
        return 0
    check(spec)
    if (ranks := max(spec['nproc'])) < 2:
        raise ValueError(
            f'bench_links: {ranks} rank has no link to another: expected --nproc=2 or more, and of a --launcher that '
            'it sets RANK and WORLD_SIZE, as torchrun does'
        )
    arguments = [f'--{key}={value}' for key, value in train_keys.items() if key == 'device']
    # nproc=1: a rank that the launcher has not made one measures nothing, rather than 2 ranks of its own
    command = [*command_of('compare.py', ranks, spec['launcher']), '--bench_links', '--nproc=1', *arguments]
    try:
        return subprocess.call(command, env=environment(ranks))
    except OSError as error:
        raise OSError(f'launcher={spec["launcher"]}: {error.strerror}') from None


def write_runs(folder, plan, repeats, launcher, resume_check):
    """--write_only: runs.sh, one line per run; a line says by itself what is finished, as compare.py sees it."""
    lines = ['# The runs of a comparison, one a line; then: python compare.py --analyze --out_dir=...', 'set -u']
    lines += ["# OMP_NUM_THREADS: this machine's cores over the ranks; on another one set what that has"]
    queue = [(repeat, entry) for repeat in range(repeats) for entry in order_of(repeat, plan['runs'])]
    queue += [('resumed', entry) for entry in resumed_ones(plan['runs'])] if resume_check else []
    for repeat, entry in queue:
        command = [*command_of(entry['script'], entry['world_size'], launcher), *arguments_of(folder, entry, repeat)]
        threads = environment(entry['world_size'])['OMP_NUM_THREADS']
        command = f'OMP_NUM_THREADS={threads} PYTHONUNBUFFERED=1 {shlex.join(command)}'
        out, before = shlex.quote(str(folder_of(folder, entry, repeat))), ''
        if repeat == 'resumed':
            half, target = (shlex.quote(str(path)) for path in halves(folder, entry))
            before = f'rm -rf {out}/checkpoints && mkdir -p {out}/checkpoints && cp -r {half} {target} && '
            command += ' --resume=must'
        lines.append(
            f'[ -e {out}/DONE -a ! -e {out}/FAILED ] || {{ mkdir -p {out}; rm -f {out}/DONE {out}/FAILED; '
            f'{{ {before}{command}; }} > {out}/console.txt 2>&1 || touch {out}/FAILED; }}'
        )
    results.write(folder / 'runs.sh', '\n'.join(lines) + '\n')
    print(f'{len(queue)} run(s): bash {folder / "runs.sh"}, then: python compare.py --analyze --out_dir={folder}')


def without_missing(spec):
    """The spec without strategies whose package is not installed, each said in one line."""
    if importlib.util.find_spec('deepspeed') is None and not spec['write_only']:
        needs = [label for label, variant in spec['variants'].items() if variant.get('strategy') == 'deepspeed']
        if 'deepspeed' in [*spec['strategies'], *(['deepspeed'] if needs else [])]:
            print('deepspeed is left out: not installed (pip install -r requirements-deepspeed.txt)', flush=True)
        spec = {**spec, 'strategies': [name for name in spec['strategies'] if name != 'deepspeed']}
        spec['variants'] = {label: keys for label, keys in spec['variants'].items() if label not in needs}
    return spec


def default_folder(spec):
    if spec['out_dir']:
        return Path(spec['out_dir'])
    return Path(time.strftime('out/bench-%Y%m%d-%H%M%S') if spec['bench'] else 'out/compare')


def main(spec, train_keys, explicit):
    """Does what the knobs ask for; the exit code."""
    if spec['plot']:
        plot_runs(spec['plot'], spec['output'])
        return 0
    if spec['bench_links']:
        return measure_links(spec, train_keys)
    folder = default_folder(spec)
    if spec['analyze']:
        if not (folder / 'plan.json').exists():
            raise ValueError(f'{folder} holds no comparison (no plan.json): expected the --out_dir of one')
        plan = results.read_json(folder / 'plan.json')
        if spec['baseline']:
            if spec['baseline'] not in [entry['label'] for entry in plan['runs']]:
                labels = ', '.join(entry['label'] for entry in plan['runs'])
                raise ValueError(f'baseline={spec["baseline"]!r} is no run of {folder}: use one of {labels}')
            plan['baseline'] = spec['baseline']
        analyse(folder, plan, spec['gpu_gb'])
        return 0
    plan, notes = expand(without_missing(spec), train_keys, explicit)
    results.keep_plan(folder, plan)
    if plan['runs'][0]['overrides'].get('dataset') == 'synthetic' and not ('dataset' in train_keys or spec['bench']):
        notes.append('random tokens: there is no data/stdlib-bpe2048, which `python prepare_data.py` makes')
    print(*notes, sep='\n', end='\n' if notes else '', flush=True)
    if spec['write_only']:
        write_runs(folder, plan, spec['repeats'], spec['launcher'], spec['resume_check'])
        return 0
    try:
        failed = run_all(folder, plan, spec['repeats'], spec['launcher'], spec['resume_check'])
    except KeyboardInterrupt:
        print(f'\ninterrupted: the same command goes on with {folder}', file=sys.stderr, flush=True)
        return 130
    rows = analyse(folder, plan, spec['gpu_gb'])
    written = sorted(path.name for path in folder.iterdir() if path.suffix in ('.json', '.md', '.png'))
    print(f'{folder}: {", ".join(written)}')
    if spec['trace']:
        print(f'traces: {folder}/runs/*/rep0/trace_rank*.json, for chrome://tracing or https://ui.perfetto.dev')
    return 1 if failed or any('failed' in row for row in rows) else 0


if __name__ == '__main__':
    errors.report_errors()
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: end the run under way, say how to go on
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)
    sys.exit(main(vars(config), _train_keys, explicit))
