"""A port that several processes listen on. The kernel spreads the connections among them."""

from __future__ import annotations

import socket


def reserve(host: str, port: int) -> list[socket.socket]:
    """Hold a port, any free one for 0, without listening on it. Raises `OSError` if it is taken.

    While it is held, processes of this user can listen on it by `bind`, and others can't.
    """
    # Not shared at first: what shares it already would go unnoticed, another gateway perhaps.
    found = _bind(host, port, shared=False)
    port = port_of(found)
    for one in found:
        one.close()
    return bind(host, port)


def bind(host: str, port: int) -> list[socket.socket]:
    """Return sockets, one for each address of the host, bound to a port that may be shared."""
    return _bind(host, port, shared=True)


def port_of(sockets: list[socket.socket]) -> int:
    """Return the port that sockets are bound to."""
    return int(sockets[0].getsockname()[1])


def _bind(host: str, port: int, *, shared: bool) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            one = socket.socket(family, kind, protocol)
            sockets.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((address[0], port, *address[2:]))
            port = port or port_of(sockets)
    except OSError:
        for one in sockets:
            one.close()
        raise
    return sockets
