"""
Which lines of the code run only on CUDA, and which of them do tests run even where there is no GPU?

    python tests/cuda_lines.py          # each line, whether a test runs it under a fake device, and how many there are

A line counts as CUDA's alone if it is in a branch that asks for CUDA (on_cuda, is_cuda, device.type == 'cuda', a stream
that a CPU lacks), or if it names what only CUDA has: streams, events, page-locked memory, NCCL. Traced are the tests
that put something in place of a GPU: streams.Checker, the device 'meta', fake tensors, patched functions of torch.cuda.
"""

import ast
import re
import sys
import threading
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
# Modules that run only before or after training, or that only measure, are left out.
FILES = [*REPO.glob('*.py'), *(path for room in ('runtime', 'exchange', 'pool', 'huggingface', 'evaluation', 'dataset')
                               for path in (REPO / room).glob('*.py'))]  # fmt: skip
# Conditions that are true on CUDA, and those that are true elsewhere.
ASKS = re.compile(
    r"\bon_cuda\b|\bis_cuda\b|runs_ahead\(|type == 'cuda'|cuda\.is_available\(\)$|"
    r'^(stream|arrived|event|self\.to_host|self\.on_host)$'
)
ASKS_CPU = re.compile(r"\bis_cpu\b|type == 'cpu'|stream is None|^self\.thread$|type != 'cuda'|device == 'cpu'")
NAMES = re.compile(
    r'torch\.cuda\.|record_event|wait_event|wait_stream|synchronize\(|\.query\(|elapsed_time|pin_memory|'
    r"non_blocking|ProcessGroupNCCL|device='cuda'|record_stream"
)
TESTS = """
    tests/test_streams.py tests/test_syncs.py tests/test_diloco.py tests/exchange/test_codec.py
    tests/runtime/test_processes.py tests/runtime/test_peak.py tests/runtime/test_meter.py tests/runtime/test_errors.py
    tests/runtime/test_offload.py
    tests/test_context_manual.py::test_the_kernels_of_a_gpu_take_what_they_are_given_and_return_its_shapes
    tests/test_context_manual.py::test_where_documents_begin_stays_on_the_host_and_the_device_is_asked_for_nothing
    tests/test_model.py::test_on_a_gpu_documents_in_half_precision_need_no_mask
    tests/test_optim.py::test_muon_on_a_gpu_iterates_in_bfloat16_and_moves_the_matrices_alike
    tests/test_compile.py::test_on_a_gpu_the_loss_is_one_graph_and_the_same_number
    tests/runtime/test_batches.py::test_replicas_must_divide_the_ranks
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


def run_and_trace(arguments):
    """{file: lines that ran} while pytest runs in this process."""
    import pytest

    wanted, ran = {str(path) for path in FILES}, {}

    def trace_lines(frame, event, argument):
        if event == 'line':
            ran.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
        return trace_lines

    def trace(frame, event, argument):
        return trace_lines if frame.f_code.co_filename in wanted else None

    class Plugin:
        def pytest_runtest_call(self):
            threading.settrace(trace)
            sys.settrace(trace)

        def pytest_runtest_teardown(self):
            sys.settrace(None)
            threading.settrace(None)

    pytest.main(arguments, plugins=[Plugin()])
    return ran


if __name__ == '__main__':
    # Without tests that take a line out of a file on purpose, after which all following lines have other numbers.
    more = sys.argv[1:] or ['-k', 'not without_a_wait and not would_have and not reads_nothing']
    ran = run_and_trace(['-q', '-p', 'no:cacheprovider', *[str(REPO / test) for test in TESTS], *more])
    total = run = 0
    for path in sorted(FILES):
        for number, text in sorted(cuda_lines(path).items()):
            is_run = number in ran.get(str(path), ())
            total, run = total + 1, run + is_run
            print(f'{"run" if is_run else "-  "} {path.relative_to(REPO)}:{number} {text}')
    print(f'{total} lines that only CUDA runs, {run} of them run here')
