"""Timing model: predicts how long a compiled variant takes on a chip, from its SASS and a trace of its barriers."""
