"""
Is this checkpoint one of this run? It is if both have the same model, data, optimizer, batch and seed.

    identity = identity_of(keys, shape, train_data)         # goes into state.json with each checkpoint
    run.notes += check_resume(state, keys, identity, explicit)  # or a ValueError that says what differs
"""

import json
from types import SimpleNamespace

import optim
from configurator import refuse_gone, tagged
from keys import DANA
from knobs import shown


def identity_of(keys, shape, train_data):
    """The settings that must be the same in a checkpoint and in the run that resumes from it."""
    model = {key: value for key, value in shape.to_dict().items() if key not in tagged('may change')}
    if 'frozen_dtype' in model:  # the dtype may change between bfloat16 and float32 if no weight is rounded by it
        model['frozen_dtype'] = shape.frozen_rounding
    sizes = ('prompts_per_step', 'num_generations') if 'prompts' in keys else ('global_batch_size',)
    own = train_data.own_reward if 'prompts' in keys else None
    return {
        'model': model,
        'data': train_data.plan(keys['max_iters'], keys['global_batch_size']),
        **({'reward': own.identity} if own else {}),
        **{key: keys[key] for key in ('optimizer', *sizes, 'seed')},
    }


def in_words(keys):
    """The keys that say which data a run reads, for a message."""
    if 'prompts' in keys:
        shown = [f'prompts={",".join(keys["prompts"])}']
        how = ('prompts_chat', 'num_fewshot', 'max_new_tokens')
        return ', '.join([*shown, *(f'{key}={keys[key]}' for key in how if keys[key] not in (None, False))])
    shown = ['dataset', *(('dataset_stages', 'max_iters') if keys.get('dataset_stages') else ())]
    shown += ['windows'] if keys.get('windows') == 'documents' else []
    shown += ['packing'] if keys.get('packing') is False else []
    return ', '.join(f'{key}={keys[key]}' for key in shown)


def check_resume(saved, keys, identity, explicit):
    """
    Check that a checkpoint belongs to this run. Returns lines for the log: which keys differ from the checkpoint's, and
    before them warnings if rates of the optimizer jump.

    saved: the checkpoint's state. keys, identity: this run's. explicit: where its keys were set, as configure() has it.
    Raises ValueError if the checkpoint belongs to a different run, or is beyond max_iters.
    """
    step, before, now = saved['step'], saved['config'], json.loads(json.dumps(keys))  # as state.json has them
    was, now_is = saved['identity'].get('data'), identity.get('data')
    if isinstance(was, str):  # written by a version without mixtures
        was = [[0, {was: '1'}]]
    is_plan = isinstance(was, list) and all(isinstance(part, list) and len(part) == 2 for part in was)
    if was is not None and not (is_plan and all(isinstance(start, int | float) for start, _ in was)):
        raise ValueError('state.json: identity.data is no list of [step, shares]: copy the checkpoint again')
    if 'prompts' in now and saved['identity'].get('reward') != identity.get('reward'):
        by = [str(of.get('reward', 'the rules of its rows'))[:60] for of in (saved['identity'], identity)]
        raise ValueError(
            f'the checkpoint was trained by another reward, {by[0]}; this run has {by[1]} (reward={now["reward"]}): go '
            f'on with the file as it was, or use another --out_dir, perhaps with --init_from={keys["out_dir"]}, which '
            'begins with its weights'
        )
    was, now_is = ([stage for stage in plan or [] if stage[0] < max(step, 1)] for plan in (was, now_is))
    if was != now_is:
        other = f'this run reads {in_words(now)}'
        if in_words(before) == in_words(now):
            other = 'whose tokens are others now: it was prepared anew'
            if 'prompts' in now:
                other = 'whose rows are others now'
        raise ValueError(
            f'the checkpoint was trained on {in_words(before)}, {other}: use another --out_dir, perhaps with '
            f'--init_from={keys["out_dir"]}, which begins with its weights'
        )
    if 'inner_steps' in keys and not keys['eval_only']:  # DiLoCo's; other scripts go on with its weights and moments
        refuse_gone(before, 'the checkpoint was trained', f'begin anew with --init_from={keys["out_dir"]}')
    then = {**saved['identity'], 'data': now_is}
    of_earlier_versions = {'parametrization': 'standard', 'yarn': [], 'lora_rslora': False, 'modules_to_save': []}
    of_earlier_versions |= {'frozen_dtype': 'float32', 'n_experts': 0, 'logit_softcap': None, 'window_pattern': None}
    of_earlier_versions |= {'shared_expert_dim': 0, 'shared_expert_gate': False, 'router_scores': 'softmax'}
    of_earlier_versions |= {'router_normalize': True, 'router_scale': 1.0, 'dense_layers': 0}
    of_earlier_versions |= {'expert_groups': 1, 'groups_per_token': 1, 'rotary_share': 1.0}
    then['model'] = {**of_earlier_versions, **then.get('model', {})}
    refuse_another(then, {**identity, 'data': now_is}, keys, explicit)
    if step > keys['max_iters'] and not keys['eval_only']:
        by_epochs = explicit.get('max_iters') != 'command line' and 'num_epochs' in explicit and keys['num_epochs']
        length, key = (f' of num_epochs={by_epochs}', 'num_epochs') if by_epochs else ('', 'max_iters')
        raise ValueError(
            f'out_dir={keys["out_dir"]} is at step {step}, beyond max_iters={keys["max_iters"]}{length}: go on with a '
            f'larger --{key}, or begin another run in another --out_dir'
        )
    changed = [f'{key} {before[key]} -> {now[key]}' for key in now if key in before and before[key] != now[key]]
    if not changed:
        return []
    then = {**now, **{key: value for key, value in before.items() if value is not None}}
    rates, become = (rates_at(step, of) for of in (then, now))
    jumps = [
        f'WARNING: the {name} jumps from {was:.2e} to {become[name]:.2e} at step {step}'
        for name, was in rates.items()
        if was != become[name]
    ]
    return [*jumps, f'changed since step {step}: {", ".join(changed)}']


def refuse_another(saved, current, keys, explicit, prefix=''):
    """
    Raise ValueError for the first fact of an identity that differs: both values, who set it, and what goes on.

    saved, current: nested dicts, as {'model': {'n_layer': 12}, 'seed': 1}; what only one of them has is ignored. keys,
    explicit: as in check_resume().
    """
    for key in [key for key in current if key in saved]:
        was, now = saved[key], json.loads(json.dumps(current[key]))  # tuples become lists, as in state.json
        if isinstance(was, dict) and isinstance(now, dict):
            refuse_another(was, now, keys, explicit, f'{prefix}{key}.')
        elif was != now:
            began = keys.get('init_from', 'scratch')
            follows = f'from init_from={began}' if prefix == 'model.' and began != 'scratch' else 'nobody set it'
            who = explicit.get(key, follows)
            go_on = f'go on with --{key}={shown(was)}, or ' if key in keys else ''
            raise ValueError(
                f'the checkpoint has {prefix}{key}={was!r}, this run has {now!r} ({who}): {go_on}use another --out_dir'
            )


def learns_otherwise(saved, keys):
    """Whether a run goes on at other rates or with another loss than its checkpoint's, so that its losses until then
    say little about those that come. saved: the checkpoint's state."""
    now = json.loads(json.dumps(keys))
    before = {**now, **{key: value for key, value in saved['config'].items() if value is not None}}
    losses = any(before.get(key) != now.get(key) for key in tagged('may change'))
    return losses or rates_at(saved['step'], before) != rates_at(saved['step'], now)


def rates_at(step, keys):
    """{in words: what the optimizer's step takes from the schedules of a run with these keys}. They follow from
    max_iters where nothing else is given, so they jump if a run is made longer."""
    config = SimpleNamespace(**keys)
    rates = {'learning rate': optim.learning_rate_at(step, config), 'weight decay': config.weight_decay}
    if config.wd_ts and config.optimizer in (*DANA, 'adamw-decay'):
        rates['weight decay'] /= 1 + step / config.wd_ts
    if config.optimizer == 'ademamix':
        rates['share of the long momentum'] = min(step / config.max_iters, 1)
    return rates
