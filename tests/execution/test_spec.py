"""What is recorded of a run before it begins."""

from types import SimpleNamespace

import pytest

from concord.execution import spec
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
    backends = SimpleNamespace(
        cuda=SimpleNamespace(matmul=SimpleNamespace(fp32_precision=matmul)),
        cudnn=SimpleNamespace(conv=SimpleNamespace(fp32_precision=convolution)),
    )
    monkeypatch.setattr(spec, "torch", SimpleNamespace(backends=backends))
    assert tf32_tag(TrainConfig().with_options(device="cuda")) == {"torch.tf32": said}
    assert tf32_tag(TrainConfig().with_options(device="cpu")) == {}
