"""What simulate_devices does to a process; each case is a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

import jaxsync
from jaxsync.errors import BackendStartedError


@pytest.mark.parametrize("n", [1, 2, 16])
def test_it_gives_n_devices_and_a_pool_of_twice_as_many_threads(run_python, n: int) -> None:
    code = f"""
        import jaxsync, os
        jaxsync.simulate_devices({n})
        import jax
        print(len(jax.devices()), jax.devices()[0].platform, int(os.environ["PJRT_NPROC"]) >= 2 * {n})
    """
    assert run_python(code).stdout == f"{n} cpu True\n"


def test_neither_importing_jaxsync_nor_simulating_starts_a_backend(run_python) -> None:
    code = """
        import jax, jaxsync, sys
        jaxsync.simulate_devices(3)
        jaxsync.guard_dispatch(jax.jit(lambda x: x))
        jax.config.update("jax_num_cpu_devices", 5)  # JAX refuses this once a backend is up
        print("optax" in sys.modules, "rich" in sys.modules, len(jax.devices()))
    """
    assert run_python(code).stdout == "False False 5\n"


def test_calling_it_again_with_the_same_number_does_nothing() -> None:
    jaxsync.simulate_devices(8)


def test_another_number_is_refused() -> None:
    with pytest.raises(BackendStartedError, match=r"simulate_devices\(8\) was called before"):
        jaxsync.simulate_devices(4)


def test_another_number_before_the_start_is_refused_too(run_python) -> None:
    code = """
        import jaxsync
        jaxsync.simulate_devices(2)
        try:
            jaxsync.simulate_devices(4)
        except jaxsync.errors.BackendStartedError as error:
            print(error.found)
        import jax; print(len(jax.devices()))
    """
    assert run_python(code).stdout == "simulate_devices(2) was called before\n2\n"


def test_a_script_and_its_launcher_that_ask_for_different_numbers_are_told(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import jax, jaxsync, sys\n"
        "jaxsync.simulate_devices(int(sys.argv[1]))\n"
        "print(jax.local_device_count())\n"
    )
    launch = [sys.executable, "-m", "jaxsync", "launch", "-n", "1"]

    def run(*options: str, asked: int) -> subprocess.CompletedProcess[str]:
        command = [*launch, *options, "--", sys.executable, str(script), str(asked)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    differing = run("--devices-per-process", "2", asked=3)
    assert differing.returncode == 1
    assert "Cannot simulate 3 CPU devices: jaxsync launch --devices-per-process has given" in differing.stderr
    for options in (["--devices-per-process", "3"], []):
        alike = run(*options, asked=3)
        assert (alike.returncode, alike.stdout) == (0, "[0] 3\n"), alike.stderr


def test_a_late_call_names_the_array_that_started_the_backend(run_python) -> None:
    code = """
        import jax.numpy as jnp, jaxsync
        weights = jnp.ones(3)
        try:
            jaxsync.simulate_devices(8)
        except RuntimeError as error:
            print(error)
    """
    text = run_python(code).stdout
    assert "Cannot simulate 8 CPU devices: JAX has already started with 1 cpu device.\n" in text
    assert "  - module '__main__' holds the array 'weights', made when it was imported or run\n" in text
    assert "To fix it: call jaxsync.simulate_devices(n) once, before anything makes an array" in text


def test_a_late_call_after_listing_devices_says_so(run_python) -> None:
    code = """
        import jax, jaxsync
        jax.devices()
        try:
            jaxsync.simulate_devices(8)
        except jaxsync.errors.BackendStartedError as error:
            print(error.causes[0])
    """
    expected = "something has listed the devices (jax.devices()) or run a JAX operation\n"
    assert run_python(code).stdout == expected


def test_the_right_count_on_a_small_pool_is_refused(run_python) -> None:
    code = """
        import jax, jaxsync
        jax.devices()
        try:
            jaxsync.simulate_devices(64)
        except jaxsync.errors.BackendStartedError as error:
            print(error.found)
    """
    found = run_python(code, JAX_NUM_CPU_DEVICES="64", PJRT_NPROC="4").stdout
    assert found == ("JAX has already started with 64 cpu devices on a pool of 4 threads, which can starve\n")


def test_the_right_count_on_a_large_pool_is_accepted(run_python) -> None:
    code = "import jax, jaxsync; jax.devices(); jaxsync.simulate_devices(4); print(len(jax.devices()))"
    assert run_python(code, JAX_NUM_CPU_DEVICES="4", PJRT_NPROC="8").stdout == "4\n"


def test_the_users_xla_flags_stay_and_the_call_wins(run_python) -> None:
    flags = "--xla_force_host_platform_device_count=4"
    code = """
        import jaxsync, os
        jaxsync.simulate_devices(8)
        import jax
        print(len(jax.devices()), os.environ["XLA_FLAGS"])
    """
    assert run_python(code, XLA_FLAGS=flags).stdout == f"8 {flags}\n"


def test_a_larger_pool_of_the_users_stays(run_python) -> None:
    code = "import jaxsync, os; jaxsync.simulate_devices(2); print(os.environ['PJRT_NPROC'])"
    assert run_python(code, PJRT_NPROC="99").stdout == "99\n"


def test_a_platform_of_the_configuration_is_named_as_such(run_python) -> None:
    code = """
        import jax
        from jaxsync.devices import platform_causes
        for platform in ("", "cpu", "tpu"):
            jax.config.update("jax_platforms", platform)
            print(*platform_causes())
    """
    found = run_python(code, JAX_PLATFORMS="").stdout
    assert found == "\n\njax.config.jax_platforms is 'tpu': unset it, or make it 'cpu'\n"


@pytest.mark.parametrize("n", [0, -1, True, 2.0, "8"])
def test_what_is_no_count_is_refused(n: object) -> None:
    with pytest.raises(ValueError, match="wanted a number of devices, 1 or more"):
        jaxsync.simulate_devices(n)  # type: ignore[arg-type]
