"""Authenticated connections between two engines over plain sockets.

    D -> P   MAGIC, nonce of D
    P -> D   nonce of P
    D -> P   proof of D: HMAC(secret, "D", nonces)
    P -> D   proof of P: HMAC(secret, "P", nonces)
    then frames both ways: u32 length, body, MAC of (direction, counter, body)

D proves first, so a stranger learns nothing from P but a random nonce. Counters and a key per
connection and direction refuse frames that were altered, repeated, left out or reflected. Pages are
not encrypted: the network between the engines must be private.

Decision: the MAC is HMAC-SHA-256 of the standard library, 1.3 GB/s per core. This backend is for
CPUs and for links of up to 10 Gbit/s; faster links have backends of their own.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from hashlib import sha256

from nanovllm.transfer.tickets import derived_key

MAGIC = b"nvkvxfr1"
NONCE_BYTES = 32
MAC_BYTES = 32
LENGTH = struct.Struct("<I")
COUNTER = struct.Struct("<Q")
SCOPE = b"nanovllm transfer connection 1\0"
HANDSHAKE_S = 5.0  # for all of it
PIECE_BYTES = 256 * 1024  # of which one end computes the MAC while the other one is at the next
SMALL_BYTES = 4096  # of a part that is sent together with its neighbours


class PeerError(Exception):
    """A peer that does not follow the protocol. `kind` is for counters and for the log."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class SealedConnection:
    """One end of an authenticated connection. One thread at a time may use it.

    `wait_at_most` limits the silence of the peer. A peer that sends no bytes for that long while it
    is read from, or accepts none while it is sent to, raises TimeoutError.
    """

    def __init__(self, sock: socket.socket, session: bytes, *, is_server: bool) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        keys = [hmac.digest(session, name, "sha256") for name in (b"to P", b"to D")]
        self._receive_key, self._send_key = keys if is_server else keys[::-1]
        self._num_sent = 0
        self._num_received = 0

    @classmethod
    def connect(cls, sock: socket.socket, secret: str) -> SealedConnection:
        """Authenticate as D. Raise PeerError if P has another secret, or OSError."""
        key, deadline = derived_key(secret, SCOPE), time.monotonic() + HANDSHAKE_S
        mine = os.urandom(NONCE_BYTES)
        sock.sendall(MAGIC + mine)
        nonces = mine + _receive(sock, NONCE_BYTES, deadline)
        sock.sendall(_proof(key, b"D", nonces))
        try:
            proof = _receive(sock, MAC_BYTES, deadline)
        except ConnectionError:
            raise PeerError("secret", "the peer refused this engine's secret") from None
        if not hmac.compare_digest(proof, _proof(key, b"P", nonces)):
            raise PeerError("secret", "the peer has another secret")
        return cls(sock, _proof(key, b"session", nonces), is_server=False)

    @classmethod
    def accept(cls, sock: socket.socket, secret: str) -> SealedConnection:
        """Authenticate as P. Raise PeerError for a stranger, or OSError."""
        key, deadline = derived_key(secret, SCOPE), time.monotonic() + HANDSHAKE_S
        if _receive(sock, len(MAGIC), deadline) != MAGIC:
            raise PeerError("stranger", "it does not speak the transfer protocol")
        theirs = _receive(sock, NONCE_BYTES, deadline)
        mine = os.urandom(NONCE_BYTES)
        sock.sendall(mine)
        proof = _receive(sock, MAC_BYTES, deadline)
        if not hmac.compare_digest(proof, _proof(key, b"D", theirs + mine)):
            raise PeerError("secret", "it has another secret")
        sock.sendall(_proof(key, b"P", theirs + mine))
        return cls(sock, _proof(key, b"session", theirs + mine), is_server=True)

    def send(self, *parts: bytes | memoryview) -> None:
        """Send one frame, whose body is all parts."""
        mac = hmac.new(self._send_key, COUNTER.pack(self._num_sent), sha256)
        self._num_sent += 1
        waiting = LENGTH.pack(sum(map(len, parts)))
        for part in parts:
            for at in range(0, len(part), PIECE_BYTES):
                piece = part[at : at + PIECE_BYTES]
                mac.update(piece)  # releases the GIL
                if len(piece) < SMALL_BYTES:
                    waiting += piece
                    continue
                self._sock.sendall(waiting)
                self._sock.sendall(piece)
                waiting = b""
        self._sock.sendall(waiting + mac.digest())

    def receive(self, into: memoryview) -> memoryview:
        """Return the body of the next frame, a part of `into`, which limits its length.

        Raise PeerError if the frame is too long or not authentic, or OSError.
        """
        length = LENGTH.unpack(self._read(memoryview(bytearray(LENGTH.size))))[0]
        if length > len(into):
            raise PeerError("protocol", f"a frame has {length} bytes")
        body = into[:length]
        mac = hmac.new(self._receive_key, COUNTER.pack(self._num_received), sha256)
        for at in range(0, length, PIECE_BYTES):
            mac.update(self._read(body[at : at + PIECE_BYTES]))
        if not hmac.compare_digest(mac.digest(), self._read(memoryview(bytearray(MAC_BYTES)))):
            raise PeerError("protocol", "a frame was altered, repeated or left out")
        self._num_received += 1
        return body

    def wait_at_most(self, seconds: float) -> None:
        """Set the longest silence of the peer in later calls."""
        self._sock.settimeout(seconds)

    def _read(self, into: memoryview) -> memoryview:
        at = 0
        while at < len(into):
            count = self._sock.recv_into(into[at:])
            if not count:
                raise ConnectionResetError("the peer closed the connection")
            at += count
        return into


def _proof(key: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, role + b"\0" + nonces, "sha256")


def _receive(sock: socket.socket, count: int, deadline: float) -> bytes:
    """Receive bytes of the handshake until its deadline."""
    received = b""
    while len(received) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handshake took too long")
        sock.settimeout(left)
        part = sock.recv(count - len(received))
        if not part:
            raise ConnectionResetError("the peer closed the connection")
        received += part
    return received
