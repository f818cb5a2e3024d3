"""
Turn a checkpoint of any train script into a folder that `transformers` loads, with equal logits.

    python export_model.py --out_dir=out/quickstart --to=models/my-llama
    python -c "from transformers import pipeline; print(pipeline('text-generation', 'models/my-llama')('def '))"

gpt2, llama and qwen3 become the classes of that name. What transformers has no class for (enoki, gpt2 with bias=False,
...) is exported with modeling_gpt.py and model.py beside the weights, and loads with trust_remote_code=True.
The folder is loaded again before it gets its name: weights, logits and the tokens of a text must be those of here.
It takes memory for three copies of the fp32 weights. Checkpoints of DeepSpeed and of other trainers are not read.
"""

import json
import os
import re
import shutil

from configurator import configure

# --- KNOBS ------------------------------------------------------------------------------------------------------------
out_dir = 'out/quickstart'  # the run whose model is exported
step: int | None = None  # take the checkpoint of this step; None = the newest
to: str | None = None  # the folder to write; None = models/ and the name of out_dir
dtype = 'float32'  # 'float32' | 'bfloat16': of the weights; float32 is what was trained, bfloat16 half of it on disk
max_shard_size = '5GB'  # larger weights are split into files of this size and an index
data_dir: str | None = None  # where the run's dataset, and with it the tokenizer, lies; None = where the run had it
# ----------------------------------------------------------------------------------------------------------------------
config, _ = configure(globals())  # before `import torch`, so --help is quick

os.environ.setdefault('HF_HUB_OFFLINE', '1')  # all files are here
import torch
from safetensors import SafetensorError

import checkpoint
import guard
import hf
from model import GPT, ModelConfig
from tokenizer import END_OF_TEXT, ByteTokenizer, TiktokenTokenizer, tokenizer_of

guard.report_errors()
HERE = os.path.dirname(os.path.abspath(__file__))
CUSTOM_CODE = ('modeling_gpt.py', 'model.py')
# What tokenizers treat differently: contractions, long numbers, spaces, line ends, other scripts, and all of English.
SAMPLE_TEXT = (
    "It's 12345678 o'clock,\n\n\tif (x >= 0):  \r\n    \u00e9t\u00e9 \u4f60\u597d \U0001f642 <|x|>\n" + __doc__
)

# --- CHECKPOINT -------------------------------------------------------------------------------------------------------


def foreign_format(folder):
    """What lies in this folder that is no run of these scripts, in words; None if nothing is recognised."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    if any(name == 'zero_to_fp32.py' or name.startswith(('global_step', 'mp_rank_')) for name in names):
        return 'a DeepSpeed checkpoint (its own zero_to_fp32.py makes plain weights of it)'
    if '.metadata' in names and 'manifest.json' not in names or 'pytorch_model_fsdp_0' in names:
        return "another trainer's FSDP checkpoint (python -m torch.distributed.checkpoint.format_utils dcp_to_torch)"
    if 'config.json' in names:
        return 'a transformers model already'
    return None


if foreign_format(out_dir):
    raise ValueError(f'out_dir={out_dir} is {foreign_format(out_dir)}: only runs of the scripts here are exported')
if not re.fullmatch(r'\d+[KMG]B', max_shard_size):
    raise ValueError(f'max_shard_size={max_shard_size!r}: expected a number of KB, MB or GB, as in 500MB')
to = os.path.abspath(to or os.path.join('models', os.path.basename(os.path.abspath(out_dir))))
if os.path.isfile(to) or (os.path.isdir(to) and os.listdir(to)):
    raise ValueError(f'{to} exists: delete it, or name another folder with --to=FOLDER')
if step is None:
    path = checkpoint.choose(out_dir)  # a damaged one leads to the one before it, and says so
    if path is None:
        raise ValueError(f'no checkpoint in {out_dir}: train one with `python train_ddp.py CONFIG --out_dir={out_dir}`')
else:
    path = os.path.join(out_dir, 'checkpoints', f'step_{step:08d}')
    damage = checkpoint.find_damage(path) if os.path.isdir(path) else 'it is not there'
    if damage:
        there = [str(int(found.rpartition('_')[2])) for found in checkpoint.checkpoints_in(os.path.dirname(path))]
        raise ValueError(f'checkpoint {path}: {damage}; take another --step, there are {", ".join(there) or "none"}')
weights, state = checkpoint.load_weights(path)
model_config = ModelConfig(**state['identity']['model'])
if model_config.tie_embeddings:
    weights['head.weight'] = weights['embed.weight']  # a checkpoint holds tied weights once
with torch.device('meta'):
    model = GPT(model_config).eval()  # computes in fp32, whatever the weights are stored in
model.load_state_dict(weights, assign=True)  # no copy
if model_config.tie_embeddings:
    model.head.weight = model.embed.weight  # two parameters otherwise, though of one memory
del weights
print(f'{path}: {model_config.arch}, {model.parameter_counts()["total"]:,} parameters')

generator = torch.Generator().manual_seed(1337)
some_tokens = torch.randint(model_config.vocab_size, (2, min(128, model_config.block_size)), generator=generator)
with torch.no_grad():
    trained_logits = model(some_tokens)  # (2, T, vocab_size)
    model.to(getattr(torch, dtype))
    expected_logits = model(some_tokens)

# --- WRITE ------------------------------------------------------------------------------------------------------------


def find_tokenizer():
    """(the run's tokenizer, the folder of its dataset); or (None, None), and the reason is printed."""
    run = state['config']
    folder = os.path.join(data_dir or run['data_dir'], run['dataset'])
    if run['dataset'] == 'synthetic':
        print('exporting without tokenizer: the run learned random tokens (dataset=synthetic)')
        return None, None
    try:
        ours = tokenizer_of(folder)
        if ours.vocab_size > model_config.vocab_size:
            raise ValueError(f'{ours.name} in {folder} has {ours.vocab_size} tokens, more than the model')
        return ours, folder
    except (ValueError, OSError) as error:
        print(f'exporting without tokenizer: {error} (--data_dir=FOLDER says where the dataset lies)')
        return None, None


def exported_weights():
    """{name: tensor} as transformers names them: views of the model's, as far as the layout allows."""
    weights = model.state_dict()
    if hf.is_in_transformers(model_config):
        return hf.to_transformers(weights, model_config)
    rows = {name: hf.unpadded_shape(name, tensor.shape, model_config)[0] for name, tensor in weights.items()}
    return {f'model.{name}': tensor[: rows[name]] for name, tensor in weights.items()}


def write_model(folder, eot):
    """Write config.json, generation_config.json, the weights, and the code where transformers has no class."""
    import transformers

    transformers.logging.set_verbosity_error()  # what has to be said is said here
    transformers.logging.disable_progress_bar()
    generation = {'bos_token_id': eot, 'eos_token_id': eot, 'pad_token_id': eot}  # eot also starts a document
    if hf.is_in_transformers(model_config):
        their_config = hf.config_to_transformers(model_config)
    else:
        for name in CUSTOM_CODE:
            shutil.copy(os.path.join(HERE, name), folder)
        auto_map = {'AutoConfig': 'modeling_gpt.GPTConfig', 'AutoModelForCausalLM': 'modeling_gpt.GPTForCausalLM'}
        keys = {'model_type': 'native_gpt', 'auto_map': auto_map, **model_config.to_dict()}
        checkpoint.write_file(os.path.join(folder, 'config.json'), json.dumps(keys))
        their_config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
        generation['use_cache'] = False
    # No pad_token_id in here: the embedding would give this token, which is eot, no gradient.
    their_config.bos_token_id = their_config.eos_token_id = eot
    with torch.device('meta'):
        theirs = transformers.AutoModelForCausalLM.from_config(their_config, trust_remote_code=True)
    copies = {name: tensor.clone() for name, tensor in exported_weights().items()}  # safetensors takes no views
    theirs.load_state_dict(copies, assign=True)
    theirs.tie_weights()
    theirs.generation_config = transformers.GenerationConfig(**generation)
    theirs.save_pretrained(folder, max_shard_size=max_shard_size)
    for name in os.listdir(folder):  # safetensors keeps its files from everybody else
        shutil.copymode(os.path.join(folder, 'config.json'), os.path.join(folder, name))


def write_tokenizer(ours, dataset_folder, folder):
    """Write tokenizer.json and tokenizer_config.json, if they do what ours does; else print a line."""
    import tokenizers
    import transformers

    if isinstance(ours, TiktokenTokenizer) and ours.name != 'bpe':  # tiktoken's own names
        encoding = ours.encoding
        fast = hf.byte_level_bpe(encoding._mergeable_ranks, encoding._special_tokens, encoding._pat_str)
    elif isinstance(ours, ByteTokenizer):
        fast = hf.byte_level_bpe({bytes([byte]): byte for byte in range(256)}, {END_OF_TEXT: ours.eot})
    else:
        fast = tokenizers.Tokenizer.from_file(os.path.join(dataset_folder, 'tokenizer.json'))
    # The model saw no token before a text but eot: what a Hugging Face tokenizer would add there is left out.
    fast.post_processor = tokenizers.processors.TemplateProcessing('$A', '$A $B', [])
    eot = fast.id_to_token(ours.eot)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token=eot,
        eos_token=eot,
        model_max_length=model_config.block_size,
        clean_up_tokenization_spaces=False,
    )
    theirs.save_pretrained(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    ids = theirs.encode(SAMPLE_TEXT)
    if ids != ours.encode(SAMPLE_TEXT) or theirs.decode(ids) != ours.decode(ids) or theirs.eos_token_id != ours.eot:
        print(f'exporting without tokenizer: {ours.name} has no equal in transformers')
        for name in ('tokenizer.json', 'tokenizer_config.json'):
            os.remove(os.path.join(folder, name))


def check_model(folder):
    """Load the folder as a user would, and compare. Raises RuntimeError for other weights or logits."""
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype='auto', trust_remote_code=True)
    loaded = theirs.state_dict()
    for name, tensor in exported_weights().items():
        if loaded[name].dtype != tensor.dtype or not torch.equal(loaded[name], tensor):
            raise RuntimeError(f'{name} in {folder} is not what was written')
    with torch.no_grad():
        logits = theirs.float().eval()(some_tokens).logits
    largest, difference = expected_logits.abs().max(), (logits - expected_logits).abs().max()
    if not difference <= 1e-4 * largest:
        raise RuntimeError(f'logits of {folder} differ by up to {difference:.2g} of {largest:.2g}')
    equal = 'to the bit' if difference == 0 else f'within {difference:.1e} of {largest:.1f} (fp32, other order of sums)'
    rounding = (expected_logits - trained_logits).abs().max()
    rounded = '' if dtype == 'float32' else f'; the rounding to {dtype} moved them by up to {rounding:.1e}'
    print(f'loaded again as {type(theirs).__name__}: weights equal, logits equal {equal}{rounded}')


unfinished = f'{to}.tmp'  # only a whole and checked folder gets the name
try:
    shutil.rmtree(unfinished, ignore_errors=True)  # of an export that was killed
    os.makedirs(unfinished)
    tokenizer, dataset_folder = find_tokenizer()
    write_model(unfinished, tokenizer and tokenizer.eot)
    if tokenizer:
        write_tokenizer(tokenizer, dataset_folder, unfinished)
    check_model(unfinished)
    checkpoint.rename_durably(unfinished, to)
except BaseException as error:
    shutil.rmtree(unfinished, ignore_errors=True)
    if isinstance(error, (OSError, SafetensorError)):  # a full disk
        raise OSError(f'cannot write {unfinished} ({error}): name another folder with --to=FOLDER') from error
    raise
print(f'exported to {to}')
