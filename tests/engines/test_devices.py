"""Tests of the devices that a run lists, without starting JAX."""

from __future__ import annotations

import os

import jax
import numpy as np
import pytest

from rlframe import extras
from rlframe.engines import devices, group_rules


@pytest.mark.parametrize("in_process", [True, False])
def test_unused_accelerator_is_reported_with_the_install_command(monkeypatch, in_process):
    monkeypatch.setattr(devices, "find_accelerators", lambda: ["NVIDIA H200", "NVIDIA H200"])
    monkeypatch.setattr(extras, "has", lambda module: False)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    names, text = devices.describe_devices(in_process)
    assert names == ["cpu"]
    assert text == (
        "Devices: cpu. This machine has NVIDIA H200, NVIDIA H200, but JAX uses only the CPU. Fix: pip install "
        "'rlframe[gpu]'"
    )


def test_accelerators_of_the_machine_are_the_devices_of_several_processes(monkeypatch):
    monkeypatch.setattr(devices, "find_accelerators", lambda: ["NVIDIA H200", "NVIDIA H200"])
    monkeypatch.setattr(extras, "has", lambda module: True)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert devices.describe_devices(in_process=False) == (["NVIDIA H200"] * 2, "Devices: 2 x NVIDIA H200.")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    names, text = devices.describe_devices(in_process=False)
    assert names == ["cpu"] and "unset JAX_PLATFORMS" in text


def test_processes_that_share_an_accelerator_get_equal_shares_of_its_memory(monkeypatch):
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.delenv(name, raising=False)
    groups = {"learner": 1, "inferencer": 2, "actor": 4, "monitor": 1}

    def shares(*accelerators):
        rules = group_rules.rules_by_group(groups, 3, accelerators)
        return {group: rules[group].env.get("XLA_PYTHON_CLIENT_MEM_FRACTION") for group in groups}

    assert set(shares("learner").values()) == {None}
    assert shares("learner", "inferencer") == {
        "learner": "0.300",
        "inferencer": "0.300",
        "actor": None,
        "monitor": None,
    }
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.2")
    assert set(shares("learner", "inferencer").values()) == {None}


def test_precision_is_set_for_this_process_and_for_nodes_until_the_run_ends(monkeypatch):
    monkeypatch.delenv("JAX_DEFAULT_MATMUL_PRECISION", raising=False)
    with devices.matmul_precision("highest", in_process=True):
        assert jax.config.jax_default_matmul_precision == "highest"
        rules = group_rules.rules_by_group({"learner": 1, "actor": 2}, 3, ["learner"])
        assert {each.env["JAX_DEFAULT_MATMUL_PRECISION"] for each in rules.values()} == {"highest"}
        lowered = jax.jit(lambda x: x @ x).lower(np.ones((2, 2), np.float32)).as_text()
        assert "HIGHEST" in lowered
    assert jax.config.jax_default_matmul_precision is None and "JAX_DEFAULT_MATMUL_PRECISION" not in os.environ
    with devices.matmul_precision("default", in_process=True):
        assert jax.config.jax_default_matmul_precision is None
