"""The reference's import path for its commands. No logic here."""

__all__: list[str] = []
