"""Places for metrics besides metrics.jsonl: TensorBoard, Weights & Biases, Trackio.

A sink that the user asked for and that cannot start raises UserError at once.
"""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from swarm_node.errors import UserError
from swarm_node.install import extra_command


class Sink(Protocol):
    """Takes the numbers of a round."""

    name: str

    def write(self, round: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class TextSink(Protocol):
    """A sink that also takes texts."""

    def write_samples(self, round: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Show some questions with their answers, as records of samples.jsonl."""


@runtime_checkable
class HeldOutSink(Protocol):
    """A sink that also takes held-out figures from before the first round (0) and from after the last one."""

    def write_held_out(self, round: int, figures: Mapping[str, float]) -> None: ...


AXES = ("step", "round", "time")  # numbers that TensorBoard has as axes of every curve
SAMPLE_COLUMNS = ["round", "task", "peer", "question", "right", "answer", "judged", "reward", "correct"]


def sample_rows(samples: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """The answers of some records of samples.jsonl, a row each with SAMPLE_COLUMNS."""
    return [
        [
            *(sample["round"], sample["task"], sample["peer"] or "own", sample["question"], sample["right"] or ""),
            *(answer["text"], answer["extracted"] or "", answer["reward"], answer["correct"]),
        ]
        for sample in samples
        for answer in sample["answers"]
    ]


def open_sinks(names: Sequence[str], run_dir: Path, config: dict[str, Any], first_round: int) -> list[Sink]:
    """The sinks called `names`; `first_round` is the one after the checkpoint resumed from (1 in a new run)."""
    kinds: dict[str, Callable[[], Sink]] = {
        "tensorboard": lambda: TensorBoard(run_dir, first_round),
        "wandb": lambda: WandB(run_dir, config),
        "trackio": lambda: Trackio(run_dir, config),
    }
    return [kinds[name]() for name in names]


class TensorBoard:
    """Event files in `<run dir>/tensorboard`; rounds after the checkpoint are purged on resuming."""

    name = "TensorBoard"

    def __init__(self, run_dir: Path, first_round: int) -> None:
        with _needed("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        self._writer = SummaryWriter(run_dir / "tensorboard", purge_step=first_round)

    def write(self, round: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            if name not in AXES:
                self._writer.add_scalar(name, value, round)

    def write_held_out(self, round: int, figures: Mapping[str, float]) -> None:
        self.write(round, figures)

    def write_samples(self, round: int, samples: Sequence[Mapping[str, Any]]) -> None:
        for number, sample in enumerate(samples, 1):
            whose = "own" if sample["peer"] is None else f"peer {sample['peer']}"
            texts = [answer["text"] if answer["text"].strip() else "(empty)" for answer in sample["answers"]]
            said = [f"{answer['reward']:.2f}: {text}" for answer, text in zip(sample["answers"], texts, strict=True)]
            text = "\n\n".join([f"{sample['task']}, {whose}", sample["question"], f"right: {sample['right']}", *said])
            shown = "\n".join(f"    {line}" for line in text.splitlines())  # code in Markdown: nothing in it is markup
            self._writer.add_text(f"samples/{number}", shown, round)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run named after the run directory, continued on resuming; obeys `WANDB_PROJECT` and `WANDB_MODE`.

    It never asks for a key on the terminal. A round that is recorded again after a resume keeps its first values.
    """

    name = "Weights & Biases"

    def __init__(self, run_dir: Path, config: dict[str, Any]) -> None:
        with _needed("wandb"):
            import wandb
        try:
            if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
                raise UserError("no key for Weights & Biases: run `wandb login`, or set WANDB_MODE=offline")
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "swarm-node"),
                name=run_dir.resolve().name,
                id=_run_id(run_dir / "wandb-id.txt"),
                resume="allow",
                dir=run_dir,
                config=config,
                settings=wandb.Settings(console="off", silent=True),  # the terminal is ours
            )
        except wandb.Error as error:
            raise UserError(f"Weights & Biases {error}; mend that, or leave it out of `log`") from error

    def write(self, round: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=round)

    def write_held_out(self, round: int, figures: Mapping[str, float]) -> None:
        self.write(round, figures)

    def write_samples(self, round: int, samples: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        self._run.log({"samples": wandb.Table([*SAMPLE_COLUMNS], sample_rows(samples))}, step=round)

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
        with _needed("trackio"):
            import trackio
        # One database for all runs, which it tells by name.
        name = f"{run_dir.resolve().name}-{_run_id(run_dir / 'trackio-id.txt')}"
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

    def write_held_out(self, round: int, figures: Mapping[str, float]) -> None:
        if round >= self._recorded:
            self._run.log(dict(figures), step=round)

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


@contextmanager
def _needed(extra: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UserError(f"log = [{extra!r}] needs a package: {extra_command(extra)}") from error


def _run_id(path: Path) -> str:
    """The random id in the file at `path`, which is made at the first start of the run."""
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text()
