"""Strategies: where a meta-batch is computed, and how its gradients are aggregated."""
