"""A request with its answer, as the proxy hands it to what learns. No header is in it but the kind of traffic."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Exchange:
    """The bytes of a request and of its whole answer, with the kind that the request's header names."""

    route: str
    request: bytes
    response: bytes
    kind_header: str | None = None
    # Seconds since 1970 at which the answer was complete.
    time: float = field(default_factory=time.time)
