#!/usr/bin/env python3
"""The table of docs/own-model.md: how each architecture of the installed transformers is trained, by training a tiny
model of each. It takes some minutes.

python scripts/architectures.py            # print it
python scripts/architectures.py --write    # and put it into the page
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.architecture_rounds import HEAD, table  # noqa: E402

PAGE = ROOT / "docs" / "own-model.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/own-model.md")
    write = parser.parse_args().write
    made = table()
    if write:
        PAGE.write_text(re.sub(re.escape(HEAD) + r"(\|.*\n)*", lambda _: made, PAGE.read_text()))
    print(made, end="")


if __name__ == "__main__":
    main()
