"""The parts that models are built from."""
