"""Who waits, in a total order: (priority, tokens already served to the tenant, arrival, choice).

One sorted list per tenant, merged on reading: within a tenant the order never changes, between tenants it follows the
service counters (Sheng et al. 2024, "Fairness in Serving Large Language Models": a tenant that comes back starts from
the least served active one, so that idling earns no credit). This file knows no blocks and no budget.
"""

import heapq
from bisect import bisect_left, insort
from itertools import islice

from paceline.cluster.engine.sequence import Sequence


def _key(seq: Sequence) -> tuple:
    return seq.key


class WaitingQueue:
    def __init__(self) -> None:
        self._queues: dict[str, list[Sequence]] = {}
        self._served: dict[str, int] = {}
        self._active: dict[str, int] = {}  # sequences of a tenant that are alive, waiting or running
        self.num_tenants = 0  # with one that is alive; service need only be counted between several

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def join(self, tenant: str) -> None:
        """A sequence of the tenant was accepted."""
        if not self._active.get(tenant):
            floor = min((self._served[t] for t, n in self._active.items() if n), default=0)
            self._served[tenant] = max(self._served.get(tenant, 0), floor)
            self.num_tenants += 1
        self._active[tenant] = self._active.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """A sequence of the tenant ended."""
        self._active[tenant] -= 1
        self.num_tenants -= not self._active[tenant]

    def serve(self, tenant: str, num_tokens: int) -> None:
        self._served[tenant] += num_tokens

    def push(self, seq: Sequence) -> None:
        insort(self._queues.setdefault(seq.request.tenant, []), seq, key=_key)

    def remove(self, seq: Sequence) -> None:
        queue = self._queues[seq.request.tenant]
        index = bisect_left(queue, seq.key, key=_key)
        assert queue[index] is seq
        del queue[index]
        if not queue:
            del self._queues[seq.request.tenant]

    def first(self, limit: int) -> list[Sequence]:
        """The next ``limit`` in order."""
        queues = list(self._queues.values())
        if len(queues) == 1:
            return queues[0][:limit]
        served = self._served
        merged = heapq.merge(*queues, key=lambda s: (s.key[0], served[s.request.tenant], s.key))
        return list(islice(merged, limit))

    def all(self) -> list[Sequence]:
        return [seq for queue in self._queues.values() for seq in queue]
