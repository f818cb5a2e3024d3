"""export_model.py: transformers loads, as a user would, what train_fsdp.py and train_ddp.py have saved on two ranks."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import tiktoken
import torch
from launch import (
    REPO,
    SHARED,
    TINY_MODEL,
    TINY_RUN,
    environment,
    fork_script,
    run_many,
    run_script,
    start_and_stop_behind,
)
from precision import MARGIN, apart, error, gap_of_text
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from evaluation import sampling
from model import GPT, ModelConfig
from runtime import checkpoint
from text.tokenizer import END_OF_TEXT, GPT2_PATTERN, byte_level_bpe, tokenizer_of

COMPLETEP = ['--parametrization=completep', '--base_width=8', '--base_depth=2']  # n_embd=40, n_layer=3
NEAR = ['--window_pattern=SL', '--window_size=5', '--logit_softcap=0.5']
SIGMOID = ['--arch=qwen3', '--n_experts=4', '--expert_hidden_dim=24', '--router_scores=sigmoid', '--router_bias=0.01']
RUNS = {  # name: (script, its arguments, the class that transformers has for it)
    'gpt2': ('train_ddp.py', ['--arch=gpt2', '--dropout=0.1'], 'GPT2LMHeadModel'),
    'llama': ('train_fsdp.py', ['--arch=llama', '--n_kv_head=1', '--bias=True'], 'LlamaForCausalLM'),
    'llama_tied': ('train_fsdp.py', ['--arch=llama', '--tie_embeddings', '--vocab_size=50257'], 'LlamaForCausalLM'),
    'qwen3': ('train_fsdp.py', ['--arch=qwen3', '--n_kv_head=1', '--head_dim=24'], 'Qwen3ForCausalLM'),
    'enoki': ('train_fsdp.py', ['--arch=enoki'], 'GPTForCausalLM'),
    'nanogpt': ('train_fsdp.py', ['--arch=gpt2', '--bias=False'], 'GPTForCausalLM'),
    'completep': ('train_fsdp.py', ['--arch=llama', *COMPLETEP], 'LlamaForCausalLM'),
    'enoki_completep': ('train_fsdp.py', ['--arch=enoki', *COMPLETEP], 'GPTForCausalLM'),
    'experts': ('train_fsdp.py', ['--arch=qwen3', '--n_experts=4'], 'Qwen3MoeForCausalLM'),
    'odd_experts': (
        'train_fsdp.py',
        ['--arch=qwen3', '--n_experts=3', '--expert_hidden_dim=17'],
        'Qwen3MoeForCausalLM',
    ),
    'sigmoid_experts': ('train_fsdp.py', [*SIGMOID, '--shared_expert_dim=24'], 'Dots1ForCausalLM'),
    'biased_experts': ('train_fsdp.py', ['--arch=qwen3', '--n_experts=4', '--router_bias=0.01'], 'GPTForCausalLM'),
    'gated': ('train_fsdp.py', ['--arch=qwen3', '--attention_gate'], 'GPTForCausalLM'),
    'near': ('train_fsdp.py', ['--arch=llama', *NEAR], 'GPTForCausalLM'),
}
TRAIN = ['--dataset=tiny', '--max_iters=3', '--global_batch_size=4', '--dtype=float32']
TEXTS = [
    "It's 1234567 o'clock,\n\n\tif (x >= 0):  \r\n    return  ",
    'Größe, 中文字, 🙂👩‍👩‍👧, e\u0301\u00a0\u3000٣',
    ' ' * 300 + 'x' * 300 + '\r\n' * 30,
]


@pytest.fixture(scope='module')
def runs(data_dir, tmp_path_factory):
    """A folder with a run of each name."""
    folder = tmp_path_factory.mktemp('runs')
    shared = [*TINY_MODEL, *TINY_RUN, *TRAIN, f'--data_dir={data_dir}']
    cases = [
        {'name': name, 'script': script, 'arguments': [*shared, *arguments, f'--out_dir={folder / name}']}
        for name, (script, arguments, _) in RUNS.items()
    ]
    run_many(cases, nproc=2, folder=tmp_path_factory.mktemp('cases'))
    return folder


@pytest.fixture
def export(runs, tmp_path, run_here):
    """export(run, *arguments): runs export_model.py itself, in this process; returns (folder, what it printed)."""

    def run(name, *arguments):
        folder = tmp_path / 'exports' / name
        return folder, run_here('export_model.py', f'--out_dir={runs / name}', f'--to={folder}', *arguments)[0]

    return run


def trained(runs, name):
    """The GPT of a run's last checkpoint."""
    weights, state = checkpoint.load_weights(str(runs / name / 'checkpoints' / 'step_00000003'))
    model = GPT(ModelConfig(**state['identity']['model'])).eval()
    model.load_state_dict(weights, strict=not model.config.tie_embeddings)
    return model


def loaded(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


def loaded_tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


def some_tokens(*shape):
    return torch.randint(257, shape, generator=torch.Generator().manual_seed(1))


def stored_tensors(folder):
    """{name: shape} in the safetensors files of a folder."""
    shapes = {}
    for path in folder.glob('*.safetensors'):
        with safe_open(path, 'pt') as file:
            shapes.update({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
    return shapes


@pytest.mark.parametrize('name', RUNS)
@torch.no_grad()
def test_transformers_loads_it_with_equal_logits_and_writes_on(name, runs, export):
    folder, said = export(name)
    ours, theirs, x = trained(runs, name), loaded(folder), some_tokens(2, 32)
    assert type(theirs).__name__ == RUNS[name][2] and theirs.dtype == torch.float32
    if name == 'odd_experts':  # transformers would compute them with torch's grouped_mm, which takes no such sizes
        theirs.set_experts_implementation('eager')
    assert said.splitlines()[-1] == f'exported to {folder}'
    assert f', {sum(parameter.numel() for parameter in ours.parameters()):,} parameters' in said
    assert f'loaded again as {RUNS[name][2]}: weights equal, logits equal ' in said
    # With the multipliers inside the weights, sums round differently in each layer: a few units in the last place.
    assert error(theirs(x).logits, ours(x)) <= apart()
    vocab_size = ours.config.vocab_size
    assert theirs.get_input_embeddings().weight.shape == (vocab_size, 40)  # without the rows that pad it
    assert theirs.get_output_embeddings().weight.shape == (vocab_size, 40)
    content = json.loads((folder / 'config.json').read_text())  # for readers older than transformers 5, too
    assert content['torch_dtype'] == 'float32'
    rotation = content.get('rope_parameters')
    assert not rotation or content['rope_theta'] == rotation['rope_theta'] == ours.config.rope_theta
    tied = theirs.get_input_embeddings().weight is theirs.get_output_embeddings().weight
    assert tied == ours.config.tie_embeddings
    assert sum(shape == (vocab_size, 40) for shape in stored_tensors(folder).values()) == 2 - tied
    assert theirs.generation_config.eos_token_id == theirs.config.eos_token_id == 256
    prompts = [row for row in some_tokens(8, 5).tolist() if gap_of_text(ours, [row], 20) > MARGIN][:2]
    written = theirs.generate(
        torch.tensor(prompts), attention_mask=torch.ones(2, 5), max_new_tokens=20, do_sample=False
    )
    expected = sampling.generate_batch(ours, prompts, max_new_tokens=20, stop_tokens=[256])
    for row, new in zip(written[:, 5:].tolist(), expected, strict=True):
        assert row == new + [256] * (len(row) - len(new))  # transformers fills rows that have ended


HALF = {'llama_tied': torch.bfloat16, 'nanogpt': torch.float16}
BIASED = {'sigmoid_experts', 'biased_experts'}
HALF |= {'sigmoid_experts': torch.bfloat16, 'biased_experts': torch.float16, 'experts': torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize('name, dtype', HALF.items())
def test_half_precision_in_shards(name, dtype, runs, export):
    short = str(dtype).removeprefix('torch.')
    folder, said = export(name, f'--dtype={short}', '--max_shard_size=30KB')
    index = json.loads((folder / 'model.safetensors.index.json').read_text())['weight_map']
    assert len(set(index.values())) >= 3 and index.keys() == stored_tensors(folder).keys()
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # who may read one may read all
    theirs, ours, x = loaded(folder), trained(runs, name), some_tokens(2, 32)
    for part, tensor in ours.state_dict(keep_vars=True).items():
        if 'router' not in part or name == 'experts':  # Qwen's class alone rounds routers
            tensor.data = tensor.data.to(dtype)
    biases = [
        tensor for part, tensor in theirs.state_dict().items() if part.endswith(('correction_bias', 'router.bias'))
    ]
    assert all(bias.dtype == torch.float32 for bias in biases) and len(biases) == 3 * (name in BIASED)
    assert theirs.dtype == dtype and f'the rounding to {short} moved them by up to ' in said
    assert torch.equal(theirs.get_input_embeddings().weight, ours.embed.weight[: ours.config.vocab_size])
    with torch.no_grad():
        assert error(theirs.float()(x).logits, ours(x)) <= apart()  # ours computes in fp32


def test_what_float16_cannot_hold_is_named_and_nothing_is_written(export, monkeypatch, tmp_path):
    read = checkpoint.load_weights

    def with_a_large_number(path):
        weights, state = read(path)
        weights['blocks.1.mlp.up.weight'][-1, -1] = 7e4
        return weights, state

    monkeypatch.setattr(checkpoint, 'load_weights', with_a_large_number)
    with pytest.raises(ValueError, match=r'dtype=float16: blocks.1.mlp.up.weight goes beyond 65,504: use'):
        export('llama_tied', '--dtype=float16')
    assert not (tmp_path / 'exports').exists()


def test_a_model_with_its_own_code_is_trained_on_and_saved_again(export, tmp_path):
    theirs, x = loaded(export('nanogpt')[0]), some_tokens(2, 16)
    logits = theirs(x).logits
    loss = theirs(x, labels=x).loss
    assert loss.item() == pytest.approx(
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()).item()
    )
    loss.backward()
    assert all(parameter.grad is not None for parameter in theirs.parameters())
    theirs.save_pretrained(tmp_path / 'again')
    with torch.no_grad():
        assert torch.equal(loaded(tmp_path / 'again')(x).logits, logits)


@torch.no_grad()
def test_a_model_with_its_own_code_takes_padding_on_the_right_and_more_tokens_than_its_context(export):
    theirs, x = loaded(export('enoki')[0]), some_tokens(2, 16)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 9:] = 0
    padded = x.masked_fill(mask == 0, 256)
    torch.testing.assert_close(theirs(padded, attention_mask=mask).logits[1, :9], theirs(x[1:, :9]).logits[0])
    with pytest.raises(ValueError, match='pad on the right'):
        theirs(padded.flip(1), attention_mask=mask.flip(1))
    for use_cache in (False, True):
        options = {'do_sample': False, 'eos_token_id': None, 'use_cache': use_cache}
        assert theirs.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=40, **options).shape == (2, 56)


def test_the_tokenizer_of_bytes_comes_along(export, data_dir):
    theirs, ours = loaded_tokenizer(export('llama')[0]), tokenizer_of(data_dir / 'tiny')
    for text in TEXTS:
        assert theirs(text).input_ids == ours.encode(text)
        assert theirs.decode(theirs(text).input_ids) == text
    assert theirs.eos_token_id == theirs(END_OF_TEXT).input_ids[0] == 256
    assert len(theirs) == 257 and theirs.model_max_length == 32


@pytest.mark.slow
def test_a_bpe_and_a_hugging_face_tokenizer_come_along(tmp_path):
    def exported(data_dir):
        of_run, folder = f'--out_dir={data_dir / "run"}', data_dir / 'exported'
        keys = [*TINY_MODEL, *TINY_RUN, *TRAIN, *RUNS['llama_tied'][1], f'--data_dir={data_dir}', of_run]
        run_script('train_ddp.py', *keys, '--max_iters=1', '--vocab_size=None', '--eval_sequences=0')
        run_script('export_model.py', of_run, f'--to={folder}')
        return folder

    for source in sorted(Path(os.__file__).parent.glob('a*.py')):
        (tmp_path / 'text').mkdir(exist_ok=True)
        (tmp_path / 'text' / f'{source.stem}.txt').write_bytes(source.read_bytes())
    prepare = [f'--dataset={tmp_path / "text"}', '--name=tiny', '--val_fraction=0']
    run_script('prepare_data.py', *prepare, '--tokenizer=bpe', '--vocab_size=400', f'--data_dir={tmp_path / "bpe"}')
    ours = tokenizer_of(tmp_path / 'bpe' / 'tiny')
    folder = exported(tmp_path / 'bpe')
    theirs = loaded_tokenizer(folder)
    assert [theirs(text).input_ids for text in TEXTS] == [ours.encode(text) for text in TEXTS]
    assert theirs.eos_token_id == ours.eot

    folder.rename(tmp_path / 'hugging_face')  # the export is a Hugging Face folder itself
    adds_a_token = Tokenizer.from_file(str(tmp_path / 'hugging_face' / 'tokenizer.json'))
    beginning = f'{END_OF_TEXT} $A'  # as prepare_data.py puts it before each text; so must the export
    adds_a_token.post_processor = TemplateProcessing(beginning, special_tokens=[(END_OF_TEXT, ours.eot)])
    adds_a_token.save(str(tmp_path / 'hugging_face' / 'tokenizer.json'))
    options = [f'--tokenizer={tmp_path / "hugging_face"}', f'--data_dir={tmp_path / "hf"}']
    run_script('prepare_data.py', *prepare, *options)
    theirs = loaded_tokenizer(exported(tmp_path / 'hf'))
    assert [theirs(text).input_ids for text in TEXTS] == [[ours.eot, *ours.encode(text)] for text in TEXTS]
    assert theirs.eos_token_id == ours.eot


@pytest.mark.skipif(not (SHARED / 'tiktoken_cache').exists(), reason='no files of gpt2 in ../shared/tiktoken_cache')
def test_the_tokenizer_of_gpt2_comes_along(export, tmp_path, monkeypatch):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(SHARED / 'tiktoken_cache'))
    (tmp_path / 'data' / 'tiny').mkdir(parents=True)
    (tmp_path / 'data' / 'tiny' / 'meta.json').write_text('{"tokenizer": {"name": "gpt2"}}')
    theirs = loaded_tokenizer(export('llama_tied', f'--data_dir={tmp_path / "data"}')[0])
    ours = tokenizer_of(tmp_path / 'data' / 'tiny')
    texts = [*TEXTS, *(path.read_text() for path in sorted(REPO.glob('t*_*.py')))]
    assert [theirs(text).input_ids for text in texts] == [ours.encode(text) for text in texts]
    assert theirs.eos_token_id == ours.eot == 50256


def test_byte_level_bpe_does_what_tiktoken_does():
    """Also for what gpt2 lacks: gaps in the ids, a token that no merge makes, a possessive interval in the pattern."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for number, token in enumerate(
        ['in', ' t', ' th', '12', '123', '  ', '    ', ' the', 'xyz', 'ß'.encode()], start=256
    ):
        ranks[token if isinstance(token, bytes) else token.encode()] = number
    specials = {END_OF_TEXT: 300, '<|fim|>': 310}
    for pattern in (GPT2_PATTERN, r'[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s+(?!\S)|\s'):
        encoding = tiktoken.Encoding('test', pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)
        theirs = byte_level_bpe(ranks, specials, pattern)
        for text in [*TEXTS, 'in the 1212 tins, then', 'xyz xyz']:
            assert theirs.encode(text).ids == encoding.encode_ordinary(text)
            assert theirs.decode(theirs.encode(text).ids) == text
        assert theirs.encode(f'a{END_OF_TEXT}<|fim|>').ids == [97, 300, 310]


def test_without_a_tokenizer_it_says_why(export, tmp_path):
    folder, said = export('qwen3', f'--data_dir={tmp_path}')
    assert 'exporting without tokenizer: ' in said and '--data_dir=FOLDER' in said
    assert not list(folder.glob('tokenizer*'))
    theirs = loaded(folder)
    assert theirs.config.eos_token_id is None and theirs.generation_config.eos_token_id is None


def test_what_stood_before_documents_in_training_stands_before_a_text(export, data_dir, tmp_path):
    dataset = tmp_path / 'tiny'
    dataset.mkdir()
    meta = json.loads((data_dir / 'tiny' / 'meta.json').read_text())
    meta['tokenizer'] |= {'name': 'x', 'eot_text': END_OF_TEXT, 'bos_text': [END_OF_TEXT]}  # as GPT-NeoX's could
    (dataset / 'meta.json').write_text(json.dumps(meta))
    ranks = {bytes([byte]): byte for byte in range(256)}
    byte_level_bpe(ranks, {END_OF_TEXT: 256}).save(str(dataset / 'tokenizer.json'))
    folder, said = export('llama', f'--data_dir={tmp_path}')
    ours, theirs = tokenizer_of(dataset), loaded_tokenizer(folder)
    assert 'without tokenizer' not in said and theirs.bos_token_id == ours.eot
    assert theirs('a b').input_ids == [ours.eot, *ours.encode('a b')]


def test_behind_whatever_a_model_has_learned_to_begin_a_text_its_export_begins_one(export, data_dir, monkeypatch):
    read = checkpoint.read_state

    def of_documents(path):
        state = read(path)
        state['config']['windows'] = 'documents'  # none began but behind the end of another
        return state

    monkeypatch.setattr(checkpoint, 'read_state', of_documents)
    theirs, ours = loaded_tokenizer(export('llama')[0]), tokenizer_of(data_dir / 'tiny')
    assert theirs('ab').input_ids == [ours.eot, *ours.encode('ab')] and theirs.bos_token_id == ours.eot


def test_what_is_there_is_not_overwritten(export, tmp_path):
    (tmp_path / 'exports' / 'llama').mkdir(parents=True)  # empty: may be used
    folder, _ = export('llama')
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    with pytest.raises(ValueError, match=f'{folder} exists: '):
        export('llama')
    assert before == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


@pytest.mark.parametrize(
    'files, expected',
    [
        (['latest', 'global_step100/mp_rank_00_model_states.pt'], 'DeepSpeed'),
        (['.metadata', '__0_0.distcp'], 'FSDP checkpoint'),
        (['config.json', 'model.safetensors'], 'transformers model'),
        (['notes.txt'], 'no checkpoint in'),
    ],
)
def test_checkpoints_of_others_get_one_line(export, tmp_path, files, expected):
    for name in files:
        (tmp_path / 'other' / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / 'other' / name).touch()
    with pytest.raises(ValueError, match=expected) as caught:
        export('llama', f'--out_dir={tmp_path / "other"}')
    assert '\n' not in str(caught.value)


def test_a_step_that_is_not_there_and_a_size_without_unit_get_one_line(export):
    with pytest.raises(ValueError, match="max_shard_size='5': expected"):
        export('llama', '--max_shard_size=5')
    with pytest.raises(ValueError, match='step_00000002: .*--step, .* 3$'):
        export('llama', '--step=2')


@pytest.mark.slow
def test_killed_in_the_middle_it_leaves_no_folder_of_that_name_and_can_be_repeated(runs, tmp_path):
    keys = [f'--out_dir={runs / "enoki"}', f'--to={tmp_path / "model"}']
    process = start_and_stop_behind(tmp_path / 'model.tmp' / 'model.py', 'export_model.py', *keys)
    process.kill()
    process.join()
    assert [path.name for path in tmp_path.iterdir()] == ['model.tmp']
    fork_script('export_model.py', f'--out_dir={runs / "enoki"}', f'--to={tmp_path / "model"}')
    assert [path.name for path in tmp_path.iterdir()] == ['model']
    assert loaded(tmp_path / 'model').num_parameters() > 0


def test_a_full_disk_gets_one_line_and_leaves_nothing(runs, tmp_path):
    command = [sys.executable, REPO / 'export_model.py', f'--out_dir={runs / "llama"}', f'--to={tmp_path / "model"}']
    limit = (100_000, 100_000)  # bytes that a file may have
    options = {'env': environment(), 'capture_output': True, 'text': True, 'timeout': 600}
    result = subprocess.run(command, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit), **options)
    assert result.returncode == 1 and not list(tmp_path.iterdir())
    assert result.stderr.startswith('[0] error: cannot write ') and result.stderr.count('\n') == 1
