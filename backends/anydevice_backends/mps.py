"""A backend."""
