"""Show questions with their answers: `swarm-node samples` and `swarm-node tasks NAME`.

Questions and answers come from models, files and strangers: no control character of theirs reaches the terminal.
"""

from __future__ import annotations

import json
import random
import shutil
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from swarm_node.config import NodeConfig, TaskConfig
from swarm_node.errors import UserError
from swarm_node.observability.samples import read_samples
from swarm_node.observability.shown_samples import number_in, shown_sample
from swarm_node.storage.plain_files import read_plain
from swarm_node.storage.rundir import BOOTSTRAP, MAX_STATUS_BYTES, RunDir
from swarm_node.tasks.catalogue import SETS
from swarm_protocol.errors import printable

MOST_WIDTH = 80
MOST_LINES = 12  # lines shown of one text
LEAST_ID = 4  # characters at the end of a peer id by which it may be named
QUESTIONS = 10  # questions that `tasks NAME` shows
OWN = "own"


def find_samples(run: RunDir, worst: bool, task: str | None, peer: str | None, count: int) -> list[dict[str, Any]]:
    """The newest records of a run's samples.jsonl, or those with the least reward, of this task and this peer. Raises
    UserError if there is none."""
    run.check_exists()
    if run.read_role() == BOOTSTRAP:
        raise UserError(f"{run.path} is of a bootstrap, which answers no questions: name a run that trains")
    every = list(read_samples(run.samples)) if run.samples.is_file() else []
    if not every:
        raise UserError(
            f"{run.path} has no samples yet: the first come with its first round, unless metrics.samples_every is 0"
        )
    names = _names(run)
    found = [r for r in every if (task is None or r.get("task") == task) and (peer is None or _is_of(r, peer, names))]
    if not found:
        raise UserError(_none(every, names, task, peer))
    found.reverse()
    if worst:
        found.sort(key=lambda record: number_in(record, "reward"))
    return [record | {"name": names.get(str(record.get("peer")), "")} for record in found[:count]]


def show_samples(records: Sequence[Mapping[str, Any]], prompt: bool = False) -> Iterator[str]:
    """Lines that show the records, at most 80 columns wide. `prompt`: the text that the model was given is shown in
    place of the question."""
    width = _width()
    for record in records:
        sample = shown_sample(record)
        when = time.strftime("%m-%d %H:%M", time.localtime(sample["time"]))
        whose = OWN if sample["peer"] is None else f"{record.get('name') or 'peer'} …{sample['peer'][-8:]}"
        kept = sum(answer["times"] for answer in sample["answers"])  # of others' groups, those trained on
        rated = f"mean reward {sample['reward']:.3f}"
        if sample["peer"] is not None:
            rated = f"{kept} answer{'' if kept == 1 else 's'} kept"
        head = f"round {sample['round']:.0f}, {sample['task']}, {whose}, {rated}, {when}"
        yield textwrap.shorten(printable(head), width, placeholder="…")
        asked = sample["prompt"] if prompt and sample["prompt"] else sample["question"]
        yield from _text("  asked  ", asked, width)
        yield from _text("  right  ", "(no reference answer)" if sample["right"] is None else sample["right"], width)
        for answer in sample["answers"]:
            yield from _text(f"  {answer['reward']:5.2f}  ", _answer(answer), width)
            yield from _text("         ", figures, width) if (figures := _figures(answer)) else ()
        if (more := int(sample["of"]) - kept) > 0:
            yield f"         and {more} more answers"
        yield ""
    if any(record.get("peer") is not None for record in records):
        yield "of others' groups only the answers trained on are kept (sharing.answers)"


def show_questions(named: Sequence[str | TaskConfig], config: NodeConfig, json_output: bool) -> Iterator[str]:
    """Lines that show some questions of tasks, of sets of tasks or of files, each with a right answer."""
    from swarm_node.tasks.one_turn import in_form
    from swarm_node.tasks.taskset import load_tasks

    config = in_form(config, config.rewards.answer)
    found = load_tasks(named, config.rewards)
    tasks = found.sample(random.Random(0), QUESTIONS)
    if json_output:
        yield json.dumps([{"task": t.label, "question": t.question, "answer": t.answer} for t in tasks], indent=2)
        return
    width = _width()
    for name in [each for each in named if isinstance(each, str)]:
        if also := [f"{group}/{name}" for group, members in SETS.items() if name in members]:
            yield from _text("", f"{name} with its own options; {' and '.join(also)} has others", width)
    for line in found.read_as:
        yield from _text("", line, width)
    if told := config.policy.system_prompt:
        yield from _text("models are told  ", told, width)
    several = len({task.label for task in tasks}) > 1
    for number, task in enumerate(tasks, 1):
        yield ""
        yield from _text(f"{number:>2}  ", (f"{task.label}: " if several else "") + task.question, width)
        yield from _text("    = ", "(no reference answer)" if task.answer is None else task.answer, width)


def _answer(answer: Mapping[str, Any]) -> str:
    text, judged = answer["text"], answer["judged"]
    end = " [cut off]" if answer["cut"] else ""
    if judged is None:
        end += " [no answer found]"
    elif judged != text.strip():
        end += f" [judged: {judged}]"
    return (f"{answer['times']}x " if answer["times"] > 1 else "") + (text or "(empty)") + end


def _figures(answer: Mapping[str, Any]) -> str:
    """The reward of each function, if there are several, and the advantage of an answer that was trained on."""
    advantage = [] if answer["advantage"] is None else [f"advantage {answer['advantage']:+.2f}"]
    rewards = [f"{name} {value:.2f}" for name, value in answer["rewards"].items()]
    return f"({', '.join([*rewards, *advantage])})" if rewards or advantage else ""


def _text(head: str, text: str, width: int) -> Iterator[str]:
    """`text` after `head`, in lines of at most `width` columns, without control characters."""
    lines = [part for line in text.splitlines() or [""] for part in _wrapped(printable(line), width - len(head))]
    shown = lines if len(lines) <= MOST_LINES else [*lines[: MOST_LINES - 1], f"… ({len(lines)} lines)"]
    for number, line in enumerate(shown):
        yield ((" " * len(head) if number else head) + line).rstrip()


def _wrapped(line: str, width: int) -> list[str]:
    return textwrap.wrap(line, width) or [""]


def _width() -> int:
    return max(40, min(MOST_WIDTH, shutil.get_terminal_size((MOST_WIDTH, 1)).columns))


def _names(run: RunDir) -> dict[str, str]:
    """Peer id -> name of those that the run has seen, as far as swarm.json tells."""
    try:
        peers = json.loads(read_plain(run.status, MAX_STATUS_BYTES))["peers"]
        return {str(peer): str(entry["name"]) for peer, entry in peers.items() if entry.get("name")}
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return {}


def _is_of(record: Mapping[str, Any], wanted: str, names: Mapping[str, str]) -> bool:
    peer = record.get("peer")
    if peer is None:
        return wanted == OWN
    return names.get(str(peer)) == wanted or (len(wanted) >= LEAST_ID and str(peer).endswith(wanted.lstrip("…")))


def _none(every: Sequence[Mapping[str, Any]], names: Mapping[str, str], task: str | None, peer: str | None) -> str:
    tasks = sorted({str(record.get("task")) for record in every})
    peers = {OWN if (id := record.get("peer")) is None else names.get(str(id)) or str(id)[-8:] for record in every}
    of = " and ".join([f"task {task}"] * (task is not None) + [f"peer {peer}"] * (peer is not None))
    asked = f"no sample of {of}" if of else "no sample"
    return f"{asked}; there are samples of the tasks {', '.join(tasks)} and of the peers {', '.join(sorted(peers))}"
