"""Every operating error of the cluster. A class's docstring is its message template; `{name}` fields come from the
constructor.

Knows nothing about HTTP bodies: `http_status` and `error_type` are facts that the HTTP layer reads. Imports nothing
but the standard library, so that a worker, a router and a test can share it without any other part of the project.
"""

from typing import ClassVar, Literal


class PdclusterError(Exception):
    """{message}"""

    http_status: ClassVar[int] = 500
    error_type: ClassVar[str] = "InternalServerError"
    retryable: ClassVar[bool] = False

    def __init__(self, **fields: object) -> None:
        self.fields = fields
        template = " ".join((type(self).__doc__ or "{message}").split())
        super().__init__(template.format(**fields))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.fields))


def _rebuild(kind: type[PdclusterError], fields: dict[str, object]) -> PdclusterError:
    return kind(**fields)


class InvalidRequestError(PdclusterError):
    """{message}"""

    http_status = 400
    error_type = "BadRequestError"

    def __init__(self, *, message: str, param: str | None = None) -> None:
        super().__init__(message=message, param=param)
        self.param = param


class UnsupportedFieldError(InvalidRequestError):
    """{message}"""

    def __init__(self, *, field: str, message: str | None = None) -> None:
        text = message or f"The field '{field}' is not supported by this server yet. Remove it from the request."
        super().__init__(message=text, param=field)
        self.fields = {"field": field, "message": message}


class BodyTooLargeError(InvalidRequestError):
    """{message}"""

    http_status = 413
    error_type = "PayloadTooLargeError"


class UnsupportedMediaTypeError(InvalidRequestError):
    """{message}"""

    http_status = 415
    error_type = "UnsupportedMediaTypeError"


class BodyTimeoutError(InvalidRequestError):
    """{message}"""

    http_status = 408
    error_type = "RequestTimeoutError"


class ModelNotFoundError(PdclusterError):
    """The model '{model}' does not exist here. This server serves '{served}'."""

    http_status = 404
    error_type = "NotFoundError"


class OverloadedError(PdclusterError):
    """The server is busy: {reason}. Try again in {retry_after_s} s."""

    http_status = 503
    error_type = "ServiceUnavailable"
    retryable = True

    def __init__(self, *, reason: str, retry_after_s: int = 1) -> None:
        super().__init__(reason=reason, retry_after_s=retry_after_s)
        self.retry_after_s = retry_after_s


class NoWorkerError(PdclusterError):
    """No live {role} worker can take this request. Try again in {retry_after_s} s; `pdcluster status` shows the
    workers.
    """

    http_status = 503
    error_type = "ServiceUnavailable"
    retryable = True

    def __init__(self, *, role: str, retry_after_s: int = 2) -> None:
        super().__init__(role=role, retry_after_s=retry_after_s)
        self.retry_after_s = retry_after_s


class WorkerLostError(PdclusterError):
    """Worker {worker} was lost while it served the request ({phase}). Send the request again."""

    http_status = 503
    error_type = "ServiceUnavailable"
    retryable = True
    retry_after_s = 1


class TransferFailedError(PdclusterError):
    """KV blocks could not be moved from {source} to {target}: {reason}."""

    http_status = 503
    error_type = "ServiceUnavailable"
    retryable = True
    retry_after_s = 1


class TierFilesError(PdclusterError):
    """The file '{file}': {operation} failed: {cause}."""

    retryable = True

    def __init__(
        self, *, file: str, operation: str, cause: str, kind: Literal["missing", "full", "failed"] = "failed"
    ) -> None:
        """`missing`: there is no such file; `full`: the disk has no room; `failed`: anything else."""
        super().__init__(file=file, operation=operation, cause=cause, kind=kind)
        self.kind = kind


class DeadlineExceededError(PdclusterError):
    """The request did not finish {phase} within {limit_s} s."""

    http_status = 504
    error_type = "GatewayTimeout"
    retryable = True


class StalledError(PdclusterError):
    """The request made no progress at {workers} for {limit_s} s ({phase}), although they are alive. Send the request
    again.
    """

    http_status = 503
    error_type = "ServiceUnavailable"
    retryable = True
    retry_after_s = 1


class RequestCancelledError(PdclusterError):
    """The request was cancelled on demand."""

    http_status = 499
    error_type = "RequestCancelled"


class SlowReaderError(PdclusterError):
    """The client reads too slowly: {num_tokens} tokens were waiting for it, at most {limit} may. Read faster, or ask
    for fewer choices at once.
    """

    http_status = 499
    error_type = "SlowReader"


class ConfigError(PdclusterError):
    """{file}:{line}: {key}: {problem}{hint}"""

    def __init__(self, *, file: str, line: int, key: str, problem: str, hint: str = "") -> None:
        super().__init__(file=file, line=line, key=key, problem=problem, hint=f" {hint}" if hint else "")
        self.line, self.key, self.problem, self.hint = line, key, problem, hint
        self.fields = {"file": file, "line": line, "key": key, "problem": problem, "hint": hint}


class ModelLoadError(PdclusterError):
    """Model at {path}: {file}: {field}: {problem}"""


class NumericsError(PdclusterError):
    """`numerics: exact` cannot be kept on this machine: {problem}. Set `numerics: fast`."""


class IncompatiblePeersError(PdclusterError):
    """{source} and {target} cannot exchange KV blocks: {field} is {source_value} on {source} and {target_value} on
    {target}.
    """


class LinkClosedError(PdclusterError):
    """The link to {peer} is closed: {reason}."""

    retryable = True


class LinkOverflowError(PdclusterError):
    """The link to {peer} holds {limit_messages} undelivered messages; the peer does not keep up and is cut."""

    retryable = True


class ClusterError(PdclusterError):
    """Cluster '{name}': {problem}"""


class BenchError(PdclusterError):
    """Bench of {subject}: {problem}"""


class SimulationError(PdclusterError):
    """The simulation cannot go on: {problem}."""


class TraceError(PdclusterError):
    """{place}: {problem}. {remedy}."""


class ProfileError(PdclusterError):
    """Step profile {file}: {problem}. {remedy}."""
