"""
Checks, before it trains, that a model of finetune.for_training() computes what its folder says: its logits are those of
transformers' own class, its loss is that of its logits, and packed documents do not see each other.
"""

import contextlib
import re
import sys

import torch
import torch.nn.functional as F

from huggingface import finetune, loading
from huggingface.files import Weights, tensors_to_load
from system import collectives, processes
from system.errors import is_lost_peer, is_out_of_memory, one_line

NOT_HERE = 'this model cannot be trained here'


@contextlib.contextmanager
def without_tf32():
    """A context in which fp32 is computed with all its digits, whatever the key tf32 says. TensorFloat-32 has 3 of the
    7, so that no two ways to compute the same logits would agree to 1e-4."""
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = False
        yield
    finally:
        for backend, allowed in zip(backends, before, strict=True):
            backend.allow_tf32 = allowed


@torch.no_grad()
@without_tf32()
def run(model, raw_model, pretrained, loaded, packed, device):
    """Check on a few tokens that the model computes what its folder says. Returns a line for the log. Collective.

    model: the wrapped or sharded model, as training calls it. raw_model: the module with ForTraining's attributes.
    loaded: the weights are the folder's, so the logits must be as well; rank 0 computes them with transformers' own
    class, one block of the files at a time. packed: documents of a row must not see each other, and each has to be
    computed as it is alone.
    The row has a few tokens, or as many as it takes to get beyond the lengths from which on the class computes
    otherwise, if those of the run do; never more than block_size, so that it costs less than a step of training.
    Raises ValueError on every rank if a check fails, since training would be wasted.
    """
    length = longest_of_lengths(pretrained.config.get_text_config(), pretrained.block_size)
    T = min(2 * (length + 16), pretrained.block_size)
    tokens = torch.randint(pretrained.vocab_size, (1, T), generator=torch.Generator().manual_seed(1))
    x, places = tokens.to(device), spread(T, device)[None]  # (1, T) and (1, P)
    y = torch.full_like(x, -1).scatter(1, places, x.roll(-1, 1).take_along_dim(places, 1))
    facts, problems = [], []
    exact = raw_model.compute_dtype == torch.float32
    tolerance = 1e-4 if exact else 0.02
    model.eval()
    # Uncompiled, else training's shape would be the second after this one, and get a slower, dynamic graph. Where the
    # compiler is not imported, importing it would take seconds.
    imported = 'torch._dynamo' in sys.modules
    with torch.compiler.set_stance('force_eager') if imported else contextlib.nullcontext():
        try:
            with logits_at(raw_model, places):
                logits = of_places(model(x), places).float()  # (1, places, V)
        except Exception as error:
            if is_out_of_memory(error) or is_lost_peer(error):
                raise
            check_class_runs(pretrained, tokens)
            raise  # transformers' class runs, so the fault is in this project
        if not logits.isfinite().all():  # its weights are: they are checked where they are read
            dtype = str(raw_model.compute_dtype).removeprefix('torch.')
            advice = 'use --dtype=bfloat16' if dtype == 'float16' else 'take weights from before its training diverged'
            raise ValueError(f'self-test: logits are not finite: {pretrained.folder} overflows in {dtype}; {advice}')
        ce, expected_ce = model(x, y)[1].item(), F.cross_entropy(logits[0], y[y >= 0], reduction='sum').item()
        if not abs(ce - expected_ce) <= tolerance * expected_ce:
            problems.append(f'the loss is {ce:.6g}, that of the logits {expected_ce:.6g}; {NOT_HERE}')
        whole = '' if raw_model.has_plain_head else ', which exist whole: this class changes them behind the head'
        facts.append(f'the loss is that of the logits{whole}')
        if packed:
            advice = '--packing=False gives each a sequence of its own'
            if documents_mix(model, pretrained.vocab_size, min(32, T), device):
                problems.append(f'{pretrained.arch} lets packed documents see each other: {advice}')
            elif T >= 4 and (far := packed_is_not_alone(model, raw_model, x, length, exact)):
                problems.append(
                    f'{pretrained.arch} computes a document in the middle of a packed row otherwise than alone (logits '
                    f'differ by {far:.2g} of their norm in rows of {T} tokens): {advice}'
                )
            facts.append('packed documents do not see each other')
    processes.reshard(model)  # without a backward pass, weights that forward has gathered would stay gathered
    model.train()
    if loaded:
        expected = collectives.on_rank_0(reference_logits, pretrained, x, places, patience_s=collectives.PATIENCE_S)
        difference = logits_differ(logits.cpu(), expected, exact)
        if not difference <= (1e-4 if exact else 0.1):  # wrong frequencies give about 1
            problems.append(f'logits differ from those of the folder by {difference:.2g} of their norm; {NOT_HERE}')
        rounded = '' if pretrained.frozen_rounding == 'float32' else f' rounded to {pretrained.frozen_rounding}'
        facts.append(
            f'logits are those of {pretrained.weights_folder}{rounded} (difference {difference:.1g} of their norm)'
        )
    if problems:
        raise ValueError(f'self-test: {"; ".join(problems)}')
    return f'self-test: {"; ".join(facts)}'


def longest_of_lengths(config, T):
    """The largest number below T in a configuration that is a length beyond which its class computes otherwise: of a
    window, a chunk, a temperature or a rotary embedding. 0 if there is none."""
    kinds = re.compile('window|chunk|floor_scale|original_max_position')

    def lengths(keys):
        for name, value in keys.items():
            if isinstance(value, dict):
                yield from lengths(value)
            elif kinds.search(str(name)) and isinstance(value, (int, float)) and 0 < value < T:
                yield int(value)

    return max(lengths(config.to_dict()), default=0)


def spread(T, device):
    """Up to 32 places in a row of T tokens, with the first and the last."""
    return torch.linspace(0, T - 1, min(32, T), device=device).round().long()


@contextlib.contextmanager
def logits_at(model, places):
    """A context in which a model of transformers computes the logits at these places (B, P) alone, if its head is a
    module that gets hidden states (B, T, C); see of_places(). Those of a long row would not fit into memory."""

    def select(head, args):
        x, *others = args
        return (of_places(x, places) if x.dim() == 3 else x, *others)

    handle = model.get_output_embeddings().register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


def of_places(logits, places):
    """Logits of a model within logits_at(), or hidden states (B, T, C), at the places (B, P) alone."""
    return logits if logits.shape[1] == places.shape[1] else logits.take_along_dim(places[..., None], 1)


def logits_differ(logits, expected, exact):
    """By which part of their norm logits (1, T, V) differ from those that are expected in fp32. exact: they are fp32,
    too. In 16 bits that of three in four tokens, since a router's near tie sends some tokens to other experts."""
    if exact:
        return (logits - expected).norm() / expected.norm()
    return ((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).quantile(0.75, interpolation='lower')


def packed_is_not_alone(model, raw_model, x, length, exact):
    """By which part of their norm the logits of documents in the middle of packed rows differ from those of the same
    documents alone, if it is more than rounding; else 0. Collective.

    Two documents of x (1, T), the first of more than `length` tokens, stand in two rows of T in turn. What differs
    where they begin a row is rounding, unless it is more than 0.1; in 16 bits, models round in different ways. In a
    mixture a near tie of a router makes more of it, at other tokens in each row."""
    T = x.shape[1]
    end = max(1, min(16, T // 16))
    one, two, rest = x.split([m := min(length + 16, T - 2 * end), f := T - m - end, end], 1)
    rows = torch.cat((torch.cat((one, two, rest), 1), torch.cat((two, one, rest), 1)))
    starts = torch.tensor([[0, m, m + f], [0, f, f + m]], device=x.device)

    def logits(x, places, starts=None):
        with logits_at(raw_model, places):
            return of_places(model(x, None, starts), places).float()

    of_one, of_two = spread(m, x.device), spread(f, x.device)
    places = torch.stack((torch.cat((of_one, m + of_two)), torch.cat((f + of_one, of_two))))  # (2, P)
    alone = torch.cat((logits(one, of_one[None]), logits(two, of_two[None])), 1)  # (1, P, V)
    far = (logits(rows, places, starts) - alone).norm(dim=-1) / alone.norm(dim=-1)  # (2, P)
    if exact:
        return far.max().item() if not far.max() <= 1e-4 else 0.0
    of_documents = far.split([len(of_one), len(of_two)], 1)
    found = [part.quantile(0.75, 1, interpolation='lower').max().item() for part in of_documents]
    rounding = [of_documents[0][0], of_documents[1][1]]  # each as the first of a row
    least = 0.1 if any('experts' in name for name, _ in raw_model.named_modules()) else 0.02
    most = [min(max(least, 2 * part.quantile(0.9).item()), 0.1) for part in rounding]
    return max((by for by, limit in zip(found, most, strict=True) if not by <= limit), default=0.0)


def documents_mix(model, vocab_size, T, device):
    """Whether a document changes what the model computes in another one of the same row of T tokens. Collective.

    Rounding cannot hide it, whatever the dtype: operations of the same shapes give the same bits, so if the first of
    three documents changes, no bit of the middle one's logits may. Mixtures are the exception: their experts then get
    other tokens together, and round in another way. How much that is, a change of the last document shows, which no
    token before it can see. So documents mix if a change of the first one moves more in each of eight rows than a
    change of the last one does in any. By chance that happens once in 12,870 times (8! 8! / 16!).
    """
    third, rows = T // 3, 8
    if third == 0:
        return False
    x = torch.randint(vocab_size, (rows, T), generator=torch.Generator().manual_seed(2))
    starts, middle = torch.tensor([[0, third, 2 * third]] * rows, device=device), slice(third, 2 * third)

    def largest_change(document):
        changed = x.clone()
        changed[:, document] = (x[:, document] + 1) % vocab_size
        return (model(changed.to(device), None, starts)[:, middle].float() - logits).abs().amax((1, 2))  # of each row

    logits = model(x.to(device), None, starts)[:, middle].float()
    by_first, by_last = largest_change(slice(0, third)), largest_change(slice(2 * third, T))
    return bool(by_first.min() > by_last.max())


def check_class_runs(pretrained, tokens):
    """Raise ValueError if transformers' own class cannot run the model either: only there it shows if values in
    config.json do not fit together."""
    try:
        reference_logits(pretrained, tokens)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = one_line(repr(error))
        raise ValueError(f'{pretrained.folder}: transformers cannot run it as config.json says: {reason}') from error


def reference_logits(pretrained, tokens, places=None):
    """Logits (B, T, V), or at places (B, P) alone, on the host, by transformers' unchanged class. It computes in fp32
    on the device of the tokens, with one block in memory at a time. The weights are the folder's, rounded by
    frozen_dtype."""
    places = torch.arange(tokens.shape[1], device=tokens.device)[None] if places is None else places
    weights, seen, device = Weights(pretrained.weights_folder), loading.seen_in_training(pretrained), tokens.device
    with torch.device('meta'):
        model = pretrained.empty_model()
    found, lacking = weights.find(model)
    if lacking:
        model = loading.whole_model(pretrained)  # on the host, because a device may not have room for all of it
        for name, parameter in model.named_parameters():
            parameter.data = seen(name, parameter.data).float()
        with logits_at(model, places.cpu()):
            return of_places(model(tokens.cpu(), use_cache=False).logits, places.cpu())
    aliases = {alias: name for name, names in tensors_to_load(model).items() for alias in names}
    finetune.fill_buffers(model, device)
    blocks, sizes = finetune.find_blocks(model), {}
    inside = {inner for block in blocks for inner in block.modules()}
    for name, module in model.named_modules():
        if module in blocks or (module not in inside and any(True for _ in module.parameters(recurse=False))):
            empty = module.state_dict()
            sources = {inner: aliases[f'{name}.{inner}'] for inner in empty}
            sizes[name] = sum(weights.nbytes(found[source]) for source in sources.values())

            def fetch(module, args, sources=sources):
                next(shown, None)
                tensors = {
                    inner: seen(name, weights.read(found[name]).to(device)).float() for inner, name in sources.items()
                }
                module.load_state_dict(tensors, assign=True)

            def empty_again(module, args, output, empty=empty):
                module.load_state_dict(empty, assign=True)

            if module is model.get_input_embeddings():  # some classes ask for its device before they call it
                empty = {inner: torch.zeros((), device=device).expand(tensor.shape) for inner, tensor in empty.items()}
                module.load_state_dict(empty, assign=True)
            module.register_forward_pre_hook(fetch)
            module.register_forward_hook(empty_again)
    shown = processes.progress(f'self-test: {pretrained.weights_folder}', sizes)
    with logits_at(model, places):
        return of_places(model.eval()(tokens, use_cache=False).logits, places).cpu()
