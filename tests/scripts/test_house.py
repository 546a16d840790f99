"""What `make check` measures of the layout."""

from __future__ import annotations

import ast

import pytest

from scripts.house import API, TOKENIZING, circle, fullest_class, import_graph, options_twice, tokenizer_calls, twice


def trees(**sources: str) -> dict[str, ast.Module]:
    return {f"pkg/{name}.py": ast.parse(source) for name, source in sources.items()}


@pytest.mark.parametrize(
    "back", ["from pkg.a import x", "from pkg import a", "import pkg.a", "def f():\n from pkg.a import x"]
)
def test_a_circle_is_found(back: str) -> None:
    assert set(circle(import_graph(trees(a="import pkg.b", b=back)))) == {"pkg.a", "pkg.b"}


def test_imports_for_types_make_a_circle_but_in_the_api() -> None:
    back = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n from pkg.a import x"
    assert set(circle(import_graph(trees(a="import pkg.b", b=back, c="import pkg.a")))) == {"pkg.a", "pkg.b"}
    assert circle(import_graph({**trees(a="import swarm_node"), API: ast.parse(back)})) == []


def test_public_names_in_two_modules_are_found() -> None:
    found = twice(
        trees(
            a="def load(): ...\ndef _own(): ...\ndef main(): ...", b="class load: ...\ndef _own(): ...\ndef main(): ..."
        )
    )
    assert found == ["load (pkg/a.py, pkg/b.py)"]


def test_attributes_of_a_class_are_counted_once() -> None:
    a = "class A:\n x = 1\n y: int\n def f(self):\n  self.x = self.z = 2\n  other.w = self.v"
    assert fullest_class(trees(a=a, b="class B(Section):\n a = b = c = d = 1")) == (3, "pkg/a.py: A")


def test_a_help_text_in_two_modules_is_found() -> None:
    text = "Rounds between two checkpoints of a run."
    config = {"swarm_node/config/a.py": ast.parse(f"class A:\n every: int = 1\n '''{text}'''")}
    assert options_twice(config | trees(b="HELP = 'other'")) == []
    assert options_twice(config | trees(b=f"HELP = '{text}'")) == [f"pkg/b.py:1: {text}"]


@pytest.mark.parametrize(
    "call",
    [
        "tokenizer(texts)",
        "self.tokenizer([text])",
        "policy.tokenizer.decode(ids)",
        "tokenizer.apply_chat_template(messages)",
        "tokenizer.backend_tokenizer.encode(text)",
        "map(tokenizer.backend_tokenizer.to_str(), texts)",
    ],
)
def test_a_direct_call_of_a_tokenizer_is_found(call: str) -> None:
    assert tokenizer_calls(trees(a=f"x = 1\ny = {call}")) == ["pkg/a.py:2"]
    assert tokenizer_calls({TOKENIZING: ast.parse(call)}) == []


def test_other_calls_are_none_of_a_tokenizer() -> None:
    assert tokenizer_calls(trees(a="tokenizing.encode(tokenizer, texts)\nload_tokenizer(config)\ntext.encode()")) == []
