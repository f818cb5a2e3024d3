"""
Well-known tasks, from datasets of the Hugging Face hub to files as in tasks.py: `python prepare_data.py --tasks=piqa`.

The text of each item is that of lm-evaluation-harness 0.4.13, lm_eval/tasks/NAME; with examples from the split that it
takes them from, in TASK.fewshot.jsonl. tasks/pins.json notes the revision of each dataset and the sha256 of each file.
"""

import csv
import difflib
import hashlib
import json
import random
import re
from pathlib import Path
from typing import NamedTuple

from runtime.files import write_file
from text.sources import open_stream


class Known(NamedTuple):
    repository: str
    config: str | None
    split: str
    fewshot_split: str | None
    item_of: object  # function: a row of the dataset -> a row of a task's file


def hellaswag(row):
    def cleaned(text):
        text = re.sub(r'\[.*?\]', '', text.strip().replace(' [title]', '. '))  # what WikiHow's articles have left
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
    """Choices are letters; the few-shot examples are the first ones of the same subject."""
    start = 'The following are multiple choice questions (with answers) about'
    subject_fields = {'group': row['subject'], 'description': f'{start} {row["subject"].replace("_", " ")}.\n\n'}
    return letters(row['question'], row['choices'], row['answer']) | subject_fields


def mmlu_continuation(row):
    """Choices are the answers themselves, which small models understand."""
    start = 'The following are questions (with answers) about'
    subject_fields = {'group': row['subject'], 'description': f'{start} {row["subject"].replace("_", " ")}.\n\n'}
    return question(row['question'].strip(), row['choices'], row['answer']) | subject_fields


def boolq(row):
    context = f'{row["passage"]}\nQuestion: {row["question"]}?\nAnswer:'
    return {'context': context, 'choices': ['no', 'yes'], 'gold': row['label']}


def openbookqa(row):
    choices = row['choices']
    gold = choices['label'].index(row['answerKey'].lstrip())
    return {'context': row['question_stem'], 'choices': choices['text'], 'gold': gold}


def commonsense_qa(row):
    return letters('Question: ' + row['question'].strip(), row['choices']['text'], 'ABCDE'.index(row['answerKey']))


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
}


CORE_KEYS = {  # of the rows of each type, and what they are called here
    'multiple_choice': {'query': 'context', 'choices': 'choices', 'gold': 'gold'},
    'schema': {'context_options': 'contexts', 'continuation': 'continuation', 'gold': 'gold'},
    'language_modeling': {'context': 'context', 'continuation': 'continuation'},
}


def make_core_tasks(config_file, folder):
    """Write the tasks of core.yaml in DCLM's evaluation bundle, beside which lie eval_meta_data.csv and eval_data/.

    In the order in which nanochat evaluates them, from which it draws examples: shuffled by Random(1337).
    """
    import yaml

    bundle = Path(config_file).parent
    folder.mkdir(exist_ok=True)
    with open(bundle / 'eval_meta_data.csv', encoding='utf-8', newline='') as file:
        chances = {row['Eval Task']: float(row['Random baseline']) / 100 for row in csv.DictReader(file)}
    for task in yaml.safe_load(Path(config_file).read_text(encoding='utf-8'))['icl_tasks']:
        keys, same = CORE_KEYS[task['icl_task_type']], {'delimiter': task.get('continuation_delimiter', ' ')}
        same |= {'num_fewshot': task['num_fewshot'][0], 'chance': chances[task['label']]}
        lines = (bundle / 'eval_data' / task['dataset_uri']).read_text(encoding='utf-8').strip().split('\n')
        rows = [{ours: row[theirs] for theirs, ours in keys.items()} | same for row in map(json.loads, lines)]
        random.Random(1337).shuffle(rows)
        write_file(folder / f'{task["label"]}.jsonl', '\n'.join(map(json.dumps, rows)) + '\n')
        print(f'{folder}/{task["label"]}.jsonl: {len(rows):,} items, {same["num_fewshot"]} examples before each')


def make_tasks(names, hub_folder, folder=Path('tasks')):
    """Write tasks/NAME.jsonl and NAME.fewshot.jsonl of these tasks, and note in tasks/pins.json what they are.

    Raises ValueError for a name that is not known, for what the hub cannot give, and where a task that is made again is
    not what pins.json says: numbers of two versions must not be compared.
    """
    for name in names:
        if name not in KNOWN and not name.endswith('core.yaml'):
            close = difflib.get_close_matches(name, KNOWN, n=1) or KNOWN
            raise ValueError(f'tasks={name}: not a task that is known here; did you mean {" or ".join(close)}?')
    folder.mkdir(parents=True, exist_ok=True)
    pins = folder / 'pins.json'
    for name in names:
        if name not in KNOWN:
            make_core_tasks(name, folder / 'core')
            continue
        known, pinned = KNOWN[name], json.loads(pins.read_text(encoding='utf-8')) if pins.exists() else {}
        files, revision = {}, None
        for split, ending in ((known.split, '.jsonl'), (known.fewshot_split, '.fewshot.jsonl')):
            if split is not None:
                stream, about = open_stream(known.repository, known.config, split, hub_folder)
                rows = [json.dumps(known.item_of(row), ensure_ascii=False) for row in stream]
                files[f'{name}{ending}'], revision = '\n'.join(rows) + '\n', about['revision']
                print(f'{folder}/{name}{ending}: {len(rows):,} items of {known.repository}, {split}, {revision}')
        hashes = {file: hashlib.sha256(text.encode()).hexdigest() for file, text in files.items()}
        if hashes != pinned.get(name, {}).get('sha256', hashes):
            was = f'revision {pinned[name]["revision"]} and is another text at revision {revision}'
            raise ValueError(
                f'{name} is pinned in {pins} to {was}: it was left as it is; delete its entry to replace it'
            )
        for file, text in files.items():
            write_file(folder / file, text)
        pinned[name] = {'repository': known.repository, 'revision': revision, 'sha256': hashes}
        write_file(pins, json.dumps(pinned, indent=1, sort_keys=True) + '\n')
