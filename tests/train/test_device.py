"""What is asked of device, versions and memory pool; of Ascend what is handed over, not run."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace

import mindspore as ms
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import make_config

from tuner.config.schema import MemoryConfig
from tuner.errors import BadInputError
from tuner.train import device as device_module
from tuner.train.device import (
    ALLOCATOR_VARIABLE,
    allocator_variables,
    device_model,
    has_ascend,
    open_device,
    pool_arguments,
    set_pool_once,
)
from tuner.train.graph import compile_api, has_compiled_anything, level_refusal, level_warning

pytestmark = pytest.mark.mindspore

VERSIONS = ["2.7.0rc1", "2.7.0", "2.7.1", "2.8.0", "2.9.0", "2.10.0"]
# `\d+(.\d+)?GB`, and as MindSpore 2.10 writes it.
MEMORY_TEXT = re.compile(r"([1-9][0-9]*(\.)?[0-9]*|0\.[0-9]*)GB")


@pytest.mark.parametrize("version", [*VERSIONS, "2.6.0", "2.11.0", "3.0.0"])
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_levels_without_whole_graphs_go_anywhere(level, version):
    for device_name in ("CPU", "Ascend"):
        for mode in ("static", "dynamic"):
            assert level_refusal(level, mode, device_name, version) is None
    assert level_warning(level, version) is None


@pytest.mark.parametrize("version", VERSIONS)
def test_whole_graphs_need_ascend_and_static_shapes(version):
    assert level_refusal("O2", "static", "Ascend", version) is None
    for mode, device_name in (("static", "CPU"), ("dynamic", "CPU"), ("dynamic", "Ascend")):
        assert level_refusal("O2", mode, device_name, version) == (
            f"graph.jit_level O2 needs Ascend with graph.mode static (here: {device_name}, {mode})"
        )


@pytest.mark.parametrize("version", ["2.6.0", "2.11.0", "2.11.0rc1", "3.0.0", "unknown"])
def test_whole_graphs_are_refused_where_the_version_is_not_known_to_take_them(version):
    refusal = level_refusal("O2", "static", "Ascend", version)
    assert refusal == f"graph.jit_level O2 needs MindSpore 2.7 to 2.10 (here: {version})"


@pytest.mark.parametrize("version", VERSIONS)
def test_o3_is_gone_everywhere(version):
    assert "O3 is gone" in level_refusal("O3", "static", "Ascend", version)


def test_whole_graphs_are_warned_about_from_2_9():
    warned = [level_warning("O2", version) is not None for version in VERSIONS]
    assert warned == [False, False, False, False, True, True]
    assert "deprecated since MindSpore 2.9" in level_warning("O2", "2.10.0")


def test_o2_and_flash_are_refused_when_the_device_is_opened():
    for changes, words in (
        ({"graph.jit_level": "O2"}, "graph.jit_level O2 needs Ascend"),
        ({"graph.attention": "flash"}, "flash attention needs Ascend \\(here: CPU\\)"),
    ):
        with pytest.raises(BadInputError, match=words):
            open_device(make_config({"device": "cpu", **changes}))


# Names of MindSpore that have moved


def module_with(functions, cells):
    return SimpleNamespace(ms_compile_cache=functions, cells_compile_cache=cells)


def test_compiled_graphs_are_found_under_both_names():
    old = SimpleNamespace(common=SimpleNamespace(api=module_with(set(), {1: set()})))
    new = SimpleNamespace(
        common=SimpleNamespace(), graph=SimpleNamespace(api=module_with({"step"}, {}))
    )
    assert has_compiled_anything(old) is False
    assert has_compiled_anything(new) is True
    old.common.api.cells_compile_cache[2] = {"phase"}
    assert has_compiled_anything(old) is True


def test_where_the_names_are_gone_nothing_is_claimed():
    renamed = SimpleNamespace(graph=SimpleNamespace(api=SimpleNamespace(other=set())))
    for package in (SimpleNamespace(), SimpleNamespace(common=None), renamed):
        assert has_compiled_anything(package) is None
    assert compile_api(SimpleNamespace()) is None


def test_the_installed_version_shows_its_graphs():
    assert isinstance(has_compiled_anything(), bool)


# Ascend or not


def ascend(**functions):
    return SimpleNamespace(device_context=SimpleNamespace(ascend=SimpleNamespace(**functions)))


def failing():
    raise RuntimeError("Device Ascend not exist.")


@pytest.mark.parametrize(
    ("package", "is_there"),
    [
        (SimpleNamespace(), False),
        (SimpleNamespace(device_context=SimpleNamespace()), False),
        (ascend(is_available=lambda: False, device_count=failing), False),
        (ascend(is_available=lambda: True), True),
        (ascend(is_available=lambda: True, device_count=lambda: 8), True),
        (ascend(is_available=lambda: True, device_count=lambda: 0), False),
        (ascend(is_available=lambda: True, device_count=failing), False),
        (ascend(is_available=failing), False),
    ],
)
def test_ascend_is_looked_for_with_care(package, is_there):
    assert has_ascend(package) is is_there


# Memory


def test_memory_is_accepted_on_cpu_with_a_sentence(monkeypatch):
    monkeypatch.delenv(ALLOCATOR_VARIABLE, raising=False)
    config = make_config({"device": "cpu", "memory.max_size_gb": 30, "memory.enable_vmm": True})
    (note,) = open_device(config).notes
    assert note == "memory has no effect on CPU: MindSpore has a memory pool on Ascend only"
    assert ALLOCATOR_VARIABLE not in os.environ
    assert open_device(make_config({"device": "cpu"})).notes == ()


@pytest.mark.parametrize(
    ("memory", "arguments"),
    [
        (MemoryConfig(max_size_gb=30.0), {"max_size": "30GB"}),
        (
            MemoryConfig(max_size_gb=57.5, init_size_gb=2.25, increase_size_gb=0.5),
            {"max_size": "57.5GB", "init_size": "2.25GB", "increase_size": "0.5GB"},
        ),
        (MemoryConfig(optimize_level="O1"), {"optimize_level": "O1"}),
        (MemoryConfig(enable_vmm=False), {}),
    ],
)
def test_sizes_are_written_as_mindspore_reads_them(memory, arguments):
    assert pool_arguments(memory) == arguments


@given(st.floats(0.01, 1024.0))
@settings(max_examples=200)
def test_every_size_is_a_text_that_mindspore_reads(size_gb):
    text = pool_arguments(MemoryConfig(increase_size_gb=size_gb))["increase_size"]
    assert MEMORY_TEXT.fullmatch(text)
    assert abs(float(text[:-2]) - size_gb) <= 0.005 + 1e-9
    assert float(text[:-2]) > 0


@pytest.mark.parametrize(
    ("before", "enable_vmm", "after"),
    [
        ("", True, "enable_vmm:true"),
        ("", False, "enable_vmm:false"),
        ("enable_vmm:true", False, "enable_vmm:false"),
        ("vmm_align_size:2, enable_vmm:true,", False, "vmm_align_size:2,enable_vmm:false"),
    ],
)
def test_other_settings_of_the_allocator_stay(before, enable_vmm, after):
    variables = allocator_variables(MemoryConfig(enable_vmm=enable_vmm), before)
    assert variables == {ALLOCATOR_VARIABLE: after}


def test_without_enable_vmm_the_variable_is_left_alone():
    assert allocator_variables(MemoryConfig(max_size_gb=1.0), "enable_vmm:true") == {}


def test_a_pool_is_set_once():
    taken = []
    assert set_pool_once(lambda **sizes: taken.append(sizes), {"max_size": "3GB"})
    assert taken == [{"max_size": "3GB"}]

    def again(**sizes):
        raise RuntimeError("The 'set_memory' can not be set repeatedly.")

    assert not set_pool_once(again, {"max_size": "3GB"})


def test_what_mindspore_refuses_is_bad_input_and_other_failures_are_not():
    def refusing(**sizes):
        raise ValueError("The memory value should not be 0GB")

    def broken(**sizes):
        raise RuntimeError("driver")

    with pytest.raises(BadInputError, match=r"refuses the section memory \(max_size 3GB\)"):
        set_pool_once(refusing, {"max_size": "3GB"})
    with pytest.raises(RuntimeError, match="driver"):
        set_pool_once(broken, {"max_size": "3GB"})


def test_on_ascend_variable_device_and_pool_come_in_that_order(monkeypatch):
    """What MindSpore is told; that it follows is not shown here."""
    told = []

    def set_device(name, device_id):
        told.append((name, device_id, os.environ.get(ALLOCATOR_VARIABLE)))

    monkeypatch.setattr(device_module, "has_ascend", lambda: True)
    monkeypatch.setattr(ms, "set_device", set_device)
    monkeypatch.setattr(ms.runtime, "set_memory", lambda **sizes: told.append(sizes))
    monkeypatch.setenv(ALLOCATOR_VARIABLE, "vmm_align_size:2")
    changes = {
        "memory.max_size_gb": 30, "memory.enable_vmm": True, "memory.optimize_level": "O1",
        "graph.mode": "dynamic",
    }  # fmt: skip
    opened = open_device(make_config(changes), device_id=3)
    assert told == [
        ("Ascend", 3, "vmm_align_size:2,enable_vmm:true"),
        {"max_size": "30GB", "optimize_level": "O1"},
    ]
    assert opened.name == "Ascend"
    (note,) = opened.notes
    assert "optimize_level O1 plans memory for shapes that are known" in note


@pytest.mark.parametrize(
    ("hal", "model"),
    [
        (SimpleNamespace(get_device_name=lambda number: "Ascend910B2"), "Ascend910B2"),
        (SimpleNamespace(get_device_name=lambda number: None), ""),
        (SimpleNamespace(), ""),
        (None, ""),
    ],
)
def test_the_model_of_an_npu_is_what_mindspore_says_if_it_says_so(hal, model):
    assert device_model("Ascend", SimpleNamespace(hal=hal)) == model
    assert device_model("CPU", SimpleNamespace(hal=hal)) == ""
