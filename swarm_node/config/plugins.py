"""Plugins: functions of the user, named in the configuration as `file.py:function` or `package.module:function`.

They run in this process with all its rights. A name that comes from a peer or a manifest is never loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import StackSummary, TracebackException
from types import ModuleType, TracebackType
from typing import Any

from swarm_node.errors import PluginError, StopRequested, UserError

_FILES = itertools.count()
_loaded: set[str] = set()  # files of the modules that `load_function` has loaded
_folders: set[str] = set()  # directories whose modules plugins may import
INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
OURS = (f"{Path(__file__).parents[1]}{os.sep}", "<frozen importlib", importlib.__file__)
"""Beginnings of the files whose frames are left out of a traceback."""
MAX_TRACE_LINES = 60  # a recursion without end has thousands
PROGRAM = 'put the part that is a program under `if __name__ == "__main__":`'


def load_function(path: str, what: str) -> Callable[..., Any]:
    """The function at `path`, which may import modules beside its file, or in the current directory.

    Raises UserError if there is none; its message begins with `what`, a key."""
    where, _, attribute = path.rpartition(":")
    if not where or not attribute:
        raise UserError(f"{what} {path!r}: write file.py:function or package.module:function")
    if where.endswith(".py") and (file := Path(where).expanduser()).exists() and not file.is_file():
        raise UserError(f"{what} {path!r}: {file} is no file, but a directory, a pipe or a device")
    try:
        module = _imported(where)
    except BaseException as error:  # importing runs the user's code, which may raise anything
        if is_stop(error):
            raise
        if not isinstance(error, Exception):
            ended = plugin_error(f"{what} {path!r} ended the program when it was imported", error)
            raise PluginError(f"{ended}; {PROGRAM}", ended.trace) from error
        failed = plugin_error(f"{what} {path!r}: cannot import {where}", error)
        raise (failed if failed.trace else UserError(str(failed))) from error  # without a trace, no code of theirs ran
    _loaded.add(getattr(module, "__file__", None) or "")
    function = getattr(module, attribute, None)
    if not callable(function):
        if only_in_a_program(path):
            raise not_here(path, what)
        raise UserError(f"{what} {path!r}: {where} has no function {attribute!r}")
    return function


def name_in_program(function: Callable[..., Any]) -> str:
    """`module:qualified name` of a function that a program has. `()` at its end: it belongs to an object, so that no
    import finds it."""
    if not hasattr(function, "__qualname__"):
        return f"{type(function).__module__}:{getattr(function, '__name__', type(function).__name__)}()"
    return f"{function.__module__}:{function.__qualname__}{'()' if inspect.ismethod(function) else ''}"


def only_in_a_program(path: str) -> bool:
    """Whether `name_in_program` gave this path to a function that no other process can import."""
    where, _, attribute = path.rpartition(":")
    dotted = "." in attribute and not where.endswith(".py")  # a user may have written a file's name, a program has none
    return where == "__main__" or attribute.endswith("()") or "<" in attribute or dotted


def not_here(path: str, what: str) -> UserError:
    """The error about a function that only a program has, which runs elsewhere or has ended."""
    return UserError(
        f"{what} {path!r} is one that a program gave to swarm_node.train: give it again there, or write it into a file "
        "and put FILE.py:FUNCTION in its place, by --reward or --set"
    )


def place_of(function: Callable[..., Any]) -> str:
    """` in FILE, line N,`: where the definition of `function` begins; empty for a callable without code of its own."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f" in {_short(code.co_filename)}, line {code.co_firstlineno},"


def is_stop(error: BaseException) -> bool:
    """Whether the user wants to stop: all else that comes out of a plugin is its own."""
    return isinstance(error, StopRequested | KeyboardInterrupt)


def plugin_error(what: str, error: BaseException) -> PluginError:
    """The error to raise for a plugin that raised `error`; the message begins with `what`, as `grpo.loss failed`."""
    told = TracebackException.from_exception(error)
    place = _place(told)
    _keep_foreign_frames(told)
    trace = [line for part in told.format() for line in part.rstrip().split("\n")]
    if len(trace) > MAX_TRACE_LINES:
        half = MAX_TRACE_LINES // 2
        trace = [*trace[:half], "  ...", *trace[-half:]]
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return PluginError(f"{what}{place}: {reason}", trace if place else [])


def blamed(error: BaseException) -> PluginError | None:
    """The error to raise for an `error` that came out of a plugin's own code; None if it did not."""
    frames = TracebackException.from_exception(error, lookup_lines=False).stack
    if is_stop(error) or not any(frame.filename in _loaded and not _is_ours(frame.filename) for frame in frames):
        return None
    return plugin_error("your code failed" if isinstance(error, Exception) else "your code ended the program", error)


def users_own(error: Exception) -> Exception | None:
    """The error of the user's own code behind `error`, for the program that called this package; None if there is none.
    Its traceback is without frames of this package, and a note says what failed."""
    told, own = (error, error.__cause__) if isinstance(error, PluginError) else (blamed(error), error)
    if told is None or not isinstance(own, Exception):
        return None
    own.add_note(f"swarm_node: {told}")
    links: list[BaseException | None] = [own]
    for link in links:  # it grows by the errors behind each
        if link is not None:
            link.__traceback__ = _foreign_frames(link.__traceback__)
            links += [each for each in (link.__cause__, link.__context__) if not any(each is link for link in links)]
    return own


def _foreign_frames(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of this package."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    for frame in reversed(frames):
        if not _is_ours(frame.tb_frame.f_code.co_filename):
            trace = TracebackType(trace, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return trace


def _place(told: TracebackException) -> str:
    """` in FILE, line N`: the innermost line of the user's, or of a library that the user called; empty if unknown."""
    if told.exc_type is SyntaxError and told.filename and told.lineno:
        return f" in {_short(told.filename)}, line {told.lineno}"
    frames = [frame for frame in told.stack if not _is_ours(frame.filename)]
    own = [frame for frame in frames if not frame.filename.startswith(INSTALLED)] or frames
    return f" in {_short(own[-1].filename)}, line {own[-1].lineno}" if own else ""


def _keep_foreign_frames(told: TracebackException) -> None:
    """Remove the frames of this package, also from the errors behind this one."""
    told.stack = StackSummary.from_list([frame for frame in told.stack if not _is_ours(frame.filename)])
    for cause in (told.__cause__, told.__context__):
        if cause is not None:
            _keep_foreign_frames(cause)


def _is_ours(file: str) -> bool:
    return file.startswith(OURS)


def _short(file: str) -> str:
    beside = os.path.relpath(file)
    return file if beside.startswith("..") else beside


def _imported(where: str) -> ModuleType:
    """The module in a file or of a dotted name. Modules beside that file, or in the current directory, are found."""
    if not where.endswith(".py"):
        with _on_the_path(os.getcwd()):
            return importlib.import_module(where)
    path = Path(where).expanduser()
    with _on_the_path(str(path.resolve().parent)), _named_as_program(path):
        return _run_file(path)


@contextmanager
def _on_the_path(folder: str) -> Iterator[None]:
    """Within it, imports look into `folder` first, as Python does for a program there; afterwards they do so last, for
    functions that import when they are called. Modules of the same names beside other plugins are forgotten."""
    others = _folders - {folder}
    same = {name for name in sys.modules if "." not in name and _folder_of(name) in others and _is_in(folder, name)}
    for name in [name for name in sys.modules if name.partition(".")[0] in same]:
        del sys.modules[name]
    _folders.add(folder)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)


def _folder_of(name: str) -> str:
    """The directory with this imported module or package; empty if it is of no file."""
    file = getattr(sys.modules[name], "__file__", None) or ""
    return os.path.dirname(os.path.dirname(file) if os.path.basename(file) == "__init__.py" else file)


def _is_in(folder: str, name: str) -> bool:
    """Whether a module of that name is in `folder`."""
    return os.path.exists(os.path.join(folder, f"{name}.py")) or os.path.isdir(os.path.join(folder, name))


@contextmanager
def _named_as_program(path: Path) -> Iterator[None]:
    """Within it, a file that reads the arguments of the program is named in what it then prints."""
    before, sys.argv = sys.argv, [str(path), *sys.argv[1:]]
    try:
        yield
    finally:
        sys.argv = before


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
