"""The tests on every torch and Python that mstpass supports: ``make test-versions``.

``nox --list`` names the sessions, each an environment of its own. The whole suite runs on the
oldest torch, on the one that mstpass is developed on, and on the newest; the tests in CORE, which
compile every kind of loop and run every probe of torch's private APIs, on the versions between and
on the newest Python. What is given after ``--`` goes to pytest.
"""

from __future__ import annotations

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|virtualenv"  # uv keeps each file once for all environments
nox.options.reuse_venv = "yes"

SUITE = [("3.12", "2.11"), ("3.11", "2.13"), ("3.11", "2.15")]  # Python, torch
BETWEEN = [("3.10", "2.12"), ("3.13", "2.14"), ("3.13", "2.15")]
CORE = (
    *("test_torch_internals", "test_torch_hooks", "test_hook_checks", "test_inductor_schedule"),
    *("test_compile_module", "test_numerics_head", "test_numerics_mlp", "test_losses"),
    *("test_loop_op", "test_dynamic", "test_mutations", "test_checkpoint", "test_collectives"),
    *("test_nested_recomputation", "test_drop_logits", "test_dropped_logits", "test_cache"),
    *("test_ddp", "test_fsdp"),
)


@nox.session
@nox.parametrize(("python", "torch"), SUITE)
def suite(session: nox.Session, torch: str) -> None:
    """The whole suite."""
    _test(session, torch)


@nox.session
@nox.parametrize(("python", "torch"), BETWEEN)
def core(session: nox.Session, torch: str) -> None:
    """The tests that compile every kind of loop, and the probes."""
    _test(session, torch, *(f"tests/{name}.py" for name in CORE))


def _test(session: nox.Session, torch: str, *tests: str) -> None:
    session.install(f"torch=={torch}.*", "-e", ".[dev]")
    session.run("python", "-m", "mstpass.torch_internals", silent=True)
    options = ("-n", "2", "--dist", "worksteal", "-m", "not dry_run")
    wait = {"OMP_WAIT_POLICY": "passive"}  # threads that spin would take the other worker's core
    session.run("python", "-m", "pytest", *options, *tests, *session.posargs, env=wait)
