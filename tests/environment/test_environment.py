"""Variables, versions, presence and processors."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from anydevice import environment, registry
from anydevice.environment import (
    availability,
    check_os_kernel,
    clear_environment,
    compare_versions,
    convert_dict_to_env_variables,
    get_int_from_env,
    is_bf16_available,
    is_torch_version,
    override_numa_affinity,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    set_numa_affinity,
    str_to_bool,
)
from anydevice.errors import OptionError, UnknownDeviceError

NAMES = st.text("ABCDEFGH_", min_size=1, max_size=8)


@given(
    before=st.dictionaries(NAMES, st.text("xyz", max_size=3), max_size=4),
    patch=st.dictionaries(NAMES, st.integers(), max_size=4),
    fails=st.booleans(),
)
@settings(max_examples=40)
def test_the_environment_is_afterwards_as_before(before, patch, fails):
    with clear_environment():
        os.environ.update(before)
        try:
            with patch_environment(**{name.lower(): value for name, value in patch.items()}):
                assert dict(os.environ) == {**before, **{n: str(v) for n, v in patch.items()}}
                if fails:
                    raise KeyError
        except KeyError:
            pass
        assert dict(os.environ) == before


def test_a_cleared_environment_comes_back_after_an_error(monkeypatch):
    monkeypatch.setenv("FOO", "bar")
    before = dict(os.environ)

    def fail():
        with clear_environment():
            assert not os.environ
            os.environ["FOO"] = "new"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert dict(os.environ) == before


def test_purging_takes_away_what_was_left_and_puts_back_what_was(monkeypatch):
    monkeypatch.setenv("ACCELERATE_KEPT", "1")
    monkeypatch.delenv("OTHER_LEFT", raising=False)

    @purge_accelerate_environment
    def leave(value):
        os.environ.update(ACCELERATE_LEFT=value, OTHER_LEFT=value, ACCELERATE_KEPT="2")
        return value

    assert leave("x") == "x"
    assert "ACCELERATE_LEFT" not in os.environ
    assert os.environ["ACCELERATE_KEPT"] == "1"
    assert os.environ.pop("OTHER_LEFT") == "x"


def test_purging_a_class_reaches_its_subclasses():
    seen = []

    @purge_accelerate_environment
    class Base:
        def __init_subclass__(cls, **kwargs):
            seen.append(cls.__name__)
            super().__init_subclass__(**kwargs)

        def test_one(self):
            os.environ["ACCELERATE_ONE"] = "1"

        def helper(self):
            os.environ["ACCELERATE_HELPER"] = "1"

    class Derived(Base):
        def test_two(self):
            os.environ["ACCELERATE_TWO"] = "1"
            raise ValueError("a test that fails")

    Derived().test_one()
    with pytest.raises(ValueError, match="fails"):
        Derived().test_two()
    assert "ACCELERATE_ONE" not in os.environ
    assert "ACCELERATE_TWO" not in os.environ
    assert seen == ["Derived"]
    Derived().helper()
    assert os.environ.pop("ACCELERATE_HELPER") == "1"


def test_purging_a_coroutine(monkeypatch):
    import asyncio

    @purge_accelerate_environment
    async def leave():
        os.environ["ACCELERATE_LATER"] = "1"
        await asyncio.sleep(0)
        return os.environ["ACCELERATE_LATER"]

    assert asyncio.run(leave()) == "1"
    assert "ACCELERATE_LATER" not in os.environ


@pytest.mark.parametrize(
    ("text", "value"), [("Yes", 1), ("ON", 1), ("1", 1), (" true ", 1), ("no", 0), ("Off", 0)]
)
def test_text_as_yes_or_no(text, value):
    assert str_to_bool(text) == value
    assert str_to_bool(text, to_bool=True) is bool(value)


def test_flags_and_numbers_of_the_environment(monkeypatch):
    monkeypatch.setenv("A_FLAG", "yes")
    monkeypatch.setenv("EMPTY", " ")
    monkeypatch.setenv("A_NUMBER", "4")
    monkeypatch.setenv("WRONG", "maybe")
    assert parse_flag_from_env("A_FLAG") is True
    assert parse_flag_from_env("EMPTY", True) is True
    assert parse_flag_from_env("NOT_SET_ANYWHERE") is False
    assert parse_choice_from_env("A_FLAG") == "yes"
    assert parse_choice_from_env("NOT_SET_ANYWHERE", "fp16") == "fp16"
    assert get_int_from_env(["NOT_SET_ANYWHERE", "A_NUMBER"], 1) == 4
    assert get_int_from_env(["NOT_SET_ANYWHERE"], 1) == 1
    with pytest.raises(OptionError, match="WRONG in the environment: 'maybe'"):
        parse_flag_from_env("WRONG")
    with pytest.raises(OptionError, match="WRONG='maybe'"):
        get_int_from_env(["WRONG"], 1)


def test_variables_as_lines():
    assert convert_dict_to_env_variables({"A": 1, "B_C": "x y"}) == ["A=1\n", "B_C=x y\n"]
    for name, value in (("A", "1\nB=2"), ("A=B", "1"), ("A", "1;rm"), ("", "1")):
        with pytest.raises(OptionError):
            convert_dict_to_env_variables({name: value})


def test_versions():
    assert is_torch_version(">=", "2.6")
    assert is_torch_version("==", Version(torch.__version__).base_version)
    assert not is_torch_version("<", "2.6.0")
    assert compare_versions("torch", ">", "1.0")
    assert compare_versions(Version("1.2"), "!=", "1.3")
    with pytest.raises(OptionError, match="operation='=>'"):
        is_torch_version("=>", "2")
    with pytest.raises(OptionError, match="'two' is not a version"):
        is_torch_version(">", "two")


def test_an_old_kernel_is_warned_of(monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.release", lambda: "4.19.0-amd64")
    with pytest.warns(UserWarning, match=r"kernel 4\.19\.0 is older"):
        check_os_kernel()
    monkeypatch.setattr("platform.release", lambda: "6.1.0-13")
    check_os_kernel()


def test_devices_are_asked_of_the_registry(sim, monkeypatch):
    assert availability("is_sim_available")()
    assert availability("is_sim_available")(check_device=True)
    assert availability("is_cpu_available")()
    for name in ("npu", "cuda", "mps", "torch_xla", "hpu"):
        assert availability(f"is_{name}_available")() is False
    assert availability("is_sim_available")(min_version="99") is False
    assert availability("is_sim_available").__name__ == "is_sim_available"


def test_packages_are_looked_for():
    assert availability("is_safetensors_available")()
    assert availability("is_pytest_available")()
    assert not availability("is_no_such_package_available")()
    assert availability("something_else") is None


def test_bf16_is_the_first_devices_answer(sim, monkeypatch):
    assert is_bf16_available(ignore_tpu=True) is True
    kind = type(registry.get_backend("sim"))
    monkeypatch.setattr(kind, "supports_dtype", lambda self, dtype: dtype != torch.bfloat16)
    assert is_bf16_available() is False


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no processes")
def test_a_process_is_bound_to_the_processors_of_its_devices_node(sim, monkeypatch, tmp_path):
    allowed = os.sched_getaffinity(0)
    (tmp_path / "node1").mkdir()
    first = min(allowed)
    (tmp_path / "node1" / "cpulist").write_text(f"{first}-{first},100000\n")
    monkeypatch.setattr(environment.affinity, "_NODES", tmp_path)
    bound = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: bound.append((pid, set(cpus))))
    kind = type(registry.get_backend("sim"))
    override_numa_affinity(1)
    assert bound == []  # the simulator is near to no node
    monkeypatch.setattr(kind, "numa_node", lambda self, index: index)
    override_numa_affinity(1)
    assert bound == [(0, {first})]
    set_numa_affinity.cache_clear()
    set_numa_affinity(1)
    set_numa_affinity(1)
    assert len(bound) == 2
    set_numa_affinity.cache_clear()
    override_numa_affinity(0)  # no such node in the system
    assert len(bound) == 2
    with pytest.raises(OptionError, match="local_process_index=-1"):
        override_numa_affinity(-1)
    with pytest.raises(UnknownDeviceError, match="process 2"):
        override_numa_affinity(2)
