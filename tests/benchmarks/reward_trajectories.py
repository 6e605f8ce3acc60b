"""Generating returns of open-loop actions against stepping the simulator alone."""

import numpy as np
import numpy.typing as npt

from concord.benchmark import Row, interleaved
from concord.extras import require_extra
from concord_jobs.distill_mujoco.simulator import HORIZON, Simulator, make_environment, simulate

EXAMPLES = 200
SIMULATORS: tuple[Simulator, ...] = ("Hopper", "HalfCheetah")


def row(simulator: Simulator) -> Row:
    """Generating examples against a bare loop over the same actions; the ratio of speeds."""
    require_extra("mujoco", "reward_trajectories")
    environment, step = make_environment(simulator)
    model, data, repeats = environment.model, environment.data, environment.frame_skip
    chosen: list[npt.NDArray[np.float64]] = []
    for example in range(EXAMPLES):
        drawn = np.random.default_rng([0, 0, example])
        environment.np_random = drawn
        environment.reset()
        before = int(drawn.integers(10, 31))
        chosen.append(drawn.integers(-1, 2, (before + HORIZON, model.nu)).astype(float))

    def theirs() -> None:
        for number, actions in enumerate(chosen):
            environment.np_random = np.random.default_rng([1, number])
            environment.reset()
            for action in actions:
                data.ctrl[:] = action
                step(model, data, repeats)

    mine, reference, ratio = interleaved(
        lambda: simulate(simulator, "train", 0, 0, EXAMPLES), theirs, repeats=3, warmup=1
    )
    name = f"{EXAMPLES} examples of {simulator}'s returns"
    return Row(
        name, mine, "a bare loop of mj_step and resets (ratio: examples a second)", reference, 1 / ratio, "≥ 0.8"
    )


def rows() -> list[Row]:
    """A row for each simulator."""
    return [row(simulator) for simulator in SIMULATORS]
