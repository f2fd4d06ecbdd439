"""Free ports on this machine, chosen before the processes that will listen on them start."""

import random

from services.common.config import Recipe
from services.common.errors import UserError
from services.common.grpc_kit import PortTaken, check_port_free

RANGE = (20_000, 32_000)
"""Below the ports that systems give to outgoing connections: none of those can take a chosen port
meanwhile.
"""

TRIES = 200
"""Ports tried before giving up."""


def choose(number: int, *, host: str) -> list[int]:
    """`number` different ports that are free now. Raises UserError when none can be found."""
    found: set[int] = set()
    for port in random.sample(range(*RANGE), TRIES):
        if len(found) == number:
            break
        try:
            check_port_free(host, port)
        except PortTaken:
            continue
        found.add(port)
    if len(found) < number:
        raise UserError(f"network.host: no free port on {host}; is it an address of this machine?")
    return list(found)


def check_http_port(recipe: Recipe) -> None:
    """Raise PortTaken when the port that the recipe gives for REST and the page is in use."""
    try:
        check_port_free(recipe.network.host, recipe.aggregator.http_port)
    except PortTaken as error:
        raise PortTaken(f"aggregator.http_port: {error}, or 0 for a free one") from None
