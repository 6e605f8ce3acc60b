"""Choices of the sources of gradients that are options of a run; a module of its own, which needs no PyTorch."""

from typing import Literal

NonFinite = Literal["raise", "skip", "propagate"]
"""``raise``: end with :class:`~concord.gradients.NonFiniteGradientError`. ``skip``: leave the environment out of the
step; count it. ``propagate``: leave it in, so that the update is not finite either and a ``GradScaler`` lowers its
scale."""
ExampleGradient = Literal["contribution", "loss"]
"""What the gradient of one example is, where the examples of a batch meet in batch norm.

* ``contribution``: what flows through the example's activations. One backward pass for all.
* ``loss``: the exact derivative of the example's loss, through the statistics it shares. One backward pass each, as
  the AND-mask paper's code did.

Without batch norm they are the same; they always sum to the same.
"""
