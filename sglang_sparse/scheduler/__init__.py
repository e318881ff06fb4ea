"""The plugin's part of the scheduler: the tokens of each pass, and the KV that requests may share."""
