"""Agents: Procgen's games as a vector environment, policies trained by RLlib, and the data they leave for cloning."""
