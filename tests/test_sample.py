"""sample.py on checkpoints of train_fsdp.py (two ranks) and train_ddp.py (one rank), and on folders of transformers;
the generation behind it on tiny models of both kinds. test_export_finetuned.py samples fine-tuned runs."""

import contextlib
import json
import os
import pty
import shutil
import subprocess

import pytest
import torch
from chats import LEARNED, encoder_of, make_tokenizer, messages_of
from launch import TINY_MODEL, TINY_RUN, command_of, environment, fork_script, run_forked, run_script
from precision import MARGIN, gap_of_text, likeliest
from pretrained import (
    CALLS,
    CHATML,
    HYBRID,
    MODELS,
    MORE_MODELS,
    OF_LENGTH,
    SONG,
    TURN,
    save_model,
)
from short import slow_but
from tokenizers import processors

from evaluation import prompts, sampling
from huggingface import loading
from huggingface.pretrained import Pretrained
from model import GPT, ModelConfig
from runtime import checkpoint
from text import chat_rows
from text import tokenizer as tokenizers
from text.conversations import ChatEncoder
from text.language import Prompt, TransformersLanguage
from text.tokenizer import byte_level_bpe

TRAIN = ['--arch=llama', '--dataset=tiny', '--max_iters=4', '--global_batch_size=4', '--dtype=float32']
SAMPLE = ['--max_new_tokens=40', '--num_samples=1', '--prompt=def ']


@pytest.fixture(scope='module')
def runs(data_dir, tmp_path_factory):
    """The same run twice, 'fsdp' on two ranks and 'ddp' on one, each with checkpoints of steps 2 and 4; and 'enoki',
    for which transformers has no class."""
    folder = tmp_path_factory.mktemp('runs')
    run = [*TINY_MODEL, *TINY_RUN, *TRAIN, f'--data_dir={data_dir}', '--checkpoint_interval=2']
    run_forked('train_fsdp.py', *run, f'--out_dir={folder / "fsdp"}', nproc=2, log=folder / 'fsdp.log')
    run_forked('train_ddp.py', *run, f'--out_dir={folder / "ddp"}', log=folder / 'ddp.log')
    run_forked('train_ddp.py', *run, '--arch=enoki', f'--out_dir={folder / "enoki"}', log=folder / 'enoki.log')
    return folder


@pytest.fixture
def start(run_here):
    """start(*arguments): runs sample.py itself, in this process, and returns (text, notes)."""

    def run(*arguments):
        torch.backends.cuda.enable_cudnn_sdp(True)
        said = run_here('sample.py', '--device=cpu', '--dtype=float32', *arguments)
        assert not torch.backends.cuda.cudnn_sdp_enabled()  # cuDNN would make a plan for every new length
        return said

    return run


@pytest.fixture
def sample(start):
    """sample(out_dir, *arguments): 40 tokens after "def ", unless the arguments say otherwise."""
    return lambda out_dir, *arguments: start(f'--out_dir={out_dir}', *SAMPLE, *arguments)


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
    fast = byte_level_bpe({bytes([byte]): byte for byte in range(256)}, {eot: 256})
    fast.post_processor = processors.TemplateProcessing(f'{eot} $A', f'{eot} $A $B', [(eot, 256)])
    (tmp_path / 'with_bos').mkdir()
    fast.save(str(tmp_path / 'with_bos' / 'tokenizer.json'))
    weights, state = checkpoint.load_weights(runs / 'ddp' / 'checkpoints' / 'step_00000004')
    model = GPT(ModelConfig(**state['identity']['model'])).eval()
    model.load_state_dict(weights | {'head.weight': weights.get('head.weight', weights['embed.weight'])})

    def goes_on(tokens):  # with the likeliest token each time
        row = list(tokens)
        while len(row) < len(tokens) + 12 and (row[-1] != 256 or len(row) == len(tokens)):
            row.append(likeliest(model(torch.tensor([row]))[0, -1]).item())
        return tokenizers.ByteTokenizer().decode(row[len(tokens) :]).removesuffix(eot)

    texts = ('import', 'self.', 'def f(x):', '#')
    expected = [goes_on([256, *prompt.encode()]) for prompt in texts]
    assert expected != [goes_on([256, 256, *prompt.encode()]) for prompt in texts]
    assert expected != [goes_on([*prompt.encode()]) for prompt in texts]
    (tmp_path / 'prompts.jsonl').write_text('\n'.join(json.dumps({'prompt': prompt}) for prompt in texts))
    options = ['--temperature=0', '--max_new_tokens=12', '--prompt=', f'--prompts={tmp_path}/prompts.jsonl']
    written, _ = sample(runs / 'ddp', *options, f'--tokenizer={tmp_path}/with_bos')
    assert [json.loads(line)['answer'] for line in written.splitlines()] == expected


TEXTS = ['def ', 'import os', 'Größe:\n', 'x', '']


def write_rows(path, rows):
    path.write_text('\n\n'.join(map(json.dumps, rows)))
    return f'--prompts={path}'


def test_prompts_of_a_file_get_a_line_each_as_if_asked_alone(runs, sample, tmp_path):
    rows = [{'prompt': text, 'number': number} for number, text in enumerate(TEXTS)]
    file = write_rows(tmp_path / 'prompts.jsonl', rows)
    written, _ = sample(runs / 'fsdp', '--prompt=', file, '--num_samples=None', '--temperature=0')
    lines = [json.loads(line) for line in written.splitlines()]
    assert [{'prompt': line['prompt'], 'number': line['number']} for line in lines] == rows
    for line in lines:
        alone = sample(runs / 'fsdp', f'--prompt={line["prompt"]}', '--temperature=0')[0]
        assert alone == line['prompt'] + line['answer'] + '\n'


def test_random_draws_do_not_depend_on_what_is_in_a_batch(runs, sample, tmp_path):
    file = write_rows(tmp_path / 'prompts.jsonl', [{'prompt': text} for text in TEXTS])
    several = [sample(runs / 'ddp', '--prompt=', file, '--num_samples=2', f'--batch_size={n}')[0] for n in (1, 3, 16)]
    assert several[0] == several[1] == several[2]
    answers = [json.loads(line)['answer'] for line in several[0].splitlines()]
    assert len(set(answers)) == 2 * len(TEXTS)


@pytest.mark.parametrize('name', ['ddp', 'enoki'])
def test_what_export_model_wrote_says_what_the_run_says(name, runs, sample, start, tmp_path):
    fork_script('export_model.py', f'--out_dir={runs / name}', f'--to={tmp_path / "model"}')
    is_own = json.loads((tmp_path / 'model' / 'config.json').read_text())['model_type'] == 'native_gpt'
    assert is_own == (name == 'enoki')
    options = ['--prompt=import os', '--max_new_tokens=20', '--temperature=0', '--num_samples=1']
    text, notes = start(f'--out_dir={tmp_path / "model"}', *options)
    assert text == sample(runs / name, *options)[0] and text.startswith('import os')
    assert f'{tmp_path / "model"}: {"enoki" if is_own else "llama"}, ' in notes
    if is_own:
        path = tmp_path / 'model/config.json'
        content = json.loads(path.read_text())
        for key, value, said in (
            ('n_layer', 10**9, 'n_layer is 1000000000, and there are weights of'),
            ('n_embd', 2**35, r'attn.proj.weight \(34359738368, '),
            ('n_embd', 'x', 'n_embd=x: expected int'),
            ('mlp_hidden_dim', 8, r'a model like this has blocks.0.mlp.*8'),
        ):
            path.write_text(json.dumps({**content, key: value}))
            with pytest.raises(ValueError, match=said):
                start(f'--out_dir={tmp_path / "model"}', *options)


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
        (['--prompt=FILE:none.txt'], 'none.txt'),
        (['--chat'], 'leave chat out'),
        (['--system=Be brief.'], 'leave it out'),
    ],
)
def test_bad_input_gets_one_line(runs, sample, arguments, expected):
    with pytest.raises((ValueError, FileNotFoundError), match=expected) as caught:
        sample(runs / 'fsdp', *arguments)
    assert '\n' not in str(caught.value)


# --- the engine, on models of transformers ----------------------------------------------------------------------------


def loaded(folder, dtype=torch.float32):
    model = loading.for_generation(Pretrained(str(folder)), None, dtype, 'cpu')
    loading.cast_weights(model, dtype, 'cpu')
    return model


ASKED = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [7], [20, 30, 40]]  # the first is longer than a sliding window
SOME = ['llama', 'gpt2', 'mistral', 'gemma3_text', 'mamba']
FULL = [pytest.param(kind, marks=pytest.mark.slow) for kind in [*MODELS, *MORE_MODELS, *HYBRID] if kind not in SOME]


@pytest.mark.parametrize('kind', SOME + FULL)
def test_a_batch_says_what_transformers_says_to_each_prompt_alone(kind, tmp_path):
    import transformers

    folders = (save_model(tmp_path / str(draw), kind, draw=draw) for draw in range(20))
    folder = next(folder for folder in folders if gap_of_text(loaded(folder), ASKED, 25) > MARGIN)
    model = loaded(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = []
    for prompt in ASKED:
        ids, options = torch.tensor([prompt]), {'max_new_tokens': 25, 'do_sample': False, 'eos_token_id': None}
        written = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)
        expected.append(written[0, len(prompt) :].tolist())
    assert sampling.generate_batch(model, ASKED, 25) == expected
    assert sampling.generate_batch(model, ASKED[::-1], 25) == expected[::-1]
    token = expected[1][6]
    until = [new[: new.index(token)] if token in new else new for new in expected]
    assert sampling.generate_batch(model, ASKED, 25, [token]) == until
    assert len(sampling.generate_batch(model, ASKED[1:2], 99)[0]) == (
        99 if kind.startswith('mamba') else 63
    )  # 64 positions


@pytest.mark.parametrize('kind', ['llama', 'mistral', 'gemma3_text'])
def test_a_text_that_goes_on_where_one_ended_need_not_be_read_again(kind, tmp_path):
    model, memory, sizes = loaded(save_model(tmp_path, kind)), sampling.Memory(), []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape[1]))
    text = ASKED[0]
    for read in (12, 3, 1):
        before = text if read > 1 else [9, *text]  # another text
        (new,) = sampling.generate_batch(model, [before], 6, memory=memory)
        assert new == sampling.generate_batch(model, [before], 6)[0]
        expected = read if model.reads_on and read > 1 else len(before)
        if read == 3:
            expected += model.reads_on  # the last token was drawn, and not read
        assert sizes[:6] == [expected, 1, 1, 1, 1, 1] and sizes[6] == len(before)
        sizes.clear()
        text = [*before, *new, 5, 6, 7]


@pytest.mark.parametrize('kind', slow_but(['phi3_longrope'], OF_LENGTH))
def test_texts_that_grow_past_a_length_are_written_as_without_a_cache(kind, tmp_path):
    """Beyond TURN tokens, LongRoPE rotates all of a text in another way; so what a cache holds is of no use."""
    import transformers

    folder = save_model(tmp_path, kind, initializer_range=0.3)
    model, memory = loaded(folder), sampling.Memory()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [[*range(begin, begin + n)] for begin, n in ((1, 25), (60, 12), (90, TURN), (130, TURN + 2))]

    def without_cache(text, n):
        for _ in range(n):
            text = [*text, likeliest(theirs(torch.tensor([text]), use_cache=False).logits[:, -1]).item()]
        return text

    with torch.no_grad():
        expected = [without_cache(prompt, 24)[len(prompt) :] for prompt in prompts]
        assert sampling.generate_batch(model, prompts, 24) == expected
        assert [sampling.generate_batch(model, [prompt], 24)[0] for prompt in prompts] == expected
        text = prompts[0]
        for _ in range(3):  # turns of a chat, the last of them beyond TURN
            (new,) = sampling.generate_batch(model, [text], 3, memory=memory)
            assert new == without_cache(text, 3)[len(text) :]
            text = [*text, *new, 5, 6]


# --- sample.py on such folders ----------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def chat_model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp('models') / 'llama', 'llama')


CHAT = ['--chat', '--temperature=0', '--max_new_tokens=5']


def test_rows_may_have_system_messages_or_whole_conversations(chat_model, start, tmp_path):
    dialogue = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]
    rows = [{'prompt': 'Hi'}, {'prompt': 'Hi', 'system': 'Be odd.'}, {'messages': [*dialogue, dialogue[0]]}]
    file, options = write_rows(tmp_path / 'rows.jsonl', rows), [f'--out_dir={chat_model}', *CHAT]
    written, _ = start(*options, file, '--system=Be it.', '--show_ids')
    lines = [json.loads(line) for line in written.splitlines()]
    asked = [
        '<|im_start|>system\nBe it.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n',
        '<|im_start|>system\nBe odd.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n',
        '<|im_start|>system\nBe it.<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n'
        '<|im_start|>user\na<|im_end|>\n',
    ]
    specials = {256: '<|endoftext|>', 257: '<|im_start|>', 258: '<|im_end|>'}
    for line, row, text in zip(lines, rows, asked, strict=True):
        spelled = ''.join(specials.get(token) or chr(token) for token in line['prompt_ids'])
        assert spelled == text + '<|im_start|>assistant\n'
        answer = bytes(token for token in line['answer_ids'] if token < 256).decode('utf-8', 'replace').strip()
        assert line['answer'] == answer and len(line['answer_ids']) == 5
        assert {key: line[key] for key in row} == row
    alone, notes = start(*options, '--prompt=Hi', '--system=Be odd.', '--show_ids')
    assert alone == lines[1]['answer'] + '\n'
    assert f'ids of the prompt: {lines[1]["prompt_ids"]}' in notes and f'{lines[1]["answer_ids"]}' in notes


def test_a_folder_with_a_chat_template_is_continued_as_text_and_says_so_until_chat_says_which(chat_model, runs, start):
    options = ['--prompt=Hi', '--temperature=0', '--max_new_tokens=3']
    for folder, more, is_said in (
        (chat_model, [], True),
        (chat_model, ['--chat'], False),
        (chat_model, ['--chat=False'], False),
        (runs / 'ddp', [], False),
    ):
        notes = start(f'--out_dir={folder}', *options, *more)[1]
        assert ('has a chat template, and here a text is continued: --chat makes' in notes) == is_said, notes


def test_at_temperature_0_there_is_one_sample(runs, start):
    options = [f'--out_dir={runs / "ddp"}', '--prompt=def ', '--temperature=0', '--max_new_tokens=9']
    text, notes = start(*options)
    assert text.startswith('def ') and 'no effect' not in notes
    more, notes = start(*options, '--num_samples=3')
    assert more == text and 'num_samples=3 has no effect here, only with a --temperature above 0' in notes
    again, notes = start(*options, '--num_samples=1')
    assert again == text and 'no effect' not in notes


def test_a_conversation_over_a_pipe_remembers_what_was_said(chat_model, start, tmp_path):
    options = [f'--out_dir={chat_model}', '--temperature=0', '--max_new_tokens=2', '--chat']
    command = command_of('sample.py', *options, '--device=cpu', '--dtype=float32', '--system=S')
    pipe = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE}
    process = subprocess.Popen(command, env=environment(), **pipe)

    def expect(messages):
        file = write_rows(tmp_path / 'rows.jsonl', [{'messages': messages}])
        return json.loads(start(*options, file)[0])['answer']

    def say(line, messages):
        """Send a line and compare the answer, which must come before the next line, with that to the whole chat."""
        process.stdin.write(f'{line}\n'.encode())
        process.stdin.flush()
        expected = expect([*messages, {'role': 'user', 'content': line}])
        assert process.stdout.read(len(expected.encode()) + 1).decode() == expected + '\n'
        return [*messages, {'role': 'user', 'content': line}, {'role': 'assistant', 'content': expected}]

    try:
        say('é', say('a', [{'role': 'system', 'content': 'S'}]))
        process.stdin.write(b'/system T\n')
        messages = say('b', [{'role': 'system', 'content': 'T'}])
        process.stdin.write(b'much more than there is room for\n/reset\n')
        assert say('b', messages[:1]) == messages
        rest, notes = process.communicate(timeout=60)
    finally:
        process.kill()
    assert rest == b'' and process.returncode == 0
    assert 'the model 64 positions: /reset starts over\n' in notes.decode()
    assert 'Traceback' not in notes.decode()


@pytest.mark.slow
def test_an_empty_line_ends_a_conversation(chat_model):
    command = command_of('sample.py', f'--out_dir={chat_model}', *CHAT, '--device=cpu')
    result = subprocess.run(command, env=environment(), input='\na\n', capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout == ''


# --- a model that calls the calculator, see tests/evaluation/test_tools.py --------------------------------------------


TALK = ['--chat', '--temperature=0', '--max_new_tokens=30']


def test_the_rows_of_a_batch_call_the_calculator_and_keep_what_it_said(talker, start, tmp_path):
    encoder = ChatEncoder(talker, 258)
    file = write_rows(tmp_path / 'rows.jsonl', [{'prompt': 'Sing'}, {'prompt': '6x7?'}])
    written, _ = start(f'--out_dir={talker}', *TALK, '--tools=calculator', '--show_ids', file)
    song, product = map(json.loads, written.splitlines())
    assert song['turns'] == [] and song['answer'] == SONG[:29]
    assert product['turns'] == [{'role': 'assistant', 'content': '=6*7'}, {'role': 'tool', 'content': '42'}]
    assert product['answer'] == 'It is 42.'
    ((learned, _, _),) = encoder.examples(json.dumps({'messages': messages_of(CALLS)}))
    assert product['prompt_ids'] + product['answer_ids'] == learned.tolist()[:-1]
    text, notes = start(f'--out_dir={talker}', *TALK, '--tools=calculator', '--prompt=6x7?')
    assert text == 'It is 42.\n' and 'calculator: 6*7 = 42\n' in notes
    assert start(f'--out_dir={talker}', *TALK, '--prompt=6x7?')[0] == '=6*7\n'


def test_a_conversation_remembers_what_the_calculator_said(talker, start, tmp_path):
    command = command_of('sample.py', f'--out_dir={talker}', *TALK, '--device=cpu', '--dtype=float32', '--show_ids')
    pipe = {'input': '6x7?\nSing\n', 'capture_output': True, 'text': True}
    result = subprocess.run([*command, '--tools=calculator'], env=environment(), **pipe)
    assert result.stdout == f'It is 42.\n{SONG[:29]}\n' and 'calculator: 6*7 = 42\n' in result.stderr
    messages = [*CALLS[:1], ('assistant', '=6*7'), *CALLS[2:], ('user', 'Sing')]
    file = write_rows(tmp_path / 'rows.jsonl', [{'messages': messages_of(messages)}])
    asked = json.loads(start(f'--out_dir={talker}', *TALK, '--show_ids', file)[0])['prompt_ids']
    assert f'ids of the prompt: {asked}\n' in result.stderr


def in_terminal(*arguments):
    """(the process of sample.py with a terminal as its stdout, the other end of that)."""
    ours, theirs = pty.openpty()
    command = command_of('sample.py', *arguments, '--device=cpu', '--dtype=float32')
    process = subprocess.Popen(command, env=environment(), stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    return process, ours


def test_in_a_terminal_text_appears_as_it_is_written(talker):
    process, terminal = in_terminal(f'--out_dir={talker}', *TALK[:2], '--max_new_tokens=4000', '--prompt=Sing')
    try:
        text = b''
        while b'la la' not in text:
            text += os.read(terminal, 10_000)
        assert len(text) < 2000
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_what_a_terminal_shows_in_the_end_is_what_a_file_gets(runs, sample):
    options = ['--prompt=Größe of ', '--max_new_tokens=40', '--num_samples=3', '--batch_size=2']
    process, terminal = in_terminal(f'--out_dir={runs / "ddp"}', *options)
    text = b''
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
        while part := os.read(terminal, 10_000):
            text += part
    os.close(terminal)
    assert process.wait() == 0
    assert text.decode().replace('\r\n', '\n') == sample(runs / 'ddp', *options)[0].replace('\r\n', '\n')


def sentencepiece(tmp_path):
    """A tokenizer like Llama 2's: words contain their spaces, and bytes stand for what is in no word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ['<unk>', '</s>', *(f'<0x{byte:02X}>' for byte in range(256)), '\u2581', '\u2581good', '\u2581day', '.']
    tokenizer = Tokenizer(
        models.BPE({word: n for n, word in enumerate(words)}, [], unk_token='<unk>', byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace('\u2581', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token='</s>', chat_template=CHATML)
    fast.save_pretrained(tmp_path)
    return fast, {word: n for n, word in enumerate(words)}


TOOLS = """\
{%- if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + strftime_now('%d %b %Y') + '<|im_end|>\\n' }}{% endif %}\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}\
{%- if message.role == 'assistant' and enable_thinking is defined %}{{- '<think>off' }}{%- endif %}\
{%- if message.content is none %}{{- 'null' }}{%- else %}{{- message.content }}{%- endif %}\
{%- for call in message.tool_calls or [] %}{{- call.function.name + ARGUMENTS }}{%- endfor %}{{- '<|im_end|>\\n' }}\
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}\
{%- if enable_thinking is defined %}{{- '<think>off' }}{%- endif %}{%- endif %}"""
OBJECT, STRING = '(call.function.arguments | tojson)', 'call.function.arguments'  # the second as DeepSeek's
SAYS_NULL = "{%- if message.content is none %}{{- 'null' }}{%- else %}{{- message.content }}{%- endif %}"
CALL = {'type': 'function', 'function': {'name': 'weather', 'arguments': '{"city": "Paris"}'}}
TOOL = {'type': 'function', 'function': {'name': 'weather', 'parameters': {'type': 'object', 'properties': {}}}}
USED = [
    {'role': 'developer', 'content': 'Use tools.'},
    {'role': 'user', 'content': [{'type': 'text', 'text': 'Rain?'}]},
    {'role': 'assistant', 'content': None, 'tool_calls': [CALL]},
    {'role': 'tool', 'content': 'no'},
]
SHARE = [{'from': 'human', 'value': 'Rain?'}, {'from': 'function_call', 'value': '{"name": "weather"}'}]
ASKING = {
    'messages': {'messages': USED, 'tools': [TOOL], 'chat_template_kwargs': {'enable_thinking': False}},
    'ShareGPT': {'conversations': [*SHARE, {'from': 'observation', 'value': 'no'}], 'tools': json.dumps([TOOL])},
    'prompt': {'prompt': 'Rain?', 'system': 'Be brief.', 'functions': [TOOL['function']]},
    'list': {'prompt': USED[1:2]},
    'both': {'prompt': 'not read', 'messages': USED[:2]},  # as in conversation_of()
}


@pytest.mark.parametrize('arguments', [OBJECT, STRING])
@pytest.mark.parametrize('content', [SAYS_NULL, '{{- message.content }}'])
@pytest.mark.parametrize('fold_system', [False, True])
def test_a_row_is_asked_as_prepare_data_learns_its_answer(tmp_path, arguments, content, fold_system):
    """The prompt is, token by token, what stands before the answer in the training example."""
    template = TOOLS.replace('ARGUMENTS', arguments).replace(SAYS_NULL, content)
    encoder, _ = encoder_of(make_tokenizer(tmp_path, template))
    tokenizer = tokenizers.load_transformers_tokenizer(str(tmp_path))
    language = TransformersLanguage(tokenizer, str(tmp_path), fold_system=fold_system)
    (tmp_path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, ASKING.values())))
    rows = prompts.read_rows(tmp_path / 'rows.jsonl')
    assert rows == [*ASKING.values()]
    for name, row in zip(ASKING, rows, strict=True):
        asked = language.prompt_of_chat(prompts.conversation_to_answer(row, None, name)).ids
        field = next(field for field in ('messages', 'conversations', 'prompt') if field in row)
        if field == 'prompt':
            learned = {**row, 'completion': 'None.'}
        else:
            answer = {'role': 'assistant', 'content': 'None.'}
            learned = {**row, field: [*({**turn, 'weight': 0} for turn in row[field]), answer]}
        (example,) = encoder.examples(chat_rows.conversation_of(learned), fold_system)
        ids, flags, _ = example
        assert asked == ids[: list(flags & LEARNED).index(LEARNED)].tolist(), name
    tokenizer.chat_template = CHATML  # which writes no tools
    for ask in (language.prompt_of_chat, lambda row: language.chat(row['messages'], row)):
        with pytest.raises(ValueError, match='refuses: rows with tools that the chat template does not write$'):
            ask({'messages': [{'role': 'user', 'content': 'Is weather a tool?'}], 'tools': [TOOL]})
    tokenizer.chat_template = template
    given = TransformersLanguage(language.tokenizer, str(tmp_path), chat_template_kwargs={'enable_thinking': False})
    asked = [one.prompt_of_chat({'messages': [{'role': 'user', 'content': 'x'}]}).ids for one in (language, given)]
    assert language.decode(asked[1]) == language.decode(asked[0]) + '<think>off'


def test_text_comes_in_whole_characters_and_with_its_spaces(tmp_path):
    fast, ids = sentencepiece(tmp_path)
    language = TransformersLanguage(fast, str(tmp_path))
    smile = [ids[f'<0x{byte:02X}>'] for byte in '🙂'.encode()]
    answer = [ids['\u2581good'], ids['\u2581day'], *smile, ids['\u2581'], ids['.'], ids['<0xC3>']]
    prompt = Prompt([ids['.']], is_chat=True)
    stream = prompts.Stream(lambda new: language.text_of(prompt, new))
    assert [stream.add(token) for token in answer] == ['good', ' day', '', '', '', '🙂', '', ' .', '']
    assert stream.end() == '\ufffd' and stream.shown == language.text_of(prompt, answer)
    text = Prompt([ids['\u2581good']])
    assert language.text_of(text, [ids['\u2581day'], ids['.']]) == ' day.'


def test_a_bytes_tokenizer_streams_what_it_says_at_once():
    bpe = byte_level_bpe({bytes([byte]): byte for byte in range(256)}, {'<|endoftext|>': 256})
    stream = prompts.Stream(lambda new: bpe.decode(new).strip())
    shown = [stream.add(token) for token in ' ä\n\nb  '.encode()]
    assert shown == ['', '', 'ä', '', '', '\n\nb', '', ''] and stream.end() == ''


@pytest.mark.parametrize(
    'arguments, expected',
    [
        (['--out_dir=ADAPTER'], 'is an adapter of peft for the model base'),
        (['--out_dir=EMPTY'], 'no weights, model.safetensors'),
        (['--out_dir=none/such/folder'], 'none/such/folder'),
        (['--out_dir=PLAIN', '--chat'], 'has no chat template: leave chat out$'),
        (['--out_dir=MODEL', '--system=x'], '--chat makes a message of it$'),
        (['--out_dir=MODEL', '--prompts=SYSTEM'], '--chat makes a message of it$'),
        (['--out_dir=MODEL', '--prompts=LONG'], 'prompt 2 has 64 tokens, the model 64 positions: shorten it$'),
        (['--out_dir=MODEL', '--chat', '--prompts=BLANK'], 'prompt 1 is empty'),
        (['--out_dir=MODEL', '--prompts=ODD'], r'ODD, line 1: expected .*"messages".*end with an answer in place of'),
        (['--out_dir=MODEL', '--prompts=TOOLS'], 'a row with messages, a system message or tools: .* --chat makes'),
        (
            ['--out_dir=MODEL', '--chat_template_kwargs={"a": false}'],
            "chat_template_kwargs={'a': False}: .* --chat makes",
        ),
        (['--out_dir=MODEL', '--chat', '--num_samples=2'], 'in a conversation there is one answer'),
        (
            ['--out_dir=MODEL', '--tools=calculator'],
            "tools='calculator': a text is continued here, not answered: --chat makes",
        ),
        (['--out_dir=MODEL', '--web'], 'web=True: a text is continued here, not answered: --chat makes'),
        (['--out_dir=PLAIN', '--web=8080'], 'web=8080: a text is continued here, not answered: there is no template'),
        (
            ['--out_dir=MODEL', '--chat', '--web', '--prompt=a'],
            'web=True: messages come from the page: leave prompt and',
        ),
        (['--out_dir=NO_TOOL', '--chat', '--tools=calculator'], 'does not write what a tool says: no tool can be used'),
    ],
)
def test_a_mistake_with_a_folder_gets_one_line_before_weights_are_read(
    chat_model, start, tmp_path, monkeypatch, arguments, expected
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, 'for_generation', None)  # calling it would be another error
    shutil.copytree(chat_model, 'MODEL')
    shutil.copytree(chat_model, 'PLAIN')
    (tmp_path / 'PLAIN' / 'chat_template.jinja').unlink()
    shutil.copytree(chat_model, 'NO_TOOL')
    only_others = CHATML.replace('in messages', "in messages if message.role != 'tool'")
    (tmp_path / 'NO_TOOL' / 'chat_template.jinja').write_text(only_others)
    (tmp_path / 'RUN' / 'checkpoints').mkdir(parents=True)
    (tmp_path / 'EMPTY').mkdir()
    shutil.copy(tmp_path / 'MODEL' / 'config.json', 'EMPTY')
    (tmp_path / 'ADAPTER').mkdir()
    (tmp_path / 'ADAPTER' / 'adapter_config.json').write_text('{"base_model_name_or_path": "base"}')
    write_rows(tmp_path / 'SYSTEM', [{'prompt': 'a', 'system': 'b'}])
    write_rows(tmp_path / 'TOOLS', [{'prompt': 'a', 'tools': [TOOL]}])
    write_rows(tmp_path / 'LONG', [{'prompt': 'a'}, {'prompt': 64 * 'a'}])
    write_rows(tmp_path / 'BLANK', [{'prompt': ' '}])
    write_rows(tmp_path / 'ODD', [{'messages': [{'role': 'assistant', 'content': 'x'}]}])
    with pytest.raises((ValueError, FileNotFoundError), match=expected) as caught:
        start(*arguments)
    assert '\n' not in str(caught.value)


@pytest.mark.slow
def test_started_as_a_user_would_without_a_run(tmp_path):
    result = run_script('sample.py', f'--out_dir={tmp_path}', check=False)
    assert result.returncode == 1 and result.stdout == ''
    assert result.stderr.startswith('[0] error: no checkpoint in') and result.stderr.count('\n') == 1
