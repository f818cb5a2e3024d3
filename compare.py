"""
Which strategy should I use? Trains the same model, data, seed and steps with each, and compares speed, memory and loss.
Whether each computes what one process computes, prove.py says.

    python compare.py --nproc=2                                        # all strategies on 2 ranks, with a small model
    python compare.py --strategies=ddp,fsdp,fsdp_manual,deepspeed,diloco --nproc=2 --zero_stages=1,3
    python compare.py config/gpt2_124m.py --strategies=ddp,fsdp --nproc=8 --max_iters=50   # and keys of train scripts
    python compare.py config/compare_smoke.py                          # a comparison as a file; takes minutes
    python compare.py --bench config/gpt2_124m.py --strategies=fsdp_manual --nproc=1       # tokens/s, MFU, memory

Further questions, each with its keys under a heading below:

    python compare.py --plan config/llama_8b.py --gpus=64 --gpu=h100 --node_gpus=4     # which layout on a cluster?
    python compare.py --bench_links --nproc=4                          # how fast are its links?
    python compare.py config/sweep_lr.py                               # which learning rate? docs/sweeps.md; --slurm
    python compare.py --plot out/a out/b                               # the loss curves of any runs?
    python compare.py --plot out/a out/b --keys=grad_norm,val_bpb      # or other keys of metrics.jsonl

In out_dir you find report.html (everything on one page), table.md (tables and verdict), results.json, pictures, and
runs/LABEL/repN, each the out_dir of a train script. After an interruption the same command continues, without the runs
that are finished.
"""

import sys

from conditions import say_without_effect
from configurator import configure


# --- KNOBS ------------------------------------------------------------------------------------------------------------
class Config:
    # which strategy? a run for each combination; a strategy leaves out keys that it does not have
    strategies = ['single', 'ddp', 'fsdp', 'fsdp_manual', 'deepspeed', 'diloco']  # single = train_ddp.py in one process
    nproc = [2]  # ranks: one number, or several to compare [>= 1]
    zero_stages = [3]  # for fsdp and parallel (2, 3), fsdp_manual and deepspeed (1, 2, 3) [>= 1, <= 3]
    inner_steps = [10]  # diloco: steps between two exchanges [>= 1]
    repeats = 3  # repeats of each run, in turns: if the machine is slow for a while, it is slow for all [>= 1]
    bench = False  # only speed and memory: random tokens, 30 steps of one micro-step, no evaluation or checkpoint
    out_dir: str | None = None  # None = out/compare, or with --bench a new folder, out/bench-DATE-TIME [path]
    # further runs of a comparison
    checkpointing = []  # values of activation_checkpointing: none, full, selective
    dtypes = []  # float32, bfloat16, float16
    variants = {}  # in a file: label -> {'strategy': ..., 'nproc': ..., keys of its script}: further runs
    baseline: str | None = None  # label of the run that the others are compared with; None = the first
    resume_check = False  # also resume each strategy once from the middle, to see whether the losses are the same
    # how runs are started, also those of a sweep, and what is made of them
    launcher: str | None = None  # such as 'taskset -c 0-7 torchrun --nproc_per_node={nproc}'; None = torchrun
    trace = False  # record two steps of each run for chrome://tracing
    gpu_gb = 80.0  # predict which runs fit a GPU with this much memory; 0 = do not [>= 0]
    write_only = False  # run nothing: write plan.json, and runs.sh with a line per run
    analyze = False  # run nothing: make tables and pictures of the finished runs in out_dir
    # which layout on a cluster? docs/strategies.md
    plan = False  # run nothing: which layouts fit a cluster, what each sends, and which to try first
    gpus = 8  # --plan: ranks in the cluster [>= 1, if plan]
    node_gpus = 8  # --plan: ranks on each node [>= 1, if plan]
    gpu = 'h100'  # --plan: h100, h200 or a100 [if plan]
    links = []  # --plan: GB/s of a GPU within a node, and between nodes; [] = 0.8 of the data sheets [> 0, if plan]
    bench_links = False  # measure all-reduces of all ranks, within nodes and between nodes
    # which learning rate, recipe or size? docs/sweeps.md
    sweep = {}  # key -> its values: a run per combination; finds the best learning_rate
    recipes = {}  # label -> keys: compared at the best learning rate of each; the first is the baseline
    sizes = {}  # label -> keys: model sizes for each recipe; with 3 or more of them, laws are fitted
    seeds = [1337]  # the first one searches for the best learning rate, the others run at it [>= 0]
    at_once = 1  # runs of a sweep at the same time, which share the cores [>= 1]
    slurm: bool | str = False  # run a sweep as jobs; may give options for sbatch: --slurm='--time=1:00:00'
    element: int | None = None  # used by jobs of --slurm: do the run with this number in out_dir/jobs.json [>= 0]
    # what do curves look like?
    plot = []  # --plot OUT_DIR OUT_DIR ...: only draw the loss of these runs [path]
    keys = []  # --plot: draw these keys of metrics.jsonl instead, such as --keys=grad_norm,val_bpb [if plot]
    output: str | None = None  # the picture that --plot writes; None = loss.png in the runs' folder [path, if plot]


# ----------------------------------------------------------------------------------------------------------------------
_train_keys = {}  # keys of the train scripts, from config files and the command line
if __name__ == '__main__':
    config, explicit = configure(Config, pass_on=_train_keys)
    if len(sys.argv) == 1:  # it would be an hour's work that nobody has asked for
        commands = [line for line in __doc__.splitlines() if line.startswith('    python compare.py ')]
        print('error: name what to compare:', *commands, '--help lists the keys', sep='\n', file=sys.stderr)
        sys.exit(2)

import contextlib
import importlib.util
import math
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from comparison import jobs, page, plots, results, run_matrix, sweep, verdict
from comparison.results import folder_of
from system import devices, errors, processes
from system.files import ROOT, read_json

# --- RUN --------------------------------------------------------------------------------------------------------------


def command_of(script, ranks, launcher):
    """The command that starts a script on this many ranks, without its keys."""
    if launcher:
        return [*shlex.split(launcher.replace('{nproc}', str(ranks))), os.path.join(ROOT, script)]
    if ranks == 1:
        return [sys.executable, os.path.join(ROOT, script)]
    # --standalone takes a free port. --local_addr avoids a lookup of this machine's name, which may fail.
    torchrun = ['-m', 'torch.distributed.run', '--standalone', '--local_addr=127.0.0.1', f'--nproc_per_node={ranks}']
    return [sys.executable, *torchrun, os.path.join(ROOT, script)]


def command_of_run(folder, entry, repeat, launcher):
    keys = {**entry['overrides'], 'out_dir': folder_of(folder, entry, repeat)}
    keys |= {'resume': 'must'} if repeat == 'resumed' else {}
    command = command_of(entry['script'], entry['world_size'], launcher)
    return command + [f'--{key}={value}' for key, value in keys.items()]


def environment(ranks):
    """This process's environment, with OMP_NUM_THREADS for this many ranks that share the cores."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    return {**os.environ, 'OMP_NUM_THREADS': str(threads), 'PYTHONUNBUFFERED': '1'}


def execute(command, console, ranks, watch):
    """
    Run a command, with its output in the file `console`, and return its exit code.

    ranks: how many ranks share the cores, including its own. watch is called every 2 seconds. If it raises, or on an
    interruption, the command's whole process group is ended; it has 30 seconds to end by itself.
    """
    with open(console, 'a', encoding='utf-8') as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=environment(ranks), start_new_session=True,
            preexec_fn=lambda: processes.signal_when_parent_dies(signal.SIGTERM),  # torchrun then ends its ranks
        )  # fmt: skip
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(timeout=2)
                watch()
        finally:  # after an interruption; also ends ranks that outlive their launcher
            try:
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, signal.SIGTERM)
                    process.wait(timeout=30)
            finally:  # even after a second Ctrl-C
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def work_of_others():
    """Core seconds that this machine has spent on anything but this process and the runs that it has waited for."""
    if not os.path.exists('/proc/stat'):  # not Linux, so it is not known
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, Path('/proc/stat').read_text().split()[1:9])
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf('SC_CLK_TCK')
    return busy - sum(os.times()[:4])


def run_one(folder, entry, repeat, launcher, watch=lambda: None, at_once=1):
    """Run an entry of the plan. Returns '' or the line that says why it failed, which is also in the file FAILED.
    watch: as for execute()."""
    out = folder_of(folder, entry, repeat)
    if repeat == 'resumed':
        shutil.rmtree(out, ignore_errors=True)
    results.clear(out)
    results.write(out / 'console.txt', '')
    try:
        if repeat == 'resumed':
            shutil.copytree(*halves(folder, entry))
        others, begin = work_of_others(), time.perf_counter()
        command = command_of_run(folder, entry, repeat, launcher)
        code = execute(command, out / 'console.txt', entry['world_size'] * at_once, watch)
        share = (work_of_others() - others) / (time.perf_counter() - begin) / os.cpu_count()
        results.write(out / 'others', f'{share:.3f}\n')
        if code == 0 and (out / 'DONE').exists():
            failure = results.read_run(out, entry['world_size']).failure
        else:
            console = (out / 'console.txt').read_text(encoding='utf-8', errors='replace')
            failure = results.last_error(console) + ('' if code else ' (it did not finish)')
    except OSError as error:  # no such launcher; no checkpoint to resume from; a full disk
        failure = str(error)[:300]
    if failure:
        results.write(out / 'FAILED', failure + '\n')
    return failure


def run_all(folder, plan, config):
    """Do the runs that are not finished yet. Returns whether all of them ended well."""
    queue = run_matrix.queue_of(plan['runs'], config)
    ended = [results.read_run(folder_of(folder, entry, repeat), entry['world_size']) for repeat, entry in queue]
    todo = [one for one, run in zip(queue, ended, strict=True) if not run or run.failure]
    if len(todo) < len(queue):
        print(f'{len(queue) - len(todo)} of {len(queue)} runs are finished: {len(todo)} to go', flush=True)
    failures = []
    # On a terminal (disable=None) a bar shows what is running, and the time left at the mean speed so far.
    bar = tqdm(total=len(todo), smoothing=0, disable=None, leave=False, bar_format='{desc}, {remaining} left in all')
    start = time.perf_counter()
    for number, (repeat, entry) in enumerate(todo, start=1):
        name = entry['label'] + (' resumed' if repeat == 'resumed' else f', repeat {repeat + 1}')
        name = f'[{number}/{len(todo)}] {name}'
        out, steps = folder_of(folder, entry, repeat), entry['overrides'].get('max_iters')

        def watch(name=name, number=number, out=out, steps=steps):
            done = steps_done(out)
            bar.n = number - 1 + min(1, done / (steps or math.inf))
            bar.set_description_str(f'{name}, step {done}' + (f' of {steps}' if steps else ''))

        watch()
        begin = time.perf_counter()
        said = failure = run_one(folder, entry, repeat, config.launcher, watch)
        if failure:
            said = f'failed: {failure}'
            failures.append(failure)
        else:
            rows = results.read_rows(out)
            speed = results.median_of_run(rows, 'tokens_per_sec', entry['overrides'].get('inner_steps', 1))
            tokens = f'{speed:,.0f} tokens/s, ' if speed else ''
            left = (len(todo) - number) * (time.perf_counter() - start) / number
            said = f'loss {rows[-1]["loss"]:.4f}, {tokens}{time.perf_counter() - begin:.1f} s, {left / 60:.1f} min left'
        tqdm.write(f'{name}: {said}')
        sys.stdout.flush()
    bar.close()
    return not failures


def run_of_sweep(folder, repeat, entry, launcher, at_once=1, interrupted=None):
    """run_one(), but stop the run if its loss diverges, or if the Event `interrupted` is set; prints how it ended."""
    out = folder_of(folder, entry, repeat)

    def watch():
        if interrupted and interrupted.is_set():
            raise KeyboardInterrupt
        with contextlib.suppress(FileNotFoundError, ValueError):  # no row yet
            steps = read_json(out / 'config.json')['config']['max_iters']  # from there, since `heads` may set it
            if why := sweep.diverged(results.read_rows(out, is_running=True), steps):
                raise OSError(why)

    failure = run_one(folder, entry, repeat, launcher, watch, at_once)
    print(sweep.how_it_ended(folder, repeat, entry, failure), flush=True)
    return failure


def run_sweep(folder, groups, config):
    """Do the runs of a sweep that are not finished yet, at_once at a time. Returns whether none failed; a run that
    diverged has not failed."""
    interrupted, failures = threading.Event(), []

    def run(one):
        return run_of_sweep(folder, *one, config.launcher, config.at_once, interrupted)

    with ThreadPoolExecutor(config.at_once) as threads:
        try:
            while not failures and (todo := sweep.next_runs_of_all(folder, groups, config)):
                print(f'{len(todo)} run(s) to go, as far as is known', flush=True)
                ended = threads.map(run, todo)
                failures = [failure for failure in ended if failure and not sweep.has_diverged(failure)]
        finally:
            interrupted.set()
            threads.shutdown(cancel_futures=True)
    return not failures


def do_element(folder, config):
    """What a job of --slurm does (--element); returns the exit code."""
    repeat, entry = jobs.runs_of(folder)[config.element]
    out, keep = folder_of(folder, entry, repeat), entry['overrides'].get('keep_checkpoints', 1)
    entry['overrides']['keep_checkpoints'] = max(1, keep)  # to resume from if the time limit cuts it
    run = results.read_run(out, entry['world_size'])
    failure = run_of_sweep(folder, repeat, entry, config.launcher) if not run or run.failure else ''
    if not keep and not (out / 'PREEMPTED').exists():
        shutil.rmtree(out / 'checkpoints', ignore_errors=True)
    return 1 if failure and not sweep.has_diverged(failure) else 0


def steps_done(out):
    """Steps that a run under way has done, by the last row that it logged."""
    try:
        return results.read_rows(out, is_running=True)[-1]['step']
    except (OSError, ValueError):  # no row yet
        return 0


def halves(folder, entry):
    """(path of the checkpoint in the middle of the first repeat, path where the resumed run expects it)."""
    name = f'checkpoints/step_{entry["overrides"]["checkpoint_interval"]:08}'
    return folder_of(folder, entry, 0) / name, folder_of(folder, entry, 'resumed') / name


# --- RESULTS ----------------------------------------------------------------------------------------------------------


def analyze(folder, plan, gpu_gb):
    """Make tables, verdict, results.json and pictures of the finished runs; returns the rows. Raises ValueError if no
    run is finished."""
    runs = results.read_runs(folder, plan)
    if not any(runs.values()):
        raise ValueError(f'{folder}: no run has finished yet: start the comparison without --analyze')
    rows = results.summarize(plan, runs, plan['baseline'])
    for row in rows:
        every = runs[row['label']]
        row |= results.predict(next((run.config for run in every.values() if run.config), {}), row, gpu_gb)
        resumed = results.read_run(folder_of(folder, row, 'resumed'), row['world_size'])
        if resumed and resumed.failure:
            row['resume_failed'] = resumed.failure
        if first := next(iter(results.finished(every).values()), None):
            row['curve'] = plots.loss_curves(first.rows)['loss']
            if resumed and not resumed.failure:
                row['resume_diff'] = results.difference(resumed.rows, first.rows)
    facts = verdict.facts(rows, gpu_gb, results.codes_of(folder))
    text = '\n\n'.join(part for part in (verdict.table(rows), verdict.memory_table(rows), facts) if part)
    print(f'\n{text}\n', flush=True)
    results.write(folder / 'table.md', text + '\n')
    results.write_json(folder / 'results.json', rows)
    measured = sorted((row for row in rows if row['rows']), key=lambda row: row['label'] != plan['baseline'])
    figures = {}
    if importlib.util.find_spec('matplotlib') is None:
        print('no pictures: they need a package that is missing: pip install matplotlib')
    elif measured:
        figures = {
            'Training loss, and how far it is from the first run': plots.plot_comparison(measured, folder / 'loss.png'),
            'Where the time of a step goes': plots.plot_phases(measured, folder / 'phases.png'),
            'What a rank holds in memory': plots.plot_memory(measured, folder / 'memory.png'),
            'What ranks send each other': plots.plot_communication(measured, folder / 'communication.png'),
        }
        figures |= figure_of_experts(folder)
    tables = {'Speed and loss': verdict.cells(rows), 'Memory of a rank': verdict.memory_cells(rows)}
    page.write(folder, 'Comparison', [line.removeprefix('- ') for line in facts.splitlines()], tables, figures)
    return rows


def analyze_sweep(folder, groups, config):
    """Make tables, laws, sweep.json and pictures of the finished runs of a sweep. Raises ValueError if no run is
    finished."""
    rows = [sweep.summarize(group, sweep.runs_of(folder, group), config.seeds) for group in groups]
    rows = [row for row in rows if row]
    if not rows:
        raise ValueError(f'{folder}: no run has finished yet: start the sweep without --analyze')
    is_ladder, figures = len(config.sizes) > 1, {}
    said = sweep.facts(rows)
    if is_ladder:  # the best of each size is in the table
        said = sweep.ladder(rows) + [line for line in said if line.startswith('WARNING')]
    said += verdict.other_code(results.codes_of(folder))
    text = '\n'.join([verdict.markdown(sweep.cells(rows)), '', *(f'- {line}' for line in said)])
    print(f'\n{text}\n', flush=True)
    results.write(folder / 'table.md', text + '\n')
    results.write_json(folder / 'sweep.json', rows)
    if importlib.util.find_spec('matplotlib'):
        if is_ladder:
            figures['Loss against compute, and the laws'] = plots.plot_ladder(rows, folder / 'ladder.png')
        if config.sweep.get('learning_rate'):
            figures['Loss against learning rate'] = plots.plot_rates(rows, folder / 'rates.png')
        figures |= figure_of_experts(folder)
    cells = [{key: cell for key, cell in row.items() if key != sweep.GRID} for row in sweep.cells(rows)]
    page.write(folder, 'Ladder' if is_ladder else 'Sweep', said, {'The best of each': cells}, figures)


def figure_of_experts(folder):
    """{caption: picture} of how evenly experts are loaded, from the first repeat or seed of each run, even if it
    failed; {} if there are no experts."""
    rows_of = {}
    for path in sorted(folder.glob('runs/*/*')):
        with contextlib.suppress(OSError, ValueError):  # no row yet, or damaged
            rows_of.setdefault(path.parent.name, results.read_rows(path, is_running=True))
    figure = plots.plot_experts(rows_of, folder / 'experts.png')
    caption = 'How evenly the experts are loaded, by step and layer: 0 is balance, in the share of dead experts, too'
    return {caption: figure} if figure else {}


# --- MODES ------------------------------------------------------------------------------------------------------------


def measure_links(config, train_keys):
    """--bench_links: run benchmarks/links.py on the largest number of ranks in nproc; returns its exit code."""
    if 'RANK' in os.environ:
        raise ValueError('bench_links starts the ranks itself: under torchrun start benchmarks/links.py')
    run_matrix.check(config)
    ranks = max(config.nproc)
    if ranks < 2:
        raise ValueError(f'bench_links: {ranks} rank has no link to another: expected --nproc=2 or more')
    command = command_of('benchmarks/links.py', ranks, config.launcher)
    try:
        return subprocess.call([*command, f'--device={train_keys.get("device", "auto")}'], env=environment(ranks))
    except OSError as error:
        raise OSError(f'launcher={config.launcher}: {error.strerror}') from None


def plan_layouts(config, keys, explicit):
    """The text of --plan: the layouts that fit a cluster, and the command that starts the first of them. keys: those
    given for train scripts. explicit: which keys were given, and where. Raises ValueError as roofline.rank() does."""
    from planning import roofline  # here, as it imports torch

    gpu = config.gpu.lower()
    if len(config.links) not in (0, 2):
        raise ValueError(f'links={config.links}: expected two numbers of GB/s, as in --links=300,40')
    if keys.get('dtype') == 'float32':
        raise ValueError('dtype=float32: the peaks that --plan knows are those of bfloat16: leave dtype away')
    links, gb = [1e9 * link for link in config.links], config.gpu_gb if 'gpu_gb' in explicit else None
    cluster = roofline.cluster_of(gpu, config.gpus, config.node_gpus, links, gb)
    rows = roofline.rank(keys, cluster)
    table = verdict.markdown([
        {
            'layout': row['name'],
            'batch_size': f'{row["keys"]["batch_size"]} x {row["micro_steps"]}',
            'checkpointing': row['keys']['activation_checkpointing'],
            'GB': f'{row["gb"]:.1f}',
            'sent GB': f'{row["sent"] / 1e9:.2f}',
            **{f'{part} s': f'{row[part]:.3f}' for part in ('compute', 'exposed', 'bubble', 'step')},
        }
        for row in rows
    ])  # fmt: skip
    title = f'{config.gpus} x {gpu}, {cluster.node_gpus} on each node, assumed MFU {roofline.MFU:.0%}; per step:'
    first, nodes = rows[0], config.gpus // cluster.node_gpus
    given = {key: value for key, value in keys.items() if explicit.get(key) == 'command line'}
    files = [word for word in sys.argv[1:] if word.endswith('.py') and not word.startswith('--')]
    options = [f'--{key}={value}' for key, value in {**given, **first['keys']}.items()]
    # Without a rendezvous each node's torchrun would wait for the others on its own address.
    met = [f'--nnodes={nodes}', '--rdzv-backend=c10d', '--rdzv-id=1', '--rdzv-endpoint=HEAD:29500']
    launch = ['torchrun', *met[: 4 * (nodes > 1)], f'--nproc_per_node={cluster.node_gpus}', first['script']]
    said = 'A roofline: it orders layouts and predicts no speed; measure the first ones. '
    said += 'DiLoCo has other losses. ' * any(row['strategy'] == 'diloco' for row in rows) + 'The command of the first:'
    return f'{title}\n\n{table}\n\n{said}\n\n{shlex.join([*launch, *files, *options])}'


def write_runs(folder, plan, config):
    """--write_only: write runs.sh with a line per run. Each line skips a finished run, and marks a failed one as
    compare.py does."""
    lines = ['# The runs of a comparison, one a line; then: python compare.py --analyze --out_dir=...', 'set -u']
    lines += ["# OMP_NUM_THREADS: this machine's cores over the ranks; on another one set what that has"]
    queue = run_matrix.queue_of(plan['runs'], config)
    for repeat, entry in queue:
        threads = environment(entry['world_size'])['OMP_NUM_THREADS']
        command = shlex.join(command_of_run(folder, entry, repeat, config.launcher))
        command = f'OMP_NUM_THREADS={threads} PYTHONUNBUFFERED=1 {command}'
        out = shlex.quote(str(folder_of(folder, entry, repeat)))
        if repeat == 'resumed':
            half, target = (shlex.quote(str(path)) for path in halves(folder, entry))
            copy = f'rm -rf {out}/checkpoints && mkdir -p {out}/checkpoints && cp -r {half} {target}'
            command = f'{copy} && {command}'
        lines.append(
            f'[ -e {out}/DONE -a ! -e {out}/FAILED ] || {{ mkdir -p {out}; rm -f {out}/DONE {out}/FAILED; '
            f'{{ {command}; }} > {out}/console.txt 2>&1 || touch {out}/FAILED; }}'
        )
    results.write(folder / 'runs.sh', '\n'.join(lines) + '\n')
    print(f'{len(queue)} run(s): bash {folder / "runs.sh"}, then: python compare.py --analyze --out_dir={folder}')


def main_of_sweep(folder, config, train_keys, explicit):
    """Run a sweep or ladder, or with --analyze only analyze it; returns the exit code."""
    groups = sweep.groups_of(config, train_keys, explicit)
    results.keep_plan(folder, {'baseline': None, 'runs': groups}, may_grow=True)
    ended_well = True
    if not config.analyze:
        try:
            ended_well = jobs.run_sweep(folder, groups, config) if config.slurm else run_sweep(folder, groups, config)
        except KeyboardInterrupt:
            theirs = f'; its jobs go on, `scancel --name={jobs.name_of(folder)}` ends them' if config.slurm else ''
            print(f'\ninterrupted: the same command goes on with {folder}{theirs}', file=sys.stderr, flush=True)
            return 130
    analyze_sweep(folder, groups, config)
    print(f'{folder}: {", ".join(sorted(path.name for path in folder.iterdir() if path.is_file()))}')
    return 0 if ended_well else 1


def main(config, train_keys, explicit):
    """Do what the keys ask for; returns the exit code."""
    if config.plot:
        plots.plot_runs(config.plot, config.keys, config.output)
        return 0
    if config.bench_links:
        code = measure_links(config, train_keys)
        if code or not config.plan:
            return code
    if config.plan:
        print(plan_layouts(config, train_keys, explicit))
        return 0
    folder = Path(config.out_dir or (time.strftime('out/bench-%Y%m%d-%H%M%S') if config.bench else 'out/compare'))
    if config.element is not None:
        return do_element(folder, config)
    if config.sweep or config.recipes or config.sizes:
        return main_of_sweep(folder, config, train_keys, explicit)
    if config.analyze:
        if not (folder / 'plan.json').exists():
            raise ValueError(f'{folder} holds no comparison (no plan.json): expected the --out_dir of one')
        plan = read_json(folder / 'plan.json')
        plan['baseline'] = run_matrix.choose_baseline(
            config, [entry['label'] for entry in plan['runs']], plan['baseline']
        )
        analyze(folder, plan, config.gpu_gb)
        return 0
    if config.slurm:
        raise ValueError('slurm: a comparison measures its runs in turns on one machine: start it in a job of your own')
    plan, notes = run_matrix.expand(config, train_keys, explicit)
    results.keep_plan(folder, plan)
    if plan['runs'][0]['overrides'].get('dataset') == 'synthetic' and not ('dataset' in train_keys or config.bench):
        notes.append('random tokens: there is no data/stdlib-bpe2048, which `python prepare_data.py` makes')
    print(*notes, sep='\n', end='\n' if notes else '', flush=True)
    if config.write_only:
        write_runs(folder, plan, config)
        return 0
    try:
        ended_well = run_all(folder, plan, config)
    except KeyboardInterrupt:
        print(f'\ninterrupted: the same command goes on with {folder}', file=sys.stderr, flush=True)
        return 130
    rows = analyze(folder, plan, config.gpu_gb)
    written = sorted(path.name for path in folder.iterdir() if path.is_file())
    print(f'{folder}: {", ".join(written)}')
    if config.trace:
        print(f'traces: {folder}/runs/*/rep0/trace_rank*.json, for chrome://tracing or https://ui.perfetto.dev')
    return 0 if ended_well and not any('failed' in row for row in rows) else 1


if __name__ == '__main__':
    errors.report_errors(prints_result=bool(config.plan))
    devices.make_compile_caches()  # a plan compiles parts of the model
    for number in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C: end the run under way, and say how to continue
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.default_int_handler)
    say_without_effect('compare.py', config, explicit)
    sys.exit(main(config, _train_keys, explicit))
