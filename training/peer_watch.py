"""Notices at once that a neighbour's node or pod is gone, and leaves, so that in-job restart begins.

Neither NVRx layer does. In-process restart waits until a lost node's heartbeats are overdue, and for ever when that was
rank 0's node, which had its store. ft_launcher watches its own processes only. What then helps is the step section's
deadline, minutes later. Standard library only.
"""

import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

_KEY = "peer_watch_{rank}"
_GOODBYE = b"."
_CONNECT_SECONDS = 60.0
_EXIT_PEER_LOST = 1


class _Store(Protocol):
    """What is used of a torch.distributed store."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...


class PeerWatch:
    """A ring: each rank holds a connection to the next one and does nothing but wait for its end.

    When the next rank ends in order, it says goodbye first. When its pod is killed, the kernel resets the connection;
    when its machine falls silent, keep-alive does after `silent_seconds`. One witness is enough: ft_launcher sees its
    rank end and calls all others to the next round.

    A rank's own monitor process (NVRx's, forked from it) holds the connection as well. So a rank that is merely killed
    is left to its own launcher, which is there and knows.
    """

    def __init__(
        self,
        store: _Store,
        *,
        rank: int,
        world_size: int,
        address: str,
        silent_seconds: float,
        on_loss: Callable[[int], None],
    ) -> None:
        self._peer = (rank + 1) % world_size
        self._on_loss = on_loss
        self._listener = socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        )
        own_port = self._listener.getsockname()[1]
        store.set(_KEY.format(rank=rank), f"{address} {own_port}")
        host, port = store.get(_KEY.format(rank=self._peer)).decode().split()
        # Accepted only to say goodbye: until then the kernel completes, keeps and, when we die, resets it.
        self._connection = socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS)
        self._connection.settimeout(None)
        _keep_alive(self._connection, silent_seconds)
        self.ports = frozenset({own_port, int(port)})
        self._thread = threading.Thread(target=self._wait, name="peer-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End in order: the rank that watches this one is told, and nothing is watched any more."""
        self._on_loss = _ignore
        with suppress(OSError):
            self._listener.settimeout(1.0)
            while True:  # the watcher is one of those that wait; a stranger may have connected, too
                watcher, _ = self._listener.accept()
                with watcher:
                    watcher.sendall(_GOODBYE)
                self._listener.settimeout(0.0)
        self._listener.close()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def _wait(self) -> None:
        try:
            goodbye = self._connection.recv(1)
        except OSError:
            goodbye = b""
        if goodbye != _GOODBYE:
            self._on_loss(self._peer)


def own_address(store_host: str, store_port: int) -> str:
    """This host's address as the one that has the store sees it."""
    with socket.create_connection((store_host, store_port), timeout=_CONNECT_SECONDS) as probe:
        return probe.getsockname()[0]


def leave(peer: int) -> None:
    """End this process at once: with a process gone there is nothing that it could restart by itself."""
    print(f"rank {peer} is gone: leaving to in-job restart", file=sys.stderr, flush=True)
    os._exit(_EXIT_PEER_LOST)


def _ignore(_peer: int) -> None:
    """Nothing is watched any more."""


def _keep_alive(connection: socket.socket, silent_seconds: float) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Half of the time quiet, then three unanswered probes.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(silent_seconds / 2)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(silent_seconds / 6)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
