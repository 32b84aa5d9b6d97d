"""A router of your own: a class, and a function that says where its output holds the choice.

    @router_function("my_model.Router", num_experts=64, top_k=4)
    def _(output):
        return Routing(indices=output[1], weights=output[0], logits=output[2])

Shape suffixes: T tokens that reached the router, K picks per token, E experts of the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from moe_audit.hooks.adapters.base import NO_PICK, Adapter, Observation, add_adapter, class_name, is_a
from moe_audit.hooks.adapters.form import check_indices, check_map, expert_count, local, pick_count
from moe_audit.store import LayerInfo
from moe_audit.thresholds.errors import UsageError


class Routing(NamedTuple):
    """Where a router's output holds what. Leading dimensions are flattened to T tokens.

    Attributes:
        indices: Chosen experts, integers (..., K). Give these or `chosen`.
        chosen: Routing map, bool (..., E), for routers whose number of picks per token varies (expert choice,
            thresholds).
        weights: Combine weights (..., K).
        logits, probs: One value for every expert, (..., E): before or after the gate. At most one of them.
        kept: bool (..., K), False where a pick was dropped for capacity.
    """

    indices: Tensor | None = None
    chosen: Tensor | None = None
    weights: Tensor | None = None
    logits: Tensor | None = None
    probs: Tensor | None = None
    kept: Tensor | None = None


class FunctionAdapter(Adapter):
    """Observes every module of one class by a function of its output.

    Args:
        target: The class of the router, or its qualified name.
        routing: From the module's output to a `Routing`, or to the indices alone.
        num_experts: E; None: read from the module or its configuration.
        top_k: K; None: read from the module or its configuration; "varies" for routers with `chosen`.
        fused_shared: Shared experts whose ids, from E on, stand among every token's picks: not counted.
        gating: "softmax" or "sigmoid": makes probabilities of logits.
        layout: Order of the tokens: "batch" (B, S) or "sequence" (S, B).
    """

    def __init__(
        self,
        target: type[nn.Module] | str,
        routing: Callable[[Any], Routing | Tensor],
        *,
        num_experts: int | None = None,
        top_k: int | Literal["varies"] | None = None,
        fused_shared: int = 0,
        gating: Literal["softmax", "sigmoid"] = "softmax",
        layout: Literal["batch", "sequence"] = "batch",
    ) -> None:
        self.target = target
        self.routing = routing
        self.num_experts = num_experts
        self.top_k = top_k
        self.fused_shared = fused_shared
        self.gating = gating
        self.layout: Literal["batch", "sequence"] = layout

    def match(self, module: nn.Module) -> bool:
        """Whether `module` is of the target class."""
        return is_a(module, self.target) if isinstance(self.target, str) else isinstance(module, self.target)

    def describe(self, name: str, module: Any, parent: Any) -> LayerInfo:
        """The layer, with E and K as given or as the module says.

        Raises:
            UsageError: E or K is neither given nor known.
        """
        experts = self._experts(module)
        if self.top_k == "varies":
            return LayerInfo(-1, name, experts, None, gating=self.gating)
        picks = self.top_k or pick_count(module)
        if picks is None:
            raise UsageError(
                f"{name}: the picks per token of {class_name(module)} are not known",
                'give top_k, or top_k="varies"',
            )
        return LayerInfo(-1, name, experts, picks, gating=self.gating)

    def observe(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Observation:
        """What the function finds in the output, checked.

        Raises:
            UsageError: The function's result has not the form of a `Routing`.
        """
        routing = self.routing(output)
        routing = routing if isinstance(routing, Routing) else Routing(routing)
        experts, label = self._experts(module), class_name(module)
        if (routing.indices is None) == (routing.chosen is None):
            raise UsageError(f"{label}: a Routing needs either indices or chosen")
        if routing.logits is not None and routing.probs is not None:
            raise UsageError(f"{label}: a Routing takes logits or probs, not both")
        if routing.chosen is not None:
            chosen_TE = check_map(routing.chosen, experts, label)
            ids_E = torch.arange(experts, device=chosen_TE.device)
            indices_TK = torch.where(chosen_TE, ids_E, NO_PICK)
        else:
            top_k = None if self.top_k == "varies" else self.top_k or pick_count(module)
            columns = None if top_k is None else top_k + self.fused_shared
            total = experts + self.fused_shared
            indices_TK = check_indices(cast("Tensor", routing.indices), total, columns, label)
            if self.fused_shared:
                shared_TK = (indices_TK >= experts) & (indices_TK < total)
                indices_TK = torch.where(shared_TK, NO_PICK, indices_TK)
        full = routing.probs if routing.logits is None else routing.logits
        return Observation(
            indices_TK,
            _rows(routing.weights, indices_TK, indices_TK.shape[-1], "weights", label),
            _rows(full, indices_TK, experts, "scores of all experts", label),
            None if full is None else "probs" if routing.logits is None else "logits",
            _rows(routing.kept, indices_TK, indices_TK.shape[-1], "kept", label),
            self.layout,
        )

    def _experts(self, module: nn.Module) -> int:
        return self.num_experts or expert_count(module)


def _rows(x: Tensor | None, indices_TK: Tensor, width: int, what: str, label: str) -> Tensor | None:
    if x is None:
        return None
    x = local(x)
    if x.shape[-1] != width or x.numel() != indices_TK.shape[0] * width:
        raise UsageError(
            f"{label}: {what} must be ({indices_TK.shape[0]}, {width}) a call, got {tuple(x.shape)}"
        )
    return x.reshape(-1, width)


def router_function(
    target: type[nn.Module] | str, **options: Any
) -> Callable[[Callable[[Any], Routing | Tensor]], FunctionAdapter]:
    """Decorator: register a function from a router's output to a `Routing`; see `FunctionAdapter`."""

    def decorate(routing: Callable[[Any], Routing | Tensor]) -> FunctionAdapter:
        adapter = FunctionAdapter(target, routing, **options)
        add_adapter(adapter)
        return adapter

    return decorate
