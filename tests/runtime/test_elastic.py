"""Replicas train on two nodes and one node is lost: the run goes on with the other one, from the last outer step."""

import os
import re
import signal

import pytest
import torch
from faults import children_of, is_alive, wait_until
from launch import TINY_MODEL, TINY_RUN, free_ports, start_agent
from outputs import metrics
from precision import apart
from prepared import only

import data
from keys import Keys
from model import GPT, ModelConfig
from runtime import checkpoint

BATCH, H, STEPS = 8, 10, 200  # long enough to be killed on the way
RUN = [
    *TINY_MODEL,
    *TINY_RUN,
    f'--global_batch_size={BATCH}',  # divides by the ranks of one node and of two
    '--dtype=float32',
    '--dataset=tiny',
    f'--inner_steps={H}',
    f'--max_iters={STEPS}',
    f'--checkpoint_interval={H}',
    '--eval_interval=0',
    '--keep_checkpoints=99',
    '--timeout_s=60',
]


def start_node(is_host, port, arguments, log):
    """Start torchrun's agent of one node, with 2 ranks. is_host: it has the store at which nodes meet, and must not be
    lost.

    After the first node has come, the others have 20 s. A node that has not been heard of for 8 s counts as lost.
    """
    conf = 'last_call_timeout=20,join_timeout=300,keep_alive_interval=1,keep_alive_max_attempt=8'
    torchrun = ['--nnodes=1:2', '--max-restarts=3', '--rdzv-backend=c10d', '--rdzv-id=elastic']
    torchrun += [f'--rdzv-endpoint=127.0.0.1:{port}', f'--rdzv-conf=is_host={int(is_host)},{conf}']
    # Without this, torch 2.13 gives restarted workers the old store, which still has the addresses of the old workers.
    env = {'TORCH_DISABLE_SHARE_RDZV_TCP_STORE': '1'}
    return start_agent('train_diloco.py', *arguments, nproc=2, torchrun=torchrun, log=log, **env)


def first_loss_after(path, step, data_dir):
    """The loss of step + 1 from this checkpoint, on the samples that this step has in every run."""
    weights, state = checkpoint.load_weights(path)
    model = GPT(ModelConfig(**state['identity']['model']))
    model.load_state_dict(weights, strict=False)  # the head is the embedding
    dataset = data.open_dataset(data_dir, 'tiny', 'train', 32)
    batches = data.batches(only(dataset), Keys.seed, step * BATCH, BATCH, BATCH, 0, 1, torch.device('cpu'))
    with torch.no_grad():
        loss = model(*next(batches))[1].item() / (BATCH * 32)
    batches.close()
    return loss


@pytest.mark.slow
def test_the_run_goes_on_without_a_node_that_was_killed(data_dir, tmp_path):
    out_dir, logs = tmp_path / 'out', [tmp_path / 'node0.log', tmp_path / 'node1.log']
    saved = out_dir / 'checkpoints'
    arguments = [*RUN, f'--data_dir={data_dir}', f'--out_dir={out_dir}']  # num_replicas=None: one per node
    (port,) = free_ports(1)
    nodes = [start_node(number == 0, port, arguments, logs[number]) for number in range(2)]

    def tails():
        return '\n'.join(log.read_text()[-3000:] for log in logs)

    try:
        wait_until(lambda: (saved / f'step_{3 * H:08}').exists(), 300, tails)
        workers = children_of(nodes[1].pid)
        nodes[1].send_signal(signal.SIGKILL)  # the agent; its workers end with it, see processes.end_with_parent
        nodes[1].wait()
        wait_until(lambda: not any(map(is_alive, workers)), 60, tails)
        assert len(workers) == 2
        assert nodes[0].wait(timeout=600) == 0, logs[0].read_text()
    finally:
        for node in nodes:
            for pid in children_of(node.pid) if node.poll() is None else []:
                os.kill(pid, signal.SIGKILL)
            node.kill()
            node.wait()

    text = (out_dir / 'train.log').read_text()
    assert (out_dir / 'DONE').read_text().strip() == str(STEPS)
    _, before, after = text.split('command: ')  # started twice
    assert 'mesh: 2 replicas x 2 shards' in before and 'mesh: 1 replicas x 2 shards' in after
    step = int(re.search(r'resuming .* at step (\d+)\n', after)[1])
    assert step % H == 0 and 3 * H <= step < STEPS  # the last outer step, with nothing of its round lost

    rows = metrics(out_dir)
    assert [row['step'] for row in rows] == list(range(1, STEPS + 1))
    assert [row['tokens'] for row in rows] == [row['step'] * BATCH * 32 for row in rows]
    assert [row['step'] for row in rows if 'diloco/momentum_norm' in row] == list(range(H, STEPS + 1, H))
    exchanged = [row['step'] for row in rows if row.get('diloco/bytes')]
    assert exchanged == list(range(H, step + 1, H))  # there is nobody to exchange with afterwards
    assert '2 sequences x 1 micro-step x 4 ranks = 8 sequences' in before
    assert '2 sequences x 2 micro-steps x 2 ranks = 8 sequences' in after
    loss = first_loss_after(str(saved / f'step_{step:08}'), step, data_dir)
    # It is the loss of the outer weights, on the next samples in the order of the data.
    assert abs(rows[step]['loss'] - loss) <= apart() * loss
    losses = [row['loss'] for row in rows]
    assert sum(losses[-H:]) < sum(losses[step - H : step])  # and it goes on learning
