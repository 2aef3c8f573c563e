"""What a replica and a cluster are told at start. Frozen; the command line makes them, and nothing here imports ray."""

import msgspec

from paceline.proto.errors import StartupError
from paceline.worker.config import RankConfig


class ReplicaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: its rank, how it schedules, and where it listens. ``port`` 0 takes a free one.

    ``advertise``: the host that routers are told. None: ``host``, or this machine's own address where that is a
    wildcard. ``health_port``: of plain HTTP for probes; None opens none. ``step_timeout``: seconds without a finished
    step, while there is work, after which the process ends itself. ``drain_seconds``: what running requests get when
    the process is told to end. ``cluster_token``: whoever asks for work must show it; None lets everybody in.
    ``start_timeout``: seconds that each phase of a gang's start may take. ``depth``: plans in flight; None: what pays.
    ``target_itl``: seconds between a stream's tokens that prompts beside it are cut to keep; 0 cuts nothing.
    ``max_waiting_requests``, ``max_waiting_tokens``: what comes beyond is refused; 0 is no limit.
    """

    rank: RankConfig
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    health_port: int | None = 0
    cluster_token: str | None = None
    step_timeout: float = 60.0
    start_timeout: float = 600.0
    drain_seconds: float = 30.0
    long_prefill_tokens: int | None = None
    max_partial_prefills: int = 2
    target_itl: float = 0.1
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 0
    log_format: str = "console"  # of the replica's process and the controller's: see proto/logs.py
    log_level: str = "info"
    enable_prefix_caching: bool = True
    scheduling_policy: str = "priority"
    depth: int | None = None

    def __post_init__(self):
        if self.step_timeout <= 0:
            raise StartupError(f"step_timeout is {self.step_timeout:g}: it must be more than 0")


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``ray_address`` None: a local Ray that ends with this process. ``namespace`` keeps clusters on one Ray apart.

    ``controller_port`` 0: a free one, the same for as long as the controller's name lives in Ray.
    ``placement_timeout``: seconds after which a replica that Ray has no room for says so; it goes on waiting.
    """

    replica: ReplicaConfig
    num_replicas: int = 1
    num_cpus_per_rank: int = 1
    ray_address: str | None = None
    namespace: str = "paceline"
    host: str = "127.0.0.1"
    controller_port: int = 0
    advertise: str | None = None
    placement_timeout: float = 30.0

    @property
    def cluster_token(self) -> str | None:
        """One token for controller and replicas."""
        return self.replica.cluster_token
