"""Small files over HTTPS, limited in size and time; plain HTTP only from this machine.

An address that a stranger wrote (`public`) leads only to hosts of the public internet, also by redirects. Its name is
resolved once, and the connection goes to an IP address that was checked.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import time
import urllib.request
from functools import partial
from http.client import HTTPException, HTTPResponse, HTTPSConnection
from typing import IO, Any
from urllib.parse import urlsplit

from swarm_node.errors import UserError
from swarm_protocol.hosts import is_public

TIMEOUT_S = 10.0  # the longest silence of a server
DEADLINE_S = 300.0  # the longest download, unless the caller sets another limit: 64 MiB at two megabits a second
CHUNK = 64 * 1024


def is_url(text: str) -> bool:
    """Whether `text` is a web address rather than a path."""
    return text.startswith(("https://", "http://"))


def download(url: str, limit: int, seconds: float = DEADLINE_S, public: bool = False) -> bytes:
    """The file at `url`, of at most `limit` bytes, within `seconds`. With `public`, the host must be on the public
    internet, and proxies are not used. Raises UserError."""
    _check(url, public)
    ends = time.monotonic() + seconds
    direct = [urllib.request.ProxyHandler({}), _PublicHosts(ends)] if public else []
    opener = urllib.request.build_opener(_Redirects(public), *direct)
    request = urllib.request.Request(url, headers={"User-Agent": "swarm-node"})
    data = bytearray()
    try:
        with opener.open(request, timeout=min(TIMEOUT_S, seconds)) as response:
            while chunk := response.read1(CHUNK):
                data += chunk
                if len(data) > limit:
                    raise UserError(f"{url} is larger than {limit} bytes, which is too much")
                if time.monotonic() > ends:
                    raise UserError(f"{url} takes longer than {seconds:.0f} s")
    except (OSError, HTTPException, ValueError) as error:  # URLError and TimeoutError are OSErrors
        raise UserError(f"cannot get {url}: {getattr(error, 'reason', None) or error}") from error
    return bytes(data)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect only to an address that `download` would accept."""

    def __init__(self, public: bool) -> None:
        self.public = public

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        _check(newurl, self.public)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check(url: str, public: bool) -> None:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError as error:
        raise UserError(f"{url} is no address: {error}") from error
    if parts.scheme == "https" and host:
        return
    if parts.scheme != "http" or public or not _is_loopback(host):
        raise UserError(f"{url} is not encrypted: use https")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# --------------------------------------------------------------------- addresses that a stranger wrote


def public_addresses(host: str, port: int) -> list[str]:
    """The IP addresses of `host`. Raises OSError if there is none, or if one is not on the public internet."""
    found = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for text in found:
        if not is_public(text.partition("%")[0]):
            raise OSError(f"{host} is {text}, which is not on the public internet")
    return found


class _TimedSocket(ssl.SSLSocket):
    """A socket that is read until the time `ends`, because a server may send headers slowly, too."""

    ends: float

    def recv_into(self, *arguments: Any) -> int:
        left = self.ends - time.monotonic()
        if left <= 0:
            raise TimeoutError("it takes too long")
        self.settimeout(min(TIMEOUT_S, left))
        return super().recv_into(*arguments)


class _PublicHosts(urllib.request.HTTPSHandler):
    def __init__(self, ends: float) -> None:
        super().__init__()
        self.ends = ends

    def https_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(partial(_PublicConnection, ends=self.ends), req)


class _PublicConnection(HTTPSConnection):
    def __init__(self, host: str, ends: float, **options: Any) -> None:
        super().__init__(host, **options)
        self.ends = ends

    def connect(self) -> None:
        """Connect to the first address of the host that answers. Raises OSError."""
        context = ssl.create_default_context()
        context.sslsocket_class = _TimedSocket
        failure: OSError = TimeoutError("it takes too long")
        for address in public_addresses(self.host, self.port):
            if (left := self.ends - time.monotonic()) <= 0:
                break
            try:
                plain = socket.create_connection((address, self.port), min(TIMEOUT_S, left))
            except OSError as error:
                failure = error
                continue
            timed: Any = context.wrap_socket(plain, server_hostname=self.host)  # closes `plain` if it fails
            timed.ends = self.ends
            self.sock = timed
            return
        raise failure
