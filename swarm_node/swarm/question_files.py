"""The question files that a manifest names, each checked by sha256, in the run directory.

run directory | the user's own tasks | beside the manifest | the manifest's source | members -> checked copy
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from protocol.errors import PeerUnreachable, RemoteProtocolError, printable
from protocol.manifest import FILE_METHOD, Manifest, ManifestTask
from protocol.transports.base import Transport
from swarm_node.config import TaskConfig
from swarm_node.errors import UserError
from swarm_node.storage.rundir import RunDir, os_errors_explained
from swarm_node.swarm.download import download
from swarm_node.swarm.links import Say, Swarm
from swarm_node.swarm.lookup import _ask_around
from swarm_node.swarm.manifests import as_table, read_questions

GATHER_S = 120.0
"""How long question files hold up a node that starts, whatever their sources and members do: as long as all that a
manifest may name takes at nine megabits a second."""
FILE_WAIT_S = 20.0
"""Of which, how long it looks for members who hold one, before it goes on without."""
FILE_S, FILE_BYTES_PER_S = 10.0, 2**20
"""How long one question file may take: ten seconds and one for each mebibyte."""


def gather_files(
    manifest: Manifest,
    swarm: Swarm,
    run: RunDir,
    own: Sequence[str | TaskConfig],
    say: Say,
    connect: Callable[[], Transport],
) -> dict[str, Path]:
    """Digest -> question file of the manifest, as copied into the run directory and checked.

    Looked for there, among the user's `own` tasks, beside the manifest, at the source that the manifest names and, if
    all that fails, with members (`connect` is called only then). Sources and members together are given `GATHER_S`. A
    file that cannot be had now is left out: said, not raised. Raises UserError if the run directory, or a file among
    `own`, cannot be used.
    """
    files: dict[str, Path] = {}
    given: dict[str, bytes] | None = None
    until, look_until = time.monotonic() + GATHER_S, 0.0
    for task in manifest.tasks:
        if not task.sha256:
            continue
        path = run.files / task.sha256[:16] / f"{task.name or 'questions'}.jsonl"
        with os_errors_explained(path):
            at_hand = path.exists() and _is(task, path.read_bytes())
        if not at_hand:
            given = _given(own) if given is None else given
            data = given.get(task.sha256) or _beside(task, swarm, say) or _from_source(task, say, until)
            if data is None:
                look_until = look_until or time.monotonic() + FILE_WAIT_S
                data = _from_members(task, swarm, connect(), say, min(look_until, until), until)
                look_until = look_until if data is None else 0.0  # whoever had this one may have the next
            if data is None:
                continue
            with os_errors_explained(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        files[task.sha256] = path
    return files


def _given(own: Sequence[str | TaskConfig]) -> dict[str, bytes]:
    """Digest -> question file among the user's tasks."""
    tables = [spec if isinstance(spec, TaskConfig) else as_table(spec) for spec in own]
    found = [read_questions(table.file) for table in tables if table.file is not None]
    return {hashlib.sha256(data).hexdigest(): data for data in found}


def _beside(task: ManifestTask, swarm: Swarm, say: Say) -> bytes | None:
    if swarm.folder is None:
        return None
    path = swarm.folder / f"{task.name}.jsonl"
    try:
        data = read_questions(str(path)) if path.is_file() else b""
    except (UserError, OSError) as error:  # of that name, but perhaps not this one
        say(f"{error}; looking elsewhere for {_called(task)}")
        return None
    return data if _is(task, data) else None


def _from_source(task: ManifestTask, say: Say, until: float) -> bytes | None:
    if not task.source:
        return None
    try:
        data = download(task.source, task.bytes, _seconds_for(task, until), public=True)
    except UserError as error:
        say(f"{printable(str(error))}; asking members for {_called(task)}")
        return None
    if not _is(task, data):
        say(f"{printable(task.source)} is not what the manifest says; asking members for {_called(task)}")
        return None
    return data


def _from_members(
    task: ManifestTask, swarm: Swarm, transport: Transport, say: Say, look_until: float, until: float
) -> bytes | None:
    def ask(peer: str) -> bytes:
        if time.monotonic() > look_until:
            raise PeerUnreachable("out of time")
        seconds = _seconds_for(task, until)
        data = transport.request(peer, FILE_METHOD, task.sha256.encode(), seconds, max(1, task.bytes))
        if not _is(task, data):
            raise RemoteProtocolError("digest", "another file")
        return data

    try:
        return _ask_around(transport, swarm, ask, _called(task), say, look_until - time.monotonic())
    except PeerUnreachable as error:
        say(f"{error}; playing without it (give the file as --tasks, if you have it)")
        return None


def _seconds_for(task: ManifestTask, until: float) -> float:
    return max(0.1, min(FILE_S + task.bytes / FILE_BYTES_PER_S, until - time.monotonic()))


def _is(task: ManifestTask, data: bytes) -> bool:
    return len(data) == task.bytes and hashlib.sha256(data).hexdigest() == task.sha256


def _called(task: ManifestTask) -> str:
    return f"question file {task.name or 'without a name'} ({task.sha256[:16]})"
