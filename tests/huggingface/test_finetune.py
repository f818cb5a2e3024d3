"""Fine-tuning of transformers models: what is loaded, and what training computes, beside transformers itself."""

import itertools
import os
import re
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import TINY_RUN, fork_script, run_function, run_many
from outputs import column
from precision import apart, assert_same_run, error
from pretrained import HYBRID, MODELS, MORE_MODELS, POSITIONS, VOCABULARY, save_model, sharded, write_chats
from short import slow_but

os.environ['HF_HUB_OFFLINE'] = '1'

import data
import optim
from huggingface import finetune, loading, self_test
from huggingface.pretrained import Pretrained
from keys import Keys
from system import collectives

# --- on every rank ----------------------------------------------------------------------------------------------------


def loaded(folder, implementation, **options):
    """The model of `folder` for training, sharded by an implementation, or whole on every rank."""
    pretrained = Pretrained(folder, **options)
    with torch.device('meta'):
        model = finetune.for_training(pretrained)
    sharded(model, implementation)
    with warnings.catch_warnings():
        warnings.filterwarnings('error', 'DTensor random')  # a rule of transformers' that draws numbers for shards
        model.to_empty(device='cpu')
        loading.load(model, pretrained)
    return pretrained, model


def compare_with_transformers(folder, implementation):
    """What the tests need to know about one model on these ranks."""
    import transformers

    pretrained, model = loaded(folder, implementation, block_size=POSITIONS)
    x = torch.randint(VOCABULARY, (2, 37), generator=torch.Generator().manual_seed(7))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(x).logits
        logits = model(x)
        loss_sum, ce_sum = model(x, x.roll(-1, 1))
    state = {
        name: tensor.full_tensor() if hasattr(tensor, 'full_tensor') else tensor
        for name, tensor in model.state_dict().items()
    }
    weights = theirs.state_dict()
    return {
        'logits_apart': error(logits, expected),
        'spread': expected.std().item(),
        'loss': ce_sum.item()
        / F.cross_entropy(expected.flatten(0, 1), x.roll(-1, 1).flatten(), reduction='sum').item(),
        'names': sorted(state) == sorted(weights),
        'weights': all(torch.equal(state[name], weights[name]) for name in state),
        'self_test': self_test.run(model, model, pretrained, True, True, torch.device('cpu')),
    }


def packing(folder, implementation):
    """Logits of packed documents: beside those of each document alone, and after another document has changed."""
    _, model = loaded(folder, implementation, block_size=POSITIONS)
    lengths = [5, 11, 1, 20]
    x = torch.randint(VOCABULARY, (1, sum(lengths)), generator=torch.Generator().manual_seed(9))
    starts = torch.tensor([[0, *itertools.accumulate(lengths)]])  # the last one is the end, which is not used
    model.eval()
    with torch.no_grad():
        packed = model(x, None, starts).split(lengths, 1)
        alone = [model(document) for document in x.split(lengths, 1)]
        changed = x.clone()
        changed[0, 7] = (x[0, 7] + 1) % VOCABULARY  # in the second document
        after = model(changed, None, starts).split(lengths, 1)
    return {
        'alone': max((a - b).abs().max().item() for a, b in zip(packed, alone, strict=True)),
        'moved': [not torch.equal(a, b) for a, b in zip(packed, after, strict=True)],
    }


def self_test_of_a_wrong_attention(folder):
    """What the self-test says of a model whose attention is not causal."""
    right = finetune.causal_attention
    finetune.causal_attention = lambda *args, **options: right(*args, **options, is_causal=False)
    try:
        pretrained, model = loaded(folder, 'whole', block_size=POSITIONS)
        return self_test.run(model, model, pretrained, True, False, torch.device('cpu'))
    except ValueError as error:
        return str(error)
    finally:
        finetune.causal_attention = right


def patience_with_rank_0(folder):
    """For how long the other ranks wait for what rank 0 reads: weights whose stored names differ from those in the
    model, and the model again for the self-test."""
    asked, on_rank_0 = [], collectives.on_rank_0

    def ask(decide, *arguments, patience_s=None):
        asked.append(patience_s)
        return on_rank_0(decide, *arguments, patience_s=patience_s)

    with mock.patch.object(collectives, 'on_rank_0', ask):
        pretrained, model = loaded(folder, 'whole', block_size=POSITIONS)
        self_test.run(model, model, pretrained, True, False, torch.device('cpu'))
    return asked


def self_test_of_a_state_space_model(folder):
    """What the self-test says of a state-space model, for conversations and for text."""
    pretrained, model = loaded(folder, 'whole', block_size=POSITIONS)
    with pytest.raises(ValueError) as refused:
        self_test.run(model, model, pretrained, True, True, torch.device('cpu'))
    return str(refused.value), self_test.run(model, model, pretrained, True, False, torch.device('cpu'))


# Of MORE_MODELS the short suite has one that scales scores in its own way, one with experts, one with layers that know
# no positions, and one that keeps its own attention; of HYBRID those that single tests are about. test_packing.py has
# all of them.
SHORT_CLASSES, SHORT_HYBRID = ['granite', 'mixtral', 'smollm3', 'gemma2'], ['mamba', 'lfm2']


def run_cases(folder, more_models):
    """{'llama torch': what compare_with_transformers and packing returned}, and so on."""
    results = {}
    for kind in MODELS:
        for implementation in ('whole', 'torch', 'manual'):
            results[f'{kind} {implementation}'] = compare_with_transformers(str(folder / kind), implementation)
            results[f'{kind} {implementation}'] |= packing(str(folder / kind), implementation)
    for kind in more_models if dist.get_world_size() == 2 else ():
        for implementation in ('torch', 'manual'):
            results[f'{kind} {implementation}'] = compare_with_transformers(str(folder / kind), implementation)
            results[f'{kind} {implementation}'] |= packing(str(folder / kind), implementation)
    results['sabotaged'] = self_test_of_a_wrong_attention(str(folder / 'llama'))
    results['mamba'] = self_test_of_a_state_space_model(str(folder / 'mamba'))
    return results


@pytest.fixture(scope='module')
def models(tmp_path_factory, has_slow_tests):
    folder = tmp_path_factory.mktemp('models')
    for kind in [*MODELS, *((*MORE_MODELS, *HYBRID) if has_slow_tests else (*SHORT_CLASSES, *SHORT_HYBRID))]:
        save_model(folder / kind, kind)
    return folder


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.fixture(
    scope='module', params=[pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def on_ranks(request, models, has_slow_tests):
    """{'llama torch': what compare_with_transformers and packing returned, ...} on so many ranks."""
    return run_function(request.param, run_cases, models, [*MORE_MODELS] if has_slow_tests else SHORT_CLASSES)[0]


@pytest.mark.parametrize('implementation', ['whole', 'torch', 'manual'])
@pytest.mark.parametrize('kind', MODELS)
def test_weights_and_logits_after_a_sharded_load_are_those_of_from_pretrained(on_ranks, kind, implementation):
    found = on_ranks[f'{kind} {implementation}']
    assert found['spread'] > 0.1, 'logits that are all alike prove nothing'
    assert found['logits_apart'] <= apart() and found['names'] and found['weights']
    assert abs(found['loss'] - 1) < apart()
    assert float(re.search(r'\(difference (\S+) of their norm\)', found['self_test'])[1]) <= apart()


@pytest.mark.parametrize('implementation', ['whole', 'torch', 'manual'])
@pytest.mark.parametrize('kind', MODELS)
def test_a_token_of_one_packed_document_changes_no_logit_of_another(on_ranks, kind, implementation):
    found = on_ranks[f'{kind} {implementation}']
    assert found['moved'] == [False, True, False, False]
    assert found['alone'] < 1e-5  # with a mask, floats are summed in another order


@pytest.mark.parametrize('on_ranks', [2], indirect=True)
@pytest.mark.parametrize('implementation', ['torch', 'manual'])
@pytest.mark.parametrize('kind', slow_but(SHORT_CLASSES, MORE_MODELS))
def test_other_classes_compute_what_transformers_computes(on_ranks, kind, implementation):
    found = on_ranks[f'{kind} {implementation}']
    assert found['spread'] > 0.05 and found['logits_apart'] <= apart() and found['names'] and found['weights']
    assert abs(found['loss'] - 1) < apart()
    assert found['moved'][1] and found['alone'] < 1e-5


def test_every_class_with_our_attention_is_compared_with_its_own():
    kinds = {'llama', 'qwen2', 'qwen3', 'mistral', 'gpt2', *MORE_MODELS}
    assert set(finetune.OWN_ATTENTION) <= kinds


def test_a_state_space_model_is_refused_with_packed_conversations_and_passes_without_them(on_ranks):
    refused, passed = on_ranks['mamba']
    advice = '--packing=False gives each a sequence of its own'
    assert refused == f'self-test: mamba lets packed documents see each other: {advice}'
    assert passed.startswith('self-test: the loss is that of the logits')


def test_ranks_wait_longer_for_weights_that_rank_0_reads_than_for_a_collective(models):
    (asked,) = run_function(1, patience_with_rank_0, str(models / 'mixtral'))
    assert len(asked) == 2 and None not in asked and min(asked) > 3600


def test_the_self_test_finds_an_attention_that_is_wrong(on_ranks):
    assert 'logits differ' in on_ranks['sabotaged'] and 'cannot be trained' in on_ranks['sabotaged']


def test_in_16_bits_a_few_tokens_may_have_gone_to_other_experts():
    expected = torch.randn(1, 32, 100, generator=torch.Generator().manual_seed(0))
    for wrong, is_wrong in ((slice(0, 8), False), (slice(8, None), True)):
        logits = expected * 1.005
        logits[:, wrong] = expected.roll(1, 1)[:, wrong]
        assert self_test.logits_differ(logits, expected, exact=True) > 0.1
        assert bool(self_test.logits_differ(logits, expected, exact=False) > 0.1) == is_wrong


@pytest.mark.parametrize('kind', ['gpt2', 'llama', 'mixtral', 'gpt_neox', 'mamba'])
def test_whether_a_class_has_dropout_is_seen_in_what_it_computes(tmp_path, kind):
    pretrained = Pretrained(save_model(tmp_path, kind), dropout=0.5)
    model = finetune.for_training(pretrained)
    x = torch.arange(24)[None]
    with torch.no_grad():
        differs = not torch.equal(model(x), model(x))
    assert pretrained.has_dropout == differs == (kind != 'mamba')


@pytest.mark.parametrize('kind', ['llama', 'gemma2'])  # with a loss in chunks, and from all logits
def test_z_loss_is_of_the_square_of_logsumexp(models, kind):
    pretrained = Pretrained(models / kind, z_loss=0.01)
    with torch.device('meta'):
        model = finetune.for_training(pretrained)
    model.to_empty(device='cpu')
    loading.load(model, pretrained)
    assert model.has_plain_head == (kind == 'llama')
    x = torch.randint(VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(3))
    y = x.roll(-1, 1)
    y[:, :7] = -1
    with torch.no_grad():
        loss_sum, ce_sum = model(x, y)
        logits = model(x)[y >= 0].float()
    torch.testing.assert_close(ce_sum, F.cross_entropy(logits, y[y >= 0], reduction='sum'))
    torch.testing.assert_close(loss_sum, ce_sum + 0.01 * logits.logsumexp(-1).square().sum())


@pytest.mark.parametrize('lora_rank', [0, 4])
def test_muon_trains_whole_matrices_and_leaves_those_of_lora_to_adamw(models, lora_rank):
    pretrained = Pretrained(models / 'llama', lora_rank=lora_rank)
    with torch.device('meta'):
        model = finetune.for_training(pretrained)
    by_muon, *others = optim.make_optimizer(model, 'muon', 1e-3, 0.9, 0.95, 0.1).param_groups
    assert len(by_muon['params']) == (0 if lora_rank else 3 * 7)  # q, k, v, o, gate, up, down of 3 blocks
    assert {group['update'] for group in others} == {'adamw-decay'}
    in_others = {id(parameter) for group in others for parameter in group['params']}
    lora = [parameter for name, parameter in model.named_parameters() if '.lora_' in name]
    assert len(lora) == (2 * 3 * 7 if lora_rank else 0) and all(id(parameter) in in_others for parameter in lora)


def test_lora_begins_with_other_numbers_in_every_module_and_for_every_seed(models):
    pretrained = Pretrained(models / 'llama', lora_rank=4)
    initial = []
    for seed in (1, 1, 2):
        with torch.device('meta'):
            model = finetune.for_training(pretrained)
        model.to_empty(device='cpu')
        loading.load(model, pretrained, seed)
        initial.append({name: p for name, p in model.named_parameters() if '.lora_' in name})
    first, same, other = initial
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(first[name].any() for name in first if name.endswith('lora_B'))
    drawn = [tensor for of_seed in (first, other) for name, tensor in of_seed.items() if name.endswith('lora_A')]
    assert len(drawn) == len(first) and all(tensor.unique().numel() == tensor.numel() for tensor in drawn)
    assert len({tensor[0, 0].item() for tensor in drawn}) == len(drawn)
    for tensor in drawn:  # uniform within 1 / sqrt(in)
        assert 0.8 < tensor.abs().max() * tensor.shape[1] ** 0.5 <= 1


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def prepared(tmp_path_factory, models):
    """A data_dir with 'text' and 'chats'."""
    folder, text = tmp_path_factory.mktemp('data'), tmp_path_factory.mktemp('text')
    for number, path in enumerate(sorted(Path(os.__file__).parent.glob('*.py'))[:20]):
        (text / f'{number:02}.txt').write_bytes(path.read_bytes()[:4000])
    write_chats(text / 'chats.jsonl')
    common = [f'--tokenizer={models / "llama"}', f'--data_dir={folder}', '--val_fraction=0.2', '--num_proc=2']
    fork_script('prepare_data.py', f'--dataset={text / "chats.jsonl"}', '--name=chats', *common)
    (text / 'chats.jsonl').unlink()
    fork_script('prepare_data.py', f'--dataset={text}', '--name=text', *common)
    return folder


STEPS, SEQUENCES, LENGTH = 10, 12, 48
DATASETS = {
    'text': {'dataset': 'text'},
    'chats': {'dataset': 'chats'},
    'documents': {'dataset': 'text', 'windows': 'documents'},
    'text among chats': {'dataset': 'text:0.5,chats:0.5', 'windows': 'documents'},
}


def losses_of_a_plain_loop(folder, prepared, dataset, **options):
    """The losses of ten steps by one process with the class of transformers and AdamW. Packed documents run one by
    one, and conversations with a row of their own without its padding."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    tables = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    head = model.get_output_embeddings().weight
    decayed = {p for p in model.parameters() if p.dim() > 1 and (p not in tables or p is head)}
    groups = [
        {'params': list(decayed)},
        {'params': [p for p in model.parameters() if p not in decayed], 'weight_decay': 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    keys = {'data_dir': str(prepared), 'dataset_stages': (), 'block_size': LENGTH, 'vocab_size': VOCABULARY}
    keys |= {'windows': 'stream', 'packing': folder.name not in HYBRID, **DATASETS[dataset]}
    train_data = data.open_mixture(keys, 'train')
    train_data.plan(STEPS, SEQUENCES)
    batches = data.batches(train_data, Keys.seed, 0, SEQUENCES, SEQUENCES, 0, 1, 'cpu')
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group['lr'] = 3e-3 * (step + 1) / 6 if step < 5 else 3e-3
        x, y, *packed = next(batches)
        total = 0.0
        for row in range(SEQUENCES):
            end = (y[row] >= 0).nonzero()[-1].item() + 1
            borders = sorted({*packed[0][row].tolist(), LENGTH}) if packed else [0, end]
            for start, end in itertools.pairwise(borders):
                logits = model(x[row : row + 1, start:end], use_cache=False).logits[0]
                total = total + F.cross_entropy(logits, y[row, start:end], ignore_index=-1, reduction='sum')
        loss = total / (y >= 0).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    batches.close()
    return losses


KEYS = [*TINY_RUN, f'--max_iters={STEPS}', '--lr_schedule=constant', f'--block_size={LENGTH}', '--dtype=float32']
KEYS += [f'--global_batch_size={SEQUENCES}', '--checkpoint_interval=0', '--eval_interval=0']
STRATEGIES = {
    'ddp': ('train_ddp.py', []),
    'fsdp torch': ('train_fsdp.py', ['--fsdp_impl=torch']),
    'fsdp manual': ('train_fsdp.py', ['--fsdp_impl=manual']),
    'fsdp manual, checkpointing': ('train_fsdp.py', ['--fsdp_impl=manual', '--activation_checkpointing=full']),
    'fsdp torch, selective': ('train_fsdp.py', ['--activation_checkpointing=selective', '--accumulate=sharded']),
    'diloco of one replica': (
        'train_diloco.py',
        ['--num_replicas=1', '--inner_steps=10', '--outer_lr=1', '--outer_momentum=0'],
    ),
}


CASES = [('llama_tied', dataset, size, name) for dataset in ('text', 'chats') for size in (2, 6) for name in STRATEGIES]
CASES += [('llama_tied', dataset, 6, name) for dataset in list(DATASETS)[2:] for name in ('ddp', 'fsdp manual')]
CASES += [(kind, 'chats', 2, name) for kind in ('gpt2', 'mistral') for name in ('ddp', 'fsdp torch', 'fsdp manual')]
CASES += [(kind, 'chats', 2, name) for kind in ('lfm2', 'qwen3_next', 'mamba2') for name in ('ddp', 'fsdp torch')]
CASES += [('lfm2', 'text among chats', 6, 'fsdp manual')]


# The short suite has these: each strategy once, packed and not, and each kind of dataset.
SHORT = [
    ('llama_tied', 'text', 2, 'ddp'),
    ('llama_tied', 'chats', 6, 'fsdp torch'),
    ('gpt2', 'chats', 2, 'fsdp manual'),
]
SHORT += [('llama_tied', 'text among chats', 6, 'fsdp manual'), ('lfm2', 'chats', 2, 'fsdp torch')]


@pytest.fixture(scope='module')
def trained(tmp_path_factory, models, prepared, has_slow_tests):
    """out_dirs of every strategy on 2 ranks, with 3 micro-steps and with 1, on text and on packed conversations."""
    folder = tmp_path_factory.mktemp('runs')
    cases = []
    for kind, dataset, batch_size, strategy in CASES if has_slow_tests else SHORT:
        script, options = STRATEGIES[strategy]
        name = f'{kind} {dataset} {batch_size} {strategy}'
        options = [*options, f'--out_dir={folder / name}', f'--batch_size={batch_size}']
        options += [f'--{key}={value}' for key, value in DATASETS[dataset].items()]
        options += [f'--init_from={models / kind}', f'--data_dir={prepared}']
        cases.append({'name': name, 'script': script, 'arguments': [*KEYS, *options]})
    run_many(cases, 2, folder)
    return folder


@pytest.mark.parametrize(
    ('kind', 'dataset', 'batch_size', 'strategy'),
    slow_but(SHORT, CASES, lambda *case: case),
)
def test_ten_steps_are_those_of_a_plain_transformers_loop(trained, plain, kind, dataset, batch_size, strategy):
    losses, expected = column(trained / f'{kind} {dataset} {batch_size} {strategy}', 'loss'), plain(kind, dataset)
    assert len(losses) == STEPS and expected[-1] < expected[0] - 0.05
    assert_same_run(losses, expected)


@pytest.fixture(scope='module')
def plain(models, prepared):
    """plain(kind, dataset): the losses of the plain loop, computed once."""
    found = {}

    def losses(kind, dataset):
        if (kind, dataset) not in found:
            found[kind, dataset] = losses_of_a_plain_loop(models / kind, prepared, dataset)
        return found[kind, dataset]

    return losses
