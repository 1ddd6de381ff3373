"""A network that fails: a TCP proxy before a server, whose connections are cut, or fall silent."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType

CHUNK = 65_536


class Proxy:
    """Forwards a port of its own to a server's, until it is told not to."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._server = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._flows = threading.Event()
        self._is_cut = False

    @property
    def address(self) -> str:
        """Where to connect to."""
        return f"127.0.0.1:{self._listening.getsockname()[1]}"

    def cut(self) -> None:
        """Close every connection, and each new one at once."""
        self._is_cut = True
        self._close_all()

    def stall(self) -> None:
        """Carry nothing on, and close nothing: nobody is told."""
        self._flows.clear()

    def mend(self) -> None:
        """Carry on."""
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
        with contextlib.suppress(OSError):  # closed: the proxy is over
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
