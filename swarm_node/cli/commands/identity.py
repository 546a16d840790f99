"""The key that identifies a node: `swarm-node identity`."""

from __future__ import annotations

from protocol.errors import LocalProtocolError
from protocol.identity import Identity
from swarm_node.errors import UserError
from swarm_node.storage.rundir import RunDir, os_errors_explained


def show_identity(run: RunDir) -> str:
    """Peer id and path of the key file. Raises UserError."""
    try:
        return f"{Identity.load(run.identity).peer_id}\n{run.identity}"
    except FileNotFoundError as error:
        raise UserError(
            f"no identity in {run.path}: joining a swarm creates one, and so does `swarm-node identity new`"
        ) from error
    except LocalProtocolError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"cannot read {run.identity}: {error.strerror}") from error


def new_identity(run: RunDir) -> str:
    """Create a key file and show it. Raises UserError, also if there is one already."""
    with os_errors_explained(run.identity):
        run.path.mkdir(parents=True, exist_ok=True)
        try:
            Identity.generate().save(run.identity)
        except FileExistsError as error:
            raise UserError(
                f"{run.identity} exists already; it is the key of this peer, so move it away first"
            ) from error
    return show_identity(run)
