"""
DiLoCo's outer loop (arXiv 2311.08105), streamed in fragments if asked (arXiv 2501.18512).

Replicas of the model train alone for `inner_steps` steps. Then, for every parameter theta:

    delta_m = anchor - theta_m                   pseudo-gradient of replica m; the anchor is where all of them started
    delta   = mean of delta_m over the replicas  the exchange: all that ever travels between them
    anchor  = outer optimizer(anchor, delta)     the outer parameters, which are evaluated, saved and exported
    theta_m = anchor                             every replica goes on from there, with its own inner optimizer state

    outer = diloco.Outer(parameters, update, replica_group, inner_steps=100)
    ...                                          # one inner step, in which replicas send each other nothing
    for fragment in outer.to_land(step):         # exchanges that began overlap_steps ago
        outer.land(fragment, step)
    for fragment in outer.to_send(step):         # every inner_steps, each fragment of the model at its own time
        outer.send(fragment, step)

Each rank holds its shard of the anchors and of the outer momentum in fp32, whatever dtype the parameters have, because
between bf16 parameters two thirds of the small differences would be zero. The numbers of a fragment, laid end to end,
are exchanged in stretches, which are called *buckets*: a parameter may fill several of them, and several may share one.

How a bucket is averaged over M replicas (rank i of each replica exchanges with the ranks i of the others):

    all-to-all   replica m sends the j-th part of its delta to replica j, encoded; j decodes all, and averages in fp32
    all-gather   replica j sends that average to all, encoded again; everybody decodes the same bytes

So all replicas end up with the same bits, and each rank sends 2 (M-1)/M times its shard, in the dtype of the exchange.
For 4 replicas of 1B parameters in bf16 that is 2 * 3/4 * 2 GB = 3 GB per replica and round. exchange/codec.py has the
dtypes.
"""

import hashlib
import math
import re
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from exchange.codec import BLOCKS, BYTES, SCALES, decode, encode
from exchange.collectives import all_to_all, gather
from layout import FP32

BUCKET, CACHED = 2**22, 2**17  # numbers exchanged at a time, 16 MB of fp32; numbers that stay in a core's cache
# What a replica has learned while an exchange was in flight is not in its average. So of its own parameters it keeps
# this share, the alpha of Streaming DiLoCo, which also has 0.5. Without overlap there is nothing to keep.
KEPT = 0.5
OVERLAPPED_CTAS = 4  # at most, for NCCL while the GPU computes: each keeps one of an H100's 132 multiprocessors busy
# Of a fragment, in steps: when it was last sent, up to which step its anchors know what was learned, when all replicas
# last had the same parameters, and when the exchange in flight is to be applied.
TIMES = ('sent_at', 'anchored_at', 'equal_at', 'lands_at')

# A stretch of a fragment's numbers, first to end. pieces: the [(parameter, first, end)] in it. sizes: of these pieces.
Bucket = namedtuple('Bucket', 'first end pieces sizes')

# What an exchange reports: inner products of the replicas' pseudo-gradients (M, M), the bytes that this rank sent, and
# [(kind, begin, end)] of its computations and transfers.
Told = namedtuple('Told', 'gram bytes spans')


def holds(plan):
    """Anchors and outer momentum in fp32, with error feedback what rounding lost, and the fragments in flight. (The
    rest is FSDP's, of a rank that shards its replica.)"""
    keys, weights = plan.keys, plan.weights
    keeps_error = keys['error_feedback'] and keys['exchange_dtype'] != 'float32'
    outer = FP32 * (2 + keeps_error) * weights.count(weights.trained)
    parameters_on_host = keys['cpu_offload'] == 'params'
    parts = {'host outer' if keys['outer_on_host'] or parameters_on_host else 'outer': outer}
    if keys.get('overlap_steps'):  # what is in flight is where the parameters are
        place = 'host outer' if parameters_on_host else 'outer'
        parts[place] = parts.get(place, 0) + bytes_in_flight(plan)
    return parts


def bytes_in_flight(plan):
    """Bytes of the fragments that wait for their average, at most: when one is sent, those of overlap_steps."""
    keys, weights = plan.keys, plan.weights
    trained = {name: parameter for name, parameter in weights.named.items() if parameter.requires_grad}
    fragments = assign_to_fragments(trained, keys['num_fragments'])
    sizes = [weights.count(trained[name] for name in names) for names in fragments]
    offsets = [offset_of(index, keys['inner_steps'], len(sizes)) for index in range(len(sizes))]
    return FP32 * max(
        sum(
            size
            for size, before in zip(sizes, offsets, strict=True)
            if (now - before) % keys['inner_steps'] < keys['overlap_steps']
        )
        for now in offsets
    )


def offset_of(index, inner_steps, num_fragments):
    """The fragment with this index is sent after steps with step % inner_steps equal to this."""
    return (index + 1) * inner_steps // num_fragments % inner_steps


def sends(plan):
    """The all-to-all and the all-gather of the docstring above, each (M-1)/M of this rank's shard, in the dtype of the
    exchange, once in inner_steps."""
    keys, replicas, dtype = plan.keys, plan.layout.replica, plan.keys['exchange_dtype']
    trained = plan.weights.count(plan.weights.trained)
    bytes_per_number = BYTES[dtype] + (SCALES[dtype] / BLOCKS[dtype] if dtype in SCALES else 0)
    half = (replicas - 1) * bytes_per_number * trained / replicas / keys['inner_steps']
    return {'reduce-scatter': half, 'all-gather': half}


def digest(tensors):
    """sha256 of the tensors' numbers as fp32. It depends on every bit and on the order."""
    sha256 = hashlib.sha256()
    for tensor in tensors:
        sha256.update(tensor.float().cpu().numpy())
    return sha256.hexdigest()


# --- fragments --------------------------------------------------------------------------------------------------------


class Fragment:
    """Parameters that are exchanged together, with their anchors, outer momentum and the exchange in flight."""

    def __init__(self, index, parameters, offset, home, pinned, with_error, bucket):
        """parameters: {name: parameter}. offset: the fragment is sent after steps with step % inner_steps == offset."""
        self.index, self.parameters, self.offset = index, parameters, offset
        self.places, size = {}, 0  # name -> (first, end) among the fragment's numbers
        for name, parameter in parameters.items():
            self.places[name] = (size, size + local(parameter).numel())
            size = self.places[name][1]
        edges = [*range(0, size, bucket), size]
        self.buckets = [self.bucket(first, end) for first, end in zip(edges, edges[1:], strict=False)]
        self.anchor = torch.empty(size, device=home, pin_memory=pinned)
        self.momentum = torch.zeros(size, device=home, pin_memory=pinned)
        self.error = torch.zeros(size, device=home, pin_memory=pinned) if with_error else None
        self.lands_at = None  # step after which the exchange in flight is to be applied; None: nothing is in flight
        self.flights = []  # [(bucket, its delta, handle)] of that exchange
        self.delta = None  # while in flight: this replica's pseudo-gradient, which becomes the average

    def begin_at(self, step):
        """Note that at this step the parameters equal the anchors, which know all that was learned until then."""
        self.equal_at = self.sent_at = self.anchored_at = step

    def bucket(self, first, end):
        """The Bucket of the fragment's numbers first to end."""
        pieces = []
        for parameter, (start, stop) in zip(self.parameters.values(), self.places.values(), strict=True):
            if start < end and stop > first:
                pieces.append((parameter, max(first, start) - start, min(end, stop) - start))
        return Bucket(first, end, pieces, [stop - start for _, start, stop in pieces])

    def views(self, flat):
        """{name: the parameter's part of a flat tensor of all numbers, as a tensor or DTensor of its shape}."""
        return {name: like(self.parameters[name], flat[first:end]) for name, (first, end) in self.places.items()}


def local(parameter):
    """This rank's part of a parameter. Look it up each time: sharding with offload replaces it by a pinned copy."""
    with torch.no_grad():
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def like(parameter, flat):
    """This flat local part as a tensor or DTensor like the parameter."""
    part = flat.view(local(parameter).shape)
    return DTensor(part, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else part


def assign_to_fragments(parameters, num_fragments):
    """[names of the parameters of fragment 0, of 1, ...]; the block is the first number in a parameter's name.

    Block i is in fragment i % num_fragments (the paper's strided pattern). Parameters outside of the blocks (embedding,
    final norm, head) go, the largest first, to the fragment that has the fewest numbers so far.
    Raises ValueError when there are more fragments than blocks.
    """
    found = {name: re.search(r'(?:^|\.)(\d+)\.', name) for name in parameters}
    block_of = {name: int(match[1]) for name, match in found.items() if match}
    n_blocks = len(set(block_of.values())) or 1
    if num_fragments > n_blocks:
        raise ValueError(f'num_fragments={num_fragments}: expected at most {n_blocks}, the blocks of the model')
    fragments = [[] for _ in range(num_fragments)]
    for name, block in block_of.items():
        fragments[block % num_fragments].append(name)
    for name in sorted(parameters.keys() - block_of.keys(), key=lambda name: (-parameters[name].numel(), name)):
        sizes = [sum(parameters[other].numel() for other in names) for names in fragments]
        fragments[sizes.index(min(sizes))].append(name)
    return fragments


# --- outer loop -------------------------------------------------------------------------------------------------------


class Outer:
    """
    Anchors, outer momentum and exchanges of one replica's shard on this rank. All ranks make the same calls.

    parameters: {name: tensor or DTensor}, each once and only those that train; anchors start as copies of them.
    update: function (anchor, delta, momentum) that takes an outer step in place on flat fp32 tensors.
    group: process group of the ranks that hold this shard, one in each replica. timeout: timedelta of an exchange.
    inner_steps: H. num_fragments: P; each is sent every H steps, so that one is sent every H/P steps.
    overlap_steps: steps from sending a fragment to landing it.
    dtype: of the exchange, a key of BYTES.
    error_feedback: keep what an exchange lost by rounding, and add it to the next one.
    on_host: anchors, momentum and errors in (pinned) host memory. bucket: numbers exchanged at a time.
    own: {name: tensor} that each replica has for itself and never exchanges, such as the load of its experts.
    in_whole: function (name, tensor) for tensors(), which says what part of a whole parameter this tensor is, if the
        model is cut in another way, too (checkpoint_parts.in_whole). None: it is not.

    With overlap_steps=0 a bucket is exchanged while the one before it is applied, so that all this takes a few buckets
    of memory besides anchors and momentum. Overlapped exchanges hold their fragment's pseudo-gradient until they land.
    """

    def __init__(
        self, parameters, update, group, inner_steps, num_fragments=1, overlap_steps=0, dtype='float32',
        error_feedback=False, on_host=False, bucket=BUCKET, timeout=None, own=(), in_whole=None,
    ):  # fmt: skip
        self.parameters, self.update, self.own = dict(parameters), update, dict(own)
        self.in_whole = in_whole or (lambda name, tensor: tensor)
        # A group of its own, with the same ranks. The mesh's group may be that of all ranks, which the main thread uses
        # while an exchange is in flight, and two threads on one group may issue their collectives in different orders
        # on different ranks.
        ranks = dist.get_process_group_ranks(group)
        first, options = local(next(iter(self.parameters.values()))), None
        if overlap_steps and first.is_cuda:  # NCCL's kernels spin while they wait for the slowest replica
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = OVERLAPPED_CTAS
            options._timeout = timeout or options._timeout  # else torch warns that new_group()'s overrides it
        self.group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True, pg_options=options)
        self.replicas, self.replica = len(ranks), dist.get_rank(group)
        self.inner_steps, self.overlap_steps, self.dtype = inner_steps, overlap_steps, dtype
        self.device, self.on_host = first.device, on_host and first.is_cuda
        self.on_cuda = self.device.type == 'cuda'
        # An exchange runs beside the computation: in a stream of the GPU, or on a CPU in a thread. Exchanges run one at
        # a time, in the order in which they were sent, which is the same on every rank.
        self.stream = torch.cuda.Stream(self.device) if self.on_cuda else None
        self.thread = None if self.on_cuda else ThreadPoolExecutor(max_workers=1, thread_name_prefix='exchange')

        with_error = error_feedback and dtype != 'float32' and self.replicas > 1
        home = torch.device('cpu') if self.on_host else self.device
        self.fragments = []
        for index, names in enumerate(assign_to_fragments(self.parameters, num_fragments)):
            members = {name: self.parameters[name] for name in names}
            offset = offset_of(index, inner_steps, num_fragments)
            self.fragments.append(Fragment(index, members, offset, home, self.on_host, with_error, bucket))
        assert sum(len(fragment.parameters) for fragment in self.fragments) == len(self.parameters)
        self.restart_from_parameters(step=0)
        self.reset_health()

    # --- when -------------------------------------------------------------------------------------------------------

    def to_land(self, step, last=False):
        """The fragments whose exchange is to be applied after this step; after the last one, all that are in flight."""
        flying = [fragment for fragment in self.fragments if fragment.lands_at is not None]
        sending = set() if last else {*self.to_send(step)}  # if inner_steps has changed, they may still be in flight
        due = [fragment for fragment in flying if last or fragment.lands_at <= step or fragment in sending]
        return sorted(due, key=lambda fragment: fragment.lands_at)

    def to_send(self, step, last=False):
        """The fragments to send after this step; after the last step, once nothing is in flight, all that have changed.

        A fragment that has not changed is left out, because an outer step with a delta of zero would still move its
        anchors, by their momentum.
        """
        if last:
            return [fragment for fragment in self.fragments if fragment.equal_at < step]
        return [fragment for fragment in self.fragments if step % self.inner_steps == fragment.offset]

    def has_work(self, step, last=False):
        """Whether to_land() or to_send() has anything for this step."""
        return last or bool(self.to_land(step) or self.to_send(step))

    def is_mid_round(self, step):
        """Whether parameters differ between replicas, or something is in flight."""
        return any(fragment.equal_at < step or fragment.lands_at is not None for fragment in self.fragments)

    # --- what -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def send(self, fragment, step, last=False):
        """Start to exchange a fragment's pseudo-gradient. Without overlap_steps, or if it is the last, land it, too."""
        assert fragment.lands_at is None, f'fragment {fragment.index} is sent while its last exchange is in flight'
        fragment.sent_at, fragment.lands_at = step, step + self.overlap_steps
        if self.overlap_steps and not last:
            fragment.delta = torch.empty_like(fragment.anchor, device=self.device)
            fragment.flights = [self._start_exchange(fragment, bucket) for bucket in fragment.buckets]
            return
        for bucket in fragment.buckets:  # one is exchanged while the one before it is applied
            fragment.flights.append(self._start_exchange(fragment, bucket))
            if len(fragment.flights) == 2:
                self._outer_step(*fragment.flights.pop(0), fragment, kept=0)
        self.land(fragment, step, kept=0)

    @torch.no_grad()
    def land(self, fragment, step, kept=KEPT):
        """Wait for a fragment's average, take the outer step with it, and let the parameters go on from the anchors, of
        which they keep this share of themselves."""
        for flight in fragment.flights:
            self._outer_step(*flight, fragment, kept)
        fragment.flights, fragment.delta, fragment.lands_at = [], None, None
        fragment.anchored_at = fragment.sent_at
        if kept == 0:
            fragment.equal_at = step

    def _start_exchange(self, fragment, bucket):
        """Returns (bucket, its delta, handle). The exchange turns the delta, in place, into the replicas' average."""
        first, end, pieces, sizes = bucket
        with self._timed('compute'):  # the pseudo-gradient: anchor - theta
            kept = fragment.delta  # until the fragment lands
            delta = torch.empty(end - first, device=self.device) if kept is None else kept[first:end]
            torch._foreach_copy_(delta.split(sizes), parts_of(pieces))
            torch.sub(fragment.anchor[first:end].to(self.device, non_blocking=True), delta, out=delta)
        if self.replicas == 1:
            return bucket, delta, None
        error = None if fragment.error is None else fragment.error[first:end]
        if self.thread:
            return bucket, delta, self.thread.submit(self._average, delta, error)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            told = self._average(delta, error)
            return bucket, delta, (self.stream.record_event(), told)

    def _outer_step(self, bucket, delta, handle, fragment, kept):
        """Wait for the average of a bucket, take the outer step with it, and let the parameters go on from there."""
        first, end, pieces, sizes = bucket
        with self._timed('wait'):
            told = self._wait(handle)
        if told is not None:
            self.gram += told.gram
            self.bytes_sent += told.bytes
            self.spans += told.spans
        with self._timed('compute'):
            anchor, momentum = fragment.anchor[first:end], fragment.momentum[first:end]
            here = [state.to(self.device, non_blocking=True) for state in (anchor, momentum)]  # copies only if on_host
            self.update(here[0], delta, here[1])
            if self.on_host:
                anchor.copy_(here[0], non_blocking=True)
                momentum.copy_(here[1], non_blocking=True)
            anchors = here[0].split(sizes)
            if kept:  # theta = kept * theta + (1 - kept) * anchor
                torch._foreach_lerp_(parts_of(pieces), anchors, 1 - kept)
            else:
                torch._foreach_copy_(parts_of(pieces), anchors)

    def _wait(self, handle):
        """Hold up the host (thread) or the current stream (GPU) until an exchange is done, and return its Told."""
        if handle is None:  # one replica, or the exchange was done when the run was saved
            return None
        if self.thread:
            return handle.result()
        torch.cuda.current_stream().wait_event(handle[0])
        return handle[1]

    @torch.no_grad()
    def _average(self, delta, error):
        """Turn delta, flat fp32, into the average over the replicas, in place. Runs in the thread or the stream."""
        replicas, n, spans = self.replicas, len(delta), []
        multiple = BLOCKS.get(self.dtype, 4)
        part = -(-n // (replicas * multiple)) * multiple  # numbers that one replica averages
        with self._timed('compute', spans):
            if error is not None:
                delta.add_(error.to(self.device, non_blocking=True))
            padded = torch.zeros(replicas * part, device=self.device)
            padded[:n] = delta
            encoded = encode(padded.view(replicas, part), self.dtype)  # (replicas, bytes)
        with self._timed('transfer', spans):  # row j goes to replica j, and row m comes from replica m
            received = all_to_all(encoded, self.group)
        with self._timed('compute', spans):
            theirs = decode(received, self.dtype)  # (replicas, part)
            mine = theirs[0] * (1 / replicas)  # (part): this replica's part of the average
            for other in theirs[1:]:
                mine.add_(other, alpha=1 / replicas)
            encoded_mine = encode(mine[None], self.dtype)
        with self._timed('transfer', spans):
            gathered = gather(encoded_mine[0], replicas, self.group)
        with self._timed('compute', spans):
            if error is not None:
                lost = padded - decode(encoded, self.dtype).flatten()
                own = slice(self.replica * part, (self.replica + 1) * part)
                # What was lost by rounding the average. This replica alone makes up for it in the next one, where its
                # numbers count 1 / replicas: hence times replicas.
                lost[own] += (mine - decode(encoded_mine, self.dtype)[0]) * replicas
                error.copy_(lost[:n], non_blocking=True)
            delta.copy_(decode(gathered, self.dtype).flatten()[:n])
            gram = (theirs @ theirs.T).double()
        return Told(gram, (replicas - 1) * (encoded.shape[1] + encoded_mine.shape[1]), spans)

    # --- exchanged by somebody else (pool/replica.py) ---------------------------------------------------------------

    @torch.no_grad()
    def pseudo_gradient(self, fragment):
        """anchor - theta of this rank's rows, what they have learned since the last outer step: new, flat, fp32."""
        theta = torch.cat([local(parameter).flatten() for parameter in fragment.parameters.values()]).float()
        return torch.sub(fragment.anchor.to(self.device), theta, out=theta)

    @torch.no_grad()
    def step_with(self, fragment, delta, step):
        """Take an outer step with an average (flat fp32), on the host, where all jobs compute the same bits."""
        anchor, momentum = fragment.anchor.cpu(), fragment.momentum.cpu()  # no copies, if they are there already
        for part in zip(anchor.split(CACHED), delta.split(CACHED), momentum.split(CACHED), strict=True):
            self.update(*part)
        torch._foreach_copy_([fragment.anchor, fragment.momentum], [anchor, momentum])
        fragment.begin_at(step)
        self._go_on_from_anchors()

    # --- evaluate, save, load ---------------------------------------------------------------------------------------

    @contextmanager
    @torch.no_grad()
    def outer_parameters(self):
        """A context in which the parameters are the anchors. Their copy takes the memory that gradients have left."""
        inner = {name: local(parameter).clone() for name, parameter in self.parameters.items()}
        self._go_on_from_anchors()
        yield
        for name, parameter in self.parameters.items():
            local(parameter).copy_(inner[name])

    def _go_on_from_anchors(self):
        for fragment in self.fragments:
            for name, anchor in fragment.views(fragment.anchor).items():
                local(self.parameters[name]).copy_(local(anchor))

    @torch.no_grad()
    def restart_from_parameters(self, step):
        """Begin at `step` with anchors equal to the parameters, and no outer momentum."""
        for fragment in self.fragments:
            assert fragment.lands_at is None, 'a fragment is in flight'
            fragment.momentum.zero_()
            fragment.begin_at(step)
            for name, anchor in fragment.views(fragment.anchor).items():
                local(anchor).copy_(local(self.parameters[name]))

    @torch.no_grad()
    def restart_from_anchors(self):
        """Land what is in flight, and set all parameters to the anchors; returns the step that the anchors are of."""
        for fragment in self.fragments:
            if fragment.lands_at is not None:
                self.land(fragment, fragment.sent_at)
        step = self.step_of_anchors()
        for fragment in self.fragments:
            fragment.begin_at(step)
        self._go_on_from_anchors()
        return step

    def step_of_anchors(self):
        """The step that the outer parameters are of: that of the oldest fragment."""
        return min(fragment.anchored_at for fragment in self.fragments)

    def state(self, step):
        """What a checkpoint of this step needs besides tensors(); JSON-able."""
        return {
            'num_replicas': self.replicas,
            'fragments': [sorted(fragment.parameters) for fragment in self.fragments],
            'mid_round': self.is_mid_round(step),
            **{key: [getattr(fragment, key) for fragment in self.fragments] for key in TIMES},
        }

    def tensors(self, mid_round):
        """{key: tensor} to save, or to load in place. Waits for what is in flight.

        model.NAME: the anchors. outer.NAME.momentum: their momentum. outer.NAME.average: of fragments in flight.
        replica3.NAME.error: of error feedback. replica3.model.NAME: what replica 3 has for itself, and in the middle of
        a round its parameters.
        """
        own = f'replica{self.replica}'
        tensors = {f'{own}.model.{name}': tensor for name, tensor in self.own.items()}
        for fragment in self.fragments:
            for *_, handle in fragment.flights:
                self._wait(handle)
            for form, flat in (
                ('model.{}', fragment.anchor),
                ('outer.{}.momentum', fragment.momentum),
                ('outer.{}.average', fragment.delta),
                (own + '.{}.error', fragment.error),
            ):
                if flat is not None:
                    views = fragment.views(flat).items()
                    tensors |= {form.format(name): self.in_whole(name, view) for name, view in views}
            if mid_round:
                own_weights = fragment.parameters.items()
                tensors |= {f'{own}.model.{name}': self.in_whole(name, tensor.detach()) for name, tensor in own_weights}
        if self.on_host:
            torch.cuda.synchronize()  # who saves them reads them on the host
        return tensors

    def resume(self, saved, read):
        """Go on from a checkpoint whose model.* has been loaded into the parameters; returns the step to go on at.

        saved: the checkpoint's state, with state() under 'diloco' unless train_ddp.py or train_fsdp.py wrote it.
        read: function that fills {key: tensor} from the checkpoint, as far as it has them.
        If it was saved in the middle of a round and the number of replicas has changed, all replicas go back to the
        outer parameters and their step. Raises ValueError if the fragments have changed in the middle of a round.
        """
        step, state = saved['step'], saved.get('diloco')
        self.restart_from_parameters(step)
        if state is None:
            return step
        same_fragments = state['fragments'] == [sorted(fragment.parameters) for fragment in self.fragments]
        same_replicas = state['num_replicas'] == self.replicas
        if state['mid_round'] and not same_fragments:
            raise ValueError(
                f'the checkpoint of step {step} is in the middle of a round: go on with its '
                f'num_fragments={len(state["fragments"])}'
            )
        if same_fragments:
            for number, fragment in enumerate(self.fragments):
                for key in TIMES:
                    setattr(fragment, key, state[key][number])
                if fragment.lands_at is not None:  # its average is in the checkpoint, so there is nothing to wait for
                    fragment.delta = delta = torch.empty_like(fragment.anchor, device=self.device)
                    fragment.flights = [(bucket, delta[bucket.first : bucket.end], None) for bucket in fragment.buckets]
        tensors = self.tensors(mid_round=state['mid_round'] and same_replicas)
        read({key: tensor for key, tensor in tensors.items() if not key.startswith('model.')})
        if state['mid_round'] and not same_replicas:
            step = self.restart_from_anchors()
        return step

    def optimizer_key(self, saved=None):
        """The prefix of this replica's inner optimizer state in a checkpoint. saved: the state of one to load from.

        Replica 0's prefix is that of every strategy. If the checkpoint has fewer replicas, several load the same state.
        """
        replica = self.replica % (saved.get('diloco', {}).get('num_replicas', 1) if saved else self.replicas)
        return f'replica{replica}.optim' if replica else 'optim'

    def checksums(self):
        """Checksums (of the anchors, of the parameters) on this rank, which all ranks of its group share after an outer
        step."""
        if self.on_host:
            torch.cuda.synchronize()
        anchors = digest(fragment.anchor for fragment in self.fragments)
        return anchors, digest(local(parameter) for parameter in self.parameters.values())

    # --- health -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _timed(self, kind, spans=None):
        """A context that notes its time, of the host or of the GPU's stream. kind: wait, compute or transfer."""
        begin = self._now()
        yield
        (self.spans if spans is None else spans).append((kind, begin, self._now()))

    def _now(self):
        if not self.on_cuda:
            return time.perf_counter()
        return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))

    def _seconds(self):
        seconds = {'wait': 0.0, 'transfer': 0.0, 'compute': 0.0}
        for kind, begin, end in self.spans:
            seconds[kind] += begin.elapsed_time(end) / 1000 if self.on_cuda else end - begin
        return seconds

    def reset_health(self):
        self.spans, self.bytes_sent = [], 0
        self.gram = torch.zeros(self.replicas, self.replicas, dtype=torch.float64, device=self.device)

    def health(self):
        """
        Metrics since the last call, that is, of a round. Collective over all ranks: one small all-reduce.

        diloco/cosine, diloco/cosine_min: between the pseudo-gradients of two replicas, mean and smallest of all pairs.
        diloco/replica_norm: norm of a replica's pseudo-gradient, root mean square. diloco/delta_norm: of the average.
        diloco/drift: distance of the replicas from their mean, root mean square. diloco/momentum_norm.
        diloco/wait_s: seconds that training waited. diloco/transfer_s: in collectives. diloco/compute_s: for
        differences, encoding and outer steps.
        diloco/bytes: sent by this rank (the log has rank 0's). diloco/bytes_formula: round_bytes().
        Exchanges count when they land. If none has, the only norm is the momentum's. A norm that is not finite is given
        as it is.
        """
        if self.on_cuda:
            torch.cuda.current_stream().synchronize()  # not with what is in flight
        parts = [part for fragment in self.fragments for part in fragment.momentum.split(BUCKET)]
        square = sum(part.square().sum().double().cpu() for part in parts)
        sums = torch.cat((self.gram.flatten().cpu(), square.reshape(1) / self.replicas))
        dist.all_reduce(sums)  # over the shards as well: each has the inner products of its part
        row = {'diloco/momentum_norm': math.sqrt(sums[-1].item())}
        if self.bytes_sent:
            row |= norms_of_replicas(sums[:-1].view(self.replicas, self.replicas))
        row |= {f'diloco/{kind}_s': value for kind, value in self._seconds().items()}
        row |= {'diloco/bytes': self.bytes_sent, 'diloco/bytes_formula': self.round_bytes(self.dtype)}
        self.reset_health()
        return row

    def rehearse(self, numbers, dtype):
        """Time an exchange of this many numbers, all zeros: returns (seconds, how many of them were computation)."""
        scratch = {'scratch': torch.zeros(numbers, device=self.device)}
        fragment = Fragment(0, scratch, 0, self.fragments[0].anchor.device, self.on_host, False, BUCKET)
        fragment.anchor.zero_()
        run_dtype, self.dtype = self.dtype, dtype
        self.reset_health()
        began = time.perf_counter()
        self.send(fragment, step=0, last=True)
        if self.on_cuda:
            torch.cuda.synchronize()
        seconds, computing, self.dtype = time.perf_counter() - began, self._seconds()['compute'], run_dtype
        self.reset_health()
        return seconds, computing

    def round_bytes(self, dtype):
        """Bytes that this rank sends in a round, without scales: 2 N b (M-1)/M, for a shard of N numbers of b bytes."""
        numbers = sum(len(fragment.anchor) for fragment in self.fragments)
        return 2 * numbers * BYTES[dtype] * (self.replicas - 1) / self.replicas


def norms_of_replicas(gram):
    """Metrics from the inner products (M, M) of the replicas' pseudo-gradients d, on the host."""
    squares, norms = gram.diagonal(), gram.diagonal().sqrt()
    mean_square = gram.mean().item()  # |mean|^2, since mean = sum of d_m / M
    drift = squares.mean().item() - mean_square  # E |d - mean|^2 = E |d|^2 - |mean|^2
    row = {
        'diloco/replica_norm': squares.mean().sqrt().item(),
        'diloco/delta_norm': math.sqrt(max(mean_square, 0.0)),  # max(nan, 0) is nan, max(0, nan) is 0
        'diloco/drift': math.sqrt(max(drift, 0.0)),
    }
    if norms.all():  # a pseudo-gradient of zero has no direction
        first, second = torch.triu_indices(len(gram), len(gram), 1)
        cosines = gram[first, second] / (norms[first] * norms[second])
        row |= {'diloco/cosine': cosines.mean().item(), 'diloco/cosine_min': cosines.min().item()}
    return row


def parts_of(pieces):
    """Flat views of a bucket's pieces (parameter, first, end); writing to them changes the parameters."""
    return [local(parameter).view(-1)[first:end] for parameter, first, end in pieces]


def check(keys, layout, shape):
    """Raises ValueError if the keys of DiLoCo do not fit together."""
    config = {'num_fragments': 1, 'overlap_steps': 0, **keys}  # train_pool.py has no such keys
    steps, fragments, overlap = config['inner_steps'], config['num_fragments'], config['overlap_steps']
    if steps > config['max_iters']:
        raise ValueError(
            f'inner_steps={steps}: expected at most max_iters={config["max_iters"]}, a round is part of the run'
        )
    if fragments > min(steps, config['n_layer']):
        raise ValueError(
            f'num_fragments={fragments}: expected at most inner_steps={steps} and n_layer={config["n_layer"]}'
        )
    if overlap and overlap * fragments >= steps:
        raise ValueError(
            f'overlap_steps={overlap}: expected less than inner_steps / num_fragments = {steps / fragments:g}, '
            'an exchange lands before the next one begins'
        )
