import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarm_node.errors import UserError
from swarm_node.storage.rundir import RunDir
from tests.support.repository import PYTHONPATH

HOLD = """
import sys, time
from swarm_node.storage.rundir import RunDir
run = RunDir.open(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


def hold_in_another_process(path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_open_makes_the_folders(tmp_path):
    with RunDir.open(tmp_path / "runs" / "local") as run:
        assert run.checkpoints.is_dir() and run.export.is_dir() and run.plots.is_dir()
        assert run.metrics.parent == run.events.parent == run.config.parent == tmp_path / "runs" / "local"
        assert (run.path / "lock").read_text().splitlines()[0] == run.holder == str(os.getpid())


def test_a_held_run_names_its_holder_until_killed(tmp_path):
    holder = hold_in_another_process(tmp_path)
    try:
        with pytest.raises(UserError, match=rf"in use by process {holder.pid}.*--run-dir"):
            RunDir.open(tmp_path)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert (tmp_path / "lock").read_text().splitlines()[0] == str(holder.pid)  # stale
    RunDir.open(tmp_path).close()


def test_closing_lets_the_next_one_in(tmp_path):
    with RunDir.open(tmp_path):
        with pytest.raises(UserError, match=f"process {os.getpid()}"):
            RunDir.open(tmp_path)
    RunDir.open(tmp_path).close()


def test_the_lock_does_not_leak_into_child_processes(tmp_path):
    run = RunDir.open(tmp_path)
    waits = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False) as child:
        child.stdout.readline()  # it has closed by now what it is to close
        run.close()
        RunDir.open(tmp_path).close()
        child.communicate(b"\n")


def test_readers_need_no_lock(tmp_path):
    with RunDir.open(tmp_path) as run:
        assert not RunDir(tmp_path).exists
        run.config.write_text("seed = 0\n")
        assert RunDir(tmp_path).exists


@pytest.mark.parametrize(
    "name", ["offers.jsonl", "ports.json", "config.tmp", "swarm.tmp", "peers.new", "ports.new", "identity.4711.new"]
)
def test_leftovers_of_a_killed_start_are_no_obstacle(tmp_path, name):
    (tmp_path / name).write_text("")
    RunDir.open(tmp_path).close()


@pytest.mark.parametrize("name", ["diary.txt", "diary.tmp", "peers.new.txt", "identity.mine.new"])
def test_a_directory_of_other_things_is_left_alone(tmp_path, name):
    (tmp_path / name).write_text("")
    with pytest.raises(UserError, match="other things than a run"):
        RunDir.open(tmp_path)
    assert os.listdir(tmp_path) == [name]


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "local").write_text("")
    with pytest.raises(UserError, match="not a directory"):
        RunDir.open(tmp_path / "local")
    with pytest.raises(UserError, match="not a directory"):
        RunDir.open(tmp_path / "local" / "below")


OPEN_AS_A_MORTAL = """
import os
from swarm_node.storage.rundir import RunDir
if os.geteuid() == 0:
    os.setuid(65534)
RunDir.open(".")
"""


@pytest.mark.parametrize("read_only", [".", "checkpoints"])
def test_directory_that_may_not_be_written(tmp_path, read_only):
    for folder in ("checkpoints", "export", "plots", "."):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder).chmod(0o777)
    (tmp_path / read_only).chmod(0o555)
    process = subprocess.run(
        [sys.executable, "-c", OPEN_AS_A_MORTAL],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
    )
    assert "UserError: no permission to write" in process.stderr
    assert "choose another directory" in process.stderr


def test_a_refused_start_leaves_no_directory(tmp_path):
    path = tmp_path / "runs" / "alice"
    with pytest.raises(UserError), RunDir.open(path) as run:
        run.write("config.toml", "")
        raise UserError("no such model")
    assert list(tmp_path.iterdir()) == []


def test_a_refused_start_keeps_older_directories(tmp_path):
    (tmp_path / "experiments").mkdir()
    with pytest.raises(UserError), RunDir.open(tmp_path / "experiments" / "alice"):
        raise UserError("no such model")
    assert list(tmp_path.rglob("*")) == [tmp_path / "experiments"]


@pytest.mark.parametrize("begins", [False, True])
def test_a_run_that_was_there_survives_any_error(tmp_path, begins):
    path = tmp_path / "alice"
    if not begins:
        RunDir.open(path).close()
    with pytest.raises(UserError), RunDir.open(path) as run:
        if begins:
            run.keep()
        raise UserError("the disk is full")
    assert path.is_dir() and not RunDir(path).in_use


@pytest.mark.parametrize("wrote", [False, True])
def test_an_interrupted_start_keeps_what_it_wrote(tmp_path, wrote):
    with pytest.raises(KeyboardInterrupt), RunDir.open(tmp_path / "alice") as run:
        if wrote:
            run.identity.write_text("a key")
        raise KeyboardInterrupt
    assert (tmp_path / "alice").is_dir() == wrote


def test_a_look_blocks_no_start(tmp_path, monkeypatch):
    RunDir.open(tmp_path).close()
    look = os.open(tmp_path / "lock", os.O_RDONLY)
    fcntl.flock(look, fcntl.LOCK_SH | fcntl.LOCK_NB)  # as `in_use` for a moment
    monkeypatch.setattr("swarm_node.storage.lock_file.time.sleep", lambda seconds: os.close(look))
    RunDir.open(tmp_path).close()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_place_where_nothing_can_be_made_is_refused() -> None:
    with pytest.raises(UserError, match="write /proc"):
        RunDir("/proc/nowhere").check_usable()


def test_a_file_system_that_is_read_only_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match="no permission to write"):
        RunDir(tmp_path).check_usable()
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(UserError, match="is on a file system that is read-only; mount a volume there"):
        RunDir(tmp_path).check_usable()
