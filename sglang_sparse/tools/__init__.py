"""Code of the commands."""
