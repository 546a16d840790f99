"""One run, as its files show it."""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from swarm_node.observability.curves import MAX_NAMES, Curves
from swarm_node.observability.dashboard.bounds import ITEMS, TEXT, bounded_value, cut_text, within
from swarm_node.observability.dashboard.tail import Tail
from swarm_node.observability.ending import WORDS, LastWords, last_words
from swarm_node.observability.evaluations import newest_checkpoint, shown_change, shown_held_out, shown_until
from swarm_node.observability.reasons import words
from swarm_node.observability.restarts import restarts
from swarm_node.observability.shown_samples import shown_sample
from swarm_node.observability.tally import ENOUGH_ROUNDS
from swarm_node.say import own_command
from swarm_node.storage.going_on import GoingOn, going_on
from swarm_node.storage.model_names import model_name
from swarm_node.storage.pausing import pause_asked
from swarm_node.storage.plain_files import read_plain
from swarm_node.storage.rundir import BOOTSTRAP, MAX_STATUS_BYTES, PAGE, RunDir
from swarm_protocol.plain_toml import parsed_toml

EVENTS = 300  # most events shown: the newest
EVENT_BYTES = 512 << 10  # bytes at the end of events.jsonl in which events are looked for
SAMPLES = 6  # most questions shown with their answers: the newest
SAMPLE_BYTES = 256 << 10  # bytes at the end of samples.jsonl in which they are looked for
GLANCE_BYTES = 64 << 10  # bytes at the end of metrics.jsonl in which its last line is looked for
CONFIG_BYTES = 1 << 20
PASSWORD = "pipeline.crew"  # key of the settings that is never shown
MODEL = "policy.model"  # key of which the name is shown, where a cache has the model
FRESH_S = 30.0  # a run that shows no activity for longer than this, and for longer than four rounds, waits
LATELY = 10  # rounds behind the speed that is shown
KNOWN = 4096  # most runs whose last round and role are kept in memory

Stamp = tuple[int, int, int, int]
"""(time of the last change in ns, bytes, device, inode): tells one content of a file from another."""
State = str
"""training | paused (by its owner, or for the sake of the machine) | waiting | serving (it trains nothing) | starting;
or an `End`, if no process of this machine holds it"""


class Lock:
    """Whether a process holds a run. A look takes the lock for a moment, which might disturb a run that starts. So
    there is no new look until a process has taken the lock, which writes into its file."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._free: Stamp | None = None

    def held(self) -> bool:
        stamp = _stamp(self._run.path / "lock")
        if stamp is None or stamp == self._free:
            return False
        held = self._run.in_use
        self._free = None if held else stamp
        return held


class View:
    """Follows a run from one `refresh` to the next, in bounded memory. Safe to use from several threads."""

    def __init__(self, id: str, run: RunDir) -> None:
        self.id = id
        self.run = run
        self.curves = Curves()
        self.readings = 0  # how often metrics.jsonl was read anew, which makes known rows void
        self.status: dict[str, Any] | None = None
        self.events: deque[dict[str, Any]] = deque(maxlen=EVENTS)
        self.samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES)
        self.lock = threading.RLock()
        self.refreshed_at = -math.inf
        self._lately: deque[dict[str, Any]] = deque(maxlen=LATELY)
        self._metrics = Tail(run.metrics)
        self._events = Tail(run.events, EVENT_BYTES)
        self._samples = Tail(run.samples, SAMPLE_BYTES)
        self._held = Lock(run)
        self._held_out: dict[str, Any] | None = None
        self._in_use = False
        self._waits = ""
        self._config: dict[str, Any] = {}
        self._stamps: dict[Path, Stamp] = {}
        self._problems: dict[str, str] = {}

    def refresh(self) -> None:
        with self.lock:
            self._in_use = self._held.held()
            self._waits = cut_text(_why_paused(self.run)) if self._in_use else ""
            self._problems = {}
            if (config := self._changed(self.run.config, CONFIG_BYTES, parsed_toml)) is not None:
                self._config = config
            if (status := self._changed(self.run.status, MAX_STATUS_BYTES, msgspec.json.decode)) is not None:
                self.status = self._public(status)
            self._follow(self._metrics, self._add_rounds)
            self._follow(self._events, self._add_events)
            self._follow(self._samples, self._add_samples)
            self._follow_checkpoints()
            self.refreshed_at = time.monotonic()

    @property
    def held_out(self) -> dict[str, Any] | None:
        """Held-out figures of the newest checkpoint up to the last round; None if there are none."""
        last = self._lately[-1].get("round") if self._lately else 0
        return self._held_out and shown_until(self._held_out, last if isinstance(last, int) else 0)

    def summary(self, now: float) -> dict[str, Any]:
        last = self._lately[-1] if self._lately else {}
        first_tenth, last_tenth = self.curves.tenths("reward")
        config, state = self._config, self.state(now)
        trains = bool(self._lately) or within(self.status, "role") not in (BOOTSTRAP, PAGE)
        problems = list(self._problems.values())
        if isinstance(problem := within(self.status, "problem"), str):
            problems.append(cut_text(problem, TEXT))
        if n := self.curves.left_out:
            problems.append(f"{n} or more further metrics are not shown: the page shows {MAX_NAMES}")
        return {
            "id": self.id,
            "path": _shown_path(self.run, within(self.status, "role")),
            "state": state,
            "over": state in ("ended", "killed"),
            "paused": self._paused(now) if state == "paused" else None,
            "trains": trains,
            "figure": self._figure,
            "rounds": last.get("round"),
            "of": config.get("rounds") if isinstance(config.get("rounds"), int) else None,
            "last_at": _time(last) or None,
            "ended": None if self._in_use else WORDS[self._last_words.end(now)],
            "ended_at": None if self._in_use else self._last_words.heard or None,
            "seconds": self.curves.total("step_time"),
            "few_rounds": n if 0 < (n := self.curves.rounds) < ENOUGH_ROUNDS else None,
            "reward_first": first_tenth,
            "reward_last": last_tenth,
            "step_s": self._mean("step_time"),
            "tok_s": self._mean("perf/generated_tok_s"),
            "trained_tok_s": self._mean("perf/trained_tok_s"),
            "peers": last.get("swarm/peers"),
            "own": self.curves.total("swarm/groups_own"),
            "foreign": self.curves.total("swarm/groups_used"),
            "last": {name: value for name, value in last.items() if isinstance(value, int | float)},
            "settings": {
                "model": cut_text(model_name(cut_text(within(config, "policy", "model"), TEXT))) if trains else "",
                "averaging": cut_text(within(config, "averaging", "method")),
            },
            "commands": self._commands(state, trains),
            "to_go_on": cut_text(self._way_on(state, trains).instead, TEXT),
            "problems": problems,
        }

    def config(self) -> dict[str, str]:
        """Key -> value of the run's settings, as texts, without the name of the crew, which is its password."""
        found = {key: _settled(value) for key, value in islice(_flat(self._config), ITEMS) if key != PASSWORD}
        return found | ({MODEL: model_name(found[MODEL])} if MODEL in found else {})

    def _commands(self, state: State, trains: bool) -> dict[str, str]:
        """What to type to pause and stop the run, or to go on with it."""
        if within(self.status, "role") == PAGE:
            return {}
        if not self._in_use:
            typed = self._way_on(state, trains).typed
            return {"go on": typed} if typed else {}
        pause = "unpause" if state == "paused" else "pause"
        names = [*([pause] if trains else []), "stop"]
        return {name: f"{own_command()} {name} {self.run.quoted}" for name in names}

    def _way_on(self, state: State, trains: bool) -> GoingOn:
        """How to go on with the run, if it has ended; nothing is said of what only listens."""
        ended = state in ("ended", "killed") and trains
        return going_on(self.run, self._config or None, self._last_words.lacked_gib) if ended else GoingOn()

    @property
    def _last_words(self) -> LastWords:
        return _last_words(self.run, *_written(self.run))

    @property
    def link(self) -> str | None:
        """The join link of the run's swarm; None if it has none, or one that is longer than links are."""
        link = within(self.status, "page", "link") or within(self.status, "link")
        return link if isinstance(link, str) and 0 < len(link) < TEXT else None

    def state(self, now: float) -> State:
        """The state of the run, as far as its files show it."""
        if not self._in_use:
            return self._last_words.end(now)
        if self._paused(now):
            return "paused"
        if not self.run.has_begun:
            return "starting"
        status_fresh = self._status_fresh(now)
        if self._lately:
            quiet = now - _time(self._lately[-1])
            if quiet < max(FRESH_S, 4 * (self._mean("step_time") or 0.0)):
                return "training"
            return "serving" if status_fresh and self._follows() else "waiting"
        if not status_fresh or self.status is None:
            return "starting"
        if self.status.get("crew"):
            return "serving" if self._follows() else "waiting"
        return "starting" if "sent" in self.status else "serving"

    def _status_fresh(self, now: float) -> bool:
        return self.status is not None and now - _time(self.status) < FRESH_S

    def _paused(self, now: float) -> str:
        """Why the run is paused, as it says itself; empty = it is not."""
        reason = within(self.status, "paused") if self._status_fresh(now) else None
        return self._waits or (cut_text(reason) if isinstance(reason, str) else "")

    def _follows(self) -> bool:
        """Whether the run holds stages of a complete crew that another node leads."""
        assert self.status is not None
        crew = self.status.get("crew")
        if not isinstance(crew, dict):
            return False
        leads = within(crew, "lead", "peer") == self.status.get("peer")
        return bool(crew.get("whole")) and bool(crew.get("held")) and not leads

    @property
    def _figure(self) -> str:
        """The held-out figure that counts: as config.figures.figure_of, which the dashboard may not import."""
        functions, checker = (within(self._config, "rewards", key) for key in ("functions", "checker_weight"))
        return "reward" if functions and checker == 0 else "pass_1"

    def _mean(self, name: str) -> float | None:
        values = [value for r in self._lately if isinstance(value := r.get(name), int | float)]
        return sum(values) / len(values) if values else None

    def _follow(self, tail: Tail, add: Callable[[bool, list[dict[str, Any]]], None]) -> None:
        try:
            add(*tail.read())
            while tail.behind:
                add(*tail.read())
        except OSError as error:
            self._problems[tail.path.name] = f"cannot read {tail.path}: {error.strerror}"
            return
        if tail.damaged:
            first, more = tail.damaged[0], len(tail.damaged) - 1
            which = f"line {first} of {tail.path}" if tail.from_start else f"a line near the end of {tail.path}"
            others = f" and {more} more are no records and are" if more else " is no record and is"
            self._problems[tail.path.name] = f"{which}{others} left out"

    def _follow_checkpoints(self) -> None:
        stamp = _stamp(self.run.checkpoints)
        if stamp is None or stamp == self._stamps.get(self.run.checkpoints):
            return
        self._stamps[self.run.checkpoints] = stamp
        # as config.figures.reports_reward, which the dashboard may not import
        with_reward = any(within(self._config, "rewards", key) for key in ("functions", "partial"))
        _, state = newest_checkpoint(self.run)
        if (found := shown_held_out(state, with_reward)) is not None:
            self._held_out = bounded_value(found | {"change": shown_change(state)})

    def _add_rounds(self, void: bool, records: list[dict[str, Any]]) -> None:
        if void:
            self.curves = Curves()
            self._lately.clear()
            self.readings += 1
            self._held_out = None
            self._stamps.pop(self.run.checkpoints, None)  # they are read anew
        self.curves.add(records)
        self._lately.extend(records[-LATELY:])

    def _add_events(self, void: bool, records: list[dict[str, Any]]) -> None:
        if void:
            self.events.clear()
        self.events.extend(self._event(record) for record in records[-EVENTS:])

    def _add_samples(self, void: bool, records: list[dict[str, Any]]) -> None:
        if void:
            self.samples.clear()
        self.samples.extend(shown_sample(record) for record in records[-SAMPLES:])

    def _event(self, record: Mapping[str, Any]) -> dict[str, Any]:
        text = self._without_password(cut_text(record.get("text"), TEXT))
        return {"time": _time(record), "kind": cut_text(record.get("kind")), "text": text}

    def _public(self, status: Any) -> dict[str, Any] | None:
        """`status` in bounded size, without secrets."""
        cleaned = bounded_value(status)
        if not isinstance(cleaned, dict):
            return None
        if isinstance(crew := cleaned.get("crew"), dict):
            crew.pop("name", None)
        cleaned.pop("restarts", None)
        if clauses := _restarts(cleaned):
            cleaned["restarts"] = clauses
        _name_reasons(cleaned, "received", "swarm/rejected/")
        _name_reasons(cleaned, "sent", "swarm/unsent/")
        for peer in cleaned["peers"].values() if isinstance(cleaned.get("peers"), dict) else ():
            _name_reasons(peer, "rejected")
        return cleaned

    def _without_password(self, text: str) -> str:
        """`text` without the name of the crew, which is its password."""
        name = within(self._config, "pipeline", "crew")
        if not isinstance(name, str) or not name:
            return text
        return re.sub(rf"(\bcrew\s+)(['\"]?){re.escape(name)}\2", r"\1…", text)

    def _changed(self, path: Path, most: int, parse: Any) -> Any:
        """The content of a file that is replaced as a whole, if it has changed since the last look."""
        try:
            stat = path.stat()
            stamp = _stamp_of(stat)
            if self._stamps.get(path) == stamp:
                return None
            if stat.st_size > most:
                self._problems[path.name] = f"{path} is longer than {most >> 20} MiB and is left out"
                return None
            parsed = parse(read_plain(path, most).decode())
        except FileNotFoundError:
            return None
        except OSError as error:
            self._problems[path.name] = f"cannot read {path}: {error.strerror}"
            return None
        except (ValueError, RecursionError):  # half written, perhaps: the next look will tell
            self._problems[path.name] = f"{path} is damaged and is left out"
            return None
        self._stamps[path] = stamp
        return parsed


def _why_paused(run: RunDir) -> str:
    """Why a run that a process holds is paused, or will be as soon as it has loaded; empty = it is not."""
    return run.read_waits() or pause_asked(run.paused, time.time())


def glance(run: RunDir, lock: Lock, now: float) -> dict[str, Any]:
    """The part of a run that a list of runs shows, found without reading all of its files. `now`: Unix time."""
    known = (run.config, run.path / "lock", run.metrics, run.status)  # the first two are written when it starts
    started = next((stamp[0] for path in known if (stamp := _stamp(path)) is not None), 0)
    rounds = _last_round(run.metrics, _stamp(run.metrics))
    held, role = lock.held(), _role(run, _stamp(run.status))
    return {
        "path": _shown_path(run, role),
        "page": role == PAGE,
        "title": run.read_swarm_name() or None if role == PAGE else None,
        "in_use": held,
        "end": None if held else _last_words(run, *_written(run)).end(now),
        "paused": held and bool(_why_paused(run)),
        "starting": held and not run.has_begun,
        "trains": rounds is not None or role not in (BOOTSTRAP, PAGE),
        "rounds": rounds,
        "started": started / 1e9,
    }


@lru_cache(KNOWN)
def _last_round(path: Path, stamp: Stamp | None) -> int | None:
    """The round of the last line of the file that has this stamp."""
    try:
        _, records = Tail(path, GLANCE_BYTES).read()
    except OSError:  # the view of the run says so
        return None
    last = records[-1].get("round") if records else None
    return last if isinstance(last, int) else None


def _written(run: RunDir) -> tuple[Stamp | None, ...]:
    return _stamp(run.events), _stamp(run.metrics), _stamp(run.status), _stamp(run.path / "lock")


@lru_cache(KNOWN)
def _last_words(run: RunDir, *stamps: Stamp | None) -> LastWords:
    """What the run wrote last into the files that have these stamps."""
    return last_words(run)


@lru_cache(KNOWN)
def _role(run: RunDir, stamp: Stamp | None) -> str:
    """The role in the swarm.json that has this stamp."""
    return run.read_role()


def _stamp(path: Path) -> Stamp | None:
    try:
        return _stamp_of(path.stat())
    except OSError:
        return None


def _stamp_of(stat: os.stat_result) -> Stamp:
    return stat.st_mtime_ns, stat.st_size, stat.st_dev, stat.st_ino


def _time(record: Mapping[str, Any]) -> float:
    value = record.get("time")
    return float(value) if isinstance(value, int | float) and abs(value) < 1e12 else 0.0


def _shown_path(run: RunDir, role: object) -> str:
    """The path of a run; empty for the page of a swarm, which strangers may read."""
    return "" if role == PAGE else str(run.path)


def _flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) of all settings, the keys with dots."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _settled(value: Any) -> str:
    """The text of a setting; an address loses what stands before its host."""
    text = value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
    return cut_text(re.sub(r"://[^/@\s]*@", "://…@", text))


def _name_reasons(status: Any, part: str, prefix: str = "") -> None:
    """Replace the reasons after `prefix` in the counts of `status[part]` by words."""
    if isinstance(counts := within(status, part), dict):
        status[part] = {
            prefix + words(name.removeprefix(prefix)) if name.startswith(prefix) else name: n
            for name, n in counts.items()
        }


def _restarts(status: dict[str, Any]) -> list[str]:
    """What became of the processes of the network, in words."""
    traffic, why = status.get("traffic"), status.get("restarted")
    counts = traffic.items() if isinstance(traffic, dict) else ()
    times = {name: n for name, n in counts if isinstance(n, int | float) and 0 <= n < 2**53}
    reasons = {name: text for name, text in why.items() if isinstance(text, str)} if isinstance(why, dict) else {}
    return list(restarts(times, reasons))
