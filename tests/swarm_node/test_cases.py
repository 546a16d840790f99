"""What people brought to such tools, by their bug reports: each input is trained on, or refused in words that help.

docs/evidence.md has the table of the faults, under the same numbers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from swarm_node.cli.app import USER_ERROR, app
from swarm_node.errors import TEMPORARY
from tests.support.case_models import MODELS
from tests.support.repository import ROOT

DATA = ROOT / "tests/data/cases"
QUICK = ("rollouts.groups=2", "rollouts.group_size=4", "rollouts.max_new_tokens=8", "eval.questions=2")
SCRIPTS = {
    "helper.py": "def grade(text): return float(len(text) % 3)",
    "beside.py": "from helper import grade\ndef score(completions, **c): return [grade(text) for text in completions]",
    "late.py": "def score(completions, **c):\n from helper import grade\n return [grade(text) for text in completions]",
    "loss.py": "import helper\nfrom swarm_node.grpo.losses.dapo import Dapo\nclass Mine(Dapo): pass",
    "awaited.py": "async def score(completions, **c): return [1.0 for _ in completions]",
    "arguments.py": (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--epochs', required=True)\n"
        "parser.parse_args()\ndef score(completions, **c): return [1.0 for _ in completions]"
    ),
    "leaves.py": "import sys\ndef score(completions, **c): sys.exit(3)",
    "quits.py": "class Quit(BaseException): pass\ndef score(completions, **c): raise Quit('enough')",
}


class Case(NamedTuple):
    number: str  # of the fault
    told: str  # pattern of what must be said
    refused: bool = False
    model: str = "ok"
    tasks: str = "ok.jsonl"
    more: tuple[str, ...] = ()
    code: int = USER_ERROR  # of a refusal


def judged(script: str) -> tuple[str, ...]:
    return "--reward", f"{script}:score"


SHORT = "--set", "rollouts.max_prompt_tokens=5"
NO_ROW = r"embedding has 299 rows, and none for .*resize_token_embeddings"
PROGRAM = r'put the part that is a program under `if __name__ == "__main__":`'
CASES = [
    Case("01 several answers", r"read as numbers .*9  \|  9\.0", tasks="d01-answer-list.jsonl"),
    Case(
        "02 a value inside",
        r"it has `value`, `aliases`: name one, as `answer.value`",
        True,
        tasks="d02-answer-nested.jsonl",
    ),
    Case("02 rows of verl", r"answer = `reward_model.ground_truth`", tasks="d02b-verl-rows.jsonl"),
    Case("03 choices apart", r"question = \"\{question\}\\n\{choices\}\"", tasks="d03-arc-choices.jsonl"),
    Case("05 true and false", r"read as yes or no .*yes, no, yes", tasks="d04-bool.jsonl"),
    Case("06 a currency sign", r"read as numbers .*: 2, 4, 6", tasks="d05-gsm8k-dollar.jsonl"),
    Case("09 numbers of JSON", r"24 rows of JSON lines", tasks="d06-numbers.jsonl"),
    Case("13 an array", r"24 rows of a JSON array", tasks="d09-array.json"),
    Case("13 an array as lines", r"24 rows of a JSON array", tasks="d09b-array.jsonl"),
    Case("14 semicolons", r"24 rows of a table with `;`", tasks="d10-semicolon.csv"),
    Case("14 UTF-16", r"iconv -f UTF-16 -t UTF-8 d10c-utf16\.csv > NEW\.csv", True, tasks="d10c-utf16.csv"),
    Case("15 a long cell", r"24 rows of a table", tasks="long-cell.csv"),
    Case("16 parts of text", r"24 rows of JSON lines", tasks="d11-parts.jsonl"),
    Case("17 an image", r"a part of type `image`: only text is read", True, tasks="d11b-image.jsonl"),
    Case("20 NaN", r"line 6: it has `NaN`, which JSON does not have: write null", True, tasks="d08-nan.jsonl"),
    Case("20 half a character", r"line 1: it has `\\ud83d`, half a character", True, tasks="d07-surrogate.jsonl"),
    Case("20 null", r"line 6: `answer` is null: leave the row out", True, tasks="d08b-null.jsonl"),
    Case("22 too long", r"have 1,027 to 1,028 tokens, and the model's 512 positions", True, tasks="long.jsonl"),
    Case("22 too long for the limit", r"rollouts\.max_prompt_tokens=\d+ lets them in", True, more=SHORT),
    Case("23 one question", r"has one question only.*eval\.tasks=", True, tasks="d15c-conflict.jsonl"),
    Case("24 hf", r"cannot read hf:openai/gsm8k: the hub", True, tasks="hf://openai/gsm8k", code=TEMPORARY),
    Case("26 async", r"is an `async def`.*asyncio\.run", True, more=judged("awaited.py")),
    Case("30 a loss beside a module", r"rounds +1 ", more=("--set", "grpo.loss=plugins/loss.py:Mine")),
    Case("30 a module beside", r"rounds +1 ", more=judged("plugins/beside.py")),
    Case("30 a module beside, later", r"rounds +1 ", more=judged("plugins/late.py")),
    Case("30 a package here", r"rounds +1 ", more=("--reward", "plugins.inner:score")),
    Case(
        "31 a class of its own", r"'score' ended the program in quits\.py.*Quit: enough", True, more=judged("quits.py")
    ),
    Case(
        "31 arguments",
        rf"ended the program when it was imported in arguments\.py.*{PROGRAM}",
        True,
        more=judged("arguments.py"),
    ),
    Case(
        "31 sys.exit", r"'score' ended the program in leaves\.py, line 2: SystemExit: 3", True, more=judged("leaves.py")
    ),
    Case(
        "40 thinking",
        r"rounds +1 ",
        model="switches",
        more=("--set", "policy.chat_template_kwargs={enable_thinking=false}"),
    ),
    Case("43 a template", rf"{NO_ROW}|which the prompt", True, model="template_has_added"),
    Case(
        "43 every question",
        r"embedding has no row for <doc>.*resize_token",
        True,
        "tokens_added",
        "d18-added-token.jsonl",
    ),
    Case("43 none of the questions", rf"{NO_ROW}.*", model="tokens_added"),
    Case(
        "43 some questions",
        r"left out: the model's embedding has no row for <doc>",
        False,
        "tokens_added",
        "some.jsonl",
        ("--seed", "2"),
    ),
    Case("45 parts in a template", r"rounds +1 ", model="parts"),
    Case("46 named templates", r"'rag', 'tool_use', and none is the default", True, model="named_templates"),
    Case("50 a shard is cut off", r"cannot read .*/cut_off/model\.safetensors", True, model="cut_off"),
    Case("50 a shard is missing", r"lacks model-0\d+-of-0\d+\.safetensors, which its", True, model="shard_missing"),
    Case("51 GGUF alone", r"is a GGUF file of version 0", True, model="gguf_only"),
    Case("52 FP8", r"quantised by 'fp8'.*give the model that it was made from", True, model="fp8"),
    Case("52 MLX", r"quantised by MLX.*give the model that it was made from", True, model="mlx"),
    Case("52 MLX of before", r"quantised by MLX", True, model="mlx_old"),
    Case("53 NaN", r"broken weights: model\.layers\.0\.mlp\.up_proj\.weight", True, model="nan"),
    Case("53 infinite", r"broken weights: model\.embed_tokens\.weight", True, model="infinite"),
    Case("53 overflow", r"makes numbers that are not finite of finite weights", True, model="huge"),
    Case("53 RoPE", r"makes numbers that are not finite of finite weights", True, model="rope"),
    Case("53 WordPiece", r"tokenizer fails at a text: .*\[UNK\]", True, model="word_pieces"),
    Case("54 a new type", r"does not know the model_type.*upgrade", True, model="unknown_type"),
    Case("54 own code", r"it has code of its own \(auto_map\), which is never run here", True, model="own_code"),
    Case("55 no tokenizer", r"it has no tokenizer that can be read: copy tokenizer\.json", True, model="no_tokenizer"),
    Case("57 DataParallel", r"begin with module\., .*save `model\.module`", True, model="parallel"),
    Case("57 compiled", r"begin with _orig_mod\., .*save `model\._orig_mod`", True, model="compiled"),
    Case("60 a base beside", r"rounds +1 ", model="base_beside"),
    Case(
        "60 of 4 bits",
        r"adapter_config\.json names the base unsloth/.*change base_model_name",
        True,
        model="base_of_4_bits",
    ),
    Case("60 of another machine", r"adapter_config\.json names the base /home/alex", True, model="base_gone"),
    Case("60 relative", r"adapter_config\.json names the base \./ok: no model", True, model="base_relative"),
    Case("60 unnamed", r"does not name its base model: set base_model_name_or_path", True, model="base_unnamed"),
    Case("61 of an adapter", r"is an adapter too, and none is trained on top", True, model="of_an_adapter"),
    Case(
        "70 a configuration", r"the name caf\\xe9\.toml is not UTF-8: rename", True, more=("--config", "caf\udce9.toml")
    ),
    Case("70 a model", r"the name \./caf\\xe9 is not UTF-8: rename", True, more=("--model", "./caf\udce9")),
    Case("70 a reward", r"the name caf\\xe9\.py:f is not UTF-8: rename", True, more=("--reward", "caf\udce9.py:f")),
    Case("70 a run", r"the name caf\\xe9 is not UTF-8: rename", True, more=("--run-dir", "caf\udce9")),
    Case(
        "70 a setting", r"the name policy.model=caf\\xe9 is not UTF-8", True, more=("--set", "policy.model=caf\udce9")
    ),
    Case("70 tasks", r"the name caf\\xe9\.jsonl is not UTF-8: rename", True, tasks="caf\udce9.jsonl"),
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The current directory, with all files."""
    for file in DATA.iterdir():
        shutil.copy(file, tmp_path)
    (tmp_path / "plugins").mkdir()
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text) if name != "helper.py" else None
    for name in ("helper.py", "beside.py", "late.py", "loss.py"):
        (tmp_path / "plugins" / name).write_text(SCRIPTS[name])
    (tmp_path / "plugins/inner.py").write_text("def score(completions, **c): return [len(x) % 3 for x in completions]")
    rows = [json.loads(line) for line in (DATA / "ok.jsonl").read_text().splitlines()]
    few = [row | {"question": f"<doc>{row['question']}</doc>"} if i % 4 else row for i, row in enumerate(rows)]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, few)))
    (tmp_path / "long.jsonl").write_text(
        "\n".join(json.dumps(row | {"question": row["question"] + " word" * 200}) for row in rows)
    )
    cells = "\n".join(
        f'"{row["question"]}{"x " * 75_000 if i == 3 else ""}",{row["answer"]}' for i, row in enumerate(rows)
    )
    (tmp_path / "long-cell.csv").write_text(f"question,answer\n{cells}\n")
    return tmp_path


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plugin imports is forgotten after each test, and Python does not look into the current directory."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", os.getcwd())])
    monkeypatch.setattr(sys, "argv", ["swarm-node", "local"])
    for name in ("helper", "plugins", "plugins.inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def run(*arguments: str) -> tuple[int, str]:
    """The exit code of `swarm-node` and all that it says. An error that is not reported in words comes out."""
    done = CliRunner().invoke(app, list(arguments), prog_name="swarm-node")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def trained(model: str, tasks: str, *more: str) -> tuple[int, str]:
    """One round with a model of `MODELS`, made now. What comes later in `more` wins."""
    MODELS[model](Path("models") / model)
    sets = [word for pair in QUICK for word in ("--set", pair)]
    given = (("--model", f"models/{model}"), ("--run-dir", "run"))
    named = [word for flag, value in given if flag not in more for word in (flag, value)]
    return run("local", "--rounds", "1", "--tasks", tasks, *named, *sets, *more)


@pytest.mark.parametrize("case", sorted(CASES), ids=lambda case: case.number)
def test_what_people_bring(case: Case, place: Path) -> None:
    code, said = trained(case.model, case.tasks, *case.more)
    assert code == (case.code if case.refused else 0), said
    lines = [line for line in said.splitlines() if line.startswith("swarm-node: ")]
    assert len(lines) == case.refused, said
    assert re.search(case.told, lines[0] if case.refused else said), said
    assert "Traceback" not in said or "File" in said
