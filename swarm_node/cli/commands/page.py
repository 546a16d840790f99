"""`swarm-node dashboard`: runs and swarms on one page; and the page of a swarm beside its bootstrap.

RUN… ----------------------------------> \\
                                           page (reads files only)
LINK | SWARM -> a thread that looks -> file /
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import typer

from swarm_node.cli.options import is_swarm, note
from swarm_node.config import NetworkConfig, NodeConfig
from swarm_node.errors import UserError
from swarm_node.observability.dashboard.serve import serve
from swarm_node.runtime.children import end_children, start_child
from swarm_node.say import Say

ANY_USUAL = "auto"  # in place of a port: the first free one from 31380
END_S = 5.0  # how long the page's process may take to end


def show_pages(
    shown: Sequence[str], network: NetworkConfig, host: str, port: int | None, public: bool, say: Say = typer.echo
) -> None:
    """Serve the page until a signal. Raises UserError."""
    swarms = [each for each in shown if is_swarm(each)]
    paths = [Path(each) for each in shown if each not in swarms]
    if public and paths and swarms:
        raise UserError("--public shows swarms only: leave the runs out")
    with ExitStack() as stack:
        if swarms:
            from swarm_node.swarm.looking import looked_at

            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-page-")))
            pages = [
                stack.enter_context(looked_at(named, network, folder / str(number), note))
                for number, named in enumerate(swarms)
            ]
            paths = [*pages, *paths]
        serve(paths, host, port, say, public)


def listens_at(listen: str) -> tuple[str, int | None]:
    """(IP address or empty, port; None = the first free one of the usual ones) of `PORT` or `IP:PORT`, where PORT may
    be `auto`. Raises UserError."""
    host, _, port = listen.rpartition(":")
    if port != ANY_USUAL and (not port.isdigit() or int(port) > 65535):
        raise UserError(f"--dashboard {listen} is neither a port (31380, or auto) nor IP:PORT (0.0.0.0:31380)")
    return host.strip("[]"), None if port == ANY_USUAL else int(port)


@contextmanager
def page_process(folder: Path, listen: str, config: NodeConfig | None = None) -> Iterator[None]:
    """Within the context, a process shows the pages in `folder`: strangers who read them share nothing with this one.
    Its lines go to standard error, in the format of the log that `config` names. Raises UserError."""
    host, port = listens_at(listen)
    where = ["--host", host, "--public"] if host else []
    where += [] if port is None else ["--port", str(port)]
    if config is not None:
        where += ["--set", f"log_format={config.log_format}", "--set", f"name={json.dumps(config.name or 'bootstrap')}"]
    process = start_child(["dashboard", str(folder), *where], log=None)
    try:
        yield
    finally:
        end_children([process], END_S)
