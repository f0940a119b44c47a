"""One tree of errors. A class's docstring is its default message; its code never changes."""

from __future__ import annotations

from inspect import cleandoc
from typing import Any, ClassVar


class HeadraceError(Exception):
    """Something went wrong."""

    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    """Whether the same request may succeed when it is sent again."""

    def __init__(
        self, message: str = "", *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        self.message = message or cleandoc(type(self).__doc__ or "")
        self.param = param
        self.retry_after_s = retry_after_s
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error body."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class InvalidRequest(HeadraceError):
    """The request is not valid."""

    code = "invalid_request"
    type = "invalid_request_error"
    status = 400


class InvalidJSON(InvalidRequest):
    """The request's body is not valid JSON."""

    code = "invalid_json"


class UnknownModel(InvalidRequest):
    """The model does not exist."""

    code = "model_not_found"
    status = 404


class UnknownRoute(InvalidRequest):
    """There is nothing at this URL."""

    code = "unknown_url"
    status = 404


class UnknownJob(InvalidRequest):
    """There is no job of this id."""

    code = "job_not_found"
    status = 404


class MethodNotAllowed(InvalidRequest):
    """This URL does not take this method."""

    code = "method_not_allowed"
    status = 405


class BodyTooLarge(InvalidRequest):
    """The request's body is too large."""

    code = "body_too_large"
    status = 413


class UnsupportedMediaType(InvalidRequest):
    """The request's content type is not supported here."""

    code = "unsupported_media_type"
    status = 415


class Unavailable(HeadraceError):
    """The service cannot take this request now."""

    code = "unavailable"
    status = 503
    retryable = True


class QueueFull(Unavailable):
    """The queue is full. Try again later."""

    code = "queue_full"


class NoWorker(Unavailable):
    """No worker is ready for this model. Start one (`headrace-worker`), or try again later."""

    code = "no_worker"


class QueueUnavailable(Unavailable):
    """The queue cannot be reached. Try again later."""

    code = "queue_unavailable"


class LanesLost(QueueUnavailable):
    """The queue has lost its data. Try again later."""

    code = "lanes_lost"


class TransitionFailed(HeadraceError):
    """A step in the queue failed."""

    code = "transition_failed"


class Draining(Unavailable):
    """This server is shutting down. Try again."""

    code = "draining"


class RequestTimeout(HeadraceError):
    """The request was not finished within its time limit."""

    code = "request_timeout"
    type = "timeout_error"
    status = 504


class Cancelled(HeadraceError):
    """The request was cancelled."""

    code = "cancelled"
    type = "cancelled_error"
    status = 499


class EngineFailed(HeadraceError):
    """The model's engine failed while it worked on the request."""

    code = "engine_error"
    retryable = True


class WorkerLost(HeadraceError):
    """The worker that ran the request was lost."""

    code = "worker_lost"
    retryable = True


class Poisoned(HeadraceError):
    """The request has cost several workers and is not tried again."""

    code = "poisoned"


class JobLost(HeadraceError):
    """The request was lost with the queue's data."""

    code = "job_lost"
    retryable = True


class Diverged(HeadraceError):
    """The answer cannot be continued without repeating or losing tokens."""

    code = "diverged"
    retryable = True


class AnswerTooLarge(HeadraceError):
    """The answer is too large to be relayed."""

    code = "answer_too_large"


def tree(root: type[HeadraceError]) -> list[type[HeadraceError]]:
    """Return an error and all that are of its kind and known by now."""
    return [root, *(c for child in root.__subclasses__() for c in tree(child))]


BY_CODE: dict[str, type[HeadraceError]] = {cls.code: cls for cls in tree(HeadraceError)}
"""Every error by its code, for errors that come out of a terminal frame."""
