"""Keys, key files and peer ids."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_protocol.errors import LocalProtocolError, RemoteProtocolError
from swarm_protocol.identity import Identity, peer_id_of, public_key_of, verify
from tests.support.wire import IDENTITY, STRANGER, mutations, refused

KEY_FILE = bytes.fromhex("08011240") + bytes(range(32)) + IDENTITY.public_key


def test_golden_peer_id() -> None:
    assert IDENTITY.peer_id == "12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"
    assert IDENTITY.public_key.hex() == "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"


def test_generated_identities_differ() -> None:
    assert Identity.generate().peer_id != Identity.generate().peer_id


# --------------------------------------------------------------------- the key file


def test_the_file_is_made_once_private_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    umask = os.umask(0)
    try:
        made = Identity.load_or_create(path)
    finally:
        os.umask(umask)
    data = path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Identity.load_or_create(path).peer_id == made.peer_id
    assert path.read_bytes() == data


KILLED = """
import os, sys
from pathlib import Path
from swarm_protocol.identity import Identity
os.fsync = lambda descriptor: os._exit(9)
Identity.load_or_create(Path(sys.argv[1]))
"""


def test_a_killed_maker_makes_it_next_time(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)]).returncode == 9
    assert list(tmp_path.iterdir())  # it had begun
    assert not path.exists()
    assert Identity.load_or_create(path).peer_id == Identity.load(path).peer_id


def failing(number: int) -> Callable[..., None]:
    def fail(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_an_identity_never_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space"):
        STRANGER.save(tmp_path / "identity.key")
    assert not list(tmp_path.iterdir())


def test_file_systems_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "identity.key"
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    STRANGER.save(path)
    with pytest.raises(FileExistsError):
        IDENTITY.save(path)
    assert Identity.load(path).peer_id == STRANGER.peer_id
    assert list(tmp_path.iterdir()) == [path]


def test_golden_key_file(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    IDENTITY.save(path)
    assert path.read_bytes() == KEY_FILE  # what go-libp2p reads
    assert Identity.load(path).peer_id == IDENTITY.peer_id


def test_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(KEY_FILE)
    with pytest.raises(FileExistsError):
        STRANGER.save(path)
    assert path.read_bytes() == KEY_FILE


@pytest.mark.parametrize(
    "data",
    [
        b"",
        KEY_FILE[:-1],
        KEY_FILE + b"\0",
        b"\x08\x00" + KEY_FILE[2:],  # RSA
        KEY_FILE[:36] + STRANGER.public_key,
        KEY_FILE[:4] + bytes(32) + KEY_FILE[36:],
    ],
    ids=["empty", "short", "long", "other kind", "other public half", "other private half"],
)
def test_a_damaged_file_is_refused_and_left_alone(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(data)
    with pytest.raises(LocalProtocolError, match="restore"):
        Identity.load_or_create(path)
    assert path.read_bytes() == data


@given(data=st.binary(max_size=80) | mutations(KEY_FILE))
def test_any_file_is_an_identity_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.key"
    path.write_bytes(data)
    try:
        assert Identity.load(path).public_key == data[36:]
    except LocalProtocolError:
        pass


# --------------------------------------------------------------------- peer ids


@given(st.binary(min_size=32, max_size=32))
def test_a_peer_id_carries_its_key(key: bytes) -> None:
    assert public_key_of(peer_id_of(key)) == key


@given(st.text(max_size=80) | st.text("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz", max_size=64))
def test_any_text_is_a_peer_id_or_refused(text: str) -> None:
    if refused(lambda: public_key_of(text), {"identity"}) is None:
        assert peer_id_of(public_key_of(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "é",
        "\ud800",
        "0" * 52,
        "1" * 64,
        IDENTITY.peer_id + "\n",
        " " + IDENTITY.peer_id,
        "1" + IDENTITY.peer_id,
        IDENTITY.peer_id[:-1],
        "Q" * 10_000,
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",  # of an RSA key
    ],
)
def test_one_peer_has_one_id(text: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        public_key_of(text)
    assert caught.value.reason == "identity"


# --------------------------------------------------------------------- signatures


def test_signatures_bind_key_tag_and_bytes() -> None:
    signature = IDENTITY.sign(b"tag\0", b"data")
    verify(IDENTITY.public_key, b"tag\0", b"data", signature)
    for key, tag, data in (
        (STRANGER.public_key, b"tag\0", b"data"),
        (IDENTITY.public_key, b"gat\0", b"data"),
        (IDENTITY.public_key, b"tag\0", b"dat"),
    ):
        with pytest.raises(RemoteProtocolError, match="signature"):
            verify(key, tag, data, signature)


@given(st.binary(max_size=70), st.binary(max_size=40))
def test_nothing_random_verifies(signature: bytes, key: bytes) -> None:
    assert refused(lambda: verify(key, b"", b"data", signature), {"signature"}) == "signature"
    assert refused(lambda: verify(IDENTITY.public_key, b"", b"data", signature), {"signature"}) == "signature"
