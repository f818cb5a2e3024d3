"""
The first 25 minutes on a GPU: does everything work there, how fast is it, and where does the time go?

    python benchmarks/gpu.py                                 # all stages; writes OUT/gpu.md
    python benchmarks/gpu.py --stage=speed                   # one stage of at most 8 minutes, for a short session
    python benchmarks/gpu.py --nanogpt=path/to/nanoGPT       # its train.py beside ours, in the stage `speed`
    python benchmarks/gpu.py --device=cpu                    # tiny models on a CPU, to try this program

Each check is a process of its own and leaves OUT/NAME.json as soon as it has ended, so a second call goes on where the
first was cut off; to repeat a check, delete that file. Checks for which --budget minutes are too few are left out, and
a line names each. Needs torch and numpy, and transformers for two checks, but no network, datasets or wandb.
docs/gpu.md says how to read the result.
"""

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

STAGE_SECONDS = 8 * 60
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
TIMED = dict(max_iters=30, log_interval=10, warmup_iters=5, trace_step=28)
NUMBERS = ('step', 'loss', 'tokens_per_sec', 'mfu', 'time/total', 'time/update', 'mem/peak_gb', 'mem/reserved_gb')
NUMBERS += ('router/violation',)


class Bench:
    """Runs checks, keeps their results, and knows the time that is left."""

    def __init__(self, arguments):
        self.device, self.nanogpt = arguments.device, arguments.nanogpt
        self.tiny = self.device == 'cpu'
        self.out = Path(arguments.out)
        self.runs = self.out / 'runs'
        self.runs.mkdir(parents=True, exist_ok=True)
        self.ends = time.monotonic() + 60 * arguments.budget
        self.stage_ends = self.ends
        self.output = []  # (second, line) as the latest check printed it

    def check(self, name, command, limit, read=lambda text: {}, environment=None):
        """Run a command; returns {'seconds', and 'error' or what read() finds in its output}. If an earlier call has
        left the result, it is returned and nothing runs."""
        path = self.out / f'{name.replace(" ", "-")}.json'
        if path.exists():
            return json.loads(path.read_text())
        limit = min(limit, self.ends - time.monotonic(), self.stage_ends - time.monotonic())
        if limit < 10:
            print(f'{time.strftime("%H:%M:%S")} left out: {name}, no time', flush=True)
            return {'error': 'left out, no time'}
        began = time.monotonic()
        log = self.out / f'{path.stem}.log'
        process = subprocess.Popen(
            [sys.executable, *map(str, command)], cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, env=os.environ | {'PYTHONUNBUFFERED': '1'} | (environment or {}),
            text=True, errors='replace',
        )  # fmt: skip
        self.output = []
        reader = threading.Thread(target=copy_lines, args=(process.stdout, log, self.output), daemon=True)
        reader.start()
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            code = process.wait()
        reader.join(timeout=10)  # a compiler process that is still there may keep the pipe open
        result = {'seconds': round(time.monotonic() - began, 1)}
        text = log.read_text(errors='replace')
        if code:
            errors = [line for line in text.splitlines() if 'rror' in line]
            result['error'] = (errors or [f'exit code {code}'])[-1][-300:] if code > 0 else f'ended after {limit:.0f} s'
        else:
            try:
                result |= read(text)
            except Exception as error:  # a check that cannot be read must not end the others
                result['error'] = f'{type(error).__name__}: {error}'
        path.write_text(json.dumps(result))
        shown = ', '.join(f'{key} {value:.6g}' if isinstance(value, float) else f'{key} {value}'
                          for key, value in result.items() if key != 'losses')  # fmt: skip
        print(
            f'{time.strftime("%H:%M:%S")} {"FAILED" if "error" in result else "ok"} {name}: {shown[:400]}', flush=True
        )
        return result

    def train(self, name, script, keys, limit=150, environment=None, keep=False, inside=None, ranks=1):
        """
        A check that trains. It finds the last row of metrics before the traced step, and where the time of the traced
        step went.

        script: a config file may follow it. inside: the name of an inner check that runs the script in its own process;
        what that check finds is added.
        """
        run = self.runs / name.replace(' ', '-')
        if not keep:
            shutil.rmtree(run, ignore_errors=True)
        fixed = dict(dataset='synthetic', vocab_size=50304, eval_iters=0, keep_checkpoints=0, device=self.device)
        keys = {key: value for key, value in (fixed | keys | {'out_dir': run}).items() if value is not None}

        def read(text):
            rows = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
            trace_step = keys.get('trace_step', math.inf)
            last = [row for row in rows if 'tokens_per_sec' in row and row['step'] < trace_step][-1]
            found = {key.removeprefix('time/').removeprefix('mem/'): last[key] for key in NUMBERS if key in last}
            found |= {'losses': [row['loss'] for row in rows if 'loss' in row]}
            found |= wall_clock(self.output, rows, trace_step)
            found |= (
                {'recompilations': text.lower().count('recompiling')} if 'TORCH_LOGS' in (environment or {}) else {}
            )
            found |= json.loads(text.splitlines()[-1]) if inside else {}
            trace = run / 'trace_rank0.json'
            return found | (summary_of_trace(trace, self.out / f'{run.name}.svg') if trace.exists() else {})

        command = [*script.split(), *options(keys)]
        if inside:
            command = [*self.inner_command(inside), '--script', *command]
        if ranks > 1:
            torchrun = '-m torch.distributed.run --standalone --local_addr=127.0.0.1'
            command = [*torchrun.split(), f'--nproc_per_node={ranks}', *command]
        return self.check(name, command, limit, read, environment)

    def predict(self, name, script, keys):
        """A check that asks --dry_run for the memory of a run."""
        fixed = dict(dry_run=True, dataset='synthetic', vocab_size=50304, device=self.device)
        return self.check(f'predicted {name}', [script, *options(fixed | keys)], 60, read_prediction)

    def inner(self, name, limit, *arguments, of=''):
        """A check that this file does itself, in a new process."""
        command = [*self.inner_command(name), *arguments]
        return self.check(f'{name} {of}'.strip(), command, limit, lambda text: json.loads(text.splitlines()[-1]))

    def leave_out(self, name, reason):
        """Say that a check cannot be done here, now and on the page."""
        (self.out / f'{name.replace(" ", "-")}.json').write_text(json.dumps({'left out': reason}))
        print(f'{time.strftime("%H:%M:%S")} left out: {name}, {reason}', flush=True)

    def inner_command(self, name):
        return ['benchmarks/gpu.py', f'--inner={name}', f'--device={self.device}', f'--out={self.out}']

    def size(self, name):
        if self.tiny:
            return TINY | {'batch_size': 2} | (TINY_EXPERTS if 'n_experts' in SIZES[name] else {})
        return SIZES[name]


def options(keys):
    return [f'--{key}={value}' for key, value in keys.items()]


def copy_lines(stream, path, output):
    """Copy lines into a file, and into the list `output` with the second at which each line came."""
    with path.open('w') as file:
        for line in stream:
            output.append((time.monotonic(), line))
            file.write(line)
            file.flush()


def wall_clock(output, rows, trace_step=math.inf):
    """
    {'wall_tokens_per_sec'}: tokens/s by wall clock, from when the lines of the last two logged steps before the traced
    one came; {} if there are too few lines.

    tokens_per_sec counts the time from the beginning to the end of each step. What the host does between two steps,
    while the GPU has nothing to do, slows down only this number.
    """
    tokens = {row['step']: row['tokens'] for row in rows if 'tokens' in row}
    found = [(second, re.match(r'\S+ step +(\d+)/\d+ \| loss', line)) for second, line in output]
    at = {int(match[1]): second for second, match in found if match}
    at = {step: second for step, second in at.items() if step in tokens and step < trace_step}
    if len(at) < 3:  # the first step compiles
        return {}
    before, after = sorted(at)[-2:]
    return {'wall_tokens_per_sec': (tokens[after] - tokens[before]) / (at[after] - at[before])}


# --- stages -----------------------------------------------------------------------------------------------------------


def start(bench):
    bench.inner('versions', 100)
    bench.train('one step', 'train_ddp.py', TINY | {'max_iters': 1, 'compile': False})


def numbers(bench):
    """fp32 without compiling: do all strategies compute the same as a CPU, and does the sanitizer find a race?"""
    exact = TINY | dict(dtype='float32', compile=False, max_iters=20, log_interval=1, global_batch_size=8)
    bench.train('exact cpu', 'train_ddp.py', exact | {'device': 'cpu'})
    for name, (script, keys) in STRATEGIES.items():
        bench.train(f'exact {name}', script, exact | keys)
    for stage in (1, 2):
        bench.train(f'exact manual stage {stage}', 'train_fsdp.py', exact | dict(fsdp_impl='manual', zero_stage=stage))
    bench.train('exact diloco', 'train_diloco.py', exact | {'inner_steps': 5})
    for optimizer in ('adana', 'muon'):
        bench.train(f'exact {optimizer}', 'train_fsdp.py', exact | dict(fsdp_impl='manual', optimizer=optimizer))
    if not bench.tiny:
        sanitized = exact | dict(fsdp_impl='manual', max_iters=4)
        bench.train('sanitizer', 'train_fsdp.py', sanitized, environment={'TORCH_CUDA_SANITIZER': '1'})


def compiled(bench):
    """bf16, compiled, with every checkpointing mode: is anything compiled again, and where does the host wait?"""
    keys = TINY | dict(dtype='bfloat16', compile=not bench.tiny, max_iters=12, log_interval=4)
    for mode in ('none',) if bench.tiny else ('none', 'selective', 'full'):
        for name, (script, strategy_keys) in STRATEGIES.items():
            more = strategy_keys | {'activation_checkpointing': mode}
            bench.train(f'compiled {name} {mode}', script, keys | more, environment={'TORCH_LOGS': 'recompiles'})
    bench.inner('syncs', 120)


def loss(bench):
    """The head and the loss alone, eager and compiled."""
    for name in LOSSES:
        bench.inner('loss', 120, f'--size={name}', of=name)


def speed(bench):
    """124M and Enoki under every strategy, with a traced step. 124M also on packed documents, beside the plain
    stream."""
    for size in ('124M', '124M gpt2', 'Enoki 8 heads'):
        for name, (script, keys) in STRATEGIES.items():
            bench.train(f'{size} {name}', script, bench.size(size) | TIMED | keys)
        if size == '124M':
            packed = write_documents(bench.out / 'data', bench.size(size).get('vocab_size', 50304))
            bench.train(f'{size} documents ddp', 'train_ddp.py', bench.size(size) | TIMED | packed)
    if bench.nanogpt:
        bench.inner('nanogpt', 150, f'--nanogpt={bench.nanogpt}')


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


def large(bench):
    """Llama 1B under every strategy beside the memory that --dry_run predicts, and as one of four ranks. Llama 8B with
    LoRA, on a base in bfloat16 and on one in nf4."""
    timed = bench.size('Llama 1B') | TIMED
    for name, (script, keys) in STRATEGIES.items():
        bench.train(f'Llama 1B {name}', script, timed | keys)
        bench.predict(name, script, timed | keys)
    for impl in ('torch', 'manual'):
        size = 'tiny' if bench.tiny else 'Llama 1B'
        bench.inner('one of four ranks', 100, f'--size={size}', f'--impl={impl}', of=impl)
    folder = bench.runs / 'llama-8b'
    bench.inner('llama-8b', 200, f'--folder={folder}')
    lora = dict(init_from=folder, lora_rank=16, block_size=64 if bench.tiny else 2048, batch_size=1, max_iters=10)
    lora |= dict(log_interval=5, activation_checkpointing='full', fsdp_impl='manual', vocab_size=None)
    bench.train('Llama 8B LoRA', 'train_fsdp.py', lora, limit=240)
    del lora['fsdp_impl']
    bench.train('Llama 8B LoRA nf4', 'train_ddp.py', lora | dict(frozen_dtype='nf4'), limit=240)


def read_prediction(text):
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith('memory per rank'))
    totals = [line.split() for line in lines[begin:] if 'total on the' in line]
    gb = {words[-2]: float(words[-1]) for words in totals}  # 'device' and, where state is offloaded, 'host'
    return {'GB': gb['device']} | ({'host GB': gb['host']} if 'host' in gb else {})


def offload(bench):
    """State on the host, and a run that is killed while it saves, resumed under another strategy."""
    keys = bench.size('Llama 1B') | dict(batch_size=2, max_iters=8, log_interval=4)
    for where in ('optimizer', 'params'):
        for impl in ('torch', 'manual'):
            offloaded = keys | dict(cpu_offload=where, fsdp_impl=impl)
            bench.train(f'offload {where} {impl}', 'train_fsdp.py', offloaded, inside='page locked')
        bench.predict(f'offload {where}', 'train_fsdp.py', offloaded)
    keys = TINY | dict(keep_checkpoints=2, checkpoint_interval=5, async_checkpoint=True, log_interval=1, max_iters=20)
    bench.train('saved', 'train_fsdp.py', keys | dict(fsdp_impl='manual'))
    bench.train('stopped', 'train_fsdp.py', keys | dict(fsdp_impl='manual', max_iters=10, lr_decay_iters=20))
    half, whole = bench.runs / 'resumed', bench.runs / 'stopped'
    if whole.exists() and not half.exists():
        shutil.copytree(whole, half)
    bench.train('resumed', 'train_ddp.py', keys | dict(lr_decay_iters=20), keep=True)


LOW_PRECISION = {
    'bf16': {},
    'float8': {'matmul_dtype': 'float8'},
    'moments in 8 bits': {'optimizer_dtype': 'int8'},
    'moments in bf16': {'optimizer_dtype': 'bfloat16'},
}
BASES = {'fp32': {'frozen_dtype': 'float32'}, 'bf16': {'frozen_dtype': 'bfloat16'}, 'nf4': {'frozen_dtype': 'nf4'}}


def low_precision(bench):
    """Llama 1B in fewer bits, beside bf16: tokens/s and memory. 124M on text in the same ways: the loss. Llama 8B with
    LoRA, on bases in fp32, bf16 and nf4."""
    timed, small = bench.size('Llama 1B') | TIMED, bench.size('124M')
    text = write_text(bench.out / 'data') | dict(log_interval=1, warmup_iters=10, learning_rate=6e-4)
    text |= dict(max_iters=20 if bench.tiny else 150, global_batch_size=small['batch_size'], dtype='bfloat16')
    for name, keys in LOW_PRECISION.items():
        bench.train(f'Llama 1B {name}', 'train_fsdp.py', timed | dict(dtype='bfloat16') | keys)
        bench.train(f'loss {name}', 'train_fsdp.py', small | text | keys)
    folder = bench.runs / 'llama-8b'
    if not folder.exists():
        bench.inner('llama-8b', 200, f'--folder={folder}')
    lora = dict(init_from=folder, lora_rank=16, block_size=64 if bench.tiny else 2048, batch_size=1, max_iters=10)
    lora |= dict(log_interval=5, activation_checkpointing='full', vocab_size=None)
    for name, keys in BASES.items():
        bench.train(f'Llama 8B LoRA {name}', 'train_ddp.py', lora | keys, limit=150)


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


def experts(bench):
    """
    Mixtures of experts. One layer: all experts in one kernel beside one after the other. A small model: compiled beside
    eager, and config/moe_quickstart.py for some steps in both ways. A mixture that computes as much for each token as
    124M, under every strategy. On two GPUs: two ranks that share the experts.
    """
    for name in ('tiny',) if bench.tiny else ('OLMoE', 'Qwen3 30B'):
        bench.inner('experts', 120, f'--size={name}', of=name)
    bench.inner('compiled experts', 200)
    quickstart, short = 'train_fsdp.py config/moe_quickstart.py', dict(dtype='bfloat16', max_iters=20, log_interval=1)
    short |= dict(block_size=32, vocab_size=500, max_iters=4) if bench.tiny else {}
    for compile in (False, True):
        keys = short | dict(compile=compile)
        name = f'experts {"compiled" if compile else "eager"}'
        bench.train(name, quickstart, keys, environment={'TORCH_LOGS': 'recompiles'})
    for name, (script, keys) in STRATEGIES.items():
        bench.train(f'124M experts {name}', script, bench.size('124M experts') | TIMED | keys)
    gpus = 2 if bench.tiny else bench.inner('versions', 100).get('GPUs', 1)  # on a CPU there may be any number of ranks
    if gpus < 2:
        return bench.leave_out('experts on two ranks', f'expert_parallel=2 needs 2 GPUs, and here is {gpus}')
    exact = short | dict(dtype='float32', compile=False, fsdp_impl='manual', batch_size=4)
    for sharing in (1, 2):
        bench.train(f'experts shared by {sharing} of 2', quickstart, exact | dict(expert_parallel=sharing), ranks=2)


def generate(bench):
    bench.inner('generate', 150)


STAGES = (start, numbers, compiled, loss, speed, large, offload, low_precision, experts, generate)
STAGES = {stage.__name__: stage for stage in STAGES}

# --- checks in a process of their own ---------------------------------------------------------------------------------


def inner(arguments):
    """Prints what was found as one line of JSON."""
    import torch

    device = torch.device(arguments.device)
    print(json.dumps(globals()['inner_' + re.sub('[- ]', '_', arguments.inner)](torch, device, arguments)))


def inner_versions(torch, device, arguments):
    found = {'python': sys.version.split()[0], 'torch': torch.__version__, 'CUDA': torch.version.cuda}
    found |= {'compiler': shutil.which('gcc') or shutil.which('cc') or 'none'}
    try:
        import transformers

        found['transformers'] = transformers.__version__
    except ImportError:
        found['transformers'] = 'none'
    if device.type == 'cuda':
        found |= {'GPU': torch.cuda.get_device_name(), 'GPUs': torch.cuda.device_count()}
        found |= {'cuDNN': torch.backends.cudnn.version()}
        query = ['nvidia-smi', '--query-gpu=driver_version,memory.total,clocks.max.sm', '--format=csv,noheader']
        found['driver'] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return found


def best_ms(torch, device, function, rounds=10):
    """Milliseconds of the fastest of some calls."""
    synchronize = torch.cuda.synchronize if device.type == 'cuda' else lambda: None
    function(), function(), synchronize()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        function()
        synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return round(min(times), 3)


def inner_loss(torch, device, arguments):
    from model import ChunkedCrossEntropy, cross_entropy, pointwise_cross_entropy

    tokens, width, vocab_size = (256, 64, 512) if device.type == 'cpu' else LOSSES[arguments.size]
    hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab_size, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(vocab_size, (tokens,), device=device)
    found = {}
    for name, kernel in (('eager', cross_entropy), ('compiled', torch.compile(pointwise_cross_entropy, dynamic=False))):

        def step(kernel=kernel):
            ChunkedCrossEntropy.apply(hidden, weight, targets, vocab_size - 47, 1e-4, True, kernel)[0].backward()

        found[f'{name} ms'] = best_ms(torch, device, step)
    found['matmuls ms'] = best_ms(
        torch, device, lambda: [(hidden @ weight.T).T @ hidden, (hidden @ weight.T) @ weight][0].sum()
    )
    return found


def inner_experts(torch, device, arguments):
    """
    One layer's experts in bf16, where the first expert gets no row. Are all experts in one kernel as near to float64 as
    one after the other? Found are relative distances of the output and of the gradients. Then the time of forward and
    backward in both ways, with router and sorting, and beside a dense MLP of as many FLOPs.
    """
    import copy

    import torch.nn.functional as F

    from model import MLP, Experts, ModelConfig, MoE, rows_of_each

    tokens, width, n_experts, k, hidden = EXPERTS[arguments.size]
    keys = dict(arch='qwen3', n_embd=width, n_head=width // 16, mlp_hidden_dim=k * hidden, vocab_size=64)
    config = ModelConfig(**keys, n_experts=n_experts, experts_per_token=k, expert_hidden_dim=hidden)

    def made(kind):
        module = kind(config).to(device, torch.bfloat16)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        return module

    def run(module, rows, ends, one_kernel):
        """The output, and the gradients of rows and weights. In float64 experts can only run one after the other."""
        where = ends if one_kernel else rows_of_each(ends, rows)
        rows = rows.detach().requires_grad_()
        y = module.down(F.silu(module.gate(rows, where)) * module.up(rows, where), where)
        return y, *torch.autograd.grad(y, [rows, *module.parameters()], torch.ones_like(y))

    def chosen_by(n):
        """Rows of n tokens, sorted by expert, and where the rows of each expert end. The first expert gets none."""
        choices = torch.randint(1, n_experts, (n * k,), device=device)
        ends = choices.bincount(minlength=n_experts).cumsum(0).int()
        return torch.randn(n * k, width, device=device, dtype=torch.bfloat16), ends

    module, found = made(Experts), {}
    rows, ends = chosen_by(max(64, tokens // 16))  # fewer, since some GPUs are slow in float64
    exact = run(copy.deepcopy(module).double(), rows.double(), ends, one_kernel=False)
    ways = {way: run(module, rows, ends, way == 'one kernel') for way in ('one kernel', 'one by one')}
    names = ('output', 'gradient of rows', *(f'gradient of {name}' for name in ('gate', 'up', 'down')))
    for name, wanted, *pair in zip(names, exact, *ways.values(), strict=True):
        apart = [((values.double() - wanted).norm() / wanted.norm()).item() for values in pair]
        found |= {f'{name}, {way}': float(f'{distance:.2e}') for way, distance in zip(ways, apart, strict=True)}
        assert apart[0] <= 2 * apart[1], f'{name}: {apart[0]:.1e} from float64, one by one {apart[1]:.1e}'
    for name, gradient in zip(names[2:], ways['one kernel'][2:], strict=True):
        assert not gradient[: gradient.shape[0] // n_experts].any(), f'{name} of the expert without rows is not 0'
    del exact, ways

    rows, ends = chosen_by(tokens)
    found['one kernel ms'] = best_ms(torch, device, lambda: run(module, rows, ends, one_kernel=True))
    found['one by one ms'] = best_ms(torch, device, lambda: run(module, rows, ends, one_kernel=False))
    x = torch.randn(1, tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    dense, mixture = made(MLP), made(MoE)
    found['dense twin ms'] = best_ms(torch, device, lambda: dense(x).sum().backward())
    found['with router and sorting ms'] = best_ms(torch, device, lambda: mixture(x)[0].sum().backward())
    return found


def inner_compiled_experts(torch, device, arguments):
    """
    A small mixture in bf16 with each kind of activation checkpointing, on batches of two sizes: how far compiled and
    eager are apart in loss and gradients (relative), and how many graphs all blocks together have. It should be two.
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    import model as model_module
    from model import GPT, ModelConfig

    backend = 'inductor'
    if device.type == 'cpu':  # it has that kernel, too; with inductor a C++ compiler would take minutes
        model_module.rows_of_each, backend = lambda ends, rows: ends, 'aot_eager'
    config, found = ModelConfig.from_keys(TINY | TINY_EXPERTS), {}
    for mode in ('none', 'full', 'selective'):
        torch._dynamo.reset()  # else it remembers which sizes changed in the mode before
        counter, numbers = CompileCounterWithBackend(backend), []
        for compiles in (False, True):
            model = GPT(config, torch.bfloat16).to(device)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(model.initial_value(name, parameter, 1, device))
            model.checkpoint_activations(mode)
            for block in model.blocks if compiles else ():
                block.forward = torch.compile(block.forward, backend=counter, fullgraph=True)
            for rows in (2, 4):
                tokens = torch.randint(config.vocab_size, (rows, config.block_size), device=device,
                                       generator=torch.Generator(device).manual_seed(rows))  # fmt: skip
                loss, _ = model(tokens, tokens)
                loss.backward()
            numbers.append((loss.item(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])))
        (eager, gradient), (compiled, other) = numbers
        apart = abs(compiled / eager - 1)
        found[f'{mode}: loss'] = float(f'{apart:.1e}')
        found[f'{mode}: gradients'] = float(f'{((other - gradient).norm() / gradient.norm()).item():.1e}')
        found[f'{mode}: graphs'] = counter.frame_count
        assert apart < 2**-8 and counter.frame_count == 2, f'{mode}: {found}'
    return found


def inner_syncs(torch, device, arguments):
    """Lines of code at which the host waits for the GPU, in ten steps of fsdp_manual.py of which two are logged."""
    import warnings

    from runtime.meter import Meter

    lines, begin_step = {}, Meter.begin_step

    def watch(meter):
        if device.type == 'cuda':
            torch.cuda.set_sync_debug_mode('warn' if meter._steps >= 3 else 'default')
        begin_step(meter)

    def note(message, category, filename, line, *rest):
        if 'synchroniz' in str(message):
            where = f'{Path(filename).name}:{line}'
            lines[where] = lines.get(where, 0) + 1

    Meter.begin_step, warnings.showwarning = watch, note
    warnings.simplefilter('always')
    keys = TINY | dict(dataset='synthetic', eval_iters=0, keep_checkpoints=0, device=arguments.device, max_iters=13)
    keys |= dict(fsdp_impl='manual', log_interval=5, compile=False, out_dir=Path(arguments.out) / 'runs/syncs')
    shutil.rmtree(keys['out_dir'], ignore_errors=True)
    train_here(['train_fsdp.py', *options(keys)])
    return {'waits': lines}


def inner_page_locked(torch, device, arguments):
    """Train, and say how much host memory was page-locked. Blocks are rounded up, so it is more than was asked for."""
    train_here(arguments.script)
    if device.type != 'cuda' or not hasattr(torch.cuda, 'host_memory_stats'):
        return {}
    return {'page_locked_gb': torch.cuda.host_memory_stats()['allocated_bytes.peak'] / 1e9}


def train_here(command):
    """Run a train script in this process, which it must not end. Raises SystemExit if it fails."""
    import runpy

    sys.argv = command
    leave, os._exit = os._exit, lambda code: sys.exit(code)
    try:
        runpy.run_path(str(REPO / command[0]), run_name='__main__')
    except SystemExit as end:
        if end.code:
            raise
    finally:
        os._exit = leave


def inner_one_of_four_ranks(torch, device, arguments):
    """A step of one rank of four whose collectives do nothing: time of the step, time of the host, peak memory."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import fsdp_manual
    import optim
    from model import GPT, ModelConfig, pointwise_cross_entropy

    dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=4)
    mesh = dist.device_mesh.init_device_mesh(device.type, (4,))
    on_cuda = device.type == 'cuda'
    keys = TINY | {'batch_size': 2} if arguments.size == 'tiny' else SIZES[arguments.size]
    config = ModelConfig.from_keys({'vocab_size': 50304} | keys)
    with torch.device('meta'):
        raw_model = GPT(config, torch.bfloat16)
    if on_cuda:
        for block in raw_model.blocks:
            block.forward = torch.compile(block.forward)
        raw_model.cross_entropy = torch.compile(pointwise_cross_entropy, dynamic=False)
    if arguments.impl == 'manual':
        model = fsdp_manual.shard(raw_model, raw_model.blocks, mesh, torch.bfloat16)
    else:
        sharding = {'mesh': mesh, 'mp_policy': MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
        for block in raw_model.blocks:
            fully_shard(block, **sharding)
        model = fully_shard(raw_model, reshard_after_forward=False, **sharding)
    raw_model.to_empty(device=device)
    with torch.no_grad():
        for parameter in raw_model.parameters():
            parameter.normal_(std=0.02)
    opt = optim.make_optimizer(raw_model, 'adamw', 1e-4, 0.9, 0.95, 0.1)
    tokens = torch.randint(config.vocab_size, (keys['batch_size'], config.block_size), device=device)
    host = []

    def step():
        began = time.perf_counter()
        model(tokens, tokens)[0].backward()
        optim.clip_grad_norm_(raw_model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        host.append(1e3 * (time.perf_counter() - began))

    found = {'ms': best_ms(torch, device, step), 'host ms': round(min(host), 3)}
    return found | ({'peak GB': torch.cuda.max_memory_allocated() / 1e9} if on_cuda else {})


def inner_llama_8b(torch, device, arguments):
    """Write a folder with the shapes of Llama 3.1 8B. The matrices of its blocks are zeros, which take no room on the
    disk because the file is sparse."""
    import numpy as np
    import transformers

    tiny = device.type == 'cpu'
    config = transformers.LlamaConfig(
        hidden_size=64 if tiny else 4096, intermediate_size=128 if tiny else 14336, num_hidden_layers=2 if tiny else 32,
        num_attention_heads=4 if tiny else 32, num_key_value_heads=2 if tiny else 8,
        vocab_size=512 if tiny else 128256, max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    config.architectures = ['LlamaForCausalLM']
    folder = Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    with torch.device('meta'):
        shapes = {name: value.shape for name, value in transformers.LlamaForCausalLM(config).state_dict().items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        header[name] = {'dtype': 'BF16', 'shape': list(shape), 'data_offsets': [end, end + 2 * shape.numel()]}
        end += 2 * shape.numel()
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)
    path = folder / 'model.safetensors'
    with path.open('wb') as file:
        file.write(len(text).to_bytes(8, 'little') + text)
        file.truncate(8 + len(text) + end)
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        if 'norm' in name or 'embed' in name or 'lm_head' in name:
            values = torch.ones(shape) if 'norm' in name else 0.02 * torch.randn(shape, generator=generator)
            place = np.memmap(path, np.int16, 'r+', 8 + len(text) + header[name]['data_offsets'][0], tuple(shape))
            place[:] = values.bfloat16().view(torch.int16).numpy()
            place.flush()
    return {'GB': end / 1e9}


def inner_generate(torch, device, arguments):
    """Milliseconds per token, with and without cuDNN's attention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from evaluation import sampling
    from model import GPT, ModelConfig

    keys = TINY if device.type == 'cpu' else SIZES['124M']
    config = ModelConfig.from_keys(keys | {'vocab_size': keys.get('vocab_size', 50304)})
    model = GPT(config, torch.bfloat16).to(device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.initial_value(name, parameter, 1, device))
    prompt, tokens = [0] * 8, 32
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    found = {}
    for name, backends in (('without cuDNN', others), ('with', [*others, SDPBackend.CUDNN_ATTENTION])):
        with sdpa_kernel(backends):
            ms = best_ms(torch, device, lambda: sampling.generate_batch(model, [prompt], tokens, temperature=1.0), 3)
            found[f'{name}, ms a token'] = ms / tokens
    return found


def inner_nanogpt(torch, device, arguments):
    """Tokens/s of nanoGPT's train.py with 124M parameters, from the times that it prints; ours is `124M gpt2 ddp`."""
    shape = '--n_layer=12 --n_head=12 --n_embd=768 --block_size=1024 --batch_size=32'.split()
    if device.type == 'cpu':
        shape = '--n_layer=2 --n_head=2 --n_embd=64 --block_size=64 --batch_size=4'.split()
    data = Path(arguments.nanogpt) / 'data' / 'gpu_benchmark'
    data.mkdir(exist_ok=True)
    for split in ('train', 'val'):
        (torch.randint(50257, (2**20,)).numpy().astype('uint16')).tofile(data / f'{split}.bin')
    theirs = [
        *shape,
        '--dataset=gpu_benchmark',
        '--gradient_accumulation_steps=1',
        '--max_iters=40',
        '--log_interval=1',
    ]
    theirs += ['--eval_interval=1000', '--eval_iters=1', f'--device={device}', f'--compile={device.type == "cuda"}']
    output = subprocess.run(
        [sys.executable, 'train.py', *theirs], cwd=arguments.nanogpt, capture_output=True, text=True
    )
    times = [float(line.split('time ')[1].split('ms')[0]) for line in output.stdout.splitlines() if 'time ' in line]
    sizes = dict(part.removeprefix('--').split('=') for part in shape)
    tokens = int(sizes['block_size']) * int(sizes['batch_size'])
    return {'nanoGPT tokens/s': round(1e3 * tokens / sorted(times[20:])[len(times[20:]) // 2])}


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
    """Milliseconds of a step by kind of kernel, and of the gaps in which the GPU (or CPU thread) had nothing to do."""
    events = [
        event for event in json.loads(path.read_text())['traceEvents'] if event.get('ph') == 'X' and 'dur' in event
    ]
    kernels = [event for event in events if event.get('cat') in ('kernel', 'gpu_memcpy', 'gpu_memset')]
    if not kernels:  # on a CPU: the outermost operators of the busiest thread
        operators = [event for event in events if event.get('cat') == 'cpu_op' and event['name'].startswith('aten::')]
        operators.sort(key=lambda event: (event['tid'], event['ts'], -event['dur']))
        for event in operators:
            if (
                not kernels
                or event['tid'] != kernels[-1]['tid']
                or event['ts'] >= kernels[-1]['ts'] + kernels[-1]['dur']
            ):
                kernels.append(event)
    kernels.sort(key=lambda event: event['ts'])
    sums, busy_until, idle = dict.fromkeys((*KERNEL_KINDS, 'elementwise and others'), 0.0), kernels[0]['ts'], 0.0
    for event in kernels:
        name = event['name'].lower()
        kind = next((kind for kind, words in KERNEL_KINDS.items() if any(word in name for word in words)), None)
        sums[kind or 'elementwise and others'] += event['dur'] / 1e3
        idle += max(0.0, event['ts'] - busy_until) / 1e3
        busy_until = max(busy_until, event['ts'] + event['dur'])
    draw(kernels, picture)
    step_ms = (busy_until - kernels[0]['ts']) / 1e3
    return {'traced_ms': step_ms, 'idle_ms': idle, 'launches': len(kernels), 'kernels_ms': sums}


def draw(kernels, path, width=1200, row=16):
    """One step as SVG: a row for each stream, a box for each kernel."""
    begin, end = kernels[0]['ts'], max(event['ts'] + event['dur'] for event in kernels)
    rows = sorted({str(event['tid']) for event in kernels})
    colours = ['#4269d0', '#efb118', '#ff725c', '#6cc5b0', '#3ca951', '#ff8ab7', '#a463f2', '#9c6b4e']
    boxes = []
    for event in kernels:
        name = event['name'].lower()
        kind = next(
            (i for i, words in enumerate(KERNEL_KINDS.values()) if any(word in name for word in words)),
            len(KERNEL_KINDS),
        )
        x, w = (event['ts'] - begin) / (end - begin) * width, event['dur'] / (end - begin) * width
        y = rows.index(str(event['tid'])) * row
        boxes.append(f'<rect x="{x:.2f}" y="{y}" width="{max(w, 0.2):.2f}" height="{row - 2}" fill="{colours[kind]}"/>')
    legend = ''.join(
        f'<text x="{150 * i}" y="{len(rows) * row + 14}" font-size="12" fill="{colours[i]}">{kind}</text>'
        for i, kind in enumerate((*KERNEL_KINDS, 'others'))
    )
    size = f'width="{width}" height="{len(rows) * row + 20}"'
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(boxes)}{legend}</svg>\n')


# --- the page ---------------------------------------------------------------------------------------------------------


SHORT = ('exact', 'compiled', 'one-step', 'loss', 'experts')  # runs whose speed says nothing


def page(bench):
    """The text of OUT/gpu.md: all results, in tables."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(bench.out.glob('*.json'))}
    versions = results.get('versions', {})
    failed = [f'- {name}: `{result["error"]}`' for name, result in results.items() if 'error' in result]
    lines = [
        '# One GPU, measured',
        '',
        'Written by `python benchmarks/gpu.py`: '
        + ', '.join(f'{k} {v}' for k, v in versions.items() if k != 'seconds'),
    ]
    lines += ['', f'Checks passed: {len(results) - len(failed)} of {len(results)}.', *failed, '', '## Speed', '']
    lines += ['| run | tokens/s | by wall clock | MFU | ms a step | peak GB | predicted | kernels | idle ms |']
    lines += ['|---' * 9 + '|']
    for name, result in results.items():
        if 'tokens_per_sec' in result and not name.startswith(SHORT):
            strategy = name.removeprefix('Llama-1B-')
            result['predicted'] = results.get(f'predicted-{strategy}', {}).get('GB', math.nan)
            keys = 'tokens_per_sec wall_tokens_per_sec mfu total peak_gb predicted launches idle_ms'.split()
            cells = [name, *(f'{result.get(key, math.nan):.4g}'.replace('nan', '') for key in keys)]
            lines.append(f'| {" | ".join(cells)} |')
    lines += ['', 'The wall clock also counts what the host does between two steps; tokens/s leave that out.']
    lines += [
        '',
        '## Where a step goes, in ms',
        '',
        f'| run | {" | ".join((*KERNEL_KINDS, "others"))} |',
        '|---' * (len(KERNEL_KINDS) + 2) + '|',
    ]
    for name, result in results.items():
        if 'kernels_ms' in result:
            lines.append(f'| {name} | {" | ".join(f"{ms:.2f}" for ms in result["kernels_ms"].values())} |')
    lines += ['', '## Page-locked host memory, in GB', '', '| run | page-locked | predicted |', '|---|---|---|']
    for name, result in results.items():
        if name.startswith('offload-') and 'error' not in result:
            predicted = results.get(f'predicted-{name.rpartition("-")[0]}', {}).get('host GB', math.nan)
            cells = [
                name,
                *(f'{gb:.4g}'.replace('nan', '') for gb in (result.get('page_locked_gb', math.nan), predicted)),
            ]
            lines.append(f'| {" | ".join(cells)} |')
    lines += ['', '## Largest relative difference of the losses of 20 steps in fp32', '', '| | to ddp |', '|---|---|']
    reference = results.get('exact-ddp', {}).get('losses', [])
    for name, result in results.items():
        if name.startswith('exact') and len(result.get('losses', [])) == len(reference) > 0:
            pairs = zip(result['losses'], reference, strict=True)
            lines.append(f'| {name} | {max(abs(a - b) / b for a, b in pairs):.1e} |')
    lines += ['', '## Fewer bits', '', '| | tokens/s | peak GB | loss on text, last 10 steps |', '|---' * 4 + '|']
    for name in LOW_PRECISION:
        timed, trained = (results.get(f'{kind}-{name.replace(" ", "-")}', {}) for kind in ('Llama-1B', 'loss'))
        last = trained.get('losses', [])[-10:]
        numbers = [timed.get('tokens_per_sec'), timed.get('peak_gb'), sum(last) / len(last) if last else None]
        lines.append(f'| {name} | {" | ".join("" if n is None else f"{n:.5g}" for n in numbers)} |')
    lines += ['', '## Mixtures of experts', '', '| run | first loss | last loss | violation | compiled again |']
    lines += ['|---' * 5 + '|']
    for name, result in results.items():
        if name.startswith('experts') and 'losses' in result:
            numbers = [result['losses'][0], result['losses'][-1], result.get('router/violation')]
            cells = [name, *('' if n is None else f'{n:.6g}' for n in numbers), str(result.get('recompilations', ''))]
            lines.append(f'| {" | ".join(cells)} |')
    lines += ['', '## The other checks', '', '| check | found |', '|---|---|']
    for name, result in results.items():
        if 'losses' not in result and 'error' not in result:
            lines.append(f'| {name} | {", ".join(f"{key} {value}" for key, value in result.items())} |')
    return '\n'.join(lines) + '\n'


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--stage', choices=STAGES, help='this one alone')
    parser.add_argument('--budget', type=float, default=25, metavar='MINUTES')
    parser.add_argument('--device', default='cuda')
    parser.add_argument('--out', default='out/gpu')
    parser.add_argument('--nanogpt', metavar='FOLDER')
    for name in ('--inner', '--size', '--impl', '--folder'):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument('--script', nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # and its options
    arguments = parser.parse_args()
    if arguments.inner:
        return inner(arguments)
    bench = Bench(arguments)
    for name in [arguments.stage] if arguments.stage else STAGES:
        print(f'{time.strftime("%H:%M:%S")} --- {name}', flush=True)
        bench.stage_ends = time.monotonic() + STAGE_SECONDS
        STAGES[name](bench)
        (bench.out / 'gpu.md').write_text(page(bench))
    print(f'written: {bench.out / "gpu.md"}')


if __name__ == '__main__':
    main()
