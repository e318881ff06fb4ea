"""Shared code of operations: checks, launches, number formats, scratch, test inputs and timing."""
