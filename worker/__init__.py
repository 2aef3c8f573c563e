"""Executes: one rank. Knows no ray, no wire and no engine."""
