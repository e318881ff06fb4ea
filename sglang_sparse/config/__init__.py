"""From what a user says to one validated object."""
