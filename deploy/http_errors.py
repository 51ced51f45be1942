"""OpenAI-shaped errors: `{"error": {"message", "type", "param", "code"}}`, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from spectrue.workers.core import cut, shown
from spectrue.workers.errors import (
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
    SpectrueError,
)

logger = logging.getLogger(__name__)

OVERLOADED_RETRY_AFTER = 1  # seconds
DEAD_RETRY_AFTER = 5  # about what a replica needs to be replaced


class ApiError(Exception):
    """An answer other than 200. Everything that can go wrong becomes one before it is sent."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = None if param is None else cut(param)  # a client's key may be long
        self.code = code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, dict[str, str | None]]:
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def model_not_found(model: str, served: str) -> ApiError:
    return ApiError(
        404,
        f"The model {shown(model)} does not exist; this server has {served!r}.",
        param="model",
        code="model_not_found",
    )


def to_api_error(exc: BaseException) -> ApiError:
    """The answer for an exception. The unexpected is a 500 that says nothing of its inside."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, ValidationError):
        return _validation_error(exc)
    if isinstance(exc, InvalidRequestError):
        return ApiError(400, exc.message, param=exc.param, code="invalid_value")
    if isinstance(exc, EngineOverloadedError):
        return ApiError(
            429,
            str(exc) or "The server's queue is full, try again later.",
            code="engine_overloaded",
            headers={"Retry-After": str(OVERLOADED_RETRY_AFTER)},
        )
    if isinstance(exc, EngineDeadError):
        return ApiError(
            503,
            f"The engine stopped: {exc}",
            code="engine_dead",
            headers={"Retry-After": str(DEAD_RETRY_AFTER)},
        )
    if isinstance(exc, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(exc.status_code)
        return ApiError(exc.status_code, exc.detail, code=code, headers=exc.headers)
    if isinstance(exc, SpectrueError):
        logger.error("request failed: %s", exc)
        return ApiError(500, str(exc), code="internal_error")
    logger.error("unexpected error while serving a request", exc_info=exc)
    return ApiError(500, "The server had an internal error.", code="internal_error")


def _validation_error(exc: ValidationError) -> ApiError:
    """The first thing that is wrong; all of them would be a wall of text for a union."""
    error = exc.errors(include_url=False, include_input=False, include_context=False)[0]
    param = ".".join(str(p) for p in error["loc"])
    kind = error["type"]
    if kind == "extra_forbidden":
        return ApiError(
            400,
            f"Unrecognized request argument: {cut(param)}",
            param=param,
            code="unknown_parameter",
        )
    if kind == "missing":
        return ApiError(
            400,
            f"Missing required parameter: {cut(param)}",
            param=param,
            code="missing_required_parameter",
        )
    return ApiError(
        400,
        f"Invalid value for {cut(param) or 'the body'}: {error['msg']}",
        param=param or None,
        code="invalid_type" if kind.endswith(("_type", "_parsing")) else "invalid_value",
    )


def install(app: FastAPI) -> None:
    """Make every error of `app`, those of the router too, OpenAI-shaped."""

    async def answer(request: Request, exc: Exception) -> JSONResponse:
        error = to_api_error(exc)
        if isinstance(exc, HTTPException) and exc.status_code in (404, 405):
            error.message = f"{exc.detail}: {request.method} {cut(request.url.path)}"
        return error.response()

    for kind in (ApiError, ValidationError, SpectrueError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
