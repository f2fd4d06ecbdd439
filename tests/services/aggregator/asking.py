"""Asking the REST interface, and what its answers must be."""

import json
from typing import Any

import httpx


def strict(response: httpx.Response) -> Any:
    """The JSON of a good answer, refusing the words that JSON has not."""
    assert response.status_code == 200, response.text
    return strict_json(response.text)


def strict_json(text: str) -> Any:
    """The JSON of a text, refusing the words that JSON has not."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


async def problem(client: httpx.AsyncClient, path: str, status: int) -> str:
    """The detail of a problem."""
    response = await client.get(path)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    said = response.json()
    assert said["status"] == status
    detail: str = said["detail"]
    return detail
