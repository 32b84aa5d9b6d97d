"""Router losses: load balance, z and orthogonality.

Shape suffixes: T tokens, E experts, K selected experts per token, D model width, B instances. All losses are
returned without their weights. `divisor` is D of the formulas, the tokens the loss is averaged over: with
gradient accumulation it is the tokens of the whole batch over the data-parallel size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trainer.moe.router import expert_counts


def normalized_scores(scores_TE: Tensor, gating_function: str) -> Tensor:
    """Scores that sum to one over the experts; softmax scores do so already."""
    if gating_function == "sigmoid":
        # Without a stability epsilon all scores of a token can be zero.
        tiny = torch.finfo(scores_TE.dtype).tiny
        return scores_TE / scores_TE.sum(-1, keepdim=True).clamp_min(tiny)
    return scores_TE


def mean_over_tokens(values_TE: Tensor) -> Tensor:
    """Mean over the tokens; zero, with a gradient, where there are none."""
    return values_TE.sum(0) / max(1, values_TE.shape[0])


def balance_loss(scores_TE: Tensor, counts_E: Tensor, top_k: int, divisor: float) -> Tensor:
    """(E/k) * dot(counts, mean score) / D over the whole batch (Switch Transformer, Fedus et al. 2021)."""
    mean_E = mean_over_tokens(scores_TE)
    return scores_TE.shape[-1] / top_k / divisor * torch.dot(counts_E.to(mean_E.dtype), mean_E)


def instance_balance_loss(scores_TE: Tensor, indices_TK: Tensor, instances: int, divisor: float) -> Tensor:
    """(E/k) * sum over instances of dot(its counts, its mean score) / D."""
    num_experts, top_k = scores_TE.shape[-1], indices_TK.shape[-1]
    if scores_TE.shape[0] == 0:
        return scores_TE.sum()
    mean_BE = scores_TE.view(instances, -1, num_experts).mean(1)
    ids = torch.arange(instances, device=indices_TK.device).view(-1, 1) * num_experts
    counts_BE = expert_counts(indices_TK.view(instances, -1) + ids, instances * num_experts)
    return num_experts / top_k / divisor * (counts_BE.view_as(mean_BE) * mean_BE).sum()


def z_loss(logits_TE: Tensor, divisor: float) -> Tensor:
    """Sum of logsumexp(logits)^2 / D: keeps the logits small (ST-MoE, Zoph et al. 2022)."""
    return logits_TE.logsumexp(-1).square().sum() / divisor


def orthogonal_loss(weight_ED: Tensor) -> Tensor:
    """||W_n W_n^T - I||_F^2 / E^2, W_n with unit rows. It depends on the weight only: once per step."""
    unit_ED = F.normalize(weight_ED.float(), dim=-1)
    gram_EE = unit_ED @ unit_ED.T
    eye_EE = torch.eye(len(gram_EE), device=gram_EE.device)
    return (gram_EE - eye_EE).square().sum() / len(gram_EE) ** 2


def dispatch_loss(logits_TE: Tensor, indices_TK: Tensor, counts_E: Tensor, divisor: float) -> Tensor:
    """Balance loss on where the tokens really went, not on mean probabilities.

    (E/k) * sum_e count_e * mean_t near_te / D with `nearness`: the tokens close to the threshold of a busy
    expert are pushed over it, the probabilities of the others keep their shape. At balance the gradient is
    zero.
    """
    num_experts, top_k = logits_TE.shape[-1], indices_TK.shape[-1]
    near_E = mean_over_tokens(nearness(logits_TE, indices_TK))
    return num_experts / top_k / divisor * torch.dot(counts_E.to(near_E.dtype), near_E)


def nearness(logits_TE: Tensor, indices_TK: Tensor) -> Tensor:
    """sigmoid(logit - threshold), less its mean over the experts, (T, E).

    The threshold of a token lies halfway between its worst selected and its best other logit; it has no
    gradient. Subtracting the mean makes equal loads give no gradient at all.
    """
    with torch.no_grad():
        worst_T1 = logits_TE.gather(-1, indices_TK).amin(-1, keepdim=True)
        other_T1 = logits_TE.scatter(-1, indices_TK, -torch.inf).amax(-1, keepdim=True)
        threshold_T1 = (worst_T1 + other_T1) / 2
    near_TE = torch.sigmoid(logits_TE - threshold_T1)
    return near_TE - near_TE.mean(-1, keepdim=True)
