"""Memory limit and killed processes of a control group (cgroup versions 1 and 2)."""

from pathlib import Path

import pytest

from espalier.hf.machine import machine_memory as module
from espalier.hf.machine.machine_memory import limits, machine_memory, memory_kills

GIGA = 10**9


def write(folder: Path, **files: str) -> None:
    """Write files of a control group; two underscores in a name stand for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_limits_of_a_group_and_of_those_around_it(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    groups = tmp_path / "groups"
    own.write_text("0::/site/node\n")
    write(
        groups / "site",
        memory__max="8000",
        memory__current="7000",
        memory__stat="anon 1\ninactive_file 2000",
    )
    write(groups / "site" / "node", memory__max="max", memory__current="10")
    assert list(limits(own, groups)) == [(8000, 5000)]
    write(groups / "site" / "node", memory__max="100", memory__current="10")
    assert list(limits(own, groups)) == [(100, 10), (8000, 5000)]


def test_limits_of_the_first_version(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    groups = tmp_path / "groups"
    own.write_text("5:cpu,cpuacct:/x\n4:memory:/x\n")
    none = str(2**63 - 4096)
    write(groups / "memory", memory__limit_in_bytes=none, memory__usage_in_bytes="1")
    write(
        groups / "memory" / "x",
        memory__limit_in_bytes="500",
        memory__usage_in_bytes="90",
        memory__stat="total_inactive_file 50",
    )
    assert list(limits(own, groups)) == [(500, 40)]


def test_the_least_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total, free = machine_memory()
    monkeypatch.setattr(
        module, "limits", lambda own, groups: iter([(total * 2, 0), (GIGA // 10, GIGA // 20)])
    )
    assert machine_memory() == (GIGA // 10, min(free, GIGA // 20))
    monkeypatch.setattr(module, "limits", lambda own, groups: iter([(GIGA // 10, GIGA)]))
    assert machine_memory() == (GIGA // 10, 0)
    assert list(limits(tmp_path / "no", tmp_path)) == []


def test_kills_for_memory_are_counted(tmp_path: Path) -> None:
    """The count is that of the process's own group.

    In a container, that group is mounted at the root of the hierarchy.
    """
    own = tmp_path / "cgroup"
    groups = tmp_path / "groups"
    own.write_text("0::/site/node\n")
    write(groups, memory__events="low 0\noom 9\noom_kill 7")
    assert memory_kills(own, groups) == 7
    write(groups / "site" / "node", memory__events="low 0\noom 3\noom_kill 2")
    assert memory_kills(own, groups) == 2


def test_killed_processes_in_the_first_version(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    groups = tmp_path / "groups"
    own.write_text("5:cpu,cpuacct:/x\n4:memory:/docker/x\n0::/\n")
    write(groups / "memory", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 4")
    assert memory_kills(own, groups) == 4


def test_system_without_kill_counts_gives_none(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    groups = tmp_path / "groups"
    assert memory_kills(own, groups) is None
    own.write_text("4:memory:/x\n")
    # Kernels before Linux 4.13 do not write the counter ``oom_kill``.
    write(groups / "memory" / "x", memory__oom_control="oom_kill_disable 0\nunder_oom 0")
    assert memory_kills(own, groups) is None
