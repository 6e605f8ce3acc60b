"""Agents: Procgen's games as a vector environment, policies trained by RLlib, and their data for cloning."""
