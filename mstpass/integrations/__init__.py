"""What other libraries need to know of mstpass, and what mstpass needs to know of them.

No file here imports a library that is not there yet: `import mstpass` stays quick, and a version
that mstpass does not know is never an error of it.
"""
