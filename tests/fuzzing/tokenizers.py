"""
Folders with a tokenizer whose files disagree or are damaged, read through text/tokenizer.py and text/conversations.py.

The reference is AutoTokenizer, and tokenizer.json alone if that fails.
"""

import json

from dataset.shards import LEARNED
from fuzzing.cases import NOT_JSON, Words, check, draw_text, small_tokenizer, some
from fuzzing.templates import TEMPLATES
from text import chat_rows, conversations, encoding
from text import tokenizer as tokenizing
from text.language import TransformersLanguage

TOKENIZERS = ('gpt2', 'llama3', 'nfc', 'llama2', 'unigram', 'wordpiece', 'lines')
CLASSES = ['PreTrainedTokenizerFast', 'TokenizersBackend', 'GPT2Tokenizer', 'GPT2TokenizerFast', 'LlamaTokenizer']
CLASSES += ['LlamaTokenizerFast', 'Qwen2Tokenizer', 'GemmaTokenizer', 'BertTokenizer', 'CodeLlamaTokenizer', 'Unknown']


def draw_tokenizer_folder(draw, folder):
    """Write a folder with a tokenizer whose files may disagree or lack something."""
    from tokenizers import AddedToken, Tokenizer, processors

    kind = draw.choice(TOKENIZERS)
    tokenizer = Tokenizer.from_str(small_tokenizer(kind))
    more = draw.sample(['<pad>', '<think>', '[X]', 'tide', ' two'], 2)
    for name in ('<|endoftext|>', '<s>', '</s>', '<|im_start|>', '<|im_end|>', *more):
        flags = {flag: some(draw, 0.1) for flag in ('lstrip', 'rstrip', 'single_word', 'normalized')}
        token = AddedToken(name, special=name[0] == '<' and some(draw, 0.9), **flags)
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    bos, eos = draw.choice(['<s>', '<|endoftext|>']), draw.choice(['</s>', '<|endoftext|>', '<|im_end|>'])
    if some(draw, 0.3):
        with_bos = (f'{bos} $A', f'{bos} $A {bos} $B', [(bos, tokenizer.token_to_id(bos))])
        tokenizer.post_processor = processors.TemplateProcessing(*with_bos)
    elif some(draw, 0.3):
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=some(draw, 0.5))
    if some(draw, 0.1):
        tokenizer.enable_truncation(5)
        tokenizer.enable_padding(length=9)
    tokenizer.save(f'{folder}/tokenizer.json')
    end = tokenizer.token_to_id(eos)
    forms = [eos, eos, eos, {'content': eos, '__type': 'AddedToken', 'lstrip': False}, None, 'not there', [eos], 7]
    about = {'eos_token': draw.choice(forms), 'bos_token': draw.choice([bos, bos, None])}
    about['tokenizer_class'] = draw.choice([*CLASSES[:2] * 4, *CLASSES, None])
    if some(draw, 0.15):
        number = tokenizer.get_vocab_size() + draw.choice([0, 0, 5, -3])
        token = {'content': draw.choice(['<new>', 'time', '<s>']), 'special': some(draw, 0.7)}
        about['added_tokens_decoder'] = {str(number): token}
    for name in ('add_bos_token', 'add_prefix_space', 'legacy', 'clean_up_tokenization_spaces', 'do_lower_case'):
        if some(draw, 0.1):
            about[name] = some(draw, 0.5)
    template = TEMPLATES[draw.choice(['chatml', 'tools', 'no end of turn'])][0]
    form = draw.randrange(7)
    if form < 3:
        about['chat_template'] = template
    elif form == 3:
        about['chat_template'] = [{'name': 'default', 'template': template}, {'name': 'tool_use', 'template': template}]
    elif form == 4:
        (folder / 'chat_template.jinja').write_text(template)
    elif form == 5:
        about['chat_template'] = draw.choice(['{% if %}', '{{ x', 5, [], [{'name': 'a'}], {'default': template}, ''])
    files = {'tokenizer_config': {key: value for key, value in about.items() if value is not None}}
    if some(draw, 0.2):
        files['config'] = {'model_type': draw.choice(['llama', 'gpt2', 'qwen2', 'x'])}
        files['config']['eos_token_id'] = draw.choice([end, [end], 9999, '2'])
    if some(draw, 0.2):
        files['generation_config'] = {'eos_token_id': draw.choice([end, [end, 0], [], None, -1])}
    if some(draw, 0.2):
        files['special_tokens_map'] = {'eos_token': draw.choice(['</s>', {'content': '</s>'}])}
    for name, content in files.items():
        (folder / f'{name}.json').write_text(json.dumps(content))
    if some(draw, 0.2):
        path = folder / draw.choice(['tokenizer.json', 'tokenizer.json', *(path.name for path in folder.iterdir())])
        harm = draw.randrange(4)
        text = path.read_text()
        if harm == 0:
            path.unlink()
        elif harm == 1:
            path.write_text(text[: draw.randrange(len(text) or 1)])
        else:
            path.write_text(draw.choice(NOT_JSON))
    return kind


def check_tokenizer(draw, folder):
    """Check a case: the folder of a tokenizer."""
    import transformers
    from tokenizers import Tokenizer

    transformers.logging.set_verbosity_error()
    draw_tokenizer_folder(draw, folder)
    tokenizing.describe(str(folder), None)
    ours = tokenizing.load_tokenizer(str(folder))
    encoding.compare_with_transformers(str(folder))
    word = Words()
    texts = [draw_text(draw, word()) for _ in range(4)]
    raw = Tokenizer.from_file(f'{folder}/tokenizer.json')
    raw.no_truncation()
    raw.no_padding()
    spelled = [token.content for token in raw.get_added_tokens_decoder().values() if token.special]
    texts = [text.encode('utf-8', 'replace').decode() for text in texts if not any(token in text for token in spelled)]
    try:
        theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
        theirs.encode('a')
    except Exception:
        theirs = None  # then only tokenizer.json is left
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        expected = raw.encode(text, add_special_tokens=False).ids
        is_same = ids.tolist() == ours.encode(text) == expected
        check(is_same, 'other ids than those of tokenizer.json', text, ids, expected)
        check(ours.decode(ids) == raw.decode(expected, skip_special_tokens=False), 'other text', text, ours.decode(ids))
        check(max(expected, default=0) < ours.vocab_size, 'an id beyond the vocabulary', expected, ours.vocab_size)
        if theirs is not None:
            expected = theirs.encode(text, add_special_tokens=False)
            values = type(theirs).__name__, text, ids.tolist(), expected
            check(ids.tolist() == expected, "other ids than AutoTokenizer's", *values)
    unknown = raw.encode('\U0010ffff', add_special_tokens=False).ids  # letters that no word has
    for token in spelled:
        ids = ours.encode(f'a {token} b{token}')
        check(raw.token_to_id(token) in unknown or raw.token_to_id(token) not in ids, 'a special token of a text', ids)
    if theirs is not None and theirs.eos_token_id is not None:
        check(ours.eot == theirs.eos_token_id, 'another end of text', ours.eot, theirs.eos_token_id)
    if conversations.template_of(str(folder)):
        check_chat_of_tokenizer(draw, folder, ours, theirs)


def check_chat_of_tokenizer(draw, folder, ours, theirs):
    encoder = conversations.ChatEncoder(str(folder), ours.eot)
    added = ours.tokenizer.get_added_tokens_decoder() if theirs is None else theirs.added_tokens_decoder
    specials = {number for number, token in added.items() if token.special}
    answer, counts = draw.choice(['w2x', ' w2x\n"so"', '\nw2x']), []
    for spelled in ('w3x', draw.choice(['<|im_end|>', '<|im_start|>', '<s>', '</s>', '<|endoftext|>'])):
        messages = [{'role': 'user', 'content': f'time {spelled} w1x'}]
        messages.append({'role': 'assistant', 'content': f'{answer} {spelled} w4x'})
        try:
            examples = list(encoder.examples(chat_rows.conversation_of({'messages': messages})))
            asked = theirs and TransformersLanguage(theirs, folder).prompt_of_chat({'messages': messages[:1]}).ids
        except ValueError:
            return  # a template may refuse this conversation, in one line
        ids, flags, text = examples[-1]
        n_asked, ids = int((flags & LEARNED).argmax()), ids.tolist()
        counts.append([sum(number in specials for number in some) for some in (ids, asked or [])])
        check(asked is None or ids[:n_asked] == asked, 'other ids before an answer', messages, ids[:n_asked], asked)
        if theirs is None or spelled != 'w3x':
            continue
        prompt = theirs.apply_chat_template(messages[:1], add_generation_prompt=True)['input_ids']
        check(asked == prompt, 'other ids of a prompt', messages, asked, prompt)
        expected = theirs.apply_chat_template(messages, tokenize=False).rstrip()
        check(text == expected, 'another chat', text, expected)
        expected = theirs.encode(expected, add_special_tokens=False)
        if expected[:n_asked] == prompt:
            check(ids in (expected, [*expected, ours.eot]), 'other ids of a chat', expected, ids)
    check(counts[0] == counts[1], 'a text became a control token', messages, counts)
