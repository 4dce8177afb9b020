"""What a front end, such as the HTTP server, applies to the requests of one API call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from serve.engine.request_stream import RequestStream
    from serve.pooling import PoolingParams
    from serve.sampling_params import SamplingParams


class CallPolicy(Protocol):
    """Limits what a call may ask and keeps the streams of its requests. Each `submit` of the
    engine applies it."""

    @property
    def arrived_s(self) -> float:
        """When the call arrived, in seconds of the monotonic clock; latencies count from there."""

    def allowed(self, params: SamplingParams | PoolingParams) -> SamplingParams | PoolingParams:
        """Returns the parameters with the call's limits. Raises what refuses the request."""

    def client(self, name: str | None) -> str | None:
        """Returns the client under which the lengths of answers are predicted."""

    def submitted(self, stream: RequestStream) -> None:
        """Keeps the stream of a request that the engine has accepted."""
