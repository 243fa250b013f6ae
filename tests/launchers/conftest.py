import pytest


@pytest.fixture(scope="module")
def ray():
    """Ray with two workers' CPUs, for the tests of a module."""
    from metadist.distributed.world import usable_cpus
    from metadist.launchers.ray.cluster import init_ray, load_ray, shutdown_ray

    if usable_cpus() < 2:
        pytest.skip("two CPUs are needed")
    init_ray()
    yield load_ray()
    shutdown_ray()
