"""Packed documents of transformers' classes: which see each other, and what is learned where they would."""

import importlib
import itertools
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from precision import assert_as_close_to_float64, in_float64, of_draws
from pretrained import HYBRID, MODELS, MORE_MODELS, OF_LENGTH, POSITIONS, TURN, VOCABULARY, save_model

from huggingface import finetune, loading, self_test
from huggingface.pretrained import Pretrained
from runtime import fill

KINDS = [*HYBRID, *MODELS, *MORE_MODELS]


@pytest.fixture(scope='module')
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp('models')
    for kind in KINDS:
        save_model(folder / kind, kind)
    return folder


def loaded(folder, dtype=torch.float32):
    pretrained = Pretrained(folder, block_size=POSITIONS)
    return pretrained, loading.for_generation(pretrained, None, dtype, 'cpu')


@pytest.mark.parametrize('size', [0.2, 1])
@pytest.mark.parametrize('kind', KINDS)
def test_documents_that_see_each_other_are_found_in_every_dtype_however_little_it_is(models, kind, size):
    """Where weights are small, bf16 rounds away nearly all that one document does to another."""
    for dtype in (torch.float32, torch.bfloat16):
        pretrained, model = loaded(models / kind, dtype)
        with torch.no_grad():
            for block in model.blocks:
                for parameter in block.parameters():
                    parameter.mul_(size if parameter.dim() > 1 else 1)
        assert pretrained.keeps_documents_apart == (kind not in HYBRID)
        if kind in HYBRID:
            problem = f'self-test: {pretrained.arch} lets packed documents see each other: --packing=False'
            with pytest.raises(ValueError, match=problem):
                self_test.run(model, model, pretrained, False, True, torch.device('cpu'))
        else:
            line = self_test.run(model, model, pretrained, False, True, torch.device('cpu'))
            assert line.endswith('packed documents do not see each other')


LENGTHS = [9, 23, 1, 40]


def padded(draw):
    """(x, y) of conversations that are padded to 48 tokens."""
    x = torch.randint(VOCABULARY, (len(LENGTHS), 48), generator=torch.Generator().manual_seed(5 + draw))
    y = x.roll(-1, 1)
    y[:, 0] = -1  # a question
    for row, length in enumerate(LENGTHS):
        x[row, length:], y[row, length:] = 0, -1
    y[2, 0] = 7
    return x, y


def gradients_of(model, losses_of, draw):
    """{'loss': the sum, and name: gradient of each parameter}"""
    model.zero_grad()
    total = sum(losses_of(model, *padded(draw)))
    total.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {'loss': total.detach(), **gradients}


@pytest.mark.parametrize('kind', HYBRID)
def test_padded_rows_teach_what_one_conversation_at_a_time_does(models, kind):
    import transformers

    def one_at_a_time(model, x, y):
        for row, length in enumerate(LENGTHS):
            logits = model(x[row : row + 1, :length], use_cache=False).logits[0]
            yield F.cross_entropy(logits, y[row, :length], ignore_index=-1, reduction='sum')

    ours = loaded(models / kind)[1].train()
    found = of_draws(lambda draw: gradients_of(ours, lambda model, x, y: [model(x, y)[0]], draw))
    theirs, float64 = (
        transformers.AutoModelForCausalLM.from_pretrained(models / kind, dtype=dtype)
        for dtype in (torch.float32, torch.float64)
    )
    expected = of_draws(lambda draw: gradients_of(theirs, one_at_a_time, draw))
    if hasattr(float64.config.get_text_config(), 'num_experts_per_tok'):
        float64.set_experts_implementation('eager')  # grouped_mm has no float64
    with in_float64():  # also what these classes compute in fp32 whatever their dtype: norms and states
        exact = of_draws(lambda draw: gradients_of(float64, one_at_a_time, draw))
    assert exact['loss'].min() > 1 and len(exact) > 5
    assert_as_close_to_float64(found, expected, exact, kind)


@pytest.mark.parametrize('kind', OF_LENGTH)
def test_what_depends_on_lengths_is_computed_in_each_row_as_transformers_computes_it_alone(tmp_path, kind):
    import transformers

    pretrained, model = loaded(save_model(tmp_path, kind, initializer_range=0.3))
    assert pretrained.keeps_documents_apart == (kind != 'llama4_text')
    lengths = [20, TURN + 7, 5] if pretrained.keeps_documents_apart else [TURN + 7]
    x = torch.randint(VOCABULARY, (1, POSITIONS), generator=torch.Generator().manual_seed(4))
    borders = [0, *itertools.accumulate(lengths)]

    def alone(dtype):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
        if dtype == torch.float64 and kind == 'phimoe':
            theirs.set_experts_implementation('eager')  # grouped_mm has no float64
        return {
            f'document {n}': theirs(x[:, a:b], use_cache=False).logits
            for n, (a, b) in enumerate(itertools.pairwise(borders))
        }

    with torch.no_grad():
        if pretrained.keeps_documents_apart:
            logits = model(x, None, torch.tensor([borders]))
            assert torch.equal(model.train()(x, None, torch.tensor([borders])), logits), 'no noise in training'
        else:
            logits = model(x[:, : borders[1]])
        found = {f'document {n}': logits[:, a:b] for n, (a, b) in enumerate(itertools.pairwise(borders))}
        assert_as_close_to_float64(found, alone(torch.float32), alone(torch.float64), kind)


@pytest.fixture
def alone():
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def of_self_test(folder, dtype, packed, change=lambda model: None):
    """What the self-test says of a model that has been changed."""
    pretrained, model = loaded(folder, dtype)
    loading.cast_weights(model, dtype, 'cpu')
    model.compute_dtype = dtype
    change(model)
    try:
        return self_test.run(model, model, pretrained, not packed, packed, torch.device('cpu'))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_the_self_test_sees_that_a_batch_chooses_the_rotation_of_its_texts(tmp_path, dtype):
    folder = save_model(tmp_path, 'phi3_longrope', initializer_range=0.3)
    assert of_self_test(folder, dtype, True).endswith('packed documents do not see each other')
    with mock.patch.object(finetune.rotation, 'by_document'):
        said = of_self_test(folder, dtype, True)
    assert 'computes a document in the middle of a packed row otherwise than alone' in said


def test_the_self_test_sees_that_attention_counts_columns(tmp_path):
    said = of_self_test(save_model(tmp_path, 'llama4_text', initializer_range=0.3), torch.float32, True)
    assert re.search('llama4_text computes a document in the middle .*--packing=False gives each', said)


@torch.no_grad()
def rounding_moves_logits(folder, dtype):
    """By which part of their norm rounding to dtype moves the logits of three in four tokens in transformers' class."""
    import transformers

    x = torch.randint(VOCABULARY, (1, POSITIONS), generator=torch.Generator().manual_seed(4))
    rounded, exact = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=each).eval()(x, use_cache=False).logits
        for each in (dtype, torch.float32)
    )
    return self_test.logits_differ(rounded.float(), exact, exact=False)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_the_self_test_sees_that_a_router_chooses_other_experts(tmp_path, alone, dtype):
    def without_jitter(model):
        for module in model.jittered:
            module.router_jitter_noise = 0.0

    # In bfloat16 a near tie of the routers sends a token to another expert, in transformers' class as well.
    folders = (save_model(tmp_path / str(draw), 'phimoe', draw=draw, router_jitter_noise=0.1) for draw in range(20))
    folder = next(folder for folder in folders if rounding_moves_logits(folder, dtype) < 0.05)
    assert 'logits are those of' in of_self_test(folder, dtype, False)
    assert 'logits differ from those of the folder' in of_self_test(folder, dtype, False, without_jitter)


def test_the_self_test_reaches_a_window(tmp_path, alone):
    folder = save_model(tmp_path, 'mistral', sliding_window=40, initializer_range=0.3)
    right = finetune.causal_attention

    def too_near(*args, sliding_window=None, **options):
        return right(*args, sliding_window=sliding_window - 1, **options)

    assert 'logits are those of' in of_self_test(folder, torch.float32, False)
    with mock.patch.object(finetune, 'causal_attention', too_near):
        assert 'logits differ' in of_self_test(folder, torch.float32, False)


def test_padding_that_would_count_as_text_is_refused():
    config = SimpleNamespace(packing=False, block_size=64)
    run = SimpleNamespace(config=config, pretrained=SimpleNamespace(turning_point=32, arch='phi3'), learns_from='text')
    run.train_data = SimpleNamespace(is_packed=True)
    with pytest.raises(ValueError, match='^packing=False with block_size=64: phi3 .* 32 tokens: .*--block_size=32$'):
        fill.refuse_padding_that_counts(run)
    config.block_size = 32
    fill.refuse_padding_that_counts(run)


def test_a_self_test_that_fails_leaves_the_compiler_as_it_was():
    class TooLarge(torch.nn.Module):
        compute_dtype = torch.float32

        def get_output_embeddings(self):
            return self

        def forward(self, x):
            raise torch.OutOfMemoryError('CUDA out of memory')

    from transformers import LlamaConfig

    importlib.import_module('torch._dynamo')  # without which there is nothing to leave
    with pytest.raises(torch.OutOfMemoryError):
        pretrained = SimpleNamespace(block_size=8, vocab_size=9, config=LlamaConfig())
        self_test.run(TooLarge(), TooLarge(), pretrained, True, False, torch.device('cpu'))
    assert torch._dynamo.eval_frame._stance.stance == 'default'
