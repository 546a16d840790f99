"""The key that makes a node's peer id: `swarm-node identity show | new | export | import`.

Each function returns the lines to print and raises UserError. No key is ever replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarm_node.config import NodeConfig
from swarm_node.config.own import read_own
from swarm_node.errors import UserError
from swarm_node.storage.rundir import RunDir, os_errors_explained
from swarm_node.swarm.network import identity_file, load_key
from swarm_protocol.errors import LocalProtocolError
from swarm_protocol.identity import Identity

HOW_TO_GET_ONE = "joining a swarm creates one, and so does `swarm-node identity new`"


def shown(config: NodeConfig) -> str:
    """The peer id of a run, and its key file."""
    run = RunDir(config.directory)
    file = _key_file(config, run)
    return f"{_load(file, f'no identity in {run.path}: {HOW_TO_GET_ONE}').peer_id}\n{file}"


def create(config: NodeConfig) -> str:
    """Create a key in the run directory."""
    run = _own_place(config)
    with _saved(run.identity):
        run.path.mkdir(parents=True, exist_ok=True)
        identity = Identity.generate()
        identity.save(run.identity)
    return f"{identity.peer_id}\n{run.identity}"


def export_key(config: NodeConfig, file: Path) -> str:
    """Copy the key of a run to `file`, which must not exist."""
    run = RunDir(config.directory)
    identity = _load(_key_file(config, run), f"no identity in {run.path}: {HOW_TO_GET_ONE}")
    with _saved(file):
        identity.save(file)
    return f"{identity.peer_id}\n{file} has the key: never run it on two machines at once"


def import_key(config: NodeConfig, file: Path) -> str:
    """Copy the key in `file` to a run directory that has none."""
    run = _own_place(config)
    if not file.exists():
        raise UserError(f"no key file at {file}; `swarm-node identity export {file}` writes one")
    identity = load_key(file, "the file to import")
    with _saved(run.identity):
        run.path.mkdir(parents=True, exist_ok=True)
        identity.save(run.identity)
    return f"{identity.peer_id}\n{run.identity}"


def _own_place(config: NodeConfig) -> RunDir:
    """The run directory, if a node in it uses the key there."""
    run = RunDir(config.directory)
    if (named := _named(config, run)) is not None:
        where = "" if config.network.identity else f" (in {run.config})"
        raise UserError(
            f"network.identity names a key elsewhere, {named}{where}, so the node would not use one in its run "
            "directory: leave out --identity, SWARM_NODE_IDENTITY and network.identity"
        )
    return run


def _named(config: NodeConfig, run: RunDir) -> str | None:
    """The key file that is named to this command or, if none is, in the settings of the run."""
    if config.network.identity is None and run.exists:
        return read_own(run.config).network.identity
    return config.network.identity


def _key_file(config: NodeConfig, run: RunDir) -> Path:
    """The file of the key with which the node runs. Raises UserError."""
    return identity_file(config.network.model_copy(update={"identity": _named(config, run)}), run)


def _load(file: Path, if_missing: str) -> Identity:
    try:
        return Identity.load(file)
    except FileNotFoundError as error:
        raise UserError(if_missing) from error
    except LocalProtocolError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error


@contextmanager
def _saved(file: Path) -> Iterator[None]:
    with os_errors_explained(file):
        try:
            yield
        except FileExistsError as error:
            raise UserError(f"{file} exists already and may be the key of a peer, so move it away first") from error
