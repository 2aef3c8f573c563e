"""transformers' modules of a model, without weights, made to call back for attention. The one file that imports it.

Attention goes through transformers' own table of attention functions, where two of ours stand: one for service, one for
a run on the meta device that only asks. Neither computes anything here. Whose caches, shares and weights there are is
not known here either; what a model does that cannot be served is raised as `Unserved`.
"""

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from paceline.proto.errors import StartupError
from paceline.worker.attention.base import StepAttention
from paceline.worker.models.config import Json
from paceline.worker.models.fallback_probe import NUM_TOKENS, Asked, Recorder, Unserved, check_call
from paceline.worker.models.fallback_weights import Source

PAGED, PROBED = "paceline", "paceline-probe"  # our attention functions in transformers' table
# Rotary frequencies that follow the longest sequence of a step: an answer would depend on its neighbours.
UNSTEADY_ROPE = ("dynamic", "longrope")


class Handed:
    """What the modules of one model find when they call our function for attention.

    Most of transformers' models hand arguments of ours on to it, but not all do; so they lie here while a step runs.
    """

    def __init__(self, windows: tuple[int, ...] | None = None):
        self.attn: StepAttention | Recorder | None = None
        self.windows = windows  # by layer; None: as the layer says


class Vectors(BaseModelOutputWithPast):
    """A decoder's output of which nothing but the vectors is known: all else that a head looks for is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class HandsOn(nn.Module):
    """Stands in the decoder's place where only what follows it is to run: gives out the vectors that went in."""

    def forward(self, input_ids=None, inputs_embeds=None, **arguments):
        return Vectors(last_hidden_state=inputs_embeds)

    @property
    def decoder(self) -> "HandsOn":
        """OPT's head calls an inner one."""
        return self


class EmptyOnMeta(TorchFunctionMode):
    """Weights take no memory; buffers that are computed, such as rotary frequencies, are computed on the host."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def build(values: Json, dtype: torch.dtype, attention: str, handed: Handed) -> PreTrainedModel:
    """transformers' model of a config.json, without weights where the caller's context has it so. Raises `Unserved`."""
    architecture = (values.get("architectures") or ["nothing"])[0]
    found = getattr(transformers, architecture, None)
    if found is None or architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        own = " (code of its own is not run)" if "auto_map" in values else ""
        raise Unserved(f"it is no causal language model of transformers {transformers.__version__}{own}")
    if found._is_stateful:
        raise Unserved("its layers keep a state (state-space or linear attention)")
    if not found._can_set_attn_implementation():
        raise Unserved("its attention does not go through transformers' attention interface")
    config = found.config_class.from_dict({name: value for name, value in values.items() if name != "auto_map"})
    if config.is_encoder_decoder:
        raise Unserved("it is an encoder and a decoder")
    if kinds := {*_rope_kinds(config)}.intersection(UNSTEADY_ROPE):
        raise Unserved(f"its rotary frequencies follow the longest sequence of a step ({', '.join(sorted(kinds))})")
    for name in ("use_cache", "output_router_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            setattr(config, name, False)
    # Entries of transformers' own table, the same each time.
    AttentionInterface.register(PAGED, attend)
    AttentionInterface.register(PROBED, probe)
    AttentionMaskInterface.register(PROBED, tagged_mask)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    if type(model) is not found:
        raise Unserved(f"its config is that of {type(model).__name__}")
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        raise Unserved("its layers mix neighbouring tokens by a convolution")
    for module in model.modules():
        module.handed = handed
    return model.eval().requires_grad_(False)


def attend(module, query, key, value, attention_mask, **asked):
    """An attention function as transformers calls it. query: [1, heads, tokens, dim]; key, value: [1, KV heads, tokens,
    dim], of this step's tokens only. Returns ([1, tokens, heads, dim], None)."""
    q, k, v = _tokens_first(query), _tokens_first(key), _tokens_first(value)
    handed, layer = module.handed, module.layer_idx
    scale, sinks = asked.get("scaling"), asked.get("s_aux")
    out = handed.attn(
        layer,
        q,
        k,
        v,
        scale=q.shape[2] ** -0.5 if scale is None else scale,
        window=(asked.get("sliding_window") or 0) if handed.windows is None else handed.windows[layer],
        softcap=asked.get("softcap") or 0.0,
        sinks=sinks,
    )
    return out.view(1, len(q), q.shape[1], -1), None


def probe(module, query, key, value, attention_mask, **asked):
    """The same in a run that only asks. Raises `Unserved`."""
    layer, rule = getattr(module, "layer_idx", None), getattr(attention_mask, "rule", None)
    if layer is None:
        raise Unserved("its layers do not say which they are")
    if attention_mask is not None and rule is None:
        raise Unserved(f"its layer {layer} makes a mask of its own")
    check_call(layer, asked, None if rule is None else _sight(rule), asked.get("sliding_window") or 0)
    return attend(module, query, key, value, attention_mask, **asked)


def tagged_mask(q_length: int, kv_length: int, mask_function: Callable, **others: Any) -> torch.Tensor:
    """In place of a mask: nothing, with the rule that it would be filled by."""
    mask = torch.empty(1, 1, q_length, kv_length, device="meta")
    mask.rule = mask_function  # type: ignore[attr-defined]
    return mask


def _sight(rule: Callable) -> Callable[[int, int], bool]:
    def sees(query: int, key: int) -> bool:
        zero, q, k = (torch.tensor(value, device="cpu") for value in (0, query, key))
        return bool(rule(zero, zero, q, k))

    return sees


def run_probe(model: PreTrainedModel, handed: Handed) -> tuple[list[Asked], int]:
    """What its layers ask for, and for how many ids it gives logits. On the meta device."""
    decoder, rest = halves(model)
    handed.attn = recorder = Recorder()
    row = (1, NUM_TOKENS)
    with torch.inference_mode():
        out = decoder(
            input_ids=torch.zeros(row, dtype=torch.int64),
            position_ids=torch.arange(NUM_TOKENS)[None],
            attention_mask=torch.ones(row, dtype=torch.int64),  # asked for masks, it gives their rules
            use_cache=False,
            return_dict=True,
        )
        logits = rest(inputs_embeds=out.last_hidden_state, use_cache=False, return_dict=True).logits
    return recorder.asked, logits.shape[-1]


def halves(model: PreTrainedModel) -> tuple[nn.Module, PreTrainedModel]:
    """The decoder, and the rest of the model, which then takes the decoder's output as ``inputs_embeds``."""
    prefix = model.base_model_prefix
    decoder = getattr(model, prefix, None)
    if not isinstance(decoder, nn.Module) or "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise Unserved("it has no decoder that takes positions")
    setattr(model, prefix, HandsOn())
    return decoder, model


def ignored_names(architecture: str) -> tuple[str, ...]:
    """Patterns of tensors that its files may hold and nobody needs."""
    return tuple(getattr(transformers, architecture)._keys_to_ignore_on_load_unexpected or ())


class FileNames:
    """transformers' rules from tensors of files to parameters, as far as they need no arithmetic: other names, and
    stacks of experts whose matrices lie in the file one by one."""

    def __init__(self, whole: PreTrainedModel):
        rules = get_model_conversion_mapping(whole)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._prefix = whole.base_model_prefix
        self._known = dict.fromkeys(whole.state_dict(), True)

    def sources(self, names: list[str]) -> dict[str, Source]:
        """Those of the names that are known. Raises StartupError for a rule that computes."""
        sources: dict[str, Source] = {}
        counts: Counter[tuple[str, str]] = Counter()
        for name in sorted(names, key=dot_natural_key):  # experts in the order of their numbers
            key, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._known)
            if key not in self._known:
                key, pattern = rename_source_key(name, [], [], self._prefix, self._known)
            if key not in self._known:
                continue
            if pattern is None:
                sources[name] = Source(key)
            else:
                sources[name] = self._part(name, key, pattern, counts[key, pattern])
                counts[key, pattern] += 1
        return sources

    def _part(self, name: str, key: str, pattern: str, index: int) -> Source:
        rule = next(rule for rule in self._converters if pattern in rule.source_patterns)
        operations = list(rule.operations)
        is_stacked = isinstance(operations[0], MergeModulelist) and operations[0].dim == 0
        rest = operations[1:] if is_stacked else operations
        if len(rule.target_patterns) > 1 or not all(isinstance(step, Concatenate) for step in rest) or len(rest) > 1:
            steps = ", ".join(type(step).__name__ for step in operations)
            raise StartupError(
                f"The model's files hold {name}, which transformers would have to convert ({steps}); that is not "
                "supported: save the model with transformers 5 in its own layout."
            )
        block = rule.source_patterns.index(pattern)
        dim = rest[0].dim if rest else 0
        return Source(key, index if is_stacked else None, block, len(rule.source_patterns), dim)


def _rope_kinds(config: Any) -> list[str]:
    rope = getattr(config, "rope_parameters", None) or {}
    return [part["rope_type"] for part in (rope, *rope.values()) if isinstance(part, dict) and "rope_type" in part]


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    return x[0].transpose(0, 1).contiguous()
