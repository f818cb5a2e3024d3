"""
Run a script as a host that runs ahead of its GPU does, and print at which lines it reads a tensor: {place: times}, from
the first step on.

    python tests/host_reads.py train_ddp.py --device=cpu ...
"""

import json
import runpy
import sys
import traceback
from collections import Counter
from pathlib import Path

from torch.overrides import TorchFunctionMode

REPO = Path(__file__).resolve().parent.parent
READS = {'item', 'tolist', 'numpy', 'cpu', 'nonzero', 'argwhere', 'equal', 'allclose', 'unique', 'masked_select'}
READS |= {'__bool__', '__float__', '__int__', '__index__', '__array__', '__contains__'}

COPIES = {'tensor', 'as_tensor'}  # from pageable memory to a device: the host waits until what is queued there is done


class HostReads(TorchFunctionMode):
    """Notes each call in which the host waits for the device, by the line of ours that makes it."""

    def __init__(self):
        super().__init__()
        self.places = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, '__name__', '')
        if name in READS or (name in COPIES and kwargs and kwargs.get('device') is not None):
            frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(str(REPO))]
            ours = [f for f in frames if not {'tests', '.venv'} & {*Path(f.filename).relative_to(REPO).parts}]
            if ours:
                self.places[f'{Path(ours[-1].filename).name}: {ours[-1].line}'] += 1
        return function(*args, **kwargs or {})


if __name__ == '__main__':
    sys.path[:0] = [str(REPO), str(REPO / 'tests')]
    from runtime import health, processes
    from runtime.meter import Meter

    reads, begin_step = HostReads(), Meter.begin_step

    def begin(meter):
        if not meter._steps:
            reads.places.clear()
        begin_step(meter)

    health.runs_ahead, Meter.begin_step = lambda device: True, begin
    leave, processes.leave = processes.leave, lambda *_: None
    sys.argv = sys.argv[1:]
    with reads:
        runpy.run_path(str(REPO / sys.argv[0]), run_name='__main__')
    sys.stdout.write(json.dumps(reads.places) + '\n')  # in one piece: there are other ranks
    leave()
