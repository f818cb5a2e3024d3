"""benchmarks/links.py: all-reduces over every link that there is, on one node and on two."""

import json

import pytest
import torch
from launch import REPO, free_ports, run_script, start_agent

from benchmarks import links

SIZES = [2**10, 2**22]
RANK = f"""
import json, os, sys, torch
from benchmarks import links

rows = links.measure_links(torch.device('cpu'), {SIZES}, seconds=0.1)
with open(f'{{sys.argv[1]}}/rank{{os.environ["RANK"]}}.json', 'w') as file:
    json.dump(rows, file)
"""


@pytest.fixture
def script(tmp_path):
    """The script that each rank runs. It leaves its rows in a folder that it is given."""
    (tmp_path / 'rank.py').write_text(RANK)
    return tmp_path / 'rank.py'


def start_node(number, script, port):
    """Start torchrun's agent of one of two nodes with 2 ranks each, both on this machine."""
    torchrun = ['--nnodes=2', f'--node_rank={number}', '--master_addr=127.0.0.1', f'--master_port={port}']
    folder = script.parent
    log = folder / f'node{number}.log'
    return start_agent(script, folder, nproc=2, torchrun=torchrun, log=log, PYTHONPATH=str(REPO))


def check(rows):
    for row in rows:
        n = row['ranks']
        assert row['algbw'] == pytest.approx(row['bytes'] / 1e9 / (row['ms'] / 1000))
        assert row['busbw'] == pytest.approx(row['algbw'] * 2 * (n - 1) / n)
        assert row['ms'] > 0 and row['busbw'] < 100  # a machine's memory is not faster
    for small, large in zip(rows[::2], rows[1::2], strict=True):
        assert [small['bytes'], large['bytes']] == SIZES


@pytest.mark.slow
def test_two_ranks_of_a_node_have_one_link_and_the_others_are_named(tmp_path, script):
    said = run_script(script, tmp_path, nproc=2, PYTHONPATH=str(REPO)).stdout.splitlines()
    rows = json.loads((tmp_path / 'rank0.json').read_text())
    assert [(row['link'], row['ranks'], row['bytes']) for row in rows] == [('all ranks', 2, size) for size in SIZES]
    check(rows)
    assert rows == json.loads((tmp_path / 'rank1.json').read_text())
    assert said[0] == 'all-reduce on 1 node(s) of 2 rank(s)'
    assert said[1].split() == ['link', 'size', 'ms', 'algbw', 'GB/s', 'busbw', 'GB/s']
    ms, algbw, busbw = (f'{rows[1][key]:.3f}' for key in ('ms', 'algbw', 'busbw'))
    assert said[3].split() == ['all', 'ranks', '(2)', '4', 'MiB', ms, algbw, busbw]
    names = ['within a node', 'between nodes, 1 rank of each', 'between nodes, all ranks of each']
    assert [line.partition(':')[0] for line in said[4:]] == names
    assert ['left out' in line for line in said[4:]] == [False, True, True]


@pytest.mark.slow
def test_two_nodes_of_two_ranks_have_four_links(tmp_path, script):
    (port,) = free_ports(1)
    nodes = [start_node(number, script, port) for number in range(2)]
    try:
        codes = [node.wait(600) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    said = [(tmp_path / f'node{number}.log').read_text() for number in range(2)]
    assert codes == [0, 0], said
    rows = json.loads((tmp_path / 'rank0.json').read_text())
    names = ['all ranks', 'within a node', 'between nodes, 1 rank of each', 'between nodes, all ranks of each']
    assert [row['link'] for row in rows[::2]] == names and [row['ranks'] for row in rows[::2]] == [4, 2, 2, 2]
    check(rows)
    for rank in (1, 2, 3):  # the slowest rank's time, which all have
        assert json.loads((tmp_path / f'rank{rank}.json').read_text()) == rows
    assert said[0].startswith('all-reduce on 2 node(s) of 2, 2 rank(s)')
    assert 'all-reduce' not in said[1]  # rank 0 alone speaks; torch may warn that the other node has ended


def test_without_torchrun_the_hosts_names_tell_the_nodes(monkeypatch):
    monkeypatch.delenv('GROUP_RANK', raising=False)
    monkeypatch.setattr(links.socket, 'gethostname', lambda: 'n2')

    def gather(every, mine):
        every[:] = ['n1', 'n2', mine, 'n1']

    monkeypatch.setattr(links.dist, 'get_world_size', lambda: 4)
    monkeypatch.setattr(links.dist, 'all_gather_object', gather)
    assert links.nodes_of_ranks() == [[0, 3], [1, 2]]


def test_links_of_unequal_nodes():
    assert links.links_between([[0, 1, 2], [3, 4]]) == {
        'all ranks': [[0, 1, 2, 3, 4]],
        'within a node': [[0, 1, 2], [3, 4]],
        'between nodes, 1 rank of each': [[0, 3]],
        'between nodes, all ranks of each': [[0, 3], [1, 4]],
    }
    assert links.links_between([[0], [1]])['within a node'] == [[0], [1]]  # nobody to exchange with


def test_sizes_are_those_of_nccl_tests_and_read_as_such():
    assert [links.human(size) for size in links.SIZES[::3]] == ['1 KiB', '64 KiB', '4 MiB', '256 MiB']


def test_one_rank_has_no_link(monkeypatch):
    for name in ('RANK', 'WORLD_SIZE'):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match='one rank .*torchrun --nproc_per_node=2') as raised:
        links.measure_links(torch.device('cpu'))
    assert '\n' not in str(raised.value)


def test_it_runs_as_a_script_which_says_a_mistake_in_one_line():
    said = run_script('benchmarks/links.py', check=False).stderr
    assert said.startswith('[0] error: one rank ') and said.count('\n') == 1
