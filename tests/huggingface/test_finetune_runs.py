"""
Fine-tuning as a user does it: the whole way without a network, resuming, LoRA, memory and mistakes, beside peft and the
Trainer of transformers.
"""

import ctypes
import gc
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import REPO, SHARED, TINY_RUN, environment, fork_script, run_function, run_many
from outputs import as_of_step, column
from precision import apart, assert_same_run
from prepared import only
from pretrained import POSITIONS, VOCABULARY, save_model, sharded
from short import slow_but

import data
from dataset import shards
from dataset.shuffle import permuted
from huggingface import finetune, loading, self_test
from huggingface.pretrained import Pretrained
from keys import Keys
from runtime import checkpoint

# --- memory, measured in a rank ---------------------------------------------------------------------------------------


def anonymous_memory():
    """Bytes of this process that no file backs. Mapped files are in the system's cache, which gives them up on need."""
    with open('/proc/self/status') as file:
        return next(int(line.split()[1]) for line in file if line.startswith('RssAnon')) * 1024


class Growth:
    """How far anonymous memory rises above its present size. A thread looks every millisecond."""

    def __enter__(self):
        self.before = self.peak = anonymous_memory()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.stopped.wait(0.001):
            self.look()

    def look(self):
        self.peak = max(self.peak, anonymous_memory())

    def __exit__(self, *_):
        self.stopped.set()
        self.thread.join()
        self.bytes = max(self.peak, anonymous_memory()) - self.before


def build(folder, implementation):
    """(Pretrained, raw model, model to call), sharded over all ranks and on the device 'meta'."""
    pretrained = Pretrained(folder)
    with torch.device('meta'):
        raw = finetune.for_training(pretrained)
    return pretrained, raw, sharded(raw, implementation)


def measure_load(folder, implementation):
    """By how much the memory of each rank grows until the weights are loaded, and with the self-test."""
    libc, large = ctypes.CDLL(None), 1 << 16
    for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD: freed memory goes back at once
        libc.mallopt(parameter, large)
    for name in ('small', 'large'):  # the first warms up: imports, buffers of gloo, threads
        pretrained, raw, model = build(f'{folder}/{name}', implementation)
        copy = 4 * sum(parameter.numel() for parameter in raw.parameters())
        gc.collect()  # the small model: its hooks refer to it
        libc.malloc_trim(0)  # free room in the heap would hide some growth
        with Growth() as tested:
            with Growth() as loaded:
                raw.to_empty(device='cpu')
                loading.load(raw, pretrained)
            self_test.run(model, raw, pretrained, True, False, torch.device('cpu'))
        growths = [None] * dist.get_world_size()
        dist.all_gather_object(growths, (loaded.bytes, tested.bytes))
    return {'copy': copy, 'load': [growth[0] for growth in growths], 'test': [growth[1] for growth in growths]}


def measure_loss(kind, tokens, width, vocabulary):
    """Bytes by which memory grows over forward and backward of a head and its loss."""
    from loss import ChunkedCrossEntropy, cross_entropy

    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width).div_(width**0.5).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,))
    with Growth() as growth:
        if kind == 'chunked':
            loss = ChunkedCrossEntropy.apply(hidden, weight, targets, vocabulary, 0.0, True, cross_entropy)[0]
        else:
            loss = F.cross_entropy(hidden @ weight.T, targets, reduction='sum')
        growth.look()  # now all logits are still kept for backward
        loss.backward()
    return growth.bytes, loss.item()


# --- material ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def models(tmp_path_factory):
    """Folders as download_model.py leaves them."""
    folder = tmp_path_factory.mktemp('models')
    for kind in ('llama', 'gpt2'):
        save_model(folder / kind, kind)
    return folder


@pytest.fixture(scope='module')
def text(tmp_path_factory):
    """A folder of text files."""
    folder = tmp_path_factory.mktemp('text')
    for number, path in enumerate(sorted(Path(os.__file__).parent.glob('*.py'))[:20]):
        (folder / f'{number:02}.txt').write_bytes(path.read_bytes()[:4000])
    return folder


@pytest.fixture(scope='module')
def prepared(tmp_path_factory, models, text):
    """A data_dir with 'text' and 'chats'."""
    folder = tmp_path_factory.mktemp('data')
    rows = [
        {'messages': [{'role': 'user', 'content': f'What is {number}?'}, {'role': 'assistant', 'content': 'A number.'}]}
        for number in range(50)
    ]
    chats = tmp_path_factory.mktemp('chats') / 'chats.jsonl'
    chats.write_text('\n'.join(map(json.dumps, rows)))
    for source, name in ((text, 'text'), (chats, 'chats')):
        keys = [f'--name={name}', f'--tokenizer={models / "llama"}', '--val_fraction=0.2', '--num_proc=1']
        keys += ['--fold_system'] if name == 'chats' else []
        fork_script('prepare_data.py', f'--dataset={source}', f'--data_dir={folder}', *keys)
    return folder


LENGTH, SEQUENCES = 48, 12
RUN = [*TINY_RUN, f'--block_size={LENGTH}', f'--global_batch_size={SEQUENCES}', '--batch_size=2', '--dtype=float32']
RUN += ['--lr_schedule=constant', '--warmup_iters=0', '--dataset=text', '--eval_interval=0']


def newest(out_dir):
    return checkpoint.checkpoints_in(str(out_dir / 'checkpoints'))[0]


# --- offline ----------------------------------------------------------------------------------------------------------

# As sitecustomize.py on PYTHONPATH, it notes each address outside of this machine to which a process connects.
WATCH = """
import os, socket, sys
HOME = ('localhost', socket.gethostname(), '127.0.0.1', '::1', '0.0.0.0', '::', '')
def watch(event, arguments):
    if event in ('socket.connect', 'socket.sendto'):
        host = arguments[1][0] if isinstance(arguments[1], tuple) else ''  # a path: a socket of this machine
    elif event in ('socket.getaddrinfo', 'socket.gethostbyname', 'socket.gethostbyaddr'):
        host = arguments[0] or ''
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host not in HOME and not host.startswith('127.'):
        with open(os.environ['ATTEMPTS'], 'a') as file:
            file.write(f'{event} {arguments[:2]} by {sys.argv}\\n')
sys.addaudithook(watch)
"""


def without_network(folder, *command, check=True):
    """Run a command in a network namespace of its own, which has only a loopback interface."""
    (folder / 'watch').mkdir(exist_ok=True)
    (folder / 'watch' / 'sitecustomize.py').write_text(WATCH)
    env = environment(PYTHONPATH=str(folder / 'watch'), ATTEMPTS=str(folder / 'attempts'), HF_HOME=str(folder / 'hf'))
    env = {key: value for key, value in env.items() if not key.endswith('_OFFLINE')}  # the scripts have to set them
    shell = ['unshare', '-n', 'bash', '-c', 'ip link set lo up && exec "$@"', 'cut']
    result = subprocess.run(
        [*shell, *map(str, command)], env=env, cwd=REPO, capture_output=True, text=True, timeout=1200
    )
    assert not check or result.returncode == 0, f'{command}\n{result.stdout}\n{result.stderr}'
    return result


@pytest.mark.slow
def test_raw_text_to_an_exported_model_without_a_network_and_without_asking_for_one(models, text, tmp_path):
    try:
        without_network(tmp_path, 'true')
    except (AssertionError, OSError) as error:
        pytest.skip(f'networking cannot be cut here: {" ".join(str(error).split())}')
    ask = 'import socket; socket.create_connection(("192.0.2.1", 80), 1)'
    assert without_network(tmp_path, sys.executable, '-c', ask, check=False).returncode != 0, 'there is a network'
    assert '192.0.2.1' in (tmp_path / 'attempts').read_text()
    (tmp_path / 'attempts').unlink()

    def run(*command):
        return without_network(tmp_path, sys.executable, *command).stdout

    model, data_dir, out_dir, export = models / 'llama', tmp_path / 'data', tmp_path / 'out', tmp_path / 'export'
    run('download_model.py', f'--model={model}')
    run('prepare_data.py', f'--dataset={text}', f'--tokenizer={model}', f'--data_dir={data_dir}', '--name=text')
    torchrun = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2']
    keys = [f'--init_from={model}', f'--data_dir={data_dir}', f'--out_dir={out_dir}', '--max_iters=3']
    run(*torchrun, 'train_fsdp.py', *RUN, *keys)
    run('export_model.py', f'--out_dir={out_dir}', f'--to={export}')
    said = run('sample.py', f'--out_dir={out_dir}', '--prompt=def ', '--num_samples=1', '--max_new_tokens=8')
    assert said.startswith('def ')
    assert (export / 'model.safetensors').exists() and column(out_dir, 'val_loss')
    assert not (tmp_path / 'attempts').exists(), (tmp_path / 'attempts').read_text()


# --- resume -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def resumed(prepared, tmp_path_factory):
    """{name: losses} of six steps, without a break, and resumed after step 2 when init_from was no longer there."""
    folder = tmp_path_factory.mktemp('resumed')
    model = folder / 'model'
    save_model(model, 'llama')
    common = [*RUN, f'--data_dir={prepared}', f'--init_from={model}', '--checkpoint_interval=2', '--keep_checkpoints=3']
    strategies = {
        'ddp': ['train_ddp.py'],
        'torch': ['train_fsdp.py'],
        'manual': ['train_fsdp.py', '--fsdp_impl=manual'],
        'lora': ['train_fsdp.py', '--lora_rank=2', '--fsdp_impl=manual'],
        'diloco': [
            *('train_diloco.py', '--num_replicas=1', '--inner_steps=2', '--outer_lr=1', '--outer_momentum=0'),
        ],
    }

    def run(name, strategy, nproc=2, steps=6):
        script, *options = strategies[strategy]
        fork_script(script, *options, *common, f'--out_dir={folder / name}', f'--max_iters={steps}', nproc=nproc)

    run('torch', 'torch')
    run('lora', 'lora')
    run('diloco', 'diloco', steps=2)
    for name in ('weights gone', '2 ranks', '1 rank', '3 ranks'):
        as_of_step(2, folder / 'torch', folder / name)
    as_of_step(2, folder / 'lora', folder / 'lora again')
    run('lora again', 'lora')
    (model / 'model.safetensors').unlink()
    run('weights gone', 'torch', nproc=1)
    shutil.rmtree(model)
    run('2 ranks', 'torch')
    run('1 rank', 'torch', nproc=1)
    run('3 ranks', 'torch', nproc=3)
    run('diloco', 'manual', steps=4)
    run('diloco', 'ddp', steps=6)
    assert not list(folder.rglob('*.safetensors')), 'a run copies what it needs of the folder, without the weights'
    return {path.name: column(path, 'loss') for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize('case', ['weights gone', '2 ranks', '1 rank', '3 ranks', 'lora again'])
def test_a_run_goes_on_when_the_model_it_began_with_is_gone(resumed, case):
    losses, expected = resumed[case], resumed['lora' if 'lora' in case else 'torch']
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert_same_run(losses, expected)


@pytest.mark.slow
def test_a_run_goes_on_under_other_scripts_when_the_model_it_began_with_is_gone(resumed):
    assert len(resumed['diloco']) == 6
    assert_same_run(resumed['diloco'], resumed['torch'])


# --- LoRA and frozen parts --------------------------------------------------------------------------------------------

STEPS = 8
STRATEGIES = {
    'ddp': ['train_ddp.py'],
    'torch': ['train_fsdp.py', '--fsdp_impl=torch'],
    'manual': ['train_fsdp.py', '--fsdp_impl=manual'],
}
LORA = {
    'llama all': ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj'),
    'llama q_proj,v_proj': ('q_proj', 'v_proj'),
    'gpt2 all': ('c_attn', 'c_proj', 'c_fc'),
    'gpt2 c_attn': ('c_attn',),
}
FREEZE = r'embed|lm_head|layers\.0\.'


SGD = ['--optimizer=sgd', '--learning_rate=0.1', '--weight_decay=0']


def losses_of_a_plain_loop(model, prepared, by_sgd=False):
    """Losses of steps of AdamW, or else of SGD, on the trainable weights of a transformers model, with batches and
    settings of RUN."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    tables = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {'params': [p for p in trained if p.dim() > 1 and p not in tables]},
        {'params': [p for p in trained if p.dim() == 1 or p in tables], 'weight_decay': 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    if by_sgd:
        optimizer = torch.optim.SGD(trained, lr=0.1)
    train_data = data.open_dataset(prepared, 'text', 'train', LENGTH, VOCABULARY)
    batches, losses = data.batches(only(train_data), Keys.seed, 0, SEQUENCES, SEQUENCES, 0, 1, 'cpu'), []
    for x, y in itertools.islice(batches, STEPS):
        loss = F.cross_entropy(model(input_ids=x, use_cache=False).logits.flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    batches.close()
    return losses


def run_strategies(prepared, folder, model, nproc, *options):
    """{name: out_dir} of every strategy, with 3 micro-steps on 2 ranks and 6 on 1."""
    keys = [*RUN, f'--data_dir={prepared}', f'--init_from={model}', f'--max_iters={STEPS}', *options]
    run_many(
        [
            {'name': name, 'script': script, 'arguments': [*keys, *more, f'--out_dir={folder / name}']}
            for name, (script, *more) in STRATEGIES.items()
        ],
        nproc,
        folder,
    )
    return {name: folder / name for name in STRATEGIES}


@pytest.mark.parametrize('case', slow_but(['llama all'], LORA))
def test_lora_trains_as_peft_does_and_leaves_the_weights_to_the_bit(models, prepared, tmp_path, case):
    peft, transformers = pytest.importorskip('peft'), pytest.importorskip('transformers')
    kind, targets = case.split()
    model = models / kind
    options = ['--lora_rank=4', '--lora_alpha=8', f'--lora_targets={targets}']
    nproc = 1 if case == 'llama q_proj,v_proj' else 2
    out_dirs = run_strategies(prepared, tmp_path, model, nproc, *options)

    pretrained = Pretrained(model, lora_rank=4, lora_alpha=8, lora_targets=targets)
    with torch.device('meta'):
        ours = finetune.for_training(pretrained)
    ours.to_empty(device='cpu')
    loading.load(ours, pretrained, seed=Keys.seed)
    initial = {name: tensor for name, tensor in ours.state_dict().items() if 'lora_' in name}
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(LORA[case]), fan_in_fan_out=kind == 'gpt2')
    theirs = peft.get_peft_model(plain, settings)
    with torch.no_grad():
        for name, tensor in initial.items():
            theirs.get_parameter(f'base_model.model.{name}.default.weight').copy_(tensor)
    assert sum(p.requires_grad for p in theirs.parameters()) == len(initial)
    expected = losses_of_a_plain_loop(theirs, prepared)
    assert expected[-1] < expected[0] - 0.02

    for name, out_dir in out_dirs.items():
        losses = column(out_dir, 'loss')
        assert_same_run(losses, expected, name)
        weights = checkpoint.load_weights(newest(out_dir))[0]
        assert weights.keys() == initial.keys(), 'of LoRA, checkpoints hold what is trained alone'
        assert all(not torch.equal(weights[key], initial[key]) for key in initial if key.endswith('lora_B')), name
        saved = [
            key.removeprefix('optim.') for key in checkpoint.read_index(newest(out_dir)) if key.startswith('optim')
        ]
        assert {key.rpartition('.')[0] for key in saved} == initial.keys(), name


@pytest.mark.parametrize('kind, freeze', slow_but(['llama'], [('llama', FREEZE), ('gemma3', 'vision_tower|projector')]))
def test_frozen_parts_stay_to_the_bit_and_the_rest_trains_as_in_a_plain_loop(prepared, tmp_path, kind, freeze):
    """Of a multimodal model also without being asked, since text does not reach them."""
    import transformers

    model = save_model(tmp_path / 'model', kind)
    # Of Gemma 3, Adam moves weights as far as others whose gradient is nothing but rounding.
    options = [f'--freeze={freeze}'] if kind == 'llama' else SGD
    out_dirs = run_strategies(prepared, tmp_path, model, 2, *options)
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    stored = {name: tensor.clone() for name, tensor in plain.named_parameters()}
    frozen = {name for name in stored if re.search(freeze, name)}
    for name in frozen:
        plain.get_parameter(name).requires_grad_(False)
    expected = losses_of_a_plain_loop(plain, prepared, by_sgd=kind == 'gemma3')
    assert 5 < len(frozen) < len(stored) and expected[-1] < expected[0] - 0.05
    numbers = sum(stored[name].numel() for name in frozen)
    line = f'text does not reach model.vision_tower, model.multi_modal_projector: {numbers:,} parameters stay as they'
    for name, out_dir in out_dirs.items():
        losses = column(out_dir, 'loss')
        assert_same_run(losses, expected, name)
        weights = checkpoint.load_weights(newest(out_dir))[0]
        assert weights.keys() == stored.keys()
        assert {key for key in stored if torch.equal(weights[key], stored[key])} == frozen, name
        assert (line in (out_dir / 'train.log').read_text()) == (kind == 'gemma3'), name


DILOCO = {  # options -> replicas, what is trained
    'one replica': ([f'--freeze={FREEZE}', '--outer_momentum=0.9'], 1, lambda name: not re.search(FREEZE, name)),
    'lora': (['--lora_rank=4', '--optimizer=muon'], 2, lambda name: '.lora_' in name),
}


@pytest.mark.parametrize('case', slow_but(['one replica'], DILOCO))
def test_replicas_exchange_what_is_trained_and_nothing_else_drifts(models, prepared, tmp_path, case):
    """In 4 outer steps, with a momentum that would keep moving all weights that it has."""
    from safetensors.torch import load_file

    options, replicas, is_trained = DILOCO[case]
    keys = [*RUN, f'--data_dir={prepared}', f'--init_from={models / "llama"}', '--max_iters=8', '--inner_steps=2']
    keys += [f'--num_replicas={replicas}', f'--out_dir={tmp_path / "out"}', *options]
    fork_script('train_diloco.py', *keys, nproc=2)
    weights, stored = (
        checkpoint.load_weights(newest(tmp_path / 'out'))[0],
        load_file(models / 'llama/model.safetensors'),
    )
    trained = {name for name in weights if is_trained(name)}
    held = stored.keys() & weights.keys()  # empty for LoRA
    assert trained and {name for name in held if not torch.equal(weights[name], stored[name])} == trained & held
    assert all(weights[name].any() for name in trained)
    numbers = sum(weights[name].numel() for name in trained)
    sent, formula = column(tmp_path / 'out', 'diloco/bytes'), column(tmp_path / 'out', 'diloco/bytes_formula')
    assert len(sent) == 4
    if replicas == 1:
        assert not any(sent)
    elif 'sparse' in case:  # for small matrices, half of the bytes are a table of 16 bytes for each
        assert all(formula[0] < size < 0.1 * 4 * numbers for size in sent)
    else:
        assert formula == [4 * numbers] * 4  # 2 replicas send half of the adapters twice, in fp32
        assert all(4 * numbers <= size <= 4 * numbers + 32 for size in sent)
        adamw = [key.replace('/out', '/adamw') for key in keys if 'optimizer' not in key]
        fork_script('train_diloco.py', *adamw, nproc=2)  # Muon leaves LoRA's matrices to it
        losses = (column(tmp_path / name, 'loss') for name in ('out', 'adamw'))
        assert_same_run(*losses)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def large(tmp_path_factory):
    """Folders with a model of 97 million parameters, in fp32 and bf16, and with a small one.

    The large one has 80 thin blocks, because on a CPU the few blocks that each rank gathers for the self-test are in
    host memory, too.
    """
    import transformers

    folder = tmp_path_factory.mktemp('large')
    for name, blocks in (('small', 2), ('large', 80)):
        sizes = {'hidden_size': 320, 'intermediate_size': 832, 'num_attention_heads': 5, 'vocab_size': 512}
        config = transformers.LlamaConfig(num_hidden_layers=blocks, **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for dtype in (torch.float32, torch.bfloat16):
            model.to(dtype).save_pretrained(folder / str(dtype).removeprefix('torch.') / name)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    'dtype, implementation',
    [
        ('float32', 'torch'),
        ('bfloat16', 'manual'),
        pytest.param('float32', 'manual', marks=pytest.mark.slow),
        pytest.param('bfloat16', 'torch', marks=pytest.mark.slow),
    ],
)
def test_four_ranks_that_load_a_model_hold_little_more_than_one_copy(large, tmp_path, dtype, implementation):
    found = run_function(4, measure_load, large / dtype, implementation)[0]
    assert found['copy'] > 380e6
    loading, with_test = (sum(found[part]) / found['copy'] for part in ('load', 'test'))
    print(f'{dtype} {implementation}: {loading:.2f} copies while loading, {with_test:.2f} with the self-test')
    assert 1 <= loading <= 1.1, 'one copy of fp32 weights has to be there in the end'
    assert with_test <= 1.3


@pytest.mark.slow
def test_the_loss_over_a_large_vocabulary_takes_a_quarter_of_the_memory_of_all_its_logits():
    found = {kind: run_function(1, measure_loss, kind, 1024, 64, 128_256)[0] for kind in ('chunked', 'full')}
    (chunked, loss), (full, expected) = found['chunked'], found['full']
    print(f'{full / 1e6:.0f} MB with all logits, {chunked / 1e6:.0f} MB in chunks')
    assert math.isclose(loss, expected, rel_tol=apart())
    assert full >= 4 * chunked


# --- transformers' Trainer --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_fine_tuned_model_ends_where_transformers_trainer_ends(tmp_path):
    pytest.importorskip('accelerate')
    import transformers

    source = SHARED / 'data' / 'tinyshakespeare.txt'
    if not source.exists():
        pytest.skip(f'needs {source}')
    model, steps, rate, batch, length, rounds = tmp_path / 'model', 60, 3e-3, 16, 63, 4
    save_model(model, 'llama')
    keys = [f'--tokenizer={model}', f'--data_dir={tmp_path}', '--name=text', '--num_proc=1']
    fork_script('prepare_data.py', f'--dataset={source}', *keys)
    keys = [f'--init_from={model}', f'--data_dir={tmp_path}', f'--out_dir={tmp_path / "out"}', f'--max_iters={steps}']
    keys += [f'--block_size={length}', f'--batch_size={batch // 2}', f'--global_batch_size={batch}']
    keys += [f'--learning_rate={rate}', f'--eval_sequences={rounds * batch}']
    fork_script('train_fsdp.py', *RUN, *keys, nproc=2)

    train_data, val_data = (
        data.open_dataset(tmp_path, 'text', split, length, VOCABULARY) for split in ('train', 'val')
    )

    def rows(dataset, windows):
        """Examples of length + 1 tokens, since the model shifts labels itself under Trainer."""
        return [{'input_ids': row, 'labels': row} for row in torch.from_numpy(dataset.read(windows))]

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    samples = torch.arange(steps * batch).numpy()
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path / 'trainer'), max_steps=steps, per_device_train_batch_size=batch, learning_rate=rate,
        lr_scheduler_type='constant', weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, max_grad_norm=1.0,
        save_strategy='no', report_to='none', disable_tqdm=True, use_cpu=True, per_device_eval_batch_size=batch,
        remove_unused_columns=False,
    )  # fmt: skip
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    windows = permuted(samples, train_data.n_windows, Keys.seed)
    trainer = InOrder(plain, settings, train_dataset=rows(train_data, windows))
    val_rows = rows(val_data, range(rounds * batch))
    before = trainer.evaluate(val_rows)['eval_loss']
    trainer.train()
    expected, loss = trainer.evaluate(val_rows)['eval_loss'], column(tmp_path / 'out', 'val_loss')[-1]
    print(f'validation loss {before:.4f}, after training {loss:.4f}, with Trainer {expected:.4f}')
    assert expected < before - 1
    assert abs(loss / expected - 1) < 0.01


# --- conversations ----------------------------------------------------------------------------------------------------

CAPITALS = """Peru Lima, France Paris, Japan Tokyo, Egypt Cairo, Kenya Nairobi, Norway Oslo, Chile Santiago, Cuba
Havana, Spain Madrid, Italy Rome, Greece Athens, Austria Vienna, Poland Warsaw, Ireland Dublin, Portugal Lisbon,
Turkey Ankara, Iraq Baghdad, Iran Tehran, Nepal Kathmandu, Vietnam Hanoi, Ghana Accra, Canada Ottawa, Sweden
Stockholm, Finland Helsinki, Hungary Budapest, Jamaica Kingston, Senegal Dakar, Qatar Doha"""


@pytest.mark.slow
def test_a_model_answers_the_twenty_questions_that_it_was_taught(tmp_path):
    import transformers

    model, data_dir, out_dir = tmp_path / 'model', tmp_path / 'data', tmp_path / 'out'
    save_model(model, 'llama')
    config = transformers.AutoConfig.from_pretrained(model)
    config.hidden_size, config.intermediate_size, config.head_dim, config.max_position_embeddings = 64, 160, 16, 128
    config.initializer_range = 0.05
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)
    answers = {f'Capital of {country}?': capital for country, capital in map(str.split, CAPITALS.split(','))}
    rows = [
        {'messages': [{'role': 'user', 'content': question}, {'role': 'assistant', 'content': answer}]}
        for question, answer in answers.items()
    ]
    (tmp_path / 'chats.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    keys = [f'--dataset={tmp_path / "chats.jsonl"}', f'--tokenizer={model}', f'--data_dir={data_dir}', '--name=chats']
    fork_script('prepare_data.py', *keys, '--val_fraction=0.2', '--num_proc=1')
    taught = bytes(token for path in data_dir.glob('*/train_*.bin') for token in shards.read_shard(path) if token < 256)
    taught = [question for question in answers if question.encode() in taught][:20]  # the others are for validation
    assert len(taught) == 20

    keys = [f'--init_from={model}', f'--data_dir={data_dir}', f'--out_dir={out_dir}', '--dataset=chats']
    keys += ['--block_size=128', '--batch_size=4', '--global_batch_size=8', '--num_epochs=80', '--log_interval=20']
    keys += ['--lr_schedule=cosine', '--learning_rate=5e-3', '--warmup_iters=10', '--weight_decay=0.0']
    fork_script('train_fsdp.py', *RUN, *keys, nproc=2)
    (tmp_path / 'questions.jsonl').write_text('\n'.join(json.dumps({'prompt': question}) for question in taught))
    keys = [f'--out_dir={out_dir}', f'--prompts={tmp_path / "questions.jsonl"}', '--temperature=0', '--dtype=float32']
    said = [json.loads(line) for line in fork_script('sample.py', *keys)[0].stdout.splitlines()]
    assert [line['prompt'] for line in said] == taught
    right = sum(line['answer'] == answers[line['prompt']] for line in said)
    print(f'{right} of 20 answers are right')
    assert right >= 18, said


# --- new tokens -------------------------------------------------------------------------------------------------------

NEW_TOKENS_UNDER = [
    ('train_diloco.py', ['--num_replicas=1', '--inner_steps=2', '--outer_lr=1', '--outer_momentum=0']),
    ('train_deepspeed.py', ['--zero_stage=1']),
    ('train_deepspeed.py', ['--zero_stage=3']),
]
NEW = ['What is', 'A number', ' never used']  # in every row of `chats`, but for the last


@pytest.fixture(scope='module')
def with_tokens(models, tmp_path_factory):
    """{kind of model: its folder, to whose tokenizer tokens were added}, and a data_dir with `more`, which has them."""
    import transformers

    folder = tmp_path_factory.mktemp('with_tokens')
    folders = {kind: folder / kind for kind in ('llama', 'gpt2')}  # one has a head of its own, the other is tied
    for kind, place in folders.items():
        shutil.copytree(models / kind, place)
        tokenizer = transformers.AutoTokenizer.from_pretrained(place)
        assert tokenizer.add_tokens(NEW) == 3
        tokenizer.save_pretrained(place)
    rows = [{'prompt': f'What is {number}?', 'completion': f'A number: {number}.'} for number in range(50)]
    (folder / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    keys = [f'--tokenizer={folders["llama"]}', f'--data_dir={folder / "data"}', '--name=more', '--val_fraction=0.2']
    fork_script('prepare_data.py', f'--dataset={folder / "rows.jsonl"}', *keys, '--num_proc=1')
    return folders, folder / 'data'


def load_with_tokens(folder, implementation):
    """(embedding, head) with new rows, gathered from all ranks, and the line of the self-test."""
    pretrained = Pretrained(folder)
    pretrained.add_tokens(VOCABULARY + len(NEW))
    with torch.device('meta'):
        raw = finetune.for_training(pretrained)
    model = sharded(raw, implementation)
    raw.to_empty(device='cpu')
    loading.load(raw, pretrained)
    line = self_test.run(model, raw, pretrained, True, False, torch.device('cpu'))
    weights = (raw.get_input_embeddings().weight, raw.get_output_embeddings().weight)
    return [getattr(weight, 'full_tensor', lambda weight=weight: weight)().detach() for weight in weights], line


@pytest.mark.parametrize('kind', ['llama', 'gpt2'])
def test_rows_of_new_tokens_begin_as_the_mean_of_the_others_on_any_number_of_ranks(with_tokens, kind):
    import transformers

    folder = with_tokens[0][kind]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    theirs.resize_token_embeddings(VOCABULARY + len(NEW))
    expected = theirs.get_input_embeddings().weight, theirs.get_output_embeddings().weight
    for n_ranks, implementation in ((1, None), (3, 'torch'), (2, 'manual')):
        for found, line in run_function(n_ranks, load_with_tokens, str(folder), implementation):
            assert f'logits are those of {folder} (' in line
            for ours, wanted in zip(found, expected, strict=True):
                assert torch.equal(ours[:VOCABULARY], wanted[:VOCABULARY])
                assert torch.equal(ours[VOCABULARY:], ours[:VOCABULARY].double().mean(0).float().expand(3, -1))
                torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-4)  # theirs are drawn around the mean


def test_new_tokens_are_trained_resumed_and_exported(with_tokens, tmp_path):
    import transformers

    folders, data_dir = with_tokens
    keys = [*RUN, f'--data_dir={data_dir}', '--dataset=more', f'--init_from={folders["llama"]}', '--learning_rate=1e-2']
    for steps in (1, 3):
        said = fork_script('train_ddp.py', *keys, f'--out_dir={tmp_path / "ddp"}', f'--max_iters={steps}')[0].stdout
    rows = f'dataset=more has the token {VOCABULARY + 1}, the embedding of {folders["llama"]} {VOCABULARY} rows'
    assert f'{rows}: 3 new rows begin as the mean of the others' in said
    fork_script(
        'train_fsdp.py', *keys, f'--out_dir={tmp_path / "fsdp"}', '--max_iters=3', '--fsdp_impl=manual', nproc=2
    )
    fork_script('train_ddp.py', *keys, f'--out_dir={tmp_path / "native"}', '--max_iters=3', '--native=True')
    for other in ('fsdp', 'native'):
        assert_same_run(column(tmp_path / other, 'loss'), column(tmp_path / 'ddp', 'loss'), other)

    fork_script('export_model.py', f'--out_dir={tmp_path / "fsdp"}', f'--to={tmp_path / "export"}')
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'export')
    embedding, head = exported.get_input_embeddings().weight, exported.get_output_embeddings().weight
    assert exported.config.vocab_size == len(embedding) == len(head) == VOCABULARY + 3
    for weight in (embedding, head):
        assert (weight[VOCABULARY] - weight[VOCABULARY + 1]).abs().max() > 1e-3
    original = transformers.AutoModelForCausalLM.from_pretrained(folders['llama']).get_input_embeddings().weight
    torch.testing.assert_close(embedding[VOCABULARY + 2], original.mean(0))  # of the token that no text has
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / 'export')
    assert tokenizer.encode('What isA number') == [VOCABULARY, VOCABULARY + 1]


@pytest.mark.slow
@pytest.mark.parametrize(('script', 'more'), NEW_TOKENS_UNDER)
def test_new_tokens_are_trained_under_other_scripts(with_tokens, tmp_path, script, more):
    if script == 'train_deepspeed.py':
        pytest.importorskip('deepspeed')
    folders, data_dir = with_tokens
    keys = [*RUN, f'--data_dir={data_dir}', '--dataset=more', f'--init_from={folders["llama"]}', '--learning_rate=1e-2']
    for name, nproc, its in (('train_ddp.py', 1, []), (script, 2, more)):
        out_dir = tmp_path / name
        for steps in (2, 4):  # it resumes, too
            (said, *_) = fork_script(name, *keys, *its, f'--out_dir={out_dir}', f'--max_iters={steps}', nproc=nproc)
        assert ': 3 new rows begin as the mean of the others' in said.stdout
        fork_script('export_model.py', f'--out_dir={out_dir}', f'--to={out_dir}_export')
    assert_same_run(column(tmp_path / script, 'loss'), column(tmp_path / 'train_ddp.py', 'loss'), script)


def test_new_tokens_are_refused_beside_what_would_not_train_them(models, with_tokens, tmp_path):
    import transformers

    folders, data_dir = with_tokens
    keys = [
        f'--data_dir={data_dir}',
        '--dataset=more',
        f'--init_from={folders["llama"]}',
        f'--out_dir={tmp_path / "out"}',
    ]
    line = mistake('train_ddp.py', *keys, '--lora_rank=2', nproc=1)
    assert (
        'model.embed_tokens, lm_head would not be trained: --modules_to_save=embed_tokens,lm_head trains them' in line
    )
    other = shutil.copytree(folders['llama'], tmp_path / 'other')  # with the tokenizer as it was
    shutil.copyfile(models / 'llama' / 'tokenizer.json', other / 'tokenizer.json')
    line = mistake('train_ddp.py', *keys, f'--init_from={other}', nproc=1)
    assert 'has the special token What is, which' in line
    line = mistake('train_ddp.py', *keys, '--freeze=lm_head', nproc=1)
    assert 'lm_head would not be trained: leave freeze out' in line
    line = mistake('train_ddp.py', *keys, '--lora_rank=2', '--modules_to_save=lm_head', nproc=1)
    assert 'model.embed_tokens would not be trained: --modules_to_save=lm_head,embed_tokens trains them' in line
    lora = ['--lora_rank=2', '--modules_to_save=embed_tokens,lm_head', '--learning_rate=1e-2', '--max_iters=2']
    fork_script('train_ddp.py', *RUN, *keys, *lora)
    (ended,) = fork_script('export_model.py', f'--out_dir={tmp_path / "out"}', '--adapter', check=False)
    assert ended.returncode == 1 and 'adapter=True' in ended.stderr and ended.stderr.count('\n') == 1
    fork_script('export_model.py', f'--out_dir={tmp_path / "out"}', f'--to={tmp_path / "export"}')
    embedding = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'export').get_input_embeddings().weight
    assert len(embedding) == VOCABULARY + 3 and not torch.equal(embedding[VOCABULARY], embedding[VOCABULARY + 1])


@pytest.mark.parametrize(
    ('spare', 'freezes', 'expected'),
    [  # what is in the rows that had no token: zeros, noise that weight decay has shrunk, or another token's length
        (0.0, ['--lora_rank=2'], 'embed_tokens, lm_head would not be trained: --modules_to_save=embed_tokens,lm_head'),
        (1e-5, ['--freeze=embed'], 'model.embed_tokens would not be trained: leave freeze out'),
        (0.1, ['--lora_rank=2'], None),
        (0.0, ['--lora_rank=2', '--modules_to_save=embed_tokens,lm_head'], None),
        (0.0, [], None),
    ],
)
def test_a_new_token_in_a_spare_row_that_nobody_trains_is_warned_of(with_tokens, tmp_path, spare, freezes, expected):
    import transformers

    folders, data_dir = with_tokens
    model = transformers.AutoModelForCausalLM.from_pretrained(folders['llama'])
    model.resize_token_embeddings(VOCABULARY + 61, mean_resizing=False)
    torch.nn.init.normal_(model.get_input_embeddings().weight.data[VOCABULARY:], std=spare)
    padded = shutil.copytree(folders['llama'], tmp_path / 'padded')
    model.save_pretrained(padded)
    keys = [f'--data_dir={data_dir}', '--dataset=more', f'--init_from={padded}', f'--out_dir={tmp_path / "out"}']
    (ended,) = fork_script('train_ddp.py', *RUN, '--max_iters=2', '--dry_run', *keys, *freezes)
    warned = [line for line in ended.stdout.splitlines() if 'has the token' in line]
    if expected is None:
        assert not warned
        return
    assert len(warned) == 1 and expected in warned[0]
    assert warned[0].startswith(f'WARNING: dataset=more has the token {VOCABULARY + 1}, whose row in {padded} is that')


# --- mistakes ---------------------------------------------------------------------------------------------------------


def mistake(script, *arguments, nproc=2):
    """The one line about a mistake. Every rank ends with it, or with a line that points to it, and none hangs."""
    ranks = fork_script(script, *RUN, '--max_iters=2', *arguments, nproc=nproc, check=False)
    lines = []
    for number, rank in enumerate(ranks):
        assert rank.returncode == 1, (rank.returncode, rank.stdout, rank.stderr)
        assert 'Traceback' not in rank.stderr and 'step 1' not in rank.stdout, rank.stderr
        said = [line for line in rank.stderr.splitlines() if line.startswith(f'[{number}] ')]
        assert len(said) == 1, rank.stderr
        if 'stopped because another rank stopped' not in said[0]:
            lines.append(said[0].removeprefix(f'[{number}] '))
    assert len(set(lines)) == 1 and lines[0].startswith('error: '), [rank.stderr for rank in ranks]
    return lines[0]


@pytest.fixture
def model(models, tmp_path):
    """A copy of a model's folder, which tests damage."""
    return Path(shutil.copytree(models / 'llama', tmp_path / 'model'))


@pytest.fixture
def keys(prepared, model, tmp_path):
    return [f'--data_dir={prepared}', f'--out_dir={tmp_path / "out"}', f'--init_from={model}']


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def swap_tokens(model):
    vocabulary = json.loads((model / 'tokenizer.json').read_text())['model']
    first, second = sorted(vocabulary['vocab'], key=vocabulary['vocab'].get)[101:103]
    vocab = vocabulary['vocab'] | {first: vocabulary['vocab'][second], second: vocabulary['vocab'][first]}
    edit(model / 'tokenizer.json', model={**vocabulary, 'vocab': vocab})


GATED = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class GatedConfig(LlamaConfig):
    model_type = 'gated'

class GatedForCausalLM(LlamaForCausalLM):
    config_class = GatedConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].gate = torch.nn.Parameter(torch.tensor(1.0))
"""


def add_gate(model):
    (model / 'modeling_gated.py').write_text(GATED)
    classes = {'AutoConfig': 'modeling_gated.GatedConfig', 'AutoModelForCausalLM': 'modeling_gated.GatedForCausalLM'}
    edit(model / 'config.json', model_type='gated', auto_map=classes)


def lose_a_file(model):
    from safetensors.torch import load_file

    names = list(load_file(model / 'model.safetensors'))
    files = dict.fromkeys(names, 'model-00001-of-00002.safetensors') | {names[-1]: 'model-00002-of-00002.safetensors'}
    (model / 'model.safetensors').rename(model / 'model-00001-of-00002.safetensors')
    (model / 'model.safetensors.index.json').write_text(json.dumps({'metadata': {}, 'weight_map': files}))


def lose_a_tensor(model):
    from safetensors.torch import load_file, save_file

    weights = load_file(model / 'model.safetensors')
    del weights['model.layers.1.mlp.up_proj.weight']
    save_file(weights, model / 'model.safetensors', metadata={'format': 'pt'})


def make_encoder(model):
    import transformers

    transformers.BertConfig(hidden_size=40, num_hidden_layers=2, num_attention_heads=2).save_pretrained(model)


def lose_bytes(model):
    (model / 'model.safetensors').write_bytes((model / 'model.safetensors').read_bytes()[:-1000])


WEIGHTS, FETCH = 'model.safetensors', 'python download_model.py'
DAMAGED = {  # what is done to the folder `model`: (how, further words of the line)
    'no weights': (lambda model: (model / WEIGHTS).unlink(), [WEIGHTS, FETCH]),
    'a pickle': (lambda model: (model / WEIGHTS).rename(model / 'pytorch_model.bin'), ['bin', 'pickle', FETCH]),
    'no tokenizer': (lambda model: (model / 'tokenizer.json').unlink(), ['tokenizer.json', FETCH]),
    'no config': (lambda model: (model / 'config.json').unlink(), ['config.json', FETCH]),
    'another tokenizer': (swap_tokens, ['tokenizer', 'python prepare_data.py']),
    'its class reads it otherwise': (
        lambda model: edit(model / 'tokenizer_config.json', tokenizer_class='GemmaTokenizer'),
        ['GemmaTokenizer of transformers', '"tokenizer_class": "PreTrainedTokenizerFast"'],
    ),
    'a number to shard': (add_gate, ['layers.0.gate has no dimensions', 'under DDP']),
    'damaged weights': (lose_bytes, [f'/{WEIGHTS}', 'damaged', FETCH]),
    'a file is missing': (lose_a_file, ['model-00002-of-00002.safetensors', 'missing', FETCH]),
    'other shapes': (lambda model: edit(model / 'config.json', intermediate_size=80), ['(72, 40)', '(80, 40)']),
    'an encoder': (make_encoder, ['bert', 'causal']),
    'a tensor is missing': (lose_a_tensor, ['model.layers.1.mlp.up_proj.weight']),
}


@pytest.mark.parametrize('what', DAMAGED)
def test_a_folder_that_cannot_be_trained_is_named_with_what_mends_it(model, keys, what):
    harm, says = DAMAGED[what]
    harm(model)
    line = mistake('train_fsdp.py', *keys, *['--trust_remote_code'] * (harm is add_gate))
    assert all(words in line for words in says) and (str(model) in line or harm is add_gate), line


@pytest.mark.parametrize(
    ('script', 'more', 'says'),
    [
        ('fsdp', ['--init_from=models/nowhere'], ['models/nowhere', FETCH]),
        ('fsdp', ['--init_from=meta-llama/Llama-3.2-3B'], [f'{FETCH} --model=meta-llama/Llama-3.2-3B`']),
        ('fsdp', ['--init_from=nowhere'], ['nowhere', FETCH]),
        ('fsdp', [f'--block_size={POSITIONS + 1}'], [f'={POSITIONS + 1}', f'--block_size={POSITIONS} or less']),
        ('diloco', ['mine.py', '--bias=True'], ['n_layer=2: init_from', 'leave out n_layer (', 'bias (command line)']),
        ('ddp', ['mine.py', '--init_from=no/where'], ['init_from=no/where: no such folder']),  # first of all
        ('ddp', ['--init_from=resume'], ['init_from=resume: leave it out, since a run goes on']),  # as nanoGPT has it
        ('fsdp', ['--lora_rank=4', '--lora_targets=q_proj,c_attn'], ["'c_attn'", 'q_proj', 'down_proj']),
        *(('ddp', [f'--freeze={form}'], ['freeze', repr(form)]) for form in ('wte', '.', '(', '(?:.+)*-')),
        ('fsdp', ['--init_from=scratch', '--dataset=chats'], ['chats', '--init_from']),
    ],
)
def test_keys_that_a_model_cannot_have_are_said_in_one_line(keys, tmp_path, script, more, says):
    (tmp_path / 'mine.py').write_text('n_layer = 2')
    more = [tmp_path / word if word == 'mine.py' else word for word in more]
    line = mistake(f'train_{script}.py', *keys, *more, *['--num_replicas=2'] * (script == 'diloco'))
    assert all(words in line for words in says), line


def test_a_model_in_the_local_cache_is_found_by_its_name_on_the_hub(hf_home, model, keys, tmp_path):
    cached = hf_home / 'hub' / 'models--someone--tiny-llama'
    (cached / 'refs').mkdir(parents=True)
    (cached / 'refs' / 'main').write_text('0123456789abcdef0123456789abcdef01234567')
    shutil.move(model, cached / 'snapshots' / '0123456789abcdef0123456789abcdef01234567')
    fork_script('train_fsdp.py', *RUN, '--max_iters=2', *keys, '--init_from=someone/tiny-llama', nproc=2)
    assert len(column(tmp_path / 'out', 'loss')) == 2


def test_a_run_without_a_checkpoint_whose_model_is_gone(model, keys, tmp_path):
    fork_script('train_fsdp.py', *RUN, '--max_iters=1', *keys)
    shutil.rmtree(tmp_path / 'out' / 'checkpoints')
    (tmp_path / 'out' / 'metrics.jsonl').unlink()
    shutil.rmtree(model)
    line = mistake('train_fsdp.py', *keys)
    assert f'init_from={model}' in line and 'weights' in line and 'python download_model.py' in line


def test_cut_conversations_are_answered_with_a_block_size_that_the_model_takes(model, keys):
    keys = [*keys, '--dataset=chats', '--dry_run']
    rate_of_scratch = 'WARNING: learning_rate=0.0006 is meant for training from scratch'
    without_rate = [key for key in RUN if not key.startswith('--learning_rate')]
    said = fork_script('train_fsdp.py', *without_rate, *keys, '--block_size=32')[0].stdout
    assert '--block_size=39 keeps every' in said and rate_of_scratch in said
    said = fork_script('train_fsdp.py', *RUN, *keys, '--block_size=39')[0].stdout
    assert 'keeps every' not in said and rate_of_scratch not in said  # all are whole
    config = json.loads((model / 'config.json').read_text())
    (model / 'config.json').write_text(json.dumps(config | {'max_position_embeddings': 36}))
    said = fork_script('train_fsdp.py', *RUN, *keys, '--block_size=32')[0].stdout
    assert (
        'the longest conversation needs 39 tokens, block_size is 32; the model has positions for --block_size=36'
        in said
    )


def test_a_base_model_without_a_chat_template_is_exported_and_asked_with_that_of_its_data(model, keys, tmp_path):
    import transformers

    template = (model / 'chat_template.jinja').read_text()
    (model / 'chat_template.jinja').unlink()
    for name in ('config.json', 'generation_config.json', 'tokenizer_config.json'):  # it ends texts with another token
        content = json.loads((model / name).read_text())
        ends = {'eos_token': '<|endoftext|>'} if 'tokenizer' in name else {'eos_token_id': 256}
        (model / name).write_text(json.dumps({**content, **ends}))
    said = fork_script('train_ddp.py', *RUN, '--max_iters=1', '--dataset=chats', *keys)[0].stdout
    assert f'{model} has no chat template, ' in said and 'this run keeps that of the data' in said
    export = tmp_path / 'export'
    said = fork_script('export_model.py', f'--out_dir={tmp_path / "out"}', f'--to={export}')[0].stdout
    assert 'generate() also stops at <|im_end|>' in said and "the user's: ask it in that form" in said
    assert transformers.AutoTokenizer.from_pretrained(export).chat_template == template
    assert transformers.GenerationConfig.from_pretrained(export).eos_token_id == [256, 258]
    arguments = ['--prompt=What is 3?', '--system=Be kind.', '--temperature=0', '--max_new_tokens=4', '--show_ids']
    asked = fork_script('sample.py', f'--out_dir={tmp_path / "out"}', *arguments)[0].stderr
    prompt = '<|im_start|>user\nBe kind.\n\nWhat is 3?<|im_end|>\n<|im_start|>assistant\n'  # as --fold_system has it
    assert str(transformers.AutoTokenizer.from_pretrained(export).encode(prompt)) in asked
