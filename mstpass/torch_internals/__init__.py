"""The private APIs of torch that mstpass uses: a file for each part of torch, and probes.

``python -m mstpass.torch_internals`` asks the installed torch for all of them.
"""
