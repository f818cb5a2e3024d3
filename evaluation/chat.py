"""
A conversation in the terminal, or with a program that writes into a pipe.

    converse(model, language, system, say, ...)  # until the lines end
    for kind, said in answer(model, language, {'messages': [...]}, prompt, ...): ...      # one answer, as it comes

Each line is a message, and the answer is printed token by token. The model sees the whole conversation so far.
"""

import contextlib
import sys

from evaluation.prompts import Stream
from evaluation.sampling import Memory
from evaluation.tools import stream_batch

HELP = 'a line is a message; /reset starts over, /system TEXT too, with that system message; an empty line ends this'


def converse(model, language, system, say, positions, generator_of, **options):
    """
    Answer messages until an empty line or the end of the input.

    system: the first system message, or None. say: function that prints a note, which is not part of the conversation.
    positions: the model's. generator_of: function from the number of a turn to its torch.Generator. options: of
    answer().
    """
    say(HELP)
    messages, turn, memory = begin(system), 0, Memory()
    for line in lines():
        if not line.strip():
            break
        command, _, text = line.strip().partition(' ')
        if command in ('/reset', '/system'):
            system = text.strip() or None if command == '/system' else system
            messages = begin(system)
            continue
        asked = [*messages, {'role': 'user', 'content': line.strip()}]
        conversation = {'messages': asked}
        prompt = language.prompt_of_chat(conversation)
        if len(prompt.ids) >= positions:
            say(f'the conversation has {len(prompt.ids)} tokens, the model {positions} positions: /reset starts over')
            continue
        text, notes = '', []
        now = {'positions': positions, 'generators': [generator_of(turn)], 'memory': memory}
        for kind, said in answer(model, language, conversation, prompt, **now, **options):
            if kind == 'text':
                text += said
                print(said, end='', flush=True)
            elif kind == 'call':
                asked += said.messages
                say(said.line)
            else:
                notes.append(said)
        print(flush=True)
        for note in notes:
            say(note)
        messages, turn = [*asked, {'role': 'assistant', 'content': text}], turn + 1


def answer(model, language, conversation, prompt, max_new_tokens, positions, show_ids=False, **options):
    """
    Yield what a model says to a conversation, as it says it: ('text', the next piece of its answer), which may be
    empty; ('call', a tools.Call), before that; and behind it ('note', a line for whoever reads), for instance that the
    answer is cut. prompt: the conversation's Prompt. options: of tools.stream_batch().
    """
    stream, called = Stream(lambda ids: language.text_of(prompt, ids)), []
    options |= {'max_new_tokens': max_new_tokens, 'positions': positions}
    for _, token, call in stream_batch(model, language, [conversation], [prompt], **options):
        if call:
            called += call.ids
            yield 'call', call
        else:
            yield 'text', stream.add(token)
    yield 'text', stream.end()
    ids = [*called, *stream.ids]
    if show_ids:
        yield 'note', f'ids of the prompt: {prompt.ids}\nids of the answer: {ids}'
    if len(stream.ids) == max_new_tokens:
        yield 'note', f'(cut after max_new_tokens={max_new_tokens})'
    elif len(prompt.ids) + len(ids) >= positions:
        yield 'note', f'(cut: the model has {positions} positions)'


def begin(system):
    return [] if system is None else [{'role': 'system', 'content': system}]


def lines():
    """Yield lines that are typed, with a prompt and readline's editing; or the lines that come through a pipe."""
    if not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding='utf-8', errors='replace')
        yield from sys.stdin
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 -- gives input() a history

    with contextlib.suppress(EOFError):
        while True:
            yield input('> ')
