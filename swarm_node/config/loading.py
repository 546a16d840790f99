"""Load a configuration from a file, the environment and options, and check it.

defaults < settings of the run < TOML file < environment (SWARM_NODE_GRPO__LOSS=gspo) < options (--seed 3)
         < --set grpo.loss=gspo

SWARM_NODE_PIPELINE__CREW_FILE=/run/secrets/crew takes the value from that file, and so does every key.
"""

from __future__ import annotations

import math
import shlex
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Literal, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from swarm_node.config.explaining import did_you_mean, explain
from swarm_node.config.keys import FILE_SUFFIX, VARIABLE_PREFIX, Table, all_keys, alternatives, merged, nest
from swarm_node.config.node import NodeConfig
from swarm_node.config.options import all_variables, keys_by_name, variable_of
from swarm_node.config.own import HOW_LONG, own_layer, read_own, read_toml, say_kept
from swarm_node.config.own_code import check_code
from swarm_node.config.section import TOGETHER
from swarm_node.config.training import COLUMNS, TaskConfig
from swarm_node.config.trl_names import trl_hint
from swarm_node.errors import UserError
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.manifest import LINK_SCHEME, parse_link

PACKAGE = Path(__file__).parents[1]
SETS_VARIABLE = VARIABLE_PREFIX + "SET"  # takes what `--set` takes, several with spaces between
MAX_SECRET_CHARS = 65_536  # longest value in a file
Layers = Sequence[tuple[str, Table]]  # (source, partial table) in rising precedence


def load_config(
    file: Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
    sets: Sequence[str] = (),
    others: Collection[str] = (),
) -> NodeConfig:
    """The configuration from several sources. Later ones win: `file`, `env`, `flags`, `sets`.

    `env` may have `SWARM_NODE_*` variables; `others` names those that set no key. `flags` maps an option's name, or a
    key, to its value; None = not given. `sets` has texts `section.key=value`. Raises UserError with one line: key,
    value and source.
    """
    return _resolved(read_layers(file, env or {}, flags or {}, sets, others))


def load_run_config(layers: Layers, member: bool, say: Callable[[str], None]) -> NodeConfig:
    """The configuration for the start of a run, as a `member` of a swarm or alone. If the directory has a run, that
    run's own settings come right above the defaults. Raises UserError; also if a member's run would go on alone."""
    table = together(layers)
    where = {key: table[key] for key in ("run_dir", "name") if key in table}
    directory = NodeConfig.model_validate(where | {"swarm": "any" if member else None}).directory
    there = directory / "config.toml"
    if not there.is_file():
        return _resolved(layers)
    own = own_layer(there, say) | {"run_dir": str(directory)}
    if not member and own.get("swarm"):
        again = f"swarm-node resume {shlex.quote(str(directory))}"
        raise UserError(
            f"{directory} is a run in a swarm: `{again}` goes on with it; to train alone, choose another --run-dir"
        )
    kept_manifest = directory / "swarm.toml"
    named = own.get("swarm", "")
    is_lost = named and "://" not in named and not Path(named).expanduser().is_file()  # a manifest that was removed
    if is_lost and kept_manifest.is_file():
        own["swarm"] = str(kept_manifest)
    if HOW_LONG & table.keys():
        own = {key: value for key, value in own.items() if key not in HOW_LONG}
    config = _resolved([(str(there), own), *layers])
    check_code(there, read_own(there), config, table)
    say_kept(own, table, directory, say)
    return config


def together(layers: Layers) -> Table:
    """All layers in one. Raises UserError for a value that is wrong without regard to others."""
    table: Table = {}
    for source, layer in layers:
        try:
            NodeConfig.model_validate(layer)
        except ValidationError as error:
            if any(each["type"] != TOGETHER for each in error.errors()):
                raise UserError(explain(error, source)) from None
        table = merged(table, layer)
    return table


def _resolved(layers: Layers) -> NodeConfig:
    table = together(layers)
    try:
        config = NodeConfig.model_validate(table)
    except ValidationError as error:  # each layer is right by itself
        section = error.errors()[0]["loc"][0]
        sources = dict.fromkeys(source for source, layer in layers if section in layer)
        raise UserError(explain(error, " and ".join(sources))) from None
    _check_together(config)
    return _with_own_groups(config)


def _with_own_groups(config: NodeConfig) -> NodeConfig:
    """`config` in which a member samples no more own groups than `rollouts.groups`. UserError if `sharing.own` asks for
    more."""
    groups, sharing = config.rollouts.groups, config.sharing
    if config.swarm is None or not groups or sharing.own <= groups:
        return config
    if "own" in sharing.model_fields_set:
        raise UserError(
            f"sharing.own = {sharing.own} asks for more groups of its own than rollouts.groups = {groups}, "
            "the most of a round: lower it (--own), or raise rollouts.groups"
        )
    lowered = sharing.model_copy(update={"own": groups})
    lowered.model_fields_set.remove("own")  # the user has not set it: a later start goes by its own `rollouts.groups`
    return config.model_copy(update={"sharing": lowered})


def _check_together(config: NodeConfig) -> None:
    """Raises UserError for values that contradict each other."""
    for key, tasks in (("tasks", config.tasks), ("eval.tasks", config.eval.tasks)):
        for i, task in enumerate(tasks):
            if isinstance(task, TaskConfig) and (task.env is None) == (task.file is None):
                raise UserError(f"{key}[{i}] must have either `env` or `file`")
            if isinstance(task, TaskConfig) and task.file is not None and task.config:
                raise UserError(f"{key}[{i}] must not have `config`, which is for `env`")
            if isinstance(task, TaskConfig) and task.file is None and task.columns != COLUMNS:
                raise UserError(f"{key}[{i}] must not name columns, which are for `file`")
    if not config.rewards.checker_weight and not config.rewards.functions:
        raise UserError("rewards.checker_weight = 0 leaves nothing to judge answers: add rewards.functions")
    correction = config.grpo.correction
    if config.grpo.off_policy_mask is not None and correction != "recorded":
        raise UserError(f'grpo.off_policy_mask needs grpo.correction = "recorded", not "{correction}"')
    if correction == "truncated" and config.rollouts.top_p < 1:
        raise UserError(
            'grpo.correction = "truncated" compares with log-probabilities at sampling, which rollouts.top_p = '
            f"{config.rollouts.top_p} alters: set it to 1"
        )
    if config.grpo.advantage == "pass_k" and config.grpo.k >= config.rollouts.group_size:
        raise UserError(
            f"grpo.k = {config.grpo.k} must be less than rollouts.group_size ({config.rollouts.group_size}): of a "
            "group with no more answers, pass@k training learns nothing"
        )
    grpo = config.grpo
    has_end = math.isfinite(config.total_rounds) or (config.minutes and not config.pipeline.stages)
    if grpo.schedule in ("linear", "cosine") and not grpo.schedule_rounds and not has_end:
        raise UserError(
            f'grpo.schedule = "{grpo.schedule}" has to know where it ends, and this run has no number of rounds: set '
            "--rounds or grpo.schedule_rounds"
        )
    if config.pipeline.crew and not config.pipeline.stages:
        raise UserError("a crew needs to know in how many stages it holds its policy: --stages N")
    if config.pipeline.stage != "auto" and not 0 <= config.pipeline.stage < config.pipeline.stages:
        raise UserError(
            f"pipeline.stage = {config.pipeline.stage}: must be below --stages ({config.pipeline.stages}), and is 0 "
            "for the first stage"
        )
    if (quantize := config.policy.quantize) is not None:
        if config.policy.lora is False:
            raise UserError(f"--quantize {quantize} freezes the model's weights: leave out --no-lora, or --quantize")
        if config.pipeline.stages:
            raise UserError(f"--quantize {quantize} is not for policies in stages (--stages), which load plain weights")
    check_prompt(config)


def check_prompt(config: NodeConfig) -> None:
    """Raises UserError for a prompt without the question."""
    if "{question}" not in config.policy.prompt_template:
        raise UserError(f"policy.prompt_template = {config.policy.prompt_template!r} lacks {{question}}")


def _found(file: Path) -> Path:
    """`file`, or that of the name `demo` or `configs/demo.toml` among those that come with this package, in a wheel or
    in a clone. UserError if it is neither."""
    if file.exists() or file not in (Path(file.stem), Path("configs", f"{file.stem}.toml")):
        return file
    ours = {each.stem: each for folder in (PACKAGE, PACKAGE.parent) for each in folder.glob("configs/*.toml")}
    if file.stem not in ours:
        names = ", ".join(sorted(ours))
        raise UserError(f"there is no configuration {file}: give a file, or one of this package, which are {names}")
    return ours[file.stem]


def read_layers(
    file: Path | None,
    env: Mapping[str, str],
    flags: Mapping[str, object],
    sets: Sequence[str],
    others: Collection[str],
) -> Layers:
    """What each source of `load_config` sets. Raises UserError."""
    layers = [] if file is None else [(str(file), read_toml(_found(file), "the configuration"))]
    variables = all_variables()
    for name in sorted(name for name in env if name.startswith(VARIABLE_PREFIX)):
        plain = name.removesuffix(FILE_SUFFIX)
        if name in variables:
            layers.append((name, nest(variables[name], _parse(env[name], all_keys()[variables[name]]))))
        elif plain in variables:
            key = variables[plain]
            if twice := [other for other in sorted(env) if variables.get(other) == key]:
                raise UserError(f"both {twice[0]} and {name} are set: {key} takes one of them")
            text = _secret(name, env[name])
            if key == "swarm":
                _check_swarm(text, f"{env[name]!r}, which {name} names,")
            layers.append((name, nest(key, _parse(text, all_keys()[key]))))
        elif name != SETS_VARIABLE and name not in others:
            files = [known + FILE_SUFFIX for known in variables] if plain != name else []
            word = plain.removeprefix(VARIABLE_PREFIX).lower().replace("__", ".")
            hint = trl_hint(word, variable_of) or did_you_mean(name, [*variables, *files, SETS_VARIABLE, *others], "__")
            raise UserError(f"unknown environment variable {name}{hint}")
    layers += [(SETS_VARIABLE, _parse_set(text, SETS_VARIABLE)) for text in _split_sets(env.get(SETS_VARIABLE, ""))]
    keys = keys_by_name()
    given = {name: value for name, value in flags.items() if value is not None}
    layers += [("--" + name.replace("_", "-"), nest(keys.get(name, name), value)) for name, value in given.items()]
    return layers + [("--set", _parse_set(text, "--set")) for text in sets]


def _secret(variable: str, file: str) -> str:
    """The text in the file that an environment variable names, without blanks around it. Raises UserError."""
    try:
        with Path(file).open(encoding="utf-8") as stream:
            text = stream.read(MAX_SECRET_CHARS + 1)
    except OSError as error:
        raise UserError(f"cannot read {file!r}, which {variable} names: {error.strerror}") from None
    except ValueError:  # UnicodeDecodeError, or a NUL in the name
        raise UserError(f"{file!r}, which {variable} names, is not UTF-8 text") from None
    if len(text) > MAX_SECRET_CHARS or not text.strip():
        wrong = "empty" if not text.strip() else f"longer than {MAX_SECRET_CHARS} characters"
        raise UserError(f"{file!r}, which {variable} names, is {wrong}: it must hold one value")
    return text.strip()


def _check_swarm(text: str, source: str) -> None:
    """Raise UserError, without the text, unless a text from a file may name a swarm."""
    if text.startswith(f"{LINK_SCHEME}:"):
        try:
            parse_link(text)
        except RemoteProtocolError:
            raise UserError(f"{source} holds no whole swarm:// link: copy it again") from None
    elif not text.startswith(("https:", "http:")) and not Path(text).expanduser().is_file():
        raise UserError(f"{source} holds no swarm:// link, no https address and no path of a manifest: copy it again")


def _split_sets(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{SETS_VARIABLE}: {error}; write it as on a command line: a.b=1 'c.d=two words'") from None


def _parse_set(text: str, source: str) -> Table:
    key, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"{source} {text}: write section.key=value, for example {source} grpo.loss=gspo")
    field = all_keys().get(key)
    return nest(key, value if field is None else _parse(value, field))


def _parse(text: str, field: FieldInfo) -> object:
    """The value of a text from an environment variable or --set: as TOML, unless the key takes text.

    A list may also be written `a,b`. An empty text means unset.
    """
    kinds = [get_origin(kind) or kind for kind in alternatives(field.annotation)]
    if not text and NoneType in kinds:
        return None
    is_text, is_list = str in kinds or Literal in kinds, list in kinds or tuple in kinds
    if is_text and not text.startswith(("[",) if is_list else ('"', "'")):
        return text
    try:
        document = tomllib.loads(f"value = {text}")
    except ValueError:
        document = {}
    value = document["value"] if document.keys() == {"value"} else text
    if is_list and not isinstance(value, list):
        return [item for part in text.split(",") if (item := part.strip())]
    return value
