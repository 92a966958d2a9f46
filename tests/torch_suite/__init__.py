"""PyTorch's own tests with the backend's name changed to mst.

    python -m tests.torch_suite                          download the tests, run, print a table
    python -m tests.torch_suite --source ~/pytorch       the tests of a checkout
    python -m tests.torch_suite --table                  print the table of the results so far

files.py         which of PyTorch's test files are run, and for what
sources.py       where they come from: a folder, or the release of the installed version
rename.py        mst in the place of Inductor and of torch's partitioner
on_cpu.py        the CPU in the place of a GPU
plugin.py        a pytest plugin: one line of results for each test, a time limit, names that the
                 installed torch lacks
runner.py        a process for each file; a later call goes on where one has ended
loss_opinfos.py  gradients of every loss function on torch's own samples
table.py         the results as a table

Every test that fails is run once more with Inductor itself. If it fails there as well, the failure
is not one of mst.
"""
