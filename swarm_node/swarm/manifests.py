"""Manifests: `swarm-node new` makes them, and other nodes read them though a stranger wrote them.

    tasks, names, limits -> Manifest -> TOML        (see swarm_protocol.manifest)
    Manifest + question files -> [TaskConfig] -> load_tasks

A manifest may name sets of tasks, members of sets, audited environments with limited options (`tasks.option_limits`),
and question files by sha256. It holds no code, no path and no reward function. All members
find the answer in a completion, and judge it, in the same way (`tasks.judging`).
"""

from __future__ import annotations

import errno
import hashlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from swarm_node.config import RewardsConfig, TaskConfig
from swarm_node.config.training import HUB, TABLES
from swarm_node.errors import UserError
from swarm_node.say import Say
from swarm_node.storage.new_file import write_new_file
from swarm_node.storage.plain_files import read_plain
from swarm_node.storage.rundir import os_errors_explained
from swarm_node.swarm.download import download, is_url
from swarm_protocol.answer_form import AnswerKind
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.identity import public_key_of
from swarm_protocol.limits import MAX_RESPONSE_BYTES
from swarm_protocol.manifest import Manifest, ManifestTask, parse_manifest
from swarm_protocol.peers import peer_of

PEERS_PER_SHARD = 32
NOT_LINES = (*TABLES, ".parquet")  # endings of question files that are not lines of text
MAX_FILE_BYTES = MAX_RESPONSE_BYTES  # the largest question file: members give it to each other in one response


def make_manifest(
    name: str,
    tasks: Sequence[str | TaskConfig],
    expected_peers: int = PEERS_PER_SHARD,
    licence: str = "",
    kind: AnswerKind | None = None,
    **rest: Any,
) -> Manifest:
    """A new manifest, checked as every member will check it. `kind` is that of the answers in files whose table names
    none; None = guessed. `rest` are its other fields. Raises UserError."""
    from swarm_node.tasks.files import QuestionFile
    from swarm_node.tasks.option_limits import check_options
    from swarm_node.tasks.taskset import load_tasks  # takes a second: reasoning-gym

    check_addresses(rest.get("bootstrap", []))
    with tempfile.TemporaryDirectory() as folder:
        made, files = [], {}
        for spec in tasks:
            table = spec if isinstance(spec, TaskConfig) else as_table(spec)
            if table.file is None:
                check_options(table.env or "", table.config)
                made.append(ManifestTask(env=table.env or "", config=table.config, weight=table.weight))  # type: ignore[arg-type]
                continue
            data = b"" if table.file.startswith(HUB) else read_questions(table.file)
            task = _of_file(table, data, licence)
            path = Path(folder) / task.sha256 / f"{task.name}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            is_lines = data and not table.file.split("?")[0].lower().endswith(NOT_LINES)
            file = QuestionFile(str(path), columns=table.columns, kind=table.kind or kind) if is_lines else None
            if file is None or not file.as_members_read:
                raise UserError(
                    f"members read JSON lines whose `question` and `answer` are texts, and {table.file} is otherwise: "
                    "`swarm-node new` converts such a file on this machine; `--stages` takes none, and an address "
                    "none either (download the file)"
                )
            files[task.sha256] = path
            made.append(msgspec.structs.replace(task, kind=file.kind))
        created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        manifest = Manifest(name, made, created, shards=-(-expected_peers // PEERS_PER_SHARD), **rest)
        try:
            parse_manifest(render(manifest))
        except RemoteProtocolError as error:
            raise UserError(f"nobody would accept this manifest: {error.detail}") from error
        load_tasks(task_tables(manifest, files), RewardsConfig())
    return manifest


def with_usual_columns(
    specs: Sequence[str | TaskConfig], folder: Path, say: Say, kind: AnswerKind | None = None
) -> list[str | TaskConfig]:
    """`specs` in which each file that is not JSON lines with the texts `question` and `answer`, and each data set of
    the hub, is replaced by a copy of such lines in `folder`. The copy is called as the file; `say` gets sentences on
    what was read, and how answers are judged: `kind` is as for `make_manifest`. Raises UserError, also if another file
    of that name is there."""
    from swarm_node.tasks.files import QuestionFile

    found: list[str | TaskConfig] = []
    for spec in specs:
        table = spec if isinstance(spec, TaskConfig) else as_table(spec)
        if table.file is None or is_url(table.file):
            found.append(spec)
            continue
        file = QuestionFile(table.file, columns=table.columns, kind=table.kind or kind)
        say(file.was_read)
        say(file.is_judged)
        if file.as_members_read and not table.file.startswith(HUB):  # whose files lie in a cache
            found.append(spec)
            continue
        if file.has_several and file.kind == "text":
            raise UserError(
                f"{table.file} has several accepted answers to a question, and members read one of the kind text: "
                "leave one, or name another kind, as --kind number"
            )
        copy = folder / f"{file.label}-questions.jsonl"
        _write_copy(copy, file.as_jsonl(), f"{table.file} in the form that members read")
        found.append(TaskConfig(file=str(copy), weight=table.weight, kind=file.kind))
    return found


def put_beside(manifest: Manifest, specs: Sequence[str | TaskConfig], folder: Path) -> list[Path]:
    """Copy the question files among `specs` into the folder of the manifest, under the names by which a bootstrap looks
    for them there, and return the copies. Raises UserError, also if another file of that name is there."""
    made = []
    tables = [spec if isinstance(spec, TaskConfig) else as_table(spec) for spec in specs]
    for table in tables:
        if table.file is None or is_url(table.file):
            continue
        data = read_questions(table.file)
        copy = folder / f"{_of_file(table, data, '').name}.jsonl"
        if _write_copy(copy, data, f"{table.file}, which a bootstrap gives to members"):
            made.append(copy)
    return made


def _write_copy(copy: Path, data: bytes, what: str) -> bool:
    """Write a question file, all of it or nothing; False if it is there. UserError if another file has its name."""
    with os_errors_explained(copy):
        if not copy.exists():
            write_new_file(copy, [data])
            return True
        if copy.read_bytes() != data:
            raise UserError(f"{copy} is to be {what}, but is another file")
    return False


def render(manifest: Manifest) -> bytes:
    """The manifest as TOML."""
    return tomli_w.dumps(msgspec.to_builtins(manifest)).encode()


def write_manifest(manifest: Manifest, path: Path) -> None:
    """Write the manifest to a new file. Raises UserError, also if the file exists."""
    write_new_file(path, [render(manifest)])


def task_tables(manifest: Manifest, files: Mapping[str, Path]) -> list[TaskConfig]:
    """The tasks as `load_tasks` takes them. `files`: sha256 -> checked question file; tasks without one are left out.
    Raises UserError for environments or options that a manifest may not name."""
    from swarm_node.tasks.option_limits import check_options

    tables = []
    for task in manifest.tasks:
        if task.env:
            check_options(task.env, task.config)
            tables.append(TaskConfig(env=task.env, config=dict(task.config), weight=task.weight))
        elif task.sha256 in files:
            tables.append(TaskConfig(file=str(files[task.sha256]), weight=task.weight, kind=task.kind))
    return tables


def as_table(spec: str) -> TaskConfig:
    """A task from its name on the command line."""
    from swarm_node.tasks.sources import task_table

    return TaskConfig(file=spec) if is_url(spec) else task_table(spec)


def read_questions(place: str) -> bytes:
    """The bytes of a question file at a path or an address, at most `MAX_FILE_BYTES`. Raises UserError."""
    if is_url(place):
        return download(place, MAX_FILE_BYTES)
    try:
        return read_plain(Path(place).expanduser(), MAX_FILE_BYTES)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise UserError(
                f"{place} is larger than the {MAX_FILE_BYTES // 2**20} MiB that members can give to each other"
            ) from error
        raise UserError(f"cannot read task file {place}: {error.strerror}") from error


def check_addresses(addresses: Sequence[str]) -> None:
    """Raises UserError unless each is a multiaddress that ends in a peer id."""
    for address in addresses:
        try:
            if not address.startswith("/"):
                raise RemoteProtocolError("identity")
            public_key_of(peer_of(address))
        except RemoteProtocolError as error:
            raise UserError(
                f"{address!r} is no address of a peer: it should look like /ip4/203.0.113.5/tcp/31330/p2p/12D3KooW… "
                "(the part after `peer=` in a join link)"
            ) from error


def _of_file(table: TaskConfig, data: bytes, licence: str) -> ManifestTask:
    place = table.file or ""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", place.split("?")[0].rpartition("/")[2].removesuffix(".jsonl"))
    return ManifestTask(
        sha256=hashlib.sha256(data).hexdigest(),
        source=place if place.startswith("https://") else "",
        licence=licence,
        name=stem[:64] or "questions",
        bytes=len(data),
        weight=table.weight,
    )
