"""
Make files of well-known tasks, in the format of tasks.py, from datasets of the Hugging Face hub:

    python prepare_data.py --tasks=piqa,gsm8k                 # from the hub
    python prepare_data.py --tasks=piqa=FOLDER,gsm8k=FILE     # from a copy of the hub's dataset on this machine

Each item has the text that lm-evaluation-harness 0.4.13 gives it (lm_eval/tasks/NAME). TASK.fewshot.jsonl has the
examples, from the same split as the harness takes them. tasks/pins.json records the revision of each dataset and the
sha256 of each file.
"""

import csv
import difflib
import hashlib
import json
import random
import re
from pathlib import Path
from typing import NamedTuple

from evaluation.tasks import item_of
from layout import counted
from system.errors import one_line
from system.files import bare_name, check_form, read_json, write_file
from text.sources import open_stream, yaml_contents


class Known(NamedTuple):
    repository: str
    config: str | None
    split: str
    fewshot_split: str | None
    item_of: object  # function: a row of the dataset -> a row of a task's file


def hellaswag(row):
    def cleaned(text):
        text = re.sub(r'\[.*?\]', '', text.strip().replace(' [title]', '. '))  # markup left from WikiHow's articles
        return text.replace('  ', ' ')

    context = f'{row["activity_label"]}: {row["ctx_a"]} {row["ctx_b"].capitalize()}'
    choices = [cleaned(ending) for ending in row['endings']]
    return {'context': cleaned(context), 'choices': choices, 'gold': int(row['label'])}


def question(text, choices, gold):
    return {'context': f'Question: {text}\nAnswer:', 'choices': choices, 'gold': gold}


def arc(row):
    choices = row['choices']
    return question(row['question'], choices['text'], choices['label'].index(row['answerKey']))


def piqa(row):
    return question(row['goal'], [row['sol1'], row['sol2']], row['label'])


def winogrande(row):
    before, _, behind = row['sentence'].partition('_')
    contexts = [before + row['option1'], before + row['option2']]
    return {'contexts': contexts, 'continuation': behind.strip(), 'gold': int(row['answer']) - 1}


def lambada(row):
    context, _, word = row['text'].rpartition(' ')
    return {'context': context, 'continuation': word}


def letters(text, choices, gold):
    lines = [
        text.strip(),
        *(f'{letter}. {choice}' for letter, choice in zip('ABCDE', choices, strict=False)),
        'Answer:',
    ]
    return {'context': '\n'.join(lines), 'choices': list('ABCDE')[: len(choices)], 'gold': gold}


def mmlu(row):
    """The choices are letters. The few-shot examples are the first ones of the same subject."""
    start = 'The following are multiple choice questions (with answers) about'
    subject_fields = {'group': row['subject'], 'description': f'{start} {row["subject"].replace("_", " ")}.\n\n'}
    return letters(row['question'], row['choices'], row['answer']) | subject_fields


def mmlu_continuation(row):
    """The choices are the answers themselves, which small models understand."""
    start = 'The following are questions (with answers) about'
    subject_fields = {'group': row['subject'], 'description': f'{start} {row["subject"].replace("_", " ")}.\n\n'}
    return question(row['question'].strip(), row['choices'], row['answer']) | subject_fields


def boolq(row):
    context = f'{row["passage"]}\nQuestion: {row["question"]}?\nAnswer:'
    gold = row['label'] if 'label' in row else int(row['answer'])  # google/boolq's rows have true or false as `answer`
    return {'context': context, 'choices': ['no', 'yes'], 'gold': gold}


def openbookqa(row):
    choices = row['choices']
    gold = choices['label'].index(row['answerKey'].lstrip())
    return {'context': row['question_stem'], 'choices': choices['text'], 'gold': gold}


def commonsense_qa(row):
    return letters('Question: ' + row['question'].strip(), row['choices']['text'], 'ABCDE'.index(row['answerKey']))


def gsm8k(row):
    """The model writes an answer that ends in a line such as `#### 18`, as the examples' answers do."""
    prompt = f'Question: {row["question"]}\nAnswer:'
    stop = ['Question:', '</s>', '<|im_end|>']
    return {'prompt': prompt, 'answer': row['answer'], 'stop': stop, 'rule': 'gsm8k', 'num_fewshot': 5}


KNOWN = {
    'hellaswag': Known('Rowan/hellaswag', None, 'validation', 'train', hellaswag),
    'arc_easy': Known('allenai/ai2_arc', 'ARC-Easy', 'test', 'train', arc),
    'arc_challenge': Known('allenai/ai2_arc', 'ARC-Challenge', 'test', 'train', arc),
    'piqa': Known('baber/piqa', None, 'validation', 'train', piqa),
    'winogrande': Known('allenai/winogrande', 'winogrande_xl', 'validation', 'train', winogrande),
    'lambada_openai': Known('EleutherAI/lambada_openai', 'default', 'test', None, lambada),
    'mmlu': Known('cais/mmlu', 'all', 'test', 'dev', mmlu),
    'mmlu_continuation': Known('cais/mmlu', 'all', 'test', 'dev', mmlu_continuation),
    'boolq': Known('aps/super_glue', 'boolq', 'validation', 'train', boolq),
    'openbookqa': Known('allenai/openbookqa', 'main', 'test', 'train', openbookqa),
    'commonsense_qa': Known('tau/commonsense_qa', None, 'validation', 'train', commonsense_qa),
    'gsm8k': Known('openai/gsm8k', 'main', 'test', 'train', gsm8k),
}
SPLITS = 'train', 'validation', 'test', 'dev'


CORE_KEYS = {  # for each type of task: {key in DCLM's rows: its name here}
    'multiple_choice': {'query': 'context', 'choices': 'choices', 'gold': 'gold'},
    'schema': {'context_options': 'contexts', 'continuation': 'continuation', 'gold': 'gold'},
    'language_modeling': {'context': 'context', 'continuation': 'continuation'},
}


CORE_TASK = {'label': bare_name, 'dataset_uri': str, 'icl_task_type': str, 'num_fewshot': [int]}


def make_core_tasks(config_file, folder):
    """Write the tasks of core.yaml, which is in DCLM's evaluation bundle beside eval_meta_data.csv and eval_data/.

    The rows are shuffled by Random(1337), as in nanochat, since the choice of few-shot examples depends on their order.
    Raises ValueError if a part of the bundle is missing.
    """
    bundle = Path(config_file).parent
    for needed in (Path(config_file), bundle / 'eval_meta_data.csv', bundle / 'eval_data'):
        if not needed.exists():
            raise ValueError(
                f'tasks={config_file}: there is no {needed}: unpack eval_bundle.zip there, docs/evaluate.md'
            )
    folder.mkdir(exist_ok=True)
    with open(bundle / 'eval_meta_data.csv', encoding='utf-8', newline='') as file:
        chances = {row['Eval Task']: float(row['Random baseline']) / 100 for row in csv.DictReader(file)}
    (content,) = yaml_contents(Path(config_file).read_bytes())
    check_form(content, {'icl_tasks': [CORE_TASK]}, config_file)
    for task in content['icl_tasks']:
        for name in task['dataset_uri'].split('/'):  # it lies in a folder
            bare_name(name, f'{config_file}: dataset_uri of {task["label"]}')
        keys, same = CORE_KEYS[task['icl_task_type']], {'delimiter': task.get('continuation_delimiter', ' ')}
        same |= {'num_fewshot': task['num_fewshot'][0], 'chance': chances[task['label']]}
        lines = (bundle / 'eval_data' / task['dataset_uri']).read_text(encoding='utf-8').strip().split('\n')
        rows = [{ours: row[theirs] for theirs, ours in keys.items()} | same for row in map(json.loads, lines)]
        random.Random(1337).shuffle(rows)
        write_file(folder / f'{task["label"]}.jsonl', '\n'.join(map(json.dumps, rows)) + '\n')
        print(
            f'{folder}/{task["label"]}.jsonl: {counted(len(rows), "item")}, {same["num_fewshot"]} examples before each'
        )


# --- datasets on this machine -----------------------------------------------------------------------------------------


def is_dataset(path):
    """Whether a path is one split: a file with rows, or a folder that save_to_disk of `datasets` has written."""
    return path.suffix in ('.jsonl', '.arrow', '.parquet') if path.is_file() else (path / 'state.json').exists()


def splits_in(place):
    """{split: [path, ...]} of the datasets in a folder, found by name: test/, test.jsonl, gsm8k_test.jsonl,
    test-00000-of-00001.parquet. Folders within it are searched as well, in the order of their names: MMLU has one for
    each subject."""
    found = {}
    for path in sorted(place.iterdir()):
        if is_dataset(path):
            for split in SPLITS:
                if re.search(rf'(?<![a-z]){split}(?![a-z])', path.name):
                    found.setdefault(split, []).append(path)
        elif path.is_dir():
            for split, paths in splits_in(path).items():
                found.setdefault(split, []).extend(paths)
    return found


def find_rows(name, place):
    """(paths of the items of task `name`, paths of its few-shot examples) in a dataset on this machine.

    place: a folder with the split that the harness evaluates; or one split of any name, as a file or as a folder of
    save_to_disk. In the second case the examples are beside it, under the name of the few-shot split. Raises ValueError
    if the split is not there."""
    known, place = KNOWN[name], Path(place).expanduser()
    if not place.exists():
        raise ValueError(f'tasks={name}={place}: there is no such file or folder')
    if is_dataset(place):
        pattern = rf'(?<![a-z])({"|".join(SPLITS)})(?![a-z])'
        beside = place.with_name(re.sub(pattern, known.fewshot_split or '', place.name))
        return [place], [beside] if known.fewshot_split and beside != place and beside.exists() else []
    splits = splits_in(place) if place.is_dir() else {}
    if known.split not in splits:
        there = 'it has: ' + ', '.join(f'{split} ({paths[0]})' for split, paths in splits.items())
        expected = f'{known.split}.jsonl, .arrow or .parquet, or a folder of save_to_disk called so'
        advice = f'{there}: name one of these instead' if splits else f'expected {expected}'
        raise ValueError(f'tasks={name}={place}: no split {known.split} is there; {advice}')
    return splits[known.split], splits.get(known.fewshot_split, [])


def rows_at(path):
    """Yield the rows of a dataset on this machine as {field: value}. Raises ValueError if it cannot be read."""
    try:
        if path.suffix == '.jsonl':
            with open(path, encoding='utf-8-sig') as file:
                yield from (json.loads(line) for line in file if line.strip())
            return
        if path.suffix == '.parquet':
            from pyarrow import parquet

            yield from parquet.read_table(path).to_pylist()
            return
        import datasets

        rows = datasets.Dataset.from_file(str(path)) if path.is_file() else datasets.load_from_disk(str(path))
        yield from rows
    except Exception as error:  # datasets and pyarrow raise errors of all kinds
        raise ValueError(f'{path}: cannot be read: {one_line(error)}') from error


def lines_made(name, rows, place, are_items):
    """The lines of a task's file, made from the dataset's rows. Raises ValueError for a row that is not as on the hub.
    If are_items, also for a row without an answer, as some test splits have them."""
    lines = []
    for number, row in enumerate(rows, start=1):
        try:
            lines.append(json.dumps(KNOWN[name].item_of(row), ensure_ascii=False))
            if are_items:
                item_of(lines[-1], place)
        except Exception as error:  # KeyError, ValueError, TypeError, ...: the row may be anything
            fields = ', '.join(row) if isinstance(row, dict) else type(row).__name__
            reason = f'lacks {error}' if isinstance(error, KeyError) else one_line(error).removeprefix(f'{place}: ')
            about = f'no row of {name} with its answer, as {KNOWN[name].repository} has them'
            raise ValueError(f'{place}, row {number}: {about}: {reason}; its fields: {fields}') from error
    return lines


def read_dataset(name, place, hub_folder):
    """({ending of a file's name: (its lines, where they are from)}, the dataset's entry in pins.json) of a task.
    place: a path on this machine; None = the hub."""
    known, made = KNOWN[name], {}
    if place is None:
        for split, ending in ((known.split, '.jsonl'), (known.fewshot_split, '.fewshot.jsonl')):
            if split is not None:
                stream, about = open_stream(known.repository, known.config, split, hub_folder)
                lines = lines_made(name, stream, f'{known.repository}, {split}', ending == '.jsonl')
                made[ending] = lines, f'{known.repository}, {split}, {about["revision"]}'
        return made, {'repository': known.repository, 'revision': about['revision']}
    for paths, ending in zip(find_rows(name, place), ('.jsonl', '.fewshot.jsonl'), strict=True):
        if paths:
            lines = [line for path in paths for line in lines_made(name, rows_at(path), path, ending == '.jsonl')]
            more = f' and {len(paths) - 1} more' if len(paths) > 1 else ''
            made[ending] = lines, f'{paths[0]}{more}'
    if known.fewshot_split and '.fewshot.jsonl' not in made:
        print(f'{place}: no split {known.fewshot_split} is there; --num_fewshot takes examples from the other items')
    return made, {'repository': known.repository, 'read_from': str(place)}


def make_tasks(names, hub_folder, folder=Path('tasks')):
    """Write tasks/NAME.jsonl and NAME.fewshot.jsonl for each name, and record their origin in tasks/pins.json. A name
    may be followed by '=' and the dataset's path on this machine.

    Raises ValueError for an unknown name, and if the dataset cannot be had. It is also raised if a task is made again
    and comes out different from what pins.json records, because scores on two versions must not be compared.
    """
    for given in names:
        name = given.partition('=')[0]
        if name not in KNOWN and not name.endswith('core.yaml'):
            close = difflib.get_close_matches(name, KNOWN, n=1) or KNOWN
            raise ValueError(f'tasks={name}: not a task that is known here; did you mean {" or ".join(close)}?')
    folder.mkdir(parents=True, exist_ok=True)
    pins = folder / 'pins.json'
    for given in names:
        name, _, place = given.partition('=')
        if name not in KNOWN:
            make_core_tasks(name, folder / 'core')
            continue
        pinned = read_json(pins, {str: {'sha256?': {str: str}}}) if pins.exists() else {}
        made, about = read_dataset(name, place or None, hub_folder)
        for ending, (lines, where) in made.items():
            print(f'{folder}/{name}{ending}: {counted(len(lines), "item")} of {where}')
        files = {f'{name}{ending}': '\n'.join(lines) + '\n' for ending, (lines, _) in made.items()}
        hashes = {file: hashlib.sha256(text.encode()).hexdigest() for file, text in files.items()}
        if hashes != pinned.get(name, {}).get('sha256', hashes):
            was = f'{version_of(pinned[name])} and is another text at {version_of(about)}'
            raise ValueError(
                f'{name} is pinned in {pins} to {was}: it was left as it is; delete its entry to replace it'
            )
        for file, text in files.items():
            write_file(folder / file, text)
        pinned[name] = {**about, 'sha256': hashes}
        write_file(pins, json.dumps(pinned, indent=1, sort_keys=True) + '\n')


def version_of(about):
    """The version that an entry of pins.json names, in words."""
    return f'revision {about["revision"]}' if 'revision' in about else about['read_from']
