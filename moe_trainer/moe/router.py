"""The router: scores every expert for every token and selects k of them.

Shape suffixes: T tokens, E experts, K selected experts per token, D model width, G groups, P experts per
group. The router is pure: the same input gives the same output and no state changes; counters and the
update of the score bias live in the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_trainer.moe.config import RouterConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class RouterOutput(NamedTuple):
    """What `Router.forward` returns; forward hooks may rely on these fields and their order.

    Attributes:
        weights_TK: fp32 weights of the selected experts, after normalisation and scaling.
        indices_TK: int64 selected experts. For `expert_choice` K is E and -1 marks what was not chosen.
        counts_E: int64 assignments per expert: the demand, before any drop.
        scores_TE: fp32 probabilities (softmax) or sigmoid scores, without the score bias.
        logits_TE: fp32 logits.
    """

    weights_TK: Tensor
    indices_TK: Tensor
    counts_E: Tensor
    scores_TE: Tensor
    logits_TE: Tensor


class ScoringRouter(nn.Module):
    """Scores every expert for every token: fp32 logits of a linear map, then the gating function.

    Args:
        config: Settings; see `RouterConfig`.
        device: Where the parameters are created.

    Attributes:
        weight: (E, D) parameter.
        bias: (E,) parameter, or None.
    """

    def __init__(self, config: RouterConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config = config
        dtype = DTYPES[config.dtype]
        shape = config.num_experts, config.d_model
        self.weight = nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))
        bias = torch.empty(config.num_experts, dtype=dtype, device=device) if config.bias else None
        self.bias = None if bias is None else nn.Parameter(bias)

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Truncated normal weights (cut at 3 std), zero bias."""
        nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std, generator=generator)
        if self.bias is not None:
            self.bias.zero_()

    def logits(self, x: Tensor) -> Tensor:
        """x W^T (+ bias), divided by the temperature; (T, E), in fp32 also under autocast.

        In training the input is multiplied by uniform(1 - jitter_eps, 1 + jitter_eps).
        """
        c = self.config
        x_TD = x.reshape(-1, x.shape[-1])
        if self.training and c.jitter_eps is not None:
            x_TD = x_TD * (1 - c.jitter_eps + torch.rand_like(x_TD) * (2 * c.jitter_eps))
        with torch.autocast(x_TD.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            logits_TE = F.linear(x_TD.float(), self.weight.float(), bias)
        return logits_TE if c.temperature == 1.0 else logits_TE / c.temperature

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Softmax over the experts, or sigmoid + epsilon; random with `random_expert_assignment`."""
        if self.config.gating_function == "sigmoid":
            scores_TE = logits_TE.sigmoid() + self.config.sigmoid_stability_epsilon
        else:
            scores_TE = logits_TE.softmax(-1)
        if self.config.random_expert_assignment:
            # Zero times the scores keeps the backward pass of a system test complete.
            scores_TE = scores_TE * 0 + torch.rand_like(scores_TE)
        return scores_TE

    def normalize(self, weights: Tensor) -> Tensor:
        """Divide by the configured norm over the last axis."""
        p = self.config.normalize_expert_weights
        if p is None:
            return weights
        # A token that no expert chose (expert_choice) has no weights to normalise.
        least = tiny = torch.finfo(weights.dtype).tiny
        if p != 1:
            # The powers of small weights would underflow; with a largest weight of 1 the norm is at least 1.
            weights = weights / weights.detach().amax(-1, keepdim=True).clamp_min(tiny)
            least = 0.5
        norm: Tensor = torch.linalg.vector_norm(weights, p, dim=-1, keepdim=True)
        return weights / norm.clamp_min(least)


class DenseRouter(ScoringRouter):
    """Weights for all experts: mixes the shared experts of a layer."""

    def forward(self, x: Tensor) -> Tensor:
        """The (normalised) scores of all experts, (T, E)."""
        return self.normalize(self.scores(self.logits(x)))


class Router(ScoringRouter):
    """Selects k experts per token (or, for `expert_choice`, tokens per expert).

    Attributes:
        score_bias: (E,) fp32 buffer that is added to the scores for selection only, or None. It stays
            fp32 whatever the module is cast to: in bf16 a step of 1e-3 is lost beyond +-0.5.
    """

    score_bias: Tensor | None

    def __init__(self, config: RouterConfig, device: torch.device | str | None = None) -> None:
        super().__init__(config, device)
        biased = config.bias_gamma is not None or config.score_correction_bias
        # Also where the default dtype is a lower precision.
        bias_E = torch.zeros(config.num_experts, dtype=torch.float32, device=device) if biased else None
        self.register_buffer("score_bias", bias_E)
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Truncated normal weights (cut at 3 std), zero bias and score bias."""
        super().reset_parameters(std, generator)
        if self.score_bias is not None:
            self.score_bias.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        kept = self.score_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if kept is not None and self.score_bias is not None:
            moved = self.score_bias
            self.score_bias = moved.float() if kept.is_meta else kept.to(moved.device)
        return self

    def forward(self, x: Tensor) -> RouterOutput:
        """Select experts for x of shape (..., D); leading dimensions are flattened to T tokens."""
        c = self.config
        logits_TE = self.logits(x)
        scores_TE = self.scores(logits_TE)
        if c.routing == "expert_choice":
            indices_TK = self.select_tokens(scores_TE)
            weights_TK = scores_TE * (indices_TK >= 0)
        elif c.gating_function == "topk_softmax":
            indices_TK = self.select(logits_TE)
            weights_TK = logits_TE.gather(-1, indices_TK).softmax(-1)
        else:
            indices_TK = self.select(scores_TE)
            weights_TK = scores_TE.gather(-1, indices_TK)
        weights_TK = self.scale(weights_TK)
        counts_E = expert_counts(indices_TK, c.num_experts)
        return RouterOutput(weights_TK, indices_TK, counts_E, scores_TE, logits_TE)

    @torch.no_grad()
    def select(self, values_TE: Tensor) -> Tensor:
        """The k experts with the highest values plus score bias, within the best groups."""
        c = self.config
        if c.uniform_expert_assignment:
            slots = torch.arange(values_TE.shape[0] * c.top_k, device=values_TE.device)
            return (slots % c.num_experts).view(-1, c.top_k)
        if self.score_bias is not None:
            values_TE = values_TE + self.score_bias
        if c.tie_break and c.score_quantization is not None:
            # float64 holds the grid exactly at every magnitude of an fp32 value.
            values_TE = (values_TE.double() * 2.0**c.score_quantization).round_()
        if c.n_group is not None and c.topk_group is not None:
            values_TGP = values_TE.view(-1, c.n_group, c.num_experts // c.n_group)
            best_TG = values_TGP.topk(min(2, values_TGP.shape[-1]), dim=-1).values.sum(-1)
            outside_TG = torch.ones_like(best_TG, dtype=torch.bool)
            outside_TG.scatter_(-1, self._top(best_TG, c.topk_group), False)
            values_TE = values_TGP.masked_fill(outside_TG.unsqueeze(-1), -torch.inf).flatten(-2)
        return self._top(values_TE, c.top_k)

    @torch.no_grad()
    def select_tokens(self, scores_TE: Tensor) -> Tensor:
        """`expert_choice`: column e is e where expert e chose the token, else -1.

        Each expert takes the ceil(T*k/E) tokens it scores highest (Zhou et al. 2022).
        """
        tokens, num_experts = scores_TE.shape
        share = min(tokens, -(-tokens * self.config.top_k // num_experts))
        chosen_ET = scores_TE.T.topk(share, dim=-1).indices
        columns_TE = torch.full_like(scores_TE, -1, dtype=torch.int64)
        experts_ET = torch.arange(num_experts, device=scores_TE.device).unsqueeze(-1)
        return columns_TE.T.scatter(-1, chosen_ET, experts_ET.expand_as(chosen_ET)).T

    def _top(self, values: Tensor, k: int) -> Tensor:
        if self.config.tie_break:
            return values.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        if k == 1:
            return values.argmax(-1, keepdim=True)
        return values.topk(k, dim=-1).indices

    def scale(self, weights_TK: Tensor) -> Tensor:
        """Normalise the selected weights and apply the weight scalings."""
        c = self.config
        weights_TK = self.normalize(weights_TK)
        factor = c.expert_weight_scale if c.expert_weight_scale is not None else 1.0
        if c.restore_weight_scale:
            factor *= c.top_k
        if c.original_top_k is not None:
            factor *= (c.original_top_k / c.top_k) ** 0.5
        return weights_TK if factor == 1.0 else weights_TK * factor


def expert_counts(indices: Tensor, num_experts: int) -> Tensor:
    """How often each expert occurs in `indices` (-1: none), int64, without a host synchronisation."""
    flat = indices.reshape(-1)
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return counts_E.scatter_add_(0, flat.clamp_min(0), (flat >= 0).long())
