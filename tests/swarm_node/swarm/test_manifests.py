from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swarm_node.cli.app import app
from swarm_node.config import RewardsConfig, TaskConfig
from swarm_node.errors import UserError
from swarm_node.swarm import manifests
from swarm_node.swarm.manifests import (
    check_addresses,
    make_manifest,
    render,
    task_tables,
    with_usual_columns,
    write_manifest,
)
from swarm_node.tasks import hub_data
from swarm_node.tasks.catalogue import ALLOWED
from swarm_node.tasks.option_limits import STRETCH, check_options, defaults_of
from swarm_node.tasks.reasoning_gym import ReasoningGym
from swarm_node.tasks.taskset import load_tasks
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.limits import MAX_MANIFEST_BYTES
from swarm_protocol.manifest import Manifest, ManifestTask, parse_manifest
from tests.support.disks import file_size_limit
from tests.support.fake_transport import address
from tests.support.model_folders import make_model

QUESTIONS = (
    b'{"question": "1+1?", "answer": "2"}\n{"question": "1+2?", "answer": "3"}\n{"question": "a?", "answer": "b"}\n'
)


def test_a_written_manifest_reads_back_the_same() -> None:
    Path("my sums.jsonl").write_bytes(QUESTIONS)
    tasks: list[str | TaskConfig] = [
        "small",
        TaskConfig(env="gcd", config={"max_value": 50}, weight=2),
        TaskConfig(file="my sums.jsonl", weight=0.5),
    ]
    manifest = make_manifest("sums", tasks, expected_peers=65, bootstrap=[address(1)], licence="CC-BY-4.0")
    write_manifest(manifest, Path("sums.toml"))
    read = parse_manifest(Path("sums.toml").read_bytes())
    assert read.swarm_id == manifest.swarm_id
    assert read.shards == 3
    assert read.bootstrap == [address(1)]
    assert [task.env for task in read.tasks] == ["small", "gcd", ""]
    assert read.tasks[1].weight == 2
    file = read.tasks[2]
    assert (file.name, file.bytes, file.licence, file.source) == ("my-sums", len(QUESTIONS), "CC-BY-4.0", "")
    assert file.sha256 == hashlib.sha256(QUESTIONS).hexdigest()
    assert time.strptime(read.created, "%Y-%m-%dT%H:%M:%SZ")


def test_a_copy_whose_writing_broke_off_is_written_again() -> None:
    rows = [{"prompt": f"What is {n} + {n}?", "answer": 2 * n} for n in range(60)]
    Path("mine.json").write_text(json.dumps(rows))
    folder = Path("swarm").absolute()
    folder.mkdir()
    with file_size_limit(100), pytest.raises(UserError):
        with_usual_columns(["mine.json"], folder, lambda sentence: None)
    assert list(folder.iterdir()) == []
    [table] = with_usual_columns(["mine.json"], folder, lambda sentence: None)
    assert (
        isinstance(table, TaskConfig)
        and table.file is not None
        and len(Path(table.file).read_text().splitlines()) == 60
    )
    assert with_usual_columns(["mine.json"], folder, lambda sentence: None) == [table], "the same copy may be there"


def test_new_says_who_gives_questions_and_model() -> None:
    Path("data").mkdir()
    Path("data/my sums.jsonl").write_bytes(QUESTIONS)
    model = make_model(Path("m").absolute())
    told = CliRunner().invoke(app, ["new", "--name", "own", "--model", str(model), "--tasks", "data/my sums.jsonl"])
    assert told.exit_code == 0 and Path("my-sums.jsonl").read_bytes() == QUESTIONS
    assert "a bootstrap gives members the questions: keep my-sums.jsonl beside" in told.output.replace("\n", " ")
    assert f"gives the model from {model}" in told.output.replace("\n", " ")


def test_the_form_of_answers_makes_another_swarm() -> None:
    usual, tags = (make_manifest("sums", ["gcd"], answer=form) for form in ("any", "tags"))
    assert b"answer" not in render(usual) and parse_manifest(render(tags), tags.swarm_id).answer == "tags"
    assert usual.swarm_id != tags.swarm_id
    with pytest.raises(UserError, match="nobody would accept this manifest"):
        make_manifest("sums", ["gcd"], answer="rot13")


def test_tables_follow_the_manifest_without_missing_files() -> None:
    Path("q.jsonl").write_bytes(QUESTIONS)
    manifest = make_manifest("sums", ["small/gcd", "q.jsonl"])
    assert [table.env for table in task_tables(manifest, {})] == ["small/gcd"]
    tables = task_tables(manifest, {manifest.tasks[1].sha256: Path("q.jsonl")})
    assert load_tasks(tables, RewardsConfig()).labels == ["gcd", "q"]


def test_nothing_is_overwritten() -> None:
    manifest = make_manifest("sums", ["gcd"])
    Path("sums.toml").write_text("precious")
    with pytest.raises(UserError, match="sums.toml exists already"):
        write_manifest(manifest, Path("sums.toml"))
    assert Path("sums.toml").read_text() == "precious"


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["n_queens"], "executes the answer text"),
        (["gdc"], "unknown task 'gdc'; did you mean 'gcd'?"),
        (["rubiks_cube"], "refused: its scorer has not been audited"),
        (["mine.py:Class"], "a swarm carries no code"),
        (["../mine.py:Class"], "a swarm carries no code"),
        (["small/bf"], "unknown task 'small/bf'"),
        ([TaskConfig(env="small", config={"max_value": 3})], "'small' is a set"),
        ([TaskConfig(env="gcd", config={"max_valeu": 3})], "has no option 'max_valeu'; did you mean 'max_value'"),
        ([TaskConfig(env="gcd", config={"max_value": 2001})], "from 0 to 2000 in a swarm, not 2001"),
        ([TaskConfig(env="gcd", config={"max_value": -1})], "from 0 to 2000"),
        ([TaskConfig(env="gcd", config={"max_value": float("nan")})], "from 0 to 2000"),
        ([TaskConfig(env="gcd", config={"max_value": True})], "from 0 to 2000"),
        ([TaskConfig(env="gcd", config={"seed": 3})], "no option 'seed'"),
        ([TaskConfig(env="spell_backward", config={"data_file": "/etc/passwd"})], "no option 'data_file'"),
        ([TaskConfig(env="basic_arithmetic", config={"format_style": "x"})], "cannot be chosen for a whole swarm"),
        ([TaskConfig(env="basic_arithmetic", config={"operators": ["+"]})], "cannot be chosen for a whole swarm"),
        ([TaskConfig(env="chain_sum", config={"allow_negation": 1})], "must be true or false"),
        ([TaskConfig(env="gcd", config={"min_value": 9, "max_value": 3})], "max_value must be > min_value"),
        (["no.jsonl"], "cannot read task file no.jsonl"),
        (["bad.jsonl"], "line 1: no column `answer`"),
        ([TaskConfig(file="bad.jsonl", answer="a")], "no column `a`"),
        (["bad.csv"], "converts such a file"),
        (["http://example.org/q.jsonl"], "use https"),
    ],
)
def test_what_a_manifest_may_not_name(tasks: list[Any], message: str) -> None:
    Path("bad.jsonl").write_text('{"question": "?"}\n')
    Path("bad.csv").write_text("question,answer\n1+1?,2\n")
    with pytest.raises(UserError, match=message.replace("`", ".")):
        make_manifest("sums", tasks)


def test_a_strangers_manifest_obeys_the_same_rules() -> None:
    tasks = [ManifestTask(env="propositional_logic", config={"max_vars": 16})]
    stranger = parse_manifest(render(Manifest(name="slow", tasks=tasks)))
    with pytest.raises(UserError, match="'max_vars' must be a number from 0 to 8"):
        task_tables(stranger, {})


@pytest.mark.parametrize("name", ["", "x" * 65, "a/b"])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="nobody would accept this manifest"):
        make_manifest(name, ["gcd"])


def test_a_manifest_too_large_is_not_made() -> None:
    many = [address(i) + "/" * 100 for i in range(64)]
    with pytest.raises(UserError, match="no address of a peer"):
        make_manifest("sums", ["gcd"], bootstrap=many)
    assert len(render(make_manifest("sums", ["gcd"], bootstrap=[address(i) for i in range(64)]))) < MAX_MANIFEST_BYTES


@pytest.mark.parametrize(
    "bad", ["", "localhost:31330", "/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/1/p2p/Qm", "x/p2p/1"]
)
def test_addresses_end_in_a_peer_id(bad: str) -> None:
    check_addresses([address(1)])
    with pytest.raises(UserError, match="is no address of a peer"):
        check_addresses([address(1), bad])


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_the_largest_allowed_options_make_items(name: str) -> None:
    """No option that a stranger may choose takes for ever: the time limit of all tests ends what does."""
    defaults = defaults_of(name)
    options = {
        option: type(value)(max(1, STRETCH * value))
        for option, value in defaults.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and not option.startswith("min_")
    }
    check_options(name, options)
    try:
        environment = ReasoningGym(name, options)
    except UserError:
        return  # the library, or what is known to take for ever, sets a lower bound still
    for index in range(5):
        environment.task(index * 7919 + 1)


def test_named_columns_become_the_usual_ones(tmp_path: Path) -> None:
    rows = "".join(f'{{"prompt": "{n}+1?", "target": {n + 1}, "level": 2}}\n' for n in range(40))
    Path("sums.jsonl").write_text(rows)
    table = TaskConfig(file="sums.jsonl", question="prompt", answer="target", weight=0.5)
    said: list[str] = []
    (found,) = with_usual_columns([table], tmp_path, said.append)
    assert said == [
        "sums.jsonl: 40 rows of JSON lines, question = `prompt`, answer = `target`",
        "answers of sums are read as numbers (guessed: kind = number): 1, 2, 3",
    ]
    assert found == TaskConfig(file=str(tmp_path / "sums-questions.jsonl"), weight=0.5, kind="number")
    first = (tmp_path / "sums-questions.jsonl").read_text().splitlines()[0]
    assert json.loads(first) == {"level": 2, "question": "0+1?", "answer": "1"}
    (task,) = make_manifest("sums", [found]).tasks
    assert (task.name, task.kind) == ("sums-questions", "number")
    assert with_usual_columns([table], tmp_path, print) == [found], "the same file may be there"
    (tmp_path / "sums-questions.jsonl").write_text("other")
    with pytest.raises(UserError, match="is another file"):
        with_usual_columns([table], tmp_path, print)
    Path("usual.jsonl").write_text('{"question": "1+1?", "answer": 2}\n')
    assert with_usual_columns(["small", "usual.jsonl"], tmp_path, print) == ["small", "usual.jsonl"]


def test_a_hub_s_json_lines_become_the_questions_of_a_swarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as members read them already, but lie in the hub's cache, in one or more files."""
    Path("cache").mkdir()
    files = [Path("cache/0.jsonl"), Path("cache/1.jsonl")]
    for number, file in enumerate(files):
        file.write_text("".join(f'{{"question": "{number}{n}+1?", "answer": "{n + 1}"}}\n' for n in range(40)))
    monkeypatch.setattr(hub_data, "files_of", lambda name: hub_data.HubFiles(hub_data.parse(name), files))
    told = CliRunner().invoke(app, ["new", "--name", "sums", "--tasks", "hf:org/sums"])
    assert told.exit_code == 0, told.output
    (task,) = parse_manifest(Path("sums.toml").read_bytes()).tasks
    assert (task.name, task.kind, task.source) == ("sums-questions", "number", "")
    assert hashlib.sha256(Path("sums-questions.jsonl").read_bytes()).hexdigest() == task.sha256
    questions = [json.loads(line)["question"] for file in files for line in file.read_text().splitlines()]
    copied = Path("sums-questions.jsonl").read_text().splitlines()
    assert [json.loads(line)["question"] for line in copied] == questions


def test_a_manifest_names_the_kind_of_answers() -> None:
    """What is named, else what was guessed; members guess nothing, and a manifest of before means whole texts."""
    Path("sums.jsonl").write_text("".join(f'{{"question": "{n}+1?", "answer": {n + 1}}}\n' for n in range(40)))
    for kind in ("number", "text"):
        manifest = make_manifest("sums", ["sums.jsonl"], kind=None if kind == "number" else "text")
        assert parse_manifest(render(manifest), manifest.swarm_id) == manifest
        assert (b'kind = "number"' in render(manifest)) == (kind == "number")
        (table,) = task_tables(manifest, {manifest.tasks[0].sha256: Path("sums.jsonl")})
        assert table.kind == kind
        tasks = load_tasks([table], RewardsConfig(kind="maths"), whole=True)
        (score,) = tasks.score([tasks.every()[0]], [""], ["It is 1, I think."])
        assert score.correct == (kind == "number")
    with pytest.raises(UserError, match="is not yes or no"):
        make_manifest("sums", ["sums.jsonl"], kind="yes-no")
    with pytest.raises(RemoteProtocolError, match="checker of its own"):
        parse_manifest(b'name = "s"\n[[tasks]]\nenv = "gcd"\nkind = "number"\n')


def test_a_csv_file_becomes_json_lines(tmp_path: Path) -> None:
    Path("sums.csv").write_text("question,answer\n" + "".join(f"{n}+1?,{n + 1}\n" for n in range(40)))
    with pytest.raises(UserError, match="members read JSON lines .* sums.csv is otherwise"):
        make_manifest("sums", ["sums.csv"])
    (found,) = with_usual_columns(["sums.csv"], tmp_path, print)
    assert isinstance(found, TaskConfig) and found.file == str(tmp_path / "sums-questions.jsonl")
    assert make_manifest("sums", [found]).tasks[0].name == "sums-questions"


def test_a_file_with_several_accepted_answers_is_refused_by_name(tmp_path: Path) -> None:
    Path("capitals.jsonl").write_text('{"question": "Capital?", "answer": ["Paris", "Lutetia"]}\n')
    with pytest.raises(UserError, match="capitals.jsonl has several accepted answers"):
        with_usual_columns(["capitals.jsonl"], tmp_path, print)
    assert not Path("capitals-questions.jsonl").exists()
    with pytest.raises(UserError, match="members read JSON lines"):
        make_manifest("capitals", ["capitals.jsonl"])


@pytest.mark.parametrize("answers", [["9", "9.5"], [9, 9.5]], ids=["texts", "numbers"])
def test_several_accepted_answers_of_other_kinds_than_text(tmp_path: Path, answers: list[object]) -> None:
    """Nodes of protocol 1 refuse a manifest that names such a kind, so nobody reads the list otherwise."""
    lines = ({"question": f"{n}+9?", "answer": answers} for n in range(40))
    Path("sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (spec,) = with_usual_columns(["sums.jsonl"], tmp_path, print)
    assert (spec == "sums.jsonl") == (answers == ["9", "9.5"])  # as it is, or with texts
    manifest = make_manifest("sums", [spec])
    assert manifest.tasks[0].kind == "number"
    file = Path(spec if isinstance(spec, str) else spec.file or "")
    tasks = load_tasks(task_tables(manifest, {manifest.tasks[0].sha256: file}), RewardsConfig(), whole=True)
    scores = tasks.score([tasks.every()[0]] * 3, [""] * 3, ["It is 9.", "9.5", "8"])
    assert [score.correct for score in scores] == [True, True, False]


def test_messages_become_texts_in_a_new_swarm() -> None:
    """Members of earlier versions read questions that are texts alone."""
    lines = [{"question": "0+1?", "answer": "1"}, *map(asked, range(1, 40))]
    Path("sums.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = CliRunner().invoke(app, ["new", "--name", "sums", "--tasks", "sums.jsonl"])
    assert done.exit_code == 0, done.output
    written = Path("sums-questions.jsonl").read_bytes()
    read = [json.loads(line) for line in written.splitlines()]
    assert read == [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(40)]
    (task,) = parse_manifest(Path("sums.toml").read_bytes()).tasks
    assert (task.name, task.sha256) == ("sums-questions", hashlib.sha256(written).hexdigest())


def test_messages_at_an_address_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "download", lambda place, most: json.dumps(asked(1)).encode())
    with pytest.raises(UserError, match="members read JSON lines whose .*download the file"):
        make_manifest("sums", ["https://example.org/q.jsonl"])


def asked(n: int) -> dict[str, Any]:
    return {"question": [{"role": "user", "content": f"{n}+1?"}], "answer": n + 1}
