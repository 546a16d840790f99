"""Manifests and links: golden ids, what the id depends on, and no text that breaks the parsers."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from swarm_protocol.errors import MAX_DETAIL_CHARS, RemoteProtocolError
from swarm_protocol.limits import MAX_MANIFEST_BYTES
from swarm_protocol.manifest import MAX_FILES_BYTES, JoinLink, Manifest, ManifestTask, parse_link, parse_manifest
from swarm_protocol.plain_toml import MAX_DOTS
from tests.support.wire import SWARM, mutations, refused

DATA = Path(__file__).parents[1] / "data"
TOML = (DATA / "manifest_v1.toml").read_bytes()
GOLDEN = json.loads((DATA / "manifest_v1.json").read_text())
REASONS = {"size", "schema", "swarm"}


def parse(document: dict[str, Any]) -> Manifest:
    return parse_manifest(tomli_w.dumps(document).encode())


# --------------------------------------------------------------------- ids


@pytest.mark.parametrize(("name", "answer"), [("manifest_v1", "any"), ("manifest_v1_answer", "tags")])
def test_golden_id_and_link(name: str, answer: str) -> None:
    golden = json.loads((DATA / f"{name}.json").read_text())
    manifest = parse_manifest((DATA / f"{name}.toml").read_bytes(), swarm=golden["swarm_id"])
    assert manifest.swarm_id == golden["swarm_id"] and manifest.answer == answer
    assert str(JoinLink(manifest.swarm_id, manifest.bootstrap)) == golden["link"]
    assert parse_link(golden["link"]) == JoinLink(manifest.swarm_id, manifest.bootstrap)


def test_another_manifest_than_the_link_promised() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        parse_manifest(TOML, swarm=SWARM)
    assert caught.value.reason == "swarm"


def test_the_id_ignores_bootstrap_order_and_spelling() -> None:
    document = tomllib.loads(TOML.decode())
    backwards: dict[str, Any] = dict(reversed(document.items()))
    backwards["tasks"] = [dict(reversed(task.items())) for task in document["tasks"]]
    backwards["tasks"][0]["config"] = dict(reversed(document["tasks"][0]["config"].items()))
    del backwards["bootstrap"]
    backwards["limits"] |= {"max_text_chars": 16_384, "max_answer_tokens": 4096}  # the defaults, spelt out
    backwards["tasks"][0]["weight"] = 2.0
    backwards["answer"] = "any"
    assert parse(backwards).swarm_id == GOLDEN["swarm_id"]
    assert parse(document | {"bootstrap": ["/ip4/192.0.2.1/tcp/1/p2p/x"]}).swarm_id == GOLDEN["swarm_id"]


@pytest.mark.parametrize(
    "change",
    [
        {"name": "sums-2027"},
        {"created": "2026-11-22"},
        {"shards": 5},
        {"answer": "boxed"},
        {"limits": {"max_rollouts": 8, "max_age_s": 301}},
        {"limits": {"max_rollouts": 8, "max_age_s": 300, "max_answer_tokens": 2048}},
        {"tasks": [{"env": "gcd"}]},
        {"tasks": tomllib.loads(TOML.decode())["tasks"][::-1]},
    ],
)
def test_the_id_depends_on_everything_else(change: dict[str, Any]) -> None:
    assert parse(tomllib.loads(TOML.decode()) | change).swarm_id != GOLDEN["swarm_id"]


# --------------------------------------------------------------------- what is refused

HEAD = 'name = "x"\n[[tasks]]\nenv = "gcd"\n'
BAD = {
    "empty": "",
    "no tasks": 'name = "x"',
    "empty tasks": 'name = "x"\ntasks = []',
    "task of nothing": 'name = "x"\n[[tasks]]\nweight = 1',
    "task of two things": HEAD + f'sha256 = "{SWARM}"',
    "unknown key": HEAD + "wieght = 1",
    "path": 'name = "x"\n[[tasks]]\nenv = "../gcd"',
    "weight zero": HEAD + "weight = 0",
    "weight NaN": HEAD + "weight = nan",
    "weight infinite": HEAD + "weight = inf",
    "option NaN": HEAD + "config = {a = nan}",
    "option infinite": HEAD + "config = {a = -inf}",
    "option huge": HEAD + f"config = {{a = {10**30}}}",
    "number of 5000 digits": HEAD + f"config = {{a = {'9' * 5000}}}",
    "option table": HEAD + "config = {a = {b = 1}}",
    "option date": HEAD + "config = {a = 2026-11-21}",
    "limit NaN": HEAD + "[limits]\nmax_age_s = nan",
    "limit beyond the protocol's": HEAD + "[limits]\nmax_rollouts = 65",
    "arrays in arrays": HEAD + "config = " + "[" * 30_000,
    "tables in tables": HEAD + "config = " + "{a=" * 15_000,
    "key of 30,000 parts": HEAD + "a." * 30_000 + "a = 1",
    "header of 30,000 parts": "[" + "a." * 30_000 + "a]",
    "same key twice": HEAD + 'env = "gcd"',
    "unknown form of answers": 'answer = "rot13"\n' + HEAD,
    "control character": 'name = "\\u0000"\n[[tasks]]\nenv = "gcd"',
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_bad_manifests_are_refused(text: str) -> None:
    parse_manifest(HEAD.encode())
    with pytest.raises(RemoteProtocolError) as caught:
        parse_manifest(text.encode())
    assert caught.value.reason == "schema"


@pytest.mark.parametrize("evil", ["\\u001b]0;title\\u0007", "\\u202e", "\\u009b2J", "a\\nb"])
def test_errors_of_manifests_are_short_and_printable(evil: str) -> None:
    for bad in (f'name = "x"\n"{evil}" = 1', HEAD + f'"{evil}{"x" * 9000}" = 1'):
        with pytest.raises(RemoteProtocolError) as caught:
            parse_manifest(bad.encode())
        assert caught.value.detail and caught.value.detail.isprintable() and str(caught.value).isprintable()
        assert len(caught.value.detail) <= MAX_DETAIL_CHARS


@pytest.mark.parametrize("name", ["key of 30,000 parts", "header of 30,000 parts"])
def test_long_keys_are_refused_before_they_are_parsed(name: str) -> None:
    with pytest.raises(RemoteProtocolError, match="dots"):
        parse_manifest(BAD[name].encode())


def test_all_that_fits_is_taken() -> None:
    address = "/dns4/a.b.example.org/tcp/31330/p2p/12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"
    line = "bootstrap = [" + ", ".join([f'"{address}"'] * 64) + "]\n"
    assert line.count(".") <= MAX_DOTS
    assert len(parse_manifest((line + HEAD).encode()).bootstrap) == 64


def test_size_comes_first() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        parse_manifest(TOML + b"#" * MAX_MANIFEST_BYTES)
    assert caught.value.reason == "size"


def test_question_files_are_bounded_together() -> None:
    files = [{"sha256": f"{i:064x}", "bytes": 32 * 2**20} for i in range(MAX_FILES_BYTES // 2**25)]
    assert len(parse({"name": "x", "tasks": files}).tasks) == 4
    with pytest.raises(RemoteProtocolError) as caught:
        parse({"name": "x", "tasks": [*files, {"sha256": SWARM, "bytes": 1}]})
    assert caught.value.reason == "size"


@given(st.binary(max_size=200) | mutations(TOML))
def test_any_bytes_are_a_manifest_or_refused(data: bytes) -> None:
    if refused(lambda: parse_manifest(data), REASONS) is None:
        manifest = parse_manifest(data)
        assert parse_manifest(data, swarm=manifest.swarm_id) == manifest


@given(st.text(max_size=200))
def test_any_text_is_a_manifest_or_refused(text: str) -> None:
    refused(lambda: parse_manifest(HEAD.encode() + text.encode(errors="replace")), REASONS)


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers(), max_size=2),
        max_size=4,
    )
)
def test_any_options_give_one_id_or_are_refused(options: dict[str, Any]) -> None:
    document = {"name": "x", "tasks": [{"env": "gcd", "config": options}]}
    if refused(lambda: parse(document), REASONS) is None:
        assert parse(document).tasks == [ManifestTask(env="gcd", config=options)]
        assert parse(document).swarm_id == parse(document).swarm_id


# --------------------------------------------------------------------- links


@given(
    st.lists(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40), max_size=8),
    st.from_regex("[0-9a-f]{64}", fullmatch=True),
)
def test_links_come_back_as_they_were(peers: list[str], swarm: str) -> None:
    link = JoinLink(swarm, [f"/{peer}" for peer in peers])
    assert parse_link(str(link)) == link
    assert str(link).isascii() and " " not in str(link)


def test_a_line_break_from_pasting_does_no_harm() -> None:
    assert parse_link(f"swarm://{SWARM}\n") == JoinLink(SWARM)


@pytest.mark.parametrize(
    "text",
    [
        "",
        SWARM,
        "swarm://",
        f"https://{SWARM}",
        f"swarm://{SWARM[:-1]}",
        f"swarm://{SWARM.upper()}",
        f"swarm://{SWARM}/path",
        f"swarm://{SWARM}#fragment",
        f"swarm://me@{SWARM}",
        f"swarm://{SWARM}:80",
        f"swarm://{SWARM}?peer",
        f"swarm://{SWARM}?peer=",
        f"swarm://{SWARM}?peer=tcp",
        f"swarm://{SWARM}?peer=/a+b",
        f"swarm://{SWARM}?peer=%ff",
        f"swarm://{SWARM}?peer=/%ED%A0%80",
        f"swarm://{SWARM}?peer=/\ud800",
        f"swarm://{SWARM}?peer=/{'a' * 192}",
        f"swarm://{SWARM}?" + "&".join(["peer=/a"] * 9),
        f"swarm://{SWARM}?peer=/a&pier=/b",
        "swarm://[",
        "swarm://\u2100",
    ],
)
def test_bad_links_are_refused(text: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        parse_link(text)
    assert caught.value.reason == "schema"


@given(st.text(max_size=100), st.sampled_from(["", "swarm://", f"swarm://{SWARM}", f"swarm://{SWARM}?peer="]))
def test_any_text_is_a_link_or_refused(text: str, start: str) -> None:
    if refused(lambda: parse_link(start + text), {"schema"}) is None:
        link = parse_link(start + text)
        assert parse_link(str(link)) == link
