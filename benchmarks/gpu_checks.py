"""
Checks of benchmarks/gpu.py that are no training runs, each in a process of its own:

    python benchmarks/gpu_checks.py NAME OF DEVICE OUT [SCRIPT OPTIONS ...]

The function whose name is NAME, with underscores for spaces, here or in benchmarks/forms.py, is given the device
and these arguments: OF is a variant of the check, OUT the folder of results. What it returns is printed as the last
line, in JSON.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from benchmarks import forms
from benchmarks.forms import in_turns
from benchmarks.gpu import EXPERTS, SIZES, TINY, TINY_EXPERTS, options
from system.files import code_version


def versions(device, arguments):
    found = {'day': time.strftime('%Y-%m-%d'), 'code': code_version(REPO).partition(', ')[0]}
    found |= {'python': sys.version.split()[0], 'torch': torch.__version__, 'CUDA': torch.version.cuda}
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


def experts(device, arguments):
    """
    One layer's experts in bf16, where the first expert gets no row. Are all experts in one kernel as near to float64 as
    one after the other? Found are relative distances of the output and of the gradients. Then the time of forward and
    backward in both ways, with router and sorting, and beside a dense MLP of as many FLOPs.
    """
    import copy

    import torch.nn.functional as F

    from experts import Experts, MoE, rows_of_each
    from model import MLP, ModelConfig

    tokens, width, n_experts, k, hidden = EXPERTS[arguments.of]
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
    x = torch.randn(1, tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    dense, mixture = made(MLP), made(MoE)
    ways = {
        'one kernel ms': lambda: run(module, rows, ends, one_kernel=True),
        'one by one ms': lambda: run(module, rows, ends, one_kernel=False),
        'dense twin ms': lambda: dense(x).sum().backward(),
        'with router and sorting ms': lambda: mixture(x)[0].sum().backward(),
    }
    return found | in_turns(device, ways)


def compiled_experts(device, arguments):
    """
    A small mixture in bf16 with one kind of activation checkpointing, on batches of two sizes: how far compiled and
    eager are apart in loss and gradients (relative), and how many graphs all blocks together have. It should be two.
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    import experts
    from model import GPT, ModelConfig

    backend = 'inductor'
    if device.type == 'cpu':  # it has that kernel, too; with inductor a C++ compiler would take minutes
        experts.rows_of_each, backend = lambda ends, rows: ends, 'aot_eager'
    config, counter, numbers = ModelConfig.from_keys(TINY | TINY_EXPERTS), CompileCounterWithBackend(backend), []
    for compiles in (False, True):
        model = GPT(config, torch.bfloat16).to(device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(model.initial_value(name, parameter, 1, device))
        model.checkpoint_activations(arguments.of)
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
    found = {'loss': float(f'{apart:.1e}'), 'graphs': counter.frame_count}
    found['gradients'] = float(f'{((other - gradient).norm() / gradient.norm()).item():.1e}')
    assert apart < 2**-8 and counter.frame_count == 2, found
    return found


def syncs(device, arguments):
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
    keys = TINY | dict(dataset='synthetic', eval_sequences=0, keep_checkpoints=0, device=arguments.device, max_iters=13)
    keys |= dict(fsdp_impl='manual', log_interval=5, compile=False, out_dir=Path(arguments.out) / 'runs/syncs')
    shutil.rmtree(keys['out_dir'], ignore_errors=True)
    train_here(['train_fsdp.py', *options(keys)])
    return {'waits': lines}


def page_locked(device, arguments):
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


def one_of_four_ranks(device, arguments):
    """A step of one rank of four whose collectives do nothing: time of the step, time of the host, peak memory."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import fsdp
    import fsdp_manual
    import optim
    from loss import pointwise_cross_entropy
    from model import GPT, ModelConfig

    dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=4)
    mesh = dist.device_mesh.init_device_mesh(device.type, (4,))
    on_cuda = device.type == 'cuda'
    keys = SIZES['Llama 1B'] if on_cuda else TINY | {'batch_size': 2}
    config = ModelConfig.from_keys({'vocab_size': 50304} | keys)
    with torch.device('meta'):
        raw_model = GPT(config, torch.bfloat16)
    if on_cuda:
        for block in raw_model.blocks:
            block.forward = torch.compile(block.forward)
        raw_model.loss_kernel = torch.compile(pointwise_cross_entropy, dynamic=False)
    shard = fsdp_manual.shard if arguments.of == 'manual' else fsdp.by_torch
    model = shard(raw_model, raw_model.blocks, mesh, torch.bfloat16)
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

    found = in_turns(device, {'ms': step}) | {'host ms': round(min(host), 3)}
    return found | ({'peak GB': torch.cuda.max_memory_allocated() / 1e9} if on_cuda else {})


def tiny_llama(device, arguments):
    """Save a tiny Llama of transformers and a tokenizer of bytes with a chat template, and datasets of 300
    conversations and of 300 pairs by prepare_data.py, and prompts that noise sometimes answers right."""
    import transformers

    from text.tokenizer import byte_level_bpe

    folder = Path(arguments.out) / 'runs/tiny-llama'
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=259, max_position_embeddings=512, initializer_range=0.1, bos_token_id=None, eos_token_id=258,
    )  # fmt: skip
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    specials = {'<|endoftext|>': 256, '<|im_start|>': 257, '<|im_end|>': 258}
    bpe = byte_level_bpe({bytes([byte]): byte for byte in range(256)}, specials)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token='<|im_end|>')
    tokenizer.chat_template = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    chats = []
    for number in range(300):
        turns = [(f'What is {turn} times {number}?', f'{turn * number}.') for turn in range(1 + number % 3)]
        roles = [zip(('user', 'assistant'), turn, strict=True) for turn in turns]
        chats.append({'messages': [{'role': role, 'content': text} for turn in roles for role, text in turn]})
    questions = [f'What is 2 times {number}?' for number in range(300)]
    pairs = [
        {'prompt': question, 'chosen': f'{2 * number}.', 'rejected': f'{2 * number + 1}, I think.'}
        for number, question in enumerate(questions)
    ]
    task = {'answer': [*'abcdefghijklmnopqrst'], 'rule': 'contains', 'stop': [*'ABCDEFGHIJKLMNOPQRST']}
    prompts = [{'prompt': question, **task, 'max_new_tokens': 12} for question in questions]
    for name, rows in {'chats': chats, 'pairs': pairs, 'prompts': prompts}.items():
        path = folder / f'{name}.jsonl'
        path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
        data = f'--dataset={path} --tokenizer={folder} --name={name} --data_dir={Path(arguments.out) / "data"}'
        if name != 'prompts':
            command = [sys.executable, REPO / 'prepare_data.py', *data.split(), '--num_proc=1']
            subprocess.run([*command, *(['--pairs'] if name == 'pairs' else [])], check=True)
    return {'conversations': len(chats)}


def llama_8B(device, arguments):
    """Write a folder with the shapes of Llama 3.1 8B. The matrices of its blocks are zeros, which take no room on the
    disk because the file is sparse. Matmuls with zeros draw less power than with weights."""
    import numpy as np
    import transformers

    tiny = device.type == 'cpu'
    config = transformers.LlamaConfig(
        hidden_size=64 if tiny else 4096, intermediate_size=128 if tiny else 14336, num_hidden_layers=2 if tiny else 32,
        num_attention_heads=4 if tiny else 32, num_key_value_heads=2 if tiny else 8,
        vocab_size=512 if tiny else 128256, max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    config.architectures = ['LlamaForCausalLM']
    folder = Path(arguments.out) / 'runs/llama-8B'
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


def peft(device, arguments):
    """Tokens/s of 8B with LoRA in a plain loop of transformers and peft, with gradient checkpointing, as in trainers
    that build on them. Two sequences of 4096 tokens are too many for 80 GB there, so it gets one."""
    import peft
    import transformers

    folder, tokens, steps = Path(arguments.out) / 'runs/llama-8B', 64 if device.type == 'cpu' else 4096, 8
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})
    model.enable_input_require_grads()
    lora = peft.LoraConfig(r=16, lora_alpha=16, target_modules='all-linear', task_type='CAUSAL_LM')
    model = peft.get_peft_model(model, lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.float()
    optimizer, times = torch.optim.AdamW(trained, lr=1e-4, fused=True), []
    for _ in range(steps):
        x = torch.randint(model.config.vocab_size, (1, tokens), device=device)
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=x, labels=x).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        times.append(time.perf_counter() - began)
    found = {'tokens_per_sec': tokens / sorted(times[2:])[len(times[2:]) // 2]}
    return found | ({'peak_gb': torch.cuda.max_memory_allocated() / 1e9} if device.type == 'cuda' else {})


def generate(device, arguments):
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

    def answer(backends):
        with sdpa_kernel(backends):
            sampling.generate_batch(model, [prompt], tokens, temperature=1.0)

    ways = {'without cuDNN': lambda: answer(others), 'with': lambda: answer([*others, SDPBackend.CUDNN_ATTENTION])}
    found = in_turns(device, ways, rounds=3)
    return {f'{name}, ms a token': round(ms / tokens, 4) for name, ms in found.items()}


def nanogpt(device, arguments):
    """Tokens/s of nanoGPT's train.py with 124M parameters, from the times that it prints; ours is `124M gpt2 ddp`."""
    shape = '--n_layer=12 --n_head=12 --n_embd=768 --block_size=1024 --batch_size=32'.split()
    if device.type == 'cpu':
        shape = '--n_layer=2 --n_head=2 --n_embd=64 --block_size=64 --batch_size=4'.split()
    data = Path(arguments.of) / 'data' / 'gpu_benchmark'
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
    command = [sys.executable, 'train.py', *theirs]
    output = subprocess.run(command, cwd=arguments.of, capture_output=True, text=True)
    times = [float(line.split('time ')[1].split('ms')[0]) for line in output.stdout.splitlines() if 'time ' in line]
    sizes = dict(part.removeprefix('--').split('=') for part in shape)
    tokens = int(sizes['block_size']) * int(sizes['batch_size'])
    return {'tokens_per_sec': round(1e3 * tokens / sorted(times[20:])[len(times[20:]) // 2])}


def main():
    name, of, device, out, *script = sys.argv[1:]
    arguments = SimpleNamespace(of=of, device=device, out=out, script=script)
    print(json.dumps((vars(forms) | globals())[name.replace(' ', '_')](torch.device(device), arguments)))


if __name__ == '__main__':
    main()
