"""Attackers of a server: strangers with raw sockets, relays, and certificates that are not those of the job."""

import datetime
import selectors
import socket
import ssl
import struct
import threading
import time
from contextlib import contextmanager, suppress

import psutil
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from machine_speed import scaled
from paceline.engines.distributed.transport.security import TokenSecurity
from paceline.engines.distributed.transport.tls import TLSSecurity, derive_identity
from paceline.engines.distributed.transport.transport import Transport
from ranks import TOKEN

VERSION = "1"
LIMIT_S = scaled(10.0)


def security(*, encrypt, token=TOKEN, run_id=""):
    return TLSSecurity(derive_identity(token, run_id)) if encrypt else TokenSecurity(token, run_id)


@contextmanager
def transport(security, version=VERSION):
    """Yield a transport; the connections that it has made are closed afterwards."""
    made = KeepingTransport(lambda: security, version, 5.0)
    try:
        yield made
    finally:
        is_idle = threading.Event()
        made._loop.call(is_idle.set)  # a connection that the other side has may not be in the list yet
        is_idle.wait(LIMIT_S)
        for connection in made.connections:
            connection.close()
        made.close()


class KeepingTransport(Transport):
    """Transport that keeps its connections."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.connections = []

    def _connection(self, control, data):
        connection = super()._connection(control, data)
        self.connections.append(connection)
        return connection


class Server:
    """Server under attack.

    Attributes:
        address: host and port.
        connections: connections that it has accepted.
        rejections: reasons why processes of the job were rejected.
        counters: counts of rejected connections.
    """

    def __init__(self, made):
        self.rejections = []
        self.connections = made.connections
        self.counters = made.counters
        self._listener = made.listen("127.0.0.1", 0, self._on_connection, self.rejections.append)
        self.address = self._listener.address

    def _on_connection(self, connection):
        pass  # the transport keeps it

    def dial(self, content=b""):
        """Return a raw socket to the server on which this was sent."""
        return dial(self.address, content)

    def close(self):
        self._listener.close()


@contextmanager
def serving(security, version=VERSION):
    """Yield a server that listens on a free port of this host."""
    with transport(security, version) as made:
        server = Server(made)
        try:
            yield server
        finally:
            server.close()


def dial(address, content=b""):
    sock = socket.create_connection(address, timeout=LIMIT_S)
    sock.sendall(content)
    return sock


def reset(sock):
    """Close a socket so that the other side receives a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def is_closed_within(sock, limit_s):
    """Return whether the other side closes a socket; what it sends before is read."""
    sock.settimeout(limit_s)
    deadline_s = time.monotonic() + limit_s
    try:
        while sock.recv(1 << 16):
            if time.monotonic() > deadline_s:
                return False
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def memory_mb():
    return psutil.Process().memory_info().rss / 1e6


def client_hello():
    """Return the first bytes of a client of TLS 1.3 without a certificate."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = stranger_context().wrap_bio(incoming, outgoing)
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def stranger_context(identity=None, folder=None, protocol=ssl.PROTOCOL_TLS_CLIENT):
    """Return a context that accepts every certificate, perhaps with a certificate of its own."""
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if identity is not None:
        path = folder / f"{len(list(folder.iterdir()))}.pem"
        path.write_bytes(identity.key + b"\n" + identity.certificate)
        context.load_cert_chain(path)
    return context


class Relay:
    """Relay between a client and a server, which keeps the bytes of both and may change them.

    Args:
        target: address of the server.
        change: function of the bytes that came from the client, returns those to pass on; None to change nothing.

    Attributes:
        address: address to give to the client.
        seen: bytes that have passed: of the clients, and of the server.
        recorded: bytes of each client.
    """

    def __init__(self, target, change=None):
        self._target = target
        self._change = change
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.address = self._sock.getsockname()
        self.seen = [bytearray(), bytearray()]
        self.recorded = []
        self._others = {}
        self._wake, self._waked = socket.socketpair()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self):
        self._wake.close()
        self._thread.join(LIMIT_S)

    def _run(self):
        with selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_READ)
            selector.register(self._waked, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._waked:
                        self._end()
                        return
                    if key.fileobj is self._sock:
                        self._pair(selector)
                    elif key.fileobj in self._others:
                        self._pass_on(selector, key.fileobj)

    def _pair(self, selector):
        client, _ = self._sock.accept()
        try:
            server = socket.create_connection(self._target)
        except OSError:  # the server does not listen yet
            client.close()
            return
        self.recorded.append(bytearray())
        for sock, other, side in ((client, server, 0), (server, client, 1)):
            self._others[sock] = (other, side, self.recorded[-1])
            selector.register(sock, selectors.EVENT_READ)

    def _pass_on(self, selector, sock):
        other, side, recorded = self._others[sock]
        try:
            content = sock.recv(1 << 16)
            self.seen[side] += content
            recorded += content if side == 0 else b""
            if content and side == 0 and self._change is not None:
                content = self._change(content)
            other.sendall(content)
        except OSError:
            content = b""
        if not content:
            for each in (sock, other):
                selector.unregister(each)
                del self._others[each]
                each.close()

    def _end(self):
        for each in [self._sock, self._waked, *self._others]:
            each.close()


@contextmanager
def relaying(target, change=None):
    """Yield a relay to a server."""
    relay = Relay(target, change)
    try:
        yield relay
    finally:
        relay.close()


class Authority:
    """Certificate authority of an organisation.

    Args:
        name: name in its certificates.
    """

    def __init__(self, name="an organisation"):
        self._key = Ed25519PrivateKey.generate()
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = self._sign(self._name, self._key, age_days=365, is_authority=True)

    def issue(self, name, age_days=1):
        """Return the private key and a certificate of a host, which is valid for 10 days, in PEM."""
        key = Ed25519PrivateKey.generate()
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return private, self._sign(subject, key, age_days, is_authority=False)

    def _sign(self, subject, key, age_days, *, is_authority):
        first = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=age_days)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(first)
            .not_valid_after(first + datetime.timedelta(days=3650 if is_authority else 10))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )
        return builder.sign(self._key, None).public_bytes(Encoding.PEM)
