"""
A sweep whose runs are Slurm jobs (compare.py --slurm). Element i of a job array does the run with number i.

    jobs.run_sweep(folder, groups, config)    # submit runs that are known, collect those that ended, until all are done

folder/jobs.json gives each run a number that never changes. Which runs are under way is known from the queue, because
all jobs of a folder have the same name. So if compare.py is started again, even after it died during sbatch, it submits
no run twice.
"""

import hashlib
import json
import shlex
import shutil
import subprocess
import time

from comparison import results, sweep
from system.files import ROOT, read_json

ASK_S = 30  # seconds between two looks at Slurm's queue, or less if a run ends


def name_of(folder):
    """The name of all jobs of a folder, and of no others."""
    return f'compare-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:10]}'


def runs_of(folder):
    """[[repeat, entry]] of all runs that have a number, in that order."""
    return read_json(folder / 'jobs.json') if (folder / 'jobs.json').exists() else []


def numbered(folder, runs):
    """{number: [repeat, entry]} of these runs. New runs get the next numbers, and jobs.json is written."""
    known, runs = runs_of(folder), json.loads(json.dumps(runs))
    known += [run for run in runs if run not in known]
    results.write_json(folder / 'jobs.json', known)
    return {known.index(run): run for run in runs}


def waiting(folder):
    """The numbers of the runs in the queue, waiting or running."""
    command = ['squeue', '--noheader', '--array', '--me', f'--name={name_of(folder)}', '--format=%K']
    while (result := subprocess.run(command, capture_output=True, text=True)).returncode:
        print(f'Slurm does not answer: {result.stderr.strip()}', flush=True)  # busy or restarting: ask again
        time.sleep(ASK_S)
    return {int(number) for number in result.stdout.split()}


def submit(folder, numbers, config):
    """Submit an array of the runs with these numbers; returns its job id. Raises ValueError if sbatch refuses."""
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
    """Do the runs of a sweep that are not finished yet. Returns whether none failed; a run that diverged has not
    failed. After a failure no new run is submitted."""
    if not shutil.which('sbatch'):
        raise ValueError('slurm: there is no sbatch on this machine: start this on a login node, or leave out --slurm')
    waits, missing, failures = {}, {}, []  # {number: [repeat, entry]}, {number: when it was first missed}

    def ended(number):
        repeat, entry = waits[number]
        return results.read_run(results.folder_of(folder, entry, repeat), entry['world_size'])

    while True:
        queue = waiting(folder)  # before the files: a run that has left the queue has written its files
        for number in [*waits]:
            if not (run := ended(number)):
                now = time.monotonic()
                missing[number] = now if number in queue else missing.get(number, now)
                if now < missing[number] + ASK_S:  # files may appear late on a shared disk
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
