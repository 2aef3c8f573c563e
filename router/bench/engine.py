"""An engine of this process as a target: no HTTP, no text, no other process. It is handed the host, and knows how a
router would speak to it."""

import asyncio
import itertools
import time
from typing import Any

from paceline.proto import codec, hashing
from paceline.proto.errors import PacelineError
from paceline.proto.model import ModelCard
from paceline.proto.request import FINISH_ERROR, Request, SamplingParams
from paceline.router.bench.figures import Record
from paceline.router.bench.workloads import Job


class EngineTarget:
    """``host`` is a loaded EngineHost of cluster/host.py and ``card`` what it loaded; whoever made it stops it."""

    def __init__(self, host: Any, card: ModelCard):
        self._host = host
        self._block_size = card.block_size
        self._root = hashing.root_of(card)
        self._caller = host.open("bench")
        self._handles = itertools.count(1)
        self._asked: dict[int, tuple[Record, asyncio.Future[None]]] = {}
        self._reading = asyncio.create_task(self._read())

    async def ask(self, job: Job) -> Record:
        handle = next(self._handles)
        request = Request(
            request_id=str(handle),
            prompt_ids=job.prompt_ids,
            params=SamplingParams(seed=0, temperature=0.0, max_tokens=job.num_wanted, ignore_eos=True),
            cache_root=self._root,
            block_hashes=hashing.prompt_hashes(self._root, job.prompt_ids, self._block_size),
        )
        record = Record(len(job.prompt_ids), job.num_wanted, time.perf_counter())
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked[handle] = (record, done)

        def reply(error: PacelineError | None) -> None:
            if error is not None:
                record.error = error.message
                done.set_result(None)

        self._host.submit(self._caller, handle, request, reply)
        await done
        del self._asked[handle]
        record.ended = time.perf_counter()
        return record

    async def close(self) -> None:
        self._reading.cancel()
        self._host.close(self._caller)

    async def _read(self) -> None:
        """Frames of the engine's steps, to its end."""
        while (frame := await self._caller.outbox.take()) is not None:
            now = time.perf_counter()
            for handle, delta in codec.deltas_of(frame.deltas, str):
                record, done = self._asked[handle]
                if delta.ids:
                    record.arrivals.append(now)
                    record.num_ids += len(delta.ids)
                if delta.finish_reason == FINISH_ERROR:
                    record.error = delta.error
                if delta.finish_reason is not None:
                    done.set_result(None)
        for record, done in self._asked.values():
            if not done.done():
                record.error = record.error or "the engine has ended"
                done.set_result(None)
