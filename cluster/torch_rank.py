"""What a rank process of a gang computes with: the worker's rank, its groups, and the facts that must agree before.

The only door from rank_process.py to torch, imported there once the number of threads is known; local.py is that of a
replica of one rank.
"""

import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from paceline.cluster.messages import Assign, Facts, Go, Ready
from paceline.proto.errors import StartupError
from paceline.proto.step import StepPlan
from paceline.worker.attention.base import select
from paceline.worker.card import fingerprint
from paceline.worker.checkpoint import open_checkpoint
from paceline.worker.config import RankConfig
from paceline.worker.distributed import connect
from paceline.worker.memory import free_memory
from paceline.worker.models import model_class
from paceline.worker.parallel import Groups, Place
from paceline.worker.rank import PendingStep, Rank, resolve_device, resolve_dtype
from paceline.worker.shards import Shards

# NCCL asks /dev/shm for a segment of 9.2 MiB for each of a rank's neighbours on its host. What ranks on a CPU share
# has no name in /dev/shm.
NCCL_SEGMENT = 10 << 20


class TorchRank:
    """A `rank_process.Work`."""

    def __init__(self) -> None:
        self.samples = False
        self._rank: Rank | None = None
        self._groups: Groups | None = None
        self._listener: socket.socket | None = None  # where ranks will meet, should this be rank 0

    def look(self, assign: Assign) -> Facts:
        config = assign.config
        self._place = Place.of(assign.rank, config.tensor_parallel_size, config.pipeline_parallel_size)
        self.samples = self._place.samples
        try:
            self._device = _device(config.device, assign.local_rank)
            facts = self._facts(config)
        except (StartupError, OSError) as error:
            return Facts(trouble=str(error), torch=str(torch.__version__))
        self._config = msgspec.structs.replace(config, device=str(self._device))
        return facts

    def join(self, go: Go, interface: str) -> None:
        listen_fd = self._listener.detach() if self._listener is not None else None
        self._groups = connect(
            self._place,
            go.host,
            go.port,
            self._device,
            go.timeout,
            interface or None,
            listen_fd=listen_fd,
        )

    def load(self, on_phase: Callable[[str, float], None]) -> Ready:
        self._rank = rank = Rank(self._config, on_phase=on_phase, groups=self._groups)
        return Ready(
            memory=rank.held,
            num_blocks=rank.num_kv_blocks,
            description=rank.describe(),
            card=rank.card if self.samples else None,
        )

    def execute(self, plan: StepPlan) -> PendingStep:
        assert self._rank is not None
        return self._rank.execute(plan)

    def close(self) -> None:
        if self._groups is not None:
            self._groups.close()

    def _facts(self, config: RankConfig) -> Facts:
        """What a load would refuse is refused here, before ranks wait for each other. Raises StartupError, or OSError
        for files that may not be read."""
        device = self._device
        dtype = resolve_dtype(config.dtype, device)
        checkpoint = open_checkpoint(Path(config.model))
        spec = checkpoint.spec
        model_class(spec)
        Shards.of(spec, config.tensor_parallel_size, config.pipeline_parallel_size)
        backend = select(config.attention_backend, device, dtype, spec.head_dim)
        is_gpu = device.type == "cuda"
        properties = torch.cuda.get_device_properties(device) if is_gpu else None
        return Facts(
            device_kind=device.type,
            device_name=properties.name if properties else "cpu",
            device_id=str(properties.uuid) if properties else "",
            free_device_memory=free_memory(device).free,
            free_host_memory=free_memory(torch.device("cpu")).free,
            torch=str(torch.__version__),
            dtype=str(dtype).removeprefix("torch."),
            backend=type(backend).__name__.removesuffix("Attention").lower(),
            model=fingerprint(checkpoint, ""),  # the dtype is compared by itself
            shared_memory_needed=NCCL_SEGMENT * (config.tensor_parallel_size - 1) if is_gpu else 0,
            port=self._listen() if self._place.rank == 0 else 0,
        )

    def _listen(self) -> int:
        self._listener = socket.create_server(("", 0))
        return self._listener.getsockname()[1]


def _device(name: str, local_rank: int) -> torch.device:
    """Of the GPUs that this process sees, the one of its number; it sees one alone where its launcher chose."""
    device = resolve_device(name)
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", min(local_rank, torch.cuda.device_count() - 1))
