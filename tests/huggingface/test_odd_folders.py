"""Folders of models that tests/fuzz.py has drawn, and that once ended in a traceback or were trained as another
model."""

import json
import shutil

import pretrained as models
import pytest
import torch
from pretrained import EXPERTS, SIZES, save_model
from safetensors.torch import load_file, save_file

from huggingface import finetune, loading, self_test
from huggingface.files import INDEX, SINGLE, Weights
from huggingface.pretrained import Pretrained


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    """Folders of tiny models by name."""
    root = tmp_path_factory.mktemp('models')
    return {kind: save_model(root / kind, kind) for kind in ('llama', 'llama_tied', 'qwen3', 'gpt2')}


def copy_of(folder, tmp_path, **changes):
    """A copy of a folder with other values in its config.json."""
    shutil.copytree(folder, tmp_path / 'model')
    path = tmp_path / 'model' / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return tmp_path / 'model'


def model_of(folder):
    pretrained = Pretrained(str(folder))
    with torch.device('meta'):
        return finetune.for_training(pretrained)


def test_values_that_do_not_fit_together_are_found_by_running_the_class(folders, tmp_path):
    folder = copy_of(folders['qwen3'], tmp_path, layer_types=['sliding_attention'] * 3)
    pretrained = Pretrained(str(folder))
    with pytest.raises(ValueError, match='as config.json says.*sliding_window'):
        self_test.check_class_runs(pretrained, torch.zeros(1, 4, dtype=torch.long))
    self_test.check_class_runs(Pretrained(folders['qwen3']), torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize('content', ['{', '[]', '{}', '{"weight_map": []}', '{"weight_map": {"a": null}}'])
def test_an_index_that_lists_no_files_is_one_line(content, folders, tmp_path):
    folder = copy_of(folders['llama'], tmp_path)
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(content)
    with pytest.raises(ValueError, match=INDEX):
        Weights(folder)


def test_weights_that_transformers_cannot_load_are_one_line(folders, tmp_path):
    folder = copy_of(folders['llama'], tmp_path)
    tensors = load_file(folder / SINGLE)
    tensors['lm_head.weight'] = tensors['lm_head.weight'][:-1].contiguous()
    save_file(tensors, folder / SINGLE)
    with pytest.raises(ValueError, match='cannot load its weights') as refused:
        loading.whole_model(Pretrained(str(folder)))
    assert '\n' not in str(refused.value)


@pytest.mark.parametrize('make', [loading.for_inference, loading.for_generation])
def test_weights_that_do_not_fit_the_model_are_refused_and_named(tmp_path, make):
    pretrained = Pretrained(save_model(tmp_path, 'llama'))
    weights, name = loading.whole_model(pretrained).state_dict(), 'model.layers.1.mlp.up_proj.weight'
    more = () if make is loading.for_inference else (torch.float32, 'cpu')
    with pytest.raises(ValueError, match=f'LlamaForCausalLM lack {name}: '):
        make(pretrained, {key: value for key, value in weights.items() if key != name}, *more)
    with pytest.raises(ValueError, match='LlamaForCausalLM have other.weight, which it has not: '):
        make(pretrained, {**weights, 'other.weight': weights[name]}, *more)


@pytest.mark.parametrize('size', [36, 35])  # 72 bytes in bfloat16; not even in float32 a multiple of 16
def test_experts_of_any_size_are_computed_in_half_precision_too(size, tmp_path, monkeypatch):
    sizes = SIZES | EXPERTS | {'head_dim': 16, 'moe_intermediate_size': size}
    monkeypatch.setitem(models.MORE_MODELS, 'uneven', ('Qwen3MoeConfig', sizes))
    pretrained = Pretrained(save_model(tmp_path, 'uneven'))
    model = loading.for_generation(pretrained, None, torch.bfloat16, 'cpu')
    loading.cast_weights(model, torch.bfloat16, 'cpu')
    x = torch.arange(24)[None]
    with torch.no_grad():
        expected = self_test.reference_logits(pretrained, x)
        assert (model(x).float() - expected).norm() < 0.1 * expected.norm()
    model(x, x.roll(-1, 1))[0].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert 'experts are computed one after the other' in finetune.cautions(model, pretrained)[0]
    assert not finetune.has_uneven_experts(model_of(save_model(tmp_path / 'even', 'qwen3_moe')))


@pytest.mark.parametrize('kind', ['qwen3_moe', 'mixtral'])
def test_of_a_mixture_the_experts_that_compute_a_token_count(kind, tmp_path):
    """For the MFU, the log's first lines and the planner; the reference are FLOPs that PyTorch counts."""
    from torch.utils.flop_counter import FlopCounterMode

    folder = save_model(tmp_path / 'model', kind, sliding_window=None)
    pretrained = Pretrained(folder, block_size=models.POSITIONS)
    torch.manual_seed(1)
    model = finetune.for_training(pretrained)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.set_experts_implementation('eager')  # FlopCounterMode does not know grouped_mm
    x = torch.randint(models.VOCABULARY, (2, models.POSITIONS))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(x, x)[0].backward()
    in_vectors = 6 * sum(parameter.numel() for parameter in model.parameters() if parameter.dim() < 2)
    assert counter.get_total_flops() == pytest.approx(x.numel() * (model.flops_per_token() - in_vectors), rel=0.01)

    experts = sum(parameter.numel() for name, parameter in model.named_parameters() if '.experts.' in name)
    counts = model.parameter_counts()
    assert counts['active'] == counts['total'] - experts // 2  # 2 of 4
    with_lora = model_of_lora(folder)
    frozen = counts['active'] - models.VOCABULARY * 40  # without the embedding
    added = with_lora.parameter_counts()['trainable']
    assert with_lora.flops_per_token() == 4 * frozen + 6 * added + model.flops_of_attention


def model_of_lora(folder):
    pretrained = Pretrained(folder, block_size=models.POSITIONS, lora_rank=2, frozen_dtype='bfloat16')
    with torch.device('meta'):
        return finetune.for_training(pretrained)
