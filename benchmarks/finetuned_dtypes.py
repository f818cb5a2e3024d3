"""
How much of a fine-tuning is left once its weights are rounded? The validation loss of a run and of each of its exports.

    python benchmarks/finetuned_dtypes.py out/full out/lora    # runs of train_ddp.py --init_from=... --dtype=float32

Each run is exported by export_model.py in the default dtype, in bfloat16 and, if it trained LoRA, as the adapter. Their
losses on the run's validation windows are computed in fp32, so that only the stored numbers differ. The last rows are
of the checkpoint's own weights, cast or rounded to fewer bits in the computation. The gain of a run is the loss of
init_from minus that of the checkpoint, and `kept` is the share of it that a row still has.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
from safetensors.torch import load_file

import data
from huggingface import finetune
from runtime import checkpoint
from system import errors

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@torch.no_grad()
def loss_of(model, mixture, windows, device='cpu'):
    """Mean cross-entropy over the first windows of the validation split."""
    model.eval()
    nats = tokens = 0
    for batch, _ in data.eval_batches(mixture, windows, 1, 0, 1, device):
        nats += model(*batch)[1].item()
        tokens += int((batch[1] >= 0).sum())
    return nats / tokens


def empty_model(pretrained, dtype=torch.float32):
    with torch.device('meta'):
        model = finetune.for_training(pretrained, dtype)
    return model.to_empty(device='cpu')


def of_folder(folder, block_size):
    model = empty_model(pretrained := finetune.Pretrained(folder, block_size))
    finetune.load(model, pretrained)
    return model


def of_run(out_dir, state, weights, dtype=torch.float32):
    model = empty_model(finetune.Pretrained.from_run(out_dir, state), dtype)
    own = model.state_dict()
    for name, tensor in weights.items():
        own[name].copy_(tensor)
    return model


def export(out_dir, folder, *arguments):
    command = [sys.executable, 'export_model.py', f'--out_dir={out_dir}', f'--to={folder}', *arguments]
    lines = subprocess.run(command, cwd=REPO, check=True, capture_output=True, text=True).stdout.splitlines()
    print(*(f'    {line}' for line in lines if ' moved' in line), sep='\n')
    return folder


def size_of(folder, end='.safetensors'):
    return sum(entry.stat().st_size for entry in os.scandir(folder) if entry.name.endswith(end))


def rounded_to_tf32(tensor):
    """A matrix with mantissas rounded to 10 bits, as an H100 rounds the inputs of a matmul in TF32."""
    if tensor.dim() < 2:
        return tensor
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def variants(out_dir, weights, state, folder):
    """Yields (name, model, size of its files) of the run itself, and then of all that can be made of it."""
    block_size, is_lora = state['config']['block_size'], bool(state['config']['lora_rank'])
    yield 'checkpoint', of_run(out_dir, state, weights), ''
    for name, arguments in (('default export', []), ('export --dtype=bfloat16', ['--dtype=bfloat16'])):
        exported = export(out_dir, f'{folder}/exported{len(arguments)}', *arguments)
        yield name, of_folder(exported, block_size), size_of(exported)
    if is_lora:
        exported = export(out_dir, f'{folder}/adapter', '--adapter')
        adapter = load_file(f'{exported}/adapter_model.safetensors')
        adapter = {name.removeprefix('base_model.model.').removesuffix('.weight'): t for name, t in adapter.items()}
        yield 'export --adapter', of_run(out_dir, state, weights | adapter), size_of(exported)
        cast = of_run(out_dir, state, weights, torch.bfloat16)
        for parameter in cast.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        yield 'cast to bfloat16, LoRA apart', cast, ''
    else:
        yield (
            'matrices rounded to TF32',
            of_run(out_dir, state, {n: rounded_to_tf32(t) for n, t in weights.items()}),
            '',
        )
    yield 'computed under bfloat16 autocast', of_run(out_dir, state, weights, torch.bfloat16), ''


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument('runs', nargs='+', help='out_dirs of runs that have fine-tuned the same folder')
parser.add_argument('--windows', type=int, default=40, help='validation windows that are read')
given = parser.parse_args()
errors.report_errors()
base_loss = None

for out_dir in map(os.path.abspath, given.runs):
    with contextlib.redirect_stdout(sys.stderr):
        weights, state = checkpoint.load_weights(checkpoint.choose_to_read(out_dir))
    run, losses = state['config'], {}  # {dtype and sums of the weights: loss}: equal models are measured once
    mixture = data.open_mixture(run, 'val')
    if base_loss is None:
        base_loss = loss_of(of_folder(run['init_from'], run['block_size']), mixture, given.windows)
        print(f'{"init_from":<34} {base_loss:.4f}', flush=True)
    print(f'{out_dir}: {state["step"]} steps at {run["learning_rate"]}, lora_rank={run["lora_rank"]}', flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, model, size in variants(out_dir, weights, state, folder):
            mark = (model.compute_dtype, *(parameter.double().sum().item() for parameter in model.parameters()))
            if mark not in losses:
                losses[mark] = loss_of(model, mixture, given.windows)
            kept = (base_loss - losses[mark]) / (base_loss - next(iter(losses.values())))
            print(f'{name:<34} {losses[mark]:.4f} {kept:7.1%} {size and f"{size / 1e6:.0f} MB"}', flush=True)
