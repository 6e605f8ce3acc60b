"""The AND-mask paper's section 2: its regression, figures and propositions."""
