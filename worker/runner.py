"""One step on the device: a plan goes in, drawn ids come out, still on the device. Decides nothing; waits for nothing
but other ranks.

Order is the ordering law's: releases, admissions, table writes, copies, then per layer all KV writes before any read.

    stage 0     embed, layers ──▶ send
    stage 1     receive, layers, logits ──▶ tensor rank 0 gathers and draws; with one stage it shares the ids
                masks of grammars are filled meanwhile, for that rank

With several stages drawn ids stay where they were drawn: the scheduler knows an id before it plans what follows it, so
a plan carries it to every rank. With one stage the next plan may be under way already and read ids from the table.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.proto.step import StepPlan
from paceline.worker.attention.base import AttentionBackend, StepAttention
from paceline.worker.batch import Batch, Scored, build_batch
from paceline.worker.grammar import Grammars
from paceline.worker.kv_cache import KVCache
from paceline.worker.logprobs import Logprobs
from paceline.worker.models.decoder import CausalLM
from paceline.worker.parallel import Groups
from paceline.worker.pending import Outcome
from paceline.worker.sampler import Sampler
from paceline.worker.table import SlotTable

SCORED_AT_ONCE = 64  # prompt ids: their logits would take a gigabyte for a chunk of 2,048 and 128,000 ids


@dataclass(frozen=True, slots=True)
class Runner:
    model: CausalLM
    layers: Callable[[torch.Tensor, torch.Tensor, StepAttention], torch.Tensor]  # the model's, as they are run here
    cache: KVCache
    backend: AttentionBackend
    sampler: Sampler
    table: SlotTable
    groups: Groups
    grammars: Grammars | None = None  # of the rank that samples

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Outcome:
        """Executes the whole plan."""
        self.table.apply(plan)
        if self.grammars is not None:
            self.grammars.apply(plan)
        self.cache.copy_blocks(plan)
        batch = build_batch(plan, self.table, self.cache.block_size)
        if not batch.num_tokens:
            return Outcome(batch)
        masks_of = None if self.grammars is None else self.grammars.start(batch)
        attn = StepAttention.of(self.backend, self.cache, batch)
        hidden = self.layers(self._stream(batch), batch.positions, attn)  # [tokens, hidden]
        if not self.groups.place.is_last_stage:
            self.groups.send(hidden)
            return Outcome(batch)
        prompt_logprobs = None if batch.scored is None else self._score(hidden, batch.scored)
        if not batch.samples.size:
            return Outcome(batch, None, prompt_logprobs)
        logits = self.model.logits(hidden[batch.last_tokens])  # [draws, vocab], of tensor rank 0
        slots, positions = batch.slots[batch.samples], batch.context_lens[batch.samples]
        masks = None if masks_of is None else masks_of()
        drawn = None if logits is None else self.sampler(logits, slots, positions, self.table, masks)
        ids = None if drawn is None else drawn.ids
        if self.groups.place.pp == 1:
            ids = self.groups.share(ids, len(slots))
        if ids is not None:
            self.table.write_ids(slots, positions, ids)
        return Outcome(batch, drawn, prompt_logprobs, {} if masks is None else masks.faults)

    def _score(self, hidden: torch.Tensor, scored: Scored) -> Logprobs | None:
        """None on ranks that do not sample, who compute their share of the logits."""
        k, parts = int(scored.counts.max()), []
        for start in range(0, len(scored.rows), SCORED_AT_ONCE):
            piece = slice(start, start + SCORED_AT_ONCE)
            logits = self.model.logits(hidden[scored.tokens[piece]])
            if logits is not None:
                raw = logits[:, : self.sampler.vocab_size]
                parts.append(Logprobs.of(raw, scored.ids[piece], scored.rows[piece], scored.counts[piece], k))
        return Logprobs.cat(parts) if parts else None

    def _stream(self, batch: Batch) -> torch.Tensor:
        """The residual stream before this stage's layers: fp32 [tokens, hidden]."""
        if self.groups.place.is_first_stage:
            return self.model.embed(batch.ids, batch.positions)
        shape = (batch.num_tokens, self.model.spec.hidden_size)
        return self.groups.receive(shape, torch.float32, batch.ids.device)
