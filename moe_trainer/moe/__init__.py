"""The mixture-of-experts layer: router, experts, dispatch, losses and their configuration.

Only the configuration is imported here, so that reading one needs no torch (`moe-train plan`); the layer
is `moe_trainer.moe.layer.MoE`.
"""

from moe_trainer.moe.config import (
    ConfigError,
    LatentConfig,
    MoEConfig,
    RouterConfig,
    RouterOptions,
    SharedExpertsConfig,
)

__all__ = [
    "ConfigError",
    "LatentConfig",
    "MoEConfig",
    "RouterConfig",
    "RouterOptions",
    "SharedExpertsConfig",
]
