"""Proofs by recomputation, for servers with check_exactness and for tests."""
