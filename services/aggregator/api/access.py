"""Who may ask: everyone, or whoever sends the bearer token when one is configured."""

import hmac
from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, HTTPException
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

BEARER = HTTPBearer(
    auto_error=False, description="The token in network.token_file, where one is configured."
)

Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)]


def token_check(token: str | None) -> Callable[[Credentials], None]:
    """The dependency that refuses requests without the token; none when `token` is None."""

    def check(credentials: Credentials) -> None:
        if token is None:
            return
        given = credentials.credentials if credentials is not None else ""
        if not hmac.compare_digest(given.encode(), token.encode()):
            raise HTTPException(
                401,
                "a bearer token is needed: send Authorization: Bearer TOKEN, with the token of the "
                "recipe's network.token_file",
                headers={"WWW-Authenticate": "Bearer"},
            )

    return check
