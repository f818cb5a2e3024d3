"""Models of Hugging Face folders that model.py computes (--native=True), beside the classes of transformers."""

import json
import shutil

import pytest
import torch
import transformers
from launch import TINY_RUN, fork_script, run_forked, run_many, run_ranks, run_script
from outputs import column
from precision import apart, assert_as_close_to_float64, assert_same_run, in_float64
from pretrained import save_model, write_chats
from short import slow_but

from huggingface import native
from huggingface.pretrained import Pretrained
from model import GPT, tensors_with_values

LLAMA3 = {'rope_type': 'llama3', 'rope_theta': 5e4, 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
LLAMA3 |= {'original_max_position_embeddings': 32}
YARN = {'rope_type': 'yarn', 'rope_theta': 1e4, 'factor': 4.0, 'original_max_position_embeddings': 16}
PART = {'rope_theta': 1e4, 'partial_rotary_factor': 0.5}
# What these architectures vary in people's folders: heads, biases, rotations, and whether the output head is tied.
FOLDERS = {
    'llama': ('llama', {}),
    'tied': ('llama_tied', {}),
    'wide heads': ('llama', {'head_dim': 14, 'num_key_value_heads': 1}),
    'biases': ('llama', {'attention_bias': True, 'mlp_bias': True}),
    'llama 3.1': ('llama', {'rope_parameters': LLAMA3}),
    'yarn': ('llama', {'rope_parameters': YARN}),
    'mistral': ('mistral', {'sliding_window': None}),
    'mistral, long window': ('mistral', {'sliding_window': 64}),
    'mistral, window': ('mistral', {}),
    'qwen2, windows': ('qwen2', {'use_sliding_window': True, 'sliding_window': 8, 'max_window_layers': 2}),
    'granite, plain': ('granite', {'logits_scaling': 1.0, 'attention_multiplier': 10**-0.5}),
    'qwen2': ('qwen2', {}),
    'qwen3': ('qwen3', {}),
    'qwen3_moe': ('qwen3_moe', {'norm_topk_prob': True}),
    'qwen3_moe, weights as scored': ('qwen3_moe', {}),
    'qwen2_moe, biases': ('qwen2_moe', {}),
    'qwen2_moe, normalized': ('qwen2_moe', {'norm_topk_prob': True, 'qkv_bias': False}),
    'qwen3_moe, dense layers': ('qwen3_moe', {'norm_topk_prob': True, 'mlp_only_layers': [0, 1]}),
    'dots1, biases': ('dots1', {}),
    'dots1, weights as scored': ('dots1', {'norm_topk_prob': False, 'first_k_dense_replace': 0}),
    'dots1, groups and biases': (
        'dots1',
        {'n_routed_experts': 12, 'n_group': 4, 'topk_group': 2, 'num_experts_per_tok': 5},
    ),
    'dots1, windows': ('dots1', {'sliding_window': 8, 'max_window_layers': 2, 'intermediate_size': 57}),
    'glm4_moe, biases': ('glm4_moe', {}),
    'glm4_moe, air': ('glm4_moe', {'use_qk_norm': False, 'attention_bias': False, 'norm_topk_prob': False}),
    'glm4_moe, yarn and groups': (
        'glm4_moe',
        {
            'rope_parameters': YARN | {'partial_rotary_factor': 0.75},
            'n_routed_experts': 12,
            'n_group': 4,
            'topk_group': 2,
        },
    ),
    'gpt2': ('gpt2', {}),
    'gpt2, narrow mlp': ('gpt2', {'n_inner': 56, 'activation_function': 'gelu_pytorch_tanh'}),
}


def save(folder, name):
    kind, changes = FOLDERS[name]
    changes = dict(changes)
    if 'biases' in name or kind in ('gpt2', 'qwen2'):  # those of a new model are 0, which would show no mistake
        save_model(folder, kind, **changes)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        generator = torch.Generator().manual_seed(5)
        for tensor in model.state_dict().values():
            if tensor.dim() == 1:
                tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
        model.save_pretrained(folder)
        return str(folder)
    return save_model(folder, kind, **changes)


@pytest.fixture
def folder_of(tmp_path, monkeypatch):
    """A function that saves the model of FOLDERS with this name, and returns its folder."""
    import pretrained

    models = pretrained.MODELS | pretrained.MORE_MODELS
    sizes = {kind: (config, dict(sizes)) for kind, (config, sizes) in models.items()}
    monkeypatch.setattr(pretrained, 'MODELS', sizes)
    monkeypatch.setattr(pretrained, 'MORE_MODELS', {})

    def make(name):
        kind, changes = FOLDERS[name]
        for key in changes:  # save_model() would be given them twice
            sizes[kind][1].pop(key, None)
        return save(tmp_path / 'model', name)

    return make


def native_model(folder, block_size=None):
    pretrained = Pretrained(folder, block_size=block_size)
    model_config = native.model_config_of(pretrained)
    weights = native.Weights(pretrained, model_config)
    model = GPT(model_config)
    with torch.no_grad():
        for name, tensor in tensors_with_values(model):
            tensor.copy_(weights.initial_value(name))
    return pretrained, model.eval()


@pytest.mark.parametrize('name', FOLDERS)
@torch.no_grad()
def test_logits_are_those_of_transformers(folder_of, name):
    folder = folder_of(name)
    pretrained, model = native_model(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    x = torch.randint(model.config.vocab_size, (2, 61))
    logits, expected = model(x), theirs(x).logits
    exact = native_model(folder)[1].double()
    with in_float64():
        exact.compute_dtype = torch.float64
        exact = exact(x)
    assert_as_close_to_float64(logits, expected, exact, name)
    assert 'difference' in native.self_test(pretrained, model.config)

    # And back: a checkpoint's weights are those of the folder, under all names that it has.
    state = {'identity': {'model': model.config.to_dict()}}
    back = native.weights_for_transformers(model.state_dict(), state)
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(back[key], tensor), key


@pytest.mark.parametrize('name', ['llama 3.1', 'gpt2', 'mistral, long window'])
@torch.no_grad()
def test_fewer_tokens_at_once_change_nothing_of_the_model(folder_of, name):
    folder = folder_of(name)
    x = torch.randint(259, (1, 24))
    whole, short = native_model(folder)[1], native_model(folder, block_size=24)[1]
    assert torch.equal(whole(x), short(x))
    assert short.state_dict().keys() == whole.state_dict().keys()
    assert all(torch.equal(short.state_dict()[key], tensor) for key, tensor in whole.state_dict().items())


def test_the_self_test_notices_a_wrong_rotation_and_a_wrong_layout(folder_of, monkeypatch):
    pretrained = Pretrained(folder_of('llama 3.1'))
    model_config = native.model_config_of(pretrained)
    native.self_test(pretrained, model_config)
    model_config.llama3_rope = []
    with pytest.raises(ValueError, match='self-test'):
        native.self_test(pretrained, model_config)
    monkeypatch.setattr(native.convert, 'LLAMA_MODULES', {**native.convert.LLAMA_MODULES, 'mlp.gate': 'mlp.up_proj'})
    with pytest.raises(ValueError, match='self-test'):
        native.self_test(pretrained, native.model_config_of(pretrained))


CANNOT = {
    'olmo2': ('olmo2', {}, '(model_type=olmo2) has norms behind attention and MLP, and none before them'),
    'experts': ('mixtral', {}, 'a mixture of experts (num_local_experts=4)'),
    'logits': ('granite', {}, 'logits_scaling=4.0, model.py computes with 1'),
    'logits of cohere': ('cohere', {}, 'has logits that are scaled'),
    'state space': ('mamba', {}, 'has a state space in place of attention'),
    'dense layers': ('qwen3_moe', {'norm_topk_prob': True, 'mlp_only_layers': [1]}, 'mlp_only_layers=[1]'),
    'no shared expert': ('dots1', {'n_shared_experts': 0}, 'n_shared_experts=0, expected 1 or more'),
    'null': ('dots1', {'n_shared_experts': None}, 'n_shared_experts=None, expected 1 or more'),
    'rotation in part': ('llama', {'rope_parameters': {**PART, 'rope_type': 'default'}}, 'partial_rotary_factor=0.5'),
    'gelu': ('llama', {'hidden_act': 'gelu'}, "hidden_act='gelu'"),
    'one bias': ('llama', {'attention_bias': True}, 'mlp_bias=False'),
    'bias': ('qwen3', {'attention_bias': True}, 'attention_bias=True'),
    'rotation': ('llama', {'rope_parameters': {**YARN, 'rope_type': 'dynamic'}}, "rope_type='dynamic'"),
    'yarn': ('llama', {'rope_parameters': {**YARN, 'attention_factor': 1.5}}, 'attention_factor=1.5'),
    'relu': ('gpt2', {'activation_function': 'relu'}, "activation_function='relu'"),
    'scale': ('gpt2', {'scale_attn_by_inverse_layer_idx': True}, 'scale_attn_by_inverse_layer_idx=True'),
}


@pytest.mark.parametrize('name', CANNOT)
def test_what_model_py_cannot_compute_is_refused_with_the_property(tmp_path, name):
    kind, changes, says = CANNOT[name]
    folder = save_model(tmp_path, kind, **{key: value for key, value in changes.items() if value is not None})
    config = json.loads((tmp_path / 'config.json').read_text())
    (tmp_path / 'config.json').write_text(json.dumps(config | changes))  # with null, of which a class makes no model
    with pytest.raises(ValueError, match='native=True') as error:
        native.model_config_of(Pretrained(folder))
    assert says in str(error.value) and 'leave native out' in str(error.value)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('asked', [{'rope_theta': None, 'yarn': []}, {'rope_theta': 2e4, 'yarn': []}])
def test_a_run_reads_its_folder_again_as_it_did_at_first(tmp_path, asked):
    """The folder's own extension reaches further than its positions, as in folders of Qwen."""
    rotation = {**YARN, 'original_max_position_embeddings': 32}
    folder = save_model(tmp_path / 'run' / 'model', 'llama', rope_parameters=rotation)
    first = Pretrained(folder, block_size=24, **asked)
    model_config = native.model_config_of(first)
    state = {'identity': {'model': model_config.to_dict()}, 'config': {'native': True, **asked}}
    again = Pretrained.from_run(str(tmp_path / 'run'), state)
    assert again.positions == first.positions and again.config.to_dict() == first.config.to_dict()
    assert native.model_config_of(again) == model_config


def test_weights_that_lack_or_have_another_shape_are_named(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save_model(tmp_path, 'llama')
    path = tmp_path / 'model.safetensors'
    tensors = load_file(path)
    missing = {name: tensor for name, tensor in tensors.items() if 'layers.1.mlp.up_proj' not in name}
    save_file(missing, path)
    pretrained = Pretrained(folder)
    with pytest.raises(ValueError, match=r'layers\.1\.mlp\.up_proj.*download_model\.py'):
        native.Weights(pretrained, native.model_config_of(pretrained))
    save_file({**tensors, 'model.norm.weight': torch.ones(41)}, path)
    weights = native.Weights(pretrained, native.model_config_of(pretrained))
    with pytest.raises(ValueError, match=r'model\.norm\.weight'):
        weights.initial_value('final_norm.weight')


# --- runs -------------------------------------------------------------------------------------------------------------

STEPS = 4
RUN = [*TINY_RUN, '--block_size=48', '--global_batch_size=12', '--batch_size=1', '--dtype=float32', '--eval_interval=2']
RUN += [
    '--lr_schedule=constant',
    '--warmup_iters=0',
    '--dataset=chats',
    '--eval_sequences=8',
    '--checkpoint_interval=2',
]
RUN += ['--keep_checkpoints=3', f'--max_iters={STEPS}', '--native=True']
ALONE = ['--inner_steps=2', '--outer_lr=1', '--outer_momentum=0']
# The layouts that classes of transformers cannot have, and one of each kind that they can have.
LAYOUTS = {
    'ddp': (1, 'train_ddp.py', []),
    'fsdp': (2, 'train_fsdp.py', []),
    'manual': (3, 'train_fsdp.py', ['--fsdp_impl=manual']),
    'tensor': (2, 'train_parallel.py', ['--tensor_parallel=2']),
    'pipeline': (2, 'train_pipeline.py', []),  # of three blocks: two and one
    'context': (2, 'train_parallel.py', ['--context_parallel=2']),
    'experts': (2, 'train_parallel.py', ['--expert_parallel=2']),
    'diloco': (2, 'train_diloco.py', ['--num_replicas=1', *ALONE]),
}
KINDS = ('llama_tied', 'gpt2', 'qwen3_moe', 'qwen2_moe', 'dots1', 'glm4_moe')
CHANGES = {'qwen3_moe': {'norm_topk_prob': True}}
KEYS = dict.fromkeys(('qwen2_moe', 'qwen3_moe'), ['--router_aux=1', '--router_z=0.01'])  # or their classes have no loss
KEYS |= {'dots1': [], 'glm4_moe': []}  # their classes have none, and model.py adds none unless asked
OF_DENSE, OF_EXPERTS = ('tensor', 'pipeline'), ('context', 'experts')
CASES = [
    (kind, layout) for kind in KINDS for layout in LAYOUTS if layout not in (OF_DENSE if kind in KEYS else OF_EXPERTS)
]


@pytest.fixture(scope='module')
def runs(tmp_path_factory, has_slow_tests):
    """A folder with KIND/LAYOUT for each layout, KIND/theirs by the class of transformers, and KIND/model."""
    root = tmp_path_factory.mktemp('native')
    write_chats(root / 'chats.jsonl')
    kinds = KINDS if has_slow_tests else KINDS[:1]
    for kind in kinds:
        folder = root / kind / 'model'
        has_biases = f'{kind}, biases' in FOLDERS and not KEYS.get(kind)
        model = save(folder, f'{kind}, biases') if has_biases else save_model(folder, kind, **CHANGES.get(kind, {}))
        keys = [f'--dataset={root / "chats.jsonl"}', '--name=chats', f'--tokenizer={model}', '--val_fraction=0.2']
        fork_script('prepare_data.py', *keys, f'--data_dir={root / kind / "data"}', '--num_proc=1')
    for ranks in (1, 2, 3):
        commands = []
        for kind in kinds:
            common = [f'--init_from={root / kind / "model"}', f'--data_dir={root / kind / "data"}']
            layouts = {**LAYOUTS, 'theirs': (1, 'train_ddp.py', ['--native=False'])}
            for name, (nproc, script, keys) in layouts.items():
                if nproc == ranks and (name == 'theirs' or (kind, name) in CASES):
                    arguments = [*RUN, *common, *keys, *KEYS.get(kind, ()), f'--out_dir={root / kind / name}']
                    commands.append({'name': f'{kind} {name}', 'script': script, 'arguments': arguments})
        run_many(commands, ranks, root)
    return root


@pytest.mark.parametrize(('kind', 'layout'), slow_but(['llama_tied'], CASES))
def test_a_run_is_the_one_that_transformers_class_makes(runs, kind, layout):
    ours, theirs = runs / kind / layout, runs / kind / 'theirs'
    for name in ('loss', 'val_loss'):
        assert_same_run(column(ours, name), column(theirs, name), f'{layout} {name}', every=STEPS // 2)
    assert column(ours, 'loss')[-1] < column(ours, 'loss')[0]
    log = (ours / 'train.log').read_text()
    assert "self-test: model.py's logits are those of" in log


@pytest.mark.slow
@pytest.mark.parametrize('kind', KINDS)
def test_its_export_is_the_folder_with_the_weights_that_were_trained(runs, kind, tmp_path):
    exported, other = {}, 'manual' if kind in KEYS else 'pipeline'
    for name in ('theirs', other):
        keys = [f'--out_dir={runs / kind / name}', f'--to={tmp_path / name}', '--dtype=float32']
        assert 'equal to the bit' in fork_script('export_model.py', *keys)[0].stdout
        exported[name] = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
    x = torch.randint(259, (2, 64))  # all positions that the folder had, more than the run has seen
    with torch.no_grad():
        ours, theirs = exported[other](x).logits, exported['theirs'](x).logits
    assert (ours - theirs).norm() / theirs.norm() <= 100 * apart(STEPS)  # Adam divides small gradients by themselves
    assert sorted(path.name for path in (tmp_path / 'theirs').iterdir()) == sorted(
        path.name for path in (tmp_path / other).iterdir()
    )
    configs = [json.loads((tmp_path / name / 'config.json').read_text()) for name in exported]
    assert configs[0] == configs[1]


@pytest.mark.slow
def test_it_is_sampled_from_and_scored_as_any_fine_tuned_model(runs, tmp_path):
    tasks = tmp_path / 'tasks.jsonl'
    tasks.write_text(json.dumps({'context': 'Is it so?', 'choices': [' yes', ' no'], 'gold': 0}) + '\n')
    nats = {}
    for name in ('theirs', 'tensor'):
        out_dir = runs / 'llama_tied' / name
        said = run_script('sample.py', f'--out_dir={out_dir}', '--prompt=q17', '--temperature=0', '--dtype=float32')
        assert said.stdout.strip()
        keys = [f'--out_dir={out_dir}', f'--tasks={tasks}', f'--samples={tmp_path / name}', '--dtype=float32']
        assert '64 tokens' in fork_script('evaluate.py', *keys)[0].stdout
        nats[name] = json.loads((tmp_path / name / 'tasks.jsonl').read_text())['nats']
    for ours, theirs in zip(nats['tensor'], nats['theirs'], strict=True):
        assert abs(ours - theirs) <= 100 * apart(STEPS) * abs(theirs)


def test_a_run_goes_on_under_another_layout_when_its_folder_is_gone(runs, tmp_path):
    """A run on chats, whose tokenizer and configuration are kept in out_dir."""
    out_dir, model = tmp_path / 'run', tmp_path / 'model'
    shutil.copytree(runs / 'llama_tied' / 'model', model)
    common = [*RUN, f'--init_from={model}', f'--data_dir={runs / "llama_tied" / "data"}', f'--out_dir={out_dir}']
    run_forked('train_pipeline.py', *common, '--max_iters=2', nproc=2, log=tmp_path / 'log')
    shutil.rmtree(model)
    run_forked('train_parallel.py', *common, '--tensor_parallel=2', nproc=2, log=tmp_path / 'log')
    expected = column(runs / 'llama_tied' / 'ddp', 'loss')
    assert_same_run(column(out_dir, 'loss'), expected, every=STEPS // 2)


def test_mistakes_are_one_line_on_every_rank(runs, tmp_path):
    made = runs / 'llama_tied'
    common = [*RUN, f'--data_dir={made / "data"}', f'--out_dir={tmp_path / "run"}']
    folder = f'--init_from={made / "model"}'
    for more, says in (
        (['--init_from=scratch'], 'init_from=scratch, which is no Hugging Face folder'),
        ([folder, '--lora_rank=2'], 'lora_rank=2 with native=True'),
        ([folder, '--tensor_parallel=2', '--block_size=47'], 'tensor_parallel=2 does not divide'),
    ):
        for ended in run_ranks([['train_parallel.py', *common, *more]] * 2):
            lines = ended.stderr.strip().splitlines()
            assert ended.returncode == 1 and len(lines) == 1 and says in lines[0], ended
    assert not (tmp_path / 'run').exists()
