"""The page at `/`: the dashboard's own files, as they are in the package.

They are the same for everyone and hold no data, so they need no token; the page sends it with each
question to the API. Nothing is fetched from another host, and the browser is told to refuse it.
"""

import gzip
import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Header, HTTPException, Response

FOLDER = Path(__file__).parent.parent / "ui"

MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""By a file's ending; a file of another kind is not served."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy: no script or style but our files, no other host, in no frame."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Ask each time whether the file is still the same: modules of two versions do not mix.
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}


class File(NamedTuple):
    """A file of the page, as it is sent."""

    media_type: str
    plain: bytes
    compressed: bytes
    tag: str
    """ETag of its content."""


def read_files(folder: Path = FOLDER) -> Mapping[str, File]:
    """The page's files by their path below `folder`, as "vendor/uPlot.esm.js".

    Raises FileNotFoundError where there is no index.html: the package is not whole.
    """
    files = {}
    for path in sorted(folder.rglob("*")):
        media_type = MEDIA_TYPES.get(path.suffix)
        if media_type is not None and path.is_file():
            plain = path.read_bytes()
            tag = f'"{hashlib.sha256(plain).hexdigest()[:32]}"'
            compressed = gzip.compress(plain, mtime=0)
            files[path.relative_to(folder).as_posix()] = File(media_type, plain, compressed, tag)
    if "index.html" not in files:
        raise FileNotFoundError(f"{folder / 'index.html'}: the package lacks the page's files")
    return MappingProxyType(files)


def router() -> APIRouter:
    """The endpoints of the page's files."""
    routes = APIRouter(include_in_schema=False)
    files = read_files()

    @routes.get("/")
    async def page(
        if_none_match: Annotated[str | None, Header()] = None,
        accept_encoding: Annotated[str, Header()] = "",
    ) -> Response:
        return _respond(files["index.html"], if_none_match, accept_encoding)

    @routes.get("/ui/{path:path}")
    async def file(
        path: str,
        if_none_match: Annotated[str | None, Header()] = None,
        accept_encoding: Annotated[str, Header()] = "",
    ) -> Response:
        if path not in files:
            raise HTTPException(404)
        return _respond(files[path], if_none_match, accept_encoding)

    return routes


def _respond(file: File, if_none_match: str | None, accept_encoding: str) -> Response:
    headers = {**HEADERS, "ETag": file.tag}
    if if_none_match is not None and file.tag in if_none_match:
        return Response(status_code=304, headers=headers)
    if "gzip" in accept_encoding:
        headers["Content-Encoding"] = "gzip"
        return Response(file.compressed, media_type=file.media_type, headers=headers)
    return Response(file.plain, media_type=file.media_type, headers=headers)
