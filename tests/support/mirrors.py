"""Runs with checkpoints, and their copies at a URL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarm_node.storage import checkpoints as checkpoints
from swarm_node.storage.checkpoints import CheckpointStore
from swarm_node.storage.mirror import Mirror

SWARM = "5" * 64
Says = list[str]
HANGS_S = 100.0
"""Seconds; a limit for what hangs, not for what is slow."""


def checkpoint(folder: Path, round: int, model: str = "m") -> None:
    store = CheckpointStore(folder, 2, print)
    store.save(round, {"policy": {"w": torch.full((3,), float(round))}}, {"model": model})
    store.close()


def mirror(url: str, run: Path, said: Says, name: str = "a", peer: str = "12D3KooWaaaaaaaa") -> Mirror:
    return Mirror(url, SWARM, name, peer, run, said.append)


def copied(url: str, run: Path, name: str = "a", peer: str = "12D3KooWaaaaaaaa") -> Says:
    """All that `run` has, copied to the end."""
    said: Says = []
    one = mirror(url, run, said, name, peer)
    one.start()
    one.finish(HANGS_S)
    return said


def whole(one: Mirror, owner: str) -> list[str]:
    """Rounds of which `owner` has whole copies."""
    one.bucket.fs.invalidate_cache()
    files = [file.split("/")[-4:] for file in one.bucket.fs.find(one.bucket.place)]
    return sorted(
        name for of, folder, name, file in files if (of, folder, file) == (owner, "checkpoints", "SHA256SUMS")
    )


def sent(one: Mirror, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files that `one` sends from now on."""
    files, put = list[str](), one.bucket.fs.put_file

    def put_file(source: str, target: str) -> None:
        files.append("/".join(target.rsplit("/", 2)[1:]))
        put(source, target)

    monkeypatch.setattr(one.bucket.fs, "put_file", put_file)
    return files


def tear(round: Path) -> None:
    with (round / "policy.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
