"""The names of the built-in rules and objectives, which are choices of options, and where their classes are.

A class is imported when it is asked for, since that imports PyTorch, which takes a second or two.
"""

from typing import Any

from concord.hyperparameters import Registry

RULES = Registry[Any](
    "aggregator",
    "concord.aggregation",
    {
        "mean": "mean.Mean",
        "and-mask": "and_mask.AndMask",
        "geometric-mean": "geometric_mean.GeometricMean",
        "xor-mask": "xor_mask.XorMask",
        "sand-mask": "sand_mask.SandMask",
        "t-mask": "t_mask.TMask",
        "pcgrad": "pcgrad.PCGrad",
        "mgda": "mgda.MGDA",
        "cagrad": "cagrad.CAGrad",
        "upgrad": "upgrad.UPGrad",
        "krum": "krum.Krum",
        "clip": "clipping.Clipping",
        "median": "median.Median",
        "trimmed-mean": "trimmed_mean.TrimmedMean",
    },
    # A rule's field with the name of one of these takes its value.
    shared=("threshold", "significance", "seed"),
)
OBJECTIVES = Registry[Any](
    "objective",
    "concord.objectives",
    {
        "erm": "erm.ERM",
        "irm": "irm.IRMv1",
        "vrex": "vrex.VREx",
        "mm-rex": "mm_rex.MMREx",
        "coral": "coral.CORAL",
        "mmd": "mmd.MMD",
        "dann": "dann.DANN",
        "group-dro": "group_dro.GroupDRO",
        "eqrm": "eqrm.EQRM",
        "fishr": "fishr.Fishr",
        "iga": "iga.IGA",
        "mixup": "mixup.Mixup",
        "sd": "spectral_decoupling.SpectralDecoupling",
        "meta-irm": "meta_irm.MetaIRM",
    },
    shared=("penalty_weight", "penalty_warmup"),
)
