import itertools
import json
import math
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm_node.errors import TemporaryError, UserError
from swarm_node.install import extra_command
from swarm_node.observability.jsonl import JsonLines
from swarm_node.observability.metrics import EventLog, MetricsWriter
from swarm_node.observability.sinks import open_sinks
from tests.support.disks import file_size_limit
from tests.support.run_files import read_jsonl


def record(round, **more):
    return {"round": round, "step": round, "reward": round / 10, **more}


def write(path, *rounds):
    writer = MetricsWriter(path, print)
    for round in rounds:
        writer.write(record(round))
    writer.close()


def rounds_in(path):
    return [one["round"] for one in read_jsonl(path)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_written_records_are_read(path):
    write(path, 1, 2)
    write(path, 3)
    assert read_jsonl(path) == [record(1), record(2), record(3)]


def test_floats_are_rounded_sensibly_and_json_stays_json(path):
    writer = MetricsWriter(path, print)
    values = {
        "third": 1 / 3,
        "learning_rate": 2.0000000001e-6,
        "time": 1754870400.123456,
        "num_tokens": 12_345_678_901,
        "kl": math.nan,
        "grad_norm": -math.inf,
        "nested": {"list": [0.1 + 0.2, math.inf]},
        "done": True,
    }
    writer.write({"round": 1} | values)
    writer.close()
    assert read_jsonl(path) == [
        {
            "round": 1,
            "third": 0.333333,
            "learning_rate": 2e-6,
            "time": 1754870400.123,
            "num_tokens": 12_345_678_901,
            "kl": None,
            "grad_norm": None,
            "nested": {"list": [0.3, None]},
            "done": True,
        }
    ]
    assert "NaN" not in path.read_text()


def test_resuming_drops_what_came_after_the_checkpoint(path):
    write(path, 1, 2, 3, 4)
    writer = MetricsWriter(path, print)
    writer.truncate_after(2)
    assert rounds_in(path) == [1, 2]
    writer.write(record(3))
    writer.close()
    assert rounds_in(path) == [1, 2, 3]
    for last, left in ((3, [1, 2, 3]), (0, [])):
        writer = MetricsWriter(path, print)
        writer.truncate_after(last)
        writer.close()
        assert rounds_in(path) == left


def test_a_torn_last_line_is_skipped_and_cut(path):
    write(path, 1, 2)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"round": 3, "rew')
    assert rounds_in(path) == [1, 2]
    write(path, 3)
    assert path.read_bytes().startswith(whole) and rounds_in(path) == [1, 2, 3]


def test_a_damaged_middle_line_is_named(path):
    write(path, 1)
    path.write_bytes(path.read_bytes() + b"\0\0\0\n")
    with pytest.raises(UserError, match=r"line 2 of .*metrics.jsonl is not a record"):
        read_jsonl(path)


def test_no_file_to_read(path):
    with pytest.raises(UserError, match="cannot read .*metrics.jsonl: No such file"):
        read_jsonl(path)


def test_an_unwritable_place_is_one_clear_error(tmp_path):
    with pytest.raises(UserError, match="cannot write .*nowhere"):
        MetricsWriter(tmp_path / "nowhere" / "metrics.jsonl", print)


pieces = st.sampled_from([b'{"round": 1}', b"[]", b"{", b"\n", b"\xff", b"1"])


@given(data=st.binary() | st.lists(pieces).map(b"".join))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_reads_or_is_a_user_error(path, data):
    path.write_bytes(data)
    try:
        assert all(isinstance(one, dict) for one in read_jsonl(path))
    except UserError as error:
        assert "is not a record" in str(error)


@given(length=st.integers(0, 200))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_cut_anywhere_the_whole_lines_before_survive(path, length):
    path.unlink(missing_ok=True)
    write(path, 1, 2, 3)
    data = path.read_bytes()[:length]
    path.write_bytes(data)
    assert rounds_in(path) == [1, 2, 3][: data.count(b"\n")]


def test_a_reader_looking_on_sees_whole_records_only(path):
    enough = threading.Event()

    def write_until_enough():
        writer = MetricsWriter(path, print, keep_all=True)
        for round in itertools.count(1):
            writer.write({"round": round, "text": "x" * (round % 500)})
            if enough.is_set():
                break
        writer.close()

    with ThreadPoolExecutor(1) as pool:
        writing, lengths = pool.submit(write_until_enough), set()
        try:
            while len(lengths) < 8 and not writing.done():
                seen = rounds_in(path) if path.exists() else []
                assert seen == list(range(1, len(seen) + 1))
                lengths.add(len(seen))
        finally:
            enough.set()
    writing.result()
    assert len(lengths) == 8


def test_a_full_disk_is_reported_once_and_survived(path):
    said = []
    writer = MetricsWriter(path, said.append)
    with file_size_limit(100):
        for round in range(1, 6):
            writer.write(record(round))
        assert 0 < path.stat().st_size <= 100 and path.read_bytes().endswith(b"}\n")
    assert len(said) == 1 and "disk full" in said[0]
    writer.write(record(6))
    writer.close()
    assert rounds_in(path) == [1, 2, 3, 4, 5, 6]


def test_lines_without_room_are_an_error_at_close(path):
    writer = MetricsWriter(path, [].append)
    with file_size_limit(10):
        writer.write(record(1))
        with pytest.raises(TemporaryError, match="disk full"):
            writer.close()


def descriptor_of(path):
    """By which this process has the file open."""
    (found,) = [name for name in os.listdir("/dev/fd") if os.path.realpath(f"/dev/fd/{name}") == str(path.resolve())]
    return int(found)


def test_appending_after_close_harms_no_other_file(tmp_path):
    lines = JsonLines(tmp_path / "events.jsonl", print)
    lines.append({"n": 1})
    before = descriptor_of(tmp_path / "events.jsonl")
    lines.close()
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    try:
        assert other == before  # the number is in use again
        lines.append({"n": 2})
        lines.close()
        assert os.fstat(other).st_size == 0
    finally:
        os.close(other)
    assert read_jsonl(tmp_path / "events.jsonl") == [{"n": 1}]


def test_events_survive_resuming_and_threads(tmp_path):
    path = tmp_path / "events.jsonl"
    for text in ("started", "resumed"):
        log = EventLog(path, print)
        threads = [threading.Thread(target=log.write, args=("run", f"{text} {n}")) for n in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        log.close()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    texts = [event["text"] for event in events]
    assert sorted(texts[:20]) == sorted(f"started {n}" for n in range(20))
    assert sorted(texts[20:]) == sorted(f"resumed {n}" for n in range(20))
    assert all(event["kind"] == "run" and event["time"] > 1.7e9 for event in events)


# --- further sinks


class Recorder:
    """Works until it has had `working` rounds."""

    name = "Recorder"

    def __init__(self, working):
        self.working, self.seen, self.calls = working, [], 0

    def write(self, round, numbers):
        self.calls += 1
        if len(self.seen) == self.working:
            raise ConnectionError("server gone")
        self.seen.append((round, dict(numbers)))

    def close(self):
        self.calls += 1


def test_a_sink_that_breaks_costs_only_itself(path):
    said, breaking, sound = [], Recorder(working=1), Recorder(working=99)
    writer = MetricsWriter(path, said.append, [breaking, sound])
    for round in (1, 2, 3):
        writer.write(record(round, note="text", nothing=None))
    writer.close()
    assert said == ["Recorder failed and is left out from now on: server gone"]
    assert breaking.calls == 2
    assert sound.seen == [(round, record(round)) for round in (1, 2, 3)] and sound.calls == 4
    assert rounds_in(path) == [1, 2, 3]


@pytest.mark.parametrize("extra", ["tensorboard", "wandb", "trackio"])
def test_a_sink_without_its_package_names_the_extra(tmp_path, monkeypatch, extra):
    monkeypatch.setitem(sys.modules, extra, None)  # what an import of a missing package looks like
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(UserError, match=re.escape(f"log = [{extra!r}] needs a package: {extra_command(extra)}")):
        open_sinks([extra], tmp_path, {}, 1)


ANSWER = {"text": "<b>2</b>", "extracted": "2", "reward": 1.0, "correct": True, "finished": True}
SAMPLES = [{"round": 1, "task": "sums", "peer": None, "question": "1 + 1?", "right": "2", "answers": [ANSWER]}]


def test_tensorboard_shows_each_round_once_after_a_resume(path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first in (1, 3):
        writer = MetricsWriter(path, print, open_sinks(["tensorboard"], path.parent, {}, first))
        if first == 1:
            writer.write_held_out(0, {"eval/pass_1": 0.25})
        for round in range(first, first + 4):
            writer.write(record(round, note="text", time=1.0, step=round))
        writer.write_samples(first, SAMPLES)
        writer.write_samples(first + 1, SAMPLES)  # so soon, sinks get no more
        writer.write_held_out(first + 3, {"eval/pass_1": 0.5})
        writer.close()
    events = EventAccumulator(str(path.parent / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward")] == [1, 2, 3, 4, 5, 6]
    measured = [(event.step, event.value) for event in events.Scalars("eval/pass_1")]
    assert measured == [(0, 0.25), (6, 0.5)], "before and after training, though no record of a round has them"
    assert not {"step", "round", "time"} & set(events.Tags()["scalars"]), "they are axes"
    texts = events.Tensors("samples/1/text_summary")
    assert [event.step for event in texts] == [1, 3]
    shown = texts[0].tensor_proto.string_val[0].decode()
    assert "1 + 1?" in shown and "1.00: <b>2</b>" in shown
    assert all(line.startswith("    ") for line in shown.splitlines()), "code, so that no text is markup"


def test_wandb_continues_its_run_offline(path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(path.parent))  # it keeps media there until Python ends
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    try:
        for first in (1, 3):
            writer = MetricsWriter(path, print, open_sinks(["wandb"], path.parent, {"seed": 0}, first))
            writer.write(record(first, note="text"))
            writer.write_samples(first, SAMPLES)
            writer.close()
    finally:
        wandb.teardown()  # ends its service process
    run_id = (path.parent / "wandb-id.txt").read_text()
    assert len(list((path.parent / "wandb").glob(f"offline-run-*-{run_id}*/*.wandb"))) == 2
    tables = list((path.parent / "wandb").glob("offline-run-*/files/media/table/samples_*.table.json"))
    assert len(tables) == 2 and json.loads(tables[0].read_text())["data"][0][3:] == [
        "1 + 1?",
        "2",
        "<b>2</b>",
        "2",
        1.0,
        True,
    ]


TRACKED = """
import sys
from pathlib import Path
from swarm_node.observability.metrics import MetricsWriter
from swarm_node.observability.sinks import open_sinks
path, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
writer = MetricsWriter(path, print, open_sinks(["trackio"], path.parent, {"seed": 0}, first))
if first == 1:
    writer.write_held_out(0, {"reward": 0.0})
for round in range(first, last + 1):
    writer.write({"round": round, "reward": round / 10 if first == 1 else 9.0, "note": "text"})
writer.close()
"""


def test_trackio_continues_its_run_and_prints_nothing(path, tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    for first, last in ((1, 4), (3, 6)):  # the checkpoint was of round 2
        command = [sys.executable, "-c", TRACKED, str(path), str(first), str(last)]
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    [database] = (tmp_path / "trackio").glob("swarm-node*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics order by step").fetchall()
    run_id = (path.parent / "trackio-id.txt").read_text()
    assert {name for name, _, _ in rows} == {f"{path.parent.name}-{run_id}"}
    assert [(step, json.loads(metrics)["reward"]) for _, step, metrics in rows] == [
        (0, 0.0),
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
        (4, 0.4),  # as it was at first
        (5, 9.0),
        (6, 9.0),
    ]


def test_trackio_never_asks_for_a_token(path, tmp_path, monkeypatch):
    trackio = pytest.importorskip("trackio")
    import huggingface_hub

    monkeypatch.setattr(trackio, "init", lambda *_, **__: huggingface_hub.login(add_to_git_credential=False))
    with pytest.raises(UserError, match="needs a token that may write: run `hf auth login`"):
        open_sinks(["trackio"], path.parent, {}, 1)
