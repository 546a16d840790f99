"""Shell commands in pseudo-terminals, and their screens as SVG. Needs pyte (`.[dev]`)."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from fcntl import ioctl
from html import escape
from itertools import groupby
from pathlib import Path
from struct import pack
from termios import TIOCSWINSZ
from threading import Lock, Thread

import pyte
from pyte.screens import Char

COLUMNS, ROWS = 80, 100
LIMIT_S = 300.0  # a wait that takes longer has failed
CHECK_S = 0.1
END_S = 30.0  # that a command has to end after Ctrl-C
FONT, ADVANCE, LINE, MARGIN, BAR = 14, 8.43, 19, 16, 30  # of a picture, in pixels
COLOURS = {
    "default": "#d8dee4",
    "black": "#6e7781",
    "red": "#ff8079",
    "green": "#7ee08a",
    "brown": "#e8c35a",
    "blue": "#7db4ff",
    "magenta": "#e39af0",
    "cyan": "#6fd8de",
    "white": "#f0f3f6",
}
TITLE = "#9fb3c8"
BOX = 'fill="#15202b" stroke="#3d4b59"'
STYLE = (
    f"text{{font:{FONT}px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre}}"
    ".n{font:600 13px system-ui,sans-serif}.b{font-weight:700}"
)
Run = tuple[str, str, bool]  # text, colour, bold


class Terminal:
    """A shell command in a terminal of its own, with the screen that it writes to. The command stands on the first
    line."""

    def __init__(self, command: str, folder: Path, environment: Mapping[str, str]) -> None:
        self._screen, self._lock = pyte.Screen(COLUMNS, ROWS), Lock()
        self._stream = pyte.ByteStream(self._screen)
        self._stream.feed(f"$ {command}\r\n".encode())
        self._fd, inner = pty.openpty()
        ioctl(inner, TIOCSWINSZ, pack("HHHH", ROWS, COLUMNS, 0, 0))
        env = {**environment, "TERM": "xterm-256color"}
        shell = ["sh", "-c", command]
        self._process = subprocess.Popen(
            shell, cwd=folder, env=env, stdin=inner, stdout=inner, stderr=inner, start_new_session=True
        )
        os.close(inner)
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._fd, 65536):
                with self._lock:
                    self._stream.feed(data)
        except OSError:  # how Linux says that no process has the terminal open any more
            return

    def text(self) -> str:
        """All lines of the screen, without trailing blanks."""
        return "\n".join("".join(text for text, _, _ in line) for line in self.lines()).rstrip()

    def lines(self) -> list[list[Run]]:
        """The screen down to its last line that is not blank."""
        with self._lock:
            rows = [[self._screen.buffer[y][x] for x in range(COLUMNS)] for y in range(ROWS)]
        found = [runs(row) for row in rows]
        while found and not found[-1]:
            found.pop()
        return found

    def until(self, shown: Callable[[str], object]) -> None:
        """Wait until `shown` is true of the text on the screen. Raises SystemExit after LIMIT_S."""
        end = time.monotonic() + LIMIT_S
        while not shown(self.text()):
            if time.monotonic() > end:
                raise SystemExit(f"this did not come to what was waited for:\n{self.text()}")
            time.sleep(CHECK_S)

    def ended(self) -> None:
        """Wait until the command is over and its last line is on the screen. Raises SystemExit if it failed."""
        code = self._process.wait(LIMIT_S)
        self._reader.join(END_S)
        if code:
            raise SystemExit(f"exit code {code}:\n{self.text()}")

    def stop(self) -> None:
        """End all processes of the terminal, by Ctrl-C. Raises SystemExit if one does not end, and kills it."""
        if is_open := self._reader.is_alive():
            os.killpg(self._process.pid, signal.SIGINT)
            self._reader.join(END_S)
            if is_open := self._reader.is_alive():
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        os.close(self._fd)
        if is_open:
            raise SystemExit(f"Ctrl-C did not end this:\n{self.text()}")


def runs(row: Sequence[Char]) -> list[Run]:
    """Neighbouring cells of one look, without the blanks at the end of the row."""
    cells = list(row)
    while cells and cells[-1].data.strip() == "":
        cells.pop()
    look = lambda cell: (colour(cell.fg), cell.bold)  # noqa: E731
    return [("".join(cell.data for cell in same), *style) for style, same in groupby(cells, key=look)]


def colour(name: str) -> str:
    """pyte's name of a colour, or its six hex digits, as SVG writes it."""
    bright = name.removeprefix("bright")
    return COLOURS.get(bright) or (f"#{name}" if len(name) == 6 else COLOURS["default"])


def svg(title: str, panels: Mapping[str, Sequence[Sequence[Run]]]) -> str:
    """A picture of screens, one below the other, each with its name above; `title` says what it shows."""
    width, parts, top = COLUMNS * ADVANCE + 2 * MARGIN, [], 0.0
    for name, lines in panels.items():
        height = BAR + LINE * len(lines) + MARGIN
        parts.append(f'<rect x=".5" y="{top + 0.5:g}" width="{width - 1:.1f}" height="{height:g}" rx="7" {BOX}/>')
        parts.append(f'<text x="{MARGIN}" y="{top + 20:g}" fill="{TITLE}" class="n">{escape(name)}</text>')
        parts += [_row(line, top + BAR + LINE * (i + 0.8)) for i, line in enumerate(lines) if line]
        top += height + MARGIN / 2
    size = f'viewBox="0 0 {width:.1f} {top:g}" width="{width:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{escape(title)}</title>'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def _row(line: Sequence[Run], y: float) -> str:
    """One line of a screen. The length of each run is given, so that any fixed-width font fits."""
    spans, column = [], 0
    for text, fill, bold in line:
        if text.strip():
            place = f'x="{MARGIN + column * ADVANCE:.1f}" textLength="{len(text) * ADVANCE:.1f}"'
            look = f'fill="{fill}"' + (' class="b"' if bold else "")
            spans.append(f'<tspan {place} lengthAdjust="spacingAndGlyphs" {look}>{escape(text)}</tspan>')
        column += len(text)
    return f'<text y="{y:.1f}" xml:space="preserve">{"".join(spans)}</text>'
