"""
Datasets of the Hugging Face hub: streamed, or downloaded where there is a network and read where there is none.

    stream, description = open_stream('fineweb-10BT', None, 'train', 'data/hub')
    download('fineweb-10BT', None, 'data/hub')          # from here on, open_stream reads these files
"""

import hashlib
import json
import os
import re
from pathlib import Path

HUB_NAMES = {  # short name -> (repository, configuration)
    'fineweb-10BT': ('HuggingFaceFW/fineweb', 'sample-10BT'),
    'fineweb-100BT': ('HuggingFaceFW/fineweb', 'sample-100BT'),
    'fineweb-edu-10BT': ('HuggingFaceFW/fineweb-edu', 'sample-10BT'),
}


def is_hub_name(dataset):
    """Whether that is a short name, or the OWNER/NAME, of a dataset on the hub rather than a path."""
    folder, _, file = dataset.partition('/')
    endings = ('.txt', '.md', '.json', '.jsonl', '.ndjson', '.yaml', '.yml', '.parquet', '.arrow')
    is_path = os.path.exists(dataset) or os.path.isdir(folder) or file.endswith(endings)
    return dataset in HUB_NAMES or (not is_path and re.fullmatch(r'\w[\w.-]*/[\w.-]+', dataset) is not None)


def open_stream(dataset, config, split, hub_folder):
    """(datasets.IterableDataset, description for meta.json) of what is_hub_name accepts.

    config: the configuration; None = the only one. hub_folder: where download() puts files; they are preferred.
    Raises ValueError when the hub has no such dataset, or cannot be reached.
    """
    import datasets

    repository, config = HUB_NAMES.get(dataset, (dataset, config))
    folder, downloaded = _downloaded(repository, hub_folder)
    try:
        if str(config) in downloaded:
            revision = downloaded[str(config)]
            stream = datasets.load_dataset(str(folder), config, split=split, streaming=True)
        else:
            revision = _newest_revision(repository)
            stream = datasets.load_dataset(repository, config, split=split, streaming=True, revision=revision)
    except Exception as error:  # datasets, huggingface_hub, the HTTP library and pyarrow raise all kinds
        raise ValueError(_advice(dataset, error)) from error
    sha256 = hashlib.sha256(f'{repository} {config} {split} {revision}'.encode()).hexdigest()  # a revision is a hash
    return stream, {'name': repository, 'config': config, 'split': split, 'revision': revision, 'sha256': sha256}


def download(dataset, config, hub_folder):
    """Fetch the files of a hub dataset, or the rest of them. Returns their folder.

    Raises ValueError for what is not on the hub, or when the hub cannot be reached.
    """
    if not is_hub_name(dataset):
        raise ValueError(
            f'dataset={dataset} is no dataset of the hub: nothing to download, prepare it without --download_only'
        )
    import datasets
    import huggingface_hub

    repository, config = HUB_NAMES.get(dataset, (dataset, config))
    folder, downloaded = _downloaded(repository, hub_folder)
    try:
        revision = _newest_revision(repository)
        builder = datasets.load_dataset_builder(repository, config, revision=revision)
        prefix = f'hf://datasets/{repository}@{revision}/'
        urls = [url for files in builder.config.data_files.values() for url in files]
        files = [url.removeprefix(prefix) for url in urls]
        huggingface_hub.snapshot_download(
            repository, repo_type='dataset', revision=revision, local_dir=folder, allow_patterns=[*files, 'README.md']
        )
    except Exception as error:  # as above
        raise ValueError(_advice(dataset, error)) from error
    missing = [file for file in files if not (folder / file).exists()]
    if missing:
        raise ValueError(
            f'dataset={dataset}: {folder} still lacks {len(missing)} files, {missing[0]} first: run it again'
        )
    _marker(folder).write_text(json.dumps(downloaded | {str(config): revision}), encoding='utf-8')
    return folder


def _downloaded(repository, hub_folder):
    """(folder of a repository, {configuration: revision} of what download() has put there)."""
    folder = Path(hub_folder) / repository.replace('/', '--')
    marker = _marker(folder)
    return folder, json.loads(marker.read_text(encoding='utf-8')) if marker.exists() else {}


def _marker(folder):
    """Says what has been downloaded entirely. Beside the folder: in it, it would be read as data."""
    return folder.with_name(folder.name + '.json')


def _newest_revision(repository):
    """The commit that the hub has now; the first request, so that a machine without network notices at once."""
    import huggingface_hub

    return huggingface_hub.HfApi().dataset_info(repository).sha


def _advice(dataset, error):
    """One line for an error of the hub's libraries."""
    reason = ' '.join(str(error).split()) or type(error).__name__
    if 'NotFound' in type(error).__name__ or 'Gated' in type(error).__name__ or isinstance(error, ValueError):
        return f'dataset={dataset}: not on the Hugging Face hub (--source_config, --source_split): {reason[:300]}'
    return (
        f'dataset={dataset}: the Hugging Face hub cannot be reached ({type(error).__name__}: {reason[:120]}); where '
        f'there is a network, run `python prepare_data.py --dataset={dataset} --download_only`, then this again here'
    )
