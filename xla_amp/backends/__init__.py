"""Engines that execute torch operations, the protocol that the fronts use, and what optimizers hold on any device."""
