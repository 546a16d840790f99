"""The metadata service of a cloud, on this machine: what AWS, GCP and Azure document of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, bytes]
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


class MetadataService(ThreadingHTTPServer):
    """A metadata service that answers as documented: with the headers that it asks for, or not at all."""

    daemon_threads = True

    def __init__(self, cloud: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cloud = cloud
        self.answers: dict[str, Answer] = {}
        self.asked: list[str] = []
        self.tokens = 0

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def answer(self, method: str, path: str, headers: Any) -> Answer:
        self.asked.append(f"{method} {path}")
        if self.cloud == "aws":
            if method == "PUT" and path == "/latest/api/token":
                good = 1 <= int(headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600
                self.tokens += good
                return (200, b"token-%d" % self.tokens) if good else (400, b"")
            if headers["X-aws-ec2-metadata-token"] != f"token-{self.tokens}":
                return 401, b""
        if self.cloud == "gcp" and headers["Metadata-Flavor"] != "Google":
            return 403, b""
        if self.cloud == "azure" and headers["Metadata"] != "true":
            return 400, b""
        return self.answers.get(path, (404, b"not found"))


class Handler(BaseHTTPRequestHandler):
    server: MetadataService

    def do_GET(self) -> None:
        status, body = self.server.answer(self.command, self.path, self.headers)
        self.send_response(status)
        if status == 302:
            self.send_header("Location", body.decode())
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_GET

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def metadata_service(cloud: str) -> Iterator[MetadataService]:
    with MetadataService(cloud) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
