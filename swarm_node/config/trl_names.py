"""What TRL's arguments are called here, for an error about a key that somebody took over from TRL."""

from __future__ import annotations

from collections.abc import Callable

TRL_NAMES = {
    "adam_beta1": "grpo.betas",
    "adam_beta2": "grpo.betas",
    "epsilon": "grpo.epsilon_low",
    "generation_batch_size": "grpo.batch_groups",
    "gradient_accumulation_steps": "grpo.batch_groups",
    "importance_sampling_level": "grpo.importance_level",
    "loss_type": "grpo.loss",
    "lr_scheduler_type": "grpo.schedule",
    "mask_truncated_completions": "grpo.mask_truncated",
    "max_completion_length": "rollouts.max_new_tokens",
    "max_grad_norm": "grpo.grad_clip",
    "max_steps": "rounds",
    "multi_objective_aggregation": "grpo.aggregation",
    "num_generations": "rollouts.group_size",
    "num_iterations": "grpo.iterations",
    "off_policy_mask_threshold": "grpo.off_policy_mask",
    "optim": "grpo.optimizer",
    "output_dir": "run_dir",
    "peft_config": "policy.lora",
    "per_device_train_batch_size": "rollouts.groups",
    "scale_rewards": "grpo.advantage",
    "vllm_importance_sampling_mode": "grpo.correction",
    "warmup_steps": "grpo.warmup",
}
"""TRL's argument -> the key here, where their names differ. docs/grpo.md has both, and a test compares it."""
IN_QUESTIONS = {"rollouts.groups", "grpo.batch_groups"}  # where TRL counts answers


def trl_hint(key: str, named: Callable[[str], str] = str) -> str:
    """`; TRL's … is … here` if the last part of an unknown key is one of TRL's arguments, else empty. `named`: how the
    user names a key."""
    name = key.rpartition(".")[2]
    if name not in TRL_NAMES:
        return ""
    ours = TRL_NAMES[name]
    return f"; TRL's {name} is {named(ours)} here{', in questions' if ours in IN_QUESTIONS else ''} (docs/grpo.md)"
