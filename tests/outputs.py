"""Reads what a run has left in its out_dir: rows of metrics.jsonl, checkpoints, weights."""

import contextlib
import json
import os
import shutil
from pathlib import Path

from benchmarks.runs import column, metrics  # noqa: F401 -- tests import all that reads a run from here


def last_step(out_dir):
    """The step of the last complete row; reads only the end of the file."""
    with contextlib.suppress(FileNotFoundError), open(Path(out_dir, 'metrics.jsonl'), 'rb') as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        lines = file.read().split(b'\n')[:-1]
        return json.loads(lines[-1])['step'] if lines else 0
    return 0


def complete(out_dir):
    """Steps of the checkpoints that have a manifest, in order."""
    return sorted(int(path.parent.name[5:]) for path in Path(out_dir).glob('checkpoints/step_????????/manifest.json'))


def names_of_checkpoints(out_dir):
    folder = Path(out_dir, 'checkpoints')
    return os.listdir(folder) if folder.is_dir() else []


def checkpoint_of(out_dir, step):
    return str(Path(out_dir, 'checkpoints', f'step_{step:08}'))


def as_of_step(step, out_dir, copy, rows=None):
    """Make `copy` a run as it was when it had saved `step`, and return it.

    rows: as if it had been killed later, after so many rows, while it wrote the next one.
    """
    shutil.copytree(out_dir, copy)
    for later in [saved for saved in complete(copy) if saved > step]:
        shutil.rmtree(checkpoint_of(copy, later))
    Path(copy, 'DONE').unlink()
    if rows:
        lines = Path(copy, 'metrics.jsonl').read_text().splitlines(keepends=True)
        Path(copy, 'metrics.jsonl').write_text(''.join(lines[:rows]) + lines[rows][:20])
    return copy


def weights_of(out_dir, step):
    from runtime import checkpoint

    return checkpoint.load_weights(checkpoint_of(out_dir, step))[0]


def tensors_of(path):
    """All tensors of a checkpoint, {'model.NAME' or 'optim.NAME.SLOT': tensor}."""

    from runtime import checkpoint

    index = checkpoint.read_index(path)
    tensors = {key: entry.empty() for key, entry in index.items()}
    checkpoint.read_into(path, index, tensors)
    return tensors


def assert_same_weights(out_dir, reference, step, but=None):
    """but: tensors whose names end like this need not be equal, only be in both."""
    import torch

    ours, theirs = weights_of(out_dir, step), weights_of(reference, step)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        if but and name.endswith(but):
            continue
        assert torch.equal(ours[name], theirs[name]), f'{name} of {out_dir} is not bit-equal to that of {reference}'


def assert_same_rows(out_dir, reference, keys=('step', 'loss', 'val_loss', 'tokens')):
    ours, theirs = ([{key: row.get(key) for key in keys} for row in metrics(path)] for path in (out_dir, reference))
    assert ours == theirs, next((pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]), 'lengths')
