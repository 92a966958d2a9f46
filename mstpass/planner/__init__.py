"""`mstpass plan`: finds the longest sequence, or the fastest plan, that fits on a device.

request.py has the input and the output, and plan.py the way from one to the other. No GPU is
needed: eager steps run on fake tensors, and compiled steps are simulated.
"""
