"""The runs that a dashboard shows, and what has changed since a page was last updated."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from swarm_node.errors import UserError
from swarm_node.observability.dashboard.view import Lock, View, glance
from swarm_node.storage.nearby import names_near
from swarm_node.storage.rundir import PAGE, RunDir
from swarm_node.storage.utf8 import is_utf8

RUNS = Path("runs")
LISTED = 200  # most runs in the list, the newest first
SHOWN = 8  # most runs on one page
KEPT = 16  # most runs kept in memory: those looked at last
AT_MOST_EACH_S = 0.4  # least time between two looks at the files, however many pages are open


class Gallery:
    """Runs by id: the name of the directory, with a number if two have the same name."""

    def __init__(self, paths: Sequence[Path], public: bool = False) -> None:
        """`paths` are runs or directories of runs; default: those below runs/. If `public`, only pages of swarms are
        shown, also of what comes later. Raises UserError if a path is neither, or if a run is there that is not public.
        """
        self._paths = list(paths) or [RUNS]
        self._public = public
        self._views: OrderedDict[str, View] = OrderedDict()
        self._locks: dict[Path, Lock] = {}
        self._lock = threading.Lock()
        self._list: tuple[float, list[dict[str, Any]]] = (0.0, [])
        self._scanned: tuple[float, dict[str, RunDir]] = (-math.inf, {})
        for path in self._paths:
            if not _is_run(path) and not any(_runs_below(path)):
                raise UserError(_no_run(path, named=bool(paths)))
        if public and len(self.runs()) < len(self._all()):
            raise UserError(
                "--public is for pages of a swarm: runs show addresses and refusals, so leave it out for them"
            )

    def runs(self) -> dict[str, RunDir]:
        found = self._all()
        return {id: run for id, run in found.items() if _is_page(run)} if self._public else found

    def _all(self) -> dict[str, RunDir]:
        found: dict[str, RunDir] = {}
        for path in self._paths:
            for each in [path] if _is_run(path) else sorted(_runs_below(path)):
                name = each.resolve().name or "run"
                ids = (name if number == 1 else f"{name} ({number})" for number in count(1))
                found[next(id for id in ids if id not in found)] = _run(each)
        return found

    def list(self) -> list[dict[str, Any]]:
        """All runs in brief: pages of swarms, then those in use (bootstraps after runs that train), then the newest."""
        now = time.time()
        with self._lock:
            looked, known = self._list
            if 0 <= now - looked < AT_MOST_EACH_S:
                return known
            runs = self._runs_lately()
            self._locks = {run.path: self._locks.get(run.path) or Lock(run) for run in runs.values()}
            listed = [{"id": id, **glance(run, self._locks[run.path], now)} for id, run in runs.items()]
            listed.sort(key=lambda each: (-each["page"], -each["in_use"], -each["trains"], -each["started"]))
            self._list = now, listed[:LISTED]
            return self._list[1]

    def view(self, id: str) -> View | None:
        """The run of that id, as its files are now; None if there is none."""
        with self._lock:
            run = self._runs_lately().get(id)
            if run is None or not _is_run(run.path):
                self._views.pop(id, None)
                return None
            view = self._views.get(id)
            if view is None or view.run.path != run.path:
                view = self._views[id] = View(id, run)
            self._views.move_to_end(id)
            while len(self._views) > KEPT:
                self._views.popitem(last=False)
        with view.lock:
            if time.monotonic() - view.refreshed_at >= AT_MOST_EACH_S:
                view.refresh()
        return view

    def _runs_lately(self) -> dict[str, RunDir]:
        """`runs`, looked up at most every AT_MOST_EACH_S. Call it with the lock."""
        at, runs = self._scanned
        if time.monotonic() - at >= AT_MOST_EACH_S:
            runs = self.runs()
            self._scanned = time.monotonic(), runs
        return runs


@dataclass
class Told:
    """The news that one page has been told."""

    parts: dict[tuple[str, str], Any] = field(default_factory=dict)
    rows: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Run -> (reading, rounds per row, complete rows)"""

    def forget(self, id: str) -> None:
        """Forget a run: if its id comes back, it is another run."""
        self.parts = {(of, part): digest for (of, part), digest in self.parts.items() if of != id}
        self.rows.pop(id, None)


def news(gallery: Gallery, ids: Sequence[str], told: Told) -> Iterator[tuple[str, dict[str, Any]]]:
    """(kind, message) for everything new, in the list of runs and in the runs `ids`, since `told`.

    list: {"runs": […]} · summary, status, config, events, held_out, samples: {"id", that} · curves: {"id", "first",
    "per_row", "rounds", "points"}, which replace the rows from `first` on.
    """
    if _changed(told, "", "list", runs := gallery.list()):
        yield "list", {"runs": runs}
    for id in ids[:SHOWN]:
        view = gallery.view(id)
        if view is None:
            if (id, "gone") not in told.parts:
                told.forget(id)
                told.parts[id, "gone"] = True
                yield "gone", {"id": id}
            continue
        told.parts.pop((id, "gone"), None)
        with view.lock:
            messages = list(_news_of(view, told))
        yield from messages


def _news_of(view: View, told: Told) -> Iterator[tuple[str, dict[str, Any]]]:
    summary = view.summary(time.time())
    if _changed(told, view.id, "summary", summary):
        yield "summary", {"id": view.id, "summary": summary}
    curves = view.curves
    reading, per_row, complete = told.rows.get(view.id, (-1, 0, 0))
    first = complete if (reading, per_row) == (view.readings, curves.per_row) else 0
    if _changed(told, view.id, "curves", (view.readings, curves.rounds)):
        told.rows[view.id] = view.readings, curves.per_row, curves.rounds // curves.per_row
        shape = {"first": first, "per_row": curves.per_row, "rounds": curves.rounds}
        yield "curves", {"id": view.id, **shape, "points": curves.points(first)}
    if _changed(told, view.id, "status", view.status):
        yield "status", {"id": view.id, "status": view.status}
    config = view.config()
    if _changed(told, view.id, "config", config):
        yield "config", {"id": view.id, "config": config}
    events = list(view.events)
    if _changed(told, view.id, "events", events):
        yield "events", {"id": view.id, "events": events}
    if _changed(told, view.id, "held_out", view.held_out):
        yield "held_out", {"id": view.id, "held_out": view.held_out}
    samples = list(reversed(view.samples))
    if _changed(told, view.id, "samples", samples):
        yield "samples", {"id": view.id, "samples": samples}


def _changed(told: Told, id: str, part: str, value: Any) -> bool:
    """Whether a page has not been told `value` yet; records that it now has."""
    digest = hash(msgspec.json.encode(value))
    if told.parts.get((id, part)) == digest:
        return False
    told.parts[id, part] = digest
    return True


_run = lru_cache(4096)(RunDir)
"""Paths of runs are cached: runs are looked up twice a second, and making their paths would be most of the work."""


def _is_run(path: Path) -> bool:
    """Whether the directory has a run, or one that is just beginning."""
    run = _run(path)
    return run.exists or any(file.is_file() for file in (run.metrics, run.status, path / "lock"))


def _is_page(run: RunDir) -> bool:
    """Whether the directory holds the page of a swarm and nothing else: a run may begin in it."""
    return run.read_role() == PAGE and not run.exists


def _runs_below(path: Path) -> Iterator[Path]:
    try:
        children = [child for child in path.iterdir() if is_utf8(child.name)]
    except OSError:
        return
    yield from (child for child in children if child.is_dir() and _is_run(child))


def _no_run(path: Path, named: bool) -> str:
    if not named:
        return f"no run below {path}/: name a run directory, or start a run with `swarm-node local`"
    if not path.exists():
        return f"{path} is not there: name the directory of a run, or one of runs{names_near(path)}"
    return f"{path} is no run and holds none: name the directory of a run (with its config.toml), or one of runs"
