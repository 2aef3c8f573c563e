"""What a replica and a cluster are told at start. Frozen; the command line makes them, and nothing here imports ray."""

import msgspec

from paceline.worker.config import RankConfig


class ReplicaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: its rank, how it schedules, and where it listens. ``port`` 0 takes a free one."""

    rank: RankConfig
    host: str = "127.0.0.1"
    port: int = 0
    long_prefill_tokens: int | None = None
    max_partial_prefills: int = 2
    enable_prefix_caching: bool = True
    scheduling_policy: str = "priority"
    depth: int = 1


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``ray_address`` None: a local Ray that ends with this process. ``namespace`` keeps clusters on one Ray apart."""

    replica: ReplicaConfig
    num_replicas: int = 1
    num_cpus_per_replica: int = 1
    ray_address: str | None = None
    namespace: str = "paceline"
    host: str = "127.0.0.1"
