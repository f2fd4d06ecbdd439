"""The page's files as the server sends them; needs no browser."""

import gzip
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.api.page import FOLDER, POLICY, read_files
from services.aggregator.catalogue import CATALOGUE
from services.aggregator.store import Store
from services.common.tokens import Tokens

OWN = sorted(path for path in FOLDER.rglob("*.js") if "vendor" not in path.parts)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx.AsyncClient]:
    opened = Store.open(f"sqlite:///{tmp_path / 'metrics.sqlite'}")
    with ThreadPoolExecutor(1) as writer:
        app = create_app(Backend(opened, CATALOGUE, writer), tokens=Tokens("secret"))
        yield httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://aggregator")
    opened.close()


async def test_the_page_needs_no_token_and_its_data_does(client: httpx.AsyncClient) -> None:
    page = await client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert (await client.get("/ui/main.js")).status_code == 200
    assert (await client.get("/api/v1/runs")).status_code == 401


async def test_every_file_forbids_all_but_our_own(client: httpx.AsyncClient) -> None:
    for path in ("/", *(f"/ui/{name}" for name in read_files())):
        headers = (await client.get(path)).headers
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in POLICY


async def test_all_that_the_page_names_is_there(client: httpx.AsyncClient) -> None:
    page = (await client.get("/")).text
    names = re.findall(r'(?:href|src)="(ui/[^"]+)"', page)
    assert "ui/main.js" in names
    for name in names:
        assert (await client.get(f"/{name}")).status_code == 200, name


def test_modules_import_files_that_exist() -> None:
    for path in OWN:
        for name in re.findall(r'from "(\.[^"]+)"', path.read_text()):
            assert (path.parent / name).resolve().is_file(), f"{path.name} imports {name}"


async def test_a_file_that_is_known_is_not_sent_again(client: httpx.AsyncClient) -> None:
    first = await client.get("/ui/vendor/uPlot.esm.js", headers={"Accept-Encoding": "gzip"})
    assert first.headers["content-encoding"] == "gzip"
    assert first.content == (FOLDER / "vendor/uPlot.esm.js").read_bytes()
    again = await client.get(
        "/ui/vendor/uPlot.esm.js", headers={"If-None-Match": first.headers["etag"]}
    )
    assert (again.status_code, again.content) == (304, b"")
    plain = await client.get("/ui/vendor/uPlot.esm.js", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert len(gzip.compress(plain.content)) < len(plain.content) / 3


@pytest.mark.parametrize("path", ["nothing.js", "../api/page.py", "%2e%2e/api/page.py", "pages"])
async def test_nothing_else_is_served(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(f"/ui/{path}")).status_code in (401, 404)


def test_a_package_without_its_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"index\.html"):
        read_files(tmp_path)


def test_the_licence_of_what_is_vendored_is_there() -> None:
    assert "MIT" in (FOLDER / "vendor/uPlot-LICENSE.txt").read_text()
