"""The mixture-of-experts layer: route, dispatch, apply the experts, combine.

Shape suffixes: B batch, S sequence, T = B*S tokens, D model width, E experts, K selected experts per token,
N kept assignments in expert order.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_trainer.moe import losses
from moe_trainer.moe.balance import LoadCounter, LoadStats, MoELosses, PendingBalance, update_score_bias
from moe_trainer.moe.config import ConfigError, MoEConfig
from moe_trainer.moe.dispatch import Dispatcher
from moe_trainer.moe.experts import Experts
from moe_trainer.moe.router import Router, RouterOutput
from moe_trainer.moe.shared import LatentProjections, SharedExperts


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
        shared: `SharedExperts`, or None.
        latent: `LatentProjections`, or None.
        load: `LoadCounter` of the optimizer step.
    """

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
        if num_layers < 1:
            raise ConfigError("num_layers", num_layers, "must be at least 1")
        self.config = config
        self.d_model = d_model
        self.loss_scale = 1 / num_layers if config.scale_loss_by_num_layers else 1.0
        self.router = Router(config.router_config(d_model), device)
        self.dispatcher = Dispatcher(
            config.num_experts,
            config.capacity_factor,
            config.drop_policy,
            config.renormalize_after_drop,
            config.router.routing == "expert_choice",
        )
        self.experts = Experts(
            config.num_experts,
            config.expert_width(d_model),
            config.hidden_size,
            activation=config.activation,
            alpha=config.activation_alpha,
            limit=config.activation_limit,
            bias=config.bias,
            backend=config.backend,
            dtype=config.dtype,
            device=device,
        )
        self.shared = None
        if config.shared_mlp is not None:
            self.shared = SharedExperts(
                config.shared_mlp,
                d_model,
                backend=config.backend,
                dtype=config.dtype,
                device=device,
            )
        self.latent = None
        if config.latent is not None:
            self.latent = LatentProjections(config.latent, d_model, dtype=config.dtype, device=device)
        self.load = LoadCounter(config.num_experts, device)
        self.reset_parameters(init_std, generator)

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Draw new weights for every part and zero the counters: all that `to_empty` leaves undefined."""
        for part in (self.router, self.experts, self.shared, self.latent):
            if part is not None:
                part.reset_parameters(std, generator)
        self.load.reset()

    def forward(self, x_BSD: Tensor, *, loss_divisor: float | None = None) -> tuple[Tensor, MoELosses]:
        """Output of the shape and dtype of the input, and the router losses.

        Args:
            x_BSD: Input, (B, S, D) or (T, D).
            loss_divisor: D of the loss formulas; None: the tokens of this input.
        """
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        routed = self.router(x_TD)
        plan = self.dispatcher(routed)
        self.load(routed.counts_E, plan.dropped_E)
        x_TL = x_TD if self.latent is None else self.latent.prepare_routed_input(x_TD)
        y_TL = self.experts.combine(x_TL, plan.weights_TK, plan.slots_N, plan.offs_E)
        y_TD = y_TL if self.latent is None else self.latent.restore_routed_output(y_TL).to(x_TD.dtype)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        instances = x_BSD.shape[0] if x_BSD.dim() == 3 else 1
        return y_TD.view_as(x_BSD), self.router_losses(routed, instances, loss_divisor)

    def router_losses(
        self, routed: RouterOutput, instances: int = 1, divisor: float | None = None
    ) -> MoELosses:
        """The weighted router losses of one router output (in training with gradients only).

        Args:
            routed: Output of `router`.
            instances: Sequences among the tokens, for the granularity ``instance``.
            divisor: D of the loss formulas; None: the tokens.
        """
        c = self.config
        total = routed.logits_TE.new_zeros(())
        balance = z = pending = None
        if not (self.training and torch.is_grad_enabled()):
            return MoELosses(total)
        divisor = max(1, routed.logits_TE.shape[0]) if divisor is None else divisor
        if c.lb_loss_weight is not None and c.router.routing == "token_choice":
            weight = c.lb_loss_weight * self.loss_scale
            if c.global_load_balancing and dist.is_initialized():
                pending = self._pending_balance(routed, divisor, weight)
            else:
                loss = self._balance_loss(routed, instances, divisor)
                total = total + weight * loss
                balance = loss.detach()
        if c.z_loss_weight is not None:
            loss = losses.z_loss(routed.logits_TE, divisor)
            total = total + c.z_loss_weight * self.loss_scale * loss
            z = loss.detach()
        return MoELosses(total, balance, z, pending)

    def _balance_loss(self, routed: RouterOutput, instances: int, divisor: float) -> Tensor:
        c = self.config
        if c.lb_loss_kind == "dispatch":
            return losses.dispatch_loss(routed.logits_TE, routed.indices_TK, routed.counts_E, divisor)
        scores_TE = losses.normalized_scores(routed.scores_TE, c.router.gating_function)
        if c.lb_loss_granularity == "instance":
            return losses.instance_balance_loss(scores_TE, routed.indices_TK, instances, divisor)
        return losses.balance_loss(scores_TE, routed.counts_E, c.router.top_k, divisor)

    def _pending_balance(self, routed: RouterOutput, divisor: float, weight: float) -> PendingBalance:
        c = self.config
        if c.lb_loss_kind == "dispatch":
            scores_TE = losses.nearness(routed.logits_TE, routed.indices_TK)
        else:
            scores_TE = losses.normalized_scores(routed.scores_TE, c.router.gating_function)
        factor = c.num_experts / c.router.top_k / divisor
        return PendingBalance(losses.mean_over_tokens(scores_TE), routed.counts_E, factor, weight)


def orthogonal_losses(layers: Iterable[MoE]) -> Tensor:
    """Weighted, layer-scaled sum of the orthogonal losses of the layers that have one.

    It depends on the router weights only: add it to the loss of one micro-batch per optimizer step.
    """
    total = torch.zeros(())
    for layer in layers:
        if layer.config.orth_loss_weight is not None:
            loss = losses.orthogonal_loss(layer.router.weight)
            total = total.to(loss.device) + layer.config.orth_loss_weight * layer.loss_scale * loss
    return total


@torch.no_grad()
def post_step(layers: Iterable[MoE], group: dist.ProcessGroup | None = None) -> list[LoadStats]:
    """Update the score biases: once per optimizer step, after the last backward pass, before `step()`.

    The counts of all layers are summed over the ranks of `group` in one collective, then the counters are
    reset.

    Args:
        layers: All MoE layers of this rank.
        group: Ranks that share these layers (never those of other pipeline stages); None: all.

    Returns:
        The summed loads, one entry a layer.
    """
    layers = list(layers)
    if not layers:
        return []
    flat = torch.cat([part for layer in layers for part in (layer.load.counts_E, layer.load.dropped_E)])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(flat, group=group)
    parts = flat.split_with_sizes([n for layer in layers for n in [layer.config.num_experts] * 2])
    stats = [LoadStats(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
    for layer, load in zip(layers, stats, strict=True):
        update_score_bias(layer.router, load.counts_E)
        layer.load.reset()
    return stats
