"""Rewrites of the joint graph that change its form, not its results, so that regions are found."""
