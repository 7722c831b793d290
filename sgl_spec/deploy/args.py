"""Flags of `sgl-spec deploy`; all others are the server's, for every replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from sgl_spec.args import ServerArgs
from sgl_spec.errors import ConfigError
from sgl_spec.options import FlagParser, at_least, between, convert, declared, flag_of, option

ROUTES = ("prefix", "least-loaded")


@dataclass(frozen=True, kw_only=True)
class DeployArgs:
    """What the user asked for. server: the flags of each replica's server."""

    replicas: int = option(1, "Replicas at the start.", group="deployment", check=at_least(1))
    max_replicas: int | None = option(
        None,
        "Replicas that may be added while requests wait; they go again when few are running.",
        group="deployment",
        check=at_least(1),
        unset="--replicas, no autoscaling",
    )
    tp_size: int = option(
        1,
        "GPUs that one replica spreads its model over.",
        group="deployment",
        aliases=("--tensor-parallel-size", "--tp"),
        check=at_least(1),
    )
    cpus_per_replica: int = option(
        1, "CPUs that Ray reserves for one.", group="deployment", check=at_least(0)
    )
    max_ongoing_requests: int = option(
        96,
        "Requests that one replica is given; more wait in front of all.",
        group="deployment",
        check=at_least(1),
    )
    target_ongoing_requests: int | None = option(
        None,
        "Requests per replica that autoscaling aims at.",
        group="deployment",
        check=at_least(1),
        unset="half of --max-ongoing-requests",
    )
    fronts: int = option(
        1,
        "Processes that route. Each learns from its own requests alone.",
        group="deployment",
        check=at_least(1),
    )
    route: str = option(
        "prefix",
        "`prefix`: to the replica that has most of the prompt cached, unless it is busier than "
        "others.",
        group="deployment",
        choices=ROUTES,
    )
    name: str = option("sgl-spec", "The application; the same name updates it.", group="deployment")
    address: str | None = option(
        None,
        "A running Ray cluster (`auto`: the one of this machine). The application stays there.",
        group="deployment",
        unset="a cluster of this machine alone, which ends with the command",
    )
    host: str = option("127.0.0.1", "Address to listen on.", group="deployment")
    port: int = option(30000, "Port to listen on.", group="deployment", check=between(1, 65535))
    server: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, opt in declared(type(self)).items():
            object.__setattr__(self, name, convert(opt, getattr(self, name)))
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(
                f"--max-replicas {self.max_replicas} is less than --replicas {self.replicas}."
            )

    @classmethod
    def parser(cls) -> FlagParser:
        """What reads our own flags."""
        parser = FlagParser(
            prog="sgl-spec deploy",
            usage="%(prog)s --replicas R [flags] [flags of sgl-spec serve]",
            description="Serve with many replicas on Ray Serve.",
        )
        parser.add_options(declared(cls).values())
        return parser

    @classmethod
    def from_cli(cls, argv: Sequence[str]) -> Self:
        """Parse `argv`. `ConfigError` for a bad flag, the server's too: before anything starts."""
        read, rest = cls.parser().parse_known_args(argv)
        if getattr(read, "tp_size", "1") != "1":
            rest += [flag_of("tp_size"), read.tp_size]
        ServerArgs.from_cli(rest)
        return cls(server=tuple(rest), **vars(read))

    @property
    def target(self) -> int:
        """Requests per replica that autoscaling aims at."""
        return self.target_ongoing_requests or max(1, self.max_ongoing_requests // 2)

    def gpus(self, present: float) -> int:
        """GPUs of one replica, on a cluster that has `present`."""
        device = ServerArgs.from_cli(self.server).device
        wanted = 0 if device == "cpu" or (device == "auto" and not present) else self.tp_size
        if wanted > present:
            raise ConfigError(
                f"A replica needs {wanted} GPUs (--tp-size), and the cluster has {present:g}."
            )
        return wanted
