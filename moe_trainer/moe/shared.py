"""The parts beside the routed experts: shared experts and latent projections.

Shape suffixes: T tokens, D model width, L latent width, E shared experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_trainer.moe.config import LatentConfig, SharedExpertsConfig
from moe_trainer.moe.experts import Experts
from moe_trainer.moe.router import DTYPES, DenseRouter


class SharedExperts(nn.Module):
    """Experts that see every token: one is added, several are mixed by the dense scores of a router.

    Args:
        config: Settings; see `SharedExpertsConfig`.
        d_model: Model width.
        backend, dtype, device: As for the routed experts.
    """

    def __init__(
        self,
        config: SharedExpertsConfig,
        d_model: int,
        *,
        backend: str = "auto",
        dtype: str = "float32",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        router = config.router_config(d_model)
        self.router = None if router is None else DenseRouter(router, device)
        self.experts = Experts(
            config.num_experts,
            d_model,
            config.hidden_size,
            activation=config.activation,
            alpha=config.activation_alpha,
            limit=config.activation_limit,
            bias=config.bias,
            backend=backend,
            dtype=dtype,
            device=device,
        )

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Draw new weights."""
        self.experts.reset_parameters(std, generator)
        if self.router is not None:
            self.router.reset_parameters(std, generator)

    def forward(self, x_TD: Tensor) -> Tensor:
        """The weighted sum of all shared experts: every token is dispatched to each of them."""
        tokens, experts = len(x_TD), self.experts.num_experts
        if self.router is None:
            weights_TE = torch.ones(tokens, 1, dtype=torch.float32, device=x_TD.device)
        else:
            weights_TE = self.router(x_TD)
        slots_N = torch.arange(tokens * experts, device=x_TD.device).view(tokens, experts).T.flatten()
        offs_E = tokens * torch.arange(1, experts + 1, device=x_TD.device, dtype=torch.int32)
        return self.experts.combine(x_TD, weights_TE, slots_N, offs_E)


class LatentProjections(nn.Module):
    """Projections around the routed experts: D -> L before the dispatch, L -> D after the combination.

    Both work in the dtype of their weights; the layer casts the result to that of its input.
    """

    def __init__(
        self,
        config: LatentConfig,
        d_model: int,
        *,
        dtype: str = "float32",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        latent, kind = config.latent_dim, DTYPES[dtype]
        self.down = nn.Linear(d_model, latent, bias=config.bias, dtype=kind, device=device)
        self.up = nn.Linear(latent, d_model, bias=config.bias, dtype=kind, device=device)
        norm = nn.RMSNorm(latent, eps=config.norm_eps, dtype=kind, device=device) if config.norm else None
        self.norm = norm

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Truncated normal weights (cut at 3 std), zero biases, unit norm scale."""
        for linear in (self.down, self.up):
            nn.init.trunc_normal_(linear.weight, std=std, a=-3 * std, b=3 * std, generator=generator)
            if linear.bias is not None:
                linear.bias.zero_()
        if self.norm is not None:
            self.norm.reset_parameters()

    def prepare_routed_input(self, x_TD: Tensor) -> Tensor:
        """What the routed experts see, (T, L)."""
        x_TL: Tensor = self.down(x_TD.to(self.down.weight.dtype))
        return x_TL

    def restore_routed_output(self, y_TL: Tensor) -> Tensor:
        """What the layer adds to the shared experts' output, (T, D)."""
        y_TL = y_TL.to(self.up.weight.dtype)
        y_TD: Tensor = self.up(y_TL if self.norm is None else self.norm(y_TL))
        return y_TD
