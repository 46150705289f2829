"""What people, probes and scrapers ask: the served model, health, readiness, version, metrics, the API's description.

Knows nothing about requests.
"""

import importlib.metadata
import json

from starlette.responses import Response

from core.errors import ModelNotFoundError
from router.metrics import CONTENT_TYPE
from router.protocol.base import AnswerModel, ModelCard, ModelList
from router.protocol.openapi import build_document
from router.protocol.operations import HealthReport, ReadyReport, VersionReport
from router.service import RouterService

_READY_RETRY_AFTER_S = 2
"""Told to who asks a router that is not ready."""


class OperateEndpoints:
    """See above."""

    def __init__(self, service: RouterService) -> None:
        self._service = service
        self._document = json.dumps(build_document(_version()))

    async def models(self) -> Response:
        return _answer(ModelList(object="list", data=[self._card()]))

    async def model(self, model: str) -> Response:
        if model != self._service.model_name:
            raise ModelNotFoundError(model=model[:256], served=self._service.model_name)
        return _answer(self._card())

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
        return _answer(HealthReport(status="ok"))

    async def ready(self) -> Response:
        service = self._service
        is_ready = service.is_ready()
        report = ReadyReport(
            ready=is_ready,
            mode=service.mode,
            draining=service.is_draining,
            workers=service.num_workers_ready(),
            pairs=service.num_pairs(),
            refusals=service.pool.refusals(),
        )
        response = _answer(report, 200 if is_ready else 503)
        if not is_ready:
            response.headers["retry-after"] = str(_READY_RETRY_AFTER_S)
        return response

    async def metrics(self) -> Response:
        return Response(self._service.render_metrics(), media_type=CONTENT_TYPE)

    async def version(self) -> Response:
        return _answer(VersionReport(version=_version()))

    async def openapi(self) -> Response:
        return Response(self._document, media_type="application/json")


def _version() -> str:
    try:
        return importlib.metadata.version("pdcluster")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"


def _answer(report: AnswerModel, status: int = 200) -> Response:
    return Response(report.to_json(), status_code=status, media_type="application/json")
