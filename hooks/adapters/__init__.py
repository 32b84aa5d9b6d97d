"""One small class per router class: what its forward returns, in normal form."""
