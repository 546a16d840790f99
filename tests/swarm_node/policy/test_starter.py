"""What the starter is trained on."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from swarm_node.policy.starter import in_some_form
from swarm_node.tasks.judging.places import extract


@pytest.mark.parametrize("answer", ["42", "3/4", "a \\frac{1}{2} b"])
def test_examples_have_each_form_of_answers(answer: str) -> None:
    """Most in none; about a tenth in tags and a twentieth in boxes."""
    rng, drawn = random.Random(0), Counter[str]()
    for _ in range(4000):
        text = in_some_form(answer, rng)
        read = [form for form in ("tags", "boxed") if extract(text, form) == answer]
        form = read[0] if read else "any"
        assert len(read) <= 1 and extract(text, form) == answer
        assert (text == answer) == (form == "any")
        drawn[form] += 1
    shares = {form: n / 4000 for form, n in drawn.items()}
    assert shares == pytest.approx({"any": 0.85, "tags": 0.1, "boxed": 0.05}, abs=0.02)
