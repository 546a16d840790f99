"""What an export says of its training and of its base, without places on the machine that trained.

The base has a name if it came from the hub or if the user gives one (`--base`). A directory has none that others know.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from swarm_node.config import NodeConfig, PolicyConfig, TaskConfig
from swarm_node.config.figures import figure_of, reports_reward
from swarm_node.config.keys import Table
from swarm_node.config.own import own_layer
from swarm_node.config.training import is_question_file
from swarm_node.observability.evaluations import NOT_MEASURED, record_of
from swarm_node.observability.summary import HeldOut
from swarm_node.policy.adapters import adapter_base
from swarm_node.policy.gguf_files.store import made_of
from swarm_node.policy.model_card import About, FigureChange, licence_of
from swarm_node.policy.model_path import is_place, local_folder, starter_path
from swarm_node.runtime.held_out import compared
from swarm_node.say import Warned
from swarm_node.storage.model_names import DIGEST, model_name
from swarm_node.storage.rundir import RunDir

STARTER = "the starter, the tiny model that comes with swarm-node"
KNOWN = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Names of this package for models of the hub: the model that the weights were made from."""
OF_THE_MACHINE = {"policy.model", "policy.revision", "policy.device", "policy.threads", "policy.dtype"}
REPEATED = {"seed", "rewards", "rollouts", "grpo", "policy", "eval"}
"""Keys, sections among them, that a command which repeats a run sets."""
NOT_REPEATED = {*OF_THE_MACHINE, "rewards.functions", "eval.tasks", "eval.every", "eval.share"}
CODE = re.compile(r"^[^:]+:[A-Za-z_]\w*$")
HELD = {"pass_1": "interval", "pass_k": "interval_k", "reward": "interval_reward"}  # figure -> its interval


class Base(NamedTuple):
    """The model that an adapter or a model was trained from."""

    name: str = ""  # on the hub, or in this package; empty = not known
    hub_id: str = ""
    in_words: str = ""
    licence: str = ""
    dequantised: str = ""  # the same of what was made of a GGUF file, whose weights no other model has


def base_of(policy: PolicyConfig, given: str | None) -> Base:
    """The base of what was trained under `policy`; `given` is its name by the user."""
    model = starter_path() if policy.model == "starter" else policy.model
    place = adapter_base(model) or model
    folder = Path(place).expanduser()
    found = _named(policy.model if place == model else place, given)
    if found.hub_id:
        cached = None
        try:
            cached = try_to_load_from_cache(found.hub_id, "README.md", revision=policy.revision)
        except HFValidationError:
            pass
        folder = Path(cached).parent if isinstance(cached, str) else folder
    licence = licence_of(folder / "README.md") or ("apache-2.0" if found.name in KNOWN else "")
    return found._replace(licence=licence)


def _named(at: str, given: str | None) -> Base:
    folder = local_folder(at)
    if folder and (file := made_of(folder)):
        hub_id, dequantised = given or KNOWN.get(at, ""), f"weights dequantised from {file}"
        others = f", which are not those of {_linked(hub_id)}" if hub_id else ""
        return Base(at if at in KNOWN else "", hub_id, dequantised + others, dequantised=dequantised)
    model, is_from_members = model_name(at), bool(DIGEST.fullmatch(Path(at).name))
    if given is not None:
        return Base(given, given, _linked(given))
    if model == "starter":
        return Base("starter", "", STARTER)
    if is_from_members:
        return Base(in_words=f"`{model}`, the model of its swarm")
    if is_place(model):
        return Base()
    return Base(model, model, _linked(model))


def _linked(hub_id: str) -> str:
    return f"[{hub_id}](https://huggingface.co/{hub_id})"


def name_base(out: Path, base: Base, given: str | None, is_lora: bool, say: Callable[[str], None]) -> None:
    """Have the adapter in `out` name its base so that it loads from any directory: the name that was `given`, else the
    one on the hub, else the base's place on this machine, which is said. Of a whole model it is said if the card names
    no base."""
    if not is_lora:
        if not (base.name or base.hub_id):
            say("the card names no base, since this was trained from a file or directory here: --base OWNER/NAME does")
        return
    file = out / "adapter_config.json"
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    there = str(document.get("base_model_name_or_path") or "")
    if given is not None:
        document |= {"base_model_name_or_path": given, "revision": None}
        if base.dequantised:
            say(Warned(f"{file} names {given}; it was trained over {base.dequantised}: --merged needs no base"))
    elif is_place(there):
        place = str(Path(there).expanduser().resolve())
        document["base_model_name_or_path"] = place
        named = "" if base.dequantised else "with --base OWNER/NAME, the base's name on the hub, or "
        say(
            Warned(
                f"{file} names the base by its place on this machine, {place}; before you give the adapter away, "
                f"export it {named}with --merged, which needs no base"
            )
        )
    file.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def about_run(
    run: RunDir, config: NodeConfig, tasks: Sequence[str | TaskConfig], base: Base, state: Mapping[str, Any]
) -> About:
    """What a card tells of a run; `state` is that of the exported checkpoint."""
    held = _held(config, state)
    return replace(
        about_tasks(tasks, base),
        rounds=_round(state),
        changes=[] if held is None else list(_changes(held)),
        questions=0 if held is None else held.questions,
        samples=0 if held is None else held.samples,
        measured=0 if held is None else held.round,
        settings=_settings(config, state),
        command=_command(run, config, tasks, base.name, _round(state)),
    )


def about_tasks(tasks: Sequence[str | TaskConfig], base: Base) -> About:
    """What a card tells of tasks and base alone."""
    public = [task if isinstance(task, str) else str(task.env) for task in tasks if not _is_file(task)]
    files = len(tasks) - len(public)
    return About(base.hub_id, base.in_words, base.licence, tasks=public, question_files=files)


def _round(state: Mapping[str, Any]) -> int:
    found = state.get("round", 0)
    return found if isinstance(found, int) else 0


def _held(config: NodeConfig, state: Mapping[str, Any]) -> HeldOut | None:
    """Held-out figures before and after, as the summary of a run has them."""
    try:
        record = record_of(state)
    except NOT_MEASURED:
        return None
    found = compared(
        record.before,
        record.last,
        config.eval.samples,
        figure=figure_of(config.rewards),
        with_reward=reports_reward(config.rewards),
    )
    return None if found is None else msgspec.structs.replace(found, round=record.round)


def _changes(held: HeldOut) -> Iterable[FigureChange]:
    for figure, interval in HELD.items():
        pair = getattr(held, figure)
        if pair is not None and not (figure == "pass_k" and held.samples == 1):
            yield FigureChange(figure, pair[0], pair[1], getattr(held, interval))


def _settings(config: NodeConfig, state: Mapping[str, Any]) -> dict[str, str]:
    """The settings that matter most, in words."""
    chosen = state.get("in_effect")
    chosen = chosen if isinstance(chosen, dict) else {}
    policy, rollouts = config.policy, config.rollouts
    lora = chosen.get("policy.lora", policy.lora)
    quantised = f", linear layers in {policy.quantize}" if policy.quantize else ""
    adapter = f"LoRA, rank {policy.lora_rank}, alpha {policy.lora_alpha}" if lora else "all weights"
    groups = chosen.get("rollouts.groups") or rollouts.groups
    found = {
        "trained": f"{adapter}{quantised}",
        "number format": chosen.get("policy.dtype", policy.dtype),
        "learning rate": chosen.get("grpo.learning_rate", config.grpo.learning_rate),
        "schedule of the learning rate": chosen.get("grpo.schedule", config.grpo.schedule),
        "loss": config.grpo.loss.rpartition("/")[2],
        "answers in a round": f"{groups} questions, {rollouts.group_size} answers each" if groups else None,
        "seed": config.seed,
    }
    return {
        name: f"{value:g}" if isinstance(value, float) else str(value)
        for name, value in found.items()
        if value is not None
    }


def _command(run: RunDir, config: NodeConfig, tasks: Sequence[str | TaskConfig], base: str, rounds: int) -> str:
    """The command that repeats `rounds` rounds of a run, or all that it was to have, with words in capitals for what
    only its machine has."""
    words = ["swarm-node", "join", "SWARM"] if config.swarm else ["swarm-node", "local"]
    own = own_layer(run.config, lambda sentence: None)
    of_its_swarm = config.swarm and "model" not in own.get("policy", {})
    if base != "starter" and not of_its_swarm:
        words += ["--model", base or "MODEL"]
    if not config.swarm:
        files = 0
        for task in tasks:
            files += _is_file(task)
            words += ["--tasks", _in_toml(_nameless(task, files) if _is_file(task) else task)]
    for number, function in enumerate(config.rewards.functions, 1):
        name = f"REWARD{number if number > 1 else ''}.py:FUNCTION"
        words += ["--reward", name if function.weight == 1 else f'{{path="{name}", weight={function.weight:g}}}']
    if length := own.get("rounds") or rounds:  # not `minutes`, which are those of one machine
        words += ["--rounds", str(length)]
    for key, value in _pairs(own):
        if key.partition(".")[0] in REPEATED and key not in NOT_REPEATED and value is not None:
            words += ["--set", f"{key}={_value(value)}"]
    return shlex.join(words)


def _nameless(task: str | TaskConfig, number: int) -> str | TaskConfig:
    """A task whose question file, the run's `number`th, has a name in capitals in place of its own."""
    name = f"QUESTIONS{number if number > 1 else ''}.jsonl"
    return name if isinstance(task, str) else task.model_copy(update={"file": name})


def _pairs(table: Table) -> Iterator[tuple[str, object]]:
    """Keys with their values; a table that is the value of a key stays whole."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", each) for key, each in value.items())
        else:
            yield name, value


def _value(value: object) -> str:
    """A value as --set takes it; of code, the file's name alone."""
    if isinstance(value, str):
        return value.rpartition("/")[2] if CODE.match(value) else value
    return _toml(value)


def _in_toml(task: str | TaskConfig) -> str:
    if isinstance(task, str):
        return task
    table = task.model_dump(mode="json", exclude_defaults=True)
    return "{" + ", ".join(f"{key} = {_toml(value)}" for key, value in table.items()) + "}"


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


def _is_file(task: str | TaskConfig) -> bool:
    return is_question_file(task) if isinstance(task, str) else task.file is not None
