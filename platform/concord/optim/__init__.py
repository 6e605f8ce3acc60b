"""Optimizers that mask over time, usable in any PyTorch loop."""

from concord.optim.temporal_and_mask import TemporalAndMaskAdam

__all__ = ["TemporalAndMaskAdam"]
