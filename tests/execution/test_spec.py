"""What is recorded of a run before it begins."""

import pytest
import torch

from concord.execution.spec import tf32_tag
from concord.training import TrainConfig


@pytest.mark.parametrize(
    ("matmul", "convolution", "said"),
    [
        ("none", "tf32", "convolutions"),  # PyTorch's default
        ("tf32", "tf32", "matrix products, convolutions"),
        ("ieee", "ieee", "none"),
    ],
)
def test_a_run_on_a_gpu_says_what_computes_in_tf32(
    monkeypatch: pytest.MonkeyPatch, matmul: str, convolution: str, said: str
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", matmul)
    monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", convolution)
    assert tf32_tag(TrainConfig().with_options(device="cuda")) == {"torch.tf32": said}
    assert tf32_tag(TrainConfig().with_options(device="cpu")) == {}
