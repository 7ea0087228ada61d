"""Authenticated messages over a socket between processes with a common secret. No torch.

Both ends first prove that they know the secret. Neither sends it:

    launcher -> node      a greeting and a random nonce
    node -> launcher      a nonce, and HMAC-SHA256(secret, "node" + both nonces)
    launcher -> node      HMAC-SHA256(secret, "launcher" + both nonces), or a refusal

Both derive the key of this connection from the secret and the nonces. Each message then is a frame: its length, an HMAC
of (direction, number of the message, content) under that key, and the content, which is JSON. The receiver verifies a
frame before it parses the content. A frame that was changed, repeated, left out or moved ends the connection.
Messages are not encrypted.
"""

import hashlib
import hmac
import json
import secrets
import socket
import time
from typing import Any, Self

from midstride.engine.errors import JobError, WorldError

__all__ = ["HANDSHAKE_S", "Channel", "MessageRefused", "SecretRefused"]

#: seconds in which the other end must prove that it knows the secret
HANDSHAKE_S = 10.0
_GREETING = b"midstride nodes 1\n"
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_REFUSAL = b"the secret is another".ljust(_PROOF_BYTES)
#: a longer message is none of ours
_LARGEST_BYTES = 1 << 28
#: seconds without an answer of the other machine's kernel after which a connection is lost: 30 + 3 * 10
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


class SecretRefused(JobError):
    """The other end does not know this end's secret."""


class MessageRefused(WorldError):
    """A message was changed, repeated, left out or moved on its way."""


class Channel:
    """One end of a connection whose other end has proved that it knows the secret.

    Use `accept` or `connect`. One thread at a time uses a channel.

    Args:
        connection: the socket.
        key: of this connection.
        ends: labels of the frames that this end sends, and of those that it receives.
    """

    def __init__(self, connection: socket.socket, key: bytes, ends: tuple[bytes, bytes]) -> None:
        self._connection, self._key = connection, key
        self._sends, self._receives = ends
        self._sent = self._received = 0

    @classmethod
    def accept(cls, connection: socket.socket, secret: str, handshake_s: float = HANDSHAKE_S) -> Self:
        """Return the launcher's end of a new connection; on an error, the connection is closed.

        Raises:
            SecretRefused: the node does not know the secret.
            OSError: the connection has ended, or the time is over.
        """
        until, ours = time.monotonic() + handshake_s, secrets.token_bytes(_NONCE_BYTES)
        try:
            connection.settimeout(handshake_s)
            connection.sendall(_GREETING + ours)
            answer = _read(connection, _NONCE_BYTES + _PROOF_BYTES, until)
            nonces = ours + answer[:_NONCE_BYTES]
            if not hmac.compare_digest(answer[_NONCE_BYTES:], _mac(secret.encode(), b"node", nonces)):
                connection.sendall(_REFUSAL)
                raise SecretRefused("it does not know the run's secret")
            connection.sendall(_mac(secret.encode(), b"launcher", nonces))
            return cls._established(connection, secret, nonces, (b"launcher", b"node"))
        except BaseException:
            connection.close()
            raise

    @classmethod
    def connect(cls, host: str, port: int, secret: str, handshake_s: float = HANDSHAKE_S) -> Self:
        """Return the node's end of a new connection to the launcher at `host` and `port`.

        Raises:
            SecretRefused: the launcher does not know the secret, or refuses this one.
            OSError: what answers is no launcher, or does not answer in time.
        """
        until = time.monotonic() + handshake_s
        connection = socket.create_connection((host, port), timeout=handshake_s)
        try:
            greeting = _read(connection, len(_GREETING) + _NONCE_BYTES, until)
            if not greeting.startswith(_GREETING):
                raise ConnectionError("it speaks another protocol, or is of another version of midstride")
            ours = secrets.token_bytes(_NONCE_BYTES)
            nonces = greeting[len(_GREETING) :] + ours
            connection.sendall(ours + _mac(secret.encode(), b"node", nonces))
            proof = _read(connection, _PROOF_BYTES, until)
            if not hmac.compare_digest(proof, _mac(secret.encode(), b"launcher", nonces)):
                why = "refuses this secret" if proof == _REFUSAL else "does not know this secret"
                raise SecretRefused(f"the program at {host}:{port} {why}")
            return cls._established(connection, secret, nonces, (b"node", b"launcher"))
        except BaseException:
            connection.close()
            raise

    @classmethod
    def _established(cls, connection: socket.socket, secret: str, nonces: bytes, ends: tuple[bytes, bytes]) -> Self:
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        return cls(connection, _mac(secret.encode(), b"key", nonces), ends)

    def send(self, message: Any) -> None:
        """Send a JSON value.

        Raises:
            OSError: the connection has ended.
        """
        content = json.dumps(message).encode()
        mac = _mac(self._key, self._sends, self._sent.to_bytes(8), content)
        self._sent += 1
        self._connection.sendall(len(content).to_bytes(4) + mac + content)

    def receive(self) -> Any:
        """Return the next message of the other end, waiting for it.

        Raises:
            MessageRefused: it was changed, repeated, left out or moved.
            OSError: the connection has ended.
        """
        head = _read(self._connection, 4 + _PROOF_BYTES)
        length = int.from_bytes(head[:4])
        content = _read(self._connection, length) if length <= _LARGEST_BYTES else b""
        mac = _mac(self._key, self._receives, self._received.to_bytes(8), content)
        if not hmac.compare_digest(head[4:], mac):
            raise MessageRefused(f"message {self._received} was changed, repeated, left out or moved on its way")
        self._received += 1
        return json.loads(content)

    def close(self) -> None:
        """Close the connection; again changes nothing."""
        self._connection.close()


def _mac(key: bytes, *parts: bytes) -> bytes:
    """Return an HMAC-SHA256 of `parts` and their lengths, which differs for different lists."""
    return hmac.digest(key, b"".join(len(part).to_bytes(8) + part for part in parts), "sha256")


def _read(connection: socket.socket, length: int, until: float | None = None) -> bytes:
    """Return the next `length` bytes.

    Raises:
        OSError: the connection ended before, or it is later than `until`.
    """
    data = bytearray()
    while len(data) < length:
        if until is not None:
            connection.settimeout(max(until - time.monotonic(), 0.001))
        part = connection.recv(min(length - len(data), 1 << 20))
        if not part:
            raise ConnectionResetError("the connection was closed")
        data += part
    return bytes(data)
