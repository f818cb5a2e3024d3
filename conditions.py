"""
When does a run read a key? Whoever sets one in vain is told so, by without_effect().

The condition is a tag on the key's line, such as [if lora_rank], or a row of READ_IF, where no tag can say it.
"""

import os
import re
import sys
from pathlib import Path

from keys import DANA
from knobs import read_knobs, shown

# When a key is read, where no tag can say it: {scripts: {keys: (what it takes, in words; whether a run has that)}}. For
# each key that was set in vain, without_effect() of configurator.py makes a line of it. What has neither tag nor row is
# always read, or its subject refuses it.
#
# `run` has the run's final keys as attributes, run.is_given(key) says whether a key was set, and there are facts that
# are not keys:
#     transformers  a class of transformers computes the model (init_from without native)
#     has_dropout   that class has some
#     has_routers   that class is a mixture whose routers can be balanced
#     is_chat       the dataset holds conversations
#     is_hub        the dataset is one of the hub's
#     is_run        the model is that of a run
#     ends_at_s     when the Slurm job ends, inf outside of one
# A key or fact that a script lacks is None. A key whose wish is fulfilled anyway has no line: zero_stage on one rank.
#
# A key of a config file is made vain by the file itself, or by what the file could not know: a key of the command line,
# or the machine. Only of the first one it makes a line. FOLLOWS_FROM = {fact: the keys from which it follows}; '' = the
# machine decides it.
MODEL, RUN = 'init_from native', 'out_dir'
FOLLOWS_FROM = {
    'transformers': f'{MODEL} {RUN}',
    'has_dropout': MODEL,
    'has_routers': MODEL,
    'is_chat': 'dataset',
    'is_hub': 'dataset',
    'is_run': RUN,
    'eval_sequences': 'eval_sequences eval_iters',
    'ends_at_s': '',
    'device': '',
}
REFUSED = ('lora_dropout', 'lora_rslora', 'modules_to_save')  # an error: without LoRA all weights would be trained
IN_WORDS = {  # of a condition on these keys
    'lora_rank': 'with LoRA: give a --lora_rank, as 16, with a Hugging Face folder as --init_from',
    'n_experts': 'from scratch with --n_experts',
    'shared_expert_dim': 'from scratch with --n_experts and --shared_expert_dim',
    'expert_groups': 'from scratch with --n_experts and --expert_groups=2 or more',
    'temperature': 'with a --temperature above 0',
    'eval_iters': 'without --eval_iters',
    'out_dir': "with a run's folder as --out_dir",
}
READ_IF = {
    'train_': {
        'windows': ('on text: conversations are kept whole', lambda run: not run.is_chat or run.windows == 'documents'),
        'packing': (
            'on conversations, or on text with --windows=documents',
            lambda run: run.packing or run.is_chat or run.windows == 'documents' or run.prompts,
        ),
        'trust_remote_code': ('with a Hugging Face folder as --init_from', lambda run: run.transformers or run.native),
        'lr_rule': (
            'from scratch with --heads, whose rule is not asked if a learning_rate is given',
            lambda run: run.heads and not run.is_given('learning_rate'),
        ),
        'tokens_per_parameter': (
            'from scratch with --heads, if no max_iters or num_epochs is given',
            lambda run: run.heads and not run.is_given('max_iters') and not run.is_given('num_epochs'),
        ),
        'dataset': (
            'with dataset_stages that begin later than step 0',
            lambda run: not run.dataset_stages or run.dataset_stages[0][0] > 0,
        ),
        'mlp_hidden_dim': (
            'without experts, in dense_layers, or for the size of experts that get no expert_hidden_dim',
            lambda run: not run.n_experts or run.dense_layers or not run.is_given('expert_hidden_dim'),
        ),
        'router_aux router_z': (
            'in a mixture: from scratch with --n_experts, or an init_from for which transformers has a balancing loss '
            '(not with DeepSpeed)',
            lambda run: run.n_experts or run.has_routers,
        ),
        'dropout': (
            "in a class that has dropout: this one's configuration names none",
            lambda run: not run.transformers or run.has_dropout,
        ),
        'omega': (
            'in the weight decay of heads and of the DANA family, if no weight_decay is given',
            lambda run: not run.is_given('weight_decay') and (run.heads or run.optimizer in DANA),
        ),
        'kappa delta': (f'with --optimizer={", ".join(DANA)}', lambda run: run.optimizer in DANA),
        'beta1 beta2': (
            'with --optimizer=adamw, adamw-decay, ademamix or muon',
            lambda run: run.optimizer not in (*DANA, 'sgd'),
        ),
        'wd_ts': (
            f'with --optimizer=adamw-decay, {", ".join(DANA)}',
            lambda run: run.optimizer in ('adamw-decay', *DANA),
        ),
        'tf32': ('on a GPU', lambda run: run.device.startswith('cuda')),
        'stop_before_end_s': ('in a Slurm job with a time limit', lambda run: run.ends_at_s < float('inf')),
    },
    'train_grpo.py train_distill.py': {
        'dataset data_dir dataset_stages val_dataset windows eval_interval eval_sequences eval_iters '
        'global_batch_size loss_spike_guard': (
            'in scripts that learn from a dataset: here it is --prompts',
            lambda run: not run.prompts,
        ),
    },
    'train_grpo.py': {
        'epsilon epsilon_high': (
            'with --num_iterations above 1 or --sampled_logps=old',
            lambda run: run.num_iterations > 1 or run.sampled_logps == 'old',
        ),
    },
    'sample.py': {
        'num_samples': (
            'with a --temperature above 0: at 0 all samples are the same',
            lambda run: run.temperature or run.num_samples == 1,
        ),
    },
    'sample.py evaluate.py': {'step': ('for a run: a Hugging Face folder has no steps', lambda run: run.is_run)},
    'sample.py evaluate.py export_model.py': {
        'data_dir': ('for a run from scratch', lambda run: not run.transformers),
        'trust_remote_code': ('for a model of transformers', lambda run: run.transformers),
    },
    'prepare_data.py': {
        'fold_system train_on_input': ('with conversations', lambda run: run.is_chat),
        'source_config': ('with OWNER/NAME on the hub as --dataset', lambda run: run.is_hub),
    },
    'compare.py': {
        'seeds at_once': (
            'with a sweep: --sweep, recipes or sizes in a config file',
            lambda run: run.sweep or run.recipes or run.sizes,
        ),
        'inner_steps': ('with diloco among --strategies', lambda run: 'diloco' in run.strategies),
        'zero_stages': (
            'with fsdp, fsdp_manual, parallel or deepspeed among --strategies',
            lambda run: {'fsdp', 'fsdp_manual', 'parallel', 'deepspeed'} & {*run.strategies},
        ),
    },
}


class Facts:
    """A run as conditions see it: values by their names, None for one that is not there. `looked_at` are the names that
    a condition has read, which are why it holds or does not."""

    def __init__(self, values, explicit):
        self._values, self._explicit, self.looked_at = values, explicit, set()

    def __getattr__(self, name):
        self.looked_at.add(name)
        return self._values.get(name)

    def is_given(self, key):
        self.looked_at.add(key)
        return key in self._explicit


def conditions_of(key, knobs, script):
    """(what it takes, in words; whether a run, as Facts, has that) of each condition under which a script reads a key:
    the rows of READ_IF, then the key's tags. One on a key that the script lacks is none."""
    for scripts, rows in READ_IF.items():
        if script.startswith(tuple(scripts.split())):
            yield from (row for keys, row in rows.items() if key in keys.split())
    for tag in knobs[key].conditions:
        negated, on, sign, wanted = re.fullmatch(r'if (not )?(\w+)(=| != | > |)(.*)', tag).groups()
        if on in knobs:
            yield condition(on, negated or sign, wanted, knobs[on])


def condition(key, sign, wanted, knob):
    """The words and the test of a tag. sign: '' for [if KEY], 'not ', '=', ' != ' or ' > '. knob: of the key."""
    size = {'int': '=1 or more', 'float': ' above 0'}.get(knob.types[0], '')
    words, is_met = {
        '': (f'with --{key}{size}', bool),
        'not ': (f'without --{key}', lambda value: not value),
        '=': (f'with --{key}={wanted}', lambda value: str(value) == wanted),
        ' != ': (f'with another --{key} than {wanted}', lambda value: str(value) != wanted),
        ' > ': (f'with a --{key} above {wanted}', lambda value: value > float(wanted)),
    }[sign]
    # A file that turns a switch off may hold its keys for when it is turned on.
    is_kept = not sign and knob.default is False
    return IN_WORDS.get(key, words), lambda run: is_met(getattr(run, key)) or (is_kept and run.is_given(key))


def without_effect(script, config, explicit, typed=None, **facts):
    """
    Lines for the keys that were set and that this run does not read, by their conditions. [] is as it should be.

    script: the file that runs, beside this one. config, explicit: from configure(), filled in. facts: as READ_IF has
    them. typed: vars(config) as configure() returned it, if values that were set have been overwritten since.
    A key of a config file counts if the file names the script, as in a command in its comments; the file may have been
    written for another one. It does not count if a key of the command line or the machine makes it vain, of which the
    file could not know. A value that is off, and is so by default, asks for nothing. In a file no default does.
    Raises ValueError for a key of REFUSED.
    """
    path, lines = Path(__file__).with_name(script), []
    knobs = read_knobs(path) if path.exists() else {}
    for key, where in explicit.items():
        value = (typed or vars(config)).get(key)
        is_default = value == getattr(type(config), key, None)
        if key not in knobs or (is_default and not value):
            continue
        for needs, is_read in conditions_of(key, knobs, script):
            run = Facts({**vars(config), **facts}, explicit)
            if is_read(run):
                continue
            if where != 'command line' and any(not _is_of_files(name, explicit) for name in run.looked_at):
                continue
            line = f'{key}={shown(value)} has no effect here, only {needs}'
            if key in REFUSED:
                raise ValueError(f'{line}; or leave it out')
            if where == 'command line' or (not is_default and script in Path(where).read_text(encoding='utf-8')):
                lines.append(f'WARNING: {line}')
                break
    return lines


def _is_of_files(name, explicit):
    """Whether config files, or nobody, decided the value of this name in READ_IF."""
    keys = FOLLOWS_FROM.get(name, name).split()
    return bool(keys) and all(explicit.get(key) != 'command line' for key in keys)


def say_without_effect(script, config, explicit, **facts):
    """Print the lines of without_effect() on stderr, on rank 0."""
    for line in without_effect(script, config, explicit, **facts):
        if os.environ.get('RANK', '0') == '0':
            print(line, file=sys.stderr, flush=True)
