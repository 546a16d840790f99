"""The manifest of a swarm: its tasks, its limits, and addresses to join it.

    swarm id = sha256(canonical JSON of the manifest: sorted keys, no blanks, neither defaults nor the bootstrap list)
    link     = swarm://<swarm id>?peer=<multiaddr>&peer=<multiaddr>

A manifest is a TOML file that anyone may write. A link carries no tasks: a newcomer fetches the manifest from a peer
and checks that its hash is the id.
"""

from __future__ import annotations

import hashlib
import tomllib
from typing import Annotated, Any
from urllib.parse import parse_qs, quote, urlsplit

import msgspec
from msgspec import Meta
from msgspec.structs import FieldInfo

from swarm_protocol.answer_form import AnswerForm, AnswerKind
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.limits import (
    CHARS_PER_TOKEN,
    MAX_ADDRESSES,
    MAX_MANIFEST_BYTES,
    MAX_SHARDS,
    MAX_TEXT_CHARS,
    MAX_TOKENS,
)
from swarm_protocol.messages import Address, Hash64
from swarm_protocol.model_listing import MAX_MODEL_BYTES
from swarm_protocol.plain_toml import MAX_DOTS

LINK_SCHEME = "swarm"
ID_CHARS = 64
MAX_TASK_SOURCES = 64
MAX_FILES_BYTES = 128 * 2**20  # all question files of a manifest together. A newcomer waits for them and keeps them.
MANIFEST_METHOD = "manifest"  # request that any member answers with its manifest as TOML
FILE_METHOD = "file"
"""Request, payload = sha256 in hexadecimal, that a member answers with a question file of the manifest."""


Number = Annotated[float, Meta(ge=-1e300, le=1e300)]
"""A number that is neither infinite nor NaN, because JSON, and so the id, cannot tell those apart."""
Option = bool | Annotated[int, Meta(ge=-(2**53), le=2**53)] | Number | Annotated[str, Meta(max_length=64)]


class ManifestTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One source of tasks; exactly one of `env` and `sha256` is given."""

    env: Annotated[str, Meta(max_length=64, pattern=r"^[a-z0-9_/]*\Z")] = ""
    """Set, member of a set or environment, as in `--tasks`."""
    config: Annotated[dict[Annotated[str, Meta(max_length=64)], Option], Meta(max_length=32)] = {}
    """Options of the environment, within bounds (a stranger wrote them)."""
    sha256: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""  # digest of a question file
    source: Annotated[str, Meta(max_length=1024, pattern=r"^[!-~]*\Z")] = ""
    """An https address of the file; empty = members supply it."""
    licence: Annotated[str, Meta(max_length=128, pattern=r"^[ -~]*\Z")] = ""  # licence of the file (SPDX)
    name: Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9._-]*\Z")] = ""  # name of the file, without `.jsonl`
    bytes: Annotated[int, Meta(ge=0, le=64 * 2**20)] = 0  # size of the file
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    kind: AnswerKind = "text"
    """Kind of the answers in a question file. Nodes that speak protocol 1 alone know no other kind than `text`, and
    refuse a manifest that names one."""


class ManifestModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The model that members train by default, and give to each other (`model_listing`)."""

    name: Annotated[str, Meta(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?\Z")]
    """Id on the hub, or another name; never a path."""
    digest: Hash64  # sha256 of its listing
    bytes: Annotated[int, Meta(ge=1, le=MAX_MODEL_BYTES)]  # bytes of all its files
    revision: Annotated[str, Meta(pattern=r"^([0-9a-f]{40})?\Z")] = ""
    """Commit on the hub at which it has these files; empty = it is not from there."""


class ManifestLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits that every member applies to every other member."""

    max_text_chars: Annotated[int, Meta(ge=1, le=MAX_TEXT_CHARS)] = 16_384  # longer completions are refused
    max_answer_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 4096
    """Longer completions are not sent. Completions with more than `CHARS_PER_TOKEN` characters for each of so many
    tokens are refused. The default allows `MAX_TEXT_CHARS`."""
    max_rollouts: Annotated[int, Meta(ge=2, le=64)] = 16  # larger groups are refused
    groups_per_minute: Annotated[int, Meta(ge=1, le=4096)] = 1200
    """Groups that one peer may publish in a minute; more are refused."""
    bytes_per_minute: Annotated[int, Meta(ge=1024, le=2**30)] = 8 * 2**20
    """Bytes that one peer may publish in a minute; more are refused."""
    max_age_s: Annotated[float, Meta(ge=10, le=86_400)] = 600.0  # older groups are refused

    @property
    def max_answer_chars(self) -> int:
        """Characters of the longest completion that is not refused."""
        return min(self.max_text_chars, CHARS_PER_TOKEN * self.max_answer_tokens)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A swarm."""

    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._ -]+\Z")]
    tasks: Annotated[list[ManifestTask], Meta(min_length=1, max_length=MAX_TASK_SOURCES)]
    created: Annotated[str, Meta(max_length=32)] = ""
    """Date: swarms of equal tasks made at different times are different swarms."""
    shards: Annotated[int, Meta(ge=1, le=MAX_SHARDS)] = 1  # gossip topics: about one for every 32 peers expected
    limits: ManifestLimits = ManifestLimits()
    averaging_period_s: Annotated[float, Meta(ge=0.1, le=86_400)] = 60.0
    """Seconds of an outer round of averaging in pairs: round = floor(Unix time / this). Large weights use a multiple of
    it."""
    model: ManifestModel | None = None  # `None` = each member brings its own
    answer: AnswerForm = "any"  # form in which an answer counts
    bootstrap: Annotated[list[Address], Meta(max_length=64)] = []
    """Peers to begin with; not part of the id, so that it can change."""

    @property
    def swarm_id(self) -> str:
        """sha256, in hexadecimal, of everything but `bootstrap`."""
        table = _stated(self)
        table.pop("bootstrap", None)
        return hashlib.sha256(msgspec.json.encode(table, order="deterministic")).hexdigest()


class JoinLink(msgspec.Struct, frozen=True):
    """A `swarm://` link."""

    swarm: Hash64
    peers: Annotated[list[Address], Meta(max_length=MAX_ADDRESSES)] = []

    def __str__(self) -> str:
        return f"{LINK_SCHEME}://{self.swarm}" + "".join(
            f"{'&' if i else '?'}peer={quote(peer, safe='/')}" for i, peer in enumerate(self.peers)
        )


def parse_manifest(data: bytes, swarm: str | None = None) -> Manifest:
    """The manifest in a TOML file. Raises `RemoteProtocolError`: size, schema, or swarm if its id is not `swarm`."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise RemoteProtocolError("size", f"manifest of {len(data)} bytes, allowed are {MAX_MANIFEST_BYTES}")
    if any(line.count(b".") > MAX_DOTS for line in data.split(b"\n")):
        raise RemoteProtocolError("schema", f"a line with more than {MAX_DOTS} dots")
    try:
        manifest = msgspec.convert(tomllib.loads(data.decode()), Manifest)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError
        raise RemoteProtocolError("schema", str(error)) from error
    for task in manifest.tasks:
        if bool(task.env) == bool(task.sha256):
            raise RemoteProtocolError("schema", "a task needs either `env` or `sha256`")
        if task.env and task.kind != "text":
            raise RemoteProtocolError("schema", f"{task.env} has a checker of its own, and no kind of answers")
    if (total := sum(task.bytes for task in manifest.tasks)) > MAX_FILES_BYTES:
        raise RemoteProtocolError("size", f"question files of {total} bytes, allowed are {MAX_FILES_BYTES}")
    if swarm is not None and manifest.swarm_id != swarm:
        raise RemoteProtocolError("swarm", f"this is the manifest of {manifest.swarm_id}")
    return manifest


def parse_link(text: str) -> JoinLink:
    """The link in `text`. Raises `RemoteProtocolError` `schema`."""
    try:
        parts = urlsplit(text)
        if parts.scheme != LINK_SCHEME or parts.path or parts.fragment:
            raise ValueError("a link looks like swarm://<64 hex digits>?peer=/ip4/…/p2p/…")
        if len(parts.netloc) != ID_CHARS:
            raise ValueError(
                f"the id in this link has {len(parts.netloc)} characters instead of {ID_CHARS}: copy the whole link"
            )
        if strange := set(parts.netloc) - set("0123456789abcdef"):
            raise ValueError(f"the id in this link is of 0-9 and a-f, and has no {min(strange)!r}: copy it again")
        peers = parse_qs(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        if peers.keys() - {"peer"}:
            raise ValueError(f"unknown field {min(peers.keys() - {'peer'})!r}")
        return msgspec.convert({"swarm": parts.netloc, "peers": peers.get("peer", [])}, JoinLink)
    except ValueError as error:
        raise RemoteProtocolError("schema", str(error)) from error


def _stated(value: Any) -> Any:
    """`value` as plain JSON types, without fields that equal their default (`omit_defaults` goes by identity)."""
    if isinstance(value, msgspec.Struct):
        fields = [(field, getattr(value, field.name)) for field in msgspec.structs.fields(value)]
        return {field.name: _stated(item) for field, item in fields if item != _default(field)}
    return [_stated(item) for item in value] if isinstance(value, list) else value


def _default(field: FieldInfo) -> Any:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
