"""The regression, figures and propositions of the AND-mask paper's section 2."""
