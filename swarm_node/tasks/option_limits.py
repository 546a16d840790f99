"""Limits on the options of an environment that a stranger chooses, such as the author of a swarm's manifest.

    number    from 0 to STRETCH x the library's default (of `min_x` and `max_x` the larger one), at least 1
    switch    true or false
    the rest  the library's default: texts may be paths or templates

Within these bounds every audited environment makes an item in a fraction of a second (measured: 0.15 s at worst, for
propositional_logic; at twice as much it takes half a minute).
"""

from __future__ import annotations

from collections.abc import Mapping

from swarm_node.errors import UserError
from swarm_node.tasks.catalogue import ALLOWED, NOT_AUDITED, REFUSED, SETS
from swarm_node.tasks.reasoning_gym import defaults_of, library, nearest
from swarm_node.tasks.sources import ENVIRONMENTS

STRETCH = 2


def check_options(path: str, options: Mapping[str, object]) -> None:
    """UserError unless `path` is a set, a member of one, an audited environment with options within bounds, or an
    installed one without options. Opening the environment shows whether the options make sense together."""
    if ":" in path:
        raise UserError(f"task {path!r}: a swarm carries no code; it may name environments of the package only")
    group, _, name = path.rpartition("/")
    if path in SETS:
        if options:
            raise UserError(f"{path!r} is a set of tasks: give options to one of them, by its own name")
        return
    if group and name not in SETS.get(group, {}):
        raise UserError(f"unknown task {path!r}: `swarm-node tasks` lists all")
    if name in ENVIRONMENTS and name not in ALLOWED:  # installed by each member's owner
        if options:
            raise UserError(f"task {path!r} takes no options in a swarm")
        return
    if name not in ALLOWED:
        if name not in REFUSED and name not in library():
            raise UserError(f"unknown task {path!r}{nearest(name, {*ALLOWED, *SETS})} (`swarm-node tasks` lists all)")
        raise UserError(f"task {path!r} is refused: {REFUSED.get(name, NOT_AUDITED)}")
    defaults = defaults_of(name)
    for option, value in options.items():
        if option not in defaults:
            raise UserError(f"task {path!r} has no option {option!r}{nearest(option, set(defaults))}")
        _check(path, option, value, defaults)


def _check(path: str, option: str, value: object, defaults: Mapping[str, object]) -> None:
    default = defaults[option]
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise UserError(f"task {path!r}: option {option!r} must be true or false, not {value!r}")
        return
    if not isinstance(default, int | float):
        raise UserError(f"task {path!r}: option {option!r} cannot be chosen for a whole swarm; leave it out")
    family = {option.replace("min_", "max_", 1), option.replace("max_", "min_", 1)}
    largest = max(n for name in family if isinstance(n := defaults.get(name), int | float))
    bound = max(1, STRETCH * largest)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= bound:
        raise UserError(
            f"task {path!r}: option {option!r} must be a number from 0 to {bound:g} in a swarm, not {value!r}"
        )
