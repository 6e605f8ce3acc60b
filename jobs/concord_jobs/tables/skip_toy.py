"""The toy of adaptive skip intervals: what finds the right skips, and what it takes."""

from concord.training import Comparison

comparisons = {
    "skips": Comparison(
        {
            "adaptive": {},
            "adaptive, no exploration": {"exploration_steps": 0},
            "fixed, Δt = 6": {"skip": "fixed", "stride": 6},
        },
        seeds=8,
        first_seed=11,  # seeds 0 to 8 chose the settings
        columns={
            "right skips": "ood_right_skips",
            "right rollouts": "ood_right_rollout",
            "mean skip": "ood_mean_skip",
            "model evaluations": "model_evaluations",
        },
        title="fraction of right skips and rollouts on other sequences, after training on 128",
    )
}
