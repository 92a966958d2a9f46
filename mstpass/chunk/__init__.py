"""Chunking: find regions, plan their loops, build the loops, lower them for Inductor."""
