"""Errors of the command line."""

from __future__ import annotations


class UsageError(Exception):
    """The command line, or something it names, can't be used; the message is one line for the user."""
