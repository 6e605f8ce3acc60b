"""Stepping 64 CoinRun environments through gymnasium's interface against Procgen's own."""

import numpy as np

from concord.benchmark import Row, interleaved
from concord.extras import require_extra
from concord.reinforcement.games import ACTIONS

ENVIRONMENTS, STEPS = 64, 200


def rows() -> list[Row]:
    """Seconds for 200 steps of all environments, with equal random actions, levels and threads; the ratio of speeds."""
    require_extra("coinrun", "procgen_environment")
    from procgen import ProcgenGym3Env

    from concord.reinforcement.procgen_environment import ProcgenVectorEnv

    actions = np.random.default_rng(0).integers(0, ACTIONS, (STEPS, ENVIRONMENTS))
    ours = ProcgenVectorEnv(ENVIRONMENTS, seed=0, threads=2)
    ours.reset()
    theirs = ProcgenGym3Env(ENVIRONMENTS, "coinrun", distribution_mode="easy", rand_seed=0, num_threads=2)

    def step_ours() -> None:
        for action in actions:
            ours.step(action)

    def step_theirs() -> None:
        for action in actions:
            theirs.act(action)
            theirs.observe()

    mine, reference, ratio = interleaved(step_ours, step_theirs, repeats=15, warmup=2)
    name = f"{STEPS} steps of {ENVIRONMENTS} CoinRun environments"
    return [Row(name, mine, "Procgen's own stepping (ratio: steps a second)", reference, 1 / ratio, "≥ 0.9")]
