"""Train the starter model on two tasks from a program, and stop early when it no longer improves."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import swarm_node


class Patience(swarm_node.Callback):
    """Ends a run whose best reward is older than `rounds` rounds, and prints what it hears."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.best, self.best_at = 0.0, 0

    def on_round(self, round: int, metrics: Mapping[str, Any]) -> bool:
        if metrics["reward"] > self.best:
            self.best, self.best_at = metrics["reward"], round
        return round - self.best_at >= self.rounds

    def on_evaluation(self, round: int, figures: Mapping[str, Any]) -> None:
        print(f"held-out pass@1 after {round} rounds: {figures['all'].pass_1:.3f}")

    def on_checkpoint(self, path: Path) -> None:
        print(f"saved {path}")

    def on_end(self, result: swarm_node.TrainResult) -> None:
        print(f"ended after {result.rounds} rounds")
        if self.best_at:
            print(f"best reward {self.best:.3f} in round {self.best_at}")


if __name__ == "__main__":
    config = {
        "tasks": ["small/gcd", "small/count_bits"],
        "rounds": 20,
        "run_dir": "runs/example",
        "eval": {"questions": 16, "samples": 2},
        "grpo": {"learning_rate": 1e-4},
    }
    result = swarm_node.train(config, [Patience(rounds=10)], quiet=True)
    print("policy:", result.checkpoint)
    model = Path("runs/example-model")
    if not model.exists():  # a second start goes on with the run, which may be over
        swarm_node.export(result.run_dir, model)
    print("as a model for transformers:", model)
