"""A region as loops over chunks: candidates, modes, chunk length, the rewrite, the lowering."""
