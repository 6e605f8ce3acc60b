"""Room runner with the settings of the thesis' search (table A.1). The thesis prints no accuracies."""

from concord_jobs.box2d.figures import accuracy_figure
from concord_jobs.box2d.trajectory_job import COLUMNS, methods_of, table
from concord_jobs.room_runner.job import TABLE_A1

# Half the size and half the kernels, and 3,000 steps for every method.
SMALL = {"size": 32, "trajectories": 200, "kernels": 24, "lr": 1e-3, "lr_decay_steps": 0, "evaluations": 5}
STRIDED = {**SMALL, "architecture": "strided", "epochs": 30, "exploration_steps": 0}
REDUCED = {
    "ASI": {**STRIDED, "exploration_steps": 600},
    "ASI, no exploration": STRIDED,
    **{f"Δt = {stride}": {**STRIDED, "skip": "fixed", "stride": stride} for stride in (1, 2, 3)},
}
# The thesis' frames, kernels and rates with its strided network, in two fifths of the default's steps and in bfloat16.
# Δt = 1 evaluates the network about eight times as often in a step, and has about as many evaluations.
FULL_SIZE = {**TABLE_A1["asi"], "epochs": 60, "evaluations": 3, "precision": "bfloat16"}
UNEXPLORED = {**FULL_SIZE, "exploration_steps": 0}
# Shorter exploration and sampling leave more steps on the model's own matches.
SHORTER_SCHEDULES = {**FULL_SIZE, "epochs": 80, "evaluations": 4, "exploration_steps": 4_000, "sampling_steps": 10_000}
ONE_FRAME = {**UNEXPLORED, "skip": "fixed", "stride": 1, "epochs": 8, "evaluations": 2}
FRAMES_SEEN = {**COLUMNS, "frames seen": "ood_frames_seen"}
comparisons = {
    "reduced": table(REDUCED, "32 × 32, 200 trajectories, half the kernels", seeds=3, columns=FRAMES_SEEN),
    "full-size": table(
        {
            "ASI": FULL_SIZE,
            "ASI, 20,000 steps": SHORTER_SCHEDULES,
            "ASI, no exploration": UNEXPLORED,
            "Δt = 1": ONE_FRAME,
        },
        "64 × 64: ASI, and as many evaluations of Δt = 1",
        seeds=1,
        columns=FRAMES_SEEN,
    ),
    # The horizon matters little near 20, says the thesis, without a figure.
    "horizons": table(
        {f"H = {horizon}": {"horizon": horizon} for horizon in (5, 10, 15, 21, 30)},
        "ASI by its horizon",
        seeds=3,
        figures={"horizons": accuracy_figure},
    ),
    "table-a.1": table(methods_of(TABLE_A1), "settings of table A.1, 8 seeds"),
}
