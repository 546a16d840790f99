"""Plugins: functions of the user, named in the configuration as `file.py:function` or `package.module:function`.

They run in this process with all its rights. A name that comes from a peer or a manifest is never loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from swarm_node.errors import UserError

_FILES = itertools.count()


def load_function(path: str, what: str) -> Callable[..., Any]:
    """The function at `path`. Raises UserError if there is none; its message begins with `what`, a key."""
    where, _, attribute = path.rpartition(":")
    if not where or not attribute:
        raise UserError(f"{what} {path!r}: write file.py:function or package.module:function")
    try:
        module = _run_file(Path(where).expanduser()) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise UserError(f"{what} {path!r}: cannot import {where}: {error_text(error)}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"{what} {path!r}: {where} has no function {attribute!r}")
    return function


def error_text(error: Exception) -> str:
    """One line about an error of a plugin."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _run_file(path: Path) -> ModuleType:
    name = f"_plugin_{next(_FILES)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and others look up the module that a class says it is from
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
