"""A request with its answer, as the proxy hands it to what learns. No header is in it but the
kind of traffic.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exchange:
    """The bytes of a request and of its whole answer, with the kind that the request's header
    names.
    """

    route: str
    request: bytes
    response: bytes
    kind_header: str | None = None
    # Time at which the answer was complete, by the clock of follow (`clock.py`).
    time: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the request and of its answer."""
        return len(self.request) + len(self.response)
