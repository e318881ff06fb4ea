"""What several operations share: checks, launches, number formats, scratch, test inputs and timing."""
