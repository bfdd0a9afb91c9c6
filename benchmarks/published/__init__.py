"""Published training runs: read, rebuilt as models, clusters and hints, predicted, and compared."""
