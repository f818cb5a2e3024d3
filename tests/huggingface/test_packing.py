"""Packed documents of transformers' classes: which see each other, and what is learned where they would."""

import importlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from precision import assert_as_close_to_float64
from pretrained import HYBRID, MODELS, MORE_MODELS, POSITIONS, VOCABULARY, save_model

from huggingface import finetune

KINDS = [*HYBRID, *MODELS, *MORE_MODELS]


@pytest.fixture(scope='module')
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp('models')
    for kind in KINDS:
        save_model(folder / kind, kind)
    return folder


def loaded(folder, dtype=torch.float32):
    pretrained = finetune.Pretrained(folder, block_size=POSITIONS)
    return pretrained, finetune.for_generation(pretrained, None, dtype, 'cpu')


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
                finetune.self_test(model, model, pretrained, False, True, torch.device('cpu'))
        else:
            line = finetune.self_test(model, model, pretrained, False, True, torch.device('cpu'))
            assert line.endswith('packed documents do not see each other')


def gradients_of(model, losses):
    """{'loss': the sum, and name: gradient of each parameter}"""
    total = sum(losses)
    total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {'loss': total.detach(), **gradients}


@pytest.mark.parametrize('kind', HYBRID)
def test_padded_rows_teach_what_one_conversation_at_a_time_does(models, kind):
    import transformers

    lengths, T = [9, 23, 1, 40], 48
    x = torch.randint(VOCABULARY, (len(lengths), T), generator=torch.Generator().manual_seed(5))
    y = x.roll(-1, 1)
    y[:, 0] = -1  # a question
    for row, length in enumerate(lengths):
        x[row, length:], y[row, length:] = 0, -1
    y[2, 0] = 7

    def one_at_a_time(dtype):
        model = transformers.AutoModelForCausalLM.from_pretrained(models / kind, dtype=dtype)
        if dtype == torch.float64 and hasattr(model.config.get_text_config(), 'num_experts_per_tok'):
            model.set_experts_implementation('eager')  # grouped_mm has no float64
        losses = []
        for row, length in enumerate(lengths):
            logits = model(x[row : row + 1, :length], use_cache=False).logits[0]
            losses.append(F.cross_entropy(logits, y[row, :length], ignore_index=-1, reduction='sum'))
        return gradients_of(model, losses)

    _, model = loaded(models / kind)
    found = gradients_of(model.train(), [model(x, y)[0]])
    expected, exact = one_at_a_time(torch.float32), one_at_a_time(torch.float64)
    assert exact['loss'] > 1 and len(exact) > 5
    assert_as_close_to_float64(found, expected, exact, kind)


def test_a_self_test_that_fails_leaves_the_compiler_as_it_was():
    class TooLarge(torch.nn.Module):
        compute_dtype = torch.float32

        def forward(self, x):
            raise torch.OutOfMemoryError('CUDA out of memory')

    importlib.import_module('torch._dynamo')  # without which there is nothing to leave
    with pytest.raises(torch.OutOfMemoryError):
        pretrained = SimpleNamespace(block_size=8, vocab_size=9)
        finetune.self_test(TooLarge(), TooLarge(), pretrained, True, False, torch.device('cpu'))
    assert torch._dynamo.eval_frame._stance.stance == 'default'
