"""
The first 15 minutes on a GPU: does everything work there, how fast is it, and where does the time go?

    python benchmarks/gpu.py                                 # all checks; writes OUT/gpu.md
    python benchmarks/gpu.py --only='Llama 1B|float8'        # checks with such names, and what these need
    python benchmarks/gpu.py --only='forms of'               # parts of a step beside another form, in turns
    python benchmarks/gpu.py --nanogpt=path/to/nanoGPT       # its train.py and ours
    python benchmarks/gpu.py --device=cpu                    # tiny models on a CPU, to try this program

First come the checks of correctness, --jobs of them side by side. Then each check that is timed runs alone, the most
important first, until --budget minutes are over; a line names each that is left out.

Each check is a process of its own and leaves OUT/NAME.json when it has ended, so a second call continues where the
first stopped; to repeat a check, delete that file. Needs torch and numpy, for some checks transformers, pytest or peft,
but no network, datasets or wandb. docs/gpu.md says how to read the result.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from runtime import PROFILED_STEP

ROUNDING, BF16 = 1e-5, 1e-2  # losses that differ by more are wrong; in fp32 with other first weights, it was 4e-3
TINY = dict(arch='llama', n_layer=3, n_head=4, n_kv_head=2, n_embd=128, block_size=128, batch_size=4, vocab_size=500)
SIZES = {
    '124M': dict(arch='llama', n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=32),
    '124M gpt2': dict(arch='gpt2', bias=False, n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=32),
    'Enoki 8 heads': dict(arch='enoki', heads=8, block_size=2048, batch_size=16, z_loss=1e-4, lr_schedule='cos_inf'),
    'Llama 1B': dict(arch='llama', n_layer=16, n_head=32, n_kv_head=8, n_embd=2048, mlp_hidden_dim=8192,
                     block_size=2048, batch_size=8, tie_embeddings=True),
    # 2 of 16 experts are as wide as the MLP of 124M
    '124M experts': dict(arch='qwen3', n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=32, n_experts=16,
                         experts_per_token=2, expert_hidden_dim=1024),
}  # fmt: skip
LOSSES = {'124M': (16384, 768, 50304), 'Llama 1B': (8192, 2048, 50304), 'Enoki 8 heads': (16384, 512, 50304)}
# One layer: tokens, n_embd, n_experts, experts_per_token, expert_hidden_dim
EXPERTS = {'OLMoE': (16384, 2048, 64, 8, 1024), 'Qwen3 30B': (16384, 2048, 128, 8, 768), 'tiny': (64, 32, 4, 2, 16)}
TINY_EXPERTS = dict(arch='qwen3', n_experts=4, experts_per_token=2, expert_hidden_dim=64)
STRATEGIES = {
    'ddp': ('train_ddp.py', {}),
    'fsdp': ('train_fsdp.py', {}),
    'manual': ('train_fsdp.py', {'fsdp_impl': 'manual'}),
}
LOW_PRECISION = {
    'bf16': {},
    'float8': {'matmul_dtype': 'float8'},
    'moments in 8 bits': {'optimizer_dtype': 'int8'},
    'moments in bf16': {'optimizer_dtype': 'bfloat16'},
}
TIMED = dict(max_iters=30, log_interval=10, warmup_iters=5, trace_step=28)
NUMBERS = ('step', 'loss', 'tokens_per_sec', 'mfu', 'time/total', 'time/update', 'mem/peak_gb', 'mem/reserved_gb')
NUMBERS += ('router/violation', 'reward', 'time/rollout')

# name; command: of python, or None if it cannot be run here; seconds: what it took on an H100, or a guess. read(text,
# output): what is found in the output, as a text and as [(second, line)]; or why it cannot be run. environment: more
# variables. needs: the name of a check whose files it reads. folder: deleted before it begins.
Check = namedtuple('Check', 'name command seconds read environment needs folder', defaults=(None, None, None))


class Bench:
    """Makes checks, runs them, keeps their results, and knows the time that is left."""

    def __init__(self, device, out, budget=15, jobs=1, nanogpt=None):
        self.device, self.jobs, self.nanogpt = device, jobs, nanogpt
        self.tiny = self.device == 'cpu'
        self.out = Path(out).resolve()
        self.runs = self.out / 'runs'
        self.runs.mkdir(parents=True, exist_ok=True)
        self.limit = 1800 if self.tiny else 300  # seconds: a check that takes longer hangs; a CPU may have other work
        self.ends = time.monotonic() + 60 * budget
        self.futures = {}  # of the checks that run side by side, by name
        self.running, self.ending = set(), False
        self.nvidia_smi = None if self.tiny else shutil.which('nvidia-smi')

    # --- what a check is ---

    def train(self, name, script, keys, seconds=25, environment=None, needs=None, continues=None, inside=None,
              beside=None):  # fmt: skip
        """
        A check that trains. It finds the last row of metrics before the traced steps, and where the time of the traced
        step went.

        script: a config file may follow it. continues: the name of the check in whose out_dir this one goes on. inside:
        the function of benchmarks/gpu_checks.py that runs the script in its own process; what it finds is added.
        beside: the name of a check whose losses should be the same, and by how much they may differ.
        """
        run = self.runs / stem(continues or name)
        fixed = dict(dataset='synthetic', vocab_size=50304, eval_sequences=0, keep_checkpoints=0, device=self.device)
        keys = {key: value for key, value in (fixed | keys | {'out_dir': run}).items() if value is not None}

        def read(text, output):
            rows = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
            profiled = keys.get('trace_step', math.inf) - 1  # the first of the two steps in the trace
            last = [row for row in rows if 'time/total' in row and row['step'] < profiled][-1]
            found = {key.removeprefix('time/').removeprefix('mem/'): last[key] for key in NUMBERS if key in last}
            found |= {'losses': [row['loss'] for row in rows if 'loss' in row]}
            found |= {'beside': beside} if beside else {}
            found |= wall_clock(output, rows, profiled)
            if 'TORCH_LOGS' in (environment or {}):
                found['recompilations'] = text.lower().count('recompiling')
            found |= json.loads(text.splitlines()[-1]) if inside else {}
            trace = run / 'trace_rank0.json'
            return found | (summary_of_trace(trace, self.out / f'{run.name}.svg') if trace.exists() else {})

        command = [*script.split(), *options(keys)]
        if inside:
            command = [*self.inner_command(inside), *command]
        return Check(name, command, seconds, read, environment, needs or continues, None if continues else run)

    def predict(self, name, script, keys):
        """A check that asks --dry_run for the memory of a run."""
        fixed = dict(dry_run=True, dataset='synthetic', vocab_size=50304, device=self.device)
        return Check(f'predicted {name}', [script, *options(fixed | keys)], 15, read_prediction)

    def inner(self, name, of='', seconds=30, needs=None):
        """A check that is a function of benchmarks/gpu_checks.py or benchmarks/forms.py."""

        def read(text, output):
            return json.loads(text.splitlines()[-1])

        return Check(f'{name} {of}'.strip(), self.inner_command(name, of), seconds, read, needs=needs)

    def cannot(self, name, reason):
        """A check that is left out here, with a line that says why."""
        return Check(name, None, 0, reason)

    def inner_command(self, name, of=''):
        return ['benchmarks/gpu_checks.py', name, of, self.device, self.out]

    def size(self, name):
        if self.tiny:
            return TINY | {'batch_size': 2} | (TINY_EXPERTS if 'n_experts' in SIZES[name] else {})
        return SIZES[name]

    # --- running them ---

    def result(self, name):
        """What a check has found, now or in an earlier call; None if it has not run."""
        path = self.out / f'{stem(name)}.json'
        found = json.loads(path.read_text()) if path.exists() else None
        return None if found and 'left out' in found else found

    def side_by_side(self, checks):
        """Run checks, `jobs` at a time: first those that others need, then those that take longest."""
        needed = {check.needs for check in checks}
        pool = ThreadPoolExecutor(self.jobs)
        try:
            for check in sorted(checks, key=lambda check: (check.name not in needed, -check.seconds)):
                self.futures[check.name] = pool.submit(self.run, check)
            for future in self.futures.values():
                future.result()  # raises what it raised
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def run(self, check, alone=False):
        """Run a check, unless an earlier call has left its result. Returns {'seconds', and 'error' or what its read()
        finds}. alone: its times count, and clocks and power are measured."""
        if result := self.result(check.name):
            return result
        if not check.command:
            return self.leave_out(check.name, check.read)
        if check.needs in self.futures:
            self.futures[check.needs].result()
        if check.needs and 'error' in (self.result(check.needs) or {'error': 'it has not run'}):
            return self.leave_out(check.name, f'it needs {check.needs}')
        left = self.ends - time.monotonic()
        if left < check.seconds:
            return self.leave_out(check.name, f'{max(0, left):.0f} s are left, it takes about {check.seconds}')
        if check.folder:
            shutil.rmtree(check.folder, ignore_errors=True)
        environment = os.environ | {'PYTHONUNBUFFERED': '1'} | (check.environment or {})
        if not alone or self.tiny:  # on a CPU no time counts
            threads = str(max(1, cores() // self.jobs))
            environment |= {'OMP_NUM_THREADS': threads, 'TORCHINDUCTOR_COMPILE_THREADS': threads}
        log, output, began = self.out / f'{stem(check.name)}.log', [], time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *map(str, check.command)], cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, env=environment, text=True, errors='replace',
        )  # fmt: skip
        self.running.add(process)
        reader = threading.Thread(target=copy_lines, args=(process.stdout, output, log), daemon=True)
        reader.start()
        with clocks(self.nvidia_smi if alone else None) as measured:
            try:
                code = process.wait(min(self.limit, left))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = None
        self.running.discard(process)
        reader.join(timeout=10)  # a compiler process that is still there may keep the pipe open
        if self.ending:
            return {'left out': 'this program was ended'}
        if code is None and left < self.limit:
            return self.leave_out(check.name, f'the time was over after {left:.0f} s')
        result = {'seconds': round(time.monotonic() - began, 1)}
        text = log.read_text(errors='replace')
        if code == 0:
            try:
                result |= check.read(text, output) | measured | ({'timed': True} if alone else {})
            except Exception as error:  # a check that cannot be read must not end the others
                result['error'] = f'{type(error).__name__}: {error}'
        else:
            errors = [f'exit code {code}', *(line for line in text.splitlines() if 'rror' in line)]
            result['error'] = f'killed after {self.limit} s' if code is None else errors[-1][-300:]
        self.keep(check.name, result)
        shown = ', '.join(f'{key} {value:.6g}' if isinstance(value, float) else f'{key} {value}'
                          for key, value in result.items() if key != 'losses')  # fmt: skip
        say(f'{"FAILED" if "error" in result else "ok"} {check.name}: {shown[:400]}')
        return result

    def keep(self, name, result):
        (self.out / f'{stem(name)}.json').write_text(json.dumps(result))

    def leave_out(self, name, reason):
        """Say that a check is not done, now and on the page. A later call does it if it can."""
        self.keep(name, {'left out': reason})
        say(f'left out: {name}, {reason}')
        return {'left out': reason}

    def end(self):
        self.ending = True
        for process in list(self.running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def installed(package):
    return importlib.util.find_spec(package) is not None


def stem(name):
    return name.replace(' ', '-')


def say(text):
    print(f'{time.strftime("%H:%M:%S")} {text}', flush=True)


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()


def options(keys):
    return [f'--{key}={value}' for key, value in keys.items()]


def copy_lines(stream, output, path=os.devnull):
    """Copy lines into the list `output`, with the second at which each came, and into a file."""
    with open(path, 'w') as file:
        for line in stream:
            output.append((time.monotonic(), line))
            file.write(line)
            file.flush()


@contextlib.contextmanager
def clocks(nvidia_smi):
    """Yields a dict that holds clocks and power of the GPU once the context ends, as nvidia-smi reports them five times
    a second; without its path the dict stays empty."""
    found = {}
    if not nvidia_smi:
        yield found
        return
    query = '--query-gpu=clocks.sm,power.draw,clocks_event_reasons.active --format=csv,noheader,nounits -lms 200'
    visible = os.environ.get('CUDA_VISIBLE_DEVICES', '0').split(',')[0]
    with subprocess.Popen([nvidia_smi, f'--id={visible}', *query.split()], stdout=subprocess.PIPE, text=True) as smi:
        lines = []
        reader = threading.Thread(target=copy_lines, args=(smi.stdout, lines))
        reader.start()
        try:
            yield found
        finally:
            smi.terminate()
            reader.join()
    found |= summary_of_clocks([line for _, line in lines])


def summary_of_clocks(lines):
    """Clocks in MHz, power in watts, and what held the clocks back (NVIDIA's bit mask) while the GPU was busy: while it
    drew more than half of the most that it drew. {} if no line has all three numbers."""
    rows = [re.fullmatch(r'\s*(\d+), ([\d.]+), 0x([0-9a-fA-F]+)\s*', line) for line in lines]
    rows = [(int(row[1]), float(row[2]), int(row[3], 16)) for row in rows if row]
    busy = [row for row in rows if row[1] > max(power for _, power, _ in rows) / 2]
    if not busy:
        return {}
    mhz, watts, reasons = zip(*busy, strict=True)
    held_back = 0
    for reason in reasons:
        held_back |= reason
    found = {'mhz': sum(mhz) / len(mhz), 'lowest_mhz': min(mhz), 'watts': sum(watts) / len(watts)}
    return found | {'highest_watts': max(watts), 'held_back_by': hex(held_back)}


def wall_clock(output, rows, profiled=math.inf):
    """
    {'wall_tokens_per_sec'}: tokens/s by wall clock, from when the lines of the last two logged steps before the
    profiled ones came; {} if there are too few lines.

    tokens_per_sec counts the time from the beginning to the end of each step. What the host does between two steps,
    while the GPU has nothing to do, slows down only this number.
    """
    tokens = {row['step']: row['tokens'] for row in rows if 'tokens' in row}
    found = [(second, re.match(r'\S+ step +(\d+)/\d+ \| loss', line)) for second, line in output]
    at = {int(match[1]): second for second, match in found if match}
    at = {step: second for step, second in at.items() if step in tokens and step < profiled}
    if len(at) < 3:  # the first step compiles
        return {}
    before, after = sorted(at)[-2:]
    return {'wall_tokens_per_sec': (tokens[after] - tokens[before]) / (at[after] - at[before])}


# --- checks of correctness --------------------------------------------------------------------------------------------


def correctness(bench):
    """[Check, ...]"""
    checks = [bench.inner('versions', seconds=15), *exact(bench), *compiled(bench), *resumed(bench)]
    checks += [*pretrained(bench), *experts(bench), *tests(bench)]
    large = bench.size('Llama 1B') | TIMED
    checks += [bench.predict(name, script, large | keys) for name, (script, keys) in STRATEGIES.items()]
    checks += [bench.predict(f'offload {where}', 'train_fsdp.py', offloaded(bench, where, 'manual')) for where in HOST]
    small = bench.size('124M') | write_text(bench.out / 'data') | {'batch_size': 8}  # four times 6 GB side by side
    small |= dict(log_interval=1, warmup_iters=10, max_iters=20 if bench.tiny else 150, dtype='bfloat16')
    return checks + [bench.train(f'loss {name}', 'train_fsdp.py', small | keys) for name, keys in LOW_PRECISION.items()]


def learning(bench):
    """Keys of a tiny run in fp32 that learns from text: on random tokens the loss would hardly show a wrong update."""
    keys = TINY | dict(dtype='float32', compile=False, max_iters=20, log_interval=1)
    return keys | write_text(bench.out / 'data') | dict(learning_rate=1e-3, warmup_iters=2)


def exact(bench):
    """fp32 without compiling: do all strategies compute the same as a CPU, and does the sanitizer find a race?"""
    keys = learning(bench) | {'global_batch_size': 8}
    # A GPU draws other random numbers than a CPU, so all begin with weights that a CPU has drawn.
    checks = [bench.train('start', 'train_ddp.py', keys | dict(device='cpu', max_iters=1, keep_checkpoints=1))]
    keys |= {'init_from': bench.runs / 'start'}

    def train(name, script, more, beside=None):
        beside = (f'exact-{beside}', ROUNDING) if beside else None
        checks.append(bench.train(f'exact {name}', script, keys | more, needs='start', beside=beside))

    train('cpu', 'train_ddp.py', {'device': 'cpu'})
    for name, (script, more) in STRATEGIES.items():
        train(name, script, more, 'cpu')
    manual = {'fsdp_impl': 'manual'}
    for stage in (1, 2):
        train(f'manual stage {stage}', 'train_fsdp.py', manual | {'zero_stage': stage}, 'cpu')
    others = {name: ('train_fsdp.py', manual | {'optimizer': name}) for name in ('adana', 'muon')}
    for name, (script, more) in (others | {'diloco': ('train_diloco.py', {'inner_steps': 5})}).items():
        train(f'cpu {name}', script, more | {'device': 'cpu'})
        train(name, script, more, f'cpu-{name}')
    if bench.tiny:
        return [*checks, bench.cannot('sanitizer', 'it is for CUDA')]
    few, watched = keys | manual | {'max_iters': 4}, {'TORCH_CUDA_SANITIZER': '1'}
    return [*checks, bench.train('sanitizer', 'train_fsdp.py', few, environment=watched, needs='start')]


def compiled(bench):
    """bf16, compiled, with every checkpointing mode: is anything compiled again, and where does the host wait?"""
    keys = TINY | dict(dtype='bfloat16', compile=not bench.tiny, max_iters=12, log_interval=4)
    checks = [bench.inner('syncs', seconds=20)]
    for mode in ('none', 'selective', 'full'):
        for name, (script, more) in STRATEGIES.items():
            more = more | {'activation_checkpointing': mode}
            checks.append(bench.train(f'compiled {name} {mode}', script, keys | more, 40, {'TORCH_LOGS': 'recompiles'}))
    return checks


def resumed(bench):
    """A run that stopped after a checkpoint of a thread goes on under another strategy, as if it had not stopped."""
    keys = learning(bench) | dict(keep_checkpoints=2, checkpoint_interval=5, async_checkpoint=True)
    manual = dict(fsdp_impl='manual')
    return [
        bench.train('saved', 'train_fsdp.py', keys | manual),
        bench.train('stopped', 'train_fsdp.py', keys | manual | dict(max_iters=10, lr_decay_iters=20)),
        bench.train('resumed', 'train_ddp.py', keys, continues='stopped', beside=('saved', ROUNDING)),
    ]


def pretrained(bench):
    """Conversations packed for a tiny Llama of transformers: are its losses those of a CPU under every strategy, and
    near them in bf16? Then LoRA, also beside 4 bits. And the folder of 8B for the timed checks."""
    keys = dict(init_from=bench.runs / 'tiny-llama', data_dir=bench.out / 'data', dataset='chats', vocab_size=None)
    keys |= dict(block_size=512, batch_size=2, global_batch_size=4, log_interval=1, learning_rate=1e-3, warmup_iters=2)
    keys |= dict(max_iters=12, num_epochs='None', activation_checkpointing='none')
    fp32, bf16 = dict(dtype='float32', compile=False), dict(dtype='bfloat16', compile=not bench.tiny)
    on_cpu, manual, full = {'device': 'cpu'}, {'fsdp_impl': 'manual'}, {'activation_checkpointing': 'full'}
    ddp, fsdp, diloco = 'train_ddp.py', 'train_fsdp.py', 'train_diloco.py'
    runs = {
        'cpu': (ddp, fp32 | on_cpu, None),
        'ddp': (ddp, fp32, 'cpu'),
        'fsdp': (fsdp, fp32, 'cpu'),
        'manual': (fsdp, fp32 | manual, 'cpu'),
        'native': (ddp, fp32 | {'native': True}, 'cpu'),
        'manual offload': (fsdp, fp32 | manual | {'cpu_offload': 'params'}, 'cpu'),
        'fsdp offload full': (fsdp, fp32 | full | {'cpu_offload': 'params'}, 'cpu'),
        'cpu diloco': (diloco, fp32 | on_cpu | {'inner_steps': 4}, None),
        'diloco': (diloco, fp32 | {'inner_steps': 4}, 'cpu-diloco'),
        'bf16 ddp': (ddp, bf16, 'cpu'),
        'bf16 manual full': (fsdp, bf16 | manual | full, 'cpu'),
        'bf16 native': (ddp, bf16 | {'native': True}, 'cpu'),
        'bf16 offload activations': (ddp, bf16 | {'activation_checkpointing': 'offload'}, 'cpu'),
        'lora bf16': (ddp, bf16 | dict(lora_rank=8, frozen_dtype='bfloat16'), None),
        'lora nf4': (ddp, bf16 | dict(lora_rank=8, frozen_dtype='nf4'), None),
    }
    if installed('transformers'):
        checks = [bench.inner('tiny llama', seconds=20), bench.inner('llama 8B')]
    else:
        checks = [bench.cannot(name, 'transformers is not installed') for name in ('tiny llama', 'llama 8B')]
    logs = {'TORCH_LOGS': 'recompiles'}
    for name, (script, more, beside) in runs.items():
        beside = (f'hf-{beside}', ROUNDING if more['dtype'] == 'float32' else BF16) if beside else None
        script = f'{script} config/sft_chat.py'
        checks.append(bench.train(f'hf {name}', script, keys | more, 30, logs, 'tiny llama', beside=beside))
    pairs = fp32 | dict(dataset='pairs', num_epochs=None)
    of_answers = pairs | dict(dataset=None, global_batch_size=None, prompts=bench.runs / 'tiny-llama/prompts.jsonl')
    of_answers |= dict(prompts_per_step=8, num_generations=4, eval_interval=None)
    runs = {
        'cpu dpo': ('train_dpo.py', pairs | on_cpu, None),
        'dpo': ('train_dpo.py', pairs, 'cpu-dpo'),
        'grpo': ('train_grpo.py', of_answers, None),  # a GPU's rounding may let another token be drawn than a CPU's
        'bf16 grpo': ('train_grpo.py', of_answers | bf16 | {'strategy': 'fsdp'}, None),
    }
    for name, (script, more, beside) in runs.items():
        beside = (f'hf-{beside}', ROUNDING) if beside else None
        checks.append(bench.train(f'hf {name}', script, keys | more, 30, None, 'tiny llama', beside=beside))
    return checks


def experts(bench):
    """
    Mixtures of experts. One layer: all experts in one kernel beside one after the other. A small model: compiled beside
    eager, and config/moe_quickstart.py for some steps in both ways. On two GPUs: are the gradients
    of ranks that share the experts right, by prove.py?
    """
    checks = [bench.inner('compiled experts', of=mode, seconds=80) for mode in ('none', 'full', 'selective')]
    file, short = 'config/moe_quickstart.py', dict(dtype='bfloat16', max_iters=20, log_interval=1)
    short |= write_text(bench.out / 'data') | {'warmup_iters': 2}
    short |= dict(block_size=32, max_iters=4) if bench.tiny else {}
    for name, beside in (('eager', None), ('compiled', ('experts-eager', BF16))):
        keys, logs = short | dict(compile=name == 'compiled'), {'TORCH_LOGS': 'recompiles'}
        checks.append(bench.train(f'experts {name}', f'train_fsdp.py {file}', keys, 60, logs, beside=beside))
    if not bench.tiny and (gpus := count_gpus(bench.nvidia_smi)) < 2:
        reason = f'expert_parallel=2 needs 2 GPUs, and here is {gpus}'
        return [*checks, bench.cannot('experts on two ranks', reason)]
    keys = dict(layouts='fsdp,manual zero 3,experts', device=bench.device, output=bench.runs / 'prove.json')
    command = ['prove.py', file, *options(keys)]
    return [*checks, Check('experts on two ranks', command, 100, lambda text, _: {'said': text.splitlines()[-1]})]


def count_gpus(nvidia_smi):
    if 'CUDA_VISIBLE_DEVICES' in os.environ or not nvidia_smi:
        return len(os.environ.get('CUDA_VISIBLE_DEVICES', '0').split(','))
    return len(subprocess.run([nvidia_smi, '--list-gpus'], capture_output=True, text=True).stdout.splitlines())


def tests(bench):
    """Each test of tests/test_gpu.py (`pytest -m gpu`) in a process of its own."""
    if not installed('pytest'):
        return [bench.cannot('tests', 'pytest is not installed')]
    names = re.findall(r'^def (test_\w+)', (REPO / 'tests/test_gpu.py').read_text(), re.M)
    pytest = '-m pytest -q -m gpu -p no:cacheprovider tests/test_gpu.py -k'.split()
    where = {'GPU_TESTS_ON': bench.device}
    return [Check(name, [*pytest, name], 80, lambda text, _: {'said': text.splitlines()[-1]}, where) for name in names]


def write_text(data_dir):
    """Write Python's own library as a dataset of bytes, a text from which a model can learn; returns the keys that
    train on it."""
    import numpy as np

    folder = data_dir / 'library'
    folder.mkdir(parents=True, exist_ok=True)
    text = b''.join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob('*.py')))
    tokens = np.frombuffer(text, dtype=np.uint8).astype(np.uint16)
    tokens[: -len(tokens) // 20].tofile(folder / 'train.bin')
    tokens[-len(tokens) // 20 :].tofile(folder / 'val.bin')
    (folder / 'meta.json').write_text(json.dumps({'vocab_size': 256}))
    return dict(data_dir=data_dir, dataset='library', vocab_size=256)


# --- timed checks -----------------------------------------------------------------------------------------------------

HOST = ('optimizer', 'params')


def timed(bench):
    """[Check, ...], the most important first."""

    def train(size, strategy, more={}, name=None, seconds=25):  # noqa: B006
        script, keys = STRATEGIES[strategy]
        return bench.train(name or f'{size} {strategy}', script, bench.size(size) | TIMED | keys | more, seconds)

    def lora(name, more, seconds):
        keys = dict(init_from=bench.runs / 'llama-8B', lora_rank=16, vocab_size=None, max_iters=10, log_interval=5)
        keys |= dict(block_size=64 if bench.tiny else 4096, batch_size=2, frozen_dtype='bfloat16') | more
        return bench.train(f'Llama 8B LoRA {name}', 'train_ddp.py', keys, seconds, needs='llama 8B')

    low = {name: dict(dtype='bfloat16') | keys for name, keys in LOW_PRECISION.items()}
    checks = [train('124M gpt2', 'ddp', seconds=20)]
    if bench.nanogpt:
        checks.append(bench.inner('nanogpt', of=Path(bench.nanogpt).resolve(), seconds=55)._replace(name='nanogpt'))
    checks += [train('Llama 1B', 'ddp', seconds=30), train('124M', 'ddp')]
    checks.append(lora('bf16', {}, 75))
    checks.append(bench.inner('peft', seconds=50, needs='llama 8B') if installed('peft') else
                  bench.cannot('peft', 'peft is not installed'))  # fmt: skip
    checks.append(lora('nf4', dict(frozen_dtype='nf4', batch_size=1, activation_checkpointing='full'), 80))
    checks += [train('Llama 1B', 'ddp', low['float8'], 'Llama 1B float8', 37)]
    checks += [train('Llama 1B', 'manual', seconds=32), train('Llama 1B', 'fsdp', seconds=30)]
    checks += [train('Enoki 8 heads', 'ddp'), train('124M', 'manual')]
    checks += [bench.inner('forms of the loss', of=name, seconds=25) for name in LOSSES]
    checks += [bench.inner('forms of attention', of=name, seconds=25) for name in ('124M', 'Llama 1B')]
    checks += [bench.inner('forms of a layer', seconds=25), bench.inner('forms of the update', seconds=20)]
    checks += [bench.inner('forms of a block', of=name, seconds=35) for name in ('124M gpt2', 'Llama 1B')]
    checks += [bench.inner('forms of the ends', seconds=25), bench.inner('forms of one rank', seconds=25)]
    checks += [bench.inner('forms of float8', seconds=30), bench.inner('generate')]
    checks += [train('Llama 1B', 'ddp', low[f'moments in {bits}'], f'Llama 1B moments in {bits}', 32)
               for bits in ('8 bits', 'bf16')]  # fmt: skip
    packed = write_documents(bench.out / 'data', bench.size('124M').get('vocab_size', 50304))
    checks += [train('124M', 'ddp', packed, '124M documents ddp'), train('124M', 'fsdp')]
    checks += [bench.inner('experts', of=name) for name in (('tiny',) if bench.tiny else ('OLMoE', 'Qwen3 30B'))]
    checks += [train('124M experts', strategy, seconds=35) for strategy in STRATEGIES]
    checks += [bench.inner('one of four ranks', of=impl) for impl in ('manual', 'torch')]
    checks += [bench.train(f'offload {where} {impl}', 'train_fsdp.py', offloaded(bench, where, impl), 35,
                           inside='page locked') for where in HOST for impl in ('manual', 'torch')]  # fmt: skip
    return checks + [train(size, name) for size in ('124M gpt2', 'Enoki 8 heads') for name in ('manual', 'fsdp')]


def offloaded(bench, where, impl):
    return bench.size('Llama 1B') | dict(batch_size=2, max_iters=8, log_interval=4, cpu_offload=where, fsdp_impl=impl)


def write_documents(data_dir, vocab_size, tokens=2**22):
    """Write a dataset of random documents of 400 tokens on average; returns the keys that train on it."""
    import numpy as np

    folder, generator = data_dir / 'documents', np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    eot_token = vocab_size - 1
    for split in ('train', 'val'):
        text = generator.integers(0, eot_token, tokens, dtype=np.uint16)
        text[generator.random(tokens) < 1 / 400] = eot_token
        text.tofile(folder / f'{split}.bin')
    (folder / 'meta.json').write_text(json.dumps({'vocab_size': vocab_size, 'eot_token': eot_token}))
    return dict(data_dir=data_dir, dataset='documents', vocab_size=vocab_size, windows='documents')


def read_prediction(text, output):
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith('memory per rank'))
    totals = [line.split() for line in lines[begin:] if 'total on the' in line]
    gb = {words[-2]: float(words[-1]) for words in totals}  # 'device' and, where state is offloaded, 'host'
    return {'GB': gb['device']} | ({'host GB': gb['host']} if 'host' in gb else {})


# --- traces -----------------------------------------------------------------------------------------------------------

KERNEL_KINDS = {
    'NCCL': ('nccl',),
    'attention': ('flash', 'fmha', 'attention', 'sdpa', 'cudnn_generated'),
    'matmuls': ('gemm', 'cutlass', 'nvjet', 'matmul', 'addmm', '::mm', '::bmm', 'linear'),
    'optimizer': ('adam', 'multi_tensor', 'foreach'),
    'softmax and loss': ('softmax', 'logsumexp', 'scatter', 'gather', 'cross_entropy'),
    'norms': ('norm',),
    'copies': ('memcpy', 'memset', 'copy_'),
}


def summary_of_trace(path, picture):
    """Milliseconds of the last step in a trace by kind of kernel, and of the gaps in which the GPU (or CPU thread) had
    nothing to do, also before its first kernel, if the trace has the step before."""
    events = [
        event for event in json.loads(path.read_text())['traceEvents'] if event.get('ph') == 'X' and 'dur' in event
    ]
    labels = [event for event in events if event['name'] == PROFILED_STEP and event.get('cat') == 'user_annotation']
    begin, end = max((label['ts'], label['ts'] + label['dur']) for label in labels)
    inside = [event for event in events if begin <= event['ts'] <= end]
    kernels = [event for event in events if event.get('cat') in ('kernel', 'gpu_memcpy', 'gpu_memset')]
    busy_until = None
    if kernels:  # those of the step were launched in it, and ran later
        calls = {
            event['args'].get('correlation') for event in inside if event.get('cat') in ('cuda_runtime', 'cuda_driver')
        }
        before = [event for event in kernels if event['args']['correlation'] not in calls]
        kernels = [event for event in kernels if event['args']['correlation'] in calls]
        busy_until = max((event['ts'] + event['dur'] for event in before), default=None)
    else:  # on a CPU: the outermost operators of the busiest thread
        operators = [event for event in inside if event.get('cat') == 'cpu_op' and event['name'].startswith('aten::')]
        operators.sort(key=lambda event: (event['tid'], event['ts'], -event['dur']))
        for event in operators:
            last = kernels[-1] if kernels else None
            if not last or event['tid'] != last['tid'] or event['ts'] >= last['ts'] + last['dur']:
                kernels.append(event)
    kernels.sort(key=lambda event: event['ts'])
    first = busy_until = kernels[0]['ts'] if busy_until is None else busy_until
    sums, idle = dict.fromkeys((*KERNEL_KINDS, 'elementwise and others'), 0.0), 0.0
    for event in kernels:
        name = event['name'].lower()
        kind = next((kind for kind, words in KERNEL_KINDS.items() if any(word in name for word in words)), None)
        sums[kind or 'elementwise and others'] += event['dur'] / 1e3
        idle += max(0.0, event['ts'] - busy_until) / 1e3
        busy_until = max(busy_until, event['ts'] + event['dur'])
    draw(kernels, picture)
    return {'traced_ms': (busy_until - first) / 1e3, 'idle_ms': idle, 'launches': len(kernels), 'kernels_ms': sums}


def draw(kernels, path, width=1200, row=16):
    """One step as SVG: a row for each stream, a box for each kernel."""
    begin, end = kernels[0]['ts'], max(event['ts'] + event['dur'] for event in kernels)
    rows = sorted({str(event['tid']) for event in kernels})
    colors = ['#4269d0', '#efb118', '#ff725c', '#6cc5b0', '#3ca951', '#ff8ab7', '#a463f2', '#9c6b4e']
    boxes = []
    for event in kernels:
        name = event['name'].lower()
        kind = next(
            (i for i, words in enumerate(KERNEL_KINDS.values()) if any(word in name for word in words)),
            len(KERNEL_KINDS),
        )
        x, w = (event['ts'] - begin) / (end - begin) * width, event['dur'] / (end - begin) * width
        y = rows.index(str(event['tid'])) * row
        boxes.append(f'<rect x="{x:.2f}" y="{y}" width="{max(w, 0.2):.2f}" height="{row - 2}" fill="{colors[kind]}"/>')
    legend = ''.join(
        f'<text x="{150 * i}" y="{len(rows) * row + 14}" font-size="12" fill="{colors[i]}">{kind}</text>'
        for i, kind in enumerate((*KERNEL_KINDS, 'others'))
    )
    size = f'width="{width}" height="{len(rows) * row + 20}"'
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(boxes)}{legend}</svg>\n')


# --- the page ---------------------------------------------------------------------------------------------------------


def table(title, head, rows):
    """The lines of a table; a number that is missing (None) is an empty cell."""
    shown = [['' if cell is None else f'{cell:.5g}' if isinstance(cell, float) else str(cell) for cell in row]
             for row in rows]  # fmt: skip
    lines = [f'| {" | ".join(row)} |' for row in shown]
    return ['', f'## {title}', '', f'| {" | ".join(head)} |', '|---' * len(head) + '|', *lines]


def apart(results):
    """{name: (the other's name, largest relative difference of losses, whether it is too large)} of the checks whose
    losses should be those of another check that has ended, too."""
    found = {}
    for name, result in results.items():
        other, limit = result.get('beside', (None, None))
        if 'losses' in results.get(other, {}):
            pairs = zip(result['losses'], results[other]['losses'], strict=True)  # nan if a loss is
            most = max((abs(a - b) / b for a, b in pairs), key=lambda far: math.inf if math.isnan(far) else far)
            found[name] = (other, most, not most <= limit)
    return found


def failures(results):
    """A line for each check that failed, or whose losses are too far from those of another."""
    wrong = [f'- {name}: `{result["error"]}`' for name, result in results.items() if 'error' in result]
    return wrong + [f'- {name}: losses differ by {most:.1e} from those of {other}' for name, (other, most, too_far) in
                    apart(results).items() if too_far]  # fmt: skip


def results_in(folder):
    """{name: result} of all checks so far."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob('*.json'))}


CARD = 'GPU|day|torch|code|strategies apart|GPT-2 124M|nanoGPT|Llama 1B|in float8|8B, LoRA|passed'.split('|')


def row_of_card(results):
    """The row of the table in docs/gpu.md that has one row for each GPU; a cell is empty where nothing was measured."""

    def speed(name):
        found = results.get(name, {})
        return f'{found["tokens_per_sec"]:,.0f} ({found["mfu"]:.1%})' if 'mfu' in found else ''

    versions = results.get('versions', {})
    code = re.sub(r'^([0-9a-f]{7})[0-9a-f]{33}', r'\1', versions.get('code', ''))
    names = ('ddp', 'fsdp', 'manual', 'manual-stage-1', 'manual-stage-2')
    losses = [found['losses'] for name in names if 'losses' in (found := results.get(f'exact-{name}', {}))]
    apart_by = [abs(a - b) / b for run in losses[1:] for a, b in zip(run, losses[0], strict=True)]
    row = [versions.get('GPU', ''), versions.get('day', ''), versions.get('torch', ''), code]
    row += [f'{max(apart_by):.1e}' if any(apart_by) else 'equal' if apart_by else '', speed('124M-gpt2-ddp')]
    row += [f'{tokens:,.0f}' if (tokens := results.get('nanogpt', {}).get('nanoGPT tokens/s')) else '']
    row += [speed(name) for name in ('Llama-1B-ddp', 'Llama-1B-float8', 'Llama-8B-LoRA-bf16')]
    return [*row, f'{len(results) - len(failures(results))} of {len(results)}']


def page(bench):
    """The text of OUT/gpu.md: all results, in tables."""
    results = results_in(bench.out)
    left_out = {name: result['left out'] for name, result in results.items() if 'left out' in result}
    results = {name: result for name, result in results.items() if name not in left_out}
    versions = ', '.join(f'{key} {value}' for key, value in results.get('versions', {}).items() if key != 'seconds')
    losses, wrong = apart(results), failures(results)
    lines = ['# One GPU, measured', '', f'Written by `python benchmarks/gpu.py`: {versions}']
    lines += ['', f'Checks passed: {len(results) - len(wrong)} of {len(results)}, left out: {len(left_out)}.', *wrong]
    lines += table('The row of this GPU in docs/gpu.md', CARD, [row_of_card(results)])

    head = ['run', 'tokens/s', 'by wall clock', 'MFU', 'ms a step', 'peak GB', 'predicted', 'kernels', 'idle ms']
    keys = (
        'tokens_per_sec wall_tokens_per_sec mfu total peak_gb predicted launches idle_ms mhz lowest_mhz watts'.split()
    )
    alone = {name: result for name, result in results.items() if 'timed' in result}
    for name, result in alone.items():
        result['predicted'] = results.get(f'predicted-{name.removeprefix("Llama-1B-")}', {}).get('GB')
    rows = [[name, *map(result.get, keys)] for name, result in alone.items() if 'tokens_per_sec' in result]
    lines += table('Speed', [*head, 'MHz', 'lowest', 'watts'], rows)
    lines += ['', 'The wall clock also counts what the host does between two steps; tokens/s leave that out.']
    rows = [[name, *result['kernels_ms'].values()] for name, result in results.items() if 'kernels_ms' in result]
    lines += table('Where a step goes, in ms', ['run', *KERNEL_KINDS, 'others'], rows)
    rows = []
    for name, result in alone.items():
        if name.startswith('offload-'):
            predicted = results.get(f'predicted-{name.rpartition("-")[0]}', {}).get('host GB')
            rows.append([name, result.get('page_locked_gb'), predicted])
    lines += table('Page-locked host memory, in GB', ['run', 'page-locked', 'predicted'], rows)
    rows = [
        [name, other, f'{most:.1e}', 'too far' if too_far else ''] for name, (other, most, too_far) in losses.items()
    ]
    lines += table('Largest relative difference of losses', ['run', 'from', 'difference', ''], rows)
    rows = []
    for name in LOW_PRECISION:
        timed = results.get('Llama-1B-ddp' if name == 'bf16' else f'Llama-1B-{stem(name)}', {})
        last = results.get(f'loss-{stem(name)}', {}).get('losses', [])[-10:]
        rows.append([name, timed.get('tokens_per_sec'), timed.get('peak_gb'), sum(last) / len(last) if last else None])
    lines += table('Fewer bits', ['', 'tokens/s', 'peak GB', 'loss on text, last 10 steps'], rows)
    rows = [[name, len(result['losses']), result['losses'][0], result['losses'][-1], result.get('router/violation'),
             result.get('recompilations')] for name, result in results.items()
            if 'losses' in result and 'timed' not in result]  # fmt: skip
    lines += table('Runs', ['run', 'losses', 'first', 'last', 'violation', 'compiled again'], rows)
    rows = [[name, ', '.join(f'{key} {value}' for key, value in result.items())] for name, result in results.items()
            if 'losses' not in result and 'error' not in result]  # fmt: skip
    lines += table('The other checks', ['check', 'found'], rows)
    lines += table('Left out', ['check', 'because'], left_out.items())
    return '\n'.join(lines) + '\n'


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', metavar='REGEX', help='checks whose names match, and those that they need')
    parser.add_argument('--budget', type=float, default=15, metavar='MINUTES')
    parser.add_argument('--jobs', type=int, default=cores(), help='checks of correctness at a time; default: the cores')
    parser.add_argument('--device', default='cuda')
    parser.add_argument('--out', default='out/gpu')
    parser.add_argument('--nanogpt', metavar='FOLDER')
    arguments = parser.parse_args()
    import torch  # here, so that --help is quick

    if arguments.device == 'cuda' and not torch.cuda.is_available():
        parser.error('torch finds no GPU here (nvidia-smi, or a torch without CUDA): --device=cpu tries the checks')
    if arguments.nanogpt and not Path(arguments.nanogpt, 'train.py').exists():
        parser.error(f'--nanogpt={arguments.nanogpt}: no train.py there: give a clone of nanoGPT')
    bench = Bench(arguments.device, arguments.out, arguments.budget, arguments.jobs, arguments.nanogpt)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    first, then = correctness(bench), timed(bench)
    if arguments.only:
        wanted = {check.name for check in first + then if re.search(arguments.only, check.name)}
        wanted |= {check.needs for check in first + then if check.name in wanted}
        if not wanted:
            names = '; '.join(check.name for check in first + then)
            parser.error(f'--only={arguments.only}: no check has such a name; there are: {names}')
        first, then = ([check for check in checks if check.name in wanted] for checks in (first, then))
    try:
        say(f'--- {len(first)} checks, {bench.jobs} side by side')
        bench.side_by_side(first)
        (bench.out / 'gpu.md').write_text(page(bench))
        say(f'--- {len(then)} timed checks, one after the other')
        if not bench.nvidia_smi:
            say('left out: clocks and power, there is no nvidia-smi or no GPU')
        for check in then:
            bench.run(check, alone=True)
            (bench.out / 'gpu.md').write_text(page(bench))
    finally:
        bench.end()
    say(f'{time.monotonic() - began:.0f} s, written: {bench.out / "gpu.md"}; docs/gpu.md: how to read and report it')
    return 1 if failures(results_in(bench.out)) else 0


if __name__ == '__main__':
    sys.exit(main())
