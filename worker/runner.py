"""One step on the device: a plan goes in, drawn ids come out, still on the device. Decides nothing, waits for nothing.

Order is the ordering law's: releases, admissions, table writes, copies, then per layer all KV writes before any read.
"""

from dataclasses import dataclass

import torch

from paceline.proto.step import StepPlan
from paceline.worker.attention.base import AttentionBackend, StepAttention
from paceline.worker.batch import Batch, build_batch
from paceline.worker.kv_cache import KVCache
from paceline.worker.models.decoder import CausalLM
from paceline.worker.sampler import Drawn, Sampler
from paceline.worker.table import SlotTable


@dataclass(frozen=True, slots=True)
class Runner:
    model: CausalLM
    cache: KVCache
    backend: AttentionBackend
    sampler: Sampler
    table: SlotTable

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> tuple[Batch, Drawn | None]:
        """Executes the whole plan. None where no row draws. Ids that were drawn are in the table for the next step."""
        self.table.apply(plan)
        self.cache.copy_blocks(plan)
        batch = build_batch(plan, self.table, self.cache.block_size)
        if not batch.num_tokens:
            return batch, None
        attn = StepAttention(self.backend, self.cache, self.backend.prepare(batch, self.cache.block_size))
        hidden = self.model(batch.ids, batch.positions, attn)  # [tokens, hidden]
        if not batch.samples.size:
            return batch, None
        logits = self.model.logits(hidden[batch.last_tokens])  # [draws, vocab]
        slots, positions = batch.slots[batch.samples], batch.context_lens[batch.samples]
        drawn = self.sampler(logits, slots, positions, self.table)
        self.table.write_ids(slots, positions, drawn.ids)
        return batch, drawn
