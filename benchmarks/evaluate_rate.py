"""
Does evaluate.py give the same numbers as lm-evaluation-harness, and is it as fast? Needs
`pip install lm_eval` (0.4.13).

    python benchmarks/evaluate_rate.py models/gpt2                          # a task of 300 items from Python's sources
    python benchmarks/evaluate_rate.py models/gpt2 --tasks=tasks/piqa.jsonl --num_fewshot=2
    python benchmarks/evaluate_rate.py real/smollm2 --tasks=tasks/gsm8k.jsonl,tasks/boolq.jsonl --limit=100 --chat
    python benchmarks/evaluate_rate.py models/mine --run=out/mine           # models/mine is the export of out/mine
    python benchmarks/evaluate_rate.py llama --random --edges --rounds=0    # a class of transformers, random weights

Both compute in float32 on the CPU with the same batch size: lm_eval with its `hf` model on the folder, evaluate.py on
the folder, or with --run on the run that it was exported from. First the log-likelihoods of all requests are compared,
and the scores; for tasks with prompts, the answers that both write. Then both are timed in turns on the first task,
with tokenizing and without loading, and the median of the ratios within a round is what counts (--rounds=0: no timing).

--random makes a small model of the class that is named. Each class gets a BPE of 2,048 tokens; llama's tokenizer puts
BOS before a text, those of qwen2 and gpt_neox do not. --edges makes every fifth context of the task from Python's
sources empty, and every fifth longer than the window of that model. --chat gives each item to the model as a message
(--apply_chat_template of both programs).
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault('HF_HUB_OFFLINE', '1')

from benchmarks.runs import run_script

# One of our tasks as lm_eval reads it; FORMS has the lines that depend on the form of its items.
YAML = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}, fewshot: {fewshot}}}}}
test_split: test
fewshot_split: {fewshot_split}
num_fewshot: {num_fewshot}
output_type: {output_type}
{rest}
"""
FORMS = {
    'choices': ('multiple_choice', 'doc_to_text: "{{context}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: gold\n'
                'metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}]'),
    'contexts': ('multiple_choice', 'doc_to_text: gold\ndoc_to_choice: "{{contexts}}"\n'
                 'doc_to_target: "{{continuation}}"\nmetric_list: [{metric: acc}]'),
    'continuation': ('loglikelihood', 'doc_to_text: "{{context}}"\ndoc_to_target: "{{\' \' + continuation}}"\n'
                     'target_delimiter: ""\n'
                     'metric_list: [{metric: acc}, {metric: perplexity}]'),
    'text': ('loglikelihood_rolling', 'doc_to_text: ""\ndoc_to_target: "{{text}}"\n'
             'metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]'),
    'prompt': ('generate_until', 'doc_to_text: "{{prompt}}"\ndoc_to_target: "{{answer}}"\n'
               'metric_list: [{metric: exact_match, ignore_case: true, regexes_to_ignore: %s}]\n'
               'generation_kwargs: {until: %s, max_gen_toks: %s, do_sample: false, temperature: 0.0}\n'
               'filter_list: %s'),
}  # fmt: skip


SIZES = {'hidden_size': 128, 'intermediate_size': 256, 'num_hidden_layers': 3, 'num_attention_heads': 4}
CLASSES = {'llama': 'LlamaConfig', 'qwen2': 'Qwen2Config', 'gpt_neox': 'GPTNeoXConfig'}


def make_model(folder, kind):
    """Write a small transformers model with a window of 256 tokens and a tokenizer. Its weights are random, and large
    enough that logits differ."""
    import tokenizers
    import torch
    import transformers

    from text.tokenizer import END_OF_TEXT, train_bpe

    Path(folder).mkdir()
    train_bpe([text.encode() for text in python_sources()[:60]], 2048, f'{folder}/tokenizer.json', engine='reference')
    fast = tokenizers.Tokenizer.from_file(f'{folder}/tokenizer.json')
    end = fast.token_to_id(END_OF_TEXT)
    sizes = {**SIZES, 'vocab_size': 2048, 'max_position_embeddings': 256, 'initializer_range': 0.1}
    sizes |= {} if kind == 'gpt_neox' else {'num_key_value_heads': 2}
    torch.manual_seed(1)
    config = getattr(transformers, CLASSES[kind])(**sizes, bos_token_id=end, eos_token_id=end)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    special = {'eos_token': END_OF_TEXT}
    if kind == 'llama':
        special['bos_token'] = END_OF_TEXT
        with_bos = (f'{END_OF_TEXT} $A', f'{END_OF_TEXT} $A $B', [(END_OF_TEXT, end)])
        fast.post_processor = tokenizers.processors.TemplateProcessing(*with_bos)
    transformers.PreTrainedTokenizerFast(tokenizer_object=fast, **special).save_pretrained(folder)


def python_sources():
    paths = sorted(Path(os.__file__).parent.glob('*.py'))
    return [path.read_text(encoding='utf-8', errors='replace') for path in paths]


def make_task(path, n_items, edges=False, seed=1):
    """Write a task: which of four stretches of Python's sources comes next? Sizes are about HellaSwag's, contexts of
    300 characters and choices of 120. edges: every fifth context has no character, and every fifth has 3,000."""
    texts = python_sources()
    draws, rows = random.Random(seed), []

    def stretch(size):
        text = draws.choice([text for text in texts if len(text) > max(2000, 2 * size)])
        start = draws.randrange(len(text) - 2 * size)
        return ' '.join(text[start : start + size].split()), ' '.join(text[start + size : start + size + 120].split())

    while len(rows) < n_items:
        size = {0: 0, 1: 3000}.get(len(rows) % 5) if edges else None
        context, true = stretch(draws.randint(100, 500) if size is None else size)
        others = [stretch(draws.randint(60, 180))[0] for _ in range(3)]
        gold = draws.randrange(4)
        choices = [*others[:gold], true, *others[gold:]]
        if all(choices):
            rows.append({'context': context, 'choices': choices, 'gold': gold})
    Path(path).write_text(''.join(json.dumps(row) + '\n' for row in rows), encoding='utf-8')


def settings_of_prompts(row):
    """What lm_eval's task has to say about how answers end and how they are judged, which is by gsm8k's filters."""
    from evaluation import grading, tasks

    ignored = [pattern.pattern for pattern in grading.IGNORED]
    filters = [
        {'name': name, 'filter': [{'function': 'regex', 'regex_pattern': pattern.pattern, 'group_select': which},
                                  {'function': 'take_first'}]}
        for name, (pattern, which) in grading.GSM8K.items()
    ]  # fmt: skip
    longest = row.get('max_new_tokens', tasks.MAX_NEW_TOKENS)
    return tuple(json.dumps(value) for value in (ignored, row.get('stop', []), longest, filters))


def harness_results(lm, path, num_fewshot=0, limit=None, chat=False):
    """(scores, [[(nats, greedy), ...] of each item]) that lm_eval finds for the task in a file; a task with prompts has
    the written texts in place of the pairs."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    row = json.loads(Path(path).read_text(encoding='utf-8').partition('\n')[0])
    form = next(form for form in ('choices', 'contexts', 'continuation', 'text', 'prompt') if form in row)
    fewshot = Path(path).with_name(f'{Path(path).stem}.fewshot.jsonl')
    name = f'ours_{Path(path).stem}'
    output_type, rest = FORMS[form]
    rest = rest % settings_of_prompts(row) if form == 'prompt' else rest
    if 'description' in row:
        rest += '\ndescription: "{{description}}"'
    if 'group' in row:
        rest += '\nfewshot_config: {sampler: first_n}'
    with tempfile.TemporaryDirectory() as folder:
        keys = {'name': name, 'path': path, 'num_fewshot': num_fewshot, 'output_type': output_type, 'rest': rest}
        # Without examples of their own, the harness may draw an item itself only if it knows that both are one split.
        keys |= {'fewshot': fewshot if fewshot.exists() else path}
        keys['fewshot_split'] = 'fewshot' if fewshot.exists() else 'test'
        Path(folder, 'task.yaml').write_text(YAML.format(**keys))
        manager = TaskManager(include_path=folder, include_defaults=False)
        options = {'log_samples': True, 'bootstrap_iters': 0, 'limit': limit, 'apply_chat_template': chat}
        answer = lm_eval.simple_evaluate(model=lm, tasks=[name], task_manager=manager, **options)
    samples = {sample['doc_id']: sample for sample in answer['samples'][name]}  # each is there once per filter
    found = [[responses[0] for responses in samples[number]['resps']] for number in sorted(samples)]
    names = {key: key.partition(',')[0] for key in answer['results'][name] if ',none' in key}
    names |= {
        f'exact_match,{score}': score for score in ('strict_match', 'flexible_extract') if row.get('rule') == 'gsm8k'
    }
    scores = {score: answer['results'][name][key] for key, score in names.items()}
    scores = {key: score for key, score in scores.items() if score != 'N/A'}  # standard errors, without a bootstrap
    return scores, found


def our_results(out_dir, paths, folder, num_fewshot=0, batch_size=32, limit=None, chat=False):
    """Yields the same for each task by evaluate.py, started as a user starts it. folder: for the files it writes."""
    keys = {'tasks': ','.join(paths), 'num_fewshot': num_fewshot, 'batch_size': batch_size, 'samples': folder}
    keys |= {'results': f'{folder}/results.jsonl', 'dtype': 'float32', 'device': 'cpu', 'limit': limit}
    keys['apply_chat_template'] = chat
    options = [f'--{key}={value}' for key, value in keys.items()]
    run_script('evaluate.py', f'--out_dir={out_dir}', *options, timeout=7200)
    scores = [json.loads(line) for line in Path(folder, 'results.jsonl').read_text().splitlines()]
    for path, task_scores in zip(paths, scores, strict=True):
        rows = [json.loads(line) for line in Path(folder, f'{Path(path).stem}.jsonl').read_text().splitlines()]
        has_texts = 'written' in rows[0]
        found = [[row['written']] if has_texts else list(zip(row['nats'], row['greedy'], strict=True)) for row in rows]
        yield task_scores, found


def harness_model(model_folder, batch_size, is_ours):
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        sys.exit(f'error: {error}: this compares with lm_eval, `pip install lm_eval` into an environment of its own')

    options = {'device': 'cpu', 'dtype': 'float32', 'batch_size': batch_size, 'trust_remote_code': is_ours}
    return HFLM(pretrained=str(model_folder), **options)


def largest_difference(ours, theirs):
    """The largest difference of two log-likelihoods in nats. Of a text lm_eval has only the sum over its windows, so
    there the difference of the sums is divided by the number of windows."""
    differences = []
    for a, b in zip(ours, theirs, strict=True):
        if len(a) == len(b) and isinstance(b[0], (tuple, list)):
            differences += [abs(x[0] - y[0]) for x, y in zip(a, b, strict=True)]
            assert [x[1] for x in a] == [y[1] for y in b], f'greedy: {a} and {b}'
        else:
            differences.append(abs(sum(x[0] for x in a) - b[0]) / len(a))
    return max(differences)


def compare_numbers(path, scores, ours, their_scores, theirs):
    """Print how far apart the two are, and end the program if that is more than rounding."""
    n_requests, difference = sum(map(len, ours)), 0.0
    if isinstance(ours[0][0], str):
        equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
        print(f'{Path(path).stem}: {equal:,} of {n_requests:,} answers are equal to the letter')
    else:
        difference = largest_difference(ours, theirs)
        print(f'{Path(path).stem}: {n_requests:,} requests, log-likelihoods differ by up to {difference:.2g} nats')
    for name, score in their_scores.items():
        print(f'    {name}: evaluate.py {scores[name]:.6f}, lm_eval {score:.6f}')
    unequal = [name for name, score in their_scores.items() if abs(scores[name] - score) > 1e-4 * score]
    if difference > 1e-4 or unequal:
        raise SystemExit(f'they differ: {", ".join(unequal) or "log-likelihoods"}')


def compare_rates(lm, model_folder, run, path, rounds, batch_size):
    """[(our requests/s, theirs), ...], one pair per round; tokenizing is included."""
    import torch
    from lm_eval.api.instance import Instance

    from evaluation import scoring, tasks
    from runtime.opened import open_model
    from system import devices

    task = tasks.read_task(path)
    pairs = [pair for item in task.items for pair in item.pairs]
    instances = [Instance('loglikelihood', {}, pair, 0) for pair in pairs]
    devices.join_ranks(600, torch.device('cpu'))
    opened = open_model(str(run or model_folder))
    window, encoder, model = opened.positions, opened.language(), opened.empty(torch.float32, 'cpu')
    model.to_empty(device='cpu')
    opened.fill(model)
    model.eval()
    rates = []
    for _ in range(rounds):
        began = time.perf_counter()
        scoring.log_likelihoods(model, tasks.requests_of(task, encoder, window), window, batch_size, 'cpu')
        middle = time.perf_counter()
        lm.loglikelihood(instances, disable_tqdm=True)
        rates.append((len(pairs) / (middle - began), len(pairs) / (time.perf_counter() - middle)))
    return rates


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('model', help='a Hugging Face folder')
    parser.add_argument('--random', action='store_true', help='model is one of ' + ', '.join(CLASSES))
    parser.add_argument('--edges', action='store_true', help='of the task that is made: empty and long contexts')
    parser.add_argument('--run', help='the out_dir that the folder was exported from')
    parser.add_argument('--tasks', help='files of items, with commas between; one is made if there is none')
    parser.add_argument('--items', type=int, default=300, help='of the task that is made')
    parser.add_argument('--num_fewshot', type=int, default=0, help='examples before each item')
    parser.add_argument('--limit', type=int, help='only the first so many items of each task')
    parser.add_argument('--chat', action='store_true', help='by the chat template of the folder')
    parser.add_argument('--batch_size', type=int, default=32, help='requests per forward pass')
    parser.add_argument('--rounds', type=int, default=5, help='0 = compare the numbers alone')
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = arguments.tasks.split(',') if arguments.tasks else [f'{folder}/next_lines.jsonl']
        if not arguments.tasks:
            make_task(paths[0], arguments.items, arguments.edges)
        if arguments.random:
            make_model(f'{folder}/model', arguments.model)
            arguments.model = f'{folder}/model'
        lm = harness_model(arguments.model, arguments.batch_size, is_ours=bool(arguments.run))
        options = (arguments.num_fewshot, arguments.batch_size, arguments.limit, arguments.chat)
        found = our_results(arguments.run or arguments.model, paths, tempfile.mkdtemp(dir=folder), *options)
        for path, (scores, ours) in zip(paths, found, strict=True):
            compare_numbers(path, scores, ours, *harness_results(lm, path, arguments.num_fewshot, *options[2:]))
        if arguments.rounds:
            rates = compare_rates(lm, arguments.model, arguments.run, paths[0], arguments.rounds, arguments.batch_size)
            for ours, theirs in rates:
                print(f'evaluate.py {ours:8.1f} requests/s, lm_eval {theirs:8.1f}: {ours / theirs:.2f}x')
            print(f'median {statistics.median(ours / theirs for ours, theirs in rates):.2f}x')


if __name__ == '__main__':
    main()
