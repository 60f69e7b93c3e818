"""What every section of the file has in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


def text(path: Path | None) -> str | None:
    return None if path is None else str(path)


class Section(BaseModel):
    """A key that is there but empty means "the defaults", as people leave it when all below is commented out."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, value: Any) -> Any:
        return {} if value is None else value
