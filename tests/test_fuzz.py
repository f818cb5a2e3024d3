"""tests/fuzz.py finds nothing in a short run, and finds a fault of each kind if there is one."""

import collections
import dataclasses
import json
import pickle
from pathlib import Path

import fuzz
import pytest
import torch
from fuzzing import checkpoints as fuzzing_checkpoints
from fuzzing import foreign as fuzzing_foreign
from fuzzing import keys as fuzzing_keys

import conditions
import configurator
import knobs
from dataset import shards
from huggingface import loading, self_test
from runtime import checkpoint, checkpoint_index, dcp_files
from system import files
from text import chat_rows, control_tokens, conversations, documents
from text import tokenizer as tokenizing

CASES = {'rows': 400, 'files': 300, 'tokenizers': 100, 'configs': 40, 'checkpoints': 100, 'keys': 300, 'foreign': 300}


def failures(kind, n_cases):
    """The lines of the failures among the first cases of a kind."""
    return [line for _, _, line in fuzz.run([kind], 1, n_cases, say=lambda line: None)[2]]


@pytest.mark.parametrize('kind', fuzz.KINDS)
def test_cases_are_learned_right_or_refused_in_one_line(kind):
    outcomes, reasons, failed = fuzz.run([kind], 1, CASES[kind], say=lambda line: None)
    assert not failed
    assert outcomes[kind]['learned'] > 0.3 * CASES[kind] and outcomes[kind]['refused'] > 0.1 * CASES[kind]
    assert len(reasons[kind]) > 5


def test_a_case_depends_on_its_seed_alone():
    for kind in fuzz.KINDS:
        assert len({fuzz.outcome_of(kind, seed) for seed in (11, 12, 11, 13, 11)} | {fuzz.outcome_of(kind, 11)}) <= 3
    assert {fuzz.kind_of(seed, list(fuzz.KINDS)) for seed in range(100)} == {*fuzz.KINDS}


def test_a_failure_prints_the_command_that_repeats_it(monkeypatch, capsys):
    monkeypatch.setattr(chat_rows, 'conversation_of', lambda row: 1 / 0)
    assert len(failures('rows', 3)) == 3
    fuzz.run(['rows'], 5, 1)
    assert '--only=rows --seed=5 --cases=1' in capsys.readouterr().out


# --- planted faults ---------------------------------------------------------------------------------------------------


def test_a_message_that_is_dropped_is_noticed(monkeypatch):
    read = chat_rows._messages_of
    monkeypatch.setattr(chat_rows, '_messages_of', lambda *row: read(*row)[-2:])
    assert any('is lost' in line for line in failures('rows', 100))


def test_a_mask_that_begins_late_is_noticed(monkeypatch):
    answer = conversations.ChatEncoder._answer

    def late(self, *arguments):
        text, start = answer(self, *arguments)
        return text, start + 4

    monkeypatch.setattr(conversations.ChatEncoder, '_answer', late)
    assert failures('rows', 100)


def test_control_tokens_of_a_message_that_become_control_tokens_are_noticed(monkeypatch):
    monkeypatch.setattr(control_tokens.ControlTokens, 'spelled_out', lambda self, value, kept=None: value)
    assert not failures('rows', 300)  # such rows are left out: they have more of them than with other words
    monkeypatch.setattr(conversations, '_refuse_more_controls', lambda text, expected: None)
    assert any('other ids' in line for line in failures('rows', 300))


def test_a_text_that_is_dropped_or_mended_without_a_word_is_noticed(monkeypatch):
    read = documents.documents_of
    monkeypatch.setattr(documents, 'documents_of', lambda *arguments: list(read(*arguments))[:2])
    assert any('other text' in line for line in failures('files', 100))
    unsaid = collections.Counter()
    monkeypatch.setattr(documents, 'documents_of', lambda piece, field, notes, *more: read(piece, field, unsaid, *more))
    assert any('without a note' in line for line in failures('files', 100))


def test_a_reason_of_several_lines_is_noticed(monkeypatch):
    monkeypatch.setattr(documents, 'reason_against_text', lambda row: 'first\nsecond')
    assert any('unclear' in line for line in failures('files', 100))


def test_other_ids_than_those_of_the_folder_are_noticed(monkeypatch):
    encode = tokenizing.FileTokenizer.encode_batch
    monkeypatch.setattr(tokenizing.FileTokenizer, 'encode_batch', lambda self, texts: encode(self, [*texts[1:], 'x']))
    assert any('other ids' in line for line in failures('tokenizers', 30))


def test_weights_that_are_not_those_of_the_folder_are_noticed(monkeypatch):
    load = loading.load

    def load_almost(model, pretrained):
        load(model, pretrained)
        next(model.parameters()).data.mul_(1.01)

    monkeypatch.setattr(loading, 'load', load_almost)
    monkeypatch.setattr(self_test, 'run', lambda *arguments, **options: None)
    assert any('other logits' in line for line in failures('configs', 20))


def test_a_checkpoint_that_is_unpickled_is_noticed(monkeypatch):
    def unpickled(path):
        with open(path, 'rb') as file:
            pickle.load(file)
        return tensors_in(path)

    tensors_in = dcp_files.tensors_in
    monkeypatch.setattr(dcp_files, 'tensors_in', unpickled)
    assert any('what is called' in line for line in failures('checkpoints', 40))


def test_a_path_in_an_index_that_is_followed_is_noticed(monkeypatch):
    def unchecked(path):
        def piece(facts):
            return checkpoint_index.Piece(tuple(facts['begin']), tuple(facts['shape']), facts['file'], facts['offset'])

        tensors = json.loads(Path(path, 'index.json').read_text())
        pieces = {key: [piece(facts) for facts in tensor['pieces']] for key, tensor in tensors.items()}
        return {
            key: checkpoint_index.Entry(torch.float32, tuple(tensors[key]['shape']), pieces[key]) for key in tensors
        }

    monkeypatch.setattr(checkpoint, 'read_index', unchecked)
    monkeypatch.setattr(fuzzing_checkpoints, 'OTHERS', ['/etc/passwd', '../../elsewhere'])
    assert any('or opened' in line for line in failures('checkpoints', 200))


def test_a_path_that_a_file_decides_is_noticed(monkeypatch):
    monkeypatch.setattr(files, 'check_form', lambda *arguments: None)
    monkeypatch.setattr(shards, 'check_form', lambda *arguments: None)
    monkeypatch.setattr(shards, 'bare_name', lambda name, where: name)
    monkeypatch.setattr(fuzzing_foreign, 'draw_value', lambda draw, outside: f'{outside}/secret')
    assert any('files outside of the folder' in line for line in failures('foreign', 200))


def test_a_link_that_leads_out_of_a_folder_is_noticed(monkeypatch):
    monkeypatch.setattr('huggingface.pretrained.refuse_link_out', lambda path, folder: None)
    assert any('files outside of the folder' in line for line in failures('foreign', 200))


def test_a_range_that_is_not_checked_or_not_declared_is_noticed(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(knobs, 'is_outside', lambda number, bounds: False)
        assert any('was taken' in line for line in failures('keys', 60))
    read = configurator.read_knobs
    monkeypatch.setattr(fuzzing_keys, 'knobs_of', lambda script: without_ranges(read(script)))
    monkeypatch.setattr(configurator, 'read_knobs', lambda script: without_ranges(read(script)))
    assert any('range' in line for line in failures('keys', 60))


def without_ranges(knobs):
    return {key: dataclasses.replace(knob, bounds=()) for key, knob in knobs.items()}


@pytest.mark.parametrize('row', ['kappa delta', 'beta1 beta2', 'omega', 'tags'])
@pytest.mark.parametrize('is_read', [True, False])
def test_a_key_that_is_wrongly_taken_for_read_or_unread_is_noticed(monkeypatch, row, is_read):
    if row == 'tags':
        monkeypatch.setattr(conditions, 'condition', lambda key, *tag: (f'with --{key}', lambda run: is_read))
    else:
        rows = conditions.READ_IF['train_']
        monkeypatch.setitem(rows, row, (rows[row][0], lambda run: is_read))
    monkeypatch.setattr(fuzzing_keys, 'check_values', fuzzing_keys.check_effect)  # draw these alone
    monkeypatch.setattr(fuzzing_keys, 'TABLE', {'prefetch': fuzzing_keys.TABLE['prefetch']})
    assert failures('keys', 150)
