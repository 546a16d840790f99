"""Code that only a run's directory names runs only if this user started the run on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import tomli_w
from typer.testing import CliRunner

from swarm_node.cli.app import app
from swarm_node.config import NodeConfig
from swarm_node.config.loading import load_run_config, read_layers
from swarm_node.config.own import dump_own, read_own
from swarm_node.config.own_code import MARK, PLUGINS, code_in, without_foreign_code
from swarm_node.errors import UserError
from tests.support.repository import ROOT

RUN = Path("run/config.toml")
EVIL = "import pathlib\npathlib.Path('ran').touch()\ndef f(*given, **named): ...\nclass T: ...\n"
CODE: dict[str, dict[str, Any]] = {
    "reward": {"rewards": {"functions": [{"path": "run/evil.py:f", "weight": 0.5}]}},
    "task": {"tasks": ["run/evil.py:T"]},
    "table of a task": {"tasks": ["gcd", {"env": "run/evil.py:T", "weight": 2.0}]},
    "task of the evaluation": {"eval": {"tasks": [{"env": "run/evil.py:T"}]}},
    "engine": {"rollouts": {"engine": "run/evil.py:f"}},
    "loss": {"grpo": {"loss": "run/evil.py:f"}},
    "correction": {"grpo": {"correction": "run/evil.py:f"}},
    "advantage": {"grpo": {"advantage": "run/evil.py:f"}},
    "sampler": {"sharing": {"sampler": "run/evil.py:f"}},
    "reducer": {"averaging": {"reducer": "run/evil.py:f"}},
    "a package's": {"grpo": {"loss": "os.path:join"}},
}


@pytest.fixture(autouse=True)
def a_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "home"))
    RUN.parent.mkdir()
    Path("run/evil.py").write_text(EVIL)


def another(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on it is another user, or another machine."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", f"{Path.cwd()}/another")


def started(settings: Mapping[str, Any]) -> NodeConfig:
    """The user starts a run with these settings."""
    asked = NodeConfig.model_validate({"run_dir": "run"} | settings)
    RUN.write_text(dump_own(asked, asked))
    return asked


def again(**more: Any) -> NodeConfig:
    return load_run_config([("the user", {"run_dir": "run"} | more)], False, print)


@pytest.mark.parametrize("name", CODE)
def test_own_runs_go_on_and_strangers_do_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = code_in(started(CODE[name]))
    assert code_in(again()) == {code}
    another(monkeypatch)
    with pytest.raises(UserError) as refused:
        again()
    why = "run/config.toml names code, and nothing shows that you started this run on this machine, in this directory"
    assert f"{why}: {code}" in str(refused.value)
    assert code_in(again(**CODE[name])) == {code}, "the user names it"
    given = read_layers(RUN, {}, {"run_dir": "run"}, (), ())
    assert code_in(load_run_config(given, False, print)) == {code}, "as the message says"


@pytest.mark.parametrize("name", CODE)
def test_resume_refuses_a_strangers_code(name: str) -> None:
    RUN.write_text(f"# given: tasks\n{MARK}é{'0' * 64}\n{tomli_w.dumps(CODE[name])}")
    done = CliRunner().invoke(app, ["resume", "run", "--rounds", "1", "--set", "policy.model=starter"])
    said = " ".join(done.output.split())
    assert done.exit_code == 2 and "names code" in said and "--config run/config.toml" in said, said
    assert not Path("ran").exists()


def test_a_mark_is_of_this_code_at_this_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started(CODE["loss"])
    RUN.write_text(RUN.read_text().replace('loss = "run/evil.py:f"', 'loss = "run/evil.py:g"'))
    with pytest.raises(UserError, match="evil.py:g"):
        again()
    started(CODE["loss"])
    (tmp_path / "elsewhere").mkdir()
    Path("run").rename("elsewhere/run")
    monkeypatch.chdir("elsewhere")
    with pytest.raises(UserError, match="evil.py:f"):
        again()


def test_a_module_is_another_in_another_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`rewards:f` is what the current directory has of that name."""
    asked = started({"rewards": {"functions": [{"path": "rewards:f"}]}})
    assert code_in(again()) == {"rewards:f"}
    returned = Path("returned")
    returned.mkdir()
    (returned / "rewards.py").write_text(EVIL)
    Path("run").rename(returned / "run")
    monkeypatch.chdir(returned)
    with pytest.raises(UserError, match="rewards:f"):
        again()
    assert code_in(again(rewards=asked.rewards.model_dump())) == {"rewards:f"}, "the user names it"


def test_a_secret_that_another_user_may_have_made_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    started(CODE["loss"])
    (secret,) = Path("home/swarm-node").iterdir()
    content, kept = secret.read_bytes(), Path("kept")

    def is_taken() -> bool:
        started(CODE["loss"])
        return MARK in RUN.read_text()

    assert is_taken()
    secret.chmod(0o644)
    assert not is_taken(), "others can read it"
    with pytest.raises(UserError, match=f"in this directory .*{secret.name} is no secret of this user.*evil.py:f"):
        again()
    secret.unlink()
    kept.write_bytes(content)
    kept.chmod(0o600)
    secret.symlink_to(kept.resolve())
    assert not is_taken(), "a link"
    secret.unlink()
    os.mkfifo(secret, 0o600)
    assert not is_taken(), "a pipe"
    secret.unlink()
    kept.rename(secret)
    assert is_taken()
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    secret.rename(secret.with_name(f"secret-{owner + 1}"))
    assert not is_taken(), "of another owner"


def test_runs_without_code_have_no_mark_and_no_secret() -> None:
    started({"tasks": ["gcd", "q.jsonl", "hf:openai/gsm8k:test"], "grpo": {"loss": "gspo"}})
    assert MARK not in RUN.read_text() and not Path("home").exists()
    assert again().tasks == ["gcd", "q.jsonl", "hf:openai/gsm8k:test"]


def test_the_secret_is_the_users_alone() -> None:
    started(CODE["loss"])
    (secret,) = Path("home/swarm-node").iterdir()
    assert secret.stat().st_mode & 0o077 == 0 and len(secret.read_bytes()) == 32
    first = RUN.read_text()
    started(CODE["loss"])
    assert RUN.read_text() == first, "it is made once"
    secret.write_bytes(b"")
    started(CODE["loss"])
    assert MARK not in RUN.read_text(), "an empty one, as on a full disk, is none"


def test_a_measurement_leaves_out_a_strangers_code(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("table of a task", "task of the evaluation", "engine")
    mine = started({key: value for name in names for key, value in CODE[name].items()})
    said: list[str] = []
    assert without_foreign_code(mine, RUN, read_own(RUN), said.append) is mine and not said
    other = mine.model_copy(update={"rollouts": mine.rollouts.model_copy(update={"engine": "bucket.py:f"})})
    assert without_foreign_code(other, RUN, mine, said.append).rollouts.engine == "auto", "of a checkpoint alone"
    another(monkeypatch)
    found = without_foreign_code(mine, RUN, mine, said.append)
    assert found.tasks == ["gcd"] and found.eval.tasks == [] and found.rollouts.engine == "auto"
    assert "run/evil.py:T, run/evil.py:f; if you trust it, `swarm-node eval` takes it by --tasks" in said[-1]


def test_every_setting_that_names_code_is_known() -> None:
    """Those that a second argument of `load_function` calls by their key."""
    calls = [
        re.findall(r'load_function\([^()]*?, "([^"]+)"\)', path.read_text()) for path in ROOT.glob("swarm_node/**/*.py")
    ]
    assert {name for names in calls for name in names} == PLUGINS | {"task", "reward function"}
