"""Measurements. What they assert is a ratio within one run, or a count; seconds are printed, never asserted."""
