"""Environments of a recipe, started and closed, for tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from services.generator.environments import EnvironmentKind, Environments, Instance
from tests.services.generator.fakes import recipe_of

HERE = "tests.services.generator.environment_classes"


def entry(found: str, **more: Any) -> dict[str, Any]:
    return {"environment": f"{HERE}:{found}", **more}


def environments_of(
    *names: str | dict[str, Any],
    max_inflight: int = 4,
    timeout_s: float = 60.0,
    column: str | None = None,
    taken: tuple[str, ...] = (),
) -> Environments:
    classes = [entry(name) if isinstance(name, str) else name for name in names]
    section: dict[str, Any] = {"classes": classes, "timeout_s": timeout_s}
    if column is not None:
        section["column"] = column
    recipe = recipe_of(environments=section, generator={"max_inflight": max_inflight})
    return Environments(recipe, taken=taken)


@asynccontextmanager
async def running(*names: str | dict[str, Any], **more: Any) -> AsyncIterator[Environments]:
    environments = environments_of(*names, **more)
    try:
        await environments.start()
        yield environments
    finally:
        await environments.close()
    assert environments.live == environments.idle == 0


def only(environments: Environments) -> EnvironmentKind:
    kind = environments.choose({})
    assert kind is not None
    return kind


async def begun(
    environments: Environments, kind: EnvironmentKind | None = None, **row: Any
) -> Instance:
    instance = await environments.acquire(kind or only(environments))
    await instance.reset(row)
    return instance
