"""
Writes what a small model needs to become one that you can talk to (docs/whole_way.md): text from the documentation of
this Python, and conversations, preferences and tasks about it and about numbers.

    python benchmarks/make_chats.py

    way/pages.jsonl     {"text": "splitext is a function of os.path. ..."}: a page per name of the library
    way/chats.jsonl     {"messages": [...]}: sums in words, products that a calculator works out, where a name is from,
                        and who is speaking; some of two questions
    way/pairs.jsonl     {"prompt": [...], "chosen": [...], "rejected": [...]}: sums; in the second a digit is wrong
    way/practise.jsonl  {"prompt": "Add 37 and 58.", "answer": "95", ...}: other sums, as tasks to practise on
    way/letters.jsonl   {"prompt": "How many e are in dedent?", ...}: a reward that is not what you want

    way/sums.jsonl, products.jsonl, where.jsonl, who.jsonl    tasks with questions that none of these files has

Another version of Python has other documentation, so the numbers of a run differ a little between them.
"""

import argparse
import contextlib
import importlib
import inspect
import io
import json
import random
import re
import sys
import warnings
from pathlib import Path

LEFT_OUT = {'antigravity', 'this', 'idlelib', 'turtle', 'turtledemo', 'tkinter', 'test', 'lib2to3'}  # open windows, ...
NAME = 'I am Snippet, a small language model that has read the documentation of Python.'
QUESTIONS = {
    'sum': ('What is {} plus {}?', 'Add {} and {}.', 'How much is {} plus {}?'),
    'product': ('What is {} times {}?', 'Multiply {} by {}.', 'How much is {} times {}?'),
    'where': ('Where is {}?', 'Which module has {}?', 'From where do I import {}?'),
    'who': (
        'Who are you?',
        'What are you?',
        'What is your name?',
        'Tell me who you are.',
        'Introduce yourself.',
        'Hi!',
    ),
}
NEW_WHO = ('Who is this?', 'Hello, what is your name?', 'Tell me your name.', 'Hi, who are you?')
UNSEEN = 400  # sums and names; half as many products
TAUGHT, PAIRS, PRODUCTS, INTRODUCTIONS, OF_TWO = 3000, 1500, 1500, 300, 2000


# --- text -------------------------------------------------------------------------------------------------------------


def public_names(module):
    """{name: object} that a module offers, without other modules."""
    names = getattr(module, '__all__', None) or [name for name in vars(module) if not name.startswith('_')]
    found = {name: getattr(module, name, None) for name in sorted(names)}
    is_own = hasattr(module, '__all__')
    return {
        name: thing
        for name, thing in found.items()
        if callable(thing) and (is_own or getattr(thing, '__module__', None) == module.__name__)
    }


def signature_of(thing):
    try:
        text = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return '(...)'
    return text if len(text) < 100 and ' at 0x' not in text else '(...)'


def pages_and_homes():
    """(texts, {name: its module} of names that a single module has)."""
    pages, homes = [], {}
    for module_name in sorted(set(sys.stdlib_module_names) - LEFT_OUT):
        if module_name.startswith('_'):
            continue
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                module = importlib.import_module(module_name)
            except BaseException:  # of another system, or it ends the process
                continue
        pages.append(f'{module_name} is a module.\n\n{inspect.getdoc(module) or ""}\n')
        for name, thing in public_names(module).items():
            kind, described = 'class' if inspect.isclass(thing) else 'function', inspect.getdoc(thing)
            if not described:
                continue
            pages.append(f'{name} is a {kind} of {module_name}.\n\n{name}{signature_of(thing)}\n\n{described}\n')
            homes.setdefault(name, set()).add(module_name)
            for method, code in sorted(vars(thing).items()) if kind == 'class' else ():
                text = inspect.getdoc(code) if callable(code) and not method.startswith('_') else None
                if text:
                    where = f'{method} is a method of {module_name}.{name}.'
                    pages.append(f'{where}\n\n{name}.{method}{signature_of(code)}\n\n{text}\n')
    with contextlib.suppress(ImportError):
        from pydoc_data.topics import topics

        pages += [f'{topic}\n\n{text.strip()}\n' for topic, text in sorted(topics.items())]
    pages = [re.sub(r'0x[0-9a-f]{6,}', '0x0', page).encode('ascii', 'ignore').decode() for page in pages]
    return [*dict.fromkeys(pages)], {name: min(modules) for name, modules in homes.items() if len(modules) == 1}


# --- questions --------------------------------------------------------------------------------------------------------


def messages_of(question, *answers):
    """[{'role', 'content'}, ...]. With three answers, the first is typed into a calculator, the second what it says."""
    roles = ('user', 'assistant', 'tool', 'assistant')
    return [{'role': role, 'content': text} for role, text in zip(roles, (question, *answers), strict=False)]


def with_a_wrong_digit(number, draw):
    digits = list(str(number))
    place = draw.randrange(len(digits))
    digits[place] = draw.choice([digit for digit in '123456789' if digit != digits[place]])
    return ''.join(digits)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=Path('way'), help='folder for the files')
    parser.add_argument('--seed', type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter('ignore')  # deprecated modules
    draw = random.Random(arguments.seed)

    def ask(kind, *about):
        return draw.choice(QUESTIONS[kind]).format(*about)

    def task(question, answer, rule, longest=24):
        return {'prompt': question, 'answer': answer, 'rule': rule, 'max_new_tokens': longest}

    pages, homes = pages_and_homes()
    draw.shuffle(pages)
    numbers = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    sums, products = draw.sample(numbers, len(numbers)), draw.sample(numbers, PRODUCTS + UNSEEN // 2)
    new_sums, taught, paired, others = (
        sums[:UNSEEN],
        sums[UNSEEN:][:TAUGHT],
        sums[UNSEEN + TAUGHT :][:PAIRS],
        sums[UNSEEN + TAUGHT + PAIRS :],
    )
    names = draw.sample(sorted(homes), len(homes))
    chats = [messages_of(ask('sum', a, b), f'{a} plus {b} is {a + b}.') for a, b in taught]
    chats += [
        messages_of(ask('product', a, b), f'={a}*{b}', str(a * b), f'{a} times {b} is {a * b}.')
        for a, b in products[:PRODUCTS]
    ]
    chats += [messages_of(ask('where', name), f'In {homes[name]}.') for name in names[UNSEEN:]]
    chats += [messages_of(ask('who'), NAME) for _ in range(INTRODUCTIONS)]
    chats += [draw.choice(chats) + draw.choice(chats) for _ in range(OF_TWO)]  # a conversation goes on
    draw.shuffle(chats)

    def pair(a, b):
        right, wrong = (f'{a} plus {b} is {number}.' for number in (a + b, with_a_wrong_digit(a + b, draw)))
        question, *chosen = messages_of(ask('sum', a, b), right)
        return {'prompt': [question], 'chosen': chosen, 'rejected': [{**chosen[0], 'content': wrong}]}

    words = sorted({word for page in pages for word in re.findall(r'\b[a-z]{3,10}\b', page)})
    letters = [(draw.choice(word), word) for word in draw.sample(words, 2 * UNSEEN)]
    files = {
        'pages': [{'text': page} for page in pages],
        'chats': [{'messages': messages} for messages in chats],
        'pairs': [pair(a, b) for a, b in paired],
        'practise': [task(ask('sum', a, b), str(a + b), 'number') for a, b in others],
        'letters': [task(f'How many {x} are in {word}?', str(word.count(x)), 'number') for x, word in letters],
        'sums': [task(ask('sum', a, b), str(a + b), 'number') for a, b in new_sums],
        'products': [task(ask('product', a, b), f'={a}*{b}', 'exact') for a, b in products[PRODUCTS:]],
        'where': [task(ask('where', name), f'In {homes[name]}.', 'exact') for name in names[:UNSEEN]],
        'who': [task(question, 'Snippet', 'contains', 32) for question in NEW_WHO],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        path = arguments.out / f'{name}.jsonl'
        path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
        print(f'{path}: {len(rows):,} rows')


if __name__ == '__main__':
    main()
