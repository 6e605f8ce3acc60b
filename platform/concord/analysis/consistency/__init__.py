"""Consistency of a solution (learning explanations that are hard to vary, §2 and appendix A), measured of networks.

Each environment e has a loss L_e around a solution θ*. N_e is the largest path-connected region around θ* in which
|L_e(θ) - L_e(θ*)| ≤ ε: as far as e can tell, its points are as good as θ*. The inconsistency is the most that another
environment's loss can change there (eq. 1)::

    I^ε(θ*) = max over (e, e') of max over θ in N_e of |L_e'(θ) - L_e(θ*)|

A solution is consistent if all environments take the same points for equally good. ``network.measure`` gives one list
of measurements; no dataset, Ray or MLflow is needed.
"""
