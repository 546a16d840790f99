"""metrics.jsonl stays small: the newest rounds have a line each, older rounds share lines, the older the more.

    oldest                                                                        newest
    | … | at most LEVEL lines of 4 rounds | at most LEVEL lines of 2 rounds | WHOLE to WHOLE + EACH lines of 1 round |

Lines of n rounds become lines of 2 n rounds, two neighbours at a time, oldest first. So the number of lines grows with
the logarithm of the number of rounds: 3 million rounds leave some 4,500 lines. A line of several rounds has their
number in `rounds`. Its other numbers are means over its rounds, except those that `has_last_value` names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from swarm_node.observability.jsonl import encoded_line, not_a_record, parsed, whole_lines
from swarm_node.observability.metrics_reference import has_last_value

WHOLE = 2048  # newest rounds that keep a line each: all of most runs, and a plot of 700 columns needs no more
EACH = 1024  # rounds between two thinnings: each writes the whole file again, some 12 MB, so it must be rare
LEVEL = 256
"""Most lines of equally many rounds, from 2 on; LEVEL / 2 stay. So no line stands for more than a 190th of the run:
when the first lines of n rounds are made, LEVEL / 4 of them, 3 / 4 LEVEL n rounds are in the file."""


class _Line(msgspec.Struct):
    """The part of a line that is needed for planning."""

    rounds: int = 1


def rounds_of(record: Mapping[str, Any]) -> int:
    """The number of rounds of a line of metrics.jsonl."""
    return record.get("rounds", 1)


def line_rounds(path: Path) -> list[int]:
    """The number of rounds of each line, in order. Raises UserError if a line is not a record."""
    rounds = []
    for number, line in enumerate(whole_lines(path), 1):
        try:
            rounds.append(max(1, msgspec.json.decode(line, type=_Line).rounds))
        except (ValueError, RecursionError) as error:
            raise not_a_record(path, number) from error
    return rounds


def plan_lines(rounds: Sequence[int]) -> list[int]:
    """For each line to be left, how many neighbouring lines it replaces; `rounds` are the rounds of each line now."""
    groups = [(n, 1) for n in rounds]
    size = 1
    while surplus := _surplus(groups, size):
        groups = _paired(groups, size, surplus)
        size *= 2
    return [lines for _, lines in groups]


def thinned(path: Path, groups: Sequence[int]) -> Iterator[bytes]:
    """The lines of the file at `path`, `groups` of neighbours merged into one. Lines beyond the groups stay."""
    lines = enumerate(whole_lines(path), 1)
    for size in groups:
        taken = list(islice(lines, size))
        if size == 1:
            yield taken[0][1]
        else:
            yield encoded_line(merged_record([parsed(line, path, number) for number, line in taken]))
    yield from (line for _, line in lines)


def merged_record(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One record that replaces several successive ones."""
    last = records[-1]
    one = dict(last)
    for name in dict.fromkeys(name for record in records for name in record):
        if has_last_value(name):
            continue
        measured = [(rounds_of(r), r[name]) for r in records if _is_number(r.get(name))]
        if measured:
            one[name] = sum(n * value for n, value in measured) / sum(n for n, _ in measured)
        elif name not in last:
            one[name] = next(r[name] for r in reversed(records) if name in r)
    return one | {"rounds": sum(map(rounds_of, records))}


def _surplus(groups: Sequence[tuple[int, int]], size: int) -> int:
    """How many groups of `size` rounds are to be merged; an even number."""
    there = sum(size <= n < 2 * size for n, _ in groups)
    most, stay = (WHOLE + EACH - 1, WHOLE) if size == 1 else (LEVEL, LEVEL // 2)
    return (there - stay) // 2 * 2 if there > most else 0


def _paired(groups: Sequence[tuple[int, int]], size: int, surplus: int) -> list[tuple[int, int]]:
    """All groups, with the oldest `surplus` groups of `size` rounds merged in pairs."""
    left: list[tuple[int, int]] = []
    rest = deque(groups)
    while rest:
        n, lines = rest.popleft()
        if surplus > 0 and rest and size <= n < 2 * size and size <= rest[0][0] < 2 * size:
            more, more_lines = rest.popleft()
            n, lines, surplus = n + more, lines + more_lines, surplus - 2
        left.append((n, lines))
    return left


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
