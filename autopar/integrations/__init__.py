"""Adapters to libraries that own the training loop."""
