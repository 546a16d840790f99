"""Mistakes that are found before torch is loaded."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm_node.config import NodeConfig
from swarm_node.config.training import RewardFunctionConfig
from swarm_node.errors import TemporaryError, UserError
from swarm_node.runtime.preflight import check_functions, check_material, check_run_place
from swarm_node.storage.rundir import RunDir
from tests.support.disks import leave

LOOPBACK = "127.0.0.1"


def config(folder: Path, **more: Any) -> NodeConfig:
    return NodeConfig.model_validate({"run_dir": str(folder / "run"), **more})


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens."""
    with socket.socket() as other:
        other.bind((LOOPBACK, 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_place_that_can_be_used_stays_untouched(tmp_path: Path) -> None:
    check_run_place(config(tmp_path, network={"listen": LOOPBACK}), network=True)
    check_material(config(tmp_path), own_tasks=True, own_model=True)
    assert not list(tmp_path.iterdir())


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    with (
        RunDir.open(tmp_path / "run"),
        pytest.raises(UserError, match=f"run is in use by process {os.getpid()}: stop it"),
    ):
        check_run_place(config(tmp_path), network=False)
    check_run_place(config(tmp_path), network=False)


def test_a_key_is_read_before_torch(tmp_path: Path) -> None:
    named = config(tmp_path, network={"identity": str(tmp_path / "other.key")})
    (tmp_path / "other.key").write_text("no key")
    with pytest.raises(UserError, match="holds no key of a peer"):
        check_run_place(named, network=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text("")
    (tmp_path / "run/identity.key").write_text("no key")
    with pytest.raises(UserError, match="restore it, or delete it for a new peer"):
        check_run_place(config(tmp_path, network={"listen": LOOPBACK}), network=True)


def test_a_file_and_other_things_are_no_run(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="run is not a directory"):
        check_run_place(config(tmp_path), network=False)
    (tmp_path / "run").unlink()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/diary.txt").write_text("")
    with pytest.raises(UserError, match="holds other things than a run"):
        check_run_place(config(tmp_path), network=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="no permission to write"):
        check_run_place(config(tmp_path), network=False)


@pytest.mark.parametrize(("key", "option"), [("port", "--port"), ("gossip_port", "--gossip-port")])
def test_a_chosen_port_that_is_taken_is_refused(tmp_path: Path, taken: int, key: str, option: str) -> None:
    chosen = config(tmp_path, network={"listen": LOOPBACK, key: taken})
    with pytest.raises(UserError, match=f"port {taken} of {LOOPBACK} is taken.*choose another {option}"):
        check_run_place(chosen, network=True)
    check_run_place(chosen, network=False)
    check_run_place(config(tmp_path, network={"listen": LOOPBACK, key: taken, "dial_only": True}), network=True)


def test_a_taken_port_of_health_is_refused(tmp_path: Path, taken: int) -> None:
    with pytest.raises(UserError, match=f"port {taken} of {LOOPBACK} is taken.*choose another --health-port"):
        check_run_place(config(tmp_path, health={"port": taken}), network=False)


def test_room_for_two_checkpoints_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, 2**22)
    with pytest.raises(UserError, match=r"for two checkpoints of 5\.0 MiB: 4\.0 MiB are free"):
        check_material(config(tmp_path, eval={"every": 0}), own_tasks=True, own_model=True)
    check_material(config(tmp_path, policy={"lora": True}), own_tasks=True, own_model=True)
    check_material(config(tmp_path), own_tasks=True, own_model=False)


def test_moments_in_8_bits_need_less_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, 6 * 2**20)
    packed = config(tmp_path, eval={"every": 0}, grpo={"optimizer": "adamw_8bit"})
    check_material(packed, own_tasks=True, own_model=True)
    leave(monkeypatch, 5 * 2**20)
    with pytest.raises(UserError, match=r"for two checkpoints of 2\.5 MiB: 5\.0 MiB are free"):
        check_material(packed, own_tasks=True, own_model=True)


def test_the_best_checkpoint_needs_room_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, 12 * 2**20)
    with pytest.raises(UserError, match=r"for three checkpoints of 5\.0 MiB: 12\.0 MiB are free"):
        check_material(config(tmp_path, eval={"every": 1}), own_tasks=True, own_model=True)
    check_material(config(tmp_path, eval={"every": 0}), own_tasks=True, own_model=True)


def test_a_missing_reward_file_is_named(tmp_path: Path) -> None:
    rewards = {"functions": [{"path": "nowhere.py:close"}]}
    with pytest.raises(UserError, match=r"'nowhere.py:close': there is no file nowhere.py"):
        check_material(config(tmp_path, rewards=rewards), own_tasks=True, own_model=True)


def test_a_missing_reward_function_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from math import *\ndef closer(**columns): ...\n")
    check_functions([RewardFunctionConfig(path=f"{file}:{name}") for name in ("closer", "gcd")])
    for unspelt in ("from math import*\n", "exec(open('other.py').read())\n"):
        file.write_text(unspelt)
        check_functions([RewardFunctionConfig(path=f"{file}:gcd")])
    file.write_text("def closer(**columns): ...\n")
    check_functions([RewardFunctionConfig(path=f"{file}:closer")])
    with pytest.raises(UserError, match=r"mine.py has no function 'close'"):
        check_functions([RewardFunctionConfig(path=f"{file}:close")])


@pytest.mark.parametrize("section", [{"policy": {"quantize": "nf4"}}, {"grpo": {"optimizer": "adamw_8bit"}}])
@pytest.mark.parametrize(("found", "state"), [(None, "it is not installed"), ("0.49.2", "0.49.2 is installed")])
def test_the_package_that_quantises_is_missed_early(
    found: str | None, state: str, section: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if found is not None:
        metadata = tmp_path / "bitsandbytes.dist-info/METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Name: bitsandbytes\nVersion: {found}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # of packages, their names and versions are looked up there
    quantised = config(tmp_path, **section)
    with pytest.raises(UserError, match=f"needs bitsandbytes 0.50 or newer, and {state}: .*install.*quantize"):
        check_material(quantised, own_tasks=False, own_model=False)


def test_stages_keep_their_moments_in_float32(tmp_path: Path) -> None:
    asked = config(tmp_path, grpo={"optimizer": "adamw_8bit"}, pipeline={"stages": 2})
    with pytest.raises(UserError, match="adamw_8bit is not for pipeline stages, .*: leave it out"):
        check_material(asked, own_tasks=False, own_model=False)


def test_the_place_of_copies_is_looked_for_early(tmp_path: Path) -> None:
    def check(url: str) -> None:
        check_material(config(tmp_path, checkpoints={"to": url}), own_tasks=False, own_model=False)

    check(f"file://{tmp_path}")
    assert not list(tmp_path.iterdir())
    with pytest.raises(TemporaryError, match=f"{tmp_path}/no: there is no such folder.* mkdir {tmp_path}/no"):
        check(f"file://{tmp_path}/no")


@pytest.mark.parametrize(("url", "driver", "extra"), [("s3://b/x", "s3fs", "[s3]"), ("gs://b", "gcsfs", "[gcs]")])
def test_the_driver_of_a_bucket_is_missed_early(
    url: str, driver: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, driver, None)  # importing it fails
    with pytest.raises(UserError, match=f"--checkpoint-to {url} needs a package: .*{re.escape(extra)}"):
        check_material(config(tmp_path, checkpoints={"to": url}), own_tasks=False, own_model=False)


def test_the_checks_load_nothing_heavy() -> None:
    script = (
        "import sys; from swarm_node.config import NodeConfig\n"
        "from swarm_node.runtime.preflight import check_material, check_run_place\n"
        "import swarm_node.cli.train, swarm_node.runtime.limits, swarm_node.swarm.links\n"
        "config = NodeConfig.model_validate({'run_dir': '/nowhere/x', 'checkpoints': {'to': 'file:///'}})\n"
        "check_material(config, True, True)\n"
        "print([n for n in ('torch', 'numpy', 'transformers', 'hivemind', 'reasoning_gym') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
