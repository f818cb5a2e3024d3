#!/usr/bin/env bash
# From a fresh clone to a trained model: environment, data, training on 2 processes, a sample, a plot of the loss.
#
#     bash quickstart.sh                      # about 3 minutes of training on 2 CPU cores
#     bash quickstart.sh --max_iters=100      # arguments go to train_fsdp.py
#
# Run again, it prepares and trains only what is not there yet.
set -euo pipefail
[[ " $* " == *' --help '* ]] && sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit
cd "$(dirname "${BASH_SOURCE[0]}")"
source setup_env.sh || exit 1

out_dir=out/quickstart
for argument in "$@"; do
    [[ $argument == --out_dir=* ]] && out_dir=${argument#*=}
done

"$PYTHON" prepare_data.py

# One process per GPU (a power of two, so that they divide the batch); on a CPU two, when it has two cores.
processes=$("$PYTHON" -c 'import os, torch
gpus, cores = torch.cuda.device_count(), len(os.sched_getaffinity(0))
print(min(8, 1 << (gpus.bit_length() - 1)) if gpus else min(2, cores))')
cores=$(nproc)
export OMP_NUM_THREADS=$((cores / processes > 0 ? cores / processes : 1))

# --standalone takes a free port; --local_addr spares it the lookup of this machine's name, which not every machine can do.
"$PYTHON" -m torch.distributed.run --standalone --local_addr=127.0.0.1 --nproc_per_node="$processes" \
    train_fsdp.py config/quickstart.py "$@"

sample=$("$PYTHON" sample.py --out_dir="$out_dir" --prompt='def ' --num_samples=1)
plot=$("$PYTHON" compare.py --plot "$out_dir" | tail -n 1)

echo
echo "$sample"
echo
"$PYTHON" -c 'import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
last = [row for row in rows if "val_bpb" in row][-1]
print("validation: {val_bpb:.3f} bits per byte at step {step}".format(**last))' "$out_dir/metrics.jsonl"
echo "$plot"
