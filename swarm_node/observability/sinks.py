"""Places for metrics besides metrics.jsonl: TensorBoard, Weights & Biases, Trackio.

A sink that the user asked for and that cannot start raises UserError at once.
"""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Protocol

from swarm_node.errors import UserError


class Sink(Protocol):
    """Takes the numbers of a round."""

    name: str

    def write(self, round: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def open_sinks(names: Sequence[str], run_dir: Path, config: dict[str, Any], first_round: int) -> list[Sink]:
    """The sinks called `names`; `first_round` is the one after the checkpoint resumed from (1 in a new run)."""
    sinks: list[Sink] = []
    for name in names:
        if name == "tensorboard":
            sinks.append(TensorBoard(run_dir, first_round))
        elif name == "trackio":
            sinks.append(Trackio(run_dir, config))
        else:
            sinks.append(WandB(run_dir, config))
    return sinks


class TensorBoard:
    """Event files in `<run dir>/tensorboard`; rounds after the checkpoint are purged on resuming."""

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

    It never asks for a key on the terminal. A round that is recorded again after a resume keeps its first values.
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


class Trackio:
    """A run named after the run directory, continued on resuming, in Trackio's own database on this machine
    (`TRACKIO_DIR`); `trackio show --project swarm-node` shows it. Obeys `TRACKIO_PROJECT`.

    It never asks for a token on the terminal, and sends nothing away unless `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL`
    is set. A round that is recorded again after a resume keeps its first values.
    """

    name = "Trackio"

    def __init__(self, run_dir: Path, config: dict[str, Any]) -> None:
        try:
            import trackio
        except ImportError as error:
            raise _missing("trackio") from error
        run_id = run_dir / "trackio-id.txt"
        if not run_id.exists():
            run_id.write_text(secrets.token_hex(4))
        name = f"{run_dir.resolve().name}-{run_id.read_text()}"  # one database for all runs, which it tells by name
        project = os.environ.get("TRACKIO_PROJECT", "swarm-node")
        own = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        try:
            with redirect_stdout(io.StringIO()), _never_asking():  # the terminal is ours
                self._run = trackio.init(project, name, config=config, resume="allow", **own)
            self._recorded = self._run._next_step - 1
        except Exception as error:  # of its database, a server or the hub: it has no class of its own for them
            raise UserError(f"Trackio: {error}; mend that, or leave it out of `log`") from error
        self._finish = trackio.finish

    def write(self, round: int, numbers: Mapping[str, float]) -> None:
        if round > self._recorded:
            self._run.log(dict(numbers), step=round)
            self._recorded = round

    def close(self) -> None:
        with redirect_stdout(io.StringIO()):
            self._finish()


@contextmanager
def _never_asking() -> Iterator[None]:
    """Within the context, raise an error instead of asking for a token: Trackio asks on a terminal that may have no
    user."""
    import huggingface_hub

    def refuse(**_: object) -> None:
        raise PermissionError("TRACKIO_SPACE_ID needs a token that may write: run `hf auth login`")

    ask = huggingface_hub.login
    huggingface_hub.login = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        huggingface_hub.login = ask


def _missing(extra: str) -> UserError:
    return UserError(f"log = [{extra!r}] needs a package: pip install 'swarm-node[{extra}]'")
