"""The expert that coinrun-clone learns from: PPO on CoinRun's levels (appendix B.6 of the AND-mask paper).

The paper trains it with the code of Cobbe et al. (2020) for 400 million steps on the full distribution of levels; the
options' defaults are that paper's settings for the easy levels, 25 million steps.
"""

from concord.reinforcement.agent_training import AgentConfig, train_agent
from concord.reinforcement.agent_trials import AGENT_TRIALS
from concord.space import LogUniform, Space
from concord.training import CustomJob, Study

job = CustomJob(
    run=train_agent,
    config=AgentConfig(),
    reproduces="AND-mask paper, appendix B.6: the CoinRun expert, PPO with Procgen's published settings; the one that "
    "comes along had 4 million steps of easy levels, the paper's 400 million",
    trials=AGENT_TRIALS,
    studies={"ppo": Study(Space({"lr": LogUniform(1e-4, 2e-3), "entropy": LogUniform(1e-3, 0.03)}))},
)
