"""The HTTP surface: routes, the error envelope, request ids. Everything behind it is `router.service`.

Knows nothing about how requests are served.
"""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.errors import PdclusterError
from router.endpoints import AbortEndpoint, BodyWork, GenerateEndpoints, TokenEndpoints
from router.incoming import REQUEST_ID_HEADER, request_id_of
from router.openai import RequestPreparer
from router.operate import OperateEndpoints
from router.protocol.base import ErrorResponse
from router.protocol.operations import OPERATIONS
from router.service import RouterService

STATUS_CLIENT_GONE = 499
"""Of a response that nobody reads."""

_ERROR_TYPES = {404: "NotFoundError", 405: "MethodNotAllowedError"}

Handler = Callable[..., Awaitable[Response]]


def build_app(service: RouterService) -> FastAPI:
    """The application of one started router."""
    app = FastAPI(title="pdcluster", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    handlers = _handlers(service)
    for operation in OPERATIONS:
        path = operation.path.replace("{model}", "{model:path}")
        app.add_api_route(path, handlers.pop(operation.name), methods=[operation.method], response_model=None)
    assert not handlers, f"handlers without a route: {sorted(handlers)}"
    app.add_exception_handler(PdclusterError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(RequestIdMiddleware)
    return app


def _handlers(service: RouterService) -> dict[str, Handler]:
    """By the name of their operation."""
    work = BodyWork(service)
    preparer = RequestPreparer(service.text, service.model_name)
    generate = GenerateEndpoints(service, preparer, work)
    tokens = TokenEndpoints(service, preparer, work)
    operate = OperateEndpoints(service)
    return {
        "completions": generate.completions,
        "chat_completions": generate.chat_completions,
        "tokenize": tokens.tokenize,
        "detokenize": tokens.detokenize,
        "abort": AbortEndpoint(service, work).abort,
        "models": operate.models,
        "model": operate.model,
        "health": operate.health,
        "ready": operate.ready,
        "version": operate.version,
        "metrics": operate.metrics,
        "openapi": operate.openapi,
    }


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
