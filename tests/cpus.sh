#!/usr/bin/env bash
# The numerics as other CPUs compute them: which instructions PyTorch and oneDNN use decides in which order sums are taken, and
# so the last digits of every loss. Then a few runs on the Python of Debian 12, in an environment of its own, which is kept
# between runs in ~/.cache/train-versions.
#
#     bash tests/cpus.sh                                   # all of it; CI runs one of them for some commits, in turns
#     bash tests/cpus.sh ONEDNN_MAX_CPU_ISA=AVX2           # one setting: variables, as they stand before a command
#     bash tests/cpus.sh debian                            # the Python of Debian 12
#
# A CPU that lacks what a setting asks for uses what it has.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source setup_env.sh || exit 1

settings=(
    ATEN_CPU_CAPABILITY=default
    ATEN_CPU_CAPABILITY=avx2
    ONEDNN_MAX_CPU_ISA=SSE41
    'ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2'
    debian
)
(($#)) && settings=("$@")
# The tests that compare the numbers of two computations. In files whose ranks run all cases at once, others would cost
# nothing and show nothing.
f=tests/test_fsdp_manual.py::test_
numerics=(
    tests/proving/test_lessons.py
    tests/test_tensor_manual.py::test_scores_of_tasks_are_those_of_one_process
    tests/test_tensor_manual.py::test_a_checkpoint_is_the_same_for_every_layout
    tests/test_expert_manual.py::test_replicas_of_shared_experts_are_those_of_one_rank_each
    tests/test_expert_manual.py::test_in_float64_outputs_and_gradients_are_exact
    tests/test_moe.py
    tests/test_layouts.py::test_a_run_that_changes_its_layout_at_each_step_is_the_run_of_one_process
    "${f}parameters_that_are_unused_in_some_steps_or_on_some_ranks"
    "${f}blocks_between_vectors"
    tests/test_diloco.py::test_every_step_is_that_of_the_loop_in_one_process
    tests/test_train_diloco.py::test_losses_weights_and_health_are_those_of_diloco_by_hand
    tests/test_train_diloco.py::test_resumed_at_a_rounds_end_or_in_its_middle_is_bit_equal
    tests/test_train_diloco.py::test_what_was_evaluated_is_what_other_scripts_find
    tests/test_optim.py
    tests/test_moments.py
    tests/test_model.py
    tests/test_float8.py
    tests/test_long_context.py
    tests/test_on_cuda.py
    tests/test_offload.py
    tests/test_compile.py::test_a_block_with_experts_is_one_graph_for_its_first_batch_and_one_for_any_other
    tests/test_compile.py::test_on_a_gpu_the_loss_is_one_graph_and_the_same_number
    tests/test_mixture.py::test_losses_are_the_same_under_every_strategy
    tests/test_mixture.py::test_a_run_goes_on_in_the_middle_of_a_stage_on_other_ranks_and_may_add_stages
    tests/test_mixture.py::test_a_run_over_packed_documents_is_one_over_single_documents
    tests/test_resume.py::test_resumed_on_the_same_ranks_is_bit_equal_and_on_others_within_rounding
    tests/test_resume.py::test_1_and_4_ranks_resume_bit_equal_and_4_go_on_with_what_1_saved
    tests/test_validation.py::test_several_datasets_to_validate_on_have_a_loss_each
    tests/test_validation.py::test_weights_of_an_earlier_run_are_evaluated_at_step_0_and_those_from_scratch_are_not
    tests/test_deepspeed.py::test_every_stage_computes_what_one_process_computes
    tests/test_deepspeed.py::test_a_resumed_run_is_the_same_run
    tests/test_train_simple.py
    tests/test_train_dpo.py::test_a_run_is_equal_to_a_plain_loop
    tests/test_train_dpo.py::test_layouts_are_equal
    tests/test_train_grpo.py::test_a_run_is_equal_to_a_plain_loop
    tests/test_train_grpo.py::test_layouts_are_equal
    tests/test_train_distill.py::test_the_divergence_and_its_gradients_are_those_of_the_paper
    tests/test_train_distill.py::test_a_run_is_equal_to_a_plain_loop
    tests/test_train_distill.py::test_layouts_are_equal
    tests/test_evaluate.py::test_log_likelihoods_are_those_of_a_plain_loop
    tests/test_evaluate.py::test_the_numbers_are_the_same_on_1_2_and_3_ranks_however_the_model_is_sharded
    tests/test_evaluate.py::test_choices_beside_each_other_are_scored_as_alone_where_layers_have_windows_and_logits_a_cap
    tests/test_evaluate.py::test_answers_are_those_of_a_plain_loop_whatever_the_ranks_and_the_sharding
    tests/test_evaluate.py::test_with_cores_protocol_scores_are_those_of_a_plain_loop
    tests/test_sample.py::test_a_batch_says_what_transformers_says_to_each_prompt_alone
    tests/test_sample.py::test_a_text_that_goes_on_where_one_ended_need_not_be_read_again
    tests/test_export_model.py::test_transformers_loads_it_with_equal_logits_and_writes_on
    tests/evaluation/test_in_run.py::test_evaluate_finds_the_same_scores_to_the_bit_whatever_has_trained_on_1_2_and_3_ranks
    tests/runtime/test_checkpoint.py::test_loads_what_any_strategy_wrote_bit_for_bit_and_goes_on
    tests/benchmarks/test_forms.py
    tests/huggingface/test_balance.py
    tests/huggingface/test_packing.py
    tests/huggingface/test_finetune.py
    tests/huggingface/test_lora.py::test_a_run_goes_on_under_every_strategy_and_number_of_ranks
    tests/huggingface/test_lora.py::test_peft_reads_the_adapter_with_equal_logits
    tests/huggingface/test_lora.py::test_dropout_is_the_same_under_every_strategy_and_when_a_run_goes_on
    tests/huggingface/test_lora_experts.py
    tests/huggingface/test_frozen.py
    tests/huggingface/test_nf4.py
    tests/huggingface/test_native.py::test_logits_are_those_of_transformers
    tests/huggingface/test_native.py::test_fewer_tokens_at_once_change_nothing_of_the_model
    tests/huggingface/test_native.py::test_a_run_is_the_one_that_transformers_class_makes
    tests/huggingface/test_export_finetuned.py::test_transformers_loads_what_was_trained_with_equal_logits
    tests/huggingface/test_export_finetuned.py::test_the_adapter_on_the_original_equals_the_merged_model
)
export OMP_NUM_THREADS=1 PET_LOCAL_ADDR=127.0.0.1 # as in run.sh
failed=()
check() { # what to call it, then a command
    local name=$1 result=passed
    shift
    SECONDS=0
    "$@" || result=FAILED
    printf '%s: %s in %d:%02d minutes\n' "$result" "$name" $((SECONDS / 60)) $((SECONDS % 60))
    [[ $result == passed ]] || failed+=("$name")
}

with_instructions() { # a setting
    local cache
    # What torch.compile has built is found again by its source, whatever instructions it was built for: each has its own.
    cache=$(mktemp -d)
    # shellcheck disable=SC2086 # a setting may be several variables
    check "$1" env $1 TORCHINDUCTOR_CACHE_DIR="$cache" "$PYTHON" -m pytest -q -rfEs -n 2 --dist loadfile "${numerics[@]}"
    rm -rf "$cache"
}

with_debians_python() {
    local debian=/usr/bin/python3.11 environment=${XDG_CACHE_HOME:-$HOME/.cache}/train-versions/python3.11 torch # 3.11.2
    local python=$environment/bin/python
    torch=$("$PYTHON" -c 'import torch; print(torch.__version__)')
    if [[ -x $debian ]] && { [[ -x $python ]] || "$debian" -m venv "$environment"; } &&
        "$python" -m pip install --quiet --progress-bar off "torch==$torch" &&
        "$python" -m pip install --quiet --progress-bar off -r requirements.txt; then
        # Both, whatever part of the files CI has asked for.
        PYTEST_ADDOPTS='' check "$("$python" --version)" \
            "$python" -m pytest -q -rfEs -n 2 --dist loadfile tests/test_smoke.py tests/test_resume.py
    else
        echo "left out: $debian, which is not here, or for which pip cannot install requirements.txt"
    fi
}

for setting in "${settings[@]}"; do
    if [[ $setting == debian ]]; then
        with_debians_python
    else
        with_instructions "$setting"
    fi
done
exit $((${#failed[@]} > 0))
