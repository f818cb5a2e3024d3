"""prepare_data.py from the command line: what it reads, the shards that it writes, kills, and bad input."""

import collections
import fcntl
import gzip
import hashlib
import http.server
import json
import os
import pty
import random
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
import tiktoken
from faults import children_of, is_alive, wait_until
from launch import REPO, environment, refusals, run_script
from prepared import (
    CACHE,
    contents,
    documents_of,
    error_of,
    make_texts,
    meta_of,
    needs_gpt2,
    prepare,
    read_here,
    start_and_kill_at,
    tokens_of,
    write_stream,
)

import data
from system.files import sha256_of
from text import documents as reading
from text import encoding, sources
from text import tokenizer as tokenizers

# --- what a new user does ---------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def stdlib(tmp_path_factory):
    """(folder, what was printed) of `python prepare_data.py`."""
    folder = tmp_path_factory.mktemp('stdlib')
    return folder / 'data' / 'stdlib-bpe2048', prepare(folder).stdout


def test_the_default_dataset_is_the_standard_library_with_a_bpe_of_its_own(stdlib):
    dataset, printed = stdlib
    meta = meta_of(dataset)
    files = sources.stdlib_files(Path(os.__file__).parent)
    texts = {path.read_text(encoding='utf-8') for path in files if path.stat().st_size}
    train, val = documents_of(dataset, 'train'), documents_of(dataset, 'val')
    assert set(train) | set(val) == texts and not set(train) & set(val)
    assert meta['source']['sha256'] in printed
    turns = ['<|im_start|>', '<|im_end|>']
    sizes = {'asked_vocab_size': 2048, 'vocab_size': 2048, 'eot_token': 0}
    assert meta['tokenizer'] == {'name': 'bpe', 'turns': turns, **sizes}
    assert 0.05 < len(val) / len(texts) < 0.2
    assert 'tests' not in {part for path in files for part in path.parts} and len(files) > 300


def test_the_end_says_what_was_made_and_what_to_type_next(stdlib):
    dataset, printed = stdlib
    meta = meta_of(dataset)
    for split in ('train', 'val'):
        assert f'{split:5}  {meta["splits"][split]["tokens"]:,} tokens' in printed
    assert 'MB/s' in printed and 'M tokens/s' in printed
    keys = f'--dataset=stdlib-bpe2048 --data_dir={dataset.parent} --out_dir=out/stdlib-bpe2048'
    assert f'{dataset}\nnext: python train_ddp.py config/quickstart.py {keys}' in printed
    files = ['meta.json', 'token_bytes.npy', 'tokenizer.json', 'train_000000.bin', 'val_000000.bin']
    assert sorted(path.name for path in dataset.iterdir()) == files


def test_the_same_command_again_has_nothing_to_do(stdlib):
    dataset, _ = stdlib
    before = contents(dataset)
    result = prepare(dataset.parent.parent)
    assert 'nothing to do' in result.stdout and contents(dataset) == before


def test_training_opens_what_was_prepared(stdlib):
    dataset, _ = stdlib
    for split in ('train', 'val'):
        opened = data.open_dataset(dataset.parent, dataset.name, split, block_size=256)
        totals = meta_of(dataset)['splits'][split]
        assert (opened.n_tokens, opened.vocab_size) == (totals['tokens'], 2048)
        counts, tokenizer = np.bincount(tokens_of(dataset, split)), tokenizers.tokenizer_of(dataset)
        assert counts @ tokenizer.count_bytes(range(len(counts))) == totals['bytes']


def test_synthetic_needs_nothing(tmp_path):
    result = prepare(tmp_path, '--dataset=synthetic')
    assert 'next: python train_ddp.py --dataset=synthetic' in result.stdout
    assert not list(tmp_path.iterdir())


# --- bytes out --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def text_folder(tmp_path_factory):
    """3 MB in 300 files, one of them with 2 MB: several units of work, and documents that begin and end inside them."""
    folder = tmp_path_factory.mktemp('texts')
    for number, text in enumerate(make_texts(300, words=500)):
        (folder / f'{number:03}.txt').write_text(text, encoding='utf-8')
    (folder / '100_long.txt').write_text('\n'.join(make_texts(100, words=4000, seed=1)), encoding='utf-8')
    return folder


def test_shards_are_full_but_for_the_last(text_folder, tmp_path):
    result = prepare(tmp_path, f'--dataset={text_folder}', '--tokenizer=bytes', '--shard_tokens=300000', '--name=full')
    assert result.stderr == ''  # no bar where there is no terminal
    dataset = tmp_path / 'data' / 'full'
    shards = meta_of(dataset)['splits']['train']['shards']
    assert len(shards) > 5 and {shard['tokens'] for shard in shards[:-1]} == {300000}
    assert [shard['file'] for shard in shards] == [f'train_{number:06}.bin' for number in range(len(shards))]
    texts = [path.read_text(encoding='utf-8') for path in sorted(text_folder.iterdir())]
    both = documents_of(dataset, 'train') + documents_of(dataset, 'val')
    assert sorted(both) == sorted(texts)


def test_text_jsonl_parquet_and_saved_datasets_give_the_same_tokens(tmp_path):
    texts = make_texts(700)
    (tmp_path / 'text').mkdir()
    for number, text in enumerate(texts):
        (tmp_path / 'text' / f'{number:04}').write_text(text, encoding='utf-8')
    rows = [{'id': number, 'body': text} for number, text in enumerate(texts)]
    (tmp_path / 'lines.jsonl').write_text('\n'.join(map(json.dumps, rows)) + '\n')
    (tmp_path / 'folder').mkdir()
    for part, name in enumerate('abc'):
        table = pyarrow.Table.from_pylist(rows[part * 250 : (part + 1) * 250])
        pyarrow.parquet.write_table(table, tmp_path / 'folder' / f'{name}.parquet', row_group_size=100)
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / 'saved', num_shards=2)
    datasets.DatasetDict({'train': datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / 'saved_splits')
    for source in ('lines.jsonl', 'folder', 'saved', 'saved_splits'):
        assert read_here(tmp_path / source, 'body')[0] == texts, source
    found = []
    for source in ('text', 'saved_splits'):
        keys = ('--text_field=body', '--tokenizer=bytes', '--val_fraction=0.1')
        prepare(tmp_path, f'--dataset={tmp_path / source}', *keys)
        found.append([documents_of(tmp_path / 'data' / f'{source}-bytes', split) for split in ('train', 'val')])
    assert found[0] == found[1] and sorted(found[0][0] + found[0][1]) == sorted(texts)


@needs_gpt2
def test_gpt2_tokens_are_tiktokens_of_the_whole_document(text_folder, tmp_path, monkeypatch):
    prepare(tmp_path, f'--dataset={text_folder}', '--tokenizer=gpt2', '--val_fraction=0')
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(CACHE))
    encoding = tiktoken.get_encoding('gpt2')
    expected = []
    for path in sorted(text_folder.iterdir()):
        expected += encoding.encode_ordinary(path.read_text(encoding='utf-8')) + [50256]
    dataset = tmp_path / 'data' / f'{text_folder.name}-gpt2'
    assert meta_of(dataset)['dtype'] == 'uint16' and list(meta_of(dataset)['splits']) == ['train']
    assert tokens_of(dataset, 'train').tolist() == expected


@needs_gpt2
def test_a_document_that_tiktoken_cannot_encode_in_one_go_is_no_problem(tmp_path, monkeypatch):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(CACHE))
    (tmp_path / 'spaces.txt').write_text('a' + ' ' * 2_000_000 + 'b' * 200_000)
    prepare(tmp_path, f'--dataset={tmp_path}/spaces.txt', '--tokenizer=gpt2', '--val_fraction=0')
    assert documents_of(tmp_path / 'data' / 'spaces-gpt2', 'train') == [(tmp_path / 'spaces.txt').read_text()]


def test_cutting_a_long_text_leaves_it_whole_and_its_words_too():
    for text in [*make_texts(5, words=5000), '中' * 9000, 'x' * 9000, '\n' * 9000, ' ' * 9000, '🙂 ' * 3000]:
        pieces = list(reading.cut_up(text.encode(), 1000))
        assert b''.join(pieces) == text.encode() and all(0 < len(piece) <= 1000 for piece in pieces)
        for piece in pieces:
            piece.decode()
    assert list(reading.cut_up(b'one two three', 9)) == [b'one two', b' three']
    assert list(reading.cut_up(b'\xff\x80' * 600, 1000))  # it also ends if nothing is UTF-8


@pytest.mark.slow
def test_large_vocabularies_get_uint32(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path / 'large'
    folder.mkdir()
    words = {f'w{number}': number for number in range(70_000)} | {'[eot]': 70_000, '[unknown]': 70_001}
    words = Tokenizer(models.WordLevel(words, unk_token='[unknown]'))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / 'tokenizer.json'))
    (folder / 'tokenizer_config.json').write_text('{"eos_token": "[eot]"}')
    (tmp_path / 'words.txt').write_text('w1 w69999 w65536')
    prepare(tmp_path, f'--dataset={tmp_path}/words.txt', f'--tokenizer={folder}', '--val_fraction=0')
    dataset = tmp_path / 'data' / 'words-large'
    assert meta_of(dataset)['dtype'] == 'uint32'
    assert tokens_of(dataset, 'train').tolist() == [1, 69_999, 65_536, 70_000]
    assert tokenizers.tokenizer_of(dataset).vocab_size == 70_002  # from its own copy of tokenizer.json


# --- validation split -------------------------------------------------------------------------------------------------


def test_one_text_file_is_cut_where_nanogpt_cuts(tmp_path):
    text = '\n'.join(make_texts(30)).encode('ascii', 'ignore')
    (tmp_path / 'input.txt').write_bytes(text)
    prepare(tmp_path, f'--dataset={tmp_path}/input.txt', '--tokenizer=bytes')
    cut = int(len(text) * 0.9)
    dataset = tmp_path / 'data' / 'input-bytes'
    assert tokens_of(dataset, 'train').tolist() == [*text[:cut], 256]
    assert tokens_of(dataset, 'val').tolist() == [*text[cut:], 256]
    assert meta_of(dataset)['val_rule'] == 'the last 10.000000% of the bytes of the text'


def test_the_tail_begins_with_a_whole_character(tmp_path):
    (tmp_path / 'input.txt').write_text('🙂' * 1001, encoding='utf-8')
    prepare(tmp_path, f'--dataset={tmp_path}/input.txt', '--tokenizer=bytes', '--val_fraction=0.3')
    dataset = tmp_path / 'data' / 'input-bytes'
    assert documents_of(dataset, 'train') == ['🙂' * 701] and documents_of(dataset, 'val') == ['🙂' * 300]


def test_a_folder_of_one_text_file_is_that_file(tmp_path):
    folder = tmp_path / 'notes'
    folder.mkdir()
    (folder / 'all.txt').write_text('\n'.join(make_texts(200)), encoding='utf-8')
    (folder / '.DS_Store').write_bytes(b'\0')
    made = []
    for source, name in ((folder, 'notes-bytes'), (folder / 'all.txt', 'all-bytes')):
        prepare(tmp_path, f'--dataset={source}', '--tokenizer=bytes')
        made.append([tokens_of(tmp_path / 'data' / name, split).tolist() for split in ('train', 'val')])
    assert made[0] == made[1] and made[0][1]
    (folder / 'picture.png').write_bytes(b'\x89PNG\r\n\0')  # beside another one it is one document of some
    said = error_of(tmp_path, f'--dataset={folder}', '--tokenizer=bytes', '--name=two')
    assert 'give a text file by itself, as --dataset=FILE, of which the end is held out' in said


def test_meta_json_tells_how_to_find_the_validation_documents(text_folder, tmp_path):
    prepare(tmp_path, f'--dataset={text_folder}', '--tokenizer=bytes', '--val_fraction=0.2', '--seed=5', '--name=split')
    dataset = tmp_path / 'data' / 'split'
    meta = meta_of(dataset)
    first, end = meta['val_hashes']
    assert f'from {first / 2**64:.6f} to below {end / 2**64:.6f} * 2^64' in meta['val_rule']
    assert 'salt=5' in meta['val_rule'] and 'first 65,536 bytes' in meta['val_rule']
    expected = []
    for path in sorted(text_folder.iterdir()):
        start = path.read_bytes()[:65536]
        digest = hashlib.blake2b(start, digest_size=8, salt=(5).to_bytes(16, 'little')).digest()
        if first <= int.from_bytes(digest, 'little') < end:
            expected.append(path.read_text(encoding='utf-8'))
    assert documents_of(dataset, 'val') == expected
    share = meta['splits']['val']['bytes'] / sum(path.stat().st_size for path in text_folder.iterdir())
    assert 0.16 < share < 0.24


def test_of_few_documents_the_validation_split_has_about_the_share_that_was_asked_for():
    for seed in range(50):
        generator = random.Random(seed)
        sizes = {generator.randrange(2**64): int(generator.lognormvariate(8, 1.5)) + 1 for _ in range(60)}
        first, end = encoding.choose_by_size(sizes, 0.01)
        chosen = [size for number, size in sizes.items() if first <= number < end]
        assert 0.005 < sum(chosen) / sum(sizes.values()) < 0.015
    even = {number << 54: 100 for number in range(1024)}  # chance comes near enough here, so no document moves
    assert encoding.choose_by_size(even, 0.1) == (0, int(0.1 * 2**64))
    assert encoding.choose_by_size({5: 1, 7: 1000}, 0.01) == (5, 7)
    assert encoding.choose_by_size({5: 1000, 7: 1}, 0.01) == (7, 2**64)


@pytest.mark.slow
@pytest.mark.parametrize('fraction', [0.000001, 0.999999])
def test_small_corpora_have_both_splits(fraction, tmp_path):
    write_rows(tmp_path / 'three.jsonl', [f'document {number}' for number in range(3)])
    prepare(tmp_path, f'--dataset={tmp_path}/three.jsonl', '--tokenizer=bytes', f'--val_fraction={fraction}')
    dataset = tmp_path / 'data' / 'three-bytes'
    sizes = [len(documents_of(dataset, split)) for split in ('train', 'val')]
    assert sizes == ([2, 1] if fraction < 0.5 else [1, 2])


@pytest.mark.slow
def test_a_long_document_that_is_not_utf8_stays_in_one_split(tmp_path):
    folder = tmp_path / 'latin1'
    folder.mkdir()
    for number in range(4):
        words = random.Random(number).choices(['crème', 'brûlée', 'à', 'la', 'carte'], k=300_000)
        (folder / f'{number}.txt').write_bytes(' '.join(words).encode('latin-1'))
    prepare(tmp_path, f'--dataset={folder}', '--tokenizer=bytes', '--val_fraction=0.5')
    dataset = tmp_path / 'data' / 'latin1-bytes'
    both = documents_of(dataset, 'train') + documents_of(dataset, 'val')
    assert sorted(both) == sorted(path.read_bytes().decode('utf-8', 'replace') for path in folder.iterdir())


@pytest.mark.parametrize('before', [0, 1, 2, 3])
def test_all_stretches_of_a_long_document_have_its_head_wherever_that_cuts_a_character(before, tmp_path):
    path = tmp_path / 'long.txt'
    path.write_text('x' * before + '🙂' * 40_000, encoding='utf-8')
    heads = []
    for start, length in ((0, before + 80_000), (before + 80_000, 80_000)):
        piece = reading.Piece(str(path), length, None, start)
        (document,) = reading.documents_of(piece, None, collections.Counter())
        heads.append(piece.head_of(document))
    assert heads == [path.read_bytes()[:65536]] * 2


# --- compression, repeats ---------------------------------------------------------------------------------------------


def write_compressed(path, content):
    """Write bytes, compressed as the path's ending says."""
    codec = {'.gz': 'gzip', '.zst': 'zstd'}[path.suffix]
    with pyarrow.CompressedOutputStream(str(path), codec) as file:
        file.write(content)


def write_rows(path, texts):
    path.write_text('\n'.join(json.dumps({'text': text}) for text in texts))


@pytest.mark.parametrize('name, head', [('rows.jsonl.gz', ''), ('table.csv.gz', 'text\n')])
def test_a_damaged_compressed_file_is_named(name, head, tmp_path):
    lines = [json.dumps({'text': os.urandom(400).hex()}) if not head else os.urandom(99).hex() for _ in range(9000)]
    write_compressed(tmp_path / name, (head + '\n'.join(lines)).encode())
    content = bytearray((tmp_path / name).read_bytes())
    content[len(content) // 2 : len(content) // 2 + 500] = bytes(500)
    (tmp_path / name).write_bytes(content)
    line = error_of(tmp_path, f'--dataset={tmp_path / name}', '--tokenizer=bytes', '--val_fraction=0')
    assert re.search(f'{name}: damaged behind (byte|row) [0-9,]{{3,}}.*inflate', line)


@pytest.mark.slow
def test_repeated_documents_are_left_out_also_after_a_kill(tmp_path):
    texts = make_texts(1500, words=200)
    repeated = [text for number, text in enumerate(texts) for _ in range(1 + number % 3)]
    random.Random(0).shuffle(repeated)
    write_rows(tmp_path / 'once.jsonl', dict.fromkeys(repeated))
    write_rows(tmp_path / 'repeated.jsonl', repeated)
    options = ('--tokenizer=bytes', '--val_fraction=0', '--shard_tokens=100000')
    prepare(tmp_path, f'--dataset={tmp_path}/once.jsonl', *options)
    command = (f'--dataset={tmp_path}/repeated.jsonl', '--dedup', *options)
    dataset = tmp_path / 'data' / 'repeated-bytes'
    start_and_kill_at(dataset / 'train_000012.bin', tmp_path, *command)  # after the first unit
    text = prepare(tmp_path, *command).stdout
    assert 'going on behind' in text and f'the same as one before ({len(repeated) - len(texts):,})' in text
    assert documents_of(dataset, 'train') == documents_of(tmp_path / 'data' / 'once-bytes', 'train')
    assert not list(dataset.glob('*.partial'))


@pytest.mark.slow
def test_repeated_text_files_are_left_out_and_named(tmp_path):
    (tmp_path / 'text').mkdir()
    for name, text in {'a': 'one ' * 10**6, 'b': 'one ' * 10**6, 'c': 'two ' * 10**6, 'd': 'three'}.items():
        (tmp_path / 'text' / f'{name}.txt').write_text(text)
    text = prepare(tmp_path, f'--dataset={tmp_path}/text', '--dedup', '--tokenizer=bytes', '--val_fraction=0').stdout
    assert f'left out: {tmp_path}/text/b.txt: the same as {tmp_path}/text/a.txt' in text
    assert meta_of(tmp_path / 'data' / 'text-bytes')['splits']['train']['documents'] == 3


def test_reading_ends_when_there_are_enough_tokens(tmp_path):
    texts = make_texts(6000, words=200)
    write_rows(tmp_path / 'rows.jsonl', texts)
    command = (f'--dataset={tmp_path}/rows.jsonl', '--tokenizer=bytes', '--max_tokens=600000', '--val_fraction=0.1')
    prepare(tmp_path, *command)
    dataset = tmp_path / 'data' / 'rows-bytes'
    n_tokens = meta_of(dataset)['splits']['train']['tokens']
    assert 600_000 <= n_tokens < 600_000 + reading.UNIT_BYTES < sum(map(len, texts))
    assert set(documents_of(dataset, 'train')) <= set(texts)
    assert re.search('max_tokens=600000, .* None', error_of(tmp_path, *command[:2], '--val_fraction=0.1'))


def test_peek_prints_windows_with_source_and_borders(tmp_path):
    for name, word in (('one', 'uno'), ('two', 'dos')):
        write_rows(tmp_path / f'{name}.jsonl', [f'{word} ' * 30 + str(number) for number in range(200)])
        prepare(tmp_path, f'--dataset={tmp_path}/{name}.jsonl', '--tokenizer=bytes', f'--name={name}')
    length, *parts = prepare(tmp_path, '--peek=one:0.5,two:0.5').stdout.split('--- ')
    assert length == 'windows of 256 tokens; those of a run have its --block_size\n'
    assert len(parts) == 8 and sum(part.startswith('one, window ') for part in parts) == 4
    for part in parts:
        head, body = part.split(':\n', 1)
        assert ('uno' in body) == head.startswith('one') and ('dos' in body) == head.startswith('two')
        assert ', 2 documents end in it' in head  # of 122 to 124 tokens each, in a window of 256
        assert body.count('【end of document】') == 2
    assert 'did you mean two' in error_of(tmp_path, '--peek=one,twoo')


# --- what real files are ----------------------------------------------------------------------------------------------


def test_a_table_among_files_is_left_out_if_it_has_no_such_field(tmp_path):
    """How tables are read is compared with csv in tests/fuzzing/files.py."""
    (tmp_path / 'a.csv').write_bytes('\ufefftext,id\n"one, ""two""\nlines",1\n\nplain,2\nshort\n'.encode())
    (tmp_path / 'b.tsv').write_text('body\tn\nx, y\t1\n')
    documents, notes, source = read_here(tmp_path)
    assert documents == ['one, "two"\nlines', 'plain'] and notes.total() == 1
    assert "b.tsv: has no field 'text'" in source.skipped[0]
    assert read_here(tmp_path / 'b.tsv', 'body')[0] == ['x, y']
    (tmp_path / 'c.csv').write_text('\n')
    with pytest.raises(ValueError, match='a table without a header'):
        read_here(tmp_path / 'c.csv')


ODD_NAMES = [{'title': 'T', 'article-body': f'body {n}', 'a b': n, 'd.e': 'dots'} for n in range(3)]


def test_a_template_takes_fields_of_any_name_and_leaves_no_braces(tmp_path):
    template = '{title}|{article-body}|{a b}|{d.e}'
    (tmp_path / 'a.jsonl').write_text('\n'.join(map(json.dumps, ODD_NAMES)))
    (tmp_path / 'a.csv').write_text(
        'title,article-body,a b,d.e\n' + ''.join(f'T,body {n},{n},dots\n' for n in range(3))
    )
    without = {**ODD_NAMES[0], 'd.e': None}  # left out
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*ODD_NAMES, without]), tmp_path / 'a.parquet')
    for name in ('a.jsonl', 'a.csv', 'a.parquet'):
        expected = [f'T|body {n}|{n}|dots' for n in range(3)]
        assert read_here(tmp_path / name, template)[0] == expected, name
        assert {*read_here(tmp_path / name, 'Q: {title}?')[0]} == {'Q: T?'}, name  # around one field, too
        with pytest.raises(ValueError, match="has no field 'article_body'.*it has: title, article-body, a b, d.e"):
            sources.find_source(str(tmp_path / name), '{title} {article_body}')


def test_an_array_in_a_file_of_lines_is_read_as_an_array(tmp_path):
    rows = [{'text': f'row {number}', 'more': [number]} for number in range(5)]
    chat = [{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'a'}]
    for indent in (None, 0, 2):
        for content in (json.dumps(rows, indent=indent), '\ufeff \n' * (indent == 2) + json.dumps(rows, indent=indent)):
            (tmp_path / 'a.jsonl').write_text(content)
            documents, notes, _ = read_here(tmp_path / 'a.jsonl')
            assert documents == [row['text'] for row in rows] and not notes, content
    (tmp_path / 'a.jsonl').write_text('\n'.join(f'{json.dumps(row)},' for row in rows).join('[]'))
    assert read_here(tmp_path / 'a.jsonl')[1].total() == 1  # of what is not JSON as a whole, a note says so
    (tmp_path / 'a.jsonl').write_text(json.dumps(chat))  # one row that is a list of messages
    assert sources.find_source(str(tmp_path / 'a.jsonl')).chat
    (tmp_path / 'b.jsonl.gz').write_bytes(gzip.compress(json.dumps(rows, indent=2).encode()))
    with pytest.raises(ValueError, match='b.jsonl.gz: one array of JSON.*: unpack it'):
        sources.find_source(str(tmp_path / 'b.jsonl.gz'))


def test_links_to_folders_are_followed_once_and_what_is_no_file_is_named(tmp_path):
    tree, outside = tmp_path / 'tree', tmp_path / 'outside'
    for path in (tree / 'own' / 'a.txt', outside / 'deep' / 'b.txt', outside / '.hidden' / 'c.txt'):
        path.parent.mkdir(parents=True)
        path.write_text(path.name)
    links = {tree / 'far': outside, tree / 'again': outside, tree / 'to_own': tree / 'own', tree / 'up': tmp_path}
    links |= {tree / 'self': tree, outside / 'back': tree}
    for link, target in links.items():
        link.symlink_to(target)
    os.mkfifo(tree / 'pipe.txt')
    documents, _, source = read_here(tree)
    assert sorted(documents) == ['a.txt', 'b.txt']
    lines = '\n'.join(source.skipped)
    assert lines.count(' a link to ') == 5 and f'{tree}/up: a link to {tmp_path}, ' in lines
    assert '1 hidden and 0 empty files' in lines and f'{tree}/pipe.txt: no regular file' in lines
    (tree / 'own' / 'a.txt').unlink()
    (tree / 'pipe.txt').unlink()
    assert read_here(tree)[0] == ['b.txt']  # also where all that there is lies behind a link


def test_a_test_split_beside_the_one_to_train_on_is_named(tmp_path):
    for name in ('test-0.jsonl', 'contest.jsonl', 'latest_val.txt'):
        (tmp_path / name).write_text(json.dumps({'text': name}))
    assert sources.find_source(str(tmp_path)).line is None
    (tmp_path / 'train-0.jsonl').write_text(json.dumps({'text': 'one'}))
    line = sources.find_source(str(tmp_path)).line
    assert line.startswith('WARNING: 1 file named like a test or ') and f'{tmp_path}/test-0.jsonl; to hold' in line


def test_a_table_without_a_text_in_any_row_and_one_with_a_column_twice_are_named(tmp_path):
    for name, text in (('a', pyarrow.array(['one', 'two'])), ('b', pyarrow.nulls(3))):
        pyarrow.parquet.write_table(pyarrow.table({'text': text}), tmp_path / f'{name}.parquet')
    (tmp_path / 'twice.csv').write_text('text,id,text\nfirst,1,second\n')
    documents, notes, source = read_here(tmp_path)
    assert documents == ['one', 'two'] and notes == {f'{tmp_path}/b.parquet: rows without text, left out': 3}
    assert source.skipped == [f"{tmp_path}/twice.csv: a table with two columns called 'text': rename one"]


def test_what_cannot_be_read_as_asked_is_refused_before_anything_is_read(tmp_path):
    """A split of files that have none, and a file of numbers behind one of text."""
    for name, text in (('a', ['one']), ('b', [1, 2])):
        pyarrow.parquet.write_table(pyarrow.table({'text': text}), tmp_path / f'{name}.parquet')
    with pytest.raises(ValueError, match="b.parquet: the field 'text' holds int64, not text"):
        sources.find_source(str(tmp_path))
    assert sources.find_source(str(tmp_path), '{text}!').parts
    (tmp_path / 'b.parquet').unlink()
    with pytest.raises(ValueError, match='has no splits to choose from: .* leave out --source_split=test'):
        sources.find_source(str(tmp_path), split='test')


def test_with_more_than_half_of_the_rows_left_out_nothing_is_made_unless_it_is_asked_for(tmp_path):
    rows = [{'text': f'row {number}'} for number in range(40)] + [{'other': 'x'}] * 41
    (tmp_path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    arguments = [f'--dataset={tmp_path}/rows.jsonl', '--tokenizer=bytes', '--text_field=text']
    for fraction in ('--val_fraction=0.1', '--val_fraction=0'):  # found before anything is written, or at the end
        error = error_of(tmp_path, *arguments, fraction)
        assert re.search(r'41 of 81 rows are left out: rows without text \(41\); --max_left_out=0.51 ', error)
        assert not list(tmp_path.glob('data/*/*'))
    printed = prepare(tmp_path, *arguments, '--max_left_out=0.51').stdout
    assert 'WARNING: 41 of 81 rows (51%) are left out' in printed
    assert meta_of(tmp_path / 'data' / 'rows-bytes')['rows_kept'] == 40


def test_the_next_command_is_one_that_can_run(tmp_path):
    rows = [{'prompt_txt': f'q{number}', 'reply_txt': f'a{number}'} for number in range(20)]
    (tmp_path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    options = ['--tokenizer=bytes', r'--text_field={prompt_txt}\n{reply_txt}']  # as a shell passes a line feed
    printed = prepare(tmp_path, f'--dataset={tmp_path}/rows.jsonl', *options).stdout
    assert 'q0\na0' in documents_of(tmp_path / 'data' / 'rows-bytes', 'train')
    assert 'next: more text, or a larger --val_fraction' in printed.splitlines()[-1] and '--block_size' not in printed


def test_a_json_file_with_one_object_behind_another_is_read(tmp_path):
    rows = [{'text': 'one'}, {'text': 'two'}]
    for name, content in (
        ('lines', '\n'.join(map(json.dumps, rows))),
        ('indented', '\n'.join(json.dumps(row, indent=2) for row in rows)),
        ('bom', '\ufeff' + '\n'.join(map(json.dumps, rows)) + '\n'),
    ):
        (tmp_path / f'{name}.json').write_text(content, encoding='utf-8')
        assert read_here(tmp_path / f'{name}.json')[:2] == (['one', 'two'], {})
    assert sources.find_source(str(tmp_path / 'lines.json')).parts[0].kind == 'jsonl'  # however long it is


def test_a_byte_order_mark_is_no_text(tmp_path):
    text = '\ufeff' + ' '.join(make_texts(2000, words=300))
    (tmp_path / 'long.txt').write_text(text, encoding='utf-8')
    write_compressed(tmp_path / 'long.txt.gz', text.encode())
    assert len(text.encode()) > 2 * reading.PIECE_BYTES
    for name in ('long.txt', 'long.txt.gz'):
        source = sources.find_source(str(tmp_path / name))
        pieces = [piece for unit in reading.units_of(source) for piece in unit.pieces]
        stretches = [text for piece in pieces for text in reading.documents_of(piece, None, collections.Counter())]
        assert b''.join(stretches).decode() == text[1:]
        heads = {piece.head_of(stretch) for piece, stretch in zip(pieces, stretches, strict=True)}
        assert heads == {text[1:].encode()[: reading.HEAD_BYTES]}  # else one text would come into both splits


def write_arrow_file(path, table, **options):
    with pyarrow.OSFile(str(path), 'wb') as file, pyarrow.ipc.new_file(file, table.schema, **options) as out:
        for batch in table.to_batches(max_chunksize=40):
            out.write_batch(batch)


LFS = b'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n'
DAMAGED = {  # a name: (what is left of the whole file, what the line says)
    'cut.parquet': (lambda data: data[: len(data) // 2], 'damaged: parquet begins and ends with PAR1'),
    'empty.parquet': (lambda data: b'', 'damaged: it is empty'),
    'cut.arrow': (lambda data: data[:-50], 'damaged: '),
    'other.arrow': (lambda data: b'XRROW1' + data[6:], 'damaged: Arrow begins with ARROW1, or as a stream'),
    'old.feather': (lambda data: b'FEA1' + data[4:], 'Feather 1: write it again'),
    'cut.json': (lambda data: data[:-20], 'damaged: a list of JSON that does not end'),
    'other.jsonl': (lambda data: b'no rows', 'expected a JSON object on each line'),
    'other.jsonl.gz': (lambda data: b'no gzip', 'not compressed by gzip'),
    'empty.jsonl.zst': (lambda data: b'', 'damaged: it is empty'),
    'cut.jsonl.gz': (lambda data: data[:-20], 'damaged: Truncated'),
    'cut.jsonl.zst': (lambda data: data[:-20], 'damaged: Truncated'),
    'harmed.jsonl.gz': (lambda data: data[:10] + b'damage' * 9, 'inflate'),
    **{name: (lambda data: LFS, '`git lfs pull`') for name in ('a.csv', 'a.json', 'a.jsonl', 'a.parquet')},
}


@pytest.mark.parametrize('name', DAMAGED)
def test_a_damaged_file_among_whole_ones_is_an_error_that_names_it_in_all_formats(tmp_path, name):
    """Left out, it would be a part of the data that nobody misses."""
    rows = [{'text': f'document {number} with some words of its own {number * 7919}'} for number in range(200)]
    table, path, (harm, line) = pyarrow.table({'text': [row['text'] for row in rows]}), tmp_path / name, DAMAGED[name]
    (tmp_path / 'whole.jsonl').write_text('{"text": "whole"}\n')
    lines = ''.join(json.dumps(row) + '\n' for row in rows).encode()
    if path.suffix in ('.gz', '.zst'):
        write_compressed(path, lines)
    elif path.suffix == '.parquet':
        pyarrow.parquet.write_table(table, path)
    elif path.suffix in ('.arrow', '.feather'):
        write_arrow_file(path, table)
    else:
        path.write_bytes(json.dumps(rows).encode())
    if path.suffix != '.csv':
        whole = [row['text'] for row in rows]
        assert sorted(read_here(tmp_path)[0]) == sorted(['whole', *whole])
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises((ValueError, OSError), match=f'{path}: .*{re.escape(line)}'):
        read_here(tmp_path)


def skippable(magic=0x184D2A50):
    return struct.pack('<II', magic, 4) + b'size'


@pytest.mark.parametrize('form', ['arrow', 'arrow by zstd', 'arrows', 'feather', 'pzstd', 'zstd', 'comment', 'extra'])
def test_each_legal_beginning_of_a_format_is_read(tmp_path, form):
    texts = [f'document {number}' for number in range(100)]
    table = pyarrow.table({'text': texts})
    lines = [json.dumps({'text': text}).encode() + b'\n' for text in texts]
    packed = {'comment': (16, b'of pages\0'), 'extra': (4 | 8, b'\2\0abname\0')}
    if form == 'arrow':
        write_arrow_file(tmp_path / 'x.arrow', table)
    elif form == 'arrow by zstd':
        write_arrow_file(tmp_path / 'x.arrow', table, options=pyarrow.ipc.IpcWriteOptions(compression='zstd'))
    elif form == 'arrows':
        write_stream(tmp_path / 'x.arrows', table)
    elif form == 'feather':
        pyarrow.feather.write_feather(table, tmp_path / 'x.feather')
    elif form.endswith('zstd'):
        codec = pyarrow.Codec('zstd')
        frames = [codec.compress(b''.join(part), asbytes=True) for part in (lines[:50], lines[50:])]
        pzstd = [skippable(), frames[0], skippable(), frames[1]]
        frames = pzstd if form == 'pzstd' else [frames[0], skippable(0x184D2A5F), frames[1]]
        (tmp_path / 'x.jsonl.zst').write_bytes(b''.join(frames))
    else:
        flags, fields = packed[form]
        data = gzip.compress(b''.join(lines), mtime=0)
        (tmp_path / 'x.jsonl.gz').write_bytes(data[:3] + bytes([flags]) + data[4:10] + fields + data[10:])
    assert read_here(tmp_path)[0] == texts


def test_a_long_window_of_zstd_is_named_with_the_command_that_unpacks_it(tmp_path):
    frame = b'\x28\xb5\x2f\xfd\x00\xa8' + (4 << 3 | 1).to_bytes(3, 'little') + b'text'  # a window of 2 GB
    (tmp_path / 'c.txt.zst').write_bytes(frame)
    with pytest.raises(ValueError, match='zstd -d --long=31'):
        read_here(tmp_path / 'c.txt.zst')


def test_a_saved_dataset_has_the_files_that_its_state_names(tmp_path):
    datasets.Dataset.from_dict({'text': ['a', 'b']}).save_to_disk(tmp_path / 'saved')
    state = json.loads((tmp_path / 'saved' / 'state.json').read_text())
    (file,) = state['_data_files']
    (tmp_path / 'saved' / file['filename']).rename(tmp_path / 'saved' / 'cache-1.arrow')
    with pytest.raises(ValueError, match=f'{file["filename"]} .*missing'):
        read_here(tmp_path / 'saved')
    (tmp_path / 'saved' / 'state.json').write_text('version https://git-lfs.github.com/spec/v1\n')
    with pytest.raises(ValueError, match='state.json .*`git lfs pull`'):
        read_here(tmp_path / 'saved')
    state['_data_files'] = [{'filename': 'cache-1.arrow'}]
    (tmp_path / 'saved' / 'state.json').write_text(json.dumps(state))
    assert read_here(tmp_path / 'saved')[0] == ['a', 'b']


# --- kills ------------------------------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(text_folder, tmp_path):
    arguments = [f'--dataset={text_folder}', '--vocab_size=400', '--shard_tokens=60000', '--name=killed']
    prepare(tmp_path / 'whole', *arguments, '--num_proc=1')  # which makes no difference, either
    arguments.append('--num_proc=2')
    expected = contents(tmp_path / 'whole' / 'data' / 'killed')
    dataset = tmp_path / 'killed' / 'data' / 'killed'
    assert len(expected) > 12

    # Killed in the first unit, when no state is saved yet; after it; and before a later state replaces the first one.
    for number, before in ((1, '*'), (9, '*'), (9, 'unfinished.json')):
        shard = dataset / f'train_{number:06}.bin'
        workers = start_and_kill_at(shard, tmp_path / 'killed', *arguments, before=before)
        found = contents(dataset)
        shards = {name: sha256 for name, sha256 in found.items() if name.endswith('.bin')}
        assert shards and all(expected[name] == sha256 for name, sha256 in shards.items()), 'a half-written shard'
        assert workers
        wait_until(lambda: not any(map(is_alive, workers)), 60, lambda: 'workers outlive the run')  # noqa: B023
    result = prepare(tmp_path / 'killed', *arguments)
    assert 'going on behind the first' in result.stdout
    assert contents(dataset) == expected


def test_a_half_made_dataset_is_not_continued_with_something_else(text_folder, tmp_path):
    arguments = [f'--dataset={text_folder}', '--tokenizer=bytes', '--shard_tokens=60000', '--name=half']
    dataset = tmp_path / 'data' / 'half'
    start_and_kill_at(dataset / 'train_000025.bin', tmp_path, *arguments)  # after the first unit of one MB
    before = contents(dataset)
    error = error_of(tmp_path, *arguments, '--seed=2')
    assert re.search('seed=1337, .* 2.*--name', error)
    assert contents(dataset) == before


@pytest.mark.slow
def test_a_run_killed_before_anything_counts_starts_over_with_any_settings(text_folder, tmp_path):
    arguments = [f'--dataset={text_folder}', '--tokenizer=bytes', '--name=early']
    dataset = tmp_path / 'data' / 'early'
    start_and_kill_at(dataset / 'unfinished.json', tmp_path, *arguments, '--shard_tokens=10000')  # before any token
    assert not json.loads((dataset / 'unfinished.json').read_text())['splits'], 'a state was saved: killed too late'
    prepare(tmp_path, *arguments, '--shard_tokens=5000000')
    assert sorted(contents(dataset)) == ['meta.json', 'train_000000.bin', 'val_000000.bin']
    documents_of(dataset, 'train')


@pytest.mark.slow
def test_two_processes_do_not_write_one_folder(text_folder, tmp_path):
    dataset = tmp_path / 'data' / 'locked'
    dataset.mkdir(parents=True)
    lock = os.open(dataset, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    error = error_of(tmp_path, f'--dataset={text_folder}', '--tokenizer=bytes', '--name=locked')
    os.close(lock)
    assert 'another process' in error


UNITS = ['files', 'saved', 'stream', 'csv', 'csv.gz', 'json', 'jsonl.gz', 'txt.zst']


@pytest.mark.parametrize('form', UNITS)
def test_reading_goes_on_behind_any_unit(tmp_path, monkeypatch, form):
    for name, size in {'UNIT_BYTES': 5000, 'PIECE_BYTES': 5000, 'JSON_BYTES': 100, 'ROWS_AT_ONCE': 7}.items():
        monkeypatch.setattr(reading, name, size)
    texts = [f'{text}]}},{{"' for text in make_texts(60)]  # what ends rows and lists of JSON
    rows, path, kind = [{'text': text} for text in texts], tmp_path / f'rows.{form}', form.partition('.')[0]
    quoted = ['"' + text.replace('"', '""') + '"' for text in ('text', *texts)]
    content = {'csv': '\n'.join(quoted), 'json': json.dumps(rows, indent=2, ensure_ascii=False)}
    content |= {'jsonl': '\n'.join(map(json.dumps, rows)), 'txt': '\n'.join(texts)}
    if form == 'saved':
        datasets.Dataset.from_list(rows).save_to_disk(path)
    elif form == 'files':
        path.mkdir()
        for number in range(5):
            (path / f'{number}.txt').write_text('\n'.join(texts[:20]), encoding='utf-8')
        (path / 'lines.jsonl').write_text(content['jsonl'])
    elif kind == form != 'stream':
        path.write_text(content[kind], encoding='utf-8', newline='')
    elif form != 'stream':
        write_compressed(path, content[kind].encode())
    if form in ('files', 'stream'):
        table = path / 'rows.parquet' if form == 'files' else path
        pyarrow.parquet.write_table(pyarrow.table({'text': texts}), table, row_group_size=17)
    if form == 'stream':
        stream = datasets.load_dataset('parquet', data_files=[str(path)] * 3, split='train', streaming=True)
        source = sources.stream_source(stream, {'name': 'three files', 'split': 'train'}, 'text')
    else:
        source = sources.find_source(str(path))

    def documents(units):
        pieces = [piece for unit in units for piece in unit.pieces]
        return [document for piece in pieces for document in reading.documents_of(piece, 'text', collections.Counter())]

    units = list(reading.units_of(source))
    assert len(units) > 2 and sum(unit.work for unit in units) == pytest.approx(source.total or 180, rel=0.1)
    if 'txt' not in form and form != 'files':
        assert documents(units) == [text.encode() for text in texts] * (3 if form == 'stream' else 1)
    for number, unit in enumerate(units):
        assert documents(reading.units_of(source, unit.next)) == documents(units[number + 1 :])


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('name', ['large.txt', 'large.jsonl', 'large.parquet', 'equal.parquet'])
def test_a_large_file_is_read_in_small_units(name, tmp_path):
    if name == 'equal.parquet':  # 20 MB of text in a file of 1 kB
        pyarrow.parquet.write_table(pyarrow.table({'text': ['time and tide ' * 70] * 20_000}), tmp_path / name)
    else:
        write_large(tmp_path / name, 20)
    before = pyarrow.total_allocated_bytes()
    total = 0
    for unit in reading.units_of(sources.find_source(str(tmp_path / name))):
        size = sum(piece.length for piece in unit.pieces)
        total += size
        assert size < 2.1 * reading.UNIT_BYTES
        assert pyarrow.total_allocated_bytes() - before < 8e6
    assert total > 19e6


def peak_memory(folder, *arguments):
    """The peak of resident megabytes of prepare_data.py and its two workers together; shared pages count in each."""
    command = [sys.executable, str(REPO / 'prepare_data.py'), f'--data_dir={folder}/data', '--num_proc=2', *arguments]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        try:
            pids = [process.pid, *children_of(process.pid)]
            pages = [int(Path(f'/proc/{pid}/statm').read_text().split()[1]) for pid in pids]
        except (FileNotFoundError, ProcessLookupError):  # one has just ended
            continue
        peak = max(peak, sum(pages) * os.sysconf('SC_PAGE_SIZE') / 1e6)
        time.sleep(0.02)
    assert process.returncode == 0
    return peak


def write_large(path, megabytes):
    """Write one file of so many megabytes: a text, JSON lines, or parquet with a single row group."""
    paragraphs = make_texts(400, words=400)
    size = sum(len(text.encode()) for text in paragraphs)
    repetitions = megabytes * 1_000_000 // size + 1
    if path.suffix == '.parquet':
        table = pyarrow.table({'text': paragraphs * repetitions})
        pyarrow.parquet.write_table(table, path, row_group_size=10**9, compression='none', use_dictionary=False)
        return
    lines = [json.dumps({'text': text}) for text in paragraphs] if path.suffix == '.jsonl' else paragraphs
    with open(path, 'w', encoding='utf-8') as file:
        for _ in range(repetitions):
            file.write('\n'.join(lines) + '\n')


SLOW = pytest.mark.slow
LARGE = [('20.txt', 20), *(pytest.param(f'150.{kind}', 150, marks=SLOW) for kind in ('txt', 'jsonl', 'parquet'))]


@pytest.mark.parametrize('name, megabytes', LARGE)
def test_memory_does_not_grow_with_the_input(name, megabytes, tmp_path):
    write_large(tmp_path / name, megabytes)
    peak = peak_memory(tmp_path, f'--dataset={tmp_path / name}', '--tokenizer=bytes', '--shard_tokens=5000000')
    assert peak < 500, f'{peak:.0f} MB in three processes, of which the first has torch'


# --- speed ------------------------------------------------------------------------------------------------------------


def test_a_terminal_sees_speed_and_time_left(tmp_path):
    write_large(tmp_path / 'large.txt', 60)  # at 100 MB/s: long enough for a bar every 0.1 s
    terminal, its_end = pty.openpty()
    fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack('4H', 24, 120, 0, 0))  # a bar wants columns
    command = [sys.executable, str(REPO / 'prepare_data.py'), f'--dataset={tmp_path}/large.txt', '--tokenizer=bytes']
    result = subprocess.run(
        [*command, f'--data_dir={tmp_path}/data'], env=environment(), stdout=subprocess.DEVNULL, stderr=its_end
    )
    shown = os.read(terminal, 1 << 16).decode()
    assert result.returncode == 0
    line = r'\r +\d+%\|\S+ *\| [\d.]+M/60\.\dM \[[\d:]+<[\d:]+, [\d.]+[kM]B/s, [\d,]+ tokens, [\d.]+M tokens/s\]'
    assert re.search(line, shown), shown


# --- bad input --------------------------------------------------------------------------------------------------------


def test_a_mistake_is_one_line_that_says_what_mends_it_and_leaves_nothing(tmp_path):
    rows = [{'body': 'some text', 'id': 1}]
    pair, alone = '{"prompt": "a", "completion": "b"}\n', '{"text": "alone"}'
    files = {'rows.jsonl': json.dumps(rows[0]), 'rows.json': json.dumps(rows), 'rows.csv': 'body,id\nsome text,1\n'}
    files |= {'none.jsonl': '', 'one.jsonl': alone, 'pairs.jsonl': pair * 2, 'both.jsonl': pair + alone}
    files |= {'asked.jsonl': '{"prompt": "a", "level": "b"}'}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / 'rows.parquet')
    (tmp_path / 'empty').mkdir()
    fields = "has no field 'text', choose with --text_field; it has: body, id"
    cases = [
        ('nothing', [], 'no such file'),
        ('some/where/text.txt', [], 'no such file'),
        ('{}/empty', [], 'no files'),
        ('{}/none.jsonl', [], 'empty'),
        *((f'{{}}/rows.{kind}', [], fields) for kind in ('jsonl', 'json', 'csv', 'parquet')),
        *(('{}/rows.parquet', [key], fields) for key in ('--chat=False', '--text_field=text')),
        ('{}/rows.jsonl', ['--text_field=content'], "'content', .*--text_field.*: body, id"),
        ('{}/rows.parquet', ['--text_field=id'], "'id' .*int64"),
        *(('{}/rows.jsonl', [f'--text_field={{body}} {more}'], 'in each pair of {braces}') for more in ('{}', '{id')),
        ('{}/one.jsonl', ['--data_dir={}/other'], 'two different'),
        ('{}/pairs.jsonl', ['--data_dir={}/other'], 'two different .* split by a hash: use --val_fraction=0$'),
        ('{}/asked.jsonl', [], 'prompts alone are learned by `python train_grpo.py --prompts=FILE`$'),
        ('{}/both.jsonl', [], ' [^ ]*both.jsonl holds conversations, and also texts: --chat=True reads'),
        ('stdlib', ['--data_dir={}/rows.csv'], 'Not a directory.*--data_dir'),
        ('stdlib', ['--tokenizer=gpt-2'], 'did you mean gpt2'),
        ('stdlib', ['--name=../x'], 'name'),
        ('stdlib', ['--vocab_size=300'], 'is for --tokenizer=bpe'),
        ('stdlib', ['--tokenizer=bpe', '--vocab_size=200'], 'at least 259'),
        ('stdlib', ['--val_rule=tail'], 'val_rule=tail '),
    ]  # fmt: skip
    commands = [
        ['prepare_data.py', '--tokenizer=bytes', f'--data_dir={tmp_path}/data', f'--dataset={dataset}', *keys]
        for dataset, keys, _ in cases
    ]
    commands = [[word.replace('={}', f'={tmp_path}') for word in command] for command in commands]
    for (dataset, keys, says), line in zip(cases, refusals(commands), strict=True):
        assert re.search(says, line), (dataset, keys, line)
    assert not (tmp_path / 'data').exists()


def test_a_file_of_rows_without_the_field_of_the_others_is_refused_and_settings_are_left_out(tmp_path):
    folder = tmp_path / 'mixed'
    folder.mkdir()
    for name, field in (('a', 'text'), ('b', 'text'), ('c', 'body')):
        (folder / f'{name}.jsonl').write_text(''.join(json.dumps({field: f'{name} {n}'}) + '\n' for n in range(7)))
    (folder / 'settings.json').write_text(json.dumps({'note': 'one object beside files of rows'}))
    with pytest.raises(ValueError, match="c.jsonl: has no field 'text', choose with --text_field; it has: body"):
        sources.find_source(str(folder))
    (folder / 'c.jsonl').unlink()
    source = sources.find_source(str(folder))
    assert source.line is None and len(source.parts) == 2 and 'settings.json: has no field' in source.skipped[0]


def test_what_cannot_be_read_is_left_out_and_named(tmp_path):
    folder = tmp_path / 'mixed'
    folder.mkdir()
    (folder / 'good.txt').write_text('good text')
    (folder / 'latin1.txt').write_bytes('caf\u00e9 cr\u00e8me'.encode('latin-1'))
    (folder / 'utf16.txt').write_text('two bytes each', encoding='utf-16')
    (folder / 'picture.png').write_bytes(b'\x89PNG\r\n\x1a\n\0\0\0\rIHDR')
    (folder / 'broken_link.txt').symlink_to(folder / 'not_there')
    (folder / '.git').mkdir()
    for hidden in ('.hidden', '.git/config'):
        (folder / hidden).write_text('not for us')
    (folder / 'empty.txt').touch()
    (folder / 'rows.jsonl').write_text('{"text": "first"}\n\n{"text": \n{"other": 1}\n["text"]\n{"text": "second"}')
    result = prepare(tmp_path, f'--dataset={folder}', '--tokenizer=bytes', '--val_fraction=0.3')
    dataset = tmp_path / 'data' / 'mixed-bytes'
    both = documents_of(dataset, 'train') + documents_of(dataset, 'val')
    assert sorted(both) == sorted(['good text', 'caf\ufffd cr\ufffdme', 'first', 'second'])
    assert f'left out: {folder}/broken_link.txt: No such file or directory' in result.stdout
    assert f'left out: {folder}/picture.png: binary' in result.stdout
    assert f'left out: {folder}/utf16.txt: UTF-16' in result.stdout
    assert re.search(rf'{folder}/latin1.txt: .*U\+FFFD \(2\)', result.stdout)
    assert re.search(rf'{folder}/rows.jsonl: .*not JSON.* \(1\)', result.stdout)
    assert re.search(rf'{folder}/rows.jsonl: .*without text.* \(2\)', result.stdout)
    assert re.search('left out: 2 hidden .*1 empty ', result.stdout) and '.hidden' not in result.stdout
    assert 'uint16; validation split: 30.00% ' in result.stdout


def test_another_source_under_the_same_name_is_refused_and_nothing_lost(tmp_path):
    for name in ('a', 'b'):
        (tmp_path / f'{name}.txt').write_text(f'the text of {name}, ' * 20)
    prepare(tmp_path, f'--dataset={tmp_path}/a.txt', '--tokenizer=bytes', '--name=mine')
    before = contents(tmp_path / 'data' / 'mine')
    error = error_of(tmp_path, f'--dataset={tmp_path}/b.txt', '--tokenizer=bytes', '--name=mine')
    assert re.search(f'{tmp_path}/a.txt.* {tmp_path}/b.txt', error)
    assert '--name' in error and contents(tmp_path / 'data' / 'mine') == before

    foreign = tmp_path / 'data' / 'foreign'
    foreign.mkdir()
    (foreign / 'train.bin').write_bytes(b'\1\0')
    error = error_of(tmp_path, f'--dataset={tmp_path}/b.txt', '--tokenizer=bytes', '--name=foreign')
    assert 'token files' in error
    assert list(contents(foreign)) == ['train.bin']


def test_verify_names_files_that_are_not_as_they_were_written(tmp_path):
    (tmp_path / 'text.txt').write_text('some text ' * 100)
    prepare(tmp_path, f'--dataset={tmp_path}/text.txt', '--tokenizer=bytes', '--name=mine', '--shard_tokens=500')
    assert f'{tmp_path}/data/mine: 3 files, sha256 as in meta.json' in prepare(tmp_path, '--verify=mine').stdout
    shard = tmp_path / 'data' / 'mine' / 'train_000001.bin'
    content = shard.read_bytes()
    shard.write_bytes(content[:-2] + b'x' + content[-1:])
    error = error_of(tmp_path, '--verify=mine')
    assert re.search('1 of 3 files: train_000001.bin .*sha256', error)
    shard.unlink()
    assert 'train_000001.bin' in error_of(tmp_path, '--verify=mine')
    assert 'nothing/meta.json is missing' in error_of(tmp_path, '--verify=nothing')


# --- the hub ----------------------------------------------------------------------------------------------------------

REVISION = '0123456789abcdef0123456789abcdef01234567'


class FakeHub(http.server.BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as `datasets` asks for: one dataset, `name`, with parquet files."""

    name: str
    files: dict

    def do_GET(self):
        path = self.path.partition('?')[0]
        if path.startswith(f'/api/datasets/{self.name}'):
            rest = path.removeprefix(f'/api/datasets/{self.name}')
            if rest.startswith('/tree/'):
                under = rest.removeprefix(f'/tree/{REVISION}').strip('/')
                return self.answer(json.dumps(self.entries(under)).encode())
            siblings = [{'rfilename': name} for name in self.files]
            info = {'id': self.name, 'sha': REVISION, 'siblings': siblings, 'tags': [], 'private': False}
            return self.answer(json.dumps(info).encode())
        name = path.removeprefix(f'/datasets/{self.name}/resolve/{REVISION}/')
        if name in self.files:
            return self.answer(self.files[name])
        self.answer(b'{"error": "not found"}', 404)

    do_HEAD = do_GET

    def entries(self, folder):
        """What is in a folder of the repository."""
        if not folder and 'recursive=true' not in self.path:
            return [{'type': 'directory', 'path': 'sample', 'oid': '0' * 40, 'size': 0}]
        return [
            {'type': 'file', 'path': name, 'size': len(content), 'oid': hashlib.sha1(content).hexdigest()}
            for name, content in self.files.items()
            if name.startswith(folder)
        ]

    def answer(self, content, status=200):
        wanted = self.headers.get('Range')
        headers = {
            'ETag': f'"{hashlib.sha1(content).hexdigest()}"',
            'X-Repo-Commit': REVISION,
            'Accept-Ranges': 'bytes',
        }
        if wanted and status == 200:
            first, _, last = wanted.removeprefix('bytes=').partition('-')
            first, last = int(first), min(int(last or len(content)), len(content) - 1)
            headers['Content-Range'] = f'bytes {first}-{last}/{len(content)}'
            content, status = content[first : last + 1], 206
        if status == 404:
            headers['X-Error-Code'] = 'RepoNotFound' if '/api/' in self.path else 'EntryNotFound'
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header('Content-Length', str(len(content)))
        self.end_headers()
        if self.command == 'GET':
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def fake_hub(tmp_path):
    """(environment variables that point at a hub with the dataset texts/parts, the texts in it)."""
    texts = make_texts(500)
    FakeHub.name, FakeHub.files = 'texts/parts', {}
    for part in range(2):
        buffer = pyarrow.BufferOutputStream()
        table = pyarrow.table({'id': list(range(250)), 'text': texts[part * 250 : (part + 1) * 250]})
        pyarrow.parquet.write_table(table, buffer, row_group_size=100)
        FakeHub.files[f'sample/{part:03}.parquet'] = buffer.getvalue().to_pybytes()
    FakeHub.files['README.md'] = (
        b'---\nconfigs:\n- config_name: sample-2\n  data_files:\n  - split: train\n    path: sample/*\n---\n'
    )
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    variables = {'HF_ENDPOINT': f'http://127.0.0.1:{server.server_port}', 'HF_HOME': str(tmp_path / 'hf_home')}
    yield {**variables, 'HF_HUB_DISABLE_XET': '1', 'NO_PROXY': '127.0.0.1'}, texts
    server.shutdown()


HUB_ARGUMENTS = ['--dataset=texts/parts', '--source_config=sample-2', '--tokenizer=bytes', '--val_fraction=0.1']


@pytest.mark.slow
def test_a_hub_dataset_is_streamed_and_gives_what_its_files_give(fake_hub, tmp_path):
    variables, texts = fake_hub
    prepare(tmp_path, *HUB_ARGUMENTS, **variables)
    dataset = tmp_path / 'data' / 'parts-sample-2-bytes'
    meta = meta_of(dataset)
    assert meta['source']['revision'] == REVISION and meta['source']['name'] == 'texts/parts'
    assert sorted(documents_of(dataset, 'train') + documents_of(dataset, 'val')) == sorted(texts)


@pytest.mark.slow
def test_a_downloaded_dataset_needs_no_network(fake_hub, tmp_path):
    variables, texts = fake_hub
    result = prepare(tmp_path, *HUB_ARGUMENTS, '--download_only', **variables)
    assert f'downloaded to {tmp_path}/data/hub/texts--parts' in result.stdout
    offline = variables | {'HF_HUB_OFFLINE': '1', 'HF_ENDPOINT': 'http://127.0.0.1:9', 'HF_HOME': str(tmp_path / 'new')}
    prepare(tmp_path, *HUB_ARGUMENTS, **offline)
    dataset = tmp_path / 'data' / 'parts-sample-2-bytes'
    assert sorted(documents_of(dataset, 'train') + documents_of(dataset, 'val')) == sorted(texts)
    assert meta_of(dataset)['source']['revision'] == REVISION


@pytest.mark.slow
def test_tasks_are_made_from_the_hub_and_pinned(fake_hub, tmp_path):
    variables, _ = fake_hub
    splits = [f'  - split: {split}\n    path: sample/{split}.parquet\n' for split in ('train', 'validation')]
    card = '---\nconfigs:\n- config_name: default\n  data_files:\n' + ''.join(splits) + '---\n'
    FakeHub.name, FakeHub.files = 'baber/piqa', {'README.md': card.encode()}

    def publish(**rows_of):
        for split, rows in rows_of.items():
            buffer = pyarrow.BufferOutputStream()
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
            FakeHub.files[f'sample/{split}.parquet'] = buffer.getvalue().to_pybytes()

    def make(**options):
        return run_script('prepare_data.py', '--tasks=piqa', cwd=tmp_path, **variables, **options)

    jar = {'goal': 'open a jar', 'sol1': 'pull it', 'sol2': 'twist it', 'label': 1}
    publish(validation=[jar], train=[{**jar, 'label': 0}] * 3)
    for _ in range(2):  # the second time it is the same
        assert f'1 item of baber/piqa, validation, {REVISION}' in make().stdout
    item = {'context': 'Question: open a jar\nAnswer:', 'choices': ['pull it', 'twist it'], 'gold': 1}
    assert json.loads((tmp_path / 'tasks' / 'piqa.jsonl').read_text()) == item
    assert (tmp_path / 'tasks' / 'piqa.fewshot.jsonl').read_text().count('"gold": 0') == 3
    pin = json.loads((tmp_path / 'tasks' / 'pins.json').read_text())['piqa']
    assert pin['revision'] == REVISION
    assert pin['sha256']['piqa.jsonl'] == sha256_of(tmp_path / 'tasks' / 'piqa.jsonl')
    publish(validation=[{**jar, 'label': 0}])
    variables['HF_HOME'] = str(tmp_path / 'new')
    result = make(check=False)
    assert result.returncode == 1 and re.search('piqa .*tasks/pins.json ', result.stderr)
    assert json.loads((tmp_path / 'tasks' / 'piqa.jsonl').read_text()) == item
    result = run_script('prepare_data.py', '--tasks=piqua', cwd=tmp_path, check=False)
    assert re.search(r'\[0\] error: tasks=piqua: .*did you mean piqa\?', result.stderr)


@pytest.mark.slow
def test_what_the_hub_does_not_have_is_said_in_one_line(fake_hub, tmp_path):
    variables, _ = fake_hub
    assert 'not on the Hugging Face hub' in error_of(tmp_path, '--dataset=texts/other', **variables)
    error = error_of(tmp_path, '--dataset=texts/parts', '--source_config=nothing', **variables)
    assert 'not on the Hugging Face hub' in error and 'sample-2' in error


@pytest.mark.slow
@pytest.mark.parametrize('dataset', ['fineweb-10BT', 'some-one/some-thing'])
def test_without_network_the_command_to_download_is_given(dataset, tmp_path):
    offline = {'HF_HUB_OFFLINE': '1', 'HF_HOME': str(tmp_path / 'hf_home')}
    error = error_of(tmp_path, f'--dataset={dataset}', **offline)
    assert f'`python prepare_data.py --dataset={dataset} --download_only`' in error
    assert not (tmp_path / 'data').exists()


# --- tokenizer files --------------------------------------------------------------------------------------------------


@needs_gpt2
def test_cached_tokenizer_files_are_verified_and_their_folder_named(tmp_path):
    result = prepare(tmp_path, '--cache_tokenizer=gpt2', TIKTOKEN_CACHE_DIR=str(CACHE))
    assert '50,257 tokens' in result.stdout and 'sha256 verified' in result.stdout
    assert f'export TIKTOKEN_CACHE_DIR={CACHE}' in result.stdout
