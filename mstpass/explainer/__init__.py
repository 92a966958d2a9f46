"""The plan of a step, without running it: as a function, and on the command line."""

from mstpass.explainer.step import ExplainError, explain, explain_step

__all__ = ["ExplainError", "explain", "explain_step"]
