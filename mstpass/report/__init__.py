"""Reports: what was decided for each compiled graph, for people and programs."""
