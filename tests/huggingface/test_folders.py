"""Folders of models as people have them are loaded as from_pretrained() loads them, or refused in one line."""

import json
import os
import shutil

import pytest
import torch
from pretrained import POSITIONS, VOCABULARY, save_model
from safetensors.torch import load_file, save_file
from torch import nn

os.environ['HF_HUB_OFFLINE'] = '1'

import fsdp
from huggingface import convert, finetune, loading, self_test
from huggingface.pretrained import Pretrained, copy_files
from system.errors import is_users_mistake
from text.tokenizer import KEPT

POINTER = 'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n'


@pytest.fixture(scope='module')
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp('originals')
    for kind in ('llama', 'llama_tied', 'gpt2'):
        save_model(folder / kind, kind)
    return folder


@pytest.fixture
def folder_of(originals, tmp_path):
    """folder_of(kind, **changes): a copy of a model's folder with other values in its config.json."""

    def copy(kind, **changes):
        folder = tmp_path / kind
        shutil.copytree(originals / kind, folder)
        config = json.loads((folder / 'config.json').read_text())
        (folder / 'config.json').write_text(json.dumps({**config, **changes}))
        return folder

    return copy


def loaded(folder):
    """(Pretrained, the model for training with the folder's weights)."""
    pretrained = Pretrained(str(folder), block_size=POSITIONS)
    with torch.device('meta'):
        model = finetune.for_training(pretrained)
    model.to_empty(device='cpu')
    loading.load(model, pretrained)
    return pretrained, model.eval()


@torch.no_grad()
def assert_loaded_as_by_transformers(folder):
    """Assert that training and the reference of its self-test load it so. Returns the Pretrained."""
    import transformers

    x = torch.randint(VOCABULARY, (1, 20), generator=torch.Generator().manual_seed(3))
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(x).logits
    pretrained, model = loaded(folder)
    assert torch.equal(model(x), expected)
    assert torch.equal(self_test.reference_logits(pretrained, x), expected)
    return pretrained


def add_head(folder, weight):
    weights = load_file(folder / 'model.safetensors')
    save_file({**weights, 'lm_head.weight': weight(weights)}, folder / 'model.safetensors', {'format': 'pt'})


@pytest.mark.parametrize('kind, embedding', [('llama_tied', 'model.embed_tokens'), ('gpt2', 'transformer.wte')])
def test_a_head_of_its_own_is_kept_whatever_config_json_says_of_ties(kind, embedding, folder_of, tmp_path):
    folder = folder_of(kind)
    assert assert_loaded_as_by_transformers(folder).facts['tie_embeddings']
    add_head(folder, lambda weights: weights[f'{embedding}.weight'].clone())  # the same: it stays one parameter
    assert assert_loaded_as_by_transformers(folder).facts['tie_embeddings']
    add_head(folder, lambda weights: weights[f'{embedding}.weight'] + 0.01)
    pretrained = assert_loaded_as_by_transformers(folder)
    assert not pretrained.facts['tie_embeddings']
    pretrained.keep_files(str(tmp_path / 'out'))  # the run goes on from there, without the weights
    kept = Pretrained(str(tmp_path / 'out' / KEPT), block_size=POSITIONS)
    assert not kept.facts['tie_embeddings']


def test_tensors_are_looked_for_in_the_files_and_not_where_an_index_says(folder_of):
    folder = folder_of('llama')
    weights = load_file(folder / 'model.safetensors')
    (folder / 'model.safetensors').unlink()
    names, places = sorted(weights), {}
    for number in (0, 1):
        save_file(
            {name: weights[name] for name in names[number::2]}, folder / f'{number}.safetensors', {'format': 'pt'}
        )
        places |= dict.fromkeys(names[number::2], f'{1 - number}.safetensors')  # each in the other one
    index = folder / 'model.safetensors.index.json'
    index.write_text(json.dumps({'metadata': {}, 'weight_map': places}))
    assert_loaded_as_by_transformers(folder)
    for content, why in ((POINTER, 'Git LFS.*lfs pull'), ('{"weight_map": 3}', 'found 3, .*download_model.py')):
        index.write_text(content)
        with pytest.raises(ValueError, match=f'index.json.*{why}'):
            loaded(folder)


@pytest.mark.parametrize(
    'changes, why',
    [
        ({'num_attention_heads': 4.0}, 'num_attention_heads.*expected int'),
        ({'num_key_value_heads': '2'}, "num_key_value_heads.*'2'"),
        ({'dtype': 'torch.bfloat16'}, 'torch.bfloat16'),
        ({'hidden_act': 'swish9'}, 'swish9'),
        ({'rope_parameters': {'rope_type': 'magic', 'rope_theta': 1e4}}, 'magic'),
        ({'attn_implementation': 'somebody/attention'}, 'somebody/attention.*code of the hub'),
        ({'pad_token_id': 300}, 'pad_token_id=300.*259 rows.*null'),
        ({'num_hidden_layers': 3.0}, 'num_hidden_layers'),
        ({'hidden_act': None}, 'config.json'),
        ({'dtype': 'torch.bfloat17'}, 'bfloat17'),
        ({'rope_parameters': 5}, 'config.json'),
        ({'tie_word_embeddings': 'true'}, 'tie_word_embeddings'),
    ],
    ids=str,
)
def test_what_transformers_makes_no_model_of_is_one_line_that_names_it(changes, why, folder_of):
    folder = folder_of('llama', **changes)
    with pytest.raises(ValueError, match=why) as refused:
        loaded(folder)
    message = str(refused.value)
    assert is_users_mistake(refused.value) and '\n' not in message and f'{folder}' in message, message
    assert 'config.json' in message or 'attn_implementation' in changes


def test_pointers_of_git_lfs_and_adapters_are_named_with_the_mend(folder_of):
    folder = folder_of('llama')
    for name in ('model.safetensors', 'config.json'):
        (folder / name).write_text(POINTER)
        with pytest.raises(ValueError, match=f'{name} is a pointer of Git LFS.*lfs pull'):
            loaded(folder)
    (folder / 'adapter_config.json').write_text(json.dumps({'base_model_name_or_path': 'some/base'}))
    with pytest.raises(ValueError, match='adapter of peft beside a model: take adapter_config.json'):
        loaded(folder)
    (folder / 'model.safetensors').unlink()
    with pytest.raises(
        ValueError, match=r'adapter of peft for the model some/base.*dtype="float32"\).merge_and_unload'
    ):
        loaded(folder)


def test_a_parameter_without_dimensions_is_not_sharded(folder_of):
    _, model = loaded(folder_of('llama'))
    fsdp.refuse_scalars(model)
    model.blocks[0].gate = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r'layers\.0\.gate has no dimensions.*under DDP.*--shard=none'):
        fsdp.refuse_scalars(model)


# --- what is older than transformers 5 --------------------------------------------------------------------------------

YARN = {'rope_type': 'yarn', 'rope_theta': 7e5, 'factor': 2.0, 'original_max_position_embeddings': 32}


@pytest.mark.parametrize(
    'name, changes, older',
    [
        ('LlamaConfig', {}, {'rope_theta': 7e5, 'rope_scaling': None}),
        ('LlamaConfig', {'rope_parameters': YARN}, {'rope_theta': 7e5, 'rope_scaling': {**YARN}}),
        ('Phi3Config', {'pad_token_id': 0}, {'rope_theta': 7e5, 'partial_rotary_factor': 1.0}),
        ('GPTNeoXConfig', {}, {'rotary_emb_base': 7e5, 'rotary_pct': 0.25}),
        ('GPT2Config', {'rope_parameters': None}, {}),
    ],
)
def test_configurations_have_the_older_names_and_transformers_finds_the_same_in_them(name, changes, older, tmp_path):
    import transformers

    rotation = {'rope_type': 'default', 'rope_theta': 7e5}
    config = getattr(transformers, name)(**{'rope_parameters': rotation, 'dtype': 'bfloat16', **changes})
    config.save_pretrained(tmp_path)
    content = json.loads((tmp_path / 'config.json').read_text())
    written = convert.with_older_names(content)
    if older.get('rope_scaling'):
        del older['rope_scaling']['rope_theta']
    assert {key: written[key] for key in older} == older and written['torch_dtype'] == 'bfloat16'
    (tmp_path / 'config.json').write_text(json.dumps(written))
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    for key in ('rope_parameters', 'dtype', 'hidden_size'):
        assert getattr(again, key, None) == getattr(config, key, None), key


def test_gemmas_two_rotations_have_their_older_names(tmp_path):
    import transformers

    rotations = {'full_attention': {'rope_type': 'default', 'rope_theta': 7e5}}
    rotations['sliding_attention'] = {'rope_type': 'default', 'rope_theta': 3e3}
    transformers.Gemma3TextConfig(rope_parameters=rotations).save_pretrained(tmp_path)
    written = convert.with_older_names(json.loads((tmp_path / 'config.json').read_text()))
    assert (written['rope_theta'], written['rope_local_base_freq'], written['rope_scaling']) == (7e5, 3e3, None)
    (tmp_path / 'config.json').write_text(json.dumps(written))
    assert transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters == rotations


def test_tokenizers_are_of_a_class_that_transformers_4_has():
    rename = convert.tokenizer_with_older_names
    written = rename({'tokenizer_class': 'TokenizersBackend', 'extra_special_tokens': ['<x>']})
    assert written == {'tokenizer_class': 'PreTrainedTokenizerFast', 'additional_special_tokens': ['<x>']}
    assert rename({'tokenizer_class': 'GPT2Tokenizer'}) == {'tokenizer_class': 'GPT2Tokenizer'}


def test_links_out_of_a_folder_are_not_kept_nor_exported(folder_of, tmp_path):
    """Whoever made the folder would get a file of this machine from the run that is shared, or from its export."""
    folder = folder_of('llama')
    (tmp_path / 'secret').write_text('PRIVATE')
    (tmp_path / 'more').mkdir()
    pretrained = Pretrained(str(folder), block_size=POSITIONS)
    (folder / 'loop').symlink_to('.')
    for target in ('../secret', str(tmp_path / 'secret'), 'loop/../secret'):
        (folder / 'NOTICE').unlink(missing_ok=True)
        (folder / 'NOTICE').symlink_to(target)
        with pytest.raises(ValueError, match='NOTICE: found a link to .*secret'):
            pretrained.keep_files(str(tmp_path / 'run'))
        with pytest.raises(ValueError, match='NOTICE: found a link to .*secret'):  # as export_model.py does
            copy_files(str(folder), str(tmp_path / 'export'))
        assert not [path for path in tmp_path.rglob('NOTICE') if path.parent != folder]
    (folder / 'NOTICE').unlink()
    (folder / 'additional_chat_templates').symlink_to('../more')
    (tmp_path / 'more' / 'x.jinja').write_text('PRIVATE')
    with pytest.raises(ValueError, match='x.jinja: found a link to .*more/x.jinja'):
        pretrained.keep_files(str(tmp_path / 'run'))


def test_links_within_a_folder_and_into_the_blobs_of_the_hubs_cache_are_followed(folder_of, tmp_path):
    snapshot, blobs = tmp_path / 'models--a--b' / 'snapshots' / '0123', tmp_path / 'models--a--b' / 'blobs'
    shutil.copytree(folder_of('llama'), snapshot)
    blobs.mkdir()
    for name in ('config.json', 'tokenizer.json'):
        (snapshot / name).rename(blobs / name)
        (snapshot / name).symlink_to(f'../../blobs/{name}')
    (snapshot / 'LICENSE').write_text('text')
    (snapshot / 'NOTICE').symlink_to('LICENSE')
    Pretrained(str(snapshot), block_size=POSITIONS).keep_files(str(tmp_path / 'run'))
    kept = tmp_path / 'run' / KEPT
    assert (kept / 'NOTICE').read_text() == 'text' and not (kept / 'NOTICE').is_symlink()
    assert (kept / 'config.json').read_bytes() == (blobs / 'config.json').read_bytes()
