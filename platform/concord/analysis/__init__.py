"""Views of trained models and of gradients: agreement, correlations, figures."""
