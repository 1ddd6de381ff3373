"""A network that fails: a TCP proxy in front of a server, which cuts or stalls connections."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType

CHUNK = 65_536


class Proxy:
    """Forwards its own port to a server's."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._server = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._flows = threading.Event()
        self._is_cut = False

    @property
    def address(self) -> str:
        """The address to connect to."""
        return f"127.0.0.1:{self._listening.getsockname()[1]}"

    def cut(self) -> None:
        """Close all connections, and every new one immediately."""
        self._is_cut = True
        self._close_all()

    def stall(self) -> None:
        """Forward nothing, but keep connections open, so that neither side notices."""
        self._flows.clear()

    def mend(self) -> None:
        """Forward again."""
        self._is_cut = False
        self._flows.set()

    def __enter__(self) -> Proxy:
        self._flows.set()
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._listening.close()
        self.cut()
        self._flows.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # `__exit__` closed the socket
            while True:
                near, _ = self._listening.accept()
                if self._is_cut:
                    near.close()
                    continue
                far = socket.create_connection(self._server)
                self._open += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=pair, name="proxy", daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                self._flows.wait()
                sink.sendall(data)
        _close(source)
        _close(sink)

    def _close_all(self) -> None:
        while self._open:
            _close(self._open.pop())


def _close(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
