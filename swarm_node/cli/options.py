"""Options of the command line, as typer's parameters.

A function of a command has one parameter for each of its own options, made with `option`. Its parameter
`settings: CommandSettings` stands for all that sets the configuration: --config, --set, and those rows of
`config/options.py` that name the command. `with_settings` puts them in its place.
"""

from __future__ import annotations

import errno
import functools
import inspect
import logging
import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from inspect import Parameter
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperCommand

from swarm_node.config import NodeConfig, TaskConfig, load_config
from swarm_node.config.keys import VARIABLE_PREFIX, Table, all_keys, alternatives
from swarm_node.config.loading import Layers, load_run_config, read_layers
from swarm_node.config.measuring import is_measured, of_a_measurement
from swarm_node.config.options import OPTIONS, KeyOption, explanation
from swarm_node.config.own import read_own
from swarm_node.config.plugins import blamed
from swarm_node.config.training import RewardFunctionConfig
from swarm_node.config.trl_names import trl_hint
from swarm_node.errors import SwarmNodeError, UserError
from swarm_node.install import missing
from swarm_node.observability.lines import LEVELS, Show, shown_as_lines
from swarm_node.say import is_shown, level_of
from swarm_node.storage.rundir import FULL, explained
from swarm_protocol.errors import printable, visible

CLICK: Any = import_module(typer.BadParameter.__module__)  # errors of click, or of the copy of it that typer has
CONFIGURATION = "Configuration"
COMMAND_VARIABLES: set[str] = set()
"""Environment variables of options that set no key of the configuration: `option` adds them."""


def option(flag: str, help: str, variable: str = "", short: str = "", **settings: Any) -> Any:
    """An option that sets no key. Its environment variable is named after it, unless `variable` names another."""
    name = VARIABLE_PREFIX + (variable or flag.removeprefix("--").replace("-", "_").upper())
    COMMAND_VARIABLES.add(name)
    return typer.Option(*filter(None, (flag, short)), envvar=name, show_envvar=False, help=help, **settings)


Json = Annotated[
    bool,
    option(
        "--json",
        'Print one JSON document, {"error": "…"} on failure. All other text goes to standard error.',
        metavar="",
    ),
]
DryRun = Annotated[
    bool, option("--dry-run", "Print the resolved configuration and exit.", metavar="", rich_help_panel=CONFIGURATION)
]
ConfigFile = Annotated[
    Path | None, option("--config", "Configuration file (TOML).", metavar="FILE", rich_help_panel=CONFIGURATION)
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set any key of the configuration, for example grpo.loss=gspo. Repeatable. SWARM_NODE_SET takes several, "
        "separated by spaces and quoted as in a shell.",
        rich_help_panel=CONFIGURATION,
    ),
]


Verbose = Annotated[bool, option("--verbose", "Also show technical details.", short="-v", metavar="")]
Quiet = Annotated[bool, option("--quiet", "Show results, warnings and errors only.", short="-q", metavar="")]


def note(sentence: str, err: bool = True) -> None:
    """Show a sentence about what a command does, unless --quiet or its level says otherwise. `err`: on standard error,
    not on standard output."""
    if is_shown(level_of(sentence)):
        typer.echo(visible(sentence), err=err)


def log_of(config: NodeConfig, err: bool) -> Show | None:
    """The log of a command before there is a run, on standard error or else on standard output. None on a terminal."""
    return shown_as_lines(
        config.log_format, config.name or config.directory.resolve().name, sys.stderr if err else sys.stdout
    )


def note_for(config: NodeConfig, kind: str, err: bool = True) -> Callable[[str], None]:
    """A `note` in the log: a sentence of that `kind`, with its time and level or as a JSON line. On a terminal it is
    a plain one on standard error. `err` as for `log_of`."""
    show = log_of(config, err)
    if show is None:
        return note

    def as_line(sentence: str) -> None:
        if is_shown(level_of(sentence)):
            show(sentence, kind, LEVELS[level_of(sentence)])

    return as_line


@contextmanager
def refusals_in(config: NodeConfig, err: bool) -> Iterator[None]:
    """Write an error that the log of the run does not have into a log of JSON lines; `err` as for `log_of`. Raises it
    as `to_show` gives it."""
    try:
        yield
    except Exception as error:
        told = to_show(error)
        if told is None:
            raise
        if not told.logged and config.log_format == "json" and (show := log_of(config, err)) is not None:
            show(printable(str(told)), "error", "error")
            told.logged = True
        if told is error:
            raise
        raise told from error


def to_show(error: BaseException) -> SwarmNodeError | None:
    """The error to show where `error` ends a command, wherever the command came upon it; None for a fault of this
    package, which needs its traceback."""
    if isinstance(error, SwarmNodeError):
        return error
    if isinstance(error, PermissionError) and error.filename is not None:  # of a file that another user owns
        return UserError(f"no permission for {error.filename}: change its owner or mode, or choose another directory")
    if isinstance(error, OSError) and error.errno in FULL:
        return explained(error, Path("a file"))
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UserError(f"the name {str(error.filename)[:80]}… is too long for a file: give another")
    if type(error) is RuntimeError and "home directory" in str(error):  # of `Path.expanduser`
        return UserError("a path in the settings or the files begins with ~ and a user whom this machine does not have")
    if isinstance(error, ModuleNotFoundError) and (lacking := missing(error)) is not None:
        return lacking
    return blamed(error)


def early_log(command: str, values: Mapping[str, Any]) -> Show | None:
    """The log of JSON lines of a command that may have no settings yet, only the `values` of its options. None if it
    has no such log, or if people read standard error."""
    asked = values.get("log_format") or os.environ.get("SWARM_NODE_LOG_FORMAT")
    if asked != "json" or "log_format" not in values or sys.stderr is None or sys.stderr.isatty():
        return None
    usual = {"join": "node"}.get(command, command)
    place = values.get("run") or values.get("run_dir") or os.environ.get("SWARM_NODE_RUN_DIR")
    if place and command != "bootstrap":
        usual = Path(place).resolve().name
    name = values.get("name") or os.environ.get("SWARM_NODE_NAME") or usual
    err = command == "bootstrap" or values.get("json_output") or values.get("dry_run")
    return shown_as_lines("json", printable(str(name)), sys.stderr if err else sys.stdout)


def starting(say: Callable[[str], None] = note) -> None:
    """Say at once that a command has begun, before it imports what takes seconds."""
    say("starting (loading torch) …")


@dataclass(frozen=True)
class CommandSettings:
    """The part of a command line that sets the configuration."""

    file: Path | None
    flags: dict[str, object]  # name of a key's option -> value; None = not given
    sets: list[str]
    file_is_typed: bool  # whether --config was on the command line, not in its environment variable

    @property
    def any_typed(self) -> bool:
        """Whether the command line names any setting."""
        return self.file_is_typed or bool(self.sets) or any(value is not None for value in self.flags.values())

    def load(self, **flags: object) -> NodeConfig:
        """The configuration, with more values from the command. Raises UserError."""
        return load_config(self.file, os.environ, self.flags | flags, self.sets, COMMAND_VARIABLES)

    def of_a_measurement(self, is_run: bool) -> Table:
        """The settings of a measurement, of a run or of a model; see `measuring`. Raises UserError."""
        layers = read_layers(self.file, os.environ, self.flags, self.sets, COMMAND_VARIABLES)
        return of_a_measurement(layers, is_run, note)

    def load_run(self, member: bool, usual_name: str = "", err: bool = True) -> NodeConfig:
        """The configuration for a start in a directory that may have a run. `usual_name` names the node, and so its
        directory, where nothing else names either. `err`: the log goes to standard error. Raises UserError."""
        layers = read_layers(self.file, os.environ, self.flags, self.sets, COMMAND_VARIABLES)
        if usual_name and not any({"name", "run_dir"} & table.keys() for _, table in layers):
            layers = [("the usual name", {"name": usual_name}), *layers]
        return _with_notes(layers, member, err, usual_name)

    def load_again(self, run: Path, err: bool = True) -> NodeConfig:
        """The configuration to go on with the run in the directory `run`: its own settings, and those given here. Its
        `swarm` says whether it is a member's. `err`: the log goes to standard error. Raises UserError."""
        own = read_own(run / "config.toml")
        layers = read_layers(self.file, os.environ, self.flags | {"run_dir": str(run)}, self.sets, COMMAND_VARIABLES)
        return _with_notes(layers, own.swarm is not None, err)


def _with_notes(layers: Layers, member: bool, err: bool, usual_name: str = "") -> NodeConfig:
    """`load_run_config`, whose notes are shown in the format of the log that it gives, in plain text if it fails. The
    node has the `usual_name` unless another was chosen."""
    notes: list[str] = []
    show: Callable[[str], None] = note
    try:
        config = load_run_config(layers, member, notes.append)
        if usual_name and config.name is None:
            config = config.model_copy(update={"name": usual_name})
        show = note_for(config, "settings", err)
        return config
    finally:
        for sentence in notes:
            show(sentence)


def with_settings(function: Callable[..., None], command: str) -> Callable[..., None]:
    """`function` as typer calls it: with parameters for the options of `command` in place of its `settings`."""
    declared = inspect.signature(function, eval_str=True).parameters.values()
    if not any(parameter.annotation is CommandSettings for parameter in declared):
        return function
    rows = [row for row in OPTIONS if command in row.commands.split()]

    def parameters() -> Iterator[Parameter]:
        yield Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)
        for parameter in declared:
            if parameter.annotation is CommandSettings:
                yield from (_parameter(row, command) for row in rows)
                yield Parameter("config", Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFile)
                yield Parameter("sets", Parameter.KEYWORD_ONLY, default=None, annotation=Sets)
            else:
                yield parameter.replace(kind=Parameter.KEYWORD_ONLY)

    @functools.wraps(function)
    def run(context: typer.Context, **values: Any) -> None:
        source = context.get_parameter_source("config")
        is_typed = source is not None and source.name == "COMMANDLINE"
        flags = {row.name: values.pop(row.name) for row in rows}
        flags = {name: split_values(value, name) if isinstance(value, list) else value for name, value in flags.items()}
        flags |= {row.name: row.value if flags[row.name] else None for row in rows if row.value}
        function(settings=CommandSettings(values.pop("config"), flags, values.pop("sets") or [], is_typed), **values)

    run.__signature__ = inspect.Signature(list(parameters()))  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters()}
    return run


def with_verbosity(function: Callable[..., None]) -> Callable[..., None]:
    """`function` with the options --verbose and --quiet, which set the level of the logger "swarm_node"."""
    declared = [
        parameter.replace(kind=Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(function, eval_str=True).parameters.values()
    ]
    declared += [
        Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in (("verbose", Verbose), ("quiet", Quiet))
    ]

    @functools.wraps(function)
    def run(verbose: bool, quiet: bool, **values: Any) -> None:
        if verbose and quiet:
            raise UserError("--verbose and --quiet contradict each other: give one of them")
        logger = logging.getLogger("swarm_node")
        before = logger.level
        logger.setLevel(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)
        try:
            function(**values)
        finally:
            logger.setLevel(before)

    run.__signature__ = inspect.Signature(declared)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in declared}
    return run


class SettingsCommand(TyperCommand):
    """A command that says what an unknown option may stand for: a key without an option, or one of TRL's arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)  # the parser empties the other list
        try:
            return super().parse_args(ctx, args)
        except CLICK.ClickException as error:
            if isinstance(error, CLICK.MissingParameter) and error.param is not None and error.param.nargs == -1:
                parameters: list[Any] = self.params
                names = [p.human_readable_name for p in parameters if p.param_type_name == "argument"]
                error.param_hint = f"'{' '.join(names)}'"  # a single value was taken for the last one
            has_set = any(parameter.name == "sets" for parameter in self.params)
            if has_set and isinstance(error, CLICK.NoSuchOption):
                if hint := _hint(error.option_name, self.name or ""):
                    error.message, error.possibilities = f"{error.message}{hint}", None
            self._log(error, given)
            raise

    def _log(self, error: Any, args: list[str]) -> None:
        """Let a wrong option end the command with a JSON line, if its log is to be JSON."""
        values: dict[str, Any] = {"json_output": "--json" in args, "dry_run": "--dry-run" in args}
        for name in {"log_format", "name", "run_dir"} & {parameter.name for parameter in self.params}:
            flag = f"--{name.replace('_', '-')}"
            after = [value for word, value in pairwise(args) if word == flag]
            joined = [word.removeprefix(f"{flag}=") for word in args if word.startswith(f"{flag}=")]
            values[name] = next(iter(after + joined), None)
        if (show := early_log(self.name or "", values)) is not None:
            show(printable(error.format_message()), "error", "error")
            raise typer.Exit(error.exit_code) from None


def _hint(option: str, command: str) -> str:
    """What an unknown option of a command may stand for; empty if that is not known."""
    name = option.lstrip("-").replace("-", "_")
    if command == "bootstrap":
        from swarm_node.runtime.pause import HOLDING_UP, NOT_ON_A_BOOTSTRAP

        if name in HOLDING_UP:
            return f": it is not for {NOT_ON_A_BOOTSTRAP}"
    known = [key for key in all_keys() if "[]" not in key and (command != "eval" or is_measured(key, is_run=True))]
    if keys := [key for key in known if key.endswith(f".{name}")]:
        return f"; did you mean {' or '.join(f'--set {key}=VALUE' for key in keys)}?"
    if command == "eval":
        return ""
    flags = {row.key: row.flag for row in OPTIONS if command in row.commands.split() and not row.value}
    return trl_hint(name, lambda key: flags.get(key, f"--set {key}=VALUE"))


def _parameter(row: KeyOption, command: str) -> Parameter:
    """The parameter of `command` for one key: its type and values are those of the field."""
    found = alternatives(all_keys()[row.key].annotation)
    kinds = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in found]
    may_be_unset = NoneType in kinds
    (kind, *more) = [kind for kind in kinds if kind is not NoneType]
    values = get_args(get_args(kind)[0] if get_origin(kind) is list else kind)
    settings: dict[str, Any] = {
        "help": row.says.get(command) or explanation(row.key),
        "rich_help_panel": row.panel,
        "metavar": row.metavar or ("|".join(map(str, values)) if values and isinstance(values[0], str) else None),
    }
    if get_origin(kind) is list:
        kind = list[str]
        settings["help"] += " Repeatable or comma-separated."
    elif row.value:
        kind, settings["metavar"] = bool, ""
    elif kind is bool:
        settings["metavar"] = ""  # a flag takes no value
    elif more or kind not in (bool, int, float):
        kind = str
    if not row.flag.startswith("--"):
        settings["metavar"] = row.flag
        declared = typer.Argument(**settings)
    else:
        off = f"/--no-{row.flag.removeprefix('--')}" if kind is bool and may_be_unset and not row.value else ""
        declared = typer.Option(row.flag + off, **settings)
    return Parameter(row.name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, declared])


def split_names(given: list[str] | None) -> list[str] | None:
    """Values of a repeatable option, each of which may be several names with commas between."""
    return [name for text in given for part in text.split(",") if (name := part.strip())] if given else None


def split_values(given: list[str] | None, name: str) -> list[str | dict[str, Any]] | None:
    """As `split_names`, for the option `name`; a value in braces is one table, as in a configuration file. Raises
    UserError."""
    if not given:
        return None
    found: list[str | dict[str, Any]] = []
    for text in given:
        if text.lstrip().startswith("{"):
            found.append(_table(text, name))
        else:
            found += split_names([text]) or []
    return found


def _table(text: str, name: str) -> dict[str, Any]:
    try:
        document = tomllib.loads(f"value = {text}")
    except ValueError as error:
        raise UserError(f'--{name} {text} is no table such as {{key = "text", other = 1}}: {error}') from None
    if document.keys() != {"value"}:
        raise UserError(f"--{name} {text} must be one table")
    table: dict[str, Any] = document["value"]
    return table


def rewards_in(given: list[str] | None) -> list[RewardFunctionConfig] | None:
    """The reward functions that `--reward` names or describes; None if it was not given. Raises UserError."""
    values = split_values(given, "reward")
    return None if values is None else load_config(flags={"reward": values}).rewards.functions


def tasks_in(given: list[str] | None) -> list[str | TaskConfig] | None:
    """The tasks that `--tasks` names or describes; None if it was not given. Raises UserError."""
    values = split_values(given, "tasks")
    return None if values is None else load_config(flags={"tasks": values}).tasks


def is_swarm(named: str) -> bool:
    """Whether an argument names a swarm, by a link, an address or a manifest, rather than a run directory."""
    from swarm_node.swarm.download import is_url

    path = Path(named).expanduser()
    is_manifest = not path.is_dir() and (path.suffix == ".toml" or path.exists())
    return named.startswith("swarm:") or is_url(named) or is_manifest
