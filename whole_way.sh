#!/usr/bin/env bash
# From text to a model that you can talk to, with every stage between (docs/whole_way.md): 13 minutes on two CPU cores.
#
#     bash whole_way.sh
#     bash whole_way.sh --max_iters=2         # arguments go to the four train scripts
#
# Run again, it goes on where it was. What it types is on the page, and can be typed one by one.
set -euo pipefail
[[ " $* " == *' --help '* ]] && sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit
cd "$(dirname "${BASH_SOURCE[0]}")"
source setup_env.sh || exit 1

# One process per GPU (a power of two, so that they divide the batch); on a CPU two, when it has two cores.
processes=$("$PYTHON" -c 'import os, torch
gpus, cores = torch.cuda.device_count(), len(os.sched_getaffinity(0))
print(min(8, 1 << (gpus.bit_length() - 1)) if gpus else min(2, cores))')
cores=$(nproc)
export OMP_NUM_THREADS=$((cores / processes > 0 ? cores / processes : 1))
torchrun=("$PYTHON" -m torch.distributed.run --standalone --local_addr=127.0.0.1 --nproc_per_node="$processes")

# The questions of these files are in nothing that is learned.
score() {
    [[ -e $1/results.jsonl ]] ||
        "$PYTHON" evaluate.py --out_dir="$1" --batch_size=200 \
            --tasks=way/sums.jsonl,way/products.jsonl,way/where.jsonl,way/who.jsonl
}

[[ -e way/pages.jsonl ]] || "$PYTHON" benchmarks/make_chats.py
"$PYTHON" prepare_data.py --dataset=way/pages.jsonl --name=way_pages
"${torchrun[@]}" train_fsdp.py config/way_base.py "$@"

"$PYTHON" prepare_data.py --dataset=way/chats.jsonl --name=way_chats --tokenizer=out/way/base
"${torchrun[@]}" train_fsdp.py config/way_chat.py "$@"
score out/way/chat

"$PYTHON" prepare_data.py --dataset=way/pairs.jsonl --pairs --name=way_pairs --tokenizer=out/way/chat
"$PYTHON" train_dpo.py config/way_dpo.py "$@"
score out/way/dpo

"${torchrun[@]}" train_grpo.py config/way_grpo.py "$@"
score out/way/grpo

[[ -e models/way ]] || "$PYTHON" export_model.py --out_dir=out/way/grpo --to=models/way

"$PYTHON" - <<'TABLE'
import json

stages = {'chat': 'answers', 'dpo': 'preferences', 'grpo': 'rewards'}
scores = {
    stage: {row['task']: row for row in map(json.loads, open(f'out/way/{stage}/results.jsonl'))} for stage in stages
}
print(f'\n{"right of what it has not seen":30}' + ''.join(f'{name:>14}' for name in stages.values()))
for task in ('sums', 'products', 'where', 'who'):
    rows = [scores[stage][task] for stage in stages]
    print(f'{task:30}' + ''.join(f'{row["acc"]:10.0%} ± {row["acc_stderr"] * 100:.0f}' for row in rows))
TABLE
echo
"$PYTHON" sample.py --out_dir=models/way --prompt='What is 37 plus 58?' --temperature=0
echo
echo 'talk to it: python sample.py --out_dir=out/way/grpo'
