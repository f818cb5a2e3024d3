"""The needles of benchmarks/long_context.py: each question has one answer, and it is at the depth that is claimed."""

import json
import random

import pytest

from benchmarks import long_context


def pairs_of(text):
    assert len(text) % 2 == 0
    return [text[i : i + 2] for i in range(0, len(text), 2)]


def test_a_letter_keeps_its_digit_within_a_text_only():
    draw = random.Random(1)
    texts = [set(long_context.pairs(draw, 'abcdef', 200)) for _ in range(20)]
    assert all(len(text) == len({pair[0] for pair in text}) for text in texts)
    assert len(set().union(*texts)) > 30  # of 60 pairs


def test_a_document_is_as_long_as_a_window_and_half_of_them_are_copies():
    draw = random.Random(1)
    texts = [long_context.pairs_or_copies(draw, 62) for _ in range(200)]
    assert {(len(text), text[0]) for text in texts} == {(63, '>')}
    texts = [text[1:] for text in texts]
    are_pairs = [text[1::2].isdigit() and text[::2].isalpha() for text in texts]
    assert 70 < sum(are_pairs) < 130
    for text in (text for text, is_pairs in zip(texts, are_pairs, strict=True) if not is_pairs):
        period = next(n for n in range(1, 62) if text[n:] == text[:-n])
        assert 8 <= period <= 36 and len(set(text)) == period


def test_a_needle_of_pairs_stands_once_at_its_depth(tmp_path):
    for (length, depth), path in long_context.write_pair_needles(tmp_path, items=20).items():
        for row in map(json.loads, path.read_text().splitlines()):
            start, *text, letter = row['context']
            text = ''.join(text)
            assert start == '>'
            found = [place for place, pair in enumerate(pairs_of(text)) if pair[0] == letter]
            assert found == [round(depth * (len(text) // 2 - 1))]
            assert row['choices'][row['gold']] == pairs_of(text)[found[0]][1]
            assert len(row['context']) == length - 2  # with the digit and the token that ends a text it has `length`


@pytest.mark.parametrize('depth', [0.0, 0.5, 1.0])
def test_a_needle_in_code_stands_at_its_depth_and_has_its_number(depth):
    lines = [f'    value_{n} = compute(value_{n - 1})' for n in range(4000)]
    row = long_context.question(random.Random(1), lines, 3000, depth)
    *text, asked = row['context'].splitlines()
    answer = f'{asked} {row["choices"][row["gold"]]}.'
    assert text.count(answer) == 1 and sum(line.startswith('# The number of') for line in text) == 5
    assert abs(text.index(answer) - depth * (len(text) - 1)) < 1 and abs(len(row['context']) - 3000) < 40
