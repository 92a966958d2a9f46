"""The error that the linter raises."""

from __future__ import annotations

from mstpass.errors import UserError


class LintError(UserError):
    """The step cannot be linted. The message says what to change."""
