"""
A conversation in the terminal, or with a program that writes into a pipe.

    converse(model, language, system, positions, say, ...)  # until the lines end

Each line is a message, and the answer is printed token by token. The model sees the whole conversation so far.
"""

import contextlib
import sys

from evaluation.prompts import Stream
from evaluation.sampling import Memory, stream_batch

HELP = 'a line is a message; /reset begins anew, /system TEXT too, with that system message; an empty line ends this'


def converse(model, language, system, positions, say, max_new_tokens, generator_of, show_ids=False, **draw):
    """
    Answer messages until an empty line or the end of the input.

    system: the first system message, or None. positions: the model's. say: function that prints a note, which is not
    part of the conversation. generator_of: function from the number of a turn to its torch.Generator. draw: options of
    sampling.stream_batch() for how tokens are drawn.
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
        prompt = language.prompt_of_chat({'messages': asked})
        if len(prompt.ids) >= positions:
            say(f'the conversation has {len(prompt.ids)} tokens, the model {positions} positions: /reset begins anew')
            continue
        stream = Stream(lambda ids, prompt=prompt: language.text_of(prompt, ids))
        options = draw | {'generators': [generator_of(turn)], 'memory': memory}
        for _, token in stream_batch(model, [prompt.ids], max_new_tokens, language.stop_tokens, **options):
            print(stream.add(token), end='', flush=True)
        print(stream.end(), flush=True)
        if show_ids:
            say(f'ids of the prompt: {prompt.ids}\nids of the answer: {stream.ids}')
        if len(stream.ids) == max_new_tokens:
            say(f'(cut after max_new_tokens={max_new_tokens})')
        elif len(prompt.ids) + len(stream.ids) >= positions:
            say(f'(cut: the model has {positions} positions)')
        messages, turn = [*asked, {'role': 'assistant', 'content': stream.shown}], turn + 1


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
