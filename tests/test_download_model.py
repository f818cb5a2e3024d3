"""A model arrives whole from the hub, or one line says why it does not. The hub is a server on this machine."""

import contextlib
import fcntl
import hashlib
import http.server
import json
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from urllib.parse import urlsplit

import pytest
from launch import REPO, environment, fork_script, run_script
from short import slow_but

COMMIT = '0123456789abcdef0123456789abcdef01234567'
TOKEN = 'hf_' + 'secretsecret' * 3
WANTED = ['LICENSE.txt', 'config.json', 'generation_config.json', 'tokenizer.json', 'tokenizer_config.json']
WANTED += ['chat_template.jinja', 'modeling_tiny.py']
SHARDS = ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
INDEX = 'model.safetensors.index.json'
BLOCK = 2**24  # bytes that the script asks for at a time


class Hub:
    """The part of the hub that a download needs, over HTTP. It lists a repository and redirects large files to a second
    host.

    repositories: {name: folder}. stop_after: the second host stops sending after so many bytes of a large file.
    served: [(file, first byte)] of everything that was sent.
    """

    def __init__(self, repositories):
        self.repositories, self.stop_after, self.gated, self.listed_sizes = repositories, None, set(), {}
        self.served, self.cdn_saw_token, self.api_saw_token = [], False, False
        self.released = threading.Event()
        handler = type('Handler', (Handler,), {'hub': self})
        self.servers = [http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) for _ in range(2)]
        for server in self.servers:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        self.address, self.cdn = (f'http://127.0.0.1:{server.server_address[1]}' for server in self.servers)

    def close(self):
        self.released.set()
        for server in self.servers:
            server.shutdown()
            server.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *arguments):
        pass

    def answer(self, status, body=b'', **headers):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace('_', '-'), str(value))
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        parts = urlsplit(self.path).path.strip('/').split('/')
        if parts[0] == 'cdn':
            self.hub.cdn_saw_token |= 'Authorization' in self.headers
            return self.send_content('/'.join(parts[1:3]), '/'.join(parts[3:]), may_stop=True)
        self.hub.api_saw_token |= self.headers.get('Authorization') == f'Bearer {TOKEN}'
        if parts[:2] == ['api', 'models']:
            return self.list('/'.join(parts[2:4]), parts[-1], as_tree='tree' in parts)
        repo, name = '/'.join(parts[:2]), '/'.join(parts[4:])
        assert parts[2:4] == ['resolve', COMMIT], self.path  # every file from the commit that was listed
        if repo in self.hub.gated:
            return self.answer(401, X_Error_Code='GatedRepo', X_Error_Message=f'Access to model {repo} is restricted.')
        if is_large(name):
            return self.answer(302, Location=f'{self.hub.cdn}/cdn/{repo}/{name}')
        self.send_content(repo, name)

    def list(self, repo, revision, as_tree):
        if repo not in self.hub.repositories:
            return self.answer(404, X_Error_Code='RepoNotFound', X_Error_Message='Repository not found')
        if revision not in ('main', COMMIT):
            return self.answer(404, X_Error_Code='RevisionNotFound', X_Error_Message='Invalid rev id')
        folder = self.hub.repositories[repo]
        siblings = []
        for path in sorted(path for path in folder.rglob('*') if path.is_file()):
            name, content = str(path.relative_to(folder)), path.read_bytes()
            git = hashlib.sha1(b'blob %d\0' % len(content) + content).hexdigest()
            size = self.hub.listed_sizes.get(name, len(content))
            siblings.append({'rfilename': name, 'size': size, 'blobId': git})
            if is_large(name):
                lfs = {'size': size, 'sha256': hashlib.sha256(content).hexdigest(), 'pointerSize': 134}
                siblings[-1] |= {'blobId': '0' * 40, 'lfs': lfs}
        body = {'id': repo, 'modelId': repo, 'sha': COMMIT, 'siblings': siblings}
        if as_tree:
            body = [
                {'type': 'file', 'path': file['rfilename'], 'size': file['size'], 'oid': file['blobId']}
                for file in siblings
                if '/' not in file['rfilename']
            ]
        self.answer(200, json.dumps(body).encode(), Content_Type='application/json')

    def send_content(self, repo, name, may_stop=False):
        path = self.hub.repositories[repo] / name
        size = path.stat().st_size
        begin, end = map(int, re.fullmatch(r'bytes=(\d+)-(\d+)', self.headers['Range']).groups())
        end = min(end + 1, size)
        self.hub.served.append((name, begin))
        self.send_response(206)
        self.send_header('Content-Length', str(end - begin))
        self.send_header('Content-Range', f'bytes {begin}-{end - 1}/{size}')
        self.end_headers()
        with open(path, 'rb') as file:
            file.seek(begin)
            while piece := file.read(min(2**20, end - file.tell())):
                if may_stop and self.hub.stop_after and file.tell() > self.hub.stop_after:
                    self.hub.released.wait(60)
                    return
                try:
                    self.wfile.write(piece)
                except OSError:  # the client was killed
                    return


def requests_for(folder, names, first_byte=0):
    """What a hub has served, sorted, once these files of its folder have been fetched from that byte on."""
    return sorted((name, begin) for name in names for begin in range(first_byte, (folder / name).stat().st_size, BLOCK))


def is_large(name):
    return name.endswith(('.safetensors', '.bin', '.pth', '.onnx'))


@pytest.fixture(scope='session')
def tiny_llama(tmp_path_factory):
    """A repository with a 42 MB Llama in two shards, a trained BPE, and what else a real one has."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp('repository')
    sizes = {'hidden_size': 512, 'intermediate_size': 1024, 'num_hidden_layers': 4, 'num_attention_heads': 8}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, num_key_value_heads=8, **sizes))
    model.save_pretrained(folder, max_shard_size='24MB')
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([(REPO / 'model.py').read_text()], vocab_size=300)
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer).save_pretrained(folder)
    (folder / 'LICENSE.txt').write_text('Do as you like.\n')
    (folder / 'chat_template.jinja').write_text('{{ messages[0].content }}')
    (folder / 'modeling_tiny.py').write_text('raise SystemExit("never run by a download")\n')
    extras = ['README.md', 'pytorch_model.bin', 'consolidated.safetensors', 'model.fp16.safetensors', '.gitattributes']
    extras += ['original/consolidated.00.pth', 'original/tokenizer.model', 'onnx/model.onnx', 'tokenizer/vocab.json']
    for name in extras:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b'a duplicate')
    assert {*WANTED, *SHARDS, INDEX} <= {path.name for path in folder.iterdir()}
    return folder


@pytest.fixture
def hub(tiny_llama):
    server = Hub({'meta-llama/Tiny-Llama': tiny_llama})
    yield server
    server.close()


def settings(hub, tmp_path, **changes):
    """Environment variables that lead to this test's hub, with a token and a cache of its own."""
    quiet = {'HF_HUB_DISABLE_TELEMETRY': '1', 'HF_HUB_OFFLINE': '0', 'NO_PROXY': '127.0.0.1'}
    return {'HF_ENDPOINT': hub.address, 'HF_HOME': str(tmp_path / 'hf_home'), 'HF_TOKEN': TOKEN, **quiet, **changes}


def download(hub, tmp_path, *more, model='meta-llama/Tiny-Llama', check=True, **changes):
    arguments = [f'--model={model}', f'--to={tmp_path / "model"}', *more]
    return run_script('download_model.py', *arguments, check=check, timeout=600, **settings(hub, tmp_path, **changes))


def check_folder(folder, check=True):
    """The check of a folder, which needs no network."""
    return fork_script('download_model.py', f'--model={folder}', check=check, HF_HUB_OFFLINE='1')[0]


def error_line(result):
    """The one line of a failed run."""
    assert result.returncode != 0, result.stdout
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and 'error:' in lines[0], result.stderr
    assert TOKEN not in result.stdout + result.stderr
    return lines[0]


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope='session')
def downloaded(tiny_llama, tmp_path_factory):
    """A finished download, for tests that copy it: (its folder, what was printed, what the hub has sent)."""
    folder, server = tmp_path_factory.mktemp('downloaded'), Hub({'meta-llama/Tiny-Llama': tiny_llama})
    said = download(server, folder).stdout
    server.close()
    return folder / 'model', said, server.served


@pytest.fixture
def copy(downloaded, tmp_path):
    """A copy of the finished download, to be damaged."""
    (tmp_path / 'model').mkdir()
    for path in downloaded[0].iterdir():
        (tmp_path / 'model' / path.name).write_bytes(path.read_bytes())
    return tmp_path / 'model'


# --- download ---------------------------------------------------------------------------------------------------------


def test_only_what_is_needed_arrives_verified_and_recorded(tiny_llama, downloaded):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, said, served = downloaded
    needed = {*WANTED, *SHARDS, INDEX}
    assert {path.name for path in folder.iterdir()} == {*needed, 'download.json'}
    assert sorted(served) == requests_for(tiny_llama, needed)  # every byte once
    record = json.loads((folder / 'download.json').read_text())
    assert (record['repo'], record['revision']) == ('meta-llama/Tiny-Llama', COMMIT)
    for name in needed:
        content = (folder / name).read_bytes()
        assert content == (tiny_llama / name).read_bytes() and not (folder / name).is_symlink()
        assert record['files'][name] == {'size': len(content), 'sha256': hashlib.sha256(content).hexdigest()}
    theirs, ours = (AutoModelForCausalLM.from_pretrained(path) for path in (tiny_llama, folder))
    tokens = torch.tensor([AutoTokenizer.from_pretrained(folder).encode('def hook(kind):')])
    assert torch.equal(theirs(tokens).logits, ours(tokens).logits)
    assert f'{sum(p.numel() for p in ours.parameters()):,} parameters in float32' in said
    assert 'LlamaForCausalLM' in said and COMMIT in said


@pytest.mark.slow
def test_the_token_goes_to_the_hub_alone_and_into_no_file(hub, tmp_path):
    result = download(hub, tmp_path)
    assert hub.api_saw_token and not hub.cdn_saw_token
    assert TOKEN not in result.stdout + result.stderr
    for path in tmp_path.rglob('*'):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_the_default_folder_is_named_after_the_model(hub, tmp_path):
    model = '--model=meta-llama/Tiny-Llama'
    run_script('download_model.py', model, cwd=tmp_path, **settings(hub, tmp_path))
    assert (tmp_path / 'models' / 'Tiny-Llama' / 'download.json').exists()


@pytest.mark.slow
def test_a_killed_download_goes_on_within_the_file(hub, tiny_llama, tmp_path):
    hub.stop_after = BLOCK + 2**20
    folder = tmp_path / 'model'
    command = [sys.executable, 'download_model.py', '--model=meta-llama/Tiny-Llama', f'--to={folder}']
    process = subprocess.Popen(command, cwd=REPO, env=environment(**settings(hub, tmp_path)))
    deadline = time.monotonic() + 300
    while not any(path.stat().st_size > 2**20 for path in folder.glob('*.part')) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    (part,) = (path for path in folder.glob('*.part') if path.stat().st_size > 2**20)
    arrived, before = part.stat().st_size, len(hub.served)
    assert not (folder / 'download.json').exists()
    assert 'not finished' in error_line(check_folder(folder, check=False))

    hub.stop_after = None
    download(hub, tmp_path)
    rest = [SHARDS[1], *(name for name in WANTED if name > SHARDS[0])]
    expected = requests_for(tiny_llama, [SHARDS[0]], arrived) + requests_for(tiny_llama, rest)
    assert sorted(hub.served[before:]) == sorted(expected)  # no byte that had arrived is sent again
    assert (folder / SHARDS[0]).read_bytes() == (tiny_llama / SHARDS[0]).read_bytes()
    assert not list(folder.glob('*.part')) and not (folder / 'download.unfinished').exists()
    check_folder(folder)


@pytest.mark.slow
def test_a_damaged_part_is_noticed_and_the_next_run_begins_that_file_anew(hub, tiny_llama, tmp_path):
    sha256 = hashlib.sha256((tiny_llama / SHARDS[1]).read_bytes()).hexdigest()
    download(hub, tmp_path)
    (tmp_path / 'model' / SHARDS[1]).unlink()
    (tmp_path / 'model' / f'{SHARDS[1]}.{sha256[:16]}.part').write_bytes(bytes(1000))
    assert 'arrived damaged' in error_line(download(hub, tmp_path, check=False))
    download(hub, tmp_path)
    assert (tmp_path / 'model' / SHARDS[1]).read_bytes() == (tiny_llama / SHARDS[1]).read_bytes()


@pytest.mark.parametrize('name', slow_but([SHARDS[1]], [SHARDS[1], 'tokenizer.json']))
def test_a_flipped_byte_is_found_and_mended_by_the_command_that_is_named(hub, tiny_llama, copy, tmp_path, name):
    flip_a_byte(copy / name)
    line = error_line(check_folder(copy, check=False))
    assert name in line and 'sha256' in line
    arguments = re.search(r'`python download_model.py (.*)`', line)[1].split()
    run_script('download_model.py', *arguments, **settings(hub, tmp_path))
    assert sorted(hub.served) == requests_for(tiny_llama, [name])  # nothing else was fetched
    assert (copy / name).read_bytes() == (tiny_llama / name).read_bytes()
    check_folder(copy)


def test_a_complete_folder_is_only_verified(hub, copy, tmp_path):
    download(hub, tmp_path)
    assert hub.served == []


def test_a_folder_on_this_machine_is_checked_where_it_lies(copy, tmp_path):
    other = tmp_path / 'other'
    line = error_line(run_script('download_model.py', f'--model={copy}', f'--to={other}', check=False))
    assert f'model={copy} is a folder here, and is checked where it lies: leave out --to={other}' in line
    assert not other.exists()
    line = error_line(run_script('download_model.py', f'--model={copy}', '--revision=v2', check=False))
    assert 'is checked where it lies: leave out --revision=v2' in line


def test_a_folder_with_anything_else_in_it_is_left_alone(hub, copy, tmp_path):
    (copy / 'download.json').unlink()  # as in the folder of a model that was trained here
    flip_a_byte(copy / SHARDS[0])
    before = contents(copy)
    line = error_line(download(hub, tmp_path, check=False))
    assert str(copy) in line and '--to=' in line and contents(copy) == before


@pytest.mark.slow
def test_weights_of_an_older_revision_do_not_stay_beside_the_new_ones(hub, copy, tmp_path):
    (copy / 'model.safetensors').write_bytes(b'transformers would prefer this file to the shards')
    download(hub, tmp_path)
    assert not (copy / 'model.safetensors').exists()
    check_folder(copy)


@pytest.mark.slow
def test_a_terminal_shows_a_bar_over_all_bytes(hub, tmp_path):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack('4H', 24, 100, 0, 0))  # a bar wants columns
    command = [sys.executable, 'download_model.py', '--model=meta-llama/Tiny-Llama', f'--to={tmp_path / "model"}']
    process = subprocess.Popen(
        command, cwd=REPO, env=environment(**settings(hub, tmp_path)), stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    screen = b''
    with contextlib.suppress(OSError), os.fdopen(ours, 'rb', buffering=0) as terminal:  # it ends in an error on Linux
        while piece := terminal.read(2**16):
            screen += piece
    assert process.wait() == 0
    assert re.search(r'downloading: +\d+%.*/43\.2M ', screen.decode())


# --- bad input --------------------------------------------------------------------------------------------------------


def test_a_gated_model_names_the_license_page_and_the_login(hub, tmp_path):
    hub.gated.add('meta-llama/Tiny-Llama')
    for token in ('', TOKEN):
        line = error_line(download(hub, tmp_path, check=False, HF_TOKEN=token))
        assert 'https://huggingface.co/meta-llama/Tiny-Llama' in line and '`hf auth login`' in line


def test_a_missing_model_or_revision(hub, tmp_path):
    line = error_line(download(hub, tmp_path, model='meta-llama/Tiny-Lama', check=False))
    assert 'model=meta-llama/Tiny-Lama' in line
    line = error_line(download(hub, tmp_path, '--revision=v9', check=False))
    assert 'revision=v9' in line and '--revision=main' in line
    line = error_line(run_script('download_model.py', '--model=/no/such/folder', check=False))
    assert '/no/such/folder' in line and 'OWNER/NAME' in line
    for name in ('models/none', 'OWNER/NAME'):  # which the hub is not asked for
        line = error_line(run_script('download_model.py', f'--model={name}', check=False))
        assert f'model={name}: there is no such folder (models holds: ' in line and '--model=Hugging' in line
    assert not (tmp_path / 'model').exists()


@pytest.mark.parametrize('how', ['no server', 'HF_HUB_OFFLINE'])
def test_without_a_network_it_says_where_to_run(hub, tmp_path, how):
    changes = {'HF_ENDPOINT': 'http://127.0.0.1:9'} if how == 'no server' else {'HF_HUB_OFFLINE': '1'}
    line = error_line(download(hub, tmp_path, check=False, **changes))
    assert 'cannot be reached' in line and 'login node' in line
    assert not (tmp_path / 'model').exists()


def test_a_token_that_is_no_header_is_not_quoted(hub, tmp_path):
    line = error_line(download(hub, tmp_path, check=False, HF_TOKEN=f'{TOKEN}\vpasted'))
    assert 'header' in line and TOKEN not in line and 'pasted' not in line


def test_a_repository_without_safetensors_tokenizer_or_config_is_refused_before_any_file(hub, tiny_llama, tmp_path):
    needed = {'config.json': 'config.json', 'model.safetensors': 'pytorch_model.bin', 'tokenizer.json': 'tokenizer'}
    for absent, word in needed.items():
        (tmp_path / absent).mkdir()
        for name in {*needed, 'pytorch_model.bin'} - {absent}:
            (tmp_path / absent / name).write_bytes(b'{}')
        hub.repositories['some/model'] = tmp_path / absent
        assert word in error_line(download(hub, tmp_path, model='some/model', check=False))
    assert hub.served == [] and not (tmp_path / 'model').exists()


def test_an_adapter_is_named_as_one_with_the_command_that_merges_it(hub, tmp_path):
    (tmp_path / 'adapter').mkdir()
    for name in ('adapter_config.json', 'adapter_model.safetensors', 'tokenizer.json'):
        (tmp_path / 'adapter' / name).write_bytes(b'{}')
    hub.repositories['some/adapter'] = tmp_path / 'adapter'
    for result, place in (
        (download(hub, tmp_path, model='some/adapter', check=False), 'some/adapter'),
        (check_folder(tmp_path / 'adapter', check=False), tmp_path / 'adapter'),
    ):
        line = error_line(result)
        assert (
            f'{place} is an adapter of peft, not a model' in line
            and f'"{place}", dtype="float32").merge_and_unload()' in line
        )


def test_a_disk_that_is_too_small_is_noticed_before_the_weights(hub, tmp_path):
    hub.listed_sizes[SHARDS[0]] = 10**18
    line = error_line(download(hub, tmp_path, check=False))
    assert '1000000000.' in line and 'free' in line and '--to=' in line
    assert {name for name, _ in hub.served} == {INDEX}


def test_a_second_process_does_not_write_into_the_same_folder(hub, tmp_path):
    hub.stop_after = 2**20
    command = [sys.executable, 'download_model.py', '--model=meta-llama/Tiny-Llama', f'--to={tmp_path / "model"}']
    process = subprocess.Popen(command, cwd=REPO, env=environment(**settings(hub, tmp_path)))
    while not any(name == SHARDS[0] for name, _ in hub.served) and process.poll() is None:
        time.sleep(0.05)
    line = error_line(download(hub, tmp_path, check=False))
    process.kill()
    process.wait()
    assert 'another process' in line


# --- the check of a folder --------------------------------------------------------------------------------------------


@pytest.mark.parametrize('recorded', [True, False], ids=['downloaded', 'copied'])
@pytest.mark.parametrize(
    'damage', ['no shard', 'cut shard', 'text as shard', 'no tokenizer', 'no config', 'text as config', 'no weights']
)
def test_a_damaged_folder_is_refused_by_file_and_with_a_command(copy, damage, recorded):
    if not recorded:
        (copy / 'download.json').unlink()
    shard, tokenizer, model_config = copy / SHARDS[0], copy / 'tokenizer.json', copy / 'config.json'
    if damage == 'no shard':
        shard.unlink()
    elif damage == 'cut shard':
        os.truncate(shard, shard.stat().st_size - 5)
    elif damage == 'text as shard':
        shard.write_text('version https://git-lfs.github.com/spec/v1\n')  # what git clone without LFS leaves
    elif damage == 'no tokenizer':
        tokenizer.unlink()
    elif damage == 'no config':
        model_config.unlink()
    elif damage == 'text as config':
        model_config.write_text('<html>')
    else:
        (copy / 'pytorch_model.bin').write_bytes(b'pickle')
        for path in copy.glob('model*'):
            path.unlink()
    line = error_line(check_folder(copy, check=False))
    at_fault = SHARDS[0] if 'shard' in damage else 'pytorch_model.bin' if 'weights' in damage else damage.split()[-1]
    assert str(copy) in line and at_fault in line
    expected = f'--model=meta-llama/Tiny-Llama --to={copy} --revision={COMMIT}' if recorded else '--model=OWNER/NAME'
    assert f'`python download_model.py {expected}' in line


@pytest.mark.slow
def test_weights_that_are_not_those_of_config_json_are_refused_with_what_was_expected_and_found(copy):
    said = check_folder(copy).stdout
    assert 'LlamaForCausalLM: 39 tensors\n' in said
    (copy / 'download.json').unlink()
    model_config = json.loads((copy / 'config.json').read_text())
    (copy / 'config.json').write_text(json.dumps(model_config | {'vocab_size': 310, 'num_hidden_layers': 5}))
    line = error_line(check_folder(copy, check=False))
    assert re.search(r'model.embed_tokens.weight: .*\(310, 512\), .*\(300, 512\); ', line)
    assert re.search(r'model.layers.4.self_attn.q_proj.weight: .*\(512, 512\), .*none', line)
    (copy / 'config.json').write_text(json.dumps(model_config | {'num_hidden_layers': 3}))
    assert re.search(' 9 .*model.layers.3.input_layernorm.weight', check_folder(copy).stdout)


def test_a_tensor_that_the_index_promises_must_be_in_its_file(copy):
    (copy / 'download.json').unlink()
    index = json.loads((copy / INDEX).read_text())
    index['weight_map']['model.layers.9.mlp.up_proj.weight'] = SHARDS[1]
    (copy / INDEX).write_text(json.dumps(index))
    line = error_line(check_folder(copy, check=False))
    assert SHARDS[1] in line and 'model.layers.9.mlp.up_proj.weight' in line


def peak_mb(*arguments, **env):
    """Peak resident memory in MB of a run of the script."""
    # With a process in between: a process starts with the peak of the one that forked it, and that of pytest is large.
    code = (
        'import resource, subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]], check=True, stdout=2); '
        'print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)'
    )
    command = [sys.executable, '-c', code, 'download_model.py', *arguments]
    result = subprocess.run(command, cwd=REPO, env=environment(**env), check=True, stdout=subprocess.PIPE, text=True)
    return int(result.stdout) / 1024


@pytest.mark.slow
def test_memory_does_not_grow_with_the_weights(hub, tiny_llama, tmp_path):
    from safetensors import safe_open

    end = 4 * 75_000_000
    header = {'weight': {'dtype': 'F32', 'shape': [75_000_000], 'data_offsets': [0, end]}}
    for shard in SHARDS:
        with safe_open(tiny_llama / shard, framework='numpy') as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}
        for name, shape in shapes.items():
            begin, end = end, end + 4 * math.prod(shape)
            header[name] = {'dtype': 'F32', 'shape': shape, 'data_offsets': [begin, end]}
    text = json.dumps(header).encode()
    big = tmp_path / 'big'
    big.mkdir()
    for name in ('config.json', 'tokenizer.json'):
        (big / name).write_bytes((tiny_llama / name).read_bytes())
    with open(big / 'model.safetensors', 'wb') as file:
        file.write(len(text).to_bytes(8, 'little') + text)
        file.truncate(8 + len(text) + end)  # 340 MB of zeros
    hub.repositories['some/big'] = big
    peaks = {}
    for repo in ('meta-llama/Tiny-Llama', 'some/big'):
        folder = tmp_path / repo.replace('/', '-')
        fetching = peak_mb(f'--model={repo}', f'--to={folder}', **settings(hub, tmp_path))
        peaks[repo] = fetching, peak_mb(f'--model={folder}')
    growth = [big - small for small, big in zip(*peaks.values(), strict=True)]
    assert max(growth) < 60, peaks  # of 300 MB


# --- what is not to be trusted ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'lie, said',
    [
        ({'blobId': '/../../../PWNED'}, "hash: found '/../../../PWNED'"),
        ({'size': '9'}, "size: found '9'"),
        ({'size': -9}, 'size: found -9'),
        ({'rfilename': 'tokenizer\x1b[2J.py'}, 'name: found '),
    ],
)
def test_a_hub_that_lies_decides_no_path(hub, tmp_path, monkeypatch, lie, said):
    answer = Handler.answer

    def answer_with_a_lie(self, status, body=b'', **headers):
        if b'siblings' in body:
            listed = {'rfilename': 'tokenizer_x.py', 'size': 2, 'blobId': '0' * 40, **lie}
            body = json.loads(body)
            body = json.dumps({**body, 'siblings': [*body['siblings'], listed]}).encode()
        answer(self, status, body, **headers)

    monkeypatch.setattr(Handler, 'answer', answer_with_a_lie)
    before = sorted(tmp_path.rglob('*'))
    assert said in error_line(download(hub, tmp_path, check=False))
    assert not [path for path in tmp_path.rglob('*') if path not in before and 'PWNED' in path.name]


@pytest.mark.parametrize(
    'name, content, said',
    [
        ('download.json', {'files': {'../../x': {'size': 1, 'sha256': 'a'}}}, "files: found '../../x'"),
        ('download.json', {'files': {'config.json': {'size': '1'}}}, "files.config.json.size: found '1'"),
        (INDEX, {'weight_map': {'a': '../../x.safetensors'}}, "weight_map.a: found '../../x.safetensors'"),
        (INDEX, {'weight_map': {'a': ['x']}}, 'weight_map.a: found '),
        ('config.json', {'architectures': 'x'}, "architectures: found 'x'"),
        # a command to paste, which would run what its name says
        ('download.json', {'repo': 'a/b; touch x', 'revision': '$(touch x)'}, 'download.json: found no files'),
    ],
)
def test_a_folder_that_lies_is_one_line(copy, name, content, said):
    (copy / name).write_text(json.dumps(content))
    line = error_line(check_folder(copy, check=False))
    assert said in line and 'touch' not in line
