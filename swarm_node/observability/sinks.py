"""Where metrics go besides metrics.jsonl, for those who asked: TensorBoard, Weights & Biases.

A sink that was asked for and cannot start is the user's to mend, at once (UserError).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from swarm_node.errors import UserError


class Sink(Protocol):
    """Takes the numbers of a round."""

    name: str

    def write(self, round: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def open_sinks(names: Sequence[str], run_dir: Path, config: dict[str, Any], first_round: int) -> list[Sink]:
    """The sinks called `names`; `first_round` is the one after the snapshot resumed from (1 in a new run)."""
    sinks: list[Sink] = []
    for name in names:
        if name == "tensorboard":
            sinks.append(TensorBoard(run_dir, first_round))
        else:
            sinks.append(WandB(run_dir, config))
    return sinks


class TensorBoard:
    """Event files in `<run dir>/tensorboard`; rounds after the snapshot are purged on resuming."""

    name = "TensorBoard"

    def __init__(self, run_dir: Path, first_round: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard") from error
        self._writer = SummaryWriter(run_dir / "tensorboard", purge_step=first_round)

    def write(self, round: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, round)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run named after the run directory, continued on resuming; obeys `WANDB_PROJECT` and `WANDB_MODE`.

    Never asks for a key on the terminal. A round recorded again after a resume stays as it was at first.
    """

    name = "Weights & Biases"

    def __init__(self, run_dir: Path, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb") from error
        run_id = run_dir / "wandb-id.txt"
        if not run_id.exists():
            run_id.write_text(secrets.token_hex(4))
        try:
            if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
                raise UserError("no key for Weights & Biases: run `wandb login`, or set WANDB_MODE=offline")
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "swarm-node"),
                name=run_dir.resolve().name,
                id=run_id.read_text(),
                resume="allow",
                dir=run_dir,
                config=config,
                settings=wandb.Settings(console="off", silent=True),  # the terminal is ours
            )
        except wandb.Error as error:
            raise UserError(f"Weights & Biases {error}; mend that, or leave it out of `log`") from error

    def write(self, round: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=round)

    def close(self) -> None:
        self._run.finish()


def _missing(extra: str) -> UserError:
    return UserError(f"log = [{extra!r}] needs a package: pip install 'swarm-node[{extra}]'")
