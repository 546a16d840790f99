"""Base class of the sections of the configuration, and patterns of texts."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from swarm_protocol.limits import MAX_NAME_CHARS


class Section(BaseModel):
    """A section of the configuration. Unknown keys are errors; the string after a field documents it."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """Key -> the string after its field. (`use_attribute_docstrings` of pydantic reads the whole file again for
        each of its classes, which takes a tenth of a second at the start of every command.)"""
        return _meanings(cls.__module__)[cls.__name__]


@cache
def _meanings(module: str) -> dict[str, dict[str, str]]:
    """Class of that module -> field -> the string after it."""
    found: dict[str, dict[str, str]] = {}
    for cls in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(cls, ast.ClassDef):
            found[cls.name] = {}
            for pair in pairwise(cls.body):
                match pair:
                    case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[cls.name][key] = inspect.cleandoc(text)
    return found


TOGETHER = "together"  # type of a validation error about several keys whose values contradict each other

NAME_PATTERN = r"^[A-Za-z0-9._-]+$"
NAME_OR_NONE = r"^[A-Za-z0-9._-]*$"
CODE = r"^[^:]+:[A-Za-z_][A-Za-z0-9_]*$"
URL_OR_NONE = r"^([a-z][a-z0-9+]*://\S+)?$"
HOST_OR_NONE = r"^([A-Za-z0-9.-]+(:[0-9]{1,5})?)?$"
HOURS_OR_NONE = r"^(([01][0-9]|2[0-3]):[0-5][0-9]-([01][0-9]|2[0-3]):[0-5][0-9])?$"
HOST_NAME = r"^([A-Za-z0-9._-]+|\*)$"
IN_WORDS = {  # pattern -> message about a text that does not match it
    NAME_PATTERN: f"must be letters, digits, '.', '_' and '-', at most {MAX_NAME_CHARS}",
    NAME_OR_NONE: f"must be letters, digits, '.', '_' and '-', at most {MAX_NAME_CHARS}",
    CODE: "must be package.module:function or file.py:function",
    URL_OR_NONE: "must be a URL such as s3://bucket/folder",
    HOST_OR_NONE: "must be HOST or HOST:PORT",
    HOURS_OR_NONE: "must be FROM-TO, as 22:00-07:00",
    HOST_NAME: "must be a name without a port, or *",
}
Plugin = Annotated[str, Field(pattern=CODE)]  # code of the user: `package.module:function` or `file.py:function`
