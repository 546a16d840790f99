from __future__ import annotations

import hashlib
import json
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from protocol.errors import NotOfSwarm, PeerUnreachable, RemoteProtocolError
from protocol.limits import MAX_MANIFEST_BYTES
from protocol.manifest import FILE_METHOD, MANIFEST_METHOD, Manifest, ManifestModel, ManifestTask, parse_link
from protocol.transports.base import Server, Transport
from swarm_node.config import (
    AveragingConfig,
    NetworkConfig,
    NodeConfig,
    PipelineConfig,
    RewardsConfig,
    SharingConfig,
    TaskConfig,
)
from swarm_node.errors import UserError
from swarm_node.runtime.loop import run_join
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm import links, lookup, question_files
from swarm_node.swarm.download import download
from swarm_node.swarm.join import join_swarm, say_what_leaves
from swarm_node.swarm.links import Swarm, find_swarm, join_link, keep, living, swarm_to_join
from swarm_node.swarm.lookup import fetch_manifest
from swarm_node.swarm.manifests import make_manifest, render
from swarm_node.swarm.network import open_transport, serve_swarm, settings_of
from swarm_node.swarm.question_files import gather_files
from swarm_node.tasks import load_tasks
from tests.support.fake_transport import FakeTransport, address, card, peer_id
from tests.support.virtual_time import VirtualTime

QUESTIONS = (
    b'{"question": "1+1?", "answer": "2"}\n{"question": "1+2?", "answer": "3"}\n{"question": "a?", "answer": "b"}\n'
)
PLAIN = Manifest(name="sums", tasks=[ManifestTask(env="gcd")], bootstrap=[address(1)])


@pytest.fixture
def run() -> RunDir:
    Path("run").mkdir()
    return RunDir("run")


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "ASK_AGAIN_S", 0.01)
    monkeypatch.setattr(question_files, "HOLDER_S", 0.05)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    clock = VirtualTime(1000.0)
    monkeypatch.setattr(lookup, "time", clock)
    monkeypatch.setattr(question_files, "time", clock)
    monkeypatch.setattr(question_files, "HOLDER_S", 20.0)
    return clock


@pytest.fixture
def web() -> Iterator[dict[str, bytes | str]]:
    """Path -> page, or where it redirects to; served at `web["url"]`."""
    pages: dict[str, bytes | str] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path, b"")
            self.send_response(302 if isinstance(page, str) else 200 if page else 404)
            if isinstance(page, str):
                self.send_header("Location", page)
            self.end_headers()
            if isinstance(page, bytes):
                self.wfile.write(page)

        def log_message(self, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    pages["url"] = f"http://127.0.0.1:{server.server_port}"
    yield pages
    server.shutdown()
    server.server_close()
    thread.join()


def with_questions() -> Manifest:
    Path("q.jsonl").write_bytes(QUESTIONS)
    manifest = make_manifest("sums", ["q.jsonl"], bootstrap=[address(1)])
    Path("q.jsonl").unlink()
    return manifest


def no_network() -> Transport:
    raise AssertionError("no member needed to be asked")


# --------------------------------------------------------------------- which swarm


def test_path_address_and_link_name_one_swarm(run: RunDir, web: dict[str, Any]) -> None:
    Path("sums.toml").write_bytes(render(PLAIN))
    web["/sums.toml"] = render(PLAIN)
    by_path, by_url = find_swarm("sums.toml", run), find_swarm(f"{web['url']}/sums.toml", run)
    by_link = find_swarm(str(join_link(PLAIN.swarm_id, [address(2)], [])), run)
    assert by_path.id == by_url.id == by_link.id == PLAIN.swarm_id
    assert by_path.manifest == by_url.manifest == PLAIN
    assert by_link.manifest is None
    assert (by_path.peers, by_link.peers) == ([address(1)], [address(2)])


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (None, "which swarm"),
        ("no.toml", "no manifest no.toml"),
        (".", "cannot read the manifest"),
        ("bad.toml", "no swarm that can be joined"),
        ("huge.toml", "allowed are"),
        ("swarm://123", "no swarm that can be joined"),
        (f"swarm://{'0' * 64}?peer=/ip4/1.2.3.4/tcp/1", "no address of a peer"),
        ("http://example.org/sums.toml", "use https"),
        ("https://127.0.0.1:1/sums.toml", "cannot get"),
    ],
)
def test_what_is_no_swarm(run: RunDir, named: str | None, message: str) -> None:
    Path("bad.toml").write_text("name = 3\ntasks = []\n")
    Path("huge.toml").write_bytes(b"#" * (MAX_MANIFEST_BYTES + 1))
    with pytest.raises(UserError, match=message):
        find_swarm(named, run)


def test_a_restart_needs_nobody(run: RunDir) -> None:
    keep(PLAIN, run, "https://127.0.0.1:1/sums.toml")
    said: list[str] = []
    by_link = find_swarm(str(join_link(PLAIN.swarm_id, [address(2)], [])), run)
    assert by_link.manifest is not None
    assert by_link.id == by_link.manifest.swarm_id == PLAIN.swarm_id
    assert by_link.peers == [address(2), address(1)]
    assert find_swarm("https://127.0.0.1:1/sums.toml", run, said.append).manifest == PLAIN
    assert "going on with the swarm this run was in" in said[0]
    other = find_swarm(f"swarm://{'0' * 64}", run)
    assert other.manifest is None


@pytest.mark.parametrize("before", ["", "https://127.0.0.1:1/other.toml", "sums.toml", 'https://a"\n'])
def test_an_unreachable_address_opens_no_other_swarm(run: RunDir, before: str) -> None:
    keep(PLAIN, run, before)
    assert find_swarm(f"swarm://{PLAIN.swarm_id}", run).manifest == PLAIN  # whatever is written above it
    with pytest.raises(UserError, match="cannot get"):
        find_swarm("https://127.0.0.1:1/sums.toml", run)


def test_plain_http_addresses_are_never_resumed(run: RunDir) -> None:
    for named, message in (("http://example.org/sums.toml", "use https"), ("http://127.0.0.1:1/x.toml", "cannot get")):
        keep(PLAIN, run, named)
        with pytest.raises(UserError, match=message):
            find_swarm(named, run)


def test_a_link_copied_in_part_is_explained(run: RunDir) -> None:
    with pytest.raises(UserError, match="the id in this link has 63 characters instead of 64: copy the whole link"):
        find_swarm(f"swarm://{PLAIN.swarm_id[:-1]}?peer={address(1)}", run)
    with pytest.raises(UserError, match="and has no 'X'"):
        find_swarm(f"swarm://X{PLAIN.swarm_id[1:]}", run)


def test_a_manifest_that_leads_to_nobody_says_so(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    Path("sums.toml").write_bytes(render(replace(PLAIN, bootstrap=[])))
    Path("full.toml").write_bytes(render(PLAIN))
    config = NodeConfig(swarm="sums.toml", run_dir="run")
    swarm_to_join(config)
    assert "sums.toml has no address to ask: use a link that" in capsys.readouterr().err
    swarm_to_join(config.model_copy(update={"network": NetworkConfig(bootstrap=[address(2)])}))
    swarm_to_join(config.model_copy(update={"swarm": "full.toml"}))
    cached = {"addresses": [address(3)], "seen": 1.0}
    run.peers.write_text(json.dumps([cached]))
    assert links.cached_addresses(run) == [address(3)]
    swarm_to_join(config)
    assert capsys.readouterr().err == ""


def test_a_damaged_copy_is_as_good_as_none(run: RunDir) -> None:
    keep(PLAIN, run)
    run.swarm.write_bytes(run.swarm.read_bytes()[:-9] + b"\xff")
    assert find_swarm(f"swarm://{PLAIN.swarm_id}", run).manifest is None


def test_downloads_are_bounded_and_stay_encrypted(web: dict[str, Any]) -> None:
    web["/big"] = b"x" * 1001
    web["/away"] = "http://example.org/"
    assert len(download(f"{web['url']}/big", 1001)) == 1001
    for path, limit, message in (
        ("/big", 1000, "larger than 1000"),
        ("/away", 9, "use https"),
        ("/no", 9, "Not Found"),
    ):
        with pytest.raises(UserError, match=message):
            download(web["url"] + path, limit)
    with pytest.raises(UserError, match="use https"):
        download(f"{web['url']}/big", 1001, public=True)


# --------------------------------------------------------------------- what members are asked for


def test_any_member_may_give_the_right_manifest() -> None:
    def forged(caller: str, payload: bytes) -> bytes:
        return render(Manifest(name="other", tasks=PLAIN.tasks))

    def garbage(caller: str, payload: bytes) -> bytes:
        return b"\xff"

    def refusal(caller: str, payload: bytes) -> bytes:
        raise RemoteProtocolError("busy")

    servers: list[Server] = [forged, garbage, refusal]
    others = {peer_id(2 + i): {MANIFEST_METHOD: server} for i, server in enumerate(servers)}
    transport = FakeTransport(others)
    swarm = find_swarm(f"swarm://{PLAIN.swarm_id}?peer={address(1)}")
    with pytest.raises(PeerUnreachable, match="none of 4 members gives the manifest"):
        fetch_manifest(transport, swarm, lambda sentence: None, wait_s=0.05)
    assert all(transport.asked[peer, MANIFEST_METHOD] for peer in (*others, peer_id(1)))
    transport.others = {**others, peer_id(1): {MANIFEST_METHOD: lambda caller, payload: render(PLAIN)}}
    manifest = fetch_manifest(transport, swarm, lambda sentence: None)
    assert manifest.swarm_id == PLAIN.swarm_id
    assert manifest.bootstrap == [address(1)]


@pytest.mark.usefixtures("clock")
def test_waiting_for_the_manifest_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "FIRST_REPORT_S", 0.0)
    said: list[str] = []
    with pytest.raises(PeerUnreachable):
        fetch_manifest(FakeTransport(), find_swarm(f"swarm://{PLAIN.swarm_id}"), said.append, wait_s=0.05)
    assert "still trying" in said[0]
    link = f"swarm://{PLAIN.swarm_id}?peer={address(1)}"
    with pytest.raises(PeerUnreachable, match=f"nobody answers at {address(1)}"):
        fetch_manifest(FakeTransport(), find_swarm(link), said.append, wait_s=0.05)
    assert f"nobody answers at {address(1)}" in said[-1] and f"`swarm-node doctor '{link}'`" in said[-1]


def test_members_serve_manifest_and_files_only(run: RunDir) -> None:
    manifest = with_questions()
    Path("q.jsonl").write_bytes(QUESTIONS)
    transport = FakeTransport()
    serve_swarm(transport, manifest, {manifest.tasks[0].sha256: Path("q.jsonl")})
    assert transport.served[MANIFEST_METHOD]("", b"") == render(manifest)
    assert transport.served[FILE_METHOD]("", manifest.tasks[0].sha256.encode()) == QUESTIONS
    for payload in (b"", b"q.jsonl", b"/etc/passwd", b"\xff" * 99, manifest.tasks[0].sha256.encode() + b"\0"):
        with pytest.raises(RemoteProtocolError) as caught:
            transport.served[FILE_METHOD]("", payload)
        assert caught.value.reason == "file"


def gather(
    manifest: Manifest, run: RunDir, own: list[str | TaskConfig], connect: Any = no_network, named: str = ""
) -> Any:
    said: list[str] = []
    swarm = find_swarm(named or f"swarm://{manifest.swarm_id}")
    return gather_files(manifest, swarm, run, own, said.append, connect), said


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
        monkeypatch.setattr(Path, "is_file", lambda path: True)
        Path("shared/q.jsonl").mkdir()
    else:
        Path("shared/q.jsonl").write_bytes(unusable)
    transport = FakeTransport({peer_id(2): {FILE_METHOD: lambda caller, payload: QUESTIONS}})
    files, said = gather(manifest, run, [], lambda: transport, named="shared/sums.toml")
    assert [path.read_bytes() for path in files.values()] == [QUESTIONS]
    assert "shared/q.jsonl" in said[0] and "looking elsewhere" in said[0]


def test_a_manifest_s_source_moves_no_cursor(run: RunDir) -> None:
    manifest = with_questions()
    task = replace(manifest.tasks[0], source="http://\x1b]0;title\x07\u202e")
    transport = FakeTransport({peer_id(2): {FILE_METHOD: lambda caller, payload: QUESTIONS}})
    files, said = gather(replace(manifest, tasks=[task]), run, [], lambda: transport)
    assert files and "]0;title" in said[0] and all(sentence.isprintable() for sentence in said)


@pytest.mark.parametrize("bad", [QUESTIONS[:-1] + b" ", QUESTIONS[:-1], b""])
def test_forged_question_files_are_not_believed(run: RunDir, bad: bytes) -> None:
    manifest = with_questions()
    transport = FakeTransport({peer_id(2): {FILE_METHOD: lambda caller, payload: bad}})
    files, said = gather(manifest, run, [], lambda: transport)
    assert transport.asked[peer_id(2), FILE_METHOD]
    assert files == {}
    assert "training without it" in said[-1]
    assert not run.files.exists()
    wanted = manifest.tasks[0].sha256.encode()
    served: dict[str, Server] = {FILE_METHOD: lambda caller, payload: QUESTIONS if payload == wanted else b""}
    transport.others = {**transport.others, peer_id(3): served}
    transport.cards[peer_id(3)] = transport.cards[peer_id(2)]
    files, _ = gather(manifest, run, [], lambda: transport)
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
    files, said = gather(manifest, run, [], FakeTransport)
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
    files, said = gather(many_files(), run, [], lambda: transport)
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
    gather(many_files("https://example.org/q"), run, [], lambda: transport)
    assert max(given) <= question_files.FILE_PACE.grace_s + 1
    assert clock.now - 1000 <= question_files.ALL_FILES_S + 64 * (lookup.MAX_ASK_AGAIN_S + 0.1)


def test_a_member_that_gives_gets_more_time(run: RunDir, clock: VirtualTime) -> None:
    def slow(caller: str, payload: bytes) -> bytes:
        clock.now += 15.0
        return texts[payload.decode()]

    texts = {hashlib.sha256(text).hexdigest(): text for text in (b"one", b"two", b"three", b"four")}
    tasks = [ManifestTask(sha256=digest, name=text.decode(), bytes=len(text)) for digest, text in texts.items()]
    transport = FakeTransport({peer_id(1): {FILE_METHOD: slow}})
    files, _ = gather(Manifest(name="sums", tasks=tasks), run, [], lambda: transport)
    assert files.keys() == texts.keys()


def test_own_addresses_are_asked_once(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(question_files, "read_questions", lambda place: read.append(place) or QUESTIONS)
    gather(many_files(), run, ["https://example.org/mine.jsonl"], FakeTransport)
    assert read == ["https://example.org/mine.jsonl"]


# --------------------------------------------------------------------- being there


@pytest.mark.parametrize("name", ["identity.key", "peers.json"])
def test_files_that_cannot_be_read_are_explained(run: RunDir, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def transport(identity_path: Path, cache_file: Path, **arguments: Any) -> None:
        {"identity.key": identity_path, "peers.json": cache_file}[name].read_bytes()

    module = types.ModuleType("protocol.transports.p2p.transport")
    module.P2PTransport = transport  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "protocol.transports.p2p.transport", module)
    (run.path / name).mkdir()
    with pytest.raises(UserError, match=f"run/{name}: Is a directory"):
        open_transport(NetworkConfig(), PLAIN, [], run, print)


def test_an_identity_that_cannot_be_read_is_explained(run: RunDir) -> None:
    run.identity.mkdir()
    with ExitStack() as stack, pytest.raises(UserError, match="run/identity.key: Is a directory"):
        join_swarm(Swarm(PLAIN.swarm_id, PLAIN, []), NodeConfig(), run, print, stack)


def test_what_becomes_public_is_said_once_before(monkeypatch: pytest.MonkeyPatch, run: RunDir) -> None:
    class Dialled(Exception):
        pass

    def dialled(*arguments: Any) -> None:
        raise Dialled

    def enter(swarm: Swarm, config: NodeConfig | None = None, into: RunDir = run) -> list[str]:
        said: list[str] = []
        with ExitStack() as stack, pytest.raises(Dialled):
            join_swarm(swarm, config or NodeConfig(), into, said.append, stack)
        return [sentence for sentence in said if sentence.startswith("first time in this swarm")]

    monkeypatch.setattr(
        "swarm_node.swarm.join.visitor", dialled
    )  # the first to show itself, if the manifest is not known
    monkeypatch.setattr("swarm_node.swarm.join.open_transport", dialled)
    for _ in range(2):  # until something of this machine has left
        (told,) = enter(Swarm(PLAIN.swarm_id, None, [address(1)]))
        assert "IP address" in told and "the answers that its model writes" in told
        assert f"stored in {run.path}" in told and "off (--relay" in told
    assert len(enter(Swarm(PLAIN.swarm_id, PLAIN, []))) == 1
    assert enter(Swarm(PLAIN.swarm_id, PLAIN, [])) == []
    relays = NodeConfig(network=NetworkConfig(serve_relay=True))
    (told,) = enter(Swarm("ab" * 32, None, [address(1)]), relays)
    assert "connections of others is on (--relay)" in told


def test_a_swarm_within_one_machine_makes_nothing_public(run: RunDir) -> None:
    said: list[str] = []
    here = NodeConfig(network=NetworkConfig(listen="127.0.0.1"))
    say_what_leaves(Swarm(PLAIN.swarm_id, PLAIN, []), here, run, said.append)
    assert said == []
    say_what_leaves(Swarm(PLAIN.swarm_id, PLAIN, [], named="demo.toml"), here, run, said.append)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("sections", "weights"),
    [
        ({}, False),
        ({"averaging": AveragingConfig(method="noloco")}, True),
        ({"pipeline": PipelineConfig(stages=2, crew="home")}, True),
    ],
)
def test_all_that_becomes_public_is_named(run: RunDir, sections: dict[str, Any], weights: bool) -> None:
    def told(manifest: Manifest | None, trains: bool = True, give: bool = True) -> str:
        said: list[str] = []
        config = NodeConfig(**sections, sharing=SharingConfig(give_model=give))
        say_what_leaves(Swarm(PLAIN.swarm_id, manifest, []), config, run, said.append, trains)
        return said[0]

    assert "the node's name, its speed, the kind and progress of its model, and the answers" in told(PLAIN)
    assert ("the weights it trains" in told(PLAIN)) == weights
    bootstrap = told(PLAIN, trains=False)
    assert "IP address and the node's name." in bootstrap and "weights" not in bootstrap and "speed" not in bootstrap
    with_model = replace(PLAIN, model=ManifestModel("tiny", "ab" * 32, 1000))
    given = "The files of the swarm's model"
    assert f"{given} are given to members" in told(with_model)
    assert f"{given} are given to members" in told(with_model, trains=False)
    assert f"{given}, if it has one, are given" in told(None)
    assert given not in told(with_model, give=False) and given not in told(PLAIN)


def test_a_swarm_is_found_before_directories_are_made(monkeypatch: pytest.MonkeyPatch, web: dict[str, Any]) -> None:
    class Entered(Exception):
        pass

    def enter(swarm: Swarm, *arguments: Any) -> None:
        assert swarm.manifest == PLAIN
        raise Entered

    requests: list[str] = []

    def counted(url: str, *arguments: Any) -> bytes:
        requests.append(url)
        assert not Path("run").exists()
        return download(url, *arguments)

    monkeypatch.setattr(links, "download", counted)
    monkeypatch.setattr("swarm_node.runtime.loop.join_swarm", enter)
    web["/sums.toml"] = render(PLAIN)
    with pytest.raises(Entered):
        config = NodeConfig(swarm=f"{web['url']}/sums.toml", run_dir="run")
        run_join(config, swarm_to_join(config))
    assert requests == [f"{web['url']}/sums.toml"]
    with pytest.raises(UserError, match="no manifest"):
        swarm_to_join(NodeConfig(swarm="mistyped.toml", run_dir="other"))
    with pytest.raises(UserError, match="names no peer"):
        swarm_to_join(NodeConfig(swarm=f"swarm://{'0' * 64}", run_dir="other"))
    assert not Path("other").exists()


def test_a_link_prefers_this_node_if_reachable() -> None:
    relayed = f"{address(1)}/p2p-circuit/p2p/{peer_id(0)}"
    link = parse_link(join_link(PLAIN.swarm_id, [relayed, address(0)], [address(1), address(0), address(2)]))
    assert link.swarm == PLAIN.swarm_id
    assert link.peers == [address(0), address(1), address(2), relayed]
    assert len(parse_link(join_link(PLAIN.swarm_id, [], [address(i) for i in range(20)])).peers) == 8


def test_links_name_a_few_reachable_members() -> None:
    relayed = f"{address(9)}/p2p-circuit/p2p/{peer_id(1)}"
    told = {1: [relayed, address(1)], 2: [], 3: [address(3), address(3, 31331)], 4: [address(4)], 5: [address(5)]}
    members = {peer_id(i): replace(card(), addresses=addresses) for i, addresses in told.items()}
    members[peer_id(4)] = replace(members[peer_id(4)], roles=["bootstrap"])
    assert living(members, [peer_id(8), peer_id(2), peer_id(3), peer_id(1)]) == [address(4), address(3), address(1)]
    assert living({peer_id(1): replace(card(), addresses=[relayed])}, []) == [relayed]
    assert len(living(members, [])) == 3 and living({}, [peer_id(1)]) == []


def test_settings_join_configuration_and_swarm() -> None:
    config = NetworkConfig(listen="127.0.0.1", announce=["a.example"], bootstrap=[address(1)], dial_only=True)
    settings = settings_of(config, [address(2), address(1)])
    assert settings.bootstrap == (address(1), address(2))
    assert settings.announce == ("a.example",)
    assert (settings.listen, settings.dial_only) == ("127.0.0.1", True)
    assert settings.named_ports == ()
    assert settings_of(NetworkConfig(port=31330), []).named_ports == ("port",)  # even if it is the default
    with pytest.raises(UserError, match="no address of a peer"):
        settings_of(NetworkConfig(bootstrap=["localhost:1"]), [])


@pytest.mark.usefixtures("clock")
def test_a_link_of_another_swarm_ends() -> None:
    other = Manifest(name="other", tasks=PLAIN.tasks)
    server: dict[str, Server] = {MANIFEST_METHOD: lambda caller, payload: render(other)}
    swarm = find_swarm(f"swarm://{PLAIN.swarm_id}?peer={address(1)}&peer={address(2)}")
    transport = FakeTransport({peer_id(1): server, peer_id(2): server})
    with pytest.raises(UserError, match=f"its peers are in swarm {other.swarm_id[:16]}"):
        fetch_manifest(transport, swarm, lambda sentence: None)
    transport.others = {peer_id(1): server}  # the other one may come back meanwhile
    with pytest.raises(UserError, match="its peers are in swarm"):
        fetch_manifest(transport, swarm, lambda sentence: None)
    assert transport.asked[peer_id(2), MANIFEST_METHOD] > 2


@pytest.mark.usefixtures("clock")
def test_peers_without_this_swarms_protocol_end_it() -> None:
    asked = 0

    def starting(caller: str, payload: bytes) -> bytes:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise NotOfSwarm("not yet")
        return render(PLAIN)

    def elsewhere(caller: str, payload: bytes) -> bytes:
        raise NotOfSwarm("elsewhere")

    swarm = find_swarm(f"swarm://{PLAIN.swarm_id}?peer={address(1)}")
    begun = FakeTransport({peer_id(1): {MANIFEST_METHOD: starting}})
    assert fetch_manifest(begun, swarm, lambda sentence: None).swarm_id == PLAIN.swarm_id
    with pytest.raises(UserError, match=f"the link is of swarm {PLAIN.swarm_id[:16]}, but its peers are not in it"):
        fetch_manifest(FakeTransport({peer_id(1): {MANIFEST_METHOD: elsewhere}}), swarm, lambda sentence: None)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("reply", [b"\xff", None])
def test_one_peer_of_another_swarm_ends_nothing(reply: bytes | None) -> None:
    """While somebody else may have the right one, be it now busy or damaged."""

    def other(caller: str, payload: bytes) -> bytes:
        return render(Manifest(name="other", tasks=PLAIN.tasks))

    def unwell(caller: str, payload: bytes) -> bytes:
        if reply is None:
            raise RemoteProtocolError("busy")
        return reply

    others: dict[str, dict[str, Server]] = {
        peer_id(1): {MANIFEST_METHOD: other},
        peer_id(2): {MANIFEST_METHOD: unwell},
    }
    swarm = find_swarm(f"swarm://{PLAIN.swarm_id}?peer={address(1)}&peer={address(2)}")
    with pytest.raises(PeerUnreachable):
        fetch_manifest(FakeTransport(others), swarm, lambda sentence: None, wait_s=100.0)
