"""`sgl-spec deploy`: replicas of the server on Ray Serve."""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
from collections.abc import Sequence

from sgl_spec.deploy.args import DeployArgs
from sgl_spec.errors import ConfigError

EXIT_OK, EXIT_CONFIG = 0, 2


def main(argv: Sequence[str]) -> int:
    """Deploy; the exit code. On a cluster of its own the command stays until a signal."""
    try:
        args = DeployArgs.from_cli(argv)
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("Ray is not installed: pip install 'sgl-spec[serve]'.")
        _serve(args)
    except ConfigError as error:
        sys.stderr.write(f"{error.message}\n")
        return EXIT_CONFIG
    return EXIT_OK


def _serve(args: DeployArgs) -> None:
    import ray
    from ray import serve

    from sgl_spec.deploy.app import deploy

    ended = threading.Event()
    deploy(args)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    sys.stdout.write(f"Ready: {args.replicas} replicas at http://{args.host}:{args.port}\n")
    sys.stdout.flush()
    if args.address is None:
        ended.wait()
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
