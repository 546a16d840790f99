import errno
import fcntl
import io
import math
import os
import re
import struct
import subprocess
import sys
import termios
import threading
from itertools import pairwise

import pytest
from rich.cells import cell_len
from rich.console import Console

from swarm_node.observability.progress import RATE_AFTER_S, ProgressDisplay, clock_face, sparkline, volume
from swarm_node.observability.tally import Buckets
from tests.support.virtual_time import VirtualTime


def plain_lines(total, seconds_per_round, rounds=None, minutes=None, start=0):
    stream, clock = io.StringIO(), VirtualTime()
    progress = ProgressDisplay(total, minutes, stream=stream, clock=clock)
    progress.start(start)
    for round in range(start + 1, (rounds or total) + 1):
        clock.now += seconds_per_round
        progress.update(round, {"reward": round / total, "perf/generated_tok_s": 1234.5})
    progress.stop()
    return stream.getvalue().splitlines()


def lines_in_view(progress):
    out = io.StringIO()
    Console(file=out, width=60).print(progress.view())
    return [line.rstrip() for line in out.getvalue().splitlines()]


def head(progress):
    """The first line in view, without its bar."""
    return re.sub(r"[━╸╺ ]+", " ", lines_in_view(progress)[0])


def rounds_of(lines):
    return [int(re.match(r"round (\d+)/", line)[1]) for line in lines]


def test_a_plain_line():
    assert plain_lines(200, 0.5, rounds=1) == [
        "round 1/200  reward 0.005  samples 1,234 tokens/s  0.50 s/round  1:40 left"
    ]


@pytest.mark.parametrize(("share", "words"), [(0.84, "84% cut off"), (0.5, ""), (None, "")])
def test_many_answers_that_are_cut_off_stand_beside_the_reward(share, words):
    progress = ProgressDisplay(10, stream=(stream := io.StringIO()), clock=VirtualTime())
    progress.start()
    progress.update(1, {"reward": 0.25, "completions/clipped_ratio": share})
    reward = f"reward 0.250  {words}".rstrip()
    assert lines_in_view(progress)[1].removesuffix(" ▁") == reward
    assert stream.getvalue().splitlines() == [f"round 1/10  {reward}  0.00 s/round  0:00 left"]


def test_plain_lines_come_at_each_tenth():
    lines = plain_lines(200, 1.0)
    assert rounds_of(lines) == [1, 20, 40, 60, 80, 100, 120, 140, 160, 180, 200]
    assert lines[-1].endswith("took 3:20")


def test_slow_runs_print_each_minute_quick_ones_seldom():
    assert rounds_of(plain_lines(200, 0.01)) == [1, 200]
    assert rounds_of(plain_lines(10_000, 30.0, rounds=9)) == [1, 3, 5, 7, 9]


def test_a_long_run_prints_a_line_in_ten_minutes():
    lines = rounds_of(plain_lines(100_000, 60.0, rounds=360))
    assert lines[:9] == list(range(1, 10))
    assert {later - before for before, later in pairwise(lines[12:-1])} == {10} and len(lines) < 50


def test_a_time_of_many_days_is_in_days():
    assert clock_face(3 * 86400) == "72:00:00"
    assert clock_face(284 * 86400) == "284 days"


def test_the_last_round_is_always_shown():
    assert rounds_of(plain_lines(200, 0.01, rounds=7)) == [1, 7]
    assert plain_lines(200, 1.0, rounds=-1) == []


def test_time_left_obeys_minutes_and_resuming():
    assert plain_lines(1000, 1.0, rounds=1, minutes=2)[0].endswith("1:59 left")
    assert plain_lines(1000, 1.0, rounds=901, start=900)[0].endswith("1:39 left")
    assert plain_lines(100_000, 1.0, rounds=1)[0].endswith("27:46:39 left")


def test_preparation_is_no_part_of_the_first_round():
    stream, clock = io.StringIO(), VirtualTime()
    progress = ProgressDisplay(200, stream=stream, clock=clock)
    progress.start()
    clock.now += 10.0  # held-out questions
    for round in (1, 2):
        clock.now += 0.5
        progress.update(round, {"reward": 0.5, "step_time": 0.5})
    progress.stop()
    first, second = stream.getvalue().splitlines()
    assert first.endswith("  0.50 s/round  1:40 left") and second.endswith("  0.50 s/round  1:39 left")


def test_minutes_exclude_preparation_and_pauses():
    stream, clock, paused = io.StringIO(), VirtualTime(), [0.0]
    progress = ProgressDisplay(math.inf, minutes=10, stream=stream, clock=clock)
    progress.paused_s = lambda: paused[0]
    progress.start()
    clock.now += 300.0  # held-out questions
    assert head(progress) == "round 0 0% 10:00 left"
    for round in (1, 2):
        clock.now += 60.0
        progress.update(round, {"reward": 0.5, "step_time": 60.0})
    assert head(progress) == "round 2 20% 8:00 left"
    clock.now += 3600.0
    paused[0] += 3600.0
    assert head(progress) == "round 2 20% 8:00 left"
    clock.now += 60.0
    progress.update(3, {"reward": 0.5, "step_time": 60.0})
    assert stream.getvalue().splitlines()[-1].endswith("60.00 s/round  7:00 left")


def test_a_pause_changes_no_estimate_of_rounds():
    stream, clock, paused = io.StringIO(), VirtualTime(), [0.0]
    progress = ProgressDisplay(10, stream=stream, clock=clock)
    progress.paused_s = lambda: paused[0]
    progress.start()
    clock.now += 60.0
    progress.update(1, {"reward": 0.5})
    clock.now += 3600.0
    paused[0] += 3600.0
    assert head(progress) == "round 1/10 10% 9:00 left"
    for round in range(2, 11):
        clock.now += 60.0
        progress.update(round, {"reward": 0.5})
    assert stream.getvalue().splitlines()[-1].endswith("60.00 s/round  took 1:10:00"), "by the clock on the wall"


def test_a_resumed_run_shows_the_reward_of_all_rounds():
    stream, rewards = io.StringIO(), Buckets()
    rewards.add(0.25, times=90)
    progress = ProgressDisplay(100, stream=stream, clock=VirtualTime())
    progress.start(90, rewards)
    for round in range(91, 101):
        progress.update(round, {"reward": 0.75})
    assert "round 100/100  reward 0.250 -> 0.750  " in stream.getvalue()


def test_a_round_without_a_reward_changes_nothing():
    stream = io.StringIO()
    progress = ProgressDisplay(3, stream=stream, clock=VirtualTime())
    progress.start()
    for round, reward in ((1, None), (2, float("nan")), (3, 0.5)):
        progress.update(round, {"reward": reward})
    progress.stop()
    first, last = stream.getvalue().splitlines()
    assert "reward" not in first and "reward 0.500" in last


def test_said_lines_stay_whole_and_without_markup():
    stream = io.StringIO()
    link = "swarm://" + "a" * 300 + "?peer=/ip4/127.0.0.1/tcp/1 [bold]:smile:[/bold]"
    ProgressDisplay(3, stream=stream).say(link)
    assert stream.getvalue() == link + "\n"


def test_a_table_in_a_pipe():
    stream = io.StringIO()
    rows = [["gcd [x]", 0.1, 0.25], ["all", 0.12345, "n/a"]]
    ProgressDisplay(3, stream=stream).table("held-out", ["task", "pass@1 before", "pass@1 after"], rows)
    words = [line.split() for line in stream.getvalue().splitlines()]
    assert ["held-out"] in words and ["gcd", "[x]", "0.100", "0.250"] in words and ["all", "0.123", "n/a"] in words
    assert "\x1b" not in stream.getvalue()


def test_json_output_leaves_standard_output_alone(capsys):
    progress = ProgressDisplay(1, json_output=True)
    progress.start()
    progress.update(1, {"reward": 1.0})
    progress.say("saved")
    progress.stop()
    progress.table("t", ["a"], [["b"]])
    out, err = capsys.readouterr()
    assert out == "" and "round 1/1" in err and "saved" in err and "b" in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_log_on_a_full_disk_ends_nothing():
    command = """
from swarm_node.observability.progress import ProgressDisplay
progress = ProgressDisplay(1)
progress.start()
progress.update(1, {"reward": 1.0})
progress.say("saved")
progress.stop()
progress.table("t", ["a"], [["b"]])
import os
os._exit(7)
"""
    with open("/dev/full", "w") as full:
        process = subprocess.run([sys.executable, "-c", command], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (process.returncode, process.stderr) == (7, "")


def test_sparkline():
    assert sparkline([]) == ""
    assert sparkline([0.5]) == "▁"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], width=2) == "▁█"
    assert len(sparkline(list(range(1000)))) == 24


# --- on a terminal


def screen(output):
    """What a terminal shows after `output`: enough of one for carriage return, cursor up and erase line."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|[^\x1b]", output):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token.startswith("\x1b"):
            count, kind = int(re.sub(r"\D", "", token) or 1), token[-1]
            row -= count if kind == "A" else 0
            lines[row] = "" if token == "\x1b[2K" else lines[row]
            assert kind in "AKmhl", token
        else:
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize(("columns", "waiting"), [(100, ""), (60, ""), (100, "stage 1 is missing")])
def test_the_bar_stays_below_what_is_said(monkeypatch, columns, waiting):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    output = []

    def drain():
        while chunk := os.read(master, 4096):
            output.append(chunk)
            if b"THE END" in b"".join(output[-2:]):
                return

    reader = threading.Thread(target=drain)
    reader.start()
    clock = VirtualTime()
    with open(slave, "w", encoding="utf-8") as stream:
        progress = ProgressDisplay(20, stream=stream, clock=clock)
        progress.start()
        for round in range(1, 21):
            clock.now += 1
            progress.update(round, {"reward": round / 20, "perf/generated_tok_s": 2310.0})
            if round % 10 == 0:
                progress.say(f"round {round}: swarm://{'a' * 150}")
        progress.waiting = lambda: waiting
        progress.stop()
        progress.say("THE END")
        reader.join()
    os.close(master)
    shown = screen(b"".join(output).decode())
    assert shown[0] == f"round 10: swarm://{'a' * 150}"
    assert shown[1] == f"round 20: swarm://{'a' * 150}"
    assert re.fullmatch(rf"round 20/20 ━+ +100%{' took 0:20' * (not waiting)}", shown[2])
    assert shown[3] == f"reward 0.075 -> 0.975 {sparkline(range(20))}  {waiting or 'samples 2,310 tokens/s'}", (
        "no speed while it waits"
    )
    assert shown[4] == "THE END"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


class Vanished(Terminal):
    """One that is closed after so many writes."""

    def __init__(self, writes=0):
        super().__init__()
        self.writes = writes

    def write(self, text):
        self.writes -= 1
        if self.writes < 0:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


@pytest.mark.parametrize("writes", range(6))
def test_a_terminal_that_vanishes_ends_nothing(monkeypatch, writes):
    monkeypatch.setenv("TERM", "xterm-256color")
    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    before = sys.stdout
    progress = ProgressDisplay(3, stream=Vanished(writes))
    progress.start()
    progress.say("round 1")
    progress.update(1, {"reward": 0.5})
    progress.paragraphs(["learned   reward 0.250 -> 0.500"], indent=10)
    progress.table("held-out", ["task", "pass@1"], [["gcd", 0.1]])
    progress.stop()
    progress.say("saved")
    assert failed == [] and sys.stdout is before


REALLY = """
import sys
from swarm_node.observability.progress import ProgressDisplay
progress = ProgressDisplay(3)
progress.start()
progress.say("round 1")
sys.stdin.readline()
for round in range(1, 4):
    progress.update(round, {"reward": 0.5})
    progress.say("after")
progress.stop()
progress.table("held-out", ["task", "pass@1"], [["gcd", 0.1]])
"""


@pytest.mark.parametrize("ends", [os.openpty, os.pipe])
def test_a_run_survives_its_terminal_s_end(ends):
    master, slave = ends()
    environment = os.environ | {"TERM": "xterm-256color", "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(
        [sys.executable, "-c", REALLY], stdin=subprocess.PIPE, stdout=slave, stderr=subprocess.PIPE, env=environment
    ) as process:
        os.close(slave)
        shown = b""
        while b"round 1" not in shown:
            shown += os.read(master, 4096)
        os.close(master)
        _, said = process.communicate(b"\n", timeout=60)
    assert (process.returncode, said) == (0, b"")


def test_lines_count_the_others_and_their_groups() -> None:
    out = io.StringIO()
    progress = ProgressDisplay(2, stream=out)
    progress.start()
    progress.update(1, {"reward": 0.5, "swarm/peers": 4.0, "swarm/trainers": 3.0, "swarm/groups_used": 4.0})
    assert "3 others, 4.0 of their groups a round" in out.getvalue(), "a bootstrap trains nothing"
    assert "averaged" not in out.getvalue()


def test_averaging_is_shown_in_pipe_and_terminal() -> None:
    out = io.StringIO()
    progress = ProgressDisplay(2, stream=out)
    progress.start()
    progress.update(1, {"reward": 0.5, "perf/generated_tok_s": 10.0}, "averaged 3 times, last with bob")
    assert "reward 0.500  samples 10 tokens/s  averaged 3 times, last with bob  " in out.getvalue()
    assert lines_in_view(progress)[-1] == "averaged 3 times, last with bob"


# --- what stays in view, at any width


def in_view(width, encoding="utf-8", rounds=20, others=3, crew=None, waiting="", averaged="", said="", **swarm):
    """The lines of a terminal of `width` columns after `rounds` of 2000, a second each."""
    clock = VirtualTime()
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    progress = ProgressDisplay(2000, stream=stream, clock=clock, width=width)
    progress.waiting, progress.crew = lambda: waiting, lambda: crew
    progress.start()
    clock.now += RATE_AFTER_S
    for round in range(1, rounds + 1):
        clock.now += 1
        traffic = {"swarm/bytes_in": 12_000.0 * round, "swarm/bytes_out": 9_000.0 * round} if others is not None else {}
        figures = {"swarm/trainers": others, "swarm/groups_used": 4.0} if others is not None else {}
        progress.update(
            round,
            {"reward": round / 20, "step_time": 1.0, "perf/generated_tok_s": 2310.0} | figures | traffic | swarm,
            averaged,
        )
    if said:
        progress.say(said)
        clock.now += 90
    before = len(stream.buffer.getvalue())
    Console(file=stream, width=width, highlight=False, markup=False, emoji=False).print(progress.view())
    stream.flush()
    return stream.buffer.getvalue()[before:].decode(encoding).splitlines()


AVERAGED = "averaged 12 times, last with bob"
SAID = "an exchange of weights with bob was skipped (late: round 9 is over); the next round tries again"
"""Too long for 80 columns: it stands whole above what stays in view."""


def test_the_whole_view_at_80_columns():
    head, *rest = in_view(80, averaged=AVERAGED, said=SAID)
    assert re.fullmatch(r"round 20/2000 [━╸╺]* +1% 31:30 left", head)
    assert rest == [
        f"reward 0.075 -> 0.975 {sparkline(range(20))}  samples 2,310 tokens/s",
        "3 others, 4.0 of their groups a round",
        f"43 MB in, 32 MB out an hour, 420 kB in all  {AVERAGED}",
    ]


def test_the_view_fits_40_columns():
    head, *rest = in_view(40, averaged=AVERAGED, said=SAID)
    assert re.fullmatch(r"round 20/2000 [━╸╺]* +1% 31:30 left", head)
    assert rest == [
        "reward 0.975  samples 2,310 tokens/s",
        "3 others, 4.0 of their groups a round",
        "43 MB in, 32 MB out an hour",
        AVERAGED,
    ]


@pytest.mark.parametrize("width", [1, 5, 10, 20, 33, 40, 60, 80, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
@pytest.mark.parametrize("waiting", ["", "paused: quiet hours, 22:00-07:00"])
def test_no_line_is_wider_than_the_terminal(width, encoding, waiting):
    for lines in (
        in_view(
            width, encoding, waiting=waiting, averaged=AVERAGED, said="名前 of\tpeer\x1b[2J\nsecond line " * 9, crew=1
        ),
        in_view(width, encoding, waiting=waiting, others=None, rounds=1),
        in_view(width, encoding, waiting=waiting, others=None, rounds=0),
    ):
        assert len(lines) <= 6 and all(cell_len(line) <= width for line in lines), lines
        assert not any(c in line for line in lines for c in "\t\x1b"), "nobody else moves the cursor"


def test_an_ascii_terminal_gets_ascii_only():
    lines = in_view(80, "ascii", averaged="averaged 3 times, last with bob", said="met Zoë " * 8)
    assert lines[1] == "reward 0.075 -> 0.975 ..:::--===+++**###@@  samples 2,310 tokens/s"
    assert lines[-1].startswith(r"1 min ago: met Zo\xeb met") and lines[-1].endswith("...")


def test_a_run_alone_shows_nothing_of_others():
    assert len(in_view(80, others=None)) == 2


def test_groups_may_come_while_nobody_is_seen():
    assert in_view(80, others=0)[2] == "others are being looked up; their groups: 4.0 a round"
    assert in_view(30, others=0)[2] == "4.0 groups of others"
    out = io.StringIO()
    gone = ProgressDisplay(2, stream=out)
    gone.start()
    for round, others in ((1, 1.0), (2, 0.0)):
        gone.update(round, {"reward": 0.5, "swarm/trainers": others, "swarm/groups_used": 4.0})
    assert "  nobody else trains now; the last groups of others: 4.0 a round" in out.getvalue()


def test_what_others_gave_is_in_view():
    figures = {"swarm/learned_own": 168.0, "swarm/learned_others": 312.0, "swarm/unsolved_taught": 1.0}
    share = "3 others, 4.0 of their groups a round, 65% of what it learned from"
    assert in_view(80, **figures)[2] == share
    assert in_view(120, **figures)[2] == f"{share}, 1 question only others solved"


def test_questions_that_only_others_solved_are_in_view():
    figures = {"swarm/unsolved_taught": 124.0}
    wide = "3 others, 4.0 of their groups a round, 124 questions only others solved"
    assert in_view(80, **figures)[2] == wide
    assert in_view(60, **figures)[2] == "3 others, 4.0 of their groups a round"


@pytest.mark.parametrize(
    ("others", "crew", "words"),
    [
        (3, 1, "3 others, 1 of the crew, 4.0 of their groups a round"),
        (1, 0, "1 other, none of the crew, 4.0 of their groups a round"),
        (3, 3, "3 others, all of the crew"),
        (1, 1, "1 other, of the crew"),
        (None, 2, "crew of 3"),
    ],
)
def test_a_crew_is_told_from_the_others(others, crew, words):
    assert in_view(80, others=others, crew=crew)[2] == words


def test_nobody_there_is_said_as_such():
    out = io.StringIO()
    progress = ProgressDisplay(2, stream=out)
    progress.start()
    progress.update(1, {"reward": 0.5, "swarm/trainers": 0.0, "swarm/groups_used": 0.0})
    assert "nobody else trains" in out.getvalue()


@pytest.mark.parametrize(("reward", "words"), [(0.0, "no answer is right yet"), (1.0, "answers are rewarded alike")])
def test_why_nothing_is_shared_is_in_view(reward, words):
    out = io.StringIO()
    progress = ProgressDisplay(2, stream=out)
    progress.start()
    alike = {"reward": reward, "frac_reward_zero_std": 1.0}
    progress.update(1, {"swarm/trainers": 1.0, "swarm/groups_used": 0.0, **alike})
    assert f"1 other; {words}, so there is nothing to share" in out.getvalue()


def test_a_waiting_node_shows_total_traffic_only():
    assert in_view(80, waiting="paused: by `swarm-node pause`")[3] == "240 kB in, 180 kB out"


def test_short_plain_lines_show_traffic():
    def last_line(averaged, before_s=RATE_AFTER_S):
        out, clock = io.StringIO(), VirtualTime()
        progress = ProgressDisplay(2, stream=out, clock=clock)
        progress.start()
        clock.now += before_s
        for round in (1, 2):
            clock.now += 10
            traffic = {"swarm/bytes_in": 1e5 * round, "swarm/bytes_out": 2e5 * round}
            progress.update(
                round,
                {"reward": 0.5, "step_time": 10.0, "swarm/trainers": 1.0, "swarm/groups_used": 3.0} | traffic,
                averaged,
            )
        return out.getvalue().splitlines()[-1]

    who = "round 2/2  reward 0.500  1 other, 3.0 of their groups a round"
    assert last_line("") == f"{who}  36 MB in, 72 MB out an hour  10.00 s/round  took 2:20"
    assert last_line("", before_s=0) == f"{who}  10.00 s/round  took 0:20", "the first minutes say little of an hour"
    assert last_line(f"{AVERAGED}, no partner here") == f"{who}  {AVERAGED}, no partner here  10.00 s/round  took 2:20"


def test_only_lasting_news_stay_in_view():
    progress = ProgressDisplay(3, stream=io.StringIO(), clock=VirtualTime())
    progress.say("loading")
    progress.start()
    assert len(lines_in_view(progress)) == 1, "preparations"
    progress.say("averaging: bob is here")
    progress.say("swarm://...", lasting=False)
    assert lines_in_view(progress)[1:] == ["0 s ago: averaging: bob is here"]
    progress.stop()
    assert len(lines_in_view(progress)) == 1


def test_a_table_without_room_becomes_sentences():
    out = io.StringIO()
    progress = ProgressDisplay(3, stream=out, width=40)
    progress.table("held-out", ["task", "pass@1 before", "pass@1 after", "pass@8 before"], [["a" * 20, 0.1, 0.2, 0.3]])
    assert out.getvalue().splitlines() == [
        "held-out:",
        f"task {'a' * 20}, pass@1 before 0.100, pass@1 after 0.200, pass@8 before 0.300",
    ]


@pytest.mark.parametrize("width", range(60, 120, 7))
def test_no_cell_of_a_table_is_cut_off(width: int) -> None:
    out = io.StringIO()
    names = [f"{name} {when}" for name in ("pass@1", "pass@8", "reward") for when in ("before", "after")]
    row = ["basic_arithmetic", "12", 0.111, 0.222, 0.333, 0.444, 0.555, 1.0]
    ProgressDisplay(3, stream=out, width=width).table("held-out", ["task", "questions", *names], [row])
    words = out.getvalue().replace(",", " ").split()
    assert {"basic_arithmetic", "questions", "reward", "0.111", "0.222", "0.333", "0.444", "0.555", "1.000"} <= {*words}
    assert words.count("after") == words.count("before") == 3


def test_paragraphs_wrap_on_terminals_and_not_in_pipes(monkeypatch):
    line = "learned   reward 0.250 -> 0.500, first and last tenth of 20 rounds"
    monkeypatch.setenv("TERM", "xterm-256color")
    for on_terminal, shown in ((False, [line]), (True, [line[:32], " " * 10 + line[33:59], " " * 10 + line[60:]])):
        out = Terminal() if on_terminal else io.StringIO()
        progress = ProgressDisplay(3, stream=out, width=36)
        progress.paragraphs([line], indent=10)
        assert out.getvalue().splitlines() == shown


def test_sentences_wrap_unless_they_hold_a_link(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Terminal()
    progress = ProgressDisplay(3, stream=out, width=20)
    link = f"swarm-node join swarm://{'a' * 40} --name bob"
    progress.say(f"averaging: bob is here\n{link}\n{'b' * 30}")
    assert out.getvalue().splitlines() == ["averaging: bob is", "here", link, "b" * 30]


def test_an_endless_run_has_no_bar():
    for minutes, shown in ((None, "round 7"), (10, "round 7 0% 10:00 left")):
        progress = ProgressDisplay(math.inf, minutes, stream=io.StringIO(), clock=VirtualTime(), width=60)
        progress.start(7)
        assert head(progress) == shown


def test_characters_beyond_the_encoding_end_nothing():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    progress = ProgressDisplay(3, stream=stream)
    progress.say("met Zoë")
    progress.table("held-out…", ["task"], [["größter"]])
    stream.flush()
    assert b"met Zo" in stream.buffer.getvalue() and b"held-out" in stream.buffer.getvalue()


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (9949, "9.9 kB"),
        (9951, "10 kB"),
        (999_600, "1.0 MB"),
        (3e12, "3000 GB"),
    ],
)
def test_volume(size, words):
    assert volume(size) == words


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (120, ["uses 1.0 of 2 cores, 0.54 GiB; Ctrl-C saves and stops; swarm-node pause runs/a waits"]),
        (80, ["uses 1.0 of 2 cores, 0.54 GiB", "Ctrl-C saves and stops; swarm-node pause runs/a waits"]),
        (40, ["uses 1.0 of 2 cores, 0.54 GiB"]),
    ],
)
def test_what_it_takes_and_how_to_stop_it_are_shown(width, lines):
    progress = ProgressDisplay(20, stream=Terminal(), clock=VirtualTime(), width=width)
    progress.usage = lambda: "uses 1.0 of 2 cores, 0.54 GiB"
    progress.tell_how_to_stop("runs/a")
    progress.start()
    progress.update(1, {"reward": 0.5})
    shown = [str(line) for line in progress.view().renderables[2:]]
    progress.stop()
    assert shown == lines


def test_a_paused_run_says_how_to_go_on():
    progress = ProgressDisplay(20, stream=Terminal(), clock=VirtualTime(), width=120)
    progress.tell_how_to_stop("runs/a")
    progress.waiting = lambda: "paused: by `swarm-node pause`"
    progress.start()
    progress.update(1, {"reward": 0.5})
    shown = [str(line) for line in progress.view().renderables]
    progress.stop()
    assert shown[-1] == "Ctrl-C saves and stops; swarm-node unpause runs/a goes on"


def test_a_run_without_end_says_how_long_it_has_been_going():
    clock = VirtualTime()
    progress = ProgressDisplay(math.inf, stream=Terminal(), clock=clock, width=80)
    progress.start()
    shown = [str(progress.view().renderables[0])]
    for round in (1, 2):
        clock.now += 40
        progress.update(round, {"reward": 0.5, "step_time": 40.0})
    shown.append(str(progress.view().renderables[0]))
    progress.stop()
    assert shown == ["round 0", "round 2, 40.00 s each, 1:20 so far"]
    progress.start(2)
    progress.update(3, {"reward": 0.5, "swarm/bytes_in": 2e5, "swarm/bytes_out": 1e5})
    clock.now += 40
    progress.update(4, {"reward": 0.5, "swarm/bytes_in": 4e5, "swarm/bytes_out": 2e5})
    head, *below = map(str, progress.view().renderables)
    progress.stop()
    assert head.endswith(", 0:40 in this start") and any("400 kB in, 200 kB out" in line for line in below)
