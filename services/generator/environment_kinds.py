"""The recipe's environments, found, read and checked before anything runs.

A user's class has a constructor that takes the recipe's `params`; `reset(**row)`, which gets the
dataset row's columns (those that its signature takes), puts the instance into its first state
whatever was before, since instances are used again, and returns an observation or None; and public
methods, which are what the model can call. Optional: `get_reward()`, asked once at the end; a plain
attribute or property `done`, true when the episode is over; and `close()`. Either all methods are
`async def` or none is.
"""

import inspect
import json
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from services.common import plugins
from services.common.config import Recipe
from services.common.errors import UserError
from services.common.generation_config import EnvironmentClass
from services.generator.environment_hosts import Blueprint
from services.generator.openenv_client import OpenEnvServer, Remote
from services.generator.parsing import NAME
from services.generator.tool_schema import is_async, schema_of
from services.generator.types import EnvironmentFailed

OWN = ("reset", "get_reward", "close")
"""Public methods that are ours to call, not the model's."""

OPENENV = "openenv"
"""`environment = "openenv"`: instances live on a server."""


@dataclass(frozen=True)
class EnvironmentKind:
    """One entry of `environments.classes`."""

    name: str
    """As the dataset's column spells it."""
    key: str
    """`environments.classes[i]`."""
    signatures: Mapping[str, inspect.Signature]
    """What each method takes, without `self`."""
    schemas: tuple[dict[str, Any], ...]
    """The methods, as chat templates take tools."""
    has_reward: bool
    """It says what an episode was worth."""
    reset: inspect.Signature
    blueprint: Blueprint | None = None
    """Of a user's class."""
    in_loop: bool = False
    """Its methods are `async def`."""
    server: OpenEnvServer | None = None
    """Where its instances live, for "openenv"."""
    remote: Remote | None = None
    """What that server offers, once it has been asked."""

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of what the model can call."""
        return tuple(self.signatures)

    @property
    def reused(self) -> bool:
        """A healthy instance serves the next conversation. On a server each has a new session: one
        that waits for its next conversation would take the place of another replica's."""
        return self.server is None

    def signature(self, name: str) -> inspect.Signature:
        """What a method takes, without `self`."""
        return self.signatures[name]

    def reset_arguments(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The columns that `reset` takes; all of them where it has `**kwargs`. Raises
        EnvironmentFailed where the row lacks one that it needs."""
        parameters = self.reset.parameters.values()
        needs = [
            p.name
            for p in parameters
            if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        missing = [name for name in needs if name not in row]
        if missing:
            raise EnvironmentFailed(
                f"environment {self.name}: reset needs {', '.join(missing)}, and the row has only "
                f"the columns {', '.join(sorted(row)) or '(none)'}"
            )
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return dict(row)
        return {name: value for name, value in row.items() if name in self.reset.parameters}


def read_kinds(recipe: Recipe, *, taken: Collection[str]) -> list[EnvironmentKind]:
    """All of the recipe's environments, in its order. Raises UserError for the first that cannot be
    used, naming its key. `taken` are names of tools, which no method may have.
    """
    kinds = []
    for position, entry in enumerate(recipe.environments.classes):
        key, name = f"environments.classes[{position}]", recipe.environments.name_of(position)
        if entry.environment == OPENENV:
            kinds.append(_read_server(entry, key=key, name=name))
            continue
        if ":" not in entry.environment:
            raise UserError(
                f'{key}.environment: {entry.environment!r} is neither module:Class nor "{OPENENV}"'
            )
        kind = _read_class(entry, key=key, name=name)
        check_names(kind, taken)
        kinds.append(kind)
    return kinds


def check_names(kind: EnvironmentKind, taken: Collection[str]) -> None:
    """Raise UserError for a method that is called like a tool, or as no model can call it."""
    for method in kind.methods:
        if not NAME.fullmatch(method):
            raise UserError(f"{kind.key}: the name {method!r} must match {NAME.pattern}")
        if method in taken:
            raise UserError(
                f"{kind.key}: the environment's method {method} has the name of a tool of "
                "tools.functions; rename one"
            )


def offered_by(kind: EnvironmentKind, remote: Remote) -> EnvironmentKind:
    """A server's kind with the tools that it has declared."""
    return EnvironmentKind(
        name=kind.name,
        key=kind.key,
        signatures={tool.name: tool.signature for tool in remote.tools},
        schemas=tuple(tool.schema for tool in remote.tools),
        has_reward=True,
        reset=kind.reset,
        server=kind.server,
        remote=remote,
    )


def _read_server(entry: EnvironmentClass, *, key: str, name: str) -> EnvironmentKind:
    try:
        server = OpenEnvServer.model_validate(entry.params)
    except ValidationError as error:
        mistake = error.errors()[0]
        where = ".".join([f"{key}.params", *(str(part) for part in mistake["loc"])])
        raise UserError(f"{where}: {mistake['msg'].removeprefix('Value error, ')}") from None
    return EnvironmentKind(
        name=name,
        key=key,
        signatures={},
        schemas=(),
        has_reward=True,
        reset=inspect.Signature([inspect.Parameter("row", inspect.Parameter.VAR_KEYWORD)]),
        server=server,
    )


def _read_class(entry: EnvironmentClass, *, key: str, name: str) -> EnvironmentKind:
    found = plugins.load(entry.environment, f"{key}.environment")
    if not inspect.isclass(found):
        raise UserError(f"{key}.environment: {entry.environment!r} is not a class")
    if inspect.isabstract(found):
        raise UserError(f"{key}.environment: {entry.environment!r} is abstract")
    _check_params(found, entry.params, key)
    public = _public_methods(found)
    if "reset" not in public:
        raise UserError(f"{key}.environment: {entry.environment!r} has no method reset")
    if "done" in public:
        raise UserError(
            f"{key}.environment: {entry.environment!r}: done is an attribute or a property, not a "
            "method"
        )
    methods = {method: call for method, call in public.items() if method not in OWN}
    return EnvironmentKind(
        name=name,
        key=key,
        signatures={method: inspect.signature(call) for method, call in methods.items()},
        schemas=tuple(schema_of(call, f"{key}: {method}") for method, call in methods.items()),
        has_reward="get_reward" in public,
        reset=inspect.signature(public["reset"]),
        blueprint=Blueprint(
            name=name,
            reference=entry.environment,
            make=found,
            params=entry.params,
            closes="close" in public,
        ),
        in_loop=_all_async(public, f"{key}.environment: {entry.environment!r}"),
    )


def _public_methods(found: type) -> dict[str, Callable[..., Any]]:
    """Public methods by name, those of base classes first, in the order of their definition; each
    takes what a caller gives, without `self`."""
    methods: dict[str, Callable[..., Any]] = {}
    for base in reversed(found.__mro__):
        for name in vars(base):
            if name.startswith("_") or base is object:
                continue
            attribute = inspect.getattr_static(found, name)
            if isinstance(attribute, staticmethod | classmethod):
                methods[name] = getattr(found, name)
            elif inspect.isfunction(attribute):
                # Bound to something, which takes `self` away without an instance.
                methods[name] = types.MethodType(attribute, object())
    return methods


def _all_async(public: Mapping[str, Callable[..., Any]], what: str) -> bool:
    asynchronous = sorted(name for name, m in public.items() if is_async(m))
    if asynchronous and len(asynchronous) < len(public):
        rest = ", ".join(sorted(public.keys() - set(asynchronous)))
        raise UserError(
            f"{what}: either all methods are async or none is; {', '.join(asynchronous)} are, "
            f"{rest} are not"
        )
    return bool(asynchronous)


def _check_params(found: type, params: Mapping[str, Any], key: str) -> None:
    try:
        inspect.signature(found).bind(**params)
    except TypeError as error:
        raise UserError(f"{key}.params: {found.__name__}: {error}") from None
    for name, value in params.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise UserError(f"{key}.params.{name}: write it as text or number: {error}") from None
