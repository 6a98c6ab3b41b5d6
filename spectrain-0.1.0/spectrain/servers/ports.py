"""Free TCP ports of this machine."""

import socket
from contextlib import ExitStack


def find_free_ports(count: int) -> list[int]:
    """Return different ports of this machine at which nothing listens, on any of its addresses."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


def find_free_port() -> int:
    """Return one port of this machine at which nothing listens."""
    return find_free_ports(1)[0]
