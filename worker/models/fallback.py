"""Any causal language model that has no family here, by transformers' own modeling with our paged attention plugged in.

All tokens of a step run as one row, with their positions, and transformers' cache is not used. What layers ask of
attention is not guessed from the config: a run without weights tells (fallback_probe.py), and what cannot be served so
is refused by name. The modules are built by fallback_modeling.py, which imports transformers (the extra of that name;
it takes seconds); tensors of files find their places in them by fallback_weights.py, and tensor ranks get what
transformers' own plan gives them by fallback_shards.py.
"""

import json
import re
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.proto.errors import StartupError
from paceline.worker.attention.base import StepAttention
from paceline.worker.loader import Target
from paceline.worker.models.config import Config
from paceline.worker.models.decoder import CausalLM
from paceline.worker.models.fallback_modeling import (
    PAGED,
    PROBED,
    EmptyOnMeta,
    FileNames,
    Handed,
    build,
    halves,
    ignored_names,
    run_probe,
)
from paceline.worker.models.fallback_probe import Unserved, check_layers, own_values
from paceline.worker.models.fallback_shards import Cut, cut_model, cut_rows, no_ranks
from paceline.worker.models.fallback_weights import Holder, holders_of, targets_of
from paceline.worker.models.spec import ModelSpec
from paceline.worker.parallel import Groups
from paceline.worker.shards import Shards
from paceline.worker.tensor_view import TensorView

MIXED = 0.05  # of a vector's largest entry; rounding is far less


class Fallback(CausalLM):
    """One rank's share. The stream is transformers' own, in the weights' dtype, and begins inside: ids go in.

    Raises StartupError for pipeline stages, and for tensor ranks where the plan does not allow them.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, groups: Groups | None = None):
        nn.Module.__init__(self)  # of the shared decoder nothing is here
        self.groups = groups or Groups()
        self.spec, self.place = spec, self.groups.place
        if self.place.pp > 1:
            raise StartupError(
                f"--pipeline-parallel-size {self.place.pp} cannot be had for {spec.architecture}, which runs through "
                "transformers; 1 works."
            )
        self.shard = Shards.of(spec, self.place.tp).of_rank(self.place.tp_rank)
        self.handed = Handed(tuple(spec.window_of(layer) for layer in range(spec.num_layers)))
        with EmptyOnMeta():
            whole = build(json.loads(spec.config), dtype, PAGED, self.handed)
        self._names = FileNames(whole)
        self._holders, self._tied = holders_of(whole)
        self._cuts: dict[str, Cut] = {}
        self._vocab_sizes: tuple[int, ...] = ()  # by tensor rank, where the head is cut
        if self.place.tp > 1:
            _check_share(spec, self.groups)
            self._cuts = cut_model(whole, whole.tp_plan, self.groups, spec.architecture)
            self._cut_head(whole)
        for key, source in self._tied.items():
            share = partial(_share, self._holders[source], self._holders[key])
            setattr(self._holders[source].module, "pack", share)  # noqa: B010  the loader calls it once there is a weight
        self.model, self.rest = halves(whole)  # type: ignore[assignment]  # modules of transformers'
        self._device: torch.device | None = None  # where the buffers are that were computed on the host

    @classmethod
    def spec_of(cls, config: Config) -> ModelSpec:
        """By one run of the whole model without weights. Raises StartupError with what cannot be served."""
        try:
            with torch.device("meta"):
                model = build(config.values, torch.bfloat16, PROBED, handed := Handed())
                asked, num_ids = run_probe(model, handed)
            first = check_layers(asked, model.config.num_hidden_layers)
        except Unserved as reason:
            raise _refusal(config, str(reason)) from reason
        except Exception as error:  # whatever transformers' code raises
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise _refusal(config, f"its code does not run on this config without weights ({said})") from error
        fields = model.config
        if not isinstance(getattr(fields, "max_position_embeddings", None), int):
            config.need_int("max_position_embeddings")
        inner = getattr(fields, "intermediate_size", None)
        windows = tuple(call.window for call in sorted(asked, key=lambda call: call.layer))
        return ModelSpec(
            architecture=config.architecture,
            hidden_size=fields.hidden_size,
            intermediate_size=inner if isinstance(inner, int) else fields.hidden_size,
            num_layers=fields.num_hidden_layers,
            num_heads=first.num_heads,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            vocab_size=num_ids,
            max_position=fields.max_position_embeddings,
            norm_eps=0.0,  # transformers' own affair
            tie_embeddings="lm_head.weight" in model.all_tied_weights_keys,
            windows=windows if any(windows) else (),
            config=json.dumps(config.values),
        )

    @classmethod
    def tensors_of(cls, spec: ModelSpec, name: str) -> dict[str, TensorView]:
        """By their names in the file; what they are here, ``find_targets`` says."""
        if any(re.search(pattern, name) for pattern in ignored_names(spec.architecture)):
            return {}
        return super().tensors_of(spec, name)

    def find_targets(self, names: list[str]) -> dict[str, Target]:
        """Where each of the files' tensors goes, by its name there. Raises StartupError for weights that would have to
        be converted."""
        return targets_of(self._names.sources(names), self._holders, self._tied, self._cuts)

    def serve_up_to(self, length: int) -> None:
        """Raises StartupError where a token's vector depends on who stands beside it in a step: sequences must not mix.

        Of two rows the last token is the same, its neighbours are not, and attention shows everyone only itself.
        """
        device = next(self.parameters()).device
        rows = [((0, 1, 2), (0, 1, 2)), ((4, 5, 2), (max(length - 2, 0), length - 1, 2))]  # ids, positions
        one, other = (
            self(torch.tensor(ids, device=device), torch.tensor(positions, device=device), own_values)[-1].float()
            for ids, positions in rows
        )
        if (one - other).abs().max() > MIXED * one.abs().max():
            raise StartupError(
                f"The model's architecture {self.spec.architecture}, which runs through transformers, cannot be "
                "served: its layers mix neighbouring tokens by other means than attention."
            )

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """ids, positions: [tokens]. The ids: the decoder looks them up itself."""
        return ids.long()

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attn: StepAttention) -> torch.Tensor:
        """x: ids [tokens]; positions: [tokens]. Returns [tokens, hidden], in the weights' dtype and normalised."""
        if self._device != positions.device:
            self._device = positions.device
            self.to(self._device)
        self.handed.attn = attn
        try:
            out = self.model(input_ids=x[None], position_ids=positions[None], use_cache=False, return_dict=True)
        finally:
            self.handed.attn = None
        return out.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """hidden: [rows, hidden]. Returns fp32 [rows, vocab_size] on the first tensor rank, None on the others."""
        logits = self.rest(inputs_embeds=hidden[None], use_cache=False, return_dict=True).logits[0].float()
        if self._vocab_sizes:
            return self.groups.gather(logits, self._vocab_sizes)
        return logits if self.place.tp_rank == 0 else None

    def _cut_head(self, whole: Any) -> None:
        """Where the plan would, and the head is no embedding too: that one is whole on every rank."""
        head = whole.get_output_embeddings()
        name = next((name for name, module in whole.named_modules() if module is head), "")
        weight = f"{name}.weight"
        may = isinstance(head, nn.Linear) and head.bias is None and "colwise" in whole.tp_plan.get(name, "")
        if may and weight not in (*self._tied, *self._tied.values()) and self.spec.vocab_size % self.place.tp == 0:
            self._cuts[weight] = cut_rows(head, self.place)
            self._vocab_sizes = (self.spec.vocab_size // self.place.tp,) * self.place.tp


def _check_share(spec: ModelSpec, groups: Groups) -> None:
    """Raises StartupError unless transformers' code runs on a tensor rank's share, with this rank's heads."""
    place, name = groups.place, spec.architecture
    if spec.num_heads % place.tp or spec.num_kv_heads % place.tp:
        raise no_ranks(place, name, f"its {spec.num_heads} heads and {spec.num_kv_heads} KV heads do not divide")
    try:
        with torch.device("meta"):
            model = build(json.loads(spec.config), torch.bfloat16, PROBED, handed := Handed())
            cut_model(model, model.tp_plan, groups, name)
            asked, _ = run_probe(model, handed)
    except StartupError:
        raise
    except Exception as error:  # shapes that do not fit, most of all
        raise no_ranks(place, name, "its code does not run on a part of the heads") from error
    if asked[0].num_heads * place.tp != spec.num_heads or asked[0].num_kv_heads * place.tp != spec.num_kv_heads:
        raise no_ranks(place, name, "transformers has no plan that shares its heads")


def _share(source: Holder, tied: Holder) -> None:
    setattr(tied.module, tied.leaf, source.values)


def _refusal(config: Config, reason: str) -> StartupError:
    return StartupError(
        f"{config.path} names architecture {config.architecture}, for which there is no family here, and transformers' "
        f"model cannot be served: {reason}."
    )
