"""The mixture-of-experts layer: route, dispatch, apply the experts, combine.

Shape suffixes: B batch, S sequence, T = B*S tokens, D model width, E experts, K selected experts per token,
N kept assignments in expert order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_trainer.moe import losses
from moe_trainer.moe.config import MoEConfig
from moe_trainer.moe.dispatch import Dispatcher, DispatchPlan
from moe_trainer.moe.experts import Experts
from moe_trainer.moe.router import Router, RouterOutput


class MoELosses(NamedTuple):
    """Router losses of one forward pass of one layer.

    Attributes:
        total: Differentiable scalar: the weighted sum, scaled by layers; 0 outside training.
        balance, z: Detached, without weight and scale; None where switched off or outside training.
    """

    total: Tensor
    balance: Tensor | None
    z: Tensor | None


class MoE(nn.Module):
    """Mixture-of-experts layer.

    Args:
        config: Settings; see `MoEConfig`.
        d_model: Model width.
        num_layers: MoE layers in the model, for `scale_loss_by_num_layers`.
        init_std: Standard deviation of the initial weights.
        generator: Draws the initial weights.
        device: Where the parameters are created.

    Attributes:
        router: `Router`; its parameters form a group of their own in the optimizer.
        dispatcher: `Dispatcher`; its output tells which assignments were dropped.
        experts: `Experts`.
    """

    counts_E: Tensor
    dropped_E: Tensor

    def __init__(
        self,
        config: MoEConfig,
        d_model: int,
        *,
        num_layers: int = 1,
        init_std: float = 0.02,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        config.check(d_model)
        self.config = config
        self.d_model = d_model
        self.loss_scale = 1 / num_layers if config.scale_loss_by_num_layers else 1.0
        self.router = Router(config.router_config(d_model), device)
        self.dispatcher = Dispatcher(
            config.num_experts,
            config.capacity_factor,
            config.drop_policy,
            config.renormalize_after_drop,
        )
        self.experts = Experts(
            config.num_experts,
            config.expert_width(d_model),
            config.hidden_size,
            activation=config.activation,
            alpha=config.activation_alpha,
            limit=config.activation_limit,
            bias=config.bias,
            dtype=config.dtype,
            device=device,
        )
        for name in ("counts_E", "dropped_E"):
            zeros = torch.zeros(config.num_experts, dtype=torch.int64, device=device)
            self.register_buffer(name, zeros, persistent=False)
        self.reset_parameters(init_std, generator)

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Draw new weights for every part."""
        for part in (self.router, self.experts):
            part.reset_parameters(std, generator)

    def forward(self, x_BSD: Tensor, *, loss_divisor: float | None = None) -> tuple[Tensor, MoELosses]:
        """Output of the shape of the input, and the router losses.

        Args:
            x_BSD: Input, (B, S, D) or (T, D).
            loss_divisor: D of the loss formulas; None: the tokens of this input.
        """
        x_TD = x_BSD.reshape(-1, self.d_model)
        routed = self.router(x_TD)
        plan = self.dispatcher(routed)
        self._count(routed, plan)
        rows_N = plan.slots_N // routed.indices_TK.shape[-1]
        y_ND = self.experts(x_TD.index_select(0, rows_N), plan.offs_E)
        y_ND = y_ND * plan.weights_TK.reshape(-1, 1).index_select(0, plan.slots_N).to(y_ND.dtype)
        y_TD = torch.zeros_like(x_TD).index_add(0, rows_N, y_ND)
        instances = x_BSD.shape[0] if x_BSD.dim() == 3 else 1
        return y_TD.view_as(x_BSD), self.router_losses(routed, instances, loss_divisor)

    def router_losses(
        self, routed: RouterOutput, instances: int = 1, divisor: float | None = None
    ) -> MoELosses:
        """The weighted router losses of one router output (training with gradients only)."""
        c = self.config
        total = routed.logits_TE.new_zeros(())
        balance = z = None
        if not (self.training and torch.is_grad_enabled()):
            return MoELosses(total, balance, z)
        divisor = max(1, routed.logits_TE.shape[0]) if divisor is None else divisor
        if c.lb_loss_weight is not None:
            scores_TE = losses.normalized_scores(routed.scores_TE, c.router.gating_function)
            if c.lb_loss_granularity == "instance":
                loss = losses.instance_balance_loss(scores_TE, routed.indices_TK, instances, divisor)
            else:
                loss = losses.balance_loss(scores_TE, routed.counts_E, c.router.top_k, divisor)
            total = total + c.lb_loss_weight * self.loss_scale * loss
            balance = loss.detach()
        if c.z_loss_weight is not None:
            loss = losses.z_loss(routed.logits_TE, divisor)
            total = total + c.z_loss_weight * self.loss_scale * loss
            z = loss.detach()
        return MoELosses(total, balance, z)

    @torch.no_grad()
    def _count(self, routed: RouterOutput, plan: DispatchPlan) -> None:
        # In the recompute of activation checkpointing a backward pass is running: counted already.
        if not self.training or torch._C._current_graph_task_id() != -1:
            return
        self.counts_E += routed.counts_E
        if plan.dropped_E is not None:
            self.dropped_E += plan.dropped_E


class LoadStats(NamedTuple):
    """Loads of one layer over one optimizer step, summed over the ranks.

    Attributes:
        counts_E: Assignments per expert, before any drop.
        dropped_E: Dropped ones.
    """

    counts_E: Tensor
    dropped_E: Tensor

    @property
    def load_imbalance(self) -> float | None:
        """max / mean load; None without tokens."""
        total = int(self.counts_E.sum())
        return int(self.counts_E.max()) * len(self.counts_E) / total if total else None

    @property
    def drop_rate(self) -> float | None:
        """Dropped / all assignments; None without tokens."""
        total = int(self.counts_E.sum())
        return int(self.dropped_E.sum()) / total if total else None


@torch.no_grad()
def post_step(layers: Iterable[MoE], group: dist.ProcessGroup | None = None) -> list[LoadStats]:
    """Update the score biases; call once per optimizer step, after the last backward pass and before it.

    bias += gamma * sign(mean load - load), from the counts of the whole batch. The counts of all layers
    are summed over the ranks of `group` in one collective, then the accumulators are reset.

    Args:
        layers: All MoE layers of this rank.
        group: Ranks that share these layers (never those of other pipeline stages); None: all.

    Returns:
        The summed loads, one entry a layer.
    """
    layers = list(layers)
    if not layers:
        return []
    flat = torch.cat([part for layer in layers for part in (layer.counts_E, layer.dropped_E)])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(flat, group=group)
    parts = flat.split([layer.config.num_experts for layer in layers for _ in range(2)])
    stats = []
    for layer, counts_E, dropped_E in zip(layers, parts[::2], parts[1::2], strict=True):
        gamma, bias = layer.config.router.bias_gamma, layer.router.score_bias
        if gamma is not None and bias is not None:
            load_E = counts_E.double()
            bias += gamma * (load_E.mean() - load_E).sign()
        layer.counts_E.zero_()
        layer.dropped_E.zero_()
        stats.append(LoadStats(counts_E, dropped_E))
    return stats
