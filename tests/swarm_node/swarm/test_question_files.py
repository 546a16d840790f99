"""Question files from wherever they are, each checked, without holding up a node that starts."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from swarm_node.config import (
    RewardsConfig,
    TaskConfig,
)
from swarm_node.errors import UserError
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm import lookup, question_files
from swarm_node.swarm.declared import kinds_of
from swarm_node.swarm.links import find_swarm
from swarm_node.swarm.manifests import make_manifest, render, task_tables, with_usual_columns
from swarm_node.swarm.question_files import gather_files
from swarm_node.tasks.taskset import load_tasks
from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.manifest import FILE_METHOD, Manifest, ManifestTask
from swarm_protocol.transports.base import Server
from tests.support.fake_transport import FakeTransport, card, peer_id
from tests.support.manifests import QUESTIONS, with_questions
from tests.support.virtual_time import VirtualTime


def gather(manifest: Manifest, run: RunDir, own: list[str | TaskConfig], transport: Any = None, named: str = "") -> Any:
    """Without a `transport`, no member may be asked."""
    said: list[str] = []
    swarm = find_swarm(named or f"swarm://{manifest.swarm_id}")
    return gather_files(manifest, swarm, run, own, said.append, transport), said


def test_question_files_are_found_near_and_kept(run: RunDir) -> None:
    manifest = with_questions()
    Path("own").mkdir()
    Path("own/mine.jsonl").write_bytes(QUESTIONS)
    files, _ = gather(manifest, run, ["small", "own/mine.jsonl"])
    (path,) = files.values()
    assert path.read_bytes() == QUESTIONS
    assert path.is_relative_to(run.files)
    assert load_tasks([TaskConfig(file=str(path))], RewardsConfig()).labels == ["q"]
    assert gather(manifest, run, [])[0] == files  # the copy is enough from now on


def test_a_file_that_new_converted_is_found_in_its_own_form(run: RunDir) -> None:
    """Who has the table of which a swarm's questions were made brings them, and chooses them by it."""
    Path("sums.csv").write_text("prompt;solution\n" + "".join(f"{n} + 1?;{n + 1}\n" for n in range(40)))
    Path("other.csv").write_text("prompt;solution\n1 + 1?;2\n")
    (copy,) = with_usual_columns(["sums.csv"], run.path, print)
    manifest = make_manifest("sums", [copy])
    Path(copy.file).unlink()
    files, _ = gather(manifest, run, ["sums.csv"])
    tasks = load_tasks(task_tables(manifest, files), RewardsConfig())
    assert tasks.only(["sums.csv"]).names == tasks.names
    with pytest.raises(UserError, match="'other.csv' is not one of this swarm's"):
        tasks.only(["other.csv"])


def test_files_of_one_name_are_labelled_alike_everywhere(run: RunDir) -> None:
    contents = {"a": QUESTIONS, "b": QUESTIONS + b"\n", "c": QUESTIONS + b"\n\n"}
    tasks = []
    for folder, data in contents.items():
        Path(folder).mkdir()
        Path(folder, "q.jsonl").write_bytes(data)
        tasks.append(ManifestTask(sha256=hashlib.sha256(data).hexdigest(), name="q", bytes=len(data)))
    manifest = Manifest("sums", tasks)
    others = FakeTransport({peer_id(2): {}})
    for has, labels in (("ac", ["q", "q-3"]), ("abc", ["q", "q-2", "q-3"])):
        files, _ = gather(manifest, run, [f"{folder}/q.jsonl" for folder in has], others)
        assert load_tasks(task_tables(manifest, files), RewardsConfig()).labels == labels
        assert set(labels) <= kinds_of(manifest)


def test_question_files_may_lie_beside_the_manifest(run: RunDir) -> None:
    manifest = with_questions()
    Path("shared").mkdir()
    Path("shared/sums.toml").write_bytes(render(manifest))
    Path("shared/q.jsonl").write_bytes(QUESTIONS)
    files, _ = gather(manifest, run, [], named="shared/sums.toml")
    assert [path.read_bytes() for path in files.values()] == [QUESTIONS]


@pytest.mark.parametrize("unusable", [b"x" * 500, None])
def test_a_wrong_file_of_the_name_is_skipped(
    run: RunDir, unusable: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = with_questions()
    Path("shared").mkdir()
    Path("shared/sums.toml").write_bytes(render(manifest))
    monkeypatch.setattr("swarm_node.swarm.manifests.MAX_FILE_BYTES", 400)
    if unusable is None:  # unreadable, also for root
        monkeypatch.setattr(Path, "is_file", Path.exists)
        Path("shared/q.jsonl").mkdir()
    else:
        Path("shared/q.jsonl").write_bytes(unusable)
    transport = FakeTransport({peer_id(2): {FILE_METHOD: lambda caller, payload: QUESTIONS}})
    files, said = gather(manifest, run, [], transport, named="shared/sums.toml")
    assert [path.read_bytes() for path in files.values()] == [QUESTIONS]
    assert "shared/q.jsonl" in said[0] and "looking elsewhere" in said[0]


def test_a_manifest_s_source_moves_no_cursor(run: RunDir) -> None:
    manifest = with_questions()
    task = replace(manifest.tasks[0], source="http://\x1b]0;title\x07\u202e")
    transport = FakeTransport({peer_id(2): {FILE_METHOD: lambda caller, payload: QUESTIONS}})
    files, said = gather(replace(manifest, tasks=[task]), run, [], transport)
    assert files and "]0;title" in said[0] and all(sentence.isprintable() for sentence in said)


@pytest.mark.parametrize("bad", [QUESTIONS[:-1] + b" ", QUESTIONS[:-1], b""])
def test_forged_question_files_are_not_believed(run: RunDir, bad: bytes) -> None:
    manifest = with_questions()
    transport = FakeTransport({peer_id(2): {FILE_METHOD: lambda caller, payload: bad}})
    files, said = gather(manifest, run, [], transport)
    assert transport.asked[peer_id(2), FILE_METHOD]
    assert files == {}
    assert "training without it" in said[-1]
    assert not run.files.exists()
    wanted = manifest.tasks[0].sha256.encode()
    served: dict[str, Server] = {FILE_METHOD: lambda caller, payload: QUESTIONS if payload == wanted else b""}
    transport.others = {**transport.others, peer_id(3): served}
    transport.cards[peer_id(3)] = transport.cards[peer_id(2)]
    files, _ = gather(manifest, run, [], transport)
    assert [path.read_bytes() for path in files.values()] == [QUESTIONS]


def test_a_damaged_copy_is_replaced(run: RunDir) -> None:
    manifest = with_questions()
    Path("mine.jsonl").write_bytes(QUESTIONS)
    files, _ = gather(manifest, run, ["mine.jsonl"])
    (path,) = files.values()
    path.write_bytes(QUESTIONS.replace(b"2", b"7"))
    gather(manifest, run, ["mine.jsonl"])
    assert path.read_bytes() == QUESTIONS


def test_a_source_is_checked_before_it_is_used(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = with_questions()
    task = ManifestTask(sha256=manifest.tasks[0].sha256, name="q", bytes=len(QUESTIONS), source="https://example.org/q")
    manifest = Manifest(name="sums", tasks=[task])
    asked: list[tuple[str, int, bool]] = []

    def fake(url: str, limit: int, seconds: float, public: bool) -> bytes:
        asked.append((url, limit, public))
        return QUESTIONS if len(asked) > 1 else QUESTIONS[::-1]

    monkeypatch.setattr(question_files, "download", fake)
    files, said = gather(manifest, run, [], FakeTransport())
    assert files == {}
    assert "is not what the manifest says" in said[0]
    files, _ = gather(manifest, run, [])
    assert len(files) == 1
    assert asked == [("https://example.org/q", len(QUESTIONS), True)] * 2


class Trickling(FakeTransport):
    """Members who use all the time they are given, and then give nothing."""

    def __init__(self, clock: VirtualTime) -> None:
        super().__init__()
        self.clock = clock
        self.cards = {peer_id(1 + i): card() for i in range(20)}
        self.timeouts: list[float] = []

    def request(self, peer: str, method: str, payload: bytes = b"", timeout: float = 10.0, limit: int = 2**20) -> bytes:
        self.timeouts.append(timeout)
        self.clock.now += timeout
        raise PeerUnreachable("too slow")


def many_files(source: str = "") -> Manifest:
    tasks = [ManifestTask(sha256=f"{i:064x}", name=f"q{i}", bytes=2**20, source=source) for i in range(64)]
    return Manifest(name="sums", tasks=tasks)


def test_trickling_members_do_not_hold_up_joining(run: RunDir, clock: VirtualTime) -> None:
    transport = Trickling(clock)
    files, said = gather(many_files(), run, [], transport)
    assert files == {}
    assert clock.now - 1000 <= question_files.HOLDER_S + question_files.FILE_PACE.grace_s + 64 * lookup.MAX_ASK_AGAIN_S
    assert transport.timeouts and max(transport.timeouts) <= question_files.FILE_PACE.grace_s + 1
    assert len(said) == 64  # each is said to be missing


def test_trickling_sources_do_not_hold_up_joining(
    run: RunDir, clock: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def trickle(url: str, limit: int, seconds: float, public: bool) -> bytes:
        given.append(seconds)
        clock.now += seconds
        raise UserError("too slow")

    monkeypatch.setattr(question_files, "download", trickle)
    transport = Trickling(clock)
    gather(many_files("https://example.org/q"), run, [], transport)
    assert max(given) <= question_files.FILE_PACE.grace_s + 1
    assert clock.now - 1000 <= question_files.ALL_FILES_S + 64 * (lookup.MAX_ASK_AGAIN_S + 0.1)


def test_a_member_that_gives_gets_more_time(run: RunDir, clock: VirtualTime) -> None:
    def slow(caller: str, payload: bytes) -> bytes:
        clock.now += 15.0
        return texts[payload.decode()]

    texts = {hashlib.sha256(text).hexdigest(): text for text in (b"one", b"two", b"three", b"four")}
    tasks = [ManifestTask(sha256=digest, name=text.decode(), bytes=len(text)) for digest, text in texts.items()]
    transport = FakeTransport({peer_id(1): {FILE_METHOD: slow}})
    files, _ = gather(Manifest(name="sums", tasks=tasks), run, [], transport)
    assert files.keys() == texts.keys()


def test_own_addresses_are_asked_once(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(question_files, "read_questions", lambda place: read.append(place) or QUESTIONS)
    gather(many_files(), run, ["https://example.org/mine.jsonl"], FakeTransport())
    assert read == ["https://example.org/mine.jsonl"]
