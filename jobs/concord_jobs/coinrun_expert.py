"""The expert that coinrun-clone learns from: PPO on CoinRun's levels (appendix B.6 of the AND-mask paper).

The paper trains it with the code of Cobbe et al. (2020) for 400 million steps on the full distribution of levels; the
options' defaults are that paper's settings for the easy levels, 25 million steps.
"""

from concord.reinforcement.actor_critic import ActorCritic, Policy
from concord.reinforcement.agent_options import AgentConfig
from concord.reinforcement.agent_training import AGENT_LOOP
from concord.space import LogUniform, Space
from concord.training import Job, Study

job = Job(
    loop=AGENT_LOOP,
    config=AgentConfig(),
    model=lambda _: Policy(ActorCritic()),
    criterion="unseen_return",
    reproduces="AND-mask paper, appendix B.6: the CoinRun expert, PPO with Procgen's published settings; the included "
    "one trained for 4 million steps of easy levels, the paper's for 400 million",
    studies={"ppo": Study(Space({"lr": LogUniform(1e-4, 2e-3), "entropy": LogUniform(1e-3, 0.03)}))},
)
