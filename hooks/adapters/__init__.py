"""One small class per router class: what its forward returns, in normal form.

Importing this package fills the registry. Adapters know foreign classes by their qualified name, so nothing
here imports another framework.
"""

from moe_audit.hooks.adapters import (  # noqa: F401  (each import registers its adapters)
    megablocks,
    megatron,
    moe_trainer,
    olmo_core,
    torchtitan,
    transformers,
    transformers_4,
)
from moe_audit.hooks.adapters.base import (
    NO_PICK,
    Adapter,
    FoundRouter,
    Observation,
    canonical_name,
    find_routers,
    register,
)
from moe_audit.hooks.adapters.generic import FunctionAdapter, Routing, router_function

__all__ = [
    "NO_PICK",
    "Adapter",
    "FoundRouter",
    "FunctionAdapter",
    "Observation",
    "Routing",
    "canonical_name",
    "find_routers",
    "register",
    "router_function",
]
