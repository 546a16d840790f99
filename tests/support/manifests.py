"""Manifests for tests: one of an environment, one of a question file."""

from __future__ import annotations

from pathlib import Path

from swarm_node.swarm.manifests import make_manifest
from swarm_protocol.manifest import Manifest, ManifestTask
from tests.support.fake_transport import address

QUESTIONS = (
    b'{"question": "1+1?", "answer": "2"}\n{"question": "1+2?", "answer": "3"}\n{"question": "a?", "answer": "b"}\n'
)


PLAIN = Manifest(name="sums", tasks=[ManifestTask(env="gcd")], bootstrap=[address(1)])


def with_questions() -> Manifest:
    Path("q.jsonl").write_bytes(QUESTIONS)
    manifest = make_manifest("sums", ["q.jsonl"], bootstrap=[address(1)])
    Path("q.jsonl").unlink()
    return manifest
