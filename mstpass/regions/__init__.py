"""Finding regions: which nodes of the joint graph can run together over chunks of tokens."""
