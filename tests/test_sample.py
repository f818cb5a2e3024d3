"""sample.py on what train_fsdp.py saved from two ranks and train_ddp.py from one. Fine-tuned models are sampled in
test_export_finetuned.py."""

import json
import runpy
import shutil
import sys

import pytest
import torch
from launch import REPO, TINY_MODEL, TINY_RUN, run_forked, run_script
from tokenizers import processors

from huggingface import convert
from model import GPT, ModelConfig
from runtime import checkpoint
from text import tokenizer as tokenizers

TRAIN = ['--arch=llama', '--dataset=tiny', '--max_iters=4', '--global_batch_size=4', '--dtype=float32']
SAMPLE = ['--device=cpu', '--dtype=float32', '--max_new_tokens=40', '--num_samples=1', '--prompt=def ']


@pytest.fixture(scope='module')
def runs(data_dir, tmp_path_factory):
    """The same run twice: 'fsdp' on two ranks and 'ddp' on one, each with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp('runs')
    run = [*TINY_MODEL, *TINY_RUN, *TRAIN, f'--data_dir={data_dir}', '--checkpoint_interval=2']
    run_forked('train_fsdp.py', *run, f'--out_dir={folder / "fsdp"}', nproc=2, log=folder / 'fsdp.log')
    run_forked('train_ddp.py', *run, f'--out_dir={folder / "ddp"}', log=folder / 'ddp.log')
    return folder


@pytest.fixture
def sample(monkeypatch, capsys):
    """sample(out_dir, *arguments): runs sample.py as it stands, in this process, and returns (text, what it noted)."""
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)  # sample.py installs its own: put this one back afterwards

    def run(out_dir, *arguments):
        monkeypatch.setattr(sys, 'argv', ['sample.py', f'--out_dir={out_dir}', *SAMPLE, *arguments])
        torch.backends.cuda.enable_cudnn_sdp(True)
        runpy.run_path(str(REPO / 'sample.py'), run_name='__main__')
        assert not torch.backends.cuda.cudnn_sdp_enabled()  # it would make a plan for every new length
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


def test_several_samples_continue_the_prompt_and_the_seed_draws_them(runs, sample):
    first, notes = sample(runs / 'fsdp', '--num_samples=2', '--seed=1')
    assert 'step_00000004' in notes
    assert first == sample(runs / 'fsdp', '--num_samples=2', '--seed=1')[0]
    assert first != sample(runs / 'fsdp', '--num_samples=2', '--seed=2')[0]
    nothing, text_1, text_2 = first.split('--- sample ')
    assert nothing == '' and text_1.startswith('1 of 2') and text_2.startswith('2 of 2')
    text_1, text_2 = (text.split('\n', 1)[1] for text in (text_1, text_2))
    assert text_1.startswith('def ') and text_2.startswith('def ') and text_1 != text_2


def test_the_likeliest_tokens_are_the_same_however_they_are_asked_for_and_whoever_trained(runs, sample):
    greedy, _ = sample(runs / 'fsdp', '--temperature=0', '--seed=1')
    assert len(greedy) > len('def \n')
    assert sample(runs / 'fsdp', '--top_k=1', '--seed=2')[0] == greedy
    assert sample(runs / 'fsdp', '--top_p=1e-6', '--seed=3')[0] == greedy
    assert sample(runs / 'ddp', '--temperature=0')[0] == greedy


def test_an_older_step_and_a_prompt_from_a_file_longer_than_the_context(runs, sample, tmp_path):
    (tmp_path / 'prompt.txt').write_text('import os\n' * 10)  # 100 tokens, the context has 32
    text, notes = sample(runs / 'fsdp', '--step=2', f'--prompt=FILE:{tmp_path / "prompt.txt"}')
    assert 'step_00000002' in notes
    assert text.startswith('import os\n' * 10)


def test_an_empty_prompt_starts_a_document(runs, sample):
    text, _ = sample(runs / 'fsdp', '--prompt=')
    assert text.strip() and '<|endoftext|>' not in text


@torch.no_grad()
def test_what_the_tokenizer_puts_before_a_text_stands_before_the_prompt_once(runs, sample, tmp_path):
    eot = tokenizers.END_OF_TEXT
    fast = convert.byte_level_bpe({bytes([byte]): byte for byte in range(256)}, {eot: 256})
    fast.post_processor = processors.TemplateProcessing(f'{eot} $A', f'{eot} $A $B', [(eot, 256)])
    (tmp_path / 'with_bos').mkdir()
    fast.save(str(tmp_path / 'with_bos' / 'tokenizer.json'))
    weights, state = checkpoint.load_weights(runs / 'ddp' / 'checkpoints' / 'step_00000004')
    model = GPT(ModelConfig(**state['identity']['model'])).eval()
    model.load_state_dict(weights | {'head.weight': weights.get('head.weight', weights['embed.weight'])})

    def goes_on(tokens):  # the likeliest token at a time
        row = list(tokens)
        while len(row) < len(tokens) + 12 and (row[-1] != 256 or len(row) == len(tokens)):
            row.append(model(torch.tensor([row]))[0, -1].argmax().item())
        return tokenizers.ByteTokenizer().decode(row[len(tokens) :]).removesuffix(eot)

    prompts = ('import', 'self.', 'def f(x):', '#')
    expected = [goes_on([256, *prompt.encode()]) for prompt in prompts]
    assert expected != [goes_on([256, 256, *prompt.encode()]) for prompt in prompts]
    assert expected != [goes_on([*prompt.encode()]) for prompt in prompts]
    (tmp_path / 'prompts.jsonl').write_text('\n'.join(json.dumps({'prompt': prompt}) for prompt in prompts))
    options = ['--temperature=0', '--max_new_tokens=12', '--prompt=', f'--prompts={tmp_path}/prompts.jsonl']
    written, _ = sample(runs / 'ddp', *options, f'--tokenizer={tmp_path}/with_bos')
    assert [json.loads(line)['answer'] for line in written.splitlines()] == expected


def test_prompts_of_a_file_get_a_line_each_as_if_asked_alone(runs, sample, tmp_path):
    texts = ['def ', 'import os', 'Größe:\n']
    (tmp_path / 'prompts.jsonl').write_text('\n\n'.join(json.dumps({'prompt': text}) for text in texts))
    written, _ = sample(runs / 'fsdp', '--prompt=', f'--prompts={tmp_path / "prompts.jsonl"}', '--num_samples=None')
    lines = [json.loads(line) for line in written.splitlines()]
    assert [line['prompt'] for line in lines] == texts
    for line in lines:
        assert sample(runs / 'fsdp', f'--prompt={line["prompt"]}')[0] == line['prompt'] + line['answer'] + '\n'


def test_a_damaged_checkpoint_is_never_sampled(runs, sample, tmp_path):
    shutil.copytree(runs / 'ddp', tmp_path / 'run')
    shard = next((tmp_path / 'run').glob('checkpoints/step_00000004/*.distcp'))
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(ValueError, match='sha256 differs'):
        sample(tmp_path / 'run', '--step=4')
    text, notes = sample(tmp_path / 'run')
    assert 'is damaged' in notes and 'step_00000002: llama' in notes and text.startswith('def ')


@pytest.mark.parametrize(
    'arguments, expected',
    [
        (['--step=3'], ' 4, 2$'),
        (['--data_dir=elsewhere'], '--data_dir=FOLDER'),
        (['--tokenizer=gpt3'], 'gpt2'),
        (['--num_samples=0'], 'num_samples=0'),
        (['--top_p=1.5'], 'top_p=1.5'),
        (['--prompt=FILE:none.txt'], 'none.txt'),
        (['--chat'], 'leave --chat out'),
        (['--system=Be brief.'], 'leave --system out'),
    ],
)
def test_bad_input_gets_one_line(runs, sample, arguments, expected):
    with pytest.raises((ValueError, FileNotFoundError), match=expected) as caught:
        sample(runs / 'fsdp', *arguments)
    assert '\n' not in str(caught.value)


@pytest.mark.slow
def test_started_as_a_user_would_without_a_run(tmp_path):
    result = run_script('sample.py', f'--out_dir={tmp_path}', check=False)
    assert result.returncode == 1 and result.stdout == ''
    assert result.stderr.startswith('[0] error: no checkpoint in') and result.stderr.count('\n') == 1
