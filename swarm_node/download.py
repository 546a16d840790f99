"""Small files over HTTP: bounded in size and time, encrypted unless they come from this very machine."""

from __future__ import annotations

import ipaddress
import time
import urllib.request
from http.client import HTTPException
from typing import IO, Any
from urllib.parse import urlsplit

from swarm_node.errors import UserError

TIMEOUT_S = 10.0
"""Longest silence of a server."""
DEADLINE_S = 300.0
"""Longest download altogether: 64 MiB at two megabits a second."""
CHUNK = 64 * 1024


def is_url(text: str) -> bool:
    """Whether `text` is an address rather than a path."""
    return text.startswith(("https://", "http://"))


def download(url: str, limit: int, own_machine: bool = True) -> bytes:
    """What is at `url`, at most `limit` bytes; http only from this machine, and only if `own_machine` allows.

    Raises UserError.
    """
    _check(url, own_machine)
    opener = urllib.request.build_opener(_Redirects(own_machine))
    request = urllib.request.Request(url, headers={"User-Agent": "swarm-node"})
    data, ends = bytearray(), time.monotonic() + DEADLINE_S
    try:
        with opener.open(request, timeout=TIMEOUT_S) as response:
            while chunk := response.read1(CHUNK):
                data += chunk
                if len(data) > limit:
                    raise UserError(f"{url} is larger than {limit} bytes, which is too much")
                if time.monotonic() > ends:
                    raise UserError(f"{url} takes longer than {DEADLINE_S:g} s")
    except (OSError, HTTPException, ValueError) as error:  # URLError and TimeoutError are OSErrors
        raise UserError(f"cannot get {url}: {getattr(error, 'reason', None) or error}") from error
    return bytes(data)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows only to where it could have been asked to go at once."""

    def __init__(self, own_machine: bool) -> None:
        self.own_machine = own_machine

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        _check(newurl, self.own_machine)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check(url: str, own_machine: bool) -> None:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError as error:
        raise UserError(f"{url} is no address: {error}") from error
    if parts.scheme == "https" and host:
        return
    if parts.scheme != "http" or not (own_machine and _is_loopback(host)):
        raise UserError(f"{url} is not encrypted: use https")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
