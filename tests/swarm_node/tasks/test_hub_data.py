"""Data sets of the hub, from a small server of the hub's documented API on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from swarm_node.config import TaskConfig
from swarm_node.errors import UserError
from swarm_node.tasks.hub_data import chosen_files, label_of, parse, pinned
from tests.support.repository import PYTHONPATH

COMMIT, CONVERTED = "a" * 40, "b" * 40
GSM8K = [
    f"{config}/{split}/000{n}.parquet" for config in ("main", "socratic") for split in ("train", "test") for n in "10"
]
READ = """
import json, sys
from swarm_node.errors import UserError
from swarm_node.runtime.preflight import with_commits
from swarm_node.config import NodeConfig
from swarm_node.tasks.files import QuestionFile
for name in sys.argv[1:]:
    try:
        (exact,) = with_commits(NodeConfig(tasks=[name])).tasks
        file = QuestionFile(exact)
        print(json.dumps([file.was_read, file.label, file.task(0).question]))
    except UserError as error:
        print(json.dumps(str(error)))
"""


@dataclass
class Hub:
    """A server with data sets: repository -> commit -> file -> content."""

    sets: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    address: str = ""


@pytest.fixture
def hub() -> Iterator[Hub]:
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            state.asked.append(self.path)
            parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
            if parts == [""]:
                return self.reply(b"")
            api = parts[0] == "api"
            repo = "/".join(parts[2:4] if api else parts[1:3])
            kind, wanted = parts[4:6] if api and len(parts) > 4 else parts[3:5] if not api else ["revision", "main"]
            commit = {"main": COMMIT, "refs/convert/parquet": CONVERTED}.get(wanted, wanted)
            if repo == "org/gated":
                return self.fail(403, "GatedRepo")
            if repo not in state.sets:
                return self.fail(404, "RepoNotFound")
            files = state.sets[repo].get(commit)
            if files is None:
                return self.fail(404, "RevisionNotFound")
            if kind == "resolve":
                content = files["/".join(parts[5:])]
                return self.reply(content, {"ETag": f'"{sha1(content).hexdigest()}"', "X-Repo-Commit": commit})
            if kind == "tree":
                rows = [{"type": "file", "path": n, "size": len(files[n]), "oid": "0" * 40} for n in files]
                return self.reply(json.dumps(rows).encode())
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            about = {"id": repo, "sha": commit, "siblings": siblings, "tags": [], "private": False, "_id": "1"}
            self.reply(json.dumps(about).encode())

        def fail(self, status: int, code: str) -> None:
            self.send_response(status)
            for name, value in {"X-Error-Code": code, "Content-Length": "0"}.items():
                self.send_header(name, value)
            self.end_headers()

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
    state.address = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


def read(hub: Hub, folder: Path, *names: str, **more: str) -> list[Any]:
    """What a process of its own reads under these names, or says."""
    env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    env |= {"HF_ENDPOINT": hub.address, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    env |= {"PYTHONPATH": PYTHONPATH, **more}
    done = subprocess.run([sys.executable, "-c", READ, *names], env=env, capture_output=True, check=True, cwd=folder)
    return [json.loads(line) for line in done.stdout.splitlines()]


def lines(*questions: str) -> bytes:
    return b"".join(json.dumps({"question": each, "answer": "2"}).encode() + b"\n" for each in questions)


def parquet(folder: Path, questions: list[str]) -> bytes:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({"question": questions, "answer": ["2"] * len(questions)}), folder / "x")
    return (folder / "x").read_bytes()


def test_the_hub_s_parquet_is_read_and_its_commit_kept(hub: Hub, tmp_path: Path) -> None:
    files = {name: parquet(tmp_path, [f"{name}?", "1+1?"]) for name in GSM8K}
    hub.sets = {"openai/gsm8k": {CONVERTED: files, COMMIT: {"README.md": b""}}, "org/other": {COMMIT: {}}}
    (first, split, several, none, gated, missing) = read(
        *(hub, tmp_path, "hf:openai/gsm8k/main", "hf://datasets/openai/gsm8k/socratic:test", "hf:openai/gsm8k"),
        *("hf:openai/gsm8k/main:dev", "hf:org/gated", "hf:org/none"),
    )
    name = f"hf:openai/gsm8k/main@{CONVERTED}"
    assert first == [
        f"{name}: 4 rows of Parquet, question = `question`, answer = `answer`",
        "gsm8k-main",
        "main/train/0000.parquet?",
    ]
    assert split[1:] == ["gsm8k-socratic-test", "socratic/test/0000.parquet?"]
    assert "several configurations; it has main, socratic: name one, as hf:openai/gsm8k/main" in several
    assert "no split 'dev'; it has train, test" in none
    assert "accept it on the data set's page" in gated and "no data set org/none" in missing
    hub.asked.clear()
    for offline in ({}, {"HF_HUB_OFFLINE": "1"}):
        assert read(hub, tmp_path, name, **offline) == [first], "a commit that is here is not asked for"
    assert not hub.asked
    (unreached,) = read(hub, tmp_path, "hf:openai/gsm8k/main", HF_HUB_OFFLINE="1")
    assert "the hub cannot be reached (HF_HUB_OFFLINE is set)" in unreached and "to_json" in unreached


def test_plain_files_are_read_where_the_hub_has_converted_nothing(hub: Hub, tmp_path: Path) -> None:
    files = {"train.jsonl": lines("train?"), "data/test.jsonl": lines("test?"), "load.py": b"raise SystemExit"}
    hub.sets = {"org/plain": {COMMIT: files}, "org/code": {COMMIT: {"load.py": b""}}}
    found = read(
        hub,
        tmp_path,
        "hf:org/plain",
        "hf:org/plain:test",
        "hf:org/plain/data/test.jsonl",
        "hf:org/plain:x",
        "hf:org/code",
    )
    assert [each[2] for each in found[:3]] == ["train?", "test?", "test?"]
    assert "the data set has train.jsonl, data/test.jsonl: name one" in found[3]
    assert "no file of questions that can be read without running its own code" in found[4]


SHARDS = [f"{name}-0000{n}-of-00002.jsonl" for name in ("data/train", "data/test") for n in range(2)]


@pytest.mark.parametrize("names", [SHARDS, GSM8K[:2]], ids=["plain", "converted"])
@pytest.mark.parametrize("listed", [True, False])
def test_some_of_the_shards_are_not_the_data_set(hub: Hub, tmp_path: Path, names: list[str], listed: bool) -> None:
    content = {name: lines(f"{name}?") if names is SHARDS else parquet(tmp_path, [f"{name}?"]) for name in names}
    hub.sets = {"org/set": {COMMIT if names is SHARDS else CONVERTED: content}}
    ((said, _, _),) = read(hub, tmp_path, "hf:org/set")
    assert ": 2 rows of " in said
    folder = tmp_path / "hf/hub/datasets--org--set"
    (there,) = folder.glob("snapshots/*")
    name = f"hf:org/set@{there.name}"
    lost = there / sorted(names[:2])[1]
    lost.resolve().unlink()
    lost.unlink()
    if not listed:  # as where another program fetched one file
        for each in folder.glob("trees/*"):
            each.unlink()
    (refused,) = read(hub, tmp_path, name, HF_HUB_OFFLINE="1")
    assert "the hub cannot be reached" in refused
    ((again, _, _),) = read(hub, tmp_path, name)
    assert again == said


@pytest.mark.parametrize(
    ("name", "names", "files"),
    [
        ("hf:o/n", ["default/train/0000.parquet", "default/test/0000.parquet"], ["default/train/0000.parquet"]),
        ("hf:o/n", ["all/test/0000.parquet"], ["all/test/0000.parquet"]),
        ("hf:o/n", ["default/partial-train/0000.parquet"], ["default/partial-train/0000.parquet"]),
        ("hf:o/n:test", ["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"], [-1]),
        ("hf:o/n", ["x/train-00000-of-00002.parquet", "x/train-00001-of-00002.parquet"], [0, 1]),
        ("hf:o/n/b", ["a.jsonl", "b.jsonl"], ["b.jsonl"]),
        ("hf:o/n", ["questions.csv", "README.md", "dataset_infos.json"], ["questions.csv"]),
    ],
)
def test_files_of_a_name(name: str, names: list[str], files: list[Any]) -> None:
    assert chosen_files(parse(name), names) == [each if isinstance(each, str) else names[each] for each in files]


@pytest.mark.parametrize("name", ["hf:gsm8k", "hf:", "hf:a/b:c:d", "hf:a/b c", "hf:/a/b"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(UserError, match="is no data set of the hub: write hf:OWNER/NAME"):
        parse(name)


def test_names_are_written_as_they_are_read() -> None:
    for name in ("hf:a/b", "hf:a/b/main", "hf:a/b/data/x.jsonl:test@1234", "hf:a/b:train"):
        assert str(parse(name)) == name
    assert label_of("hf:a/b.c/data/x:test@12") == "b.c-data-x-test"
    assert pinned(["gcd", "q.jsonl", TaskConfig(env="bf")]) == ["gcd", "q.jsonl", TaskConfig(env="bf")]
