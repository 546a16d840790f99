"""Whether tasks exist, before anything heavy is loaded: `load_tasks` checks their options as well."""

from __future__ import annotations

from collections.abc import Sequence

from swarm_node.config import TaskConfig
from swarm_node.config.training import is_question_file
from swarm_node.errors import UserError
from swarm_node.install import check_extra
from swarm_node.tasks.catalogue import ALLOWED, NOT_AUDITED, REFUSED, SETS, STARTER
from swarm_node.tasks.files import QuestionFile
from swarm_node.tasks.names import endless, unknown_task
from swarm_node.tasks.reasoning_gym import library, nearest
from swarm_node.tasks.sources import ENVIRONMENTS, known_names
from swarm_protocol.answer_form import AnswerKind


def check_end(specs: Sequence[str | TaskConfig]) -> None:
    """Raise UserError for tasks that make questions without end, as far as their names tell."""
    names = [spec if isinstance(spec, str) else spec.env or "" for spec in specs]
    if found := [name for name in names if name and ":" not in name and not is_question_file(name)]:
        raise endless(found)


def check_specs(specs: Sequence[str | TaskConfig], answer_needed: bool, kind: AnswerKind | None = None) -> None:
    """Raise UserError for a name that is no task, and for a question file that cannot be read, as answers of `kind`
    where it names none itself. reasoning-gym is loaded only for a name that resembles none in the catalogue."""
    for spec in specs:
        if isinstance(spec, TaskConfig) and spec.file is not None:
            QuestionFile(spec.file, answer_needed, spec.columns, spec.kind or kind)
            continue
        name = spec if isinstance(spec, str) else spec.env or ""
        if name == STARTER:
            continue
        if is_question_file(name):
            QuestionFile(name, answer_needed, kind=kind)
            continue
        group, _, member = name.rpartition("/")
        if ":" in name:
            continue
        if name in SETS or name in ENVIRONMENTS or member in SETS.get(group, ()):
            if name not in ENVIRONMENTS or name in ALLOWED:
                check_extra("puzzles", f"task {name!r}")
            continue
        is_refused = name in REFUSED or (name.isidentifier() and not nearest(name, known_names()) and name in library())
        if not is_refused:
            raise unknown_task(name, known_names())
        raise UserError(f"task {name!r} is refused: {REFUSED.get(name, NOT_AUDITED)}")
