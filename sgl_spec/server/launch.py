"""`sgl-spec serve`: parse, claim the port, serve."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import Sequence

import uvloop

from sgl_spec.args import ResolvedArgs, ServerArgs
from sgl_spec.errors import ConfigError
from sgl_spec.server.lifecycle import EXIT_CONFIG, Server
from sgl_spec.server.logs import configure_logging
from sgl_spec.server.processes import ENGINE_ENTRY
from sgl_spec.server.tokenizer import require_template

BACKLOG = 2048
# A client whose machine or network is gone sends nothing, not even an end: the kernel asks for it
# after a silence, and gives a connection up on which nothing sent was taken for so long, be it that
# nobody is there or that somebody never reads.
SILENCE_S = 60
GONE_S = 120


def run(argv: Sequence[str], entry: str = ENGINE_ENTRY) -> int:
    """Run the server with the arguments of the command line until its end; the exit code.

    0 after an orderly end, 1 when the engine failed, 2 for a configuration that cannot work. entry:
    another engine's entry point, for tests.
    """
    try:
        asked = ServerArgs.from_cli(argv)
        configure_logging(asked.log_level, "api")
        args = asked.resolve()
        if args.chat_template is not None:
            require_template(args.chat_template)  # now, not when the model has been loaded
        if args.ssl_certfile is not None:
            require_certificate(args)
        with (
            listen(args.host, args.port) as listener,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            return runner.run(Server(args, listener, entry).run())
    except ConfigError as error:
        sys.stderr.write(f"{error.message}\n")
        return EXIT_CONFIG


def require_certificate(args: ResolvedArgs) -> None:
    """`ConfigError` unless the files of --ssl-certfile and --ssl-keyfile are a pair."""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        password = args.ssl_keyfile_password or ""  # without one it would be asked for here
        context.load_cert_chain(str(args.ssl_certfile), args.ssl_keyfile, password)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--ssl-certfile {args.ssl_certfile} and --ssl-keyfile {args.ssl_keyfile} cannot be "
            f"used: {error}."
        ) from error


def give_up_the_gone(listener: socket.socket) -> None:
    """Let connections that this socket accepts end when their client has gone without a word."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 4)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_S * 1000)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises `ConfigError` when the address cannot be had."""
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        give_up_the_gone(listener)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"Cannot listen on --host {host} --port {port}: {error.strerror}."
        ) from error
    return listener
