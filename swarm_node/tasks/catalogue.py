"""The environments of reasoning-gym that a node may use, and why the others are refused.

An environment is allowed after two checks. Its scorer has been read, with all code that sees answer text: nothing
executes the text, recurses with it or can be stalled by it. And two processes with different hash seeds have made the
same questions and answers (tests/data/task_digests.json). docs/tasks.md has the findings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

STARTER = "starter"
STARTER_QUESTIONS = Path(__file__).with_name("starter.jsonl")
"""The questions that this package brings, of that name among tasks: some of the set `small`, for a node without
reasoning-gym (scripts/starter_questions.py)."""

ALLOWED: dict[str, Literal["library", "own"]] = {
    "arc_1d": "library",
    "base_conversion": "library",
    "basic_arithmetic": "library",
    "bf": "library",
    "binary_matrix": "own",
    "caesar_cipher": "library",
    "calendar_arithmetic": "library",
    "chain_sum": "library",
    "count_bits": "library",
    "count_primes": "library",
    "decimal_arithmetic": "library",
    "fraction_simplification": "library",
    "gcd": "library",
    "gsm_symbolic": "own",
    "lcm": "library",
    "leg_counting": "library",
    "letter_counting": "library",
    "prime_factorization": "library",
    "products": "library",
    "propositional_logic": "own",
    "spell_backward": "library",
}
"""Environment -> whether the library's checker judges it or our own."""

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ["n_queens", "spiral_matrix", "string_insertion"],
        "its scorer executes the answer text as Python (eval)",
    ),
    **dict.fromkeys(
        [
            "countdown",
            "intermediate_integration",
            "polynomial_multiplication",
            "puzzle24",
            "simple_integration",
        ],
        "its scorer executes the answer text as Python (sympy's parse_expr)",
    ),
    "codeio": "it executes Python programs",
    "coin_flip": "its scorer can be stalled: it expands `1e999999999` to an integer of a billion digits",
    **dict.fromkeys(
        ["isomorphic_strings", "knight_swap", "ransom_note"],
        "it does not regenerate: its questions depend on Python's hash seed",
    ),
    "simple_equations": "it does not regenerate: its questions depend on the version of sympy",
}
"""Environment -> why it is refused. Any other is refused because nobody has read its scorer yet."""

NOT_AUDITED = "its scorer has not been audited"

SETS: dict[str, dict[str, dict[str, Any]]] = {
    # Question spaces small enough for a model of under a million parameters to get some right from the start.
    "small": {
        "basic_arithmetic": {
            "min_terms": 2,
            "max_terms": 2,
            "min_digits": 1,
            "max_digits": 1,
            "operators": ["+", "-", "*"],
            "allow_parentheses": False,
            "allow_negation": False,
        },
        "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        "fraction_simplification": {
            "min_value": 1,
            "max_value": 6,
            "min_factor": 2,
            "max_factor": 5,
            "styles": ["plain"],
        },
        "gcd": {"min_value": 1, "max_value": 24},
        "lcm": {"min_value": 1, "max_value": 10},
        "count_bits": {"min_n": 1, "max_n": 63},
        "products": {"min_digits": 1, "max_digits": 1},
    },
    # The nine of "Sharing is Caring" (SAPO, arXiv:2509.08721), with the library's defaults.
    "sapo": {
        "base_conversion": {},
        "basic_arithmetic": {},
        "arc_1d": {},
        "bf": {},
        "propositional_logic": {},
        "fraction_simplification": {},
        "decimal_arithmetic": {},
        "calendar_arithmetic": {},
        "binary_matrix": {},
    },
}
"""Set -> environment -> options."""
