"""Every case of this folder may note figures."""

from tests.field.figures import figures

__all__ = ["figures"]
