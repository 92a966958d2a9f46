"""Every private API of torch that mstpass uses: one file each, with a probe.

``python -m mstpass.torch_internals`` asks the installed torch for all of them.
"""
