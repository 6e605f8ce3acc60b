"""Measures the consistency of a network's solution (learning explanations that are hard to vary, §2, appendix A).

Each environment e has a loss L_e around a solution θ*. N_e is the largest path-connected region around θ* in which
|L_e(θ) - L_e(θ*)| ≤ ε: for e its points are as good as θ*. The inconsistency is the largest change of another
environment's loss in N_e (eq. 1)::

    I^ε(θ*) = max over (e, e') of max over θ in N_e of |L_e'(θ) - L_e(θ*)|

A solution is consistent if the same points are equally good for all environments. ``network.measure`` returns one list
of measurements; it needs no dataset, Ray or MLflow.
"""
