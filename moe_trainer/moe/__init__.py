"""The mixture-of-experts layer: router, experts, dispatch, losses and their configuration."""

from moe_trainer.moe.config import (
    ConfigError,
    LatentConfig,
    MoEConfig,
    RouterConfig,
    RouterOptions,
    SharedExpertsConfig,
)
from moe_trainer.moe.layer import LoadStats, MoE, MoELosses, post_step
from moe_trainer.moe.router import Router, RouterOutput

__all__ = [
    "ConfigError",
    "LatentConfig",
    "LoadStats",
    "MoE",
    "MoEConfig",
    "MoELosses",
    "Router",
    "RouterConfig",
    "RouterOptions",
    "RouterOutput",
    "SharedExpertsConfig",
    "post_step",
]
