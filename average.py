"""
Average the last checkpoints of a run, which comes close to a decay of its learning rate, without one.

    python train_ddp.py config/mine.py --lr_schedule=constant --checkpoint_interval=100 --keep_checkpoints=8
    python average.py --out_dir=out/mine --last=8            # -> out/mine-average
    python sample.py --out_dir=out/mine-average              # so do evaluate.py, export_model.py and --init_from

Say d_1, ..., d_n are the updates between the first checkpoint w_0 and the last one, w_n. The mean of all checkpoints is

    (w_0 + ... + w_n) / (n+1)  =  w_0 + sum_i  (1 - i / (n+1)) d_i

so that an update counts the less the later it was: with coefficients that fall linearly, like those of a linear decay
of the learning rate (arXiv 2507.17634; the updates of such a run differ, of course). A run need not know beforehand
where it ends, and can resume its last checkpoint as if nothing had happened. docs/optimizers.md says what it gave.
"""

import os
import shlex
import shutil
from types import SimpleNamespace

from configurator import configure


# --- KNOBS ------------------------------------------------------------------------------------------------------------
class Config:
    out_dir = 'out/quickstart'  # the run [path]
    last = 8  # how many of its checkpoints, from the newest backwards [>= 2]
    steps: list[int] | None = None  # the checkpoints of these steps instead: 800,900,1000
    to: str | None = None  # the out_dir to write; None = out_dir with -average behind it [path]


# ----------------------------------------------------------------------------------------------------------------------
config, explicit = configure(Config)  # before `import torch`, so --help is quick

import torch
from torch import nn

from huggingface.pretrained import copy_files
from runtime import checkpoint
from runtime.checkpoint_index import read_index, read_into
from runtime.checkpoint_saver import Saver
from system import devices, errors
from system.files import rename_durably
from text.tokenizer import KEPT

errors.report_errors()
out_dir = config.out_dir.rstrip('/')
config.to = config.to or f'{out_dir}-average'
if os.path.isdir(config.to) and os.listdir(config.to):
    raise ValueError(f'{config.to} exists: delete it, or name another folder with --to=FOLDER')

# --- CHECKPOINTS ------------------------------------------------------------------------------------------------------
newest = checkpoint.choose_to_read(out_dir)
there = sorted(int(path[-8:]) for path in checkpoint.checkpoints_in(os.path.dirname(newest)))
steps = sorted({*(config.steps or there[-config.last :])})
if len(steps) < 2 or (not config.steps and len(steps) < config.last):
    wanted = len(config.steps) if config.steps else config.last
    advice = 'train_ddp.py --keep_checkpoints=N keeps more' if not config.steps else 'name at least two'
    raise ValueError(f'{wanted} checkpoints of {out_dir}: there are {", ".join(map(str, there))}; {advice}')
paths = [checkpoint.choose_to_read(out_dir, step) for step in steps]
indices = [{key: entry for key, entry in read_index(path).items() if key.startswith('model.')} for path in paths]
for path, index in zip(paths, indices, strict=True):
    if {key: entry[:2] for key, entry in index.items()} != {key: entry[:2] for key, entry in indices[-1].items()}:
        raise ValueError(f'{path} has other weights than {paths[-1]}: expected those of one model')

# --- THE MEAN ---------------------------------------------------------------------------------------------------------
# One tensor after the other, in float64: two models never lie in memory. A router's bias and load are averaged with the
# weights that they were found with.
mean = {key: entry.empty() for key, entry in indices[-1].items()}
for key, tensor in mean.items():
    read_into(paths[-1], indices[-1], {key: tensor})
    total, one = tensor.double(), torch.empty_like(tensor)
    for path, index in zip(paths[:-1], indices[:-1], strict=True):
        read_into(path, index, {key: one})
        total += one
    tensor.copy_(total / len(paths))

# --- A RUN OF ITS OWN, WITHOUT THE OPTIMIZER'S STATE ------------------------------------------------------------------
state = checkpoint.read_state(paths[-1]) | {'averaged': steps}
state = {key: value for key, value in state.items() if key not in ('best', 'reference', 'diloco')}
unfinished = f'{config.to}.tmp'
shutil.rmtree(unfinished, ignore_errors=True)
os.makedirs(unfinished)
if os.path.isdir(kept := os.path.join(out_dir, KEPT)):  # tokenizer and chat template
    copy_files(kept, os.path.join(unfinished, KEPT))
devices.join_ranks(timeout_s=600, device=torch.device('cpu'))
saver, no_optimizer = Saver(unfinished, keep=1, say=lambda line: None), SimpleNamespace(state={})
saver.save(state['step'], nn.Module(), no_optimizer, state, more=mean)
rename_durably(unfinished, config.to)
print(f'{config.to}: the mean of the checkpoints of steps {", ".join(map(str, steps))}')
print(f'next: python sample.py --out_dir={shlex.quote(config.to)}')
