"""Errors as application/problem+json (RFC 9457), each saying what to do."""

from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

MEDIA_TYPE = "application/problem+json"


class Problem(BaseModel):
    """What went wrong and what to do about it."""

    title: str
    """The kind of the problem."""
    status: int
    """The HTTP status."""
    detail: str
    """What is wrong with this request, and what to do."""


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of an endpoint that may answer with these problems."""
    schema = {"schema": {"$ref": "#/components/schemas/Problem"}}
    return {
        status: {"description": HTTPStatus(status).phrase, "content": {MEDIA_TYPE: schema}}
        for status in statuses
    }


def answer(status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """A problem as a response."""
    problem = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail)
    return JSONResponse(
        problem.model_dump(), status_code=status, headers=headers, media_type=MEDIA_TYPE
    )


def install(app: FastAPI) -> None:
    """Answer every error of the application as a problem."""

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        detail = str(error.detail)
        if error.status_code == 404 and detail == HTTPStatus.NOT_FOUND.phrase:
            detail = f"nothing is at {request.url.path}; /docs lists what can be asked"
        return answer(error.status_code, detail, dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        said = [
            f"{'.'.join(str(part) for part in each['loc'][1:])}: {each['msg']}"
            for each in error.errors()
        ]
        return answer(422, "; ".join(said))

    @app.exception_handler(SQLAlchemyError)
    async def unavailable(_request: Request, error: SQLAlchemyError) -> JSONResponse:
        cause = getattr(error, "orig", None) or error
        structlog.get_logger().error("the store failed", cause=str(cause))
        return answer(503, f"the store failed: {cause}; try again")

    @app.exception_handler(Exception)
    async def failed(_request: Request, error: Exception) -> JSONResponse:
        kind = type(error).__name__
        return answer(500, f"a defect of the aggregator ({kind}); its log says more")
