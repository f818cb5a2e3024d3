"""
The text that compare.py --plan prints: the layouts that fit a cluster, why the first is first, and how to start it.

    print(report(config, train_keys, explicit))
"""

import sys
from pathlib import Path

from comparison import results, verdict
from planning import layouts, step_time
from system.files import read_json

# Without these each node's torchrun would wait for the others on its own address. HEAD is the name of one of the nodes.
RENDEZVOUS = ('--rdzv-backend=c10d', '--rdzv-id=1', '--rdzv-endpoint=HEAD:29500')


def report(config, keys, explicit):
    """The text that compare.py --plan prints. config: compare.py's keys. keys: those given for train scripts. explicit:
    which keys were given, and where. Raises ValueError as layouts.rank() does."""
    gpus, node_gpus, gpu = config.gpus, config.node_gpus, config.gpu.lower()
    if gpu == 'cpu':
        if not config.measured or not config.links:
            raise ValueError(
                'gpu=cpu has no speed to assume: give --measured=OUT_DIR and --links=FILE, docs/strategies.md'
            )
        cluster = step_time.cpu_cluster(gpus, node_gpus, config.cores, config.gpu_gb)
    else:
        cluster = step_time.assumed(gpu, gpus, node_gpus)
        if keys.get('dtype') == 'float32' and not config.measured:
            raise ValueError(
                f'dtype=float32: the speed assumed for {gpu} is that of bfloat16: leave dtype away, or give '
                '--measured=OUT_DIR, docs/strategies.md'
            )
        cluster = cluster._replace(gb=config.gpu_gb) if 'gpu_gb' in explicit else cluster
    if config.measured:
        cluster = step_time.with_measured_step(cluster, [run_alone(out_dir) for out_dir in config.measured])
    if config.links:
        cluster = step_time.with_measured_links(cluster, read_json(Path(config.links)))
    rows = layouts.rank(keys, cluster)
    table = verdict.markdown([
        {
            'layout': row['name'],
            'batch_size': f'{row["keys"]["batch_size"]} x {row["micro_steps"]}',
            'checkpointing': row['keys']['activation_checkpointing'],
            'GB': f'{row["gb"]:.1f}',
            'sent GB': f'{row["sent"] / 1e9:.2f}',
            'compute s': f'{row["compute"]:.3f}',
            'exposed s': f'{row["exposed"]:.3f}',
            'bubble s': f'{row["bubble"]:.3f}',
            'step s': f'{row["step"]:.3f}',
            'tokens/s': f'{row["tokens_per_s"]:,.0f}',
            'MFU': f'{row["mfu"]:.1%}' if 'mfu' in row else '',
        }
        for row in rows
    ])  # fmt: skip
    speed, links = ('measured' if given else 'assumed' for given in (config.measured, config.links))
    if keys.get('matmul_dtype') and not config.measured:
        speed += ' (that of bfloat16)'
    per_node = min(gpus, node_gpus)
    title = f'{gpus} ranks of {gpu}, {per_node} on each node; speed {speed}, links {links}; per step of a run:'
    return f'{title}\n\n{table}\n\n{reason(rows)}\n\n{command(rows[0], keys, explicit, cluster)}'


def run_alone(out_dir):
    """(configuration, rows after the warm-up) of a finished run in one process. Raises ValueError for any other."""
    run = results.read_run(Path(out_dir))
    if run is None or run.failure or run.about.get('world_size', 1) != 1:
        raise ValueError(f'measured={out_dir}: expected the out_dir of a finished run of one process')
    return run.config, [row for row in run.rows if row['step'] > results.WARM_UP and 'time/backward' in row]


def reason(rows):
    """A sentence that says why the first layout is first."""
    first, *others = rows
    lost = first['exposed'] + first['bubble']
    said = f'{first["name"]} is first: of {first["step"]:.3f} s per step it waits {lost:.3f} s for other ranks'
    faster = [row for row in others if row['step'] < first['step']]
    if faster:
        gain = 1 - min(row['step'] for row in faster) / first['step']
        others_losses = ', and DiLoCo has other losses' if any(row['strategy'] == 'diloco' for row in faster) else ''
        return f'{said}, and what is faster by prediction ({gain:.1%}) has more dimensions for it{others_losses}.'
    if not others:
        return f'{said}, and nothing else fits.'
    second = others[0]
    parts = {
        'compute': 'computes',
        'exposed': 'waits for communication',
        'bubble': 'has idle stages',
        'update': 'updates',
    }
    part = max(parts, key=lambda part: second[part] - first[part])
    return f'{said}, and the next one, {second["name"]}, {parts[part]} {second[part] - first[part]:.3f} s longer.'


def command(row, keys, explicit, cluster):
    """The command that starts a run with this layout, on each node, with the config files and train keys given to
    compare.py."""
    given = {key: value for key, value in keys.items() if explicit.get(key) == 'command line'}
    files = [word for word in sys.argv[1:] if word.endswith('.py') and not word.startswith('--')]
    options = [f'--{key}={value}' for key, value in {**given, **row['keys']}.items()]
    per_node = min(cluster.gpus, cluster.node_gpus)
    nodes, met = ([f'--nnodes={cluster.gpus // per_node}'], RENDEZVOUS) if cluster.gpus > per_node else ([], ())
    return ' '.join(['torchrun', *nodes, f'--nproc_per_node={per_node}', *met, row['script'], *files, *options])
