"""What a step of training changes on any device: what an optimizer holds, its skipping, how a step is restored."""
