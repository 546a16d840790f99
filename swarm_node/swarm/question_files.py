"""The question files that a manifest names, each checked by sha256, in the run directory.

run directory | the user's own tasks | beside the manifest | the manifest's source | members -> checked copy
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

from swarm_node.config import TaskConfig
from swarm_node.config.training import HUB
from swarm_node.errors import UserError
from swarm_node.say import Say, Warned
from swarm_node.storage.rundir import RunDir, os_errors_explained
from swarm_node.swarm.download import download, is_url
from swarm_node.swarm.links import Swarm
from swarm_node.swarm.lookup import ask_around
from swarm_node.swarm.manifests import as_table, read_questions
from swarm_node.tasks.names import numbered
from swarm_protocol.errors import PeerUnreachable, RemoteProtocolError, printable
from swarm_protocol.manifest import FILE_METHOD, Manifest, ManifestTask
from swarm_protocol.transports.base import Transport
from swarm_protocol.transports.transfer import Pace

ALL_FILES_S = 120.0
"""How long question files may delay the start of a node, whatever their sources and members do: as long as the largest
set that a manifest may name takes at nine megabits a second."""
HOLDER_S = 20.0  # how long a node looks for a member that holds a file, before it starts without
UNNAMED = "questions"  # name of a file that the manifest gives none
FILE_PACE = Pace(10.0, 2**20)  # how long one question file may take


def gather_files(
    manifest: Manifest,
    swarm: Swarm,
    run: RunDir,
    own: Sequence[str | TaskConfig],
    say: Say,
    transport: Transport,
) -> dict[str, Path]:
    """sha256 -> checked question file in the run directory, for each that the manifest names and that can be had.

    `own` are the user's tasks. Sources and members together may take `ALL_FILES_S`. A file that cannot be had now is
    reported by `say` and left out. Raises UserError if the run directory, or a file among `own`, cannot be used.
    """
    files: dict[str, Path] = {}
    names = names_of_files(manifest)
    given: dict[str, bytes] | None = None
    until, look_until = time.monotonic() + ALL_FILES_S, 0.0
    for task in manifest.tasks:
        if not task.sha256:
            continue
        path = run.files / task.sha256[:16] / f"{names[task.sha256]}.jsonl"
        with os_errors_explained(path):
            at_hand = path.is_file() and path.stat().st_size == task.bytes and _is(task, path.read_bytes())
        if not at_hand:
            given = _own_files(own) if given is None else given
            data = given.get(task.sha256) or _beside(task, swarm, say) or _from_source(task, say, until)
            if data is None:
                look_until = look_until or time.monotonic() + HOLDER_S
                data = _from_members(task, swarm, transport, say, min(look_until, until), until)
                look_until = look_until if data is None else 0.0  # the member that had this one may have the next
            if data is None:
                continue
            with os_errors_explained(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        files[task.sha256] = path
    return files


def names_of_files(manifest: Manifest) -> dict[str, str]:
    """sha256 -> name of each question file, without `.jsonl`. Later ones of a name are numbered (`questions-2`): so all
    members call them alike, also those that lack one."""
    names: dict[str, str] = {}
    for task in manifest.tasks:
        if task.sha256 and task.sha256 not in names:
            names[task.sha256] = numbered(task.name or UNNAMED, names.values())
    return names


def _own_files(own: Sequence[str | TaskConfig]) -> dict[str, bytes]:
    """sha256 -> question file, of the user's tasks: each as it is, and as `swarm-node new` converts it."""
    from swarm_node.tasks.files import QuestionFile

    found = []
    for spec in own:
        table = spec if isinstance(spec, TaskConfig) else as_table(spec)
        if table.file is not None and not table.file.startswith(HUB):
            found.append(read_questions(table.file))
        if table.file is not None and not is_url(table.file):
            found.append(QuestionFile(table.file, False, table.columns).as_jsonl())
    return {hashlib.sha256(data).hexdigest(): data for data in found}


def _beside(task: ManifestTask, swarm: Swarm, say: Say) -> bytes | None:
    if swarm.folder is None:
        return None
    path = swarm.folder / f"{task.name}.jsonl"
    try:
        data = read_questions(str(path)) if path.is_file() else b""
    except (UserError, OSError) as error:  # a file of that name, but perhaps another one
        say(Warned(f"{error}; looking elsewhere for {_called(task)}"))
        return None
    return data if _is(task, data) else None


def _from_source(task: ManifestTask, say: Say, until: float) -> bytes | None:
    if not task.source:
        return None
    try:
        data = download(task.source, task.bytes, _seconds_for(task, until), public=True)
    except UserError as error:
        say(Warned(f"{printable(str(error))}; asking members for {_called(task)}"))
        return None
    if not _is(task, data):
        say(Warned(f"{printable(task.source)} is not what the manifest says; asking members for {_called(task)}"))
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
        return ask_around(transport, swarm, ask, _called(task), say, look_until - time.monotonic())
    except PeerUnreachable as error:
        say(Warned(f"{error}; training without it (if you have the file, name it with --tasks)"))
        return None


def _seconds_for(task: ManifestTask, until: float) -> float:
    return max(0.1, min(FILE_PACE.seconds(task.bytes), until - time.monotonic()))


def _is(task: ManifestTask, data: bytes) -> bool:
    return len(data) == task.bytes and hashlib.sha256(data).hexdigest() == task.sha256


def _called(task: ManifestTask) -> str:
    return f"question file {task.name or 'without a name'} ({task.sha256[:16]})"
