"""Folders of models that benchmarks/fuzz.py has drawn, and that once ended in a traceback or were trained as another
model."""

import json
import shutil

import pretrained as models
import pytest
import torch
from pretrained import EXPERTS, SIZES, save_model
from safetensors.torch import load_file, save_file

from huggingface import finetune
from huggingface.files import INDEX, SINGLE, Weights
from runtime.errors import is_users_mistake


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
    pretrained = finetune.Pretrained(str(folder))
    with torch.device('meta'):
        return finetune.for_training(pretrained)


@pytest.mark.parametrize(
    'changes',
    [
        {'num_hidden_layers': 3.0},
        {'num_attention_heads': '4'},
        {'hidden_act': 'none of them'},
        {'hidden_act': None},
        {'pad_token_id': 300},
        {'dtype': 'torch.bfloat17'},
        {'rope_parameters': {'rope_type': 'none of them', 'rope_theta': 1e4}},
        {'rope_parameters': 5},
        {'tie_word_embeddings': 'true'},
    ],
    ids=str,
)
def test_a_value_that_transformers_cannot_use_is_one_line(changes, folders, tmp_path):
    folder = copy_of(folders['llama'], tmp_path, **changes)
    with pytest.raises(ValueError) as refused:
        model_of(folder)
    message = str(refused.value)
    assert (
        is_users_mistake(refused.value) and '\n' not in message and str(folder) in message and 'config.json' in message
    )


def test_values_that_do_not_fit_together_are_found_by_running_the_class(folders, tmp_path):
    folder = copy_of(folders['qwen3'], tmp_path, layer_types=['sliding_attention'] * 3)
    pretrained = finetune.Pretrained(str(folder))
    with pytest.raises(ValueError, match='as config.json says.*sliding_window'):
        finetune.check_class_runs(pretrained, torch.zeros(1, 4, dtype=torch.long))
    finetune.check_class_runs(finetune.Pretrained(folders['qwen3']), torch.zeros(1, 4, dtype=torch.long))


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
        finetune.whole_model(finetune.Pretrained(str(folder)))
    assert '\n' not in str(refused.value)


@pytest.mark.parametrize('size', [36, 35])  # 72 bytes in bfloat16; not even in float32 a multiple of 16
def test_experts_of_any_size_are_computed_in_half_precision_too(size, tmp_path, monkeypatch):
    sizes = SIZES | EXPERTS | {'head_dim': 16, 'moe_intermediate_size': size}
    monkeypatch.setitem(models.MORE_MODELS, 'uneven', ('Qwen3MoeConfig', sizes))
    pretrained = finetune.Pretrained(save_model(tmp_path, 'uneven'))
    model = finetune.for_generation(pretrained, None, torch.bfloat16, 'cpu')
    finetune.cast_weights(model, torch.bfloat16, 'cpu')
    x = torch.arange(24)[None]
    with torch.no_grad():
        expected = finetune.reference_logits(pretrained, x)
        assert (model(x).float() - expected).norm() < 0.1 * expected.norm()
    model(x, x.roll(-1, 1))[0].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert 'experts are computed one after the other' in finetune.cautions(model, pretrained)[0]
    assert not finetune.has_uneven_experts(model_of(save_model(tmp_path / 'even', 'qwen3_moe')))
