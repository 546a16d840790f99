"""What every part of the configuration is."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, a field's docstring is its documentation."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


TOGETHER = "together"
"""Kind of error that only a whole configuration can have: of keys whose values do not go together."""

Outside = Annotated[str, Field(pattern=r"^[^:]+:[A-Za-z_][A-Za-z0-9_]*$")]
"""`package.module:function` or `file.py:function`: code of the user's own."""
