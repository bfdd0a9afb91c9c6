"""autopar: decides how to split a PyTorch model over a cluster and emits the sharded program."""

__version__ = "0.1.0"
