"""
Turn a checkpoint of any train script into a folder that `transformers` loads, with the same logits.

    python export_model.py --out_dir=out/quickstart --to=models/my-llama
    python -c "from transformers import pipeline; print(pipeline('text-generation', 'models/my-llama')('def '))"
    python export_model.py --out_dir=out/my_lora --to=models/my-adapter --adapter    # only what LoRA trained

A fine-tuned model (--init_from) keeps its class, its config.json and every other file of its folder. LoRA is merged
into the weights, or with --adapter written by itself in the format of `peft`.
Of the models from scratch, gpt2, llama and qwen3 (also with experts) become transformers' classes of that name. For the
others (enoki, gpt2 with bias=False, ...) transformers has no class: they are exported with modeling_gpt.py, model.py
and what that imports beside the weights, and load with trust_remote_code=True.
The script writes into a temporary folder, loads that again, compares weights, logits and the tokens of a text with its
own, and only then gives it its name. It needs memory for two copies of the fp32 weights, or three if the model was
trained from scratch.
"""

import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Literal

from conditions import say_without_effect
from configurator import configure


# --- KNOBS ------------------------------------------------------------------------------------------------------------
class Config:
    out_dir = 'out/quickstart'  # the run whose model is exported [path]
    step: int | str | None = None  # the checkpoint of this step, or 'best' (of keep_best); None = the newest [>= 0]
    to: str | None = None  # the folder to write; None = models/ and the name of out_dir [path]
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # auto: float32, or bfloat16 if little is lost
    adapter = False  # write only the trained LoRA, in peft's format; False = the whole model with LoRA merged into it
    max_shard_size = '5GB'  # larger weights are split into files of this size, with an index [if not adapter]
    data_dir: str | None = None  # data_dir with the run's dataset and its tokenizer; None = the run's own [path]
    trust_remote_code = False  # run a fine-tuned model's own Python files if transformers has no class for it


# ----------------------------------------------------------------------------------------------------------------------
config, explicit = configure(Config)  # before `import torch`, so --help is quick

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from huggingface import convert, finetune, loading, lora, rounding
from huggingface.pretrained import copy_files
from model import GPT
from pieces import is_finite
from runtime import opened as models
from system import devices, errors, files
from text.conversations import template_of
from text.tokenizer import SAMPLE_TEXT, as_file

errors.report_errors()
devices.make_compile_caches()  # torch imports its compiler to read a checkpoint
# What transformers runs where it has no class. In the exported folder these files import each other from beside them.
CUSTOM_CODE = ('huggingface/modeling_gpt.py', 'model.py', 'attention.py', 'experts.py', 'loss.py')

# --- CHECKPOINT -------------------------------------------------------------------------------------------------------


def foreign_format(folder):
    """In words, what a folder holds in place of a run of these scripts; None if it is nothing that is known here."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    if any(name == 'zero_to_fp32.py' or name.startswith(('global_step', 'mp_rank_')) for name in names):
        return 'a DeepSpeed checkpoint (its own zero_to_fp32.py makes plain weights of it)'
    if '.metadata' in names and 'manifest.json' not in names or 'pytorch_model_fsdp_0' in names:
        return "another trainer's FSDP checkpoint (python -m torch.distributed.checkpoint.format_utils dcp_to_torch)"
    if 'config.json' in names and 'checkpoints' not in names:  # a run has a config.json, too
        return 'a transformers model already'
    return None


if found := foreign_format(config.out_dir):
    raise ValueError(f'out_dir={config.out_dir} is {found}: only runs of the scripts here are exported')
if not re.fullmatch(r'\d+[KMG]B', config.max_shard_size):
    raise ValueError(f'max_shard_size={config.max_shard_size!r}: expected a number of KB, MB or GB, as in 500MB')
config.to = os.path.abspath(config.to or os.path.join('models', os.path.basename(os.path.abspath(config.out_dir))))
if os.path.isfile(config.to) or (os.path.isdir(config.to) and os.listdir(config.to)):
    raise ValueError(f'{config.to} exists: delete it, or name another folder with --to=FOLDER')
opened = models.open_model(config.out_dir, config.step, config.data_dir, trust_remote_code=config.trust_remote_code)
path, state, pretrained, weights = opened.path, opened.state, opened.pretrained, opened.weights()
model_facts, is_fine_tuned = state['identity']['model'], pretrained is not None
say_without_effect('export_model.py', config, explicit, transformers=is_fine_tuned)
if config.adapter and not model_facts.get('lora_rank'):
    raise ValueError(f'adapter=True: {config.out_dir} was trained without LoRA (lora_rank=0); leave --adapter out')
if config.adapter and state['config'].get('lora_residual'):  # a key of earlier versions that changed frozen weights
    raise ValueError(
        f'adapter=True: {config.out_dir} has other weights than init_from (lora_residual); leave --adapter out'
    )

# --- MODEL ------------------------------------------------------------------------------------------------------------
transformers = finetune.transformers_offline()
transformers.logging.set_verbosity_error()  # this script prints what the user has to know
transformers.logging.disable_progress_bar()


def change_dtype(model, to):
    """Cast the weights as from_pretrained would: what the class keeps in fp32 stays, and so do RoPE's frequencies."""
    kept = getattr(model, '_keep_in_fp32_modules_strict', None)
    if isinstance(model, GPT):
        kept = convert.kept_in_fp32(model.config)
    kept = set() if to == torch.float32 else set(kept or ())
    if to == torch.float16:
        kept |= set(getattr(model, '_keep_in_fp32_modules', None) or ())
    kept = [pattern.replace('*', '.*') for pattern in kept]
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and not any(re.search(pattern, name) for pattern in kept):
            tensor.data = tensor.data.to(to)
            if not is_finite(tensor.data):
                raise ValueError(f'dtype={config.dtype}: {name} goes beyond 65,504: use --dtype=bfloat16 or float32')


def choose_dtype():
    """The name of the dtype to write; prints how much of what fine-tuning changed survives rounding to it."""
    is_auto = config.dtype == 'auto'
    stored = str(pretrained.config.dtype).removeprefix('torch.') if is_fine_tuned else 'float32'
    wanted = stored if is_auto else config.dtype
    if wanted not in ('bfloat16', 'float16') or config.adapter or not is_fine_tuned:
        # Rounding can lose a change that is small beside its weight. An adapter's numbers are the change itself, and
        # rounding alters them by a 500th of themselves; and weights that began at random have no small change to lose.
        return 'float32' if is_auto else config.dtype
    seen = loading.seen_in_training(pretrained)
    counts = rounding.count(model, rounding.base_of(state), getattr(torch, wanted), seen)
    halves = f'--dtype={wanted} halves it'
    if model_facts.get('lora_rank'):
        halves += '; --adapter writes what LoRA has learned alone, and loses nothing'
    if counts is None:
        if is_auto:
            gone = f'the weights of init_from={state["config"]["init_from"]} are not there'
            print(f'{gone} to tell what {wanted} would lose: written in float32 ({halves})')
        return 'float32' if is_auto else wanted
    keeps = rounding.keeps_enough(counts)
    chosen = wanted if keeps or not is_auto else 'float32'
    advice = '' if keeps else f' ({halves})' if is_auto else ' (--dtype=float32 keeps what was learned)'
    print(f'{rounding.in_words(counts, wanted)}: written in {chosen}{advice}')
    return chosen


@torch.no_grad()
def logits_of(model):
    """Logits (2, T, vocab_size), always of the same tokens."""
    logits = model(some_tokens)
    return logits if isinstance(logits, torch.Tensor) else logits.logits


if is_fine_tuned:
    vocab_size, block_size = pretrained.vocab_size, pretrained.block_size
    if config.adapter and pretrained.added_rows:
        raise ValueError(
            f'adapter=True: {pretrained.added_rows} tokens have rows in the embedding that '
            f'{state["config"]["init_from"]} lacks, and peft loads an adapter beside that: leave --adapter out'
        )
    model = loading.for_inference(pretrained, weights)
else:
    weights, model_config = convert.without_multipliers(weights, opened.model_config)
    vocab_size, block_size = model_config.vocab_size, model_config.block_size
    with torch.device('meta'):
        model = GPT(model_config).eval()
    model.to_empty(device='cpu')
    model.load_state_dict(weights)
if not config.adapter:
    weights = None
parameters = sum(parameter.numel() for parameter in model.parameters())
print(f'{path}: {model_facts["arch"]}, {parameters:,} parameters')
if is_fine_tuned and (merged := loading.line_of_base(pretrained)):
    beside = (
        f'the adapter belongs to {state["config"]["init_from"]} rounded to {pretrained.frozen_rounding}, beside which '
    )
    print(f'{beside}it was trained; beside other weights its logits are others' if config.adapter else merged)
config.dtype = choose_dtype()

T = min(128, block_size or 128)
some_tokens = torch.randint(vocab_size, (2, T), generator=torch.Generator().manual_seed(1337))
trained_logits = logits_of(model)
if config.adapter:
    adapter = {name: tensor for name, tensor in weights.items() if lora.is_lora(name)}
    in_full = lora.modules_to_save(model, pretrained.modules_to_save)
    for module in in_full:
        own = model.get_submodule(module).state_dict()
        adapter |= {f'{module}.{name}': tensor for name, tensor in own.items()}
    adapter = {name: tensor.to(getattr(torch, config.dtype)) for name, tensor in adapter.items()}
    model = None  # freed before the second one is read, which takes two copies of the weights while LoRA is merged
    model = loading.for_inference(pretrained, weights | {name: tensor.float() for name, tensor in adapter.items()})
    expected_logits = logits_of(model)
else:
    change_dtype(model, getattr(torch, config.dtype))
    change_dtype(model, torch.float32)  # back to fp32 to compute with, keeping the rounded values
    expected_logits = logits_of(model)
    change_dtype(model, getattr(torch, config.dtype))

# --- WRITE ------------------------------------------------------------------------------------------------------------


def find_language():
    """The Language of a run from scratch; if it has none to export, print why and return None."""
    try:
        return opened.language()
    except (ValueError, OSError) as error:
        print(f'exporting without tokenizer: {error} (--data_dir=FOLDER says where the dataset lies)')


def exported_weights():
    """{name: tensor} under transformers' names; views of the model's tensors where the layout allows it."""
    weights = model.state_dict()
    if is_fine_tuned:
        return weights
    if convert.is_in_transformers(model_config):
        return convert.to_transformers(weights, model_config)
    return {f'model.{name}': convert.unpadded(name, tensor, model_config) for name, tensor in weights.items()}


def write_native(folder, language):
    """Write config.json, generation_config.json and the weights, and also the code if transformers has no class."""
    eot = language and language.tokenizer.eot
    bos = language.tokenizer.bos[-1] if language and language.tokenizer.bos else eot  # a document's eot starts the next
    ends = language and language.stop_tokens
    generation = {'bos_token_id': bos, 'eos_token_id': ends if ends and len(ends) > 1 else eot, 'pad_token_id': eot}
    if convert.is_in_transformers(model_config):
        their_config = convert.config_to_transformers(model_config)
    else:
        modules = '|'.join(Path(name).stem for name in CUSTOM_CODE)
        for name in CUSTOM_CODE:
            code = Path(files.ROOT, name).read_text()
            code = re.sub(f'^( *from )({modules}) import', r'\1.\2 import', code, flags=re.MULTILINE)
            files.write_file(os.path.join(folder, os.path.basename(name)), code)
        auto_map = {'AutoConfig': 'modeling_gpt.GPTConfig', 'AutoModelForCausalLM': 'modeling_gpt.GPTForCausalLM'}
        keys = {'model_type': 'native_gpt', 'auto_map': auto_map, **model_config.to_dict()}
        files.write_file(os.path.join(folder, 'config.json'), json.dumps(keys))
        their_config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
        generation['use_cache'] = False
    # No pad_token_id here: it would be eot, and transformers' embedding gives the padding token no gradient.
    their_config.bos_token_id, their_config.eos_token_id = bos, eot
    say_what_is_learned(their_config)
    with torch.device('meta'):
        theirs = transformers.AutoModelForCausalLM.from_config(their_config, trust_remote_code=True)
    copies = {name: tensor.clone() for name, tensor in exported_weights().items()}  # safetensors refuses views
    theirs.load_state_dict(copies, assign=True)
    theirs.tie_weights()
    theirs.generation_config = transformers.GenerationConfig(**generation)
    theirs.save_pretrained(folder, max_shard_size=config.max_shard_size)


def write_fine_tuned(folder):
    """Write config.json and the weights, and copy the folder's other files: tokenizer, license, code, ..."""
    if os.path.exists(os.path.join(pretrained.folder, 'generation_config.json')):
        model.generation_config = transformers.GenerationConfig()  # save_pretrained refuses some models' own
    say_what_is_learned(model.config)
    model.save_pretrained(folder, max_shard_size=config.max_shard_size)
    copy_files(pretrained.folder, folder, leave_out=('config.json',))
    if opened.has_learned_chats:
        stop_after_answers(folder)
    if state['config'].get('fold_system'):
        print("it has learned system messages as the beginning of the user's: ask it in that form")


def say_what_is_learned(their_config):
    """Let sample.py, evaluate.py and a run that begins with the folder ask it as they ask the run."""
    if opened.has_learned_chats:
        setattr(their_config, models.LEARNED_CHATS, True)


def stop_after_answers(folder):
    """Add the token with which the chat template ends an answer to those at which generate() stops. A base model that
    has learned chats names only the end of a text."""
    path, text_config = os.path.join(folder, 'generation_config.json'), pretrained.config.get_text_config()
    keys = ('bos_token_id', 'eos_token_id', 'pad_token_id')
    content = {key: getattr(text_config, key, None) for key in keys}
    if os.path.exists(path):
        content = files.read_json(path, dict, 'copy it again')
    language = opened.language()
    stops = content.get('eos_token_id')
    stops = [stop for stop in (stops if isinstance(stops, list) else [stops]) if stop is not None]
    ends = [end for end in language.end_of_answer() if end not in stops] if language.has_template else []
    if ends:
        names = ' '.join(language.tokenizer.convert_ids_to_tokens(ends))
        print(f'generation_config.json: generate() also stops at {names}, with which the chat template ends an answer')
        files.write_file(path, json.dumps({**content, 'eos_token_id': stops + ends}, indent=2) + '\n')


def for_peft(name, tensor):
    """A tensor of the adapter as peft has it: (name, tensor). peft wraps a module of experts once for each of its
    matrices, in order, and its B is (out, rank * E)."""
    place, _, own_name = name.rpartition('.')
    if place.endswith(lora.OF_EXPERTS):
        experts, _, matrices = place.removesuffix(lora.OF_EXPERTS).rpartition('.')
        module = model.get_submodule(experts)
        adapted = [
            other
            for other in lora.matrices_of_experts(module)
            if f'{experts}.{other}{lora.OF_EXPERTS}.lora_A' in adapter
        ]
        place = experts + '.base_layer' * (len(adapted) - 1 - adapted.index(matrices))
        if own_name == 'lora_B':
            tensor = tensor.unflatten(0, (len(getattr(module, matrices)), -1)).permute(1, 2, 0).flatten(1)
    return f'base_model.model.{place}.{own_name}' + ('.weight' if lora.is_lora(name) else ''), tensor


def write_adapter(folder):
    """Write adapter_config.json and adapter_model.safetensors with peft's names."""
    places = {name.removesuffix('.lora_A') for name in adapter if name.endswith('.lora_A')}
    parameters = {place.removesuffix(lora.OF_EXPERTS) for place in places if place.endswith(lora.OF_EXPERTS)}
    modules = {place for place in places if not place.endswith(lora.OF_EXPERTS)}
    if any(map(lora.matrices_of_experts, model.modules())):  # peft takes layers of these names for experts, too
        alike = {
            name for name in modules if name.endswith(('.gate_proj', '.up_proj', '.down_proj', '.w1', '.w2', '.w3'))
        }
        modules, parameters = modules - alike, parameters | {f'{name}.weight' for name in alike}
    ends = {name.rpartition('.')[2] for name in modules}  # peft finds modules by how their names end ...
    meant = {name for name, _ in model.named_modules() if name.rpartition('.')[2] in ends}
    if pretrained.yarn or pretrained.rope_theta:
        positions = {key: getattr(pretrained.config, key) for key in ('rope_parameters', 'max_position_embeddings')}
        print(f"the adapter belongs to a model with other positions: set in the base model's config.json {positions}")
    if template_of(pretrained.folder) != template_of(pretrained.weights_folder):
        print(f'the adapter has learned another chat template than the base model has: the one in {pretrained.folder}')
    alpha, rank = model_facts['lora_alpha'], model_facts['lora_rank']
    keys = {
        'peft_type': 'LORA',
        'task_type': 'CAUSAL_LM',
        'base_model_name_or_path': state['config']['init_from'],
        'r': rank,
        'lora_alpha': int(alpha) if alpha == int(alpha) else alpha,
        # Only training reads it, and beside target_parameters peft has none.
        'lora_dropout': 0.0 if parameters else state['config'].get('lora_dropout', 0.0),
        'use_rslora': pretrained.lora_rslora,
        'modules_to_save': in_full or None,
        'target_modules': sorted(ends if meant == modules else modules),  # ... or by full name
        'target_parameters': sorted(parameters) or None,
        'fan_in_fan_out': any(lora.is_conv1d(model.get_submodule(name)) for name in modules),
    }
    files.write_file(os.path.join(folder, 'adapter_config.json'), json.dumps(keys, indent=2))
    tensors = dict(for_peft(name, tensor.clone()) for name, tensor in adapter.items())  # safetensors refuses tied ones
    save_file(tensors, os.path.join(folder, 'adapter_model.safetensors'), {'format': 'pt'})


def write_tokenizer(language, folder):
    """Write tokenizer.json and tokenizer_config.json if transformers then gives the same tokens; else print a line."""
    import tokenizers

    ours = language.tokenizer
    fast = as_file(ours, language.folder)
    begin = language.begin
    eot, bos = fast.id_to_token(ours.eot), [fast.id_to_token(token) for token in begin]
    pieces = list(zip(bos, begin, strict=True))
    fast.post_processor = tokenizers.processors.TemplateProcessing([*bos, '$A'], [*bos, '$A', '$B'], pieces)
    ends = {'bos_token': bos[-1] if bos else eot, 'eos_token': eot, 'model_max_length': model_config.block_size}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, **ends)
    theirs.chat_template = language.chat_tokenizer and language.chat_tokenizer.chat_template
    theirs.save_pretrained(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    ids = theirs.encode(SAMPLE_TEXT)
    if (
        ids != [*begin, *ours.encode(SAMPLE_TEXT)]
        or theirs.decode(ids) != ours.decode(ids)
        or theirs.eos_token_id != ours.eot
    ):
        print(f'exporting without tokenizer: {ours.name} has no equal in transformers')
        for name in ('tokenizer.json', 'tokenizer_config.json'):
            os.remove(os.path.join(folder, name))


def write_older_names(folder):
    """Add the names to config.json and tokenizer_config.json that programs older than transformers 5 read."""
    for name, rename in (
        ('config.json', convert.with_older_names),
        ('tokenizer_config.json', convert.tokenizer_with_older_names),
    ):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            content = files.read_json(path, dict, 'copy it again')
            files.write_file(path, json.dumps(rename(content), indent=2, ensure_ascii=False) + '\n')


def check_model(folder):
    """Load the folder as a user would. Raises RuntimeError if weights or logits are not those that were written."""
    # Code in the folder of a model from scratch is our own, so it is trusted.
    options = {'dtype': 'auto', 'trust_remote_code': config.trust_remote_code or not is_fine_tuned}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    loaded = theirs.state_dict()
    for name, tensor in exported_weights().items():
        if loaded[name].dtype != tensor.dtype or not torch.equal(loaded[name], tensor):
            raise RuntimeError(f'{name} in {folder} is not what was written')
    change_dtype(theirs, torch.float32)
    if finetune.has_uneven_experts(theirs):
        theirs.set_experts_implementation('eager')  # one expert after the other, as a user has to, too
    compare_logits(theirs.eval())


def check_adapter(folder):
    """Read what was written and, if peft is installed, let it load the adapter onto the model it was trained for.
    Raises RuntimeError if weights or logits differ."""
    written = load_file(os.path.join(folder, 'adapter_model.safetensors'))
    for name, tensor in adapter.items():
        their_name, theirs = for_peft(name, tensor)
        if not torch.equal(written[their_name], theirs):
            raise RuntimeError(f'{name} in {folder} is not what was written')
    try:
        import peft
    except ImportError:
        print('read again: weights equal; the logits were not compared, because peft is not installed here')
        return
    base = loading.for_inference(pretrained, {name: tensor for name, tensor in weights.items() if name not in adapter})
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', FutureWarning)  # transformers warns about what peft calls
        theirs = peft.PeftModel.from_pretrained(base, folder)
    compare_logits(theirs.eval())


def compare_logits(theirs):
    """Raise RuntimeError unless the model that was loaded again has the logits of the model that was written."""
    largest, difference = expected_logits.abs().max(), (logits_of(theirs) - expected_logits).abs().max()
    if not difference <= 1e-4 * largest:
        raise RuntimeError(f'logits of {unfinished} differ by up to {difference:.2g} of {largest:.2g}')
    equal = 'to the bit' if difference == 0 else f'within {difference:.1e} of {largest:.1f} (fp32, other order of sums)'
    print(f'loaded again as {type(theirs).__name__}: weights equal, logits equal {equal}')
    if config.dtype != 'float32':
        moved = (expected_logits - trained_logits).abs().max()
        print(f'the rounding to {config.dtype} moved them by up to {moved:.1e}')


unfinished = f'{config.to}.tmp'  # a folder gets its final name only when it is complete and checked
try:
    shutil.rmtree(unfinished, ignore_errors=True)  # left by an export that was killed
    os.makedirs(unfinished)
    if config.adapter:
        write_adapter(unfinished)
        check_adapter(unfinished)
    elif is_fine_tuned:
        write_fine_tuned(unfinished)
        write_older_names(unfinished)
        check_model(unfinished)
    else:
        language = find_language()
        write_native(unfinished, language)
        if language:
            write_tokenizer(language, unfinished)
        write_older_names(unfinished)
        check_model(unfinished)
    readable = os.path.join(unfinished, 'adapter_config.json' if config.adapter else 'config.json')
    for name in os.listdir(unfinished):  # safetensors writes files that only their owner can read
        shutil.copymode(readable, os.path.join(unfinished, name))
    files.rename_durably(unfinished, config.to)
except BaseException as error:
    shutil.rmtree(unfinished, ignore_errors=True)
    if isinstance(error, (OSError, SafetensorError)):  # a full disk
        raise OSError(f'cannot write {unfinished} ({error}): name another folder with --to=FOLDER') from error
    raise
print(f'exported to {config.to}')
