"""What is fetched from an address that a stranger wrote: a server with a certificate on this machine, for public."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from swarm_node.errors import UserError
from swarm_node.swarm import download as module
from swarm_node.swarm.download import download, public_addresses


def certificate(folder: Path) -> Path:
    """Of `files.example`, signed by itself, with its key in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "files.example")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("files.example")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / "certificate.pem"
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM) + secret)
    return path


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", f"https://inside.example:{self.server.server_port}/")  # type: ignore[attr-defined]
            self.end_headers()
            return
        self.send_response(200)
        self.flush_headers()
        try:
            while self.path == "/trickle":  # until the other end has had enough
                self.wfile.write(b"X: y\r\n")
                time.sleep(0.1)
        except OSError:
            return
        self.end_headers()
        self.wfile.write(b"questions")

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a server `files.example`, which leads to this machine and passes for public."""
    path = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *arguments: None  # type: ignore[method-assign]
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def addresses(host: str, port: int) -> list[str]:
        return ["127.0.0.1"] if host == "files.example" else public_addresses(host, port)

    monkeypatch.setattr(module, "public_addresses", addresses)
    resolve(monkeypatch, {"inside.example": ["127.0.0.1"]})
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    yield f"https://files.example:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def resolve(monkeypatch: pytest.MonkeyPatch, names: dict[str, list[str]]) -> None:
    """Have these names, and IP addresses, resolved; no question leaves this machine."""
    real = socket.getaddrinfo

    def fake(host: str, port: int, *arguments: Any, **options: Any) -> list[Any]:
        found = [real(ip, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST) for ip in names.get(host, [host])]
        return [info for infos in found for info in infos]

    monkeypatch.setattr(socket, "getaddrinfo", fake)


def test_it_comes_straight_from_where_the_name_leads(url: str) -> None:
    assert download(f"{url}/q", 9, public=True) == b"questions"
    with pytest.raises(UserError, match="larger than 8"):
        download(f"{url}/q", 8, public=True)


def test_the_certificate_must_be_that_of_the_name(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "public_addresses", lambda host, port: ["127.0.0.1"])
    with pytest.raises(UserError, match="certificate"):
        download(url.replace("files", "other"), 9, public=True)


def test_redirects_are_checked_like_first_addresses(url: str) -> None:
    with pytest.raises(UserError, match="inside.example is 127.0.0.1, which is not on the public internet"):
        download(f"{url}/away", 9, public=True)


def test_trickled_headers_do_not_outlast_the_deadline(url: str) -> None:
    with pytest.raises(UserError, match="too long|timed out"):
        download(f"{url}/trickle", 9, seconds=1.0, public=True)


@pytest.mark.parametrize(
    "ip",
    [
        *("127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("::1", "fe80::1", "fd00::1", "::ffff:127.0.0.1", "::ffff:192.168.0.1", "224.0.0.1"),
    ],
)
def test_private_addresses_are_refused(ip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, {"one.example": [ip], "two.example": ["93.184.215.14", ip]})
    for host in ("one.example", "two.example", ip):
        with pytest.raises(OSError, match="not on the public internet"):
            public_addresses(host, 443)


@pytest.mark.parametrize("host", ["one.example", "two.example", "127.0.0.1", "[::1]"])
def test_private_hosts_are_not_connected_to(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*arguments: Any) -> None:
        raise AssertionError("connected")

    monkeypatch.setattr(socket, "create_connection", connect)
    resolve(monkeypatch, {"one.example": ["10.1.2.3"], "two.example": ["93.184.215.14", "10.1.2.3"]})
    with pytest.raises(UserError, match="not on the public internet"):
        download(f"https://{host}/latest/meta-data", 9, public=True)


def test_public_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, {"both.example": ["93.184.215.14", "2606:2800:220:1::1"]})
    assert public_addresses("both.example", 443) == ["93.184.215.14", "2606:2800:220:1::1"]


def test_downloads_are_bounded_and_stay_encrypted(web: dict[str, Any]) -> None:
    web["/big"] = b"x" * 1001
    web["/away"] = "http://example.org/"
    assert len(download(f"{web['url']}/big", 1001)) == 1001
    for path, limit, message in (
        ("/big", 1000, "larger than 1000"),
        ("/away", 9, "use https"),
        ("/no", 9, "Not Found"),
    ):
        with pytest.raises(UserError, match=message):
            download(web["url"] + path, limit)
    with pytest.raises(UserError, match="use https"):
        download(f"{web['url']}/big", 1001, public=True)
