"""
Generate text with a model of model.py or of transformers (finetune.for_training), token by token: each is drawn from
the probabilities that the model gives after the tokens before it. Several prompts are continued at the same time.

    answers = generate_batch(model, [[5, 1], [7]], max_new_tokens=100, stop_tokens=[0])  # lists of new ids
    for row, token in stream_batch(model, prompts, ...): ...  # the same, each token as soon as it is drawn
    token = sample_token(logits, temperature=0.8, top_p=0.95)

If the prompts of a batch differ in length, shorter ones begin with padding. No token attends to it, and positions count
from the beginning of the prompt. Rows that have ended leave the batch. So a row does not depend on the other rows,
except for rounding: matmuls of another size, and attention with a mask, add up in another order.
"""

import math

import torch

from attention import MaskedAttention
from layout import counted
from model import GPT
from system.processes import unwrapped


class NotFinite(ValueError):
    """What a model computes is NaN or infinite, so nothing can be chosen by it."""


def not_finite(numbers, model):
    """The error that says so. numbers: which ones, in words. (Weights are checked where they are read.)"""
    dtype = str(unwrapped(model).compute_dtype).removeprefix('torch.')
    advice = 'its weights are of a training that has diverged: take earlier ones'
    if dtype == 'float16':
        advice = 'use --dtype=bfloat16 or --dtype=float32, which go beyond 65,504'
    return NotFinite(f'{numbers} not finite: the model overflows in {dtype}; {advice}')


def generate_batch(model, prompts, max_new_tokens, stop_tokens=(), **options):
    """[[new id, ...] of each prompt]. options: for stream_batch(), with keep_stop also for the id that ended it."""
    rows = [[] for _ in prompts]
    for row, token in stream_batch(model, prompts, max_new_tokens, stop_tokens, **options):
        rows[row].append(token)
    return rows


@torch.no_grad()
def stream_batch(
    model,
    prompts,
    max_new_tokens,
    stop_tokens=(),
    temperature=0.0,
    top_k=None,
    top_p=None,
    generators=None,
    stop=None,
    first=None,
    memory=None,
    keep_stop=False,
    logps=None,
):
    """
    Yield (number of a prompt, its next id), one id at a time for each prompt that has not ended, in turn.

    model: model.GPT or finetune.ForTraining, on any device; it is in eval mode meanwhile. prompts: lists of at least
    one id; for a model of transformers, of fewer ids than it has positions. A row ends

    - with one of stop_tokens, which is yielded with keep_stop only;
    - after a token for which stop(its new ids) is true;
    - after max_new_tokens, and at the last position of a model of transformers. When a GPT of model.py has used its
      block_size positions, it continues from the later half of these tokens.

    temperature: 0 = always the likeliest token; otherwise as for sample_token(). generators: for each prompt a
    torch.Generator on the CPU; None = torch's own. first: for each prompt None, or the ids from which its first new id
    is drawn. memory: a Memory, for a single prompt that may continue where an earlier one ended. logps: for each prompt
    a list, which gets the log-probability at this temperature of each id that was drawn. Raises ValueError for an empty
    prompt, and NotFinite.
    """
    if not all(prompts):
        raise ValueError('an empty prompt: expected at least one token')
    itself = unwrapped(model)
    slides = isinstance(itself, GPT)
    config = itself.config if slides else itself.config.get_text_config()
    positions = config.block_size if slides else getattr(config, 'max_position_embeddings', None) or math.inf
    texts, stop_tokens = [list(prompt) for prompt in prompts], set(stop_tokens)
    begins = [max(0, len(text) - positions) if slides else 0 for text in texts]  # of the part that the model sees
    together = [[*range(len(texts))]] if itself.takes_padding else [[row] for row in range(len(texts))]
    reader, was_training = None, model.training
    model.eval()
    try:
        for rows in together if max_new_tokens > 0 else ():
            reader = None
            while rows:
                if reader is not None and reader.turns([len(texts[row]) for row in rows], itself.turning_point):
                    reader = None  # all of a text is computed in another way now
                if reader is not None and reader.cache is not None:
                    logits = reader.read([texts[row][-1:] for row in rows])  # (B, vocab_size)
                elif memory is not None and itself.reads_on and memory.fits(texts[0], itself.turning_point):
                    reader = memory.reader
                    logits = reader.read([texts[0][reader.length :]])
                else:
                    windows = [texts[row][begins[row] :] for row in rows]
                    longest = max(map(len, windows))
                    room = min(positions, longest + max_new_tokens)
                    reader = Reader(model, itself.new_cache(room), [longest - len(window) for window in windows])
                    logits = reader.read([window[:1] * (longest - len(window)) + window for window in windows])
                if not logits.amax(-1).isfinite().all():  # -inf alone is a token that the model excludes
                    raise not_finite(f'logits after {counted(len(texts[rows[0]]), "token")} are', model)
                for place, row in enumerate(rows):
                    if first and first[row] and len(texts[row]) == len(prompts[row]):
                        others = torch.ones_like(logits[place], dtype=torch.bool)
                        others[first[row]] = False
                        logits[place].masked_fill_(others, -math.inf)
                uniform = None
                if temperature and generators:
                    uniform = torch.stack([torch.rand((), generator=generators[row]) for row in rows])  # (B)
                ids = sample_token(logits, temperature, top_k, top_p, uniform)  # (B, 1)
                if logps:
                    found = torch.log_softmax(logits.float() / temperature, -1).gather(1, ids)[:, 0].tolist()
                    for row, logp in zip(rows, found, strict=True):
                        logps[row].append(logp)
                drawn = ids[:, 0].tolist()
                going_on = []  # places in the batch of the rows that continue
                for place, (row, token) in enumerate(zip(rows, drawn, strict=True)):
                    if token in stop_tokens and not keep_stop:
                        continue
                    texts[row].append(token)
                    yield row, token
                    if token in stop_tokens:
                        continue
                    new = texts[row][len(prompts[row]) :]
                    is_full = not slides and len(texts[row]) >= positions
                    if len(new) < max_new_tokens and not is_full and not (stop and stop(new)):
                        going_on.append(place)
                if going_on and len(going_on) < len(rows):
                    reader.keep(itself, going_on)
                rows = [rows[place] for place in going_on]
                if slides and reader.length == positions:
                    reader = None
                    for row in rows:
                        if len(texts[row]) - begins[row] > positions:
                            begins[row] = len(texts[row]) - max(1, positions // 2)
    finally:
        model.train(was_training)
        if memory is not None and reader is not None:
            memory.reader, memory.ids = reader, texts[0][: reader.length]


class Reader:
    """Feeds several texts to the model, whose cache keeps what was read. Column i has the i-th id of each text; text b
    begins with pads[b] pads."""

    def __init__(self, model, cache, pads):
        self.model, self.cache, self.pads = model, cache, pads
        self.device, self.length = next(model.parameters()).device, 0  # columns so far

    def read(self, columns):
        """Logits (B, vocab_size) after further ids of each text. columns: equally long lists of ids, one per text."""
        self.length += len(columns[0])
        attention = attention_behind(self.pads, len(columns[0]), self.length, self.device)
        return self.model(torch.tensor(columns, device=self.device), attention=attention, cache=self.cache)[:, -1]

    def turns(self, lengths, turning_point):
        """Whether one of the texts, which now have these lengths, has grown beyond the turning point of a model
        (rotation.turning_point()) since it was read."""
        read = [self.length - pads for pads in self.pads]
        return any(before <= turning_point < now for before, now in zip(read, lengths, strict=True))

    def keep(self, itself, places):
        """Continue only with the texts at these places. itself: the unwrapped model, which has keep_rows()."""
        itself.keep_rows(self.cache, torch.tensor(places, device=self.device))
        self.pads = [self.pads[place] for place in places]


class Memory:
    """Keeps what a model has read of a conversation, so that the next turn need not read all of it again."""

    reader, ids = None, ()

    def fits(self, text, turning_point):
        """Whether a text begins with what was read, is longer, and what was read is still computed in the same way."""
        begins = self.reader is not None and len(self.ids) < len(text) and text[: len(self.ids)] == self.ids
        return begins and not self.reader.turns([len(text)], turning_point)


def attention_behind(pads, T, length, device):
    """The attention of the last T of `length` columns; None if no mask is needed. pads (B): with how many pads
    each row begins. A pad attends to itself, since attention to nothing would give NaN."""
    if not any(pads) and T in (1, length):
        return None
    columns, pads = torch.arange(length, device=device), torch.tensor(pads, device=device)[:, None]
    query = columns[-T:, None]  # (T, 1)
    mask = (columns >= pads[:, None]) & (columns <= query) | (columns == query)  # (B, T, length)
    positions = (columns[-T:] - pads).clamp(min=0)  # (B, T)
    return MaskedAttention(positions, mask[:, None])


def sample_token(logits, temperature=1.0, top_k=None, top_p=None, uniform=None):
    """Draw one token per row of logits (B, vocab_size); returns ids (B, 1). temperature: 0 = the likeliest token.

    top_k: draw only among the k likeliest tokens. top_p: draw only among the fewest likeliest tokens whose
    probabilities add up to top_p or more (nucleus sampling, Holtzman et al., arXiv 1904.09751); applied after top_k.
    None or 0 turn them off. uniform: a random number from 0 to 1 for each row (B); None = draw them here.
    """
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    probabilities, ids = probabilities.sort(dim=-1, descending=True)
    if top_k:
        probabilities[:, top_k:] = 0
        probabilities /= probabilities.sum(-1, keepdim=True)
    if top_p:
        before = probabilities.cumsum(-1) - probabilities  # the probability of all likelier tokens
        probabilities[before >= top_p] = 0
    if uniform is None:
        uniform = torch.rand(len(logits))
    # Lay the tokens side by side, each as wide as its probability, and take the one at `uniform` of the total width.
    ends = probabilities.cumsum(-1)
    place = torch.searchsorted(ends, uniform.to(ends)[:, None] * ends[:, -1:], right=True)  # (B, 1)
    last = (probabilities > 0).sum(-1, keepdim=True) - 1
    return ids.gather(-1, torch.minimum(place, last))
