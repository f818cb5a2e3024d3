"""The code has no race between streams (see streams.py), and has one as soon as any of its waits is taken away."""

import unittest.mock
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from streams import Checker, Event, Stream, load
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import optim
from model import GPT, ModelConfig


def assert_faults(checker, removed):
    assert checker.operations > 0
    if removed:
        assert checker.faults, 'a wait was taken away and nobody noticed'
    else:
        assert not checker.faults, '\n'.join(sorted(set(checker.faults))[:5])


@pytest.fixture
def fake_group():
    """A process group in which this is rank 1 of so many, and collectives do nothing."""

    def begin(ranks):
        dist.init_process_group('fake', store=FakeStore(), rank=min(1, ranks - 1), world_size=ranks)

    yield begin
    dist.destroy_process_group()


# --- fsdp_manual.py ---------------------------------------------------------------------------------------------------

AS_ON_CUDA = [
    ("self.on_cuda = meshes[0].device_type == 'cuda'", 'self.on_cuda = True'),
    ("torch.device('cuda', torch.cuda.current_device()) if self.on_cuda else", 'None or'),
    ("torch.cuda.Stream(device, priority=-1) if device.type == 'cuda' else None", 'torch.cuda.Stream()'),
    ('pin=self.offload and self.on_cuda', 'pin=False'),
    ("average.to('cpu', non_blocking=not is_read)", 'CHECKER.copy(average, to_host=True, non_blocking=not is_read)'),
]


def train_sharded(
    removed=(), ranks=4, stage=3, prefetch=1, accumulate='unsharded', mode='none', per_unit=1, hsdp=False,
    offload=False, experts=0,
):  # fmt: skip
    """Two steps of two micro-steps with an evaluation between them, under a Checker.

    experts: over how many ranks the experts of a mixture are sharded; tokens are not sent to them here.
    """
    fsdp_manual = load('fsdp_manual.py', *AS_ON_CUDA, *removed)
    fsdp_manual.Event = Event
    sizes = {
        'n_layer': 3,
        'n_head': 2,
        'n_embd': 16,
        'vocab_size': 64,
        'block_size': 8,
        'n_experts': 4 if experts else 0,
    }
    model = GPT(ModelConfig(arch='llama', **sizes), torch.bfloat16)
    model.checkpoint_activations(mode)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    shape = {'mesh_shape': (2, 2), 'mesh_dim_names': ('replicate', 'shard')} if hsdp else {'mesh_shape': (ranks,)}
    mesh = init_device_mesh('cpu', **shape)
    theirs = {}
    if experts:
        their_mesh = init_device_mesh('cpu', (ranks // experts, experts), mesh_dim_names=('part', 'shard'))['shard']
        theirs = {'experts': [block.mlp.experts for block in model.blocks], 'their_mesh': their_mesh}
    units = [model.blocks[first : first + per_unit] for first in range(0, 3, per_unit)]
    checker = fsdp_manual.CHECKER = Checker()
    has_memory = fsdp_manual.Room.has_memory

    def give_back_or_take(room, wanted):  # the dispatcher does not see resize_() of a storage
        storage = room.flat.untyped_storage()
        if (storage.size() > 0) and not wanted and storage._cdata in checker.memories:
            checker.free(storage._cdata)
        has_memory(room, wanted)
        checker.memory_of(room.flat)

    with checker, unittest.mock.patch.object(fsdp_manual.Room, 'has_memory', give_back_or_take):
        sharded = fsdp_manual.shard(model, units, mesh, torch.bfloat16, stage, prefetch, offload, **theirs)
        if offload:
            checker.hold_on_host(*model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
        x = torch.randint(64, (2, 8))
        for step in range(2):
            for last in (False, True):
                sharded.set_requires_gradient_sync(accumulate == 'sharded' or last)
                sharded.set_reshard_after_backward(last)
                sharded(x, x)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                sharded.eval()
                with torch.no_grad():
                    sharded(x, x)
                sharded.train()
                sharded.reshard()
        checker.communication = sharded.communication()
        checker.forget_what_was_freed()
    return checker


def sharding(**case):
    """Arguments of train_sharded(). A case that changes several things at once is marked slow."""
    name = ' '.join(f'{key}={value}' for key, value in case.items()) or 'default'
    return pytest.param(case, id=name, marks=pytest.mark.slow if len(case) > 1 else ())


SHARDING = [
    sharding(), sharding(stage=2), sharding(stage=1), sharding(prefetch=0), sharding(prefetch=2),
    sharding(accumulate='sharded'), sharding(mode='full'), sharding(mode='full', stage=2, prefetch=2),
    sharding(per_unit=2), sharding(hsdp=True), sharding(hsdp=True, accumulate='sharded', stage=1),
    sharding(ranks=1), sharding(ranks=1, stage=1, mode='full'), sharding(offload=True),
    sharding(offload=True, accumulate='sharded'), sharding(offload=True, ranks=1), sharding(experts=2),
    sharding(experts=1), sharding(experts=2, prefetch=2, stage=2), sharding(experts=1, offload=True, mode='full'),
]  # fmt: skip


@pytest.mark.parametrize('case', SHARDING)
def test_sharding_has_no_race(fake_group, case):
    fake_group(case.get('ranks', 4))
    assert_faults(train_sharded(**case), removed=False)


WAITS_OF_FSDP = {
    'a lane begins behind what was issued': (
        '        self.stream.wait_stream(torch.cuda.current_stream())\n', ''
    ),
    'a gathered block is there before it is copied into its room': (
        'self.in_flight.pop(unit)\n        self.wait(handle)\n', 'self.in_flight.pop(unit)\n'
    ),
    'a reduction is through before its result is used': (
        'group.reduction = group.reduction, None\n        self.wait(handle)\n',
        'group.reduction = group.reduction, None\n',
    ),
    'one reduction at a time, for its buffers': (
        '        self.finish_reduce_scatter(group)  # at most one of a group in flight: its buffers are free then\n', ''
    ),
    'the end of a collective is what one waits for': (
        '        collective(output, source, group=group)\n        return self.mark()\n',
        '        mark = self.mark()\n        collective(output, source, group=group)\n        return mark\n',
    ),
}  # fmt: skip


WAITS_OF_FSDP_OFFLOADED = {
    'gradients are on the host when backward ends': (
        '            torch.cuda.current_stream().synchronize()', '            pass'
    ),
    'a gradient is on the host before the host adds to it': ('non_blocking=not is_read', 'non_blocking=True'),
}  # fmt: skip


@pytest.mark.parametrize('wait', WAITS_OF_FSDP)
def test_without_a_wait_sharding_has_a_race(fake_group, wait):
    fake_group(4)
    assert_faults(train_sharded([WAITS_OF_FSDP[wait]]), removed=True)


@pytest.mark.parametrize('wait', WAITS_OF_FSDP_OFFLOADED)
def test_without_a_wait_sharding_with_parameters_on_the_host_has_a_race(fake_group, wait):
    fake_group(4)
    accumulate = 'sharded' if 'adds' in wait else 'unsharded'
    assert_faults(train_sharded([WAITS_OF_FSDP_OFFLOADED[wait]], accumulate=accumulate, offload=True), removed=True)


def test_the_time_spent_waiting_is_there_before_it_is_read(fake_group):
    fake_group(4)
    assert train_sharded().communication['fsdp/wait'] > 0
    without = train_sharded([('            torch.cuda.synchronize()\n', '            pass\n')])
    assert without.communication['fsdp/wait'] == 0


# --- diloco.py --------------------------------------------------------------------------------------------------------


DILOCO_AS_ON_CUDA = [
    ("self.on_cuda = self.device.type == 'cuda'", 'self.on_cuda = True'),
    ('on_host and first.is_cuda', 'on_host'),
    ('home, self.on_host, with_error, bucket)', 'home, False, with_error, bucket)'),
    ('fragment.anchor[first:end].to(self.device, non_blocking=True)', 'CHECKER.copy(fragment.anchor[first:end])'),
    ('error.to(self.device, non_blocking=True)', 'CHECKER.copy(error)'),
    ('state.to(self.device, non_blocking=True)', 'CHECKER.copy(state) if self.on_host else state'),
]


def train_diloco(
    removed=(), fragments=2, overlap=1, dtype='bfloat16', error_feedback=True, on_host=False, rehearses=False,
    resumes=False,
):  # fmt: skip
    """Three rounds of four steps, in the middle of which the whole state is read. resumes: after step 6, when something
    is in flight, another Outer goes on from that state."""
    diloco = load('diloco.py', *DILOCO_AS_ON_CUDA, *removed)
    diloco.digest = lambda tensors: sum(tensor.sum() for tensor in tensors)
    parameters = {f'blocks.{number}.w': nn.Parameter(torch.randn(40, 16)) for number in range(2)}
    parameters['embed'] = nn.Parameter(torch.randn(64, 16))

    def update(anchor, delta, momentum):
        momentum.mul_(0.9).add_(delta)
        anchor.sub_(delta, alpha=0.7).sub_(momentum, alpha=0.63)

    checker = diloco.CHECKER = Checker()

    def make_outer():
        outer = diloco.Outer(
            parameters, update, dist.group.WORLD, inner_steps=4, num_fragments=fragments, overlap_steps=overlap,
            dtype=dtype, error_feedback=error_feedback, on_host=on_host, bucket=512,
        )  # fmt: skip
        for fragment in outer.fragments if on_host else ():
            checker.hold_on_host(fragment.anchor, fragment.momentum, fragment.error)
        return outer

    def read(tensors):  # a checkpoint
        for key, tensor in tensors.items():
            tensor.copy_(stored[key])

    with checker, torch.no_grad():
        outer = make_outer()
        if rehearses:
            outer.rehearse(1024, dtype)
        for step in range(1, 13):
            for parameter in parameters.values():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
            for fragment in outer.to_land(step, step == 12):
                outer.land(fragment, step)
            for fragment in outer.to_send(step, step == 12):
                outer.send(fragment, step, last=step == 12)
            if step % 4 == 0:
                outer.health()
            if step == 5:
                outer.checksums()
            if step == 6:
                stored = {key: tensor.double().float() for key, tensor in outer.tensors(True).items()}
                if resumes:
                    saved = {'step': step, 'diloco': outer.state(step)}
                    outer = make_outer()
                    assert outer.resume(saved, read) == step
            if step == 8:
                with outer.outer_parameters():
                    sum(parameter.sum() for parameter in parameters.values())
        checker.forget_what_was_freed()
    return checker


DILOCO = {
    'plain': {'fragments': 1, 'overlap': 0, 'dtype': 'float32', 'error_feedback': False},
    'int8': {'overlap': 0, 'dtype': 'int8'},
    'streamed': {},
    'int4, two steps late': {'overlap': 2, 'dtype': 'int4'},
    'state on the host': {'on_host': True},
    'state on the host, plain': {'on_host': True, 'overlap': 0, 'dtype': 'int8'},
    'resumed': {'resumes': True, 'overlap': 2},
    'resumed, state on the host': {'resumes': True, 'on_host': True},
}


@pytest.mark.parametrize('case', DILOCO)
def test_the_outer_loop_has_no_race(fake_group, case):
    fake_group(2)
    assert_faults(train_diloco(**DILOCO[case]), removed=False)


WAITS_OF_DILOCO = {
    'an exchange begins behind what was issued': ('        self.stream.wait_stream(torch.cuda.current_stream())\n', ''),
    'an exchange is through before its result is used': (
        '        torch.cuda.current_stream().wait_event(handle[0])\n', ''
    ),
    'an exchange in flight is through before the state is saved': (
        '                self._wait(handle)\n', '                pass\n'
    ),
    'state is on the host before it is saved': (
        '            torch.cuda.synchronize()  # who saves', '            pass  # who saves'
    ),
    'state is on the host before its checksum': (
        '        if self.on_host:\n            torch.cuda.synchronize()\n', ''
    ),
    'momentum is on the host before its norm': (
        '            torch.cuda.current_stream().synchronize()  # not with', '            pass  # not with'
    ),
}  # fmt: skip


@pytest.mark.parametrize('wait', WAITS_OF_DILOCO)
def test_without_a_wait_the_outer_loop_has_a_race(fake_group, wait):
    fake_group(2)
    assert_faults(train_diloco([WAITS_OF_DILOCO[wait]], on_host='on the host' in wait), removed=True)


def test_a_rehearsal_is_over_before_its_time_is_read(fake_group):
    fake_group(2)
    wait = '        if self.on_cuda:\n            torch.cuda.synchronize()\n'
    assert_faults(train_diloco(rehearses=True), removed=False)
    assert_faults(train_diloco([(wait, '')], rehearses=True), removed=True)


# --- offload.py -----------------------------------------------------------------------------------------------


AS_ON_CUDA_MOMENTS = [
    (
        "self.host[tensor] = torch.empty_like(tensor, device='cpu', pin_memory=tensor.is_cuda)",
        'self.host[tensor] = torch.empty_like(tensor); CHECKER.hold_on_host(self.host[tensor])',
    ),
    (
        "host = torch.zeros_like(part, dtype=dtype, device='cpu', pin_memory=part.is_cuda)",
        'host = torch.empty_like(part); CHECKER.hold_on_host(host); host.zero_()',
    ),
]


def train_offloaded(removed=(), resumes=False):
    """Three steps of an optimizer in four parts; the host reads the state after each. resumes: moments come from a
    checkpoint before the first step."""
    offload = load('offload.py', *removed, *AS_ON_CUDA_MOMENTS)
    parameters = [nn.Parameter(torch.randn(64)) for _ in range(4)]
    checker = offload.CHECKER = Checker()
    with checker:
        model = nn.ParameterList(parameters)
        keys = dict(learning_rate=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1)
        optimizer = offload.StateOnHost(optim.make_optimizer(model, 'adamw', **keys), part_bytes=8 * 64)
        if resumes:
            moments = [[optimizer.zeros_like(p, p.dtype) for _ in range(2)] for p in parameters]
            state = [{'step': torch.ones(()), 'exp_avg': m, 'exp_avg_sq': v} for m, v in moments]
            optimizer.load_state_dict({'state': dict(enumerate(state))})
            assert all(checker.memory_of(moment).on_host for both in moments for moment in both)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(64)
            optimizer.step()
            for state in optimizer.state.values():
                checker.host_reads(state['exp_avg'])
        checker.forget_what_was_freed()
    return checker


@pytest.mark.parametrize('resumes', [False, True])
def test_state_on_its_way_has_no_race(resumes):
    assert_faults(train_offloaded(resumes=resumes), removed=False)


WAITS_OF_OFFLOAD = {
    'a copy begins behind what was issued': (
        '        if stream:\n            stream.wait_stream(torch.cuda.current_stream())\n', ''
    ),
    'what comes is there before the step': ('            wait_for(arrived)\n', ''),
    'what goes is gone before its memory is': ('            wait_for(left)  # its', '            pass  # its'),
    'the last part is gone before the next step fetches': (
        '        wait_for(left)\n        for parameter, gradient', '        for parameter, gradient'
    ),
    'the host waits before it reads': ('            self.to_host.synchronize()\n', '            pass\n'),
}  # fmt: skip


@pytest.mark.parametrize('resumes', [False, True])
@pytest.mark.parametrize('wait', WAITS_OF_OFFLOAD)
def test_without_a_wait_state_on_its_way_has_a_race(wait, resumes):
    assert_faults(train_offloaded([WAITS_OF_OFFLOAD[wait]], resumes), removed=True)


AS_ON_CUDA_INPUTS = [
    ('tensor.is_cuda and ', ''),
    (
        "self.host = torch.empty_like(self.tensor, device='cpu', pin_memory=True)",
        'self.host = torch.empty_like(self.tensor); CHECKER.hold_on_host(self.host)',
    ),
    ("torch.empty_like(self.host, device='cuda', pin_memory=False)", 'torch.empty_like(self.host)'),
]


def train_with_inputs_on_host(removed=(), forwards=1, mode='offload'):
    """(gradients, checker, inputs that went to the host) of two steps. forwards: how many there are before the first
    backward, as in a pipeline."""
    offload = load('offload.py', *removed, *AS_ON_CUDA_INPUTS)
    model = GPT(ModelConfig(arch='llama', n_layer=4, n_head=2, n_embd=16, vocab_size=64, block_size=8, dropout=0.1))
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    x = torch.randint(64, (2, 8))
    checker = offload.CHECKER = Checker()
    on_host = unittest.mock.patch.object(checker, 'hold_on_host', wraps=checker.hold_on_host)
    with checker, on_host as to_host:
        offload.checkpoint_activations(model, mode)
        for _ in range(2):
            losses = [model(x, x)[0] for _ in range(forwards)]
            while losses:
                losses.pop(0).backward()
        checker.forget_what_was_freed()
    return [parameter.grad for parameter in model.parameters()], checker, to_host.call_count


@pytest.mark.parametrize('forwards', [1, 3])
def test_inputs_on_their_way_have_no_race_and_change_no_number(forwards):
    expected, _, _ = train_with_inputs_on_host(forwards=forwards, mode='none')
    gradients, checker, to_host = train_with_inputs_on_host(forwards=forwards)
    assert_faults(checker, removed=False)
    assert to_host == 2 * (4 * forwards - 1)  # 4 blocks; the last one's in a step is needed at once
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


WAITS_OF_INPUTS = {
    'a copy to the host begins behind what computed it': (
        "pin_memory=True)\n        stream.wait_stream(torch.cuda.current_stream())\n", 'pin_memory=True)\n'
    ),
    'a copy is over before others get its memory': ('            wait_for(self.leaving[1])\n', ''),
    'a copy from the host begins when its memory is free': (
        'pin_memory=False)\n            stream.wait_stream(torch.cuda.current_stream())\n', 'pin_memory=False)\n'
    ),
    'an input is there before its block is computed again': ('        wait_for(saved.arrived)\n', ''),
}  # fmt: skip


@pytest.mark.parametrize('wait', WAITS_OF_INPUTS)
def test_without_a_wait_inputs_on_their_way_have_a_race(wait):
    assert_faults(train_with_inputs_on_host([WAITS_OF_INPUTS[wait]])[1], removed=True)


# --- data.py ----------------------------------------------------------------------------------------------------------


class AtOnce:
    """In place of ThreadPoolExecutor: runs what is submitted immediately, as early as a thread could."""

    def __init__(self, **options):
        pass

    def submit(self, function, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self, cancel_futures):
        pass


AS_IT_IS = [('part.to(device, non_blocking=True)', 'CHECKER.copy(part)')]


def prefetch(copies=AS_IT_IS, memory_is_used_again=False):
    """A thread makes batches in page-locked memory while the GPU has not copied earlier ones yet."""
    data = load('data.py', *copies)
    data.ThreadPoolExecutor = AtOnce
    checker, beside = Checker(), Stream()

    def copy_beside(batch):
        with torch.cuda.stream(beside):
            return [checker.copy(part) for part in batch]

    data.CHECKER, data.COPY_BESIDE = checker, copy_beside

    def host_batches():
        memory = torch.empty(4, dtype=torch.int64)
        for number in range(20):
            x = memory if memory_is_used_again else torch.empty(4, dtype=torch.int64)
            checker.hold_on_host(x)
            yield (x.fill_(number),)

    with checker:
        for (x,) in data.run_ahead(host_batches(), 'cpu'):
            x.sum()
    return checker


def test_batches_that_run_ahead_have_no_race():
    """There is no wait to take away: copies are in the stream that computes, and each batch has memory of its own."""
    assert_faults(prefetch(), removed=False)


def test_batches_would_have_a_race_in_a_stream_of_their_own_or_in_the_same_memory():
    copies = 'tuple(part.to(device, non_blocking=True) for part in batch[:moving])'
    assert_faults(prefetch([(copies, 'COPY_BESIDE(batch)')]), removed=True)
    assert_faults(prefetch(memory_is_used_again=True), removed=True)


# --- where the host reads ---------------------------------------------------------------------------------------------


def stage(removed=()):
    """A checkpoint is copied to the host, where a thread writes it."""
    checkpoint = load(
        'runtime/checkpoint_saver.py',
        ('any(local_piece(tensor).is_cuda for tensor in tensors.values())', 'True'),
        *removed,
    )
    saver = checkpoint.Saver.__new__(checkpoint.Saver)
    saver.copies = {}
    with Checker() as checker:
        weight = torch.randn(8) * 2
        saver._stage({'weight': weight})
        checker.host_reads(saver.copies['weight'])
    return checker


def test_a_checkpoint_is_on_the_host_before_it_is_written():
    assert_faults(stage(), removed=False)
    assert_faults(stage([('            torch.cuda.synchronize()\n', '            pass\n')]), removed=True)


class AtLast:
    """In place of ThreadPoolExecutor: runs what is submitted once its result is asked for, as late as a thread may."""

    def __init__(self, **options):
        pass

    def submit(self, function, *arguments):
        return SimpleNamespace(result=lambda: function(*arguments))


def save_twice(removed=(), thread=AtOnce):
    """(checker, what was written for each step) of two checkpoints that a thread writes while training goes on."""
    checkpoint = load(
        'runtime/checkpoint_saver.py',
        ('any(local_piece(tensor).is_cuda for tensor in tensors.values())', 'True'),
        (
            "self.copies[key] = torch.empty_like(piece, device='cpu', pin_memory=piece.is_cuda)",
            'self.copies[key] = torch.empty_like(piece); CHECKER.hold_on_host(self.copies[key])',
        ),
        *removed,
    )
    saver, written = checkpoint.Saver.__new__(checkpoint.Saver), {}
    saver.keep, saver.copies, saver.thread, saver.pending = 1, {}, thread(), None
    saver.failure = None
    checker = checkpoint.CHECKER = Checker()
    saver._checked_share = lambda step, tensors: tensors

    def write(step, tensors, state, best, staging_s):
        written[step] = {key: copy + 0 for key, copy in saver.copies.items()}

    saver._write = write
    with checker:
        model = nn.Linear(4, 2)
        optimizer = optim.make_optimizer(model, 'adamw', learning_rate=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1)
        for step in (1, 2):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            saver.save(step, model, optimizer, {})
            with torch.no_grad():
                model.weight.add_(step)  # training goes on
        saver.wait()
    return checker, written


WAITS_OF_SAVES = {
    'a checkpoint is on the host before a thread writes it': (
        '            torch.cuda.synchronize()\n', '            pass\n'
    ),
    'the one before is written before its memory is used again': (
        '        self._go_on_after(self._finish_pending)\n', ''
    ),
}  # fmt: skip


def test_checkpoints_that_a_thread_writes_are_those_of_their_steps():
    torch.manual_seed(0)
    checker, at_once = save_twice()
    assert_faults(checker, removed=False)
    torch.manual_seed(0)
    checker, at_last = save_twice(thread=AtLast)
    assert_faults(checker, removed=False)
    for step in (1, 2):
        assert all(torch.equal(at_last[step][key], value) for key, value in at_once[step].items())
    assert not torch.equal(at_once[1]['model.weight'], at_once[2]['model.weight'])


def test_without_a_wait_checkpoints_are_damaged():
    copied, written = WAITS_OF_SAVES.values()
    assert_faults(save_twice([copied])[0], removed=True)
    assert save_twice([written], thread=AtLast)[1].keys() == {2}  # an error in the first one would go unnoticed


def measure(removed=()):
    """Three steps that are timed by events."""
    meter = load('runtime/meter.py', *removed)
    meter.device_name, meter.memory_gb = lambda device: 'a GPU', lambda device: {}
    with Checker() as checker:
        times = meter.Meter(torch.device('cuda'), 1, 100, 1e6)
        x = torch.zeros(8)
        for _ in range(3):
            times.begin_step()
            times.mark('forward')
            x = x * 2
            times.end_step()
        times.read_all()
        assert times.training_seconds > 0
    return checker


def test_a_step_is_over_before_its_time_is_read(fake_group):
    fake_group(1)
    assert_faults(measure(), removed=False)
    assert_faults(measure([('            self._unread[0].end.synchronize()\n', '            pass\n')]), removed=True)
    assert_faults(measure([('self._unread and self._unread[0].end.query()', 'self._unread')]), removed=True)


def decide(removed_in_health=(), removed_in_optim=()):
    """Two steps. Whether a step was skipped the host reads late, to report it and to count steps."""
    health = load(
        'runtime/health.py',
        ("return device.type == 'cuda'", 'return True'),
        ('if numbers.is_cuda:', 'if True:'),
        ("numbers.to('cpu', non_blocking=True)", 'numbers.clone()'),
        ('total, *flags = numbers.tolist()', 'HOST_READS(numbers); total, *flags = numbers.tolist()'),
        *removed_in_health,
    )
    optim = load(
        'optim.py',
        ('if skip.is_cuda:', 'if True:'),
        ("skip = skip.to('cpu', non_blocking=True)", 'skip = skip.clone()'),
        ('        if skip.item():', '        HOST_READS(skip)\n        if skip.item():'),
        *removed_in_optim,
    )
    parameter = nn.Parameter(torch.randn(8))
    with Checker() as checker:
        health.HOST_READS = optim.HOST_READS = checker.host_reads
        keys = dict(learning_rate=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1)
        optimizer = optim.make_optimizer(nn.ParameterList([parameter]), 'adamw', **keys)
        numbers = health.Numbers(3, False, print, lambda: 'none')
        for step in (1, 2):
            parameter.grad = torch.randn(8)
            norm = optim.clip_grad_norm_([parameter], 1.0)
            optimizer.step(skip=numbers.must_skip(step, parameter.detach().sum(), 10, norm, False))
        numbers.read()
        assert optimizer.state[parameter]['step'] == 2
    return checker


def test_a_decision_is_on_the_host_before_it_is_read(fake_group):
    fake_group(2)
    wait = ('            arrived.synchronize()\n', '            pass\n')
    assert_faults(decide(), removed=False)
    assert_faults(decide(removed_in_health=[wait]), removed=True)
    assert_faults(decide(removed_in_optim=[wait]), removed=True)


def read_gradients(removed=()):
    """DeepSpeed has copied gradients to the host, and the script asks for them."""
    deepspeed_engine = load('deepspeed_engine.py', *removed)
    with Checker() as checker:
        flat = torch.zeros(8)
        checker.hold_on_host(flat)
        flat.grad = checker.copy(torch.randn(8), to_host=True)
        zero = SimpleNamespace(cpu_offload=True, single_partition_of_fp32_groups=[flat])
        engine = SimpleNamespace(
            optimizer=zero, device=torch.device('cuda'), zero_optimization_stage=lambda: 2
        )  # fmt: skip
        for gradient in deepspeed_engine.gradients(engine):
            gradient.sum()
    return checker


def test_gradients_of_deepspeed_are_on_the_host_before_they_are_read():
    assert_faults(read_gradients(), removed=False)
    assert_faults(read_gradients([('            torch.cuda.synchronize()', '            pass')]), removed=True)


# --- the checker ------------------------------------------------------------------------------------------------------


def test_the_checker_sees_what_two_streams_do():
    """A write in one stream and a read in another, by hand, with and without an event between them."""
    for waits, other_bytes, expected in ((True, False, 0), (False, False, 1), (False, True, 0)):
        with Checker() as checker:
            tensor, side = torch.zeros(8), Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                tensor[:4].add_(1)
            if waits:
                torch.cuda.current_stream().wait_stream(side)
            (tensor[4:] if other_bytes else tensor[:4]).sum()
        assert len(checker.faults) == expected


def test_the_checker_sees_memory_that_is_freed_too_early():
    for keeps, expected in ((True, 0), (False, 1)):
        with Checker() as checker:
            tensor, side = torch.zeros(8), Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                tensor.sum()
            if not keeps:
                del tensor
            torch.zeros(8)
        assert len(checker.faults) == expected


def test_the_checker_sees_a_host_that_does_not_wait_for_a_copy():
    for non_blocking, expected in ((False, 0), (True, 1)):
        with Checker() as checker:
            tensor, on_host = torch.zeros(8), torch.empty(8)
            checker.hold_on_host(on_host)
            on_host.copy_(tensor, non_blocking=non_blocking)
            on_host.sum()
        assert len(checker.faults) == expected
