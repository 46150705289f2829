"""The HTTP surface: routes, the error envelope, request ids. Everything behind it is `router.service`.

Knows nothing about how requests are served.
"""

import importlib.metadata
import re
import uuid

import msgspec
from fastapi import FastAPI, Request
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.errors import ModelNotFoundError, PdclusterError
from router.endpoints import GenerateEndpoints
from router.metrics import CONTENT_TYPE
from router.openai import RequestPreparer
from router.protocol.base import ErrorResponse, ModelCard, ModelList
from router.service import RouterService

REQUEST_ID_HEADER = "x-request-id"
STATUS_CLIENT_GONE = 499
"""Of a response that nobody reads."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_ERROR_TYPES = {404: "NotFoundError", 405: "MethodNotAllowedError"}


def build_app(service: RouterService) -> FastAPI:
    """The application of one started router."""
    app = FastAPI(title="pdcluster", docs_url=None, redoc_url=None, openapi_url=None)
    generate = GenerateEndpoints(service, RequestPreparer(service.text, service.model_name))
    operate = OperateEndpoints(service)
    app.add_api_route("/v1/completions", generate.completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", generate.chat_completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", operate.models, methods=["GET"], response_model=None)
    app.add_api_route("/v1/models/{model:path}", operate.model, methods=["GET"], response_model=None)
    app.add_api_route("/health", operate.health, methods=["GET"], response_model=None)
    app.add_api_route("/ready", operate.ready, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", operate.metrics, methods=["GET"], response_model=None)
    app.add_api_route("/version", operate.version, methods=["GET"], response_model=None)
    app.add_exception_handler(PdclusterError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(RequestIdMiddleware)
    return app


class OperateEndpoints:
    """What people, probes and scrapers ask."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    async def models(self) -> Response:
        return _json(ModelList(object="list", data=[self._card()]).to_json())

    async def model(self, model: str) -> Response:
        if model != self._service.model_name:
            raise ModelNotFoundError(model=model, served=self._service.model_name)
        return _json(self._card().to_json())

    def _card(self) -> ModelCard:
        return ModelCard(
            id=self._service.model_name,
            object="model",
            created=int(self._service.started_wall_s),
            owned_by="pdcluster",
            max_model_len=self._service.pool.max_model_len(),
        )

    async def health(self) -> Response:
        """This process answers. Whether it can serve is asked at /ready."""
        return _json('{"status":"ok"}')

    async def ready(self) -> Response:
        service = self._service
        is_ready = service.is_ready()
        body = {
            "ready": is_ready,
            "mode": service.mode,
            "draining": service.is_draining,
            "workers": service.num_workers_ready(),
            "pairs": service.num_pairs(),
            "refusals": service.pool.refusals(),
        }
        return _json(msgspec.json.encode(body), 200 if is_ready else 503)

    async def metrics(self) -> Response:
        return Response(self._service.render_metrics(), media_type=CONTENT_TYPE)

    async def version(self) -> Response:
        return _json(msgspec.json.encode({"version": _version()}))


class RequestIdMiddleware:
    """Echoes the client's X-Request-Id on every answer, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(scope: Scope) -> str:
    """The client's request id if it is printable and of reasonable length, else a new one."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER.encode() and _REQUEST_ID.fullmatch(value.decode("latin-1")):
            return str(value.decode("latin-1"))
    return uuid.uuid4().hex


def _version() -> str:
    try:
        return importlib.metadata.version("pdcluster")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"


def _json(text: str | bytes, status: int = 200) -> Response:
    return Response(text, status_code=status, media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PdclusterError)
    response = _json(ErrorResponse.of(error).to_json(), error.http_status)
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        response.headers["retry-after"] = str(retry_after_s)
    return response


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = _ERROR_TYPES.get(error.status_code, "BadRequestError")
    message = f"{error.detail}: {request.method} {request.url.path[:128]}"
    body = ErrorResponse.make(message=message, type=kind, code=error.status_code)
    response = _json(body.to_json(), error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=STATUS_CLIENT_GONE)


async def _on_bug(request: Request, error: Exception) -> Response:
    """The details go to the log, not to the client."""
    body = ErrorResponse.make(message="Internal server error.", type="InternalServerError", code=500)
    response = _json(body.to_json(), 500)
    response.headers[REQUEST_ID_HEADER] = request_id_of(request.scope)
    return response
