"""What TRL's arguments and losses are called here, for an error about one that somebody took over from TRL."""

from __future__ import annotations

from collections.abc import Callable

TRL_NAMES = {
    "adam_beta1": "grpo.betas",
    "adam_beta2": "grpo.betas",
    "bf16": "policy.dtype",
    "dataset_name": "tasks",
    "epsilon": "grpo.epsilon_low",
    "eval_dataset": "eval.tasks",
    "eval_steps": "eval.every",
    "fp16": "policy.dtype",
    "generation_batch_size": "grpo.batch_groups",
    "gradient_accumulation_steps": "grpo.batch_groups",
    "importance_sampling_level": "grpo.importance_level",
    "load_in_4bit": "policy.quantize",
    "load_in_8bit": "policy.quantize",
    "lora_r": "policy.lora_rank",
    "lora_target_modules": "policy.lora_targets",
    "loss_type": "grpo.loss",
    "lr_scheduler_type": "grpo.schedule",
    "mask_truncated_completions": "grpo.mask_truncated",
    "max_completion_length": "rollouts.max_new_tokens",
    "max_grad_norm": "grpo.grad_clip",
    "max_steps": "rounds",
    "model_name_or_path": "policy.model",
    "model_revision": "policy.revision",
    "multi_objective_aggregation": "grpo.aggregation",
    "num_generations": "rollouts.group_size",
    "num_generations_eval": "eval.samples",
    "num_iterations": "grpo.iterations",
    "off_policy_mask_threshold": "grpo.off_policy_mask",
    "optim": "grpo.optimizer",
    "output_dir": "run_dir",
    "peft_config": "policy.lora",
    "per_device_train_batch_size": "rollouts.groups",
    "report_to": "log",
    "reward_funcs": "rewards.functions",
    "run_name": "name",
    "save_steps": "checkpoints.every",
    "save_total_limit": "checkpoints.keep",
    "scale_rewards": "grpo.advantage",
    "steps_per_generation": "grpo.batch_groups",
    "train_dataset": "tasks",
    "use_cpu": "policy.device",
    "use_peft": "policy.lora",
    "vllm_importance_sampling_mode": "grpo.correction",
    "warmup_steps": "grpo.warmup",
}
"""TRL's argument -> the key here, where their names differ. docs/grpo.md has both, and a test compares it."""
IN_QUESTIONS = {"rollouts.groups", "grpo.batch_groups"}  # where TRL counts answers
NOT_HERE = {
    "entropy_coef": "no loss has an entropy term",
    "eval_on_start": "held-out questions are always asked before training, unless eval.questions is 0",
    "eval_strategy": "eval.every says after how many rounds to evaluate, 0 = only before and after training",
    "load_best_model_at_end": "`eval` and `export` take the best checkpoint with --checkpoint best",
    "log_completions": "answers are always kept: `swarm-node samples` shows them",
    "logging_steps": "every round is recorded",
    "num_train_epochs": "a run has a number of rounds, not of epochs",
    "resume_from_checkpoint": "the same command again, or `swarm-node resume`, goes on",
    "reward_weights": 'each function has its own, as rewards.functions = [{ path = "mine.py:f", weight = 2 }]',
    "save_strategy": "checkpoints.every says after how many rounds to save",
    "sync_ref_model": "the reference policy of grpo.beta stays as it was",
    "use_bias_correction_kl": "the KL term of grpo.beta always has that factor",
    "use_vllm": "the node samples by itself (rollouts.engine)",
}
"""TRL's argument without a key here -> what there is in its place."""
NOTHING_HERE = frozenset(
    """
    adam_epsilon attn_implementation auto_find_batch_size average_tokens_across_devices bf16_full_eval
    cache_implementation cast_lm_head_to_fp32 dataloader_drop_last dataloader_num_workers
    dataloader_pin_memory dataset_config dataset_streaming dataset_test_split dataset_train_split
    ddp_find_unused_parameters ddp_timeout deepspeed disable_dropout disable_tqdm ds3_gather_for_generation
    entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target environment_factory eval_accumulation_steps
    eval_delay fp16_full_eval fsdp fsdp_config full_determinism generation_kwargs gradient_checkpointing_kwargs
    hub_model_id hub_private_repo hub_strategy hub_token log_completions_hub_repo log_level log_unique_prompts
    logging_first_step logging_strategy lora_dropout lora_modules_to_save lr_scheduler_kwargs
    max_tool_calling_iterations metric_for_best_model min_p model_init_kwargs neftune_noise_alpha
    num_completions_to_print optim_args optim_target_modules pad_to_multiple_of per_device_eval_batch_size
    processing_class push_to_hub ref_model_mixup_alpha ref_model_sync_steps remove_unused_columns repetition_penalty
    router_aux_loss_coef sapo_temperature_neg sapo_temperature_pos save_only_model shuffle_dataset tf32
    top_entropy_quantile top_k torch_compile torch_empty_cache_steps trust_remote_code use_adaptive_entropy
    use_cache use_dora use_liger_kernel use_rslora vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos
    vllm_gpu_memory_utilization vllm_importance_sampling_cap vllm_importance_sampling_clip_max
    vllm_importance_sampling_clip_min vllm_importance_sampling_correction vllm_max_model_length vllm_mode
    vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
    vllm_tensor_parallel_size
    """.split()
)
"""TRL's usual arguments that have nothing like them here."""
LOSSES = {
    "bnpo": "'dapo' comes nearest, which takes the mean over the tokens of the whole update",
    "luspo": "'gspo' comes nearest, which divides by the length of the answer",
    "sapo": "write it as a plugin (docs/grpo.md)",
    "vespo": "write it as a plugin (docs/grpo.md)",
}
"""TRL's loss_type that is not here -> what to do."""


def trl_hint(key: str, named: Callable[[str], str] = str) -> str:
    """`; TRL's … is … here` if the last part of an unknown key is one of TRL's arguments, else empty. `named`: how the
    user names a key."""
    name = key.rpartition(".")[2]
    if name in TRL_NAMES:
        ours = TRL_NAMES[name]
        return f"; TRL's {name} is {named(ours)} here{', in questions' if ours in IN_QUESTIONS else ''} (docs/grpo.md)"
    if name in NOT_HERE:
        return f"; TRL's {name} is not here: {NOT_HERE[name]}"
    return f"; TRL's {name} has nothing like it here" if name in NOTHING_HERE else ""


def loss_hint(key: str, value: object) -> str:
    """`; TRL's … is not here` if a value of `grpo.loss` is one of TRL's that is missing here, else empty."""
    found = LOSSES.get(str(value)) if key == "grpo.loss" else None
    return f"; TRL's {value} is not here: {found}" if found else ""
