# shellcheck shell=bash
# What the scripts of this folder share: each holds its #SBATCH lines, sources this file and calls launch "$@".
#
# A run is a chain of array elements. Ten minutes before its time limit an element saves and ends (the file PREEMPTED),
# and the next one goes on; DONE ends the chain. A mistake ends it, too, in one line of the first element and before any
# GPU is used. When a later element fails, the next one tries again.
set -euo pipefail

say() {
    echo "[slurm] $*" || true # a log that is full ends no run
}

# End with one line.
fail() {
    echo "error: $*" >&2
    give_up
}

# End an element that failed before its ranks began, or soon after. In the first one that is most likely a mistake in the
# command, which the elements that wait would meet, too. For a later one the same command has trained already, so the
# likelier cause is its node or a file system, and the next element may do better.
give_up() {
    if is_first_element; then
        end_chain
    else
        try_again
    fi
    exit 1
}

# Leave the chain to the next element, but end it after max_failures failures in a row without a new checkpoint. The
# ranks count, too (system/stopping.py: count_start), but only starts that get as far as training.
try_again() {
    local limit=${MAX_FAILURES:-5} checkpoints note failures
    checkpoints=("${OUT_DIR:-nowhere}"/checkpoints/step_????????)
    note="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID} ${checkpoints[-1]}" # the chain, and how far it has come
    # Where that cannot be written (a full disk, or out_dir is not known yet), nothing would end a loop.
    echo "$note" 2> /dev/null >> "${OUT_DIR:-nowhere}/.failures" || { end_chain && return; }
    failures=$(grep -cxF "$note" "$OUT_DIR/.failures")
    if ((limit > 0 && failures >= limit)); then
        say "$failures failures in a row without a new checkpoint: the chain ends here"
        end_chain
    else
        say "failure $failures since the last checkpoint, on $SLURM_JOB_NODELIST: the next array element tries again"
    fi
}

end_chain() {
    if [[ -n ${SLURM_ARRAY_JOB_ID:-} ]]; then
        scancel --quiet --state=PENDING "$SLURM_ARRAY_JOB_ID" || true
    fi
}

# --- settings ---------------------------------------------------------------------------------------------------------
unset PYTHONSAFEPATH # scripts import what lies beside them
mkdir -p slurm/logs
if [[ -f slurm/local.sh ]]; then
    # shellcheck source=slurm/local.example.sh
    source slurm/local.sh
fi

# A shell may still have the variables of a job that has ended.
in_job() {
    local now
    now=$(date +%s)
    [[ -n ${SLURM_JOB_ID:-} ]] && ((${SLURM_JOB_END_TIME:-$now} >= now))
}

require_datasets_dir() {
    [[ -n ${DATASETS_DIR:-} ]] || fail 'DATASETS_DIR is not set: cp slurm/local.example.sh slurm/local.sh, and fill it in'
    [[ -d $DATASETS_DIR ]] || fail "DATASETS_DIR=$DATASETS_DIR: there is no such folder: mkdir it, or mend slurm/local.sh"
}

load_modules() {
    local modules
    # arrow brings pyarrow's compiled parts, which no wheel of these clusters has.
    read -ra modules <<< "${MODULES-StdEnv/2023 gcc arrow python/3.12}" || true
    if [[ $(type -t module) == function ]] && ((${#modules[@]})); then
        set +eu # module is a shell function that was not written for them
        module load "${modules[@]}" || fail "module load ${modules[*]}: it failed here; set MODULES in slurm/local.sh"
        set -eu
    fi
}

# Modules, Python and, on clusters whose compute nodes have no internet, the variables that keep libraries from trying.
prepare_environment() {
    local cluster=${CC_CLUSTER:-${SLURM_CLUSTER_NAME:-$(hostname -f 2> /dev/null || hostname)}}
    load_modules
    PYTHON=${PYTHON:-${VENV:-$PWD/.venv}/bin/python}
    [[ -x $PYTHON ]] || fail "there is no $PYTHON: run \`bash slurm/setup_env.sh\` on a login node, or set VENV in slurm/local.sh"

    export PYTHONUNBUFFERED=1
    export TIKTOKEN_CACHE_DIR=${TIKTOKEN_CACHE_DIR:-${DATASETS_DIR:-data}/tiktoken}
    in_job || return 0 # a login node downloads
    case $cluster in
        *rorqual* | *narval* | *trillium* | *tamia*) OFFLINE=${OFFLINE:-1} ;;
    esac
    if [[ ${OFFLINE:-0} == 1 ]]; then
        export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1 WANDB_MODE=${WANDB_MODE:-offline}
    fi
    # Compilers and wandb write below HOME, which some clusters mount read-only in jobs.
    # What compilers keep there is loaded as code. In a folder that is everybody's, another user could have made one of a
    # name that can be guessed: so the name is not known before, and the folder is this user's alone.
    local scratch=${SLURM_TMPDIR:-}
    if [[ -z $scratch ]]; then
        local name=${USER:-job}-$SLURM_JOB_ID.XXXXXXXX
        if ! scratch=$(mktemp -d "${TMPDIR:-/tmp}/$name" 2> /dev/null); then # a TMPDIR of the login node's, for example
            say "$TMPDIR/$name cannot be made: using /tmp"
            export TMPDIR=/tmp
            scratch=$(mktemp -d "/tmp/$name") || fail "/tmp/$name cannot be made: set TMPDIR in slurm/local.sh"
        fi
        export JOB_FOLDER=$scratch # to be made on each node
    fi
    local compiled=$scratch kind
    if [[ -n ${COMPILE_CACHE:-} ]]; then # kept for later jobs; code for one kind of CPU need not run on another
        kind=$(uname -m)-$({ grep -m1 'model name' /proc/cpuinfo || true; } | cksum | cut -d' ' -f1)
        if mkdir -p "$COMPILE_CACHE/$kind" 2> /dev/null; then
            compiled=$COMPILE_CACHE/$kind
        else
            say "COMPILE_CACHE=$COMPILE_CACHE cannot be made: what is compiled is lost with this job"
        fi
    fi
    export TRITON_CACHE_DIR=$compiled/triton TORCHINDUCTOR_CACHE_DIR=$compiled/inductor
    export WANDB_CACHE_DIR=$scratch/wandb WANDB_CONFIG_DIR=$scratch/wandb
}

# --- arguments --------------------------------------------------------------------------------------------------------
# argument KEY ARGUMENTS...: the value of --KEY=value, the last one, as the train scripts read it.
argument() {
    local key=$1 value='' one
    shift
    for one in "$@"; do
        if [[ $one == "--$key="* ]]; then value=${one#*=}; fi
    done
    echo "$value"
}

# Keys that leave the result of a run as it is, or make it longer.
SAME_RESULT=' resume eval_interval eval_sequences eval_iters eval_tasks eval_tasks_interval eval_tasks_limit eval_tasks_chat eval_only log_interval trace_step trace_memory
 checkpoint_interval keep_checkpoints keep_best patience checksum_interval permanent_interval save_errors async_checkpoint dry_run gpu gpus measured
 wandb_log wandb_project wandb_group wandb_run_name tensorboard_log data_dir trust_remote_code
 max_iters num_epochs device compile deterministic activation_checkpointing timeout_s stop_before_end_s max_failures max_bad_steps strategy fsdp_impl zero_stage
 context_parallel context_impl tensor_parallel expert_parallel pipeline_stages pipeline_chunks replicate_size cpu_offload accumulate blocks_per_unit prefetch outer_on_host plan verify exchange quorum grace_s
 keep_deltas replay generation_batch_size '

# A name for a run without --out_dir: the config file's, and the keys that make it another run than that file's. So the
# same command continues a run, also with --timeout_s=900, and another learning rate is another run.
run_name() {
    local name='' keys='' one key
    for one in "$@"; do
        key=${one#--}
        if [[ $one == *.py ]]; then
            name=${name:+$name+}$(basename "$one" .py)
        elif [[ $one == --* && " ${SAME_RESULT//$'\n'/ } " != *" ${key%%=*} "* ]]; then
            keys+=,$key
        fi
    done
    # A run of train_fsdp.py goes on under train_parallel.py.
    [[ $SCRIPT == train_fsdp.py || $SCRIPT == train_parallel.py ]] || keys=,$(basename "$SCRIPT" .py)$keys
    name=${name:-run}${keys//[!A-Za-z0-9_.,=+-]/_}
    ((${#name} <= 120)) || fail 'so many keys make no name for the run: choose one with --out_dir'
    echo "$name"
}

# requested NAME: the number in the script's own line `#SBATCH --NAME=[type:]number`, for plans made outside of a job.
requested() {
    sed -nE "s/^#SBATCH --$1=([a-z0-9]+:)?([0-9]+).*/\2/p" "$0"
}

# --- the run ----------------------------------------------------------------------------------------------------------
launch() {
    SCRIPT=${SCRIPT:-train_fsdp.py}
    [[ -f $SCRIPT ]] || fail "SCRIPT=$SCRIPT: not in $PWD, which has $(echo train_*.py)"
    (($#)) || set -- "${CONFIG:-config/enoki_8h.py}"
    [[ " $* " == *.py\ * ]] || say "no config is named: $SCRIPT has its own defaults, without ${CONFIG:-config/enoki_8h.py}"
    if [[ -z $(argument data_dir "$@") ]]; then
        require_datasets_dir
        set -- --data_dir="$DATASETS_DIR" "$@"
    fi
    OUT_DIR=$(argument out_dir "$@")
    if [[ -z $OUT_DIR ]]; then
        [[ -n ${RESULTS_DIR:-} ]] || fail 'RESULTS_DIR is not set: cp slurm/local.example.sh slurm/local.sh, and fill it in'
        OUT_DIR=$RESULTS_DIR/$(run_name "$@")
        set -- --out_dir="$OUT_DIR" "$@"
    fi
    if [[ -z $(argument device "$@") ]]; then
        set -- --device=cuda "$@" # without it, a job that got no GPU would train on its CPUs
    fi
    MAX_FAILURES=$(argument max_failures "$@")
    prepare_environment

    if in_job; then
        NPROC=${NPROC:-${SLURM_GPUS_ON_NODE:-}}
        [[ -n $NPROC ]] || fail 'this job has no GPU: ask for some (--gpus-per-node=4), or set NPROC and give --device=cpu'
    else
        NPROC=${NPROC:-$(requested gpus-per-node)}
    fi
    if [[ " $* " == *' --dry_run'* ]]; then
        plan "${SLURM_NNODES:-$(requested nodes)}" "$NPROC" "$@"
        exit
    fi
    in_job || fail "this is not a job: \`sbatch $0 ...\`, or add --dry_run for the plan alone"
    trap 'fail "the warning before the time limit came before the run began: more --time, or --signal=B:USR1@60"' USR1

    if ! is_first_element; then
        if [[ -f $OUT_DIR/DONE ]]; then
            say "$OUT_DIR/DONE is there: nothing left to do"
            end_chain
            exit
        fi
        # What says `never` means the chain's first element; the later ones continue it.
        [[ $(argument resume "$@") == must ]] || set -- "$@" --resume=auto
    fi

    # Both print one line where the arguments, the data, the GPUs or out_dir are not what the run needs.
    plan "$SLURM_NNODES" "$NPROC" "$@" || give_up
    check_node "$@" || give_up
    run "$@"
}

is_first_element() {
    [[ ${SLURM_ARRAY_TASK_ID:-0} == "${SLURM_ARRAY_TASK_MIN:-0}" && ${SLURM_RESTART_COUNT:-0} == 0 ]]
}

# plan NODES PROCESSES ARGUMENTS...: what --dry_run prints for this many ranks, from this one process.
plan() {
    local nodes=$1 processes=$2
    shift 2
    RANK=0 LOCAL_RANK=0 WORLD_SIZE=$((nodes * processes)) LOCAL_WORLD_SIZE=$processes MASTER_ADDR=none MASTER_PORT=0 \
        "$PYTHON" "$SCRIPT" "$@" --dry_run
}

# The GPUs are there, and out_dir can be written and is no other job's.
check_node() {
    "$PYTHON" - "$OUT_DIR" "$NPROC" "$(argument device "$@")" << 'END'
import sys

sys.path.insert(0, '.')
import torch

from runtime import checkpoint_saver
from system import errors

errors.report_errors()
out_dir, processes, device = sys.argv[1:]
gpus = torch.cuda.device_count()
if device != 'cpu' and gpus < int(processes):
    sys.exit(f'error: device={device}: torch {torch.__version__} sees {gpus} GPUs here, the job has {processes}: see '
             f'`nvidia-smi` in a job and whether `bash slurm/setup_env.sh` installed a CUDA build, or use --device=cpu')
checkpoint_saver.prepare(out_dir)
checkpoint_saver.claim(out_dir)
END
}

# run ARGUMENTS...: one torchrun per node, and how it ended.
run() {
    local head port threads status stopped nodes=$SLURM_NNODES restarts=0 kill=1 started=$SECONDS
    # The first node's own name, never localhost: with that, each node of two would wait for itself.
    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
    [[ -n $head ]] || fail "scontrol show hostnames $SLURM_JOB_NODELIST names no node"
    port=$((10000 + SLURM_JOB_ID % 20000)) # below 32768, where ports for outgoing connections begin
    threads=$((${SLURM_CPUS_PER_TASK:-NPROC} / NPROC))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
    if ((${MIN_NODES:-nodes} < nodes)); then # the nodes that are left go on, from the last checkpoint
        nodes=$MIN_NODES:$nodes restarts=3 kill=0
        export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # restarted workers would find the addresses of those before them
    fi
    say "$SLURM_NNODES x $NPROC processes, rendezvous at $head:$port, $SCRIPT $*"

    rm -f "$OUT_DIR/STOP" "$OUT_DIR/PREEMPTED" # of an earlier element
    # The signal comes to this shell only (B:). Bash runs a trap between commands or in wait, hence srun's `&`.
    trap 'stopped=1; touch "$OUT_DIR/STOP"; say "time limit near: asking for a checkpoint"' USR1
    # --export=ALL: with SLURM_EXPORT_ENV=NONE, which some clusters set, ranks would have none of the variables above.
    # srun of 22.05 and later does not take --cpus-per-task from sbatch. When one node fails, the others must not wait.
    # last_call_timeout: how long a smaller number of nodes waits for the rest, at the start and after a loss.
    # shellcheck disable=SC2016 # the shell on the node reads the variables
    srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --export=ALL \
        --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit="$kill" \
        bash -c '[[ -z ${JOB_FOLDER:-} ]] || mkdir -m 700 "$JOB_FOLDER" 2> /dev/null || [[ -O $JOB_FOLDER && ! -L $JOB_FOLDER ]] ||
            { echo "error: $(hostname): $JOB_FOLDER is not yours: set TMPDIR in slurm/local.sh" >&2; exit 1; }; exec "$@"' node \
        "$PYTHON" -m torch.distributed.run --nnodes="$nodes" --nproc_per_node="$NPROC" --max-restarts="$restarts" \
        --rdzv-conf=last_call_timeout=120 --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:$port" "$SCRIPT" "$@" &
    stopped=1
    while ((stopped)); do # a wait that the trap broke off says nothing about srun
        stopped=0
        status=0
        wait $! || status=$?
    done

    rm -f "$OUT_DIR/STOP" # it may have come too late

    local offline
    offline=$(compgen -G "$OUT_DIR/wandb/offline-run-*" || true)
    if [[ -n $offline ]]; then
        say "for wandb, on a login node: $(dirname "$PYTHON")/wandb sync $OUT_DIR/wandb/offline-run-*"
    fi
    # Markers, not exit codes: torchrun ends with 1 also after a clean stop.
    if [[ -f $OUT_DIR/PREEMPTED ]]; then
        say "stopped at step $(< "$OUT_DIR/PREEMPTED"); the next array element, or the same sbatch command, goes on"
    elif ((status == 0)); then # with DONE, or it was an --eval_only
        say "done: $OUT_DIR"
        end_chain
    elif is_first_element && ((SECONDS - started < 600)); then
        fail "$SCRIPT ended with $status within ten minutes: a repetition would, too, so the chain ends here"
    else
        echo "error: $SCRIPT ended with $status" >&2
        try_again
        exit 1
    fi
}
