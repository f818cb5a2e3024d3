"""Instruction data: what is learned of a conversation, and folders of conversations and files of every kind.

What the likes of Llama, Mistral and Qwen write, and which tokens of it are learned, is compared with
apply_chat_template() in tests/fuzzing/rows.py, for rows of every form.
"""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import transformers
from chats import (
    CHATML,
    FIRST,
    LEARNED,
    QWEN3,
    conversations_of,
    encoder_of,
    examples_of,
    flags_of,
    learned_in,
    make_tokenizer,
    messages_of,
    write_rows,
)
from launch import REPO, environment
from prepared import (
    contents,
    documents_of,
    error_of,
    meta_of,
    prepare,
    read_here,
    start_and_kill_at,
    tokens_of,
    write_stream,
)
from tokenizers import AddedToken, Tokenizer

from dataset.opening import open_dataset
from dataset.shards import AS_END
from evaluation import tasks
from text import chat_rows, conversations
from text import tokenizer as tokenizers
from text.language import TransformersLanguage
from text.tokenizer import FileTokenizer

BRIEF = [('system', 'Be brief.'), ('user', 'Größe?\n'), ('assistant', '  42 🙂\n\n')]
CHATS = [
    [('user', 'What is 2 + 2?'), ('assistant', 'It is 4.')],
    [*BRIEF, ('user', 'Sure?'), ('assistant', 'Yes')],
    [('user', 'a'), ('assistant', '\nb'), ('user', 'c'), ('assistant', 'd'), ('user', 'never answered')],
]

LLAMA3 = """\
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}{{- bos_token }}\
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date_string + '<|eot_id|>' }}\
{%- for message in messages %}\
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}\
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
MISTRAL = """\
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set rest = messages[1:] %}\
{%- else %}{%- set rest = messages %}{%- endif %}{{- bos_token }}{%- for message in rest %}\
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}\
{{- raise_exception('roles must alternate user/assistant') }}{%- endif %}\
{%- if message.role == 'user' %}{%- if loop.last and system is defined %}\
{{- '[INST] ' + system + '\\n\\n' + message.content + '[/INST]' }}{%- else %}\
{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}{%- else %}{{- ' ' + message.content + eos_token }}\
{%- endif %}{%- endfor %}"""
OLMO = CHATML.replace(
    "'<|im_end|>' + '\\n'", "(eos_token if loop.last and message.role == 'assistant' else '<|im_end|>\\n')"
)
THINKING_PROMPT = CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'")
NO_END = """\
{%- for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{%- endfor %}\
{%- if add_generation_prompt %}{{ 'assistant: ' }}{%- endif %}"""


@pytest.fixture(scope='module')
def chatml(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp('models') / 'chatml', CHATML)


def learned_parts(encoder, files, turns):
    """For each example of a conversation: (its text, [the texts in it that are learned])."""
    return examples_of(encoder, files, {'messages': messages_of(turns)})


# --- what is learned --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('trim_offsets', [True, False])
@pytest.mark.parametrize('template', [CHATML, LLAMA3, MISTRAL], ids=['chatml', 'llama3', 'mistral'])
def test_the_answers_and_their_end_tokens_are_learned_and_nothing_else(template, trim_offsets, tmp_path):
    end = {CHATML: '<|im_end|>', LLAMA3: '<|eot_id|>', MISTRAL: '</s>'}[template]
    bos = '<|begin_of_text|>' if template == LLAMA3 else '<s>'
    encoder, files = encoder_of(make_tokenizer(tmp_path / 'model', template, end, bos, trim_offsets))
    for turns in CHATS:
        answers = [content for role, content in turns if role == 'assistant']
        answers = [answer.strip() for answer in answers] if template == LLAMA3 else answers
        lead = ' ' if template == MISTRAL else ''
        found = learned_parts(encoder, files, turns)
        assert [part for _, parts in found for part in parts] == [f'{lead}{answer}{end}' for answer in answers]
        assert len(found) == (2 if template == MISTRAL and turns[0][0] == 'system' else 1)
        assert 'never answered' not in found[0][0]
        if template == MISTRAL and turns[0][0] == 'system':  # it comes before each question that is answered
            assert [text.count('Be brief.') for text, _ in found] == [1, 1]


def learned_in_context(examples, eot):
    """{(tokens before a learned one, what the model should say there)} of examples."""
    return {
        (tuple(ids[:place].tolist()), eot if flags[place] & AS_END else int(ids[place]))
        for ids, flags, _ in examples
        for place in np.flatnonzero(flags & LEARNED)
    }


def test_both_answers_of_a_pair_follow_the_prompts_tokens(chatml):
    encoder, files = encoder_of(chatml)
    tokenizer = transformers.AutoTokenizer.from_pretrained(chatml)
    prompt = tokenizer.apply_chat_template(messages_of([('user', 'a')]), add_generation_prompt=True)['input_ids']
    answers = '\nHello', 'Hello'  # a tokenizer may merge the first with the line end before it
    pair = encoder.pair(chat_rows.pair_of({'prompt': 'a', 'chosen': answers[0], 'rejected': answers[1]}))
    for (ids, flags, _), answer in zip(pair, answers, strict=True):
        assert ids[: len(prompt)].tolist() == prompt
        assert learned_in(ids, flags, files.decode) == [f'{answer}<|im_end|>']


def test_answers_that_only_end_in_another_way_when_they_come_last_are_learned_in_one_example(tmp_path):
    folder = make_tokenizer(tmp_path / 'olmo', OLMO, eos='<|end|>')
    encoder = conversations.ChatEncoder(folder, FileTokenizer(f'{folder}/tokenizer.json', '<|end|>').eot)
    tokens = 0
    for turns in CHATS:
        messages, one_each = messages_of(turns), []
        answers = [number for number, (role, _) in enumerate(turns) if role == 'assistant']
        for last in answers:  # the only one that is learned, so it comes last
            shown = [{**message, 'weight': int(n == last)} for n, message in enumerate(messages[: last + 1])]
            one_each += encoder.examples(json.dumps({'messages': shown}))
        (found,) = encoder.examples(chat_rows.conversation_of({'messages': messages}))
        assert len(one_each) == len(answers) and found[2].count('<|end|>') == 1
        learned = learned_in_context(one_each, encoder.eot)
        assert learned_in_context([found], encoder.eot) == learned
        assert sum(target == encoder.eot for _, target in learned) == len(answers)
        tokens += 9 * len(found[0])
    path = write_rows(tmp_path / 'rows.jsonl', [{'messages': messages_of(turns)} for turns in CHATS for _ in range(9)])
    said = prepare(tmp_path, f'--dataset={path}', '--val_fraction=0', f'--tokenizer={folder}').stdout
    assert 'an example of its own' not in said and '(every answer learns to end with <|end|>, as' in said
    dataset = open_dataset(tmp_path / 'data', 'rows-olmo', 'train', 128)
    targets = dataset.read(range(dataset.n_windows))[1]
    assert dataset.n_tokens == tokens and (targets == encoder.eot).sum() == 9 * 5
    assert not (targets == encoder.controls.tokenizer.token_to_id('\ufdd0<|im_end|>')).any()


def test_answers_that_need_examples_of_their_own_are_announced_with_what_they_cost(tmp_path):
    folder = make_tokenizer(tmp_path / 'model', QWEN3)
    turns = [(role, f'{role} {number}') for number in range(6) for role in ('user', 'assistant')]
    rows = [{'messages': messages_of(turns)}] * 8
    path = write_rows(tmp_path / 'rows.jsonl', rows)
    result = prepare(tmp_path, f'--dataset={path}', '--val_fraction=0', f'--tokenizer={folder}')
    lengths = [len(ids) for ids, _, _ in encoder_of(folder)[0].examples(chat_rows.conversation_of(rows[0]))]
    factor = sum(lengths) / lengths[-1]
    assert len(lengths) == 6 and factor > 2
    line = next(line for line in result.stdout.splitlines() if 'an example of its own' in line)
    assert line.startswith('WARNING: ') and '48 examples of 8 conversations' in line
    assert f' {factor:.1f} times the tokens' in line


def test_an_answer_without_the_thought_that_the_prompt_opens_is_refused_or_learned_behind_it(tmp_path):
    encoder, files = encoder_of(make_tokenizer(tmp_path / 'thinking', THINKING_PROMPT))
    for answer in ('It is 4.', '<table>'):  # written without <think>, behind which the model would be asked
        with pytest.raises(ValueError, match=r"not begin as its prompt, which ends with '.*\\n<think>\\n': "):
            learned_parts(encoder, files, [('user', 'q'), ('assistant', answer)])
    ((_, parts),) = learned_parts(encoder, files, [('user', 'q'), ('assistant', '<think>\nso\n</think>\na')])
    assert parts == ['so\n</think>\na<|im_end|>']
    template = THINKING_PROMPT.replace("message.role + '\\n'", "message.role + ('\\n<think></think>' if i else '\\n')")
    template = template.replace('{{ ', "{%- set i = message.role == 'assistant' %}{{ ", 1)
    encoder, files = encoder_of(make_tokenizer(tmp_path / 'empty', template))  # as Nemotron 3's
    ((text, parts),) = learned_parts(encoder, files, CHATS[0])
    assert text.endswith('assistant\n<think>\n</think>It is 4.<|im_end|>') and parts == ['</think>It is 4.<|im_end|>']


def test_special_tokens_that_take_in_spaces_stay_on_their_side(tmp_path):
    template = CHATML.replace("'<|im_start|>' + message.role + '", "'<|' + message.role + '|>")
    folder = make_tokenizer(tmp_path / 'phi', template.replace('<|im_start|>assistant', '<|assistant|>'))
    tokenizer = Tokenizer.from_file(f'{folder}/tokenizer.json')
    names = ('<|user|>', '<|assistant|>', '<|im_end|>')
    tokenizer.add_special_tokens([AddedToken(name, rstrip=True, special=True) for name in names])
    tokenizer.save(f'{folder}/tokenizer.json')
    encoder, files = encoder_of(folder)
    turns = [('user', 'q'), ('assistant', '\n\n a b'), ('user', 'q'), ('assistant', 'c')]
    ((_, parts),) = learned_parts(encoder, files, turns)
    assert parts == ['a b<|im_end|>', 'c<|im_end|>']


@pytest.mark.parametrize(
    'template, end',
    [(CHATML, ' <|im_end|>'), (MISTRAL, ' [/INST]'), (CHATML.replace("'<|im_end|>' + ", ''), '<|im_end|>')],
)
def test_a_users_message_of_weight_1_is_learned_with_the_end_of_its_turn(tmp_path, template, end):
    """The last template writes no such end, so end-of-text stands there, and each part is an example of its own."""
    encoder, files = encoder_of(make_tokenizer(tmp_path, template))

    def learned(messages):
        return [part.strip() for _, parts in examples_of(encoder, files, {'messages': messages}) for part in parts]

    messages = messages_of([('user', 'answer'), ('assistant', 'the user'), ('user', ' user '), ('assistant', 'end')])
    first, last = learned(messages)
    messages[2]['weight'] = 1
    assert ' '.join(learned(messages)) == f'{first} user{end} {last}'  # the last two may adjoin
    for number, weight in enumerate((1, 0, 0, 0)):
        messages[number]['weight'] = weight
    assert learned(messages) == [f'answer{end.strip()}']
    if template == CHATML:
        encoder.template.tokenizer.chat_template = CHATML.replace('message.content', "(message.content + 'z')")
        with pytest.raises(ValueError, match="user's message has the weight 1, and the template ends otherwise"):
            learned(messages)


@pytest.mark.parametrize(
    'template', [CHATML, LLAMA3, MISTRAL, OLMO, QWEN3], ids=['chatml', 'llama3', 'mistral', 'olmo', 'qwen3']
)
def test_with_train_on_input_all_tokens_of_the_template_are_learned_once(template, tmp_path):
    """The tokens are those of apply_chat_template(). A template that writes an answer in another way once others follow
    has an example for each answer, which learns what the one before has not. The first token has nothing before it."""
    end = {LLAMA3: '<|eot_id|>', MISTRAL: '</s>', OLMO: '</s>'}.get(template, '<|im_end|>')
    folder = make_tokenizer(tmp_path / 'model', template, end, '<|begin_of_text|>' if template == LLAMA3 else '<s>')
    files = FileTokenizer(f'{folder}/tokenizer.json', end)
    encoder = conversations.ChatEncoder(folder, files.eot)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for turns in CHATS:
        if template == MISTRAL and turns[0][0] == 'system':
            continue  # it writes the system message before each question that comes last, see the next test
        messages = messages_of(turns)
        conversation = chat_rows.conversation_of({'messages': messages}, train_on_input=True)
        found = list(encoder.examples(conversation, train_on_input=True))
        ends = [number for number, (role, _) in enumerate(turns) if role == 'assistant' or number == len(turns) - 1]
        ends = ends if template == QWEN3 else ends[-1:]
        seen = ''
        for before, number, (ids, flags, _) in zip([None, *ends], ends, found, strict=False):
            shown = {'return_dict': True, 'date_string': conversations.DATE}
            theirs = tokenizer.apply_chat_template(messages[: number + 1], **shown)['input_ids']
            assert theirs[: len(ids)] == ids.tolist() and tokenizer.decode(theirs[len(ids) :]).strip() == ''
            begin = 1 + np.flatnonzero(flags[1:] & LEARNED)[0]
            assert flags[0] == FIRST and (flags[begin:] & LEARNED).all() and not (flags[1:] & FIRST).any()
            learned = files.decode(ids[begin:])
            assert begin == 1 if before is None else learned.startswith(messages[before + 1]['content'])
            seen += learned
        assert len(found) == len(ends)
        assert all(seen.count(content.strip()) == 1 for _, content in turns if len(content) > 4)


def test_with_train_on_input_a_system_message_that_is_written_again_is_learned_once(tmp_path):
    encoder, files = encoder_of(make_tokenizer(tmp_path / 'mistral', MISTRAL, '</s>'))
    turns = [('system', 'Be brief.'), ('user', 'one'), ('assistant', 'a'), ('user', 'two'), ('assistant', 'b')]
    row = chat_rows.conversation_of({'messages': messages_of(turns)}, train_on_input=True)
    texts = [
        conversations.marked_text(ids, flags, files.decode, '(', ')')
        for ids, flags, _ in encoder.examples(row, train_on_input=True)
    ]
    assert texts[0].endswith('Be brief.\n\none[/INST] a</s>)') and texts[0].index('(') < texts[0].index('Be')
    assert texts[1].endswith('one[/INST] a</s>[INST] Be brief.\n\n(two[/INST] b</s>)') and texts[1].count('(') == 1


def test_with_train_on_input_a_chat_ends_with_its_last_message_and_a_weight_of_0_is_a_contradiction(chatml, tmp_path):
    def learned(encoder, files, row):
        found = encoder.examples(chat_rows.conversation_of(row, train_on_input=True), train_on_input=True)
        return [files.decode(ids[(flags & LEARNED) > 0]) for ids, flags, _ in found]

    turns = [('user', 'a'), ('assistant', 'b'), ('user', 'thanks')]
    encoder, files = encoder_of(chatml)
    (text,) = learned(encoder, files, {'messages': messages_of(turns)})
    assert text == 'user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nthanks<|im_end|>'
    prompt = {'prompt': messages_of(turns), 'completion': messages_of([('assistant', 'bye')])}
    (text,) = learned(encoder, files, prompt)  # TRL's form, of which the answers in the prompt are learned, too
    assert text.endswith('b<|im_end|>\n<|im_start|>user\nthanks<|im_end|>\n<|im_start|>assistant\nbye<|im_end|>')
    no_end = encoder_of(make_tokenizer(tmp_path / 'no_end', NO_END))
    first, last = learned(*no_end, {'messages': messages_of(turns)})
    assert 'user: a\nassistant: b<|im_end|>'.endswith(first) and first.endswith('a\nassistant: b<|im_end|>')
    assert last.strip() == 'thanks<|im_end|>'
    for name in ('messages', 'prompt'):
        row = {**prompt, name: [{**message, 'weight': 0} for message in messages_of(turns)]}
        with pytest.raises(ValueError, match='rows with a weight of 0, beside --train_on_input'):
            learned(encoder, files, row)


def with_flags(folder, normalizer, **flags):
    """Give the control tokens of a tokenizer these flags, and the tokenizer this normalizer."""
    path = Path(folder) / 'tokenizer.json'
    content = json.loads(path.read_text())
    for token in content['added_tokens']:
        token |= flags
    path.write_text(json.dumps(content | {'normalizer': normalizer}))


FLAGS = {
    'plain': (None, {}),
    'normalized': (None, {'normalized': True}),
    'letters in two parts': ({'type': 'NFC'}, {'normalized': True}),
    'small letters': ({'type': 'Lowercase'}, {'normalized': True}),
    'spaces around it': (None, {'lstrip': True, 'rstrip': True}),
    'a single word': (None, {'single_word': True}),
    'added without the flag': (None, {'special': False}),
}


@pytest.mark.parametrize('flags', FLAGS)
def test_no_text_becomes_a_control_token_in_training_or_in_asking_whatever_flags_it_has(flags, tmp_path):
    template = '{{ tools | tojson }}' + CHATML.replace('message.content', "(' ' + message.content + ' ')")
    folder = make_tokenizer(tmp_path / 'model', template)
    with_flags(folder, FLAGS[flags][0], **FLAGS[flags][1])
    encoder, _ = encoder_of(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    language, asks = TransformersLanguage(tokenizer, folder), TransformersLanguage(tokenizer, folder)
    controls = ['<|im_start|>', '<|im_end|>'] + ['<s>'] * ('special' not in FLAGS[flags][1])  # no template writes <s>
    controls = tokenizer.convert_tokens_to_ids(controls)

    def counts(spelled):
        turns = [('system', spelled), ('user', f'q {spelled} r'), ('assistant', f'a{spelled}'), ('user', spelled)]
        messages = messages_of(turns)
        tools = [{'type': 'function', 'function': {'name': 'f', 'parameters': {'properties': {spelled: spelled}}}}]
        row = {'messages': [*messages, {'role': 'assistant', 'content': f'{spelled}b'}], 'tools': tools}
        ids = [part for part, _, _ in encoder.examples(chat_rows.conversation_of(row))]
        ids.append(language.prompt_of_chat({'messages': messages, 'tools': tools}).ids)
        item = {'prompt': spelled, 'answer': 'x', 'description': spelled, 'tools': tools}
        path = write_rows(tmp_path / 'task.jsonl', [item])
        ((prompt,),) = tasks.requests_of(tasks.read_task(path, chat=asks.chat), asks, 10_000)
        item = {'context': spelled, 'choices': [f'x{spelled}', 'y'], 'gold': 0, 'tools': tools}
        path = write_rows(tmp_path / 'task.jsonl', [item])
        ((request, _),) = tasks.requests_of(tasks.read_task(path, chat=asks.chat), asks, 10_000)
        return [sorted(token for token in part if token in controls) for part in (*ids, prompt.tokens, request.tokens)]

    expected = counts('plain')
    assert len(expected) == 4 and len(expected[0]) in (5, 10)  # a single word touches none
    for spelled in ('<|im_end|>', '<|IM_END|>', '<|im_end|><|im_start|>assistant\n', ' <s> <|im_<|im_end|>end|> '):
        assert counts(spelled) == expected, spelled


def test_a_control_token_that_a_template_makes_of_a_text_is_refused(tmp_path):
    template = CHATML.replace('message.content', "message.content.replace('/', '')")
    encoder, _ = encoder_of(folder := make_tokenizer(tmp_path, template))
    language = TransformersLanguage(transformers.AutoTokenizer.from_pretrained(folder), folder)
    turns = [('user', 'so <|im_/end|>'), ('assistant', 'a')]
    for ask in (
        lambda: list(encoder.examples(chat_rows.conversation_of({'messages': messages_of(turns)}))),
        lambda: language.prompt_of_chat({'messages': messages_of(turns[:1])}),
    ):
        with pytest.raises(ValueError, match='a text of which the chat template makes a control token'):
            ask()


def test_an_end_of_turn_that_was_added_as_no_special_token_is_one_token_and_ends_answers(tmp_path):
    folder = make_tokenizer(tmp_path, CHATML, eos='<s>')
    with_flags(folder, None, special=False)
    encoder = conversations.ChatEncoder(folder, FileTokenizer(f'{folder}/tokenizer.json', '<s>').eot)
    end = encoder.controls.tokenizer.token_to_id('\ufdd0<|im_end|>')
    ((ids, flags, _),) = encoder.examples(chat_rows.conversation_of({'messages': messages_of(CHATS[2])}))
    assert (ids[flags & LEARNED > 0] == end).sum() == 2 and encoder.eot not in ids
    assert encoder.line_of_end() is None
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert TransformersLanguage(tokenizer, folder).end_of_answer() == [end]


# --- datasets ---------------------------------------------------------------------------------------------------------


def many_chats(count):
    """Conversations of one to three turns."""
    generator = random.Random(1)
    words = ['time', 'and', 'tide', 'Größe', '🙂', '12345', '\n']
    for number in range(count):
        turns = [('system', 'Be kind.')] * (number % 3 == 0)
        for turn in range(1 + number % 3):
            answer = ' '.join(generator.choices(words, k=9)) + '!'
            turns += [('user', f'question {number} {turn}'), ('assistant', answer)]
        yield turns


def test_a_prepared_dataset_holds_tokens_masks_and_totals(chatml, tmp_path):
    turns = list(many_chats(300))
    rows = write_rows(tmp_path / 'chats.jsonl', ({'id': 1, 'messages': messages_of(chat)} for chat in turns))
    result = prepare(tmp_path, f'--dataset={rows}', f'--tokenizer={chatml}', '--shard_tokens=3000', '--name=chats')
    dataset = tmp_path / 'data' / 'chats'
    meta = meta_of(dataset)
    assert meta['masked'] is True and len(meta['splits']['train']['shards']) > 3
    assert meta['tokenizer']['eot_text'] == '<|im_end|>' and 'as JSON' in meta['val_rule']
    found = conversations_of(dataset, 'train') + conversations_of(dataset, 'val')
    assert 0 < meta['splits']['val']['documents'] < 30
    expected = [[f'{content}<|im_end|>' for role, content in chat if role == 'assistant'] for chat in turns]
    assert sorted(parts for _, parts in found) == sorted(expected)

    totals = meta['splits']['train']
    learned, n = int((flags_of(dataset, 'train') & LEARNED).sum()), len(tokens_of(dataset, 'train'))
    n_bytes = sum(len(text.encode()) for text, _ in conversations_of(dataset, 'train'))
    assert 0.05 < learned / n < 0.95
    assert f'learned: {learned:,} of them ({learned / n:.1%})' in result.stdout
    assert f'{n:,} tokens of {n_bytes:,} bytes of text ({n_bytes / n:.3f} bytes/token)' in result.stdout
    assert re.search(f'longest .* {totals["longest"]:,} tokens', result.stdout)
    place = f'--dataset=chats --data_dir={tmp_path}/data --out_dir=out/chats'
    assert f'next: python train_ddp.py config/way_chat.py --init_from=OUT_DIR {place}' in result.stdout
    assert f'{place} --warmup_iters={3 * n // 2048 // 10}\n' in result.stdout  # a tenth of its three epochs
    text, parts = conversations_of(dataset, 'train')[0]
    for part in parts:
        text = text.replace(f'assistant\n{part}', f'assistant\n【{part}】')
    assert f'in 【 】:\n{text}\n' in result.stdout


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_tokens_and_masks(chatml, tmp_path):
    rows = write_rows(tmp_path / 'many.jsonl', ({'messages': messages_of(turns)} for turns in many_chats(6000)))
    arguments = [f'--dataset={rows}', f'--tokenizer={chatml}', '--shard_tokens=20000', '--name=killed']
    prepare(tmp_path / 'whole', *arguments, '--num_proc=1')
    expected = contents(tmp_path / 'whole' / 'data' / 'killed')
    assert len([name for name in expected if name.endswith('.mask')]) > 9
    dataset = tmp_path / 'killed' / 'data' / 'killed'
    last = max(name for name in expected if name.startswith('train') and name.endswith('.bin'))
    for shard in ('train_000001.bin', f'train_{int(last[6:12]) - 4:06}.bin'):
        start_and_kill_at(dataset / shard, tmp_path / 'killed', *arguments)
        found = {name: digest for name, digest in contents(dataset).items() if name.endswith(('.bin', '.mask'))}
        assert found and all(expected[name] == digest for name, digest in found.items()), 'a half-written file'
    result = prepare(tmp_path / 'killed', *arguments)
    assert 'going on behind the first' in result.stdout
    assert contents(dataset) == expected


def test_a_terminal_shows_what_is_learned_in_inverse_video():
    tokens = np.frombuffer(b'ask answer! next', dtype=np.uint8)
    flags = np.array([2, 0, 0, 0] + [1] * 7 + [2] + [0] * 4, dtype=np.uint8)

    def decode(ids):
        return bytes(ids.tolist()).decode()

    assert conversations.marked_text(tokens, flags, decode, '\x1b[7m', '\x1b[0m') == 'ask \x1b[7manswer!\x1b[0m'
    long = conversations.marked_text(np.repeat(tokens[:1], 5000), np.zeros(5000, dtype=np.uint8), decode, '', '')
    assert len(long) < 700 and ' [...] ' in long


@pytest.mark.slow
def test_raw_text_for_a_model_is_followed_by_fine_tuning_it(tmp_path):
    (tmp_path / 'text.txt').write_text('some text ' * 100)
    for name, config in (('my-Qwen3', 'finetune_qwen'), ('mini', 'finetune_llama')):  # by the name alone
        folder = make_tokenizer(tmp_path / name)
        (tmp_path / name / 'config.json').write_text('{"n_positions": 8}')
        printed = prepare(tmp_path, f'--dataset={tmp_path}/text.txt', f'--tokenizer={folder}').stdout
        command = f'next: torchrun --nproc_per_node=4 train_fsdp.py config/{config}.py --init_from={folder}'
        where = f'--dataset=text-{name} --data_dir={tmp_path}/data'
        assert f'{command} {where} --block_size=8\n' in printed  # not more than the model has positions


# --- bad rows ---------------------------------------------------------------------------------------------------------


def test_bad_rows_are_left_out_and_counted_with_the_reason(tmp_path):
    folder = make_tokenizer(tmp_path / 'mistral', MISTRAL, '</s>')
    good = [{'messages': messages_of(turns)} for turns in many_chats(30)]
    turns = {
        r'template refuses \(roles must alternate user/assistant\)': [('user', 'q'), ('user', 'q'), ('assistant', 'a')],
        "role 'alien'": [('user', 'q'), ('alien', 'a')],
        'content is a number': [('user', 3), ('assistant', 'a')],
        "assistant's answer": [('user', 'q')],
    }
    bad = {reason: {'messages': messages_of(chat)} for reason, chat in turns.items()}
    bad |= {
        'messages are no list': {'messages': 'a string'},
        r'no role \(.*: content\)': {'messages': [{'content': 'a'}]},
    }
    bad |= {re.escape(chat_rows.NO_CONVERSATIONS): {'other': 'fields'}, 'no JSON objects': ['no object']}
    twice = {'messages': messages_of([('assistant', 'first')])}  # as the one that is a question alone
    rows = write_rows(tmp_path / 'rows.jsonl', [*good[:10], *bad.values(), twice, *good[10:]])
    command = f'--dataset={rows}', f'--tokenizer={folder}', '--name=some', '--val_fraction=0.2'
    result = prepare(tmp_path, *command)
    dataset = tmp_path / 'data' / 'some'
    found = conversations_of(dataset, 'train') + conversations_of(dataset, 'val')
    n_answers = sum(role == 'assistant' for turns in many_chats(30) for role, _ in turns)
    assert sum(len(parts) for _, parts in found) == n_answers
    notes = '\n'.join(meta_of(dataset)['source']['notes'])
    for reason in bad:
        times = 2 if reason == "assistant's answer" else 1
        assert re.search(rf'{rows}: rows .*{reason}.* \({times}\)', result.stdout), reason
        assert re.search(f'^{rows}: rows .*{reason}', notes, re.MULTILINE), reason
    warning = r"WARNING: 9 of 39 rows \(23%\) .*assistant's answer \(2\); "
    assert re.search(warning, result.stdout) and meta_of(dataset)['rows_kept'] == 30
    again = prepare(tmp_path, *command).stdout
    assert 'nothing to do' in again and re.search(warning, again)


@pytest.mark.slow
def test_few_bad_rows_are_no_warning(chatml, tmp_path):
    rows = [{'messages': messages_of(turns)} for turns in many_chats(38)]
    rows = write_rows(tmp_path / 'rows.jsonl', [*rows, {'messages': 1}, {'messages': 2}])
    result = prepare(tmp_path, f'--dataset={rows}', f'--tokenizer={chatml}')
    assert re.search(r'messages .*no list.* \(2\)', result.stdout) and 'WARNING' not in result.stdout
    assert result.stdout.count('noisy') == 1  # of the validation split


def test_conversations_that_no_template_can_write_get_one_line_with_the_way_out(chatml, tmp_path):
    rows = write_rows(tmp_path / 'rows.jsonl', [{'messages': messages_of(turns)} for turns in many_chats(9)])
    broken = make_tokenizer(tmp_path / 'broken', '{% for message in %}')
    (tmp_path / 'mine.jinja').write_text('{% for message in %}')
    for keys, says in (
        (['--tokenizer=bpe'], 'tokenizer=bpe .*--tokenizer=out/RUN .*--text_field'),
        (['--tokenizer=models/typo'], 'models/typo: there is no such folder'),
        ([f'--tokenizer={broken}'], 'chat template cannot'),
        ([f'--tokenizer={chatml}', f'--chat_template={tmp_path}/none.jinja'], 'none.jinja'),
        ([f'--tokenizer={chatml}', f'--chat_template={tmp_path}/mine.jinja'], 'chat template cannot'),
    ):
        assert re.search(says, error_of(tmp_path, f'--dataset={rows}', *keys)), keys
    assert not (tmp_path / 'data').exists()


def test_conversations_get_a_default_template_where_the_tokenizer_has_none(tmp_path):
    """What is learned stands in 【 】. A text that spells a control token stays a text."""
    turns = [('system', 'Be kind.'), ('user', 'Hi?'), ('assistant', 'Hello <|endoftext|>.')]
    rows = write_rows(tmp_path / 'rows.jsonl', [{'messages': messages_of(turns)}] * 3)
    (tmp_path / 'text.txt').write_text('some words in a text, and more words in it\n' * 40)
    prepare(tmp_path, f'--dataset={tmp_path}/text.txt', '--name=text', '--vocab_size=280')  # a BPE that reserves turns
    letters = 'Be kind.\n\nUser: Hi?\n\nAssistant:【 Hello <|endoftext|>.<|endoftext|>】'
    chatml = '<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n【Hello <|endoftext|>.<|im_end|>】'
    for tokenizer, said, expected in (
        ('bytes', 'turns in letters', letters),
        (make_tokenizer(tmp_path / 'plain', eos='<s>'), 'ChatML', chatml),  # whose turns it has
        (tmp_path / 'data' / 'text', 'ChatML', chatml),
    ):
        keys = f'--dataset={rows}', f'--name={Path(tokenizer).name}-chats', f'--tokenizer={tokenizer}'
        printed = prepare(tmp_path, *keys, '--val_fraction=0').stdout
        assert f'{tokenizer} has no chat template: conversations are written as {said}' in printed
        assert expected in printed, printed
        dataset = tmp_path / 'data' / f'{Path(tokenizer).name}-chats'
        (template,) = meta_of(dataset)['chat_templates'].values()
        eot = tokenizers.tokenizer_of(dataset).eot
        assert (tokens_of(dataset, 'train') == eot).sum() == (3 if tokenizer == 'bytes' else 0)  # not of the text
        # the same template, from a file
        (tmp_path / 'mine.jinja').write_text(template)
        again = keys[0], f'--name={dataset.name}-again', keys[2], f'--chat_template={tmp_path}/mine.jinja'
        prepare(tmp_path, *again, '--val_fraction=0')
        again = dataset.with_name(f'{dataset.name}-again')
        assert np.array_equal(tokens_of(again, 'train'), tokens_of(dataset, 'train'))


def test_rows_all_of_which_are_bad_end_in_one_line_with_the_reasons(chatml, tmp_path):
    bad = [{'messages': messages_of([('user', str(n))])} for n in range(9)]
    bad += [{'messages': [{'role': 'user', 'text': 'q'}, {'role': 'assistant', 'text': 'a'}]}] * 3
    rows = write_rows(tmp_path / 'rows.jsonl', bad)
    for more in ([], ['--val_fraction=0']):
        error = error_of(tmp_path, f'--dataset={rows}', f'--tokenizer={chatml}', *more)
        assert re.search(r"all 12 rows .*assistant's .*\(9\); .*no content .*: role, text\): rename .*\(3\); ", error)
        assert '--text_field=FIELD' in error and 'split' not in error
    refuses = make_tokenizer(tmp_path / 'refuses', "{{ raise_exception('never') }}")
    rows = write_rows(tmp_path / 'good.jsonl', ({'messages': messages_of(turns)} for turns in many_chats(9)))
    error = error_of(tmp_path, f'--dataset={rows}', f'--tokenizer={refuses}')
    assert re.search(r'all 9 rows .*template .*\(never', error) and 'split' not in error


@pytest.mark.slow
def test_system_messages_that_a_template_refuses_can_become_part_of_the_users(tmp_path):
    refusal = "{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}"
    folder = make_tokenizer(tmp_path / 'gemma', refusal + CHATML)
    rows = write_rows(tmp_path / 'rows.jsonl', ({'messages': messages_of(turns)} for turns in many_chats(30)))
    arguments = [f'--dataset={rows}', f'--tokenizer={folder}', '--val_fraction=0.2']
    (tmp_path / 'gemma' / 'config.json').write_text('{"max_position_embeddings": 3000}')
    refused = prepare(tmp_path, *arguments, '--name=refused').stdout
    assert refused.endswith(' --block_size=2048\n')  # of config/sft_chat.py, for which there are positions
    assert 'WARNING: 10 of 30 rows (33%) ' in refused
    assert '(System role not supported; --fold_system ' in refused
    assert 'WARNING' not in prepare(tmp_path, *arguments, '--name=folded', '--fold_system').stdout
    found = [text for split in ('train', 'val') for text, _ in conversations_of(tmp_path / 'data' / 'folded', split)]
    assert len(found) == 30
    assert sum(text.startswith('<|im_start|>user\nBe kind.\n\nquestion ') for text in found) == 10
    for command, says in (
        ([*arguments, '--name=refused', '--fold_system'], 'fold_system=None, .* True'),
        (['--tokenizer=bytes', '--fold_system'], 'fold_system=True '),
        (['--tokenizer=bytes', '--train_on_input'], 'train_on_input=True is for conversations'),
        ([*arguments, '--pairs', '--train_on_input'], 'pairs=True with train_on_input: '),
    ):
        assert re.search(says, error_of(tmp_path, *command)), command


def test_the_validation_split_is_drawn_among_the_conversations_that_the_template_can_write(tmp_path):
    """Of 1% of 60 rows, whichever the hash takes: most of them cannot be written."""
    refusing = "{%- if messages[0].role == 'system' %}{{ raise_exception('no system') }}{%- endif %}" + CHATML
    folder = make_tokenizer(tmp_path / 'refusing', refusing)
    turns = [[('user', f'question {number}'), ('assistant', f'answer {number}')] for number in range(60)]
    turns = [[('system', 'Be kind.'), *chat] if number % 20 else chat for number, chat in enumerate(turns)]
    rows = write_rows(tmp_path / 'rows.jsonl', [{'messages': messages_of(chat)} for chat in turns])
    prepare(tmp_path, f'--dataset={rows}', f'--tokenizer={folder}', '--max_left_out=1', '--name=few')
    found = {split: len(conversations_of(tmp_path / 'data' / 'few', split)) for split in ('train', 'val')}
    assert found == {'train': 2, 'val': 1}


@pytest.mark.slow
def test_chat_can_be_forced_and_a_text_field_beside_messages_wins(chatml, tmp_path):
    both = [{'text': f'text {number}', 'messages': messages_of(turns)} for number, turns in enumerate(many_chats(9))]
    rows = write_rows(tmp_path / 'both.jsonl', both)
    result = prepare(tmp_path, f'--dataset={rows}', f'--tokenizer={chatml}', '--name=text', '--val_fraction=0')
    assert '--chat=True' in result.stdout
    assert documents_of(tmp_path / 'data' / 'text', 'train') == [f'text {number}' for number in range(9)]
    prepare(tmp_path, f'--dataset={rows}', f'--tokenizer={chatml}', '--name=chat', '--chat', '--val_fraction=0')
    assert len(conversations_of(tmp_path / 'data' / 'chat', 'train')) == 9
    error = error_of(tmp_path, f'--dataset={rows}', f'--tokenizer={chatml}', '--chat', '--text_field=text')
    assert 'leave out --text_field=text' in error
    plain = write_rows(tmp_path / 'plain.jsonl', [{'body': 'x', 'id': 1}])
    error = error_of(tmp_path, f'--dataset={plain}', f'--tokenizer={chatml}', '--chat')
    assert f'{chat_rows.NO_CONVERSATIONS}; it has: body, id' in error


@pytest.mark.slow
def test_another_chat_template_is_another_setting(chatml, tmp_path):
    rows = write_rows(tmp_path / 'rows.jsonl', [{'messages': messages_of(turns)} for turns in many_chats(9)])
    other = make_tokenizer(tmp_path / 'chatml', CHATML.replace('\\n', '\\n\\n'))
    prepare(tmp_path, f'--dataset={rows}', f'--tokenizer={chatml}', '--name=one')
    assert 'chat_template=' in error_of(tmp_path, f'--dataset={rows}', f'--tokenizer={other}', '--name=one')


# --- folder trees -----------------------------------------------------------------------------------------------------


TREE = {  # a file: (its content, the texts in it, what a line says of it)
    'notes.md': ('# markdown', ['# markdown'], None),
    'a/one.json': ('{"title": "T", "parts": [{"x": "P"}, null]}', [], "has no field 'text'"),
    'a/list.json': ('["first", {"k": ["second"]}, 7]', [], "has no field 'text'"),
    'a/two.yaml': ('k: [v1, {deep: v2}]\n---\n- el1\n- {x: el2, date: 2024-01-01}\n', ['v1\nv2', 'el1', 'el2'], None),
    'a/alias.yml': ('base: &b {t: once}\nagain: *b\nloop: &l [self, *l]\n', ['once\nself'], None),
    'a/deep/rows.ndjson': (
        '{"text": "its text", "z": "no"}\n{"a": "A"}\n',
        ['its text'],
        'rows without text, left out',
    ),
    'a/deep/rows.parquet': (pyarrow.table({'text': ['parquet row']}), ['parquet row'], None),
    'a/x.arrow': (pyarrow.table({'text': ['arrow row']}), ['arrow row'], None),
    'binary.bin': ('\x7fELF\0\0\0', [], 'binary'),
    'broken.json': ('{"text": "never closed', [], 'not JSON'),
    'broken.yaml': ('a: [never, closed\nb: "', [], 'not YAML'),
    'custom.yaml': ('Ref: !Ref thing\n', [], 'not YAML'),
}


def test_a_tree_of_every_kind_is_read_and_what_is_broken_is_named(tmp_path):
    (tmp_path / 'a' / 'deep').mkdir(parents=True)
    for name, (content, _, _) in TREE.items():
        if name.endswith('.parquet'):
            pyarrow.parquet.write_table(content, tmp_path / name)
        elif name.endswith('.arrow'):
            write_stream(tmp_path / name, content)
        else:
            (tmp_path / name).write_text(content)
    documents, notes, source = read_here(tmp_path)
    assert sorted(documents) == sorted(text for _, texts, _ in TREE.values() for text in texts)
    lines = [*notes, *source.skipped]
    for name, (_, _, says) in TREE.items():
        of_file = [line for line in lines if line.startswith(f'{tmp_path}/{name}: ')]
        assert len(of_file) == (says is not None) and (says is None or says in of_file[0]), (name, lines)


@pytest.mark.slow
def test_a_folder_with_conversations_leaves_out_what_has_no_rows(chatml, tmp_path):
    folder = tmp_path / 'mixed'
    folder.mkdir()
    (folder / 'README.md').write_text('about this dataset')
    (folder / 'a_config.json').write_text('{"some": "settings"}')
    write_rows(folder / 'chats.jsonl', [{'prompt': f'question {n}', 'completion': f'answer {n}'} for n in range(20)])
    result = prepare(tmp_path, f'--dataset={folder}', f'--tokenizer={chatml}', '--name=mixed')
    assert f'left out: {folder}/README.md: no conversations' in result.stdout
    assert f'left out: {folder}/a_config.json: no conversations' in result.stdout
    found = [part for split in ('train', 'val') for part in conversations_of(tmp_path / 'data' / 'mixed', split)]
    assert sorted(parts for _, parts in found) == sorted([f'answer {n}<|im_end|>'] for n in range(20))


def test_without_pyyaml_yaml_files_are_left_out_in_one_line(tmp_path):
    (tmp_path / 'tree').mkdir()
    (tmp_path / 'tree' / 'a.yaml').write_text('a: b')
    (tmp_path / 'tree' / 'b.txt').write_text('text')
    code = f"""
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == 'yaml' else find(name, *rest)
from text import sources
print(sources.find_source({str(tmp_path / 'tree')!r}).skipped)"""
    result = subprocess.run([sys.executable, '-c', code], cwd=REPO, env=environment(), capture_output=True, text=True)
    assert re.search('a.yaml: .*pip install pyyaml', result.stdout), result.stderr
