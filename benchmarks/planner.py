"""
How far off is compare.py --plan? Its predictions beside runs that others have published, and beside runs on this
machine over slowed links.

    python benchmarks/planner.py                                     # published runs: the error of each, in a table
    python benchmarks/planner.py --measure --ranks=2 --links=none,1000,100 --out=out/planner     # Linux, as root
    python benchmarks/planner.py --show --out=out/planner            # all that was measured, beside its prediction

--measure makes two hosts as benchmarks/slow_link.py does, with --ranks/2 ranks on each. First it times the step of one
process, with as many processes at once as there will be ranks. Then, for each link in Mbit/s (none: unshaped), it
measures the link itself and runs every layout --turns times, of which the median counts. The planner is told the step,
the link and the number of cores, and no time of a step on several ranks. If it was stopped, call it again: it goes on
from there.
"""

import argparse
import itertools
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from comparison import layout_table, results, verdict
from planning import layouts, sizes, step_time

# --- PUBLISHED RUNS ---------------------------------------------------------------------------------------------------

SIZES = ('n_layer', 'n_head', 'n_kv_head', 'n_embd', 'mlp_hidden_dim')
MODELS = {
    '8B': (32, 32, 8, 4096, 14336),
    '70B': (80, 64, 8, 8192, 28672),
    '405B': (128, 128, 8, 16384, 53248),  # in fact 126 layers; the fullest of 8 or 16 stages has as many as with 128
    '3B': (28, 32, 32, 3072, 8192),
}
# value: tokens/s per GPU, or TFLOP/s per GPU where the name says so. precision: 'fp8' doubles the peak of the matmuls.
# kernels: 'titan': FlashAttention-2 and HBM2e of 2.4 TB/s, 'te': cuDNN's attention. batch: sequences of a micro-step.
Published = namedtuple('Published', 'name model gpus precision kernels tokens batch micro_steps mode keys value')
TP8 = {'tensor_parallel': 8}
ASYNC = {'async_tensor_parallel': True}
ONCE = {'fsdp_impl': 'manual', 'zero_stage': 1}  # all of these pipelines gather the weights once per step
RUNS = [
    Published('8B fp8 32k FSDP8', '8B', 8, 'fp8', 'titan', 32768, 1, 1, 'full', {}, 3890),
    *(Published(f'8B fp8 {k}k CP{n}', '8B', 8, 'fp8', 'titan', 32768 * n, 1, 1, 'full',
                {'context_parallel': n, 'context_impl': 'gather'}, value)  # as torch's context parallelism by default
      for k, n, value in ((65, 2, 2540), (131, 4, 1071), (262, 8, 548))),
    Published('8B bf16 FSDP8 TP8', '8B', 64, 'bf16', 'titan', 8192, 12, 1, 'half', TP8, 4378),
    Published('8B bf16 FSDP8 TP8 async', '8B', 64, 'bf16', 'titan', 8192, 12, 1, 'half', {**TP8, **ASYNC}, 4809),
    Published('70B fp8 FSDP32 TP8', '70B', 256, 'fp8', 'titan', 8192, 16, 1, 'full', TP8, 829),
    Published('70B fp8 FSDP32 TP8 async', '70B', 256, 'fp8', 'titan', 8192, 16, 1, 'full', {**TP8, **ASYNC}, 876),
    # torchtitan then cut a batch of 32 into as many micro-steps as the model had parts: 8, or 16 with two chunks
    Published('405B fp8 8x8x8 1F1B', '405B', 512, 'fp8', 'titan', 8192, 4, 8, 'full',
              {**TP8, **ASYNC, 'pipeline_stages': 8, **ONCE}, 100),
    Published('405B fp8 8x8x8 interleaved', '405B', 512, 'fp8', 'titan', 8192, 2, 16, 'full',
              {**TP8, **ASYNC, 'pipeline_stages': 8, 'pipeline_chunks': 2, **ONCE}, 128),
    Published('70B fp8 TP4 PP8 VP5', '70B', 64, 'fp8', 'te', 8192, 1, 64, 'none',
              {**ASYNC, 'tensor_parallel': 4, 'pipeline_stages': 8, 'pipeline_chunks': 5, **ONCE}, 1602),
    Published('405B fp8 TP8 PP8 CP2 VP8', '405B', 1024, 'fp8', 'te', 8192, 1, 64, 'none',
              {**TP8, **ASYNC, 'pipeline_stages': 8, 'pipeline_chunks': 8, 'context_parallel': 2, **ONCE}, 292),
    # the number of chunks was not published; taken are two layers in each, as in the rows before
    Published('405B TP8 PP16, TFLOP/s', '405B', 8192, 'bf16', 'te', 8192, 1, 32, 'none',
              {**TP8, 'pipeline_stages': 16, 'pipeline_chunks': 4, **ONCE}, 430),
    Published('405B TP8 PP16 CP16, TFLOP/s', '405B', 16384, 'bf16', 'te', 131072, 1, 16, 'none',
              {**TP8, 'pipeline_stages': 16, 'pipeline_chunks': 4, **ONCE, 'context_parallel': 16,
               'context_impl': 'gather'}, 380),
    # the batch grows with the ranks, but how was not published
    *(Published(f'3B TP{t}', '3B', t, 'bf16', 'titan', 4096, t, 1, 'none', {'tensor_parallel': t}, value)
      for t, value in ((2, 14167), (4, 13460), (8, 10889), (16, 6159), (32, 3610))),
]  # fmt: skip


# Runs of the same authors on one node. They are not among the judged ones: they say how fast the GPUs of these authors
# are, as compare.py's --measured would.
ANCHORS = {
    ('titan', 'bf16'): Published('8B bf16 FSDP8', '8B', 8, 'bf16', 'titan', 8192, 2, 1, 'half', {}, 6667),
    ('titan', 'fp8'): Published('8B fp8 FSDP8', '8B', 8, 'fp8', 'titan', 8192, 2, 1, 'half', {}, 8532),
    ('te', 'fp8'): Published('8B fp8 FSDP8', '8B', 8, 'fp8', 'te', 8192, 1, 16, 'none', {}, 14451),
}


def predict_published(run, scale=1.0):
    """(prediction of the run's value, {'compute', 'exposed', ...: seconds}). scale: of the time a GPU takes alone."""
    cluster = step_time.assumed('h100', run.gpus, min(8, run.gpus))
    device = cluster.device
    memory, attention = (0.9 * 2.4e12, 0.35) if run.kernels == 'titan' else (device.memory, 0.55)
    device = device._replace(memory=memory, attention=attention * device.peak, scale=(scale, scale))
    if run.precision == 'fp8':
        device = device._replace(matmul=2 * device.matmul)
    cluster = cluster._replace(device=device)
    shape = dict(zip(SIZES, MODELS[run.model], strict=True)) | {
        'head_dim': MODELS[run.model][3] // MODELS[run.model][1]
    }
    keys = {'arch': 'llama', 'vocab_size': 128256, **shape, 'block_size': run.tokens, 'batch_size': run.batch}
    shared = run.keys.get('tensor_parallel', 1) * run.keys.get('pipeline_stages', 1)
    groups = run.gpus // shared // run.keys.get('context_parallel', 1)
    keys['global_batch_size'] = run.batch * groups * run.micro_steps
    config = {**layouts.keys_of('train_parallel.py', keys, on_cpu=False), **run.keys}
    config['activation_checkpointing'] = run.mode
    found = step_time.step(config, 'fsdp', cluster)
    rate = config['global_batch_size'] * run.tokens / found['step'] / run.gpus
    if 'TFLOP/s' in run.name:
        model = sizes.empty_model(config)
        attention = model.flops_of_attention
        layers = 126 / 128  # of those in MODELS 126 exist
        rate *= (model.flops_per_token() - attention / 2) * layers / 1e12  # causal
    return rate, found


def show_published():
    rows, errors, with_speed = [], [], []
    for run in RUNS:
        rate, found = predict_published(run)
        errors.append(rate / run.value - 1)
        cells = {'GPUs': f'{run.gpus:,}', 'published': f'{run.value:,}', 'predicted': f'{rate:,.0f}'}
        cells |= {part: f'{found[part] / found["step"]:.0%}' for part in ('exposed', 'bubble')}
        cells |= {'error': f'{errors[-1]:+.0%}', 'with their speed': ''}
        anchor = ANCHORS.get((run.kernels, run.precision))
        if anchor and not run.name.startswith('3B'):
            scale = predict_published(anchor)[0] / anchor.value
            with_speed.append(predict_published(run, scale)[0] / run.value - 1)
            cells['with their speed'] = f'{with_speed[-1]:+.0%}'
        rows.append({'run': run.name, **cells})
    print(verdict.markdown(rows))
    for name, found in (('assumed speed', errors), ('their speed', with_speed)):
        off = [abs(error) for error in found]
        print(f'\n{name}: {len(off)} runs, median error {statistics.median(off):.0%}, largest {max(off):.0%}')


# --- THIS MACHINE -----------------------------------------------------------------------------------------------------

# 4.2M parameters: 17 MB of gradients, which 100 Mbit/s carry in 1.4 s; 8 x 256 tokens, about a second of one core
MODEL = {'arch': 'llama', 'n_layer': 4, 'n_head': 8, 'n_kv_head': 4, 'n_embd': 256, 'vocab_size': 2048}
MODEL |= {'block_size': 256, 'dataset': 'synthetic', 'dtype': 'float32', 'device': 'cpu', 'global_batch_size': 8}
RUN = {'max_iters': 14, 'log_interval': 2, 'eval_interval': 0, 'eval_sequences': 0, 'checkpoint_interval': 0}
RUN |= {'keep_checkpoints': 0, 'resume': 'never', 'compile': False, 'warmup_iters': 2}
WARM_UP = 4  # steps
MANUAL = {'fsdp_impl': 'manual'}


def cases(ranks):
    """{name: (strategy, script, keys)} of the layouts that are measured."""
    mine = 8 // ranks
    found = {
        'ddp': ('ddp', 'train_ddp.py', {'batch_size': mine}),
        'fsdp': ('fsdp', 'train_fsdp.py', {'batch_size': mine}),
        'fsdp manual': ('fsdp', 'train_fsdp.py', {**MANUAL, 'batch_size': mine}),
        'cp2': ('fsdp', 'train_parallel.py', {**MANUAL, 'batch_size': 2 * mine, 'context_parallel': 2}),
        'tp2': ('fsdp', 'train_parallel.py', {**MANUAL, 'batch_size': 2 * mine, 'tensor_parallel': 2}),
        'pp2': ('pipeline', 'train_pipeline.py', {'batch_size': 1, 'pipeline_stages': 2}),
    }
    if ranks == 4:
        found |= {
            'hsdp': ('fsdp', 'train_fsdp.py', {**MANUAL, 'batch_size': mine, 'replicate_size': 2}),
            'cp4': ('fsdp', 'train_parallel.py', {**MANUAL, 'batch_size': 8, 'context_parallel': 4}),
            'tp4': ('fsdp', 'train_parallel.py', {**MANUAL, 'batch_size': 8, 'tensor_parallel': 4}),
            'pp4': ('pipeline', 'train_pipeline.py', {'batch_size': 1, 'pipeline_stages': 4}),
        }
    return found


def arguments_of(keys, out_dir):
    return [f'--{key}={value}' for key, value in {**MODEL, **RUN, **keys, 'out_dir': out_dir}.items()]


def seconds_of_step(out_dir):
    rows = [row for row in results.read_rows(out_dir) if row['step'] > WARM_UP]
    return statistics.median(row['time/total'] for row in rows) / 1000


def alone(ranks):
    """{folder: (script, keys)} of the runs of one process from which the planner takes a rank's speed."""
    fsdp = {'batch_size': 8 // ranks, 'global_batch_size': 8 // ranks}
    return {
        f'alone-{ranks}': ('train_ddp.py', fsdp),
        f'alone-{ranks}-small': ('train_ddp.py', {**fsdp, 'batch_size': 1}),  # the same sequences one at a time
        f'alone-{ranks}-fsdp': ('train_fsdp.py', fsdp),
        f'alone-{ranks}-manual': ('train_fsdp.py', {**fsdp, **MANUAL}),
    }


def measure_alone(ranks, out):
    """Do the runs of alone(), each in as many processes at once as there will be ranks."""
    from benchmarks.runs import environment

    for name, (script, keys) in alone(ranks).items():
        if (out / name / 'DONE').exists():
            continue
        folders = [out / name] + [out / f'beside-{number}' / name for number in range(1, ranks)]
        runs = [
            subprocess.Popen(
                [sys.executable, str(REPO / script), *arguments_of({**keys, 'max_iters': 24}, folder)],
                env=environment(),
                stdout=subprocess.DEVNULL,
            )
            for folder in folders
        ]
        assert not any([run.wait() for run in runs]), f'a run of one process failed: {name}'


def measure(ranks, mbit, out, names, turns):
    """Write out/RANKS-MBIT.json: {layout: [seconds of a step in each run], 'links': rows of links.py} over one link."""
    from slow_link import INTERFACE, SlowLink

    path = out / f'{ranks}-{mbit}.json'
    found = json.loads(path.read_text()) if path.exists() else {}
    with SlowLink(mbit=mbit) as link:
        if 'links' not in found or 'gather_ms' not in found['links'][0]:
            link.run(
                'benchmarks/links.py',
                '--device=cpu',
                f'--largest={2**22}',
                f'--json={out}/links.json',
                nproc=ranks // 2,
                GLOO_SOCKET_IFNAME=INTERFACE,
            )
            found['links'] = json.loads((out / 'links.json').read_text())
            path.write_text(json.dumps(found))
        for turn, (name, (_, script, keys)) in itertools.product(range(turns), cases(ranks).items()):
            if len(found.get(name, [])) > turn or (names and name not in names):
                continue
            keys = keys | {'max_iters': 8} if mbit and mbit <= 100 else keys  # each step takes seconds
            out_dir = out / f'{ranks}-{mbit}-{name.replace(" ", "-")}'
            shutil.rmtree(out_dir, ignore_errors=True)  # of a call that was cut off
            link.run(script, *arguments_of(keys, out_dir), nproc=ranks // 2, timeout=170)
            found.setdefault(name, []).append(seconds_of_step(out_dir))
            print(f'{ranks} ranks, {mbit} Mbit/s, {name}: {found[name][-1]:.3f} s', flush=True)
            path.write_text(json.dumps(found))


def show_measured(out):
    rows, errors, choices = [], [], []
    for path in sorted(out.glob('[24]-*.json')):
        ranks, mbit = re.fullmatch(r'(\d)-(.*)\.json', path.name).groups()
        ranks, measured = int(ranks), json.loads(path.read_text())
        cluster = step_time.cpu_cluster(ranks, ranks // 2, cores=1, gb=24)  # two nodes of one core
        cluster = step_time.with_measured_step(
            cluster,
            [layout_table.run_alone(out / name) for name in alone(ranks) if (out / name / 'DONE').exists()],
        )
        cluster = step_time.with_measured_links(cluster, measured.pop('links'))
        measured = {name: statistics.median(runs) for name, runs in measured.items()}
        planned = []
        for name, seconds in measured.items():
            strategy, script, keys = cases(ranks)[name]
            config = layouts.keys_of(script, {**MODEL, **keys}, on_cpu=True)
            found = step_time.step(config, strategy, cluster)
            row = {'case': name, 'strategy': strategy, 'keys': config, 'step': found['step']}
            planned.append({**row, 'name': layouts.name_of(row)})
            errors.append(found['step'] / seconds - 1)
            parts = {part: f'{found[part] * 1000:,.0f}' for part in ('compute', 'exposed', 'bubble', 'update')}
            rows.append({'ranks': str(ranks), 'Mbit/s': mbit, 'layout': name, 'measured ms': f'{seconds * 1000:,.0f}',
                         'predicted ms': f'{found["step"] * 1000:,.0f}', 'error': f'{errors[-1]:+.0%}',
                         **parts})  # fmt: skip
        first = layouts.in_order(planned)[0]['case']
        choices.append(
            f'{ranks} ranks, {mbit} Mbit/s: first choice {first}, '
            f'{measured[first] / min(measured.values()) - 1:+.0%} from the best'
        )
    if not rows:
        sys.exit(f'error: {out} has no measurements: `python benchmarks/planner.py --measure --out={out}` makes them')
    print(verdict.markdown(rows), '', *choices, sep='\n')
    off = [abs(error) for error in errors]
    print(f'\n{len(off)} steps: median error {statistics.median(off):.0%}, largest {max(off):.0%}')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--measure', action='store_true')
    parser.add_argument('--show', action='store_true')
    parser.add_argument('--ranks', type=int, default=2, choices=(2, 4))
    parser.add_argument('--links', default='none,1000,100', help='Mbit/s (default: %(default)s)')
    parser.add_argument('--layouts', default='', help='of cases(), with commas; empty: all')
    parser.add_argument('--turns', type=int, default=3, help='runs of each layout, one after the other')
    parser.add_argument('--out', default='out/planner', type=Path)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the ends of all `with` blocks
    out = arguments.out.resolve()
    if arguments.measure:
        out.mkdir(parents=True, exist_ok=True)
        measure_alone(arguments.ranks, out)
        for mbit in filter(None, arguments.links.split(',')):
            names = [name for name in arguments.layouts.split(',') if name]
            measure(arguments.ranks, None if mbit == 'none' else float(mbit), out, names, arguments.turns)
    elif arguments.show:
        show_measured(out)
    else:
        show_published()


if __name__ == '__main__':
    main()
