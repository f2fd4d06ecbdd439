"""Who may ask: everyone, or whoever shows what is configured.

A bearer token is asked for where there is one. Where there are certificates and no token, the
client's certificate is what lets it in; with both, the token is (browsers and curl have no
certificates of a cluster's).
"""

from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, HTTPException, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from services.common.tokens import Tokens

BEARER = HTTPBearer(
    auto_error=False, description="The token in network.token_file, where one is configured."
)

Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)]


def check(
    tokens: Tokens | None, *, needs_certificate: bool = False
) -> Callable[[Request, Credentials], None]:
    """The dependency that refuses requests without a token; without tokens, where
    `needs_certificate`, those without a client's certificate.
    """

    def checked(request: Request, credentials: Credentials) -> None:
        if tokens is not None:
            given = credentials.credentials if credentials is not None else ""
            if not tokens.accepts(given):
                raise HTTPException(
                    401,
                    "a bearer token is needed: send Authorization: Bearer TOKEN, with the token of "
                    "the recipe's network.token_file",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        elif needs_certificate and not getattr(request.state, "certified", False):
            raise HTTPException(
                403,
                "a client's certificate is needed, signed by one of network.tls_ca_file; or have "
                "the aggregator take tokens: set network.token_file",
            )

    return checked
