"""What all sections of the recipe have in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, types taken as written (no "10" or `true`
    for the number), infinities refused: a limit that never comes is a hang."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
