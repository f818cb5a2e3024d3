"""Two hosts and a slow network on one machine (benchmarks/slow_link.py): the network is as slow as asked for, and
training sends over it what the formulas say."""

import subprocess
import sys

import pytest
from launch import REPO, TINY_RUN
from outputs import metrics

from benchmarks.slow_link import ADDRESSES, NoSlowLink, SlowLink, weights

RECEIVE = """
import socket, time
server = socket.create_server(('0.0.0.0', 5000))
print('ready', flush=True)
connection, _ = server.accept()
received = 0
while chunk := connection.recv(1 << 20):
    received += len(chunk)
print(received, time.monotonic())
"""
SEND = """
import socket, sys, time
print(time.monotonic())
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""


@pytest.fixture
def link():
    """A link of 100 Mbit/s."""
    try:
        slow_link = SlowLink(mbit=100).__enter__()
    except NoSlowLink as reason:
        pytest.skip(str(reason))
    yield slow_link
    slow_link.close()


def namespaces():
    return subprocess.run(['ip', 'netns', 'list'], capture_output=True, text=True, check=True).stdout.split()


def processes_in(link):
    """The ids of the processes in both namespaces."""
    return [
        pid
        for name in link.namespaces
        for pid in subprocess.run(['ip', 'netns', 'pids', name], capture_output=True, text=True).stdout.split()
    ]


def send(link, size):
    """Send `size` bytes from the second host to the first; returns (Mbit/s, [bytes that each interface has sent])."""
    before = link.counters()
    receiver = link.start(0, [sys.executable, '-c', RECEIVE], subprocess.PIPE)
    assert receiver.stdout.readline() == b'ready\n'
    sender = link.start(1, [sys.executable, '-c', SEND, ADDRESSES[0], size], subprocess.PIPE)
    began = float(sender.communicate(timeout=300)[0])  # both read the clock of one machine
    received, ended = map(float, receiver.communicate(timeout=300)[0].split())
    seconds = ended - began
    assert received == size and sender.returncode == 0
    return size * 8 / seconds / 1e6, [after - earlier for after, earlier in zip(link.counters(), before, strict=True)]


def test_where_there_can_be_no_link_one_line_says_why():
    command = [sys.executable, 'benchmarks/slow_link.py', '--short']
    result = subprocess.run(command, cwd=REPO, env={'PATH': ''}, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith('error: ') and len(result.stderr.splitlines()) == 1
    assert 'root' in result.stderr or 'apt-get install iproute2' in result.stderr


@pytest.mark.slow
def test_the_link_is_no_faster_than_asked_for_and_counts_every_byte(link):
    for mbit, size in ((100, 6_000_000), (20, 1_500_000)):
        link.shape(mbit)
        rate, (acknowledged, sent) = send(link, size)
        assert rate < 1.05 * mbit  # a busy machine can be slower, a shaped link is never faster
        assert sent == pytest.approx(size, rel=0.05)
        assert acknowledged < 0.05 * size


@pytest.mark.slow
def test_without_a_rate_the_link_is_many_times_faster(link):
    link.shape(None)
    assert max(send(link, 50_000_000)[0] for _ in range(3)) > 200  # 5000 on a quiet machine
    link.shape(100)  # and it can be limited again
    assert send(link, 3_000_000)[0] < 105


@pytest.mark.slow
def test_neither_an_exception_nor_a_killed_process_leaves_anything(link):
    with pytest.raises(ZeroDivisionError), SlowLink() as other:
        sleeper = other.start(0, ['sleep', '1000'], None)
        assert set(other.namespaces) < set(namespaces())  # beside the first link, with the same addresses
        1 / 0  # noqa: B018
    assert sleeper.wait(60) != 0
    assert not set(other.namespaces) & set(namespaces())
    assert set(link.namespaces) <= set(namespaces())

    script = 'from benchmarks.slow_link import SlowLink; SlowLink().__enter__(); import os; os.kill(os.getpid(), 9)'
    killed = subprocess.Popen([sys.executable, '-c', script], cwd=REPO)
    assert killed.wait(300) == -9
    leftover = f'slow-link-{killed.pid}-0-a'
    assert leftover in namespaces()
    with SlowLink():  # the next one cleans up
        assert leftover not in namespaces()


@pytest.mark.slow
def test_a_node_that_fails_ends_the_other_and_both_logs_are_shown(link, tmp_path):
    script = tmp_path / 'fails.py'
    script.write_text(
        'import os, sys, time\n'
        'print("this is rank", os.environ["RANK"], flush=True)\n'
        'sys.exit("gone") if os.environ["RANK"] == "1" else time.sleep(1000)\n'
    )
    with pytest.raises(RuntimeError) as raised:
        link.run(script, patience=1, timeout=600)
    for text in ('this is rank 0', 'this is rank 1', 'gone', 'the other killed'):
        assert text in str(raised.value)
    assert processes_in(link) == []


@pytest.mark.slow
def test_ddp_sends_one_all_reduce_of_the_gradients_per_step_no_faster_than_the_link_allows(link, tmp_path):
    steps, out_dir = 20, tmp_path / 'run'
    model = ['--n_layer=2', '--n_head=2', '--n_embd=128', '--block_size=32', '--batch_size=1', '--vocab_size=256']
    before = link.counters()
    arguments = [*model, *TINY_RUN, '--dataset=synthetic', f'--out_dir={out_dir}', f'--max_iters={steps}']
    finished = link.run('train_ddp.py', *arguments)
    sent = (sum(link.counters()) - sum(before)) / 2
    assert '; 2 x cpu' in finished.outputs[0]

    M = 2
    N = sum(weights(out_dir))
    expected = 2 * N * 4 * (M - 1) / M
    assert N > 400_000
    assert steps * expected < sent < 1.1 * (steps + 3) * expected  # the weights at the start, headers, torchrun's talk
    seconds = [row['time/total'] / 1000 for row in metrics(out_dir)][2:]
    assert sum(seconds) / len(seconds) > 0.85 * expected * 8 / 100e6


# --- DiLoCo -----------------------------------------------------------------------------------------------------------


MODEL = ['--n_layer=2', '--n_head=2', '--n_embd=128', '--block_size=32', '--batch_size=1', '--vocab_size=256']
H, ROUNDS = 40, 4


def rounds(link, out_dir, *keys):
    """(rows at the ends of rounds of a run on 2 x 1 ranks, all that a host has sent by the counters of the
    interface)."""
    before = link.counters()
    run = [*MODEL, *TINY_RUN, '--dataset=synthetic', f'--out_dir={out_dir}', '--eval_interval=0', '--log_interval=10']
    run += [f'--inner_steps={H}', f'--max_iters={ROUNDS * H}', *keys]
    finished = link.run('train_diloco.py', *run)
    sent = (sum(link.counters()) - sum(before)) / 2
    assert 'mesh: 2 replicas x 1 shards' in finished.outputs[0]
    rows = [row for row in metrics(out_dir) if row['step'] % H == 0]
    assert len(rows) == ROUNDS
    return rows, sent


@pytest.mark.slow
def test_diloco_sends_what_the_formula_says_and_waits_once_a_round_or_hardly_at_all_when_it_overlaps(link, tmp_path):
    streaming = ['--num_fragments=2', '--overlap_steps=18', '--exchange_dtype=int8']
    blocking, overlapped = rounds(link, tmp_path / 'one'), rounds(link, tmp_path / 'two', *streaming)
    for rows, counted in (blocking, overlapped):
        assert [row['diloco/bytes'] for row in rows[1:-1]] == [rows[1]['diloco/bytes']] * (ROUNDS - 2)
        assert rows[1]['diloco/bytes'] == pytest.approx(rows[1]['diloco/bytes_formula'], rel=0.05)
        # The interface also counts headers, the start and torchrun's signs of life, some kB per second.
        sent = sum(row['diloco/bytes'] for row in rows)
        assert sent < counted < 2 * sent + 300_000

    waited = [sum(row['diloco/wait_s'] for row in rows[1:-1]) for rows, _ in (blocking, overlapped)]
    under_way = [sum(row['diloco/transfer_s'] for row in rows[1:-1]) for rows, _ in (blocking, overlapped)]
    assert waited[0] > 0.5 * under_way[0] and waited[1] < 0.5 * under_way[1]
