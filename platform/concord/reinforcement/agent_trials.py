"""An agent as a trial of a study or a run of a comparison: it learns in the trial's process, keeping nothing."""

import contextlib
from collections.abc import Iterator

from concord.reinforcement.agent_training import Agent, AgentConfig, evaluated_at_end, initial_expert
from concord.reinforcement.extra import require_coinrun
from concord.training import Evaluation, TrialLoop


def _evaluations(config: AgentConfig) -> Iterator[Evaluation]:
    _check(config)
    initial = initial_expert(config)
    # A trial has the threads that the study gives its process.
    agent = Agent(config, config.threads, initial=initial.network if initial else None)
    with contextlib.closing(agent):
        progress = agent.progress
        for _, metrics in agent.batches():
            if "unseen_return" in metrics:
                number = config.evaluations * progress.steps // config.steps
                yield Evaluation(number, progress.steps, progress.metrics)
        network = agent.network()
    evaluated_at_end(network, config, progress)
    yield Evaluation(config.evaluations, progress.steps, progress.metrics)


def _check(config: AgentConfig) -> None:
    require_coinrun("an agent")
    initial_expert(config)
    for option in ("runners", "learners", "gpus_per_learner"):
        own = getattr(config, option) == 0
        config.require(option, own, "a trial samples and learns in its own process, on CPUs; give 0")


# What counts as an epoch is an evaluation. The scores are returns on levels that training never plays.
AGENT_TRIALS = TrialLoop(
    _evaluations,
    lambda config: config.evaluations,
    {"unseen_return": "max", "train_return": "max", "unseen_return_error": None, "steps": None},
    check=_check,
)
