"""The plan of a step, without running it: as a function, and on the command line."""

from mstpass.explainer.errors import ExplainError
from mstpass.explainer.plan_step import explain, explain_all, explain_parts

__all__ = ["ExplainError", "explain", "explain_all", "explain_parts"]
