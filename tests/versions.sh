#!/usr/bin/env bash
# Every script and strategy, saving, resuming and export on the oldest and on the newest torch that requirements.txt allows,
# each in an environment of its own: 5 GB, kept between runs in ~/.cache/train-versions.
#
#     bash tests/versions.sh             # both; CI runs one or the other
#     bash tests/versions.sh oldest      # or newest
#     bash tests/versions.sh 2.12.1      # another version
#
# A version that pip cannot install is said and left out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source setup_env.sh || exit 1

range=$(grep '^torch' requirements.txt) # torch>=2.11,<2.16
oldest=${range#*>=}
oldest="torch==${oldest%,*}.*"
case "$*" in
    '') versions=("$oldest" "$range") ;;
    oldest) versions=("$oldest") ;;
    newest) versions=("$range") ;;
    *) versions=("${@/#/torch==}") ;;
esac
tests=(
    tests/test_smoke.py
    tests/test_resume.py
    tests/test_layouts.py
    tests/test_export_model.py
    tests/test_deepspeed.py::test_every_stage_computes_what_one_process_computes
    tests/test_train_diloco.py::test_losses_weights_and_health_are_those_of_diloco_by_hand
    tests/proving/test_lessons.py
    tests/proving/test_check.py
    tests/proving/test_ranks.py
    tests/test_moe.py
    tests/test_expert_manual.py
    tests/test_float8.py
    tests/test_moments.py
    tests/huggingface/test_nf4.py
    tests/huggingface/test_frozen.py
    tests/huggingface/test_lora_experts.py
)

export OMP_NUM_THREADS=1 PET_LOCAL_ADDR=127.0.0.1 # as in run.sh
failed=()
for version in "${versions[@]}"; do
    environment=${XDG_CACHE_HOME:-$HOME/.cache}/train-versions/${version//[<>=,*]/_}
    python=$environment/bin/python
    [[ -x $python ]] || "$PYTHON" -m venv "$environment"
    # torch in a call of its own: the packages beside it then leave it alone.
    if ! "$python" -m pip install --quiet --progress-bar off --upgrade "$version" ||
        ! "$python" -m pip install --quiet --progress-bar off -r requirements.txt -r requirements-deepspeed.txt; then
        echo "left out: pip cannot install $version and what belongs to it"
        continue
    fi
    SECONDS=0
    result=passed
    "$python" -m pytest -q -rfEs -n 3 --dist loadfile "${tests[@]}" || result=FAILED
    printf '%s: torch %s in %d:%02d minutes\n' "$result" "$("$python" -c 'import torch; print(torch.__version__)')" \
        $((SECONDS / 60)) $((SECONDS % 60))
    [[ $result == passed ]] || failed+=("$version")
done
exit $((${#failed[@]} > 0))
