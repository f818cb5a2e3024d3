"""
The folder of a Hugging Face model: finding it, and reading rows of its weights out of mapped files.

    folder = find_folder('models/Llama-3.2-1B')  # or OWNER/NAME of a model in the hub's local cache
    weights = Weights(folder)  # its safetensors files
    found, lacking = weights.find(model)  # which tensor of the files belongs to which name of the model
    local, rows = local_rows(parameter)  # this rank's shard of a parameter and its rows; all of it if it is not sharded
    local.copy_(weights.read(found['model.norm.weight'], rows))

A model may have more rows in its embedding and head than its folder: those of tokens that its user has added. They
begin as the mean of the others, about as transformers' resize_token_embeddings() makes them.
"""

import contextlib
import hashlib
import itertools
import math
import os
import re
import shlex

import torch
from torch.distributed.tensor import DTensor

from model import is_load
from pieces import is_finite
from system.files import bare_name, is_run, meant, read_json, refuse_lfs_pointer
from text.tokenizer import KEPT

SINGLE, INDEX = 'model.safetensors', 'model.safetensors.index.json'  # one file, or the list of several
ROWS_AT_ONCE = 4096  # rows that are compared at a time
ALIKE = 0.01  # two rows that differ by less, as a share of a row's usual length, tell no tokens apart
SMALL, SAMPLED = 2**16, 8  # a fingerprint reads tensors of so many numbers whole, and so many rows of larger ones


def find_folder(init_from, key='init_from'):
    """The folder that init_from names: a path, of a run what it has kept, or OWNER/NAME of a model in the hub's local
    cache (HF_HOME). key: the name of the key for the message, if it is another one. Raises ValueError with the command
    that fetches the model, or the name that was meant."""
    if is_run(init_from):
        return os.path.join(init_from, KEPT)
    if found := meant(init_from, key):
        raise ValueError(f'{key}={init_from}: {found}')
    if os.path.isdir(init_from):
        return init_from
    if re.fullmatch(r'[\w.-]+/[\w.-]+', init_from):
        os.environ.setdefault('HF_HUB_OFFLINE', '1')
        import huggingface_hub

        with contextlib.suppress(OSError, ValueError):  # its LocalEntryNotFoundError is both
            return huggingface_hub.snapshot_download(init_from, local_files_only=True)
    hub_id = init_from if '/' in init_from and not init_from.startswith(('.', '/', 'models/', 'out/')) else 'OWNER/NAME'
    advice = f'`python download_model.py --model={hub_id}` where there is internet'
    beside = os.path.dirname(init_from) or '.'
    if os.path.isdir(beside):
        advice += f'; {beside} holds: {", ".join(sorted(os.listdir(beside))[:10]) or "nothing"}'
    raise ValueError(f'{key}={init_from}: no such folder, nor model in the cache of the hub: {advice}')


class Weights:
    """The tensors of a folder's safetensors files, mapped, so that only the rows that are asked for are read."""

    def __init__(self, folder, key='init_from'):
        """key: the name of the key that names the folder, for messages. Raises ValueError if there are no weights, with
        the command that checks or fetches them."""
        self.folder, self.files = folder, {}
        self.added, self.means = {}, {}  # {name in the files: rows that the model has more}, {it: the mean of its rows}
        advice = f'`python download_model.py --model={folder}` checks the folder, with --model=OWNER/NAME it fetches'
        if not os.path.isdir(folder):
            raise ValueError(f'{key}={folder}: its weights are needed to start, and it is not there; {advice}')
        names = os.listdir(folder)
        if SINGLE in names:  # first, as transformers looks for it
            self.file_of = dict.fromkeys(self.open(SINGLE).keys(), SINGLE)
        elif INDEX in names:
            listed = self.files_of_index()
            if absent := sorted(listed - set(names)):
                raise ValueError(f'{key}={folder}: {INDEX} lists {absent[0]}, which is missing; {advice}')
            # The files decide where tensors are, as in transformers, and not the index.
            self.file_of = {tensor: name for name in sorted(listed) for tensor in self.open(name).keys()}
        else:
            pickles = [name for name in names if name.endswith(('.bin', '.pth', '.pt'))]
            unread = f' ({pickles[0]} is a pickle, which can run code, and is not read)' if pickles else ''
            raise ValueError(f'{key}={folder}: no weights, {SINGLE} or {INDEX}, in it{unread}; {advice}')

    def files_of_index(self):
        """The names of the files among which the tensors are divided."""
        path = os.path.join(self.folder, INDEX)
        refuse_lfs_pointer(path)
        mend = f'`python download_model.py --model={shlex.quote(str(self.folder))}` names what differs'
        return set(read_json(path, {'weight_map': {str: bare_name}}, mend)['weight_map'].values())

    def open(self, name):
        from safetensors import SafetensorError, safe_open

        if name not in self.files:
            path = os.path.join(self.folder, name)
            refuse_lfs_pointer(path)
            try:
                self.files[name] = safe_open(path, framework='pt')
            except SafetensorError as error:
                advice = f'`python download_model.py --model={self.folder}` names what differs'
                raise ValueError(f'{path}: damaged ({error}); {advice}') from error
        return self.files[name]

    def read(self, name, rows=slice(None)):
        """Some rows of a tensor, or all of it, as it is stored. Raises ValueError for numbers that are not finite: a
        run would go on from NaN, and a score would be made of it."""
        file = self.open(self.file_of[name])
        n_rows = self.shape(name)[0] if self.shape(name) else 0  # with those that are added
        if name in self.added:
            first, end, _ = rows.indices(n_rows)
            n_stored = n_rows - self.added[name]
            rows = slice(min(first, n_stored), min(end, n_stored))
        values = file.get_slice(name)[rows] if n_rows else file.get_tensor(name)
        refuse_not_finite(name, values, os.path.join(self.folder, self.file_of[name]))
        if name in self.added and end > n_stored:
            n_new = end - max(first, n_stored)
            values = torch.cat((values, self.mean(name).to(values.dtype).expand(n_new, *values.shape[1:])))
        return values

    def mean(self, name):
        """The mean of the rows of a tensor in the files, fp32."""
        if name not in self.means:
            part, n_rows = self.open(self.file_of[name]).get_slice(name), self.shape(name)[0] - self.added[name]
            blocks = (part[first : first + ROWS_AT_ONCE] for first in range(0, n_rows, ROWS_AT_ONCE))
            self.means[name] = (sum(block.double().sum(0) for block in blocks) / n_rows).float()
        return self.means[name]

    def sets_apart(self, name, row):
        """Whether a row is another one than those beside it, as it is of a token that has been learned. Rows of tokens
        that were in no text are often zero, like Llama 3's reserved ones, or noise that weight decay has shrunk."""
        if len(self.shape(name)) < 2:  # the bias of a head
            return True
        rows = self.read(name, slice(max(0, row - 1), row + 2)).float()
        usual = self.read(name, slice(ROWS_AT_ONCE)).float().norm(dim=1).mean()
        distances = (rows - rows[min(row, 1)]).norm(dim=1)  # one of them is 0: that to itself
        return bool(distances.sort().values[1] > ALIKE * usual)

    def shape(self, name):
        """The shape of a tensor, with the rows that the model has more."""
        shape = tuple(self.open(self.file_of[name]).get_slice(name).get_shape())
        return (shape[0] + self.added[name], *shape[1:]) if name in self.added else shape

    def nbytes(self, name):
        return math.prod(self.shape(name)) * self.read(name, slice(0)).element_size()

    def dtype(self, name):
        """A tensor's dtype as safetensors calls it: 'BF16', 'F32', ..."""
        return self.open(self.file_of[name]).get_slice(name).get_dtype()

    def check_shape(self, name, shape):
        """Raise ValueError if a tensor has another shape than the configuration says."""
        if self.shape(name) != tuple(shape):
            found = f'has the shape {self.shape(name)}, config.json asks for {tuple(shape)}'
            raise ValueError(f'{self.folder}: {name} {found}')

    def fingerprint(self):
        """A hash that identifies these weights: of all names, types and shapes, and of a few rows of each tensor.
        Reading all of a large model would take as long as loading it."""
        digest = hashlib.sha256()
        for name in sorted(self.file_of):
            part, shape = self.open(self.file_of[name]).get_slice(name), self.shape(name)
            digest.update(f'{name} {part.get_dtype()} {shape}'.encode())
            if math.prod(shape) <= SMALL:
                pieces = [self.read(name)]
            else:
                rows = (shape[0] * number // SAMPLED for number in range(SAMPLED))
                pieces = [part[row : row + 1] for row in rows]
            for piece in pieces:
                digest.update(piece.contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()[:16]

    def find(self, model):
        """({name in the model: name in the files}, names that the files lack). Files may omit the prefix of the base
        model, as GPT-2's do, and hold a tied weight under any of its names."""
        found, lacking = {}, []
        for name, aliases in tensors_to_load(model).items():
            if stored := self.stored_as(model, aliases):
                found[name] = stored[0]
            elif not name.endswith(('.lora_A', '.lora_B')):
                lacking.append(name)
        rows, wanted = rows_in_folder(self.folder), getattr(model.config.get_text_config(), 'vocab_size', 0)
        for name in names_of_tokens(model) if rows and wanted > rows else ():
            if name in found and self.shape(found[name])[0] == rows:
                self.added[found[name]] = wanted - rows
        return found, lacking

    def stored_as(self, model, names):
        """The names in the files of tensors with these names in the model: for each, the first form that is found."""
        prefix, stored = model.base_model_prefix + '.', []
        for name in names:
            forms = (name, name.removeprefix(prefix), prefix + name)
            stored += [form for form in forms if form in self.file_of][:1]
        return stored

    def differ(self, model, names):
        """Whether the files hold several tensors for one parameter with these names, with different numbers."""
        for one, other in itertools.pairwise(self.stored_as(model, names)):
            if self.shape(one) != self.shape(other):
                return True
            for first in range(0, self.shape(one)[0], ROWS_AT_ONCE):
                rows = slice(first, first + ROWS_AT_ONCE)
                if not torch.equal(self.read(one, rows).float(), self.read(other, rows).float()):
                    return True
        return False


def rows_in_folder(folder):
    """The rows of the embedding by the config.json of a folder; None if it does not say."""
    try:
        content = read_json(os.path.join(folder, 'config.json'), {'text_config?': (dict, None)})
    except (OSError, ValueError):
        return None
    rows = (content.get('text_config') or content).get('vocab_size')
    return rows if isinstance(rows, int) else None


def names_of_tokens(model):
    """The first names of the parameters of a model that have a row for each token: of its embedding and its head."""
    modules = [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None]
    ours = {parameter for module in modules for parameter in module.parameters(recurse=False)}
    return [name for name, parameter in model.named_parameters() if parameter in ours]


def refuse_not_finite(name, values, where):
    """Raise ValueError if a tensor holds NaN or infinity. where: the file or folder that it was read from."""
    if values.dtype.itemsize == 1 and values.is_floating_point():  # float8, for which torch has no minimum
        values = values.float()
    if not is_finite(values):
        bad = values.isfinite().logical_not()
        raise ValueError(
            f'{where}: {name} is not finite ({bad.sum():,} of {bad.numel():,} numbers): copy or download it again '
            '(download_model.py compares checksums), or take weights from before its training diverged'
        )


def tensors_to_load(model):
    """{first name: all names} of the parameters, and of the buffers that files hold."""
    names = {}
    for kind in (model.named_parameters, model.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            module, _, attribute = name.rpartition('.')
            if attribute not in model.get_submodule(module)._non_persistent_buffers_set and not is_load(name):
                names.setdefault(tensor, []).append(name)
    return {aliases[0]: aliases for aliases in names.values()}


def local_rows(tensor):
    """(this rank's shard of a parameter as a plain tensor, the slice of the whole's rows that it is)."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), slice(None)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor._local_tensor.detach(), slice(offset[0], offset[0] + shape[0])
