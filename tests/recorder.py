"""Records steps where there is no GPU: the operations that a CUDA graph would hold, replayed on the same memory.

Like a graph, a recording knows no Python: what the step decided on the host stays as it was, and a value that the host
reads is an error.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from concord.aggregation.asynchronous import as_asynchronous
from concord.gradients import step_graph


class Recorder:
    """Takes the place of captures.

    Attributes:
        graphs: the operations of each recording.
        replays: the number of replays.
    """

    def __init__(self) -> None:
        self.graphs: list[GraphModule] = []
        self.replays = 0

    def capture(self, work: Callable[[], Any], device: torch.device) -> tuple[Callable[[], object], Any]:
        """Record the work, which this runs once; each replay writes its result anew."""
        found: list[Any] = []

        def traced() -> list[Tensor]:
            found[:] = [work()]
            return [leaf for leaf in pytree.tree_leaves(found[0]) if isinstance(leaf, Tensor)]

        graph = make_fx(traced)()
        graph.graph.lint()
        self.graphs.append(graph)
        results = [leaf for leaf in pytree.tree_leaves(found[0]) if isinstance(leaf, Tensor)]

        def replay() -> None:
            self.replays += 1
            with torch.no_grad():
                for result, value in zip(results, graph(), strict=True):
                    for dimension in (at for at, stride in enumerate(result.stride()) if stride == 0):  # expanded
                        result, value = (each.narrow(dimension, 0, 1) for each in (result, value))
                    result.copy_(value)

        return replay, found[0]


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Compute steps in the way of a GPU while the body runs, and record them."""
    made = Recorder()
    with pytest.MonkeyPatch.context() as patch, as_asynchronous():
        patch.setattr(step_graph, "can_capture", lambda device: True)
        patch.setattr(step_graph, "capture", made.capture)
        yield made
