"""Decides: sequences, blocks, the schedule. Standard library and paceline.proto only."""
