"""Engines that execute torch operations, and the protocol that the fronts use."""
