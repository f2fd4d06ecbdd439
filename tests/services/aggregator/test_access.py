"""Who is let in by the REST interface: every route, also those that the document does not list."""

from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.routing import Mount, Route

from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.store import Store
from services.common.errors import UserError
from services.common.tokens import FileTokens, Tokens
from tests.services.aggregator import postgres

SAME_FOR_EVERYONE = {"/", "/healthz", "/readyz", "/docs", "/docs/metrics", "/openapi.json"}

PASSWORD = "database-Kq3wN8"


async def test_no_route_answers_without_a_token_but_what_is_the_same_for_everyone(
    backend: Backend,
) -> None:
    app = create_app(backend, tokens=Tokens("s3cret"))
    asked: set[str] = set()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://aggregator") as client:
        for route in app.routes:
            if isinstance(route, Mount):
                # Files of the documentation.
                assert route.path.startswith("/docs")
                continue
            assert isinstance(route, APIRoute | Route)
            path = route.path
            for name in route.param_convertors:
                path = path.replace(f"{{{name}:path}}", "1").replace(f"{{{name}}}", "1")
            for method in route.methods or ():
                for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
                    status = (await client.request(method, path, headers=headers)).status_code
                    if path in SAME_FOR_EVERYONE:
                        assert status == 200, (method, path)
                    elif path.startswith(("/docs/", "/ui/")):  # files; there is none named 1
                        assert status == 404, (method, path)
                    else:
                        assert status == 401, (method, path, headers)
                        asked.add(path)
    assert len(asked) > 15
    assert "/metrics" in asked


async def test_a_token_is_replaced_while_the_server_runs(backend: Backend, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old")
    transport = httpx.ASGITransport(create_app(backend, tokens=FileTokens(file)))
    async with httpx.AsyncClient(transport=transport, base_url="http://aggregator") as client:

        async def status(token: str) -> int:
            headers = {"Authorization": f"Bearer {token}"}
            return (await client.get("/api/v1/runs", headers=headers)).status_code

        assert [await status("old"), await status("new")] == [200, 401]
        file.write_text("new\nold\n")
        assert [await status("old"), await status("new")] == [200, 200]
        file.write_text("new")
        assert [await status("old"), await status("new")] == [401, 200]


def test_a_database_asks_for_the_password_of_the_file() -> None:
    programs = postgres.binaries()
    if programs is None:
        pytest.skip("no PostgreSQL server is installed")
    with postgres.server(programs, password=PASSWORD) as url:
        Store.open(f"{url}/postgres", password=PASSWORD).close()
        for password in ("wrong-Zp6", None):
            with pytest.raises(UserError, match=r"aggregator\.database: cannot be op") as refused:
                Store.open(f"{url}/postgres", password=password)
            assert PASSWORD not in str(refused.value)
            assert "wrong-Zp6" not in str(refused.value)
