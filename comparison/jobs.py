"""
A sweep whose runs are jobs of Slurm (compare.py --slurm): each element of an array does the run of its number.

    jobs.run_sweep(folder, groups, config)    # submit what is known to go, collect what has ended, until all is through

folder/jobs.json gives each run a number that it keeps. What is under way the queue itself tells, by the name that all
jobs of a folder have: so a compare.py that is started again, also one that died within sbatch, submits nothing twice.
"""

import hashlib
import json
import shlex
import shutil
import subprocess
import time

from comparison import results, sweep
from runtime.files import ROOT, read_json

ASK_S = 30  # seconds between two questions to Slurm, unless a run has ended


def name_of(folder):
    """The name that the jobs of a folder have, and no others."""
    return f'compare-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:10]}'


def runs_of(folder):
    """[[repeat, entry]] in the order of their numbers."""
    return read_json(folder / 'jobs.json') if (folder / 'jobs.json').exists() else []


def numbered(folder, runs):
    """{number: [repeat, entry]} of these runs; those that have no number yet get the next ones."""
    known, runs = runs_of(folder), json.loads(json.dumps(runs))
    known += [run for run in runs if run not in known]
    results.write_json(folder / 'jobs.json', known)
    return {known.index(run): run for run in runs}


def waiting(folder):
    """The numbers of the runs that the queue holds, waiting or running."""
    command = ['squeue', '--noheader', '--array', '--me', f'--name={name_of(folder)}', '--format=%K']
    while (result := subprocess.run(command, capture_output=True, text=True)).returncode:
        print(f'Slurm does not answer: {result.stderr.strip()}', flush=True)  # busy, or restarted: that says nothing
        time.sleep(ASK_S)
    return {int(number) for number in result.stdout.split()}


def submit(folder, numbers, config):
    """An array of the runs of these numbers; its job id. Raises ValueError with what sbatch says if it refuses."""
    command = ['sbatch', '--parsable', *shlex.split('' if config.slurm is True else config.slurm)]
    command += [f'--job-name={name_of(folder)}', f'--array={",".join(map(str, sorted(numbers)))}', 'slurm/compare.sh']
    command += [f'--out_dir={folder.absolute()}', f'--launcher={config.launcher}']
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        said = (result.stderr.strip().splitlines() or ['it said nothing'])[-1]
        raise ValueError(
            f'slurm={config.slurm}: {said}: has this shell done `source slurm/local.sh`? see docs/slurm.md'
        )
    return result.stdout.strip().partition(';')[0]


def run_sweep(folder, groups, config):
    """Run what is not finished yet of a sweep; whether all ended, well or diverged. After a failure nothing begins."""
    if not shutil.which('sbatch'):
        raise ValueError('slurm: there is no sbatch on this machine: start this on a login node, or leave out --slurm')
    waits, missing, failures = {}, {}, []  # {number: [repeat, entry]}, {number: when it was first missed}

    def ended(number):
        repeat, entry = waits[number]
        return results.read_run(results.folder_of(folder, entry, repeat), entry['world_size'])

    while True:
        queue = waiting(folder)  # before the files are looked at: what has left it has written them
        for number in [*waits]:
            if not (run := ended(number)):
                now = time.monotonic()
                missing[number] = now if number in queue else missing.get(number, now)
                if now < missing[number] + ASK_S:  # on a shared disk files come late
                    continue
            failure = run.failure if run else f'no result: slurm/logs/{name_of(folder)}-*_{number}.out'
            print(sweep.how_it_ended(folder, *waits.pop(number), failure), flush=True)
            failures += [failure] if failure and not sweep.has_diverged(failure) else []
        if not failures:
            todo = numbered(folder, sweep.next_runs_of_all(folder, groups, config))
            if there := todo.keys() & queue - waits.keys():
                print(f'{len(there)} run(s) are in the queue already', flush=True)
            if new := todo.keys() - queue - waits.keys():
                for number in new:
                    repeat, entry = todo[number]
                    results.clear(results.folder_of(folder, entry, repeat))
                print(f'{len(new)} run(s) submitted as job {submit(folder, new, config)}', flush=True)
            waits |= todo
        if not waits:
            return not failures
        until = time.monotonic() + ASK_S
        while time.monotonic() < until and not any(map(ended, waits)):
            time.sleep(2)
