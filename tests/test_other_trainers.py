"""other_names.py names only keys that exist, and is what error lines say."""

import re

import pytest
from launch import REPO, run_script

import other_names
from configurator import translated
from knobs import read_knobs
from other_names import OTHER_NAMES

KNOBS = {path.name: knobs for path in sorted(REPO.glob('*.py')) if (knobs := read_knobs(path))}
TRAIN_SCRIPTS = [script for script in KNOBS if script.startswith('train_')]

ROWS = [row.partition(': ') for row in re.sub(r'\n +', ' ', other_names.ROWS).strip().splitlines()]
ROWS = [(theirs.split(), answer) for theirs, _, answer in ROWS]  # (flags, answer)


def says(flag, script='train_ddp.py'):
    return translated(flag, KNOBS[script], REPO / script)


def test_a_flag_stands_in_one_row_and_its_answer_begins_with_what_it_is():
    flags = [flag for flags, _ in ROWS for flag in flags]
    assert len(flags) == len({*flags}) == len(OTHER_NAMES) > 200, {f for f in flags if flags.count(f) > 1}
    for _, answer in ROWS:
        first, _, _ = answer.partition(' ')
        assert re.match(r'`\w|always on|not here', answer) or first.strip(':,') in (*KNOBS, 'torchrun', 'a'), answer


def test_every_key_that_an_answer_names_is_one_of_the_script_that_it_names():
    """Without a script's name it is a key of train_ddp.py."""
    for flags, answer in ROWS:
        for chain, owner in re.findall(r'((?:`\w+(?:=[\w,]+)?`(?:, )?)+)(?: of (\w+\.py))?', answer):
            for key, value in re.findall(r'`(\w+)(?:=([\w,]+))?`', chain):
                knob = KNOBS[owner or 'train_ddp.py'].get(key)
                assert knob, f'{flags}: {owner or "train_ddp.py"} has no key {key}'
                assert not value or not knob.choices or value in knob.choices or value.isdigit(), (flags, key, value)
        for script, key in re.findall(r'\b(\w+\.py)\b[^.;]*? (?:--|as --)(\w+)', answer):
            assert key in KNOBS[script], f'{flags}: {script} has no key {key}'


@pytest.mark.parametrize('script', KNOBS)
def test_an_answer_names_the_owner_of_a_key_that_the_script_lacks(script):
    every = {key for knobs in KNOBS.values() for key in knobs}
    for flags, answer in ROWS:
        for key in {*re.findall(r'`(\w+)', answer)} - {*KNOBS[script]}:
            # download_model.py knows better what an output_dir is there: the key `to`, of its own.
            own = {'output_dir', 'local_dir'} if 'to' in KNOBS[script] else set()
            if key == 'init_from' and answer.startswith('`init_from`') and 'out_dir' in KNOBS[script]:
                continue  # there it is out_dir, as the next test has it
            flag = next((flag for flag in flags if flag not in {*KNOBS[script], *own}), None)
            if flag and key in every:
                assert re.search(rf'\b{key}(=[\w,]+)?(, \w+)* of \w+\.py', says(flag, script)), (
                    flag,
                    says(flag, script),
                )


@pytest.mark.parametrize(
    ('script', 'flag', 'said'),
    [
        ('train_ddp.py', 'max-lr', 'here it is learning_rate, the peak'),
        ('train_ddp.py', 'gradient_accumulation_steps', 'not here: it follows from global_batch_size'),
        ('train_ddp.py', 'epochs', 'here it is num_epochs, passes'),
        ('train_ddp.py', 'max_steps_per_epoch', 'here it is max_iters, for the whole run'),
        ('train_ddp.py', 'beta', 'here it is beta of train_dpo.py'),
        ('train_grpo.py', 'beta', 'train_grpo.py lacks'),
        ('train_distill.py', 'lmbda', 'here it is on_policy'),
        ('train_grpo.py', 'teacher_model_name_or_path', 'here it is teacher of train_distill.py'),
        ('train_ddp.py', 'num-iterations', "max_iters for nanochat's"),
        ('train_ddp.py', 'optimizer.lr', 'here it is learning_rate'),
        ('train_ddp.py', 'training.seed', 'here it is seed'),
        ('train_ddp.py', 'training.checkpointer.checkpoint_dir', 'here it is init_from'),
        ('train_ddp.py', 'lr_scheduler.warmup_steps', 'here it is warmup_iters'),
        ('train_ddp.py', 'model.lora_rank', 'here it is lora_rank'),
        ('train_ddp.py', 'model.n_heads', 'here it is init_from'),
        ('train_ddp.py', 'dataset.source', 'here it is dataset of prepare_data.py'),
        ('train_dpo.py', 'dpo_beta', 'here it is beta, 0.1'),
        ('train_dpo.py', 'fsdp_cpu_offload', 'here it is cpu_offload=params, or'),
        ('train_grpo.py', 'load_best_model_at_end', 'here it is keep_best of train_ddp.py'),
        ('evaluate.py', 'model', 'here it is out_dir: a run of any train script, or a Hugging Face folder'),
        ('sample.py', 'init_from', 'here it is out_dir: a run, or a Hugging Face folder'),
        ('sample.py', 'source', "for nanochat's base, sft and rl, which are runs here"),
        ('train_grpo.py', 'num_samples', 'here it is num_generations'),
        ('train_grpo.py', 'examples_per_step', 'here it is prompts_per_step'),
        ('evaluate.py', 'task-name', 'here it is tasks'),
        ('evaluate.py', 'max-problems', 'here it is limit'),
        ('sample.py', 'port', 'here it is web'),
        ('sample.py', 'model_step', 'here it is step'),
        ('sample.py', 'max_length', 'max_new_tokens of sample.py'),
        ('sample.py', 'num_return_sequences', 'here it is num_samples'),
        ('sample.py', 'system_prompt', 'here it is system'),
        ('sample.py', 'do_sample', 'here it is temperature'),
        ('train_ddp.py', 'dataset_name', 'here it is dataset'),
        ('train_ddp.py', 'use_peft', 'here it is lora_rank'),
        ('train_ddp.py', 'dataset_train_split', 'here it is source_split of prepare_data.py'),
        ('train_ddp.py', 'model_revision', 'here it is revision of download_model.py'),
        ('train_ddp.py', 'bos_token', 'not here: special tokens are those'),
        ('prepare_data.py', 'max_seq_length', 'here it is block_size of train_ddp.py'),
    ],
)
def test_a_flag_of_another_trainer_is_answered_in_one_line(script, flag, said):
    given = f'--{flag}=4'
    result = run_script(script, given, check=False)
    assert result.returncode == 2 and result.stderr.count('\n') == 1, result
    assert result.stderr.startswith(f'error: --{flag} is not a key of {script}: ') and said in result.stderr


@pytest.mark.parametrize('given', [['--lr', '1e-4'], ['optimizer.lr=1e-4']], ids=' '.join)
def test_it_is_answered_too_as_other_trainers_write_it(given):
    name = given[0].partition('=')[0]
    said = run_script('train_ddp.py', *given, check=False).stderr
    assert said.startswith(f'error: {name} is not a key of train_ddp.py: here it is learning_rate') and '`' not in said


def test_a_part_of_a_section_that_has_the_name_of_a_key_is_not_that_key():
    assert says('optimizer.seed') == 'here it is seed' and says('optimizer.momentum') is says('dataset.else') is None
