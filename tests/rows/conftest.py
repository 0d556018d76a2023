"""Rows note figures as the field cases do."""

from tests.field.figures import figures

__all__ = ["figures"]
