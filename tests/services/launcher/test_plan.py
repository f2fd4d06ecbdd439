from pathlib import Path

import pytest

from services.common import config
from services.common.config import Recipe
from services.common.errors import UserError
from services.common.grpc_kit import check_port_free
from services.launcher import plan, ports
from services.launcher.children import ChildSpec
from services.launcher.folder import RunFolder
from services.launcher.plan import Addresses, Machine

RECIPE = """
run = "demo"
[data]
reasoning_gym = {task = "chain_sum"}
[trainer]
max_steps = 3
"""


def recipe(tmp_path: Path, *overrides: str) -> Recipe:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return config.load(path, overrides=overrides, environ={})


def specs(loaded: Recipe, tmp_path: Path, addresses: Addresses) -> dict[str, ChildSpec]:
    found = plan.service_specs(
        loaded,
        RunFolder(tmp_path),
        model=Path("/models/a model"),
        addresses=addresses,
        machine=Machine(cores=(0, 1), gpu=False),
        environ={"PATH": "/bin", "HEADRACE_NETWORK__TRAINER": "elsewhere:1"},
    )
    return {spec.name: spec for spec in found}


def test_children_read_what_the_launcher_resolved(tmp_path: Path) -> None:
    loaded = recipe(tmp_path, "generator.replicas=2", "generator.kv_cache_bytes=67108864")
    addresses = plan.choose_addresses(loaded)
    found = specs(loaded, tmp_path, addresses)
    assert list(found) == ["aggregator-0", "scorer-0", "trainer-0", "generator-0", "generator-1"]
    for name, spec in found.items():
        arguments = list(spec.argv[spec.argv.index(str(tmp_path / "recipe.toml")) :])
        given = [arguments[i + 1] for i, word in enumerate(arguments) if word == "--set"]
        read = config.load(Path(arguments[0]), overrides=given, environ={})
        assert read.model.path == "/models/a model"
        assert read.queue.url == addresses.queue_url
        assert read.network.trainer == f"127.0.0.1:{addresses.trainer_port}"
        assert read.network.aggregator == f"127.0.0.1:{addresses.aggregator_port}"
        own = {"trainer-0": addresses.trainer_port, "aggregator-0": addresses.aggregator_port}
        assert read.network.grpc_port == own.get(name, 0)
        assert not any(key.startswith("HEADRACE_") for key in spec.env)
        assert spec.env["PATH"] == "/bin"
        assert spec.ends_run == (name == "trainer-0")
        assert arguments[-4:-2] == ["--replica", name[-1]]


def test_cores_are_shared_out(tmp_path: Path) -> None:
    loaded = recipe(tmp_path, "generator.replicas=3", "generator.kv_cache_bytes=67108864")
    found = specs(loaded, tmp_path, plan.choose_addresses(loaded))
    bound = [found[f"generator-{i}"].env["VLLM_CPU_OMP_THREADS_BIND"] for i in range(3)]
    assert bound == ["0", "1", "0"]
    assert found["trainer-0"].env["OMP_NUM_THREADS"] == "1"
    assert found["scorer-0"].env["OMP_NUM_THREADS"] == "1"
    assert found["generator-0"].env["OMP_NUM_THREADS"] == "1"
    assert found["generator-0"].env["MALLOC_ARENA_MAX"] == "2"


@pytest.mark.parametrize(
    ("service", "environ", "machine", "expected"),
    [
        ("trainer", {}, Machine(cores=tuple(range(8)), gpu=False), {"OMP_NUM_THREADS": "7"}),
        ("trainer", {}, Machine(cores=tuple(range(8)), gpu=True), {"OMP_NUM_THREADS": "8"}),
        ("trainer", {"OMP_NUM_THREADS": "3"}, Machine((0,), gpu=False), {"OMP_NUM_THREADS": "3"}),
        ("scorer", {"MALLOC_ARENA_MAX": "4"}, Machine((0,), gpu=False), {"MALLOC_ARENA_MAX": "4"}),
        ("generator", {}, Machine(cores=(4, 5), gpu=False), {"VLLM_CPU_OMP_THREADS_BIND": "4"}),
        ("generator", {}, Machine(cores=(4, 5), gpu=False), {"HF_HUB_OFFLINE": "1"}),
    ],
)
def test_environment(
    tmp_path: Path,
    service: str,
    environ: dict[str, str],
    machine: Machine,
    expected: dict[str, str],
) -> None:
    found = plan.environment(recipe(tmp_path), service, replica=0, machine=machine, environ=environ)
    assert expected.items() <= found.items()


def test_engines_on_gpus_are_not_bound_to_cores(tmp_path: Path) -> None:
    machine = Machine(cores=(0, 1), gpu=True)
    found = plan.environment(recipe(tmp_path), "generator", replica=0, machine=machine, environ={})
    assert "VLLM_CPU_OMP_THREADS_BIND" not in found


def test_a_dataset_of_the_hub_may_be_fetched(tmp_path: Path) -> None:
    text = RECIPE.replace('reasoning_gym = {task = "chain_sum"}', 'dataset = "org/name"')
    path = tmp_path / "hub.toml"
    path.write_text(text)
    loaded = config.load(path, environ={})
    machine = Machine(cores=(0,), gpu=False)
    trainer = plan.environment(loaded, "trainer", replica=0, machine=machine, environ={})
    assert "HF_HUB_OFFLINE" not in trainer


def test_an_external_queue_server_is_left_as_it_is(tmp_path: Path) -> None:
    loaded = recipe(tmp_path, "queue.url=redis://user:secret@10.0.0.1:6379/0")
    addresses = plan.choose_addresses(loaded)
    assert addresses.queue_port is None
    found = specs(loaded, tmp_path, addresses)
    # A password on a command line could be read by every user of the machine.
    assert not any("secret" in word for spec in found.values() for word in spec.argv)


def test_ports_are_free_and_differ() -> None:
    found = ports.choose(8, host="127.0.0.1")
    assert len(set(found)) == 8
    for port in found:
        check_port_free("127.0.0.1", port)


def test_an_address_of_another_machine_is_a_mistake() -> None:
    with pytest.raises(UserError, match=r"network\.host: no free port on 192\.0\.2\.1"):
        ports.choose(1, host="192.0.2.1")
