"""/docs: Swagger UI served from the installed package, so that it works in a closed cluster."""

from typing import Any

import swagger_ui_bundle
from fastapi import APIRouter, FastAPI, HTTPException
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import FileResponse, HTMLResponse

from services.aggregator.api import metric_docs
from services.aggregator.api.problems import Problem
from services.aggregator.metric import Catalogue

FILES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}
"""All that the page needs; the package's other files name hosts of the internet."""

OPENAPI_VERSION = "3.0.3"
"""The newest that the bundled Swagger UI (4.15) renders; FastAPI writes 3.1."""

router = APIRouter(include_in_schema=False)


@router.get("/docs")
def page() -> HTMLResponse:
    """Swagger UI. Its addresses are relative: it also works behind a path prefix."""
    return get_swagger_ui_html(
        openapi_url="openapi.json",
        title="Headrace aggregator",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon-32x32.png",
        # Without this the page asks a validator on the internet whether the document is valid.
        swagger_ui_parameters={"validatorUrl": None},
    )


@router.get("/docs/{name}")
def static(name: str) -> FileResponse:
    """One of the page's files."""
    if name not in FILES:
        raise HTTPException(404)
    return FileResponse(swagger_ui_bundle.swagger_ui_path / name, media_type=FILES[name])


def install(app: FastAPI, catalogue: Catalogue) -> None:
    """Serve the documentation, and describe the application in the version that it renders."""
    app.include_router(metric_docs.router(catalogue))  # first: /docs/{name} would take its address
    app.include_router(router)

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                openapi_version=OPENAPI_VERSION,
                routes=app.routes,
            )
            document["components"]["schemas"]["Problem"] = Problem.model_json_schema()
            app.openapi_schema = _downgraded(document)
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]


def _downgraded(node: Any) -> Any:
    """OpenAPI 3.1 as 3.0: `anyOf: [X, null]` becomes a nullable X, `const` an `enum` of one, an
    exclusive minimum a flag beside the minimum.
    """
    if isinstance(node, list):
        return [_downgraded(each) for each in node]
    if not isinstance(node, dict):
        return node
    node = {key: _downgraded(value) for key, value in node.items()}
    if "itemSchema" in node:
        node["schema"] = {"type": "string"}
        del node["itemSchema"]
    if "const" in node:
        node["enum"] = [node.pop("const")]
    if "exclusiveMinimum" in node and not isinstance(node["exclusiveMinimum"], bool):
        node |= {"minimum": node["exclusiveMinimum"], "exclusiveMinimum": True}
    variants = node.get("anyOf")
    if isinstance(variants, list) and {"type": "null"} in variants:
        others = [each for each in variants if each != {"type": "null"}]
        node["nullable"] = True
        if len(others) == 1:
            del node["anyOf"]
            node |= {"allOf": others} if "$ref" in others[0] else others[0]
        else:
            node["anyOf"] = others
    return node
