"""
What a run from scratch keeps of its data, so that it needs them no longer: out_dir/model, with its tokenizer, the bytes
of each token and, if it learns conversations, their chat template. With these it is a folder that transformers reads,
and so does `prepare_data.py --tokenizer=out/RUN`. (A run that fine-tunes has the files of init_from there.)

    keep_language(out_dir, folders)                      # at step 0; folders: of its data, and what it begins with
    folder = folder_of_language(out_dir, state)          # where it is; of a run of an earlier version with its data
"""

import json
import os
import shutil
from pathlib import Path

from dataset.shards import read_meta
from system.files import refuse_link_out, write_file
from text.templates import write_settings, write_templates
from text.tokenizer import KEPT, describe, has_tokenizer


def keep_language(out_dir, folders):
    """Copy tokenizer and chat templates into out_dir/model when a run begins: the tokenizer of the first folder that
    has one, and the templates of the first that has some. Replaces what an earlier start without a checkpoint has left
    there. For rank 0."""
    from dataset.opening import TOKEN_BYTES  # here, since who reads a run needs neither
    from text.conversations import templates_of

    kept = Path(out_dir, KEPT)
    shutil.rmtree(kept, ignore_errors=True)
    named = next(filter(has_tokenizer, folders), None)
    if named is None:  # synthetic, or another program's shards: nothing is known
        return
    meta, unfinished = read_meta(Path(named)), kept.with_suffix('.tmp')
    meta = meta or {'tokenizer': describe(named)}  # of an export
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for name in ('tokenizer.json', TOKEN_BYTES):
        if (path := Path(named, name)).exists():
            refuse_link_out(path, named)
            shutil.copyfile(path, unfinished / name)
    facts = {key: meta[key] for key in ('tokenizer', 'vocab_size', 'eot_token') if key in meta}
    write_file(unfinished / 'meta.json', json.dumps(facts, indent=1))
    if (unfinished / 'tokenizer.json').exists():
        write_settings(unfinished, facts['tokenizer'], named)
    write_templates(unfinished, next((found for folder in folders if (found := templates_of(folder))), {}))
    unfinished.rename(kept)


def folder_of_language(out_dir, state, data_dir=None, tokenizer=None):
    """Where the tokenizer of a run from scratch is: in what it has kept, or in data_dir where the user says so. A run
    of an earlier version has kept none: then it is with its dataset. Raises ValueError if that was prepared anew since.
    tokenizer: the name of the one to take in its place, or None."""
    kept = os.path.join(out_dir, KEPT)
    if os.path.isdir(kept) and data_dir is None:
        return kept
    from dataset.mixture import folder_of
    from dataset.opening import fingerprints_of

    folder = folder_of(state['config'], data_dir)
    plan = state['identity'].get('data') or []
    plan = [[0, {plan: 1}]] if isinstance(plan, str) else plan  # of a version without mixtures
    learned = {mark.partition('-')[0] for _, shares in plan if isinstance(shares, dict) for mark in shares}
    now = fingerprints_of(read_meta(Path(folder)))
    if tokenizer is None and learned and now and not learned & now:
        raise ValueError(
            f'{out_dir} was trained on other tokens than {folder} has now, where its tokenizer should be: it was '
            "prepared anew. Say where the run's own dataset lies, --data_dir=FOLDER, or which tokenizer it had, "
            '--tokenizer=NAME'
        )
    return folder
