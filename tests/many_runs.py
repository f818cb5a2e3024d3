"""
Runs train scripts one after another in processes that are started once, because importing torch costs more than 20
steps.

run_many() of launch.py starts this file on forked ranks, with the PATH of a JSON list of cases: [{"name": ...,
"script": "train_fsdp.py", "arguments": [...]}, ...]. Each case runs its script as it is, by runpy with fresh globals
and a process group of its own. At the end rank 0 writes PATH.results: for each case what rank 0 held when the script
ended. More keys of a case, all of them optional:

    "watch": true                        counts how often the run issues which collective
    "reads": true                        runs the script as a host that runs ahead of its GPU, and counts how often each
                                         rank reads a tensor from the first step on, and at which lines
    "on_cuda": true                      lets the model compute by the branches and the kernels of a GPU (on_cuda.py)
    "profiles": true                     profiles a step, as runs do, which costs as much as several of their steps
    "answers": FILE                      train_grpo.py, train_distill.py: all runs with this file learn from the answers
                                         that the first of them has written
    "may_fail": true                     on one rank: an error ends this run alone, and is its result ("error")
    "save_again": {CHECKPOINT: FOLDER}   after the run, loads each of these checkpoints and saves it into that folder

    "float64": true                      computes in float64 what would be fp32, from the same initial values
    "gradients": FILE                    saves the whole gradients of each step, before they are clipped, as [{name:
                                         tensor}]; of the first replica, and of a pipeline's first stage
    "start": FILE                        model.py's GPT begins with the weights in FILE, {name: whole tensor}

Where a case has a "start", its results say how close the closest choice of a router was to a tie ("gap").
"""

import collections
import contextlib
import functools
import json
import linecache
import math
import os
import runpy
import sys
import traceback
from unittest import mock

import cuda_lines
import torch
import torch.distributed as dist
from launch import free_ports
from on_cuda import model_on_cuda
from streams import is_ours
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

FLOAT32 = torch.float32
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)

import optim
from huggingface import finetune
from model import GPT
from proving.scripts import SMALL_GRADIENT, noting_gaps, same_answers, script_in_float64
from runtime import begin, checkpoint, checkpoint_saver, health, meter
from system import processes

leave, processes.leave = processes.leave, lambda code=0: None  # the next case runs in the same process


class CountCollectives(TorchDispatchMode):
    """Counts the calls of every operator of the c10d namespace, from whichever thread they are issued."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == 'c10d':
            self.calls[function._schema.name.split('::')[1]] += 1
        return function(*args, **(kwargs or {}))


READS = {'item', 'tolist', 'numpy', 'cpu', 'nonzero', 'argwhere', 'equal', 'allclose', 'unique', 'masked_select'}
READS |= {'__bool__', '__float__', '__int__', '__index__', '__array__', '__contains__'}
COPIES = {'tensor', 'as_tensor'}  # copied from pageable memory to a device, for which the host waits


class HostReads(TorchFunctionMode):
    """Notes each call in which the host waits for the device, under the line of this project that makes it."""

    def __init__(self):
        super().__init__()
        self.places = collections.Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, '__name__', '')
        if name in READS or (name in COPIES and kwargs and kwargs.get('device') is not None):
            frame = sys._getframe(1)
            while frame and not is_ours(frame.f_code.co_filename):
                frame = frame.f_back
            if frame:
                path = frame.f_code.co_filename
                line = linecache.getline(path, frame.f_lineno).strip()
                self.places[f'{os.path.basename(path)}: {line}'] += 1
        return function(*args, **kwargs or {})


@contextlib.contextmanager
def running_ahead(reads):
    """Lets the scripts believe that the host runs ahead of its device, and counts its reads from the first step on."""
    begin_step = meter.Meter.begin_step

    def begin(times):
        if not times._steps:
            reads.places.clear()
        begin_step(times)

    with (
        mock.patch.object(health, 'runs_ahead', lambda device: True),
        mock.patch.object(meter.Meter, 'begin_step', begin),
        reads,
    ):
        yield


def whole(slices, tensors, ranks):
    """{name: whole tensor} from `tensors`, {name: this rank's part}, of the first `ranks` ranks. slices: those of this
    rank's Share. Collective."""
    full = {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach() for name, t in tensors.items()}
    found = {name: tensor.clone() for name, tensor in full.items() if name not in slices}
    if slices:
        everybodys = [None] * dist.get_world_size()
        dist.all_gather_object(everybodys, (slices, {name: full[name] for name in slices}))
        for of_rank, parts in everybodys[:ranks]:
            for name, (shape, _, ((first, rows),)) in of_rank.items():
                tensor = found.setdefault(name, torch.full(shape, torch.nan, dtype=parts[name].dtype))
                tensor.narrow(0, first, rows).copy_(parts[name])
    return found


@contextlib.contextmanager
def noting(gradients):
    """Append the gradients of each step to `gradients`.

    AdamW's first update is lr * g / (|g| + eps), which is lr * sign(g): where g is nearer to 0 than its rounding, the
    weight goes either way, and the next step is another computation. With an eps far above that rounding it is not.
    """
    models, make_model, clip, from_config = [], begin.make_model, optim.clip_grad_norm_, optim.from_config

    def smooth(*args, **options):
        optimizer = from_config(*args, **options)
        for group in optimizer.param_groups:
            group['eps'] = SMALL_GRADIENT
        return optimizer

    def note_model(run):
        models.append((make_model(run), run.share, run.world_size // getattr(run.config, 'num_replicas', 1)))
        return models[-1][0]

    def note_gradients(*args, **options):
        model, share, ranks = models[-1]
        of_rank = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        gradients.append(whole(share.slices, of_rank, ranks))
        return clip(*args, **options)

    with (
        mock.patch.object(begin, 'make_model', note_model),
        mock.patch.object(optim, 'clip_grad_norm_', note_gradients),
        mock.patch.object(optim, 'from_config', smooth),
    ):
        yield


@contextlib.contextmanager
def beginning_with(path, gaps):
    """A context in which a GPT begins with the weights in a file. `gaps` gets gap_of_choice() of each batch of a
    router."""
    weights = torch.load(path)

    def initial_value(model, name, parameter, seed, device):
        assert parameter.shape == weights[name].shape
        return weights[name].to(torch.float32)  # float64 in in_float64()

    with mock.patch.object(GPT, 'initial_value', initial_value), noting_gaps(gaps):
        yield


def local_bytes(tensors):
    """Bytes that this rank holds of these tensors; a DTensor counts with this rank's shard."""
    local = [tensor.to_local() if hasattr(tensor, 'to_local') else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


RANK = int(os.environ['RANK'])
STORE = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=RANK == 0)


def port_of_case(number):
    """A free port for the store of this case. In a common store the next case would find the addresses of this one."""
    if RANK == 0:
        STORE.set(f'port of case {number}', str(*free_ports(1)))
    return STORE.get(f'port of case {number}').decode()


def run(case, number):
    """One run of a script in this process; returns what this rank held when it ended."""
    sys.argv = [case['script'], *case['arguments']]
    os.environ['MASTER_PORT'] = port_of_case(number)
    counter, reads, gradients, gaps = CountCollectives(), HostReads(), [], []
    with contextlib.ExitStack() as stack:
        if not case.get('profiles'):
            stack.enter_context(mock.patch.object(meter, 'STEPS_BEFORE_PROFILING', math.inf))
        if case.get('watch'):
            stack.enter_context(counter)
        if case.get('reads'):
            stack.enter_context(running_ahead(reads))
        if case.get('on_cuda'):
            stack.enter_context(model_on_cuda(GPT, finetune.ForTraining))
            if folder := os.environ.get(cuda_lines.FOLDER):
                stack.enter_context(cuda_lines.tracing_into(folder))
        if case.get('float64'):
            stack.enter_context(script_in_float64())
        if case.get('start'):
            stack.enter_context(beginning_with(case['start'], gaps))
        if case.get('answers'):
            stack.enter_context(same_answers(case['answers']))
        if case.get('gradients'):
            stack.enter_context(noting(gradients))
        names = runpy.run_path(os.path.join(HERE, case['script']), run_name='__main__')
    for path, folder in case.get('save_again', {}).items():
        state, more, optimizer_keys = checkpoint.read_state(path), {}, ['optim', 'optim']
        outer = names['make_outer']() if 'make_outer' in names else None  # DiLoCo's; resumed as in train_diloco.py
        if outer:
            optimizer_keys = [outer.optimizer_key(state), outer.optimizer_key()]
        share = names['run'].share
        checkpoint.load(path, names['raw_model'], names['opt'], optimizer_keys[0], share)
        if outer:
            outer.resume(state, functools.partial(checkpoint.read_tensors, path, missing_ok=True))
            more = outer.tensors(mid_round=False)
        checkpoint_saver.prepare(folder)
        saver = checkpoint_saver.Saver(folder, keep=1)
        saver.save(state['step'], names['raw_model'], names['opt'], state, more, optimizer_keys[1], share=share)
    if gradients and RANK == 0:
        torch.save(gradients, case['gradients'])
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (reads.places, min(gaps, default=None)))
    parameters = list(names['raw_model'].parameters())
    moments = [value for state in names['opt'].state.values() for key, value in state.items() if key != 'step']
    return {
        'parameter_bytes': local_bytes(parameters),
        'optimizer_bytes': local_bytes(moments),
        'collectives': counter.calls,
        'reads': [places for places, _ in of_ranks],
        'scale': names['scaler'].state_dict().get('scale'),
        'compiled_graphs': counters['stats']['unique_graphs'],  # of all cases so far
        'process_groups': dist.get_pg_count(),
        'gap': min(gap for _, gap in of_ranks) if gaps else None,
    }


if __name__ == '__main__':
    path = sys.argv[1]
    with open(path) as file:
        cases = json.load(file)
    results = {}
    for number, case in enumerate(cases):
        if RANK == 0:
            print(f'--- {case["name"]}', flush=True)
        try:
            results[case['name']] = run(case, number)
        except (Exception, SystemExit):
            if not case.get('may_fail'):
                raise
            results[case['name']] = {'error': traceback.format_exc()}
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    if RANK == 0:
        with open(path + '.results', 'w') as file:
            json.dump(results, file)
    leave()
