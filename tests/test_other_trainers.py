"""docs/reference/names.md answers for each flag of torchtune and TRL, names only keys that exist, and is what error
lines say."""

import re

import pytest
from launch import REPO, run_script

import configurator
from configurator import other_trainers, read_knobs, translated

PAGE = REPO / 'docs' / 'reference' / 'names.md'
KNOBS = {path.name: knobs for path in sorted(REPO.glob('*.py')) if (knobs := read_knobs(path))}
TRAIN_SCRIPTS = [script for script in KNOBS if script.startswith('train_')]

# Every field of recipes/configs/**/*.yaml, and what the recipes read beside them, at bd2a0fc (23 April 2026, its last).
TORCHTUNE = """
    ac_mode ac_option activation_offloading_use_streams apply_chat_template base_model_path batch_size
    batch_size_val chat_template checkpointer._component_ checkpointer.adapter_checkpoint
    checkpointer.checkpoint_dir checkpointer.checkpoint_files checkpointer.checkpoint_files.filename_format
    checkpointer.checkpoint_files.max_filename checkpointer.keep_last_n_checkpoints checkpointer.model_type
    checkpointer.output_dir checkpointer.recipe_checkpoint clip_grad_norm collate_fn compile context_parallel_dim
    context_parallel_rotate_method cudnn_deterministic_mode custom_sharded_layers data_parallel_replicate_dim
    data_parallel_shard_dim dataloader.collate_fn dataloader.num_workers dataloader.packed
    dataloader.parallel_method dataloader.pin_memory dataloader.prefetch_factor dataloader.shuffle
    dataset._component_ dataset.add_eos dataset.column dataset.packed dataset.partition dataset.source dataset.split
    dataset.subset dataset_val._component_ dataset_val.split datasets datasets.source datasets.split datasets.subset
    datasets.transform._component_ datasets.weight debug_logging_enabled debug_num_samples_per_step device dtype
    early_exit_loss enable_activation_checkpointing enable_activation_offloading enable_async_checkpointing
    enable_expandable_segments enable_kv_cache epochs fake_quant_after_n_steps forward_batch_size fsdp.cpu_offload
    fsdp_cpu_offload fsdp_reshard_after_forward gamma gradient_accumulation_steps grpo_samples include_path
    inference.batch_size inference.engine inference.group_size inference.max_generated_tokens inference.model
    inference.queue_maxsize inference.steps_before_weight_sync inference.temperature inference.tensor_parallel_dim
    inference.top_k inference.total_batch_size kd_loss._component_ kd_ratio kl_coeff layer_dropout limit lmbda
    log_every_n_steps log_level log_peak_memory_stats loss._component_ loss.beta loss.epsilon loss.kl_coeff
    loss.label_smoothing loss.value_clip_range loss.value_coeff low_cpu_ram lr_scheduler._component_
    lr_scheduler.num_warmup_steps max_generated_tokens max_new_tokens max_seq_length max_steps_per_epoch
    memory_efficient_fsdp_wrap metric_logger._component_ metric_logger.log_dir min_response_length model._component_
    model.apply_lora_to_mlp model.apply_lora_to_output model.attn_dropout model.decoder_trainable model.embed_dim
    model.encoder_trainable model.fusion_trainable model.image_size model.lora_alpha model.lora_attn_modules
    model.lora_dropout model.lora_rank model.max_seq_len model.norm_eps model.num_heads model.num_kv_heads
    model.num_layers model.quantize_base model.use_dora model.vocab_size name num_steps optimizer._component_
    optimizer.fused optimizer.lr optimizer.weight_decay optimizer_in_bwd orchestration.num_inference_workers
    orchestration.num_postprocessing_workers orchestration.num_steps orchestration.num_training_workers
    orchestration.replay_buffer_size output_dir penalise_no_eos policy_model._component_ policy_model.attn_dropout
    policy_model.embed_dim policy_model.intermediate_dim policy_model.max_seq_len policy_model.norm_eps
    policy_model.num_heads policy_model.num_kv_heads policy_model.num_layers policy_model.vocab_size
    postprocessing.ref_checkpointer._component_ postprocessing.ref_checkpointer.checkpoint_dir
    postprocessing.ref_checkpointer.checkpoint_files postprocessing.ref_checkpointer.model_type ppo_batch_size
    ppo_epochs profile_memory profiler._component_ profiler.active_steps profiler.cpu profiler.cuda profiler.enabled
    profiler.num_cycles profiler.output_dir profiler.profile_memory profiler.record_shapes profiler.wait_steps
    profiler.warmup_steps profiler.with_flops profiler.with_stack prompt.system prompt.user prompt.user.image
    prompt.user.text quantizer quantizer._component_ quantizer.groupsize ref_checkpointer._component_
    ref_checkpointer.checkpoint_dir ref_checkpointer.checkpoint_files ref_checkpointer.model_type
    ref_checkpointer.output_dir ref_checkpointer.recipe_checkpoint ref_policy_checkpointer._component_
    ref_policy_checkpointer.checkpoint_dir ref_policy_checkpointer.checkpoint_files
    ref_policy_checkpointer.model_type ref_policy_checkpointer.output_dir ref_policy_checkpointer.recipe_checkpoint
    resize_token_embeddings resume_from_checkpoint reward_and_value_model._component_
    reward_and_value_model.attn_dropout reward_and_value_model.base_model_path reward_and_value_model.embed_dim
    reward_and_value_model.intermediate_dim reward_and_value_model.max_seq_len reward_and_value_model.norm_eps
    reward_and_value_model.num_classes reward_and_value_model.num_heads reward_and_value_model.num_kv_heads
    reward_and_value_model.num_layers reward_and_value_model.vocab_size reward_checkpointer._component_
    reward_checkpointer.checkpoint_dir reward_checkpointer.checkpoint_files reward_checkpointer.model_type
    reward_checkpointer.output_dir reward_functions reward_functions._component_ reward_functions.answer_tag
    reward_functions.negative_reward reward_functions.positive_reward reward_functions.think_tag reward_penalty
    run_val_every_n_steps save_adapter_weights_only save_every_n_epochs save_every_n_steps seed shuffle
    stop_token_ids tasks teacher_checkpointer._component_ teacher_checkpointer.checkpoint_dir
    teacher_checkpointer.checkpoint_files teacher_checkpointer.checkpoint_files.filename_format
    teacher_checkpointer.checkpoint_files.max_filename teacher_checkpointer.model_type
    teacher_checkpointer.output_dir teacher_checkpointer.recipe_checkpoint teacher_model._component_
    teacher_model.lora_attn_modules temperature tensor_parallel_dim tensor_parallel_plan._component_
    tokenizer._component_ tokenizer.image_size tokenizer.max_num_tiles tokenizer.max_seq_len tokenizer.merges_file
    tokenizer.merges_path tokenizer.path tokenizer.prompt_template tokenizer.vocab_path top_k training.batch_size
    training.checkpointer._component_ training.checkpointer.checkpoint_dir training.checkpointer.checkpoint_files
    training.checkpointer.model_type training.checkpointer.output_dir training.checkpointer.recipe_checkpoint
    training.clip_grad_norm training.compile training.enable_activation_checkpointing
    training.enable_activation_offloading training.loss._component_ training.loss.epsilon training.loss.kl_coeff
    training.optimizer._component_ training.optimizer.fused training.optimizer.lr training.ppo_epochs
    training.save_every_n_steps training.seed training.steps_before_weight_sync use_distributed_state_dict use_flex
    value_checkpointer._component_ value_checkpointer.checkpoint_dir value_checkpointer.checkpoint_files
    value_checkpointer.model_type value_checkpointer.output_dir whiten_rewards
""".split()

# Every field of SFTConfig and DPOConfig, and so of TrainingArguments: TRL 1.16.0 and transformers 5.24.0.
TRL = """
    accelerator_config activation_checkpointing activation_checkpointing_kwargs activation_offloading adam_beta1
    adam_beta2 adam_epsilon assistant_only_loss auto_find_batch_size average_tokens_across_devices
    batch_eval_metrics beta bf16 bf16_full_eval chat_template_path completion_only_loss data_seed
    dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers
    dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor dataset_kwargs dataset_num_proc
    dataset_text_field ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters
    ddp_static_graph ddp_timeout debug deepspeed disable_dropout disable_tqdm discopop_tau do_eval do_predict
    do_train enable_jit_checkpoint eos_token eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start
    eval_packing eval_steps eval_strategy eval_use_gather_object f_alpha_divergence_coef f_divergence_type fp16
    fp16_full_eval fsdp fsdp_config full_determinism gradient_accumulation_steps gradient_checkpointing
    gradient_checkpointing_kwargs greater_is_better hub_always_push hub_model_id hub_private_repo hub_revision
    hub_strategy hub_token ignore_data_skip include_for_metrics include_num_input_tokens_seen label_names
    label_smoothing label_smoothing_factor ld_alpha learning_rate length_column_name liger_kernel_config
    load_best_model_at_end local_rank log_level log_level_replica log_on_each_node logging_first_step
    logging_nan_inf_filter logging_steps logging_strategy loss_type loss_weights lr_scheduler_kwargs
    lr_scheduler_type max_grad_norm max_length max_steps metric_for_best_model model_init_kwargs neftune_noise_alpha
    num_train_epochs optim optim_args optim_target_modules output_dir packing packing_strategy pad_to_multiple_of
    pad_token padding_free parallelism_config per_device_eval_batch_size per_device_train_batch_size
    precompute_ref_batch_size precompute_ref_log_probs prediction_loss_only project push_to_hub
    ref_model_mixup_alpha ref_model_sync_steps remove_unused_columns report_to
    restore_callback_states_from_checkpoint resume_from_checkpoint router_aux_loss_coef run_name save_on_each_node
    save_only_model save_steps save_strategy save_total_limit seed shuffle_dataset skip_memory_metrics
    sync_ref_model tf32 torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps
    trackio_bucket_id trackio_space_id trackio_static_space_id train_sampling_strategy truncation_mode
    trust_remote_code use_cache use_cpu use_liger_kernel use_weighting warmup_steps weight_decay
""".split()

# Of GRPOConfig those that SFTConfig and DPOConfig lack.
GRPO = """
    cache_implementation cast_lm_head_to_fp32 chat_template_kwargs delta ds3_gather_for_generation entropy_coef
    entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target epsilon epsilon_high generation_batch_size
    generation_kwargs importance_sampling_level log_completions log_completions_hub_repo log_multimodal
    log_unique_prompts mask_truncated_completions max_completion_length max_tool_calling_iterations min_p
    multi_objective_aggregation num_completions_to_print num_generations num_generations_eval num_iterations
    off_policy_mask_threshold repetition_penalty reward_weights sapo_temperature_neg sapo_temperature_pos scale_rewards
    steps_per_generation temperature top_entropy_quantile top_k top_p transformers_continuous_batching_config
    use_adaptive_entropy use_bias_correction_kl use_transformers_continuous_batching use_transformers_paged use_vllm
    vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos vllm_enable_sleep_mode vllm_gpu_memory_utilization
    vllm_group_port vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
    vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_max_model_length vllm_mode vllm_model_impl
    vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex
    vllm_tensor_parallel_size
""".split()


def rows():
    """(flags, answer) of each row of the page's tables of flags."""
    for theirs, ours in re.findall(r'^\| (`[^|]*) \| ([^|]*) \|$', PAGE.read_text(), flags=re.MULTILINE):
        if flags := re.findall(r'`([\w.]+)`', theirs):
            yield flags, ours


def says(flag, script='train_ddp.py'):
    return translated(flag, KNOBS[script], REPO / script)


@pytest.mark.parametrize(
    ('fields', 'script'),
    [(TORCHTUNE, 'train_ddp.py'), (TRL, 'train_ddp.py'), (GRPO, 'train_grpo.py')],
    ids=['torchtune', 'TRL', 'GRPO'],
)
def test_every_flag_is_a_key_or_has_an_answer(fields, script):
    assert fields == sorted({*fields}) and len(fields) > 60
    for flag in [*fields, 'max_prompt_length', 'kl_coef']:
        assert flag in KNOBS[script] or says(flag, script), f'docs/reference/names.md has no row for {flag}'


def test_a_flag_stands_in_one_row_and_its_answer_begins_with_what_it_is():
    flags = [flag for flags, _ in rows() for flag in flags]
    assert len(flags) == len({*flags}) == len(other_trainers()) > 600, {f for f in flags if flags.count(f) > 1}
    for _, answer in rows():
        first, _, _ = answer.partition(' ')
        assert re.match(r'`\w|always on|not here', answer) or first.strip(':,') in (*KNOBS, 'torchrun', 'a'), answer


def test_every_key_that_an_answer_names_is_one_of_the_script_that_it_names():
    """Without a script's name it is a key of train_ddp.py."""
    for flags, answer in rows():
        for chain, owner in re.findall(r'((?:`\w+(?:=[\w,]+)?`(?:, )?)+)(?: of (\w+\.py))?', answer):
            for key, value in re.findall(r'`(\w+)(?:=([\w,]+))?`', chain):
                knob = KNOBS[owner or 'train_ddp.py'].get(key)
                assert knob, f'{flags}: {owner or "train_ddp.py"} has no key {key}'
                assert not value or not knob.choices or value in knob.choices or value.isdigit(), (flags, key, value)
        for script, key in re.findall(r'\b(\w+\.py)\b[^.;]*? (?:--|as --)(\w+)', answer):
            assert key in KNOBS[script], f'{flags}: {script} has no key {key}'


@pytest.mark.parametrize('script', KNOBS)
def test_an_answer_names_the_owner_of_a_key_that_the_script_lacks(script):
    every = {key for knobs in KNOBS.values() for key in knobs}
    for flags, answer in rows():
        for key in {*re.findall(r'`(\w+)', answer)} - {*KNOBS[script]}:
            # download_model.py knows better what an output_dir is there: the key `to`, of its own.
            own = {'output_dir', 'local_dir'} if 'to' in KNOBS[script] else set()
            if key == 'init_from' and answer.startswith('`init_from`') and 'out_dir' in KNOBS[script]:
                continue  # there it is out_dir, as the next test has it
            flag = next((flag for flag in flags if flag not in {*KNOBS[script], *own}), None)
            if flag and key in every:
                assert re.search(rf'\b{key}(=[\w,]+)?(, \w+)* of \w+\.py', says(flag, script)), (
                    flag,
                    says(flag, script),
                )


@pytest.mark.parametrize(
    ('script', 'flag', 'said'),
    [
        ('train_ddp.py', 'max-lr', 'here it is learning_rate, the peak'),
        ('train_ddp.py', 'gradient_accumulation_steps', 'not here: it follows from global_batch_size'),
        ('train_ddp.py', 'epochs', 'here it is num_epochs, passes'),
        ('train_ddp.py', 'max_steps_per_epoch', 'here it is max_iters, for the whole run'),
        ('train_ddp.py', 'beta', 'here it is beta of train_dpo.py'),
        ('train_grpo.py', 'beta', 'train_grpo.py lacks'),
        ('train_ddp.py', 'num-iterations', "max_iters for nanochat's"),
        ('train_ddp.py', 'optimizer.lr', 'here it is learning_rate'),
        ('train_ddp.py', 'training.seed', 'here it is seed'),
        ('train_ddp.py', 'teacher_checkpointer.checkpoint_dir', 'not here: no distillation'),
        ('train_ddp.py', 'training.checkpointer.checkpoint_dir', 'here it is init_from'),
        ('train_ddp.py', 'dataset.source', 'here it is dataset of prepare_data.py'),
        ('train_dpo.py', 'dpo_beta', 'here it is beta, 0.1'),
        ('train_dpo.py', 'fsdp_cpu_offload', 'here it is cpu_offload=params, or'),
        ('train_grpo.py', 'load_best_model_at_end', 'here it is keep_best of train_ddp.py'),
        ('evaluate.py', 'model', 'here it is out_dir: a run of any train script, or a Hugging Face folder'),
        ('sample.py', 'init_from', 'here it is out_dir: a run, or a Hugging Face folder'),
        ('sample.py', 'source', "nanochat's base, sft and rl are runs here, out_dir"),
        ('train_grpo.py', 'num_samples', 'here it is num_generations'),
        ('train_grpo.py', 'examples_per_step', 'here it is prompts_per_step'),
        ('evaluate.py', 'task-name', 'here it is tasks'),
        ('evaluate.py', 'max-problems', 'here it is limit'),
        ('sample.py', 'port', 'here it is web'),
        ('sample.py', 'model_step', 'here it is step'),
        ('sample.py', 'max_length', 'max_new_tokens of sample.py'),
        ('sample.py', 'num_return_sequences', 'here it is num_samples'),
        ('sample.py', 'system_prompt', 'here it is system'),
        ('sample.py', 'do_sample', 'here it is temperature'),
        ('train_ddp.py', 'dataset_name', 'here it is dataset'),
        ('train_ddp.py', 'use_peft', 'here it is lora_rank'),
        ('train_ddp.py', 'dataset_train_split', 'here it is source_split of prepare_data.py'),
        ('train_ddp.py', 'model_revision', 'here it is revision of download_model.py'),
        ('train_ddp.py', 'bos_token', 'not here: special tokens are those'),
        ('prepare_data.py', 'max_seq_length', 'here it is block_size of train_ddp.py'),
    ],
)
def test_a_flag_of_another_trainer_is_answered_in_one_line(script, flag, said):
    given = f'--{flag}=4'
    result = run_script(script, given, check=False)
    assert result.returncode == 2 and result.stderr.count('\n') == 1, result
    assert result.stderr.startswith(f'error: --{flag} is not a key of {script}: ') and said in result.stderr


@pytest.mark.parametrize('given', [['--lr', '1e-4'], ['optimizer.lr=1e-4']], ids=' '.join)
def test_it_is_answered_too_as_other_trainers_write_it(given):
    name = given[0].partition('=')[0]
    said = run_script('train_ddp.py', *given, check=False).stderr
    assert said.startswith(f'error: {name} is not a key of train_ddp.py: here it is learning_rate') and '`' not in said


def test_a_part_of_a_section_that_has_the_name_of_a_key_is_not_that_key():
    assert says('optimizer.seed') == 'here it is seed' and says('optimizer.momentum') is says('dataset.else') is None


def test_without_the_page_a_key_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(configurator, '__file__', str(tmp_path / 'configurator.py'))
    other_trainers.cache_clear()
    try:
        assert says('max_lr') is None and other_trainers() == {}
    finally:
        other_trainers.cache_clear()
