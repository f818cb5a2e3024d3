"""
Keys on the command line and in a config file, in and out of their range, and with and without effect, through
configurator.py.

The reference for a value is the range in --help, compared here. For a key without effect it is what the run does: with
another value of the key the optimizer, the schedule or the rules compute the same. Keys of sharding, LoRA and exchanges
have a table here.
"""

import contextlib
import functools
import io
import math
import sys
import types
from pathlib import Path

import conditions
import configurator
from fuzzing.cases import Refused, Wrong, check, some
from knobs import read_knobs

REPO = Path(__file__).resolve().parent.parent.parent
SCRIPTS = [path for path in sorted(REPO.glob('*.py')) if read_knobs(path)]
HUGE = (1e300, -1e300, 10**30, -(10**30))
WORDS = ('', 'x', 'auto', '[]', '1,2', '(1, 2)', '{}', '1e', '--1', '0x10', '1_0', 'None,None', "'1'", '٣', 'nan,1')


@functools.cache
def knobs_of(script):
    return read_knobs(script)


def check_keys(draw, folder):
    (check_values if some(draw, 0.6) else check_effect)(draw, folder)


# --- values -----------------------------------------------------------------------------------------------------------


def draw_number(draw, knob):
    """A number near a bound of the key, or anywhere."""
    bound = float(draw.choice(knob.bounds).split()[1]) if knob.bounds else 0.0
    near = bound + draw.choice([-1, 0, 1, -0.5, 1e-6, 0.25])
    number = draw.choice([near, near, near, draw.uniform(-5, 5), draw.randrange(-3, 5000), draw.choice(HUGE)])
    number = draw.choice([math.nan, math.inf, -math.inf]) if some(draw, 0.1) else number
    return int(number) if 'int' in knob.types and abs(number) < math.inf and some(draw, 0.8) else number


def is_wanted(knob, number):
    """Whether --help says that the key takes this number."""
    types_that_fit = {'float'} | ({'int'} if math.isfinite(number) and number == int(number) else set())
    if not types_that_fit & set(knob.types) or not abs(number) <= sys.float_info.max:
        return False
    signs = {'>=': number.__ge__, '>': number.__gt__, '<=': number.__le__, '<': number.__lt__}
    ok = True
    for sign, bound in map(str.split, knob.bounds):
        bound = float(bound) if isinstance(number, float) or '.' in bound else int(bound)
        ok &= signs[sign](bound) is True
    return ok


def configured(script, arguments):
    """(what a script's configure() returns as (config, explicit), or None; the lines that it prints)."""
    module = types.ModuleType('fuzzed')
    module.__file__, module.__doc__ = str(script), 'A script.'
    defaults = {key: knob.default for key, knob in knobs_of(script).items()}
    Config = type('Config', (), {**defaults, '__module__': 'fuzzed'})
    argv, sys.modules['fuzzed'] = sys.argv, module
    said, result = io.StringIO(), None
    try:
        sys.argv = [script.name, *arguments]
        with contextlib.redirect_stderr(said):
            result = configurator.configure(Config)
    except SystemExit as ended:
        check(ended.code == 2, 'another exit code than 2', ended.code, arguments)
    finally:
        sys.argv = argv
        del sys.modules['fuzzed']
    return result, said.getvalue()


def check_values(draw, folder):
    """Some keys of a script, all as they should be but for one at most."""
    script = draw.choice(SCRIPTS)
    knobs = {key: knob for key, knob in knobs_of(script).items() if {'int', 'float'} & set(knob.types)}
    knobs = {key: knob for key, knob in knobs.items() if not knob.choices}
    if not knobs:
        raise Refused('a script without numbers')
    given = {key: draw_number(draw, knobs[key]) for key in draw.sample([*knobs], min(len(knobs), draw.randint(1, 4)))}
    wrong = [key for key, number in given.items() if not is_wanted(knobs[key], number)]
    for key in wrong[1:]:
        del given[key]
    in_file = [key for key in given if some(draw, 0.4) and math.isfinite(given[key])]
    path = folder / 'a.py'
    path.write_text(''.join(f'{key} = {given[key]!r}\n' for key in in_file))
    arguments = [str(path), *(f'--{key}={given[key]!r}' for key in given if key not in in_file)]
    if not wrong and some(draw, 0.2):
        arguments.append(f'--{draw.choice([*knobs])}={draw.choice(WORDS)}')
        configured(script, arguments)  # whatever comes of it: no traceback
        raise Refused('a word in place of a number')
    result, said = configured(script, arguments)
    if wrong:
        check(result is None, f'{wrong[0]}={given[wrong[0]]!r} was taken', said)
        check(said.count('\n') == 1 and wrong[0] in said, 'no line that names the key', said)
        bounds = ' and '.join(knobs[wrong[0]].bounds)
        check(bounds and bounds in said, f'{wrong[0]} of {script.name}: its range is not in the line', said)
        raise Refused(said.strip())
    check(result is not None, 'a value in its range was refused', said, arguments)
    check(all(knobs[key].bounds for key in given), 'a number without a range', given)
    same = all(float(getattr(result[0], key)) == float(number) for key, number in given.items())
    check(same and set(result[1]) == set(given), 'another value', vars(result[0]), given)


# --- effects ----------------------------------------------------------------------------------------------------------

OPTIMIZERS, SCHEDULES, EXCHANGES = (
    knobs_of(REPO / 'train_diloco.py')[key].choices for key in ('optimizer', 'lr_schedule', 'exchange_dtype')
)
# What these keys are for, by --help: {key: (value, the key that decides, its values, those that read it)}.
TABLE = {
    'prefetch': (2, 'fsdp_impl', ('torch', 'manual'), ('manual',)),
    'error_feedback': (True, 'exchange_dtype', EXCHANGES, EXCHANGES[1:]),
    'lora_alpha': (3.0, 'lora_rank', (0, 1, 16), (1, 16)),
    'lora_targets': ('q_proj', 'lora_rank', (0, 1, 16), (1, 16)),
    'router_aux': (0.5, 'n_experts', (0, 8), (8,)),
    'router_z': (0.5, 'n_experts', (0, 8), (8,)),
    'router_bias': (0.5, 'n_experts', (0, 8), (8,)),
    'eval_tasks_limit': (3, 'eval_tasks', ([], ['a.jsonl']), (['a.jsonl'],)),
    'wandb_project': ('x', 'wandb_log', (False, True), (True,)),
    'async_checkpoint': (True, 'keep_checkpoints', (0, 1), (1,)),
    'val_dataset': ('x', 'eval_sequences', (0, 1), (1,)),
}


def of_optimizer(keys):
    """Weights after a few steps of the optimizer that these keys name."""
    import torch

    import optim

    torch.manual_seed(1)
    model = torch.nn.ModuleDict({'blocks': torch.nn.ModuleList([torch.nn.Linear(4, 4, bias=True)])})
    model.blocks = model['blocks']
    names = 'learning_rate beta1 beta2 weight_decay kappa delta wd_ts'.split()
    optimizer = optim.make_optimizer(model, keys['optimizer'], **{name: keys[name] for name in names})
    for _ in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def of_schedule(keys):
    """The learning rates of a run with these keys."""
    import optim

    return [optim.learning_rate_at(step, types.SimpleNamespace(**keys)) for step in range(40)]


def of_rules(keys):
    """What the published rules make of these keys."""
    from planning import rules

    explicit = {key for key in ('learning_rate', 'weight_decay') if key in keys['explicit']}
    return rules.fill_from_heads(keys, explicit)[0]


def check_effect(draw, folder):
    """One key that may be read or not: is that what the run says?"""
    script = REPO / 'train_diloco.py'
    config = types.SimpleNamespace(**{key: knob.default for key, knob in knobs_of(script).items()})
    keys, explicit = vars(config), {}
    keys |= {'learning_rate': 0.1, 'lr_decay_iters': 30, 'min_lr': 0.01, 'wd_ts': 5, 'warmup_iters': 3, 'device': 'cpu'}
    compute = draw.choice([of_optimizer, of_schedule, of_rules, None])
    if compute is None:
        key = draw.choice([*TABLE])
        value, other, choices, readers = TABLE[key]
        keys[other] = draw.choice(choices)
        is_read = keys[other] in readers
    else:
        keys['optimizer'] = draw.choice(OPTIMIZERS)
        keys['lr_schedule'] = draw.choice(SCHEDULES)
        if compute is of_rules:
            keys |= {'heads': draw.choice([None, 8]), 'arch': 'enoki', 'global_batch_size': 32, 'vocab_size': 64}
            explicit |= {name: 'command line' for name in ('learning_rate', 'weight_decay') if some(draw, 0.3)}
        key, value = draw.choice(
            {
                of_optimizer: [('beta1', 0.5), ('beta2', 0.5), ('kappa', 0.2), ('delta', 2.0), ('wd_ts', 2)],
                of_schedule: [('lr_decay_iters', 20), ('min_lr', 0.02)],
                of_rules: [('omega', 2.0), ('lr_rule', 512)],
            }[compute]
        )
        facts = {'explicit': explicit}
        try:
            is_read = compute({**keys, **facts}) != compute({**keys, **facts, key: value})
        except ValueError as error:  # there is no fit for this optimizer
            raise Refused(str(error)) from None
    keys[key] = value
    lines = conditions.without_effect(script.name, config, {key: 'command line', **explicit})
    mine = [line for line in lines if f'{key}=' in line]
    if len(mine) != (not is_read):
        raise Wrong(f'{key} is {"read" if is_read else "not read"}, and the run says {mine}: {keys["optimizer"]}')
    if mine:
        raise Refused(mine[0])
