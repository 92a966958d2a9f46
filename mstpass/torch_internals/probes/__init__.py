"""Probes of the private APIs: the table, and the checks of behavior."""
