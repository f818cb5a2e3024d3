"""
Which lines of the code run only on CUDA, and which of them do tests run even where there is no GPU?

    python tests/cuda_lines.py          # each line, what runs it here, and how many there are

    contract    the stand-ins of on_cuda.py, which refuse what the real kernels refuse, and compute their numbers
    fake        a device that keeps books (the streams of streams.py), has shapes alone (meta), or a patched function
    -           nothing: what asks a driver or a card itself (docs/gpu.md)

A line counts as CUDA's alone if it is in a branch that asks for CUDA (on_cuda, is_cuda, device.type == 'cuda', a stream
that a CPU lacks), or if it names what only CUDA has: streams, events, page-locked memory, NCCL. Traced are the tests
that put something in place of a GPU, and the scripts that they start in other processes (many_runs.py).
"""

import ast
import contextlib
import json
import os
import re
import sys
import tempfile
import threading
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
# Modules that run only before or after training, or that only measure, are left out.
FILES = [*REPO.glob('*.py'), *(path for room in ('runtime', 'exchange', 'pool', 'huggingface', 'evaluation', 'dataset')
                               for path in (REPO / room).glob('*.py'))]  # fmt: skip
# Conditions that are true on CUDA, and those that are true elsewhere.
ASKS = re.compile(
    r"\bon_cuda\b|\bis_cuda\b|runs_ahead\(|type == 'cuda'|type in \('cuda'|cuda\.is_available\(\)$|"
    r'^(stream|arrived|event|self\.to_host|self\.on_host)$'
)
ASKS_CPU = re.compile(r"\bis_cpu\b|type == 'cpu'|stream is None|^self\.thread$|type != 'cuda'|device == 'cpu'")
NAMES = re.compile(
    r'torch\.cuda\.|record_event|wait_event|wait_stream|synchronize\(|\.query\(|elapsed_time|pin_memory|'
    r"non_blocking|ProcessGroupNCCL|device='cuda'|record_stream"
)
FOLDER = 'CUDA_LINES_TO'  # the environment variable by which many_runs.py learns that it is to trace, and where
TESTS = """
    tests/test_streams.py tests/test_syncs.py tests/test_diloco.py tests/exchange/test_codec.py
    tests/system/test_processes.py tests/runtime/test_peak.py tests/runtime/test_meter.py tests/system/test_errors.py
    tests/test_offload.py tests/test_on_cuda.py
    tests/test_context_manual.py::test_the_kernels_of_a_gpu_compute_a_tile
    tests/test_context_manual.py::test_where_documents_begin_stays_on_the_host_and_the_device_is_asked_for_nothing
    tests/test_model.py::test_on_a_gpu_documents_in_half_precision_need_no_mask
    tests/test_model.py::test_a_card_before_ampere_gets_a_mask
    tests/test_optim.py::test_muon_on_a_gpu_iterates_in_bfloat16_and_moves_the_matrices_alike
    tests/test_compile.py::test_on_a_gpu_the_loss_is_one_graph_and_the_same_number
    tests/test_layout.py
""".split()


def cuda_lines(path):
    """{line: text} of the statements of a file that only CUDA runs."""
    source = path.read_text()
    lines, found = source.splitlines(), {}

    def note(statement):
        """Note the lines on which a statement and the statements inside it begin."""
        for node in ast.walk(statement):
            if isinstance(node, ast.stmt) and not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found[node.lineno] = lines[node.lineno - 1].strip()

    def ends(body):
        return isinstance(body[-1], (ast.Return, ast.Raise, ast.Continue))

    def visit(body):
        for number, statement in enumerate(body):
            head = ast.get_source_segment(source, statement).split('\n')[0]
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # a docstring
            if isinstance(statement, ast.If):
                test = ast.get_source_segment(source, statement.test)
                is_cuda = ASKS.search(test) and not re.search(r'\bnot (self\.)?on_cuda|not torch\.cuda|not \(', test)
                is_cpu = ASKS_CPU.search(test) or re.search(r'\bnot (self\.)?on_cuda', test)
                for inner in statement.body if is_cuda else statement.orelse if is_cpu else []:
                    note(inner)
                if is_cpu and ends(statement.body) and not statement.orelse:
                    for inner in body[number + 1 :]:
                        note(inner)
            elif NAMES.search(head) and not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                found[statement.lineno] = lines[statement.lineno - 1].strip()
            for field in ('body', 'orelse', 'finalbody'):
                inner = getattr(statement, field, None)
                if isinstance(inner, list):
                    visit([x for x in inner if isinstance(x, ast.stmt)])
            for handler in getattr(statement, 'handlers', []):
                visit(handler.body)

    visit(ast.parse(source).body)
    return found


@contextlib.contextmanager
def tracing(ran):
    """Add to `ran`, {kind: set of (file, line)}, what runs in all threads."""
    import on_cuda

    wanted = {str(path) for path in FILES}

    def trace_lines(frame, event, argument):
        if event == 'line':
            ran['contract' if on_cuda.active else 'fake'].add((frame.f_code.co_filename, frame.f_lineno))
        return trace_lines

    def trace(frame, event, argument):
        return trace_lines if frame.f_code.co_filename in wanted else None

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)


@contextlib.contextmanager
def tracing_into(folder):
    """tracing(), in a process that a test has started: what runs is written into a file of this folder."""
    ran = {'contract': set(), 'fake': set()}
    with tracing(ran):
        yield
    file, path = tempfile.mkstemp(dir=folder)
    with os.fdopen(file, 'w') as opened:
        json.dump({'contract': sorted(ran['contract'])}, opened)  # a script on a CPU runs no other lines of CUDA


def run_and_trace(arguments):
    """{kind: set of (file, line)} while pytest runs in this process, and of the processes that it starts."""
    import pytest

    ran = {'contract': set(), 'fake': set()}

    class Plugin:
        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_call(self):
            with tracing(ran):
                yield

    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        pytest.main(arguments, plugins=[Plugin()])
        for path in Path(folder).iterdir():
            for kind, lines in json.loads(path.read_text()).items():
                ran[kind] |= {tuple(line) for line in lines}
    return ran


if __name__ == '__main__':
    # Without tests that take a line out of a file on purpose, after which all following lines have other numbers.
    more = sys.argv[1:] or ['-m', 'not slow', '-k', 'not without_a_wait and not would_have and not reads_nothing']
    ran = run_and_trace(['-q', '-p', 'no:cacheprovider', *[str(REPO / test) for test in TESTS], *more])
    counts = {'contract': 0, 'fake': 0, '-': 0}
    for path in sorted(FILES):
        for number, text in sorted(cuda_lines(path).items()):
            kind = next((kind for kind in ran if (str(path), number) in ran[kind]), '-')
            counts[kind] += 1
            print(f'{kind:8} {path.relative_to(REPO)}:{number} {text}')
    print(f'{sum(counts.values())} lines that only CUDA runs: {counts}')
