"""One small file per operator family, each registering the sharding rules of its operators."""
