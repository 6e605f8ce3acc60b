"""Loss and accuracy of one logit for two classes, beside x* in the targets."""

from torch import Tensor, nn

from concord.distillation import of_labels


@of_labels
def binary_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy of logits ``(examples, 1)``."""
    return nn.functional.binary_cross_entropy_with_logits(outputs.squeeze(1), labels)


@of_labels
def binary_accuracy(outputs: Tensor, labels: Tensor) -> Tensor:
    """1 where the logit has the label's sign."""
    return ((outputs.squeeze(1) > 0) == labels.bool()).float()
