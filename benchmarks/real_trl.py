"""GRPO of a real model with TRL, as its documentation has it: LoRA on all linear layers, and TRL's defaults.

    python -m benchmarks.real_trl '{"model": DIR, "file": JSONL, "out": DIR, "seed": 1, "rate": 2e-4, …}'

Not TRL's defaults, each in TRL's favour: answers are no longer than the set needs (512 tokens otherwise), and
activations are not computed again (there is memory). The rate stays, or falls linearly to 0 (`falls`), as it does by
TRL's default over a number of steps, which nobody knows here. It trains on the questions of the file that this package
trains on, until `until` (Unix time). Adapters and a line for each step's reward go to `out`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.real_judge import reward

SAVE_S = 60.0
"""Seconds between two adapters, as this package's default is."""
GENERATIONS = 8
RANK, ALPHA = 16, 32
STEPS = 1_000_000  # more than there is time for


def questions(file: str) -> list[dict[str, Any]]:
    """The questions of a file that this package would train on, as a conversation each."""
    from swarm_node.config import RewardsConfig
    from swarm_node.tasks.taskset import load_tasks

    tasks = load_tasks([file], RewardsConfig())
    held_out = {task.question for task in tasks.held_out(10**6)}
    training = [task for task in tasks.every() if task.question not in held_out]
    return [{"prompt": [{"role": "user", "content": t.question}], "answer": t.answer} for t in training]


def settings(spec: dict[str, Any]) -> dict[str, Any]:
    """Of GRPOConfig."""
    return {
        "output_dir": spec["out"],
        "seed": spec["seed"],
        "learning_rate": spec["rate"],
        "lr_scheduler_type": "constant",
        "num_generations": GENERATIONS,
        "max_completion_length": spec["new"],
        "bf16": spec["dtype"] == "bfloat16",
        "model_init_kwargs": {"dtype": spec["dtype"]},
        "gradient_checkpointing": False,
        "max_steps": STEPS,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }


def save(model: Any, out: Path, name: str) -> None:
    """Write the adapter; its folder appears whole."""
    temporary = out / f".tmp-{name}"
    model.save_pretrained(temporary)
    temporary.rename(out / "adapters" / name)


def main(spec: dict[str, Any]) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    out = Path(spec["out"])
    (out / "adapters").mkdir(parents=True)
    saved, began = time.monotonic(), time.time()

    class Saving(TrainerCallback):
        def on_step_begin(self, args: object, state: object, control: object, **parts: Any) -> None:
            if spec["falls"]:
                left = (spec["until"] - time.time()) / (spec["until"] - began)
                for group in parts["optimizer"].param_groups:
                    group["lr"] = spec["rate"] * max(0.0, left)

        def on_step_end(self, args: object, state: Any, control: Any, model: Any = None, **kwargs: object) -> None:
            nonlocal saved
            control.should_training_stop |= time.time() >= spec["until"]
            if control.should_training_stop or time.monotonic() - saved >= SAVE_S:
                save(model, out, f"{state.global_step:08}")
                saved = time.monotonic()

    def judged(prompts: list[Any], completions: list[Any], answer: list[str], **columns: object) -> list[float]:
        found = reward(prompts, completions, answer)
        with (out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"reward": sum(found) / len(found)}) + "\n")
        return found

    trainer = GRPOTrainer(
        model=spec["model"],
        reward_funcs=judged,
        args=GRPOConfig(**settings(spec)),
        train_dataset=Dataset.from_list(questions(spec["file"])),
        peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[Saving()],
    )
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
