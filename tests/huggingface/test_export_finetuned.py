"""What train scripts have made of a Hugging Face folder is exported, loaded by transformers and peft, and sampled."""

import json
import re
import shutil

import pytest
import torch
from launch import TINY_RUN, fork_script, run_forked, run_many
from precision import likeliest
from safetensors.torch import load_file

from huggingface import convert, loading
from runtime import checkpoint
from system import devices
from text.tokenizer import byte_level_bpe

QUESTIONS = {'Who barks?': 'A dog.', 'What is red?': 'Roses are.', '2 and 3?': 'Five, I think.', 'Far?': 'No.'}
QUESTIONS |= {'Is it late?': 'Yes,\nvery.'}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)
# As in folders of older models: contradictory, which save_pretrained() refuses, and with a penalty that would change
# which token is likeliest.
GENERATION = '{"temperature": 0.9, "top_p": 0.6, "repetition_penalty": 9.0, "eos_token_id": [256, 0]}\n'
CODE = """from transformers import LlamaConfig, LlamaForCausalLM


class MineConfig(LlamaConfig):
    model_type = 'mine'


class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
    _keep_in_fp32_modules_strict = ['norm']
"""
SIZES = {'vocab_size': 260, 'hidden_size': 48, 'intermediate_size': 88, 'num_hidden_layers': 2}
SIZES |= {'num_attention_heads': 4, 'num_key_value_heads': 2, 'max_position_embeddings': 64}
SIZES |= {'attention_dropout': 0.1, 'bos_token_id': 256, 'eos_token_id': 256}
GPT2 = {'vocab_size': 260, 'n_embd': 48, 'n_layer': 2, 'n_head': 4, 'n_positions': 64}
GPT2 |= {'bos_token_id': 256, 'eos_token_id': 256}
LONG_STEPS = ['--learning_rate=1e-2', '--weight_decay=0.1']  # else weights could not be told from the original's
NO_STEPS = ['--learning_rate=1e-50']  # Adam runs, but its updates are 0 in fp32
LORA = [*LONG_STEPS, '--lora_rank=4', '--lora_alpha=12']
FSDP, MANUAL = ('train_fsdp.py', []), ('train_fsdp.py', ['--fsdp_impl=manual'])
RUNS = {  # name: (folder of the model, (script, its arguments), more arguments)
    'llama': ('llama', FSDP, LONG_STEPS),
    'llama_tied': ('llama_tied', MANUAL, LONG_STEPS),
    'qwen3': ('qwen3', ('train_diloco.py', ['--inner_steps=2']), LONG_STEPS),
    'gpt2': ('gpt2', ('train_ddp.py', []), [*LONG_STEPS, r'--freeze=h\.0\.']),
    'mistral': ('mistral', MANUAL, LONG_STEPS),
    'mine': ('mine', FSDP, [*LONG_STEPS, '--trust_remote_code']),
    'unchanged_llama': ('llama', MANUAL, NO_STEPS),
    'unchanged_llama_tied': ('llama_tied', ('train_ddp.py', []), NO_STEPS),
    'unchanged_gpt2': ('gpt2', FSDP, [*NO_STEPS, '--lora_rank=2']),
    'unchanged_mistral': ('mistral', FSDP, NO_STEPS),
    'lora_llama': ('llama', MANUAL, LORA),
    'lora_gpt2': ('gpt2', FSDP, [*LORA, '--lora_targets=c_attn,attn.c_proj']),
    'small_steps': ('mistral', MANUAL, ['--learning_rate=1e-5']),  # of a bfloat16 folder
    'lora_mistral': ('mistral', ('train_ddp.py', []), ['--learning_rate=1e-4', *LORA[len(LONG_STEPS) :]]),
    'lora_qwen3': ('qwen3', ('train_ddp.py', []), [*LORA, '--lora_targets=q_proj,down_proj']),
}


def save_model(folder, config, dtype):
    """Write a folder as the hub has it: a model with random weights, a tokenizer of bytes with a chat template, a
    license."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=True)
    for parameter in model.parameters():  # with ones and zeros, swapped norms or biases would go unnoticed
        parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder, max_shard_size='100KB')
    specials = {'<|endoftext|>': 256, '<|im_start|>': 257, '<|im_end|>': 258}
    fast = byte_level_bpe({bytes([byte]): byte for byte in range(256)}, specials)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token='<|endoftext|>', chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)
    (folder / 'generation_config.json').write_text(GENERATION)
    (folder / 'LICENSE.txt').write_text('Do as you like.\n')


@pytest.fixture(scope='module')
def models(tmp_path_factory):
    """A folder with the folders of all models that are fine-tuned."""
    import transformers
    from transformers import AutoConfig, GPT2Config, LlamaConfig, MistralConfig, Qwen3Config

    transformers.logging.set_verbosity_error()
    folder = tmp_path_factory.mktemp('models')
    save_model(folder / 'llama', LlamaConfig(**SIZES), torch.float32)
    save_model(folder / 'llama_tied', LlamaConfig(**SIZES, tie_word_embeddings=True), torch.bfloat16)
    save_model(folder / 'qwen3', Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True), torch.bfloat16)
    save_model(folder / 'gpt2', GPT2Config(**GPT2), torch.float32)
    save_model(folder / 'mistral', MistralConfig(**SIZES, sliding_window=8), torch.bfloat16)
    (folder / 'mine').mkdir()
    (folder / 'mine' / 'modeling_mine.py').write_text(CODE)
    auto_map = {'AutoConfig': 'modeling_mine.MineConfig', 'AutoModelForCausalLM': 'modeling_mine.MineForCausalLM'}
    (folder / 'mine' / 'config.json').write_text(json.dumps({'model_type': 'mine', 'auto_map': auto_map, **SIZES}))
    save_model(folder / 'mine', AutoConfig.from_pretrained(folder / 'mine', trust_remote_code=True), torch.float32)
    return folder


@pytest.fixture(scope='module')
def runs(models, tmp_path_factory):
    """A folder with a run of each name, and `chat`, which has learned QUESTIONS; `data` holds its dataset."""
    folder = tmp_path_factory.mktemp('runs')
    lines = []
    for copy in range(20):
        for question, answer in QUESTIONS.items():
            messages = [{'role': 'user', 'content': question}, {'role': 'assistant', 'content': answer}]
            # The template ignores this, but the hash that decides between training and validation does not.
            lines.append(json.dumps({'messages': messages, 'chat_template_kwargs': {'copy': copy}}))
    (folder / 'chat.jsonl').write_text('\n'.join(lines))
    prepare = [f'--dataset={folder / "chat.jsonl"}', f'--tokenizer={models / "llama"}', f'--data_dir={folder / "data"}']
    fork_script('prepare_data.py', *prepare, '--name=chat', '--val_fraction=0.1')
    shared = [*TINY_RUN, '--batch_size=2', '--global_batch_size=4', '--dtype=float32', '--warmup_iters=1']
    cases = [
        {
            'name': name,
            'script': script,
            'arguments': [
                *(*shared, '--dataset=synthetic', '--block_size=32', '--max_iters=2', f'--out_dir={folder / name}'),
                *(f'--init_from={models / model}', *arguments, *more),
            ],
        }
        for name, (model, (script, arguments), more) in RUNS.items()
    ]
    chat = [*shared, '--dataset=chat', f'--data_dir={folder / "data"}', '--block_size=64', '--global_batch_size=8']
    chat += [
        '--max_iters=100',
        '--learning_rate=1e-2',
        f'--init_from={models / "llama"}',
        f'--out_dir={folder / "chat"}',
    ]
    cases.append({'name': 'chat', 'script': 'train_ddp.py', 'arguments': chat})
    run_many(cases, nproc=2, folder=tmp_path_factory.mktemp('cases'))
    return folder


@pytest.fixture
def export(runs, run_here, tmp_path):
    """export(run, *arguments): returns (folder, what export_model.py has printed)."""

    def run(name, *arguments):
        folder = tmp_path / 'exports' / name
        return folder, run_here('export_model.py', f'--out_dir={runs / name}', f'--to={folder}', *arguments)[0]

    return run


@pytest.fixture
def sample(runs, run_here):
    """sample(run, *arguments): returns (stdout, stderr) of sample.py on the CPU, in fp32."""

    def run(name, *arguments):
        return run_here('sample.py', f'--out_dir={runs / name}', '--device=cpu', '--dtype=float32', *arguments)

    return run


def loaded(folder, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options).eval()


def trained(models, runs, name):
    """The model of a run in fp32, put together here: the class of the original, with W + alpha / r B A."""
    model = loaded(models / RUNS[name][0], dtype=torch.float32)
    weights, _ = checkpoint.load_weights(str(runs / name / 'checkpoints' / 'step_00000002'))
    state = model.state_dict() | {key: value for key, value in weights.items() if 'lora' not in key}
    for key in weights:
        if key.endswith('.lora_A'):
            update = 12 / 4 * weights[key.replace('lora_A', 'lora_B')] @ weights[key]
            state[key.replace('lora_A', 'weight')] += update.T if 'gpt2' in name else update
    model.load_state_dict(state)
    model.tie_weights()
    return model


def some_tokens():
    return torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(1))


def stored(folder):
    """{name: tensor} of the safetensors files of a folder."""
    return {name: tensor for path in folder.glob('*.safetensors') for name, tensor in load_file(path).items()}


@pytest.mark.parametrize('name', [name for name in RUNS if not name.startswith('unchanged')])
@torch.no_grad()
def test_transformers_loads_what_was_trained_with_equal_logits(name, models, runs, export):
    original, x = models / RUNS[name][0], some_tokens()
    folder, said = export(name, '--dtype=float32', *(['--trust_remote_code'] if name == 'mine' else []))
    ours, theirs = trained(models, runs, name), loaded(folder)
    assert theirs.dtype == torch.float32 and type(theirs).__name__ == type(ours).__name__
    assert 'weights equal, logits equal to the bit\n' in said and said.splitlines()[-1] == f'exported to {folder}'
    torch.testing.assert_close(theirs(x).logits, ours(x).logits, atol=1e-5, rtol=1e-5)
    first = loaded(original, dtype=torch.float32)(x).logits
    assert (theirs(x).logits - first).abs().max() > 1e-3  # it is not the original that was exported
    assert stored(folder).keys() == stored(original).keys()  # a tied weight only once, and nothing of LoRA


@pytest.mark.parametrize('name', [name for name in RUNS if name.startswith('unchanged')])
def test_a_round_trip_changes_no_bit_of_the_weights_and_no_byte_of_what_lies_beside_them(name, models, export):
    original = models / RUNS[name][0]
    folder, _ = export(name, '--max_shard_size=100KB')  # in the original's dtype
    before, after = stored(original), stored(folder)
    assert before.keys() == after.keys()
    for key in before:
        assert before[key].dtype == after[key].dtype and torch.equal(before[key], after[key]), key
    assert {path.name for path in folder.iterdir()} == {path.name for path in original.iterdir()}
    older = {'config.json': convert.with_older_names, 'tokenizer_config.json': convert.tokenizer_with_older_names}
    for path in original.iterdir():
        if path.name in older:  # dropout is in config.json, too
            content = json.loads(path.read_text())
            assert json.loads((folder / path.name).read_text()) == older[path.name](content), path.name
        elif not path.name.startswith('model'):
            assert path.read_bytes() == (folder / path.name).read_bytes(), path.name
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # who may read one may read all


@torch.no_grad()
def test_a_model_stored_in_bfloat16_is_exported_so_unless_asked_otherwise(models, runs, export):
    folder, said = export('mistral')
    theirs, ours, x = loaded(folder), trained(models, runs, 'mistral'), some_tokens()
    assert theirs.dtype == torch.bfloat16 and 'the rounding to bfloat16 moved them by up to ' in said
    for name, weight in ours.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], weight.bfloat16())
        ours.state_dict()[name].copy_(weight.bfloat16())
    rounded = loaded(folder, dtype=torch.float32)  # fp32 frequencies: rounded ones would give other logits
    assert torch.equal(rounded(x).logits, ours(x).logits)


def moved_and_kept(models, runs, name):
    """(number of weights, how many the run has moved, how many of these still differ in bfloat16)."""
    before, after = loaded(models / RUNS[name][0], dtype=torch.float32), trained(models, runs, name)
    before, after = (torch.cat([tensor.flatten() for tensor in model.parameters()]) for model in (before, after))
    kept = (before != after) & (before.bfloat16() != after.bfloat16())
    return len(before), int((before != after).sum()), int(kept.sum())


@torch.no_grad()
def test_what_bfloat16_would_round_away_is_exported_in_float32_and_said(models, runs, export, tmp_path):
    total, moved, kept = moved_and_kept(models, runs, 'small_steps')
    assert moved > 0.9 * total and kept < 0.3 * moved  # so that this tests something
    counted = (
        f'of {total:,} weights {moved / total:.2%} moved, and {kept / moved:.0%} of these stay moved in bfloat16: '
    )
    folder, said = export('small_steps')
    assert f'{counted}written in float32 (--dtype=bfloat16 halves it)\n' in said and 'rounding to' not in said
    expected = trained(models, runs, 'small_steps').state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in stored(folder).items())
    assert dtypes_of(folder)['lm_head.weight'] == torch.float32 and loaded(folder, dtype='auto').dtype == torch.float32
    folder, said = export('small_steps', '--dtype=bfloat16', f'--to={tmp_path / "half"}')
    assert f'{counted}written in bfloat16 (--dtype=float32 keeps what was learned)\n' in said
    assert set(dtypes_of(tmp_path / 'half').values()) == {torch.bfloat16}
    said = export('lora_mistral', f'--to={tmp_path / "merged"}')[1]
    assert (
        'float32 (--dtype=bfloat16 halves it; --adapter writes what LoRA has learned alone, and loses nothing)' in said
    )


def test_without_the_original_nothing_is_rounded(models, runs, export):
    (models / 'mistral').rename(models / 'elsewhere')
    try:
        folder, said = export('small_steps')
    finally:
        (models / 'elsewhere').rename(models / 'mistral')
    assert f'the weights of init_from={models / "mistral"} are not there to tell what bfloat16 would lose' in said
    assert set(dtypes_of(folder).values()) == {torch.float32}


def test_samples_and_scores_are_of_the_weights_that_were_trained(runs, sample, tmp_path, monkeypatch):
    made, for_generation = [], loading.for_generation
    monkeypatch.setattr(loading, 'for_generation', lambda *args: made.append(for_generation(*args)) or made[-1])
    for dtype, expected in (('auto', torch.float32), ('bfloat16', torch.bfloat16)):
        for name in ('small_steps', 'lora_mistral'):
            said = sample(name, '--prompt=a', '--max_new_tokens=1', '--num_samples=1', f'--dtype={dtype}')[1]
            assert {parameter.dtype for parameter in made[-1].parameters()} == {expected}
            lost = (
                r'of .* weights .*% moved, and .*% of these stay moved in bfloat16: --dtype=float32 keeps what was lear'
            )
            assert bool(re.search(lost, said)) == ('stay moved' in said) == (dtype == 'bfloat16')  # only where it is
    (tmp_path / 'texts.jsonl').write_text('{"text": "One text."}\n')
    results, counted = tmp_path / 'results.jsonl', []
    half = ['--dtype=bfloat16']
    for name, more in (('small_steps', []), ('lora_mistral', []), ('small_steps', half)):
        keys = [f'--out_dir={runs / name}', f'--tasks={tmp_path / "texts.jsonl"}', f'--results={results}', *more]
        text = run_forked('evaluate.py', *keys, '--device=cpu', log=tmp_path / 'log')
        counted += [line for line in text.splitlines() if 'stay moved' in line]
    text = run_forked('evaluate.py', *keys, '--device=cpu', '--shard=torch', nproc=2, log=tmp_path / 'log')
    assert counted == [line for line in text.splitlines() if 'stay moved' in line] and len(counted) == 1
    assert counted[0].endswith(': --dtype=float32 keeps what was learned')
    dtypes = [json.loads(line)['dtype'] for line in results.read_text().splitlines()]
    auto = str(devices.choose_dtype('auto', torch.device('cpu'))).removeprefix('torch.')
    assert dtypes == [
        'float32',
        auto,
        'bfloat16',
        'bfloat16',
    ]  # LoRA is beside the weights, which were not finer either


def dtypes_of(folder):
    return {name: tensor.dtype for name, tensor in stored(folder).items()}


def test_weights_get_the_dtype_that_was_asked_for_but_for_what_the_class_keeps_in_float32(models, runs, export):
    dtypes = dtypes_of(export('mine', '--trust_remote_code', '--dtype=bfloat16')[0])
    assert all(dtype == (torch.float32 if 'norm' in name else torch.bfloat16) for name, dtype in dtypes.items())
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    folder, _ = export('mistral', '--dtype=float16')
    weights = trained(models, runs, 'mistral').state_dict()
    for name, tensor in stored(folder).items():
        assert tensor.dtype == torch.float16 and torch.equal(tensor, weights[name].half())


def test_an_adapter_is_float32_also_of_a_model_in_bfloat16_unless_asked_otherwise(export, tmp_path):
    pytest.importorskip('peft')
    assert set(dtypes_of(export('lora_qwen3', '--adapter')[0]).values()) == {torch.float32}
    folder, _ = export('lora_qwen3', '--adapter', '--dtype=bfloat16', f'--to={tmp_path / "half"}')
    assert set(dtypes_of(tmp_path / 'half').values()) == {torch.bfloat16}


def test_code_of_the_model_runs_only_where_it_was_asked_for(export, sample):
    with pytest.raises(ValueError, match='its own code') as caught:
        export('mine')
    assert '\n' not in str(caught.value)
    folder, _ = export('mine', '--trust_remote_code')
    assert (folder / 'modeling_mine.py').read_text() == CODE
    with pytest.raises(ValueError, match='its own code'):
        sample('mine')
    assert sample('mine', '--trust_remote_code', '--prompt=abc', '--num_samples=1')[0].startswith('abc')


@pytest.mark.parametrize('name', [name for name in RUNS if name.startswith('lora')])
@pytest.mark.filterwarnings('ignore::FutureWarning')  # of transformers, for peft
@torch.no_grad()
def test_the_adapter_on_the_original_equals_the_merged_model(name, models, runs, export):
    peft = pytest.importorskip('peft')
    folder, said = export(name, '--adapter')
    assert {path.name for path in folder.iterdir()} == {'adapter_config.json', 'adapter_model.safetensors'}
    assert 'loaded again as PeftModelForCausalLM: weights equal, logits equal ' in said
    keys = json.loads((folder / 'adapter_config.json').read_text())
    assert (keys['r'], keys['lora_alpha'], keys['task_type']) == (4, 12, 'CAUSAL_LM')
    assert keys['base_model_name_or_path'] == str(models / RUNS[name][0])
    assert keys['fan_in_fan_out'] == (name == 'lora_gpt2')
    with_adapter = peft.AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    adapted = {key.rpartition('.lora_A')[0] for key in stored(folder) if 'lora_A' in key}
    assert {key.rpartition('.lora_A')[0] for key, _ in with_adapter.named_parameters() if 'lora_A' in key} == adapted
    x = some_tokens()
    torch.testing.assert_close(with_adapter(x).logits, trained(models, runs, name)(x).logits, atol=1e-4, rtol=1e-4)


def test_an_adapter_wants_a_run_with_lora(export):
    with pytest.raises(ValueError, match=r'trained without LoRA \(lora_rank=0\); leave --adapter out$'):
        export('llama', '--adapter')


def test_a_run_without_its_model_folder_gets_one_line(runs, export, tmp_path):
    kept = runs / 'llama' / 'model'
    kept.rename(tmp_path / 'model')
    try:
        with pytest.raises(ValueError, match=f'{kept} is missing'):
            export('llama')
    finally:
        (tmp_path / 'model').rename(kept)


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_questions_of_the_conversations_are_answered_in_one_start(sample, tmp_path):
    """By default they are sent as messages, since the run was trained on conversations. The template ends an answer
    with <|im_end|>, which the model's folder does not name."""
    questions = tmp_path / 'questions.jsonl'
    questions.write_text('\n'.join(json.dumps({'prompt': question}) for question in QUESTIONS))
    text, _ = sample('chat', f'--prompts={questions}', '--temperature=0', '--max_new_tokens=20')
    answers = [json.loads(line) for line in text.splitlines()]
    assert answers == [{'prompt': question, 'answer': answer} for question, answer in QUESTIONS.items()]


def test_a_prompt_with_a_token_beyond_the_embedding_gets_one_line(runs, sample, tmp_path):
    from transformers import AutoTokenizer

    shutil.copytree(runs / 'llama', tmp_path / 'run')
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / 'run' / 'model')
    tokenizer.add_tokens(['<first>', '<second>'])  # of 259 tokens; the model has 260
    tokenizer.save_pretrained(tmp_path / 'run' / 'model')
    text, _ = sample(tmp_path / 'run', '--prompt=a<first>', '--num_samples=1', '--max_new_tokens=2')
    assert text.startswith('a<first>')
    with pytest.raises(ValueError, match="spells the token '<second>' .260., the model has 260: leave it out"):
        sample(tmp_path / 'run', '--prompt=a<second>')


def test_stdout_has_the_answer_alone_and_a_system_message_is_rendered(sample, tmp_path):
    question, answer = next(iter(QUESTIONS.items()))
    (tmp_path / 'question.txt').write_text(question)
    assert sample('chat', f'--prompt=FILE:{tmp_path / "question.txt"}', '--temperature=0')[0] == f'{answer}\n'
    options = ['--temperature=0', '--max_new_tokens=8', '--chat=False']
    rendered = f'<|im_start|>system\nBe odd.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n'
    (tmp_path / 'text.txt').write_text(rendered)
    expected = sample('chat', f'--prompt=FILE:{tmp_path / "text.txt"}', '--num_samples=1', *options)[0]
    written = sample('chat', f'--prompt={question}', '--system=Be odd.', '--temperature=0', '--max_new_tokens=8')[0]
    # As text, the model goes on after the end of the turn.
    assert expected.startswith(rendered) and expected.removeprefix(rendered).strip().startswith(written.strip())


def test_a_system_message_that_the_template_refuses_begins_the_users(runs, sample):
    shutil.copytree(runs / 'chat', runs / 'refusing')
    template = runs / 'refusing' / 'model' / 'chat_template.jinja'
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    template.write_text(refusal + template.read_text())
    options = ['--temperature=0', '--max_new_tokens=8']
    folded = sample('refusing', '--prompt=Who barks?', '--system=Be odd.', *options)[0]
    assert folded == sample('chat', '--prompt=Be odd.\n\nWho barks?', *options)[0]


def test_without_the_dataset_a_prompt_is_a_message_unless_asked_otherwise(sample, tmp_path):
    question, answer = next(iter(QUESTIONS.items()))
    options = [f'--prompt={question}', '--temperature=0', f'--data_dir={tmp_path}', '--num_samples=1']
    assert sample('chat', *options)[0] == f'{answer}\n'
    assert sample('chat', *options, '--chat=False')[0].startswith(question)


@torch.no_grad()
def test_the_likeliest_tokens_are_those_of_the_trained_model_whatever_its_generation_config(models, runs, sample):
    model, tokens = trained(models, runs, 'lora_qwen3'), list(b'import ')
    for _ in range(12):
        tokens.append(likeliest(model(torch.tensor([tokens])).logits[0, -1]).item())
    options = ['--prompt=import ', '--max_new_tokens=12', '--num_samples=1']

    def text_until(stop_tokens):
        end = next((at for at in range(7, 19) if tokens[at] in stop_tokens), 19)
        return bytes(token for token in tokens[:end] if token < 256).decode('utf-8', 'replace') + '\n'

    for narrow in ('--temperature=0', '--top_k=1', '--top_p=1e-6'):
        assert sample('lora_qwen3', *options, narrow)[0] == text_until([256, 0])
    (runs / 'lora_qwen3' / 'model' / 'generation_config.json').write_text(f'{{"eos_token_id": [255, {tokens[10]}]}}')
    assert sample('lora_qwen3', *options, '--temperature=0')[0] == text_until([256, 255, tokens[10]])


def test_the_seed_draws_the_samples_of_a_fine_tuned_model(sample):
    first, notes = sample('gpt2', '--prompt=def', '--num_samples=2', '--seed=1', '--max_new_tokens=20')
    assert 'step_00000002: gpt2' in notes
    assert first == sample('gpt2', '--prompt=def', '--num_samples=2', '--seed=1', '--max_new_tokens=20')[0]
    assert first != sample('gpt2', '--prompt=def', '--num_samples=2', '--seed=2', '--max_new_tokens=20')[0]
    nothing, *texts = (text.partition('\n')[2] for text in first.split('--- sample '))
    assert len(set(texts)) == 2 and all(text.startswith('def') for text in texts)
    assert sample('gpt2', '--num_samples=1', '--max_new_tokens=500')[0].strip()  # the model has 64 positions


@pytest.mark.parametrize(
    'run, arguments, expected',
    [
        ('llama', ['--prompt=' + 'x' * 64], 'has 64 tokens, the model 64 positions'),
        ('llama', ['--system=Be brief.'], '--chat'),
        ('llama', ['--tokenizer=gpt2'], 'tokenizer=gpt2'),
        ('chat', ['--prompt='], 'the prompt is empty'),
        ('chat', ['--prompts=none.jsonl'], 'none.jsonl'),
        ('chat', ['--prompts=bad.jsonl'], 'bad.jsonl, line 2: expected {"prompt": "TEXT"}'),
        ('chat', ['--prompts=bad.jsonl', '--prompt=x'], 'both given'),
    ],
)
def test_bad_input_gets_one_line(sample, tmp_path, monkeypatch, run, arguments, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'bad.jsonl').write_text('{"prompt": "x"}\n{"question": "x"}\n')
    with pytest.raises((ValueError, FileNotFoundError), match=expected) as caught:
        sample(run, *arguments)
    assert '\n' not in str(caught.value)
