"""Which tensors a model's checkpoint has, at its published size or scaled down."""
