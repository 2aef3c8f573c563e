"""One step on the device: a plan goes in, drawn ids come out, still on the device. Decides nothing; waits for nothing
but other ranks.

Order is the ordering law's: releases, admissions, table writes, copies, then per layer all KV writes before any read.

    stage 0     embed, layers ──▶ send
    stage 1     receive, layers, logits ──▶ tensor rank 0 gathers and draws; with one stage it shares the ids

With several stages drawn ids stay where they were drawn: the scheduler knows an id before it plans what follows it, so
a plan carries it to every rank. With one stage the next plan may be under way already and read ids from the table.
"""

from dataclasses import dataclass

import torch

from paceline.proto.step import StepPlan
from paceline.worker.attention.base import AttentionBackend, StepAttention
from paceline.worker.batch import Batch, build_batch
from paceline.worker.kv_cache import KVCache
from paceline.worker.models.decoder import CausalLM
from paceline.worker.parallel import Groups
from paceline.worker.sampler import Drawn, Sampler
from paceline.worker.table import SlotTable


@dataclass(frozen=True, slots=True)
class Runner:
    model: CausalLM
    cache: KVCache
    backend: AttentionBackend
    sampler: Sampler
    table: SlotTable
    groups: Groups

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> tuple[Batch, Drawn | None]:
        """Executes the whole plan. None where no row draws, and on ranks that do not sample."""
        self.table.apply(plan)
        self.cache.copy_blocks(plan)
        batch = build_batch(plan, self.table, self.cache.block_size)
        if not batch.num_tokens:
            return batch, None
        attn = StepAttention.of(self.backend, self.cache, batch)
        hidden = self.model(self._stream(batch), batch.positions, attn)  # [tokens, hidden]
        if not self.groups.place.is_last_stage:
            self.groups.send(hidden)
            return batch, None
        if not batch.samples.size:
            return batch, None
        logits = self.model.logits(hidden[batch.last_tokens])  # [draws, vocab], of tensor rank 0
        slots, positions = batch.slots[batch.samples], batch.context_lens[batch.samples]
        drawn = None if logits is None else self.sampler(logits, slots, positions, self.table)
        ids = None if drawn is None else drawn.ids
        if self.groups.place.pp == 1:
            ids = self.groups.share(ids, len(slots))
        if ids is not None:
            self.table.write_ids(slots, positions, ids)
        return batch, drawn

    def _stream(self, batch: Batch) -> torch.Tensor:
        """The residual stream before this stage's layers: fp32 [tokens, hidden]."""
        if self.groups.place.is_first_stage:
            return self.model.embed(batch.ids, batch.positions)
        shape = (batch.num_tokens, self.model.spec.hidden_size)
        return self.groups.receive(shape, torch.float32, batch.ids.device)
