"""A proxy between a program and its server that can be slow, or lose answers."""

import contextlib
import socket
import threading
import time
from types import TracebackType


class Proxy:
    """Passes bytes on to a port of this machine.

    Args:
        port: of the server.
        delay_s: how long each piece of an answer is held back.
        lose: how many answers that contain `marked` are thrown away, and their connections cut.
        marked: what an answer is known by; the request is passed on in any case.
    """

    def __init__(self, port: int, *, delay_s: float = 0.0, lose: int = 0, marked: bytes = b"") -> None:
        self._port, self.delay_s, self.lose, self._marked = port, delay_s, lose, marked
        self.lost = 0
        self.passed = 0  # pieces of answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = {self._listener}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> "Proxy":
        self._run(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        for one in list(self._open):
            self._close(one)
        for thread in self._threads:
            thread.join(10)

    def _run(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _close(self, one: socket.socket) -> None:
        self._open.discard(one)
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
        one.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                continue
            self._open |= {client, server}
            self._run(self._pass, client, server, False)
            self._run(self._pass, server, client, True)

    def _pass(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if answers:
                    time.sleep(self.delay_s)
                    self.passed += 1
                    if self._loses(data):
                        break
                target.sendall(data)
        self._close(source)
        self._close(target)

    def _loses(self, data: bytes) -> bool:
        with self._lock:
            if self.lost >= self.lose or self._marked not in data:
                return False
            self.lost += 1
            return True
