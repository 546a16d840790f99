"""Whose model is trained, and in which order it is looked for: this machine, the hub, members."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from swarm_node.cli.commands.export_card import Base, base_of
from swarm_node.config import NodeConfig, PolicyConfig, SharingConfig
from swarm_node.errors import UserError
from swarm_node.storage.model_names import model_name
from swarm_node.swarm.base_weights import finding, hub
from swarm_node.swarm.base_weights.fetching import Donors
from swarm_node.swarm.base_weights.files import Model, list_model, remember, starter_folder
from swarm_node.swarm.base_weights.finding import (
    at_hand,
    choose_model,
    describe_model,
    find_model,
    give_what_is_here,
)
from swarm_node.swarm.base_weights.hub import HubFailed, download_from_hub
from swarm_node.swarm.join import JoinedSwarm
from swarm_node.tasks.one_turn import FORM_PROMPTS
from swarm_protocol.manifest import Manifest, ManifestModel, ManifestTask
from swarm_protocol.model_listing import MODEL_METHOD, digest_of, encode_listing
from swarm_protocol.transports.base import Acceptor
from tests.support.disks import leave
from tests.support.fake_transport import FakeTransport
from tests.support.model_folders import make_model

COMMIT = "c" * 40


class Listening(FakeTransport):
    """Remembers what it was told to accept."""

    def __init__(self) -> None:
        super().__init__()
        self.accepted: dict[str, Acceptor] = {}
        self.told = threading.Event()

    def accept(self, method: str, acceptor: Acceptor) -> None:
        self.accepted[method] = acceptor
        self.told.set()


def described(folder: Path, name: str = "org/model", revision: str = "") -> ManifestModel:
    listing = list_model(folder)
    return ManifestModel(name, digest_of(encode_listing(listing)), listing.size, revision)


def swarm(model: ManifestModel | None) -> Manifest:
    return Manifest(name="sums", tasks=[ManifestTask(env="gcd")], model=model)


def config(**policy: Any) -> NodeConfig:
    return NodeConfig(policy=PolicyConfig(**policy)) if policy else NodeConfig()


def no_fetch(*arguments: Any, **options: Any) -> Model:
    raise AssertionError("no member needed to be asked")


# --------------------------------------------------------------------- whose


def test_without_a_model_in_manifests_none_is_sought(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "find_model", no_fetch)
    transport = Listening()
    assert choose_model(config(model="org/model"), swarm(None), [], transport, print) is None
    give_what_is_here(config(), swarm(None), transport, print)
    assert not transport.accepted


@pytest.mark.parametrize("policy", [{"model": "other/model"}, {"model": "org/model", "revision": "v2"}])
def test_the_users_own_model_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: dict[str, Any]) -> None:
    monkeypatch.setattr(finding, "find_model", no_fetch)
    model = described(make_model(tmp_path / "m"))
    assert choose_model(config(**policy), swarm(model), [], Listening(), print) is None


@pytest.mark.parametrize("policy", [{}, {"model": "org/model"}])
def test_the_swarms_model_is_trained_and_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: dict[str, Any]
) -> None:
    folder = make_model(tmp_path / "m")
    model, transport, said = described(folder), Listening(), list[str]()
    monkeypatch.setattr(finding, "in_hub_cache", lambda name, revision: folder)
    chosen = choose_model(config(**policy), swarm(model), [], transport, said.append)
    assert chosen == str(folder)
    assert MODEL_METHOD in transport.accepted and "giving the swarm's model" in said[-1]
    entered = JoinedSwarm(swarm(model), None, transport, None, chosen)  # type: ignore[arg-type]
    assert entered.of_a_member(config(**policy)).policy.model == str(folder)
    asking = JoinedSwarm(replace(swarm(model), answer="boxed"), None, transport, None, chosen)  # type: ignore[arg-type]
    found = asking.of_a_member(config(**policy))
    assert found.policy.model == str(folder)
    assert found.rewards.answer == "boxed" and found.policy.system_prompt.endswith(FORM_PROMPTS["boxed"])
    private = config(**policy).model_copy(update={"sharing": SharingConfig(give_model=False)})
    silent = Listening()
    assert choose_model(private, swarm(model), [], silent, print) == str(folder)
    assert not silent.accepted


def test_a_fetched_model_is_called_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = described(make_model(tmp_path / "m"))
    folder = (tmp_path / "m").rename(tmp_path / model.digest)
    fetched = Model(model.digest, folder, list_model(folder))
    monkeypatch.setattr(finding, "find_model", lambda model, donors, say: fetched)
    chosen = choose_model(config(), swarm(model), [], Listening(), print)
    assert chosen == str(folder) and model_name(chosen) == "org/model"
    assert base_of(PolicyConfig(model=chosen), None) == Base(in_words="`org/model`, the model of its swarm")


def test_the_starter_is_found_in_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "fetch_model", no_fetch)
    model = described(starter_folder(), "starter")
    assert choose_model(config(), swarm(model), [], Listening(), print) == "starter"


def test_a_users_copy_of_the_model_is_given(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    for give in (choose_model, None):
        transport = Listening()
        if give is not None:
            assert give(config(model=str(folder)), swarm(described(folder)), [], transport, print) is None
        else:
            give_what_is_here(config(model=str(folder)), swarm(described(folder)), transport, print)
        assert transport.told.wait(60) and MODEL_METHOD in transport.accepted


# --------------------------------------------------------------------- where from


def members(transport: FakeTransport | None = None) -> Donors:
    return Donors(transport or FakeTransport(), "5a" * 32, [], lambda sentence: None)


def test_the_same_model_in_hub_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "m")
    model = described(folder)
    monkeypatch.setattr(finding, "in_hub_cache", lambda name, revision: folder)
    found = at_hand(model)
    assert found is not None and found.folder == folder
    (folder / "merges.txt").write_text("more than the swarm's")
    assert at_hand(model) is None
    remember(found.listing, folder)
    assert at_hand(model) is not None
    (folder / "config.json").write_text("{}")
    assert at_hand(model) is None


def test_a_model_is_found_where_its_manifest_was_made(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    model = describe_model(str(folder))
    found = at_hand(model)
    assert found is not None and found.folder == folder
    transport = Listening()
    give_what_is_here(config(), swarm(model), transport, print, asked=True)
    assert transport.told.wait(60) and MODEL_METHOD in transport.accepted
    (folder / "config.json").write_text("{}")
    assert at_hand(model) is None


def test_a_bootstrap_says_that_it_does_not_give_the_model(tmp_path: Path) -> None:
    told, said = threading.Event(), list[str]()

    def say(sentence: str) -> None:
        said.append(sentence)
        told.set()

    missing = replace(described(make_model(tmp_path / "m")), digest="0" * 64)
    give_what_is_here(config(), swarm(missing), Listening(), say, asked=True)
    assert told.wait(60) and "start again with --model DIR" in said[0]


def test_members_are_asked_where_the_hub_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "m")
    other = make_model(tmp_path / "other", seed=1)
    model, asked, said = described(folder, revision=COMMIT), list[str](), list[str]()
    got = Model(model.digest, folder, list_model(folder))

    def fetched(*arguments: Any) -> Model:
        asked.append("members")
        return got

    monkeypatch.setattr(finding, "in_hub_cache", lambda name, revision: None)
    monkeypatch.setattr(finding, "fetch_model", fetched)

    def hub_says(answer: Path | HubFailed) -> None:
        def download(model: ManifestModel, patient: bool) -> Path:
            asked.append("hub")
            if isinstance(answer, HubFailed):
                raise answer
            return answer

        monkeypatch.setattr(finding, "download_from_hub", download)

    hub_says(folder)
    assert find_model(model, members(), said.append) is got  # tests are offline
    assert asked == ["members"]
    monkeypatch.setattr(finding, "is_offline", lambda: False)
    assert find_model(replace(model, revision=""), members(), said.append) is got  # not from the hub
    assert asked == ["members"] * 2
    asked.clear()
    assert find_model(model, members(), said.append).folder == folder
    assert asked == ["hub"]
    for answer in (other, HubFailed("does not answer"), HubFailed("sends 0.1 MB a second", slow=True)):
        asked.clear()
        hub_says(answer)
        assert find_model(model, members(), said.append) is got
        assert asked == ["hub", "members"]
    assert "the hub sends 0.1 MB a second: asking members for model org/model" in said


def test_a_slow_hub_is_better_than_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "m")
    model = described(folder, revision=COMMIT)
    tried: list[bool] = []

    def slow(model: ManifestModel, patient: bool) -> Path:
        tried.append(patient)
        if not patient:
            raise HubFailed("is slow", slow=True)
        return folder

    def nobody(*arguments: Any) -> Model:
        raise UserError("nobody")

    monkeypatch.setattr(finding, "in_hub_cache", lambda name, revision: None)
    monkeypatch.setattr(finding, "is_offline", lambda: False)
    monkeypatch.setattr(finding, "fetch_model", nobody)
    monkeypatch.setattr(finding, "download_from_hub", slow)
    assert find_model(model, members(), print).folder == folder
    assert tried == [False, True]


# --------------------------------------------------------------------- the hub itself, on this machine


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A hub with one model at one commit; `silent` = it takes questions and answers none."""
    folder = make_model(tmp_path / "on-hub")
    state: dict[str, Any] = {"folder": folder, "silent": threading.Event(), "asked": []}
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            state["asked"].append(self.path)
            if state["silent"].is_set():
                ended.wait(60)
                return
            if self.path.startswith("/api/models/org/model"):
                files = sorted(path.name for path in folder.iterdir())
                siblings = [{"rfilename": name, "size": (folder / name).stat().st_size} for name in files]
                if "/tree/" in self.path:
                    tree = [
                        {"type": "file", "path": one["rfilename"], "size": one["size"], "oid": "0" * 40}
                        for one in siblings
                    ]
                    self.reply(json.dumps(tree).encode())
                    return
                about = {
                    "_id": "1",
                    "id": "org/model",
                    "sha": COMMIT,
                    "siblings": siblings,
                    "tags": [],
                    "private": False,
                }
                self.reply(json.dumps(about).encode())
                return
            path = folder / self.path.rpartition("/")[2].partition("?")[0]
            if not path.is_file():
                self.send_error(404)
                return
            self.reply(path.read_bytes(), {"ETag": f'"{path.name}"', "X-Repo-Commit": COMMIT})

        def reply(self, data: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(200)
            for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    yield state
    ended.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.slow
def test_the_hub_gives_that_name_and_commit(web: dict[str, Any]) -> None:
    model = described(web["folder"], revision=COMMIT)
    found = download_from_hub(model)
    assert found.name == COMMIT
    assert encode_listing(list_model(found)) == encode_listing(list_model(web["folder"]))
    with pytest.raises(HubFailed, match="has other files of that name"):
        download_from_hub(replace(model, bytes=model.bytes + 1))


@pytest.mark.slow
def test_files_beside_the_model_are_not_downloaded(web: dict[str, Any]) -> None:
    model = described(web["folder"], revision=COMMIT)
    (web["folder"] / "model-00001-of-00002.safetensors").write_bytes(b"beside the whole")
    (web["folder"] / "model-huge-of-it.safetensors").write_bytes(b"a shard by its looks")
    found = download_from_hub(model)
    assert sum(path.stat().st_size for path in found.iterdir()) == model.bytes


class Web:
    """The hub's library, of which `main` uses so much."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sizes: dict[str, int], free: int) -> None:
        self.asked_for: list[str] = []
        self.cached: set[str] = set()
        siblings = [SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()]
        about = SimpleNamespace(siblings=siblings, sha=COMMIT)
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: SimpleNamespace(model_info=lambda *a, **k: about))
        monkeypatch.setattr("huggingface_hub.snapshot_download", self.download)
        monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", self.look_up)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        leave(monkeypatch, free)

    def download(self, name: str, revision: str, allow_patterns: list[str]) -> str:
        self.asked_for = allow_patterns
        return "there"

    def look_up(self, name: str, file: str, revision: str) -> str | None:
        return file if file in self.cached else None


def test_only_counted_files_are_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = {"config.json": 1, "model.safetensors": 9, "model-00001-of-00002.safetensors": 5, "model-x-of-y.bin": 7}
    web = Web(monkeypatch, tmp_path, {**sizes, "model-all-of-it.safetensors": 2**60}, 2**40)
    assert hub.main("org/model", COMMIT, 10) == 0
    assert web.asked_for == ["config.json", "model.safetensors"]


def test_nothing_is_downloaded_without_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = 2**30
    web = Web(monkeypatch, tmp_path, {"config.json": 1, "model.safetensors": size}, 2**29)
    assert hub.main("org/model", COMMIT, size + 1) == 1
    assert "no room" in capsys.readouterr().out and not web.asked_for
    web.cached.add("model.safetensors")
    assert hub.main("org/model", COMMIT, size + 1) == 0
    web.cached.clear()
    begun = tmp_path / "hub" / "models--org--model" / "blobs" / "0.incomplete"
    begun.parent.mkdir(parents=True)
    monkeypatch.setattr(hub, "_bytes_in", lambda blobs, names: size if begun.match(f"{blobs}/{names}") else 0)
    assert hub.main("org/model", COMMIT, size + 1) == 0


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_left(web: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "ANSWER_S", 0.5)
    web["silent"].set()
    with pytest.raises(HubFailed, match="does not answer") as caught:
        download_from_hub(described(web["folder"], revision=COMMIT))
    assert not caught.value.slow
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(HubFailed, match="does not"):
        download_from_hub(described(web["folder"], revision=COMMIT))


def test_a_slow_hub_is_left_unless_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    class Child:
        left = 100

        def poll(self) -> int | None:
            self.left -= 1
            return None if self.left else 0

    monkeypatch.setattr(hub.time, "sleep", lambda seconds: None)
    child: Any = Child()
    with pytest.raises(HubFailed, match="sends 0.0 MB a second") as caught:
        hub.watch(child, lambda: [hub.ASKING, hub.ANSWERED], tmp_path, False, clock)
    assert caught.value.slow and child.left > 50
    hub.watch(child, lambda: [hub.ASKING, hub.ANSWERED], tmp_path, True, clock)
    assert child.left == 0
