"""Optimizers that mask over time, usable in any PyTorch loop."""

from concord.optim.temporal_agreement import TemporalAgreementAdam, TemporalAndMaskAdam

__all__ = ["TemporalAgreementAdam", "TemporalAndMaskAdam"]
