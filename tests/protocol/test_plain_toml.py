"""TOML of strangers: what takes long is refused before it is parsed, and numbers have bounds."""

from __future__ import annotations

import pytest

from swarm_protocol.plain_toml import MAX_DOTS, MAX_INT, TEXTS, parsed_toml


@pytest.mark.parametrize("text", ['"' + '\\"' * 9, "'" + '"' * 9, '"', "'", '"a\\"b"', "'a\"b'"])
def test_a_text_is_passed_over_at_once(text: str) -> None:
    """Also one without an end: tried anew from each quote in it, a megabyte takes hours."""
    assert TEXTS.sub("", f"a = {text}\nb.c = 1") == "a = \nb.c = 1"


def test_a_megabyte_of_quotes_is_refused() -> None:
    with pytest.raises(ValueError, match="Unterminated"):
        parsed_toml('a = "' + '\\"' * 2**19)


@pytest.mark.parametrize("before", ["", "x = 'a.b'\n", 'x = "it\'s"\n', "# it's\n"])
def test_dots_of_keys_are_counted(before: str) -> None:
    assert parsed_toml(f"{before}y = '{'.' * 999}'\n")["y"] == "." * 999
    with pytest.raises(ValueError, match="dots"):
        parsed_toml(f"{before}a{'.a' * (MAX_DOTS + 1)} = 1\n")


def test_dots_of_all_lines_are_counted() -> None:
    line = f"a{'.a' * MAX_DOTS}"
    assert parsed_toml("\n".join(f"b{i}.{line[2:]} = 1" for i in range(20)))
    with pytest.raises(ValueError, match="many lines"):
        parsed_toml("\n".join(f"b{i}.{line[2:]} = 1" for i in range(2500)))


@pytest.mark.parametrize("place", ["a = {}", "a = [[1, {}]]", "[[a]]\nb = {{c = [{}]}}"])
def test_integers_are_bounded(place: str) -> None:
    assert parsed_toml(place.format(MAX_INT - 1))
    for number in (-MAX_INT - 1, MAX_INT + 1, "0x" + "f" * 20_000):
        with pytest.raises(ValueError, match="an integer beyond"):
            parsed_toml(place.format(number))
