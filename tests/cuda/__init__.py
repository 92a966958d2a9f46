"""CUDA without a GPU: steps are compiled for a pretended GPU, and the generated code is checked.

dry_run.py          compiles a step for a GPU that is not there
generated_code.py   what the code of a loop does in an iteration
pretended_triton.py  what compiling for a pretended GPU needs
interpret.py        runs generated code on the CPU, its Triton kernels interpreted
steps.py            the steps
"""
