"""
Download a model from the Hugging Face hub into a plain folder, or check such a folder. Needs no GPU.

    python download_model.py --model=meta-llama/Llama-3.2-3B-Instruct     # into models/Llama-3.2-3B-Instruct
    python download_model.py --model=models/Llama-3.2-3B-Instruct         # check it, without network
    python download_model.py --model=Qwen/Qwen3-0.6B --to=/scratch/qwen --revision=main

Only what training needs is downloaded: configuration, tokenizer, license, safetensors, and the Python files of models
that bring their own code, which nothing runs without trust_remote_code. If the script is killed half-way, the same
command continues where it stopped; if you run it later, it fetches whatever is missing or damaged. The size and hash of
every file are compared with the hub's, and kept in download.json, which is written last. The weights are never loaded
into memory as a whole.
"""

from configurator import configure


# --- KNOBS ------------------------------------------------------------------------------------------------------------
class Config:
    model: str | None = None  # OWNER/NAME on the hub, or a folder to check [path]
    to: str | None = None  # the folder to download into; None = models/NAME [path]
    revision = 'main'  # branch, tag or commit on the hub


# ----------------------------------------------------------------------------------------------------------------------
config, _ = configure(Config)

import contextlib
import datetime
import fcntl
import fnmatch
import hashlib
import json
import math
import os
import re
import shlex
import shutil
from pathlib import Path

from tqdm import tqdm

from layout import counted
from system.errors import one_line, report_errors
from system.files import bare_name, check_form, merge_command, no_link, parse_json, read_json, sha256_of, write_file

report_errors()

REPO = r'[\w.-]+(/[\w.-]+)?'  # as the hub calls one
RECORD = 'download.json'  # the repository, its commit, and the size and sha256 of every file
UNFINISHED = 'download.unfinished'  # names the repository and commit while files are being fetched
SINGLE, INDEX = 'model.safetensors', 'model.safetensors.index.json'  # the weights in one file, or the index of several
# What is fetched beside the weights. Only from the repository's root, since folders such as original/ and onnx/ have
# the weights a second time.
NEEDED = ['config.json', 'generation_config.json', 'tokenizer*', 'special_tokens_map.json', 'added_tokens.json']
NEEDED += ['vocab.json', 'vocab.txt', 'merges.txt', 'spiece.model', 'tekken.json', 'chat_template*', 'LICENSE*']
NEEDED += ['NOTICE*', 'USE_POLICY*', '*.py']  # files that licenses refer to; code that only trust_remote_code=True runs
TOKENIZERS = [{'tokenizer.json'}, {'tokenizer.model'}, {'vocab.json', 'merges.txt'}, {'vocab.txt'}]
TOKENIZERS += [{'spiece.model'}, {'tekken.json'}]  # a tokenizer is any one of these sets of files
WEIGHTS = {'weight_map': {str: bare_name}}  # the form of the index
BLOCK_BYTES = 1 << 24  # fetched per request; a kill loses at most this much
PICKLES = ('.bin', '.pth', '.pt', '.ckpt')
DTYPES = {'BF16': 'bfloat16', 'F16': 'float16', 'F32': 'float32', 'F64': 'float64'}  # safetensors' names -> torch's

# --- FILES ------------------------------------------------------------------------------------------------------------


def read_object(path, form):
    """The object in a JSON file; {} if there is no file. Raises ValueError if it does not have the form."""
    if not path.exists():
        return {}
    try:
        return parse_json(path.read_bytes(), form, path)
    except ValueError as error:  # mend() only now: once it closes download.unfinished, this process's lock is gone
        raise ValueError(f'{error}; {mend(path.parent)}') from None


def origin(folder):
    """The {'repo', 'revision'} from which a folder was or is being downloaded; {} if they are not known."""
    for name in (UNFINISHED, RECORD):  # the first is the newer one, if both exist
        with contextlib.suppress(OSError, ValueError):  # missing, or damaged
            found = read_json(folder / name, {'repo': str, 'revision': bare_name})
            if re.fullmatch(REPO, found['repo']):
                return {'repo': found['repo'], 'revision': found['revision']}
    return {}


def mend(folder):
    """The end of an error message about a damaged folder: the command that repairs it."""
    known = origin(folder)
    if not known:
        return 'copy it again, or download: `python download_model.py --model=OWNER/NAME --to=NEW_FOLDER`'
    command = f'python download_model.py --model={known["repo"]} --to={shlex.quote(str(folder))}'
    return f'mend it where there is internet: `{command} --revision={known["revision"]}`'


def progress(what, total, done=0):
    """A progress bar in bytes, on stderr, if that is a terminal."""
    return tqdm(desc=what, total=total, initial=done, unit='B', unit_scale=True, disable=None, leave=False)


def verified_sha256(path):
    """The sha256 of a file, with a progress bar."""
    with progress('verifying', path.stat().st_size) as bar:
        return sha256_of(path, bar)


def in_words(size):
    return f'{size / 1e9:.2f} GB' if size >= 1e7 else f'{size:,} bytes'


# --- CHECK A FOLDER ---------------------------------------------------------------------------------------------------


def weights_among(names, place, way_out):
    """SINGLE or INDEX, whichever is among the file names of a model. Raises ValueError if the configuration, the
    tokenizer or the weights are missing. place: where the files are. way_out: the end of the error message."""
    if 'config.json' not in names and 'adapter_config.json' in names:
        merge = f"{merge_command(place)}, and copy the tokenizer's files there"
        raise ValueError(f'{place} is an adapter of peft, not a model: merge it into its model, {merge}')
    if 'config.json' not in names:
        raise ValueError(f'{place} has no config.json: {way_out}')
    if not any(files <= set(names) for files in TOKENIZERS):
        raise ValueError(f'{place} has no tokenizer ({" or ".join(map(min, TOKENIZERS))}): {way_out}')
    for name in (SINGLE, INDEX):  # in the order in which transformers looks for them
        if name in names:
            return name
    pickles = [f', only {name}, which can run code when it is read' for name in names if name.endswith(PICKLES)]
    raise ValueError(f'{place} has no weights ({SINGLE} or {INDEX}){min(pickles, default="")}: {way_out}')


def read_header(path):
    """{tensor: (shape, dtype)} of a safetensors file. Raises ValueError if its size is not the one in its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework='numpy') as file:  # maps the file and reads its header only
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {name: (tensor.get_shape(), tensor.get_dtype()) for name, tensor in slices.items()}
    except SafetensorError as error:
        raise ValueError(f'{path} is cut short or no safetensors file ({error}): {mend(path.parent)}') from None


def check(folder, compare=True):
    """Print what model is in the folder. Raises ValueError unless it is complete and has a tokenizer.
    compare: also read every file that download.json lists, and compare its sha256."""
    names = {path.name for path in folder.iterdir()}
    if UNFINISHED in names:
        raise ValueError(f'{folder}: its download has not finished: {mend(folder)}')
    weights = weights_among(names, folder, mend(folder))
    model_config = read_object(folder / 'config.json', {'architectures?': ([str], None)})
    placed = read_object(folder / INDEX, WEIGHTS).get('weight_map', {})  # tensor -> file
    parameters, dtypes, size = 0, set(), 0
    shards = sorted({SINGLE} if weights == SINGLE else set(placed.values()))
    for name in shards:
        if name not in names:
            raise ValueError(f'{folder / name}, which {INDEX} lists, is missing: {mend(folder)}')
        tensors = read_header(folder / name)
        missing = [tensor for tensor, place in placed.items() if place == name and tensor not in tensors]
        if missing:
            raise ValueError(f'{folder / name} lacks {missing[0]}, which {INDEX} puts there: {mend(folder)}')
        parameters += sum(math.prod(shape) for shape, _ in tensors.values())
        dtypes |= {DTYPES.get(dtype, dtype) for _, dtype in tensors.values()}
        size += (folder / name).stat().st_size

    recorded = read_object(folder / RECORD, {'files': {bare_name: {'size': int, 'sha256': str}}}).get('files', {})
    for name, facts in recorded.items():
        there = (folder / name).stat().st_size if name in names else 'no'
        if there != facts['size']:
            raise ValueError(f'{folder / name} has {there} bytes, {RECORD} says {facts["size"]}: {mend(folder)}')
        if compare and verified_sha256(folder / name) != facts['sha256']:
            raise ValueError(f'{folder / name} is damaged, its sha256 is not the one in {RECORD}: {mend(folder)}')
    class_line = compare_with_class(folder)
    kind = ', '.join(model_config.get('architectures') or ['unknown architecture'])
    print(f'{folder}: {kind}, {parameters:,} parameters in {" and ".join(sorted(dtypes))}')
    print(f'weights: {in_words(size)} in {len(shards)} safetensors file{"s" * (len(shards) > 1)}')
    if recorded and (known := origin(folder)):
        print(f'{known["repo"]} at {known["revision"]}: {counted(len(recorded), "file")}, sizes and sha256 as recorded')
    else:
        print(f'there is no {RECORD}: the sizes agree with the headers, the numbers cannot be compared')
    print(class_line)


def compare_with_class(folder):
    """Compare names and shapes of the tensors with the class that config.json names, made on the meta device, where it
    takes no memory. Returns a line that says what was found. Raises ValueError if they differ."""
    import torch

    from huggingface.files import Weights, tensors_to_load
    from huggingface.pretrained import Pretrained

    try:
        with torch.device('meta'):
            model = Pretrained(str(folder)).empty_model()
    except Exception as error:  # a class may raise anything
        return f'names and shapes are not compared with a class: {one_line(error)}'
    weights, expected = Weights(str(folder)), dict(model.named_buffers()) | dict(model.named_parameters())
    found, lacking = weights.find(model)
    aliases = {alias for names in tensors_to_load(model).values() for alias in names}
    unused = sorted(set(weights.file_of) - set(found.values()) - aliases)
    wrong = {
        name: weights.shape(place) for name, place in found.items() if weights.shape(place) != expected[name].shape
    }
    # Some mixtures store each expert by itself, and compute with one tensor of all of them. Their files have as many
    # numbers as the class needs, but under other names.
    needed, numbers = sum(expected[name].numel() for name in lacking), sum(map(math.prod, map(weights.shape, unused)))
    if numbers < needed:
        wrong |= dict.fromkeys(lacking, f'{numbers:,} of {needed:,} numbers under other names' if unused else 'none')
    if wrong:
        lines = [f'{name}: expected {tuple(expected[name].shape)}, found {shape}' for name, shape in wrong.items()]
        more = f' and {len(lines) - 3} more' if len(lines) > 3 else ''
        mismatch = f'{folder}: the weights are not those of {type(model).__name__} with its config.json'
        raise ValueError(f'{mismatch}: {"; ".join(lines[:3])}{more}: {mend(folder)}')
    said = f'names and shapes are those of {type(model).__name__}: {len(found) + len(lacking)} tensors'
    return said + (f'; it does not use {len(unused)} more, as {unused[0]}' if unused and not lacking else '')


# --- DOWNLOAD ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def one_line_errors(repo, folder):
    """Turn errors of huggingface_hub, of its HTTP library and of the disk into one line that says what to do."""
    from huggingface_hub import errors

    try:
        yield
    except Exception as error:
        if isinstance(error, errors.GatedRepoError):  # first, since it is a kind of RepositoryNotFoundError
            page = f'https://huggingface.co/{repo}'
            line = f'accept the license on {page}, run `hf auth login` with a token of that account, then this again'
        elif isinstance(error, errors.RepositoryNotFoundError):
            line = f'model={repo}: no folder, and not on the Hugging Face hub (a private one wants `hf auth login`)'
        elif isinstance(error, errors.RevisionNotFoundError):
            line = f'revision={config.revision}: {repo} has no such branch, tag or commit: try --revision=main'
        elif isinstance(error, errors.HfHubHTTPError):
            status = error.response.status_code
            advice = 'renew the token with `hf auth login`' if status in (401, 403) else 'run this again later'
            line = f'the Hugging Face hub answered {status} for {repo}: {advice}'
        elif isinstance(error, OSError) and error.errno is not None:  # the disk's, not the network's
            line = f'{folder}: {error.strerror}: make room, or give another folder with --to=FOLDER'
        else:
            # HTTP libraries quote a malformed header in their message, and the user's token is in a header.
            reason = re.sub(r'Bearer.*', 'Bearer ***', one_line(error))
            line = f'the Hugging Face hub cannot be reached ({reason}): run this on a login node, or where internet is'
        raise ValueError(line) from error


def sha256_if_whole(path, listed):
    """The file's sha256 if its size and hash are those that the hub lists; otherwise None."""
    if not path.is_file() or path.stat().st_size != listed.size:
        return None
    sha256 = verified_sha256(path)
    if listed.lfs:
        return sha256 if sha256 == listed.lfs.sha256 else None
    content = path.read_bytes()  # small files are in git itself, whose hash covers a header and the content
    git_hash = hashlib.sha1(b'blob %d\0' % len(content) + content).hexdigest()
    return sha256 if git_hash == listed.blob_id else None


def check_listed(listed, repo):
    """Raise ValueError unless what the hub says of a file can be true: its name and hash become names of files here."""
    facts = {'name': listed.rfilename, 'size': listed.size, 'hash': listed.lfs.sha256 if listed.lfs else listed.blob_id}
    check_form(facts, {'name': bare_name, 'size': int, 'hash': bare_name}, f'{repo}, as the hub lists it')


def part_of(listed, folder):
    """The path of the file while it downloads. Its hash is in the name, so that a download never continues another
    version of the file."""
    return folder / f'{listed.rfilename}.{(listed.lfs.sha256 if listed.lfs else listed.blob_id)[:16]}.part'


def fetch(repo, commit, listed, folder, bar):
    """Fetch one file, or the rest of it, and return its sha256. Raises ValueError if that is not what the hub lists."""
    from huggingface_hub import HfFileSystem

    # Since huggingface_hub 2, hf_hub_download starts from the beginning even if a killed run had fetched a part of the
    # file. A file of HfFileSystem can be read from any position, with one request per read.
    path, part = f'{repo}@{commit}/{listed.rfilename}', part_of(listed, folder)
    with one_line_errors(repo, folder):
        remote = HfFileSystem().open(path, block_size=BLOCK_BYTES, cache_type='none')
        with remote, open(part, 'ab', opener=no_link) as file:
            remote.seek(file.tell())
            while file.tell() < listed.size and (block := remote.read(BLOCK_BYTES)):
                file.write(block)
                bar.update(len(block))
            file.flush()
            os.fsync(file.fileno())  # a full disk or quota may raise only here
    sha256 = sha256_if_whole(part, listed)
    if sha256 is None:
        part.unlink()
        raise ValueError(f'{folder / listed.rfilename} arrived damaged and was removed: run this again')
    os.replace(part, folder / listed.rfilename)
    bar.write(f'{listed.rfilename}: {in_words(listed.size)}, verified')
    return sha256


def download(repo, folder):
    """Make the folder equal to what the hub has at `revision`: fetch what is missing or damaged, then write
    download.json. Raises ValueError if the hub or the disk refuses, and if the folder holds anything else."""
    from huggingface_hub import HfApi

    if folder.is_dir() and any(folder.iterdir()) and origin(folder).get('repo') != repo:
        holds = origin(folder).get('repo', 'files that were not downloaded by this script')
        raise ValueError(f'{folder} holds {holds}; it was left as it is: give another folder with --to=FOLDER')
    with one_line_errors(repo, folder):  # with a timeout (seconds), as some compute nodes drop packets silently
        info = HfApi().model_info(repo, revision=config.revision, files_metadata=True, timeout=30)
        listing = {listed.rfilename: listed for listed in info.siblings}
    bare_name(info.sha, f'{repo}, as the hub lists it: sha')
    names = {weights_among(listing, repo, 'choose another --model')}
    names |= {name for name in listing for pattern in NEEDED if '/' not in name and fnmatch.fnmatchcase(name, pattern)}
    for name in names:
        check_listed(listing[name], repo)
    with one_line_errors(repo, folder):
        folder.mkdir(parents=True, exist_ok=True)
        marker = open(folder / UNFINISHED, 'a', encoding='utf-8', opener=no_link)
    try:
        fcntl.lockf(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)  # or two processes would append to the same files
    except OSError:
        raise ValueError(f'{folder}: another process is downloading into it: wait for that one') from None
    marker.truncate(0)
    marker.write(json.dumps({'repo': repo, 'revision': info.sha}))
    marker.flush()
    print(f'{repo} at {info.sha} -> {folder}')
    if INDEX in names:
        if not sha256_if_whole(folder / INDEX, listing[INDEX]):
            with progress(INDEX, listing[INDEX].size) as bar:
                fetch(info.id, info.sha, listing[INDEX], folder, bar)
        shards = set(read_object(folder / INDEX, WEIGHTS)['weight_map'].values())
        absent = sorted(name for name in shards if name not in listing)
        if absent:
            raise ValueError(f'{repo} has no {absent[0]}, which its {INDEX} lists: choose another --revision')
        names |= shards
        for name in shards:
            check_listed(listing[name], repo)

    hashes = {name: sha256_if_whole(folder / name, listing[name]) for name in sorted(names)}
    missing = [listing[name] for name, sha256 in hashes.items() if sha256 is None]
    parts = [part_of(listed, folder) for listed in missing]
    total, arrived = sum(listed.size for listed in missing), sum(p.stat().st_size for p in parts if p.exists())
    free = shutil.disk_usage(folder).free
    if total - arrived > free:
        needs = f'needs {in_words(total - arrived)} more, the disk has {in_words(free)} free'
        raise ValueError(f'{folder}: {needs}: make room, or give another folder with --to=FOLDER')
    with progress('downloading', total, arrived) as bar:
        for listed in missing:
            hashes[listed.rfilename] = fetch(info.id, info.sha, listed, folder, bar)
    for pattern in ('model*.safetensors', INDEX, '*.part'):  # left by another revision; transformers might load them
        for path in folder.glob(pattern):
            if path.name not in names:
                path.unlink()
    files = {name: {'size': listing[name].size, 'sha256': sha256} for name, sha256 in hashes.items()}
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds')
    record = {'repo': repo, 'revision': info.sha, 'date': date, 'files': files}
    write_file(folder / RECORD, json.dumps(record, indent=1))
    os.remove(folder / UNFINISHED)  # last: without this file the folder counts as complete
    check(folder, compare=False)  # each sha256 has just been compared


# --- COMMAND ----------------------------------------------------------------------------------------------------------
if config.model is None:
    raise ValueError('model is not set: give OWNER/NAME of the Hugging Face hub, or a folder to check, with --model=')
given = Path(config.model).expanduser()
if config.to is None and config.revision == 'main' and given.is_dir():
    check(given)
elif (given / 'config.json').exists() and Path(config.to or '').expanduser().resolve() != given.resolve():
    key = 'revision' if config.to is None else 'to'
    line = f'model={config.model} is a folder here, and is checked where it lies: leave out --{key}={vars(config)[key]}'
    raise ValueError(f'{line} (or, to download what the hub has under that name, run this from another folder)')
elif config.model == 'OWNER/NAME' or (config.model.startswith(('models/', 'out/')) and not given.is_dir()):
    holds = ', '.join(sorted(path.name for path in Path('models').glob('*/'))[:10]) or 'nothing'  # no owner on the hub
    raise ValueError(
        f'model={config.model}: there is no such folder (models holds: {holds}), and a model of the hub is given by '
        'owner and name, as in --model=HuggingFaceTB/SmolLM2-135M-Instruct'
    )
elif re.fullmatch(REPO, config.model):
    download(config.model, Path(config.to or Path('models', config.model.rpartition('/')[2])).expanduser())
else:
    raise ValueError(f'model={config.model}: there is no such folder, and on the hub a model is called OWNER/NAME')
