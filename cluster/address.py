"""Hosts and ports as others see them."""

import socket

WILDCARDS = ("", "0.0.0.0", "::")


def advertised(host: str, port: int, advertise: str | None = None) -> str:
    """HOST:PORT for others: as told, or the host itself, or, where that is a wildcard, this machine's address."""
    host = advertise or (own_address() if host in WILDCARDS else host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bound(host: str, port: int) -> str:
    """HOST:PORT to listen on."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_address() -> str:
    """Of the interface that leads out; the loopback where none does. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def free_port(host: str) -> int:
    """One that nobody listens on now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, 0))
        return probe.getsockname()[1]
