"""
What prepare_data.py prints at its end.
"""

import math
import shlex
import sys
from pathlib import Path

import numpy as np

from dataset.mixture import MAX_EPOCHS
from dataset.shards import AS_END, FIRST, LEARNED, read_shard
from layout import counted
from system.files import is_run, read_json
from text.conversations import marked_text
from text.documents import in_words
from text.tokenizer import tokenizer_of

MANY_LEFT_OUT = 0.05  # warn if more than this share of the rows is left out
EXAMPLE_TOKENS = 4096  # the longest example that is printed
FEWEST_TOKENS = 64  # in a split; with fewer, the block_size that fits would be below 16
MANY_TOKENS = 100_000_000  # of text, worth more than a laptop's model
FEW_TOKENS = 1000  # the loss over a validation split of fewer tokens is little more than chance


def print_example(meta, folder):
    """Print the first document or conversation of a complete dataset, decoded from its shard, with the learned part
    marked."""
    shard, is_chat = meta['splits']['train']['shards'][0], meta.get('masked')
    tokens = np.array(read_shard(folder / shard['file'])[:EXAMPLE_TOKENS])
    if is_chat:
        flags = np.fromfile(folder / shard['mask_file'], dtype=np.uint8, count=len(tokens))
    else:  # a document is learned completely, up to its end-of-text token
        tokens = tokens[: 1 + next(iter(np.flatnonzero(tokens == meta['eot_token'])), len(tokens))]
        flags = np.full(len(tokens), LEARNED, dtype=np.uint8)
    marks = ('\x1b[7m', '\x1b[0m') if sys.stdout.isatty() else ('【', '】')
    what = 'pair' if meta.get('pairs') else 'conversation' if is_chat else 'document'
    print(f'what is learned of the first {what} stands {"inverse" if sys.stdout.isatty() else "in 【 】"}:')
    tokenizer = tokenizer_of(folder)
    print(marked_text(tokens, flags, tokenizer.decode, *marks))
    if meta.get('pairs') and len(seconds := np.flatnonzero(flags & FIRST)[1:]):
        print('and this is the rejected answer, which it learns to find less likely than the one above:')
        print(marked_text(tokens[seconds[0] :], flags[seconds[0] :], tokenizer.decode, *marks))
    if (flags & AS_END).any():
        end = tokenizer.decode([meta['eot_token']])
        print(f'(every answer learns to end with {end}, as the last one of a conversation does)')


def print_summary(meta, folder, config):
    """Print what the folder of a complete dataset holds, and which command to type next. config: prepare_data.py's."""
    for split, totals in meta['splits'].items():
        print(
            f'{split:5}  {totals["tokens"]:,} tokens of {totals["bytes"]:,} bytes of text '
            f'({totals["bytes"] / totals["tokens"]:.3f} bytes/token), {counted(totals["documents"], "document")}, '
            f'shards: {len(totals["shards"])}'
        )
        if meta.get('masked'):
            share = totals['learned_tokens'] / totals['tokens']
            print(f'       learned: {totals["learned_tokens"]:,} of them ({share:.1%})', end='; ')
            what = 'pair, both answers with their prompts,' if meta.get('pairs') else 'conversation'
            print(f'the longest {what} has {totals["longest"]:,} tokens')
        if split == 'val' and totals.get('learned_tokens', totals['tokens']) < FEW_TOKENS:
            print('       a loss over so few tokens is noisy: more with a larger --val_fraction, and another --name')
    reasons = meta.get('left_out', {})
    left_out = sum(reasons.values())
    n_rows = meta.get('rows_kept', 0) + left_out
    if left_out > MANY_LEFT_OUT * n_rows:
        print(f'WARNING: {left_out:,} of {n_rows:,} rows ({left_out / n_rows:.0%}) are left out: {in_words(reasons)}')
    least, shortest = min((totals['tokens'], split) for split, totals in meta['splits'].items())
    if least < FEWEST_TOKENS and not meta.get('masked'):
        mend = 'more text, or a larger --val_fraction, and another --name'
        print(f'{folder}\nnext: {mend}; the {least:,} tokens of the split {shortest} are too few to train with')
        return
    print(f'{folder}\nnext: ' + '\non one GPU: '.join(next_commands(meta, least, config)))


def next_commands(meta, least, config):
    """[the command that trains on a complete dataset, perhaps the one for a single GPU]. least: tokens of its shortest
    split. OUT_DIR in a command stands for the run that has learned these tokens."""
    place = '' if config.data_dir == 'data' else f' --data_dir={shlex.quote(config.data_dir)}'
    data = f'--dataset={config.name}{place}'
    new = f'--out_dir=out/{config.name}'
    # So that each split has a few windows; the default is 1,024.
    block_sizes = [2 ** max(0, (least // 4).bit_length() - 1)] if least < 4 * 1024 and not meta.get('masked') else []
    settings = Path(config.tokenizer, 'config.json')
    if settings.exists() and not is_run(config.tokenizer):  # a model of transformers
        begin = f'--init_from={shlex.quote(config.tokenizer)}'
        shape = read_json(settings, dict, 'copy it again')
        said = (shape.get('max_position_embeddings'), shape.get('n_positions'))  # the second: GPT-2
        positions = next((number for number in said if isinstance(number, int) and number > 0), math.inf)
        if positions < 4096:  # the recipes' block_size is 2048 or 4096
            block_sizes.append(min(positions, 2048))
        block_size = f' --block_size={min(block_sizes)}' if block_sizes else ''
        family = 'qwen' if 'qwen' in Path(config.tokenizer).name.lower() else 'llama'
        recipe = 'dpo_chat' if meta.get('pairs') else 'sft_chat' if meta.get('masked') else f'finetune_{family}'
        keys = f'config/{recipe}.py {begin} {data}{block_size}'
        if meta.get('pairs'):
            several = f'config/{recipe}.py --strategy=fsdp {begin} {data}{block_size}'
            return f'torchrun --nproc_per_node=4 train_dpo.py {several}', f'python train_dpo.py {keys}'
        return f'torchrun --nproc_per_node=4 train_fsdp.py {keys}', f'python train_ddp.py {keys}'
    begin = f'--init_from={shlex.quote(config.tokenizer) if is_run(config.tokenizer) else "OUT_DIR"}'
    if meta.get('pairs'):
        return [f'python train_dpo.py config/way_dpo.py {begin} {data} {new}']
    if meta.get('masked'):
        steps = 3 * meta['splits']['train']['tokens'] // (8 * 256)  # of that recipe, which warms up for 50 of them
        warmup = '' if steps >= 500 else f' --warmup_iters={steps // 10}'
        return [f'python train_ddp.py config/way_chat.py {begin} {data} {new}{warmup}']
    block_size = f' --block_size={min(block_sizes)}' if block_sizes else ''
    tokens = meta['splits']['train']['tokens']
    if is_run(config.tokenizer):  # it goes on reading
        return [f'python train_ddp.py {begin} {data}{block_size} {new} --num_epochs=1']
    if tokens > MANY_TOKENS:
        return [f'torchrun --nproc_per_node=4 train_fsdp.py config/qwen3_6h.py {data} {new}']
    # The model of quickstart.py reads 1.6M tokens, unless that would be the same text over and over.
    epochs = '' if MAX_EPOCHS * tokens > 1_638_400 else f' --num_epochs={MAX_EPOCHS}'
    return [f'python train_ddp.py config/quickstart.py {data}{block_size} {new}{epochs}']
