"""How this package was installed, which of its extras are there, and the commands that repair or upgrade it."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Sequence, Set
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from swarm_node import __version__
from swarm_node.errors import UserError
from swarm_protocol.messages import PROTOCOL_VERSION

PACKAGE = "swarm-node"
REPOSITORY = "https://github.com/swarm-node/swarm-node"
WHEELS = f"{REPOSITORY}/releases/expanded_assets/v{__version__}"
"""Page with the wheels of this release: of two packages that the extras need, the index has sources alone."""
FIND_WHEELS = f"--find-links {WHEELS}"
SUPPORTED_PYTHONS = ("3.11", "3.12", "3.13")
TESTED_PYTHON = "3.11"  # the one that all tests run with
COMPILED = {"swarm", "puzzles"}  # extras that need one of these
SWARM = ("base58", "cryptography", "hivemind", "libp2p", "multiaddr", "prometheus_client", "segno", "trio")
EXTRA_OF = {**dict.fromkeys(SWARM, "swarm"), "reasoning_gym": "puzzles"}
"""Package, as it is imported -> the extra that installs it."""
RUN = "import json, runpy, sys; sys.path += json.loads(sys.argv[2]); runpy.run_path(sys.argv[1], run_name='__main__')"
"""An isolated Python ignores the user's own site and PYTHONPATH, where packages may be: it is told where they are."""


def install_command(python: str = TESTED_PYTHON) -> str:
    """The command that installs swarm-node anew, with the extras that are there, for this version of Python."""
    if _by() == "pipx":
        return f"pipx reinstall swarm-node --python {python}"
    return f"uv tool install --reinstall --python {python} {_with({*_extras()})}"


def reinstall_command(package: str = "") -> str:
    """The command that installs what is missing here, or `package` anew, which is damaged; all else stays as it is. uv
    and pipx make an installation anew."""
    if _by():
        return install_command(_python())
    return pip(f"--force-reinstall {package}" if package else _with({*_extras()}))


def upgrade_command() -> str:
    """The command for the newest release or, for an installation from a clone, for its newest commit."""
    here = pip(f"--upgrade {_with({*_extras()})}")
    if (clone := Path(_made_of()[0]) / ".git").is_absolute() and clone.exists():
        return f"git -C {shlex.quote(str(clone.parent))} pull && {install_command(_python()) if _by() else here}"
    return {"uv": "uv tool upgrade swarm-node", "pipx": "pipx upgrade swarm-node"}.get(_by(), here)


def pip(arguments: str) -> str:
    """A `pip install` into this installation."""
    return f"{shlex.quote(sys.executable)} -m pip install {arguments}"


def extra_command(extra: str) -> str:
    """The command that adds the packages of that extra to this installation, from the source that it came from. uv and
    pipx make an installation anew, so the command names the extras that are there as well."""
    if not _by():
        return pip(_with({extra}))
    extras = {extra, *_extras()}
    if _by() == "uv":
        return f"uv tool install --reinstall --python {_python()} {_with(extras)}"
    wheels = f"{shlex.quote(f'--pip-args={FIND_WHEELS}')} " if extras & COMPILED else ""
    return f"pipx install --force {wheels}{_source(extras)}"


def has_extra(extra: str) -> bool:
    """Whether all packages of that extra are installed."""
    return not any(_is_missing(package) for package, of in EXTRA_OF.items() if of == extra)


def check_extra(extra: str, what: str) -> None:
    """Raise UserError, with the command that installs it, if `what` needs an extra that is not installed."""
    if not has_extra(extra):
        raise _lacking(what, extra)


def check_package(package: str, extra: str, what: str) -> None:
    """As `check_extra`, of one package of it."""
    if _is_missing(package):
        raise _lacking(what, extra)


def _lacking(what: str, extra: str) -> UserError:
    return UserError(f"{what} needs the extra {extra!r}, which is not installed: {extra_command(extra)}")


def missing(error: ModuleNotFoundError) -> UserError | None:
    """The error to show where an import failed for lack of an extra; None if no extra has that package."""
    package = (error.name or "").partition(".")[0]
    extra = EXTRA_OF.get(package)
    if extra is None or not _is_missing(package):
        return None
    return UserError(f"this needs {package}, of the extra {extra!r}, which is not installed: {extra_command(extra)}")


def _is_missing(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is None
    except ModuleNotFoundError:
        return True


def torch_command(version: str) -> str:
    """The command that replaces a torch for CPUs only by one that can use a GPU."""
    return f"{shlex.quote(sys.executable)} -m pip uninstall -y torch && {pip(f'torch=={version}')}"


def outdated(who: str) -> str:
    """A sentence that says that `who` speaks a newer protocol, and how to upgrade."""
    return (
        f"{who} speaks a newer protocol than this node, which speaks {PROTOCOL_VERSION}, and is not heard here; "
        f"to upgrade: {upgrade_command()}"
    )


def isolated(program: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """The command that runs the file `program` in a Python of its own, which finds the packages that this one finds.
    The file sees `arguments` after two others; `options` are Python's."""
    return [sys.executable, "-I", *options, "-c", RUN, program, json.dumps(sys.path), *arguments]


def _extras() -> list[str]:
    """The extras of which all packages are installed."""
    packages = defaultdict[str, list[str]](list)
    for requirement in distribution(PACKAGE).requires or []:
        if found := re.match(r"([\w.-]+).*\bextra == ['\"](\w+)['\"]", requirement):
            packages[found[2]].append(found[1])
    return [extra for extra, names in packages.items() if all(map(_is_installed, names))]


def _is_installed(package: str) -> bool:
    """Whether the package that the index calls so is there."""
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def _python() -> str:
    """The version of this Python, if it is one that the package supports."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    return here if here in SUPPORTED_PYTHONS else TESTED_PYTHON


def _by() -> str:
    parts = Path(sys.prefix).parts
    return "uv" if {"uv", "tools"} <= set(parts) else "pipx" if "pipx" in parts else ""


def _with(extras: Set[str]) -> str:
    """The source of this installation with those extras, and the place of the wheels that they need."""
    return f"{FIND_WHEELS} {_source(extras)}" if extras & COMPILED else _source(extras)


def _source(extras: Set[str] = frozenset()) -> str:
    """The source of this installation, as `pip` takes it."""
    source, editable = _made_of()
    if extras:
        names = f"[{','.join(sorted(extras))}]"
        source = f"{PACKAGE}{names} @ {source}" if "://" in source else f"{source}{names}"
    return f"{'-e ' if editable else ''}{shlex.quote(source)}"


def _made_of() -> tuple[str, bool]:
    """(directory, file, repository or package name that this was installed from, whether it is editable)"""
    try:
        told = json.loads(distribution(PACKAGE).read_text("direct_url.json") or "{}")
        url, editable = str(told.get("url", "")), bool(told.get("dir_info", {}).get("editable"))
        repository = told.get("vcs_info", {}).get("vcs", "")
    except (PackageNotFoundError, OSError, ValueError, AttributeError):  # of the index, as far as is known
        return PACKAGE, False
    path = unquote(urlsplit(url).path) if url.startswith("file:") else ""
    return path or (f"{repository}+{url}" if repository else url) or PACKAGE, editable
