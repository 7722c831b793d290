"""The application of `sgl-spec deploy` in a Ray Serve program of your own, beside whatever else it
serves: `python examples/ray_serve.py --replicas 2 --model-path smollm2`."""

from __future__ import annotations

import sys
import urllib.request

import ray
from ray import serve

from sgl_spec.deploy.app import build
from sgl_spec.deploy.args import DeployArgs


def main() -> None:
    """Serve under /llm, ask once, and end."""
    args = DeployArgs.from_cli(sys.argv[1:])
    ray.init(address="local", include_dashboard=False)
    serve.start(http_options={"host": args.host, "port": args.port})
    application = build(args, args.gpus(ray.cluster_resources().get("GPU", 0)))
    serve.run(application, name="llm", route_prefix="/llm")
    with urllib.request.urlopen(f"http://{args.host}:{args.port}/llm/v1/models") as reply:
        print(reply.read().decode())
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
