"""Code that the settings of a run name: it runs only if this user named it.

    start    config.toml gets `# code: MARK`, a digest of its code's names and places under a secret of this user
    later    what config.toml names runs if that mark is right, or if the user names it again

The place of a module is the current directory, where Python looks for it first.

A run directory may be a stranger's, and its code would have all rights of whoever goes on with the run or measures it.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from swarm_node.config.keys import flat
from swarm_node.config.node import NodeConfig
from swarm_node.config.training import RolloutsConfig, TaskConfig, is_question_file
from swarm_node.errors import UserError
from swarm_node.say import Warned

MARK = "# code: "
SECRET_BYTES = 32
PLUGINS = {
    *("rollouts.engine", "averaging.reducer", "sharing.sampler"),
    *("grpo.loss", "grpo.correction", "grpo.advantage"),
}
"""Keys whose value is a word, or else code, `file.py:name` or `package.module:name`."""


def code_in(config: NodeConfig | Mapping[str, Any]) -> set[str]:
    """The code that settings name."""
    found: set[str] = set()
    table = config.model_dump(mode="json") if isinstance(config, NodeConfig) else config
    for key, value in flat(table).items():
        if key == "rewards.functions":
            found |= {_named(each, "path") for each in value}
        elif key in ("tasks", "eval.tasks"):
            found |= set(map(_code_of_task, value))
        elif key in PLUGINS and ":" in str(value):
            found.add(str(value))
    return found - {""}


def _named(value: Any, key: str) -> str:
    return str(value if isinstance(value, str) else dict(value).get(key) or "")


def _code_of_task(task: Any) -> str:
    """What a task, or a table of one, names if that is code; else nothing."""
    named = _named(task, "env")
    is_file = isinstance(task, str) and is_question_file(task)
    return named if ":" in named and not is_file else ""


def mark_of(config: NodeConfig) -> str:
    """The line of config.toml about the code of a run that this user starts; empty if there is none, or if no secret
    can be kept on this machine."""
    with suppress(OSError):
        return f"{MARK}{_digest(code)}\n" if (code := code_in(config)) else ""
    return ""


def own_code(file: Path, own: NodeConfig) -> set[str]:
    """The code that a run's config.toml names, if this user started the run on this machine. `own`: the settings in
    that file."""
    code = code_in(own)
    marks = [line for line in file.read_text("utf-8").splitlines() if line.startswith(MARK)] if code else []
    with suppress(OSError):
        return code if marks and hmac.compare_digest(marks[0].encode(), f"{MARK}{_digest(code)}".encode()) else set()
    return set()


def check_code(file: Path, own: NodeConfig, config: NodeConfig, named: Mapping[str, Any]) -> None:
    """Raise UserError if a start with the settings `config` would run code that only the run's config.toml names, and
    nothing shows that this user started that run here. `own`: see `own_code`; `named`: the settings that the user
    gives."""
    foreign = code_in(config) - code_in(named)
    if foreign and not foreign <= own_code(file, own):
        raise UserError(
            f"{file} names code, and nothing shows that you started this run on this machine, in this directory"
            f"{_no_secret()}: {', '.join(sorted(foreign))}; look at it, and if you trust it name it yourself: "
            f"--config {shlex.quote(str(file))}"
        )


def without_foreign_code(config: NodeConfig, file: Path, own: NodeConfig, say: Callable[[str], None]) -> NodeConfig:
    """The settings `config` of a run for a measurement: without tasks and a sampling engine that are code, unless this
    user started the run with it. `file`, `own`: see `own_code`. Reward functions stay: their callers ask for them."""
    if (known := own_code(file, own)) >= code_in(config):
        return config

    def kept(tasks: Iterable[str | TaskConfig]) -> list[str | TaskConfig]:
        return [task for task in tasks if not (code := _code_of_task(task)) or code in known]

    engine = config.rollouts.engine
    if ":" in engine and engine not in known:
        engine = RolloutsConfig().engine
    changed = config.model_copy(
        update={
            "tasks": kept(config.tasks),
            "eval": config.eval.model_copy(update={"tasks": kept(config.eval.tasks)}),
            "rollouts": config.rollouts.model_copy(update={"engine": engine}),
        }
    )
    if lost := sorted(code_in(config) - code_in(changed)):
        say(
            Warned(
                f"left out, since it is code that only {file} names: {', '.join(lost)}; if you trust it, "
                "`swarm-node eval` takes it by --tasks, or --set rollouts.engine"
            )
        )
    return changed


def _digest(code: Iterable[str]) -> str:
    """The digest of the names of code with the places where it is looked for. Raises OSError."""
    here = os.getcwd()
    named = sorted((str(Path(each).expanduser().absolute()), "") if ".py:" in each else (here, each) for each in code)
    return hmac.new(_secret(), json.dumps(named).encode(), "sha256").hexdigest()


def _no_secret() -> str:
    """Why no run here has a mark; empty if one may have."""
    try:
        _secret()
    except OSError as error:
        return f" ({error})"
    return ""


def _secret() -> bytes:
    """This user's secret on this machine, made at its first use. Raises OSError, also if another user may have made or
    read it."""
    from huggingface_hub.constants import HF_HOME

    file = Path(HF_HOME) / "swarm-node" / f"secret-{os.getuid()}"  # users may share that directory
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        made = file.with_name(f"{file.name}.{os.getpid()}")
        with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(secrets.token_bytes(SECRET_BYTES))
        with suppress(FileExistsError):  # another process was first
            os.link(made, file)
        made.unlink()
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        status, found = os.fstat(opened.fileno()), opened.read(SECRET_BYTES + 1)
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or len(found) != SECRET_BYTES:
        raise OSError(f"{file} is no secret of this user")
    return found
