"""Lossless sparse decoding: the model drafts with the server's sparse method and verifies with a dense pass."""
