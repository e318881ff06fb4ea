"""Inside the model runner: plans, batches and passes of sparse attention."""
