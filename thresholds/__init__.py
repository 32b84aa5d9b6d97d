"""Policies: which gates a run must pass, and with what limits.

from moe_audit.thresholds import load_policy, check_policy
policy = load_policy("default")           # or a path; None looks for moe-audit.toml and pyproject.toml
policy.limit("max_load", num_experts=64, top_k=8)
check_policy(policy, num_experts=64, top_k=8)   # what the limits imply, each with its inequality
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_audit.thresholds.policy import Policy as Policy
    from moe_audit.thresholds.policy import load_policy as load_policy
    from moe_audit.thresholds.policy import policy_from_dict as policy_from_dict
    from moe_audit.thresholds.policy import policy_schema as policy_schema
    from moe_audit.thresholds.proofs import check_policy as check_policy

# Name -> where it lives; loaded when first used, since the errors in this package are needed everywhere.
_HOMES = {
    "Policy": "policy",
    "check_policy": "proofs",
    "load_policy": "policy",
    "policy_from_dict": "policy",
    "policy_schema": "policy",
}
__all__ = ["Policy", "check_policy", "load_policy", "policy_from_dict", "policy_schema"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
