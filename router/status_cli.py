"""`paceline status`: what each replica does, from the router's /metrics and, if asked, from the controller's watch.

Metrics know the replicas that serve; the controller also those that load, drain or died, and why. It only looks.
"""

import time
from dataclasses import dataclass, field
from itertools import groupby

import grpc
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.live import Live
from rich.table import Table

from paceline.proto import cluster_pb2, cluster_pb2_grpc
from paceline.proto.errors import StartupError
from paceline.proto.token import bearer
from paceline.router.client import Client, Refused

INTERVAL = 1.0  # seconds between looks
PREFIX = "paceline_engine_"
COLUMNS = (
    "replica", "state", "running", "waiting", "kv_used", "kv_total", "tokens_per_s", "weights_mib", "kv_mib", "reason"
)  # fmt: skip


@dataclass
class Row:
    """``weights`` and ``kv`` are bytes by rank."""

    replica_id: str
    state: str = "ready"
    running: int = 0
    waiting: int = 0
    kv_used: int = 0
    kv_total: int = 0
    tokens_per_s: float = 0.0
    weights: dict[int, float] = field(default_factory=dict)
    kv: dict[int, float] = field(default_factory=dict)
    reason: str = ""

    def cells(self) -> list[str]:
        counts = [self.running, self.waiting, self.kv_used, self.kv_total]
        ranks = [_by_rank(self.weights), _by_rank(self.kv)]
        return [self.replica_id, self.state, *map(str, counts), f"{self.tokens_per_s:.1f}", *ranks, self.reason]


class Status:
    """Raises StartupError if neither the router nor the controller that was named answers."""

    def __init__(self, client: Client, controller: str | None = None, cluster_token: str | None = None):
        self._client = client
        self._controller = controller
        self._metadata = bearer(cluster_token)
        self._generated: dict[str, tuple[float, float]] = {}  # replica -> (when, tokens so far)

    def print_once(self) -> None:
        """Tab-separated, a heading first. A rate needs two looks."""
        self.rows()
        time.sleep(INTERVAL)
        print("\t".join(COLUMNS))
        for row in self.rows():
            print("\t".join(cell or "-" for cell in row.cells()))

    def watch(self) -> None:
        console = Console()
        try:
            with Live(self._table(), console=console, auto_refresh=False) as live:
                while True:
                    time.sleep(INTERVAL)
                    live.update(self._table(), refresh=True)
        except KeyboardInterrupt:
            pass

    def rows(self) -> list[Row]:
        rows = {row.replica_id: row for row in self._from_metrics()}
        for seen in self._from_controller():
            row = rows.setdefault(seen.replica_id, Row(seen.replica_id))
            row.state, row.reason = _name(seen.state), seen.reason
        return sorted(rows.values(), key=lambda row: row.replica_id)

    def _from_metrics(self) -> list[Row]:
        try:
            text = self._client.text("/metrics")
        except Refused as refused:
            raise StartupError(f"{self._client.url}: {refused}") from refused
        rows: dict[str, Row] = {}
        fields = {"requests_running": "running", "requests_waiting": "waiting"}
        fields |= {"kv_blocks_used": "kv_used", "kv_blocks_total": "kv_total"}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                replica_id = sample.labels.get("replica_id")
                if not replica_id:  # of the router, or of the command that started all
                    continue
                row = rows.setdefault(replica_id, Row(replica_id))
                name = sample.name.removeprefix(PREFIX)
                if name in fields:
                    setattr(row, fields[name], int(sample.value))
                elif name == "rank_weight_bytes":
                    row.weights[int(sample.labels["rank"])] = sample.value
                elif name == "rank_kv_bytes":
                    row.kv[int(sample.labels["rank"])] = sample.value
                elif name == "paceline_router_replica_ready":
                    row.state = "ready" if sample.value else "draining"
                elif name == "generation_tokens_total":
                    row.tokens_per_s = self._rate(replica_id, sample.value)
        return list(rows.values())

    def _rate(self, replica_id: str, tokens: float) -> float:
        now = time.monotonic()
        then, before = self._generated.get(replica_id, (now, tokens))
        self._generated[replica_id] = (now, tokens)
        return max(0.0, tokens - before) / (now - then) if now > then else 0.0

    def _from_controller(self) -> list[cluster_pb2.Replica]:
        if self._controller is None:
            return []
        try:
            with grpc.insecure_channel(self._controller) as channel:
                watch = cluster_pb2_grpc.ClusterServiceStub(channel).WatchReplicas(
                    cluster_pb2.WatchReplicasRequest(router_id="status"), timeout=5, metadata=self._metadata
                )
                return list(next(iter(watch)).replicas)
        except grpc.RpcError as error:
            raise StartupError(f"controller at {self._controller}: {error.code().name}") from error

    def _table(self) -> Table:
        table = Table(title=f"{self._client.url}", title_justify="left")
        for name, justify in zip(COLUMNS, ("left", "left", *["right"] * 7, "left"), strict=True):
            table.add_column(name.replace("_", " "), justify=justify)  # type: ignore[arg-type]
        for row in self.rows():
            table.add_row(*row.cells())
        return table


def _by_rank(held: dict[int, float]) -> str:
    """MiB of each rank in turn, equal neighbours together: 2 x 61.5 + 2 x 64.0."""
    figures = [f"{held[rank] / 2**20:.1f}" for rank in sorted(held)]
    runs = [(figure, len(list(run))) for figure, run in groupby(figures)]
    return " + ".join(figure if count == 1 else f"{count} x {figure}" for figure, count in runs)


def _name(state: int) -> str:
    return cluster_pb2.ReplicaState.Name(state).removeprefix("REPLICA_STATE_").lower()
