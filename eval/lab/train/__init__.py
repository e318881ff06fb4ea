"""Trains the tiny models of the evaluation: tokenizer, model, accuracy, model card."""
