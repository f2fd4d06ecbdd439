"""Errors of gRPC calls as all services send them: google.rpc.Status with ErrorInfo."""

from typing import Any, NoReturn, cast

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

DOMAIN = "headrace"
"""Of ErrorInfo."""


async def abort(
    context: Any,
    code: grpc.StatusCode,
    reason: str,
    message: str,
    *,
    retry_after_s: float | None = None,
    **metadata: str,
) -> NoReturn:
    """End a call with a google.rpc.Status that carries ErrorInfo(reason, metadata), and with
    `retry_after_s` RetryInfo: the same call may succeed after that time."""
    details = [error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata)]
    if retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(round(retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    number = code_pb2.Code.Value(code.name)
    status = rpc_status.to_status(status_pb2.Status(code=number, message=message, details=packed))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort raises")


def retry_after_s(error: grpc.RpcError) -> float | None:
    """Seconds after which the server says that the call may be made again; None where it does not
    say so."""
    try:
        status = rpc_status.from_call(cast(grpc.Call, error))
    except ValueError:  # details that contradict the code: not by one of our servers
        return None
    for detail in () if status is None else status.details:
        info = error_details_pb2.RetryInfo()
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
            return float(info.retry_delay.ToNanoseconds() / 1e9)
    return None
