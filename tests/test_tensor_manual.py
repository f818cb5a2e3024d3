"""tensor_manual.py: scores and checkpoints are those of one process, and the bytes are those that its text promises.
proving/test_lessons.py has its losses and gradients.

The ranks run all cases once and return what each of them saw, and the tests look at that.
"""

import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from launch import TINY_MODEL, TINY_RUN, TINY_SYNTHETIC, Job, refusals, run_function
from layouts import layout_of
from outputs import weights_of
from precision import apart, error
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fsdp
import fsdp_manual
import optim
import tensor_manual
from evaluation import scoring
from evaluation.tasks import Request
from layout import Ranks, Share
from model import GPT, ModelConfig
from planning import memory, traffic
from runtime import checkpoint, checkpoint_saver, meter

CPU = torch.device('cpu')
BATCH, T, VOCABULARY = 4, 32, 90  # padded to 128, so the last of 4 ranks has nothing but padding
SIZES = dict(n_layer=2, n_head=4, n_embd=24, mlp_hidden_dim=40, vocab_size=VOCABULARY, block_size=T)
GPT2 = dict(arch='gpt2', **SIZES)
ENOKI = dict(arch='enoki', head_dim=8, **SIZES)
LLAMA = dict(arch='llama', n_kv_head=4, head_dim=8, **SIZES)
GROUPED = dict(LLAMA, n_kv_head=2, z_loss=1e-3)
NEAR = dict(window_pattern='SL', window_size=9, logit_softcap=0.3)  # logits have a deviation of 0.1 at first
QWEN3 = dict(arch='qwen3', n_kv_head=2, head_dim=8, attention_gate=True, tie_embeddings=True, **NEAR, **SIZES)
TIED_GATED = QWEN3 | dict(n_kv_head=4)
DEFAULTS = dict(model=dict(LLAMA, n_kv_head=2, z_loss=1e-3), tensor=2, fsdp='torch', checkpointing='none')


# --- WHAT THE RANKS RUN -----------------------------------------------------------------------------------------------


def batch_of(step):
    """x, y (BATCH, T). Some targets are ignored."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (3, BATCH, T + 1), generator=generator).amin(0)  # small ones are likelier
    x, y = tokens[:, :-1], tokens[:, 1:].clone()
    y[:, ::5] = -1
    return x, y


class Layout:
    """A model laid out over all ranks as a case says, and its optimizer. case=None: the whole model in one process."""

    def __init__(self, case, alone=False):
        self.case, self.alone = case, alone
        self.raw = self.model = GPT(ModelConfig(**case['model']))
        self.raw.checkpoint_activations(case['checkpointing'])
        self.ranks = 1 if alone else dist.get_world_size()
        self.tensor, self.share = None, Share()
        if not alone:
            layout = layout_of('fsdp', dist.get_world_size(), tensor=case['tensor'])
            self.mesh = layout.mesh(CPU, 60)
            if case['tensor'] > 1:
                self.tensor = tensor_manual.Split(self.raw, Ranks.of(self.mesh['tensor']), self.share)
                self.mesh = self.mesh[self.mesh.mesh_dim_names[:-1]]
        with torch.no_grad():
            for name, parameter in self.raw.named_parameters():
                parameter.copy_(self.share.initial_value(self.raw, name, parameter, 7, 'cpu'))
        if not alone:
            self.shard()
        self.optimizer = torch.optim.AdamW(self.raw.parameters(), lr=1e-3, fused=True)

    def shard(self):
        if self.case['fsdp'] == 'manual':
            self.model = fsdp_manual.shard(self.raw, self.raw.blocks, self.mesh)
        elif self.case['fsdp'] == 'ddp':
            self.model = DistributedDataParallel(self.raw)
        elif self.case['fsdp'] == 'torch':
            fsdp.by_torch(self.raw, self.raw.blocks, self.mesh)

    def train(self, steps):
        """[loss of each step], as in train_parallel.py."""
        shared = 1 if self.alone else self.case['tensor']
        rows = BATCH * shared // self.ranks
        first = 0 if self.alone else dist.get_rank() // shared * rows
        losses = []
        for step in steps:
            x, y = batch_of(step)
            targets = shared * (y >= 0).sum()
            loss, ce = self.model(x[first : first + rows], y[first : first + rows])
            (loss * self.ranks / targets).backward()
            if self.tensor:
                self.tensor.sum_partial_gradients()
            norm_groups = self.tensor.norm_groups() if self.tensor else ()
            optim.clip_grad_norm_(self.raw.parameters(), 1.0, *norm_groups)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if not self.alone:
                dist.all_reduce(ce)
            losses.append(ce.item() / targets.item())
        return losses

    def whole(self, tensors):
        """{name: whole tensor}, put together from what all ranks hold. Collective."""
        full = {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach() for name, t in tensors.items()}
        if self.tensor is None:
            return {name: tensor.clone() for name, tensor in full.items()}
        everybodys = [None] * self.ranks
        dist.all_gather_object(everybodys, (self.share.slices, full))
        found = {}
        for slices, parts in everybodys:
            for name, part in parts.items():
                shape, dim, ranges = slices[name]
                if dim is None:  # the same bits on all ranks
                    assert torch.equal(found.setdefault(name, part), part), name
                    continue
                whole = found.setdefault(name, torch.full(shape, torch.nan, dtype=part.dtype))
                for (first, length), piece in zip(ranges, part.split([n for _, n in ranges], dim), strict=True):
                    whole.narrow(dim, first, length).copy_(piece)
        return found

    def weights_and_moments(self):
        tensors = self.whole(dict(self.raw.named_parameters()))
        for slot in ('exp_avg', 'exp_avg_sq'):
            found = {name: self.optimizer.state[p][slot] for name, p in self.raw.named_parameters()}
            tensors |= {f'{name}.{slot}': tensor for name, tensor in self.whole(found).items()}
        return tensors


def keys_of(case):
    """The keys by which planning/ predicts a run of this case on all ranks."""
    keys = {'context_parallel': 1, 'tensor_parallel': case['tensor'], 'dtype': 'float32'}
    keys |= {'batch_size': BATCH, 'global_batch_size': BATCH * dist.get_world_size() // case['tensor'], 'device': 'cpu'}
    keys |= {'replicate_size': 1, 'zero_stage': 3, 'fsdp_impl': 'manual', 'blocks_per_unit': 1}
    keys |= {'accumulate': 'unsharded', 'optimizer': 'adamw', 'cpu_offload': 'none', 'prefetch': 1}
    return keys | {'activation_checkpointing': case['checkpointing'], **ModelConfig(**case['model']).to_dict()}


def sent_bytes(case):
    """Bytes that this rank sends in forward and backward of one step: as counted here, by Linux, and by the formula."""
    layout, counted, t = Layout(case), [], case['tensor']

    def spy(function, size_of):
        def call(*args, **kwargs):
            counted.append(size_of(*args))
            return function(*args, **kwargs)

        return mock.patch.object(dist, function.__name__, call)

    with (
        spy(dist.all_to_all_single, lambda output, tensor: (t - 1) * tensor.nbytes / t),
        spy(dist.all_reduce, lambda tensor: 2 * (t - 1) * tensor.nbytes / t),
    ):
        dist.barrier()
        before = meter.written(Path('/proc/self/io'))
        layout.model(*batch_of(1))[0].backward()
        layout.tensor.sum_partial_gradients()
        by_linux = meter.written(Path('/proc/self/io')) - before
    formula = traffic.communication_bytes(keys_of(case), GPT(ModelConfig(**case['model'])), t, 'fsdp')['sent']
    return {'counted': sum(counted), 'by_linux': by_linux, 'formula': formula}


def held(case):
    """Bytes of weights and of moments: on this rank, and as predicted for the first rank."""
    layout = Layout(case)
    layout.train([0])
    states = [tensor for state in layout.optimizer.state.values() for tensor in state.values() if tensor.dim()]
    sizes = [sum(optim.local(tensor).nbytes for tensor in of) for of in ([*layout.raw.parameters()], states)]
    parts = memory.memory_bytes(keys_of(case), GPT(ModelConfig(**case['model'])), dist.get_world_size(), 'fsdp')
    return sizes, [parts['weights'], parts['optimizer']]


def kept(case):
    """Bytes that the blocks save for backward on this rank, and in one process."""
    sizes = []
    for layout in (Layout(case), Layout(case, alone=True)):
        weights, saved = {p.untyped_storage().data_ptr() for p in layout.raw.parameters()}, {}

        def note(tensor, saved=saved, weights=weights):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        h = layout.raw.embed(batch_of(1)[0])
        layout.raw.rotary.prepare(h.device)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            for block in layout.raw.blocks:
                h = block(h)
        sizes.append(sum(saved.values()))
        del h
    return sizes


def with_dropout(case):
    """Losses of steps with noise."""
    layout = Layout(case)
    torch.manual_seed(dist.get_rank())  # as train_fsdp.py has it
    losses = layout.train([*range(19), 0])  # the first batch again, so that its loss must have fallen
    layout.whole(dict(layout.raw.named_parameters()))  # what all ranks hold has the same bits
    return losses


def scored(case):
    """How far scores are from those of one process: nats of all requests by their norm, and how many targets are the
    likeliest token in one and not in the other."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 12, (9, 3), generator=generator).tolist()  # lengths that do not divide by the ranks
    items = []
    for trunk, *choices in lengths:
        tokens = torch.randint(0, VOCABULARY, (trunk + 12,), generator=generator).tolist()
        items.append([Request([*tokens[:trunk], *tokens[-n:]], n) for n in choices])
    items.append([Request([5, 3, 7, choice], 1) for choice in range(VOCABULARY)])  # one of them is the likeliest
    found = []
    for layout, ranks in ((Layout(case), case['tensor']), (Layout(case, alone=True), 1)):
        layout.train(range(3))
        scores = scoring.log_likelihoods(layout.model.eval(), items, T, BATCH, CPU, ranks_per_batch=ranks)
        found.append(torch.tensor([score for of_item in scores for score in of_item]))
    assert found[1][-VOCABULARY:, 1].sum() == 1
    return error(found[0][:, 0], found[1][:, 0]), (found[0][:, 1] != found[1][:, 1]).sum().item()


def exchange(folder):
    """[(saving layout, loading layout, tensors that differ)] for every two layouts. One is that of train_ddp.py, where
    each rank holds everything."""
    layouts = {
        'ddp': dict(tensor=1, fsdp='ddp'),
        'fsdp': dict(tensor=1),
        'tp': dict(tensor=dist.get_world_size(), fsdp='manual'),
        'dp_tp': dict(fsdp='torch'),
        'manual_tp': dict(fsdp='manual'),
    }
    layouts = {name: DEFAULTS | dict(model=TIED_GATED) | case for name, case in layouts.items()}
    saved, found = {}, []
    for name, case in layouts.items():
        layout = Layout(case)
        layout.train(range(2))
        saver = checkpoint_saver.Saver(f'{folder}/{name}', 1, async_save=name == 'dp_tp', say=lambda line: None)
        saver.save(2, layout.raw, layout.optimizer, {}, share=layout.share)
        saver.wait()
        saved[name] = layout.weights_and_moments()
    for name, case in layouts.items():
        for of in layouts:
            layout = Layout(case)
            checkpoint.load(
                f'{folder}/{of}/checkpoints/step_00000002', layout.raw, layout.optimizer, share=layout.share
            )
            tensors = layout.weights_and_moments()
            assert tensors.keys() == saved[of].keys()
            found.append((of, name, [key for key in tensors if not torch.equal(tensors[key], saved[of][key])]))
    weights, _ = checkpoint.load_weights(f'{folder}/tp/checkpoints/step_00000002')
    found.append(('tp', 'sample.py', [name for name in weights if not torch.equal(weights[name], saved['tp'][name])]))
    return found


def run_cases(folder, has_slow_tests):
    """{name of a case: what this rank saw}."""
    world_size = dist.get_world_size()
    results = {}
    scoring_cases = [dict(model=QWEN3, fsdp='manual')]
    if has_slow_tests:
        scoring_cases += [dict(model=model) for model in (GPT2, LLAMA)]
    results['scored'] = [scored(DEFAULTS | case) for case in scoring_cases]
    if world_size == 4 and has_slow_tests:
        results['exchange'] = exchange(folder)
    alone = DEFAULTS | dict(tensor=world_size, fsdp=None, model=LLAMA)
    modes = [dict(checkpointing=mode) for mode in ('none', 'selective', 'full')]
    results['sent'] = [sent_bytes(alone | case) for case in (*modes, dict(model=GPT2), dict(model=ENOKI))]
    results['held'] = [held(DEFAULTS | case) for case in (dict(model=QWEN3), dict(model=GPT2, fsdp='manual'))]
    results['kept'] = [kept(alone | mode) for mode in modes]
    results['dropout'] = with_dropout(DEFAULTS | dict(model=GPT2 | dict(dropout=0.2)))
    return results


# --- TESTS ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module', params=[pytest.param(2, marks=pytest.mark.slow), 4])
def world_size(request):
    return request.param


RESULTS = {}


@pytest.fixture
def seen(world_size, tmp_path_factory, has_slow_tests):
    """What each rank saw, [{name: ...}, ...]; the ranks run once."""
    if world_size not in RESULTS:
        RESULTS[world_size] = []  # stays empty if the ranks fail, so that they are not started again
        folder = str(tmp_path_factory.mktemp('checkpoints'))
        RESULTS[world_size] = run_function(world_size, run_cases, folder, has_slow_tests, timeout=280)
    return RESULTS[world_size]


def test_bytes_sent_are_those_of_the_formula(seen):
    for of_rank in seen:
        for result in of_rank['sent']:
            assert result['counted'] == result['formula'], result
            assert result['formula'] <= result['by_linux'] <= 1.1 * result['formula'], result  # with headers


def test_a_rank_holds_what_is_predicted(seen):
    for ours, predicted in seen[0]['held']:
        assert ours == predicted


def test_a_rank_keeps_its_share_of_the_activations(seen, world_size):
    for of_rank in seen:
        none, selective, full = (mine / whole for mine, whole in of_rank['kept'])
        assert selective == full == 1 / world_size < none < 1.25 / world_size  # without, what was gathered is kept


@pytest.mark.slow
def test_a_checkpoint_is_the_same_for_every_layout(seen, world_size):
    for saving, loading, different in seen[0].get('exchange', ()):
        assert not different, (saving, loading, different)
    assert world_size == 2 or len(seen[0]['exchange']) == 26


def test_scores_of_tasks_are_those_of_one_process(seen):
    for of_rank in seen:
        for nats, likeliest in of_rank['scored']:
            assert nats <= apart(3) and likeliest == 0  # after three steps


def test_with_dropout_what_all_ranks_hold_stays_the_same(seen):
    losses = seen[0]['dropout']
    assert losses[-1] < losses[0]


def test_one_nan_in_one_gradient_of_one_rank_costs_one_step_on_all(tmp_path):
    keys = [*TINY_SYNTHETIC, '--eval_sequences=0', '--tensor_parallel=2', '--max_iters=4', '--checkpoint_interval=1']
    keys += ['--keep_checkpoints=9', f'--out_dir={tmp_path / "run"}']
    job = Job('train_parallel.py', keys, 2, tmp_path / 'log', {'kind': 'nan', 'rank': 1, 'step': 3})
    assert job.wait() == [0, 0], job.text()
    assert re.search('WARNING: gradient .*ranks 0, 1 .*step 3: .*skipped', job.text())  # the norm is that of all ranks
    before, after, later = (weights_of(tmp_path / 'run', step) for step in (2, 3, 4))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not all(torch.equal(after[name], later[name]) for name in before)


@pytest.mark.slow
def test_an_overflow_in_fp16_on_one_rank_costs_one_step_on_all(tmp_path):
    keys = [*TINY_SYNTHETIC, '--eval_sequences=0', '--tensor_parallel=2', '--max_iters=5', '--checkpoint_interval=1']
    keys += ['--dtype=float16', '--keep_checkpoints=9', f'--out_dir={tmp_path / "run"}']
    job = Job('train_parallel.py', keys, 2, tmp_path / 'log', {'kind': 'overflow', 'rank': 1, 'step': 4})
    assert job.wait() == [0, 0], job.text()
    paths = [f'{tmp_path}/run/checkpoints/step_0000000{step}' for step in (3, 4, 5)]
    before, after, later = (checkpoint.load_weights(path)[0] for path in paths)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(later[name].isfinite().all() for name in before)
    assert not all(torch.equal(after[name], later[name]) for name in before)
    scales = [checkpoint.read_state(path)['scaler']['scale'] for path in paths]
    assert scales[1] == scales[2] == scales[0] / 2


# --- bad input --------------------------------------------------------------------------------------------------------


def test_the_script_refuses_in_one_line_before_there_is_a_process_group(tmp_path):
    keys = [*TINY_MODEL, *TINY_RUN, '--dataset=synthetic', '--vocab_size=97', f'--out_dir={tmp_path}/out']
    for line in refusals([['train_parallel.py', *keys, '--tensor_parallel=2', '--mlp_hidden_dim=57']] * 2):
        assert re.match('error: tensor_parallel=2 .*mlp_hidden_dim=57', line)
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (dict(n_head=6, n_kv_head=6), ' n_head=6: .*--n_head=4 or 8, .*tensor_parallel=2 with'),
        (dict(n_kv_head=2), ' n_kv_head=2: .*--n_kv_head=4, .*tensor_parallel=2 with'),
        (dict(block_size=36, context_parallel=2), ' 18 .*block_size / context_parallel=2: .*--block_size=64,'),
        (dict(block_size=256, n_head=6, n_kv_head=3, mlp_hidden_dim=96, vocab_size=192, tensor_parallel=3),
         'tensor_parallel=3 .* block_size=256: .*--block_size=192 or 384$'),
        (dict(n_head=6, n_kv_head=3, mlp_hidden_dim=96, vocab_size=256, tensor_parallel=3),
         ' 256: .*--vocab_size=384$'),
        (dict(tensor_parallel=3), ' n_head=4: .*--n_head=3 or 6'),
        (dict(tensor_parallel=128, n_head=128, n_kv_head=128, mlp_hidden_dim=128, block_size=128, vocab_size=64),
         ' 64: .*--vocab_size=128, .*tensor_parallel=2 or 4 or 8'),
        (dict(optimizer_dtype='int8'), 'int8.* --optimizer_dtype=bfloat16'),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_would(changes, message):
    keys = ModelConfig(**{**LLAMA, **{key: value for key, value in changes.items() if key in SIZES or 'n_' in key}})
    config = {'tensor_parallel': 4, 'context_parallel': 1, 'optimizer': 'adamw', 'optimizer_dtype': 'float32'}
    config |= {**keys.to_dict(), **changes}
    with pytest.raises(ValueError, match=message):
        tensor, context = config['tensor_parallel'], config['context_parallel']
        layout = layout_of('fsdp', tensor * context, tensor=tensor, context=context)
        tensor_manual.check(config, layout, keys)


def test_models_of_transformers_are_refused():
    with pytest.raises(ValueError, match='transformers .*cut'):
        tensor_manual.check({}, layout_of('fsdp', 2, tensor=2), 'a Pretrained')
