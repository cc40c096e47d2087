"""How the processes of several machines find each other: torchrun's options for it."""

from __future__ import annotations

import socket
from typing import Final

from anydevice.errors import OptionError
from anydevice.launch.resolve import Resolved

__all__ = ["rendezvous"]

_LOOPBACK: Final = "127.0.0.1"

_DEFAULT_PORT: Final = 29500


def rendezvous(settings: Resolved, machines: int) -> list[str]:
    """The options of torchrun that say where the processes meet.

    Raises:
        OptionError: settings that contradict each other, are missing, or a port that is in use.
    """
    port, address = settings.get("main_process_port"), settings.get("main_process_ip")
    method = str(settings.get("rdzv_backend"))
    more: list[str] = []
    for name in ("rdzv_conf", "rdzv_id"):
        if settings.get(name) is not None:
            more += [f"--{name.replace('_', '-')}", str(settings.get(name))]
    rank = int(settings.get("machine_rank"))
    if rank >= machines:
        raise OptionError(
            f"{settings.where('machine_rank')} {rank}: with {settings.where('num_machines')} "
            f"{machines} it is at most {machines - 1}"
        )
    if machines == 1 and method == "static":
        if not port:
            return ["--standalone"]
        _check_port(settings, int(port))
        return ["--master-addr", _LOOPBACK, "--master-port", str(port), *more]
    if address is None:
        raise OptionError(
            f"{settings.where('num_machines')} {machines} needs --main_process_ip, the address of "
            "machine 0, the same on every machine"
        )
    if not port:
        port = _DEFAULT_PORT
    if rank == 0 and method == "static":
        _check_port(settings, int(port))
    nodes = ["--nnodes", str(machines)]
    if method == "static":
        where = ["--master-addr", str(address), "--master-port", str(port)]
        return [*nodes, "--node-rank", str(rank), *where, *more]
    if "--rdzv-id" not in more:
        more += ["--rdzv-id", "anydevice"]
    return [*nodes, "--rdzv-backend", method, "--rdzv-endpoint", f"{address}:{port}", *more]


def _check_port(settings: Resolved, port: int) -> None:
    """A port that another program uses is named now, and not by a timeout of the rendezvous."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise OptionError(
                f"{settings.where('main_process_port')} {port} cannot be used ({error.strerror}); "
                "choose another, or 0 for any"
            ) from error
