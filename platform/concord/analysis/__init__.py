"""What can be seen of a trained model and of gradients: agreement, correlations, figures."""
