"""The MoE feed-forward layer: router, experts, dispatch, losses."""
