"""The identity of a peer: one Ed25519 key, which gives its libp2p peer id and signs its records.

peer id    = base58(0x00 0x24 | 0x08 0x01 0x12 0x20 | public key)        libp2p's inline form of an Ed25519 key
key file   = 0x08 0x01 0x12 0x40 | seed (32 bytes) | public key (32)      for go-libp2p; py-libp2p wants the seed only
signature  = Ed25519(tag | bytes)                                         the tag names the kind of record
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_protocol.errors import LocalProtocolError, RemoteProtocolError

if TYPE_CHECKING:  # a node alone has no identity, and may lack both packages
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS}
"""Errors of file systems without hard links, such as some cloud drives."""
_FILE_HEAD = bytes.fromhex("08011240")
_ID_HEAD = bytes.fromhex("002408011220")


class Identity:
    """A private key and the peer it makes."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key = key.public_key().public_bytes_raw()
        self.peer_id = peer_id_of(self.public_key)

    @classmethod
    def generate(cls, seed: bytes | None = None) -> Identity:
        """A new identity; `seed` (32 bytes) makes a chosen one, for simulations and tests."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls(Ed25519PrivateKey.generate() if seed is None else Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load(cls, path: Path) -> Identity:
        """The identity in a key file. Raises LocalProtocolError if it is none; OSError if it cannot be read."""
        data = b"" if path.exists() and not path.is_file() else path.read_bytes()  # a pipe would wait for ever
        if len(data) != 68 or not data.startswith(_FILE_HEAD):
            raise LocalProtocolError(f"{path} is not an Ed25519 identity file: restore it, or delete it for a new peer")
        identity = cls.generate(data[4:36])
        if identity.public_key != data[36:]:
            raise LocalProtocolError(f"{path} is damaged: its two halves do not belong together; restore it")
        return identity

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """The identity in `path`; a new one, mode 0600 and never overwriting, if there is no such file."""
        try:
            return cls.load(path)
        except FileNotFoundError:
            identity = cls.generate()
            identity.save(path)
            return identity

    def save(self, path: Path) -> None:
        """Write a new key file, all of it or nothing; FileExistsError rather than overwrite one."""
        temporary = path.with_name(f"{path.stem}.{os.getpid()}.new")
        temporary.unlink(missing_ok=True)  # of a process of this number that was killed
        try:
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(_FILE_HEAD + self._key.private_bytes_raw() + self.public_key)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, path)  # unlike a rename, never overwrites
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                if path.exists():
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
                temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)

    def sign(self, tag: bytes, data: bytes) -> bytes:
        """Signature [64 bytes] over `data`, as a record of the kind that `tag` names."""
        return self._key.sign(tag + data)


def peer_id_of(public_key: bytes) -> str:
    """The peer id in base58 of an Ed25519 public key [32 bytes]."""
    import base58

    return base58.b58encode(_ID_HEAD + public_key).decode()


def public_key_of(peer_id: str) -> bytes:
    """The public key [32 bytes] in a peer id. Raises RemoteProtocolError `identity` if it is not an Ed25519 one."""
    import base58

    if len(peer_id) > 64:
        raise RemoteProtocolError("identity", f"peer id of {len(peer_id)} characters")
    try:
        data = base58.b58decode(peer_id)
    except ValueError as error:
        raise RemoteProtocolError("identity", f"{peer_id!r} is not base58") from error
    if len(data) != 38 or not data.startswith(_ID_HEAD) or peer_id != peer_id_of(data[6:]):  # base58 strips blanks
        raise RemoteProtocolError("identity", f"{peer_id!r} is not the id of an Ed25519 key")
    return data[6:]


def verify(public_key: bytes, tag: bytes, data: bytes, signature: bytes) -> None:
    """Raises RemoteProtocolError `signature` unless `public_key` signed `data` with `tag`."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, tag + data)
    except (InvalidSignature, ValueError) as error:
        raise RemoteProtocolError("signature", f"not signed by {peer_id_of(public_key)}") from error
