"""The table of memory and models in docs/own-model.md is what the estimate says."""

from __future__ import annotations

from scripts.model_sizes import GPUS, HEAD, MAIN_MEMORY, PAGE, table


def test_the_page_has_the_table_of_the_estimate() -> None:
    rows = table().removeprefix(HEAD).splitlines()
    assert len(rows) == len(MAIN_MEMORY) + len(GPUS)
    assert table() + "\n" in PAGE.read_text(), "run scripts/model_sizes.py --write"
